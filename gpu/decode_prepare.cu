/*
 * Before attention: queries are rotated and laid out for the kernel that reads them. A query reaches PCIe
 * once.
 */
#include "gpu/decode_query.cuh"
#include "gpu/device_asm.cuh"
#include "gpu/device_rows.cuh"
#include "gpu/launch.cuh"
#include "gpu/variants.h"

#define THREADS 128u
#define WARPS   (THREADS / 32u)
#define LOG2_E  1.4426950408889634f

struct prepare_scratch {
	float q[KVG_HEADS_MAX][KVG_DIM_MAX]; /* as they came; tiles: rotated */
	float from[WARPS][KVG_DIM_MAX];
	float to[WARPS][KVG_DIM_MAX];
	float largest[WARPS];
};

/* One warp: query `head` into q; flags it when a number is not finite. */
static __device__ void load_query(const struct kvg_decode_params *params, const struct kvg_decode_row *row,
	const struct kvg_decode_op *op, uint32_t q_head, float *q)
{
	const struct kvg_tables *tables = &params->tables;
	const uint32_t d = tables->k_head_dim, bytes = kvg_number_bytes(op->q_dtype);
	const uint8_t *src = op->q + ((uint64_t)row->row * tables->q_heads + q_head) * d * bytes;
	bool is_bad = false;

	/* Host memory: a round trip costs as much as a whole query, so all of it is asked for at once. */
	if (((uintptr_t)src & 15u) == 0) {
		uint4 pieces[2];

		for (uint32_t k = 0; k < 2; k++) {
			const uint32_t at = kvg_lane() + 32 * k;

			if (16 * at < d * bytes)
				pieces[k] = __ldcs((const uint4 *)src + at);
		}
		for (uint32_t k = 0; k < 2; k++) {
			const uint32_t at = kvg_lane() + 32 * k, n = 16 / bytes;

			for (uint32_t e = 0; e < n && 16 * at < d * bytes; e++)
				q[at * n + e] =
					kvg_load_number((const uint8_t *)&pieces[k] + e * bytes, op->q_dtype);
		}
	} else {
		for (uint32_t i = kvg_lane(); i < d; i += 32)
			q[i] = kvg_load_number(src + i * bytes, op->q_dtype);
	}
	__syncwarp();
	for (uint32_t i = kvg_lane(); i < d; i += 32)
		is_bad |= !kvg_is_finite(q[i]);
	if (__any_sync(0xFFFFFFFFu, is_bad) && kvg_lane() == 0)
		flag_row(params, op, row);
	__syncwarp();
}

/*
 * One warp: a query in the rows' basis (core/format.h) to the channels' own, times `factor`. Segments that
 * are not added to others make that basis up, one after the other. Uses `to` up.
 */
static __device__ void turn_to_channels(const struct kvg_tables *tables, const struct kvg_codec *codec,
	const float *q, float factor, float *to, float *out)
{
	for (uint32_t s = 0, first = 0; s < codec->n_segments; s++) {
		const struct kvg_segment *segment = &codec->segments[s];
		const float *turned = q + first;

		if (segment->is_added)
			continue;
		if (segment->rotation != KVG_NONE) {
			kvg_rotate(tables, &tables->rotations[segment->rotation], true, q + first, to);
			turned = to;
		}
		for (uint32_t i = kvg_lane(); i < segment->n_channels; i += 32)
			out[channel_of(tables, segment, i)] = turned[i] * factor;
		__syncwarp();
		first += segment->n_channels;
	}
}

/* A segment's part of a query, which is in its basis already, times softmax scale and log2(e). */
static __device__ void store_part(const struct kvg_tables *tables, const struct kvg_segment *segment,
	const float *part, float factor, float *prepared)
{
	for (uint32_t i = kvg_lane(); i < segment->n_channels; i += 32)
		prepared[segment->prepared_idx + i] = part[i] * factor *
			(segment->factors == KVG_NONE ? 1.0f : kvg_floats(tables, segment->factors)[i]);
	__syncwarp();
}

/*
 * The query in every segment's basis. Where it came in the rows' basis, q, those of the segments that make
 * the basis up are its parts; for the others it is turned back. Uses q, `from` and `to` up.
 */
