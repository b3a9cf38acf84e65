/*
 * Weighted sums of rows of codes in 16 bits, compiled once per instruction set (core/fast.h) and
 * for AVX2 only: products are rounded to 16 bits (vpmulhrsw), so a register has the sums of 16 channels in
 * place of 8, rows are taken one by one, and none are put side by side.
 *
 * Weights of 32 tokens add up to less than 2^15, so that no sum overflows; core/FAST.md has the error.
 */
#include "core/fast_set.h"

#if HAS_SHORT_SUMS

/* Of 4 bits, in 32 bytes. */
#define CODES_AT_ONCE 64u
#define NIBBLES_MASK  _mm256_set1_epi8(15)

#define BLOCKS (STEP / TOKENS)
/* Multipliers of the sums of four blocks: 2^15 times as much, four times, stays below 2^31. */
#define MULTIPLIER_MAX 16383

/* Weights of a step, each twice side by side: weight = integer * unit of its block and query. */
struct weights {
	_Alignas(32) int32_t pairs[BLOCKS][KV_FAST_QUERIES_MAX][TOKENS];
	_Alignas(16) float units[BLOCKS][KV_FAST_QUERIES_MAX];
	/* Units of the blocks as multiples of `unit`, those of two blocks side by side. */
	_Alignas(16) int32_t multipliers[BLOCKS / 2][KV_FAST_QUERIES_MAX];
	_Alignas(16) float unit[KV_FAST_QUERIES_MAX];
};

INLINE f32_lanes scaled_weights(const float *values, const float *scales, uint32_t t)
{
	return scales ? load_f32(values + t) * load_f32(scales + t) : load_f32(values + t);
}

/*
 * Values are the weights times scales, which are NULL for 1. Units of all blocks come first, so that the
 * divisions of one need not be waited for before the next.
 */
INLINE void round_weights(const float *values, const float *scales, uint32_t n_blocks,
	const uint32_t n_queries, struct weights *weights)
{
	/* Words 0, 0, 2, 2 and so on. */
	const __m256i twice = _mm256_set1_epi64x(0x0504050401000100);
	const __m256i places =
		_mm256_add_epi8(twice, _mm256_set_epi64x(0x0808080808080808, 0, 0x0808080808080808, 0));
	/* Rounding adds at most a half for each weight, and once more for each product. */
	const float most = (float)(KV_FAST_WEIGHT_MAX - TOKENS);
	_Alignas(16) float factors[BLOCKS][KV_FAST_QUERIES_MAX];

	uint32_t b = 0;

	do { /* of one block at least */
		f32_lanes all[KV_FAST_QUERIES_MAX];

		UNROLL
		for (uint32_t q = 0; q < n_queries; q++) {
			const float *from = values + (size_t)q * STEP;
			const uint32_t t = b * TOKENS;

			all[q] = (scaled_weights(from, scales, t) + scaled_weights(from, scales, t + LANES)) +
				(scaled_weights(from, scales, t + 2 * LANES) +
					scaled_weights(from, scales, t + 3 * LANES));
		}

		/* Weights that are all smaller than that, or nothing, become nothing. */
		const __m128 sum = _mm_max_ps(_mm_set1_ps(0x1p-100f), sums_of_four(all, n_queries));

		_mm_store_ps(factors[b], _mm_div_ps(_mm_set1_ps(most), sum));
		_mm_store_ps(weights->units[b], _mm_mul_ps(sum, _mm_set1_ps(1 / most)));
	} while (++b < n_blocks);
	for (b = 0; b < n_blocks; b++) {
		UNROLL
		for (uint32_t q = 0; q < n_queries; q++) {
			const f32_lanes factor = repeat_f32(factors[b][q]);

			UNROLL
			for (uint32_t i = 0; i < TOKENS / LANES; i++) {
				const f32_lanes scaled = scaled_weights(
					values + (size_t)q * STEP, scales, b * TOKENS + i * LANES);
				const __m256i two =
					_mm256_shuffle_epi8((__m256i)rounded(scaled * factor), places);

				memcpy(&weights->pairs[b][q][i * LANES], &two, sizeof(two));
			}
		}
	}
}

