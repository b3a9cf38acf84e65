/*
 * Audits: are the books right? While the daemon serves, a tally (core/tally.h) goes on by at most
 * SRV_AUDIT_PER_TURN a turn, when GET /v1/audit asks and every audit_interval_ms. Everything at once is for
 * tests, the simulation, and debug builds (KV_AUDIT_TURNS), which do it after every turn.
 */
#include "core/audit.h"

#include <string.h>

#include "server/internal.h"
#include "server/spill.h"

/* Until an audit that a snapshot ended is tried again. */
#define RETRY_NS (1000 * KV_NS_PER_MS)

/* ---- requests ---- */

static enum kv_status check_slots(struct srv_server *server, struct kv_error *err)
{
	for (uint32_t c = 0; c < 2; c++) {
		const struct srv_slots *slots = &server->slots[c];
		uint32_t n_used = 0, n_free = 0;

		for (uint32_t i = 0; i < slots->n; i++)
			n_used += slots->requests[i].sm.state != REQ_FREE;
		kv_list_for_each (node, &slots->free)
			n_free++;
		if (n_used != slots->n_used || n_used + n_free != slots->n)
			return kv_fail(err, KV_INTERNAL,
				"slots of class %u: %u in use, %u counted, %u free of %u", c, n_used,
				slots->n_used, n_free, slots->n);
	}
	return KV_OK;
}

static enum kv_status check_session(
	const struct srv_server *server, const struct kv_session *session, struct kv_error *err)
{
	uint32_t n_queued = 0, n_outstanding = 0;

	for (uint32_t c = 0; c < 2; c++) {
		for (uint32_t i = 0; i < server->slots[c].n; i++) {
			const struct srv_request *request = &server->slots[c].requests[i];

			if (request->session != session)
				continue;
			n_queued += request->sm.state == REQ_QUEUED;
			n_outstanding += request->sm.state == REQ_QUEUED || request->sm.state == REQ_RUNNING;
		}
	}
	if (n_queued == session->n_queued && n_outstanding == session->n_outstanding)
		return KV_OK;
	return kv_fail(err, KV_INTERNAL, "session %016llx: %u queued and %u outstanding, counted %u and %u",
		(unsigned long long)session->handle, n_queued, n_outstanding, session->n_queued,
		session->n_outstanding);
}

/* ---- a piece a turn ---- */

static void end(struct srv_server *server, enum kv_status status)
{
	struct srv_audit *audit = &server->audit;
	const uint64_t interval_ns = server->options->audit_interval_ms * KV_NS_PER_MS;

	if (audit->tally)
		audit->now.counts = kv_tally_counts(audit->tally);
	kv_tally_destroy(audit->tally);
	audit->tally = NULL;
	audit->is_running = false;
	audit->n_ended++;
	audit->now.status = status;
	audit->now.duration_us = (uint32_t)srv_us_since(server->now_ns, audit->begun_ns);
	audit->last = audit->now;
	audit->next_ns =
		server->now_ns + (status == KV_BUSY_RETRY && interval_ns > RETRY_NS ? RETRY_NS : interval_ns);
	if (status != KV_OK && status != KV_INTERNAL)
		return;
	server->counters.audits++;
	audit->has_difference = status == KV_INTERNAL;
	audit->difference = audit->now.finding;
	if (status == KV_OK)
		return;
	server->counters.audits_failed++;
	srv_log(SRV_LOG_ERROR, "%s", audit->now.error.msg);
}

/* So few sequences that their images can be looked at in one turn. */
static bool is_small(const struct srv_server *server)
{
	uint64_t n = 0;

	for (uint32_t i = 0; i < kv_domain_n_pools(server->domain); i++)
		n += kv_sequence_n_touched(kv_domain_pool_at(server->domain, i));
	return n <= SRV_AUDIT_PER_TURN;
}

/* Requests of sessions, a few sessions a turn; then pages of tiers. True: through. */
static bool go_on_with_requests(struct srv_server *server, enum kv_status *status)
{
	struct srv_audit *audit = &server->audit;
	const uint32_t n_max = SRV_AUDIT_PER_TURN / (server->slots[0].n + server->slots[1].n + 1) + 1;

	*status = KV_OK;
	for (uint32_t n = 0; n < n_max; n++) {
		const struct kv_session *session = kv_session_next(server->domain, &audit->slot);

		if (!session) {
			*status = check_slots(server, &audit->now.error);
			if (*status == KV_OK && is_small(server))
				*status = srv_spill_audit(server->spill, &audit->now.error);
			return true;
		}
		*status = check_session(server, session, &audit->now.error);
		if (*status != KV_OK) {
			audit->now.finding.session = session->handle;
			return true;
		}
	}
	return false;
}

