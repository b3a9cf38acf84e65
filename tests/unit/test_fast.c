/*
 * Fast decodes against float64 attention over the decoded rows, on every set of kernels that this processor
 * runs: other groups, long sequences, company, many waves, the softmax. Cells of formats, shapes and options
 * are test_fast_cells.c. Loop index: the set.
 */
#include <stdio.h>
#include <stdlib.h>

#include "core/checked.h"
#include "core/fast_decode.h"
#include "tests/lib/batch_rig.h"

#define N_SETS 2
#define N_SEEN 93u
/* core/FAST.md: numbers, tables of whole numbers, codebooks. */
#define BOUND_NUMBERS 1e-5
#define BOUND_WHOLE   1e-3
#define BOUND_TABLES  2e-3

/* Groups of vN that the kernels do not take go through the scalar routine, and are exact. */
START_TEST(test_fast_other_groups_are_scalar)
{
	static const uint32_t groups[] = { 16, 20, 40, 64, 80 };
	const struct kv_fast_kernels *kernels = kv_fast_kernels_at((uint32_t)_i);

	for (size_t g = 0; kernels && g < KV_LENGTH(groups); g++) {
		struct batch_rig rig;
		struct batch_seq seq;
		char json[512];

		snprintf(json, sizeof(json),
			"{\"name\":\"p\",\"layers\":1,\"q_heads\":4,\"kv_heads\":2,\"block_size\":16,"
			"\"blocks\":40,"
			"\"head_dim\":80,\"k\":\"v4\",\"v\":\"v8\",\"group\":%u}",
			groups[g]);
		rig_init_with(&rig, 0, kernels, json);
		seq_init(&rig, &seq, 0, 1);
		seq_append(&rig, &seq, 0, 1, N_SEEN, KV_DTYPE_F32, true);
		const struct kv_decode_op *op = seq_decode(&rig, &seq, 0, 2, N_SEEN);

		rig_run(&rig);
		seq_check(&rig, &seq, op,
			groups[g] % 32 != 0 && groups[g] != 80 ? BOUND_NUMBERS
				: kernels->code_of_short_slot  ? BOUND_TABLES
							       : BOUND_WHOLE);
		seq_finish(&seq);
		rig_finish(&rig);
	}
}
END_TEST

/*
 * A logit that float32 cannot hold: refused with its row, where a cap does not make it an answer; decodes
 * beside it are as they were. On the scalar backend (loop index 0) and on every set.
 */
START_TEST(test_fast_huge_logits)
{
	static const char *const caps[] = { "0", "2.5" };
	const struct kv_fast_kernels *kernels = _i > 0 ? kv_fast_kernels_at((uint32_t)_i - 1) : NULL;

	for (size_t c = 0; (kernels || _i == 0) && c < KV_LENGTH(caps); c++) {
		struct batch_rig rig;
		struct batch_seq seq;
		struct kv_decode_op *ops[3];
		const struct kv_result *result;
		char json[256];

		snprintf(json, sizeof(json),
			"{\"name\":\"p\",\"layers\":1,\"q_heads\":4,\"kv_heads\":2,\"block_size\":16,"
			"\"blocks\":40,"
			"\"head_dim\":64,\"k\":\"tq4\",\"v\":\"f32\",\"softcap\":%s}",
			caps[c]);
		rig_init_with(&rig, 0, kernels, json);
		seq_init(&rig, &seq, 0, 1);
		seq_append(&rig, &seq, 0, 1, N_SEEN, KV_DTYPE_F32, true);
		for (size_t i = 0; i < KV_LENGTH(ops); i++)
			ops[i] = seq_decode(&rig, &seq, 0, 2, N_SEEN);
		ops[1]->scale = 1e10f;
		for (uint32_t i = 0; i < 4 * 64; i++) /* row 1 */
			((float *)(uintptr_t)ops[1]->q)[4 * 64 + i] *= 1e32f;
		rig_run(&rig);
		seq_check(&rig, &seq, ops[0], BOUND_TABLES);
		seq_check(&rig, &seq, ops[2], BOUND_TABLES);
		result = &rig.batch.results[ops[1]->result_idx];
		ck_assert_uint_eq(result->status, c == 0 ? KV_BAD_VALUE : KV_OK);
		ck_assert_uint_eq(result->row, c == 0 ? 1 : KV_ROW_NONE);
		for (uint32_t i = 0; i < 2 * 4; i++)
			ck_assert(c == 0 ? isinf(ops[1]->lse[i]) && ops[1]->lse[i] < 0
					 : isfinite(ops[1]->lse[i]));
		for (uint32_t i = 0; i < 2 * 4 * 64; i++) {
			const float number = ((const float *)(const void *)ops[1]->out)[i];

			if (c == 0 ? number != 0 : !isfinite(number))
				ck_abort_msg("number %u is %g", i, (double)number);
		}
		seq_finish(&seq);
		rig_finish(&rig);
	}
}
END_TEST

