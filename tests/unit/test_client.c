/*
 * The client's connection: HELLO, control operations, golden bytes, deadlines, hostile replies, reconnecting.
 */
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "proto/client/conn.h"
#include "tests/lib/golden.h"
#include "tests/lib/kv_test.h"
#include "tests/unit/client_rig.h"

static int64_t now_ms(void)
{
	return tqkv_now_ns() / 1000000;
}

/* The calls that end at a deadline may take this much longer on a loaded machine. */
#define LATE_MS 1000

/* ---- HELLO and control ---- */

/* What HELLO's reply says is what the server info says; a zeroed options struct works. */
START_TEST(test_client_hello_tells_limits)
{
	struct rig rig;
	const struct tqkv_server_info *info;

	rig_start(&rig, NULL, NULL);
	info = tqkv_server_info(rig.conn);
	ck_assert_uint_eq(info->boot_id, 0xB007);
	ck_assert_uint_eq(info->frame_bytes_max, KVP_FRAME_BYTES_MIN);
	ck_assert_uint_eq(info->inflight_requests_max, 64);
	ck_assert_uint_eq(info->items_max, 256);
	ck_assert_uint_eq(info->q_len_max, 8);
	ck_assert_uint_eq(info->proto, 1);
	ck_assert(tqkv_is_connected(rig.conn));
	ck_assert_int_ge(tqkv_fd(rig.conn), 0);
	ck_assert_uint_eq(tqkv_session_info(rig.session)->n_layers, FAKE_LAYERS);
	ck_assert_uint_eq(tqkv_session_info(rig.session)->v_head_dim, FAKE_V_DIM);
	ck_assert_ptr_null(tqkv_session_name(rig.session));
	rig_stop(&rig);
}
END_TEST

/* Limits that make no sense are refused at HELLO, each of them. */
START_TEST(test_client_hello_refuses_bad_limits)
{
	for (int case_idx = 0; case_idx < 6; case_idx++) {
		struct fake_server fake;
		struct tqkv_conn *conn = NULL;
		struct tqkv_error err;

		fake_start(&fake);
		fake_lock(&fake);
		if (case_idx == 0)
			fake.limits.frame_bytes_max = KVP_FRAME_BYTES_MIN - 1;
		if (case_idx == 1)
			fake.limits.frame_bytes_max = (uint64_t)KVP_FRAME_BYTES_MAX + 1;
		if (case_idx == 2)
			fake.limits.boot_id = 0;
		if (case_idx == 3)
			fake.limits.items_max = 0;
		if (case_idx == 4)
			fake.limits.inflight_requests_max = 0;
		if (case_idx == 5)
			fake.limits.proto = 2;
		fake_unlock(&fake);
		ck_assert_int_eq(tqkv_connect(fake.address, NULL, &conn, &err), TQKV_BAD_FRAME);
		ck_assert_ptr_null(conn);
		ck_assert(err.is_local);
		fake_stop(&fake);
	}
}
END_TEST

/* A refusal at HELLO has HELLO's struct; its status comes through, with the range of versions. */
START_TEST(test_client_hello_refused)
{
	struct fake_server fake;
	struct tqkv_conn *conn = NULL;
	struct tqkv_error err;

	fake_start(&fake);
	fake_fault(&fake,
		(struct fake_fault){
			.action = FAKE_REFUSE_FRAME, .opcode = KVP_OP_HELLO, .n_times = 1, .status = 101 });
	ck_assert_int_eq(tqkv_connect(fake.address, NULL, &conn, &err), TQKV_VERSION_UNSUPPORTED);
	ck_assert(!err.is_local);
	ck_assert_ptr_nonnull(strstr(err.message, "versions 1 to 1"));
	fake_fault(&fake,
		(struct fake_fault){
			.action = FAKE_REFUSE_FRAME, .opcode = KVP_OP_HELLO, .n_times = 1, .status = 200 });
	ck_assert_int_eq(tqkv_connect(fake.address, NULL, &conn, &err), TQKV_UNAUTHENTICATED);
	ck_assert_str_eq(err.message, "HELLO: not authenticated: the daemon wants a token");
	const struct tqkv_options options = { .token = "of-a-reader" };

	fake_fault(&fake,
		(struct fake_fault){
			.action = FAKE_REFUSE_FRAME, .opcode = KVP_OP_HELLO, .n_times = 1, .status = 201 });
	ck_assert_int_eq(tqkv_connect(fake.address, &options, &conn, &err), TQKV_FORBIDDEN);
	ck_assert_str_eq(err.message,
		"HELLO: not allowed: the data port takes tokens of role data or admin, not of role read");
	fake_stop(&fake);
}
END_TEST

