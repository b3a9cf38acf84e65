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
#include "core/row_kernels.h"

_Static_assert(KV_HEAD_DIM_STEP % KV_ROW_KERNELS_STEP == 0, "prepared rows are whole steps of the kernels");
_Static_assert(KV_ROW_WORK_NUMBERS >= KV_PREPARED_DIM_MAX, "there is room for a row");

/* ---- for encoders ---- */

float kv_row_length(const float *values, uint32_t n_values)
{
	return kv_row_kernels()->length(values, n_values);
}

float kv_row_normalise(const float *values, uint32_t n_values, float *unit)
{
	const float length = kv_row_length(values, n_values);
	const float norm = length < KV_NORM_MIN ? KV_NORM_MIN : length; /* what is not a number stays so */

	kv_row_kernels()->divide(values, n_values, norm, unit);
	return norm;
}

void kv_segment_find_codes(const struct kv_segment *indices, const float *values, uint8_t *codes)
{
	const struct kvcb_codebook *codebook = indices->codebook;

	kv_row_kernels()->count_below(codebook->interior_boundaries, (1u << codebook->bits) - 1, values,
		indices->n_channels, codes);
}

enum kv_status kv_row_quantise(
	const struct kv_segment *indices, const float *row, struct kv_row_scratch *scratch, float *norm)
{
	*norm = kv_row_normalise(row, indices->n_channels, scratch->unit);
	if (!kv_f32_is_finite(*norm))
		return KV_BAD_VALUE;
	kv_rotation_forward(indices->rotation, scratch->unit, scratch->turned);
	kv_segment_find_codes(indices, scratch->turned, scratch->codes);
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
	const struct kv_format_family *family = codec->format->family;

	if (!family->refuses_by_norm && !kv_rows_are_finite(row, codec->head_dim))
		return KV_BAD_VALUE;
	return family->encode(codec, row, out, scratch);
}

