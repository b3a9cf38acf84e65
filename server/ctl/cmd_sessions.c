#include <stdio.h>
#include <string.h>

#include "core/checked.h"
#include "server/ctl/ctl.h"
#include "server/ctl/table.h"

static const char *human_lease(const json_t *session, char text[static SRV_HUMAN_BYTES])
{
	const json_t *left = json_object_get(session, "lease_left_ms");

	if (json_integer_value(left) <= 0) {
		snprintf(text, SRV_HUMAN_BYTES, "over");
		return text;
	}
	return srv_human_ms((uint64_t)json_integer_value(left), text);
}

static void print_sessions(const json_t *sessions)
{
	static const char *const titles[] = { "<session", "<name", "<pool", "<tenant", "<connection",
		"sequences", "tokens", "rows", "open requests", "rows in", "rows out", "queries", "age",
		"lease left" };
	struct srv_table table;
	const json_t *session;
	size_t i;

	if (json_array_size(sessions) == 0) {
		printf("no sessions\n");
		return;
	}
	srv_table_init(&table, titles, KV_LENGTH(titles));
	json_array_foreach (sessions, i, session) {
		static const char *const texts[] = { "id", "name", "pool" };
		static const char *const counts[] = { "n_outstanding", "n_rows_in", "n_rows_out",
			"n_queries" };
		char text[SRV_HUMAN_BYTES], tenant[SRV_TABLE_CELL_BYTES];

		for (size_t n = 0; n < KV_LENGTH(texts); n++)
			srv_table_cell(&table, "%s", srv_json_text(session, texts[n]));
		srv_table_cell(&table, "%s", srv_human_tenant(srv_json_text(session, "tenant"), tenant));
		srv_table_cell(&table, "%s", srv_json_text(session, "connection"));
		srv_table_cell(&table, "%llu", (unsigned long long)srv_json_u64(session, "n_sequences"));
		srv_table_cell(&table, "%llu", (unsigned long long)srv_json_u64(session, "memory.n_tokens"));
		srv_table_cell(
			&table, "%s", srv_human_bytes(srv_json_u64(session, "memory.stored_bytes"), text));
		for (size_t n = 0; n < KV_LENGTH(counts); n++)
			srv_table_cell(&table, "%llu", (unsigned long long)srv_json_u64(session, counts[n]));
		srv_table_cell(&table, "%s", srv_human_ms(srv_json_u64(session, "age_ms"), text));
		srv_table_cell(&table, "%s", human_lease(session, text));
	}
	srv_table_print(&table, stdout);
	srv_table_finish(&table);
}

static void count_cell(struct srv_table *table, const json_t *row, const char *name)
{
	srv_table_cell(table, "%llu", (unsigned long long)srv_json_u64(row, name));
}

static void print_sequences(const json_t *sequences)
{
	static const char *const titles[] = { "sequence", "length", "longest layer", "<state", "blocks",
		"shared", "rows", "as bf16", "<tier", "in tier", "idle", "<evictable" };
	struct srv_table table;
	const json_t *sequence;
	size_t i;

	if (json_array_size(sequences) == 0) {
		printf("no sequences\n");
		return;
	}
	srv_table_init(&table, titles, KV_LENGTH(titles));
	json_array_foreach (sequences, i, sequence) {
		char text[SRV_HUMAN_BYTES];

		srv_table_cell(&table, "%s", srv_json_text(sequence, "id"));
		count_cell(&table, sequence, "length_min");
		count_cell(&table, sequence, "length_max");
		srv_table_cell(&table, "%s", srv_json_text(sequence, "state"));
		count_cell(&table, sequence, "n_blocks");
		count_cell(&table, sequence, "n_shared_blocks");
		srv_table_cell(
			&table, "%s", srv_human_bytes(srv_json_u64(sequence, "memory.stored_bytes"), text));
		srv_table_cell(&table, "%s",
			srv_human_bytes(srv_json_u64(sequence, "memory.dense_equivalent_bytes"), text));
		srv_table_cell(&table, "%s", srv_json_text(sequence, "tier"));
		srv_table_cell(&table, "%s", srv_human_bytes(srv_json_u64(sequence, "tier_bytes"), text));
		srv_table_cell(&table, "%s", srv_human_ms(srv_json_u64(sequence, "idle_ms"), text));
		srv_table_cell(
			&table, "%s", json_is_true(json_object_get(sequence, "is_evictable")) ? "yes" : "no");
	}
	srv_table_print(&table, stdout);
	srv_table_finish(&table);
}

static enum kv_status list_sessions(const struct srv_ctl *ctl, struct kv_error *err)
{
	json_t *sessions;
	enum kv_status status = srv_ctl_api_list(ctl, "/v1/sessions", "sessions", &sessions, err);

