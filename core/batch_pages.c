/* Where the tensors of a pool's pages lie in one piece of memory. */
#include <string.h>

#include "core/batch_run.h"
#include "core/checked.h"
#include "core/memory.h"

#define TENSOR_ALIGN 64u

/* Adds an aligned tensor behind *offset: blocks of a kind, rows of a codec; *at is where it begins. */
static bool place_tensor(const struct kv_pool_spec *spec, uint32_t table_idx,
	const struct kv_row_codec *codec, uint64_t *offset, uint64_t *at)
{
	const uint64_t n_slots = (uint64_t)spec->n_blocks[table_idx] * spec->block_size;
	const uint64_t token_bytes = (uint64_t)spec->kv_heads * codec->row_bytes;
	uint64_t n_bytes = 0, end = 0;

	if (!kv_mul_u64(n_slots, token_bytes, &n_bytes) || !kv_add_u64(*offset, n_bytes, &end) ||
		!kv_add_u64(end, TENSOR_ALIGN - 1, &end))
		return false;
	*at = *offset;
	*offset = end / TENSOR_ALIGN * TENSOR_ALIGN;
	return true;
}

/* Where the tensors of one layer begin: pages, and ring blocks where there are any. */
struct layer_places {
	uint64_t k, v, exact_k, exact_v;
};

static bool place_layer(
	const struct kv_pool_spec *spec, uint32_t layer, uint64_t *offset, struct layer_places *places)
{
	const struct kv_layer_spec *l = &spec->layers[layer];

	*places = (struct layer_places){ 0 };
	if (!place_tensor(spec, l->group_idx, l->k, offset, &places->k) ||
		!place_tensor(spec, l->group_idx, l->v, offset, &places->v))
		return false;
	return spec->exact_tokens == 0 ||
		(place_tensor(spec, spec->n_groups, spec->exact_k, offset, &places->exact_k) &&
			place_tensor(spec, spec->n_groups, spec->exact_v, offset, &places->exact_v));
}

bool kv_batch_pages_bytes(const struct kv_pool_spec *spec, uint64_t *n_bytes)
{
	struct layer_places places;
	uint64_t offset = 0;

	for (uint32_t layer = 0; layer < spec->n_layers; layer++) {
		if (!place_layer(spec, layer, &offset, &places))
			return false;
	}
	*n_bytes = offset;
	return true;
}

enum kv_status kv_batch_pages_init(
	struct kv_batch_pages *pages, const struct kv_pool_spec *spec, uint8_t *base, struct kv_error *err)
{
	struct kv_layer_pages *layers = kv_alloc(spec->n_layers, sizeof(*layers));
	uint64_t offset = 0;

	if (!layers)
		return kv_fail(err, KV_NO_MEMORY, "pages of %u layers", spec->n_layers);
	KV_ASSERT((uintptr_t)base % TENSOR_ALIGN == 0);
	for (uint32_t layer = 0; layer < spec->n_layers; layer++) {
		struct layer_places places;

		if (!place_layer(spec, layer, &offset, &places)) {
			kv_free(layers);
			return kv_fail(err, KV_UNSUPPORTED, "the pool's pages have more than 2^64 bytes");
		}
		layers[layer].k = base + places.k;
		layers[layer].v = base + places.v;
		if (spec->exact_tokens > 0) {
			layers[layer].exact_k = base + places.exact_k;
			layers[layer].exact_v = base + places.exact_v;
		}
		if (layer > 0) {
			layers[layer].k_bytes_before =
				layers[layer - 1].k_bytes_before + spec->layers[layer - 1].k->row_bytes;
			layers[layer].v_bytes_before =
				layers[layer - 1].v_bytes_before + spec->layers[layer - 1].v->row_bytes;
		}
	}
	pages->spec = spec;
	pages->layers = layers;
	return KV_OK;
}

void kv_batch_pages_finish(struct kv_batch_pages *pages)
{
	kv_free(pages->layers);
	memset(pages, 0, sizeof(*pages));
}
