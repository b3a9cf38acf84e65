/*
 * Payload: rows and queries that follow from a number, and what becomes of them.
 *
 * A token is known by its row id: a counter and, in the low bits, the dtypes that its K and V rows were sent
 * in (which round them). So a model keeps one number per token and layer, and any byte that the server gives
 * back can be computed again.
 */
#ifndef TESTS_SIM_PAYLOAD_H
#define TESTS_SIM_PAYLOAD_H

#include "core/number.h"
#include "core/pool_spec.h"
#include "tests/sim/sim.h"

/* dtypes: f32, f16, bf16, or packed, which counts as 0 and rounds nothing before the row is encoded. */
static inline uint32_t sim_row_id(uint32_t counter, enum kv_dtype k_dtype, enum kv_dtype v_dtype)
{
	return counter << 4 | ((uint32_t)k_dtype & 3) << 2 | ((uint32_t)v_dtype & 3);
}

/* The row as floats, rounded to its dtype. dim <= KV_HEAD_DIM_MAX. */
void sim_row_values(uint32_t row_id, uint32_t layer, bool is_v, uint32_t head, uint32_t dim, float *out);
/* The row as the pool stores it. */
void sim_row_packed(const struct kv_pool_spec *spec, uint32_t row_id, uint32_t layer, bool is_v,
	uint32_t head, uint8_t *out);
/* A query row of all heads: [q_heads, k_head_dim], rounded to dtype. */
void sim_query_values(const struct kv_pool_spec *spec, uint32_t query_id, enum kv_dtype dtype, float *out);

/* Bytes of one token's rows (all KV heads) as READ gives them in that dtype (PACKED included). */
uint64_t sim_token_bytes(const struct kv_pool_spec *spec, uint32_t layer, bool is_v, enum kv_dtype dtype);
void sim_token_read(const struct kv_pool_spec *spec, uint32_t row_id, uint32_t layer, bool is_v,
	enum kv_dtype dtype, bool is_exact, uint8_t *out);

/* Attention of one query row over the given rows: the same scalar code, over memory of its own. */
struct sim_attention {
	const struct kv_pool_spec *spec;
	uint32_t layer;
	const uint32_t *row_ids; /* [n_tokens] */
	uint32_t n_tokens;       /* that this row sees, but for a window */
	uint32_t exact_lo;       /* tokens from here on are exact */
	uint32_t query_id;
	enum kv_dtype q_dtype, out_dtype;
	float scale;     /* 0 = the layer's */
	uint32_t window; /* 0 = the layer's */
	bool q_is_rotated, out_is_rotated, has_no_sinks;
};
/* out: [q_heads, v_head_dim] of out_dtype; lse: [q_heads]. */
void sim_attention_expect(const struct sim_attention *attention, uint8_t *out, float *lse);

#endif
