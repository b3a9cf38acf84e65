#include <stdlib.h>

#include "core/plan.h"
#include "core/report.h"
#include "tests/lib/kv_sequence_rig.h"

/* Pages of one 32-bit number per group, block and token stand for rows: what a backend does, in one line
 * each. */
#define TOKENS 16u
#define BLOCKS 10u

static uint32_t pages[2][BLOCKS][TOKENS];

struct batch {
	struct kv_plan plan;
	uint8_t *area;
};

static uint32_t block_of(const struct rig *rig, uint64_t id, uint32_t g, uint32_t entry)
{
	const struct kv_sequence *sequence = kv_sequence_find(rig->session, id);
	uint32_t block;

	kv_block_table_copy(&sequence->tables[g], &rig->pool->tables, entry, 1, &block);
	return block;
}

static uint32_t n_owners(const struct rig *rig, uint64_t id, uint32_t g, uint32_t entry)
{
	return rig->pool->blocks[g].owners[block_of(rig, id, g, entry)];
}

static uint32_t fork_of(struct rig *rig, uint64_t child, uint64_t parent, uint32_t length)
{
	uint32_t expected = 0;

	kv_assert_ok(kv_sequence_fork(rig->session, child, parent, length, 50, &expected));
	kv_test_audit(rig->test.domain, NULL, 0);
	return kv_least_length(kv_sequence_find(rig->session, child)->committed, 0, 4);
}

static void begin(struct rig *rig, struct batch *batch)
{
	const uint64_t n_bytes = kv_plan_area_bytes(rig->pool->spec, 65536);
	struct kv_plan *plans[] = { &batch->plan };

	ck_assert_int_eq(posix_memalign((void **)&batch->area, 4096, n_bytes), 0);
	kv_plan_begin(&batch->plan, rig->pool, batch->area, n_bytes);
	ck_assert_uint_eq(rig->pool->n_copies, 0);
	kv_test_audit(rig->test.domain, plans, 1);
}

static void end(struct rig *rig, struct batch *batch)
{
	kv_plan_end(&batch->plan);
	free(batch->area);
	kv_test_audit(rig->test.domain, NULL, 0);
}

/* A batch without items; returns how many blocks it copied. */
static uint32_t run_copies(struct rig *rig)
{
	struct batch batch;

	begin(rig, &batch);
	const uint32_t n = batch.plan.batch.n_copies;

	for (uint32_t i = 0; i < n; i++) {
		const struct kv_copy_op *op = &batch.plan.batch.copies[i];

		memcpy(pages[op->group_idx][op->block_to], pages[op->group_idx][op->block_from],
			sizeof(pages[0][0]));
	}
	end(rig, &batch);
	return n;
}

/* A child takes no blocks, only owners; the least length of the parent is what it can have. */
START_TEST(test_share_fork_takes_no_block)
{
	struct rig rig;
	uint32_t expected = 0;

	rig_init(&rig, RIG_POOL, RIG_GROUPS);
	append_now(&rig, 1, 0, 40);
	struct kv_item item = plan(&rig, KV_ITEM_APPEND, 1, 40, 30, 0, 2, 0);

	ck_assert_uint_eq(item.status, KV_OK);
	item.status = KV_OK;
	kv_item_finish(&item, 0, 2);
	const uint32_t n_free_before = n_free(&rig, 0), n_free_other = n_free(&rig, 1);

	ck_assert_uint_eq(fork_of(&rig, 2, 1, KV_LENGTH_PLANNED), 40);
	ck_assert_uint_eq(fork_of(&rig, 3, 2, 33), 33);
	ck_assert_uint_eq(fork_of(&rig, 4, 3, 0), 0);
	ck_assert_uint_eq(n_free(&rig, 0), n_free_before);
	ck_assert_uint_eq(n_free(&rig, 1), n_free_other);
	for (uint32_t g = 0; g < 2; g++) {
		for (uint32_t entry = 0; entry < 3; entry++)
			ck_assert_uint_eq(n_owners(&rig, 1, g, entry), 3);
	}
	kv_assert_status(kv_sequence_fork(rig.session, 5, 1, 41, 50, &expected), KV_POSITION);
	ck_assert_uint_eq(expected, 40);
	kv_assert_status(kv_sequence_fork(rig.session, 5, 9, 1, 50, &expected), KV_NOT_FOUND);
	kv_assert_status(kv_sequence_fork(rig.session, 2, 1, 1, 50, &expected), KV_EXISTS);
	kv_assert_status(kv_sequence_fork(rig.session, 1, 1, 1, 50, &expected), KV_BAD_ARG);
	kv_assert_status(kv_sequence_fork(rig.session, 0, 1, 1, 50, &expected), KV_BAD_ARG);
	fork_of(&rig, 5, 1, 1);
	fork_of(&rig, 6, 1, 1);
	kv_assert_status(kv_sequence_fork(rig.session, 7, 1, 1, 50, &expected), KV_LIMIT);
	rig_finish(&rig);
}
END_TEST

