/*
 * 4-bit codes in shifted order on AVX2: scores. Included by core/fast_kernels.c only.
 *
 * A register holds the same channels of two rows, so that few lanes are left to be summed up. The values that
 * come next are looked up between the products of those that are there, in an order that is written out:
 * where lookups stand in front of the products that wait for them, both take a seventh longer
 * (core/FAST.md).
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
 * the place of these: those of the lower halves of 16 bytes, and those of the upper ones. is_first: the sums
 * begin here, with products that are added to nothing.
 */
INLINE void multiply_and_expand(const struct lookup *lookup, __m256i codes, const __m256i *factors,
	const uint32_t n_queries, const bool is_first, __m256i values[2], __m256i *sums)
{
	__m256i low, a, b;

	if (n_queries < 4) {
		UNROLL
		for (uint32_t i = 0; i < 2; i++) {
			UNROLL
			for (uint32_t q = 0; q < n_queries; q++)
				sums[q] = multiply_add(is_first && i == 0 ? _mm256_setzero_si256() : sums[q],
					values[i], factors[i * n_queries + q]);
		}
		expand_codes(lookup, codes, values);
		return;
	}
#define LOOK_UP                                      \
	"vpshufb %[codes], %[low_bytes], %[low]\n\t" \
	"vpshufb %[codes], %[high_bytes], %[codes]\n\t"
#define FIRST_OF_TWO(value, at, sum_0, sum_1)                            \
	"vpmaddwd " #at "(%[factors]), %[" #value "], %[" #sum_0 "]\n\t" \
	"vpmaddwd 32+" #at "(%[factors]), %[" #value "], %[" #sum_1 "]\n\t"
#define PRODUCTS_OF_TWO(value, at, sum_0, sum_1)                   \
	"vpmaddwd " #at "(%[factors]), %[" #value "], %[a]\n\t"    \
	"vpmaddwd 32+" #at "(%[factors]), %[" #value "], %[b]\n\t" \
	"vpaddd %[a], %[" #sum_0 "], %[" #sum_0 "]\n\t"            \
	"vpaddd %[b], %[" #sum_1 "], %[" #sum_1 "]\n\t"
#define PRODUCTS(of_two)                                                                                  \
	LOOK_UP                                                                                           \
	of_two(v0, 0, s0, s1) of_two(                                                                     \
		v0, 64, s2, s3) "vpunpcklbw %[codes], %[low], %[v0]\n\t" PRODUCTS_OF_TWO(v1, 128, s0, s1) \
		PRODUCTS_OF_TWO(v1, 192, s2, s3) "vpunpckhbw %[codes], %[low], %[v1]"
#define OPERANDS                                                                                    \
	[low] "=&x"(low), [a] "=&x"(a),                                                             \
		[b] "=&x"(b)                                                                        \
	    : [low_bytes] "x"(lookup->low), [high_bytes] "x"(lookup->high), [factors] "r"(factors), \
	      "m"(*(const __m256i(*)[8])factors)
	if (is_first)
		__asm__(PRODUCTS(FIRST_OF_TWO)
			: [codes] "+&x"(codes), [v0] "+&x"(values[0]), [v1] "+&x"(values[1]),
			[s0] "=&x"(sums[0]), [s1] "=&x"(sums[1]), [s2] "=&x"(sums[2]), [s3] "=&x"(sums[3]),
			OPERANDS);
	else
		__asm__(PRODUCTS(PRODUCTS_OF_TWO)
			: [codes] "+&x"(codes), [v0] "+&x"(values[0]), [v1] "+&x"(values[1]),
			[s0] "+&x"(sums[0]), [s1] "+&x"(sums[1]), [s2] "+&x"(sums[2]), [s3] "+&x"(sums[3]),
			OPERANDS);
#undef OPERANDS
#undef PRODUCTS
#undef PRODUCTS_OF_TWO
#undef FIRST_OF_TWO
#undef LOOK_UP
}

/* Where the words of a pair of rows begin. */
struct row_pair {
	const uint8_t *rows[2];
};

/* Rows r and r + 4, so that sums of eight rows are put in order within halves of registers. */
INLINE struct row_pair pair_at(const struct kv_fast_part *part, const uint8_t *const rows[], uint32_t pair)
{
	const uint8_t *const *from = rows + pair / 4 * 8 + pair % 4;

	return (struct row_pair){ { from[0] + part->offset, from[4] + part->offset } };
}

/* A block of both rows: *words and values are the block's, and then those of the block that is at `next`. */
INLINE void dot_block(const struct lookup *lookup, const __m256i *factors, const uint8_t *const next[2],
	uint32_t next_offset, const uint32_t n_queries, const bool is_first, __m256i *words,
	__m256i values[2], __m256i *sums)
{
	const __m256i upper = upper_nibbles(*words);

	*words = words_of_rows(next, next_offset);
	multiply_and_expand(lookup, upper, factors, n_queries, is_first, values, sums);
	multiply_and_expand(lookup, _mm256_and_si256(*words, NIBBLES_MASK), factors + 2 * n_queries,
		n_queries, false, values, sums);
}

/*
 * sums[q] of the products of the pair's rows, in the two halves of registers. *words and values are those of
 * its first block, and then those of the pair that is `next`.
 */
