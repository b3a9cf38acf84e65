/*
 * Views: what every route shows for one snapshot, byte for byte.
 * The expected texts are written by hand.
 */
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "tests/lib/kv_test_views.h"

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

#define TIERS                                                                                \
	"\"tiers\":{\"n_spilled_sequences\":0,\"host_total_bytes\":0,\"host_used_bytes\":0," \
	"\"file_total_bytes\":0,\"file_used_bytes\":0}"

#define REPORT_HEAD                                                                                          \
	"\"memory\":{\"n_tokens\":64,\"dense_equivalent_bytes\":4508,\"stored_bytes\":1127,\"compression\":" \
	"4,"                                                                                                 \
	"\"payload_bytes\":1000,\"norms_bytes\":100,\"scales_bytes\":20,\"zeros_bytes\":3,\"exact_bytes\":"  \
	"4,"                                                                                                 \
	"\"tables_bytes\":256"
#define REPORT_SEQUENCE REPORT_HEAD "}"
#define REPORT_SESSION  REPORT_HEAD ",\"reserved_bytes\":512}"
#define REPORT_POOL                                                                                        \
	REPORT_HEAD ",\"reserved_bytes\":512,\"codebooks_bytes\":64,\"rotation_bytes\":16384,\"workspace_" \
		    "bytes\":9,"                                                                           \
		    "\"shared_bytes\":5,\"cached_bytes\":6,\"free_bytes\":2048}"

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
	strcpy(info->device.device, "CPU, 2 threads");
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
	assert_json(
		"{\"version\":\"1.2.3\",\"commit\":\"abc123\",\"boot_id\":\"0000000000000f00\",\"pid\":77,"
		"\"uptime_ms\":12345,\"backend\":\"cpu\",\"backend_reason\":\"no CUDA device\","
		"\"device\":\"CPU, 2 threads\",\"instruction_set\":\"baseline\","
		"\"arena_bytes\":4294967296,\"n_threads\":2,\"io\":\"epoll\","
		"\"io_reason\":\"io_uring_setup: \\\"denied\\\"\",\"frame_bytes_max\":1048576,"
		"\"listeners\":[\"unix:/run/x.sock\",\"tcp:127.0.0.1:7870\"]}");
}
END_TEST

#define POOL(name)                                                                                           \
	"{\"name\":\"" name                                                                                  \
	"\",\"fingerprint\":\"00abcdef12345678\",\"layers\":30,\"q_heads\":9,\"kv_heads\":3,"                \
	"\"k_head_dim\":64,\"v_head_dim\":80,\"k\":\"tq4\",\"v\":\"bf16\",\"block_size\":16,\"tokens_max\":" \
	"4096,"                                                                                              \
	"\"groups\":[{\"n_blocks\":10,\"block_bytes\":4096},{\"n_blocks\":20,\"block_bytes\":8192}],"        \
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

#define BLOCKS(total, free, reserved, owned, shared, pinned, draining, used_max)                           \
	"\"blocks\":{\"total\":" #total ",\"free\":" #free ",\"reserved\":" #reserved ",\"owned\":" #owned \
	",\"shared\":" #shared ",\"pinned\":" #pinned ",\"draining\":" #draining                           \
	",\"exact\":0,\"used_max\":" #used_max ",\"published\":0,\"idle\":0}"
#define BLOCK_BYTES(free, reserved, owned, shared, pinned, draining, total)                \
	"\"block_bytes\":{\"free\":" #free ",\"reserved\":" #reserved ",\"owned\":" #owned \
	",\"shared\":" #shared ",\"pinned\":" #pinned ",\"draining\":" #draining           \
	",\"exact\":0,\"total\":" #total "}"
#define BLOCKS_0   BLOCKS(10, 2, 3, 1, 1, 1, 2, 7)
#define BLOCKS_1   BLOCKS(20, 20, 0, 0, 0, 0, 0, 1)
#define BLOCKS_SUM BLOCKS(30, 22, 3, 1, 1, 1, 2, 8)
#define FORMATS                                                                                        \
	"\"formats\":[{\"format\":\"tq4\",\"rows_of\":\"k\",\"n_layers\":30,\"n_rows\":1920,\"stored_" \
	"bytes\":1000,"                                                                                \
	"\"dense_equivalent_bytes\":4000}],"
