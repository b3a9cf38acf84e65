/*
 * Audit: recomputes every count from first principles and compares. Owner counts from the block tables of
 * live and zombie sequences, the copies that wait and published prefixes, in-flight counts from the batches
 * and those copies, state counts from both, lengths against tables (entries == ceil(planned / block_size),
 * more only while the sequence waits to be cut), session and token sums, indexes, lists, the lease heap,
 * reservations, what tenants are charged with, the memory report.
 *
 * For tests and the simulation: takes scratch memory and walks everything at once. Loop thread only.
 */
#ifndef CORE_AUDIT_H
#define CORE_AUDIT_H

#include <stdint.h>

#include "core/domain.h"
#include "core/plan.h"

/* KV_OK, NO_MEMORY, or KV_INTERNAL with the first difference in words: pool, group, block, both numbers. */
KV_MUST_CHECK enum kv_status kv_audit_domain(
	struct kv_domain *domain, struct kv_plan *const plans[], uint32_t n_plans, struct kv_error *err);

#endif
