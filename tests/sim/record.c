/*
 * What happens inside the server, seen at its calls into the domain.
 *
 * The linker redirects these calls here (-Wl,--wrap); each is passed on and told to the model, which says
 * beforehand what must come out. So nothing in the server knows that it is watched, and replies that never
 * arrive are known all the same.
 */
#include "tests/sim/record.h"
#include "core/domain_internal.h"
#include "core/plan.h"
#include "server/spill.h"
#include "tests/sim/model.h"
#include "tests/sim/peer.h"
#include "tests/sim/world.h"

struct sim_world *sim_world_now;
struct sim_planning sim_planning;

bool sim_is_watched(const struct kv_domain *domain)
{
	if (!sim_world_now || !sim_world_now->server || sim_world_now->server->domain != domain)
		return false;
	sim_world_now->n_changes++;
	return true;
}

/* The request that an item of the server belongs to. */
static struct srv_request *slot_of(
	const struct sim_world *world, const struct kv_item *item, uint32_t *item_idx)
{
	for (uint32_t c = 0; c < 2; c++) {
		const struct srv_slots *slots = &world->server->slots[c];

		if (item < slots->items || item >= slots->items + (uint64_t)slots->n * KVP_ITEMS_MAX)
			continue;
		*item_idx = (uint32_t)((item - slots->items) % KVP_ITEMS_MAX);
		return &slots->requests[(item - slots->items) / KVP_ITEMS_MAX];
	}
	sim_fail("an item outside the request slots");
}

static struct sim_request *request_of(
	const struct sim_world *world, const struct srv_request *slot, uint32_t item_idx)
{
	struct sim_request *request = sim_world_find(world, slot->header.request_id);

	SIM_CHECK(request && request->opcode == slot->header.opcode && request->flaw == SIM_FLAW_NONE,
		"a request that nobody sent is worked on: id %llu, opcode %u",
		(unsigned long long)slot->header.request_id, slot->header.opcode);
	SIM_CHECK(item_idx < request->n_items, "item %u of request %llu, which has %u", item_idx,
		(unsigned long long)request->id, request->n_items);
	return request;
}

/* ---- items ---- */

static void begin_plan(struct sim_world *world, struct sim_request *request, const struct srv_request *slot)
{
	struct sim_session *session = sim_model_session(&world->model, request->session);

	if (request->planned_seq != 0)
		return;
	SIM_CHECK(session && session->is_open, "request %llu is planned on a session that is not open",
		(unsigned long long)request->id);
	SIM_CHECK(session->owner_id == slot->conn->id, "request %llu is planned for another connection",
		(unsigned long long)request->id);
	/* A READ may still carry rows away. */
	SIM_CHECK(world->server->stopped_ns == 0 || request->sent_ns <= world->server->stopped_ns ||
			!(sim_request_is_rows(request) || sim_request_is_tables(request)),
		"request %llu was sent after draining had stopped, and is planned",
		(unsigned long long)request->id);
	request->planned_seq = ++world->model.seq;
	request->planned_ns = world->server->now_ns;
	sim_peer_planned(request);
}

WRAPPED(void, kv_item_plan_tables, struct kv_session *session, struct kv_item *item,
	const struct kv_frame_rows *frame, uint64_t now_ns)
{
	struct sim_world *world = sim_world_now;
	uint32_t item_idx;

	if (!sim_is_watched(session->pool->domain)) {
		__real_kv_item_plan_tables(session, item, frame, now_ns);
		return;
	}
	const struct srv_request *slot = slot_of(world, item, &item_idx);
	struct sim_request *request = request_of(world, slot, item_idx);
	struct sim_item *ours = &request->items[item_idx];

	begin_plan(world, request, slot);
	struct sim_session *known = sim_model_session(&world->model, session->handle);
	const struct kv_result expected = sim_model_plan_tables(known, request);

	SIM_CHECK(ours->n_planned++ == 0, "request %llu is planned twice", (unsigned long long)request->id);
	__real_kv_item_plan_tables(session, item, frame, now_ns);
	SIM_CHECK(item->status == expected.status && item->layer == expected.layer &&
			item->row == expected.row && item->length == 0,
		"request %llu: planning says %s, row %u; expected %s, %u", (unsigned long long)request->id,
		kv_status_name(item->status), item->row, kv_status_name(expected.status), expected.row);
	if (item->status == KV_OK)
		sim_model_tables_planned(known, ours, now_ns);
	else
		ours->outcome = *item;
}

