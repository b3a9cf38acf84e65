#include "core/audit.h"
#include <stdio.h>

#include "core/backend.h"
#include "core/domain_internal.h"
#include "core/memory.h"
#include "core/number.h"
#include "tests/lib/kv_core_test.h"

#define POOL   "name=p,layers=2,q_heads=1,kv_heads=1,head_dim=16,k=f32,v=f32,block_size=16,blocks=30"
#define GROUPS "[[0],[1]]"

static const struct kv_domain_limits limits = {
	.sessions_max = 1000, /* so that another owner has another chain */
	.sequences_max = 20,
	.lease_ms = 1000,
	.lease_ms_max = 1000,
};

/*
 * A domain with everything that the audit looks at: two sessions, a zombie, a reservation, a batch in flight.
 */
struct rig {
	struct kv_test_domain test;
	struct kv_session *session;
	struct kv_sequence *sequence;
	struct kv_item item; /* in flight */
	struct kv_plan plan;
	struct kv_plan *plans[1];
	uint8_t *area;
};

static struct kv_item append(struct kv_session *session, uint64_t id, uint32_t position, uint32_t n_tokens)
{
	struct kv_item item = {
		.sequence_id = id,
		.position = position,
		.n_tokens = n_tokens,
		.kind = KV_ITEM_APPEND,
		.flags = position == 0 ? KV_ITEM_CREATE : 0,
	};

	kv_item_plan(session, &item, 0, 2, 1);
	ck_assert_uint_eq(item.status, KV_OK);
	return item;
}

static void rig_init(struct rig *rig)
{
	static const struct kv_frame_rows frame = {
		.n_layers = 2,
		.n_tokens_total = 5,
		.k_dtype = KV_DTYPE_F32,
		.v_dtype = KV_DTYPE_F32,
	};
	struct kv_session *other;
	struct kv_item item;
	uint32_t result_idx;

	kv_test_domain_init(&rig->test, &limits, POOL, GROUPS, 1);

	const struct kv_open_params params = {
		.pool = rig->test.pool,
		.name = "n",
		.name_bytes = 1,
		.owner_id = 5,
		.reserve_blocks = 4,
	};
	const uint64_t area_bytes = kv_plan_area_bytes(rig->test.pool->spec, 65536);

	kv_assert_ok(kv_session_open(rig->test.domain, &params, 1, &rig->session, NULL));
	other = kv_test_open(&rig->test);
	for (uint64_t id = 1; id <= 3; id++) {
		item = append(other, id, 0, 40);
		kv_item_finish(&item, 0, 2);
	}
	kv_assert_ok(kv_sequence_free(other, 2));
	item = append(rig->session, 7, 0, 20);
	rig->sequence = item.sequence;
	kv_item_finish(&item, 0, 2);
	rig->item = append(rig->session, 7, 20, 5);
	ck_assert_int_eq(posix_memalign((void **)&rig->area, 4096, area_bytes), 0);
	kv_plan_begin(&rig->plan, rig->test.pool, rig->area, area_bytes);
	ck_assert(kv_plan_add(&rig->plan, &frame, &rig->item, &result_idx));
	rig->plans[0] = &rig->plan;
	kv_test_audit(rig->test.domain, rig->plans, 1);
}

static void rig_finish(struct rig *rig)
{
	kv_test_audit(rig->test.domain, rig->plans, 1);
	kv_plan_end(&rig->plan);
	kv_item_finish(&rig->item, 0, 2);
	kv_test_domain_finish(&rig->test);
	free(rig->area);
}

/* The audit finds the fault and its text has the words. */
static void assert_found(struct rig *rig, const char *words)
{
	struct kv_error err = { 0 };

	kv_assert_status(kv_audit_domain(rig->test.domain, rig->plans, 1, &err), KV_INTERNAL);
	ck_assert_msg(strstr(err.msg, words) != NULL, "\"%s\" not in \"%s\"", words, err.msg);
	kv_assert_status(kv_audit_domain(rig->test.domain, rig->plans, 1, NULL), KV_INTERNAL);
}

