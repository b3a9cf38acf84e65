#include "core/block_pool.h"

#include "core/memory.h"
#include "core/pool_spec.h"
#include "tests/lib/kv_core_test.h"

static void assert_counts(const struct kv_block_pool *pool, uint32_t n_free, uint32_t n_owned,
	uint32_t n_shared, uint32_t n_draining)
{
	ck_assert_uint_eq(pool->counts.n_free, n_free);
	ck_assert_uint_eq(pool->counts.n_owned, n_owned);
	ck_assert_uint_eq(pool->counts.n_shared, n_shared);
	ck_assert_uint_eq(pool->counts.n_draining, n_draining);
	ck_assert_uint_eq(n_free + n_owned + n_shared + n_draining, pool->counts.n_total);
}

/* Taking more than is free leaves the pool exactly as it was. */
START_TEST(test_block_pool_take_is_all_or_nothing)
{
	struct kv_block_pool pool;
	kv_block_id ids[8];

	kv_assert_ok(kv_block_pool_init(&pool, 5, NULL));
	kv_assert_ok(kv_block_pool_take(&pool, 3, 0, ids));
	kv_assert_status(kv_block_pool_take(&pool, 3, 0, ids), KV_POOL_FULL);
	assert_counts(&pool, 2, 3, 0, 0);
	kv_assert_ok(kv_block_pool_take(&pool, 2, 0, ids + 3));
	assert_counts(&pool, 0, 5, 0, 0);
	for (uint32_t i = 0; i < 5; i++) {
		for (uint32_t j = 0; j < i; j++)
			ck_assert_uint_ne(ids[i].idx, ids[j].idx);
	}
	kv_block_pool_finish(&pool);
}
END_TEST

/* A block without owner that a batch still names is draining and is not handed out before the batch ends. */
START_TEST(test_block_pool_draining_blocks_are_not_handed_out)
{
	struct kv_block_pool pool;
	kv_block_id id, other;

	kv_assert_ok(kv_block_pool_init(&pool, 1, NULL));
	kv_assert_ok(kv_block_pool_take(&pool, 1, 0, &id));
	kv_block_pool_flight_begin(&pool, id);
	kv_block_pool_flight_begin(&pool, id);
	assert_counts(&pool, 0, 1, 0, 0);
	kv_block_pool_disown(&pool, id);
	assert_counts(&pool, 0, 0, 0, 1);
	kv_assert_status(kv_block_pool_take(&pool, 1, 0, &other), KV_POOL_FULL);
	kv_assert_status(kv_block_pool_reserve(&pool, 1), KV_POOL_FULL);
	kv_block_pool_flight_end(&pool, id);
	kv_assert_status(kv_block_pool_take(&pool, 1, 0, &other), KV_POOL_FULL);
	kv_block_pool_flight_end(&pool, id);
	assert_counts(&pool, 1, 0, 0, 0);
	kv_assert_ok(kv_block_pool_take(&pool, 1, 0, &other));
	ck_assert_uint_eq(other.idx, id.idx);
	kv_block_pool_finish(&pool);
}
END_TEST

/* A table's blocks in flight are counted as one by one, whatever state each is in, and gaps are none. */
START_TEST(test_block_pool_tables_are_counted_block_by_block)
{
	struct kv_block_pool pool;
	kv_block_id ids[3];
	uint32_t table[5];

	kv_assert_ok(kv_block_pool_init(&pool, 3, NULL));
	kv_assert_ok(kv_block_pool_take(&pool, 3, 0, ids));
	kv_block_pool_keep(&pool, ids[1]);
	kv_block_pool_disown(&pool, ids[1]);
	ck_assert_uint_eq(pool.counts.n_idle, 1);
	for (uint32_t i = 0; i < 3; i++)
		table[i] = ids[i].idx;
	table[3] = KV_BLOCK_NONE;
	table[4] = ids[0].idx;
	kv_block_pool_flights_begin(&pool, table, 5);
	ck_assert_uint_eq(pool.in_flight[ids[0].idx], 2);
	ck_assert_uint_eq(pool.in_flight[ids[1].idx], 1);
	ck_assert_uint_eq(pool.counts.n_idle, 0);
	kv_block_pool_disown(&pool, ids[0]);
	assert_counts(&pool, 0, 2, 0, 1);
	kv_block_pool_flights_end(&pool, table, 4);
	assert_counts(&pool, 0, 2, 0, 1);
	ck_assert_uint_eq(pool.counts.n_idle, 1);
	kv_block_pool_flights_end(&pool, table + 3, 2);
	assert_counts(&pool, 1, 2, 0, 0);
	kv_block_pool_finish(&pool);
}
END_TEST

/* A block with two owners is shared, and free only after both have let go. */
START_TEST(test_block_pool_shared_blocks_have_two_owners)
{
	struct kv_block_pool pool;
	kv_block_id id;

	kv_assert_ok(kv_block_pool_init(&pool, 3, NULL));
	kv_assert_ok(kv_block_pool_take(&pool, 1, 0, &id));
	kv_block_pool_own(&pool, id);
	assert_counts(&pool, 2, 0, 1, 0);
	kv_block_pool_own(&pool, id);
	kv_block_pool_disown(&pool, id);
	assert_counts(&pool, 2, 0, 1, 0);
	kv_block_pool_disown(&pool, id);
	assert_counts(&pool, 2, 1, 0, 0);
	kv_block_pool_disown(&pool, id);
	assert_counts(&pool, 3, 0, 0, 0);
	kv_block_pool_finish(&pool);
}
END_TEST

