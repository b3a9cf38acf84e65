/*
 * Weighted sums of packed rows, compiled once per instruction set (core/fast.h). A sum is one over tokens:
 * rows are taken in pairs whose channels stand side by side, and a lane holds the sum of one channel.
 */
#include "core/fast_set.h"

/* Weights of one part and query, as pairs of 16-bit integers: weight = integer * unit of its block. */
struct weights {
	_Alignas(64) int32_t pairs[STEP / 2];
	float units[STEP / TOKENS];
	uint32_t
		ends; /* bit i: after block i sums become float32, as the next one has another unit or none */
};

/* ---- codes: of sets that have no short sums ---- */
#if !HAS_SHORT_SUMS

/*
 * Of weights with that maximum and sum: what integers of at most KV_FAST_WEIGHT_MAX, which add up to sum_max
 * at most, are multiples of.
 */
INLINE float unit_of(float largest, float sum, int32_t sum_max)
{
	/* Rounding adds at most a half for each; as much is left for the rounding of their sum. */
	const float by_sum = sum * (1 / (float)(sum_max - (int32_t)STEP)),
		    by_largest = largest * (1 / (float)KV_FAST_WEIGHT_MAX);

	return by_sum > by_largest ? by_sum : by_largest;
}

/* With a unit for every block. */
static void round_by_blocks(
	const float *values, const float *scales, uint32_t n, int32_t sum_max, struct weights *weights)
{
	int16_t *codes = (int16_t *)(void *)weights->pairs;

	weights->ends = 0;
	for (uint32_t first = 0; first < n; first += TOKENS) {
		/* Weights that are all smaller than that, or nothing, become nothing. */
		f32_lanes max = repeat_f32(0x1p-100f), all = { 0 };

		for (uint32_t t = first; t < first + TOKENS; t += LANES) {
			max = greater(max, scaled_at(values, scales, t));
			all += scaled_at(values, scales, t);
		}

		const float unit = unit_of(greatest_lane(max), sum_of_lanes(all), sum_max);
		const f32_lanes factor = repeat_f32(1 / unit);

		for (uint32_t t = first; t < first + TOKENS; t += LANES)
			store_rounded((f_vector)(scaled_at(values, scales, t) * factor), codes + t);
		weights->units[first / TOKENS] = unit;
		weights->ends |= 1u << first / TOKENS;
	}
}

/* Of a whole step with many registers (is_held) scaled weights stay in them. */
INLINE void round_weights_of(const float *values, const float *scales, const uint32_t n, const bool is_held,
	int32_t sum_max, struct weights *weights)
{
	/* Not by way of an array: two stores cannot be loaded as one before both are over. */
	int16_t *codes = (int16_t *)(void *)weights->pairs;
	f32_lanes held[STEP / LANES] = { 0 }, max = { 0 }, all = { 0 };

	UNROLL
	for (uint32_t i = 0; i < n / LANES; i++) {
		const f32_lanes scaled = scaled_at(values, scales, i * LANES);

		if (is_held)
			held[i] = scaled;
		max = greater(max, scaled);
		all += scaled;
	}

	const float largest = greatest_lane(max), sum = sum_of_lanes(all);

	if (!(sum > 0x1p-100f && sum < 0x1p126f && largest <= sum * KV_FAST_SHARE_MAX)) {
		round_by_blocks(values, scales, n, sum_max, weights);
		return;
	}

	const float unit = unit_of(largest, sum, sum_max);
	const f32_lanes factor = repeat_f32(1 / unit);

	UNROLL
	for (uint32_t i = 0; i < n / LANES; i++) {
		const f32_lanes scaled = is_held ? held[i] : scaled_at(values, scales, i * LANES);

		store_rounded((f_vector)(scaled * factor), codes + (size_t)i * LANES);
	}
	weights->units[n / TOKENS - 1] = unit;
	weights->ends = 1u << (n / TOKENS - 1);
}

static void round_weights(
	const float *values, const float *scales, uint32_t n, int32_t sum_max, struct weights *weights)
{
	if (LANES == 16 && n == STEP)
		round_weights_of(values, scales, STEP, true, sum_max, weights);
	else
		round_weights_of(values, scales, n, false, sum_max, weights);
}