/* Finds the multipliers of n blocks; those of others are 0. */
INLINE void find_multipliers(uint32_t n, struct weights *weights)
{
	__m128i two[BLOCKS];
	__m128 max = _mm_load_ps(weights->units[0]);

	for (uint32_t b = 1; b < n; b++)
		max = _mm_max_ps(max, _mm_load_ps(weights->units[b]));

	const __m128 factor = _mm_div_ps(_mm_set1_ps(MULTIPLIER_MAX), max);

	UNROLL
	for (uint32_t b = 0; b < BLOCKS; b++)
		two[b] = b < n ? _mm_cvtps_epi32(_mm_mul_ps(_mm_load_ps(weights->units[b]), factor))
			       : _mm_setzero_si128();
	UNROLL
	for (uint32_t i = 0; i < BLOCKS / 2; i++)
		_mm_store_si128((__m128i *)(void *)weights->multipliers[i],
			_mm_or_si128(two[2 * i], _mm_slli_epi32(two[2 * i + 1], 16)));
	_mm_store_ps(weights->unit, _mm_mul_ps(max, _mm_set1_ps(1.0f / MULTIPLIER_MAX)));
}

INLINE __m256i codes_at(__m256i bytes, const uint32_t half)
{
	return _mm256_and_si256(half == 0 ? bytes : _mm256_srli_epi16(bytes, 4), NIBBLES_MASK);
}

INLINE __m256i add_rounded(__m256i sum, __m256i values, __m256i weights)
{
	return _mm256_add_epi16(sum, _mm256_mulhrs_epi16(values, weights));
}

/*
 * sums[q][i] += products of values[i] with the weights of one token; then values of `codes`, those of the
 * token that comes next, take the place of these. Written out like multiply_and_expand().
 */
INLINE void weigh_and_expand(const struct lookup *lookup, __m256i codes, const int32_t *pairs,
	const uint32_t n_queries, __m256i values[2], __m256i sums[KV_FAST_QUERIES_MAX][2])
{
	__m256i low, a, b;

	if (n_queries < 4) {
		UNROLL
		for (uint32_t q = 0; q < n_queries; q++) {
			const __m256i weight = repeat_pair(pairs[(size_t)q * TOKENS]);

			sums[q][0] = add_rounded(sums[q][0], values[0], weight);
			sums[q][1] = add_rounded(sums[q][1], values[1], weight);
		}
		expand_codes(lookup, codes, values);
		return;
	}
	_Static_assert(sizeof(*pairs) * TOKENS == 128, "the distance of queries' weights below");
#define PRODUCTS_OF_ONE(at, sum_0, sum_1)               \
	"vpbroadcastd " #at "(%[pairs]), %[a]\n\t"      \
	"vpmulhrsw %[a], %[v0], %[b]\n\t"               \
	"vpmulhrsw %[a], %[v1], %[a]\n\t"               \
	"vpaddw %[b], %[" #sum_0 "], %[" #sum_0 "]\n\t" \
	"vpaddw %[a], %[" #sum_1 "], %[" #sum_1 "]\n\t"
	__asm__("vpshufb %[codes], %[low_bytes], %[low]\n\t"
		"vpshufb %[codes], %[high_bytes], %[codes]\n\t" /* clang-format off */
		PRODUCTS_OF_ONE(0, s00, s01)
		PRODUCTS_OF_ONE(128, s10, s11)
		PRODUCTS_OF_ONE(256, s20, s21)
		PRODUCTS_OF_ONE(384, s30, s31)
		"vpunpcklbw %[codes], %[low], %[v0]\n\t"
		"vpunpckhbw %[codes], %[low], %[v1]" /* clang-format on */
		: [codes] "+&x"(codes), [v0] "+&x"(values[0]), [v1] "+&x"(values[1]), [s00] "+&x"(sums[0][0]),
		[s01] "+&x"(sums[0][1]), [s10] "+&x"(sums[1][0]), [s11] "+&x"(sums[1][1]),
		[s20] "+&x"(sums[2][0]), [s21] "+&x"(sums[2][1]), [s30] "+&x"(sums[3][0]),
		[s31] "+&x"(sums[3][1]), [low] "=&x"(low), [a] "=&x"(a), [b] "=&x"(b)
		: [low_bytes] "x"(lookup->low), [high_bytes] "x"(lookup->high), [pairs] "r"(pairs),
		"m"(*(const int32_t(*)[3 * TOKENS + 1]) pairs));
#undef PRODUCTS_OF_ONE
}

