/* Metrics: histograms by powers of two of microseconds, and one rejection counter per status. */
#include <string.h>

#include "core/checked.h"
#include "server/metrics.h"
#include "tests/lib/kv_test.h"

/* Bucket i counts [2^(i-1), 2^i) microseconds, 0 goes into the first one, the last one takes everything
 * above. */
START_TEST(test_metrics_histogram_buckets)
{
	static const struct {
		uint64_t value_us;
		unsigned bucket;
	} cases[] = {
		{ 0, 0 },
		{ 1, 1 },
		{ 2, 2 },
		{ 3, 2 },
		{ 4, 3 },
		{ 1023, 10 },
		{ 1024, 11 },
		{ 2097151, 21 },
		{ 2097152, 22 },
		{ 4194303, 22 },
		{ 4194304, 23 },
		{ 8388608, 23 },
		{ UINT64_MAX / 2, 23 },
	};

	for (size_t i = 0; i < KV_LENGTH(cases); i++) {
		struct srv_histogram histogram = { 0 };

		srv_histogram_add(&histogram, cases[i].value_us);
		for (unsigned k = 0; k < SRV_HISTOGRAM_BUCKETS; k++)
			ck_assert_msg(histogram.buckets[k] == (k == cases[i].bucket),
				"%llu us is in bucket %u", (unsigned long long)cases[i].value_us, k);
		ck_assert_uint_eq(histogram.n, 1);
		ck_assert_uint_eq(histogram.sum_us, cases[i].value_us);
	}
}
END_TEST

/* Count and sum go on over many values, and the buckets always add up to the count. */
START_TEST(test_metrics_histogram_adds_up)
{
	struct srv_histogram histogram = { 0 };
	uint64_t seed = 20240229, sum_us = 0, n = 0;

	printf("seed %llu\n", (unsigned long long)seed);
	for (unsigned i = 0; i < 10000; i++) {
		const uint64_t value_us = kv_test_random(&seed) >> (24 + i % 40);

		srv_histogram_add(&histogram, value_us);
		sum_us += value_us;
	}
	for (unsigned k = 0; k < SRV_HISTOGRAM_BUCKETS; k++)
		n += histogram.buckets[k];
	ck_assert_uint_eq(n, 10000);
	ck_assert_uint_eq(histogram.n, 10000);
	ck_assert_uint_eq(histogram.sum_us, sum_us);
}
END_TEST

/* A rejection moves the counter of its status and no other; OK is none; an unknown number counts as INTERNAL.
 */
START_TEST(test_metrics_reject_counts_its_own_status)
{
	static const unsigned numbers[] = {
#define NUMBER(name, number, scope, retryable, http, text) number,
		KV_STATUS_MAP(NUMBER)
#undef NUMBER
	};

	ck_assert_uint_eq(KV_LENGTH(numbers), SRV_N_STATUSES);
	for (size_t i = 0; i < SRV_N_STATUSES; i++) {
		struct srv_counters counters, expected;

		memset(&counters, 0, sizeof(counters));
		memset(&expected, 0, sizeof(expected));
		if (numbers[i] != KV_OK)
			expected.rejected[i] = 1;
		srv_counters_reject(&counters, numbers[i]);
		ck_assert_mem_eq(&counters, &expected, sizeof(counters));
	}
	struct srv_counters counters;

	memset(&counters, 0, sizeof(counters));
	srv_counters_reject(&counters, 77);
	srv_counters_reject(&counters, 100000);
	ck_assert_uint_eq(counters.rejected[SRV_REJECTED_INTERNAL], 2);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("metrics");
	TCase *tcase = tcase_create("metrics");

	tcase_add_test(tcase, test_metrics_histogram_buckets);
	tcase_add_test(tcase, test_metrics_histogram_adds_up);
	tcase_add_test(tcase, test_metrics_reject_counts_its_own_status);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
