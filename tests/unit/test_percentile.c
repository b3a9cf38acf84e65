/* Percentiles by nearest rank, counted by hand. */
#include "server/ctl/percentile.h"

#include <stdio.h>

#include "tests/lib/kv_test.h"

/* Of 1..100 in any order, the p-th percentile is p; the smallest percent gives the first, 100 the last. */
START_TEST(test_percentile_of_one_to_hundred)
{
	struct srv_percentile samples;

	ck_assert_int_eq(srv_percentile_init(&samples, 100, NULL), KV_OK);
	for (uint64_t i = 0; i < 100; i++)
		srv_percentile_add(&samples, i * 37 % 100 + 1);
	for (uint32_t percent = 1; percent <= 100; percent++)
		ck_assert_uint_eq(srv_percentile_get(&samples, percent), percent);
	ck_assert_uint_eq(srv_percentile_get(&samples, 0.01), 1);
	ck_assert_uint_eq(srv_percentile_get(&samples, 99.5), 100);
	srv_percentile_finish(&samples);
}
END_TEST

/* Few samples: 50 % of four is the second, 51 % the third, 99 % the last; one sample is every percentile;
 * none is 0. */
START_TEST(test_percentile_of_few)
{
	struct srv_percentile samples;

	ck_assert_int_eq(srv_percentile_init(&samples, 4, NULL), KV_OK);
	ck_assert_uint_eq(srv_percentile_get(&samples, 50), 0);
	srv_percentile_add(&samples, 40);
	ck_assert_uint_eq(srv_percentile_get(&samples, 1), 40);
	ck_assert_uint_eq(srv_percentile_get(&samples, 100), 40);
	/* Adding after a question sorts again. */
	srv_percentile_add(&samples, 10);
	srv_percentile_add(&samples, 30);
	srv_percentile_add(&samples, 20);
	ck_assert_uint_eq(srv_percentile_get(&samples, 50), 20);
	ck_assert_uint_eq(srv_percentile_get(&samples, 51), 30);
	ck_assert_uint_eq(srv_percentile_get(&samples, 99), 40);
	srv_percentile_clear(&samples);
	ck_assert_uint_eq(srv_percentile_get(&samples, 50), 0);
	srv_percentile_add(&samples, UINT64_MAX);
	ck_assert_uint_eq(srv_percentile_get(&samples, 50), UINT64_MAX);
	srv_percentile_finish(&samples);
}
END_TEST

/* 99.9 % of 1000 samples is the 999th: the rank is not pushed up by a rounding error. */
START_TEST(test_percentile_rank_is_exact)
{
	struct srv_percentile samples;

	ck_assert_int_eq(srv_percentile_init(&samples, 1000, NULL), KV_OK);
	for (uint64_t i = 1; i <= 1000; i++)
		srv_percentile_add(&samples, i);
	ck_assert_uint_eq(srv_percentile_get(&samples, 99.9), 999);
	ck_assert_uint_eq(srv_percentile_get(&samples, 90), 900);
	srv_percentile_finish(&samples);
}
END_TEST

/* The middle of an odd number, the mean of the two in the middle of an even one. */
START_TEST(test_percentile_median)
{
	double odd[] = { 5, 1, 3 }, even[] = { 4, 1, 3, 2 }, one[] = { 7 };

	ck_assert_double_eq(srv_median(odd, 3), 3);
	ck_assert_double_eq(srv_median(even, 4), 2.5);
	ck_assert_double_eq(srv_median(one, 1), 7);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("percentile");
	TCase *tcase = tcase_create("all");

	tcase_add_test(tcase, test_percentile_of_one_to_hundred);
	tcase_add_test(tcase, test_percentile_of_few);
	tcase_add_test(tcase, test_percentile_rank_is_exact);
	tcase_add_test(tcase, test_percentile_median);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
