/*
 * Registers of one instruction set for core/fast_kernels.c: taking codes apart, lookups, products, sums of
 * all lanes. Included there only.
 *
 * A register holds WORDS 16-bit numbers or LANES 32-bit ones. `bits` is a constant wherever it is a
 * parameter.
 */
#ifndef CORE_FAST_VECTOR_H
#define CORE_FAST_VECTOR_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "core/fast.h"

#define INLINE       static inline __attribute__((always_inline))
#define ROWS_AT_ONCE (LANES / 4) /* that share a register, 128 bits each */
/* Hides where a pointer or number comes from: a compiler that keeps 32 of them in vector registers is slow.
 */
#define FORGET(p) __asm__("" : "+r"(p))
/* Sanitized builds optimise too little to unroll, and say so. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define UNROLL
#define UNROLL_4
#define UNROLL_64
#else
#define UNROLL    _Pragma("GCC unroll 16") /* more than any loop that it stands before has turns */
#define UNROLL_4  _Pragma("GCC unroll 4")
#define UNROLL_64 _Pragma("GCC unroll 64")
#endif

/* Byte k of the words that codes are moved to: word i takes the two bytes that code i begins in. */
#define BYTE_OF(k)  (char)(bits * ((k) / 2) / 8 + (k) % 2)
#define BYTES_4(k)  BYTE_OF(k), BYTE_OF(k + 1), BYTE_OF(k + 2), BYTE_OF(k + 3)
#define BYTES_16(k) BYTES_4(k), BYTES_4(k + 4), BYTES_4(k + 8), BYTES_4(k + 12)
/* The same for codes of two rows in turn, of which the second lies `second` bytes further. */
#define PAIR_OF(k)  (char)(bits * ((k) / 4) / 8 + (k) % 2 + ((k) / 2 % 2) * second)
#define PAIRS_4(k)  PAIR_OF(k), PAIR_OF(k + 1), PAIR_OF(k + 2), PAIR_OF(k + 3)
#define PAIRS_16(k) PAIRS_4(k), PAIRS_4(k + 4), PAIRS_4(k + 8), PAIRS_4(k + 12)
/* Where in its first byte code i begins. */
#define SHIFT_OF(i)    (short)(bits * (i) % 8)
#define SHIFTS_4(i, d) SHIFT_OF((i) / d), SHIFT_OF((i + 1) / d), SHIFT_OF((i + 2) / d), SHIFT_OF((i + 3) / d)
#define SHIFTS_8(i, d) SHIFTS_4(i, d), SHIFTS_4(i + 4, d)

typedef char i8_bytes_64 __attribute__((vector_size(64)));
typedef char i8_bytes_32 __attribute__((vector_size(32)));
typedef short i16_words_32 __attribute__((vector_size(64)));
typedef unsigned short u16_words_32 __attribute__((vector_size(64)));
typedef short i16_words_16 __attribute__((vector_size(32)));

#if defined(__AVX512VNNI__)
#include "core/fast_vector_avx512.h"
#else
#include "core/fast_vector_avx2.h"
#endif

INLINE f32_lanes load_f32(const float *from)
{
	f32_lanes vector;

	memcpy(&vector, from, sizeof(vector));
	return vector;
}

INLINE void store_f32(f32_lanes vector, float *to)
{
	memcpy(to, &vector, sizeof(vector));
}

INLINE f32_lanes repeat_f32(float value)
{
	return value - (f32_lanes){ 0 }; /* a difference, because a sum would have to turn -0 into 0 */
}

#endif
