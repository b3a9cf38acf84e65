/*
 * The hot loops over rows, once per instruction set: expansion of packed codes, scores, weighted sums,
 * lengths, butterflies, matrices, codebook cells.
 *
 * core/row_kernels*.c are compiled several times, each time for another instruction set and into another
 * `struct kv_row_kernels`; which one is in use is chosen when the first caller asks. Every set gives the same
 * bits: the order of every sum is part of the contract below, every operation is rounded alone (a fused
 * multiply-add only where the product is exact), and what is not a number may only differ in the bits of the
 * NaN. So a set is a matter of speed, and the scalar backend is an oracle on every processor.
 *
 * Pure functions, any thread, no heap. Arrays may have any alignment that their type allows; destinations
 * overlap no source unless it is said.
 */
#ifndef CORE_ROW_KERNELS_H
#define CORE_ROW_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#define KV_ROW_KERNELS_STEP       16u /* numbers of a prepared row come in multiples of it */
#define KV_ROW_KERNELS_BITS_MAX   4u  /* of packed codes: a table of at most 16 entries */
#define KV_ROW_KERNELS_ROWS_MAX   16u /* of codes that are scored or summed up as they are */
#define KV_ROW_KERNELS_SETS_MAX   3u
#define KV_ROW_KERNELS_VALUES_MAX 256u /* of a row that is encoded */

/* Expanded rows of one tile, one after the other, `row_stride` numbers apart. */
struct kv_row_tile {
	const double *rows;
	uint32_t row_stride;
	uint32_t n_rows;
	uint32_t n; /* numbers of a row that count: a multiple of KV_ROW_KERNELS_STEP */
};

/* row = (value * scale + zero) * outer, in float64. */
struct kv_row_scale {
	double scale, zero, outer;
};

/* The same part of some rows, as codes: n codes of `bits` bits from the first bit of byte `offset` on. */
struct kv_row_codes {
	const uint8_t *const *rows; /* [n_rows] */
	uint32_t n_rows;
	uint32_t offset;
	uint32_t n;
	uint32_t bits;                     /* 1 to KV_ROW_KERNELS_BITS_MAX */
	const float *table;                /* [2^bits]: value of a code */
	const struct kv_row_scale *scales; /* [n_rows] */
};

struct kv_row_kernels {
	const char *name; /* "baseline", "avx2", "avx512" */

	/*
	 * out[row * out_stride + i] = (table[code i of row] * scale + zero) * outer (FORMATS 4). Reads
	 * kv_packed_bytes(n, bits) bytes of each row.
	 */
	void (*expand_codes)(const struct kv_row_codes *codes, double *out, uint32_t out_stride);
	/* out[i] = (values[i] * scale + zero) * outer */
	void (*expand_values)(const float *values, uint32_t n, const struct kv_row_scale *scale, double *out);
	/*
	 * products[query * products_stride + row] = <q[query * q_stride ...], row>. Sum k of eight takes the
	 * numbers k, k + 8, ... in this order; then ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7)).
	 */
	void (*score)(const struct kv_row_tile *tile, const double *q, uint32_t q_stride, uint32_t n_queries,
		double *products, uint32_t products_stride);
	/*
	 * acc[query * acc_stride + i] += weights[query * weights_stride + row] * row[i], for ascending rows.
	 */
	void (*accumulate)(const struct kv_row_tile *tile, const double *weights, uint32_t weights_stride,
		uint32_t n_queries, double *acc, uint32_t acc_stride);
	/*
	 * (optional) The same two over rows that are codes of 4 bits and not expanded: at most
	 * KV_ROW_KERNELS_ROWS_MAX rows of a multiple of KV_ROW_KERNELS_STEP codes. Without them codes are
	 * expanded first.
	 */
	void (*score_codes)(const struct kv_row_codes *codes, const double *q, uint32_t q_stride,
		uint32_t n_queries, double *products, uint32_t products_stride);
	void (*accumulate_codes)(const struct kv_row_codes *codes, const double *weights,
		uint32_t weights_stride, uint32_t n_queries, double *acc, uint32_t acc_stride);
	/* products[i] = offset + scale * products[i]; returns the greatest, NaN aside, or -infinity. */
	double (*finish_logits)(double *products, uint32_t n, double scale, double offset);
	/* to = from, n bfloat16 at any address as float32. */
	void (*widen_bf16)(const uint8_t *from, size_t n, float *to);
	/*
	 * len() of FORMATS 0 for at most KV_ROW_KERNELS_VALUES_MAX values: squares in float64, added as a
	 * tree over the next power of two, rounded once to float32. Infinite when the length overflows, not a
	 * number when a value is none: finite only where all values are.
	 */
	float (*length)(const float *values, uint32_t n);
	/* out[i] = values[i] / divisor; `out` may be `values`. */
	void (*divide)(const float *values, uint32_t n, float divisor, float *out);
	/*
	 * to = after * ((H (before * from)) * factor), n numbers, n a power of two and at least
	 * KV_ROW_KERNELS_STEP; H is the unnormalised Hadamard matrix as butterflies of ascending stride.
	 * Signs are +1 or -1. `to` may be `from`.
	 */
	void (*hadamard_f32)(uint32_t n, const float *before, const float *after, float factor,
		const float *from, float *to);
	void (*hadamard_f64)(uint32_t n, const float *before, const float *after, double factor,
		const double *from, double *to);
	/*
	 * to[i] = the sum of rows[j * n + i] * from[j] over increasing j, in float64: a product with the
	 * transposed matrix. n is a multiple of KV_ROW_KERNELS_STEP. The float32 results are rounded once.
	 * `to` may be `from`.
	 */
	void (*multiply_f32)(uint32_t n, const float *rows, const float *from, float *to);
	void (*multiply_f64)(uint32_t n, const float *rows, const double *from, double *to);
	/* cells[i]: how many of n_boundaries (at most 255), which ascend, are below y[i]; y is not NaN. */
	void (*count_below)(
		const float *boundaries, uint32_t n_boundaries, const float *y, uint32_t n, uint8_t *cells);
};

/* The set in use. */
const struct kv_row_kernels *kv_row_kernels(void);

/*
 * The sets that this build has and this processor runs, the slowest (baseline) first; NULL from the first
 * index that has none. Unless the environment variable TQKV_INSTRUCTION_SET names another one of them, the
 * last is in use.
 */
const struct kv_row_kernels *kv_row_kernels_at(uint32_t set_idx);

/* Uses this set from now on, or (NULL) the one that would be chosen at start. For tests and measurements. */
void kv_row_kernels_use(const struct kv_row_kernels *kernels);

#endif
