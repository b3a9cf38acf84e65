#include "proto/client/codec_text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NAME_BYTES_MAX = 32 }; /* of formats, kinds, scales: the longest known one has 12 */

/* A value of the text: [start, end). NULL: there is none. */
struct value {
	const char *start, *end;
};

struct member {
	const char *key;
	size_t key_bytes;
	struct value value;
};

/* ---- reading compact JSON ---- */

/* Behind the closing quote of the string that starts at `at`; NULL when there is none. */
static const char *skip_string(const char *at)
{
	for (at++; *at != '\0'; at++) {
		if (*at == '\\' && at[1] != '\0')
			at++;
		else if (*at == '"')
			return at + 1;
	}
	return NULL;
}

/* Behind the value that starts at `at`; NULL when it does not end. Brackets are counted, not matched. */
static const char *skip_value(const char *at)
{
	const char *start = at;
	uint32_t depth = 0;

	do {
		if (*at == '\0')
			return NULL;
		if (*at == '"') {
			at = skip_string(at);
			if (!at)
				return NULL;
			continue;
		}
		if ((*at == ',' || *at == '}' || *at == ']') && depth == 0)
			return at > start ? at : NULL;
		depth += *at == '{' || *at == '[';
		depth -= *at == '}' || *at == ']';
		at++;
	} while (depth > 0 || (*at != '\0' && !strchr(",}]", *at)));
	return at;
}

/*
 * The next member of an object; *at starts at its '{' and moves on. False at the end, and where the text is
 * none: then *at is NULL.
 */
static bool next_member(const char **at, struct member *member)
{
	const char *key = *at + 1, *key_end;

	if (**at == '}')
		return false;
	if ((**at != '{' && **at != ',') || (**at == '{' && *key == '}')) {
		*at = **at == '{' ? key : NULL;
		return false;
	}
	key_end = *key == '"' ? skip_string(key) : NULL;
	*at = key_end && *key_end == ':' ? skip_value(key_end + 1) : NULL;
	if (!*at || (**at != ',' && **at != '}')) {
		*at = NULL;
		return false;
	}
	*member = (struct member){ key + 1, (size_t)(key_end - key) - 2, { key_end + 1, *at } };
	return true;
}

static struct value find(const char *object, const char *key)
{
	struct member member;

	while (next_member(&object, &member))
		if (strlen(key) == member.key_bytes && memcmp(key, member.key, member.key_bytes) == 0)
			return member.value;
	return (struct value){ NULL, NULL };
}

/* A string without escapes, at most n_bytes_max with its NUL. */
static bool read_text(struct value value, char *text, size_t n_bytes_max)
{
	const size_t n_bytes = (size_t)(value.end - value.start);

	if (!value.start || n_bytes < 2 || value.start[0] != '"' || n_bytes - 2 >= n_bytes_max ||
		memchr(value.start, '\\', n_bytes))
		return false;
	memcpy(text, value.start + 1, n_bytes - 2);
	text[n_bytes - 2] = '\0';
	return true;
}

static bool read_number(struct value value, uint32_t min, uint32_t max, uint32_t *out)
{
	uint64_t number = 0;

	if (!value.start || value.end - value.start > 10)
		return false;
	for (const char *c = value.start; c < value.end; c++) {
		if (*c < '0' || *c > '9')
			return false;
		number = 10 * number + (uint64_t)(*c - '0');
	}
	if (number < min || number > max)
		return false;
	*out = (uint32_t)number;
	return true;
}

static bool is_true(struct value value)
{
	return value.start && value.end - value.start == 4 && memcmp(value.start, "true", 4) == 0;
}

/* Text of a server in a message: no control characters. */
static const char *printable(char *text)
{
	for (char *c = text; *c != '\0'; c++)
		if ((unsigned char)*c < 0x20 || *c == 0x7F)
			*c = '?';
	return text;
}

/* ---- the pool ---- */

static enum tqkv_status refuse(const char *member, const char *expected, struct tqkv_error *err)
{
	return tqkv_fail(err, TQKV_BAD_ARG, "the pool's JSON: %s: expected %s", member, expected);
}

