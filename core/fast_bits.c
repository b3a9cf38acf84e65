/*
 * Scores and weighted sums of 1-bit codes, compiled once per instruction set (core/fast.h). A bit adds or
 * subtracts a number, so the sum over four of them is one of sixteen, which are worked out once and looked up
 * for every row or channel: one lookup and one addition of 16 bits for four products.
 */
#include "core/fast_set.h"

#define N_SUMS (TOKENS / WORDS)
/* That are taken out of rows at once: a set of few registers would not hold more. */
#define BITS_OF_ROW ((LANES == 16 ? 2 : 1) * KV_FAST_BITS_STEP)
#define INDICES     (BITS_OF_ROW / GROUPS_OF_INDEX / 4) /* registers of these, of TOKENS rows */
/* Of weighted sums: weights of so many tokens add up to 16 bits without a sign. */
#define BLOCK       (2 * TOKENS)
#define BLOCKS      (STEP / BLOCK)
#define WEIGHTS_MAX ((float)(UINT16_MAX - BLOCK / 2)) /* rounding adds at most a half for each */

/* Of n_blocks blocks of rows and n_at_once queries: a table is loaded once for all of the former, an index
 * shifted once for all of the latter. */
INLINE void dot_bits_of(const struct kv_fast_part *part, i_vector indices[][INDICES], uint32_t first,
	uint32_t n, const struct kv_fast_query *queries, const uint32_t n_at_once, const uint32_t n_blocks,
	struct asking *asking, float *dots)
{
	i_vector sums[2][KV_FAST_QUERIES_MAX][N_SUMS] = { 0 };

	for (uint32_t g = 0; g < n / 4; g += 4) {
		ask(asking);
		UNROLL
		for (uint32_t i = 0; i < 4; i++) {
			i_vector index[2];

			UNROLL
			for (uint32_t b = 0; b < n_blocks; b++)
				index[b] = index_of_group(
					indices[b] + first % BITS_OF_ROW / 4 / GROUPS_OF_INDEX, g / 4, i);
			UNROLL
			for (uint32_t q = 0; q < n_at_once; q++) {
				const struct table_of_bits table = load_table(queries[q].codes + part->slot +
					(size_t)first * 4 + (size_t)(g + i) * 16);

				UNROLL
				for (uint32_t b = 0; b < n_blocks; b++)
					add_looked_up(sums[b][q], table, index[b]);
			}
		}
	}
	UNROLL
	for (uint32_t i = 0; i < n_blocks * n_at_once * TOKENS / LANES; i++) {
		const uint32_t b = i / (n_at_once * TOKENS / LANES), q = i / (TOKENS / LANES) % n_at_once;
		float *to = dots + (size_t)q * STEP + b * TOKENS + i % (TOKENS / LANES) * LANES;
		const f32_lanes sum = f32_of_sums(sums[b][q], i % (TOKENS / LANES));

		store_f32(first == 0 ? sum : load_f32(to) + sum, to);
	}
}

INLINE void dot_bits(const struct kv_fast_part *part, const struct kv_fast_rows *rows,
	const struct kv_fast_query *queries, const uint32_t n_queries, float *dots)
{
	const uint32_t n_at_once = LANES == 16 ? n_queries : 1, n_bits = part->n * part->bits;
	const uint32_t n_turns = n_queries / n_at_once * n_bits / 16, n_blocks = n_places(rows) / TOKENS;
	struct asking asking = begin_asking(part, rows, 0, 0, part->n_slots, n_turns > 2 ? n_turns / 2 : 1);

	for (uint32_t first = 0; first < n_bits; first += BITS_OF_ROW) {
		const uint32_t end = n_bits - first < BITS_OF_ROW ? n_bits : first + BITS_OF_ROW;
		i_vector indices[STEP / TOKENS][INDICES];

		for (uint32_t b = 0; b < n_blocks; b++) {
			const uint8_t *const *from = rows->rows + (size_t)b * TOKENS;

			if (end - first > KV_FAST_BITS_STEP)
				indices_of_rows(from, part->offset + first / 8, 2, indices[b]);
			else
				indices_of_rows(from, part->offset + first / 8, 1, indices[b]);
		}
		for (uint32_t i = first; i < end; i += KV_FAST_BITS_STEP) {
			const uint32_t n = end - i < KV_FAST_BITS_STEP ? end - i : KV_FAST_BITS_STEP;

			for (uint32_t q = 0; q < n_queries; q += n_at_once) {
				float *to = dots + (size_t)q * STEP;
				uint32_t b = 0;

				for (; b + 2 <= n_blocks; b += 2)
					dot_bits_of(part, indices + b, i, n, queries + q, n_at_once, 2,
						&asking, to + (size_t)b * TOKENS);
				if (b < n_blocks)
					dot_bits_of(part, indices + b, i, n, queries + q, n_at_once, 1,
						&asking, to + (size_t)b * TOKENS);
			}
		}
	}
}

