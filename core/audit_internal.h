/*
 * The two halves of the audit.
 */
#ifndef CORE_AUDIT_INTERNAL_H
#define CORE_AUDIT_INTERNAL_H

#include "core/audit.h"

KV_MUST_CHECK enum kv_status kv_audit_equal(
	struct kv_error *err, const char *what, uint64_t n_recorded, uint64_t n_counted);
KV_MUST_CHECK enum kv_status kv_audit_pool(
	struct kv_pool *pool, struct kv_plan *const plans[], uint32_t n_plans, struct kv_error *err);

#endif
