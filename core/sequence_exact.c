/*
 * The exact window of a sequence (FORMATS 5.5): which of its newest tokens are in ring blocks as well.
 *
 * Token t has its place in entry t / block_size mod exact_tokens / block_size of the ring's table. Per layer
 * the tokens [planned - exact, planned) are held, exact <= exact_tokens. That is counted when rows are
 * planned: planned rows take the places of older ones whatever becomes of them, so falling back and cutting
 * only take from the end of what is held. A sequence that finds no free ring block goes on without: nothing
 * depends on the ring. Packed rows came without their numbers and are never exact.
 */
#include "core/domain_internal.h"

uint64_t kv_sequence_n_exact(const struct kv_sequence *sequence, uint32_t layer)
{
	const uint32_t n_pending = sequence->planned[layer] - sequence->committed[layer];

	if (sequence->residence != KV_RESIDENT && sequence->residence != KV_SPILLING)
		return 0;
	return sequence->exact[layer] > n_pending ? sequence->exact[layer] - n_pending : 0;
}

uint64_t kv_sequence_n_exact_rows(const struct kv_sequence *sequence)
{
	const struct kv_pool_spec *spec = sequence->pool->spec;
	uint64_t n = 0;

	for (uint32_t l = 0; l < spec->n_layers && spec->exact_tokens > 0; l++)
		n += kv_sequence_n_exact(sequence, l);
	return n;
}

void kv_sequence_count_exact(struct kv_sequence *sequence, uint64_t n_rows_before)
{
	const uint64_t n_rows = kv_sequence_n_exact_rows(sequence);

	/* Unsigned: the difference may be below 0. */
	kv_slot_of(sequence->session)->n_exact_rows += n_rows - n_rows_before;
	sequence->pool->n_exact_rows += n_rows - n_rows_before;
}

uint32_t kv_sequence_n_exact_least(const struct kv_sequence *sequence)
{
	const uint32_t n_layers = sequence->pool->spec->n_layers;
	uint32_t lo = 0;
	uint32_t length_min, length_max;

	kv_sequence_lengths(sequence, &length_min, &length_max);
	for (uint32_t l = 0; l < n_layers; l++) {
		const uint32_t first = sequence->planned[l] - sequence->exact[l];

		lo = first > lo ? first : lo;
	}
	return length_min > lo ? length_min - lo : 0;
}

uint32_t kv_exact_entries(const struct kv_pool_spec *spec, uint32_t length)
{
	const uint32_t n_all = spec->exact_tokens / spec->block_size;
	const uint32_t n = kv_div_up_u32(length, spec->block_size);

	return n < n_all ? n : n_all;
}

uint32_t kv_sequence_ring_entries(const struct kv_sequence *sequence)
{
	const struct kv_pool_spec *spec = sequence->pool->spec;
	const uint32_t n_all = spec->exact_tokens / spec->block_size;
	uint32_t n = 0;

	for (uint32_t l = 0; l < spec->n_layers; l++) {
		const uint32_t length = sequence->planned[l];

		if (sequence->exact[l] == 0)
			continue;
		const uint32_t first = (length - sequence->exact[l]) / spec->block_size;
		const uint32_t last = (length - 1) / spec->block_size;
		const uint32_t n_here = first / n_all == last / n_all ? last % n_all + 1 : n_all;

		n = n_here > n ? n_here : n;
	}
	return n;
}

