/*
 * Scores over packed rows, compiled once per instruction set (core/fast.h).
 *
 * A score is a sum over channels, so the products of a row and a query fill the lanes of a register, and the
 * registers of several rows and queries are summed up together at the end. A row is taken apart once for up
 * to four queries.
 */
#include "core/fast_set.h"

/* dots[query * STEP + row] of n_queries queries and LANES / n_queries rows from `first` on. */
INLINE void store_dots(f_vector sums, uint32_t first, const uint32_t n_queries, float *dots)
{
	const uint32_t n_rows = LANES / n_queries;
	float lanes[LANES];

	memcpy(lanes, &sums, sizeof(lanes));
	UNROLL
	for (uint32_t q = 0; q < n_queries; q++)
		memcpy(dots + (size_t)q * STEP + first, lanes + (size_t)q * n_rows, n_rows * sizeof(*dots));
}

#if LANES == 16

/* Adds the products of register v of the queries with `values` of n_rows rows. */
INLINE void add_products(const struct kv_fast_part *part, const struct kv_fast_query *queries, uint32_t v,
	const i_vector *values, const uint32_t n_queries, i_vector *sums)
{
	const uint32_t n_rows = LANES / n_queries;

	UNROLL
	for (uint32_t q = 0; q < n_queries; q++) {
		const i_vector codes = load_words(queries[q].codes + part->slot + (size_t)v * WORDS);

		UNROLL
		for (uint32_t r = 0; r < n_rows; r++)
			sums[q * n_rows + r] = multiply_add(sums[q * n_rows + r], values[r], codes);
	}
}

/*
 * Codes in shifted order. A lane is a row, so no lanes are left to be summed up: 32 bits of sixteen rows
 * stand in a register, each shift of them gives two codes, and these meet two numbers of a query.
 */
INLINE void dot_shifted(const struct kv_fast_part *part, const struct kv_fast_rows *rows,
	uint32_t block_first, const struct kv_fast_query *queries, const uint32_t n_queries,
	const uint32_t bits, const bool is_value, float *dots)
{
	enum { N_GROUPS = TOKENS / LANES };
	const struct lookup lookup = load_lookup(part, bits);
	const uint32_t n_turns = n_queries == 1 ? 2 : 1; /* sums in turn: a product takes four cycles */
	const uint32_t per_word = 16 / bits, n_quads = part->n_slots * bits / 32;
	i_vector sums[N_GROUPS][2 * KV_FAST_QUERIES_MAX] = { 0 };
	const uint8_t *const *from = rows->rows + block_first;
	struct asking asking = begin_asking(part, rows, block_first, 0, part->n_slots, n_quads);
	struct touching touching = begin_touching(part, rows, block_first, n_quads);

	for (uint32_t block = 0; block < (n_quads + 3) / 4; block++) {
		i_vector quads[N_GROUPS][4], two[N_GROUPS][2];

		FORGET(from);
		UNROLL
		for (uint32_t g = 0; g < N_GROUPS; g++)
			quads_of_rows(from + (size_t)g * LANES, part->offset + block * 16, quads[g]);
		UNROLL_64
		for (uint32_t i = 0; i < 4 * per_word; i++) {
			i_vector values[N_GROUPS];

			if (i % per_word == 0) {
				if (block * 4 + i / per_word == n_quads)
					break;
				ask(&asking);
				touch(&touching);
			}
			UNROLL
			for (uint32_t g = 0; g < N_GROUPS; g++) {
				const i_vector codes =
					shift_down(quads[g][i / per_word], i % per_word * bits);

				if (bits < 8 || is_value) {
					values[g] = value_of(&lookup, codes, bits, is_value);
				} else if (i % 2 == 0) {
					look_up_words(&lookup, codes, two[g]);
					values[g] = two[g][0];
				} else {
					values[g] = two[g][1];
				}
			}
			UNROLL
			for (uint32_t q = 0; q < n_queries; q++) {
				const i_vector pair = load_pair(
					queries[q].codes + part->slot + (size_t)block * (128 / bits) + 2 * i);

				UNROLL
				for (uint32_t g = 0; g < N_GROUPS; g++)
					sums[g][q * 2 + i % n_turns] =
						multiply_add(sums[g][q * 2 + i % n_turns], values[g], pair);
			}
		}
	}
	UNROLL
	for (uint32_t q = 0; q < n_queries; q++) {
		UNROLL
		for (uint32_t g = 0; g < N_GROUPS; g++) {
			const i_vector sum = n_turns == 1
				? sums[g][q * 2]
				: (i_vector)((i32_lanes)sums[g][q * 2] + (i32_lanes)sums[g][q * 2 + 1]);

			store_f32((f32_lanes)to_f32(sum),
				dots + (size_t)q * STEP + block_first + (size_t)g * LANES);
		}
	}
}

