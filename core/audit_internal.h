/*
 * The parts of the audit, which those of a running daemon (tally.c) are made of, too.
 */
#ifndef CORE_AUDIT_INTERNAL_H
#define CORE_AUDIT_INTERNAL_H

#include "core/audit.h"

KV_MUST_CHECK enum kv_status kv_audit_equal(
	struct kv_error *err, const char *what, uint64_t n_recorded, uint64_t n_counted);
/* One that is in use. */
KV_MUST_CHECK enum kv_status kv_audit_sequence(const struct kv_sequence *sequence, struct kv_error *err);
/* An open session's slot as the indexes and the heap know it. */
KV_MUST_CHECK enum kv_status kv_audit_open_slot(
	struct kv_domain *domain, uint32_t slot_idx, struct kv_error *err);
KV_MUST_CHECK enum kv_status kv_audit_tenants(const struct kv_domain *domain, struct kv_error *err);
KV_MUST_CHECK enum kv_status kv_audit_pool(
	struct kv_pool *pool, struct kv_plan *const plans[], uint32_t n_plans, struct kv_error *err);

/*
 * tally_sums.c: sums of one thing against its parts, all at one moment; *_cost(): entries, sequences and
 * sessions that this looks at.
 */
uint64_t kv_audit_session_cost(const struct kv_session *session);
KV_MUST_CHECK enum kv_status kv_audit_session_sums(const struct kv_session *session, struct kv_error *err);
uint64_t kv_audit_pool_cost(const struct kv_pool *pool);
KV_MUST_CHECK enum kv_status kv_audit_pool_sums(const struct kv_pool *pool, struct kv_error *err);
/* Recorded blocks by payer against those that were counted. */
KV_MUST_CHECK enum kv_status kv_audit_paid(const struct kv_block_pool *blocks, const uint32_t n_counted[],
	uint32_t group_idx, struct kv_error *err);
uint64_t kv_audit_tenants_cost(const struct kv_domain *domain);
KV_MUST_CHECK enum kv_status kv_audit_tenant_sums(const struct kv_domain *domain, struct kv_error *err);

#endif
