/*
 * Formats and options of a pool: which format every layer has, which options its codecs get, and the codecs
 * and rotations themselves. Layers share what is the same for them. An option that no format of the pool
 * takes is refused, because whoever gave it expected something of it.
 */
#include <stdio.h>
#include <string.h>

#include "core/checked.h"
#include "core/memory.h"
#include "core/pool_spec_internal.h"
#include "core/recipe.h"

/* ---- formats of layers ---- */

static const struct kv_format **formats_of(const struct kv_made_spec *made, bool is_v)
{
	return is_v ? made->v_formats : made->k_formats;
}

/* `k "tq4"`, `k[3] "tq4"` or `preset "4bit"`: where the format of a layer was asked for. */
static void name_source(const struct kv_spec_reader *reader, const struct kv_made_spec *made, bool is_v,
	uint32_t layer, char out[static KV_MEMBER_BYTES_MAX + KV_FOUND_BYTES_MAX])
{
	const char *member = made->preset ? "preset" : is_v ? "v" : "k";
	const json_t *value = json_object_get(reader->json, member);
	char found[KV_FOUND_BYTES_MAX], place[16] = "";

	if (json_is_array(value)) {
		value = json_array_get(value, layer);
		snprintf(place, sizeof(place), "[%u]", layer);
	}
	kv_spec_describe(value, found);
	snprintf(out, KV_MEMBER_BYTES_MAX + KV_FOUND_BYTES_MAX, "%s%s%s", member, place, found);
}

static enum kv_status read_layer_format(const struct kv_spec_reader *reader, const struct kv_made_spec *made,
	bool is_v, const json_t *value, uint32_t layer)
{
	struct kv_error cause = { .msg = "" };
	char source[KV_MEMBER_BYTES_MAX + KV_FOUND_BYTES_MAX], member[16];

	if (!json_is_string(value)) {
		snprintf(member, sizeof(member), "%s[%u]", is_v ? "v" : "k", layer);
		return kv_spec_refuse(reader, member, value, "the name of a row format");
	}

	const enum kv_status status =
		kv_format_parse(json_string_value(value), &formats_of(made, is_v)[layer], &cause);

	if (status == KV_OK)
		return KV_OK;
	name_source(reader, made, is_v, layer, source);
	return kv_spec_pass_on(reader, source, status, &cause);
}

/* `k` or `v`: a name for all layers, or an array with a name for each. */
static enum kv_status read_side(
	const struct kv_spec_reader *reader, const struct kv_made_spec *made, bool is_v)
{
	const char *member = is_v ? "v" : "k";
	const json_t *value = json_object_get(reader->json, member);
	const uint32_t n_layers = made->base.n_layers;
	char expected[80];

	if (!json_is_string(value) && !json_is_array(value))
		return kv_spec_refuse(reader, member, value, "the name of a row format");
	if (json_is_array(value) && json_array_size(value) != n_layers) {
		snprintf(expected, sizeof(expected), "a name, or an array of %u names, one per layer",
			n_layers);
		return kv_spec_refuse(reader, member, value, expected);
	}
	for (uint32_t l = 0; l < n_layers; l++) {
		const enum kv_status status = read_layer_format(
			reader, made, is_v, json_is_array(value) ? json_array_get(value, l) : value, l);

		if (status != KV_OK)
			return status;
	}
	return KV_OK;
}

static enum kv_status read_preset(const struct kv_spec_reader *reader, struct kv_made_spec *made)
{
	const json_t *value = json_object_get(reader->json, "preset");
	struct kv_error cause = { .msg = "" };
	enum kv_status status;
	char source[KV_FOUND_BYTES_MAX + 8], found[KV_FOUND_BYTES_MAX];

	if (!json_is_string(value))
		return kv_spec_refuse(reader, "preset", value, "the name of a preset");
	if (kv_spec_has(reader, "k") || kv_spec_has(reader, "v"))
		return kv_fail(reader->err, KV_BAD_CONFIG,
			"pool \"%s\": preset: expected either preset or k and v", reader->pool);
	status = kv_preset_parse(json_string_value(value), &made->preset, &cause);
	if (status != KV_OK) {
		kv_spec_describe(value, found);
		snprintf(source, sizeof(source), "preset%s", found);
		return kv_spec_pass_on(reader, source, status, &cause);
	}
	for (uint32_t l = 0; l < made->base.n_layers && status == KV_OK; l++) {
		status = kv_format_parse(made->preset->k, &made->k_formats[l], &cause);
		if (status == KV_OK)
			status = kv_format_parse(made->preset->v, &made->v_formats[l], &cause);
	}
	KV_ASSERT(status == KV_OK); /* a test parses them all */
	return KV_OK;
}

