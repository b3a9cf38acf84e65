/* Registers of AVX2 with FMA and F16C: included by core/fast_vector.h, which says what this is, only. */
#ifndef CORE_FAST_VECTOR_AVX2_H
#define CORE_FAST_VECTOR_AVX2_H

#define WORDS 16u
#define LANES 8u
typedef __m256i i_vector;
typedef __m256 f_vector;
typedef int32_t i32_lanes __attribute__((vector_size(32)));
typedef float f32_lanes __attribute__((vector_size(32)));

struct lookup {
	__m256i low, high;     /* bytes of 16 entries, in both halves */
	const uint8_t *pieces; /* more than 4 bits: as in struct kv_fast_part */
};

INLINE struct lookup load_lookup(const struct kv_fast_part *part, const uint32_t bits)
{
	const int16_t *table = part->table;
	struct lookup lookup = { .pieces = part->pieces };

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

INLINE __m256i load_16_bytes(const uint8_t *from)
{
	return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)from));
}

#include "core/fast_codes_avx2.h"

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

/* Sums of the four lanes of either half, those of one half side by side. */
INLINE __m256i add_lanes_of_rows(const __m256i sums[4])
{
	const __m256i a = _mm256_add_epi32(
		_mm256_unpacklo_epi32(sums[0], sums[1]), _mm256_unpackhi_epi32(sums[0], sums[1]));
	const __m256i b = _mm256_add_epi32(
		_mm256_unpacklo_epi32(sums[2], sums[3]), _mm256_unpackhi_epi32(sums[2], sums[3]));

	return _mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
}

/*
 * Entries of codes in bytes: those of the lower halves of 16 bytes, then those of the upper ones. Lookups
 * give bytes, low and high ones apart; putting them together spreads them over two registers.
 */
INLINE void expand_codes(const struct lookup *lookup, __m256i codes, __m256i values[2])
{
	const __m256i low = _mm256_shuffle_epi8(lookup->low, codes),
		      high = _mm256_shuffle_epi8(lookup->high, codes);

	values[0] = _mm256_unpacklo_epi8(low, high);
	values[1] = _mm256_unpackhi_epi8(low, high);
}

/* 1 bit: an index is a byte each of 32 rows or channels; a table is sixteen low bytes, then the high ones. */
#define HAS_SPLIT_TABLES 1
#define HAS_SHORT_SUMS   1
#define GROUPS_OF_INDEX  1u
#define SUMS_AT_ONCE     64u /* channels of a weighted sum, or half as many */

INLINE bool takes_shifted(bool is_v, uint32_t bits, uint32_t n)
{
	return bits == 1 ? is_v : bits == 2 || bits == 7 || (bits == 4 && n % 32 == 0);
}

/* Blocks of 32 codes; for 1 bit see indices_of_tokens(). */
INLINE uint32_t code_of_slot(bool is_v, uint32_t bits, uint32_t n, uint32_t slot)
{
	const uint32_t vector = slot / 8 % 4, lane = slot % 8;

	(void)is_v; /* of 1 bit V, else K */
	if (bits == 1) {
		/* Bytes of a row, and which of their bits: as indices_of_tokens() has them. */
		const uint32_t first = slot / SUMS_AT_ONCE * SUMS_AT_ONCE, half = lane / 4;
		const bool is_whole = n - first > SUMS_AT_ONCE / 2;
		const uint32_t byte = is_whole ? slot / 8 % 2 * 4 + lane % 4 : lane % 4;
		const uint32_t bit = is_whole ? slot % SUMS_AT_ONCE / 16 + 4 * half
					      : slot % SUMS_AT_ONCE / 16 * 2 + half + slot / 8 % 2 * 4;

		return first + byte * 8 + bit;
	}
	if (bits == 2)
		return slot / 32 * 32 + lane * 4 + vector;
	if (bits == 7) /* of sixteen codes those at even places, then the others */
		return slot / 16 * 16 + lane * 2 + vector % 2;
	/* Registers 1 and 3 have the upper eight of a row's sixteen bytes. */
	return slot / 32 * 32 + (vector % 2 * 8 + lane) * 2 + vector / 2;
}

/*
 * Slots of a register of 16-bit sums are four words of either half, then the other four, and a block of 32
 * codes is two registers, of which each has eight bytes of either half. 4 bits may be in blocks of 64 codes,
 * then one of 32, which is not taken in this way: see core/fast_short_sums.c.
 */
