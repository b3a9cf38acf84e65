/*
 * The canonical text of a pool and its fingerprint: what decides bytes and results, nothing else. Members
 * have the names of the pool's JSON where they are in it; what follows from them (matrix, codebook) is there
 * by its hash, so that two ends that compute it differently notice.
 */
#include <stdio.h>
#include <string.h>

#define XXH_STATIC_LINKING_ONLY
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "core/format.h"
#include "core/memory.h"
#include "core/pool_spec_internal.h"
#include "core/rotation.h"

#define HASH_TEXT_BYTES 33u /* 32 hex digits, high half first, and the terminator */

static void hash_text(const XXH3_state_t *state, char out[static HASH_TEXT_BYTES])
{
	const XXH128_hash_t hash = XXH3_128bits_digest(state);

	snprintf(out, HASH_TEXT_BYTES, "%016llx%016llx", (unsigned long long)hash.high64,
		(unsigned long long)hash.low64);
}

/* Little-endian float32 on every machine. */
static void hash_floats(XXH3_state_t *state, const float *values, uint32_t n)
{
	uint8_t bytes[4 * KV_HEAD_DIM_MAX];

	KV_ASSERT(n <= KV_HEAD_DIM_MAX);
	for (uint32_t i = 0; i < n; i++)
		kv_store_f32(values[i], bytes + 4 * i);
	/* Fails only without a state. */
	(void)XXH3_128bits_update(state, bytes, 4 * (size_t)n);
}

/*
 * json_object_set_new() with NULL for a value that could not be made says so, and takes the value in any
 * case.
 */
static bool set(json_t *object, const char *key, json_t *value)
{
	return json_object_set_new(object, key, value) == 0;
}

/* The rows of a matrix, forward. */
static void hash_matrix(XXH3_state_t *state, const struct kv_rotation *rotation)
{
	float row[KV_HEAD_DIM_MAX];

	for (uint32_t i = 0; i < rotation->head_dim; i++) {
		kv_rotation_matrix(rotation, i, 1, row);
		hash_floats(state, row, rotation->head_dim);
	}
}

/* ---- K or V of all layers ---- */

struct side {
	const struct kv_made_spec *made;
	bool is_v;
};

static const struct kv_row_codec *codec_of(const struct side *side, uint32_t layer)
{
	return side->is_v ? side->made->layers[layer].v : side->made->layers[layer].k;
}

/* Looks like the one of an earlier layer, so that it says nothing new. */
static bool is_repeated(const struct side *side, uint32_t layer)
{
	for (uint32_t l = layer; l-- > 0;) {
		if (codec_of(side, l) == codec_of(side, layer))
			return true;
	}
	return false;
}

/* What is hashed of one layer; false when its codec has nothing of the kind. */

/* A codebook of this dim and these bits is on an earlier layer already. */
static bool has_codebook_before(const struct side *side, uint32_t layer, const struct kvcb_codebook *codebook)
{
	for (uint32_t l = 0; l < layer; l++) {
		const struct kv_row_codec *codec = codec_of(side, l);

		for (uint32_t s = 0; s < codec->n_segments; s++) {
			const struct kvcb_codebook *other = codec->segments[s].codebook;

			if (other && other->head_dim == codebook->head_dim && other->bits == codebook->bits)
				return true;
		}
	}
	return false;
}

static bool hash_codebooks(XXH3_state_t *state, const struct side *side, uint32_t layer)
{
	const struct kv_row_codec *codec = codec_of(side, layer);
	bool has_codebook = false;

	for (uint32_t s = 0; s < codec->n_segments; s++) {
		const struct kvcb_codebook *codebook = codec->segments[s].codebook;

		if (!codebook)
			continue;
		has_codebook = true;
		if (!has_codebook_before(side, layer, codebook))
			hash_floats(state, codebook->centroids, 1u << codebook->bits);
	}
	return has_codebook;
}

static bool hash_rotation(XXH3_state_t *state, const struct side *side, uint32_t layer)
{
	const struct kv_rotation *rotation = codec_of(side, layer)->rotation;

	if (!rotation)
		return false;
	for (uint32_t l = 0; l < layer; l++) {
		if (codec_of(side, l)->rotation == rotation)
			return true; /* of another format; a matrix counts once */
	}
	hash_matrix(state, rotation);
	return true;
}

