/*
 * Failures that users of similar systems reported, played against the whole server: the rows L1, L2, L4, L5,
 * L12, L17, L18, P5, P8 and W7 of the list of failures,.
 */
#include "tests/lib/kv_test.h"
#include "tests/sim/script.h"

#define MS KV_NS_PER_MS

static struct sim_world world;

/* ---- L: lifetime ---- */

/*
 * L1: blocks of a closed session that a batch still writes are draining: nobody gets them, and whoever fills
 * the pool decodes its own rows.
 */
START_TEST(test_closing_under_a_running_append_hurts_nobody)
{
	struct sim_config config = sim_config_plain(1);

	sim_world_init(&world, &config);
	struct sim_peer *a = sim_script_connect(&world, 0), *b = sim_script_connect(&world, 1);
	const uint64_t mine = sim_script_open(a, 0, NULL), other = sim_script_open(b, 0, NULL);
	const struct kv_block_counts *blocks = sim_script_blocks(&world, 0);
	struct sim_request *slow = sim_script_new(a, KVP_OP_APPEND, mine);

	sim_backend_hold(world.backend, true);
	sim_script_item(slow, 7, 0, 48); /* 3 blocks of 16 */
	sim_script_send(slow);
	sim_script_pass(&world, 5 * MS);
	ck_assert_uint_eq(sim_backend_n_in_flight(world.backend), 1);
	ck_assert_int_eq(sim_script_close(a, mine), KV_OK);
	sim_script_pass(&world, 5 * MS);
	ck_assert_uint_eq(blocks->n_draining, 3);
	ck_assert_uint_eq(blocks->n_free, blocks->n_total - 3);

	/* B takes every other block while A's are still being written. */
	struct sim_request *fill[5];

	for (uint32_t i = 0; i < 5; i++) {
		fill[i] = sim_script_new(b, KVP_OP_APPEND, other);
		sim_script_item(fill[i], i + 1, 0, i < 4 ? 240 : 16);
		sim_script_send(fill[i]);
	}
	sim_script_pass(&world, 5 * MS);
	ck_assert_uint_eq(blocks->n_free, 0);
	ck_assert_uint_eq(blocks->n_draining, 3);
	ck_assert_int_eq(sim_script_append(b, other, 99, 0, 1), KV_POOL_FULL);

	sim_backend_hold(world.backend, false);
	for (uint32_t i = 0; i < 5; i++) {
		ck_assert_int_eq(sim_script_wait(fill[i]), KV_OK);
		ck_assert_int_eq(fill[i]->items[0].outcome.status, KV_OK);
	}
	ck_assert_int_eq(sim_script_wait(slow), KV_OK);
	ck_assert_uint_eq(blocks->n_draining, 0);
	ck_assert_uint_eq(blocks->n_free, 3);
	for (uint32_t i = 0; i < 5; i++) /* the model compares with the scalar code, bit for bit */
		ck_assert_int_eq(sim_script_decode(b, other, i + 1, KV_LENGTH_PLANNED), KV_OK);
	ck_assert_int_eq(sim_script_append(b, other, 99, 0, 48), KV_OK);
	ck_assert_int_eq(sim_script_decode(b, other, 99, 48), KV_OK);
	sim_script_end(&world);
}
END_TEST

/* M4: a backend that does not come back makes the daemon not ready, at first because no self-test (every 100
 * ms here) passed for three intervals, then because of its batch, and silences the watchdog; it recovers. */