/* Registers [v, v + n_vectors) of two rows, from half `half` of a block in shifted order. */
INLINE void values_of(const struct kv_fast_part *part, const struct lookup *lookup, const uint8_t *a,
	const uint8_t *b, uint32_t v, const uint32_t n_vectors, const uint32_t bits, const bool is_shifted,
	const bool is_value, const uint32_t half, i_vector values[4])
{
	a += part->offset;
	b += part->offset;
	if (is_shifted) {
		const i_vector words = shifted_words_of_two(a, b, v / 4);

		UNROLL
		for (uint32_t i = 0; i < n_vectors; i += 2)
			expand_two(lookup, words, half + i / 2, values + i);
		return;
	}
	UNROLL
	for (uint32_t i = 0; i < n_vectors; i += 2)
		values_of_pairs(lookup, a, b, v + i, bits, is_value, values + i);
}

INLINE void add_weighted(const struct weights *weights, uint32_t t, const uint32_t n_queries,
	const uint32_t n_vectors, const i_vector *values, i_vector totals[KV_FAST_QUERIES_MAX][4])
{
	UNROLL
	for (uint32_t q = 0; q < n_queries; q++) {
		const i_vector weight = repeat_pair(weights[q].pairs[t / 2]);

		UNROLL
		for (uint32_t i = 0; i < n_vectors; i++)
			totals[q][i] = multiply_add(totals[q][i], values[i], weight);
	}
}

/* What the integers of a block add to a weighted sum, where its unit ends. */
INLINE void end_block(const struct weights *weights, uint32_t block, const uint32_t n_queries,
	const uint32_t n_vectors, i_vector totals[KV_FAST_QUERIES_MAX][4], float *const *sums, uint32_t slot)
{
	UNROLL
	for (uint32_t q = 0; q < n_queries; q++) {
		if (!(weights[q].ends >> block & 1))
			continue;

		const f32_lanes unit = repeat_f32(weights[q].units[block]);
		float *to = sums[q] + slot;

		UNROLL
		for (uint32_t i = 0; i < n_vectors; i++) {
			store_f32(load_f32(to + (size_t)i * LANES) + (f32_lanes)to_f32(totals[q][i]) * unit,
				to + (size_t)i * LANES);
			totals[q][i] = (i_vector){ 0 };
		}
	}
}

/* Registers [v, v + n_vectors) of a weighted sum, in channels. */
INLINE void sum_codes_of(const struct kv_fast_part *part, const struct lookup *lookup,
	const struct kv_fast_rows *rows, const struct weights *weights, const uint32_t n_queries, uint32_t v,
	const uint32_t n_vectors, const uint32_t bits, const bool is_shifted, const bool is_value,
	const uint32_t half, float *const *sums)
{
	i_vector totals[KV_FAST_QUERIES_MAX][4] = { 0 };

	for (uint32_t first = 0; first < rows->n_rows; first += TOKENS) {
		const uint32_t end = end_of_block(rows, first);
		struct asking asking =
			begin_asking(part, rows, first, v * LANES, n_vectors * LANES, TOKENS / 2);

		for (uint32_t t = first; t < end; t += 2) {
			i_vector values[4];

			ask(&asking);
			if (v + part->slot == 0) {
				touch_field(part, rows, t);
				touch_field(part, rows, t + 1);
			}
			values_of(part, lookup, rows->rows[t], rows->rows[t + 1], v, n_vectors, bits,
				is_shifted, is_value, half, values);
			add_weighted(weights, t, n_queries, n_vectors, values, totals);
		}
		end_block(
			weights, first / TOKENS, n_queries, n_vectors, totals, sums, part->slot + v * LANES);
	}
}

INLINE void sum_codes(const struct kv_fast_part *part, const struct kv_fast_rows *rows,
	const struct weights *weights, const uint32_t n_queries, const uint32_t bits, const bool is_shifted,
	const bool is_value, float *const *sums)
{
	const struct lookup lookup = load_lookup(part, bits);
	const uint32_t n_vectors = part->n_slots / LANES;
	uint32_t v = 0;

	for (; v + 4 <= n_vectors; v += 4)
		sum_codes_of(
			part, &lookup, rows, weights, n_queries, v, 4, bits, is_shifted, is_value, 0, sums);
	for (; v < n_vectors; v += 2) {
		if (is_shifted && v % 4 == 2)
			sum_codes_of(part, &lookup, rows, weights, n_queries, v, 2, bits, is_shifted,
				is_value, 1, sums);
		else
			sum_codes_of(part, &lookup, rows, weights, n_queries, v, 2, bits, is_shifted,
				is_value, 0, sums);
	}
}

