/*
 * Faults that the simulation found in the server, or that were found while it was written, each as the
 * shortest scenario that shows it.
 */
#include "tests/lib/kv_test.h"
#include "tests/sim/script.h"

#define MS KV_NS_PER_MS

static struct sim_world world;

/* A batch in which everything was cancelled needs no device; ending with one in line must not wait for it. */
START_TEST(test_ending_with_an_empty_batch_in_line)
{
	struct sim_config config = sim_config_plain(20);

	config.net.delay_ns_max = 0;
	sim_world_init(&world, &config);
	struct sim_peer *peer = sim_script_connect(&world, 0);
	const uint64_t handle = sim_script_open(peer, 0, NULL);
	struct sim_request *first = sim_script_new(peer, KVP_OP_APPEND, handle);
	struct sim_request *second = sim_script_new(peer, KVP_OP_APPEND, handle);
	struct sim_request *cancel = sim_script_new(peer, KVP_OP_CANCEL, 0);
	const struct srv_lane *lane = &world.server->lanes[0];

	sim_backend_hold(world.backend, true);
	sim_script_item(first, 1, 0, 16);
	sim_script_send(first);
	sim_script_pass(&world, MS);
	/* Both arrive in one turn: cancelled before anything is sealed. */
	sim_script_item(second, 2, 0, 16);
	sim_script_send(second);
	cancel->cancel_id = second->id;
	second->n_cancels++;
	ck_assert_int_eq(sim_script_call(cancel), KV_OK);
	ck_assert(second->is_dropped);
	ck_assert_uint_eq(lane->n_flights, 2);
	ck_assert(lane->flights[(lane->flight_first + 1) % SRV_PLANS_PER_LANE].is_done);
	sim_world_finish(&world, false);
}
END_TEST

/*
 * A connection that is closed while it receives into the read-ahead buffer that it owns keeps that buffer, so
 * that it can be given back: the receive's last event does not bring it.
 */
START_TEST(test_closing_inside_op_structs_returns_the_read_ahead)
{
	struct sim_config config = sim_config_plain(21);

	config.net.late_per_mille = 1000;
	sim_world_init(&world, &config);
	struct sim_peer *peer = sim_script_connect(&world, 0);
	const uint64_t handle = sim_script_open(peer, 0, NULL);
	struct sim_request *request = sim_script_new(peer, KVP_OP_APPEND, handle);

	sim_script_item(request, 1, 0, 4);
	sim_peer_send(peer, request, KVP_HEADER_BYTES + 40);
	peer->may_end = "stalled";
	sim_script_pass(&world, 10 * MS);
	ck_assert_uint_eq(sim_net_n_ahead_out(world.net), 1);
	sim_script_pass(&world, (config.io_timeout_ms + 100) * MS);
	ck_assert_ptr_null(peer->conn);
	ck_assert_uint_eq(sim_net_n_ahead_out(world.net), 0);
	sim_script_end(&world);
}
END_TEST

/* Waiting for a request slot is not the peer's slowness: the rate counts from when its payload is received.
 */
START_TEST(test_a_parked_payload_is_not_slow)
{
	struct sim_config config = sim_config_plain(22);

	config.small_slots = 1;
	config.n_tenants = 2;
	config.io_timeout_ms = 60;
	config.min_rate_bytes_per_s = 65536;
	sim_world_init(&world, &config);
	struct sim_peer *first = sim_script_connect(&world, 0), *second = sim_script_connect(&world, 1);
	const uint64_t mine = sim_script_open(first, 0, NULL), handle = sim_script_open(second, 0, NULL);
	struct sim_request *slow = sim_script_new(first, KVP_OP_APPEND, mine);
	struct sim_request *parked = sim_script_new(second, KVP_OP_APPEND, handle);

	sim_backend_hold(world.backend, true);
	sim_script_item(slow, 1, 0, 1);
	sim_script_send(slow);
	sim_script_pass(&world, 5 * MS);
	ck_assert_uint_eq(world.server->slots[0].n_used, 1);
	sim_script_item(parked, 1, 0, 2);
	sim_peer_send(second, parked, sim_request_bytes(parked) - 10);
	sim_script_pass(&world, 500 * MS);
	sim_backend_hold(world.backend, false);
	sim_script_pass(&world, 30 * MS); /* it has its slot now; the timers have looked at it */
	ck_assert_ptr_nonnull(second->conn);
	sim_net_write(world.net, second->conn, second->unsent.data, second->unsent.n);
	second->unsent.n = 0;
	ck_assert_int_eq(sim_script_wait(parked), KV_OK);
	ck_assert(slow->is_replied);
	sim_script_end(&world);
}
END_TEST