#define OCCUPANCY(name)                                                                                    \
	"{\"name\":\"" name "\",\"arena_bytes\":1048576,\"n_sessions\":2,\"n_sequences\":5," BLOCKS_SUM    \
	"," BLOCK_BYTES(172032, 12288, 4096, 4096, 4096, 8192,                                             \
		204800) ",\"groups\":[{\"block_bytes\":4096," BLOCKS_0 "},{\"block_bytes\":8192," BLOCKS_1 \
			"}]," FORMATS "\"logical_bytes\":1127,\"used_bytes\":2254,\"effective_"            \
			"compression\":2,\"spilled\":{\"n_sequences\":2,\"n_tokens\":30,\"tier_bytes\":"   \
			"131072}," REPORT_POOL "}"

/* Block states are disjoint and add up; bytes are those of the memory report; totals are sums over the pools.
 */
START_TEST(test_http_views_occupancy)
{
	control->n_rows = 2;
	control->gauges.arena_bytes = 4194304;
	control->gauges.arena_used_bytes = 2097152;
	fill_pool(&control->rows.pools[0], "a");
	fill_pool(&control->rows.pools[1], "b");
	control->info.backend = "cpu";
	strcpy(control->info.device.device, "CPU");
	srv_view_occupancy(control, &text);
	assert_json("{\"pools\":[" OCCUPANCY("a") "," OCCUPANCY(
		"b") "],\"totals\":{\"n_pools\":2,\"n_sessions\":4,"
		     "\"n_sequences\":10," BLOCKS(60, 44, 6, 2, 2, 2, 4, 16) "," BLOCK_BYTES(344064, 24576,
			     8192, 8192, 8192, 16384,
			     409600) ",\"logical_bytes\":2254,"
				     "\"used_bytes\":4508,"
				     "\"effective_compression\":2,\"spilled\":{\"n_sequences\":4,\"n_"
				     "tokens\":60,\"tier_bytes\":262144},\"memory\":{\"n_tokens\":128,"
				     "\"dense_"
				     "equivalent_"
				     "bytes\":9016,"
				     "\"stored_bytes\":2254,\"compression\":4,\"payload_bytes\":2000,\"norms_"
				     "bytes\":200,"
				     "\"scales_bytes\":40,\"zeros_bytes\":6,\"exact_bytes\":8,\"tables_"
				     "bytes\":512,"
				     "\"reserved_bytes\":1024,\"codebooks_bytes\":128,\"rotation_bytes\":"
				     "32768,"
				     "\"workspace_bytes\":18,\"shared_bytes\":10,\"cached_bytes\":12,\"free_"
				     "bytes\":4096}},"
				     "\"device\":{\"backend\":\"cpu\",\"name\":\"CPU\",\"used_bytes\":4508},"
				     "\"arena\":{\"total_bytes\":4194304,\"used_bytes\":2097152,\"free_"
				     "bytes\":2097152}"
				     "," TIERS "}");
}
END_TEST

