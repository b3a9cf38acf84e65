/*
 * Watched calls that share blocks and make room: FORK, PUBLISH, MATCH, PIN, eviction.
 */
#include "core/tally.h"
#include "tests/sim/record.h"
#include "tests/sim/world.h"

/* ---- making room ---- */

static uint32_t room_group; /* that room is made in */
static uint32_t own_payer;  /* whose own is evicted; KV_TENANT_NOBODY: anybody's */

/* A tenant's own goes before it is refused. */
WRAPPED(bool, kv_payer_evict, struct kv_pool *pool, uint32_t payer, uint64_t n_bytes)
{
	if (!sim_is_watched(pool->domain))
		return __real_kv_payer_evict(pool, payer, n_bytes);
	const uint64_t n_evicted = pool->n_evicted_sequences + kv_prefix_counts(pool).n_evicted;

	own_payer = payer;
	const bool is_made = __real_kv_payer_evict(pool, payer, n_bytes);

	own_payer = KV_TENANT_NOBODY;
	if (sim_planning.expected &&
		pool->n_evicted_sequences + kv_prefix_counts(pool).n_evicted != n_evicted)
		*sim_planning.expected =
			sim_model_plan(&sim_world_now->model, sim_planning.known, sim_planning.session,
				sim_planning.item, sim_planning.layer_first, sim_planning.n_layers);
	return is_made;
}

/* The same for a reservation; it makes its room inside of its own file, where nobody can watch the call. */
WRAPPED(enum kv_status, kv_payer_check_open, struct kv_pool *pool, uint64_t tenant, uint32_t reserve_blocks,
	struct kv_error *err)
{
	if (sim_is_watched(pool->domain))
		own_payer = kv_tenant_make(kv_domain_tenants(pool->domain), tenant);

	const enum kv_status status = __real_kv_payer_check_open(pool, tenant, reserve_blocks, err);

	own_payer = KV_TENANT_NOBODY;
	return status;
}

/* Room is made by evicting: what must come out is asked again, unless there is none. */
WRAPPED(bool, kv_pool_make_room, struct kv_pool *pool, uint32_t group_idx, uint32_t n_blocks)
{
	const struct kv_block_counts *counts = &pool->blocks[group_idx].counts;
	const uint64_t n_most = (uint64_t)counts->n_free - counts->n_reserved + counts->n_idle +
		pool->n_resting_entries[group_idx];
	const uint64_t n_evicted = pool->n_evicted_sequences + kv_prefix_counts(pool).n_evicted;
	room_group = group_idx;
	const bool is_made = __real_kv_pool_make_room(pool, group_idx, n_blocks);

	if (!sim_is_watched(pool->domain))
		return is_made;
	SIM_CHECK(is_made == (counts->n_free - counts->n_reserved >= n_blocks), "room is not as told");
	SIM_CHECK(n_blocks <= n_most ||
			pool->n_evicted_sequences + kv_prefix_counts(pool).n_evicted == n_evicted,
		"something was evicted in vain");
	SIM_CHECK(is_made || n_blocks > n_most || (counts->n_idle == 0 && kv_list_is_empty(&pool->resting)),
		"%u blocks are idle, and there is no room", counts->n_idle);
	if (is_made && sim_planning.expected)
		*sim_planning.expected =
			sim_model_plan(&sim_world_now->model, sim_planning.known, sim_planning.session,
				sim_planning.item, sim_planning.layer_first, sim_planning.n_layers);
	return is_made;
}

WRAPPED(void, kv_sequence_evict, struct kv_sequence *sequence)
{
	SIM_CHECK(own_payer == KV_TENANT_NOBODY || sequence->session->payer == own_payer,
		"a tenant's quota evicts another's sequence");
	if (sim_is_watched(sequence->pool->domain))
		sim_model_evicted(&sim_world_now->model, sequence,
			sim_planning.expected
				? sim_model_sequence(sim_planning.known, sim_planning.item->sequence_id)
				: NULL,
			own_payer == KV_TENANT_NOBODY ? room_group : UINT32_MAX);
	__real_kv_sequence_evict(sequence);
}

/* ---- sharing ---- */

WRAPPED(enum kv_status, kv_sequence_fork, struct kv_session *session, uint64_t child_id, uint64_t parent_id,
	uint32_t length, uint64_t now_ns, uint32_t *expected_length)
{
	if (!sim_is_watched(session->pool->domain))
		return __real_kv_sequence_fork(session, child_id, parent_id, length, now_ns, expected_length);
	struct sim_model *model = &sim_world_now->model;
	const enum kv_status residence = sim_model_residence(session, parent_id, true);
	const struct kv_tenant before = sim_tenant_of(session);
	struct sim_expected expected = sim_model_fork(model, sim_model_session(model, session->handle),
		session->pool, child_id, parent_id, length, residence);
	const enum kv_status status =
		__real_kv_sequence_fork(session, child_id, parent_id, length, now_ns, expected_length);

	if (status == KV_QUOTA && expected.status == KV_OK &&
		sim_tokens_are_short(session, &before, length == KV_LENGTH_PLANNED ? UINT32_MAX / 2 : length))
		expected = (struct sim_expected){ .status = KV_QUOTA };
	sim_check_quotas(session, &before);
	SIM_CHECK(status == expected.status, "FORK says %s, expected %s", kv_status_name(status),
		kv_status_name(expected.status));
	sim_model_forked(model, session->handle, child_id, parent_id, &expected, now_ns);
	return status;
}

