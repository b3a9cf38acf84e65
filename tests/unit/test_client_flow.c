/*
 * The client over time: repeating refused items, and pipelining.
 */
#include "proto/client/conn.h"
#include "tests/lib/kv_test.h"
#include "tests/unit/client_rig.h"

/* ---- Repeating ---- */

/* Eight sequences with room for five: the five are stored once, only the three are sent again, until there is
 * room. */
START_TEST(test_client_retries_only_refused_items)
{
	struct tqkv_item items[8];
	struct tqkv_item_result got[8];
	struct tqkv_rows_result result = { .items = got };
	struct tqkv_rows rows = { .items = items, .n_items = 8, .n_layers = FAKE_LAYERS };
	struct rig rig;

	rig_start(&rig, NULL, NULL);
	for (uint32_t i = 0; i < 8; i++)
		items[i] = (struct tqkv_item){ i + 1, 0, 2, 0, TQKV_CREATE };
	rig_fill(&rows);
	fake_fault(&rig.fake,
		(struct fake_fault){ .action = FAKE_REFUSE_ITEM,
			.opcode = KVP_OP_APPEND,
			.n_times = 2,
			.sequence = 6,
			.sequence_last = 8,
			.status = KV_POOL_FULL,
			.retry_after_ms = 20 });
	RIG_OK(&rig, tqkv_append(rig.session, &rows, 0, &result, &rig.err));
	ck_assert_uint_eq(result.n_ok, 8);
	ck_assert_uint_eq(result.n_failed, 0);
	ck_assert_uint_eq(result.n_retried, 3 + 3);
	ck_assert_uint_eq(result.n_frames, 3);
	fake_lock(&rig.fake);
	ck_assert_uint_eq(rig.fake.n_items, 8 + 3 + 3);
	/* The clock of the fake counts whole milliseconds. */
	ck_assert_int_ge(rig.fake.request_ms[1] - rig.fake.request_ms[0], 19);
	ck_assert_int_ge(rig.fake.request_ms[2] - rig.fake.request_ms[1], 19);
	fake_unlock(&rig.fake);
	for (uint32_t i = 0; i < 8; i++) {
		ck_assert_int_eq(got[i].status, TQKV_OK);
		ck_assert_uint_eq(fake_length(&rig.fake, i + 1, 3), 2);
	}
	rig_free(&rows);
	rig_stop(&rig);
}
END_TEST

/* Refusals that repeating cannot mend come back at once, with their layer and the row counted in the caller's
 * item. */
START_TEST(test_client_does_not_retry_bad_values)
{
	const struct tqkv_item items[2] = { { 1, 0, 300, 0, TQKV_CREATE }, { 2, 0, 1, 0, TQKV_CREATE } };
	struct tqkv_item_result got[2];
	struct tqkv_rows_result result = { .items = got };
	struct tqkv_rows rows = { .items = items, .n_items = 2, .n_layers = FAKE_LAYERS };
	struct rig rig;

	rig_start(&rig, NULL, NULL);
	rig_fill(&rows);
	/* The second of the frames that carry sequence 1: its later pieces then fail with POSITION, which
	 * says nothing. */
	fake_fault(&rig.fake,
		(struct fake_fault){ .action = FAKE_REFUSE_ITEM,
			.opcode = KVP_OP_APPEND,
			.n_times = 1,
			.n_skip = 1,
			.sequence = 1,
			.status = KV_BAD_VALUE });
	RIG_OK(&rig, tqkv_append(rig.session, &rows, 0, &result, &rig.err));
	ck_assert_uint_eq(result.n_failed, 1);
	ck_assert_uint_eq(result.n_retried, 0);
	ck_assert_int_eq(got[0].status, TQKV_BAD_VALUE);
	ck_assert_uint_eq(got[0].layer, 0);
	/* 42 tokens fit a frame (1536 bytes each); the fake says: the middle of the piece. */
	ck_assert_uint_eq(got[0].n_tokens, fake_length(&rig.fake, 1, 0));
	ck_assert_uint_eq(got[0].row, got[0].n_tokens + got[0].n_tokens / 2);
	ck_assert_int_eq(got[1].status, TQKV_OK);
	rig_free(&rows);
	rig_stop(&rig);
}
END_TEST