static enum kv_status read_exact_layers(const struct kv_spec_reader *reader, const struct kv_made_spec *made)
{
	const uint32_t n_layers = made->base.n_layers;
	const struct kv_format *exact = NULL;
	uint32_t n = 0;

	if (!kv_spec_has(reader, "exact_layers"))
		return KV_OK;
	if (json_is_array(json_object_get(reader->json, "k")) ||
		json_is_array(json_object_get(reader->json, "v")))
		return kv_fail(reader->err, KV_BAD_CONFIG,
			"pool \"%s\": exact_layers: expected names in k and v, not arrays that say it all",
			reader->pool);

	/* At least one layer is left: otherwise bf16 is what was meant. */
	const enum kv_status status = kv_spec_read_u32(reader, "exact_layers", 0, (n_layers - 1) / 2, &n);

	if (status != KV_OK)
		return status;
	KV_ASSERT(kv_format_parse(KV_PRESET_EXACT, &exact, NULL) == KV_OK);
	for (uint32_t l = 0; l < n; l++) {
		made->k_formats[l] = made->k_formats[n_layers - 1 - l] = exact;
		made->v_formats[l] = made->v_formats[n_layers - 1 - l] = exact;
	}
	return KV_OK;
}

/* ---- options ---- */

static bool any_takes(const struct kv_made_spec *made, uint32_t option)
{
	for (uint32_t l = 0; l < made->base.n_layers; l++) {
		if ((kv_format_takes(made->k_formats[l]) | kv_format_takes(made->v_formats[l])) & option)
			return true;
	}
	return false;
}

static bool side_is_rotated(const struct kv_made_spec *made, bool is_v)
{
	for (uint32_t l = 0; l < made->base.n_layers; l++) {
		if (kv_format_is_rotated(formats_of(made, is_v)[l]))
			return true;
	}
	return false;
}

/* Options that are there although no format of the pool takes them. */
static enum kv_status check_unused(const struct kv_spec_reader *reader, const struct kv_made_spec *made)
{
	static const char any_tq[] = "a tqN format in k or v", any_vn[] = "a vN format in k or v",
			  any_recipe[] = "turboquant25 or turboquant35 in k or v",
			  any_rotated[] = "a tqN or tqpN format in k or v";
	const bool is_rotated = side_is_rotated(made, false) || side_is_rotated(made, true);
	const bool has_recipe = any_takes(made, KV_OPTION_RECIPE);
	const struct {
		const char *member;
		bool is_taken;
		const char *expected;
	} rows[] = {
		{ "norm_correction", any_takes(made, KV_OPTION_NORM_CORRECTION), any_tq },
		{ "group", any_takes(made, KV_OPTION_GROUP), any_vn },
		{ "recipe_scale", has_recipe, any_recipe },
		{ "recipe", has_recipe, any_recipe },
		{ "recipe_file", has_recipe, any_recipe },
		{ "rotation", is_rotated, any_rotated },
		{ "rotation_matrix", is_rotated, any_rotated },
		{ "rotation_file", is_rotated, any_rotated },
		{ "per_layer", is_rotated, any_rotated },
	};

	for (uint32_t i = 0; i < KV_LENGTH(rows); i++) {
		const json_t *value = json_object_get(reader->json, rows[i].member);

		/* "false" asks for nothing. */
		if (value && !json_is_false(value) && !rows[i].is_taken)
			return kv_spec_refuse(reader, rows[i].member, value, rows[i].expected);
	}
	return KV_OK;
}

static enum kv_status read_recipe_scale(const struct kv_spec_reader *reader, struct kv_made_spec *made)
{
	const json_t *value = json_object_get(reader->json, "recipe_scale");

