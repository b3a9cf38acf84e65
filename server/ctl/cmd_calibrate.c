/*
 * calibrate: what a pool can be told about a model's rows before it sees them, measured on a capture.
 *
 * The output is one JSON object that the pool members k_center_file and recipe_file both read:
 *
 *	version    1
 *	k_center   [layers][kv_heads][k_head_dim] numbers: the mean of the K rows, 9 digits, so that they are
 *	           the same float32 again
 *	recipe, head_size, layers   with --recipe: the published schema of turboquant_kv.json; per layer and
 *KV head the channels with the largest sums of squares, ascending
 *
 * Layers are those of the capture, counted from 0, as in a pool that replays it.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/checked.h"
#include "core/k_center.h"
#include "core/memory.h"
#include "core/recipe.h"
#include "core/recipe_file.h"
#include "server/ctl/capture.h"
#include "server/ctl/ctl.h"
#include "server/ctl/progress.h"
#include "server/ctl/row_file.h"
#include "server/ctl/table.h"

enum { ARG_OUT, ARG_RECIPE, ARG_CENTER, N_ARGS };

static const struct srv_arg args[N_ARGS] = {
	[ARG_OUT] = { .name = "out",
		.kind = SRV_ARG_TEXT,
		.placeholder = "FILE",
		.help = "where the JSON goes" },
	[ARG_RECIPE] = { .name = "recipe",
		.kind = SRV_ARG_TEXT,
		.placeholder = "NAME",
		.help = "turboquant25 or turboquant35: pick its channels, too" },
	[ARG_CENTER] = { .name = "center",
		.kind = SRV_ARG_FLAG,
		.help = "pick channels of K for rows without their mean: for pools with both" },
};

/* Numbers of one token that are looked at together. */
#define CHUNK_TOKENS 64u

struct job {
	const struct srv_ctl *ctl;
	const struct srv_capture *capture;
	const struct kv_format *format; /* a recipe; NULL: none */
	struct kv_recipe_file *recipe;
	uint32_t n_row_values;  /* the larger token of K and V */
	float *rows;            /* [CHUNK_TOKENS, n_row_values] */
	double *sums, *squares; /* [n_row_values] */
	float *centers;         /* [n_layers, kv_heads, k_head_dim] */
	double *shares;         /* [n_layers]: energy of the mean over all energy of K */
	struct srv_progress progress;
	uint64_t n_done_layers;
};

/* Sums of one layer's rows, and of their squares without `center` (NULL: as they are), in order of tokens. */
static void sum_layer(struct job *job, uint32_t layer_idx, enum srv_capture_kind kind, const float *center)
{
	const struct srv_capture *capture = job->capture;
	const uint32_t n_values = srv_capture_token_values(capture, kind);

	memset(job->sums, 0, n_values * sizeof(*job->sums));
	memset(job->squares, 0, n_values * sizeof(*job->squares));
	for (uint32_t first = 0; first < capture->n_tokens; first += CHUNK_TOKENS) {
		const uint32_t n_left = capture->n_tokens - first;
		const uint32_t n_tokens = n_left < CHUNK_TOKENS ? n_left : CHUNK_TOKENS;

		srv_capture_load(capture, layer_idx, kind, first, n_tokens, job->rows);
		for (uint32_t t = 0; t < n_tokens; t++) {
			const float *token = job->rows + (size_t)t * n_values;

			/* All heads at once: each number has a sum of its own. */
			kv_k_center_take(job->sums, token, n_values);
			for (uint32_t i = 0; i < n_values; i++) {
				const float value = center ? token[i] - center[i] : token[i];

				job->squares[i] += (double)value * (double)value;
			}
		}
	}
}

static void pick(struct job *job, uint32_t layer_idx, bool is_v)
{
	const uint32_t head_dim = job->recipe->head_dim;

	for (uint32_t head = 0; head < job->capture->kv_heads; head++)
		kv_recipe_pick_channels(job->squares + (size_t)head * head_dim, head_dim, job->recipe->n_high,
			kv_recipe_file_channels(job->recipe, layer_idx, is_v, head));
}