START_TEST(test_a_backend_that_stands_still_is_noticed)
{
	struct sim_config config = sim_config_plain(12);
	struct srv_gauges gauges;
	char reason[160];

	config.lease_ms = 600000;
	sim_world_init(&world, &config);
	struct sim_peer *peer = sim_script_connect(&world, 0);
	const uint64_t handle = sim_script_open(peer, 0, NULL);
	struct sim_request *request = sim_script_new(peer, KVP_OP_APPEND, handle);

	sim_script_pass(&world, 50 * MS);
	srv_server_gauges(world.server, &gauges);
	ck_assert(gauges.is_ready);
	sim_backend_hold(world.backend, true);
	sim_script_item(request, 1, 0, 3);
	sim_script_send(request);
	sim_script_pass(&world, 150 * MS);
	ck_assert(srv_probe_is_ready(world.server, reason, sizeof(reason)));
	sim_script_pass(&world, 300 * MS);
	ck_assert(!srv_probe_is_ready(world.server, reason, sizeof(reason)));
	ck_assert_msg(strstr(reason, "self-test that passed is") && strstr(reason, "ms old"), "%s", reason);
	sim_script_pass(&world, 28550 * MS);
	ck_assert(!srv_server_is_stuck(world.server));
	sim_script_pass(&world, 2000 * MS);
	ck_assert(srv_server_is_stuck(world.server));
	srv_server_gauges(world.server, &gauges);
	ck_assert(!gauges.is_ready);
	ck_assert_uint_ge(gauges.batch_oldest_ms, 30000);
	ck_assert(!srv_probe_is_ready(world.server, reason, sizeof(reason)));
	ck_assert_msg(strstr(reason, "has not finished a batch"), "%s", reason);
	sim_backend_hold(world.backend, false);
	ck_assert_int_eq(sim_script_wait(request), KV_OK);
	sim_script_pass(&world, 15000 * MS);
	ck_assert(!srv_server_is_stuck(world.server));
	srv_server_gauges(world.server, &gauges);
	ck_assert(gauges.is_ready);
	ck_assert_uint_eq(gauges.batch_oldest_ms, 0);
	sim_script_end(&world);
}
END_TEST

/* L2: who stalls inside a large payload is disconnected after io_timeout_ms, and everything it held comes
 * back. */
START_TEST(test_a_stalled_payload_is_given_up)
{
	struct sim_config config = sim_config_plain(2);

	sim_world_init(&world, &config);
	struct sim_peer *peer = sim_script_connect(&world, 0);
	const uint64_t handle = sim_script_open(peer, 0, NULL);
	struct sim_request *request = sim_script_new(peer, KVP_OP_APPEND, handle);
	const struct srv_counters *counters = srv_server_counters(world.server);

	request->k_dtype = request->v_dtype = KV_DTYPE_F32;
	sim_script_item(request, 1, 0, 250); /* 128 000 of the 131 072 bytes that a frame may have */
	sim_peer_send(peer, request, sim_request_bytes(request) / 2);
	peer->may_end = "stalled";
	sim_script_pass(&world, (config.io_timeout_ms - 30) * MS);
	ck_assert_ptr_nonnull(peer->conn);
	ck_assert_uint_eq(world.server->slots[1].n_used, 1);
	ck_assert_uint_eq(counters->appends_aborted_timeout, 0);
	sim_script_pass(&world, 100 * MS);
	ck_assert_ptr_null(peer->conn);
	ck_assert_uint_eq(counters->appends_aborted_timeout, 1);
	ck_assert_uint_eq(world.server->slots[1].n_used, 0);
	ck_assert_uint_eq(sim_script_blocks(&world, 0)->n_free, sim_script_blocks(&world, 0)->n_total);
	ck_assert_uint_eq(sim_net_n_ahead_out(world.net), 0);
	sim_script_end(&world);
}
END_TEST

