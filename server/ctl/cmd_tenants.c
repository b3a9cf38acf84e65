/* What tenants have and may have; changing it. */
#include <pwd.h>
#include <stdio.h>
#include <string.h>

#include "core/checked.h"
#include "core/tenant.h"
#include "server/ctl/ctl.h"
#include "server/ctl/table.h"

#define PATH_BYTES 64u

/* In the order of enum kv_quota. */
enum { ARG_BYTES, ARG_TOKENS, ARG_SESSIONS, ARG_REQUESTS, ARG_TIER_BYTES, ARG_WEIGHT };

static const struct srv_arg set_args[] = {
	[ARG_BYTES] = { .name = "bytes",
		.kind = SRV_ARG_BYTES,
		.placeholder = "BYTES",
		.help = "memory of pools; not given: no limit",
		.max = INT64_MAX },
	[ARG_TOKENS] = { .name = "tokens",
		.kind = SRV_ARG_NUMBER,
		.placeholder = "N",
		.help = "tokens of all its sequences; not given: no limit",
		.max = INT64_MAX },
	[ARG_SESSIONS] = { .name = "sessions",
		.kind = SRV_ARG_NUMBER,
		.placeholder = "N",
		.help = "open sessions; not given: no limit",
		.max = INT64_MAX },
	[ARG_REQUESTS] = { .name = "requests",
		.kind = SRV_ARG_NUMBER,
		.placeholder = "N",
		.help = "requests in flight; not given: no limit",
		.max = INT64_MAX },
	[ARG_TIER_BYTES] = { .name = "tier-bytes",
		.kind = SRV_ARG_BYTES,
		.placeholder = "BYTES",
		.help = "memory and file of the tiers for its spilled sequences; not given: no limit",
		.max = INT64_MAX },
	[ARG_WEIGHT] = { .name = "weight",
		.kind = SRV_ARG_NUMBER,
		.placeholder = "N",
		.help = "of its turns in a batch",
		.number = 1,
		.min = 1,
		.max = KV_TENANT_WEIGHT_MAX },
};

/* "3.0 KiB of 1.0 MiB", "7". */
static void used_cell(struct srv_table *table, const json_t *tenant, enum kv_quota quota)
{
	const char *name = kv_quota_name(quota);
	const json_t *most = json_object_get(json_object_get(tenant, "quotas"), name);
	const json_t *used = json_object_get(json_object_get(tenant, "used"), name);
	char a[SRV_HUMAN_BYTES], b[SRV_HUMAN_BYTES];

	if (kv_quota_is_bytes(quota)) {
		srv_human_bytes((uint64_t)json_integer_value(used), a);
		srv_human_bytes((uint64_t)json_integer_value(most), b);
	} else {
		snprintf(a, sizeof(a), "%lld", (long long)json_integer_value(used));
		snprintf(b, sizeof(b), "%lld", (long long)json_integer_value(most));
	}
	if (json_is_integer(most))
		srv_table_cell(table, "%s of %s", a, b);
	else
		srv_table_cell(table, "%s", a);
}

static void print_tenants(const json_t *tenants)
{
	static const char *const titles[] = { "<tenant", "<policy", "weight", "bytes", "tokens", "sessions",
		"requests", "tier bytes", "refused" };
	struct srv_table table;
	const json_t *tenant;
	size_t i;

	if (json_array_size(tenants) == 0) {
		printf("no tenants\n");
		return;
	}
	srv_table_init(&table, titles, KV_LENGTH(titles));
	json_array_foreach (tenants, i, tenant) {
		uint64_t n_refused = 0;
		char path[PATH_BYTES], name[SRV_TABLE_CELL_BYTES];

		srv_table_cell(&table, "%s", srv_human_tenant(srv_json_text(tenant, "tenant"), name));
		srv_table_cell(&table, "%s", srv_json_text(tenant, "policy"));
		srv_table_cell(&table, "%llu", (unsigned long long)srv_json_u64(tenant, "weight"));
		for (uint32_t q = 0; q < KV_QUOTAS; q++) {
			used_cell(&table, tenant, (enum kv_quota)q);
			snprintf(path, sizeof(path), "n_refused.%s", kv_quota_name((enum kv_quota)q));
			n_refused += srv_json_u64(tenant, path);
		}
		srv_table_cell(&table, "%llu", (unsigned long long)n_refused);
	}
	srv_table_print(&table, stdout);
	srv_table_finish(&table);
}