/* A piece that is refused for a while: the item goes on from there, nothing is stored twice. */
START_TEST(test_client_resumes_a_split_item)
{
	const struct tqkv_item item = { 1, 0, 300, 0, TQKV_CREATE };
	struct tqkv_item_result got;
	struct tqkv_rows_result result = { .items = &got };
	struct tqkv_rows rows = { .items = &item, .n_items = 1, .n_layers = FAKE_LAYERS };
	struct rig rig;

	rig_start(&rig, NULL, NULL);
	rig_fill(&rows);
	for (uint32_t i = 0; i < 4; i++)
		fake_fault(&rig.fake,
			(struct fake_fault){ .action = FAKE_REFUSE_ITEM,
				.opcode = KVP_OP_APPEND,
				.n_times = 1,
				.n_skip = 3 * i,
				.sequence = 1,
				.status = KV_POOL_FULL });
	RIG_OK(&rig, tqkv_append(rig.session, &rows, 0, &result, &rig.err));
	ck_assert_int_eq(got.status, TQKV_OK);
	ck_assert_uint_eq(got.n_tokens, 300);
	ck_assert_uint_ge(result.n_retried, 2);
	for (uint32_t layer = 0; layer < FAKE_LAYERS; layer++)
		ck_assert_uint_eq(fake_length(&rig.fake, 1, layer), 300);
	rig_free(&rows);
	rig_stop(&rig);
}
END_TEST

/* A pool that stays full: the call ends before its deadline and gives the item's own status. */
START_TEST(test_client_retries_end_at_the_deadline)
{
	const struct tqkv_options options = { .timeout_ms = 300 };
	struct tqkv_item_result got;
	struct rig rig;
	const struct tqkv_item item = { .sequence = 1 };
	struct tqkv_rows_result result = { .items = &got };
	int64_t started_ns;

	rig_start(&rig, &options, NULL);
	fake_fault(&rig.fake,
		(struct fake_fault){ .action = FAKE_REFUSE_ITEM,
			.opcode = KVP_OP_TRUNCATE,
			.n_times = 1000,
			.sequence = 1,
			.status = KV_BUSY_RETRY,
			.retry_after_ms = 50 });
	started_ns = tqkv_now_ns();
	RIG_OK(&rig, tqkv_truncate(rig.session, &item, 1, 0, &result, &rig.err));
	ck_assert_int_eq(got.status, TQKV_BUSY_RETRY);
	ck_assert_uint_eq(got.retry_after_ms, 50);
	ck_assert_int_lt(tqkv_now_ns() - started_ns, 300 * 1000000LL);
	ck_assert_uint_ge(result.n_retried, 1);
	ck_assert_uint_le(result.n_retried, 6);
	/* With NO_RETRY, at once. */
	rig.conn->options.flags |= TQKV_OPTION_NO_RETRY;
	RIG_OK(&rig, tqkv_truncate(rig.session, &item, 1, 0, &result, &rig.err));
	ck_assert_uint_eq(result.n_retried, 0);
	ck_assert_int_eq(got.status, TQKV_BUSY_RETRY);
	rig_stop(&rig);
}
END_TEST

/* A whole frame refused with BUSY_RETRY is repeated; one refused for good ends the call with the server's
 * words. */
START_TEST(test_client_frame_errors)
{
	struct tqkv_item_result got;
	struct rig rig;

	rig_start(&rig, NULL, NULL);
	fake_fault(&rig.fake,
		(struct fake_fault){ .action = FAKE_REFUSE_FRAME,
			.opcode = KVP_OP_APPEND,
			.n_times = 2,
			.status = KV_BUSY_RETRY,
			.retry_after_ms = 1 });
	RIG_OK(&rig, rig_append(&rig, 1, 0, 4, &got));
	ck_assert_int_eq(got.status, TQKV_OK);
	ck_assert_uint_eq(fake_n_requests(&rig.fake, KVP_OP_APPEND), 3);
	fake_fault(&rig.fake,
		(struct fake_fault){ .action = FAKE_REFUSE_FRAME,
			.opcode = KVP_OP_APPEND,
			.n_times = 1,
			.status = KV_NOT_OWNER });
	ck_assert_int_eq(rig_append(&rig, 1, 4, 4, &got), TQKV_NOT_OWNER);
	ck_assert_int_eq(got.status, TQKV_NOT_OWNER);
	ck_assert_uint_eq(got.n_tokens, 0);
	ck_assert(!rig.err.is_local);
	ck_assert_int_eq(rig.err.scope, TQKV_SCOPE_REQUEST);
	ck_assert_ptr_nonnull(strstr(rig.err.message, "the fake refuses"));
	rig_stop(&rig);
}
END_TEST

