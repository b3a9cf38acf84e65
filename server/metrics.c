/* Counting: a few instructions per event, no locks (loop thread only). */
#include "server/metrics.h"

void srv_histogram_add(struct srv_histogram *histogram, uint64_t value_us)
{
	uint32_t bucket = value_us == 0 ? 0 : 64u - (uint32_t)__builtin_clzll(value_us);

	if (bucket >= SRV_HISTOGRAM_BUCKETS)
		bucket = SRV_HISTOGRAM_BUCKETS - 1;
	histogram->buckets[bucket]++;
	histogram->n++;
	histogram->sum_us += value_us;
}

/* OK is no rejection and is not counted; a number that is not in the table counts as INTERNAL. */
void srv_counters_reject(struct srv_counters *counters, unsigned status)
{
	unsigned idx = SRV_REJECTED_INTERNAL;

	switch (status) {
#define SRV_STATUS_CASE(name, number, scope, retryable, http, text) \
	case (number):                                              \
		idx = SRV_REJECTED_##name;                          \
		break;
		KV_STATUS_MAP(SRV_STATUS_CASE)
#undef SRV_STATUS_CASE
	default:
		break;
	}
	if (idx != SRV_REJECTED_OK)
		counters->rejected[idx]++;
}
