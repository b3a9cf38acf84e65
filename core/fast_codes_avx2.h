/*
 * Codes of any width on AVX2, in registers of 32 bytes and then as 16-bit values: included by
 * core/fast_vector_avx2.h only.
 */
#ifndef CORE_FAST_CODES_AVX2_H
#define CORE_FAST_CODES_AVX2_H

/* Where the highest bit of a byte of `choice` is set, the byte of b. Compilers make two operations of it. */
INLINE __m256i choose_bytes(__m256i a, __m256i b, __m256i choice)
{
	__asm__("vpblendvb %3, %2, %1, %0" : "=x"(a) : "x"(a), "x"(b), "x"(choice));
	return a;
}

/* Of codes: entries of a table, or of a smooth one, or themselves. */
enum meaning { ENTRIES, SMOOTH, WHOLE_NUMBERS, E4M3 };

/* By a repeated load and a blend: a load into half a register takes one of the two ports that shuffle. */
INLINE __m256i load_two(const uint8_t *a, const uint8_t *b)
{
	__m256i both;

	__asm__("vbroadcasti128 %1, %0\n\tvpblendd $15, %2, %0, %0"
		: "=&x"(both)
		: "m"(*(const uint8_t(*)[16])(const void *)b),
		"x"(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)a))));
	return both;
}

INLINE int64_t word_64(const uint8_t *from)
{
	int64_t word;

	memcpy(&word, from, sizeof(word));
	return word;
}

/* Words of half a register, and the bytes that a shuffle takes for them: those that pair i begins in. */
#define PAIR_BYTE(k, d)  (char)((2 * bits * ((k) % 16 / 2) + (d)) / 8 + (k) % 2)
#define PAIR_4(k, d)     PAIR_BYTE(k, d), PAIR_BYTE(k + 1, d), PAIR_BYTE(k + 2, d), PAIR_BYTE(k + 3, d)
#define PAIR_16(d)       PAIR_4(0, d), PAIR_4(4, d), PAIR_4(8, d), PAIR_4(12, d)
#define UP_TO(top, i, d) (short)(1 << ((top) - (2 * bits * ((i) % 8) + (d)) % 8))
#define UP_4(top, i, d)  UP_TO(top, i, d), UP_TO(top, i + 1, d), UP_TO(top, i + 2, d), UP_TO(top, i + 3, d)
#define UP_8(top, d)     UP_4(top, 0, d), UP_4(top, 4, d)

/*
 * Two codes of 3, 5 or 6 bits stand in a word, wherever they begin: a multiplication moves them to its top
 * (there is no shift by another number of bits for every word).
 */
INLINE __m256i words_of_codes(__m256i rows, const uint32_t bits)
{
	const i8_bytes_32 bytes = { PAIR_16(0), PAIR_16(0) };
	const i16_words_16 factors = { UP_8(16 - 2 * bits, 0), UP_8(16 - 2 * bits, 0) };

	return _mm256_mullo_epi16(_mm256_shuffle_epi8(rows, (__m256i)bytes), (__m256i)factors);
}

/* Two shifts move them to either byte. */
INLINE __m256i pairs_of_codes(__m256i rows, const uint32_t bits)
{
	const __m256i words = words_of_codes(rows, bits);

	return choose_bytes(_mm256_srli_epi16(words, (int)(16 - 2 * bits)),
		_mm256_srli_epi16(words, (int)(8 - bits)), _mm256_set1_epi16((short)0xFF00));
}

/*
 * Two codes of 7 bits may begin in one byte and end in the third: each is moved to the top of a word of its
 * own, those at even places and those at odd ones apart. What is below may be anything.
 */
INLINE void words_of_singles(__m256i rows, const uint32_t bits, __m256i words[2])
{
	const i8_bytes_32 evens = { PAIR_16(0), PAIR_16(0) }, odds = { PAIR_16(bits), PAIR_16(bits) };
	const i16_words_16 ups[2] = { { UP_8(16 - bits, 0), UP_8(16 - bits, 0) },
		{ UP_8(16 - bits, bits), UP_8(16 - bits, bits) } };

	words[0] = _mm256_mullo_epi16(_mm256_shuffle_epi8(rows, (__m256i)evens), (__m256i)ups[0]);
	words[1] = _mm256_mullo_epi16(_mm256_shuffle_epi8(rows, (__m256i)odds), (__m256i)ups[1]);
}