/* QUOTA of an item or of OPEN is told at once; of a frame with rows it is one of requests in flight, and
 * repeated. */
START_TEST(test_client_quotas)
{
	const struct tqkv_open_params params = { .pool = "fake" };
	struct tqkv_session *session = NULL;
	struct tqkv_item_result got;
	struct rig rig;

	rig_start(&rig, NULL, NULL);
	fake_fault(&rig.fake,
		(struct fake_fault){ .action = FAKE_REFUSE_ITEM,
			.opcode = KVP_OP_APPEND,
			.n_times = 1,
			.sequence = 1,
			.status = KV_QUOTA });
	RIG_OK(&rig, rig_append(&rig, 1, 0, 4, &got));
	ck_assert_int_eq(got.status, TQKV_QUOTA);
	ck_assert_uint_eq(fake_n_requests(&rig.fake, KVP_OP_APPEND), 1);
	fake_fault(&rig.fake,
		(struct fake_fault){ .action = FAKE_REFUSE_FRAME,
			.opcode = KVP_OP_APPEND,
			.n_times = 2,
			.status = KV_QUOTA });
	RIG_OK(&rig, rig_append(&rig, 1, 0, 4, &got));
	ck_assert_int_eq(got.status, TQKV_OK);
	const uint32_t n_opened = fake_n_requests(&rig.fake, KVP_OP_OPEN);

	fake_fault(&rig.fake,
		(struct fake_fault){ .action = FAKE_REFUSE_FRAME,
			.opcode = KVP_OP_OPEN,
			.n_times = 1,
			.status = KV_QUOTA });
	ck_assert_int_eq(tqkv_open(rig.conn, &params, 0, &session, &rig.err), TQKV_QUOTA);
	ck_assert_uint_eq(fake_n_requests(&rig.fake, KVP_OP_OPEN), n_opened + 1);
	rig_stop(&rig);
}
END_TEST

/* The pause: never below retry_after_ms, spread over the whole range, doubling up to the bound. */
START_TEST(test_client_backoff_range)
{
	const struct tqkv_options options = { .backoff_first_ms = 4, .backoff_max_ms = 64 };
	struct tqkv_conn conn = { .random_state = 0x1234567 };

	for (uint32_t n_attempts = 0; n_attempts < 40; n_attempts++) {
		const uint32_t bound_ms = n_attempts < 4 ? 4U << n_attempts : 64;
		uint32_t smallest = UINT32_MAX, largest = 0;

		for (int i = 0; i < 2000; i++) {
			const uint32_t pause_ms =
				tqkv_backoff_pause_ms(n_attempts, 10, &options, tqkv_random(&conn));

			smallest = pause_ms < smallest ? pause_ms : smallest;
			largest = pause_ms > largest ? pause_ms : largest;
		}
		ck_assert_uint_eq(smallest, 10);
		ck_assert_uint_eq(largest, 10 + bound_ms);
	}
	ck_assert_uint_eq(tqkv_backoff_pause_ms(3, UINT32_MAX, &options, 5), UINT32_MAX);
}
END_TEST

/* ---- Pipelining ---- */

