/*
 * Audit of one pool: every number is counted again from block tables, plans and lists.
 */
#include <stdio.h>
#include <string.h>

#include "core/audit_internal.h"
#include "core/capture.h"
#include "core/domain_internal.h"
#include "core/memory.h"
#include "core/prefix_internal.h"
#include "core/report.h"
#include "core/stage.h"

/* What is counted, and where the first difference goes. */
struct audit {
	struct kv_pool *pool;
	struct kv_plan *const *plans;
	uint32_t n_plans;
	struct kv_error *err;
	uint32_t *owners[KV_TABLES_MAX], *in_flight[KV_TABLES_MAX], *kept[KV_TABLES_MAX]; /* [n_blocks] */
	uint32_t *pins[KV_TABLES_MAX]; /* [n_blocks] table entries of pinned sequences */
	uint64_t *layer_tokens;        /* [n_layers] of sequences that are counted */
	uint64_t n_tokens, n_chunks;
	uint32_t n_resting_entries[KV_TABLES_MAX];
	uint32_t n_live, n_gone;
	struct kv_memory_report sequences; /* sums over reports */
};

static enum kv_status take_scratch(struct audit *audit)
{
	const struct kv_pool_spec *spec = audit->pool->spec;

	audit->layer_tokens = kv_alloc(spec->n_layers, sizeof(audit->layer_tokens[0]));
	bool is_whole = audit->layer_tokens != NULL;

	for (uint32_t g = 0; g < spec->n_tables; g++) {
		audit->owners[g] = kv_alloc(spec->n_blocks[g], sizeof(uint32_t));
		audit->in_flight[g] = kv_alloc(spec->n_blocks[g], sizeof(uint32_t));
		audit->kept[g] = kv_alloc(spec->n_blocks[g], sizeof(uint32_t));
		audit->pins[g] = kv_alloc(spec->n_blocks[g], sizeof(uint32_t));
		is_whole = is_whole && audit->owners[g] && audit->in_flight[g] && audit->kept[g] &&
			audit->pins[g];
	}
	return is_whole ? KV_OK : kv_fail(audit->err, KV_NO_MEMORY, "audit: scratch");
}

static void return_scratch(struct audit *audit)
{
	kv_free(audit->layer_tokens);
	for (uint32_t g = 0; g < audit->pool->spec->n_tables; g++) {
		kv_free(audit->owners[g]);
		kv_free(audit->in_flight[g]);
		kv_free(audit->kept[g]);
		kv_free(audit->pins[g]);
	}
}

/* ---- sequences ---- */

static enum kv_status count_table(struct audit *audit, const struct kv_sequence *sequence, uint32_t g)
{
	const struct kv_pool *pool = audit->pool;
	const struct kv_block_table *table = &sequence->tables[g];

	for (uint32_t first = 0; first < table->n_blocks; first += KV_CHUNK_ENTRIES) {
		const uint32_t n_left = table->n_blocks - first;
		const uint32_t n = n_left < KV_CHUNK_ENTRIES ? n_left : KV_CHUNK_ENTRIES;
		uint32_t entries[KV_CHUNK_ENTRIES];

		kv_block_table_copy(table, &pool->tables, first, n, entries);
		for (uint32_t i = 0; i < n; i++) {
			const bool is_gap = first + i >= table->gap_first && first + i < table->gap_end;

			if (is_gap && entries[i] == KV_BLOCK_NONE)
				continue;
			if (entries[i] >= pool->spec->n_blocks[g])
				return kv_fail(audit->err, KV_INTERNAL,
					"audit: sequence %llu, group %u, entry %u: block %u of %u",
					(unsigned long long)sequence->id, g, first + i, entries[i],
					pool->spec->n_blocks[g]);
			audit->owners[g][entries[i]]++;
			audit->pins[g][entries[i]] += sequence->n_pins > 0;
		}
	}
	return KV_OK;
}

static enum kv_status count_live(struct audit *audit, const struct kv_sequence *sequence)
{
	struct kv_memory_report report;
	uint32_t length_min, length_max;

