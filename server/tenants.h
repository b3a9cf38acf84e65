/*
 * What tenants may have, as operators write it: in the configuration file ("tenants", an array of objects
 * with the member "tenant") and as bodies of PUT /v1/tenants/{tenant}. Members, none of them needed: bytes
 * and tier_bytes (a number or a text like "1GiB"), tokens, sessions, requests (numbers; null or missing: no
 * limit), weight (1 to KV_TENANT_WEIGHT_MAX, missing: 1). A tenant is called by its number, "tcp" for TCP
 * peers whose token names none, and "_default" for all that have no policy of their own.
 */
#ifndef SERVER_TENANTS_H
#define SERVER_TENANTS_H

#include <jansson.h>

#include "core/tenant.h"

#define SRV_TENANT_DEFAULT "_default"
/* In the configuration: leaves entries for tenants that just come. */
#define SRV_TENANTS_CONFIGURED_MAX 512u

struct srv_tenant_policy {
	uint64_t id;
	bool is_common; /* "_default" */
	struct kv_tenant_policy policy;
};

/* False: no tenant can be called so. */
bool srv_tenant_read_id(const char *text, uint64_t *id, bool *is_common);
/* BAD_CONFIG names the member and what was expected. */
KV_MUST_CHECK enum kv_status srv_tenant_read_policy(
	const json_t *json, struct kv_tenant_policy *policy, struct kv_error *err);
/* The configuration's array: every policy, and no tenant twice. */
KV_MUST_CHECK enum kv_status srv_tenants_check(const json_t *array, struct kv_error *err);
/* Replaces all policies by those of a checked array. */
void srv_tenants_apply(const json_t *array, struct kv_tenants *tenants);

#endif
