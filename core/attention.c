/*
 * Scalar attention. Online softmax in float64: the running maximum may grow once per piece, then what was
 * summed so far is scaled down; the first piece finds nothing to scale. Queries of one KV head share the
 * expansion of every row, and nothing else. How many rows are worked on at a
 * time is no matter of the bits.
 */
#include "core/attention.h"

#include <math.h>
#include <string.h>

#include "core/k_center.h"
#include "core/row_kernels.h"

void kv_attention_prepare_exact(const struct kv_attention_input *input, const float *q, double *q_exact)
{
	const uint32_t head_dim = input->k_codec->head_dim;
	double y[KV_HEAD_DIM_MAX];

	for (uint32_t i = 0; i < head_dim; i++)
		(input->q_is_rotated ? y : q_exact)[i] = (double)q[i];
	if (input->q_is_rotated)
		kv_row_codec_from_basis(input->k_codec, y, q_exact);
}

/* <q, k_center>: the centre is in the channels' own basis. */
static double center_product(const struct kv_attention_input *input, const float *q)
{
	double x[KV_HEAD_DIM_MAX], product = 0;

	if (!input->k_center)
		return 0;
	if (!input->q_is_rotated)
		return kv_k_center_product(input->k_center, q, input->k_codec->head_dim);
	kv_attention_prepare_exact(input, q, x);
	for (uint32_t i = 0; i < input->k_codec->head_dim; i++)
		product += x[i] * (double)input->k_center[i];
	return product;
}

double kv_attention_prepare(const struct kv_attention_input *input, const float *q, double *q_prepared)
{
	if (input->q_is_rotated)
		kv_row_codec_prepare_rotated(input->k_codec, q, q_prepared);
	else
		kv_row_codec_prepare_query(input->k_codec, q, q_prepared);
	return center_product(input, q);
}

void kv_attention_finish(const struct kv_attention_input *input, double *acc, double factor, float *out)
{
	if (input->out_is_rotated)
		kv_row_codec_finish_rotated(input->v_codec, acc, factor, out);
	else
		kv_row_codec_finish_output(input->v_codec, acc, factor, out);
}

void kv_attention_finish_exact(
	const struct kv_attention_input *input, const double *acc, double factor, float *out)
{
	const uint32_t head_dim = input->v_codec->head_dim;
	double y[KV_HEAD_DIM_MAX];

	if (input->out_is_rotated)
		kv_row_codec_to_basis(input->v_codec, acc, y);
	for (uint32_t i = 0; i < head_dim; i++)
		out[i] = (float)((double)out[i] + (input->out_is_rotated ? y : acc)[i] * factor);
}

static void scale_down(double *acc, uint32_t n, double shrink)
{
	for (uint32_t i = 0; i < n; i++)
		acc[i] *= shrink;
}

/*
 * Turns the logits of a piece, of which `piece_max` is the greatest, into weights against the maximum so far,
 * and what was summed before with it.
 */
static void take_weights(const struct kv_attention_input *input, struct kv_attention_scratch *scratch,
	uint32_t query_idx, uint32_t n_tokens, double piece_max)
{
	const uint32_t acc_length = input->v_codec->prepared_dim, v_dim = input->v_codec->head_dim;
	double *weights = scratch->weights[query_idx];
	double max = scratch->max[query_idx], sum = scratch->sum[query_idx];

	if (piece_max > max) {
		const double shrink = exp(max - piece_max); /* 0 for the first piece */

		sum *= shrink;
		scale_down(scratch->acc + (size_t)query_idx * acc_length, acc_length, shrink);
		if (input->exact_k_codec)
			scale_down(scratch->acc_exact + (size_t)query_idx * v_dim, v_dim, shrink);
		max = scratch->max[query_idx] = piece_max;
	}
	for (uint32_t t = 0; t < n_tokens; t++)
		weights[t] = exp(weights[t] - max);
	for (uint32_t t = 0; t < n_tokens; t++)
		sum += weights[t];
	scratch->sum[query_idx] = sum;
}

