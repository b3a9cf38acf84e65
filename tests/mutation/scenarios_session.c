/* Sessions, leases, connections and control requests. */
#include <string.h>

#include "tests/mutation/rig.h"
#include "tests/mutation/scenarios.h"

static const char extra_pool[] = "{\"name\": \"extra\", \"layers\": 1, \"q_heads\": 1, \"kv_heads\": 1, "
				 "\"head_dim\": 64, \"k\": \"f32\","
				 "\"v\": \"f32\", \"block_size\": 16, \"blocks\": 40}";

static enum kv_status attach_to(uint32_t conn, const char *name, uint64_t fingerprint)
{
	const struct rig_open open = { .name = name, .fingerprint = fingerprint };
	struct rig_frame frame = rig_open_frame("", &open);

	frame.header.opcode = KVP_OP_ATTACH;
	return rig_ask(conn, &frame);
}

static enum kv_status attach(uint32_t conn, const char *name)
{
	return attach_to(conn, name, 0);
}

static enum kv_status ping(uint32_t conn, uint64_t session)
{
	const struct rig_frame frame = rig_plain(KVP_OP_PING, session);

	return rig_ask(conn, &frame);
}

/* A closed session is gone with its handle, name, rows and reservation. */
static void close_ends_all_of_it(void)
{
	rig_start();
	rig_hello(0, 1);
	const struct rig_open open = { .name = "chat", .reserve_blocks = 5 };
	const uint64_t session = rig_open_session(0, &open);
	struct rig_frame frame = rig_open_frame(RIG_POOL, &open);

	CHECK(rig_ask(0, &frame) == KV_EXISTS);
	CHECK(rig_blocks().n_reserved == 5);
	frame = rig_append(session, 1, 0, 33);
	CHECK(rig_item(0, &frame) == KV_OK);
	CHECK(rig_blocks().n_reserved == 2 && rig_blocks().n_owned == 3);
	/* Others get what is neither owned nor reserved. */
	const struct rig_open other = { .reserve_blocks = 4 };

	frame = rig_open_frame(RIG_POOL, &other);
	CHECK(rig_ask(0, &frame) == KV_POOL_FULL);
	frame = rig_plain(KVP_OP_CLOSE, session);
	CHECK(rig_ask(0, &frame) == KV_OK);
	CHECK(rig_ask(0, &frame) == KV_STALE_HANDLE);
	rig_settle();
	CHECK(rig_blocks().n_free == RIG_BLOCKS && rig_blocks().n_reserved == 0);
	CHECK(attach(0, "chat") == KV_NOT_FOUND);
	const uint64_t again = rig_open_session(0, &open);

	CHECK(again != session && rig_blocks().n_reserved == 5);
	CHECK(rig_length(0, again, 1) == UINT32_MAX);
	rig_stop();
}

/* More than the pool has is refused at once; a handle of another start names nothing. */
static void what_cannot_be_is_refused(void)
{
	rig_start();
	rig_hello(0, 1);
	struct rig_open open = { .reserve_blocks = RIG_BLOCKS + 1 };
	struct rig_frame frame = rig_open_frame(RIG_POOL, &open);

	CHECK(rig_ask(0, &frame) == KV_LIMIT);
	open.reserve_blocks = 0;
	frame = rig_open_frame("nowhere", &open);
	CHECK(rig_ask(0, &frame) == KV_NOT_FOUND);
	const uint64_t session = rig_open_session(0, &open);

	CHECK(ping(0, session ^ 1 << 16) == KV_STALE_EPOCH);
	CHECK(ping(0, session ^ (uint64_t)1 << 32) == KV_STALE_HANDLE);
	/* The first frame must be HELLO. */
	CHECK(mem_connect(&rig.io, 1, 1));
	CHECK(ping(1, 0) == KV_BAD_STATE);
	rig_turn(600);
	rig_settle();
	CHECK(rig_is_closed(1));
	rig_stop();
}

