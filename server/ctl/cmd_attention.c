/* attention --explain: why one attention step of a capture comes out differently from compressed rows. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/checked.h"
#include "core/k_center.h"
#include "core/memory.h"
#include "core/pool_spec.h"
#include "core/preset.h"
#include "server/ctl/capture.h"
#include "server/ctl/ctl.h"
#include "server/ctl/explain.h"
#include "server/ctl/table.h"

#define TOP_MAX 256u
/* Errors below this part of the output are not worth a cause: bf16 itself loses 2^-9 of every number. */
#define NOTHING 0.002

enum {
	ARG_EXPLAIN,
	ARG_LAYER,
	ARG_TOKEN,
	ARG_HEAD,
	ARG_TOP,
	ARG_PRESET,
	ARG_K,
	ARG_V,
	ARG_OPTIONS,
	ARG_CENTER,
	N_ARGS
};

/* clang-format off */
static const struct srv_arg args[N_ARGS] = {
	[ARG_EXPLAIN] = { .name = "explain", .kind = SRV_ARG_FLAG, .help = "errors by cause, scores and weights" },
	[ARG_LAYER] = { .name = "layer", .kind = SRV_ARG_NUMBER, .placeholder = "L", .max = UINT32_MAX,
		.help = "the model's layer number" },
	[ARG_TOKEN] = { .name = "token", .kind = SRV_ARG_NUMBER, .placeholder = "T", .max = UINT32_MAX,
		.help = "the token whose query attends; it sees tokens 0 to T" },
	[ARG_HEAD] = { .name = "head", .kind = SRV_ARG_NUMBER, .placeholder = "H", .max = UINT32_MAX,
		.help = "query head to look into [the one with the greatest error]" },
	[ARG_TOP] = { .name = "top", .kind = SRV_ARG_NUMBER, .placeholder = "N", .number = 12, .min = 1,
		.max = TOP_MAX, .help = "tokens with the greatest weights to list" },
	[ARG_PRESET] = { .name = "preset", .kind = SRV_ARG_TEXT, .placeholder = "NAME",
		.help = "formats of K and V by the preset's name" },
	[ARG_K] = { .name = "k", .kind = SRV_ARG_TEXT, .placeholder = "F", .help = "format of K rows [tq4]" },
	[ARG_V] = { .name = "v", .kind = SRV_ARG_TEXT, .placeholder = "F", .help = "format of V rows [tq4]" },
	[ARG_OPTIONS] = { .name = "options", .kind = SRV_ARG_TEXT, .placeholder = "LIST",
		.help = "more of a pool: window=1024,softcap=50,exact_tokens=128,rotation=qr,.." },
	[ARG_CENTER] = { .name = "center", .kind = SRV_ARG_FLAG,
		.help = "with k_center: the mean of this layer's keys" },
};
/* clang-format on */

struct job {
	const struct srv_ctl *ctl;
	struct srv_capture *capture;
	uint32_t layer_idx, n_tokens; /* of the capture that are seen */
	float *k, *v, *q;
	struct kv_pool_spec *spec;
	struct srv_explain *explain;
	struct srv_explain_head *heads; /* [q_heads] */
	uint32_t head;                  /* to look into */
	struct srv_explain_token tokens[TOP_MAX];
	uint32_t n_top;
};

/* ---- inputs ---- */

/* A capture has some layers of its model: which ones, as far as they fit into a line. */
static enum kv_status no_layer(const struct srv_capture *capture, uint64_t number, struct kv_error *err)
{
	char known[120] = "";
	size_t used = 0;

	for (uint32_t i = 0; i < capture->n_layers && used + 16 < sizeof(known); i++)
		used += (size_t)snprintf(
			known + used, sizeof(known) - used, "%s%u", i ? ", " : "", capture->layers[i].number);
	return kv_fail(err, SRV_CTL_USAGE, "--layer: the capture has no layer %llu; %u are captured: %s",
		(unsigned long long)number, capture->n_layers, known);
}

static enum kv_status find_step(struct job *job, struct kv_error *err)
{
	const struct srv_ctl *ctl = job->ctl;
	const uint64_t number = ctl->values[ARG_LAYER].number, token = ctl->values[ARG_TOKEN].number;

	if (!ctl->values[ARG_EXPLAIN].is_given || !ctl->values[ARG_LAYER].is_given ||
		!ctl->values[ARG_TOKEN].is_given)
		return kv_fail(err, SRV_CTL_USAGE, "--explain, --layer and --token are needed");
	for (job->layer_idx = 0; job->layer_idx < job->capture->n_layers; job->layer_idx++) {
		if (job->capture->layers[job->layer_idx].number == number)
			break;
	}
	if (job->layer_idx == job->capture->n_layers)
		return no_layer(job->capture, number, err);
	if (token >= job->capture->n_tokens)
		return kv_fail(err, SRV_CTL_USAGE, "--token: the capture has tokens 0 to %u",
			job->capture->n_tokens - 1);
	if (ctl->values[ARG_HEAD].is_given && ctl->values[ARG_HEAD].number >= job->capture->q_heads)
		return kv_fail(err, SRV_CTL_USAGE, "--head: the capture has query heads 0 to %u",
			job->capture->q_heads - 1);
	job->n_tokens = (uint32_t)token + 1;
	return KV_OK;
}

