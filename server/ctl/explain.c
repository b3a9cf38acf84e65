#include "server/ctl/explain.h"

#include <math.h>
#include <string.h>

#include "core/attention.h"
#include "core/checked.h"
#include "core/k_center.h"
#include "core/memory.h"

/* K or V of all heads of the layer. */
struct side {
	const float *rows;      /* [n_tokens, kv_heads, dim] as they are */
	float *coded;           /* the same as they are read back */
	uint8_t *pages, *exact; /* [kv_heads, n_tokens, row_bytes]; exact: bf16, or NULL */
	uint32_t dim;
};

struct srv_explain {
	const struct kv_pool_spec *spec;
	uint32_t n_tokens, exact_lo; /* tokens from exact_lo on are in the exact window */
	struct side k, v;
	const float *q;
	double *logits, *coded_logits, *weights, *coded_weights; /* [n_tokens] */
	struct kv_row_scratch codec;
	struct kv_attention_scratch attention;
};

static const struct kv_row_codec *codec_of(const struct srv_explain *explain, bool is_v, uint32_t head)
{
	const struct kv_layer_spec *layer = &explain->spec->layers[0];

	return is_v ? kv_layer_v(layer, head) : kv_layer_k(layer, head);
}

static const struct kv_row_codec *exact_codec_of(const struct srv_explain *explain, bool is_v)
{
	return is_v ? explain->spec->exact_v : explain->spec->exact_k;
}

static const float *center_of(const struct srv_explain *explain, uint32_t head)
{
	const float *center = explain->spec->layers[0].k_center;

	return center ? center + (size_t)head * explain->spec->k_head_dim : NULL;
}

static size_t row_at(
	const struct srv_explain *explain, const struct side *side, uint32_t token, uint32_t head)
{
	return ((size_t)token * explain->spec->kv_heads + head) * side->dim;
}

/* ---- storing ---- */

static enum kv_status store_row(struct srv_explain *explain, struct side *side, bool is_v, uint32_t head,
	uint32_t token, struct kv_error *err)
{
	const struct kv_row_codec *codec = codec_of(explain, is_v, head);
	const float *center = is_v ? NULL : center_of(explain, head);
	const size_t at = row_at(explain, side, token, head);
	const size_t row_idx = (size_t)head * explain->n_tokens + token;
	uint8_t *page = side->pages + row_idx * codec->row_bytes;
	float row[KV_HEAD_DIM_MAX];

	memcpy(row, side->rows + at, side->dim * sizeof(row[0]));
	if (center)
		kv_k_center_subtract(center, row, side->dim, row);
	if (kv_row_codec_encode(codec, row, page, &explain->codec) != KV_OK)
		return kv_fail(err, KV_BAD_VALUE, "%c row of token %u, KV head %u cannot be stored as %s",
			is_v ? 'v' : 'k', token, head, codec->format->name);
	if (token >= explain->exact_lo) {
		const struct kv_row_codec *exact = exact_codec_of(explain, is_v);
		uint8_t *bytes = side->exact + row_idx * exact->row_bytes;

		if (kv_row_codec_encode(exact, row, bytes, &explain->codec) != KV_OK)
			return kv_fail(err, KV_BAD_VALUE, "%c row of token %u, KV head %u is no bf16",
				is_v ? 'v' : 'k', token, head);
		kv_row_codec_decode(exact, bytes, side->coded + at, &explain->codec);
	} else {
		kv_row_codec_decode(codec, page, side->coded + at, &explain->codec);
	}
	if (center)
		kv_k_center_add(center, side->dim, side->coded + at);
	return KV_OK;
}

static enum kv_status store_side(
	struct srv_explain *explain, struct side *side, bool is_v, const float *rows, struct kv_error *err)
{
	const struct kv_pool_spec *spec = explain->spec;
	const size_t n_rows = (size_t)explain->n_tokens * spec->kv_heads;
	enum kv_status status = KV_OK;

	side->rows = rows;
	side->dim = is_v ? spec->v_head_dim : spec->k_head_dim;
	side->coded = kv_alloc(n_rows * side->dim, sizeof(float));
	side->pages = kv_alloc(n_rows, codec_of(explain, is_v, 0)->row_bytes);
	side->exact = kv_alloc(n_rows, 2 * (size_t)side->dim);
	if (!side->coded || !side->pages || !side->exact)
		return kv_fail(err, KV_NO_MEMORY, "no memory for %zu rows", n_rows);
	for (uint32_t h = 0; h < spec->kv_heads && status == KV_OK; h++) {
		for (uint32_t t = 0; t < explain->n_tokens && status == KV_OK; t++)
			status = store_row(explain, side, is_v, h, t, err);
	}
	return status;
}