WRAPPED(enum kv_status, kv_sequence_pin, struct kv_session *session, uint64_t sequence_id)
{
	const enum kv_status status = __real_kv_sequence_pin(session, sequence_id);

	if (sim_is_watched(session->pool->domain))
		sim_model_pinned(&sim_world_now->model, session->handle, sequence_id, true, status);
	return status;
}

WRAPPED(enum kv_status, kv_sequence_unpin, struct kv_session *session, uint64_t sequence_id)
{
	const enum kv_status status = __real_kv_sequence_unpin(session, sequence_id);

	if (sim_is_watched(session->pool->domain))
		sim_model_pinned(&sim_world_now->model, session->handle, sequence_id, false, status);
	return status;
}

/* ---- prefixes ---- */

static void check_prefix(uint16_t opcode, const struct kv_session *session, uint64_t sequence_id,
	enum kv_status status, const struct kv_prefix_result *result,
	const struct sim_prefix_expected *expected)
{
	struct sim_model *model = &sim_world_now->model;
	struct sim_control *control =
		sim_model_add_control(model, session->owner_id, opcode, status, session->handle);

	SIM_CHECK(status == expected->status && result->n_tokens == expected->n_tokens &&
			result->n_blocks == expected->n_blocks &&
			result->n_blocks_new == expected->n_blocks_new,
		"%s says %s, %u tokens, %u blocks, %u new; expected %s, %u, %u, %u", kvp_opcode_name(opcode),
		kv_status_name(status), result->n_tokens, result->n_blocks, result->n_blocks_new,
		kv_status_name(expected->status), expected->n_tokens, expected->n_blocks,
		expected->n_blocks_new);
	control->sequence = sequence_id;
	control->length = result->n_tokens;
	control->n_total = result->n_blocks;
	control->n_new = result->n_blocks_new;
	sim_model_session(model, session->handle)->life_ns = sim_world_now->server->now_ns;
}

WRAPPED(enum kv_status, kv_prefix_publish, struct kv_session *session, uint64_t sequence_id,
	const struct kv_prefix_key *key, uint32_t ttl_ms, uint64_t now_ns, struct kv_prefix_result *result)
{
	if (!sim_is_watched(session->pool->domain))
		return __real_kv_prefix_publish(session, sequence_id, key, ttl_ms, now_ns, result);
	const struct sim_prefix_expected expected =
		sim_model_publish(&sim_world_now->model, session, sequence_id, key, ttl_ms, now_ns);
	const enum kv_status status =
		__real_kv_prefix_publish(session, sequence_id, key, ttl_ms, now_ns, result);

	check_prefix(KVP_OP_PUBLISH, session, sequence_id, status, result, &expected);
	return status;
}

WRAPPED(enum kv_status, kv_prefix_match, struct kv_session *session, uint64_t sequence_id,
	const struct kv_prefix_key *key, bool is_evictable, uint64_t now_ns, struct kv_prefix_result *result)
{
	if (!sim_is_watched(session->pool->domain))
		return __real_kv_prefix_match(session, sequence_id, key, is_evictable, now_ns, result);
	struct sim_model *model = &sim_world_now->model;
	const struct kv_tenant before = sim_tenant_of(session);
	struct sim_prefix_expected expected = sim_model_match(model, session, sequence_id, key, now_ns);
	const enum kv_status status =
		__real_kv_prefix_match(session, sequence_id, key, is_evictable, now_ns, result);

	if (status == KV_QUOTA && expected.status == KV_OK &&
		sim_tokens_are_short(session, &before, expected.n_tokens))
		expected = (struct sim_prefix_expected){ .status = KV_QUOTA };
	sim_check_quotas(session, &before);
	check_prefix(KVP_OP_MATCH, session, sequence_id, status, result, &expected);
	sim_model_matched(model, session->handle, sequence_id, &expected, is_evictable);
	return status;
}

/* ---- audits ---- */

/* No step looks at more than it was told to, and that is never more than 4096. */
WRAPPED(enum kv_status, kv_tally_step, struct kv_tally *tally, uint32_t n_max, bool is_quiet, bool *is_done,
	struct kv_finding *finding, struct kv_error *err)
{
	const struct kv_tally_counts before = kv_tally_counts(tally);
	struct sim_world *world = sim_world_now;

	SIM_CHECK(n_max <= 4096, "an audit may look at %u entries in a turn", n_max);
	if (world && world->config.audit_step_max > 0)
		n_max = sim_between(&world->rng, 1, world->config.audit_step_max);

	const enum kv_status status = __real_kv_tally_step(tally, n_max, is_quiet, is_done, finding, err);
	const struct kv_tally_counts after = kv_tally_counts(tally);
	const uint64_t n = after.n_sessions - before.n_sessions + after.n_entries - before.n_entries +
		after.n_blocks - before.n_blocks;

	SIM_CHECK(n <= n_max, "an audit looked at %llu entries and blocks in a turn", (unsigned long long)n);
	if (world && world->maxima.n_audited < n)
		world->maxima.n_audited = (uint32_t)n;
	return status;
}
