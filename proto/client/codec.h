/*
 * The row codecs of one pool, shared as the daemon shares them: layers whose rows look alike have one codec,
 * K and V of one dimension have one rotation. The sharing matters: the hashes of the canonical JSON count
 * what is shared once (codec_hash.c). Inside of libtqkv; immutable once made, any thread.
 */
#ifndef PROTO_CLIENT_CODEC_H
#define PROTO_CLIENT_CODEC_H

#include "proto/client/codec_text.h"
#include "proto/client/tqkv_codec.h"

/* K or V of one layer. */
struct tqkv_layer_codec {
	const struct kv_row_codec *codec;        /* of KV head 0 */
	const struct kv_row_codec *const *heads; /* [kv_heads], owned; NULL: all are like head 0 */
};

struct tqkv_codec {
	struct tqkv_pool_text text;
	struct tqkv_layer_codec *layers[2]; /* K, V: [n_layers] */
	float *k_center;                    /* [n_layers, kv_heads, k_head_dim]; NULL: none */
	/* Owned parts. Rotations: at most two a layer; codecs: two a layer and one for each list of channels.
	 */
	struct kv_rotation **rotations;
	struct kv_row_codec **codecs;
	uint32_t n_rotations, n_codecs;
};

static inline const struct kv_row_codec *tqkv_head_codec(
	const struct tqkv_codec *codec, uint32_t layer, bool is_v, uint32_t head)
{
	const struct tqkv_layer_codec *side = &codec->layers[is_v][layer];

	return side->heads ? side->heads[head] : side->codec;
}

/* FORMAT_MISMATCH names the first member whose hash differs. */
TQKV_MUST_CHECK enum tqkv_status tqkv_codec_verify(const struct tqkv_codec *codec, struct tqkv_error *err);

#endif
