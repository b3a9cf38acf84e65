/* tqN: the error that theory gives, the norm correction, given codebooks and given rotations. */
#include "core/format.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "codebooks/solver.h"
#include "core/checked.h"
#include "tests/lib/kv_codec.h"

#define N_ROWS 10000u

/* Means over Gaussian rows, relative to the rows' own squared length. */
struct error_means {
	double sq_error; /* ||x^ - x||^2 */
	double slope;    /* <x^, x> */
	double sq_size;  /* ||x^||^2 */
	double cosine;
};

static struct error_means measure(const struct kv_row_codec *codec, uint32_t n_rows, uint64_t *state)
{
	const uint32_t d = codec->head_dim;
	struct error_means means = { 0 };
	struct kv_row_scratch scratch;
	uint8_t encoded[KV_ROW_BYTES_MAX];
	float row[KV_HEAD_DIM_MAX], back[KV_HEAD_DIM_MAX];

	for (uint32_t r = 0; r < n_rows; r++) {
		kv_test_normal(state, d, 3, row);
		ck_assert_int_eq(kv_row_codec_encode(codec, row, encoded, &scratch), KV_OK);
		kv_row_codec_decode(codec, encoded, back, &scratch);
		const double size = kv_test_product(d, row, row), sq = kv_test_product(d, back, back);
		const double product = kv_test_product(d, row, back);

		means.sq_error += kv_test_sq_distance(d, back, row) / size / n_rows;
		means.slope += product / size / n_rows;
		means.sq_size += sq / size / n_rows;
		means.cosine += product / sqrt(size * sq) / n_rows;
	}
	return means;
}

static double codebook_error(uint32_t d, uint32_t bits)
{
	struct kvcb_codebook room;

	return d * kvcb_get(d, bits, &room)->mse_per_coord;
}

/* On 10^4 Gaussian rows the squared error is the codebook's within 2 percent, at every width. */
START_TEST(test_format_tq_error_is_theory)
{
	static const struct {
		uint32_t d, bits_first, bits_last;
	} rows[] = { { 16, 4, 4 }, { 64, 1, 8 }, { 80, 1, 8 }, { 96, 3, 4 }, { 128, 1, 8 }, { 192, 2, 3 },
		{ 256, 2, 4 } };
	uint64_t state = 20240601;

	printf("seed 20240601\n");
	for (size_t k = 0; k < KV_LENGTH(rows); k++) {
		for (uint32_t bits = rows[k].bits_first; bits <= rows[k].bits_last; bits++) {
			char name[8];

			snprintf(name, sizeof(name), "tq%u", bits);
			struct kv_test_codec made = kv_test_codec_make(name, rows[k].d, NULL);
			const struct error_means means = measure(made.codec, N_ROWS, &state);
			const double theory = codebook_error(rows[k].d, bits);

			ck_assert_msg(fabs(means.sq_error / theory - 1) < 0.02, "%s d %u: %g, theory %g",
				name, rows[k].d, means.sq_error, theory);
			/* E<x, x^> = E||x^||^2 = 1 - D; one row scatters by sqrt(D / d) and twice that */
			const double scatter = sqrt(theory / rows[k].d / N_ROWS);

			ck_assert_double_eq_tol(means.slope, 1 - theory, 0.02 * theory + 4 * scatter);
			ck_assert_double_eq_tol(means.sq_size, 1 - theory, 0.02 * theory + 8 * scatter);
			kv_test_codec_drop(&made);
		}
	}
}
END_TEST

/* At 128 channels and 3 bits: relative L2 error 18.4 %, cosine 0.983. */
START_TEST(test_format_tq_published_figures)
{
	struct kv_test_codec made = kv_test_codec_make("tq3", 128, NULL);
	uint64_t state = 3;

	printf("seed 3\n");
	const struct error_means means = measure(made.codec, 3000, &state);

	ck_assert_double_eq_tol(sqrt(means.sq_error), 0.184, 0.002);
	ck_assert_double_eq_tol(means.cosine, 0.983, 0.0005);
	kv_test_codec_drop(&made);
}
END_TEST

/*
 * Norm correction: decoded rows have the original length, the same indices, the slope sqrt(1 - D) and the
 * squared error 2 (1 - sqrt(1 - D)).
 */
START_TEST(test_format_tq_norm_correction)
{
	static const struct kv_format_options options = { .norm_correction = true };
	static const char *const names[] = { "tq1", "tq2", "tq3", "tq8" };
	uint64_t state = 4;

	printf("seed 4\n");
	for (size_t k = 0; k < KV_LENGTH(names); k++) {
		struct kv_test_codec plain = kv_test_codec_make(names[k], 128, NULL);
		struct kv_test_codec made = kv_test_codec_make(names[k], 128, &options);
		const double root = sqrt(1 - codebook_error(128, made.codec->format->bits));
		struct kv_row_scratch scratch;
		uint8_t encoded[KV_ROW_BYTES_MAX], plain_encoded[KV_ROW_BYTES_MAX];
		float row[128], back[128];

		for (uint32_t r = 0; r < 200; r++) {
			kv_test_normal(&state, 128, r + 1, row);
			ck_assert_int_eq(kv_row_codec_encode(made.codec, row, encoded, &scratch), KV_OK);
			ck_assert_int_eq(
				kv_row_codec_encode(plain.codec, row, plain_encoded, &scratch), KV_OK);
			ck_assert_mem_eq(encoded, plain_encoded, made.codec->row_bytes - 4);
			kv_row_codec_decode(made.codec, encoded, back, &scratch);
			ck_assert_double_eq_tol(
				sqrt(kv_test_product(128, back, back) / kv_test_product(128, row, row)), 1,
				1e-6);
		}
		const struct error_means means = measure(made.codec, 3000, &state);

		ck_assert_double_eq_tol(means.sq_error / (2 * (1 - root)), 1, 0.02);
		ck_assert_double_eq_tol(means.slope, root, 0.02 * (1 - root));
		kv_test_codec_drop(&plain);
		kv_test_codec_drop(&made);
	}
}
END_TEST

