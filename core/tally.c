#include "core/tally.h"

#include <stdio.h>
#include <string.h>

#include "core/memory.h"
#include "core/prefix_internal.h"
#include "core/tally_internal.h"

/* Entries that are copied out of a table at a time: finding the first takes a walk along its chunks. */
#define RUN_ENTRIES 512u

/* What has to be looked at within one step. */
enum fit {
	FITS,      /* its cost is spent */
	FITS_NEXT, /* the next step has enough */
	FITS_NONE, /* no step has */
};

static enum fit fit(struct kv_tally_step *step, uint64_t cost)
{
	if (cost > step->n_max)
		return FITS_NONE;
	if (cost > step->n_left) {
		step->n_left = 0;
		return FITS_NEXT;
	}
	kv_tally_spend(step, (uint32_t)cost);
	return FITS;
}

/* ---- what is wrong ---- */

enum kv_status kv_tally_found(struct kv_tally_step *step, uint64_t session)
{
	const struct kv_pool *pool = step->tally->pool;

	step->finding->session = session;
	snprintf(step->finding->pool, sizeof(step->finding->pool), "%s", pool ? pool->spec->name : "");
	if (pool)
		kv_error_wrap(step->err, "pool \"%s\"", pool->spec->name);
	return KV_INTERNAL;
}

/* ---- pools ---- */

static void leave_pool(struct kv_tally *tally)
{
	struct kv_pool *pool = tally->pool;

	if (!pool)
		return;
	for (uint32_t g = 0; g < pool->spec->n_tables; g++) {
		struct kv_block_tally *group = &tally->groups[g];

		pool->blocks[g].tally = NULL;
		kv_pages_free(group->owners, sizeof(uint32_t) * (uint64_t)pool->blocks[g].n_blocks);
		kv_pages_free(group->pins, sizeof(uint32_t) * (uint64_t)pool->blocks[g].n_blocks);
		kv_pages_free(group->is_seen, pool->blocks[g].n_blocks);
		kv_pages_free(group->n_paid, sizeof(uint32_t) * KV_TENANTS_MAX);
	}
	memset(tally->groups, 0, sizeof(tally->groups));
	tally->pool = NULL;
}

static enum kv_status enter_pool(struct kv_tally_step *step, struct kv_pool *pool)
{
	struct kv_tally *tally = step->tally;
	bool is_whole = true;

	tally->pool = pool;
	for (uint32_t g = 0; g < pool->spec->n_tables; g++) {
		struct kv_block_tally *group = &tally->groups[g];

		*group = (struct kv_block_tally){ .serial = tally->serial, .moving_idx = UINT32_MAX };
		group->owners = kv_pages_alloc(sizeof(uint32_t) * (uint64_t)pool->blocks[g].n_blocks);
		group->pins = kv_pages_alloc(sizeof(uint32_t) * (uint64_t)pool->blocks[g].n_blocks);
		group->is_seen = kv_pages_alloc(pool->blocks[g].n_blocks);
		group->n_paid = kv_pages_alloc(sizeof(uint32_t) * KV_TENANTS_MAX);
		is_whole = is_whole && group->owners && group->pins && group->is_seen && group->n_paid;
	}
	if (!is_whole)
		return kv_fail(step->err, KV_NO_MEMORY, "audit of pool \"%s\"", pool->spec->name);
	for (uint32_t g = 0; g < pool->spec->n_tables; g++)
		pool->blocks[g].tally = &tally->groups[g];
	tally->pools_done |= 1ull << pool->pool_idx;
	tally->sequence_idx = tally->group_idx = 0;
	tally->phase = TALLY_TABLES;
	return KV_OK;
}

static enum kv_status next_pool(struct kv_tally_step *step)
{
	struct kv_tally *tally = step->tally;
	const struct kv_domain *domain = tally->domain;

	leave_pool(tally);
	for (uint32_t i = 0; i < domain->n_pools; i++) {
		if (!(tally->pools_done >> domain->pools[i]->pool_idx & 1))
			return enter_pool(step, domain->pools[i]);
	}
	tally->phase = TALLY_TENANTS;
	return KV_OK;
}

