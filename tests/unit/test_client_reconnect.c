/*
 * The client and lost connections: tqkv_reconnect(), and what TQKV_OPTION_RECONNECT does by itself.
 */
#include "proto/client/conn.h"
#include "tests/lib/kv_test.h"
#include "tests/unit/client_rig.h"

struct lengths {
	uint32_t length[4];
	bool was_truncated[4];
	uint32_t n;
};

static void note_length(
	void *arg, struct tqkv_session *session, uint64_t sequence, uint32_t length, bool was_truncated)
{
	struct lengths *lengths = arg;

	(void)session;
	ck_assert_uint_lt(sequence, 4);
	lengths->length[sequence] = length;
	lengths->was_truncated[sequence] = was_truncated;
	lengths->n++;
}

/* After a lost acknowledgement: ATTACH, TELL, TRUNCATE to the shortest layer; the caller learns lengths and
 * goes on. */
START_TEST(test_client_reconnect_settles_lengths)
{
	const struct tqkv_item ahead = { 2, 3, 1, 0, 0 };
	struct tqkv_rows rows = { .items = &ahead, .n_items = 1, .n_layers = 1 };
	struct lengths lengths = { .n = 0 };
	const struct tqkv_reconnect_params params = { .on_sequence = note_length, .arg = &lengths };
	struct tqkv_reconnect_report report;
	struct tqkv_item_result got;
	struct rig rig;
	struct tqkv_reply reply;
	uint64_t id;

	rig_start(&rig, NULL, "named");
	RIG_OK(&rig, rig_append(&rig, 1, 0, 5, NULL));
	RIG_OK(&rig, rig_append(&rig, 2, 0, 3, NULL));
	rig_fill(&rows);
	/* Layer 0 of sequence 2 gets a token whose acknowledgement is lost. */
	fake_fault(&rig.fake,
		(struct fake_fault){ .action = FAKE_DROP_AFTER, .opcode = KVP_OP_APPEND, .n_times = 1 });
	RIG_OK(&rig, tqkv_submit_append(rig.session, &rows, 0, &id, &rig.err));
	ck_assert_int_eq(tqkv_wait(rig.conn, id, 0, &reply, &rig.err), TQKV_IO_ERROR);
	ck_assert_uint_eq(reply.request_id, id);
	ck_assert(rig.err.is_outcome_unknown);
	ck_assert(!tqkv_is_connected(rig.conn));
	ck_assert_int_eq(rig_append(&rig, 1, 5, 1, &got), TQKV_IO_ERROR);
	ck_assert_uint_eq(fake_length(&rig.fake, 2, 0), 4);

	RIG_OK(&rig, tqkv_reconnect(rig.conn, &params, 0, &report, &rig.err));
	ck_assert_uint_eq(rig.fake.boot_id_seen, 0xB007);
	ck_assert_uint_eq(report.boot_id, report.boot_id_before);
	ck_assert_uint_eq(report.n_sessions, 1);
	ck_assert_uint_eq(report.n_attached, 1);
	ck_assert_uint_eq(report.n_sequences, 2);
	ck_assert_uint_eq(report.n_truncated, 1);
	ck_assert_uint_eq(lengths.n, 2);
	ck_assert_uint_eq(lengths.length[1], 5);
	ck_assert_uint_eq(lengths.length[2], 3);
	ck_assert(lengths.was_truncated[2] && !lengths.was_truncated[1]);
	ck_assert_uint_eq(fake_length(&rig.fake, 2, 0), 3);
	RIG_OK(&rig, rig_append(&rig, 1, 5, 1, &got));
	ck_assert_int_eq(got.status, TQKV_OK);
	rig_free(&rows);
	rig_stop(&rig);
}
END_TEST

/* With keep_lengths nothing is cut: for clients that stream layer by layer. */
START_TEST(test_client_reconnect_keeps_lengths)
{
	const struct tqkv_item item = { 2, 0, 3, 0, TQKV_CREATE };
	struct tqkv_rows rows = { .items = &item, .n_items = 1, .n_layers = 2 };
	const struct tqkv_reconnect_params params = { .keep_lengths = true };
	struct tqkv_reconnect_report report;
	struct rig rig;

	rig_start(&rig, NULL, "named");
	rig_fill(&rows);
	RIG_OK(&rig, tqkv_append(rig.session, &rows, 0, NULL, &rig.err));
	/* Also without a loss before. */
	RIG_OK(&rig, tqkv_reconnect(rig.conn, &params, 0, &report, &rig.err));
	ck_assert_uint_eq(report.n_truncated, 0);
	ck_assert_uint_eq(fake_length(&rig.fake, 2, 1), 3);
	rig_free(&rows);
	rig_stop(&rig);
}
END_TEST

/* A restarted daemon: STALE_EPOCH, the session is lost for good and says so without asking the server; new
 * ones work. */
