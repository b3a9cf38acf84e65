/*
 * Answers to control requests: bounded snapshots of what the loop owns, as plain structs. Nothing is rendered
 * here.
 */
#include "server/internal.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "core/format.h"

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
}

static void fill_session(
	const struct srv_server *server, const struct kv_session *session, struct srv_session_row *row)
{
	memset(row, 0, sizeof(*row));
	row->handle = session->handle;
	row->tenant = session->tenant;
	row->owner_id = session->owner_id;
	memcpy(row->name, session->name, sizeof(row->name));
	snprintf(row->pool, sizeof(row->pool), "%s", session->pool->spec->name);
	row->n_sequences = session->n_sequences;
	row->n_outstanding = session->n_outstanding;
	row->lease_ms = session->lease_ms;
	row->lease_left_ms =
		((int64_t)session->lease_end_ns - (int64_t)server->now_ns) / (int64_t)KV_NS_PER_MS;
	row->age_ms = (server->now_ns - session->opened_ns) / KV_NS_PER_MS;
	row->n_rows_in = session->n_rows_in;
	row->n_rows_out = session->n_rows_out;
	row->n_queries = session->n_queries;
	kv_report_session(session, &row->memory);
}

static void answer_pools(struct srv_server *server, struct srv_control *control)
{
	struct kv_pool *pool;

	while (control->n_rows < KV_POOLS_MAX && (pool = kv_domain_pool_at(server->domain, control->n_rows)))
		fill_pool(pool, &control->rows.pools[control->n_rows++]);
}

static void answer_sessions(struct srv_server *server, struct srv_control *control)
{
	uint32_t slot = control->cursor < UINT32_MAX ? (uint32_t)control->cursor : UINT32_MAX;
	struct kv_session *session;

	while (control->n_rows < control->n_rows_max && (session = kv_session_next(server->domain, &slot)))
		fill_session(server, session, &control->rows.sessions[control->n_rows++]);
	uint32_t peek = slot;

	control->cursor_next = kv_session_next(server->domain, &peek) ? slot : 0;
}

static void answer_session(struct srv_server *server, struct srv_control *control)
{
	struct kv_session *session = NULL;
	struct kv_sequence *found[SRV_CONTROL_ROWS_MAX];

	control->status = kv_session_find(server->domain, control->id, &session);
	if (control->status != KV_OK) {
		kv_fail(&control->error, control->status, "%s", kv_status_row(control->status)->text);
		return;
	}
	fill_session(server, session, &control->session);
	const uint32_t n =
		kv_sequence_list(session, control->cursor, found, control->n_rows_max, &control->cursor_next);

	for (uint32_t i = 0; i < n; i++) {
		struct srv_sequence_row *row = &control->rows.sequences[i];

		memset(row, 0, sizeof(*row));
		row->id = found[i]->id;
		kv_sequence_lengths(found[i], &row->length_min, &row->length_max);
		for (uint32_t g = 0; g < session->pool->spec->n_groups; g++)
			row->n_blocks += kv_block_table_n_owned(&found[i]->tables[g]);
		row->idle_ms = (server->now_ns - found[i]->used_ns) / KV_NS_PER_MS;
		row->is_evictable = found[i]->is_evictable;
		kv_report_sequence(found[i], &row->memory);
	}
	control->n_rows = n;
}

#define OWNER_BUCKETS 512u /* twice SRV_CONTROL_ROWS_MAX, a power of two */

/* Counts the sessions of each listed connection in one pass over the sessions. */
static void count_sessions(struct srv_server *server, struct srv_control *control)
{
	uint16_t buckets[OWNER_BUCKETS] = { 0 }; /* 1 + row, 0 = empty */
	struct srv_connection_row *rows = control->rows.connections;
	uint32_t slot = 0;

	for (uint32_t i = 0; i < control->n_rows; i++) {
		uint32_t at = (uint32_t)rows[i].id % OWNER_BUCKETS;

		while (buckets[at])
			at = (at + 1) % OWNER_BUCKETS;
		buckets[at] = (uint16_t)(i + 1);
	}
	for (struct kv_session *session; (session = kv_session_next(server->domain, &slot));) {
		for (uint32_t at = (uint32_t)session->owner_id % OWNER_BUCKETS; buckets[at];
			at = (at + 1) % OWNER_BUCKETS)
			rows[buckets[at] - 1].n_sessions += rows[buckets[at] - 1].id == session->owner_id;
	}
}