/* Ping, echo (cut and extended), pool JSON, pool rows over several frames, TELL over several pages, CANCEL.
 */
START_TEST(test_client_control_calls)
{
	struct rig rig;
	struct tqkv_pool_info info;
	char json[256];
	char echo[16];
	float matrix[256];
	enum tqkv_cancel_outcome outcome;

	rig_start(&rig, NULL, NULL);
	RIG_OK(&rig, tqkv_ping(rig.conn, NULL, 0, &rig.err));
	RIG_OK(&rig, tqkv_ping(rig.conn, rig.session, 0, &rig.err));
	RIG_OK(&rig, tqkv_echo(rig.conn, "hello", 5, echo, 3, 0, &rig.err));
	ck_assert_mem_eq(echo, "hel", 3);
	RIG_OK(&rig, tqkv_echo(rig.conn, "hello", 5, echo, 8, 0, &rig.err));
	ck_assert_mem_eq(echo, "hello\0\0\0", 8);
	RIG_OK(&rig, tqkv_pool_info(rig.conn, "demo", 0, json, sizeof(json), &info, 0, &rig.err));
	ck_assert_str_eq(json, rig.fake.pool_json);
	ck_assert_uint_eq(info.json_bytes, strlen(json));
	ck_assert_uint_eq(info.fingerprint, rig.fake.pool_fingerprint);
	ck_assert_int_eq(tqkv_pool_info(rig.conn, NULL, 0, json, 10, &info, 0, &rig.err), TQKV_TOO_LARGE);
	ck_assert_uint_eq(info.json_bytes, strlen(rig.fake.pool_json));
	RIG_OK(&rig, tqkv_pool_rows(rig.conn, "demo", TQKV_POOL_ROTATION, 0, 16, 16, matrix, 0, &rig.err));
	for (int i = 0; i < 256; i++)
		ck_assert_float_eq(matrix[i], (float)(100 * (i / 16) + i % 16));
	ck_assert_int_eq(tqkv_pool_rows(rig.conn, "demo", TQKV_POOL_ROTATION, 0, 16, 15, matrix, 0, &rig.err),
		TQKV_BAD_ARG);
	RIG_OK(&rig, tqkv_cancel(rig.conn, 77, 0, &outcome, &rig.err));
	ck_assert_int_eq(outcome, TQKV_CANCEL_TOO_LATE);
	RIG_OK(&rig, tqkv_close(rig.session, 0, &rig.err));
	ck_assert_uint_eq(fake_n_requests(&rig.fake, KVP_OP_CLOSE), 1);
	rig_stop(&rig);
}
END_TEST

/* TELL pages through all sequences, and tells where it stopped when the caller's array is full. */
START_TEST(test_client_tell_pages)
{
	struct rig rig;
	struct tqkv_sequence sequences[8];
	uint32_t lengths[8 * FAKE_LAYERS];
	uint32_t n = 0;
	uint64_t next = 1;

	rig_start(&rig, NULL, NULL);
	fake_lock(&rig.fake);
	rig.fake.limits.items_max = 2;
	fake_unlock(&rig.fake);
	tqkv_disconnect(rig.conn);
	rig_open(&rig, NULL, "paged");
	for (uint64_t sequence = 1; sequence <= 5; sequence++)
		RIG_OK(&rig, rig_append(&rig, sequence, 0, (uint32_t)sequence, NULL));
	RIG_OK(&rig, tqkv_tell(rig.session, 0, 8, sequences, lengths, &n, &next, 0, &rig.err));
	ck_assert_uint_eq(n, 5);
	ck_assert_uint_eq(next, 0);
	for (uint32_t i = 0; i < 5; i++) {
		ck_assert_uint_eq(sequences[i].sequence, i + 1);
		ck_assert_uint_eq(sequences[i].length_min, i + 1);
		ck_assert_uint_eq(lengths[i * FAKE_LAYERS + 3], i + 1);
	}
	RIG_OK(&rig, tqkv_tell(rig.session, 2, 3, sequences, NULL, &n, &next, 0, &rig.err));
	ck_assert_uint_eq(n, 3);
	ck_assert_uint_eq(next, 5);
	rig_stop(&rig);
}
END_TEST

