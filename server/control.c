/*
 * Answers to control requests: bounded snapshots of what the loop owns, as plain structs. Nothing is rendered
 * here. What would be too much for one turn (a look at every session) is parked and goes on in a later one,
 * in order of parking; each look counts against SRV_CONTROL_PER_TURN. Parked ones are as many as there are
 * HTTP connections at most.
 */
#include <stdio.h>
#include <string.h>

#include "core/format.h"
#include "server/checkpoint.h"
#include "server/internal.h"

static void add_format(struct srv_pool_row *row, const struct kv_row_codec *codec, bool is_v, uint64_t n_rows,
	uint32_t head_dim)
{
	struct srv_format_row *found = NULL;

	for (uint32_t i = 0; i < row->n_formats && !found; i++)
		if (row->formats[i].is_v == is_v && row->formats[i].name == codec->format->name)
			found = &row->formats[i];
	if (!found && row->n_formats == SRV_POOL_FORMATS_MAX)
		return;
	if (!found) {
		found = &row->formats[row->n_formats++];
		*found = (struct srv_format_row){ .name = codec->format->name, .is_v = is_v };
	}
	found->n_layers++;
	found->n_rows += n_rows;
	found->stored_bytes += n_rows * codec->row_bytes;
	found->dense_equivalent_bytes += n_rows * kv_row_dense_bytes(head_dim);
}

static void fill_formats(const struct kv_pool *pool, struct srv_pool_row *row)
{
	const struct kv_pool_spec *spec = pool->spec;

	for (uint32_t l = 0; l < spec->n_layers; l++) {
		const uint64_t n_rows = pool->layer_tokens[l] * spec->kv_heads;

		add_format(row, spec->layers[l].k, false, n_rows, spec->k_head_dim);
		add_format(row, spec->layers[l].v, true, n_rows, spec->v_head_dim);
	}
}

static void fill_pool(const struct kv_pool *pool, struct srv_pool_row *row)
{
	const struct kv_pool_spec *spec = pool->spec;

	memset(row, 0, sizeof(*row));
	snprintf(row->name, sizeof(row->name), "%s", spec->name);
	snprintf(row->k_format, sizeof(row->k_format), "%s", kv_pool_spec_format_name(spec, false));
	snprintf(row->v_format, sizeof(row->v_format), "%s", kv_pool_spec_format_name(spec, true));
	row->n_layers = spec->n_layers;
	row->q_heads = spec->q_heads;
	row->kv_heads = spec->kv_heads;
	row->k_head_dim = spec->k_head_dim;
	row->v_head_dim = spec->v_head_dim;
	row->block_size = spec->block_size;
	row->n_groups = spec->n_groups;
	row->n_tables = spec->n_tables;
	row->tokens_max = spec->tokens_max;
	row->fingerprint = spec->fingerprint;
	row->arena_bytes = pool->arena_bytes;
	row->n_sessions = pool->n_sessions;
	row->n_sequences = pool->n_sequences;
	for (uint32_t g = 0; g < spec->n_tables; g++) {
		row->blocks[g] = pool->blocks[g].counts;
		row->block_bytes[g] = spec->token_bytes[g] * spec->block_size;
	}
	kv_report_pool(pool, &row->memory);
	row->used_bytes = row->memory.stored_bytes + row->memory.workspace_bytes + row->memory.cached_bytes -
		row->memory.shared_bytes;
	row->n_spilled = pool->n_spilled;
	row->n_spilled_tokens = pool->n_spilled_tokens;
	row->tier_bytes = pool->n_tier_pages * KV_TIER_PAGE_BYTES;
	row->prefixes = kv_prefix_counts(pool);
	fill_formats(pool, row);
}

static void answer_pools(struct srv_server *server, struct srv_control *control)
{
	struct kv_pool *pool;

	while (control->n_rows < KV_POOLS_MAX && (pool = kv_domain_pool_at(server->domain, control->n_rows)))
		fill_pool(pool, &control->rows.pools[control->n_rows++]);
}

static struct kv_pool *find_pool(struct srv_server *server, struct srv_control *control)
{
	struct kv_pool *pool =
		kv_domain_pool_by_name(server->domain, control->name, (uint32_t)strlen(control->name));

