/*
 * Scheduler: one lane per pool; waiting requests become batches, finished batches become answers.
 *
 * Once a turn, after all events were taken in, each lane seals at most one batch across connections and
 * sessions: at most SRV_BATCH_BYTES_MAX of rows or one item. Two batches of a lane may be in flight, so that
 * the next one is written while one computes. Answers are given strictly in the order of sealing: commits of
 * a sequence happen in that order, and an item that was planned on top of a refused one is found by its
 * epoch.
 *
 * Items that must do no work (cancelled, expired, stale) keep their place in the order but are not given to
 * the backend. A batch that would be empty is not submitted.
 */
#include "server/internal.h"

#include <string.h>

#include "core/format.h"
#include "core/memory.h"

/* ---- lanes ---- */

enum kv_status srv_lane_open(struct srv_server *server, struct kv_pool *pool, struct kv_error *err)
{
	struct srv_lane *lane = &server->lanes[pool->pool_idx];
	const struct kv_pool_spec *spec = pool->spec;
	const uint64_t area_bytes =
		kv_plan_area_bytes(spec, server->caps.frame_bytes_max) + kv_plan_moves_bytes(spec);

	memset(lane, 0, sizeof(*lane));
	lane->pool = pool;
	kv_list_init(&lane->queue);
	lane->row_bytes = kv_alloc(2 * (size_t)spec->n_layers, sizeof(*lane->row_bytes));
	bool is_complete = lane->row_bytes != NULL;

	for (uint32_t i = 0; i < SRV_PLANS_PER_LANE; i++) {
		struct srv_flight *flight = &lane->flights[i];

		flight->entries = kv_alloc(KV_PLAN_ITEMS_MAX, sizeof(*flight->entries));
		flight->plan.area = server->backend->ops->host_alloc(server->backend, area_bytes);
		flight->plan.area_bytes = area_bytes;
		is_complete = is_complete && flight->entries && flight->plan.area;
	}
	if (!is_complete) {
		srv_lane_close(server, lane);
		return kv_fail(err, KV_NO_MEMORY, "batch plans of pool \"%s\": %llu bytes", spec->name,
			(unsigned long long)area_bytes * SRV_PLANS_PER_LANE);
	}
	for (uint32_t l = 0; l < spec->n_layers; l++) {
		lane->row_bytes[l] = spec->layers[l].k->row_bytes;
		lane->row_bytes[spec->n_layers + l] = spec->layers[l].v->row_bytes;
	}
	lane->geometry = (struct kvp_geometry){
		.n_layers = spec->n_layers,
		.q_heads = spec->q_heads,
		.kv_heads = spec->kv_heads,
		.k_head_dim = spec->k_head_dim,
		.v_head_dim = spec->v_head_dim,
		.fingerprint = spec->fingerprint,
		.k_row_bytes = lane->row_bytes,
		.v_row_bytes = lane->row_bytes + spec->n_layers,
	};
	return KV_OK;
}

void srv_lane_close(struct srv_server *server, struct srv_lane *lane)
{
	for (uint32_t i = 0; i < SRV_PLANS_PER_LANE; i++) {
		struct srv_flight *flight = &lane->flights[i];

		if (flight->plan.area)
			server->backend->ops->host_free(
				server->backend, flight->plan.area, flight->plan.area_bytes);
		kv_free(flight->entries);
	}
	kv_free(lane->row_bytes);
	memset(lane, 0, sizeof(*lane));
}

bool srv_lane_is_quiet(const struct srv_lane *lane)
{
	return lane->n_flights == 0;
}

bool srv_lane_is_idle(const struct srv_lane *lane)
{
	return lane->n_queued == 0 && lane->n_flights == 0 && lane->pool->n_copies == 0;
}

void srv_lane_enqueue(struct srv_lane *lane, struct srv_request *request)
{
	kv_sm_move(&request->sm, REQ_QUEUED);
	kv_list_push_back(&lane->queue, &request->link);
	lane->n_queued++;
}

static struct srv_flight *flight_at(struct srv_lane *lane, uint32_t i)
{
	return &lane->flights[(lane->flight_first + i) % SRV_PLANS_PER_LANE];
}

/* ---- sealing ---- */

static bool wants_moves(const struct srv_server *server, const struct srv_lane *lane)
{
	for (uint32_t i = 0; i < SRV_MOVERS; i++) {
		const struct srv_mover *mover = server->movers[i];

		if (mover && mover->lane == lane && !mover->is_sealed)
			return true;
	}
	return false;
}

/* Copies do not wait for items: a sequence that nobody asks about any more still has to become whole. */
static bool has_something_to_seal(const struct srv_server *server, const struct srv_lane *lane)
{
	return (lane->n_queued > 0 || lane->pool->n_copies > 0 || wants_moves(server, lane)) &&
		!srv_audit_holds(server, lane);
}