/* Projections of the signs of tqpN; those of recipes are the same for everybody. */
static bool hash_projection(XXH3_state_t *state, const struct side *side, uint32_t layer)
{
	const struct kv_row_codec *codec = codec_of(side, layer);

	if (!(kv_format_takes(codec->format) & KV_OPTION_PROJECTION))
		return false;
	hash_matrix(state, codec->segments[1].rotation);
	return true;
}

/* Channels of every KV head, the high ones first, as 16-bit numbers. */
static bool hash_channels(XXH3_state_t *state, const struct side *side, uint32_t layer)
{
	const struct kv_layer_spec *l = &side->made->layers[layer];
	uint8_t bytes[2 * KV_HEAD_DIM_MAX];

	if (!codec_of(side, layer)->format->recipe)
		return false;
	for (uint32_t h = 0; h < side->made->base.kv_heads; h++) {
		const struct kv_row_codec *codec = side->is_v ? kv_layer_v(l, h) : kv_layer_k(l, h);

		for (uint32_t i = 0; i < codec->head_dim; i++)
			kv_store_u16(codec->channels[i], bytes + 2 * i);
		(void)XXH3_128bits_update(state, bytes, 2 * (size_t)codec->head_dim);
	}
	return true;
}

/* One hash over all layers, or the first of those that look alike. False: none has anything of the kind. */
static bool hash_side(const struct side *side,
	bool (*hash)(XXH3_state_t *state, const struct side *side, uint32_t layer), bool is_every_layer,
	char out[static HASH_TEXT_BYTES])
{
	XXH3_state_t state;
	bool has_any = false;

	(void)XXH3_128bits_reset(&state);
	for (uint32_t l = 0; l < side->made->base.n_layers; l++) {
		if (is_every_layer || !is_repeated(side, l))
			has_any = hash(&state, side, l) || has_any;
	}
	hash_text(&state, out);
	return has_any;
}

static bool set_hash(json_t *json, const struct side *side, const char *what,
	bool (*hash)(XXH3_state_t *state, const struct side *side, uint32_t layer), bool is_every_layer)
{
	char key[24], text[HASH_TEXT_BYTES];

	snprintf(key, sizeof(key), "%s_%s", side->is_v ? "v" : "k", what);
	return !hash_side(side, hash, is_every_layer, text) || set(json, key, json_string(text));
}

static bool set_rotation(json_t *json, const struct side *side)
{
	const struct kv_made_spec *made = side->made;
	const struct kv_rotation *first = NULL;
	char matrix[HASH_TEXT_BYTES];
	json_t *rotation;

	for (uint32_t l = 0; l < made->base.n_layers && !first; l++)
		first = codec_of(side, l)->rotation;
	if (!first)
		return true;
	(void)hash_side(side, hash_rotation, false, matrix);
	rotation = json_object();
	if (!rotation || !set(rotation, "kind", json_string(kv_rotation_kind_name(first->kind))) ||
		!set(rotation, "matrix", json_string(matrix)) ||
		!set(rotation, "seed", json_integer(made->seed)) ||
		(made->is_per_layer && !set(rotation, "per_layer", json_true()))) {
		json_decref(rotation);
		return false;
	}
	return set(json, side->is_v ? "v_rotation" : "k_rotation", rotation);
}

/* A name, or an array with the name of every layer. */
static json_t *formats_json(const struct side *side)
{
	const struct kv_format *first = codec_of(side, 0)->format;
	const uint32_t n_layers = side->made->base.n_layers;
	uint32_t n_same = 1;
	json_t *names;

	while (n_same < n_layers && codec_of(side, n_same)->format == first)
		n_same++;
	if (n_same == n_layers)
		return json_string(first->name);
	names = json_array();
	for (uint32_t l = 0; names && l < n_layers; l++) {
		if (json_array_append_new(names, json_string(codec_of(side, l)->format->name)) != 0) {
			json_decref(names);
			return NULL;
		}
	}
	return names;
}

static bool fill_side(json_t *json, const struct side *side)
{
	return set(json, side->is_v ? "v" : "k", formats_json(side)) &&
		set_hash(json, side, "codebook", hash_codebooks, false) && set_rotation(json, side) &&
		set_hash(json, side, "projection", hash_projection, false) &&
		set_hash(json, side, "channels", hash_channels, true);
}

