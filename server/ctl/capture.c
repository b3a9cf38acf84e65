#include "server/ctl/capture.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "core/checked.h"
#include "core/memory.h"
#include "core/pool_spec.h"

/* Numbers of a model's layers are below this: room for any model, and no overflow in arithmetic on them. */
#define LAYER_NUMBER_MAX 99999u

static const char kind_letters[SRV_CAPTURE_N_KINDS] = { 'k', 'v', 'q' };

char srv_capture_kind_letter(enum srv_capture_kind kind)
{
	return kind_letters[kind];
}

/* "k.12" is SRV_CAPTURE_K of layer 12. False for a name that does not begin like one. */
static bool is_rows_name(const char *name, enum srv_capture_kind *kind)
{
	for (uint32_t i = 0; i < SRV_CAPTURE_N_KINDS; i++) {
		if (name[0] != kind_letters[i] || name[1] != '.')
			continue;
		*kind = (enum srv_capture_kind)i;
		return true;
	}
	return false;
}

/* A decimal number without sign and leading zeros, so that no two names mean the same layer. */
static bool parse_number(const char *text, uint32_t max, uint32_t *out)
{
	uint32_t value = 0;

	if (text[0] == '\0' || (text[0] == '0' && text[1] != '\0'))
		return false;
	for (; *text != '\0'; text++) {
		if (*text < '0' || *text > '9')
			return false;
		value = value * 10 + (uint32_t)(*text - '0');
		if (value > max)
			return false;
	}
	*out = value;
	return true;
}

static struct srv_capture_layer *find_layer(struct srv_capture *capture, uint32_t number)
{
	for (uint32_t i = 0; i < capture->n_layers; i++)
		if (capture->layers[i].number == number)
			return &capture->layers[i];
	return NULL;
}

static int compare_by_number(const void *a, const void *b)
{
	const struct srv_capture_layer *left = a, *right = b;

	return left->number < right->number ? -1 : left->number > right->number;
}

static enum kv_status add_rows(struct srv_capture *capture, enum srv_capture_kind kind,
	const struct srv_tensor *tensor, struct kv_error *err)
{
	uint32_t number;

	if (!parse_number(tensor->name + 2, LAYER_NUMBER_MAX, &number))
		return kv_fail(err, KV_CORRUPT, "tensor '%s': '%s' is not a layer number of 0 to %u",
			tensor->name, tensor->name + 2, LAYER_NUMBER_MAX);
	if (tensor->dtype == KV_DTYPE_NONE)
		return kv_fail(err, KV_UNSUPPORTED, "tensor '%s' is %s; rows are F32, F16 or BF16",
			tensor->name, tensor->dtype_name);
	if (tensor->n_dims != 3)
		return kv_fail(err, KV_CORRUPT,
			"tensor '%s' has %u dimensions; rows have [tokens, heads, head_dim]", tensor->name,
			tensor->n_dims);

	struct srv_capture_layer *layer = find_layer(capture, number);

	if (!layer) {
		if (capture->n_layers == KV_LAYERS_MAX)
			return kv_fail(err, KV_UNSUPPORTED, "tensor '%s': more than %u layers", tensor->name,
				KV_LAYERS_MAX);
		layer = &capture->layers[capture->n_layers++];
		layer->number = number;
	}
	layer->rows[kind] = tensor;
	return KV_OK;
}

/* The shape that all tensors of one kind must have, taken from the first layer. */
static enum kv_status read_geometry(struct srv_capture *capture, struct kv_error *err)
{
	const struct srv_tensor *const *rows = capture->layers[0].rows;
	const uint64_t bounds[3] = { UINT32_MAX, KV_HEADS_MAX, KV_HEAD_DIM_MAX };
	static const char *const words[3] = { "tokens", "heads", "channels" };