/* The cursor is an index into the table of connections: stable while connections come and go. */
static void answer_connections(struct srv_server *server, struct srv_control *control)
{
	const uint32_t n_max = server->options->connections_max;
	uint32_t n_left = server->n_conns;
	uint64_t i = control->cursor;

	for (uint64_t k = 0; k < control->cursor && k < n_max && n_left > 0; k++)
		n_left -= server->conns[k].sm.states && server->conns[k].sm.state != CONN_FREE;
	for (; i < n_max && n_left > 0 && control->n_rows < control->n_rows_max; i++) {
		const struct srv_conn *conn = &server->conns[i];
		struct srv_connection_row *row = &control->rows.connections[control->n_rows];

		if (!conn->sm.states || conn->sm.state == CONN_FREE)
			continue;
		n_left--;
		control->n_rows++;
		memset(row, 0, sizeof(*row));
		row->id = conn->id;
		row->peer = conn->peer;
		memcpy(row->client_name, conn->client_name, sizeof(row->client_name));
		row->age_ms = (server->now_ns - conn->accepted_ns) / KV_NS_PER_MS;
		row->bytes_in = conn->bytes_in;
		row->bytes_out = conn->bytes_out;
		row->frames_in = conn->n_frames_in;
		row->n_inflight = conn->n_inflight;
		row->state = kv_sm_name(&conn->sm);
	}
	control->cursor_next = n_left > 0 ? i : 0;
	count_sessions(server, control);
}

static void answer_info(struct srv_server *server, struct srv_info *info)
{
	memset(info, 0, sizeof(*info));
	snprintf(info->version, sizeof(info->version), "%s", srv_version);
	snprintf(info->commit, sizeof(info->commit), "%s", srv_commit);
	info->boot_id = kv_domain_boot_id(server->domain);
	info->backend = server->backend->ops->name;
	info->io = server->io->ops->name;
	snprintf(info->backend_reason, sizeof(info->backend_reason), "%s",
		server->seams.backend_reason ? server->seams.backend_reason : "");
	snprintf(info->io_reason, sizeof(info->io_reason), "%s",
		server->seams.io_reason ? server->seams.io_reason : "");
	server->backend->ops->info(server->backend, &info->device);
	info->frame_bytes_max = server->caps.frame_bytes_max;
	info->n_listeners = server->n_listeners;
	for (uint32_t i = 0; i < server->n_listeners; i++)
		memcpy(info->listeners[i], server->listeners[i], sizeof(info->listeners[i]));
	info->pid = (uint64_t)getpid();
	info->uptime_ms = (server->now_ns - server->started_ns) / KV_NS_PER_MS;
}

/* Bytes of the process that are in memory, from /proc; 0 where there is none. Control requests only. */
static uint64_t resident_bytes(void)
{
	unsigned long long total = 0, resident = 0;
	FILE *file = fopen("/proc/self/statm", "re");

	if (!file)
		return 0;
	const int n = fscanf(file, "%llu %llu", &total, &resident);

	fclose(file);
	return n == 2 ? resident * (uint64_t)sysconf(_SC_PAGESIZE) : 0;
}