INLINE void add_to(float *to, __m256i wide, float unit)
{
	store_f32((f32_lanes)fma_f32(
			  _mm256_cvtepi32_ps(wide), (f_vector)repeat_f32(unit), (f_vector)load_f32(to)),
		to);
}

/* Sums of blocks, of 32 channels. */
struct short_sums {
	__m256i totals[BLOCKS][KV_FAST_QUERIES_MAX][2];
};

/* Adds two registers of 16 sums of each block, times its unit, to four of slots. */
INLINE void add_blocks(struct short_sums *blocks, uint32_t n_blocks, const struct weights *weights,
	const uint32_t n_queries, float *const *sums, uint32_t slot)
{
	for (uint32_t b = n_blocks; b < BLOCKS; b++)
		memset(blocks->totals[b], 0, sizeof(blocks->totals[b]));
	UNROLL
	for (uint32_t q = 0; q < n_queries; q++) {
		const __m256i two[2] = { repeat_pair(weights->multipliers[0][q]),
			repeat_pair(weights->multipliers[1][q]) };

		UNROLL
		for (uint32_t i = 0; i < 2; i++) {
			const __m256i a = blocks->totals[0][q][i], b = blocks->totals[1][q][i],
				      c = blocks->totals[2][q][i], d = blocks->totals[3][q][i];
			float *to = sums[q] + slot + (size_t)i * 2 * LANES;

			add_to(to,
				_mm256_add_epi32(_mm256_madd_epi16(_mm256_unpacklo_epi16(a, b), two[0]),
					_mm256_madd_epi16(_mm256_unpacklo_epi16(c, d), two[1])),
				weights->unit[q]);
			add_to(to + LANES,
				_mm256_add_epi32(_mm256_madd_epi16(_mm256_unpackhi_epi16(a, b), two[0]),
					_mm256_madd_epi16(_mm256_unpackhi_epi16(c, d), two[1])),
				weights->unit[q]);
		}
	}
}

/*
 * Half `half` of the codes of 64 channels: four registers of slots. What comes next is asked for along the
 * first half, which waits for its rows anyway; the other one has them in the first-level cache.
 */
INLINE void sum_rows(const struct kv_fast_part *part, const struct lookup *lookup,
	const struct kv_fast_rows *rows, uint32_t offset, const struct weights *weights,
	const uint32_t n_queries, const uint32_t half, float *const *sums, uint32_t slot)
{
	const uint32_t n = n_places(rows);
	struct short_sums blocks;
	__m256i values[2];

	expand_codes(lookup,
		codes_at(load_words((const int16_t *)(const void *)(rows->rows[0] + offset)), half), values);
	for (uint32_t first = 0; first < n; first += TOKENS) {
		struct asking asking = begin_asking(part, rows, first, slot, CODES_AT_ONCE, TOKENS / 4 + 1);
		__m256i totals[KV_FAST_QUERIES_MAX][2] = { 0 };

		if (half == 0)
			ask_two(&asking);
		/* Tokens beyond the last have rows, and no weight. */
		for (uint32_t t = 0; t < TOKENS; t += 4) {
			const uint8_t *const *from = rows->rows + first + t;
			const uint8_t *const *after = first + t + 4 < n ? from + 4 : rows->rows;

			if (half == 0)
				ask_two(&asking);
			UNROLL
			for (uint32_t i = 1; i <= 4; i++) {
				const uint8_t *next = (i < 4 ? from[i] : *after) + offset;

				weigh_and_expand(lookup,
					codes_at(load_words((const int16_t *)(const void *)next), half),
					weights->pairs[first / TOKENS][0] + t + i - 1, n_queries, values,
					totals);
			}
		}
		memcpy(blocks.totals[first / TOKENS], totals, sizeof(totals));
	}
	add_blocks(&blocks, n / TOKENS, weights, n_queries, sums, part->slot + slot);
}

