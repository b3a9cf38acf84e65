/*
 * Audit of quotas: what tenants are charged with, counted again from blocks, reservations, sequences and
 * images.
 */
#include <stdio.h>

#include "core/audit_internal.h"
#include "core/domain_internal.h"
#include "core/memory.h"

struct sums {
	uint64_t used[KV_QUOTAS];
};

static void count_blocks(const struct kv_pool *pool, struct sums sums[])
{
	for (uint32_t g = 0; g < pool->spec->n_tables; g++) {
		const struct kv_block_pool *blocks = &pool->blocks[g];

		for (uint32_t i = 0; i < blocks->n_touched; i++) {
			if (blocks->owners[i] > 0)
				sums[blocks->payers[i]].used[KV_QUOTA_BYTES] += blocks->block_bytes;
		}
	}
}

static void count_images(const struct kv_pool *pool, struct sums sums[])
{
	for (uint32_t i = 0; i < pool->slab->n_touched; i++) {
		const struct kv_sequence *sequence = &pool->slab->sequences[i];

		if (sequence->pool && sequence->image.tier)
			sums[sequence->image.payer].used[KV_QUOTA_TIER_BYTES] +=
				(uint64_t)sequence->image.n_pages * KV_TIER_PAGE_BYTES;
	}
}

static enum kv_status count_session(
	const struct kv_session_slot *slot, struct sums *sums, struct kv_error *err)
{
	const struct kv_session *session = &slot->session;
	uint64_t n_tokens = 0;

	kv_list_for_each (node, &session->sequences) {
		const struct kv_sequence *sequence =
			kv_container_of(node, const struct kv_sequence, in_session);
		uint32_t longest = 0;

		for (uint32_t l = 0; l < session->pool->spec->n_layers; l++)
			longest = sequence->planned[l] > longest ? sequence->planned[l] : longest;
		if (longest != sequence->n_tokens_charged)
			return kv_fail(err, KV_INTERNAL,
				"audit: sequence %llu: %u tokens charged, its longest layer has %u",
				(unsigned long long)sequence->id, sequence->n_tokens_charged, longest);
		n_tokens += longest;
	}
	sums->used[KV_QUOTA_BYTES] += kv_reservation_bytes(session->pool->spec, session->n_blocks_reserved);
	sums->used[KV_QUOTA_TOKENS] += n_tokens;
	sums->used[KV_QUOTA_SESSIONS]++;
	return kv_audit_equal(err, "tokens charged to a session", slot->n_tokens_charged, n_tokens);
}

static enum kv_status compare(
	const struct kv_tenants *tenants, const struct sums sums[], struct kv_error *err)
{
	enum kv_status status = KV_OK;

	for (uint32_t i = 1; i < tenants->n_touched && status == KV_OK; i++) {
		const struct kv_tenant *tenant = &tenants->entries[i];

		for (uint32_t q = 0; q < KV_QUOTAS && status == KV_OK; q++) {
			char what[64];

			if (q == KV_QUOTA_REQUESTS)
				continue; /* the server's count */
			(void)snprintf(what, sizeof(what), "%s charged to tenant %llu",
				kv_quota_name((enum kv_quota)q), (unsigned long long)tenant->id);
			status = kv_audit_equal(err, what, tenant->used[q], sums[i].used[q]);
		}
	}
	return status;
}

enum kv_status kv_audit_tenants(const struct kv_domain *domain, struct kv_error *err)
{
	struct sums *sums = kv_alloc(KV_TENANTS_MAX, sizeof(*sums));
	enum kv_status status = KV_OK;

	if (!sums)
		return kv_fail(err, KV_NO_MEMORY, "audit: sums of tenants");
	for (uint32_t i = 0; i < domain->n_pools; i++) {
		count_blocks(domain->pools[i], sums);
		count_images(domain->pools[i], sums);
	}
	for (uint32_t i = 0; i < domain->n_slots_touched && status == KV_OK; i++) {
		const struct kv_session_slot *slot = &domain->slots[i];

		if (slot->session.state == KV_SESSION_OPEN || slot->session.state == KV_SESSION_STAGED)
			status = count_session(slot, &sums[slot->session.payer], err);
	}
	if (status == KV_OK)
		status = compare(&domain->tenants, sums, err);
	kv_free(sums);
	return status;
}
