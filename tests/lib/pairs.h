/*
 * Rows of values, one for every factor, such that every two values of different factors meet in some row:
 * what a product of all values is sampled by, in a fixed order. Which two values may meet is the caller's
 * word; for every choice of allowed values there must be an allowed one of the next factor.
 */
#ifndef TESTS_LIB_PAIRS_H
#define TESTS_LIB_PAIRS_H

#include <check.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define PAIRS_FACTORS_MAX 10u
#define PAIRS_VALUES_MAX  32u

struct pairs {
	uint32_t n_factors, n_values[PAIRS_FACTORS_MAX];
	bool (*is_allowed)(uint32_t factor, uint32_t value, uint32_t other, uint32_t other_value);
	/* A bit per value of the other factor; both directions. */
	uint32_t left[PAIRS_FACTORS_MAX][PAIRS_VALUES_MAX][PAIRS_FACTORS_MAX];
	uint32_t n_left, n_rows;
};

static inline void pairs_init(struct pairs *pairs, uint32_t n_factors, const uint32_t *n_values,
	bool (*is_allowed)(uint32_t factor, uint32_t value, uint32_t other, uint32_t other_value))
{
	memset(pairs, 0, sizeof(*pairs));
	pairs->n_factors = n_factors;
	pairs->is_allowed = is_allowed;
	for (uint32_t f = 0; f < n_factors; f++) {
		ck_assert_uint_le(n_values[f], PAIRS_VALUES_MAX);
		pairs->n_values[f] = n_values[f];
	}
	for (uint32_t f = 0; f < n_factors; f++) {
		for (uint32_t g = f + 1; g < n_factors; g++) {
			for (uint32_t a = 0; a < n_values[f]; a++) {
				for (uint32_t b = 0; b < n_values[g]; b++) {
					if (!is_allowed(f, a, g, b))
						continue;
					pairs->left[f][a][g] |= 1u << b;
					pairs->left[g][b][f] |= 1u << a;
					pairs->n_left++;
				}
			}
		}
	}
}

static inline bool pairs_allow(const struct pairs *pairs, uint32_t f, uint32_t a, uint32_t g, uint32_t b)
{
	return f < g ? pairs->is_allowed(f, a, g, b) : pairs->is_allowed(g, b, f, a);
}

/*
 * The value of factor f that meets most of the chosen values for the first time; of equal ones every eighth
 * time another one, else the first, which may be the cheapest.
 */
static inline uint32_t pairs_choose(
	const struct pairs *pairs, uint32_t f, const uint32_t *values, uint32_t chosen)
{
	uint32_t best = UINT32_MAX, best_count = 0;

	for (uint32_t i = 0; i < pairs->n_values[f]; i++) {
		const uint32_t a =
			(i + (pairs->n_rows % 8 == 0 ? pairs->n_rows / 8 : 0)) % pairs->n_values[f];
		uint32_t count = 1;

		for (uint32_t g = 0; g < pairs->n_factors && count > 0; g++) {
			if (!(chosen >> g & 1u))
				continue;
			if (!pairs_allow(pairs, f, a, g, values[g]))
				count = 0;
			else
				count += pairs->left[f][a][g] >> values[g] & 1u;
		}
		if (count > best_count) {
			best = a;
			best_count = count;
		}
	}
	ck_assert_uint_ne(best, UINT32_MAX);
	return best;
}

/* The next row; false when all pairs have met. */
static inline bool pairs_next(struct pairs *pairs, uint32_t *values)
{
	uint32_t chosen = 0;

	for (uint32_t f = 0; f < pairs->n_factors && chosen == 0; f++) {
		for (uint32_t a = 0; a < pairs->n_values[f] && chosen == 0; a++) {
			for (uint32_t g = f + 1; g < pairs->n_factors && chosen == 0; g++) {
				if (pairs->left[f][a][g] == 0)
					continue;
				values[f] = a;
				values[g] = (uint32_t)__builtin_ctz(pairs->left[f][a][g]);
				chosen = 1u << f | 1u << g;
			}
		}
	}
	if (chosen == 0)
		return false;
	for (uint32_t f = 0; f < pairs->n_factors; f++) {
		if (chosen >> f & 1u)
			continue;
		values[f] = pairs_choose(pairs, f, values, chosen);
		chosen |= 1u << f;
	}
	for (uint32_t f = 0; f < pairs->n_factors; f++) {
		for (uint32_t g = 0; g < pairs->n_factors; g++) {
			const uint32_t bit = 1u << values[g];

			if (g == f)
				continue;
			pairs->n_left -= f < g && (pairs->left[f][values[f]][g] & bit);
			pairs->left[f][values[f]][g] &= ~bit;
		}
	}
	pairs->n_rows++;
	return true;
}

#endif