/* A payload with a wrong checksum is answered, also when no reply buffer is free at that moment. */
START_TEST(test_a_bad_body_crc_waits_for_a_reply_buffer)
{
	struct sim_config config = sim_config_plain(23);

	config.reply_buffers = 1;
	config.net.wire_bytes_max = 1024;
	sim_world_init(&world, &config);
	struct sim_peer *deaf = sim_script_connect(&world, 0), *peer = sim_script_connect(&world, 1);
	const uint64_t handle = sim_script_open(peer, 0, NULL);
	struct sim_request *echo = sim_script_new(deaf, KVP_OP_PING, 0), *ping, *bad;

	echo->has_echo = true;
	echo->echo_bytes = 50000;
	deaf->is_deaf = true;
	sim_net_set_deaf(deaf->conn, UINT64_MAX);
	sim_script_send(echo);
	sim_script_pass(&world, 5 * MS);
	ping = sim_script_new(deaf, KVP_OP_PING, 0);
	sim_script_send(ping); /* its answer waits behind the echo, in the only reply buffer */
	sim_script_pass(&world, 5 * MS);
	ck_assert_ptr_null(world.server->replies_free);
	bad = sim_script_new(peer, KVP_OP_APPEND, handle);
	sim_script_item(bad, 1, 0, 3);
	bad->flaw = SIM_FLAW_BODY_CRC;
	sim_script_send(bad);
	sim_script_pass(&world, 20 * MS);
	ck_assert(!bad->is_replied);
	deaf->is_deaf = false;
	sim_net_set_deaf(deaf->conn, 0);
	ck_assert_int_eq(sim_script_wait(bad), KV_BAD_CRC);
	ck_assert_uint_eq(sim_script_length(&world, handle, 1, 0), 0);
	sim_script_end(&world);
}
END_TEST

/* A HELLO that waits for a reply buffer was said in time, however long others keep the buffers. */
START_TEST(test_a_hello_that_waits_for_us_is_not_late)
{
	struct sim_config config = sim_config_plain(27);

	config.reply_buffers = 1;
	config.net.wire_bytes_max = 1024;
	config.hello_timeout_ms = 50;
	sim_world_init(&world, &config);
	struct sim_peer *deaf = sim_script_connect(&world, 0), *late = &world.peers[1];
	struct sim_request *echo = sim_script_new(deaf, KVP_OP_PING, 0), *hello;

	echo->has_echo = true;
	echo->echo_bytes = 50000;
	deaf->is_deaf = true;
	sim_net_set_deaf(deaf->conn, UINT64_MAX);
	sim_script_send(echo);
	sim_script_pass(&world, 5 * MS);
	sim_script_send(sim_script_new(deaf, KVP_OP_PING, 0));
	sim_script_pass(&world, 5 * MS);
	ck_assert_ptr_null(world.server->replies_free);
	ck_assert(sim_peer_connect(late));
	hello = sim_world_request(&world, late, KVP_OP_HELLO);
	hello->hello = (struct kvp_hello_req){ .proto_min = 1, .proto_max = 1 };
	late->is_hello_sent = true;
	sim_script_send(hello);
	sim_script_pass(&world, 200 * MS);
	ck_assert_ptr_nonnull(late->conn);
	deaf->is_deaf = false;
	sim_net_set_deaf(deaf->conn, 0);
	ck_assert_int_eq(sim_script_wait(hello), KV_OK);
	sim_script_end(&world);
}
END_TEST