static enum kv_status load_rows(struct job *job, struct kv_error *err)
{
	const struct srv_capture *capture = job->capture;
	const uint32_t k = srv_capture_token_values(capture, SRV_CAPTURE_K);
	const uint32_t v = srv_capture_token_values(capture, SRV_CAPTURE_V);
	const uint32_t q = srv_capture_token_values(capture, SRV_CAPTURE_Q);

	job->k = kv_alloc((size_t)job->n_tokens * k, sizeof(float));
	job->v = kv_alloc((size_t)job->n_tokens * v, sizeof(float));
	job->q = kv_alloc(q, sizeof(float));
	job->heads = kv_alloc(capture->q_heads, sizeof(*job->heads));
	if (!job->k || !job->v || !job->q || !job->heads)
		return kv_fail(err, KV_NO_MEMORY, "no memory for %u tokens", job->n_tokens);
	srv_capture_load(capture, job->layer_idx, SRV_CAPTURE_K, 0, job->n_tokens, job->k);
	srv_capture_load(capture, job->layer_idx, SRV_CAPTURE_V, 0, job->n_tokens, job->v);
	srv_capture_load(capture, job->layer_idx, SRV_CAPTURE_Q, job->n_tokens - 1, 1, job->q);
	return KV_OK;
}

/* [[[mean of the keys]]]: one layer, every KV head. */
static json_t *center_json(const struct job *job)
{
	const uint32_t kv_heads = job->capture->kv_heads, dim = job->capture->k_head_dim;
	json_t *heads = json_array();

	for (uint32_t h = 0; h < kv_heads; h++) {
		double sums[KV_HEAD_DIM_MAX] = { 0 };
		float mean[KV_HEAD_DIM_MAX];
		json_t *row = json_array();

		for (uint32_t t = 0; t < job->n_tokens; t++)
			kv_k_center_take(sums, job->k + ((size_t)t * kv_heads + h) * dim, dim);
		kv_k_center_finish(sums, job->n_tokens, dim, mean);
		for (uint32_t i = 0; i < dim; i++)
			json_array_append_new(row, json_real((double)mean[i]));
		json_array_append_new(heads, row);
	}
	return json_pack("[o]", heads);
}

static enum kv_status make_spec(struct job *job, struct kv_error *err)
{
	const struct srv_capture *capture = job->capture;
	const struct srv_arg_value *values = job->ctl->values;
	const char *options = values[ARG_OPTIONS].text;
	const struct kv_preset *preset = NULL;
	const char *k = values[ARG_K].text ? values[ARG_K].text : "tq4";
	const char *v = values[ARG_V].text ? values[ARG_V].text : "tq4";
	json_t *json = NULL;
	char text[1024];

	if (values[ARG_PRESET].text) {
		if (values[ARG_K].text || values[ARG_V].text)
			return kv_fail(err, SRV_CTL_USAGE, "--preset: not beside --k and --v");
		if (kv_preset_parse(values[ARG_PRESET].text, &preset, err) != KV_OK)
			return SRV_CTL_USAGE;
		k = preset->k;
		v = preset->v;
	}
	const int n = snprintf(text, sizeof(text),
		"name=explain,layers=1,q_heads=%u,kv_heads=%u,k_head_dim=%u,v_head_dim=%u,k=%s,v=%s,block_"
		"size=16,"
		"blocks=%u%s%s",
		capture->q_heads, capture->kv_heads, capture->k_head_dim, capture->v_head_dim, k, v,
		kv_div_up_u32(capture->n_tokens, 16), options ? "," : "", options ? options : "");

	if (n < 0 || (size_t)n >= sizeof(text))
		return kv_fail(err, SRV_CTL_USAGE, "--options: longer than 700 bytes");
	if (kv_pool_spec_parse_short(text, &json, err) != KV_OK)
		return SRV_CTL_USAGE;
	if (values[ARG_CENTER].is_given)
		json_object_set_new(json, "k_center", center_json(job));

	const enum kv_status status = kv_pool_spec_create(json, &job->spec, err);

	json_decref(json);
	return status;
}

/* ---- outputs ---- */

static const char *cause_of(const struct srv_explain_head *head)
{
	return srv_explain_cause(head, NOTHING);
}

