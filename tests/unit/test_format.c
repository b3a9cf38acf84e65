/*
 * Row formats. Bytes are compared without tolerance with vectors from tests/golden/reference.py, an
 * implementation of its own.
 */
#include "core/format.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/checked.h"
#include "core/memory.h"
#include "tests/lib/kv_golden.h"
#include "tests/lib/kv_test.h"

struct made {
	struct kv_rotation *rotation;
	struct kv_row_codec *codec;
};

static struct made make_codec(const char *name, uint32_t head_dim)
{
	const struct kv_format *format = NULL;
	struct made made = { 0 };
	struct kv_error err = { 0 };

	ck_assert_msg(kv_format_parse(name, &format, &err) == KV_OK, "%s", err.msg);
	if (kv_format_is_rotated(format))
		ck_assert_int_eq(
			kv_rotation_create(KV_ROTATION_RHT, head_dim, 42, &made.rotation, &err), KV_OK);
	ck_assert_msg(kv_row_codec_create(format, head_dim, made.rotation, &made.codec, &err) == KV_OK, "%s",
		err.msg);
	return made;
}

static void drop_codec(struct made *made)
{
	kv_row_codec_destroy(made->codec);
	kv_rotation_destroy(made->rotation);
}

/* Near enough to normal numbers. */
static void fill_normal(uint64_t *state, uint32_t n, float scale, float *row)
{
	for (uint32_t i = 0; i < n; i++) {
		double sum = -6;

		for (uint32_t k = 0; k < 12; k++)
			sum += (double)(kv_test_random(state) >> 11) * 0x1p-53;
		row[i] = (float)(sum * (double)scale);
	}
}

/* ||a - b||^2 / ||b||^2 */
static double relative_sq_error(uint32_t n, const float *a, const float *b)
{
	double error = 0, size = 0;

	for (uint32_t i = 0; i < n; i++) {
		error += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
		size += (double)b[i] * (double)b[i];
	}
	return error / size;
}

/* ---- golden bytes ---- */

static const uint32_t golden_dims[] = { 16, 64, 128, 256 };
static const char *const golden_formats[] = { "f32", "bf16", "tq4" };

static void compare_golden(const char *format, uint32_t d)
{
	struct made made = make_codec(format, d);
	const struct kv_row_codec *codec = made.codec;
	struct kv_row_scratch scratch;
	size_t n_input_bytes, n_row_bytes, n_decoded_bytes = 0;
	char name[64];
	uint8_t *decoded = NULL;
	uint8_t encoded[KV_ROW_BYTES_MAX];
	float row[KV_HEAD_DIM_MAX], back[KV_HEAD_DIM_MAX];

	snprintf(name, sizeof(name), "rows/inputs_d%u.f32", d);
	uint8_t *inputs = kv_golden_read(name, &n_input_bytes);

	/* the rows of f32 are the inputs */
	if (strcmp(format, "f32") != 0)
		snprintf(name, sizeof(name), "rows/%s_d%u.rows", format, d);
	uint8_t *rows = kv_golden_read(name, &n_row_bytes);

	if (strncmp(format, "tq", 2) == 0) {
		snprintf(name, sizeof(name), "rows/%s_d%u.decoded", format, d);
		decoded = kv_golden_read(name, &n_decoded_bytes);
		ck_assert_uint_eq(n_decoded_bytes, n_input_bytes);
	}

	const size_t n_rows = n_input_bytes / (4 * d);

	ck_assert_uint_ge(n_rows, 20);
	ck_assert_uint_eq(n_row_bytes, n_rows * codec->row_bytes);
	for (size_t r = 0; r < n_rows; r++) {
		const uint8_t *expected = rows + r * codec->row_bytes;

		kv_rows_load_f32(KV_DTYPE_F32, inputs + r * 4 * d, d, row);
		ck_assert_int_eq(kv_row_codec_encode(codec, row, encoded, &scratch), KV_OK);
		ck_assert_msg(memcmp(encoded, expected, codec->row_bytes) == 0, "%s d %u row %zu differs",
			format, d, r);
		ck_assert_int_eq(kv_row_codec_validate_packed(codec, expected), KV_OK);
		kv_row_codec_decode(codec, expected, back, &scratch);
		if (decoded)
			ck_assert_msg(memcmp(back, decoded + r * 4 * d, 4 * (size_t)d) == 0,
				"%s d %u row %zu decodes differently", format, d, r);
	}
	free(inputs);
	free(rows);
	free(decoded);
	drop_codec(&made);
}

/* Encoded rows of every kind equal the reference byte for byte, and decoded ones bit for bit. */
START_TEST(test_format_golden)
{
	for (size_t f = 0; f < KV_LENGTH(golden_formats); f++) {
		for (size_t k = 0; k < KV_LENGTH(golden_dims); k++)
			compare_golden(golden_formats[f], golden_dims[k]);
	}
}
END_TEST