#define LONG_POOL                                                                                           \
	"{\"name\":\"p\",\"layers\":1,\"q_heads\":6,\"kv_heads\":2,\"block_size\":16,\"blocks\":16,\"head_" \
	"dim\":32,"                                                                                         \
	"\"k\":\"tq4\",\"v\":\"tq3\",\"window\":%u,\"sink_tokens\":%u,\"exact_tokens\":256,\"exact_"        \
	"blocks\":16}"
#define LONG_SEEN 40000u /* more pieces than there are spans */

/* The newest n_exact tokens of the op come from ring blocks, the same ones again and again. */
static void use_long_ring(
	struct batch_rig *rig, const struct batch_seq *seq, struct kv_decode_op *op, uint32_t n_exact)
{
	uint32_t *table = rig_take(rig, (n_exact / 16 + 2) * sizeof(*table));

	op->exact_lo = op->n_tokens_seen - n_exact;
	for (uint32_t b = op->exact_lo / 16; b * 16 < op->n_tokens_seen; b++)
		table[b - op->exact_lo / 16] = seq->ring[(b * 7 + b / 11) % 16];
	op->exact_table = table;
}

/* A table that names the same blocks again and again. */
static struct kv_decode_op *long_decode(struct batch_rig *rig, const struct batch_seq *seq, uint32_t q_len)
{
	uint32_t *table = rig_take(rig, LONG_SEEN / 16 * sizeof(*table));
	struct kv_decode_op *op = seq_decode(rig, seq, 0, q_len, LONG_SEEN);

	for (uint32_t b = 0; b < LONG_SEEN / 16; b++)
		table[b] = seq->table[0][(b * 5 + b / 13) % 16];
	op->table = table;
	return op;
}

static void start_long(struct batch_rig *rig, struct batch_seq *seq, const struct kv_fast_kernels *kernels,
	uint32_t window, uint32_t sink_tokens)
{
	char json[512];

	snprintf(json, sizeof(json), LONG_POOL, window, sink_tokens);
	rig_init_with(rig, 0, kernels, json);
	seq_init(rig, seq, 0, 1);
	seq_append(rig, seq, 0, 1, 256, KV_DTYPE_F32, true);
	rig_run(rig);
	rig_begin(rig);
}

/* Relative L2 error of each of n heads of 32 channels, and their log-sum-exps, against the scalar backend's.
 */
static void compare_heads(
	const float *out, const float *wanted, const float *lse, const float *wanted_lse, uint32_t n)
{
	for (uint32_t h = 0; h < n; h++) {
		double error = 0, norm = 0;

		for (uint32_t i = 32 * h; i < 32 * (h + 1); i++) {
			error += (double)(out[i] - wanted[i]) * (double)(out[i] - wanted[i]);
			norm += (double)wanted[i] * (double)wanted[i];
		}
		ck_assert_double_le(sqrt(error), BOUND_TABLES * sqrt(norm));
		ck_assert_double_le(fabs((double)(lse[h] - wanted_lse[h])), BOUND_TABLES);
	}
}

