/*
 * Row codecs at work, in every format: what happens to rows of any kind, to packed rows from outside, and
 * that attention sees what decoding gives.
 */
#include "core/format.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/checked.h"
#include "tests/lib/kv_codec.h"

static const uint32_t some_dims[] = { 16, 64, 80, 112, 128, 256 };

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

/* ||a - b||^2 / ||b||^2 */
static double relative_sq_error(uint32_t n, const float *a, const float *b)
{
	return kv_test_sq_distance(n, a, b) / kv_test_product(n, b, b);
}

/* Squared error that a format may have on any row of finite size, relative: about twice that on Gaussian
 * rows. */
static double error_bound(const struct kv_row_codec *codec)
{
	static const double tq[9] = { 1, 0.37, 0.12, 0.035, 0.0096, 0.0026, 6.6e-4, 1.7e-4, 4.3e-5 };
	const char *name = codec->format->name;

	if (strncmp(name, "tqp", 3) == 0)
		return 2.5 * 0.58 * tq[codec->format->bits - 1];
	if (strncmp(name, "tq", 2) == 0)
		return 2.5 * tq[codec->format->bits];
	if (name[0] == 't')
		return 2.5 * 0.58 * 0.37;
	if (name[0] == 'v')
		return 0.25; /* at 2 bits the step is a third of a range of 4 sigma */
	return strcmp(name, "fp8") == 0 ? 2e-3 : 0x1p-16; /* bf16: half a unit is 2^-9 */
}

/*
 * Rows of any scale keep their relative error: norms are taken out first. A huge channel does no harm, nor
 * does a row below the smallest norm or step, which is as good as zero.
 */
START_TEST(test_format_rows_keeps_any_norm)
{
	static const double scales[] = { 1e-30, 1e-3, 1, 50, 6e2, 1e30 };
	uint64_t state = 5;

	printf("seed 5\n");
	for (uint32_t f = 0; f < kv_format_count(); f++) {
		struct kv_test_codec made = make_codec(kv_format_at(f)->name, 128);
		const char *name = kv_format_at(f)->name;
		const bool is_bounded = name[0] == 'v' || strcmp(name, "f16") == 0 || strlen(name) == 12;
		const bool has_smallest = strcmp(name, "f32") != 0 && strcmp(name, "bf16") != 0;
		struct kv_row_scratch scratch;
		uint8_t encoded[KV_ROW_BYTES_MAX];
		float row[128], back[128];

		for (size_t k = 0; k < 2 * KV_LENGTH(scales); k++) {
			const double scale = scales[k / 2];

			kv_test_normal(&state, 128, scale, row);
			if (k % 2)
				row[17] = (float)(100 * scale);
			const enum kv_status status = kv_row_codec_encode(made.codec, row, encoded, &scratch);

			ck_assert_int_eq(status, is_bounded && scale > 1e4 ? KV_BAD_VALUE : KV_OK);
			if (status != KV_OK)
				continue;
			kv_row_codec_decode(made.codec, encoded, back, &scratch);
			if (has_smallest && scale < 1e-20)
				ck_assert_float_le(fabsf(back[17]), 1e-12f);
			else
				ck_assert_msg(relative_sq_error(128, back, row) <= error_bound(made.codec),
					"%s %g: %g", name, scale, relative_sq_error(128, back, row));
		}
		kv_test_codec_drop(&made);
	}
}
END_TEST

/* A zero row decodes to at most 1e-12, whatever the signs of its zeros. */
START_TEST(test_format_rows_zero_row)
{
	for (uint32_t f = 0; f < kv_format_count(); f++) {
		for (size_t k = 0; k < KV_LENGTH(some_dims); k++) {
			if (!is_made_at(kv_format_at(f), some_dims[k]))
				continue;
			struct kv_test_codec made = make_at(kv_format_at(f), some_dims[k]);
			struct kv_row_scratch scratch;
			uint8_t encoded[KV_ROW_BYTES_MAX];
			float row[KV_HEAD_DIM_MAX] = { 0 }, back[KV_HEAD_DIM_MAX];

			row[3] = -0.0f;
			ck_assert_int_eq(kv_row_codec_encode(made.codec, row, encoded, &scratch), KV_OK);
			kv_row_codec_decode(made.codec, encoded, back, &scratch);
			for (uint32_t i = 0; i < some_dims[k]; i++)
				ck_assert_float_le(fabsf(back[i]), 1e-12f);
			kv_test_codec_drop(&made);
		}
	}
}
END_TEST

