/*
 * Attention over rows of any format: K and V rows are expanded into float32 in shared memory, 16 tokens at a
 * time, once for up to eight query heads; scores and sums are float32. One thread block per piece of (query
 * row, virtual head); the finish kernel merges the pieces. Bound: instructions (a dozen per stored element),
 * not bytes.
 */
#include <cuda_fp16.h>

#include "gpu/decode_common.cuh"
#include "gpu/device_rows.cuh"
#include "gpu/variants.h"

#define THREADS 128u
#define TOKENS  KVG_TILE_TOKENS
#define LOG2_E  1.4426950408889634f
#define LN_2    0.6931471805599453f
#define PAD     4u /* floats behind an expanded row: 16-byte reads of 8 rows fall on different banks */

/* 16 rows as they are stored: contiguous, and a multiple of 16 bytes at a multiple of 16. Arrives
 * asynchronously. */
static __device__ __forceinline__ void fetch(const uint8_t *pages, const struct kvg_tables *tables,
	const uint32_t *table, uint32_t row_bytes, uint32_t kv_head, uint32_t token, uint8_t *raw)
{
	const uint64_t block = table[token / tables->block_size];
	const uint8_t *src = pages +
		((block * tables->kv_heads + kv_head) * tables->block_size + token % tables->block_size) *
			row_bytes;
	const uint32_t to = tiles::shared_address(raw);

	for (uint32_t i = threadIdx.x; i < row_bytes * TOKENS / 16; i += THREADS)
		tiles::copy_16_async(to + 16 * i, src + 16 * i);
}

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

/* A logit in log2 units, capped and sloped: core/attention.h has the order. */
static __device__ __forceinline__ float bend(
	const struct kvg_layer *layer, float offset, float slope, float distance, float score)
{
	float x = score * LN_2;

	if (layer->softcap > 0)
		x = layer->softcap * tanhf((x + offset) / layer->softcap);
	return (x + slope * distance) * LOG2_E;
}

/* What a thread block works on: tiles [begin, end) of one (query row, virtual head), counted through both
 * ranges. */
struct piece {
	const struct kvg_decode_row *row;
	const struct kvg_decode_op *op;
	const struct kvg_layer *layer;
	uint32_t kv_head, q_head, n_heads; /* first query head, and how many */
	uint32_t n_first, tile_low;        /* tiles of the first tokens; what is added behind them */
	uint32_t begin, end;
};

static __device__ __forceinline__ struct piece find_piece(const struct kvg_decode_params &params)
{
	const struct kvg_tables *tables = &params.tables;
	const uint32_t group = tables->q_heads / tables->kv_heads;
	struct piece out;

	out.row = &params.rows[tiles::find_row(params.rows, params.n_rows, blockIdx.x)];
	out.op = &params.ops[out.row->op_idx];
	out.layer = &tables->layers[out.op->layer];

	const uint32_t rel = blockIdx.x - out.row->work_first, n_tiles = out.row->piece_tokens / TOKENS;
	const uint32_t virtual_head = rel / out.row->n_work,
		       first = virtual_head % params.n_chunks * KVG_HEADS_MAX;

	out.kv_head = virtual_head / params.n_chunks;
	out.q_head = out.kv_head * group + first;
	out.n_heads = min(group - first, KVG_HEADS_MAX);
	/* Tiles of the first tokens, then those from token_lo's on, as if they were one behind the other. */
	out.n_first = (out.row->first_hi + TOKENS - 1) / TOKENS;
	out.tile_low = out.row->token_lo / TOKENS - out.n_first;
	out.begin = rel % out.row->n_work * n_tiles;
	out.end = min((out.row->token_hi + TOKENS - 1) / TOKENS - out.tile_low, out.begin + n_tiles);
	return out;
}

static __device__ __forceinline__ uint32_t first_token(const struct piece &piece, uint32_t tile)
{
	return (tile < piece.n_first ? tile : tile + piece.tile_low) * TOKENS;
}

/* K and V rows of a tile, one behind the other. */
static __device__ __forceinline__ void fetch_tile(const struct piece &piece, const struct kvg_tables *tables,
	const struct kvg_codec *codecs, uint32_t tile, uint32_t raw_bytes, uint8_t *raw)
{
	const uint32_t token = first_token(piece, tile);

	fetch(piece.layer->k, tables, piece.op->table, codecs[0].row_bytes, piece.kv_head, token, raw);
	fetch(piece.layer->v, tables, piece.op->table, codecs[1].row_bytes, piece.kv_head, token,
		raw + raw_bytes);
}