/* ATTACH moves a session from its connection to another of the same tenant, rows included. */
static void attach_fences_the_former_owner(void)
{
	rig_start();
	rig_hello(0, 1);
	rig_hello(1, 1);
	rig_hello(2, 2);
	const struct rig_open open = { .name = "chat" };
	const uint64_t session = rig_open_session(0, &open);
	struct rig_frame frame = rig_append(session, 1, 0, 4);

	CHECK(rig_item(0, &frame) == KV_OK);
	CHECK(ping(1, session) == KV_NOT_OWNER);
	CHECK(attach(2, "chat") == KV_NOT_FOUND);
	CHECK(attach_to(1, "chat", 1) == KV_FORMAT_MISMATCH);
	CHECK(ping(0, session) == KV_OK);
	CHECK(attach(1, "chat") == KV_OK);
	CHECK(ping(0, session) == KV_NOT_OWNER);
	rig_check_rows(1, session, 1, 4);
	/* The end of the former owner is nothing to the session. */
	rig_goodbye(0);
	frame = rig_append(session, 1, 4, 1);
	CHECK(rig_item(1, &frame) == KV_OK);
	const struct srv_control *control = rig_control(SRV_CONTROL_SESSIONS, NULL, NULL);

	CHECK(control->n_rows == 1 && control->rows.sessions[0].owner_id != 0);
	rig_goodbye(1);
	control = rig_control(SRV_CONTROL_SESSIONS, NULL, NULL);
	CHECK(control->n_rows == 1 && control->rows.sessions[0].owner_id == 0);
	rig_stop();
}

/* A lease ends unless something renews it: any operation, or PING for one or for all sessions. */
static void leases_run_out(void)
{
	rig_start();
	rig_hello(0, 1);
	const struct rig_open short_lease = { .lease_ms = 300, .name = "short" };
	uint64_t sessions[3];

	for (uint32_t i = 0; i < 3; i++) {
		const struct rig_open open = { .lease_ms = 300 };

		sessions[i] = rig_open_session(0, i == 0 ? &short_lease : &open);
	}
	struct rig_frame frame = rig_append(sessions[0], 1, 0, 4);

	CHECK(rig_item(0, &frame) == KV_OK);
	rig_turn(200);
	CHECK(ping(0, sessions[1]) == KV_OK);
	rig_turn(200);
	CHECK(ping(0, sessions[0]) == KV_SESSION_EXPIRED);
	CHECK(ping(0, sessions[2]) == KV_SESSION_EXPIRED);
	rig_settle();
	CHECK(rig_blocks().n_free == RIG_BLOCKS);
	CHECK(attach(0, "short") == KV_SESSION_EXPIRED);
	/* PING without a session: all of the connection. */
	rig_turn(50);
	CHECK(ping(0, 0) == KV_OK);
	rig_turn(200);
	CHECK(ping(0, 0) == KV_OK);
	rig_turn(200);
	CHECK(ping(0, sessions[1]) == KV_OK);
	rig_turn(301);
	CHECK(ping(0, sessions[1]) == KV_SESSION_EXPIRED);
	CHECK(srv_server_counters(rig.server)->sessions_expired == 3);
	rig_stop();
}

/* Without its connection a session lives for one lease from then on. */
static void a_lost_owner_starts_the_lease(void)
{
	rig_start();
	rig_hello(0, 1);
	const struct rig_open open = { .lease_ms = 300, .name = "kept" };
	const uint64_t session = rig_open_session(0, &open);

	rig_turn(250);
	rig_goodbye(0);
	rig_turn(200);
	rig_hello(1, 1);
	CHECK(attach(1, "kept") == KV_OK);
	CHECK(ping(1, session) == KV_OK);
	rig_goodbye(1);
	rig_turn(301);
	rig_hello(2, 1);
	CHECK(attach(2, "kept") == KV_SESSION_EXPIRED);
	rig_stop();
}

/*
 * Peers that owe bytes, send them one by one, do not say HELLO, or do not read are closed in time; others are
 * served meanwhile.
 */
