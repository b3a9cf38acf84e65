/* What a replay found, for people and as JSON. Both are made of the same figures. */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>

#include "core/checked.h"
#include "core/pool_spec.h"
#include "server/ctl/replay.h"
#include "server/ctl/table.h"

static double seconds(uint64_t ns)
{
	return (double)ns / 1e9;
}

static double per_second(double n, uint64_t ns)
{
	return ns == 0 ? 0 : n / seconds(ns);
}

/* One K or V row of one KV head. */
static double rows_of(const struct srv_replay *replay, uint32_t n_tokens)
{
	return 2.0 * n_tokens * replay->capture->n_layers * replay->capture->kv_heads;
}

static uint32_t n_decode_tokens(const struct srv_replay *replay)
{
	return replay->capture->n_tokens - replay->n_prefill_tokens;
}

static double compression_of(const struct srv_replay_account *account)
{
	return account->stored_bytes == 0
		? 0
		: (double)account->dense_equivalent_bytes / (double)account->stored_bytes;
}

/* What is printed of a layer. */
struct layer_figures {
	double error, bound, expected, control, cosine, sigma, stored;
	double row_errors[2];
};

static struct layer_figures figures_of(const struct srv_replay_layer *layer)
{
	struct layer_figures figures = { 0 };

	for (uint32_t side = 0; side < 2; side++)
		figures.row_errors[side] =
			srv_replay_relative_error(layer->row_error_square[side], layer->row_square[side]);
	if (layer->n_outputs == 0)
		return figures;
	figures.error = srv_replay_relative_error(layer->error_square, layer->exact_square);
	figures.bound = srv_replay_output_bound(layer);
	figures.expected = srv_replay_relative_error(layer->predicted_square, layer->exact_square);
	figures.control = srv_replay_relative_error(layer->control_square, layer->exact_square);
	figures.stored = srv_replay_relative_error(layer->stored_error_square, layer->stored_square);
	figures.sigma = layer->logit_sigma / (double)layer->n_outputs;
	figures.cosine = layer->got_square > 0 && layer->exact_square > 0
		? layer->dot / sqrt(layer->got_square * layer->exact_square)
		: 0;
	return figures;
}

static void print_head(const struct srv_replay *replay)
{
	const struct srv_capture *capture = replay->capture;
	const struct kv_pool_spec *spec = replay->pool.spec;
	char k_layout[KV_ROW_LAYOUT_MAX], v_layout[KV_ROW_LAYOUT_MAX];
	const char *model = srv_safetensors_metadata(capture->file, "model");
	char model_text[64];

	snprintf(model_text, sizeof(model_text), "%s", model ? model : "(model not named)");
	kv_row_codec_layout(spec->layers[0].k, k_layout);
	kv_row_codec_layout(spec->layers[0].v, v_layout);
	printf("capture   %s: %u tokens, %u layers, %u query heads, %u KV heads, head_dim %u",
		srv_printable(model_text), capture->n_tokens, capture->n_layers, capture->q_heads,
		capture->kv_heads, capture->k_head_dim);
	if (capture->v_head_dim != capture->k_head_dim)
		printf(" (V: %u)", capture->v_head_dim);
	printf("\npool      K %s %s, V %s %s, blocks of %u tokens, %s backend\n",
		spec->layers[0].k->format->name, k_layout, spec->layers[0].v->format->name, v_layout,
		spec->block_size, replay->backend);
}

static void print_traffic(struct srv_replay *replay)
{
	const uint32_t n_decode = n_decode_tokens(replay);
	char texts[4][SRV_HUMAN_BYTES];

	printf("prefill   %u tokens in chunks of %u, layer by layer: %.3f s, %.0f tokens/s, %.0f rows/s\n",
		replay->n_prefill_tokens, replay->n_chunk_tokens, seconds(replay->prefill_ns),
		per_second(replay->n_prefill_tokens, replay->prefill_ns),
		per_second(rows_of(replay, replay->n_prefill_tokens), replay->prefill_ns));
	printf("decode    %u tokens, one request per layer: %.3f s, %.0f tokens/s, %.0f rows/s\n", n_decode,
		seconds(replay->decode_ns), per_second(n_decode, replay->decode_ns),
		per_second(rows_of(replay, n_decode), replay->decode_ns));
	if (replay->round_trips.n > 0)
		printf("          round trip p50 %s, p90 %s, p99 %s; in the daemon %s each, %s of it "
		       "attention\n",
			srv_human_ns(srv_percentile_get(&replay->round_trips, 50), texts[0]),
			srv_human_ns(srv_percentile_get(&replay->round_trips, 90), texts[1]),
			srv_human_ns(srv_percentile_get(&replay->round_trips, 99), texts[2]),
			srv_human_ns(replay->server_us * 1000 / replay->round_trips.n, texts[3]),
			srv_human_ns(replay->kernel_us * 1000 / replay->round_trips.n,
				(char[SRV_HUMAN_BYTES]){ 0 }));
	printf("payload   %.2f MB in, %.2f MB out, %.2f MB read back at %.0f MB/s\n",
		(double)replay->payload_in_bytes / 1e6, (double)replay->payload_out_bytes / 1e6,
		(double)replay->read_bytes / 1e6,
		per_second((double)replay->read_bytes / 1e6, replay->read_ns));
	printf("memory    %.1f bytes per token where bf16 takes %.1f: compression %.3f\n",
		(double)replay->during.stored_bytes / replay->capture->n_tokens,
		(double)replay->during.dense_equivalent_bytes / replay->capture->n_tokens,
		compression_of(&replay->during));
}

