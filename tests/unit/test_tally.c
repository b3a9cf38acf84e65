/*
 * The audit of a running domain, by itself. Under operations that go on: test_sequence_model.c; in the whole
 * server: the simulation.
 */
#include "core/tally.h"

#include <stdio.h>

#include "core/backend.h"
#include "core/domain_internal.h"
#include "core/memory.h"
#include "core/prefix.h"
#include "tests/lib/kv_core_test.h"

#define POOL   "name=p,layers=2,q_heads=1,kv_heads=1,head_dim=16,k=f32,v=f32,block_size=16,blocks=30"
#define GROUPS "[[0],[1]]"

static const struct kv_domain_limits limits = {
	.sessions_max = 1000,
	.sequences_max = 20,
	.lease_ms = 1000,
	.lease_ms_max = 1000,
};

static void append(struct kv_session *session, uint64_t id, uint32_t n_tokens)
{
	struct kv_item item = {
		.sequence_id = id, .n_tokens = n_tokens, .kind = KV_ITEM_APPEND, .flags = KV_ITEM_CREATE
	};

	kv_item_plan(session, &item, 0, 2, 1);
	ck_assert_uint_eq(item.status, KV_OK);
	kv_item_finish(&item, 0, 2);
}

/* Two sessions, one of them named and owned, with two sequences, one of them forked, and the fork pinned. */
static struct kv_session *rig_init(struct kv_test_domain *test)
{
	const struct kv_open_params params = { .name = "n", .name_bytes = 1, .owner_id = 5 };
	struct kv_open_params open = params;
	struct kv_session *session;

	kv_test_domain_init(test, &limits, POOL, GROUPS, 1);
	open.pool = test->pool;
	kv_assert_ok(kv_session_open(test->domain, &open, 1, &session, NULL));
	append(kv_test_open(test), 1, 40);
	append(session, 7, 50);
	kv_assert_ok(kv_sequence_fork(session, 8, 7, 40, 1, NULL));
	kv_assert_ok(kv_sequence_pin(session, 8));
	return session;
}

/* To its end, n_max at a time; returns the number of steps. */
static enum kv_status audit(struct kv_test_domain *test, uint32_t n_max, uint32_t *n_steps,
	struct kv_finding *finding, struct kv_error *err)
{
	struct kv_tally *tally = NULL;
	enum kv_status status = kv_tally_create(test->domain, &tally, err);
	bool is_done = false;

	for (*n_steps = 0; status == KV_OK && !is_done; ++*n_steps) {
		ck_assert_uint_lt(*n_steps, 10000);
		status = kv_tally_step(tally, n_max, true, &is_done, finding, err);
	}
	kv_tally_destroy(tally);
	return status;
}

static void assert_clean(struct kv_test_domain *test)
{
	struct kv_finding finding;
	struct kv_error err = { 0 };
	uint32_t n_steps;

	ck_assert_msg(audit(test, 4096, &n_steps, &finding, &err) == KV_OK, "%s", err.msg);
}

/* A step looks at no more than it was told to, so an audit takes as many as there is to look at. */
START_TEST(test_tally_is_cut_into_steps)
{
	struct kv_test_domain test;
	struct kv_finding finding;
	uint32_t n_whole, n_tens, n_ones;

	rig_init(&test);
	kv_assert_ok(audit(&test, 4096, &n_whole, &finding, NULL));
	kv_assert_ok(audit(&test, 10, &n_tens, &finding, NULL));
	kv_assert_ok(audit(&test, 1, &n_ones, &finding, NULL));
	ck_assert_uint_le(n_whole, 4); /* one pool, and a quiet moment */
	ck_assert_uint_ge(n_tens, 8);  /* 60 blocks, 20 entries and more */
	ck_assert_uint_ge(n_ones, 80);
	kv_test_domain_finish(&test);
}
END_TEST

/* What has more parts than a step may look at is counted: nothing in large steps, everything in small ones.
 */