static void slow_peers_are_closed(void)
{
	rig_start();
	rig_hello(0, 1);
	rig_hello(1, 1);
	rig_hello(3, 1);
	rig_hello(4, 1);
	CHECK(mem_connect(&rig.io, 2, 1)); /* says nothing */
	const struct rig_open open = { .lease_ms = 4000 };
	const uint64_t session = rig_open_session(0, &open);
	const struct rig_frame frame = rig_append(session, 1, 0, 60);
	struct rig_frame echo = rig_plain(KVP_OP_PING, 0);

	rig_send_part(0, &frame, 5000);
	rig_send_part(4, &frame, KVP_HEADER_BYTES + 10);
	rig.io.conns[1].is_reading = false;
	echo.op_bytes = KVP_BYTES(ping_req);
	kvp_ping_req_encode(&(struct kvp_ping_req){ 30000 }, echo.op);
	rig_send(1, &echo);
	rig_settle();
	for (uint32_t i = 0; i < 16; i++) {
		mem_bytes_add(&rig.io.conns[4].in, "", 1);
		rig_turn(i < 8 ? 40 : 60);
		rig_turn(0);
		CHECK(i >= 8 ||
			(!rig_is_closed(0) && !rig_is_closed(1) && !rig_is_closed(2) && !rig_is_closed(4)));
		CHECK(ping(3, 0) == KV_OK);
	}
	CHECK(rig_is_closed(0) && rig_is_closed(1) && rig_is_closed(2) && rig_is_closed(4));
	CHECK(!rig_is_closed(3));
	CHECK(srv_server_counters(rig.server)->connections_closed_slow == 3);
	CHECK(srv_server_counters(rig.server)->appends_aborted_timeout == 2);
	rig_stop();
}

/* Pools come from the arena and go back to it; a pool in use stays. */
static void pools_come_and_go(void)
{
	rig_start();
	rig_hello(0, 1);
	for (uint32_t i = 0; i < 6; i++) {
		struct srv_control *control = rig_control(SRV_CONTROL_POOL_CREATE, NULL, extra_pool);

		CHECK(control->status == KV_OK && control->n_rows == 1);
		CHECK(rig_control(SRV_CONTROL_POOL_CREATE, NULL, extra_pool)->status == KV_EXISTS);
		const struct rig_open open = { .name = NULL };
		struct rig_frame frame = rig_open_frame("extra", &open);
		const struct rig_reply *reply = rig_call(0, &frame);

		CHECK(reply->header.status == KV_OK);
		frame = rig_plain(KVP_OP_CLOSE, kvp_get_u64(reply->body));
		CHECK(rig_control(SRV_CONTROL_POOL_DELETE, "extra", NULL)->status == KV_BAD_STATE);
		CHECK(rig_control(SRV_CONTROL_POOLS, NULL, NULL)->n_rows == 2);
		CHECK(rig_ask(0, &frame) == KV_OK);
		rig_settle();
		CHECK(rig_control(SRV_CONTROL_POOL_DELETE, "extra", NULL)->status == KV_OK);
		control = rig_control(SRV_CONTROL_POOLS, NULL, NULL);
		CHECK(control->n_rows == 1 && strcmp(control->rows.pools[0].name, RIG_POOL) == 0);
		CHECK(rig_control(SRV_CONTROL_POOL_DELETE, "extra", NULL)->status == KV_NOT_FOUND);
	}
	rig_stop();
}

