/*
 * Attention over the rows of one sequence and KV head: the scalar oracle of all kernels.
 *
 * The summation order is fixed, so the same rows give the same bits, whatever else is in the batch: scores
 * and the weighted sum are kept in float64, tokens are taken in pieces of KV_ATTENTION_PIECE_TOKENS that
 * begin at multiples of it, with a running maximum per piece (no score buffer that grows with the sequence).
 * Rows are never rotated back; the query is rotated before and the output after. Bound: 1e-5 relative L2
 * against float64 attention over the decoded rows.
 *
 * Pure functions, any thread; scratch is the caller's, one per thread. No heap.
 */
#ifndef CORE_ATTENTION_H
#define CORE_ATTENTION_H

#include <stdbool.h>
#include <stdint.h>

#include "core/format.h"

#define KV_ATTENTION_PIECE_TOKENS 64u
#define KV_ATTENTION_QUERIES_MAX  8u /* that share one pass over the rows; more take more passes */

/*
 * Where row t of one KV head lies:
 *
 *	base + block_table[t / block_size] * block_bytes + (t % block_size) * token_bytes + head_offset_bytes
 *
 * For a page tensor [blocks, block_size, kv_heads, row_bytes]: token_bytes = kv_heads * row_bytes,
 * block_bytes = block_size * token_bytes, head_offset_bytes = head * row_bytes. The table's entries were
 * checked when the batch was planned. block_table NULL: block b is block b. entry_first: the table begins
 * with the block of token entry_first * block_size.
 */
struct kv_row_view {
	const uint8_t *base;
	const uint32_t *block_table; /* [ceil(token_hi / block_size) - entry_first] */
	uint32_t block_size;
	uint64_t block_bytes;
	uint64_t token_bytes;
	uint64_t head_offset_bytes;
	uint32_t entry_first;
};

static inline const uint8_t *kv_row_view_at(const struct kv_row_view *view, uint32_t token_idx)
{
	const uint32_t entry_idx = token_idx / view->block_size - view->entry_first;
	const uint64_t block_idx = view->block_table ? view->block_table[entry_idx] : entry_idx;

	return view->base + block_idx * view->block_bytes +
		(token_idx % view->block_size) * view->token_bytes + view->head_offset_bytes;
}

/*
 * What the layer and the query heads ask for. A zeroed option is off, so that an initialiser that names only
 * `scale` stays right when options are added. How a logit is made, in this order (core/DESIGN.md says why):
 *
 *	x = scale * <q, k> + scale * <q, k_center>
 *	x = softcap * tanh(x / softcap)
 *	x = x + slope * (position of k - position of q), the latter being tokens.hi - 1
 *
 * A sink joins the denominator after all tokens, as one more logit without a value.
 */
struct kv_attention_options {
	float scale;         /* usually 1 / sqrt(k head_dim) */
	float softcap;       /* 0: none */
	const float *slopes; /* ALiBi, [n_queries]; NULL: none */
	const float *sinks;  /* [n_queries]; NULL: none */
};

/*
 * The tokens that one query row sees: [0, first_hi) and [lo, hi), first_hi <= lo. The former are the tokens
 * that stay although the window has moved on, none when the window reaches them or there is none.
 */
struct kv_attention_range {
	uint32_t first_hi, lo, hi;
};

/*
 * Of row `row` of q_len, which ends at token n_tokens_seen - q_len + 1 + row; nothing where that is not
 * positive. window 0: all tokens.
 */
static inline struct kv_attention_range kv_attention_range(
	uint32_t n_tokens_seen, uint32_t q_len, uint32_t row, uint32_t window, uint32_t sink_tokens)
{
	const uint64_t end = (uint64_t)n_tokens_seen + 1 + row;
	struct kv_attention_range range = { .hi = end > q_len ? (uint32_t)(end - q_len) : 0 };

	if (window == 0 || range.hi <= window || range.hi - window <= sink_tokens)
		return range;
	range.first_hi = sink_tokens;
	range.lo = range.hi - window;
	return range;
}

