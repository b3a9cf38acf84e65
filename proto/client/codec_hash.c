/*
 * Hashes of the canonical JSON, computed here a second time: XXH3-128 over float32 and 16-bit numbers,
 * little-endian. Over the layers in order, of those that share a codec the first; a codebook and a matrix
 * count once. What a server leaves out is no match either.
 */
#include <stdio.h>
#include <string.h>

/* The functions come with the header: no library is needed at run time. */
#define XXH_STATIC_LINKING_ONLY
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "proto/client/codec.h"

static void hash_floats(XXH3_state_t *state, const float *values, size_t n)
{
	/* Fails only without a state; hosts are little-endian (core/number.h). */
	(void)XXH3_128bits_update(state, values, n * sizeof(*values));
}

static void hash_matrix(XXH3_state_t *state, const struct kv_rotation *rotation)
{
	float row[KV_HEAD_DIM_MAX];

	for (uint32_t i = 0; i < rotation->head_dim; i++) {
		kv_rotation_matrix(rotation, i, 1, row);
		hash_floats(state, row, rotation->head_dim);
	}
}

/* What is hashed of one layer's K or V; false when it has nothing of the kind. */
typedef bool hash_layer(XXH3_state_t *state, const struct tqkv_codec *codec, bool is_v, uint32_t layer);

/* An earlier layer has a codebook of this dim and these bits. */
static bool has_codebook_before(
	const struct tqkv_layer_codec *layers, uint32_t layer, const struct kvcb_codebook *codebook)
{
	for (uint32_t l = 0; l < layer; l++) {
		const struct kv_row_codec *rows = layers[l].codec;

		for (uint32_t s = 0; s < rows->n_segments; s++) {
			const struct kvcb_codebook *other = rows->segments[s].codebook;

			if (other && other->head_dim == codebook->head_dim && other->bits == codebook->bits)
				return true;
		}
	}
	return false;
}

static bool hash_codebooks(XXH3_state_t *state, const struct tqkv_codec *codec, bool is_v, uint32_t layer)
{
	const struct kv_row_codec *rows = codec->layers[is_v][layer].codec;
	bool has_codebook = false;

	for (uint32_t s = 0; s < rows->n_segments; s++) {
		const struct kvcb_codebook *codebook = rows->segments[s].codebook;

		if (!codebook)
			continue;
		has_codebook = true;
		if (!has_codebook_before(codec->layers[is_v], layer, codebook))
			hash_floats(state, codebook->centroids, (size_t)1 << codebook->bits);
	}
	return has_codebook;
}

static bool hash_rotation(XXH3_state_t *state, const struct tqkv_codec *codec, bool is_v, uint32_t layer)
{
	const struct tqkv_layer_codec *layers = codec->layers[is_v];

	if (!layers[layer].codec->rotation)
		return false;
	for (uint32_t l = 0; l < layer; l++)
		if (layers[l].codec->rotation == layers[layer].codec->rotation)
			return true;
	hash_matrix(state, layers[layer].codec->rotation);
	return true;
}

static bool hash_projection(XXH3_state_t *state, const struct tqkv_codec *codec, bool is_v, uint32_t layer)
{
	const struct kv_row_codec *rows = codec->layers[is_v][layer].codec;

	if (!(kv_format_takes(rows->format) & KV_OPTION_PROJECTION))
		return false;
	hash_matrix(state, rows->segments[1].rotation);
	return true;
}

static bool hash_channels(XXH3_state_t *state, const struct tqkv_codec *codec, bool is_v, uint32_t layer)
{
	if (!codec->layers[is_v][layer].codec->format->recipe)
		return false;
	for (uint32_t h = 0; h < codec->text.kv_heads; h++) {
		const struct kv_row_codec *rows = tqkv_head_codec(codec, layer, is_v, h);

		(void)XXH3_128bits_update(state, rows->channels, rows->head_dim * sizeof(rows->channels[0]));
	}
	return true;
}

static bool is_repeated(const struct tqkv_layer_codec *layers, uint32_t layer)
{
	for (uint32_t l = layer; l-- > 0;)
		if (layers[l].codec == layers[layer].codec)
			return true;
	return false;
}

static bool equals(const XXH3_state_t *state, const char *expected)
{
	const XXH128_hash_t hash = XXH3_128bits_digest(state);
	char text[TQKV_HASH_TEXT_BYTES];

	snprintf(text, sizeof(text), "%016llx%016llx", (unsigned long long)hash.high64,
		(unsigned long long)hash.low64);
	return strcmp(text, expected) == 0;
}

static enum tqkv_status check(const struct tqkv_codec *codec, bool is_v, const char *what, hash_layer *hash,
	bool is_every_layer, const char *expected, struct tqkv_error *err)
{
	bool has_any = false;
	XXH3_state_t state;

	(void)XXH3_128bits_reset(&state);
	for (uint32_t l = 0; l < codec->text.n_layers; l++)
		if (is_every_layer || !is_repeated(codec->layers[is_v], l))
			has_any = hash(&state, codec, is_v, l) || has_any;
	if (has_any ? equals(&state, expected) : expected[0] == '\0')
		return TQKV_OK;
	return tqkv_fail(err, TQKV_FORMAT_MISMATCH, "%c_%s is not that of the pool", is_v ? 'v' : 'k', what);
}

static enum tqkv_status check_side(const struct tqkv_codec *codec, bool is_v, struct tqkv_error *err)
{
	const struct tqkv_side_text *text = &codec->text.sides[is_v];
	enum tqkv_status status = check(codec, is_v, "rotation", hash_rotation, false, text->matrix, err);

	if (status == TQKV_OK)
		status = check(codec, is_v, "codebook", hash_codebooks, false, text->codebook, err);
	if (status == TQKV_OK)
		status = check(codec, is_v, "projection", hash_projection, false, text->projection, err);
	if (status == TQKV_OK)
		status = check(codec, is_v, "channels", hash_channels, true, text->channels, err);
	return status;
}

enum tqkv_status tqkv_codec_verify(const struct tqkv_codec *codec, struct tqkv_error *err)
{
	const struct tqkv_pool_text *text = &codec->text;
	enum tqkv_status status = check_side(codec, false, err);
	XXH3_state_t state;

	if (status == TQKV_OK)
		status = check_side(codec, true, err);
	if (status != TQKV_OK || !codec->k_center)
		return status;
	(void)XXH3_128bits_reset(&state);
	hash_floats(&state, codec->k_center,
		(size_t)text->n_layers * text->kv_heads * text->sides[false].head_dim);
	if (equals(&state, text->k_center))
		return TQKV_OK;
	return tqkv_fail(err, TQKV_FORMAT_MISMATCH, "k_center is not that of the pool");
}
