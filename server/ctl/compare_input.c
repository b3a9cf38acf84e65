#include "server/ctl/compare_input.h"

#include "core/memory.h"
#include "core/number.h"
#include "server/ctl/capture.h"
#include "server/ctl/ctl.h"
#include "server/ctl/row_file.h"

/* Rows of numbers, the first n_rows_max of the file; NaN and infinities are refused. */
static enum kv_status load_bare(const char *path, uint32_t head_dim, uint32_t n_rows_max, float **out,
	uint32_t *n_rows, struct kv_error *err)
{
	struct srv_row_reader reader;
	uint32_t n = 0, n_got = 1;
	enum kv_status status = srv_row_reader_open(&reader, path, head_dim * (uint32_t)sizeof(float), err);
	float *rows;

	if (status != KV_OK)
		return status;
	rows = kv_alloc((size_t)n_rows_max * head_dim, sizeof(*rows));
	if (!rows)
		status = kv_fail(err, KV_NO_MEMORY, "%s: no memory for %u rows", path, n_rows_max);
	while (status == KV_OK && n < n_rows_max && n_got > 0) {
		status = srv_row_reader_next(
			&reader, (uint8_t *)(rows + (size_t)n * head_dim), n_rows_max - n, &n_got, err);
		n += status == KV_OK ? n_got : 0;
	}
	for (size_t i = 0; status == KV_OK && i < (size_t)n * head_dim; i++)
		if (!kv_f32_is_finite(rows[i]))
			status = kv_fail(err, KV_BAD_VALUE, "%s: row %zu: channel %zu (offset %zu) is %g",
				path, i / head_dim, i % head_dim, 4 * i, (double)rows[i]);
	if (status == KV_OK && n == 0)
		status = kv_fail(err, KV_CORRUPT, "%s: the file has no rows", path);
	srv_row_reader_close(&reader);
	if (status != KV_OK) {
		kv_free(rows);
		return status;
	}
	*out = rows;
	*n_rows = n;
	return KV_OK;
}

static enum kv_status load_bare_files(
	const struct srv_compare_ask *ask, struct srv_compare_input *input, struct kv_error *err)
{
	if (ask->has_layer || ask->has_head)
		return kv_fail(err, SRV_CTL_USAGE, "%s: --layer and --head are of captures; this is none",
			ask->path);
	if (ask->head_dim == 0)
		return kv_fail(err, SRV_CTL_USAGE,
			"--head-dim is missing: %s is no capture, which would say it", ask->path);
	input->head_dim = ask->head_dim;
	return load_bare(ask->path, ask->head_dim, ask->n_rows_max, &input->rows, &input->n_rows, err);
}

static enum kv_status find_layer(const struct srv_compare_ask *ask, const struct srv_capture *capture,
	uint32_t *layer_idx, struct kv_error *err)
{
	const uint32_t last = capture->layers[capture->n_layers - 1].number;

	if (!ask->has_layer)
		return kv_fail(err, SRV_CTL_USAGE, "%s: a capture of %u layers, %u to %u: --layer says which",
			ask->path, capture->n_layers, capture->layers[0].number, last);
	for (*layer_idx = 0; *layer_idx < capture->n_layers; (*layer_idx)++)
		if (capture->layers[*layer_idx].number == ask->layer)
			return KV_OK;
	return kv_fail(err, SRV_CTL_USAGE,
		"--layer: the capture has no layer %llu; %u are captured, %u to %u",
		(unsigned long long)ask->layer, capture->n_layers, capture->layers[0].number, last);
}

/* One head of some tokens: every token's rows are loaded, one by one, and one is kept. */
static enum kv_status take_head(const struct srv_capture *capture, uint32_t layer_idx,
	enum srv_capture_kind kind, uint32_t token, uint32_t head, uint32_t head_dim, float *scratch,
	float *out, struct kv_error *err)
{
	srv_capture_load(capture, layer_idx, kind, token, 1, scratch);
	for (uint32_t i = 0; i < head_dim; i++) {
		out[i] = scratch[(size_t)head * head_dim + i];
		if (!kv_f32_is_finite(out[i]))
			return kv_fail(err, KV_BAD_VALUE,
				"tensor '%c.%u': token %u, head %u, channel %u is %g",
				srv_capture_kind_letter(kind), capture->layers[layer_idx].number, token, head,
				i, (double)out[i]);
	}
	return KV_OK;
}