	for (uint32_t kind = 0; kind < SRV_CAPTURE_N_KINDS; kind++)
		for (uint32_t i = 0; i < 3; i++)
			if (rows[kind]->shape[i] < 1 || rows[kind]->shape[i] > bounds[i])
				return kv_fail(err, KV_UNSUPPORTED,
					"tensor '%s' has %llu %s; 1 to %llu are possible", rows[kind]->name,
					(unsigned long long)rows[kind]->shape[i], words[i],
					(unsigned long long)bounds[i]);
	capture->n_tokens = (uint32_t)rows[SRV_CAPTURE_K]->shape[0];
	capture->kv_heads = (uint32_t)rows[SRV_CAPTURE_K]->shape[1];
	capture->k_head_dim = (uint32_t)rows[SRV_CAPTURE_K]->shape[2];
	capture->v_head_dim = (uint32_t)rows[SRV_CAPTURE_V]->shape[2];
	capture->q_heads = (uint32_t)rows[SRV_CAPTURE_Q]->shape[1];
	if (capture->q_heads % capture->kv_heads != 0)
		return kv_fail(err, KV_CORRUPT,
			"tensor '%s' has %u query heads, not a multiple of the %u KV heads of '%s'",
			rows[SRV_CAPTURE_Q]->name, capture->q_heads, capture->kv_heads,
			rows[SRV_CAPTURE_K]->name);
	return KV_OK;
}

static enum kv_status check_layer(
	const struct srv_capture *capture, const struct srv_capture_layer *layer, struct kv_error *err)
{
	const uint32_t heads[SRV_CAPTURE_N_KINDS] = { capture->kv_heads, capture->kv_heads,
		capture->q_heads };
	const uint32_t dims[SRV_CAPTURE_N_KINDS] = { capture->k_head_dim, capture->v_head_dim,
		capture->k_head_dim };

	for (uint32_t kind = 0; kind < SRV_CAPTURE_N_KINDS; kind++) {
		const struct srv_tensor *tensor = layer->rows[kind];
		char shape[SRV_TENSOR_SHAPE_TEXT_BYTES];

		if (tensor->shape[0] == capture->n_tokens && tensor->shape[1] == heads[kind] &&
			tensor->shape[2] == dims[kind])
			continue;
		srv_tensor_shape_text(tensor, shape);
		return kv_fail(err, KV_CORRUPT,
			"tensor '%s' has the shape %s; the capture's first tensors ask for [%u, %u, %u]",
			tensor->name, shape, capture->n_tokens, heads[kind], dims[kind]);
	}
	return KV_OK;
}

/* Metadata is optional, but what it says must hold. */
static enum kv_status check_metadata(const struct srv_capture *capture, struct kv_error *err)
{
	const struct {
		const char *key;
		uint32_t value;
	} facts[] = {
		{ "tokens", capture->n_tokens },
		{ "q_heads", capture->q_heads },
		{ "kv_heads", capture->kv_heads },
		{ "head_dim", capture->k_head_dim },
	};
	const uint32_t number_last = capture->layers[capture->n_layers - 1].number;
	const char *text;
	uint32_t value;

	for (uint32_t i = 0; i < KV_LENGTH(facts); i++) {
		text = srv_safetensors_metadata(capture->file, facts[i].key);
		if (text && (!parse_number(text, INT32_MAX, &value) || value != facts[i].value))
			return kv_fail(err, KV_CORRUPT, "metadata says %s '%.40s', the tensors have %u",
				facts[i].key, text, facts[i].value);
	}
	text = srv_safetensors_metadata(capture->file, "n_layers");
	if (text && (!parse_number(text, LAYER_NUMBER_MAX + 1, &value) || value <= number_last))
		return kv_fail(err, KV_CORRUPT, "metadata says n_layers '%.40s', but there is a layer %u",
			text, number_last);
	return KV_OK;
}

static enum kv_status read_layers(struct srv_capture *capture, struct kv_error *err)
{
	enum srv_capture_kind kind;

	for (uint32_t i = 0; i < capture->file->n_tensors; i++) {
		const struct srv_tensor *tensor = &capture->file->tensors[i];

		if (!is_rows_name(tensor->name, &kind))
			continue;
		const enum kv_status status = add_rows(capture, kind, tensor, err);

		if (status != KV_OK)
			return status;
	}
	if (capture->n_layers == 0)
		return kv_fail(err, KV_CORRUPT,
			"not a capture: none of its %u tensors is named k.{layer}, v.{layer} or "
			"q.{layer}",
			capture->file->n_tensors);
	qsort(capture->layers, capture->n_layers, sizeof(*capture->layers), compare_by_number);
	for (uint32_t i = 0; i < capture->n_layers; i++)
		for (uint32_t missing = 0; missing < SRV_CAPTURE_N_KINDS; missing++)
			if (!capture->layers[i].rows[missing])
				return kv_fail(err, KV_CORRUPT, "layer %u has no tensor '%c.%u'",
					capture->layers[i].number, kind_letters[missing],
					capture->layers[i].number);
	return KV_OK;
}