/* GOAWAY is noticed and changes nothing else. */
START_TEST(test_client_goaway)
{
	struct rig rig;

	rig_start(&rig, NULL, NULL);
	ck_assert(!tqkv_is_draining(rig.conn));
	fake_lock(&rig.fake);
	rig.fake.sends_goaway = true;
	fake_unlock(&rig.fake);
	RIG_OK(&rig, tqkv_ping(rig.conn, NULL, 0, &rig.err));
	ck_assert(tqkv_is_draining(rig.conn));
	RIG_OK(&rig, tqkv_ping(rig.conn, NULL, 0, &rig.err));
	rig_stop(&rig);
}
END_TEST

/* FORMAT_MISMATCH names the member, whether the server compares fingerprints or the client has only the JSON.
 */
START_TEST(test_client_format_mismatch_names_the_member)
{
	const char *wanted = "{\"block_size\":16,\"layers\":[{\"k\":\"tq4\",\"v\":\"f32\"}]}";
	struct rig rig;
	struct tqkv_session *session = NULL;
	struct tqkv_open_params params = { .pool = "demo", .pool_json = wanted };

	rig_start(&rig, NULL, NULL);
	ck_assert_int_eq(tqkv_open(rig.conn, &params, 0, &session, &rig.err), TQKV_FORMAT_MISMATCH);
	ck_assert_ptr_nonnull(strstr(rig.err.message, "layers[0].k: expected \"tq4\", got \"f32\""));
	params.fingerprint = 5;
	ck_assert_int_eq(tqkv_open(rig.conn, &params, 0, &session, &rig.err), TQKV_FORMAT_MISMATCH);
	ck_assert_ptr_nonnull(strstr(rig.err.message, "layers[0].k: expected \"tq4\", got \"f32\""));
	ck_assert_ptr_null(session);
	params = (struct tqkv_open_params){ .pool = "demo", .pool_json = rig.fake.pool_json };
	RIG_OK(&rig, tqkv_open(rig.conn, &params, 0, &session, &rig.err));
	rig_stop(&rig);
}
END_TEST

/* ---- Golden bytes ---- */

/*
 * What the fake received equals the golden frame, except the request id, the deadline where the call has one,
 * and the header's CRC, which follows from them.
 */
static void expect_golden(struct rig *rig, uint16_t opcode, const char *name, bool has_deadline)
{
	uint8_t golden[GOLDEN_FRAME_BYTES_MAX];
	const size_t n_bytes = golden_frame(name, golden);
	struct kvp_header header;
	struct kvp_fault fault;

	fake_lock(&rig->fake);

	const uint8_t *got = rig->fake.last_frame[opcode];

	ck_assert_uint_eq(rig->fake.last_frame_bytes[opcode], n_bytes);
	ck_assert_int_eq(kvp_header_decode(golden, &header, &fault), KV_OK);
	header.request_id = kvp_get_u64(got + KVP_AT_REQUEST_ID);
	header.deadline_us = kvp_get_u32(got + KVP_AT_DEADLINE);
	ck_assert_int_eq(header.deadline_us != 0, has_deadline);
	kvp_header_encode(&header, golden);
	ck_assert_mem_eq(got, golden, n_bytes);
	fake_unlock(&rig->fake);
}

/* HELLO leaves exactly as in PROTOCOL.md, request id and CRC included; with token and name as in
 * hello_full_req. */
