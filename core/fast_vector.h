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
/* Hides where a pointer comes from: a compiler that keeps 32 loaded pointers in vector registers is slow. */
#define FORGET(p) __asm__("" : "+r"(p))
#define UNROLL    _Pragma("GCC unroll 16") /* more than any loop that it stands before has turns */
#define UNROLL_64 _Pragma("GCC unroll 64")

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

#define WORDS 32u
#define LANES 16u
typedef __m512i i_vector;
typedef __m512 f_vector;
typedef int32_t i32_lanes __attribute__((vector_size(64)));
typedef float f32_lanes __attribute__((vector_size(64)));

struct lookup {
	__m512i entries[8];
};

INLINE struct lookup load_lookup(const struct kv_fast_part *part, const uint32_t bits)
{
	const int16_t *table = part->table;
	const uint32_t n = bits > 5 ? 1u << (bits - 5) : 1;
	struct lookup lookup;

	for (uint32_t i = 0; i < n; i++)
		lookup.entries[i] = _mm512_loadu_si512(table + (size_t)i * WORDS);
	return lookup;
}

INLINE __m512i look_up_128(const __m512i *entries, __m512i codes)
{
	const __m512i low = _mm512_permutex2var_epi16(entries[0], codes, entries[1]);
	const __m512i high = _mm512_permutex2var_epi16(entries[2], codes, entries[3]);

	return _mm512_mask_blend_epi16(_mm512_test_epi16_mask(codes, _mm512_set1_epi16(64)), low, high);
}

/* Of every word the low `bits` bits count. Entries are repeated, so five bits may be used where there are
 * fewer. */
INLINE __m512i look_up(const struct lookup *lookup, __m512i codes, const uint32_t bits)
{
	if (bits <= 5)
		return _mm512_permutexvar_epi16(codes, lookup->entries[0]);
	if (bits == 6)
		return _mm512_permutex2var_epi16(lookup->entries[0], codes, lookup->entries[1]);
	if (bits == 7)
		return look_up_128(lookup->entries, codes);
	return _mm512_mask_blend_epi16(_mm512_test_epi16_mask(codes, _mm512_set1_epi16(128)),
		look_up_128(lookup->entries, codes), look_up_128(lookup->entries + 4, codes));
}

INLINE void look_up_two(
	const struct lookup *lookup, const __m512i codes[2], const uint32_t bits, __m512i out[2])
{
	out[0] = look_up(lookup, codes[0], bits);
	out[1] = look_up(lookup, codes[1], bits);
}

INLINE __m512i mask_codes(__m512i codes, const uint32_t bits)
{
	return _mm512_and_si512(codes, _mm512_set1_epi16((short)((1 << bits) - 1)));
}

/* Codes of channels [WORDS * v, + WORDS) of a row. */
INLINE __m512i codes_of(const uint8_t *codes, uint32_t v, const uint32_t bits)
{
	const i8_bytes_64 bytes = { BYTES_16(0), BYTES_16(16), BYTES_16(32), BYTES_16(48) };
	const i16_words_32 shifts = { SHIFTS_8(0, 1), SHIFTS_8(8, 1), SHIFTS_8(16, 1), SHIFTS_8(24, 1) };
	const __m256i half =
		_mm256_loadu_si256((const __m256i *)(const void *)(codes + (size_t)v * 4 * bits));
	const __m512i packed = _mm512_zextsi256_si512(half);

	if (bits == 8)
		return _mm512_cvtepu8_epi16(half);
	return _mm512_srlv_epi16(_mm512_permutexvar_epi8((__m512i)bytes, packed), (__m512i)shifts);
}

