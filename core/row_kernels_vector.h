/*
 * Vectors of the compiler's vector extension, as wide as the registers of the instruction set that a set of
 * row kernels is compiled for. Included by core/row_kernels.c and core/row_kernels_codes.c only.
 */
#ifndef CORE_ROW_KERNELS_VECTOR_H
#define CORE_ROW_KERNELS_VECTOR_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

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
#define NARROW_BYTES    32 /* float32: no loop is long enough to fill more */
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
#define UNROLL       _Pragma("GCC unroll 8") /* more than any loop that it stands before has turns */

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
	f64_source source;

	memcpy(&source, from, sizeof(source));
	return __builtin_convertvector(source, f64_vector);
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

/* core/row_kernels_codes.c; slots of struct kv_row_kernels. */
void OF_SET(kv_row_expand_codes)(const struct kv_row_codes *codes, double *out, uint32_t out_stride);
#if defined(__AVX512F__)
void OF_SET(kv_row_score_codes)(const struct kv_row_codes *codes, const double *q, uint32_t q_stride,
	uint32_t n_queries, double *products, uint32_t products_stride);
void OF_SET(kv_row_accumulate_codes)(const struct kv_row_codes *codes, const double *weights,
	uint32_t weights_stride, uint32_t n_queries, double *acc, uint32_t acc_stride);
#endif

#endif
