/*
 * The codebook solver: against the exact table at its 14 dims, and at others by the conditions that define an
 * optimum, integrated in another way.
 */
#include "codebooks/solver.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/number.h"
#include "tests/lib/kv_golden.h"
#include "tests/lib/kv_test.h"

static double number_of(const json_t *text)
{
	ck_assert(json_is_string(text));
	return strtod(json_string_value(text), NULL);
}

static void compare_with_entry(const json_t *entry)
{
	const uint32_t d = (uint32_t)json_integer_value(json_object_get(entry, "d"));
	const uint32_t bits = (uint32_t)json_integer_value(json_object_get(entry, "bits"));
	const uint32_t half = 1u << bits >> 1;
	const json_t *positive = json_object_get(entry, "positive_centroids");
	struct kvcb_solution solution;
	struct kvcb_codebook codebook;
	double exact[256];

	ck_assert(kvcb_solve(d, bits, &solution));
	kvcb_solution_round(&solution, &codebook);
	ck_assert_uint_eq(json_array_size(positive), half);
	for (uint32_t i = 0; i < half; i++) {
		exact[half + i] = number_of(json_array_get(positive, i));
		exact[half - 1 - i] = -exact[half + i];
	}
	for (uint32_t i = 0; i < 2 * half; i++) {
		ck_assert_double_eq_tol(solution.centroids[i], exact[i], 1e-9);
		ck_assert_double_eq_tol(solution.centroids[i], exact[i], 1e-12); /* measured: 4e-14 */
		ck_assert_uint_eq(kv_f32_bits(codebook.centroids[i]), kv_f32_bits((float)exact[i]));
	}
	for (uint32_t i = 0; i + 1 < 2 * half; i++) {
		const double boundary = (exact[i] + exact[i + 1]) / 2;

		ck_assert_double_eq_tol(solution.boundaries[i + 1], boundary, 1e-12);
		ck_assert_uint_eq(kv_f32_bits(codebook.interior_boundaries[i]), kv_f32_bits((float)boundary));
	}
	ck_assert_double_eq_tol(
		solution.mse_per_coord / number_of(json_object_get(entry, "mse_per_coord")), 1, 1e-12);
	ck_assert(codebook.mse_per_coord == solution.mse_per_coord);
}

/* All 14 dims and 8 widths of the exact table: float32 bit for bit, float64 within 1e-9, errors within 1e-12.
 */
START_TEST(test_codebook_solver_equals_the_exact_table)
{
	char path[1024];
	json_error_t error;
	size_t entry_idx;
	json_t *entry;

	kv_golden_path("exact_codebooks.json", path, sizeof(path));
	json_t *table = json_load_file(path, 0, &error);

	ck_assert_msg(table != NULL, "%s: %s", path, error.text);
	ck_assert_uint_eq(json_array_size(table), 14 * 8);
	json_array_foreach (table, entry_idx, entry)
		compare_with_entry(entry);
	json_decref(table);
}
END_TEST

/* The embedded files are what the solver finds. */
START_TEST(test_codebook_solver_made_the_embedded_ones)
{
	for (uint32_t k = 0; kvcb_at(k); k++) {
		const struct kvcb_codebook *embedded = kvcb_at(k);
		struct kvcb_solution solution;
		struct kvcb_codebook solved;
		const uint32_t n = 1u << embedded->bits;

		ck_assert(kvcb_solve(embedded->head_dim, embedded->bits, &solution));
		kvcb_solution_round(&solution, &solved);
		ck_assert_mem_eq(solved.centroids, embedded->centroids, n * sizeof(float));
		ck_assert_mem_eq(
			solved.interior_boundaries, embedded->interior_boundaries, (n - 1) * sizeof(float));
		ck_assert_double_eq_tol(solved.mse_per_coord / embedded->mse_per_coord, 1, 1e-13);
	}
}
END_TEST

/*
 * Moments of the density over [low, high] by Simpson's rule in the angle t = cos(a), where the density is
 * sin^(d - 2)(a): another variable, another rule.
 */
static void simpson(uint32_t d, double low, double high, double *mass, double *first)
{
	const uint32_t n = 4000;
	const double from = acos(high), step = (acos(low) - from) / n;

	*mass = *first = 0;
	for (uint32_t i = 0; i <= n; i++) {
		const double angle = from + i * step;
		const double weight = i == 0 || i == n ? 1 : i % 2 ? 4 : 2;
		const double f = weight * pow(sin(angle), (double)d - 2) * step / 3;

		*mass += f;
		*first += f * cos(angle);
	}
}

/* At dims outside the table every centroid is the mean of its cell, boundaries are midway, all is symmetric.
 */
