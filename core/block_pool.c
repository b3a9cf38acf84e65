#include "core/block_pool.h"

#include <string.h>

#include "core/memory.h"

#define BLOCK_NONE UINT32_MAX

enum kv_status kv_block_pool_init(struct kv_block_pool *pool, uint32_t n_blocks, struct kv_error *err)
{
	const uint64_t array_bytes = sizeof(uint32_t) * (uint64_t)n_blocks;

	*pool = (struct kv_block_pool){
		.n_blocks = n_blocks,
		.idle_first = BLOCK_NONE,
		.idle_last = BLOCK_NONE,
		.counts = { .n_total = n_blocks, .n_free = n_blocks },
	};
	pool->owners = kv_pages_alloc(array_bytes);
	pool->in_flight = kv_pages_alloc(array_bytes);
	pool->pins = kv_pages_alloc(array_bytes);
	pool->free_ids = kv_pages_alloc(array_bytes);
	pool->idle_next = kv_pages_alloc(array_bytes);
	pool->idle_prev = kv_pages_alloc(array_bytes);
	pool->flags = kv_pages_alloc(n_blocks);
	pool->taken_by = kv_pages_alloc(sizeof(*pool->taken_by) * (uint64_t)n_blocks);
	pool->payers = kv_pages_alloc(sizeof(*pool->payers) * (uint64_t)n_blocks);
	pool->n_paid = kv_pages_alloc(sizeof(*pool->n_paid) * KV_TENANTS_MAX);
	if (!pool->owners || !pool->in_flight || !pool->pins || !pool->free_ids || !pool->idle_next ||
		!pool->n_paid || !pool->idle_prev || !pool->flags || !pool->taken_by || !pool->payers) {
		kv_block_pool_finish(pool);
		return kv_fail(err, KV_NO_MEMORY, "block pool of %u blocks", n_blocks);
	}
	return KV_OK;
}

void kv_block_pool_finish(struct kv_block_pool *pool)
{
	const uint64_t array_bytes = sizeof(uint32_t) * (uint64_t)pool->n_blocks;

	kv_pages_free(pool->owners, array_bytes);
	kv_pages_free(pool->in_flight, array_bytes);
	kv_pages_free(pool->pins, array_bytes);
	kv_pages_free(pool->free_ids, array_bytes);
	kv_pages_free(pool->idle_next, array_bytes);
	kv_pages_free(pool->idle_prev, array_bytes);
	kv_pages_free(pool->flags, pool->n_blocks);
	kv_pages_free(pool->taken_by, sizeof(*pool->taken_by) * (uint64_t)pool->n_blocks);
	kv_pages_free(pool->payers, sizeof(*pool->payers) * (uint64_t)pool->n_blocks);
	kv_pages_free(pool->n_paid, sizeof(*pool->n_paid) * KV_TENANTS_MAX);
	*pool = (struct kv_block_pool){ 0 };
}

static bool is_tallied(const struct kv_block_pool *pool, uint32_t idx)
{
	return pool->tally && idx < pool->tally->n_counted;
}

static void pay(struct kv_block_pool *pool, uint32_t idx, uint32_t payer)
{
	if (!pool->tenants)
		return;
	if (pool->payers[idx] != KV_TENANT_NOBODY) {
		kv_tenant_refund(pool->tenants, pool->payers[idx], KV_QUOTA_BYTES, pool->block_bytes);
		pool->n_paid[pool->payers[idx]]--;
	}
	if (payer != KV_TENANT_NOBODY)
		pool->n_paid[payer]++;
	if (is_tallied(pool, idx)) {
		pool->tally->n_paid[pool->payers[idx]]--;
		pool->tally->n_paid[payer]++;
	}
	pool->payers[idx] = (uint16_t)payer;
	kv_tenant_charge(pool->tenants, payer, KV_QUOTA_BYTES, pool->block_bytes);
}

void kv_block_pool_refund(struct kv_block_pool *pool)
{
	for (uint32_t i = 0; i < pool->n_touched; i++)
		pay(pool, i, KV_TENANT_NOBODY);
}