	if (!pool)
		control->status = kv_fail(&control->error, KV_NOT_FOUND, "no pool \"%s\"", control->name);
	return pool;
}

static void answer_pool(struct srv_server *server, struct srv_control *control)
{
	const struct kv_pool *pool = find_pool(server, control);

	if (!pool)
		return;
	fill_pool(pool, &control->rows.pools[0]);
	control->n_rows = 1;
}

static void create_pool(struct srv_server *server, struct srv_control *control)
{
	struct kv_pool *pool;

	if (server->is_draining) {
		control->status = kv_fail(&control->error, KV_DRAINING, "the daemon is draining");
		return;
	}
	control->status = srv_pool_create(server, control->spec, &pool, &control->error);
	if (control->status != KV_OK)
		return;
	control->spec = NULL;
	fill_pool(pool, &control->rows.pools[0]);
	control->n_rows = 1;
}

static void delete_pool(struct srv_server *server, struct srv_control *control)
{
	struct kv_pool *pool = find_pool(server, control);

	if (pool)
		control->status = srv_pool_remove(server, pool, &control->error);
}

static void answer_ready(struct srv_server *server, struct srv_control *control)
{
	const bool is_ready =
		srv_probe_is_ready(server, control->ready_reason, sizeof(control->ready_reason));

	control->status = is_ready ? KV_OK : KV_UNAVAILABLE;
}

/* For /readyz?deep=1 and the self-test. False: the probe answers it. */
static bool answer_after_probe(struct srv_server *server, struct srv_control *control)
{
	if (!control->is_deep && control->kind == SRV_CONTROL_READY) {
		answer_ready(server, control);
		return true;
	}
	if (server->probe.n_deep == SRV_DEEP_WAITING_MAX || server->is_lost) {
		if (control->kind == SRV_CONTROL_READY)
			answer_ready(server, control);
		else
			control->status = kv_fail(&control->error,
				server->is_lost ? KV_DEVICE_LOST : KV_BUSY_RETRY, "%s",
				server->is_lost ? "device lost" : "enough self-tests wait already");
		return true;
	}
	control->is_begun = false;
	server->probe.deep[server->probe.n_deep++] = control;
	server->probe.next_ns = server->now_ns;
	return false;
}

static void begin(struct srv_control *control)
{
	control->status = KV_OK;
	control->error.msg[0] = '\0';
	control->n_rows = control->n_prefixes = control->n_keys = 0;
	control->scan_slot = 0;
	control->cursor_next = 0;
	control->has_cursor_key_next = control->is_passed = false;
	control->duration_us = 0;
	control->is_begun = true;
	if (control->n_rows_max == 0 || control->n_rows_max > SRV_CONTROL_ROWS_MAX)
		control->n_rows_max = SRV_CONTROL_ROWS_MAX;
}

/* Asks about pools and the daemon as a whole. */
static void answer_whole(struct srv_server *server, struct srv_control *control)
{
	switch (control->kind) {
	case SRV_CONTROL_POOLS:
		answer_pools(server, control);
		break;
	case SRV_CONTROL_OCCUPANCY:
		srv_control_info(server, &control->info);
		answer_pools(server, control);
		break;
	case SRV_CONTROL_METRICS:
		srv_control_info(server, &control->info);
		answer_pools(server, control);
		control->counters = server->counters;
		srv_control_tenant_gauges(server, control);
		break;
	case SRV_CONTROL_DRAIN:
		srv_log(SRV_LOG_INFO, "draining: asked for over HTTP");
		srv_server_drain(server);
		break;
	default:
		srv_control_info(server, &control->info);
		break;
	}
	srv_server_gauges(server, &control->gauges);
}

/* What has begun is looked at again with CHECKPOINT. */
static void answer_checkpoint(struct srv_server *server, struct srv_control *control)
{
	struct srv_checkpoint *checkpoint = server->checkpoint;

	if (control->kind == SRV_CONTROL_SNAPSHOT)
		control->status =
			srv_checkpoint_save(checkpoint, control->name, control->id, &control->error);
	else if (control->kind == SRV_CONTROL_RESTORE)
		control->status = srv_checkpoint_load(checkpoint, control->name, false, &control->error);
	srv_checkpoint_status(checkpoint, &control->checkpoint);
}