/* A block is pinned while one of its owners is, however many others there are, and whatever names it. */
START_TEST(test_block_pool_pinned_blocks_are_in_no_other_state)
{
	struct kv_block_pool pool;
	kv_block_id ids[2];

	kv_assert_ok(kv_block_pool_init(&pool, 3, NULL));
	kv_assert_ok(kv_block_pool_take(&pool, 2, 0, ids));
	kv_block_pool_pin(&pool, ids[0]);
	ck_assert_uint_eq(pool.counts.n_pinned, 1);
	ck_assert_uint_eq(pool.counts.n_owned, 1);
	kv_block_pool_own(&pool, ids[0]);
	kv_block_pool_pin(&pool, ids[0]);
	kv_block_pool_flight_begin(&pool, ids[0]);
	ck_assert_uint_eq(pool.counts.n_pinned, 1);
	ck_assert_uint_eq(pool.counts.n_shared, 0);
	ck_assert_uint_eq(pool.counts.n_extra_owners, 1);
	kv_block_pool_unpin(&pool, ids[0]);
	ck_assert_uint_eq(pool.counts.n_pinned, 1);
	kv_block_pool_unpin(&pool, ids[0]);
	ck_assert_uint_eq(pool.counts.n_pinned, 0);
	assert_counts(&pool, 1, 1, 1, 0);
	kv_block_pool_disown(&pool, ids[0]);
	kv_block_pool_disown(&pool, ids[0]);
	assert_counts(&pool, 1, 1, 0, 1);
	kv_block_pool_flight_end(&pool, ids[0]);
	assert_counts(&pool, 2, 1, 0, 0);
	kv_block_pool_finish(&pool);
}
END_TEST

/* Reserved blocks are free blocks that only their reservation can take, and are used up by taking. */
START_TEST(test_block_pool_reservations_hold_free_blocks)
{
	struct kv_block_pool pool;
	kv_block_id ids[8];

	kv_assert_ok(kv_block_pool_init(&pool, 8, NULL));
	kv_assert_ok(kv_block_pool_reserve(&pool, 6));
	kv_assert_status(kv_block_pool_reserve(&pool, 3), KV_POOL_FULL);
	ck_assert_uint_eq(pool.counts.n_reserved, 6);
	assert_counts(&pool, 8, 0, 0, 0);
	kv_assert_status(kv_block_pool_take(&pool, 3, 0, ids), KV_POOL_FULL);
	kv_assert_status(kv_block_pool_take(&pool, 7, 4, ids), KV_POOL_FULL);
	ck_assert_uint_eq(pool.counts.n_reserved, 6);
	kv_assert_ok(kv_block_pool_take(&pool, 5, 4, ids));
	ck_assert_uint_eq(pool.counts.n_reserved, 2);
	assert_counts(&pool, 3, 5, 0, 0);
	kv_block_pool_unreserve(&pool, 2);
	kv_assert_ok(kv_block_pool_take(&pool, 3, 0, ids + 5));
	kv_block_pool_finish(&pool);
}
END_TEST

/* The high-water mark keeps the most blocks that were ever not free. */
START_TEST(test_block_pool_high_water_mark_stays)
{
	struct kv_block_pool pool;
	kv_block_id ids[8];

	kv_assert_ok(kv_block_pool_init(&pool, 8, NULL));
	kv_assert_ok(kv_block_pool_take(&pool, 6, 0, ids));
	for (uint32_t i = 0; i < 6; i++)
		kv_block_pool_disown(&pool, ids[i]);
	kv_assert_ok(kv_block_pool_take(&pool, 2, 0, ids));
	ck_assert_uint_eq(pool.counts.n_used_max, 6);
	ck_assert_uint_eq(pool.n_touched, 6);
	kv_block_pool_finish(&pool);
}
END_TEST

/* When the k-th allocation fails, init says so and leaves nothing behind, for every k. */
START_TEST(test_block_pool_init_survives_every_failed_allocation)
{
	struct kv_block_pool pool;
	uint32_t k = 0;

	for (;; k++) {
		struct kv_error err = { 0 };

		kv_alloc_fail_after(k);
		const enum kv_status status = kv_block_pool_init(&pool, 1000, &err);

		kv_alloc_fail_after(-1);
		if (status == KV_OK)
			break;
		kv_assert_status(status, KV_NO_MEMORY);
		ck_assert_ptr_null(pool.owners);
		ck_assert_ptr_nonnull(strstr(err.msg, "1000"));
	}
	ck_assert_uint_eq(k, 10);
	kv_block_pool_finish(&pool);
	kv_block_pool_finish(&pool); /* a zeroed pool is a valid empty one */
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("block_pool");
	TCase *tcase = tcase_create("block_pool");

	tcase_add_test(tcase, test_block_pool_take_is_all_or_nothing);
	tcase_add_test(tcase, test_block_pool_draining_blocks_are_not_handed_out);
	tcase_add_test(tcase, test_block_pool_tables_are_counted_block_by_block);
	tcase_add_test(tcase, test_block_pool_shared_blocks_have_two_owners);
	tcase_add_test(tcase, test_block_pool_pinned_blocks_are_in_no_other_state);
	tcase_add_test(tcase, test_block_pool_reservations_hold_free_blocks);
	tcase_add_test(tcase, test_block_pool_high_water_mark_stays);
	tcase_add_test(tcase, test_block_pool_init_survives_every_failed_allocation);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK_GETENV);
}