/* Without pools everything is 0, and compression is no division by it. */
START_TEST(test_http_views_occupancy_empty)
{
	srv_view_occupancy(control, &text);
	assert_json("{\"pools\":[],\"totals\":{\"n_pools\":0,\"n_sessions\":0,\"n_sequences\":0," BLOCKS(
		0, 0, 0, 0, 0, 0, 0, 0) "," BLOCK_BYTES(0, 0, 0, 0, 0, 0,
		0) ",\"logical_bytes\":0,\"used_bytes\":0,\"effective_"
		   "compression\":0,\"spilled\":{\"n_sequences\":0,\"n_tokens\":0,\"tier_bytes\":0},"
		   "\"memory\":{\"n_tokens\":0,\"dense_equivalent_bytes\":0,\"stored_bytes\":0,"
		   "\"compression\":0,"
		   "\"payload_bytes\":0,\"norms_bytes\":0,\"scales_bytes\":0,\"zeros_bytes\":0,\"exact_"
		   "bytes\":0,"
		   "\"tables_bytes\":0,\"reserved_bytes\":0,\"codebooks_bytes\":0,\"rotation_bytes\":0,"
		   "\"workspace_bytes\":0,\"shared_bytes\":0,\"cached_bytes\":0,\"free_bytes\":0}},"
		   "\"device\":{\"backend\":null,\"name\":\"\",\"used_bytes\":0},\"arena\":{\"total_bytes\":"
		   "0,\"used_bytes\":0,\"free_bytes\":0}," TIERS "}");
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

#define SESSION(tenant, connection)                                                                 \
	"{\"id\":\"005a17c39e210003\",\"name\":\"chat:1\",\"pool\":\"smol\",\"tenant\":" tenant     \
	",\"connection\":" connection ",\"n_sequences\":3,\"n_outstanding\":1,\"lease_ms\":30000,"  \
	"\"lease_left_ms\":-5,\"age_ms\":60000,\"n_rows_in\":1920,\"n_rows_out\":30,\"n_queries\":" \
	"7," REPORT_SESSION "}"

/* Ids are strings; a TCP tenant has no number and a lost owner no connection; the cursor is null at the end.
 */
START_TEST(test_http_views_sessions)
{
	control->n_rows = 2;
	control->cursor_next = 18446744073709551615u;
	fill_session(&control->rows.sessions[0]);
	fill_session(&control->rows.sessions[1]);
	control->rows.sessions[1].tenant = UINT64_MAX;
	control->rows.sessions[1].owner_id = 0;
	srv_view_sessions(control, &text);
	assert_json("{\"sessions\":[" SESSION("\"1000\"", "\"12\"") "," SESSION(
		"\"tcp\"", "null") "],\"cursor_next\":\"18446744073709551615\"}");
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
		.state = "spilled",
		.tier = "file",
		.tier_bytes = 131072,
		.memory = report,
	};
	srv_view_session(control, &text);
	assert_json("{\"session\":" SESSION("\"1000\"",
		"\"12\"") ",\"sequences\":[{\"id\":\"9007199254740993\","
			  "\"length_min\":64,\"length_max\":65,\"n_blocks\":5,\"n_shared_"
			  "blocks\":2,\"idle_ms\":11,\"state\":\"spilled\",\"tier\":\"file\",\"tier_bytes\":"
			  "131072,"
			  "\"is_evictable\":true,\"n_pins\":0," REPORT_SEQUENCE "}],\"cursor_next\":\"9\"}");
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
	strcpy(rows[0].client_name,
		"a\"\\\n\x01\x7f"
		"\xc3\xa4"
		"\xff"
		"\xed\xa0\x80");
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
	assert_json(
		"{\"connections\":[{\"id\":\"12\",\"transport\":\"unix\",\"peer\":\"unix:uid 1000 pid 77\","
		"\"uid\":1000,\"client_name\":\"a\\\"\\\\\\u000a\\u0001\\u007f\xc3\xa4\xef\xbf\xbd"
		"\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\",\"state\":\"payload\",\"age_ms\":1,\"bytes_in\":2,"
		"\"bytes_out\":3,\"n_frames_in\":4,\"n_inflight\":5,\"n_sessions\":6},"
		"{\"id\":\"13\",\"transport\":\"tcp\",\"peer\":\"127.0.0.1:4711\",\"uid\":null,"
		"\"client_name\":\"\",\"state\":null,\"age_ms\":0,\"bytes_in\":0,\"bytes_out\":0,"
		"\"n_frames_in\":0,\"n_inflight\":0,\"n_sessions\":0}],\"cursor_next\":null}");
}
END_TEST

/* One sequence, its group and a page of its block table; an entry whose block was given back has none. */
START_TEST(test_http_views_sequence)
{
	control->sequence = (struct srv_sequence_row){ .id = 9007199254740993,
		.length_min = 40,
		.length_max = 48,
		.n_blocks = 2,
		.idle_ms = 7,
		.state = "resident",
		.memory = report };
	control->group_idx = 1;
	control->n_rows = 2;
	control->rows.blocks[0] = (struct srv_block_row){ .block_idx = UINT32_MAX };
	control->rows.blocks[1] = (struct srv_block_row){ .block_idx = 12, .n_owners = 3 };
	control->cursor_next = 2;
	srv_view_sequence(control, &text);
	assert_json("{\"sequence\":{\"id\":\"9007199254740993\",\"length_min\":40,\"length_max\":48,\"n_"
		    "blocks\":2,"
		    "\"n_shared_blocks\":0,\"idle_ms\":7,\"state\":\"resident\",\"tier\":null,\"tier_bytes\":"
		    "0,\"is_evictable\":false,\"n_pins\":0," REPORT_SEQUENCE
		    "},\"group\":1,\"blocks\":[{\"id\":null,\"n_owners\":0},{\"id\":\"12\",\"n_owners\":3}],"
		    "\"cursor_next\":\"2\"}");
}
END_TEST

