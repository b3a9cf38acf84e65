/*
 * The judge of a replay: an honest daemon passes, and each kind of fault is found. The daemon is played by
 * exact attention over the rows as the codec stores them.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/attention.h"
#include "core/memory.h"
#include "core/pool_spec.h"
#include "server/ctl/replay.h"
#include "tests/lib/kv_test.h"

enum { N_TOKENS = 64, N_PREFILL = 32, N_LAYERS = 2, Q_HEADS = 4, KV_HEADS = 2, HEAD_DIM = 64 };
enum {
	K_VALUES = N_TOKENS * KV_HEADS * HEAD_DIM,
	Q_VALUES = N_TOKENS * Q_HEADS * HEAD_DIM,
	LAYER_VALUES = 2 * K_VALUES + Q_VALUES,
};
#define SEED 20260801u

/* What the daemon does wrong. */
enum fault {
	HONEST,
	SCALED_OUTPUT,
	FORGOTTEN_TOKEN,
	ZERO_KEYS,
	NAN_OUTPUT,
	WRONG_LSE,
	WRONG_LAYER_ROWS,
	WRONG_PACKED_BIT,
	WRONG_DECODED_ROW,
	STORED_BYTES_OFF,
	BLOCK_LEFT_OVER,
	BLOCK_UNACCOUNTED,
	N_FAULTS
};

struct rig {
	uint8_t *bytes;
	struct srv_capture *capture;
	struct srv_ctl ctl;
	struct srv_replay replay;
};

/* Sum of four uniforms: bell-like, variance 1/3 each. */
static float bell(uint64_t *state)
{
	float sum = 0;

	for (uint32_t i = 0; i < 4; i++)
		sum += (float)(kv_test_random(state) >> 40) / 8388608.0f - 1.0f;
	return sum;
}

/* Rows of BF16: keys and values of a common size, queries large enough that logits spread by about 1.5. */
static void make_bytes(struct rig *rig, const char *dtype)
{
	char header[2048] = "{\"__metadata__\":{}";
	size_t used = strlen(header);
	const uint32_t value_bytes = strcmp(dtype, "F32") == 0 ? 4 : 2;
	uint64_t state = SEED;
	uint32_t end = 0;

	for (uint32_t layer = 0; layer < N_LAYERS; layer++)
		for (uint32_t kind = 0; kind < 3; kind++) {
			const uint32_t heads = kind == 2 ? Q_HEADS : KV_HEADS;
			const uint32_t n_bytes = N_TOKENS * heads * HEAD_DIM * value_bytes;

			used += (size_t)snprintf(header + used, sizeof(header) - used,
				",\"%c.%u\":{\"dtype\":\"%s\",\"shape\":[%d,%u,%d],\"data_offsets\":[%u,%u]}",
				"kvq"[kind], layer * 5, dtype, N_TOKENS, heads, HEAD_DIM, end, end + n_bytes);
			end += n_bytes;
		}
	used += (size_t)snprintf(header + used, sizeof(header) - used, "}");
	rig->bytes = kv_alloc(8 + used + end, 1);
	ck_assert_ptr_nonnull(rig->bytes);
	rig->bytes[0] = (uint8_t)(used & 0xFF);
	rig->bytes[1] = (uint8_t)(used >> 8);
	memcpy(rig->bytes + 8, header, used);
	for (uint32_t i = 0; i < N_LAYERS * LAYER_VALUES; i++) {
		const bool is_q = i % LAYER_VALUES >= 2 * K_VALUES;
		const float value = bell(&state) * (is_q ? 1.1f : 0.9f);

		kv_rows_store(value_bytes == 4 ? KV_DTYPE_F32 : KV_DTYPE_BF16, &value, 1,
			rig->bytes + 8 + used + (uint64_t)i * value_bytes);
	}
	struct srv_safetensors *file;
	struct kv_error err;

	ck_assert_msg(
		srv_safetensors_create(rig->bytes, 8 + used + end, &file, &err) == KV_OK, "%s", err.msg);
	ck_assert_msg(srv_capture_create(file, &rig->capture, &err) == KV_OK, "%s", err.msg);
}

static void rig_init(struct rig *rig, const char *dtype, const char *format, enum kv_dtype in_dtype)
{
	struct kv_error err = { .msg = "" };
	json_t *json;

	memset(rig, 0, sizeof(*rig));
	make_bytes(rig, dtype);
	rig->replay.ctl = &rig->ctl;
	rig->replay.capture = rig->capture;
	rig->replay.in_dtype = in_dtype;
	rig->replay.n_prefill_tokens = N_PREFILL;
	rig->replay.is_cpu_backend = true;
	json = json_pack("{s:s, s:i, s:i, s:i, s:i, s:s, s:s, s:i, s:i}", "name", "test", "layers", N_LAYERS,
		"q_heads", Q_HEADS, "kv_heads", KV_HEADS, "head_dim", HEAD_DIM, "k", format, "v", format,
		"block_size", 16, "blocks", N_TOKENS / 16);
	ck_assert_msg(kv_pool_spec_create(json, &rig->replay.pool.spec, &err) == KV_OK, "%s", err.msg);
	json_decref(json);
	ck_assert_msg(srv_replay_prepare(&rig->replay, &err) == KV_OK, "%s", err.msg);
}

