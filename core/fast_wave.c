/*
 * Pools of the fast kernels, and what of a batch fits into one wave. Memory of a wave is the pool's
 * workspace: for every item its prepared queries, then what every span found for every query. An item is as
 * many query rows of one decode as fit.
 */
#include <string.h>

#include "core/fast_internal.h"
#include "core/memory.h"

#define WORKSPACE_BYTES (16u << 20)
#define STEP_BYTES      (384u << 10) /* keys and values of all heads */
#define CHUNK_TASKS     8u           /* of preparing and merging: some 10 us */
#define CHUNK_SPANS     16u
#define CHUNKS_EACH     4u /* of spans, for every worker */

/* ---- pools ---- */

/* One query row of the longest sequence must fit. */
static uint64_t row_bytes_max(const struct kv_fast_pool *pool)
{
	const uint64_t q_heads = pool->pages->spec->q_heads;
	uint64_t max = 0;

	for (uint32_t l = 0; l < pool->pages->spec->n_layers; l++) {
		const struct kv_fast_layer *layer = &pool->layers[l];
		const uint64_t n_bytes = q_heads *
			(kv_fast_prepared_bytes(pool, layer) +
				KV_FAST_SPANS_MAX * kv_fast_partial_bytes(pool, layer));

		max = layer->is_fast && n_bytes > max ? n_bytes : max;
	}
	return max;
}

static uint32_t step_tokens_of(const struct kv_pool_spec *spec, uint32_t layer)
{
	const uint64_t token_bytes = (uint64_t)spec->kv_heads *
		(spec->layers[layer].k->row_bytes + spec->layers[layer].v->row_bytes);
	uint32_t n = KV_FAST_STEP_TOKENS;

	while (n > KV_FAST_BLOCK_TOKENS && n * token_bytes > STEP_BYTES)
		n /= 2;
	return n;
}

enum kv_status kv_fast_pool_create(const struct kv_batch_pages *pages, const struct kv_fast_kernels *kernels,
	struct kv_fast_pool **out, struct kv_error *err)
{
	const struct kv_pool_spec *spec = pages->spec;
	struct kv_fast_pool *pool = kv_alloc(1, sizeof(*pool));

	if (pool) {
		pool->pages = pages;
		pool->kernels = kernels;
		pool->layers = kv_alloc(spec->n_layers, sizeof(*pool->layers));
	}
	if (!pool || !pool->layers) {
		kv_fast_pool_destroy(pool);
		return kv_fail(
			err, KV_NO_MEMORY, "pool %s: %u layers for the kernels", spec->name, spec->n_layers);
	}
	for (uint32_t l = 0; l < spec->n_layers; l++) {
		struct kv_fast_layer *layer = &pool->layers[l];

		layer->is_fast = kv_fast_side_init(&layer->k, spec->layers[l].k, false, kernels) &&
			kv_fast_side_init(&layer->v, spec->layers[l].v, true, kernels);
		layer->step_tokens = step_tokens_of(spec, l);
	}
	/* Rows of bf16 are for the kernels, whatever their dim. */
	pool->has_exact = spec->exact_tokens > 0 &&
		kv_fast_side_init(&pool->exact_k, spec->exact_k, false, kernels) &&
		kv_fast_side_init(&pool->exact_v, spec->exact_v, true, kernels);
	KV_ASSERT(pool->has_exact == (spec->exact_tokens > 0));
	pool->workspace_bytes = row_bytes_max(pool);
	if (pool->workspace_bytes < WORKSPACE_BYTES)
		pool->workspace_bytes = WORKSPACE_BYTES;
	pool->workspace = kv_pages_alloc(pool->workspace_bytes);
	if (!pool->workspace) {
		kv_fast_pool_destroy(pool);
		return kv_fail(err, KV_NO_MEMORY, "pool %s: workspace of the kernels", spec->name);
	}
	kv_pages_prefer_large(pool->workspace, pool->workspace_bytes);
	*out = pool;
	return KV_OK;
}

void kv_fast_pool_destroy(struct kv_fast_pool *pool)
{
	if (!pool)
		return;
	kv_pages_free(pool->workspace, pool->workspace_bytes);
	kv_free(pool->layers);
	kv_free(pool);
}

bool kv_fast_pool_has(const struct kv_fast_pool *pool, uint32_t layer)
{
	return pool->layers[layer].is_fast;
}

/* ---- waves ---- */

/*
 * Tokens and spans of all rows of the decode, also where the item has only some of them: how many fit depends
 * on what else is in the wave, and a row's bits must not.
 */
