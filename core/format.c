/* Row formats: the table of names, options, and how a codec comes to be. What it does is in format_rows.c. */
#include "core/format.h"

#include <stdio.h>
#include <string.h>

#include "codebooks/solver.h"
#include "core/checked.h"
#include "core/format_family.h"
#include "core/memory.h"
#include "core/pack.h"
#include "core/recipe.h"

static const struct kv_recipe turboquant25 = { .n_quarters = 1, .bits_high = 2, .bits_low = 1 };
static const struct kv_recipe turboquant35 = { .n_quarters = 2, .bits_high = 3, .bits_low = 2 };

static const struct kv_format formats[] = {
	{ .name = "f32", .family = &kv_format_family_dense, .number = KV_DTYPE_F32 },
	{ .name = "f16", .family = &kv_format_family_dense, .number = KV_DTYPE_F16 },
	{ .name = "bf16", .family = &kv_format_family_dense, .number = KV_DTYPE_BF16 },
	{ .name = "fp8", .family = &kv_format_family_fp8, .bits = 8 },
	{ .name = "tq1", .family = &kv_format_family_tq, .bits = 1 },
	{ .name = "tq2", .family = &kv_format_family_tq, .bits = 2 },
	{ .name = "tq3", .family = &kv_format_family_tq, .bits = 3 },
	{ .name = "tq4", .family = &kv_format_family_tq, .bits = 4 },
	{ .name = "tq5", .family = &kv_format_family_tq, .bits = 5 },
	{ .name = "tq6", .family = &kv_format_family_tq, .bits = 6 },
	{ .name = "tq7", .family = &kv_format_family_tq, .bits = 7 },
	{ .name = "tq8", .family = &kv_format_family_tq, .bits = 8 },
	{ .name = "tqp2", .family = &kv_format_family_tqp, .bits = 2 },
	{ .name = "tqp3", .family = &kv_format_family_tqp, .bits = 3 },
	{ .name = "tqp4", .family = &kv_format_family_tqp, .bits = 4 },
	{ .name = "tqp5", .family = &kv_format_family_tqp, .bits = 5 },
	{ .name = "v2", .family = &kv_format_family_vn, .bits = 2 },
	{ .name = "v3", .family = &kv_format_family_vn, .bits = 3 },
	{ .name = "v4", .family = &kv_format_family_vn, .bits = 4 },
	{ .name = "v8", .family = &kv_format_family_vn, .bits = 8 },
	{ .name = "turboquant25", .family = &kv_format_family_recipe, .recipe = &turboquant25 },
	{ .name = "turboquant35", .family = &kv_format_family_recipe, .recipe = &turboquant35 },
};
#define N_FORMATS ((uint32_t)KV_LENGTH(formats))

uint32_t kv_format_count(void)
{
	return N_FORMATS;
}

const struct kv_format *kv_format_at(uint32_t format_idx)
{
	KV_ASSERT(format_idx < N_FORMATS);
	return &formats[format_idx];
}

enum kv_status kv_format_parse(const char *name, const struct kv_format **format, struct kv_error *err)
{
	char known[256] = "";
	size_t n_known = 0;

	for (uint32_t i = 0; i < N_FORMATS; i++) {
		if (strcmp(name, formats[i].name) == 0) {
			*format = &formats[i];
			return KV_OK;
		}
	}
	for (uint32_t i = 0; i < N_FORMATS; i++) {
		const int n = snprintf(
			known + n_known, sizeof(known) - n_known, "%s%s", i ? ", " : "", formats[i].name);

		n_known += (size_t)n;
		KV_ASSERT(n_known < sizeof(known));
	}
	return kv_fail(err, KV_BAD_ARG, "unknown row format \"%.32s\" (known: %s)", name, known);
}

bool kv_format_is_rotated(const struct kv_format *format)
{
	return format->family->is_rotated;
}

uint32_t kv_format_takes(const struct kv_format *format)
{
	return format->family->options;
}

static const char *const recipe_scale_names[] = {
	[KV_RECIPE_SCALE_EXACT] = "exact",
	[KV_RECIPE_SCALE_PUBLISHED] = "published",
};

