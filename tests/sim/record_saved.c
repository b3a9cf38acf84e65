/*
 * Watched calls that write snapshots and restore them.
 */
#include <string.h>

#include "core/capture.h"
#include "core/domain_internal.h"
#include "core/prefix_internal.h"
#include "core/stage.h"
#include "server/checkpoint.h"
#include "tests/sim/record.h"
#include "tests/sim/world.h"

WRAPPED(enum kv_status, kv_capture_create, struct kv_domain *domain, struct kv_capture **out,
	struct kv_error *err)
{
	const enum kv_status status = __real_kv_capture_create(domain, out, err);

	if (sim_is_watched(domain))
		sim_model_capture_begun(&sim_world_now->model);
	return status;
}

WRAPPED(void, kv_capture_take, struct kv_capture *capture, const struct kv_sequence *sequence,
	uint64_t now_ns)
{
	if (sim_is_watched(sequence->pool->domain))
		sim_model_captured(&sim_world_now->model, sequence);
	__real_kv_capture_take(capture, sequence, now_ns);
}

WRAPPED(bool, kv_capture_take_prefix, struct kv_capture *capture, struct kv_pool *pool, uint64_t now_ns,
	uint32_t *n_looks)
{
	const bool is_taken = __real_kv_capture_take_prefix(capture, pool, now_ns, n_looks);

	for (uint32_t i = 0; is_taken && sim_is_watched(pool->domain) && i < kv_capture_n_prefixes(capture);
		i++) {
		struct kv_captured_prefix prefix;

		kv_capture_prefix(capture, i, &prefix);
		sim_model_captured_prefix(&sim_world_now->model, pool, &prefix, now_ns);
	}
	return is_taken;
}

WRAPPED(uint32_t, kv_prefix_put, struct kv_pool *pool, uint64_t tenant, const struct kv_prefix_key *key,
	uint32_t parent, const uint8_t *tokens, const uint32_t blocks[KV_GROUPS_MAX], uint64_t expires_ns,
	uint64_t now_ns)
{
	struct sim_published told = { .pool = pool,
		.tenant = tenant,
		.expires_ns = expires_ns,
		.block = blocks[0],
		.parent = parent == KV_PREFIX_NONE ? UINT32_MAX : kv_prefix_blocks_of(pool, parent)[0] };
	struct srv_checkpoint_view view;

	if (!sim_is_watched(pool->domain))
		return __real_kv_prefix_put(pool, tenant, key, parent, tokens, blocks, expires_ns, now_ns);
	memcpy(told.tokens, tokens, 4 * (size_t)pool->spec->block_size);
	memcpy(told.texts, key->adapter, key->adapter_bytes);
	memcpy(told.texts + 4, key->salt, key->salt_bytes);
	srv_checkpoint_status(sim_world_now->server->checkpoint, &view);
	const uint32_t block = sim_model_put_prefix(
		&sim_world_now->model, view.name, pool, &told, sim_world_now->server->now_ns);
	const uint32_t node =
		__real_kv_prefix_put(pool, tenant, key, parent, tokens, blocks, expires_ns, now_ns);

	SIM_CHECK(node != KV_PREFIX_NONE && kv_prefix_blocks_of(pool, node)[0] == block,
		"a restored prefix is another block");
	return node;
}

WRAPPED(void, kv_session_commit, struct kv_domain *domain, struct kv_session *session, uint64_t now_ns)
{
	struct srv_checkpoint_view view;

	__real_kv_session_commit(domain, session, now_ns);
	if (!sim_is_watched(domain))
		return;
	srv_checkpoint_status(sim_world_now->server->checkpoint, &view);
	sim_model_restored(&sim_world_now->model, view.name, session);
}

WRAPPED(enum kv_status, kv_stage_commit, struct kv_stage *stage, uint64_t now_ns, uint32_t *n_sessions,
	struct kv_error *err)
{
	const enum kv_status status = __real_kv_stage_commit(stage, now_ns, n_sessions, err);
	struct srv_checkpoint_view view;

	if (status != KV_OK || !sim_world_now || !sim_world_now->server)
		return status;
	srv_checkpoint_status(sim_world_now->server->checkpoint, &view);
	sim_model_check_restored(&sim_world_now->model, view.name);
	return status;
}
