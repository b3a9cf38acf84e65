/*
 * Views of single objects, byte for byte, written by hand; and that no route's view is without such a test,
 * here or in test_http_views.c.
 */
#include "server/http_internal.h"
#include "server/routes.h"
#include "tests/lib/kv_test_views.h"

static void assert_text(const char *expected)
{
	ck_assert(!text.is_failed);
	ck_assert_str_eq(text.bytes, expected);
	srv_text_finish(&text);
}

/* One pool: what its line in the list has, and its blocks and bytes; ring blocks are exact, whoever has them.
 */
START_TEST(test_http_golden_pool)
{
	struct srv_pool_row *pool = &control->rows.pools[0];

	control->n_rows = 1;
	fill_pool(pool, "smol");
	pool->n_tables = 3;
	pool->blocks[2] = (struct kv_block_counts){
		.n_total = 9, .n_free = 4, .n_owned = 2, .n_pinned = 2, .n_draining = 1, .n_used_max = 6
	};
	pool->block_bytes[2] = 65536;
	srv_view_pool(control, &text);
	assert_text(
		"{\"name\":\"smol\",\"fingerprint\":\"00abcdef12345678\",\"layers\":30,\"q_heads\":9,"
		"\"kv_heads\":3,\"k_head_dim\":64,\"v_head_dim\":80,\"k\":\"tq4\",\"v\":\"bf16\","
		"\"block_size\":16,\"tokens_max\":4096,\"groups\":[{\"n_blocks\":10,\"block_bytes\":4096},"
		"{\"n_blocks\":20,\"block_bytes\":8192}],"
		"\"exact_window\":{\"n_blocks\":9,\"block_bytes\":65536},"
		"\"arena_bytes\":1048576,\"n_sessions\":2,\"n_sequences\":5,"
		"\"blocks\":{\"total\":39,\"free\":26,\"reserved\":3,\"owned\":1,\"shared\":1,\"pinned\":1,"
		"\"draining\":2,\"exact\":5,\"used_max\":14,\"published\":0,\"idle\":0},"
		"\"memory\":{\"n_tokens\":64,\"dense_equivalent_bytes\":4508,\"stored_bytes\":1127,"
		"\"compression\":4,\"payload_bytes\":1000,\"norms_bytes\":100,\"scales_bytes\":20,"
		"\"zeros_bytes\":3,\"exact_bytes\":4,\"tables_bytes\":256,\"reserved_bytes\":512,"
		"\"codebooks_bytes\":64,\"rotation_bytes\":16384,\"workspace_bytes\":9,\"shared_bytes\":5,"
		"\"cached_bytes\":6,\"free_bytes\":2048}}");
}
END_TEST

/* One tenant, and the policy that holds for all others. */
START_TEST(test_http_golden_tenant)
{
	struct srv_tenant_row *tenant = &control->rows.tenants[0];

	control->n_rows = 1;
	*tenant = (struct srv_tenant_row){ .tenant = 7,
		.n_sessions = 1,
		.n_sequences = 2,
		.n_tokens = 3,
		.stored_bytes = 4,
		.dense_equivalent_bytes = 50,
		.reserved_bytes = 6,
		.n_rows_in = 8,
		.n_rows_out = 9,
		.n_queries = 10,
		.policy = kv_tenant_policy_open(),
		.used = { 20, 14, 1, 0, 11 } };
	srv_view_tenant(control, &text);
	assert_text("{\"tenant\":\"7\",\"policy\":\"_default\",\"weight\":1,"
		    "\"quotas\":{\"bytes\":null,\"tokens\":null,\"sessions\":null,\"requests\":null,\"tier_"
		    "bytes\":null},"
		    "\"used\":{\"bytes\":20,\"tokens\":14,\"sessions\":1,\"requests\":0,\"tier_bytes\":11},"
		    "\"used_max\":{\"bytes\":0,\"tokens\":0,\"sessions\":0,\"requests\":0,\"tier_bytes\":0},"
		    "\"n_refused\":{\"bytes\":0,\"tokens\":0,\"sessions\":0,\"requests\":0,\"tier_bytes\":0},"
		    "\"n_sessions\":1,\"n_sequences\":2,\"n_tokens\":3,\"stored_bytes\":4,"
		    "\"dense_equivalent_bytes\":50,\"effective_compression\":2.5,\"reserved_bytes\":6,"
		    "\"n_rows_in\":8,\"n_rows_out\":9,\"n_queries\":10}");
	*tenant = (struct srv_tenant_row){
		.is_common = true, .has_policy = true, .policy = kv_tenant_policy_open()
	};
	srv_view_tenant(control, &text);
	ck_assert_ptr_eq(
		text.bytes, strstr(text.bytes, "{\"tenant\":\"_default\",\"policy\":\"own\",\"weight\":1,"));
}
END_TEST

