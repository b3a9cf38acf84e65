/*
 * The built variants of the tiles kernel, listed once: dispatch, loading and tests expand this list. Each is
 * a file under instantiations/. X(name, head_dim, bits of K and of V, largest number of heads, tokens of a
 * unit)
 */
#ifndef GPU_VARIANTS_H
#define GPU_VARIANTS_H

#include "gpu/kernels.h"

#define KVG_TILES_VARIANTS(X)              \
	X(d64_b4_h4, 64, 4, 4, 4, 128)     \
	X(d64_b4_h8, 64, 4, 4, 8, 128)     \
	X(d64_b3_h4, 64, 3, 3, 4, 128)     \
	X(d64_b3_h8, 64, 3, 3, 8, 192)     \
	X(d64_b2_h4, 64, 2, 2, 4, 256)     \
	X(d64_b2_h8, 64, 2, 2, 8, 128)     \
	X(d128_b4_h4, 128, 4, 4, 4, 64)    \
	X(d128_b4_h8, 128, 4, 4, 8, 64)    \
	X(d128_b3_h4, 128, 3, 3, 4, 128)   \
	X(d128_b3_h8, 128, 3, 3, 8, 128)   \
	X(d128_b2_h4, 128, 2, 2, 4, 128)   \
	X(d128_b2_h8, 128, 2, 2, 8, 128)   \
	X(d64_b4_b2_h4, 64, 4, 2, 4, 128)  \
	X(d64_b4_b2_h8, 64, 4, 2, 8, 128)  \
	X(d128_b4_b2_h4, 128, 4, 2, 4, 96) \
	X(d128_b4_b2_h8, 128, 4, 2, 8, 96)

#ifdef __cplusplus
extern "C" {
#endif
#define KVG_TILES_DECLARE(name, dim, k_bits, v_bits, heads, tokens)                                       \
	cudaError_t kvg_tiles_launch_##name(const struct kvg_decode_params *params, cudaStream_t stream); \
	cudaError_t kvg_tiles_load_##name(void);
KVG_TILES_VARIANTS(KVG_TILES_DECLARE)
#undef KVG_TILES_DECLARE

/* What the list says of each, for the file that builds it. */
#define KVG_TILES_LISTED(name, dim, k_bits, v_bits, heads, tokens) \
	enum { kvg_listed_heads_##name = heads, kvg_listed_tokens_##name = tokens };
KVG_TILES_VARIANTS(KVG_TILES_LISTED)
#undef KVG_TILES_LISTED

/* Loading functions of the other translation units. */
cudaError_t kvg_batch_load(void);
cudaError_t kvg_rows_load(void);
cudaError_t kvg_decode_prepare_load(void);
cudaError_t kvg_decode_finish_load(void);
cudaError_t kvg_decode_rows_load(void);
#ifdef __cplusplus
}
#endif

#endif
