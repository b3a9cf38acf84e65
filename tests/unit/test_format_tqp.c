/*
 * tqpN: a row by hand, and what the signs promise: scores without bias. Slopes and vector errors are tested,
 * not the mean signed error, which is near 0 for a biased estimator as well.
 */
#include "core/format.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "codebooks/solver.h"
#include "core/checked.h"
#include "tests/lib/kv_codec.h"

#define N_ROWS       10000u
#define SQRT_HALF_PI 1.2533141373155003
#define HALF_PI      1.5707963267948966

/* A row taken apart: what the indices give, and what the signs add to it. */
struct parts {
	float row[KV_HEAD_DIM_MAX];
	float mean[KV_HEAD_DIM_MAX];       /* x^ */
	float rest[KV_HEAD_DIM_MAX];       /* x - x^ */
	float correction[KV_HEAD_DIM_MAX]; /* decoded - x^ */
	double rest_sq;
	uint8_t encoded[KV_ROW_BYTES_MAX];
};

static void take_apart(const struct kv_row_codec *codec, struct parts *parts)
{
	struct kv_row_scratch scratch;
	uint8_t without_signs[KV_ROW_BYTES_MAX];
	float decoded[KV_HEAD_DIM_MAX];

	ck_assert_int_eq(kv_row_codec_encode(codec, parts->row, parts->encoded, &scratch), KV_OK);
	memcpy(without_signs, parts->encoded, codec->row_bytes);
	kv_store_f32(0, without_signs + codec->fields[1].offset);
	kv_row_codec_decode(codec, parts->encoded, decoded, &scratch);
	kv_row_codec_decode(codec, without_signs, parts->mean, &scratch);
	for (uint32_t i = 0; i < codec->head_dim; i++) {
		parts->rest[i] = parts->row[i] - parts->mean[i];
		parts->correction[i] = decoded[i] - parts->mean[i];
	}
	parts->rest_sq = kv_test_product(codec->head_dim, parts->rest, parts->rest);
}

/* How much longer the correction is along a random residual of d numbers: about 1 + 1 / (4 d). */
static double slope_theory(uint32_t d)
{
	return sqrt(d / 2.0) * exp(lgamma(d / 2.0) - lgamma((d + 1) / 2.0));
}

/*
 * Identity rotation and projection, so that all can be seen: the row (2, 0, .. 0) has the indices 1, 0, ..
 * and only pluses, since what is left over is 2 - 2 c and 15 times 2 c.
 */
START_TEST(test_format_tqp_by_hand)
{
	static float identity[16 * 16];
	const struct kv_format *format = NULL;
	struct kv_rotation *rotation = NULL, *projection = NULL;
	struct kv_row_codec *codec = NULL;
	struct kvcb_solution book;
	struct kv_row_scratch scratch;
	float row[16] = { 2 }, back[16];
	static const uint8_t expected[8] = { 0x01, 0x00, 0xFF, 0xFF, 0x00, 0x00, 0x00, 0x40 };
	uint8_t encoded[12];

	for (uint32_t i = 0; i < 16; i++)
		identity[17 * i] = 1;
	ck_assert(kvcb_solve(16, 1, &book));
	const double c = book.centroids[1], rest = 2 * sqrt((1 - c) * (1 - c) + 15 * c * c);

	ck_assert_int_eq(kv_format_parse("tqp2", &format, NULL), KV_OK);
	ck_assert_int_eq(
		kv_rotation_create_from_matrix(KV_ROTATION_FILE, 16, 1, identity, &rotation, NULL), KV_OK);
	ck_assert_int_eq(
		kv_rotation_create_from_matrix(KV_ROTATION_PROJECTION, 16, 1, identity, &projection, NULL),
		KV_OK);
	const struct kv_format_options options = { .projection = projection };

	ck_assert_int_eq(kv_row_codec_create_with(format, 16, rotation, &options, &codec, NULL), KV_OK);
	ck_assert_uint_eq(codec->row_bytes, 12);
	ck_assert_int_eq(kv_row_codec_encode(codec, row, encoded, &scratch), KV_OK);
	ck_assert_mem_eq(encoded, expected, 8);
	ck_assert_double_eq_tol((double)kv_load_f32(encoded + 8), rest, 1e-6);
	kv_row_codec_decode(codec, encoded, back, &scratch);
	for (uint32_t i = 0; i < 16; i++)
		ck_assert_double_eq_tol(
			(double)back[i], (i == 0 ? 2 * c : -2 * c) + rest * SQRT_HALF_PI / 16, 1e-6);
	row[0] = -2; /* the other way round, but a tie still goes to the lower cell */
	ck_assert_int_eq(kv_row_codec_encode(codec, row, encoded, &scratch), KV_OK);
	ck_assert_uint_eq(encoded[0], 0x00);
	ck_assert_uint_eq(encoded[2], 0xFE);
	kv_row_codec_destroy(codec);
	kv_rotation_destroy(rotation);
	kv_rotation_destroy(projection);
}
END_TEST

