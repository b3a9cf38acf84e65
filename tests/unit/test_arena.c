#include "core/arena.h"

#include "core/memory.h"
#include "tests/lib/kv_core_test.h"

/* The first free region that is large enough is taken, and sizes are rounded up to 4096. */
START_TEST(test_arena_carves_first_fit)
{
	struct kv_arena *arena;
	uint64_t a, b, c, d;

	kv_assert_ok(kv_arena_create(10 * 4096 + 100, &arena, NULL));
	ck_assert_uint_eq(kv_arena_bytes(arena), 10 * 4096);
	kv_assert_ok(kv_arena_carve(arena, 2 * 4096, &a, NULL));
	kv_assert_ok(kv_arena_carve(arena, 1, &b, NULL));
	kv_assert_ok(kv_arena_carve(arena, 4097, &c, NULL));
	ck_assert_uint_eq(a, 0);
	ck_assert_uint_eq(b, 2 * 4096);
	ck_assert_uint_eq(c, 3 * 4096);
	ck_assert_uint_eq(kv_arena_free_bytes(arena), 5 * 4096);
	kv_arena_return(arena, a);
	kv_assert_ok(kv_arena_carve(arena, 4096, &d, NULL));
	ck_assert_uint_eq(d, 0);
	kv_assert_ok(kv_arena_carve(arena, 2 * 4096, &a, NULL)); /* not into the hole of one page */
	ck_assert_uint_eq(a, 5 * 4096);
	kv_arena_destroy(arena);
}
END_TEST

/* Returned neighbours become one region, in whatever order they come back. */
START_TEST(test_arena_joins_neighbours)
{
	static const uint32_t orders[6][3] = { { 0, 1, 2 }, { 0, 2, 1 }, { 1, 0, 2 }, { 1, 2, 0 },
		{ 2, 0, 1 }, { 2, 1, 0 } };

	for (uint32_t o = 0; o < 6; o++) {
		struct kv_arena *arena;
		uint64_t offsets[3];

		kv_assert_ok(kv_arena_create(3 * 4096, &arena, NULL));
		for (uint32_t i = 0; i < 3; i++)
			kv_assert_ok(kv_arena_carve(arena, 4096, &offsets[i], NULL));
		for (uint32_t i = 0; i < 3; i++)
			kv_arena_return(arena, offsets[orders[o][i]]);
		ck_assert_uint_eq(kv_arena_largest_free_bytes(arena), 3 * 4096);
		ck_assert_uint_eq(kv_arena_n_carved(arena), 0);
		kv_assert_ok(kv_arena_carve(arena, 3 * 4096, &offsets[0], NULL));
		ck_assert_uint_eq(kv_arena_free_bytes(arena), 0);
		kv_arena_destroy(arena);
	}
}
END_TEST

/* A refusal says what was wanted, what is free and what is free in one piece, and changes nothing. */
START_TEST(test_arena_refuses_with_numbers)
{
	struct kv_arena *arena;
	struct kv_error err = { 0 };
	uint64_t a, b, offset = 77;

	kv_assert_ok(kv_arena_create(4 * 4096, &arena, NULL));
	kv_assert_ok(kv_arena_carve(arena, 4096, &a, NULL));
	kv_assert_ok(kv_arena_carve(arena, 4096, &b, NULL));
	kv_arena_return(arena, a);
	kv_assert_status(kv_arena_carve(arena, 3 * 4096, &offset, &err), KV_NO_MEMORY);
	ck_assert_str_eq(err.msg, "arena: 12288 bytes wanted, 12288 of 16384 free, 8192 in one piece");
	kv_assert_status(kv_arena_carve(arena, UINT64_MAX, &offset, NULL), KV_NO_MEMORY);
	ck_assert_uint_eq(offset, 77);
	kv_arena_destroy(arena);
	kv_assert_ok(kv_arena_create(4095, &arena, NULL));
	kv_assert_status(kv_arena_carve(arena, 0, &offset, NULL), KV_NO_MEMORY);
	kv_arena_destroy(arena);
	kv_arena_destroy(NULL);
}
END_TEST

