/*
 * Reading a pool's JSON. Every refusal names the pool, the member, the value and what was expected:
 *
 *	pool "smol": head_dim 20: expected a multiple of 16 from 16 to 256
 */
#include "core/pool_spec.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/checked.h"
#include "core/format.h"
#include "core/memory.h"
#include "core/pool_spec_internal.h"

#define TOKENS_MAX (UINT32_MAX - 1) /* UINT32_MAX is no length: DECODE uses it for "all" */
#define GROUP_NONE UINT32_MAX

/* A spec and what it owns. */
struct made_spec {
	struct kv_pool_spec base;
	struct kv_layer_spec *layers;
	struct kv_rotation *rotations[2];
	struct kv_row_codec *codecs[2];
};

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
	{ "groups", KV_MEMBER_LIST },
};

const struct kv_pool_member *kv_pool_member_find(const char *name, uint32_t name_bytes)
{
	for (uint32_t i = 0; i < KV_LENGTH(members); i++) {
		if (strlen(members[i].name) == name_bytes && memcmp(members[i].name, name, name_bytes) == 0)
			return &members[i];
	}
	return NULL;
}

/* ---- refusals ---- */

struct reader {
	const json_t *json;
	const char *pool; /* name for messages */
	struct kv_error *err;
};

/* Text from outside as it may stand in a log line: no control characters, not too long. */
static void quote(const char *text, char out[static 72])
{
	size_t n = 0;

	while (n < 64 && text[n] != '\0') {
		const unsigned char c = (unsigned char)text[n];

		out[n++] = c < 0x20 || c == 0x7F ? '?' : (char)c;
	}
	memcpy(out + n, text[n] == '\0' ? "" : "..", text[n] == '\0' ? 1 : 3);
}

/* The value as it stands behind the member's name. */
static void describe(const json_t *value, char out[static 96])
{
	char text[72];

	if (!value)
		snprintf(out, 96, " is missing");
	else if (json_is_integer(value))
		snprintf(out, 96, " %" JSON_INTEGER_FORMAT, json_integer_value(value));
	else if (json_is_real(value))
		snprintf(out, 96, " %g", json_real_value(value));
	else if (json_is_string(value)) {
		quote(json_string_value(value), text);
		snprintf(out, 96, " \"%s\"", text);
	} else {
		snprintf(out, 96, " is %s",
			json_is_array(value)            ? "an array"
				: json_is_object(value) ? "an object"
				: json_is_true(value)   ? "true"
				: json_is_false(value)  ? "false"
							: "null");
	}
}

static enum kv_status refuse(
	const struct reader *reader, const char *member, const json_t *value, const char *expected)
{
	char found[96];

	describe(value, found);
	return kv_fail(reader->err, KV_BAD_CONFIG, "pool \"%s\": %s%s: expected %s", reader->pool, member,
		found, expected);
}

/* ---- members ---- */

/* An integer in [min, max]; a missing one is refused. */
static enum kv_status read_integer(
	const struct reader *reader, const char *member, uint64_t min, uint64_t max, uint64_t *out)
{
	const json_t *value = json_object_get(reader->json, member);
	char expected[80];

	if (json_is_integer(value) && json_integer_value(value) >= 0 &&
		(uint64_t)json_integer_value(value) >= min && (uint64_t)json_integer_value(value) <= max) {
		*out = (uint64_t)json_integer_value(value);
		return KV_OK;
	}
	snprintf(expected, sizeof(expected), "an integer from %" PRIu64 " to %" PRIu64, min, max);
	return refuse(reader, member, value, expected);
}

static enum kv_status read_u32(
	const struct reader *reader, const char *member, uint32_t min, uint32_t max, uint32_t *out)
{
	uint64_t value = 0;
	const enum kv_status status = read_integer(reader, member, min, max, &value);

	if (status == KV_OK)
		*out = (uint32_t)value;
	return status;
}

static bool has_member(const struct reader *reader, const char *member)
{
	return json_object_get(reader->json, member) != NULL;
}