/* Indices and norm are those of tqN with one bit less, and without the signs a row decodes like it. */
START_TEST(test_format_tqp_begins_like_tq)
{
	static const uint32_t dims[] = { 64, 80 };
	uint64_t state = 50;

	printf("seed 50\n");
	for (size_t k = 0; k < KV_LENGTH(dims); k++) {
		for (uint32_t bits = 2; bits <= 5; bits++) {
			char names[2][8];

			snprintf(names[0], sizeof(names[0]), "tqp%u", bits);
			snprintf(names[1], sizeof(names[1]), "tq%u", bits - 1);
			struct kv_test_codec tqp = kv_test_codec_make(names[0], dims[k], NULL);
			struct kv_test_codec tq = kv_test_codec_make(names[1], dims[k], NULL);
			const uint32_t n_index_bytes = tq.codec->segments[0].payload_bytes;
			static struct parts parts;
			struct kv_row_scratch scratch;
			uint8_t encoded[KV_ROW_BYTES_MAX];
			float back[KV_HEAD_DIM_MAX];

			kv_test_normal(&state, dims[k], 1, parts.row);
			take_apart(tqp.codec, &parts);
			ck_assert_int_eq(kv_row_codec_encode(tq.codec, parts.row, encoded, &scratch), KV_OK);
			ck_assert_mem_eq(encoded, parts.encoded, n_index_bytes);
			ck_assert_mem_eq(encoded + n_index_bytes, parts.encoded + tqp.codec->fields[0].offset,
				sizeof(float));
			kv_row_codec_decode(tq.codec, encoded, back, &scratch);
			for (uint32_t i = 0; i < dims[k]; i++)
				ck_assert(back[i] == parts.mean[i]);
			ck_assert_double_eq_tol(
				(double)kv_load_f32(parts.encoded + tqp.codec->fields[1].offset),
				sqrt(parts.rest_sq), 1e-6);
			kv_test_codec_drop(&tqp);
			kv_test_codec_drop(&tq);
		}
	}
}
END_TEST

/* Sums over rows and queries. */
struct sums {
	double rest_sq, along_rest, error_sq, row_sq_error; /* of vectors */
	double truth_sq, truth_estimate;                    /* of scores */
};

static void add_row(
	const struct kv_row_codec *codec, const struct parts *parts, uint64_t *state, struct sums *sums)
{
	const uint32_t d = codec->head_dim;
	const double row_sq = kv_test_product(d, parts->row, parts->row);
	const double error_sq = kv_test_sq_distance(d, parts->correction, parts->rest);
	double prepared[KV_PREPARED_DIM_MAX], expanded[KV_PREPARED_DIM_MAX];
	float q[KV_HEAD_DIM_MAX];

	sums->rest_sq += parts->rest_sq;
	sums->along_rest += kv_test_product(d, parts->correction, parts->rest);
	sums->error_sq += error_sq;
	sums->row_sq_error += error_sq / row_sq / N_ROWS;
	kv_row_codec_expand(codec, parts->encoded, expanded);
	for (uint32_t n = 0; n < 8; n++) {
		kv_test_normal(state, d, 1, q);
		kv_row_codec_prepare_query(codec, q, prepared);
		const double truth = kv_test_product(d, q, parts->row);

		sums->truth_sq += truth * truth;
		sums->truth_estimate += truth * kv_row_codec_score(codec, prepared, expanded);
	}
}

