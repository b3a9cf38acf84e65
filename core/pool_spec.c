/* A pool from its JSON: geometry, and the order in which the parts are read and made. */
#include "core/pool_spec.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/checked.h"
#include "core/memory.h"
#include "core/pool_spec_internal.h"

static const struct kv_pool_member members[] = {
	{ "name", KV_MEMBER_TEXT },
	{ "model", KV_MEMBER_TEXT },
	{ "layers", KV_MEMBER_INTEGER },
	{ "q_heads", KV_MEMBER_INTEGER },
	{ "kv_heads", KV_MEMBER_INTEGER },
	{ "head_dim", KV_MEMBER_INTEGER },
	{ "k_head_dim", KV_MEMBER_INTEGER },
	{ "v_head_dim", KV_MEMBER_INTEGER },
	{ "k", KV_MEMBER_TEXT },
	{ "v", KV_MEMBER_TEXT },
	{ "block_size", KV_MEMBER_INTEGER },
	{ "blocks", KV_MEMBER_INTEGER },
	{ "tokens_max", KV_MEMBER_INTEGER },
	{ "seed", KV_MEMBER_INTEGER },
	{ "scale", KV_MEMBER_NUMBER },
	{ "window", KV_MEMBER_INTEGER },
	{ "sink_tokens", KV_MEMBER_INTEGER },
	{ "softcap", KV_MEMBER_NUMBER },
	{ "sinks", KV_MEMBER_LIST },
	{ "alibi", KV_MEMBER_LIST },
	{ "groups", KV_MEMBER_LIST },
	{ "exact_tokens", KV_MEMBER_INTEGER },
	{ "exact_blocks", KV_MEMBER_INTEGER },
	{ "preset", KV_MEMBER_TEXT },
	{ "exact_layers", KV_MEMBER_INTEGER },
	{ "rotation", KV_MEMBER_TEXT },
	{ "per_layer", KV_MEMBER_FLAG },
	{ "rotation_matrix", KV_MEMBER_LIST },
	{ "rotation_file", KV_MEMBER_TEXT },
	{ "norm_correction", KV_MEMBER_FLAG },
	{ "group", KV_MEMBER_INTEGER },
	{ "recipe_scale", KV_MEMBER_TEXT },
	{ "recipe", KV_MEMBER_LIST },
	{ "recipe_file", KV_MEMBER_TEXT },
	{ "codebook_files", KV_MEMBER_LIST },
	{ "k_center", KV_MEMBER_LIST },
	{ "k_center_file", KV_MEMBER_TEXT },
};

const struct kv_pool_member *kv_pool_member_find(const char *name, uint32_t name_bytes)
{
	for (uint32_t i = 0; i < KV_LENGTH(members); i++) {
		if (strlen(members[i].name) == name_bytes && memcmp(members[i].name, name, name_bytes) == 0)
			return &members[i];
	}
	return NULL;
}

/* ---- geometry ---- */