/* In bytes: eight at even places, then those at odd ones. */
INLINE __m256i singles_of_codes(__m256i rows, const uint32_t bits)
{
	__m256i words[2];

	words_of_singles(rows, bits, words);
	return _mm256_packus_epi16(
		_mm256_srli_epi16(words[0], (int)(16 - bits)), _mm256_srli_epi16(words[1], (int)(16 - bits)));
}

/*
 * Sixteen codes from each of two places, a byte each, in order but for 7 bits. What lies above a
 * code of 3 bits may be anything but the highest bit; is_clean: it is 0.
 */
INLINE __m256i codes_in_bytes(const uint8_t *a, const uint8_t *b, const uint32_t bits, const bool is_clean)
{
	const __m256i mask = _mm256_set1_epi8((char)((1 << bits) - 1));
	__m256i codes;

	if (bits == 8)
		return load_two(a, b);
	if (bits == 7)
		return singles_of_codes(load_two(a, b), bits);
	if (bits == 4) {
		const __m256i rows = _mm256_set_m128i(_mm_loadl_epi64((const __m128i *)(const void *)b),
			_mm_loadl_epi64((const __m128i *)(const void *)a));

		return _mm256_and_si256(_mm256_unpacklo_epi8(rows, _mm256_srli_epi16(rows, 4)), mask);
	}
	codes = pairs_of_codes(load_two(a, b), bits);
	return is_clean || bits > 4 ? _mm256_and_si256(codes, mask) : codes;
}

/* Sixteen bytes of `table` for the low four bits of every code, and so on up to the bits that are left, of
 * which there are 7 at most. */
INLINE __m256i look_up_bytes(const uint8_t *table, __m256i codes, const uint32_t bits)
{
	const uint32_t n = bits > 4 ? 1u << (bits - 4) : 1;
	__m256i found[8];

	UNROLL
	for (uint32_t i = 0; i < n; i++)
		found[i] = _mm256_shuffle_epi8(load_16_bytes(table + (size_t)i * 16), codes);
	UNROLL
	for (uint32_t level = 4; level < bits; level++) {
		/* The bit of this level where a choice looks for it. */
		const __m256i choice = _mm256_slli_epi16(codes, (int)(7 - level));

		UNROLL
		for (uint32_t i = 0; i < n >> (level - 3); i++)
			found[i] = choose_bytes(found[2 * i], found[2 * i + 1], choice);
	}
	return found[0];
}

/*
 * Entries of sixteen codes of 6 bits from each of two places: those of the lower eight of both, then those of
 * the upper ones. The upper half of the table is the complement of the lower one (K) or its negative (V), so
 * codes and entries are turned round where the code's highest bit is set.
 */
INLINE void values_of_mirrored(
	const uint8_t *pieces, const uint8_t *a, const uint8_t *b, const bool is_v, __m256i values[2])
{
	const __m256i words = words_of_codes(load_two(a, b), 6);
	/* At the top of their bytes; what is below a code may be anything. */
	const __m256i tops =
		choose_bytes(_mm256_srli_epi16(words, 2), words, _mm256_set1_epi16((short)0xFF00));
	const __m256i is_upper = _mm256_cmpgt_epi8(_mm256_setzero_si256(), tops);
	const __m256i codes = _mm256_and_si256(
		_mm256_srli_epi16(_mm256_xor_si256(tops, is_upper), 2), _mm256_set1_epi8(31));
	const __m256i low = look_up_bytes(pieces, codes, 5), high = look_up_bytes(pieces + 32, codes, 5);
	const __m256i ones = _mm256_set1_epi8(1);

	if (is_v) {
		values[0] = _mm256_sign_epi16(
			_mm256_unpacklo_epi8(low, high), _mm256_unpacklo_epi8(ones, is_upper));
		values[1] = _mm256_sign_epi16(
			_mm256_unpackhi_epi8(low, high), _mm256_unpackhi_epi8(ones, is_upper));
	} else {
		values[0] = _mm256_unpacklo_epi8(
			_mm256_xor_si256(low, is_upper), _mm256_xor_si256(high, is_upper));
		values[1] = _mm256_unpackhi_epi8(
			_mm256_xor_si256(low, is_upper), _mm256_xor_si256(high, is_upper));
	}
}

