/* Prometheus text: every series from the first scrape, values in their own series, families whole. */
#include "core/checked.h"
#include "tests/lib/kv_test_views.h"

static bool has_line(const char *line)
{
	const size_t n_bytes = strlen(line);

	for (const char *c = text.bytes; (c = strstr(c, line)) != NULL; c++)
		if ((c == text.bytes || c[-1] == '\n') && c[n_bytes] == '\n')
			return true;
	return false;
}

#define ASSERT_LINE(line) ck_assert_msg(has_line(line), "no line '%s' in:\n%s", line, text.bytes)

static struct srv_options options;

static void view_metrics(void)
{
	struct kv_error error;

	ck_assert_int_eq(srv_options_init(&options, &error), KV_OK);
	srv_view_metrics(control, &options, &text);
	srv_options_finish(&options);
	ck_assert(!text.is_failed);
}

/* Each line is a comment or "name[{labels}] value"; a family has one HELP and one TYPE, then its samples
 * together. */
static void assert_exposition(void)
{
	static char families[200][64];
	size_t n_families = 0;
	char family[64] = "";

	for (const char *line = text.bytes; *line; line = strchr(line, '\n') + 1) {
		char name[64];

		ck_assert_ptr_nonnull(strchr(line, '\n'));
		if (strncmp(line, "# HELP ", 7) == 0) {
			ck_assert_int_eq(sscanf(line, "# HELP %63s ", family), 1);
			for (size_t i = 0; i < n_families; i++)
				ck_assert_str_ne(families[i], family);
			ck_assert_uint_lt(n_families, KV_LENGTH(families));
			strcpy(families[n_families++], family);
			continue;
		}
		if (line[0] == '#') {
			ck_assert_int_eq(sscanf(line, "# TYPE %63s ", name), 1);
			ck_assert_str_eq(name, family);
			continue;
		}
		const size_t n_bytes = strcspn(line, "{ ");

		ck_assert_uint_lt(n_bytes, sizeof(name));
		memcpy(name, line, n_bytes);
		name[n_bytes] = '\0';
		ck_assert_msg(strncmp(name, family, strlen(family)) == 0, "%s in family %s", name, family);
		const char *suffix = name + strlen(family);

		ck_assert_msg(!*suffix || !strcmp(suffix, "_bucket") || !strcmp(suffix, "_sum") ||
				!strcmp(suffix, "_count"),
			"%s in family %s", name, family);
		const char *end = strchr(line, '\n');
		const char *value = end;

		while (value[-1] != ' ')
			value--;
		ck_assert_uint_gt((size_t)(end - value), 0);
		ck_assert_uint_eq(strspn(value, "0123456789.e+-Inf"), (size_t)(end - value));
	}
}

