/*
 * A kernel over tiles is two parts: Scores, which multiplies K with the queries, and Values, which turns
 * scores into weights and sums up V. Each says what its half of a tile is; any two that were built for the
 * same shape fit together, and meet in a unit: what becomes of TOKENS tokens. Row g or g + 8 of a tile's
 * product is token g or g + 8, whatever the parts are.
 */
#ifndef GPU_DECODE_KERNEL_CUH
#define GPU_DECODE_KERNEL_CUH

#include "gpu/decode_common.cuh"

namespace tiles
{

/*
 * Channels; tokens of a unit; stages of a warp's ring; warps that leave their sums side by side; heads in
 * fours, as every lane has one of each four. Eight warps, two of each scheduler: with units of 128 tokens or
 * so and 232 registers of a thread they have enough independent instructions, and shared memory is full.
 */
template <int D_, int TOKENS_, int STAGES_, int SLOT_WARPS, int N_GROUPS> struct shape {
	static constexpr int D = D_, TOKENS = TOKENS_, TILES = TOKENS / 16, STAGES = STAGES_, WARPS = 8,
			     SLOTS = SLOT_WARPS, GROUPS = N_GROUPS, HEADS = 4 * GROUPS;
	static_assert(WARPS % SLOTS == 0, "whole rounds");
};

/* y = log2(weight * norm of v) of a lane's heads and of rows g and g + 8; 1 / norm of v. */
template <class Shape> struct unit {
	float y[Shape::GROUPS][Shape::TILES][2], inverse[Shape::TILES][2];
};

/* Of rows g and g + 8. */
struct row_norms {
	float k[2], v[2]; /* that of V: a norm of 0 has no logarithm; its rows are 0 whatever their weight */
};

static __device__ __forceinline__ struct row_norms load_norms(uint32_t k_at, uint32_t v_at, uint32_t lane)
{
	const uint2 k = load_8(k_at + lane / 4 * 8), v = load_8(v_at + lane / 4 * 8);

	return { { __uint_as_float(k.x), __uint_as_float(k.y) },
		{ fmaxf(__uint_as_float(v.x), 1e-30f), fmaxf(__uint_as_float(v.y), 1e-30f) } };
}

/* The D / 32 words that lie together for each lane: with 4 bits the indices of a token of K, or of half as
 * many channels of two tokens of V; with fewer the first words of a lane's sets. */
template <int D, int N>
static __device__ __forceinline__ void load_words(uint32_t address, uint32_t lane, uint32_t (&w)[N])
{
	static_assert(N >= D / 32, "room for the words");
	if constexpr (D == 128) {
		const uint4 v = load_16(address + lane * 16);

		w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
	} else {
		const uint2 v = load_8(address + lane * 8);

		w[0] = v.x, w[1] = v.y;
	}
}

/* Tokens outside [lo, hi) weigh nothing. */
template <class Shape>
static __device__ __forceinline__ void mask(
	struct unit<Shape> &unit, uint32_t token, uint32_t lo, uint32_t hi, uint32_t lane)
{
#pragma unroll
	for (uint32_t t = 0; t < Shape::TILES; t++) {
#pragma unroll
		for (int half = 0; half < 2; half++) {
			const uint32_t at = token + 16 * t + lane / 4 + 8 * half;

			if (at >= lo && at < hi)
				continue;
			unit.inverse[t][half] = 0;
#pragma unroll
			for (int h = 0; h < Shape::GROUPS; h++)
				unit.y[h][t][half] = -1e30f;
		}
	}
}

/* The largest y of a lane's head. */
template <class Shape>
static __device__ __forceinline__ float largest_of(const struct unit<Shape> &unit, int h)
{
	float x = fmaxf(unit.y[h][0][0], unit.y[h][0][1]);

#pragma unroll
	for (uint32_t t = 1; t < Shape::TILES; t++)
		x = fmaxf(x, fmaxf(unit.y[h][t][0], unit.y[h][t][1]));
	return x;
}

/* What walk_items() of decode_common.cuh wants of a kernel. */
template <class Shape, class Scores, class Values> struct kernel : Scores, Values {
	static constexpr int TOKENS = Shape::TOKENS, TILES = Shape::TILES, STAGES = Shape::STAGES,
			     WARPS = Shape::WARPS, SLOTS = Shape::SLOTS, HEADS = Shape::HEADS;
	static constexpr uint32_t TILE_BYTES = Scores::K_BYTES + Values::V_BYTES,
				  STAGE_BYTES = TILES * TILE_BYTES, CHUNKS = Shape::D / 4;
	/* Shared memory: a table of the scores', rings, sums where that table has no room for them, maxima
	 * and denominators [SLOTS][HEADS][2], barriers of stages that are full and of those that are empty.
	 */
	static constexpr uint32_t RING_AT = Scores::TABLE_BYTES;
	static constexpr uint32_t SUMS_AT = RING_AT + WARPS * STAGES * STAGE_BYTES;
	static constexpr uint32_t MAX_SUMS_AT =
		SUMS_AT + (Scores::TABLE_BYTES == 0 ? SLOTS * HEADS * Values::ROW_FLOATS * 4 : 0);
	static constexpr uint32_t FULL_AT = MAX_SUMS_AT + SLOTS * HEADS * 2 * 4;
	static constexpr uint32_t EMPTY_AT = FULL_AT + WARPS * STAGES * 8;
	static constexpr size_t SHARED_BYTES = EMPTY_AT + WARPS * STAGES * 8;
	static_assert(Scores::TABLE_BYTES == 0 || SLOTS * HEADS * Values::ROW_FLOATS <= Scores::ROOM_FLOATS,
		"sums lie in the table");

	__device__ __forceinline__ kernel(
		const struct kvg_decode_params &params, uint8_t *memory, uint32_t lane)
	    : Scores(params, memory, lane),
	      Values(params, *this, memory + (Scores::TABLE_BYTES == 0 ? SUMS_AT : 0),
		      (float *)(memory + MAX_SUMS_AT))
	{
	}

	__device__ __forceinline__ void begin_item(uint32_t lane)
	{
		Scores::begin_queries(lane);
		Values::begin_sums();
	}

	__device__ __forceinline__ void add_unit(
		uint32_t base, uint32_t token, uint32_t lo, uint32_t hi, uint32_t lane)
	{
		struct unit<Shape> unit;

#pragma unroll
		for (uint32_t t = 0; t < TILES; t++) {
			const uint32_t at = base + t * TILE_BYTES;

			this->score_tile(unit, t, at, at + Scores::K_BYTES + Values::NORMS_AT, lane);
		}
		if (token < lo || token + TOKENS > hi)
			mask(unit, token, lo, hi, lane);
		this->raise_maxima(unit);
		this->add_values(unit, base + Scores::K_BYTES, lane);
	}
};

} // namespace tiles

#endif