/* Rows of tokens [first, end); the table is looked at once per block. */
static struct kv_row_list find_rows(const struct kv_row_codec *codec, const struct kv_row_view *view,
	uint32_t first, uint32_t end, struct kv_attention_scratch *scratch)
{
	const uint8_t **rows = scratch->rows;

	for (uint32_t t = first; t < end;) {
		const uint32_t left = view->block_size - t % view->block_size;
		const uint32_t n = end - t < left ? end - t : left;
		const uint8_t *row = kv_row_view_at(view, t);

		for (uint32_t i = 0; i < n; i++)
			*rows++ = row + i * view->token_bytes;
		t += n;
	}
	return (struct kv_row_list){
		.codec = codec, .rows = scratch->rows, .n_rows = end - first, .work = scratch->work
	};
}

/* Caps and slopes of a piece's logits, of which the first is that of token `first`; returns the greatest. */
static double bend_logits(const struct kv_attention_options *options, uint32_t query_idx, uint32_t position,
	uint32_t first, uint32_t n_tokens, double *logits)
{
	const double cap = (double)options->softcap;
	const double slope = options->slopes ? (double)options->slopes[query_idx] : 0;
	double max = -INFINITY;

	for (uint32_t t = 0; t < n_tokens; t++) {
		if (cap > 0)
			logits[t] = cap * tanh(logits[t] / cap);
		if (options->slopes)
			logits[t] += slope * ((double)(first + t) - (double)position);
		max = logits[t] > max ? logits[t] : max;
	}
	return max;
}

/* Takes tokens [first, end) into the softmax and the weighted sums of n_queries queries. */
static void take_piece(const struct kv_attention_input *input, const struct kv_attention_options *options,
	uint32_t query_first, uint32_t n_queries, uint32_t first, uint32_t end,
	struct kv_attention_scratch *scratch)
{
	const struct kv_row_kernels *kernels = kv_row_kernels();
	const bool is_exact = input->exact_k_codec && first >= input->exact_lo;
	struct kv_row_list rows = is_exact
		? find_rows(input->exact_k_codec, &input->exact_k, first, end, scratch)
		: find_rows(input->k_codec, &input->k, first, end, scratch);

	kv_row_list_score(&rows, is_exact ? scratch->q_exact : scratch->q_prepared, n_queries,
		scratch->weights[0], KV_ATTENTION_PIECE_TOKENS);
	for (uint32_t n = 0; n < n_queries; n++) {
		double piece_max = kernels->finish_logits(
			scratch->weights[n], end - first, (double)options->scale, scratch->logit_offset[n]);

		if (options->softcap > 0 || options->slopes)
			piece_max = bend_logits(options, query_first + n, input->tokens.hi - 1, first,
				end - first, scratch->weights[n]);
		take_weights(input, scratch, n, end - first, piece_max);
	}
	rows = is_exact ? find_rows(input->exact_v_codec, &input->exact_v, first, end, scratch)
			: find_rows(input->v_codec, &input->v, first, end, scratch);
	kv_row_list_accumulate(&rows, scratch->weights[0], KV_ATTENTION_PIECE_TOKENS, n_queries,
		is_exact ? scratch->acc_exact : scratch->acc);
}

static void take_tokens(const struct kv_attention_input *input, const struct kv_attention_options *options,
	uint32_t query_first, uint32_t n_queries, uint32_t lo, uint32_t hi,
	struct kv_attention_scratch *scratch)
{
	for (uint32_t first = lo; first < hi;) {
		const uint32_t piece = KV_ATTENTION_PIECE_TOKENS - first % KV_ATTENTION_PIECE_TOKENS;
		uint32_t end = first + (hi - first < piece ? hi - first : piece);

		/* All tokens of a piece come from the same place. */
		if (input->exact_k_codec && first < input->exact_lo && end > input->exact_lo)
			end = input->exact_lo;
		take_piece(input, options, query_first, n_queries, first, end, scratch);
		first = end;
	}
}

/* Adds the sink to the denominator; returns what the weighted sum is multiplied by. */
double kv_attention_close(const float *sink, double *max, double *sum)
{
	double shrink = 1;

	if (sink) {
		const double logit = (double)*sink, top = logit > *max ? logit : *max;

		shrink = exp(*max - top);
		*sum = *sum * shrink + exp(logit - top);
		*max = top;
	}
	return shrink / *sum;
}

