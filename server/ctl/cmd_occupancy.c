#include <stdio.h>

#include "core/checked.h"
#include "server/ctl/ctl.h"
#include "server/ctl/table.h"

static void ratio_cell(struct srv_table *table, const json_t *row, const char *path)
{
	const double ratio = srv_json_real(row, path);

	if (ratio > 0)
		srv_table_cell(table, "%.3f", ratio);
	else
		srv_table_cell(table, "-");
}

static void add_row(struct srv_table *table, const char *name, const json_t *row)
{
	static const char *const blocks[] = { "blocks.total", "blocks.free", "blocks.reserved",
		"blocks.owned", "blocks.shared", "blocks.pinned", "blocks.draining", "blocks.exact",
		"blocks.used_max" };
	char bytes[SRV_HUMAN_BYTES];

	srv_table_cell(table, "%s", name);
	srv_table_cell(table, "%llu", (unsigned long long)srv_json_u64(row, "n_sessions"));
	srv_table_cell(table, "%llu", (unsigned long long)srv_json_u64(row, "n_sequences"));
	srv_table_cell(table, "%llu", (unsigned long long)srv_json_u64(row, "memory.n_tokens"));
	for (size_t i = 0; i < KV_LENGTH(blocks); i++)
		srv_table_cell(table, "%llu", (unsigned long long)srv_json_u64(row, blocks[i]));
	srv_table_cell(table, "%s", srv_human_bytes(srv_json_u64(row, "memory.stored_bytes"), bytes));
	srv_table_cell(table, "%s", srv_human_bytes(srv_json_u64(row, "used_bytes"), bytes));
	srv_table_cell(
		table, "%s", srv_human_bytes(srv_json_u64(row, "memory.dense_equivalent_bytes"), bytes));
	ratio_cell(table, row, "memory.compression");
	ratio_cell(table, row, "effective_compression");
	if (srv_json_u64(row, "spilled.n_sequences") == 0)
		srv_table_cell(table, "-");
	else
		srv_table_cell(table, "%llu in %s",
			(unsigned long long)srv_json_u64(row, "spilled.n_sequences"),
			srv_human_bytes(srv_json_u64(row, "spilled.tier_bytes"), bytes));
}

/* What was counted, and how often. */
static void print_words(const json_t *all)
{
	char bytes[SRV_HUMAN_BYTES];

	printf("rows: what sequences see, shared rows for each that has them; in blocks: what lies in blocks "
	       "that "
	       "are not free, once\n"
	       "as bf16: the same rows; of rows: as bf16 over rows; compression: as bf16 over in blocks\n");
	if (srv_json_u64(all, "totals.spilled.n_sequences") > 0)
		printf("spilled: %llu tokens of %llu sequences are in a tier (%s), not in blocks\n",
			(unsigned long long)srv_json_u64(all, "totals.spilled.n_tokens"),
			(unsigned long long)srv_json_u64(all, "totals.spilled.n_sequences"),
			srv_human_bytes(srv_json_u64(all, "totals.spilled.tier_bytes"), bytes));
}

static void print_occupancy(const json_t *all)
{
	static const char *const titles[] = { "<pool", "sessions", "sequences", "tokens", "blocks", "free",
		"reserved", "owned", "shared", "pinned", "draining", "exact", "most used", "rows",
		"in blocks", "as bf16", "of rows", "compression", "spilled" };
	char total[SRV_HUMAN_BYTES], used[SRV_HUMAN_BYTES], left[SRV_HUMAN_BYTES];
	struct srv_table table;
	const json_t *pool;
	size_t i;

	srv_table_init(&table, titles, KV_LENGTH(titles));
	json_array_foreach (json_object_get(all, "pools"), i, pool)
		add_row(&table, srv_json_text(pool, "name"), pool);
	add_row(&table, "(all)", json_object_get(all, "totals"));
	srv_table_print(&table, stdout);
	srv_table_finish(&table);
	print_words(all);
	printf("arena: %s, %s in pools, %s free\n",
		srv_human_bytes(srv_json_u64(all, "arena.total_bytes"), total),
		srv_human_bytes(srv_json_u64(all, "arena.used_bytes"), used),
		srv_human_bytes(srv_json_u64(all, "arena.free_bytes"), left));
}

static enum kv_status run_occupancy(struct srv_ctl *ctl, struct kv_error *err)
{
	json_t *all = NULL;
	const enum kv_status status = srv_ctl_api(ctl, "GET", "/v1/occupancy", NULL, &all, err);

	if (status == KV_OK && ctl->is_json)
		srv_ctl_print_json(all);
	else if (status == KV_OK)
		print_occupancy(all);
	json_decref(all);
	return status;
}

const struct srv_command srv_cmd_occupancy = {
	.name = "occupancy",
	.summary = "blocks by state, tokens, bytes and compression of every pool",
	.run = run_occupancy,
};
