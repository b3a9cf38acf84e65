/* MT19937: golden outputs are those of the published generator (init_genrand). */
#include "core/mt19937.h"

#include <math.h>
#include <string.h>

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

/* A uniform number takes two outputs, the first is the high word, and keeps the low 53 bits. */
START_TEST(test_mt19937_uniform_joins_two_outputs)
{
	struct kv_mt19937 generator;
	const uint64_t joined = ((uint64_t)nth_output(42, 1) << 32 | nth_output(42, 2)) & 0x1FFFFFFFFFFFFF;

	kv_mt19937_init(&generator, 42);
	ck_assert(kv_mt19937_uniform(&generator) == (double)joined / 9007199254740992.0);
	ck_assert_uint_eq(kv_mt19937_next(&generator), nth_output(42, 3));
}
END_TEST

/*
 * Numbers 0 and 8 of a block come from the same pair of uniforms, (x, y) = r (cos, sin): their radius and
 * angle give the uniforms back.
 */
START_TEST(test_mt19937_normals_pair_over_eight)
{
	struct kv_mt19937 generator;
	double uniforms[32], normals[32];

	kv_mt19937_init(&generator, 5);
	for (uint32_t i = 0; i < 32; i++)
		uniforms[i] = kv_mt19937_uniform(&generator);
	kv_mt19937_init(&generator, 5);
	kv_mt19937_normals(&generator, 32, normals);
	for (uint32_t i = 0; i < 32; i++) {
		if (i % 16 >= 8)
			continue;
		const double x = normals[i], y = normals[i + 8];
		const double turn = atan2(y, x) / (2 * acos(-1.0));

		ck_assert_double_eq_tol(exp(-(x * x + y * y) / 2), 1 - uniforms[i], 1e-14);
		ck_assert_double_eq_tol(turn < 0 ? turn + 1 : turn, uniforms[i + 8], 1e-14);
	}
}
END_TEST

/* What is left over beyond whole blocks: the last 16 numbers are drawn again, the ones before them stay. */
START_TEST(test_mt19937_normals_redraw_a_ragged_end)
{
	struct kv_mt19937 generator;
	double whole[32], ragged[36], fresh[16];

	kv_mt19937_init(&generator, 42);
	kv_mt19937_normals(&generator, 32, whole);
	kv_mt19937_init(&generator, 42);
	kv_mt19937_normals(&generator, 36, ragged);
	ck_assert_mem_eq(whole, ragged, 20 * sizeof(double));
	ck_assert_uint_eq(kv_mt19937_next(&generator), nth_output(42, 2 * (36 + 16) + 1));
	kv_mt19937_init(&generator, 42);
	for (uint32_t i = 0; i < 36; i++)
		(void)kv_mt19937_uniform(&generator);
	kv_mt19937_normals(&generator, 16, fresh);
	ck_assert_mem_eq(fresh, ragged + 20, sizeof(fresh));
}
END_TEST

/* The first numbers of seed 42, from an implementation of its own. */
START_TEST(test_mt19937_normals_golden)
{
	struct kv_mt19937 generator;
	double normals[16];

	kv_mt19937_init(&generator, 42);
	kv_mt19937_normals(&generator, 16, normals);
	ck_assert_double_eq_tol(normals[0], 0.2995562877502637, 1e-15);
	ck_assert_double_eq_tol(normals[1], 0.24237779080894106, 1e-15);
	ck_assert_double_eq_tol(normals[8], 0.17347640142361004, 1e-15);
	ck_assert_double_eq_tol(normals[15], -1.4920727283504345, 1e-15);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("mt19937");
	TCase *tcase = tcase_create("all");

	tcase_add_test(tcase, test_mt19937_gives_published_outputs);
	tcase_add_test(tcase, test_mt19937_takes_the_seed_modulo_2_to_32);
	tcase_add_test(tcase, test_mt19937_signs_follow_the_lowest_bit);
	tcase_add_test(tcase, test_mt19937_uniform_joins_two_outputs);
	tcase_add_test(tcase, test_mt19937_normals_pair_over_eight);
	tcase_add_test(tcase, test_mt19937_normals_redraw_a_ragged_end);
	tcase_add_test(tcase, test_mt19937_normals_golden);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
