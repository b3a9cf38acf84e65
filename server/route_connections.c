/* GET /v1/connections: who is connected to the data port. */
#include "server/http_views.h"

void srv_view_connections(const struct srv_control *control, struct srv_text *text)
{
	srv_text_open(text, NULL, '{');
	srv_text_open(text, "connections", '[');
	for (uint32_t i = 0; i < srv_view_n_rows(control); i++) {
		const struct srv_connection_row *connection = &control->rows.connections[i];
		const bool is_unix = connection->peer.transport == KV_IO_UNIX;

		srv_text_open(text, NULL, '{');
		srv_text_decimal_id(text, "id", connection->id);
		srv_text_string(text, "transport", is_unix ? "unix" : "tcp");
		srv_text_string(text, "peer", connection->peer.address);
		if (is_unix)
			srv_text_u64(text, "uid", connection->peer.uid);
		else
			srv_text_null(text, "uid");
		srv_text_string(text, "client_name", connection->client_name);
		srv_text_string(text, "state", connection->state);
		srv_text_u64(text, "age_ms", connection->age_ms);
		srv_text_u64(text, "bytes_in", connection->bytes_in);
		srv_text_u64(text, "bytes_out", connection->bytes_out);
		srv_text_u64(text, "n_frames_in", connection->frames_in);
		srv_text_u64(text, "n_inflight", connection->n_inflight);
		srv_text_u64(text, "n_sessions", connection->n_sessions);
		srv_text_close(text, '}');
	}
	srv_text_close(text, ']');
	srv_view_cursor(text, control);
	srv_text_close(text, '}');
}
