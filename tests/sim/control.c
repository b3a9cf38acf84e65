/*
 * Control requests: what the HTTP side would post, and what its snapshots must hold.
 */
#include <stdio.h>
#include <string.h>

#include "tests/sim/world.h"

static struct sim_asked *asked_of(struct srv_control *control)
{
	return kv_container_of(control, struct sim_asked, control);
}

static void check_sessions(const struct sim_world *world, const struct srv_control *control)
{
	for (uint32_t i = 0; i < control->n_rows; i++) {
		const struct srv_session_row *row = &control->rows.sessions[i];
		const struct sim_session *session = sim_model_session(&world->model, row->handle);

		SIM_CHECK(session && session->is_open, "a session is listed that is not open");
		SIM_CHECK(row->n_sequences == session->n_sequences && row->owner_id == session->owner_id &&
				strcmp(row->name, session->name) == 0,
			"a session is listed with other values");
	}
	for (uint32_t i = 1; control->sort == SRV_SORT_ROWS_IN && i < control->n_rows; i++)
		SIM_CHECK(control->rows.sessions[i - 1].n_rows_in >= control->rows.sessions[i].n_rows_in,
			"a sorted list is not in order");
	if (control->sort != SRV_SORT_NONE) {
		const uint32_t n =
			world->model.n_open < control->n_rows_max ? world->model.n_open : control->n_rows_max;

		SIM_CHECK(control->n_rows == n, "%u of %u sessions are listed in order", control->n_rows, n);
		return;
	}
	SIM_CHECK(control->cursor > 0 || control->cursor_next > 0 || control->n_rows == world->model.n_open,
		"%u sessions are listed, %u are open", control->n_rows, world->model.n_open);
}

/* Every open session is some tenant's, and in one place of the list only. */
static void check_tenants(const struct sim_world *world, const struct srv_control *control)
{
	uint32_t n_sessions = 0;

	for (uint32_t i = 0; i < control->n_rows; i++) {
		SIM_CHECK(i == 0 || control->rows.tenants[i - 1].tenant < control->rows.tenants[i].tenant,
			"tenants are not in order");
		n_sessions += control->rows.tenants[i].n_sessions;
	}
	SIM_CHECK(control->cursor > 0 || control->cursor_next > 0 || n_sessions == world->model.n_open,
		"tenants have %u sessions, %u are open", n_sessions, world->model.n_open);
}

/* A page of a block table: not more blocks than the sequence has. */
static void check_sequence(const struct srv_control *control)
{
	uint32_t n_owned = 0;

	for (uint32_t i = 0; control->status == KV_OK && i < control->n_rows; i++)
		n_owned += control->rows.blocks[i].n_owners > 0;
	SIM_CHECK(control->status != KV_OK || n_owned <= control->sequence.n_blocks,
		"%u blocks are listed, the sequence has %u", n_owned, control->sequence.n_blocks);
}

static void check_session(const struct sim_world *world, const struct srv_control *control)
{
	const struct sim_session *session = sim_model_session(&world->model, control->id);

	SIM_CHECK((control->status == KV_OK) == (session && session->is_open), "a session's view says %s",
		kv_status_name(control->status));
	for (uint32_t i = 0; control->status == KV_OK && i < control->n_rows; i++) {
		const struct srv_sequence_row *row = &control->rows.sequences[i];
		const struct sim_sequence *sequence = sim_model_sequence(session, row->id);

		SIM_CHECK(sequence &&
				row->length_min ==
					sim_sequence_least(sequence, 0, session->pool->spec->n_layers, false),
			"a sequence is listed with another length");
	}
}

static void check_pools(const struct sim_world *world, const struct srv_control *control)
{
	SIM_CHECK(control->n_rows == kv_domain_n_pools(world->server->domain), "pools are missing");
	for (uint32_t i = 0; i < control->n_rows; i++) {
		const struct srv_pool_row *row = &control->rows.pools[i];
		const struct kv_memory_report *memory = &row->memory;
		const struct kv_pool *pool = kv_domain_pool_at(world->server->domain, i);
		uint64_t block_bytes = 0;
		uint32_t n_pinned = 0;

		for (uint32_t g = 0; g < row->n_tables; g++) {
			const struct kv_block_counts *blocks = &row->blocks[g];

			SIM_CHECK(blocks->n_free + blocks->n_owned + blocks->n_shared + blocks->n_pinned +
						blocks->n_draining ==
					blocks->n_total,
				"blocks by state do not add up");
			block_bytes += row->block_bytes[g] * blocks->n_total;
			n_pinned += blocks->n_pinned;
		}
		/* Which blocks they are, the audit counts after every turn. */
		SIM_CHECK(sim_model_n_pinned(&world->model, pool, true) == 0 || n_pinned > 0,
			"a sequence is pinned, and no block");
		SIM_CHECK(sim_model_n_pinned(&world->model, pool, false) > 0 || pool->n_zombies > 0 ||
				n_pinned == 0,
			"blocks are pinned, and no sequence");
		SIM_CHECK(memory->payload_bytes + memory->norms_bytes + memory->scales_bytes +
					memory->zeros_bytes + memory->exact_bytes ==
				memory->stored_bytes,
			"the memory report does not add up");
		SIM_CHECK(memory->stored_bytes + memory->cached_bytes + memory->workspace_bytes +
					memory->reserved_bytes + memory->free_bytes ==
				block_bytes + memory->shared_bytes,
			"stored, slack, reserved and free bytes are not the pool's");
	}
}

