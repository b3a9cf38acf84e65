#include "core/block_table.h"

#include "core/memory.h"
#include "tests/lib/kv_core_test.h"

#define N_BLOCKS 1000u

/* A table of n blocks, ids in the order in which the pool hands them out. */
static void grow(
	struct kv_block_table *table, struct kv_table_arena *arena, struct kv_block_pool *pool, uint32_t n)
{
	kv_block_id ids[N_BLOCKS];

	kv_assert_ok(kv_block_pool_take(pool, n, 0, ids));
	kv_assert_ok(kv_block_table_append(table, arena, pool, ids, n));
}

/* Every range of entries comes back as it was appended, across chunk borders and from both ends. */
START_TEST(test_block_table_copy_returns_every_range)
{
	struct kv_block_table table = { 0 };
	struct kv_table_arena arena;
	struct kv_block_pool pool;
	uint32_t out[400];

	kv_assert_ok(kv_block_pool_init(&pool, N_BLOCKS, NULL));
	kv_assert_ok(kv_table_arena_init(&arena, 16, NULL));
	for (uint32_t i = 0; i < 300; i++) /* fresh ids come in order 0, 1, 2, .. */
		grow(&table, &arena, &pool, 1);
	ck_assert_uint_eq(arena.n_chunks_used, 5);
	for (uint32_t first = 0; first < 300; first += 7) {
		for (uint32_t n = 0; n <= 300 - first; n += 1 + n / 3) {
			memset(out, 0xFF, sizeof(out));
			kv_block_table_copy(&table, &arena, first, n, out);
			for (uint32_t i = 0; i < n; i++)
				ck_assert_uint_eq(out[i], first + i);
			ck_assert_uint_eq(out[n], UINT32_MAX);
		}
	}
	kv_table_arena_finish(&arena);
	kv_block_pool_finish(&pool);
}
END_TEST

/* Shrinking cuts at most n_max entries from the end, gives their blocks back and frees emptied chunks. */
START_TEST(test_block_table_shrink_is_bounded_and_from_the_end)
{
	struct kv_block_table table = { 0 };
	struct kv_table_arena arena;
	struct kv_block_pool pool;
	uint32_t out[200];

	kv_assert_ok(kv_block_pool_init(&pool, N_BLOCKS, NULL));
	kv_assert_ok(kv_table_arena_init(&arena, 16, NULL));
	grow(&table, &arena, &pool, 200);
	ck_assert_uint_eq(kv_block_table_shrink(&table, &arena, &pool, 10, 0), 0);
	ck_assert_uint_eq(kv_block_table_shrink(&table, &arena, &pool, 10, 50), 50);
	ck_assert_uint_eq(table.n_blocks, 150);
	ck_assert_uint_eq(arena.n_chunks_used, 3);
	ck_assert_uint_eq(pool.counts.n_owned, 150);
	kv_block_table_copy(&table, &arena, 0, 150, out);
	for (uint32_t i = 0; i < 150; i++)
		ck_assert_uint_eq(out[i], i);
	ck_assert_uint_eq(kv_block_table_shrink(&table, &arena, &pool, 64, 1000), 86);
	ck_assert_uint_eq(arena.n_chunks_used, 1);
	ck_assert_uint_eq(kv_block_table_shrink(&table, &arena, &pool, 64, 1000), 0);
	ck_assert_uint_eq(kv_block_table_shrink(&table, &arena, &pool, 0, 1000), 64);
	ck_assert_uint_eq(arena.n_chunks_used, 0);
	ck_assert_uint_eq(pool.counts.n_free, N_BLOCKS);
	grow(&table, &arena, &pool, 65); /* an emptied table grows like a new one */
	kv_block_table_copy(&table, &arena, 64, 1, out);
	ck_assert_uint_eq(table.n_blocks, 65);
	ck_assert_uint_eq(arena.n_chunks_touched, 4);
	kv_table_arena_finish(&arena);
	kv_block_pool_finish(&pool);
}
END_TEST

