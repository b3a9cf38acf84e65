/* Pools: what they are, making and deleting them. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "core/checked.h"
#include "core/io.h"
#include "core/memory.h"
#include "core/pool_spec.h"
#include "server/ctl/ctl.h"
#include "server/ctl/table.h"

#define SPEC_BYTES_MAX 4194304u /* of a body of POST /v1/pools */

static void print_pools(const json_t *pools)
{
	static const char *const titles[] = { "<pool", "layers", "q heads", "KV heads", "K dim", "V dim",
		"<K", "<V", "block", "tokens at most", "memory", "sessions", "sequences" };
	static const char *const counts[] = { "layers", "q_heads", "kv_heads", "k_head_dim", "v_head_dim" };
	static const char *const ends[] = { "n_sessions", "n_sequences" };
	char bytes[SRV_HUMAN_BYTES];
	struct srv_table table;
	const json_t *pool;
	size_t i;

	if (json_array_size(pools) == 0) {
		printf("no pools\n");
		return;
	}
	srv_table_init(&table, titles, KV_LENGTH(titles));
	json_array_foreach (pools, i, pool) {
		srv_table_cell(&table, "%s", srv_json_text(pool, "name"));
		for (size_t n = 0; n < KV_LENGTH(counts); n++)
			srv_table_cell(&table, "%llu", (unsigned long long)srv_json_u64(pool, counts[n]));
		srv_table_cell(&table, "%s", srv_json_text(pool, "k"));
		srv_table_cell(&table, "%s", srv_json_text(pool, "v"));
		srv_table_cell(&table, "%llu", (unsigned long long)srv_json_u64(pool, "block_size"));
		srv_table_cell(&table, "%llu", (unsigned long long)srv_json_u64(pool, "tokens_max"));
		srv_table_cell(&table, "%s", srv_human_bytes(srv_json_u64(pool, "arena_bytes"), bytes));
		for (size_t n = 0; n < KV_LENGTH(ends); n++)
			srv_table_cell(&table, "%llu", (unsigned long long)srv_json_u64(pool, ends[n]));
	}
	srv_table_print(&table, stdout);
	srv_table_finish(&table);
}

static enum kv_status run_pools(struct srv_ctl *ctl, struct kv_error *err)
{
	json_t *answer = NULL;
	const enum kv_status status = srv_ctl_api(ctl, "GET", "/v1/pools", NULL, &answer, err);

	if (status == KV_OK && ctl->is_json)
		srv_ctl_print_json(answer);
	else if (status == KV_OK)
		print_pools(json_object_get(answer, "pools"));
	json_decref(answer);
	return status;
}

static enum kv_status read_stdin(char **text, uint64_t *n_bytes, struct kv_error *err)
{
	char *bytes = kv_alloc(SPEC_BYTES_MAX + 1, 1);

	if (!bytes)
		return kv_fail(err, KV_NO_MEMORY, "no memory for a description");
	const size_t n = fread(bytes, 1, SPEC_BYTES_MAX + 1, stdin);

	if (n > SPEC_BYTES_MAX || ferror(stdin)) {
		kv_free(bytes);
		return kv_fail(err, KV_TOO_LARGE, "standard input: it cannot be read, or is above %u bytes",
			SPEC_BYTES_MAX);
	}
	*text = bytes;
	*n_bytes = n;
	return KV_OK;
}

/* JSON itself, members with commas between, "-" or a file with JSON. */
static enum kv_status read_spec(const char *operand, json_t **spec, struct kv_error *err)
{
	/* What tqkvd --pool takes; a file of such a name is taken for the file. */
	if (strncmp(operand, "name=", 5) == 0 && access(operand, F_OK) != 0)
		return kv_pool_spec_parse_short(operand, spec, err);

	const char *source = "the description";
	json_error_t json_error;
	char *text = NULL;
	uint64_t n_bytes = strlen(operand);

	if (operand[strspn(operand, " \t\r\n")] != '{') {
		const bool is_stdin = strcmp(operand, "-") == 0;
		const enum kv_status status = is_stdin
			? read_stdin(&text, &n_bytes, err)
			: kv_files_system()->read_all(operand, SPEC_BYTES_MAX, &text, &n_bytes, err);

		source = is_stdin ? "standard input" : operand;
		if (status != KV_OK)
			return status;
	}
	*spec = json_loadb(text ? text : operand, (size_t)n_bytes, JSON_REJECT_DUPLICATES, &json_error);
	kv_free(text);
	if (!*spec)
		return kv_fail(err, KV_BAD_ARG, "%.200s: line %d column %d: %s", source, json_error.line,
			json_error.column, json_error.text);
	if (json_is_object(*spec))
		return KV_OK;
	json_decref(*spec);
	*spec = NULL;
	return kv_fail(err, KV_BAD_ARG, "%.200s: expected a JSON object", source);
}

static enum kv_status run_create(struct srv_ctl *ctl, struct kv_error *err)
{
	json_t *spec = NULL, *pool = NULL;
	enum kv_status status = read_spec(ctl->operands[0], &spec, err);

	if (status == KV_OK)
		status = srv_ctl_api(ctl, "POST", "/v1/pools", spec, &pool, err);
	if (status == KV_OK && ctl->is_json) {
		srv_ctl_print_json(pool);
	} else if (status == KV_OK) {
		json_t *pools = json_pack("[O]", pool);

		print_pools(pools);
		json_decref(pools);
	}
	json_decref(spec);
	json_decref(pool);
	return status;
}

static enum kv_status run_delete(struct srv_ctl *ctl, struct kv_error *err)
{
	return srv_ctl_delete(ctl, "/v1/pools", ctl->operands[0], SRV_CTL_POOL_CHARS, err);
}

const struct srv_command srv_cmd_pools = {
	.name = "pools",
	.summary = "all pools: shapes, formats, memory",
	.details = "'tqkvctl occupancy' tells what is in them.",
	.run = run_pools,
};

const struct srv_command srv_cmd_pools_create = {
	.name = "pools create",
	.operands = "SPEC",
	.n_operands_min = 1,
	.n_operands_max = 1,
	.summary = "makes a pool from the daemon's memory",
	.details =
		"SPEC is name=..,layers=.. as for tqkvd --pool, a JSON object, a file that holds one, or - "
		"for standard input. Members: name, "
		"layers, "
		"q_heads, kv_heads, head_dim (or k_head_dim and v_head_dim), k, v (or preset), block_size, "
		"blocks, and others that core/pool_spec.h describes.\n\n"
		"tqkvctl pools create name=chat,layers=30,q_heads=9,kv_heads=3,head_dim=64,preset=4bit,"
		"block_size=16,blocks=256\n\n"
		"tqkvctl pools create '{\"name\": \"chat\", \"layers\": 30, \"q_heads\": 9, \"kv_heads\": 3, "
		"\"head_dim\": 64, \"preset\": \"4bit\", \"block_size\": 16, \"blocks\": 256}'",
	.run = run_create,
};

const struct srv_command srv_cmd_pools_delete = {
	.name = "pools delete",
	.operands = "NAME",
	.n_operands_min = 1,
	.n_operands_max = 1,
	.summary = "gives the memory of a pool back that no session uses",
	.run = run_delete,
};