/* A number that is off by one is found, whichever it is, and named. */
START_TEST(test_audit_finds_every_wrong_count)
{
	struct rig rig;

	rig_init(&rig);

	struct kv_domain *domain = rig.test.domain;
	struct kv_pool *pool = rig.test.pool;
	struct kv_session_slot *slot = kv_slot_of(rig.session);
	struct kv_block_pool *blocks = &pool->blocks[1];
	uint32_t block_idx;

	kv_block_table_copy(&rig.sequence->tables[1], &pool->tables, 1, 1, &block_idx);

	const struct {
		uint32_t *number;
		const char *words;
	} rows[] = {
		{ &blocks->owners[block_idx], "owners: recorded 2, counted 1" },
		{ &blocks->in_flight[block_idx], "in flight: recorded 2, counted 1" },
		{ &blocks->counts.n_free, "group 1: audit: free blocks" },
		{ &blocks->counts.n_owned, "owned blocks" },
		{ &blocks->counts.n_shared, "shared blocks" },
		{ &blocks->counts.n_pinned, "pinned blocks" },
		{ &blocks->pins[block_idx], "pins: recorded 1, counted 0" },
		{ &rig.sequence->n_pins, "its blocks are not pinned as it is" },
		{ &blocks->counts.n_draining, "draining blocks" },
		{ &blocks->counts.n_reserved, "reserved blocks" },
		{ &blocks->counts.n_total, "blocks in all" },
		{ &blocks->n_touched, "blocks in the free list" },
		{ &pool->tables.n_chunks_used, "table chunks" },
		{ &pool->tables.n_chunks_touched, "free table chunks" },
		{ &pool->n_sessions, "sessions of the pool" },
		{ &pool->n_sequences, "sequences" },
		{ &pool->n_zombies, "zombies" },
		{ &pool->slab->n_used, "sequence objects" },
		{ &pool->slab->n_freed, "free sequence objects" },
		{ &rig.session->n_sequences, "sequences of a session" },
		{ &rig.session->n_blocks_reserved[0], "reserved blocks" },
		{ &slot->n_chunks, "table chunks of sessions" },
		{ &domain->n_sessions, "open sessions" },
		{ &domain->n_closing, "closing sessions" },
		{ &domain->n_sequences, "sequences over all pools" },
		{ &slot->generation, "its handle does not find it" },
		{ &slot->heap_idx, "not where the lease heap says" },
		{ &rig.sequence->committed[0], "bytes of sessions" },
	};
	const struct {
		uint64_t *number;
		const char *words;
	} wide[] = {
		{ &pool->n_tokens_committed, "tokens" },
		{ &pool->layer_tokens[1], "tokens of a layer" },
		{ &slot->layer_tokens[0], "bytes of sessions" },
		{ &slot->n_tokens_committed, "tokens of sessions" },
		{ &rig.sequence->id, "its id does not find it" },
		{ &rig.session->owner_id, "its owner does not lead to it" },
		{ &domain->open_bits[0], "its bit is not set" },
	};

	for (uint32_t i = 0; i < KV_LENGTH(rows); i++) {
		++*rows[i].number;
		assert_found(&rig, rows[i].words);
		--*rows[i].number;
	}
	for (uint32_t i = 0; i < KV_LENGTH(wide); i++) {
		++*wide[i].number;
		assert_found(&rig, wide[i].words);
		--*wide[i].number;
	}
	rig_finish(&rig);
}
END_TEST

/* FAILURES M2: a block that is lost is told with the session that took it, also when that is long closed. */
START_TEST(test_audit_tells_whose_block_is_lost)
{
	struct rig rig;
	char words[128];
	uint32_t block_idx;

	rig_init(&rig);
	kv_block_table_copy(&rig.sequence->tables[0], &rig.test.pool->tables, 0, 1, &block_idx);
	snprintf(words, sizeof(words),
		"block %u: owners: recorded 2, counted 1; last taken by session %016llx", block_idx,
		(unsigned long long)rig.session->handle);
	/* An owner that no table, copy or prefix stands for. */
	kv_block_pool_own(&rig.test.pool->blocks[0], (kv_block_id){ block_idx });
	assert_found(&rig, words);
	kv_block_pool_disown(&rig.test.pool->blocks[0], (kv_block_id){ block_idx });
	rig_finish(&rig);
}
END_TEST

