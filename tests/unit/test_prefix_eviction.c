#include "tests/lib/kv_prefix_rig.h"

/* FAILURES P1: idle prefixes go first, then idle evictable sequences, least recently used; then POOL_FULL. */
START_TEST(test_prefix_order_of_eviction)
{
	struct rig rig;
	struct kv_prefix_key key = key_of(32, 160, 0);
	struct kv_item item;

	rig_init(&rig, RIG_POOL, RIG_GROUPS); /* 10 blocks a group */
	append_now(&rig, 1, 0, 32);
	publish(&rig, 1, &key, 0, 1);
	kv_assert_ok(kv_sequence_free(rig.session, 1));
	kv_test_release_all(rig.test.domain);
	for (uint64_t id = 2; id <= 4; id++) {
		item = plan(&rig, KV_ITEM_APPEND, id, 0, 32, 0, 4, KV_ITEM_CREATE | KV_ITEM_EVICTABLE);
		finish(&item, KV_OK, KV_OK, 32);
	}
	append_now(&rig, 5, 0, 32);
	ck_assert_uint_eq(n_free(&rig, 0), 0);
	/* 2 is used, so 3 is the oldest; 4 is pinned. */
	item = plan(&rig, KV_ITEM_READ, 2, 0, 1, 0, 4, 0);
	finish(&item, KV_OK, KV_OK, 32);
	kv_assert_ok(kv_sequence_pin(rig.session, 4));
	kv_assert_ok(kv_sequence_pin(rig.session, 4));
	kv_test_audit(rig.test.domain, NULL, 0);

	append_now(&rig, 5, 32, 32);
	ck_assert_uint_eq(kv_prefix_counts(rig.pool).n_nodes, 0);
	ck_assert_uint_eq(rig.pool->n_evicted_sequences, 0);
	append_now(&rig, 5, 64, 16);
	ck_assert(kv_sequence_find(rig.session, 3)->is_evicted);
	ck_assert(!kv_sequence_find(rig.session, 2)->is_evicted);
	item = plan(&rig, KV_ITEM_DECODE, 3, 32, 0, 0, 1, 0);
	assert_refused(&item, KV_EVICTED, 0, KV_LAYER_NONE);
	item = plan(&rig, KV_ITEM_APPEND, 3, 32, 1, 0, 4, 0);
	assert_refused(&item, KV_EVICTED, 0, KV_LAYER_NONE);
	append_now(&rig, 5, 80, 48);
	ck_assert(kv_sequence_find(rig.session, 2)->is_evicted);
	/* What cannot succeed evicts nobody. */
	kv_assert_ok(kv_sequence_unpin(rig.session, 4));
	kv_assert_ok(kv_sequence_unpin(rig.session, 4));
	kv_assert_status(kv_sequence_unpin(rig.session, 4), KV_BAD_STATE);
	item = plan(&rig, KV_ITEM_APPEND, 6, 0, 48, 0, 4, KV_ITEM_CREATE);
	assert_refused(&item, KV_POOL_FULL, 0, KV_LAYER_NONE);
	ck_assert(!kv_sequence_find(rig.session, 4)->is_evicted);
	/* More than the whole pool is refused finally. */
	item = plan(&rig, KV_ITEM_APPEND, 5, 128, 33, 0, 4, 0);
	assert_refused(&item, KV_LEN_LIMIT, 128, KV_LAYER_NONE);
	append_now(&rig, 3, 0, 16);
	ck_assert(!kv_sequence_find(rig.session, 3)->is_evicted);
	kv_test_audit(rig.test.domain, NULL, 0);
	rig_finish(&rig);
}
END_TEST

/* A sequence at rest is not evicted for its own append, nor one that an item names. */
START_TEST(test_prefix_nobody_is_evicted_for_himself)
{
	struct rig rig;
	struct kv_item held, item;

	rig_init(&rig, RIG_POOL, RIG_GROUPS);
	item = plan(&rig, KV_ITEM_APPEND, 1, 0, 80, 0, 4, KV_ITEM_CREATE | KV_ITEM_EVICTABLE);
	finish(&item, KV_OK, KV_OK, 80);
	item = plan(&rig, KV_ITEM_APPEND, 2, 0, 80, 0, 4, KV_ITEM_CREATE | KV_ITEM_EVICTABLE);
	finish(&item, KV_OK, KV_OK, 80);
	held = plan(&rig, KV_ITEM_READ, 2, 0, 80, 0, 4, 0);
	item = plan(&rig, KV_ITEM_APPEND, 1, 80, 16, 0, 4, 0);
	assert_refused(&item, KV_POOL_FULL, 80, KV_LAYER_NONE);
	finish(&held, KV_OK, KV_OK, 80);
	append_now(&rig, 1, 80, 16);
	ck_assert(kv_sequence_find(rig.session, 2)->is_evicted);
	rig_finish(&rig);
}
END_TEST

