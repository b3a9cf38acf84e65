/* Logits to weights, compiled once per instruction set (core/fast.h). */
#include "core/fast_set.h"

/* Adding it rounds to a whole number, which then stands in the low bits. */
#define ROUNDING 0x1.8p23f

#define MAX_AT_ONCE (TOKENS / LANES)
#define EXP_AT_ONCE 2u /* registers: sixteen hold them all */

/*
 * 2^(value - max) where the value is at most the maximum, with a relative error below 2^-22: 2^n times a
 * polynomial of degree 5 for 2^r, |r| <= 1 / 2, which is 1 for r = 0 and off by 2^-23.4 at most (equal
 * ripples). What is 127 below the maximum, or more, has n = -127 and r = 0: the bits of 1 with an exponent
 * that is 127 less, which are those of 0. NaN where the value is. Each operation for all of `n_at_once`
 * before the next one: it waits for the one before.
 */
INLINE void exp2_each(f32_lanes *values, float max, const uint32_t n_at_once)
{
	const f32_lanes coefficients[] = { repeat_f32(0x1.5bba14p-10f), repeat_f32(0x1.3cea88p-7f),
		repeat_f32(0x1.c6b752p-5f), repeat_f32(0x1.ebf9bcp-3f), repeat_f32(0x1.62e42ap-1f),
		repeat_f32(1) };
	f32_lanes shifted[EXP_AT_ONCE], r[EXP_AT_ONCE], sum[EXP_AT_ONCE];

	UNROLL
	for (uint32_t i = 0; i < n_at_once; i++) /* in this order what is no number stays one */
		r[i] = greater(repeat_f32(-127), values[i] - repeat_f32(max));
	UNROLL
	for (uint32_t i = 0; i < n_at_once; i++)
		shifted[i] = r[i] + repeat_f32(ROUNDING);
	UNROLL
	for (uint32_t i = 0; i < n_at_once; i++)
		r[i] -= shifted[i] - repeat_f32(ROUNDING);
	UNROLL
	for (uint32_t i = 0; i < n_at_once; i++)
		sum[i] = (f32_lanes)fma_f32(
			(f_vector)coefficients[0], (f_vector)r[i], (f_vector)coefficients[1]);
	UNROLL
	for (uint32_t c = 2; c < 6; c++) {
		UNROLL
		for (uint32_t i = 0; i < n_at_once; i++)
			sum[i] = (f32_lanes)fma_f32(
				(f_vector)sum[i], (f_vector)r[i], (f_vector)coefficients[c]);
	}
	UNROLL
	for (uint32_t i = 0; i < n_at_once; i++)
		values[i] = (f32_lanes)((i32_lanes)sum[i] + ((i32_lanes)shifted[i] << 23));
}

INLINE f32_lanes exp2_lanes(f32_lanes x)
{
	exp2_each(&x, 0, 1);
	return x;
}

float OF_SET(kv_fast_max)(const float *values, uint32_t n)
{
	f32_lanes max[MAX_AT_ONCE];

	UNROLL
	for (uint32_t i = 0; i < MAX_AT_ONCE; i++)
		max[i] = load_f32(values + (size_t)i * LANES);
	for (uint32_t first = TOKENS; first < n; first += TOKENS) {
		UNROLL
		for (uint32_t i = 0; i < MAX_AT_ONCE; i++)
			max[i] = greater(max[i], load_f32(values + first + (size_t)i * LANES));
	}
	for (uint32_t i = 1; i < MAX_AT_ONCE; i++)
		max[0] = greater(max[0], max[i]);
	return greatest_lane(max[0]);
}

float OF_SET(kv_fast_exp2_sum)(float *values, uint32_t n, float max)
{
	f32_lanes sums[EXP_AT_ONCE] = { 0 };

	for (uint32_t first = 0; first < n; first += EXP_AT_ONCE * LANES) {
		f32_lanes weights[EXP_AT_ONCE];

		UNROLL
		for (uint32_t i = 0; i < EXP_AT_ONCE; i++)
			weights[i] = load_f32(values + first + (size_t)i * LANES);
		exp2_each(weights, max, EXP_AT_ONCE);
		UNROLL
		for (uint32_t i = 0; i < EXP_AT_ONCE; i++) {
			store_f32(weights[i], values + first + (size_t)i * LANES);
			sums[i] += weights[i];
		}
	}
	return sum_of_lanes(sums[0] + sums[1]);
}

/*
 * tanh(x) with a relative error of some 2^-21, also near 0, because a large cap multiplies it: sign(x) *
 * (1 - e) / (1 + e), e = exp(-2 |x|), and below a quarter, where 1 - e cancels, the Taylor terms up to x^9.
 */
INLINE f32_lanes tanh_lanes(f32_lanes x)
{
	const i32_lanes sign = (i32_lanes)x & INT32_MIN;
	const f32_lanes size = (f32_lanes)((i32_lanes)x & INT32_MAX);
	const f32_lanes e = exp2_lanes(size * repeat_f32(-2 * (float)KV_FAST_LOG2_E));
	const f32_lanes far = (f32_lanes)((i32_lanes)((repeat_f32(1) - e) / (repeat_f32(1) + e)) | sign);
	const f32_lanes square = x * x;
	const f32_lanes coefficients[] = { repeat_f32(62.0f / 2835), repeat_f32(-17.0f / 315),
		repeat_f32(2.0f / 15), repeat_f32(-1.0f / 3), repeat_f32(1) };
	const i32_lanes is_near = size < repeat_f32(0.25f);
	f32_lanes near = coefficients[0];

	UNROLL
	for (uint32_t i = 1; i < 5; i++)
		near = (f32_lanes)fma_f32((f_vector)near, (f_vector)square, (f_vector)coefficients[i]);
	near *= x;
	return (f32_lanes)(((i32_lanes)near & is_near) | ((i32_lanes)far & ~is_near));
}

/*
 * cap * tanh(x / cap), which is x where the quotient is so small that it may be no normal number. An infinite
 * x gives NaN: the cap must not hide that float32 did not hold it.
 */
INLINE f32_lanes capped(f32_lanes x, float cap)
{
	const f32_lanes quotient = x / repeat_f32(cap);
	const f32_lanes size = (f32_lanes)((i32_lanes)quotient & INT32_MAX);
	const i32_lanes is_straight = size < repeat_f32(0x1p-13f);
	const f32_lanes bent = repeat_f32(cap) * tanh_lanes(quotient) + (x - x);

	return (f32_lanes)(((i32_lanes)x & is_straight) | ((i32_lanes)bent & ~is_straight));
}

void OF_SET(kv_fast_bend)(float *values, uint32_t n, float offset, float cap, float slope, float first)
{
	f32_lanes position;
	float lanes[LANES];

	for (uint32_t i = 0; i < LANES; i++)
		lanes[i] = first + (float)i;
	position = load_f32(lanes);
	for (uint32_t i = 0; i < n; i += LANES, position += repeat_f32(LANES)) {
		f32_lanes x = load_f32(values + i) + repeat_f32(offset);

		if (cap > 0)
			x = capped(x, cap);
		if (slope != 0)
			x += repeat_f32(slope) * position;
		store_f32(x, values + i);
	}
}

void OF_SET(kv_fast_scale)(float *values, uint32_t n, float factor)
{
	for (uint32_t i = 0; i < n; i += LANES)
		store_f32(load_f32(values + i) * repeat_f32(factor), values + i);
}

void OF_SET(kv_fast_add)(double *sums, const float *values, uint32_t n, double factor)
{
	for (uint32_t i = 0; i < n; i++)
		sums[i] += factor * (double)values[i];
}
