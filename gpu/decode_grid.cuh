/*
 * Decode of tq2 and tq3 tiles at head dim 128 in 8-bit integers, sm_90a.
 *
 * Centroids are rounded to multiples of one step, at most 127 of them. Then a register of four codes is a byte
 * permute's selector and its result the operand of mma.m16n8k32: four look-ups in one instruction, no table in memory.
 * The dequantised rows are the A operand; its columns are four heads, each with the high and the low 8-bit digit of a
 * 16-bit fixed-point query, or weight. More than four heads take two sets of columns. Rounding the centroids adds
 * an error of 1e-3 (tq2) to 5e-3 (tq3) of the output; the digits add 2e-4.
 *
 * Accumulators begin at 1.5 * 2^23 as the bits of a float32, so that integer sums below 2^22 turn into floats by a
 * subtraction: 128 * 127 * 128 and 128 * 127 * 255 are below. As in decode_tiles.cuh a weight is that of the token
 * times its V norm, y = score + log2(norm of v); the largest y so far becomes 65535.
 * Rings, work list and partial results are those of decode_common.cuh.
 */
#ifndef GPU_DECODE_GRID_CUH
#define GPU_DECODE_GRID_CUH

#include "gpu/decode_common.cuh"

namespace tiles
{

#define GRID_MAGIC       0x4B400000
#define GRID_MAGIC_FLOAT 12582912.0f
#define GRID_LOG2_ONE    15.9999779858f /* log2(65535): the largest weight */
#define GRID_ROW_FLOATS  136u /* of a head's sums in shared memory: 128 and a shift of the banks */

/* The first product of a chain begins with `start` in every accumulator. */
static __device__ __forceinline__ void begin_signed(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
	uint32_t b0, uint32_t b1, int start)
{
	asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
	    "{%10, %10, %10, %10};"
	    : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
	    : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(start));
}

static __device__ __forceinline__ void add_signed(
	int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1)
{
	asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
	    "{%0, %1, %2, %3};"
	    : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
	    : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

static __device__ __forceinline__ void begin_unsigned(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
	uint32_t b0, uint32_t b1, int start)
{
	asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
	    "{%10, %10, %10, %10};"
	    : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
	    : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(start));
}