/*
 * Many pieces in many spans, windows that begin anywhere, first tokens beside them, exact windows that begin
 * in the middle of a piece, in rotated bases and not: what the scalar backend gives.
 */
START_TEST(test_fast_long_sequences)
{
	static const struct {
		uint32_t window, sink_tokens, n_exact;
		uint8_t flags;
	} rows[] = {
		{ 0, 0, 0, 0 }, { 35000, 600, 0, 0 }, { 513, 1030, 0, KV_DECODE_Q_ROTATED },
		{ 0, 0, 5001, 0 }, { 35000, 600, 700, KV_DECODE_Q_ROTATED | KV_DECODE_OUT_ROTATED },
		{ 513, 1030, 1100, KV_DECODE_OUT_ROTATED },
		{ 513, 1030, LONG_SEEN - 37, 0 }, /* first tokens, too, are exact but for the first 37 */
	};
	const struct kv_fast_kernels *kernels = kv_fast_kernels_at((uint32_t)_i);

	for (size_t w = 0; kernels && w < KV_LENGTH(rows); w++) {
		const struct kv_fast_kernels *both[2] = { NULL, kernels };
		float out[2][6 * 32], lse[2][6];

		for (int b = 0; b < 2; b++) {
			struct batch_rig rig;
			struct batch_seq seq;

			start_long(&rig, &seq, both[b], rows[w].window, rows[w].sink_tokens);
			struct kv_decode_op *op = long_decode(&rig, &seq, 1);

			op->flags = rows[w].flags;
			if (rows[w].n_exact > 0)
				use_long_ring(&rig, &seq, op, rows[w].n_exact);
			rig_run(&rig);
			memcpy(out[b], op->out, sizeof(out[b]));
			memcpy(lse[b], op->lse, sizeof(lse[b]));
			seq_finish(&seq);
			rig_finish(&rig);
		}
		compare_heads(out[1], out[0], lse[1], lse[0], 6);
	}
}
END_TEST

/* The same bits alone, in the company of others, in several waves, and with any number of threads. */
START_TEST(test_fast_same_bits_in_any_company)
{
	enum { OPS = 24 };
	const struct kv_fast_kernels *kernels = kv_fast_kernels_at((uint32_t)_i);
	static float out[4][OPS][3 * 6 * 32];

	for (int run = 0; kernels && run < 4; run++) {
		struct batch_rig rig;
		struct batch_seq seq;
		struct kv_decode_op *ops[OPS];
		char json[512];

		snprintf(json, sizeof(json), LONG_POOL, 0u, 0u);
		rig_init_with(&rig, run == 0 ? 0 : 2 * (uint32_t)run - 1, kernels, json);
		seq_init(&rig, &seq, 0, 1);
		seq_append(&rig, &seq, 0, 1, 256, KV_DTYPE_F32, true);
		rig_run(&rig);
		rig.seed = 99; /* the same queries in every run */
		for (int n = 0; n < OPS; n++) {
			if (run == 0 || n == 0)
				rig_begin(&rig);
			ops[n] = n % 6 == 0 ? long_decode(&rig, &seq, 3)
					    : seq_decode(&rig, &seq, 0, 3, 3 + 10 * (uint32_t)n);
			if (n % 4 >= 2)
				use_long_ring(
					&rig, &seq, ops[n], ops[n]->n_tokens_seen / (1 + (uint32_t)n % 3));
			if (run == 0) {
				rig_run(&rig);
				memcpy(out[0][n], ops[n]->out, sizeof(out[0][n]));
			}
		}
		if (run > 0)
			rig_run(&rig);
		for (int n = 0; run > 0 && n < OPS; n++) {
			memcpy(out[run][n], ops[n]->out, sizeof(out[run][n]));
			ck_assert_mem_eq(out[run][n], out[0][n], sizeof(out[0][n]));
		}
		seq_finish(&seq);
		rig_finish(&rig);
	}
}
END_TEST

