/*
 * The client's row operations: golden bytes, splitting, repeating, pipelining, READ.
 */
#include <math.h>

#include "proto/client/conn.h"
#include "tests/lib/golden.h"
#include "tests/lib/kv_test.h"
#include "tests/unit/client_rig.h"

/* Every stored number of a sequence is the one that was sent. */
static void expect_stored(struct rig *rig, uint64_t sequence, uint32_t n_tokens)
{
	fake_lock(&rig->fake);

	const struct fake_sequence *stored =
		fake_find(&rig->fake, tqkv_session_info(rig->session)->handle, sequence, false);

	ck_assert_ptr_nonnull(stored);
	for (uint32_t layer = 0; layer < FAKE_LAYERS; layer++) {
		ck_assert_uint_eq(stored->layers[layer].length, n_tokens);
		for (uint32_t token = 0; token < n_tokens; token++) {
			for (uint32_t dim = 0; dim < FAKE_K_TOKEN; dim++)
				if (stored->layers[layer].k[token * FAKE_K_TOKEN + dim] !=
					rig_k(sequence, layer, token, dim))
					ck_abort_msg("sequence %d, layer %u, token %u: wrong K",
						(int)sequence, layer, token);
			for (uint32_t dim = 0; dim < FAKE_V_TOKEN; dim++)
				if (stored->layers[layer].v[token * FAKE_V_TOKEN + dim] !=
					rig_v(sequence, layer, token, dim))
					ck_abort_msg("sequence %d, layer %u, token %u: wrong V",
						(int)sequence, layer, token);
		}
	}
	fake_unlock(&rig->fake);
}

/* ---- Golden bytes ---- */

/* A session with the geometry of the golden frames. */
static void golden_session(struct tqkv_session *session, uint32_t q_heads)
{
	session->info.q_heads = session->geometry.q_heads = (uint16_t)q_heads;
	session->info.kv_heads = session->geometry.kv_heads = 1;
	session->info.v_head_dim = session->geometry.v_head_dim = 16;
	session->info.n_layers = session->geometry.n_layers = 8;
}

static void expect_golden(struct rig *rig, uint16_t opcode, const char *name, uint32_t flags)
{
	uint8_t golden[GOLDEN_FRAME_BYTES_MAX];
	const size_t n_bytes = golden_frame(name, golden);
	struct kvp_header header;
	struct kvp_fault fault;

	fake_lock(&rig->fake);

	const uint8_t *got = rig->fake.last_frame[opcode];

	ck_assert_uint_eq(rig->fake.last_frame_bytes[opcode], n_bytes);
	ck_assert_int_eq(kvp_header_decode(golden, &header, &fault), KV_OK);
	ck_assert_uint_eq(header.flags, flags);
	header.request_id = kvp_get_u64(got + KVP_AT_REQUEST_ID);
	header.deadline_us = kvp_get_u32(got + KVP_AT_DEADLINE);
	kvp_header_encode(&header, golden);
	ck_assert_mem_eq(got, golden, n_bytes);
	fake_unlock(&rig->fake);
}

/* Submits one frame, which the fake refuses after noting it, and compares. */
static void submit_golden(struct rig *rig, enum tqkv_op op, const struct tqkv_rows *rows, const char *name)
{
	struct tqkv_reply reply;
	uint64_t id;

	RIG_OK(rig, tqkv_submit_rows(rig->session, op, rows, 0, &id, &rig->err));
	ck_assert_int_eq(tqkv_wait(rig->conn, id, 0, &reply, &rig->err), TQKV_UNSUPPORTED);
	expect_golden(rig, (uint16_t)op, name, op == TQKV_OP_APPEND ? KVP_FLAG_TIMINGS : 0);
}

/* APPEND of two sequences in bf16 and f16, DECODE in bf16, as in the golden frames; absent offsets included.
 */