/* ---- sessions ---- */

static enum kv_status end_slots(struct kv_tally_step *step)
{
	const struct kv_domain *domain = step->tally->domain;
	uint32_t n_open = 0;

	for (uint32_t i = 0; i < kv_div_up_u32(domain->n_slots_touched, 64); i++)
		n_open += (uint32_t)__builtin_popcountll(domain->open_bits[i]);
	step->tally->phase = TALLY_POOL;
	if (kv_audit_equal(step->err, "open sessions", domain->n_sessions, n_open) == KV_OK &&
		kv_audit_equal(step->err, "sessions in the lease heap", domain->n_leases, n_open) == KV_OK)
		return KV_OK;
	return kv_tally_found(step, 0);
}

static enum kv_status do_slots(struct kv_tally_step *step)
{
	struct kv_tally *tally = step->tally;
	struct kv_domain *domain = tally->domain;

	for (; tally->slot_idx < domain->n_slots_touched && step->n_left > 0; tally->slot_idx++) {
		const struct kv_session *session = &domain->slots[tally->slot_idx].session;

		const bool is_open = session->state == KV_SESSION_OPEN;
		const enum fit how = is_open ? fit(step, kv_audit_session_cost(session)) : FITS_NONE;

		if (how == FITS_NEXT)
			return KV_OK;
		if (how == FITS_NONE)
			kv_tally_spend(step, 1);
		if (!is_open)
			continue;
		tally->counts.n_sessions++;
		tally->counts.n_sessions_unsummed += how == FITS_NONE;
		if (kv_audit_open_slot(domain, tally->slot_idx, step->err) != KV_OK ||
			(how == FITS && kv_audit_session_sums(session, step->err) != KV_OK))
			return kv_tally_found(step, session->handle);
	}
	return tally->slot_idx >= domain->n_slots_touched ? end_slots(step) : KV_OK;
}

/* ---- tables ---- */

static enum kv_status found_entry(struct kv_tally_step *step, const struct kv_sequence *sequence, uint32_t g,
	uint32_t entry_idx, uint32_t block_idx)
{
	(void)kv_fail(step->err, KV_INTERNAL, "audit: sequence %llu, group %u, entry %u: block %u of %u",
		(unsigned long long)sequence->id, g, entry_idx, block_idx,
		step->tally->pool->blocks[g].n_blocks);
	return kv_tally_found(step, sequence->session ? sequence->session->handle : 0);
}

/* Counts on in one table; done when n_counted is UINT32_MAX. */
static enum kv_status count_table(struct kv_tally_step *step, struct kv_sequence *sequence, uint32_t g)
{
	struct kv_tally *tally = step->tally;
	struct kv_block_pool *blocks = &tally->pool->blocks[g];
	struct kv_block_table *table = &sequence->tables[g];
	uint32_t entries[RUN_ENTRIES];

	table->n_counted = kv_block_table_n_counted(table, blocks);
	table->tally_serial = tally->serial;
	while (table->n_counted < table->n_blocks && step->n_left > 0) {
		const uint32_t first = table->n_counted;
		const bool is_before = first < table->gap_first && kv_block_table_has_gap(table);
		const uint32_t end = is_before ? table->gap_first : table->n_blocks;
		uint32_t n = end - first < RUN_ENTRIES ? end - first : RUN_ENTRIES;

		if (first >= table->gap_first && first < table->gap_end) {
			table->n_counted = table->gap_end;
			continue;
		}
		n = n < step->n_left ? n : step->n_left;
		kv_block_table_copy(table, &tally->pool->tables, first, n, entries);
		for (uint32_t i = 0; i < n; i++) {
			if (entries[i] >= blocks->n_blocks)
				return found_entry(step, sequence, g, first + i, entries[i]);
			blocks->tally->owners[entries[i]]++;
			blocks->tally->pins[entries[i]] += table->is_pinned;
		}
		table->n_counted = first + n;
		tally->counts.n_entries += n;
		kv_tally_spend(step, n);
	}
	if (table->n_counted >= table->n_blocks)
		table->n_counted = UINT32_MAX;
	return KV_OK;
}

