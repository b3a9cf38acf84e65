/* What an operator does to the daemon as a whole: GET /v1/audit, POST /v1/drain. */
#include "server/http_views.h"

void srv_view_audit(const struct srv_control *control, struct srv_text *text)
{
	srv_text_open(text, NULL, '{');
	srv_text_bool(text, "is_clean", control->is_passed);
	srv_text_string(text, "difference", control->is_passed ? NULL : control->error.msg);
	if (control->audit.finding.session != 0)
		srv_text_hex_id(text, "session", control->audit.finding.session);
	else
		srv_text_string(text, "session", NULL);
	srv_text_string(text, "pool", control->audit.finding.pool[0] ? control->audit.finding.pool : NULL);
	srv_text_u64(text, "n_sessions", control->audit.counts.n_sessions);
	srv_text_u64(text, "n_sequences", control->audit.counts.n_sequences);
	srv_text_u64(text, "n_table_entries", control->audit.counts.n_entries);
	srv_text_u64(text, "n_blocks", control->audit.counts.n_blocks);
	srv_text_u64(text, "n_sessions_unsummed", control->audit.counts.n_sessions_unsummed);
	srv_text_u64(text, "n_pools_unsummed", control->audit.counts.n_pools_unsummed);
	srv_text_u64(text, "n_tenants_unsummed", control->audit.counts.n_tenants_unsummed);
	srv_text_u64(text, "duration_us", control->duration_us);
	srv_text_close(text, '}');
}

void srv_view_drain(const struct srv_control *control, struct srv_text *text)
{
	srv_text_open(text, NULL, '{');
	srv_text_string(text, "status", "draining");
	srv_text_u64(text, "n_connections", control->gauges.n_connections);
	srv_text_u64(text, "n_sessions", control->gauges.n_sessions);
	srv_text_u64(text, "n_queued", control->gauges.n_queued);
	srv_text_u64(text, "n_batches_in_flight", control->gauges.n_batches_in_flight);
	srv_text_close(text, '}');
}
