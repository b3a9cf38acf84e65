#include "core/report.h"

#include "core/format.h"

#include "tests/lib/kv_core_test.h"

/*
 * tq4 K rows: 32 bytes of indices and a norm; bf16 V rows: 32 numbers of 2 bytes; 2 heads; layers 0, 2 | 1.
 */
#define POOL                                                                                           \
	"name=p,layers=3,q_heads=2,kv_heads=2,k_head_dim=64,v_head_dim=32,k=tq4,v=bf16,block_size=16," \
	"blocks=50"
#define GROUPS "[[0,2],[1]]"

#define TOKEN_PAYLOAD (2 * 32) /* per layer and token */
#define TOKEN_NORMS   (2 * 4)
#define TOKEN_EXACT   (2 * 64)
#define TOKEN_STORED  (TOKEN_PAYLOAD + TOKEN_NORMS + TOKEN_EXACT)
#define TOKEN_DENSE   (2 * (64 + 32) * 2)
#define BLOCK_0       (16ull * 2 * TOKEN_STORED) /* group 0 has two layers */
#define BLOCK_1       (16ull * TOKEN_STORED)
#define CHUNK         sizeof(struct kv_table_chunk)

static const struct kv_domain_limits limits = {
	.sessions_max = 4,
	.sequences_max = 100,
	.lease_ms = 1000,
	.lease_ms_max = 1000,
};

static struct kv_item append(struct kv_session *session, uint64_t id, uint32_t position, uint32_t n_tokens,
	uint32_t layer_first, uint32_t n_layers, bool is_finished)
{
	struct kv_item item = {
		.sequence_id = id,
		.position = position,
		.n_tokens = n_tokens,
		.kind = KV_ITEM_APPEND,
		.flags = position == 0 && !kv_sequence_find(session, id) ? KV_ITEM_CREATE : 0,
	};

	kv_item_plan(session, &item, layer_first, n_layers, 1);
	ck_assert_uint_eq(item.status, KV_OK);
	if (is_finished)
		kv_item_finish(&item, layer_first, n_layers);
	return item;
}

static void assert_rows(const struct kv_memory_report *report, uint64_t n_layer_tokens)
{
	ck_assert_uint_eq(report->payload_bytes, n_layer_tokens * TOKEN_PAYLOAD);
	ck_assert_uint_eq(report->norms_bytes, n_layer_tokens * TOKEN_NORMS);
	ck_assert_uint_eq(report->scales_bytes, 0);
	ck_assert_uint_eq(report->zeros_bytes, 0);
	ck_assert_uint_eq(report->exact_bytes, n_layer_tokens * TOKEN_EXACT);
	ck_assert_uint_eq(report->stored_bytes, n_layer_tokens * TOKEN_STORED);
	ck_assert_uint_eq(report->dense_equivalent_bytes, n_layer_tokens * TOKEN_DENSE);
	if (n_layer_tokens > 0)
		ck_assert_double_eq_tol(report->compression, (double)TOKEN_DENSE / TOKEN_STORED, 1e-12);
	else
		ck_assert_double_eq(report->compression, 0);
}

/* An empty pool stores nothing, and everything that it has is free. */
START_TEST(test_report_empty_pool_is_free)
{
	struct kv_test_domain test;
	struct kv_memory_report report;

	kv_test_domain_init(&test, &limits, POOL, GROUPS, 1);
	kv_report_pool(test.pool, &report);
	assert_rows(&report, 0);
	ck_assert_uint_eq(report.n_tokens, 0);
	ck_assert_uint_eq(report.free_bytes, 50 * (BLOCK_0 + BLOCK_1));
	ck_assert_uint_eq(report.workspace_bytes, 0);
	ck_assert_uint_eq(report.reserved_bytes, 0);
	ck_assert_uint_eq(report.tables_bytes, 0);
	ck_assert_uint_gt(report.rotation_bytes, 0);
	/* 16 centroids and 15 boundaries of tq4; bf16 has none */
	ck_assert_uint_eq(report.codebooks_bytes, 31 * sizeof(float));
	kv_test_domain_finish(&test);
}
END_TEST

/*
 * Lengths that differ by layer are counted per layer; tokens by the least one; blocks hold the rest as slack.
 */
START_TEST(test_report_counts_rows_per_layer)
{
	struct kv_test_domain test;
	struct kv_memory_report report;

	kv_test_domain_init(&test, &limits, POOL, GROUPS, 1);

	struct kv_session *session = kv_test_open(&test);

	append(session, 7, 0, 20, 0, 3, true);
	append(session, 7, 20, 5, 0, 1, true);
	append(session, 9, 0, 1, 0, 3, true);
	kv_report_sequence(kv_sequence_find(session, 7), &report);
	ck_assert_uint_eq(report.n_tokens, 20);
	assert_rows(&report, 20 + 20 + 25);
	ck_assert_uint_eq(report.tables_bytes, 2 * CHUNK);
	kv_report_session(session, &report);
	ck_assert_uint_eq(report.n_tokens, 21);
	assert_rows(&report, 65 + 3);
	ck_assert_uint_eq(report.tables_bytes, 4 * CHUNK);
	kv_report_pool(test.pool, &report);
	ck_assert_uint_eq(report.n_tokens, 21);
	assert_rows(&report, 65 + 3);
	ck_assert_uint_eq(report.tables_bytes, 4 * CHUNK);
	/* 25 tokens take 2 blocks, 1 token takes 1 */
	ck_assert_uint_eq(report.workspace_bytes, 3 * BLOCK_0 + 3 * BLOCK_1 - 68 * TOKEN_STORED);
	ck_assert_uint_eq(report.free_bytes, 47 * BLOCK_0 + 47 * BLOCK_1);
	kv_test_domain_finish(&test);
}
END_TEST

