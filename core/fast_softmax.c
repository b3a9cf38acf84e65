/* Logits to weights, compiled once per instruction set (core/fast.h). */
#include "core/fast_set.h"

#define LOG2_E 0x1.715476p+0f
/* ln 2 in two parts: a whole number of up to 2^8 times the first is exact. */
#define LN_2_HIGH 0x1.62e4p-1f
#define LN_2_LOW  0x1.7f7d1cp-20f
/* Adding it rounds to a whole number, which then stands in the low bits. */
#define ROUNDING 0x1.8p23f

/*
 * exp(x) for x <= 0, with a relative error below 2^-22: 2^n times a polynomial of degree 6 (the Taylor terms)
 * of |r| <= ln 2 / 2. 0 where the result is below the normal numbers, NaN where x is.
 */
INLINE f32_lanes exp_lanes(f32_lanes x)
{
	/* In this order what is no number stays one. */
	const f32_lanes clipped = greater(repeat_f32(-126 / LOG2_E), x);
	const f32_lanes shifted = (f32_lanes)fma_f32(
		(f_vector)clipped, (f_vector)repeat_f32(LOG2_E), (f_vector)repeat_f32(ROUNDING));
	const f32_lanes n = shifted - repeat_f32(ROUNDING);
	f32_lanes r = (f32_lanes)fma_f32((f_vector)n, (f_vector)repeat_f32(-LN_2_HIGH), (f_vector)clipped);

	r = (f32_lanes)fma_f32((f_vector)n, (f_vector)repeat_f32(-LN_2_LOW), (f_vector)r);

	const f32_lanes coefficients[] = { repeat_f32(1.0f / 720), repeat_f32(1.0f / 120),
		repeat_f32(1.0f / 24), repeat_f32(1.0f / 6), repeat_f32(0.5f), repeat_f32(1), repeat_f32(1) };
	f32_lanes sum = coefficients[0];

	UNROLL
	for (uint32_t i = 1; i < 7; i++)
		sum = (f32_lanes)fma_f32((f_vector)sum, (f_vector)r, (f_vector)coefficients[i]);

	const i32_lanes exponent = (i32_lanes)shifted << 23;
	const i32_lanes is_small = x < repeat_f32(-126 / LOG2_E);

	return (f32_lanes)(((i32_lanes)sum + exponent) & ~is_small);
}

float OF_SET(kv_fast_exp_sum)(float *values, uint32_t n, float max)
{
	f32_lanes sum = { 0 };

	for (uint32_t i = 0; i < n; i += LANES) {
		const f32_lanes weights = exp_lanes(load_f32(values + i) - repeat_f32(max));

		store_f32(weights, values + i);
		sum += weights;
	}
	return sum_of_lanes(sum);
}

/*
 * tanh(x) with a relative error of some 2^-21, also near 0, because a large cap multiplies it: sign(x) *
 * (1 - e) / (1 + e), e = exp(-2 |x|), and below a quarter, where 1 - e cancels, the Taylor terms up to x^9.
 */
INLINE f32_lanes tanh_lanes(f32_lanes x)
{
	const i32_lanes sign = (i32_lanes)x & INT32_MIN;
	const f32_lanes size = (f32_lanes)((i32_lanes)x & INT32_MAX);
	const f32_lanes e = exp_lanes(size * repeat_f32(-2));
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

/* cap * tanh(x / cap), which is x where the quotient is so small that it may be no normal number. */
INLINE f32_lanes capped(f32_lanes x, float cap)
{
	const f32_lanes quotient = x / repeat_f32(cap);
	const f32_lanes size = (f32_lanes)((i32_lanes)quotient & INT32_MAX);
	const i32_lanes is_straight = size < repeat_f32(0x1p-13f);
	const f32_lanes bent = repeat_f32(cap) * tanh_lanes(quotient);

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