/* Of 32 codes from `at` on. */
INLINE void values_of_row(const struct lookup *lookup, const uint8_t *at, const uint32_t bits,
	const bool is_shifted, const enum meaning meaning, __m256i values[2])
{
	__m256i codes;

	if (meaning == SMOOTH) {
		values_of_two(lookup->pieces, at, at + (size_t)2 * bits, bits, true, values);
		return;
	}
	if (bits == 6) {
		values_of_mirrored(lookup->pieces, at, at + (size_t)2 * bits, true, values);
		return;
	}
	if (bits == 2) /* eight bytes four times, each shifted by one more code */
		codes = _mm256_and_si256(
			_mm256_srlv_epi64(_mm256_set1_epi64x(word_64(at)), _mm256_set_epi64x(6, 4, 2, 0)),
			_mm256_set1_epi8(3));
	else if (bits == 4 && is_shifted)
		codes = _mm256_and_si256(
			_mm256_srlv_epi64(load_16_bytes(at), _mm256_set_epi64x(4, 4, 0, 0)), NIBBLES_MASK);
	else
		codes = codes_in_bytes(at, at + (size_t)2 * bits, bits, false);
	if (bits == 8 && meaning == WHOLE_NUMBERS) {
		const __m256i high = _mm256_xor_si256(codes, _mm256_set1_epi8((char)0x80));

		values[0] = _mm256_unpacklo_epi8(codes, high);
		values[1] = _mm256_unpackhi_epi8(codes, high);
		return;
	}
	values_of_bytes(lookup, codes, bits, true, values);
}

/* Sixteen registers do not hold sums beside what looking up these takes: their values go to memory. */
#define IS_APART(bits) ((bits) > 4)

INLINE void add_weighted(const struct weights *weights, uint32_t t, const uint32_t n_queries,
	const __m256i values[2], __m256i totals[KV_FAST_QUERIES_MAX][2])
{
	UNROLL
	for (uint32_t q = 0; q < n_queries; q++) {
		const __m256i weight = repeat_pair(weights->pairs[t / TOKENS][q][t % TOKENS]);

		UNROLL
		for (uint32_t i = 0; i < 2; i++) {
			const __m256i product = _mm256_mulhrs_epi16(values[i], weight);

			/* Written out as in multiply_add(). */
			__asm__("vpaddw %1, %0, %0" : "+x"(totals[q][i]) : "x"(product));
		}
	}
}

/* 32 codes from `offset` on. */
INLINE void sum_codes(const struct kv_fast_part *part, const struct lookup *lookup,
	const struct kv_fast_rows *rows, uint32_t offset, const struct weights *weights,
	const uint32_t n_queries, const uint32_t bits, const bool is_shifted, const enum meaning meaning,
	float *const *sums, uint32_t slot)
{
	struct short_sums blocks;

	for (uint32_t first = 0; first < n_places(rows); first += TOKENS) {
		struct asking asking = begin_asking(part, rows, first, slot, KV_FAST_CODES_STEP, TOKENS / 4);
		const uint32_t end = end_of_block(rows, first);
		__m256i totals[KV_FAST_QUERIES_MAX][2] = { 0 }, values[TOKENS][2];

		for (uint32_t t = first; t < end; t++) {
			if (t % 4 == 0)
				ask(&asking);
			values_of_row(
				lookup, rows->rows[t] + offset, bits, is_shifted, meaning, values[t - first]);
			if (!IS_APART(bits))
				add_weighted(weights, t, n_queries, values[t - first], totals);
		}
		for (uint32_t t = first; IS_APART(bits) && t < end; t++)
			add_weighted(weights, t, n_queries, values[t - first], totals);
		memcpy(blocks.totals[first / TOKENS], totals, sizeof(totals));
	}
	add_blocks(&blocks, n_places(rows) / TOKENS, weights, n_queries, sums, part->slot + slot);
}

