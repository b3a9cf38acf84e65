/*
 * Updates and transfers: one warp per row of one KV head, all ops, layers and sides of a batch in one launch.
 * Built with -fmad=false: what it stores has to equal the CPU reference byte for byte.
 *
 * Bytes moved: the row on the wire once (over PCIe, payload stays in pinned host memory), the stored row
 * once.
 */
#include "gpu/device_codec.cuh"
#include "gpu/launch.cuh"
#include "gpu/variants.h"

#define WARPS         4u
#define BLOCKS_PER_SM 8u /* rows kernel: 256 tokens of 8 KV heads, K and V, are a row for every warp */

/* Rows of 16-byte pieces where the address allows it: a PCIe read costs the same for 4 bytes as for 16. */
static __device__ void copy_in(const uint8_t *src, uint32_t n_bytes, uint8_t *row)
{
	const uint32_t lane = kvg_lane();

	if ((((uintptr_t)src | n_bytes) & 15u) == 0) {
		for (uint32_t i = lane; i < n_bytes / 16; i += 32)
			((uint4 *)row)[i] = ((const uint4 *)src)[i];
	} else if ((((uintptr_t)src | n_bytes) & 3u) == 0) {
		for (uint32_t i = lane; i < n_bytes / 4; i += 32)
			((uint32_t *)row)[i] = ((const uint32_t *)src)[i];
	} else {
		for (uint32_t i = lane; i < n_bytes; i += 32)
			row[i] = src[i];
	}
	__syncwarp();
}

static __device__ void copy_out(const uint8_t *row, uint32_t n_bytes, uint8_t *dst)
{
	const uint32_t lane = kvg_lane();

	if ((((uintptr_t)dst | n_bytes) & 3u) == 0) {
		for (uint32_t i = lane; i < n_bytes / 4; i += 32)
			((uint32_t *)dst)[i] = ((const uint32_t *)row)[i];
	} else {
		for (uint32_t i = lane; i < n_bytes; i += 32)
			dst[i] = row[i];
	}
}

/* ---- tiles ---- */

/* Address of the byte at `at` (a multiple of 4) of the 4-bit indices of one token of V. */
static __device__ __forceinline__ uint32_t nibbles_v_offset(uint32_t d, uint32_t token, uint32_t at)
{
	const uint32_t piece_bytes = d / 16, piece = at / piece_bytes;

	return (token >> 3) * 4 * d + (4 * piece + (token & 7u) / 2) * 2 * piece_bytes +
		(token & 1u) * piece_bytes + at % piece_bytes;
}

/* Four bits: the row's own bytes, K as they are, V in pieces of 16 channels. */
static __device__ void move_nibbles(
	uint8_t *indices, uint32_t d, uint32_t token, bool is_v, bool is_read, uint8_t *row)
{
	for (uint32_t at = 4 * kvg_lane(); at < d / 2; at += 128) {
		uint32_t *there = (uint32_t *)(indices +
			(is_v ? nibbles_v_offset(d, token, at) : token * (d / 2) + at));

		if (is_read)
			*(uint32_t *)(row + at) = *there;
		else
			*there = *(const uint32_t *)(row + at);
	}
}

/*
 * Two and three bits: the fragments that decode_grid.cuh reads. Lane 4g + c of a tile has d / 64 sets of
 * `bits` words; a set holds 32 codes, four selector words of eight nibbles. Of K the first half of a lane's
 * selector words is token g and the second g + 8: nibble n of word i is channel (d / 4) c + 8i + n. Of V
 * nibble n of selector word i is channel 16i + 8 (n >> 2) + g, of token 2c + (0, 8, 1, 9 for n & 3): the
 * order in which weights leave the scores' registers.
 */
template <uint32_t D>
static __device__ __forceinline__ uint32_t *fragment_word(uint8_t *indices, uint32_t lane, uint32_t word)
{
	constexpr uint32_t N_FIRST = D / 32;

	return (uint32_t *)indices +
		(word < N_FIRST ? N_FIRST * lane + word : 32 * N_FIRST + D / 64 * lane + word - N_FIRST);
}

/* Lane, selector word among all of the lane, nibble. */
struct fragment_place {
	uint32_t lane, selector, nibble;
};

template <uint32_t D>
static __device__ __forceinline__ struct fragment_place place_in_fragments(
	uint32_t token, bool is_v, uint32_t channel)
{
	const uint32_t g = token & 7u, half = token / 8;

	if (is_v)
		return { 4 * (channel & 7u) + g / 2, channel / 16,
			4 * (channel / 8 & 1u) + 2 * (g & 1u) + half };
	return { 4 * g + channel / (D / 4), D / 32 * half + channel / 8 % (D / 32), channel & 7u };
}