/* L4: cancelling what still waits, and closing a session without rows, is nothing special. */
START_TEST(test_cancelling_a_waiting_request_drops_it)
{
	struct sim_config config = sim_config_plain(3);

	sim_world_init(&world, &config);
	struct sim_peer *peer = sim_script_connect(&world, 0);
	const uint64_t handle = sim_script_open(peer, 0, NULL), empty = sim_script_open(peer, 0, NULL);
	const struct kv_block_counts *blocks = sim_script_blocks(&world, 0);
	struct sim_request *requests[3], *cancel = sim_script_new(peer, KVP_OP_CANCEL, 0);

	sim_backend_hold(world.backend, true); /* two batches in flight; the third request waits */
	for (uint32_t i = 0; i < 3; i++) {
		requests[i] = sim_script_new(peer, KVP_OP_APPEND, handle);
		sim_script_item(requests[i], i + 1, 0, 16);
		sim_script_send(requests[i]);
		sim_script_pass(&world, MS);
	}
	ck_assert_uint_eq(blocks->n_free, blocks->n_total - 3);
	cancel->cancel_id = requests[2]->id;
	requests[2]->n_cancels++;
	ck_assert_int_eq(sim_script_call(cancel), KV_OK);
	ck_assert(requests[2]->is_dropped);
	sim_backend_hold(world.backend, false);
	ck_assert_int_eq(sim_script_wait(requests[2]), KV_CANCELLED);
	ck_assert(requests[0]->is_replied && requests[1]->is_replied);
	ck_assert_uint_eq(blocks->n_free, blocks->n_total - 2);
	ck_assert_int_eq(sim_script_close(peer, empty), KV_OK);
	ck_assert_uint_eq(blocks->n_free, blocks->n_total - 2);
	ck_assert_int_eq(sim_script_close(peer, handle), KV_OK);
	sim_script_end(&world);
}
END_TEST

/* Sends the first n_bytes of an APPEND of two sequences on all layers, waits until they are taken, resets. */
static void append_and_reset(
	struct sim_peer *peer, uint64_t handle, uint64_t n_bytes, const uint32_t lengths[2])
{
	struct sim_request *request = sim_script_new(peer, KVP_OP_APPEND, handle);

	sim_script_item(request, 1, lengths[0], 3);
	sim_script_item(request, 2, lengths[1], 2);
	ck_assert_uint_le(n_bytes, sim_request_bytes(request));
	sim_peer_send(peer, request, n_bytes);
	peer->may_end = "goes away";
	while (sim_net_unread(peer->conn) > 0)
		sim_world_step(&world, MS);
	sim_peer_reset(peer);
	sim_world_run(&world, 50 * MS);
}

/* L5: a connection that dies behind any byte of an APPEND leaves every sequence whole, on every layer. */
START_TEST(test_a_reset_inside_an_append_leaves_no_trace)
{
	struct sim_config config = sim_config_plain(4);
	uint32_t lengths[2] = { 5, 4 };

	config.lease_ms = 100000;
	sim_world_init(&world, &config);
	struct sim_peer *peer = sim_script_connect(&world, 0);
	const uint64_t handle = sim_script_open(peer, 0, "mine");
	struct sim_request *request = sim_script_new(peer, KVP_OP_APPEND, handle);

	sim_script_item(request, 1, 0, lengths[0]);
	sim_script_item(request, 2, 0, lengths[1]);
	ck_assert_int_eq(sim_script_call(request), KV_OK);
	request = sim_script_new(peer, KVP_OP_APPEND, handle);
	sim_script_item(request, 1, 5, 3);
	sim_script_item(request, 2, 4, 2);
	const uint64_t n_bytes = sim_request_bytes(request);

	for (uint64_t k = 0; k <= n_bytes; k += k < 200 || k + 70 > n_bytes ? 1 : 13) {
		append_and_reset(peer, handle, k, lengths);
		for (uint32_t l = 0; l < config.pools[0].n_layers; l++) {
			ck_assert_uint_eq(sim_script_length(&world, handle, 1, l), k < n_bytes ? 5 : 8);
			ck_assert_uint_eq(sim_script_length(&world, handle, 2, l), k < n_bytes ? 4 : 6);
		}
		peer = sim_script_connect(&world, 0);
		request = sim_script_new(peer, KVP_OP_ATTACH, 0);
		memcpy(request->session_name, "mine", 5);
		request->open.session_name_bytes = 4;
		ck_assert_int_eq(sim_script_call(request), KV_OK);
		ck_assert_int_eq(sim_script_call(sim_script_new(peer, KVP_OP_TELL, handle)), KV_OK);
	}
	ck_assert_int_eq(sim_script_decode(peer, handle, 1, 8), KV_OK);
	ck_assert_int_eq(sim_script_decode(peer, handle, 2, 6), KV_OK);
	ck_assert_int_eq(sim_script_close(peer, handle), KV_OK);
	sim_script_end(&world);
}
END_TEST

