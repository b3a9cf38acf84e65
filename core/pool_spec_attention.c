/*
 * Attention options of a pool's layers: window, sink_tokens, scale, softcap, sinks, alibi.
 *
 * An option is one value for all layers or an array with one per layer. A value per query head is an array
 * itself, so what stands first in it tells which of the two it is: a number, or an array or null.
 */
#include <math.h>
#include <stdio.h>

#include "core/memory.h"
#include "core/pool_spec_internal.h"

/* In units of log2, in which a GPU has logits, float32 can still hold it; a slope times any distance, too. */
#define NUMBER_MAX 1e38f
#define SLOPE_MAX  1e28f

/* Where a layer's value stands: the member itself, or its element. */
struct place {
	const json_t *value;
	char member[KV_MEMBER_BYTES_MAX];
};

/* An array has one value per layer. */
static enum kv_status find_place(const struct kv_spec_reader *reader, const char *member, const json_t *value,
	uint32_t n_layers, uint32_t layer, bool is_array, struct place *place)
{
	char expected[64];

	if (!is_array) {
		place->value = value;
		snprintf(place->member, sizeof(place->member), "%s", member);
		return KV_OK;
	}
	if (json_array_size(value) != n_layers) {
		snprintf(expected, sizeof(expected), "one value, or an array with one for each of %u layers",
			n_layers);
		return kv_spec_refuse(reader, member, value, expected);
	}
	place->value = json_array_get(value, layer);
	snprintf(place->member, sizeof(place->member), "%s[%u]", member, layer);
	return KV_OK;
}

static enum kv_status read_tokens(const struct kv_spec_reader *reader, struct kv_made_spec *made,
	const char *member, uint32_t *(*of)(struct kv_layer_spec *layer))
{
	const json_t *value = json_object_get(reader->json, member);
	const uint32_t n_layers = made->base.n_layers;
	char expected[64];

	snprintf(expected, sizeof(expected), "an integer from 0 to %u", KV_TOKENS_MAX);
	for (uint32_t l = 0; value && l < n_layers; l++) {
		struct place place;
		const enum kv_status status =
			find_place(reader, member, value, n_layers, l, json_is_array(value), &place);

		if (status != KV_OK)
			return status;
		if (!json_is_integer(place.value) || json_integer_value(place.value) < 0 ||
			json_integer_value(place.value) > KV_TOKENS_MAX)
			return kv_spec_refuse(reader, place.member, place.value, expected);
		*of(&made->layers[l]) = (uint32_t)json_integer_value(place.value);
	}
	return KV_OK;
}

static enum kv_status read_positive(const struct kv_spec_reader *reader, struct kv_made_spec *made,
	const char *member, bool may_be_zero, float *(*of)(struct kv_layer_spec *layer))
{
	const json_t *value = json_object_get(reader->json, member);
	const uint32_t n_layers = made->base.n_layers;

	for (uint32_t l = 0; value && l < n_layers; l++) {
		struct place place;
		const enum kv_status status =
			find_place(reader, member, value, n_layers, l, json_is_array(value), &place);

		if (status != KV_OK)
			return status;

		const float number = (float)json_number_value(place.value);

		if (!json_is_number(place.value) || !(number >= 0 && number <= NUMBER_MAX) ||
			(number == 0 && (!may_be_zero || json_number_value(place.value) != 0)))
			return kv_spec_refuse(reader, place.member, place.value,
				may_be_zero ? "0, or a float32 number above 0 and up to 1e38"
					    : "a float32 number above 0 and up to 1e38");
		*of(&made->layers[l]) = number;
	}
	return KV_OK;
}

/* One number per query head, or (null) nothing on this layer. */
static enum kv_status read_heads(const struct kv_spec_reader *reader, const struct place *place, float most,
	uint32_t n, float *numbers, const float **out)
{
	char expected[64];

	if (json_is_null(place->value)) {
		*out = NULL;
		return KV_OK;
	}
	snprintf(expected, sizeof(expected), "an array of %u numbers, one per query head", n);
	if (json_array_size(place->value) != n)
		return kv_spec_refuse(reader, place->member, place->value, expected);
	for (uint32_t h = 0; h < n; h++) {
		const json_t *number = json_array_get(place->value, h);
		char element[KV_MEMBER_BYTES_MAX + 16];

		numbers[h] = (float)json_number_value(number);
		if (json_is_number(number) && fabsf(numbers[h]) <= most)
			continue;
		snprintf(element, sizeof(element), "%s[%u]", place->member, h);
		snprintf(expected, sizeof(expected), "a number from %g to %g", -(double)most, (double)most);
		return kv_spec_refuse(reader, element, number, expected);
	}
	*out = numbers;
	return KV_OK;
}

