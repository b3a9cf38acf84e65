/*
 * Pool specification: the geometry, formats and options of one pool, fixed when the pool is made.
 *
 * Made from the pool's JSON (the schema of the configuration's `pools` entries and of POST /v1/pools);
 * everything that a backend or a client has to know about rows follows from it. Immutable after creation, so
 * any thread may read it. Creating one computes rotations: call it where computing is allowed.
 *
 * The canonical JSON (compact, keys sorted, floats as the hex of their float32 bits) holds what decides bytes
 * and results: geometry, groups, formats, options, seeds, model. Not the pool's name, block count or limits.
 * Fingerprint: XXH3-64 of that text (FORMATS, PROTOCOL 3).
 */
#ifndef CORE_POOL_SPEC_H
#define CORE_POOL_SPEC_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "core/error.h"

#define KV_POOL_NAME_BYTES_MAX 64u
#define KV_GROUPS_MAX          8u
#define KV_LAYERS_MAX          1024u
#define KV_HEADS_MAX           1024u
#define KV_HEAD_DIM_MAX        256u
#define KV_BLOCKS_MAX          (1u << 30)

struct kv_rotation;
struct kv_row_codec;

/* One layer: what its rows look like and how attention is taken over them. */
struct kv_layer_spec {
	const struct kv_row_codec *k, *v;
	uint32_t group_idx;
	uint32_t window; /* tokens; 0 = none */
	float scale;     /* softmax scale; 1/sqrt(k_head_dim) unless declared */
};

struct kv_pool_spec {
	char name[KV_POOL_NAME_BYTES_MAX + 1];
	uint32_t n_layers, q_heads, kv_heads, k_head_dim, v_head_dim;
	uint32_t block_size; /* tokens: 16, 32 or 64 */
	uint32_t n_groups;
	uint32_t n_blocks[KV_GROUPS_MAX]; /* per group */
	uint32_t tokens_max; /* per sequence; at most block_size * n_blocks of the smallest group */
	const struct kv_layer_spec *layers; /* [n_layers] */
	const struct kv_rotation
		*rotation; /* of K rows, or of V rows when K is not rotated; NULL when no format rotates */
	const struct kv_rotation
		*v_rotation; /* a second one, when both are rotated and their dims differ; else NULL */
	uint64_t fingerprint;
	const char *canonical_json; /* zero-terminated */
	uint32_t canonical_json_bytes;
	/* Row bytes of one token, summed over kv_heads and over the layers of a group, K and V. */
	uint64_t token_bytes[KV_GROUPS_MAX];
};

/*
 * JSON members: name, layers, q_heads, kv_heads, head_dim or k_head_dim and v_head_dim, k, v (format names),
 * block_size, blocks; optional: model, seed, scale, tokens_max, groups. Unknown members are refused.
 * BAD_CONFIG names the member and what was expected; UNSUPPORTED a combination that is not served.
 */
KV_MUST_CHECK enum kv_status kv_pool_spec_create(
	const json_t *json, struct kv_pool_spec **out, struct kv_error *err);
void kv_pool_spec_destroy(struct kv_pool_spec *spec);
/*
 * "name=smol,layers=30,..." to the same JSON; BAD_CONFIG names the part that is wrong. json_decref() the
 * result.
 */
KV_MUST_CHECK enum kv_status kv_pool_spec_parse_short(const char *text, json_t **out, struct kv_error *err);

/*
 * Bytes of all row payload of the pool: what the page tensors take in the row layout of FORMATS 6. False on
 * overflow.
 */
bool kv_pool_spec_page_bytes(const struct kv_pool_spec *spec, uint64_t *n_bytes);

#endif
