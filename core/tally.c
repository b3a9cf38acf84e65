#include "core/tally.h"

#include <stdio.h>
#include <string.h>

#include "core/audit_internal.h"
#include "core/backend.h"
#include "core/domain_internal.h"
#include "core/memory.h"
#include "core/prefix_internal.h"

/* Entries that are copied out of a table at a time: finding the first takes a walk along its chunks. */
#define RUN_ENTRIES 512u

enum phase { SLOTS, POOL, TABLES, QUIET, BLOCKS, FREE_IDS, NODES, SUMS, TENANTS, OVER };

struct kv_tally {
	struct kv_domain *domain;
	enum phase phase;
	uint32_t serial;
	uint64_t pools_done; /* bit per pool_idx */
	struct kv_pool *pool;
	struct kv_block_tally groups[KV_TABLES_MAX];
	/* where it goes on; sequence_idx UINT32_MAX: all tables are walked */
	uint32_t slot_idx, sequence_idx, group_idx, idx;
	struct kv_tally_counts counts;
	uint16_t copies[KV_TALLY_STEP_MAX]; /* that wait, by source: of the blocks of one step */
};

/* One step. */
struct step {
	struct kv_tally *tally;
	uint32_t n_max, n_left;
	struct kv_finding *finding;
	struct kv_error *err;
};

static void spend(struct step *step, uint32_t n)
{
	step->n_left -= n < step->n_left ? n : step->n_left;
}

/* What has to be looked at within one step. */
enum fit {
	FITS,      /* its cost is spent */
	FITS_NEXT, /* the next step has enough */
	FITS_NONE, /* no step has */
};

static enum fit fit(struct step *step, uint64_t cost)
{
	if (cost > step->n_max)
		return FITS_NONE;
	if (cost > step->n_left) {
		step->n_left = 0;
		return FITS_NEXT;
	}
	spend(step, (uint32_t)cost);
	return FITS;
}

/* ---- what is wrong ---- */

static enum kv_status found(struct step *step, uint64_t session)
{
	const struct kv_pool *pool = step->tally->pool;

	step->finding->session = session;
	snprintf(step->finding->pool, sizeof(step->finding->pool), "%s", pool ? pool->spec->name : "");
	if (pool)
		kv_error_wrap(step->err, "pool \"%s\"", pool->spec->name);
	return KV_INTERNAL;
}

static enum kv_status found_block(
	struct step *step, uint32_t g, uint32_t idx, const char *what, uint64_t recorded, uint64_t counted)
{
	const uint64_t session = step->tally->pool->blocks[g].taken_by[idx];

	(void)kv_fail(step->err, KV_INTERNAL,
		"audit: group %u, block %u: %s: recorded %llu, counted %llu; last taken by session %016llx",
		g, idx, what, (unsigned long long)recorded, (unsigned long long)counted,
		(unsigned long long)session);
	return found(step, session);
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

static enum kv_status enter_pool(struct step *step, struct kv_pool *pool)
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
	tally->phase = TABLES;
	return KV_OK;
}

static enum kv_status next_pool(struct step *step)
{
	struct kv_tally *tally = step->tally;
	const struct kv_domain *domain = tally->domain;

	leave_pool(tally);
	for (uint32_t i = 0; i < domain->n_pools; i++) {
		if (!(tally->pools_done >> domain->pools[i]->pool_idx & 1))
			return enter_pool(step, domain->pools[i]);
	}
	tally->phase = TENANTS;
	return KV_OK;
}

/* ---- sessions ---- */

static enum kv_status end_slots(struct step *step)
{
	const struct kv_domain *domain = step->tally->domain;
	uint32_t n_open = 0;

	for (uint32_t i = 0; i < kv_div_up_u32(domain->n_slots_touched, 64); i++)
		n_open += (uint32_t)__builtin_popcountll(domain->open_bits[i]);
	step->tally->phase = POOL;
	if (kv_audit_equal(step->err, "open sessions", domain->n_sessions, n_open) == KV_OK &&
		kv_audit_equal(step->err, "sessions in the lease heap", domain->n_leases, n_open) == KV_OK)
		return KV_OK;
	return found(step, 0);
}

static enum kv_status do_slots(struct step *step)
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
			spend(step, 1);
		if (!is_open)
			continue;
		tally->counts.n_sessions++;
		if (kv_audit_open_slot(domain, tally->slot_idx, step->err) != KV_OK ||
			(how == FITS && kv_audit_session_sums(session, step->err) != KV_OK))
			return found(step, session->handle);
	}
	return tally->slot_idx >= domain->n_slots_touched ? end_slots(step) : KV_OK;
}

