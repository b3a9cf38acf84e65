#include "core/recipe_file.h"

#include <jansson.h>
#include <string.h>

#include "core/memory.h"
#include "core/recipe.h"

static const char *const list_names[2] = { "key_high_precision_indices", "value_high_precision_indices" };

/* All lists empty (zeroed). */
static enum kv_status create_empty(const struct kv_format *format, uint32_t head_dim, uint32_t kv_heads,
	uint32_t n_layers, struct kv_recipe_file **file, struct kv_error *err)
{
	const uint32_t n_high = kv_recipe_n_high(format->recipe, head_dim);
	struct kv_recipe_file *made = kv_alloc(1, sizeof(*made));

	KV_ASSERT(n_layers <= KV_RECIPE_LAYERS_MAX);
	KV_ASSERT(kv_heads <= KV_RECIPE_HEADS_MAX);
	if (made) {
		made->format = format;
		made->head_dim = head_dim;
		made->n_high = n_high;
		made->kv_heads = kv_heads;
		made->n_layers = n_layers;
		made->layer_idxs = kv_alloc(n_layers, sizeof(*made->layer_idxs));
		made->channels = kv_alloc((size_t)n_layers * 2 * kv_heads * n_high, sizeof(*made->channels));
	}
	if (!made || !made->layer_idxs || !made->channels) {
		kv_recipe_file_destroy(made);
		return kv_fail(err, KV_NO_MEMORY, "recipe file of %u layers", n_layers);
	}
	*file = made;
	return KV_OK;
}

/* The list number `layer_at` in the order of the arrays. */
static uint16_t *list_at(const struct kv_recipe_file *file, uint32_t layer_at, bool is_v, uint32_t head_idx)
{
	return file->channels + (((size_t)layer_at * 2 + is_v) * file->kv_heads + head_idx) * file->n_high;
}

enum kv_status kv_recipe_file_create(const struct kv_format *format, uint32_t head_dim, uint32_t kv_heads,
	uint32_t n_layers, struct kv_recipe_file **file, struct kv_error *err)
{
	struct kv_recipe_file *made = NULL;

	KV_ASSERT(format->recipe != NULL);
	enum kv_status status = kv_format_check(format, head_dim, err);

	if (status == KV_OK)
		status = create_empty(format, head_dim, kv_heads, n_layers, &made, err);
	if (status != KV_OK)
		return status;
	for (uint32_t l = 0; l < n_layers; l++) {
		made->layer_idxs[l] = l;
		for (uint32_t i = 0; i < 2 * kv_heads * made->n_high; i++)
			list_at(made, l, false, 0)[i] = (uint16_t)(i % made->n_high);
	}
	*file = made;
	return KV_OK;
}

void kv_recipe_file_destroy(struct kv_recipe_file *file)
{
	if (!file)
		return;
	kv_free(file->layer_idxs);
	kv_free(file->channels);
	kv_free(file);
}

uint16_t *kv_recipe_file_channels(
	const struct kv_recipe_file *file, uint32_t layer_idx, bool is_v, uint32_t head_idx)
{
	KV_ASSERT(head_idx < file->kv_heads);
	for (uint32_t l = 0; l < file->n_layers; l++) {
		if (file->layer_idxs[l] == layer_idx)
			return list_at(file, l, is_v, head_idx);
	}
	return NULL;
}

/* ---- parsing ---- */

/* The first decimal number of a layer's key. */
static enum kv_status layer_of_key(const char *key, uint32_t *layer_idx, struct kv_error *err)
{
	const char *digits = key + strcspn(key, "0123456789");
	uint32_t number = 0;

	if (*digits == '\0')
		return kv_fail(err, KV_BAD_CONFIG, "recipe file: layer \"%.64s\" has no number", key);
	for (; *digits >= '0' && *digits <= '9'; digits++) {
		number = 10 * number + (uint32_t)(*digits - '0');
		if (number >= KV_RECIPE_LAYERS_MAX)
			return kv_fail(err, KV_BAD_CONFIG, "recipe file: layer \"%.64s\" is not below %u",
				key, KV_RECIPE_LAYERS_MAX);
	}
	*layer_idx = number;
	return KV_OK;
}