static __device__ void prepare_rows(const struct kvg_decode_params *params, const struct kvg_codec *codec,
	const struct kvg_decode_op *op, float *q, float *prepared, float *from, float *to)
{
	const struct kvg_tables *tables = &params->tables;
	const float factor = op->scale * LOG2_E;
	const bool is_rotated = (op->flags & KVG_Q_ROTATED) != 0;

	for (uint32_t s = 0, first = 0; s < codec->n_segments && is_rotated; s++) {
		const struct kvg_segment *segment = &codec->segments[s];

		if (segment->is_added)
			continue;
		store_part(tables, segment, q + first, factor, prepared);
		first += segment->n_channels;
	}
	if (is_rotated && codec->prepared_dim > codec->head_dim) {
		turn_to_channels(tables, codec, q, 1.0f, to, from);
		for (uint32_t i = kvg_lane(); i < codec->head_dim; i += 32)
			q[i] = from[i];
		__syncwarp();
	}
	for (uint32_t s = 0; s < codec->n_segments; s++) {
		const struct kvg_segment *segment = &codec->segments[s];
		const float *turned = from;

		if (is_rotated && !segment->is_added)
			continue;
		for (uint32_t i = kvg_lane(); i < segment->n_channels; i += 32)
			from[i] = q[channel_of(tables, segment, i)];
		__syncwarp();
		if (segment->rotation != KVG_NONE) {
			kvg_rotate(tables, &tables->rotations[segment->rotation], false, from, to);
			turned = to;
		}
		store_part(tables, segment, turned, factor, prepared);
	}
}

/* The query in the channels' own basis, where rows of the exact window are, with the same factor. Uses `to`
 * up.
 */
static __device__ void prepare_exact(const struct kvg_decode_params *params, const struct kvg_codec *codec,
	const struct kvg_decode_op *op, const float *q, float *prepared, float *to)
{
	const float factor = op->scale * LOG2_E;

	if (op->flags & KVG_Q_ROTATED) {
		turn_to_channels(&params->tables, codec, q, factor, to, prepared);
		return;
	}
	for (uint32_t i = kvg_lane(); i < codec->head_dim; i += 32)
		prepared[i] = q[i] * factor;
	__syncwarp();
}

/*
 * scale * <q, K centre>: belongs to every logit of the query, so weights do not change, and the finish kernel
 * adds it to the log-sum-exp; only a soft cap wants it before. A rotated query meets the centre in the rows'
 * basis. Uses `from` and `to` up.
 */
static __device__ float center_offset(const struct kvg_tables *tables, const struct kvg_codec *codec,
	const struct kvg_decode_op *op, const float *center, const float *q, float *from, float *to)
{
	float product = 0;

	for (uint32_t i = kvg_lane(); i < codec->head_dim && !(op->flags & KVG_Q_ROTATED); i += 32)
		product += q[i] * center[i];
	for (uint32_t s = 0, first = 0; s < codec->n_segments && (op->flags & KVG_Q_ROTATED); s++) {
		const struct kvg_segment *segment = &codec->segments[s];
		const float *turned = from;

		if (segment->is_added)
			continue;
		for (uint32_t i = kvg_lane(); i < segment->n_channels; i += 32)
			from[i] = center[channel_of(tables, segment, i)];
		__syncwarp();
		if (segment->rotation != KVG_NONE) {
			kvg_rotate(tables, &tables->rotations[segment->rotation], false, from, to);
			turned = to;
		}
		for (uint32_t i = kvg_lane(); i < segment->n_channels; i += 32)
			product += q[first + i] * turned[i];
		__syncwarp();
		first += segment->n_channels;
	}
	for (uint32_t half = 16; half >= 1; half /= 2)
		product += __shfl_xor_sync(0xFFFFFFFFu, product, half);
	__syncwarp();
	return op->scale * product;
}

static __device__ __forceinline__ uint32_t half_bits(float value)
{
	return kvg_f32_to_f16(value);
}

