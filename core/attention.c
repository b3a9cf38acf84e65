/*
 * Scalar attention. Online softmax in float64: the running maximum may grow once per piece, then what was
 * summed so far is scaled down; the first piece finds nothing to scale. Queries of one KV head share the
 * expansion of every row, and nothing else.
 */
#include "core/attention.h"

#include <math.h>
#include <string.h>

#include "core/k_center.h"

static void begin_query(const struct kv_attention_input *input, const float *q, double *q_prepared)
{
	const struct kv_row_codec *codec = input->k_codec;

	if (!input->q_is_rotated) {
		kv_row_codec_prepare_query(codec, q, q_prepared);
		return;
	}
	KV_ASSERT(kv_row_codec_has_one_basis(codec));
	for (uint32_t i = 0; i < codec->head_dim; i++)
		q_prepared[i] = (double)q[i];
}

/* <q, k_center>; a rotated q meets the centre in the rows' basis. Uses `expanded` up. */
static double center_product(
	const struct kv_attention_input *input, const float *q, const double *q_prepared, double *expanded)
{
	if (!input->k_center)
		return 0;
	if (!input->q_is_rotated)
		return kv_k_center_product(input->k_center, q, input->k_codec->head_dim);
	kv_row_codec_prepare_query(input->k_codec, input->k_center, expanded);
	return kv_row_codec_score(input->k_codec, q_prepared, expanded);
}

static void finish_query(const struct kv_attention_input *input, double *acc, double factor, float *out)
{
	const struct kv_row_codec *codec = input->v_codec;

	if (!input->out_is_rotated) {
		kv_row_codec_finish_output(codec, acc, factor, out);
		return;
	}
	KV_ASSERT(kv_row_codec_has_one_basis(codec));
	for (uint32_t i = 0; i < codec->head_dim; i++)
		out[i] = (float)(acc[i] * factor);
}

/* Turns the logits of a piece into weights against the maximum so far, and what was summed before with it. */
static void take_weights(
	struct kv_attention_scratch *scratch, uint32_t query_idx, uint32_t n_tokens, uint32_t acc_length)
{
	double *weights = scratch->weights[query_idx];
	double piece_max = -INFINITY;

	for (uint32_t t = 0; t < n_tokens; t++) {
		if (weights[t] > piece_max)
			piece_max = weights[t];
	}
	if (piece_max > scratch->max[query_idx]) {
		const double shrink = exp(scratch->max[query_idx] - piece_max); /* 0 for the first piece */

		scratch->sum[query_idx] *= shrink;
		for (uint32_t i = 0; i < acc_length; i++)
			scratch->acc[query_idx][i] *= shrink;
		scratch->max[query_idx] = piece_max;
	}
	for (uint32_t t = 0; t < n_tokens; t++) {
		weights[t] = exp(weights[t] - scratch->max[query_idx]);
		scratch->sum[query_idx] += weights[t];
	}
}

/* Takes tokens [first, end) into the softmax and the weighted sums of n_queries queries. */
static void take_piece(const struct kv_attention_input *input, const struct kv_attention_options *options,
	uint32_t n_queries, uint32_t first, uint32_t end, struct kv_attention_scratch *scratch)
{
	for (uint32_t t = first; t < end; t++) {
		kv_row_codec_expand(input->k_codec, kv_row_view_at(&input->k, t), scratch->expanded);
		for (uint32_t n = 0; n < n_queries; n++)
			scratch->weights[n][t - first] = scratch->logit_offset[n] +
				(double)options->scale *
					kv_row_codec_score(
						input->k_codec, scratch->q_prepared[n], scratch->expanded);
	}
	for (uint32_t n = 0; n < n_queries; n++)
		take_weights(scratch, n, end - first, input->v_codec->prepared_dim);
	for (uint32_t t = first; t < end; t++) {
		kv_row_codec_expand(input->v_codec, kv_row_view_at(&input->v, t), scratch->expanded);
		for (uint32_t n = 0; n < n_queries; n++)
			kv_row_codec_accumulate(input->v_codec, scratch->weights[n][t - first],
				scratch->expanded, scratch->acc[n]);
	}
}

