/*
 * Tenants: what each may have, and what it has. A tenant is a number: the user id of a Unix socket's peer,
 * what its token says, or UINT64_MAX for TCP peers without such a token.
 *
 * Charged at admission, before anything is taken, and given back with it:
 * bytes: memory of the pools: every block in use, once, to the tenant whose session took it, however many
 * sequences and published prefixes of the tenant share it; blocks of the exact window; what a session has
 * reserved. What is spilled is not charged here until it comes back.
 * tokens: the longest planned length of every sequence, resident or spilled; a fork counts in full. Sessions
 * with client tables have no lengths: their blocks are charged when they open.
 * sessions: open or being restored.
 * requests: accepted and not answered. The server charges them.
 * tier_bytes: pages of the tiers that images of its sequences have, from the beginning of the way out to the
 * end of the way back.
 *
 * Shared blocks never cross tenants, so a block has one payer. A quota that is lowered below what is used
 * takes nothing away: nothing more is admitted until it is enough. Blocks that nobody owns any more, but a
 * submitted batch still names, are charged to nobody.
 *
 * The table is bounded; an entry lives while the tenant has a policy of its own or anything is charged to it.
 * Loop thread only.
 */
#ifndef CORE_TENANT_H
#define CORE_TENANT_H

#include <stdbool.h>
#include <stdint.h>

#include "core/error.h"

#define KV_TENANTS_MAX       1024u /* entries, the one of nobody included */
#define KV_TENANT_NOBODY     0u    /* entry to which nothing is charged */
#define KV_QUOTA_NONE        UINT64_MAX
#define KV_TENANT_WEIGHT_MAX 1000u

enum kv_quota {
	KV_QUOTA_BYTES,
	KV_QUOTA_TOKENS,
	KV_QUOTA_SESSIONS,
	KV_QUOTA_REQUESTS,
	KV_QUOTA_TIER_BYTES,
	KV_QUOTAS
};
/* Is it a number of bytes? Those are read and shown as such. */
static inline bool kv_quota_is_bytes(enum kv_quota quota)
{
	return quota == KV_QUOTA_BYTES || quota == KV_QUOTA_TIER_BYTES;
}

struct kv_tenant_policy {
	uint64_t most[KV_QUOTAS]; /* by enum kv_quota; KV_QUOTA_NONE: as much as there is */
	uint32_t weight;          /* of its turns in a batch, 1 to KV_TENANT_WEIGHT_MAX */
};

struct kv_tenant {
	uint64_t id;
	bool is_used;
	bool has_policy; /* of its own; otherwise the common one holds */
	struct kv_tenant_policy policy;
	uint64_t used[KV_QUOTAS];
	uint64_t used_max[KV_QUOTAS];  /* high-water mark */
	uint64_t n_refused[KV_QUOTAS]; /* since the entry was made */
};

struct kv_tenants {
	struct kv_tenant_policy common; /* of those without a policy of their own */
	struct kv_tenant *entries;      /* [KV_TENANTS_MAX] */
	uint32_t n_touched;             /* entries from here on were never used */
};

KV_MUST_CHECK enum kv_status kv_tenants_init(struct kv_tenants *tenants, struct kv_error *err);
void kv_tenants_finish(struct kv_tenants *tenants); /* zeroed allowed */

const char *kv_quota_name(enum kv_quota quota);
/* No limits, weight 1. */
struct kv_tenant_policy kv_tenant_policy_open(void);

/* Its entry, or KV_TENANT_NOBODY. */
uint32_t kv_tenant_find(const struct kv_tenants *tenants, uint64_t id);
/* The same, made when there is none; KV_TENANT_NOBODY: the table is full. */
uint32_t kv_tenant_make(struct kv_tenants *tenants, uint64_t id);
/* LIMIT: the table is full. */
KV_MUST_CHECK enum kv_status kv_tenant_set(
	struct kv_tenants *tenants, uint64_t id, const struct kv_tenant_policy *policy, struct kv_error *err);
/* The common policy holds again. NOT_FOUND: it has none of its own. */
KV_MUST_CHECK enum kv_status kv_tenant_clear(struct kv_tenants *tenants, uint64_t id, struct kv_error *err);
/* What holds for the entry. */
const struct kv_tenant_policy *kv_tenant_policy_of(const struct kv_tenants *tenants, uint32_t idx);

/* Is there room for n more? */
bool kv_tenant_has_room(const struct kv_tenants *tenants, uint32_t idx, enum kv_quota quota, uint64_t n);
/* OK or QUOTA, counted and told in err (NULL allowed): which quota, how much, what is used and wanted. */
KV_MUST_CHECK enum kv_status kv_tenant_check(
	struct kv_tenants *tenants, uint32_t idx, enum kv_quota quota, uint64_t n, struct kv_error *err);
void kv_tenant_charge(struct kv_tenants *tenants, uint32_t idx, enum kv_quota quota, uint64_t n);
void kv_tenant_refund(struct kv_tenants *tenants, uint32_t idx, enum kv_quota quota, uint64_t n);

#endif