/* Codes of channels [LANES * v, + LANES) of two rows in turn. */
INLINE __m512i codes_of_two(const uint8_t *a, const uint8_t *b, uint32_t v, const uint32_t bits)
{
	enum { second = 16 };
	const i8_bytes_64 bytes = { PAIRS_16(0), PAIRS_16(16), PAIRS_16(32), PAIRS_16(48) };
	const i16_words_32 shifts = { SHIFTS_8(0, 2), SHIFTS_8(8, 2), SHIFTS_8(16, 2), SHIFTS_8(24, 2) };
	const __m128i low = _mm_loadu_si128((const __m128i *)(const void *)(a + (size_t)v * 2 * bits));
	const __m128i high = _mm_loadu_si128((const __m128i *)(const void *)(b + (size_t)v * 2 * bits));
	const __m512i packed = _mm512_inserti32x4(_mm512_zextsi128_si512(low), high, 1);

	if (bits == 8)
		return _mm512_maskz_permutexvar_epi8(0x5555555555555555, (__m512i)bytes, packed);
	return _mm512_srlv_epi16(_mm512_permutexvar_epi8((__m512i)bytes, packed), (__m512i)shifts);
}

INLINE __m512i insert_128(__m512i to, __mmask16 lanes, const uint8_t *from)
{
	/* A masked load: any port can blend, only two can shuffle. */
	return _mm512_mask_broadcast_i32x4(to, lanes, _mm_loadu_si128((const __m128i *)(const void *)from));
}

/* 16 bytes of each of LANES rows: dword i of every row in quads[i], row r in lane r. */
INLINE void quads_of_rows(const uint8_t *const rows[], uint32_t offset, __m512i quads[4])
{
	__m512i words[4], half[4];

	UNROLL
	for (uint32_t r = 0; r < 4; r++) {
		words[r] = _mm512_castsi128_si512(
			_mm_loadu_si128((const __m128i *)(const void *)(rows[r] + offset)));
		words[r] = insert_128(words[r], 0x00F0, rows[r + 4] + offset);
		words[r] = insert_128(words[r], 0x0F00, rows[r + 8] + offset);
		words[r] = insert_128(words[r], 0xF000, rows[r + 12] + offset);
	}
	half[0] = _mm512_unpacklo_epi32(words[0], words[1]);
	half[1] = _mm512_unpackhi_epi32(words[0], words[1]);
	half[2] = _mm512_unpacklo_epi32(words[2], words[3]);
	half[3] = _mm512_unpackhi_epi32(words[2], words[3]);
	quads[0] = _mm512_unpacklo_epi64(half[0], half[2]);
	quads[1] = _mm512_unpackhi_epi64(half[0], half[2]);
	quads[2] = _mm512_unpacklo_epi64(half[1], half[3]);
	quads[3] = _mm512_unpackhi_epi64(half[1], half[3]);
}

/* Words of two rows in turn: expand_two() takes the four registers of block `block` out of them. */
INLINE __m512i shifted_words_of_two(const uint8_t *a, const uint8_t *b, uint32_t block)
{
	const i16_words_32 turns = { 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10,
		42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47 };
	const __m256i low = _mm256_loadu_si256((const __m256i *)(const void *)(a + (size_t)block * 32));
	const __m256i high = _mm256_loadu_si256((const __m256i *)(const void *)(b + (size_t)block * 32));

	return _mm512_permutex2var_epi16(
		_mm512_castsi256_si512(low), (__m512i)turns, _mm512_castsi256_si512(high));
}

/* Registers 2 * half and 2 * half + 1 of the four that such words hold. */
INLINE void expand_two(const struct lookup *lookup, __m512i words, const uint32_t half, __m512i values[2])
{
	values[0] = look_up(lookup, half == 0 ? words : _mm512_srli_epi16(words, 8), 4);
	values[1] =
		look_up(lookup, half == 0 ? _mm512_srli_epi16(words, 4) : _mm512_srli_epi16(words, 12), 4);
}

INLINE __m512i shift_down(__m512i words, const uint32_t n)
{
	return (__m512i)((u16_words_32)words >> n);
}

/* Scores take 16 bytes of a row at once, sums four registers. */
INLINE bool takes_shifted(bool is_v, uint32_t bits, uint32_t n)
{
	if (is_v)
		return bits == 4 && n % (4 * LANES) == 0;
	return (bits == 1 || bits == 2 || bits == 4 || bits == 8) && n % (128 / bits) == 0;
}

