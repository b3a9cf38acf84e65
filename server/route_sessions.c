/* /v1/sessions: list, look at one, its sequences and their blocks, close one. */
#include "server/http_internal.h"
#include "server/http_rules.h"
#include "server/http_views.h"
#include "server/routes.h"

static void add_session(struct srv_text *text, const char *key, const struct srv_session_row *session)
{
	srv_text_open(text, key, '{');
	srv_text_hex_id(text, "id", session->handle);
	srv_text_string(text, "name", session->name);
	srv_text_string(text, "pool", session->pool);
	srv_view_tenant_id(text, "tenant", session->tenant);
	if (session->owner_id != 0)
		srv_text_decimal_id(text, "connection", session->owner_id);
	else
		srv_text_null(text, "connection");
	srv_text_u64(text, "n_sequences", session->n_sequences);
	srv_text_u64(text, "n_outstanding", session->n_outstanding);
	srv_text_u64(text, "lease_ms", session->lease_ms);
	srv_text_i64(text, "lease_left_ms", session->lease_left_ms);
	srv_text_u64(text, "age_ms", session->age_ms);
	srv_text_u64(text, "n_rows_in", session->n_rows_in);
	srv_text_u64(text, "n_rows_out", session->n_rows_out);
	srv_text_u64(text, "n_queries", session->n_queries);
	srv_view_report(text, &session->memory, SRV_REPORT_SESSION);
	srv_text_close(text, '}');
}

void srv_view_sessions(const struct srv_control *control, struct srv_text *text)
{
	srv_text_open(text, NULL, '{');
	srv_text_open(text, "sessions", '[');
	for (uint32_t i = 0; i < srv_view_n_rows(control); i++)
		add_session(text, NULL, &control->rows.sessions[i]);
	srv_text_close(text, ']');
	srv_view_cursor(text, control);
	srv_text_close(text, '}');
}

static void add_sequence(struct srv_text *text, const char *key, const struct srv_sequence_row *sequence)
{
	srv_text_open(text, key, '{');
	srv_text_decimal_id(text, "id", sequence->id);
	srv_text_u64(text, "length_min", sequence->length_min);
	srv_text_u64(text, "length_max", sequence->length_max);
	srv_text_u64(text, "n_blocks", sequence->n_blocks);
	srv_text_u64(text, "n_shared_blocks", sequence->n_shared_blocks);
	srv_text_u64(text, "idle_ms", sequence->idle_ms);
	srv_text_string(text, "state", sequence->state);
	srv_text_string(text, "tier", sequence->tier);
	srv_text_u64(text, "tier_bytes", sequence->tier_bytes);
	srv_text_bool(text, "is_evictable", sequence->is_evictable);
	srv_text_u64(text, "n_pins", sequence->n_pins);
	srv_view_report(text, &sequence->memory, SRV_REPORT_SEQUENCE);
	srv_text_close(text, '}');
}

void srv_view_session(const struct srv_control *control, struct srv_text *text)
{
	srv_text_open(text, NULL, '{');
	add_session(text, "session", &control->session);
	srv_text_open(text, "sequences", '[');
	for (uint32_t i = 0; i < srv_view_n_rows(control); i++)
		add_sequence(text, NULL, &control->rows.sequences[i]);
	srv_text_close(text, ']');
	srv_view_cursor(text, control);
	srv_text_close(text, '}');
}

/* Ids of blocks are what the block table holds: the k-th names the tokens from k * block_size on. */
void srv_view_sequence(const struct srv_control *control, struct srv_text *text)
{
	srv_text_open(text, NULL, '{');
	add_sequence(text, "sequence", &control->sequence);
	srv_text_u64(text, "group", control->group_idx);
	srv_text_open(text, "blocks", '[');
	for (uint32_t i = 0; i < srv_view_n_rows(control); i++) {
		srv_text_open(text, NULL, '{');
		if (control->rows.blocks[i].n_owners > 0)
			srv_text_decimal_id(text, "id", control->rows.blocks[i].block_idx);
		else
			srv_text_null(text, "id");
		srv_text_u64(text, "n_owners", control->rows.blocks[i].n_owners);
		srv_text_close(text, '}');
	}
	srv_text_close(text, ']');
	srv_view_cursor(text, control);
	srv_text_close(text, '}');
}

enum kv_status srv_route_session(
	struct srv_http_request *request, struct srv_control *control, struct kv_error *err)
{
	if (!srv_http_read_hex_id(request->names[0], &control->id))
		return kv_fail(
			err, KV_BAD_ARG, "session id '%.40s': expected 16 hex digits", request->names[0]);
	return KV_OK;
}

enum kv_status srv_route_sequence(
	struct srv_http_request *request, struct srv_control *control, struct kv_error *err)
{
	const enum kv_status status = srv_route_session(request, control, err);

	if (status != KV_OK)
		return status;
	if (!srv_http_read_u64(request->names[1], UINT64_MAX, &control->sequence_id))
		return kv_fail(
			err, KV_BAD_ARG, "sequence id '%.40s': expected a whole number", request->names[1]);
	return KV_OK;
}