/* Missing is fine: the pool has no such thing. */
static enum tqkv_status read_hash(
	const char *object, const char *key, char hash[static TQKV_HASH_TEXT_BYTES], struct tqkv_error *err)
{
	const struct value value = find(object, key);

	if (value.start &&
		(!read_text(value, hash, TQKV_HASH_TEXT_BYTES) || strlen(hash) != TQKV_HASH_TEXT_BYTES - 1))
		return refuse(key, "32 hexadecimal digits", err);
	return TQKV_OK;
}

static enum tqkv_status read_format(
	struct value value, const struct kv_format **format, struct tqkv_error *err)
{
	char name[NAME_BYTES_MAX];

	if (!read_text(value, name, sizeof(name)))
		return refuse("k or v", "the name of a row format", err);
	if (kv_format_parse(name, format, NULL) != KV_OK)
		return tqkv_fail(err, TQKV_UNSUPPORTED,
			"the pool has rows of format \"%s\", which this library does not know",
			printable(name));
	return TQKV_OK;
}

/* A name, or an array with one for each layer. */
static enum tqkv_status read_formats(const char *json, const char *key, uint32_t n_layers,
	struct tqkv_side_text *side, struct tqkv_error *err)
{
	struct value value = find(json, key);
	const char *at = value.start;
	enum tqkv_status status = TQKV_OK;

	side->formats = calloc(n_layers, sizeof(*side->formats));
	if (!side->formats)
		return tqkv_fail(err, TQKV_NO_MEMORY, "no memory for %u layers", n_layers);
	if (!at || *at != '[') {
		status = read_format(value, &side->formats[0], err);
		for (uint32_t l = 1; l < n_layers; l++)
			side->formats[l] = side->formats[0];
		return status;
	}
	for (uint32_t l = 0; status == TQKV_OK && l < n_layers; l++) {
		if (*at != (l == 0 ? '[' : ',') || at[1] != '"')
			return refuse(key, "a format for each layer", err);
		value.start = at + 1;
		value.end = at = skip_value(value.start); /* the text was walked over before */
		status = read_format(value, &side->formats[l], err);
	}
	if (status == TQKV_OK && *at != ']')
		return refuse(key, "a format for each layer", err);
	return status;
}

static bool is_known(const struct member *member, const char *const known[], size_t n_known)
{
	for (size_t i = 0; i < n_known; i++)
		if (strlen(known[i]) == member->key_bytes &&
			memcmp(known[i], member->key, member->key_bytes) == 0)
			return true;
	return false;
}

/* Every member is one that is understood here, and the text is whole. */
static enum tqkv_status check_members(const char *object, const char *const known[], size_t n_known,
	const char *what, struct tqkv_error *err)
{
	struct member member;

	if (*object != '{')
		return refuse(what, "an object", err);
	while (next_member(&object, &member)) {
		char key[64];

		if (is_known(&member, known, n_known))
			continue;
		snprintf(key, sizeof(key), "%.*s", (int)(member.key_bytes < 63 ? member.key_bytes : 63),
			member.key);
		return tqkv_fail(err, TQKV_UNSUPPORTED, "%s has \"%s\", which this library does not know",
			what, printable(key));
	}
	return object ? TQKV_OK : refuse(what, "compact JSON", err);
}

static enum tqkv_status read_rotation(struct value value, struct tqkv_side_text *side, struct tqkv_error *err)
{
	static const char *const known[] = { "kind", "matrix", "per_layer", "seed" };
	char kind[NAME_BYTES_MAX];
	enum tqkv_status status;

	if (!value.start)
		return TQKV_OK;
	status = check_members(value.start, known, sizeof(known) / sizeof(known[0]), "a rotation", err);
	if (status != TQKV_OK)
		return status;
	if (!read_text(find(value.start, "kind"), kind, sizeof(kind)) ||
		kv_rotation_kind_parse(kind, &side->rotation, NULL) != KV_OK)
		return tqkv_fail(
			err, TQKV_UNSUPPORTED, "the pool's JSON: this library does not know the rotation");
	if (!read_number(find(value.start, "seed"), 0, UINT32_MAX, &side->seed))
		return refuse("seed", "a number of 32 bits", err);
	side->is_per_layer = is_true(find(value.start, "per_layer"));
	return read_hash(value.start, "matrix", side->matrix, err);
}

