/*
 * Pools at run time: carved from the arena, served by a lane of their own, returned whole.
 */
#include "server/internal.h"

#include <string.h>

#include "core/format.h"
#include "server/checkpoint.h"

static enum kv_status add_to_domain(struct srv_server *server, struct kv_pool_spec *spec, uint64_t offset,
	uint64_t n_bytes, struct kv_pool **out, struct kv_error *err)
{
	struct kv_backend_pool *backend_pool = NULL;
	struct kv_pool *pool;
	enum kv_status status =
		server->backend->ops->pool_create(server->backend, spec, offset, &backend_pool, err);

	if (status != KV_OK)
		return status;
	status = kv_domain_pool_add(server->domain, spec, backend_pool, offset, n_bytes, &pool, err);
	if (status != KV_OK) {
		server->backend->ops->pool_destroy(server->backend, backend_pool);
		return status;
	}
	status = srv_lane_open(server, pool, err);
	if (status != KV_OK) {
		server->backend->ops->pool_destroy(server->backend, backend_pool);
		pool->backend_pool = NULL;
		pool->spec = NULL; /* stays the caller's */
		kv_domain_pool_remove(pool);
		return status;
	}
	*out = pool;
	return KV_OK;
}

enum kv_status srv_pool_create(
	struct srv_server *server, struct kv_pool_spec *spec, struct kv_pool **out, struct kv_error *err)
{
	uint64_t n_bytes = 0, offset = 0;
	enum kv_status status = server->backend->ops->pool_check(server->backend, spec, &n_bytes, err);

	/* Before the arena is asked: a name that is taken must not be told as a lack of memory. */
	if (kv_domain_pool_by_name(server->domain, spec->name, (uint32_t)strlen(spec->name)))
		return kv_fail(err, KV_EXISTS, "pool \"%s\" exists already", spec->name);
	if (status == KV_OK)
		status = kv_arena_carve(server->arena, n_bytes, &offset, err);
	if (status != KV_OK) {
		kv_error_wrap(err, "pool \"%s\"", spec->name);
		return status;
	}
	status = add_to_domain(server, spec, offset, n_bytes, out, err);
	if (status != KV_OK) {
		kv_arena_return(server->arena, offset);
		return status;
	}
	srv_log(SRV_LOG_INFO,
		"pool %s made: layers %u, kv_heads %u, head_dim %u/%u, %s/%s, blocks %u of %u tokens, %llu "
		"bytes",
		spec->name, spec->n_layers, spec->kv_heads, spec->k_head_dim, spec->v_head_dim,
		kv_pool_spec_format_name(spec, false), kv_pool_spec_format_name(spec, true),
		spec->n_blocks[0], spec->block_size, (unsigned long long)n_bytes);
	return KV_OK;
}

enum kv_status srv_pool_remove(struct srv_server *server, struct kv_pool *pool, struct kv_error *err)
{
	struct srv_lane *lane = &server->lanes[pool->pool_idx];
	const uint64_t offset = pool->arena_offset;
	const enum kv_status status = kv_domain_pool_check_remove(pool, err);

	if (status != KV_OK)
		return status;
	if (srv_checkpoint_is_running(server->checkpoint))
		return kv_fail(err, KV_BUSY_RETRY, "pool \"%s\": a snapshot is being written or restored",
			pool->spec->name);
	if (!srv_lane_is_idle(lane))
		return kv_fail(err, KV_BUSY_RETRY, "pool \"%s\" has batches in flight", pool->spec->name);
	srv_log(SRV_LOG_INFO, "pool %s removed", pool->spec->name);
	srv_lane_close(server, lane);
	server->backend->ops->pool_destroy(server->backend, pool->backend_pool);
	kv_domain_pool_remove(pool);
	kv_arena_return(server->arena, offset);
	return KV_OK;
}
