/*
 * Codes of 3, 5, 6 and 7 bits on AVX-512: scores. Included by core/fast_kernels.c only.
 *
 * Rows of eight tokens stand in the 64-bit lanes of a register. One instruction moves any eight bits of a
 * lane to a byte, so four codes of every row become words at once, wherever they begin, and meet four numbers
 * of a query. Two lanes are left to be summed up.
 */
#ifndef CORE_FAST_LANES_AVX512_H
#define CORE_FAST_LANES_AVX512_H

#define ROWS_IN_LANES 8u
/* That are taken out of 64 bits. */
#define CODES_OF_LANE(bits) ((bits) == 3 ? 16u : 8u)

/* Two lots of 64 bits of each of eight rows, the second where the codes of the first end. */
INLINE void lanes_of_rows(const uint8_t *const rows[], uint32_t offset, const uint32_t bits, __m512i lanes[2])
{
	const long long second = CODES_OF_LANE(bits) * bits / 8;
	const __m512i order = _mm512_broadcast_i32x4(
		_mm_set_epi64x(0x0706050403020100 + 0x0101010101010101 * second, 0x0706050403020100));
	__m512i words[2];

	UNROLL
	for (uint32_t r = 0; r < 2; r++) {
		words[r] = _mm512_shuffle_epi8(load_quarters(rows[r] + offset, rows[r + 2] + offset,
						       rows[r + 4] + offset, rows[r + 6] + offset),
			order);
	}
	lanes[0] = _mm512_unpacklo_epi64(words[0], words[1]);
	lanes[1] = _mm512_unpackhi_epi64(words[0], words[1]);
}

/* Codes [4 * i, + 4) of every lane, in the low bits of words. */
INLINE __m512i codes_of_lanes(__m512i lanes, const uint32_t i, const uint32_t bits)
{
	/* Bits 0, 1, 2 and 3 times `bits` from the first one on, for both bytes of a word. */
	const long long places = 0x0303020201010000 * bits + 0x0101010101010101 * (4 * i * bits);

	return _mm512_multishift_epi64_epi8(_mm512_set1_epi64(places), lanes);
}

INLINE __m512i load_four(const int16_t *from)
{
	int64_t four;

	memcpy(&four, from, sizeof(four));
	return _mm512_set1_epi64(four);
}

/* Of sixteen rows: the two halves of their lanes added up. */
INLINE __m512i add_halves_of_lanes(__m512i a, __m512i b)
{
	const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);

	return _mm512_add_epi32(_mm512_permutex2var_epi32(a, even, b),
		_mm512_permutex2var_epi32(a, _mm512_add_epi32(even, _mm512_set1_epi32(1)), b));
}

/* Rows of n_groups times eight tokens from the `turn`th place on: codes of one load after the other, then the
 * same of the rows that follow. */
INLINE void lanes_of_turn(const struct kv_fast_part *part, const uint8_t *const rows[], uint32_t turn,
	uint32_t n_loads, const uint32_t n_groups, const uint32_t bits, i_vector lanes[4][2])
{
	const uint8_t *const *from = rows + (size_t)(turn / n_loads) * n_groups * ROWS_IN_LANES;

	FORGET(from);
	UNROLL
	for (uint32_t g = 0; g < n_groups; g++)
		lanes_of_rows(from + (size_t)g * ROWS_IN_LANES,
			part->offset + turn % n_loads * CODES_OF_LANE(bits) * bits / 4, bits, lanes[g]);
}

INLINE void dot_lanes(const struct kv_fast_part *part, const struct kv_fast_rows *rows,
	const struct kv_fast_query *queries, const uint32_t n_queries, const uint32_t bits,
	const bool is_value, float *dots)
{
	const uint32_t n_groups =
		n_queries == 4 ? 2 : 4; /* of rows: eight sums hide how long a product takes */
	const uint32_t n_codes = CODES_OF_LANE(bits), n_loads = part->n_slots / (2 * n_codes);
	const uint32_t n_of_block = TOKENS / (n_groups * ROWS_IN_LANES) * n_loads;
	const uint32_t n_turns = n_places(rows) / TOKENS * n_of_block;
	const struct lookup lookup = load_lookup(part, bits);
	struct asking asking = begin_asking(part, rows, 0, 0, part->n_slots, n_of_block);
	struct touching touching = begin_touching(part, rows, 0, n_of_block);
	const uint8_t *const *from = rows->rows;
	i_vector lanes[4][2];
	uint32_t turn = 0;

	lanes_of_turn(part, from, 0, n_loads, n_groups, bits, lanes);
	for (uint32_t first = 0; first < n_places(rows); first += n_groups * ROWS_IN_LANES) {
		i_vector sums[KV_FAST_QUERIES_MAX][4] = { 0 };

		for (uint32_t load = 0; load < n_loads; load++) {
			i_vector next[4][2];

			ask(&asking);
			touch(&touching);
			/* Ahead of products that would hold them up; behind the last ones come some again. */
			turn = turn + 1 < n_turns ? turn + 1 : 0;
			lanes_of_turn(part, from, turn, n_loads, n_groups, bits, next);
			UNROLL
			for (uint32_t i = 0; i < 2 * n_codes / 4; i++) {
				i_vector values[4];

				UNROLL
				for (uint32_t g = 0; g < n_groups; g++)
					values[g] = value_of(&lookup,
						codes_of_lanes(
							lanes[g][i / (n_codes / 4)], i % (n_codes / 4), bits),
						bits, is_value);
				UNROLL
				for (uint32_t q = 0; q < n_queries; q++) {
					const i_vector four = load_four(queries[q].codes + part->slot +
						(size_t)load * 2 * n_codes + 4 * i);

					UNROLL
					for (uint32_t g = 0; g < n_groups; g++)
						sums[q][g] = multiply_add(sums[q][g], values[g], four);
				}
			}
			memcpy(lanes, next, sizeof(lanes));
		}
		UNROLL
		for (uint32_t q = 0; q < n_queries; q++) {
			UNROLL
			for (uint32_t g = 0; g < n_groups; g += 2)
				store_f32((f32_lanes)to_f32(add_halves_of_lanes(sums[q][g], sums[q][g + 1])),
					dots + (size_t)q * STEP + first + (size_t)g * ROWS_IN_LANES);
		}
	}
}

#endif
