/*
 * Attention over rows of any format: K and V rows are expanded into float32 in shared memory, 16 tokens at a
 * time, once for up to eight query heads; scores and sums are float32. One thread block per piece of (query
 * row, virtual head); the finish kernel merges the pieces. Bound: instructions (a dozen per stored element),
 * not bytes.
 *
 * Rows of the exact window are one more such format, in ring blocks in place of pages: a launch of its own
 * over the exact rows of the wave, whatever kernel works on the pages.
 */
#include "gpu/decode_common.cuh"
#include "gpu/decode_expand.cuh"
#include "gpu/variants.h"

#define LOG2_E 1.4426950408889634f
#define LN_2   0.6931471805599453f
#define PAD    4u /* floats behind an expanded row: 16-byte reads of 8 rows fall on different banks */

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

/* What a thread block works on: tiles [begin, end) of one (query row, virtual head), counted through both
 * ranges. */
struct piece {
	const struct kvg_decode_row *row;
	const struct kvg_decode_op *op;
	const struct kvg_layer *layer;
	uint32_t kv_head, q_head, n_heads; /* first query head, and how many */
	uint32_t n_first;                  /* tiles of the first tokens */
	uint32_t first_low, tile_low;      /* what is added there, and behind them */
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
	out.first_low = out.row->first_lo / TOKENS;
	out.n_first = (out.row->first_hi + TOKENS - 1) / TOKENS - out.first_low;
	out.tile_low = out.row->token_lo / TOKENS - out.n_first;
	out.begin = rel % out.row->n_work * n_tiles;
	out.end = min((out.row->token_hi + TOKENS - 1) / TOKENS - out.tile_low, out.begin + n_tiles);
	return out;
}

static __device__ __forceinline__ uint32_t first_token(const struct piece &piece, uint32_t tile)
{
	return (tile + (tile < piece.n_first ? piece.first_low : piece.tile_low)) * TOKENS;
}

/* K and V rows of a tile, one behind the other. */
static __device__ __forceinline__ void fetch_tile(const struct kvg_decode_params &params,
	const struct piece &piece, const struct kvg_codec *codecs, uint32_t tile, uint32_t raw_bytes,
	uint8_t *raw)
{
	const struct kvg_layer *layer = piece.layer;
	const uint32_t token = first_token(piece, tile);

	fetch(params.is_exact ? layer->exact_k : layer->k, &params.tables, piece.row->table,
		codecs[0].row_bytes, piece.kv_head, token, raw);
	fetch(params.is_exact ? layer->exact_v : layer->v, &params.tables, piece.row->table,
		codecs[1].row_bytes, piece.kv_head, token, raw + raw_bytes);
}