/* L12: a restart is noticed: HELLO and PING tell a new boot id, and old handles never reach anything. */
START_TEST(test_handles_of_an_earlier_start_are_refused)
{
	struct sim_config config = sim_config_plain(5);
	static const uint16_t opcodes[] = { KVP_OP_APPEND, KVP_OP_DECODE, KVP_OP_READ, KVP_OP_TELL,
		KVP_OP_CLOSE, KVP_OP_PING };

	sim_world_init(&world, &config);
	struct sim_peer *peer = sim_script_connect(&world, 0);
	const uint64_t old_boot_id = peer->boot_id, old = sim_script_open(peer, 0, "mine");

	ck_assert_int_eq(sim_script_append(peer, old, 1, 0, 20), KV_OK);
	sim_peer_reset(peer);
	sim_world_finish(&world, false); /* killed */

	config.seed = 6;
	sim_world_init(&world, &config);
	peer = &world.peers[0];
	ck_assert(sim_peer_connect(peer));
	struct sim_request *hello = sim_world_request(&world, peer, KVP_OP_HELLO);

	hello->hello = (struct kvp_hello_req){ .proto_min = 1, .proto_max = 1, .boot_id_seen = old_boot_id };
	peer->is_hello_sent = true;
	ck_assert_int_eq(sim_script_call(hello), KV_STALE_EPOCH);
	ck_assert_uint_ne(peer->boot_id, old_boot_id);
	/* Somebody else's session, in the same slot. */
	const uint64_t new = sim_script_open(peer, 0, NULL);

	ck_assert_uint_eq(new & 0xFFFF, old & 0xFFFF);
	ck_assert_int_eq(sim_script_append(peer, new, 1, 0, 20), KV_OK);
	for (uint32_t i = 0; i < KV_LENGTH(opcodes); i++) {
		struct sim_request *request = sim_script_new(peer, opcodes[i], old);

		if (sim_request_is_rows(request) || opcodes[i] == KVP_OP_READ)
			sim_script_item(request, 1, opcodes[i] == KVP_OP_APPEND ? 20 : 0,
				opcodes[i] == KVP_OP_DECODE ? 0 : 1);
		ck_assert_int_eq(sim_script_call(request), KV_STALE_EPOCH);
	}
	ck_assert_uint_eq(sim_script_length(&world, new, 1, 0), 20);
	sim_script_end(&world);
}
END_TEST

/* Simulated time that a client needs for 100 APPEND_DECODEs, beside one that is perhaps killed inside a
 * frame. */
static uint64_t time_beside_a_victim(bool is_killed)
{
	struct sim_config config = sim_config_plain(7);

	sim_world_init(&world, &config);
	struct sim_peer *victim = sim_script_connect(&world, 0), *peer = sim_script_connect(&world, 1);
	const uint64_t other = sim_script_open(victim, 0, NULL), handle = sim_script_open(peer, 0, NULL);
	const uint64_t start_ns = world.clock.now_ns;

	for (uint32_t i = 0; i < 100; i++) {
		struct sim_request *request = sim_script_new(peer, KVP_OP_APPEND_DECODE, handle);

		sim_script_layers(request, 0, 1);
		sim_script_item(request, 1, i, 1);
		sim_script_send(request);
		if (is_killed && i % 10 == 5) {
			struct sim_request *half = sim_script_new(victim, KVP_OP_APPEND, other);

			sim_script_item(half, 1, 0, 100);
			sim_peer_send(victim, half, 1000);
			sim_world_step(&world, 0);
			sim_peer_reset(victim);
			ck_assert(sim_peer_connect(victim));
		}
		ck_assert_int_eq(sim_script_wait(request), KV_OK);
		ck_assert_int_eq(request->items[0].outcome.status, KV_OK);
	}
	const uint64_t took_ns = world.clock.now_ns - start_ns;

	sim_script_end(&world);
	return took_ns;
}

