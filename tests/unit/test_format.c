/*
 * Row formats: names, dims, options and layouts of all of them, and rows by hand. Bytes are compared in
 * test_format_golden.c, rows of every kind in test_format_rows.c, what is special to a family in a test of
 * its own.
 */
#include "core/format.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/checked.h"
#include "core/memory.h"
#include "tests/lib/kv_codec.h"

/* Options with which a format can be made at every dim: vN needs a group that is not larger. */
static struct kv_test_codec make_at(const struct kv_format *format, uint32_t head_dim)
{
	const struct kv_format_options options = {
		.group = kv_format_takes(format) & KV_OPTION_GROUP && head_dim < 32 ? head_dim : 0
	};

	return kv_test_codec_make(format->name, head_dim, &options);
}

static bool is_made_at(const struct kv_format *format, uint32_t head_dim)
{
	const struct kv_format_options options = { .group = kv_format_takes(format) & KV_OPTION_GROUP ? 16
												      : 0 };

	return kv_format_check_with(format, head_dim, &options, NULL) == KV_OK;
}

static struct kv_test_codec make_codec(const char *name, uint32_t head_dim)
{
	return kv_test_codec_make(name, head_dim, NULL);
}

/* ---- bytes by hand ---- */

/* A bf16 row worked out by hand: sign of zero kept, ties to even, subnormals kept. */
START_TEST(test_format_bf16_by_hand)
{
	struct kv_test_codec made = make_codec("bf16", 16);
	struct kv_row_scratch scratch;
	const float row[16] = { 1.0f, -0.0f, 0x1.01p0f, 0x1.03p0f, -0x1.010002p0f, 0x1p-133f, 0x1p-134f,
		3e-3f };
	static const uint8_t expected[16] = { 0x80, 0x3F, 0x00, 0x80, 0x80, 0x3F, 0x82, 0x3F, 0x81, 0xBF,
		0x01, 0x00, 0x00, 0x00, 0x45, 0x3B };
	uint8_t encoded[32];
	float back[16];

	ck_assert_int_eq(kv_row_codec_encode(made.codec, row, encoded, &scratch), KV_OK);
	ck_assert_mem_eq(encoded, expected, 16);
	kv_row_codec_decode(made.codec, encoded, back, &scratch);
	ck_assert(signbit(back[1]));
	kv_test_codec_drop(&made);
}
END_TEST

/* An fp8 row worked out by hand: 448 gives the scale 1; ties to even, subnormals and the sign of zero kept.
 */
START_TEST(test_format_fp8_by_hand)
{
	struct kv_test_codec made = make_codec("fp8", 16);
	struct kv_row_scratch scratch;
	const float row[16] = { 448, -448, 17, 19, -0.0f, 0x1p-9f, 0x1p-10f, -0x3p-10f, 1, 0x1p-6f, 430,
		440 };
	static const uint8_t expected[20] = { 0x7E, 0xFE, 0x58, 0x5A, 0x80, 0x01, 0x00, 0x82, 0x38, 0x08,
		0x7D, 0x7E, 0, 0, 0, 0, 0x00, 0x00, 0x80, 0x3F };
	uint8_t encoded[20];
	float back[16];

	ck_assert_int_eq(kv_row_codec_encode(made.codec, row, encoded, &scratch), KV_OK);
	ck_assert_mem_eq(encoded, expected, 20);
	kv_row_codec_decode(made.codec, encoded, back, &scratch);
	ck_assert(back[0] == 448);
	ck_assert(back[7] == -0x1p-8f);
	ck_assert(back[10] == 416);
	ck_assert(signbit(back[4]));
	kv_test_codec_drop(&made);
}
END_TEST

/* ---- names, dims, options, layout ---- */

