/* k_center: the mean of K rows, what it does to rows, and that it repairs rows with a large constant part. */
#include "core/k_center.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "tests/lib/kv_codec.h"

/* Subtracting and adding are float32 and element-wise, in place too; the product is float64. */
START_TEST(test_k_center_by_hand)
{
	static const float mu[3] = { 1, -0.5f, 0x1p24f }, row[3] = { 1.25f, 2, 1 };
	static const float expected[3] = { 0.25f, 2.5f, -0x1.fffffep23f };
	float centred[3], in_place[3] = { 1.25f, 2, 1 };

	kv_k_center_subtract(mu, row, 3, centred);
	ck_assert_mem_eq(centred, expected, sizeof(expected));
	kv_k_center_subtract(mu, in_place, 3, in_place);
	ck_assert_mem_eq(in_place, expected, sizeof(expected));
	kv_k_center_add(mu, 3, in_place);
	ck_assert_mem_eq(in_place, row, sizeof(row));
	ck_assert(kv_k_center_product(mu, row, 3) == 1.25 - 1 + 0x1p24);
}
END_TEST

/* The mean is a float64 sum over the tokens in order, rounded once; without tokens it is 0. */
START_TEST(test_k_center_mean)
{
	static const float rows[4][2] = { { 0x1p24f, 1 }, { 1, 2 }, { 1, 3 }, { 1, 4 } };
	double sums[2] = { 0 };
	float mu[2] = { 7, 7 };

	kv_k_center_finish(sums, 0, 2, mu);
	ck_assert(mu[0] == 0);
	ck_assert(mu[1] == 0);
	for (uint32_t t = 0; t < 4; t++)
		kv_k_center_take(sums, rows[t], 2);
	kv_k_center_finish(sums, 4, 2, mu);
	ck_assert(mu[0] == 4194304.75f); /* a float32 sum would have lost the ones */
	ck_assert(mu[1] == 2.5f);
}
END_TEST

/* A centre with a number that is not finite is refused with its place. */
START_TEST(test_k_center_check)
{
	float mu[5] = { 0, -1, 3e38f, 1e-45f, -0.0f };
	struct kv_error err = { 0 };

	ck_assert_int_eq(kv_k_center_check(mu, 5, &err), KV_OK);
	mu[3] = kv_f32_from_bits(0x7FC00000);
	ck_assert_int_eq(kv_k_center_check(mu, 5, &err), KV_BAD_VALUE);
	ck_assert_ptr_nonnull(strstr(err.msg, "number 3"));
	mu[3] = -INFINITY;
	ck_assert_int_eq(kv_k_center_check(mu, 5, NULL), KV_BAD_VALUE);
	ck_assert_int_eq(kv_k_center_check(mu, 3, NULL), KV_OK);
}
END_TEST

/* A row that is too far from the centre for float32 becomes infinite, and encoders refuse it. */
START_TEST(test_k_center_overflow_is_refused)
{
	struct kv_test_codec made = kv_test_codec_make("f32", 16, NULL);
	struct kv_row_scratch scratch;
	float mu[16] = { -3e38f }, row[16] = { 3e38f };
	uint8_t encoded[64];

	kv_k_center_subtract(mu, row, 16, row);
	ck_assert_int_eq(kv_row_codec_encode(made.codec, row, encoded, &scratch), KV_BAD_VALUE);
	kv_test_codec_drop(&made);
}
END_TEST

/*
 * Keys with a bias that is 30 times their spread: what differs between them is lost at 3 bits, and kept to
 * the codebook's error once the mean is taken off.
 */
START_TEST(test_k_center_repairs_biased_keys)
{
	enum { N = 2000 };
	struct kv_test_codec made = kv_test_codec_make("tq3", 128, NULL);
	struct kv_row_scratch scratch;
	static float keys[N][128];
	double sums[128] = { 0 }, error[2] = { 0 }, size = 0;
	float bias[128], mu[128];
	uint64_t state = 95;

	printf("seed 95\n");
	kv_test_normal(&state, 128, 30, bias);
	for (uint32_t t = 0; t < N; t++) {
		kv_test_normal(&state, 128, 1, keys[t]);
		for (uint32_t i = 0; i < 128; i++)
			keys[t][i] += bias[i];
		kv_k_center_take(sums, keys[t], 128);
	}
	kv_k_center_finish(sums, N, 128, mu);
	for (uint32_t t = 0; t < N; t++) {
		float centred[128], back[2][128];
		uint8_t encoded[64];

		kv_k_center_subtract(mu, keys[t], 128, centred);
		ck_assert_int_eq(kv_row_codec_encode(made.codec, keys[t], encoded, &scratch), KV_OK);
		kv_row_codec_decode(made.codec, encoded, back[0], &scratch);
		ck_assert_int_eq(kv_row_codec_encode(made.codec, centred, encoded, &scratch), KV_OK);
		kv_row_codec_decode(made.codec, encoded, back[1], &scratch);
		kv_k_center_add(mu, 128, back[1]);
		size += kv_test_product(128, centred, centred);
		error[0] += kv_test_sq_distance(128, back[0], keys[t]);
		error[1] += kv_test_sq_distance(128, back[1], keys[t]);
	}
	ck_assert_double_gt(error[0] / size, 10);
	ck_assert_double_eq_tol(error[1] / size, 0.03397, 0.001);
	kv_test_codec_drop(&made);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("k_center");
	TCase *tcase = tcase_create("all");

	tcase_add_test(tcase, test_k_center_by_hand);
	tcase_add_test(tcase, test_k_center_mean);
	tcase_add_test(tcase, test_k_center_check);
	tcase_add_test(tcase, test_k_center_overflow_is_refused);
	tcase_add_test(tcase, test_k_center_repairs_biased_keys);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
