/*
 * Planning items: what is refused, what is taken.
 */
#include "tests/lib/kv_sequence_rig.h"

/* A sequence is created by CREATE at position 0 only, and CREATE of one that has rows is refused. */
START_TEST(test_sequence_create_needs_the_flag)
{
	struct rig rig;
	struct kv_item item;

	rig_init(&rig, RIG_POOL, RIG_GROUPS);
	item = plan(&rig, KV_ITEM_APPEND, 7, 0, 1, 0, 4, 0);
	assert_refused(&item, KV_NOT_FOUND, 0, KV_LAYER_NONE);
	item = plan(&rig, KV_ITEM_APPEND, 7, 3, 1, 0, 4, KV_ITEM_CREATE);
	assert_refused(&item, KV_POSITION, 0, 0);
	item = plan(&rig, KV_ITEM_APPEND, 0, 0, 1, 0, 4, KV_ITEM_CREATE);
	assert_refused(&item, KV_BAD_ARG, 0, KV_LAYER_NONE);
	ck_assert_ptr_null(kv_sequence_find(rig.session, 7));
	ck_assert_uint_eq(rig.session->n_sequences, 0);
	item = append(&rig, 7, 0, 1);
	ck_assert(!item.sequence->is_evictable);
	ck_assert_uint_eq(item.sequence->used_ns, 50);
	finish(&item, KV_OK, KV_OK, 1);
	item = plan(&rig, KV_ITEM_APPEND, 7, 0, 1, 0, 4, KV_ITEM_CREATE);
	assert_refused(&item, KV_EXISTS, 1, KV_LAYER_NONE);
	item = (struct kv_item){ .sequence_id = 7, .n_tokens = 1, .kind = KV_ITEM_READ };
	kv_item_plan(rig.session, &item, 0, 1, 90);
	ck_assert_uint_eq(item.sequence->used_ns, 90);
	kv_item_finish(&item, 0, 1);
	kv_assert_ok(kv_sequence_truncate(rig.session, 7, 0));
	item = plan(&rig, KV_ITEM_APPEND, 7, 0, 1, 0, 4, KV_ITEM_CREATE | KV_ITEM_EVICTABLE);
	ck_assert_uint_eq(item.status, KV_OK);
	ck_assert(item.sequence->is_evictable);
	finish(&item, KV_OK, KV_OK, 1);
	rig_finish(&rig);
}
END_TEST

/*
 * The position must be the planned length on every layer of the frame; the answer names the layer that
 * differs.
 */
START_TEST(test_sequence_position_is_checked_on_every_layer)
{
	struct rig rig;
	struct kv_item item, first;

	rig_init(&rig, RIG_POOL, RIG_GROUPS);
	append_now(&rig, 7, 0, 10);
	first = plan(&rig, KV_ITEM_APPEND, 7, 10, 5, 2, 1, 0);
	ck_assert_uint_eq(first.status, KV_OK);
	item = plan(&rig, KV_ITEM_APPEND, 7, 10, 5, 0, 4, 0);
	assert_refused(&item, KV_POSITION, 15, 2);
	item = plan(&rig, KV_ITEM_APPEND, 7, 15, 5, 1, 2, 0);
	assert_refused(&item, KV_POSITION, 10, 1);
	item = plan(&rig, KV_ITEM_APPEND, 7, 10, 5, 3, 1, 0);
	ck_assert_uint_eq(item.status, KV_OK);
	kv_item_finish(&first, 2, 1);
	ck_assert_uint_eq(first.length, 15);
	kv_item_finish(&item, 3, 1);
	item = plan(&rig, KV_ITEM_APPEND, 7, 0, UINT32_MAX, 0, 4, 0);
	assert_refused(&item, KV_POSITION, 10, 0);
	item = plan(&rig, KV_ITEM_APPEND, 7, 10, 0, 0, 1, 0);
	assert_refused(&item, KV_BAD_ARG, 10, KV_LAYER_NONE);
	rig_finish(&rig);
}
END_TEST

/* tokens_max holds per sequence, also where the sum would wrap, and the old length stays good. */
START_TEST(test_sequence_length_is_limited)
{
	struct rig rig;
	struct kv_item item;

	rig_init(&rig, RIG_POOL, RIG_GROUPS);
	rig.session->tokens_max = 50;
	append_now(&rig, 7, 0, 40);
	item = plan(&rig, KV_ITEM_APPEND, 7, 40, 11, 0, 4, 0);
	assert_refused(&item, KV_LEN_LIMIT, 40, KV_LAYER_NONE);
	item = plan(&rig, KV_ITEM_APPEND, 7, 40, UINT32_MAX, 0, 4, 0);
	assert_refused(&item, KV_LEN_LIMIT, 40, KV_LAYER_NONE);
	append_now(&rig, 7, 40, 10);
	item = plan(&rig, KV_ITEM_DECODE, 7, KV_LENGTH_PLANNED, 0, 1, 1, 0);
	ck_assert_uint_eq(item.seen, 50);
	kv_item_finish(&item, 1, 1);
	rig_finish(&rig);
}
END_TEST

