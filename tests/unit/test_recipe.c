/* Recipes: group sizes, seeds and channel lists by hand; blocks, slopes and errors of encoded rows. */
#include "core/recipe.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "codebooks/solver.h"
#include "core/checked.h"
#include "core/format.h"
#include "tests/lib/kv_codec.h"

#define N_ROWS  10000u
#define HALF_PI 1.5707963267948966

static const struct kv_recipe *recipe_of(const char *name)
{
	const struct kv_format *format = NULL;

	ck_assert_int_eq(kv_format_parse(name, &format, NULL), KV_OK);
	ck_assert_ptr_nonnull(format->recipe);
	return format->recipe;
}

/* The high group is a multiple of 16, rounded half to even. */
START_TEST(test_recipe_group_sizes)
{
	static const uint32_t rows[][3] = { { 16, 0, 0 }, { 32, 0, 16 }, { 48, 16, 32 }, { 64, 16, 32 },
		{ 80, 16, 32 }, { 96, 32, 48 }, { 112, 32, 64 }, { 128, 32, 64 }, { 144, 32, 64 },
		{ 160, 32, 80 }, { 192, 48, 96 }, { 224, 64, 112 }, { 256, 64, 128 } };

	for (size_t i = 0; i < KV_LENGTH(rows); i++) {
		ck_assert_uint_eq(kv_recipe_n_high(recipe_of("turboquant25"), rows[i][0]), rows[i][1]);
		ck_assert_uint_eq(kv_recipe_n_high(recipe_of("turboquant35"), rows[i][0]), rows[i][2]);
	}
}
END_TEST

/* Seeds of the published constants: base, an offset for signs, one number per group, and the group's dim. */
START_TEST(test_recipe_seeds)
{
	ck_assert_uint_eq(kv_recipe_rotation_seed(true, 32), 20250561);
	ck_assert_uint_eq(kv_recipe_rotation_seed(false, 96), 20250735);
	ck_assert_uint_eq(kv_recipe_projection_seed(true, 32), 20260767);
	ck_assert_uint_eq(kv_recipe_projection_seed(false, 96), 20260925);
}
END_TEST

/* A codec's rotations and projections have those seeds, codebooks the dims of the groups. */
START_TEST(test_recipe_codec_parts)
{
	struct kv_test_codec made = kv_test_codec_make("turboquant25", 192, NULL);
	const struct kv_segment *segments = made.codec->segments;

	ck_assert_uint_eq(made.codec->n_segments, 4);
	ck_assert_uint_eq(segments[0].rotation->seed, kv_recipe_rotation_seed(true, 48));
	ck_assert_uint_eq(segments[1].rotation->seed, kv_recipe_projection_seed(true, 48));
	ck_assert_uint_eq(segments[2].rotation->seed, kv_recipe_rotation_seed(false, 144));
	ck_assert_uint_eq(segments[3].rotation->seed, kv_recipe_projection_seed(false, 144));
	ck_assert_uint_eq(segments[0].codebook->head_dim, 48);
	ck_assert_uint_eq(segments[0].codebook->bits, 2);
	ck_assert_uint_eq(segments[2].codebook->head_dim, 144);
	ck_assert_uint_eq(segments[2].codebook->bits, 1);
	ck_assert(segments[0].rotation->is_normalised);
	ck_assert(!segments[1].rotation->is_normalised);
	kv_test_codec_drop(&made);
}
END_TEST