struct kv_attention_input {
	const struct kv_row_codec *k_codec;
	const struct kv_row_codec *v_codec;
	struct kv_row_view k;
	struct kv_row_view v;
	/*
	 * Tokens from exact_lo on are read from here in place of k and v, as numbers in the channels' own
	 * basis (FORMATS 5.5). exact_k_codec NULL: none.
	 */
	const struct kv_row_codec *exact_k_codec;
	const struct kv_row_codec *exact_v_codec;
	struct kv_row_view exact_k;
	struct kv_row_view exact_v;
	uint32_t exact_lo;
	const float *q; /* [n_queries, k head_dim]: all query heads of this KV head, or any part of them */
	uint32_t n_queries; /* at least 1 */
	struct kv_attention_range tokens;
	/*
	 * q is in the basis of the K rows, or the output is wanted in that of the V rows (core/format.h).
	 * Where rows are not rotated it changes nothing.
	 */
	bool q_is_rotated;
	bool out_is_rotated;
	/*
	 * What was subtracted from every K row before it was stored, [k head_dim] in the channels' own basis;
	 * NULL: nothing. scale * <q, k_center> is added to every logit, so that logits are those of the rows
	 * as they were, and log-sum-exp with them.
	 */
	const float *k_center;
};

struct kv_attention_scratch {
	double q_prepared[KV_ATTENTION_QUERIES_MAX * KV_PREPARED_DIM_MAX]; /* [n_queries, K prepared_dim] */
	double acc[KV_ATTENTION_QUERIES_MAX * KV_PREPARED_DIM_MAX];        /* [n_queries, V prepared_dim] */
	double q_exact[KV_ATTENTION_QUERIES_MAX * KV_HEAD_DIM_MAX];        /* [n_queries, k head_dim] */
	double acc_exact[KV_ATTENTION_QUERIES_MAX * KV_HEAD_DIM_MAX];      /* [n_queries, v head_dim] */
	double weights[KV_ATTENTION_QUERIES_MAX]
		      [KV_ATTENTION_PIECE_TOKENS]; /* products, logits, then exp(logit - max) */
	double max[KV_ATTENTION_QUERIES_MAX];
	double sum[KV_ATTENTION_QUERIES_MAX];
	double logit_offset[KV_ATTENTION_QUERIES_MAX]; /* scale * <q, k_center> */
	double work[KV_ROW_WORK_NUMBERS];
	const uint8_t *rows[KV_ATTENTION_PIECE_TOKENS];
};

/*
 * out[n_queries, v head_dim], in the channels' own basis; lse[n_queries], the natural logarithm of the
 * softmax denominator, or NULL. No token to attend to: out is 0 and lse -infinity, or the sink's logit where
 * there is one; no row and no table entry is read. A query's result does not depend on the other queries.
 */
void kv_attention_rows(const struct kv_attention_input *input, const struct kv_attention_options *options,
	struct kv_attention_scratch *scratch, float *out, float *lse);

/*
 * The parts of it that do not depend on how rows are multiplied, for other implementations. prepare: query in
 * the bases of the K rows' segments, prepared_dim numbers; returns <q, k_center>. finish: acc, prepared_dim
 * numbers in the bases of the V rows' segments, which it uses up, times `factor`.
 */
double kv_attention_prepare(const struct kv_attention_input *input, const float *q, double *q_prepared);
void kv_attention_finish(const struct kv_attention_input *input, double *acc, double factor, float *out);
/*
 * The same for rows of the exact window. prepare_exact: the query in the channels' own basis, [k head_dim].
 * finish_exact: adds acc, [v head_dim] in the channels' own basis, times `factor`, to what
 * kv_attention_finish() left in `out`, in its basis.
 */
void kv_attention_prepare_exact(const struct kv_attention_input *input, const float *q, double *q_exact);
void kv_attention_finish_exact(
	const struct kv_attention_input *input, const double *acc, double factor, float *out);
/*
 * Adds a sink (NULL: none) to the softmax with this maximum and sum; returns what the weighted sum is
 * multiplied by. The sum is 0 and the maximum -infinity when no token was seen; there must be a sink then.
 */
double kv_attention_close(const float *sink, double *max, double *sum);

/*
 * The same in float64 over plain float rows, in another way (two passes, rows as they are), to measure
 * against. Row t begins at k + t * k_stride and v + t * v_stride (in floats). k NULL: all keys are zero, the
 * control beside every figure of quality. out[v_dim].
 */
struct kv_attention_exact_input {
	const float *q; /* [k_dim] */
	const float *k;
	const float *v;
	uint64_t k_stride;
	uint64_t v_stride;
	uint32_t k_dim;
	uint32_t v_dim;
	struct kv_attention_range tokens;
	double scale;
	double softcap;      /* 0: none */
	double slope;        /* ALiBi; 0: none */
	const double *sink;  /* NULL: none */
	double logit_offset; /* added to every scaled product: scale * <q, k_center> */
};
void kv_attention_exact(const struct kv_attention_exact_input *input, double *out, double *lse);

#endif