START_TEST(test_client_golden_append_and_decode)
{
	const struct tqkv_options options = { .flags = TQKV_OPTION_TIMINGS };
	const struct tqkv_item append_items[2] = { { 7, 0, 2, 0, TQKV_CREATE | TQKV_EVICTABLE },
		{ 8, 5, 1, 0, 0 } };
	const struct tqkv_item decode_items[2] = { { 7, TQKV_POSITION_PLANNED, 0, 1, 0 }, { 9, 3, 0, 1, 0 } };
	uint16_t bf16_one[96], f16_one[96], bf16_half[64];
	struct tqkv_rows rows = {
		.items = append_items, .n_items = 2, .n_layers = 2, .k = bf16_one, .v = f16_one
	};
	struct rig rig;

	for (int i = 0; i < 96; i++) {
		bf16_one[i] = 0x3F80;
		f16_one[i] = 0x3C00;
		bf16_half[i % 64] = 0x3F00;
	}
	rig_start(&rig, &options, NULL);
	/* The fake's own geometry is another one: it only notes the frames. */
	fake_fault(
		&rig.fake, (struct fake_fault){ .action = FAKE_REFUSE_FRAME, .n_times = 2, .status = 105 });
	golden_session(rig.session, 2);
	rows.k_bytes = rows.v_bytes = 192;
	rows.k_dtype = TQKV_BF16;
	rows.v_dtype = TQKV_F16;
	submit_golden(&rig, TQKV_OP_APPEND, &rows, "append_req");
	rig.conn->options.flags = 0;
	rows = (struct tqkv_rows){
		.items = decode_items, .n_items = 2, .layer_first = 1, .n_layers = 1, .q = bf16_half
	};
	rows.q_bytes = 128;
	rows.q_dtype = TQKV_BF16;
	rows.out_dtype = TQKV_F32;
	rows.scale = 0.125f;
	submit_golden(&rig, TQKV_OP_DECODE, &rows, "decode_req");
	rig_stop(&rig);
}
END_TEST

/* APPEND_DECODE with its padding between three segments, and READ, as in the golden frames. */
START_TEST(test_client_golden_append_decode_and_read)
{
	const struct tqkv_item step = { 7, 64, 1, 1, 0 };
	const struct tqkv_read read = {
		.sequence = 7, .n_layers = 2, .position = 1, .n_tokens = 3, .k_dtype = TQKV_BF16
	};
	static const uint8_t zeros[128];
	struct tqkv_rows rows = {
		.items = &step, .n_items = 1, .layer_first = 5, .n_layers = 1, .flags = TQKV_LSE
	};
	struct tqkv_reply reply;
	struct rig rig;
	uint64_t id;

	rig_start(&rig, NULL, NULL);
	fake_fault(
		&rig.fake, (struct fake_fault){ .action = FAKE_REFUSE_FRAME, .n_times = 2, .status = 105 });
	golden_session(rig.session, 2);
	rows.k = rows.v = rows.q = zeros;
	rows.k_bytes = rows.v_bytes = 64;
	rows.q_bytes = 128;
	rows.k_dtype = rows.v_dtype = rows.q_dtype = rows.out_dtype = TQKV_F32;
	submit_golden(&rig, TQKV_OP_APPEND_DECODE, &rows, "append_decode_req");
	RIG_OK(&rig, tqkv_submit_read(rig.session, &read, 0, &id, &rig.err));
	ck_assert_int_eq(tqkv_wait(rig.conn, id, 0, &reply, &rig.err), TQKV_UNSUPPORTED);
	expect_golden(&rig, KVP_OP_READ, "read_req", 0);
	rig_stop(&rig);
}
END_TEST

/* ---- Appending and decoding ---- */