START_TEST(test_codebook_solver_finds_optima_elsewhere)
{
	static const uint32_t dims[] = { 3, 4, 5, 7, 24, 144, 176, 240, 1000, 1024 };

	for (size_t k = 0; k < sizeof(dims) / sizeof(dims[0]); k++) {
		for (uint32_t bits = 1; bits <= KVCB_BITS_MAX; bits++) {
			const uint32_t n = 1u << bits;
			struct kvcb_solution book;

			ck_assert(kvcb_solve(dims[k], bits, &book));
			ck_assert_uint_eq(book.head_dim, dims[k]);
			ck_assert_uint_eq(book.bits, bits);
			ck_assert(book.boundaries[0] == -1);
			ck_assert(book.boundaries[n] == 1);
			ck_assert(book.boundaries[n / 2] == 0);
			ck_assert(!signbit(book.boundaries[n / 2]));
			for (uint32_t i = 0; i < n; i++) {
				double mass, first;

				ck_assert(book.boundaries[i] < book.centroids[i]);
				ck_assert(book.centroids[i] < book.boundaries[i + 1]);
				ck_assert(book.centroids[i] == -book.centroids[n - 1 - i]);
				if (i > 0 && i != n / 2)
					ck_assert(book.boundaries[i] ==
						(book.centroids[i - 1] + book.centroids[i]) / 2);
				if (i < n / 2 || (n > 32 && i % 5 != 0 && i + 1 != n))
					continue;
				simpson(dims[k], book.boundaries[i], book.boundaries[i + 1], &mass, &first);
				ck_assert_double_eq_tol(book.centroids[i], first / mass, 1e-9);
			}
		}
	}
}
END_TEST

/* On the sphere in three dimensions a coordinate is uniform: cells are equal and the error is width^2 / 12.
 */
START_TEST(test_codebook_solver_three_dims_by_hand)
{
	for (uint32_t bits = 1; bits <= KVCB_BITS_MAX; bits++) {
		const uint32_t n = 1u << bits;
		struct kvcb_solution book;

		ck_assert(kvcb_solve(3, bits, &book));
		for (uint32_t i = 0; i < n; i++)
			ck_assert_double_eq_tol(book.centroids[i], (2.0 * i + 1) / n - 1, 1e-14);
		ck_assert_double_eq_tol(book.mse_per_coord * 3 * n * n, 1, 1e-13);
	}
}
END_TEST

/* One bit has a closed form: 2 C / (d - 1), C the constant of the density. */
START_TEST(test_codebook_solver_one_bit_by_hand)
{
	for (uint32_t d = 3; d <= 1024; d += d < 40 ? 1 : 97) {
		const double log_c = lgamma(d / 2.0) - lgamma((d - 1) / 2.0) - log(acos(-1.0)) / 2;
		struct kvcb_solution book;

		ck_assert(kvcb_solve(d, 1, &book));
		ck_assert_double_eq_tol(book.centroids[1] * (d - 1) / (2 * exp(log_c)), 1, 1e-11);
		ck_assert_double_eq_tol(
			book.mse_per_coord * d, 1 - d * book.centroids[1] * book.centroids[1], 1e-11);
	}
}
END_TEST

/* Parameters out of range are refused and nothing is written. */
START_TEST(test_codebook_solver_refuses)
{
	static const uint32_t bad[][2] = { { 2, 4 }, { 0, 4 }, { 1025, 4 }, { UINT32_MAX, 4 }, { 64, 0 },
		{ 64, 9 }, { 64, UINT32_MAX } };
	struct kvcb_solution solution, before;
	struct kvcb_codebook room;

	memset(&before, 0xEE, sizeof(before));
	memset(&solution, 0xEE, sizeof(solution));
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		ck_assert(!kvcb_solve(bad[i][0], bad[i][1], &solution));
		ck_assert_ptr_null(kvcb_get(bad[i][0], bad[i][1], &room));
	}
	ck_assert_mem_eq(&solution, &before, sizeof(before));
}
END_TEST

/* What is embedded is returned as it is; anything else is solved into the caller's room. */
START_TEST(test_codebook_solver_get)
{
	struct kvcb_codebook room;

	ck_assert_ptr_eq(kvcb_get(128, 4, &room), kvcb_find(128, 4));
	ck_assert_ptr_null(kvcb_find(48, 2));
	ck_assert_ptr_eq(kvcb_get(48, 2, &room), &room);
	ck_assert_uint_eq(room.head_dim, 48);
	ck_assert_uint_eq(room.bits, 2);
	ck_assert(room.interior_boundaries[1] == 0);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("codebook_solver");
	TCase *tcase = tcase_create("all");

	tcase_set_timeout(tcase, 120);
	tcase_add_test(tcase, test_codebook_solver_equals_the_exact_table);
	tcase_add_test(tcase, test_codebook_solver_made_the_embedded_ones);
	tcase_add_test(tcase, test_codebook_solver_finds_optima_elsewhere);
	tcase_add_test(tcase, test_codebook_solver_three_dims_by_hand);
	tcase_add_test(tcase, test_codebook_solver_one_bit_by_hand);
	tcase_add_test(tcase, test_codebook_solver_refuses);
	tcase_add_test(tcase, test_codebook_solver_get);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
