/*
 * Making room: published prefixes that nobody uses first, then sequences that were created EVICTABLE and that
 * no planned item names, the one that was used longest ago first. Both are in order of going idle, so nothing
 * is searched; how much goes between two calls of kv_domain_release() is bounded.
 */
#include "core/domain_internal.h"
#include "core/prefix_internal.h"

/* ---- sequences at rest ---- */

void kv_sequence_count_resting(const struct kv_sequence *sequence, bool is_added)
{
	for (uint32_t g = 0; g < sequence->pool->spec->n_tables; g++) {
		const uint32_t n = kv_block_table_n_owned(&sequence->tables[g]);

		sequence->pool->n_resting_entries[g] += is_added ? n : -n;
	}
}

void kv_sequence_wake(struct kv_sequence *sequence)
{
	if (!kv_list_is_linked(&sequence->in_resting))
		return;
	kv_list_remove(&sequence->in_resting);
	kv_sequence_count_resting(sequence, false);
}

void kv_sequence_rest(struct kv_sequence *sequence)
{
	kv_sequence_wake(sequence);
	if (!sequence->is_evictable || sequence->n_items > 0 || sequence->n_pins > 0 ||
		!kv_sequence_is_live(sequence) || sequence->residence != KV_RESIDENT ||
		kv_sequence_n_blocks(sequence) == 0)
		return;
	kv_list_push_back(&sequence->pool->resting, &sequence->in_resting);
	kv_sequence_count_resting(sequence, true);
}

/* ---- pins ---- */

/* Walks along its tables, within the bound of FORK; false: not in this turn. */
static bool set_pinned(struct kv_sequence *sequence, bool is_pinned)
{
	struct kv_pool *pool = sequence->pool;

	if (pool->domain->n_forked >= KV_FORK_ENTRIES_MAX)
		return false;
	for (uint32_t g = 0; g < pool->spec->n_tables; g++) {
		kv_block_table_pin(&sequence->tables[g], &pool->tables, &pool->blocks[g], is_pinned);
		pool->domain->n_forked += kv_block_table_n_owned(&sequence->tables[g]);
	}
	return true;
}

enum kv_status kv_sequence_pin(struct kv_session *session, uint64_t sequence_id)
{
	struct kv_sequence *sequence = kv_sequence_find(session, sequence_id);

	if (!sequence)
		return KV_NOT_FOUND;
	if (sequence->is_evicted)
		return KV_EVICTED;
	if (sequence->n_pins == UINT32_MAX)
		return KV_LIMIT;
	if (sequence->n_pins == 0 && !set_pinned(sequence, true))
		return KV_BUSY_RETRY;
	sequence->n_pins++;
	kv_sequence_wake(sequence);
	return KV_OK;
}

enum kv_status kv_sequence_unpin(struct kv_session *session, uint64_t sequence_id)
{
	struct kv_sequence *sequence = kv_sequence_find(session, sequence_id);

	if (!sequence)
		return KV_NOT_FOUND;
	if (sequence->n_pins == 0)
		return KV_BAD_STATE;
	if (sequence->n_pins == 1 && !set_pinned(sequence, false))
		return KV_BUSY_RETRY;
	if (--sequence->n_pins == 0)
		kv_sequence_rest(sequence);
	return KV_OK;
}

/* ---- making room ---- */

static uint32_t n_available(const struct kv_pool *pool, uint32_t group_idx)
{
	const struct kv_block_counts *counts = &pool->blocks[group_idx].counts;

	return counts->n_free - counts->n_reserved;
}

/* False: there is nothing to evict, or this turn's bound is reached. */
static bool evict_one(struct kv_pool *pool, uint32_t group_idx)
{
	struct kv_domain *domain = pool->domain;
	struct kv_list_node *node;
	uint32_t n_nodes;

	if (domain->n_cut >= KV_EVICT_BLOCKS_MAX)
		return false;
	if (kv_prefix_evict(pool, group_idx, &n_nodes)) {
		domain->n_cut += n_nodes * pool->spec->n_groups;
		return true;
	}
	while ((node = kv_list_first(&pool->resting))) {
		struct kv_sequence *sequence = kv_container_of(node, struct kv_sequence, in_resting);

		if (kv_sequence_is_live(sequence)) {
			kv_sequence_evict(sequence);
			return true;
		}
		kv_sequence_wake(sequence); /* its session is closed: it goes anyway */
	}
	return false;
}

bool kv_pool_make_room(struct kv_pool *pool, uint32_t group_idx, uint32_t n_blocks)
{
	const uint64_t n_most = (uint64_t)n_available(pool, group_idx) +
		pool->blocks[group_idx].counts.n_idle + pool->n_resting_entries[group_idx];

	/* What cannot succeed costs nobody anything. */
	if (n_blocks > n_most)
		return false;
	while (n_available(pool, group_idx) < n_blocks) {
		if (!evict_one(pool, group_idx))
			return false;
	}
	return true;
}

enum kv_status kv_pool_make_room_idle(struct kv_pool *pool, uint32_t group_idx)
{
	struct kv_domain *domain = pool->domain;
	uint32_t n_nodes;

	while (n_available(pool, group_idx) == 0) {
		if (pool->blocks[group_idx].counts.n_idle == 0)
			return KV_POOL_FULL;
		if (domain->n_cut >= KV_EVICT_BLOCKS_MAX || !kv_prefix_evict(pool, group_idx, &n_nodes))
			return KV_BUSY_RETRY;
		domain->n_cut += n_nodes * pool->spec->n_groups;
	}
	return KV_OK;
}

void kv_pool_keep_room(struct kv_pool *pool)
{
	for (uint32_t g = 0; g < pool->spec->n_groups; g++) {
		const struct kv_block_counts *counts = &pool->blocks[g].counts;
		const uint32_t n_used = counts->n_total - counts->n_free;

		if (n_used > pool->evict_high_blocks[g])
			pool->is_evicting[g] = true;
		while (pool->is_evicting[g]) {
			if (counts->n_total - counts->n_free <= pool->evict_low_blocks[g])
				pool->is_evicting[g] = false;
			else if (!evict_one(pool, g))
				break;
		}
		/* Nothing left to evict: the next time somebody goes idle is soon enough. */
		if (counts->n_idle == 0 && kv_list_is_empty(&pool->resting))
			pool->is_evicting[g] = false;
	}
}