WRAPPED(void, kv_item_plan, struct kv_session *session, struct kv_item *item, uint32_t layer_first,
	uint32_t n_layers, uint64_t now_ns)
{
	struct sim_world *world = sim_world_now;
	uint32_t item_idx;

	if (!sim_is_watched(session->pool->domain)) {
		__real_kv_item_plan(session, item, layer_first, n_layers, now_ns);
		return;
	}
	const struct srv_request *slot = slot_of(world, item, &item_idx);
	struct sim_request *request = request_of(world, slot, item_idx);
	struct sim_item *ours = &request->items[item_idx];

	begin_plan(world, request, slot);
	struct sim_session *known = sim_model_session(&world->model, session->handle);

	SIM_CHECK(ours->n_planned++ == 0, "item %u of request %llu is planned twice", item_idx,
		(unsigned long long)request->id);
	SIM_CHECK(item->sequence_id == ours->sequence && item->n_tokens == ours->n_tokens &&
			item->position == ours->position,
		"item %u of request %llu is not what was sent", item_idx, (unsigned long long)request->id);
	struct sim_expected expected =
		sim_model_plan(&world->model, known, session, item, layer_first, n_layers);

	const struct kv_tenant before = sim_tenant_of(session);

	sim_planning = (struct sim_planning){ known, session, item, layer_first, n_layers, &expected };
	__real_kv_item_plan(session, item, layer_first, n_layers, now_ns);
	sim_planning.expected = NULL;
	if (item->status == KV_QUOTA)
		sim_check_refused(session, &before, known, item, &expected);
	sim_check_quotas(session, &before);
	SIM_CHECK(item->status == expected.status && item->length == expected.length &&
			item->layer == expected.layer,
		"request %llu item %u: planning says %s, length %u, layer %u; expected %s, %u, %u",
		(unsigned long long)request->id, item_idx, kv_status_name(item->status), item->length,
		item->layer, kv_status_name(expected.status), expected.length, expected.layer);
	if (item->status == KV_OK)
		sim_model_planned(known, request, ours, item->sequence, expected.n_blocks, now_ns);
	else
		ours->outcome = *item;
	struct sim_sequence *sequence = sim_model_sequence(known, item->sequence_id);

	if (item->status != KV_OK && sequence &&
		(item->kind == KV_ITEM_APPEND || item->kind == KV_ITEM_APPEND_DECODE))
		sequence->rest_seq = ++world->model.seq;
}

/* What the server may have found before it finishes an item. */
static void check_found(const struct sim_world *world, const struct srv_request *slot,
	const struct sim_request *request, const struct sim_item *ours, const struct kv_item *item)
{
	const uint64_t deadline_ns = request->sent_ns + request->deadline_us * KV_NS_PER_US;

	if (ours->n_completed > 0) {
		SIM_CHECK(item->status == ours->result.status && item->layer == ours->result.layer &&
				item->row == ours->result.row,
			"request %llu: the backend said %s, the server %s", (unsigned long long)request->id,
			kv_status_name(ours->result.status), kv_status_name(item->status));
		return;
	}
	SIM_CHECK(ours->n_submitted == 0 || sim_backend_is_lost(world->backend),
		"request %llu is finished while it is in flight", (unsigned long long)request->id);
	switch (item->status) {
	case KV_OK: /* nothing was done for it: stale, which the model checks */
		break;
	case KV_CANCELLED:
		SIM_CHECK(slot->is_cancelled && request->n_cancels > 0, "request %llu was never cancelled",
			(unsigned long long)request->id);
		break;
	case KV_DEADLINE:
		SIM_CHECK(request->deadline_us > 0 && world->server->now_ns >= deadline_ns,
			"request %llu has time left", (unsigned long long)request->id);
		break;
	case KV_DEVICE_LOST:
		SIM_CHECK(sim_backend_is_lost(world->backend), "the device is not lost");
		break;
	default:
		sim_fail("request %llu ends with %s without work", (unsigned long long)request->id,
			kv_status_name(item->status));
	}
}