INLINE void dot_natural(const struct kv_fast_part *part, const struct lookup *lookup,
	const uint8_t *const rows[], const struct kv_fast_query *queries, const uint32_t n_queries,
	const uint32_t bits, const bool is_value, struct asking *asking, i_vector *sums)
{
	const uint32_t n_rows = LANES / n_queries;

	for (uint32_t v = 0; v < part->n_slots / WORDS; v++) {
		i_vector values[LANES];

		ask(asking);
		UNROLL
		for (uint32_t r = 0; r < n_rows; r += 2)
			values_of_rows(lookup, rows[r] + part->offset, rows[r + 1] + part->offset, v, bits,
				is_value, values + r);
		add_products(part, queries, v, values, n_queries, sums);
	}
}

INLINE void dot_codes(const struct kv_fast_part *part, const struct kv_fast_rows *rows, uint32_t block_first,
	const struct kv_fast_query *queries, const uint32_t n_queries, const uint32_t bits,
	const bool is_value, float *dots)
{
	const struct lookup lookup = load_lookup(part, bits);
	struct asking asking = begin_asking(part, rows, block_first, 0, part->n_slots,
		TOKENS * n_queries / LANES * part->n_slots / WORDS);

	for (uint32_t first = block_first; first < end_of_block(rows, block_first);
		first += LANES / n_queries) {
		i_vector sums[LANES] = { 0 };

		dot_natural(
			part, &lookup, rows->rows + first, queries, n_queries, bits, is_value, &asking, sums);
		store_dots(to_f32(add_lanes(sums)), first, n_queries, dots);
	}
}

#include "core/fast_lanes_avx512.h"

#else
#include "core/fast_nibbles_avx2.h"
#include "core/fast_pairs_avx2.h"
#endif

/* Adds the products of the queries with LANES numbers of some rows, those of register v of slots from i on.
 */
INLINE void add_numbers(const uint8_t *const from[], const float *const numbers[], uint32_t i,
	const uint32_t v, const uint32_t n_queries, const enum kv_dtype number, const bool is_shifted,
	f_vector *sums)
{
	const uint32_t n_rows = LANES / n_queries;
	f_vector values[LANES];

	UNROLL
	for (uint32_t r = 0; r < n_rows; r++)
		/* AVX2 loads words of a bf16 once for either half; AVX-512 gains from not holding them. */
		values[r] = is_shifted && LANES == 8 ? bf16_of_words(from[r] + (size_t)i * 2, v)
						     : numbers_of(from[r], i + v * LANES, number, is_shifted);
	UNROLL
	for (uint32_t q = 0; q < n_queries; q++) {
		/* Loaded once, where a compiler would load it for every row: a cycle has two loads. */
		const f_vector query = held((f_vector)load_f32(numbers[q] + i + v * LANES));

		UNROLL
		for (uint32_t r = 0; r < n_rows; r++)
			sums[q * n_rows + r] = fma_f32(values[r], query, sums[q * n_rows + r]);
	}
}

INLINE void dot_numbers(const struct kv_fast_part *part, const struct kv_fast_rows *rows,
	uint32_t block_first, const struct kv_fast_query *queries, const uint32_t n_queries,
	const enum kv_dtype number, const bool is_shifted, float *dots)
{
	const uint32_t n_rows = LANES / n_queries, n_vectors = is_shifted ? 2 : 1;
	const uint32_t n_slots = part->n_slots;
	struct asking asking = begin_asking(
		part, rows, block_first, 0, n_slots, TOKENS / n_rows * n_slots / (n_vectors * LANES));
	const float *numbers[KV_FAST_QUERIES_MAX];

	UNROLL
	for (uint32_t q = 0; q < n_queries; q++)
		numbers[q] = queries[q].numbers + part->slot;
	for (uint32_t first = block_first; first < end_of_block(rows, block_first); first += n_rows) {
		const uint8_t *from[LANES];
		f_vector sums[LANES] = { 0 };

		UNROLL
		for (uint32_t r = 0; r < n_rows; r++)
			from[r] = rows->rows[first + r] + part->offset;
		for (uint32_t i = 0; i < n_slots; i += n_vectors * LANES) {
			ask(&asking);
			UNROLL
			for (uint32_t v = 0; v < n_vectors; v++)
				add_numbers(from, numbers, i, v, n_queries, number, is_shifted, sums);
		}
		store_dots(add_lanes_f32(sums), first, n_queries, dots);
	}
}

