/* Rotations: the matrix that functions apply is the one that clients read, and it is orthogonal. */
#include "core/rotation.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/checked.h"
#include "core/memory.h"
#include "core/number.h"
#include "tests/lib/kv_codec.h"
#include "tests/lib/kv_golden.h"

/* Every kind that is made from a seed, at dims that are powers of two, sums of two, three and four of them.
 */
static const struct {
	enum kv_rotation_kind kind;
	uint32_t head_dim;
} shapes[] = {
	{ KV_ROTATION_RHT, 16 },
	{ KV_ROTATION_RHT, 32 },
	{ KV_ROTATION_RHT, 64 },
	{ KV_ROTATION_RHT, 128 },
	{ KV_ROTATION_RHT, 256 },
	{ KV_ROTATION_QR, 16 },
	{ KV_ROTATION_QR, 80 },
	{ KV_ROTATION_QR, 128 },
	{ KV_ROTATION_QR, 240 },
	{ KV_ROTATION_BLOCK, 16 },
	{ KV_ROTATION_BLOCK, 48 },
	{ KV_ROTATION_BLOCK, 112 },
	{ KV_ROTATION_BLOCK, 240 },
};

static struct kv_rotation *make(enum kv_rotation_kind kind, uint32_t head_dim, uint64_t seed)
{
	struct kv_rotation *rotation = NULL;
	struct kv_error err = { 0 };

	ck_assert_msg(kv_rotation_create(kind, head_dim, seed, &rotation, &err) == KV_OK, "%s", err.msg);
	return rotation;
}