START_TEST(test_tally_tells_which_sums_it_leaves_out)
{
	static const uint32_t sizes[] = { KV_TALLY_STEP_MAX, 1 };
	struct kv_test_domain test;

	rig_init(&test);
	ck_assert_uint_ne(kv_tenant_make(&test.domain->tenants, 9), KV_TENANT_NOBODY);
	for (uint32_t i = 0; i < KV_LENGTH(sizes); i++) {
		const uint64_t n_tenants = test.domain->tenants.n_touched - 1;
		struct kv_tally *tally = NULL;
		struct kv_finding finding;
		bool is_done = false;

		ck_assert_uint_ge(n_tenants, 1);
		kv_assert_ok(kv_tally_create(test.domain, &tally, NULL));
		while (!is_done)
			kv_assert_ok(kv_tally_step(tally, sizes[i], true, &is_done, &finding, NULL));

		const struct kv_tally_counts counts = kv_tally_counts(tally);

		ck_assert_uint_eq(counts.n_sessions, 2);
		ck_assert_uint_eq(counts.n_sessions_unsummed, i == 0 ? 0 : 2);
		ck_assert_uint_eq(counts.n_pools_unsummed, i == 0 ? 0 : 1);
		ck_assert_uint_eq(counts.n_tenants_unsummed, i == 0 ? 0 : n_tenants);
		kv_tally_destroy(tally);
	}
	kv_test_domain_finish(&test);
}
END_TEST

/* A number that is off by one is found, whichever of those that a running audit works out, and named. */
START_TEST(test_tally_finds_every_wrong_count)
{
	struct kv_test_domain test;
	struct kv_session *session = rig_init(&test);
	struct kv_domain *domain = test.domain;
	struct kv_sequence *sequence = kv_sequence_find(session, 7);
	struct kv_block_pool *blocks = &test.pool->blocks[1];
	uint32_t block_idx, shared_idx, n_steps;

	kv_block_table_copy(&sequence->tables[1], &test.pool->tables, 3, 1, &block_idx);
	kv_block_table_copy(&sequence->tables[1], &test.pool->tables, 0, 1, &shared_idx);

	const struct {
		uint32_t *number;
		const char *words;
	} rows[] = {
		/* In steps that are too small for sums. */
		{ &sequence->committed[0], "more is committed than planned" },
		{ &blocks->owners[block_idx], "owners: recorded 2, counted 1" },
		{ &blocks->owners[shared_idx], "owners: recorded 3, counted 2" },
		{ &blocks->in_flight[block_idx], "in flight without a batch: recorded 1, counted 0" },
		{ &blocks->counts.n_free, "group 1: audit: free blocks" },
		{ &blocks->counts.n_owned, "owned blocks" },
		{ &blocks->counts.n_shared, "shared blocks" },
		{ &blocks->counts.n_pinned, "pinned blocks" },
		{ &blocks->pins[block_idx], "pins: recorded 1, counted 0" },
		{ &blocks->pins[shared_idx], "pins: recorded 2, counted 1" },
		{ &sequence->n_pins, "its blocks are not pinned as it is" },
		{ &blocks->counts.n_draining, "draining blocks" },
		{ &blocks->counts.n_kept, "kept blocks" },
		{ &blocks->counts.n_idle, "idle blocks" },
		{ &blocks->n_touched, "blocks in the free list" },
		{ &domain->n_sessions, "open sessions" },
		{ &domain->n_leases, "sessions in the lease heap" },
		{ &kv_slot_of(session)->heap_idx, "not where the lease heap says" },
	};

	for (uint32_t i = 0; i < KV_LENGTH(rows); i++) {
		struct kv_finding finding = { 0 };
		struct kv_error err = { 0 };

		assert_clean(&test);
		++*rows[i].number;
		ck_assert_msg(audit(&test, 1 + i, &n_steps, &finding, &err) == KV_INTERNAL, "%s is not found",
			rows[i].words);
		ck_assert_msg(strstr(err.msg, rows[i].words) != NULL, "\"%s\" not in \"%s\"", rows[i].words,
			err.msg);
		if (rows[i].number == &blocks->owners[block_idx] || rows[i].number == &sequence->committed[0])
			ck_assert_uint_eq(finding.session, session->handle);
		--*rows[i].number;
	}
	assert_clean(&test);
	kv_test_domain_finish(&test);
}
END_TEST

