/*
 * After attention: partial results are merged by log-sum-exp in a fixed order, rotated back and stored. An
 * output reaches PCIe once.
 */
#include "gpu/decode_parts.cuh"
#include "gpu/decode_query.cuh"
#include "gpu/device_asm.cuh"
#include "gpu/device_rows.cuh"
#include "gpu/launch.cuh"
#include "gpu/variants.h"

#define THREADS 128u
#define WARPS   (THREADS / 32u)
#define LOG2_E  1.4426950408889634f
#define LN_2    0.6931471805599453f

struct finish_scratch {
	float acc[2 * KVG_DIM_MAX];
	float turned[2 * KVG_DIM_MAX];
	float out[KVG_DIM_MAX];
	float exact[2 * KVG_DIM_MAX]; /* head_dim numbers; then work memory of turn_forward() */
	float weights[THREADS], weighted[THREADS], largest[WARPS];
	uint32_t slots[THREADS];
	__align__(16) uint8_t stored[KVG_DIM_MAX * 4];
};

/* Partial results of one kind: weighted sums, maxima and sums of weights, a row of them for every slot. */
struct partials {
	const float *sums, *ml;
	uint32_t stride;
};

/* What the parts of a query come to: maximum in log2 units, sum of weights, sums of a thread's channels. */
struct merged {
	float max, sum, sums[4];
};

/* Parts are taken in their order, 128 weights at a time. */
static __device__ struct merged merge(const struct partials &partials, const struct parts *parts,
	uint32_t n_heads, uint32_t head, uint32_t v_dim, struct finish_scratch *s)
{
	float max = -INFINITY, sum = 0, sums[4] = { 0, 0, 0, 0 };

	for (uint32_t first = 0; first < parts->n; first += THREADS) {
		const uint32_t n = min(parts->n - first, THREADS);
		float2 own = make_float2(-INFINITY, 0);

		if (threadIdx.x < n) {
			const uint64_t at = (uint64_t)part_slot(parts, first + threadIdx.x) * n_heads + head;

			own = *(const float2 *)(partials.ml + at * 2);
			s->slots[threadIdx.x] = (uint32_t)at;
		}

		float largest = own.x;

		for (uint32_t half = 16; half >= 1; half /= 2)
			largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, half));
		if (kvg_lane() == 0)
			s->largest[threadIdx.x / 32] = largest;
		__syncthreads();
		largest = fmaxf(fmaxf(s->largest[0], s->largest[1]), fmaxf(s->largest[2], s->largest[3]));

		const float max_new = fmaxf(max, largest), shrink = exp2f(max - max_new);
		const float weight = exp2f(own.x - max_new);

		s->weights[threadIdx.x] = weight;
		s->weighted[threadIdx.x] = weight * own.y;
		__syncthreads();
		max = max_new;
		sum *= shrink;
		for (uint32_t k = 0; k < 4; k++)
			sums[k] *= shrink;
		for (uint32_t i = 0; i < n; i++)
			sum += s->weighted[i];
		for (uint32_t k = 0; k < 4; k++) {
			const uint32_t channel = threadIdx.x + k * THREADS;

			if (channel >= v_dim)
				continue;
#pragma unroll 8
			for (uint32_t i = 0; i < n; i++)
				sums[k] += s->weights[i] *
					partials.sums[(uint64_t)s->slots[i] * partials.stride + channel];
		}
		__syncthreads();
	}
	return { max, sum, { sums[0], sums[1], sums[2], sums[3] } };
}

/* The merged sums of a thread's channels, times `factor`. */
static __device__ __forceinline__ void store_sums(
	const struct merged &merged, float factor, uint32_t dim, float *to)
{
	for (uint32_t k = 0; k < 4; k++) {
		if (threadIdx.x + k * THREADS < dim)
			to[threadIdx.x + k * THREADS] = merged.sums[k] * factor;
	}
}

/*
 * acc[] = the weighted sum of pages over the denominator, exact[] that of ring blocks; returns log2 of the
 * softmax denominator. `sink` is one more logit, in log2 units, or -infinity.
 */