/* What is listed is published, by somebody who is a tenant; a page is no larger than asked for. */
static void check_prefixes(struct sim_world *world, const struct srv_control *control)
{
	struct kv_prefix_row prefix;
	struct kv_pool *pool;

	SIM_CHECK(control->n_prefixes <= control->n_rows_max, "a page of %u prefixes", control->n_prefixes);
	for (uint32_t i = 0; i < control->n_prefixes; i++) {
		const struct kv_prefix_row *row = &control->rows.prefixes[i].prefix;

		world->prefix_id = row->id;
		SIM_CHECK(row->n_tokens > 0 && row->n_blocks > 0, "a prefix of no tokens is listed");
		/* A list that is not sorted is made in the turn that ends it, or before. */
		SIM_CHECK(control->sort == SRV_SORT_NONE ||
				kv_prefix_find(world->server->domain, row->id, &pool, &prefix) == KV_OK,
			"a prefix is listed that is not there");
	}
	for (uint32_t i = 1; control->sort == SRV_SORT_HITS && i < control->n_prefixes; i++)
		SIM_CHECK(control->rows.prefixes[i - 1].prefix.n_hits >=
				control->rows.prefixes[i].prefix.n_hits,
			"a sorted list is not in order");
}

static void check_prefix_deleted(const struct sim_world *world, const struct srv_control *control)
{
	struct kv_prefix_row prefix;
	struct kv_pool *pool;

	SIM_CHECK(control->status == KV_OK || control->status == KV_NOT_FOUND, "a prefix is not deleted: %s",
		kv_status_name(control->status));
	SIM_CHECK(kv_prefix_find(world->server->domain, control->id, &pool, &prefix) == KV_NOT_FOUND,
		"a deleted prefix is there");
}

static void done(struct srv_control *control)
{
	struct sim_world *world = control->user;

	SIM_CHECK(asked_of(control)->is_posted, "a control request is answered twice");
	asked_of(control)->is_posted = false;
	SIM_CHECK(control->n_rows <= SRV_CONTROL_ROWS_MAX, "a snapshot of %u rows", control->n_rows);
	/* Pools are few: all of them always. */
	SIM_CHECK(control->n_rows <= control->n_rows_max || control->kind == SRV_CONTROL_POOLS ||
			control->kind == SRV_CONTROL_OCCUPANCY || control->kind == SRV_CONTROL_METRICS ||
			control->kind == SRV_CONTROL_PREFIXES,
		"a snapshot of %u rows, %u were asked for", control->n_rows, control->n_rows_max);
	if (control->n_rows > world->maxima.n_rows)
		world->maxima.n_rows = control->n_rows;
	switch (control->kind) {
	case SRV_CONTROL_SESSIONS:
		check_sessions(world, control);
		break;
	case SRV_CONTROL_SESSION:
		check_session(world, control);
		break;
	case SRV_CONTROL_POOLS:
	case SRV_CONTROL_OCCUPANCY:
		check_pools(world, control);
		break;
	case SRV_CONTROL_CONNECTIONS:
		SIM_CHECK(control->cursor > 0 || control->cursor_next > 0 ||
				control->n_rows == world->server->n_conns,
			"%u connections are listed, %u are open", control->n_rows, world->server->n_conns);
		break;
	case SRV_CONTROL_AUDIT:
		SIM_CHECK(control->status != KV_OK || control->is_passed, "audit: %s", control->error.msg);
		break;
	case SRV_CONTROL_TENANTS:
		check_tenants(world, control);
		break;
	case SRV_CONTROL_SEQUENCE:
		check_sequence(control);
		break;
	case SRV_CONTROL_PREFIXES:
		check_prefixes(world, control);
		break;
	case SRV_CONTROL_PREFIX_DELETE:
		check_prefix_deleted(world, control);
		break;
	case SRV_CONTROL_SESSION_DELETE:
		SIM_CHECK(control->status != KV_OK || !sim_model_session(&world->model, control->id)->is_open,
			"a deleted session is open");
		break;
	case SRV_CONTROL_POOL_CREATE:
		SIM_CHECK(control->status == KV_OK || control->status == KV_EXISTS ||
				control->status == KV_DRAINING,
			"a pool could not be made: %s", control->error.msg);
		SIM_CHECK((control->status == KV_OK) == (control->spec == NULL), "whose is the spec?");
		break;
	case SRV_CONTROL_POOL_DELETE:
		SIM_CHECK(control->status == KV_OK || control->status == KV_NOT_FOUND ||
				control->status == KV_BAD_STATE || control->status == KV_BUSY_RETRY,
			"a pool could not be deleted: %s", control->error.msg);
		break;
	default:
		break;
	}
}

