/*
 * What sessions and sequences cost their tenant. Blocks are charged where they are taken, by their block
 * pool.
 */
#include "core/domain_internal.h"
#include "core/prefix_internal.h"

/* Idle blocks and sequences at rest that are looked at to find the tenant's own, per request. */
#define LOOKS_MAX 4096u

static struct kv_tenants *tenants_of(const struct kv_pool *pool)
{
	return &pool->domain->tenants;
}

uint64_t kv_reservation_bytes(const struct kv_pool_spec *spec, const uint32_t n_blocks[])
{
	uint64_t n_bytes = 0;

	for (uint32_t g = 0; g < spec->n_groups; g++)
		n_bytes += n_blocks[g] * kv_block_bytes(spec, g);
	return n_bytes;
}

/* ---- room ---- */

static bool evict_own_prefix(struct kv_pool *pool, uint32_t payer, uint32_t *n_looks)
{
	for (uint32_t g = 0; g < pool->spec->n_groups; g++) {
		const struct kv_block_pool *blocks = &pool->blocks[g];
		uint32_t block = kv_block_pool_idle_first(blocks);

		for (; block != UINT32_MAX && *n_looks > 0; block = blocks->idle_next[block], --*n_looks) {
			if (blocks->payers[block] != payer)
				continue;
			pool->domain->n_cut += kv_prefix_evict_block(pool, g, block) * pool->spec->n_groups;
			return true;
		}
	}
	return false;
}

static bool evict_own_sequence(struct kv_pool *pool, uint32_t payer, uint32_t *n_looks)
{
	kv_list_for_each (node, &pool->resting) {
		struct kv_sequence *sequence = kv_container_of(node, struct kv_sequence, in_resting);

		if (*n_looks == 0)
			break;
		--*n_looks;
		if (!kv_sequence_is_live(sequence) || sequence->session->payer != payer)
			continue;
		kv_sequence_evict(sequence);
		return true;
	}
	return false;
}

bool kv_payer_evict(struct kv_pool *pool, uint32_t payer, uint64_t n_bytes)
{
	const struct kv_tenants *tenants = tenants_of(pool);
	uint32_t n_looks =
		n_bytes <= kv_tenant_policy_of(tenants, payer)->most[KV_QUOTA_BYTES] ? LOOKS_MAX : 0;

	while (!kv_tenant_has_room(tenants, payer, KV_QUOTA_BYTES, n_bytes)) {
		if (n_looks == 0 || pool->domain->n_cut >= KV_EVICT_BLOCKS_MAX)
			return false;
		if (!evict_own_prefix(pool, payer, &n_looks) && !evict_own_sequence(pool, payer, &n_looks))
			return false;
	}
	return true;
}

/* ---- sessions ---- */

enum kv_status kv_payer_check_open(
	struct kv_pool *pool, uint64_t tenant, uint32_t reserve_blocks, struct kv_error *err)
{
	struct kv_tenants *tenants = tenants_of(pool);
	const uint32_t payer = kv_tenant_make(tenants, tenant);
	uint32_t n_blocks[KV_GROUPS_MAX];

	if (payer == KV_TENANT_NOBODY)
		return kv_fail(err, KV_LIMIT, "%u tenants are there, which is the limit", KV_TENANTS_MAX - 1);

	const enum kv_status status = kv_tenant_check(tenants, payer, KV_QUOTA_SESSIONS, 1, err);

	for (uint32_t g = 0; g < pool->spec->n_groups; g++)
		n_blocks[g] = reserve_blocks;
	return status == KV_OK
		? kv_payer_make_room(pool, payer, kv_reservation_bytes(pool->spec, n_blocks), err)
		: status;
}

void kv_session_refund_reserved(struct kv_session *session, uint32_t group_idx, uint32_t n_blocks)
{
	KV_ASSERT(session->n_blocks_reserved[group_idx] >= n_blocks);
	session->n_blocks_reserved[group_idx] -= n_blocks;
	kv_tenant_refund(tenants_of(session->pool), session->payer, KV_QUOTA_BYTES,
		n_blocks * kv_block_bytes(session->pool->spec, group_idx));
}

void kv_session_refund(struct kv_session *session)
{
	struct kv_session_slot *slot = kv_slot_of(session);
	struct kv_tenants *tenants = tenants_of(session->pool);

	for (uint32_t g = 0; g < session->pool->spec->n_groups; g++)
		kv_session_refund_reserved(session, g, session->n_blocks_reserved[g]);
	kv_tenant_refund(tenants, session->payer, KV_QUOTA_TOKENS, slot->n_tokens_charged);
	kv_tenant_refund(tenants, session->payer, KV_QUOTA_SESSIONS, 1);
	slot->n_tokens_charged = 0;
}

/* ---- tokens ---- */

enum kv_status kv_sequence_check_tokens(
	const struct kv_session *session, const struct kv_sequence *sequence, uint32_t length)
{
	const uint32_t n_charged = sequence ? sequence->n_tokens_charged : 0;

	return kv_tenant_check(tenants_of(session->pool), session->payer, KV_QUOTA_TOKENS,
		length > n_charged ? length - n_charged : 0, NULL);
}

void kv_sequence_charge(struct kv_sequence *sequence)
{
	struct kv_session *session = sequence->session;
	uint32_t longest = 0;

	if (sequence->is_zombie || session->state == KV_SESSION_CLOSING)
		return;
	for (uint32_t l = 0; l < sequence->pool->spec->n_layers; l++)
		longest = sequence->planned[l] > longest ? sequence->planned[l] : longest;
	if (longest == sequence->n_tokens_charged)
		return;

	struct kv_session_slot *slot = kv_slot_of(session);
	struct kv_tenants *tenants = tenants_of(sequence->pool);

	kv_tenant_refund(tenants, session->payer, KV_QUOTA_TOKENS, sequence->n_tokens_charged);
	kv_tenant_charge(tenants, session->payer, KV_QUOTA_TOKENS, longest);
	slot->n_tokens_charged += longest;
	slot->n_tokens_charged -= sequence->n_tokens_charged;
	sequence->n_tokens_charged = longest;
}
