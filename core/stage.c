#include "core/stage.h"

#include <string.h>

#include "core/memory.h"
#include "core/stage_internal.h"

/* ---- life ---- */

static uint32_t layers_in(const struct kv_pool_spec *spec, uint32_t g)
{
	uint32_t n = 0;

	for (uint32_t l = 0; l < spec->n_layers; l++)
		n += spec->layers[l].group_idx == g;
	return n;
}

static bool take_memory(struct kv_stage *stage)
{
	const struct kv_domain *domain = stage->domain;
	bool is_whole = true;

	for (uint32_t i = 0; i < domain->n_pools; i++) {
		const struct kv_pool *pool = domain->pools[i];

		is_whole = kv_stage_nodes_init(&stage->nodes[pool->pool_idx], pool) && is_whole;
		for (uint32_t g = 0; g < pool->spec->n_groups; g++) {
			struct kv_staged_blocks *blocks = &stage->blocks[pool->pool_idx][g];

			blocks->n_blocks = pool->spec->n_blocks[g];
			blocks->n_layers = layers_in(pool->spec, g);
			blocks->ids = kv_pages_alloc(sizeof(uint32_t) * (uint64_t)blocks->n_blocks);
			blocks->n_rows = kv_pages_alloc((uint64_t)blocks->n_blocks * blocks->n_layers);
			blocks->is_partial = kv_pages_alloc(blocks->n_blocks);
			is_whole = is_whole && blocks->ids && blocks->n_rows && blocks->is_partial;
		}
	}
	return is_whole;
}

static void return_memory(struct kv_stage *stage)
{
	for (uint32_t i = 0; i < KV_POOLS_MAX; i++) {
		kv_stage_nodes_finish(&stage->nodes[i]);
		for (uint32_t g = 0; g < KV_GROUPS_MAX; g++) {
			struct kv_staged_blocks *blocks = &stage->blocks[i][g];

			kv_pages_free(blocks->ids, sizeof(uint32_t) * (uint64_t)blocks->n_blocks);
			kv_pages_free(blocks->n_rows, (uint64_t)blocks->n_blocks * blocks->n_layers);
			kv_pages_free(blocks->is_partial, blocks->n_blocks);
		}
	}
}

enum kv_status kv_stage_create(struct kv_domain *domain, struct kv_stage **out, struct kv_error *err)
{
	struct kv_stage *stage = kv_alloc(1, sizeof(*stage));

	KV_ASSERT(domain->stage == NULL);
	if (!stage)
		return kv_fail(err, KV_NO_MEMORY, "restoring");
	stage->domain = domain;
	kv_list_init(&stage->sessions);
	if (!take_memory(stage)) {
		return_memory(stage);
		kv_free(stage);
		return kv_fail(err, KV_NO_MEMORY, "restoring: numbers of blocks");
	}
	domain->stage = stage;
	*out = stage;
	return KV_OK;
}

/* Blocks that came after the last table: those of one sequence at most. */
static void drop_blocks(struct kv_stage *stage)
{
	for (uint32_t i = 0; i < stage->domain->n_pools; i++) {
		struct kv_pool *pool = stage->domain->pools[i];

		for (uint32_t g = 0; g < pool->spec->n_groups; g++) {
			struct kv_staged_blocks *blocks = &stage->blocks[pool->pool_idx][g];

			for (uint32_t n = 0; n < blocks->n_numbers && blocks->n_adopted < blocks->n_numbers;
				n++) {
				if (blocks->ids[n] & KV_STAGE_ADOPTED)
					continue;
				kv_block_pool_disown(&pool->blocks[g], (kv_block_id){ blocks->ids[n] });
				blocks->n_adopted++;
			}
		}
	}
}

void kv_stage_destroy(struct kv_stage *stage)
{
	if (!stage)
		return;
	(void)kv_stage_settle(stage, 0, UINT32_MAX);
	drop_blocks(stage);
	kv_list_for_each_safe (node, &stage->sessions)
		kv_session_unstage(stage->domain, kv_container_of(node, struct kv_session, in_pool));
	stage->domain->stage = NULL;
	return_memory(stage);
	kv_free(stage);
}

/* ---- sessions and blocks ---- */

