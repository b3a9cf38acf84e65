/*
 * One set of row kernels; which one is decided by KV_ROW_KERNELS_SET and the flags beside it in meson.build.
 *
 * Loops work on vectors of the compiler's vector extension, so there is one source for all sets. Vectors
 * change which results are computed side by side, never the operations of one result.
 */
#include "core/row_kernels.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "core/error.h"
#include "core/row_kernels_sets.h"
#include "core/row_kernels_vector.h"

/* ---- expansion ---- */

static void expand_values(const float *values, uint32_t n, const struct kv_row_scale *scale, double *out)
{
	const double factor = scale->scale, zero = scale->zero, outer = scale->outer;

	for (uint32_t i = 0; i < n; i++)
		out[i] = ((double)values[i] * factor + zero) * outer;
}

/* ---- scores ---- */

/* n_queries and n_rows are constants wherever this is called. */
INLINE void score_block(const struct kv_row_tile *tile, uint32_t row_first, const uint32_t n_rows,
	const double *q, size_t q_stride, const uint32_t n_queries, double *products, size_t products_stride)
{
	const double *rows = tile->rows + (size_t)row_first * tile->row_stride;
	f64_vector sums[QUERIES_AT_ONCE][SCORE_ROWS][PARTS];

	UNROLL
	for (uint32_t a = 0; a < n_queries; a++) {
		UNROLL
		for (uint32_t r = 0; r < n_rows; r++) {
			UNROLL
			for (uint32_t p = 0; p < PARTS; p++)
				sums[a][r][p] = (f64_vector){ 0 };
		}
	}
	for (uint32_t i = 0; i < tile->n; i += SUMS) {
		UNROLL
		for (uint32_t p = 0; p < PARTS; p++) {
			const size_t at = i + (size_t)p * LANES;

			UNROLL
			for (uint32_t a = 0; a < n_queries; a++) {
				const f64_vector query = load_f64(q + a * q_stride + at);

				UNROLL
				for (uint32_t r = 0; r < n_rows; r++)
					sums[a][r][p] +=
						query * load_f64(rows + (size_t)r * tile->row_stride + at);
			}
		}
	}
	UNROLL
	for (uint32_t a = 0; a < n_queries; a++) {
		UNROLL
		for (uint32_t r = 0; r < n_rows; r++)
			products[a * products_stride + row_first + r] = add_sums(sums[a][r]);
	}
}

INLINE void score_queries(const struct kv_row_tile *tile, const double *q, size_t q_stride,
	const uint32_t n_queries, double *products, size_t products_stride)
{
	uint32_t row = 0;

	for (; row + SCORE_ROWS <= tile->n_rows; row += SCORE_ROWS)
		score_block(tile, row, SCORE_ROWS, q, q_stride, n_queries, products, products_stride);
	for (; row < tile->n_rows; row++)
		score_block(tile, row, 1, q, q_stride, n_queries, products, products_stride);
}

static void score(const struct kv_row_tile *tile, const double *q, uint32_t q_stride, uint32_t n_queries,
	double *products, uint32_t products_stride)
{
	KV_ASSERT(tile->n % KV_ROW_KERNELS_STEP == 0);
	while (n_queries >= QUERIES_AT_ONCE) {
		score_queries(tile, q, q_stride, QUERIES_AT_ONCE, products, products_stride);
		q += (size_t)QUERIES_AT_ONCE * q_stride;
		products += (size_t)QUERIES_AT_ONCE * products_stride;
		n_queries -= QUERIES_AT_ONCE;
	}
#if defined(__AVX512F__)
	if (n_queries == 3)
		score_queries(tile, q, q_stride, 3, products, products_stride);
	else if (n_queries == 2)
		score_queries(tile, q, q_stride, 2, products, products_stride);
#endif
	if (n_queries == 1)
		score_queries(tile, q, q_stride, 1, products, products_stride);
}

/* ---- weighted sums ---- */

/* n_queries is a constant wherever this is called. */
INLINE void accumulate_queries(const struct kv_row_tile *tile, const double *weights, size_t weights_stride,
	const uint32_t n_queries, double *acc, size_t acc_stride)
{
	for (uint32_t i = 0; i < tile->n; i += COLUMNS) {
		f64_vector sums[QUERIES_AT_ONCE][COLUMNS / LANES];

		UNROLL
		for (uint32_t a = 0; a < n_queries; a++) {
			UNROLL
			for (uint32_t p = 0; p < COLUMNS / LANES; p++)
				sums[a][p] = load_f64(acc + a * acc_stride + i + (size_t)p * LANES);
		}
		for (uint32_t r = 0; r < tile->n_rows; r++) {
			const double *row = tile->rows + (size_t)r * tile->row_stride + i;

			UNROLL
			for (uint32_t p = 0; p < COLUMNS / LANES; p++) {
				const f64_vector part = load_f64(row + (size_t)p * LANES);

				UNROLL
				for (uint32_t a = 0; a < n_queries; a++)
					sums[a][p] += weights[a * weights_stride + r] * part;
			}
		}
		UNROLL
		for (uint32_t a = 0; a < n_queries; a++) {
			UNROLL
			for (uint32_t p = 0; p < COLUMNS / LANES; p++)
				store_f64(sums[a][p], acc + a * acc_stride + i + (size_t)p * LANES);
		}
	}
}