/* The count that a block with these numbers is part of. */
static uint32_t *state_count(
	struct kv_block_counts *counts, uint32_t n_owners, uint32_t n_in_flight, uint32_t n_pins)
{
	if (n_pins > 0)
		return &counts->n_pinned;
	if (n_owners > 1)
		return &counts->n_shared;
	if (n_owners == 1)
		return &counts->n_owned;
	return n_in_flight > 0 ? &counts->n_draining : &counts->n_free;
}

static uint64_t extra(uint32_t n_owners)
{
	return n_owners > 1 ? n_owners - 1 : 0;
}

/* Adds the block as it is, or takes it off (sign UINT32_MAX). */
static void tally_block(struct kv_block_pool *pool, uint32_t idx, uint32_t sign)
{
	struct kv_block_counts *counts = &pool->tally->counts;
	const uint32_t n_owners = pool->owners[idx], flags = pool->flags[idx];
	const uint64_t n_extra = extra(n_owners);

	*state_count(counts, n_owners, pool->in_flight[idx], pool->pins[idx]) += sign;
	counts->n_kept += flags & KV_BLOCK_KEPT ? sign : 0;
	counts->n_kept_shared += (flags & KV_BLOCK_KEPT) && n_owners > 1 ? sign : 0;
	counts->n_idle += flags & KV_BLOCK_IDLE ? sign : 0;
	counts->n_extra_owners += sign == 1 ? n_extra : 0 - n_extra;
}

void kv_block_pool_count(struct kv_block_pool *pool, uint32_t idx)
{
	KV_ASSERT(pool->tally->n_counted == idx);
	pool->tally->n_counted++;
	pool->tally->n_paid[pool->payers[idx]]++;
	tally_block(pool, idx, 1);
}

void kv_block_pool_look(struct kv_block_pool *pool, uint32_t idx)
{
	struct kv_block_tally *tally = pool->tally;

	if (!tally->is_watched || tally->is_seen[idx])
		return;
	tally->is_seen[idx] = 1;
	if (pool->in_flight[idx] > 0 && tally->moving_idx == BLOCK_NONE)
		tally->moving_idx = idx;
}

static void idle_begin(struct kv_block_pool *pool, uint32_t idx)
{
	pool->idle_next[idx] = BLOCK_NONE;
	pool->idle_prev[idx] = pool->idle_last;
	if (pool->idle_last != BLOCK_NONE)
		pool->idle_next[pool->idle_last] = idx;
	else
		pool->idle_first = idx;
	pool->idle_last = idx;
	pool->flags[idx] |= KV_BLOCK_IDLE;
	pool->counts.n_idle++;
}

static void idle_end(struct kv_block_pool *pool, uint32_t idx)
{
	const uint32_t next = pool->idle_next[idx], prev = pool->idle_prev[idx];

	if (prev != BLOCK_NONE)
		pool->idle_next[prev] = next;
	else
		pool->idle_first = next;
	if (next != BLOCK_NONE)
		pool->idle_prev[next] = prev;
	else
		pool->idle_last = prev;
	pool->flags[idx] &= (uint8_t)~KV_BLOCK_IDLE;
	pool->counts.n_idle--;
}

/* The one place where the numbers of a block change, so that the counts always add up. */
static void change(struct kv_block_pool *pool, uint32_t idx, uint32_t n_owners, uint32_t n_in_flight)
{
	const uint32_t n_pins = pool->pins[idx];
	uint32_t *before = state_count(&pool->counts, pool->owners[idx], pool->in_flight[idx], n_pins);
	uint32_t *after = state_count(&pool->counts, n_owners, n_in_flight, n_pins);
	const bool is_in_tally = is_tallied(pool, idx);

	if (is_in_tally)
		tally_block(pool, idx, UINT32_MAX);
	if (pool->flags[idx] & KV_BLOCK_KEPT)
		pool->counts.n_kept_shared += (n_owners > 1) - (pool->owners[idx] > 1);
	pool->counts.n_extra_owners += extra(n_owners) - extra(pool->owners[idx]);
	pool->owners[idx] = n_owners;
	pool->in_flight[idx] = n_in_flight;
	if (n_owners == 0)
		pay(pool, idx, KV_TENANT_NOBODY);
	if (pool->flags[idx] != 0) {
		const bool is_idle = (pool->flags[idx] & KV_BLOCK_KEPT) && n_owners == 1 && n_in_flight == 0;

		if (is_idle && !(pool->flags[idx] & KV_BLOCK_IDLE))
			idle_begin(pool, idx);
		else if (!is_idle && (pool->flags[idx] & KV_BLOCK_IDLE))
			idle_end(pool, idx);
	}
	if (is_in_tally)
		tally_block(pool, idx, 1);
	if (before == after)
		return;
	--*before;
	++*after;
	if (after == &pool->counts.n_free)
		pool->free_ids[pool->n_freed++] = idx;
}