/* One pass over the rows for queries [query_first, query_first + n_queries). */
static void take_queries(const struct kv_attention_input *input, const struct kv_attention_options *options,
	uint32_t query_first, uint32_t n_queries, struct kv_attention_scratch *scratch, float *out,
	float *lse)
{
	const uint32_t k_dim = input->k_codec->head_dim, v_dim = input->v_codec->head_dim;
	const size_t acc_length = input->v_codec->prepared_dim;

	memset(scratch->acc, 0, n_queries * acc_length * sizeof(*scratch->acc));
	for (uint32_t n = 0; n < n_queries; n++) {
		const float *q = input->q + (size_t)(query_first + n) * k_dim;
		double *q_prepared = scratch->q_prepared + (size_t)n * input->k_codec->prepared_dim;

		scratch->logit_offset[n] =
			(double)options->scale * kv_attention_prepare(input, q, q_prepared);
		if (input->exact_k_codec) {
			kv_attention_prepare_exact(input, q, scratch->q_exact + (size_t)n * k_dim);
			memset(scratch->acc_exact + (size_t)n * v_dim, 0, v_dim * sizeof(double));
		}
		scratch->max[n] = -INFINITY;
		scratch->sum[n] = 0;
	}
	take_tokens(input, options, query_first, n_queries, 0, input->tokens.first_hi, scratch);
	take_tokens(input, options, query_first, n_queries, input->tokens.lo, input->tokens.hi, scratch);
	for (uint32_t n = 0; n < n_queries; n++) {
		const size_t query_idx = query_first + n;
		const double factor = kv_attention_close(options->sinks ? options->sinks + query_idx : NULL,
			&scratch->max[n], &scratch->sum[n]);

		kv_attention_finish(input, scratch->acc + n * acc_length, factor, out + query_idx * v_dim);
		if (input->exact_k_codec)
			kv_attention_finish_exact(input, scratch->acc_exact + (size_t)n * v_dim, factor,
				out + query_idx * v_dim);
		if (lse)
			lse[query_idx] = (float)(scratch->max[n] + log(scratch->sum[n]));
	}
}

void kv_attention_rows(const struct kv_attention_input *input, const struct kv_attention_options *options,
	struct kv_attention_scratch *scratch, float *out, float *lse)
{
	KV_ASSERT(input->n_queries >= 1);
	KV_ASSERT(input->tokens.first_hi <= input->tokens.lo);
	if (input->tokens.lo >= input->tokens.hi) {
		memset(out, 0, (size_t)input->n_queries * input->v_codec->head_dim * sizeof(*out));
		for (uint32_t n = 0; lse && n < input->n_queries; n++)
			lse[n] = options->sinks ? options->sinks[n] : -INFINITY;
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
	double logit = 0;

	if (input->k) {
		const float *k = input->k + token_idx * input->k_stride;

		for (uint32_t i = 0; i < input->k_dim; i++)
			logit += (double)input->q[i] * (double)k[i];
	}
	logit = input->scale * logit + input->logit_offset;
	if (input->softcap > 0)
		logit = input->softcap * tanh(logit / input->softcap);
	return logit - input->slope * ((double)input->tokens.hi - 1 - (double)token_idx);
}

/* The next token that is seen; begin with UINT32_MAX. */
static uint32_t next_token(const struct kv_attention_range *tokens, uint32_t token_idx)
{
	const uint32_t next = token_idx + 1;

	return next >= tokens->first_hi && next < tokens->lo ? tokens->lo : next;
}

void kv_attention_exact(const struct kv_attention_exact_input *input, double *out, double *lse)
{
	const struct kv_attention_range *tokens = &input->tokens;
	double max = input->sink ? *input->sink : -INFINITY, sum;

	for (uint32_t i = 0; i < input->v_dim; i++)
		out[i] = 0;
	for (uint32_t t = next_token(tokens, UINT32_MAX); t < tokens->hi; t = next_token(tokens, t))
		max = fmax(max, exact_logit(input, t));
	sum = input->sink ? exp(*input->sink - max) : 0;
	for (uint32_t t = next_token(tokens, UINT32_MAX); t < tokens->hi; t = next_token(tokens, t)) {
		const double weight = exp(exact_logit(input, t) - max);
		const float *v = input->v + t * input->v_stride;

		sum += weight;
		for (uint32_t i = 0; i < input->v_dim; i++)
			out[i] += weight * (double)v[i];
	}
	for (uint32_t i = 0; tokens->lo < tokens->hi && i < input->v_dim; i++)
		out[i] /= sum;
	*lse = max + log(sum); /* -infinity where there is nothing */
}
