#include <math.h>
#include <stdio.h>

#include "core/checked.h"
#include "core/memory.h"
#include "server/ctl/capture.h"
#include "server/ctl/ctl.h"
#include "server/ctl/table.h"

/* Lengths of the rows (one token, one head) of one tensor. */
struct norms {
	double min, mean, max;
};

static enum kv_status measure_norms(const struct srv_capture *capture, uint32_t layer_idx,
	enum srv_capture_kind kind, struct norms *norms, struct kv_error *err)
{
	const uint32_t head_dim = (uint32_t)capture->layers[layer_idx].rows[kind]->shape[2];
	const uint32_t token_values = srv_capture_token_values(capture, kind);
	float *values = kv_alloc(token_values, sizeof(*values));
	double sum = 0;

	if (!values)
		return kv_fail(err, KV_NO_MEMORY, "no memory for one token's rows");
	*norms = (struct norms){ .min = INFINITY };
	for (uint32_t t = 0; t < capture->n_tokens; t++) {
		srv_capture_load(capture, layer_idx, kind, t, 1, values);
		for (uint32_t i = 0; i < token_values; i += head_dim) {
			double square = 0;

			for (uint32_t c = 0; c < head_dim; c++)
				square += (double)values[i + c] * (double)values[i + c];
			sum += sqrt(square);
			norms->min = fmin(norms->min, sqrt(square));
			norms->max = fmax(norms->max, sqrt(square));
		}
	}
	norms->mean = sum / capture->n_tokens / (token_values / head_dim);
	kv_free(values);
	return KV_OK;
}

static enum kv_status print_layers(const struct srv_capture *capture, struct kv_error *err)
{
	static const char *const titles[] = { "layer", "|k| min", "mean", "max", "|v| min", "mean", "max",
		"|q| min", "mean", "max" };
	enum kv_status status = KV_OK;
	struct srv_table table;

	srv_table_init(&table, titles, KV_LENGTH(titles));
	for (uint32_t i = 0; i < capture->n_layers; i++) {
		srv_table_cell(&table, "%u", capture->layers[i].number);
		for (uint32_t kind = 0; status == KV_OK && kind < SRV_CAPTURE_N_KINDS; kind++) {
			struct norms norms;

			status = measure_norms(capture, i, (enum srv_capture_kind)kind, &norms, err);
			if (status != KV_OK)
				break;
			srv_table_cell(&table, "%.3f", norms.min);
			srv_table_cell(&table, "%.3f", norms.mean);
			srv_table_cell(&table, "%.3f", norms.max);
		}
	}
	if (status == KV_OK) {
		printf("\nlengths of rows (one token, one head) per layer\n");
		srv_table_print(&table, stdout);
	}
	srv_table_finish(&table);
	return status;
}

static void print_tensors(const struct srv_safetensors *file)
{
	static const char *const titles[] = { "<tensor", "<dtype", "<shape", "offset", "size" };
	struct srv_table table;

	srv_table_init(&table, titles, KV_LENGTH(titles));
	for (uint32_t i = 0; i < file->n_tensors; i++) {
		char shape[SRV_TENSOR_SHAPE_TEXT_BYTES], bytes[SRV_HUMAN_BYTES];

		srv_tensor_shape_text(&file->tensors[i], shape);
		srv_table_cell(&table, "%s", file->tensors[i].name);
		srv_table_cell(&table, "%s", file->tensors[i].dtype_name);
		srv_table_cell(&table, "%s", shape);
		srv_table_cell(&table, "%llu", (unsigned long long)file->tensors[i].data_offset);
		srv_table_cell(&table, "%s", srv_human_bytes(file->tensors[i].data_bytes, bytes));
	}
	srv_table_print(&table, stdout);
	srv_table_finish(&table);
}

static void print_metadata(const struct srv_safetensors *file)
{
	static const char *const titles[] = { "<metadata", "<value" };
	struct srv_table table;
	const char *key;
	json_t *value;

	if (json_object_size(file->metadata) == 0)
		return;
	srv_table_init(&table, titles, KV_LENGTH(titles));
	json_object_foreach (file->metadata, key, value) {
		srv_table_cell(&table, "%s", key);
		srv_table_cell(&table, "%s", json_string_value(value));
	}
	srv_table_print(&table, stdout);
	srv_table_finish(&table);
	printf("\n");
}