static __device__ __forceinline__ void copy_codecs(
	const struct piece &piece, const struct kvg_tables *tables, struct kvg_codec *codecs)
{
	for (uint32_t i = threadIdx.x; i < sizeof(struct kvg_codec) / 4; i += THREADS) {
		((uint32_t *)&codecs[0])[i] =
			((const uint32_t *)kvg_codec_of(tables, piece.layer, false, piece.kv_head))[i];
		((uint32_t *)&codecs[1])[i] =
			((const uint32_t *)kvg_codec_of(tables, piece.layer, true, piece.kv_head))[i];
	}
}

/* [H, k_dim]; zeros where there are fewer heads. */
template <int H>
static __device__ __forceinline__ void load_queries(
	const struct kvg_decode_params &params, const struct piece &piece, uint32_t k_dim, float *q)
{
	const uint64_t first = (uint64_t)(piece.row - params.rows) * params.tables.q_heads + piece.q_head;

	for (uint32_t i = threadIdx.x; i < H * k_dim; i += THREADS) {
		const uint32_t h = i / k_dim;

		q[i] = h < piece.n_heads ? params.q_prepared[(first + h) * params.k_dim_max + i % k_dim]
					 : 0.0f;
	}
}

/* What the layer's options do to the logits of one query. */
struct bending {
	bool is_on;
	float offset, slope;
};

static __device__ __forceinline__ struct bending find_bending(
	const struct kvg_decode_params &params, const struct piece &piece, uint32_t head)
{
	const struct kvg_layer *layer = piece.layer;
	struct bending out = { layer->softcap > 0 || layer->alibi != KVG_NONE, 0.0f, 0.0f };

	if (!out.is_on || head >= piece.n_heads)
		return out;
	if (layer->softcap > 0 && layer->k_center != KVG_NONE)
		out.offset = params.q_offsets[(uint64_t)(piece.row - params.rows) * params.tables.q_heads +
			piece.q_head + head];
	if (layer->alibi != KVG_NONE)
		out.slope = kvg_floats(&params.tables, layer->alibi)[piece.q_head + head];
	return out;
}

static __device__ __forceinline__ float dot(const float4 *a, const float4 *b, uint32_t n_quads)
{
	float s0 = 0, s1 = 0, s2 = 0, s3 = 0;

#pragma unroll 4
	for (uint32_t i = 0; i < n_quads; i++) {
		const float4 x = a[i], y = b[i];

		s0 = fmaf(x.x, y.x, s0);
		s1 = fmaf(x.y, y.y, s1);
		s2 = fmaf(x.z, y.z, s2);
		s3 = fmaf(x.w, y.w, s3);
	}
	return (s0 + s1) + (s2 + s3);
}

/* Over the tokens of a tile, which are 16 lanes. */
static __device__ __forceinline__ float max_over_tokens(float x)
{
	for (uint32_t half = TOKENS / 2; half >= 1; half /= 2)
		x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, half));
	return x;
}

static __device__ __forceinline__ float add_over_tokens(float x)
{
	for (uint32_t half = TOKENS / 2; half >= 1; half /= 2)
		x += __shfl_xor_sync(0xFFFFFFFFu, x, half);
	return x;
}

/* The weighted values of a tile join the sums of a thread's channels. */
template <int NV, int H>
static __device__ __forceinline__ void add_values(const float *v_expanded, uint32_t v_dim,
	const float (*weights)[H], const float *shrink, float (&acc)[NV][H])
{
#pragma unroll
	for (int k = 0; k < NV; k++) {
		const uint32_t channel = threadIdx.x + (uint32_t)k * THREADS;

		if (channel >= v_dim)
			continue;
#pragma unroll
		for (int h = 0; h < H; h++)
			acc[k][h] *= shrink[h];
#pragma unroll 4
		for (uint32_t t = 0; t < TOKENS; t++) {
			const float value = v_expanded[t * (v_dim + PAD) + channel];
#pragma unroll
			for (int h = 0; h < H; h += 4) {
				const float4 w = *(const float4 *)&weights[t][h];

				acc[k][h] = fmaf(w.x, value, acc[k][h]);
				acc[k][h + 1] = fmaf(w.y, value, acc[k][h + 1]);
				acc[k][h + 2] = fmaf(w.z, value, acc[k][h + 2]);
				acc[k][h + 3] = fmaf(w.w, value, acc[k][h + 3]);
			}
		}
	}
}