/* A pool with these marks, and n sequences of a block of ten, which may go. */
static void rig_init_filled(struct rig *rig, uint32_t high_percent, uint32_t low_percent, uint64_t n)
{
	const struct kv_domain_limits limits = { .sessions_max = 4,
		.sequences_max = 20,
		.lease_ms = 1000,
		.lease_ms_max = 1000,
		.evict_high_percent = high_percent,
		.evict_low_percent = low_percent };

	kv_test_domain_init(&rig->test, &limits, RIG_POOL, RIG_GROUPS, 1);
	rig->pool = rig->test.pool;
	rig->session = kv_test_open(&rig->test);
	for (uint64_t id = 1; id <= n; id++) {
		struct kv_item item =
			plan(rig, KV_ITEM_APPEND, id, 0, 16, 0, 4, KV_ITEM_CREATE | KV_ITEM_EVICTABLE);

		finish(&item, KV_OK, KV_OK, 16);
	}
	kv_domain_release(rig->test.domain, 1024);
}

/* Above the high mark the daemon makes room by itself, until the low one, and only of what may go. */
START_TEST(test_prefix_watermarks)
{
	struct rig rig;

	rig_init_filled(&rig, 80, 50, 8);
	ck_assert_uint_eq(n_free(&rig, 0), 2);
	append_now(&rig, 9, 0, 16);
	kv_domain_release(rig.test.domain, 1024);
	ck_assert_uint_eq(n_free(&rig, 0), 5);
	ck_assert_uint_eq(rig.pool->n_evicted_sequences, 4);
	append_now(&rig, 9, 16, 64);
	kv_domain_release(rig.test.domain, 1024);
	ck_assert_uint_eq(n_free(&rig, 0), 5);
	kv_test_audit(rig.test.domain, NULL, 0);
	rig_finish(&rig);
}
END_TEST

/* A high mark alone keeps a pool at that mark. */
START_TEST(test_prefix_high_mark_alone)
{
	struct rig rig;

	rig_init_filled(&rig, 80, 0, 9);
	ck_assert_uint_eq(n_free(&rig, 0), 2);
	ck_assert_uint_eq(rig.pool->n_evicted_sequences, 1);
	rig_finish(&rig);
}
END_TEST

/* FAILURES P6, L14: evicting is bounded between two calls of kv_domain_release(). */
START_TEST(test_prefix_eviction_is_bounded)
{
	struct rig rig;
	struct kv_prefix_key key = key_of(16, 160, 0);
	struct kv_item item;

	rig_init(&rig, RIG_POOL, RIG_GROUPS);
	append_now(&rig, 1, 0, 16);
	publish(&rig, 1, &key, 0, 1);
	kv_assert_ok(kv_sequence_free(rig.session, 1));
	kv_test_release_all(rig.test.domain);
	append_now(&rig, 2, 0, 144);
	rig.test.domain->n_cut = KV_EVICT_BLOCKS_MAX;
	item = plan(&rig, KV_ITEM_APPEND, 2, 144, 16, 0, 4, 0);
	assert_refused(&item, KV_POOL_FULL, 144, KV_LAYER_NONE);
	kv_domain_release(rig.test.domain, 1024);
	append_now(&rig, 2, 144, 16);
	rig_finish(&rig);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("prefix_eviction");
	TCase *tcase = tcase_create("all");

	tcase_add_test(tcase, test_prefix_order_of_eviction);
	tcase_add_test(tcase, test_prefix_nobody_is_evicted_for_himself);
	tcase_add_test(tcase, test_prefix_watermarks);
	tcase_add_test(tcase, test_prefix_high_mark_alone);
	tcase_add_test(tcase, test_prefix_eviction_is_bounded);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK_GETENV);
}
