/*
 * Explanation of one attention step: what the stored form of keys and of values does to the output of one
 * query, and what the kernel does, each alone.
 *
 * Keys decide the weights, values what is added up with them. So attention is taken four times in float64,
 * with the rows as they are and as they are read back, keys and values each; and once by the scalar kernel
 * over the stored bytes. The differences of these outputs are the errors by cause. Beside them stands a
 * control, keys of zeros: an error by keys near that of the control says that the keys are lost. One thread.
 */
#ifndef SERVER_CTL_EXPLAIN_H
#define SERVER_CTL_EXPLAIN_H

#include <stdint.h>

#include "core/error.h"
#include "core/pool_spec.h"

/* Relative to the length of the exact output. */
struct srv_explain_head {
	double keys;    /* stored keys, values as they are */
	double values;  /* keys as they are, stored values */
	double both;    /* both stored, in float64 */
	double kernel;  /* what the kernel gives instead of that */
	double total;   /* what the kernel gives instead of the exact output */
	double control; /* keys of zeros, values as they are */
	/* Softmax. */
	double sigma;         /* spread of the exact logits */
	double weights_error; /* half the sum of the changes of the weights */
	double top_weight;    /* greatest exact weight */
	uint32_t top_token;
};

struct srv_explain_token {
	uint32_t token;
	double score, coded_score;   /* logits: scaled, capped, with their slope */
	double weight, coded_weight; /* of the softmax */
	double k_error, v_error;     /* of the stored rows, relative */
	double share;                /* length of coded_weight * stored value, relative to the exact output */
	double key_share;   /* length of (coded_weight - weight) * value: what the key's error moves */
	double value_share; /* length of weight * (stored value - value) */
	bool is_exact;      /* from the exact window */
};

struct srv_explain; /* rows of one layer and one query, as they are and as they are stored */

/*
 * Layer 0 of the specification, which outlives the explanation. k [n_tokens, kv_heads, k_head_dim], v
 * likewise, q [q_heads, k_head_dim], not yet scaled: the query of the last token. BAD_VALUE names the token
 * of a row that cannot be stored. NO_MEMORY.
 */
KV_MUST_CHECK enum kv_status srv_explain_create(const struct kv_pool_spec *spec, uint32_t n_tokens,
	const float *k, const float *v, const float *q, struct srv_explain **out, struct kv_error *err);
void srv_explain_destroy(struct srv_explain *explain); /* NULL allowed */
void srv_explain_head(struct srv_explain *explain, uint32_t q_head, struct srv_explain_head *out);
/*
 * The tokens with the greatest exact weight, at most n_max, greatest first; returns how many. Only tokens
 * that the query sees.
 */
uint32_t srv_explain_tokens(
	struct srv_explain *explain, uint32_t q_head, struct srv_explain_token out[], uint32_t n_max);
/* "keys", "values", "kernel", or "nothing" where the whole error is below `bound`. */
const char *srv_explain_cause(const struct srv_explain_head *head, double bound);

#endif
