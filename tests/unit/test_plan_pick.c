#include "core/plan.h"
#include "core/tenant.h"
#include "tests/lib/kv_core_test.h"

/*
 * "d0" is a ready decode of session 0, "a1" a ready append of session 1, "D2", "A2" ones that are not ready.
 */
static void assert_pick(const char *candidates, const char *expected)
{
	struct kv_candidate list[16];
	uint32_t order[16], n = 0, n_picked;
	uint8_t scratch[16];
	uint32_t links[16];
	char picked[40] = "";

	for (const char *c = candidates; *c; c += c[2] ? 3 : 2) {
		list[n++] = (struct kv_candidate){
			.weight = 1,
			.session_idx = (uint32_t)(c[1] - '0'),
			.is_decode = c[0] == 'd' || c[0] == 'D',
			.is_ready = c[0] == 'd' || c[0] == 'a',
		};
	}
	n_picked = kv_plan_pick(list, n, order, scratch, links);
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
		uint32_t links[N];

		for (uint32_t i = 0; i < n; i++) {
			list[i].session_idx = 1000 * (uint32_t)(kv_test_random(&seed) % n_sessions);
			list[i].tenant_idx = list[i].session_idx / 1000 % 3;
			list[i].n_bytes = 1 + kv_test_random(&seed) % 100;
			list[i].weight = 1 + (uint32_t)(kv_test_random(&seed) % 3);
			list[i].is_decode = kv_test_random(&seed) % 2;
			list[i].is_ready = kv_test_random(&seed) % 8 != 0;
			position[i] = UINT32_MAX;
		}

		const uint32_t n_picked = kv_plan_pick(list, n, order, scratch, links);

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

/*
 * While two tenants both have something waiting, neither is given more than one request's bytes more than its
 * weight says beside the other, however much one of them has sent.
 */
START_TEST(test_plan_pick_shares_between_tenants)
{
	enum { N = 120 };
	uint64_t seed = 0x5EED0006;

	printf("test_plan_pick: seed %llx\n", (unsigned long long)seed);
	for (uint32_t round = 0; round < 500; round++) {
		struct kv_candidate list[N];
		uint32_t order[N], links[N], n_left[3] = { 0 };
		uint64_t given[3] = { 0 };
		uint8_t scratch[N];
		const bool is_decode = round % 2;
		uint32_t weights[3];

		for (uint32_t t = 0; t < 3; t++)
			weights[t] = round % 3 == 0 ? 1 : 1 + (uint32_t)(kv_test_random(&seed) % 9);

		for (uint32_t i = 0; i < N; i++) {
			/* The first one floods. */
			const uint32_t dice = (uint32_t)(kv_test_random(&seed) % 10);

			list[i] = (struct kv_candidate){
				.session_idx = i,
				.tenant_idx = dice < 8 ? 0 : dice - 7,
				.weight = weights[dice < 8 ? 0 : dice - 7],
				.n_bytes = 1 + kv_test_random(&seed) % 1000,
				.is_decode = is_decode,
				.is_ready = true,
			};
			n_left[list[i].tenant_idx]++;
		}
		ck_assert_uint_eq(kv_plan_pick(list, N, order, scratch, links), N);
		for (uint32_t k = 0; k < N; k++) {
			given[list[order[k]].tenant_idx] += list[order[k]].n_bytes;
			n_left[list[order[k]].tenant_idx]--;
			for (uint32_t a = 0; a < 3; a++) {
				for (uint32_t b = 0; b < 3; b++) {
					if (n_left[a] > 0 && n_left[b] > 0)
						ck_assert_uint_le(given[a] * weights[b],
							(given[b] * weights[a]) + (1000 * weights[b]));
				}
			}
		}
	}
}
END_TEST

/* The candidates of one tenant, in order of arrival, as plain loops find them. */
static void assert_turns(const struct kv_candidate list[], const uint32_t order[], uint32_t n)
{
	static uint64_t given[KV_TENANTS_MAX];
	static bool is_given[512];

	memset(given, 0, sizeof(given));
	memset(is_given, 0, sizeof(is_given));
	for (uint32_t k = 0; k < n; k++) {
		uint32_t next = UINT32_MAX;

		for (uint32_t i = 0; i < n; i++) {
			if (is_given[i])
				continue;
			if (next == UINT32_MAX ||
				given[list[i].tenant_idx] * list[next].weight <
					given[list[next].tenant_idx] * list[i].weight)
				next = i;
		}
		ck_assert_uint_eq(order[k], next);
		is_given[next] = true;
		given[list[next].tenant_idx] += list[next].n_bytes;
	}
}

/* Every tenant has a turn of its own, with its own weight, however many there are: one to 512 of them. */
START_TEST(test_plan_pick_knows_any_number_of_tenants)
{
	enum { N = 512 };
	uint64_t seed = 0x5EED0007;

	printf("test_plan_pick: seed %llx\n", (unsigned long long)seed);
	for (uint32_t round = 0; round < 10; round++) {
		static struct kv_candidate list[N];
		static uint32_t order[N], links[N];
		static uint8_t scratch[N];
		const uint32_t n_tenants = 1u << round, base = KV_TENANTS_MAX - n_tenants;

		for (uint32_t i = 0; i < N; i++) {
			const uint32_t tenant =
				i < n_tenants ? i : (uint32_t)(kv_test_random(&seed) % n_tenants);

			list[i] = (struct kv_candidate){
				.session_idx = i,
				.tenant_idx = base + tenant,
				.weight = 1 + tenant % KV_TENANT_WEIGHT_MAX,
				.n_bytes = 1 + kv_test_random(&seed) % (1 << 20),
				.is_decode = true,
				.is_ready = true,
			};
		}
		ck_assert_uint_eq(kv_plan_pick(list, N, order, scratch, links), N);
		assert_turns(list, order, N);
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
	tcase_add_test(tcase, test_plan_pick_shares_between_tenants);
	tcase_add_test(tcase, test_plan_pick_knows_any_number_of_tenants);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK_GETENV);
}