/* Tenants with the sums over their sessions; published prefixes of a pool. */
START_TEST(test_http_views_tenants_and_prefixes)
{
	control->n_rows = 2;
	control->rows.tenants[0] = (struct srv_tenant_row){ .tenant = 7,
		.n_sessions = 1,
		.n_sequences = 2,
		.n_tokens = 3,
		.stored_bytes = 4,
		.dense_equivalent_bytes = 5,
		.reserved_bytes = 6,
		.n_rows_in = 8,
		.n_rows_out = 9,
		.n_queries = 10 };
	control->rows.tenants[0].has_policy = true;
	control->rows.tenants[0].policy = (struct kv_tenant_policy){
		.most = { 11, KV_QUOTA_NONE, 12, KV_QUOTA_NONE, 25 },
		.weight = 3,
	};
	for (uint32_t q = 0; q < KV_QUOTAS; q++) {
		control->rows.tenants[0].used[q] = 13 + q;
		control->rows.tenants[0].used_max[q] = 17 + q;
		control->rows.tenants[0].n_refused[q] = 21 + q;
	}
	control->rows.tenants[1] =
		(struct srv_tenant_row){ .tenant = UINT64_MAX, .policy = kv_tenant_policy_open() };
	srv_view_tenants(control, &text);
	assert_json(
		"{\"tenants\":[{\"tenant\":\"7\",\"policy\":\"own\",\"weight\":3,"
		"\"quotas\":{\"bytes\":11,\"tokens\":null,\"sessions\":12,\"requests\":null,\"tier_bytes\":"
		"25},"
		"\"used\":{\"bytes\":13,\"tokens\":14,\"sessions\":15,\"requests\":16,\"tier_bytes\":17},"
		"\"used_max\":{\"bytes\":17,\"tokens\":18,\"sessions\":19,\"requests\":20,\"tier_bytes\":21},"
		"\"n_refused\":{\"bytes\":21,\"tokens\":22,\"sessions\":23,\"requests\":24,\"tier_bytes\":25}"
		","
		"\"n_sessions\":1,\"n_sequences\":2,\"n_tokens\":3,\"stored_bytes\":4,"
		"\"dense_equivalent_bytes\":5,\"effective_compression\":0.384615,\"reserved_bytes\":6,"
		"\"n_rows_in\":8,\"n_rows_out\":9,"
		"\"n_queries\":10},"
		"{\"tenant\":\"tcp\",\"policy\":\"_default\",\"weight\":1,"
		"\"quotas\":{\"bytes\":null,\"tokens\":null,\"sessions\":null,\"requests\":null,\"tier_"
		"bytes\":null},"
		"\"used\":{\"bytes\":0,\"tokens\":0,\"sessions\":0,\"requests\":0,\"tier_bytes\":0},"
		"\"used_max\":{\"bytes\":0,\"tokens\":0,\"sessions\":0,\"requests\":0,\"tier_bytes\":0},"
		"\"n_refused\":{\"bytes\":0,\"tokens\":0,\"sessions\":0,\"requests\":0,\"tier_bytes\":0},"
		"\"n_sessions\":0,\"n_sequences\":0,\"n_tokens\":0,\"stored_bytes\":0,"
		"\"dense_equivalent_bytes\":0,\"effective_compression\":0,\"reserved_bytes\":0,\"n_rows_"
		"in\":0,\"n_rows_out\":0,"
		"\"n_queries\":0}],"
		"\"cursor_next\":null}");
	srv_text_finish(&text);
	memset(&control->rows, 0, sizeof(control->rows));
	control->n_rows = 1;
	fill_pool(&control->rows.pools[0], "smol");
	control->rows.pools[0].blocks[0].n_kept = 4;
	control->rows.pools[0].blocks[0].n_idle = 3;
	control->rows.pools[0].prefixes = (struct kv_prefix_counts){ .n_nodes = 4,
		.n_published = 9,
		.n_evicted = 3,
		.n_expired = 2,
		.n_removed = 1,
		.n_hits = 5,
		.n_misses = 6,
		.n_tokens_matched = 80 };
	control->n_prefixes = 2;
	control->rows.prefixes[0] = (struct srv_prefix_row){ .prefix = { .id = 0x700000009,
								     .tenant = 7,
								     .adapter = "lora",
								     .adapter_bytes = 4,
								     .has_salt = true,
								     .n_tokens = 32,
								     .n_blocks = 4,
								     .n_holders = 1,
								     .stored_bytes = 64,
								     .n_hits = 3,
								     .n_whole_hits = 2,
								     .expires_ns = 1 },
		.pool = "smol",
		.age_ms = 11,
		.ttl_left_ms = 12 };
	memset(control->rows.prefixes[1].prefix.adapter, 'x', KV_PREFIX_TEXT_BYTES_MAX);
	control->rows.prefixes[1].prefix.tenant = UINT64_MAX;
	control->cursor_next = 10;
	srv_view_prefixes(control, &text);
	assert_json(
		"{\"pools\":[{\"name\":\"smol\",\"n_nodes\":4,\"n_blocks\":4,\"n_idle_blocks\":3,"
		"\"cached_bytes\":6,"
		"\"n_published\":9,\"n_evicted\":3,\"n_expired\":2,\"n_removed\":1,\"n_hits\":5,\"n_misses\":"
		"6,\"n_"
		"tokens_matched\":80}],\"prefixes\":[{\"id\":\"0000000700000009\",\"pool\":\"smol\","
		"\"tenant\":"
		"\"7\",\"adapter\":\"lora\",\"has_salt\":true,\"n_tokens\":32,\"n_blocks\":4,\"stored_"
		"bytes\":"
		"64,\"n_holders\":1,\"n_hits\":3,\"n_whole_hits\":2,\"age_ms\":11,\"ttl_left_ms\":12},{"
		"\"id\":"
		"\"0000000000000000\",\"pool\":\"\",\"tenant\":\"tcp\",\"adapter\":"
		"\"xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\",\"has_salt\":false,"
		"\"n_tokens\":0,\"n_blocks\":0,\"stored_bytes\":0,\"n_holders\":0,\"n_hits\":0,\"n_whole_"
		"hits\":0,\"age_ms\":0,"
		"\"ttl_left_ms\":null}],\"cursor_next\":\"10\"}");
}
END_TEST

