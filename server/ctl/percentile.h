/*
 * Percentile: samples of a known maximal number, and exact percentiles of them (nearest rank).
 *
 * All samples are kept, so a percentile is a value that was measured and not the edge of a bucket. One
 * thread.
 */
#ifndef SERVER_CTL_PERCENTILE_H
#define SERVER_CTL_PERCENTILE_H

#include <stdbool.h>
#include <stdint.h>

#include "core/error.h"

struct srv_percentile {
	uint64_t *values;
	uint32_t n, n_max;
	bool is_sorted;
};

KV_MUST_CHECK enum kv_status srv_percentile_init(
	struct srv_percentile *samples, uint32_t n_max, struct kv_error *err);
/* Zeroed allowed. */
void srv_percentile_finish(struct srv_percentile *samples);
/* At most n_max times after init or clear. */
void srv_percentile_add(struct srv_percentile *samples, uint64_t value);
void srv_percentile_clear(struct srv_percentile *samples);
/*
 * The smallest sample that at least `percent` of all samples do not exceed; 0 < percent <= 100. 0 without
 * samples. Sorts the samples on first use after an add.
 */
uint64_t srv_percentile_get(struct srv_percentile *samples, double percent);

/* The middle one of n values, the mean of the middle two for even n; sorts them. n > 0. */
double srv_median(double values[], uint32_t n);

#endif