/* The number of regions is bounded, and a region given back makes room again. */
START_TEST(test_arena_regions_are_bounded)
{
	struct kv_arena *arena;
	uint64_t offsets[KV_ARENA_REGIONS_MAX], offset;

	kv_assert_ok(kv_arena_create(1000 * 4096, &arena, NULL));
	for (uint32_t i = 0; i < KV_ARENA_REGIONS_MAX; i++)
		kv_assert_ok(kv_arena_carve(arena, 4096, &offsets[i], NULL));
	kv_assert_status(kv_arena_carve(arena, 4096, &offset, NULL), KV_LIMIT);
	for (uint32_t i = 0; i < KV_ARENA_REGIONS_MAX; i += 2) /* the worst case for the number of regions */
		kv_arena_return(arena, offsets[i]);
	kv_assert_ok(kv_arena_carve(arena, 4096, &offset, NULL));
	ck_assert_uint_eq(offset, 0);
	kv_arena_destroy(arena);
}
END_TEST

/* Random carving and returning never overlaps and never loses a byte. */
START_TEST(test_arena_regions_never_overlap)
{
	enum { N_PAGES = 64 };
	struct kv_arena *arena;
	struct {
		uint64_t offset;
		uint32_t n_pages;
	} regions[N_PAGES];
	uint32_t n_regions = 0, n_used = 0;
	uint8_t owner[N_PAGES] = { 0 };
	uint64_t seed = 0x5EED0002;

	printf("test_arena: seed %llx\n", (unsigned long long)seed);
	kv_assert_ok(kv_arena_create(N_PAGES * 4096, &arena, NULL));
	for (uint32_t step = 0; step < 20000; step++) {
		const uint32_t n_pages = 1 + (uint32_t)(kv_test_random(&seed) % 9);
		uint64_t offset;

		if (kv_test_random(&seed) % 2 && n_regions > 0) {
			const uint32_t r = (uint32_t)(kv_test_random(&seed) % n_regions);

			kv_arena_return(arena, regions[r].offset);
			memset(owner + regions[r].offset / 4096, 0, regions[r].n_pages);
			n_used -= regions[r].n_pages;
			regions[r] = regions[--n_regions];
		} else if (kv_arena_carve(arena, n_pages * 4096, &offset, NULL) == KV_OK) {
			ck_assert_uint_eq(offset % 4096, 0);
			for (uint32_t i = 0; i < n_pages; i++) {
				ck_assert_uint_lt(offset / 4096 + i, N_PAGES);
				ck_assert_uint_eq(owner[offset / 4096 + i]++, 0);
			}
			regions[n_regions].offset = offset;
			regions[n_regions++].n_pages = n_pages;
			n_used += n_pages;
		} else {
			ck_assert_uint_lt(kv_arena_largest_free_bytes(arena), n_pages * 4096);
		}
		ck_assert_uint_eq(kv_arena_free_bytes(arena), (uint64_t)(N_PAGES - n_used) * 4096);
		ck_assert_uint_eq(kv_arena_n_carved(arena), n_regions);
	}
	kv_arena_destroy(arena);
}
END_TEST

/* Without memory there is no arena, and that is said. */
START_TEST(test_arena_create_survives_a_failed_allocation)
{
	struct kv_arena *arena = NULL;

	kv_alloc_fail_after(0);
	kv_assert_status(kv_arena_create(4096, &arena, NULL), KV_NO_MEMORY);
	kv_alloc_fail_after(-1);
	ck_assert_ptr_null(arena);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("arena");
	TCase *tcase = tcase_create("arena");

	tcase_add_test(tcase, test_arena_carves_first_fit);
	tcase_add_test(tcase, test_arena_joins_neighbours);
	tcase_add_test(tcase, test_arena_refuses_with_numbers);
	tcase_add_test(tcase, test_arena_regions_are_bounded);
	tcase_add_test(tcase, test_arena_regions_never_overlap);
	tcase_add_test(tcase, test_arena_create_survives_a_failed_allocation);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK_GETENV);
}