static struct kv_rotation *make_rht(uint32_t head_dim, uint64_t seed)
{
	return make(KV_ROTATION_RHT, head_dim, seed);
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
	for (size_t k = 0; k < KV_LENGTH(shapes); k++) {
		const uint32_t d = shapes[k].head_dim;
		struct kv_rotation *rotation = make(shapes[k].kind, d, 7 + d);
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
	for (size_t k = 0; k < KV_LENGTH(shapes); k++) {
		const uint32_t d = shapes[k].head_dim;
		struct kv_rotation *rotation = make(shapes[k].kind, d, 42);
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
		kv_rotation_backward(rotation, y, x);
		memcpy(back, y, sizeof(back));
		kv_rotation_backward(rotation, back, back);
		ck_assert_mem_eq(back, x, d * sizeof(float));
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

/* The float32 matrices of a numpy QR in float64, and rht and block ones, are reproduced bit for bit. */
START_TEST(test_rotation_matrices_golden)
{
	char path[1024], kind[8];
	uint32_t head_dim, seed, n_matrices = 0;
	unsigned long long hash;
	static float rows[KV_HEAD_DIM_MAX * KV_HEAD_DIM_MAX];

	kv_golden_path("rows/rotations.txt", path, sizeof(path));
	FILE *file = fopen(path, "r");

	ck_assert_ptr_nonnull(file);
	while (fscanf(file, "%7s %u %u %llx", kind, &head_dim, &seed, &hash) == 4) {
		enum kv_rotation_kind parsed = KV_ROTATION_BLOCK;

		if (strcmp(kind, "block") != 0)
			ck_assert_int_eq(kv_rotation_kind_parse(kind, &parsed, NULL), KV_OK);
		struct kv_rotation *rotation = make(parsed, head_dim, seed);

		kv_rotation_matrix(rotation, 0, head_dim, rows);
		ck_assert_msg(
			kv_test_fnv(KV_TEST_FNV_START, rows, sizeof(float) * head_dim * head_dim) == hash,
			"%s d %u seed %u differs", kind, head_dim, seed);
		kv_rotation_destroy(rotation);
		n_matrices++;
	}
	fclose(file);
	ck_assert_uint_ge(n_matrices, 20);
}
END_TEST

/* A qr matrix has determinant +1: elimination in float64 without a sign to lose. */
START_TEST(test_rotation_qr_is_no_reflection)
{
	static double a[96][96];
	static float rows[96 * 96];

	for (uint64_t seed = 1; seed <= 6; seed++) {
		struct kv_rotation *rotation = make(KV_ROTATION_QR, 96, seed);
		double determinant = 1;

		kv_rotation_matrix(rotation, 0, 96, rows);
		kv_rotation_destroy(rotation);
		for (uint32_t i = 0; i < 96 * 96; i++)
			a[i / 96][i % 96] = (double)rows[i];
		for (uint32_t k = 0; k < 96; k++) {
			uint32_t pivot = k;

			for (uint32_t i = k; i < 96; i++)
				pivot = fabs(a[i][k]) > fabs(a[pivot][k]) ? i : pivot;
			for (uint32_t j = 0; j < 96 && pivot != k; j++) {
				const double swapped = a[k][j];

				a[k][j] = a[pivot][j];
				a[pivot][j] = swapped;
			}
			determinant *= pivot == k ? a[k][k] : -a[k][k];
			for (uint32_t i = k + 1; i < 96; i++) {
				const double weight = a[i][k] / a[k][k];

				for (uint32_t j = k; j < 96; j++)
					a[i][j] -= weight * a[k][j];
			}
		}
		ck_assert_double_eq_tol(determinant, 1, 1e-5);
	}
}
END_TEST

/* d = 48 is a block of 32 and one of 16, each with its own factor; no number of one reaches the other. */
START_TEST(test_rotation_blocks_are_apart)
{
	struct kv_rotation *rotation = make(KV_ROTATION_BLOCK, 48, 3), *plain = NULL;
	static float rows[48 * 48], plain_rows[48 * 48];

	ck_assert_int_eq(kv_rotation_create_signs(48, 3, &plain, NULL), KV_OK);
	kv_rotation_matrix(rotation, 0, 48, rows);
	kv_rotation_matrix(plain, 0, 48, plain_rows);
	for (uint32_t i = 0; i < 48; i++) {
		for (uint32_t j = 0; j < 48; j++) {
			const bool is_same = (i < 32) == (j < 32);
			const float size = i < 32 ? (float)sqrt(1.0 / 32) : 0.25f;

			ck_assert(fabsf(rows[i * 48 + j]) == (is_same ? size : 0));
			ck_assert(fabsf(plain_rows[i * 48 + j]) == (is_same ? 1.0f : 0));
			ck_assert((rows[i * 48 + j] < 0) == (plain_rows[i * 48 + j] < 0));
		}
	}
	for (uint32_t j = 0; j < 48; j++) /* row 0 of H is all plus */
		ck_assert(plain_rows[(j < 32 ? 0 : 32) * 48 + j] == plain->signs_in[j]);
	kv_rotation_destroy(rotation);
	kv_rotation_destroy(plain);
}
END_TEST

/* The projection of tqpN: rows of length sqrt(d) at powers of two, the qr matrix of the seed elsewhere. */
START_TEST(test_rotation_projection)
{
	struct kv_rotation *projection = NULL, *qr = make(KV_ROTATION_QR, 80, 1042);
	static float rows[80 * 80], qr_rows[80 * 80];

	ck_assert_int_eq(kv_rotation_create_projection(64, 1042, &projection, NULL), KV_OK);
	kv_rotation_matrix(projection, 0, 64, rows);
	for (uint32_t i = 0; i < 64 * 64; i++)
		ck_assert(fabsf(rows[i]) == 1);
	kv_rotation_destroy(projection);
	ck_assert_int_eq(kv_rotation_create_projection(80, 1042, &projection, NULL), KV_OK);
	kv_rotation_matrix(projection, 0, 80, rows);
	kv_rotation_matrix(qr, 0, 80, qr_rows);
	ck_assert_mem_eq(rows, qr_rows, sizeof(rows));
	kv_rotation_destroy(projection);
	kv_rotation_destroy(qr);
}
END_TEST

/* A given matrix acts as the one it was copied from, and does not need the caller's copy any more. */
START_TEST(test_rotation_from_a_matrix)
{
	struct kv_rotation *qr = make(KV_ROTATION_QR, 48, 9), *file = NULL;
	float *rows = malloc(sizeof(float) * 48 * 48);
	float x[48], y[48], z[48];
	uint64_t state = 12;

	printf("seed 12\n");
	ck_assert_ptr_nonnull(rows);
	kv_rotation_matrix(qr, 0, 48, rows);
	ck_assert_int_eq(kv_rotation_create_from_matrix(KV_ROTATION_FILE, 48, 5, rows, &file, NULL), KV_OK);
	free(rows);
	ck_assert_int_eq(file->kind, KV_ROTATION_FILE);
	ck_assert_uint_eq(file->seed, 5);
	fill_random(&state, 48, x);
	kv_rotation_forward(qr, x, y);
	kv_rotation_forward(file, x, z);
	ck_assert_mem_eq(y, z, sizeof(y));
	kv_rotation_backward(qr, x, y);
	kv_rotation_backward(file, x, z);
	ck_assert_mem_eq(y, z, sizeof(y));
	ck_assert_uint_eq(kv_rotation_memory_bytes(file), sizeof(*file) + 2 * 48 * 48 * 4);
	kv_rotation_destroy(qr);
	kv_rotation_destroy(file);
}
END_TEST

/* A matrix that is not finite or not orthogonal is refused with the rows; a projection need not be
 * orthogonal. */
START_TEST(test_rotation_refuses_bad_matrices)
{
	struct kv_rotation *qr = make(KV_ROTATION_QR, 32, 1), *made = NULL;
	static float rows[32 * 32];
	struct kv_error err = { 0 };

	kv_rotation_matrix(qr, 0, 32, rows);
	kv_rotation_destroy(qr);
	for (uint32_t i = 0; i < 32; i++)
		rows[7 * 32 + i] *= 1.0001f;
	ck_assert_int_eq(
		kv_rotation_create_from_matrix(KV_ROTATION_FILE, 32, 1, rows, &made, &err), KV_BAD_VALUE);
	ck_assert_ptr_nonnull(strstr(err.msg, "rows 7 and 7"));
	ck_assert_ptr_null(made);
	ck_assert_int_eq(
		kv_rotation_create_from_matrix(KV_ROTATION_PROJECTION, 32, 1, rows, &made, &err), KV_OK);
	kv_rotation_destroy(made);
	made = NULL;
	for (uint32_t i = 0; i < 32; i++)
		rows[7 * 32 + i] = rows[3 * 32 + i];
	ck_assert_int_eq(
		kv_rotation_create_from_matrix(KV_ROTATION_FILE, 32, 1, rows, &made, &err), KV_BAD_VALUE);
	ck_assert_ptr_nonnull(strstr(err.msg, "rows 3 and 7"));
	rows[31 * 32 + 4] = kv_f32_from_bits(0x7FC00000);
	ck_assert_int_eq(kv_rotation_create_from_matrix(KV_ROTATION_PROJECTION, 32, 1, rows, &made, &err),
		KV_BAD_VALUE);
	ck_assert_ptr_nonnull(strstr(err.msg, "row 31"));
	ck_assert_int_eq(
		kv_rotation_create_from_matrix(KV_ROTATION_FILE, 24, 1, rows, &made, &err), KV_BAD_ARG);
	ck_assert_ptr_null(made);
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
	ck_assert_int_eq(kv_rotation_create(KV_ROTATION_FILE, 64, 42, &rotation, &err), KV_BAD_ARG);
	ck_assert_ptr_nonnull(strstr(err.msg, "needs its matrix"));
	ck_assert_int_eq(kv_rotation_create(KV_ROTATION_NONE, 64, 42, &rotation, &err), KV_BAD_ARG);
	ck_assert_int_eq(kv_rotation_create((enum kv_rotation_kind)99, 64, 42, &rotation, &err), KV_BAD_ARG);
	static const uint32_t bad_dims[] = { 0, 8, 24, 512, 0xFFFFFFF0u };

	for (size_t i = 0; i < KV_LENGTH(bad_dims); i++) {
		static const enum kv_rotation_kind kinds[] = { KV_ROTATION_RHT, KV_ROTATION_QR,
			KV_ROTATION_BLOCK };

		for (size_t k = 0; k < KV_LENGTH(kinds); k++)
			ck_assert_int_eq(
				kv_rotation_create(kinds[k], bad_dims[i], 42, &rotation, &err), KV_BAD_ARG);
		ck_assert_int_eq(kv_rotation_create_signs(bad_dims[i], 42, &rotation, &err), KV_BAD_ARG);
		ck_assert_int_eq(kv_rotation_create_projection(bad_dims[i], 42, &rotation, &err), KV_BAD_ARG);
	}
	ck_assert_ptr_null(rotation);
}
END_TEST

/* Names and kinds go both ways; an unknown name lists the known ones. */
START_TEST(test_rotation_names)
{
	static const struct {
		enum kv_rotation_kind kind;
		const char *name;
		bool is_choice;
	} rows[] = { { KV_ROTATION_NONE, "none", false }, { KV_ROTATION_RHT, "rht", true },
		{ KV_ROTATION_QR, "qr", true }, { KV_ROTATION_FILE, "file", true },
		{ KV_ROTATION_BLOCK, "block", false }, { KV_ROTATION_PROJECTION, "projection", false },
		{ (enum kv_rotation_kind)77, "unknown", false } };

	for (size_t i = 0; i < KV_LENGTH(rows); i++) {
		enum kv_rotation_kind kind = (enum kv_rotation_kind)55;
		struct kv_error err = { 0 };

		ck_assert_str_eq(kv_rotation_kind_name(rows[i].kind), rows[i].name);
		if (rows[i].is_choice) {
			ck_assert_int_eq(kv_rotation_kind_parse(rows[i].name, &kind, NULL), KV_OK);
			ck_assert_int_eq(kind, rows[i].kind);
		} else {
			ck_assert_int_eq(kv_rotation_kind_parse(rows[i].name, &kind, &err), KV_BAD_ARG);
			ck_assert_ptr_nonnull(strstr(err.msg, "rht, qr, file"));
			ck_assert_int_eq(kind, 55);
		}
	}
}
END_TEST

/* Whichever allocation fails, there is an error, and the output is untouched. */
START_TEST(test_rotation_without_memory)
{
	static const enum kv_rotation_kind kinds[] = { KV_ROTATION_RHT, KV_ROTATION_QR };

	for (size_t k = 0; k < KV_LENGTH(kinds); k++) {
		struct kv_rotation *rotation = NULL;
		struct kv_error err = { 0 };
		int64_t n_failures = 0;

		for (;;) {
			kv_alloc_fail_after(n_failures);
			const enum kv_status status = kv_rotation_create(kinds[k], 64, 42, &rotation, &err);

			kv_alloc_fail_after(-1);
			if (status == KV_OK)
				break;
			ck_assert_int_eq(status, KV_NO_MEMORY);
			ck_assert_ptr_null(rotation);
			n_failures++;
		}
		ck_assert_int_ge(n_failures, k == 0 ? 1 : 7);
		kv_rotation_destroy(rotation);
	}
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
	tcase_add_test(tcase, test_rotation_matrices_golden);
	tcase_add_test(tcase, test_rotation_qr_is_no_reflection);
	tcase_add_test(tcase, test_rotation_blocks_are_apart);
	tcase_add_test(tcase, test_rotation_projection);
	tcase_add_test(tcase, test_rotation_from_a_matrix);
	tcase_add_test(tcase, test_rotation_refuses_bad_matrices);
	tcase_add_test(tcase, test_rotation_refusals);
	tcase_add_test(tcase, test_rotation_names);
	tcase_add_test(tcase, test_rotation_without_memory);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