static enum kv_status read_per_head(const struct kv_spec_reader *reader, struct kv_made_spec *made,
	const char *member, float most, float **numbers, const float **(*of)(struct kv_layer_spec *layer))
{
	const json_t *value = json_object_get(reader->json, member), *first = json_array_get(value, 0);
	const uint32_t n_layers = made->base.n_layers, n = made->base.q_heads;
	const bool is_per_layer = json_is_array(first) || json_is_null(first);

	if (!value)
		return KV_OK;
	if (json_array_size(value) == 0)
		return kv_spec_refuse(reader, member, value, "an array of numbers, or of such arrays");
	*numbers = kv_alloc((size_t)n_layers * n, sizeof(**numbers));
	if (!*numbers)
		return kv_spec_no_memory(reader, member);
	for (uint32_t l = 0; l < n_layers; l++) {
		struct place place;
		enum kv_status status = find_place(reader, member, value, n_layers, l, is_per_layer, &place);

		if (status == KV_OK)
			status = read_heads(
				reader, &place, most, n, *numbers + (size_t)l * n, of(&made->layers[l]));
		if (status != KV_OK)
			return status;
	}
	return KV_OK;
}

static uint32_t *window_of(struct kv_layer_spec *layer)
{
	return &layer->window;
}

static uint32_t *sink_tokens_of(struct kv_layer_spec *layer)
{
	return &layer->sink_tokens;
}

static float *scale_of(struct kv_layer_spec *layer)
{
	return &layer->scale;
}

static float *softcap_of(struct kv_layer_spec *layer)
{
	return &layer->softcap;
}

static const float **sinks_of(struct kv_layer_spec *layer)
{
	return &layer->sinks;
}

static const float **alibi_of(struct kv_layer_spec *layer)
{
	return &layer->alibi;
}

/* One number for all layers means those that have a window; asked for by layer it has to fit. */
static enum kv_status check_sink_tokens(const struct kv_spec_reader *reader, struct kv_made_spec *made)
{
	const json_t *value = json_object_get(reader->json, "sink_tokens");
	bool has_window = false;

	for (uint32_t l = 0; l < made->base.n_layers; l++) {
		struct kv_layer_spec *layer = &made->layers[l];
		char member[KV_MEMBER_BYTES_MAX];

		has_window = has_window || layer->window != 0;
		if (layer->window != 0 || layer->sink_tokens == 0)
			continue;
		snprintf(member, sizeof(member), "sink_tokens[%u]", l);
		if (json_is_array(value))
			return kv_spec_refuse(reader, member, json_array_get(value, l),
				"0 where the layer has no window, which no token leaves");
		layer->sink_tokens = 0;
	}
	if (json_integer_value(value) > 0 && !has_window)
		return kv_spec_refuse(
			reader, "sink_tokens", value, "a window beside it, else no token ever leaves");
	return KV_OK;
}

enum kv_status kv_spec_read_attention(const struct kv_spec_reader *reader, struct kv_made_spec *made)
{
	const float scale = (float)(1.0 / sqrt((double)made->base.k_head_dim));
	enum kv_status status;

	for (uint32_t l = 0; l < made->base.n_layers; l++)
		made->layers[l].scale = scale;
	status = read_positive(reader, made, "scale", false, scale_of);
	if (status == KV_OK)
		status = read_positive(reader, made, "softcap", true, softcap_of);
	if (status == KV_OK)
		status = read_tokens(reader, made, "window", window_of);
	if (status == KV_OK)
		status = read_tokens(reader, made, "sink_tokens", sink_tokens_of);
	if (status == KV_OK)
		status = check_sink_tokens(reader, made);
	if (status == KV_OK)
		status = read_per_head(reader, made, "sinks", NUMBER_MAX, &made->sinks, sinks_of);
	return status == KV_OK ? read_per_head(reader, made, "alibi", SLOPE_MAX, &made->alibi, alibi_of)
			       : status;
}