/* Appending needs its chunks at once: LIMIT changes neither table nor arena. */
START_TEST(test_block_table_append_is_all_or_nothing)
{
	struct kv_block_table a = { 0 }, b = { 0 };
	struct kv_table_arena arena;
	struct kv_block_pool pool = { 0 }; /* no tally */
	kv_block_id ids[200] = { { 0 } };

	kv_assert_ok(kv_table_arena_init(&arena, 3, NULL));
	kv_assert_ok(kv_block_table_append(&a, &arena, &pool, ids, 65));
	ck_assert_uint_eq(kv_block_table_chunks_needed(&a, 63), 0);
	ck_assert_uint_eq(kv_block_table_chunks_needed(&a, 64), 1);
	kv_assert_status(kv_block_table_append(&b, &arena, &pool, ids, 65), KV_LIMIT);
	ck_assert_uint_eq(b.n_blocks, 0);
	ck_assert_uint_eq(arena.n_chunks_used, 2);
	kv_assert_ok(kv_block_table_append(&b, &arena, &pool, ids, 64));
	kv_assert_status(kv_block_table_append(&a, &arena, &pool, ids, 64), KV_LIMIT);
	kv_assert_ok(kv_block_table_append(&a, &arena, &pool, ids, 63));
	ck_assert_uint_eq(a.n_blocks, 128);
	kv_table_arena_finish(&arena);
}
END_TEST

/* Tables that grow and shrink by turns keep their own entries, whatever chunks they get. */
START_TEST(test_block_table_tables_keep_apart)
{
	struct kv_block_table tables[5] = { { 0 } };
	uint32_t expected[5][300];
	struct kv_table_arena arena;
	struct kv_block_pool pool;
	uint64_t seed = 0x5EED0001;

	printf("test_block_table: seed %llx\n", (unsigned long long)seed);
	kv_assert_ok(kv_block_pool_init(&pool, N_BLOCKS, NULL));
	kv_assert_ok(kv_table_arena_init(&arena, 25, NULL));
	for (uint32_t step = 0; step < 3000; step++) {
		const uint32_t t = (uint32_t)(kv_test_random(&seed) % 5);
		const uint32_t n = (uint32_t)(kv_test_random(&seed) % 90);
		kv_block_id ids[90];
		uint32_t out[300];

		if (kv_test_random(&seed) % 2 && tables[t].n_blocks + n <= 300) {
			if (kv_block_pool_take(&pool, n, 0, ids) != KV_OK)
				continue;
			for (uint32_t i = 0; i < n; i++)
				expected[t][tables[t].n_blocks + i] = ids[i].idx;
			kv_assert_ok(kv_block_table_append(&tables[t], &arena, &pool, ids, n));
		} else {
			const uint32_t n_left = tables[t].n_blocks > n ? tables[t].n_blocks - n : 0;

			kv_block_table_shrink(&tables[t], &arena, &pool, n_left, 1000);
			ck_assert_uint_eq(tables[t].n_blocks, n_left);
		}
		for (uint32_t i = 0; i < 5; i++) {
			kv_block_table_copy(&tables[i], &arena, 0, tables[i].n_blocks, out);
			ck_assert_mem_eq(out, expected[i], tables[i].n_blocks * sizeof(out[0]));
		}
	}
	kv_table_arena_finish(&arena);
	kv_block_pool_finish(&pool);
}
END_TEST

/*
 * A gap that grows at random, from any place, in steps of any size: all other entries stay, those of the gap
 * say that they have no block, the blocks are free, and chunks are used for what is left only.
 */