/* Every series without a pool exists in the first scrape of an idle daemon, each with HELP and TYPE. */
START_TEST(test_http_metrics_first_scrape)
{
	control->info.backend = "cpu";
	control->info.io = "epoll";
	view_metrics();
	assert_exposition();
	ASSERT_LINE("tqkv_io_backend{name=\"epoll\"} 1");
	ASSERT_LINE("tqkv_io_backend{name=\"io_uring\"} 0");
	ASSERT_LINE("# TYPE tqkv_frames_in_total counter");
	ASSERT_LINE("tqkv_frames_in_total 0");
	ASSERT_LINE("tqkv_appends_aborted_total{reason=\"timeout\"} 0");
	ASSERT_LINE("tqkv_appends_aborted_total{reason=\"closed\"} 0");
	ASSERT_LINE("tqkv_sessions 0");
	ASSERT_LINE("# HELP tqkv_sessions open sessions");
	ASSERT_LINE("# TYPE tqkv_sessions gauge");
	ASSERT_LINE("# TYPE tqkv_request_seconds histogram");
	ASSERT_LINE("tqkv_request_seconds_bucket{le=\"+Inf\"} 0");
	ASSERT_LINE("tqkv_request_seconds_sum 0.000000");
	ASSERT_LINE("tqkv_request_seconds_count 0");
	ASSERT_LINE("tqkv_request_slots{size=\"large\"} 0");
	ASSERT_LINE("tqkv_limit{option=\"sessions_max\"} 4096");
	ASSERT_LINE("tqkv_limit{option=\"frame_bytes_max\"} 1048576");
	ASSERT_LINE("# TYPE tqkv_blocks gauge");
	ASSERT_LINE("tqkv_tenant_used{tenant=\"other\",quota=\"bytes\"} 0");
	ck_assert_ptr_nonnull(strstr(text.bytes, "tqkv_build_info{version=\""));
	ck_assert_ptr_null(strstr(text.bytes, "reason=\"OK\""));
#define REASON(name, number, scope, retryable, http, text) \
	if ((number) != 0)                                 \
		ASSERT_LINE("tqkv_rejected_total{reason=\"" #name "\"} 0");
	KV_STATUS_MAP(REASON)
#undef REASON
#define COUNTER(name, help)                              \
	if (strncmp(#name, "appends_aborted_", 16) != 0) \
		ASSERT_LINE("tqkv_" #name "_total 0");
	SRV_COUNTER_MAP(COUNTER)
#undef COUNTER
}
END_TEST

/* Values land in their own series: counters, gauges in base units, rejections by reason. */
START_TEST(test_http_metrics_values)
{
	control->info.io = "sim";
	control->counters.frames_in = 18446744073709551615u;
	srv_counters_reject(&control->counters, KV_POOL_FULL);
	srv_counters_reject(&control->counters, KV_POOL_FULL);
	control->counters.appends_aborted_timeout = 4;
	control->counters.appends_aborted_closed = 5;
	control->gauges.uptime_ms = 61005;
	control->gauges.self_test_age_ms = UINT64_MAX;
	control->gauges.turns = 9;
	control->gauges.n_small_slots_used = 3;
	control->gauges.is_ready = 1;
	view_metrics();
	assert_exposition();
	ASSERT_LINE("tqkv_io_backend{name=\"sim\"} 1");
	ASSERT_LINE("tqkv_io_backend{name=\"epoll\"} 0");
	ASSERT_LINE("tqkv_frames_in_total 18446744073709551615");
	ASSERT_LINE("tqkv_rejected_total{reason=\"POOL_FULL\"} 2");
	ASSERT_LINE("tqkv_rejected_total{reason=\"QUOTA\"} 0");
	ASSERT_LINE("tqkv_appends_aborted_total{reason=\"timeout\"} 4");
	ASSERT_LINE("tqkv_appends_aborted_total{reason=\"closed\"} 5");
	ASSERT_LINE("tqkv_uptime_seconds 61.005");
	ASSERT_LINE("tqkv_self_test_age_seconds +Inf");
	ASSERT_LINE("tqkv_loop_turns_total 9");
	ASSERT_LINE("tqkv_request_slots_used{size=\"small\"} 3");
	ASSERT_LINE("tqkv_ready 1");
}
END_TEST

/* Buckets are cumulative, bounds and sum in seconds. */
START_TEST(test_http_metrics_histogram)
{
	struct srv_histogram *histogram = &control->counters.kernel;

	srv_histogram_add(histogram, 0);
	srv_histogram_add(histogram, 3);
	srv_histogram_add(histogram, 1500000);
	srv_histogram_add(histogram, 100000000);
	view_metrics();
	assert_exposition();
	ASSERT_LINE("tqkv_kernel_seconds_bucket{le=\"0.000001\"} 1");
	ASSERT_LINE("tqkv_kernel_seconds_bucket{le=\"0.000002\"} 1");
	ASSERT_LINE("tqkv_kernel_seconds_bucket{le=\"0.000004\"} 2");
	ASSERT_LINE("tqkv_kernel_seconds_bucket{le=\"1.048576\"} 2");
	ASSERT_LINE("tqkv_kernel_seconds_bucket{le=\"2.097152\"} 3");
	ASSERT_LINE("tqkv_kernel_seconds_bucket{le=\"4.194304\"} 3");
	ASSERT_LINE("tqkv_kernel_seconds_bucket{le=\"+Inf\"} 4");
	ASSERT_LINE("tqkv_kernel_seconds_sum 101.500003");
	ASSERT_LINE("tqkv_kernel_seconds_count 4");
	ASSERT_LINE("tqkv_queue_seconds_count 0");
}
END_TEST

/* Pools carry device and pool labels (escaped), block states a group, and the states add up to the total. */
START_TEST(test_http_metrics_pools)
{
	control->info.backend = "cpu";
	control->n_rows = 2;
	fill_pool(&control->rows.pools[0], "smol");
	fill_pool(&control->rows.pools[1], "q\"\\\n");
	view_metrics();
	assert_exposition();
	ASSERT_LINE("tqkv_blocks{device=\"cpu\",pool=\"smol\",group=\"0\",state=\"free\"} 2");
	ASSERT_LINE("tqkv_blocks{device=\"cpu\",pool=\"smol\",group=\"0\",state=\"reserved\"} 3");
	ASSERT_LINE("tqkv_blocks{device=\"cpu\",pool=\"smol\",group=\"0\",state=\"owned\"} 1");
	ASSERT_LINE("tqkv_blocks{device=\"cpu\",pool=\"smol\",group=\"0\",state=\"pinned\"} 1");
	ASSERT_LINE("tqkv_blocks_configured{device=\"cpu\",pool=\"smol\",group=\"0\"} 10");
	ASSERT_LINE("tqkv_pool_blocks_bytes{device=\"cpu\",pool=\"smol\",state=\"free\"} 172032");
	ASSERT_LINE("tqkv_pool_blocks_bytes{device=\"cpu\",pool=\"smol\",state=\"pinned\"} 4096");
	ASSERT_LINE("tqkv_pool_blocks_bytes{device=\"cpu\",pool=\"smol\",state=\"exact\"} 0");
	ASSERT_LINE("tqkv_blocks{device=\"cpu\",pool=\"smol\",group=\"0\",state=\"shared\"} 1");
	ASSERT_LINE("tqkv_blocks{device=\"cpu\",pool=\"smol\",group=\"0\",state=\"draining\"} 2");
	ASSERT_LINE("tqkv_blocks{device=\"cpu\",pool=\"smol\",group=\"1\",state=\"free\"} 20");
	ASSERT_LINE("tqkv_blocks_used_max{device=\"cpu\",pool=\"smol\",group=\"0\"} 7");
	ASSERT_LINE("tqkv_block_bytes{device=\"cpu\",pool=\"smol\",group=\"1\"} 8192");
	ASSERT_LINE("tqkv_blocks{device=\"cpu\",pool=\"q\\\"\\\\\\n\",group=\"0\",state=\"free\"} 2");
	ASSERT_LINE("tqkv_pool_memory_bytes{device=\"cpu\",pool=\"smol\",kind=\"payload\"} 1000");
	ASSERT_LINE("tqkv_pool_memory_bytes{device=\"cpu\",pool=\"smol\",kind=\"free\"} 2048");
	ASSERT_LINE("tqkv_pool_arena_bytes{device=\"cpu\",pool=\"smol\"} 1048576");
	ASSERT_LINE("tqkv_pool_stored_bytes{device=\"cpu\",pool=\"smol\"} 1127");
	ASSERT_LINE("tqkv_pool_dense_equivalent_bytes{device=\"cpu\",pool=\"smol\"} 4508");
	ASSERT_LINE("tqkv_pool_tokens{device=\"cpu\",pool=\"smol\"} 64");
	ASSERT_LINE("tqkv_pool_sessions{device=\"cpu\",pool=\"smol\"} 2");
	ASSERT_LINE("tqkv_pool_sequences{device=\"cpu\",pool=\"smol\"} 5");
	ASSERT_LINE("tqkv_pool_compression_ratio{device=\"cpu\",pool=\"smol\"} 4");
}
END_TEST

/* Tenants by quota, no limit as infinity; those without a series of their own are one, which has no policy.
 */
START_TEST(test_http_metrics_tenants)
{
	control->n_tenant_gauges = 2;
	control->tenant_gauges[0] = (struct srv_tenant_gauge){
		.tenant = 1000,
		.weight = 3,
		.most = { 4096, KV_QUOTA_NONE, 5, 0 },
		.used = { 2048, 17, 2, 1 },
		.n_refused = { 7, 0, 0, 0 },
	};
	control->tenant_gauges[1] = (struct srv_tenant_gauge){ .tenant = UINT64_MAX, .weight = 1 };
	control->tenant_gauges[2] = (struct srv_tenant_gauge){ .tenant = 8, .used = { 1, 2, 3, 4 } };
	view_metrics();
	assert_exposition();
	ASSERT_LINE("tqkv_tenant_used{tenant=\"1000\",quota=\"bytes\"} 2048");
	ASSERT_LINE("tqkv_tenant_used{tenant=\"1000\",quota=\"tokens\"} 17");
	ASSERT_LINE("tqkv_tenant_used{tenant=\"tcp\",quota=\"sessions\"} 0");
	ASSERT_LINE("tqkv_tenant_used{tenant=\"other\",quota=\"requests\"} 4");
	ASSERT_LINE("tqkv_tenant_quota{tenant=\"1000\",quota=\"bytes\"} 4096");
	ASSERT_LINE("tqkv_tenant_quota{tenant=\"1000\",quota=\"tokens\"} +Inf");
	ASSERT_LINE("tqkv_tenant_quota{tenant=\"1000\",quota=\"requests\"} 0");
	ASSERT_LINE("tqkv_tenant_refused_total{tenant=\"1000\",quota=\"bytes\"} 7");
	ASSERT_LINE("tqkv_tenant_refused_total{tenant=\"other\",quota=\"bytes\"} 0");
	ASSERT_LINE("tqkv_tenant_weight{tenant=\"1000\"} 3");
	ck_assert_ptr_null(strstr(text.bytes, "tqkv_tenant_weight{tenant=\"other\""));
	ck_assert_ptr_null(strstr(text.bytes, "tqkv_tenant_quota{tenant=\"other\""));
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("http_metrics");
	TCase *tcase = tcase_create("http_metrics");

	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_add_test(tcase, test_http_metrics_first_scrape);
	tcase_add_test(tcase, test_http_metrics_values);
	tcase_add_test(tcase, test_http_metrics_histogram);
	tcase_add_test(tcase, test_http_metrics_pools);
	tcase_add_test(tcase, test_http_metrics_tenants);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