static enum kv_status get_list(
	const json_t *list, const struct kv_recipe_file *file, uint16_t *channels, struct kv_error *err)
{
	if (!json_is_array(list) || json_array_size(list) != file->n_high)
		return kv_fail(err, KV_BAD_CONFIG, "must be a list of %u channels", file->n_high);
	for (uint32_t i = 0; i < file->n_high; i++) {
		const json_t *item = json_array_get(list, i);

		if (!json_is_integer(item) || json_integer_value(item) < 0 ||
			json_integer_value(item) >= file->head_dim)
			return kv_fail(err, KV_BAD_CONFIG, "channel %u must be an integer below %u", i,
				file->head_dim);
		channels[i] = (uint16_t)json_integer_value(item);
	}
	if (kv_recipe_check_channels(file->format->recipe, file->head_dim, channels, file->n_high, err) !=
		KV_OK)
		return KV_BAD_CONFIG;
	return KV_OK;
}

/* Lists of one layer; the number of KV heads is known. */
static enum kv_status get_layer(const json_t *layer, const char *key, const struct kv_recipe_file *file,
	uint32_t layer_at, struct kv_error *err)
{
	for (int v = 0; v < 2; v++) {
		const json_t *heads = json_object_get(layer, list_names[v]);

		if (!json_is_array(heads) || json_array_size(heads) != file->kv_heads)
			return kv_fail(err, KV_BAD_CONFIG,
				"recipe file: layer \"%.64s\": `%s` must have a list for each of %u KV heads",
				key, list_names[v], file->kv_heads);
		for (uint32_t head = 0; head < file->kv_heads; head++) {
			const enum kv_status status = get_list(
				json_array_get(heads, head), file, list_at(file, layer_at, v, head), err);

			if (status != KV_OK) {
				if (err) /* every failure of a list is one of the file */
					err->status = status;
				kv_error_wrap(err, "recipe file: layer \"%.64s\": `%s[%u]`", key,
					list_names[v], head);
				return status;
			}
		}
	}
	return KV_OK;
}

/* Keys in ascending order of layers: at[i] is the key whose layer is the i-th. */
static enum kv_status order_layers(
	json_t *layers, const char **keys, uint32_t *layer_idxs, struct kv_error *err)
{
	const char *by_layer[KV_RECIPE_LAYERS_MAX] = { NULL };
	const char *key;
	json_t *layer;
	uint32_t n = 0;

	json_object_foreach (layers, key, layer) {
		uint32_t layer_idx = 0;
		const enum kv_status status = layer_of_key(key, &layer_idx, err);

		if (status != KV_OK)
			return status;
		if (by_layer[layer_idx])
			return kv_fail(err, KV_BAD_CONFIG,
				"recipe file: \"%.64s\" and \"%.64s\" are both layer %u", by_layer[layer_idx],
				key, layer_idx);
		by_layer[layer_idx] = key;
	}
	for (uint32_t l = 0; l < KV_RECIPE_LAYERS_MAX; l++) {
		if (by_layer[l]) {
			keys[n] = by_layer[l];
			layer_idxs[n++] = l;
		}
	}
	return KV_OK;
}

static enum kv_status get_format(
	const json_t *json, const struct kv_format **format, uint32_t *head_dim, struct kv_error *err)
{
	const char *name = json_string_value(json_object_get(json, "recipe"));
	const json_t *size = json_object_get(json, "head_size");

	if (!json_is_integer(json_object_get(json, "version")) ||
		json_integer_value(json_object_get(json, "version")) != 1)
		return kv_fail(err, KV_BAD_CONFIG, "recipe file: `version` must be 1");
	if (!name || kv_format_parse(name, format, NULL) != KV_OK || !(*format)->recipe)
		return kv_fail(err, KV_BAD_CONFIG,
			"recipe file: `recipe` must be \"turboquant25\" or \"turboquant35\"");
	if (!json_is_integer(size) || json_integer_value(size) < 0 ||
		json_integer_value(size) > KV_HEAD_DIM_MAX)
		return kv_fail(err, KV_BAD_CONFIG,
			"recipe file: `head_size` must be an integer from %u to %u", KV_HEAD_DIM_MIN,
			KV_HEAD_DIM_MAX);
	*head_dim = (uint32_t)json_integer_value(size);
	if (kv_format_check(*format, *head_dim, err) != KV_OK) {
		if (err)
			err->status = KV_BAD_CONFIG;
		kv_error_wrap(err, "recipe file: `head_size`");
		return KV_BAD_CONFIG;
	}
	return KV_OK;
}