static __device__ __forceinline__ void add_unsigned(
	int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1)
{
	asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
	    "{%0, %1, %2, %3};"
	    : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
	    : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* 256 times the high sum plus the low one; both began at the magic number. */
static __device__ __forceinline__ float join(int high, int low)
{
	return fmaf(__int_as_float(high), 256.0f, -257.0f * GRID_MAGIC_FLOAT) + __int_as_float(low);
}

/* Selector word i of 4 (8 codes, one in each nibble) from the BITS words of a group. */
template <int BITS> static __device__ __forceinline__ uint32_t selector(const uint32_t *w, int i)
{
	if constexpr (BITS == 3)
		return i < 3 ? w[i] & 0x77777777u
			     : ((w[0] >> 3) & 0x11111111u) | ((w[1] >> 2) & 0x22222222u) | ((w[2] >> 1) & 0x44444444u);
	else
		return (i & 1 ? w[i >> 1] >> 2 : w[i >> 1]) & 0x33333333u;
}

/* The words of both groups of a lane: 2 * BITS. */
template <int BITS>
static __device__ __forceinline__ void load_groups(uint32_t address, uint32_t lane, uint32_t (&w)[2 * BITS])
{
	const uint4 first = load_16(address + lane * 16);

	w[0] = first.x, w[1] = first.y, w[2] = first.z, w[3] = first.w;
	if constexpr (BITS == 3) {
		const uint2 second = load_8(address + 512 + lane * 8);

		w[4] = second.x, w[5] = second.y;
	}
}

/* The words of group `x` of a lane. */
template <int BITS>
static __device__ __forceinline__ void load_group(uint32_t address, uint32_t lane, int x, uint32_t (&w)[BITS])
{
	if constexpr (BITS == 3) {
		const uint4 first = load_16(address + lane * 16);

		if (x == 0) {
			w[0] = first.x, w[1] = first.y, w[2] = first.z;
		} else {
			const uint2 second = load_8(address + 512 + lane * 8);

			w[0] = first.w, w[1] = second.x, w[2] = second.y;
		}
	} else {
		const uint2 v = load_8(address + lane * 16 + x * 8);

		w[0] = v.x, w[1] = v.y;
	}
}

/* The token of a tile whose norm lies at a position, and whose score a lane has: rows g and g + 8 of K. */
static __device__ __forceinline__ uint32_t token_of(uint32_t g, uint32_t half)
{
	return 4 * (g >> 1) + 2 * half + (g & 1);
}

/* GROUPS of four heads; SLOTS: warps that leave their sums side by side. */
template <int BITS, int TOKENS, int STAGES, int WARPS, int GROUPS, int SLOTS>
static __global__ void __launch_bounds__(WARPS * 32, 1) grid_kernel(const __grid_constant__ struct kvg_decode_params params)
{
	constexpr uint32_t TILES = TOKENS / 16, NORMS_AT = 256 * BITS, HALF_BYTES = NORMS_AT + 64, TILE_BYTES = 2 * HALF_BYTES;
	constexpr uint32_t STAGE_BYTES = TILES * TILE_BYTES;
	constexpr int HEADS = 4 * GROUPS, ROUNDS = WARPS / SLOTS;
	static_assert(TILES % 2 == 0, "products over tokens take two tiles");
	static_assert(WARPS % SLOTS == 0, "whole rounds");
	extern __shared__ __align__(128) uint8_t memory[];
	const uint32_t tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, c = lane % 4;
	float *const sums = (float *)(memory + WARPS * STAGES * STAGE_BYTES); /* [SLOTS][HEADS][GRID_ROW_FLOATS] */
	float *const max_sums = sums + SLOTS * HEADS * GRID_ROW_FLOATS;       /* [SLOTS][HEADS][2] */
	uint64_t *const barriers = (uint64_t *)(max_sums + SLOTS * HEADS * 2);
	const uint32_t stages = shared_address(memory) + warp * STAGES * STAGE_BYTES;
	const uint32_t barrier = shared_address(barriers + warp * STAGES);
	const struct kvg_tables &tables = params.tables;
	const uint32_t n_virtual = tables.kv_heads * params.n_chunks;
	const uint32_t low_table = tables.words[params.tile_table], high_table = tables.words[params.tile_table + 1];
	const struct share share = find_share(params);
	struct cursor item = share.item;
	uint32_t item_unit = share.item_unit;
	ring<TOKENS, STAGES, WARPS, TILE_BYTES> ring(params, share, warp, stages, barrier);
	/* Lanes of even g have the columns of high digits. */
	const uint32_t digits = g & 1 ? 0x2064u : 0x7531u;
	uint32_t stage = 0, parity = 0, unit = share.unit_first + warp;

	while (item_unit < share.unit_end) {
		const struct kvg_decode_row &row = params.rows[item.row_idx];
		const uint32_t token_first = row.token_lo / TOKENS * TOKENS, token_lo = row.token_lo, token_hi = row.token_hi;
		const uint32_t end = min(share.unit_end, item_unit + item.n_units);
		const uint32_t item_idx = item.row_idx * n_virtual + item.virtual_head;
		uint32_t q[GROUPS][8];
		float q_scale[GROUPS], o[GROUPS][16], m[GROUPS], l[GROUPS];

#pragma unroll
		for (int h = 0; h < GROUPS; h++) {
			const uint4 *fragments =
				(const uint4 *)(params.q_prepared + (((uint64_t)item_idx * GROUPS + h) * 32 + lane) * 8);
			const uint4 v0 = fragments[0], v1 = fragments[1];

			q[h][0] = v0.x, q[h][1] = v0.y, q[h][2] = v0.z, q[h][3] = v0.w;
			q[h][4] = v1.x, q[h][5] = v1.y, q[h][6] = v1.z, q[h][7] = v1.w;
			q_scale[h] = params.q_scales[item_idx * KVG_HEADS_MAX + 4 * h + c];
			m[h] = -1e30f, l[h] = 0;
#pragma unroll
			for (int i = 0; i < 16; i++)
				o[h][i] = 0;
		}
		for (; unit < end; unit += WARPS) {
			const uint32_t base = stages + stage * STAGE_BYTES;
			const uint32_t token = token_first + (unit - item_unit) * TOKENS;
			const bool is_cut = token < token_lo || token + TOKENS > token_hi;
			float y[GROUPS][TILES][2], inverse[TILES][2];

			barrier_wait(barrier + 8 * stage, parity);
#pragma unroll
			for (uint32_t t = 0; t < TILES; t++) {
				const uint32_t at = base + t * TILE_BYTES;
				uint32_t w[2 * BITS], r[2][8];

				load_groups<BITS>(at, lane, w);

				const uint2 k_norms = load_8(at + NORMS_AT + g * 8);
				const uint2 v_norms = load_8(at + HALF_BYTES + NORMS_AT + g * 8);
				/* A norm of 0 has no logarithm; its rows are 0 whatever their weight. */
				const float n0 = fmaxf(__uint_as_float(v_norms.x), 1e-30f), n1 = fmaxf(__uint_as_float(v_norms.y), 1e-30f);
				const float log2_n0 = log2_fast(n0), log2_n1 = log2_fast(n1);

				inverse[t][0] = reciprocal_fast(n0);
				inverse[t][1] = reciprocal_fast(n1);
#pragma unroll
				for (int x = 0; x < 2; x++) {
#pragma unroll
					for (int i = 0; i < 4; i++) {
						const uint32_t select = selector<BITS>(w + x * BITS, i);

						r[x][2 * i] = byte_permute(low_table, high_table, select);
						r[x][2 * i + 1] = byte_permute(low_table, high_table, select >> 16);
					}
				}
#pragma unroll
				for (int h = 0; h < GROUPS; h++) {
					int sum[4];

					begin_signed(sum, r[0][0], r[1][0], r[0][1], r[1][1], q[h][0], q[h][1], GRID_MAGIC);
#pragma unroll
					for (int k = 1; k < 4; k++)
						add_signed(sum, r[0][2 * k], r[1][2 * k], r[0][2 * k + 1], r[1][2 * k + 1], q[h][2 * k],
							q[h][2 * k + 1]);
					y[h][t][0] = fmaf(join(sum[0], sum[1]), __uint_as_float(k_norms.x) * q_scale[h], log2_n0);
					y[h][t][1] = fmaf(join(sum[2], sum[3]), __uint_as_float(k_norms.y) * q_scale[h], log2_n1);
				}
			}
			if (is_cut) {
#pragma unroll
				for (uint32_t t = 0; t < TILES; t++) {
#pragma unroll
					for (int half = 0; half < 2; half++) {
						const uint32_t at = token + 16 * t + token_of(g, half);

						if (at >= token_lo && at < token_hi)
							continue;
						inverse[t][half] = 0;
#pragma unroll
						for (int h = 0; h < GROUPS; h++)
							y[h][t][half] = -1e30f;
					}
				}
			}

			bool has_moved = false;
			float shrink[GROUPS];

#pragma unroll
			for (int h = 0; h < GROUPS; h++) {
				float x = fmaxf(y[h][0][0], y[h][0][1]);

#pragma unroll
				for (uint32_t t = 1; t < TILES; t++)
					x = fmaxf(x, fmaxf(y[h][t][0], y[h][t][1]));
				x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 4));
				x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 8));
				x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 16));

				const float m_new = fmaxf(m[h], x);

				shrink[h] = m[h] - m_new;
				has_moved |= m_new != m[h];
				m[h] = m_new;
			}
			if (__any_sync(0xFFFFFFFFu, has_moved)) {
#pragma unroll
				for (int h = 0; h < GROUPS; h++) {
					const float factor = exp2_fast(shrink[h]);

					l[h] *= factor;
#pragma unroll
					for (int i = 0; i < 16; i++)
						o[h][i] *= factor;
				}
			}

			uint32_t weights[GROUPS][TILES];

