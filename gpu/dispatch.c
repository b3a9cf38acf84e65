/* Which built variant serves a wave; what is loaded at start. */
#include "gpu/variants.h"

cudaError_t kvg_decode_tiles_launch(const struct kvg_decode_params *params, cudaStream_t stream)
{
	if (params->n_work == 0)
		return cudaSuccess;
#define KVG_TRY(name, dim, bits_k, bits_v, heads, tokens)                       \
	if (params->tables.k_head_dim == (dim) && params->k_bits == (bits_k) && \
		params->v_bits == (bits_v) && params->n_heads <= (heads))       \
		return kvg_tiles_launch_##name(params, stream);
	KVG_TILES_VARIANTS(KVG_TRY)
#undef KVG_TRY
	return cudaErrorInvalidValue;
}

struct kvg_tiles_plan kvg_decode_tiles_plan(
	uint32_t head_dim, uint32_t k_bits, uint32_t v_bits, uint32_t n_heads)
{
	const uint32_t words = (k_bits == 4 ? 4 : 2) * (n_heads > 4 ? 2 : 1) * head_dim;

#define KVG_TRY(name, dim, bits_k, bits_v, heads, tokens)                                        \
	if (head_dim == (dim) && k_bits == (bits_k) && v_bits == (bits_v) && n_heads <= (heads)) \
		return (struct kvg_tiles_plan){ tokens, words };
	KVG_TILES_VARIANTS(KVG_TRY)
#undef KVG_TRY
	return (struct kvg_tiles_plan){ 0, 0 };
}

cudaError_t kvg_kernels_load(void)
{
	cudaError_t error = kvg_batch_load();

	if (error == cudaSuccess)
		error = kvg_rows_load();
	if (error == cudaSuccess)
		error = kvg_decode_prepare_load();
	if (error == cudaSuccess)
		error = kvg_decode_finish_load();
	if (error == cudaSuccess)
		error = kvg_decode_rows_load();
#define KVG_LOAD(name, dim, bits_k, bits_v, heads, tokens) \
	if (error == cudaSuccess)                          \
		error = kvg_tiles_load_##name();
	KVG_TILES_VARIANTS(KVG_LOAD)
#undef KVG_LOAD
	return error;
}
