/*
 * Sums in the audit of a running daemon: what sessions, pools and tenants say they have, against their parts.
 *
 * A sum changes with any of its parts, so it is true at a moment only, and all parts are added up within one
 * step. The caller is told how much that would be beforehand, and leaves out what is more than a step may
 * look at; those are left to the audit of everything at once. What tenants pay for blocks needs no such
 * bound: block pools count it by tenant, and the tally counts along (tally.c).
 */
#include <stdio.h>
#include <string.h>

#include "core/audit_internal.h"
#include "core/domain_internal.h"
#include "core/memory.h"

static uint64_t layers_cost(const struct kv_pool_spec *spec)
{
	return 1 + spec->n_layers / 8;
}

/* ---- a session ---- */

uint64_t kv_audit_session_cost(const struct kv_session *session)
{
	return (session->n_sequences + 1) * layers_cost(session->pool->spec);
}

enum kv_status kv_audit_session_sums(const struct kv_session *session, struct kv_error *err)
{
	const struct kv_session_slot *slot = kv_slot_of(session);
	const uint32_t n_layers = session->pool->spec->n_layers;
	uint64_t layer_tokens[KV_LAYERS_MAX] = { 0 };
	uint64_t n_tokens = 0, n_exact_rows = 0, n_charged = 0, n_chunks = 0, n_sequences = 0;
	enum kv_status status = KV_OK;

	kv_list_for_each (node, &session->sequences) {
		const struct kv_sequence *sequence =
			kv_container_of(node, const struct kv_sequence, in_session);
		uint32_t length_min, length_max;

		kv_sequence_lengths(sequence, &length_min, &length_max);
		n_sequences++;
		n_tokens += length_min;
		n_exact_rows += kv_sequence_n_exact_rows(sequence);
		n_charged += sequence->n_tokens_charged;
		n_chunks += kv_sequence_n_chunks(sequence);
		for (uint32_t l = 0; l < n_layers; l++)
			layer_tokens[l] += kv_sequence_n_held(sequence, l);
	}
	const struct {
		const char *what;
		uint64_t n_recorded, n_counted;
	} rows[] = {
		{ "sequences", session->n_sequences, n_sequences },
		{ "tokens", slot->n_tokens_committed, n_tokens },
		{ "rows of exact windows", slot->n_exact_rows, n_exact_rows },
		{ "tokens charged", slot->n_tokens_charged, n_charged },
		{ "table chunks", slot->n_chunks, n_chunks },
	};

	for (uint32_t i = 0; i < KV_LENGTH(rows) && status == KV_OK; i++)
		status = kv_audit_equal(err, rows[i].what, rows[i].n_recorded, rows[i].n_counted);
	for (uint32_t l = 0; l < n_layers && status == KV_OK; l++)
		status = kv_audit_equal(err, "tokens of a layer", slot->layer_tokens[l], layer_tokens[l]);
	if (status != KV_OK)
		kv_error_wrap(err, "session %016llx", (unsigned long long)session->handle);
	return status;
}

/* ---- a pool ---- */

uint64_t kv_audit_pool_cost(const struct kv_pool *pool)
{
	return pool->n_sessions * layers_cost(pool->spec) + pool->slab->n_touched + pool->spec->n_layers;
}

/* Of all sequences, those of closed sessions included. */
static enum kv_status check_slab(const struct kv_pool *pool, struct kv_error *err)
{
	const struct kv_sequence_slab *slab = pool->slab;
	uint64_t n_used = 0, n_chunks = 0, n_spilled = 0;
	uint64_t n_spilled_tokens = 0, n_pages = 0;

	for (uint32_t i = 0; i < slab->n_touched; i++) {
		const struct kv_sequence *sequence = &slab->sequences[i];

		if (!sequence->pool)
			continue;
		n_used++;
		n_chunks += kv_sequence_n_chunks(sequence);
		n_spilled += sequence->residence == KV_SPILLED || sequence->residence == KV_FETCHING;
		n_spilled_tokens += sequence->n_spilled_tokens;
		n_pages += sequence->image.tier ? sequence->image.n_pages : 0;
	}
	enum kv_status status = kv_audit_equal(err, "sequence objects", slab->n_used, n_used);

	if (status == KV_OK)
		status = kv_audit_equal(err, "table chunks", pool->tables.n_chunks_used, n_chunks);
	if (status == KV_OK)
		status = kv_audit_equal(err, "spilled sequences", pool->n_spilled, n_spilled);
	if (status == KV_OK)
		status = kv_audit_equal(err, "spilled tokens", pool->n_spilled_tokens, n_spilled_tokens);
	if (status == KV_OK)
		status = kv_audit_equal(err, "pages of tiers", pool->n_tier_pages, n_pages);
	return status;
}

enum kv_status kv_audit_pool_sums(const struct kv_pool *pool, struct kv_error *err)
{
	const uint32_t n_layers = pool->spec->n_layers;
	uint64_t layer_tokens[KV_LAYERS_MAX] = { 0 }, n_reserved[KV_GROUPS_MAX] = { 0 };
	uint64_t n_sessions = 0, n_sequences = 0, n_tokens = 0, n_exact_rows = 0;
	enum kv_status status = check_slab(pool, err);

