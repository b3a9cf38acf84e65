/* vN: group-wise affine codes. Bytes by hand, the promised bound of every value, and the edges of a group. */
#include "core/format.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/checked.h"
#include "tests/lib/kv_codec.h"

static struct kv_test_codec make_codec(const char *name, uint32_t head_dim, uint32_t group)
{
	const struct kv_format_options options = { .group = group };

	return kv_test_codec_make(name, head_dim, &options);
}

/* Encodes and decodes; returns the status of encoding. */
static enum kv_status round_trip(
	const struct kv_row_codec *codec, const float *row, uint8_t *encoded, float *back)
{
	struct kv_row_scratch scratch;
	const enum kv_status status = kv_row_codec_encode(codec, row, encoded, &scratch);

	if (status == KV_OK)
		kv_row_codec_decode(codec, encoded, back, &scratch);
	return status;
}

/* Two groups of 16: one from 0 to 3 with ties, which go to even, and a constant one. */
START_TEST(test_format_vn_by_hand)
{
	struct kv_test_codec made = make_codec("v2", 32, 16);
	static const uint8_t expected[16] = { 0xE4, 0x28, 0x3D, 0x39, 0, 0, 0, 0, 0x00, 0x3C, 0x00, 0x00,
		0x00, 0x00, 0x00, 0xBC };
	static const float decoded[16] = { 0, 1, 2, 3, 0, 2, 2, 0, 1, 3, 3, 0, 1, 2, 3, 0 };
	float row[32] = { 0, 1, 2, 3, 0.5f, 1.5f, 2.5f, 0.49f, 0.51f, 3, 2.6f, 0.2f, 1.4f, 2, 2.9f, 0.1f };
	float back[32];
	uint8_t encoded[16];

	for (uint32_t i = 16; i < 32; i++)
		row[i] = -1;
	ck_assert_uint_eq(made.codec->row_bytes, 16);
	ck_assert_int_eq(round_trip(made.codec, row, encoded, back), KV_OK);
	ck_assert_mem_eq(encoded, expected, 16);
	ck_assert_mem_eq(back, decoded, sizeof(decoded));
	for (uint32_t i = 16; i < 32; i++)
		ck_assert(back[i] == -1);
	kv_test_codec_drop(&made);
}
END_TEST

/* Half a step, and what rounding scale and zero to float16 adds: 2^-11 of each, or half a subnormal unit. */
static void check_bound(
	const struct kv_row_codec *codec, uint32_t bits, uint32_t group, const float *row, const float *back)
{
	const double top = (double)((1u << bits) - 1);

	for (uint32_t first = 0; first < codec->head_dim; first += group) {
		const uint32_t left = codec->head_dim - first, end = first + (left < group ? left : group);
		double low = (double)row[first], high = low;

		for (uint32_t i = first; i < end; i++) {
			low = fmin(low, (double)row[i]);
			high = fmax(high, (double)row[i]);
		}
		const double scale = fmax((high - low) / top, 1e-12);
		const double bound = scale / 2 + top * fmax(scale * 0x1p-11, 0x1p-25) +
			fmax(fabs(low) * 0x1p-11, 0x1p-25) + 1e-6 * fmax(fabs(low), fabs(high));

		for (uint32_t i = first; i < end; i++)
			ck_assert_double_le(fabs((double)back[i] - (double)row[i]), bound);
	}
}

/* Every value lies within half a step plus float16 rounding, at any width, group and size of rows. */
START_TEST(test_format_vn_values_are_within_half_a_step)
{
	static const struct {
		const char *name;
		uint32_t bits;
	} widths[] = { { "v2", 2 }, { "v3", 3 }, { "v4", 4 }, { "v8", 8 } };
	static const uint32_t groups[] = { 32, 48, 20, 7, 1, 128 };
	static const double sizes[] = { 1e-20, 1e-7, 1e-5, 1e-2, 1, 50, 5000 };
	uint64_t state = 31;

	printf("seed 31\n");
	for (size_t w = 0; w < KV_LENGTH(widths); w++) {
		for (size_t g = 0; g < KV_LENGTH(groups); g++) {
			struct kv_test_codec made = make_codec(widths[w].name, 128, groups[g]);

			for (uint32_t n = 0; n < 400; n++) {
				uint8_t encoded[KV_ROW_BYTES_MAX];
				float row[128], back[128];
				const double size = sizes[n % KV_LENGTH(sizes)];
				const float offset = (float)(size * (n % 3) * 2);

				kv_test_normal(&state, 128, size, row);
				for (uint32_t i = 0; i < 128; i++)
					row[i] += offset;
				ck_assert_int_eq(round_trip(made.codec, row, encoded, back), KV_OK);
				check_bound(made.codec, widths[w].bits, groups[g], row, back);
			}
			kv_test_codec_drop(&made);
		}
	}
}
END_TEST

/* A constant group decodes to the float16 of its value, a minimum of -0 is stored as +0. */
START_TEST(test_format_vn_constant_groups)
{
	static const float values[] = { 0, -0.0f, 3.14159f, -65519, 65504, 1e-6f, -1e-9f };

	for (size_t k = 0; k < KV_LENGTH(values); k++) {
		struct kv_test_codec made = make_codec("v3", 64, 0);
		uint8_t encoded[KV_ROW_BYTES_MAX];
		float row[64], back[64];
		const float expected = kv_f16_to_f32(kv_f32_to_f16(values[k] + 0.0f));

		for (uint32_t i = 0; i < 64; i++)
			row[i] = values[k];
		ck_assert_int_eq(round_trip(made.codec, row, encoded, back), KV_OK);
		for (uint32_t i = 0; i < 64; i++)
			ck_assert(back[i] == expected);
		for (uint32_t i = 0; i < 24 + 4; i++) /* codes and scales */
			ck_assert_uint_eq(encoded[i], 0);
		if (values[k] == 0)
			ck_assert_uint_eq(kv_load_u16(encoded + 28), 0);
		kv_test_codec_drop(&made);
	}
}
END_TEST

