/*
 * What must hold after every turn, and what must be left at the end.
 */
#include "tests/sim/peer.h"
#include "tests/sim/world.h"

static void no(const struct srv_conn *conn, const char *what)
{
	sim_fail("conn %llu, %s: %s", (unsigned long long)conn->id, kv_sm_name(&conn->sm), what);
}

static uint32_t share(uint32_t n, uint32_t part)
{
	return n / part > 0 ? n / part : 1;
}

static bool has_slot_for(const struct srv_server *server, const struct srv_conn *conn)
{
	for (uint32_t c = 0; c < 2; c++) {
		const struct srv_slots *slots = &server->slots[c];
		uint32_t n_peer = 0;
		bool is_waiting = false;

		kv_list_for_each (node, &slots->waiting)
			is_waiting = is_waiting || node == &conn->in_waiting;
		if (!is_waiting)
			continue;
		for (uint32_t i = 0; i < slots->n; i++)
			n_peer += slots->requests[i].sm.state != REQ_FREE &&
				slots->requests[i].peer_key == conn->peer_key;
		return !kv_list_is_empty(&slots->free) && conn->n_slots_used[c] < share(slots->n, 4) &&
			n_peer < share(slots->n, 2);
	}
	no(conn, "waits for a slot and is on no list");
	return false;
}

/* A request of the connection, or of the session whoever sent it, that is not finished. */
static bool has_request(const struct srv_server *server, const struct srv_conn *conn, uint64_t session)
{
	for (uint32_t c = 0; c < 2; c++) {
		for (uint32_t i = 0; i < server->slots[c].n; i++) {
			const struct srv_request *request = &server->slots[c].requests[i];

			if ((conn ? request->conn == conn : request->header.session == session) &&
				(request->sm.state == REQ_QUEUED || request->sm.state == REQ_RUNNING))
				return true;
		}
	}
	return false;
}

static void check_waits(struct srv_server *server, const struct srv_conn *conn)
{
	switch (conn->wait) {
	case WAIT_NONE:
		if (!conn->is_recv_posted && !conn->is_eof && !server->is_lost)
			no(conn, "neither receives nor waits");
		break;
	case WAIT_SLOT:
		if (has_slot_for(server, conn))
			no(conn, "waits for a slot that it could have");
		break;
	case WAIT_REPLY:
		if (server->replies_free)
			no(conn, "waits for a reply buffer, and some are free");
		break;
	case WAIT_SEND:
		if (!conn->is_send_posted)
			no(conn, "waits for a send that is not posted");
		break;
	case WAIT_BLOCKS: /* for as long as alloc_timeout_ms, whatever comes free */
		break;
	case WAIT_INFLIGHT:
		if (!conn->is_send_posted && !has_request(server, conn, 0))
			no(conn, "waits for requests of which none is under way");
		break;
	case WAIT_SESSION:
		/* Also of a session that is closed meanwhile: the end of its requests wakes everybody. */
		if (!has_request(server, NULL, conn->header.session))
			no(conn, "waits for a session that has nothing outstanding");
		break;
	}
}

static void check_conn(struct srv_server *server, const struct srv_conn *conn)
{
	const bool has_error_out = conn->is_error_last;

	if (conn->sm.state == CONN_CLOSING)
		return;
	check_waits(server, conn);
	if (conn->is_send_posted)
		return;
	if (conn->filling && conn->filling->used > 0)
		no(conn, "has replies and sends nothing");
	if (!kv_list_is_empty(&conn->ready) && !has_error_out)
		no(conn, "has finished requests and sends nothing");
	if (conn->wants_goaway && !has_error_out)
		no(conn, "owes a GOAWAY and sends nothing");
}

/* A connection holds at most a quarter of the slots of a class, a peer at most half. */
static void check_shares(const struct srv_server *server)
{
	for (uint32_t c = 0; c < 2; c++) {
		const struct srv_slots *slots = &server->slots[c];

		for (uint32_t i = 0; i < slots->n; i++) {
			uint32_t n_conn = 0, n_peer = 0;

			if (slots->requests[i].sm.state == REQ_FREE)
				continue;
			for (uint32_t k = 0; k < slots->n; k++) {
				const struct srv_request *other = &slots->requests[k];
				const bool is_used = other->sm.state != REQ_FREE;

				n_peer += is_used && other->peer_key == slots->requests[i].peer_key;
				n_conn += is_used && other->conn && other->conn == slots->requests[i].conn;
			}
			SIM_CHECK(n_conn <= share(slots->n, 4) && n_peer <= share(slots->n, 2),
				"a connection holds %u and its peer %u of %u slots", n_conn, n_peer,
				slots->n);
		}
	}
}

/* Unanswered requests of a connection and their bytes stay within the options. */
static void check_inflight(const struct srv_server *server)
{
	kv_list_for_each (node, &server->conns_open) {
		const struct srv_conn *conn = kv_container_of(node, struct srv_conn, link);

		SIM_CHECK(conn->n_inflight <= server->options->inflight_requests_max,
			"conn %llu has %u requests in flight", (unsigned long long)conn->id,
			conn->n_inflight);
		SIM_CHECK(
			conn->n_inflight <= 1 || conn->inflight_bytes <= server->options->inflight_bytes_max,
			"conn %llu has %llu bytes in flight", (unsigned long long)conn->id,
			(unsigned long long)conn->inflight_bytes);
	}
}