/*
 * Entries of a table of 7 or 8 bits whose upper half mirrors the lower one: those of the lower eight bytes of
 * both halves, then those of the upper ones. An entry is a multiple plus a byte times a factor; multiplying
 * takes no more than putting two bytes together does.
 */
INLINE void look_up_halved(
	const uint8_t *halved, __m256i codes, const uint32_t bits, const int multiple, __m256i out[2])
{
	const __m256i top = bits == 8 ? codes : _mm256_slli_epi16(codes, (int)(8 - bits));
	const __m256i is_upper = _mm256_cmpgt_epi8(_mm256_setzero_si256(), top);
	const __m256i mirrored = _mm256_xor_si256(codes, is_upper);
	const __m256i at = bits == 8
		? mirrored
		: _mm256_and_si256(mirrored, _mm256_set1_epi8((char)((1 << (bits - 1)) - 1)));
	const __m256i step = _mm256_and_si256(_mm256_srli_epi16(at, (int)(bits - 5)), _mm256_set1_epi8(15));
	const __m256i sign = _mm256_or_si256(is_upper, _mm256_set1_epi8(1));
	const __m256i bytes = look_up_bytes(halved, at, bits - 1);
	const __m256i base = _mm256_shuffle_epi8(load_16_bytes(halved + KV_FAST_HALVED_BASES), step);
	const __m256i factor = _mm256_sign_epi8(
		_mm256_shuffle_epi8(load_16_bytes(halved + KV_FAST_HALVED_FACTORS), step), sign);
	const __m256i times = _mm256_sign_epi8(_mm256_set1_epi8((char)-multiple), sign);

	out[0] = _mm256_maddubs_epi16(_mm256_unpacklo_epi8(bytes, base), _mm256_unpacklo_epi8(factor, times));
	out[1] = _mm256_maddubs_epi16(_mm256_unpackhi_epi8(bytes, base), _mm256_unpackhi_epi8(factor, times));
}

/* The same of codes of a smooth codebook (core/fast.h), which are at the top of words. */
INLINE void values_of_smooth(
	const uint8_t *pieces, const __m256i x[2], const uint32_t bits, const bool is_v, __m256i values[2])
{
	__m256i y[2], steps[2], slopes[2];

	UNROLL
	for (uint32_t i = 0; i < 2; i++) {
		y[i] = _mm256_mulhrs_epi16(x[i], x[i]);
		steps[i] = y[i];
		if (bits == 8)
			steps[i] = _mm256_mulhrs_epi16(y[i],
				is_v ? y[i]
				     : _mm256_max_epi16(y[i], _mm256_set1_epi16(KV_FAST_SMOOTH_LEAST)));
		steps[i] = _mm256_srli_epi16(steps[i], 11);
	}

	const uint8_t *a = pieces + KV_FAST_SMOOTH_A, *b = pieces + KV_FAST_SMOOTH_B;
	const __m256i step = _mm256_packus_epi16(steps[0], steps[1]);
	const __m256i a_low = _mm256_shuffle_epi8(load_16_bytes(a), step),
		      a_high = _mm256_shuffle_epi8(load_16_bytes(a + 16), step),
		      b_low = _mm256_shuffle_epi8(load_16_bytes(b), step),
		      b_high = _mm256_shuffle_epi8(load_16_bytes(b + 16), step);

	slopes[0] = _mm256_mulhrs_epi16(_mm256_unpacklo_epi8(b_low, b_high), y[0]);
	slopes[1] = _mm256_mulhrs_epi16(_mm256_unpackhi_epi8(b_low, b_high), y[1]);
	UNROLL
	for (uint32_t i = 0; is_v && i < 2; i++)
		slopes[i] = _mm256_slli_epi16(slopes[i], KV_FAST_SMOOTH_SHIFT_OF_V);
	values[0] =
		_mm256_mulhrs_epi16(x[0], _mm256_add_epi16(slopes[0], _mm256_unpacklo_epi8(a_low, a_high)));
	values[1] =
		_mm256_mulhrs_epi16(x[1], _mm256_add_epi16(slopes[1], _mm256_unpackhi_epi8(a_low, a_high)));
}