/* Rows of two sequences on two of four layers, then a decode of both: everything lands where it belongs. */
START_TEST(test_client_append_and_decode)
{
	const struct tqkv_item items[2] = { { 5, 0, 3, 0, TQKV_CREATE }, { 6, 0, 4, 0, TQKV_CREATE } };
	const struct tqkv_item queries[2] = { { 6, TQKV_POSITION_PLANNED, 0, 1, 0 }, { 5, 2, 0, 1, 0 } };
	struct tqkv_item_result got[2];
	float out[2 * FAKE_OUT], lse[2 * FAKE_Q_HEADS];
	struct tqkv_rows_result result = { .items = got,
		.out = out,
		.lse = lse,
		.out_bytes_max = sizeof(out),
		.lse_bytes_max = sizeof(lse) };
	struct tqkv_rows rows = { .items = items, .n_items = 2, .layer_first = 1, .n_layers = 2 };
	struct rig rig;

	rig_start(&rig, NULL, NULL);
	rig_fill(&rows);
	RIG_OK(&rig, tqkv_append(rig.session, &rows, 0, &result, &rig.err));
	ck_assert_uint_eq(result.n_ok, 2);
	ck_assert_uint_eq(result.n_frames, 1);
	ck_assert_uint_eq(got[1].length, 4);
	ck_assert_uint_eq(got[1].n_tokens, 4);
	ck_assert_uint_eq(got[1].layer, 0xFFFF);
	rig_free(&rows);
	ck_assert_uint_eq(fake_length(&rig.fake, 6, 0), 0);
	ck_assert_uint_eq(fake_length(&rig.fake, 6, 2), 4);

	rows = (struct tqkv_rows){
		.items = queries, .n_items = 2, .layer_first = 2, .n_layers = 1, .flags = TQKV_LSE
	};

	float *q = rig_queries(&rows, 2);

	RIG_OK(&rig, tqkv_decode(rig.session, &rows, 0, &result, &rig.err));
	ck_assert_uint_eq(result.n_ok, 2);
	for (uint32_t i = 0; i < FAKE_OUT; i++) {
		ck_assert_float_eq(out[i], rig_out(6, 2, 4, 0, i));
		ck_assert_float_eq(out[FAKE_OUT + i], rig_out(5, 2, 2, 1, i));
	}
	ck_assert_float_eq(lse[0], 4);
	ck_assert_float_eq(lse[FAKE_Q_HEADS], 2);
	free(q);
	rig_stop(&rig);
}
END_TEST

/* A failed item's outputs are zeros and its log-sum-exps -inf, whatever the buffers held; the other item's
 * are right. */
START_TEST(test_client_failed_items_have_empty_outputs)
{
	const struct tqkv_item queries[2] = { { 77, TQKV_POSITION_PLANNED, 0, 1, 0 }, { 5, 1, 0, 1, 0 } };
	struct tqkv_item_result got[2];
	float out[2 * FAKE_OUT], lse[2 * FAKE_Q_HEADS];
	struct tqkv_rows_result result = { .items = got,
		.out = out,
		.lse = lse,
		.out_bytes_max = sizeof(out),
		.lse_bytes_max = sizeof(lse) };
	struct tqkv_rows rows = { .items = queries, .n_items = 2, .n_layers = 1, .flags = TQKV_LSE };
	struct rig rig;

	rig_start(&rig, NULL, NULL);
	RIG_OK(&rig, rig_append(&rig, 5, 0, 1, NULL));
	memset(out, 0x7F, sizeof(out));

	float *q = rig_queries(&rows, 2);

	RIG_OK(&rig, tqkv_decode(rig.session, &rows, 0, &result, &rig.err));
	ck_assert_uint_eq(result.n_failed, 1);
	ck_assert_int_eq(got[0].status, TQKV_NOT_FOUND);
	ck_assert_float_eq(out[0], 0);
	ck_assert(isinf(lse[0]) && lse[0] < 0);
	ck_assert_float_eq(out[FAKE_OUT], rig_out(5, 0, 1, 1, 0));
	free(q);
	rig_stop(&rig);
}
END_TEST

/* Wrong shapes and dtypes are refused before anything is sent, with the sizes. */
START_TEST(test_client_refuses_wrong_shapes)
{
	const struct tqkv_item item = { 5, 0, 2, 0, TQKV_CREATE };
	struct tqkv_rows rows = { .items = &item, .n_items = 1, .n_layers = 1 };
	struct tqkv_rows bad;
	struct rig rig;

	rig_start(&rig, NULL, NULL);
	rig_fill(&rows);
	bad = rows;
	bad.k_bytes -= 4;
	ck_assert_int_eq(tqkv_append(rig.session, &bad, 0, NULL, &rig.err), TQKV_BAD_ARG);
	ck_assert_str_eq(rig.err.message, "k has 252 bytes, expected 256");
	ck_assert_uint_eq(rig.err.expected, 256);
	bad = rows;
	bad.v = NULL;
	ck_assert_int_eq(tqkv_append(rig.session, &bad, 0, NULL, &rig.err), TQKV_BAD_ARG);
	bad = rows;
	bad.n_layers = 5;
	ck_assert_int_eq(tqkv_append(rig.session, &bad, 0, NULL, &rig.err), TQKV_BAD_ARG);
	bad = rows;
	bad.layer_first = 4;
	ck_assert_int_eq(tqkv_append(rig.session, &bad, 0, NULL, &rig.err), TQKV_BAD_ARG);
	bad = rows;
	bad.k_dtype = 7;
	ck_assert_int_eq(tqkv_append(rig.session, &bad, 0, NULL, &rig.err), TQKV_BAD_ARG);
	bad = rows;
	bad.q_dtype = TQKV_F32;
	ck_assert_int_eq(tqkv_append(rig.session, &bad, 0, NULL, &rig.err), TQKV_BAD_ARG);
	bad = rows;
	bad.n_items = 0;
	ck_assert_int_eq(tqkv_append(rig.session, &bad, 0, NULL, &rig.err), TQKV_BAD_ARG);
	ck_assert_int_eq(tqkv_decode(rig.session, &rows, 0, NULL, &rig.err), TQKV_BAD_ARG);
	ck_assert_uint_eq(fake_n_requests(&rig.fake, KVP_OP_APPEND), 0);
	rig_free(&rows);
	rig_stop(&rig);
}
END_TEST

