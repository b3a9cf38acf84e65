/*
 * Every set of row kernels that this build has and this processor runs, against plain
 * loops: the same bits, also for zeros of both signs, subnormals, infinities and NaN (whose own bits are
 * free). Loop index: set. Buffers are as long as they must be, so that a sanitizer sees a step too far.
 */
#include "core/row_kernels.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "codebooks/codebook.h"
#include "core/pack.h"
#include "tests/lib/kv_test.h"

#define SEED 0x51DE5EEDu

static uint64_t state;

/* Mantissas of all lengths over 80 powers of two, so that every order of a sum rounds differently. */
static double any_f64(void)
{
	static const double specials[] = { 0.0, -0.0, 1, -1, DBL_MIN / 4, -DBL_MIN / 4, 1e300, INFINITY,
		NAN };
	const uint64_t random = kv_test_random(&state);

	if (random % 5003 < sizeof(specials) / sizeof(*specials)) /* seldom: NaN spreads over whole rows */
		return specials[random % 5003];
	return ldexp((double)(int64_t)kv_test_random(&state), (int)(random >> 32 & 63) - 95);
}

static float any_f32(void)
{
	static const float specials[] = { 0.0f, -0.0f, 1, -1, FLT_MIN / 4, -FLT_MIN / 4, FLT_MAX, INFINITY,
		NAN };
	const uint64_t random = kv_test_random(&state);

	if (random % 2003 < sizeof(specials) / sizeof(*specials))
		return specials[random % 2003];
	return (float)ldexp((double)(int64_t)kv_test_random(&state), (int)(random >> 32 & 15) - 70);
}

static double *many_f64(size_t n)
{
	double *numbers = malloc((n > 0 ? n : 1) * sizeof(*numbers));

	ck_assert_ptr_nonnull(numbers);
	for (size_t i = 0; i < n; i++)
		numbers[i] = any_f64();
	return numbers;
}

static float *many_f32(size_t n)
{
	float *numbers = malloc((n > 0 ? n : 1) * sizeof(*numbers));

	ck_assert_ptr_nonnull(numbers);
	for (size_t i = 0; i < n; i++)
		numbers[i] = any_f32();
	return numbers;
}

static uint32_t any_below(uint32_t n)
{
	return (uint32_t)(kv_test_random(&state) >> 33) % n;
}

static void assert_same(const double *found, const double *expected, size_t n, const char *what)
{
	for (size_t i = 0; i < n; i++)
		ck_assert_msg(memcmp(&found[i], &expected[i], sizeof(*found)) == 0 ||
				(isnan(found[i]) && isnan(expected[i])),
			"%s: %zu of %zu is %a instead of %a", what, i, n, found[i], expected[i]);
}

static void assert_same_f32(const float *found, const float *expected, size_t n, const char *what)
{
	for (size_t i = 0; i < n; i++)
		ck_assert_msg(memcmp(&found[i], &expected[i], sizeof(*found)) == 0 ||
				(isnan(found[i]) && isnan(expected[i])),
			"%s: %zu of %zu is %a instead of %a", what, i, n, (double)found[i],
			(double)expected[i]);
}

/* NULL: this processor has no set of this index, and the test has nothing to do. */
static const struct kv_row_kernels *begin(int set_idx)
{
	state = SEED;
	return kv_row_kernels_at((uint32_t)set_idx);
}

/* ---- expansion ---- */

/* Packed codes of some rows, each in memory of exactly its length. */
struct coded {
	uint8_t *rows[20];
	uint8_t codes[20][256];
	float *table;
	struct kv_row_scale scales[20];
	struct kv_row_codes args;
};