WRAPPED(void, kv_item_finish, struct kv_item *item, uint32_t layer_first, uint32_t n_layers)
{
	struct sim_world *world = sim_world_now;
	uint32_t item_idx;

	if (!item->sequence || !sim_is_watched(item->sequence->pool->domain)) {
		__real_kv_item_finish(item, layer_first, n_layers);
		return;
	}
	const struct srv_request *slot = slot_of(world, item, &item_idx);
	struct sim_request *request = request_of(world, slot, item_idx);
	struct sim_item *ours = &request->items[item_idx];
	const struct kv_result was = { item->status, item->layer, item->row };

	SIM_CHECK(ours->planned_on, "item %u of request %llu is finished without being planned", item_idx,
		(unsigned long long)request->id);
	SIM_CHECK(ours->n_finished++ == 0, "item %u of request %llu is finished twice", item_idx,
		(unsigned long long)request->id);
	check_found(world, slot, request, ours, item);
	__real_kv_item_finish(item, layer_first, n_layers);
	ours->outcome = *item;
	sim_model_finished(
		&world->model, request, ours, (enum kv_status)was.status, &was, world->server->now_ns);
}

/* ---- sessions ---- */

/* Without room for its reservation OPEN is not over before alloc_timeout_ms are. */
static bool goes_on_waiting(uint64_t owner_id, enum kv_status status, uint64_t now_ns)
{
	struct sim_world *world = sim_world_now;
	const uint64_t timeout_ns = world->config.alloc_timeout_ms * KV_NS_PER_MS;

	for (uint32_t i = 0; i < world->config.n_peers; i++) {
		struct sim_peer *peer = &world->peers[i];

		if (sim_peer_conn_id(peer) != owner_id)
			continue;
		if (status == KV_POOL_FULL && peer->open_since_ns == 0)
			peer->open_since_ns = now_ns;
		if (status == KV_POOL_FULL && now_ns < peer->open_since_ns + timeout_ns) {
			world->n_open_waits++;
			return true;
		}
		peer->open_since_ns = 0;
	}
	return false;
}

WRAPPED(enum kv_status, kv_session_open, struct kv_domain *domain, const struct kv_open_params *params,
	uint64_t now_ns, struct kv_session **out, struct kv_error *err)
{
	if (!sim_is_watched(domain))
		return __real_kv_session_open(domain, params, now_ns, out, err);
	struct sim_model *model = &sim_world_now->model;
	struct sim_expected expected = sim_model_open(model, params);
	const enum kv_status status = __real_kv_session_open(domain, params, now_ns, out, err);

	/* Room may have been made, which is watched. */
	if (expected.status == KV_POOL_FULL && status == KV_OK)
		expected.status = KV_OK;
	/* Asked before the pool is; rightful, or what is beyond a quota would be a finding after some opens.
	 */
	if ((expected.status == KV_POOL_FULL || expected.status == KV_OK) && status == KV_QUOTA)
		expected.status = KV_QUOTA;

	SIM_CHECK(status == expected.status, "OPEN says %s, expected %s", kv_status_name(status),
		kv_status_name(expected.status));
	if (!goes_on_waiting(params->owner_id, status, now_ns))
		sim_model_opened(model, params, status, *out, now_ns);
	return status;
}

WRAPPED(enum kv_status, kv_session_attach, struct kv_domain *domain, const char *name, uint32_t name_bytes,
	uint64_t tenant, uint64_t owner_id, uint64_t now_ns, struct kv_session **out)
{
	const enum kv_status status =
		__real_kv_session_attach(domain, name, name_bytes, tenant, owner_id, now_ns, out);

	if (sim_is_watched(domain))
		sim_model_attached(
			&sim_world_now->model, name, name_bytes, tenant, owner_id, status, *out, now_ns);
	return status;
}