static void post(struct sim_world *world, struct sim_asked *asked)
{
	asked->is_posted = true;
	SIM_CHECK(srv_mailbox_post(&world->mailbox, &asked->control), "the mailbox is full");
}

static void post_one(struct sim_world *world, struct sim_asked *asked)
{
	static const enum srv_control_kind kinds[] = { SRV_CONTROL_INFO, SRV_CONTROL_POOLS,
		SRV_CONTROL_OCCUPANCY, SRV_CONTROL_SESSIONS, SRV_CONTROL_SESSION, SRV_CONTROL_CONNECTIONS,
		SRV_CONTROL_READY, SRV_CONTROL_SELF_TEST, SRV_CONTROL_POOL, SRV_CONTROL_PLAN,
		SRV_CONTROL_SEQUENCE, SRV_CONTROL_METRICS, SRV_CONTROL_TENANTS, SRV_CONTROL_PREFIXES,
		SRV_CONTROL_PREFIX, SRV_CONTROL_PREFIX_DELETE, SRV_CONTROL_AUDIT };
	struct srv_control *control = &asked->control;

	kv_pool_spec_destroy(control->spec);
	control->spec = NULL;
	control->kind = kinds[sim_below(&world->rng, KV_LENGTH(kinds))];
	control->id = control->cursor = 0;
	control->n_rows_max = sim_chance(&world->rng, 500) ? 0 : sim_between(&world->rng, 1, 300);
	control->is_deep = sim_chance(&world->rng, 500);
	control->done = done;
	control->user = world;
	if ((control->kind == SRV_CONTROL_SESSION || control->kind == SRV_CONTROL_SEQUENCE) &&
		world->model.sessions)
		control->id = world->model.sessions->handle;
	if (control->kind == SRV_CONTROL_PREFIX || control->kind == SRV_CONTROL_PREFIX_DELETE)
		control->id = world->prefix_id;
	control->sequence_id = sim_between(&world->rng, 1, 4);
	control->sort = sim_chance(&world->rng, 500)
		? SRV_SORT_NONE
		: (enum srv_session_sort)sim_below(&world->rng, SRV_N_SORTS);
	control->has_cursor_key = control->has_tenant = false;
	snprintf(control->name, sizeof(control->name), "%s", sim_pool_name(0));
	if (world->model.sessions && sim_chance(&world->rng, world->config.session_delete_per_mille)) {
		control->kind = SRV_CONTROL_SESSION_DELETE;
		control->id = world->model.sessions->handle;
	}
	if (sim_chance(&world->rng, world->config.quota_per_mille))
		sim_quotas_ask(world, control);
	if (sim_chance(&world->rng, 300))
		control->cursor = sim_below(&world->rng, 8);
	if (sim_chance(&world->rng, world->config.pool_per_mille)) {
		const bool is_create = sim_chance(&world->rng, 500);

		control->kind = is_create ? SRV_CONTROL_POOL_CREATE : SRV_CONTROL_POOL_DELETE;
		control->spec = is_create
			? sim_world_make_spec(&world->config.pools[0], sim_pool_name(SIM_POOLS_MAX))
			: NULL;
		snprintf(control->name, sizeof(control->name), "%s", sim_pool_name(SIM_POOLS_MAX));
	}
	post(world, asked);
}

struct sim_asked *sim_controls_ask(struct sim_world *world, enum srv_control_kind kind, uint64_t id)
{
	for (uint32_t i = 0; i < SIM_CONTROLS; i++) {
		struct sim_asked *asked = &world->asked[i];

		if (asked->is_posted)
			continue;
		asked->control = (struct srv_control){ .kind = kind, .id = id, .done = done, .user = world };
		post(world, asked);
		return asked;
	}
	sim_fail("too many control requests");
}

void sim_controls_post(struct sim_world *world, uint32_t n)
{
	for (uint32_t i = 0; world->asked && i < SIM_CONTROLS && n > 0; i++) {
		if (world->asked[i].is_posted)
			continue;
		post_one(world, &world->asked[i]);
		n--;
	}
}

bool sim_controls_are_done(const struct sim_world *world)
{
	for (uint32_t i = 0; world->asked && i < SIM_CONTROLS; i++) {
		if (world->asked[i].is_posted)
			return false;
	}
	return true;
}