static bool is_name(const char *text, size_t n_bytes)
{
	static const char allowed[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:-";

	return n_bytes >= 1 && n_bytes <= KV_POOL_NAME_BYTES_MAX && strlen(text) == n_bytes &&
		strspn(text, allowed) == n_bytes;
}

static enum kv_status read_name(struct reader *reader, struct kv_pool_spec *spec)
{
	const json_t *value = json_object_get(reader->json, "name");
	char found[96];

	if (json_is_string(value) && is_name(json_string_value(value), json_string_length(value))) {
		memcpy(spec->name, json_string_value(value), json_string_length(value) + 1);
		reader->pool = spec->name;
		return KV_OK;
	}
	describe(value, found);
	return kv_fail(reader->err, KV_BAD_CONFIG,
		"pool: name%s: expected 1 to %u characters of A-Z a-z 0-9 . _ : -", found,
		KV_POOL_NAME_BYTES_MAX);
}

static enum kv_status check_members(const struct reader *reader)
{
	const char *key;
	json_t *value;

	/* jansson's iteration takes a pointer that is not const, and changes nothing. */
	json_object_foreach ((json_t *)reader->json, key, value) {
		char name[72];

		if (kv_pool_member_find(key, (uint32_t)strlen(key)))
			continue;
		quote(key, name);
		return kv_fail(
			reader->err, KV_BAD_CONFIG, "pool \"%s\": unknown member \"%s\"", reader->pool, name);
	}
	return KV_OK;
}

static enum kv_status read_one_dim(const struct reader *reader, const char *member, uint32_t *out)
{
	const json_t *value = json_object_get(reader->json, member);

	if (json_is_integer(value) && json_integer_value(value) >= KV_HEAD_DIM_MIN &&
		json_integer_value(value) <= KV_HEAD_DIM_MAX &&
		json_integer_value(value) % KV_HEAD_DIM_STEP == 0) {
		*out = (uint32_t)json_integer_value(value);
		return KV_OK;
	}
	return refuse(reader, member, value, "a multiple of 16 from 16 to 256");
}

static enum kv_status read_head_dims(const struct reader *reader, struct kv_pool_spec *spec)
{
	enum kv_status status;

	if (has_member(reader, "k_head_dim") || has_member(reader, "v_head_dim")) {
		if (has_member(reader, "head_dim"))
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

static enum kv_status read_heads(const struct reader *reader, struct kv_pool_spec *spec)
{
	char expected[64];
	enum kv_status status = read_u32(reader, "kv_heads", 1, KV_HEADS_MAX, &spec->kv_heads);

	if (status == KV_OK)
		status = read_u32(reader, "q_heads", 1, KV_HEADS_MAX, &spec->q_heads);
	if (status != KV_OK || spec->q_heads % spec->kv_heads == 0)
		return status;
	snprintf(expected, sizeof(expected), "a multiple of kv_heads %u", spec->kv_heads);
	return refuse(reader, "q_heads", json_object_get(reader->json, "q_heads"), expected);
}

static enum kv_status read_blocks(const struct reader *reader, struct kv_pool_spec *spec)
{
	const json_t *block_size = json_object_get(reader->json, "block_size");
	const json_int_t size = json_integer_value(block_size); /* 0 for anything else */
	uint32_t n_blocks = 0;

	if (size != 16 && size != 32 && size != 64)
		return refuse(reader, "block_size", block_size, "16, 32 or 64");
	spec->block_size = (uint32_t)size;

	enum kv_status status = read_u32(reader, "blocks", 1, KV_BLOCKS_MAX, &n_blocks);

	if (status != KV_OK)
		return status;
	for (uint32_t g = 0; g < spec->n_groups; g++)
		spec->n_blocks[g] = n_blocks;

	const uint64_t n_slots = (uint64_t)n_blocks * spec->block_size;
	const uint32_t bound = n_slots < TOKENS_MAX ? (uint32_t)n_slots : TOKENS_MAX;

	spec->tokens_max = bound;
	if (has_member(reader, "tokens_max"))
		status = read_u32(reader, "tokens_max", 1, bound, &spec->tokens_max);
	return status;
}

static enum kv_status read_scale(const struct reader *reader, const struct kv_pool_spec *spec, float *scale)
{
	const json_t *value = json_object_get(reader->json, "scale");

	*scale = (float)(1.0 / sqrt((double)spec->k_head_dim));
	if (!value)
		return KV_OK;
	if (json_is_number(value)) {
		*scale = (float)json_number_value(value);
		if (kv_f32_is_finite(*scale) && *scale > 0)
			return KV_OK;
	}
	return refuse(reader, "scale", value, "a number above 0 that float32 can hold");
}

static enum kv_status read_model(const struct reader *reader, const char **model)
{
	const json_t *value = json_object_get(reader->json, "model");

	*model = "";
	if (!value)
		return KV_OK;
	if (!json_is_string(value) || json_string_length(value) > KV_MODEL_BYTES_MAX ||
		strlen(json_string_value(value)) != json_string_length(value))
		return refuse(reader, "model", value, "a text of at most 256 bytes");
	*model = json_string_value(value);
	return KV_OK;
}

/* ---- groups ---- */

/* One group's layers get `given`, its place in the JSON. */
static enum kv_status read_group(
	const struct reader *reader, struct made_spec *made, const json_t *list, uint32_t given)
{
	const size_t n = json_array_size(list);
	char member[48];

	snprintf(member, sizeof(member), "groups[%u]", given);
	if (!json_is_array(list) || n == 0)
		return refuse(reader, member, list, "an array with at least one layer number");
	for (size_t i = 0; i < n; i++) {
		const json_t *value = json_array_get(list, i);
		const json_int_t layer = json_integer_value(value);
		char expected[64];

		snprintf(member, sizeof(member), "groups[%u][%zu]", given, i);
		snprintf(expected, sizeof(expected), "a layer number from 0 to %u", made->base.n_layers - 1);
		if (!json_is_integer(value) || layer < 0 || layer >= made->base.n_layers)
			return refuse(reader, member, value, expected);
		if (made->layers[layer].group_idx != GROUP_NONE)
			return refuse(reader, member, value, "every layer once");
		made->layers[layer].group_idx = given;
	}
	return KV_OK;
}

/* Groups are numbered in the order of their first layers, whatever the order in the JSON. */
static enum kv_status number_groups(const struct reader *reader, struct made_spec *made)
{
	uint32_t number_of[KV_GROUPS_MAX];
	uint32_t n_numbered = 0;

	for (uint32_t g = 0; g < KV_GROUPS_MAX; g++)
		number_of[g] = GROUP_NONE;
	for (uint32_t l = 0; l < made->base.n_layers; l++) {
		const uint32_t given = made->layers[l].group_idx;

		if (given == GROUP_NONE)
			return kv_fail(reader->err, KV_BAD_CONFIG,
				"pool \"%s\": groups: layer %u is in none, expected every layer once",
				reader->pool, l);
		if (number_of[given] == GROUP_NONE)
			number_of[given] = n_numbered++;
		made->layers[l].group_idx = number_of[given];
	}
	return KV_OK;
}

static enum kv_status read_groups(const struct reader *reader, struct made_spec *made)
{
	const json_t *value = json_object_get(reader->json, "groups");

	made->base.n_groups = 1;
	if (!value)
		return KV_OK; /* all layers in group 0 */
	if (!json_is_array(value) || json_array_size(value) < 1 || json_array_size(value) > KV_GROUPS_MAX)
		return refuse(reader, "groups", value, "an array of 1 to 8 arrays of layer numbers");
	made->base.n_groups = (uint32_t)json_array_size(value);
	for (uint32_t l = 0; l < made->base.n_layers; l++)
		made->layers[l].group_idx = GROUP_NONE;
	for (uint32_t g = 0; g < made->base.n_groups; g++) {
		const enum kv_status status = read_group(reader, made, json_array_get(value, g), g);

		if (status != KV_OK)
			return status;
	}
	return number_groups(reader, made);
}

/* ---- rows ---- */

/* A format that this head_dim can have. */
static enum kv_status read_format(
	const struct reader *reader, const char *member, uint32_t head_dim, const struct kv_format **format)
{
	const json_t *value = json_object_get(reader->json, member);
	struct kv_error cause = { 0 };
	char found[96];

	if (!json_is_string(value))
		return refuse(reader, member, value, "the name of a row format");

	enum kv_status status = kv_format_parse(json_string_value(value), format, &cause);

	if (status == KV_OK)
		status = kv_format_check(*format, head_dim, &cause);
	if (status == KV_OK)
		return KV_OK;
	describe(value, found);
	for (char *c = cause.msg; *c; c++) {
		if ((unsigned char)*c < 0x20 || *c == 0x7F)
			*c = '?'; /* it repeats the name that was asked for */
	}
	/* Wrong is wrong in a configuration; "not served" stays what it is. */
	return kv_fail(reader->err, status == KV_UNSUPPORTED ? KV_UNSUPPORTED : KV_BAD_CONFIG,
		"pool \"%s\": %s%s: %s", reader->pool, member, found, cause.msg);
}

/* K and V share a rotation when their dims agree (FORMATS 1). */
static enum kv_status make_rotation(struct made_spec *made, uint32_t head_dim, uint64_t seed,
	struct kv_rotation **out, struct kv_error *err)
{
	struct kv_rotation **slot = made->rotations[0] ? &made->rotations[1] : &made->rotations[0];

	if (made->rotations[0] && made->rotations[0]->head_dim == head_dim) {
		*out = made->rotations[0];
		return KV_OK;
	}

	const enum kv_status status =
		kv_rotation_create(kv_rotation_kind_default(head_dim), head_dim, seed, slot, err);

	if (status == KV_OK)
		*out = *slot;
	return status;
}

static enum kv_status make_codec(struct made_spec *made, const struct kv_format *format, uint32_t head_dim,
	uint64_t seed, struct kv_row_codec **codec, struct kv_error *err)
{
	struct kv_rotation *rotation = NULL;
	enum kv_status status = KV_OK;

	if (kv_format_is_rotated(format))
		status = make_rotation(made, head_dim, seed, &rotation, err);
	if (status == KV_OK)
		status = kv_row_codec_create(format, head_dim, rotation, codec, err);
	return status;
}

static enum kv_status make_codecs(const struct reader *reader, struct made_spec *made)
{
	struct kv_pool_spec *spec = &made->base;
	const struct kv_format *k = NULL, *v = NULL;
	uint64_t seed = KV_ROTATION_SEED_BASE;
	enum kv_status status = read_format(reader, "k", spec->k_head_dim, &k);

	if (status == KV_OK)
		status = read_format(reader, "v", spec->v_head_dim, &v);
	if (status == KV_OK && has_member(reader, "seed"))
		status = read_integer(reader, "seed", 0, UINT32_MAX, &seed);
	if (status != KV_OK)
		return status;
	status = make_codec(made, k, spec->k_head_dim, seed, &made->codecs[0], reader->err);
	if (status == KV_OK && (k != v || spec->k_head_dim != spec->v_head_dim))
		status = make_codec(made, v, spec->v_head_dim, seed, &made->codecs[1], reader->err);
	if (status != KV_OK) {
		kv_error_wrap(reader->err, "pool \"%s\"", reader->pool);
		return status;
	}
	spec->rotation = made->rotations[0];
	spec->v_rotation = made->rotations[1];
	return KV_OK;
}

static enum kv_status fill_layers(const struct reader *reader, struct made_spec *made, float scale)
{
	struct kv_pool_spec *spec = &made->base;
	uint64_t page_bytes;

	for (uint32_t l = 0; l < spec->n_layers; l++) {
		struct kv_layer_spec *layer = &made->layers[l];

		layer->k = made->codecs[0];
		layer->v = made->codecs[1] ? made->codecs[1] : made->codecs[0];
		layer->scale = scale;
		spec->token_bytes[layer->group_idx] +=
			(uint64_t)spec->kv_heads * (layer->k->row_bytes + layer->v->row_bytes);
	}
	/* Everything that counts bytes of the pool relies on this. */
	if (!kv_pool_spec_page_bytes(spec, &page_bytes) || page_bytes > INT64_MAX)
		return refuse(reader, "blocks", json_object_get(reader->json, "blocks"),
			"pages of less than 2^63 bytes in all");
	return KV_OK;
}

/* ---- the whole ---- */

static enum kv_status read_spec(struct reader *reader, struct made_spec *made)
{
	struct kv_pool_spec *spec = &made->base;
	const char *model = "";
	float scale = 0;
	enum kv_status status = read_name(reader, spec);

	if (status == KV_OK)
		status = check_members(reader);
	if (status == KV_OK)
		status = read_u32(reader, "layers", 1, KV_LAYERS_MAX, &spec->n_layers);
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
	status = read_groups(reader, made);
	if (status == KV_OK)
		status = read_blocks(reader, spec);
	if (status == KV_OK)
		status = read_scale(reader, spec, &scale);
	if (status == KV_OK)
		status = read_model(reader, &model);
	if (status == KV_OK)
		status = make_codecs(reader, made);
	if (status == KV_OK)
		status = fill_layers(reader, made, scale);
	if (status == KV_OK)
		status = kv_pool_spec_canonicalise(spec, model, reader->err);
	return status;
}

enum kv_status kv_pool_spec_create(const json_t *json, struct kv_pool_spec **out, struct kv_error *err)
{
	struct reader reader = { .json = json, .err = err };

	if (!json_is_object(json))
		return kv_fail(err, KV_BAD_CONFIG, "pool: expected an object");

	struct made_spec *made = kv_alloc(1, sizeof(*made));

	if (!made)
		return kv_fail(err, KV_NO_MEMORY, "pool specification");

	const enum kv_status status = read_spec(&reader, made);

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

	struct made_spec *made = kv_container_of(spec, struct made_spec, base);

	for (uint32_t i = 0; i < 2; i++) {
		kv_row_codec_destroy(made->codecs[i]);
		kv_rotation_destroy(made->rotations[i]);
	}
	kv_free(made->layers);
	kv_free((char *)spec->canonical_json);
	kv_free(made);
}

bool kv_pool_spec_page_bytes(const struct kv_pool_spec *spec, uint64_t *n_bytes)
{
	uint64_t sum = 0;

	for (uint32_t g = 0; g < spec->n_groups; g++) {
		uint64_t group_bytes;

		if (!kv_mul_u64(spec->token_bytes[g], spec->block_size, &group_bytes) ||
			!kv_mul_u64(group_bytes, spec->n_blocks[g], &group_bytes) ||
			!kv_add_u64(sum, group_bytes, &sum))
			return false;
	}
	*n_bytes = sum;
	return true;
}