/*
 * Of V: words of 4 codes, those of each shift together. Of K: the two codes that one shift takes out of 32
 * bits side by side.
 */
INLINE uint32_t code_of_slot(bool is_v, uint32_t bits, uint32_t slot)
{
	const uint32_t per_word = 16 / bits;

	if (!is_v)
		return slot / (2 * per_word) * (2 * per_word) + slot % (2 * per_word) / 2 +
			slot % 2 * per_word;
	return slot / (4 * LANES) * 4 * LANES + slot % LANES * 4 + slot / LANES % 4;
}

INLINE __m512i multiply_add(__m512i sum, __m512i a, __m512i b)
{
	__asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
	return sum;
}

INLINE __m512i load_words(const int16_t *from)
{
	return _mm512_loadu_si512(from);
}

INLINE __m512i load_pair(const int16_t *from)
{
	int32_t pair;

	memcpy(&pair, from, sizeof(pair));
	return _mm512_set1_epi32(pair);
}

INLINE __m512i repeat_pair(int32_t pair)
{
	return _mm512_set1_epi32(pair);
}

INLINE f_vector to_f32(__m512i values)
{
	return _mm512_cvtepi32_ps(values);
}

/* Lane i of the result is the sum of all lanes of sums[i]. */
INLINE __m512i add_lanes(const __m512i sums[LANES])
{
	__m512i quads[4], halves[2];

	UNROLL
	for (uint32_t i = 0; i < 4; i++) {
		const __m512i *s = sums + (size_t)i * 4;
		const __m512i a = _mm512_add_epi32(
			_mm512_unpacklo_epi32(s[0], s[1]), _mm512_unpackhi_epi32(s[0], s[1]));
		const __m512i b = _mm512_add_epi32(
			_mm512_unpacklo_epi32(s[2], s[3]), _mm512_unpackhi_epi32(s[2], s[3]));

		quads[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
	}
	UNROLL
	for (uint32_t i = 0; i < 2; i++)
		halves[i] = _mm512_add_epi32(_mm512_shuffle_i32x4(quads[2 * i], quads[2 * i + 1], 0x88),
			_mm512_shuffle_i32x4(quads[2 * i], quads[2 * i + 1], 0xDD));
	return _mm512_add_epi32(_mm512_shuffle_i32x4(halves[0], halves[1], 0x88),
		_mm512_shuffle_i32x4(halves[0], halves[1], 0xDD));
}

INLINE f_vector add_lanes_f32(const f_vector sums[LANES])
{
	f_vector quads[4], halves[2];

	UNROLL
	for (uint32_t i = 0; i < 4; i++) {
		const f_vector *s = sums + (size_t)i * 4;
		const __m512d a = _mm512_castps_pd(
			_mm512_add_ps(_mm512_unpacklo_ps(s[0], s[1]), _mm512_unpackhi_ps(s[0], s[1])));
		const __m512d b = _mm512_castps_pd(
			_mm512_add_ps(_mm512_unpacklo_ps(s[2], s[3]), _mm512_unpackhi_ps(s[2], s[3])));

		quads[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
			_mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
	}
	UNROLL
	for (uint32_t i = 0; i < 2; i++)
		halves[i] = _mm512_add_ps(_mm512_shuffle_f32x4(quads[2 * i], quads[2 * i + 1], 0x88),
			_mm512_shuffle_f32x4(quads[2 * i], quads[2 * i + 1], 0xDD));
	return _mm512_add_ps(_mm512_shuffle_f32x4(halves[0], halves[1], 0x88),
		_mm512_shuffle_f32x4(halves[0], halves[1], 0xDD));
}

INLINE f_vector fma_f32(f_vector a, f_vector b, f_vector sum)
{
	return _mm512_fmadd_ps(a, b, sum);
}

INLINE f_vector f16_to_f32(const void *from)
{
	return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
}

INLINE f_vector bf16_to_f32(const void *from)
{
	return _mm512_castsi512_ps(
		_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16));
}

/* Times 2^-8. */
INLINE f_vector e4m3_to_f32(const void *from)
{
	/* The sign comes twice, into the highest bit and the one below. */
	const __m256i wide =
		_mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from)), 7);

	return _mm512_cvtph_ps(_mm256_and_si256(wide, _mm256_set1_epi16((short)0xBFFF)));
}

