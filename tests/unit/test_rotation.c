/* Rotations: the matrix that functions apply is the one that clients read, and it is orthogonal. */
#include "core/rotation.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/memory.h"
#include "core/number.h"
#include "tests/lib/kv_test.h"

static const uint32_t dims[] = { 16, 32, 64, 128, 256 };
#define N_DIMS (sizeof(dims) / sizeof(dims[0]))

static struct kv_rotation *make_rht(uint32_t head_dim, uint64_t seed)
{
	struct kv_rotation *rotation = NULL;
	struct kv_error err = { 0 };

	ck_assert_msg(
		kv_rotation_create(KV_ROTATION_RHT, head_dim, seed, &rotation, &err) == KV_OK, "%s", err.msg);
	return rotation;
}

static void fill_random(uint64_t *state, uint32_t n, float *x)
{
	for (uint32_t i = 0; i < n; i++)
		x[i] = (float)((double)(kv_test_random(state) >> 11) * 0x1p-52 - 1);
}

/* d = 16, seed 42: signs are drawn s1 before s2, entry (i, j) is s2_i (-1)^(ones of i & j) s1_j / sqrt(d). */
START_TEST(test_rotation_rht_matrix_golden)
{
	static const char signs[] = "-+---+---+----+-+++-+-++++++++--"; /* s1 then s2 */
	struct kv_rotation *rotation = make_rht(16, 42);
	float rows[256];

	kv_rotation_matrix(rotation, 0, 16, rows);
	for (uint32_t i = 0; i < 16; i++) {
		for (uint32_t j = 0; j < 16; j++) {
			uint32_t n_minus = (signs[j] == '-') + (signs[16 + i] == '-');

			for (uint32_t bit = 1; bit < 16; bit *= 2)
				n_minus += (i & j & bit) != 0;
			ck_assert(rows[i * 16 + j] == (n_minus % 2 ? -0.25f : 0.25f));
		}
	}
	kv_rotation_destroy(rotation);
}
END_TEST

/* Row i of the matrix is what forward makes of the unit vectors and backward of unit vector i, bit for bit.
 */
START_TEST(test_rotation_matrix_is_what_is_applied)
{
	for (size_t k = 0; k < N_DIMS; k++) {
		const uint32_t d = dims[k];
		struct kv_rotation *rotation = make_rht(d, 7 + d);
		float *rows = malloc(sizeof(float) * d * d);
		float unit[KV_HEAD_DIM_MAX], turned[KV_HEAD_DIM_MAX];

		ck_assert_ptr_nonnull(rows);
		kv_rotation_matrix(rotation, 0, d, rows);
		for (uint32_t j = 0; j < d; j++) {
			memset(unit, 0, sizeof(unit));
			unit[j] = 1;
			kv_rotation_forward(rotation, unit, turned);
			for (uint32_t i = 0; i < d; i++)
				ck_assert(turned[i] == rows[i * d + j]);
			kv_rotation_backward(rotation, unit, turned);
			ck_assert_mem_eq(turned, rows + j * d, d * sizeof(float));
		}
		free(rows);
		kv_rotation_destroy(rotation);
	}
}
END_TEST

/* Ranges of rows are the rows of the whole matrix. */
START_TEST(test_rotation_matrix_in_parts)
{
	struct kv_rotation *rotation = make_rht(64, 42);
	static float whole[64 * 64], part[10 * 64];

	kv_rotation_matrix(rotation, 0, 64, whole);
	kv_rotation_matrix(rotation, 54, 10, part);
	ck_assert_mem_eq(part, whole + 54 * 64, sizeof(part));
	kv_rotation_matrix(rotation, 64, 0, part);
	kv_rotation_destroy(rotation);
}
END_TEST

/* Backward undoes forward, lengths stay, float64 agrees with float32, and in-place calls give the same bits.
 */
START_TEST(test_rotation_is_orthogonal)
{
	uint64_t state = 4711;

	printf("seed 4711\n");
	for (size_t k = 0; k < N_DIMS; k++) {
		const uint32_t d = dims[k];
		struct kv_rotation *rotation = make_rht(d, 42);
		float x[KV_HEAD_DIM_MAX], y[KV_HEAD_DIM_MAX], back[KV_HEAD_DIM_MAX];
		double wide[KV_HEAD_DIM_MAX], wide_back[KV_HEAD_DIM_MAX];
		double x_sq = 0, y_sq = 0;

		fill_random(&state, d, x);
		kv_rotation_forward(rotation, x, y);
		kv_rotation_backward(rotation, y, back);
		for (uint32_t i = 0; i < d; i++) {
			wide[i] = (double)x[i];
			x_sq += wide[i] * wide[i];
			y_sq += (double)y[i] * (double)y[i];
		}
		ck_assert_double_eq_tol(y_sq / x_sq, 1, 1e-6);
		kv_rotation_forward_f64(rotation, wide, wide);
		kv_rotation_backward_f64(rotation, wide, wide_back);
		for (uint32_t i = 0; i < d; i++) {
			ck_assert_double_eq_tol((double)back[i], (double)x[i], 2e-6);
			ck_assert_double_eq_tol(wide[i], (double)y[i], 2e-6);
			/* the float32 factor makes the matrix orthogonal to 1e-7 only */
			ck_assert_double_eq_tol(wide_back[i], (double)x[i], 2e-7);
		}
		memcpy(back, x, sizeof(back));
		kv_rotation_forward(rotation, back, back);
		ck_assert_mem_eq(back, y, d * sizeof(float));
		kv_rotation_destroy(rotation);
	}
}
END_TEST

