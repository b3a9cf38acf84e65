/*
 * Format families: a family made here, with every kind of part that a row may have, exercises the walks that
 * are written once for all families.
 */
#include "core/format_family.h"

#include <string.h>

#include "core/checked.h"
#include "tests/lib/kv_test.h"

static const uint16_t low_channels[10] = { 0, 1, 2, 4, 6, 8, 9, 11, 13, 15 };
static const uint16_t high_channels[6] = { 3, 5, 7, 10, 12, 14 };
static const float affine_table[8] = { 0, 1, 2, 3, 4, 5, 6, 7 };
static const float sign_table[2] = { -1, 1 };
static const float sign_factors[16] = { 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2 };
static const struct kv_rotation *sign_rotation; /* set by the test */

static enum kv_status parts_lay_out(
	struct kv_row_codec *codec, const struct kv_format_options *options, struct kv_error *err)
{
	const struct kv_segment affine = { .name = "codes",
		.n_channels = 10,
		.channels = low_channels,
		.code = KV_CODE_TABLE,
		.bits = 3,
		.n_codes = 12,
		.table = affine_table,
		.has_scale = true,
		.scale_field = 0,
		.has_zero = true,
		.zero_field = 1,
		.group_channels = 4,
		.has_outer = true,
		.outer_field = 3 };
	const struct kv_segment numbers = { .name = "numbers",
		.n_channels = 6,
		.channels = high_channels,
		.code = KV_CODE_NUMBER,
		.number = KV_DTYPE_F16,
		.has_outer = true,
		.outer_field = 3 };
	const struct kv_segment signs = { .name = "signs",
		.n_channels = 16,
		.rotation = sign_rotation,
		.is_added = true,
		.code = KV_CODE_TABLE,
		.bits = 1,
		.table = sign_table,
		.factors = sign_factors,
		.has_scale = true,
		.scale_field = 2,
		.has_outer = true,
		.outer_field = 3 };

	(void)options;
	(void)err;

	kv_row_codec_add_segment(codec, &affine);
	kv_row_codec_add_field(codec, "scale", KV_FIELD_SCALE, KV_DTYPE_F16, 3);
	kv_row_codec_add_field(codec, "zero", KV_FIELD_ZERO, KV_DTYPE_F16, 3);
	kv_row_codec_add_segment(codec, &numbers);
	kv_row_codec_add_segment(codec, &signs);
	kv_row_codec_add_field(codec, "norm", KV_FIELD_NORM, KV_DTYPE_F32, 1);
	kv_row_codec_add_field(codec, "outer norm", KV_FIELD_NORM, KV_DTYPE_F16, 1);
	return KV_OK;
}

static const struct kv_format_family parts_family = { .lay_out = parts_lay_out };
static const struct kv_format parts_format = { .name = "parts", .family = &parts_family };

/* Codes 0..7 0 1 and two of padding, scales 0.5 1 2, zeros -1 0 1, numbers 1 to 6, signs, norms 3 0.5. */
static const uint8_t parts_row[] = { 0x88, 0xC6, 0xFA, 0x08, 0x00, /* 12 codes of 3 bits are 4.5 bytes */
	0x00, 0x38, 0x00, 0x3C, 0x00, 0x40, 0x00, 0xBC, 0x00, 0x00, 0x00, 0x3C, 0x00, 0x3C, 0x00, 0x40, 0x00,
	0x42, 0x00, 0x44, 0x00, 0x45, 0x00, 0x46, 0x0F, 0xA5, 0x00, 0x00, 0x40, 0x40, 0x00, 0x38 };

/* What every part of the row stands for, worked out by hand except the rotation of the signs. */
static void parts_expected(float *row)
{
	static const float low[10] = { -1, -0.5f, 0, 0.5f, 4, 5, 6, 7, 1, 3 };
	float signs[16];

	for (uint32_t i = 0; i < 16; i++)
		signs[i] = 0xA50F >> i & 1 ? 1.0f : -1.0f;
	kv_rotation_backward(sign_rotation, signs, signs);
	for (uint32_t i = 0; i < 10; i++)
		row[low_channels[i]] = low[i];
	for (uint32_t i = 0; i < 6; i++)
		row[high_channels[i]] = (float)(i + 1);
	for (uint32_t i = 0; i < 16; i++)
		row[i] = (row[i] + signs[i] * 3 * 2) * 0.5f;
}

