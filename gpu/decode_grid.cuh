/*
 * Decode of tq2 and tq3 tiles at head dims 64 and 128 in 8-bit integers, sm_90a.
 *
 * Centroids are rounded to multiples of one step, at most 127 of them. Then a register of four codes is a
 * byte permute's selector and its result the operand of mma.m16n8k32: four look-ups in one instruction, no
 * table in memory. The dequantised rows are the A operand; its columns are four heads, each with the high and
 * the low 8-bit digit of a 16-bit fixed-point query, or weight. More than four heads take two sets of
 * columns.
 *
 * What rounding took off the centroids of tq3 matters where logits spread: it is a second table of bytes, 256
 * times finer. Its products with the high digit of the query go into the columns of the low digit, which have
 * that weight; so K is exact to 2^-15 of a step and no sum is added. V keeps the error of its table, 1e-3 of
 * the output; the digits add 2e-4.
 *
 * Accumulators begin at 1.5 * 2^23 as the bits of a float32, so that integer sums below 2^22 turn into floats
 * by a subtraction: 128 * 127 * 128, 128 * (128 * 113 + 127 * 128) and 128 * 127 * 255 are below. As in
 * decode_tiles.cuh a weight is that of the token times its V norm, y = score + log2(norm of v); the largest y
 * so far becomes 65535.
 */
#ifndef GPU_DECODE_GRID_CUH
#define GPU_DECODE_GRID_CUH

#include "gpu/decode_kernel.cuh"

