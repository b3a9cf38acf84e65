/*
 * Finishing items, and what happens to sequences afterwards.
 */
#include "core/memory.h"
#include "tests/lib/kv_sequence_rig.h"

/* ---- falling back ---- */

/*
 * A refused append takes its sequence back to what is committed, and everything planned on top of it with it.
 */
START_TEST(test_sequence_life_refused_append_falls_back)
{
	struct rig rig;
	struct kv_item a, b, decode, read, again;

	rig_init(&rig, RIG_POOL, RIG_GROUPS);
	append_now(&rig, 7, 0, 10);
	a = append(&rig, 7, 10, 30);
	b = append(&rig, 7, 40, 30);
	decode = plan(
		&rig, KV_ITEM_DECODE, 7, 5, 0, 0, 1, 0); /* sees committed rows only, but of the old epoch */
	read = plan(&rig, KV_ITEM_READ, 7, 0, 70, 0, 4, 0);
	ck_assert_uint_eq(n_free(&rig, 0), 5);
	ck_assert(!kv_item_is_stale(&a));
	a.layer = 2;
	a.row = 3;
	finish(&a, KV_BAD_VALUE, KV_BAD_VALUE, 10);
	ck_assert_uint_eq(a.layer, 2);
	ck_assert_uint_eq(a.row, 3);
	ck_assert_uint_eq(n_free(&rig, 0), 9);
	ck_assert(kv_item_is_stale(&b));
	ck_assert(kv_item_is_stale(&decode));
	again = append(&rig, 7, 10, 6);
	ck_assert(!kv_item_is_stale(&again));
	finish(&b, KV_OK, KV_POSITION, 16);
	finish(&decode, KV_OK, KV_POSITION, 16);
	read.layer = 1;
	finish(&read, KV_BAD_VALUE, KV_POSITION, 16);
	ck_assert_uint_eq(read.layer, KV_LAYER_NONE);
	finish(&again, KV_OK, KV_OK, 16);
	ck_assert_uint_eq(rig.pool->n_tokens_committed, 16);
	rig_finish(&rig);
}
END_TEST

/* A decode or read that fails changes nothing. */
START_TEST(test_sequence_life_failed_decode_does_not_fall_back)
{
	struct rig rig;
	struct kv_item a, decode, read, b;

	rig_init(&rig, RIG_POOL, RIG_GROUPS);
	a = append(&rig, 7, 0, 10);
	decode = plan(&rig, KV_ITEM_DECODE, 7, 10, 0, 0, 1, 0);
	read = plan(&rig, KV_ITEM_READ, 7, 0, 10, 0, 4, 0);
	b = append(&rig, 7, 10, 10);
	finish(&a, KV_OK, KV_OK, 10);
	finish(&decode, KV_CANCELLED, KV_CANCELLED, 10);
	finish(&read, KV_DEADLINE, KV_DEADLINE, 10);
	finish(&b, KV_OK, KV_OK, 20);
	ck_assert_uint_eq(rig.session->n_queries, 0);
	ck_assert_uint_eq(rig.session->n_rows_out, 0);
	rig_finish(&rig);
}
END_TEST

/*
 * What the server decided about a request (cancelled, too late, device lost) is told even when it is stale
 * too.
 */
START_TEST(test_sequence_life_stale_items_keep_the_servers_word)
{
	static const enum kv_status statuses[] = { KV_CANCELLED, KV_DEADLINE, KV_DEVICE_LOST };

	for (uint32_t i = 0; i < KV_LENGTH(statuses); i++) {
		struct rig rig;
		struct kv_item a, b, c;

		rig_init(&rig, RIG_POOL, RIG_GROUPS);
		a = append(&rig, 7, 0, 10);
		b = append(&rig, 7, 10, 10);
		c = append(&rig, 7, 20, 10);
		finish(&a, statuses[i], statuses[i], 0);
		finish(&b, statuses[i], statuses[i], 0);
		finish(&c, KV_INTERNAL, KV_POSITION, 0);
		rig_finish(&rig);
	}
}
END_TEST

