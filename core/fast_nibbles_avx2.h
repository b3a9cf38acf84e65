/*
 * 4-bit codes in shifted order on AVX2: scores. Included by core/fast_kernels.c only.
 *
 * A register holds the same channels of two rows, so that few lanes are left to be summed up. The values that
 * come next are looked up between the products of those that are there, in an order that is written out:
 * where lookups stand in front of the products that wait for them, both take a seventh longer
 * (core/DESIGN.md, Fast decodes).
 */
#ifndef CORE_FAST_NIBBLES_AVX2_H
#define CORE_FAST_NIBBLES_AVX2_H

#define NIBBLES_MASK _mm256_set1_epi8(15)

INLINE __m256i upper_nibbles(__m256i words)
{
	return _mm256_and_si256(_mm256_srli_epi16(words, 4), NIBBLES_MASK);
}

/*
 * sums[q] += products of values[i] with factors[i * n_queries + q]; then values of `codes`, a byte each, take
 * the place of these: those of the lower halves of 16 bytes, and those of the upper ones.
 */
INLINE void multiply_and_expand(const struct lookup *lookup, __m256i codes, const __m256i *factors,
	const uint32_t n_queries, __m256i values[2], __m256i *sums)
{
	__m256i low, a, b;

	if (n_queries < 4) {
		UNROLL
		for (uint32_t i = 0; i < 2; i++) {
			UNROLL
			for (uint32_t q = 0; q < n_queries; q++)
				sums[q] = multiply_add(sums[q], values[i], factors[i * n_queries + q]);
		}
		expand_codes(lookup, codes, values);
		return;
	}
#define PRODUCTS_OF_TWO(value, at, sum_0, sum_1)                   \
	"vpmaddwd " #at "(%[factors]), %[" #value "], %[a]\n\t"    \
	"vpmaddwd 32+" #at "(%[factors]), %[" #value "], %[b]\n\t" \
	"vpaddd %[a], %[" #sum_0 "], %[" #sum_0 "]\n\t"            \
	"vpaddd %[b], %[" #sum_1 "], %[" #sum_1 "]\n\t"
	__asm__("vpshufb %[codes], %[low_bytes], %[low]\n\t"
		"vpshufb %[codes], %[high_bytes], %[codes]\n\t" /* clang-format off */
		PRODUCTS_OF_TWO(v0, 0, s0, s1)
		PRODUCTS_OF_TWO(v0, 64, s2, s3)
		"vpunpcklbw %[codes], %[low], %[v0]\n\t"
		PRODUCTS_OF_TWO(v1, 128, s0, s1)
		PRODUCTS_OF_TWO(v1, 192, s2, s3)
		"vpunpckhbw %[codes], %[low], %[v1]" /* clang-format on */
		: [codes] "+&x"(codes), [v0] "+&x"(values[0]), [v1] "+&x"(values[1]), [s0] "+&x"(sums[0]),
		[s1] "+&x"(sums[1]), [s2] "+&x"(sums[2]), [s3] "+&x"(sums[3]), [low] "=&x"(low), [a] "=&x"(a),
		[b] "=&x"(b)
		: [low_bytes] "x"(lookup->low), [high_bytes] "x"(lookup->high), [factors] "r"(factors),
		"m"(*(const __m256i(*)[8])factors));
#undef PRODUCTS_OF_TWO
}

/* Where the words of a pair of rows begin. */
struct row_pair {
	const uint8_t *rows[2];
};

INLINE struct row_pair pair_at(const struct kv_fast_part *part, const uint8_t *const rows[], uint32_t pair)
{
	/* Rows r and r + 4, so that sums of eight rows are put in order within halves of registers. */
	const uint8_t *const *from = rows + pair / 4 * 8 + pair % 4;

	return (struct row_pair){ { from[0] + part->offset, from[4] + part->offset } };
}

/*
 * sums[q] of the products of the pair's rows, in the two halves of registers. *words and values are those of
 * its first block, and then those of the pair that is `next`.
 */