static __device__ __forceinline__ void copy_codecs(
	const struct kvg_decode_params &params, const struct piece &piece, struct kvg_codec *codecs)
{
	const struct kvg_tables *tables = &params.tables;
	const struct kvg_codec *k = params.is_exact ? &tables->codecs[piece.layer->exact_k_codec]
						    : kvg_codec_of(tables, piece.layer, false, piece.kv_head);
	const struct kvg_codec *v = params.is_exact ? &tables->codecs[piece.layer->exact_v_codec]
						    : kvg_codec_of(tables, piece.layer, true, piece.kv_head);

	for (uint32_t i = threadIdx.x; i < sizeof(struct kvg_codec) / 4; i += THREADS) {
		((uint32_t *)&codecs[0])[i] = ((const uint32_t *)k)[i];
		((uint32_t *)&codecs[1])[i] = ((const uint32_t *)v)[i];
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

/*
 * What the layer's options do to the logits of one query. Distances are counted from the token that the slope
 * favours, so that logits that matter are as small as without a slope; finish adds what it gives that token.
 */
struct bending {
	bool is_on, is_far; /* is_far: the slope is negative */
	float softcap, offset;
	float steepness; /* the slope without its sign: taken off for every token between */
	uint32_t favoured;
};

static __device__ __forceinline__ struct bending find_bending(
	const struct kvg_decode_params &params, const struct piece &piece, uint32_t head)
{
	const struct kvg_layer *layer = piece.layer;
	struct bending out = { layer->softcap > 0 || layer->alibi != KVG_NONE, false, layer->softcap, 0.0f,
		0.0f, piece.row->position };

	if (!out.is_on || head >= piece.n_heads)
		return out;
	if (layer->softcap > 0 && layer->k_center != KVG_NONE)
		out.offset = params.q_offsets[(uint64_t)(piece.row - params.rows) * params.tables.q_heads +
			piece.q_head + head];
	if (layer->alibi != KVG_NONE) {
		const float slope = kvg_floats(&params.tables, layer->alibi)[piece.q_head + head];

		out.is_far = slope < 0;
		out.steepness = fabsf(slope);
		/* In ring blocks it may lie before token 0: its number wraps around, distances do not. */
		if (out.is_far)
			out.favoured -= piece.row->farthest;
	}
	return out;
}

/* A logit in log2 units, capped and sloped: core/attention.h has the order. */
static __device__ __forceinline__ float bend(const struct bending &bending, uint32_t token, float score)
{
	const uint32_t distance = bending.is_far ? token - bending.favoured : bending.favoured - token;
	float x = score * LN_2;

	if (bending.softcap > 0)
		x = bending.softcap * tanhf((x + bending.offset) / bending.softcap);
	return (x - bending.steepness * (float)distance) * LOG2_E;
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
	__device__ __forceinline__ float score(const struct kvg_codec *codec, const float *q,
		const float *k_expanded, const uint8_t *raw, uint32_t at, bool is_seen) const
	{
		const uint32_t k_dim = codec->prepared_dim, n_quads = k_dim / 4 / PARTS;
		float x = dot((const float4 *)(q + head * k_dim) + part * n_quads,
			(const float4 *)(k_expanded + token * (k_dim + PAD)) + part * n_quads, n_quads);

		if (PARTS == 2)
			x += __shfl_xor_sync(0xFFFFFFFFu, x, TOKENS);
		if (is_plain(codec))
			x *= plain_scale(codec, raw, token);
		if (bending.is_on)
			x = bend(bending, at + token, x);
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

	copy_codecs(params, piece, codecs);
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
	fetch_tile(params, piece, codecs, piece.begin, raw_bytes, memory);
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
		const uint32_t begin = is_first ? piece.row->first_lo : piece.row->token_lo;
		const uint32_t lo = begin > at ? begin - at : 0;
		const uint32_t hi = min((is_first ? piece.row->first_hi : piece.row->token_hi) - at, TOKENS);
		const bool is_seen = seat.token >= lo && seat.token < hi;
		const uint8_t *raw = memory + 2 * buffer * raw_bytes;
		float factor;

		tiles::wait_for_copies();
		__syncthreads();
		if (tile + 1 < piece.end)
			fetch_tile(params, piece, codecs, tile + 1, raw_bytes,
				memory + 2 * (buffer ^ 1) * raw_bytes);
		expand_tile(codecs, numbers, raw, raw_bytes, lo, hi, groups, k_expanded, v_expanded);

		const float score = seat.score(&codecs[0], q, k_expanded, raw, at, is_seen);
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

cudaError_t kvg_decode_exact_launch(const struct kvg_decode_params *params, cudaStream_t stream)
{
	struct kvg_decode_params exact = *params;

	exact.is_exact = 1;
	exact.rows = params->exact_rows;
	exact.n_work = params->n_exact_work;
	exact.q_prepared = params->exact_queries;
	exact.partials = params->exact_partials;
	exact.partials_ml = params->exact_partials_ml;
	exact.k_dim_max = params->tables.k_head_dim;
	exact.v_dim_max = params->tables.v_head_dim;
	exact.raw_bytes_max = 2 * (exact.k_dim_max > exact.v_dim_max ? exact.k_dim_max : exact.v_dim_max);
	return kvg_decode_rows_launch(&exact, stream);
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