static __device__ float merge_all(const struct kvg_decode_params *params, const struct kvg_codec *codec,
	uint32_t row_idx, uint32_t virtual_head, uint32_t head, float sink, struct finish_scratch *s)
{
	const uint32_t item = row_idx * params->tables.kv_heads * params->n_chunks + virtual_head;
	const struct partials pages = { params->partials, params->partials_ml, params->v_dim_max };
	const struct parts parts = find_parts(params, &params->rows[row_idx], virtual_head, item, false);
	const struct merged merged = merge(pages, &parts, params->n_heads, head, codec->prepared_dim, s);
	struct merged exact = { -INFINITY, 0, { 0, 0, 0, 0 } };

	if (params->exact_rows) {
		const struct partials rings = { params->exact_partials, params->exact_partials_ml,
			codec->head_dim };
		const struct parts exact_parts =
			find_parts(params, &params->exact_rows[row_idx], virtual_head, item, true);

		exact = merge(rings, &exact_parts, params->n_heads, head, codec->head_dim, s);
	}

	const float top = fmaxf(fmaxf(merged.max, exact.max), sink), shrink = exp2f(merged.max - top);
	const float exact_shrink = exp2f(exact.max - top);
	const float sum = merged.sum * shrink + exact.sum * exact_shrink + exp2f(sink - top);

	store_sums(merged, shrink / (params->v_bits != 0 ? sum * params->v_scale : sum), codec->prepared_dim,
		s->acc);
	if (params->exact_rows)
		store_sums(exact, exact_shrink / sum, codec->head_dim, s->exact);
	return top + log2f(sum);
}

/*
 * acc[] in the segments' bases to out[] in the channels'. A warp turns one segment. Where the output is
 * wanted in the rows' basis, only segments that are added to others: those that make the basis up are in it.
 */
static __device__ void turn_back(const struct kvg_tables *tables, const struct kvg_codec *codec,
	bool is_rotated, struct finish_scratch *s)
{
	const uint32_t warp = threadIdx.x / 32;

	if (warp < codec->n_segments) {
		const struct kvg_segment *segment = &codec->segments[warp];
		float *from = s->acc + segment->prepared_idx, *to = s->turned + segment->prepared_idx;

		if (segment->factors != KVG_NONE) {
			for (uint32_t i = kvg_lane(); i < segment->n_channels; i += 32)
				from[i] *= kvg_floats(tables, segment->factors)[i];
			__syncwarp();
		}
		if (segment->rotation != KVG_NONE && (segment->is_added || !is_rotated)) {
			kvg_rotate(tables, &tables->rotations[segment->rotation], true, from, to);
		} else {
			for (uint32_t i = kvg_lane(); i < segment->n_channels; i += 32)
				to[i] = from[i];
		}
	}
	for (uint32_t i = threadIdx.x; i < codec->head_dim; i += THREADS)
		s->out[i] = 0;
	__syncthreads();
	for (uint32_t k = 0; k < codec->n_segments; k++) {
		const struct kvg_segment *segment = &codec->segments[k];

		if (is_rotated && !segment->is_added)
			continue;
		for (uint32_t i = threadIdx.x; i < segment->n_channels; i += THREADS)
			s->out[channel_of(tables, segment, i)] += s->turned[segment->prepared_idx + i];
		__syncthreads();
	}
}

/*
 * What turn_back() left in the rows' basis to out[], and, `has_rest`, what it and ring blocks left there in
 * the channels' own. Uses acc[] and exact[] up.
 */
static __device__ void turn_forward(const struct kvg_tables *tables, const struct kvg_codec *codec,
	bool has_rest, struct finish_scratch *s)
{
	const uint32_t warp = threadIdx.x / 32, lane = kvg_lane();

	__syncthreads();
	if (has_rest && warp < codec->n_segments && !codec->segments[warp].is_added) {
		const struct kvg_segment *segment = &codec->segments[warp];
		float *from = s->acc + segment->prepared_idx, *sum = s->turned + segment->prepared_idx;
		float *to = s->exact + segment->prepared_idx;

		for (uint32_t i = lane; i < segment->n_channels; i += 32)
			from[i] = s->out[channel_of(tables, segment, i)];
		__syncwarp();
		if (segment->rotation != KVG_NONE)
			kvg_rotate(tables, &tables->rotations[segment->rotation], false, from, to);
		for (uint32_t i = lane; i < segment->n_channels; i += 32)
			sum[i] += segment->rotation != KVG_NONE ? to[i] : from[i];
	}
	__syncthreads();
	for (uint32_t k = 0, first = 0; k < codec->n_segments; k++) {
		const struct kvg_segment *segment = &codec->segments[k];

		if (segment->is_added)
			continue;
		for (uint32_t i = threadIdx.x; i < segment->n_channels; i += THREADS)
			s->out[first + i] = s->turned[segment->prepared_idx + i];
		first += segment->n_channels;
	}
}

/* What a query's slope gives the token from which the rows kernel counts distances. */
static __device__ __forceinline__ double favour_of(const struct kvg_tables *tables,
	const struct kvg_layer *layer, const struct kvg_decode_row *row, uint32_t q_head)
{
	const float slope = layer->alibi == KVG_NONE ? 0.0f : kvg_floats(tables, layer->alibi)[q_head];

	return slope < 0 ? -(double)slope * (double)row->farthest : 0.0;
}