/* Options that some format of the pool takes; a switch that is off is left out. */
static bool fill_options(json_t *json, const struct kv_made_spec *made)
{
	const struct kv_row_codec *affine = NULL, *recipe = NULL, *corrected = NULL;

	for (uint32_t i = 0; i < made->n_codecs; i++) {
		const struct kv_row_codec *codec = made->codecs[i];

		affine = kv_format_takes(codec->format) & KV_OPTION_GROUP ? codec : affine;
		recipe = codec->format->recipe ? codec : recipe;
		corrected = codec->norm_correction ? codec : corrected;
	}
	return (!affine || set(json, "group", json_integer(affine->segments[0].group_channels))) &&
		(!recipe ||
			set(json, "recipe_scale", json_string(kv_recipe_scale_name(recipe->recipe_scale)))) &&
		(!corrected || set(json, "norm_correction", json_true()));
}

static bool fill_center(json_t *json, const struct kv_made_spec *made)
{
	const struct kv_pool_spec *spec = &made->base;
	char text[HASH_TEXT_BYTES];
	XXH3_state_t state;

	if (!made->k_center)
		return true;
	(void)XXH3_128bits_reset(&state);
	for (uint64_t i = 0; i < (uint64_t)spec->n_layers * spec->kv_heads; i++)
		hash_floats(&state, made->k_center + i * spec->k_head_dim, spec->k_head_dim);
	hash_text(&state, text);
	return set(json, "k_center", json_string(text));
}

/* ---- attention ---- */

/* What all layers have alike, or an array with the value of every layer. */
static json_t *layers_json(
	const struct kv_pool_spec *spec, json_t *(*value_of)(const struct kv_layer_spec *layer))
{
	json_t *all = json_array(), *first = value_of(&spec->layers[0]);
	bool is_whole = all && first, is_same = true;

	for (uint32_t l = 0; is_whole && l < spec->n_layers; l++) {
		json_t *value = value_of(&spec->layers[l]);

		is_same = is_same && value && json_equal(value, first);
		is_whole = json_array_append_new(all, value) == 0;
	}
	if (is_whole && is_same) {
		json_decref(all);
		return first;
	}
	json_decref(first);
	if (is_whole)
		return all;
	json_decref(all);
	return NULL;
}

static json_t *float_json(float value)
{
	char text[9];

	snprintf(text, sizeof(text), "%08x", kv_f32_bits(value));
	return json_string(text);
}

static json_t *scale_json(const struct kv_layer_spec *layer)
{
	return float_json(layer->scale);
}

static json_t *softcap_json(const struct kv_layer_spec *layer)
{
	return float_json(layer->softcap);
}

static json_t *window_json(const struct kv_layer_spec *layer)
{
	return json_integer(layer->window);
}

static json_t *sink_tokens_json(const struct kv_layer_spec *layer)
{
	return json_integer(layer->sink_tokens);
}

static const float *sinks_of(const struct kv_layer_spec *layer)
{
	return layer->sinks;
}

static const float *alibi_of(const struct kv_layer_spec *layer)
{
	return layer->alibi;
}

/* Numbers of query heads: of every layer a byte that tells whether it has them, and they. */
static bool set_head_numbers(json_t *json, const char *key, const struct kv_pool_spec *spec,
	const float *(*numbers_of)(const struct kv_layer_spec *layer))
{
	char text[HASH_TEXT_BYTES];
	XXH3_state_t state;
	bool has_any = false;

	(void)XXH3_128bits_reset(&state);
	for (uint32_t l = 0; l < spec->n_layers; l++) {
		const float *numbers = numbers_of(&spec->layers[l]);
		const uint8_t is_there = numbers != NULL;

		(void)XXH3_128bits_update(&state, &is_there, sizeof(is_there));
		for (uint32_t h = 0; numbers && h < spec->q_heads; h++)
			hash_floats(&state, numbers + h, 1);
		has_any = has_any || numbers;
	}
	hash_text(&state, text);
	return !has_any || set(json, key, json_string(text));
}