	if (!value)
		return KV_OK;
	if (!json_is_string(value) ||
		kv_recipe_scale_parse(json_string_value(value), &made->options.recipe_scale, NULL) != KV_OK)
		return kv_spec_refuse(reader, "recipe_scale", value, "exact or published");
	return KV_OK;
}

/* Rotation of dims that are known to be rotated. */
static enum kv_status check_rotation(const struct kv_spec_reader *reader, const struct kv_made_spec *made,
	const uint32_t dims[2], int n_dims)
{
	const json_t *value = json_object_get(reader->json, "rotation");
	struct kv_error cause = { .msg = "" };
	char source[KV_FOUND_BYTES_MAX + 16], found[KV_FOUND_BYTES_MAX];

	kv_spec_describe(value, found);
	snprintf(source, sizeof(source), "rotation%s", found);
	for (int i = 0; i < n_dims; i++) {
		const enum kv_status status = kv_rotation_check(made->rotation_kind, dims[i], &cause);

		if (status != KV_OK)
			return kv_spec_pass_on(reader, source, status, &cause);
	}
	if (made->rotation_kind != KV_ROTATION_FILE)
		return KV_OK;
	if (made->is_per_layer)
		return kv_fail(reader->err, KV_BAD_CONFIG,
			"pool \"%s\": per_layer true: expected rht or qr, a given matrix is one for all "
			"layers",
			reader->pool);
	if (n_dims == 2)
		return kv_fail(reader->err, KV_UNSUPPORTED,
			"pool \"%s\": rotation \"file\": one matrix cannot serve k_head_dim %u and "
			"v_head_dim %u",
			reader->pool, dims[0], dims[1]);
	return KV_OK;
}

static enum kv_status read_rotation(const struct kv_spec_reader *reader, struct kv_made_spec *made)
{
	const json_t *value = json_object_get(reader->json, "rotation");
	const bool has_matrix =
		kv_spec_has(reader, "rotation_matrix") || kv_spec_has(reader, "rotation_file");
	uint32_t dims[2];
	int n_dims = 0;
	enum kv_status status;

	if (side_is_rotated(made, false))
		dims[n_dims++] = made->base.k_head_dim;
	if (side_is_rotated(made, true) && (n_dims == 0 || dims[0] != made->base.v_head_dim))
		dims[n_dims++] = made->base.v_head_dim;
	if (value &&
		(!json_is_string(value) ||
			kv_rotation_kind_parse(json_string_value(value), &made->rotation_kind, NULL) !=
				KV_OK))
		return kv_spec_refuse(reader, "rotation", value, "rht, qr or file");
	if (has_matrix && made->rotation_kind != KV_ROTATION_FILE)
		return kv_spec_refuse(reader, "rotation", value, "file, beside a matrix");
	if (made->rotation_kind == KV_ROTATION_NONE || n_dims == 0)
		return KV_OK;
	status = check_rotation(reader, made, dims, n_dims);
	if (status == KV_OK && made->rotation_kind == KV_ROTATION_FILE)
		status = kv_spec_read_matrix(reader, dims[0], made);
	return status;
}

static enum kv_status read_options(const struct kv_spec_reader *reader, struct kv_made_spec *made)
{
	enum kv_status status = check_unused(reader, made);

	made->seed = KV_ROTATION_SEED_BASE;
	if (status == KV_OK && kv_spec_has(reader, "seed"))
		status = kv_spec_read_u32(reader, "seed", 0, UINT32_MAX, &made->seed);
	if (status == KV_OK)
		status = kv_spec_read_flag(reader, "per_layer", &made->is_per_layer);
	if (status == KV_OK)
		status = kv_spec_read_flag(reader, "norm_correction", &made->options.norm_correction);
	if (status == KV_OK && kv_spec_has(reader, "group"))
		status = kv_spec_read_u32(reader, "group", 1, KV_HEAD_DIM_MAX, &made->options.group);
	if (status == KV_OK)
		status = read_recipe_scale(reader, made);
	if (status == KV_OK)
		status = read_rotation(reader, made);
	if (status == KV_OK)
		status = kv_spec_read_codebooks(reader, made);
	if (status == KV_OK)
		status = kv_spec_read_recipe(reader, made);
	return status;
}

struct kv_format_options kv_spec_options_for(const struct kv_made_spec *made, const struct kv_format *format)
{
	const uint32_t takes = kv_format_takes(format);

