/*
 * Fuzz target: bytes as a packed row, and as numbers to be encoded, in every format that the build knows.
 *
 * Input: format, head dimension, then a row. Any bytes may be decoded. Bytes that the check of packed rows
 * accepts mean something: attention sees in them what decoding gives. Bytes as float32: what is refused
 * writes nothing, what is stored passes the check and does not depend on old scratch memory.
 */
#include <math.h>

#include "core/checked.h"
#include "core/format.h"
#include "tests/fuzz/fuzz.h"

#define FORMATS_MAX 64u

static const uint32_t dims[] = { 16, 64, 80, 128, 256 };

/* Made once, when a format and dim is first asked for. */
struct made {
	bool is_tried;
	struct kv_rotation *rotation;
	struct kv_row_codec *codec; /* NULL: there is none at this dim */
};
static struct made all_made[FORMATS_MAX][KV_LENGTH(dims)];

static void make(struct made *made, const struct kv_format *format, uint32_t head_dim)
{
	const struct kv_format_options options = {
		.group = kv_format_takes(format) & KV_OPTION_GROUP ? 16 : 0,
	};
	const struct kv_rotation *rotation = NULL;

	made->is_tried = true;
	if (kv_format_check_with(format, head_dim, &options, NULL) != KV_OK)
		return;
	if (kv_format_is_rotated(format)) {
		FUZZ_CHECK(kv_rotation_create(kv_rotation_kind_default(head_dim), head_dim,
				   KV_ROTATION_SEED_BASE, &made->rotation, NULL) == KV_OK);
		rotation = made->rotation;
	}
	FUZZ_CHECK(
		kv_row_codec_create_with(format, head_dim, rotation, &options, &made->codec, NULL) == KV_OK);
}

static const struct kv_row_codec *pick_codec(struct fuzz_input *input)
{
	const uint32_t n_formats = kv_format_count() < FORMATS_MAX ? kv_format_count() : FORMATS_MAX;
	const uint32_t format_idx = fuzz_u8(input) % n_formats;
	const uint32_t dim_idx = fuzz_u8(input) % KV_LENGTH(dims);
	struct made *made = &all_made[format_idx][dim_idx];

	if (!made->is_tried)
		make(made, kv_format_at(format_idx), dims[dim_idx]);
	return made->codec;
}

static double norm(uint32_t n, const float *values)
{
	double sum = 0;

	for (uint32_t i = 0; i < n; i++)
		sum += (double)values[i] * (double)values[i];
	return sqrt(sum);
}

/* Scores and weighted sums of a row are those of its decoded values. */
static void check_attention(const struct kv_row_codec *codec, const uint8_t *row, const float *decoded)
{
	double prepared[KV_PREPARED_DIM_MAX], expanded[KV_PREPARED_DIM_MAX], acc[KV_PREPARED_DIM_MAX] = { 0 };
	double wanted = 0;
	float q[KV_HEAD_DIM_MAX], out[KV_HEAD_DIM_MAX];
	double size = 0; /* of what is added up, which may cancel out */

	for (uint32_t i = 0; i < codec->head_dim; i++) {
		q[i] = (float)((int)(i * 37 % 17) - 8) / 8.0f;
		wanted += (double)q[i] * (double)decoded[i];
	}
	kv_row_codec_prepare_query(codec, q, prepared);
	kv_row_codec_expand(codec, row, expanded);
	for (uint32_t i = 0; i < codec->prepared_dim; i++)
		size += expanded[i] * expanded[i];
	size = sqrt(size) + norm(codec->head_dim, decoded);
	if (!(size < 1e18))
		return; /* sums of float32 may overflow */
	const double score = kv_row_codec_score(codec, prepared, expanded);
	const double bound = 1e-4 * size * (1 + norm(codec->head_dim, q)) + 1e-30;

	FUZZ_CHECK(fabs(score - wanted) <= bound);
	kv_row_codec_accumulate(codec, 2, expanded, acc);
	kv_row_codec_finish_output(codec, acc, 0.5, out);
	for (uint32_t i = 0; i < codec->head_dim; i++)
		FUZZ_CHECK(fabs((double)out[i] - (double)decoded[i]) <= bound);
}

/* Returns whether the row can be stored. */
static bool check_encode(const struct kv_row_codec *codec, const float *values)
{
	struct kv_row_scratch *scratch = fuzz_alloc(sizeof(*scratch));
	uint8_t *row = fuzz_alloc(codec->row_bytes), *again = fuzz_alloc(codec->row_bytes);

	memset(scratch, 0x55, sizeof(*scratch));
	memset(row, 0xA5, codec->row_bytes);
	memset(again, 0xA5, codec->row_bytes);
	const enum kv_status status = kv_row_codec_encode(codec, values, row, scratch);

	FUZZ_CHECK(status == KV_OK || status == KV_BAD_VALUE);
	FUZZ_CHECK(status == KV_BAD_VALUE || kv_rows_are_finite(values, codec->head_dim));
	if (status == KV_OK) {
		FUZZ_CHECK(kv_row_codec_validate_packed(codec, row) == KV_OK);
		memset(scratch, 0xFF, sizeof(*scratch));
		FUZZ_CHECK(kv_row_codec_encode(codec, values, again, scratch) == KV_OK);
	}
	/* Refused: not a byte was written. */
	FUZZ_CHECK(memcmp(row, again, codec->row_bytes) == 0);
	free(scratch);
	free(row);
	free(again);
	return status == KV_OK;
}

static void check_row(const struct kv_row_codec *codec, const uint8_t *row)
{
	struct kv_row_scratch *scratch = fuzz_alloc(sizeof(*scratch));
	float *decoded = fuzz_alloc(codec->head_dim * sizeof(*decoded));
	const enum kv_status status = kv_row_codec_validate_packed(codec, row);

	FUZZ_CHECK(status == KV_OK || status == KV_BAD_VALUE);
	memset(scratch, 0x55, sizeof(*scratch));
	kv_row_codec_decode(codec, row, decoded, scratch);
	if (status == KV_OK && kv_rows_are_finite(decoded, codec->head_dim)) {
		check_attention(codec, row, decoded);
		check_encode(codec, decoded);
	}
	free(scratch);
	free(decoded);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
	struct fuzz_input input = { data, n_bytes };
	const struct kv_row_codec *codec = pick_codec(&input);
	struct fuzz_input same = input;

	if (!codec)
		return 0;
	uint8_t *row = fuzz_alloc(codec->row_bytes);
	float *values = fuzz_alloc(codec->head_dim * sizeof(*values));

	fuzz_bytes(&input, row, codec->row_bytes);
	check_row(codec, row);
	fuzz_bytes(&same, values, codec->head_dim * sizeof(*values));
	check_encode(codec, values);
	free(values);
	free(row);
	return 0;
}