/* A sum that is off by one is found, of a session, a pool or a tenant, and the text names it. */
START_TEST(test_tally_finds_every_wrong_sum)
{
	struct kv_test_domain test;
	struct kv_session *session = rig_init(&test);
	struct kv_session_slot *slot = kv_slot_of(session);
	struct kv_pool *pool = test.pool;
	struct kv_tenant *tenant = &test.domain->tenants.entries[session->payer];
	struct kv_sequence *sequence = kv_sequence_find(session, 7);
	uint32_t n_steps;

	const struct {
		uint64_t *number;
		const char *words;
		bool is_session;
	} rows[] = {
		{ &slot->n_tokens_committed, "audit: tokens: recorded", true },
		{ &slot->n_exact_rows, "rows of exact windows: recorded", true },
		{ &slot->n_tokens_charged, "tokens charged: recorded", true },
		{ &slot->layer_tokens[1], "tokens of a layer: recorded", true },
		{ &pool->n_tokens_committed, "tokens of the pool: recorded", false },
		{ &pool->n_exact_rows, "rows of exact windows of the pool", false },
		{ &pool->layer_tokens[0], "tokens of a layer of the pool", false },
		{ &tenant->used[KV_QUOTA_BYTES], "charges of tenant 0: audit: bytes: recorded", false },
		{ &tenant->used[KV_QUOTA_TOKENS], "charges of tenant 0: audit: tokens: recorded", false },
		{ &tenant->used[KV_QUOTA_SESSIONS], "charges of tenant 0: audit: sessions: recorded", false },
		{ &pool->n_spilled_tokens, "spilled tokens: recorded 1, counted 0", false },
		{ &pool->n_tier_pages, "pages of tiers: recorded 1, counted 0", false },
		{ &tenant->used[KV_QUOTA_TIER_BYTES], "tier_bytes: recorded 1, counted 0", false },
	};
	const struct {
		uint32_t *number;
		const char *words;
		bool is_session;
	} small_rows[] = {
		{ &session->n_sequences, "sequences: recorded 3, counted 2", true },
		{ &slot->n_chunks, "table chunks: recorded", true },
		{ &sequence->n_tokens_charged, "tokens charged: recorded", true },
		{ &pool->n_sequences, "sequences of the pool: recorded 4, counted 3", false },
		{ &pool->n_sessions, "sessions of the pool", false },
		{ &pool->n_spilled, "spilled sequences: recorded 1, counted 0", false },
		{ &pool->tables.n_chunks_used, "table chunks", false },
		{ &pool->blocks[1].counts.n_reserved, "reserved blocks: recorded 1, counted 0", false },
		{ &pool->blocks[1].n_paid[session->payer], "tenant 0: audit: blocks that it pays for",
			false },
	};

	for (uint32_t i = 0; i < KV_LENGTH(rows) + KV_LENGTH(small_rows); i++) {
		const bool is_small = i >= KV_LENGTH(rows);
		const uint32_t k = is_small ? i - KV_LENGTH(rows) : i;
		const char *words = is_small ? small_rows[k].words : rows[k].words;
		const bool is_session = is_small ? small_rows[k].is_session : rows[k].is_session;
		struct kv_finding finding = { 0 };
		struct kv_error err = { 0 };

		assert_clean(&test);
		if (is_small)
			++*small_rows[k].number;
		else
			++*rows[k].number;
		ck_assert_msg(
			audit(&test, 100, &n_steps, &finding, &err) == KV_INTERNAL, "%s is not found", words);
		ck_assert_msg(strstr(err.msg, words) != NULL, "\"%s\" not in \"%s\"", words, err.msg);
		ck_assert_uint_eq(finding.session, is_session ? session->handle : 0);
		if (is_small)
			--*small_rows[k].number;
		else
			--*rows[k].number;
	}
	assert_clean(&test);
	kv_test_domain_finish(&test);
}
END_TEST