/* Blocks for an item are taken at once in all groups that it touches, or not at all. */
START_TEST(test_sequence_blocks_are_taken_all_or_nothing)
{
	struct rig rig;
	struct kv_item item;

	rig_init(&rig, RIG_POOL, RIG_GROUPS);
	item = plan(&rig, KV_ITEM_APPEND, 1, 0, 33, 2, 2, KV_ITEM_CREATE); /* 3 blocks of group 1 */
	kv_item_finish(&item, 2, 2);
	ck_assert_uint_eq(n_free(&rig, 0), 10);
	ck_assert_uint_eq(n_free(&rig, 1), 7);
	item = plan(&rig, KV_ITEM_APPEND, 2, 0, 8 * 16, 0, 4, KV_ITEM_CREATE);
	assert_refused(&item, KV_POOL_FULL, 0, KV_LAYER_NONE);
	ck_assert_uint_eq(n_free(&rig, 0), 10);
	ck_assert_uint_eq(n_free(&rig, 1), 7);
	ck_assert_ptr_null(kv_sequence_find(rig.session, 2));
	append_now(&rig, 2, 0, 7 * 16);
	ck_assert_uint_eq(n_free(&rig, 0), 3);
	ck_assert_uint_eq(n_free(&rig, 1), 0);
	item = plan(&rig, KV_ITEM_APPEND, 1, 33, 15, 2, 2, 0); /* fits into the third block */
	ck_assert_uint_eq(item.status, KV_OK);
	kv_item_finish(&item, 2, 2);
	item = plan(&rig, KV_ITEM_APPEND, 1, 48, 1, 2, 2, 0);
	assert_refused(&item, KV_POOL_FULL, 48, KV_LAYER_NONE);
	rig_finish(&rig);
}
END_TEST

/* Layers of a group share one table: it grows with the longest of them. */
START_TEST(test_sequence_layers_share_their_groups_table)
{
	struct rig rig;
	struct kv_item item;

	rig_init(&rig, RIG_POOL, RIG_GROUPS);
	for (uint32_t l = 0; l < 4; l++) {
		item = plan(&rig, KV_ITEM_APPEND, 7, 0, 20, l, 1, l == 0 ? KV_ITEM_CREATE : 0);
		ck_assert_uint_eq(item.status, KV_OK);
		kv_item_finish(&item, l, 1);
		ck_assert_uint_eq(n_free(&rig, 0), 8);
		ck_assert_uint_eq(n_free(&rig, 1), l < 2 ? 10 : 8);
	}
	ck_assert_uint_eq(rig.pool->n_tokens_committed, 20);
	rig_finish(&rig);
}
END_TEST

/* A session takes from its reservation first; others cannot. */
START_TEST(test_sequence_reservation_is_used_first)
{
	struct rig rig;
	struct kv_item item;
	struct kv_session *holder, *other;

	rig_init(&rig, RIG_POOL, NULL);
	other = rig.session;

	const struct kv_open_params params = { .pool = rig.pool, .reserve_blocks = 8 };

	kv_assert_ok(kv_session_open(rig.test.domain, &params, 1, &holder, NULL));
	item = plan(&rig, KV_ITEM_APPEND, 7, 0, 3 * 16, 0, 4, KV_ITEM_CREATE);
	assert_refused(&item, KV_POOL_FULL, 0, KV_LAYER_NONE);
	append_now(&rig, 7, 0, 2 * 16);
	rig.session = holder;
	append_now(&rig, 7, 0, 5 * 16);
	ck_assert_uint_eq(holder->n_blocks_reserved[0], 3);
	item = plan(&rig, KV_ITEM_APPEND, 7, 5 * 16, 4 * 16, 0, 4, 0);
	assert_refused(&item, KV_POOL_FULL, 5 * 16, KV_LAYER_NONE);
	ck_assert_uint_eq(holder->n_blocks_reserved[0], 3);
	append_now(&rig, 7, 5 * 16, 3 * 16);
	ck_assert_uint_eq(holder->n_blocks_reserved[0], 0);
	rig.session = other;
	rig_finish(&rig);
}
END_TEST

