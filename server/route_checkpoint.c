/* Snapshots of sessions: GET and POST /v1/snapshot, POST /v1/restore. */
#include <stdio.h>
#include <string.h>

#include "server/http_internal.h"
#include "server/http_rules.h"
#include "server/http_views.h"
#include "server/routes.h"

void srv_view_checkpoint(const struct srv_control *control, struct srv_text *text)
{
	const struct srv_checkpoint_view *view = &control->checkpoint;
	const bool is_over = view->n_begun > 0 && !view->is_running;

	srv_text_open(text, NULL, '{');
	srv_text_u64(text, "n_begun", view->n_begun);
	srv_text_string(text, "state", view->is_running ? "running" : is_over ? "done" : "none");
	srv_text_string(text, "operation",
		view->n_begun == 0         ? NULL
			: view->is_restore ? "restore"
					   : "snapshot");
	srv_text_string(text, "name", view->n_begun > 0 ? view->name : NULL);
	/* What is there is whole; what it lacks is counted below. */
	const bool is_partial = view->status == KV_OK && view->n_sequences_skipped > 0;

	srv_text_string(text, "status",
		!is_over             ? NULL
			: is_partial ? "PARTIAL"
				     : kv_status_name(view->status));
	srv_text_string(text, "detail", is_over && view->status != KV_OK ? view->detail : NULL);
	srv_text_u64(text, "n_sessions", view->n_sessions);
	srv_text_u64(text, "n_sequences", view->n_sequences);
	srv_text_u64(text, "n_prefixes", view->n_prefixes);
	srv_text_u64(text, "n_blocks", view->n_blocks);
	srv_text_u64(text, "n_bytes", view->n_bytes);
	srv_text_u64(text, "n_skipped_sessions", view->n_skipped);
	srv_text_u64(text, "n_skipped_sequences", view->n_sequences_skipped);
	srv_text_u64(text, "elapsed_us", view->elapsed_us);
	srv_text_close(text, '}');
}

/* {"name": ...} and, where has_session, "session": 16 hex digits. */
static enum kv_status read_body(
	struct srv_http_request *request, struct srv_control *control, bool has_session, struct kv_error *err)
{
	const char *key, *name = NULL;
	json_t *json = NULL, *value;
	enum kv_status status = srv_http_body(request, "the snapshot's name", &json, err);

	if (status != KV_OK)
		return status;
	json_object_foreach (json, key, value) {
		if (strcmp(key, "name") == 0 && json_is_string(value))
			name = json_string_value(value);
		else if (!has_session || strcmp(key, "session") != 0)
			status = kv_fail(err, KV_BAD_ARG, "member '%.40s' is not expected, or no text", key);
		else if (!json_is_string(value) ||
			!srv_http_read_hex_id(json_string_value(value), &control->id))
			status = kv_fail(err, KV_BAD_ARG, "session: expected a text of 16 hex digits");
	}
	if (status == KV_OK && !name)
		status = kv_fail(err, KV_BAD_ARG, "member 'name' is missing");
	if (status == KV_OK && strlen(name) >= sizeof(control->name))
		status = kv_fail(err, KV_BAD_ARG, "name: at most 64 characters");
	if (status == KV_OK)
		snprintf(control->name, sizeof(control->name), "%s", name);
	json_decref(json);
	return status;
}

enum kv_status srv_route_snapshot(
	struct srv_http_request *request, struct srv_control *control, struct kv_error *err)
{
	return read_body(request, control, true, err);
}

enum kv_status srv_route_restore(
	struct srv_http_request *request, struct srv_control *control, struct kv_error *err)
{
	return read_body(request, control, false, err);
}
