/*
 * Weighted sums of rows of 4-bit codebooks in 16 bits, compiled once per instruction set (core/fast.h) and
 * for AVX2 only: products are rounded to 16 bits (vpmulhrsw), so a register has the sums of 16 channels in
 * place of 8, rows are taken one by one, and none are put side by side.
 *
 * Weights of 32 tokens add up to less than 2^15, so that no sum overflows; core/DESIGN.md has the error.
 */
#include "core/fast_set.h"

#if HAS_SHORT_SUMS

/* Of 64 codes in 32 bytes; what is left of a part, 32 codes, is taken of two tokens at once. */
#define CODES_AT_ONCE 64u
#define NIBBLES_MASK  _mm256_set1_epi8(15)

/* Weights of all queries, each twice side by side: weight = integer * unit. */
struct weights {
	_Alignas(32) int32_t pairs[KV_FAST_QUERIES_MAX][TOKENS];
	float units[KV_FAST_QUERIES_MAX];
};

INLINE void round_weights(const float *values, int32_t *pairs, float *unit)
{
	f32_lanes all = load_f32(values);

	for (uint32_t t = LANES; t < TOKENS; t += LANES)
		all += load_f32(values + t);

	/* Rounding adds at most a half for each weight, and once more for each product. */
	const float most = (float)(KV_FAST_WEIGHT_MAX - TOKENS);
	/* Weights that are all smaller than that, or nothing, become nothing. */
	const float sum = sum_of_lanes(all) > 0x1p-100f ? sum_of_lanes(all) : 0x1p-100f;
	const f32_lanes factor = repeat_f32(most / sum);

	UNROLL
	for (uint32_t t = 0; t < TOKENS; t += LANES) {
		const i32_lanes codes = rounded(load_f32(values + t) * factor);
		const i32_lanes two = codes | codes << 16;

		memcpy(pairs + t, &two, sizeof(two));
	}
	*unit = sum / most;
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

/* Half `half` of the codes of 64 channels: four registers of slots. */
INLINE void sum_rows(const struct lookup *lookup, const uint8_t *const rows[], uint32_t n_rows,
	uint32_t offset, const struct weights *weights, const uint32_t n_queries, const uint32_t half,
	struct asking *asking, float *const *sums, uint32_t slot)
{
	__m256i totals[KV_FAST_QUERIES_MAX][2] = { 0 }, values[2];

	expand_codes(lookup, codes_at(load_words((const int16_t *)(const void *)(rows[0] + offset)), half),
		values);
	/* Tokens beyond the last have rows, and no weight. */
	for (uint32_t t = 0; t < n_rows; t += 4) {
		ask(asking);
		UNROLL
		for (uint32_t i = 1; i <= 4; i++) {
			const uint8_t *next = rows[(t + i) % TOKENS] + offset;

			weigh_and_expand(lookup,
				codes_at(load_words((const int16_t *)(const void *)next), half),
				weights->pairs[0] + t + i - 1, n_queries, values, totals);
		}
	}
	UNROLL
	for (uint32_t q = 0; q < n_queries; q++) {
		UNROLL
		for (uint32_t i = 0; i < 2; i++) {
			float *to = sums[q] + slot + (size_t)i * 2 * LANES;

			/* Those at even places, then those at odd ones. */
			add_to(to, _mm256_srai_epi32(_mm256_slli_epi32(totals[q][i], 16), 16),
				weights->units[q]);
			add_to(to + LANES, _mm256_srai_epi32(totals[q][i], 16), weights->units[q]);
		}
	}
}

/* The same of 32 channels and two tokens at once: two registers of slots. */
INLINE void sum_pairs(const struct lookup *lookup, const uint8_t *const rows[], uint32_t n_rows,
	uint32_t offset, const struct weights *weights, const uint32_t n_queries, const uint32_t half,
	struct asking *asking, float *const *sums, uint32_t slot)
{
	__m256i totals[KV_FAST_QUERIES_MAX][2] = { 0 };

	for (uint32_t t = 0; t < n_rows; t += 2) {
		__m256i values[2];

		if (t % 8 == 0)
			ask(asking);
		expand_codes(lookup, codes_at(words_of_rows(rows + t, offset), half), values);
		UNROLL
		for (uint32_t q = 0; q < n_queries; q++) {
			const int32_t *two = weights->pairs[q] + t;
			const __m256i weight =
				_mm256_set_m128i(_mm_set1_epi32(two[1]), _mm_set1_epi32(two[0]));

			totals[q][0] = add_rounded(totals[q][0], values[0], weight);
			totals[q][1] = add_rounded(totals[q][1], values[1], weight);
		}
	}
	UNROLL
	for (uint32_t q = 0; q < n_queries; q++) {
		UNROLL
		for (uint32_t i = 0; i < 2; i++)
			add_to(sums[q] + slot + (size_t)i * LANES,
				_mm256_add_epi32(_mm256_cvtepi16_epi32(_mm256_castsi256_si128(totals[q][i])),
					_mm256_cvtepi16_epi32(_mm256_extracti128_si256(totals[q][i], 1))),
				weights->units[q]);
	}
}

INLINE void sum_short(const struct kv_fast_part *part, const struct kv_fast_rows *rows, uint32_t block_first,
	const float *scaled, const uint32_t n_queries, float *const *sums)
{
	const struct lookup lookup = load_lookup(part, 4);
	struct asking asking = begin_asking(
		part, rows, block_first, 0, part->n_slots, TOKENS / 4 * part->n_slots / (CODES_AT_ONCE / 2));
	const uint8_t *const *from = rows->rows + block_first;
	const uint32_t n_rows = end_of_block(rows, block_first) - block_first;
	struct weights weights;
	uint32_t first = 0;

	UNROLL
	for (uint32_t q = 0; q < n_queries; q++)
		round_weights(scaled + (size_t)q * STEP + block_first, weights.pairs[q], &weights.units[q]);
	for (; first + CODES_AT_ONCE <= part->n_slots; first += CODES_AT_ONCE) {
		UNROLL
		for (uint32_t half = 0; half < 2; half++)
			sum_rows(&lookup, from, n_rows, part->offset + first / 2, &weights, n_queries, half,
				&asking, sums, part->slot + first + half * CODES_AT_ONCE / 2);
	}
	if (first < part->n_slots) {
		UNROLL
		for (uint32_t half = 0; half < 2; half++)
			sum_pairs(&lookup, from, n_rows, part->offset + first / 2, &weights, n_queries, half,
				&asking, sums, part->slot + first + half * CODES_AT_ONCE / 4);
	}
}

void OF_SET(kv_fast_sum_short)(const struct kv_fast_part *part, const struct kv_fast_rows *rows,
	uint32_t first, const float *scaled, uint32_t n_queries, float *const *sums)
{
	if (n_queries == 1)
		sum_short(part, rows, first, scaled, 1, sums);
	else if (n_queries == 2)
		sum_short(part, rows, first, scaled, 2, sums);
	else
		sum_short(part, rows, first, scaled, 4, sums);
}

#endif