enum kv_status kv_recipe_scale_parse(const char *name, enum kv_recipe_scale *scale, struct kv_error *err)
{
	for (uint32_t i = 0; i < KV_LENGTH(recipe_scale_names); i++) {
		if (strcmp(name, recipe_scale_names[i]) == 0) {
			*scale = (enum kv_recipe_scale)i;
			return KV_OK;
		}
	}
	return kv_fail(err, KV_BAD_ARG, "unknown recipe scale \"%.32s\" (known: exact, published)", name);
}

const char *kv_recipe_scale_name(enum kv_recipe_scale scale)
{
	return (unsigned)scale < KV_LENGTH(recipe_scale_names) ? recipe_scale_names[scale] : "unknown";
}

static const struct kv_format_options default_options;

/* An option that is given to a format that does not take it. */
static enum kv_status check_options(
	const struct kv_format *format, const struct kv_format_options *options, struct kv_error *err)
{
	const struct {
		enum kv_format_option option;
		bool is_given;
		const char *name;
	} rows[] = {
		{ KV_OPTION_NORM_CORRECTION, options->norm_correction, "norm_correction" },
		{ KV_OPTION_GROUP, options->group != 0, "group" },
		{ KV_OPTION_RECIPE, options->recipe_scale != KV_RECIPE_SCALE_EXACT, "recipe_scale" },
		{ KV_OPTION_RECIPE, options->high_channels != NULL, "high channels" },
		{ KV_OPTION_PROJECTION, options->projection != NULL, "projection" },
	};

	for (uint32_t i = 0; i < KV_LENGTH(rows); i++) {
		if (rows[i].is_given && !(format->family->options & rows[i].option))
			return kv_fail(
				err, KV_BAD_ARG, "row format %s takes no %s", format->name, rows[i].name);
	}
	return KV_OK;
}

enum kv_status kv_format_check_with(const struct kv_format *format, uint32_t head_dim,
	const struct kv_format_options *options, struct kv_error *err)
{
	if (!options)
		options = &default_options;
	if (head_dim < KV_HEAD_DIM_MIN || head_dim > KV_HEAD_DIM_MAX || head_dim % KV_HEAD_DIM_STEP != 0)
		return kv_fail(err, KV_BAD_ARG, "head_dim %u is not a multiple of %u from %u to %u", head_dim,
			KV_HEAD_DIM_STEP, KV_HEAD_DIM_MIN, KV_HEAD_DIM_MAX);

	const enum kv_status status = check_options(format, options, err);

	if (status != KV_OK || !format->family->check)
		return status;
	return format->family->check(format, head_dim, options, err);
}

/* ---- what a codec owns ---- */

const float kv_sign_table[2] = { -1, 1 };

static const struct kvcb_codebook *find_codebook(
	const struct kv_row_codec *codec, uint32_t dim, uint32_t bits)
{
	for (uint32_t s = 0; s < codec->n_segments; s++) {
		const struct kvcb_codebook *codebook = codec->segments[s].codebook;

		if (codebook && codebook->head_dim == dim && codebook->bits == bits)
			return codebook;
	}
	return NULL;
}

enum kv_status kv_row_codec_get_codebook(struct kv_row_codec *codec, const struct kv_format_options *options,
	uint32_t dim, uint32_t bits, const struct kvcb_codebook **codebook, struct kv_error *err)
{
	const struct kvcb_codebook *given = NULL;

	if (options->like) {
		*codebook = find_codebook(options->like, dim, bits);
		KV_ASSERT(*codebook != NULL);
		return KV_OK;
	}
	for (uint32_t i = 0; i < options->n_codebooks; i++) {
		if (options->codebooks[i]->head_dim == dim && options->codebooks[i]->bits == bits)
			given = options->codebooks[i];
	}
	if (!given && kvcb_find(dim, bits)) {
		*codebook = kvcb_find(dim, bits);
		return KV_OK;
	}

	struct kvcb_codebook *own = kv_alloc(1, sizeof(*own));
	uint32_t n_own = 0;

	if (!own)
		return kv_fail(err, KV_NO_MEMORY, "codebook of %u channels and %u bits", dim, bits);
	while (codec->own_codebooks[n_own])
		n_own++;
	KV_ASSERT(n_own < KV_SEGMENTS_MAX);
	codec->own_codebooks[n_own] = own;
	if (given) {
		*own = *given;
		*codebook = own;
	} else {
		*codebook = kvcb_get(dim, bits, own);
		KV_ASSERT(*codebook == own); /* dims of rows and groups are in the solver's range */
	}
	return KV_OK;
}