/* Every listed format is found by its name; an unknown name gives an error that lists the known ones. */
START_TEST(test_format_names)
{
	const struct kv_format *format = NULL;
	struct kv_error err = { 0 };
	static const char *const unknown[] = { "", "tq", "tq9", "tq0", "TQ4", "tq4 ", "f32\n", "tqp1", "tqp6",
		"v5", "v1", "fp16", "turboquant" };
	static const char *const known[] = { "f32", "f16", "bf16", "fp8", "tq1", "tq2", "tq3", "tq4", "tq5",
		"tq6", "tq7", "tq8", "tqp2", "tqp3", "tqp4", "tqp5", "v2", "v3", "v4", "v8", "turboquant25",
		"turboquant35" };

	ck_assert_uint_eq(kv_format_count(), KV_LENGTH(known));
	for (uint32_t i = 0; i < KV_LENGTH(known); i++) {
		ck_assert_int_eq(kv_format_parse(known[i], &format, NULL), KV_OK);
		ck_assert_ptr_eq(format, kv_format_at(i));
		ck_assert_str_eq(format->name, known[i]);
	}
	for (size_t i = 0; i < KV_LENGTH(unknown); i++) {
		format = NULL;
		ck_assert_int_eq(kv_format_parse(unknown[i], &format, &err), KV_BAD_ARG);
		ck_assert_ptr_null(format);
		for (uint32_t k = 0; k < kv_format_count(); k++)
			ck_assert_ptr_nonnull(strstr(err.msg, kv_format_at(k)->name));
	}
}
END_TEST

/* Dims are 16 to 256 in steps of 16; vN needs a whole group, recipes a high group, all others take any dim.
 */
START_TEST(test_format_dims)
{
	for (uint32_t f = 0; f < kv_format_count(); f++) {
		const struct kv_format *format = kv_format_at(f);
		struct kv_error err;

		for (uint32_t d = 0; d <= 300; d++) {
			const bool is_dim = d >= 16 && d <= 256 && d % 16 == 0;
			const bool is_too_small = (format->name[0] == 'v' && d < 32) ||
				(strcmp(format->name, "turboquant25") == 0 && d < 48) ||
				(strcmp(format->name, "turboquant35") == 0 && d < 32);

			memset(&err, 0, sizeof(err));
			ck_assert_int_eq(kv_format_check(format, d, &err),
				is_dim && !is_too_small ? KV_OK : KV_BAD_ARG);
			if (is_dim && is_too_small)
				ck_assert_ptr_nonnull(strstr(err.msg, format->name));
		}
	}
}
END_TEST

/* An option is taken by its formats and refused by name elsewhere. */
START_TEST(test_format_options)
{
	static const uint16_t channels[16] = { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 63 };
	struct kv_rotation *projection = NULL;

	ck_assert_int_eq(kv_rotation_create_projection(64, 1, &projection, NULL), KV_OK);
	const struct {
		struct kv_format_options options;
		const char *name, *takers;
	} rows[] = {
		{ { .norm_correction = true }, "norm_correction", "tq1 tq2 tq3 tq4 tq5 tq6 tq7 tq8 " },
		{ { .group = 16 }, "group", "v2 v3 v4 v8 " },
		{ { .recipe_scale = KV_RECIPE_SCALE_PUBLISHED }, "recipe_scale",
			"turboquant25 turboquant35 " },
		{ { .high_channels = channels, .n_high_channels = 16 }, "high channels", "turboquant25 " },
		{ { .projection = projection }, "projection", "tqp2 tqp3 tqp4 tqp5 " },
	};

	for (size_t i = 0; i < KV_LENGTH(rows); i++) {
		for (uint32_t f = 0; f < kv_format_count(); f++) {
			const struct kv_format *format = kv_format_at(f);
			struct kv_error err = { 0 };
			char word[32];
			const enum kv_status status =
				kv_format_check_with(format, 64, &rows[i].options, &err);

			snprintf(word, sizeof(word), "%s ", format->name);
			const bool is_taker = strstr(rows[i].takers, word) != NULL;

			ck_assert_msg(status == (is_taker ? KV_OK : KV_BAD_ARG), "%s %s", format->name,
				rows[i].name);
			if (!is_taker)
				ck_assert_ptr_nonnull(strstr(err.msg, format->name));
			/* turboquant35 takes the option, but the list is too short for it */
			if (!is_taker && strcmp(format->name, "turboquant35") != 0)
				ck_assert_ptr_nonnull(strstr(err.msg, rows[i].name));
		}
	}
	kv_rotation_destroy(projection);
}
END_TEST

