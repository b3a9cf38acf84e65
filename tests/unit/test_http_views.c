/*
 * Views: what every route shows for one snapshot, byte for byte; and the pure rules over text that comes over HTTP.
 * The expected texts are written by hand.
 */
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "core/checked.h"
#include "core/memory.h"
#include "server/http_rules.h"
#include "server/http_views.h"
#include "tests/lib/kv_test.h"

static struct srv_control *control;
static struct srv_text text;

static void setup(void)
{
	control = kv_alloc(1, sizeof(*control));
	ck_assert_ptr_nonnull(control);
	memset(&text, 0, sizeof(text));
}

static void teardown(void)
{
	srv_text_finish(&text);
	kv_free(control);
}

/* Exactly this text, and JSON where a second reader agrees. */
static void assert_json(const char *expected)
{
	json_error_t error;

	ck_assert(!text.is_failed);
	ck_assert_str_eq(text.bytes, expected);
	json_t *json = json_loads(text.bytes, JSON_REJECT_DUPLICATES, &error);

	ck_assert_msg(json != NULL, "%s", error.text);
	json_decref(json);
}

static const struct kv_memory_report report = {
	.n_tokens = 64,
	.payload_bytes = 1000,
	.norms_bytes = 100,
	.scales_bytes = 20,
	.zeros_bytes = 3,
	.exact_bytes = 4,
	.stored_bytes = 1127,
	.dense_equivalent_bytes = 4508,
	.tables_bytes = 256,
	.codebooks_bytes = 64,
	.rotation_bytes = 16384,
	.workspace_bytes = 9,
	.reserved_bytes = 512,
	.free_bytes = 2048,
	.compression = 4.0,
};
#define REPORT_HEAD                                                                                                    \
	"\"memory\":{\"n_tokens\":64,\"dense_equivalent_bytes\":4508,\"stored_bytes\":1127,\"compression\":4,"         \
	"\"payload_bytes\":1000,\"norms_bytes\":100,\"scales_bytes\":20,\"zeros_bytes\":3,\"exact_bytes\":4,"          \
	"\"tables_bytes\":256"
#define REPORT_SEQUENCE REPORT_HEAD "}"
#define REPORT_SESSION  REPORT_HEAD ",\"reserved_bytes\":512}"
#define REPORT_POOL                                                                                                    \
	REPORT_HEAD ",\"reserved_bytes\":512,\"codebooks_bytes\":64,\"rotation_bytes\":16384,\"workspace_bytes\":9,"   \
		    "\"free_bytes\":2048}"

/* Two groups whose five states add up to 10 and 20 blocks. */
static void fill_pool(struct srv_pool_row *pool, const char *name)
{
	memset(pool, 0, sizeof(*pool));
	snprintf(pool->name, sizeof(pool->name), "%s", name);
	strcpy(pool->k_format, "tq4");
	strcpy(pool->v_format, "bf16");
	pool->n_layers = 30;
	pool->q_heads = 9;
	pool->kv_heads = 3;
	pool->k_head_dim = 64;
	pool->v_head_dim = 80;
	pool->block_size = 16;
	pool->n_groups = 2;
	pool->tokens_max = 4096;
	pool->fingerprint = 0x00ABCDEF12345678;
	pool->arena_bytes = 1048576;
	pool->n_sessions = 2;
	pool->n_sequences = 5;
	pool->blocks[0] = (struct kv_block_counts){ .n_total = 10,
		.n_free = 5,
		.n_owned = 2,
		.n_shared = 1,
		.n_draining = 2,
		.n_reserved = 3,
		.n_used_max = 7 };
	pool->blocks[1] = (struct kv_block_counts){ .n_total = 20, .n_free = 20, .n_used_max = 1 };
	pool->block_bytes[0] = 4096;
	pool->block_bytes[1] = 8192;
	pool->memory = report;
}