/* A table entry that names another block is found on both sides, one outside of the pool at once. */
START_TEST(test_tally_finds_wrong_table_entries)
{
	struct kv_test_domain test;
	struct kv_session *session = rig_init(&test);
	struct kv_sequence *sequence = kv_sequence_find(session, 7);
	struct kv_table_chunk *chunk = &test.pool->tables.chunks[sequence->tables[0].head_idx];
	const uint32_t right = chunk->block_idx[3];
	const uint32_t wrong[] = { chunk->block_idx[2], 29, 30 };

	for (uint32_t i = 0; i < KV_LENGTH(wrong); i++) {
		struct kv_finding finding = { 0 };
		struct kv_error err = { 0 };
		uint32_t n_steps;

		chunk->block_idx[3] = wrong[i];
		kv_assert_status(audit(&test, 5, &n_steps, &finding, &err), KV_INTERNAL);
		ck_assert_ptr_nonnull(
			strstr(err.msg, i < 2 ? "owners: recorded" : "entry 3: block 30 of 30"));
		ck_assert_str_eq(finding.pool, "p");
		chunk->block_idx[3] = right;
	}
	assert_clean(&test);
	kv_test_domain_finish(&test);
}
END_TEST

/* Without memory the audit says so, gives back what it had, and finds nothing. */
START_TEST(test_tally_survives_every_failed_allocation)
{
	struct kv_test_domain test;
	uint32_t n_failed = 0, n_steps;
	struct kv_finding finding;

	rig_init(&test);
	for (int64_t k = 0;; k++) {
		kv_alloc_fail_after(k);
		const enum kv_status status = audit(&test, 4096, &n_steps, &finding, NULL);

		kv_alloc_fail_after(-1);
		if (status == KV_OK)
			break;
		kv_assert_status(status, KV_NO_MEMORY);
		n_failed++;
	}
	ck_assert_uint_eq(n_failed, 10);
	assert_clean(&test);
	kv_test_domain_finish(&test);
}
END_TEST

/* A pool that is removed in the middle is left, and the audit goes on with the others. */
START_TEST(test_tally_leaves_a_pool_that_goes)
{
	struct kv_test_domain test;
	struct kv_tally *tally = NULL;
	struct kv_finding finding;
	bool is_done = false;

	kv_test_domain_init(&test, &limits, POOL, GROUPS, 1);
	kv_assert_ok(kv_tally_create(test.domain, &tally, NULL));
	for (uint32_t i = 0; i < 20; i++)
		kv_assert_ok(kv_tally_step(tally, 1, true, &is_done, &finding, NULL));
	ck_assert(!is_done);
	kv_domain_pool_remove(test.pool);
	while (!is_done)
		kv_assert_ok(kv_tally_step(tally, 1, true, &is_done, &finding, NULL));
	kv_tally_destroy(tally);
	kv_test_domain_finish(&test);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("tally");
	TCase *tcase = tcase_create("tally");

	tcase_add_test(tcase, test_tally_is_cut_into_steps);
	tcase_add_test(tcase, test_tally_tells_which_sums_it_leaves_out);
	tcase_add_test(tcase, test_tally_finds_every_wrong_count);
	tcase_add_test(tcase, test_tally_finds_every_wrong_sum);
	tcase_add_test(tcase, test_tally_finds_wrong_table_entries);
	tcase_add_test(tcase, test_tally_survives_every_failed_allocation);
	tcase_add_test(tcase, test_tally_leaves_a_pool_that_goes);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK_GETENV);
}