static void show(const struct srv_ctl *ctl, json_t *tenants)
{
	if (ctl->is_json) {
		json_t *json = json_pack("{s:O}", "tenants", tenants);

		srv_ctl_print_json(json);
		json_decref(json);
	} else {
		print_tenants(tenants);
	}
}

static enum kv_status run_tenants(struct srv_ctl *ctl, struct kv_error *err)
{
	json_t *tenants = NULL, *common = NULL;
	enum kv_status status = srv_ctl_api_list(ctl, "/v1/tenants", "tenants", &tenants, err);

	if (status == KV_OK)
		status = srv_ctl_api(ctl, "GET", "/v1/tenants/_default", NULL, &common, err);
	if (status == KV_OK) {
		json_array_append_new(tenants, common);
		show(ctl, tenants);
	}
	json_decref(tenants);
	return status;
}

/* A tenant of a Unix peer is its user id, so a user's name will do where this machine knows it. */
static enum kv_status path_of(const struct srv_ctl *ctl, char path[PATH_BYTES], struct kv_error *err)
{
	const char *name = ctl->operands[0];
	const size_t n = strspn(name, "0123456789");

	if ((n > 0 && n <= 20 && !name[n]) || strcmp(name, "tcp") == 0 || strcmp(name, "_default") == 0) {
		snprintf(path, PATH_BYTES, "/v1/tenants/%s", name);
		return KV_OK;
	}
	const struct passwd *user = getpwnam(name);

	if (!user)
		return kv_fail(err, SRV_CTL_USAGE,
			"'%.40s' is no tenant: a number (the user id of a client on the Unix socket, or "
			"tenant= of "
			"its token), the name of a user of this machine, tcp or _default",
			name);
	snprintf(path, PATH_BYTES, "/v1/tenants/%lu", (unsigned long)user->pw_uid);
	return KV_OK;
}

static enum kv_status run_set(struct srv_ctl *ctl, struct kv_error *err)
{
	char path[PATH_BYTES];
	json_t *tenant = NULL;
	enum kv_status status = path_of(ctl, path, err);

	if (status != KV_OK)
		return status;
	json_t *body = json_object();

	for (uint32_t i = 0; body && i < KV_LENGTH(set_args); i++) {
		if (ctl->values[i].is_given || i == ARG_WEIGHT)
			json_object_set_new(body, i < KV_QUOTAS ? kv_quota_name((enum kv_quota)i) : "weight",
				json_integer((json_int_t)ctl->values[i].number));
	}
	status = srv_ctl_api(ctl, "PUT", path, body, &tenant, err);
	json_decref(body);
	if (status == KV_OK) {
		json_t *tenants = json_pack("[O]", tenant);

		show(ctl, tenants);
		json_decref(tenants);
	}
	json_decref(tenant);
	return status;
}

static enum kv_status run_clear(struct srv_ctl *ctl, struct kv_error *err)
{
	char path[PATH_BYTES];
	enum kv_status status = path_of(ctl, path, err);

	if (status == KV_OK)
		status = srv_ctl_api(ctl, "DELETE", path, NULL, NULL, err);
	if (status == KV_OK && ctl->is_json)
		printf("{}\n");
	return status;
}

const struct srv_command srv_cmd_tenants = {
	.name = "tenants",
	.summary = "what tenants have and may have",
	.details = "A tenant is the user id of a Unix peer, or what a token says. The row _default holds for "
		   "all "
		   "that have\n"
		   "no policy of their own. A name is that of this machine's user of that number.",
	.run = run_tenants,
};

const struct srv_command srv_cmd_tenants_set = {
	.name = "tenants set",
	.operands = "TENANT",
	.n_operands_min = 1,
	.n_operands_max = 1,
	.summary = "gives a tenant quotas and a weight of its own",
	.details =
		"TENANT is a number: the user id of clients on the Unix socket, or what tenant= of a token "
		"says. "
		"A user's name stands for his id. tcp is everybody else over TCP, _default all that have no "
		"policy of their own. What is not given is not limited. Holds until a reload finds another "
		"list of tenants in the configuration.",
	.args = set_args,
	.n_args = KV_LENGTH(set_args),
	.run = run_set,
};

const struct srv_command srv_cmd_tenants_clear = {
	.name = "tenants clear",
	.operands = "TENANT",
	.n_operands_min = 1,
	.n_operands_max = 1,
	.summary = "ends a tenant's own policy; that of _default holds",
	.run = run_clear,
};