/* Reasons, names and numbers of the running daemon; the boot id as 16 hex digits. */
START_TEST(test_http_views_info)
{
	struct srv_info *info = &control->info;

	strcpy(info->version, "1.2.3");
	strcpy(info->commit, "abc123");
	info->boot_id = 0xF00;
	info->backend = "cpu";
	info->io = "epoll";
	strcpy(info->backend_reason, "no CUDA device");
	strcpy(info->io_reason, "io_uring_setup: \"denied\"");
	strcpy(info->device.device, "CPU (scalar), 2 threads");
	strcpy(info->device.instruction_set, "baseline");
	info->device.memory_bytes = 4294967296;
	info->device.n_threads = 2;
	info->frame_bytes_max = 1048576;
	strcpy(info->listeners[0], "unix:/run/x.sock");
	strcpy(info->listeners[1], "tcp:127.0.0.1:7870");
	info->n_listeners = 2;
	info->pid = 77;
	info->uptime_ms = 12345;
	srv_view_info(control, &text);
	assert_json("{\"version\":\"1.2.3\",\"commit\":\"abc123\",\"boot_id\":\"0000000000000f00\",\"pid\":77,"
		    "\"uptime_ms\":12345,\"backend\":\"cpu\",\"backend_reason\":\"no CUDA device\","
		    "\"device\":\"CPU (scalar), 2 threads\",\"instruction_set\":\"baseline\","
		    "\"arena_bytes\":4294967296,\"n_threads\":2,\"io\":\"epoll\","
		    "\"io_reason\":\"io_uring_setup: \\\"denied\\\"\",\"frame_bytes_max\":1048576,"
		    "\"listeners\":[\"unix:/run/x.sock\",\"tcp:127.0.0.1:7870\"]}");
}
END_TEST

#define POOL(name)                                                                                                     \
	"{\"name\":\"" name "\",\"fingerprint\":\"00abcdef12345678\",\"layers\":30,\"q_heads\":9,\"kv_heads\":3,"      \
	"\"k_head_dim\":64,\"v_head_dim\":80,\"k\":\"tq4\",\"v\":\"bf16\",\"block_size\":16,\"tokens_max\":4096,"      \
	"\"groups\":[{\"n_blocks\":10,\"block_bytes\":4096},{\"n_blocks\":20,\"block_bytes\":8192}],"                  \
	"\"arena_bytes\":1048576,\"n_sessions\":2,\"n_sequences\":5}"

/* Geometry, formats and capacity of every pool. */
START_TEST(test_http_views_pools)
{
	srv_view_pools(control, &text);
	assert_json("{\"pools\":[]}");
	srv_text_finish(&text);
	control->n_rows = 2;
	fill_pool(&control->rows.pools[0], "smol");
	fill_pool(&control->rows.pools[1], "b");
	srv_view_pools(control, &text);
	assert_json("{\"pools\":[" POOL("smol") "," POOL("b") "]}");
}
END_TEST

/* A pool that was just made is shown as it stands in the list. */
START_TEST(test_http_views_pool_created)
{
	strcpy(control->name, "smol");
	srv_view_pool_created(control, &text);
	assert_json("{\"name\":\"smol\"}");
	srv_text_finish(&text);
	control->n_rows = 1;
	fill_pool(&control->rows.pools[0], "smol");
	srv_view_pool_created(control, &text);
	assert_json(POOL("smol"));
}
END_TEST

#define BLOCKS_0                                                                                                       \
	"\"blocks\":{\"total\":10,\"free\":2,\"reserved\":3,\"owned\":2,\"shared\":1,\"draining\":2,\"used_max\":7}"
#define BLOCKS_1                                                                                                       \
	"\"blocks\":{\"total\":20,\"free\":20,\"reserved\":0,\"owned\":0,\"shared\":0,\"draining\":0,\"used_max\":1}"
#define BLOCKS_SUM                                                                                                     \
	"\"blocks\":{\"total\":30,\"free\":22,\"reserved\":3,\"owned\":2,\"shared\":1,\"draining\":2,\"used_max\":8}"
#define OCCUPANCY(name)                                                                                                \
	"{\"name\":\"" name "\",\"arena_bytes\":1048576,\"n_sessions\":2,\"n_sequences\":5," BLOCKS_SUM                \
	",\"groups\":[{\"block_bytes\":4096," BLOCKS_0 "},{\"block_bytes\":8192," BLOCKS_1 "}]," REPORT_POOL "}"