/* The first writer of a shared block gets a copy, the last owner writes in place; whole blocks stay shared.
 */
START_TEST(test_share_the_first_writer_copies)
{
	struct rig rig;

	rig_init(&rig, RIG_POOL, RIG_GROUPS);
	append_now(&rig, 1, 0, 40);
	fork_of(&rig, 2, 1, 40);
	const uint32_t partial = block_of(&rig, 1, 0, 2);

	append_now(&rig, 1, 40, 2);
	ck_assert_uint_eq(rig.pool->n_copies, 2); /* one per group */
	ck_assert_uint_ne(block_of(&rig, 1, 0, 2), partial);
	ck_assert_uint_eq(block_of(&rig, 2, 0, 2), partial);
	ck_assert_uint_eq(n_owners(&rig, 1, 0, 0), 2);
	kv_test_audit(rig.test.domain, NULL, 0);

	/* While its copy waits, the other one may not write into the source either. */
	append_now(&rig, 2, 40, 1);
	ck_assert_uint_ne(block_of(&rig, 2, 0, 2), partial);
	ck_assert_uint_eq(run_copies(&rig), 4);
	ck_assert_uint_eq(rig.pool->blocks[0].owners[partial], 0);

	fork_of(&rig, 3, 1, 41);
	append_now(&rig, 3, 41, 1);
	ck_assert_uint_eq(run_copies(&rig), 2);
	const uint32_t own = block_of(&rig, 1, 0, 2);

	append_now(&rig, 1, 42, 1);
	ck_assert_uint_eq(block_of(&rig, 1, 0, 2), own);
	ck_assert_uint_eq(rig.pool->n_copies, 0);
	rig_finish(&rig);
}
END_TEST

/* Only groups and blocks that an append writes are left; a block without rows is replaced, not copied. */
START_TEST(test_share_copies_what_it_must)
{
	struct rig rig;

	rig_init(&rig, RIG_POOL, RIG_GROUPS);
	append_now(&rig, 1, 0, 40);
	fork_of(&rig, 2, 1, 40);
	kv_assert_ok(kv_sequence_truncate(rig.session, 2, 20));
	struct kv_item item = plan(&rig, KV_ITEM_APPEND, 2, 20, 20, 2, 1, 0);

	ck_assert_uint_eq(item.status, KV_OK);
	/* Entry 1 has rows below 20, entry 2 was cut. */
	ck_assert_uint_eq(rig.pool->n_copies, 1);
	ck_assert_uint_eq(rig.pool->copies[0].group_idx, 1);
	ck_assert_uint_eq(n_owners(&rig, 2, 1, 1), 1);
	ck_assert_uint_eq(n_owners(&rig, 2, 0, 1), 2);
	item.status = KV_OK;
	kv_item_finish(&item, 2, 1);
	kv_assert_ok(kv_sequence_truncate(rig.session, 2, 16));
	fork_of(&rig, 3, 1, 40);
	kv_assert_ok(kv_sequence_truncate(rig.session, 3, 16));
	run_copies(&rig);
	append_now(&rig, 3, 16, 24);
	ck_assert_uint_eq(rig.pool->n_copies, 0);
	ck_assert_uint_eq(n_owners(&rig, 3, 0, 1), 1);
	rig_finish(&rig);
}
END_TEST

