/*
 * Weighted sums of whole numbers and of bits by the fast kernels against float64 over the rows, on every set
 * that this processor runs. Loop index: the set.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "core/checked.h"
#include "core/fast_decode.h"
#include "tests/lib/batch_rig.h"

#define N_SETS 2
#define N      KV_FAST_STEP_TOKENS
enum { DIM = 128, GROUP = 32, N_GROUPS = DIM / GROUP };

enum { NORMAL, SPIKES, SKEWED, N_ROWS_KINDS };
enum { ALIKE, VARIED, ONE_IS_MOST, ONE_IS_ALL_BUT, N_WEIGHTS_KINDS };

static float number_of(uint64_t *seed)
{
	return (float)(kv_test_random(seed) >> 40) / 0x1p23f - 1;
}

/* Groups of numbers alike, with one far above the others, with nearly all at one end of their range. */
static void make_row(uint64_t *seed, int kind, float *row)
{
	const float size = 0.1f + fabsf(number_of(seed));

	for (uint32_t i = 0; i < DIM; i++) {
		const float number = number_of(seed);

		row[i] = size * (kind == SKEWED ? number * number * number * number : number);
	}
	for (uint32_t g = 0; kind == SPIKES && g < N_GROUPS; g++)
		row[g * GROUP + (kv_test_random(seed) >> 40) % GROUP] = g % 2 ? 40 * size : -40 * size;
}

static void make_weights(uint64_t *seed, int kind, float *weights)
{
	for (uint32_t t = 0; t < N; t++)
		weights[t] = kind == ALIKE    ? 1
			: kind == VARIED      ? expf(2 * number_of(seed))
			: t == 77             ? 1
			: kind == ONE_IS_MOST ? 1.6e-5f
					      : 7.4e-6f; /* just below a half of a 65503rd */
}

/*
 * The error of a channel is at most 16 / 32735 of the weighted ranges of its group (core/FAST.md), and that
 * of all channels together within the promise.
 */
static void check_sums(const struct kv_fast_kernels *kernels, const struct kv_fast_side *side,
	const struct kv_fast_rows *rows, float (*decoded)[DIM], const float *weights)
{
	_Alignas(64) static float sums[KV_FAST_SLOTS_MAX];
	float parts[KV_FAST_PARTS_MAX] = { 0 }, *const to = sums, *const zeros = parts;
	double slots[KV_FAST_SLOTS_MAX], wide[KV_FAST_PARTS_MAX], got[KV_PREPARED_DIM_MAX] = { 0 };
	double error = 0, norm = 0, ranges[N_GROUPS] = { 0 }, sizes[N_GROUPS] = { 0 };

	memset(sums, 0, sizeof(sums));
	kernels->accumulate(side, rows, weights, 1, &to, &zeros);
	for (uint32_t s = 0; s < side->n_slots; s++)
		slots[s] = (double)sums[s];
	for (uint32_t p = 0; p < side->n_parts; p++)
		wide[p] = (double)parts[p];
	kv_fast_collect(side, slots, wide, got);
	for (uint32_t t = 0; t < N; t++) {
		for (uint32_t g = 0; g < N_GROUPS; g++) {
			float least = INFINITY, most = -INFINITY;

			for (uint32_t i = g * GROUP; i < (g + 1) * GROUP; i++) {
				least = fminf(least, decoded[t][i]);
				most = fmaxf(most, decoded[t][i]);
			}
			ranges[g] += (double)weights[t] * (double)(most - least);
			sizes[g] += (double)weights[t] * (double)(fabsf(most) + fabsf(least));
		}
	}
	for (uint32_t i = 0; i < DIM; i++) {
		double exact = 0;

		for (uint32_t t = 0; t < N; t++)
			exact += (double)weights[t] * (double)decoded[t][i];
		/* Beside it what float32 costs. */
		ck_assert_double_le(
			fabs(got[i] - exact), ranges[i / GROUP] * 16.0 / 32735 + sizes[i / GROUP] * 2e-6);
		error += (got[i] - exact) * (got[i] - exact);
		norm += exact * exact;
	}
	ck_assert_double_le(sqrt(error), 2e-3 * sqrt(norm));
}

/* A pool whose V rows have a format, and them as the kernels see them. */
static const struct kv_row_codec *open_side(struct batch_rig *rig, const struct kv_fast_kernels *kernels,
	uint32_t dim, const char *format, struct kv_fast_side *side)
{
	const struct kv_row_codec *codec;
	char json[256];

	snprintf(json, sizeof(json),
		"{\"name\":\"p\",\"layers\":1,\"q_heads\":1,\"kv_heads\":1,\"block_size\":16,"
		"\"blocks\":16,\"head_dim\":%u,\"k\":\"f32\",\"v\":\"%s\"}",
		dim, format);
	rig_init_with(rig, 0, kernels, json);
	codec = rig->spec->layers[0].v;
	ck_assert(kv_fast_side_init(side, codec, true, kernels));
	return codec;
}