/* Seeds count modulo 2^32, and other seeds give other matrices. */
START_TEST(test_rotation_depends_on_the_seed)
{
	struct kv_rotation *a = make_rht(64, 42), *b = make_rht(64, (1ull << 32) + 42), *c = make_rht(64, 43);

	ck_assert_mem_eq(a->signs_in, b->signs_in, 64 * sizeof(float));
	ck_assert_mem_eq(a->signs_out, b->signs_out, 64 * sizeof(float));
	ck_assert_uint_eq(b->seed, 42);
	ck_assert_mem_ne(a->signs_in, c->signs_in, 64 * sizeof(float));
	kv_rotation_destroy(a);
	kv_rotation_destroy(b);
	kv_rotation_destroy(c);
	kv_rotation_destroy(NULL);
}
END_TEST

/* A layer's seed is base + 1000003 layer + 97003 head, modulo 2^32. */
START_TEST(test_rotation_layer_seed)
{
	ck_assert_uint_eq(kv_rotation_layer_seed(42, 0, 0), 42);
	ck_assert_uint_eq(kv_rotation_layer_seed(42, 3, 2), 3194057);
	ck_assert_uint_eq(kv_rotation_layer_seed(0xFFFFFFFFu, 1, 0), 1000002);
	ck_assert_uint_eq(kv_rotation_layer_seed(0, 5000, 0), 705047704u); /* 5000015000 - 2^32 */
}
END_TEST

/* What cannot be made is refused with a sentence that names the dim and what is possible. */
START_TEST(test_rotation_refusals)
{
	struct kv_rotation *rotation = NULL;
	struct kv_error err = { 0 };

	ck_assert_int_eq(kv_rotation_kind_default(128), KV_ROTATION_RHT);
	ck_assert_int_eq(kv_rotation_kind_default(80), KV_ROTATION_QR);
	ck_assert_int_eq(kv_rotation_create(KV_ROTATION_RHT, 80, 42, &rotation, &err), KV_BAD_ARG);
	ck_assert_ptr_nonnull(strstr(err.msg, "head_dim 80"));
	ck_assert_ptr_nonnull(strstr(err.msg, "power of two"));
	ck_assert_int_eq(kv_rotation_create(KV_ROTATION_QR, 80, 42, &rotation, &err), KV_UNSUPPORTED);
	ck_assert_ptr_nonnull(strstr(err.msg, "head_dim 80"));
	ck_assert_ptr_nonnull(strstr(err.msg, "qr"));
	ck_assert_int_eq(kv_rotation_create(KV_ROTATION_NONE, 64, 42, &rotation, &err), KV_BAD_ARG);
	static const uint32_t bad_dims[] = { 0, 8, 24, 512, 0xFFFFFFF0u };

	for (size_t i = 0; i < sizeof(bad_dims) / sizeof(bad_dims[0]); i++) {
		const enum kv_rotation_kind kind = kv_rotation_kind_default(bad_dims[i]);

		ck_assert_int_eq(kv_rotation_create(kind, bad_dims[i], 42, &rotation, &err), KV_BAD_ARG);
	}
	ck_assert_ptr_null(rotation);
}
END_TEST

/* Names and kinds go both ways; an unknown name lists the known ones. */
START_TEST(test_rotation_names)
{
	enum kv_rotation_kind kind = KV_ROTATION_NONE;
	struct kv_error err = { 0 };

	ck_assert_int_eq(kv_rotation_kind_parse("rht", &kind, NULL), KV_OK);
	ck_assert_int_eq(kind, KV_ROTATION_RHT);
	ck_assert_int_eq(kv_rotation_kind_parse("qr", &kind, NULL), KV_OK);
	ck_assert_int_eq(kind, KV_ROTATION_QR);
	ck_assert_str_eq(kv_rotation_kind_name(KV_ROTATION_RHT), "rht");
	ck_assert_str_eq(kv_rotation_kind_name(KV_ROTATION_QR), "qr");
	ck_assert_str_eq(kv_rotation_kind_name(KV_ROTATION_NONE), "none");
	ck_assert_int_eq(kv_rotation_kind_parse("fft", &kind, &err), KV_BAD_ARG);
	ck_assert_ptr_nonnull(strstr(err.msg, "rht, qr"));
	ck_assert_int_eq(kind, KV_ROTATION_QR);
}
END_TEST

/* Without memory there is an error, and the output is untouched. */
START_TEST(test_rotation_without_memory)
{
	struct kv_rotation *rotation = NULL;
	struct kv_error err = { 0 };

	kv_alloc_fail_after(0);
	ck_assert_int_eq(kv_rotation_create(KV_ROTATION_RHT, 64, 42, &rotation, &err), KV_NO_MEMORY);
	ck_assert_ptr_null(rotation);
	kv_alloc_fail_after(-1);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("rotation");
	TCase *tcase = tcase_create("all");

	tcase_add_test(tcase, test_rotation_rht_matrix_golden);
	tcase_add_test(tcase, test_rotation_matrix_is_what_is_applied);
	tcase_add_test(tcase, test_rotation_matrix_in_parts);
	tcase_add_test(tcase, test_rotation_is_orthogonal);
	tcase_add_test(tcase, test_rotation_depends_on_the_seed);
	tcase_add_test(tcase, test_rotation_layer_seed);
	tcase_add_test(tcase, test_rotation_refusals);
	tcase_add_test(tcase, test_rotation_names);
	tcase_add_test(tcase, test_rotation_without_memory);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