static bool can_add(const struct srv_flight *flight)
{
	return flight->n_entries < KV_PLAN_ITEMS_MAX && flight->plan.row_bytes < SRV_BATCH_BYTES_MAX;
}

/* Moves items of the request into the batch; false when the batch is full. */
static bool seal_request(struct srv_server *server, struct srv_flight *flight, struct srv_request *request)
{
	if (request->n_items_sealed == 0) {
		request->is_expired = request->deadline_ns != 0 && server->now_ns >= request->deadline_ns;
		request->sealed_ns = server->now_ns;
	}
	for (; request->n_items_sealed < request->n_items; request->n_items_sealed++) {
		struct kv_item *item = &request->items[request->n_items_sealed];
		struct srv_entry entry = { request, request->n_items_sealed, KV_ROW_NONE };

		if (item->status != KV_OK)
			continue; /* refused when it was planned */
		if (!can_add(flight))
			return false;
		if (request->is_cancelled)
			item->status = KV_CANCELLED;
		else if (request->is_expired)
			item->status = KV_DEADLINE;
		else if (!kv_item_is_stale(item) &&
			!kv_plan_add(&flight->plan, &request->frame, item, &entry.result_idx))
			return false;
		flight->entries[flight->n_entries++] = entry;
	}
	return true;
}

static uint32_t collect(struct srv_lane *lane, struct srv_request *waiting[],
	struct kv_candidate candidates[], uint32_t n_max)
{
	uint32_t n = 0;

	kv_list_for_each (node, &lane->queue) {
		struct srv_request *request = kv_container_of(node, struct srv_request, link);

		if (n == n_max)
			break;
		waiting[n] = request;
		candidates[n] = (struct kv_candidate){
			/* A closed session has nothing queued, so the handle's slot names it. */
			.session_idx = (uint32_t)(request->header.session & 0xFFFF),
			.tenant_idx = request->payer,
			.weight = kv_tenant_policy_of(kv_domain_tenants(lane->pool->domain), request->payer)
					  ->weight,
			.n_bytes = request->charged_bytes,
			.is_decode = request->header.opcode == KVP_OP_DECODE ||
				request->header.opcode == KVP_OP_APPEND_DECODE,
			.is_ready = true,
		};
		n++;
	}
	return n;
}

#define SEAL_CANDIDATES_MAX 512u

/* ---- moves of blocks ---- */

/* The moves of at most one, taking turns, so that each is told only of its own. */
static void seal_moves(struct srv_server *server, struct srv_lane *lane, struct srv_flight *flight)
{
	for (uint32_t i = 0; i < SRV_MOVERS && !flight->mover; i++) {
		struct srv_mover *mover = server->movers[(server->turns + i) % SRV_MOVERS];

		if (!mover || mover->lane != lane || mover->is_sealed)
			continue;
		mover->seal(mover, &flight->plan);
		if (flight->plan.n_moves == 0)
			continue;
		mover->is_sealed = true;
		flight->mover = mover;
	}
}

static void seal(struct srv_server *server, struct srv_lane *lane)
{
	struct srv_request *waiting[SEAL_CANDIDATES_MAX];
	struct kv_candidate candidates[SEAL_CANDIDATES_MAX];
	uint32_t order[SEAL_CANDIDATES_MAX];
	uint8_t scratch[SEAL_CANDIDATES_MAX];
	uint32_t links[SEAL_CANDIDATES_MAX];

	if (!has_something_to_seal(server, lane) || lane->n_flights == SRV_PLANS_PER_LANE)
		return;
	const uint32_t n = collect(lane, waiting, candidates, SEAL_CANDIDATES_MAX);
	const uint32_t n_order = kv_plan_pick(candidates, n, order, scratch, links);
	struct srv_flight *flight = flight_at(lane, lane->n_flights);

	kv_plan_begin(&flight->plan, lane->pool, flight->plan.area, flight->plan.area_bytes);
	flight->plan.holds_later = true;
	flight->n_entries = 0;
	flight->mover = NULL;
	flight->is_answered = false;
	flight->is_submitted = flight->is_done = false;
	flight->sealed_ns = server->now_ns;
	seal_moves(server, lane, flight);
	for (uint32_t i = 0; i < n_order; i++) {
		struct srv_request *request = waiting[order[i]];

		if (!seal_request(server, flight, request))
			break;
		kv_list_remove(&request->link);
		lane->n_queued--;
		kv_sm_move(&request->sm, REQ_RUNNING);
		srv_histogram_add(
			&server->counters.queue, srv_us_since(request->sealed_ns, request->queued_ns));
		if (request->session)
			request->session->n_queued--;
		server->has_finished = true; /* CLOSE may wait for exactly this */
	}
	lane->n_flights++;
	server->counters.batch_items += flight->n_entries;
}

