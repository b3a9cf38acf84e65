/*
 * Golden rows: bytes are compared without tolerance with those of tests/golden/reference.py, an
 * implementation of its own. Its head says what the files are.
 */
#include "core/format.h"

#include <stdio.h>
#include <string.h>

#include "core/recipe.h"
#include "tests/lib/kv_codec.h"
#include "tests/lib/kv_golden.h"

#define CASE_LINE_MAX 2048

/* One line of cases.txt. */
struct golden_case {
	uint32_t d, group, norm_correction, row_bytes, n_high;
	char format[32], rotation[8], channels[1024], refused[256], hash2[32];
	uint64_t hash;
	uint16_t high_channels[KV_HEAD_DIM_MAX];
};

/* All inputs and encoded rows of one dim, and how far the cases have come. */
struct golden_dim {
	uint32_t d;
	uint8_t *inputs, *encoded;
	size_t input_bytes, encoded_bytes, used_bytes;
};

static bool read_case(FILE *file, struct golden_case *row)
{
	char line[CASE_LINE_MAX];
	char *end = row->channels;
	unsigned long long hash = 0;

	if (!fgets(line, sizeof(line), file))
		return false;
	ck_assert_ptr_nonnull(strchr(line, '\n'));
	ck_assert_int_eq(sscanf(line, "%u %31s %7s %u %u %1023s %u %255s %llx %31s", &row->d, row->format,
				 row->rotation, &row->group, &row->norm_correction, row->channels,
				 &row->row_bytes, row->refused, &hash, row->hash2),
		10);
	row->hash = hash;
	row->n_high = 0;
	while (*end >= '0' && *end <= '9' && row->n_high < KV_HEAD_DIM_MAX) {
		row->high_channels[row->n_high++] = (uint16_t)strtoul(end, &end, 10);
		end += *end == ',';
	}
	return true;
}

static struct kv_test_codec make_codec(const struct golden_case *row, enum kv_recipe_scale scale)
{
	const struct kv_format_options options = { .norm_correction = row->norm_correction != 0,
		.group = row->group,
		.recipe_scale = scale,
		.high_channels = row->n_high ? row->high_channels : NULL,
		.n_high_channels = row->n_high };
	enum kv_rotation_kind kind = KV_ROTATION_NONE;

	if (strcmp(row->rotation, "-") != 0)
		ck_assert_int_eq(kv_rotation_kind_parse(row->rotation, &kind, NULL), KV_OK);
	return kv_test_codec_make_rotated(row->format, row->d, kind, &options);
}

static void open_dim(struct golden_dim *dim, uint32_t d)
{
	char name[64];

	free(dim->inputs);
	free(dim->encoded);
	*dim = (struct golden_dim){ .d = d };
	snprintf(name, sizeof(name), "rows/inputs_d%u.f32", d);
	dim->inputs = kv_golden_read(name, &dim->input_bytes);
	snprintf(name, sizeof(name), "rows/encoded_d%u.rows", d);
	dim->encoded = kv_golden_read(name, &dim->encoded_bytes);
}

static void close_dim(struct golden_dim *dim)
{
	ck_assert_uint_eq(dim->used_bytes, dim->encoded_bytes);
	free(dim->inputs);
	free(dim->encoded);
	*dim = (struct golden_dim){ 0 };
}

/* Encodes every input of the dim as the case says; returns the hash of what the golden rows decode to. */
static uint64_t compare_rows(
	const struct golden_case *row, const struct kv_row_codec *codec, struct golden_dim *dim)
{
	const size_t n_rows = dim->input_bytes / (4 * dim->d);
	uint64_t hash = KV_TEST_FNV_START;
	uint8_t expected[KV_ROW_BYTES_MAX], encoded[KV_ROW_BYTES_MAX];
	float input[KV_HEAD_DIM_MAX], decoded[KV_HEAD_DIM_MAX];
	struct kv_row_scratch scratch;

	ck_assert_uint_ge(n_rows, 40);
	ck_assert_uint_eq(strlen(row->refused), n_rows);
	ck_assert_uint_eq(codec->row_bytes, row->row_bytes);
	for (size_t r = 0; r < n_rows; r++) {
		const bool is_refused = row->refused[r] == 'R';

		memcpy(input, dim->inputs + r * 4 * dim->d, 4 * (size_t)dim->d);
		memset(encoded, 0xEE, sizeof(encoded));
		const enum kv_status status = kv_row_codec_encode(codec, input, encoded, &scratch);

		ck_assert_msg(status == (is_refused ? KV_BAD_VALUE : KV_OK), "%s d %u row %zu: status %d",
			row->format, row->d, r, (int)status);
		if (is_refused)
			continue;
		if (strcmp(row->format, "f32") == 0) {
			memcpy(expected, input, row->row_bytes);
		} else {
			ck_assert_uint_le(dim->used_bytes + row->row_bytes, dim->encoded_bytes);
			memcpy(expected, dim->encoded + dim->used_bytes, row->row_bytes);
			dim->used_bytes += row->row_bytes;
		}
		for (uint32_t i = 0; i < row->row_bytes; i++)
			ck_assert_msg(encoded[i] == expected[i],
				"%s d %u group %u row %zu byte %u: %02x not %02x", row->format, row->d,
				row->group, r, i, encoded[i], expected[i]);
		ck_assert_uint_eq(encoded[row->row_bytes], 0xEE);
		ck_assert_int_eq(kv_row_codec_validate_packed(codec, expected), KV_OK);
		kv_row_codec_decode(codec, expected, decoded, &scratch);
		hash = kv_test_fnv(hash, decoded, 4 * (size_t)dim->d);
	}
	return hash;
}

