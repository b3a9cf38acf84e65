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
	static const char *const titles[] = { "<prefix", "<pool", "<tenant", "<adapter", "tokens", "stored",
		"held by", "hits", "age", "time left" };
	static const char *const texts[] = { "id", "pool", "tenant", "adapter" };
	struct srv_table table;
	const json_t *prefix;
	size_t i;

	if (json_array_size(prefixes) == 0) {
		printf("no prefixes\n");
		return;
	}
	srv_table_init(&table, titles, KV_LENGTH(titles));
	json_array_foreach (prefixes, i, prefix) {
		char text[SRV_HUMAN_BYTES];

		for (size_t n = 0; n < KV_LENGTH(texts); n++)
			srv_table_cell(&table, "%s", srv_json_text(prefix, texts[n]));
		srv_table_cell(&table, "%llu", (unsigned long long)srv_json_u64(prefix, "n_tokens"));
		srv_table_cell(&table, "%s", srv_human_bytes(srv_json_u64(prefix, "stored_bytes"), text));
		srv_table_cell(&table, "%llu", (unsigned long long)srv_json_u64(prefix, "n_holders"));
		srv_table_cell(&table, "%llu", (unsigned long long)srv_json_u64(prefix, "n_hits"));
		srv_table_cell(&table, "%s", srv_human_ms(srv_json_u64(prefix, "age_ms"), text));
		srv_table_cell(&table, "%s", human_ttl(prefix, text));
	}
	srv_table_print(&table, stdout);
	srv_table_finish(&table);
}

static enum kv_status run_prefixes(struct srv_ctl *ctl, struct kv_error *err)
{
	json_t *prefixes;
	const enum kv_status status = srv_ctl_api_list(ctl, "/v1/prefixes", "prefixes", &prefixes, err);

	if (status != KV_OK)
		return status;
	if (ctl->is_json) {
		json_t *json = json_pack("{s:O}", "prefixes", prefixes);

		srv_ctl_print_json(json);
		json_decref(json);
	} else {
		print_prefixes(prefixes);
	}
	json_decref(prefixes);
	return KV_OK;
}

const struct srv_command srv_cmd_prefixes = {
	.name = "prefixes",
	.summary = "published prefixes, one by one",
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