/* A sequence whose first append is refused stays without rows, and CREATE may be tried again. */
START_TEST(test_sequence_life_refused_creation_leaves_no_rows)
{
	struct rig rig;
	struct kv_item item;

	rig_init(&rig, RIG_POOL, RIG_GROUPS);
	item = append(&rig, 7, 0, 40);
	finish(&item, KV_BAD_VALUE, KV_BAD_VALUE, 0);
	ck_assert_uint_eq(n_free(&rig, 0), 10);
	item = append(&rig, 7, 0, 40);
	finish(&item, KV_OK, KV_OK, 40);
	rig_finish(&rig);
}
END_TEST

/* Finishing an item that planning refused, or finishing twice, does nothing. */
START_TEST(test_sequence_life_finish_of_nothing_does_nothing)
{
	struct rig rig;
	struct kv_item item;

	rig_init(&rig, RIG_POOL, RIG_GROUPS);
	item = plan(&rig, KV_ITEM_APPEND, 7, 3, 1, 0, 4, 0);
	finish(&item, KV_NOT_FOUND, KV_NOT_FOUND, 0);
	item = append(&rig, 7, 0, 3);
	finish(&item, KV_OK, KV_OK, 3);
	finish(&item, KV_BAD_VALUE, KV_BAD_VALUE, 3);
	append_now(&rig, 7, 3, 1);
	rig_finish(&rig);
}
END_TEST

/* ---- truncating, freeing, listing ---- */

/* TRUNCATE sets every layer to the lesser of its length and n, and gives blocks back. */
START_TEST(test_sequence_life_truncate_takes_the_lesser_length)
{
	struct rig rig;
	struct kv_item item;
	uint32_t length_min, length_max;

	rig_init(&rig, RIG_POOL, RIG_GROUPS);
	append_now(&rig, 7, 0, 20);
	item = plan(&rig, KV_ITEM_APPEND, 7, 20, 30, 0, 1, 0);
	kv_item_finish(&item, 0, 1);
	kv_sequence_lengths(kv_sequence_find(rig.session, 7), &length_min, &length_max);
	ck_assert_uint_eq(length_min, 20);
	ck_assert_uint_eq(length_max, 50);
	ck_assert_uint_eq(n_free(&rig, 0), 6);
	kv_assert_ok(kv_sequence_truncate(rig.session, 7, 33));
	kv_sequence_lengths(kv_sequence_find(rig.session, 7), &length_min, &length_max);
	ck_assert_uint_eq(length_min, 20);
	ck_assert_uint_eq(length_max, 33);
	ck_assert_uint_eq(n_free(&rig, 0), 7);
	kv_assert_ok(kv_sequence_truncate(rig.session, 7, 1000));
	kv_assert_ok(kv_sequence_truncate(rig.session, 7, 16));
	ck_assert_uint_eq(n_free(&rig, 0), 9);
	ck_assert_uint_eq(rig.pool->n_tokens_committed, 16);
	kv_assert_status(kv_sequence_truncate(rig.session, 8, 0), KV_NOT_FOUND);
	append_now(&rig, 7, 16, 1);
	rig_finish(&rig);
}
END_TEST

/*
 * Cutting is bounded between two releases: the rest waits, appends use it again, release cuts what is left.
 */
START_TEST(test_sequence_life_cutting_is_bounded)
{
	struct rig rig;
	const struct kv_block_counts *counts;

	rig_init(&rig,
		"name=p,layers=4,q_heads=1,kv_heads=1,head_dim=16,k=f32,v=f32,block_size=16,blocks=2000",
		NULL);
	counts = &rig.pool->blocks[0].counts;
	append_now(&rig, 7, 0, 1000 * 16);
	append_now(&rig, 8, 0, 100 * 16);
	kv_assert_ok(kv_sequence_truncate(rig.session, 7, 16));
	ck_assert_uint_eq(counts->n_owned, 1100 - KV_CUT_BLOCKS_MAX);
	kv_assert_ok(kv_sequence_truncate(rig.session, 8, 16));
	ck_assert_uint_eq(counts->n_owned, 1100 - KV_CUT_BLOCKS_MAX);
	ck_assert(kv_domain_has_zombies(rig.test.domain));
	kv_test_audit(rig.test.domain, NULL, 0);
	append_now(&rig, 7, 16, 100 * 16); /* into blocks that it has still */
	ck_assert_uint_eq(counts->n_owned, 1100 - KV_CUT_BLOCKS_MAX);
	kv_test_audit(rig.test.domain, NULL, 0);
	/* what was cut at once counts for the turn */
	ck_assert_uint_eq(kv_domain_release(rig.test.domain, KV_CUT_BLOCKS_MAX + 50), 50);
	ck_assert_uint_eq(counts->n_owned, 1100 - KV_CUT_BLOCKS_MAX - 50);
	kv_test_audit(rig.test.domain, NULL, 0);
	kv_test_release_all(rig.test.domain);
	ck_assert_uint_eq(counts->n_owned, 101 + 1);
	rig_finish(&rig);
}
END_TEST