	return (struct kv_format_options){
		.norm_correction = (takes & KV_OPTION_NORM_CORRECTION) && made->options.norm_correction,
		.group = takes & KV_OPTION_GROUP ? made->options.group : 0,
		.recipe_scale = takes & KV_OPTION_RECIPE ? made->options.recipe_scale : KV_RECIPE_SCALE_EXACT,
		.codebooks = made->options.codebooks,
		.n_codebooks = made->options.n_codebooks,
	};
}

/* A recipe's metadata must be made for this pool, or it was made for another model. */
static enum kv_status check_recipe(
	const struct kv_spec_reader *reader, const struct kv_made_spec *made, bool is_v, uint32_t layer)
{
	const struct kv_recipe_file *recipe = made->recipe;
	const struct kv_format *format = formats_of(made, is_v)[layer];
	const uint32_t head_dim = is_v ? made->base.v_head_dim : made->base.k_head_dim;
	const char *member = kv_spec_has(reader, "recipe") ? "recipe" : "recipe_file";

	if (!recipe || !format->recipe)
		return KV_OK;
	if (recipe->format != format)
		return kv_fail(reader->err, KV_BAD_CONFIG,
			"pool \"%s\": %s: is for %s: expected %s of %s, layer %u", reader->pool, member,
			recipe->format->name, format->name, is_v ? "v" : "k", layer);
	if (recipe->head_dim != head_dim)
		return kv_fail(reader->err, KV_BAD_CONFIG, "pool \"%s\": %s: head_size %u: expected %u of %s",
			reader->pool, member, recipe->head_dim, head_dim, is_v ? "v" : "k");
	if (recipe->kv_heads != made->base.kv_heads)
		return kv_fail(reader->err, KV_BAD_CONFIG, "pool \"%s\": %s: has %u KV heads: expected %u",
			reader->pool, member, recipe->kv_heads, made->base.kv_heads);
	if (recipe->layer_idxs[recipe->n_layers - 1] >= made->base.n_layers)
		return kv_fail(reader->err, KV_BAD_CONFIG,
			"pool \"%s\": %s: has layer %u: expected layers below %u", reader->pool, member,
			recipe->layer_idxs[recipe->n_layers - 1], made->base.n_layers);
	return KV_OK;
}

/* Can every layer have its format, with its options? */
static enum kv_status check_formats(const struct kv_spec_reader *reader, const struct kv_made_spec *made)
{
	for (uint32_t i = 0; i < 2 * made->base.n_layers; i++) {
		const uint32_t layer = i / 2;
		const bool is_v = i % 2 != 0;
		const struct kv_format *format = formats_of(made, is_v)[layer];
		const struct kv_format_options options = kv_spec_options_for(made, format);
		char source[KV_MEMBER_BYTES_MAX + KV_FOUND_BYTES_MAX];
		struct kv_error cause = { .msg = "" };
		enum kv_status status = kv_format_check_with(
			format, is_v ? made->base.v_head_dim : made->base.k_head_dim, &options, &cause);

		if (status != KV_OK) {
			name_source(reader, made, is_v, layer, source);
			return kv_spec_pass_on(reader, source, status, &cause);
		}
		status = check_recipe(reader, made, is_v, layer);
		if (status != KV_OK)
			return status;
	}
	return KV_OK;
}

enum kv_status kv_spec_read_formats(const struct kv_spec_reader *reader, struct kv_made_spec *made)
{
	enum kv_status status;

	made->k_formats = kv_alloc(made->base.n_layers, sizeof(*made->k_formats));
	made->v_formats = kv_alloc(made->base.n_layers, sizeof(*made->v_formats));
	if (!made->k_formats || !made->v_formats)
		return kv_spec_no_memory(reader, "formats");
	if (kv_spec_has(reader, "preset")) {
		status = read_preset(reader, made);
	} else {
		status = read_side(reader, made, false);
		if (status == KV_OK)
			status = read_side(reader, made, true);
	}
	if (status == KV_OK)
		status = read_exact_layers(reader, made);
	if (status == KV_OK)
		status = read_options(reader, made);
	if (status == KV_OK)
		status = check_formats(reader, made);
	if (status == KV_OK)
		status = kv_spec_read_k_center(reader, made);
	return status;
}
