/*
 * Weighted sums of packed rows, compiled once per instruction set (core/fast.h). A sum is one over tokens:
 * rows are taken in pairs whose channels stand side by side, and a lane holds the sum of one channel.
 */
#include "core/fast_set.h"

/* Weights of one part and query, as pairs of 16-bit integers: weight = integer * unit. */
struct weights {
	_Alignas(64) int32_t pairs[TOKENS / 2];
	float unit;
};

float OF_SET(kv_fast_max)(const float *values, uint32_t n)
{
	f32_lanes max = load_f32(values);

	for (uint32_t i = LANES; i < n; i += LANES)
		max = greater(max, load_f32(values + i));
	return greatest_lane(max);
}

INLINE void round_weights(const float *values, struct weights *weights)
{
	f32_lanes lanes[TOKENS / LANES], max = load_f32(values);
	/* Not by way of an array: two stores cannot be loaded as one before both are over. */
	int16_t *codes = (int16_t *)(void *)weights->pairs;

	UNROLL
	for (uint32_t i = 0; i < TOKENS / LANES; i++) {
		lanes[i] = load_f32(values + (size_t)i * LANES);
		max = greater(max, lanes[i]);
	}

	/* Weights that are all smaller than that, or nothing, become nothing. */
	const float largest = greatest_lane(greater(max, repeat_f32(0x1p-100f)));
	const f32_lanes factor = repeat_f32((float)KV_FAST_WEIGHT_MAX / largest);

	UNROLL
	for (uint32_t i = 0; i < TOKENS / LANES; i++)
		store_rounded((f_vector)(lanes[i] * factor), codes + (size_t)i * LANES);
	weights->unit = largest / (float)KV_FAST_WEIGHT_MAX;
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

/* Registers [v, v + n_vectors) of a weighted sum, in channels. */
INLINE void sum_codes_of(const struct kv_fast_part *part, const struct lookup *lookup,
	const struct kv_fast_rows *rows, const struct weights *weights, const uint32_t n_queries, uint32_t v,
	const uint32_t n_vectors, const uint32_t bits, const bool is_shifted, const bool is_value,
	const uint32_t half, float *const *sums)
{
	i_vector totals[KV_FAST_QUERIES_MAX][4] = { 0 };
	struct asking asking =
		begin_asking(part, rows, v * LANES, TOKENS / 2 * part->n_slots / (n_vectors * LANES));

	if (TAKES_CODES_APART_FIRST && !is_value && !is_shifted) {
		i_vector values[TOKENS / 2][4];

		for (uint32_t t = 0; t < rows->n_rows; t += 2) {
			ask(&asking);
			values_of(part, lookup, rows->rows[t], rows->rows[t + 1], v, n_vectors, bits,
				is_shifted, is_value, half, values[t / 2]);
		}
		for (uint32_t t = 0; t < rows->n_rows; t += 2)
			add_weighted(weights, t, n_queries, n_vectors, values[t / 2], totals);
	} else {
		for (uint32_t t = 0; t < rows->n_rows; t += 2) {
			i_vector values[4];

			ask(&asking);
			values_of(part, lookup, rows->rows[t], rows->rows[t + 1], v, n_vectors, bits,
				is_shifted, is_value, half, values);
			add_weighted(weights, t, n_queries, n_vectors, values, totals);
		}
	}
	UNROLL
	for (uint32_t q = 0; q < n_queries; q++) {
		float *to = sums[q] + part->slot + (size_t)v * LANES;

		UNROLL
		for (uint32_t i = 0; i < n_vectors; i++)
			store_f32(load_f32(to + (size_t)i * LANES) +
					(f32_lanes)to_f32(totals[q][i]) * repeat_f32(weights[q].unit),
				to + (size_t)i * LANES);
	}
}

INLINE void sum_codes(const struct kv_fast_part *part, const struct kv_fast_rows *rows,
	const struct weights *weights, const uint32_t n_queries, const uint32_t bits, const bool is_shifted,
	const bool is_value, float *const *sums)
{
	const struct lookup lookup = load_lookup(part, bits);
	const uint32_t n_vectors = part->n_slots / LANES;
	uint32_t v = 0;

	/* Sixteen registers hold eight sums, thirty-two hold sixteen. */
	for (; LANES == 16 && v + 4 <= n_vectors; v += 4)
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

INLINE void sum_numbers(const struct kv_fast_part *part, const struct kv_fast_rows *rows,
	const float *weights, const uint32_t n_queries, const enum kv_dtype number, const bool is_shifted,
	float *const *sums)
{
	const uint32_t n_at_once = LANES == 16 ? 4 : 2;
	const uint32_t n_vectors = part->n_slots / LANES;
	struct asking asking = begin_asking(part, rows, 0, TOKENS * n_vectors / n_at_once);

	for (uint32_t v = 0; v < n_vectors; v += n_at_once) {
		f32_lanes totals[KV_FAST_QUERIES_MAX][4];
		const uint32_t n = n_vectors - v < n_at_once ? n_vectors - v : n_at_once;

		for (uint32_t q = 0; q < n_queries; q++) {
			for (uint32_t i = 0; i < n; i++)
				totals[q][i] = load_f32(sums[q] + part->slot + (size_t)(v + i) * LANES);
		}
		if (n == n_at_once) {
			for (uint32_t t = 0; t < rows->n_rows; t++) {
				ask(&asking);
				UNROLL
				for (uint32_t i = 0; i < n_at_once; i++) {
					const f_vector values = numbers_of(rows->rows[t] + part->offset,
						(v + i) * LANES, number, is_shifted);

					UNROLL
					for (uint32_t q = 0; q < n_queries; q++)
						totals[q][i] = (f32_lanes)fma_f32(values,
							(f_vector)repeat_f32(weights[q * TOKENS + t]),
							(f_vector)totals[q][i]);
				}
			}
		} else {
			for (uint32_t t = 0; t < rows->n_rows; t++) {
				for (uint32_t i = 0; i < n; i++) {
					const f_vector values = numbers_of(rows->rows[t] + part->offset,
						(v + i) * LANES, number, is_shifted);

					for (uint32_t q = 0; q < n_queries; q++)
						totals[q][i] = (f32_lanes)fma_f32(values,
							(f_vector)repeat_f32(weights[q * TOKENS + t]),
							(f_vector)totals[q][i]);
				}
			}
		}
		for (uint32_t q = 0; q < n_queries; q++) {
			for (uint32_t i = 0; i < n; i++)
				store_f32(totals[q][i], sums[q] + part->slot + (size_t)(v + i) * LANES);
		}
	}
}

INLINE void sum_part(const struct kv_fast_part *part, const struct kv_fast_rows *rows, const float *scaled,
	const uint32_t n_queries, float *const *sums)
{
	struct weights rounded_weights[KV_FAST_QUERIES_MAX];
	const struct weights *weights = rounded_weights;

	if (part->kind == KV_FAST_NUMBERS) {
		if (part->number == KV_DTYPE_F32)
			sum_numbers(part, rows, scaled, n_queries, KV_DTYPE_F32, false, sums);
		else if (part->number == KV_DTYPE_F16)
			sum_numbers(part, rows, scaled, n_queries, KV_DTYPE_F16, false, sums);
		else if (part->is_shifted)
			sum_numbers(part, rows, scaled, n_queries, KV_DTYPE_BF16, true, sums);
		else if (part->number == KV_DTYPE_BF16)
			sum_numbers(part, rows, scaled, n_queries, KV_DTYPE_BF16, false, sums);
		else
			sum_numbers(part, rows, scaled, n_queries, KV_DTYPE_NONE, false, sums);
		return;
	}
	for (uint32_t q = 0; q < n_queries; q++)
		round_weights(scaled + (size_t)q * TOKENS, &rounded_weights[q]);
	FORGET(weights); /* else a compiler takes them for never filled */
#define SUM(bits, is_shifted, is_value) \
	sum_codes(part, rows, weights, n_queries, bits, is_shifted, is_value, sums)
	switch (part->bits) {
#if !HAS_SUMS_OF_BITS
	case 1:
		SUM(1, false, false);
		break;
#endif
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
}

static void sum_part_1(const struct kv_fast_part *part, const struct kv_fast_rows *rows, const float *scaled,
	float *const *sums)
{
	sum_part(part, rows, scaled, 1, sums);
}

static void sum_part_2(const struct kv_fast_part *part, const struct kv_fast_rows *rows, const float *scaled,
	float *const *sums)
{
	sum_part(part, rows, scaled, 2, sums);
}

static void sum_part_4(const struct kv_fast_part *part, const struct kv_fast_rows *rows, const float *scaled,
	float *const *sums)
{
	sum_part(part, rows, scaled, 4, sums);
}

static float dot_tokens(const float *a, const float *b)
{
	f32_lanes sum = load_f32(a) * load_f32(b);

	for (uint32_t t = LANES; t < TOKENS; t += LANES)
		sum += load_f32(a + t) * load_f32(b + t);
	return sum_of_lanes(sum);
}

void OF_SET(kv_fast_accumulate)(const struct kv_fast_side *side, const struct kv_fast_rows *rows,
	const float *weights, uint32_t stride, uint32_t n_queries, float *const *sums, float *const *zeros)
{
	_Alignas(64) float scaled[KV_FAST_QUERIES_MAX * TOKENS];
	struct fields fields = { 0 };

	for (uint32_t p = 0; p < side->n_parts; p++) {
		const struct kv_fast_part *part = &side->parts[p];

		load_fields(part, rows, &fields);
		for (uint32_t q = 0; q < n_queries; q++) {
			float *to = scaled + (size_t)q * TOKENS;

			if (fields.has_zero)
				zeros[q][p] += dot_tokens(weights + (size_t)q * stride, fields.zero);
			for (uint32_t t = 0; t < TOKENS; t += LANES) {
				const f32_lanes weight = load_f32(weights + (size_t)q * stride + t);

				store_f32(fields.has_scale ? weight * load_f32(fields.scale + t) : weight,
					to + t);
			}
		}
#if HAS_SHORT_SUMS
		if (part->has_short_sums) {
			OF_SET(kv_fast_sum_short)(part, rows, scaled, n_queries, sums);
			continue;
		}
#endif
#if HAS_SUMS_OF_BITS
		if (part->kind == KV_FAST_BITS) {
			OF_SET(kv_fast_sum_bits)(part, rows, scaled, n_queries, sums);
			continue;
		}
#endif
		(n_queries == 1                  ? sum_part_1
				: n_queries == 2 ? sum_part_2
						 : sum_part_4)(part, rows, scaled, sums);
	}
}
