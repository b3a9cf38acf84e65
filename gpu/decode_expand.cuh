/*
 * Rows of any format as numbers: 16 tokens of K or V, as they are stored, into float32 in shared memory, by
 * all threads of a block. What a row has only one of (its scale, where it has nothing else) is left to scores
 * and weights. Included by decode_rows.cu.
 */
#ifndef GPU_DECODE_EXPAND_CUH
#define GPU_DECODE_EXPAND_CUH

#include <cuda_fp16.h>

#include "gpu/device_rows.cuh"

#define THREADS 128u
#define TOKENS  KVG_TILE_TOKENS

static __device__ __forceinline__ float number_at(
	const uint8_t *row, uint32_t offset, uint32_t number, uint32_t g)
{
	return kvg_load_number(row + offset + g * kvg_number_bytes(number), number);
}

/* One scale for the whole row and nothing else: scores and weights can carry it instead of every element. */
static __device__ __forceinline__ bool is_plain(const struct kvg_codec *codec)
{
	const struct kvg_segment *segment = &codec->segments[0];

	return codec->n_segments == 1 && segment->zero_offset == KVG_NONE &&
		segment->outer_offset == KVG_NONE && segment->group_channels == segment->n_channels;
}

static __device__ __forceinline__ float plain_scale(
	const struct kvg_codec *codec, const uint8_t *raw, uint32_t token)
{
	const struct kvg_segment *segment = &codec->segments[0];

	return segment->scale_offset == KVG_NONE
		? 1.0f
		: number_at(raw + token * codec->row_bytes, segment->scale_offset, segment->scale_number, 0);
}

/* Tables of all segments of a codec, one behind the other: at most 256 numbers. */
static __device__ __forceinline__ void copy_tables(
	const struct kvg_tables *tables, const struct kvg_codec *codec, float *copy)
{
	for (uint32_t s = 0, at = 0; s < codec->n_segments; s++) {
		const uint32_t n = codec->segments[s].is_table ? 1u << codec->segments[s].bits : 0;

		/* Codes that name no number occur only where no row is: as numbers they do no harm. */
		for (uint32_t i = threadIdx.x; i < n; i += THREADS) {
			const float value = kvg_floats(tables, codec->segments[s].table)[i];

			copy[at + i] = kvg_is_finite(value) ? value : 0.0f;
		}
		at += n;
	}
}

static __device__ __forceinline__ float dense_number(const uint8_t *row, uint32_t number, uint32_t i)
{
	if (number == KVG_F32)
		return ((const float *)row)[i];
	if (number == KVG_BF16)
		return __uint_as_float((uint32_t)((const uint16_t *)row)[i] << 16);
	return __half2float(((const __half *)row)[i]);
}

/* 32, 64 or 128 threads beside each other on one row, 4, 2 or 1 rows at a time. */
static __device__ __forceinline__ uint32_t row_width(uint32_t n)
{
	return n <= 32 ? 32 : n <= 64 ? 64 : 128;
}

static __device__ __forceinline__ void expand_plain(const struct kvg_codec *codec, const float *table,
	const uint8_t *raw, uint32_t stride, float *expanded)
{
	const struct kvg_segment *segment = &codec->segments[0];
	const uint32_t n = segment->n_channels, bits = segment->bits, mask = (1u << bits) - 1;
	const uint32_t width = row_width(n), row_bytes = codec->row_bytes, step = THREADS / width;

	for (uint32_t i = threadIdx.x % width; i < n; i += width) {
		const uint32_t bit = i * bits, shift = bit & 7u;
		const uint8_t *at = raw + threadIdx.x / width * row_bytes + segment->offset + (bit >> 3);
		float *to = expanded + threadIdx.x / width * stride + i;

		if (!segment->is_table) {
			const uint8_t *row = raw + threadIdx.x / width * row_bytes + segment->offset;

			for (uint32_t t = threadIdx.x / width; t < TOKENS;
				t += step, row += step * row_bytes, to += step * stride)
				*to = dense_number(row, segment->number, i);
		} else if (shift + bits <= 8) {
#pragma unroll 4
			for (uint32_t t = threadIdx.x / width; t < TOKENS;
				t += step, at += step * row_bytes, to += step * stride)
				*to = table[at[0] >> shift & mask];
		} else {
#pragma unroll 4
			for (uint32_t t = threadIdx.x / width; t < TOKENS;
				t += step, at += step * row_bytes, to += step * stride)
				*to = table[((uint32_t)at[0] | (uint32_t)at[1] << 8) >> shift & mask];
		}
	}
}