/* What is told over the control API is what is there. */
static void control_requests_tell_the_truth(void)
{
	rig_start();
	rig_hello(0, 1);
	const struct rig_open open = { .name = "told" };
	const uint64_t session = rig_open_session(0, &open);
	struct rig_frame frame = rig_append(session, 4, 0, 17);

	CHECK(rig_item(0, &frame) == KV_OK);
	frame = rig_append(session, 4, 3, 1);
	CHECK(rig_item(0, &frame) == KV_POSITION);
	rig_check_decode(0, session, 4, 17);
	struct srv_control *control = rig_control(SRV_CONTROL_OCCUPANCY, NULL, NULL);
	const struct kv_memory_report *memory = &control->rows.pools[0].memory;
	const uint64_t stored_bytes = 17 * RIG_LAYERS * 2 * RIG_HEAD_DIM * 4;

	CHECK(memory->n_tokens == 17 && memory->stored_bytes == stored_bytes);
	CHECK(memory->exact_bytes == stored_bytes && memory->dense_equivalent_bytes == stored_bytes / 2);
	CHECK(control->rows.pools[0].n_sessions == 1 && control->rows.pools[0].n_sequences == 1);
	control = rig_control(SRV_CONTROL_SESSIONS, NULL, NULL);
	CHECK(control->n_rows == 1 && control->rows.sessions[0].handle == session);
	CHECK(strcmp(control->rows.sessions[0].name, "told") == 0);
	CHECK(control->rows.sessions[0].memory.stored_bytes == stored_bytes);
	CHECK(control->rows.sessions[0].n_rows_in == 17 * RIG_LAYERS);
	CHECK(control->rows.sessions[0].n_queries == 1);
	control = rig_control(SRV_CONTROL_METRICS, NULL, NULL);
	CHECK(control->counters.rejected[SRV_REJECTED_POSITION] == 1);
	CHECK(control->counters.items_ok == 2 && control->counters.rows_in == 17 * RIG_LAYERS);
	CHECK(control->counters.request.n == 3 && control->counters.kernel.n == 2);
	CHECK(control->gauges.n_sessions == 1 && control->gauges.n_small_slots_used == 0);
	control = rig_control(SRV_CONTROL_CONNECTIONS, NULL, NULL);
	CHECK(control->n_rows == 1 && control->rows.connections[0].n_sessions == 1);
	rig_stop();
}

/* An operator looks at a session, its sequences, their blocks and its tenant, and closes it. */
static void operators_close_sessions(void)
{
	rig_start();
	rig_hello(0, 1);
	const struct rig_open open = { .name = "closed" };
	const uint64_t session = rig_open_session(0, &open);
	struct rig_frame frame = rig_append(session, 4, 0, 17);

	CHECK(rig_item(0, &frame) == KV_OK);
	rig_control_id = session;
	rig_control_sequence_id = 4;
	const struct srv_control *control = rig_control(SRV_CONTROL_SESSION, NULL, NULL);

	CHECK(control->status == KV_OK && control->n_rows == 1 && control->rows.sequences[0].id == 4);
	CHECK(control->session.handle == session && control->session.n_sequences == 1);
	control = rig_control(SRV_CONTROL_SEQUENCE, NULL, NULL);
	CHECK(control->status == KV_OK && control->n_rows == 2 && control->sequence.n_blocks == 2);
	CHECK(control->rows.blocks[0].n_owners == 1 && control->rows.blocks[1].n_owners == 1);
	control = rig_control(SRV_CONTROL_TENANTS, NULL, NULL);
	CHECK(control->n_rows == 1 && control->rows.tenants[0].n_sessions == 1);
	CHECK(control->rows.tenants[0].n_tokens == 17);
	CHECK(rig_control(SRV_CONTROL_SESSION_DELETE, NULL, NULL)->status == KV_OK);
	CHECK(rig_control(SRV_CONTROL_SESSIONS, NULL, NULL)->n_rows == 0);
	CHECK(rig_ask(0, &frame) == KV_STALE_HANDLE);
	CHECK(rig_control(SRV_CONTROL_SESSION_DELETE, NULL, NULL)->status == KV_STALE_HANDLE);
	rig_settle();
	CHECK(rig_blocks().n_owned == 0);
	rig_control_id = rig_control_sequence_id = 0;
	rig_stop();
}

/* The tenant's entry as /metrics has it. */
static const struct srv_tenant_gauge *tenant_gauge(void)
{
	const struct srv_control *control = rig_control(SRV_CONTROL_METRICS, NULL, NULL);

	CHECK(control->n_tenant_gauges == 1 && control->tenant_gauges[0].tenant == rig_control_tenant);
	return &control->tenant_gauges[0];
}

static void set_quota(enum kv_quota quota, uint64_t most)
{
	rig_control_policy.most[quota] = most;
	const struct srv_control *control = rig_control(SRV_CONTROL_TENANT_SET, NULL, NULL);

	CHECK(control->status == KV_OK && control->n_rows == 1);
	CHECK(control->rows.tenants[0].has_policy && control->rows.tenants[0].policy.most[quota] == most);
}