/* Rows that are planned but not committed, and those of zombies, are workspace, not stored rows. */
START_TEST(test_report_uncommitted_and_buried_rows_are_workspace)
{
	struct kv_test_domain test;
	struct kv_memory_report report;

	kv_test_domain_init(&test, &limits, POOL, GROUPS, 1);

	struct kv_session *session = kv_test_open(&test);

	append(session, 7, 0, 16, 0, 3, true);

	struct kv_item item = append(session, 7, 16, 16, 0, 3, false);

	kv_report_pool(test.pool, &report);
	assert_rows(&report, 3 * 16);
	ck_assert_uint_eq(report.workspace_bytes, BLOCK_0 + BLOCK_1);
	kv_item_finish(&item, 0, 3);
	kv_report_pool(test.pool, &report);
	assert_rows(&report, 3 * 32);
	ck_assert_uint_eq(report.workspace_bytes, 0);
	kv_assert_ok(kv_sequence_free(session, 7));
	kv_report_pool(test.pool, &report);
	assert_rows(&report, 0);
	ck_assert_uint_eq(report.workspace_bytes, 2 * (BLOCK_0 + BLOCK_1));
	kv_test_release_all(test.domain);
	kv_report_pool(test.pool, &report);
	ck_assert_uint_eq(report.workspace_bytes, 0);
	ck_assert_uint_eq(report.tables_bytes, 0);
	kv_test_domain_finish(&test);
}
END_TEST

/* Reserved blocks are told apart from free ones, for the pool and for the session that holds them. */
START_TEST(test_report_tells_reserved_from_free)
{
	struct kv_test_domain test;
	struct kv_memory_report report;
	struct kv_session *session;

	kv_test_domain_init(&test, &limits, POOL, GROUPS, 1);

	const struct kv_open_params params = { .pool = test.pool, .reserve_blocks = 10 };

	kv_assert_ok(kv_session_open(test.domain, &params, 1, &session, NULL));
	append(session, 7, 0, 17, 1, 1, true); /* two blocks of group 1 from the reservation */
	kv_report_session(session, &report);
	ck_assert_uint_eq(report.reserved_bytes, 10 * BLOCK_0 + 8 * BLOCK_1);
	kv_report_pool(test.pool, &report);
	ck_assert_uint_eq(report.reserved_bytes, 10 * BLOCK_0 + 8 * BLOCK_1);
	ck_assert_uint_eq(report.free_bytes, 40 * BLOCK_0 + 40 * BLOCK_1);
	ck_assert_uint_eq(report.n_tokens, 0); /* the other layers have none */
	assert_rows(&report, 17);
	kv_session_close(test.domain, session, false);
	kv_report_pool(test.pool, &report);
	ck_assert_uint_eq(report.reserved_bytes, 0);
	kv_test_domain_finish(&test);
}
END_TEST

/* Rotations and codebooks are counted once each: K and V of one dim share them, other dims have their own. */
START_TEST(test_report_counts_constants_once)
{
	static const char one[] =
		"name=p,layers=9,q_heads=1,kv_heads=1,head_dim=64,k=tq4,v=tq4,block_size=16,blocks=1";
	static const char two[] =
		"name=p,layers=9,q_heads=1,kv_heads=1,k_head_dim=64,v_head_dim=128,k=tq4,v=tq4,block_size=16,"
		"blocks=1";
	struct kv_test_domain test;
	struct kv_memory_report first, second;

	kv_test_domain_init(&test, &limits, one, NULL, 1);
	kv_report_pool(test.pool, &first);
	kv_test_domain_finish(&test);
	kv_test_domain_init(&test, &limits, two, NULL, 1);
	kv_report_pool(test.pool, &second);
	kv_test_domain_finish(&test);
	ck_assert_uint_eq(first.codebooks_bytes, 31 * sizeof(float));
	ck_assert_uint_eq(second.codebooks_bytes, 2 * 31 * sizeof(float));
	ck_assert_uint_gt(second.rotation_bytes, first.rotation_bytes);
}
END_TEST

/*
 * Layers of every family: bytes of a token by hand from the layouts of FORMATS 5, per layer, and what 16 bits
 * would take for the same.
 */