/* ---- Splitting ---- */

/* More tokens and items than a frame holds: cut by position and sequence, all bytes right, no frame above the
 * bounds. */
START_TEST(test_client_splits_by_position_and_sequence)
{
	enum { N = 40 };
	struct tqkv_item items[N];
	struct tqkv_item_result got[N];
	struct tqkv_rows_result result = { .items = got };
	struct tqkv_rows rows = { .items = items, .n_items = N, .n_layers = FAKE_LAYERS };
	struct rig rig;

	rig_start(&rig, NULL, NULL);
	fake_lock(&rig.fake);
	rig.fake.limits.items_max = 7;
	fake_unlock(&rig.fake);
	tqkv_disconnect(rig.conn);
	rig_open(&rig, NULL, NULL);
	for (uint32_t i = 0; i < N; i++)
		items[i] = (struct tqkv_item){ i + 1, 0, i % 3 == 0 ? 90 : 1 + i % 4, 0, TQKV_CREATE };
	rig_fill(&rows);
	RIG_OK(&rig, tqkv_append(rig.session, &rows, 0, &result, &rig.err));
	ck_assert_uint_eq(result.n_ok, N);
	ck_assert_uint_gt(result.n_frames, N / 7);
	for (uint32_t i = 0; i < N; i++) {
		ck_assert_int_eq(got[i].status, TQKV_OK);
		ck_assert_uint_eq(got[i].n_tokens, items[i].n_tokens);
		ck_assert_uint_eq(got[i].length, items[i].n_tokens);
		expect_stored(&rig, items[i].sequence, items[i].n_tokens);
	}
	fake_lock(&rig.fake);
	ck_assert_uint_le(rig.fake.body_bytes_largest, KVP_FRAME_BYTES_MIN);
	/* Frames are filled, not sent one item each. */
	ck_assert_uint_gt(rig.fake.body_bytes_largest, KVP_FRAME_BYTES_MIN - 4000);
	fake_unlock(&rig.fake);
	rig_free(&rows);
	rig_stop(&rig);
}
END_TEST

/* When one token of all layers does not fit, layers are split too. */
START_TEST(test_client_splits_by_layer)
{
	struct rig rig;
	struct tqkv_item_result got;
	const struct tqkv_item item = { 3, 0, 5, 0, TQKV_CREATE };
	struct tqkv_rows rows = { .items = &item, .n_items = 1, .n_layers = FAKE_LAYERS };
	struct tqkv_rows_result result = { .items = &got };

	rig_start(&rig, NULL, NULL);
	/* A bound that the server could not tell, so that small rows do: 384 bytes per token and layer. */
	rig.conn->server.frame_bytes_max = 128 + 2 * 400;
	rig_fill(&rows);
	RIG_OK(&rig, tqkv_append(rig.session, &rows, 0, &result, &rig.err));
	ck_assert_int_eq(got.status, TQKV_OK);
	ck_assert_uint_eq(got.n_tokens, 5);
	ck_assert_uint_eq(result.n_frames, 2 * 5);
	expect_stored(&rig, 3, 5);
	rig.conn->server.frame_bytes_max = 300;
	ck_assert_int_eq(tqkv_append(rig.session, &rows, 0, &result, &rig.err), TQKV_TOO_LARGE);
	ck_assert_int_eq(got.status, TQKV_TOO_LARGE);
	rig_free(&rows);
	rig_stop(&rig);
}
END_TEST