enum kv_status srv_explain_create(const struct kv_pool_spec *spec, uint32_t n_tokens, const float *k,
	const float *v, const float *q, struct srv_explain **out, struct kv_error *err)
{
	struct srv_explain *explain = kv_alloc(1, sizeof(*explain));
	enum kv_status status = KV_OK;

	if (!explain)
		return kv_fail(err, KV_NO_MEMORY, "no memory for an explanation");
	explain->spec = spec;
	explain->n_tokens = explain->exact_lo = n_tokens;
	explain->q = q;
	if (spec->exact_tokens > 0)
		explain->exact_lo = n_tokens > spec->exact_tokens ? n_tokens - spec->exact_tokens : 0;
	explain->logits = kv_alloc(4 * (size_t)n_tokens, sizeof(double));
	if (!explain->logits)
		status = kv_fail(err, KV_NO_MEMORY, "no memory for %u tokens", n_tokens);
	explain->coded_logits = explain->logits + n_tokens;
	explain->weights = explain->coded_logits + n_tokens;
	explain->coded_weights = explain->weights + n_tokens;
	if (status == KV_OK)
		status = store_side(explain, &explain->k, false, k, err);
	if (status == KV_OK)
		status = store_side(explain, &explain->v, true, v, err);
	if (status != KV_OK) {
		srv_explain_destroy(explain);
		return status;
	}
	*out = explain;
	return KV_OK;
}

void srv_explain_destroy(struct srv_explain *explain)
{
	if (!explain)
		return;
	for (uint32_t i = 0; i < 2; i++) {
		struct side *side = i == 0 ? &explain->k : &explain->v;

		kv_free(side->coded);
		kv_free(side->pages);
		kv_free(side->exact);
	}
	kv_free(explain->logits);
	kv_free(explain);
}

/* ---- attention ---- */

static struct kv_attention_range range_of(const struct srv_explain *explain)
{
	const struct kv_layer_spec *layer = &explain->spec->layers[0];

	return kv_attention_range(explain->n_tokens, 1, 0, layer->window, layer->sink_tokens);
}

static bool is_seen(const struct kv_attention_range *range, uint32_t token)
{
	return token < range->first_hi || (token >= range->lo && token < range->hi);
}

/* In float64. k NULL: keys of zeros. */
static void attend(
	const struct srv_explain *explain, uint32_t q_head, const float *k, const float *v, double *out)
{
	const struct kv_pool_spec *spec = explain->spec;
	const struct kv_layer_spec *layer = &spec->layers[0];
	const uint32_t head = q_head / (spec->q_heads / spec->kv_heads);
	const double sink = layer->sinks ? (double)layer->sinks[q_head] : 0;
	const struct kv_attention_exact_input input = {
		.q = explain->q + (size_t)q_head * spec->k_head_dim,
		.k = k ? k + (size_t)head * spec->k_head_dim : NULL,
		.v = v + (size_t)head * spec->v_head_dim,
		.k_stride = (uint64_t)spec->kv_heads * spec->k_head_dim,
		.v_stride = (uint64_t)spec->kv_heads * spec->v_head_dim,
		.k_dim = spec->k_head_dim,
		.v_dim = spec->v_head_dim,
		.tokens = range_of(explain),
		.scale = (double)layer->scale,
		.softcap = (double)layer->softcap,
		.slope = layer->alibi ? (double)layer->alibi[q_head] : 0,
		.sink = layer->sinks ? &sink : NULL,
	};
	double lse;

	kv_attention_exact(&input, out, &lse);
}

static struct kv_row_view view_of(const uint8_t *rows, const struct kv_row_codec *codec)
{
	return (struct kv_row_view){ .base = rows,
		.block_size = 1,
		.block_bytes = codec->row_bytes,
		.token_bytes = codec->row_bytes };
}