/* LANES weights to 16-bit integers in one register half: values are in [0, KV_FAST_WEIGHT_MAX]. */
INLINE void store_rounded(f_vector values, int16_t *to)
{
	_mm256_storeu_si256((__m256i *)(void *)to, _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(values)));
}

INLINE i32_lanes rounded(f32_lanes values)
{
	return (i32_lanes)_mm512_cvtps_epi32((__m512)values);
}

INLINE f32_lanes greater(f32_lanes a, f32_lanes b)
{
	return (f32_lanes)_mm512_max_ps((__m512)a, (__m512)b);
}

INLINE float greatest_lane(f32_lanes values)
{
	return _mm512_reduce_max_ps((__m512)values);
}

INLINE float sum_of_lanes(f32_lanes values)
{
	return _mm512_reduce_add_ps((__m512)values);
}

#else /* AVX2 with FMA and F16C */

#define WORDS        16u
#define LANES        8u
typedef __m256i i_vector;
typedef __m256 f_vector;
typedef int32_t i32_lanes __attribute__((vector_size(32)));
typedef float f32_lanes __attribute__((vector_size(32)));

struct lookup {
	__m256i low, high;    /* bytes of 16 entries, in both halves */
	const int16_t *table; /* more than 4 bits */
	const uint8_t *upper; /* as in struct kv_fast_part */
};

INLINE struct lookup load_lookup(const struct kv_fast_part *part, const uint32_t bits)
{
	const int16_t *table = part->table;
	struct lookup lookup = { .table = table, .upper = part->upper };

	if (bits <= 4) {
		const __m256i entries = _mm256_loadu_si256((const __m256i *)(const void *)table);
		const __m128i a = _mm256_castsi256_si128(entries), b = _mm256_extracti128_si256(entries, 1);
		const __m128i ones = _mm_set1_epi16(255);

		lookup.low = _mm256_broadcastsi128_si256(
			_mm_packus_epi16(_mm_and_si128(a, ones), _mm_and_si128(b, ones)));
		lookup.high = _mm256_broadcastsi128_si256(
			_mm_packus_epi16(_mm_srli_epi16(a, 8), _mm_srli_epi16(b, 8)));
	}
	return lookup;
}

/* A byte whose highest bit is set gives 0, so each of both lookups fills one half of a word. */
INLINE __m256i look_up(const struct lookup *lookup, __m256i codes, const uint32_t bits)
{
	if (bits <= 4) {
		const __m256i c = _mm256_and_si256(codes, _mm256_set1_epi16(15));
		const __m256i low = _mm256_shuffle_epi8(
			lookup->low, _mm256_or_si256(c, _mm256_set1_epi16((short)0x8000)));
		const __m256i high = _mm256_shuffle_epi8(
			lookup->high, _mm256_or_si256(_mm256_slli_epi16(c, 8), _mm256_set1_epi16(0x80)));

		return _mm256_or_si256(low, high);
	}

	const __m256i c = _mm256_and_si256(codes, _mm256_set1_epi16((short)((1 << bits) - 1)));
	const __m256i even = _mm256_i32gather_epi32(
		(const int *)(const void *)lookup->table, _mm256_and_si256(c, _mm256_set1_epi32(0xFFFF)), 2);
	const __m256i odd =
		_mm256_i32gather_epi32((const int *)(const void *)lookup->table, _mm256_srli_epi32(c, 16), 2);

	return _mm256_blend_epi16(even, _mm256_slli_epi32(odd, 16), 0xAA);
}

