/*
 * Decode of tq4 tiles at head dims 64 and 128, sm_90a: exact, float16 products with float32 sums.
 *
 * The dequantised rows are the A operand of mma.m16n8k16 (16 tokens, or 16 channels of V^T), the query heads
 * are its columns. Two indices at a time become two float16 centroids by one look-up in a table of 256 pairs
 * that every lane has for itself (64 KiB: entry e of lane l at 256 e + 4 l, so one byte permute makes the
 * address and no two lanes meet in a bank). Every warp streams units of tokens through a ring of its own by
 * bulk copies; nothing in the loop waits for another warp.
 *
 * Weights: y = score + log2(norm of v), w = 2^(y - m) as float16, so no multiplication by the norm is left;
 * the denominator adds w / norm in float32. m moves only when a score passes it by 15, so w stays below 2^15.
 * Up to four heads (PARTS): every head has two columns, q and w split into a float16 and what it leaves over.
 */
#ifndef GPU_DECODE_TILES_CUH
#define GPU_DECODE_TILES_CUH

#include "gpu/decode_common.cuh"

namespace tiles
{

/* TOKENS of a unit, STAGES of the ring of each of WARPS warps; SLOT_WARPS: warps that leave their sums side
 * by side. */
template <int D, int TOKENS_, int STAGES_, int WARPS_, bool PARTS, int SLOT_WARPS> struct pairs {
	static constexpr int TOKENS = TOKENS_, STAGES = STAGES_, WARPS = WARPS_, BLOCKS = 1,
			     SLOTS = SLOT_WARPS;
	static constexpr int TILES = TOKENS / 16, HEADS = PARTS ? 4 : 8, LANE_HEADS = PARTS ? 1 : 2;
	static constexpr int Q_WORDS = D / 8, SUMS = D / 16;
	static constexpr uint32_t NORMS_AT = 8 * D, HALF_BYTES = NORMS_AT + 64, TILE_BYTES = 2 * HALF_BYTES;
	static constexpr uint32_t STAGE_BYTES = TILES * TILE_BYTES, CHUNKS = D / 4, TABLE_BYTES = 65536;
	static constexpr float LOG2_OF_WEIGHT_ONE = 0;
	static constexpr bool HAS_SHARED_QUERY = false;
	/* Shared memory: the table, rings, maxima and denominators [SLOTS][HEADS][2], barriers. */
	static constexpr uint32_t RING_AT = TABLE_BYTES, MAX_SUMS_AT = RING_AT + WARPS * STAGES * STAGE_BYTES;
	static constexpr uint32_t BARRIERS_AT = MAX_SUMS_AT + SLOTS * HEADS * 2 * 4;
	static constexpr size_t SHARED_BYTES = BARRIERS_AT + WARPS * STAGES * 8;
	static_assert(WARPS % SLOTS == 0, "whole rounds");
	static_assert(SLOTS * HEADS * D <= 8192, "sums lie in the unused halves of the table's entries");

	uint8_t *memory;
	float *max_sums;
	uint32_t table, lane4;
	uint32_t q[Q_WORDS];
	float q_scale, o[SUMS][4], m[LANE_HEADS], l[LANE_HEADS];

	/* What becomes of a unit: y = log2(weight * norm of v) of rows g and g + 8, and their heads. */
	struct unit {
		float y[TILES][2 * LANE_HEADS], inverse[TILES][2];
	};

	/* The warps fill the table together, while the first units arrive. */
	__device__ __forceinline__ pairs(
		const struct kvg_decode_params &params, uint8_t *memory, uint32_t lane)
	    : memory(memory), max_sums((float *)(memory + MAX_SUMS_AT)), table(shared_address(memory)),
	      lane4(lane * 4)
	{
		const uint32_t *centroids = params.tables.words + params.tile_table;

		for (uint32_t high = threadIdx.x / 32; high < 16; high += WARPS) {
			const uint32_t high_bits = centroids[high] << 16;
#pragma unroll
			for (uint32_t low = 0; low < 16; low++)
				*(uint32_t *)(memory + (high * 16 + low) * 256 + lane4) =
					high_bits | centroids[low];
		}
		__syncthreads();
	}

	__device__ __forceinline__ void load_query(
		const struct kvg_decode_params &params, uint32_t item_idx, uint32_t lane)
	{
		const uint4 *fragments =
			(const uint4 *)(params.q_prepared + ((uint64_t)item_idx * 32 + lane) * Q_WORDS);

		q_scale = params.q_scales[item_idx];
#pragma unroll
		for (int i = 0; i < Q_WORDS / 4; i++) {
			const uint4 v = fragments[i];

			q[4 * i] = v.x, q[4 * i + 1] = v.y, q[4 * i + 2] = v.z, q[4 * i + 3] = v.w;
		}
	}

	__device__ __forceinline__ void begin_item(uint32_t)
	{
#pragma unroll
		for (int h = 0; h < LANE_HEADS; h++)
			m[h] = -1e30f, l[h] = 0;
#pragma unroll
		for (int i = 0; i < SUMS; i++)
			o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0;
	}

	/* Indices of one lane, one in each nibble: D / 32 words for a token of K, D / 64 for each of two
	 * tokens of V. */
	static __device__ __forceinline__ void load_words(
		uint32_t address, uint32_t lane, uint32_t (&w)[D / 32])
	{
		if constexpr (D == 128) {
			const uint4 v = load_16(address + lane * 16);

			w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
		} else {
			const uint2 v = load_8(address + lane * 8);

			w[0] = v.x, w[1] = v.y;
		}
	}

	__device__ __forceinline__ uint32_t pair(uint32_t word, uint32_t selector) const
	{
		return look_up(table + byte_permute(word, lane4, selector));
	}

	/* ---- scores ---- */

	__device__ __forceinline__ void score_tile(
		struct unit &unit, uint32_t t, uint32_t at, uint32_t lane) const
	{
		uint32_t a[D / 32], b[D / 32];
		float s[4] = { 0, 0, 0, 0 };

		load_words(at, lane, a);
		load_words(at + 4 * D, lane, b);

		const uint2 k_norms = load_8(at + NORMS_AT + lane / 4 * 8);
		const uint2 v_norms = load_8(at + HALF_BYTES + NORMS_AT + lane / 4 * 8);
#pragma unroll
		for (int i = 0; i < D / 32; i++) {
#pragma unroll
			for (int j = 0; j < 2; j++) {
				const uint32_t first = j ? 0x5524 : 0x5504, second = j ? 0x5534 : 0x5514;
				const int k = (i * 2 + j) * 2;

				multiply(s, pair(a[i], first), pair(b[i], first), pair(a[i], second),
					pair(b[i], second), q[k], q[k + 1]);
			}
		}

		/* A norm of 0 has no logarithm; its rows are 0 whatever their weight. */
		const float n0 = fmaxf(__uint_as_float(v_norms.x), 1e-30f),
			    n1 = fmaxf(__uint_as_float(v_norms.y), 1e-30f);
		const float k0 = __uint_as_float(k_norms.x) * q_scale,
			    k1 = __uint_as_float(k_norms.y) * q_scale;

		unit.inverse[t][0] = reciprocal_fast(n0);
		unit.inverse[t][1] = reciprocal_fast(n1);
		if constexpr (PARTS) {
			unit.y[t][0] = fmaf(s[0] + s[1], k0, log2_fast(n0));
			unit.y[t][1] = fmaf(s[2] + s[3], k1, log2_fast(n1));
		} else {
			unit.y[t][0] = fmaf(s[0], k0, log2_fast(n0));
			unit.y[t][1] = fmaf(s[1], k0, log2_fast(n0));
			unit.y[t][2] = fmaf(s[2], k1, log2_fast(n1));
			unit.y[t][3] = fmaf(s[3], k1, log2_fast(n1));
		}
	}

	/* Tokens outside [lo, hi) weigh nothing. */
	static __device__ __forceinline__ void mask(
		struct unit &unit, uint32_t token, uint32_t lo, uint32_t hi, uint32_t lane)
	{
#pragma unroll
		for (uint32_t t = 0; t < TILES; t++) {
#pragma unroll
			for (int r = 0; r < 2; r++) {
				const uint32_t at = token + t * 16 + lane / 4 + 8 * r;

				if (at >= lo && at < hi)
					continue;
				unit.inverse[t][r] = 0;
#pragma unroll
				for (int h = 0; h < LANE_HEADS; h++)
					unit.y[t][r * LANE_HEADS + h] = -1e30f;
			}
		}
	}

	/* ---- weights ---- */

	__device__ __forceinline__ void raise_maxima(const struct unit &unit)
	{
		float largest[LANE_HEADS];
		bool is_above = false;

#pragma unroll
		for (int h = 0; h < LANE_HEADS; h++) {
			largest[h] = fmaxf(unit.y[0][h], unit.y[0][LANE_HEADS + h]);
#pragma unroll
			for (uint32_t t = 1; t < TILES; t++)
				largest[h] =
					fmaxf(largest[h], fmaxf(unit.y[t][h], unit.y[t][LANE_HEADS + h]));
			is_above |= largest[h] > m[h] + 15.0f;
		}
		if (!__any_sync(0xFFFFFFFFu, is_above))
			return;
#pragma unroll
		for (int h = 0; h < LANE_HEADS; h++) {
			const float m_new = fmaxf(m[h], max_over_rows(largest[h]) - 8.0f),
				    shrink = exp2_fast(m[h] - m_new);

			m[h] = m_new;
			l[h] *= shrink;
#pragma unroll
			for (int i = 0; i < SUMS; i++) {
				o[i][h] *= shrink;
				o[i][2 + h] *= shrink;
				if constexpr (PARTS) {
					o[i][1] *= shrink;
					o[i][3] *= shrink;
				}
			}
		}
	}

	/* B fragments: tokens 0 to 7 and 8 to 15 of a tile. */
	__device__ __forceinline__ void weigh(const struct unit &unit, uint32_t t, uint32_t (&weights)[2])
	{
#pragma unroll
		for (int r = 0; r < 2; r++) {
			if constexpr (PARTS) {
				const float x = exp2_fast(unit.y[t][r] - m[0]);
				const float high = __uint_as_float(__float_as_uint(x) & 0xFFFFE000u);

				l[0] = fmaf(x, unit.inverse[t][r], l[0]);
				weights[r] = transpose(pack_halves(high, x - high));
			} else {
				const float x0 = exp2_fast(unit.y[t][2 * r] - m[0]),
					    x1 = exp2_fast(unit.y[t][2 * r + 1] - m[1]);

				l[0] = fmaf(x0, unit.inverse[t][r], l[0]);
				l[1] = fmaf(x1, unit.inverse[t][r], l[1]);
				weights[r] = transpose(pack_halves(x0, x1));
			}
		}
	}

	/* ---- values ---- */

	__device__ __forceinline__ void add_values(uint32_t at, const uint32_t (&weights)[2], uint32_t lane)
	{
		uint32_t a[D / 32], b[D / 32];

		load_words(at, lane, a);
		load_words(at + 4 * D, lane, b);
#pragma unroll
		for (int i = 0; i < D / 64; i++) {
			/* Bytes that hold one channel of two tokens: even channels, then odd ones. */
			const uint32_t a0 = a[i], a1 = a[D / 64 + i], b0 = b[i], b1 = b[D / 64 + i];
			const uint32_t even0 = (a0 & 0x0F0F0F0Fu) | ((a1 << 4) & 0xF0F0F0F0u);
			const uint32_t odd0 = ((a0 >> 4) & 0x0F0F0F0Fu) | (a1 & 0xF0F0F0F0u);
			const uint32_t even1 = (b0 & 0x0F0F0F0Fu) | ((b1 << 4) & 0xF0F0F0F0u);
			const uint32_t odd1 = ((b0 >> 4) & 0x0F0F0F0Fu) | (b1 & 0xF0F0F0F0u);
#pragma unroll
			for (int j = 0; j < 4; j++) {
				const uint32_t selector = 0x5504 | (j << 4);

				multiply(o[i * 4 + j], pair(even0, selector), pair(odd0, selector),
					pair(even1, selector), pair(odd1, selector), weights[0], weights[1]);
			}
		}
	}

	__device__ __forceinline__ void add_unit(
		uint32_t base, uint32_t token, uint32_t lo, uint32_t hi, uint32_t lane)
	{
		uint32_t weights[TILES][2];
		struct unit unit;

#pragma unroll
		for (uint32_t t = 0; t < TILES; t++)
			score_tile(unit, t, base + t * TILE_BYTES, lane);
		if (token < lo || token + TOKENS > hi)
			mask(unit, token, lo, hi, lane);
		raise_maxima(unit);
#pragma unroll
		for (uint32_t t = 0; t < TILES; t++)
			weigh(unit, t, weights[t]);
#pragma unroll
		for (uint32_t t = 0; t < TILES; t++)
			add_values(base + t * TILE_BYTES + HALF_BYTES, weights[t], lane);
	}

	/* ---- the warps' sums become the block's ---- */

	__device__ __forceinline__ void end_item()
	{
#pragma unroll
		for (int h = 0; h < LANE_HEADS; h++)
			l[h] = add_over_rows(l[h]);
	}

	/* Float i of the buffer in the other half of every entry; chunk = channel / 4, spread over the banks
	 * by head. */
	__device__ __forceinline__ float4 *sums_at(uint32_t slot, uint32_t head, uint32_t chunk) const
	{
		const uint32_t i = (slot * HEADS + head) * D + ((chunk ^ (PARTS ? head : head >> 1)) << 2);

		return (float4 *)(memory + (i >> 5) * 256 + 128 + 4 * (i & 31));
	}

	/* Lane 4g + c: channels (D / 8) g and on of head c, or of heads 2c and 2c + 1. */
	__device__ __forceinline__ void leave(uint32_t slot, bool is_added, uint32_t lane)
	{
		const uint32_t g = lane / 4, c = lane % 4;

#pragma unroll
		for (int h = 0; h < LANE_HEADS; h++) {
			const uint32_t head = PARTS ? c : 2 * c + h;
			float *own = max_sums + (slot * HEADS + head) * 2;
			const struct rescale scale = join_sums(m[h], l[h], own, is_added);

#pragma unroll
			for (int k = 0; k < SUMS / 2; k++) {
				float4 *at = sums_at(slot, head, SUMS / 2 * g + k);
				float4 v;

				if constexpr (PARTS)
					v = make_float4(o[2 * k][0] + o[2 * k][1], o[2 * k][2] + o[2 * k][3],
						o[2 * k + 1][0] + o[2 * k + 1][1],
						o[2 * k + 1][2] + o[2 * k + 1][3]);
				else
					v = make_float4(o[2 * k][h], o[2 * k][2 + h], o[2 * k + 1][h],
						o[2 * k + 1][2 + h]);
				if (is_added) {
					const float4 z = *at;

					v.x = v.x * scale.mine + z.x * scale.theirs;
					v.y = v.y * scale.mine + z.y * scale.theirs;
					v.z = v.z * scale.mine + z.z * scale.theirs;
					v.w = v.w * scale.mine + z.w * scale.theirs;
				}
				*at = v;
			}
			__syncwarp();
			if (g == 0) {
				own[0] = m[h];
				own[1] = l[h];
			}
		}
	}
};

} // namespace tiles

#endif