/* Lists have the right number of ascending channels below the dim. */
START_TEST(test_recipe_channel_lists)
{
	const struct kv_recipe *recipe = recipe_of("turboquant25");
	struct kv_error err = { 0 };
	uint16_t channels[32];

	for (uint16_t i = 0; i < 32; i++)
		channels[i] = (uint16_t)(4 * i + 3);
	ck_assert_int_eq(kv_recipe_check_channels(recipe, 128, channels, 32, &err), KV_OK);
	ck_assert_int_eq(kv_recipe_check_channels(recipe, 128, channels, 31, &err), KV_BAD_ARG);
	ck_assert_ptr_nonnull(strstr(err.msg, "31 high channels instead of 32"));
	channels[31] = 128;
	ck_assert_int_eq(kv_recipe_check_channels(recipe, 128, channels, 32, &err), KV_BAD_ARG);
	ck_assert_ptr_nonnull(strstr(err.msg, "128 is not below"));
	channels[31] = channels[30];
	ck_assert_int_eq(kv_recipe_check_channels(recipe, 128, channels, 32, &err), KV_BAD_ARG);
	ck_assert_ptr_nonnull(strstr(err.msg, "do not ascend"));
	channels[31] = 5;
	ck_assert_int_eq(kv_recipe_check_channels(recipe, 128, channels, 32, &err), KV_BAD_ARG);
}
END_TEST

/* The channels with the largest sums are picked, in order; of equal ones the lower. */
START_TEST(test_recipe_picks_channels)
{
	static const double sums[8] = { 1, 5, 3, 5, 0, 3, 9, 3 };
	static const uint16_t expected[9][8] = { { 0 }, { 6 }, { 1, 6 }, { 1, 3, 6 }, { 1, 2, 3, 6 },
		{ 1, 2, 3, 5, 6 }, { 1, 2, 3, 5, 6, 7 }, { 0, 1, 2, 3, 5, 6, 7 },
		{ 0, 1, 2, 3, 4, 5, 6, 7 } };

	for (uint32_t n = 0; n <= 8; n++) {
		uint16_t channels[8];

		memset(channels, 0xEE, sizeof(channels));
		kv_recipe_pick_channels(sums, 8, n, channels);
		ck_assert_mem_eq(channels, expected[n], n * sizeof(*channels));
		if (n < 8)
			ck_assert_uint_eq(channels[n], 0xEEEE);
	}
}
END_TEST

/* Which channels are high changes where a value lies, and nothing else: a permuted row has the same bytes. */
START_TEST(test_recipe_channels_are_gathered)
{
	uint16_t high[32];
	float row[64], permuted[64], back[2][64];
	uint8_t encoded[2][64];
	uint32_t n_high = 0, n_low = 32;
	uint64_t state = 70;

	printf("seed 70\n");
	for (uint16_t i = 0; i < 32; i++)
		high[i] = (uint16_t)(2 * i + (i > 10));
	const struct kv_format_options options = { .high_channels = high, .n_high_channels = 32 };
	struct kv_test_codec plain = kv_test_codec_make("turboquant35", 64, NULL);
	struct kv_test_codec made = kv_test_codec_make("turboquant35", 64, &options);
	struct kv_row_scratch scratch;

	kv_test_normal(&state, 64, 1, row);
	for (uint32_t i = 0; i < 64; i++) {
		const bool is_high = n_high < 32 && high[n_high] == i;

		permuted[is_high ? n_high++ : n_low++] = row[i];
	}
	memset(high, 0, sizeof(high)); /* the codec has its own copy */
	ck_assert_int_eq(kv_row_codec_encode(made.codec, row, encoded[0], &scratch), KV_OK);
	ck_assert_int_eq(kv_row_codec_encode(plain.codec, permuted, encoded[1], &scratch), KV_OK);
	ck_assert_mem_eq(encoded[0], encoded[1], made.codec->row_bytes);
	kv_row_codec_decode(made.codec, encoded[0], back[0], &scratch);
	kv_row_codec_decode(plain.codec, encoded[0], back[1], &scratch);
	for (uint32_t i = 0; i < 64; i++)
		ck_assert(back[0][made.codec->channels[i]] == back[1][i]);
	kv_test_codec_drop(&plain);
	kv_test_codec_drop(&made);
}
END_TEST

