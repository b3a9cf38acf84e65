/*
 * Row codec of libtqkv: packs rows here, so that a client sends the bytes that the daemon stores
 * (TQKV_PACKED) instead of numbers, and unpacks what it reads as TQKV_PACKED.
 *
 * A codec belongs to one pool. It is made from the pool's canonical JSON and knows the format of every layer,
 * K and V. What the JSON has only by its hash (matrices, codebooks, channels, k_center) is compared with that
 * hash, so a codec that would make other bytes than the pool's is never handed out.
 *
 * Immutable after creation: any number of threads may use one at the same time. No call here talks to a
 * server except tqkv_codec_create().
 */
#ifndef TQKV_CODEC_H
#define TQKV_CODEC_H

#include "tqkv.h"

#ifdef __cplusplus
extern "C" {
#endif

struct tqkv_codec;

/* What the JSON does not contain. A zeroed struct means that there is nothing. Everything is copied. */
struct tqkv_codec_params {
	/*
	 * Matrices as tqkv_pool_rows() gives them, float32 [head_dim][head_dim], one, or one for each layer
	 * back to back when the pool's rotation is per_layer. Needed for rotations of kind `file`; used for
	 * `qr`, where another mathematical library may compute another last bit; ignored for `rht`.
	 */
	const float *k_rotation, *v_rotation;
	/* [layers][kv_heads][k_head_dim]; needed when the pool has a k_center. */
	const float *k_center;
	/*
	 * Recipes whose channels are not the default: [layers][kv_heads][n_high] ascending numbers, as in the
	 * recipe's file. tqkv_codec_high_channels() tells n_high.
	 */
	const uint16_t *k_high_channels, *v_high_channels;
};

/*
 * BAD_ARG: the text is no canonical JSON, or something that is needed is missing. UNSUPPORTED: the pool has a
 * member that this library does not know. FORMAT_MISMATCH: something has another hash than in the JSON; the
 * message names the member. `params` may be NULL. tqkv_codec_destroy() the result.
 */
TQKV_API enum tqkv_status tqkv_codec_create_from_pool_json(const char *json,
	const struct tqkv_codec_params *params, struct tqkv_codec **out, struct tqkv_error *err);
/*
 * The same from a server's pool: asks for its JSON and for what else is needed. Of `params` (may be NULL)
 * only the channels count, which a server does not tell.
 */
TQKV_API enum tqkv_status tqkv_codec_create(struct tqkv_conn *conn, const char *pool,
	const struct tqkv_codec_params *params, uint32_t timeout_ms, struct tqkv_codec **out,
	struct tqkv_error *err);
/* NULL is allowed. */
TQKV_API void tqkv_codec_destroy(struct tqkv_codec *codec);

struct tqkv_codec_info {
	uint32_t n_layers, kv_heads, k_head_dim, v_head_dim;
};
TQKV_API void tqkv_codec_info(const struct tqkv_codec *codec, struct tqkv_codec_info *info);
/* Of one KV head's packed row; 0 when there is no such layer. */
TQKV_API uint32_t tqkv_codec_row_bytes(const struct tqkv_codec *codec, uint32_t layer, bool is_v);
/* "tq4"; NULL when there is no such layer. */
TQKV_API const char *tqkv_codec_format(const struct tqkv_codec *codec, uint32_t layer, bool is_v);
/* Channels that a recipe stores with more bits at this head_dim; 0 for other formats. */
TQKV_API uint32_t tqkv_codec_high_channels(const char *format, uint32_t head_dim);

/*
 * Rows of one layer: numbers [n_tokens][kv_heads][head_dim] of dtype F32, F16 or BF16 to packed
 * [n_tokens][kv_heads][row_bytes], and back. Sizes are checked as in tqkv_append(). k_center is taken off and
 * added here. Layers of one frame stand back to back.
 *
 * BAD_VALUE: a row cannot be stored, or is no valid packed one; the message names token and KV head, and
 * err->item is the token. The output is untouched from that token on.
 */
TQKV_API enum tqkv_status tqkv_codec_encode(const struct tqkv_codec *codec, uint32_t layer, bool is_v,
	enum tqkv_dtype dtype, const void *rows, size_t rows_bytes, uint32_t n_tokens, void *packed,
	size_t packed_bytes_max, struct tqkv_error *err);
TQKV_API enum tqkv_status tqkv_codec_decode(const struct tqkv_codec *codec, uint32_t layer, bool is_v,
	enum tqkv_dtype dtype, const void *packed, size_t packed_bytes, uint32_t n_tokens, void *rows,
	size_t rows_bytes_max, struct tqkv_error *err);

#ifdef __cplusplus
}
#endif

#endif