/* NaN or infinity at any place is BAD_VALUE, nothing is written, and the next row is not harmed. */
START_TEST(test_format_rows_refuses_rows_that_are_not_finite)
{
	static const uint32_t bad[] = { 0x7FC00000, 0xFFC00001, 0x7F800000, 0xFF800000, 0x7F800001 };
	uint64_t state = 6;

	printf("seed 6\n");
	for (uint32_t f = 0; f < kv_format_count(); f++) {
		struct kv_test_codec made = make_codec(kv_format_at(f)->name, 64);
		struct kv_row_scratch scratch;
		uint8_t expected[KV_ROW_BYTES_MAX], encoded[KV_ROW_BYTES_MAX];
		float row[64];

		kv_test_normal(&state, 64, 1, row);
		ck_assert_int_eq(kv_row_codec_encode(made.codec, row, expected, &scratch), KV_OK);
		for (uint32_t i = 0; i < 64; i++) {
			const float good = row[i];

			memset(encoded, 0xEE, sizeof(encoded));
			row[i] = kv_f32_from_bits(bad[i % KV_LENGTH(bad)]);
			ck_assert_int_eq(
				kv_row_codec_encode(made.codec, row, encoded, &scratch), KV_BAD_VALUE);
			for (uint32_t k = 0; k < KV_ROW_BYTES_MAX; k++)
				ck_assert_uint_eq(encoded[k], 0xEE);
			row[i] = good;
		}
		ck_assert_int_eq(kv_row_codec_encode(made.codec, row, encoded, &scratch), KV_OK);
		ck_assert_mem_eq(encoded, expected, made.codec->row_bytes);
		kv_test_codec_drop(&made);
	}
}
END_TEST

/* Finite rows that a format cannot hold are refused at the exact limit; f32 and fp8 take every finite row. */
START_TEST(test_format_rows_refuses_overflow)
{
	static const struct {
		const char *format;
		uint32_t n_large, bits; /* row of 32: n_large values of this bit pattern, then zeros */
		enum kv_status status;
	} rows[] = {
		{ "f32", 32, 0x7F7FFFFF, KV_OK },
		{ "fp8", 32, 0xFF7FFFFF, KV_OK },
		{ "f16", 32, 0x477FEFFF, KV_OK },
		{ "f16", 1, 0x477FF000, KV_BAD_VALUE }, /* 65520 */
		{ "f16", 1, 0xC77FF000, KV_BAD_VALUE },
		{ "bf16", 32, 0x7F7F7FFF, KV_OK },
		{ "bf16", 1, 0x7F7F8000, KV_BAD_VALUE },
		{ "bf16", 1, 0xFF7FFFFF, KV_BAD_VALUE },
		{ "tq4", 1, 0x7F7FFFFF, KV_OK },
		{ "tq4", 4, 0x7EFFFFFF, KV_OK },        /* length 2 * 2^126.99 */
		{ "tq4", 4, 0x7F000000, KV_BAD_VALUE }, /* length 2 * 2^127 */
		{ "tq4", 32, 0x7F7FFFFF, KV_BAD_VALUE },
		{ "tqp4", 4, 0x7E7FFFFF, KV_OK },
		{ "tqp4", 4, 0x7F000000, KV_BAD_VALUE },
		{ "v4", 1, 0x477FEFFF, KV_OK },
		{ "v4", 1, 0xC77FEFFF, KV_OK },
		{ "v4", 1, 0xC77FF000, KV_BAD_VALUE }, /* the zero point */
		{ "v4", 1, 0x496FF0FF, KV_OK },        /* 15 * 65520 - 1/16: the scale is below 65520 */
		{ "v4", 1, 0x496FF100, KV_BAD_VALUE },
		{ "v8", 1, 0x7F7FFFFF, KV_BAD_VALUE },
		{ "turboquant35", 1, 0x477FEFFF, KV_OK },
		{ "turboquant35", 1, 0x477FF000, KV_BAD_VALUE },
		{ "turboquant35", 4, 0x46FFEFFF, KV_OK },
		{ "turboquant35", 4, 0x46FFF000, KV_BAD_VALUE },
		{ "turboquant35", 16, 0x7F7FFFFF, KV_BAD_VALUE },
	};

	for (size_t i = 0; i < KV_LENGTH(rows); i++) {
		struct kv_test_codec made = make_codec(rows[i].format, 32);
		struct kv_row_scratch scratch;
		uint8_t encoded[KV_ROW_BYTES_MAX], untouched[KV_ROW_BYTES_MAX];
		float row[32] = { 0 };

		memset(encoded, 0xEE, sizeof(encoded));
		memset(untouched, 0xEE, sizeof(untouched));
		/* at the end, so that a recipe meets it in its second group */
		for (uint32_t k = 0; k < rows[i].n_large; k++)
			row[31 - k] = kv_f32_from_bits(rows[i].bits);
		ck_assert_msg(kv_row_codec_encode(made.codec, row, encoded, &scratch) == rows[i].status,
			"case %zu", i);
		if (rows[i].status != KV_OK)
			ck_assert_mem_eq(encoded, untouched, sizeof(encoded));
		kv_test_codec_drop(&made);
	}
}
END_TEST

