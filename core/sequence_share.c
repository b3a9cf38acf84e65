/*
 * Blocks with several owners: FORK, and leaving a shared block before it is written.
 *
 * A block with more than one owner is never written. An append that would write into one gets a new block
 * instead, and where the old one holds rows of the sequence, a copy is ordered (pool->copies). Copies are the
 * first work of the next batch of the pool, whatever becomes of the append, so every batch from then on may
 * read the new block. Until then the copy owns its source, so that the last other owner cannot write into it,
 * and holds its destination in flight, so that nobody else gets it.
 */
#include "core/backend.h"
#include "core/domain.h"
#include "core/domain_internal.h"

/* ---- writing into shared blocks ---- */

static uint32_t longest_in_group(const struct kv_sequence *sequence, uint32_t group_idx)
{
	const struct kv_pool_spec *spec = sequence->pool->spec;
	uint32_t longest = 0;

	for (uint32_t l = 0; l < spec->n_layers; l++) {
		if (spec->layers[l].group_idx == group_idx && sequence->planned[l] > longest)
			longest = sequence->planned[l];
	}
	return longest;
}

/* Up to KV_CHUNK_ENTRIES entries from `first` on; returns how many of [first, end) the table has. */
static uint32_t copy_entries(const struct kv_sequence *sequence, uint32_t group_idx, uint32_t first,
	uint32_t end, uint32_t entries[KV_CHUNK_ENTRIES])
{
	const struct kv_block_table *table = &sequence->tables[group_idx];
	const uint32_t last = end < table->n_blocks ? end : table->n_blocks;
	uint32_t n = first < last ? last - first : 0;

	if (n > KV_CHUNK_ENTRIES)
		n = KV_CHUNK_ENTRIES;
	kv_block_table_copy(table, &sequence->pool->tables, first, n, entries);
	return n;
}

struct kv_shared_count kv_sequence_count_shared(
	const struct kv_sequence *sequence, uint32_t group_idx, uint32_t first, uint32_t end)
{
	const uint32_t *owners = sequence->pool->blocks[group_idx].owners;
	const uint32_t block_size = sequence->pool->spec->block_size;
	uint32_t entries[KV_CHUNK_ENTRIES], n;
	struct kv_shared_count count = { 0, 0 };

	while ((n = copy_entries(sequence, group_idx, first, end, entries)) > 0) {
		for (uint32_t i = 0; i < n; i++) {
			if (owners[entries[i]] < 2)
				continue;
			count.n_shared++;
			if (longest_in_group(sequence, group_idx) > (first + i) * block_size)
				count.n_copies++;
		}
		first += n;
	}
	return count;
}

static void order_copy(struct kv_pool *pool, uint32_t group_idx, uint32_t block_from, uint32_t block_to)
{
	KV_ASSERT(pool->n_copies < KV_COPIES_MAX);
	pool->copies[pool->n_copies++] = (struct kv_copy_op){ group_idx, block_from, block_to };
	kv_block_pool_flight_begin(&pool->blocks[group_idx], (kv_block_id){ block_to });
}

void kv_sequence_unshare(struct kv_sequence *sequence, uint32_t group_idx, uint32_t first, uint32_t end,
	uint32_t n_from_reservation)
{
	struct kv_pool *pool = sequence->pool;
	struct kv_block_pool *blocks = &pool->blocks[group_idx];
	const uint32_t longest = longest_in_group(sequence, group_idx);
	uint32_t entries[KV_CHUNK_ENTRIES], n;

	while ((n = copy_entries(sequence, group_idx, first, end, entries)) > 0) {
		for (uint32_t i = 0; i < n; i++) {
			const kv_block_id old = { entries[i] };
			kv_block_id new;

			if (blocks->owners[old.idx] < 2)
				continue;

			const enum kv_status status =
				kv_block_pool_take(blocks, 1, n_from_reservation > 0 ? 1 : 0, &new);

			KV_ASSERT(status == KV_OK);
			kv_block_pool_mark(
				blocks, &new, 1, sequence->session->handle, sequence->session->payer);
			n_from_reservation -= n_from_reservation > 0;
			kv_block_table_replace(
				&sequence->tables[group_idx], &pool->tables, blocks, first + i, new);
			/* The copy takes the entry's share of the old block over. */
			if (longest > (first + i) * pool->spec->block_size)
				order_copy(pool, group_idx, old.idx, new.idx);
			else
				kv_block_pool_disown(blocks, old);
		}
		first += n;
	}
}

/* ---- FORK ---- */