START_TEST(test_client_golden_hello)
{
	const struct tqkv_options options = {
		.flags = TQKV_OPTION_BODY_CRC,
		.token = "s3cr3t",
		.client_name = "worker-1",
		.features = 0xC,
	};
	uint8_t golden[GOLDEN_FRAME_BYTES_MAX];
	struct rig rig;

	rig_start(&rig, NULL, NULL);
	ck_assert_uint_eq(golden_frame("hello_req", golden), rig.fake.last_frame_bytes[KVP_OP_HELLO]);
	ck_assert_mem_eq(rig.fake.last_frame[KVP_OP_HELLO], golden, rig.fake.last_frame_bytes[KVP_OP_HELLO]);
	tqkv_disconnect(rig.conn);
	rig_open(&rig, &options, NULL);

	/* The golden frame also says versions 1 to 3 and a boot id: ours says what it is. */
	const size_t n_bytes = golden_frame("hello_full_req", golden);
	const uint8_t *got = rig.fake.last_frame[KVP_OP_HELLO];

	fake_lock(&rig.fake);
	ck_assert_uint_eq(rig.fake.last_frame_bytes[KVP_OP_HELLO], n_bytes);
	ck_assert_mem_eq(got + KVP_AT_FLAGS, golden + KVP_AT_FLAGS, 4);
	ck_assert_mem_eq(got + KVP_AT_BODY_BYTES, golden + KVP_AT_BODY_BYTES, 16);
	ck_assert_mem_eq(got + 64 + 4, golden + 64 + 4, 12);
	ck_assert_mem_eq(got + 128, golden + 128, n_bytes - 128);
	fake_unlock(&rig.fake);
	rig_stop(&rig);
}
END_TEST

/* Requests as in the golden frames, byte for byte. */
START_TEST(test_client_golden_requests)
{
	const struct tqkv_open_params attach = { .session_name = "chat.7" };
	const struct tqkv_open_params open = {
		.pool = "smol",
		.session_name = "chat.7",
		.priority = 2,
		.lease_ms = 30000,
		.reserve_blocks = 8,
		.sequences_max = 4,
		.tokens_max = 2048,
		.fingerprint = 0xA1B2C3D4E5F60718,
	};
	const struct tqkv_item items[2] = { { .sequence = 7, .position = 32 },
		{ .sequence = 8, .position = 0 } };
	const struct tqkv_item child = { .sequence = 11, .position = 32 };
	const struct tqkv_item moved[2] = { { .sequence = 7 }, { .sequence = 11 } };
	const uint64_t parent = 7;
	struct rig rig;
	struct tqkv_session *session;
	struct tqkv_pool_info info;
	char json[256];
	uint64_t id;

	rig_start(&rig, NULL, NULL);
	fake_lock(&rig.fake);
	rig.fake.pool_fingerprint = open.fingerprint;
	fake_unlock(&rig.fake);
	/* The handle of the golden frames. */
	ck_assert_uint_eq(tqkv_session_info(rig.session)->handle, 0x005A17C39E210003);
	RIG_OK(&rig, tqkv_submit_items(rig.session, TQKV_OP_TRUNCATE, items, 2, 0, &id, &rig.err));
	tqkv_forget(rig.conn, id);
	RIG_OK(&rig, tqkv_submit_fork(rig.session, &child, &parent, 1, 0, &id, &rig.err));
	tqkv_forget(rig.conn, id);
	ck_assert_int_eq(
		tqkv_submit_fork(rig.session, &child, &child.sequence, 1, 0, &id, &rig.err), TQKV_BAD_ARG);
	ck_assert_int_eq(tqkv_submit_fork(rig.session, &child, NULL, 1, 0, &id, &rig.err), TQKV_BAD_ARG);
	RIG_OK(&rig, tqkv_submit_items(rig.session, TQKV_OP_SPILL, moved, 2, 0, &id, &rig.err));
	tqkv_forget(rig.conn, id);
	RIG_OK(&rig, tqkv_submit_items(rig.session, TQKV_OP_PREFETCH, moved, 1, 0, &id, &rig.err));
	tqkv_forget(rig.conn, id);
	RIG_OK(&rig, tqkv_submit_tell(rig.session, 1, 256, true, 0, &id, &rig.err));
	tqkv_forget(rig.conn, id);
	RIG_OK(&rig, tqkv_open(rig.conn, &open, 0, &session, &rig.err));
	RIG_OK(&rig, tqkv_attach(rig.conn, &attach, 0, &session, &rig.err));
	RIG_OK(&rig, tqkv_pool_info(rig.conn, "smol", 0, json, sizeof(json), &info, 0, &rig.err));
	expect_golden(&rig, KVP_OP_TRUNCATE, "truncate_req", false);
	expect_golden(&rig, KVP_OP_FORK, "fork_req", false);
	expect_golden(&rig, KVP_OP_SPILL, "spill_req", false);
	expect_golden(&rig, KVP_OP_PREFETCH, "prefetch_req", false);
	expect_golden(&rig, KVP_OP_TELL, "tell_req", false);
	expect_golden(&rig, KVP_OP_OPEN, "open_req", true);
	expect_golden(&rig, KVP_OP_ATTACH, "attach_req", true);
	expect_golden(&rig, KVP_OP_POOL_INFO, "pool_info_req", true);
	RIG_OK(&rig, tqkv_close(rig.session, 0, &rig.err));
	expect_golden(&rig, KVP_OP_CLOSE, "close_req", true);
	rig_stop(&rig);
}
END_TEST