/* Block states are disjoint and add up; bytes are those of the memory report; totals are sums over the pools. */
START_TEST(test_http_views_occupancy)
{
	control->n_rows = 2;
	control->gauges.arena_bytes = 4194304;
	control->gauges.arena_used_bytes = 2097152;
	fill_pool(&control->rows.pools[0], "a");
	fill_pool(&control->rows.pools[1], "b");
	srv_view_occupancy(control, &text);
	assert_json("{\"pools\":[" OCCUPANCY("a") "," OCCUPANCY("b") "],\"totals\":{\"n_pools\":2,\"n_sessions\":4,"
		    "\"n_sequences\":10,\"blocks\":{\"total\":60,\"free\":44,\"reserved\":6,\"owned\":4,\"shared\":2,"
		    "\"draining\":4,\"used_max\":16},\"memory\":{\"n_tokens\":128,\"dense_equivalent_bytes\":9016,"
		    "\"stored_bytes\":2254,\"compression\":4,\"payload_bytes\":2000,\"norms_bytes\":200,"
		    "\"scales_bytes\":40,\"zeros_bytes\":6,\"exact_bytes\":8,\"tables_bytes\":512,"
		    "\"reserved_bytes\":1024,\"codebooks_bytes\":128,\"rotation_bytes\":32768,"
		    "\"workspace_bytes\":18,\"free_bytes\":4096}},"
		    "\"arena\":{\"total_bytes\":4194304,\"used_bytes\":2097152,\"free_bytes\":2097152}}");
}
END_TEST

/* Without pools everything is 0, and compression is no division by it. */
START_TEST(test_http_views_occupancy_empty)
{
	srv_view_occupancy(control, &text);
	assert_json("{\"pools\":[],\"totals\":{\"n_pools\":0,\"n_sessions\":0,\"n_sequences\":0,\"blocks\":{"
		    "\"total\":0,\"free\":0,\"reserved\":0,\"owned\":0,\"shared\":0,\"draining\":0,\"used_max\":0},"
		    "\"memory\":{\"n_tokens\":0,\"dense_equivalent_bytes\":0,\"stored_bytes\":0,\"compression\":0,"
		    "\"payload_bytes\":0,\"norms_bytes\":0,\"scales_bytes\":0,\"zeros_bytes\":0,\"exact_bytes\":0,"
		    "\"tables_bytes\":0,\"reserved_bytes\":0,\"codebooks_bytes\":0,\"rotation_bytes\":0,"
		    "\"workspace_bytes\":0,\"free_bytes\":0}},"
		    "\"arena\":{\"total_bytes\":0,\"used_bytes\":0,\"free_bytes\":0}}");
}
END_TEST

static void fill_session(struct srv_session_row *session)
{
	memset(session, 0, sizeof(*session));
	session->handle = 0x005A17C39E210003;
	session->tenant = 1000;
	session->owner_id = 12;
	strcpy(session->name, "chat:1");
	strcpy(session->pool, "smol");
	session->n_sequences = 3;
	session->n_outstanding = 1;
	session->lease_ms = 30000;
	session->lease_left_ms = -5;
	session->age_ms = 60000;
	session->n_rows_in = 1920;
	session->n_rows_out = 30;
	session->n_queries = 7;
	session->memory = report;
}

#define SESSION(tenant, connection)                                                                                    \
	"{\"id\":\"005a17c39e210003\",\"name\":\"chat:1\",\"pool\":\"smol\",\"tenant\":" tenant                        \
	",\"connection\":" connection ",\"n_sequences\":3,\"n_outstanding\":1,\"lease_ms\":30000,"                     \
	"\"lease_left_ms\":-5,\"age_ms\":60000,\"n_rows_in\":1920,\"n_rows_out\":30,\"n_queries\":7," REPORT_SESSION   \
	"}"

/* Ids are strings; a TCP tenant has no number and a lost owner no connection; the cursor is null at the end. */
START_TEST(test_http_views_sessions)
{
	control->n_rows = 2;
	control->cursor_next = 18446744073709551615u;
	fill_session(&control->rows.sessions[0]);
	fill_session(&control->rows.sessions[1]);
	control->rows.sessions[1].tenant = UINT64_MAX;
	control->rows.sessions[1].owner_id = 0;
	srv_view_sessions(control, &text);
	assert_json("{\"sessions\":[" SESSION("\"1000\"", "\"12\"") "," SESSION("\"tcp\"", "null")
		    "],\"cursor_next\":\"18446744073709551615\"}");
	srv_text_finish(&text);
	control->n_rows = 0;
	control->cursor_next = 0;
	srv_view_sessions(control, &text);
	assert_json("{\"sessions\":[],\"cursor_next\":null}");
}
END_TEST