/* A sorted list's cursor has two parts: 64-bit keys do not fit into a number that JavaScript keeps. */
START_TEST(test_http_views_sorted_cursor)
{
	control->has_cursor_key_next = true;
	control->cursor_key_next = (struct srv_sort_key){ .key = UINT64_MAX, .slot_idx = 7 };
	srv_view_sessions(control, &text);
	assert_json("{\"sessions\":[],\"cursor_next\":\"18446744073709551615.7\"}");
}
END_TEST

/* What operators' calls answer. */
START_TEST(test_http_views_admin)
{
	control->is_passed = true;
	control->duration_us = 12;
	control->audit.counts = (struct kv_tally_counts){ 1, 2, 3, 4, 5, 6, 7 };
	srv_view_self_test(control, &text);
	assert_json("{\"is_passed\":true,\"reason\":null,\"duration_us\":12}");
	srv_text_finish(&text);
	srv_view_audit(control, &text);
	assert_json("{\"is_clean\":true,\"difference\":null,\"session\":null,\"pool\":null,\"n_sessions\":1,"
		    "\"n_sequences\":2,\"n_table_entries\":3,\"n_blocks\":4,\"n_sessions_unsummed\":5,"
		    "\"n_pools_unsummed\":6,\"n_tenants_unsummed\":7,\"duration_us\":12}");
	srv_text_finish(&text);
	control->is_passed = false;
	strcpy(control->ready_reason, "known answer off");
	strcpy(control->error.msg, "block 3: 2 owners, counted 1");
	control->audit.finding = (struct kv_finding){ .session = 0xAB, .pool = "p" };
	srv_view_self_test(control, &text);
	assert_json("{\"is_passed\":false,\"reason\":\"known answer off\",\"duration_us\":12}");
	srv_text_finish(&text);
	srv_view_audit(control, &text);
	assert_json("{\"is_clean\":false,\"difference\":\"block 3: 2 owners, counted 1\",\"session\":"
		    "\"00000000000000ab\",\"pool\":\"p\",\"n_sessions\":1,\"n_sequences\":2,\"n_table_"
		    "entries\":3,"
		    "\"n_blocks\":4,\"n_sessions_unsummed\":5,\"n_pools_unsummed\":6,"
		    "\"n_tenants_unsummed\":7,\"duration_us\":12}");
	srv_text_finish(&text);
	control->gauges.n_connections = 4;
	control->gauges.n_sessions = 3;
	control->gauges.n_queued = 2;
	control->gauges.n_batches_in_flight = 1;
	srv_view_drain(control, &text);
	assert_json("{\"status\":\"draining\",\"n_connections\":4,\"n_sessions\":3,\"n_queued\":2,"
		    "\"n_batches_in_flight\":1}");
	srv_text_finish(&text);
	control->reload = (struct srv_reload){ .generation = 5, .changed = 1, .needs_restart = 2 };
	srv_view_reload(control, &text);
	assert_json("{\"generation\":5,\"changed\":[\"http\"],\"needs_restart\":[\"http_name\"]}");
}
END_TEST