/* An APPEND_DECODE whose rows do not fit is appended first; the query sees all tokens. Others ride along
 * whole. */
START_TEST(test_client_splits_append_decode)
{
	const struct tqkv_item items[3] = { { 1, 0, 400, 1, TQKV_CREATE }, { 2, 0, 1, 1, TQKV_CREATE },
		{ 3, 0, 300, 2, TQKV_CREATE } };
	static float out[4 * FAKE_OUT];
	float lse[4 * FAKE_Q_HEADS];
	struct tqkv_item_result got[3];
	struct tqkv_rows_result result = { .items = got,
		.out = out,
		.lse = lse,
		.out_bytes_max = sizeof(out),
		.lse_bytes_max = sizeof(lse) };
	struct tqkv_rows rows = {
		.items = items, .n_items = 3, .layer_first = 2, .n_layers = 1, .flags = TQKV_LSE
	};
	struct rig rig;

	rig_start(&rig, NULL, NULL);
	rig_fill(&rows);

	float *q = rig_queries(&rows, 4);

	RIG_OK(&rig, tqkv_append_decode(rig.session, &rows, 0, &result, &rig.err));
	ck_assert_uint_eq(result.n_ok, 3);
	ck_assert_uint_gt(fake_n_requests(&rig.fake, KVP_OP_APPEND), 1);
	for (uint32_t i = 0; i < FAKE_OUT; i++) {
		ck_assert_float_eq(out[i], rig_out(1, 2, 400, 0, i));
		ck_assert_float_eq(out[FAKE_OUT + i], rig_out(2, 2, 1, 1, i));
		ck_assert_float_eq(out[2 * FAKE_OUT + i], rig_out(3, 2, 299, 2, i));
		ck_assert_float_eq(out[3 * FAKE_OUT + i], rig_out(3, 2, 300, 3, i));
	}
	ck_assert_uint_eq(got[2].n_tokens, 300);
	ck_assert_uint_eq(got[2].q_len, 2);
	ck_assert_float_eq(lse[0], 400);
	free(q);
	rig_free(&rows);
	rig_stop(&rig);
}
END_TEST

/* Decodes are split when the answer would not fit, though the request does. */
START_TEST(test_client_splits_by_size_of_the_reply)
{
	enum { N = 50 };
	struct tqkv_item items[N];
	struct tqkv_item_result got[N];
	float *out = malloc(N * 8 * FAKE_OUT * sizeof(float));
	struct tqkv_rows_result result = {
		.items = got, .out = out, .out_bytes_max = N * 8 * FAKE_OUT * sizeof(float)
	};
	struct tqkv_rows rows = { .items = items, .n_items = N, .n_layers = 1 };
	struct rig rig;

	rig_start(&rig, NULL, NULL);
	for (uint32_t i = 0; i < N; i++) {
		RIG_OK(&rig, rig_append(&rig, i + 1, 0, 9, NULL));
		items[i] = (struct tqkv_item){ i + 1, TQKV_POSITION_PLANNED, 0, 8, 0 };
	}

	float *q = rig_queries(&rows, N * 8);

	RIG_OK(&rig, tqkv_decode(rig.session, &rows, 0, &result, &rig.err));
	ck_assert_uint_eq(result.n_ok, N);
	ck_assert_uint_ge(result.n_frames, 4);
	for (uint32_t i = 0; i < N * 8; i++)
		ck_assert_float_eq(out[i * FAKE_OUT + 70], rig_out(i / 8 + 1, 0, 2 + i % 8, i, 70));
	free(q);
	free(out);
	rig_stop(&rig);
}
END_TEST

/* A sequence named twice in a call that is split would be accepted by a server that sees the frames apart. */
START_TEST(test_client_refuses_a_sequence_twice)
{
	struct tqkv_item items[2] = { { 4, 0, 200, 0, TQKV_CREATE }, { 4, 200, 200, 0, 0 } };
	struct tqkv_rows rows = { .items = items, .n_items = 2, .n_layers = FAKE_LAYERS };
	struct rig rig;

	rig_start(&rig, NULL, NULL);
	rig_fill(&rows);
	ck_assert_int_eq(tqkv_append(rig.session, &rows, 0, NULL, &rig.err), TQKV_BAD_ARG);
	ck_assert_str_eq(rig.err.message, "sequence 4 appears twice");
	rig_free(&rows);
	rig_stop(&rig);
}
END_TEST