/* A batch of appends with room for some of them: each item has its own answer (FAILURES P5). */
START_TEST(test_sequence_full_pool_refuses_items_one_by_one)
{
	const struct kv_domain_limits many = {
		.sessions_max = 2, .sequences_max = 20, .lease_ms = 1000, .lease_ms_max = 1000
	};
	struct rig rig;
	struct kv_item items[8];

	kv_test_domain_init(&rig.test, &many, RIG_POOL, NULL, 1);
	rig.pool = rig.test.pool;
	rig.session = kv_test_open(&rig.test);
	for (uint32_t i = 0; i < 8; i++) {
		items[i] = plan(&rig, KV_ITEM_APPEND, i + 1, 0, 32, 0, 4, KV_ITEM_CREATE);
		if (i < 5)
			ck_assert_uint_eq(items[i].status, KV_OK);
		else
			assert_refused(&items[i], KV_POOL_FULL, 0, KV_LAYER_NONE);
	}
	for (uint32_t i = 0; i < 8; i++)
		kv_item_finish(&items[i], 0, 4);
	ck_assert_uint_eq(items[7].status, KV_POOL_FULL);
	kv_assert_ok(kv_sequence_free(rig.session, 1));
	kv_test_release_all(rig.test.domain);
	append_now(&rig, 8, 0, 32);
	rig_finish(&rig);
}
END_TEST

/* Sequences are bounded per session and over all; freed ones that still hold blocks are worth another try. */
START_TEST(test_sequence_number_is_bounded)
{
	struct rig rig;
	struct kv_item item;

	rig_init(&rig, RIG_POOL, NULL);
	rig.session->sequences_max = 2;
	append_now(&rig, 1, 0, 1);
	append_now(&rig, 2, 0, 1);
	item = plan(&rig, KV_ITEM_APPEND, 3, 0, 1, 0, 4, KV_ITEM_CREATE);
	assert_refused(&item, KV_LIMIT, 0, KV_LAYER_NONE);
	rig.session->sequences_max = 100;
	for (uint64_t id = 3; id <= 6; id++)
		append_now(&rig, id, 0, 1);
	item = plan(&rig, KV_ITEM_APPEND, 7, 0, 1, 0, 4, KV_ITEM_CREATE);
	assert_refused(&item, KV_LIMIT, 0, KV_LAYER_NONE);
	kv_assert_ok(kv_sequence_free(rig.session, 4));
	item = plan(&rig, KV_ITEM_APPEND, 7, 0, 1, 0, 4, KV_ITEM_CREATE);
	assert_refused(&item, KV_BUSY_RETRY, 0, KV_LAYER_NONE);
	kv_test_release_all(rig.test.domain);
	append_now(&rig, 7, 0, 1);
	/* one without blocks is gone at once */
	kv_assert_ok(kv_sequence_truncate(rig.session, 7, 0));
	kv_assert_ok(kv_sequence_free(rig.session, 7));
	append_now(&rig, 8, 0, 1);
	rig_finish(&rig);
}
END_TEST

/* When the table arena is used up, items are refused with LIMIT and nothing is taken. */
START_TEST(test_sequence_table_entries_are_bounded)
{
	struct rig rig;
	struct kv_item item;

	rig_init(&rig, RIG_POOL, RIG_GROUPS);
	append_now(&rig, 1, 0, 1);
	rig.pool->tables.n_chunks_max = 3; /* two are used, a new sequence needs two */
	item = plan(&rig, KV_ITEM_APPEND, 2, 0, 1, 0, 4, KV_ITEM_CREATE);
	assert_refused(&item, KV_LIMIT, 0, KV_LAYER_NONE);
	item = plan(&rig, KV_ITEM_APPEND, 2, 0, 1, 0, 1, KV_ITEM_CREATE);
	ck_assert_uint_eq(item.status, KV_OK);
	kv_item_finish(&item, 0, 1);
	ck_assert_uint_eq(n_free(&rig, 1), 9);
	rig_finish(&rig);
}
END_TEST

/* A decode sees what is planned on its layer or less, never more; an empty sequence can be asked one row. */
START_TEST(test_sequence_decode_sees_planned_rows)
{
	struct rig rig;
	struct kv_item item, decode;

	rig_init(&rig, RIG_POOL, RIG_GROUPS);
	item = plan(&rig, KV_ITEM_DECODE, 7, 0, 0, 0, 1, 0);
	assert_refused(&item, KV_NOT_FOUND, 0, KV_LAYER_NONE);
	item = append(&rig, 7, 0, 20);
	decode = plan(&rig, KV_ITEM_DECODE, 7, 21, 0, 3, 1, 0);
	assert_refused(&decode, KV_POSITION, 20, 3);
	decode = plan(&rig, KV_ITEM_DECODE, 7, KV_LENGTH_PLANNED, 0, 3, 1, 0);
	ck_assert_uint_eq(decode.seen, 20);
	finish(&item, KV_OK, KV_OK, 20);
	kv_item_finish(&decode, 3, 1);
	ck_assert_uint_eq(decode.status, KV_OK);
	decode = plan(&rig, KV_ITEM_DECODE, 7, 0, 0, 3, 1, 0);
	ck_assert_uint_eq(decode.status, KV_OK);
	ck_assert_uint_eq(decode.seen, 0);
	kv_item_finish(&decode, 3, 1);
	for (uint32_t q_len = 0; q_len < 8; q_len++) {
		decode = (struct kv_item){
			.sequence_id = 7,
			.position = 5,
			.q_len = q_len,
			.kind = KV_ITEM_DECODE,
		};
		kv_item_plan(rig.session, &decode, 0, 1, 1);
		ck_assert_uint_eq(decode.status, q_len >= 1 && q_len <= 5 ? KV_OK : KV_BAD_ARG);
		kv_item_finish(&decode, 0, 1);
	}
	rig_finish(&rig);
}
END_TEST