/* Items that are larger than the workspace come in parts, in waves one after the other. */
START_TEST(test_fast_many_waves)
{
	const struct kv_fast_kernels *kernels = kv_fast_kernels_at((uint32_t)_i);
	const size_t n_numbers = (size_t)128 * 16, row_bytes = n_numbers * sizeof(float);
	struct kv_decode_op whole, *op;
	struct batch_rig rig;
	struct batch_seq seq;
	uint8_t *out;

	if (!kernels)
		return;
	rig_init_with(&rig, 0, kernels,
		"{\"name\":\"p\",\"layers\":1,\"q_heads\":128,\"kv_heads\":1,\"block_size\":16,\"blocks\":16,"
		"\"head_dim\":16,"
		"\"k\":\"bf16\",\"v\":\"bf16\"}");
	seq_init(&rig, &seq, 0, 1);
	seq_append(&rig, &seq, 0, 1, 256, KV_DTYPE_F32, true);
	rig_run(&rig);
	rig_begin(&rig);
	op = long_decode(&rig, &seq, 16); /* 16 rows of 128 queries of 64 spans of 128 bytes: 16 MiB */
	whole = *op;
	rig_run(&rig);
	out = malloc(16 * row_bytes);
	ck_assert_ptr_nonnull(out);
	memcpy(out, op->out, 16 * row_bytes);
	for (uint32_t r = 0; r < 16; r += 5) {
		*op = whole;
		op->q_len = 1;
		op->n_tokens_seen = LONG_SEEN - 15 + r;
		op->q = whole.q + r * row_bytes;
		rig_run(&rig);
		/* Not the same bits: where pieces are fewer, spans may be cut elsewhere. */
		for (size_t i = 0; i < n_numbers; i++)
			ck_assert_float_le(fabsf(((float *)(void *)op->out)[i] -
						   ((float *)(void *)out)[r * n_numbers + i]),
				1e-5f);
	}
	free(out);
	seq_finish(&seq);
	rig_finish(&rig);
}
END_TEST

/* Maximum and exponentials of the kernels against the C library's. */
START_TEST(test_fast_softmax)
{
	const struct kv_fast_kernels *kernels = kv_fast_kernels_at((uint32_t)_i);
	float values[512], logits[512];
	double sum = 0;

	if (!kernels)
		return;
	for (uint32_t i = 0; i < 512; i++)
		logits[i] = i % 9 == 0 ? -INFINITY : 7.0f - 0.19f * (float)i;
	memcpy(values, logits, sizeof(values));
	ck_assert_float_eq(kernels->max(values, 512), logits[1]);

	const float got = kernels->exp2_sum(values, 512, logits[1]);

	for (uint32_t i = 0; i < 512; i++) {
		const double exact = exp2((double)(logits[i] - logits[1]));

		ck_assert_double_le(fabs((double)values[i] - exact), exact * 0x1p-21 + 1.2e-38);
		sum += exact;
	}
	ck_assert_double_le(fabs((double)got - sum), sum * 1e-6);
}
END_TEST

/*
 * A cap costs a logit a relative error of 2^-20, whatever the cap: one that is huge leaves all as they are.
 * The slope is one multiplication and one addition.
 */
START_TEST(test_fast_softcap_and_slopes)
{
	static const float caps[] = { 1e-3f, 0.5f, 30, 50, 1e3f, 1e5f, 4294967295.0f, 1e20f, 1e35f, 3e38f };
	const struct kv_fast_kernels *kernels = kv_fast_kernels_at((uint32_t)_i);
	float values[512], logits[512];

	for (size_t c = 0; kernels && c < KV_LENGTH(caps); c++) {
		for (uint32_t i = 0; i < 512; i++)
			values[i] = logits[i] = i % 2 ? 60.0f - 0.3f * (float)i
						      : ldexpf(i % 4 ? 1.3f : -1.7f, 6 - (int)i / 8);
		kernels->bend(values, 512, 0, caps[c], -0.25f, -511);
		for (uint32_t i = 0; i < 512; i++) {
			const double capped = (double)caps[c] * tanh((double)logits[i] / (double)caps[c]);
			const double sloped = -0.25 * ((double)i - 511);

			ck_assert_double_le(fabs((double)values[i] - (capped + sloped)),
				0x1p-20 * fabs(capped) + 0x1p-23 * (fabs(capped) + fabs(sloped)));
		}
	}
}
END_TEST

