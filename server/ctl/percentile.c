#include "server/ctl/percentile.h"

#include <math.h>
#include <stdlib.h>

#include "core/memory.h"

enum kv_status srv_percentile_init(struct srv_percentile *samples, uint32_t n_max, struct kv_error *err)
{
	uint64_t *values = kv_alloc(n_max, sizeof(*values));

	if (!values)
		return kv_fail(err, KV_NO_MEMORY, "no memory for %u samples", n_max);
	*samples = (struct srv_percentile){ .values = values, .n_max = n_max };
	return KV_OK;
}

void srv_percentile_finish(struct srv_percentile *samples)
{
	kv_free(samples->values);
	*samples = (struct srv_percentile){ 0 };
}

void srv_percentile_add(struct srv_percentile *samples, uint64_t value)
{
	KV_ASSERT(samples->n < samples->n_max);
	samples->values[samples->n++] = value;
	samples->is_sorted = false;
}

void srv_percentile_clear(struct srv_percentile *samples)
{
	samples->n = 0;
	samples->is_sorted = false;
}

static int compare_u64(const void *a, const void *b)
{
	const uint64_t left = *(const uint64_t *)a, right = *(const uint64_t *)b;

	return left < right ? -1 : left > right;
}

uint64_t srv_percentile_get(struct srv_percentile *samples, double percent)
{
	KV_ASSERT(percent > 0);
	KV_ASSERT(percent <= 100);
	if (samples->n == 0)
		return 0;
	if (!samples->is_sorted)
		qsort(samples->values, samples->n, sizeof(*samples->values), compare_u64);
	samples->is_sorted = true;

	/* Multiplied before divided: 99.9 of 1000 samples is rank 999, and 99.9 / 100 * 1000 is above it. */
	const double rank = ceil(percent * samples->n / 100);

	return samples->values[(uint32_t)rank - 1];
}

static int compare_double(const void *a, const void *b)
{
	const double left = *(const double *)a, right = *(const double *)b;

	return left < right ? -1 : left > right;
}

double srv_median(double values[], uint32_t n)
{
	KV_ASSERT(n > 0);
	qsort(values, n, sizeof(*values), compare_double);
	return n % 2 == 1 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}
