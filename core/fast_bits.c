/*
 * Scores and weighted sums of 1-bit codes, compiled once per instruction set (core/fast.h). A bit adds or
 * subtracts a number, so the sum over four of them is one of sixteen, which are worked out once and looked up
 * for every row or channel: one lookup and one addition of 16 bits for four products.
 */
#include "core/fast_set.h"

#define N_SUMS           (TOKENS / WORDS)
#define GROUPS_OF_TOKENS (TOKENS / 4)

/* Of n_at_once queries, so that an index is shifted once for all of them where there are registers. */
INLINE void dot_bits_of(const struct kv_fast_part *part, const i_vector *indices, uint32_t first, uint32_t n,
	const struct kv_fast_query *queries, const uint32_t n_at_once, struct asking *asking, float *dots)
{
	i_vector sums[KV_FAST_QUERIES_MAX][N_SUMS] = { 0 };

	for (uint32_t g = 0; g < n / 4; g += 4) {
		ask(asking);
		UNROLL
		for (uint32_t i = 0; i < 4; i++) {
			const i_vector index = index_of_group(indices, g / 4, i);

			UNROLL
			for (uint32_t q = 0; q < n_at_once; q++)
				add_looked_up(sums[q],
					queries[q].codes + part->slot + (size_t)first * 4 +
						(size_t)(g + i) * 16,
					index);
		}
	}
	UNROLL
	for (uint32_t q = 0; q < n_at_once; q++) {
		UNROLL
		for (uint32_t i = 0; i < TOKENS / LANES; i++) {
			float *to = dots + (size_t)q * STEP + (size_t)i * LANES;
			const f32_lanes sum = f32_of_sums(sums[q], i);

			store_f32(first == 0 ? sum : load_f32(to) + sum, to);
		}
	}
}

INLINE void dot_bits(const struct kv_fast_part *part, const struct kv_fast_rows *rows, uint32_t block_first,
	const struct kv_fast_query *queries, const uint32_t n_queries, float *dots)
{
	const uint32_t n_at_once = LANES == 16 ? n_queries : 1;
	struct asking asking =
		begin_asking(part, rows, block_first, 0, part->n_slots, n_queries / n_at_once * part->n / 16);

	for (uint32_t first = 0; first < part->n; first += KV_FAST_BITS_STEP) {
		const uint32_t n = part->n - first < KV_FAST_BITS_STEP ? part->n - first : KV_FAST_BITS_STEP;
		i_vector indices[KV_FAST_BITS_STEP / GROUPS_OF_INDEX / 4];

		indices_of_rows(rows->rows + block_first, part->offset + first / 8, indices);
		for (uint32_t q = 0; q < n_queries; q += n_at_once)
			dot_bits_of(part, indices, first, n, queries + q, n_at_once, &asking,
				dots + (size_t)q * STEP + block_first);
	}
}

void OF_SET(kv_fast_dot_bits)(const struct kv_fast_part *part, const struct kv_fast_rows *rows,
	uint32_t block_first, const struct kv_fast_query *queries, uint32_t n_queries, float *dots)
{
	if (n_queries == 1)
		dot_bits(part, rows, block_first, queries, 1, dots);
	else if (n_queries == 2)
		dot_bits(part, rows, block_first, queries, 2, dots);
	else
		dot_bits(part, rows, block_first, queries, 4, dots);
}

#if LANES == 16

/* Written out, because compilers copy sums before they add to parts of them. */
INLINE i_vector add_where(i_vector sum, i_vector weight, __mmask32 chosen)
{
	__asm__("vpaddw %1, %0, %0 %{%2%}" : "+v"(sum) : "v"(weight), "Yk"(chosen));
	return sum;
}

/* From memory: compilers go by way of the stack. */
INLINE __mmask32 load_mask(const uint8_t *from)
{
	__mmask32 mask;

	__asm__("kmovd %1, %0" : "=Yk"(mask) : "m"(*(const uint8_t(*)[4])(const void *)from));
	return mask;
}

/* Weights of a step: those of a block add up to 16 bits, each is an integer times the unit of its block. */
struct short_weights {
	_Alignas(64) int32_t pairs[STEP]; /* each twice side by side: 32 bits are repeated by a load alone */
	float units[STEP / TOKENS], alls[STEP / TOKENS]; /* alls: of all of a block, with the unit */
};

#define BLOCKS (STEP / TOKENS)
_Static_assert(KV_FAST_QUERIES_MAX *BLOCKS <= LANES, "a register has a lane for each query and block");

/* Of all queries and blocks together: their sums are those of the lanes of a register each. */
INLINE void shorten(const float *values, uint32_t n, const uint32_t n_queries, struct short_weights *weights)
{
	/* Rounding adds at most a half for each token. */
	const f32_lanes most = repeat_f32((float)(KV_FAST_WEIGHT_MAX - TOKENS / 2));
	f_vector sums[LANES] = { 0 };
	i_vector totals[LANES] = { 0 };

	UNROLL
	for (uint32_t i = 0; i < n_queries * BLOCKS; i++) {
		const float *from = values + (size_t)i * TOKENS;

		if (i % BLOCKS * TOKENS < n)
			sums[i] = (f_vector)(load_f32(from) + load_f32(from + LANES));
	}

	const f32_lanes all = (f32_lanes)add_lanes_f32(sums);
	const i32_lanes is_there = all > repeat_f32(0);
	const f32_lanes unit = all / most;
	float factors[LANES], units[LANES], alls[LANES];

	store_f32((f32_lanes)((i32_lanes)(most / all) & is_there), factors);
	UNROLL
	for (uint32_t i = 0; i < n_queries * BLOCKS; i++) {
		const float *from = values + (size_t)i * TOKENS;
		int32_t *to = weights[i / BLOCKS].pairs + (size_t)(i % BLOCKS) * TOKENS;

		if (i % BLOCKS * TOKENS >= n)
			continue;

		const i32_lanes low = rounded(load_f32(from) * repeat_f32(factors[i])),
				high = rounded(load_f32(from + LANES) * repeat_f32(factors[i]));

		_mm512_store_si512(to, (i_vector)(low | low << 16));
		_mm512_store_si512(to + LANES, (i_vector)(high | high << 16));
		totals[i] = (i_vector)(low + high);
	}
	store_f32(unit, units);
	store_f32((f32_lanes)to_f32(add_lanes(totals)) * unit, alls);
	UNROLL
	for (uint32_t q = 0; q < n_queries; q++) {
		memcpy(weights[q].units, units + (size_t)q * BLOCKS, sizeof(weights[q].units));
		memcpy(weights[q].alls, alls + (size_t)q * BLOCKS, sizeof(weights[q].alls));
	}
}