/* Names of recipe scales go both ways. */
START_TEST(test_format_recipe_scale_names)
{
	enum kv_recipe_scale scale = KV_RECIPE_SCALE_EXACT;
	struct kv_error err = { 0 };

	ck_assert_int_eq(kv_recipe_scale_parse("published", &scale, NULL), KV_OK);
	ck_assert_int_eq(scale, KV_RECIPE_SCALE_PUBLISHED);
	ck_assert_str_eq(kv_recipe_scale_name(scale), "published");
	ck_assert_int_eq(kv_recipe_scale_parse("exact", &scale, NULL), KV_OK);
	ck_assert_str_eq(kv_recipe_scale_name(scale), "exact");
	ck_assert_int_eq(kv_recipe_scale_parse("", &scale, &err), KV_BAD_ARG);
	ck_assert_ptr_nonnull(strstr(err.msg, "exact, published"));
	ck_assert_int_eq(scale, KV_RECIPE_SCALE_EXACT);
}
END_TEST

/* The size of a row, what its bytes are, and the printed layout; parts add up. */
START_TEST(test_format_layout)
{
	static const struct {
		const char *format;
		uint32_t head_dim, group, row_bytes;
		struct kv_row_account account; /* payload, norms, scales, zeros, exact */
		const char *layout;
	} rows[] = {
		{ "f32", 128, 0, 512, { 0, 0, 0, 0, 512 }, "[numbers f32 x 128]" },
		{ "f16", 128, 0, 256, { 0, 0, 0, 0, 256 }, "[numbers f16 x 128]" },
		{ "bf16", 80, 0, 160, { 0, 0, 0, 0, 160 }, "[numbers bf16 x 80]" },
		{ "fp8", 128, 0, 132, { 128, 0, 4, 0, 0 }, "[e4m3 8 bit x 128][scale f32]" },
		{ "tq1", 128, 0, 20, { 16, 4, 0, 0, 0 }, "[indices 1 bit x 128][norm f32]" },
		{ "tq2", 128, 0, 36, { 32, 4, 0, 0, 0 }, "[indices 2 bit x 128][norm f32]" },
		{ "tq3", 128, 0, 52, { 48, 4, 0, 0, 0 }, "[indices 3 bit x 128][norm f32]" },
		{ "tq4", 128, 0, 68, { 64, 4, 0, 0, 0 }, "[indices 4 bit x 128][norm f32]" },
		{ "tq4", 16, 0, 12, { 8, 4, 0, 0, 0 }, "[indices 4 bit x 16][norm f32]" },
		{ "tq5", 128, 0, 84, { 80, 4, 0, 0, 0 }, "[indices 5 bit x 128][norm f32]" },
		{ "tq6", 128, 0, 100, { 96, 4, 0, 0, 0 }, "[indices 6 bit x 128][norm f32]" },
		{ "tq7", 80, 0, 74, { 70, 4, 0, 0, 0 }, "[indices 7 bit x 80][norm f32]" },
		{ "tq8", 128, 0, 132, { 128, 4, 0, 0, 0 }, "[indices 8 bit x 128][norm f32]" },
		{ "tqp2", 128, 0, 40, { 32, 8, 0, 0, 0 },
			"[indices 1 bit x 128][signs 1 bit x 128][norm f32][residual norm f32]" },
		{ "tqp3", 128, 0, 56, { 48, 8, 0, 0, 0 },
			"[indices 2 bit x 128][signs 1 bit x 128][norm f32][residual norm f32]" },
		{ "tqp4", 128, 0, 72, { 64, 8, 0, 0, 0 },
			"[indices 3 bit x 128][signs 1 bit x 128][norm f32][residual norm f32]" },
		{ "tqp5", 96, 0, 68, { 60, 8, 0, 0, 0 },
			"[indices 4 bit x 96][signs 1 bit x 96][norm f32][residual norm f32]" },
		{ "v2", 128, 0, 48, { 32, 0, 8, 8, 0 }, "[codes 2 bit x 128][scale f16 x 4][zero f16 x 4]" },
		{ "v3", 128, 0, 64, { 48, 0, 8, 8, 0 }, "[codes 3 bit x 128][scale f16 x 4][zero f16 x 4]" },
		{ "v4", 128, 0, 80, { 64, 0, 8, 8, 0 }, "[codes 4 bit x 128][scale f16 x 4][zero f16 x 4]" },
		{ "v8", 128, 0, 144, { 128, 0, 8, 8, 0 },
			"[codes 8 bit x 128][scale f16 x 4][zero f16 x 4]" },
		{ "v4", 80, 0, 60, { 48, 0, 6, 6, 0 }, "[codes 4 bit x 96][scale f16 x 3][zero f16 x 3]" },
		{ "v3", 64, 7, 67, { 27, 0, 20, 20, 0 },
			"[codes 3 bit x 70][scale f16 x 10][zero f16 x 10]" },
		{ "v8", 256, 1, 1280, { 256, 0, 512, 512, 0 },
			"[codes 8 bit x 256][scale f16 x 256][zero f16 x 256]" },
		{ "v2", 16, 16, 8, { 4, 0, 2, 2, 0 }, "[codes 2 bit x 16][scale f16][zero f16]" },
		{ "turboquant25", 128, 0, 44, { 36, 8, 0, 0, 0 },
			"[high indices 2 bit x 32][high signs 1 bit x 32][high norm f16][high residual norm "
			"f16]"
			"[low indices 1 bit x 96][low signs 1 bit x 96][low norm f16][low residual norm "
			"f16]" },
		{ "turboquant35", 128, 0, 64, { 56, 8, 0, 0, 0 },
			"[high indices 3 bit x 64][high signs 1 bit x 64][high norm f16][high residual norm "
			"f16]"
			"[low indices 2 bit x 64][low signs 1 bit x 64][low norm f16][low residual norm "
			"f16]" },
	};

	for (size_t i = 0; i < KV_LENGTH(rows); i++) {
		const struct kv_format_options options = { .group = rows[i].group };
		struct kv_test_codec made = kv_test_codec_make(rows[i].format, rows[i].head_dim, &options);
		const struct kv_row_account *account = &made.codec->account;
		char layout[KV_ROW_LAYOUT_MAX];

		ck_assert_uint_eq(made.codec->row_bytes, rows[i].row_bytes);
		ck_assert_mem_eq(account, &rows[i].account, sizeof(*account));
		ck_assert_uint_eq(account->payload_bytes + account->norms_bytes + account->scales_bytes +
				account->zeros_bytes + account->exact_bytes,
			rows[i].row_bytes);
		kv_row_codec_layout(made.codec, layout);
		ck_assert_str_eq(layout, rows[i].layout);
		kv_test_codec_drop(&made);
	}
	ck_assert_uint_eq(kv_row_dense_bytes(128), 256);
	kv_row_codec_destroy(NULL);
}
END_TEST