/* L17: clients that are killed inside a frame cost the others nothing. */
START_TEST(test_a_killed_client_does_not_slow_the_others)
{
	const uint64_t alone_ns = time_beside_a_victim(false), beside_ns = time_beside_a_victim(true);

	/* The same work under other random delays. */
	ck_assert_uint_lt(beside_ns, alone_ns + alone_ns / 4);
}
END_TEST

/* L18: an APPEND beyond tokens_max is refused whole, and what was there decodes as before. */
START_TEST(test_an_overlong_append_changes_nothing)
{
	struct sim_config config = sim_config_plain(8);

	sim_world_init(&world, &config);
	struct sim_peer *peer = sim_script_connect(&world, 0);
	const uint64_t handle = sim_script_open(peer, 0, NULL);

	ck_assert_int_eq(sim_script_append(peer, handle, 1, 0, 200), KV_OK);
	ck_assert_int_eq(sim_script_append(peer, handle, 1, 200, 57), KV_LEN_LIMIT); /* 256 at most */
	for (uint32_t l = 0; l < config.pools[0].n_layers; l++)
		ck_assert_uint_eq(sim_script_length(&world, handle, 1, l), 200);
	ck_assert_int_eq(sim_script_decode(peer, handle, 1, 200), KV_OK);
	ck_assert_int_eq(sim_script_append(peer, handle, 1, 200, 56), KV_OK);
	ck_assert_int_eq(sim_script_decode(peer, handle, 1, 256), KV_OK);
	sim_script_end(&world);
}
END_TEST

/* ---- P: pools and back-pressure ---- */

/* P5: eight sequences, room for five: five OK, three POOL_FULL with a hint, and trying again works. */
START_TEST(test_a_full_pool_refuses_single_items)
{
	struct sim_config config = sim_config_plain(9);

	config.pools[0].n_blocks = 8;
	config.pools[0].tokens_max = 128;
	sim_world_init(&world, &config);
	struct sim_peer *peer = sim_script_connect(&world, 0);
	const uint64_t other = sim_script_open(peer, 0, NULL), handle = sim_script_open(peer, 0, NULL);
	struct sim_request *request = sim_script_new(peer, KVP_OP_APPEND, handle);
	uint32_t n_ok = 0, n_full = 0;

	ck_assert_int_eq(sim_script_append(peer, other, 1, 0, 48), KV_OK); /* 3 of 8 blocks */
	for (uint32_t i = 0; i < 8; i++)
		sim_script_item(request, i + 1, 0, 10);
	ck_assert_int_eq(sim_script_call(request), KV_OK);
	for (uint32_t i = 0; i < 8; i++) {
		const struct kv_item *outcome = &request->items[i].outcome;

		n_ok += outcome->status == KV_OK;
		n_full += outcome->status == KV_POOL_FULL && outcome->retry_after_ms > 0;
	}
	ck_assert_uint_eq(n_ok, 5);
	ck_assert_uint_eq(n_full, 3);
	ck_assert_int_eq(sim_script_append(peer, handle, 8, 0, 10), KV_POOL_FULL);
	ck_assert_int_eq(sim_script_close(peer, other), KV_OK);
	for (uint32_t i = 0; i < 8; i++) {
		if (request->items[i].outcome.status == KV_POOL_FULL)
			ck_assert_int_eq(sim_script_append(peer, handle, i + 1, 0, 10), KV_OK);
	}
	sim_script_end(&world);
}
END_TEST

