/*
 * Scores and weighted sums of 1-bit codes, compiled once per instruction set (core/fast.h). A bit adds or
 * subtracts a number, so the sum over four of them is one of sixteen, which are worked out once and looked up
 * for every row or channel: one lookup and one addition of 16 bits for four products.
 */
#include "core/fast_set.h"

#define N_SUMS           (TOKENS / WORDS)
#define GROUPS_OF_TOKENS (TOKENS / 4)

void OF_SET(kv_fast_dot_bits)(const struct kv_fast_part *part, const struct kv_fast_rows *rows,
	uint32_t block_first, const struct kv_fast_query *queries, uint32_t n_queries, float *dots)
{
	struct asking asking =
		begin_asking(part, rows, block_first, 0, part->n_slots, n_queries * part->n / 16);

	for (uint32_t first = 0; first < part->n; first += KV_FAST_BITS_STEP) {
		const uint32_t n = part->n - first < KV_FAST_BITS_STEP ? part->n - first : KV_FAST_BITS_STEP;
		i_vector indices[KV_FAST_BITS_STEP / GROUPS_OF_INDEX / 4];

		indices_of_rows(rows->rows + block_first, part->offset + first / 8, indices);
		for (uint32_t q = 0; q < n_queries; q++) {
			const int16_t *table = queries[q].codes + part->slot + (size_t)first * 4;
			i_vector sums[N_SUMS] = { 0 };

			for (uint32_t g = 0; g < n / 4; g += 4) {
				ask(&asking);
				UNROLL
				for (uint32_t i = 0; i < 4; i++)
					add_looked_up(sums, table + (size_t)(g + i) * 16,
						index_of_group(indices, g / 4, i));
			}
			UNROLL
			for (uint32_t i = 0; i < TOKENS / LANES; i++) {
				float *to = dots + (size_t)q * STEP + block_first + (size_t)i * LANES;
				const f32_lanes sum = f32_of_sums(sums, i);

				store_f32(first == 0 ? sum : load_f32(to) + sum, to);
			}
		}
	}
}

/* Weights of 32 tokens whose sums fit into 16 bits: weight = integer * unit. */
struct short_weights {
	_Alignas(64) int16_t codes[TOKENS];
	float unit, all; /* all: of all weights, with the unit */
};

INLINE void shorten(const float *values, struct short_weights *weights)
{
	f32_lanes all = load_f32(values);

	for (uint32_t t = LANES; t < TOKENS; t += LANES)
		all += load_f32(values + t);

	const float sum = sum_of_lanes(all);
	/* Rounding adds at most a half for each token. */
	const float most = (float)(KV_FAST_WEIGHT_MAX - TOKENS / 2);
	const f32_lanes factor = repeat_f32(sum > 0 ? most / sum : 0);
	f32_lanes total = { 0 };

	UNROLL
	for (uint32_t t = 0; t < TOKENS; t += LANES) {
		const f32_lanes weights_of = load_f32(values + t) * factor;

		total += (f32_lanes)to_f32((i_vector)rounded(weights_of));
		store_rounded((f_vector)weights_of, weights->codes + t);
	}
	weights->unit = sum / most;
	weights->all = sum_of_lanes(total) * weights->unit;
}

/* Plus where a bit is set, else minus: twice the former, less all. */
INLINE void add_signed(float *to, f32_lanes found, const struct short_weights *weights)
{
	store_f32(load_f32(to) + (found * repeat_f32(2 * weights->unit) - repeat_f32(weights->all)), to);
}

#if LANES == 16

/* Written out, because compilers copy sums before they add to parts of them. */
INLINE i_vector add_where(i_vector sum, i_vector weight, __mmask32 chosen)
{
	__asm__("vpaddw %1, %0, %0 %{%2%}" : "+v"(sum) : "v"(weight), "Yk"(chosen));
	return sum;
}

/* Sums of 32 * n_registers channels: a bit says whether a weight is added to its channel's. */
INLINE void add_chosen(const uint8_t *const rows[], uint32_t n_rows, uint32_t offset,
	const struct short_weights *weights, const uint32_t n_queries, const uint32_t n_registers,
	struct asking *asking, float *const *sums, uint32_t slot)
{
	i_vector totals[KV_FAST_QUERIES_MAX][4] = { 0 };

	for (uint32_t t = 0; t < n_rows; t++) {
		uint32_t chosen[4];

		memcpy(chosen, rows[t] + offset, n_registers * sizeof(*chosen));
		ask(asking);
		UNROLL
		for (uint32_t q = 0; q < n_queries; q++) {
			const i_vector weight = _mm512_set1_epi16(weights[q].codes[t]);

			UNROLL
			for (uint32_t r = 0; r < n_registers; r++)
				totals[q][r] = add_where(totals[q][r], weight, chosen[r]);
		}
	}
	UNROLL
	for (uint32_t q = 0; q < n_queries; q++) {
		UNROLL
		for (uint32_t r = 0; r < n_registers; r++) {
			float *to = sums[q] + slot + (size_t)r * 2 * LANES;

			add_signed(to,
				(f32_lanes)to_f32(
					_mm512_cvtepi16_epi32(_mm512_castsi512_si256(totals[q][r]))),
				&weights[q]);
			add_signed(to + LANES,
				(f32_lanes)to_f32(
					_mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(totals[q][r], 1))),
				&weights[q]);
		}
	}
}