void srv_server_gauges(struct srv_server *server, struct srv_gauges *out)
{
	uint32_t n_queued = 0;
	char reason[2];

	for (uint32_t i = 0; i < KV_POOLS_MAX; i++)
		n_queued += server->lanes[i].pool ? server->lanes[i].n_queued : 0;
	*out = (struct srv_gauges){
		.uptime_ms = (server->now_ns - server->started_ns) / KV_NS_PER_MS,
		.turns = server->turns,
		.n_connections = server->n_conns,
		.n_sessions = kv_domain_n_sessions(server->domain),
		.n_pools = kv_domain_n_pools(server->domain),
		.n_small_slots = server->slots[0].n,
		.n_small_slots_used = server->slots[0].n_used,
		.n_large_slots = server->slots[1].n,
		.n_large_slots_used = server->slots[1].n_used,
		.n_queued = n_queued,
		.n_batches_in_flight = srv_scheduler_in_flight(server),
		.n_reply_buffers = server->options->reply_buffers,
		.n_reply_buffers_used = server->n_replies_used,
		.arena_bytes = server->seams.arena_bytes,
		.arena_used_bytes = kv_arena_bytes(server->arena) - kv_arena_free_bytes(server->arena),
		.slots_bytes = server->slots[0].memory_bytes + server->slots[1].memory_bytes,
		.is_draining = server->is_draining,
	};
	for (uint32_t i = 0; i < out->n_pools; i++) {
		const struct kv_pool *pool = kv_domain_pool_at(server->domain, i);

		out->n_sequences += pool->n_sequences;
		out->tables_bytes += (uint64_t)pool->tables.n_chunks_used * sizeof(struct kv_table_chunk);
	}
	out->self_test_age_ms = server->probe.passed_ns
		? (server->now_ns - server->probe.passed_ns) / KV_NS_PER_MS
		: UINT64_MAX;
	out->is_ready = srv_probe_is_ready(server, reason, sizeof(reason));
	out->resident_bytes = resident_bytes();
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
	struct kv_pool *pool =
		kv_domain_pool_by_name(server->domain, control->name, (uint32_t)strlen(control->name));

	control->status = pool ? srv_pool_remove(server, pool, &control->error)
			       : kv_fail(&control->error, KV_NOT_FOUND, "no pool \"%s\"", control->name);
}

static void answer_ready(struct srv_server *server, struct srv_control *control)
{
	const bool is_ready =
		srv_probe_is_ready(server, control->ready_reason, sizeof(control->ready_reason));

	control->status = is_ready ? KV_OK : KV_UNAVAILABLE;
}

void srv_server_control(struct srv_server *server, struct srv_control *control)
{
	server->counters.control_requests++;
	control->status = KV_OK;
	control->error.msg[0] = '\0';
	control->n_rows = 0;
	control->cursor_next = 0;
	if (control->n_rows_max == 0 || control->n_rows_max > SRV_CONTROL_ROWS_MAX)
		control->n_rows_max = SRV_CONTROL_ROWS_MAX;
	switch (control->kind) {
	case SRV_CONTROL_INFO:
		answer_info(server, &control->info);
		break;
	case SRV_CONTROL_POOLS:
	case SRV_CONTROL_OCCUPANCY:
		answer_pools(server, control);
		srv_server_gauges(server, &control->gauges);
		break;
	case SRV_CONTROL_POOL_CREATE:
		create_pool(server, control);
		break;
	case SRV_CONTROL_POOL_DELETE:
		delete_pool(server, control);
		break;
	case SRV_CONTROL_SESSIONS:
		answer_sessions(server, control);
		break;
	case SRV_CONTROL_SESSION:
		answer_session(server, control);
		break;
	case SRV_CONTROL_CONNECTIONS:
		answer_connections(server, control);
		break;
	case SRV_CONTROL_METRICS:
		answer_info(server, &control->info);
		answer_pools(server, control);
		srv_server_gauges(server, &control->gauges);
		control->counters = server->counters;
		break;
	case SRV_CONTROL_READY:
		if (control->is_deep && server->probe.n_deep < SRV_DEEP_WAITING_MAX) {
			server->probe.deep[server->probe.n_deep++] = control;
			server->probe.next_ns = server->now_ns;
			return; /* answered by the probe */
		}
		answer_ready(server, control);
		break;
	}
	control->done(control);
}