static void rig_finish(struct rig *rig)
{
	srv_replay_release(&rig->replay);
	kv_pool_spec_destroy(rig->replay.pool.spec);
	srv_capture_destroy(rig->capture);
	kv_free(rig->bytes);
}

/* Output of one head, from the stored rows of layer `from`. */
static void serve_head(const struct rig *rig, uint32_t from, uint32_t head, uint32_t n_seen, const float *q,
	enum fault fault, float *out, float *lse)
{
	const struct srv_replay_layer *layer = &rig->replay.layers[from];
	const uint64_t at = (uint64_t)(head / (Q_HEADS / KV_HEADS)) * HEAD_DIM;
	double exact[HEAD_DIM], exact_lse;

	kv_attention_exact(
		&(struct kv_attention_exact_input){
			.q = q,
			.k = fault == ZERO_KEYS ? NULL : layer->rows[SRV_REPLAY_K].decoded + at,
			.v = layer->rows[SRV_REPLAY_V].decoded + at,
			.k_stride = KV_HEADS * HEAD_DIM,
			.v_stride = KV_HEADS * HEAD_DIM,
			.k_dim = HEAD_DIM,
			.v_dim = HEAD_DIM,
			.tokens.hi = fault == FORGOTTEN_TOKEN ? n_seen - 1 : n_seen,
			.scale = (double)layer->scale,
		},
		exact, &exact_lse);
	for (uint32_t i = 0; i < HEAD_DIM; i++)
		out[i] = (float)exact[i] * (fault == SCALED_OUTPUT ? 1.0001f : 1.0f);
	*lse = (float)exact_lse + (fault == WRONG_LSE ? 0.01f : 0.0f);
}

static void serve_token(struct rig *rig, uint32_t layer_idx, uint32_t token, enum fault fault)
{
	float q[Q_HEADS * HEAD_DIM], q_sent[Q_HEADS * HEAD_DIM], out[Q_HEADS * HEAD_DIM], lse[Q_HEADS];
	uint8_t wire[4 * Q_HEADS * HEAD_DIM];
	const uint32_t from = fault == WRONG_LAYER_ROWS ? 1 - layer_idx : layer_idx;

	srv_capture_load(rig->capture, layer_idx, SRV_CAPTURE_Q, token, 1, q);
	kv_rows_store(rig->replay.in_dtype, q, Q_HEADS * HEAD_DIM, wire);
	kv_rows_load_f32(rig->replay.in_dtype, wire, Q_HEADS * HEAD_DIM, q_sent);
	for (uint32_t head = 0; head < Q_HEADS; head++)
		serve_head(rig, from, head, token + 1, q_sent + head * HEAD_DIM, fault, out + head * HEAD_DIM,
			lse + head);
	if (fault == NAN_OUTPUT && token + 1 == N_TOKENS)
		out[7] = NAN;
	srv_replay_check_output(&rig->replay, layer_idx, token, q, out, lse);
}

static void *copy_of(const void *bytes, uint64_t n_bytes)
{
	void *copy = kv_alloc((size_t)n_bytes, 1);

	ck_assert_ptr_nonnull(copy);
	memcpy(copy, bytes, (size_t)n_bytes);
	return copy;
}

/* Rows as they are read back; decoded ones in two ranges. */
static void serve_rows(struct rig *rig, uint32_t layer_idx, uint32_t side, enum fault fault)
{
	const struct srv_replay_rows *rows = &rig->replay.layers[layer_idx].rows[side];
	const uint64_t token_values = KV_HEADS * HEAD_DIM;
	const bool is_here = layer_idx == 1 && side == SRV_REPLAY_V;
	uint8_t *packed = copy_of(rows->packed, rows->n_rows * rows->codec->row_bytes);
	float *decoded = copy_of(rows->decoded, rows->n_rows * HEAD_DIM * sizeof(float));

	if (fault == WRONG_PACKED_BIT && is_here)
		packed[17 * rows->codec->row_bytes] ^= 0x10;
	if (fault == WRONG_DECODED_ROW && is_here)
		decoded[N_TOKENS * token_values - 1] += 0.01f;
	srv_replay_check_packed(&rig->replay, layer_idx, side, 0, N_TOKENS, packed);
	srv_replay_check_decoded(&rig->replay, layer_idx, side, 0, N_TOKENS - 1, decoded);
	srv_replay_check_decoded(
		&rig->replay, layer_idx, side, N_TOKENS - 1, 1, decoded + (N_TOKENS - 1) * token_values);
	kv_free(packed);
	kv_free(decoded);
}