/* One prefix; without a time to live it has none left. */
START_TEST(test_http_golden_prefix)
{
	control->n_prefixes = 1;
	control->rows.prefixes[0] = (struct srv_prefix_row){ .prefix = { .id = 0x700000009,
								     .tenant = 7,
								     .adapter = "lora",
								     .adapter_bytes = 4,
								     .n_tokens = 32,
								     .n_blocks = 4,
								     .n_holders = 1,
								     .stored_bytes = 64,
								     .n_hits = 3,
								     .n_whole_hits = 2 },
		.pool = "smol",
		.age_ms = 11,
		.ttl_left_ms = 12 };
	srv_view_prefix(control, &text);
	assert_text("{\"id\":\"0000000700000009\",\"pool\":\"smol\",\"tenant\":\"7\",\"adapter\":\"lora\","
		    "\"has_salt\":false,\"n_tokens\":32,\"n_blocks\":4,\"stored_bytes\":64,\"n_holders\":1,"
		    "\"n_hits\":3,\"n_whole_hits\":2,\"age_ms\":11,\"ttl_left_ms\":null}");
}
END_TEST

/* A snapshot that was never asked for, one that runs, and a restore that failed. */
START_TEST(test_http_golden_checkpoint)
{
	struct srv_checkpoint_view *view = &control->checkpoint;

	srv_view_checkpoint(control, &text);
	assert_text("{\"n_begun\":0,\"state\":\"none\",\"operation\":null,\"name\":null,\"status\":null,"
		    "\"detail\":null,\"n_sessions\":0,\"n_sequences\":0,\"n_prefixes\":0,\"n_blocks\":0,"
		    "\"n_bytes\":0,\"n_skipped_sessions\":0,\"n_skipped_sequences\":0,\"elapsed_us\":0}");
	*view = (struct srv_checkpoint_view){ .n_begun = 1,
		.is_running = true,
		.name = "night",
		.n_sessions = 2,
		.n_sequences = 3,
		.n_skipped = 4,
		.n_sequences_skipped = 5,
		.n_prefixes = 6,
		.n_blocks = 7,
		.n_bytes = 8,
		.elapsed_us = 9 };
	srv_view_checkpoint(control, &text);
	assert_text("{\"n_begun\":1,\"state\":\"running\",\"operation\":\"snapshot\",\"name\":\"night\","
		    "\"status\":null,\"detail\":null,\"n_sessions\":2,\"n_sequences\":3,\"n_prefixes\":6,"
		    "\"n_blocks\":7,\"n_bytes\":8,\"n_skipped_sessions\":4,\"n_skipped_sequences\":5,"
		    "\"elapsed_us\":9}");
	*view = (struct srv_checkpoint_view){
		.n_begun = 2, .is_restore = true, .name = "night", .status = KV_CORRUPT, .detail = "record 3"
	};
	srv_view_checkpoint(control, &text);
	assert_text("{\"n_begun\":2,\"state\":\"done\",\"operation\":\"restore\",\"name\":\"night\","
		    "\"status\":\"CORRUPT\",\"detail\":\"record 3\",\"n_sessions\":0,\"n_sequences\":0,"
		    "\"n_prefixes\":0,\"n_blocks\":0,\"n_bytes\":0,\"n_skipped_sessions\":0,"
		    "\"n_skipped_sequences\":0,\"elapsed_us\":0}");
	*view = (struct srv_checkpoint_view){ .n_begun = 3, .name = "night", .n_sequences_skipped = 2 };
	srv_view_checkpoint(control, &text);
	assert_text("{\"n_begun\":3,\"state\":\"done\",\"operation\":\"snapshot\",\"name\":\"night\","
		    "\"status\":\"PARTIAL\",\"detail\":null,\"n_sessions\":0,\"n_sequences\":0,"
		    "\"n_prefixes\":0,\"n_blocks\":0,\"n_bytes\":0,\"n_skipped_sessions\":0,"
		    "\"n_skipped_sequences\":2,\"elapsed_us\":0}");
}
END_TEST

/* A new route comes with a text of its own: its view stands in this list. */
START_TEST(test_http_golden_knows_every_view)
{
	void (*const views[])(const struct srv_control *control, struct srv_text *text) = { srv_view_audit,
		srv_view_checkpoint, srv_view_connections, srv_view_drain, srv_view_info, srv_view_occupancy,
		srv_view_plan, srv_view_pool, srv_view_pool_created, srv_view_pools, srv_view_prefix,
		srv_view_prefixes, srv_view_ready, srv_view_reload, srv_view_self_test, srv_view_sequence,
		srv_view_session, srv_view_sessions, srv_view_tenant, srv_view_tenants };

	for (size_t i = 0; i < srv_http_n_routes; i++) {
		bool is_known = !srv_http_routes[i].view;

		for (size_t v = 0; v < KV_LENGTH(views); v++)
			is_known = is_known || srv_http_routes[i].view == views[v];
		ck_assert_msg(is_known, "%s %s", srv_http_routes[i].method, srv_http_routes[i].path);
	}
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("http_golden");
	TCase *tcase = tcase_create("http_golden");

	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_add_test(tcase, test_http_golden_pool);
	tcase_add_test(tcase, test_http_golden_tenant);
	tcase_add_test(tcase, test_http_golden_prefix);
	tcase_add_test(tcase, test_http_golden_checkpoint);
	tcase_add_test(tcase, test_http_golden_knows_every_view);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