/* ---- Packed rows ---- */

static struct kvp_rows_req last_append(struct rig *rig)
{
	struct kvp_rows_req req;

	fake_lock(&rig->fake);
	kvp_rows_req_decode(
		rig->fake.last_frame[KVP_OP_APPEND] + KVP_HEADER_BYTES, KVP_BYTES(rows_req), &req);
	fake_unlock(&rig->fake);
	return req;
}

/*
 * Packed rows go as they are, in one frame, with the pool's fingerprint; plain rows have none. To the fake
 * the bytes of a packed row are those of its numbers, so that it shows where each one came to lie.
 */
START_TEST(test_client_appends_packed_rows)
{
	struct tqkv_item items[2] = { { .sequence = 3, .n_tokens = 5, .flags = TQKV_CREATE },
		{ .sequence = 4, .n_tokens = 7, .flags = TQKV_CREATE } };
	struct tqkv_rows rows = { .items = items, .n_items = 2, .n_layers = FAKE_LAYERS };
	struct tqkv_item_result results[2];
	struct tqkv_rows_result result = { .items = results };
	struct kvp_rows_req req;
	struct rig rig;

	rig_start(&rig, NULL, NULL);
	rig_fill(&rows);
	rows.k_dtype = rows.v_dtype = TQKV_PACKED;
	RIG_OK(&rig, tqkv_append(rig.session, &rows, 0, &result, &rig.err));
	ck_assert_uint_eq(result.n_ok, 2);
	ck_assert_uint_eq(result.n_frames, 1);
	expect_stored(&rig, 3, 5);
	expect_stored(&rig, 4, 7);
	req = last_append(&rig);
	ck_assert_uint_eq(req.k_dtype, KVP_DTYPE_PACKED);
	ck_assert_uint_eq(req.v_dtype, KVP_DTYPE_PACKED);
	ck_assert(rig.fake.pool_fingerprint != 0);
	ck_assert_uint_eq(req.fingerprint, rig.fake.pool_fingerprint);

	rows.k_dtype = rows.v_dtype = TQKV_F32;
	items[0].sequence = 5;
	items[1].sequence = 6;
	RIG_OK(&rig, tqkv_append(rig.session, &rows, 0, &result, &rig.err));
	ck_assert_uint_eq(last_append(&rig).fingerprint, 0);
	rig_free(&rows);
	rig_stop(&rig);
}
END_TEST

/* Packed rows larger than a frame are refused before anything is sent: only the server knows where to cut. */
START_TEST(test_client_does_not_cut_packed_rows)
{
	struct tqkv_item item = { .sequence = 3, .n_tokens = 400, .flags = TQKV_CREATE };
	struct tqkv_rows rows = { .items = &item, .n_items = 1, .n_layers = FAKE_LAYERS };
	struct tqkv_item_result item_result;
	struct tqkv_rows_result result = { .items = &item_result };
	struct rig rig;

	rig_start(&rig, NULL, NULL);
	rig_fill(&rows);
	ck_assert_uint_gt(rows.k_bytes + rows.v_bytes, tqkv_server_info(rig.conn)->frame_bytes_max);
	rows.k_dtype = rows.v_dtype = TQKV_PACKED;
	ck_assert_int_eq(tqkv_append(rig.session, &rows, 0, &result, &rig.err), TQKV_TOO_LARGE);
	ck_assert_uint_eq(rig.fake.n_requests[KVP_OP_APPEND], 0);
	rig_free(&rows);
	rig_stop(&rig);
}
END_TEST

/* ---- READ ---- */

/* READ of everything gives back what was appended, over many frames; packed sides come one after the other.
 */
