#include <stdio.h>

#include "server/ctl/ctl.h"
#include "server/ctl/table.h"

static void print_pools(const json_t *pools)
{
	static const char *const titles[] = { "<pool", "layers", "q heads", "kv heads", "k dim", "v dim",
		"<k", "<v", "block", "tokens max", "arena", "sessions", "sequences", "<fingerprint" };
	struct srv_table table;
	const json_t *pool;
	size_t i;

	if (json_array_size(pools) == 0) {
		printf("no pools\n");
		return;
	}
	srv_table_init(&table, titles, sizeof(titles) / sizeof(titles[0]));
	json_array_foreach (pools, i, pool) {
		static const char *const numbers[] = { "layers", "q_heads", "kv_heads", "k_head_dim",
			"v_head_dim" };
		char bytes[SRV_HUMAN_BYTES];

		srv_table_cell(&table, "%s", srv_json_text(pool, "name"));
		for (size_t n = 0; n < sizeof(numbers) / sizeof(numbers[0]); n++)
			srv_table_cell(&table, "%llu", (unsigned long long)srv_json_u64(pool, numbers[n]));
		srv_table_cell(&table, "%s", srv_json_text(pool, "k"));
		srv_table_cell(&table, "%s", srv_json_text(pool, "v"));
		srv_table_cell(&table, "%llu", (unsigned long long)srv_json_u64(pool, "block_size"));
		srv_table_cell(&table, "%llu", (unsigned long long)srv_json_u64(pool, "tokens_max"));
		srv_table_cell(&table, "%s", srv_human_bytes(srv_json_u64(pool, "arena_bytes"), bytes));
		srv_table_cell(&table, "%llu", (unsigned long long)srv_json_u64(pool, "n_sessions"));
		srv_table_cell(&table, "%llu", (unsigned long long)srv_json_u64(pool, "n_sequences"));
		srv_table_cell(&table, "%s", srv_json_text(pool, "fingerprint"));
	}
	srv_table_print(&table, stdout);
	srv_table_finish(&table);
}

static void print_line(const char *name, const char *value, const char *reason)
{
	char line[2048];

	snprintf(line, sizeof(line), "%-10s %s%s%s%s", name, value, reason ? " (" : "", reason ? reason : "",
		reason ? ")" : "");
	printf("%s\n", srv_printable(line));
}

static void print_info(const json_t *info, const json_t *pools)
{
	char text[512], bytes[SRV_HUMAN_BYTES], frame[SRV_HUMAN_BYTES], up[SRV_HUMAN_BYTES];
	const json_t *listener;
	size_t i;

	snprintf(text, sizeof(text), "tqkvd %s, commit %s, pid %llu, up %s, boot id %s",
		srv_json_text(info, "version"), srv_json_text(info, "commit"),
		(unsigned long long)srv_json_u64(info, "pid"),
		srv_human_ms(srv_json_u64(info, "uptime_ms"), up), srv_json_text(info, "boot_id"));
	print_line("daemon", text, NULL);
	print_line("backend", srv_json_text(info, "backend"), srv_json_text(info, "backend_reason"));
	snprintf(text, sizeof(text), "%s, instruction set %s", srv_json_text(info, "device"),
		srv_json_text(info, "instruction_set"));
	print_line("device", text, NULL);
	print_line("io", srv_json_text(info, "io"), srv_json_text(info, "io_reason"));
	snprintf(text, sizeof(text), "arena %s, frames up to %s",
		srv_human_bytes(srv_json_u64(info, "arena_bytes"), bytes),
		srv_human_bytes(srv_json_u64(info, "frame_bytes_max"), frame));
	print_line("memory", text, NULL);
	json_array_foreach (json_object_get(info, "listeners"), i, listener)
		print_line("listener", json_is_string(listener) ? json_string_value(listener) : "-", NULL);
	printf("\n");
	print_pools(json_object_get(pools, "pools"));
}

static enum kv_status run_info(struct srv_ctl *ctl, struct kv_error *err)
{
	json_t *info = NULL, *pools = NULL;
	enum kv_status status = srv_ctl_api(ctl, "GET", "/v1/info", NULL, &info, err);

	if (status == KV_OK)
		status = srv_ctl_api(ctl, "GET", "/v1/pools", NULL, &pools, err);
	if (status == KV_OK && ctl->is_json) {
		/* The daemon's objects as they are; pools beside the rest. */
		json_object_set(info, "pools", json_object_get(pools, "pools"));
		srv_ctl_print_json(info);
	} else if (status == KV_OK) {
		print_info(info, pools);
	}
	json_decref(info);
	json_decref(pools);
	return status;
}

const struct srv_command srv_cmd_info = {
	.name = "info",
	.summary = "version, backend, listeners and pools of the daemon",
	.run = run_info,
};