INLINE void dot_pair(const struct lookup *lookup, const __m256i *factors, struct row_pair pair,
	struct row_pair next, uint32_t n_blocks, const uint32_t n_queries, struct asking *asking,
	struct touching *touching, __m256i *words, __m256i values[2], __m256i *sums)
{
	ask(asking);
	for (uint32_t block = 1; block <= n_blocks; block++) {
		const __m256i upper = upper_nibbles(*words);

		touch(touching);
		*words = block < n_blocks ? words_of_rows(pair.rows, block * 2 * KV_FAST_ROW_WORDS)
					  : words_of_rows(next.rows, 0);
		multiply_and_expand(lookup, upper, factors, n_queries, values, sums);
		multiply_and_expand(lookup, _mm256_and_si256(*words, NIBBLES_MASK), factors + 2 * n_queries,
			n_queries, values, sums);
		factors += 4 * n_queries;
	}
}

/* Dots of eight rows: quads[s] has sums of rows [s * 4 / n_queries, + 4 / n_queries) and those four further.
 */
INLINE void store_quads(const __m256i *quads, uint32_t first, const uint32_t n_queries, float *dots)
{
	__m256 wide[4], out[4];

	UNROLL
	for (uint32_t s = 0; s < n_queries; s++)
		wide[s] = _mm256_cvtepi32_ps(quads[s]);
	if (n_queries == 1) {
		out[0] = wide[0];
	} else if (n_queries == 2) {
		out[0] = _mm256_shuffle_ps(wide[0], wide[1], 0x88);
		out[1] = _mm256_shuffle_ps(wide[0], wide[1], 0xDD);
	} else {
		const __m256 a = _mm256_unpacklo_ps(wide[0], wide[1]),
			     b = _mm256_unpackhi_ps(wide[0], wide[1]),
			     c = _mm256_unpacklo_ps(wide[2], wide[3]),
			     d = _mm256_unpackhi_ps(wide[2], wide[3]);

		out[0] = _mm256_shuffle_ps(a, c, 0x44);
		out[1] = _mm256_shuffle_ps(a, c, 0xEE);
		out[2] = _mm256_shuffle_ps(b, d, 0x44);
		out[3] = _mm256_shuffle_ps(b, d, 0xEE);
	}
	UNROLL
	for (uint32_t q = 0; q < n_queries; q++)
		_mm256_storeu_ps(dots + (size_t)q * STEP + first, out[q]);
}

/* Four registers of sums, of so many queries and pairs of rows, are finished together. */
INLINE void dot_shifted(const struct kv_fast_part *part, const struct kv_fast_rows *rows,
	uint32_t block_first, const struct kv_fast_query *queries, const uint32_t n_queries,
	const uint32_t bits, const bool is_value, float *dots)
{
	const struct lookup lookup = load_lookup(part, 4);
	const uint32_t n_blocks = part->n_slots / (4 * KV_FAST_ROW_WORDS), n_pairs = 4 / n_queries;
	const uint8_t *const *from = rows->rows + block_first;
	struct asking asking = begin_asking(part, rows, block_first, 0, part->n_slots, TOKENS / 2);
	struct touching touching = begin_touching(part, rows, block_first, TOKENS / 2 * n_blocks);
	struct row_pair pair = pair_at(part, from, 0);
	__m256i factors[KV_HEAD_DIM_MAX / KV_FAST_ROW_WORDS * KV_FAST_QUERIES_MAX];
	__m256i words = words_of_rows(pair.rows, 0), values[2];
	uint32_t next = 1;

	(void)bits; /* 4 */
	(void)is_value;
	for (uint32_t v = 0; v < 4 * n_blocks; v++) {
		UNROLL
		for (uint32_t q = 0; q < n_queries; q++)
			factors[v * n_queries + q] =
				repeat_words(queries[q].codes + part->slot + (size_t)v * KV_FAST_ROW_WORDS);
	}
	expand_codes(&lookup, _mm256_and_si256(words, NIBBLES_MASK), values);
	for (uint32_t first = block_first; first < end_of_block(rows, block_first); first += 8) {
		__m256i quads[KV_FAST_QUERIES_MAX];

		for (uint32_t s = 0; s < n_queries; s++) {
			__m256i sums[4] = { 0 };

			UNROLL
			for (uint32_t p = 0; p < n_pairs; p++) {
				const struct row_pair after = pair_at(part, from, next++ % (TOKENS / 2));

				dot_pair(&lookup, factors, pair, after, n_blocks, n_queries, &asking,
					&touching, &words, values, sums + (size_t)p * n_queries);
				pair = after;
			}
			quads[s] = add_lanes_of_rows(sums);
		}
		store_quads(quads, first, n_queries, dots);
	}
}

#endif
