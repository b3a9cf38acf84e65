/* What the kernels before and after attention share: refusals, and the channels of a segment. */
#ifndef GPU_DECODE_QUERY_CUH
#define GPU_DECODE_QUERY_CUH

#include "gpu/kernels.h"

static __device__ void flag_row(const struct kvg_decode_params *params, const struct kvg_decode_op *op,
	const struct kvg_decode_row *row)
{
	atomicMin((unsigned long long *)params->flags + op->result_idx,
		(unsigned long long)op->layer << 32 | row->row);
}

static __device__ __forceinline__ uint32_t channel_of(
	const struct kvg_tables *tables, const struct kvg_segment *segment, uint32_t i)
{
	return segment->channels == KVG_NONE ? i : tables->words[segment->channels + i];
}

#endif
