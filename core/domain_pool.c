#include <string.h>

#include "core/backend.h"
#include "core/domain.h"
#include "core/domain_internal.h"
#include "core/memory.h"
#include "core/prefix_internal.h"
#include "core/tally.h"

static uint64_t session_tokens_bytes(const struct kv_domain *domain, uint32_t n_layers)
{
	return sizeof(uint64_t) * domain->limits.sessions_max * n_layers;
}

/* Accepts half-built pools. */
static void pool_destroy(struct kv_pool *pool)
{
	for (uint32_t g = 0; g < KV_TABLES_MAX; g++)
		kv_block_pool_finish(&pool->blocks[g]);
	kv_table_arena_finish(&pool->tables);
	/* Not the spec's n_layers: the caller may have taken the spec back. */
	if (pool->session_tokens)
		kv_pages_free(pool->session_tokens, session_tokens_bytes(pool->domain, pool->slab->n_layers));
	kv_sequence_slab_destroy(pool->slab);
	for (uint32_t g = 0; g < KV_GROUPS_MAX && pool->maps[g]; g++)
		kv_pages_free(pool->maps[g], sizeof(uint32_t) * (uint64_t)pool->n_map_blocks[g]);
	kv_prefix_index_destroy(pool->prefixes);
	kv_free(pool->copies);
	kv_free(pool->layer_tokens);
	kv_free(pool);
}

/*
 * Chunks of all tables: those that are not full, one for every table and three where it may have a gap, which
 * begins and ends in one; and the full ones of as many table entries as there would be if every block had
 * KV_TABLE_OWNERS owners. Only those in use are resident.
 */
#define KV_TABLE_OWNERS 8u

static uint32_t chunks_max(const struct kv_pool_spec *spec, uint32_t sequences_max)
{
	uint64_t n_blocks = 0;

	for (uint32_t g = 0; g < spec->n_tables; g++)
		n_blocks += spec->n_blocks[g];

	const uint32_t n_partial = kv_pool_spec_has_windows(spec) ? 3 : 1;
	const uint64_t n_chunks = n_blocks / KV_CHUNK_ENTRIES * KV_TABLE_OWNERS +
		(uint64_t)sequences_max * spec->n_tables * n_partial;

	return n_chunks < UINT32_MAX ? (uint32_t)n_chunks : UINT32_MAX - 1;
}

static enum kv_status take_memory(struct kv_pool *pool, struct kv_error *err)
{
	const struct kv_pool_spec *spec = pool->spec;
	const uint32_t sequences_max = pool->domain->limits.sequences_max;
	enum kv_status status;

	for (uint32_t g = 0; g < spec->n_tables; g++) {
		status = kv_block_pool_init(&pool->blocks[g], spec->n_blocks[g], err);
		if (status != KV_OK)
			return status;
		pool->blocks[g].tenants = &pool->domain->tenants;
		pool->blocks[g].block_bytes = kv_block_bytes(spec, g);
	}
	for (uint32_t g = 0; g < spec->n_groups; g++) {
		pool->n_map_blocks[g] = spec->n_blocks[g];
		pool->maps[g] = kv_pages_alloc(sizeof(uint32_t) * (uint64_t)spec->n_blocks[g]);
		if (!pool->maps[g])
			return kv_fail(err, KV_NO_MEMORY, "map of %u blocks", spec->n_blocks[g]);
	}
	status = kv_table_arena_init(&pool->tables, chunks_max(spec, sequences_max), err);
	if (status != KV_OK)
		return status;
	status = kv_sequence_slab_create(sequences_max, spec->n_layers, &pool->slab, err);
	if (status != KV_OK)
		return status;
	status = kv_prefix_index_create(spec, pool->domain->random, &pool->prefixes, err);
	if (status != KV_OK)
		return status;
	pool->session_tokens = kv_pages_alloc(session_tokens_bytes(pool->domain, spec->n_layers));
	pool->layer_tokens = kv_alloc(spec->n_layers, sizeof(*pool->layer_tokens));
	pool->copies = kv_alloc(KV_COPIES_MAX, sizeof(*pool->copies));
	if (!pool->session_tokens || !pool->layer_tokens || !pool->copies)
		return kv_fail(
			err, KV_NO_MEMORY, "sums of %u layers and %u copies", spec->n_layers, KV_COPIES_MAX);
	return KV_OK;
}

/* Others index arrays with it, so the numbers stay below KV_POOLS_MAX. */
static uint32_t unused_pool_idx(const struct kv_domain *domain)
{
	uint64_t used = 0;
	uint32_t idx = 0;

	for (uint32_t i = 0; i < domain->n_pools; i++)
		used |= 1ull << domain->pools[i]->pool_idx;
	while (used & 1ull << idx)
		idx++;
	return idx;
}

static uint32_t mark_of(uint32_t n_blocks, uint32_t percent)
{
	return percent == 0 ? n_blocks : (uint32_t)((uint64_t)n_blocks * percent / 100);
}

static void set_marks(struct kv_pool *pool, uint32_t group_idx)
{
	const struct kv_domain_limits *limits = &pool->domain->limits;
	const uint32_t n_blocks = pool->spec->n_blocks[group_idx];

	/* A low mark that nobody set is the high one: without it making room would end before it began. */
	const uint32_t low_percent =
		limits->evict_low_percent ? limits->evict_low_percent : limits->evict_high_percent;

	pool->evict_high_blocks[group_idx] = mark_of(n_blocks, limits->evict_high_percent);
	pool->evict_low_blocks[group_idx] = mark_of(n_blocks, low_percent);
}