/* A server that goes to sleep has nothing that it could do. */
static void check_asleep(struct sim_world *world)
{
	struct srv_server *server = world->server;

	if (srv_server_wait_ns(server) == 0)
		return;
	kv_list_for_each (node, &server->conns_open)
		check_conn(server, kv_container_of(node, struct srv_conn, link));
	for (uint32_t i = 0; i < KV_POOLS_MAX; i++) {
		const struct srv_lane *lane = &server->lanes[i];

		SIM_CHECK(!lane->pool || server->is_lost || lane->n_queued == 0 ||
				lane->n_flights == SRV_PLANS_PER_LANE || srv_audit_holds(server, lane),
			"%u requests wait, %u batches are in flight", lane->n_queued, lane->n_flights);
	}
}

/* Leases that ended a while ago with nothing outstanding. */
static void check_leases(struct sim_world *world)
{
	const uint64_t now_ns = world->server->now_ns;
	uint32_t slot = 0;

	for (struct kv_session *session; (session = kv_session_next(world->server->domain, &slot));)
		SIM_CHECK(session->n_outstanding > 0 || session->lease_end_ns + 20 * KV_NS_PER_MS > now_ns ||
				srv_server_wait_ns(world->server) == 0,
			"a lease ended %llu ns ago and nobody noticed",
			(unsigned long long)(now_ns - session->lease_end_ns));
}

static bool is_open_conn(const struct srv_server *server, uint64_t conn_id)
{
	kv_list_for_each (node, &server->conns_open) {
		if (kv_container_of(node, struct srv_conn, link)->id == conn_id)
			return true;
	}
	return false;
}

/* A session belongs to nobody once its connection is gone. */
static void check_owners(const struct sim_world *world)
{
	for (const struct sim_session *session = world->model.sessions; session; session = session->next)
		SIM_CHECK(!session->is_open || session->owner_id == 0 ||
				is_open_conn(world->server, session->owner_id),
			"a session belongs to connection %llu, which is gone",
			(unsigned long long)session->owner_id);
}

void sim_world_check(struct sim_world *world)
{
	struct srv_gauges gauges;
	struct kv_error err = { 0 };
	const enum kv_status status = srv_server_audit(world->server, &err);

	SIM_CHECK(status == KV_OK, "%s", err.msg);
	SIM_CHECK(world->server->counters.audits_failed == 0, "an audit in pieces: %s",
		world->server->audit.last.error.msg);
	world->n_changes_checked = world->n_changes;
	sim_model_compare(&world->model, world->server->domain);
	check_asleep(world);
	check_shares(world->server);
	check_inflight(world->server);
	check_leases(world);
	check_owners(world);
	if (sim_where.turn % 16 != 0)
		return;
	srv_server_gauges(world->server, &gauges);
	SIM_CHECK(gauges.n_connections == world->server->n_conns, "gauge of connections");
	SIM_CHECK(gauges.n_reply_buffers_used <= gauges.n_reply_buffers, "gauge of reply buffers");
	SIM_CHECK(gauges.n_sessions == world->model.n_open, "gauge of sessions");
}

void sim_world_check_empty(struct sim_world *world)
{
	struct srv_server *server = world->server;

	SIM_CHECK(server->n_conns == 0, "%u connections are left", server->n_conns);
	SIM_CHECK(sim_net_n_open(world->net) == 0, "%u connections were not closed",
		sim_net_n_open(world->net));
	SIM_CHECK(sim_net_n_ahead_out(world->net) == 0, "%u read-ahead buffers are out",
		sim_net_n_ahead_out(world->net));
	SIM_CHECK(server->n_replies_used == 0, "%u reply buffers are out", server->n_replies_used);
	SIM_CHECK(kv_domain_n_sessions(server->domain) == 0, "%u sessions are left",
		kv_domain_n_sessions(server->domain));
	for (uint32_t c = 0; c < 2; c++)
		SIM_CHECK(server->slots[c].n_used == 0, "%u slots are in use", server->slots[c].n_used);
	for (uint32_t i = 0; i < kv_domain_n_pools(server->domain); i++) {
		const struct kv_pool *pool = kv_domain_pool_at(server->domain, i);

		for (uint32_t g = 0; g < pool->spec->n_tables; g++) {
			const struct kv_block_counts *counts = &pool->blocks[g].counts;

			/* Published prefixes outlive everybody. */
			SIM_CHECK(
				counts->n_free + counts->n_idle == counts->n_total && counts->n_reserved == 0,
				"pool %s: %u of %u blocks are free, %u reserved", pool->spec->name,
				counts->n_free, counts->n_total, counts->n_reserved);
		}
		SIM_CHECK(pool->n_sequences == 0 && pool->n_zombies == 0, "pool %s: sequences are left",
			pool->spec->name);
		SIM_CHECK(
			pool->tables.n_chunks_used == 0, "pool %s: table chunks are left", pool->spec->name);
	}
}
