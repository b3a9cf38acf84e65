/* What windows leave behind, and what planning an item has to answer. */
#include "tests/unit/sequence_world.h"

/* ---- windows ---- */

uint32_t world_sinks_end(const struct world *world, uint32_t layer)
{
	const struct kv_pool_spec *spec = world->test.pool->spec;
	uint32_t n = 0;

	for (uint32_t l = 0; l < N_LAYERS; l++) {
		if (spec->layers[l].group_idx == spec->layers[layer].group_idx &&
			spec->layers[l].sink_tokens > n)
			n = spec->layers[l].sink_tokens;
	}
	return (n + 15) / 16 * 16;
}

/* Where the first block begins that some window of the layer's group reaches at these lengths. */
static uint32_t reach_begins(const struct world *world, const uint32_t *lengths, uint32_t layer)
{
	const struct kv_pool_spec *spec = world->test.pool->spec;
	uint32_t begin = UINT32_MAX;

	for (uint32_t l = 0; l < N_LAYERS; l++) {
		uint32_t length = UINT32_MAX;

		if (spec->layers[l].group_idx != spec->layers[layer].group_idx)
			continue;
		for (uint32_t i = 0; i < N_LAYERS; i++) {
			if (spec->layers[i].group_idx == spec->layers[layer].group_idx && lengths[i] < length)
				length = lengths[i];
		}
		const uint32_t back = spec->layers[l].window + 15;
		const uint32_t first =
			spec->layers[l].window == 0 || length < back ? 0 : (length - back) / 16 * 16;

		begin = first < begin ? first : begin;
	}
	return begin;
}

bool world_is_reached(const struct world *world, const struct model_sequence *model, uint32_t layer,
	uint32_t first, uint32_t end)
{
	uint32_t gone_end = reach_begins(world, model->planned, layer);

	if (model->gone_end[layer] > gone_end)
		gone_end = model->gone_end[layer];
	for (uint32_t t = first; t < end; t++) {
		if (t >= world_sinks_end(world, layer) && t < gone_end)
			return false;
	}
	return true;
}

void world_move_windows(const struct world *world, struct model_sequence *model)
{
	for (uint32_t l = 0; model->is_live && l < N_LAYERS; l++) {
		const uint32_t end = reach_begins(world, model->committed, l);

		if (end > model->gone_end[l] && end > world_sinks_end(world, l))
			model->gone_end[l] = end;
	}
}

uint32_t world_n_held(const struct world *world, const struct model_sequence *model, uint32_t layer)
{
	uint32_t n = 0;

	for (uint32_t t = 0; t < model->committed[layer]; t++)
		n += t < world_sinks_end(world, layer) || t >= model->gone_end[layer];
	return n;
}

/* ---- planning ---- */

/*
 * Blocks and sequences are counted by the domain, and those counts by the audit; the rest is the model's own.
 */
static enum kv_status expect_space(struct world *world, const struct model_session *owner,
	const struct kv_item *item, uint32_t layer_first, uint32_t n_layers)
{
	const struct kv_pool *pool = world->test.pool;
	const struct kv_sequence *sequence = kv_sequence_find(owner->session, item->sequence_id);
	uint64_t length = (uint64_t)item->position + item->n_tokens;

	if (length > owner->session->tokens_max)
		return KV_LEN_LIMIT;
	/* Cut to its beginning, and blocks behind a gap are still to be given back. */
	for (uint32_t l = layer_first; sequence && l < layer_first + n_layers; l++) {
		const uint32_t g = pool->spec->layers[l].group_idx;

		if (sequence->tables[g].gap_end > sequence->tables[g].gap_first &&
			owner->sequences[item->sequence_id]->gone_end[l] == 0)
			return KV_BUSY_RETRY;
	}
	for (uint32_t l = layer_first; l < layer_first + n_layers; l++) {
		const uint32_t g = pool->spec->layers[l].group_idx;
		const struct kv_block_counts *counts = &pool->blocks[g].counts;
		const uint32_t n_own = owner->session->n_blocks_reserved[g];
		const uint32_t n_have = sequence ? sequence->tables[g].n_blocks : 0;
		const uint32_t n_want = ((uint32_t)length + 15) / 16;

		if (n_want > n_have && n_want - n_have > counts->n_free - counts->n_reserved + n_own)
			return KV_POOL_FULL;
	}
	return KV_OK;
}