/* What is left over of a longer table may be shared: it is replaced before it is written. */
START_TEST(test_share_surplus_entries)
{
	struct rig rig;

	rig_init(&rig, RIG_POOL, RIG_GROUPS);
	append_now(&rig, 1, 0, 80);
	fork_of(&rig, 2, 1, 80);
	rig.test.domain->n_cut = KV_CUT_BLOCKS_MAX; /* nothing more is cut in this turn */
	kv_assert_ok(kv_sequence_truncate(rig.session, 2, 18));
	ck_assert_uint_eq(kv_sequence_find(rig.session, 2)->tables[0].n_blocks, 5);
	append_now(&rig, 2, 18, 40);
	for (uint32_t entry = 1; entry < 4; entry++)
		ck_assert_uint_eq(n_owners(&rig, 2, 0, entry), 1);
	ck_assert_uint_eq(rig.pool->n_copies, 2);
	run_copies(&rig);
	kv_test_release_all(rig.test.domain);
	ck_assert_uint_eq(kv_sequence_find(rig.session, 2)->tables[0].n_blocks, 4);
	rig_finish(&rig);
}
END_TEST

/* A refused append keeps the copy it ordered: its sequence's rows are there, and nowhere else. */
START_TEST(test_share_a_refused_append_keeps_its_copy)
{
	struct rig rig;

	rig_init(&rig, RIG_POOL, RIG_GROUPS);
	append_now(&rig, 1, 0, 20);
	fork_of(&rig, 2, 1, 20);
	pages[0][block_of(&rig, 1, 0, 1)][3] = 77;
	struct kv_item item = append(&rig, 2, 20, 20);

	finish(&item, KV_CANCELLED, KV_CANCELLED, 20);
	kv_test_audit(rig.test.domain, NULL, 0);
	kv_assert_ok(kv_sequence_free(rig.session, 1));
	kv_test_release_all(rig.test.domain);
	ck_assert_uint_eq(run_copies(&rig), 2);
	ck_assert_uint_eq(pages[0][block_of(&rig, 2, 0, 1)][3], 77);
	rig_finish(&rig);
}
END_TEST

/* A copy whose sequence is gone is dropped; its destination went to nobody meanwhile. */
START_TEST(test_share_a_copy_that_nobody_wants)
{
	struct rig rig;

	rig_init(&rig, RIG_POOL, RIG_GROUPS);
	append_now(&rig, 1, 0, 20);
	fork_of(&rig, 2, 1, 20);
	append_now(&rig, 2, 20, 1);
	kv_assert_ok(kv_sequence_free(rig.session, 2));
	kv_assert_ok(kv_sequence_free(rig.session, 1));
	kv_test_release_all(rig.test.domain);
	/* Source and destination of the copy are all that is left. */
	ck_assert_uint_eq(n_free(&rig, 0), BLOCKS - 2);
	ck_assert_uint_eq(rig.pool->blocks[0].counts.n_draining, 1);
	kv_assert_status(kv_domain_pool_check_remove(rig.pool, NULL), KV_BAD_STATE);
	ck_assert_uint_eq(run_copies(&rig), 0);
	ck_assert_uint_eq(n_free(&rig, 0), BLOCKS);
	rig_finish(&rig);
}
END_TEST