	kv_sequence_lengths(sequence, &length_min, &length_max);
	audit->n_live++;
	audit->n_tokens += length_min;
	for (uint32_t l = 0; l < audit->pool->spec->n_layers; l++)
		audit->layer_tokens[l] += kv_sequence_n_held(sequence, l);
	kv_report_sequence(sequence, &report);
	audit->sequences.payload_bytes += report.payload_bytes;
	audit->sequences.norms_bytes += report.norms_bytes;
	audit->sequences.scales_bytes += report.scales_bytes;
	audit->sequences.zeros_bytes += report.zeros_bytes;
	audit->sequences.exact_bytes += report.exact_bytes;
	audit->sequences.stored_bytes += report.stored_bytes;
	audit->sequences.dense_equivalent_bytes += report.dense_equivalent_bytes;
	for (uint32_t g = 0; kv_list_is_linked(&sequence->in_resting) && g < audit->pool->spec->n_tables; g++)
		audit->n_resting_entries[g] += kv_block_table_n_owned(&sequence->tables[g]);
	return kv_audit_sequence(sequence, audit->err);
}

static enum kv_status audit_sequences(struct audit *audit)
{
	struct kv_pool *pool = audit->pool;
	const struct kv_sequence_slab *slab = pool->slab;
	uint32_t n_used = 0;
	enum kv_status status = KV_OK;

	for (uint32_t i = 0; i < slab->n_touched && status == KV_OK; i++) {
		const struct kv_sequence *sequence = &slab->sequences[i];

		if (!sequence->pool)
			continue;
		n_used++;
		audit->n_chunks += kv_sequence_n_chunks(sequence);
		for (uint32_t g = 0; g < pool->spec->n_tables && status == KV_OK; g++)
			status = count_table(audit, sequence, g);
		if (status != KV_OK)
			break;
		if (kv_list_is_linked(&sequence->in_session) && kv_sequence_is_live(sequence)) {
			status = count_live(audit, sequence);
		} else {
			status = kv_audit_sequence(sequence, audit->err);
			audit->n_gone++;
		}
	}
	if (status == KV_OK)
		status = kv_audit_equal(audit->err, "sequence objects", slab->n_used, n_used);
	if (status == KV_OK)
		status = kv_audit_equal(
			audit->err, "free sequence objects", slab->n_freed, slab->n_touched - n_used);
	if (status == KV_OK)
		status = kv_audit_equal(audit->err, "sequences", pool->n_sequences, audit->n_live);
	for (uint32_t g = 0; g < pool->spec->n_tables && status == KV_OK; g++)
		status = kv_audit_equal(audit->err, "entries of resting sequences",
			pool->n_resting_entries[g], audit->n_resting_entries[g]);
	if (status == KV_OK)
		status = kv_audit_equal(audit->err, "zombies", pool->n_zombies, audit->n_gone);
	return status;
}

/* ---- blocks ---- */

struct flight_counter {
	struct kv_plan_visitor base;
	struct audit *audit;
};

static void count_flights(
	struct kv_plan_visitor *visitor, uint32_t group_idx, const uint32_t blocks[], uint32_t n)
{
	struct audit *audit = kv_container_of(visitor, struct flight_counter, base)->audit;

	for (uint32_t i = 0; i < n; i++) {
		if (blocks[i] == KV_BLOCK_NONE)
			continue;
		KV_ASSERT(blocks[i] < audit->pool->spec->n_blocks[group_idx]);
		audit->in_flight[group_idx][blocks[i]]++;
	}
}

static enum kv_status fail_block(
	const struct audit *audit, uint32_t g, uint32_t idx, const char *what, uint32_t got, uint32_t counted)
{
	return kv_fail(audit->err, KV_INTERNAL,
		"audit: group %u, block %u: %s: recorded %u, counted %u; last taken by session %016llx", g,
		idx, what, got, counted, (unsigned long long)audit->pool->blocks[g].taken_by[idx]);
}

static enum kv_status audit_free_ids(struct audit *audit, uint32_t g)
{
	const struct kv_block_pool *blocks = &audit->pool->blocks[g];
	uint32_t *seen = audit->in_flight[g]; /* compared already: used again as marks */

	for (uint32_t i = 0; i < blocks->n_freed; i++) {
		const uint32_t idx = blocks->free_ids[i];

		if (idx >= blocks->n_touched || blocks->owners[idx] > 0 || blocks->in_flight[idx] > 0)
			return fail_block(audit, g, idx, "in the free list but used", blocks->owners[idx],
				blocks->in_flight[idx]);
		if (seen[idx]++ > 0)
			return fail_block(audit, g, idx, "times in the free list", 1, 2);
	}
	return kv_audit_equal(audit->err, "blocks in the free list", blocks->counts.n_free,
		(uint64_t)blocks->n_freed + blocks->n_blocks - blocks->n_touched);
}