/*
 * Rounding the weights of a step costs at most 16 / 32767 of their sum (core/FAST.md): where they are
 * alike, where one is all and the others are just below a half of its unit, where one is just above and just
 * below a quarter of all, where there is none. Rows of whole numbers, so that nothing else is rounded.
 */
START_TEST(test_fast_weights_of_a_step)
{
	enum { DIM = 64, N = KV_FAST_STEP_TOKENS, CASES = 6 };
	static const float rests[CASES] = { 1, 1.5e-5f, 2.9f / 127, 3.1f / 127, 0.01f, 0 };
	const struct kv_fast_kernels *kernels = kv_fast_kernels_at((uint32_t)_i);
	static struct kv_fast_side side;
	static struct kv_row_scratch scratch;
	static uint8_t bytes[N * 128 + KV_FAST_SLACK_BYTES];
	static float values[N][DIM];
	_Alignas(64) static float weights[N], sums[KV_FAST_SLOTS_MAX];
	struct kv_fast_rows rows = { .n_rows = N };
	struct batch_rig rig;
	uint64_t seed = 7;

	if (!kernels)
		return;
	rig_init_with(&rig, 0, kernels,
		"{\"name\":\"p\",\"layers\":1,\"q_heads\":1,\"kv_heads\":1,\"block_size\":16,\"blocks\":16,"
		"\"head_dim\":64,\"k\":\"v8\",\"v\":\"v8\",\"group\":64}");
	const struct kv_row_codec *codec = rig.spec->layers[0].v;

	ck_assert(kv_fast_side_init(&side, codec, true, kernels));
	rows.row_bytes = codec->row_bytes;
	for (uint32_t t = 0; t < N; t++) {
		for (uint32_t i = 0; i < DIM; i++)
			values[t][i] = i == t % DIM  ? 255
				: i == (t + 1) % DIM ? 0
						     : (float)((kv_test_random(&seed) >> 40) % 256);
		rows.rows[t] = bytes + (size_t)t * codec->row_bytes;
		ck_assert_int_eq(
			kv_row_codec_encode(codec, values[t], bytes + (size_t)t * codec->row_bytes, &scratch),
			KV_OK);
	}
	for (uint32_t c = 0; c < CASES; c++) {
		float zero = 0, *const to = sums, *const zeros = &zero;
		double all = 0, slots[KV_FAST_SLOTS_MAX], got[KV_PREPARED_DIM_MAX] = { 0 };

		memset(sums, 0, sizeof(sums));
		for (uint32_t t = 0; t < N; t++) {
			weights[t] = t == 77 && rests[c] > 0 ? 1 : rests[c];
			all += (double)weights[t];
		}
		kernels->accumulate(&side, &rows, weights, 1, &to, &zeros);
		for (uint32_t s = 0; s < side.n_slots; s++)
			slots[s] = (double)sums[s];
		kv_fast_collect(&side, slots, &(double){ (double)zero }, got);
		for (uint32_t i = 0; i < DIM; i++) {
			double exact = 0;

			for (uint32_t t = 0; t < N; t++)
				exact += (double)weights[t] * (double)values[t][i];
			ck_assert_double_le(fabs(got[i] - exact), 255 * all * (16.0 / 32767 + 1e-6));
		}
	}
	rig_finish(&rig);
}
END_TEST

enum { SPIKE_DIM = 256, SPIKE_CASES = 6 };