static enum kv_status print_capture(const struct srv_capture *capture, struct kv_error *err)
{
	char bytes[SRV_HUMAN_BYTES];

	print_metadata(capture->file);
	print_tensors(capture->file);
	printf("\n%s: %u tokens, %u layers, %u query heads, %u KV heads, head_dim %u (K) and %u (V)\n",
		srv_human_bytes(capture->file->file_bytes, bytes), capture->n_tokens, capture->n_layers,
		capture->q_heads, capture->kv_heads, capture->k_head_dim, capture->v_head_dim);
	return print_layers(capture, err);
}

static json_t *tensor_json(const struct srv_tensor *tensor)
{
	json_t *shape = json_array();

	for (uint32_t i = 0; i < tensor->n_dims; i++)
		json_array_append_new(shape, json_integer((json_int_t)tensor->shape[i]));
	return json_pack("{s:s, s:s, s:o, s:I, s:I}", "name", tensor->name, "dtype", tensor->dtype_name,
		"shape", shape, "offset", (json_int_t)tensor->data_offset, "bytes",
		(json_int_t)tensor->data_bytes);
}

static enum kv_status layer_json(
	const struct srv_capture *capture, uint32_t layer_idx, json_t **out, struct kv_error *err)
{
	json_t *json = json_pack("{s:I}", "layer", (json_int_t)capture->layers[layer_idx].number);

	for (uint32_t kind = 0; kind < SRV_CAPTURE_N_KINDS; kind++) {
		const char key[] = { srv_capture_kind_letter((enum srv_capture_kind)kind), '\0' };
		struct norms norms;
		const enum kv_status status =
			measure_norms(capture, layer_idx, (enum srv_capture_kind)kind, &norms, err);

		if (status != KV_OK) {
			json_decref(json);
			return status;
		}
		json_object_set_new(json, key,
			json_pack("{s:f, s:f, s:f}", "norm_min", norms.min, "norm_mean", norms.mean,
				"norm_max", norms.max));
	}
	*out = json;
	return KV_OK;
}

static enum kv_status print_capture_json(const struct srv_capture *capture, struct kv_error *err)
{
	json_t *tensors = json_array(), *layers = json_array(), *json;
	enum kv_status status = KV_OK;

	for (uint32_t i = 0; i < capture->file->n_tensors; i++)
		json_array_append_new(tensors, tensor_json(&capture->file->tensors[i]));
	for (uint32_t i = 0; status == KV_OK && i < capture->n_layers; i++) {
		json_t *layer = NULL;

		status = layer_json(capture, i, &layer, err);
		json_array_append_new(layers, layer);
	}
	json = json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:O?, s:o, s:o}", "file_bytes",
		(json_int_t)capture->file->file_bytes, "tokens", (json_int_t)capture->n_tokens, "q_heads",
		(json_int_t)capture->q_heads, "kv_heads", (json_int_t)capture->kv_heads, "k_head_dim",
		(json_int_t)capture->k_head_dim, "v_head_dim", (json_int_t)capture->v_head_dim, "metadata",
		capture->file->metadata, "tensors", tensors, "layers", layers);
	if (status == KV_OK)
		srv_ctl_print_json(json);
	json_decref(json);
	return status;
}

static enum kv_status run_inspect(struct srv_ctl *ctl, struct kv_error *err)
{
	struct srv_capture *capture;
	enum kv_status status = srv_capture_open(ctl->operands[0], &capture, err);

	if (status != KV_OK)
		return status;
	status = srv_capture_check_finite(capture, err);
	if (status == KV_OK)
		status = ctl->is_json ? print_capture_json(capture, err) : print_capture(capture, err);
	srv_capture_destroy(capture);
	return status;
}

const struct srv_command srv_cmd_capture_inspect = {
	.name = "capture inspect",
	.operands = "FILE",
	.n_operands_min = 1,
	.n_operands_max = 1,
	.summary = "check a capture and show its metadata, tensors and row lengths",
	.run = run_inspect,
};