static enum kv_status audit_counts(struct audit *audit, uint32_t g)
{
	const struct kv_block_pool *blocks = &audit->pool->blocks[g];
	const struct kv_block_counts *counts = &blocks->counts;
	struct kv_block_counts counted = { 0 };
	enum kv_status status;

	for (uint32_t i = 0; i < blocks->n_blocks; i++) {
		const uint32_t n_owners = audit->owners[g][i], n_in_flight = audit->in_flight[g][i];

		if (blocks->owners[i] != n_owners)
			return fail_block(audit, g, i, "owners", blocks->owners[i], n_owners);
		if (blocks->in_flight[i] != n_in_flight)
			return fail_block(audit, g, i, "in flight", blocks->in_flight[i], n_in_flight);
		if (blocks->pins[i] != audit->pins[g][i])
			return fail_block(audit, g, i, "pins", blocks->pins[i], audit->pins[g][i]);
		counted.n_pinned += audit->pins[g][i] > 0;
		counted.n_shared += n_owners > 1 && audit->pins[g][i] == 0;
		counted.n_extra_owners += n_owners > 1 ? n_owners - 1 : 0;
		counted.n_owned += n_owners == 1 && audit->pins[g][i] == 0;
		counted.n_draining += n_owners == 0 && n_in_flight > 0;
		counted.n_free += n_owners == 0 && n_in_flight == 0;
	}
	kv_list_for_each (node, &audit->pool->sessions)
		counted.n_reserved += kv_container_of(node, struct kv_session, in_pool)->n_blocks_reserved[g];
	status = kv_audit_equal(audit->err, "blocks in all", counts->n_total, blocks->n_blocks);
	if (status == KV_OK)
		status = kv_audit_equal(audit->err, "free blocks", counts->n_free, counted.n_free);
	if (status == KV_OK)
		status = kv_audit_equal(audit->err, "owned blocks", counts->n_owned, counted.n_owned);
	if (status == KV_OK)
		status = kv_audit_equal(audit->err, "shared blocks", counts->n_shared, counted.n_shared);
	if (status == KV_OK)
		status = kv_audit_equal(audit->err, "pinned blocks", counts->n_pinned, counted.n_pinned);
	if (status == KV_OK)
		status = kv_audit_equal(audit->err, "owners beyond the first", counts->n_extra_owners,
			counted.n_extra_owners);
	if (status == KV_OK)
		status =
			kv_audit_equal(audit->err, "draining blocks", counts->n_draining, counted.n_draining);
	if (status == KV_OK)
		status =
			kv_audit_equal(audit->err, "reserved blocks", counts->n_reserved, counted.n_reserved);
	if (status == KV_OK && counts->n_reserved > counts->n_free)
		status = kv_audit_equal(
			audit->err, "free blocks for reservations", counts->n_free, counts->n_reserved);
	return status;
}

/* Copies that wait own their source and hold their destination. */
static enum kv_status count_copies(struct audit *audit)
{
	const struct kv_pool *pool = audit->pool;

	for (uint32_t i = 0; i < pool->n_copies; i++) {
		const struct kv_copy_op *op = &pool->copies[i];
		const uint32_t n_blocks =
			op->group_idx < pool->spec->n_groups ? pool->spec->n_blocks[op->group_idx] : 0;

		if (op->block_from >= n_blocks || op->block_to >= n_blocks)
			return kv_fail(audit->err, KV_INTERNAL,
				"audit: copy %u: group %u, blocks %u and %u of %u", i, op->group_idx,
				op->block_from, op->block_to, n_blocks);
		audit->owners[op->group_idx][op->block_from]++;
		audit->in_flight[op->group_idx][op->block_to]++;
	}
	return KV_OK;
}

/* A running snapshot owns what it has to write, one that is being restored what no table has yet. */
static void count_snapshots(struct audit *audit)
{
	const struct kv_pool *pool = audit->pool;
	const struct kv_domain *domain = pool->domain;

	if (domain->capture)
		kv_capture_count(domain->capture, pool, audit->owners);
	if (domain->stage)
		kv_stage_count(domain->stage, pool, audit->owners);
}

/* Published blocks have their node as an owner. */
static enum kv_status count_prefixes(struct audit *audit)
{
	const struct kv_pool *pool = audit->pool;
	uint32_t n_nodes = 0;