/* Rows of one great channel each, of either sign, the others by `rest` of it; -1: all are as great. */
static void encode_spikes(const struct kv_row_codec *codec, float rest, uint8_t *bytes,
	float (*decoded)[SPIKE_DIM], struct kv_fast_rows *rows)
{
	static struct kv_row_scratch scratch;
	uint64_t seed = 11;

	rows->row_bytes = codec->row_bytes;
	for (uint32_t t = 0; t < rows->n_rows; t++) {
		uint8_t *row = bytes + (size_t)t * codec->row_bytes;
		float values[SPIKE_DIM];

		for (uint32_t i = 0; i < SPIKE_DIM; i++) {
			const float number = (float)(kv_test_random(&seed) >> 40) / 0x1p23f - 1;

			values[i] = rest < 0 ? 3.0f : i == t % 5 ? (t % 3 ? 3.0f : -3.0f) : 3 * rest * number;
		}
		ck_assert_int_eq(kv_row_codec_encode(codec, values, row, &scratch), KV_OK);
		kv_row_codec_decode(codec, row, decoded[t], &scratch);
		rows->rows[t] = row;
	}
}

/* Scores of spikes: tables cost 2^-14 / 1.75 of a row's greatest number, a query's rounding half a unit. */
static void check_spikes_as_k(const struct kv_fast_kernels *kernels, const struct kv_row_codec *codec,
	const struct kv_fast_rows *rows, float (*decoded)[SPIKE_DIM])
{
	static struct kv_fast_side side;
	static float products[KV_FAST_STEP_TOKENS], numbers[KV_FAST_SLOTS_MAX];
	_Alignas(64) static int16_t codes[KV_FAST_SLOTS_MAX];
	float units[KV_FAST_PARTS_MAX], sums[KV_FAST_PARTS_MAX];
	const struct kv_fast_query query = { codes, numbers, units, sums };
	const double half_unit = 0.5 / (KV_FAST_SUM_MAX(KV_FAST_E4M3_TABLE_MAX) - SPIKE_DIM);

	ck_assert(kv_fast_side_init(&side, codec, false, kernels));
	/* Numbers all alike, whose sums are as great as they can be, and others. */
	for (uint32_t c = 0; c < 2; c++) {
		double q[SPIKE_DIM], size = 0;

		for (uint32_t i = 0; i < SPIKE_DIM; i++) {
			q[i] = c == 0 ? 1 : sin(i * i);
			size += fabs(q[i]);
		}
		ck_assert(kv_fast_prepare(&side, q, 0.25, codes, numbers, units, sums));
		kernels->score(&side, rows, &query, 1, products);
		for (uint32_t t = 0; t < rows->n_rows; t++) {
			double exact = 0, row_size = 0;

			for (uint32_t i = 0; i < SPIKE_DIM; i++) {
				exact += 0.25 * q[i] * (double)decoded[t][i];
				row_size += fabs((double)decoded[t][i]);
			}
			ck_assert_double_le(fabs((double)products[t] - exact),
				0.25 * size * (3.0 / 28672 + row_size * (half_unit + 1e-6)));
		}
	}
}