enum kv_status srv_capture_create(
	struct srv_safetensors *file, struct srv_capture **out, struct kv_error *err)
{
	struct srv_capture *capture = kv_alloc(1, sizeof(*capture));
	enum kv_status status;

	if (!capture) {
		srv_safetensors_destroy(file);
		return kv_fail(err, KV_NO_MEMORY, "no memory for a capture");
	}
	capture->file = file;
	capture->layers = kv_alloc(KV_LAYERS_MAX, sizeof(*capture->layers));
	status = capture->layers ? read_layers(capture, err)
				 : kv_fail(err, KV_NO_MEMORY, "no memory for a capture's layers");
	if (status == KV_OK)
		status = read_geometry(capture, err);
	for (uint32_t i = 0; status == KV_OK && i < capture->n_layers; i++)
		status = check_layer(capture, &capture->layers[i], err);
	if (status == KV_OK)
		status = check_metadata(capture, err);
	if (status != KV_OK) {
		srv_capture_destroy(capture);
		return status;
	}
	*out = capture;
	return KV_OK;
}

enum kv_status srv_capture_open(const char *path, struct srv_capture **out, struct kv_error *err)
{
	struct srv_safetensors *file;
	enum kv_status status = srv_safetensors_open(path, &file, err);

	if (status != KV_OK)
		return status;
	status = srv_capture_create(file, out, err);
	if (status != KV_OK)
		kv_error_wrap(err, "%s", path);
	return status;
}

void srv_capture_destroy(struct srv_capture *capture)
{
	if (!capture)
		return;
	srv_safetensors_destroy(capture->file);
	kv_free(capture->layers);
	kv_free(capture);
}

uint32_t srv_capture_token_values(const struct srv_capture *capture, enum srv_capture_kind kind)
{
	switch (kind) {
	case SRV_CAPTURE_K:
		return capture->kv_heads * capture->k_head_dim;
	case SRV_CAPTURE_V:
		return capture->kv_heads * capture->v_head_dim;
	case SRV_CAPTURE_Q:
	case SRV_CAPTURE_N_KINDS:
		break;
	}
	return capture->q_heads * capture->k_head_dim;
}

bool srv_capture_is_bf16(const struct srv_capture *capture)
{
	for (uint32_t i = 0; i < capture->n_layers; i++)
		for (uint32_t kind = 0; kind < SRV_CAPTURE_N_KINDS; kind++)
			if (capture->layers[i].rows[kind]->dtype != KV_DTYPE_BF16)
				return false;
	return true;
}

void srv_capture_load(const struct srv_capture *capture, uint32_t layer_idx, enum srv_capture_kind kind,
	uint32_t token_first, uint32_t n_tokens, float *dst)
{
	const struct srv_tensor *tensor = capture->layers[layer_idx].rows[kind];
	const uint64_t token_values = srv_capture_token_values(capture, kind);
	const uint64_t offset = token_first * token_values * kv_dtype_bytes(tensor->dtype);

	KV_ASSERT(n_tokens <= capture->n_tokens && token_first <= capture->n_tokens - n_tokens);
	kv_rows_load_f32(tensor->dtype, tensor->data + offset, (size_t)(n_tokens * token_values), dst);
}

static enum kv_status check_tensor_finite(const struct srv_tensor *tensor, struct kv_error *err)
{
	const uint32_t value_bytes = kv_dtype_bytes(tensor->dtype);

	for (uint64_t i = 0; i < tensor->n_values; i++) {
		float value;

		kv_rows_load_f32(tensor->dtype, tensor->data + i * value_bytes, 1, &value);
		if (kv_f32_is_finite(value))
			continue;
		const uint64_t row = i / tensor->shape[2];

		return kv_fail(err, KV_BAD_VALUE,
			"tensor '%s': token %llu, head %llu, channel %llu is not finite", tensor->name,
			(unsigned long long)(row / tensor->shape[1]),
			(unsigned long long)(row % tensor->shape[1]),
			(unsigned long long)(i % tensor->shape[2]));
	}
	return KV_OK;
}

enum kv_status srv_capture_check_finite(const struct srv_capture *capture, struct kv_error *err)
{
	for (uint32_t i = 0; i < capture->n_layers; i++)
		for (uint32_t kind = 0; kind < SRV_CAPTURE_N_KINDS; kind++) {
			const enum kv_status status = check_tensor_finite(capture->layers[i].rows[kind], err);

			if (status != KV_OK)
				return status;
		}
	return KV_OK;
}