/* Replies in reverse order: by number and "any" both find the right one, each once. */
START_TEST(test_client_replies_in_any_order)
{
	enum { N = 8 };
	struct rig rig;
	uint64_t ids[N];
	struct tqkv_reply reply;

	rig_start(&rig, NULL, NULL);
	fake_lock(&rig.fake);
	rig.fake.n_hold = N;
	fake_unlock(&rig.fake);
	fake_fault(&rig.fake,
		(struct fake_fault){ .action = FAKE_HOLD, .opcode = KVP_OP_TRUNCATE, .n_times = N });
	for (uint32_t i = 0; i < N; i++) {
		const struct tqkv_item item = { .sequence = i + 1 };

		RIG_OK(&rig,
			tqkv_submit_items(rig.session, TQKV_OP_TRUNCATE, &item, 1, 0, &ids[i], &rig.err));
	}
	RIG_OK(&rig, tqkv_wait(rig.conn, ids[2], 0, &reply, &rig.err));
	ck_assert_uint_eq(reply.request_id, ids[2]);
	ck_assert_uint_eq(reply.items[0].sequence, 3);
	ck_assert_int_eq(reply.items[0].status, TQKV_NOT_FOUND);
	tqkv_forget(rig.conn, ids[5]);
	for (uint32_t i = N; i-- > 0;) {
		if (i == 2 || i == 5)
			continue;
		RIG_OK(&rig, tqkv_wait(rig.conn, TQKV_ANY, 0, &reply, &rig.err));
		ck_assert_uint_eq(reply.request_id, ids[i]);
		ck_assert_uint_eq(reply.op, TQKV_OP_TRUNCATE);
		ck_assert_uint_eq(reply.items[0].sequence, i + 1);
	}
	ck_assert_int_eq(tqkv_wait(rig.conn, TQKV_ANY, 0, &reply, &rig.err), TQKV_NOT_FOUND);
	ck_assert_int_eq(tqkv_wait(rig.conn, ids[2], 0, &reply, &rig.err), TQKV_NOT_FOUND);
	ck_assert_uint_eq(rig.conn->n_requests, 0);
	rig_stop(&rig);
}
END_TEST

/* A blocking call in the middle of pipelined ones takes its own reply and leaves theirs. */
START_TEST(test_client_blocking_call_between_pipelined)
{
	struct rig rig;
	uint64_t id;
	struct tqkv_reply reply;
	const struct tqkv_item item = { .sequence = 4 };

	rig_start(&rig, NULL, NULL);
	RIG_OK(&rig, tqkv_submit_items(rig.session, TQKV_OP_FREE, &item, 1, 0, &id, &rig.err));
	RIG_OK(&rig, tqkv_ping(rig.conn, NULL, 0, &rig.err));
	ck_assert_uint_eq(tqkv_poll(rig.conn), 1);
	RIG_OK(&rig, tqkv_wait(rig.conn, TQKV_ANY, 0, &reply, &rig.err));
	ck_assert_uint_eq(reply.request_id, id);
	rig_stop(&rig);
}
END_TEST

/*
 * 256 requests with large bodies and large replies, none fetched while submitting: the fake answers one by
 * one and stops reading while its answers are not read. Neither side may wait for the other; LIMIT tells when
 * all entries are taken.
 */
START_TEST(test_client_pipelining_cannot_deadlock)
{
	enum { N = 256, TOKENS = 30 };
	const struct tqkv_item item = { 1, TQKV_POSITION_PLANNED, 0, 8, 0 };
	struct tqkv_rows rows = { .items = &item, .n_items = 1, .n_layers = 1 };
	struct rig rig;
	struct tqkv_reply reply;
	uint64_t id;

	rig_start(&rig, NULL, NULL);
	RIG_OK(&rig, rig_append(&rig, 1, 0, TOKENS, NULL));

	float *q = rig_queries(&rows, 8);

	for (int i = 0; i < N; i++)
		RIG_OK(&rig, tqkv_submit_decode(rig.session, &rows, 5000, &id, &rig.err));
	ck_assert_int_eq(tqkv_submit_decode(rig.session, &rows, 5000, &id, &rig.err), TQKV_LIMIT);
	/* Blocking calls have entries of their own. */
	RIG_OK(&rig, tqkv_ping(rig.conn, NULL, 0, &rig.err));
	for (int i = 0; i < N; i++) {
		RIG_OK(&rig, tqkv_wait(rig.conn, TQKV_ANY, 0, &reply, &rig.err));
		ck_assert_uint_eq(reply.n_ok, 1);
		ck_assert_float_eq(((const float *)reply.out)[7 * FAKE_OUT + 3], rig_out(1, 0, TOKENS, 7, 3));
	}
	RIG_OK(&rig, tqkv_submit_decode(rig.session, &rows, 5000, &id, &rig.err));
	free(q);
	rig_stop(&rig);
}
END_TEST