INLINE uint32_t code_of_short_slot(uint32_t bits, uint32_t n, uint32_t slot)
{
	const uint32_t lane = slot % 8, word = lane / 4 * 8 + slot / 8 % 2 * 4 + lane % 4;
	const uint32_t byte = word / 8 * 16 + slot / 16 % 2 * 8 + word % 8;

	if (bits == 7)
		return slot / 32 * 32 + word / 8 * 16 + word % 8 * 2 + slot / 16 % 2;
	if (bits != 4 || n % 32 != 0)
		return slot / 32 * 32 + (bits == 2 ? byte % 8 * 4 + byte / 8 : byte);
	if (slot / 64 * 64 + 64 <= n)
		return slot / 64 * 64 + byte * 2 + slot % 64 / 32;
	return slot / 32 * 32 + byte % 16 * 2 + byte / 16;
}

/* ---- 1 bit: indices of four bits each ---- */

INLINE __m256i index_of_group(const __m256i *indices, uint32_t quad, const uint32_t i)
{
	return indices[quad * 4 + i];
}

INLINE void split_indices(__m256i bytes, __m256i indices[2])
{
	indices[0] = _mm256_and_si256(bytes, _mm256_set1_epi8(15));
	indices[1] = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), _mm256_set1_epi8(15));
}

/* 64 bits of each of two places, in the halves of a register: by a blend, as load_two(). */
INLINE __m256i load_two_words(const uint8_t *a, const uint8_t *b)
{
	return _mm256_blend_epi32(_mm256_set1_epi64x(word_64(a)), _mm256_set1_epi64x(word_64(b)), 0xF0);
}

/* Of 64 bits of 32 rows (n_steps is 1): index g is bits [4g, 4g + 4) of every row. */
INLINE void indices_of_rows(
	const uint8_t *const rows[], uint32_t offset, const uint32_t n_steps, __m256i indices[16])
{
	__m256i pairs[8], fours[2][4], eights[4][2];

	(void)n_steps;
	UNROLL
	for (uint32_t i = 0; i < 8; i++)
		pairs[i] = _mm256_unpacklo_epi8(load_two_words(rows[i] + offset, rows[i + 16] + offset),
			load_two_words(rows[i + 8] + offset, rows[i + 24] + offset));
	UNROLL
	for (uint32_t i = 0; i < 4; i++) {
		fours[0][i] = _mm256_unpacklo_epi8(pairs[i], pairs[i + 4]);
		fours[1][i] = _mm256_unpackhi_epi8(pairs[i], pairs[i + 4]);
	}
	UNROLL
	for (uint32_t i = 0; i < 4; i++) {
		const __m256i *from = fours[i / 2] + i % 2;

		eights[i / 2 * 2][i % 2] = _mm256_unpacklo_epi8(from[0], from[2]);
		eights[i / 2 * 2 + 1][i % 2] = _mm256_unpackhi_epi8(from[0], from[2]);
	}
	UNROLL
	for (uint32_t i = 0; i < 4; i++) {
		split_indices(_mm256_unpacklo_epi8(eights[i][0], eights[i][1]), indices + (size_t)i * 4);
		split_indices(_mm256_unpackhi_epi8(eights[i][0], eights[i][1]), indices + (size_t)i * 4 + 2);
	}
}

/* 64 bits of each of four places, those of a lane in the order of these: by blends, as load_two(). */
INLINE __m256i load_four_words(const uint8_t *a, const uint8_t *b, const uint8_t *c, const uint8_t *d)
{
	const __m256i low = _mm256_blend_epi32(
			      _mm256_set1_epi64x(word_64(a)), _mm256_set1_epi64x(word_64(b)), 0xCC),
		      high = _mm256_blend_epi32(
			      _mm256_set1_epi64x(word_64(c)), _mm256_set1_epi64x(word_64(d)), 0xCC);

	return _mm256_blend_epi32(low, high, 0xF0);
}

/* Bits of `mask` of a, those of b where it has none. */
INLINE __m256i merge_bits(__m256i a, __m256i b, __m256i mask)
{
	return _mm256_or_si256(_mm256_and_si256(mask, a), _mm256_andnot_si256(mask, b));
}

/*
 * Of 64 channels of sixteen rows, or (n_registers 2) of 32: a byte is four bits of one channel, those of rows
 * 0 to 3 in lower halves of registers, of rows 4 to 7 in upper ones; indices[1] the same of rows 8 to 15.
 * Register r has bits r of eight bytes, then bits r + 4; or of four bytes bits 2r, 2r + 4, 2r + 1, 2r + 5.
 */