START_TEST(test_block_table_gap_keeps_the_others)
{
	uint64_t seed = 0x5EED0002;

	printf("test_block_table: seed %llx\n", (unsigned long long)seed);
	for (uint32_t run = 0; run < 100; run++) {
		const uint32_t first =
			(uint32_t)(kv_test_random(&seed) % 3 ? kv_test_random(&seed) % 140 : 0);
		struct kv_block_table table = { 0 };
		struct kv_table_arena arena;
		struct kv_block_pool pool;
		uint32_t out[N_BLOCKS], expected[N_BLOCKS], n = first + 2, gap_end = first, n_wrong = 0;

		kv_assert_ok(kv_block_pool_init(&pool, N_BLOCKS, NULL));
		kv_assert_ok(kv_table_arena_init(&arena, N_BLOCKS / KV_CHUNK_ENTRIES + 3, NULL));
		grow(&table, &arena, &pool, n);
		for (uint32_t step = 0; step < 30; step++) {
			const uint32_t end = gap_end + (uint32_t)(kv_test_random(&seed) % (n - gap_end));
			const uint32_t n_max = (uint32_t)(kv_test_random(&seed) % 100);
			const uint32_t n_freed =
				kv_block_table_open_gap(&table, &arena, &pool, first, end, n_max);
			const uint32_t n_more = (uint32_t)(kv_test_random(&seed) % 90);

			ck_assert_uint_eq(n_freed, end - gap_end < n_max ? end - gap_end : n_max);
			gap_end += n_freed;
			if (n + n_more <= N_BLOCKS && n_more < pool.counts.n_free) {
				grow(&table, &arena, &pool, n_more);
				n += n_more;
			}
			ck_assert_uint_eq(table.n_blocks, n);
			ck_assert_uint_eq(kv_block_table_n_owned(&table), n - (gap_end - first));
			ck_assert_uint_eq(pool.counts.n_owned, n - (gap_end - first));
			ck_assert_uint_eq(kv_block_table_n_chunks(&table), arena.n_chunks_used);
			ck_assert_uint_le(
				arena.n_chunks_used, (n - (gap_end - first)) / KV_CHUNK_ENTRIES + 3);
			kv_block_table_copy(&table, &arena, 0, n, out);
			for (uint32_t i = 0; i < n; i++) {
				const bool is_gap = i >= first && i < gap_end;

				n_wrong += is_gap ? out[i] != KV_BLOCK_NONE : pool.owners[out[i]] != 1;
			}
			/* Any range is the same as that part of the whole. */
			for (uint32_t i = 0; i < n; i += 37) {
				kv_block_table_copy(&table, &arena, i, n - i, expected);
				n_wrong += memcmp(expected, out + i, (n - i) * sizeof(out[0])) != 0;
			}
			ck_assert_uint_eq(n_wrong, 0);
		}
		/* Cut to its beginning, in steps: the gap goes with what is behind it. */
		while (table.n_blocks > first)
			kv_block_table_shrink(&table, &arena, &pool, first, 7);
		ck_assert_uint_eq(table.n_blocks, first);
		ck_assert(!kv_block_table_has_gap(&table));
		ck_assert_uint_eq(pool.counts.n_owned, first);
		ck_assert_uint_eq(arena.n_chunks_used, (first + KV_CHUNK_ENTRIES - 1) / KV_CHUNK_ENTRIES);
		grow(&table, &arena, &pool, 65);
		kv_block_table_shrink(&table, &arena, &pool, 0, 1000);
		ck_assert_uint_eq(arena.n_chunks_used, 0);
		kv_table_arena_finish(&arena);
		kv_block_pool_finish(&pool);
	}
}
END_TEST

/* When its allocation fails the arena says so and can be finished. */
START_TEST(test_block_table_arena_survives_a_failed_allocation)
{
	struct kv_table_arena arena;

	kv_alloc_fail_after(0);
	kv_assert_status(kv_table_arena_init(&arena, 16, NULL), KV_NO_MEMORY);
	kv_alloc_fail_after(-1);
	kv_table_arena_finish(&arena);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("block_table");
	TCase *tcase = tcase_create("block_table");

	tcase_add_test(tcase, test_block_table_copy_returns_every_range);
	tcase_add_test(tcase, test_block_table_shrink_is_bounded_and_from_the_end);
	tcase_add_test(tcase, test_block_table_gap_keeps_the_others);
	tcase_add_test(tcase, test_block_table_append_is_all_or_nothing);
	tcase_add_test(tcase, test_block_table_tables_keep_apart);
	tcase_add_test(tcase, test_block_table_arena_survives_a_failed_allocation);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK_GETENV);
}