INLINE void sum_part_of(const struct kv_fast_part *part, const struct kv_fast_rows *rows,
	const struct weights *weights, const uint32_t n_queries, const uint32_t bits,
	const enum meaning meaning, float *const *sums)
{
	const struct lookup lookup = load_lookup(part, bits);

	for (uint32_t slot = 0; slot < part->n_slots; slot += KV_FAST_CODES_STEP)
		sum_codes(part, &lookup, rows, part->offset + slot * bits / 8, weights, n_queries, bits,
			false, meaning, sums, slot);
}

/* 4 bits, as many as are a multiple of 32. */
INLINE void sum_nibbles(const struct kv_fast_part *part, const struct kv_fast_rows *rows,
	const struct weights *weights, const uint32_t n_queries, float *const *sums)
{
	const struct lookup lookup = load_lookup(part, 4);
	uint32_t slot = 0;

	for (; slot + CODES_AT_ONCE <= part->n_slots; slot += CODES_AT_ONCE) {
		UNROLL
		for (uint32_t half = 0; half < 2; half++)
			sum_rows(part, &lookup, rows, part->offset + slot / 2, weights, n_queries, half, sums,
				slot + half * CODES_AT_ONCE / 2);
	}
	if (slot < part->n_slots)
		sum_codes(part, &lookup, rows, part->offset + slot / 2, weights, n_queries, 4, true, false,
			sums, slot);
}

INLINE void sum_short(const struct kv_fast_part *part, const struct kv_fast_rows *rows, const float *values,
	const float *scales, const uint32_t n_queries, float *const *sums)
{
	const uint32_t n = n_places(rows);
	struct weights weights;

	round_weights(values, scales, n / TOKENS, n_queries, &weights);
	find_multipliers(n / TOKENS, &weights);
#define SUM(bits, meaning) sum_part_of(part, rows, &weights, n_queries, bits, meaning, sums)
	switch (part->bits) {
	case 2:
		SUM(2, ENTRIES);
		break;
	case 3:
		SUM(3, ENTRIES);
		break;
	case 4:
		if (part->is_shifted)
			sum_nibbles(part, rows, &weights, n_queries, sums);
		else
			SUM(4, ENTRIES);
		break;
	case 5:
		SUM(5, ENTRIES);
		break;
	case 6:
		SUM(6, ENTRIES);
		break;
	case 7:
		if (part->is_smooth)
			SUM(7, SMOOTH);
		else
			SUM(7, ENTRIES);
		break;
	default:
		if (part->is_value)
			SUM(8, WHOLE_NUMBERS);
		else if (part->is_smooth)
			SUM(8, SMOOTH);
		else
			SUM(8, ENTRIES);
		break;
	}
#undef SUM
}

void OF_SET(kv_fast_sum_short)(const struct kv_fast_part *part, const struct kv_fast_rows *rows,
	const float *weights, const float *scales, uint32_t n_queries, float *const *sums)
{
	if (n_queries == 1)
		sum_short(part, rows, weights, scales, 1, sums);
	else if (n_queries == 2)
		sum_short(part, rows, weights, scales, 2, sums);
	else
		sum_short(part, rows, weights, scales, 4, sums);
}

#endif