/* Steps up to 2^-25 are stored as 0, the next float16 of them as the smallest subnormal. */
START_TEST(test_format_vn_smallest_steps)
{
	struct kv_test_codec made = make_codec("v2", 32, 0);
	uint8_t encoded[KV_ROW_BYTES_MAX];
	float row[32] = { 0 }, back[32];

	row[9] = 3 * 0x1p-25f;
	ck_assert_int_eq(round_trip(made.codec, row, encoded, back), KV_OK);
	ck_assert_uint_eq(kv_load_u16(encoded + 8), 0);
	ck_assert(back[9] == 0);
	ck_assert_uint_eq(encoded[9 / 4], 3u << 2 * (9 % 4)); /* the code knows the step as it was */
	row[9] = 3 * 0x1.000002p-25f;
	ck_assert_int_eq(round_trip(made.codec, row, encoded, back), KV_OK);
	ck_assert_uint_eq(kv_load_u16(encoded + 8), 1);
	ck_assert(back[9] == 3 * 0x1p-24f);
	kv_test_codec_drop(&made);
}
END_TEST

/* The last group of 80 channels has 16: its padding has code 0 and no say in minimum and maximum. */
START_TEST(test_format_vn_short_last_group)
{
	struct kv_test_codec made = make_codec("v4", 80, 0);
	uint8_t encoded[KV_ROW_BYTES_MAX];
	float row[80], back[80];

	for (uint32_t i = 0; i < 80; i++)
		row[i] = i < 64 ? -100 : 5 + (float)(i % 16);
	ck_assert_uint_eq(made.codec->segments[0].payload_bytes, 48);
	ck_assert_int_eq(round_trip(made.codec, row, encoded, back), KV_OK);
	for (uint32_t i = 64; i < 80; i++)
		ck_assert(back[i] == row[i]);
	ck_assert_uint_eq(encoded[32], 0x10); /* codes 0 and 1 */
	for (uint32_t i = 40; i < 48; i++)
		ck_assert_uint_eq(encoded[i], 0);
	ck_assert(kv_f16_to_f32(kv_load_u16(encoded + 48 + 4)) == 1); /* scale of group 2 */
	ck_assert(kv_f16_to_f32(kv_load_u16(encoded + 54 + 4)) == 5); /* its zero */
	encoded[40] = 1;                                              /* a padding code */
	ck_assert_int_eq(kv_row_codec_validate_packed(made.codec, encoded), KV_BAD_VALUE);
	kv_test_codec_drop(&made);
}
END_TEST

/* A group whose range, step or zero is too large is refused, whichever it is, and nothing is written. */
START_TEST(test_format_vn_refusals)
{
	static const float rows[][2] = { { -3e38f, 3e38f }, { -65520, 0 }, { 0, 3 * 65520.0f },
		{ 65520, 65520 } };
	struct kv_test_codec made = make_codec("v2", 80, 0);

	for (uint32_t g = 0; g < 3; g++) {
		for (size_t k = 0; k < KV_LENGTH(rows); k++) {
			uint8_t encoded[KV_ROW_BYTES_MAX];
			float row[80] = { 0 }, back[80];

			memset(encoded, 0xEE, sizeof(encoded));
			for (uint32_t i = 32 * g; i < 32 * g + 16; i++)
				row[i] = rows[k][i % 2];
			if (k == 3) { /* a large zero and no range */
				for (uint32_t i = 32 * g; i < 80 && i < 32 * g + 32; i++)
					row[i] = rows[k][0];
			}
			ck_assert_int_eq(round_trip(made.codec, row, encoded, back), KV_BAD_VALUE);
			for (uint32_t i = 0; i < sizeof(encoded); i++)
				ck_assert_uint_eq(encoded[i], 0xEE);
		}
	}
	kv_test_codec_drop(&made);
}
END_TEST

/* A group larger than the row is refused; one as large as the row, or of one channel, is not. */
START_TEST(test_format_vn_group_sizes)
{
	const struct kv_format *format = NULL;
	struct kv_format_options options = { .group = 81 };
	struct kv_error err = { 0 };

	ck_assert_int_eq(kv_format_parse("v4", &format, NULL), KV_OK);
	ck_assert_int_eq(kv_format_check_with(format, 80, &options, &err), KV_BAD_ARG);
	ck_assert_ptr_nonnull(strstr(err.msg, "group of 81"));
	options.group = UINT32_MAX;
	ck_assert_int_eq(kv_format_check_with(format, 80, &options, &err), KV_BAD_ARG);
	options.group = 80;
	ck_assert_int_eq(kv_format_check_with(format, 80, &options, &err), KV_OK);
	options.group = 1;
	ck_assert_int_eq(kv_format_check_with(format, 80, &options, &err), KV_OK);
	ck_assert_int_eq(kv_format_check(format, 16, &err), KV_BAD_ARG); /* the default is 32 */
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("format_vn");
	TCase *tcase = tcase_create("all");

	tcase_set_timeout(tcase, 60);
	tcase_add_test(tcase, test_format_vn_by_hand);
	tcase_add_test(tcase, test_format_vn_values_are_within_half_a_step);
	tcase_add_test(tcase, test_format_vn_constant_groups);
	tcase_add_test(tcase, test_format_vn_smallest_steps);
	tcase_add_test(tcase, test_format_vn_short_last_group);
	tcase_add_test(tcase, test_format_vn_refusals);
	tcase_add_test(tcase, test_format_vn_group_sizes);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
