#include "core/tenant.h"

#include "core/memory.h"

const char *kv_quota_name(enum kv_quota quota)
{
	static const char *const names[KV_QUOTAS] = { "bytes", "tokens", "sessions", "requests",
		"tier_bytes" };

	return names[quota];
}

struct kv_tenant_policy kv_tenant_policy_open(void)
{
	struct kv_tenant_policy policy = { .weight = 1 };

	for (uint32_t q = 0; q < KV_QUOTAS; q++)
		policy.most[q] = KV_QUOTA_NONE;
	return policy;
}

enum kv_status kv_tenants_init(struct kv_tenants *tenants, struct kv_error *err)
{
	*tenants = (struct kv_tenants){ .common = kv_tenant_policy_open(), .n_touched = 1 };
	tenants->entries = kv_pages_alloc(sizeof(*tenants->entries) * KV_TENANTS_MAX);
	if (!tenants->entries)
		return kv_fail(err, KV_NO_MEMORY, "table of %u tenants", KV_TENANTS_MAX);
	return KV_OK;
}

void kv_tenants_finish(struct kv_tenants *tenants)
{
	kv_pages_free(tenants->entries, sizeof(*tenants->entries) * KV_TENANTS_MAX);
	*tenants = (struct kv_tenants){ .n_touched = 0 };
}

/* Nobody would miss it. */
static bool is_idle(const struct kv_tenant *tenant)
{
	for (uint32_t q = 0; q < KV_QUOTAS; q++) {
		if (tenant->used[q] > 0)
			return false;
	}
	return !tenant->has_policy;
}

uint32_t kv_tenant_find(const struct kv_tenants *tenants, uint64_t id)
{
	for (uint32_t i = 1; i < tenants->n_touched; i++) {
		if (tenants->entries[i].is_used && tenants->entries[i].id == id)
			return i;
	}
	return KV_TENANT_NOBODY;
}

uint32_t kv_tenant_make(struct kv_tenants *tenants, uint64_t id)
{
	uint32_t idx = kv_tenant_find(tenants, id);

	if (idx != KV_TENANT_NOBODY)
		return idx;
	if (tenants->n_touched < KV_TENANTS_MAX) {
		idx = tenants->n_touched++;
	} else {
		for (uint32_t i = 1; i < KV_TENANTS_MAX && idx == KV_TENANT_NOBODY; i++)
			idx = is_idle(&tenants->entries[i]) ? i : KV_TENANT_NOBODY;
	}
	if (idx != KV_TENANT_NOBODY)
		tenants->entries[idx] = (struct kv_tenant){ .id = id, .is_used = true };
	return idx;
}

enum kv_status kv_tenant_set(
	struct kv_tenants *tenants, uint64_t id, const struct kv_tenant_policy *policy, struct kv_error *err)
{
	KV_ASSERT(policy->weight >= 1);
	KV_ASSERT(policy->weight <= KV_TENANT_WEIGHT_MAX);

	const uint32_t idx = kv_tenant_make(tenants, id);

	if (idx == KV_TENANT_NOBODY)
		return kv_fail(err, KV_LIMIT, "%u tenants are known, which is the limit", KV_TENANTS_MAX - 1);
	tenants->entries[idx].policy = *policy;
	tenants->entries[idx].has_policy = true;
	return KV_OK;
}

enum kv_status kv_tenant_clear(struct kv_tenants *tenants, uint64_t id, struct kv_error *err)
{
	const uint32_t idx = kv_tenant_find(tenants, id);

	if (idx == KV_TENANT_NOBODY || !tenants->entries[idx].has_policy)
		return kv_fail(
			err, KV_NOT_FOUND, "tenant %llu has no policy of its own", (unsigned long long)id);
	tenants->entries[idx].has_policy = false;
	return KV_OK;
}

const struct kv_tenant_policy *kv_tenant_policy_of(const struct kv_tenants *tenants, uint32_t idx)
{
	return tenants->entries[idx].has_policy ? &tenants->entries[idx].policy : &tenants->common;
}

bool kv_tenant_has_room(const struct kv_tenants *tenants, uint32_t idx, enum kv_quota quota, uint64_t n)
{
	const uint64_t most = kv_tenant_policy_of(tenants, idx)->most[quota];
	const uint64_t used = tenants->entries[idx].used[quota];

	return idx == KV_TENANT_NOBODY || n == 0 || (used <= most && n <= most - used);
}

enum kv_status kv_tenant_check(
	struct kv_tenants *tenants, uint32_t idx, enum kv_quota quota, uint64_t n, struct kv_error *err)
{
	struct kv_tenant *tenant = &tenants->entries[idx];

	if (kv_tenant_has_room(tenants, idx, quota, n))
		return KV_OK;
	tenant->n_refused[quota]++;
	return kv_fail(err, KV_QUOTA, "the tenant's quota of %s is %llu, %llu are used, %llu more wanted",
		kv_quota_name(quota), (unsigned long long)kv_tenant_policy_of(tenants, idx)->most[quota],
		(unsigned long long)tenant->used[quota], (unsigned long long)n);
}

void kv_tenant_charge(struct kv_tenants *tenants, uint32_t idx, enum kv_quota quota, uint64_t n)
{
	struct kv_tenant *tenant = &tenants->entries[idx];

	if (idx == KV_TENANT_NOBODY)
		return;
	tenant->used[quota] += n;
	if (tenant->used[quota] > tenant->used_max[quota])
		tenant->used_max[quota] = tenant->used[quota];
}

void kv_tenant_refund(struct kv_tenants *tenants, uint32_t idx, enum kv_quota quota, uint64_t n)
{
	if (idx == KV_TENANT_NOBODY)
		return;
	KV_ASSERT(tenants->entries[idx].used[quota] >= n);
	tenants->entries[idx].used[quota] -= n;
}