/*
 * On 10^4 Gaussian rows: scores grow with the truth by a slope of 1 within 1 %, the correction along the
 * residual too; the vector's error is (pi/2 - 1) times the residual's within 3 %, and of the row's within 2 %
 * of theory.
 */
START_TEST(test_format_tqp_is_unbiased)
{
	static const struct {
		const char *name;
		uint32_t d;
	} rows[] = { { "tqp2", 128 }, { "tqp3", 128 }, { "tqp4", 128 }, { "tqp5", 128 }, { "tqp3", 64 },
		{ "tqp3", 80 }, { "tqp4", 96 }, { "tqp3", 256 } };
	uint64_t state = 51;

	printf("seed 51\n");
	for (size_t k = 0; k < KV_LENGTH(rows); k++) {
		struct kv_test_codec made = kv_test_codec_make(rows[k].name, rows[k].d, NULL);
		const uint32_t d = rows[k].d;
		static struct parts parts;
		struct sums sums = { 0 };
		struct kvcb_codebook room;
		const double rest_theory =
			d * kvcb_get(d, made.codec->format->bits - 1, &room)->mse_per_coord;
		const double theory = rest_theory * (1 - 2 * slope_theory(d) + HALF_PI);

		for (uint32_t r = 0; r < N_ROWS; r++) {
			kv_test_normal(&state, d, 1, parts.row);
			take_apart(made.codec, &parts);
			add_row(made.codec, &parts, &state, &sums);
		}
		ck_assert_double_eq_tol(sums.truth_estimate / sums.truth_sq, 1, 0.01);
		ck_assert_double_eq_tol(sums.along_rest / sums.rest_sq, 1, 0.01);
		ck_assert_double_eq_tol(sums.along_rest / sums.rest_sq, slope_theory(d), 0.002);
		ck_assert_double_eq_tol(sums.error_sq / sums.rest_sq / (HALF_PI - 1), 1, 0.03);
		ck_assert_double_eq_tol(sums.row_sq_error / theory, 1, 0.02);
		kv_test_codec_drop(&made);
	}
}
END_TEST

/* The score is <q, x^> + len(r) sqrt(pi/2) / d <S q, z>, with S as it stands and not transposed. */
START_TEST(test_format_tqp_score_by_the_formula)
{
	static float matrix[64 * 64];
	static struct parts parts;
	struct kv_rotation *projection = NULL;
	uint64_t state = 52;

	printf("seed 52\n");
	kv_test_normal(&state, 64 * 64, 1, matrix);
	ck_assert_int_eq(
		kv_rotation_create_from_matrix(KV_ROTATION_PROJECTION, 64, 1, matrix, &projection, NULL),
		KV_OK);
	const struct kv_format_options options = { .projection = projection };
	struct kv_test_codec made = kv_test_codec_make("tqp3", 64, &options);
	const struct kv_segment *signs = &made.codec->segments[1];

	for (uint32_t n = 0; n < 100; n++) {
		double prepared[KV_PREPARED_DIM_MAX], expanded[KV_PREPARED_DIM_MAX], product = 0;
		float q[64];

		kv_test_normal(&state, 64, 1, q);
		kv_test_normal(&state, 64, 1, parts.row);
		take_apart(made.codec, &parts);
		for (uint32_t i = 0; i < 64; i++) {
			const bool is_plus = parts.encoded[signs->offset + i / 8] >> i % 8 & 1;
			const double s_q = kv_test_product(64, matrix + 64 * i, q);

			ck_assert(is_plus == (kv_test_product(64, matrix + 64 * i, parts.rest) >= 0));
			product += is_plus ? s_q : -s_q;
		}
		kv_row_codec_prepare_query(made.codec, q, prepared);
		kv_row_codec_expand(made.codec, parts.encoded, expanded);
		ck_assert_double_eq_tol(kv_row_codec_score(made.codec, prepared, expanded),
			kv_test_product(64, q, parts.mean) +
				sqrt(parts.rest_sq) * SQRT_HALF_PI / 64 * product,
			1e-5);
	}
	kv_test_codec_drop(&made);
	kv_rotation_destroy(projection);
}
END_TEST

