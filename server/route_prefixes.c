/* /v1/prefixes: what is published, per pool and one by one, how often it was found; taking one out. */
#include <string.h>

#include "server/http_internal.h"
#include "server/http_rules.h"
#include "server/http_views.h"
#include "server/routes.h"

static void add_pool(struct srv_text *text, const struct srv_pool_row *pool)
{
	const struct kv_prefix_counts *prefixes = &pool->prefixes;
	const struct kv_block_counts blocks = srv_view_pool_blocks(pool).counts;

	srv_text_open(text, NULL, '{');
	srv_text_string(text, "name", pool->name);
	srv_text_u64(text, "n_nodes", prefixes->n_nodes);
	srv_text_u64(text, "n_blocks", blocks.n_kept);
	srv_text_u64(text, "n_idle_blocks", blocks.n_idle);
	srv_text_u64(text, "cached_bytes", pool->memory.cached_bytes);
	srv_text_u64(text, "n_published", prefixes->n_published);
	srv_text_u64(text, "n_evicted", prefixes->n_evicted);
	srv_text_u64(text, "n_expired", prefixes->n_expired);
	srv_text_u64(text, "n_removed", prefixes->n_removed);
	srv_text_u64(text, "n_hits", prefixes->n_hits);
	srv_text_u64(text, "n_misses", prefixes->n_misses);
	srv_text_u64(text, "n_tokens_matched", prefixes->n_tokens_matched);
	srv_text_close(text, '}');
}

static void add_prefix(struct srv_text *text, const struct srv_prefix_row *row)
{
	const struct kv_prefix_row *prefix = &row->prefix;
	char adapter[KV_PREFIX_TEXT_BYTES_MAX + 1] = { 0 };

	memcpy(adapter, prefix->adapter, sizeof(prefix->adapter));
	srv_text_open(text, NULL, '{');
	srv_text_hex_id(text, "id", prefix->id);
	srv_text_string(text, "pool", row->pool);
	srv_view_tenant_id(text, "tenant", prefix->tenant);
	srv_text_string(text, "adapter", adapter);
	srv_text_bool(text, "has_salt", prefix->has_salt);
	srv_text_u64(text, "n_tokens", prefix->n_tokens);
	srv_text_u64(text, "n_blocks", prefix->n_blocks);
	srv_text_u64(text, "stored_bytes", prefix->stored_bytes);
	srv_text_u64(text, "n_holders", prefix->n_holders);
	srv_text_u64(text, "n_hits", prefix->n_hits);
	srv_text_u64(text, "n_whole_hits", prefix->n_whole_hits);
	srv_text_u64(text, "age_ms", row->age_ms);
	if (prefix->expires_ns != 0)
		srv_text_u64(text, "ttl_left_ms", row->ttl_left_ms);
	else
		srv_text_null(text, "ttl_left_ms");
	srv_text_close(text, '}');
}

void srv_view_prefixes(const struct srv_control *control, struct srv_text *text)
{
	srv_text_open(text, NULL, '{');
	srv_text_open(text, "pools", '[');
	for (uint32_t i = 0; i < srv_view_n_pools(control); i++)
		add_pool(text, &control->rows.pools[i]);
	srv_text_close(text, ']');
	srv_text_open(text, "prefixes", '[');
	for (uint32_t i = 0; i < control->n_prefixes && i < SRV_CONTROL_ROWS_MAX; i++)
		add_prefix(text, &control->rows.prefixes[i]);
	srv_text_close(text, ']');
	srv_view_cursor(text, control);
	srv_text_close(text, '}');
}

void srv_view_prefix(const struct srv_control *control, struct srv_text *text)
{
	add_prefix(text, &control->rows.prefixes[0]);
}

enum kv_status srv_route_prefix(
	struct srv_http_request *request, struct srv_control *control, struct kv_error *err)
{
	if (!srv_http_read_hex_id(request->names[0], &control->id))
		return kv_fail(
			err, KV_BAD_ARG, "prefix id '%.40s': expected 16 hex digits", request->names[0]);
	return KV_OK;
}
