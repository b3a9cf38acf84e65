/* presets: names for pairs of formats, and what a token takes with each. No daemon is asked. */
#include <stdio.h>

#include "core/checked.h"
#include "core/format.h"
#include "core/pool_spec.h"
#include "core/preset.h"
#include "server/ctl/ctl.h"
#include "server/ctl/table.h"

enum { ARG_LAYERS, ARG_KV_HEADS, ARG_HEAD_DIM, ARG_V_HEAD_DIM, ARG_EXACT_LAYERS, N_ARGS };

static const struct srv_arg args[N_ARGS] = {
	[ARG_LAYERS] = { .name = "layers",
		.kind = SRV_ARG_NUMBER,
		.placeholder = "N",
		.number = 32,
		.min = 1,
		.max = KV_LAYERS_MAX,
		.help = "layers of the model" },
	SRV_ARG_KV_HEADS(ARG_KV_HEADS),
	SRV_ARG_HEAD_DIM(ARG_HEAD_DIM),
	[ARG_V_HEAD_DIM] = { .name = "v-head-dim",
		.kind = SRV_ARG_NUMBER,
		.placeholder = "D",
		.min = KV_HEAD_DIM_MIN,
		.max = KV_HEAD_DIM_MAX,
		.help = "of a V row [as --head-dim]" },
	[ARG_EXACT_LAYERS] = { .name = "exact-layers",
		.kind = SRV_ARG_NUMBER,
		.placeholder = "N",
		.max = KV_LAYERS_MAX,
		.help = "the first and the last N layers stay " KV_PRESET_EXACT " [0]" },
};

struct geometry {
	uint32_t n_layers, n_exact_layers, kv_heads, dims[2]; /* K, V */
};

static enum kv_status read_geometry(
	const struct srv_ctl *ctl, struct geometry *geometry, struct kv_error *err)
{
	const uint64_t n_exact = 2 * ctl->values[ARG_EXACT_LAYERS].number;

	geometry->n_layers = (uint32_t)ctl->values[ARG_LAYERS].number;
	geometry->n_exact_layers = n_exact < geometry->n_layers ? (uint32_t)n_exact : geometry->n_layers;
	geometry->kv_heads = (uint32_t)ctl->values[ARG_KV_HEADS].number;
	geometry->dims[0] = (uint32_t)ctl->values[ARG_HEAD_DIM].number;
	geometry->dims[1] = ctl->values[ARG_V_HEAD_DIM].is_given
		? (uint32_t)ctl->values[ARG_V_HEAD_DIM].number
		: geometry->dims[0];
	for (uint32_t i = 0; i < 2; i++)
		if (geometry->dims[i] % KV_HEAD_DIM_STEP != 0)
			return kv_fail(err, SRV_CTL_USAGE, "--%s: %u is not a multiple of %u",
				i == 0 || !ctl->values[ARG_V_HEAD_DIM].is_given ? "head-dim" : "v-head-dim",
				geometry->dims[i], KV_HEAD_DIM_STEP);
	return KV_OK;
}

static enum kv_status row_bytes_of(
	const char *name, uint32_t head_dim, uint32_t *row_bytes, struct kv_error *err)
{
	const struct kv_format *format;
	struct kv_rotation *rotation = NULL;
	struct kv_row_codec *codec = NULL;
	enum kv_status status = kv_format_parse(name, &format, err);

	if (status == KV_OK && kv_format_is_rotated(format)) /* the cheap one: bytes do not depend on it */
		status = kv_rotation_create(
			KV_ROTATION_BLOCK, head_dim, KV_ROTATION_SEED_BASE, &rotation, err);
	if (status == KV_OK)
		status = kv_row_codec_create(format, head_dim, rotation, &codec, err);
	if (status == KV_OK)
		*row_bytes = codec->row_bytes;
	kv_row_codec_destroy(codec);
	kv_rotation_destroy(rotation);
	return status;
}

/* One line: what a preset, or exact rows, take. */
struct line {
	const char *name, *k, *v;
	uint32_t k_row_bytes, v_row_bytes;
	uint64_t token_bytes, exact_token_bytes;
};