WRAPPED(void, kv_session_close, struct kv_domain *domain, struct kv_session *session, bool is_expired)
{
	const uint64_t handle = session->handle;

	__real_kv_session_close(domain, session, is_expired);
	if (sim_is_watched(domain) && sim_world_now->in_control)
		sim_model_deleted(&sim_world_now->model, handle);
	else if (sim_is_watched(domain))
		sim_model_closed(&sim_world_now->model, handle, is_expired, sim_world_now->server->now_ns);
}

WRAPPED(void, kv_session_owner_lost, struct kv_domain *domain, uint64_t owner_id, uint64_t now_ns)
{
	__real_kv_session_owner_lost(domain, owner_id, now_ns);
	if (sim_is_watched(domain))
		sim_model_owner_lost(&sim_world_now->model, owner_id, now_ns);
}

/* ---- sequences ---- */

WRAPPED(enum kv_status, kv_sequence_truncate, struct kv_session *session, uint64_t sequence_id,
	uint32_t length)
{
	const enum kv_status residence = sim_model_residence(session, sequence_id, true);
	const enum kv_status status = __real_kv_sequence_truncate(session, sequence_id, length);

	if (sim_is_watched(session->pool->domain))
		sim_model_truncated(
			&sim_world_now->model, session->handle, sequence_id, length, residence, status);
	return status;
}

WRAPPED(enum kv_status, kv_sequence_free, struct kv_session *session, uint64_t sequence_id)
{
	const enum kv_status status = __real_kv_sequence_free(session, sequence_id);

	if (sim_is_watched(session->pool->domain))
		sim_model_freed(&sim_world_now->model, session->handle, sequence_id, status);
	return status;
}

WRAPPED(uint32_t, kv_sequence_list, struct kv_session *session, uint64_t from, struct kv_sequence *out[],
	uint32_t n_max, uint64_t *next)
{
	if (sim_is_watched(session->pool->domain) && !sim_world_now->in_control)
		sim_model_told(&sim_world_now->model, session->handle, session, from, n_max);
	return __real_kv_sequence_list(session, from, out, n_max, next);
}

/* ---- tiers ---- */

WRAPPED(enum kv_status, srv_spill_item, struct srv_spill *spill, struct kv_session *session,
	uint64_t sequence_id, bool is_out)
{
	const enum kv_status status = __real_srv_spill_item(spill, session, sequence_id, is_out);

	if (sim_is_watched(session->pool->domain))
		sim_model_moved(&sim_world_now->model, session->handle, sequence_id,
			is_out ? KVP_OP_SPILL : KVP_OP_PREFETCH, status);
	return status;
}

/* It came to rest again, wherever it is now. */
static void note_moved(const struct kv_domain *domain, struct kv_session *real, uint64_t id)
{
	if (!sim_is_watched(domain) || !real || real->state != KV_SESSION_OPEN)
		return;
	const struct kv_sequence *found = kv_sequence_find(real, id);

	if (found)
		sim_model_moved_end(&sim_world_now->model, real->handle, id, found->residence == KV_BROKEN);
}

WRAPPED(void, kv_sequence_spill_end, struct kv_sequence *sequence, bool is_stored)
{
	const struct kv_domain *domain = sequence->pool->domain;
	const uint64_t id = sequence->id;
	struct kv_session *real = sequence->is_zombie ? NULL : sequence->session;

	__real_kv_sequence_spill_end(sequence, is_stored);
	note_moved(domain, real, id);
}

WRAPPED(void, kv_sequence_fetch_end, struct kv_sequence *sequence, bool is_whole)
{
	const struct kv_domain *domain = sequence->pool->domain;
	const uint64_t id = sequence->id;
	struct kv_session *real = sequence->is_zombie ? NULL : sequence->session;

	__real_kv_sequence_fetch_end(sequence, is_whole);
	note_moved(domain, real, id);
}

/* ---- bounds of a turn ---- */