/* The sequence before is complete: its tables have what it announced. */
static enum kv_status check_complete(const struct kv_stage *stage, struct kv_error *err)
{
	const struct kv_sequence *sequence = stage->sequence;

	if (!sequence)
		return KV_OK;
	for (uint32_t g = 0; g < sequence->pool->spec->n_groups; g++) {
		if (sequence->tables[g].n_blocks != stage->n_entries[g])
			return kv_fail(err, KV_CORRUPT,
				"sequence %llu: the table of group %u has %u entries, %u were announced",
				(unsigned long long)sequence->id, g, sequence->tables[g].n_blocks,
				stage->n_entries[g]);
	}
	return KV_OK;
}

enum kv_status kv_stage_session(
	struct kv_stage *stage, const struct kv_staged_session *staged, uint64_t now_ns, struct kv_error *err)
{
	const struct kv_open_params *open = &staged->open;
	enum kv_status status = check_complete(stage, err);

	if (status != KV_OK)
		return status;
	if (open->name_bytes == 0 || open->name_bytes > KV_SESSION_NAME_BYTES_MAX)
		return kv_fail(err, KV_CORRUPT, "a session name of %u bytes", open->name_bytes);
	kv_list_for_each (node, &stage->sessions) {
		const struct kv_session *other = kv_container_of(node, struct kv_session, in_pool);

		if (other->tenant == open->tenant && strlen(other->name) == open->name_bytes &&
			memcmp(other->name, open->name, open->name_bytes) == 0)
			return kv_fail(err, KV_CORRUPT, "session \"%s\" comes twice", other->name);
	}
	status = kv_payer_make_room(open->pool, kv_tenant_make(&stage->domain->tenants, open->tenant),
		kv_reservation_bytes(open->pool->spec, staged->reserved_blocks), err);
	if (status == KV_OK)
		status = kv_session_stage(stage->domain, open, now_ns, &stage->session, err);
	if (status != KV_OK)
		return status;

	struct kv_session *session = stage->session;

	for (uint32_t g = 0; g < session->pool->spec->n_groups; g++)
		session->n_blocks_reserved[g] = staged->reserved_blocks[g];
	kv_tenant_charge(&stage->domain->tenants, session->payer, KV_QUOTA_BYTES,
		kv_reservation_bytes(session->pool->spec, session->n_blocks_reserved));
	session->lease_end_ns = staged->lease_left_ns; /* until commit: how much is left */
	session->n_rows_in = staged->n_rows_in;
	session->n_rows_out = staged->n_rows_out;
	session->n_queries = staged->n_queries;
	kv_list_push_back(&stage->sessions, &session->in_pool);
	stage->n_sessions++;
	stage->sequence = NULL;
	return KV_OK;
}

enum kv_status kv_stage_block(struct kv_stage *stage, struct kv_pool *pool, uint32_t group_idx,
	uint32_t number, const uint8_t n_rows[], uint32_t *block_idx, struct kv_error *err)
{
	const uint32_t block_size = pool->spec->block_size;

	if (group_idx >= pool->spec->n_groups)
		return kv_fail(err, KV_CORRUPT, "a block of group %u, there are %u", group_idx,
			pool->spec->n_groups);

	struct kv_staged_blocks *blocks = &stage->blocks[pool->pool_idx][group_idx];
	kv_block_id id;

	if (number != blocks->n_numbers)
		return kv_fail(err, KV_CORRUPT, "block %u comes where %u is next", number, blocks->n_numbers);
	for (uint32_t l = 0; l < blocks->n_layers; l++) {
		if (n_rows[l] > block_size)
			return kv_fail(err, KV_CORRUPT, "block %u: %u rows on a layer", number, n_rows[l]);
	}
	if (number < blocks->n_blocks && kv_pool_make_room_idle(pool, group_idx) == KV_BUSY_RETRY)
		return KV_BUSY_RETRY;
	if (number == blocks->n_blocks || kv_block_pool_take(&pool->blocks[group_idx], 1, 0, &id) != KV_OK)
		return kv_fail(err, KV_POOL_FULL,
			"pool \"%s\" has no block for block %u of group %u (%u are free, %u of them "
			"reserved)",
			pool->spec->name, number, group_idx, pool->blocks[group_idx].counts.n_free,
			pool->blocks[group_idx].counts.n_reserved);
	blocks->ids[number] = id.idx;
	blocks->n_numbers++;
	for (uint32_t l = 0; l < blocks->n_layers; l++) {
		if (n_rows[l] < block_size)
			blocks->is_partial[number] = 1;
	}
	if (blocks->is_partial[number])
		memcpy(blocks->n_rows + (uint64_t)number * blocks->n_layers, n_rows, blocks->n_layers);
	*block_idx = id.idx;
	return KV_OK;
}