INLINE void dot_part(const struct kv_fast_part *part, const struct kv_fast_rows *rows,
	const struct kv_fast_query *queries, const uint32_t n_queries, float *dots)
{
#define EACH_BLOCK for (uint32_t first = 0; first < n_places(rows); first += TOKENS)
/* Bits that no set takes in shifted order, and those that AVX-512 does. */
#if LANES == 16
#define DOT(bits) dot_lanes(part, rows, queries, n_queries, bits, false, dots)
#define DOT_EITHER(bits, is_value)                                                                 \
	EACH_BLOCK(part->is_shifted                                                                \
			? dot_shifted(part, rows, first, queries, n_queries, bits, is_value, dots) \
			: dot_codes(part, rows, first, queries, n_queries, bits, is_value, dots))
#else
#define DOT(bits) EACH_BLOCK dot_pairs(part, rows, first, queries, n_queries, bits, ENTRIES, dots)
#define DOT_EITHER(bits, is_value) \
	EACH_BLOCK                 \
	dot_pairs(part, rows, first, queries, n_queries, bits, (is_value) ? WHOLE_NUMBERS : ENTRIES, dots)
#endif
	if (part->kind == KV_FAST_NUMBERS) {
		if (part->number == KV_DTYPE_F32)
			EACH_BLOCK dot_numbers(
				part, rows, first, queries, n_queries, KV_DTYPE_F32, false, dots);
		else if (part->number == KV_DTYPE_F16)
			EACH_BLOCK dot_numbers(
				part, rows, first, queries, n_queries, KV_DTYPE_F16, false, dots);
		else if (part->is_shifted)
			EACH_BLOCK dot_numbers(
				part, rows, first, queries, n_queries, KV_DTYPE_BF16, true, dots);
		else if (part->number == KV_DTYPE_BF16)
			EACH_BLOCK dot_numbers(
				part, rows, first, queries, n_queries, KV_DTYPE_BF16, false, dots);
		else
			EACH_BLOCK dot_numbers(
				part, rows, first, queries, n_queries, KV_DTYPE_NONE, false, dots);
		return;
	}
	switch (part->bits) {
	case 2:
		DOT_EITHER(2, false);
		break;
	case 3:
		DOT(3);
		break;
	case 4:
		DOT_EITHER(4, false);
		break;
	case 5:
		DOT(5);
		break;
	case 6:
		DOT(6);
		break;
	case 7:
#if LANES == 8
		if (part->is_smooth) {
			EACH_BLOCK dot_pairs(part, rows, first, queries, n_queries, 7, SMOOTH, dots);
			break;
		}
#endif
		DOT(7);
		break;
	default:
		if (part->is_value)
			DOT_EITHER(8, true);
#if LANES == 8
		else if (part->is_e4m3)
			EACH_BLOCK dot_pairs(part, rows, first, queries, n_queries, 8, E4M3, dots);
		else if (part->is_smooth)
			EACH_BLOCK dot_pairs(part, rows, first, queries, n_queries, 8, SMOOTH, dots);
#endif
		else
			DOT_EITHER(8, false);
		break;
	}
#undef DOT_EITHER
#undef DOT
#undef EACH_BLOCK
}

static void dot_part_1(const struct kv_fast_part *part, const struct kv_fast_rows *rows,
	const struct kv_fast_query *queries, float *dots)
{
	dot_part(part, rows, queries, 1, dots);
}

static void dot_part_2(const struct kv_fast_part *part, const struct kv_fast_rows *rows,
	const struct kv_fast_query *queries, float *dots)
{
	dot_part(part, rows, queries, 2, dots);
}

static void dot_part_4(const struct kv_fast_part *part, const struct kv_fast_rows *rows,
	const struct kv_fast_query *queries, float *dots)
{
	dot_part(part, rows, queries, 4, dots);
}

#if LANES == 8
/* 4-bit codes in shifted order are scored for a whole step. */
static bool has_nibbles(const struct kv_fast_part *part)
{
	return part->kind == KV_FAST_CODES && part->bits == 4 && part->is_shifted;
}

/* One part of them, whose scale is a float32, and nothing else. */
static bool is_nibbles(const struct kv_fast_side *side)
{
	const struct kv_fast_part *part = &side->parts[0];

	return side->n_parts == 1 && has_nibbles(part) && part->scale.kind == KV_FAST_FIELD_F32 &&
		part->zero.kind == KV_FAST_FIELD_NONE && part->outer.kind == KV_FAST_FIELD_NONE;
}

