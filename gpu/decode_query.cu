/*
 * Before and after attention: queries are rotated and laid out for the kernel that reads them, partial
 * results are merged by log-sum-exp in a fixed order, rotated back and stored. A query reaches PCIe once, an
 * output once.
 */
#include "gpu/decode_parts.cuh"
#include "gpu/device_asm.cuh"
#include "gpu/device_rows.cuh"
#include "gpu/launch.cuh"
#include "gpu/variants.h"

#define THREADS 128u
#define WARPS   (THREADS / 32u)
#define LOG2_E  1.4426950408889634f
#define LN_2    0.6931471805599453f

struct prepare_scratch {
	float q[KVG_HEADS_MAX][KVG_DIM_MAX]; /* as they came; tiles: rotated */
	float from[WARPS][KVG_DIM_MAX];
	float to[WARPS][KVG_DIM_MAX];
	float largest[WARPS];
};

static __device__ void flag_row(const struct kvg_decode_params *params, const struct kvg_decode_op *op,
	const struct kvg_decode_row *row)
{
	atomicMin((unsigned long long *)params->flags + op->result_idx,
		(unsigned long long)op->layer << 32 | row->row);
}

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

/* The query in every segment's basis, times softmax scale and log2(e). */
static __device__ void prepare_rows(const struct kvg_decode_params *params, const struct kvg_codec *codec,
	const struct kvg_decode_op *op, const float *q, float *prepared, float *from, float *to)
{
	const struct kvg_tables *tables = &params->tables;
	const float factor = op->scale * LOG2_E;

	for (uint32_t s = 0; s < codec->n_segments; s++) {
		const struct kvg_segment *segment = &codec->segments[s];
		const float *turned = from;

		for (uint32_t i = kvg_lane(); i < segment->n_channels; i += 32)
			from[i] = q[segment->channels == KVG_NONE ? i : tables->words[segment->channels + i]];
		__syncwarp();
		if (segment->rotation != KVG_NONE && !(op->flags & KVG_Q_ROTATED)) {
			kvg_rotate(tables, &tables->rotations[segment->rotation], false, from, to);
			turned = to;
		}
		for (uint32_t i = kvg_lane(); i < segment->n_channels; i += 32)
			prepared[segment->prepared_idx + i] = turned[i] * factor *
				(segment->factors == KVG_NONE ? 1.0f
							      : kvg_floats(tables, segment->factors)[i]);
		__syncwarp();
	}
}

/*
 * The query in the channels' own basis, where rows of the exact window are, with the same factor. Uses `from`
 * and `to` up.
 */
static __device__ void prepare_exact(const struct kvg_decode_params *params, const struct kvg_codec *codec,
	const struct kvg_decode_op *op, const float *q, float *prepared, float *from, float *to)
{
	const uint32_t rotation = codec->segments[0].rotation;
	const float factor = op->scale * LOG2_E;
	const float *turned = q;

	if (rotation != KVG_NONE && (op->flags & KVG_Q_ROTATED)) {
		for (uint32_t i = kvg_lane(); i < codec->head_dim; i += 32)
			from[i] = q[i];
		__syncwarp();
		kvg_rotate(&params->tables, &params->tables.rotations[rotation], true, from, to);
		turned = to;
	}
	for (uint32_t i = kvg_lane(); i < codec->head_dim; i += 32)
		prepared[i] = turned[i] * factor;
	__syncwarp();
}

/*
 * scale * <q, K centre>: belongs to every logit of the query, so weights do not change, and the finish kernel
 * adds it to the log-sum-exp; only a soft cap wants it before. A rotated query meets the centre in the rows'
 * basis.
 */
static __device__ float center_offset(const struct kvg_tables *tables, const struct kvg_codec *codec,
	const struct kvg_decode_op *op, const float *center, const float *q, float *from, float *to)
{
	const uint32_t rotation = codec->segments[0].rotation;
	const float *turned = from;
	float product = 0;

	for (uint32_t i = kvg_lane(); i < codec->head_dim; i += 32)
		from[i] = center[i];
	__syncwarp();
	if (rotation != KVG_NONE && (op->flags & KVG_Q_ROTATED)) {
		kvg_rotate(tables, &tables->rotations[rotation], false, from, to);
		turned = to;
	}
	for (uint32_t i = kvg_lane(); i < codec->head_dim; i += 32)
		product += q[i] * turned[i];
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
				s.from[warp], s.to[warp]);
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

/* ---- after ---- */

struct finish_scratch {
	float acc[2 * KVG_DIM_MAX];
	float turned[2 * KVG_DIM_MAX];
	float out[KVG_DIM_MAX];
	float exact[KVG_DIM_MAX];
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

/* The weighted sum of ring blocks joins out[], in its basis. By all threads. */
static __device__ void add_exact(const struct kvg_tables *tables, const struct kvg_codec *codec,
	bool is_rotated, struct finish_scratch *s)
{
	const uint32_t rotation = codec->segments[0].rotation;
	const bool is_turned = rotation != KVG_NONE && is_rotated;

	if (is_turned && threadIdx.x < 32)
		kvg_rotate(tables, &tables->rotations[rotation], false, s->exact, s->turned);
	__syncthreads();
	for (uint32_t i = threadIdx.x; i < codec->head_dim; i += THREADS)
		s->out[i] += is_turned ? s->turned[i] : s->exact[i];
}

/* acc[] in the segments' bases to out[] in the channels'. A warp turns one segment. */
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
		if (segment->rotation != KVG_NONE && !is_rotated) {
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

		for (uint32_t i = threadIdx.x; i < segment->n_channels; i += THREADS)
			s->out[segment->channels == KVG_NONE ? i : tables->words[segment->channels + i]] +=
				s->turned[segment->prepared_idx + i];
		__syncthreads();
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
		if (params.exact_rows)
			add_exact(tables, codec, is_rotated, &s);
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

cudaError_t kvg_decode_query_load(void)
{
	struct cudaFuncAttributes attributes;
	const cudaError_t error = cudaFuncGetAttributes(&attributes, prepare_kernel);

	return error != cudaSuccess ? error : cudaFuncGetAttributes(&attributes, finish_kernel);
}