/* A bf16 row worked out by hand: sign of zero kept, ties to even, subnormals kept. */
START_TEST(test_format_bf16_by_hand)
{
	struct made made = make_codec("bf16", 16);
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
	drop_codec(&made);
}
END_TEST

/* ---- names, dims, layout ---- */

/* Every listed format is found by its name; an unknown name gives an error that lists the known ones. */
START_TEST(test_format_names)
{
	const struct kv_format *format = NULL;
	struct kv_error err = { 0 };
	static const char *const unknown[] = { "", "tq", "tq9", "TQ4", "tq4 ", "f32\n" };

	for (uint32_t i = 0; i < kv_format_count(); i++) {
		ck_assert_int_eq(kv_format_parse(kv_format_at(i)->name, &format, NULL), KV_OK);
		ck_assert_ptr_eq(format, kv_format_at(i));
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

/* Dims are 16 to 256 in steps of 16; a rotated format says so when it cannot serve one of them. */
START_TEST(test_format_dims)
{
	for (uint32_t f = 0; f < kv_format_count(); f++) {
		const struct kv_format *format = kv_format_at(f);
		struct kv_error err;

		for (uint32_t d = 0; d <= 300; d++) {
			const bool is_dim = d >= 16 && d <= 256 && d % 16 == 0;
			const bool is_power = (d & (d - 1)) == 0;
			const enum kv_status status = kv_format_check(format, d, &err);

			if (!is_dim)
				ck_assert_int_eq(status, KV_BAD_ARG);
			else if (kv_format_is_rotated(format) && !is_power)
				ck_assert_int_eq(status, KV_UNSUPPORTED);
			else
				ck_assert_int_eq(status, KV_OK);
			if (status == KV_UNSUPPORTED) {
				ck_assert_ptr_nonnull(strstr(err.msg, format->name));
				ck_assert_ptr_nonnull(strstr(err.msg, "16, 32, 64, 128, 256"));
			}
		}
	}
}
END_TEST

/* The size of a row, what its bytes are, and the printed layout. */
START_TEST(test_format_layout)
{
	static const struct {
		const char *format, *layout;
		uint32_t head_dim, row_bytes, payload_bytes, norms_bytes, exact_bytes;
	} rows[] = {
		{ "f32", "[numbers f32 x 128]", 128, 512, 0, 0, 512 },
		{ "bf16", "[numbers bf16 x 80]", 80, 160, 0, 0, 160 },
		{ "tq4", "[indices 4 bit x 128][norm f32]", 128, 68, 64, 4, 0 },
		{ "tq4", "[indices 4 bit x 16][norm f32]", 16, 12, 8, 4, 0 },
		{ "f32", "[numbers f32 x 256]", 256, 1024, 0, 0, 1024 },
	};

	for (size_t i = 0; i < KV_LENGTH(rows); i++) {
		struct made made = make_codec(rows[i].format, rows[i].head_dim);
		char layout[KV_ROW_LAYOUT_MAX];

		ck_assert_uint_eq(made.codec->row_bytes, rows[i].row_bytes);
		ck_assert_uint_eq(made.codec->account.payload_bytes, rows[i].payload_bytes);
		ck_assert_uint_eq(made.codec->account.norms_bytes, rows[i].norms_bytes);
		ck_assert_uint_eq(made.codec->account.scales_bytes, 0);
		ck_assert_uint_eq(made.codec->account.zeros_bytes, 0);
		ck_assert_uint_eq(made.codec->account.exact_bytes, rows[i].exact_bytes);
		ck_assert_uint_eq(made.codec->codebook_bytes, made.rotation ? 4 * (16 + 15) : 0);
		ck_assert(kv_row_codec_has_one_basis(made.codec));
		kv_row_codec_layout(made.codec, layout);
		ck_assert_str_eq(layout, rows[i].layout);
		drop_codec(&made);
	}
	ck_assert_uint_eq(kv_row_dense_bytes(128), 256);
	kv_row_codec_destroy(NULL);
}
END_TEST

/* Without memory there is an error, and the output is untouched; using a codec takes no memory. */
START_TEST(test_format_and_memory)
{
	struct made made = make_codec("tq4", 64);
	struct kv_row_codec *codec = NULL;
	struct kv_row_scratch scratch;
	struct kv_error err = { 0 };
	const uint64_t n_allocations = kv_alloc_count();
	float row[64] = { 1, 2, 3 };
	double expanded[KV_PREPARED_DIM_MAX];
	uint8_t encoded[KV_ROW_BYTES_MAX];

	ck_assert_int_eq(kv_row_codec_encode(made.codec, row, encoded, &scratch), KV_OK);
	kv_row_codec_decode(made.codec, encoded, row, &scratch);
	kv_row_codec_expand(made.codec, encoded, expanded);
	ck_assert_int_eq(kv_row_codec_validate_packed(made.codec, encoded), KV_OK);
	ck_assert_uint_eq(kv_alloc_count(), n_allocations);

	kv_alloc_fail_after(0);
	ck_assert_int_eq(
		kv_row_codec_create(made.codec->format, 64, made.rotation, &codec, &err), KV_NO_MEMORY);
	ck_assert_ptr_null(codec);
	kv_alloc_fail_after(-1);
	drop_codec(&made);
}
END_TEST

/* ---- values ---- */

/* The squared error of tq4 on Gaussian rows is the codebook's within 2 percent. */
START_TEST(test_format_tq4_error_is_theory)
{
	uint64_t state = 20240601;

	printf("seed 20240601\n");
	for (size_t k = 0; k < KV_LENGTH(golden_dims); k++) {
		const uint32_t d = golden_dims[k];
		struct made made = make_codec("tq4", d);
		struct kv_row_scratch scratch;
		uint8_t encoded[KV_ROW_BYTES_MAX];
		float row[KV_HEAD_DIM_MAX], back[KV_HEAD_DIM_MAX];
		const uint32_t n_rows = 10000;
		double sum = 0;

		for (uint32_t r = 0; r < n_rows; r++) {
			fill_normal(&state, d, 1, row);
			ck_assert_int_eq(kv_row_codec_encode(made.codec, row, encoded, &scratch), KV_OK);
			kv_row_codec_decode(made.codec, encoded, back, &scratch);
			sum += relative_sq_error(d, back, row);
		}
		ck_assert_double_eq_tol(sum / n_rows / (d * kvcb_find(d, 4)->mse_per_coord), 1, 0.02);
		drop_codec(&made);
	}
}
END_TEST

/* Rows of any scale keep their relative error: norms are taken out first. A huge channel does no harm. */
START_TEST(test_format_keeps_any_norm)
{
	static const float scales[] = { 1e-30f, 1e-6f, 1, 50, 6e4f, 1e30f };
	uint64_t state = 5;

	printf("seed 5\n");
	for (uint32_t f = 0; f < kv_format_count(); f++) {
		struct made made = make_codec(kv_format_at(f)->name, 128);
		struct kv_row_scratch scratch;
		uint8_t encoded[KV_ROW_BYTES_MAX];
		float row[128], back[128];
		const double bound = made.rotation ? 2 * 0.009315 : 0x1p-16; /* bf16: half a unit is 2^-9 */

		for (size_t k = 0; k < 2 * KV_LENGTH(scales); k++) {
			fill_normal(&state, 128, scales[k / 2], row);
			if (k % 2)
				row[17] = 1000 * scales[k / 2];
			ck_assert_int_eq(kv_row_codec_encode(made.codec, row, encoded, &scratch), KV_OK);
			kv_row_codec_decode(made.codec, encoded, back, &scratch);
			/* below the smallest norm a rotated row is as good as zero */
			if (made.rotation && scales[k / 2] < 1e-20f)
				ck_assert_float_le(fabsf(back[17]), 1e-12f);
			else
				ck_assert_double_le(relative_sq_error(128, back, row), bound);
		}
		drop_codec(&made);
	}
}
END_TEST

/* A zero row decodes to at most 1e-12, whatever the signs of its zeros. */
START_TEST(test_format_zero_row)
{
	for (uint32_t f = 0; f < kv_format_count(); f++) {
		for (size_t k = 0; k < KV_LENGTH(golden_dims); k++) {
			struct made made = make_codec(kv_format_at(f)->name, golden_dims[k]);
			struct kv_row_scratch scratch;
			uint8_t encoded[KV_ROW_BYTES_MAX];
			float row[KV_HEAD_DIM_MAX] = { 0 }, back[KV_HEAD_DIM_MAX];

			row[3] = -0.0f;
			ck_assert_int_eq(kv_row_codec_encode(made.codec, row, encoded, &scratch), KV_OK);
			kv_row_codec_decode(made.codec, encoded, back, &scratch);
			for (uint32_t i = 0; i < golden_dims[k]; i++)
				ck_assert_float_le(fabsf(back[i]), 1e-12f);
			drop_codec(&made);
		}
	}
}
END_TEST

/* NaN or infinity at any place is BAD_VALUE, nothing is written, and the next row is not harmed. */
START_TEST(test_format_refuses_rows_that_are_not_finite)
{
	static const uint32_t bad[] = { 0x7FC00000, 0xFFC00001, 0x7F800000, 0xFF800000, 0x7F800001 };
	uint64_t state = 6;

	printf("seed 6\n");
	for (uint32_t f = 0; f < kv_format_count(); f++) {
		struct made made = make_codec(kv_format_at(f)->name, 64);
		struct kv_row_scratch scratch;
		uint8_t expected[KV_ROW_BYTES_MAX], encoded[KV_ROW_BYTES_MAX];
		float row[64];

		fill_normal(&state, 64, 1, row);
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
		drop_codec(&made);
	}
}
END_TEST

/* Finite rows that a format cannot hold are refused at the exact limit; f32 takes every finite row. */
START_TEST(test_format_refuses_overflow)
{
	static const struct {
		const char *format;
		uint32_t n_large, bits; /* row: n_large values of this bit pattern, then zeros */
		enum kv_status status;
	} rows[] = {
		{ "f32", 16, 0x7F7FFFFF, KV_OK },
		{ "bf16", 16, 0x7F7F7FFF, KV_OK },
		{ "bf16", 1, 0x7F7F8000, KV_BAD_VALUE },
		{ "bf16", 1, 0xFF7FFFFF, KV_BAD_VALUE },
		{ "tq4", 1, 0x7F7FFFFF, KV_OK },
		{ "tq4", 4, 0x7EFFFFFF, KV_OK },        /* length 2 * 2^126.99 */
		{ "tq4", 4, 0x7F000000, KV_BAD_VALUE }, /* length 2 * 2^127 */
		{ "tq4", 16, 0x7F7FFFFF, KV_BAD_VALUE },
	};

	for (size_t i = 0; i < KV_LENGTH(rows); i++) {
		struct made made = make_codec(rows[i].format, 16);
		struct kv_row_scratch scratch;
		uint8_t encoded[64];
		float row[16] = { 0 };

		for (uint32_t k = 0; k < rows[i].n_large; k++)
			row[k] = kv_f32_from_bits(rows[i].bits);
		ck_assert_msg(kv_row_codec_encode(made.codec, row, encoded, &scratch) == rows[i].status,
			"case %zu", i);
		drop_codec(&made);
	}
}
END_TEST

/* ---- packed rows from outside ---- */

/* A field or number that is not finite, or a negative norm, is refused; any other bytes are a row. */
START_TEST(test_format_validate_packed)
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
	};

	for (size_t i = 0; i < KV_LENGTH(rows); i++) {
		struct made made = make_codec(rows[i].format, 16);
		uint8_t row[64] = { 0 };

		memcpy(row + rows[i].offset, rows[i].bytes, 4);
		ck_assert_msg(kv_row_codec_validate_packed(made.codec, row) == rows[i].status, "case %zu", i);
		drop_codec(&made);
	}
}
END_TEST

