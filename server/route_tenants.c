/* /v1/tenants: what each tenant has and may have; changing what it may have. */
#include "server/http_rules.h"
#include "server/http_views.h"
#include "server/routes.h"
#include "server/tenants.h"

static void add_quotas(struct srv_text *text, const char *key, const uint64_t values[KV_QUOTAS])
{
	srv_text_open(text, key, '{');
	for (uint32_t q = 0; q < KV_QUOTAS; q++) {
		if (values[q] == KV_QUOTA_NONE)
			srv_text_null(text, kv_quota_name((enum kv_quota)q));
		else
			srv_text_u64(text, kv_quota_name((enum kv_quota)q), values[q]);
	}
	srv_text_close(text, '}');
}

static void add_tenant(struct srv_text *text, const struct srv_tenant_row *tenant)
{
	srv_text_open(text, NULL, '{');
	if (tenant->is_common)
		srv_text_string(text, "tenant", SRV_TENANT_DEFAULT);
	else
		srv_view_tenant_id(text, "tenant", tenant->tenant);
	srv_text_string(text, "policy", tenant->has_policy ? "own" : SRV_TENANT_DEFAULT);
	srv_text_u64(text, "weight", tenant->policy.weight);
	add_quotas(text, "quotas", tenant->policy.most);
	add_quotas(text, "used", tenant->used);
	add_quotas(text, "used_max", tenant->used_max);
	add_quotas(text, "n_refused", tenant->n_refused);
	srv_text_u64(text, "n_sessions", tenant->n_sessions);
	srv_text_u64(text, "n_sequences", tenant->n_sequences);
	srv_text_u64(text, "n_tokens", tenant->n_tokens);
	srv_text_u64(text, "stored_bytes", tenant->stored_bytes);
	srv_text_u64(text, "dense_equivalent_bytes", tenant->dense_equivalent_bytes);
	srv_text_ratio(text, "effective_compression",
		tenant->used[KV_QUOTA_BYTES] > 0
			? (double)tenant->dense_equivalent_bytes / (double)tenant->used[KV_QUOTA_BYTES]
			: 0.0);
	srv_text_u64(text, "reserved_bytes", tenant->reserved_bytes);
	srv_text_u64(text, "n_rows_in", tenant->n_rows_in);
	srv_text_u64(text, "n_rows_out", tenant->n_rows_out);
	srv_text_u64(text, "n_queries", tenant->n_queries);
	srv_text_close(text, '}');
}

void srv_view_tenants(const struct srv_control *control, struct srv_text *text)
{
	srv_text_open(text, NULL, '{');
	srv_text_open(text, "tenants", '[');
	for (uint32_t i = 0; i < srv_view_n_rows(control); i++)
		add_tenant(text, &control->rows.tenants[i]);
	srv_text_close(text, ']');
	srv_view_cursor(text, control);
	srv_text_close(text, '}');
}

void srv_view_tenant(const struct srv_control *control, struct srv_text *text)
{
	add_tenant(text, &control->rows.tenants[0]);
}

enum kv_status srv_route_tenant(
	struct srv_http_request *request, struct srv_control *control, struct kv_error *err)
{
	if (!srv_tenant_read_id(request->names[0], &control->tenant, &control->is_common))
		return kv_fail(err, KV_BAD_ARG,
			"tenant '%.40s': expected a number, tcp or " SRV_TENANT_DEFAULT, request->names[0]);
	return KV_OK;
}

enum kv_status srv_route_tenant_set(
	struct srv_http_request *request, struct srv_control *control, struct kv_error *err)
{
	json_t *json = NULL;
	enum kv_status status = srv_route_tenant(request, control, err);

	if (status == KV_OK)
		status = srv_http_body(request, "a tenant's quotas and weight", &json, err);
	if (status != KV_OK)
		return status;
	/* An empty policy is more likely a slip than meant: DELETE is there for that. */
	if (json_object_size(json) == 0)
		status = kv_fail(err, KV_BAD_CONFIG,
			"expected at least one of bytes, tokens, sessions, requests, tier_bytes and weight");
	else if (json_object_get(json, "tenant"))
		status = kv_fail(err, KV_BAD_CONFIG, "tenant: the path names the tenant");
	else
		status = srv_tenant_read_policy(json, &control->policy, err);
	json_decref(json);
	return status;
}