static __global__ void __launch_bounds__(THREADS)
	finish_kernel(const __grid_constant__ struct kvg_decode_params params)
{
	__shared__ struct finish_scratch s;
	const struct kvg_tables *tables = &params.tables;
	const uint32_t row_idx = blockIdx.x / tables->q_heads, q_head = blockIdx.x % tables->q_heads;
	const uint32_t group = tables->q_heads / tables->kv_heads, in_group = q_head % group;
	const uint32_t virtual_head = q_head / group * params.n_chunks + in_group / KVG_HEADS_MAX;
	const struct kvg_decode_row *row = &params.rows[row_idx];
	const struct kvg_decode_op *op = &params.ops[row->op_idx];
	const struct kvg_layer *layer = &tables->layers[op->layer];
	const struct kvg_codec *codec = kvg_codec_of(tables, layer, true, q_head / group);
	const uint64_t query = (uint64_t)row->row * tables->q_heads + q_head;
	const uint32_t d = codec->head_dim, bytes = kvg_number_bytes(op->out_dtype);
	const bool has_tokens =
		row->n_work != 0 || (params.exact_rows && params.exact_rows[row_idx].n_work != 0);
	const bool has_offset = has_tokens && layer->k_center != KVG_NONE && layer->softcap <= 0;
	const bool has_sink = layer->sinks != KVG_NONE && !(op->flags & KVG_NO_SINKS);
	float offset = 0, log2_sum;

	tiles::wait_for_previous();
	if (has_offset && (op->lse || has_sink))
		offset = params.q_offsets[(uint64_t)row_idx * tables->q_heads + q_head];

	/* What all logits were made without: in float64, since it may be large, and a sink as large. */
	const double common = (double)offset + (has_tokens ? favour_of(tables, layer, row, q_head) : 0.0);
	const float sink = has_sink
		? (float)((double)kvg_floats(tables, layer->sinks)[q_head] - common) * LOG2_E
		: -INFINITY;

	if (!has_tokens) {
		for (uint32_t i = threadIdx.x; i < d; i += THREADS)
			s.out[i] = 0;
		log2_sum = sink;
	} else {
		const bool is_rotated = (op->flags & KVG_OUT_ROTATED) != 0;

		log2_sum =
			merge_all(&params, codec, row_idx, virtual_head, in_group % KVG_HEADS_MAX, sink, &s);
		__syncthreads();
		turn_back(tables, codec, is_rotated, &s);
		for (uint32_t i = threadIdx.x; i < d && params.exact_rows; i += THREADS)
			s.out[i] += s.exact[i];
		if (is_rotated)
			turn_forward(tables, codec,
				params.exact_rows || codec->prepared_dim > codec->head_dim, &s);
	}

	uint8_t *out = op->out + query * d * bytes;
	const float lse = (float)((double)(log2_sum * LN_2) + common);
	bool is_bad = has_tokens && !kvg_is_finite(lse); /* what float32 cannot hold is no answer */

	__syncthreads();
	for (uint32_t i = threadIdx.x; i < d; i += THREADS)
		is_bad |= !kvg_is_finite(s.out[i]);
	if (is_bad)
		flag_row(&params, op, row);
	if (((uintptr_t)out & 15u) != 0) {
		for (uint32_t i = threadIdx.x; i < d; i += THREADS)
			kvg_store_number(s.out[i], op->out_dtype, out + i * bytes);
	} else {
		/* Host memory takes 16 bytes as easily as 2. */
		for (uint32_t i = threadIdx.x; i < d; i += THREADS)
			kvg_store_number(s.out[i], op->out_dtype, s.stored + i * bytes);
		__syncthreads();
		for (uint32_t i = threadIdx.x; i < d * bytes / 16; i += THREADS)
			((uint4 *)out)[i] = ((const uint4 *)s.stored)[i];
	}
	if (op->lse && threadIdx.x == 0)
		op->lse[query] = lse;
}

cudaError_t kvg_decode_finish_launch(const struct kvg_decode_params *params, cudaStream_t stream)
{
	const uint32_t n_blocks = params->n_rows * params->tables.q_heads;

	if (n_blocks == 0)
		return cudaSuccess;
	return kvg_launch(
		finish_kernel, { dim3(n_blocks), THREADS, 0, stream, params->is_dependent != 0 }, params);
}

cudaError_t kvg_decode_finish_load(void)
{
	struct cudaFuncAttributes attributes;

	return cudaFuncGetAttributes(&attributes, finish_kernel);
}