/* The inverse for one token: the channel of a nibble. */
template <uint32_t D>
static __device__ __forceinline__ uint32_t channel_at(
	bool is_v, uint32_t lane, uint32_t selector, uint32_t nibble)
{
	return is_v ? 16 * selector + 8 * (nibble / 4) + lane / 4
		    : D / 4 * (lane & 3u) + 8 * (selector % (D / 32)) + nibble;
}

/*
 * What a code of selector word `selector` of a set has of a nibble of word `word`. Three bits: word i has
 * selector i, and in each nibble's top bit a bit of selector 3. Two: selectors 2i, 2i + 1.
 */
template <uint32_t BITS>
static __device__ __forceinline__ uint32_t part_of_nibble(uint32_t word, uint32_t selector, uint32_t code)
{
	if (BITS == 2)
		return selector / 2 == word ? code << 2 * (selector & 1u) : 0;
	return selector == word ? code : selector == 3 ? (code >> word & 1u) << 3 : 0;
}

template <uint32_t D, uint32_t BITS>
static __device__ __forceinline__ uint32_t read_fragment(uint8_t *indices, const struct fragment_place &at)
{
	const uint32_t first = at.selector / 4 * BITS, selector = at.selector % 4, shift = 4 * at.nibble;
	uint32_t code = 0;

	if (BITS == 2)
		return *fragment_word<D>(indices, at.lane, first + selector / 2) >>
			(shift + 2 * (selector & 1u)) &
			3u;
	if (selector < 3)
		return *fragment_word<D>(indices, at.lane, first + selector) >> shift & 7u;
	for (uint32_t k = 0; k < 3; k++)
		code |= (*fragment_word<D>(indices, at.lane, first + k) >> (shift + 3) & 1u) << k;
	return code;
}

/*
 * A word has codes of two tokens of K (three bits at 64 channels; else of one), of four of V, which other
 * warps may write at the same time: each changes only its own bits, and nobody reads meanwhile. Of K the
 * token's codes are in half of the selector words of four lanes, of V in every fourth nibble of eight lanes.
 */
template <uint32_t D, uint32_t BITS>
static __device__ void write_fragments(
	uint8_t *indices, uint32_t token, bool is_v, const struct kvg_row_scratch *s)
{
	const struct fragment_place at = place_in_fragments<D>(token, is_v, 0);
	const uint32_t n_sets = is_v ? D / 64 : 1, n_selectors = is_v ? 4 : D / 32;

	for (uint32_t w = kvg_lane(); w < (is_v ? 8 : 4) * n_sets * BITS; w += 32) {
		const uint32_t word = w % BITS, rest = w / BITS, set = at.selector / 4 + rest % n_sets,
			       lane = at.lane + (is_v ? 4 : 1) * (rest / n_sets);
		const uint32_t first = is_v ? 4 * set : at.selector;
		uint32_t *there = fragment_word<D>(indices, lane, set * BITS + word);
		uint32_t value = 0, own = 0;

		for (uint32_t selector = first; selector < first + n_selectors; selector++) {
			const uint32_t mask = part_of_nibble<BITS>(word, selector % 4, (1u << BITS) - 1);

			if (mask == 0)
				continue;
#pragma unroll 2
			for (uint32_t n = at.nibble; n < 8; n += is_v ? 4 : 1) {
				const uint32_t code =
					kvg_code_at(s->row, BITS, channel_at<D>(is_v, lane, selector, n));

				own |= mask << 4 * n;
				value |= part_of_nibble<BITS>(word, selector % 4, code) << 4 * n;
			}
		}
		if (own == UINT32_MAX) {
			*there = value;
		} else if (own != 0) {
			atomicAnd(there, ~own);
			atomicOr(there, value);
		}
	}
}

template <uint32_t D, uint32_t BITS>
static __device__ void move_fragments(uint8_t *indices, const struct kvg_codec *codec, uint32_t token,
	bool is_v, bool is_read, struct kvg_row_scratch *s)
{
	if (!is_read) {
		write_fragments<D, BITS>(indices, token, is_v, s);
		return;
	}
	for (uint32_t i = kvg_lane(); i < D; i += 32)
		s->codes[i] = (uint8_t)read_fragment<D, BITS>(indices, place_in_fragments<D>(token, is_v, i));
	__syncwarp();
	kvg_pack(&codec->segments[0], s->codes, s->row);
}

