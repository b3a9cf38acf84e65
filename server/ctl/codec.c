#include "server/ctl/codec.h"

#include <ctype.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/checked.h"
#include "core/codebook_file.h"
#include "core/memory.h"
#include "core/recipe.h"
#include "server/ctl/table.h"

/* 256 numbers of three digits with blanks and commas take 2 KiB; people may align them. */
#define CHANNELS_FILE_BYTES_MAX (64u << 10)

/* What core says about an option is about the command line here. */
static enum kv_status usage_of(enum kv_status status)
{
	return status == KV_BAD_ARG ? SRV_CTL_USAGE : status;
}

enum kv_status srv_codec_head_dim(const struct srv_arg_value *value, uint32_t *head_dim, struct kv_error *err)
{
	if (!value->is_given)
		return kv_fail(err, SRV_CTL_USAGE, "--head-dim is missing");
	if (value->number % KV_HEAD_DIM_STEP != 0)
		return kv_fail(err, SRV_CTL_USAGE, "--head-dim: %u is not a multiple of %u from %u to %u",
			(unsigned)value->number, KV_HEAD_DIM_STEP, KV_HEAD_DIM_MIN, KV_HEAD_DIM_MAX);
	*head_dim = (uint32_t)value->number;
	return KV_OK;
}

/* ---- files ---- */

/* head_dim rows of head_dim numbers, all of them finite. kv_free() the result. */
static enum kv_status read_matrix(const char *path, uint32_t head_dim, float **out, struct kv_error *err)
{
	const size_t n_values = (size_t)head_dim * head_dim;
	size_t n_bytes = 0;
	char *bytes;
	enum kv_status status = srv_file_read(path, n_values * sizeof(float), &bytes, &n_bytes, err);

	if (status != KV_OK)
		return status;
	if (n_bytes != n_values * sizeof(float)) {
		kv_free(bytes);
		return kv_fail(err, KV_CORRUPT, "%s: %zu bytes, a matrix of %u rows of %u float32 has %zu",
			path, n_bytes, head_dim, head_dim, n_values * sizeof(float));
	}
	for (size_t i = 0; i < n_values; i++) {
		const float value = kv_load_f32((const uint8_t *)bytes + 4 * i);

		if (kv_f32_is_finite(value))
			continue;
		status = kv_fail(err, KV_BAD_VALUE, "%s: row %zu, column %zu (offset %zu) is %g", path,
			i / head_dim, i % head_dim, 4 * i, (double)value);
		kv_free(bytes);
		return status;
	}
	*out = (float *)(void *)bytes;
	return KV_OK;
}

static enum kv_status make_given(enum kv_rotation_kind kind, const char *path, uint32_t head_dim,
	uint64_t seed, struct kv_rotation **rotation, struct kv_error *err)
{
	float *matrix = NULL;
	enum kv_status status = read_matrix(path, head_dim, &matrix, err);

	if (status != KV_OK)
		return status;
	status = kv_rotation_create_from_matrix(kind, head_dim, seed, matrix, rotation, err);
	if (status != KV_OK)
		kv_error_wrap(err, "%s", path);
	kv_free(matrix);
	return status;
}

enum kv_status srv_codec_make_rotation(const char *text, uint32_t head_dim, uint64_t seed,
	struct kv_rotation **rotation, const char **path, struct kv_error *err)
{
	enum kv_rotation_kind kind = KV_ROTATION_NONE;
	enum kv_status status = KV_OK;

	if (text && strncmp(text, "file:", 5) == 0) {
		*path = text + 5;
		return make_given(KV_ROTATION_FILE, text + 5, head_dim, seed, rotation, err);
	}
	if (!text)
		kind = kv_rotation_kind_default(head_dim);
	else if (strcmp(text, "block") == 0)
		kind = KV_ROTATION_BLOCK;
	else if (strcmp(text, "file") == 0)
		return kv_fail(err, SRV_CTL_USAGE, "--rotation: 'file' needs a path: file:MATRIX.f32");
	else
		status = kv_rotation_kind_parse(text, &kind, err);
	if (status == KV_OK)
		status = kv_rotation_create(kind, head_dim, seed, rotation, err);
	if (status == KV_BAD_ARG)
		kv_error_wrap(err, "--rotation");
	return usage_of(status);
}

/* Decimal numbers with blanks and commas between them; brackets around them are allowed, as JSON has them. */
static enum kv_status read_channels(const char *path, uint16_t channels[static KV_HEAD_DIM_MAX],
	uint32_t *n_channels, struct kv_error *err)
{
	char *text;
	size_t n_bytes = 0;
	uint32_t n = 0;
	enum kv_status status = srv_file_read(path, CHANNELS_FILE_BYTES_MAX, &text, &n_bytes, err);

	if (status != KV_OK)
		return status;
	for (size_t at = 0; status == KV_OK && at < n_bytes;) {
		char *end = NULL;

		if (isspace((unsigned char)text[at]) || (text[at] != '\0' && strchr(",[]", text[at]))) {
			at++;
			continue;
		}

		const unsigned long channel =
			isdigit((unsigned char)text[at]) ? strtoul(text + at, &end, 10) : ULONG_MAX;

		if (channel >= KV_HEAD_DIM_MAX)
			status =
				kv_fail(err, KV_CORRUPT, "%s: offset %zu: expected a channel number below %u",
					path, at, KV_HEAD_DIM_MAX);
		else if (n == KV_HEAD_DIM_MAX)
			status = kv_fail(err, KV_CORRUPT, "%s: offset %zu: more than %u channels", path, at,
				KV_HEAD_DIM_MAX);
		else {
			channels[n++] = (uint16_t)channel;
			at = (size_t)(end - text);
		}
	}
	kv_free(text);
	if (status == KV_OK)
		*n_channels = n;
	return status;
}