/*
 * With rows of S that are i.i.d. N(0, 1), from a given matrix, the correction is unbiased without any term of
 * 1/d, and its score varies by (||r||^2 / d) (pi/2 ||q||^2 - <q, r>^2 / ||r||^2), within 5 %.
 */
START_TEST(test_format_tqp_gaussian_projection)
{
	static float matrix[64 * 64];
	double variance = 0, predicted = 0, along = 0, rest_sq = 0;
	uint64_t state = 53;

	printf("seed 53\n");
	for (uint32_t m = 0; m < 40; m++) {
		struct kv_rotation *projection = NULL;
		static struct parts parts;

		kv_test_normal(&state, 64 * 64, 1, matrix);
		ck_assert_int_eq(kv_rotation_create_from_matrix(
					 KV_ROTATION_PROJECTION, 64, 1, matrix, &projection, NULL),
			KV_OK);
		const struct kv_format_options options = { .projection = projection };
		struct kv_test_codec made = kv_test_codec_make("tqp2", 64, &options);

		for (uint32_t n = 0; n < 250; n++) {
			float q[64];

			kv_test_normal(&state, 64, 1, q);
			kv_test_normal(&state, 64, 1, parts.row);
			take_apart(made.codec, &parts);
			const double truth = kv_test_product(64, q, parts.rest);
			const double error = kv_test_product(64, q, parts.correction) - truth;

			variance += error * error;
			predicted += parts.rest_sq / 64 *
				(HALF_PI * kv_test_product(64, q, q) - truth * truth / parts.rest_sq);
			along += kv_test_product(64, parts.correction, parts.rest);
			rest_sq += parts.rest_sq;
		}
		kv_test_codec_drop(&made);
		kv_rotation_destroy(projection);
	}
	ck_assert_double_eq_tol(variance / predicted, 1, 0.05);
	ck_assert_double_eq_tol(along / rest_sq, 1, 0.01);
}
END_TEST

/* A projection of another dim is refused; a codec like another one has the same projection and the same
 * bytes. */
START_TEST(test_format_tqp_options)
{
	struct kv_test_codec made = kv_test_codec_make("tqp4", 80, NULL);
	const struct kv_format_options like = { .like = made.codec };
	const struct kv_format_options wrong = { .projection = made.codec->segments[1].rotation };
	struct kv_row_codec *codec = NULL;
	struct kv_row_scratch scratch;
	struct kv_error err = { 0 };
	uint8_t encoded[2][KV_ROW_BYTES_MAX];
	float row[80];
	uint64_t state = 54;

	printf("seed 54\n");
	ck_assert_int_eq(kv_format_check_with(made.codec->format, 64, &wrong, &err), KV_BAD_ARG);
	ck_assert_ptr_nonnull(strstr(err.msg, "projection"));
	ck_assert_int_eq(
		kv_row_codec_create_with(made.codec->format, 80, made.rotation, &like, &codec, NULL), KV_OK);
	ck_assert_ptr_eq(codec->segments[1].rotation, made.codec->segments[1].rotation);
	kv_test_normal(&state, 80, 1, row);
	ck_assert_int_eq(kv_row_codec_encode(made.codec, row, encoded[0], &scratch), KV_OK);
	ck_assert_int_eq(kv_row_codec_encode(codec, row, encoded[1], &scratch), KV_OK);
	ck_assert_mem_eq(encoded[0], encoded[1], codec->row_bytes);
	ck_assert_uint_eq(made.codec->segments[1].rotation->seed, 1042);
	kv_row_codec_destroy(codec);
	kv_test_codec_drop(&made);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("format_tqp");
	TCase *tcase = tcase_create("all");

	tcase_set_timeout(tcase, 240);
	tcase_add_test(tcase, test_format_tqp_by_hand);
	tcase_add_test(tcase, test_format_tqp_begins_like_tq);
	tcase_add_test(tcase, test_format_tqp_is_unbiased);
	tcase_add_test(tcase, test_format_tqp_score_by_the_formula);
	tcase_add_test(tcase, test_format_tqp_gaussian_projection);
	tcase_add_test(tcase, test_format_tqp_options);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