/* A freed sequence is gone for its session at once; its blocks come back with release. */
START_TEST(test_sequence_life_free_buries_it)
{
	struct rig rig;

	rig_init(&rig, RIG_POOL, RIG_GROUPS);
	append_now(&rig, 7, 0, 40);
	kv_assert_ok(kv_sequence_free(rig.session, 7));
	ck_assert_ptr_null(kv_sequence_find(rig.session, 7));
	kv_assert_status(kv_sequence_free(rig.session, 7), KV_NOT_FOUND);
	ck_assert_uint_eq(rig.session->n_sequences, 0);
	ck_assert_uint_eq(rig.pool->n_zombies, 1);
	append_now(&rig, 7, 0, 1); /* the id may be used again at once */
	ck_assert_uint_eq(kv_domain_release(rig.test.domain, 4), 4);
	ck_assert_uint_eq(rig.pool->n_zombies, 1);
	ck_assert_uint_eq(kv_domain_release(rig.test.domain, 4), 2);
	ck_assert_uint_eq(rig.pool->n_zombies, 0);
	rig_finish(&rig);
}
END_TEST

/* Listing is in order of ids, in pages, with the following id as the cursor. */
START_TEST(test_sequence_life_list_is_sorted_and_paged)
{
	enum { N = 300 };
	const struct kv_domain_limits many = {
		.sessions_max = 2, .sequences_max = N, .lease_ms = 1000, .lease_ms_max = 1000
	};
	struct rig rig;
	struct kv_sequence *page[7];
	uint64_t ids[N], next = 1, last = 0, seed = 0x5EED0006;
	uint32_t n_listed = 0;

	printf("test_sequence_life: seed %llx\n", (unsigned long long)seed);
	kv_test_domain_init(&rig.test, &many,
		"name=p,layers=4,q_heads=1,kv_heads=1,head_dim=16,k=f32,v=f32,block_size=16,blocks=300", NULL,
		1);
	rig.pool = rig.test.pool;
	rig.session = kv_test_open(&rig.test);
	ck_assert_uint_eq(kv_sequence_list(rig.session, 0, page, 7, &next), 0);
	ck_assert_uint_eq(next, 0);
	for (uint32_t i = 0; i < N; i++) {
		ids[i] = i == 0 ? UINT64_MAX : i == 1 ? 1 : kv_test_random(&seed) >> (i % 50);
		append_now(&rig, ids[i], 0, 1);
	}
	for (uint32_t i = 2; i < N; i += 3)
		kv_assert_ok(kv_sequence_free(rig.session, ids[i]));
	kv_test_audit(rig.test.domain, NULL, 0);
	next = 1;
	while (next != 0) {
		const uint32_t n = kv_sequence_list(rig.session, next, page, 7, &next);

		for (uint32_t i = 0; i < n; i++) {
			ck_assert_uint_gt(page[i]->id, last);
			last = page[i]->id;
			ck_assert_ptr_eq(kv_sequence_find(rig.session, last), page[i]);
			if (i + 1 == n && next)
				ck_assert_uint_gt(next, last);
		}
		n_listed += n;
	}
	ck_assert_uint_eq(n_listed, 200);
	ck_assert_uint_eq(last, UINT64_MAX);
	ck_assert_uint_eq(kv_sequence_list(rig.session, 1, page, 1, &next), 1);
	ck_assert_uint_eq(page[0]->id, 1);
	rig_finish(&rig);
}
END_TEST