/* ---- packed rows from outside ---- */

/* A field or number that is not finite, or a negative norm, is refused; any other bytes are a row. */
START_TEST(test_format_rows_validate_packed)
{
	static const struct {
		const char *format;
		uint32_t offset; /* of four bytes to replace in a row of zeros, d = 16 */
		uint8_t bytes[4];
		enum kv_status status;
	} rows[] = {
		{ "f32", 60, { 0, 0, 0x80, 0x7F }, KV_BAD_VALUE },
		{ "f32", 0, { 1, 0, 0x80, 0xFF }, KV_BAD_VALUE },
		{ "f32", 0, { 0xFF, 0xFF, 0x7F, 0xFF }, KV_OK },
		{ "bf16", 28, { 0, 0, 0x80, 0x7F }, KV_BAD_VALUE },
		{ "bf16", 0, { 0xC0, 0xFF, 0, 0 }, KV_BAD_VALUE },
		{ "bf16", 0, { 0x7F, 0xFF, 0x7F, 0x7F }, KV_OK },
		{ "tq4", 0, { 0xFF, 0xFF, 0xFF, 0xFF }, KV_OK },
		{ "tq4", 8, { 0, 0, 0xC0, 0x7F }, KV_BAD_VALUE },
		{ "tq4", 8, { 0, 0, 0x80, 0x7F }, KV_BAD_VALUE },
		{ "tq4", 8, { 0, 0, 0x80, 0xBF }, KV_BAD_VALUE },
		{ "tq4", 8, { 1, 0, 0, 0x80 }, KV_BAD_VALUE },
		{ "tq4", 8, { 0, 0, 0, 0 }, KV_OK },
		{ "tq4", 8, { 0xFF, 0xFF, 0x7F, 0x7F }, KV_OK },
		{ "f16", 28, { 0, 0, 0, 0x7C }, KV_BAD_VALUE },
		{ "f16", 0, { 1, 0xFC, 0, 0 }, KV_BAD_VALUE },
		{ "f16", 0, { 0xFF, 0x7B, 0xFF, 0xFB }, KV_OK },
		{ "fp8", 0, { 0x7E, 0xFE, 0x80, 0 }, KV_OK },
		{ "fp8", 4, { 0, 0x7F, 0, 0 }, KV_BAD_VALUE },
		{ "fp8", 12, { 0, 0, 0, 0xFF }, KV_BAD_VALUE },
		{ "fp8", 16, { 0, 0, 0x80, 0xBF }, KV_BAD_VALUE },
		{ "fp8", 16, { 0, 0, 0xC0, 0x7F }, KV_BAD_VALUE },
		{ "tqp3", 0, { 0xFF, 0xFF, 0xFF, 0xFF }, KV_OK },
		{ "tqp3", 6, { 0, 0, 0x80, 0x7F }, KV_BAD_VALUE },
		{ "tqp3", 10, { 0, 0, 0x80, 0x7F }, KV_BAD_VALUE },
		{ "tqp3", 10, { 0, 0, 0x80, 0xBF }, KV_BAD_VALUE },
	};

	for (size_t i = 0; i < KV_LENGTH(rows); i++) {
		struct kv_test_codec made = make_codec(rows[i].format, 16);
		uint8_t row[64] = { 0 };

		memcpy(row + rows[i].offset, rows[i].bytes, 4);
		ck_assert_msg(kv_row_codec_validate_packed(made.codec, row) == rows[i].status, "case %zu", i);
		kv_test_codec_drop(&made);
	}
}
END_TEST

/* In every format, each field is looked at: NaN and a negative norm or scale are refused, a zero may be
 * negative. */
START_TEST(test_format_rows_validate_packed_looks_at_every_field)
{
	static const uint8_t nan_f32[4] = { 0, 0, 0xC0, 0x7F }, minus_f32[4] = { 0, 0, 0x80, 0xBF };
	static const uint8_t nan_f16[2] = { 0, 0x7E }, minus_f16[2] = { 0, 0xBC };

	for (uint32_t f = 0; f < kv_format_count(); f++) {
		struct kv_test_codec made = make_codec(kv_format_at(f)->name, 80);
		uint8_t row[KV_ROW_BYTES_MAX];

		memset(row, 0, sizeof(row));
		ck_assert_int_eq(kv_row_codec_validate_packed(made.codec, row), KV_OK);
		for (uint32_t k = 0; k < made.codec->n_fields; k++) {
			const struct kv_field *field = &made.codec->fields[k];
			const bool is_f32 = field->number == KV_DTYPE_F32;
			const uint32_t n_bytes = kv_dtype_bytes(field->number);

			for (uint32_t i = 0; i < field->count; i++) {
				uint8_t *at = row + field->offset + i * n_bytes;

				memcpy(at, is_f32 ? nan_f32 : nan_f16, n_bytes);
				ck_assert_int_eq(kv_row_codec_validate_packed(made.codec, row), KV_BAD_VALUE);
				memcpy(at, is_f32 ? minus_f32 : minus_f16, n_bytes);
				ck_assert_int_eq(kv_row_codec_validate_packed(made.codec, row),
					field->kind == KV_FIELD_ZERO ? KV_OK : KV_BAD_VALUE);
				memset(at, 0, n_bytes);
			}
		}
		kv_test_codec_drop(&made);
	}
}
END_TEST

