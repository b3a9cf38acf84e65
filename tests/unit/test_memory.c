#include "core/memory.h"

#include "tests/lib/kv_core_test.h"

/*
 * Memory comes zeroed; a product that overflows is refused; nothing asked for is still a pointer of its own.
 */
START_TEST(test_memory_alloc_is_zeroed_and_checked)
{
	uint8_t *bytes = kv_alloc(1000, 3);
	void *empty = kv_alloc(0, 8), *other = kv_alloc(8, 0);

	for (uint32_t i = 0; i < 3000; i++)
		ck_assert_uint_eq(bytes[i], 0);
	ck_assert_ptr_nonnull(empty);
	ck_assert_ptr_nonnull(other);
	ck_assert_ptr_ne(empty, other);
	ck_assert_ptr_null(kv_alloc(SIZE_MAX / 2, 3));
	kv_free(bytes);
	kv_free(empty);
	kv_free(other);
	kv_free(NULL);
}
END_TEST

/* A copied text ends where it was told, with a zero byte behind it. */
START_TEST(test_memory_strndup_terminates)
{
	char *copy = kv_strndup("abcdef", 3), *empty = kv_strndup("", 0);

	ck_assert_str_eq(copy, "abc");
	ck_assert_str_eq(empty, "");
	kv_free(copy);
	kv_free(empty);
}
END_TEST

/* Pages are zeroed, and far more of them than there is memory can be asked for. */
START_TEST(test_memory_pages_are_resident_only_once_touched)
{
	const uint64_t n_bytes = 1ull << 36;
	uint8_t *pages = kv_pages_alloc(n_bytes);

	ck_assert_ptr_nonnull(pages);
	ck_assert_uint_eq(pages[0], 0);
	ck_assert_uint_eq(pages[n_bytes - 1], 0);
	pages[n_bytes / 2] = 1;
	kv_pages_free(pages, n_bytes);
	ck_assert_ptr_null(kv_pages_alloc(0));
	ck_assert_ptr_null(kv_pages_alloc(UINT64_MAX));
	kv_pages_free(NULL, 4096);
}
END_TEST

/* Every call is counted, and exactly the k-th one fails when a test asks for it. */
START_TEST(test_memory_the_kth_allocation_fails_once)
{
	const uint64_t n_before = kv_alloc_count();
	void *first, *second, *third, *fourth;

	kv_alloc_fail_after(2);
	first = kv_alloc(1, 1);
	second = kv_pages_alloc(4096);
	third = kv_strndup("x", 1);
	fourth = kv_alloc(1, 1);
	kv_alloc_fail_after(-1);
	ck_assert_ptr_nonnull(first);
	ck_assert_ptr_nonnull(second);
	ck_assert_ptr_null(third);
	ck_assert_ptr_nonnull(fourth);
	ck_assert_uint_eq(kv_alloc_count() - n_before, 4);
	kv_free(first);
	kv_pages_free(second, 4096);
	kv_free(fourth);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("memory");
	TCase *tcase = tcase_create("memory");

	tcase_add_test(tcase, test_memory_alloc_is_zeroed_and_checked);
	tcase_add_test(tcase, test_memory_strndup_terminates);
	tcase_add_test(tcase, test_memory_pages_are_resident_only_once_touched);
	tcase_add_test(tcase, test_memory_the_kth_allocation_fails_once);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK_GETENV);
}
