#include "server/tenants.h"

#include <stdio.h>
#include <string.h>

#include "core/checked.h"
#include "server/http_rules.h"
#include "server/log.h"
#include "server/options_internal.h"

bool srv_tenant_read_id(const char *text, uint64_t *id, bool *is_common)
{
	*is_common = strcmp(text, SRV_TENANT_DEFAULT) == 0;
	*id = UINT64_MAX;
	/* UINT64_MAX is TCP's. */
	return *is_common || strcmp(text, "tcp") == 0 || srv_http_read_u64(text, UINT64_MAX - 1, id);
}

static bool read_quota(const json_t *value, bool is_bytes, uint64_t *most)
{
	if (json_is_null(value)) {
		*most = KV_QUOTA_NONE;
		return true;
	}
	if (is_bytes && json_is_string(value))
		return srv_option_read_bytes(json_string_value(value), most);
	if (!json_is_integer(value) || json_integer_value(value) < 0)
		return false;
	*most = (uint64_t)json_integer_value(value);
	return true;
}

enum kv_status srv_tenant_read_policy(
	const json_t *json, struct kv_tenant_policy *policy, struct kv_error *err)
{
	const char *name;
	const json_t *value;

	*policy = kv_tenant_policy_open();
	if (!json_is_object(json))
		return kv_fail(err, KV_BAD_CONFIG, "a tenant's policy is an object");
	json_object_foreach ((json_t *)json, name, value) {
		uint32_t q = 0;

		while (q < KV_QUOTAS && strcmp(name, kv_quota_name((enum kv_quota)q)) != 0)
			q++;
		if (q < KV_QUOTAS) {
			if (!read_quota(value, kv_quota_is_bytes((enum kv_quota)q), &policy->most[q]))
				return kv_fail(err, KV_BAD_CONFIG,
					"%s: expected a number%s, or null for no limit", name,
					kv_quota_is_bytes((enum kv_quota)q) ? " or a text like \"1GiB\""
									    : "");
		} else if (strcmp(name, "weight") == 0) {
			if (!json_is_integer(value) || json_integer_value(value) < 1 ||
				json_integer_value(value) > KV_TENANT_WEIGHT_MAX)
				return kv_fail(err, KV_BAD_CONFIG, "weight: expected a number from 1 to %u",
					KV_TENANT_WEIGHT_MAX);
			policy->weight = (uint32_t)json_integer_value(value);
		} else if (strcmp(name, "tenant") != 0) {
			return kv_fail(err, KV_BAD_CONFIG,
				"%.40s: a tenant has bytes, tokens, sessions, requests, tier_bytes and "
				"weight",
				name);
		}
	}
	return KV_OK;
}

static enum kv_status read_entry(const json_t *json, struct srv_tenant_policy *out, struct kv_error *err)
{
	const char *name = json_string_value(json_object_get(json, "tenant"));

	if (!name || !srv_tenant_read_id(name, &out->id, &out->is_common))
		return kv_fail(err, KV_BAD_CONFIG,
			"tenant: expected a text: a number, \"tcp\" or \"" SRV_TENANT_DEFAULT "\"");
	return srv_tenant_read_policy(json, &out->policy, err);
}

enum kv_status srv_tenants_check(const json_t *array, struct kv_error *err)
{
	size_t idx;
	const json_t *json;

	if (!json_is_array(array))
		return kv_fail(err, KV_BAD_CONFIG, "tenants: expected an array of objects");
	if (json_array_size(array) > SRV_TENANTS_CONFIGURED_MAX)
		return kv_fail(err, KV_BAD_CONFIG, "tenants: %zu given, expected at most %u",
			json_array_size(array), SRV_TENANTS_CONFIGURED_MAX);
	json_array_foreach (array, idx, json) {
		struct srv_tenant_policy one;
		const enum kv_status status = read_entry(json, &one, err);

		if (status != KV_OK) {
			kv_error_wrap(err, "tenants[%zu]", idx);
			return status;
		}
		for (size_t i = 0; i < idx; i++) {
			struct srv_tenant_policy other;

			(void)read_entry(json_array_get(array, i), &other, NULL);
			if (one.id == other.id && one.is_common == other.is_common)
				return kv_fail(err, KV_BAD_CONFIG,
					"tenants[%zu]: the same tenant as tenants[%zu]", idx, i);
		}
	}
	return KV_OK;
}

void srv_tenants_apply(const json_t *array, struct kv_tenants *tenants)
{
	size_t idx;
	const json_t *json;

	tenants->common = kv_tenant_policy_open();
	for (uint32_t i = 0; i < tenants->n_touched; i++)
		tenants->entries[i].has_policy = false;
	json_array_foreach (array, idx, json) {
		struct srv_tenant_policy one;
		struct kv_error err;

		/* It was checked; a table that is full of tenants with something is the only failure left. */
		if (read_entry(json, &one, &err) != KV_OK)
			continue;
		if (one.is_common)
			tenants->common = one.policy;
		else if (kv_tenant_set(tenants, one.id, &one.policy, &err) != KV_OK)
			srv_log(SRV_LOG_ERROR, "tenants[%zu]: %s", idx, err.msg);
	}
}