/* Every format at every dim has the size that its layout adds up to, and no part of it is forgotten. */
START_TEST(test_format_account_adds_up)
{
	for (uint32_t f = 0; f < kv_format_count(); f++) {
		for (uint32_t d = 16; d <= 256; d += 16) {
			if (!is_made_at(kv_format_at(f), d))
				continue;
			struct kv_test_codec made = make_at(kv_format_at(f), d);
			const struct kv_row_account *account = &made.codec->account;
			char layout[KV_ROW_LAYOUT_MAX];

			kv_row_codec_layout(made.codec, layout);
			ck_assert_uint_eq(account->payload_bytes + account->norms_bytes +
					account->scales_bytes + account->zeros_bytes + account->exact_bytes,
				made.codec->row_bytes);
			ck_assert_uint_le(made.codec->row_bytes, KV_ROW_BYTES_MAX);
			ck_assert_uint_le(made.codec->prepared_dim, KV_PREPARED_DIM_MAX);
			kv_test_codec_drop(&made);
		}
	}
}
END_TEST

/* What a codec keeps beside rows: codebooks, and rotations of its own; borrowed ones are not counted twice.
 */
START_TEST(test_format_memory_report)
{
	static const struct {
		const char *format;
		uint32_t head_dim, codebook_numbers, n_signs, n_matrices;
	} rows[] = {
		{ "f32", 128, 0, 0, 0 },
		{ "fp8", 128, 0, 0, 0 },
		{ "v4", 128, 0, 0, 0 },
		{ "tq4", 128, 16 + 15, 0, 0 },
		{ "tq8", 80, 256 + 255, 0, 0 },
		{ "tqp4", 128, 8 + 7, 1, 0 },
		{ "tqp4", 80, 8 + 7, 0, 1 },
		{ "turboquant35", 96, 8 + 7 + 4 + 3, 4, 0 },
	};

	for (size_t i = 0; i < KV_LENGTH(rows); i++) {
		struct kv_test_codec made = make_codec(rows[i].format, rows[i].head_dim);
		const struct kv_format_options options = { .like = made.codec };
		struct kv_row_codec *like = NULL;
		const uint64_t matrix_bytes = 2 * 4ull * rows[i].head_dim * rows[i].head_dim;

		ck_assert_uint_eq(made.codec->codebook_bytes, 4 * rows[i].codebook_numbers);
		ck_assert_uint_eq(made.codec->rotation_bytes,
			rows[i].n_signs * sizeof(struct kv_rotation) +
				rows[i].n_matrices * (sizeof(struct kv_rotation) + matrix_bytes));
		ck_assert_int_eq(kv_row_codec_create_with(made.codec->format, rows[i].head_dim, made.rotation,
					 &options, &like, NULL),
			KV_OK);
		ck_assert_uint_eq(like->codebook_bytes, 0);
		ck_assert_uint_eq(like->rotation_bytes, 0);
		ck_assert_uint_eq(like->row_bytes, made.codec->row_bytes);
		kv_row_codec_destroy(like);
		kv_test_codec_drop(&made);
	}
}
END_TEST

