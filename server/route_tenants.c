/* GET /v1/tenants: what each tenant has, over all of its sessions. */
#include "server/http_views.h"

void srv_view_tenants(const struct srv_control *control, struct srv_text *text)
{
	srv_text_open(text, NULL, '{');
	srv_text_open(text, "tenants", '[');
	for (uint32_t i = 0; i < srv_view_n_rows(control); i++) {
		const struct srv_tenant_row *tenant = &control->rows.tenants[i];

		srv_text_open(text, NULL, '{');
		srv_view_tenant_id(text, "tenant", tenant->tenant);
		srv_text_u64(text, "n_sessions", tenant->n_sessions);
		srv_text_u64(text, "n_sequences", tenant->n_sequences);
		srv_text_u64(text, "n_tokens", tenant->n_tokens);
		srv_text_u64(text, "stored_bytes", tenant->stored_bytes);
		srv_text_u64(text, "dense_equivalent_bytes", tenant->dense_equivalent_bytes);
		srv_text_u64(text, "reserved_bytes", tenant->reserved_bytes);
		srv_text_u64(text, "n_rows_in", tenant->n_rows_in);
		srv_text_u64(text, "n_rows_out", tenant->n_rows_out);
		srv_text_u64(text, "n_queries", tenant->n_queries);
		srv_text_close(text, '}');
	}
	srv_text_close(text, ']');
	srv_view_cursor(text, control);
	srv_text_close(text, '}');
}