#endif

/* The same of numbers, of which the last registers of a part may be fewer. */
INLINE void sum_numbers_of(const struct kv_fast_part *part, const struct kv_fast_rows *rows,
	const float *weights, const uint32_t n_queries, uint32_t v, const uint32_t n,
	const enum kv_dtype number, const bool is_shifted, float *const *sums)
{
	f32_lanes totals[KV_FAST_QUERIES_MAX][4];

	UNROLL
	for (uint32_t q = 0; q < n_queries; q++) {
		UNROLL
		for (uint32_t i = 0; i < n; i++)
			totals[q][i] = load_f32(sums[q] + part->slot + (size_t)(v + i) * LANES);
	}
	for (uint32_t first = 0; first < rows->n_rows; first += TOKENS) {
		struct asking asking = begin_asking(part, rows, first, v * LANES, n * LANES, TOKENS);

		for (uint32_t t = first; t < end_of_block(rows, first); t++) {
			ask(&asking);
			UNROLL
			for (uint32_t i = 0; i < n; i++) {
				const f_vector values = numbers_of(
					rows->rows[t] + part->offset, (v + i) * LANES, number, is_shifted);

				UNROLL
				for (uint32_t q = 0; q < n_queries; q++)
					totals[q][i] = (f32_lanes)fma_f32(values,
						(f_vector)repeat_f32(weights[q * STEP + t]),
						(f_vector)totals[q][i]);
			}
		}
	}
	UNROLL
	for (uint32_t q = 0; q < n_queries; q++) {
		UNROLL
		for (uint32_t i = 0; i < n; i++)
			store_f32(totals[q][i], sums[q] + part->slot + (size_t)(v + i) * LANES);
	}
}

INLINE void sum_numbers(const struct kv_fast_part *part, const struct kv_fast_rows *rows,
	const float *weights, const uint32_t n_queries, const enum kv_dtype number, const bool is_shifted,
	float *const *sums)
{
	const uint32_t n_at_once = LANES == 16 ? 4 : 2;
	const uint32_t n_vectors = part->n_slots / LANES;
	uint32_t v = 0;

	for (; v + n_at_once <= n_vectors; v += n_at_once)
		sum_numbers_of(part, rows, weights, n_queries, v, n_at_once, number, is_shifted, sums);
	for (; v < n_vectors; v++)
		sum_numbers_of(part, rows, weights, n_queries, v, 1, number, is_shifted, sums);
}

/* scales: of codes only, NULL: none. */
INLINE void sum_part(const struct kv_fast_part *part, const struct kv_fast_rows *rows, const float *values,
	const float *scales, const uint32_t n_queries, float *const *sums)
{
	if (part->kind == KV_FAST_NUMBERS) {
		if (part->number == KV_DTYPE_F32)
			sum_numbers(part, rows, values, n_queries, KV_DTYPE_F32, false, sums);
		else if (part->number == KV_DTYPE_F16)
			sum_numbers(part, rows, values, n_queries, KV_DTYPE_F16, false, sums);
		else if (part->is_shifted)
			sum_numbers(part, rows, values, n_queries, KV_DTYPE_BF16, true, sums);
		else if (part->number == KV_DTYPE_BF16)
			sum_numbers(part, rows, values, n_queries, KV_DTYPE_BF16, false, sums);
		else
			sum_numbers(part, rows, values, n_queries, KV_DTYPE_NONE, false, sums);
		return;
	}
#if !HAS_SHORT_SUMS
	struct weights rounded_weights[KV_FAST_QUERIES_MAX];
	const struct weights *weights = rounded_weights;

	for (uint32_t q = 0; q < n_queries; q++)
		round_weights(values + (size_t)q * STEP, scales, n_places(rows), part->sum_max,
			&rounded_weights[q]);
	FORGET(weights); /* else a compiler takes them for never filled */
#define SUM(bits, is_shifted, is_value) \
	sum_codes(part, rows, weights, n_queries, bits, is_shifted, is_value, sums)
	switch (part->bits) {
	case 2:
		SUM(2, false, false);
		break;
	case 3:
		SUM(3, false, false);
		break;
	case 4:
		if (part->is_shifted)
			SUM(4, true, false);
		else
			SUM(4, false, false);
		break;
	case 5:
		SUM(5, false, false);
		break;
	case 6:
		SUM(6, false, false);
		break;
	case 7:
		SUM(7, false, false);
		break;
	default:
		if (part->is_value)
			SUM(8, false, true);
		else
			SUM(8, false, false);
		break;
	}
#undef SUM
#else
	(void)scales;
#endif
}