/* Whole numbers of all widths, however they lie in their groups, and however weights differ. */
START_TEST(test_fast_sums_of_whole_numbers)
{
	static const char *const formats[] = { "v2", "v3", "v4", "v8" };
	const struct kv_fast_kernels *kernels = kv_fast_kernels_at((uint32_t)_i);
	static struct kv_fast_side side;
	static struct kv_row_scratch scratch;
	static uint8_t bytes[N * 160 + KV_FAST_SLACK_BYTES];
	static float decoded[N][DIM];
	_Alignas(64) static float weights[N];
	struct kv_fast_rows rows = { .n_rows = N };
	uint64_t seed = 0x5eed5;

	for (int c = 0; kernels && c < (int)KV_LENGTH(formats) * N_ROWS_KINDS; c++) {
		struct batch_rig rig;
		const struct kv_row_codec *codec =
			open_side(&rig, kernels, DIM, formats[c / N_ROWS_KINDS], &side);

		rows.row_bytes = codec->row_bytes;
		for (uint32_t t = 0; t < N; t++) {
			uint8_t *row = bytes + (size_t)t * codec->row_bytes;
			float values[DIM];

			make_row(&seed, c % N_ROWS_KINDS, values);
			ck_assert_int_eq(kv_row_codec_encode(codec, values, row, &scratch), KV_OK);
			kv_row_codec_decode(codec, row, decoded[t], &scratch);
			rows.rows[t] = row;
		}
		for (int w = 0; w < N_WEIGHTS_KINDS; w++) {
			make_weights(&seed, w, weights);
			check_sums(kernels, &side, &rows, decoded, weights);
		}
		rig_finish(&rig);
	}
}
END_TEST

/* The error of a channel is at most 32 / 65503 of the weighted sizes of its numbers (core/FAST.md). */
static void check_bits(const struct kv_fast_kernels *kernels, const struct kv_row_codec *codec,
	const struct kv_fast_side *side, const struct kv_fast_rows *rows, const float *weights,
	uint32_t n_queries)
{
	_Alignas(64) static float sums[KV_FAST_QUERIES_MAX][KV_FAST_SLOTS_MAX];
	static double expanded[N][KV_PREPARED_DIM_MAX];
	float parts[KV_FAST_QUERIES_MAX][KV_FAST_PARTS_MAX] = { 0 }, *to[KV_FAST_QUERIES_MAX],
	      *zeros[KV_FAST_QUERIES_MAX];

	memset(sums, 0, sizeof(sums));
	for (uint32_t q = 0; q < KV_FAST_QUERIES_MAX; q++) {
		to[q] = sums[q];
		zeros[q] = parts[q];
	}
	kernels->accumulate(side, rows, weights, n_queries, to, zeros);
	for (uint32_t t = 0; t < rows->n_rows; t++)
		kv_row_codec_expand(codec, rows->rows[t], expanded[t]);
	for (uint32_t q = 0; q < n_queries; q++) {
		double slots[KV_FAST_SLOTS_MAX], got[KV_PREPARED_DIM_MAX] = { 0 };

		for (uint32_t s = 0; s < side->n_slots; s++)
			slots[s] = (double)sums[q][s];
		kv_fast_collect(side, slots, NULL, got);
		for (uint32_t i = 0; i < codec->prepared_dim; i++) {
			double exact = 0, size = 0;

			for (uint32_t t = 0; t < rows->n_rows; t++) {
				exact += (double)weights[q * N + t] * expanded[t][i];
				size += (double)weights[q * N + t] * fabs(expanded[t][i]);
			}
			ck_assert_double_le(fabs(got[i] - exact), size * (32.0 / 65503 + 2e-6));
		}
	}
}

/*
 * Bits of rows of any length, of steps that are not full, for any number of queries, however weights differ;
 * weights beyond the last row are 0, beyond its block anything.
 */
START_TEST(test_fast_sums_of_bits)
{
	static const uint32_t dims[] = { 16, 32, 48, 64, 80, 96, 128, 256 }, n_rows[] = { N, 96, 33, 7 };
	const struct kv_fast_kernels *kernels = kv_fast_kernels_at((uint32_t)_i);
	static struct kv_fast_side side;
	static struct kv_row_scratch scratch;
	static uint8_t bytes[N * 40 + KV_FAST_SLACK_BYTES];
	_Alignas(64) static float weights[KV_FAST_QUERIES_MAX * N];
	struct kv_fast_rows rows = { 0 };
	uint64_t seed = 0x5eed6;

	for (size_t c = 0; kernels && c < KV_LENGTH(dims); c++) {
		struct batch_rig rig;
		const struct kv_row_codec *codec = open_side(&rig, kernels, dims[c], "tq1", &side);

		rows.row_bytes = codec->row_bytes;
		for (uint32_t t = 0; t < N; t++) {
			uint8_t *row = bytes + (size_t)t * codec->row_bytes;
			float values[256];

			for (uint32_t i = 0; i < dims[c]; i++)
				values[i] = number_of(&seed);
			ck_assert_int_eq(kv_row_codec_encode(codec, values, row, &scratch), KV_OK);
			rows.rows[t] = row;
		}
		for (uint32_t w = 0; w < 4 * N_WEIGHTS_KINDS; w++) {
			rows.n_rows = n_rows[w % 4];
			for (uint32_t q = 0; q < KV_FAST_QUERIES_MAX; q++) {
				make_weights(
					&seed, (int)(w / 4 + q) % N_WEIGHTS_KINDS, weights + (size_t)q * N);
				for (uint32_t t = rows.n_rows; t % KV_FAST_BLOCK_TOKENS != 0; t++)
					weights[q * N + t] = 0;
			}
			for (uint32_t n_queries = 1; n_queries <= KV_FAST_QUERIES_MAX; n_queries *= 2)
				check_bits(kernels, codec, &side, &rows, weights, n_queries);
		}
		rig_finish(&rig);
	}
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("fast sums");
	TCase *tc = tcase_create("sums");

	if (!kv_fast_kernels_at(0))
		return 77; /* no set of kernels on this processor */
	tcase_add_loop_test(tc, test_fast_sums_of_whole_numbers, 0, N_SETS);
	tcase_add_loop_test(tc, test_fast_sums_of_bits, 0, N_SETS);
	suite_add_tcase(suite, tc);
	return kv_test_run(suite, CK_NOFORK);
}