static bool is_name(const char *text, size_t n_bytes)
{
	static const char allowed[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:-";

	return n_bytes >= 1 && n_bytes <= KV_POOL_NAME_BYTES_MAX && strlen(text) == n_bytes &&
		strspn(text, allowed) == n_bytes;
}

static enum kv_status read_name(struct kv_spec_reader *reader, struct kv_pool_spec *spec)
{
	const json_t *value = json_object_get(reader->json, "name");
	char found[KV_FOUND_BYTES_MAX];

	if (json_is_string(value) && is_name(json_string_value(value), json_string_length(value))) {
		memcpy(spec->name, json_string_value(value), json_string_length(value) + 1);
		reader->pool = spec->name;
		return KV_OK;
	}
	kv_spec_describe(value, found);
	return kv_fail(reader->err, KV_BAD_CONFIG,
		"pool: name%s: expected 1 to %u characters of A-Z a-z 0-9 . _ : -", found,
		KV_POOL_NAME_BYTES_MAX);
}

static enum kv_status check_members(const struct kv_spec_reader *reader)
{
	const char *key;
	json_t *value;

	/* jansson's iteration takes a pointer that is not const, and changes nothing. */
	json_object_foreach ((json_t *)reader->json, key, value) {
		char name[KV_QUOTE_BYTES_MAX];

		if (kv_pool_member_find(key, (uint32_t)strlen(key)))
			continue;
		kv_spec_quote(key, name);
		return kv_fail(
			reader->err, KV_BAD_CONFIG, "pool \"%s\": unknown member \"%s\"", reader->pool, name);
	}
	return KV_OK;
}

static enum kv_status read_one_dim(const struct kv_spec_reader *reader, const char *member, uint32_t *out)
{
	const json_t *value = json_object_get(reader->json, member);

	if (json_is_integer(value) && json_integer_value(value) >= KV_HEAD_DIM_MIN &&
		json_integer_value(value) <= KV_HEAD_DIM_MAX &&
		json_integer_value(value) % KV_HEAD_DIM_STEP == 0) {
		*out = (uint32_t)json_integer_value(value);
		return KV_OK;
	}
	return kv_spec_refuse(reader, member, value, "a multiple of 16 from 16 to 256");
}

static enum kv_status read_head_dims(const struct kv_spec_reader *reader, struct kv_pool_spec *spec)
{
	enum kv_status status;

	if (kv_spec_has(reader, "k_head_dim") || kv_spec_has(reader, "v_head_dim")) {
		if (kv_spec_has(reader, "head_dim"))
			return kv_fail(reader->err, KV_BAD_CONFIG,
				"pool \"%s\": head_dim: expected either head_dim or k_head_dim and "
				"v_head_dim",
				reader->pool);
		status = read_one_dim(reader, "k_head_dim", &spec->k_head_dim);
		return status == KV_OK ? read_one_dim(reader, "v_head_dim", &spec->v_head_dim) : status;
	}
	status = read_one_dim(reader, "head_dim", &spec->k_head_dim);
	spec->v_head_dim = spec->k_head_dim;
	return status;
}

static enum kv_status read_heads(const struct kv_spec_reader *reader, struct kv_pool_spec *spec)
{
	char expected[64];
	enum kv_status status = kv_spec_read_u32(reader, "kv_heads", 1, KV_HEADS_MAX, &spec->kv_heads);

	if (status == KV_OK)
		status = kv_spec_read_u32(reader, "q_heads", 1, KV_HEADS_MAX, &spec->q_heads);
	if (status != KV_OK || spec->q_heads % spec->kv_heads == 0)
		return status;
	snprintf(expected, sizeof(expected), "a multiple of kv_heads %u", spec->kv_heads);
	return kv_spec_refuse(reader, "q_heads", json_object_get(reader->json, "q_heads"), expected);
}

static enum kv_status read_model(const struct kv_spec_reader *reader, const char **model)
{
	const json_t *value = json_object_get(reader->json, "model");

	*model = "";
	if (!value)
		return KV_OK;
	if (!json_is_string(value) || json_string_length(value) > KV_MODEL_BYTES_MAX ||
		strlen(json_string_value(value)) != json_string_length(value))
		return kv_spec_refuse(reader, "model", value, "a text of at most 256 bytes");
	*model = json_string_value(value);
	return KV_OK;
}

/* ---- the whole ---- */

static enum kv_status fill_layers(const struct kv_spec_reader *reader, struct kv_made_spec *made)
{
	struct kv_pool_spec *spec = &made->base;
	uint64_t page_bytes;

	for (uint32_t l = 0; l < spec->n_layers; l++) {
		const struct kv_layer_spec *layer = &made->layers[l];

		spec->token_bytes[layer->group_idx] +=
			(uint64_t)spec->kv_heads * (layer->k->row_bytes + layer->v->row_bytes);
	}
	if (spec->exact_tokens > 0)
		spec->token_bytes[spec->n_groups] = (uint64_t)spec->n_layers * spec->kv_heads *
			(spec->exact_k->row_bytes + spec->exact_v->row_bytes);
	/* Everything that counts bytes of the pool relies on this. */
	if (!kv_pool_spec_page_bytes(spec, &page_bytes) || page_bytes > INT64_MAX)
		return kv_spec_refuse(reader, "blocks", json_object_get(reader->json, "blocks"),
			"pages of less than 2^63 bytes in all");
	return KV_OK;
}

static enum kv_status read_spec(struct kv_spec_reader *reader, struct kv_made_spec *made)
{
	struct kv_pool_spec *spec = &made->base;
	const char *model = "";
	enum kv_status status = read_name(reader, spec);

	if (status == KV_OK)
		status = check_members(reader);
	if (status == KV_OK)
		status = kv_spec_read_u32(reader, "layers", 1, KV_LAYERS_MAX, &spec->n_layers);
	if (status == KV_OK)
		status = read_heads(reader, spec);
	if (status == KV_OK)
		status = read_head_dims(reader, spec);
	if (status != KV_OK)
		return status;
	made->layers = kv_alloc(spec->n_layers, sizeof(*made->layers));
	if (!made->layers)
		return kv_fail(
			reader->err, KV_NO_MEMORY, "pool \"%s\": %u layers", reader->pool, spec->n_layers);
	spec->layers = made->layers;
	status = kv_spec_read_attention(reader, made);
	if (status == KV_OK)
		status = kv_spec_read_groups(reader, made);
	if (status == KV_OK)
		status = kv_spec_read_blocks(reader, made);
	if (status == KV_OK)
		status = read_model(reader, &model);
	if (status == KV_OK)
		status = kv_spec_read_formats(reader, made);
	if (status == KV_OK)
		status = kv_spec_make_codecs(reader, made);
	if (status == KV_OK)
		status = kv_spec_make_exact(reader, made);
	if (status == KV_OK)
		status = fill_layers(reader, made);
	if (status == KV_OK)
		status = kv_pool_spec_canonicalise(made, model, reader->err);
	return status;
}

/* What only making it needed. */
static void drop_inputs(struct kv_made_spec *made)
{
	kv_free(made->k_formats);
	kv_free(made->v_formats);
	kv_free(made->codebooks);
	kv_free(made->matrix);
	kv_recipe_file_destroy(made->recipe);
	made->k_formats = made->v_formats = NULL;
	made->codebooks = NULL;
	made->matrix = NULL;
	made->recipe = NULL;
}

enum kv_status kv_pool_spec_create_with(
	const json_t *json, const struct kv_files *files, struct kv_pool_spec **out, struct kv_error *err)
{
	struct kv_spec_reader reader = { .json = json, .files = files, .err = err };

	if (!json_is_object(json))
		return kv_fail(err, KV_BAD_CONFIG, "pool: expected an object");

	struct kv_made_spec *made = kv_alloc(1, sizeof(*made));

	if (!made)
		return kv_fail(err, KV_NO_MEMORY, "pool specification");

	const enum kv_status status = read_spec(&reader, made);

	drop_inputs(made);
	if (status != KV_OK) {
		kv_pool_spec_destroy(&made->base);
		return status;
	}
	*out = &made->base;
	return KV_OK;
}

void kv_pool_spec_destroy(struct kv_pool_spec *spec)
{
	if (!spec)
		return;

	struct kv_made_spec *made = kv_container_of(spec, struct kv_made_spec, base);

	/* Those that borrow from others were made after them. */
	for (uint32_t i = made->n_codecs; i-- > 0;)
		kv_row_codec_destroy(made->codecs[i]);
	for (uint32_t i = 0; i < made->n_rotations; i++)
		kv_rotation_destroy(made->rotations[i]);
	for (uint32_t l = 0; made->layers && l < spec->n_layers; l++) {
		kv_free((void *)made->layers[l].k_heads);
		kv_free((void *)made->layers[l].v_heads);
	}
	kv_row_codec_destroy((struct kv_row_codec *)spec->exact_k);
	kv_row_codec_destroy((struct kv_row_codec *)spec->exact_v);
	kv_free(made->codecs);
	kv_free(made->rotations);
	kv_free(made->k_center);
	kv_free(made->sinks);
	kv_free(made->alibi);
	kv_free(made->layers);
	kv_free((char *)spec->canonical_json);
	kv_free(made);
}

bool kv_pool_spec_page_bytes(const struct kv_pool_spec *spec, uint64_t *n_bytes)
{
	uint64_t sum = 0;

	for (uint32_t g = 0; g < spec->n_tables; g++) {
		uint64_t group_bytes;

		if (!kv_mul_u64(spec->token_bytes[g], spec->block_size, &group_bytes) ||
			!kv_mul_u64(group_bytes, spec->n_blocks[g], &group_bytes) ||
			!kv_add_u64(sum, group_bytes, &sum))
			return false;
	}
	*n_bytes = sum;
	return true;
}

const char *kv_pool_spec_format_name(const struct kv_pool_spec *spec, bool is_v)
{
	const struct kv_layer_spec *first = &spec->layers[0];

	for (uint32_t l = 1; l < spec->n_layers; l++) {
		const struct kv_layer_spec *layer = &spec->layers[l];

		if ((is_v ? layer->v : layer->k)->format != (is_v ? first->v : first->k)->format)
			return "mixed";
	}
	return (is_v ? first->v : first->k)->format->name;
}
