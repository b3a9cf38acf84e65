/*
 * The basis of a codec's rows (core/format.h): the one that clients may have queries and outputs in. Segments
 * that are added to others have bases of their own; they are reached by way of the channels.
 */
#include <string.h>

#include "core/format.h"

static uint32_t channel_of(const struct kv_segment *segment, uint32_t i)
{
	return segment->channels ? segment->channels[i] : i;
}

/* The next segment that is added to others, or of those that are not, at `*idx` or behind it; NULL: none. */
static const struct kv_segment *next_segment(const struct kv_row_codec *codec, bool is_added, uint32_t *idx)
{
	while (*idx < codec->n_segments && codec->segments[*idx].is_added != is_added)
		(*idx)++;
	return *idx < codec->n_segments ? &codec->segments[*idx] : NULL;
}

static void forward(const struct kv_segment *segment, const double *x, double *part)
{
	for (uint32_t i = 0; i < segment->n_channels; i++)
		part[i] = x[channel_of(segment, i)];
	if (segment->rotation)
		kv_rotation_forward_f64(segment->rotation, part, part);
}

void kv_row_codec_to_basis(const struct kv_row_codec *codec, const double *x, double *y)
{
	const struct kv_segment *segment;

	for (uint32_t s = 0, first = 0; (segment = next_segment(codec, false, &s)) != NULL; s++) {
		forward(segment, x, y + first);
		first += segment->n_channels;
	}
}

void kv_row_codec_from_basis(const struct kv_row_codec *codec, const double *y, double *x)
{
	const struct kv_segment *segment;
	double part[KV_HEAD_DIM_MAX];

	for (uint32_t s = 0, first = 0; (segment = next_segment(codec, false, &s)) != NULL; s++) {
		memcpy(part, y + first, segment->n_channels * sizeof(*part));
		if (segment->rotation)
			kv_rotation_backward_f64(segment->rotation, part, part);
		for (uint32_t i = 0; i < segment->n_channels; i++)
			x[channel_of(segment, i)] = part[i];
		first += segment->n_channels;
	}
}

void kv_row_codec_basis_row(const struct kv_row_codec *codec, uint32_t row_idx, float *row)
{
	const struct kv_segment *segment;
	float part[KV_HEAD_DIM_MAX];

	KV_ASSERT(row_idx < codec->head_dim);
	memset(row, 0, codec->head_dim * sizeof(*row));
	for (uint32_t s = 0, first = 0; (segment = next_segment(codec, false, &s)) != NULL; s++) {
		const uint32_t i = row_idx - first;

		if (row_idx < first || i >= segment->n_channels) {
			first += segment->n_channels;
			continue;
		}
		if (!segment->rotation) {
			row[channel_of(segment, i)] = 1;
			return;
		}
		kv_rotation_matrix(segment->rotation, i, 1, part);
		for (uint32_t c = 0; c < segment->n_channels; c++)
			row[channel_of(segment, c)] = part[c];
		return;
	}
}

void kv_row_codec_prepare_rotated(const struct kv_row_codec *codec, const float *q, double *q_prepared)
{
	const struct kv_segment *segment;
	double y[KV_HEAD_DIM_MAX], x[KV_HEAD_DIM_MAX];

	for (uint32_t i = 0; i < codec->head_dim; i++)
		y[i] = (double)q[i];
	for (uint32_t s = 0, first = 0; (segment = next_segment(codec, false, &s)) != NULL; s++) {
		memcpy(q_prepared + segment->prepared_idx, y + first, segment->n_channels * sizeof(*y));
		first += segment->n_channels;
	}
	if (codec->prepared_dim == codec->head_dim)
		return;
	kv_row_codec_from_basis(codec, y, x);
	for (uint32_t s = 0; (segment = next_segment(codec, true, &s)) != NULL; s++)
		forward(segment, x, q_prepared + segment->prepared_idx);
}

/* What segments that are added to others come to, in the channels' own basis. Uses their parts of acc up. */
static void sum_of_added(const struct kv_row_codec *codec, double *acc, double *x)
{
	const struct kv_segment *segment;

	memset(x, 0, codec->head_dim * sizeof(*x));
	for (uint32_t s = 0; (segment = next_segment(codec, true, &s)) != NULL; s++) {
		double *part = acc + segment->prepared_idx;

		if (segment->rotation)
			kv_rotation_backward_f64(segment->rotation, part, part);
		for (uint32_t i = 0; i < segment->n_channels; i++)
			x[channel_of(segment, i)] += part[i];
	}
}

void kv_row_codec_finish_rotated(const struct kv_row_codec *codec, double *acc, double factor, float *out)
{
	const struct kv_segment *segment;
	double y[KV_HEAD_DIM_MAX] = { 0 }, x[KV_HEAD_DIM_MAX];

	if (codec->prepared_dim > codec->head_dim) {
		sum_of_added(codec, acc, x);
		kv_row_codec_to_basis(codec, x, y);
	}
	for (uint32_t s = 0, first = 0; (segment = next_segment(codec, false, &s)) != NULL; s++) {
		for (uint32_t i = 0; i < segment->n_channels; i++)
			out[first + i] = (float)((y[first + i] + acc[segment->prepared_idx + i]) * factor);
		first += segment->n_channels;
	}
}