/* What the rows of a recipe decode to with the published scale. */
static uint64_t published_hash(const struct golden_case *row, const uint8_t *encoded, size_t n_bytes)
{
	struct kv_test_codec made = make_codec(row, KV_RECIPE_SCALE_PUBLISHED);
	struct kv_row_scratch scratch;
	float decoded[KV_HEAD_DIM_MAX];
	uint64_t hash = KV_TEST_FNV_START;

	for (size_t at = 0; at < n_bytes; at += row->row_bytes) {
		kv_row_codec_decode(made.codec, encoded + at, decoded, &scratch);
		hash = kv_test_fnv(hash, decoded, 4 * (size_t)row->d);
	}
	kv_test_codec_drop(&made);
	return hash;
}

/*
 * Every format and option, dims with and without a power of two: encoded rows equal the reference byte for
 * byte, the same rows are refused, and what is decoded has the same bits.
 */
START_TEST(test_format_golden_bytes)
{
	char path[1024];
	struct golden_dim dim = { 0 };
	static struct golden_case row;
	uint32_t n_cases = 0;

	kv_golden_path("rows/cases.txt", path, sizeof(path));
	FILE *file = fopen(path, "r");

	ck_assert_msg(file != NULL, "cannot open %s", path);
	while (read_case(file, &row)) {
		if (row.d != dim.d) {
			if (dim.inputs)
				close_dim(&dim);
			open_dim(&dim, row.d);
		}
		const size_t first = dim.used_bytes;
		struct kv_test_codec made = make_codec(&row, KV_RECIPE_SCALE_EXACT);
		const uint64_t hash = compare_rows(&row, made.codec, &dim);

		ck_assert_msg(hash == row.hash, "%s d %u group %u decodes differently", row.format, row.d,
			row.group);
		if (strcmp(row.hash2, "-") != 0)
			ck_assert_msg(published_hash(&row, dim.encoded + first, dim.used_bytes - first) ==
					strtoull(row.hash2, NULL, 16),
				"%s d %u decodes differently with the published scale", row.format, row.d);
		kv_test_codec_drop(&made);
		n_cases++;
	}
	close_dim(&dim);
	fclose(file);
	ck_assert_uint_ge(n_cases, 200);
}
END_TEST

/* The golden cases leave no format out, at each of the dims that it is made for. */
START_TEST(test_format_golden_is_complete)
{
	static const uint32_t dims[] = { 64, 80, 96, 128, 192, 256 };
	static struct golden_case row;
	static bool is_seen[64][6];
	char path[1024];

	ck_assert_uint_le(kv_format_count(), 64);
	kv_golden_path("rows/cases.txt", path, sizeof(path));
	FILE *file = fopen(path, "r");

	ck_assert_ptr_nonnull(file);
	while (read_case(file, &row)) {
		for (uint32_t f = 0; f < kv_format_count(); f++) {
			for (size_t k = 0; k < 6; k++)
				is_seen[f][k] |=
					dims[k] == row.d && strcmp(kv_format_at(f)->name, row.format) == 0;
		}
	}
	fclose(file);
	for (uint32_t f = 0; f < kv_format_count(); f++) {
		for (size_t k = 0; k < 6; k++)
			ck_assert_msg(is_seen[f][k], "%s d %u", kv_format_at(f)->name, dims[k]);
	}
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("format_golden");
	TCase *tcase = tcase_create("all");

	tcase_set_timeout(tcase, 60);
	tcase_add_test(tcase, test_format_golden_bytes);
	tcase_add_test(tcase, test_format_golden_is_complete);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