/* As many ring blocks as there are, up to what the length needs. */
static void grow_ring(struct kv_sequence *sequence, uint32_t length)
{
	struct kv_pool *pool = sequence->pool;
	struct kv_block_table *table = &sequence->tables[pool->spec->n_groups];
	struct kv_block_pool *blocks = &pool->blocks[pool->spec->n_groups];
	const uint32_t n_needed = kv_exact_entries(pool->spec, length);
	const uint32_t n_chunks = kv_block_table_n_chunks(table);
	const struct kv_session *session = sequence->session;

	while (table->n_blocks < n_needed) {
		kv_block_id id;

		if (kv_block_table_chunks_needed(table, 1) >
				pool->tables.n_chunks_max - pool->tables.n_chunks_used ||
			!kv_tenant_has_room(
				blocks->tenants, session->payer, KV_QUOTA_BYTES, blocks->block_bytes) ||
			kv_block_pool_take(blocks, 1, 0, &id) != KV_OK)
			break;
		kv_block_pool_mark(blocks, &id, 1, session->handle, session->payer);

		const enum kv_status status = kv_block_table_append(table, &pool->tables, blocks, &id, 1);

		KV_ASSERT(status == KV_OK);
	}
	kv_slot_of(sequence->session)->n_chunks += kv_block_table_n_chunks(table) - n_chunks;
}

/* The first of tokens [position, end) behind which all have a place, and none takes the place of another. */
static uint32_t first_held(const struct kv_sequence *sequence, uint32_t position, uint32_t end)
{
	const struct kv_pool_spec *spec = sequence->pool->spec;
	const uint32_t n_held = sequence->tables[spec->n_groups].n_blocks * spec->block_size;
	const uint32_t last = (end - 1) % spec->exact_tokens; /* place of the last token */
	uint32_t first = end > spec->exact_tokens ? end - spec->exact_tokens : 0;

	if (last >= n_held)
		first = end; /* nor has the last one a place */
	else if (n_held < spec->exact_tokens && end - 1 - last > first)
		first = end - 1 - last; /* what comes before place 0 has none */
	return first > position ? first : position;
}

bool kv_sequence_restore_exact(
	struct kv_sequence *sequence, uint32_t layer_first, uint32_t n_layers, uint32_t n_tokens)
{
	const uint32_t length = sequence->committed[layer_first];

	grow_ring(sequence, length);
	if (first_held(sequence, length - n_tokens, length) > length - n_tokens)
		return false;
	for (uint32_t l = layer_first; l < layer_first + n_layers; l++)
		sequence->exact[l] = n_tokens;
	kv_slot_of(sequence->session)->n_exact_rows += (uint64_t)n_layers * n_tokens;
	return true;
}

void kv_sequence_plan_exact(
	struct kv_sequence *sequence, struct kv_item *item, uint32_t layer_first, uint32_t n_layers)
{
	const uint32_t n_ring = sequence->pool->spec->exact_tokens;
	uint32_t first;

	if (n_ring == 0)
		return;
	if (!(item->flags & KV_ITEM_PACKED))
		grow_ring(sequence, item->seen);
	first = item->flags & KV_ITEM_PACKED ? item->seen : first_held(sequence, item->position, item->seen);
	for (uint32_t l = layer_first; l < layer_first + n_layers; l++) {
		const uint32_t n = sequence->exact[l] + item->n_tokens;

		sequence->exact[l] = first > item->position ? item->seen - first : n < n_ring ? n : n_ring;
	}
	item->exact_lo =
		item->kind == KV_ITEM_APPEND_DECODE ? item->seen - sequence->exact[layer_first] : first;
}

void kv_sequence_see_exact(
	const struct kv_sequence *sequence, struct kv_item *item, uint32_t layer_first, uint32_t n_layers)
{
	if (sequence->pool->spec->exact_tokens == 0 ||
		(item->kind == KV_ITEM_READ && !(item->flags & KV_ITEM_EXACT)))
		return;
	item->exact_lo = 0;
	for (uint32_t l = layer_first; l < layer_first + n_layers; l++) {
		const uint32_t lo = sequence->planned[l] - sequence->exact[l];

		item->exact_lo = lo > item->exact_lo ? lo : item->exact_lo;
	}
}

void kv_sequence_cut_exact(struct kv_sequence *sequence, uint32_t layer, uint32_t n_tokens)
{
	const uint32_t n = sequence->exact[layer];

	sequence->exact[layer] = n > n_tokens ? n - n_tokens : 0;
}
