/* Registers of AVX-512 with BW, VBMI and VNNI: included by core/fast_vector.h, which says what this is, only.
 */
#ifndef CORE_FAST_VECTOR_AVX512_H
#define CORE_FAST_VECTOR_AVX512_H

#define WORDS 32u
#define LANES 16u
typedef __m512i i_vector;
typedef __m512 f_vector;
typedef int32_t i32_lanes __attribute__((vector_size(64)));
typedef float f32_lanes __attribute__((vector_size(64)));

struct lookup {
	__m512i entries[8]; /* words; of 8 bits: bytes */
};

/* Bytes of 256 entries: the low ones, then the high ones. */
INLINE void split_entries(__m512i entries[8])
{
	__m512i bytes[8];

	UNROLL
	for (uint32_t i = 0; i < 4; i++) {
		const __m512i a = entries[2 * i], b = entries[2 * i + 1];

		bytes[i] = _mm512_inserti64x4(
			_mm512_castsi256_si512(_mm512_cvtepi16_epi8(a)), _mm512_cvtepi16_epi8(b), 1);
		bytes[i + 4] = _mm512_inserti64x4(
			_mm512_castsi256_si512(_mm512_cvtepi16_epi8(_mm512_srli_epi16(a, 8))),
			_mm512_cvtepi16_epi8(_mm512_srli_epi16(b, 8)), 1);
	}
	memcpy(entries, bytes, sizeof(bytes));
}

INLINE struct lookup load_lookup(const struct kv_fast_part *part, const uint32_t bits)
{
	const int16_t *table = part->table;
	const uint32_t n = bits > 5 ? 1u << (bits - 5) : 1;
	struct lookup lookup;

	for (uint32_t i = 0; i < n; i++)
		lookup.entries[i] = _mm512_loadu_si512(table + (size_t)i * WORDS);
	if (bits == 8)
		split_entries(lookup.entries);
	return lookup;
}

INLINE __m512i look_up_128(const __m512i *entries, __m512i codes)
{
	const __m512i low = _mm512_permutex2var_epi16(entries[0], codes, entries[1]);
	const __m512i high = _mm512_permutex2var_epi16(entries[2], codes, entries[3]);

	return _mm512_mask_blend_epi16(_mm512_test_epi16_mask(codes, _mm512_set1_epi16(64)), low, high);
}

/* The low and high bytes of entries of 64 codes of 8 bits. */
INLINE void look_up_bytes(const struct lookup *lookup, __m512i codes, __m512i bytes[2])
{
	const __mmask64 is_upper = _mm512_movepi8_mask(codes);

	UNROLL
	for (uint32_t i = 0; i < 2; i++) {
		const __m512i *entries = lookup->entries + (size_t)4 * i;

		bytes[i] = _mm512_mask_blend_epi8(is_upper,
			_mm512_permutex2var_epi8(entries[0], codes, entries[1]),
			_mm512_permutex2var_epi8(entries[2], codes, entries[3]));
	}
}

/* Entries of codes in the low bytes of words, and of those in the high ones. */
INLINE void look_up_words(const struct lookup *lookup, __m512i codes, __m512i values[2])
{
	const __mmask64 high = 0xAAAAAAAAAAAAAAAA;
	__m512i bytes[2];

	look_up_bytes(lookup, codes, bytes);
	values[0] = _mm512_mask_blend_epi8(high, bytes[0], _mm512_slli_epi16(bytes[1], 8));
	values[1] = _mm512_mask_blend_epi8(high, _mm512_srli_epi16(bytes[0], 8), bytes[1]);
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

	__m512i values[2];

	look_up_words(lookup, codes, values);
	return values[0];
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

/* By a repeated load and a blend: loads into a part of a register take one of the two ports that shuffle. */
INLINE __m256i load_two(const uint8_t *a, const uint8_t *b)
{
	__m256i both;

	__asm__("vbroadcasti128 %1, %0\n\tvpblendd $15, %2, %0, %0"
		: "=&x"(both)
		: "m"(*(const uint8_t(*)[16])(const void *)b),
		"x"(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)a))));
	return both;
}