START_TEST(test_client_reads_back)
{
	enum { N = 500 };
	const size_t k_floats = FAKE_LAYERS * N * FAKE_K_TOKEN, v_floats = FAKE_LAYERS * N * FAKE_V_TOKEN;
	float *k = malloc(k_floats * sizeof(float)), *v = malloc(v_floats * sizeof(float));
	struct tqkv_read read = { .sequence = 2,
		.n_layers = FAKE_LAYERS,
		.n_tokens = N,
		.k_dtype = TQKV_F32,
		.v_dtype = TQKV_F32,
		.k = k,
		.v = v,
		.k_bytes_max = k_floats * 4,
		.v_bytes_max = v_floats * 4 };
	struct rig rig;

	rig_start(&rig, NULL, NULL);
	RIG_OK(&rig, rig_append(&rig, 2, 0, N, NULL));
	RIG_OK(&rig, tqkv_read(rig.session, &read, 0, &rig.err));
	ck_assert_uint_eq(read.k_bytes, k_floats * 4);
	ck_assert_uint_eq(read.v_bytes, v_floats * 4);
	ck_assert_uint_eq(read.fingerprint, rig.fake.pool_fingerprint);
	for (uint32_t i = 0; i < k_floats; i++)
		if (k[i] != rig_k(2, i / FAKE_K_TOKEN / N, i / FAKE_K_TOKEN % N, i % FAKE_K_TOKEN))
			ck_abort_msg("K %u is wrong", i);
	for (uint32_t i = 0; i < v_floats; i++)
		if (v[i] != rig_v(2, i / FAKE_V_TOKEN / N, i / FAKE_V_TOKEN % N, i % FAKE_V_TOKEN))
			ck_abort_msg("V %u is wrong", i);

	/* One frame: three tokens from 100 on, of layer 1 on. */
	read = (struct tqkv_read){ .sequence = 2,
		.layer_first = 1,
		.n_layers = 2,
		.position = 100,
		.n_tokens = 3,
		.v_dtype = TQKV_F32,
		.v = v,
		.v_bytes_max = 2 * 3 * FAKE_V_TOKEN * 4 };
	RIG_OK(&rig, tqkv_read(rig.session, &read, 0, &rig.err));
	ck_assert_float_eq(v[3 * FAKE_V_TOKEN + 5], rig_v(2, 2, 100, 5));

	/* The fake's packed rows: the first half of the numbers. */
	read = (struct tqkv_read){ .sequence = 2,
		.n_layers = FAKE_LAYERS,
		.n_tokens = N,
		.k_dtype = TQKV_PACKED,
		.v_dtype = TQKV_PACKED,
		.k = k,
		.v = v,
		.k_bytes_max = k_floats * 2,
		.v_bytes_max = v_floats * 2 };
	RIG_OK(&rig, tqkv_read(rig.session, &read, 0, &rig.err));
	ck_assert_uint_eq(read.k_bytes, k_floats * 2);
	ck_assert_uint_eq(read.v_bytes, v_floats * 2);
	ck_assert_float_eq(k[(3 * N + 499) * FAKE_K_TOKEN / 2 + 7], rig_k(2, 3, 499, 7));
	read.k_bytes_max--;
	ck_assert_int_eq(tqkv_read(rig.session, &read, 0, &rig.err), TQKV_BAD_ARG);
	read.n_tokens = 0;
	ck_assert_int_eq(tqkv_read(rig.session, &read, 0, &rig.err), TQKV_BAD_ARG);
	free(k);
	free(v);
	rig_stop(&rig);
}
END_TEST

static Suite *suite(void)
{
	Suite *suite = suite_create("client_rows");
	TCase *tcase = tcase_create("client_rows");

	tcase_add_test(tcase, test_client_golden_append_and_decode);
	tcase_add_test(tcase, test_client_golden_append_decode_and_read);
	tcase_add_test(tcase, test_client_append_and_decode);
	tcase_add_test(tcase, test_client_failed_items_have_empty_outputs);
	tcase_add_test(tcase, test_client_refuses_wrong_shapes);
	tcase_add_test(tcase, test_client_splits_by_position_and_sequence);
	tcase_add_test(tcase, test_client_splits_by_layer);
	tcase_add_test(tcase, test_client_splits_append_decode);
	tcase_add_test(tcase, test_client_splits_by_size_of_the_reply);
	tcase_add_test(tcase, test_client_refuses_a_sequence_twice);
	tcase_add_test(tcase, test_client_appends_packed_rows);
	tcase_add_test(tcase, test_client_does_not_cut_packed_rows);
	tcase_add_test(tcase, test_client_reads_back);
	suite_add_tcase(suite, tcase);
	return suite;
}

int main(void)
{
	return kv_test_run(suite(), CK_FORK);
}