/* The largest number of the virtual head's queries; by all threads. */
static __device__ float largest_number(struct prepare_scratch *s, uint32_t n_heads, uint32_t d)
{
	float largest = 0;

	for (uint32_t i = threadIdx.x; i < n_heads * d; i += THREADS)
		largest = fmaxf(largest, fabsf(s->q[i / d][i % d]));
	for (uint32_t half = 16; half >= 1; half /= 2)
		largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, half));
	if (kvg_lane() == 0)
		s->largest[threadIdx.x / 32] = largest;
	__syncthreads();
	largest = fmaxf(fmaxf(s->largest[0], s->largest[1]), fmaxf(s->largest[2], s->largest[3]));
	return kvg_is_finite(largest) ? largest : 0.0f;
}

/*
 * B fragments of the tiles kernel: word w of lane 4g + c holds dims (d / 4) c + 2w, + 1 of column g. Up to
 * four heads have two columns each, the float16 of q and what that leaves over; more have one, and fragments
 * of what is left over behind the others. All queries of the virtual head share one power of two that brings
 * the largest number into [128, 256).
 */
static __device__ void write_fragments(const struct kvg_decode_params *params, const struct kvg_decode_op *op,
	uint32_t item, uint32_t n_heads, struct prepare_scratch *s)
{
	const uint32_t d = params->tables.k_head_dim, n_words = d / 8;
	const bool has_parts = params->n_heads <= 4;
	const uint32_t n_parts = has_parts ? 1 : 2;
	const float largest = largest_number(s, n_heads, d);
	int exponent = 0;

	if (largest > 0)
		frexpf(largest, &exponent);

	const float scale = ldexpf(1.0f, 8 - exponent);
	uint32_t *words = (uint32_t *)params->q_prepared + (uint64_t)item * n_parts * 32 * n_words;

	for (uint32_t at = threadIdx.x; at < n_parts * 32 * n_words; at += THREADS) {
		const uint32_t lane = at / n_words % 32, w = at % n_words, g = lane / 4, c = lane % 4;
		const uint32_t head = has_parts ? g / 2 : g;
		const bool is_left_over = has_parts ? (g & 1u) != 0 : at >= 32 * n_words;
		uint32_t packed = 0;

		for (uint32_t e = 0; e < 2 && head < n_heads; e++) {
			const float value = s->q[head][d / 4 * c + 2 * w + e] * scale;
			uint32_t bits = half_bits(value);

			if (is_left_over)
				bits = half_bits(value - kvg_f16_to_f32(bits));
			packed |= bits << 16 * e;
		}
		words[at] = packed;
	}
	if (threadIdx.x == 0)
		params->q_scales[item] = op->scale * LOG2_E / params->k_scale / scale;
}

/*
 * The same for the kernel in integers: 16-bit fixed point, one step for all heads (what rounding costs a
 * logit is then the same for all), column 2 * head + part with the high digit (part 0) and the low one, both
 * signed. Word k of lane 4n + c has channels (d / 4) c + 4k to + 3 of column n.
 */
static __device__ void write_digits(const struct kvg_decode_params *params, const struct kvg_decode_op *op,
	uint32_t item, uint32_t n_heads, struct prepare_scratch *s)
{
	const uint32_t d = params->tables.k_head_dim, n_groups = params->n_heads > 4 ? 2 : 1;
	const float largest = largest_number(s, n_heads, d);
	/* 32512 = 127 * 256: the high digit stays within 127. */
	const float scale = largest > 0 ? 32512.0f / largest : 0.0f;
	uint32_t *words = (uint32_t *)params->q_prepared + (uint64_t)item * n_groups * 2 * d;

	for (uint32_t head = threadIdx.x / 32; head < 4 * n_groups; head += WARPS) {
		const uint32_t at = 4 * kvg_lane(); /* four channels a lane */
		uint32_t high = 0, low = 0;

		if (at >= d)
			continue;
		for (uint32_t e = 0; e < 4 && head < n_heads; e++) {
			const int fixed = __float2int_rn(s->q[head][at + e] * scale),
				  digit = (fixed + 128) >> 8;

			high |= (uint32_t)(digit & 255) << 8 * e;
			low |= (uint32_t)((fixed - (digit << 8)) & 255) << 8 * e;
		}

		const uint32_t c = at / (d / 4), k = at % (d / 4) / 4, column = 2 * (head % 4);
		uint32_t *group = words + head / 4 * 2 * d;

		group[(4 * column + c) * (d / 16) + k] = high;
		group[(4 * (column + 1) + c) * (d / 16) + k] = low;
	}
	if (threadIdx.x == 0)
		params->q_scales[item] =
			largest > 0 ? op->scale * LOG2_E * (largest / 32512.0f) / params->k_scale : 1.0f;
}