/* Scale and zero of 16 rows, per segment and group: read once instead of once per element. */
#define GROUPS_MAX 8u

struct group_numbers {
	float2 at[KVG_SEGMENTS_MAX][TOKENS][GROUPS_MAX]; /* x: scales multiplied, y: zero */
};

static __device__ __forceinline__ float2 numbers_of(
	const struct kvg_segment *segment, const uint8_t *row, uint32_t g)
{
	float2 out = make_float2(1.0f, 0.0f);

	if (segment->scale_offset != KVG_NONE)
		out.x = number_at(row, segment->scale_offset, segment->scale_number, g);
	if (segment->outer_offset != KVG_NONE)
		out.x *= number_at(row, segment->outer_offset, segment->outer_number, 0);
	if (segment->zero_offset != KVG_NONE)
		out.y = number_at(row, segment->zero_offset, segment->zero_number, g);
	return out;
}

/* Tokens outside [lo, hi) get 0 twice, so that codes give 0 there: what lies there is not ours. */
static __device__ __forceinline__ void read_groups(const struct kvg_codec *codec, const uint8_t *raw,
	uint32_t lo, uint32_t hi, struct group_numbers *groups)
{
	for (uint32_t s = 0; s < codec->n_segments; s++) {
		const struct kvg_segment *segment = &codec->segments[s];
		const uint32_t n_groups =
			min((segment->n_channels + segment->group_channels - 1) / segment->group_channels,
				GROUPS_MAX);

		for (uint32_t i = threadIdx.x; i < TOKENS * n_groups; i += THREADS) {
			const uint32_t t = i / n_groups, g = i % n_groups;

			groups->at[s][t][g] = t >= lo && t < hi
				? numbers_of(segment, raw + t * codec->row_bytes, g)
				: make_float2(0.0f, 0.0f);
		}
	}
}

/* One segment of 16 rows in its own basis, without its constant factors: queries and outputs carry them. */
static __device__ __forceinline__ void expand_segment(const struct kvg_segment *segment, const float *table,
	const uint8_t *raw, uint32_t row_bytes, uint32_t lo, uint32_t hi, const float2 (*numbers)[GROUPS_MAX],
	uint32_t stride, float *expanded)
{
	const uint32_t n = segment->n_channels, bits = segment->bits, width = row_width(n);

	for (uint32_t i = threadIdx.x % width; i < n; i += width) {
		const uint32_t bit = i * bits, at = segment->offset + (bit >> 3), shift = bit & 7u;
		const uint32_t g = i / segment->group_channels, mask = (1u << bits) - 1;
		const bool is_wide = shift + bits > 8;

#pragma unroll 4
		for (uint32_t t = threadIdx.x / width; t < TOKENS; t += THREADS / width) {
			const uint8_t *row = raw + t * row_bytes;
			const bool is_seen = t >= lo && t < hi;
			float value = 0.0f;

			if (segment->is_table)
				value = table[((uint32_t)row[at] |
						      (is_wide ? (uint32_t)row[at + 1] << 8 : 0u)) >>
						shift &
					mask];
			else if (is_seen)
				value = number_at(row, segment->offset, segment->number, i);
			if (numbers) {
				const float2 own = g < GROUPS_MAX ? numbers[t][g]
					: is_seen                 ? numbers_of(segment, row, g)
								  : make_float2(0.0f, 0.0f);

				value = value * own.x + own.y;
			}
			expanded[t * stride + segment->prepared_idx + i] = value;
		}
	}
}

static __device__ __forceinline__ void expand(const struct kvg_codec *codec, const float *table,
	const uint8_t *raw, uint32_t lo, uint32_t hi, const struct group_numbers *groups, uint32_t stride,
	float *expanded)
{
	const bool is_simple = is_plain(codec);

	/* Numbers as they are may be anything where no token is. */
	if (is_simple && (codec->segments[0].is_table || (lo == 0 && hi == TOKENS))) {
		expand_plain(codec, table, raw, stride, expanded);
		return;
	}
	for (uint32_t s = 0; s < codec->n_segments; s++) {
		const struct kvg_segment *segment = &codec->segments[s];

		expand_segment(segment, table, raw, codec->row_bytes, lo, hi,
			is_simple ? NULL : groups->at[s], stride, expanded);
		table += segment->is_table ? 1u << segment->bits : 0;
	}
}

#endif
