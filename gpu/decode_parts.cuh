/*
 * Where attention left the partial results of a query row, which the finish kernel brings together: the rows
 * kernel one for every piece, kernels over tiles one for every block that had units of it. Included by
 * decode_finish.cu.
 */
#ifndef GPU_DECODE_PARTS_CUH
#define GPU_DECODE_PARTS_CUH

#include "gpu/kernels.h"

/* Where the partial results of one virtual head lie: slot(i) for i < n. */
struct parts {
	uint32_t first, n; /* tiles: block numbers */
	uint32_t single;   /* tiles: slot of a result that one block made alone; KVG_NONE: several */
	bool is_tiles;
	bool is_second; /* tiles: the first block began with another head */
};

static __device__ struct parts find_parts(const struct kvg_decode_params *params,
	const struct kvg_decode_row *row, uint32_t virtual_head, uint32_t item, bool is_exact)
{
	struct parts parts = { row->work_first + virtual_head * row->n_work, row->n_work, KVG_NONE, false,
		false };

	if (params->k_bits == 0 || is_exact || row->n_work == 0)
		return parts;

	/* Block b has the units [b total / n, (b + 1) total / n). */
	const uint64_t n = params->n_blocks, total = params->n_work, begin = parts.first,
		       end = begin + parts.n;
	const uint32_t first = (uint32_t)(((begin + 1) * n - 1) / total),
		       last = (uint32_t)((end * n - 1) / total);

	parts.is_tiles = true;
	parts.first = first;
	parts.n = last - first + 1;
	parts.single = first == last ? 2 * params->n_blocks + item : KVG_NONE;
	parts.is_second = first * total / n < begin;
	return parts;
}

static __device__ __forceinline__ uint32_t part_slot(const struct parts *parts, uint32_t i)
{
	if (!parts->is_tiles)
		return parts->first + i;
	if (parts->single != KVG_NONE)
		return parts->single;
	return 2 * (parts->first + i) + (i == 0 && parts->is_second ? 1u : 0u);
}

#endif
