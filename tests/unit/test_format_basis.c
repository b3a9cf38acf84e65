/*
 * The basis of rows, in which clients may have queries and outputs: one orthogonal matrix for every codec.
 * Loop index: the format.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/checked.h"
#include "core/format.h"
#include "tests/lib/kv_codec.h"

static const uint32_t dims[] = { 16, 48, 64, 80, 96, 128, 256 };

/* Every fourth channel is a high one, or every second: a list that is not the first ones. */
static struct kv_test_codec make(uint32_t format_idx, uint32_t dim)
{
	const struct kv_format *format = kv_format_at(format_idx);
	const struct kv_format_options plain = { .group =
							 kv_format_takes(format) & KV_OPTION_GROUP ? 16 : 0 };
	struct kv_format_options options = plain;
	uint16_t channels[KV_HEAD_DIM_MAX];
	struct kv_test_codec made = { NULL, NULL };

	if (kv_format_check_with(format, dim, &plain, NULL) != KV_OK)
		return made;
	made = kv_test_codec_make(format->name, dim, &plain);
	if (!(kv_format_takes(format) & KV_OPTION_RECIPE))
		return made;
	options.n_high_channels = made.codec->segments[0].n_channels;
	options.high_channels = channels;
	for (uint32_t i = 0; i < options.n_high_channels; i++)
		channels[i] = (uint16_t)(dim / options.n_high_channels * i + 1);
	kv_test_codec_drop(&made);
	return kv_test_codec_make(format->name, dim, &options);
}

static void draw(uint64_t *seed, uint32_t n, float *numbers, double *wide)
{
	kv_test_normal(seed, n, 1, numbers);
	for (uint32_t i = 0; i < n; i++)
		wide[i] = (double)numbers[i];
}

/* The rows that are told are a matrix with B B^T = 1; to_basis() multiplies with it, from_basis() with B^T.
 */
START_TEST(test_basis_is_an_orthogonal_matrix)
{
	static float rows[KV_HEAD_DIM_MAX][KV_HEAD_DIM_MAX];
	uint64_t seed = 5;

	printf("seed 5\n");
	for (size_t n = 0; n < KV_LENGTH(dims); n++) {
		struct kv_test_codec made = make((uint32_t)_i, dims[n]);
		const uint32_t d = dims[n];
		double x[KV_HEAD_DIM_MAX], y[KV_HEAD_DIM_MAX], back[KV_HEAD_DIM_MAX], error = 0;
		float numbers[KV_HEAD_DIM_MAX];

		if (!made.codec)
			continue;
		draw(&seed, d, numbers, x);
		kv_row_codec_to_basis(made.codec, x, y);
		kv_row_codec_from_basis(made.codec, y, back);
		for (uint32_t i = 0; i < d; i++)
			kv_row_codec_basis_row(made.codec, i, rows[i]);
		for (uint32_t i = 0; i < d; i++) {
			error = fmax(error, fabs(y[i] - kv_test_product(d, rows[i], numbers)));
			error = fmax(error, fabs(back[i] - x[i]));
			for (uint32_t j = 0; j <= i; j++)
				error = fmax(error, fabs(kv_test_product(d, rows[i], rows[j]) - (i == j)));
		}
		ck_assert_double_le(error, 2e-6);
		kv_test_codec_drop(&made);
	}
}
END_TEST

/* A query that came in the basis has the scores of the query itself; where the basis is all, it is taken as
 * it is. */
START_TEST(test_basis_of_queries)
{
	uint64_t seed = 6;

	printf("seed 6\n");
	for (size_t n = 0; n < KV_LENGTH(dims); n++) {
		struct kv_test_codec made = make((uint32_t)_i, dims[n]);
		const uint32_t d = dims[n];
		double q_wide[KV_HEAD_DIM_MAX], y[KV_HEAD_DIM_MAX], wanted[KV_PREPARED_DIM_MAX],
			found[KV_PREPARED_DIM_MAX], expanded[KV_PREPARED_DIM_MAX];
		float q[KV_HEAD_DIM_MAX], turned[KV_HEAD_DIM_MAX], row[KV_HEAD_DIM_MAX];
		uint8_t packed[KV_ROW_BYTES_MAX];
		struct kv_row_scratch scratch;

		if (!made.codec)
			continue;
		draw(&seed, d, row, q_wide);
		ck_assert_int_eq(kv_row_codec_encode(made.codec, row, packed, &scratch), KV_OK);
		kv_row_codec_expand(made.codec, packed, expanded);
		draw(&seed, d, q, q_wide);
		kv_row_codec_to_basis(made.codec, q_wide, y);
		for (uint32_t i = 0; i < d; i++)
			turned[i] = (float)y[i];
		kv_row_codec_prepare_query(made.codec, q, wanted);
		kv_row_codec_prepare_rotated(made.codec, turned, found);
		/* Numbers are about 1, and a score is a sum of d products. */
		for (uint32_t i = 0; i < made.codec->prepared_dim; i++)
			ck_assert_double_le(fabs(found[i] - wanted[i]), 2e-6 * sqrt(d));
		ck_assert_double_le(fabs(kv_row_codec_score(made.codec, found, expanded) -
					    kv_row_codec_score(made.codec, wanted, expanded)),
			2e-6 * sqrt(d));
		for (uint32_t i = 0; made.codec->n_segments == 1 && i < d; i++)
			ck_assert(found[i] == (double)turned[i]);
		kv_test_codec_drop(&made);
	}
}
END_TEST