/* Sixteen bytes of `table` for the low four bits of every code, and so on up to the bits that are left. */
INLINE __m256i look_up_bytes(const uint8_t *table, __m256i codes, const uint32_t bits)
{
	const uint32_t n = bits > 4 ? 1u << (bits - 4) : 1;
	__m256i found[8];

	UNROLL
	for (uint32_t i = 0; i < n; i++)
		found[i] = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(
						       (const __m128i *)(const void *)(table + i * 16))),
			_mm256_and_si256(codes, _mm256_set1_epi8(15)));
	UNROLL
	for (uint32_t level = 4; level < bits; level++) {
		/* The bit of this level where a choice looks for it. */
		const __m256i choice = _mm256_slli_epi16(codes, (int)(7 - level));

		UNROLL
		for (uint32_t i = 0; i < n >> (level - 3); i++)
			found[i] = _mm256_blendv_epi8(found[2 * i], found[2 * i + 1], choice);
	}
	return found[0];
}

/*
 * More than 4 bits, of two registers: where the upper half of a table mirrors the lower one, half of it is
 * looked up byte by byte.
 */
INLINE void look_up_two(
	const struct lookup *lookup, const __m256i codes[2], const uint32_t bits, __m256i out[2])
{
	if (bits <= 4 || !lookup->upper) {
		out[0] = look_up(lookup, codes[0], bits);
		out[1] = look_up(lookup, codes[1], bits);
		return;
	}

	const __m256i ones = _mm256_set1_epi16((short)((1 << bits) - 1));
	const __m256i c =
		_mm256_packus_epi16(_mm256_and_si256(codes[0], ones), _mm256_and_si256(codes[1], ones));
	const __m256i is_lower =
		_mm256_cmpgt_epi8(_mm256_slli_epi16(c, (int)(8 - bits)), _mm256_set1_epi8(-1));
	const __m256i at = _mm256_and_si256(
		_mm256_xor_si256(c, is_lower), _mm256_set1_epi8((char)((1 << (bits - 1)) - 1)));
	const __m256i low = look_up_bytes(lookup->upper, at, bits - 1),
		      high = look_up_bytes(lookup->upper + 128, at, bits - 1);
	const __m256i signs[2] = { _mm256_unpacklo_epi8(is_lower, is_lower),
		_mm256_unpackhi_epi8(is_lower, is_lower) };

	out[0] = _mm256_sub_epi16(_mm256_xor_si256(_mm256_unpacklo_epi8(low, high), signs[0]), signs[0]);
	out[1] = _mm256_sub_epi16(_mm256_xor_si256(_mm256_unpackhi_epi8(low, high), signs[1]), signs[1]);
}

INLINE __m256i mask_codes(__m256i codes, const uint32_t bits)
{
	return _mm256_and_si256(codes, _mm256_set1_epi16((short)((1 << bits) - 1)));
}

/* There is no shift by another number of bits for every word: a multiplication moves codes up by 8 - shift.
 */
#define FACTOR_OF(i) (short)(1 << (8 - SHIFT_OF(i)))
#define FACTORS_4(i, d) \
	FACTOR_OF((i) / d), FACTOR_OF((i + 1) / d), FACTOR_OF((i + 2) / d), FACTOR_OF((i + 3) / d)
#define FACTORS_8(i, d) FACTORS_4(i, d), FACTORS_4(i + 4, d)

INLINE __m256i move_down(__m256i words, i16_words_16 factors)
{
	return _mm256_srli_epi16(_mm256_mullo_epi16(words, (__m256i)factors), 8);
}

INLINE __m256i codes_of(const uint8_t *codes, uint32_t v, const uint32_t bits)
{
	const i8_bytes_32 bytes = { BYTES_16(0), BYTES_16(16) };
	const i16_words_16 factors = { FACTORS_8(0, 1), FACTORS_8(8, 1) };
	const __m128i half = _mm_loadu_si128((const __m128i *)(const void *)(codes + (size_t)v * 2 * bits));

	if (bits == 8)
		return _mm256_cvtepu8_epi16(half);
	return move_down(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(half), (__m256i)bytes), factors);
}

