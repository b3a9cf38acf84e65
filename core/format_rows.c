/*
 * Row codecs at work: everything that follows from a codec's segments and fields.
 *
 * Encoding is the family's: it decides bytes. The walks below only read, so they are written once for all
 * families. Summation orders are fixed here; they are part of what makes the scalar backend an oracle.
 */
#include <math.h>
#include <string.h>

#include "core/format.h"
#include "core/format_family.h"
#include "core/pack.h"

/* ---- for encoders ---- */

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

float kv_row_normalise(const float *values, uint32_t n_values, double *wide, float *unit)
{
	const float length = kv_row_length(values, n_values, wide);
	const float norm = length > KV_NORM_MIN ? length : KV_NORM_MIN;

	for (uint32_t i = 0; i < n_values; i++)
		unit[i] = values[i] / norm;
	return norm;
}

enum kv_status kv_row_quantise(
	const struct kv_segment *indices, const float *row, struct kv_row_scratch *scratch, float *norm)
{
	*norm = kv_row_normalise(row, indices->n_channels, scratch->wide, scratch->unit);
	if (!kv_f32_is_finite(*norm))
		return KV_BAD_VALUE;
	kv_rotation_forward(indices->rotation, scratch->unit, scratch->turned);
	kvcb_indices(indices->codebook, scratch->turned, indices->n_channels, scratch->codes);
	return KV_OK;
}

void kv_segment_pack(const struct kv_segment *segment, const uint8_t *codes, uint8_t *row)
{
	uint8_t *payload = row + segment->offset;
	const uint32_t n_bytes = kv_packed_bytes(segment->n_channels, segment->bits);
	const enum kv_status status = kv_pack(codes, segment->n_channels, segment->bits, payload);

	KV_ASSERT(status == KV_OK); /* an encoder's codes are below 2^bits by construction */
	memset(payload + n_bytes, 0, segment->payload_bytes - n_bytes);
}

void kv_segment_pack_signs(
	const struct kv_segment *segment, const float *values, uint8_t *codes, uint8_t *row)
{
	for (uint32_t i = 0; i < segment->n_channels; i++)
		codes[i] = values[i] >= 0;
	kv_segment_pack(segment, codes, row);
}

/* ---- rows ---- */

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

/* Channels [first, end) that share a scale and a zero. Segments without them are one group. */
struct group {
	uint32_t first, end;
	float scale;
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
	group->scale = segment->has_scale ? field_value(codec, segment->scale_field, group_idx, row) : 1;
	group->zero = segment->has_zero ? field_value(codec, segment->zero_field, group_idx, row) : 0;
	return true;
}

/* Adds a segment's values in the channels' own basis to the row, or begins the row with them. */
static void decode_segment(const struct kv_row_codec *codec, const struct kv_segment *segment,
	const uint8_t *row, float *values, float *out)
{
	struct group group = { 0 };

	segment_values(segment, row, values);
	if (segment->rotation)
		kv_rotation_backward(segment->rotation, values, values);
	while (next_group(codec, segment, row, &group)) {
		for (uint32_t i = group.first; i < group.end; i++) {
			const uint32_t channel = segment_channel(segment, i);
			float value = values[i];

			if (segment->has_scale)
				value *= segment->factors ? segment->factors[i] * group.scale : group.scale;
			if (segment->has_zero)
				value += group.zero;
			out[channel] = segment->is_added ? out[channel] + value : value;
		}
	}
}

static bool shares_outer(const struct kv_segment *a, const struct kv_segment *b)
{
	return a->has_outer && b->has_outer && a->outer_field == b->outer_field;
}

/*
 * float32, every operation rounded, in the order of the formulas of FORMATS 5: rotate back, multiply by
 * (factor * scale), add the zero, add to what the segments before gave, and multiply the sum by the outer
 * scale.
 */
void kv_row_codec_decode(
	const struct kv_row_codec *codec, const uint8_t *row, float *out, struct kv_row_scratch *scratch)
{
	for (uint32_t s = 0; s < codec->n_segments; s++) {
		const struct kv_segment *segment = &codec->segments[s];

		decode_segment(codec, segment, row, scratch->turned, out);
		if (!segment->has_outer ||
			(s + 1 < codec->n_segments && shares_outer(segment, &codec->segments[s + 1])))
			continue;

		const float outer = field_value(codec, segment->outer_field, 0, row);

		for (uint32_t i = 0; i < segment->n_channels; i++)
			out[segment_channel(segment, i)] *= outer;
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
		const double outer =
			segment->has_outer ? (double)field_value(codec, segment->outer_field, 0, row) : 1;
		double *part = expanded + segment->prepared_idx;
		struct group group = { 0 };

		segment_values(segment, row, values);
		while (next_group(codec, segment, row, &group)) {
			for (uint32_t i = group.first; i < group.end; i++)
				part[i] = ((double)values[i] * (double)group.scale + (double)group.zero) *
					outer;
		}
		for (uint32_t i = 0; segment->factors && i < segment->n_channels; i++)
			part[i] *= (double)segment->factors[i];
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