	kv_list_for_each (node, &pool->sessions) {
		const struct kv_session *session = kv_container_of(node, const struct kv_session, in_pool);
		const struct kv_session_slot *slot = kv_slot_of(session);

		n_sessions++;
		n_sequences += session->n_sequences;
		n_tokens += slot->n_tokens_committed;
		n_exact_rows += slot->n_exact_rows;
		for (uint32_t l = 0; l < n_layers; l++)
			layer_tokens[l] += slot->layer_tokens[l];
		for (uint32_t g = 0; g < pool->spec->n_groups; g++)
			n_reserved[g] += session->n_blocks_reserved[g];
	}
	if (status == KV_OK)
		status = kv_audit_equal(err, "sessions of the pool", pool->n_sessions, n_sessions);
	if (status == KV_OK)
		status = kv_audit_equal(err, "sequences of the pool", pool->n_sequences, n_sequences);
	if (status == KV_OK)
		status = kv_audit_equal(err, "tokens of the pool", pool->n_tokens_committed, n_tokens);
	if (status == KV_OK)
		status = kv_audit_equal(
			err, "rows of exact windows of the pool", pool->n_exact_rows, n_exact_rows);
	for (uint32_t l = 0; l < n_layers && status == KV_OK; l++)
		status = kv_audit_equal(
			err, "tokens of a layer of the pool", pool->layer_tokens[l], layer_tokens[l]);
	for (uint32_t g = 0; g < pool->spec->n_groups && status == KV_OK; g++)
		status = kv_audit_equal(
			err, "reserved blocks", pool->blocks[g].counts.n_reserved, n_reserved[g]);
	return status;
}

/* ---- tenants ---- */

enum kv_status kv_audit_paid(const struct kv_block_pool *blocks, const uint32_t n_counted[],
	uint32_t group_idx, struct kv_error *err)
{
	const uint32_t n_tenants = blocks->tenants ? blocks->tenants->n_touched : 0;

	for (uint32_t t = 1; t < n_tenants; t++) {
		const enum kv_status status =
			kv_audit_equal(err, "blocks that it pays for", blocks->n_paid[t], n_counted[t]);

		if (status == KV_OK)
			continue;
		kv_error_wrap(err, "group %u, tenant %llu", group_idx,
			(unsigned long long)blocks->tenants->entries[t].id);
		return status;
	}
	return KV_OK;
}

struct charges {
	uint64_t used[KV_QUOTAS];
};

uint64_t kv_audit_tenants_cost(const struct kv_domain *domain)
{
	uint64_t cost = (uint64_t)domain->n_slots_touched + domain->tenants.n_touched;

	for (uint32_t i = 0; i < domain->n_pools; i++)
		cost += domain->pools[i]->slab->n_touched +
			domain->pools[i]->spec->n_tables * domain->tenants.n_touched / 8;
	return cost;
}

static void add_pool(const struct kv_pool *pool, uint32_t n_tenants, struct charges sums[])
{
	for (uint32_t g = 0; g < pool->spec->n_tables; g++) {
		for (uint32_t t = 1; t < n_tenants; t++)
			sums[t].used[KV_QUOTA_BYTES] +=
				pool->blocks[g].n_paid[t] * pool->blocks[g].block_bytes;
	}
	for (uint32_t i = 0; i < pool->slab->n_touched; i++) {
		const struct kv_sequence *sequence = &pool->slab->sequences[i];

		if (sequence->pool && sequence->image.tier)
			sums[sequence->image.payer].used[KV_QUOTA_TIER_BYTES] +=
				(uint64_t)sequence->image.n_pages * KV_TIER_PAGE_BYTES;
	}
}

static void add_session(const struct kv_session *session, struct charges *sums)
{
	sums->used[KV_QUOTA_BYTES] += kv_reservation_bytes(session->pool->spec, session->n_blocks_reserved);
	sums->used[KV_QUOTA_TOKENS] += kv_slot_of(session)->n_tokens_charged;
	sums->used[KV_QUOTA_SESSIONS]++;
}

enum kv_status kv_audit_tenant_sums(const struct kv_domain *domain, struct kv_error *err)
{
	struct charges *sums = kv_alloc(KV_TENANTS_MAX, sizeof(*sums));
	const struct kv_tenants *tenants = &domain->tenants;
	enum kv_status status = KV_OK;

	if (!sums)
		return kv_fail(err, KV_NO_MEMORY, "audit: sums of tenants");
	for (uint32_t i = 0; i < domain->n_pools; i++)
		add_pool(domain->pools[i], tenants->n_touched, sums);
	for (uint32_t i = 0; i < domain->n_slots_touched; i++) {
		const struct kv_session *session = &domain->slots[i].session;

		if (session->state == KV_SESSION_OPEN)
			add_session(session, &sums[session->payer]);
	}
	for (uint32_t t = 1; t < tenants->n_touched && status == KV_OK; t++) {
		for (uint32_t q = 0; q < KV_QUOTAS && status == KV_OK; q++) {
			if (q == KV_QUOTA_REQUESTS)
				continue; /* the server's count */
			status = kv_audit_equal(err, kv_quota_name((enum kv_quota)q),
				tenants->entries[t].used[q], sums[t].used[q]);
		}
		if (status != KV_OK)
			kv_error_wrap(
				err, "charges of tenant %llu", (unsigned long long)tenants->entries[t].id);
	}
	kv_free(sums);
	return status;
}