/* Sums of them, of every channel within the bound of weights and table, and the promise for all together. */
static void check_spikes_as_v(const struct kv_fast_kernels *kernels, const struct kv_row_codec *codec,
	const struct kv_fast_rows *rows, float (*decoded)[SPIKE_DIM])
{
	static const float others[] = { 1, 0, 1.5e-5f, 2.9f / 127, 3.1f / 127 };
	static struct kv_fast_side side;
	_Alignas(64) static float weights[KV_FAST_STEP_TOKENS], sums[KV_FAST_SLOTS_MAX];

	ck_assert(kv_fast_side_init(&side, codec, true, kernels));
	for (size_t c = 0; c < KV_LENGTH(others); c++) {
		float zero = 0, *const to = sums, *const zeros = &zero;
		double all = 0, slots[KV_FAST_SLOTS_MAX], got[KV_PREPARED_DIM_MAX] = { 0 }, error = 0,
		       norm = 0;

		memset(sums, 0, sizeof(sums));
		for (uint32_t t = 0; t < rows->n_rows; t++) {
			weights[t] = t == 77 ? 1 : others[c];
			all += (double)weights[t];
		}
		kernels->accumulate(&side, rows, weights, 1, &to, &zeros);
		for (uint32_t s = 0; s < side.n_slots; s++)
			slots[s] = (double)sums[s];
		kv_fast_collect(&side, slots, NULL, got);
		for (uint32_t i = 0; i < SPIKE_DIM; i++) {
			double exact = 0;

			for (uint32_t t = 0; t < rows->n_rows; t++)
				exact += (double)weights[t] * (double)decoded[t][i];
			ck_assert_double_le(
				fabs(got[i] - exact), 3 * all * (16.0 / 32767 + 1.0 / 28672 + 1e-6));
			error += (got[i] - exact) * (got[i] - exact);
			norm += exact * exact;
		}
		ck_assert_double_le(sqrt(error), BOUND_TABLES * sqrt(norm));
	}
}

/*
 * Rows of E4M3 are not rotated, so one channel may be far above the others: what their tables and the
 * rounding of queries and weights cost stays below what core/FAST.md says, and no sum overflows.
 */
START_TEST(test_fast_e4m3_spikes)
{
	static const float rests[SPIKE_CASES] = { -1, 0.3f, 1e-2f, 5e-4f, 5e-5f, 0 };
	const struct kv_fast_kernels *kernels = kv_fast_kernels_at((uint32_t)_i);
	static uint8_t bytes[KV_FAST_STEP_TOKENS * 264 + KV_FAST_SLACK_BYTES];
	static float decoded[KV_FAST_STEP_TOKENS][SPIKE_DIM];
	struct kv_fast_rows rows = { .n_rows = KV_FAST_STEP_TOKENS };
	struct batch_rig rig;

	if (!kernels)
		return;
	rig_init_with(&rig, 0, kernels,
		"{\"name\":\"p\",\"layers\":1,\"q_heads\":1,\"kv_heads\":1,\"block_size\":16,\"blocks\":16,"
		"\"head_dim\":256,\"k\":\"fp8\",\"v\":\"fp8\"}");
	for (uint32_t c = 0; c < SPIKE_CASES; c++) {
		encode_spikes(rig.spec->layers[0].v, rests[c], bytes, decoded, &rows);
		check_spikes_as_k(kernels, rig.spec->layers[0].k, &rows, decoded);
		check_spikes_as_v(kernels, rig.spec->layers[0].v, &rows, decoded);
	}
	rig_finish(&rig);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("fast");
	TCase *tc = tcase_create("decodes");

	if (!kv_fast_kernels_at(0))
		return 77; /* no set of kernels on this processor */
	tcase_set_timeout(tc, 120);
	tcase_add_loop_test(tc, test_fast_other_groups_are_scalar, 0, N_SETS);
	tcase_add_loop_test(tc, test_fast_huge_logits, 0, 1 + N_SETS);
	tcase_add_loop_test(tc, test_fast_long_sequences, 0, N_SETS);
	tcase_add_loop_test(tc, test_fast_same_bits_in_any_company, 0, N_SETS);
	tcase_add_loop_test(tc, test_fast_many_waves, 0, N_SETS);
	tcase_add_loop_test(tc, test_fast_weights_of_a_step, 0, N_SETS);
	tcase_add_loop_test(tc, test_fast_e4m3_spikes, 0, N_SETS);
	tcase_add_loop_test(tc, test_fast_softmax, 0, N_SETS);
	tcase_add_loop_test(tc, test_fast_softcap_and_slopes, 0, N_SETS);
	suite_add_tcase(suite, tc);
	return kv_test_run(suite, CK_NOFORK);
}
