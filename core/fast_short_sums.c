/*
 * Weighted sums of rows of codes in 16 bits, compiled once per instruction set (core/fast.h) and
 * for AVX2 only: products are rounded to 16 bits (vpmulhrsw), so a register has the sums of 16 channels in
 * place of 8, rows are taken one by one, and none are put side by side.
 *
 * Weights of 32 tokens add up to less than 2^15, so that no sum overflows; core/DESIGN.md has the error.
 */
#include "core/fast_set.h"

#if HAS_SHORT_SUMS

/* Of 4 bits, in 32 bytes. */
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

/* Adds sums of 16 bits to four registers of slots. */
INLINE void end_block(const struct weights *weights, const uint32_t n_queries,
	__m256i totals[KV_FAST_QUERIES_MAX][2], float *const *sums, uint32_t slot)
{
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
	end_block(weights, n_queries, totals, sums, slot);
}

/* Of 32 codes from `at` on. */
INLINE void values_of_row(const struct lookup *lookup, const uint8_t *at, const uint32_t bits,
	const bool is_shifted, const bool is_value, __m256i values[2])
{
	__m256i codes;

	if (bits == 2) /* eight bytes four times, each shifted by one more code */
		codes = _mm256_and_si256(
			_mm256_srlv_epi64(_mm256_set1_epi64x(word_64(at)), _mm256_set_epi64x(6, 4, 2, 0)),
			_mm256_set1_epi8(3));
	else if (bits == 4 && is_shifted)
		codes = _mm256_and_si256(
			_mm256_srlv_epi64(load_16_bytes(at), _mm256_set_epi64x(4, 4, 0, 0)), NIBBLES_MASK);
	else
		codes = codes_in_bytes(at, at + (size_t)2 * bits, bits, false);
	if (bits == 8 && is_value) {
		const __m256i high = _mm256_xor_si256(codes, _mm256_set1_epi8((char)0x80));

		values[0] = _mm256_unpacklo_epi8(codes, high);
		values[1] = _mm256_unpackhi_epi8(codes, high);
		return;
	}
	values_of_bytes(lookup, codes, bits, values);
	if (bits > KV_FAST_SPLIT_BITS_MAX) {
		values[0] = _mm256_slli_epi16(values[0], KV_FAST_HALVED_SHIFT);
		values[1] = _mm256_slli_epi16(values[1], KV_FAST_HALVED_SHIFT);
	}
}

/* Sixteen registers do not hold sums beside what looking up these takes: their values go to memory. */
#define IS_APART(bits) ((bits) > 4)

INLINE void add_weighted(const struct weights *weights, uint32_t t, const uint32_t n_queries,
	const __m256i values[2], __m256i totals[KV_FAST_QUERIES_MAX][2])
{
	UNROLL
	for (uint32_t q = 0; q < n_queries; q++) {
		const __m256i weight = repeat_pair(weights->pairs[q][t]);

		UNROLL
		for (uint32_t i = 0; i < 2; i++) {
			const __m256i product = _mm256_mulhrs_epi16(values[i], weight);

			/* Written out as in multiply_add(). */
			__asm__("vpaddw %1, %0, %0" : "+x"(totals[q][i]) : "x"(product));
		}
	}
}

/* 32 codes from `offset` on. */
INLINE void sum_block(const struct lookup *lookup, const uint8_t *const rows[], uint32_t n_rows,
	uint32_t offset, const struct weights *weights, const uint32_t n_queries, const uint32_t bits,
	const bool is_shifted, const bool is_value, struct asking *asking, float *const *sums, uint32_t slot)
{
	__m256i totals[KV_FAST_QUERIES_MAX][2] = { 0 }, values[TOKENS][2];

	for (uint32_t t = 0; t < n_rows; t++) {
		if (t % 4 == 0)
			ask(asking);
		values_of_row(lookup, rows[t] + offset, bits, is_shifted, is_value, values[t]);
		if (!IS_APART(bits))
			add_weighted(weights, t, n_queries, values[t], totals);
	}
	for (uint32_t t = 0; IS_APART(bits) && t < n_rows; t++)
		add_weighted(weights, t, n_queries, values[t], totals);
	end_block(weights, n_queries, totals, sums, slot);
}

INLINE void sum_codes(const struct kv_fast_part *part, const struct kv_fast_rows *rows, uint32_t block_first,
	const struct weights *weights, const uint32_t n_queries, const uint32_t bits, const bool is_value,
	float *const *sums)
{
	const struct lookup lookup = load_lookup(part, bits);
	struct asking asking =
		begin_asking(part, rows, block_first, 0, part->n_slots, TOKENS / 4 * part->n_slots / 32);
	const uint8_t *const *from = rows->rows + block_first;
	const uint32_t n_rows = end_of_block(rows, block_first) - block_first;

	for (uint32_t first = 0; first < part->n_slots; first += 32)
		sum_block(&lookup, from, n_rows, part->offset + first * bits / 8, weights, n_queries, bits,
			false, is_value, &asking, sums, part->slot + first);
}

/* 4 bits, as many as are a multiple of 32. */
INLINE void sum_nibbles(const struct kv_fast_part *part, const struct kv_fast_rows *rows,
	uint32_t block_first, const struct weights *weights, const uint32_t n_queries, float *const *sums)
{
	const struct lookup lookup = load_lookup(part, 4);
	struct asking asking =
		begin_asking(part, rows, block_first, 0, part->n_slots, TOKENS / 4 * part->n_slots / 32);
	const uint8_t *const *from = rows->rows + block_first;
	const uint32_t n_rows = end_of_block(rows, block_first) - block_first;
	uint32_t first = 0;

	for (; first + CODES_AT_ONCE <= part->n_slots; first += CODES_AT_ONCE) {
		UNROLL
		for (uint32_t half = 0; half < 2; half++)
			sum_rows(&lookup, from, n_rows, part->offset + first / 2, weights, n_queries, half,
				&asking, sums, part->slot + first + half * CODES_AT_ONCE / 2);
	}
	if (first < part->n_slots)
		sum_block(&lookup, from, n_rows, part->offset + first / 2, weights, n_queries, 4, true, false,
			&asking, sums, part->slot + first);
}

INLINE void sum_short(const struct kv_fast_part *part, const struct kv_fast_rows *rows, uint32_t block_first,
	const float *scaled, const uint32_t n_queries, float *const *sums)
{
	struct weights weights;

	UNROLL
	for (uint32_t q = 0; q < n_queries; q++)
		round_weights(scaled + (size_t)q * STEP + block_first, weights.pairs[q], &weights.units[q]);
#define SUM(bits, is_value) sum_codes(part, rows, block_first, &weights, n_queries, bits, is_value, sums)
	switch (part->bits) {
	case 2:
		SUM(2, false);
		break;
	case 3:
		SUM(3, false);
		break;
	case 4:
		if (part->is_shifted)
			sum_nibbles(part, rows, block_first, &weights, n_queries, sums);
		else
			SUM(4, false);
		break;
	case 5:
		SUM(5, false);
		break;
	case 6:
		SUM(6, false);
		break;
	case 7:
		SUM(7, false);
		break;
	default:
		if (part->is_value)
			SUM(8, true);
		else
			SUM(8, false);
		break;
	}
#undef SUM
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