/* Rows of the exact window are looked at one by one. */
static uint32_t sequence_cost(const struct kv_pool_spec *spec)
{
	return 1 + spec->n_layers / 8 + spec->n_layers * spec->exact_tokens / 64;
}

static enum kv_status do_tables(struct kv_tally_step *step)
{
	struct kv_tally *tally = step->tally;
	const struct kv_pool *pool = tally->pool;
	struct kv_sequence_slab *slab = pool->slab;

	while (tally->sequence_idx < slab->n_touched && step->n_left > 0) {
		struct kv_sequence *sequence = &slab->sequences[tally->sequence_idx];

		while (sequence->pool && tally->group_idx < pool->spec->n_tables) {
			const enum kv_status status = count_table(step, sequence, tally->group_idx);

			if (status != KV_OK)
				return status;
			if (sequence->tables[tally->group_idx].n_counted < UINT32_MAX)
				return KV_OK; /* goes on in the next step */
			tally->group_idx++;
		}
		kv_tally_spend(step, sequence->pool ? sequence_cost(pool->spec) : 1);
		tally->sequence_idx++;
		tally->group_idx = 0;
		if (!sequence->pool)
			continue;
		tally->counts.n_sequences++;
		if (kv_audit_sequence(sequence, step->err) != KV_OK)
			return kv_tally_found(step, sequence->session ? sequence->session->handle : 0);
	}
	if (tally->sequence_idx >= slab->n_touched) {
		tally->sequence_idx = UINT32_MAX;
		tally->phase = TALLY_QUIET;
	}
	return KV_OK;
}

void kv_tally_born(struct kv_tally *tally, struct kv_sequence *sequence)
{
	if (sequence->pool != tally->pool || sequence->slab_idx > tally->sequence_idx)
		return;
	for (uint32_t g = 0; g < sequence->pool->spec->n_tables; g++) {
		if (sequence->slab_idx == tally->sequence_idx && g >= tally->group_idx)
			break;
		sequence->tables[g].tally_serial = tally->serial;
		sequence->tables[g].n_counted = UINT32_MAX;
	}
}

/* ---- published prefixes ---- */

#define NODE_COST 8u /* its tokens are hashed */

static enum kv_status do_nodes(struct kv_tally_step *step)
{
	struct kv_tally *tally = step->tally;
	const struct kv_pool *pool = tally->pool;
	const uint32_t n_touched = kv_prefix_n_nodes_touched(pool);

	for (; tally->idx < n_touched && step->n_left > 0; tally->idx++) {
		const bool is_used = kv_prefix_blocks_of(pool, tally->idx) != NULL;
		const char *what = is_used ? kv_prefix_check_node(pool, tally->idx) : NULL;

		kv_tally_spend(step, is_used ? NODE_COST : 1);
		if (what) {
			(void)kv_fail(step->err, KV_INTERNAL, "audit: prefix node %u: %s", tally->idx, what);
			return kv_tally_found(step, 0);
		}
	}
	if (tally->idx < n_touched)
		return KV_OK;
	for (uint32_t g = 0; g < pool->spec->n_groups; g++) {
		if (kv_audit_equal(step->err, "kept blocks and prefix nodes", pool->blocks[g].counts.n_kept,
			    kv_prefix_counts(pool).n_nodes) != KV_OK)
			return kv_tally_found(step, 0);
	}
	tally->phase = TALLY_SUMS;
	return KV_OK;
}

/* ---- sums ---- */

static enum kv_status do_pool_sums(struct kv_tally_step *step)
{
	const enum fit how = fit(step, kv_audit_pool_cost(step->tally->pool));

	if (how == FITS_NEXT)
		return KV_OK;
	step->tally->phase = TALLY_POOL;
	step->tally->counts.n_pools_unsummed += how == FITS_NONE;
	return how == FITS && kv_audit_pool_sums(step->tally->pool, step->err) != KV_OK
		? kv_tally_found(step, 0)
		: KV_OK;
}