static void make_coded(struct coded *coded, uint32_t n_rows, uint32_t n, uint32_t bits, uint32_t offset)
{
	coded->table = many_f32((size_t)1 << bits);
	for (uint32_t r = 0; r < n_rows; r++) {
		coded->rows[r] = malloc(offset + kv_packed_bytes(n, bits));
		ck_assert_ptr_nonnull(coded->rows[r]);
		memset(coded->rows[r], 0xA5, offset);
		for (uint32_t i = 0; i < n; i++)
			coded->codes[r][i] = (uint8_t)any_below(1u << bits);
		ck_assert_int_eq(kv_pack(coded->codes[r], n, bits, coded->rows[r] + offset), KV_OK);
		coded->scales[r] = (struct kv_row_scale){ any_f64(), any_f64(), any_f64() };
		if (r % 3 == 0)
			coded->scales[r].zero = 0;
	}
	coded->args = (struct kv_row_codes){
		.rows = (const uint8_t *const *)coded->rows,
		.n_rows = n_rows,
		.offset = offset,
		.n = n,
		.bits = bits,
		.table = coded->table,
		.scales = coded->scales,
	};
}

static void drop_coded(struct coded *coded)
{
	for (uint32_t r = 0; r < coded->args.n_rows; r++)
		free(coded->rows[r]);
	free(coded->table);
}

/* expanded[n_rows, n] */
static double *expand_plainly(const struct coded *coded)
{
	const uint32_t n = coded->args.n;
	double *expanded = many_f64((size_t)coded->args.n_rows * n);

	for (uint32_t r = 0; r < coded->args.n_rows; r++) {
		const struct kv_row_scale *scale = &coded->scales[r];

		for (uint32_t i = 0; i < n; i++) {
			const double value = (double)coded->table[coded->codes[r][i]];

			expanded[(size_t)r * n + i] = (value * scale->scale + scale->zero) * scale->outer;
		}
	}
	return expanded;
}

/* Codes of 1 to 4 bits, any number of them, at any byte: table, scale, zero, outer scale, rounded one by one.
 */
START_TEST(test_row_kernels_expand_codes)
{
	const struct kv_row_kernels *kernels = begin(_i);

	for (uint32_t round = 0; kernels && round < 300; round++) {
		const uint32_t n = 1 + any_below(256), stride = n + any_below(5), n_rows = any_below(20);
		struct coded coded;

		make_coded(&coded, n_rows, n, 1 + round % 4, any_below(9));

		double *expected = expand_plainly(&coded);
		double *found = many_f64((size_t)stride * n_rows),
		       *before = many_f64((size_t)stride * n_rows);

		memcpy(before, found, (size_t)stride * n_rows * sizeof(*found));
		kernels->expand_codes(&coded.args, found, stride);
		for (uint32_t r = 0; r < n_rows; r++) {
			assert_same(found + (size_t)r * stride, expected + (size_t)r * n, n, "expand_codes");
			assert_same(found + (size_t)r * stride + n, before + (size_t)r * stride + n,
				stride - n, "between rows");
		}
		free(expected);
		free(found);
		free(before);
		drop_coded(&coded);
	}
}
END_TEST

/* Numbers that are stored as they are. */
START_TEST(test_row_kernels_expand_values)
{
	const struct kv_row_kernels *kernels = begin(_i);

	for (uint32_t n = 0; kernels && n <= 256; n++) {
		const struct kv_row_scale scale = { any_f64(), n % 2 ? any_f64() : 0, any_f64() };
		float *values = many_f32(n);
		double *found = many_f64(n), *expected = many_f64(n);

		for (uint32_t i = 0; i < n; i++)
			expected[i] = ((double)values[i] * scale.scale + scale.zero) * scale.outer;
		kernels->expand_values(values, n, &scale, found);
		assert_same(found, expected, n, "expand_values");
		free(values);
		free(found);
		free(expected);
	}
}
END_TEST

/* ---- scores and weighted sums ---- */