void OF_SET(kv_fast_dot_bits)(const struct kv_fast_part *part, const struct kv_fast_rows *rows,
	const struct kv_fast_query *queries, uint32_t n_queries, float *dots)
{
	if (n_queries == 1)
		dot_bits(part, rows, queries, 1, dots);
	else if (n_queries == 2)
		dot_bits(part, rows, queries, 2, dots);
	else
		dot_bits(part, rows, queries, 4, dots);
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

/* Weights of a step: each is an integer times the unit of its block. */
struct short_weights {
	_Alignas(64) int32_t pairs[STEP];  /* each twice side by side: 32 bits are repeated by a load alone */
	float units[BLOCKS], alls[BLOCKS]; /* alls: of all of a block, with the unit */
};

_Static_assert(KV_FAST_QUERIES_MAX *BLOCKS <= LANES, "a register has a lane for each query and block");

/* Of all queries and blocks together: their sums are those of the lanes of a register each. */
INLINE void shorten(const float *values, const float *scales, uint32_t n, const uint32_t n_queries,
	struct short_weights *weights)
{
	const f32_lanes most = repeat_f32(WEIGHTS_MAX);
	_Alignas(64) float scaled[KV_FAST_QUERIES_MAX * STEP];
	f_vector sums[LANES] = { 0 };
	i_vector totals[LANES] = { 0 };

	UNROLL
	for (uint32_t i = 0; i < n_queries * BLOCKS; i++) {
		const uint32_t first = i % BLOCKS * BLOCK, end = n < first + BLOCK ? n : first + BLOCK;
		const float *from = values + (size_t)(i / BLOCKS) * STEP;
		f32_lanes sum = { 0 };

		for (uint32_t t = first; t < end; t += LANES) {
			const f32_lanes weight = scaled_at(from, scales, t);

			store_f32(weight, scaled + (size_t)(i / BLOCKS) * STEP + t);
			sum += weight;
		}
		sums[i] = (f_vector)sum;
	}

	/* Weights that are all smaller than that, or nothing, become nothing. */
	const f32_lanes all = greater((f32_lanes)add_lanes_f32(sums), repeat_f32(0x1p-100f));
	const f32_lanes unit = all / most;
	float factors[LANES], units[LANES], alls[LANES];

	store_f32(most / all, factors);
	UNROLL
	for (uint32_t i = 0; i < n_queries * BLOCKS; i++) {
		const uint32_t first = i % BLOCKS * BLOCK, end = n < first + BLOCK ? n : first + BLOCK;
		const float *from = scaled + (size_t)(i / BLOCKS) * STEP;
		i32_lanes total = { 0 };

		for (uint32_t t = first; t < end; t += LANES) {
			const i32_lanes weight = rounded(load_f32(from + t) * repeat_f32(factors[i]));

			_mm512_store_si512(weights[i / BLOCKS].pairs + t, (i_vector)(weight | weight << 16));
			total += weight;
		}
		totals[i] = (i_vector)total;
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
	const uint32_t offset = part->offset + slot / 8, block = first / BLOCK;
	const uint32_t end = rows->n_rows < first + BLOCK ? rows->n_rows : first + BLOCK;
	struct asking asking = begin_asking(part, rows, first, slot, n_registers * 32, TOKENS);
	i_vector totals[KV_FAST_QUERIES_MAX][4] = { 0 };

	for (uint32_t t = first; t < end; t++) {
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

			store_f32((f32_lanes)fma_f32(to_f32(_mm512_cvtepu16_epi32(half)), (f_vector)factor,
					  (f_vector)(load_f32(to) - all)),
				to);
		}
	}
}

INLINE void sum_bits(const struct kv_fast_part *part, const struct kv_fast_rows *rows, const float *values,
	const float *scales, const uint32_t n_queries, float *const *sums)
{
	struct short_weights weights[KV_FAST_QUERIES_MAX];

	shorten(values, scales, n_places(rows), n_queries, weights);
	for (uint32_t first = 0; first < rows->n_rows; first += BLOCK) {
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

#else

#define TOKENS_AT_ONCE 16u
#define OCTETS         (BLOCK / 8)

/*
 * Weights of a block, which are integers times the unit, as the sums of every set of four of them: for eight
 * tokens the low bytes of sixteen sums of the first four, then of the last four, then the high bytes.
 */
struct sums_of_weights {
	_Alignas(32) uint8_t tables[OCTETS][2][32];
	float unit, all; /* all: of all weights, with the unit */
};

/* In either half of a register words 4 * octet + k of sixteen tokens: the sums of the first three of them,
 * for the eight sets of these, and the fourth. */
INLINE void store_sums_of_four(__m256i weights, const int octet, uint8_t tables[2][32])
{
#define PLACE(i, k) \
	(char)((i) >> (k)&1 ? octet * 8 + 2 * (k) : -1), (char)((i) >> (k)&1 ? octet * 8 + 2 * (k) + 1 : -1)
#define PLACES_4(i, k) PLACE(i, k), PLACE(i + 1, k), PLACE(i + 2, k), PLACE(i + 3, k)
#define PLACES_OF(k)                                                           \
	{                                                                      \
		PLACES_4(0, k), PLACES_4(4, k), PLACES_4(0, k), PLACES_4(4, k) \
	}
	const i8_bytes_32 places[3] = { PLACES_OF(0), PLACES_OF(1), PLACES_OF(2) };
	const __m256i fourth =
		_mm256_shuffle_epi8(weights, _mm256_set1_epi16((short)(0x0706 + 0x0808 * octet)));
	const __m256i ones = _mm256_set1_epi16(255);
	const __m256i low =
		_mm256_add_epi16(_mm256_add_epi16(_mm256_shuffle_epi8(weights, (__m256i)places[0]),
					 _mm256_shuffle_epi8(weights, (__m256i)places[1])),
			_mm256_shuffle_epi8(weights, (__m256i)places[2]));
	const __m256i high = _mm256_add_epi16(low, fourth);

	_mm256_store_si256((__m256i *)(void *)tables[0],
		_mm256_packus_epi16(_mm256_and_si256(low, ones), _mm256_and_si256(high, ones)));
	_mm256_store_si256((__m256i *)(void *)tables[1],
		_mm256_packus_epi16(_mm256_srli_epi16(low, 8), _mm256_srli_epi16(high, 8)));
}

/* Of the block at `first`, of n tokens. */
INLINE void sum_weights(const float *values, const float *scales, uint32_t first, uint32_t n,
	const uint32_t n_queries, struct sums_of_weights *sums)
{
	_Alignas(32) float scaled[KV_FAST_QUERIES_MAX][BLOCK];
	f32_lanes all[KV_FAST_QUERIES_MAX];
	_Alignas(16) float factors[4], units[4], alls[4];

	for (uint32_t q = 0; q < n_queries; q++) {
		all[q] = repeat_f32(0);
		for (uint32_t t = 0; t < n; t += LANES) {
			const f32_lanes weight = scaled_at(values + (size_t)q * STEP, scales, first + t);

			store_f32(weight, scaled[q] + t);
			all[q] += weight;
		}
	}

	/* Weights that are all smaller than that, or nothing, become nothing. */
	const __m128 sum = _mm_max_ps(_mm_set1_ps(0x1p-100f), sums_of_four(all, n_queries));
	const __m128 unit = _mm_mul_ps(sum, _mm_set1_ps(1 / WEIGHTS_MAX));

	_mm_store_ps(factors, _mm_div_ps(_mm_set1_ps(WEIGHTS_MAX), sum));
	_mm_store_ps(units, unit);
	for (uint32_t q = 0; q < n_queries; q++) {
		const f32_lanes factor = repeat_f32(factors[q]);
		i32_lanes total = { 0 };

		for (uint32_t t = 0; t < n; t += TOKENS_AT_ONCE) {
			const i32_lanes a = rounded(load_f32(scaled[q] + t) * factor),
					b = rounded(load_f32(scaled[q] + t + LANES) * factor);
			/* Tokens 0 to 3 and 8 to 11, then 4 to 7 and 12 to 15. */
			const __m256i words = _mm256_packus_epi32((__m256i)a, (__m256i)b);

			total += a + b;
			store_sums_of_four(words, 0, sums[q].tables[t / 8]);
			store_sums_of_four(words, 1, sums[q].tables[t / 8 + 1]);
		}
		all[q] = (f32_lanes)to_f32((__m256i)total);
	}
	_mm_store_ps(alls, _mm_mul_ps(sums_of_four(all, n_queries), unit));
	for (uint32_t q = 0; q < n_queries; q++) {
		sums[q].unit = units[q];
		sums[q].all = alls[q];
	}
}

/* The sums of `n_registers` registers of indices of every eight tokens, 16 channels each. */
INLINE void add_sums(const struct sums_of_weights *weights, __m256i indices[][4], uint32_t n_octets,
	const uint32_t n_registers, struct asking *asking, float *to)
{
	__m256i found[4][2] = { 0 };
	/* Plus where a bit is set, else minus: twice the former, less all. */
	const f32_lanes twice = repeat_f32(2 * weights->unit), all = repeat_f32(weights->all);

	for (uint32_t octet = 0; octet < n_octets; octet++) {
		const __m256i low = _mm256_load_si256(
				      (const __m256i *)(const void *)weights->tables[octet][0]),
			      high = _mm256_load_si256(
				      (const __m256i *)(const void *)weights->tables[octet][1]);

		ask(asking);
		UNROLL
		for (uint32_t r = 0; r < n_registers; r++) {
			const __m256i a = _mm256_shuffle_epi8(low, indices[octet][r]),
				      b = _mm256_shuffle_epi8(high, indices[octet][r]);

			found[r][0] = _mm256_add_epi16(found[r][0], _mm256_unpacklo_epi8(a, b));
			found[r][1] = _mm256_add_epi16(found[r][1], _mm256_unpackhi_epi8(a, b));
		}
	}
	UNROLL
	for (uint32_t r = 0; r < n_registers; r++) {
		/* Four tokens in either half. */
		const __m256i sum =
			_mm256_add_epi16(_mm256_permute2x128_si256(found[r][0], found[r][1], 0x20),
				_mm256_permute2x128_si256(found[r][0], found[r][1], 0x31));
		const __m256i wide[2] = { _mm256_unpacklo_epi16(sum, _mm256_setzero_si256()),
			_mm256_unpackhi_epi16(sum, _mm256_setzero_si256()) };

		UNROLL
		for (uint32_t i = 0; i < 2; i++, to += LANES)
			store_f32((f32_lanes)fma_f32(
					  to_f32(wide[i]), (f_vector)twice, (f_vector)(load_f32(to) - all)),
				to);
	}
}

INLINE void sum_bits_of(const struct kv_fast_part *part, const struct kv_fast_rows *rows, uint32_t first,
	uint32_t n, uint32_t slot, const uint32_t n_slots, const struct sums_of_weights *weights,
	const uint32_t n_queries, float *const *sums)
{
	const uint32_t n_registers = n_slots / 16;
	struct asking asking = begin_asking(part, rows, first, slot, n_slots, n_queries * TOKENS / 8);
	__m256i indices[OCTETS][4];

	for (uint32_t t = 0; t < n; t += TOKENS_AT_ONCE)
		indices_of_tokens(
			rows->rows + first + t, part->offset + slot / 8, n_registers, indices + t / 8);
	for (uint32_t q = 0; q < n_queries; q++)
		add_sums(&weights[q], indices, n / 8, n_registers, &asking, sums[q] + part->slot + slot);
}

INLINE void sum_bits(const struct kv_fast_part *part, const struct kv_fast_rows *rows, const float *values,
	const float *scales, const uint32_t n_queries, float *const *sums)
{
	for (uint32_t first = 0; first < n_places(rows); first += BLOCK) {
		const uint32_t n = n_places(rows) - first < BLOCK ? n_places(rows) - first : BLOCK;
		struct sums_of_weights weights[KV_FAST_QUERIES_MAX];
		uint32_t slot = 0;

		sum_weights(values, scales, first, n, n_queries, weights);
		for (; slot + SUMS_AT_ONCE <= part->n_slots; slot += SUMS_AT_ONCE)
			sum_bits_of(part, rows, first, n, slot, SUMS_AT_ONCE, weights, n_queries, sums);
		if (slot < part->n_slots)
			sum_bits_of(part, rows, first, n, slot, SUMS_AT_ONCE / 2, weights, n_queries, sums);
	}
}

#endif

void OF_SET(kv_fast_sum_bits)(const struct kv_fast_part *part, const struct kv_fast_rows *rows,
	const float *weights, const float *scales, uint32_t n_queries, float *const *sums)
{
	if (n_queries == 1)
		sum_bits(part, rows, weights, scales, 1, sums);
	else if (n_queries == 2)
		sum_bits(part, rows, weights, scales, 2, sums);
	else
		sum_bits(part, rows, weights, scales, 4, sums);
}
