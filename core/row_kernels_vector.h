/*
 * Vectors of the compiler's vector extension, as wide as the registers of the instruction set that a set of
 * row kernels is compiled for. Included by core/row_kernels*.c only.
 */
#ifndef CORE_ROW_KERNELS_VECTOR_H
#define CORE_ROW_KERNELS_VECTOR_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "core/row_kernels.h"

#ifndef KV_ROW_KERNELS_SET
#define KV_ROW_KERNELS_SET baseline
#endif
/* The name of something that every set has: name_baseline, name_avx2, ... */
#define OF_SET(name)          JOIN(name, KV_ROW_KERNELS_SET)
#define JOIN(name, set)       JOIN_AGAIN(name, set)
#define JOIN_AGAIN(name, set) name##_##set
#define TEXT(set)             TEXT_AGAIN(set)
#define TEXT_AGAIN(set)       #set

/*
 * Registers: a vector's bytes, and how many queries and rows are taken at once so that their sums stay in
 * registers (16 of them, 32 with AVX-512) and a load serves more than one product.
 */
#if defined(__AVX512F__)
#define VECTOR_BYTES    64
#define NARROW_BYTES    64
#define QUERIES_AT_ONCE 4u
#define SCORE_ROWS      4u
#elif defined(__AVX2__)
#define VECTOR_BYTES    32
#define NARROW_BYTES    32
#define QUERIES_AT_ONCE 2u
#define SCORE_ROWS      2u
#else
#define VECTOR_BYTES    16
#define NARROW_BYTES    16
#define QUERIES_AT_ONCE 1u
#define SCORE_ROWS      2u
#endif

#define SUMS         8u                  /* of a score, side by side */
#define LANES        (VECTOR_BYTES / 8)  /* float64 of a vector */
#define PARTS        (SUMS / LANES)      /* vectors that hold the sums of one score */
#define COLUMNS      KV_ROW_KERNELS_STEP /* numbers of a weighted sum that are kept in registers */
#define NARROW_LANES (NARROW_BYTES / 4)  /* float32 of a vector */
#define INLINE       static inline __attribute__((always_inline))
#define UNROLL       _Pragma("GCC unroll 8")  /* more than any loop that it stands before has turns */
#define UNROLL_ALL   _Pragma("GCC unroll 64") /* the same for a whole row */

_Static_assert(KV_ROW_KERNELS_STEP % SUMS == 0, "scores take whole groups of sums");

typedef double f64_vector __attribute__((vector_size(VECTOR_BYTES)));
typedef float f64_source __attribute__((vector_size(VECTOR_BYTES / 2))); /* as many float32 */
typedef float f32_vector __attribute__((vector_size(NARROW_BYTES)));
typedef int32_t i32_vector __attribute__((vector_size(NARROW_BYTES)));
typedef uint8_t u8_vector __attribute__((vector_size(NARROW_LANES)));
typedef double f64_pair __attribute__((vector_size(16)));
#if LANES >= 4
typedef double f64_four __attribute__((vector_size(32)));
#endif

INLINE f64_vector load_f64(const double *from)
{
	f64_vector vector;

	memcpy(&vector, from, sizeof(vector));
	return vector;
}

INLINE void store_f64(f64_vector vector, double *to)
{
	memcpy(to, &vector, sizeof(vector));
}

/* As many float32 as a vector has float64. */
INLINE f64_vector load_widened(const float *from)
{
	/* By name: gcc 12 converts a vector of the extension in pieces. */
#if VECTOR_BYTES == 64
	return (f64_vector)_mm512_cvtps_pd(_mm256_loadu_ps(from));
#elif VECTOR_BYTES == 32
	return (f64_vector)_mm256_cvtps_pd(_mm_loadu_ps(from));
#else
	f64_source source;

	memcpy(&source, from, sizeof(source));
	return __builtin_convertvector(source, f64_vector);
#endif
}

INLINE f32_vector load_f32(const float *from)
{
	f32_vector vector;

	memcpy(&vector, from, sizeof(vector));
	return vector;
}

INLINE void store_f32(f32_vector vector, float *to)
{
	memcpy(to, &vector, sizeof(vector));
}