/* ---- sequences ---- */

static enum kv_status check_sequence(
	const struct kv_session *session, const struct kv_staged_sequence *staged, struct kv_error *err)
{
	const struct kv_pool_spec *spec = session->pool->spec;
	uint32_t n_needed[KV_GROUPS_MAX] = { 0 }, least[KV_GROUPS_MAX];

	memset(least, 0xFF, sizeof(least));
	for (uint32_t l = 0; l < spec->n_layers; l++) {
		const uint32_t n = kv_div_up_u32(staged->lengths[l], spec->block_size);

		/* A pool's bound may differ from where the file comes from. */
		if (staged->lengths[l] > session->tokens_max && session->tokens_max == spec->tokens_max)
			return kv_fail(err, KV_LIMIT,
				"sequence %llu has %u tokens, pool \"%s\" of this daemon allows %u",
				(unsigned long long)staged->id, staged->lengths[l], spec->name,
				spec->tokens_max);
		if (staged->lengths[l] > session->tokens_max)
			return kv_fail(err, KV_CORRUPT, "%u tokens, the session allows %u",
				staged->lengths[l], session->tokens_max);
		if (n > n_needed[spec->layers[l].group_idx])
			n_needed[spec->layers[l].group_idx] = n;
		if (staged->lengths[l] < least[spec->layers[l].group_idx])
			least[spec->layers[l].group_idx] = staged->lengths[l];
	}
	for (uint32_t g = 0; g < spec->n_groups; g++) {
		const uint32_t n_gone = staged->n_gone[g];

		if (staged->n_entries[g] != n_needed[g])
			return kv_fail(err, KV_CORRUPT, "%u table entries in group %u, the lengths need %u",
				staged->n_entries[g], g, n_needed[g]);
		if (n_gone > 0 &&
			(n_gone <= spec->group_sink_blocks[g] ||
				n_gone * (uint64_t)spec->block_size >= least[g]))
			return kv_fail(err, KV_CORRUPT, "%u blocks of group %u are gone, of %u tokens",
				n_gone, g, least[g]);
		if (n_gone < kv_pool_spec_gone(spec, g, least[g]))
			return kv_fail(err, KV_CORRUPT,
				"%u blocks of group %u are gone, its windows leave %u behind", n_gone, g,
				kv_pool_spec_gone(spec, g, least[g]));
	}
	return KV_OK;
}