enum kv_status kv_domain_pool_add(struct kv_domain *domain, struct kv_pool_spec *spec,
	struct kv_backend_pool *backend_pool, uint64_t arena_offset, uint64_t arena_bytes,
	struct kv_pool **out, struct kv_error *err)
{
	if (kv_domain_pool_by_name(domain, spec->name, (uint32_t)strlen(spec->name)))
		return kv_fail(err, KV_EXISTS, "pool \"%s\" exists already", spec->name);
	if (domain->n_pools == KV_POOLS_MAX)
		return kv_fail(
			err, KV_LIMIT, "pool \"%s\": there are %u pools already", spec->name, KV_POOLS_MAX);

	struct kv_pool *pool = kv_alloc(1, sizeof(*pool));

	if (!pool)
		return kv_fail(err, KV_NO_MEMORY, "pool \"%s\"", spec->name);
	pool->spec = spec;
	pool->domain = domain;
	pool->backend_pool = backend_pool;
	pool->arena_offset = arena_offset;
	pool->arena_bytes = arena_bytes;
	pool->pool_idx = unused_pool_idx(domain);
	kv_list_init(&pool->sessions);
	kv_list_init(&pool->zombies);
	kv_list_init(&pool->waiting);
	kv_list_init(&pool->closing);
	kv_list_init(&pool->surplus);
	kv_list_init(&pool->resting);
	for (uint32_t g = 0; g < spec->n_groups; g++)
		set_marks(pool, g);

	const enum kv_status status = take_memory(pool, err);

	if (status != KV_OK) {
		kv_error_wrap(err, "pool \"%s\"", spec->name);
		pool_destroy(pool);
		return status;
	}
	domain->pools[domain->n_pools++] = pool;
	*out = pool;
	return KV_OK;
}

enum kv_status kv_domain_pool_check_remove(const struct kv_pool *pool, struct kv_error *err)
{
	const char *name = pool->spec->name;

	if (pool->domain->capture || pool->domain->stage)
		return kv_fail(
			err, KV_BUSY_RETRY, "pool \"%s\": a snapshot is being written or restored", name);
	if (pool->n_sessions > 0)
		return kv_fail(err, KV_BAD_STATE, "pool \"%s\" has %u open sessions", name, pool->n_sessions);
	if (pool->n_zombies > 0 || !kv_list_is_empty(&pool->closing))
		return kv_fail(
			err, KV_BUSY_RETRY, "pool \"%s\": closed sessions are still being taken apart", name);
	for (uint32_t g = 0; g < pool->spec->n_tables; g++) {
		const struct kv_block_counts *counts = &pool->blocks[g].counts;

		/* Published prefixes go with the pool. */
		if (counts->n_free + counts->n_idle != counts->n_total)
			return kv_fail(err, KV_BUSY_RETRY, "pool \"%s\": %u blocks are still in flight", name,
				counts->n_total - counts->n_free - counts->n_idle);
	}
	return KV_OK;
}

/* Sessions of the pool end with it: only when the whole domain goes are there any. */
static void forget_sessions(struct kv_pool *pool)
{
	struct kv_domain *domain = pool->domain;

	if (pool->slab->n_used == 0 && pool->n_sessions == 0)
		return;
	for (uint32_t i = 0; i < domain->n_slots_touched; i++) {
		if (domain->slots[i].session.pool == pool)
			domain->slots[i].session.pool = NULL;
	}
	domain->n_sessions -= pool->n_sessions;
	domain->n_sequences -= pool->slab->n_used;
}

void kv_domain_pool_remove(struct kv_pool *pool)
{
	struct kv_domain *domain = pool->domain;
	struct kv_pool_spec *spec = (struct kv_pool_spec *)pool->spec; /* owned since kv_domain_pool_add() */
	uint32_t idx = 0;

	if (domain->tally)
		kv_tally_pool_gone(domain->tally, pool);
	forget_sessions(pool);
	for (uint32_t g = 0; g < KV_TABLES_MAX; g++)
		kv_block_pool_refund(&pool->blocks[g]); /* those that are not there have no blocks */
	while (domain->pools[idx] != pool)
		idx++;
	domain->n_pools--;
	memmove(&domain->pools[idx], &domain->pools[idx + 1],
		(domain->n_pools - idx) * sizeof(domain->pools[0]));
	pool_destroy(pool);
	kv_pool_spec_destroy(spec);
}

struct kv_pool *kv_domain_pool_by_name(struct kv_domain *domain, const char *name, uint32_t name_bytes)
{
	for (uint32_t i = 0; i < domain->n_pools; i++) {
		const char *pool_name = domain->pools[i]->spec->name;

		if (strlen(pool_name) == name_bytes && memcmp(pool_name, name, name_bytes) == 0)
			return domain->pools[i];
	}
	return NULL;
}

struct kv_pool *kv_domain_pool_at(struct kv_domain *domain, uint32_t idx)
{
	return idx < domain->n_pools ? domain->pools[idx] : NULL;
}

uint32_t kv_domain_n_pools(const struct kv_domain *domain)
{
	return domain->n_pools;
}