static enum kv_status expect_append(struct world *world, const struct model_session *owner,
	const struct kv_item *item, uint32_t layer_first, uint32_t n_layers, uint32_t *length)
{
	const struct model_sequence *model = owner->sequences[item->sequence_id];
	uint32_t greatest = 0;

	if (!model) {
		if (!(item->flags & KV_ITEM_CREATE))
			return KV_NOT_FOUND;
		if (owner->session->n_sequences >= owner->session->sequences_max)
			return KV_LIMIT;
		if (world->test.domain->n_sequences >= N_SEQUENCES)
			return world->test.pool->n_zombies > 0 ? KV_BUSY_RETRY : KV_LIMIT;
	}
	for (uint32_t l = 0; model && l < N_LAYERS; l++)
		greatest = model->planned[l] > greatest ? model->planned[l] : greatest;
	if (greatest > 0 && (item->flags & KV_ITEM_CREATE))
		return KV_EXISTS;
	for (uint32_t l = layer_first; l < layer_first + n_layers; l++) {
		const uint32_t planned = model ? model->planned[l] : 0;

		if (planned == item->position)
			continue;
		*length = planned;
		return KV_POSITION;
	}
	return expect_space(world, owner, item, layer_first, n_layers);
}

/* A decode sees its window back from the end of its first row. */
static enum kv_status expect_decode(const struct world *world, const struct model_sequence *model,
	const struct kv_item *item, uint32_t layer, uint32_t seen)
{
	const uint32_t own = world->test.pool->spec->layers[layer].window;
	const uint32_t asked = item->window;
	const uint32_t window = asked && (!own || asked < own) ? asked : own;
	uint32_t first = 0;

	if (item->q_len > seen && item->q_len > 1)
		return KV_BAD_ARG;
	if (window && seen + 1 > item->q_len + window)
		first = seen + 1 - item->q_len - window;
	return world_is_reached(world, model, layer, first, seen) ? KV_OK : KV_WINDOW_GONE;
}

static enum kv_status expect_other(const struct world *world, const struct model_sequence *model,
	const struct kv_item *item, uint32_t layer_first, uint32_t n_layers, uint32_t *length)
{
	if (!model)
		return KV_NOT_FOUND;
	for (uint32_t l = layer_first; l < layer_first + n_layers; l++) {
		const uint32_t end = item->kind == KV_ITEM_READ ? item->position + item->n_tokens
			: item->position == KV_LENGTH_PLANNED   ? 0
								: item->position;

		if (end <= model->planned[l])
			continue;
		*length = model->planned[l];
		return KV_POSITION;
	}
	if (item->kind == KV_ITEM_DECODE)
		return expect_decode(world, model, item, layer_first,
			item->position == KV_LENGTH_PLANNED ? model->planned[layer_first] : item->position);
	for (uint32_t l = layer_first; l < layer_first + n_layers; l++) {
		if (!world_is_reached(world, model, l, item->position, item->position + item->n_tokens))
			return KV_WINDOW_GONE;
	}
	return KV_OK;
}

enum kv_status world_expect_plan(struct world *world, const struct model_session *owner,
	const struct kv_item *item, uint32_t layer_first, uint32_t n_layers, uint32_t *length)
{
	static const struct model_sequence empty;
	const struct model_sequence *model = owner->sequences[item->sequence_id];
	enum kv_status expected;

	if (item->kind != KV_ITEM_APPEND && item->kind != KV_ITEM_APPEND_DECODE)
		return expect_other(world, model, item, layer_first, n_layers, length);
	expected = expect_append(world, owner, item, layer_first, n_layers, length);
	if (expected == KV_OK && item->kind == KV_ITEM_APPEND_DECODE)
		expected = expect_decode(
			world, model ? model : &empty, item, layer_first, item->position + item->n_tokens);
	return expected;
}
