#include "core/error.h"

#include "core/checked.h"
#include "tests/lib/kv_core_test.h"

/* A failure returns its status, with and without somebody who reads the text. */
START_TEST(test_error_fail_returns_the_status)
{
	struct kv_error err = { 0 };

	kv_assert_status(kv_fail(&err, KV_BAD_ARG, "head_dim %u", 20u), KV_BAD_ARG);
	kv_assert_status(err.status, KV_BAD_ARG);
	ck_assert_str_eq(err.msg, "head_dim 20");
	kv_assert_status(kv_fail(NULL, KV_LIMIT, "nobody reads this"), KV_LIMIT);
	kv_error_wrap(NULL, "nor this");
}
END_TEST

/* Context goes in front of the cause, and the status stays. */
START_TEST(test_error_wrap_puts_context_in_front)
{
	struct kv_error err = { 0 };

	(void)kv_fail(&err, KV_IO_ERROR, "no such file");
	kv_error_wrap(&err, "open \"%s\"", "x.json");
	kv_error_wrap(&err, "config");
	ck_assert_str_eq(err.msg, "config: open \"x.json\": no such file");
	kv_assert_status(err.status, KV_IO_ERROR);
}
END_TEST

/* Texts that are too long are cut, terminated, and keep the head of the cause. */
START_TEST(test_error_long_texts_are_cut)
{
	struct kv_error err = { 0 };
	char text[600];

	memset(text, 'x', sizeof(text) - 1);
	text[sizeof(text) - 1] = '\0';
	(void)kv_fail(&err, KV_INTERNAL, "cause %s", text);
	ck_assert_uint_eq(strlen(err.msg), sizeof(err.msg) - 1);
	for (uint32_t i = 0; i < 5; i++) {
		kv_error_wrap(&err, "%s", text);
		ck_assert_uint_lt(strlen(err.msg), sizeof(err.msg));
	}
	(void)kv_fail(&err, KV_INTERNAL, "cause");
	kv_error_wrap(&err, "%s", text);
	ck_assert_ptr_nonnull(strstr(err.msg, "xx: cause"));
}
END_TEST

/* Checked arithmetic says when a size does not fit and leaves the result alone. */
START_TEST(test_error_checked_arithmetic_detects_overflow)
{
	uint64_t out = 5;

	ck_assert(kv_mul_u64(1ull << 32, (1ull << 32) - 1, &out));
	ck_assert_uint_eq(out, 0xFFFFFFFF00000000ull);
	ck_assert(!kv_mul_u64(1ull << 32, 1ull << 32, &out));
	ck_assert_uint_eq(out, 0xFFFFFFFF00000000ull);
	ck_assert(kv_add_u64(UINT64_MAX - 1, 1, &out));
	ck_assert(!kv_add_u64(UINT64_MAX, 1, &out));
	ck_assert_uint_eq(out, UINT64_MAX);
	ck_assert_uint_eq(kv_round_up_u64(0, 64), 0);
	ck_assert_uint_eq(kv_round_up_u64(65, 64), 128);
	ck_assert_uint_eq(kv_div_up_u32(UINT32_MAX, 16), 1u << 28);
	ck_assert_uint_eq(kv_div_up_u32(0, 16), 0);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("error");
	TCase *tcase = tcase_create("error");

	tcase_add_test(tcase, test_error_fail_returns_the_status);
	tcase_add_test(tcase, test_error_wrap_puts_context_in_front);
	tcase_add_test(tcase, test_error_long_texts_are_cut);
	tcase_add_test(tcase, test_error_checked_arithmetic_detects_overflow);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK_GETENV);
}
