#include <stdio.h>

#include "core/checked.h"
#include "server/ctl/ctl.h"
#include "server/ctl/table.h"

static void print_connections(const json_t *connections)
{
	static const char *const titles[] = { "<connection", "<peer", "<client", "<state", "age", "in", "out",
		"frames", "in flight", "sessions" };
	static const char *const texts[] = { "id", "peer", "client_name", "state" };
	static const char *const counts[] = { "n_frames_in", "n_inflight", "n_sessions" };
	char text[SRV_HUMAN_BYTES];
	struct srv_table table;
	const json_t *connection;
	size_t i;

	if (json_array_size(connections) == 0) {
		printf("no connections\n");
		return;
	}
	srv_table_init(&table, titles, KV_LENGTH(titles));
	json_array_foreach (connections, i, connection) {
		for (size_t n = 0; n < KV_LENGTH(texts); n++)
			srv_table_cell(&table, "%s", srv_json_text(connection, texts[n]));
		srv_table_cell(&table, "%s", srv_human_ms(srv_json_u64(connection, "age_ms"), text));
		srv_table_cell(&table, "%s", srv_human_bytes(srv_json_u64(connection, "bytes_in"), text));
		srv_table_cell(&table, "%s", srv_human_bytes(srv_json_u64(connection, "bytes_out"), text));
		for (size_t n = 0; n < KV_LENGTH(counts); n++)
			srv_table_cell(
				&table, "%llu", (unsigned long long)srv_json_u64(connection, counts[n]));
	}
	srv_table_print(&table, stdout);
	srv_table_finish(&table);
}

static enum kv_status run_connections(struct srv_ctl *ctl, struct kv_error *err)
{
	json_t *connections = NULL;
	const enum kv_status status =
		srv_ctl_api_list(ctl, "/v1/connections", "connections", &connections, err);

	if (status == KV_OK && ctl->is_json) {
		json_t *json = json_pack("{s:O}", "connections", connections);

		srv_ctl_print_json(json);
		json_decref(json);
	} else if (status == KV_OK) {
		print_connections(connections);
	}
	json_decref(connections);
	return status;
}

const struct srv_command srv_cmd_connections = {
	.name = "connections",
	.summary = "who is connected to the data port",
	.run = run_connections,
};