/* ---- Deadlines ---- */

/* A server that takes requests and never answers: DEADLINE at the set time, and the connection stays usable.
 */
START_TEST(test_client_blackholed_server_gives_deadline)
{
	struct rig rig;
	struct tqkv_item_result got;

	rig_start(&rig, NULL, NULL);
	for (int case_idx = 0; case_idx < 2; case_idx++) {
		const int64_t started_ms = now_ms();

		fake_fault(&rig.fake,
			(struct fake_fault){ .action = FAKE_SILENT,
				.opcode = case_idx ? KVP_OP_PING : KVP_OP_TRUNCATE,
				.n_times = 1 });
		if (case_idx == 0) {
			const struct tqkv_item item = { .sequence = 3 };
			struct tqkv_rows_result result = { .items = &got };

			ck_assert_int_eq(
				tqkv_truncate(rig.session, &item, 1, 200, &result, &rig.err), TQKV_DEADLINE);
			ck_assert_int_eq(got.status, TQKV_DEADLINE);
		} else {
			ck_assert_int_eq(tqkv_ping(rig.conn, NULL, 200, &rig.err), TQKV_DEADLINE);
		}
		ck_assert(rig.err.is_local);
		ck_assert(rig.err.is_outcome_unknown);
		ck_assert_int_ge(now_ms() - started_ms, 199);
		ck_assert_int_lt(now_ms() - started_ms, 200 + LATE_MS);
	}
	RIG_OK(&rig, tqkv_ping(rig.conn, NULL, 0, &rig.err));
	rig_stop(&rig);
}
END_TEST

/* The same when half an answer comes: the rest is still expected afterwards, so later calls end at their
 * deadline. */
START_TEST(test_client_half_a_reply_gives_deadline)
{
	struct rig rig;

	rig_start(&rig, NULL, NULL);
	fake_fault(&rig.fake,
		(struct fake_fault){ .action = FAKE_HALF_REPLY, .opcode = KVP_OP_PING, .n_times = 1 });
	ck_assert_int_eq(tqkv_ping(rig.conn, NULL, 100, &rig.err), TQKV_DEADLINE);
	fake_fault(
		&rig.fake, (struct fake_fault){ .action = FAKE_SILENT, .opcode = KVP_OP_PING, .n_times = 1 });
	ck_assert_int_eq(tqkv_ping(rig.conn, NULL, 100, &rig.err), TQKV_DEADLINE);
	ck_assert(tqkv_is_connected(rig.conn));
	rig_stop(&rig);
}
END_TEST

