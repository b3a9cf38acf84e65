/*
 * Codebooks as the fast kernels compute them, on every set that this processor runs. Loop index: the set.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "core/checked.h"
#include "core/fast_decode.h"
#include "tests/lib/batch_rig.h"

#define N_SETS 2
#define N      KV_FAST_STEP_TOKENS
enum { DIM = 128 };

static float number_of(uint64_t *seed)
{
	return (float)(kv_test_random(seed) >> 40) / 0x1p23f - 1;
}

/*
 * Rows and their negatives add up to nothing: an entry is not rounded to one side, which would grow with the
 * tokens.
 */
START_TEST(test_fast_codes_have_no_side)
{
	static const char *const formats[] = { "tq2", "tq3", "tq4", "tq5", "tq6", "tq7", "tq8" };
	const struct kv_fast_kernels *kernels = kv_fast_kernels_at((uint32_t)_i);
	static struct kv_fast_side side;
	static struct kv_row_scratch scratch;
	static uint8_t bytes[N * 160 + KV_FAST_SLACK_BYTES];
	_Alignas(64) static float weights[N], sums[KV_FAST_SLOTS_MAX];
	struct kv_fast_rows rows = { .n_rows = N };
	uint64_t seed = 0x5eed6;

	for (uint32_t t = 0; t < N; t++)
		weights[t] = 1;
	for (int c = 0; kernels && c < (int)KV_LENGTH(formats); c++) {
		float parts[KV_FAST_PARTS_MAX] = { 0 }, *const to = sums, *const zeros = parts;
		struct batch_rig rig;
		char json[256];
		double sum = 0;

		snprintf(json, sizeof(json),
			"{\"name\":\"p\",\"layers\":1,\"q_heads\":1,\"kv_heads\":1,\"block_size\":16,"
			"\"blocks\":16,\"head_dim\":128,\"k\":\"f32\",\"v\":\"%s\"}",
			formats[c]);
		rig_init_with(&rig, 0, kernels, json);
		const struct kv_row_codec *codec = rig.spec->layers[0].v;

		ck_assert(kv_fast_side_init(&side, codec, true, kernels));
		rows.row_bytes = codec->row_bytes;
		for (uint32_t t = 0; t < N; t++) {
			uint8_t *row = bytes + (size_t)t * codec->row_bytes;
			static float values[DIM];
			double square = 0;

			for (uint32_t i = 0; i < DIM; i++) {
				values[i] = t % 2 ? -values[i] : number_of(&seed);
				square += (double)(values[i] * values[i]);
			}
			for (uint32_t i = 0; i < DIM && t % 2 == 0; i++)
				values[i] /= (float)sqrt(square);
			ck_assert_int_eq(kv_row_codec_encode(codec, values, row, &scratch), KV_OK);
			rows.rows[t] = row;
		}
		memset(sums, 0, sizeof(sums));
		kernels->accumulate(&side, &rows, weights, 1, &to, &zeros);
		for (uint32_t s = 0; s < side.n_slots; s++)
			sum += (double)sums[s];
		/* In units of a block's sums: half a unit would be one that all entries lack. */
		ck_assert_double_le(fabs(sum) * 32735 / (DIM * N), 0.01);
		rig_finish(&rig);
	}
}
END_TEST

enum { N_ROWS = 32, ROW_BYTES_MAX = 272 };

/* Rows of any codes, those that are rare as well. */
static void make_rows(
	const struct kv_row_codec *codec, uint64_t *seed, uint8_t *bytes, struct kv_fast_rows *rows)
{
	static struct kv_row_scratch scratch;
	const struct kv_segment *segment = &codec->segments[0];
	float values[KV_HEAD_DIM_MAX];

	*rows = (struct kv_fast_rows){ .n_rows = N_ROWS, .row_bytes = codec->row_bytes };
	for (uint32_t t = 0; t < N_ROWS; t++) {
		uint8_t *row = bytes + (size_t)t * codec->row_bytes;

		for (uint32_t i = 0; i < codec->head_dim; i++)
			values[i] = number_of(seed);
		ck_assert_int_eq(kv_row_codec_encode(codec, values, row, &scratch), KV_OK);
		for (uint32_t i = 0; i < segment->payload_bytes; i++)
			row[segment->offset + i] = (uint8_t)(kv_test_random(seed) >> 40);
		rows->rows[t] = row;
	}
}