/* Eight sums to one: ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7)). */
INLINE double add_sums(const f64_vector sums[PARTS])
{
#if LANES == 2
	const f64_pair pair = (sums[0] + sums[2]) + (sums[1] + sums[3]);
#else
#if LANES == 4
	const f64_four four = sums[0] + sums[1];
#else
	const f64_four four = __builtin_shufflevector(sums[0], sums[0], 0, 1, 2, 3) +
		__builtin_shufflevector(sums[0], sums[0], 4, 5, 6, 7);
#endif
	const f64_pair pair =
		__builtin_shufflevector(four, four, 0, 1) + __builtin_shufflevector(four, four, 2, 3);
#endif
	return pair[0] + pair[1];
}

/*
 * Lane k becomes v[k] + v[k ^ stride] where bit `stride` of k is 0, else v[k ^ stride] - v[k]. Products with
 * a sign are exact, and a - b is a + (-b).
 */
#define SIGN(k, stride) ((k) & (stride) ? -1 : 1)
#define BUTTERFLY_2(v)  (__builtin_shufflevector(v, v, 1, 0) + (v) * (__typeof__(v)){ 1, -1 })
#define BUTTERFLY_4(v, s)                                                    \
	(__builtin_shufflevector(v, v, 0 ^ (s), 1 ^ (s), 2 ^ (s), 3 ^ (s)) + \
		(v) * (__typeof__(v)){ SIGN(0, s), SIGN(1, s), SIGN(2, s), SIGN(3, s) })
#define BUTTERFLY_8(v, s)                                                                            \
	(__builtin_shufflevector(                                                                    \
		 v, v, 0 ^ (s), 1 ^ (s), 2 ^ (s), 3 ^ (s), 4 ^ (s), 5 ^ (s), 6 ^ (s), 7 ^ (s)) +     \
		(v) *                                                                                \
			(__typeof__(v)){ SIGN(0, s), SIGN(1, s), SIGN(2, s), SIGN(3, s), SIGN(4, s), \
				SIGN(5, s), SIGN(6, s), SIGN(7, s) })
#define BUTTERFLY_16(v, s)                                                                                \
	(__builtin_shufflevector(v, v, 0 ^ (s), 1 ^ (s), 2 ^ (s), 3 ^ (s), 4 ^ (s), 5 ^ (s), 6 ^ (s),     \
		 7 ^ (s), 8 ^ (s), 9 ^ (s), 10 ^ (s), 11 ^ (s), 12 ^ (s), 13 ^ (s), 14 ^ (s), 15 ^ (s)) + \
		(v) *                                                                                     \
			(__typeof__(v)){ SIGN(0, s), SIGN(1, s), SIGN(2, s), SIGN(3, s), SIGN(4, s),      \
				SIGN(5, s), SIGN(6, s), SIGN(7, s), SIGN(8, s), SIGN(9, s), SIGN(10, s),  \
				SIGN(11, s), SIGN(12, s), SIGN(13, s), SIGN(14, s), SIGN(15, s) })

/* Slots of struct kv_row_kernels: core/row_kernels_encode.c, core/row_kernels_matrix.c, then
 * core/row_kernels_codes.c. */
void OF_SET(kv_row_widen_bf16)(const uint8_t *from, size_t n, float *to);
float OF_SET(kv_row_length)(const float *values, uint32_t n);
void OF_SET(kv_row_divide)(const float *values, uint32_t n, float divisor, float *out);
void OF_SET(kv_row_hadamard_f32)(
	uint32_t n, const float *before, const float *after, float factor, const float *from, float *to);
void OF_SET(kv_row_count_below)(
	const float *boundaries, uint32_t n_boundaries, const float *y, uint32_t n, uint8_t *cells);
void OF_SET(kv_row_multiply_f32)(uint32_t n, const float *rows, const float *from, float *to);
void OF_SET(kv_row_multiply_f64)(uint32_t n, const float *rows, const double *from, double *to);
void OF_SET(kv_row_expand_codes)(const struct kv_row_codes *codes, double *out, uint32_t out_stride);
#if defined(__AVX512F__)
void OF_SET(kv_row_score_codes)(const struct kv_row_codes *codes, const double *q, uint32_t q_stride,
	uint32_t n_queries, double *products, uint32_t products_stride);
void OF_SET(kv_row_accumulate_codes)(const struct kv_row_codes *codes, const double *weights,
	uint32_t weights_stride, uint32_t n_queries, double *acc, uint32_t acc_stride);
#endif

#endif