/* A codec like another one, with a list of its own, encodes as one that was made alone. */
START_TEST(test_recipe_codecs_share_tables)
{
	uint16_t high[32];
	float row[96], back[2][96];
	uint8_t encoded[2][64];
	uint64_t state = 71;

	printf("seed 71\n");
	for (uint16_t i = 0; i < 32; i++)
		high[i] = (uint16_t)(3 * i + 1);
	const struct kv_format_options alone = { .high_channels = high, .n_high_channels = 32 };
	struct kv_test_codec base = kv_test_codec_make("turboquant25", 96, NULL);
	struct kv_test_codec made = kv_test_codec_make("turboquant25", 96, &alone);
	const struct kv_format_options shared = {
		.high_channels = high, .n_high_channels = 32, .like = base.codec
	};
	struct kv_test_codec like = kv_test_codec_make("turboquant25", 96, &shared);
	struct kv_row_scratch scratch;

	kv_test_normal(&state, 96, 1, row);
	ck_assert_int_eq(kv_row_codec_encode(made.codec, row, encoded[0], &scratch), KV_OK);
	ck_assert_int_eq(kv_row_codec_encode(like.codec, row, encoded[1], &scratch), KV_OK);
	ck_assert_mem_eq(encoded[0], encoded[1], made.codec->row_bytes);
	kv_row_codec_decode(made.codec, encoded[0], back[0], &scratch);
	kv_row_codec_decode(like.codec, encoded[0], back[1], &scratch);
	ck_assert_mem_eq(back[0], back[1], sizeof(back[0]));
	ck_assert_ptr_null(like.codec->own_rotations[0]);
	ck_assert_ptr_null(like.codec->own_codebooks[0]);
	kv_test_codec_drop(&like);
	kv_test_codec_drop(&made);
	kv_test_codec_drop(&base);
}
END_TEST

/* ---- what the signs give ---- */

/* Per block of a group: the correction along the residual over the residual's square. */
struct block_sums {
	double along[8], rest_sq[8];
	double row_error; /* mean of ||decoded - x||^2 / ||x||^2 */
};

/* Ranges of the high group's blocks, then the low one's, in the order of codec->channels. */
static uint32_t list_blocks(const struct kv_row_codec *codec, uint32_t ends[8])
{
	uint32_t n = 0, first = 0;

	for (uint32_t g = 0; g < 2; g++) {
		for (uint32_t block = 256; block != 0; block /= 2) {
			if (codec->segments[2 * g].n_channels & block) {
				first += block;
				ends[n++] = first;
			}
		}
	}
	return n;
}

static void measure(const struct kv_row_codec *codec, uint64_t *state, struct block_sums *sums)
{
	const uint32_t d = codec->head_dim;
	struct kv_row_scratch scratch;
	float row[KV_HEAD_DIM_MAX], decoded[KV_HEAD_DIM_MAX], mean[KV_HEAD_DIM_MAX];
	uint8_t encoded[KV_ROW_BYTES_MAX];
	uint32_t ends[8];

	list_blocks(codec, ends);
	*sums = (struct block_sums){ 0 };
	for (uint32_t r = 0; r < N_ROWS; r++) {
		uint32_t b = 0;

		kv_test_normal(state, d, 1, row);
		ck_assert_int_eq(kv_row_codec_encode(codec, row, encoded, &scratch), KV_OK);
		kv_row_codec_decode(codec, encoded, decoded, &scratch);
		kv_store_u16(0, encoded + codec->fields[1].offset); /* residual norms 0: no signs */
		kv_store_u16(0, encoded + codec->fields[3].offset);
		kv_row_codec_decode(codec, encoded, mean, &scratch);
		sums->row_error +=
			kv_test_sq_distance(d, decoded, row) / kv_test_product(d, row, row) / N_ROWS;
		for (uint32_t i = 0; i < d; i++) {
			const uint32_t channel = codec->channels[i];
			const double rest = (double)row[channel] - (double)mean[channel];

			b += i == ends[b];
			sums->along[b] += rest * ((double)decoded[channel] - (double)mean[channel]);
			sums->rest_sq[b] += rest * rest;
		}
	}
}

/* Squared error of unbiased signs, relative: each group has its share of the row. */
static double exact_theory(const struct kv_row_codec *codec)
{
	double sum = 0;

	for (uint32_t g = 0; g < 2; g++) {
		const struct kv_segment *indices = &codec->segments[2 * g];
		const uint32_t dim = indices->n_channels;

		sum += dim * dim * indices->codebook->mse_per_coord / codec->head_dim * (HALF_PI - 1);
	}
	return sum;
}