/* Channel lists, groups with a short last one, zeros, padding codes, two scales and added parts all count. */
START_TEST(test_format_family_walks_every_part)
{
	struct kv_rotation *rotation = NULL;
	struct kv_row_codec *codec = NULL;
	struct kv_row_scratch scratch;
	char layout[KV_ROW_LAYOUT_MAX];
	float expected[16], decoded[16], q[16], out[16];
	double prepared[KV_PREPARED_DIM_MAX], expanded[KV_PREPARED_DIM_MAX], acc[KV_PREPARED_DIM_MAX] = { 0 },
									     score = 0;

	ck_assert_int_eq(kv_rotation_create(KV_ROTATION_RHT, 16, 9, &rotation, NULL), KV_OK);
	sign_rotation = rotation;
	ck_assert_int_eq(kv_row_codec_create(&parts_format, 16, NULL, &codec, NULL), KV_OK);
	ck_assert_uint_eq(codec->row_bytes, sizeof(parts_row));
	ck_assert_uint_eq(codec->account.payload_bytes, 5 + 2);
	ck_assert_uint_eq(codec->account.scales_bytes, 6);
	ck_assert_uint_eq(codec->account.zeros_bytes, 6);
	ck_assert_uint_eq(codec->account.norms_bytes, 6);
	ck_assert_uint_eq(codec->account.exact_bytes, 12);
	kv_row_codec_layout(codec, layout);
	ck_assert_str_eq(layout,
		"[codes 3 bit x 12][scale f16 x 3][zero f16 x 3][numbers f16 x 6][signs 1 bit x 16]"
		"[norm f32][outer norm f16]");

	parts_expected(expected);
	kv_row_codec_decode(codec, parts_row, decoded, &scratch);
	for (uint32_t i = 0; i < 16; i++) {
		ck_assert(decoded[i] == expected[i]);
		q[i] = (float)i - 5;
		score += (double)q[i] * (double)expected[i];
	}
	kv_row_codec_prepare_query(codec, q, prepared);
	kv_row_codec_expand(codec, parts_row, expanded);
	ck_assert_double_eq_tol(kv_row_codec_score(codec, prepared, expanded), score, 1e-4);
	kv_row_codec_accumulate(codec, 0.5, expanded, acc);
	kv_row_codec_accumulate(codec, 1.5, expanded, acc);
	kv_row_codec_finish_output(codec, acc, 0.5, out);
	for (uint32_t i = 0; i < 16; i++)
		ck_assert_float_eq_tol(out[i], expected[i], 1e-6f);
	kv_row_codec_destroy(codec);
	kv_rotation_destroy(rotation);
}
END_TEST

/* Trailing bits, padding codes, and each field are checked; a negative zero point is allowed. */
START_TEST(test_format_family_validates_every_part)
{
	static const struct {
		uint32_t byte_idx;
		uint8_t value;
		enum kv_status status;
	} rows[] = {
		{ 0, 0x88, KV_OK }, { 3, 0x48, KV_BAD_VALUE },          /* a padding code */
		{ 4, 0x10, KV_BAD_VALUE },                              /* beyond the last code */
		{ 6, 0xB8, KV_BAD_VALUE },                              /* negative scale */
		{ 10, 0x7C, KV_BAD_VALUE },                             /* infinite scale */
		{ 14, 0xC0, KV_OK },                                    /* zero of -2 */
		{ 14, 0xFC, KV_BAD_VALUE }, { 18, 0x7E, KV_BAD_VALUE }, /* a number */
		{ 34, 0xC0, KV_BAD_VALUE },                             /* negative norm */
		{ 36, 0xB8, KV_BAD_VALUE },                             /* negative outer norm */
	};
	struct kv_rotation *rotation = NULL;
	struct kv_row_codec *codec = NULL;

	ck_assert_int_eq(kv_rotation_create(KV_ROTATION_RHT, 16, 9, &rotation, NULL), KV_OK);
	sign_rotation = rotation;
	ck_assert_int_eq(kv_row_codec_create(&parts_format, 16, NULL, &codec, NULL), KV_OK);
	for (size_t i = 0; i < KV_LENGTH(rows); i++) {
		uint8_t row[sizeof(parts_row)];

		memcpy(row, parts_row, sizeof(row));
		row[rows[i].byte_idx] = rows[i].value;
		ck_assert_msg(kv_row_codec_validate_packed(codec, row) == rows[i].status, "case %zu", i);
	}
	kv_row_codec_destroy(codec);
	kv_rotation_destroy(rotation);
}
END_TEST

/* The length is the float32 root of a float64 sum: no overflow of squares, and short rows are padded. */
START_TEST(test_format_family_row_length)
{
	const float large[3] = { 3e30f, 4e30f, 0 }, small[5] = { 0, 0, 0, 3e-30f, -4e-30f };

	ck_assert(kv_row_length(large, 3) == 5e30f);
	ck_assert(kv_row_length(small, 5) == 5e-30f);
	ck_assert(kv_row_length(small, 1) == 0);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("format_family");
	TCase *tcase = tcase_create("all");

	tcase_add_test(tcase, test_format_family_walks_every_part);
	tcase_add_test(tcase, test_format_family_validates_every_part);
	tcase_add_test(tcase, test_format_family_row_length);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
