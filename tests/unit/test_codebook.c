/* Codebooks: the embedded ones against the exact table, and assignment to cells. */
#include "codebooks/codebook.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/number.h"
#include "tests/lib/kv_golden.h"
#include "tests/lib/kv_test.h"

/* Float32 bit patterns of the positive centroids and boundaries at 4 bits, from 40-digit arithmetic. */
static const struct {
	uint32_t head_dim;
	uint32_t centroids[8];
	uint32_t boundaries[7];
} exact_bits[] = {
	{ 64,
		{ 0x3c82689c, 0x3d44f9cb, 0x3da686c9, 0x3dee909b, 0x3e1ea4cc, 0x3e4ba0f2, 0x3e817de8,
			0x3ea95e22 },
		{ 0x3d03170c, 0x3d8481d7, 0x3dca8bb2, 0x3e0af68d, 0x3e3522df, 0x3e674e61, 0x3e956e05 } },
	{ 128,
		{ 0x3c392e1b, 0x3d0be284, 0x3d6ca2a5, 0x3da9a1f7, 0x3de1dede, 0x3e113562, 0x3e392d10,
			0x3e735e25 },
		{ 0x3cba2e0b, 0x3d3c4295, 0x3d8ff9a5, 0x3dc5c06b, 0x3e011268, 0x3e253139, 0x3e56459b } },
	{ 256,
		{ 0x3c03358e, 0x3cc640eb, 0x3d27ba58, 0x3d709114, 0x3da0412d, 0x3dce3ac2, 0x3e03aca0,
			0x3e2d79ee },
		{ 0x3c83edd9, 0x3d056d67, 0x3d4c25b6, 0x3d8c44dc, 0x3db73df7, 0x3deaca01, 0x3e189347 } },
};
#define N_EXACT (sizeof(exact_bits) / sizeof(exact_bits[0]))

/* The float32 values at 4 bits are those of the derivation, bit for bit, and symmetric about a boundary at 0.
 */
START_TEST(test_codebook_float32_bits)
{
	for (size_t k = 0; k < N_EXACT; k++) {
		const struct kvcb_codebook *codebook = kvcb_find(exact_bits[k].head_dim, 4);

		ck_assert_ptr_nonnull(codebook);
		for (uint32_t i = 0; i < 8; i++) {
			ck_assert_uint_eq(
				kv_f32_bits(codebook->centroids[8 + i]), exact_bits[k].centroids[i]);
			ck_assert(codebook->centroids[7 - i] == -codebook->centroids[8 + i]);
		}
		for (uint32_t i = 0; i < 7; i++) {
			ck_assert_uint_eq(kv_f32_bits(codebook->interior_boundaries[8 + i]),
				exact_bits[k].boundaries[i]);
			ck_assert(codebook->interior_boundaries[6 - i] ==
				-codebook->interior_boundaries[8 + i]);
		}
		ck_assert(codebook->interior_boundaries[7] == 0);
	}
}
END_TEST

static double number_of(const json_t *text)
{
	ck_assert(json_is_string(text));
	return strtod(json_string_value(text), NULL);
}

static void compare_with_entry(const struct kvcb_codebook *codebook, const json_t *entry)
{
	const json_t *positive = json_object_get(entry, "positive_centroids");
	const uint32_t half = 1u << codebook->bits >> 1;
	double centroids[256];

	ck_assert_uint_eq(json_array_size(positive), half);
	for (uint32_t i = 0; i < half; i++) {
		centroids[half + i] = number_of(json_array_get(positive, i));
		centroids[half - 1 - i] = -centroids[half + i];
	}
	for (uint32_t i = 0; i < 2 * half; i++)
		ck_assert_uint_eq(kv_f32_bits(codebook->centroids[i]), kv_f32_bits((float)centroids[i]));
	for (uint32_t i = 0; i + 1 < 2 * half; i++) {
		const float boundary = (float)((centroids[i] + centroids[i + 1]) / 2);

		ck_assert_uint_eq(kv_f32_bits(codebook->interior_boundaries[i]), kv_f32_bits(boundary));
	}
	ck_assert_double_eq_tol(
		codebook->mse_per_coord, number_of(json_object_get(entry, "mse_per_coord")), 1e-15);
}

/* Every embedded codebook equals the exact table, rounded once. */
START_TEST(test_codebook_equals_the_exact_table)
{
	char path[1024];
	json_error_t error;
	size_t entry_idx;
	json_t *entry;
	uint32_t n_compared = 0, n_embedded = 0;

	kv_golden_path("exact_codebooks.json", path, sizeof(path));
	json_t *table = json_load_file(path, 0, &error);

	ck_assert_msg(table != NULL, "%s: %s", path, error.text);
	json_array_foreach (table, entry_idx, entry) {
		const uint32_t d = (uint32_t)json_integer_value(json_object_get(entry, "d"));
		const uint32_t bits = (uint32_t)json_integer_value(json_object_get(entry, "bits"));
		const struct kvcb_codebook *codebook = kvcb_find(d, bits);

		if (codebook) {
			compare_with_entry(codebook, entry);
			n_compared++;
		}
	}
	json_decref(table);
	while (kvcb_at(n_embedded))
		n_embedded++;
	ck_assert_uint_eq(n_embedded, 6 * 8);
	ck_assert_uint_eq(n_compared, n_embedded);
}
END_TEST