enum kv_status kv_block_pool_take(
	struct kv_block_pool *pool, uint32_t n_blocks, uint32_t n_from_reservation, kv_block_id ids[])
{
	struct kv_block_counts *counts = &pool->counts;

	KV_ASSERT(n_from_reservation <= n_blocks);
	KV_ASSERT(n_from_reservation <= counts->n_reserved);
	if (n_blocks - n_from_reservation > counts->n_free - counts->n_reserved)
		return KV_POOL_FULL;
	counts->n_reserved -= n_from_reservation;
	for (uint32_t i = 0; i < n_blocks; i++) {
		/* Blocks that were used before come first: their pages and counters are warm. */
		const uint32_t idx = pool->n_freed > 0 ? pool->free_ids[--pool->n_freed] : pool->n_touched++;

		change(pool, idx, 1, 0);
		ids[i] = (kv_block_id){ idx };
	}
	if (counts->n_total - counts->n_free > counts->n_used_max)
		counts->n_used_max = counts->n_total - counts->n_free;
	return KV_OK;
}

void kv_block_pool_mark(
	struct kv_block_pool *pool, const kv_block_id ids[], uint32_t n, uint64_t session, uint32_t payer)
{
	for (uint32_t i = 0; i < n; i++) {
		pool->taken_by[ids[i].idx] = session;
		pay(pool, ids[i].idx, payer);
	}
}

void kv_block_pool_disown(struct kv_block_pool *pool, kv_block_id id)
{
	KV_ASSERT(id.idx < pool->n_blocks);
	KV_ASSERT(pool->owners[id.idx] > pool->pins[id.idx]);
	change(pool, id.idx, pool->owners[id.idx] - 1, pool->in_flight[id.idx]);
}

void kv_block_pool_own(struct kv_block_pool *pool, kv_block_id id)
{
	KV_ASSERT(id.idx < pool->n_blocks);
	KV_ASSERT(pool->owners[id.idx] > 0); /* a free or draining block has nothing to share */
	KV_ASSERT(pool->owners[id.idx] < UINT32_MAX);
	change(pool, id.idx, pool->owners[id.idx] + 1, pool->in_flight[id.idx]);
}

static void set_pins(struct kv_block_pool *pool, uint32_t idx, uint32_t n_pins)
{
	const uint32_t n_owners = pool->owners[idx], n_in_flight = pool->in_flight[idx];
	const bool is_in_tally = is_tallied(pool, idx);

	if (is_in_tally)
		tally_block(pool, idx, UINT32_MAX);
	--*state_count(&pool->counts, n_owners, n_in_flight, pool->pins[idx]);
	pool->pins[idx] = n_pins;
	++*state_count(&pool->counts, n_owners, n_in_flight, n_pins);
	if (is_in_tally)
		tally_block(pool, idx, 1);
}

void kv_block_pool_pin(struct kv_block_pool *pool, kv_block_id id)
{
	KV_ASSERT(id.idx < pool->n_blocks);
	KV_ASSERT(pool->pins[id.idx] < pool->owners[id.idx]);
	set_pins(pool, id.idx, pool->pins[id.idx] + 1);
}

void kv_block_pool_unpin(struct kv_block_pool *pool, kv_block_id id)
{
	KV_ASSERT(id.idx < pool->n_blocks);
	KV_ASSERT(pool->pins[id.idx] > 0);
	set_pins(pool, id.idx, pool->pins[id.idx] - 1);
}