static void go_on(struct srv_server *server)
{
	struct srv_audit *audit = &server->audit;
	const struct kv_pool *pool = kv_tally_wants_quiet(audit->tally);
	const bool is_quiet = pool && srv_lane_is_quiet(&server->lanes[pool->pool_idx]);
	bool is_done = false;
	enum kv_status status = KV_OK;

	if (!audit->is_counted)
		status = kv_tally_step(audit->tally, SRV_AUDIT_PER_TURN, is_quiet, &audit->is_counted,
			&audit->now.finding, &audit->now.error);
	else
		is_done = go_on_with_requests(server, &status);
	if (status != KV_OK || is_done)
		end(server, status);
}

static bool is_due(const struct srv_server *server)
{
	const struct srv_audit *audit = &server->audit;

	return !server->is_lost &&
		(audit->n_asked != audit->n_begun ||
			(server->options->audit_interval_ms > 0 && server->now_ns >= audit->next_ns));
}

void srv_audit_turn(struct srv_server *server)
{
	struct srv_audit *audit = &server->audit;

	if (!audit->is_running) {
		if (!is_due(server))
			return;
		audit->is_running = true;
		audit->is_counted = false;
		audit->slot = 0;
		/* Asked or not: whoever asks from now on gets the next one. */
		audit->n_asked = ++audit->n_begun;
		audit->begun_ns = server->now_ns;
		audit->now = (struct srv_audit_result){ 0 };
		const enum kv_status status =
			kv_tally_create(server->domain, &audit->tally, &audit->now.error);

		if (status != KV_OK) {
			end(server, status);
			return;
		}
	}
	go_on(server);
}

uint64_t srv_audit_next_ns(const struct srv_server *server)
{
	const struct srv_audit *audit = &server->audit;
	const struct kv_pool *pool = kv_tally_wants_quiet(audit->tally);

	/* The end of its batches is an event. */
	if (server->is_lost || (pool && !srv_lane_is_quiet(&server->lanes[pool->pool_idx])))
		return UINT64_MAX;
	if (audit->is_running || audit->n_asked != audit->n_begun)
		return server->now_ns + KV_NS_PER_MS / 10;
	return server->options->audit_interval_ms > 0 ? audit->next_ns : UINT64_MAX;
}

bool srv_audit_holds(const struct srv_server *server, const struct srv_lane *lane)
{
	return server->audit.tally && kv_tally_wants_quiet(server->audit.tally) == lane->pool;
}

bool srv_audit_answer(struct srv_server *server, struct srv_control *control)
{
	struct srv_audit *audit = &server->audit;

	if (server->is_lost) {
		control->status = kv_fail(&control->error, KV_DEVICE_LOST, "device lost");
		return true;
	}
	/* One that begins from now on. */
	if (control->scan_slot == 0) {
		audit->n_asked = audit->n_begun + 1;
		control->scan_slot = audit->n_asked;
	}
	if (audit->n_ended < control->scan_slot)
		return false;
	control->duration_us = audit->last.duration_us;
	control->audit = (struct srv_audit_view){ audit->last.finding, audit->last.counts };
	control->is_passed = audit->last.status == KV_OK;
	control->error = audit->last.error;
	if (audit->last.status != KV_OK && audit->last.status != KV_INTERNAL)
		control->status = audit->last.status;
	return true;
}

void srv_audit_finish(struct srv_server *server)
{
	kv_tally_destroy(server->audit.tally);
	server->audit.tally = NULL;
}

/* ---- everything at once ---- */

enum kv_status srv_server_audit(struct srv_server *server, struct kv_error *err)
{
	struct kv_plan *plans[KV_POOLS_MAX * SRV_PLANS_PER_LANE];
	uint32_t n_plans = 0, slot = 0;

	for (uint32_t i = 0; i < KV_POOLS_MAX; i++) {
		struct srv_lane *lane = &server->lanes[i];

		for (uint32_t f = 0; lane->pool && f < lane->n_flights; f++)
			plans[n_plans++] = &lane->flights[(lane->flight_first + f) % SRV_PLANS_PER_LANE].plan;
	}
	enum kv_status status = kv_audit_domain(server->domain, plans, n_plans, err);

	if (status == KV_OK)
		status = srv_spill_audit(server->spill, err);
	if (status == KV_OK)
		status = check_slots(server, err);
	for (struct kv_session *session;
		status == KV_OK && (session = kv_session_next(server->domain, &slot));)
		status = check_session(server, session, err);
	return status;
}

#ifdef KV_AUDIT_TURNS
void srv_audit_whole(struct srv_server *server)
{
	struct srv_audit *audit = &server->audit;
	struct kv_error err = { 0 };

	if (srv_server_audit(server, &err) != KV_INTERNAL || strcmp(err.msg, audit->whole_error.msg) == 0)
		return;
	audit->whole_error = err;
	server->counters.audits_failed++;
	srv_log(SRV_LOG_ERROR, "after turn %llu: %s", (unsigned long long)server->turns, err.msg);
}
#endif
