/* /v1/pools: list, make, delete. */
#include <stdio.h>

#include "server/http_internal.h"
#include "server/http_rules.h"
#include "server/http_views.h"
#include "server/routes.h"

static void pool_members(struct srv_text *text, const struct srv_pool_row *pool)
{
	srv_text_string(text, "name", pool->name);
	srv_text_hex_id(text, "fingerprint", pool->fingerprint);
	srv_text_u64(text, "layers", pool->n_layers);
	srv_text_u64(text, "q_heads", pool->q_heads);
	srv_text_u64(text, "kv_heads", pool->kv_heads);
	srv_text_u64(text, "k_head_dim", pool->k_head_dim);
	srv_text_u64(text, "v_head_dim", pool->v_head_dim);
	srv_text_string(text, "k", pool->k_format);
	srv_text_string(text, "v", pool->v_format);
	srv_text_u64(text, "block_size", pool->block_size);
	srv_text_u64(text, "tokens_max", pool->tokens_max);
	srv_text_open(text, "groups", '[');
	for (uint32_t i = 0; i < pool->n_groups && i < KV_GROUPS_MAX; i++) {
		srv_text_open(text, NULL, '{');
		srv_text_u64(text, "n_blocks", pool->blocks[i].n_total);
		srv_text_u64(text, "block_bytes", pool->block_bytes[i]);
		srv_text_close(text, '}');
	}
	srv_text_close(text, ']');
	if (pool->n_tables > pool->n_groups) {
		srv_text_open(text, "exact_window", '{'); /* its ring blocks */
		srv_text_u64(text, "n_blocks", pool->blocks[pool->n_groups].n_total);
		srv_text_u64(text, "block_bytes", pool->block_bytes[pool->n_groups]);
		srv_text_close(text, '}');
	}
	srv_text_u64(text, "arena_bytes", pool->arena_bytes);
	srv_text_u64(text, "n_sessions", pool->n_sessions);
	srv_text_u64(text, "n_sequences", pool->n_sequences);
}

static void add_pool(struct srv_text *text, const struct srv_pool_row *pool)
{
	srv_text_open(text, NULL, '{');
	pool_members(text, pool);
	srv_text_close(text, '}');
}

void srv_view_pools(const struct srv_control *control, struct srv_text *text)
{
	srv_text_open(text, NULL, '{');
	srv_text_open(text, "pools", '[');
	for (uint32_t i = 0; i < srv_view_n_pools(control); i++)
		add_pool(text, &control->rows.pools[i]);
	srv_text_close(text, ']');
	srv_text_close(text, '}');
}

void srv_view_pool(const struct srv_control *control, struct srv_text *text)
{
	const struct srv_pool_row *pool = &control->rows.pools[0];
	const struct srv_block_sum blocks = srv_view_pool_blocks(pool);

	srv_text_open(text, NULL, '{');
	pool_members(text, pool);
	srv_view_blocks(text, &blocks);
	srv_view_report(text, &pool->memory, SRV_REPORT_POOL);
	srv_text_close(text, '}');
}

void srv_view_pool_created(const struct srv_control *control, struct srv_text *text)
{
	if (control->n_rows > 0) {
		add_pool(text, &control->rows.pools[0]);
		return;
	}
	srv_text_open(text, NULL, '{');
	srv_text_string(text, "name", control->name);
	srv_text_close(text, '}');
}

/* Computes (rotations): this thread may, the loop may not. */
enum kv_status srv_route_pool_create(
	struct srv_http_request *request, struct srv_control *control, struct kv_error *err)
{
	json_t *json = NULL;
	enum kv_status status = srv_http_body(request, "one pool", &json, err);

	if (status != KV_OK)
		return status;
	status = kv_pool_spec_create(json, &control->spec, err);
	json_decref(json);
	if (status == KV_OK)
		snprintf(control->name, sizeof(control->name), "%s", control->spec->name);
	return status;
}

enum kv_status srv_route_pool_name(
	struct srv_http_request *request, struct srv_control *control, struct kv_error *err)
{
	if (!srv_http_is_pool_name(request->names[0]))
		return kv_fail(err, KV_NOT_FOUND, "'%.70s' cannot be the name of a pool", request->names[0]);
	snprintf(control->name, sizeof(control->name), "%s", request->names[0]);
	return KV_OK;
}