/* One row of K or V between shared memory and its half of a tile (KERNELS 2). */
static __device__ void move_tile_row(uint8_t *half, const struct kvg_codec *codec, uint32_t token, bool is_v,
	bool is_read, struct kvg_row_scratch *s)
{
	const uint32_t d = codec->head_dim, index_bytes = d * codec->bits / 8;
	/* Position 2g + h has the norm of token g + 8h: rows g and g + 8 of the kernel's first operand. */
	uint32_t *norm = (uint32_t *)(half + KVG_TILE_TOKENS * index_bytes) + 2 * (token & 7u) + token / 8;

	if (codec->bits == 4)
		move_nibbles(half, d, token, is_v, is_read, s->row);
	else if (codec->bits == 3 && d == 128)
		move_fragments<128, 3>(half, codec, token, is_v, is_read, s);
	else if (codec->bits == 3)
		move_fragments<64, 3>(half, codec, token, is_v, is_read, s);
	else if (d == 128)
		move_fragments<128, 2>(half, codec, token, is_v, is_read, s);
	else
		move_fragments<64, 2>(half, codec, token, is_v, is_read, s);
	if (kvg_lane() == 0) {
		if (is_read)
			*(uint32_t *)(s->row + index_bytes) = *norm;
		else
			*norm = *(const uint32_t *)(s->row + index_bytes);
	}
	__syncwarp();
}

/* Row of a ring block of the exact window. */
static __device__ __forceinline__ uint8_t *exact_row(const struct kvg_tables *tables,
	const struct kvg_layer *layer, const struct kvg_codec *codec, bool is_v, uint64_t slot, uint32_t head)
{
	const uint64_t block = slot / tables->block_size, token = slot % tables->block_size;

	return (is_v ? layer->exact_v : layer->exact_k) +
		((block * tables->kv_heads + head) * tables->block_size + token) * 2 * codec->head_dim;
}

/* The row's numbers as bf16; false: one is not finite then. */
static __device__ bool write_exact(const struct kvg_codec *codec, const float *x, uint8_t *to)
{
	bool is_bad = false;

	for (uint32_t i = kvg_lane(); i < codec->head_dim / 2; i += 32) {
		const uint32_t low = kvg_f32_to_bf16(x[2 * i]), high = kvg_f32_to_bf16(x[2 * i + 1]);

		is_bad |= (low & 0x7F80u) == 0x7F80u || (high & 0x7F80u) == 0x7F80u;
		((uint32_t *)to)[i] = high << 16 | low;
	}
	return !__any_sync(0xFFFFFFFFu, is_bad);
}

static __device__ void move_page_row(const struct kvg_tables *tables, const struct kvg_layer *layer,
	const struct kvg_codec *codec, bool is_v, uint64_t slot, uint32_t head, bool is_read,
	struct kvg_row_scratch *s)
{
	const uint64_t block = slot / tables->block_size;
	const uint32_t token = (uint32_t)(slot % tables->block_size);

	if (layer->layout == KVG_LAYOUT_TILES) {
		const uint32_t k_bytes = KVG_TILE_TOKENS * tables->codecs[layer->k_codec].row_bytes;
		const uint32_t v_bytes = KVG_TILE_TOKENS * tables->codecs[layer->v_codec].row_bytes;
		const uint64_t tile =
			(block * tables->kv_heads + head) * (tables->block_size / KVG_TILE_TOKENS) +
			token / KVG_TILE_TOKENS;

		move_tile_row(layer->k + tile * (k_bytes + v_bytes) + (is_v ? k_bytes : 0), codec,
			token % KVG_TILE_TOKENS, is_v, is_read, s);
		return;
	}

	uint8_t *at = (is_v ? layer->v : layer->k) +
		((block * tables->kv_heads + head) * tables->block_size + token) * codec->row_bytes;

	if (is_read)
		copy_in(at, codec->row_bytes, s->row);
	else
		copy_out(s->row, codec->row_bytes, at);
}

/* The op that row `idx` belongs to: the last one that begins at or before it. */
static __device__ const struct kvg_row_op *find_op(const struct kvg_row_op *ops, uint32_t n_ops, uint64_t idx)
{
	uint32_t low = 0, high = n_ops;

	while (high - low > 1) {
		const uint32_t middle = (low + high) / 2;

		if (ops[middle].row_first <= idx)
			low = middle;
		else
			high = middle;
	}
	return &ops[low];
}