/* A figure of the outputs, or a dash where nothing was decoded. */
KV_PRINTF(3, 4)
static void figure_cell(struct srv_table *table, const struct srv_replay_layer *layer, const char *fmt, ...)
{
	char text[32];
	va_list args;

	va_start(args, fmt);
	vsnprintf(text, sizeof(text), fmt, args);
	va_end(args);
	srv_table_cell(table, "%s", layer->n_outputs == 0 ? "-" : text);
}

static void print_layers(const struct srv_replay *replay)
{
	static const char *const titles[] = { "layer", "rel. error", "bound", "expected", "zero keys",
		"cosine", "logit sigma", "vs. stored", "K rows", "V rows" };
	struct srv_table table;

	srv_table_init(&table, titles, KV_LENGTH(titles));
	for (uint32_t i = 0; i < replay->capture->n_layers; i++) {
		const struct srv_replay_layer *layer = &replay->layers[i];
		const struct layer_figures figures = figures_of(layer);

		srv_table_cell(&table, "%u", layer->number);
		figure_cell(&table, layer, "%.3g", figures.error);
		figure_cell(&table, layer, "%.3g", figures.bound);
		figure_cell(&table, layer, "%.3g", figures.expected);
		figure_cell(&table, layer, "%.3g", figures.control);
		figure_cell(&table, layer, "%.6f", figures.cosine);
		figure_cell(&table, layer, "%.2f", figures.sigma);
		figure_cell(&table, layer, "%.1e", figures.stored);
		srv_table_cell(&table, "%.3g", figures.row_errors[SRV_REPLAY_K]);
		srv_table_cell(&table, "%.3g", figures.row_errors[SRV_REPLAY_V]);
	}
	printf("\nattention outputs and rows, relative L2 errors per layer\n");
	srv_table_print(&table, stdout);
	printf("expected: what the formats' row errors lead to; zero keys: the error if every key were "
	       "zero;\n"
	       "vs. stored: against exact attention over the rows as they are stored; K, V rows: read back "
	       "decoded\n");
	srv_table_finish(&table);
}

static void print_blocks(const struct srv_replay *replay)
{
	static const char *const titles[] = { "<blocks", "total", "free", "reserved", "owned", "shared",
		"draining", "stored bytes" };
	const struct {
		const char *when;
		const struct srv_replay_account *account;
	} rows[] = { { "before", &replay->before }, { "during", &replay->during },
		{ "after", &replay->after } };
	struct srv_table table;

	srv_table_init(&table, titles, KV_LENGTH(titles));
	for (uint32_t i = 0; i < KV_LENGTH(rows); i++) {
		const struct srv_replay_account *account = rows[i].account;

		srv_table_cell(&table, "%s", rows[i].when);
		srv_table_cell(&table, "%llu", (unsigned long long)account->n_total);
		srv_table_cell(&table, "%llu", (unsigned long long)account->n_free);
		srv_table_cell(&table, "%llu", (unsigned long long)account->n_reserved);
		srv_table_cell(&table, "%llu", (unsigned long long)account->n_owned);
		srv_table_cell(&table, "%llu", (unsigned long long)account->n_shared);
		srv_table_cell(&table, "%llu", (unsigned long long)account->n_draining);
		srv_table_cell(&table, "%llu", (unsigned long long)account->stored_bytes);
	}
	printf("\n");
	srv_table_print(&table, stdout);
	srv_table_finish(&table);
}

static uint32_t n_failures_kept(const struct srv_replay *replay)
{
	return replay->n_failures < SRV_REPLAY_FAILURES_MAX ? replay->n_failures : SRV_REPLAY_FAILURES_MAX;
}

void srv_replay_print(struct srv_replay *replay)
{
	print_head(replay);
	print_traffic(replay);
	print_layers(replay);
	print_blocks(replay);
	printf("\n");
	for (uint32_t i = 0; i < n_failures_kept(replay); i++)
		printf("FAILED    %s\n", replay->failures[i]);
	if (replay->n_failures == 0)
		printf("ok        outputs and rows are within their bounds, packed rows equal the codec's, "
		       "accounts add up\n");
}

/* JSON has no NaN; a figure that is none is null. */
static json_t *number(double value)
{
	return isfinite(value) ? json_real(value) : json_null();
}

/* Null where nothing was decoded, too. */
static json_t *output_number(const struct srv_replay_layer *layer, double value)
{
	return layer->n_outputs == 0 ? json_null() : number(value);
}

