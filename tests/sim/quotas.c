/*
 * Quotas in the simulation: operators set and clear small ones at random; whoever is refused was refused for
 * a reason, and nobody has more than a quota unless it was lowered.
 */
#include <string.h>

#include "core/domain_internal.h"
#include "tests/sim/record.h"
#include "tests/sim/world.h"

struct kv_tenant sim_tenant_of(const struct kv_session *session)
{
	return kv_domain_tenants(session->pool->domain)->entries[session->payer];
}

static const struct kv_tenant_policy *policy_of(const struct kv_session *session)
{
	return kv_tenant_policy_of(kv_domain_tenants(session->pool->domain), session->payer);
}

static bool is_short(
	const struct kv_session *session, const struct kv_tenant *before, enum kv_quota quota, uint64_t n)
{
	const uint64_t most = policy_of(session)->most[quota];

	return n > 0 && (before->used[quota] > most || n > most - before->used[quota]);
}

void sim_check_quotas(const struct kv_session *session, const struct kv_tenant *before)
{
	const struct kv_tenant now = sim_tenant_of(session);

	for (uint32_t q = 0; q < KV_QUOTAS; q++)
		SIM_CHECK(q == KV_QUOTA_REQUESTS || now.used[q] <= policy_of(session)->most[q] ||
				now.used[q] <= before->used[q],
			"tenant %llu: %llu %s, it may have %llu", (unsigned long long)now.id,
			(unsigned long long)now.used[q], kv_quota_name((enum kv_quota)q),
			(unsigned long long)policy_of(session)->most[q]);
}

bool sim_tokens_are_short(const struct kv_session *session, const struct kv_tenant *before, uint64_t n_tokens)
{
	return is_short(session, before, KV_QUOTA_TOKENS, n_tokens);
}

void sim_check_refused(const struct kv_session *session, const struct kv_tenant *before,
	const struct sim_session *ours, const struct kv_item *item, struct sim_expected *expected)
{
	const struct kv_sequence *sequence =
		kv_sequence_find((struct kv_session *)session, item->sequence_id);
	const uint64_t length = (uint64_t)item->position + item->n_tokens;
	const uint64_t n_charged = sequence ? sequence->n_tokens_charged : 0;
	const bool is_short_of_tokens =
		is_short(session, before, KV_QUOTA_TOKENS, length > n_charged ? length - n_charged : 0);
	uint64_t n_bytes = 0;

	for (uint32_t g = 0; g < session->pool->spec->n_groups; g++) {
		if (expected->n_blocks[g] > ours->reserve_left[g])
			n_bytes += (expected->n_blocks[g] - ours->reserve_left[g]) *
				kv_block_bytes(session->pool->spec, g);
	}
	SIM_CHECK(expected->status == KV_OK || expected->status == KV_POOL_FULL ||
			expected->status == KV_LIMIT || expected->status == KV_BUSY_RETRY ||
			expected->status == KV_BAD_ARG || expected->status == KV_WINDOW_GONE,
		"QUOTA, expected %s", kv_status_name(expected->status));
	/* What the model counts of blocks is whole only where it expects success. */
	SIM_CHECK(is_short_of_tokens || expected->status != KV_OK ||
			is_short(session, before, KV_QUOTA_BYTES, n_bytes),
		"tenant %llu is refused %llu tokens and %llu bytes, which it may have",
		(unsigned long long)before->id, (unsigned long long)item->n_tokens,
		(unsigned long long)n_bytes);
	SIM_CHECK(item->retry_after_ms > 0, "QUOTA without a hint");
	expected->status = KV_QUOTA;
}

/* Of a tenant that is there, or of all others. */
void sim_quotas_ask(struct sim_world *world, struct srv_control *control)
{
	static const uint64_t mosts[KV_QUOTAS] = { 1 << 20, 300, 6, 40, 8 * KV_TIER_PAGE_BYTES };
	struct kv_tenant_policy policy = kv_tenant_policy_open();

	control->tenant = world->model.sessions ? world->model.sessions->tenant : 0;
	control->is_common = sim_chance(&world->rng, 200);
	control->is_set = false;
	control->kind = sim_chance(&world->rng, 400) ? SRV_CONTROL_TENANT_CLEAR : SRV_CONTROL_TENANT_SET;
	for (uint32_t q = 0; q < KV_QUOTAS; q++) {
		if (sim_chance(&world->rng, 300))
			policy.most[q] = sim_below(&world->rng, mosts[q]);
	}
	policy.weight = sim_between(&world->rng, 1, 9);
	control->policy = policy;
}