/* Every PING renews leases, the one that echoes too. */
START_TEST(test_an_echo_renews_leases)
{
	struct sim_config config = sim_config_plain(24);

	config.lease_ms = 100;
	sim_world_init(&world, &config);
	struct sim_peer *peer = sim_script_connect(&world, 0);
	const uint64_t first = sim_script_open(peer, 0, NULL), second = sim_script_open(peer, 0, NULL);

	for (uint32_t i = 0; i < 20; i++) {
		struct sim_request *echo = sim_script_new(peer, KVP_OP_PING, i < 10 ? 0 : first);

		echo->has_echo = true;
		echo->echo_bytes = 100;
		ck_assert_int_eq(sim_script_call(echo), KV_OK);
		sim_script_pass(&world, 50 * MS);
	}
	ck_assert_int_eq(sim_script_close(peer, second), KV_SESSION_EXPIRED);
	ck_assert_int_eq(sim_script_close(peer, first), KV_OK);
	sim_script_end(&world);
}
END_TEST

/* Whoever sends a checksum gets one back, with every kind of answer. */
START_TEST(test_every_answer_to_a_checksum_has_one)
{
	struct sim_config config = sim_config_plain(28);

	sim_world_init(&world, &config);
	struct sim_peer *peer = sim_script_connect(&world, 0);
	const uint64_t handle = sim_script_open(peer, 0, NULL);
	static const uint16_t opcodes[] = { KVP_OP_PING, KVP_OP_APPEND, KVP_OP_READ, KVP_OP_TELL,
		KVP_OP_TRUNCATE, KVP_OP_CLOSE, KVP_OP_CLOSE };

	for (uint32_t i = 0; i < KV_LENGTH(opcodes); i++) {
		struct sim_request *request = sim_script_new(peer, opcodes[i], handle);

		request->flags |= KVP_FLAG_BODY_CRC;
		request->has_echo = opcodes[i] == KVP_OP_PING;
		request->echo_bytes = 100;
		if (opcodes[i] == KVP_OP_APPEND || opcodes[i] == KVP_OP_READ || opcodes[i] == KVP_OP_TRUNCATE)
			sim_script_item(request, 1, 0, 5);
		/* The second CLOSE is refused; its value is checked with every answer. */
		ck_assert_int_eq(
			sim_script_call(request), i + 1 < KV_LENGTH(opcodes) ? KV_OK : KV_STALE_HANDLE);
		ck_assert(peer->reply.flags & KVP_FLAG_BODY_CRC);
	}
	sim_script_end(&world);
}
END_TEST

/* A session's counts of rows are what it sent and read, once. */
START_TEST(test_rows_of_a_session_are_counted_once)
{
	struct sim_config config = sim_config_plain(25);
	struct kv_session *session = NULL;

	sim_world_init(&world, &config);
	struct sim_peer *peer = sim_script_connect(&world, 0);
	const uint64_t handle = sim_script_open(peer, 0, NULL);
	struct sim_request *read = sim_script_new(peer, KVP_OP_READ, handle);

	ck_assert_int_eq(sim_script_append(peer, handle, 1, 0, 7), KV_OK);
	ck_assert_int_eq(sim_script_decode(peer, handle, 1, 7), KV_OK);
	sim_script_item(read, 1, 2, 3);
	ck_assert_int_eq(sim_script_call(read), KV_OK);
	ck_assert_int_eq(kv_session_find(world.server->domain, handle, &session), KV_OK);
	ck_assert_uint_eq(session->n_rows_in, 7 * config.pools[0].n_layers);
	ck_assert_uint_eq(session->n_rows_out, 3 * config.pools[0].n_layers);
	ck_assert_uint_eq(session->n_queries, 1);
	sim_script_end(&world);
}
END_TEST

/* A pool whose name is taken is told so, however little memory is left. */
START_TEST(test_a_taken_pool_name_is_no_lack_of_memory)
{
	struct sim_config config = sim_config_plain(26);
	struct kv_pool *pool = NULL;
	struct kv_pool_spec *spec = NULL;
	struct kv_error err = { 0 };
	json_t *json = NULL;

	sim_world_init(&world, &config);
	ck_assert_int_eq(
		kv_pool_spec_parse_short("name=p0,layers=4,q_heads=1,kv_heads=1,head_dim=256,k=f32,v=f32,"
					 "block_size=16,blocks=100000",
			&json, &err),
		KV_OK);
	ck_assert_int_eq(kv_pool_spec_create(json, &spec, &err), KV_OK);
	json_decref(json);
	ck_assert_int_eq(srv_pool_create(world.server, spec, &pool, &err), KV_EXISTS);
	kv_pool_spec_destroy(spec);
	sim_script_end(&world);
}
END_TEST