START_TEST(test_client_reconnect_after_restart)
{
	const struct tqkv_open_params params = { .pool = "demo" };
	struct tqkv_reconnect_report report;
	struct tqkv_session *fresh;
	struct rig rig;

	rig_start(&rig, NULL, "named");
	RIG_OK(&rig, rig_append(&rig, 1, 0, 5, NULL));
	fake_restart(&rig.fake);
	ck_assert_int_eq(tqkv_ping(rig.conn, NULL, 0, &rig.err), TQKV_IO_ERROR);
	ck_assert_int_eq(tqkv_reconnect(rig.conn, NULL, 0, &report, &rig.err), TQKV_STALE_EPOCH);
	ck_assert_uint_eq(report.boot_id_before, 0xB007);
	ck_assert_uint_eq(report.boot_id, 0xB008);
	ck_assert_uint_eq(report.n_attached, 0);
	ck_assert(tqkv_is_connected(rig.conn));
	ck_assert_int_eq(rig_append(&rig, 1, 5, 1, NULL), TQKV_STALE_EPOCH);
	ck_assert(rig.err.is_local);
	RIG_OK(&rig, tqkv_ping(rig.conn, NULL, 0, &rig.err));
	ck_assert_int_eq(tqkv_close(rig.session, 0, &rig.err), TQKV_STALE_EPOCH);
	RIG_OK(&rig, tqkv_open(rig.conn, &params, 0, &fresh, &rig.err));
	rig.session = fresh;
	RIG_OK(&rig, rig_append(&rig, 1, 0, 5, NULL));
	rig_stop(&rig);
}
END_TEST

/* A daemon that restored a snapshot has the named session; the caller's reconnect attaches it, and the length
 * goes on. */
START_TEST(test_client_reconnect_after_restore)
{
	struct tqkv_reconnect_report report;
	struct rig rig;

	rig_start(&rig, NULL, "named");
	RIG_OK(&rig, rig_append(&rig, 1, 0, 5, NULL));
	fake_restart_restored(&rig.fake);
	ck_assert_int_eq(tqkv_ping(rig.conn, NULL, 0, &rig.err), TQKV_IO_ERROR);
	RIG_OK(&rig, tqkv_reconnect(rig.conn, NULL, 0, &report, &rig.err));
	ck_assert_uint_eq(report.n_attached, 1);
	ck_assert_uint_ne(report.boot_id, report.boot_id_before);
	RIG_OK(&rig, rig_append(&rig, 1, 5, 1, NULL));
	rig_stop(&rig);
}
END_TEST

/* RECONNECT by itself does not go on with what a snapshot brought back: it may be older. */
START_TEST(test_client_automatic_reconnect_after_restore)
{
	const struct tqkv_options options = { .flags = TQKV_OPTION_RECONNECT };
	struct rig rig;

	rig_start(&rig, &options, "named");
	RIG_OK(&rig, rig_append(&rig, 1, 0, 5, NULL));
	fake_restart_restored(&rig.fake);
	ck_assert_int_eq(rig_append(&rig, 1, 5, 1, NULL), TQKV_STALE_EPOCH);
	rig_stop(&rig);
}
END_TEST

/* A session without a name cannot come back; the connection does. */
START_TEST(test_client_reconnect_loses_nameless_sessions)
{
	struct tqkv_reconnect_report report;
	struct rig rig;

	rig_start(&rig, NULL, NULL);
	ck_assert_int_eq(tqkv_reconnect(rig.conn, NULL, 0, &report, &rig.err), TQKV_STALE_HANDLE);
	ck_assert_uint_eq(report.n_attached, 0);
	ck_assert_int_eq(rig_append(&rig, 1, 0, 1, NULL), TQKV_STALE_HANDLE);
	RIG_OK(&rig, tqkv_ping(rig.conn, NULL, 0, &rig.err));
	rig_stop(&rig);
}
END_TEST

/*
 * RECONNECT: connections lost before and after the effect, several times within one split append: every token
 * is stored exactly once.
 */
START_TEST(test_client_automatic_reconnect_appends_once)
{
	const struct tqkv_options options = { .flags = TQKV_OPTION_RECONNECT };
	struct tqkv_item_result got;
	struct rig rig;

	for (uint32_t case_idx = 0; case_idx < 6; case_idx++) {
		rig_start(&rig, &options, "named");
		for (uint32_t i = 0; i < 3; i++)
			fake_fault(&rig.fake,
				(struct fake_fault){
					.action = (case_idx + i) % 2 ? FAKE_DROP_AFTER : FAKE_DROP_BEFORE,
					.opcode = KVP_OP_APPEND,
					.n_times = 1,
					.n_skip = case_idx / 2 + 3 * i });
		RIG_OK(&rig, rig_append(&rig, 1, 0, 400, &got));
		ck_assert_int_eq(got.status, TQKV_OK);
		ck_assert_uint_eq(got.n_tokens, 400);
		for (uint32_t layer = 0; layer < FAKE_LAYERS; layer++)
			ck_assert_uint_eq(fake_length(&rig.fake, 1, layer), 400);
		fake_lock(&rig.fake);
		ck_assert_uint_ge(rig.fake.n_connections, 2);

		const struct fake_sequence *stored =
			fake_find(&rig.fake, tqkv_session_info(rig.session)->handle, 1, false);

		for (uint32_t token = 0; token < 400; token++)
			ck_assert_float_eq(
				stored->layers[3].v[token * FAKE_V_TOKEN + 1], rig_v(1, 3, token, 1));
		fake_unlock(&rig.fake);
		rig_stop(&rig);
	}
}
END_TEST