INLINE void indices_of_tokens(
	const uint8_t *const rows[], uint32_t offset, const uint32_t n_registers, __m256i indices[2][4])
{
	const __m256i evens = _mm256_set1_epi8(0x55), twos = _mm256_set1_epi8(0x33);
	__m256i bits[4], pairs[2][2], found[2][4];

	UNROLL
	for (uint32_t i = 0; i < 4; i++)
		bits[i] = load_four_words(
			rows[i] + offset, rows[i + 8] + offset, rows[i + 4] + offset, rows[i + 12] + offset);
	/* Two bits each: of even channels, of odd ones. */
	UNROLL
	for (uint32_t i = 0; i < 2; i++) {
		const __m256i a = bits[2 * i], b = bits[2 * i + 1];

		pairs[0][i] = merge_bits(a, _mm256_add_epi8(b, b), evens);
		pairs[1][i] = merge_bits(_mm256_srli_epi16(a, 1), b, evens);
	}
	/* Four bits each: of channels r and r + 4. */
	UNROLL
	for (uint32_t r = 0; r < 4; r++) {
		const __m256i a = pairs[r % 2][0], b = pairs[r % 2][1];
		const __m256i fours = r < 2 ? merge_bits(a, _mm256_slli_epi16(b, 2), twos)
					    : merge_bits(_mm256_srli_epi16(a, 2), b, twos);
		__m256i two[2];

		split_indices(fours, two);
		found[0][r] = _mm256_unpacklo_epi64(two[0], two[1]);
		found[1][r] = _mm256_unpackhi_epi64(two[0], two[1]);
	}
	UNROLL
	for (uint32_t i = 0; i < 2; i++) {
		UNROLL
		for (uint32_t r = 0; r < n_registers; r++)
			indices[i][r] = n_registers == 4
				? found[i][r]
				: _mm256_castps_si256(_mm256_shuffle_ps(_mm256_castsi256_ps(found[i][2 * r]),
					  _mm256_castsi256_ps(found[i][2 * r + 1]), 0x88));
	}
}

struct table_of_bits {
	__m256i low, high; /* bytes, in both halves */
};

INLINE struct table_of_bits load_table(const int16_t *table)
{
	const uint8_t *bytes = (const uint8_t *)table;

	return (struct table_of_bits){ load_16_bytes(bytes), load_16_bytes(bytes + 16) };
}

INLINE void add_looked_up(__m256i sums[2], struct table_of_bits table, __m256i index)
{
	const __m256i low = _mm256_shuffle_epi8(table.low, index),
		      high = _mm256_shuffle_epi8(table.high, index);

	sums[0] = _mm256_add_epi16(sums[0], _mm256_unpacklo_epi8(low, high));
	sums[1] = _mm256_add_epi16(sums[1], _mm256_unpackhi_epi8(low, high));
}

/* The i-th LANES of 32 sums. */
INLINE f32_lanes f32_of_sums(const __m256i sums[2], const uint32_t i)
{
	const __m128i eight =
		i / 2 == 0 ? _mm256_castsi256_si128(sums[i % 2]) : _mm256_extracti128_si256(sums[i % 2], 1);

	return (f32_lanes)_mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(eight));
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

/* The sum of the lanes of each. */
INLINE __m128 sums_of_four(const f32_lanes *all, const uint32_t n_queries)
{
	f32_lanes four[KV_FAST_QUERIES_MAX];

	UNROLL
	for (uint32_t q = 0; q < KV_FAST_QUERIES_MAX; q++)
		four[q] = all[q < n_queries ? q : 0];

	const __m256 a = _mm256_add_ps(_mm256_unpacklo_ps((__m256)four[0], (__m256)four[1]),
		_mm256_unpackhi_ps((__m256)four[0], (__m256)four[1]));
	const __m256 b = _mm256_add_ps(_mm256_unpacklo_ps((__m256)four[2], (__m256)four[3]),
		_mm256_unpackhi_ps((__m256)four[2], (__m256)four[3]));
	const __m256 sum = _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xEE));

	return _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
}

/* In a register from here on. */
INLINE f_vector held(f_vector values)
{
	__asm__("" : "+x"(values));
	return values;
}

INLINE f_vector fma_f32(f_vector a, f_vector b, f_vector sum)
{
	return _mm256_fmadd_ps(a, b, sum);
}

INLINE f_vector f16_to_f32(const void *from)
{
	return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
}

INLINE f_vector join_quads(const __m128 quads[2])
{
	return _mm256_set_m128(quads[1], quads[0]);
}

/* Those at even places, or at odd ones: a number is the upper half of its float32. */
INLINE f_vector bf16_of_words(const void *from, const uint32_t half)
{
	const __m256i words = _mm256_loadu_si256((const __m256i *)from);

	return _mm256_castsi256_ps(half == 0 ? _mm256_slli_epi32(words, 16)
					     : _mm256_and_si256(words, _mm256_set1_epi32((int)0xFFFF0000)));
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