template <int NV, int H>
static __device__ __forceinline__ void write_sums(
	const struct kvg_decode_params &params, uint32_t n_heads, uint32_t v_dim, const float (&acc)[NV][H])
{
	const uint64_t slot = (uint64_t)blockIdx.x * params.n_heads;

#pragma unroll
	for (int k = 0; k < NV; k++) {
		const uint32_t channel = threadIdx.x + (uint32_t)k * THREADS;
#pragma unroll
		for (int h = 0; h < H; h++) {
			if (channel < v_dim && (uint32_t)h < n_heads)
				params.partials[(slot + h) * params.v_dim_max + channel] = acc[k][h];
		}
	}
}

/* Expanded rows of a tile; every thread waits for them. */
static __device__ __forceinline__ void expand_tile(const struct kvg_codec *codecs, const float (*tables)[256],
	const uint8_t *raw, uint32_t raw_bytes, uint32_t lo, uint32_t hi, struct group_numbers *groups,
	float *k, float *v)
{
	const bool k_is_plain = is_plain(&codecs[0]), v_is_plain = is_plain(&codecs[1]);

	if (!k_is_plain || !v_is_plain) {
		if (!k_is_plain)
			read_groups(&codecs[0], raw, lo, hi, &groups[0]);
		if (!v_is_plain)
			read_groups(&codecs[1], raw + raw_bytes, lo, hi, &groups[1]);
		__syncthreads();
	}
	expand(&codecs[0], tables[0], raw, lo, hi, &groups[0], codecs[0].prepared_dim + PAD, k);
	expand(&codecs[1], tables[1], raw + raw_bytes, lo, hi, &groups[1], codecs[1].prepared_dim + PAD, v);
	__syncthreads();
}

/* A thread's score; with four heads two threads share one, a half of the channels each. */
template <int H> struct seat {
	static constexpr uint32_t PARTS = 8 / H;

	uint32_t token, head, part;
	struct bending bending;
	float max, sum;

	/* The token's logit, -infinity where nobody sees it. */
	__device__ __forceinline__ float score(const struct piece &piece, const struct kvg_codec *codec,
		const float *q, const float *k_expanded, const uint8_t *raw, uint32_t at, bool is_seen) const
	{
		const uint32_t k_dim = codec->prepared_dim, n_quads = k_dim / 4 / PARTS;
		float x = dot((const float4 *)(q + head * k_dim) + part * n_quads,
			(const float4 *)(k_expanded + token * (k_dim + PAD)) + part * n_quads, n_quads);

		if (PARTS == 2)
			x += __shfl_xor_sync(0xFFFFFFFFu, x, TOKENS);
		if (is_plain(codec))
			x *= plain_scale(codec, raw, token);
		if (bending.is_on)
			x = bend(piece.layer, bending.offset, bending.slope,
				(float)(at + token) - (float)(piece.row->token_hi - 1), x);
		return is_seen ? x : -INFINITY;
	}

	/* The weight against the largest score so far; what was summed before shrinks by `factor`. */
	__device__ __forceinline__ float weigh(float score, float &factor)
	{
		/* A tile has at least one token, so the maximum is finite from the first one on. */
		const float max_new = fmaxf(max, max_over_tokens(score)), weight = exp2f(score - max_new);

		factor = exp2f(max - max_new);
		sum = sum * factor + add_over_tokens(weight);
		max = max_new;
		return weight;
	}
};

