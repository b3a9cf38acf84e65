/*
 * What a caller may get wrong: pointers that may not be NULL are told as BAD_ARG, with and without an error
 * to fill, and nothing is sent.
 */
#include "proto/client/tqkv_codec.h"
#include "tests/lib/kv_test.h"
#include "tests/unit/client_rig.h"

#define IS_REFUSED(call) ck_assert_int_eq((call), TQKV_BAD_ARG)

static void refuse_of_connections(struct rig *rig, struct tqkv_error *err)
{
	const struct tqkv_open_params params = { .pool = "demo" };
	enum tqkv_cancel_outcome outcome;
	struct tqkv_session *session;
	struct tqkv_pool_info info;
	struct tqkv_reply reply;
	float row[4];

	IS_REFUSED(tqkv_connect(rig->fake.address, NULL, NULL, err));
	IS_REFUSED(tqkv_connect(NULL, NULL, &rig->conn, err));
	IS_REFUSED(tqkv_open(NULL, &params, 0, &session, err));
	IS_REFUSED(tqkv_open(rig->conn, NULL, 0, &session, err));
	IS_REFUSED(tqkv_attach(rig->conn, &params, 0, NULL, err));
	IS_REFUSED(tqkv_ping(NULL, NULL, 0, err));
	IS_REFUSED(tqkv_echo(rig->conn, NULL, 1, NULL, 0, 0, err));
	IS_REFUSED(tqkv_echo(rig->conn, NULL, 0, NULL, 1, 0, err));
	IS_REFUSED(tqkv_pool_info(rig->conn, "demo", 0, NULL, 0, NULL, 0, err));
	IS_REFUSED(tqkv_pool_info(rig->conn, "demo", 0, NULL, 9, &info, 0, err));
	IS_REFUSED(tqkv_pool_rows(rig->conn, "demo", TQKV_POOL_ROTATION, 0, 1, 4, NULL, 0, err));
	IS_REFUSED(tqkv_pool_rows(rig->conn, "demo", TQKV_POOL_ROTATION, 0, 1, 0, row, 0, err));
	IS_REFUSED(tqkv_reconnect(NULL, NULL, 0, NULL, err));
	IS_REFUSED(tqkv_wait(NULL, TQKV_ANY, 0, &reply, err));
	IS_REFUSED(tqkv_wait(rig->conn, TQKV_ANY, 0, NULL, err));
	IS_REFUSED(tqkv_cancel(NULL, 1, 0, &outcome, err));
	IS_REFUSED(tqkv_cancel(rig->conn, 1, 0, NULL, err));
}

static void refuse_of_sessions(struct rig *rig, struct tqkv_error *err)
{
	struct tqkv_session *session = rig->session;
	const struct tqkv_item item = { .sequence = 1, .q_len = 1, .position = TQKV_POSITION_PLANNED };
	float q[FAKE_Q] = { 0 }, out[FAKE_OUT];
	const struct tqkv_rows rows = { .items = &item,
		.n_items = 1,
		.n_layers = 1,
		.q = q,
		.q_bytes = sizeof(q),
		.q_dtype = TQKV_F32,
		.out_dtype = TQKV_F32 };
	struct tqkv_rows_result result = { .out = out, .out_bytes_max = sizeof(out) };
	const struct tqkv_prefix prefix = { .n_tokens = 1 };
	struct tqkv_prefix_result found;
	uint64_t id;
	uint32_t n;

	IS_REFUSED(tqkv_decode(NULL, &rows, 0, &result, err));
	IS_REFUSED(tqkv_decode(session, NULL, 0, &result, err));
	IS_REFUSED(tqkv_decode(session, &rows, 0, NULL, err));
	IS_REFUSED(tqkv_truncate(NULL, &item, 1, 0, &result, err));
	IS_REFUSED(tqkv_truncate(session, NULL, 1, 0, &result, err));
	IS_REFUSED(tqkv_fork(session, &item, NULL, 1, 0, &result, err));
	IS_REFUSED(tqkv_publish(session, 1, NULL, 0, &found, err));
	IS_REFUSED(tqkv_publish(session, 1, &prefix, 0, NULL, err));
	IS_REFUSED(tqkv_match(NULL, 1, &prefix, 0, &found, err));
	IS_REFUSED(tqkv_match(session, 1, &prefix, 0, &found, err)); /* no tokens */
	IS_REFUSED(tqkv_tell(session, 0, 1, NULL, NULL, &n, &id, 0, err));
	IS_REFUSED(tqkv_tell(session, 0, 0, NULL, NULL, NULL, &id, 0, err));
	IS_REFUSED(tqkv_read(session, NULL, 0, err));
	IS_REFUSED(tqkv_update_slots(session, NULL, 0, NULL, err));
	IS_REFUSED(tqkv_decode_table(session, NULL, 0, NULL, err));
	IS_REFUSED(tqkv_submit_decode(session, &rows, 0, NULL, err));
	IS_REFUSED(tqkv_submit_decode(session, NULL, 0, &id, err));
	IS_REFUSED(tqkv_submit_tell(session, 0, 1, false, 0, NULL, err));
	IS_REFUSED(tqkv_submit_read(session, NULL, 0, &id, err));
}