/* Copies take blocks from the reservation first, and POOL_FULL leaves everything as it was. */
START_TEST(test_share_copies_count_as_blocks)
{
	struct rig rig;
	const struct kv_open_params params = { .reserve_blocks = 1 };
	struct kv_open_params own = params;
	struct kv_item item;

	rig_init(&rig, RIG_POOL, RIG_GROUPS);
	own.pool = rig.pool;
	kv_assert_ok(kv_session_open(rig.test.domain, &own, 1, &rig.session, NULL));
	append_now(&rig, 1, 0, 9 * 16 + 1); /* all blocks */
	ck_assert_uint_eq(n_free(&rig, 0), 0);
	fork_of(&rig, 2, 1, 17);
	item = plan(&rig, KV_ITEM_APPEND, 2, 17, 1, 0, 4, 0);
	assert_refused(&item, KV_POOL_FULL, 17, KV_LAYER_NONE);
	ck_assert_uint_eq(n_owners(&rig, 2, 0, 1), 2);
	kv_assert_ok(kv_sequence_truncate(rig.session, 1, 9 * 16));
	append_now(&rig, 2, 17, 1);
	ck_assert_uint_eq(n_free(&rig, 0), 0);
	run_copies(&rig);
	rig_finish(&rig);
}
END_TEST

/* What sharing saves is told, and the report adds up with it. */
START_TEST(test_share_report)
{
	struct rig rig;
	struct kv_memory_report report;
	const uint64_t block_bytes =
		16 * 2 * 2 * 16 * 4; /* tokens, layers of a group, K and V, dim, float32 */
	const uint64_t token_bytes = 4 * 2 * 16 * 4;

	rig_init(&rig, RIG_POOL, RIG_GROUPS);
	append_now(&rig, 1, 0, 40);
	fork_of(&rig, 2, 1, 40);
	fork_of(&rig, 3, 1, 20);
	kv_report_pool(rig.pool, &report);
	ck_assert_uint_eq(report.n_tokens, 100);
	ck_assert_uint_eq(report.stored_bytes, 100 * token_bytes);
	ck_assert_uint_eq(report.shared_bytes, 2 * (3 + 2) * block_bytes);
	ck_assert_uint_eq(report.workspace_bytes, 2 * 8 * block_bytes - 100 * token_bytes);
	kv_report_session(rig.session, &report);
	ck_assert_uint_eq(report.stored_bytes, 100 * token_bytes);
	rig_finish(&rig);
}
END_TEST

/* FORK's work in one turn is bounded: BUSY_RETRY, until the next kv_domain_release(). */
START_TEST(test_share_fork_is_bounded_per_turn)
{
	struct rig rig;
	uint32_t expected;

	rig_init(&rig, RIG_POOL, RIG_GROUPS);
	append_now(&rig, 1, 0, 40);
	rig.test.domain->n_forked = KV_FORK_ENTRIES_MAX - 1;
	fork_of(&rig, 2, 1, 40);
	kv_assert_status(kv_sequence_fork(rig.session, 3, 1, 40, 50, &expected), KV_BUSY_RETRY);
	kv_domain_release(rig.test.domain, 1);
	fork_of(&rig, 3, 1, 40);
	rig_finish(&rig);
}
END_TEST

static uint32_t n_pinned(const struct rig *rig, uint32_t g)
{
	kv_test_audit(rig->test.domain, NULL, 0);
	return rig->pool->blocks[g].counts.n_pinned;
}

/* Blocks of a pinned sequence are pinned, those that it shares and those that it gets included, until the
 * last pin goes or they do. */
START_TEST(test_share_pins_follow_the_table)
{
	struct rig rig;

	rig_init(&rig, RIG_POOL, RIG_GROUPS);
	append_now(&rig, 1, 0, 40); /* 3 blocks */
	fork_of(&rig, 2, 1, 40);
	ck_assert_uint_eq(n_pinned(&rig, 0), 0);
	kv_assert_ok(kv_sequence_pin(rig.session, 2));
	kv_assert_ok(kv_sequence_pin(rig.session, 2));
	ck_assert_uint_eq(n_pinned(&rig, 0), 3);
	ck_assert_uint_eq(rig.pool->blocks[0].counts.n_shared, 0);
	/* It leaves the third block to its parent, and gets a fourth. */
	append_now(&rig, 2, 40, 10);
	run_copies(&rig);
	ck_assert_uint_eq(n_pinned(&rig, 0), 4);
	ck_assert_uint_eq(rig.pool->blocks[0].counts.n_owned, 1);
	/* A child is not pinned by its parent; the parent's blocks stay so. */
	fork_of(&rig, 3, 2, 50);
	append_now(&rig, 3, 50, 30);
	run_copies(&rig);
	ck_assert_uint_eq(n_pinned(&rig, 0), 4);
	kv_assert_ok(kv_sequence_truncate(rig.session, 2, 20));
	ck_assert_uint_eq(n_pinned(&rig, 0), 2);
	kv_assert_ok(kv_sequence_unpin(rig.session, 2));
	ck_assert_uint_eq(n_pinned(&rig, 0), 2);
	kv_assert_ok(kv_sequence_unpin(rig.session, 2));
	ck_assert_uint_eq(n_pinned(&rig, 0), 0);
	/* What is taken apart is pinned until it is gone. */
	kv_assert_ok(kv_sequence_pin(rig.session, 2));
	kv_assert_ok(kv_sequence_free(rig.session, 2));
	ck_assert_uint_eq(n_pinned(&rig, 0), 2);
	kv_domain_release(rig.test.domain, 1024);
	ck_assert_uint_eq(n_pinned(&rig, 0), 0);
	rig_finish(&rig);
}
END_TEST