static void accumulate(const struct kv_row_tile *tile, const double *weights, uint32_t weights_stride,
	uint32_t n_queries, double *acc, uint32_t acc_stride)
{
	KV_ASSERT(tile->n % KV_ROW_KERNELS_STEP == 0);
	while (n_queries >= QUERIES_AT_ONCE) {
		accumulate_queries(tile, weights, weights_stride, QUERIES_AT_ONCE, acc, acc_stride);
		weights += (size_t)QUERIES_AT_ONCE * weights_stride;
		acc += (size_t)QUERIES_AT_ONCE * acc_stride;
		n_queries -= QUERIES_AT_ONCE;
	}
#if defined(__AVX512F__)
	if (n_queries == 3)
		accumulate_queries(tile, weights, weights_stride, 3, acc, acc_stride);
	else if (n_queries == 2)
		accumulate_queries(tile, weights, weights_stride, 2, acc, acc_stride);
#endif
	if (n_queries == 1)
		accumulate_queries(tile, weights, weights_stride, 1, acc, acc_stride);
}

/* ---- logits ---- */

static double finish_logits(double *products, uint32_t n, double scale, double offset)
{
	const uint32_t n_whole = n - n % SUMS;
	double greatest[SUMS], max = -INFINITY;

	for (uint32_t k = 0; k < SUMS; k++)
		greatest[k] = -INFINITY;
	for (uint32_t i = 0; i < n_whole; i += SUMS) {
		for (uint32_t k = 0; k < SUMS; k++) {
			const double logit = offset + scale * products[i + k];

			products[i + k] = logit;
			greatest[k] = logit > greatest[k] ? logit : greatest[k];
		}
	}
	for (uint32_t i = n_whole; i < n; i++) {
		products[i] = offset + scale * products[i];
		greatest[0] = products[i] > greatest[0] ? products[i] : greatest[0];
	}
	for (uint32_t k = 0; k < SUMS; k++)
		max = greatest[k] > max ? greatest[k] : max;
	return max;
}

/* ---- butterflies ---- */

INLINE f64_vector butterflies_inside_f64(f64_vector v)
{
#if LANES == 2
	v = BUTTERFLY_2(v);
#elif LANES == 4
	v = BUTTERFLY_4(v, 1);
	v = BUTTERFLY_4(v, 2);
#else
	v = BUTTERFLY_8(v, 1);
	v = BUTTERFLY_8(v, 2);
	v = BUTTERFLY_8(v, 4);
#endif
	return v;
}

/* Butterflies of `stride` and of twice that, for numbers that are a stride apart. */
INLINE void two_butterflies_f64(double *x, uint32_t stride)
{
	const f64_vector a = load_f64(x), b = load_f64(x + stride);
	const f64_vector c = load_f64(x + 2 * (size_t)stride), d = load_f64(x + 3 * (size_t)stride);
	const f64_vector a_b = a + b, c_d = c + d, a_minus_b = a - b, c_minus_d = c - d;

	store_f64(a_b + c_d, x);
	store_f64(a_minus_b + c_minus_d, x + stride);
	store_f64(a_b - c_d, x + 2 * (size_t)stride);
	store_f64(a_minus_b - c_minus_d, x + 3 * (size_t)stride);
}

static void hadamard_f64(
	uint32_t n, const float *before, const float *after, double factor, const double *from, double *to)
{
	uint32_t stride = LANES;

	KV_ASSERT(n >= KV_ROW_KERNELS_STEP && (n & (n - 1)) == 0);
	for (uint32_t i = 0; i < n; i += LANES)
		store_f64(butterflies_inside_f64(load_widened(before + i) * load_f64(from + i)), to + i);
	for (; stride < n / 2; stride *= 4) {
		for (uint32_t first = 0; first < n; first += 4 * stride) {
			for (uint32_t i = first; i < first + stride; i += LANES)
				two_butterflies_f64(to + i, stride);
		}
	}
	for (uint32_t i = 0; stride < n && i < stride; i += LANES) {
		const f64_vector a = load_f64(to + i), b = load_f64(to + i + stride);

		store_f64(a + b, to + i);
		store_f64(a - b, to + i + stride);
	}
	for (uint32_t i = 0; i < n; i += LANES)
		store_f64(load_widened(after + i) * (load_f64(to + i) * factor), to + i);
}

const struct kv_row_kernels OF_SET(kv_row_kernels) = {
	.name = TEXT(KV_ROW_KERNELS_SET),
	.expand_codes = OF_SET(kv_row_expand_codes),
	.expand_values = expand_values,
	.score = score,
	.accumulate = accumulate,
#if defined(__AVX512F__)
	.score_codes = OF_SET(kv_row_score_codes),
	.accumulate_codes = OF_SET(kv_row_accumulate_codes),
#endif
	.finish_logits = finish_logits,
	.widen_bf16 = OF_SET(kv_row_widen_bf16),
	.length = OF_SET(kv_row_length),
	.divide = OF_SET(kv_row_divide),
	.hadamard_f32 = OF_SET(kv_row_hadamard_f32),
	.hadamard_f64 = hadamard_f64,
	.multiply_f32 = OF_SET(kv_row_multiply_f32),
	.multiply_f64 = OF_SET(kv_row_multiply_f64),
	.count_below = OF_SET(kv_row_count_below),
};