/* What a tenant may have holds at once, what it has is counted, comes back, and its policy can be cleared. */
static void quotas_hold_and_come_back(void)
{
	const uint64_t block_bytes = 16 * RIG_LAYERS * 2 * RIG_HEAD_DIM * sizeof(float);
	const struct rig_open open = { .name = "mine" }, other = { .name = "other" };

	rig_start();
	rig_hello(0, 1);
	rig_control_tenant = 1;
	rig_control_policy = kv_tenant_policy_open();
	CHECK(rig_control(SRV_CONTROL_TENANT, NULL, NULL)->status == KV_NOT_FOUND);
	CHECK(rig_control(SRV_CONTROL_TENANT_CLEAR, NULL, NULL)->status == KV_NOT_FOUND);
	set_quota(KV_QUOTA_SESSIONS, 1);
	set_quota(KV_QUOTA_BYTES, 3 * block_bytes);
	const uint64_t session = rig_open_session(0, &open);
	struct rig_frame frame = rig_open_frame(RIG_POOL, &other);

	CHECK(rig_ask(0, &frame) == KV_QUOTA);
	frame = rig_append(session, 1, 0, 33);
	CHECK(rig_item(0, &frame) == KV_OK);
	CHECK(tenant_gauge()->used[KV_QUOTA_BYTES] == 3 * block_bytes);
	CHECK(tenant_gauge()->used[KV_QUOTA_TOKENS] == 33 && tenant_gauge()->used[KV_QUOTA_SESSIONS] == 1);
	frame = rig_append(session, 2, 0, 1);
	CHECK(rig_item(0, &frame) == KV_QUOTA);
	CHECK(tenant_gauge()->n_refused[KV_QUOTA_BYTES] == 1 && rig_blocks().n_owned == 3);
	set_quota(KV_QUOTA_BYTES, KV_QUOTA_NONE);
	set_quota(KV_QUOTA_TOKENS, 50);
	frame = rig_append(session, 2, 0, 18);
	CHECK(rig_item(0, &frame) == KV_QUOTA);
	frame = rig_append(session, 2, 0, 17);
	CHECK(rig_item(0, &frame) == KV_OK);
	CHECK(tenant_gauge()->used[KV_QUOTA_TOKENS] == 50);
	set_quota(KV_QUOTA_REQUESTS, 0);
	frame = rig_append(session, 1, 33, 1);
	CHECK(rig_ask(0, &frame) == KV_QUOTA);
	/* Its own idle sequences make room for it. */
	set_quota(KV_QUOTA_REQUESTS, KV_QUOTA_NONE);
	set_quota(KV_QUOTA_TOKENS, KV_QUOTA_NONE);
	set_quota(KV_QUOTA_BYTES, 6 * block_bytes);
	frame = rig_append(session, 3, 0, 16);
	frame.items[0].flags |= KVP_ITEM_EVICTABLE;
	CHECK(rig_item(0, &frame) == KV_OK);
	CHECK(tenant_gauge()->used[KV_QUOTA_BYTES] == 6 * block_bytes);
	frame = rig_append(session, 4, 0, 16);
	CHECK(rig_item(0, &frame) == KV_OK);
	CHECK(tenant_gauge()->used[KV_QUOTA_BYTES] == 6 * block_bytes);
	frame = rig_plain(KVP_OP_CLOSE, session);
	CHECK(rig_ask(0, &frame) == KV_OK);
	rig_settle();
	for (uint32_t q = 0; q < KV_QUOTAS; q++)
		CHECK(tenant_gauge()->used[q] == 0);
	CHECK(rig_control(SRV_CONTROL_TENANT, NULL, NULL)->status == KV_OK);
	CHECK(rig_control(SRV_CONTROL_TENANT_CLEAR, NULL, NULL)->status == KV_OK);
	CHECK(rig_control(SRV_CONTROL_TENANT, NULL, NULL)->status == KV_NOT_FOUND);
	rig_control_tenant = 0;
	rig_stop();
}