static void print_heads(const struct job *job)
{
	static const char *const titles[] = { "head", "error", "by keys", "by values", "by kernel",
		"zero keys", "sigma", "weights off", "top weight", "token", "<cause" };
	struct srv_table table;

	srv_table_init(&table, titles, KV_LENGTH(titles));
	for (uint32_t h = 0; h < job->spec->q_heads; h++) {
		const struct srv_explain_head *head = &job->heads[h];

		srv_table_cell(&table, "%u", h);
		srv_table_cell(&table, "%.4f", head->total);
		srv_table_cell(&table, "%.4f", head->keys);
		srv_table_cell(&table, "%.4f", head->values);
		srv_table_cell(&table, "%.2g", head->kernel);
		srv_table_cell(&table, "%.4f", head->control);
		srv_table_cell(&table, "%.2f", head->sigma);
		srv_table_cell(&table, "%.4f", head->weights_error);
		srv_table_cell(&table, "%.4f", head->top_weight);
		srv_table_cell(&table, "%u", head->top_token);
		srv_table_cell(&table, "%s", cause_of(head));
	}
	srv_table_print(&table, stdout);
	srv_table_finish(&table);
}

static void print_tokens(const struct job *job)
{
	static const char *const titles[] = { "token", "score", "stored", "weight", "stored", "|k err|",
		"|v err|", "adds", "key moves", "value moves", "<row" };
	struct srv_table table;

	srv_table_init(&table, titles, KV_LENGTH(titles));
	for (uint32_t i = 0; i < job->n_top; i++) {
		const struct srv_explain_token *token = &job->tokens[i];

		srv_table_cell(&table, "%u", token->token);
		srv_table_cell(&table, "%.3f", token->score);
		srv_table_cell(&table, "%.3f", token->coded_score);
		srv_table_cell(&table, "%.4f", token->weight);
		srv_table_cell(&table, "%.4f", token->coded_weight);
		srv_table_cell(&table, "%.3f", token->k_error);
		srv_table_cell(&table, "%.3f", token->v_error);
		srv_table_cell(&table, "%.3f", token->share);
		srv_table_cell(&table, "%.4f", token->key_share);
		srv_table_cell(&table, "%.4f", token->value_share);
		srv_table_cell(&table, "%s", token->is_exact ? "exact window" : "page");
	}
	srv_table_print(&table, stdout);
	srv_table_finish(&table);
}

/* The step: which tokens the query sees, and what else makes its logits. */
static void print_step(const struct job *job)
{
	const struct kv_layer_spec *layer = &job->spec->layers[0];
	const uint32_t n = job->n_tokens;
	const bool is_cut = layer->window > 0 && layer->window < n;

	printf("layer %u, query of token %u", job->capture->layers[job->layer_idx].number, n - 1);
	if (is_cut)
		printf(", which sees tokens %u to %u", n - layer->window, n - 1);
	else
		printf(" over %u tokens", n);
	if (is_cut && layer->sink_tokens > 0)
		printf(" and the first %u", layer->sink_tokens);
	printf(": %s/%s, %u query heads, %u KV heads", kv_pool_spec_format_name(job->spec, false),
		kv_pool_spec_format_name(job->spec, true), job->spec->q_heads, job->spec->kv_heads);
	if (layer->softcap > 0)
		printf(", softcap %g", (double)layer->softcap);
	if (job->spec->exact_tokens > 0)
		printf(", the newest %u tokens exact", job->spec->exact_tokens);
	if (layer->k_center)
		printf(", k_center");
	printf("\n\n");
}

/* What to try, for the head that is looked into. */
static void print_advice(const char *cause)
{
	static const struct {
		const char *cause, *text;
	} advice[] = {
		{ "keys",
			"Keys: try --center, a K format with more bits or --preset k8v4, "
			"--options exact_tokens=128 where the tokens\nthat matter are recent, and compare." },
		{ "values",
			"Values: try a V format with more bits, or --options exact_tokens=128 where the "
			"tokens that matter are recent." },
		{ "kernel",
			"Kernel: it should be far below the others. This is a fault of the program, not "
			"of the formats." },
	};

	for (size_t i = 0; i < KV_LENGTH(advice); i++) {
		if (strcmp(advice[i].cause, cause) == 0)
			printf("\n%s\n", advice[i].text);
	}
}

static void print_text(const struct job *job)
{
	const struct srv_explain_head *head = &job->heads[job->head];

	print_step(job);
	print_heads(job);
	printf("\nError: distance of the output from that over the rows as they are, relative to its length; "
	       "by keys, by\nvalues: with only these as they are stored; by kernel: what the kernel adds to "
	       "both; cause: the greatest of\nthese. Zero keys: the control; an error by keys near it says "
	       "that the keys are lost. Sigma: spread of the\nlogits; the larger, the more an error of a "
	       "score moves. Weights off: half the sum of the changes. Top weight:\nthe greatest one, and "
	       "its token.\n\n");
	printf("head %u, the %u greatest weights (%s):\n", job->head, job->n_top, cause_of(head));
	print_tokens(job);
	printf("\nScore, weight: from the rows as they are, then as they are stored. Err: of the stored row, "
	       "relative. Adds:\nlength of weight * stored value, relative to the output. Key moves: of the "
	       "change of the weight times the\nvalue. Value moves: of the weight times the change of the "
	       "value. Row: where the kernel reads it.\n");
	print_advice(cause_of(head));
}