static void lay_out(const struct kv_fast_pool *pool, const struct kv_decode_op *op, struct kv_fast_item *item)
{
	const uint32_t last = op->q_len - 1;
	struct kv_attention_range all = kv_fast_range_of(pool, op, last);

	for (uint32_t row = 0; row < last; row++) {
		const struct kv_attention_range range = kv_fast_range_of(pool, op, row);

		all.first_hi = kv_fast_max(all.first_hi, range.first_hi);
		all.lo = kv_fast_min(all.lo, range.lo);
	}
	if (all.lo <= all.first_hi)
		all.first_hi = all.lo = 0;
	item->tokens = all;
	item->n_pieces[0] = kv_div_up_u32(all.first_hi, KV_FAST_PIECE_TOKENS);
	item->n_pieces[1] = all.hi > all.lo
		? kv_div_up_u32(all.hi, KV_FAST_PIECE_TOKENS) - all.lo / KV_FAST_PIECE_TOKENS
		: 0;

	const uint32_t n_pieces = item->n_pieces[0] + item->n_pieces[1];

	item->span_pieces = kv_fast_max(
		kv_div_up_u32(n_pieces, KV_FAST_SPANS_MAX), n_pieces < KV_FAST_LONG_PIECES ? 1 : 2);
	item->n_spans = n_pieces > 0 ? kv_div_up_u32(n_pieces, item->span_pieces) : 0;
}

/* Adds the next rows of the next decode; false when they do not fit any more. */
static bool add_item(struct kv_fast_pool *pool, const struct kv_batch *batch, uint64_t *n_bytes)
{
	const struct kv_decode_op *op = &batch->decodes[pool->op_next];
	const struct kv_fast_layer *layer = &pool->layers[op->layer];
	const uint64_t q_heads = pool->pages->spec->q_heads;
	struct kv_fast_item *item = &pool->items[pool->n_items];

	if (pool->n_items == KV_FAST_ITEMS_MAX)
		return false;
	*item = (struct kv_fast_item){ .op_idx = pool->op_next,
		.row_first = pool->row_next,
		.n_rows = op->q_len - pool->row_next,
		.is_scalar = !layer->is_fast,
		.is_refused = batch->results[op->result_idx].status != KV_OK,
		.task_first = pool->n_span_tasks };
	if (item->is_scalar) {
		item->n_tasks = pool->pages->spec->kv_heads;
	} else {
		lay_out(pool, op, item);
		item->n_tasks = item->n_spans;

		const uint64_t row_bytes = q_heads *
			(kv_fast_prepared_bytes(pool, layer) +
				item->n_spans * kv_fast_partial_bytes(pool, layer));
		const uint64_t n_fit = (pool->workspace_bytes - *n_bytes) / row_bytes;

		if (n_fit == 0)
			return false;
		if (n_fit < item->n_rows)
			item->n_rows = (uint32_t)n_fit;
		item->prepared_at = *n_bytes;
		item->partials_at = *n_bytes + item->n_rows * q_heads * kv_fast_prepared_bytes(pool, layer);
		*n_bytes += item->n_rows * row_bytes;
	}
	pool->n_span_tasks += item->n_tasks;
	pool->n_items++;
	pool->row_next += item->n_rows;
	return true;
}

void kv_fast_begin(struct kv_fast_pool *pool)
{
	pool->op_next = pool->row_next = 0;
}

bool kv_fast_next_wave(struct kv_fast_pool *pool, const struct kv_batch *batch)
{
	uint64_t n_bytes = 0;

	pool->n_items = 0;
	pool->n_span_tasks = 0;
	while (pool->op_next < batch->n_decodes && add_item(pool, batch, &n_bytes)) {
		if (pool->row_next == batch->decodes[pool->op_next].q_len) {
			pool->op_next++;
			pool->row_next = 0;
		}
	}
	return pool->n_items > 0;
}

uint64_t kv_fast_n_tasks(
	const struct kv_fast_pool *pool, enum kv_fast_step step, uint32_t n_workers, uint64_t *chunk)
{
	const uint64_t kv_heads = pool->pages->spec->kv_heads;

	if (step != KV_FAST_SPANS) {
		*chunk = CHUNK_TASKS;
		return pool->n_items * kv_heads;
	}

	const uint64_t share = pool->n_span_tasks / ((uint64_t)n_workers * CHUNKS_EACH);

	/* One after the other: the first rows of a span are asked for while the one before is worked on. */
	*chunk = share > CHUNK_SPANS ? CHUNK_SPANS : share > 0 ? share : 1;
	return pool->n_span_tasks;
}