/* One session with a page of its sequences; sequence ids as decimal strings, above 2^53 too. */
START_TEST(test_http_views_session)
{
	control->n_rows = 1;
	control->cursor_next = 9;
	fill_session(&control->session);
	control->rows.sequences[0] = (struct srv_sequence_row){
		.id = 9007199254740993,
		.length_min = 64,
		.length_max = 65,
		.n_blocks = 5,
		.n_shared_blocks = 2,
		.idle_ms = 11,
		.is_evictable = true,
		.memory = report,
	};
	srv_view_session(control, &text);
	assert_json("{\"session\":" SESSION("\"1000\"", "\"12\"") ",\"sequences\":[{\"id\":\"9007199254740993\","
		    "\"length_min\":64,\"length_max\":65,\"n_blocks\":5,\"n_shared_blocks\":2,\"idle_ms\":11,"
		    "\"is_evictable\":true," REPORT_SEQUENCE "}],\"cursor_next\":\"9\"}");
}
END_TEST

/* A client's name may be any bytes: the answer is still JSON in UTF-8. */
START_TEST(test_http_views_connections)
{
	struct srv_connection_row *rows = control->rows.connections;

	control->n_rows = 2;
	rows[0].id = 12;
	rows[0].peer.transport = KV_IO_UNIX;
	rows[0].peer.uid = 1000;
	strcpy(rows[0].peer.address, "unix:uid 1000 pid 77");
	strcpy(rows[0].client_name, "a\"\\\n\x01\x7f" "\xc3\xa4" "\xff" "\xed\xa0\x80");
	rows[0].state = "payload";
	rows[0].age_ms = 1;
	rows[0].bytes_in = 2;
	rows[0].bytes_out = 3;
	rows[0].frames_in = 4;
	rows[0].n_inflight = 5;
	rows[0].n_sessions = 6;
	rows[1].id = 13;
	rows[1].peer.transport = KV_IO_TCP;
	rows[1].peer.uid = UINT32_MAX;
	strcpy(rows[1].peer.address, "127.0.0.1:4711");
	srv_view_connections(control, &text);
	assert_json("{\"connections\":[{\"id\":\"12\",\"transport\":\"unix\",\"peer\":\"unix:uid 1000 pid 77\","
		    "\"uid\":1000,\"client_name\":\"a\\\"\\\\\\u000a\\u0001\\u007f\xc3\xa4\xef\xbf\xbd"
		    "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\",\"state\":\"payload\",\"age_ms\":1,\"bytes_in\":2,"
		    "\"bytes_out\":3,\"n_frames_in\":4,\"n_inflight\":5,\"n_sessions\":6},"
		    "{\"id\":\"13\",\"transport\":\"tcp\",\"peer\":\"127.0.0.1:4711\",\"uid\":null,"
		    "\"client_name\":\"\",\"state\":null,\"age_ms\":0,\"bytes_in\":0,\"bytes_out\":0,"
		    "\"n_frames_in\":0,\"n_inflight\":0,\"n_sessions\":0}],\"cursor_next\":null}");
}
END_TEST

/* Health answers are one word and the number behind it. */
START_TEST(test_http_views_health)
{
	srv_view_live(17, &text);
	assert_json("{\"status\":\"alive\",\"turn_age_ms\":17}");
	srv_text_finish(&text);
	control->is_deep = true;
	srv_view_ready(control, &text);
	assert_json("{\"status\":\"ready\",\"is_deep\":true}");
}
END_TEST

/* A problem has the five members of RFC 9457 and ours. */
START_TEST(test_http_views_problem)
{
	srv_view_problem(404, "NOT_FOUND", "there is nothing at '/x'", &text);
	assert_json("{\"type\":\"about:blank\",\"title\":\"Not Found\",\"status\":404,"
		    "\"detail\":\"there is nothing at '/x'\",\"code\":\"NOT_FOUND\"}");
}
END_TEST