/* False: parked, or somebody else answers it. */
static bool answer(struct srv_server *server, struct srv_control *control, bool *is_parked)
{
	bool is_done = true;

	switch (control->kind) {
	case SRV_CONTROL_INFO:
	case SRV_CONTROL_POOLS:
	case SRV_CONTROL_PLAN:
	case SRV_CONTROL_OCCUPANCY:
	case SRV_CONTROL_METRICS:
	case SRV_CONTROL_DRAIN:
		answer_whole(server, control);
		break;
	case SRV_CONTROL_POOL:
		answer_pool(server, control);
		break;
	case SRV_CONTROL_POOL_CREATE:
		create_pool(server, control);
		break;
	case SRV_CONTROL_POOL_DELETE:
		delete_pool(server, control);
		break;
	case SRV_CONTROL_SESSIONS:
		is_done = srv_control_sessions(server, control);
		break;
	case SRV_CONTROL_TENANTS:
		is_done = srv_control_tenants(server, control);
		break;
	case SRV_CONTROL_TENANT:
		is_done = srv_control_tenant(server, control);
		break;
	case SRV_CONTROL_TENANT_SET:
		is_done = srv_control_tenant_set(server, control);
		break;
	case SRV_CONTROL_TENANT_CLEAR:
		srv_control_tenant_clear(server, control);
		break;
	case SRV_CONTROL_PREFIXES:
		is_done = srv_control_prefixes(server, control);
		if (is_done)
			answer_pools(server, control);
		break;
	case SRV_CONTROL_PREFIX:
		srv_control_prefix(server, control);
		break;
	case SRV_CONTROL_PREFIX_DELETE:
		is_done = srv_control_prefix_delete(server, control);
		break;
	case SRV_CONTROL_SESSION:
		srv_control_session(server, control);
		break;
	case SRV_CONTROL_SESSION_DELETE:
		is_done = srv_control_session_delete(server, control);
		break;
	case SRV_CONTROL_SEQUENCE:
		srv_control_sequence(server, control);
		break;
	case SRV_CONTROL_CONNECTIONS:
		srv_control_connections(server, control);
		break;
	case SRV_CONTROL_SNAPSHOT:
	case SRV_CONTROL_RESTORE:
	case SRV_CONTROL_CHECKPOINT:
		answer_checkpoint(server, control);
		break;
	case SRV_CONTROL_READY:
	case SRV_CONTROL_SELF_TEST:
		return answer_after_probe(server, control);
	case SRV_CONTROL_RELOADED:
		srv_take_settings(server); /* published after this turn began, perhaps */
		break;
	case SRV_CONTROL_AUDIT:
		is_done = srv_audit_answer(server, control);
		break;
	}
	*is_parked = !is_done;
	return is_done;
}

static void park(struct srv_server *server, struct srv_control *control)
{
	control->next = NULL;
	if (server->parked_last)
		server->parked_last->next = control;
	else
		server->parked = control;
	server->parked_last = control;
	server->n_parked++;
}

struct srv_control *srv_control_unpark(struct srv_server *server)
{
	struct srv_control *control = server->parked;

	if (!control)
		return NULL;
	server->parked = control->next;
	if (!server->parked)
		server->parked_last = NULL;
	server->n_parked--;
	control->next = NULL;
	return control;
}

void srv_server_control(struct srv_server *server, struct srv_control *control)
{
	bool is_parked = false;

	if (!control->is_begun) {
		server->counters.control_requests++;
		begin(control);
	}
	if (answer(server, control, &is_parked)) {
		control->is_begun = false;
		control->done(control);
		return;
	}
	if (is_parked)
		park(server, control);
}

void srv_control_stop(struct srv_server *server)
{
	struct srv_control *control;

	while ((control = srv_control_unpark(server)) != NULL) {
		control->is_begun = false;
		control->status = kv_fail(&control->error, KV_DRAINING, "the daemon is stopping");
		control->done(control);
	}
}
