/*
 * Row formats: the table of names, and everything that follows from a codec's segments and fields.
 *
 * Encoding is the family's: it decides bytes. The walks below only read, so they are written once for all
 * families. Summation orders are fixed here; they are part of what makes the scalar backend an oracle.
 */
#include "core/format.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/format_family.h"
#include "core/memory.h"
#include "core/pack.h"

static const struct kv_format formats[] = {
	{ .name = "f32", .family = &kv_format_family_dense, .number = KV_DTYPE_F32 },
	{ .name = "bf16", .family = &kv_format_family_dense, .number = KV_DTYPE_BF16 },
	{ .name = "tq4", .family = &kv_format_family_tq, .bits = 4 },
};
#define N_FORMATS ((uint32_t)(sizeof(formats) / sizeof(formats[0])))

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
	char known[128] = "";
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

enum kv_status kv_format_check(const struct kv_format *format, uint32_t head_dim, struct kv_error *err)
{
	if (head_dim < KV_HEAD_DIM_MIN || head_dim > KV_HEAD_DIM_MAX || head_dim % KV_HEAD_DIM_STEP != 0)
		return kv_fail(err, KV_BAD_ARG, "head_dim %u is not a multiple of %u from %u to %u", head_dim,
			KV_HEAD_DIM_STEP, KV_HEAD_DIM_MIN, KV_HEAD_DIM_MAX);
	return format->family->check ? format->family->check(format, head_dim, err) : KV_OK;
}

/* ---- layout ---- */