/* By the scalar kernel, over the stored bytes. */
static void run_kernel(struct srv_explain *explain, uint32_t q_head, float *out)
{
	const struct kv_pool_spec *spec = explain->spec;
	const struct kv_layer_spec *layer = &spec->layers[0];
	const uint32_t head = q_head / (spec->q_heads / spec->kv_heads);
	const struct kv_row_codec *k = codec_of(explain, false, head), *v = codec_of(explain, true, head);
	const size_t first = (size_t)head * explain->n_tokens;
	const struct kv_attention_options options = { .scale = layer->scale,
		.softcap = layer->softcap,
		.slopes = layer->alibi ? layer->alibi + q_head : NULL,
		.sinks = layer->sinks ? layer->sinks + q_head : NULL };
	struct kv_attention_input input = { .k_codec = k,
		.v_codec = v,
		.k = view_of(explain->k.pages + first * k->row_bytes, k),
		.v = view_of(explain->v.pages + first * v->row_bytes, v),
		.q = explain->q + (size_t)q_head * spec->k_head_dim,
		.n_queries = 1,
		.tokens = range_of(explain),
		.k_center = center_of(explain, head) };

	if (explain->exact_lo < explain->n_tokens) {
		input.exact_k_codec = spec->exact_k;
		input.exact_v_codec = spec->exact_v;
		input.exact_k = view_of(explain->k.exact + first * spec->exact_k->row_bytes, spec->exact_k);
		input.exact_v = view_of(explain->v.exact + first * spec->exact_v->row_bytes, spec->exact_v);
		input.exact_lo = explain->exact_lo;
	}
	kv_attention_rows(&input, &options, &explain->attention, out, NULL);
}

static double distance(const double *a, const double *b, uint32_t n)
{
	double sum = 0;

	for (uint32_t i = 0; i < n; i++)
		sum += (a[i] - b[i]) * (a[i] - b[i]);
	return sqrt(sum);
}

static double length(const double *a, uint32_t n)
{
	static const double zeros[KV_HEAD_DIM_MAX];

	return distance(a, zeros, n);
}

/* ---- softmax ---- */

/* Logits of the tokens that are seen, and their weights; -infinity and 0 for the others. */
static void weigh(
	const struct srv_explain *explain, uint32_t q_head, const float *k, double *logits, double *weights)
{
	const struct kv_pool_spec *spec = explain->spec;
	const struct kv_layer_spec *layer = &spec->layers[0];
	const struct kv_attention_range range = range_of(explain);
	const uint32_t head = q_head / (spec->q_heads / spec->kv_heads);
	const float *q = explain->q + (size_t)q_head * spec->k_head_dim;
	const double sink = layer->sinks ? (double)layer->sinks[q_head] : -INFINITY;
	double max = sink, sum;

	for (uint32_t t = 0; t < explain->n_tokens; t++) {
		const float *row = k + row_at(explain, &explain->k, t, head);
		double logit = 0;

		for (uint32_t i = 0; i < spec->k_head_dim; i++)
			logit += (double)q[i] * (double)row[i];
		logit *= (double)layer->scale;
		if (layer->softcap > 0)
			logit = (double)layer->softcap * tanh(logit / (double)layer->softcap);
		if (layer->alibi)
			logit += (double)layer->alibi[q_head] * ((double)t - (double)(range.hi - 1));
		logits[t] = is_seen(&range, t) ? logit : -INFINITY;
		max = logits[t] > max ? logits[t] : max;
	}
	sum = layer->sinks ? exp(sink - max) : 0;
	for (uint32_t t = 0; t < explain->n_tokens; t++)
		sum += exp(logits[t] - max);
	for (uint32_t t = 0; t < explain->n_tokens; t++)
		weights[t] = exp(logits[t] - max) / sum;
}

static void weigh_both(struct srv_explain *explain, uint32_t q_head)
{
	weigh(explain, q_head, explain->k.rows, explain->logits, explain->weights);
	weigh(explain, q_head, explain->k.coded, explain->coded_logits, explain->coded_weights);
}

static void measure_softmax(const struct srv_explain *explain, struct srv_explain_head *out)
{
	double sum = 0, squares = 0, n = 0;

	for (uint32_t t = 0; t < explain->n_tokens; t++) {
		if (isinf(explain->logits[t]))
			continue;
		n++;
		sum += explain->logits[t];
		squares += explain->logits[t] * explain->logits[t];
		out->weights_error += fabs(explain->weights[t] - explain->coded_weights[t]) / 2;
		if (explain->weights[t] > out->top_weight) {
			out->top_weight = explain->weights[t];
			out->top_token = t;
		}
	}
	out->sigma = n > 0 ? sqrt(fmax(squares / n - sum / n * (sum / n), 0)) : 0;
}