/* The order of core/row_kernels.h. */
static double score_plainly(const double *q, const double *row, uint32_t n)
{
	double sums[8] = { 0 };

	for (uint32_t i = 0; i < n; i++)
		sums[i % 8] += q[i] * row[i];
	return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

/* Any number of rows and queries, any stride. */
START_TEST(test_row_kernels_score)
{
	const struct kv_row_kernels *kernels = begin(_i);

	for (uint32_t round = 0; kernels && round < 200; round++) {
		const uint32_t n = 16 * (1 + any_below(32)), n_rows = any_below(19),
			       n_queries = 1 + any_below(9);
		const uint32_t row_stride = n + any_below(3), q_stride = n + any_below(3),
			       out_stride = n_rows + 2;
		double *rows = many_f64((size_t)row_stride * n_rows);
		double *q = many_f64((size_t)q_stride * n_queries);
		double *found = many_f64((size_t)out_stride * n_queries);
		double *expected = many_f64((size_t)out_stride * n_queries);
		const struct kv_row_tile tile = { rows, row_stride, n_rows, n };

		memcpy(expected, found, (size_t)out_stride * n_queries * sizeof(*found));
		for (uint32_t a = 0; a < n_queries; a++) {
			for (uint32_t r = 0; r < n_rows; r++)
				expected[a * out_stride + r] = score_plainly(
					q + (size_t)a * q_stride, rows + (size_t)r * row_stride, n);
		}
		kernels->score(&tile, q, q_stride, n_queries, found, out_stride);
		assert_same(found, expected, (size_t)out_stride * n_queries, "score");
		free(rows);
		free(q);
		free(found);
		free(expected);
	}
}
END_TEST

static void accumulate_plainly(const double *rows, uint32_t row_stride, uint32_t n_rows, uint32_t n,
	const double *weights, uint32_t weights_stride, uint32_t n_queries, double *acc, uint32_t acc_stride)
{
	for (uint32_t a = 0; a < n_queries; a++) {
		for (uint32_t r = 0; r < n_rows; r++) {
			for (uint32_t i = 0; i < n; i++)
				acc[(size_t)a * acc_stride + i] += weights[(size_t)a * weights_stride + r] *
					rows[(size_t)r * row_stride + i];
		}
	}
}

/* Rows are added in their order, whatever is in a vector beside them. */
START_TEST(test_row_kernels_accumulate)
{
	const struct kv_row_kernels *kernels = begin(_i);

	for (uint32_t round = 0; kernels && round < 200; round++) {
		const uint32_t n = 16 * (1 + any_below(32)), n_rows = any_below(19),
			       n_queries = 1 + any_below(9);
		const uint32_t row_stride = n + any_below(3), acc_stride = n + any_below(3),
			       w_stride = n_rows + 1;
		double *rows = many_f64((size_t)row_stride * n_rows);
		double *weights = many_f64((size_t)w_stride * n_queries);
		double *found = many_f64((size_t)acc_stride * n_queries);
		double *expected = many_f64((size_t)acc_stride * n_queries);
		const struct kv_row_tile tile = { rows, row_stride, n_rows, n };

		memcpy(expected, found, (size_t)acc_stride * n_queries * sizeof(*found));
		accumulate_plainly(
			rows, row_stride, n_rows, n, weights, w_stride, n_queries, expected, acc_stride);
		kernels->accumulate(&tile, weights, w_stride, n_queries, found, acc_stride);
		assert_same(found, expected, (size_t)acc_stride * n_queries, "accumulate");
		free(rows);
		free(weights);
		free(found);
		free(expected);
	}
}
END_TEST

/* Codes of four bits that are not expanded give what expanded ones give. */
START_TEST(test_row_kernels_codes_as_they_are)
{
	const struct kv_row_kernels *kernels = begin(_i);

	for (uint32_t round = 0; kernels && kernels->score_codes && round < 200; round++) {
		const uint32_t n = 16 * (1 + any_below(16)), n_rows = any_below(KV_ROW_KERNELS_ROWS_MAX + 1);
		const uint32_t n_queries = 1 + any_below(9), stride = n + any_below(3),
			       out_stride = n_rows + 2;
		struct coded coded;

		make_coded(&coded, n_rows, n, 4, any_below(9));

		double *rows = expand_plainly(&coded), *q = many_f64((size_t)stride * n_queries);
		double *found = many_f64((size_t)out_stride * n_queries);
		double *expected = many_f64((size_t)out_stride * n_queries);
		double *acc = many_f64((size_t)stride * n_queries), *acc_expected;

		memcpy(expected, found, (size_t)out_stride * n_queries * sizeof(*found));
		for (uint32_t a = 0; a < n_queries; a++) {
			for (uint32_t r = 0; r < n_rows; r++)
				expected[a * out_stride + r] =
					score_plainly(q + (size_t)a * stride, rows + (size_t)r * n, n);
		}
		kernels->score_codes(&coded.args, q, stride, n_queries, found, out_stride);
		assert_same(found, expected, (size_t)out_stride * n_queries, "score_codes");

		acc_expected = many_f64((size_t)stride * n_queries);
		memcpy(acc_expected, acc, (size_t)stride * n_queries * sizeof(*acc));
		accumulate_plainly(rows, n, n_rows, n, expected, out_stride, n_queries, acc_expected, stride);
		kernels->accumulate_codes(&coded.args, expected, out_stride, n_queries, acc, stride);
		assert_same(acc, acc_expected, (size_t)stride * n_queries, "accumulate_codes");
		free(rows);
		free(q);
		free(found);
		free(expected);
		free(acc);
		free(acc_expected);
		drop_coded(&coded);
	}
}
END_TEST

/* The greatest logit is found wherever it is, and a NaN is never it. */
START_TEST(test_row_kernels_finish_logits)
{
	const struct kv_row_kernels *kernels = begin(_i);

	for (uint32_t round = 0; kernels && round < 700; round++) {
		const uint32_t n = round % 70;
		const double scale = any_f64(), offset = round % 3 ? any_f64() : 0;
		double *found = many_f64(n), *expected = many_f64(n), greatest = -INFINITY;

		if (n > 0 && round % 2)
			found[any_below(n)] = NAN;
		for (uint32_t i = 0; i < n; i++) {
			expected[i] = offset + scale * found[i];
			greatest = expected[i] > greatest ? expected[i] : greatest;
		}
		const double max = kernels->finish_logits(found, n, scale, offset);

		assert_same(found, expected, n, "logits");
		ck_assert(max == greatest); /* of two zeros either will do */
		free(found);
		free(expected);
	}
}
END_TEST

/* ---- butterflies and cells ---- */

static float any_sign(void)
{
	return any_below(2) ? 1.0f : -1.0f;
}

static void hadamard_f64_plainly(
	uint32_t n, const float *before, const float *after, double factor, const double *from, double *to)
{
	for (uint32_t i = 0; i < n; i++)
		to[i] = (double)before[i] * from[i];
	for (uint32_t stride = 1; stride < n; stride *= 2) {
		for (uint32_t i = 0; i < n; i++) {
			const double a = to[i], b = to[i ^ stride];

			if ((i & stride) == 0) {
				to[i] = a + b;
				to[i ^ stride] = a - b;
			}
		}
	}
	for (uint32_t i = 0; i < n; i++)
		to[i] = (double)after[i] * (to[i] * factor);
}

static void hadamard_f32_plainly(
	uint32_t n, const float *before, const float *after, float factor, const float *from, float *to)
{
	for (uint32_t i = 0; i < n; i++)
		to[i] = before[i] * from[i];
	for (uint32_t stride = 1; stride < n; stride *= 2) {
		for (uint32_t i = 0; i < n; i++) {
			const float a = to[i], b = to[i ^ stride];

			if ((i & stride) == 0) {
				to[i] = a + b;
				to[i ^ stride] = a - b;
			}
		}
	}
	for (uint32_t i = 0; i < n; i++)
		to[i] = after[i] * (to[i] * factor);
}

/* Butterflies of ascending stride, in both precisions, in place and not. */
START_TEST(test_row_kernels_hadamard)
{
	const struct kv_row_kernels *kernels = begin(_i);

	for (uint32_t round = 0; kernels && round < 300; round++) {
		const uint32_t n = 16u << round % 5;
		const float factor = round % 3 ? (float)(1 / sqrt(n)) : 1;
		float before[256], after[256], narrow_expected[256], narrow_found[256];
		double expected[256], found[256];
		float *narrow = many_f32(n);
		double *wide = many_f64(n);

		for (uint32_t i = 0; i < n; i++) {
			before[i] = any_sign();
			after[i] = any_sign();
		}
		hadamard_f64_plainly(n, before, after, (double)factor, wide, expected);
		kernels->hadamard_f64(n, before, after, (double)factor, wide, found);
		assert_same(found, expected, n, "hadamard_f64");
		kernels->hadamard_f64(n, before, after, (double)factor, wide, wide);
		assert_same(wide, expected, n, "hadamard_f64 in place");
		hadamard_f32_plainly(n, before, after, factor, narrow, narrow_expected);
		kernels->hadamard_f32(n, before, after, factor, narrow, narrow_found);
		assert_same_f32(narrow_found, narrow_expected, n, "hadamard_f32");
		kernels->hadamard_f32(n, before, after, factor, narrow, narrow);
		assert_same_f32(narrow, narrow_expected, n, "hadamard_f32 in place");
		free(narrow);
		free(wide);
	}
}
END_TEST

/* A value on a boundary belongs to the lower cell, as kvcb_index() has it; any number of values. */
START_TEST(test_row_kernels_count_below)
{
	const struct kv_row_kernels *kernels = begin(_i);

	for (uint32_t round = 0; kernels && round < 400; round++) {
		const uint32_t bits = 1 + round % 8, n = any_below(257);
		struct kvcb_codebook codebook = { .bits = bits };
		float *values = many_f32(n);
		uint8_t *found = malloc(n + 1);

		ck_assert_ptr_nonnull(found);
		for (uint32_t b = 0; b < (1u << bits) - 1; b++)
			codebook.interior_boundaries[b] = ((float)b - (float)(1u << bits) / 2) / 16;
		for (uint32_t i = 0; i < n; i++) {
			if (isnan(values[i]) || i % 2)
				values[i] =
					((float)any_below(600) - 300) / 32; /* half of them on a boundary */
		}
		found[n] = 77;
		kernels->count_below(codebook.interior_boundaries, (1u << bits) - 1, values, n, found);
		for (uint32_t i = 0; i < n; i++)
			ck_assert_uint_eq(found[i], kvcb_index(&codebook, values[i]));
		ck_assert_uint_eq(found[n], 77);
		free(values);
		free(found);
	}
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("row_kernels");
	TCase *tcase = tcase_create("row_kernels");
	const int n = (int)KV_ROW_KERNELS_SETS_MAX;

	printf("seed %#x\n", SEED);
	tcase_set_timeout(tcase, 120);
	tcase_add_loop_test(tcase, test_row_kernels_expand_codes, 0, n);
	tcase_add_loop_test(tcase, test_row_kernels_expand_values, 0, n);
	tcase_add_loop_test(tcase, test_row_kernels_score, 0, n);
	tcase_add_loop_test(tcase, test_row_kernels_accumulate, 0, n);
	tcase_add_loop_test(tcase, test_row_kernels_codes_as_they_are, 0, n);
	tcase_add_loop_test(tcase, test_row_kernels_finish_logits, 0, n);
	tcase_add_loop_test(tcase, test_row_kernels_hadamard, 0, n);
	tcase_add_loop_test(tcase, test_row_kernels_count_below, 0, n);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK_GETENV);
}