/*
 * With the exact scale the slope of every block is 1 within 2 %, with the published one it is sqrt(block /
 * dim); the squared error is the codebooks' times (pi/2 - 1) within 2 %.
 */
START_TEST(test_recipe_slopes_and_errors)
{
	static const struct {
		const char *name;
		uint32_t d;
	} rows[] = { { "turboquant25", 128 }, { "turboquant35", 128 }, { "turboquant25", 64 },
		{ "turboquant35", 96 }, { "turboquant25", 192 } };
	uint64_t state = 72;

	printf("seed 72\n");
	for (size_t k = 0; k < KV_LENGTH(rows); k++) {
		static const struct kv_format_options published = { .recipe_scale =
									    KV_RECIPE_SCALE_PUBLISHED };
		struct kv_test_codec exact = kv_test_codec_make(rows[k].name, rows[k].d, NULL);
		struct kv_test_codec old = kv_test_codec_make(rows[k].name, rows[k].d, &published);
		struct block_sums sums[2];
		uint32_t ends[8];
		const uint32_t n_blocks = list_blocks(exact.codec, ends);
		const uint32_t n_high = exact.codec->segments[0].n_channels;

		measure(exact.codec, &state, &sums[0]);
		measure(old.codec, &state, &sums[1]);
		for (uint32_t b = 0; b < n_blocks; b++) {
			const uint32_t block = ends[b] - (b ? ends[b - 1] : 0);
			const uint32_t dim = ends[b] <= n_high ? n_high : rows[k].d - n_high;
			const double biased = sqrt((double)block / dim);

			ck_assert_double_eq_tol(sums[0].along[b] / sums[0].rest_sq[b], 1, 0.02);
			ck_assert_double_eq_tol(sums[1].along[b] / sums[1].rest_sq[b], biased, 0.02);
		}
		ck_assert_double_eq_tol(sums[0].row_error / exact_theory(exact.codec), 1, 0.02);
		kv_test_codec_drop(&exact);
		kv_test_codec_drop(&old);
	}
}
END_TEST

/* turboquant25 at 128 channels: slopes 0.82 and 0.58 and an error of 0.122 as published, against 0.168. */
START_TEST(test_recipe_published_figures)
{
	static const struct kv_format_options published = { .recipe_scale = KV_RECIPE_SCALE_PUBLISHED };
	struct kv_test_codec exact = kv_test_codec_make("turboquant25", 128, NULL);
	struct kv_test_codec old = kv_test_codec_make("turboquant25", 128, &published);
	struct block_sums sums;
	uint64_t state = 73;

	printf("seed 73\n");
	measure(exact.codec, &state, &sums);
	ck_assert_double_eq_tol(sums.row_error, 0.168, 0.002);
	measure(old.codec, &state, &sums);
	ck_assert_double_eq_tol(sums.row_error, 0.122, 0.002);
	ck_assert_double_eq_tol(sums.along[1] / sums.rest_sq[1], 0.82, 0.01);
	ck_assert_double_eq_tol(sums.along[2] / sums.rest_sq[2], 0.58, 0.01);
	kv_test_codec_drop(&exact);
	kv_test_codec_drop(&old);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("recipe");
	TCase *tcase = tcase_create("all");

	tcase_set_timeout(tcase, 120);
	tcase_add_test(tcase, test_recipe_group_sizes);
	tcase_add_test(tcase, test_recipe_seeds);
	tcase_add_test(tcase, test_recipe_codec_parts);
	tcase_add_test(tcase, test_recipe_channel_lists);
	tcase_add_test(tcase, test_recipe_picks_channels);
	tcase_add_test(tcase, test_recipe_channels_are_gathered);
	tcase_add_test(tcase, test_recipe_codecs_share_tables);
	tcase_add_test(tcase, test_recipe_slopes_and_errors);
	tcase_add_test(tcase, test_recipe_published_figures);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
