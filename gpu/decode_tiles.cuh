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
 * q is split into a float16 and what it leaves over. Up to four heads (PARTS): every head has two columns,
 * for both parts of q, and of w. More heads have a column each, and both parts of q one after the other.
 */
#ifndef GPU_DECODE_TILES_CUH
#define GPU_DECODE_TILES_CUH

#include "gpu/decode_kernel.cuh"

namespace tiles
{

/* Entry e of lane l at 256 e + 4 l; the other halves of the entries are unused. */
struct pair_table {
	static constexpr uint32_t BYTES = 65536;

	uint32_t lane4;

	__device__ __forceinline__ uint32_t pair(uint32_t word, uint32_t selector) const
	{
		return look_up(SHARED_AT + byte_permute(word, lane4, selector));
	}
};

/* Scores of up to four heads (in PARTS), or up to eight. */
template <class Shape> struct pair_scores {
	static constexpr int D = Shape::D, GROUPS = Shape::GROUPS;
	static constexpr bool PARTS = GROUPS == 1;
	static constexpr int Q_WORDS = D / 8, Q_PARTS = PARTS ? 1 : 2;
	static constexpr uint32_t NORMS_AT = 8 * D, K_BYTES = NORMS_AT + 64;
	static constexpr uint32_t TABLE_BYTES = pair_table::BYTES, ROOM_FLOATS = TABLE_BYTES / 8;

	struct pair_table pairs;
	uint32_t q[Q_PARTS][Q_WORDS];
	float q_scale;

	/* The warps fill the table together, while the first units arrive. */
	__device__ __forceinline__ pair_scores(
		const struct kvg_decode_params &params, uint8_t *memory, uint32_t lane)
	    : pairs({ lane * 4 })
	{
		const uint32_t *centroids = params.tables.words + params.k_table;

		for (uint32_t high = threadIdx.x / 32; high < 16; high += Shape::WARPS) {
			const uint32_t high_bits = centroids[high] << 16;
#pragma unroll
			for (uint32_t low = 0; low < 16; low++)
				*(uint32_t *)(memory + (high * 16 + low) * 256 + lane * 4) =
					high_bits | centroids[low];
		}
		sync_threads(Shape::WARPS * 32);
	}

	/* The head whose scores lane 4g + c has. */
	static __device__ __forceinline__ uint32_t head_of(int h, uint32_t c)
	{
		return PARTS ? c : 2 * c + h;
	}

	/* That of integers, where V is not in float16 pairs. */
	__device__ __forceinline__ uint2 value_table(const struct kvg_decode_params &params) const
	{
		return { params.tables.words[params.v_table], params.tables.words[params.v_table + 1] };
	}

	/* Sums lie in the unused halves of the table's entries. */
	static __device__ __forceinline__ float *sum_at(uint8_t *table, uint32_t i)
	{
		return (float *)(table + (i >> 5) * 256 + 128 + 4 * (i & 31));
	}

	__device__ __forceinline__ void load_query(
		const struct kvg_decode_params &params, uint32_t item_idx, uint32_t lane)
	{
		const uint4 *fragments = (const uint4 *)params.q_prepared +
			((uint64_t)item_idx * Q_PARTS * 32 + lane) * (Q_WORDS / 4);

		q_scale = params.q_scales[item_idx];
#pragma unroll
		for (int part = 0; part < Q_PARTS; part++) {
#pragma unroll
			for (int i = 0; i < Q_WORDS / 4; i++) {
				const uint4 v = fragments[part * 8 * Q_WORDS + i];

				q[part][4 * i] = v.x, q[part][4 * i + 1] = v.y, q[part][4 * i + 2] = v.z,
					    q[part][4 * i + 3] = v.w;
			}
		}
	}

	__device__ __forceinline__ void begin_queries(uint32_t)
	{
	}

	__device__ __forceinline__ void score_tile(
		struct unit<Shape> &unit, uint32_t t, uint32_t at, uint32_t v_norms_at, uint32_t lane) const
	{
		uint32_t a[D / 32], b[D / 32];
		float s[4] = { 0, 0, 0, 0 };

		load_words<D>(at, lane, a);
		load_words<D>(at + 4 * D, lane, b);

		const struct row_norms norms = load_norms(at + NORMS_AT, v_norms_at, lane);
#pragma unroll
		for (int i = 0; i < D / 32; i++) {
#pragma unroll
			for (int j = 0; j < 2; j++) {
				const uint32_t first = j ? 0x5524 : 0x5504, second = j ? 0x5534 : 0x5514;
				const int k = (i * 2 + j) * 2;

				const uint32_t a0 = pairs.pair(a[i], first), a1 = pairs.pair(b[i], first),
					       a2 = pairs.pair(a[i], second), a3 = pairs.pair(b[i], second);
#pragma unroll
				for (int part = 0; part < Q_PARTS; part++)
					multiply(s, a0, a1, a2, a3, q[part][k], q[part][k + 1]);
			}
		}

		const float k0 = norms.k[0] * q_scale, k1 = norms.k[1] * q_scale;
		const float log2_n0 = log2_fast(norms.v[0]), log2_n1 = log2_fast(norms.v[1]);

		unit.inverse[t][0] = reciprocal_fast(norms.v[0]);
		unit.inverse[t][1] = reciprocal_fast(norms.v[1]);
		if constexpr (PARTS) {
			unit.y[0][t][0] = fmaf(s[0] + s[1], k0, log2_n0);
			unit.y[0][t][1] = fmaf(s[2] + s[3], k1, log2_n1);
		} else {
#pragma unroll
			for (int h = 0; h < 2; h++) {
				unit.y[h][t][0] = fmaf(s[h], k0, log2_n0);
				unit.y[h][t][1] = fmaf(s[2 + h], k1, log2_n1);
			}
		}
	}
};

/* Weights and values by the same table. */
template <class Shape, class Scores> struct pair_values {
	static constexpr int D = Shape::D, GROUPS = Shape::GROUPS, HEADS = Shape::HEADS, TILES = Shape::TILES;
	static constexpr bool PARTS = GROUPS == 1;
	static constexpr int SUMS = D / 16;
	static constexpr uint32_t NORMS_AT = 8 * D, V_BYTES = NORMS_AT + 64,
				  TILE_BYTES = Scores::K_BYTES + V_BYTES, ROW_FLOATS = D;
	static constexpr float LOG2_OF_WEIGHT_ONE = 0;

	uint8_t *sums;
	float *max_sums;
	struct pair_table pairs;
	float o[SUMS][4], m[GROUPS], l[GROUPS];

	__device__ __forceinline__ pair_values(
		const struct kvg_decode_params &, const Scores &scores, uint8_t *sums, float *max_sums)
	    : sums(sums), max_sums(max_sums), pairs(scores.pairs)
	{
	}

	__device__ __forceinline__ void begin_sums()
	{
#pragma unroll
		for (int h = 0; h < GROUPS; h++)
			m[h] = -1e30f, l[h] = 0;
#pragma unroll
		for (int i = 0; i < SUMS; i++)
			o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0;
	}

	/* ---- weights ---- */

	__device__ __forceinline__ void raise_maxima(const struct unit<Shape> &unit)
	{
		float largest[GROUPS];
		bool is_above = false;

#pragma unroll
		for (int h = 0; h < GROUPS; h++) {
			largest[h] = largest_of(unit, h);
			is_above |= largest[h] > m[h] + 15.0f;
		}
		if (!__any_sync(0xFFFFFFFFu, is_above))
			return;
#pragma unroll
		for (int h = 0; h < GROUPS; h++) {
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
	__device__ __forceinline__ void weigh(
		const struct unit<Shape> &unit, uint32_t t, uint32_t (&weights)[2])
	{
#pragma unroll
		for (int r = 0; r < 2; r++) {
			if constexpr (PARTS) {
				const float x = exp2_fast(unit.y[0][t][r] - m[0]);
				const float high = __uint_as_float(__float_as_uint(x) & 0xFFFFE000u);

				l[0] = fmaf(x, unit.inverse[t][r], l[0]);
				weights[r] = transpose(pack_halves(high, x - high));
			} else {
				const float x0 = exp2_fast(unit.y[0][t][r] - m[0]),
					    x1 = exp2_fast(unit.y[1][t][r] - m[1]);

				l[0] = fmaf(x0, unit.inverse[t][r], l[0]);
				l[1] = fmaf(x1, unit.inverse[t][r], l[1]);
				weights[r] = transpose(pack_halves(x0, x1));
			}
		}
	}

	/* ---- values ---- */

	__device__ __forceinline__ void add_tile(uint32_t at, const uint32_t (&weights)[2], uint32_t lane)
	{
		uint32_t a[D / 32], b[D / 32];

		load_words<D>(at, lane, a);
		load_words<D>(at + 4 * D, lane, b);
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

				multiply(o[i * 4 + j], pairs.pair(even0, selector),
					pairs.pair(odd0, selector), pairs.pair(even1, selector),
					pairs.pair(odd1, selector), weights[0], weights[1]);
			}
		}
	}

	__device__ __forceinline__ void add_values(
		const struct unit<Shape> &unit, uint32_t base, uint32_t lane)
	{
		uint32_t weights[TILES][2];

#pragma unroll
		for (uint32_t t = 0; t < TILES; t++)
			weigh(unit, t, weights[t]);
#pragma unroll
		for (uint32_t t = 0; t < TILES; t++)
			add_tile(base + t * TILE_BYTES, weights[t], lane);
	}

	/* ---- the warps' sums become the block's ---- */

	__device__ __forceinline__ void end_item()
	{
#pragma unroll
		for (int h = 0; h < GROUPS; h++)
			l[h] = add_over_rows(l[h]);
	}

	/* chunk = channel / 4, spread over the banks by head. */
	__device__ __forceinline__ float4 *sums_at(uint32_t slot, uint32_t head, uint32_t chunk) const
	{
		return (float4 *)Scores::sum_at(sums,
			(slot * HEADS + head) * ROW_FLOATS + ((chunk ^ (PARTS ? head : head >> 1)) << 2));
	}

	/* Channels (D / 8) g and on. */
	__device__ __forceinline__ void leave(uint32_t slot, bool is_added, uint32_t lane)
	{
		const uint32_t g = lane / 4, c = lane % 4;

#pragma unroll
		for (int h = 0; h < GROUPS; h++) {
			const uint32_t head = Scores::head_of(h, c);
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

/* What instantiations say: TOKENS of a unit, STAGES of a warp's ring; PARTS: up to four heads. */
template <int D, int TOKENS, int STAGES, bool PARTS, int SLOT_WARPS,
	class Shape = shape<D, TOKENS, STAGES, SLOT_WARPS, PARTS ? 1 : 2>, class Scores = pair_scores<Shape>>
using pairs = kernel<Shape, Scores, pair_values<Shape, Scores>>;

} // namespace tiles

#endif
