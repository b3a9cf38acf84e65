/* MT19937: golden outputs are those of the published generator (init_genrand). */
#include "core/mt19937.h"
#include "tests/lib/kv_test.h"

static uint32_t nth_output(uint64_t seed, uint32_t n)
{
	struct kv_mt19937 generator;
	uint32_t output = 0;

	kv_mt19937_init(&generator, seed);
	for (uint32_t i = 0; i < n; i++)
		output = kv_mt19937_next(&generator);
	return output;
}

/* Published streams come out: the first output, one beyond the first refill, and the ten thousandth. */
START_TEST(test_mt19937_gives_published_outputs)
{
	ck_assert_uint_eq(nth_output(5489, 1), 3499211612u);
	ck_assert_uint_eq(nth_output(5489, 625), 4178893912u);
	ck_assert_uint_eq(nth_output(5489, 10000), 4123659995u);
	ck_assert_uint_eq(nth_output(42, 1), 1608637542u);
	ck_assert_uint_eq(nth_output(42, 4), 787846414u);
	ck_assert_uint_eq(nth_output(0, 1), 2357136044u);
}
END_TEST

/* Seeds count modulo 2^32. */
START_TEST(test_mt19937_takes_the_seed_modulo_2_to_32)
{
	ck_assert_uint_eq(nth_output((7ull << 32) + 42, 1), 1608637542u);
}
END_TEST

/* A sign is plus exactly when the output's least significant bit is 1, one draw per sign. */
START_TEST(test_mt19937_signs_follow_the_lowest_bit)
{
	static const char expected[] = "-+---+---+----+-+++-+-++++++++--"; /* seed 42 */
	struct kv_mt19937 generator;
	float signs[32];

	kv_mt19937_init(&generator, 42);
	kv_mt19937_signs(&generator, 32, signs);
	for (uint32_t i = 0; i < 32; i++)
		ck_assert_msg(signs[i] == (expected[i] == '+' ? 1.0f : -1.0f), "sign %u", i);
	ck_assert_uint_eq(kv_mt19937_next(&generator), nth_output(42, 33));
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("mt19937");
	TCase *tcase = tcase_create("all");

	tcase_add_test(tcase, test_mt19937_gives_published_outputs);
	tcase_add_test(tcase, test_mt19937_takes_the_seed_modulo_2_to_32);
	tcase_add_test(tcase, test_mt19937_signs_follow_the_lowest_bit);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