static void measure_layer(struct job *job, uint32_t layer_idx)
{
	const struct srv_capture *capture = job->capture;
	const uint32_t n_values = srv_capture_token_values(capture, SRV_CAPTURE_K);
	float *center = job->centers + (size_t)layer_idx * n_values;
	double mean_energy = 0, energy = 0;

	sum_layer(job, layer_idx, SRV_CAPTURE_K, NULL);
	kv_k_center_finish(job->sums, capture->n_tokens, n_values, center);
	for (uint32_t i = 0; i < n_values; i++) {
		mean_energy += (double)center[i] * (double)center[i] * capture->n_tokens;
		energy += job->squares[i];
	}
	job->shares[layer_idx] = energy > 0 ? mean_energy / energy : 0;
	if (!job->recipe)
		return;
	if (job->ctl->values[ARG_CENTER].is_given)
		sum_layer(job, layer_idx, SRV_CAPTURE_K, center);
	pick(job, layer_idx, false);
	sum_layer(job, layer_idx, SRV_CAPTURE_V, NULL);
	pick(job, layer_idx, true);
}

/* ---- output ---- */

static json_t *centers_json(const struct job *job)
{
	const struct srv_capture *capture = job->capture;
	const float *center = job->centers;
	json_t *layers = json_array();

	for (uint32_t l = 0; l < capture->n_layers; l++) {
		json_t *heads = json_array();

		for (uint32_t h = 0; h < capture->kv_heads; h++) {
			json_t *numbers = json_array();

			for (uint32_t i = 0; i < capture->k_head_dim; i++)
				json_array_append_new(numbers, json_real((double)*center++));
			json_array_append_new(heads, numbers);
		}
		json_array_append_new(layers, heads);
	}
	return layers;
}

/* What core prints for a recipe's file, as JSON to which more is added; {"version": 1} without a recipe. */
static json_t *recipe_json(const struct job *job)
{
	char *text = NULL;
	size_t n_bytes = 0;
	FILE *memory;
	json_t *json = NULL;

	if (!job->recipe)
		return json_pack("{s:i}", "version", 1);
	memory = open_memstream(&text, &n_bytes);
	if (!memory)
		return NULL;

	const bool is_printed = kv_recipe_file_print(job->recipe, memory);

	if (fclose(memory) == 0 && is_printed)
		json = json_loadb(text, n_bytes, 0, NULL);
	free(text);
	return json;
}

static enum kv_status write_json(const struct job *job, const char *path, struct kv_error *err)
{
	const char *const inputs[] = { job->ctl->operands[0] };
	struct srv_out_file out = { 0 };
	json_t *json = recipe_json(job);
	char *text = NULL;
	enum kv_status status = KV_OK;

	if (json && json_object_set_new(json, "k_center", centers_json(job)) == 0)
		text = json_dumps(json, JSON_COMPACT | JSON_REAL_PRECISION(9));
	json_decref(json);
	if (!text)
		return kv_fail(err, KV_NO_MEMORY, "no memory for the output");
	status = srv_out_file_open(&out, path, inputs, KV_LENGTH(inputs), err);
	if (status == KV_OK)
		status = srv_out_file_write(&out, text, strlen(text), err);
	if (status == KV_OK)
		status = srv_out_file_write(&out, "\n", 1, err);
	free(text);
	return srv_out_file_close(&out, status, err);
}

static void print_shares(const struct job *job)
{
	static const char *const titles[] = { "layer", "of the model", "energy of the mean of K" };
	struct srv_table table;

	srv_table_init(&table, titles, KV_LENGTH(titles));
	for (uint32_t l = 0; l < job->capture->n_layers; l++) {
		srv_table_cell(&table, "%u", l);
		srv_table_cell(&table, "%u", job->capture->layers[l].number);
		srv_table_cell(&table, "%.1f %%", 100 * job->shares[l]);
	}
	srv_table_print(&table, stdout);
	srv_table_finish(&table);
}

static void print_json(const struct job *job)
{
	json_t *layers = json_array();

	for (uint32_t l = 0; l < job->capture->n_layers; l++)
		json_array_append_new(layers,
			json_pack("{s:I, s:I, s:f}", "layer", (json_int_t)l, "number",
				(json_int_t)job->capture->layers[l].number, "mean_share", job->shares[l]));

	json_t *json =
		json_pack("{s:I, s:o}", "tokens", (json_int_t)job->capture->n_tokens, "layers", layers);

	srv_ctl_print_json(json);
	json_decref(json);
}

/* ---- the command ---- */

static enum kv_status read_recipe(struct job *job, struct kv_error *err)
{
	const struct srv_capture *capture = job->capture;
	const char *name = job->ctl->values[ARG_RECIPE].text;