void sim_record_reset_turn(struct sim_world *world)
{
	const uint32_t n_released = world->counts.n_released;

	memset(&world->counts, 0, sizeof(world->counts));
	world->counts.n_released = n_released;
}

WRAPPED(void, kv_block_pool_disown, struct kv_block_pool *pool, kv_block_id id)
{
	__real_kv_block_pool_disown(pool, id);
	if (sim_world_now) {
		/* One owner less of several is a part of an append or of its copy, which have bounds of their
		 * own. */
		sim_world_now->counts.n_released += pool->owners[id.idx] == 0;
		sim_world_now->n_changes++;
	}
}

WRAPPED(uint32_t, kv_domain_release, struct kv_domain *domain, uint32_t n_blocks_max)
{
	const uint32_t n = __real_kv_domain_release(domain, n_blocks_max);

	if (!sim_world_now || !sim_world_now->server)
		return n;
	struct sim_world *world = sim_world_now;

	SIM_CHECK(n <= n_blocks_max, "%u blocks lost an owner in one call", n);
	SIM_CHECK(world->counts.n_released <= SRV_RELEASE_PER_TURN, "%u blocks were given back in one turn",
		world->counts.n_released);
	if (world->counts.n_released > world->maxima.n_released)
		world->maxima.n_released = world->counts.n_released;
	world->counts.n_released = 0;
	return n;
}

WRAPPED(void, kv_plan_begin, struct kv_plan *plan, struct kv_pool *pool, uint8_t *area, uint64_t area_bytes)
{
	__real_kv_plan_begin(plan, pool, area, area_bytes);
	if (!sim_is_watched(pool->domain))
		return;
	struct sim_world *world = sim_world_now;
	const uint32_t n = ++world->counts.n_batches_begun[pool->pool_idx];

	SIM_CHECK(n <= 1, "%u batches of a pool were sealed in one turn", n);
	if (n > world->maxima.n_batches_begun)
		world->maxima.n_batches_begun = n;
}

WRAPPED(void, srv_server_control, struct srv_server *server, struct srv_control *control)
{
	struct sim_world *world = sim_world_now;

	if (!world) {
		__real_srv_server_control(server, control);
		return;
	}
	const uint32_t n = ++world->counts.n_controls;

	SIM_CHECK(n <= SRV_CONTROL_PER_TURN, "%u control requests were answered in one turn", n);
	if (n > world->maxima.n_controls)
		world->maxima.n_controls = n;
	if (control->kind == SRV_CONTROL_SESSION_DELETE)
		sim_model_fenced(&world->model, control->id, world->server->now_ns);
	world->in_control = true;
	__real_srv_server_control(server, control);
	world->in_control = false;
}

/* ---- memory ---- */

static int64_t n_allocations;

int64_t sim_record_n_allocations(void)
{
	return n_allocations;
}

WRAPPED(void *, kv_alloc, size_t n, size_t size)
{
	void *ptr = __real_kv_alloc(n, size);

	n_allocations += ptr != NULL;
	return ptr;
}

WRAPPED(char *, kv_strndup, const char *text, size_t n)
{
	char *ptr = __real_kv_strndup(text, n);

	n_allocations += ptr != NULL;
	return ptr;
}

WRAPPED(void, kv_free, void *ptr)
{
	n_allocations -= ptr != NULL;
	__real_kv_free(ptr);
}

WRAPPED(void *, kv_pages_alloc, uint64_t n_bytes)
{
	void *ptr = __real_kv_pages_alloc(n_bytes);

	n_allocations += ptr != NULL;
	return ptr;
}

WRAPPED(void, kv_pages_free, void *ptr, uint64_t n_bytes)
{
	n_allocations -= ptr != NULL;
	__real_kv_pages_free(ptr, n_bytes);
}

/* ---- batches ---- */

/* Calls visit() for every item of a client that the batch works on. */
static void for_each_item(struct sim_world *world, const struct kv_batch *batch, const bool refused[],
	void (*visit)(const struct kv_batch *batch, const struct srv_entry *entry,
		struct sim_request *request, struct sim_item *item, bool is_refused))
{
	const struct srv_flight *flight = batch->user;