void kv_row_codec_own_rotation(struct kv_row_codec *codec, struct kv_rotation *rotation)
{
	uint32_t n_own = 0;

	while (codec->own_rotations[n_own])
		n_own++;
	KV_ASSERT(n_own < KV_SEGMENTS_MAX);
	codec->own_rotations[n_own] = rotation;
	codec->rotation_bytes += kv_rotation_memory_bytes(rotation);
}

/* ---- layout ---- */

void kv_row_codec_add_segment(struct kv_row_codec *codec, const struct kv_segment *segment)
{
	KV_ASSERT(codec->n_segments < KV_SEGMENTS_MAX);
	KV_ASSERT(segment->n_channels >= 1);
	KV_ASSERT(segment->n_channels <= codec->head_dim);
	KV_ASSERT(!segment->rotation || segment->rotation->head_dim == segment->n_channels);
	KV_ASSERT(!segment->factors || segment->has_scale);
	KV_ASSERT(!segment->factors || !segment->has_zero);

	struct kv_segment *added = &codec->segments[codec->n_segments++];

	*added = *segment;
	added->offset = codec->row_bytes;
	added->prepared_idx = codec->prepared_dim;
	if (added->group_channels == 0)
		added->group_channels = added->n_channels;
	if (added->rotation) {
		KV_ASSERT(added->group_channels == added->n_channels);
		KV_ASSERT(!added->has_zero);
	}
	if (added->code == KV_CODE_NUMBER) {
		added->payload_bytes = added->n_channels * kv_dtype_bytes(added->number);
		codec->account.exact_bytes += added->payload_bytes;
	} else {
		KV_ASSERT(added->table != NULL);
		if (added->n_codes == 0)
			added->n_codes = added->n_channels;
		KV_ASSERT(added->n_codes >= added->n_channels);
		added->payload_bytes = kv_packed_bytes(added->n_codes, added->bits);
		codec->account.payload_bytes += added->payload_bytes;
	}
	if (added->codebook && !codec->is_like)
		codec->codebook_bytes += (uint32_t)sizeof(float) * ((2u << added->bits) - 1);
	codec->row_bytes += added->payload_bytes;
	codec->prepared_dim += added->n_channels;
	KV_ASSERT(codec->row_bytes <= KV_ROW_BYTES_MAX);
	KV_ASSERT(codec->prepared_dim <= KV_PREPARED_DIM_MAX);
}

uint8_t kv_row_codec_add_field(struct kv_row_codec *codec, const char *name, enum kv_field_kind kind,
	enum kv_dtype number, uint32_t count)
{
	const uint32_t field_bytes = count * kv_dtype_bytes(number);

	KV_ASSERT(codec->n_fields < KV_FIELDS_MAX);
	codec->fields[codec->n_fields] = (struct kv_field){
		.name = name,
		.kind = kind,
		.number = number,
		.count = count,
		.offset = codec->row_bytes,
		.field_bytes = field_bytes,
	};
	codec->row_bytes += field_bytes;
	switch (kind) {
	case KV_FIELD_NORM:
		codec->account.norms_bytes += field_bytes;
		break;
	case KV_FIELD_SCALE:
		codec->account.scales_bytes += field_bytes;
		break;
	case KV_FIELD_ZERO:
		codec->account.zeros_bytes += field_bytes;
		break;
	}
	KV_ASSERT(codec->row_bytes <= KV_ROW_BYTES_MAX);
	return (uint8_t)codec->n_fields++;
}

