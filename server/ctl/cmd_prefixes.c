#include <stdio.h>
#include <string.h>

#include "core/checked.h"
#include "server/ctl/ctl.h"
#include "server/ctl/table.h"

static const char *human_ttl(const json_t *prefix, char text[static SRV_HUMAN_BYTES])
{
	if (!json_is_integer(json_object_get(prefix, "ttl_left_ms")))
		return "none";
	return srv_human_ms(srv_json_u64(prefix, "ttl_left_ms"), text);
}

static void print_prefixes(const json_t *prefixes)
{
	static const char *const titles[] = { "<prefix", "<pool", "<tenant", "<adapter", "tokens",
		"in blocks", "held by", "hits", "whole", "age", "time left" };
	static const char *const texts[] = { "id", "pool" };
	struct srv_table table;
	const json_t *prefix;
	size_t i;

	if (json_array_size(prefixes) == 0) {
		printf("no prefixes\n");
		return;
	}
	srv_table_init(&table, titles, KV_LENGTH(titles));
	json_array_foreach (prefixes, i, prefix) {
		char text[SRV_HUMAN_BYTES], tenant[SRV_TABLE_CELL_BYTES];

		for (size_t n = 0; n < KV_LENGTH(texts); n++)
			srv_table_cell(&table, "%s", srv_json_text(prefix, texts[n]));
		srv_table_cell(&table, "%s", srv_human_tenant(srv_json_text(prefix, "tenant"), tenant));
		srv_table_cell(&table, "%s", srv_json_text(prefix, "adapter"));
		srv_table_cell(&table, "%llu", (unsigned long long)srv_json_u64(prefix, "n_tokens"));
		srv_table_cell(&table, "%s", srv_human_bytes(srv_json_u64(prefix, "stored_bytes"), text));
		srv_table_cell(&table, "%llu", (unsigned long long)srv_json_u64(prefix, "n_holders"));
		srv_table_cell(&table, "%llu", (unsigned long long)srv_json_u64(prefix, "n_hits"));
		srv_table_cell(&table, "%llu", (unsigned long long)srv_json_u64(prefix, "n_whole_hits"));
		srv_table_cell(&table, "%s", srv_human_ms(srv_json_u64(prefix, "age_ms"), text));
		srv_table_cell(&table, "%s", human_ttl(prefix, text));
	}
	srv_table_print(&table, stdout);
	srv_table_finish(&table);
}

/* Since start, per pool: blocks that two prefixes share are there, and counted, once. */
static void print_pools(const json_t *pools)
{
	static const char *const titles[] = { "<pool", "blocks", "idle", "idle bytes", "matches", "found",
		"missed", "hit rate", "tokens found", "published", "evicted", "expired", "removed" };
	static const char *const counts[] = { "n_published", "n_evicted", "n_expired", "n_removed" };
	struct srv_table table;
	const json_t *pool;
	size_t i;

	srv_table_init(&table, titles, KV_LENGTH(titles));
	json_array_foreach (pools, i, pool) {
		const uint64_t n_hits = srv_json_u64(pool, "n_hits"),
			       n_misses = srv_json_u64(pool, "n_misses");
		char text[SRV_HUMAN_BYTES];

		srv_table_cell(&table, "%s", srv_json_text(pool, "name"));
		srv_table_cell(&table, "%llu", (unsigned long long)srv_json_u64(pool, "n_blocks"));
		srv_table_cell(&table, "%llu", (unsigned long long)srv_json_u64(pool, "n_idle_blocks"));
		srv_table_cell(&table, "%s", srv_human_bytes(srv_json_u64(pool, "cached_bytes"), text));
		srv_table_cell(&table, "%llu", (unsigned long long)(n_hits + n_misses));
		srv_table_cell(&table, "%llu", (unsigned long long)n_hits);
		srv_table_cell(&table, "%llu", (unsigned long long)n_misses);
		if (n_hits + n_misses > 0)
			srv_table_cell(
				&table, "%.1f %%", 100.0 * (double)n_hits / (double)(n_hits + n_misses));
		else
			srv_table_cell(&table, "-");
		srv_table_cell(&table, "%llu", (unsigned long long)srv_json_u64(pool, "n_tokens_matched"));
		for (size_t n = 0; n < KV_LENGTH(counts); n++)
			srv_table_cell(&table, "%llu", (unsigned long long)srv_json_u64(pool, counts[n]));
	}
	srv_table_print(&table, stdout);
	srv_table_finish(&table);
}

static enum kv_status run_prefixes(struct srv_ctl *ctl, struct kv_error *err)
{
	json_t *prefixes = NULL, *page = NULL;
	enum kv_status status = srv_ctl_api(ctl, "GET", "/v1/prefixes?limit=1", NULL, &page, err);

	if (status == KV_OK)
		status = srv_ctl_api_list(ctl, "/v1/prefixes", "prefixes", &prefixes, err);
	const json_t *pools = json_object_get(page, "pools");

	if (status == KV_OK && ctl->is_json) {
		json_t *json = json_pack("{s:O?, s:O}", "pools", pools, "prefixes", prefixes);

		srv_ctl_print_json(json);
		json_decref(json);
	} else if (status == KV_OK) {
		print_prefixes(prefixes);
		printf("\n");
		print_pools(pools);
	}
	json_decref(prefixes);
	json_decref(page);
	return status;
}

const struct srv_command srv_cmd_prefixes = {
	.name = "prefixes",
	.summary = "published prefixes, one by one, and how often they were found, per pool",
	.details = "hits: matches that found a block of it which its PUBLISH added; whole: those that found "
		   "all of "
		   "it. One match\n"
		   "may count for several prefixes, so the sums of a pool stand below. in blocks: with what "
		   "others "
		   "share.",
	.run = run_prefixes,
};

static enum kv_status run_delete(struct srv_ctl *ctl, struct kv_error *err)
{
	return srv_ctl_delete(ctl, "/v1/prefixes", ctl->operands[0], SRV_CTL_HEX_CHARS, err);
}

const struct srv_command srv_cmd_prefixes_delete = {
	.name = "prefixes delete",
	.operands = "ID",
	.n_operands_min = 1,
	.n_operands_max = 1,
	.summary = "takes a prefix out, with all that go on behind it",
	.details = "Sequences keep what they share of it.",
	.run = run_delete,
};