#pragma unroll
			for (int h = 0; h < GROUPS; h++) {
				const float offset = m[h] - GRID_LOG2_ONE;

#pragma unroll
				for (uint32_t t = 0; t < TILES; t++) {
					const float w0 = exp2_fast(y[h][t][0] - offset), w1 = exp2_fast(y[h][t][1] - offset);
					/* 16-bit fixed point: the low bits of a sum with 2^23. */
					const uint32_t turned = transpose(byte_permute(__float_as_uint(w0 + 8388608.0f),
						__float_as_uint(w1 + 8388608.0f), 0x5410));

					l[h] = fmaf(w0, inverse[t][0], l[h]);
					l[h] = fmaf(w1, inverse[t][1], l[h]);
					weights[h][t] = byte_permute(turned, __shfl_xor_sync(0xFFFFFFFFu, turned, 4), digits);
				}
			}
#pragma unroll
			for (int x = 0; x < 2; x++) {
				uint32_t w[TILES][BITS];

#pragma unroll
				for (uint32_t t = 0; t < TILES; t++)
					load_group<BITS>(base + t * TILE_BYTES + HALF_BYTES, lane, x, w[t]);
#pragma unroll
				for (int i = 0; i < 4; i++) {
					int sum[GROUPS][4];

#pragma unroll
					for (uint32_t pair = 0; pair < TILES / 2; pair++) {
						const uint32_t select0 = selector<BITS>(w[2 * pair], i);
						const uint32_t select1 = selector<BITS>(w[2 * pair + 1], i);
						const uint32_t a0 = byte_permute(low_table, high_table, select0);
						const uint32_t a1 = byte_permute(low_table, high_table, select0 >> 16);
						const uint32_t a2 = byte_permute(low_table, high_table, select1);
						const uint32_t a3 = byte_permute(low_table, high_table, select1 >> 16);

#pragma unroll
						for (int h = 0; h < GROUPS; h++) {
							if (pair == 0)
								begin_unsigned(sum[h], a0, a1, a2, a3, weights[h][0], weights[h][1], GRID_MAGIC);
							else
								add_unsigned(sum[h], a0, a1, a2, a3, weights[h][2 * pair], weights[h][2 * pair + 1]);
						}
					}
#pragma unroll
					for (int h = 0; h < GROUPS; h++) {
						const int j = (x * 4 + i) * 2;

						o[h][j] += join(sum[h][0], sum[h][1]);
						o[h][j + 1] += join(sum[h][2], sum[h][3]);
					}
				}
			}
			__syncwarp();
			ring.refill(stage);
			if (++stage == STAGES) {
				stage = 0;
				parity ^= 1;
			}
		}

		/* ---- the warps' sums become the block's: a round after the other ---- */