	if (status != KV_OK)
		return status;
	if (ctl->is_json) {
		json_t *json = json_pack("{s:O}", "sessions", sessions);

		srv_ctl_print_json(json);
		json_decref(json);
	} else {
		print_sessions(sessions);
	}
	json_decref(sessions);
	return KV_OK;
}

/* Two tenants may have a session of the same name. */
enum kv_status srv_ctl_session_id(const struct srv_ctl *ctl, const char *operand,
	char id[SRV_CTL_SESSION_CHARS + 1], struct kv_error *err)
{
	json_t *sessions = NULL;
	const json_t *session;
	uint32_t n_found = 0;
	size_t i;

	if (strlen(operand) == SRV_CTL_SESSION_CHARS &&
		strspn(operand, SRV_CTL_HEX_CHARS) == SRV_CTL_SESSION_CHARS) {
		memcpy(id, operand, SRV_CTL_SESSION_CHARS + 1);
		return KV_OK;
	}
	const enum kv_status status = srv_ctl_api_list(ctl, "/v1/sessions", "sessions", &sessions, err);

	if (status != KV_OK)
		return status;
	json_array_foreach (sessions, i, session) {
		if (strcmp(srv_json_text(session, "name"), operand) != 0)
			continue;
		n_found++;
		snprintf(id, SRV_CTL_SESSION_CHARS + 1, "%s", srv_json_text(session, "id"));
	}
	json_decref(sessions);
	if (n_found == 0)
		return kv_fail(err, SRV_CTL_USAGE,
			"'%.128s' is the name of no session, and no id of 16 hex digits; 'tqkvctl sessions' "
			"lists both",
			operand);
	if (n_found > 1)
		return kv_fail(err, KV_BAD_ARG,
			"%u sessions of different tenants are called '%.128s': give the id", n_found,
			operand);
	return KV_OK;
}

/* The session itself is in every page; its sequences are collected over all of them. */
static enum kv_status show_session(const struct srv_ctl *ctl, const char *operand, struct kv_error *err)
{
	char id[SRV_CTL_SESSION_CHARS + 1], path[64];
	json_t *page = NULL, *sequences = NULL;
	enum kv_status status = srv_ctl_session_id(ctl, operand, id, err);

	if (status != KV_OK)
		return status;
	snprintf(path, sizeof(path), "/v1/sessions/%s", id);
	status = srv_ctl_api(ctl, "GET", path, NULL, &page, err);
	if (status == KV_OK)
		status = srv_ctl_api_list(ctl, path, "sequences", &sequences, err);
	if (status == KV_OK && ctl->is_json) {
		json_t *json = json_pack(
			"{s:O, s:O}", "session", json_object_get(page, "session"), "sequences", sequences);

		srv_ctl_print_json(json);
		json_decref(json);
	} else if (status == KV_OK) {
		json_t *one = json_pack("[O]", json_object_get(page, "session"));

		print_sessions(one);
		printf("\n");
		print_sequences(sequences);
		json_decref(one);
	}
	json_decref(page);
	json_decref(sequences);
	return status;
}

static enum kv_status run_sessions(struct srv_ctl *ctl, struct kv_error *err)
{
	return ctl->n_operands == 0 ? list_sessions(ctl, err) : show_session(ctl, ctl->operands[0], err);
}

const struct srv_command srv_cmd_sessions = {
	.name = "sessions",
	.operands = "[ID]",
	.n_operands_max = 1,
	.summary = "all sessions, or one with its sequences",
	.details = "ID is an id or the name of a session. rows: bytes of the rows that its sequences see; "
		   "rows that several have count for each, "
		   "those "
		   "of spilled\n"
		   "sequences are in the tier instead. 'tqkvctl occupancy' has what lies in blocks. A "
		   "tenant's name "
		   "is that of\n"
		   "this machine's user of that number.",
	.run = run_sessions,
};

static enum kv_status run_close(struct srv_ctl *ctl, struct kv_error *err)
{
	char id[SRV_CTL_SESSION_CHARS + 1];
	const enum kv_status status = srv_ctl_session_id(ctl, ctl->operands[0], id, err);

	return status == KV_OK ? srv_ctl_delete(ctl, "/v1/sessions", id, SRV_CTL_HEX_CHARS, err) : status;
}

const struct srv_command srv_cmd_sessions_close = {
	.name = "sessions close",
	.operands = "ID",
	.n_operands_min = 1,
	.n_operands_max = 1,
	.summary = "ends a session and frees its rows; its client finds STALE_HANDLE",
	.details = "ID is an id or the name of a session, as 'tqkvctl sessions' lists them.",
	.run = run_close,
};