/* One pass over the rows for queries [query_first, query_first + n_queries). */
static void take_queries(const struct kv_attention_input *input, const struct kv_attention_options *options,
	uint32_t query_first, uint32_t n_queries, struct kv_attention_scratch *scratch, float *out,
	float *lse)
{
	const uint32_t k_dim = input->k_codec->head_dim, v_dim = input->v_codec->head_dim;

	for (uint32_t n = 0; n < n_queries; n++) {
		const float *q = input->q + (size_t)(query_first + n) * k_dim;

		begin_query(input, q, scratch->q_prepared[n]);
		scratch->logit_offset[n] = (double)options->scale *
			center_product(input, q, scratch->q_prepared[n], scratch->expanded);
		memset(scratch->acc[n], 0, input->v_codec->prepared_dim * sizeof(scratch->acc[n][0]));
		scratch->max[n] = -INFINITY;
		scratch->sum[n] = 0;
	}
	for (uint32_t first = input->token_lo; first < input->token_hi;) {
		const uint32_t piece = KV_ATTENTION_PIECE_TOKENS - first % KV_ATTENTION_PIECE_TOKENS;
		const uint32_t left = input->token_hi - first;
		const uint32_t end = first + (left < piece ? left : piece);

		take_piece(input, options, n_queries, first, end, scratch);
		first = end;
	}
	for (uint32_t n = 0; n < n_queries; n++) {
		const size_t query_idx = query_first + n;

		finish_query(input, scratch->acc[n], 1.0 / scratch->sum[n], out + query_idx * v_dim);
		if (lse)
			lse[query_idx] = (float)(scratch->max[n] + log(scratch->sum[n]));
	}
}

void kv_attention_rows(const struct kv_attention_input *input, const struct kv_attention_options *options,
	struct kv_attention_scratch *scratch, float *out, float *lse)
{
	KV_ASSERT(input->n_queries >= 1);
	if (input->token_lo >= input->token_hi) {
		memset(out, 0, (size_t)input->n_queries * input->v_codec->head_dim * sizeof(*out));
		for (uint32_t n = 0; lse && n < input->n_queries; n++)
			lse[n] = -INFINITY;
		return;
	}
	for (uint32_t first = 0; first < input->n_queries; first += KV_ATTENTION_QUERIES_MAX) {
		const uint32_t left = input->n_queries - first;

		take_queries(input, options, first,
			left < KV_ATTENTION_QUERIES_MAX ? left : KV_ATTENTION_QUERIES_MAX, scratch, out, lse);
	}
}

static double exact_logit(const struct kv_attention_exact_input *input, uint32_t token_idx)
{
	double product = 0;

	if (!input->k)
		return 0;

	const float *k = input->k + token_idx * input->k_stride;

	for (uint32_t i = 0; i < input->k_dim; i++)
		product += (double)input->q[i] * (double)k[i];
	return input->scale * product;
}

void kv_attention_exact(const struct kv_attention_exact_input *input, double *out, double *lse)
{
	double max = -INFINITY, sum = 0;

	for (uint32_t i = 0; i < input->v_dim; i++)
		out[i] = 0;
	for (uint32_t t = input->token_lo; t < input->token_hi; t++)
		max = fmax(max, exact_logit(input, t));
	for (uint32_t t = input->token_lo; t < input->token_hi; t++) {
		const double weight = exp(exact_logit(input, t) - max);
		const float *v = input->v + t * input->v_stride;

		sum += weight;
		for (uint32_t i = 0; i < input->v_dim; i++)
			out[i] += weight * (double)v[i];
	}
	if (input->token_lo >= input->token_hi) {
		*lse = -INFINITY;
		return;
	}
	for (uint32_t i = 0; i < input->v_dim; i++)
		out[i] /= sum;
	*lse = max + log(sum);
}
