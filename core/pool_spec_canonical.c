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

/* NULL without memory. */
static json_t *rotation_json(const struct kv_rotation *rotation)
{
	char matrix[HASH_TEXT_BYTES];
	float row[KV_HEAD_DIM_MAX];
	XXH3_state_t state;
	json_t *json = json_object();

	(void)XXH3_128bits_reset(&state);
	for (uint32_t i = 0; i < rotation->head_dim; i++) {
		kv_rotation_matrix(rotation, i, 1, row);
		hash_floats(&state, row, rotation->head_dim);
	}
	hash_text(&state, matrix);
	if (json && set(json, "kind", json_string(kv_rotation_kind_name(rotation->kind))) &&
		set(json, "matrix", json_string(matrix)) && set(json, "seed", json_integer(rotation->seed)))
		return json;
	json_decref(json);
	return NULL;
}

/* Adds <side>_codebook and <side>_rotation where the codec has them. */
static bool add_codec(json_t *json, const char *side, const struct kv_row_codec *codec)
{
	char key[16], codebook[HASH_TEXT_BYTES];
	bool has_codebook = false;
	XXH3_state_t state;

	(void)XXH3_128bits_reset(&state);
	for (uint32_t s = 0; s < codec->n_segments; s++) {
		const struct kv_segment *segment = &codec->segments[s];

		if (!segment->codebook)
			continue;
		has_codebook = true;
		hash_floats(&state, segment->codebook->centroids, 1u << segment->codebook->bits);
	}
	if (has_codebook) {
		hash_text(&state, codebook);
		snprintf(key, sizeof(key), "%s_codebook", side);
		if (!set(json, key, json_string(codebook)))
			return false;
	}
	snprintf(key, sizeof(key), "%s_rotation", side);
	return !codec->rotation || set(json, key, rotation_json(codec->rotation));
}

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

static bool fill(json_t *json, const struct kv_pool_spec *spec, const char *model)
{
	const struct kv_layer_spec *layer = &spec->layers[0];
	char scale[9];

	snprintf(scale, sizeof(scale), "%08x", kv_f32_bits(layer->scale));
	return set(json, "block_size", json_integer(spec->block_size)) &&
		set(json, "groups", groups_json(spec)) &&
		set(json, "k", json_string(layer->k->format->name)) && add_codec(json, "k", layer->k) &&
		set(json, "k_head_dim", json_integer(spec->k_head_dim)) &&
		set(json, "kv_heads", json_integer(spec->kv_heads)) &&
		set(json, "layers", json_integer(spec->n_layers)) && set(json, "model", json_string(model)) &&
		set(json, "q_heads", json_integer(spec->q_heads)) && set(json, "scale", json_string(scale)) &&
		set(json, "v", json_string(layer->v->format->name)) && add_codec(json, "v", layer->v) &&
		set(json, "v_head_dim", json_integer(spec->v_head_dim));
}

/* NULL without memory. */
static char *dump(const json_t *json, size_t *n_bytes)
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

enum kv_status kv_pool_spec_canonicalise(struct kv_pool_spec *spec, const char *model, struct kv_error *err)
{
	json_t *json = json_object();
	char *text = NULL;
	size_t n_bytes = 0;

	if (json && fill(json, spec, model))
		text = dump(json, &n_bytes);
	json_decref(json);
	if (!text)
		return kv_fail(err, KV_NO_MEMORY, "pool \"%s\": canonical text", spec->name);
	spec->canonical_json = text;
	spec->canonical_json_bytes = (uint32_t)n_bytes;
	spec->fingerprint = XXH3_64bits(text, n_bytes);
	return KV_OK;
}