/* An output that stays in the basis is the output, taken to it; its length is the same. */
START_TEST(test_basis_of_outputs)
{
	uint64_t seed = 7;

	printf("seed 7\n");
	for (size_t n = 0; n < KV_LENGTH(dims); n++) {
		struct kv_test_codec made = make((uint32_t)_i, dims[n]);
		const uint32_t d = dims[n];
		double acc[KV_PREPARED_DIM_MAX], copy[KV_PREPARED_DIM_MAX], x[KV_HEAD_DIM_MAX],
			y[KV_HEAD_DIM_MAX], length = 0, error = 0;
		float drawn[KV_PREPARED_DIM_MAX], out[KV_HEAD_DIM_MAX], turned[KV_HEAD_DIM_MAX];

		if (!made.codec)
			continue;
		draw(&seed, made.codec->prepared_dim, drawn, acc);
		memcpy(copy, acc, sizeof(copy));
		kv_row_codec_finish_output(made.codec, copy, 0.25, out);
		kv_row_codec_finish_rotated(made.codec, acc, 0.25, turned);
		for (uint32_t i = 0; i < d; i++)
			x[i] = (double)out[i];
		kv_row_codec_to_basis(made.codec, x, y);
		for (uint32_t i = 0; i < d; i++) {
			error += (y[i] - (double)turned[i]) * (y[i] - (double)turned[i]);
			length += x[i] * x[i];
		}
		ck_assert_double_gt(length, 0);
		ck_assert_double_le(sqrt(error), 1e-6 * sqrt(length));
		kv_test_codec_drop(&made);
	}
}
END_TEST

/* By hand: no rotation is the identity; a recipe has the high channels first, and none of the others there.
 */
START_TEST(test_basis_by_hand)
{
	static const uint16_t high[16] = { 1, 5, 9, 13, 17, 21, 25, 29, 33, 37, 41, 45, 49, 53, 57, 61 };
	const struct kv_format_options options = { .high_channels = high, .n_high_channels = 16 };
	struct kv_test_codec plain = kv_test_codec_make("v4", 64, NULL);
	struct kv_test_codec recipe = kv_test_codec_make("turboquant25", 64, &options);
	float row[64];

	for (uint32_t i = 0; i < 64; i++) {
		kv_row_codec_basis_row(plain.codec, i, row);
		for (uint32_t c = 0; c < 64; c++)
			ck_assert(row[c] == (c == i));
		kv_row_codec_basis_row(recipe.codec, i, row);
		for (uint32_t c = 0; c < 64; c++) {
			const bool is_high = c % 4 == 1;
			/* 16 high channels are a block, 48 others are 32 and 16. */
			const uint32_t rank = c - (c + 2) / 4, block = i < 16 ? 16 : i < 48 ? 32 : 16;
			const bool is_there =
				i < 16 ? is_high : !is_high && (i < 48 ? rank < 32 : rank >= 32);

			ck_assert_float_eq_tol(fabsf(row[c]), is_there ? 1 / sqrtf((float)block) : 0, 1e-7f);
		}
	}
	kv_test_codec_drop(&plain);
	kv_test_codec_drop(&recipe);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("format basis");
	TCase *tcase = tcase_create("all");
	const int n = (int)kv_format_count();

	tcase_set_timeout(tcase, 60);
	tcase_add_loop_test(tcase, test_basis_is_an_orthogonal_matrix, 0, n);
	tcase_add_loop_test(tcase, test_basis_of_queries, 0, n);
	tcase_add_loop_test(tcase, test_basis_of_outputs, 0, n);
	tcase_add_test(tcase, test_basis_by_hand);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK_GETENV);
}