/* RECONNECT: an APPEND_DECODE that was stored and lost its answer only decodes; each output is right. */
START_TEST(test_client_automatic_reconnect_append_decode)
{
	const struct tqkv_options options = { .flags = TQKV_OPTION_RECONNECT };
	const struct tqkv_item item = { 1, 5, 1, 1, 0 };
	float out[FAKE_OUT];
	struct tqkv_item_result got;
	struct tqkv_rows_result result = { .items = &got, .out = out, .out_bytes_max = sizeof(out) };
	struct tqkv_rows rows = { .items = &item, .n_items = 1, .n_layers = 1 };
	struct rig rig;

	for (int is_after = 0; is_after < 2; is_after++) {
		rig_start(&rig, &options, "named");
		RIG_OK(&rig, rig_append(&rig, 1, 0, 5, NULL));
		rig_fill(&rows);

		float *q = rig_queries(&rows, 1);

		fake_fault(&rig.fake,
			(struct fake_fault){ .action = is_after ? FAKE_DROP_AFTER : FAKE_DROP_BEFORE,
				.opcode = KVP_OP_APPEND_DECODE,
				.n_times = 1 });
		RIG_OK(&rig, tqkv_append_decode(rig.session, &rows, 0, &result, &rig.err));
		ck_assert_int_eq(got.status, TQKV_OK);
		ck_assert_uint_eq(got.n_tokens, 1);
		ck_assert_uint_eq(fake_length(&rig.fake, 1, 0), 6);
		ck_assert_uint_eq(fake_n_requests(&rig.fake, KVP_OP_DECODE), (uint32_t)is_after);
		for (uint32_t i = 0; i < FAKE_OUT; i++)
			ck_assert_float_eq(out[i], rig_out(1, 0, 6, 0, i));
		free(q);
		rig_free(&rows);
		rig_stop(&rig);
	}
}
END_TEST

/* RECONNECT: somebody else wrote meanwhile: POSITION with the length that is there, nothing is written. */
START_TEST(test_client_automatic_reconnect_sees_foreign_writes)
{
	const struct tqkv_options options = { .flags = TQKV_OPTION_RECONNECT };
	struct tqkv_item_result got;
	struct rig rig;

	rig_start(&rig, &options, "named");
	RIG_OK(&rig, rig_append(&rig, 1, 0, 5, NULL));
	/* The client believes in length 2. */
	fake_fault(&rig.fake,
		(struct fake_fault){ .action = FAKE_DROP_BEFORE, .opcode = KVP_OP_APPEND, .n_times = 1 });
	RIG_OK(&rig, rig_append(&rig, 1, 2, 1, &got));
	ck_assert_int_eq(got.status, TQKV_POSITION);
	ck_assert_uint_eq(got.length, 5);
	ck_assert_uint_eq(fake_length(&rig.fake, 1, 0), 5);
	/* A restart in the middle of a call: the session is lost, STALE_EPOCH. */
	fake_restart(&rig.fake);
	ck_assert_int_eq(rig_append(&rig, 1, 5, 1, &got), TQKV_STALE_EPOCH);
	rig_stop(&rig);
}
END_TEST

/* RECONNECT: a request that kills the connection every time is not sent for ever. */
START_TEST(test_client_automatic_reconnect_gives_up)
{
	const struct tqkv_options options = { .flags = TQKV_OPTION_RECONNECT };
	struct rig rig;

	rig_start(&rig, &options, "named");
	fake_fault(&rig.fake,
		(struct fake_fault){ .action = FAKE_DROP_BEFORE, .opcode = KVP_OP_PING, .n_times = 100 });
	ck_assert_int_eq(tqkv_ping(rig.conn, rig.session, 0, &rig.err), TQKV_IO_ERROR);
	ck_assert_uint_eq(fake_n_requests(&rig.fake, KVP_OP_PING), 4);
	rig_stop(&rig);
}
END_TEST

static Suite *suite(void)
{
	Suite *suite = suite_create("client_reconnect");
	TCase *tcase = tcase_create("client_reconnect");

	tcase_add_test(tcase, test_client_reconnect_settles_lengths);
	tcase_add_test(tcase, test_client_reconnect_keeps_lengths);
	tcase_add_test(tcase, test_client_reconnect_after_restart);
	tcase_add_test(tcase, test_client_reconnect_after_restore);
	tcase_add_test(tcase, test_client_automatic_reconnect_after_restore);
	tcase_add_test(tcase, test_client_reconnect_loses_nameless_sessions);
	tcase_add_test(tcase, test_client_automatic_reconnect_appends_once);
	tcase_add_test(tcase, test_client_automatic_reconnect_append_decode);
	tcase_add_test(tcase, test_client_automatic_reconnect_sees_foreign_writes);
	tcase_add_test(tcase, test_client_automatic_reconnect_gives_up);
	suite_add_tcase(suite, tcase);
	return suite;
}

int main(void)
{
	return kv_test_run(suite(), CK_FORK);
}