static json_t *layer_json(const struct srv_replay_layer *layer)
{
	const struct layer_figures figures = figures_of(layer);

	return json_pack("{s:I, s:I, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:I, s:I}", "layer",
		(json_int_t)layer->number, "n_outputs", (json_int_t)layer->n_outputs, "relative_error",
		output_number(layer, figures.error), "relative_error_bound",
		output_number(layer, figures.bound), "relative_error_expected",
		output_number(layer, figures.expected), "relative_error_zero_keys",
		output_number(layer, figures.control), "cosine", output_number(layer, figures.cosine),
		"logit_sigma", output_number(layer, figures.sigma), "relative_error_to_stored",
		output_number(layer, figures.stored), "lse_error_max",
		output_number(layer, layer->lse_error_max), "k_row_error",
		number(figures.row_errors[SRV_REPLAY_K]), "v_row_error",
		number(figures.row_errors[SRV_REPLAY_V]), "n_k_rows_differ",
		(json_int_t)layer->n_packed_differ[SRV_REPLAY_K], "n_v_rows_differ",
		(json_int_t)layer->n_packed_differ[SRV_REPLAY_V]);
}

static json_t *account_json(const struct srv_replay_account *account)
{
	return json_pack("{s:{s:I, s:I, s:I, s:I, s:I, s:I}, s:I, s:I, s:I}", "blocks", "total",
		(json_int_t)account->n_total, "free", (json_int_t)account->n_free, "reserved",
		(json_int_t)account->n_reserved, "owned", (json_int_t)account->n_owned, "shared",
		(json_int_t)account->n_shared, "draining", (json_int_t)account->n_draining, "n_tokens",
		(json_int_t)account->n_tokens, "stored_bytes", (json_int_t)account->stored_bytes,
		"dense_equivalent_bytes", (json_int_t)account->dense_equivalent_bytes);
}

static json_t *traffic_json(struct srv_replay *replay)
{
	const uint32_t n_decode = n_decode_tokens(replay);

	return json_pack("{s:I, s:I, s:f, s:f, s:f, s:f, s:I, s:I, s:I, s:I, s:I, s:I}", "prefill_tokens",
		(json_int_t)replay->n_prefill_tokens, "decode_tokens", (json_int_t)n_decode, "prefill_s",
		seconds(replay->prefill_ns), "decode_s", seconds(replay->decode_ns), "prefill_rows_per_s",
		per_second(rows_of(replay, replay->n_prefill_tokens), replay->prefill_ns),
		"decode_rows_per_s", per_second(rows_of(replay, n_decode), replay->decode_ns),
		"payload_in_bytes", (json_int_t)replay->payload_in_bytes, "payload_out_bytes",
		(json_int_t)replay->payload_out_bytes, "read_bytes", (json_int_t)replay->read_bytes,
		"round_trip_p50_ns", (json_int_t)srv_percentile_get(&replay->round_trips, 50),
		"round_trip_p90_ns", (json_int_t)srv_percentile_get(&replay->round_trips, 90),
		"round_trip_p99_ns", (json_int_t)srv_percentile_get(&replay->round_trips, 99));
}

void srv_replay_print_json(struct srv_replay *replay)
{
	const struct srv_capture *capture = replay->capture;
	const struct kv_pool_spec *spec = replay->pool.spec;
	const char *model = srv_safetensors_metadata(capture->file, "model");
	json_t *layers = json_array(), *failures = json_array();
	json_t *report;

	for (uint32_t i = 0; i < capture->n_layers; i++)
		json_array_append_new(layers, layer_json(&replay->layers[i]));
	for (uint32_t i = 0; i < n_failures_kept(replay); i++)
		json_array_append_new(failures, json_string(replay->failures[i]));
	report = json_pack(
		"{s:b, s:I, s:o, s:s?, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:s, s:s, s:I, s:f, s:f, s:o, s:o,"
		" s:{s:o, s:o, s:o}}",
		"ok", replay->n_failures == 0, "n_failures", (json_int_t)replay->n_failures, "failures",
		failures, "model", model, "backend", replay->backend, "tokens", (json_int_t)capture->n_tokens,
		"layers", (json_int_t)capture->n_layers, "q_heads", (json_int_t)capture->q_heads, "kv_heads",
		(json_int_t)capture->kv_heads, "k_head_dim", (json_int_t)capture->k_head_dim, "v_head_dim",
		(json_int_t)capture->v_head_dim, "k", spec->layers[0].k->format->name, "v",
		spec->layers[0].v->format->name, "block_size", (json_int_t)spec->block_size,
		"bytes_per_token", (double)replay->during.stored_bytes / capture->n_tokens, "compression",
		compression_of(&replay->during), "traffic", traffic_json(replay), "attention", layers,
		"occupancy", "before", account_json(&replay->before), "during", account_json(&replay->during),
		"after", account_json(&replay->after));
	srv_ctl_print_json(report);
	json_decref(report);
}
