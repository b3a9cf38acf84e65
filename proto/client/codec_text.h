/*
 * What a codec needs of a pool's canonical JSON (compact, keys sorted). The text comes from a server:
 * whatever is wrong with it is an error. Inside of libtqkv; any thread.
 */
#ifndef PROTO_CLIENT_CODEC_TEXT_H
#define PROTO_CLIENT_CODEC_TEXT_H

#include "core/format.h"
#include "proto/client/conn.h"

enum {
	TQKV_HASH_TEXT_BYTES = 33, /* 32 hex digits and the terminator; "" = the pool has none */
	TQKV_CODEC_LAYERS_MAX = 1024,
	TQKV_CODEC_HEADS_MAX = 1024,
};

/* K or V. */
struct tqkv_side_text {
	uint32_t head_dim;
	const struct kv_format **formats; /* [n_layers], owned */
	enum kv_rotation_kind rotation;   /* NONE: nothing is rotated */
	uint32_t seed;
	bool is_per_layer;
	char matrix[TQKV_HASH_TEXT_BYTES], codebook[TQKV_HASH_TEXT_BYTES];
	char projection[TQKV_HASH_TEXT_BYTES], channels[TQKV_HASH_TEXT_BYTES];
};

struct tqkv_pool_text {
	uint32_t n_layers, kv_heads;
	uint32_t group; /* 0: no format has groups */
	bool norm_correction;
	enum kv_recipe_scale recipe_scale;
	char k_center[TQKV_HASH_TEXT_BYTES];
	struct tqkv_side_text sides[2]; /* K, V */
};

/* tqkv_pool_text_finish() it, also on failure. */
TQKV_MUST_CHECK enum tqkv_status tqkv_pool_text_init(
	struct tqkv_pool_text *text, const char *json, struct tqkv_error *err);
void tqkv_pool_text_finish(struct tqkv_pool_text *text);

#endif