/* Somebody who listens and never accepts: connecting ends at connect_timeout_ms. */
START_TEST(test_client_connect_times_out)
{
	struct sockaddr_un name = { .sun_family = AF_UNIX };
	const struct tqkv_options options = { .connect_timeout_ms = 150 };
	struct tqkv_conn *conn = NULL;
	struct tqkv_error err;
	char address[120];
	char dir[] = "/tmp/tqkv-test-XXXXXX";
	const int fd = socket(AF_UNIX, SOCK_STREAM, 0);

	ck_assert_ptr_nonnull(mkdtemp(dir));
	snprintf(name.sun_path, sizeof(name.sun_path), "%s/sock", dir);
	snprintf(address, sizeof(address), "unix:%s", name.sun_path);
	ck_assert_int_eq(bind(fd, (struct sockaddr *)&name, sizeof(name)), 0);
	ck_assert_int_eq(listen(fd, 0), 0);
	/* The first waits for HELLO's answer, the second for the backlog. */
	for (int i = 0; i < 2; i++) {
		const int64_t started_ms = now_ms();

		ck_assert_int_eq(tqkv_connect(address, &options, &conn, &err), TQKV_DEADLINE);
		ck_assert_int_ge(now_ms() - started_ms, 149);
		ck_assert_int_lt(now_ms() - started_ms, 150 + LATE_MS);
	}
	close(fd);
	ck_assert_int_eq(tqkv_connect(address, &options, &conn, &err), TQKV_IO_ERROR);
	ck_assert_int_eq(err.scope, TQKV_SCOPE_CONN);
	unlink(name.sun_path);
	rmdir(dir);
}
END_TEST

/* The deadline travels with the request, and a request whose time is over before it leaves is never sent. */
START_TEST(test_client_deadline_is_told_to_the_server)
{
	struct rig rig;

	rig_start(&rig, NULL, NULL);
	RIG_OK(&rig, tqkv_ping(rig.conn, NULL, 5000, &rig.err));
	fake_lock(&rig.fake);
	ck_assert_uint_le(rig.fake.deadline_us, 5000000);
	ck_assert_uint_gt(rig.fake.deadline_us, 4000000);
	fake_unlock(&rig.fake);
	rig_stop(&rig);
}
END_TEST

/* Addresses that do not parse are told apart from servers that are not there. */
START_TEST(test_client_addresses)
{
	static const char *const bad[] = { "", "unix:", "tcp:", "tcp:host", "tcp:host:", "tcp::80",
		"tcp:host:x1", "tcp:::1:80", "tcp:[::1]80", "http://x", "tcp:host:123456" };
	struct tqkv_conn *conn = NULL;
	struct tqkv_error err;
	char path[300] = "unix:/";

	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		ck_assert_msg(tqkv_connect(bad[i], NULL, &conn, &err) == TQKV_BAD_ARG, "%s", bad[i]);
		ck_assert_str_ne(err.message, "");
	}
	memset(path + 6, 'x', 200);
	ck_assert_int_eq(tqkv_connect(path, NULL, &conn, &err), TQKV_BAD_ARG);
	ck_assert_int_eq(tqkv_connect("unix:/nonexistent/tqkv.sock", NULL, &conn, &err), TQKV_IO_ERROR);
	/* Port 1 of the loopback: nobody listens there in a test environment. */
	ck_assert_int_eq(tqkv_connect("tcp:127.0.0.1:1", NULL, &conn, &err), TQKV_IO_ERROR);
	ck_assert_int_eq(tqkv_connect(NULL, NULL, &conn, NULL), TQKV_BAD_ARG);
	ck_assert_ptr_null(conn);
}
END_TEST

/* ---- Hostile replies ---- */