void kv_block_pool_keep(struct kv_block_pool *pool, kv_block_id id)
{
	KV_ASSERT(id.idx < pool->n_blocks);
	KV_ASSERT(!(pool->flags[id.idx] & KV_BLOCK_KEPT));
	kv_block_pool_own(pool, id); /* of a block that somebody has: it is not idle by this */
	if (is_tallied(pool, id.idx))
		tally_block(pool, id.idx, UINT32_MAX);
	pool->flags[id.idx] |= KV_BLOCK_KEPT;
	if (is_tallied(pool, id.idx))
		tally_block(pool, id.idx, 1);
	pool->counts.n_kept++;
	pool->counts.n_kept_shared++;
}

void kv_block_pool_unkeep(struct kv_block_pool *pool, kv_block_id id)
{
	KV_ASSERT(id.idx < pool->n_blocks);
	KV_ASSERT(pool->flags[id.idx] & KV_BLOCK_KEPT);
	if (is_tallied(pool, id.idx))
		tally_block(pool, id.idx, UINT32_MAX);
	if (pool->flags[id.idx] & KV_BLOCK_IDLE)
		idle_end(pool, id.idx);
	pool->counts.n_kept_shared -= pool->owners[id.idx] > 1;
	pool->flags[id.idx] = 0;
	if (is_tallied(pool, id.idx))
		tally_block(pool, id.idx, 1);
	pool->counts.n_kept--;
	kv_block_pool_disown(pool, id);
}

void kv_block_pool_flight_begin(struct kv_block_pool *pool, kv_block_id id)
{
	KV_ASSERT(id.idx < pool->n_blocks);
	if (pool->tally)
		kv_block_pool_look(pool, id.idx);
	KV_ASSERT(pool->owners[id.idx] > 0); /* work is planned on blocks that somebody owns */
	KV_ASSERT(pool->in_flight[id.idx] < UINT32_MAX);
	change(pool, id.idx, pool->owners[id.idx], pool->in_flight[id.idx] + 1);
}

void kv_block_pool_flight_end(struct kv_block_pool *pool, kv_block_id id)
{
	KV_ASSERT(id.idx < pool->n_blocks);
	if (pool->tally)
		kv_block_pool_look(pool, id.idx);
	KV_ASSERT(pool->in_flight[id.idx] > 0);
	change(pool, id.idx, pool->owners[id.idx], pool->in_flight[id.idx] - 1);
}

/* Blocks that somebody owns and no prefix keeps are in no other count by being in flight, or not; a tally
 * looks at every block. */
static bool is_plain(const struct kv_block_pool *pool, uint32_t idx)
{
	return pool->owners[idx] > 0 && pool->flags[idx] == 0 && !pool->tally;
}

void kv_block_pool_flights_begin(struct kv_block_pool *pool, const uint32_t table[], uint32_t n)
{
	for (uint32_t i = 0; i < n; i++) {
		const uint32_t idx = table[i];

		if (idx == BLOCK_NONE)
			continue;
		KV_ASSERT(idx < pool->n_blocks);
		if (is_plain(pool, idx) && pool->in_flight[idx] < UINT32_MAX)
			pool->in_flight[idx]++;
		else
			kv_block_pool_flight_begin(pool, (kv_block_id){ idx });
	}
}

void kv_block_pool_flights_end(struct kv_block_pool *pool, const uint32_t table[], uint32_t n)
{
	for (uint32_t i = 0; i < n; i++) {
		const uint32_t idx = table[i];

		if (idx == BLOCK_NONE)
			continue;
		KV_ASSERT(idx < pool->n_blocks);
		if (is_plain(pool, idx) && pool->in_flight[idx] > 0)
			pool->in_flight[idx]--;
		else
			kv_block_pool_flight_end(pool, (kv_block_id){ idx });
	}
}

enum kv_status kv_block_pool_reserve(struct kv_block_pool *pool, uint32_t n_blocks)
{
	if (n_blocks > pool->counts.n_free - pool->counts.n_reserved)
		return KV_POOL_FULL;
	pool->counts.n_reserved += n_blocks;
	return KV_OK;
}

void kv_block_pool_unreserve(struct kv_block_pool *pool, uint32_t n_blocks)
{
	KV_ASSERT(n_blocks <= pool->counts.n_reserved);
	pool->counts.n_reserved -= n_blocks;
}