/* Each number of each row, as K and as V, is off by at most 1.2e-3 of the greatest that there is. */
static void check_numbers(const struct kv_fast_kernels *kernels, const struct kv_row_codec *codec,
	bool is_smooth, const struct kv_fast_rows *rows)
{
	static struct kv_fast_side k, v;
	static double expanded[N_ROWS][KV_PREPARED_DIM_MAX], q[KV_PREPARED_DIM_MAX];
	static float products[N], numbers[KV_FAST_SLOTS_MAX];
	_Alignas(64) static float weights[N], sums[KV_FAST_SLOTS_MAX];
	_Alignas(64) static int16_t codes[KV_FAST_SLOTS_MAX];
	float units[KV_FAST_PARTS_MAX], query_sums[KV_FAST_PARTS_MAX], parts[KV_FAST_PARTS_MAX] = { 0 };
	float *const to = sums, *const zeros = parts;
	const struct kv_fast_query query = { codes, numbers, units, query_sums };
	double most[N_ROWS];

	ck_assert(kv_fast_side_init(&k, codec, false, kernels));
	ck_assert(kv_fast_side_init(&v, codec, true, kernels));
	ck_assert(k.parts[0].is_smooth == is_smooth && v.parts[0].is_smooth == is_smooth);
	for (uint32_t t = 0; t < N_ROWS; t++) {
		kv_row_codec_expand(codec, rows->rows[t], expanded[t]);
		most[t] = 0;
		for (uint32_t i = 0; i < codec->prepared_dim; i++)
			most[t] = fmax(most[t], fabs(expanded[t][i]));
	}
	for (uint32_t i = 0; i < codec->prepared_dim; i++) {
		q[i] = 1;
		ck_assert(kv_fast_prepare(&k, q, 1, codes, numbers, units, query_sums));
		q[i] = 0;
		kernels->score(&k, rows, &query, 1, products);
		for (uint32_t t = 0; t < N_ROWS; t++)
			ck_assert_double_le(fabs((double)products[t] - expanded[t][i]), 1.2e-3 * most[t]);
	}
	for (uint32_t t = 0; t < N_ROWS; t++) {
		double slots[KV_FAST_SLOTS_MAX], none[KV_FAST_PARTS_MAX] = { 0 };
		double got[KV_PREPARED_DIM_MAX] = { 0 };

		memset(weights, 0, sizeof(weights));
		memset(sums, 0, sizeof(sums));
		weights[t] = 1;
		kernels->accumulate(&v, rows, weights, 1, &to, &zeros);
		for (uint32_t s = 0; s < v.n_slots; s++)
			slots[s] = (double)sums[s];
		kv_fast_collect(&v, slots, none, got);
		for (uint32_t i = 0; i < codec->prepared_dim; i++)
			ck_assert_double_le(fabs(got[i] - expanded[t][i]), 1.2e-3 * most[t]);
	}
}

/*
 * Every number of a codebook that looks up bytes in 16 is near, whether it is a smooth one, as all that are
 * solved are, or one that is not.
 */
START_TEST(test_fast_codes_are_near)
{
	static const char *const formats[] = { "tq5", "tq6", "tq7", "tq8" };
	static const uint32_t dims[] = { 16, 48, 64, 80, 128, 256 };
	const struct kv_fast_kernels *kernels = kv_fast_kernels_at((uint32_t)_i);
	static uint8_t bytes[N_ROWS * ROW_BYTES_MAX + KV_FAST_SLACK_BYTES];
	static struct kv_row_codec other;
	static float table[256];
	uint64_t seed = 0x5eed7;

	for (size_t c = 0; kernels && c < KV_LENGTH(formats) * KV_LENGTH(dims); c++) {
		const bool is_long = c % KV_LENGTH(formats) >= 2 && kernels->has_split_tables;
		struct kv_fast_rows rows;
		struct batch_rig rig;
		char json[256];

		snprintf(json, sizeof(json),
			"{\"name\":\"p\",\"layers\":1,\"q_heads\":1,\"kv_heads\":1,\"block_size\":16,"
			"\"blocks\":16,\"head_dim\":%u,\"k\":\"f32\",\"v\":\"%s\"}",
			dims[c / KV_LENGTH(formats)], formats[c % KV_LENGTH(formats)]);
		rig_init_with(&rig, 0, kernels, json);
		const struct kv_row_codec *codec = rig.spec->layers[0].v;
		const uint32_t n = 1u << codec->segments[0].bits;

		ck_assert_uint_le(codec->row_bytes, ROW_BYTES_MAX);
		make_rows(codec, &seed, bytes, &rows);
		check_numbers(kernels, codec, is_long, &rows);
		other = *codec;
		for (uint32_t i = 0; i < n; i++) {
			const uint32_t from_end = i < n / 2 ? i : n - 1 - i;

			table[i] = codec->segments[0].table[i] * (from_end % 2 ? 1.004f : 0.996f);
		}
		other.segments[0].table = table;
		check_numbers(kernels, &other, false, &rows);
		rig_finish(&rig);
	}
}
END_TEST

/* What is not near a smooth function, and what is no codebook, is found out. */
START_TEST(test_fast_codes_that_are_not_smooth)
{
	uint8_t pieces[KV_FAST_PIECES_BYTES];
	float table[256], unit = 0;

	for (uint32_t bits = 7; bits <= 8; bits++) {
		const uint32_t n = 1u << bits;

		for (int is_v = 0; is_v <= 1; is_v++) {
			for (uint32_t kind = 0; kind < 4; kind++) {
				for (uint32_t i = 0; i < n; i++) {
					const float x = (float)(2 * i + 1) / (float)n - 1;

					table[i] = kind == 0 ? x
						: kind == 1  ? x + 0.003f * sinf(100 * x)
						: kind == 2  ? 0
							     : x * x * x;
				}
				ck_assert_int_eq(
					kv_fast_smooth_init(table, bits, is_v, &unit, pieces), kind == 0);
			}
		}
	}
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("fast codes");
	TCase *tc = tcase_create("codebooks");

	if (!kv_fast_kernels_at(0))
		return 77; /* no set of kernels on this processor */
	tcase_add_loop_test(tc, test_fast_codes_have_no_side, 0, N_SETS);
	tcase_add_loop_test(tc, test_fast_codes_are_near, 0, N_SETS);
	tcase_add_test(tc, test_fast_codes_that_are_not_smooth);
	suite_add_tcase(suite, tc);
	return kv_test_run(suite, CK_NOFORK);
}