/* NV: accumulators of 128 channels each; H: query heads, 4 or 8. */
template <int NV, int H>
static __global__ void __launch_bounds__(THREADS, 5)
	rows_kernel(const __grid_constant__ struct kvg_decode_params params)
{
	KVG_DYNAMIC_SHARED(memory, 16);
	__shared__ __align__(16) float weights[TOKENS][H];
	__shared__ float shrink[H], numbers[2][256];
	__shared__ struct kvg_codec codecs[2];
	__shared__ struct group_numbers groups[2];
	const struct kvg_tables *tables = &params.tables;
	const struct piece piece = find_piece(params);

	copy_codecs(piece, tables, codecs);
	__syncthreads();
	copy_tables(tables, &codecs[0], numbers[0]);
	copy_tables(tables, &codecs[1], numbers[1]);

	const uint32_t raw_bytes = TOKENS * params.raw_bytes_max, v_dim = codecs[1].prepared_dim;
	float *q = (float *)(memory + 4 * raw_bytes), *k_expanded = q + H * params.k_dim_max;
	float *v_expanded = k_expanded + TOKENS * (params.k_dim_max + PAD);
	const bool v_is_plain = is_plain(&codecs[1]);
	uint32_t buffer = 0;
	struct seat<H> seat;
	float acc[NV][H];

	for (int k = 0; k < NV; k++)
		for (int h = 0; h < H; h++)
			acc[k][h] = 0;
	fetch_tile(piece, tables, codecs, piece.begin, raw_bytes, memory);
	tiles::wait_for_previous();
	tiles::let_next_begin();
	seat.token = threadIdx.x % TOKENS;
	seat.head = threadIdx.x / (TOKENS * seat.PARTS);
	seat.part = threadIdx.x / TOKENS % seat.PARTS;
	seat.bending = find_bending(params, piece, seat.head);
	seat.max = -INFINITY;
	seat.sum = 0;
	load_queries<H>(params, piece, codecs[0].prepared_dim, q);
	for (uint32_t tile = piece.begin; tile < piece.end; tile++, buffer ^= 1) {
		const bool is_first = tile < piece.n_first;
		const uint32_t at = first_token(piece, tile);
		const uint32_t lo = !is_first && piece.row->token_lo > at ? piece.row->token_lo - at : 0;
		const uint32_t hi = min((is_first ? piece.row->first_hi : piece.row->token_hi) - at, TOKENS);
		const bool is_seen = seat.token >= lo && seat.token < hi;
		const uint8_t *raw = memory + 2 * buffer * raw_bytes;
		float factor;

		tiles::wait_for_copies();
		__syncthreads();
		if (tile + 1 < piece.end)
			fetch_tile(piece, tables, codecs, tile + 1, raw_bytes,
				memory + 2 * (buffer ^ 1) * raw_bytes);
		expand_tile(codecs, numbers, raw, raw_bytes, lo, hi, groups, k_expanded, v_expanded);

		const float score = seat.score(piece, &codecs[0], q, k_expanded, raw, at, is_seen);
		const float weight = seat.weigh(score, factor);

		if (seat.part == 0)
			weights[seat.token][seat.head] = !is_seen ? 0.0f
				: v_is_plain ? weight * plain_scale(&codecs[1], raw + raw_bytes, seat.token)
					     : weight;
		if (seat.token == 0 && seat.part == 0)
			shrink[seat.head] = factor;
		__syncthreads();
		add_values<NV, H>(v_expanded, v_dim, weights, shrink, acc);
	}
	write_sums<NV, H>(params, piece.n_heads, v_dim, acc);
	if (seat.token == 0 && seat.part == 0 && seat.head < piece.n_heads) {
		float *out = params.partials_ml + ((uint64_t)blockIdx.x * params.n_heads + seat.head) * 2;

		out[0] = seat.max;
		out[1] = seat.sum;
	}
}

typedef void (*kernel)(const struct kvg_decode_params);

static const struct {
	uint32_t v_dim_max, n_heads_max;
	kernel run;
} variants[] = {
	{ 128, 4, rows_kernel<1, 4> },
	{ 128, 8, rows_kernel<1, 8> },
	{ 256, 4, rows_kernel<2, 4> },
	{ 256, 8, rows_kernel<2, 8> },
	{ 512, 4, rows_kernel<4, 4> },
	{ 512, 8, rows_kernel<4, 8> },
};

#define SHARED_BYTES_MAX (200 * 1024)

cudaError_t kvg_decode_rows_launch(const struct kvg_decode_params *params, cudaStream_t stream)
{
	if (params->n_work == 0)
		return cudaSuccess;
	for (const auto &variant : variants) {
		if (params->v_dim_max > variant.v_dim_max || params->n_heads > variant.n_heads_max)
			continue;

		const size_t bytes = 4 * TOKENS * params->raw_bytes_max +
			sizeof(float) *
				(variant.n_heads_max * params->k_dim_max +
					TOKENS * (params->k_dim_max + params->v_dim_max + 2 * PAD));

		return kvg_launch(variant.run,
			{ dim3(params->n_work), THREADS, bytes, stream, params->is_dependent != 0 }, params);
	}
	return cudaErrorInvalidValue;
}

cudaError_t kvg_decode_rows_load(void)
{
	for (const auto &variant : variants) {
		const cudaError_t error = cudaFuncSetAttribute(
			variant.run, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES_MAX);

		if (error != cudaSuccess)
			return error;
	}
	return cudaSuccess;
}