/* Codes of channels [LANES * v, + LANES) of two rows in turn. */
INLINE __m512i codes_of_two(const uint8_t *a, const uint8_t *b, uint32_t v, const uint32_t bits)
{
	enum { second = 16 };
	const i8_bytes_64 bytes = { PAIRS_16(0), PAIRS_16(16), PAIRS_16(32), PAIRS_16(48) };
	const i16_words_32 shifts = { SHIFTS_8(0, 2), SHIFTS_8(8, 2), SHIFTS_8(16, 2), SHIFTS_8(24, 2) };
	const __m512i packed = _mm512_castsi256_si512(
		load_two(a + (size_t)v * 2 * bits, b + (size_t)v * 2 * bits)); /* no more is looked at */

	if (bits == 8)
		return _mm512_maskz_permutexvar_epi8(0x5555555555555555, (__m512i)bytes, packed);
	return _mm512_srlv_epi16(_mm512_permutexvar_epi8((__m512i)bytes, packed), (__m512i)shifts);
}

INLINE __m512i value_of(const struct lookup *lookup, __m512i codes, const uint32_t bits, const bool is_value)
{
	return is_value ? mask_codes(codes, bits) : look_up(lookup, codes, bits);
}

/* Values of channels [WORDS * v, + WORDS) of each of two rows. */
INLINE void values_of_rows(const struct lookup *lookup, const uint8_t *a, const uint8_t *b, uint32_t v,
	const uint32_t bits, const bool is_value, __m512i out[2])
{
	out[0] = value_of(lookup, codes_of(a, v, bits), bits, is_value);
	out[1] = value_of(lookup, codes_of(b, v, bits), bits, is_value);
}

/* Bytes of four channels of two rows in turn, the second row 32 bytes further. */
#define TURNS_8(n) n, n + 32, n + 1, n + 33, n + 2, n + 34, n + 3, n + 35

/* Values of channels [LANES * v, + 2 * LANES) of two rows in turn. */
INLINE void values_of_pairs(const struct lookup *lookup, const uint8_t *a, const uint8_t *b, uint32_t v,
	const uint32_t bits, const bool is_value, __m512i out[2])
{
	if (bits == 8 && !is_value) {
		/* Quarters of a register: four channels of the lower half, four of the upper one. */
		const i8_bytes_64 turns = { TURNS_8(0), TURNS_8(16), TURNS_8(4), TURNS_8(20), TURNS_8(8),
			TURNS_8(24), TURNS_8(12), TURNS_8(28) };
		const __m256i low = _mm256_loadu_si256(
				      (const __m256i *)(const void *)(a + (size_t)v * LANES)),
			      high = _mm256_loadu_si256(
				      (const __m256i *)(const void *)(b + (size_t)v * LANES));
		__m512i bytes[2];

		look_up_bytes(lookup,
			_mm512_permutexvar_epi8(
				(__m512i)turns, _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1)),
			bytes);
		out[0] = _mm512_unpacklo_epi8(bytes[0], bytes[1]);
		out[1] = _mm512_unpackhi_epi8(bytes[0], bytes[1]);
		return;
	}
	out[0] = value_of(lookup, codes_of_two(a, b, v, bits), bits, is_value);
	out[1] = value_of(lookup, codes_of_two(a, b, v + 1, bits), bits, is_value);
}

/* 16 bytes of each of four places. */
INLINE __m512i load_quarters(const uint8_t *a, const uint8_t *b, const uint8_t *c, const uint8_t *d)
{
	return _mm512_inserti64x4(_mm512_castsi256_si512(load_two(a, b)), load_two(c, d), 1);
}