INLINE void dot_pair(const struct lookup *lookup, const __m256i *factors, struct row_pair pair,
	struct row_pair next, const uint32_t n_blocks, const uint32_t n_queries, __m256i *words,
	__m256i values[2], __m256i *sums)
{
	const uint32_t block_bytes = 2 * KV_FAST_ROW_WORDS;

	if (n_blocks == 1) {
		dot_block(lookup, factors, next.rows, 0, n_queries, true, words, values, sums);
		return;
	}
	dot_block(lookup, factors, pair.rows, block_bytes, n_queries, true, words, values, sums);
	UNROLL_4
	for (uint32_t block = 1; block < n_blocks - 1; block++)
		dot_block(lookup, factors + (size_t)block * 4 * n_queries, pair.rows,
			(block + 1) * block_bytes, n_queries, false, words, values, sums);
	dot_block(lookup, factors + (size_t)(n_blocks - 1) * 4 * n_queries, next.rows, 0, n_queries, false,
		words, values, sums);
}

/* Dots of eight rows: quads[s] has sums of rows [s * 4 / n_queries, + 4 / n_queries) and those four further.
 */
INLINE void join_quads_of_rows(const __m256i *quads, const uint32_t n_queries, f32_lanes *out)
{
	__m256 wide[4];

	UNROLL
	for (uint32_t s = 0; s < n_queries; s++)
		wide[s] = _mm256_cvtepi32_ps(quads[s]);
	if (n_queries == 1) {
		out[0] = (f32_lanes)wide[0];
	} else if (n_queries == 2) {
		out[0] = (f32_lanes)_mm256_shuffle_ps(wide[0], wide[1], 0x88);
		out[1] = (f32_lanes)_mm256_shuffle_ps(wide[0], wide[1], 0xDD);
	} else {
		const __m256 a = _mm256_unpacklo_ps(wide[0], wide[1]),
			     b = _mm256_unpackhi_ps(wide[0], wide[1]),
			     c = _mm256_unpacklo_ps(wide[2], wide[3]),
			     d = _mm256_unpackhi_ps(wide[2], wide[3]);

		out[0] = (f32_lanes)_mm256_shuffle_ps(a, c, 0x44);
		out[1] = (f32_lanes)_mm256_shuffle_ps(a, c, 0xEE);
		out[2] = (f32_lanes)_mm256_shuffle_ps(b, d, 0x44);
		out[3] = (f32_lanes)_mm256_shuffle_ps(b, d, 0xEE);
	}
}

/* The same into dots[query * STEP + row], of eight rows from `first` on. */
INLINE void store_quads(const __m256i *quads, uint32_t first, const uint32_t n_queries, float *dots)
{
	f32_lanes out[KV_FAST_QUERIES_MAX];

	join_quads_of_rows(quads, n_queries, out);
	UNROLL
	for (uint32_t q = 0; q < n_queries; q++)
		store_f32(out[q], dots + (size_t)q * STEP + first);
}

/*
 * Of all rows at once. Four registers of sums, of so many queries and pairs of rows, are finished together.
 * units: of the queries' part where the row's scale, a float32, is all that is missing; NULL: products are
 * left as they are.
 */
INLINE void dot_nibbles(const struct kv_fast_part *part, const struct kv_fast_rows *rows,
	const struct kv_fast_query *queries, const uint32_t n_queries, const uint32_t n_blocks,
	const float *units, float *dots)
{
	const struct lookup lookup = load_lookup(part, 4);
	const uint32_t n_pairs = 4 / n_queries;
	const uint32_t n_pairs_all = n_places(rows) / 2;
	/* As touch() does, by the pointers that are there: the last byte of the row of the next call. */
	const bool is_due = part->slot == 0 && rows->row_bytes <= TOUCHED_BYTES_MAX;
	const size_t last = rows->offset + (is_due ? 2 : 1) * rows->row_bytes - 1 - part->offset;
	struct asking asking = { NULL, 0, 0 };
	struct row_pair pair = pair_at(part, rows->rows, 0);
	__m256i factors[KV_HEAD_DIM_MAX / KV_FAST_ROW_WORDS * KV_FAST_QUERIES_MAX];
	__m256i words = words_of_rows(pair.rows, 0), values[2];
	uint32_t next = 1;

	for (uint32_t v = 0; v < 4 * n_blocks; v++) {
		UNROLL
		for (uint32_t q = 0; q < n_queries; q++)
			factors[v * n_queries + q] =
				repeat_words(queries[q].codes + part->slot + (size_t)v * KV_FAST_ROW_WORDS);
	}
	expand_codes(&lookup, _mm256_and_si256(words, NIBBLES_MASK), values);
	for (uint32_t first = 0; first < rows->n_rows; first += 8) {
		__m256i quads[KV_FAST_QUERIES_MAX];
		f32_lanes out[KV_FAST_QUERIES_MAX];

		if (first % TOKENS == 0) {
			asking = begin_asking(part, rows, first, 0, part->n_slots, TOKENS / 2 + 1);
			ask(&asking);
		}
		UNROLL
		for (uint32_t s = 0; s < n_queries; s++) {
			__m256i sums[4];

			UNROLL
			for (uint32_t p = 0; p < n_pairs; p++, next++) {
				const struct row_pair after =
					pair_at(part, rows->rows, next < n_pairs_all ? next : 0);

				ask(&asking);
				UNROLL
				for (uint32_t r = 0; r < 2; r++) {
					__builtin_prefetch(after.rows[r] + last);
					if (n_blocks > 4)
						__builtin_prefetch(after.rows[r] + last - 64);
				}
				dot_pair(&lookup, factors, pair, after, n_blocks, n_queries, &words, values,
					sums + (size_t)p * n_queries);
				pair = after;
			}
			quads[s] = add_lanes_of_rows(sums);
		}
		join_quads_of_rows(quads, n_queries, out);
		const f32_lanes scale =
			units ? singles_of_rows(rows, first, part->scale.offset) : repeat_f32(1);

		UNROLL
		for (uint32_t q = 0; q < n_queries; q++)
			store_f32(units ? out[q] * repeat_f32(units[q]) * scale : out[q],
				dots + (size_t)q * STEP + first);
	}
}

#endif