/* Sums of 32 * n_registers channels: a bit says whether a weight is added to its channel's. */
INLINE void add_chosen(const struct kv_fast_part *part, const struct kv_fast_rows *rows, uint32_t first,
	const struct short_weights *weights, const uint32_t n_queries, const uint32_t n_registers,
	uint32_t slot, float *const *sums)
{
	const uint32_t offset = part->offset + slot / 8, block = first / TOKENS;
	struct asking asking = begin_asking(part, rows, first, slot, n_registers * 32, TOKENS);
	i_vector totals[KV_FAST_QUERIES_MAX][4] = { 0 };

	for (uint32_t t = first; t < end_of_block(rows, first); t++) {
		const uint8_t *row = rows->rows[t] + offset;
		__mmask32 chosen[4];

		UNROLL
		for (uint32_t r = 0; r < n_registers; r++)
			chosen[r] = load_mask(row + (size_t)r * 4);
		ask(&asking);
		UNROLL
		for (uint32_t q = 0; q < n_queries; q++) {
			const i_vector weight = repeat_pair(weights[q].pairs[t]);

			UNROLL
			for (uint32_t r = 0; r < n_registers; r++)
				totals[q][r] = add_where(totals[q][r], weight, chosen[r]);
		}
	}
	/* Plus where a bit is set, else minus: twice the former, less all. */
	UNROLL
	for (uint32_t q = 0; q < n_queries; q++) {
		const f32_lanes factor = repeat_f32(2 * weights[q].units[block]),
				all = repeat_f32(weights[q].alls[block]);

		UNROLL
		for (uint32_t i = 0; i < 2 * n_registers; i++) {
			const i_vector total = totals[q][i / 2];
			const __m256i half = i % 2 == 0 ? _mm512_castsi512_si256(total)
							: _mm512_extracti64x4_epi64(total, 1);
			float *to = sums[q] + part->slot + slot + (size_t)i * LANES;

			store_f32((f32_lanes)fma_f32(to_f32(_mm512_cvtepi16_epi32(half)), (f_vector)factor,
					  (f_vector)(load_f32(to) - all)),
				to);
		}
	}
}

INLINE void sum_bits(const struct kv_fast_part *part, const struct kv_fast_rows *rows, const float *scaled,
	const uint32_t n_queries, float *const *sums)
{
	struct short_weights weights[KV_FAST_QUERIES_MAX];

	shorten(scaled, n_places(rows), n_queries, weights);
	for (uint32_t first = 0; first < rows->n_rows; first += TOKENS) {
		uint32_t slot = 0;

#define ADD(n_registers) add_chosen(part, rows, first, weights, n_queries, n_registers, slot, sums)
		for (; slot + 128 <= part->n_slots; slot += 128)
			ADD(4);
		if (part->n_slots - slot == 32)
			ADD(1);
		else if (part->n_slots - slot == 64)
			ADD(2);
		else if (part->n_slots - slot == 96)
			ADD(3);
#undef ADD
	}
}

void OF_SET(kv_fast_sum_bits)(const struct kv_fast_part *part, const struct kv_fast_rows *rows,
	const float *scaled, uint32_t n_queries, float *const *sums)
{
	if (n_queries == 1)
		sum_bits(part, rows, scaled, 1, sums);
	else if (n_queries == 2)
		sum_bits(part, rows, scaled, 2, sums);
	else
		sum_bits(part, rows, scaled, 4, sums);
}

#else

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

static void sum_bits_of_block(const struct kv_fast_part *part, const struct kv_fast_rows *rows,
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
			/* Plus where a bit is set, else minus: twice the former, less all. */
			const f32_lanes twice = repeat_f32(2 * weights[q].weights.unit),
					all = repeat_f32(weights[q].weights.all);
			float *to = sums[q] + part->slot + first;

			for (uint32_t r = 0; r < n / 32; r++) {
				i_vector found[N_SUMS] = { 0 };

				ask(&asking);
				UNROLL
				for (uint32_t g = 0; g < GROUPS_OF_TOKENS; g++)
					add_looked_up(found, weights[q].tables + (size_t)g * 16,
						index_of_group(indices[r], g / 4, g % 4));
				UNROLL
				for (uint32_t i = 0; i < 32 / LANES; i++, to += LANES)
					store_f32((f32_lanes)fma_f32((f_vector)f32_of_sums(found, i),
							  (f_vector)twice, (f_vector)(load_f32(to) - all)),
						to);
			}
		}
	}
}

void OF_SET(kv_fast_sum_bits)(const struct kv_fast_part *part, const struct kv_fast_rows *rows,
	const float *scaled, uint32_t n_queries, float *const *sums)
{
	for (uint32_t first = 0; first < rows->n_rows; first += TOKENS)
		sum_bits_of_block(part, rows, first, scaled, n_queries, sums);
}

#endif