static enum tqkv_status read_side(
	const char *json, bool is_v, struct tqkv_pool_text *text, struct tqkv_error *err)
{
	static const struct {
		const char *format, *head_dim, *rotation, *codebook, *projection, *channels;
	} keys[2] = {
		{ "k", "k_head_dim", "k_rotation", "k_codebook", "k_projection", "k_channels" },
		{ "v", "v_head_dim", "v_rotation", "v_codebook", "v_projection", "v_channels" },
	};
	struct tqkv_side_text *side = &text->sides[is_v];
	enum tqkv_status status;

	if (!read_number(
		    find(json, keys[is_v].head_dim), KV_HEAD_DIM_MIN, KV_HEAD_DIM_MAX, &side->head_dim) ||
		side->head_dim % KV_HEAD_DIM_STEP != 0)
		return refuse(keys[is_v].head_dim, "a multiple of 16 from 16 to 256", err);
	status = read_formats(json, keys[is_v].format, text->n_layers, side, err);
	if (status == TQKV_OK)
		status = read_rotation(find(json, keys[is_v].rotation), side, err);
	if (status == TQKV_OK)
		status = read_hash(json, keys[is_v].codebook, side->codebook, err);
	if (status == TQKV_OK)
		status = read_hash(json, keys[is_v].projection, side->projection, err);
	if (status == TQKV_OK)
		status = read_hash(json, keys[is_v].channels, side->channels, err);
	return status;
}

static enum tqkv_status read_options(const char *json, struct tqkv_pool_text *text, struct tqkv_error *err)
{
	const struct value group = find(json, "group"), scale = find(json, "recipe_scale");
	char name[NAME_BYTES_MAX];

	if (group.start && !read_number(group, 1, KV_HEAD_DIM_MAX, &text->group))
		return refuse("group", "a number from 1 to 256", err);
	if (scale.start &&
		(!read_text(scale, name, sizeof(name)) ||
			kv_recipe_scale_parse(name, &text->recipe_scale, NULL) != KV_OK))
		return refuse("recipe_scale", "exact or published", err);
	text->norm_correction = is_true(find(json, "norm_correction"));
	return read_hash(json, "k_center", text->k_center, err);
}

enum tqkv_status tqkv_pool_text_init(struct tqkv_pool_text *text, const char *json, struct tqkv_error *err)
{
	/* Members that do not decide the bytes of rows are known all the same: a new one might. */
	static const char *const known[] = { "alibi", "block_size", "exact_tokens", "group", "groups", "k",
		"k_center", "k_channels", "k_codebook", "k_head_dim", "k_projection", "k_rotation",
		"kv_heads", "layers", "model", "norm_correction", "q_heads", "recipe_scale", "scale",
		"sink_tokens", "sinks", "softcap", "v", "v_channels", "v_codebook", "v_head_dim",
		"v_projection", "v_rotation", "window" };
	enum tqkv_status status;

	*text = (struct tqkv_pool_text){ 0 };
	status = check_members(json, known, sizeof(known) / sizeof(known[0]), "the pool", err);
	if (status != TQKV_OK)
		return status;
	if (!read_number(find(json, "layers"), 1, TQKV_CODEC_LAYERS_MAX, &text->n_layers))
		return refuse("layers", "a number from 1 to 1024", err);
	if (!read_number(find(json, "kv_heads"), 1, TQKV_CODEC_HEADS_MAX, &text->kv_heads))
		return refuse("kv_heads", "a number from 1 to 1024", err);
	status = read_side(json, false, text, err);
	if (status == TQKV_OK)
		status = read_side(json, true, text, err);
	return status == TQKV_OK ? read_options(json, text, err) : status;
}

void tqkv_pool_text_finish(struct tqkv_pool_text *text)
{
	for (uint32_t i = 0; i < 2; i++)
		free(text->sides[i].formats);
	*text = (struct tqkv_pool_text){ 0 };
}