/* The errors at the optimum for 128 channels are the published figures. */
START_TEST(test_codebook_total_error)
{
	static const double totals[8] = { 0.3608886, 0.1160001, 0.03396593, 0.009314788, 0.002451460,
		6.299608e-4, 1.597739e-4, 4.024116e-5 };

	for (uint32_t bits = 1; bits <= 8; bits++)
		ck_assert_double_eq_tol(
			128 * kvcb_find(128, bits)->mse_per_coord / totals[bits - 1], 1, 5e-7);
}
END_TEST

/* Every width of the common dims is embedded. */
START_TEST(test_codebook_common_dims_are_embedded)
{
	static const uint32_t dims[] = { 64, 80, 96, 128, 192, 256 };

	for (size_t k = 0; k < sizeof(dims) / sizeof(dims[0]); k++) {
		for (uint32_t bits = 1; bits <= KVCB_BITS_MAX; bits++) {
			const struct kvcb_codebook *codebook = kvcb_find(dims[k], bits);

			ck_assert_ptr_nonnull(codebook);
			ck_assert_uint_eq(codebook->head_dim, dims[k]);
			ck_assert_uint_eq(codebook->bits, bits);
		}
	}
}
END_TEST

/* A value on a boundary belongs to the lower cell, the next float above it to the upper one. */
START_TEST(test_codebook_ties_go_down)
{
	for (uint32_t k = 0; kvcb_at(k); k++) {
		const struct kvcb_codebook *codebook = kvcb_at(k);

		for (uint32_t i = 0; i + 1 < 1u << codebook->bits; i++) {
			const float boundary = codebook->interior_boundaries[i];

			ck_assert_uint_eq(kvcb_index(codebook, boundary), i);
			ck_assert_uint_eq(kvcb_index(codebook, nextafterf(boundary, 2)), i + 1);
			ck_assert_uint_eq(kvcb_index(codebook, codebook->centroids[i]), i);
		}
		ck_assert_uint_eq(kvcb_index(codebook, -0.0f), (1u << codebook->bits >> 1) - 1);
		ck_assert_uint_eq(kvcb_index(codebook, -1.5f), 0);
		ck_assert_uint_eq(kvcb_index(codebook, 1.5f), (1u << codebook->bits) - 1);
	}
}
END_TEST

/* The index is the number of boundaries strictly below, for any width: a codebook of each number of bits. */
START_TEST(test_codebook_index_counts_boundaries)
{
	static struct kvcb_codebook codebook;
	uint64_t state = 99;

	printf("seed 99\n");
	for (codebook.bits = 1; codebook.bits <= KVCB_BITS_MAX; codebook.bits++) {
		const uint32_t n_boundaries = (1u << codebook.bits) - 1;

		for (uint32_t i = 0; i < n_boundaries; i++)
			codebook.interior_boundaries[i] =
				(float)(2 * (i + 1)) / (float)(n_boundaries + 1) - 1;
		for (uint32_t n = 0; n < 10; n++) {
			float y[256];

			/* a grid that holds the boundaries, so ties come up */
			for (uint32_t i = 0; i < 256; i++)
				y[i] = (float)(kv_test_random(&state) >> 54) / 512.0f - 1;
			for (uint32_t i = 0; i < 256; i++) {
				uint32_t n_below = 0;

				for (uint32_t b = 0; b < n_boundaries; b++)
					n_below += codebook.interior_boundaries[b] < y[i];
				ck_assert_uint_eq(kvcb_index(&codebook, y[i]), n_below);
			}
		}
	}
}
END_TEST

/* What is not embedded is not found. */
START_TEST(test_codebook_unknown_is_null)
{
	ck_assert_ptr_null(kvcb_find(128, 0));
	ck_assert_ptr_null(kvcb_find(128, 9));
	ck_assert_ptr_null(kvcb_find(100, 4));
	ck_assert_ptr_null(kvcb_at(UINT32_MAX));
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("codebook");
	TCase *tcase = tcase_create("all");

	tcase_add_test(tcase, test_codebook_float32_bits);
	tcase_add_test(tcase, test_codebook_equals_the_exact_table);
	tcase_add_test(tcase, test_codebook_total_error);
	tcase_add_test(tcase, test_codebook_common_dims_are_embedded);
	tcase_add_test(tcase, test_codebook_ties_go_down);
	tcase_add_test(tcase, test_codebook_index_counts_boundaries);
	tcase_add_test(tcase, test_codebook_unknown_is_null);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