#pragma unroll
		for (int h = 0; h < GROUPS; h++) {
			l[h] += __shfl_xor_sync(0xFFFFFFFFu, l[h], 4);
			l[h] += __shfl_xor_sync(0xFFFFFFFFu, l[h], 8);
			l[h] += __shfl_xor_sync(0xFFFFFFFFu, l[h], 16);
		}

		const uint32_t slot = warp % SLOTS, turn = warp / SLOTS;

		for (int round = ROUNDS - 1; round >= 0; round--) {
			if (turn == (uint32_t)round) {
#pragma unroll
				for (int h = 0; h < GROUPS; h++) {
					/* Head 4h + c, channels 8j + g. */
					float *own = max_sums + (slot * HEADS + 4 * h + c) * 2;
					float *to = sums + (slot * HEADS + 4 * h + c) * GRID_ROW_FLOATS + g;
					float mine = 1, theirs = 0;

					if (round < ROUNDS - 1) {
						const float m_new = fmaxf(m[h], own[0]);

						mine = exp2_fast(m[h] - m_new);
						theirs = exp2_fast(own[0] - m_new);
						l[h] = l[h] * mine + own[1] * theirs;
						m[h] = m_new;
					}
#pragma unroll
					for (int j = 0; j < 16; j++)
						to[8 * j] = round < ROUNDS - 1 ? o[h][j] * mine + to[8 * j] * theirs : o[h][j];
					__syncwarp();
					if (g == 0) {
						own[0] = m[h];
						own[1] = l[h];
					}
				}
			}
			__syncthreads();
		}

		const uint64_t out_slot = slot_of_item(params, share, item, item_unit, item_idx);
		const uint32_t group = tables.q_heads / tables.kv_heads;
		const uint32_t n_heads = min(group - item.virtual_head % params.n_chunks * KVG_HEADS_MAX, params.n_heads);

		for (uint32_t x = tid; x < n_heads * 32; x += WARPS * 32) {
			const uint32_t head = x / 32, chunk = x % 32;
			float largest = -1e30f, sum = 0;
			float4 total = make_float4(0, 0, 0, 0);

#pragma unroll
			for (int k = 0; k < SLOTS; k++)
				largest = fmaxf(largest, max_sums[(k * HEADS + head) * 2]);
#pragma unroll
			for (int k = 0; k < SLOTS; k++) {
				const float weight = exp2_fast(max_sums[(k * HEADS + head) * 2] - largest);
				const float4 v = *(const float4 *)(sums + (k * HEADS + head) * GRID_ROW_FLOATS + chunk * 4);

				sum += weight * max_sums[(k * HEADS + head) * 2 + 1];
				total.x += weight * v.x;
				total.y += weight * v.y;
				total.z += weight * v.z;
				total.w += weight * v.w;
			}

			const uint64_t at = out_slot * params.n_heads + head;

			*(float4 *)(params.partials + at * params.v_dim_max + chunk * 4) = total;
			if (chunk == 0) {
				params.partials_ml[at * 2] = largest - GRID_LOG2_ONE;
				params.partials_ml[at * 2 + 1] = sum;
			}
		}
		__syncthreads();
		item_unit += item.n_units;
		next_head(params, n_virtual, item);
	}
}