void kv_row_codec_add_segment(struct kv_row_codec *codec, const struct kv_segment *segment)
{
	KV_ASSERT(codec->n_segments < KV_SEGMENTS_MAX);
	KV_ASSERT(segment->n_channels >= 1);
	KV_ASSERT(segment->n_channels <= codec->head_dim);
	KV_ASSERT(!segment->rotation || segment->rotation->head_dim == segment->n_channels);

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
	if (added->codebook)
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

enum kv_status kv_row_codec_create(const struct kv_format *format, uint32_t head_dim,
	const struct kv_rotation *rotation, struct kv_row_codec **codec, struct kv_error *err)
{
	const enum kv_status status = kv_format_check(format, head_dim, err);

	if (status != KV_OK)
		return status;
	if (format->family->is_rotated) {
		KV_ASSERT(rotation != NULL);
		KV_ASSERT(rotation->head_dim == head_dim);
	}

	struct kv_row_codec *made = kv_alloc(1, sizeof(*made));

	if (!made)
		return kv_fail(err, KV_NO_MEMORY, "codec of format %s", format->name);
	made->format = format;
	made->rotation = format->family->is_rotated ? rotation : NULL;
	made->head_dim = head_dim;
	format->family->lay_out(made);
	for (uint32_t s = 0; s < made->n_segments; s++) {
		const struct kv_segment *segment = &made->segments[s];

		for (uint32_t i = 0; i < segment->n_scales; i++)
			KV_ASSERT(segment->scale_fields[i] < made->n_fields);
		KV_ASSERT(!segment->has_zero || segment->zero_field < made->n_fields);
	}
	*codec = made;
	return KV_OK;
}

void kv_row_codec_destroy(struct kv_row_codec *codec)
{
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

/* ---- rows ---- */

float kv_row_length(const float *values, uint32_t n_values, double *wide)
{
	uint32_t half = 1;

	while (half < n_values)
		half *= 2;
	for (uint32_t i = 0; i < n_values; i++)
		wide[i] = (double)values[i] * (double)values[i];
	for (uint32_t i = n_values; i < half; i++)
		wide[i] = 0;
	for (half /= 2; half >= 1; half /= 2) {
		for (uint32_t i = 0; i < half; i++)
			wide[i] += wide[i + half];
	}
	return (float)sqrt(wide[0]);
}

enum kv_status kv_row_codec_encode(
	const struct kv_row_codec *codec, const float *row, uint8_t *out, struct kv_row_scratch *scratch)
{
	if (!kv_rows_are_finite(row, codec->head_dim))
		return KV_BAD_VALUE;
	return codec->format->family->encode(codec, row, out, scratch);
}

static float field_value(const struct kv_row_codec *codec, uint32_t field_idx, uint32_t i, const uint8_t *row)
{
	const struct kv_field *field = &codec->fields[field_idx];
	float value;

	kv_rows_load_f32(
		field->number, row + field->offset + (size_t)i * kv_dtype_bytes(field->number), 1, &value);
	return value;
}

/* Values of a segment in its own basis, before scales and zeros. */
static void segment_values(const struct kv_segment *segment, const uint8_t *row, float *values)
{
	const uint8_t *payload = row + segment->offset;

	if (segment->code == KV_CODE_NUMBER) {
		kv_rows_load_f32(segment->number, payload, segment->n_channels, values);
		return;
	}

	uint8_t codes[KV_HEAD_DIM_MAX];

	kv_unpack(payload, segment->n_channels, segment->bits, codes);
	for (uint32_t i = 0; i < segment->n_channels; i++)
		values[i] = segment->table[codes[i]];
}

static uint32_t segment_channel(const struct kv_segment *segment, uint32_t i)
{
	return segment->channels ? segment->channels[i] : i;
}

/* Channels [first, end) that share scales and a zero. Segments without them are one group. */
struct group {
	uint32_t first, end;
	float scales[2];
	double scale; /* their product */
	float zero;
};

/* Moves on to the next group; false after the last one. Begin with a zeroed group. */
static bool next_group(const struct kv_row_codec *codec, const struct kv_segment *segment, const uint8_t *row,
	struct group *group)
{
	const uint32_t left = segment->n_channels - group->end;

	if (left == 0)
		return false;

	const uint32_t group_idx = group->end / segment->group_channels;

	group->first = group->end;
	group->end += left < segment->group_channels ? left : segment->group_channels;
	group->scale = 1;
	for (uint32_t i = 0; i < segment->n_scales; i++) {
		group->scales[i] = field_value(codec, segment->scale_fields[i], group_idx, row);
		group->scale *= (double)group->scales[i];
	}
	if (segment->has_zero)
		group->zero = field_value(codec, segment->zero_field, group_idx, row);
	return true;
}

/* float32, every operation rounded: rotate back, then multiply by each scale, then add the zero. */
void kv_row_codec_decode(
	const struct kv_row_codec *codec, const uint8_t *row, float *out, struct kv_row_scratch *scratch)
{
	float *values = scratch->turned;

	for (uint32_t s = 0; s < codec->n_segments; s++) {
		const struct kv_segment *segment = &codec->segments[s];
		struct group group = { 0 };

		segment_values(segment, row, values);
		if (segment->rotation)
			kv_rotation_backward(segment->rotation, values, values);
		while (next_group(codec, segment, row, &group)) {
			for (uint32_t i = group.first; i < group.end; i++) {
				const uint32_t channel = segment_channel(segment, i);
				float value = values[i];

				for (uint32_t k = 0; k < segment->n_scales; k++)
					value *= group.scales[k];
				if (segment->has_zero)
					value += group.zero;
				out[channel] = segment->is_added ? out[channel] + value : value;
			}
		}
	}
}

enum kv_status kv_row_codec_validate_packed(const struct kv_row_codec *codec, const uint8_t *row)
{
	float values[KV_HEAD_DIM_MAX];

	for (uint32_t s = 0; s < codec->n_segments; s++) {
		const struct kv_segment *segment = &codec->segments[s];

		if (segment->code == KV_CODE_TABLE &&
			!kv_packed_tail_is_zero(row + segment->offset, segment->n_channels * segment->bits,
				segment->payload_bytes))
			return KV_BAD_VALUE;
		/* Numbers from outside may be anything, and a table may have codes that name no number. */
		segment_values(segment, row, values);
		if (!kv_rows_are_finite(values, segment->n_channels))
			return KV_BAD_VALUE;
	}
	for (uint32_t f = 0; f < codec->n_fields; f++) {
		for (uint32_t i = 0; i < codec->fields[f].count; i++) {
			const float value = field_value(codec, f, i, row);

			if (!kv_f32_is_finite(value))
				return KV_BAD_VALUE;
			if (codec->fields[f].kind != KV_FIELD_ZERO && value < 0)
				return KV_BAD_VALUE;
		}
	}
	return KV_OK;
}

/* ---- attention ---- */

void kv_row_codec_prepare_query(const struct kv_row_codec *codec, const float *q, double *q_prepared)
{
	for (uint32_t s = 0; s < codec->n_segments; s++) {
		const struct kv_segment *segment = &codec->segments[s];
		double *part = q_prepared + segment->prepared_idx;

		for (uint32_t i = 0; i < segment->n_channels; i++)
			part[i] = (double)q[segment_channel(segment, i)];
		if (segment->rotation)
			kv_rotation_forward_f64(segment->rotation, part, part);
	}
}

/* The product of two float32 is exact in float64, so one scale adds no error at all. */
void kv_row_codec_expand(const struct kv_row_codec *codec, const uint8_t *row, double *expanded)
{
	float values[KV_HEAD_DIM_MAX];

	for (uint32_t s = 0; s < codec->n_segments; s++) {
		const struct kv_segment *segment = &codec->segments[s];
		double *part = expanded + segment->prepared_idx;
		struct group group = { 0 };

		segment_values(segment, row, values);
		while (next_group(codec, segment, row, &group)) {
			for (uint32_t i = group.first; i < group.end; i++)
				part[i] = (double)values[i] * group.scale + (double)group.zero;
		}
	}
}

/* Eight sums side by side, then a tree: the order that every later backend is measured against. */
double kv_row_codec_score(const struct kv_row_codec *codec, const double *q_prepared, const double *expanded)
{
	const uint32_t n = codec->prepared_dim, n_whole = n - n % 8;
	double sums[8] = { 0 };

	for (uint32_t i = 0; i < n_whole; i += 8) {
		for (uint32_t k = 0; k < 8; k++)
			sums[k] += q_prepared[i + k] * expanded[i + k];
	}
	for (uint32_t i = n_whole; i < n; i++)
		sums[i - n_whole] += q_prepared[i] * expanded[i];
	return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

void kv_row_codec_accumulate(
	const struct kv_row_codec *codec, double weight, const double *expanded, double *acc)
{
	for (uint32_t i = 0; i < codec->prepared_dim; i++)
		acc[i] += weight * expanded[i];
}

void kv_row_codec_finish_output(const struct kv_row_codec *codec, double *acc, double factor, float *out)
{
	double sums[KV_HEAD_DIM_MAX] = { 0 };

	for (uint32_t s = 0; s < codec->n_segments; s++) {
		const struct kv_segment *segment = &codec->segments[s];
		double *part = acc + segment->prepared_idx;

		if (segment->rotation)
			kv_rotation_backward_f64(segment->rotation, part, part);
		for (uint32_t i = 0; i < segment->n_channels; i++)
			sums[segment_channel(segment, i)] += part[i];
	}
	for (uint32_t i = 0; i < codec->head_dim; i++)
		out[i] = (float)(sums[i] * factor);
}