/*
 * Requests over HTTP that wait for a backend that hangs, more of them than a turn answers: others are
 * answered beside them, and nobody spins for those in the mailbox.
 */
START_TEST(test_control_requests_that_wait_keep_nobody_from_an_answer)
{
	struct sim_config config = sim_config_plain(29);
	struct sim_peer *peers[4];
	uint64_t handles[12];

	config.control_per_mille = 1;
	sim_world_init(&world, &config);
	for (uint32_t i = 0; i < KV_LENGTH(peers); i++)
		peers[i] = sim_script_connect(&world, i);
	for (uint32_t i = 0; i < KV_LENGTH(handles); i++)
		handles[i] = sim_script_open(peers[i % 4], 0, NULL);
	sim_backend_hold(world.backend, true);
	for (uint32_t i = 0; i < KV_LENGTH(handles); i++) {
		struct sim_request *request = sim_script_new(peers[i % 4], KVP_OP_APPEND, handles[i]);

		sim_script_item(request, 1, 0, 1);
		sim_script_send(request);
		sim_script_pass(&world, MS); /* the first two are batches, the others wait */
	}
	for (uint32_t i = 2; i < KV_LENGTH(handles); i++)
		sim_controls_ask(&world, SRV_CONTROL_SESSION_DELETE, handles[i]);
	sim_script_pass(&world, 5 * MS);
	ck_assert_uint_eq(world.server->n_parked, KV_LENGTH(handles) - 2);
	for (uint32_t i = 0; i < 20; i++) {
		const struct sim_asked *asked = sim_controls_ask(&world, SRV_CONTROL_INFO, 0);

		sim_script_pass(&world, MS);
		ck_assert(!asked->is_posted);
	}
	sim_backend_hold(world.backend, false);
	sim_script_pass(&world, 50 * MS);
	ck_assert(sim_controls_are_done(&world));
	ck_assert_uint_eq(kv_domain_n_sessions(world.server->domain), 2);
	sim_script_end(&world);
}
END_TEST

/* A peer that reads all that comes is not slow, however little the network holds at a time. */
START_TEST(test_a_narrow_network_is_no_slow_reader)
{
	struct sim_config config = sim_config_plain(30);

	config.net.wire_bytes_max = 1024;
	config.net.delay_ns_max = 0;
	config.net.skip_per_mille = 300;
	config.send_timeout_ms = 100;
	sim_world_init(&world, &config);
	struct sim_peer *peer = sim_script_connect(&world, 0);
	struct sim_request *echo = sim_script_new(peer, KVP_OP_PING, 0);

	echo->has_echo = true;
	echo->echo_bytes = 130000;
	sim_script_send(echo);
	sim_world_run(&world, 5000 * MS); /* the server sleeps as long as it wants to */
	ck_assert(echo->is_replied);
	sim_script_end(&world);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("sim_found");
	TCase *tcase = tcase_create("found");

	tcase_add_test(tcase, test_ending_with_an_empty_batch_in_line);
	tcase_add_test(tcase, test_closing_inside_op_structs_returns_the_read_ahead);
	tcase_add_test(tcase, test_a_parked_payload_is_not_slow);
	tcase_add_test(tcase, test_a_bad_body_crc_waits_for_a_reply_buffer);
	tcase_add_test(tcase, test_a_hello_that_waits_for_us_is_not_late);
	tcase_add_test(tcase, test_an_echo_renews_leases);
	tcase_add_test(tcase, test_every_answer_to_a_checksum_has_one);
	tcase_add_test(tcase, test_rows_of_a_session_are_counted_once);
	tcase_add_test(tcase, test_a_taken_pool_name_is_no_lack_of_memory);
	tcase_add_test(tcase, test_control_requests_that_wait_keep_nobody_from_an_answer);
	tcase_add_test(tcase, test_a_narrow_network_is_no_slow_reader);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK_GETENV);
}