/* Ids in ascending order, which most clients use, do not make the listing's tree deep. */
START_TEST(test_sequence_life_tree_stays_shallow)
{
	enum { N = 1000 };
	const struct kv_domain_limits many = {
		.sessions_max = 2, .sequences_max = N, .lease_ms = 1000, .lease_ms_max = 1000
	};
	struct rig rig;
	uint32_t deepest = 0;

	kv_test_domain_init(&rig.test, &many,
		"name=p,layers=4,q_heads=1,kv_heads=1,head_dim=16,k=f32,v=f32,block_size=16,blocks=1000",
		NULL, 1);
	rig.pool = rig.test.pool;
	rig.session = kv_test_open(&rig.test);
	for (uint64_t id = 1; id <= N; id++)
		append_now(&rig, id, 0, 1);
	for (uint64_t id = 1; id <= N; id++) {
		const struct kv_sequence *node = kv_slot_of(rig.session)->tree;
		uint32_t depth = 0;

		for (; node->id != id; depth++)
			node = id < node->id ? node->tree_left : node->tree_right;
		deepest = depth > deepest ? depth : deepest;
	}
	ck_assert_uint_lt(deepest, 50); /* about 2.5 * log2(N) = 25 is to be expected */
	rig_finish(&rig);
}
END_TEST

/* A sequence that waits to be cut can be freed, and its object used again, without being cut twice. */
START_TEST(test_sequence_life_freed_while_it_waits_to_be_cut)
{
	struct rig rig;

	rig_init(&rig, RIG_POOL, RIG_GROUPS);
	append_now(&rig, 7, 0, 100);
	rig.test.domain->n_cut = KV_CUT_BLOCKS_MAX; /* as if others had cut already */
	kv_assert_ok(kv_sequence_truncate(rig.session, 7, 3));
	ck_assert_uint_eq(n_free(&rig, 0), 3);
	kv_assert_ok(kv_sequence_free(rig.session, 7));
	ck_assert(kv_list_is_empty(&rig.pool->surplus));
	kv_test_release_all(rig.test.domain);
	ck_assert_uint_eq(n_free(&rig, 0), 10);
	append_now(&rig, 8, 0, 100);
	kv_test_audit(rig.test.domain, NULL, 0);
	rig_finish(&rig);
}
END_TEST

/* Once made, a domain takes no more memory: neither planning nor finishing nor cutting allocates. */
START_TEST(test_sequence_life_data_path_does_not_allocate)
{
	struct rig rig;
	uint64_t n_before;

	rig_init(&rig, RIG_POOL, RIG_GROUPS);
	n_before = kv_alloc_count();
	append_now(&rig, 7, 0, 100);
	kv_assert_ok(kv_sequence_truncate(rig.session, 7, 3));
	append_now(&rig, 7, 3, 100);
	kv_assert_ok(kv_sequence_free(rig.session, 7));
	kv_session_close(rig.test.domain, rig.session, false);
	kv_test_release_all(rig.test.domain);
	ck_assert_uint_eq(kv_alloc_count(), n_before);
	rig_finish(&rig);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("sequence_life");
	TCase *tcase = tcase_create("sequence_life");

	tcase_add_test(tcase, test_sequence_life_refused_append_falls_back);
	tcase_add_test(tcase, test_sequence_life_failed_decode_does_not_fall_back);
	tcase_add_test(tcase, test_sequence_life_stale_items_keep_the_servers_word);
	tcase_add_test(tcase, test_sequence_life_refused_creation_leaves_no_rows);
	tcase_add_test(tcase, test_sequence_life_finish_of_nothing_does_nothing);
	tcase_add_test(tcase, test_sequence_life_truncate_takes_the_lesser_length);
	tcase_add_test(tcase, test_sequence_life_cutting_is_bounded);
	tcase_add_test(tcase, test_sequence_life_free_buries_it);
	tcase_add_test(tcase, test_sequence_life_list_is_sorted_and_paged);
	tcase_add_test(tcase, test_sequence_life_tree_stays_shallow);
	tcase_add_test(tcase, test_sequence_life_freed_while_it_waits_to_be_cut);
	tcase_add_test(tcase, test_sequence_life_data_path_does_not_allocate);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK_GETENV);
}