static __global__ void __launch_bounds__(THREADS)
	prepare_kernel(const __grid_constant__ struct kvg_decode_params params)
{
	__shared__ struct prepare_scratch s;
	const struct kvg_tables *tables = &params.tables;
	const uint32_t n_virtual = tables->kv_heads * params.n_chunks,
		       group = tables->q_heads / tables->kv_heads;
	const uint32_t row_idx = blockIdx.x / n_virtual, virtual_head = blockIdx.x % n_virtual;
	const struct kvg_decode_row *row = &params.rows[row_idx];
	const struct kvg_decode_op *op = &params.ops[row->op_idx];
	const uint32_t first = virtual_head % params.n_chunks * KVG_HEADS_MAX;
	const uint32_t n_heads = min(group - first, KVG_HEADS_MAX), warp = threadIdx.x / 32;

	tiles::let_next_begin();
	for (uint32_t h = warp; h < n_heads; h += WARPS) {
		const uint32_t kv_head = virtual_head / params.n_chunks, q_head = kv_head * group + first + h;
		const struct kvg_layer *layer = &tables->layers[op->layer];
		const struct kvg_codec *codec = kvg_codec_of(tables, layer, false, kv_head);
		const float *center = kvg_center_of(tables, layer, kv_head);

		load_query(&params, row, op, q_head, s.q[h]);
		if (center && (op->lse || layer->softcap > 0 || layer->sinks != KVG_NONE)) {
			const float offset =
				center_offset(tables, codec, op, center, s.q[h], s.from[warp], s.to[warp]);

			if (kvg_lane() == 0)
				params.q_offsets[(uint64_t)row_idx * tables->q_heads + q_head] = offset;
		}
		if (params.exact_rows && params.exact_rows[row_idx].n_work != 0)
			prepare_exact(&params, codec, op, s.q[h],
				params.exact_queries +
					((uint64_t)row_idx * tables->q_heads + q_head) * tables->k_head_dim,
				s.to[warp]);
		if (params.k_bits == 0) {
			prepare_rows(&params, codec, op, s.q[h],
				params.q_prepared +
					((uint64_t)row_idx * tables->q_heads + q_head) * params.k_dim_max,
				s.from[warp], s.to[warp]);
			continue;
		}
		if (!(op->flags & KVG_Q_ROTATED)) {
			for (uint32_t i = kvg_lane(); i < codec->head_dim; i += 32)
				s.from[warp][i] = s.q[h][i];
			__syncwarp();
			kvg_rotate(tables, &tables->rotations[codec->segments[0].rotation], false,
				s.from[warp], s.q[h]);
		}
	}
	if (params.k_bits == 0)
		return;
	__syncthreads();
	if (params.k_bits == 4)
		write_fragments(&params, op, blockIdx.x, n_heads, &s);
	else
		write_digits(&params, op, blockIdx.x, n_heads, &s);
}

cudaError_t kvg_decode_prepare_launch(const struct kvg_decode_params *params, cudaStream_t stream)
{
	const uint32_t n_blocks = params->n_rows * params->tables.kv_heads * params->n_chunks;

	if (n_blocks == 0)
		return cudaSuccess;
	/* Never dependent: when it begins, the updates are complete, and so are the pages that the next
	 * kernel loads. */
	return kvg_launch(prepare_kernel, { dim3(n_blocks), THREADS, 0, stream, false }, params);
}

cudaError_t kvg_decode_prepare_load(void)
{
	struct cudaFuncAttributes attributes;

	return cudaFuncGetAttributes(&attributes, prepare_kernel);
}