/* APPEND_DECODE sees its own tokens; when its q_len is refused, nothing was appended. */
START_TEST(test_sequence_append_decode_sees_its_tokens)
{
	struct rig rig;
	struct kv_item item;

	rig_init(&rig, RIG_POOL, RIG_GROUPS);
	item = (struct kv_item){
		.sequence_id = 7,
		.n_tokens = 3,
		.q_len = 4,
		.kind = KV_ITEM_APPEND_DECODE,
		.flags = KV_ITEM_CREATE,
	};
	kv_item_plan(rig.session, &item, 1, 1, 1);
	assert_refused(&item, KV_BAD_ARG, 0, KV_LAYER_NONE);
	ck_assert_ptr_null(kv_sequence_find(rig.session, 7));
	item.q_len = 3;
	kv_item_plan(rig.session, &item, 1, 1, 1);
	ck_assert_uint_eq(item.status, KV_OK);
	ck_assert_uint_eq(item.seen, 3);
	kv_item_finish(&item, 1, 1);
	ck_assert_uint_eq(item.length, 3);
	ck_assert_uint_eq(rig.session->n_rows_in, 3);
	ck_assert_uint_eq(rig.session->n_queries, 3);
	rig_finish(&rig);
}
END_TEST

/* A READ wants rows that are planned on every layer of its frame. */
START_TEST(test_sequence_read_is_checked_on_every_layer)
{
	struct rig rig;
	struct kv_item item;

	rig_init(&rig, RIG_POOL, RIG_GROUPS);
	item = plan(&rig, KV_ITEM_READ, 7, 0, 1, 0, 4, 0);
	assert_refused(&item, KV_NOT_FOUND, 0, KV_LAYER_NONE);
	append_now(&rig, 7, 0, 20);
	item = plan(&rig, KV_ITEM_APPEND, 7, 20, 5, 0, 2, 0);
	kv_item_finish(&item, 0, 2);
	item = plan(&rig, KV_ITEM_READ, 7, 19, 2, 0, 4, 0);
	assert_refused(&item, KV_POSITION, 20, 2);
	item = plan(&rig, KV_ITEM_READ, 7, 26, UINT32_MAX, 0, 2, 0);
	assert_refused(&item, KV_POSITION, 25, 0);
	item = plan(&rig, KV_ITEM_READ, 7, 1, UINT32_MAX, 0, 2, 0);
	assert_refused(&item, KV_POSITION, 25, 0);
	item = plan(&rig, KV_ITEM_READ, 7, 1, 0, 0, 2, 0);
	assert_refused(&item, KV_BAD_ARG, 25, KV_LAYER_NONE);
	item = plan(&rig, KV_ITEM_READ, 7, 20, 5, 0, 2, 0);
	ck_assert_uint_eq(item.status, KV_OK);
	kv_item_finish(&item, 0, 2);
	ck_assert_uint_eq(rig.session->n_rows_out, 10);
	ck_assert_uint_eq(rig.session->n_rows_in, 4 * 20 + 2 * 5);
	rig_finish(&rig);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("sequence");
	TCase *tcase = tcase_create("sequence");

	tcase_add_test(tcase, test_sequence_create_needs_the_flag);
	tcase_add_test(tcase, test_sequence_position_is_checked_on_every_layer);
	tcase_add_test(tcase, test_sequence_length_is_limited);
	tcase_add_test(tcase, test_sequence_blocks_are_taken_all_or_nothing);
	tcase_add_test(tcase, test_sequence_layers_share_their_groups_table);
	tcase_add_test(tcase, test_sequence_reservation_is_used_first);
	tcase_add_test(tcase, test_sequence_full_pool_refuses_items_one_by_one);
	tcase_add_test(tcase, test_sequence_number_is_bounded);
	tcase_add_test(tcase, test_sequence_table_entries_are_bounded);
	tcase_add_test(tcase, test_sequence_decode_sees_planned_rows);
	tcase_add_test(tcase, test_sequence_append_decode_sees_its_tokens);
	tcase_add_test(tcase, test_sequence_read_is_checked_on_every_layer);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK_GETENV);
}