enum kv_status kv_stage_sequence(struct kv_stage *stage, const struct kv_staged_sequence *staged,
	uint64_t now_ns, struct kv_error *err)
{
	struct kv_session *session = stage->session;
	enum kv_status status = check_complete(stage, err);

	if (status == KV_OK && !session)
		return kv_fail(err, KV_CORRUPT, "a sequence before any session");
	if (status == KV_OK && (staged->id == 0 || kv_sequence_find(session, staged->id)))
		return kv_fail(
			err, KV_CORRUPT, "id %llu is 0 or comes twice", (unsigned long long)staged->id);
	if (status == KV_OK)
		status = check_sequence(session, staged, err);
	if (status != KV_OK)
		return status;
	if (session->n_sequences >= session->sequences_max ||
		stage->domain->n_sequences >= stage->domain->limits.sequences_max)
		return kv_fail(err, KV_LIMIT, "there are %u sequences already", stage->domain->n_sequences);
	for (uint32_t l = 0; l < session->pool->spec->n_layers; l++) {
		if (kv_sequence_check_tokens(session, NULL, staged->lengths[l]) != KV_OK)
			return kv_fail(err, KV_QUOTA,
				"sequence %llu: its %u tokens are above the tenant's quota",
				(unsigned long long)staged->id, staged->lengths[l]);
	}

	struct kv_sequence *sequence = kv_sequence_add(session, staged->id, now_ns);
	struct kv_pool *pool = session->pool;
	struct kv_session_slot *slot = kv_slot_of(session);

	/* Not counted before commit. */
	pool->n_sequences--;
	pool->n_zombies++;
	sequence->is_evictable = staged->is_evictable;
	sequence->n_pins = staged->n_pins;
	for (uint32_t g = 0; g < pool->spec->n_tables && staged->n_pins > 0; g++)
		kv_block_table_pin(&sequence->tables[g], &pool->tables, &pool->blocks[g], true);
	sequence->used_ns = now_ns > staged->idle_ns ? now_ns - staged->idle_ns : 1;
	memcpy(sequence->n_gone, staged->n_gone, sizeof(sequence->n_gone));
	for (uint32_t l = 0; l < pool->spec->n_layers; l++) {
		sequence->planned[l] = sequence->committed[l] = staged->lengths[l];
		slot->layer_tokens[l] += kv_sequence_n_held(sequence, l);
	}

	uint32_t length_min, length_max;

	kv_sequence_charge(sequence);
	kv_sequence_lengths(sequence, &length_min, &length_max);
	slot->n_tokens_committed += length_min;
	memcpy(stage->n_entries, staged->n_entries, sizeof(stage->n_entries));
	memset(stage->n_gap, 0, sizeof(stage->n_gap));
	stage->sequence = sequence;
	return KV_OK;
}

enum kv_status kv_stage_exact(struct kv_stage *stage, uint32_t layer_first, uint32_t n_layers,
	uint32_t n_tokens, const struct kv_sequence **sequence, struct kv_error *err)
{
	const struct kv_pool_spec *spec = stage->sequence ? stage->sequence->pool->spec : NULL;
	const uint32_t *lengths = stage->sequence ? stage->sequence->committed : NULL;

	if (!spec || n_layers == 0 || n_layers > spec->n_layers || layer_first > spec->n_layers - n_layers)
		return kv_fail(err, KV_CORRUPT, "layers %u to %u of no sequence that has them", layer_first,
			layer_first + n_layers);
	if (n_tokens == 0 || n_tokens > spec->exact_tokens || n_tokens > lengths[layer_first])
		return kv_fail(err, KV_CORRUPT, "%u exact tokens of %u, the pool keeps %u", n_tokens,
			lengths[layer_first], spec->exact_tokens);
	for (uint32_t l = layer_first; l < layer_first + n_layers; l++) {
		if (lengths[l] != lengths[layer_first] || stage->sequence->exact[l] > 0)
			return kv_fail(err, KV_CORRUPT, "layer %u comes twice, or is longer", l);
	}
	if (!kv_sequence_restore_exact(stage->sequence, layer_first, n_layers, n_tokens))
		return kv_fail(err, KV_POOL_FULL,
			"pool \"%s\" has no ring blocks for the exact window of sequence %llu", spec->name,
			(unsigned long long)stage->sequence->id);
	*sequence = stage->sequence;
	return KV_OK;
}

/* Does the file hold what the sequence has in this entry? */
static bool holds_rows(const struct kv_sequence *sequence, const struct kv_staged_blocks *blocks, uint32_t g,
	uint32_t entry_idx, uint32_t number)
{
	const struct kv_pool_spec *spec = sequence->pool->spec;
	const uint32_t token_first = entry_idx * spec->block_size;
	const uint8_t *n_rows = blocks->n_rows + (uint64_t)number * blocks->n_layers;

	if (!blocks->is_partial[number])
		return true;
	for (uint32_t l = 0; l < spec->n_layers; l++) {
		if (spec->layers[l].group_idx != g)
			continue;
		const uint32_t length = sequence->committed[l];
		const uint32_t n = length > token_first ? length - token_first : 0;

		if ((n < spec->block_size ? n : spec->block_size) > *n_rows++)
			return false;
	}
	return true;
}