/* Whichever allocation of a codec fails, there is an error and the output is untouched. */
START_TEST(test_format_without_memory)
{
	static const char *const formats[] = { "tq4", "tqp3", "turboquant25" };

	for (size_t f = 0; f < KV_LENGTH(formats); f++) {
		struct kv_test_codec made = make_codec(formats[f], 112);
		struct kv_row_codec *codec = NULL;
		struct kv_error err = { 0 };
		int64_t n_failures = 0;

		for (;;) {
			kv_alloc_fail_after(n_failures);
			const enum kv_status status =
				kv_row_codec_create(made.codec->format, 112, made.rotation, &codec, &err);

			kv_alloc_fail_after(-1);
			if (status == KV_OK)
				break;
			ck_assert_int_eq(status, KV_NO_MEMORY);
			ck_assert_ptr_null(codec);
			n_failures++;
		}
		ck_assert_int_ge(n_failures, 2);
		kv_row_codec_destroy(codec);
		kv_test_codec_drop(&made);
	}
}
END_TEST

/* Using a codec takes no memory from the heap. */
START_TEST(test_format_uses_no_heap)
{
	for (uint32_t f = 0; f < kv_format_count(); f++) {
		struct kv_test_codec made = make_codec(kv_format_at(f)->name, 80);
		struct kv_row_scratch scratch;
		const uint64_t n_allocations = kv_alloc_count();
		float row[80] = { 1, 2, 3 };
		double expanded[KV_PREPARED_DIM_MAX], acc[KV_PREPARED_DIM_MAX] = { 0 };
		uint8_t encoded[KV_ROW_BYTES_MAX];

		ck_assert_int_eq(kv_row_codec_encode(made.codec, row, encoded, &scratch), KV_OK);
		kv_row_codec_decode(made.codec, encoded, row, &scratch);
		kv_row_codec_prepare_query(made.codec, row, expanded);
		kv_row_codec_expand(made.codec, encoded, expanded);
		kv_row_codec_accumulate(made.codec, 1, expanded, acc);
		kv_row_codec_finish_output(made.codec, acc, 1, row);
		ck_assert_int_eq(kv_row_codec_validate_packed(made.codec, encoded), KV_OK);
		ck_assert_uint_eq(kv_alloc_count(), n_allocations);
		kv_test_codec_drop(&made);
	}
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("format");
	TCase *tcase = tcase_create("all");

	tcase_set_timeout(tcase, 60);
	tcase_add_test(tcase, test_format_bf16_by_hand);
	tcase_add_test(tcase, test_format_fp8_by_hand);
	tcase_add_test(tcase, test_format_names);
	tcase_add_test(tcase, test_format_dims);
	tcase_add_test(tcase, test_format_options);
	tcase_add_test(tcase, test_format_recipe_scale_names);
	tcase_add_test(tcase, test_format_layout);
	tcase_add_test(tcase, test_format_account_adds_up);
	tcase_add_test(tcase, test_format_memory_report);
	tcase_add_test(tcase, test_format_without_memory);
	tcase_add_test(tcase, test_format_uses_no_heap);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