template <int BITS, int TOKENS, int STAGES, int WARPS, int GROUPS, int SLOTS> struct grid_variant {
	static constexpr size_t shared_bytes = (size_t)WARPS * STAGES * (TOKENS / 16) * 2 * (256 * BITS + 64) +
		SLOTS * 4 * GROUPS * (GRID_ROW_FLOATS + 2) * sizeof(float) + WARPS * STAGES * sizeof(uint64_t);
	static_assert(shared_bytes <= 227 * 1024, "shared memory of one SM");

	static cudaError_t launch(const struct kvg_decode_params *params, cudaStream_t stream)
	{
		grid_kernel<BITS, TOKENS, STAGES, WARPS, GROUPS, SLOTS>
			<<<params->n_blocks, WARPS * 32, shared_bytes, stream>>>(*params);
		return cudaGetLastError();
	}

	static cudaError_t load()
	{
		return cudaFuncSetAttribute(grid_kernel<BITS, TOKENS, STAGES, WARPS, GROUPS, SLOTS>,
			cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_bytes);
	}
};

} // namespace tiles

#define KVG_GRID_VARIANT(name, ...)                                                                             \
	extern "C" cudaError_t kvg_tiles_launch_##name(const struct kvg_decode_params *params, cudaStream_t stream) \
	{                                                                                                       \
		return tiles::grid_variant<__VA_ARGS__>::launch(params, stream);                                \
	}                                                                                                       \
	extern "C" cudaError_t kvg_tiles_load_##name(void)                                                      \
	{                                                                                                       \
		return tiles::grid_variant<__VA_ARGS__>::load();                                                \
	}

#endif
