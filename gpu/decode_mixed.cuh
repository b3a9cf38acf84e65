/*
 * Decode of tiles with K in 4 bits and V in fewer, sm_90a: scores by the float16 pair table, exactly, values
 * in integers. A lane has the scores of the same rows in both kernels, so weights go from one to the other in
 * registers; only the heads of a lane are others (head_of()). Sums lie in the unused halves of the table.
 */
#ifndef GPU_DECODE_MIXED_CUH
#define GPU_DECODE_MIXED_CUH

#include "gpu/decode_grid.cuh"
#include "gpu/decode_tiles.cuh"

namespace tiles
{

/* As of pairs. */
template <int D, int V_BITS, int TOKENS, int STAGES, bool PARTS, int SLOT_WARPS,
	class Shape = shape<D, TOKENS, STAGES, SLOT_WARPS, PARTS ? 1 : 2>, class Scores = pair_scores<Shape>>
using mixed = kernel<Shape, Scores, grid_values<Shape, Scores, V_BITS>>;

} // namespace tiles

#endif
