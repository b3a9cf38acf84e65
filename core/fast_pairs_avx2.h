/*
 * Codes of all widths on AVX2 but those of core/fast_nibbles_avx2.h: scores. Included by core/fast_kernels.c
 * only, after that one.
 *
 * As there, a register holds the same channels of two rows, and values are made one register of codes ahead
 * of the products that wait for them.
 */
#ifndef CORE_FAST_PAIRS_AVX2_H
#define CORE_FAST_PAIRS_AVX2_H

/* Half `half` of 32 channels of a pair of rows: sixteen codes of each, a byte each, in the order of slots. */
INLINE __m256i codes_of_pair(struct row_pair pair, uint32_t block, const uint32_t half, const uint32_t bits,
	const enum meaning meaning)
{
	const uint32_t at = (block * 2 + half) * 2 * bits;

	if (bits == 2) {
		/* Eight bytes of either row twice, of which the second is shifted by one code. */
		const __m256i words =
			_mm256_blend_epi32(_mm256_set1_epi64x(word_64(pair.rows[0] + (size_t)block * 8)),
				_mm256_set1_epi64x(word_64(pair.rows[1] + (size_t)block * 8)), 0xF0);

		return _mm256_and_si256(
			_mm256_srlv_epi64(
				words, _mm256_set_epi64x(4 * half + 2, 4 * half, 4 * half + 2, 4 * half)),
			_mm256_set1_epi8(3));
	}
	return codes_in_bytes(pair.rows[0] + at, pair.rows[1] + at, bits, meaning == WHOLE_NUMBERS);
}

INLINE void values_of_pair(const struct lookup *lookup, struct row_pair pair, uint32_t block,
	const uint32_t half, const uint32_t bits, const enum meaning meaning, __m256i values[2])
{
	const uint32_t at = (block * 2 + half) * 2 * bits;

	if (meaning == SMOOTH) {
		values_of_two(lookup->pieces, pair.rows[0] + at, pair.rows[1] + at, bits, false, values);
		return;
	}
	if (bits == 6) {
		values_of_mirrored(lookup->pieces, pair.rows[0] + at, pair.rows[1] + at, false, values);
		return;
	}

	const __m256i codes = codes_of_pair(pair, block, half, bits, meaning);

	if (meaning == E4M3) {
		values_of_e4m3(codes, values);
	} else if (meaning == WHOLE_NUMBERS) {
		values[0] = _mm256_unpacklo_epi8(codes, _mm256_setzero_si256());
		values[1] = _mm256_unpackhi_epi8(codes, _mm256_setzero_si256());
	} else {
		values_of_bytes(lookup, codes, bits, false, values);
	}
}

INLINE __m256i add_product(__m256i sum, __m256i a, const __m256i *b)
{
	__m256i product;

	/* Written out as in multiply_add(), with one factor from memory. */
	__asm__("vpmaddwd %2, %1, %0" : "=x"(product) : "x"(a), "m"(*b));
	__asm__("vpaddd %1, %0, %0" : "+x"(sum) : "x"(product));
	return sum;
}

INLINE void add_products(
	const __m256i values[2], const __m256i *factors, const uint32_t n_queries, __m256i *sums)
{
	UNROLL
	for (uint32_t i = 0; i < 2; i++) {
		UNROLL
		for (uint32_t q = 0; q < n_queries; q++)
			sums[q] = add_product(sums[q], values[i], &factors[i * n_queries + q]);
	}
}

/*
 * sums[q] of the products of the pair's rows; *ahead are values of its first sixteen codes, and then those of
 * the pair that is `next`.
 */
INLINE void dot_codes_of_pair(const struct lookup *lookup, const __m256i *factors, struct row_pair pair,
	struct row_pair next, uint32_t n_blocks, const uint32_t n_queries, const uint32_t bits,
	const enum meaning meaning, __m256i ahead[2], __m256i *sums)
{
	for (uint32_t block = 0; block < n_blocks; block++) {
		const bool is_last = block + 1 == n_blocks;

		UNROLL
		for (uint32_t half = 0; half < 2; half++) {
			const __m256i now[2] = { ahead[0], ahead[1] };

			values_of_pair(lookup, half == 1 && is_last ? next : pair,
				half == 0         ? block
					: is_last ? 0
						  : block + 1,
				1 - half, bits, meaning, ahead);
			add_products(now, factors + half * 2 * n_queries, n_queries, sums);
		}
		factors += 4 * n_queries;
	}
}

/* Sixteen registers do not hold sums beside what looking up these takes: their values go to memory. */
#define IS_APART(bits, meaning) ((bits) > 6 && (meaning) <= SMOOTH)

INLINE void dot_values_of_pair(const struct lookup *lookup, const __m256i *factors, struct row_pair pair,
	uint32_t n_blocks, const uint32_t n_queries, const uint32_t bits, const enum meaning meaning,
	__m256i *sums)
{
	__m256i values[KV_HEAD_DIM_MAX / 16][2];

	for (uint32_t block = 0; block < n_blocks; block++) {
		UNROLL
		for (uint32_t half = 0; half < 2; half++)
			values_of_pair(lookup, pair, block, half, bits, meaning, values[block * 2 + half]);
	}
	for (uint32_t i = 0; i < n_blocks * 2; i++)
		add_products(values[i], factors + (size_t)i * 2 * n_queries, n_queries, sums);
}

/* Four registers of sums, of so many queries and pairs of rows, are finished together. */
INLINE void dot_pairs(const struct kv_fast_part *part, const struct kv_fast_rows *rows, uint32_t block_first,
	const struct kv_fast_query *queries, const uint32_t n_queries, const uint32_t bits,
	const enum meaning meaning, float *dots)
{
	const struct lookup lookup = load_lookup(part, bits);
	const uint32_t n_blocks = part->n_slots / 32, n_pairs = 4 / n_queries;
	const uint8_t *const *from = rows->rows + block_first;
	struct asking asking = begin_asking(part, rows, block_first, 0, part->n_slots, TOKENS / 2);
	struct row_pair pair = pair_at(part, from, 0);
	__m256i factors[KV_HEAD_DIM_MAX / KV_FAST_ROW_WORDS * KV_FAST_QUERIES_MAX];
	__m256i values[2];
	uint32_t next = 1;

	for (uint32_t v = 0; v < 4 * n_blocks; v++) {
		UNROLL
		for (uint32_t q = 0; q < n_queries; q++)
			factors[v * n_queries + q] =
				repeat_words(queries[q].codes + part->slot + (size_t)v * KV_FAST_ROW_WORDS);
	}
	values_of_pair(&lookup, pair, 0, 0, bits, meaning, values);
	for (uint32_t first = block_first; first < end_of_block(rows, block_first); first += 8) {
		__m256i quads[KV_FAST_QUERIES_MAX];

		for (uint32_t s = 0; s < n_queries; s++) {
			__m256i sums[4] = { 0 };

			UNROLL
			for (uint32_t p = 0; p < n_pairs; p++) {
				const struct row_pair after = pair_at(part, from, next++ % (TOKENS / 2));

				ask(&asking);
				if (IS_APART(bits, meaning))
					dot_values_of_pair(&lookup, factors, pair, n_blocks, n_queries, bits,
						meaning, sums + (size_t)p * n_queries);
				else
					dot_codes_of_pair(&lookup, factors, pair, after, n_blocks, n_queries,
						bits, meaning, values, sums + (size_t)p * n_queries);
				pair = after;
			}
			quads[s] = add_lanes_of_rows(sums);
		}
		store_quads(quads, first, n_queries, dots);
	}
}

#endif