namespace tiles
{

#define GRID_MAGIC       0x4B400000
#define GRID_MAGIC_FLOAT 12582912.0f

/* 256 times the high sum plus the low one; both began at the magic number. */
static __device__ __forceinline__ float join_digits(int high, int low)
{
	return fmaf(__int_as_float(high), 256.0f, -257.0f * GRID_MAGIC_FLOAT) + __int_as_float(low);
}

/* Selector word i of 4 (8 codes, one in each nibble) from the BITS words of a set. */
template <int BITS> static __device__ __forceinline__ uint32_t selector(const uint32_t *w, int i)
{
	if constexpr (BITS == 3)
		return i < 3 ? w[i] & 0x77777777u
			     : ((w[0] >> 3) & 0x11111111u) | ((w[1] >> 2) & 0x22222222u) |
				((w[2] >> 1) & 0x44444444u);
	else
		return (i & 1 ? w[i >> 1] >> 2 : w[i >> 1]) & 0x33333333u;
}

/*
 * A set is 32 codes in BITS words: four selector words. A lane has D / 64 sets of a tile of K, or of V; of K
 * its two rows have half of the selector words each. The first D / 32 words of all lanes lie together, then
 * the rest.
 */
template <int BITS, int D>
static __device__ __forceinline__ void load_sets(
	uint32_t address, uint32_t lane, uint32_t (&w)[D / 64 * BITS])
{
	load_words<D>(address, lane, w);
	if constexpr (BITS == 3 && D == 128) {
		const uint2 second = load_8(address + 512 + lane * 8);

		w[4] = second.x, w[5] = second.y;
	} else if constexpr (BITS == 3) {
		w[2] = load_4(address + 256 + lane * 4);
	}
}

/* The words of set x of a lane. */
template <int BITS, int D>
static __device__ __forceinline__ void load_set(uint32_t address, uint32_t lane, int x, uint32_t (&w)[BITS])
{
	if constexpr (D == 64) {
		load_sets<BITS, D>(address, lane, w);
	} else if constexpr (BITS == 3) {
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

/* Scores. */
template <class Shape, int BITS> struct grid_scores {
	static constexpr int D = Shape::D, GROUPS = Shape::GROUPS;
	static constexpr int PRODUCTS = D / 32, SETS = D / 64; /* of channels, of a lane */
	static constexpr uint32_t NORMS_AT = 2 * D * BITS, K_BYTES = NORMS_AT + 64;
	static constexpr uint32_t TABLE_BYTES = 0, ROOM_FLOATS = 0;
	static constexpr bool HAS_RESTS = BITS == 3;
	static constexpr int Q_WORDS = D / 16, REST_WORDS = HAS_RESTS ? Q_WORDS : 1;

	uint32_t low_table, high_table, low_rests, high_rests;
	uint32_t q[GROUPS][Q_WORDS], q_rest[REST_WORDS];
	float q_scale;

	__device__ __forceinline__ grid_scores(const struct kvg_decode_params &params, uint8_t *, uint32_t)
	    : low_table(params.tables.words[params.k_table]),
	      high_table(params.tables.words[params.k_table + 1]),
	      low_rests(params.tables.words[params.k_table + 2]),
	      high_rests(params.tables.words[params.k_table + 3])
	{
	}

	/* The head of group h whose scores lane 4g + c has. */
	static __device__ __forceinline__ uint32_t head_of(int h, uint32_t c)
	{
		return 4 * h + c;
	}

	/* Sums lie one after the other. */
	static __device__ __forceinline__ float *sum_at(uint8_t *sums, uint32_t i)
	{
		return (float *)sums + i;
	}

	/* K and V have the same table, in the same registers. */
	__device__ __forceinline__ uint2 value_table(const struct kvg_decode_params &) const
	{
		return { low_table, high_table };
	}

	/* ---- queries ---- */

	__device__ __forceinline__ void load_query(
		const struct kvg_decode_params &params, uint32_t item_idx, uint32_t lane)
	{
		const uint4 *fragments =
			(const uint4 *)params.q_prepared + (uint64_t)item_idx * GROUPS * (D / 2);

		q_scale = params.q_scales[item_idx];
#pragma unroll
		for (int h = 0; h < GROUPS; h++) {
#pragma unroll
			for (int i = 0; i < SETS; i++) {
				const uint4 v = fragments[(h * 32 + lane) * SETS + i];

				q[h][4 * i] = v.x, q[h][4 * i + 1] = v.y, q[h][4 * i + 2] = v.z,
					 q[h][4 * i + 3] = v.w;
			}
		}
	}

	/*
	 * The second operand of the rests has high digits only. Up to four heads: in the columns of the low
	 * digits, whose weight the products have, so that both go into the same sums. Eight heads: a column
	 * each, of the heads of the first group and of the second in turn. Neighbouring columns are four
	 * lanes apart.
	 */
	__device__ __forceinline__ void begin_queries(uint32_t lane)
	{
		if constexpr (HAS_RESTS) {
#pragma unroll
			for (int i = 0; i < REST_WORDS; i++) {
				const uint32_t high = __shfl_xor_sync(0xFFFFFFFFu, q[GROUPS - 1][i], 4);

				q_rest[i] = lane & 4u ? high : GROUPS == 2 ? q[0][i] : 0;
			}
		}
	}

	/* ---- scores ---- */

	/* Products of the dequantised rows of a lane with a query; h == GROUPS: with the rests'
	 * operand. */
	__device__ __forceinline__ void add_products(
		int (&sum)[4], int h, const uint32_t (&r)[2][D / 16]) const
	{
#pragma unroll
		for (int k = 0; k < PRODUCTS; k++) {
			const uint32_t *b = h == GROUPS ? q_rest : q[h % GROUPS];

			add_signed(sum, r[0][2 * k], r[1][2 * k], r[0][2 * k + 1], r[1][2 * k + 1], b[2 * k],
				b[2 * k + 1]);
		}
	}

	__device__ __forceinline__ void score_tile(
		struct unit<Shape> &unit, uint32_t t, uint32_t at, uint32_t v_norms_at, uint32_t lane) const
	{
		uint32_t w[SETS * BITS], r[2][D / 16], rest[2][D / 16];

		load_sets<BITS, D>(at, lane, w);

		const struct row_norms norms = load_norms(at + NORMS_AT, v_norms_at, lane);
		const float log2_n0 = log2_fast(norms.v[0]), log2_n1 = log2_fast(norms.v[1]);

		unit.inverse[t][0] = reciprocal_fast(norms.v[0]);
		unit.inverse[t][1] = reciprocal_fast(norms.v[1]);
#pragma unroll
		for (int x = 0; x < 2; x++) {
#pragma unroll
			for (int i = 0; i < PRODUCTS; i++) {
				const int s = x * PRODUCTS + i;
				const uint32_t select = selector<BITS>(w + s / 4 * BITS, s % 4);

				r[x][2 * i] = byte_permute(low_table, high_table, select);
				r[x][2 * i + 1] = byte_permute(low_table, high_table, select >> 16);
				if (HAS_RESTS) {
					rest[x][2 * i] = byte_permute(low_rests, high_rests, select);
					rest[x][2 * i + 1] =
						byte_permute(low_rests, high_rests, select >> 16);
				}
			}
		}

		const float k0 = norms.k[0] * q_scale, k1 = norms.k[1] * q_scale;
		int rests[4] = { 0, 0, 0, 0 };

		if constexpr (HAS_RESTS && GROUPS == 2)
			add_products(rests, GROUPS, rest);
#pragma unroll
		for (int h = 0; h < GROUPS; h++) {
			int sum[4] = { GRID_MAGIC, GRID_MAGIC, GRID_MAGIC, GRID_MAGIC };

			add_products(sum, h, r);
			if constexpr (HAS_RESTS && GROUPS == 1)
				add_products(sum, GROUPS, rest);
			unit.y[h][t][0] = fmaf(join_digits(sum[0], sum[1] + rests[h]), k0, log2_n0);
			unit.y[h][t][1] = fmaf(join_digits(sum[2], sum[3] + rests[2 + h]), k1, log2_n1);
		}
	}
};

/* Weights and values, whatever the scores were made of. */
template <class Shape, class Scores, int BITS> struct grid_values {
	static constexpr int D = Shape::D, GROUPS = Shape::GROUPS, HEADS = Shape::HEADS, TILES = Shape::TILES;
	static constexpr int SETS = D / 64, SUMS = D / 8; /* of a lane */
	static constexpr uint32_t NORMS_AT = 2 * D * BITS, V_BYTES = NORMS_AT + 64,
				  TILE_BYTES = Scores::K_BYTES + V_BYTES;
	static constexpr uint32_t ROW_FLOATS = D + 8; /* of a head's sums: with a shift of the banks */
	static constexpr float LOG2_OF_WEIGHT_ONE = 15.9999779858f; /* log2(65535): the largest weight */
	static_assert(TILES % 2 == 0, "products over tokens take two tiles");

	uint8_t *sums;
	float *max_sums;
	uint32_t low_table, high_table;
	float o[GROUPS][SUMS], m[GROUPS], l[GROUPS];

	__device__ __forceinline__ grid_values(
		const struct kvg_decode_params &params, const Scores &scores, uint8_t *sums, float *max_sums)
	    : sums(sums), max_sums(max_sums), low_table(scores.value_table(params).x),
	      high_table(scores.value_table(params).y)
	{
	}

	__device__ __forceinline__ void begin_sums()
	{
#pragma unroll
		for (int h = 0; h < GROUPS; h++) {
			m[h] = -1e30f, l[h] = 0;
#pragma unroll
			for (int i = 0; i < SUMS; i++)
				o[h][i] = 0;
		}
	}

	/* ---- weights ---- */

	/* Few units have a new maximum: lanes look at their own rows before they ask each other. */
	__device__ __forceinline__ void raise_maxima(const struct unit<Shape> &unit)
	{
		float largest[GROUPS];
		bool is_above = false;

#pragma unroll
		for (int h = 0; h < GROUPS; h++) {
			largest[h] = largest_of(unit, h);
			is_above |= largest[h] > m[h];
		}
		if (!__any_sync(0xFFFFFFFFu, is_above))
			return;
#pragma unroll
		for (int h = 0; h < GROUPS; h++) {
			const float m_new = fmaxf(m[h], max_over_rows(largest[h])),
				    shrink = exp2_fast(m[h] - m_new);

			m[h] = m_new;
			l[h] *= shrink;
#pragma unroll
			for (int i = 0; i < SUMS; i++)
				o[h][i] *= shrink;
		}
	}

	/* Weights in 16 bits, as the second operand of the products over tokens. */
	__device__ __forceinline__ void weigh(
		const struct unit<Shape> &unit, uint32_t (&weights)[GROUPS][TILES])
	{
#pragma unroll
		for (int h = 0; h < GROUPS; h++) {
			const float offset = m[h] - LOG2_OF_WEIGHT_ONE;

#pragma unroll
			for (uint32_t t = 0; t < TILES; t++) {
				const float w0 = exp2_fast(unit.y[h][t][0] - offset),
					    w1 = exp2_fast(unit.y[h][t][1] - offset);

				l[h] = fmaf(w0, unit.inverse[t][0], l[h]);
				l[h] = fmaf(w1, unit.inverse[t][1], l[h]);
				/* Fixed point: the low bits of a sum with 2^23. Both high digits, then both
				 * low ones. */
				weights[h][t] = transpose(byte_permute(__float_as_uint(w0 + 8388608.0f),
					__float_as_uint(w1 + 8388608.0f), 0x4051));
			}
		}
	}

	/* ---- values ---- */

	__device__ __forceinline__ void add_values(
		const struct unit<Shape> &unit, uint32_t base, uint32_t lane)
	{
		uint32_t weights[GROUPS][TILES];

		weigh(unit, weights);
#pragma unroll
		for (int x = 0; x < SETS; x++) {
			uint32_t w[TILES][BITS];

#pragma unroll
			for (uint32_t t = 0; t < TILES; t++)
				load_set<BITS, D>(base + t * TILE_BYTES, lane, x, w[t]);
#pragma unroll
			for (int i = 0; i < 4; i++) {
				int sum[GROUPS][4];

#pragma unroll
				for (int h = 0; h < GROUPS; h++)
					sum[h][0] = sum[h][1] = sum[h][2] = sum[h][3] = GRID_MAGIC;
#pragma unroll
				for (uint32_t pair = 0; pair < TILES / 2; pair++) {
					const uint32_t select0 = selector<BITS>(w[2 * pair], i);
					const uint32_t select1 = selector<BITS>(w[2 * pair + 1], i);
					const uint32_t a0 = byte_permute(low_table, high_table, select0);
					const uint32_t a1 =
						byte_permute(low_table, high_table, select0 >> 16);
					const uint32_t a2 = byte_permute(low_table, high_table, select1);
					const uint32_t a3 =
						byte_permute(low_table, high_table, select1 >> 16);

#pragma unroll
					for (int h = 0; h < GROUPS; h++)
						add_unsigned(sum[h], a0, a1, a2, a3, weights[h][2 * pair],
							weights[h][2 * pair + 1]);
				}
#pragma unroll
				for (int h = 0; h < GROUPS; h++) {
					o[h][(x * 4 + i) * 2] += join_digits(sum[h][0], sum[h][1]);
					o[h][(x * 4 + i) * 2 + 1] += join_digits(sum[h][2], sum[h][3]);
				}
			}
		}
	}

	/* ---- the warps' sums become the block's ---- */

	__device__ __forceinline__ void end_item()
	{
#pragma unroll
		for (int h = 0; h < GROUPS; h++)
			l[h] = add_over_rows(l[h]);
	}

	/* Channels 8j + g. */
	__device__ __forceinline__ void leave(uint32_t slot, bool is_added, uint32_t lane)
	{
		const uint32_t g = lane / 4, c = lane % 4;

#pragma unroll
		for (int h = 0; h < GROUPS; h++) {
			const uint32_t row = slot * HEADS + Scores::head_of(h, c);
			float *own = max_sums + row * 2;
			const struct rescale scale = join_sums(m[h], l[h], own, is_added);

#pragma unroll
			for (int j = 0; j < SUMS; j++) {
				float *to = Scores::sum_at(sums, row * ROW_FLOATS + 8 * j + g);

				*to = is_added ? o[h][j] * scale.mine + *to * scale.theirs : o[h][j];
			}
			__syncwarp();
			if (g == 0) {
				own[0] = m[h];
				own[1] = l[h];
			}
		}
	}

	__device__ __forceinline__ const float4 *sums_at(uint32_t slot, uint32_t head, uint32_t chunk) const
	{
		return (const float4 *)Scores::sum_at(sums, (slot * HEADS + head) * ROW_FLOATS + chunk * 4);
	}
};

/* What instantiations say: TOKENS of a unit, STAGES of a warp's ring; GROUPS of four heads. */
template <int D, int BITS, int TOKENS, int STAGES, int GROUPS, int SLOT_WARPS,
	class Shape = shape<D, TOKENS, STAGES, SLOT_WARPS, GROUPS>, class Scores = grid_scores<Shape, BITS>>
using grid = kernel<Shape, Scores, grid_values<Shape, Scores, BITS>>;

} // namespace tiles

#endif