/* A full page of rows of longest texts fits, and a text beyond the bound fails instead of growing for ever. */
START_TEST(test_http_views_are_bounded)
{
	control->n_rows = SRV_CONTROL_ROWS_MAX;
	for (unsigned i = 0; i < SRV_CONTROL_ROWS_MAX; i++) {
		fill_session(&control->rows.sessions[i]);
		memset(control->rows.sessions[i].name, 1, KV_SESSION_NAME_BYTES_MAX);
	}
	srv_view_sessions(control, &text);
	ck_assert(!text.is_failed);
	ck_assert_uint_lt(text.n_bytes, 512 * 1024);
	srv_text_finish(&text);
	static char block[65536];

	for (unsigned i = 0; i < 64; i++)
		srv_text_add(&text, block, sizeof(block));
	ck_assert(!text.is_failed);
	srv_text_add(&text, block, 1);
	ck_assert(text.is_failed);
	ck_assert_uint_eq(text.n_bytes, SRV_TEXT_BYTES_MAX);
}
END_TEST

/* Without memory a view fails as a whole; it never shows a part. */
START_TEST(test_http_views_without_memory)
{
	bool is_done = false;

	fill_session(&control->session);
	for (int64_t k = 0; !is_done; k++) {
		ck_assert_int_lt(k, 100);
		kv_alloc_fail_after(k);
		srv_view_session(control, &text);
		kv_alloc_fail_after(-1);
		is_done = !text.is_failed;
		srv_text_finish(&text);
	}
}
END_TEST

/* ---- Prometheus text ---- */

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

/* Each line is a comment or "name[{labels}] value"; a family has one HELP and one TYPE, then its samples together. */
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
		ck_assert_uint_eq(strspn(value, "0123456789.e+-"), (size_t)(end - value));
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
	ck_assert_ptr_nonnull(strstr(text.bytes, "tqkv_build_info{version=\""));
	ck_assert_ptr_null(strstr(text.bytes, "reason=\"OK\""));