static enum kv_status read_codebook(const char *path, struct kvcb_codebook **out, struct kv_error *err)
{
	char *text;
	size_t n_bytes = 0;
	enum kv_status status = srv_file_read(path, KV_CODEBOOK_FILE_BYTES_MAX, &text, &n_bytes, err);

	if (status != KV_OK)
		return status;
	*out = kv_alloc(1, sizeof(**out));
	if (!*out)
		status = kv_fail(err, KV_NO_MEMORY, "no memory for a codebook");
	else
		status = kv_codebook_file_parse(text, n_bytes, *out, err);
	kv_free(text);
	if (status == KV_OK)
		return KV_OK;
	kv_error_wrap(err, "%s", path);
	return status == KV_BAD_CONFIG ? KV_CORRUPT : status; /* the command line is right */
}

/* ---- the codec ---- */

/* What the format does not take is left out for comparisons of several formats. */
static enum kv_status read_options(struct srv_codec *codec, const struct srv_ctl *ctl,
	const struct kv_format *format, bool is_lenient, uint32_t head_dim, struct kv_format_options *options,
	uint16_t *channels, struct kv_error *err)
{
	const struct srv_arg_value *values = ctl->values;
	const uint32_t takes = is_lenient ? kv_format_takes(format) : UINT32_MAX;
	const char *projection = values[SRV_CODEC_PROJECTION].text;
	enum kv_status status = KV_OK;

	options->norm_correction =
		(takes & KV_OPTION_NORM_CORRECTION) && values[SRV_CODEC_NORM_CORRECTION].is_given;
	if ((takes & KV_OPTION_GROUP) && values[SRV_CODEC_GROUP].is_given)
		options->group = (uint32_t)values[SRV_CODEC_GROUP].number;
	if ((takes & KV_OPTION_RECIPE) && values[SRV_CODEC_RECIPE_SCALE].text)
		status = usage_of(kv_recipe_scale_parse(
			values[SRV_CODEC_RECIPE_SCALE].text, &options->recipe_scale, err));
	if (status == KV_OK && (takes & KV_OPTION_RECIPE) && values[SRV_CODEC_HIGH_CHANNELS].text) {
		codec->files[1] = values[SRV_CODEC_HIGH_CHANNELS].text;
		options->high_channels = channels;
		status = read_channels(codec->files[1], channels, &options->n_high_channels, err);
	}
	if (status == KV_OK && (takes & KV_OPTION_PROJECTION) && projection) {
		if (strncmp(projection, "file:", 5) != 0)
			return kv_fail(
				err, SRV_CTL_USAGE, "--projection: '%.60s' is not file:S.f32", projection);
		codec->files[2] = projection + 5;
		status = make_given(KV_ROTATION_PROJECTION, codec->files[2], head_dim,
			values[SRV_CODEC_SEED].number, &codec->projection, err);
		options->projection = codec->projection;
	}
	if (status == KV_OK && values[SRV_CODEC_CODEBOOK].text) {
		codec->files[3] = values[SRV_CODEC_CODEBOOK].text;
		status = read_codebook(codec->files[3], &codec->codebook, err);
	}
	return status;
}

enum kv_status srv_codec_init(struct srv_codec *codec, const struct srv_ctl *ctl, const char *name,
	bool is_lenient, struct kv_error *err)
{
	const struct srv_arg_value *values = ctl->values;
	struct kv_format_options options = { 0 };
	uint16_t channels[KV_HEAD_DIM_MAX];
	const struct kv_format *format;
	uint32_t head_dim = 0;
	enum kv_status status;

	*codec = (struct srv_codec){ 0 };
	if (!name)
		name = values[SRV_CODEC_FORMAT].text;
	if (!name)
		return kv_fail(err, SRV_CTL_USAGE, "--format is missing");
	status = usage_of(kv_format_parse(name, &format, err));
	if (status == KV_OK)
		status = srv_codec_head_dim(&values[SRV_CODEC_HEAD_DIM], &head_dim, err);
	if (status == KV_OK && kv_format_is_rotated(format))
		status = srv_codec_make_rotation(values[SRV_CODEC_ROTATION].text, head_dim,
			values[SRV_CODEC_SEED].number, &codec->rotation, &codec->files[0], err);
	if (status == KV_OK)
		status = read_options(codec, ctl, format, is_lenient, head_dim, &options, channels, err);
	if (status != KV_OK)
		return status;

	const struct kvcb_codebook *const codebooks[] = { codec->codebook };

	options.codebooks = codebooks;
	options.n_codebooks = codec->codebook ? 1 : 0;
	return usage_of(
		kv_row_codec_create_with(format, head_dim, codec->rotation, &options, &codec->codec, err));
}