/* 16 bytes of each of LANES rows: dword i of every row in quads[i], row r in lane r. */
INLINE void quads_of_rows(const uint8_t *const rows[], uint32_t offset, __m512i quads[4])
{
	__m512i words[4], half[4];

	UNROLL
	for (uint32_t r = 0; r < 4; r++)
		words[r] = load_quarters(
			rows[r] + offset, rows[r + 4] + offset, rows[r + 8] + offset, rows[r + 12] + offset);
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

/*
 * 1 bit of K: an index is a word each of 32 rows, four of them are shifted out of a register. Weighted sums
 * look bits up as any other code: making tables of weights for 32 tokens takes what they save.
 */
#define HAS_SPLIT_TABLES 0
#define HAS_SHORT_SUMS   0
#define GROUPS_OF_INDEX  4u

/* Scores take 32 bits of a row at once, sums four registers. */
INLINE bool takes_shifted(bool is_v, uint32_t bits, uint32_t n)
{
	if (is_v)
		return bits == 4 && n % (4 * LANES) == 0;
	return (bits == 2 || bits == 4 || bits == 8) && n % (32 / bits) == 0;
}

/*
 * Of V: words of 4 codes, those of each shift together; for 1 bit see indices_of_tokens(). Of K: the two
 * codes that one shift takes out of 32 bits side by side.
 */
INLINE uint32_t code_of_slot(bool is_v, uint32_t bits, uint32_t n, uint32_t slot)
{
	const uint32_t per_word = 16 / bits;

	(void)n;
	if (!is_v)
		return slot / (2 * per_word) * (2 * per_word) + slot % (2 * per_word) / 2 +
			slot % 2 * per_word;
	return slot / (4 * LANES) * 4 * LANES + slot % LANES * 4 + slot / LANES % 4;
}

/* ---- 1 bit: indices of four bits each ---- */

INLINE __m512i index_of_group(const __m512i *indices, uint32_t quad, const uint32_t i)
{
	return _mm512_and_si512(shift_down(indices[quad], 4 * i), _mm512_set1_epi16(15));
}

/* Of n_steps times 64 bits of 32 rows: index g is bits [4g, 4g + 4) of every row; rows from 16 on in the odd
 * words. */
INLINE void indices_of_rows(
	const uint8_t *const rows[], uint32_t offset, const uint32_t n_steps, __m512i *indices)
{
	__m512i quads[2][4];

	quads_of_rows(rows, offset, quads[0]);
	quads_of_rows(rows + 16, offset, quads[1]);
	UNROLL
	for (uint32_t i = 0; i < 2 * n_steps; i++) {
		indices[2 * i] =
			_mm512_mask_blend_epi16(0xAAAAAAAA, quads[0][i], _mm512_slli_epi32(quads[1][i], 16));
		indices[2 * i + 1] =
			_mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_srli_epi32(quads[0][i], 16), quads[1][i]);
	}
}

struct table_of_bits {
	__m512i entries;
};

/* Half a register, as repeating it would take a shuffle. */
INLINE struct table_of_bits load_table(const int16_t *table)
{
	return (struct table_of_bits){ _mm512_zextsi256_si512(
		_mm256_loadu_si256((const __m256i *)(const void *)table)) };
}

INLINE void add_looked_up(__m512i sums[1], struct table_of_bits table, __m512i index)
{
	sums[0] = _mm512_add_epi16(sums[0], _mm512_permutexvar_epi16(index, table.entries));
}

/* The i-th LANES of 32 sums: of even words, of odd words. */
INLINE f32_lanes f32_of_sums(const __m512i sums[1], const uint32_t i)
{
	const __m512i sum = i == 0 ? _mm512_slli_epi32(sums[0], 16) : sums[0];

	return (f32_lanes)_mm512_cvtepi32_ps(_mm512_srai_epi32(sum, 16));
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

/* In a register from here on. */
INLINE f_vector held(f_vector values)
{
	__asm__("" : "+v"(values));
	return values;
}

INLINE f_vector fma_f32(f_vector a, f_vector b, f_vector sum)
{
	return _mm512_fmadd_ps(a, b, sum);
}

INLINE f_vector f16_to_f32(const void *from)
{
	return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
}

INLINE f_vector join_quads(const __m128 quads[4])
{
	f_vector all = _mm512_insertf32x4(_mm512_castps128_ps512(quads[0]), quads[1], 1);

	all = _mm512_insertf32x4(all, quads[2], 2);
	return _mm512_insertf32x4(all, quads[3], 3);
}

/* Those at even places, or at odd ones: a number is the upper half of its float32. */
INLINE f_vector bf16_of_words(const void *from, const uint32_t half)
{
	const __m512i words = _mm512_loadu_si512(from);

	return _mm512_castsi512_ps(half == 0 ? _mm512_slli_epi32(words, 16)
					     : _mm512_and_si512(words, _mm512_set1_epi32((int)0xFFFF0000)));
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

#endif