INLINE void sum_bits(const struct kv_fast_part *part, const struct kv_fast_rows *rows, uint32_t block_first,
	const float *scaled, const uint32_t n_queries, float *const *sums)
{
	const uint8_t *const *from = rows->rows + block_first;
	const uint32_t n_rows = end_of_block(rows, block_first) - block_first;
	struct short_weights weights[KV_FAST_QUERIES_MAX];
	uint32_t first = 0;

	UNROLL
	for (uint32_t q = 0; q < n_queries; q++)
		shorten(scaled + (size_t)q * STEP + block_first, &weights[q]);
	for (; first + 128 <= part->n_slots; first += 128) {
		struct asking asking = begin_asking(part, rows, block_first, first, 128, TOKENS);

		add_chosen(from, n_rows, part->offset + first / 8, weights, n_queries, 4, &asking, sums,
			part->slot + first);
	}
	if (first == part->n_slots)
		return;

	const uint32_t n_left = part->n_slots - first;
	struct asking asking = begin_asking(part, rows, block_first, first, n_left, TOKENS);

#define ADD(n_registers)                                                                                   \
	add_chosen(from, n_rows, part->offset + first / 8, weights, n_queries, n_registers, &asking, sums, \
		part->slot + first)
	if (n_left == 32)
		ADD(1);
	else if (n_left == 64)
		ADD(2);
	else
		ADD(3);
#undef ADD
}

void OF_SET(kv_fast_sum_bits)(const struct kv_fast_part *part, const struct kv_fast_rows *rows,
	uint32_t block_first, const float *scaled, uint32_t n_queries, float *const *sums)
{
	if (n_queries == 1)
		sum_bits(part, rows, block_first, scaled, 1, sums);
	else if (n_queries == 2)
		sum_bits(part, rows, block_first, scaled, 2, sums);
	else
		sum_bits(part, rows, block_first, scaled, 4, sums);
}

#else

/* Sums of the weights of every four tokens, for every set of these. */
struct sums_of_weights {
	struct short_weights weights;
	int16_t tables[GROUPS_OF_TOKENS * 16];
};

/* The sums of sets of four weights, a word each: word i of the set that i has the bits of. */
INLINE __m256i sums_of_four(const int16_t *weights)
{
#define WORD(i, k)    (char)((i) >> (k)&1 ? 2 * (k) : -1), (char)((i) >> (k)&1 ? 2 * (k) + 1 : -1)
#define WORDS_4(i, k) WORD(i, k), WORD(i + 1, k), WORD(i + 2, k), WORD(i + 3, k)
#define WORDS_OF(k)                                                         \
	{                                                                   \
		WORDS_4(0, k), WORDS_4(4, k), WORDS_4(8, k), WORDS_4(12, k) \
	}
	const i8_bytes_32 places[4] = { WORDS_OF(0), WORDS_OF(1), WORDS_OF(2), WORDS_OF(3) };
	int64_t four;
	__m256i all;

	memcpy(&four, weights, sizeof(four));
	all = _mm256_set1_epi64x(four);
	return _mm256_add_epi16(_mm256_add_epi16(_mm256_shuffle_epi8(all, (__m256i)places[0]),
					_mm256_shuffle_epi8(all, (__m256i)places[1])),
		_mm256_add_epi16(_mm256_shuffle_epi8(all, (__m256i)places[2]),
			_mm256_shuffle_epi8(all, (__m256i)places[3])));
}

INLINE void sum_weights(const float *values, struct sums_of_weights *sums)
{
	shorten(values, &sums->weights);
	UNROLL
	for (uint32_t g = 0; g < GROUPS_OF_TOKENS; g += 2) {
		const int16_t *codes = sums->weights.codes + (size_t)g * 4;
		const __m256i two[2] = { sums_of_four(codes), sums_of_four(codes + 4) };

		store_tables(two, sums->tables + (size_t)g * 16);
	}
}

void OF_SET(kv_fast_sum_bits)(const struct kv_fast_part *part, const struct kv_fast_rows *rows,
	uint32_t block_first, const float *scaled, uint32_t n_queries, float *const *sums)
{
	struct sums_of_weights weights[KV_FAST_QUERIES_MAX];
	struct asking asking =
		begin_asking(part, rows, block_first, 0, part->n_slots, n_queries * part->n_slots / 32);

	for (uint32_t q = 0; q < n_queries; q++)
		sum_weights(scaled + (size_t)q * STEP + block_first, &weights[q]);
	for (uint32_t first = 0; first < part->n_slots; first += SUMS_AT_ONCE) {
		const uint32_t n =
			part->n_slots - first < SUMS_AT_ONCE ? part->n_slots - first : SUMS_AT_ONCE;
		i_vector indices[SUMS_AT_ONCE / 32][GROUPS_OF_TOKENS / GROUPS_OF_INDEX];

		indices_of_tokens(rows->rows + block_first, part, first, n / 32, indices);
		for (uint32_t q = 0; q < n_queries; q++) {
			for (uint32_t r = 0; r < n / 32; r++) {
				i_vector found[N_SUMS] = { 0 };

				ask(&asking);
				UNROLL
				for (uint32_t g = 0; g < GROUPS_OF_TOKENS; g++)
					add_looked_up(found, weights[q].tables + (size_t)g * 16,
						index_of_group(indices[r], g / 4, g % 4));
				UNROLL
				for (uint32_t i = 0; i < 32 / LANES; i++) {
					float *to = sums[q] + part->slot + first + (size_t)r * 32 +
						(size_t)i * LANES;

					add_signed(to, f32_of_sums(found, i), &weights[q].weights);
				}
			}
		}
	}
}

#endif