/* Never more requests in flight than the server allows: submit waits for room and does not lose what it
 * reads. */
START_TEST(test_client_respects_inflight_limits)
{
	struct rig rig;
	struct tqkv_reply reply;
	uint64_t ids[20];

	rig_start(&rig, NULL, NULL);
	rig.conn->server.inflight_requests_max = 2;
	for (uint32_t i = 0; i < 20; i++) {
		const struct tqkv_item item = { .sequence = i + 1 };

		RIG_OK(&rig, tqkv_submit_items(rig.session, TQKV_OP_FREE, &item, 1, 0, &ids[i], &rig.err));
		ck_assert_uint_le(rig.conn->n_in_flight, 2);
	}
	for (uint32_t i = 0; i < 20; i++) {
		RIG_OK(&rig, tqkv_wait(rig.conn, ids[i], 0, &reply, &rig.err));
		ck_assert_uint_eq(reply.items[0].sequence, i + 1);
	}
	/* A server that answers nothing: no room, DEADLINE, and nothing was sent. */
	fake_fault(
		&rig.fake, (struct fake_fault){ .action = FAKE_SILENT, .opcode = KVP_OP_FREE, .n_times = 2 });
	for (uint32_t i = 0; i < 2; i++)
		RIG_OK(&rig,
			tqkv_submit_items(rig.session, TQKV_OP_FREE, &(struct tqkv_item){ .sequence = 1 }, 1,
				100, &ids[i], &rig.err));
	ck_assert_int_eq(tqkv_submit_items(rig.session, TQKV_OP_FREE, &(struct tqkv_item){ .sequence = 1 }, 1,
				 100, &ids[2], &rig.err),
		TQKV_DEADLINE);
	ck_assert(!rig.err.is_outcome_unknown);
	rig_stop(&rig);
}
END_TEST

/* Pipelined frames are never split: above a limit they are TOO_LARGE, and the connection goes on. */
START_TEST(test_client_pipelined_frames_are_not_split)
{
	const struct tqkv_item item = { 1, 0, 200, 0, TQKV_CREATE };
	struct tqkv_rows rows = { .items = &item, .n_items = 1, .n_layers = FAKE_LAYERS };
	struct rig rig;
	uint64_t id;

	rig_start(&rig, NULL, NULL);
	rig_fill(&rows);
	ck_assert_int_eq(tqkv_submit_append(rig.session, &rows, 0, &id, &rig.err), TQKV_TOO_LARGE);
	ck_assert_int_eq(rig.err.scope, TQKV_SCOPE_REQUEST);
	RIG_OK(&rig, tqkv_ping(rig.conn, NULL, 0, &rig.err));
	rig_free(&rows);
	rig_stop(&rig);
}
END_TEST

static Suite *suite(void)
{
	Suite *suite = suite_create("client_flow");
	TCase *tcase = tcase_create("client_flow");

	tcase_add_test(tcase, test_client_retries_only_refused_items);
	tcase_add_test(tcase, test_client_does_not_retry_bad_values);
	tcase_add_test(tcase, test_client_quotas);
	tcase_add_test(tcase, test_client_resumes_a_split_item);
	tcase_add_test(tcase, test_client_retries_end_at_the_deadline);
	tcase_add_test(tcase, test_client_frame_errors);
	tcase_add_test(tcase, test_client_backoff_range);
	tcase_add_test(tcase, test_client_replies_in_any_order);
	tcase_add_test(tcase, test_client_blocking_call_between_pipelined);
	tcase_add_test(tcase, test_client_pipelining_cannot_deadlock);
	tcase_add_test(tcase, test_client_respects_inflight_limits);
	tcase_add_test(tcase, test_client_pipelined_frames_are_not_split);
	suite_add_tcase(suite, tcase);
	return suite;
}

int main(void)
{
	return kv_test_run(suite(), CK_FORK);
}