/* An option that no layer has is left out. */
static bool fill_attention(json_t *json, const struct kv_pool_spec *spec)
{
	bool has_softcap = false, has_window = false, has_sink_tokens = false;

	for (uint32_t l = 0; l < spec->n_layers; l++) {
		has_softcap = has_softcap || spec->layers[l].softcap > 0;
		has_window = has_window || spec->layers[l].window > 0;
		has_sink_tokens = has_sink_tokens || spec->layers[l].sink_tokens > 0;
	}
	return set(json, "scale", layers_json(spec, scale_json)) &&
		(spec->exact_tokens == 0 || set(json, "exact_tokens", json_integer(spec->exact_tokens))) &&
		(!has_softcap || set(json, "softcap", layers_json(spec, softcap_json))) &&
		(!has_window || set(json, "window", layers_json(spec, window_json))) &&
		(!has_sink_tokens || set(json, "sink_tokens", layers_json(spec, sink_tokens_json))) &&
		set_head_numbers(json, "sinks", spec, sinks_of) &&
		set_head_numbers(json, "alibi", spec, alibi_of);
}

/* ---- the whole ---- */

/* [[layers of group 0], ..]; NULL without memory. */
static json_t *groups_json(const struct kv_pool_spec *spec)
{
	json_t *groups = json_array();

	for (uint32_t g = 0; groups && g < spec->n_groups; g++) {
		json_t *layers = json_array();
		bool is_whole = layers != NULL;

		for (uint32_t l = 0; l < spec->n_layers; l++) {
			if (spec->layers[l].group_idx == g)
				is_whole = is_whole && json_array_append_new(layers, json_integer(l)) == 0;
		}
		if (json_array_append_new(groups, layers) != 0 || !is_whole) {
			json_decref(groups);
			return NULL;
		}
	}
	return groups;
}

static bool fill(json_t *json, const struct kv_made_spec *made, const char *model)
{
	const struct kv_pool_spec *spec = &made->base;
	const struct side k = { made, false }, v = { made, true };
	return set(json, "block_size", json_integer(spec->block_size)) &&
		set(json, "groups", groups_json(spec)) && fill_side(json, &k) && fill_side(json, &v) &&
		set(json, "k_head_dim", json_integer(spec->k_head_dim)) &&
		set(json, "kv_heads", json_integer(spec->kv_heads)) &&
		set(json, "layers", json_integer(spec->n_layers)) && set(json, "model", json_string(model)) &&
		set(json, "q_heads", json_integer(spec->q_heads)) && fill_attention(json, spec) &&
		set(json, "v_head_dim", json_integer(spec->v_head_dim)) && fill_options(json, made) &&
		fill_center(json, made);
}

char *kv_spec_dump(const json_t *json, size_t *n_bytes)
{
	const size_t flags = JSON_COMPACT | JSON_SORT_KEYS;
	const size_t n_needed = json_dumpb(json, NULL, 0, flags);
	char *text = n_needed > 0 ? kv_alloc(n_needed + 1, 1) : NULL;

	if (text && json_dumpb(json, text, n_needed, flags) != n_needed) {
		kv_free(text);
		return NULL;
	}
	*n_bytes = n_needed;
	return text;
}

enum kv_status kv_pool_spec_canonicalise(struct kv_made_spec *made, const char *model, struct kv_error *err)
{
	struct kv_pool_spec *spec = &made->base;
	json_t *json = json_object();
	char *text = NULL;
	size_t n_bytes = 0;

	if (json && fill(json, made, model))
		text = kv_spec_dump(json, &n_bytes);
	json_decref(json);
	if (!text)
		return kv_fail(err, KV_NO_MEMORY, "pool \"%s\": canonical text", spec->name);
	spec->canonical_json = text;
	/* Else clients could never be told what the pool is. */
	if (n_bytes > KV_POOL_JSON_BYTES_MAX)
		return kv_fail(err, KV_UNSUPPORTED,
			"pool \"%s\": its description has %zu bytes: expected at most %u, with fewer layers "
			"or one "
			"format for all",
			spec->name, n_bytes, KV_POOL_JSON_BYTES_MAX);
	spec->canonical_json_bytes = (uint32_t)n_bytes;
	spec->fingerprint = XXH3_64bits(text, n_bytes);
	return KV_OK;
}