	for (uint32_t i = 0; flight && i < flight->n_entries; i++) {
		const struct srv_entry *entry = &flight->entries[i];

		if (entry->result_idx == KV_ROW_NONE)
			continue;
		struct sim_request *request = request_of(world, entry->request, entry->item_idx);

		visit(batch, entry, request, &request->items[entry->item_idx],
			refused && refused[entry->result_idx]);
	}
}

static void item_submitted(const struct kv_batch *batch, const struct srv_entry *entry,
	struct sim_request *request, struct sim_item *item, bool is_refused)
{
	(void)batch;
	(void)is_refused;
	SIM_CHECK(
		item->n_submitted++ == 0, "request %llu is submitted twice", (unsigned long long)request->id);
	SIM_CHECK(item->planned_on, "request %llu is submitted without being planned",
		(unsigned long long)request->id);
	/* The deadline counts from the header; what is sealed in part goes on. */
	SIM_CHECK(request->deadline_us == 0 ||
			entry->request->sealed_ns < request->planned_ns + request->deadline_us * KV_NS_PER_US,
		"request %llu is worked on behind its deadline", (unsigned long long)request->id);
}

static void item_completed(const struct kv_batch *batch, const struct srv_entry *entry,
	struct sim_request *request, struct sim_item *item, bool is_refused)
{
	struct kv_result natural = { KV_OK, KV_LAYER_NONE, KV_ROW_NONE };

	item->n_completed++;
	item->is_refused = is_refused;
	item->result = batch->results[entry->result_idx];
	if (batch->status != KV_OK)
		item->result.status = (uint16_t)batch->status;
	if (sim_request_is_tables(request))
		sim_model_tables_completed(
			sim_model_session(&sim_world_now->model, request->session), request);
	if (batch->status != KV_OK)
		return;
	if (item->bad_row != KV_ROW_NONE)
		natural = (struct kv_result){ KV_BAD_VALUE, (uint16_t)item->bad_layer, item->bad_row };
	SIM_CHECK(is_refused ||
			(item->result.status == natural.status && item->result.layer == natural.layer &&
				item->result.row == natural.row),
		"request %llu: the rows give %s at layer %u, row %u; expected %s, %u, %u",
		(unsigned long long)request->id, kv_status_name(item->result.status), item->result.layer,
		item->result.row, kv_status_name(natural.status), natural.layer, natural.row);
}

/* Batches of a pool take effect in the order in which they were sealed, so they are submitted in it. */
static void check_submit_order(const struct srv_lane *lane, const struct srv_flight *flight)
{
	for (uint32_t f = 0; f < lane->n_flights; f++) {
		const struct srv_flight *other =
			&lane->flights[(lane->flight_first + f) % SRV_PLANS_PER_LANE];

		if (other == flight)
			return;
		SIM_CHECK(other->is_submitted, "a batch overtakes the one before it");
	}
	sim_fail("a batch that is not in flight is submitted");
}

static void batch_submitted(void *user, const struct kv_batch *batch)
{
	struct sim_world *world = user;
	const struct srv_flight *flight = batch->user;
	uint32_t n = 0;

	if (flight)
		check_submit_order(&world->server->lanes[flight->plan.pool->pool_idx], flight);
	for_each_item(world, batch, NULL, item_submitted);
	for (uint32_t i = 0; i < KV_POOLS_MAX; i++) {
		const struct srv_lane *lane = &world->server->lanes[i];

		n = lane->pool && lane->n_flights > n ? lane->n_flights : n;
	}
	SIM_CHECK(n <= SRV_PLANS_PER_LANE, "%u batches of a pool in flight", n);
	if (n > world->maxima.n_in_flight)
		world->maxima.n_in_flight = n;
}

static void batch_completed(void *user, const struct kv_batch *batch, const bool refused[])
{
	((struct sim_world *)user)->n_changes++;
	for_each_item(user, batch, refused, item_completed);
}

struct sim_backend_hooks sim_record_hooks(struct sim_world *world)
{
	return (struct sim_backend_hooks){ batch_submitted, batch_completed, world };
}