/* KV heads of the first layer; all others must have as many. */
static enum kv_status get_kv_heads(const json_t *layer, uint32_t *kv_heads, struct kv_error *err)
{
	const size_t n = json_array_size(json_object_get(layer, list_names[0]));

	if (n < 1 || n > KV_RECIPE_HEADS_MAX)
		return kv_fail(err, KV_BAD_CONFIG,
			"recipe file: `%s` must have 1 to %u lists, one per KV head", list_names[0],
			KV_RECIPE_HEADS_MAX);
	*kv_heads = (uint32_t)n;
	return KV_OK;
}

static enum kv_status get_file(const json_t *json, struct kv_recipe_file **file, struct kv_error *err)
{
	json_t *layers = json_object_get(json, "layers");
	const char *keys[KV_RECIPE_LAYERS_MAX];
	uint32_t layer_idxs[KV_RECIPE_LAYERS_MAX], head_dim = 0, kv_heads = 0;
	const struct kv_format *format = NULL;
	struct kv_recipe_file *made = NULL;
	enum kv_status status = get_format(json, &format, &head_dim, err);

	if (status != KV_OK)
		return status;
	if (json_object_size(layers) == 0 || json_object_size(layers) > KV_RECIPE_LAYERS_MAX)
		return kv_fail(err, KV_BAD_CONFIG,
			"recipe file: `layers` must be an object of 1 to %u layers", KV_RECIPE_LAYERS_MAX);
	const uint32_t n_layers = (uint32_t)json_object_size(layers);

	status = order_layers(layers, keys, layer_idxs, err);
	if (status == KV_OK)
		status = get_kv_heads(json_object_get(layers, keys[0]), &kv_heads, err);
	if (status == KV_OK)
		status = create_empty(format, head_dim, kv_heads, n_layers, &made, err);
	for (uint32_t l = 0; l < n_layers && status == KV_OK; l++) {
		made->layer_idxs[l] = layer_idxs[l];
		status = get_layer(json_object_get(layers, keys[l]), keys[l], made, l, err);
	}
	if (status != KV_OK) {
		kv_recipe_file_destroy(made);
		return status;
	}
	*file = made;
	return KV_OK;
}

enum kv_status kv_recipe_file_parse(
	const char *text, size_t text_bytes, struct kv_recipe_file **file, struct kv_error *err)
{
	json_error_t error;

	if (text_bytes > KV_RECIPE_FILE_BYTES_MAX)
		return kv_fail(
			err, KV_BAD_CONFIG, "recipe file: longer than %u bytes", KV_RECIPE_FILE_BYTES_MAX);

	json_t *json = json_loadb(text, text_bytes, JSON_REJECT_DUPLICATES, &error);

	if (!json)
		return kv_fail(err, KV_BAD_CONFIG, "recipe file: line %d: %s", error.line, error.text);

	const enum kv_status status = get_file(json, file, err);

	json_decref(json);
	return status;
}

/* ---- printing ---- */

static void print_lists(const struct kv_recipe_file *file, uint32_t layer_at, bool is_v, FILE *out)
{
	fprintf(out, "\"%s\":[", list_names[is_v]);
	for (uint32_t head = 0; head < file->kv_heads; head++) {
		const uint16_t *channels = list_at(file, layer_at, is_v, head);

		for (uint32_t i = 0; i < file->n_high; i++)
			fprintf(out, "%s%u", i ? "," : head ? ",[" : "[", channels[i]);
		fputc(']', out);
	}
	fputc(']', out);
}

bool kv_recipe_file_print(const struct kv_recipe_file *file, FILE *out)
{
	fprintf(out, "{\"version\":1,\"recipe\":\"%s\",\"head_size\":%u,\"layers\":{", file->format->name,
		file->head_dim);
	for (uint32_t l = 0; l < file->n_layers; l++) {
		fprintf(out, "%s\"%u\":{", l ? "," : "", file->layer_idxs[l]);
		print_lists(file, l, false, out);
		fputc(',', out);
		print_lists(file, l, true, out);
		fputc('}', out);
	}
	fprintf(out, "}}\n");
	return !ferror(out);
}