	if (!name)
		return KV_OK;
	if (kv_format_parse(name, &job->format, NULL) != KV_OK || !job->format->recipe)
		return kv_fail(
			err, SRV_CTL_USAGE, "--recipe: '%.40s' is not turboquant25 or turboquant35", name);
	if (capture->k_head_dim != capture->v_head_dim)
		return kv_fail(err, KV_UNSUPPORTED,
			"--recipe: a recipe's file has one head_size, the capture %u (K) and %u (V)",
			capture->k_head_dim, capture->v_head_dim);
	return kv_recipe_file_create(
		job->format, capture->k_head_dim, capture->kv_heads, capture->n_layers, &job->recipe, err);
}

static enum kv_status allocate(struct job *job, struct kv_error *err)
{
	const struct srv_capture *capture = job->capture;
	const uint32_t k_values = srv_capture_token_values(capture, SRV_CAPTURE_K);
	const uint32_t v_values = srv_capture_token_values(capture, SRV_CAPTURE_V);

	job->n_row_values = k_values > v_values ? k_values : v_values;
	job->rows = kv_alloc((size_t)CHUNK_TOKENS * job->n_row_values, sizeof(*job->rows));
	job->sums = kv_alloc(job->n_row_values, sizeof(*job->sums));
	job->squares = kv_alloc(job->n_row_values, sizeof(*job->squares));
	job->centers = kv_alloc((size_t)capture->n_layers * k_values, sizeof(*job->centers));
	job->shares = kv_alloc(capture->n_layers, sizeof(*job->shares));
	if (!job->rows || !job->sums || !job->squares || !job->centers || !job->shares)
		return kv_fail(err, KV_NO_MEMORY, "no memory for sums");
	return KV_OK;
}

static enum kv_status measure(struct job *job, struct kv_error *err)
{
	enum kv_status status = KV_OK;

	srv_progress_init(
		&job->progress, stderr, kv_clock_system(), "measure", "layers", job->capture->n_layers);
	for (uint32_t l = 0; status == KV_OK && l < job->capture->n_layers; l++) {
		measure_layer(job, l);
		srv_progress_set(&job->progress, l + 1ull);
		if (srv_interrupt_seen())
			status = kv_fail(err, KV_CANCELLED, "interrupted after %u layers", l + 1);
	}
	srv_progress_finish(&job->progress);
	return status;
}

static enum kv_status run_job(struct job *job, struct kv_error *err)
{
	const struct srv_ctl *ctl = job->ctl;
	enum kv_status status = srv_capture_check_finite(job->capture, err);

	if (status == KV_OK)
		status = read_recipe(job, err);
	if (status == KV_OK)
		status = allocate(job, err);
	if (status == KV_OK)
		status = measure(job, err);
	if (status == KV_OK)
		status = write_json(job, ctl->values[ARG_OUT].text, err);
	if (status == KV_OK && ctl->is_json)
		print_json(job);
	else if (status == KV_OK)
		print_shares(job);
	return status;
}

static enum kv_status run_calibrate(struct srv_ctl *ctl, struct kv_error *err)
{
	struct job job = { .ctl = ctl };
	struct srv_capture *capture = NULL;
	enum kv_status status;

	if (!ctl->values[ARG_OUT].text)
		return kv_fail(err, SRV_CTL_USAGE, "--out is missing");
	srv_interrupt_catch();
	status = srv_capture_open(ctl->operands[0], &capture, err);
	if (status != KV_OK)
		return status;
	job.capture = capture;
	status = run_job(&job, err);
	kv_recipe_file_destroy(job.recipe);
	kv_free(job.rows);
	kv_free(job.sums);
	kv_free(job.squares);
	kv_free(job.centers);
	kv_free(job.shares);
	srv_capture_destroy(capture);
	return status;
}

const struct srv_command srv_cmd_calibrate = {
	.name = "calibrate",
	.operands = "CAPTURE",
	.n_operands_min = 1,
	.n_operands_max = 1,
	.summary = "measure k_center, and the channels of a recipe, on a capture",
	.details = "Writes one JSON object, which the pool members k_center_file and recipe_file both read. "
		   "Layers "
		   "are those of\n"
		   "the capture, counted from 0. A mean that holds most of the energy of K is worth a "
		   "k_center: its "
		   "keys lose\n"
		   "what tells them apart at few bits otherwise.",
	.args = args,
	.n_args = N_ARGS,
	.run = run_calibrate,
};