INLINE __m256i codes_of_two(const uint8_t *a, const uint8_t *b, uint32_t v, const uint32_t bits)
{
	enum { second = 8 };
	const i8_bytes_32 bytes = { PAIRS_16(0), PAIRS_16(16) };
	const i16_words_16 factors = { FACTORS_8(0, 2), FACTORS_8(8, 2) };
	const __m128i low = _mm_loadl_epi64((const __m128i *)(const void *)(a + (size_t)v * bits));
	const __m128i high = _mm_loadl_epi64((const __m128i *)(const void *)(b + (size_t)v * bits));

	if (bits == 8)
		return _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(low, high));
	return move_down(_mm256_shuffle_epi8(
				 _mm256_broadcastsi128_si256(_mm_unpacklo_epi64(low, high)), (__m256i)bytes),
		factors);
}

INLINE __m256i words_of_rows(const uint8_t *const rows[], uint32_t offset)
{
	return _mm256_inserti128_si256(
		_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)(rows[0] + offset))),
		_mm_loadu_si128((const __m128i *)(const void *)(rows[1] + offset)), 1);
}

INLINE __m256i repeat_words(const int16_t *from)
{
	return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)from));
}

INLINE f_vector add_lanes_of_rows(const __m256i sums[4])
{
	const __m256i order = _mm256_set_epi32(7, 3, 6, 2, 5, 1, 4, 0);
	const __m256i a = _mm256_add_epi32(
		_mm256_unpacklo_epi32(sums[0], sums[1]), _mm256_unpackhi_epi32(sums[0], sums[1]));
	const __m256i b = _mm256_add_epi32(
		_mm256_unpacklo_epi32(sums[2], sums[3]), _mm256_unpackhi_epi32(sums[2], sums[3]));
	const __m256i all = _mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));

	return _mm256_cvtepi32_ps(_mm256_permutevar8x32_epi32(all, order));
}

/* Bytes of two rows in turn, 16 of each. */
INLINE __m256i shifted_words_of_two(const uint8_t *a, const uint8_t *b, uint32_t block)
{
	const __m128i x = _mm_loadu_si128((const __m128i *)(const void *)(a + (size_t)block * 16));
	const __m128i y = _mm_loadu_si128((const __m128i *)(const void *)(b + (size_t)block * 16));

	return _mm256_set_m128i(_mm_unpackhi_epi8(x, y), _mm_unpacklo_epi8(x, y));
}

/*
 * Registers 2 * half and 2 * half + 1 of the four that such words hold: the lower halves of all bytes, then
 * the upper ones. Lookups give bytes, low and high ones apart; putting them together spreads them over two
 * registers.
 */
INLINE void expand_two(const struct lookup *lookup, __m256i words, const uint32_t half, __m256i values[2])
{
	const __m256i codes =
		_mm256_and_si256(half == 0 ? words : _mm256_srli_epi16(words, 4), _mm256_set1_epi8(15));
	const __m256i low = _mm256_shuffle_epi8(lookup->low, codes),
		      high = _mm256_shuffle_epi8(lookup->high, codes);

	values[0] = _mm256_unpacklo_epi8(low, high);
	values[1] = _mm256_unpackhi_epi8(low, high);
}

INLINE bool takes_shifted(bool is_v, uint32_t bits, uint32_t n)
{
	(void)is_v;
	return bits == 4 && n % 32 == 0;
}

/* Blocks of 32 codes. */
INLINE uint32_t code_of_slot(bool is_v, uint32_t bits, uint32_t slot)
{
	const uint32_t vector = slot / 8 % 4, lane = slot % 8;

	(void)bits;
	/* Of a row, register 1 or 3 has the upper eight of sixteen bytes; of two, the upper half of every
	 * eight pairs. */
	const uint32_t byte = !is_v ? vector % 2 * 8 + lane : lane / 4 * 8 + vector % 2 * 4 + lane % 4;

	return slot / 32 * 32 + byte * 2 + vector / 2;
}

INLINE __m256i multiply_add(__m256i sum, __m256i a, __m256i b)
{
	__m256i product;

	/* Written out, because compilers reorder sums of products until they do not fit into registers. */
	__asm__("vpmaddwd %2, %1, %0" : "=x"(product) : "x"(a), "x"(b));
	__asm__("vpaddd %1, %0, %0" : "+x"(sum) : "x"(product));
	return sum;
}