static void score_nibbles(const struct kv_fast_part *part, const struct kv_fast_rows *rows,
	const struct kv_fast_query *queries, uint32_t n_queries, bool is_scaled, float *products)
{
	float units[KV_FAST_QUERIES_MAX];

	for (uint32_t q = 0; q < n_queries; q++)
		units[q] = queries[q].units[0];
#define DOT(n, n_blocks) dot_nibbles(part, rows, queries, n, n_blocks, is_scaled ? units : NULL, products)
	const uint32_t n_blocks = part->n_slots / (4 * KV_FAST_ROW_WORDS);

	if (n_queries == 1)
		DOT(1, n_blocks);
	else if (n_queries == 2)
		DOT(2, n_blocks);
	else if (n_blocks == 4) /* of head_dim 128, without a loop */
		DOT(4, 4);
	else
		DOT(4, n_blocks);
#undef DOT
}
#endif

static void score(const struct kv_fast_side *side, const struct kv_fast_rows *far_rows,
	const struct kv_fast_query *queries, uint32_t n_queries, float *products)
{
	_Alignas(64) float dots[KV_FAST_QUERIES_MAX * STEP];
	struct near_rows near;
	const struct kv_fast_rows *rows = bring_near(side, far_rows, &near);
	const uint32_t n = n_places(rows);
	struct fields fields;

#if LANES == 8
	if (is_nibbles(side)) {
		const struct kv_fast_part moved = part_of_rows(&side->parts[0], rows);

		score_nibbles(&moved, rows, queries, n_queries, true, products);
		return;
	}
#endif
	for (uint32_t p = 0; p < side->n_parts; p++) {
		const struct kv_fast_part moved = part_of_rows(&side->parts[p], rows), *part = &moved;
		bool is_done = part->kind == KV_FAST_BITS;

		if (part->kind == KV_FAST_BITS)
			OF_SET(kv_fast_dot_bits)(part, rows, queries, n_queries, dots);
#if LANES == 8
		if (has_nibbles(part)) {
			score_nibbles(part, rows, queries, n_queries, false, dots);
			is_done = true;
		}
#endif
		if (!is_done)
			(n_queries == 1                  ? dot_part_1
					: n_queries == 2 ? dot_part_2
							 : dot_part_4)(part, rows, queries, dots);
		/* Last, when rows are in the first-level cache. */
		if (p == 0)
			begin_fields(side, rows, &fields);
		load_fields(part, rows, &fields);
		for (uint32_t q = 0; q < n_queries; q++) {
			for (uint32_t t = 0; t < n; t += LANES) {
				float *to = products + (size_t)q * STEP + t;
				f32_lanes sum = load_f32(dots + (size_t)q * STEP + t) *
					repeat_f32(queries[q].units[p]);

				if (part->entry_offset > 0)
					sum += repeat_f32(part->entry_offset * queries[q].sums[p]);
				if (fields.scale)
					sum *= load_f32(fields.scale + t);
				if (fields.zero)
					sum += load_f32(fields.zero + t) * repeat_f32(queries[q].sums[p]);
				store_f32(p == 0 ? sum : load_f32(to) + sum, to);
			}
		}
	}
}

static bool takes_shifted_of_set(bool is_v, uint32_t bits, uint32_t n)
{
	return takes_shifted(is_v, bits, n);
}

static uint32_t code_of_slot_of_set(bool is_v, uint32_t bits, uint32_t n, uint32_t slot)
{
	return code_of_slot(is_v, bits, n, slot);
}

#if HAS_SHORT_SUMS
static uint32_t code_of_short_slot_of_set(uint32_t bits, uint32_t n, uint32_t slot)
{
	return code_of_short_slot(bits, n, slot);
}
#endif

extern const struct kv_fast_kernels OF_SET(kv_fast_kernels);
const struct kv_fast_kernels OF_SET(kv_fast_kernels) = {
	.name = TEXT(KV_FAST_SET),
	.words = WORDS,
	.has_split_tables = HAS_SPLIT_TABLES,
	.takes_shifted = takes_shifted_of_set,
	.code_of_slot = code_of_slot_of_set,
#if HAS_SHORT_SUMS
	.code_of_short_slot = code_of_short_slot_of_set,
#endif
	.score = score,
	.accumulate = OF_SET(kv_fast_accumulate),
	.max = OF_SET(kv_fast_max),
	.exp2_sum = OF_SET(kv_fast_exp2_sum),
	.bend = OF_SET(kv_fast_bend),
	.scale = OF_SET(kv_fast_scale),
	.add = OF_SET(kv_fast_add),
};