	for (uint32_t i = 0; i < kv_prefix_n_nodes_touched(pool); i++) {
		const uint32_t *blocks = kv_prefix_blocks_of(pool, i);

		if (!blocks)
			continue;
		n_nodes++;
		for (uint32_t g = 0; g < pool->spec->n_groups; g++) {
			if (blocks[g] >= pool->spec->n_blocks[g])
				return kv_fail(audit->err, KV_INTERNAL,
					"audit: prefix node %u, group %u: block %u of %u", i, g, blocks[g],
					pool->spec->n_blocks[g]);
			audit->owners[g][blocks[g]]++;
			audit->kept[g][blocks[g]]++;
		}

		const char *what = kv_prefix_check_node(pool, i);

		if (what)
			return kv_fail(audit->err, KV_INTERNAL, "audit: prefix node %u: %s", i, what);
	}
	return kv_audit_equal(audit->err, "prefix nodes", kv_prefix_counts(pool).n_nodes, n_nodes);
}

/* The list of idle blocks holds exactly those that are. */
static enum kv_status audit_idle(struct audit *audit, uint32_t g)
{
	const struct kv_block_pool *blocks = &audit->pool->blocks[g];
	uint32_t n_kept = 0, n_kept_shared = 0, n_idle = 0, n_listed = 0;

	for (uint32_t i = 0; i < blocks->n_blocks; i++) {
		const bool is_kept = audit->kept[g][i] > 0;
		const bool is_idle = is_kept && audit->owners[g][i] == 1 && audit->in_flight[g][i] == 0;
		const uint32_t flags = (is_kept ? KV_BLOCK_KEPT : 0u) | (is_idle ? KV_BLOCK_IDLE : 0u);

		if (audit->kept[g][i] > 1 || blocks->flags[i] != flags)
			return fail_block(audit, g, i, "flags of publishing", blocks->flags[i], flags);
		n_kept += is_kept;
		n_kept_shared += is_kept && audit->owners[g][i] > 1;
		n_idle += is_idle;
	}
	for (uint32_t i = blocks->idle_first; i != UINT32_MAX && n_listed <= n_idle; i = blocks->idle_next[i])
		n_listed += (blocks->flags[i] & KV_BLOCK_IDLE) != 0;

	enum kv_status status = kv_audit_equal(audit->err, "kept blocks", blocks->counts.n_kept, n_kept);

	if (status == KV_OK)
		status = kv_audit_equal(audit->err, "kept blocks with other owners",
			blocks->counts.n_kept_shared, n_kept_shared);
	if (status == KV_OK)
		status = kv_audit_equal(audit->err, "idle blocks", blocks->counts.n_idle, n_idle);
	if (status == KV_OK)
		status = kv_audit_equal(audit->err, "listed idle blocks", n_listed, n_idle);
	return status;
}

static enum kv_status audit_blocks(struct audit *audit)
{
	const struct kv_pool *pool = audit->pool;
	struct flight_counter counter = { { count_flights }, audit };
	enum kv_status status = count_copies(audit);

	count_snapshots(audit);
	if (status == KV_OK)
		status = count_prefixes(audit);

	for (uint32_t i = 0; i < audit->n_plans; i++) {
		if (audit->plans[i]->pool == pool)
			kv_plan_visit_blocks(audit->plans[i], &counter.base);
	}
	for (uint32_t g = 0; g < pool->spec->n_tables && status == KV_OK; g++) {
		status = audit_counts(audit, g);
		if (status == KV_OK)
			status = audit_idle(audit, g);
		if (status == KV_OK) {
			memset(audit->in_flight[g], 0, sizeof(uint32_t) * (uint64_t)pool->spec->n_blocks[g]);
			status = audit_free_ids(audit, g);
		}
		if (status != KV_OK)
			kv_error_wrap(audit->err, "group %u", g);
	}
	return status;
}

/* ---- tables, sessions, report ---- */

static enum kv_status audit_tables(struct audit *audit)
{
	const struct kv_table_arena *arena = &audit->pool->tables;
	uint32_t n_free = 0;
	enum kv_status status =
		kv_audit_equal(audit->err, "table chunks", arena->n_chunks_used, audit->n_chunks);

	for (uint32_t i = arena->free_idx; i != UINT32_MAX && n_free <= arena->n_chunks_touched;
		i = arena->chunks[i].next_idx)
		n_free++;
	if (status == KV_OK)
		status = kv_audit_equal(audit->err, "free table chunks", n_free,
			arena->n_chunks_touched - arena->n_chunks_used);
	return status;
}

static uint32_t list_length(const struct kv_list *list)
{
	uint32_t n = 0;

	kv_list_for_each (node, list)
		n++;
	return n;
}