static void refuse_of_rows(struct rig *rig, struct tqkv_error *err)
{
	const float part[4] = { 0 }, lse[1] = { 0 };
	const void *outs[] = { part, NULL };
	const float *lses[] = { lse, lse };
	struct tqkv_codec *codec;
	float out[4];

	IS_REFUSED(tqkv_merge(1, NULL, lses, 1, 4, TQKV_F32, out, NULL, err));
	IS_REFUSED(tqkv_merge(1, outs, NULL, 1, 4, TQKV_F32, out, NULL, err));
	IS_REFUSED(tqkv_merge(2, outs, lses, 1, 4, TQKV_F32, out, NULL, err));
	IS_REFUSED(tqkv_merge(1, outs, lses, 1, 4, TQKV_F32, NULL, NULL, err));
	IS_REFUSED(tqkv_codec_create_from_pool_json(NULL, NULL, &codec, err));
	IS_REFUSED(tqkv_codec_create(rig->conn, "demo", NULL, 0, NULL, err));
	IS_REFUSED(tqkv_codec_encode(NULL, 0, false, TQKV_F32, part, sizeof(part), 1, out, sizeof(out), err));
	IS_REFUSED(tqkv_codec_decode(NULL, 0, false, TQKV_F32, part, sizeof(part), 1, out, sizeof(out), err));
}

/* Every pointer that a call needs, NULL in its place. */
START_TEST(test_client_misuse_null)
{
	struct rig rig;
	uint32_t n_before = 0, n_after = 0;

	rig_start(&rig, NULL, NULL);
	for (int opcode = 0; opcode < 128; opcode++)
		n_before += fake_n_requests(&rig.fake, (uint16_t)opcode);
	for (int has_error = 0; has_error < 2; has_error++) {
		struct tqkv_error *err = has_error ? &rig.err : NULL;

		refuse_of_connections(&rig, err);
		refuse_of_sessions(&rig, err);
		refuse_of_rows(&rig, err);
	}
	ck_assert_str_ne(rig.err.message, "");
	for (int opcode = 0; opcode < 128; opcode++)
		n_after += fake_n_requests(&rig.fake, (uint16_t)opcode);
	ck_assert_uint_eq(n_after, n_before);
	rig_stop(&rig);
}
END_TEST

/* What tells of nothing has an answer, too. */
START_TEST(test_client_misuse_nothing)
{
	char text[64];

	ck_assert_ptr_null(tqkv_server_info(NULL));
	ck_assert(!tqkv_is_connected(NULL) && !tqkv_is_draining(NULL));
	ck_assert_int_eq(tqkv_fd(NULL), -1);
	ck_assert_uint_eq(tqkv_poll(NULL), 0);
	tqkv_forget(NULL, 1);
	tqkv_disconnect(NULL);
	ck_assert_int_eq(tqkv_close(NULL, 0, NULL), TQKV_OK);
	ck_assert_ptr_null(tqkv_session_info(NULL));
	ck_assert_ptr_null(tqkv_session_conn(NULL));
	ck_assert_ptr_null(tqkv_session_name(NULL));
	ck_assert(tqkv_pool_json_differs(NULL, "{}", text, sizeof(text)));
	ck_assert_str_ne(text, "");
	ck_assert(tqkv_pool_json_differs("{}", NULL, NULL, 0));
}
END_TEST

/* A MATCH that finds nothing is no error, and needs none to be told; a refusal is. */
START_TEST(test_client_misuse_match_without_error)
{
	const uint32_t token = 7;
	const struct tqkv_prefix prefix = { .tokens = &token, .n_tokens = 1 };
	struct tqkv_prefix_result found = { .n_tokens = 9 };
	struct rig rig;

	rig_start(&rig, NULL, NULL);
	fake_fault(&rig.fake,
		(struct fake_fault){ .action = FAKE_REFUSE_FRAME,
			.opcode = KVP_OP_MATCH,
			.n_times = 1,
			.status = KV_NOT_FOUND });
	ck_assert_int_eq(tqkv_match(rig.session, 1, &prefix, 0, &found, NULL), TQKV_OK);
	ck_assert_uint_eq(found.n_tokens, 0);
	fake_fault(&rig.fake,
		(struct fake_fault){ .action = FAKE_REFUSE_FRAME,
			.opcode = KVP_OP_MATCH,
			.n_times = 1,
			.status = KV_NOT_OWNER });
	ck_assert_int_eq(tqkv_match(rig.session, 1, &prefix, 0, &found, &rig.err), TQKV_NOT_OWNER);
	ck_assert_int_eq(rig.err.status, TQKV_NOT_OWNER);
	rig_stop(&rig);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("client misuse");
	TCase *tcase = tcase_create("all");

	tcase_add_test(tcase, test_client_misuse_null);
	tcase_add_test(tcase, test_client_misuse_nothing);
	tcase_add_test(tcase, test_client_misuse_match_without_error);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_NOFORK);
}