/* Every single byte of a reply changed: the call ends, with OK or an error, and nothing else happens. */
START_TEST(test_client_survives_every_flipped_byte)
{
	struct rig rig;
	const struct tqkv_options options = { .timeout_ms = 50, .flags = TQKV_OPTION_NO_RETRY };
	uint32_t n_failed = 0;

	rig_start(&rig, &options, NULL);
	for (uint32_t at = 0; at < 64 + 64 + 32; at++) {
		struct tqkv_item_result got = { 0 };
		const struct tqkv_item item = {
			.sequence = 9, .position = TQKV_POSITION_PLANNED, .q_len = 1
		};
		struct tqkv_rows rows = { .items = &item, .n_items = 1, .n_layers = 1, .flags = TQKV_LSE };
		float out[FAKE_OUT], lse[FAKE_Q_HEADS];
		struct tqkv_rows_result result = { .items = &got,
			.out = out,
			.lse = lse,
			.out_bytes_max = sizeof(out),
			.lse_bytes_max = sizeof(lse) };
		float *q;

		tqkv_disconnect(rig.conn);
		fake_lock(&rig.fake);
		rig.fake.n_sessions = 0;
		fake_unlock(&rig.fake);
		rig_open(&rig, &options, "flip");
		(void)rig_append(&rig, 9, 0, 1, NULL); /* the first one creates it */
		q = rig_queries(&rows, 1);
		fake_fault(&rig.fake,
			(struct fake_fault){ .action = FAKE_FLIP_BYTE,
				.opcode = KVP_OP_DECODE,
				.n_times = 1,
				.at = at,
				.mask = 0x41 });
		if (tqkv_decode(rig.session, &rows, 50, &result, &rig.err) != TQKV_OK)
			n_failed++;
		free(q);
	}
	/* Most bytes carry meaning: magic, lengths, echoes, counts, offsets. */
	ck_assert_uint_gt(n_failed, 60);
	rig_stop(&rig);
}
END_TEST

/* A header whose CRC is wrong, and a body whose CRC is wrong: BAD_FRAME, and the connection is lost. */
START_TEST(test_client_checks_crcs)
{
	const struct tqkv_options options = { .flags = TQKV_OPTION_BODY_CRC };
	struct rig rig;

	rig_start(&rig, &options, NULL);
	fake_lock(&rig.fake);
	ck_assert_uint_ne(rig.fake.flags & KVP_FLAG_BODY_CRC, 0);
	fake_unlock(&rig.fake);
	fake_fault(&rig.fake,
		(struct fake_fault){
			.action = FAKE_FLIP_RAW, .opcode = KVP_OP_PING, .n_times = 1, .at = 20, .mask = 1 });
	ck_assert_int_eq(tqkv_ping(rig.conn, NULL, 0, &rig.err), TQKV_BAD_FRAME);
	ck_assert(!tqkv_is_connected(rig.conn));
	ck_assert_ptr_nonnull(strstr(rig.err.message, "CRC"));
	ck_assert_int_eq(tqkv_ping(rig.conn, NULL, 0, &rig.err), TQKV_BAD_FRAME);
	ck_assert_int_eq(tqkv_fd(rig.conn), -1);
	/* The reply claims a body CRC (flag bit 1), which is 0: wrong. */
	tqkv_disconnect(rig.conn);
	rig_open(&rig, &options, NULL);
	fake_fault(&rig.fake,
		(struct fake_fault){ .action = FAKE_FLIP_BYTE,
			.opcode = KVP_OP_PING,
			.n_times = 1,
			.at = KVP_AT_FLAGS,
			.mask = 2 });
	ck_assert_int_eq(tqkv_ping(rig.conn, NULL, 0, &rig.err), TQKV_BAD_FRAME);
	rig_stop(&rig);
}
END_TEST

static Suite *suite(void)
{
	Suite *suite = suite_create("client");
	TCase *tcase = tcase_create("client");

	tcase_add_test(tcase, test_client_hello_tells_limits);
	tcase_add_test(tcase, test_client_hello_refuses_bad_limits);
	tcase_add_test(tcase, test_client_hello_refused);
	tcase_add_test(tcase, test_client_control_calls);
	tcase_add_test(tcase, test_client_tell_pages);
	tcase_add_test(tcase, test_client_goaway);
	tcase_add_test(tcase, test_client_format_mismatch_names_the_member);
	tcase_add_test(tcase, test_client_golden_hello);
	tcase_add_test(tcase, test_client_golden_requests);
	tcase_add_test(tcase, test_client_blackholed_server_gives_deadline);
	tcase_add_test(tcase, test_client_half_a_reply_gives_deadline);
	tcase_add_test(tcase, test_client_connect_times_out);
	tcase_add_test(tcase, test_client_deadline_is_told_to_the_server);
	tcase_add_test(tcase, test_client_addresses);
	tcase_add_test(tcase, test_client_survives_every_flipped_byte);
	tcase_add_test(tcase, test_client_checks_crcs);
	suite_add_tcase(suite, tcase);
	return suite;
}

int main(void)
{
	return kv_test_run(suite(), CK_FORK);
}