INLINE __m256i load_words(const int16_t *from)
{
	return _mm256_loadu_si256((const __m256i *)(const void *)from);
}

INLINE __m256i repeat_pair(int32_t pair)
{
	return _mm256_set1_epi32(pair);
}

INLINE f_vector to_f32(__m256i values)
{
	return _mm256_cvtepi32_ps(values);
}

INLINE __m256i add_lanes(const __m256i sums[LANES])
{
	__m256i quads[2];

	UNROLL
	for (uint32_t i = 0; i < 2; i++) {
		const __m256i *s = sums + (size_t)i * 4;
		const __m256i a = _mm256_add_epi32(
			_mm256_unpacklo_epi32(s[0], s[1]), _mm256_unpackhi_epi32(s[0], s[1]));
		const __m256i b = _mm256_add_epi32(
			_mm256_unpacklo_epi32(s[2], s[3]), _mm256_unpackhi_epi32(s[2], s[3]));

		quads[i] = _mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
	}
	return _mm256_add_epi32(_mm256_permute2x128_si256(quads[0], quads[1], 0x20),
		_mm256_permute2x128_si256(quads[0], quads[1], 0x31));
}

INLINE f_vector add_lanes_f32(const f_vector sums[LANES])
{
	f_vector quads[2];

	UNROLL
	for (uint32_t i = 0; i < 2; i++) {
		const f_vector *s = sums + (size_t)i * 4;
		const __m256d a = _mm256_castps_pd(
			_mm256_add_ps(_mm256_unpacklo_ps(s[0], s[1]), _mm256_unpackhi_ps(s[0], s[1])));
		const __m256d b = _mm256_castps_pd(
			_mm256_add_ps(_mm256_unpacklo_ps(s[2], s[3]), _mm256_unpackhi_ps(s[2], s[3])));

		quads[i] = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)),
			_mm256_castpd_ps(_mm256_unpackhi_pd(a, b)));
	}
	return _mm256_add_ps(_mm256_permute2f128_ps(quads[0], quads[1], 0x20),
		_mm256_permute2f128_ps(quads[0], quads[1], 0x31));
}

INLINE f_vector fma_f32(f_vector a, f_vector b, f_vector sum)
{
	return _mm256_fmadd_ps(a, b, sum);
}

INLINE f_vector f16_to_f32(const void *from)
{
	return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
}

INLINE f_vector bf16_to_f32(const void *from)
{
	return _mm256_castsi256_ps(
		_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)), 16));
}

INLINE f_vector e4m3_to_f32(const void *from)
{
	const __m128i wide = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)from)), 7);

	return _mm256_cvtph_ps(_mm_and_si128(wide, _mm_set1_epi16((short)0xBFFF)));
}

INLINE void store_rounded(f_vector values, int16_t *to)
{
	const __m256i wide = _mm256_cvtps_epi32(values);

	_mm_storeu_si128((__m128i *)(void *)to,
		_mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1)));
}

INLINE i32_lanes rounded(f32_lanes values)
{
	return (i32_lanes)_mm256_cvtps_epi32((__m256)values);
}

INLINE f32_lanes greater(f32_lanes a, f32_lanes b)
{
	return (f32_lanes)_mm256_max_ps((__m256)a, (__m256)b);
}

INLINE float greatest_lane(f32_lanes values)
{
	__m128 max =
		_mm_max_ps(_mm256_castps256_ps128((__m256)values), _mm256_extractf128_ps((__m256)values, 1));

	max = _mm_max_ps(max, _mm_movehl_ps(max, max));
	return _mm_cvtss_f32(_mm_max_ss(max, _mm_movehdup_ps(max)));
}

INLINE float sum_of_lanes(f32_lanes values)
{
	__m128 sum =
		_mm_add_ps(_mm256_castps256_ps128((__m256)values), _mm256_extractf128_ps((__m256)values, 1));

	sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
	return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

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
	return (f32_lanes){ 0 } + value;
}

#endif
