/*
 * Blocks that an append takes: counted, weighed against quota and pool, and taken once nothing can fail any
 * more.
 */
#include "core/backend.h"
#include "core/domain.h"
#include "core/domain_internal.h"

/* New entries of one group's table, and blocks in place of those that others own, too. */
static void count_group(const struct kv_session *session, const struct kv_sequence *sequence, uint32_t g,
	struct kv_need *need)
{
	static const struct kv_block_table no_table;
	const struct kv_block_table *table = sequence ? &sequence->tables[g] : &no_table;
	const uint32_t n_own = session->n_blocks_reserved[g];

	if (need->entry_end > table->n_blocks)
		need->n_blocks[g] = need->entry_end - table->n_blocks;
	if (need->entry_first < table->n_blocks) {
		const struct kv_shared_count shared =
			kv_sequence_count_shared(sequence, g, need->entry_first, need->entry_end);

		need->n_shared[g] = shared.n_shared;
		need->n_copies += shared.n_copies;
	}

	const uint32_t n_blocks = need->n_blocks[g] + need->n_shared[g];

	need->n_reserved[g] = n_blocks < n_own ? n_blocks : n_own;
	need->n_chunks += kv_block_table_chunks_needed(table, need->n_blocks[g]);
}

/* What the append takes; returns the first group that has too little, or KV_GROUPS_MAX. */
static uint32_t count_need(const struct kv_session *session, const struct kv_sequence *sequence,
	uint32_t groups, struct kv_need *need)
{
	const struct kv_pool *pool = session->pool;
	uint32_t short_group = KV_GROUPS_MAX;

	*need = (struct kv_need){ .entry_first = need->entry_first, .entry_end = need->entry_end };
	for (uint32_t g = 0; g < pool->spec->n_groups; g++) {
		const struct kv_block_counts *counts = &pool->blocks[g].counts;

		if (!(groups & 1u << g))
			continue;
		count_group(session, sequence, g, need);
		if (need->n_blocks[g] + need->n_shared[g] - need->n_reserved[g] >
				counts->n_free - counts->n_reserved &&
			short_group == KV_GROUPS_MAX)
			short_group = g;
	}
	return short_group;
}

/* Bytes beyond the reservation, which is paid for. */
static uint64_t count_bytes(const struct kv_session *session, const struct kv_sequence *sequence,
	uint32_t groups, struct kv_need *need)
{
	const struct kv_pool_spec *spec = session->pool->spec;
	uint32_t n_new[KV_GROUPS_MAX];

	(void)count_need(session, sequence, groups, need);
	for (uint32_t g = 0; g < spec->n_groups; g++)
		n_new[g] = need->n_blocks[g] + need->n_shared[g] - need->n_reserved[g];
	return kv_reservation_bytes(spec, n_new);
}

/*
 * Asked before room is made in the pool, so that nobody loses anything to a tenant that may not have it. What
 * is evicted may have shared blocks with the sequence, which makes its need smaller.
 */
static enum kv_status check_quota(
	struct kv_session *session, const struct kv_sequence *sequence, uint32_t groups, struct kv_need *need)
{
	uint64_t n_bytes = count_bytes(session, sequence, groups, need), n_bytes_before;

	do {
		n_bytes_before = n_bytes;
		if (kv_payer_evict(session->pool, session->payer, n_bytes))
			break;
		n_bytes = count_bytes(session, sequence, groups, need);
	} while (n_bytes < n_bytes_before);
	return kv_tenant_check(
		&session->pool->domain->tenants, session->payer, KV_QUOTA_BYTES, n_bytes, NULL);
}

enum kv_status kv_sequence_check_blocks(struct kv_session *session, const struct kv_sequence *sequence,
	uint32_t layer_first, uint32_t layer_end, uint32_t position, uint32_t length, struct kv_need *need)
{
	struct kv_pool *pool = session->pool;
	const struct kv_pool_spec *spec = pool->spec;
	uint32_t groups = 0, g;

	need->entry_first = position / spec->block_size;
	need->entry_end = kv_div_up_u32(length, spec->block_size);
	for (uint32_t l = layer_first; l < layer_end; l++) {
		g = spec->layers[l].group_idx;
		groups |= 1u << g;
		/* Not even in an empty pool; what a window leaves behind comes back. */
		if (spec->group_window[g] == 0 && need->entry_end > spec->n_blocks[g])
			return KV_LIMIT;
	}
	for (g = 0; sequence && g < spec->n_groups; g++) {
		/* Cut to its beginning a moment ago: blocks behind a gap are still to be given back. */
		if ((groups & 1u << g) && kv_block_table_has_gap(&sequence->tables[g]) &&
			sequence->n_gone[g] == 0)
			return KV_BUSY_RETRY;
	}
	const enum kv_status status = check_quota(session, sequence, groups, need);

	if (status != KV_OK)
		return status;
	/* What is evicted may have shared blocks with the sequence: counted again. */
	while ((g = count_need(session, sequence, groups, need)) < KV_GROUPS_MAX) {
		if (!kv_pool_make_room(pool, g, need->n_blocks[g] + need->n_shared[g] - need->n_reserved[g]))
			return KV_POOL_FULL;
	}
	if (need->n_chunks > pool->tables.n_chunks_max - pool->tables.n_chunks_used)
		return KV_LIMIT;
	return need->n_copies <= KV_COPIES_MAX - pool->n_copies ? KV_OK : KV_BUSY_RETRY;
}

void kv_sequence_take_blocks(
	struct kv_session *session, struct kv_sequence *sequence, const struct kv_need *need)
{
	struct kv_pool *pool = session->pool;
	const uint32_t n_chunks = kv_sequence_n_chunks(sequence);

	for (uint32_t g = 0; g < pool->spec->n_groups; g++) {
		uint32_t n_left = need->n_blocks[g], n_reserved = need->n_reserved[g];

		kv_session_refund_reserved(session, g, n_reserved);
		if (need->n_shared[g] > 0) {
			const uint32_t n = need->n_shared[g] < n_reserved ? need->n_shared[g] : n_reserved;

			kv_sequence_unshare(sequence, g, need->entry_first, need->entry_end, n);
			n_reserved -= n;
		}
		while (n_left > 0) {
			kv_block_id ids[KV_CHUNK_ENTRIES];
			const uint32_t n = n_left < KV_CHUNK_ENTRIES ? n_left : KV_CHUNK_ENTRIES;
			const uint32_t n_from_reservation = n < n_reserved ? n : n_reserved;
			enum kv_status status =
				kv_block_pool_take(&pool->blocks[g], n, n_from_reservation, ids);

			KV_ASSERT(status == KV_OK);
			kv_block_pool_mark(&pool->blocks[g], ids, n, session->handle, session->payer);
			status = kv_block_table_append(
				&sequence->tables[g], &pool->tables, &pool->blocks[g], ids, n);
			KV_ASSERT(status == KV_OK);
			n_left -= n;
			n_reserved -= n_from_reservation;
		}
	}
	kv_slot_of(session)->n_chunks += kv_sequence_n_chunks(sequence) - n_chunks;
}
