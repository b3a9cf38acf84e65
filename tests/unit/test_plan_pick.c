#include "core/plan.h"
#include "tests/lib/kv_core_test.h"

/*
 * "d0" is a ready decode of session 0, "a1" a ready append of session 1, "D2", "A2" ones that are not ready.
 */
static void assert_pick(const char *candidates, const char *expected)
{
	struct kv_candidate list[16];
	uint32_t order[16], n = 0, n_picked;
	uint8_t scratch[16];
	char picked[40] = "";

	for (const char *c = candidates; *c; c += c[2] ? 3 : 2) {
		list[n++] = (struct kv_candidate){
			.session_idx = (uint32_t)(c[1] - '0'),
			.is_decode = c[0] == 'd' || c[0] == 'D',
			.is_ready = c[0] == 'd' || c[0] == 'a',
		};
	}
	n_picked = kv_plan_pick(list, n, order, scratch);
	for (uint32_t i = 0; i < n_picked; i++)
		snprintf(picked + 2 * i, 3, "%x ", order[i]);
	ck_assert_msg(
		strcmp(picked, expected) == 0, "%s: picked %s, expected %s", candidates, picked, expected);
}

/* Decodes go first where nothing of their session waits before them; a session's order never changes. */
START_TEST(test_plan_pick_takes_decodes_first)
{
	assert_pick("", "");
	assert_pick("a0 a1 d2 d3", "2 3 0 1 ");
	assert_pick("a0 d0 d1", "2 0 1 ");
	assert_pick("d0 d0 a0 d0 a1", "0 1 2 3 4 ");
	assert_pick("a0 d1 a1 d1 d0 d2", "1 5 0 2 3 4 ");
}
END_TEST

/* What is not ready holds back everything of its session behind it, and nothing else. */
START_TEST(test_plan_pick_skips_what_is_not_ready)
{
	assert_pick("A0 d0 a0 a1", "3 ");
	assert_pick("D0 a0 d1", "2 ");
	assert_pick("a0 A0 d0 a0 d1", "4 0 ");
	assert_pick("d0 D0 d0 a2 D2", "0 3 ");
}
END_TEST

/*
 * Random candidates: a pick is a permutation of a part, keeps each session's order and leaves no gap in it.
 */
START_TEST(test_plan_pick_keeps_the_order_of_sessions)
{
	enum { N = 80 };
	uint64_t seed = 0x5EED0005;

	printf("test_plan_pick: seed %llx\n", (unsigned long long)seed);
	for (uint32_t round = 0; round < 2000; round++) {
		struct kv_candidate list[N];
		uint32_t order[N], position[N], n = (uint32_t)(kv_test_random(&seed) % N);
		const uint32_t n_sessions = 1 + (uint32_t)(kv_test_random(&seed) % 20);
		uint8_t scratch[N];

		for (uint32_t i = 0; i < n; i++) {
			list[i].session_idx = 1000 * (uint32_t)(kv_test_random(&seed) % n_sessions);
			list[i].is_decode = kv_test_random(&seed) % 2;
			list[i].is_ready = kv_test_random(&seed) % 8 != 0;
			position[i] = UINT32_MAX;
		}

		const uint32_t n_picked = kv_plan_pick(list, n, order, scratch);

		for (uint32_t k = 0; k < n_picked; k++) {
			ck_assert_uint_lt(order[k], n);
			ck_assert_uint_eq(position[order[k]], UINT32_MAX);
			position[order[k]] = k;
		}
		for (uint32_t i = 0; i < n; i++) {
			bool is_free = list[i].is_ready; /* nothing before it holds it back */

			for (uint32_t j = 0; j < i; j++) {
				if (list[j].session_idx != list[i].session_idx)
					continue;
				is_free = is_free && list[j].is_ready;
				if (position[i] != UINT32_MAX)
					ck_assert_uint_lt(position[j], position[i]);
			}
			ck_assert_int_eq(position[i] != UINT32_MAX, is_free);
		}
	}
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("plan_pick");
	TCase *tcase = tcase_create("plan_pick");

	tcase_add_test(tcase, test_plan_pick_takes_decodes_first);
	tcase_add_test(tcase, test_plan_pick_skips_what_is_not_ready);
	tcase_add_test(tcase, test_plan_pick_keeps_the_order_of_sessions);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK_GETENV);
}
