#include "core/domain.h"

#include <string.h>

#include "core/domain_internal.h"
#include "core/memory.h"

#define SESSIONS_MAX 65535u /* 16 bits of a handle */

static uint64_t open_bits_bytes(uint32_t sessions_max)
{
	return ((uint64_t)sessions_max + 63) / 64 * sizeof(uint64_t);
}

static enum kv_status take_memory(struct kv_domain *domain, struct kv_error *err)
{
	const uint32_t sessions_max = domain->limits.sessions_max;
	enum kv_status status;

	domain->slots = kv_pages_alloc(sizeof(*domain->slots) * (uint64_t)sessions_max);
	domain->leases = kv_pages_alloc(sizeof(*domain->leases) * (uint64_t)sessions_max);
	domain->open_bits = kv_pages_alloc(open_bits_bytes(sessions_max));
	if (!domain->slots || !domain->leases || !domain->open_bits)
		return kv_fail(err, KV_NO_MEMORY, "table of %u sessions", sessions_max);
	status = kv_tenants_init(&domain->tenants, err);
	if (status != KV_OK)
		return status;
	status = kv_hash_index_init(&domain->names, sessions_max, err);
	if (status != KV_OK)
		return status;
	return kv_hash_index_init(&domain->owners, sessions_max, err);
}

enum kv_status kv_domain_create(const struct kv_domain_limits *limits, struct kv_random *random,
	struct kv_domain **out, struct kv_error *err)
{
	KV_ASSERT(limits->sessions_max >= 1);
	KV_ASSERT(limits->sessions_max <= SESSIONS_MAX);
	KV_ASSERT(limits->sequences_max >= 1);
	KV_ASSERT(limits->sequences_max <= 1u << 31);
	KV_ASSERT(limits->lease_ms >= 1);
	KV_ASSERT(limits->lease_ms <= limits->lease_ms_max);

	struct kv_domain *domain = kv_alloc(1, sizeof(*domain));

	if (!domain)
		return kv_fail(err, KV_NO_MEMORY, "domain");
	domain->limits = *limits;
	domain->random = random;
	domain->free_first = domain->free_last = KV_SLOT_NONE;

	const enum kv_status status = take_memory(domain, err);

	if (status != KV_OK) {
		kv_domain_destroy(domain);
		return status;
	}
	/* Neither may be 0, and a source that gives nothing but zeros must not stop the start. */
	domain->boot_id = kv_random_next(random);
	if (domain->boot_id == 0)
		domain->boot_id = 1;
	domain->boot_tag = (uint16_t)kv_random_next(random);
	if (domain->boot_tag == 0)
		domain->boot_tag = 1;
	domain->name_seed = kv_random_next(random);
	domain->tree_state = kv_random_next(random) | 1;
	kv_hash_key_init(&domain->hash_key, random);
	*out = domain;
	return KV_OK;
}

void kv_domain_destroy(struct kv_domain *domain)
{
	if (!domain)
		return;

	const uint32_t sessions_max = domain->limits.sessions_max;

	while (domain->n_pools > 0)
		kv_domain_pool_remove(domain->pools[domain->n_pools - 1]);
	kv_tenants_finish(&domain->tenants);
	kv_hash_index_finish(&domain->names);
	kv_hash_index_finish(&domain->owners);
	kv_pages_free(domain->slots, sizeof(*domain->slots) * (uint64_t)sessions_max);
	kv_pages_free(domain->leases, sizeof(*domain->leases) * (uint64_t)sessions_max);
	kv_pages_free(domain->open_bits, open_bits_bytes(sessions_max));
	kv_free(domain);
}

uint64_t kv_domain_boot_id(const struct kv_domain *domain)
{
	return domain->boot_id;
}

struct kv_tenants *kv_domain_tenants(struct kv_domain *domain)
{
	return &domain->tenants;
}

uint32_t kv_domain_n_sessions(const struct kv_domain *domain)
{
	return domain->n_sessions;
}

uint32_t kv_domain_n_owned(const struct kv_domain *domain)
{
	return domain->n_owned;
}
