/*
 * Giving blocks back in bounded steps.
 *
 * Three kinds of work wait in lists of a pool: sequences whose tables have blocks that their lengths do not
 * need or that no window reaches, zombies, and closed sessions whose sequences are no zombies yet. One unit
 * of work is one block given back or one object looked at.
 */
#include "core/domain_internal.h"

/* Cuts up to n_max blocks beyond what is needed; true when nothing is left to cut. */
static bool cut_tables(
	struct kv_sequence *sequence, const uint32_t n_needed[KV_TABLES_MAX], uint32_t n_max, uint32_t *n_cut)
{
	struct kv_pool *pool = sequence->pool;
	bool is_done = true;

	*n_cut = 0;
	for (uint32_t g = 0; g < pool->spec->n_tables; g++) {
		struct kv_block_table *table = &sequence->tables[g];

		*n_cut += kv_block_table_shrink(
			table, &pool->tables, &pool->blocks[g], n_needed[g], n_max - *n_cut);
		is_done = is_done && table->n_blocks <= n_needed[g];
	}
	return is_done;
}

/* The same for blocks that no window reaches. */
static bool open_gaps(struct kv_sequence *sequence, uint32_t n_max, uint32_t *n_freed)
{
	struct kv_pool *pool = sequence->pool;
	const struct kv_pool_spec *spec = pool->spec;
	bool is_done = true;

	*n_freed = 0;
	for (uint32_t g = 0; g < spec->n_groups; g++) {
		struct kv_block_table *table = &sequence->tables[g];

		if (sequence->n_gone[g] == 0 || sequence->residence == KV_SPILLED ||
			sequence->residence == KV_BROKEN)
			continue;
		*n_freed += kv_block_table_open_gap(table, &pool->tables, &pool->blocks[g],
			spec->group_sink_blocks[g], sequence->n_gone[g], n_max - *n_freed);
		is_done = is_done && table->gap_end >= sequence->n_gone[g];
	}
	return is_done;
}

/* Cuts a live sequence, keeping its session's sum of chunks and the list of those that wait. */
static uint32_t cut_live(struct kv_sequence *sequence, uint32_t n_max)
{
	struct kv_session_slot *slot = kv_slot_of(sequence->session);
	const uint32_t n_chunks = kv_sequence_n_chunks(sequence);
	uint32_t n_needed[KV_TABLES_MAX], n_cut, n_freed;

	kv_sequence_blocks_needed(sequence, n_needed);

	const bool is_resting = kv_list_is_linked(&sequence->in_resting);

	if (is_resting)
		kv_sequence_count_resting(sequence, false);

	const bool is_cut = cut_tables(sequence, n_needed, n_max, &n_cut);
	const bool is_done = open_gaps(sequence, n_max - n_cut, &n_freed) && is_cut;

	if (is_resting)
		kv_sequence_count_resting(sequence, true);
	/* Evicting it would give nothing. */
	if (is_resting && kv_sequence_n_blocks(sequence) == 0)
		kv_sequence_wake(sequence);

	slot->n_chunks -= n_chunks - kv_sequence_n_chunks(sequence);
	kv_list_remove(&sequence->in_surplus);
	if (!is_done)
		kv_list_push_back(&sequence->pool->surplus, &sequence->in_surplus);
	return n_cut + n_freed;
}

void kv_sequence_fit_tables(struct kv_sequence *sequence)
{
	struct kv_domain *domain = sequence->pool->domain;

	if (domain->n_cut < KV_CUT_BLOCKS_MAX)
		domain->n_cut += cut_live(sequence, KV_CUT_BLOCKS_MAX - domain->n_cut);
	else
		cut_live(sequence, 0);
}

/* Takes a zombie apart; what is left of it waits for its items. */
static uint32_t release_zombie(struct kv_sequence *sequence, uint32_t n_max)
{
	static const uint32_t n_needed[KV_TABLES_MAX];
	struct kv_pool *pool = sequence->pool;
	uint32_t n_cut;

	if (!cut_tables(sequence, n_needed, n_max, &n_cut))
		return n_cut;
	if (sequence->n_items == 0) {
		kv_sequence_recycle(sequence);
	} else {
		kv_list_remove(&sequence->in_session);
		kv_list_push_back(&pool->waiting, &sequence->in_session);
	}
	return n_cut;
}

/* Makes one zombie out of a closing session. */
static void bury_one(struct kv_domain *domain, struct kv_session *session)
{
	kv_sequence_bury(kv_container_of(kv_list_first(&session->sequences), struct kv_sequence, in_session));
	if (!kv_list_is_empty(&session->sequences))
		return;
	kv_list_remove(&session->in_pool);
	domain->n_closing--;
	kv_session_slot_free(domain, kv_slot_of(session));
}

/* One step of the pool's oldest work; false when there is none. */
static bool release_step(struct kv_pool *pool, uint32_t n_max, uint32_t *n_cut)
{
	struct kv_list_node *node = kv_list_first(&pool->surplus);

	*n_cut = 0;
	if (node) {
		struct kv_sequence *sequence = kv_container_of(node, struct kv_sequence, in_surplus);

		/* One of a closing session will be taken apart as a zombie. */
		if (kv_sequence_is_live(sequence))
			*n_cut = cut_live(sequence, n_max);
		else
			kv_list_remove(node);
		return true;
	}
	node = kv_list_first(&pool->zombies);
	if (node) {
		*n_cut = release_zombie(kv_container_of(node, struct kv_sequence, in_session), n_max);
		return true;
	}
	node = kv_list_first(&pool->closing);
	if (node) {
		bury_one(pool->domain, kv_container_of(node, struct kv_session, in_pool));
		return true;
	}
	return false;
}

uint32_t kv_domain_release(struct kv_domain *domain, uint32_t n_blocks_max)
{
	for (uint32_t i = 0; i < domain->n_pools; i++)
		kv_pool_keep_room(domain->pools[i]);

	const uint32_t n_cut_before = domain->n_cut < n_blocks_max ? domain->n_cut : n_blocks_max;
	const uint32_t n_max = n_blocks_max - n_cut_before;
	const uint32_t first = domain->release_turn++;
	uint32_t n_work = 0, n_given = 0;

	domain->n_cut -= n_cut_before;
	domain->n_forked = 0;
	for (uint32_t i = 0; i < domain->n_pools; i++) {
		struct kv_pool *pool = domain->pools[(first + i) % domain->n_pools];
		uint32_t n_cut;

		while (n_work < n_max && release_step(pool, n_max - n_work, &n_cut)) {
			n_given += n_cut;
			n_work += n_cut > 0 ? n_cut : 1;
		}
	}
	return n_given;
}

bool kv_domain_has_zombies(const struct kv_domain *domain)
{
	for (uint32_t i = 0; i < domain->n_pools; i++) {
		const struct kv_pool *pool = domain->pools[i];

		if (!kv_list_is_empty(&pool->zombies) || !kv_list_is_empty(&pool->closing) ||
			!kv_list_is_empty(&pool->surplus))
			return true;
	}
	return false;
}