/* A batch that the audit is not told of, or is told of twice, shows in the in-flight counts. */
START_TEST(test_audit_counts_the_batches)
{
	struct rig rig;
	struct kv_error err = { 0 };
	struct kv_plan *twice[2];

	rig_init(&rig);
	twice[0] = twice[1] = &rig.plan;
	kv_assert_status(kv_audit_domain(rig.test.domain, NULL, 0, &err), KV_INTERNAL);
	ck_assert_ptr_nonnull(strstr(err.msg, "in flight: recorded 1, counted 0"));
	kv_assert_status(kv_audit_domain(rig.test.domain, twice, 2, &err), KV_INTERNAL);
	ck_assert_ptr_nonnull(strstr(err.msg, "in flight: recorded 1, counted 2"));
	rig_finish(&rig);
}
END_TEST

/* Two tables that name one block without sharing it, and ids outside the pool, are found. */
START_TEST(test_audit_finds_wrong_table_entries)
{
	struct rig rig;

	rig_init(&rig);

	struct kv_table_chunk *chunk = &rig.test.pool->tables.chunks[rig.sequence->tables[0].head_idx];
	const uint32_t right = chunk->block_idx[0];

	chunk->block_idx[0] = chunk->block_idx[1];
	assert_found(&rig, "owners: recorded");
	chunk->block_idx[0] = 30;
	assert_found(&rig, "entry 0: block 30 of 30");
	chunk->block_idx[0] = right;
	rig_finish(&rig);
}
END_TEST

/* A table that is shorter or longer than the lengths need is found. */
START_TEST(test_audit_compares_tables_with_lengths)
{
	struct rig rig;

	rig_init(&rig);
	rig.sequence->planned[0] += 16;
	assert_found(&rig, "its table is shorter than its length needs");
	rig.sequence->planned[0] -= 16;
	rig.sequence->planned[1] -= 20;
	assert_found(&rig, "more is committed than planned");
	rig.sequence->committed[1] -= 15;
	assert_found(&rig, "its table is longer and nobody will cut it");
	rig.sequence->committed[1] += 15;
	rig.sequence->planned[1] += 20;
	rig.sequence->n_items = 0;
	assert_found(&rig, "planned and committed differ without an item");
	rig.sequence->n_items = 1;
	rig_finish(&rig);
}
END_TEST

/* Without scratch memory the audit says so; it is not a finding. */
START_TEST(test_audit_survives_every_failed_allocation)
{
	struct rig rig;
	uint32_t n_failed = 0;

	rig_init(&rig);
	for (int64_t k = 0;; k++) {
		kv_alloc_fail_after(k);
		const enum kv_status status = kv_audit_domain(rig.test.domain, rig.plans, 1, NULL);

		kv_alloc_fail_after(-1);
		if (status == KV_OK)
			break;
		kv_assert_status(status, KV_NO_MEMORY);
		n_failed++;
	}
	ck_assert_uint_eq(n_failed, 10);
	rig_finish(&rig);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("audit");
	TCase *tcase = tcase_create("audit");

	tcase_add_test(tcase, test_audit_finds_every_wrong_count);
	tcase_add_test(tcase, test_audit_tells_whose_block_is_lost);
	tcase_add_test(tcase, test_audit_counts_the_batches);
	tcase_add_test(tcase, test_audit_finds_wrong_table_entries);
	tcase_add_test(tcase, test_audit_compares_tables_with_lengths);
	tcase_add_test(tcase, test_audit_survives_every_failed_allocation);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK_GETENV);
}