/* `exact` NULL: only to the page. Packed rows are never exact. */
static __device__ bool write_row(const struct kvg_tables *tables, const struct kvg_codec *codec,
	const float *center, uint32_t dtype, const uint8_t *wire, uint8_t *exact, struct kvg_row_scratch *s)
{
	if (dtype == KVG_PACKED) {
		copy_in(wire, codec->row_bytes, s->row);
		return kvg_validate(tables, codec, s->row);
	}

	const uint32_t bytes = kvg_number_bytes(dtype);

	copy_in(wire, codec->head_dim * bytes, s->row);
	for (uint32_t i = kvg_lane(); i < codec->head_dim; i += 32)
		s->x[i] = kvg_load_number(s->row + i * bytes, dtype) - (center ? center[i] : 0.0f);
	__syncwarp();
	/* Encoding uses the numbers up. */
	if (exact && !write_exact(codec, s->x, exact))
		return false;
	return kvg_encode(tables, codec, s);
}

/* From the row in scratch, or (exact not NULL) from a ring block. */
static __device__ void read_row(const struct kvg_tables *tables, const struct kvg_codec *codec,
	const float *center, uint32_t dtype, uint8_t *wire, const uint8_t *exact, struct kvg_row_scratch *s)
{
	if (dtype == KVG_PACKED) {
		copy_out(s->row, codec->row_bytes, wire);
		return;
	}

	const uint32_t bytes = kvg_number_bytes(dtype);

	if (exact) {
		for (uint32_t i = kvg_lane(); i < codec->head_dim; i += 32)
			s->x[i] = kvg_load_number(exact + 2 * i, KVG_BF16);
		__syncwarp();
	} else {
		kvg_decode(tables, codec, s);
	}
	for (uint32_t i = kvg_lane(); i < codec->head_dim; i += 32)
		kvg_store_number(center ? s->x[i] + center[i] : s->x[i], dtype, wire + i * bytes);
}

/* A row of a ring block as it lies there, in or out; false: a number is not finite. */
static __device__ bool move_ring_row(
	uint8_t *ring, uint8_t *wire, uint32_t n_bytes, bool is_read, struct kvg_row_scratch *s)
{
	bool is_bad = false;

	copy_in(is_read ? ring : wire, n_bytes, s->row);
	for (uint32_t i = kvg_lane(); i < n_bytes / 2 && !is_read; i += 32)
		is_bad |= (((const uint16_t *)s->row)[i] & 0x7F80u) == 0x7F80u;
	if (__any_sync(0xFFFFFFFFu, is_bad))
		return false;
	copy_out(s->row, n_bytes, is_read ? wire : ring);
	return true;
}

/* The formula of struct kv_rows; packed rows of other layers may have other sizes. */
static __device__ uint8_t *wire_row(const struct kvg_tables *tables, const struct kvg_row_op *op, bool is_v,
	uint32_t layer_at, uint32_t token, uint32_t head, uint64_t row_bytes)
{
	const struct kvg_layer *first = &tables->layers[op->layer_first], *layer = first + layer_at;
	const uint64_t token_first = is_v ? op->v_token_first : op->k_token_first;
	uint64_t before = layer_at * row_bytes, first_bytes = row_bytes;

	if ((is_v ? op->v_dtype : op->k_dtype) == KVG_PACKED) {
		before = is_v ? layer->v_bytes_before - first->v_bytes_before
			      : layer->k_bytes_before - first->k_bytes_before;
		first_bytes = tables->codecs[is_v ? first->v_codec : first->k_codec].row_bytes;
	}
	return (is_v ? op->v : op->k) +
		((is_v ? op->v_stride : op->k_stride) * before + (token_first + token) * row_bytes -
			token_first * first_bytes) *
		tables->kv_heads +
		head * row_bytes;
}

/* Rows of an op are numbered (layer, side, token, head), so that neighbours on the wire are neighbours here.
 */