/* Queries of all tokens, evenly, and of the heads that read this KV head in turn. */
static enum kv_status load_captured(const struct srv_compare_ask *ask, const struct srv_capture *capture,
	uint32_t layer_idx, struct srv_compare_input *input, struct kv_error *err)
{
	const enum srv_capture_kind kind = ask->is_v ? SRV_CAPTURE_V : SRV_CAPTURE_K;
	const uint32_t d = ask->is_v ? capture->v_head_dim : capture->k_head_dim;
	const uint32_t n_group = capture->q_heads / capture->kv_heads;
	const uint32_t n_rows = capture->n_tokens < ask->n_rows_max ? capture->n_tokens : ask->n_rows_max;
	const uint32_t n_queries = ask->is_v || ask->queries_path ? 0
		: n_rows < ask->n_queries_max                     ? n_rows
								  : ask->n_queries_max;
	const uint32_t k_values = srv_capture_token_values(capture, kind);
	const uint32_t q_values = srv_capture_token_values(capture, SRV_CAPTURE_Q);
	float *scratch = kv_alloc(k_values > q_values ? k_values : q_values, sizeof(*scratch));
	enum kv_status status = KV_OK;

	input->rows = kv_alloc((size_t)n_rows * d, sizeof(*input->rows));
	input->queries = n_queries > 0 ? kv_alloc((size_t)n_queries * d, sizeof(*input->queries)) : NULL;
	if (!scratch || !input->rows || (n_queries > 0 && !input->queries))
		status = kv_fail(err, KV_NO_MEMORY, "no memory for %u rows", n_rows);
	for (uint32_t i = 0; status == KV_OK && i < n_rows; i++)
		status = take_head(capture, layer_idx, kind, i, (uint32_t)ask->head, d, scratch,
			input->rows + (size_t)i * d, err);
	for (uint32_t i = 0; status == KV_OK && i < n_queries; i++)
		status = take_head(capture, layer_idx, SRV_CAPTURE_Q,
			(uint32_t)((uint64_t)(i + 1) * n_rows / n_queries) - 1,
			(uint32_t)ask->head * n_group + i % n_group, d, scratch,
			input->queries + (size_t)i * d, err);
	kv_free(scratch);
	if (status != KV_OK) {
		kv_error_wrap(err, "%s", ask->path);
		return status;
	}
	input->head_dim = d;
	input->n_rows = n_rows;
	input->n_queries = n_queries;
	return KV_OK;
}

static enum kv_status load_capture(
	const struct srv_compare_ask *ask, struct srv_compare_input *input, struct kv_error *err)
{
	struct srv_capture *capture = NULL;
	uint32_t layer_idx = 0;
	enum kv_status status = srv_capture_open(ask->path, &capture, err);

	if (status != KV_OK)
		return status;
	const uint32_t d = ask->is_v ? capture->v_head_dim : capture->k_head_dim;

	input->is_capture = true;
	status = find_layer(ask, capture, &layer_idx, err);
	if (status == KV_OK && ask->head >= capture->kv_heads)
		status = kv_fail(err, SRV_CTL_USAGE, "--head: the capture has %u KV heads, from 0 on",
			capture->kv_heads);
	if (status == KV_OK && ask->head_dim != 0 && ask->head_dim != d)
		status = kv_fail(err, SRV_CTL_USAGE,
			"--head-dim: these rows of the capture have %u numbers, not %u", d, ask->head_dim);
	if (status == KV_OK)
		status = load_captured(ask, capture, layer_idx, input, err);
	srv_capture_destroy(capture);
	return status;
}

enum kv_status srv_compare_input_load(
	const struct srv_compare_ask *ask, struct srv_compare_input *out, struct kv_error *err)
{
	struct srv_compare_input input = { 0 };
	enum kv_status status = srv_row_file_is_safetensors(ask->path) ? load_capture(ask, &input, err)
								       : load_bare_files(ask, &input, err);

	if (status == KV_OK && ask->queries_path)
		status = load_bare(ask->queries_path, input.head_dim, ask->n_queries_max, &input.queries,
			&input.n_queries, err);
	if (status != KV_OK) {
		srv_compare_input_finish(&input);
		return status;
	}
	*out = input;
	return KV_OK;
}

void srv_compare_input_finish(struct srv_compare_input *input)
{
	kv_free(input->rows);
	kv_free(input->queries);
	*input = (struct srv_compare_input){ 0 };
}