/* The first pin and the last walk along the table: they have FORK's bound, those between cost nothing. */
START_TEST(test_share_pins_are_bounded_per_turn)
{
	struct rig rig;

	rig_init(&rig, RIG_POOL, RIG_GROUPS);
	append_now(&rig, 1, 0, 40);
	rig.test.domain->n_forked = KV_FORK_ENTRIES_MAX - 1;
	kv_assert_ok(kv_sequence_pin(rig.session, 1));
	kv_assert_ok(kv_sequence_pin(rig.session, 1));
	kv_assert_ok(kv_sequence_unpin(rig.session, 1));
	kv_assert_status(kv_sequence_unpin(rig.session, 1), KV_BUSY_RETRY);
	ck_assert_uint_eq(n_pinned(&rig, 0), 3);
	kv_domain_release(rig.test.domain, 1);
	kv_assert_ok(kv_sequence_unpin(rig.session, 1));
	rig.test.domain->n_forked = KV_FORK_ENTRIES_MAX;
	kv_assert_status(kv_sequence_pin(rig.session, 1), KV_BUSY_RETRY);
	ck_assert_uint_eq(n_pinned(&rig, 0), 0);
	kv_domain_release(rig.test.domain, 1);
	rig_finish(&rig);
}
END_TEST

/* As many copies wait as a batch can hold; one more is BUSY_RETRY, which the next batch ends. */
START_TEST(test_share_copies_are_bounded)
{
	struct rig rig;

	rig_init(&rig, RIG_POOL, RIG_GROUPS);
	append_now(&rig, 1, 0, 20);
	fork_of(&rig, 2, 1, 20);
	rig.pool->n_copies = KV_COPIES_MAX - 1;
	const struct kv_item item = plan(&rig, KV_ITEM_APPEND, 2, 20, 1, 0, 4, 0);

	assert_refused(&item, KV_BUSY_RETRY, 20, KV_LAYER_NONE);
	rig.pool->n_copies = 0;
	append_now(&rig, 2, 20, 1);
	run_copies(&rig);
	rig_finish(&rig);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("sequence_share");
	TCase *tcase = tcase_create("all");

	tcase_add_test(tcase, test_share_fork_takes_no_block);
	tcase_add_test(tcase, test_share_the_first_writer_copies);
	tcase_add_test(tcase, test_share_copies_what_it_must);
	tcase_add_test(tcase, test_share_surplus_entries);
	tcase_add_test(tcase, test_share_a_refused_append_keeps_its_copy);
	tcase_add_test(tcase, test_share_a_copy_that_nobody_wants);
	tcase_add_test(tcase, test_share_copies_count_as_blocks);
	tcase_add_test(tcase, test_share_report);
	tcase_add_test(tcase, test_share_fork_is_bounded_per_turn);
	tcase_add_test(tcase, test_share_pins_follow_the_table);
	tcase_add_test(tcase, test_share_pins_are_bounded_per_turn);
	tcase_add_test(tcase, test_share_copies_are_bounded);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK_GETENV);
}
