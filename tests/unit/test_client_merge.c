/* tqkv_merge(): parts of a context give the whole, in every dtype; nothing counts for nothing. */
#include <math.h>
#include <string.h>

#include "core/attention.h"
#include "proto/client/tqkv.h"
#include "tests/lib/kv_test.h"

#define DIM    48u
#define ROWS   5u
#define TOKENS 40u
#define PARTS  4u

static float uniform(uint64_t *state)
{
	return (float)((double)(kv_test_random(state) >> 11) * 0x1p-52 - 1);
}

/* Exact attention over parts, rounded to float32, merges to exact attention over all; parts may be empty. */
START_TEST(test_client_merge_parts_are_the_whole)
{
	static const uint32_t cuts[PARTS + 1] = { 0, 7, 7, 39, TOKENS };
	float k[TOKENS * DIM], v[TOKENS * DIM], q[ROWS * DIM];
	float outs[PARTS][ROWS * DIM], lses[PARTS][ROWS], whole[ROWS * DIM], whole_lse[ROWS];
	float merged[ROWS * DIM], merged_lse[ROWS];
	const void *out_list[PARTS];
	const float *lse_list[PARTS];
	uint64_t state = 11;

	for (uint32_t i = 0; i < TOKENS * DIM; i++) {
		k[i] = 3 * uniform(&state);
		v[i] = uniform(&state);
	}
	for (uint32_t i = 0; i < ROWS * DIM; i++)
		q[i] = uniform(&state);
	for (uint32_t p = 0; p <= PARTS; p++) {
		for (uint32_t row = 0; row < ROWS; row++) {
			const struct kv_attention_exact_input input = { .q = q + (size_t)row * DIM,
				.k = k,
				.v = v,
				.k_stride = DIM,
				.v_stride = DIM,
				.k_dim = DIM,
				.v_dim = DIM,
				.tokens.lo = p < PARTS ? cuts[p] : 0,
				.tokens.hi = p < PARTS ? cuts[p + 1] : TOKENS,
				.scale = 0.5 };
			double out[DIM], lse;

			kv_attention_exact(&input, out, &lse);
			for (uint32_t i = 0; i < DIM; i++)
				(p < PARTS ? outs[p] : whole)[row * DIM + i] = (float)out[i];
			(p < PARTS ? lses[p] : whole_lse)[row] = (float)lse;
		}
	}
	for (uint32_t p = 0; p < PARTS; p++) {
		out_list[p] = outs[p];
		lse_list[p] = lses[p];
	}
	ck_assert_int_eq(tqkv_merge(PARTS, out_list, lse_list, ROWS, DIM, TQKV_F32, merged, merged_lse, NULL),
		TQKV_OK);
	for (uint32_t i = 0; i < ROWS * DIM; i++)
		ck_assert_float_le(fabsf(merged[i] - whole[i]), 1e-6f);
	for (uint32_t row = 0; row < ROWS; row++)
		ck_assert_float_le(fabsf(merged_lse[row] - whole_lse[row]), 2e-6f);
	/* in place, and without lse */
	ck_assert_int_eq(
		tqkv_merge(PARTS, out_list, lse_list, ROWS, DIM, TQKV_F32, outs[0], NULL, NULL), TQKV_OK);
	ck_assert_mem_eq(outs[0], merged, sizeof(merged));
}
END_TEST

/* Two parts of one number each, by hand: shares 1/4 and 3/4; f16 and bf16 hold these numbers exactly. */
START_TEST(test_client_merge_by_hand)
{
	const float lses[2] = { 0, logf(3) };
	const float values[2][1] = { { 1 }, { 5 } };
	const uint16_t f16[2] = { 0x3C00, 0x4500 }, bf16[2] = { 0x3F80, 0x40A0 };
	const float *lse_list[2] = { &lses[0], &lses[1] };
	const void *f32_list[2] = { values[0], values[1] };
	const void *f16_list[2] = { &f16[0], &f16[1] }, *bf16_list[2] = { &bf16[0], &bf16[1] };
	float out, lse;
	uint16_t half;

	ck_assert_int_eq(tqkv_merge(2, f32_list, lse_list, 1, 1, TQKV_F32, &out, &lse, NULL), TQKV_OK);
	ck_assert_float_eq(out, 4);
	ck_assert_float_eq_tol(lse, logf(4), 1e-7f);
	ck_assert_int_eq(tqkv_merge(2, f16_list, lse_list, 1, 1, TQKV_F16, &half, NULL, NULL), TQKV_OK);
	ck_assert_uint_eq(half, 0x4400);
	ck_assert_int_eq(tqkv_merge(2, bf16_list, lse_list, 1, 1, TQKV_BF16, &half, NULL, NULL), TQKV_OK);
	ck_assert_uint_eq(half, 0x4080);
}
END_TEST

/* Parts without tokens may hold anything; no part at all is an empty context. */
START_TEST(test_client_merge_of_nothing)
{
	const float nan_row[2] = { NAN, NAN }, some[2] = { 1, 2 }, none = -INFINITY, lse_in = 800;
	const void *outs[2] = { nan_row, some };
	const float *lses[2] = { &none, &lse_in };
	float out[2], lse;

	ck_assert_int_eq(tqkv_merge(2, outs, lses, 1, 2, TQKV_F32, out, &lse, NULL), TQKV_OK);
	ck_assert(out[0] == 1 && out[1] == 2 && lse == 800);
	for (uint32_t n_parts = 0; n_parts < 2; n_parts++) {
		ck_assert_int_eq(tqkv_merge(n_parts, outs, lses, 1, 2, TQKV_F32, out, &lse, NULL), TQKV_OK);
		ck_assert(out[0] == 0 && out[1] == 0 && isinf(lse) && lse < 0);
	}
}
END_TEST

/* What is no log-sum-exp, and sizes and dtypes that there are not; nothing is written. */
START_TEST(test_client_merge_refusals)
{
	const float row[2] = { 1, 2 }, good = 0, bad[2] = { NAN, INFINITY };
	const void *outs[2] = { row, row };
	const float *lses[2] = { &good, NULL };
	float out[2] = { 7, 7 };

	for (int i = 0; i < 2; i++) {
		lses[1] = &bad[i];
		ck_assert_int_eq(tqkv_merge(2, outs, lses, 1, 2, TQKV_F32, out, NULL, NULL), TQKV_BAD_VALUE);
	}
	ck_assert_int_eq(tqkv_merge(1, outs, lses, 1, 2, TQKV_PACKED, out, NULL, NULL), TQKV_BAD_ARG);
	ck_assert_int_eq(tqkv_merge(1, outs, lses, 1, 0, TQKV_F32, out, NULL, NULL), TQKV_BAD_ARG);
	ck_assert_int_eq(tqkv_merge(1, outs, lses, 1, 257, TQKV_F32, out, NULL, NULL), TQKV_BAD_ARG);
	ck_assert_int_eq(tqkv_merge(257, outs, lses, 1, 2, TQKV_F32, out, NULL, NULL), TQKV_BAD_ARG);
	ck_assert(out[0] == 7 && out[1] == 7);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("client merge");
	TCase *tc = tcase_create("merge");

	tcase_add_test(tc, test_client_merge_parts_are_the_whole);
	tcase_add_test(tc, test_client_merge_by_hand);
	tcase_add_test(tc, test_client_merge_of_nothing);
	tcase_add_test(tc, test_client_merge_refusals);
	suite_add_tcase(suite, tc);
	return kv_test_run(suite, CK_NOFORK);
}