/* What its table has so far, a gap that has only begun included. */
static uint32_t n_entries(const struct kv_stage *stage, uint32_t group_idx)
{
	const struct kv_block_table *table = &stage->sequence->tables[group_idx];

	return kv_block_table_has_gap(table) ? table->n_blocks : table->n_blocks + stage->n_gap[group_idx];
}

/* At most: chunks that lie in a gap as a whole are not there, and a gap has two ends. */
static uint32_t chunks_needed(const struct kv_block_table *table, const uint32_t numbers[], uint32_t n)
{
	uint32_t n_blocks = 0;

	for (uint32_t i = 0; i < n; i++)
		n_blocks += numbers[i] != KV_STAGE_NO_BLOCK;
	return kv_block_table_chunks_needed(table, n_blocks) + (n_blocks < n ? 2 : 0);
}

/* One entry with a block; there is room for it. */
static enum kv_status adopt(
	struct kv_stage *stage, uint32_t group_idx, uint32_t entry_idx, uint32_t number, struct kv_error *err)
{
	struct kv_sequence *sequence = stage->sequence;
	struct kv_pool *pool = sequence->pool;
	struct kv_staged_blocks *blocks = &stage->blocks[pool->pool_idx][group_idx];

	if (number >= blocks->n_numbers || !holds_rows(sequence, blocks, group_idx, entry_idx, number))
		return kv_fail(err, KV_CORRUPT, "sequence %llu: entry %u names block %u, which %s",
			(unsigned long long)sequence->id, entry_idx, number,
			number < blocks->n_numbers ? "has too few rows" : "is not there");

	const kv_block_id block = { blocks->ids[number] & KV_STAGE_BLOCK };
	const struct kv_session *session = sequence->session;
	const bool is_first = !(blocks->ids[number] & KV_STAGE_ADOPTED);
	enum kv_status status = kv_tenant_check(&stage->domain->tenants, session->payer, KV_QUOTA_BYTES,
		is_first ? pool->blocks[group_idx].block_bytes : 0, err);

	if (status != KV_OK)
		return status;
	/* Owned before it is in the table: a pinned sequence pins what it has, and only owners pin. */
	if (!is_first)
		kv_block_pool_own(&pool->blocks[group_idx], block);
	status = kv_block_table_append(
		&sequence->tables[group_idx], &pool->tables, &pool->blocks[group_idx], &block, 1);

	KV_ASSERT(status == KV_OK);
	if (is_first) {
		kv_block_pool_mark(&pool->blocks[group_idx], &block, 1, session->handle, session->payer);
		blocks->ids[number] |= KV_STAGE_ADOPTED;
		blocks->n_adopted++;
	}
	return KV_OK;
}

enum kv_status kv_stage_table(struct kv_stage *stage, uint32_t group_idx, uint32_t first,
	const uint32_t numbers[], uint32_t n, struct kv_error *err)
{
	struct kv_sequence *sequence = stage->sequence;

	if (!sequence || group_idx >= sequence->pool->spec->n_groups)
		return kv_fail(err, KV_CORRUPT, "a table of no sequence or group");

	struct kv_pool *pool = sequence->pool;
	struct kv_block_table *table = &sequence->tables[group_idx];
	const uint32_t n_chunks = kv_block_table_n_chunks(table);
	const uint32_t n_there = n_entries(stage, group_idx);
	const unsigned long long id = sequence->id;
	enum kv_status status;

	if (first != n_there || n > stage->n_entries[group_idx] - n_there)
		return kv_fail(err, KV_CORRUPT, "sequence %llu: entries %u to %u, %u are there, %u announced",
			id, first, first + n, n_there, stage->n_entries[group_idx]);
	if (chunks_needed(table, numbers, n) > pool->tables.n_chunks_max - pool->tables.n_chunks_used)
		return kv_fail(err, KV_LIMIT, "sequence %llu: no room for its table", id);
	for (uint32_t i = 0; i < n;) {
		const uint32_t n_gone = sequence->n_gone[group_idx], entry_idx = first + i;
		const uint32_t n_kept = pool->spec->group_sink_blocks[group_idx];

		if (entry_idx < n_kept || entry_idx >= n_gone) {
			status = adopt(stage, group_idx, entry_idx, numbers[i++], err);
			if (status != KV_OK)
				return status;
			continue;
		}
		/* The gap, as far as these entries have it; another call goes on where it ends. */
		uint32_t n_here = 0;

		while (i < n && first + i < n_gone && numbers[i] == KV_STAGE_NO_BLOCK) {
			n_here++;
			i++;
		}
		if (n_here == 0)
			return kv_fail(err, KV_CORRUPT, "sequence %llu: entry %u has a block that is gone",
				id, entry_idx);
		stage->n_gap[group_idx] += n_here;
		if (n_kept + stage->n_gap[group_idx] == n_gone)
			kv_block_table_append_gap(table, &pool->tables, stage->n_gap[group_idx]);
	}
	kv_slot_of(sequence->session)->n_chunks += kv_block_table_n_chunks(table) - n_chunks;
	return KV_OK;
}