/* What is gone of a copy that ends at `length`: as with the parent, unless it ends before. */
static uint32_t gone_at(const struct kv_sequence *parent, uint32_t group_idx, uint32_t length)
{
	const uint64_t gone_end = (uint64_t)parent->n_gone[group_idx] * parent->pool->spec->block_size;

	return length > gone_end ? parent->n_gone[group_idx] : 0;
}

enum kv_status kv_sequence_check_table(const struct kv_session *session, uint32_t n_entries)
{
	const struct kv_pool *pool = session->pool;
	const uint64_t n_chunks = (uint64_t)kv_div_up_u32(n_entries, KV_CHUNK_ENTRIES) * pool->spec->n_groups;
	const enum kv_status status = kv_sequence_check_new(session);

	if (status != KV_OK)
		return status;
	return n_chunks <= pool->tables.n_chunks_max - pool->tables.n_chunks_used ? KV_OK : KV_LIMIT;
}

static enum kv_status check_fork(struct kv_session *session, uint64_t child_id,
	const struct kv_sequence *parent, uint32_t length, uint32_t *expected)
{
	const struct kv_pool *pool = session->pool;
	const uint32_t n_blocks = kv_div_up_u32(length, pool->spec->block_size);
	uint64_t n_chunks = 0;
	const uint32_t planned = kv_least_length(parent->planned, 0, pool->spec->n_layers);

	if (parent->is_evicted)
		return KV_EVICTED;
	if (kv_sequence_find(session, child_id))
		return KV_EXISTS;
	if (length > planned) {
		*expected = planned;
		return KV_POSITION;
	}

	enum kv_status status = kv_sequence_check_cut(parent, length);

	if (status == KV_OK)
		status = kv_sequence_check_new(session);
	if (status == KV_OK)
		status = kv_sequence_check_tokens(session, NULL, length);
	if (status != KV_OK)
		return status;
	for (uint32_t g = 0; g < pool->spec->n_groups; g++)
		n_chunks += kv_block_table_chunks_shared(
			pool->spec->group_sink_blocks[g], gone_at(parent, g, length), n_blocks);
	if (n_chunks > pool->tables.n_chunks_max - pool->tables.n_chunks_used)
		return KV_LIMIT;
	return pool->domain->n_forked < KV_FORK_ENTRIES_MAX ? KV_OK : KV_BUSY_RETRY;
}

void kv_sequence_inherit(struct kv_sequence *sequence, uint32_t length, bool is_evictable)
{
	struct kv_pool *pool = sequence->pool;
	struct kv_session_slot *slot = kv_slot_of(sequence->session);

	for (uint32_t l = 0; l < pool->spec->n_layers; l++) {
		sequence->planned[l] = sequence->committed[l] = length;
		slot->layer_tokens[l] += kv_sequence_n_held(sequence, l);
		pool->layer_tokens[l] += kv_sequence_n_held(sequence, l);
	}
	slot->n_tokens_committed += length;
	pool->n_tokens_committed += length;
	kv_sequence_charge(sequence);
	slot->n_chunks += kv_sequence_n_chunks(sequence);
	sequence->is_evictable = is_evictable;
	kv_sequence_rest(sequence);
}

enum kv_status kv_sequence_fork(struct kv_session *session, uint64_t child_id, uint64_t parent_id,
	uint32_t length, uint64_t now_ns, uint32_t *expected)
{
	struct kv_sequence *parent = kv_sequence_find(session, parent_id);
	struct kv_pool *pool = session->pool;

	if (child_id == 0 || child_id == parent_id)
		return KV_BAD_ARG;
	if (!parent)
		return KV_NOT_FOUND;
	enum kv_status status = kv_sequence_check_residence(parent, true);

	if (status != KV_OK)
		return status;
	KV_ASSERT(parent->n_items == 0);
	if (length == KV_LENGTH_PLANNED)
		length = kv_least_length(parent->planned, 0, pool->spec->n_layers);

	status = check_fork(session, child_id, parent, length, expected);

	if (status != KV_OK)
		return status;

	struct kv_sequence *child = kv_sequence_add(session, child_id, now_ns);
	const uint32_t n_blocks = kv_div_up_u32(length, pool->spec->block_size);

	for (uint32_t g = 0; g < pool->spec->n_groups; g++) {
		child->n_gone[g] = gone_at(parent, g, length);
		kv_block_table_share(&child->tables[g], &parent->tables[g], &pool->tables, &pool->blocks[g],
			pool->spec->group_sink_blocks[g], child->n_gone[g], n_blocks);
		pool->domain->n_forked += kv_block_table_n_owned(&child->tables[g]);
	}
	kv_sequence_inherit(child, length, parent->is_evictable);
	parent->used_ns = now_ns;
	kv_sequence_rest(parent);
	return KV_OK;
}