/* ---- what attention uses ---- */

/* Scores and weighted sums, taken in the rows' own basis, equal those over decoded rows. */
START_TEST(test_format_score_and_accumulate_follow_decode)
{
	uint64_t state = 8;

	printf("seed 8\n");
	for (uint32_t f = 0; f < kv_format_count(); f++) {
		for (size_t k = 0; k < KV_LENGTH(golden_dims); k++) {
			const uint32_t d = golden_dims[k];
			struct made made = make_codec(kv_format_at(f)->name, d);
			struct kv_row_scratch scratch;
			uint8_t encoded[KV_ROW_BYTES_MAX];
			float row[KV_HEAD_DIM_MAX], back[KV_HEAD_DIM_MAX], q[KV_HEAD_DIM_MAX],
				out[KV_HEAD_DIM_MAX];
			double prepared[KV_PREPARED_DIM_MAX], expanded[KV_PREPARED_DIM_MAX],
				acc[KV_PREPARED_DIM_MAX] = { 0 };
			double sum[KV_HEAD_DIM_MAX] = { 0 };

			fill_normal(&state, d, 1, q);
			kv_row_codec_prepare_query(made.codec, q, prepared);
			for (uint32_t t = 0; t < 9; t++) {
				double expected = 0;
				const double weight = 0.25 * (t + 1);

				fill_normal(&state, d, 10, row);
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
			drop_codec(&made);
		}
	}
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("format");
	TCase *tcase = tcase_create("all");

	tcase_set_timeout(tcase, 60);
	tcase_add_test(tcase, test_format_golden);
	tcase_add_test(tcase, test_format_bf16_by_hand);
	tcase_add_test(tcase, test_format_names);
	tcase_add_test(tcase, test_format_dims);
	tcase_add_test(tcase, test_format_layout);
	tcase_add_test(tcase, test_format_and_memory);
	tcase_add_test(tcase, test_format_tq4_error_is_theory);
	tcase_add_test(tcase, test_format_keeps_any_norm);
	tcase_add_test(tcase, test_format_zero_row);
	tcase_add_test(tcase, test_format_refuses_rows_that_are_not_finite);
	tcase_add_test(tcase, test_format_refuses_overflow);
	tcase_add_test(tcase, test_format_validate_packed);
	tcase_add_test(tcase, test_format_score_and_accumulate_follow_decode);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