/* ---- the end ---- */

static enum kv_status check_all(const struct kv_stage *stage, struct kv_error *err)
{
	const enum kv_status status = check_complete(stage, err);

	if (status != KV_OK)
		return status;
	for (uint32_t i = 0; i < KV_POOLS_MAX; i++) {
		for (uint32_t g = 0; g < KV_GROUPS_MAX; g++) {
			const struct kv_staged_blocks *blocks = &stage->blocks[i][g];

			if (blocks->n_adopted != blocks->n_numbers)
				return kv_fail(err, KV_CORRUPT, "%u blocks are in no table and not published",
					blocks->n_numbers - blocks->n_adopted);
		}
	}
	return KV_OK;
}

/* All of them together. */
static enum kv_status check_reservations(struct kv_stage *stage, struct kv_error *err)
{
	uint64_t sums[KV_POOLS_MAX][KV_GROUPS_MAX] = { { 0 } };

	kv_list_for_each (node, &stage->sessions) {
		const struct kv_session *session = kv_container_of(node, struct kv_session, in_pool);

		for (uint32_t g = 0; g < session->pool->spec->n_groups; g++)
			sums[session->pool->pool_idx][g] += session->n_blocks_reserved[g];
	}
	for (uint32_t i = 0; i < stage->domain->n_pools; i++) {
		const struct kv_pool *pool = stage->domain->pools[i];

		for (uint32_t g = 0; g < pool->spec->n_groups; g++) {
			const struct kv_block_counts *counts = &pool->blocks[g].counts;

			if (sums[pool->pool_idx][g] > counts->n_free - counts->n_reserved)
				return kv_fail(err, KV_POOL_FULL,
					"pool \"%s\": %llu blocks cannot be reserved", pool->spec->name,
					(unsigned long long)sums[pool->pool_idx][g]);
		}
	}
	return KV_OK;
}

enum kv_status kv_stage_commit(
	struct kv_stage *stage, uint64_t now_ns, uint32_t *n_sessions, struct kv_error *err)
{
	enum kv_status status = check_all(stage, err);

	if (status == KV_OK)
		status = check_reservations(stage, err);
	kv_list_for_each (node, &stage->sessions) {
		if (status == KV_OK)
			status = kv_session_check_name(
				stage->domain, kv_container_of(node, struct kv_session, in_pool), err);
	}
	if (status != KV_OK)
		return status;
	*n_sessions = stage->n_sessions;
	stage->is_committed = true;
	kv_list_for_each_safe (node, &stage->sessions)
		kv_session_commit(stage->domain, kv_container_of(node, struct kv_session, in_pool), now_ns);
	stage->n_sessions = 0;
	stage->session = NULL;
	stage->sequence = NULL;
	return KV_OK;
}

void kv_stage_count(const struct kv_stage *stage, const struct kv_pool *pool, uint32_t *const owners[])
{
	kv_stage_nodes_count(&stage->nodes[pool->pool_idx], pool, owners);
	for (uint32_t g = 0; g < pool->spec->n_groups; g++) {
		const struct kv_staged_blocks *blocks = &stage->blocks[pool->pool_idx][g];

		for (uint32_t n = 0; n < blocks->n_numbers; n++) {
			if (!(blocks->ids[n] & KV_STAGE_ADOPTED))
				owners[g][blocks->ids[n]]++;
		}
	}
}