static json_t *head_json(const struct srv_explain_head *head, uint32_t number)
{
	return json_pack("{s:I, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:I, s:s}", "head",
		(json_int_t)number, "error", head->total, "by_keys", head->keys, "by_values", head->values,
		"by_both", head->both, "by_kernel", head->kernel, "zero_keys", head->control, "sigma",
		head->sigma, "weights_error", head->weights_error, "top_weight", head->top_weight,
		"top_token", (json_int_t)head->top_token, "cause", cause_of(head));
}

static json_t *token_json(const struct srv_explain_token *token)
{
	return json_pack("{s:I, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:b}", "token",
		(json_int_t)token->token, "score", token->score, "stored_score", token->coded_score, "weight",
		token->weight, "stored_weight", token->coded_weight, "k_error", token->k_error, "v_error",
		token->v_error, "adds", token->share, "key_moves", token->key_share, "value_moves",
		token->value_share, "is_exact", token->is_exact);
}

static void print_json(const struct job *job)
{
	json_t *heads = json_array(), *tokens = json_array(), *json;

	for (uint32_t h = 0; h < job->spec->q_heads; h++)
		json_array_append_new(heads, head_json(&job->heads[h], h));
	for (uint32_t i = 0; i < job->n_top; i++)
		json_array_append_new(tokens, token_json(&job->tokens[i]));
	json = json_pack("{s:I, s:I, s:s, s:s, s:o, s:I, s:o}", "layer",
		(json_int_t)job->capture->layers[job->layer_idx].number, "token",
		(json_int_t)job->n_tokens - 1, "k", kv_pool_spec_format_name(job->spec, false), "v",
		kv_pool_spec_format_name(job->spec, true), "heads", heads, "head", (json_int_t)job->head,
		"tokens", tokens);
	srv_ctl_print_json(json);
	json_decref(json);
}

static enum kv_status explain(struct job *job, struct kv_error *err)
{
	enum kv_status status =
		srv_explain_create(job->spec, job->n_tokens, job->k, job->v, job->q, &job->explain, err);

	if (status != KV_OK)
		return status;
	for (uint32_t h = 0; h < job->spec->q_heads; h++) {
		srv_explain_head(job->explain, h, &job->heads[h]);
		if (job->heads[h].total > job->heads[job->head].total)
			job->head = h;
	}
	if (job->ctl->values[ARG_HEAD].is_given)
		job->head = (uint32_t)job->ctl->values[ARG_HEAD].number;
	job->n_top = srv_explain_tokens(
		job->explain, job->head, job->tokens, (uint32_t)job->ctl->values[ARG_TOP].number);
	return KV_OK;
}

static enum kv_status run_attention(struct srv_ctl *ctl, struct kv_error *err)
{
	struct job *job = kv_alloc(1, sizeof(*job));
	enum kv_status status;

	if (!job)
		return kv_fail(err, KV_NO_MEMORY, "no memory for an explanation");
	job->ctl = ctl;
	status = srv_capture_open(ctl->operands[0], &job->capture, err);
	if (status == KV_OK)
		status = find_step(job, err);
	if (status == KV_OK)
		status = srv_capture_check_finite(job->capture, err);
	if (status == KV_OK)
		status = load_rows(job, err);
	if (status == KV_OK)
		status = make_spec(job, err);
	if (status == KV_OK)
		status = explain(job, err);
	if (status == KV_OK && ctl->is_json)
		print_json(job);
	else if (status == KV_OK)
		print_text(job);
	srv_explain_destroy(job->explain);
	kv_pool_spec_destroy(job->spec);
	srv_capture_destroy(job->capture);
	kv_free(job->k);
	kv_free(job->v);
	kv_free(job->q);
	kv_free(job->heads);
	kv_free(job);
	return status;
}

const struct srv_command srv_cmd_attention = {
	.name = "attention",
	.operands = "CAPTURE",
	.n_operands_min = 1,
	.n_operands_max = 1,
	.summary = "why one attention step comes out differently from compressed rows",
	.details =
		"No daemon is asked: rows are stored and read back here, with the daemon's own code. Errors "
		"come apart by\ncause: keys change the weights, values what is added up with them, the "
		"kernel "
		"how it is computed.",
	.args = args,
	.n_args = N_ARGS,
	.run = run_attention,
};