static void submit(struct srv_server *server, struct srv_lane *lane)
{
	for (uint32_t i = 0; i < lane->n_flights; i++) {
		struct srv_flight *flight = flight_at(lane, i);
		struct kv_error err = { 0 };

		if (flight->is_submitted)
			continue;
		if (flight->plan.batch.n_results == 0 && flight->plan.batch.n_copies == 0) {
			flight->is_submitted = flight->is_done = true;
			continue;
		}
		flight->plan.batch.pool = lane->pool->backend_pool;
		flight->plan.batch.user = flight;
		const enum kv_status status =
			server->backend->ops->submit(server->backend, &flight->plan.batch, &err);

		/* Order is kept. Its queue has room again when a batch is done, which is an event; a backend
		 * that was busy with something else is asked again soon, but not in every turn. */
		lane->is_refused = status == KV_BUSY_RETRY;
		if (lane->is_refused)
			return;
		if (status != KV_OK) {
			srv_log(SRV_LOG_ERROR, "device lost: %s", err.msg);
			server->is_lost = true;
			return;
		}
		flight->is_submitted = true;
		flight->batch_number = ++server->counters.batches;
	}
}

void srv_scheduler_seal(struct srv_server *server)
{
	for (uint32_t i = 0; i < KV_POOLS_MAX && !server->is_lost; i++) {
		struct srv_lane *lane = &server->lanes[i];

		if (!lane->pool || (srv_lane_is_idle(lane) && !wants_moves(server, lane)))
			continue;
		seal(server, lane);
		submit(server, lane);
		/* Whatever became of it: nobody may give its blocks away. */
		for (uint32_t f = 0; f < lane->n_flights; f++)
			kv_plan_hold(&flight_at(lane, f)->plan);
	}
}

/* ---- reaping ---- */

static void finish_entry(struct srv_flight *flight, const struct srv_entry *entry)
{
	struct srv_request *request = entry->request;
	struct kv_item *item = &request->items[entry->item_idx];

	if (entry->result_idx != KV_ROW_NONE) {
		const struct kv_result *result = &flight->plan.batch.results[entry->result_idx];

		item->status =
			flight->plan.batch.status != KV_OK ? flight->plan.batch.status : result->status;
		item->layer = result->layer;
		item->row = result->row;
		/* Its items share the batch, and its time. */
		if (request->timed_batch != flight->batch_number) {
			request->timed_batch = flight->batch_number;
			request->copy_in_us += flight->plan.batch.copy_in_us;
			request->kernel_us += flight->plan.batch.kernel_us;
			request->copy_out_us += flight->plan.batch.copy_out_us;
		}
	}
	kv_item_finish(item, request->frame.layer_first, request->frame.n_layers);
	request->n_items_done++;
	if (request->n_items_done == request->n_items)
		srv_request_finish(request);
}

static void end_plans(struct srv_lane *lane)
{
	while (lane->n_flights > 0 && flight_at(lane, 0)->is_answered) {
		kv_plan_end(&flight_at(lane, 0)->plan);
		lane->flight_first = (lane->flight_first + 1) % SRV_PLANS_PER_LANE;
		lane->n_flights--;
	}
}

void srv_scheduler_end_plans(struct srv_server *server)
{
	for (uint32_t i = 0; i < KV_POOLS_MAX; i++) {
		if (server->lanes[i].pool)
			end_plans(&server->lanes[i]);
	}
}

static void finish_moves(struct srv_lane *lane, struct srv_flight *flight)
{
	const enum kv_status moved = flight->plan.batch.status;
	const struct kv_result result = flight->plan.batch.results[flight->plan.move_result_idx];
	struct srv_mover *mover = flight->mover;

	end_plans(lane); /* this one, too: what its mover does next may look at what is in flight */
	mover->is_sealed = false;
	mover->done(mover, moved != KV_OK ? moved : (enum kv_status)result.status, &result);
}

static struct srv_flight *next_to_answer(struct srv_lane *lane)
{
	for (uint32_t f = 0; f < lane->n_flights && flight_at(lane, f)->is_done; f++) {
		if (!flight_at(lane, f)->is_answered)
			return flight_at(lane, f);
	}
	return NULL;
}

/*
 * Answers first: the blocks are given up when the answers are on their way, and before anybody can have acted
 * on one (take_events()).
 */
static void finish_flights(struct srv_server *server, struct srv_lane *lane)
{
	struct srv_flight *flight;

	while ((flight = next_to_answer(lane))) {
		const struct kv_batch *batch = &flight->plan.batch;

		if (batch->n_results > 0 || batch->n_copies > 0) {
			srv_histogram_add(&server->counters.copy_in, batch->copy_in_us);
			srv_histogram_add(&server->counters.kernel, batch->kernel_us);
			srv_histogram_add(&server->counters.copy_out, batch->copy_out_us);
		}
		for (uint32_t i = 0; i < flight->n_entries; i++)
			finish_entry(flight, &flight->entries[i]);
		flight->is_answered = true;
		if (flight->mover)
			finish_moves(lane, flight);
	}
}