/* Any bytes at all can be decoded and expanded without harm. */
START_TEST(test_format_rows_any_bytes_are_safe)
{
	uint64_t state = 15;

	printf("seed 15\n");
	for (uint32_t f = 0; f < kv_format_count(); f++) {
		struct kv_test_codec made = make_codec(kv_format_at(f)->name, 112);
		struct kv_row_scratch scratch;
		uint8_t row[KV_ROW_BYTES_MAX];
		float back[KV_HEAD_DIM_MAX];
		double expanded[KV_PREPARED_DIM_MAX];

		for (uint32_t n = 0; n < 200; n++) {
			for (uint32_t i = 0; i < KV_ROW_BYTES_MAX; i++)
				row[i] = (uint8_t)(kv_test_random(&state) >> 56);
			(void)!kv_row_codec_validate_packed(made.codec, row);
			kv_row_codec_decode(made.codec, row, back, &scratch);
			kv_row_codec_expand(made.codec, row, expanded);
		}
		kv_test_codec_drop(&made);
	}
}
END_TEST

/* ---- what attention uses ---- */

/* Scores and weighted sums, taken in the rows' own basis, equal those over decoded rows. */
START_TEST(test_format_rows_score_and_accumulate_follow_decode)
{
	uint64_t state = 8;

	printf("seed 8\n");
	for (uint32_t f = 0; f < kv_format_count(); f++) {
		for (size_t k = 0; k < KV_LENGTH(some_dims); k++) {
			const uint32_t d = some_dims[k];

			if (!is_made_at(kv_format_at(f), d))
				continue;
			struct kv_test_codec made = make_at(kv_format_at(f), d);
			struct kv_row_scratch scratch;
			uint8_t encoded[KV_ROW_BYTES_MAX];
			float row[KV_HEAD_DIM_MAX], back[KV_HEAD_DIM_MAX], q[KV_HEAD_DIM_MAX],
				out[KV_HEAD_DIM_MAX];
			double prepared[KV_PREPARED_DIM_MAX], expanded[KV_PREPARED_DIM_MAX],
				acc[KV_PREPARED_DIM_MAX] = { 0 };
			double sum[KV_HEAD_DIM_MAX] = { 0 };

			kv_test_normal(&state, d, 1, q);
			kv_row_codec_prepare_query(made.codec, q, prepared);
			for (uint32_t t = 0; t < 9; t++) {
				double expected = 0;
				const double weight = 0.25 * (t + 1);

				kv_test_normal(&state, d, 10, row);
				ck_assert_int_eq(
					kv_row_codec_encode(made.codec, row, encoded, &scratch), KV_OK);
				kv_row_codec_decode(made.codec, encoded, back, &scratch);
				for (uint32_t i = 0; i < d; i++) {
					expected += (double)q[i] * (double)back[i];
					sum[i] += weight * (double)back[i];
				}
				kv_row_codec_expand(made.codec, encoded, expanded);
				ck_assert_double_eq_tol(kv_row_codec_score(made.codec, prepared, expanded),
					expected, 1e-6 * 10 * d);
				kv_row_codec_accumulate(made.codec, weight, expanded, acc);
			}
			kv_row_codec_finish_output(made.codec, acc, 0.125, out);
			for (uint32_t i = 0; i < d; i++)
				ck_assert_double_eq_tol((double)out[i], 0.125 * sum[i], 1e-6 * 100);
			kv_test_codec_drop(&made);
		}
	}
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("format_rows");
	TCase *tcase = tcase_create("all");

	tcase_set_timeout(tcase, 60);
	tcase_add_test(tcase, test_format_rows_keeps_any_norm);
	tcase_add_test(tcase, test_format_rows_zero_row);
	tcase_add_test(tcase, test_format_rows_refuses_rows_that_are_not_finite);
	tcase_add_test(tcase, test_format_rows_refuses_overflow);
	tcase_add_test(tcase, test_format_rows_validate_packed);
	tcase_add_test(tcase, test_format_rows_validate_packed_looks_at_every_field);
	tcase_add_test(tcase, test_format_rows_any_bytes_are_safe);
	tcase_add_test(tcase, test_format_rows_score_and_accumulate_follow_decode);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