/* A corrected norm that overflows float32 is refused, though the length itself does not. */
START_TEST(test_format_tq_norm_correction_overflow)
{
	static const struct kv_format_options options = { .norm_correction = true };
	struct kv_test_codec made = kv_test_codec_make("tq1", 64, &options);
	struct kv_test_codec plain = kv_test_codec_make("tq1", 64, NULL);
	struct kv_row_scratch scratch;
	uint8_t encoded[KV_ROW_BYTES_MAX];
	float row[64] = { 0 };

	row[5] = 3.3e38f;
	ck_assert_int_eq(kv_row_codec_encode(plain.codec, row, encoded, &scratch), KV_OK);
	ck_assert_int_eq(kv_row_codec_encode(made.codec, row, encoded, &scratch), KV_BAD_VALUE);
	kv_test_codec_drop(&made);
	kv_test_codec_drop(&plain);
}
END_TEST

/* A user's codebook is copied and used where dim and bits fit, and only there. */
START_TEST(test_format_tq_given_codebook)
{
	struct kvcb_codebook *mine = malloc(sizeof(*mine));
	struct kv_row_scratch scratch;
	uint8_t encoded[KV_ROW_BYTES_MAX];
	float row[64] = { 0 }, back[64];

	ck_assert_ptr_nonnull(mine);
	*mine = *kvcb_find(64, 2);
	for (uint32_t i = 0; i < 4; i++)
		mine->centroids[i] *= 0.5f;
	const struct kvcb_codebook *const list[] = { kvcb_find(128, 2), mine };
	const struct kv_format_options options = { .codebooks = list, .n_codebooks = 2 };
	struct kv_test_codec plain = kv_test_codec_make("tq2", 64, NULL);
	struct kv_test_codec made = kv_test_codec_make("tq2", 64, &options);
	struct kv_test_codec other = kv_test_codec_make("tq3", 64, &options);

	memset(mine, 0xFF, sizeof(*mine));
	free(mine);
	row[7] = 2;
	ck_assert_int_eq(kv_row_codec_encode(made.codec, row, encoded, &scratch), KV_OK);
	kv_row_codec_decode(made.codec, encoded, row, &scratch);
	kv_row_codec_decode(plain.codec, encoded, back, &scratch);
	for (uint32_t i = 0; i < 64; i++)
		ck_assert(back[i] == 2 * row[i]);
	ck_assert_ptr_eq(other.codec->segments[0].codebook, kvcb_find(64, 3));
	ck_assert_uint_eq(made.codec->codebook_bytes, 4 * 7);
	kv_test_codec_drop(&plain);
	kv_test_codec_drop(&made);
	kv_test_codec_drop(&other);
}
END_TEST

/* A rotation from a file of the qr matrix gives the same bytes; any kind can be asked for at a power of two.
 */
START_TEST(test_format_tq_given_rotation)
{
	struct kv_test_codec made = kv_test_codec_make_rotated("tq4", 64, KV_ROTATION_QR, NULL);
	struct kv_test_codec rht = kv_test_codec_make("tq4", 64, NULL);
	struct kv_rotation *file = NULL;
	struct kv_row_codec *codec = NULL;
	static float matrix[64 * 64];
	uint64_t state = 5;

	printf("seed 5\n");
	kv_rotation_matrix(made.rotation, 0, 64, matrix);
	ck_assert_int_eq(
		kv_rotation_create_from_matrix(KV_ROTATION_FILE, 64, 42, matrix, &file, NULL), KV_OK);
	ck_assert_int_eq(kv_row_codec_create(made.codec->format, 64, file, &codec, NULL), KV_OK);
	for (uint32_t r = 0; r < 50; r++) {
		struct kv_row_scratch scratch;
		uint8_t encoded[3][64];
		float row[64];

		kv_test_normal(&state, 64, 1, row);
		ck_assert_int_eq(kv_row_codec_encode(made.codec, row, encoded[0], &scratch), KV_OK);
		ck_assert_int_eq(kv_row_codec_encode(codec, row, encoded[1], &scratch), KV_OK);
		ck_assert_int_eq(kv_row_codec_encode(rht.codec, row, encoded[2], &scratch), KV_OK);
		ck_assert_mem_eq(encoded[0], encoded[1], 36);
		ck_assert_mem_ne(encoded[0], encoded[2], 32);
	}
	kv_row_codec_destroy(codec);
	kv_rotation_destroy(file);
	kv_test_codec_drop(&made);
	kv_test_codec_drop(&rht);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("format_tq");
	TCase *tcase = tcase_create("all");

	tcase_set_timeout(tcase, 240);
	tcase_add_test(tcase, test_format_tq_error_is_theory);
	tcase_add_test(tcase, test_format_tq_published_figures);
	tcase_add_test(tcase, test_format_tq_norm_correction);
	tcase_add_test(tcase, test_format_tq_norm_correction_overflow);
	tcase_add_test(tcase, test_format_tq_given_codebook);
	tcase_add_test(tcase, test_format_tq_given_rotation);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