/* However many tenants there are, /metrics has a bounded number of them, and the others' sum. */
static void metrics_of_tenants_are_bounded(void)
{
	const struct rig_open open = { .name = "last" };

	rig_start();
	rig_control_policy = kv_tenant_policy_open();
	for (rig_control_tenant = 100; rig_control_tenant < 100 + SRV_METRIC_TENANTS_MAX + 2;
		rig_control_tenant++)
		set_quota(KV_QUOTA_BYTES, rig_control_tenant);
	rig_hello(0, 1);
	rig_open_session(0, &open);
	const struct srv_control *control = rig_control(SRV_CONTROL_METRICS, NULL, NULL);

	CHECK(control->n_tenant_gauges == SRV_METRIC_TENANTS_MAX);
	CHECK(control->tenant_gauges[0].most[KV_QUOTA_BYTES] == 100);
	CHECK(control->tenant_gauges[0].used[KV_QUOTA_SESSIONS] == 0);
	CHECK(control->tenant_gauges[SRV_METRIC_TENANTS_MAX].used[KV_QUOTA_SESSIONS] == 1);
	rig_control_tenant = 0;
	rig_stop();
}

/* The known-answer decode notices outputs that are off (FAILURES K15), and notices when they are right again.
 */
static void the_self_test_notices_wrong_answers(void)
{
	rig_start();
	rig_turn(0);
	CHECK(rig_control(SRV_CONTROL_READY, NULL, NULL)->status == KV_OK);
	rig_backend.spoils = true;
	rig_turn(1100);
	rig_turn(0);
	const struct srv_control *control = rig_control(SRV_CONTROL_READY, NULL, NULL);

	CHECK(control->status == KV_UNAVAILABLE && strstr(control->ready_reason, "known answer"));
	CHECK(srv_server_counters(rig.server)->self_tests_failed == 1);
	rig_backend.spoils = false;
	rig_turn(1100);
	rig_turn(0);
	CHECK(rig_control(SRV_CONTROL_READY, NULL, NULL)->status == KV_OK);
	rig_stop();
}

/*
 * SIGTERM: GOAWAY to everybody and no new sessions; those that are there go on until the last one is closed,
 * what is in flight is answered, then the end with code 0.
 */
static void draining_answers_what_is_in_flight(void)
{
	struct rig_reply reply;

	rig_start();
	rig_hello(0, 1);
	rig_hello(1, 1);
	const struct rig_open open = { .name = NULL };
	const uint64_t session = rig_open_session(0, &open);
	struct rig_frame frame = rig_append(session, 1, 0, 3);

	rig_backend.holds = true;
	const uint64_t request_id = rig_send(0, &frame);

	rig_settle();
	srv_server_drain(rig.server);
	rig_settle();
	CHECK(rig_take(1, 0, &reply) && reply.header.opcode == KVP_OP_GOAWAY);
	CHECK(reply.header.status == KV_DRAINING);
	CHECK(!srv_server_is_done(rig.server));
	frame = rig_open_frame(RIG_POOL, &open);
	CHECK(rig_ask(1, &frame) == KV_DRAINING);
	CHECK(!rig_take(0, request_id, &reply));
	rig_backend.holds = false;
	rig_settle();
	CHECK(rig_take(0, request_id, &reply) && reply.header.status == KV_OK);
	frame = rig_append(session, 1, 3, 1);
	CHECK(rig_ask(0, &frame) == KV_OK);
	CHECK(!srv_server_is_done(rig.server));
	frame = rig_plain(KVP_OP_CLOSE, session);
	CHECK(rig_ask(0, &frame) == KV_OK);
	rig_settle();
	CHECK(srv_server_is_done(rig.server) && srv_server_exit_code(rig.server) == 0);
	CHECK(mem_connect(&rig.io, 5, 1));
	rig_turn(1);
	CHECK(rig.io.conns[5].phase == MEM_WAITS); /* nobody accepts */
	rig_end();
}

void scenario_sessions(void)
{
	close_ends_all_of_it();
	what_cannot_be_is_refused();
	attach_fences_the_former_owner();
	leases_run_out();
	a_lost_owner_starts_the_lease();
	slow_peers_are_closed();
	pools_come_and_go();
	control_requests_tell_the_truth();
	operators_close_sessions();
	quotas_hold_and_come_back();
	metrics_of_tenants_are_bounded();
	the_self_test_notices_wrong_answers();
	draining_answers_what_is_in_flight();
}