void srv_codec_finish(struct srv_codec *codec)
{
	kv_row_codec_destroy(codec->codec);
	kv_rotation_destroy(codec->rotation);
	kv_rotation_destroy(codec->projection);
	kv_free(codec->codebook);
	*codec = (struct srv_codec){ 0 };
}

/* ---- theory ---- */

/*
 * What signs leave of the residual's energy. With the exact factor E |r - r^|^2 = (pi/2 - 1) |r|^2; a block
 * whose factor is a times that leaves 1 - 2a + a^2 pi/2 of its share. The published factor does not know
 * blocks: a = sqrt(block / dim).
 */
static double signs_leave(const struct kv_row_codec *codec, uint32_t dim)
{
	double left = 0;

	if (!codec->format->recipe || codec->recipe_scale == KV_RECIPE_SCALE_EXACT)
		return M_PI_2 - 1;
	for (uint32_t rest = dim; rest > 0;) {
		uint32_t block = 1;

		while (2 * block <= rest)
			block *= 2;

		const double share = (double)block / dim;

		left += share * (1 - 2 * sqrt(share) + share * M_PI_2);
		rest -= block;
	}
	return left;
}

double srv_codec_theory(const struct kv_row_codec *codec)
{
	double error = 0;

	for (uint32_t s = 0; s < codec->n_segments; s++) {
		const struct kv_segment *segment = &codec->segments[s];

		if (!segment->codebook)
			continue;

		const double share = (double)segment->n_channels / codec->head_dim;
		const double lost = segment->codebook->head_dim * segment->codebook->mse_per_coord;
		const bool has_signs = s + 1 < codec->n_segments && codec->segments[s + 1].is_added;

		error += share * lost * (has_signs ? signs_leave(codec, segment->n_channels) : 1);
	}
	return codec->norm_correction ? 2 * (1 - sqrt(1 - error)) : error;
}

/* ---- bad rows ---- */

void srv_codec_explain_row(const struct kv_row_codec *codec, const float *row, uint64_t offset,
	char text[static SRV_ROW_FAULT_BYTES])
{
	for (uint32_t i = 0; i < codec->head_dim; i++) {
		if (kv_f32_is_finite(row[i]))
			continue;
		snprintf(text, SRV_ROW_FAULT_BYTES, "channel %u (offset %llu) is %g", i,
			(unsigned long long)(offset + 4 * (uint64_t)i), (double)row[i]);
		return;
	}

	uint32_t largest = 0;

	for (uint32_t i = 1; i < codec->head_dim; i++)
		if (fabsf(row[i]) > fabsf(row[largest]))
			largest = i;
	snprintf(text, SRV_ROW_FAULT_BYTES,
		"%s cannot hold its values; the largest is %g in channel %u (offset %llu)",
		codec->format->name, (double)row[largest], largest,
		(unsigned long long)(offset + 4 * (uint64_t)largest));
}

/* A field's number or a number of a segment, as float. */
static float number_at(enum kv_dtype number, const uint8_t *at)
{
	float value = 0;

	kv_rows_load_f32(number, at, 1, &value);
	return value;
}

void srv_codec_explain_packed(const struct kv_row_codec *codec, const uint8_t *row, uint64_t offset,
	char text[static SRV_ROW_FAULT_BYTES])
{
	for (uint32_t f = 0; f < codec->n_fields; f++) {
		const struct kv_field *field = &codec->fields[f];
		const uint32_t number_bytes = kv_dtype_bytes(field->number);

		for (uint32_t i = 0; i < field->count; i++) {
			const uint32_t at = field->offset + i * number_bytes;
			const float value = number_at(field->number, row + at);

			if (kv_f32_is_finite(value) && (field->kind == KV_FIELD_ZERO || !(value < 0)))
				continue;
			snprintf(text, SRV_ROW_FAULT_BYTES, "%s (offset %llu) is %g", field->name,
				(unsigned long long)(offset + at), (double)value);
			return;
		}
	}
	for (uint32_t s = 0; s < codec->n_segments; s++) {
		const struct kv_segment *segment = &codec->segments[s];
		const uint32_t number_bytes = kv_dtype_bytes(segment->number);

		for (uint32_t i = 0; segment->code == KV_CODE_NUMBER && i < segment->n_channels; i++) {
			const uint32_t at = segment->offset + i * number_bytes;
			const float value = number_at(segment->number, row + at);

			if (kv_f32_is_finite(value))
				continue;
			snprintf(text, SRV_ROW_FAULT_BYTES, "channel %u (offset %llu) is %g", i,
				(unsigned long long)(offset + at), (double)value);
			return;
		}
	}
	snprintf(text, SRV_ROW_FAULT_BYTES,
		"bits behind the last code are not 0, or a code names no number (%s)", codec->format->name);
}