static float field_value(const struct kv_row_codec *codec, uint32_t field_idx, uint32_t i, const uint8_t *row)
{
	const struct kv_field *field = &codec->fields[field_idx];
	float value;

	if (field->number == KV_DTYPE_F32)
		return kv_load_f32(row + field->offset + (size_t)i * sizeof(value));
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

/*
 * Codes are looked up in a table of their values with scale and zero, where a group is long enough to be
 * worth the table and begins with a byte.
 */
static bool is_looked_up(const struct kv_segment *segment)
{
	return segment->code == KV_CODE_TABLE && segment->bits <= KV_ROW_KERNELS_BITS_MAX &&
		segment->group_channels >= 1u << segment->bits &&
		(segment->group_channels * segment->bits % 8 == 0 ||
			segment->group_channels >= segment->n_channels);
}

/* The product of two float32 is exact in float64, so one scale adds no error at all. */
static void find_scales(const struct kv_row_codec *codec, const struct kv_segment *segment,
	uint32_t group_idx, const uint8_t *const rows[], uint32_t n_rows, struct kv_row_scale scales[])
{
	for (uint32_t r = 0; r < n_rows; r++)
		scales[r] = (struct kv_row_scale){ .scale = 1, .zero = 0, .outer = 1 };
	for (uint32_t r = 0; segment->has_scale && r < n_rows; r++)
		scales[r].scale = (double)field_value(codec, segment->scale_field, group_idx, rows[r]);
	for (uint32_t r = 0; segment->has_zero && r < n_rows; r++)
		scales[r].zero = (double)field_value(codec, segment->zero_field, group_idx, rows[r]);
	for (uint32_t r = 0; segment->has_outer && r < n_rows; r++)
		scales[r].outer = (double)field_value(codec, segment->outer_field, 0, rows[r]);
}

/* Rows that are taken together, so that a table is loaded once for all of them. */
#define ROWS_AT_ONCE KV_ROW_KERNELS_ROWS_MAX

/* Channels [first, first + codes->n) of some rows, for the kernels. */
static void describe_codes(const struct kv_row_codec *codec, const struct kv_segment *segment, uint32_t first,
	const struct kv_row_list *list, struct kv_row_scale scales[ROWS_AT_ONCE], struct kv_row_codes *codes)
{
	const uint32_t n = segment->n_channels, group = segment->group_channels;

	find_scales(codec, segment, first / group, list->rows, list->n_rows, scales);
	*codes = (struct kv_row_codes){
		.rows = list->rows,
		.n_rows = list->n_rows,
		.offset = segment->offset + first * segment->bits / 8,
		.n = n - first < group ? n - first : group,
		.bits = segment->bits,
		.table = segment->table,
		.scales = scales,
	};
}

static void expand_codes(const struct kv_segment *segment, const struct kv_row_list *list, double *part)
{
	struct kv_row_scale scales[ROWS_AT_ONCE];
	struct kv_row_codes codes;

	for (uint32_t first = 0; first < segment->n_channels; first += codes.n) {
		describe_codes(list->codec, segment, first, list, scales, &codes);
		kv_row_kernels()->expand_codes(&codes, part + first, list->codec->prepared_dim);
	}
}

static void expand_values(
	const struct kv_row_codec *codec, const struct kv_segment *segment, const uint8_t *row, double *part)
{
	const uint32_t n = segment->n_channels, group = segment->group_channels;
	float values[KV_HEAD_DIM_MAX];

	segment_values(segment, row, values);
	for (uint32_t first = 0; first < n; first += group) {
		struct kv_row_scale scale;

		find_scales(codec, segment, first / group, &row, 1, &scale);
		kv_row_kernels()->expand_values(
			values + first, n - first < group ? n - first : group, &scale, part + first);
	}
}

static void expand_segment(const struct kv_segment *segment, const struct kv_row_list *list, double *part)
{
	const size_t stride = list->codec->prepared_dim;

	if (is_looked_up(segment)) {
		expand_codes(segment, list, part);
	} else {
		for (uint32_t r = 0; r < list->n_rows; r++)
			expand_values(list->codec, segment, list->rows[r], part + r * stride);
	}
	for (uint32_t r = 0; segment->factors && r < list->n_rows; r++) {
		for (uint32_t i = 0; i < segment->n_channels; i++)
			part[r * stride + i] *= (double)segment->factors[i];
	}
}

/* At most ROWS_AT_ONCE rows. */
static struct kv_row_tile expand_rows(const struct kv_row_list *list, double *expanded)
{
	const struct kv_row_codec *codec = list->codec;

	for (uint32_t s = 0; s < codec->n_segments; s++)
		expand_segment(&codec->segments[s], list, expanded + codec->segments[s].prepared_idx);
	return (struct kv_row_tile){
		.rows = expanded,
		.row_stride = codec->prepared_dim,
		.n_rows = list->n_rows,
		.n = codec->prepared_dim,
	};
}

void kv_row_codec_expand(const struct kv_row_codec *codec, const uint8_t *row, double *expanded)
{
	const struct kv_row_list one = { .codec = codec, .rows = &row, .n_rows = 1 };

	(void)expand_rows(&one, expanded);
}

static struct kv_row_tile tile_of_one(const struct kv_row_codec *codec, const double *expanded)
{
	return (struct kv_row_tile){ .rows = expanded, .n_rows = 1, .n = codec->prepared_dim };
}

double kv_row_codec_score(const struct kv_row_codec *codec, const double *q_prepared, const double *expanded)
{
	const struct kv_row_tile tile = tile_of_one(codec, expanded);
	double product;

	kv_row_kernels()->score(&tile, q_prepared, 0, 1, &product, 0);
	return product;
}

void kv_row_codec_accumulate(
	const struct kv_row_codec *codec, double weight, const double *expanded, double *acc)
{
	const struct kv_row_tile tile = tile_of_one(codec, expanded);

	kv_row_kernels()->accumulate(&tile, &weight, 0, 1, acc, 0);
}

/* True when the kernels in use take the rows of this codec as they are. */
static bool takes_codes(const struct kv_row_kernels *kernels, const struct kv_row_codec *codec)
{
	const struct kv_segment *segment = &codec->segments[0];

	return kernels->score_codes && codec->n_segments == 1 && segment->code == KV_CODE_TABLE &&
		segment->bits == 4 && segment->group_channels >= segment->n_channels && !segment->factors;
}

/* The next rows of the list: as many as the kernels take as codes, or as fit into `work` when expanded. */
static struct kv_row_list next_rows(const struct kv_row_list *list, uint32_t first)
{
	const uint32_t n_fit = KV_ROW_WORK_NUMBERS / list->codec->prepared_dim;
	const uint32_t n_max = n_fit < ROWS_AT_ONCE ? n_fit : ROWS_AT_ONCE, n_left = list->n_rows - first;

	return (struct kv_row_list){
		.codec = list->codec,
		.rows = list->rows + first,
		.n_rows = n_left < n_max ? n_left : n_max,
	};
}

void kv_row_list_score(const struct kv_row_list *list, const double *q_prepared, uint32_t n_queries,
	double *products, uint32_t products_stride)
{
	const struct kv_row_kernels *kernels = kv_row_kernels();
	const uint32_t dim = list->codec->prepared_dim;
	const bool has_codes = takes_codes(kernels, list->codec);
	struct kv_row_scale scales[ROWS_AT_ONCE];
	struct kv_row_codes codes;

	for (uint32_t first = 0; first < list->n_rows;) {
		const struct kv_row_list rows = next_rows(list, first);

		if (has_codes) {
			describe_codes(list->codec, &list->codec->segments[0], 0, &rows, scales, &codes);
			kernels->score_codes(
				&codes, q_prepared, dim, n_queries, products + first, products_stride);
		} else {
			const struct kv_row_tile tile = expand_rows(&rows, list->work);

			kernels->score(&tile, q_prepared, dim, n_queries, products + first, products_stride);
		}
		first += rows.n_rows;
	}
}

void kv_row_list_accumulate(const struct kv_row_list *list, const double *weights, uint32_t weights_stride,
	uint32_t n_queries, double *acc)
{
	const struct kv_row_kernels *kernels = kv_row_kernels();
	const uint32_t dim = list->codec->prepared_dim;
	const bool has_codes = takes_codes(kernels, list->codec);
	struct kv_row_scale scales[ROWS_AT_ONCE];
	struct kv_row_codes codes;

	for (uint32_t first = 0; first < list->n_rows;) {
		const struct kv_row_list rows = next_rows(list, first);

		if (has_codes) {
			describe_codes(list->codec, &list->codec->segments[0], 0, &rows, scales, &codes);
			kernels->accumulate_codes(
				&codes, weights + first, weights_stride, n_queries, acc, dim);
		} else {
			const struct kv_row_tile tile = expand_rows(&rows, list->work);

			kernels->accumulate(&tile, weights + first, weights_stride, n_queries, acc, dim);
		}
		first += rows.n_rows;
	}
}

void kv_row_codec_finish_output(const struct kv_row_codec *codec, double *acc, double factor, float *out)
{
	double sums[KV_HEAD_DIM_MAX];

	for (uint32_t i = 0; i < codec->head_dim; i++)
		sums[i] = 0;
	for (uint32_t s = 0; s < codec->n_segments; s++) {
		const struct kv_segment *segment = &codec->segments[s];
		double *part = acc + segment->prepared_idx;

		if (segment->rotation)
			kv_rotation_backward_f64(segment->rotation, part, part);
		if (segment->channels) {
			for (uint32_t i = 0; i < segment->n_channels; i++)
				sums[segment->channels[i]] += part[i];
		} else {
			for (uint32_t i = 0; i < segment->n_channels; i++)
				sums[i] += part[i];
		}
	}
	for (uint32_t i = 0; i < codec->head_dim; i++)
		out[i] = (float)(sums[i] * factor);
}