static enum kv_status fill_line(const struct geometry *geometry, const char *name, const char *k,
	const char *v, struct line *line, struct kv_error *err)
{
	const uint32_t exact_bytes =
		kv_row_dense_bytes(geometry->dims[0]) + kv_row_dense_bytes(geometry->dims[1]);
	const uint32_t n_coded = geometry->n_layers - geometry->n_exact_layers;
	enum kv_status status;

	*line = (struct line){ .name = name, .k = k, .v = v };
	status = row_bytes_of(k, geometry->dims[0], &line->k_row_bytes, err);
	if (status == KV_OK)
		status = row_bytes_of(v, geometry->dims[1], &line->v_row_bytes, err);
	line->token_bytes = (uint64_t)geometry->kv_heads *
		((uint64_t)n_coded * (line->k_row_bytes + line->v_row_bytes) +
			(uint64_t)geometry->n_exact_layers * exact_bytes);
	line->exact_token_bytes = (uint64_t)geometry->kv_heads * geometry->n_layers * exact_bytes;
	return status;
}

static void add_line(struct srv_table *table, const struct line *line)
{
	srv_table_cell(table, "%s", line->name);
	srv_table_cell(table, "%s", line->k);
	srv_table_cell(table, "%s", line->v);
	srv_table_cell(table, "%u", line->k_row_bytes);
	srv_table_cell(table, "%u", line->v_row_bytes);
	srv_table_cell(table, "%llu", (unsigned long long)line->token_bytes);
	srv_table_cell(table, "%.3f", (double)line->exact_token_bytes / (double)line->token_bytes);
}

static json_t *line_json(const struct line *line)
{
	return json_pack("{s:s, s:s, s:s, s:I, s:I, s:I, s:f}", "name", line->name, "k", line->k, "v",
		line->v, "k_row_bytes", (json_int_t)line->k_row_bytes, "v_row_bytes",
		(json_int_t)line->v_row_bytes, "token_bytes", (json_int_t)line->token_bytes, "compression",
		(double)line->exact_token_bytes / (double)line->token_bytes);
}

static enum kv_status run_presets(struct srv_ctl *ctl, struct kv_error *err)
{
	static const char *const titles[] = { "<preset", "<k", "<v", "k row", "v row", "bytes a token",
		"compression" };
	struct geometry geometry;
	struct srv_table table;
	json_t *list = json_array();
	enum kv_status status = read_geometry(ctl, &geometry, err);

	srv_table_init(&table, titles, KV_LENGTH(titles));
	/* One more than there are: rows without a preset, to compare with. */
	for (uint32_t i = 0; status == KV_OK && i <= kv_preset_count(); i++) {
		static const struct kv_preset none = { "(none)", KV_PRESET_EXACT, KV_PRESET_EXACT };
		const struct kv_preset *preset = i < kv_preset_count() ? kv_preset_at(i) : &none;
		struct line line;

		status = fill_line(&geometry, preset->name, preset->k, preset->v, &line, err);
		if (status != KV_OK)
			break;
		add_line(&table, &line);
		if (i < kv_preset_count())
			json_array_append_new(list, line_json(&line));
	}
	if (status == KV_OK && ctl->is_json) {
		json_t *json =
			json_pack("{s:I, s:I, s:I, s:I, s:I, s:O}", "layers", (json_int_t)geometry.n_layers,
				"exact_layers", (json_int_t)ctl->values[ARG_EXACT_LAYERS].number, "kv_heads",
				(json_int_t)geometry.kv_heads, "k_head_dim", (json_int_t)geometry.dims[0],
				"v_head_dim", (json_int_t)geometry.dims[1], "presets", list);

		srv_ctl_print_json(json);
		json_decref(json);
	} else if (status == KV_OK) {
		printf("%u layers (%u of them " KV_PRESET_EXACT "), %u KV heads, head_dim %u (K) and %u "
		       "(V)\n\n",
			geometry.n_layers, geometry.n_exact_layers, geometry.kv_heads, geometry.dims[0],
			geometry.dims[1]);
		srv_table_print(&table, stdout);
	}
	srv_table_finish(&table);
	json_decref(list);
	return status;
}

const struct srv_command srv_cmd_presets = {
	.name = "presets",
	.summary = "names for pairs of a K and a V format, and the bytes a token takes with each",
	.details =
		"A pool asks for one with `preset`, and for exact layers at both ends with `exact_layers`.",
	.args = args,
	.n_args = N_ARGS,
	.run = run_presets,
};