/* ---- tables ---- */

static enum kv_status found_entry(struct step *step, const struct kv_sequence *sequence, uint32_t g,
	uint32_t entry_idx, uint32_t block_idx)
{
	(void)kv_fail(step->err, KV_INTERNAL, "audit: sequence %llu, group %u, entry %u: block %u of %u",
		(unsigned long long)sequence->id, g, entry_idx, block_idx,
		step->tally->pool->blocks[g].n_blocks);
	return found(step, sequence->session ? sequence->session->handle : 0);
}

/* Counts on in one table; done when n_counted is UINT32_MAX. */
static enum kv_status count_table(struct step *step, struct kv_sequence *sequence, uint32_t g)
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
		spend(step, n);
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

static enum kv_status do_tables(struct step *step)
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
		spend(step, sequence->pool ? sequence_cost(pool->spec) : 1);
		tally->sequence_idx++;
		tally->group_idx = 0;
		if (!sequence->pool)
			continue;
		tally->counts.n_sequences++;
		if (kv_audit_sequence(sequence, step->err) != KV_OK)
			return found(step, sequence->session ? sequence->session->handle : 0);
	}
	if (tally->sequence_idx >= slab->n_touched) {
		tally->sequence_idx = UINT32_MAX;
		tally->phase = QUIET;
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

/* ---- blocks ---- */

static enum kv_status begin_quiet(struct step *step)
{
	struct kv_tally *tally = step->tally;
	const struct kv_pool *pool = tally->pool;

	for (uint32_t g = 0; g < pool->spec->n_tables; g++)
		tally->groups[g].is_watched = true;
	for (uint32_t i = 0; i < pool->n_copies; i++) {
		const struct kv_copy_op *op = &pool->copies[i];
		const struct kv_block_pool *blocks = &pool->blocks[op->group_idx];

		if (blocks->in_flight[op->block_to] != 1)
			return found_block(step, op->group_idx, op->block_to, "in flight for a copy",
				blocks->in_flight[op->block_to], 1);
		tally->groups[op->group_idx].is_seen[op->block_to] = 1;
	}
	spend(step, pool->n_copies);
	tally->group_idx = tally->idx = 0;
	tally->phase = BLOCKS;
	return KV_OK;
}

/* Somebody looked at a block that was in flight at the quiet moment. */
static enum kv_status check_moving(struct step *step, uint32_t g)
{
	const uint32_t idx = step->tally->groups[g].moving_idx;

	if (idx == UINT32_MAX)
		return KV_OK;
	return found_block(
		step, g, idx, "in flight without a batch", step->tally->pool->blocks[g].in_flight[idx], 0);
}

static bool is_in_idle_list(const struct kv_block_pool *blocks, uint32_t idx)
{
	const uint32_t prev = blocks->idle_prev[idx], next = blocks->idle_next[idx];

	return (prev == UINT32_MAX ? blocks->idle_first : blocks->idle_next[prev]) == idx &&
		(next == UINT32_MAX ? blocks->idle_last : blocks->idle_prev[next]) == idx;
}

static enum kv_status check_block(struct step *step, uint32_t g, uint32_t idx, uint32_t n_copies)
{
	const struct kv_pool *pool = step->tally->pool;
	struct kv_block_pool *blocks = &step->tally->pool->blocks[g];
	const bool is_kept = g < pool->spec->n_groups && kv_prefix_is_kept(pool, g, idx);
	const uint32_t n_owners = step->tally->groups[g].owners[idx] + n_copies + is_kept;
	const bool is_idle = is_kept && n_owners == 1 && blocks->in_flight[idx] == 0;
	const uint32_t flags = (is_kept ? KV_BLOCK_KEPT : 0u) | (is_idle ? KV_BLOCK_IDLE : 0u);

	if (blocks->owners[idx] != n_owners)
		return found_block(step, g, idx, "owners", blocks->owners[idx], n_owners);
	if (blocks->pins[idx] != step->tally->groups[g].pins[idx])
		return found_block(step, g, idx, "pins", blocks->pins[idx], step->tally->groups[g].pins[idx]);
	if (blocks->flags[idx] != flags)
		return found_block(step, g, idx, "flags of publishing", blocks->flags[idx], flags);
	if (is_idle && !is_in_idle_list(blocks, idx))
		return found_block(step, g, idx, "in the list of idle blocks", 1, 0);
	kv_block_pool_look(blocks, idx);
	kv_block_pool_count(blocks, idx);
	return KV_OK;
}

/* Copies that wait own their sources; of these blocks. */
static void count_copies(struct kv_tally *tally, uint32_t g, uint32_t first, uint32_t n)
{
	const struct kv_pool *pool = tally->pool;

	memset(tally->copies, 0, n * sizeof(tally->copies[0]));
	for (uint32_t i = 0; i < pool->n_copies; i++) {
		const struct kv_copy_op *op = &pool->copies[i];

		if (op->group_idx == g && op->block_from >= first && op->block_from - first < n)
			tally->copies[op->block_from - first]++;
	}
}

static enum kv_status check_counts(struct step *step, uint32_t g)
{
	const struct kv_block_pool *blocks = &step->tally->pool->blocks[g];
	const struct kv_block_counts *recorded = &blocks->counts, *counted = &step->tally->groups[g].counts;
	const struct {
		const char *what;
		uint64_t n_recorded, n_counted;
	} rows[] = {
		{ "free blocks", recorded->n_free, counted->n_free },
		{ "owned blocks", recorded->n_owned, counted->n_owned },
		{ "shared blocks", recorded->n_shared, counted->n_shared },
		{ "pinned blocks", recorded->n_pinned, counted->n_pinned },
		{ "owners beyond the first", recorded->n_extra_owners, counted->n_extra_owners },
		{ "draining blocks", recorded->n_draining, counted->n_draining },
		{ "kept blocks", recorded->n_kept, counted->n_kept },
		{ "kept blocks with other owners", recorded->n_kept_shared, counted->n_kept_shared },
		{ "idle blocks", recorded->n_idle, counted->n_idle },
		{ "blocks in the free list", (uint64_t)blocks->n_freed + blocks->n_blocks - blocks->n_touched,
			counted->n_free },
		{ "reserved blocks that are not free",
			recorded->n_reserved > recorded->n_free ? recorded->n_reserved - recorded->n_free : 0,
			0 },
	};

	for (uint32_t i = 0; i < KV_LENGTH(rows); i++) {
		if (kv_audit_equal(step->err, rows[i].what, rows[i].n_recorded, rows[i].n_counted) != KV_OK) {
			kv_error_wrap(step->err, "group %u", g);
			return found(step, 0);
		}
	}
	return kv_audit_paid(blocks, step->tally->groups[g].n_paid, g, step->err) == KV_OK ? KV_OK
											   : found(step, 0);
}

static enum kv_status do_blocks(struct step *step)
{
	struct kv_tally *tally = step->tally;
	const struct kv_pool *pool = tally->pool;
	enum kv_status status = KV_OK;

	while (tally->group_idx < pool->spec->n_tables && step->n_left > 0 && status == KV_OK) {
		const uint32_t g = tally->group_idx, first = tally->idx;
		const uint32_t n_more = pool->blocks[g].n_blocks - first;
		const uint32_t n = n_more < step->n_left ? n_more : step->n_left;

		count_copies(tally, g, first, n);
		for (uint32_t i = 0; i < n && status == KV_OK; i++)
			status = check_block(step, g, first + i, tally->copies[i]);
		spend(step, n);
		tally->counts.n_blocks += n;
		tally->idx += n;
		if (status == KV_OK)
			status = check_moving(step, g);
		if (status == KV_OK && n == n_more) {
			status = check_counts(step, g);
			tally->group_idx++;
			tally->idx = 0;
		}
	}
	if (tally->group_idx == pool->spec->n_tables) {
		tally->group_idx = tally->idx = 0;
		tally->phase = FREE_IDS;
	}
	return status;
}

static enum kv_status do_free_ids(struct step *step)
{
	struct kv_tally *tally = step->tally;

	for (; tally->group_idx < tally->pool->spec->n_tables; tally->group_idx++, tally->idx = 0) {
		const uint32_t g = tally->group_idx;
		const struct kv_block_pool *blocks = &tally->pool->blocks[g];

		for (; tally->idx < blocks->n_freed; tally->idx++) {
			const uint32_t idx = blocks->free_ids[tally->idx];

			if (step->n_left == 0)
				return KV_OK;
			spend(step, 1);
			if (idx >= blocks->n_touched) {
				(void)kv_fail(step->err, KV_INTERNAL,
					"audit: group %u: block %u in the free list was never used", g, idx);
				return found(step, 0);
			}
			if (blocks->owners[idx] > 0 || blocks->in_flight[idx] > 0)
				return found_block(step, g, idx, "in the free list but used",
					blocks->owners[idx], blocks->in_flight[idx]);
		}
	}
	tally->idx = 0;
	tally->phase = NODES;
	return KV_OK;
}

/* ---- published prefixes ---- */

#define NODE_COST 8u /* its tokens are hashed */

static enum kv_status do_nodes(struct step *step)
{
	struct kv_tally *tally = step->tally;
	const struct kv_pool *pool = tally->pool;
	const uint32_t n_touched = kv_prefix_n_nodes_touched(pool);

	for (; tally->idx < n_touched && step->n_left > 0; tally->idx++) {
		const bool is_used = kv_prefix_blocks_of(pool, tally->idx) != NULL;
		const char *what = is_used ? kv_prefix_check_node(pool, tally->idx) : NULL;

		spend(step, is_used ? NODE_COST : 1);
		if (what) {
			(void)kv_fail(step->err, KV_INTERNAL, "audit: prefix node %u: %s", tally->idx, what);
			return found(step, 0);
		}
	}
	if (tally->idx < n_touched)
		return KV_OK;
	for (uint32_t g = 0; g < pool->spec->n_groups; g++) {
		if (kv_audit_equal(step->err, "kept blocks and prefix nodes", pool->blocks[g].counts.n_kept,
			    kv_prefix_counts(pool).n_nodes) != KV_OK)
			return found(step, 0);
	}
	tally->phase = SUMS;
	return KV_OK;
}

/* ---- sums ---- */

static enum kv_status do_pool_sums(struct step *step)
{
	const enum fit how = fit(step, kv_audit_pool_cost(step->tally->pool));

	if (how == FITS_NEXT)
		return KV_OK;
	step->tally->phase = POOL;
	return how == FITS && kv_audit_pool_sums(step->tally->pool, step->err) != KV_OK ? found(step, 0)
											: KV_OK;
}

static enum kv_status do_tenants(struct step *step)
{
	const enum fit how = fit(step, kv_audit_tenants_cost(step->tally->domain));

	if (how == FITS_NEXT)
		return KV_OK;
	step->tally->phase = OVER;
	if (how == FITS_NONE)
		return KV_OK;
	const enum kv_status status = kv_audit_tenant_sums(step->tally->domain, step->err);

	return status == KV_INTERNAL ? found(step, 0) : status;
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
	tally->phase = POOL;
}

const struct kv_pool *kv_tally_wants_quiet(const struct kv_tally *tally)
{
	return tally && tally->phase == QUIET ? tally->pool : NULL;
}

struct kv_tally_counts kv_tally_counts(const struct kv_tally *tally)
{
	return tally->counts;
}

static enum kv_status go_on(struct step *step, bool is_quiet)
{
	switch (step->tally->phase) {
	case SLOTS:
		return do_slots(step);
	case POOL:
		return next_pool(step);
	case TABLES:
		return do_tables(step);
	case QUIET:
		return is_quiet ? begin_quiet(step) : KV_OK;
	case BLOCKS:
		return do_blocks(step);
	case FREE_IDS:
		return do_free_ids(step);
	case NODES:
		return do_nodes(step);
	case SUMS:
		return do_pool_sums(step);
	case TENANTS:
		return do_tenants(step);
	case OVER:
		break;
	}
	return KV_OK;
}

enum kv_status kv_tally_step(struct kv_tally *tally, uint32_t n_max, bool is_quiet, bool *is_done,
	struct kv_finding *finding, struct kv_error *err)
{
	struct step step = {
		.tally = tally, .n_max = n_max, .n_left = n_max, .finding = finding, .err = err
	};
	enum kv_status status = check_busy(tally->domain, err);
	enum phase before;

	KV_ASSERT(n_max <= KV_TALLY_STEP_MAX);
	do {
		before = tally->phase;
		if (status == KV_OK)
			status = go_on(&step, is_quiet);
		/* The next phase may use what is left; a quiet moment has to be asked for. */
	} while (status == KV_OK && tally->phase != before && tally->phase != QUIET && step.n_left > 0);
	*is_done = tally->phase == OVER;
	return status;
}
