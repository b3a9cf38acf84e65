/*
 * Ring slots and tables of the exact window, and which items may share a batch: its updates come before its
 * decodes and may run at the same time, so an append must not take places that the batch reads or writes.
 */
#include "core/checked.h"
#include "core/plan_internal.h"

/* The ring's blocks for n blocks of tokens from `first` on. */
static void copy_ring(
	const struct kv_plan *plan, const struct kv_item *item, uint32_t first, uint32_t n, uint32_t out[])
{
	const struct kv_pool *pool = plan->pool;
	const uint32_t n_ring = pool->spec->exact_tokens / pool->spec->block_size;

	for (uint32_t i = 0; i < n; i++)
		kv_block_table_copy(&item->sequence->tables[pool->spec->n_groups], &pool->tables,
			(first + i) % n_ring, 1, &out[i]);
}

/* Ring slots of the item's tokens from item->exact_lo on; NULL: there are none. */
const int64_t *kv_plan_add_exact_slots(struct kv_plan *plan, const struct kv_item *item)
{
	const uint32_t block_size = plan->pool->spec->block_size;
	const uint32_t end = item->position + item->n_tokens;
	int64_t *slots;

	if (item->exact_lo >= end)
		return NULL;
	slots = kv_plan_take_part(plan, item->n_tokens, sizeof(slots[0]));
	for (uint32_t t = item->position; t < end;) {
		const uint32_t left = block_size - t % block_size;
		const uint32_t n = end - t < left ? end - t : left;
		uint32_t block = KV_BLOCK_NONE;

		if (t + n > item->exact_lo)
			copy_ring(plan, item, t / block_size, 1, &block);
		for (uint32_t i = 0; i < n; i++, t++)
			slots[t - item->position] =
				t < item->exact_lo ? -1 : (int64_t)block * block_size + t % block_size;
	}
	return slots;
}

const uint32_t *kv_plan_add_exact_table(struct kv_plan *plan, const struct kv_item *item)
{
	const uint32_t block_size = plan->pool->spec->block_size;
	const uint32_t first = item->exact_lo / block_size;
	uint32_t *table;

	if (item->exact_lo >= item->seen)
		return NULL;
	table = kv_plan_take_part(plan, kv_div_up_u32(item->seen, block_size) - first, sizeof(table[0]));
	copy_ring(plan, item, first, kv_div_up_u32(item->seen, block_size) - first, table);
	return table;
}

/*
 * The first token in whose place of the ring the item reads or writes; UINT32_MAX: none. Appends write at
 * most exact_tokens from their end back.
 */
static uint32_t exact_first(const struct kv_item *item)
{
	return item->exact_lo < item->seen ? item->exact_lo : UINT32_MAX;
}

/* True when the append would take places of tokens that this batch still reads, or writes at the same time.
 */
bool kv_plan_overwrites_exact(const struct kv_plan *plan, const struct kv_item *item)
{
	const uint32_t n_ring = plan->pool->spec->exact_tokens;

	return n_ring > 0 && (item->kind == KV_ITEM_APPEND || item->kind == KV_ITEM_APPEND_DECODE) &&
		exact_first(item) != UINT32_MAX && item->sequence->plan_serial == plan->serial &&
		item->seen > n_ring && item->sequence->plan_exact_lo < item->seen - n_ring;
}

void kv_plan_note_exact(const struct kv_plan *plan, const struct kv_item *item)
{
	struct kv_sequence *sequence = item->sequence;

	if (plan->pool->spec->exact_tokens == 0)
		return;
	if (sequence->plan_serial != plan->serial)
		sequence->plan_exact_lo = UINT32_MAX;
	sequence->plan_serial = plan->serial;
	if (exact_first(item) < sequence->plan_exact_lo)
		sequence->plan_exact_lo = exact_first(item);
}