/* Sums of the pool, in terms of its sessions and of its sequences. */
static enum kv_status audit_sessions(struct audit *audit)
{
	struct kv_pool *pool = audit->pool;
	uint64_t n_tokens = 0, n_chunks_live = 0, n_stored = 0;
	uint32_t n_listed = 0;
	enum kv_status status = KV_OK;

	kv_list_for_each (node, &pool->sessions) {
		struct kv_session *session = kv_container_of(node, struct kv_session, in_pool);
		struct kv_memory_report report;

		if (session->state != KV_SESSION_OPEN || session->pool != pool)
			return kv_fail(audit->err, KV_INTERNAL, "audit: session %016llx in the wrong list",
				(unsigned long long)session->handle);
		status = kv_audit_equal(audit->err, "sequences of a session", session->n_sequences,
			list_length(&session->sequences));
		if (status != KV_OK)
			return status;
		kv_report_session(session, &report);
		n_listed += session->n_sequences;
		n_tokens += report.n_tokens;
		n_stored += report.stored_bytes;
		n_chunks_live += kv_slot_of(session)->n_chunks;
		kv_list_for_each (in_session, &session->sequences)
			n_chunks_live -= kv_sequence_n_chunks(
				kv_container_of(in_session, struct kv_sequence, in_session));
	}
	status = kv_audit_equal(
		audit->err, "sessions of the pool", pool->n_sessions, list_length(&pool->sessions));
	if (status == KV_OK)
		status = kv_audit_equal(audit->err, "sequences of sessions", pool->n_sequences, n_listed);
	if (status == KV_OK)
		status = kv_audit_equal(audit->err, "tokens of sessions", n_tokens, audit->n_tokens);
	if (status == KV_OK)
		status = kv_audit_equal(
			audit->err, "bytes of sessions", n_stored, audit->sequences.stored_bytes);
	if (status == KV_OK)
		status = kv_audit_equal(audit->err, "table chunks of sessions", n_chunks_live, 0);
	return status;
}

static enum kv_status audit_report(struct audit *audit)
{
	const struct kv_pool *pool = audit->pool;
	const struct kv_memory_report *sum = &audit->sequences;
	struct kv_memory_report report;
	uint64_t n_page_bytes = 0;
	enum kv_status status =
		kv_audit_equal(audit->err, "tokens", pool->n_tokens_committed, audit->n_tokens);

	for (uint32_t l = 0; l < pool->spec->n_layers && status == KV_OK; l++)
		status = kv_audit_equal(
			audit->err, "tokens of a layer", pool->layer_tokens[l], audit->layer_tokens[l]);
	if (status != KV_OK)
		return status;
	kv_report_pool(pool, &report);
	KV_ASSERT(kv_pool_spec_page_bytes(pool->spec, &n_page_bytes));
	status = kv_audit_equal(audit->err, "bytes of blocks",
		report.stored_bytes + report.cached_bytes + report.workspace_bytes + report.reserved_bytes +
			report.free_bytes,
		n_page_bytes + report.shared_bytes);
	if (status == KV_OK)
		status = kv_audit_equal(audit->err, "payload", report.payload_bytes, sum->payload_bytes);
	if (status == KV_OK)
		status = kv_audit_equal(audit->err, "norms", report.norms_bytes, sum->norms_bytes);
	if (status == KV_OK)
		status = kv_audit_equal(audit->err, "scales", report.scales_bytes, sum->scales_bytes);
	if (status == KV_OK)
		status = kv_audit_equal(audit->err, "zeros", report.zeros_bytes, sum->zeros_bytes);
	if (status == KV_OK)
		status = kv_audit_equal(audit->err, "exact", report.exact_bytes, sum->exact_bytes);
	if (status == KV_OK)
		status = kv_audit_equal(audit->err, "dense equivalent", report.dense_equivalent_bytes,
			sum->dense_equivalent_bytes);
	return status;
}

enum kv_status kv_audit_pool(
	struct kv_pool *pool, struct kv_plan *const plans[], uint32_t n_plans, struct kv_error *err)
{
	struct audit audit = { .pool = pool, .plans = plans, .n_plans = n_plans, .err = err };
	enum kv_status status = take_scratch(&audit);

	if (status == KV_OK)
		status = audit_sequences(&audit);
	if (status == KV_OK)
		status = audit_blocks(&audit);
	if (status == KV_OK)
		status = audit_tables(&audit);
	if (status == KV_OK)
		status = audit_sessions(&audit);
	if (status == KV_OK)
		status = audit_report(&audit);
	return_scratch(&audit);
	return status;
}
