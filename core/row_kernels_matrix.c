/*
 * Products with a dense matrix of one set of row kernels. Results stand side by side, each the sum over its
 * column in order, so the matrix is read by rows and a number of the vector serves a whole row of it.
 */
#include "core/row_kernels.h"

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#include "core/error.h"
#include "core/row_kernels_vector.h"

/*
 * 256 bits at most: what there is to do is one conversion for each product, and those of 512 bits take more
 * than twice as long on Zen 4 (1130 ns in place of 740 for 128 channels).
 */
#if VECTOR_BYTES >= 32
typedef double wide_vector __attribute__((vector_size(32)));
#define WIDE_LANES 4u
#else
typedef double wide_vector __attribute__((vector_size(16)));
#define WIDE_LANES 2u
#endif
/* Sums that are kept in registers: as many as hide how long an addition takes. */
#define SUM_VECTORS 8u
_Static_assert(KV_ROW_KERNELS_STEP <= SUM_VECTORS * WIDE_LANES, "the last results are one step");

INLINE wide_vector widen(const float *from)
{
#if VECTOR_BYTES >= 32
	return (wide_vector)_mm256_cvtps_pd(_mm_loadu_ps(from));
#else
	return (wide_vector){ (double)from[0], (double)from[1] };
#endif
}

/*
 * A product of two float32 is exact in float64, so it makes no difference whether it is rounded before the
 * addition: one operation where the set has one.
 */
INLINE wide_vector add_product(const bool is_exact, wide_vector sum, wide_vector a, wide_vector b)
{
#if VECTOR_BYTES >= 32
	if (is_exact)
		return (wide_vector)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)sum);
#else
	(void)is_exact;
#endif
	return sum + a * b;
}

/* n_vectors of results; it and is_exact are constants wherever this is called. */
INLINE void multiply_some(const uint32_t n_vectors, const bool is_exact, uint32_t n, const float *rows,
	const double *from, double *to)
{
	wide_vector sums[SUM_VECTORS];

	UNROLL
	for (uint32_t v = 0; v < n_vectors; v++)
		sums[v] = (wide_vector){ 0 };
	for (uint32_t j = 0; j < n; j++) {
		const wide_vector factor = from[j] - (wide_vector){ 0 };

		UNROLL
		for (uint32_t v = 0; v < n_vectors; v++)
			sums[v] = add_product(is_exact, sums[v],
				widen(rows + (size_t)j * n + (size_t)v * WIDE_LANES), factor);
	}
	UNROLL
	for (uint32_t v = 0; v < n_vectors; v++)
		memcpy(to + (size_t)v * WIDE_LANES, &sums[v], sizeof(sums[v]));
}

INLINE void multiply(const bool is_exact, uint32_t n, const float *rows, const double *from, double *to)
{
	uint32_t i = 0;

	KV_ASSERT(n % KV_ROW_KERNELS_STEP == 0 && n <= KV_ROW_KERNELS_VALUES_MAX);
	for (; i + SUM_VECTORS * WIDE_LANES <= n; i += SUM_VECTORS * WIDE_LANES)
		multiply_some(SUM_VECTORS, is_exact, n, rows + i, from, to + i);
	if (i < n)
		multiply_some(KV_ROW_KERNELS_STEP / WIDE_LANES, is_exact, n, rows + i, from, to + i);
}

void OF_SET(kv_row_multiply_f32)(uint32_t n, const float *rows, const float *from, float *to)
{
	double wide[KV_ROW_KERNELS_VALUES_MAX], sums[KV_ROW_KERNELS_VALUES_MAX];

	for (uint32_t j = 0; j < n; j++)
		wide[j] = (double)from[j];
	multiply(true, n, rows, wide, sums);
	for (uint32_t i = 0; i < n; i++)
		to[i] = (float)sums[i];
}

void OF_SET(kv_row_multiply_f64)(uint32_t n, const float *rows, const double *from, double *to)
{
	double copy[KV_ROW_KERNELS_VALUES_MAX];

	memcpy(copy, from, n * sizeof(*copy));
	multiply(false, n, rows, copy, to);
}
