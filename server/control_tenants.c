/*
 * Tenants in the control API: what each has, over all of its sessions, and what it may have. Loop thread.
 */
#include <string.h>

#include "core/report.h"
#include "server/internal.h"

#define SCAN_PER_TURN 1024u

/* The row of the tenant, made where it belongs; NULL: it is on a later page, or not asked for. */
static struct srv_tenant_row *tenant_row(struct srv_control *control, uint64_t tenant)
{
	struct srv_tenant_row *rows = control->rows.tenants;
	uint32_t low = 0, high = control->n_rows;

	if (tenant < control->cursor || (control->has_tenant && tenant != control->tenant))
		return NULL;
	while (low < high) {
		const uint32_t middle = (low + high) / 2;

		if (rows[middle].tenant < tenant)
			low = middle + 1;
		else
			high = middle;
	}
	if (low < control->n_rows && rows[low].tenant == tenant)
		return &rows[low];
	if (control->n_rows == control->n_rows_max) {
		control->is_passed = true; /* there is another page */
		if (low == control->n_rows)
			return NULL;
		control->n_rows--;
	}
	memmove(&rows[low + 1], &rows[low], (control->n_rows - low) * sizeof(rows[0]));
	rows[low] = (struct srv_tenant_row){ .tenant = tenant };
	control->n_rows++;
	return &rows[low];
}

/* Those that have a policy or are charged with something, sessions or not. */
static void add_entries(const struct kv_tenants *tenants, struct srv_control *control)
{
	for (uint32_t i = 1; i < tenants->n_touched; i++) {
		const struct kv_tenant *tenant = &tenants->entries[i];
		bool is_charged = false;

		for (uint32_t q = 0; q < KV_QUOTAS; q++)
			is_charged = is_charged || tenant->used[q] > 0;
		if (!is_charged && !tenant->has_policy)
			continue;

		struct srv_tenant_row *row = tenant_row(control, tenant->id);

		if (!row)
			continue;
		row->has_policy = tenant->has_policy;
		row->policy = *kv_tenant_policy_of(tenants, i);
		memcpy(row->used, tenant->used, sizeof(row->used));
		memcpy(row->used_max, tenant->used_max, sizeof(row->used_max));
		memcpy(row->n_refused, tenant->n_refused, sizeof(row->n_refused));
	}
}

/*
 * The tenants with the smallest numbers from the cursor on, or the one that is asked for. Every session is
 * looked at, since a tenant's may be anywhere; a row that falls off the page is summed up again on the next.
 */
bool srv_control_tenants(struct srv_server *server, struct srv_control *control)
{
	const struct kv_tenants *tenants = kv_domain_tenants(server->domain);
	uint32_t slot = (uint32_t)control->scan_slot;
	struct kv_memory_report memory;

	for (uint32_t n = 0; n < SCAN_PER_TURN; n++) {
		const struct kv_session *session = kv_session_next(server->domain, &slot);

		if (!session) {
			add_entries(tenants, control);
			control->common = tenants->common;
			if (control->is_passed)
				control->cursor_next = control->rows.tenants[control->n_rows - 1].tenant + 1;
			return true;
		}
		struct srv_tenant_row *row = tenant_row(control, session->tenant);

		if (!row)
			continue;
		kv_report_session(session, &memory);
		row->n_sessions++;
		row->n_sequences += session->n_sequences;
		row->n_tokens += memory.n_tokens;
		row->stored_bytes += memory.stored_bytes;
		row->dense_equivalent_bytes += memory.dense_equivalent_bytes;
		row->reserved_bytes += memory.reserved_bytes;
		row->n_rows_in += session->n_rows_in;
		row->n_rows_out += session->n_rows_out;
		row->n_queries += session->n_queries;
	}
	control->scan_slot = slot;
	return false;
}

bool srv_control_tenant(struct srv_server *server, struct srv_control *control)
{
	control->n_rows_max = 1;
	control->cursor = 0;
	control->has_tenant = true;
	if (!srv_control_tenants(server, control))
		return false;
	if (control->is_common) {
		control->n_rows = 1;
		control->rows.tenants[0] = (struct srv_tenant_row){
			.is_common = true, .has_policy = true, .policy = control->common
		};
	}
	if (control->n_rows == 0)
		control->status = kv_fail(&control->error, KV_NOT_FOUND,
			"the tenant has nothing here, and no policy of its own");
	return true;
}

/* The policy holds from this turn on. */
bool srv_control_tenant_set(struct srv_server *server, struct srv_control *control)
{
	struct kv_tenants *tenants = kv_domain_tenants(server->domain);

	if (!control->is_set) {
		control->is_set = true;
		if (control->is_common)
			tenants->common = control->policy;
		else
			control->status =
				kv_tenant_set(tenants, control->tenant, &control->policy, &control->error);
	}
	return control->status != KV_OK || srv_control_tenant(server, control);
}

void srv_control_tenant_clear(struct srv_server *server, struct srv_control *control)
{
	struct kv_tenants *tenants = kv_domain_tenants(server->domain);

	if (control->is_common)
		tenants->common = kv_tenant_policy_open();
	else
		control->status = kv_tenant_clear(tenants, control->tenant, &control->error);
}

void srv_control_tenant_gauges(struct srv_server *server, struct srv_control *control)
{
	const struct kv_tenants *tenants = kv_domain_tenants(server->domain);
	const uint32_t n_known = tenants->n_touched - 1;
	const uint32_t n = n_known < SRV_METRIC_TENANTS_MAX ? n_known : SRV_METRIC_TENANTS_MAX;

	control->n_tenant_gauges = n;
	memset(control->tenant_gauges, 0, sizeof(control->tenant_gauges));
	for (uint32_t i = 1; i < tenants->n_touched; i++) {
		const struct kv_tenant *tenant = &tenants->entries[i];
		const struct kv_tenant_policy *policy = kv_tenant_policy_of(tenants, i);
		struct srv_tenant_gauge *gauge = &control->tenant_gauges[i <= n ? i - 1 : n];

		gauge->tenant = tenant->id;
		gauge->weight = policy->weight;
		for (uint32_t q = 0; q < KV_QUOTAS; q++) {
			gauge->most[q] = policy->most[q];
			gauge->used[q] += tenant->used[q];
			gauge->n_refused[q] += tenant->n_refused[q];
		}
	}
}