static __device__ void do_row(const struct kvg_rows_params *params, uint64_t idx, struct kvg_row_scratch *s)
{
	const struct kvg_tables *tables = &params->tables;
	const struct kvg_row_op *op = find_op(params->ops, params->n_ops, idx);
	uint64_t rest = idx - op->row_first;
	const uint32_t head = (uint32_t)(rest % tables->kv_heads);

	rest /= tables->kv_heads;

	const uint32_t token = (uint32_t)(rest % op->n_tokens);

	rest /= op->n_tokens;

	const bool is_v = (rest & 1u) != 0;
	const uint32_t layer_at = (uint32_t)(rest / 2), layer_idx = op->layer_first + layer_at;
	const struct kvg_layer *layer = &tables->layers[layer_idx];
	const struct kvg_codec *codec = kvg_codec_of(tables, layer, is_v, head);
	const float *center = is_v ? NULL : kvg_center_of(tables, layer, head);
	const int64_t slot = op->slots[(uint64_t)layer->group_idx * op->n_tokens + token];
	const uint32_t dtype = is_v ? op->v_dtype : op->k_dtype;
	const uint64_t wire_bytes =
		dtype == KVG_PACKED ? codec->row_bytes : codec->head_dim * kvg_number_bytes(dtype);

	if (!(is_v ? op->v : op->k) || (slot < 0 && !op->is_ring))
		return;

	uint8_t *wire = wire_row(tables, op, is_v, layer_at, token, head, wire_bytes);
	const int64_t exact_slot = op->exact_slots ? op->exact_slots[token] : -1;
	uint8_t *exact = exact_slot >= 0 && dtype != KVG_PACKED
		? exact_row(tables, layer, codec, is_v, (uint64_t)exact_slot, head)
		: NULL;

	bool is_ok = true;

	if (op->is_ring) {
		is_ok = move_ring_row(exact, wire, 2 * codec->head_dim, op->mode == KVG_ROWS_READ, s);
	} else if (op->mode == KVG_ROWS_READ) {
		if (!exact)
			move_page_row(tables, layer, codec, is_v, (uint64_t)slot, head, true, s);
		read_row(tables, codec, center, dtype, wire, exact, s);
	} else {
		is_ok = write_row(tables, codec, center, dtype, wire, exact, s);
		if (is_ok)
			move_page_row(tables, layer, codec, is_v, (uint64_t)slot, head, false, s);
	}
	if (!is_ok && kvg_lane() == 0)
		atomicMin((unsigned long long *)params->flags + op->result_idx,
			(unsigned long long)layer_idx << 32 | token);
	__syncwarp();
}

static __global__ void __launch_bounds__(WARPS * 32, BLOCKS_PER_SM)
	rows_kernel(const __grid_constant__ struct kvg_rows_params params)
{
	__shared__ __align__(16) struct kvg_row_scratch scratch[WARPS];
	const uint32_t warp = threadIdx.x / 32;

	for (uint64_t idx = (uint64_t)blockIdx.x * WARPS + warp; idx < params.n_rows;
		idx += (uint64_t)gridDim.x * WARPS)
		do_row(&params, idx, &scratch[warp]);
}

cudaError_t kvg_rows_launch(const struct kvg_rows_params *params, cudaStream_t stream)
{
	const uint64_t wanted = (params->n_rows + WARPS - 1) / WARPS;
	const uint32_t n_blocks = (uint32_t)(wanted < 132 * BLOCKS_PER_SM ? wanted : 132 * BLOCKS_PER_SM);

	if (n_blocks == 0)
		return cudaSuccess;
	return kvg_launch(rows_kernel, { dim3(n_blocks), WARPS * 32, 0, stream, false }, params);
}

/*
 * Block copies. A thread owns the same 16 bytes of every block, so copies on top of each other take effect in
 * their order without any barrier.
 */
static __global__ void copy_kernel(const __grid_constant__ struct kvg_copy_params params)
{
	const struct kvg_layer *layer = &params.tables.layers[blockIdx.y / 2];
	const bool is_v = blockIdx.y % 2 != 0;
	const uint64_t block_bytes = is_v ? layer->v_block_bytes : layer->k_block_bytes;
	const uint64_t at = ((uint64_t)blockIdx.x * blockDim.x + threadIdx.x) * 16;
	uint8_t *pages = is_v ? layer->v : layer->k;

	if (at >= block_bytes)
		return;
	for (uint32_t i = 0; i < params.n_ops; i++) {
		if (params.ops[i].group_idx == layer->group_idx)
			*(uint4 *)(pages + params.ops[i].block_to * block_bytes + at) =
				*(const uint4 *)(pages + params.ops[i].block_from * block_bytes + at);
	}
}

cudaError_t kvg_copy_launch(const struct kvg_copy_params *params, cudaStream_t stream)
{
	const uint64_t n_pieces = params->block_bytes_max / 16;
	const dim3 grid((unsigned)((n_pieces + 127) / 128), 2 * params->tables.n_layers);

	if (params->n_ops == 0)
		return cudaSuccess;
	return kvg_launch(copy_kernel, { grid, 128, 0, stream, false }, params);
}

cudaError_t kvg_rows_load(void)
{
	struct cudaFuncAttributes attributes;
	const cudaError_t error = cudaFuncGetAttributes(&attributes, rows_kernel);

	return error != cudaSuccess ? error : cudaFuncGetAttributes(&attributes, copy_kernel);
}
