/* Numbers out of Prometheus text. */
#include "server/ctl/metrics_text.h"
#include "tests/lib/kv_test.h"

static const char before[] = "# HELP tqkv_a_total things\n"
			     "# TYPE tqkv_a_total counter\n"
			     "tqkv_a_total 7\n"
			     "tqkv_a_total_more 9\n"
			     "tqkv_r_total{reason=\"A B\"} 3\n"
			     "tqkv_r_total{reason=\"C\"} 4.5\n"
			     "tqkv_t_seconds_bucket{le=\"0.001\"} 10\n"
			     "tqkv_t_seconds_bucket{le=\"0.002\"} 10\n"
			     "tqkv_t_seconds_bucket{le=\"+Inf\"} 10\n";
static const char now[] = "tqkv_t_seconds_bucket{le=\"0.001\"} 11\n"
			  "tqkv_t_seconds_bucket{le=\"0.002\"} 15\n"
			  "tqkv_t_seconds_bucket{le=\"+Inf\"} 20";

/* A name is found whole only, comments and longer names are other samples, and what is missing is 0. */
START_TEST(test_values)
{
	ck_assert_double_eq(srv_metrics_value(before, "tqkv_a_total"), 7);
	ck_assert_double_eq(srv_metrics_value(before, "tqkv_a"), 0);
	ck_assert_double_eq(srv_metrics_value(before, "tqkv_r_total{reason=\"A B\"}"), 3);
	ck_assert_double_eq(srv_metrics_sum(before, "tqkv_r_total{"), 7.5);
	ck_assert_double_eq(srv_metrics_sum("", "tqkv_r_total{"), 0);
	ck_assert_double_eq(srv_metrics_value("\n\nx\nx 1\n", "x"), 1);
}
END_TEST

/* Quantiles are those of what came between two texts; beyond the last edge they say that edge. */
START_TEST(test_quantiles)
{
	double edge = -1;

	ck_assert(srv_metrics_quantile(now, before, "tqkv_t_seconds", 0.1, &edge));
	ck_assert_double_eq(edge, 0.001);
	ck_assert(srv_metrics_quantile(now, before, "tqkv_t_seconds", 0.5, &edge));
	ck_assert_double_eq(edge, 0.002);
	ck_assert(srv_metrics_quantile(now, before, "tqkv_t_seconds", 0.99, &edge));
	ck_assert_double_eq(edge, 0.002);
	ck_assert(srv_metrics_quantile(now, NULL, "tqkv_t_seconds", 0.5, &edge));
	ck_assert_double_eq(edge, 0.001);
	edge = -1;
	ck_assert(!srv_metrics_quantile(before, before, "tqkv_t_seconds", 0.5, &edge));
	ck_assert(!srv_metrics_quantile(now, before, "tqkv_u_seconds", 0.5, &edge));
	ck_assert_double_eq(edge, -1);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("ctl metrics text");
	TCase *tcase = tcase_create("all");

	tcase_add_test(tcase, test_values);
	tcase_add_test(tcase, test_quantiles);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