void srv_scheduler_reap(struct srv_server *server)
{
	struct kv_batch *batch;

	while ((batch = server->backend->ops->reap(server->backend))) {
		if (batch == &server->probe.batch) {
			srv_probe_reaped(server);
			continue;
		}
		struct srv_flight *flight = batch->user;

		flight->is_done = true;
		server->batch_ns = server->now_ns - flight->sealed_ns;
		if (batch->status != KV_OK && !server->is_lost) {
			srv_log(SRV_LOG_ERROR, "device lost: a batch failed");
			server->is_lost = true;
		}
	}
	for (uint32_t i = 0; i < KV_POOLS_MAX; i++) {
		if (server->lanes[i].pool)
			finish_flights(server, &server->lanes[i]);
	}
}

bool srv_scheduler_has_work(const struct srv_server *server)
{
	for (uint32_t i = 0; i < KV_POOLS_MAX; i++) {
		const struct srv_lane *lane = &server->lanes[i];

		if (!lane->pool)
			continue;
		if (has_something_to_seal(server, lane) && lane->n_flights < SRV_PLANS_PER_LANE)
			return true;
		for (uint32_t f = 0; f < lane->n_flights; f++) {
			const struct srv_flight *flight =
				&lane->flights[(lane->flight_first + f) % SRV_PLANS_PER_LANE];

			/* One that is done behind another waits for that one's event. */
			if ((f == 0 && flight->is_done) || (!flight->is_submitted && !lane->is_refused))
				return true;
		}
	}
	return false;
}

uint64_t srv_scheduler_oldest_ns(const struct srv_server *server)
{
	uint64_t oldest_ns = 0;

	for (uint32_t i = 0; i < KV_POOLS_MAX; i++) {
		const struct srv_lane *lane = &server->lanes[i];

		for (uint32_t f = 0; lane->pool && f < lane->n_flights; f++) {
			const struct srv_flight *flight =
				&lane->flights[(lane->flight_first + f) % SRV_PLANS_PER_LANE];
			const uint64_t age_ns = server->now_ns - flight->sealed_ns;

			if (!flight->is_done && age_ns > oldest_ns)
				oldest_ns = age_ns;
		}
	}
	return oldest_ns;
}

bool srv_scheduler_is_refused(const struct srv_server *server)
{
	for (uint32_t i = 0; i < KV_POOLS_MAX; i++)
		if (server->lanes[i].pool && server->lanes[i].is_refused)
			return true;
	return false;
}

uint32_t srv_scheduler_in_flight(const struct srv_server *server)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < KV_POOLS_MAX; i++) {
		const struct srv_lane *lane = &server->lanes[i];

		for (uint32_t f = 0; lane->pool && f < lane->n_flights; f++) {
			const struct srv_flight *flight =
				&lane->flights[(lane->flight_first + f) % SRV_PLANS_PER_LANE];

			/* Done without work, or reaped: the backend has nothing of it (any more). */
			n += flight->is_submitted && !flight->is_done;
		}
	}
	return n;
}

void srv_scheduler_lose(struct srv_server *server)
{
	for (uint32_t i = 0; i < KV_POOLS_MAX; i++) {
		struct srv_lane *lane = &server->lanes[i];

		if (!lane->pool)
			continue;
		/* Batches that never reached the device, and everything still waiting, fail in order. */
		for (uint32_t f = 0; f < lane->n_flights; f++) {
			struct srv_flight *flight = flight_at(lane, f);

			if (!flight->is_submitted) {
				flight->plan.batch.status = KV_DEVICE_LOST;
				flight->is_submitted = flight->is_done = true;
			}
		}
		finish_flights(server, lane);
		end_plans(lane);
		if (lane->n_flights > 0)
			continue; /* the backend still has some: called again when they are reaped */
		kv_list_for_each_safe (node, &lane->queue) {
			struct srv_request *request = kv_container_of(node, struct srv_request, link);

			kv_list_remove(node);
			lane->n_queued--;
			kv_sm_move(&request->sm, REQ_RUNNING);
			if (request->session)
				request->session->n_queued--;
			for (uint32_t k = 0; k < request->n_items; k++) {
				struct kv_item *item = &request->items[k];

				if (k < request->n_items_sealed || item->status != KV_OK)
					continue;
				item->status = KV_DEVICE_LOST;
				kv_item_finish(item, request->frame.layer_first, request->frame.n_layers);
			}
			request->n_items_done = request->n_items;
			srv_request_finish(request);
		}
	}
}
