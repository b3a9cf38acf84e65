/*
 * Codebooks of 7 and 8 bits as multiples of the code itself, for sets that look up bytes in 16 (core/fast.h).
 *
 * Centroids that were solved for the density of a rotated row are a smooth odd function of the code: x * (a +
 * b * y), y being the square of x, is as good as a table where a and b are those of one of 16 steps. Whether
 * that is so is found out here for the codebook that the pool has.
 */
#include <math.h>

#include "core/fast.h"

/* What a row may be off by, as a part of its length, and what a number may, of the root mean square of all.
 */
#define ROW_ERROR_MAX    6e-4
#define NUMBER_ERROR_MAX 4e-3

#define N_MAX 128u /* codes of the upper half */

/* What vpmulhrsw is: a product as a part of 2^15, rounded. */
static int32_t multiply_rounded(int32_t a, int32_t b)
{
	return (a * b + (1 << 14)) >> 15;
}

struct smooth {
	uint32_t n;
	bool is_v;
	double values[N_MAX];  /* in units of entries */
	double weights[N_MAX]; /* how often a code is met */
	int32_t x[N_MAX], y[N_MAX], steps[N_MAX];
	int32_t a[16], b[16];
};

/*
 * The upper half, the mirror image of the lower one. A solved codebook has a code the more often, the closer
 * its neighbours are: its points lie as densely as the cube root of the density. False: values do not ascend.
 */
static bool begin(struct smooth *smooth, const float *table, uint32_t bits, bool is_v, double unit)
{
	const uint32_t n = 1u << (bits - 1);

	smooth->n = n;
	smooth->is_v = is_v;
	for (uint32_t i = 0; i < n; i++) {
		const int32_t x = (int32_t)(2 * i + 1) << (15 - bits), y = multiply_rounded(x, x);

		smooth->values[i] = -(double)table[n - 1 - i] / unit;
		smooth->x[i] = x;
		smooth->y[i] = y;
		smooth->steps[i] = kv_fast_smooth_step(bits, is_v, y);
	}
	for (uint32_t i = 0; i < n; i++) {
		const double below = i > 0 ? smooth->values[i - 1] : -smooth->values[0],
			     above = i + 1 < n ? smooth->values[i + 1]
					       : 2 * smooth->values[i] - smooth->values[i - 1];

		if (!(above > below))
			return false;
		smooth->weights[i] = 1 / ((above - below) * (above - below));
	}
	return true;
}

static int32_t slope_part(const struct smooth *smooth, int32_t b, uint32_t i)
{
	return multiply_rounded(b, smooth->y[i]) * (smooth->is_v ? 1 << KV_FAST_SMOOTH_SHIFT_OF_V : 1);
}

/* The line of one step that is nearest to its values; false: its slope is too large. */
static bool fit_step(struct smooth *smooth, int32_t step)
{
	const double shrink = smooth->is_v ? 1.0 / (1 << KV_FAST_SMOOTH_SHIFT_OF_V) : 1;
	double all = 0, mean_y = 0, mean = 0, square = 0, product = 0, rest = 0;
	uint32_t n = 0;

	for (uint32_t i = 0; i < smooth->n; i++) {
		const double weight = smooth->weights[i] * smooth->x[i] * smooth->x[i];

		if (smooth->steps[i] != step)
			continue;
		n++;
		all += weight;
		mean_y += weight * smooth->y[i];
		mean += weight * smooth->values[i] * 0x1p15 / smooth->x[i];
	}
	if (n == 0)
		return true;
	mean_y /= all;
	mean /= all;
	for (uint32_t i = 0; i < smooth->n; i++) {
		const double weight = smooth->weights[i] * smooth->x[i] * smooth->x[i],
			     y = smooth->y[i] - mean_y;

		if (smooth->steps[i] != step)
			continue;
		square += weight * y * y;
		product += weight * y * (smooth->values[i] * 0x1p15 / smooth->x[i] - mean);
	}

	const double slope = n > 1 ? product / square * 0x1p15 * shrink : 0;

	if (!(fabs(slope) <= INT16_MAX))
		return false;
	smooth->b[step] = (int32_t)lrint(slope);
	for (uint32_t i = 0; i < smooth->n; i++) {
		if (smooth->steps[i] == step)
			rest += smooth->weights[i] * smooth->x[i] * smooth->x[i] *
				slope_part(smooth, smooth->b[step], i);
	}
	/* Odd for V: then no product with x, which has 2^7 or 2^8 as a factor, lies between two integers. */
	smooth->a[step] = smooth->is_v ? 2 * (int32_t)floor((mean - rest / all) / 2) + 1
				       : (int32_t)lrint(mean - rest / all);
	return true;
}

static bool is_near(const struct smooth *smooth, int32_t entry_max)
{
	double all = 0, error = 0, size = 0, most = 0;

	for (uint32_t i = 0; i < smooth->n; i++) {
		const int32_t step = smooth->steps[i],
			      factor = smooth->a[step] + slope_part(smooth, smooth->b[step], i);

		if (factor < 0 || factor > INT16_MAX)
			return false;

		const int32_t entry = multiply_rounded(smooth->x[i], factor);
		const double off = fabs(entry - smooth->values[i]);

		if (entry > entry_max)
			return false;
		all += smooth->weights[i];
		error += smooth->weights[i] * off * off;
		size += smooth->weights[i] * smooth->values[i] * smooth->values[i];
		most = fmax(most, off);
	}
	return error <= ROW_ERROR_MAX * ROW_ERROR_MAX * size &&
		most * most <= NUMBER_ERROR_MAX * NUMBER_ERROR_MAX * size / all;
}

bool kv_fast_smooth_init(
	const float *table, uint32_t bits, bool is_v, float *unit, uint8_t pieces[KV_FAST_PIECES_BYTES])
{
	const int32_t entry_max = is_v ? KV_FAST_SMOOTH_MAX_OF_V : KV_FAST_SMOOTH_MAX_OF_K;
	/* Roundings of the greatest entry may add up to a few units. */
	const float largest = -table[0], one = largest / (float)(entry_max - 8);
	struct smooth smooth = { 0 };

	if (!(largest > 0) || !begin(&smooth, table, bits, is_v, (double)one))
		return false;
	for (int32_t step = 0; step < 16; step++) {
		if (!fit_step(&smooth, step))
			return false;
	}
	if (!is_near(&smooth, entry_max))
		return false;
	*unit = one;
	for (uint32_t step = 0; step < 16; step++) {
		/* Modulo 2^16, as they are added. */
		const uint16_t a = (uint16_t)smooth.a[step], b = (uint16_t)smooth.b[step];

		pieces[KV_FAST_SMOOTH_A + step] = (uint8_t)a;
		pieces[KV_FAST_SMOOTH_A + 16 + step] = (uint8_t)(a >> 8);
		pieces[KV_FAST_SMOOTH_B + step] = (uint8_t)b;
		pieces[KV_FAST_SMOOTH_B + 16 + step] = (uint8_t)(b >> 8);
	}
	return true;
}