/* Numbers of a plan, as test_capacity.c works them out; what is not known of a device is null. */
START_TEST(test_http_views_plan)
{
	control->plan = (struct srv_capacity_ask){ .token_bytes = 100,
		.token_dense_bytes = 400,
		.token_wire_bytes = 400,
		.block_size = 16,
		.n_layers = 2,
		.context_tokens = 20,
		.n_sessions = 3,
		.link_bytes_per_s = 1000000,
		.k_format = "tq4",
		.v_format = "v4" };
	control->gauges.arena_bytes = 16000;
	control->info.backend = "cuda";
	srv_view_plan(control, &text);
	assert_json(
		"{\"k\":\"tq4\",\"v\":\"v4\",\"token_bytes\":100,\"token_dense_bytes\":400,\"compression\":4,"
		"\"block_size\":16,\"block_bytes\":1600,\"context_tokens\":20,\"context_blocks\":2,"
		"\"context_bytes\":3200,\"fits\":{\"memory_bytes\":16000,\"n_blocks\":10,\"n_tokens\":160,"
		"\"n_sessions\":5},\"asked\":{\"n_sessions\":3,\"bytes\":9600,\"does_fit\":true},"
		"\"decode\":{\"read_bytes\":6000,\"device_bytes_per_s\":null,\"floor_us\":null,"
		"\"tokens_per_s\":null},\"ingest\":{\"token_bytes\":400,\"link_bytes_per_s\":1000000,"
		"\"context_us\":8000,\"all_us\":24000}}");
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

/* A full page of rows of longest texts fits, and a text beyond the bound fails instead of growing for ever.
 */
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

int main(void)
{
	Suite *suite = suite_create("http_views");
	TCase *tcase = tcase_create("http_views");

	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_add_test(tcase, test_http_views_info);
	tcase_add_test(tcase, test_http_views_pools);
	tcase_add_test(tcase, test_http_views_pool_created);
	tcase_add_test(tcase, test_http_views_occupancy);
	tcase_add_test(tcase, test_http_views_occupancy_empty);
	tcase_add_test(tcase, test_http_views_sessions);
	tcase_add_test(tcase, test_http_views_session);
	tcase_add_test(tcase, test_http_views_connections);
	tcase_add_test(tcase, test_http_views_sequence);
	tcase_add_test(tcase, test_http_views_sorted_cursor);
	tcase_add_test(tcase, test_http_views_tenants_and_prefixes);
	tcase_add_test(tcase, test_http_views_admin);
	tcase_add_test(tcase, test_http_views_plan);
	tcase_add_test(tcase, test_http_views_health);
	tcase_add_test(tcase, test_http_views_problem);
	tcase_add_test(tcase, test_http_views_are_bounded);
	tcase_add_test(tcase, test_http_views_without_memory);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