enum kv_status kv_row_codec_create_with(const struct kv_format *format, uint32_t head_dim,
	const struct kv_rotation *rotation, const struct kv_format_options *options,
	struct kv_row_codec **codec, struct kv_error *err)
{
	if (!options)
		options = &default_options;

	enum kv_status status = kv_format_check_with(format, head_dim, options, err);

	if (status != KV_OK)
		return status;
	if (format->family->is_rotated) {
		KV_ASSERT(rotation != NULL);
		KV_ASSERT(rotation->head_dim == head_dim);
	} else {
		rotation = NULL;
	}
	if (options->like) {
		KV_ASSERT(options->like->format == format);
		KV_ASSERT(options->like->head_dim == head_dim);
		KV_ASSERT(options->like->rotation == rotation);
	}

	struct kv_row_codec *made = kv_alloc(1, sizeof(*made));

	if (!made)
		return kv_fail(err, KV_NO_MEMORY, "codec of format %s", format->name);
	made->format = format;
	made->rotation = rotation;
	made->head_dim = head_dim;
	made->norm_correction = options->norm_correction;
	made->recipe_scale = options->recipe_scale;
	made->is_like = options->like != NULL;
	status = format->family->lay_out(made, options, err);
	if (status != KV_OK) {
		kv_row_codec_destroy(made);
		return status;
	}
	for (uint32_t s = 0; s < made->n_segments; s++) {
		const struct kv_segment *segment = &made->segments[s];

		KV_ASSERT(!segment->has_scale || segment->scale_field < made->n_fields);
		KV_ASSERT(!segment->has_zero || segment->zero_field < made->n_fields);
		KV_ASSERT(!segment->has_outer || segment->outer_field < made->n_fields);
	}
	*codec = made;
	return KV_OK;
}

void kv_row_codec_destroy(struct kv_row_codec *codec)
{
	if (!codec)
		return;
	for (uint32_t i = 0; i < KV_SEGMENTS_MAX; i++) {
		kv_free(codec->own_codebooks[i]);
		kv_rotation_destroy(codec->own_rotations[i]);
	}
	kv_free(codec);
}

/* Prints the segment or field that begins at `offset`; returns its bytes. */
static uint32_t print_part(const struct kv_row_codec *codec, uint32_t offset, char *text, size_t text_size)
{
	for (uint32_t s = 0; s < codec->n_segments; s++) {
		const struct kv_segment *segment = &codec->segments[s];

		if (segment->offset != offset)
			continue;
		if (segment->code == KV_CODE_NUMBER)
			snprintf(text, text_size, "[%s %s x %u]", segment->name,
				kv_dtype_name(segment->number), segment->n_channels);
		else
			snprintf(text, text_size, "[%s %u bit x %u]", segment->name, segment->bits,
				segment->n_codes);
		return segment->payload_bytes;
	}
	for (uint32_t f = 0; f < codec->n_fields; f++) {
		const struct kv_field *field = &codec->fields[f];

		if (field->offset != offset)
			continue;
		if (field->count == 1)
			snprintf(text, text_size, "[%s %s]", field->name, kv_dtype_name(field->number));
		else
			snprintf(text, text_size, "[%s %s x %u]", field->name, kv_dtype_name(field->number),
				field->count);
		return field->field_bytes;
	}
	return 0;
}

void kv_row_codec_layout(const struct kv_row_codec *codec, char layout[static KV_ROW_LAYOUT_MAX])
{
	uint32_t offset = 0;
	size_t n_chars = 0;

	layout[0] = '\0';
	while (offset < codec->row_bytes) {
		const uint32_t part_bytes =
			print_part(codec, offset, layout + n_chars, KV_ROW_LAYOUT_MAX - n_chars);

		KV_ASSERT(part_bytes != 0);
		n_chars += strlen(layout + n_chars);
		KV_ASSERT(n_chars < KV_ROW_LAYOUT_MAX - 1);
		offset += part_bytes;
	}
}