/* Of sixteen codes from each of two places. */
INLINE void values_of_two(const uint8_t *pieces, const uint8_t *a, const uint8_t *b, const uint32_t bits,
	const bool is_v, __m256i values[2])
{
	__m256i x[2];

	if (bits == 8) {
		/* The middle of a code is half a unit above it. */
		const __m256i half = _mm256_set1_epi8((char)0x80);
		const __m256i codes = _mm256_xor_si256(
			is_v ? _mm256_loadu_si256((const __m256i *)(const void *)a) : load_two(a, b), half);

		x[0] = _mm256_unpacklo_epi8(half, codes);
		x[1] = _mm256_unpackhi_epi8(half, codes);
	} else {
		words_of_singles(load_two(a, b), bits, x);
		UNROLL
		for (uint32_t i = 0; i < 2; i++)
			x[i] = _mm256_xor_si256(
				_mm256_and_si256(
					x[i], _mm256_set1_epi16((short)(0x10000 - (1 << (16 - bits))))),
				_mm256_set1_epi16((short)(0x8000 + (1 << (15 - bits)))));
	}
	values_of_smooth(pieces, x, bits, is_v, values);
}

/*
 * E4M3 in units of 2^-5, in the order of values_of_bytes(): (8 + three bits) * 2^11, with the code's sign,
 * times a power of two as a part of 2^15. Below 2^-5 there is nothing but what rounding leaves.
 */
INLINE void values_of_e4m3(__m256i codes, __m256i values[2])
{
	static const uint8_t low_bytes[16] = { 0, 1, 2, 4, 8, 16, 32, 64, 128 },
			     high_bytes[16] = { 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 4, 8, 16, 32, 64 };
	const __m256i exponents = _mm256_and_si256(_mm256_srli_epi16(codes, 3), _mm256_set1_epi8(15));
	const __m256i sizes =
		_mm256_or_si256(_mm256_and_si256(_mm256_slli_epi16(codes, 3), _mm256_set1_epi8(0x38)),
			_mm256_set1_epi8(0x40));
	const __m256i numbers = _mm256_sign_epi8(sizes, codes);
	const __m256i low = _mm256_shuffle_epi8(load_16_bytes(low_bytes), exponents),
		      high = _mm256_shuffle_epi8(load_16_bytes(high_bytes), exponents);

	values[0] = _mm256_mulhrs_epi16(
		_mm256_unpacklo_epi8(_mm256_setzero_si256(), numbers), _mm256_unpacklo_epi8(low, high));
	values[1] = _mm256_mulhrs_epi16(
		_mm256_unpackhi_epi8(_mm256_setzero_si256(), numbers), _mm256_unpackhi_epi8(low, high));
}

/* Values of codes in bytes: those of the lower halves of 16 bytes, then those of the upper ones. */
INLINE void values_of_bytes(
	const struct lookup *lookup, __m256i codes, const uint32_t bits, const bool is_v, __m256i values[2])
{
	__m256i low, high;

	if (bits > 6) {
		look_up_halved(lookup->pieces, codes, bits, is_v ? KV_FAST_HALVED_OF_V : KV_FAST_HALVED_OF_K,
			values);
		return;
	}
	if (bits > 4) {
		low = look_up_bytes(lookup->pieces, codes, bits);
		high = look_up_bytes(lookup->pieces + (1u << bits), codes, bits);
	} else {
		low = _mm256_shuffle_epi8(lookup->low, codes);
		high = _mm256_shuffle_epi8(lookup->high, codes);
	}
	values[0] = _mm256_unpacklo_epi8(low, high);
	values[1] = _mm256_unpackhi_epi8(low, high);
}

#endif