static void sum_part_1(const struct kv_fast_part *part, const struct kv_fast_rows *rows, const float *values,
	const float *scales, float *const *sums)
{
	sum_part(part, rows, values, scales, 1, sums);
}

static void sum_part_2(const struct kv_fast_part *part, const struct kv_fast_rows *rows, const float *values,
	const float *scales, float *const *sums)
{
	sum_part(part, rows, values, scales, 2, sums);
}

static void sum_part_4(const struct kv_fast_part *part, const struct kv_fast_rows *rows, const float *values,
	const float *scales, float *const *sums)
{
	sum_part(part, rows, values, scales, 4, sums);
}

static float dot_tokens(const float *a, const float *b, uint32_t n)
{
	f32_lanes sum = load_f32(a) * load_f32(b);

	for (uint32_t t = LANES; t < n; t += LANES)
		sum += load_f32(a + t) * load_f32(b + t);
	return sum_of_lanes(sum);
}

/* Where weights are scaled before they are rounded, if they are. */
static const float *scale_weights(
	const float *weights, const float *scales, uint32_t n, uint32_t n_queries, float *scaled)
{
	for (uint32_t q = 0; scales && q < n_queries; q++) {
		for (uint32_t t = 0; t < n; t += LANES)
			store_f32(scaled_at(weights + (size_t)q * STEP, scales, t),
				scaled + (size_t)q * STEP + t);
	}
	return scales ? scaled : weights;
}

/* What whole numbers are counted from, times their scale, joins their zero. */
static void center_zeros(struct fields *fields, float center, uint32_t n)
{
	for (uint32_t t = 0; t < n; t += LANES)
		store_f32(load_f32(fields->zero + t) + repeat_f32(center) * load_f32(fields->scale + t),
			fields->zeros + t);
	fields->zero = fields->zeros;
}

void OF_SET(kv_fast_accumulate)(const struct kv_fast_side *side, const struct kv_fast_rows *far_rows,
	const float *weights, uint32_t n_queries, float *const *sums, float *const *zeros)
{
	_Alignas(64) float scaled[KV_FAST_QUERIES_MAX * STEP];
	struct near_rows near;
	const struct kv_fast_rows *rows = bring_near(side, far_rows, &near);
	const uint32_t n = n_places(rows);
	struct fields fields;

	begin_fields(side, rows, &fields);
	for (uint32_t p = 0; p < side->n_parts; p++) {
		const struct kv_fast_part moved = part_of_rows(&side->parts[p], rows), *part = &moved;

		load_fields(part, rows, &fields);
		if (part->center > 0)
			center_zeros(&fields, part->center, n);
		for (uint32_t q = 0; fields.zero && q < n_queries; q++)
			zeros[q][p] += dot_tokens(weights + (size_t)q * STEP, fields.zero, n);
#if HAS_SHORT_SUMS
		if (part->has_short_sums) {
			OF_SET(kv_fast_sum_short)(part, rows, weights, fields.scale, n_queries, sums);
			continue;
		}
#endif
		if (part->kind == KV_FAST_CODES) {
			(n_queries == 1 ? sum_part_1
					: n_queries == 2
					? sum_part_2
					: sum_part_4)(part, rows, weights, fields.scale, sums);
			continue;
		}

		if (part->kind == KV_FAST_BITS) {
			OF_SET(kv_fast_sum_bits)(part, rows, weights, fields.scale, n_queries, sums);
			continue;
		}

		const float *used = scale_weights(weights, fields.scale, n, n_queries, scaled);

		(n_queries == 1                  ? sum_part_1
				: n_queries == 2 ? sum_part_2
						 : sum_part_4)(part, rows, used, NULL, sums);
	}
}