#define REASON(name, number, scope, retryable, http, text)                                                             \
	if ((number) != 0)                                                                                             \
		ASSERT_LINE("tqkv_rejected_total{reason=\"" #name "\"} 0");
	KV_STATUS_MAP(REASON)
#undef REASON
#define COUNTER(name, help) ASSERT_LINE("tqkv_" #name "_total 0");
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
	control->gauges.uptime_ms = 61005;
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
	ASSERT_LINE("tqkv_uptime_seconds 61.005");
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
	ASSERT_LINE("tqkv_blocks{device=\"cpu\",pool=\"smol\",group=\"0\",state=\"owned\"} 2");
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

/* ---- rules ---- */

/* Only the bound host, localhost and loopback literals pass; --insecure adds every literal, never a name. */
START_TEST(test_http_rules_host)
{
	static const char *const good[] = { "localhost", "LocalHost:7871", "127.0.0.1", "127.0.0.1:7871", "127.255.1.2:1",
		"[::1]", "[::1]:7871", "[0:0:0:0:0:0:0:1]:80", "bound.host:80", "BOUND.host", "127.0.0.1:" };
	static const char *const literal[] = { "10.0.0.1", "192.168.1.1:7871", "[fe80::1]:80", "0.0.0.0" };
	static const char *const bad[] = { "", ":80", "example.org", "example.org:80", "localhost.example.org",
		"127.0.0.1.example.org", "127.1", "127.0.0.1:x", "127.0.0.1:123456", "127.0.0.1:80:80", "[::1", "[::1]x",
		"[]", "[localhost]", "::1", "localhost ", " localhost", "localhost@evil", "127.0.0.1/", "\xff",
		"0x7f000001", "2130706433" };
	static char huge[1000];

	for (size_t i = 0; i < KV_LENGTH(good); i++) {
		ck_assert_msg(srv_http_host_is_allowed(good[i], "bound.host", false), "%s", good[i]);
		ck_assert_msg(srv_http_host_is_allowed(good[i], "bound.host", true), "%s", good[i]);
	}
	for (size_t i = 0; i < KV_LENGTH(literal); i++) {
		ck_assert_msg(!srv_http_host_is_allowed(literal[i], "bound.host", false), "%s", literal[i]);
		ck_assert_msg(srv_http_host_is_allowed(literal[i], "bound.host", true), "%s", literal[i]);
	}
	for (size_t i = 0; i < KV_LENGTH(bad); i++) {
		ck_assert_msg(!srv_http_host_is_allowed(bad[i], "bound.host", false), "%s", bad[i]);
		ck_assert_msg(!srv_http_host_is_allowed(bad[i], "bound.host", true), "%s", bad[i]);
	}
	memset(huge, 'a', sizeof(huge) - 1);
	ck_assert(!srv_http_host_is_allowed(huge, huge, true));
	ck_assert(srv_http_host_is_allowed("10.0.0.1", "10.0.0.1", false));
	ck_assert(srv_http_host_is_allowed("[fe80::1]:7", "fe80::1", false));
}
END_TEST

/* A page counts as ours only if it came from the very host and port that the request names. */
START_TEST(test_http_rules_origin)
{
	ck_assert(srv_http_origin_is_own("http://localhost:7871", "localhost:7871"));
	ck_assert(srv_http_origin_is_own("HTTPS://Localhost:7871", "localhost:7871"));
	ck_assert(!srv_http_origin_is_own("http://localhost:3000", "localhost:7871"));
	ck_assert(!srv_http_origin_is_own("http://localhost", "localhost:7871"));
	ck_assert(!srv_http_origin_is_own("http://evil.example", "localhost:7871"));
	ck_assert(!srv_http_origin_is_own("http://localhost:7871.evil.example", "localhost:7871"));
	ck_assert(!srv_http_origin_is_own("file://localhost:7871", "localhost:7871"));
	ck_assert(!srv_http_origin_is_own("null", "localhost:7871"));
	ck_assert(!srv_http_origin_is_own("", "localhost:7871"));
}
END_TEST

/* Parameters behind the media type are allowed, other types are not. */
START_TEST(test_http_rules_media_type)
{
	ck_assert(srv_http_type_is_json("application/json"));
	ck_assert(srv_http_type_is_json("Application/JSON; charset=utf-8"));
	ck_assert(srv_http_type_is_json("application/json ;x=1"));
	ck_assert(!srv_http_type_is_json("application/json5"));
	ck_assert(!srv_http_type_is_json("application/jsonp; a"));
	ck_assert(!srv_http_type_is_json("text/plain"));
	ck_assert(!srv_http_type_is_json(" application/json"));
	ck_assert(!srv_http_type_is_json(""));
}
END_TEST

/* Escapes are undone once; a zero byte, half an escape and a text that does not fit are refused. */
START_TEST(test_http_rules_unescape)
{
	char out[5];

	ck_assert(srv_http_unescape("a%2Fb%41", out, sizeof(out)));
	ck_assert_str_eq(out, "a/bA");
	ck_assert(srv_http_unescape("%2525", out, sizeof(out)));
	ck_assert_str_eq(out, "%25");
	ck_assert(srv_http_unescape("", out, sizeof(out)));
	ck_assert_str_eq(out, "");
	ck_assert(!srv_http_unescape("abcde", out, sizeof(out)));
	ck_assert(!srv_http_unescape("a%00b", out, sizeof(out)));
	ck_assert(!srv_http_unescape("%", out, sizeof(out)));
	ck_assert(!srv_http_unescape("%4", out, sizeof(out)));
	ck_assert(!srv_http_unescape("%4g", out, sizeof(out)));
	ck_assert(!srv_http_unescape("%-1", out, sizeof(out)));
}
END_TEST

/* Numbers are digits and nothing else, and what does not fit is refused instead of wrapped. */
START_TEST(test_http_rules_numbers)
{
	uint64_t n = 7;

	ck_assert(srv_http_read_u64("18446744073709551615", UINT64_MAX, &n));
	ck_assert_uint_eq(n, UINT64_MAX);
	ck_assert(srv_http_read_u64("256", 256, &n));
	ck_assert_uint_eq(n, 256);
	ck_assert(!srv_http_read_u64("257", 256, &n));
	ck_assert(!srv_http_read_u64("18446744073709551616", UINT64_MAX, &n));
	ck_assert(!srv_http_read_u64("184467440737095516150", UINT64_MAX, &n));
	ck_assert(!srv_http_read_u64("", 256, &n));
	ck_assert(!srv_http_read_u64("-1", 256, &n));
	ck_assert(!srv_http_read_u64("+1", 256, &n));
	ck_assert(!srv_http_read_u64(" 1", 256, &n));
	ck_assert(!srv_http_read_u64("0x1", 256, &n));
	ck_assert_uint_eq(n, 256);
	ck_assert(srv_http_read_hex_id("005a17C39e210003", &n));
	ck_assert_uint_eq(n, 0x005A17C39E210003);
	ck_assert(!srv_http_read_hex_id("5a17c39e210003", &n));
	ck_assert(!srv_http_read_hex_id("0x5a17c39e210003", &n));
	ck_assert(!srv_http_read_hex_id("005a17c39e210003 ", &n));
	ck_assert(!srv_http_read_hex_id("", &n));
	ck_assert_uint_eq(n, 0x005A17C39E210003);
}
END_TEST

/* Pool names are the protocol's. */
START_TEST(test_http_rules_pool_name)
{
	static char name[66];

	memset(name, 'a', 64);
	ck_assert(srv_http_is_pool_name(name));
	ck_assert(srv_http_is_pool_name("Smol-1._:"));
	name[64] = 'a';
	ck_assert(!srv_http_is_pool_name(name));
	ck_assert(!srv_http_is_pool_name(""));
	ck_assert(!srv_http_is_pool_name("a/b"));
	ck_assert(!srv_http_is_pool_name("a b"));
	ck_assert(!srv_http_is_pool_name("\xc3\xa4"));
}
END_TEST

/* A body is one JSON object; what is wrong is told with line and column. */
START_TEST(test_http_rules_body)
{
	static const struct {
		const char *body, *part;
	} bad[] = {
		{ "{\"a\":1,\n\"a\":2}", "line 2, column " },
		{ "{\"a\":", "line 1, column 5" },
		{ "[1]", "expected an object" },
		{ "7", "line 1, column 1" },
		{ "{\"a\":\"\xff\"}", "line 1, column " },
		{ "{} x", "line 1, column 4" },
	};
	struct kv_error error;
	json_t *json = NULL;

	for (size_t i = 0; i < KV_LENGTH(bad); i++) {
		ck_assert_int_eq(srv_http_read_object(bad[i].body, strlen(bad[i].body), &json, &error), KV_BAD_CONFIG);
		ck_assert_msg(strstr(error.msg, bad[i].part) != NULL, "%s: %s", bad[i].body, error.msg);
		ck_assert_ptr_null(json);
	}
	ck_assert_int_eq(srv_http_read_object("{\"a\":1}", 7, &json, &error), KV_OK);
	ck_assert_uint_eq(json_object_size(json), 1);
	json_decref(json);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("http_views");
	TCase *views = tcase_create("views"), *metrics = tcase_create("metrics"), *rules = tcase_create("rules");

	tcase_add_checked_fixture(views, setup, teardown);
	tcase_add_test(views, test_http_views_info);
	tcase_add_test(views, test_http_views_pools);
	tcase_add_test(views, test_http_views_pool_created);
	tcase_add_test(views, test_http_views_occupancy);
	tcase_add_test(views, test_http_views_occupancy_empty);
	tcase_add_test(views, test_http_views_sessions);
	tcase_add_test(views, test_http_views_session);
	tcase_add_test(views, test_http_views_connections);
	tcase_add_test(views, test_http_views_health);
	tcase_add_test(views, test_http_views_problem);
	tcase_add_test(views, test_http_views_are_bounded);
	tcase_add_test(views, test_http_views_without_memory);
	suite_add_tcase(suite, views);
	tcase_add_checked_fixture(metrics, setup, teardown);
	tcase_add_test(metrics, test_http_metrics_first_scrape);
	tcase_add_test(metrics, test_http_metrics_values);
	tcase_add_test(metrics, test_http_metrics_histogram);
	tcase_add_test(metrics, test_http_metrics_pools);
	suite_add_tcase(suite, metrics);
	tcase_add_test(rules, test_http_rules_host);
	tcase_add_test(rules, test_http_rules_origin);
	tcase_add_test(rules, test_http_rules_media_type);
	tcase_add_test(rules, test_http_rules_unescape);
	tcase_add_test(rules, test_http_rules_numbers);
	tcase_add_test(rules, test_http_rules_pool_name);
	tcase_add_test(rules, test_http_rules_body);
	suite_add_tcase(suite, rules);
	return kv_test_run(suite, CK_FORK);
}