void srv_explain_head(struct srv_explain *explain, uint32_t q_head, struct srv_explain_head *out)
{
	const uint32_t d = explain->spec->v_head_dim;
	double exact[KV_HEAD_DIM_MAX], other[KV_HEAD_DIM_MAX], kernel[KV_HEAD_DIM_MAX];
	float kernel_out[KV_HEAD_DIM_MAX];
	double norm;

	*out = (struct srv_explain_head){ 0 };
	attend(explain, q_head, explain->k.rows, explain->v.rows, exact);
	norm = length(exact, d);
	norm = norm > 0 ? norm : 1;
	attend(explain, q_head, explain->k.coded, explain->v.rows, other);
	out->keys = distance(other, exact, d) / norm;
	attend(explain, q_head, explain->k.rows, explain->v.coded, other);
	out->values = distance(other, exact, d) / norm;
	attend(explain, q_head, NULL, explain->v.rows, other);
	out->control = distance(other, exact, d) / norm;
	attend(explain, q_head, explain->k.coded, explain->v.coded, other);
	out->both = distance(other, exact, d) / norm;
	run_kernel(explain, q_head, kernel_out);
	for (uint32_t i = 0; i < d; i++)
		kernel[i] = (double)kernel_out[i];
	out->kernel = distance(kernel, other, d) / norm;
	out->total = distance(kernel, exact, d) / norm;
	weigh_both(explain, q_head);
	measure_softmax(explain, out);
}

/* ---- tokens ---- */

static double row_error(
	const struct srv_explain *explain, const struct side *side, uint32_t token, uint32_t head)
{
	const size_t at = row_at(explain, side, token, head);
	double error = 0, square = 0;

	for (uint32_t i = 0; i < side->dim; i++) {
		const double x = (double)side->rows[at + i], difference = (double)side->coded[at + i] - x;

		error += difference * difference;
		square += x * x;
	}
	return square > 0 ? sqrt(error / square) : sqrt(error);
}

static double row_length(const float *row, uint32_t n)
{
	double square = 0;

	for (uint32_t i = 0; i < n; i++)
		square += (double)row[i] * (double)row[i];
	return sqrt(square);
}

static struct srv_explain_token describe(
	const struct srv_explain *explain, uint32_t head, uint32_t token, double norm)
{
	const struct side *v = &explain->v;
	const size_t at = row_at(explain, v, token, head);
	const double weight = explain->weights[token], coded_weight = explain->coded_weights[token];

	return (struct srv_explain_token){
		.token = token,
		.score = explain->logits[token],
		.coded_score = explain->coded_logits[token],
		.weight = weight,
		.coded_weight = coded_weight,
		.k_error = row_error(explain, &explain->k, token, head),
		.v_error = row_error(explain, v, token, head),
		.share = coded_weight * row_length(v->coded + at, v->dim) / norm,
		.key_share = fabs(coded_weight - weight) * row_length(v->rows + at, v->dim) / norm,
		.value_share =
			weight * row_error(explain, v, token, head) * row_length(v->rows + at, v->dim) / norm,
		.is_exact = token >= explain->exact_lo,
	};
}

uint32_t srv_explain_tokens(
	struct srv_explain *explain, uint32_t q_head, struct srv_explain_token out[], uint32_t n_max)
{
	const uint32_t head = q_head / (explain->spec->q_heads / explain->spec->kv_heads);
	const struct kv_attention_range range = range_of(explain);
	double exact[KV_HEAD_DIM_MAX], norm;
	uint32_t n = 0;

	attend(explain, q_head, explain->k.rows, explain->v.rows, exact);
	norm = length(exact, explain->spec->v_head_dim);
	norm = norm > 0 ? norm : 1;
	weigh_both(explain, q_head);
	for (uint32_t t = 0; t < explain->n_tokens; t++) {
		uint32_t at = n;

		if (!is_seen(&range, t))
			continue;
		while (at > 0 && out[at - 1].weight < explain->weights[t])
			at--;
		if (at == n_max)
			continue;
		n = n < n_max ? n + 1 : n;
		memmove(&out[at + 1], &out[at], (n - 1 - at) * sizeof(out[0]));
		out[at] = describe(explain, head, t, norm);
	}
	return n;
}

const char *srv_explain_cause(const struct srv_explain_head *head, double bound)
{
	if (head->total < bound)
		return "nothing";
	if (head->kernel >= head->keys && head->kernel >= head->values)
		return "kernel";
	return head->keys >= head->values ? "keys" : "values";
}
