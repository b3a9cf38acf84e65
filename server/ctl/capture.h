/*
 * Capture: the K, V and Q rows that a model computed for one prompt, from a safetensors file.
 *
 *	k.{layer}  [tokens, kv_heads, k_head_dim]   keys after RoPE
 *	v.{layer}  [tokens, kv_heads, v_head_dim]
 *	q.{layer}  [tokens, q_heads, k_head_dim]    not yet scaled
 *
 * {layer} is the model's own layer number; the numbers need not be contiguous. layer_idx counts the captured
 *layers in ascending order of their numbers: that is the layer of the pool that a replay makes. Other tensors
 *are ignored. Metadata that states the geometry must agree with the tensors. Any thread may read; the rows
 *are converted, not cached.
 */
#ifndef SERVER_CTL_CAPTURE_H
#define SERVER_CTL_CAPTURE_H

#include <stdint.h>

#include "core/error.h"
#include "server/ctl/safetensors.h"

enum srv_capture_kind { SRV_CAPTURE_K, SRV_CAPTURE_V, SRV_CAPTURE_Q, SRV_CAPTURE_N_KINDS };

struct srv_capture_layer {
	uint32_t number; /* of the model */
	const struct srv_tensor *rows[SRV_CAPTURE_N_KINDS];
};

struct srv_capture {
	struct srv_safetensors *file;
	uint32_t n_layers; /* captured ones */
	uint32_t n_tokens;
	uint32_t q_heads, kv_heads, k_head_dim, v_head_dim;
	struct srv_capture_layer *layers; /* [n_layers] */
};

/* The text of a failure begins with the path. Values are not looked at (srv_capture_check_finite). */
KV_MUST_CHECK enum kv_status srv_capture_open(
	const char *path, struct srv_capture **out, struct kv_error *err);
/* Takes the file over, also on failure. */
KV_MUST_CHECK enum kv_status srv_capture_create(
	struct srv_safetensors *file, struct srv_capture **out, struct kv_error *err);
/* NULL allowed. */
void srv_capture_destroy(struct srv_capture *capture);

/* 'k', 'v', 'q'. */
char srv_capture_kind_letter(enum srv_capture_kind kind);
/* Numbers of one token in one layer: heads * head_dim. */
uint32_t srv_capture_token_values(const struct srv_capture *capture, enum srv_capture_kind kind);
/* True when all rows are bf16, so that sending them as bf16 loses nothing. */
bool srv_capture_is_bf16(const struct srv_capture *capture);

/* Tokens [token_first, token_first + n_tokens) of one layer as floats: n_tokens * token_values numbers. */
void srv_capture_load(const struct srv_capture *capture, uint32_t layer_idx, enum srv_capture_kind kind,
	uint32_t token_first, uint32_t n_tokens, float *dst);

/* BAD_VALUE names tensor, token, head and channel of the first value that is NaN or infinite. */
KV_MUST_CHECK enum kv_status srv_capture_check_finite(
	const struct srv_capture *capture, struct kv_error *err);

#endif