/* Plays a whole replay with one fault and judges it. */
static void play(struct rig *rig, enum fault fault)
{
	struct srv_replay *replay = &rig->replay;

	for (uint32_t layer = 0; layer < N_LAYERS; layer++) {
		for (uint32_t t = N_PREFILL; t < N_TOKENS; t++)
			serve_token(rig, layer, t, fault);
		serve_rows(rig, layer, SRV_REPLAY_K, fault);
		serve_rows(rig, layer, SRV_REPLAY_V, fault);
	}
	srv_replay_expected_account(replay, 0, &replay->before);
	srv_replay_expected_account(replay, N_TOKENS, &replay->during);
	srv_replay_expected_account(replay, 0, &replay->after);
	replay->during.stored_bytes += fault == STORED_BYTES_OFF;
	replay->after.n_owned += fault == BLOCK_LEFT_OVER;
	replay->after.n_free -= fault == BLOCK_LEFT_OVER || fault == BLOCK_UNACCOUNTED;
	srv_replay_judge(replay);
}

/* With every format, from bf16 and from float32 captures, sent as either: an honest daemon has no failure. */
START_TEST(test_replay_check_passes_an_honest_daemon)
{
	static const enum kv_dtype dtypes[] = { KV_DTYPE_BF16, KV_DTYPE_F32 };

	for (uint32_t i = 0; i < kv_format_count(); i++)
		for (uint32_t j = 0; j < 2; j++)
			for (uint32_t k = 0; k < 2; k++) {
				const char *format = kv_format_at(i)->name;
				struct rig rig;

				rig_init(&rig, k == 0 ? "BF16" : "F32", format, dtypes[j]);
				play(&rig, HONEST);
				ck_assert_msg(rig.replay.n_failures == 0, "%s, in_dtype %u, file %u: %s",
					format, j, k, rig.replay.failures[0]);
				rig_finish(&rig);
			}
}
END_TEST

/* Each fault is found, and the first sentence is about it. */
START_TEST(test_replay_check_finds_each_fault)
{
	static const char *const says[N_FAULTS] = {
		[SCALED_OUTPUT] = "off by",
		[FORGOTTEN_TOKEN] = "layer 0",
		[ZERO_KEYS] = "layer 0: relative error",
		[NAN_OUTPUT] = "layer 0: relative error nan",
		[WRONG_LSE] = "layer 0: a log-sum-exp is off by 0.01",
		[WRONG_LAYER_ROWS] = "layer 0: relative error",
		[WRONG_PACKED_BIT] = "layer 5: 1 of 128 V rows were read back with other bytes",
		[WRONG_DECODED_ROW] = "layer 5: a V row was read back off",
		[STORED_BYTES_OFF] = "with all rows: the daemon reports",
		[BLOCK_LEFT_OVER] = "after the session: the daemon reports 3 free blocks, it should be 4",
		[BLOCK_UNACCOUNTED] = "after the session: the daemon reports 3 free blocks, it should be 4",
	};

	for (uint32_t fault = HONEST + 1; fault < N_FAULTS; fault++) {
		struct rig rig;

		rig_init(&rig, "BF16", "tq4", KV_DTYPE_BF16);
		play(&rig, (enum fault)fault);
		ck_assert_msg(rig.replay.n_failures > 0, "fault %u was not found", fault);
		ck_assert_msg(strstr(rig.replay.failures[0], says[fault]) != NULL,
			"fault %u: '%s' does not say '%s'", fault, rig.replay.failures[0], says[fault]);
		rig_finish(&rig);
	}
}
END_TEST

/* The model of the error holds: what is measured with tq4 is within a factor of 1.5 of what it expects, both
 * ways. */
START_TEST(test_replay_check_model_is_close)
{
	struct rig rig;

	rig_init(&rig, "BF16", "tq4", KV_DTYPE_BF16);
	play(&rig, HONEST);
	for (uint32_t layer = 0; layer < N_LAYERS; layer++) {
		const double ratio = sqrt(
			rig.replay.layers[layer].error_square / rig.replay.layers[layer].predicted_square);

		ck_assert_double_gt(ratio, 1 / 1.5);
		ck_assert_double_lt(ratio, 1.5);
		ck_assert_double_gt(
			rig.replay.layers[layer].logit_sigma / (double)rig.replay.layers[layer].n_outputs, 1);
	}
	rig_finish(&rig);
}
END_TEST

/* More failures than are kept are still counted. */
START_TEST(test_replay_check_counts_all_failures)
{
	static struct srv_replay replay;

	for (uint32_t i = 0; i < SRV_REPLAY_FAILURES_MAX + 5; i++)
		srv_replay_fail(&replay, "failure %u", i);
	ck_assert_uint_eq(replay.n_failures, SRV_REPLAY_FAILURES_MAX + 5);
	ck_assert_str_eq(replay.failures[SRV_REPLAY_FAILURES_MAX - 1], "failure 15");
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("replay check");
	TCase *tcase = tcase_create("all");

	printf("seed %u\n", SEED);
	tcase_set_timeout(tcase, 60);
	tcase_add_test(tcase, test_replay_check_passes_an_honest_daemon);
	tcase_add_test(tcase, test_replay_check_finds_each_fault);
	tcase_add_test(tcase, test_replay_check_model_is_close);
	tcase_add_test(tcase, test_replay_check_counts_all_failures);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