static enum kv_status do_tenants(struct kv_tally_step *step)
{
	const enum fit how = fit(step, kv_audit_tenants_cost(step->tally->domain));

	if (how == FITS_NEXT)
		return KV_OK;
	step->tally->phase = TALLY_OVER;
	if (how == FITS_NONE) {
		step->tally->counts.n_tenants_unsummed = step->tally->domain->tenants.n_touched - 1;
		return KV_OK;
	}
	const enum kv_status status = kv_audit_tenant_sums(step->tally->domain, step->err);

	return status == KV_INTERNAL ? kv_tally_found(step, 0) : status;
}

/* ---- all of it ---- */

static enum kv_status check_busy(const struct kv_domain *domain, struct kv_error *err)
{
	if (!domain->capture && !domain->stage)
		return KV_OK;
	return kv_fail(err, KV_BUSY_RETRY, "no audit while a snapshot is written or restored");
}

enum kv_status kv_tally_create(struct kv_domain *domain, struct kv_tally **out, struct kv_error *err)
{
	const enum kv_status status = check_busy(domain, err);

	KV_ASSERT(domain->tally == NULL);
	if (status != KV_OK)
		return status;

	struct kv_tally *tally = kv_alloc(1, sizeof(*tally));

	if (!tally)
		return kv_fail(err, KV_NO_MEMORY, "audit");
	tally->domain = domain;
	/* 0 is what new tables say. */
	if (++domain->tally_serial == 0)
		domain->tally_serial = 1;
	tally->serial = domain->tally_serial;
	domain->tally = tally;
	*out = tally;
	return KV_OK;
}

void kv_tally_destroy(struct kv_tally *tally)
{
	if (!tally)
		return;
	leave_pool(tally);
	tally->domain->tally = NULL;
	kv_free(tally);
}

void kv_tally_pool_gone(struct kv_tally *tally, const struct kv_pool *pool)
{
	if (tally->pool != pool)
		return;
	leave_pool(tally);
	tally->phase = TALLY_POOL;
}

const struct kv_pool *kv_tally_wants_quiet(const struct kv_tally *tally)
{
	return tally && tally->phase == TALLY_QUIET ? tally->pool : NULL;
}

struct kv_tally_counts kv_tally_counts(const struct kv_tally *tally)
{
	return tally->counts;
}

static enum kv_status go_on(struct kv_tally_step *step, bool is_quiet)
{
	switch (step->tally->phase) {
	case TALLY_SLOTS:
		return do_slots(step);
	case TALLY_POOL:
		return next_pool(step);
	case TALLY_TABLES:
		return do_tables(step);
	case TALLY_QUIET:
		return is_quiet ? kv_tally_quiet(step) : KV_OK;
	case TALLY_BLOCKS:
		return kv_tally_blocks(step);
	case TALLY_FREE_IDS:
		return kv_tally_free_ids(step);
	case TALLY_NODES:
		return do_nodes(step);
	case TALLY_SUMS:
		return do_pool_sums(step);
	case TALLY_TENANTS:
		return do_tenants(step);
	case TALLY_OVER:
		break;
	}
	return KV_OK;
}

enum kv_status kv_tally_step(struct kv_tally *tally, uint32_t n_max, bool is_quiet, bool *is_done,
	struct kv_finding *finding, struct kv_error *err)
{
	struct kv_tally_step step = {
		.tally = tally, .n_max = n_max, .n_left = n_max, .finding = finding, .err = err
	};
	enum kv_status status = check_busy(tally->domain, err);
	enum kv_tally_phase before;

	KV_ASSERT(n_max <= KV_TALLY_STEP_MAX);
	do {
		before = tally->phase;
		if (status == KV_OK)
			status = go_on(&step, is_quiet);
		/* The next phase may use what is left; a quiet moment has to be asked for. */
	} while (status == KV_OK && tally->phase != before && tally->phase != TALLY_QUIET && step.n_left > 0);
	*is_done = tally->phase == TALLY_OVER;
	return status;
}