START_TEST(test_report_counts_every_format)
{
	/* head_dim 64, one KV head; K and V of a layer have the same format */
	static const struct {
		const char *format;
		uint32_t payload, norms, scales, zeros, exact;
	} layers[] = {
		{ "f32", 0, 0, 0, 0, 256 }, { "f16", 0, 0, 0, 0, 128 }, { "bf16", 0, 0, 0, 0, 128 },
		{ "fp8", 64, 0, 4, 0, 0 }, { "tq1", 8, 4, 0, 0, 0 }, { "tq5", 40, 4, 0, 0, 0 },
		{ "tq8", 64, 4, 0, 0, 0 }, { "tqp2", 16, 8, 0, 0, 0 }, { "tqp5", 40, 8, 0, 0, 0 },
		{ "v3", 24, 0, 4, 4, 0 }, /* two groups of 32, float16 each */
		{ "v8", 64, 0, 4, 4, 0 },
		{ "turboquant25", 18, 8, 0, 0, 0 }, /* 16 channels of 2 + 1 bits, 48 of 1 + 1 */
		{ "turboquant35", 28, 8, 0, 0, 0 }, /* 32 of 3 + 1 and of 2 + 1 */
	};
	static const uint32_t n_tokens = 3;
	char names[512] = "[";
	struct kv_test_domain test;
	struct kv_memory_report report;
	json_t *json = NULL;
	struct kv_pool_spec *spec = NULL;
	uint64_t sums[5] = { 0 };
	const uint32_t n_layers = (uint32_t)KV_LENGTH(layers);

	for (uint32_t l = 0; l < n_layers; l++)
		snprintf(names + strlen(names), 32, "%s\"%s\"", l ? "," : "", layers[l].format);
	strcat(names, "]");
	kv_assert_ok(kv_pool_spec_parse_short(
		"name=p,layers=13,q_heads=1,kv_heads=1,head_dim=64,block_size=16,blocks=4", &json, NULL));
	json_object_set_new(json, "k", json_loads(names, 0, NULL));
	json_object_set_new(json, "v", json_loads(names, 0, NULL));
	kv_assert_ok(kv_pool_spec_create(json, &spec, NULL));
	json_decref(json);
	test.source = (struct kv_test_source){ { &kv_test_source_ops }, 1 };
	kv_assert_ok(kv_domain_create(&limits, &test.source.base, &test.domain, NULL));
	kv_assert_ok(kv_domain_pool_add(test.domain, spec, NULL, 0, 0, &test.pool, NULL));
	struct kv_session *session = kv_test_open(&test);

	/* Some tokens on all layers, then two more on one layer after the other: its part is told apart. */
	append(session, 7, 0, n_tokens, 0, n_layers, true);
	for (uint32_t l = 0; l < n_layers; l++) {
		const uint64_t parts[5] = { layers[l].payload, layers[l].norms, layers[l].scales,
			layers[l].zeros, layers[l].exact };
		struct kv_memory_report before;
		uint64_t row_bytes = 0;

		kv_report_pool(test.pool, &before);
		append(session, 7, n_tokens, 2, l, 1, true);
		kv_report_pool(test.pool, &report);
		ck_assert_uint_eq(report.payload_bytes - before.payload_bytes, 4 * parts[0]);
		ck_assert_uint_eq(report.norms_bytes - before.norms_bytes, 4 * parts[1]);
		ck_assert_uint_eq(report.scales_bytes - before.scales_bytes, 4 * parts[2]);
		ck_assert_uint_eq(report.zeros_bytes - before.zeros_bytes, 4 * parts[3]);
		ck_assert_uint_eq(report.exact_bytes - before.exact_bytes, 4 * parts[4]);
		ck_assert_uint_eq(report.dense_equivalent_bytes - before.dense_equivalent_bytes, 4 * 128);
		for (int i = 0; i < 5; i++) {
			row_bytes += parts[i];
			sums[i] += 2 * (n_tokens + 2) * parts[i];
		}
		ck_assert_uint_eq(row_bytes, spec->layers[l].k->row_bytes);
	}
	ck_assert_uint_eq(report.payload_bytes, sums[0]);
	ck_assert_uint_eq(report.norms_bytes, sums[1]);
	ck_assert_uint_eq(report.scales_bytes, sums[2]);
	ck_assert_uint_eq(report.zeros_bytes, sums[3]);
	ck_assert_uint_eq(report.exact_bytes, sums[4]);
	ck_assert_uint_eq(report.stored_bytes, sums[0] + sums[1] + sums[2] + sums[3] + sums[4]);
	ck_assert_uint_eq(report.dense_equivalent_bytes, 2 * 128 * (n_tokens + 2) * n_layers);
	kv_test_domain_finish(&test);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("report");
	TCase *tcase = tcase_create("report");

	tcase_add_test(tcase, test_report_empty_pool_is_free);
	tcase_add_test(tcase, test_report_counts_rows_per_layer);
	tcase_add_test(tcase, test_report_uncommitted_and_buried_rows_are_workspace);
	tcase_add_test(tcase, test_report_tells_reserved_from_free);
	tcase_add_test(tcase, test_report_counts_constants_once);
	tcase_add_test(tcase, test_report_counts_every_format);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK_GETENV);
}