/* P8: who asks and never reads is not read from any more, then disconnected; nobody else notices. */
START_TEST(test_unread_replies_are_bounded)
{
	struct sim_config config = sim_config_plain(10);

	config.inflight_requests_max = 8;
	config.net.wire_bytes_max = 1024;
	sim_world_init(&world, &config);
	struct sim_peer *deaf = sim_script_connect(&world, 0), *peer = sim_script_connect(&world, 1);
	const uint64_t mine = sim_script_open(deaf, 0, NULL), handle = sim_script_open(peer, 0, NULL);
	const struct srv_counters *counters = srv_server_counters(world.server);

	ck_assert_int_eq(sim_script_append(deaf, mine, 1, 0, 20), KV_OK);
	deaf->is_deaf = true;
	sim_net_set_deaf(deaf->conn, UINT64_MAX);
	deaf->may_end = "never reads";
	for (uint32_t i = 0; i < 60; i++) {
		struct sim_request *request = sim_script_new(deaf, KVP_OP_DECODE, mine);

		sim_script_item(request, 1, 20, 0);
		sim_script_send(request);
	}
	sim_script_pass(&world, 50 * MS);
	const struct srv_conn *conn = sim_net_user(deaf->conn);

	ck_assert_ptr_nonnull(conn);
	ck_assert_uint_le(conn->n_inflight, 8);
	ck_assert_uint_le(world.server->slots[0].n_used, 8);
	ck_assert_uint_gt(sim_net_unread(deaf->conn), 0);
	for (uint32_t i = 0; i < 50; i++)
		ck_assert_int_eq(sim_script_append(peer, handle, 1, i, 1), KV_OK);
	sim_script_pass(&world, (config.send_timeout_ms + 50) * MS);
	ck_assert_uint_eq(counters->connections_closed_slow, 1);
	ck_assert_uint_eq(counters->rejected[SRV_REJECTED_SLOW_CONSUMER], 1);
	ck_assert_uint_eq(world.server->slots[0].n_used, 0);
	ck_assert_int_eq(sim_script_decode(peer, handle, 1, 50), KV_OK);
	sim_script_end(&world);
}
END_TEST

/* ---- W: wire ---- */

/* W7: an APPEND is acknowledged when another connection can decode its rows, not when they were received. */
START_TEST(test_acknowledged_rows_can_be_decoded_by_the_next_owner)
{
	struct sim_config config = sim_config_plain(11);

	sim_world_init(&world, &config);
	struct sim_peer *a = sim_script_connect(&world, 0), *b = sim_script_connect(&world, 1);
	const uint64_t handle = sim_script_open(a, 0, "shared");
	struct sim_request *append = sim_script_new(a, KVP_OP_APPEND, handle);
	struct sim_request *attach = sim_script_new(b, KVP_OP_ATTACH, 0);

	sim_backend_hold(world.backend, true);
	sim_script_item(append, 1, 0, 30);
	sim_script_send(append);
	sim_script_pass(&world, 50 * MS);
	ck_assert_uint_eq(sim_net_unread(a->conn), 0);
	ck_assert(!append->is_replied);
	sim_backend_hold(world.backend, false);
	ck_assert_int_eq(sim_script_wait(append), KV_OK);
	ck_assert_int_eq(append->items[0].outcome.status, KV_OK);

	memcpy(attach->session_name, "shared", 7);
	attach->open.session_name_bytes = 6;
	ck_assert_int_eq(sim_script_call(attach), KV_OK);
	ck_assert_uint_eq(attach->session, handle);
	ck_assert_int_eq(sim_script_decode(b, handle, 1, 30), KV_OK);
	ck_assert_int_eq(sim_script_append(a, handle, 1, 30, 1), KV_NOT_OWNER);
	sim_script_end(&world);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("sim_failures");
	TCase *tcase = tcase_create("failures");

	tcase_add_test(tcase, test_closing_under_a_running_append_hurts_nobody);
	tcase_add_test(tcase, test_a_backend_that_stands_still_is_noticed);
	tcase_add_test(tcase, test_a_stalled_payload_is_given_up);
	tcase_add_test(tcase, test_cancelling_a_waiting_request_drops_it);
	tcase_add_test(tcase, test_a_reset_inside_an_append_leaves_no_trace);
	tcase_add_test(tcase, test_handles_of_an_earlier_start_are_refused);
	tcase_add_test(tcase, test_a_killed_client_does_not_slow_the_others);
	tcase_add_test(tcase, test_an_overlong_append_changes_nothing);
	tcase_add_test(tcase, test_a_full_pool_refuses_single_items);
	tcase_add_test(tcase, test_unread_replies_are_bounded);
	tcase_add_test(tcase, test_acknowledged_rows_can_be_decoded_by_the_next_owner);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK_GETENV);
}
