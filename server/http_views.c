#include "server/http_views.h"

#include <microhttpd.h>

#include "core/checked.h"

/* Which members of the memory report mean something for what is shown. */
enum report_kind { REPORT_SEQUENCE, REPORT_SESSION, REPORT_POOL };

static void add_report(struct srv_text *text, const struct kv_memory_report *report, enum report_kind kind)
{
	srv_text_open(text, "memory", '{');
	srv_text_u64(text, "n_tokens", report->n_tokens);
	srv_text_u64(text, "dense_equivalent_bytes", report->dense_equivalent_bytes);
	srv_text_u64(text, "stored_bytes", report->stored_bytes);
	srv_text_ratio(text, "compression", report->compression);
	srv_text_u64(text, "payload_bytes", report->payload_bytes);
	srv_text_u64(text, "norms_bytes", report->norms_bytes);
	srv_text_u64(text, "scales_bytes", report->scales_bytes);
	srv_text_u64(text, "zeros_bytes", report->zeros_bytes);
	srv_text_u64(text, "exact_bytes", report->exact_bytes);
	srv_text_u64(text, "tables_bytes", report->tables_bytes);
	if (kind != REPORT_SEQUENCE)
		srv_text_u64(text, "reserved_bytes", report->reserved_bytes);
	if (kind == REPORT_POOL) {
		srv_text_u64(text, "codebooks_bytes", report->codebooks_bytes);
		srv_text_u64(text, "rotation_bytes", report->rotation_bytes);
		srv_text_u64(text, "workspace_bytes", report->workspace_bytes);
		srv_text_u64(text, "shared_bytes", report->shared_bytes);
		srv_text_u64(text, "free_bytes", report->free_bytes);
	}
	srv_text_close(text, '}');
}

static void sum_reports(struct kv_memory_report *sum, const struct kv_memory_report *report)
{
	sum->n_tokens += report->n_tokens;
	sum->payload_bytes += report->payload_bytes;
	sum->norms_bytes += report->norms_bytes;
	sum->scales_bytes += report->scales_bytes;
	sum->zeros_bytes += report->zeros_bytes;
	sum->exact_bytes += report->exact_bytes;
	sum->stored_bytes += report->stored_bytes;
	sum->dense_equivalent_bytes += report->dense_equivalent_bytes;
	sum->tables_bytes += report->tables_bytes;
	sum->codebooks_bytes += report->codebooks_bytes;
	sum->rotation_bytes += report->rotation_bytes;
	sum->workspace_bytes += report->workspace_bytes;
	sum->shared_bytes += report->shared_bytes;
	sum->reserved_bytes += report->reserved_bytes;
	sum->free_bytes += report->free_bytes;
	sum->compression =
		sum->stored_bytes ? (double)sum->dense_equivalent_bytes / (double)sum->stored_bytes : 0.0;
}

static void add_cursor(struct srv_text *text, const struct srv_control *control)
{
	if (control->cursor_next != 0)
		srv_text_decimal_id(text, "cursor_next", control->cursor_next);
	else
		srv_text_null(text, "cursor_next");
}

void srv_view_info(const struct srv_control *control, struct srv_text *text)
{
	const struct srv_info *info = &control->info;

	srv_text_open(text, NULL, '{');
	srv_text_string(text, "version", info->version);
	srv_text_string(text, "commit", info->commit);
	srv_text_hex_id(text, "boot_id", info->boot_id);
	srv_text_u64(text, "pid", info->pid);
	srv_text_u64(text, "uptime_ms", info->uptime_ms);
	srv_text_string(text, "backend", info->backend);
	srv_text_string(text, "backend_reason", info->backend_reason);
	srv_text_string(text, "device", info->device.device);
	srv_text_string(text, "instruction_set", info->device.instruction_set);
	srv_text_u64(text, "arena_bytes", info->device.memory_bytes);
	srv_text_u64(text, "n_threads", info->device.n_threads);
	srv_text_string(text, "io", info->io);
	srv_text_string(text, "io_reason", info->io_reason);
	srv_text_u64(text, "frame_bytes_max", info->frame_bytes_max);
	srv_text_open(text, "listeners", '[');
	for (uint32_t i = 0; i < info->n_listeners && i < KV_LENGTH(info->listeners); i++)
		srv_text_string(text, NULL, info->listeners[i]);
	srv_text_close(text, ']');
	srv_text_close(text, '}');
}

static void add_pool(struct srv_text *text, const struct srv_pool_row *pool)
{
	srv_text_open(text, NULL, '{');
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
	srv_text_u64(text, "arena_bytes", pool->arena_bytes);
	srv_text_u64(text, "n_sessions", pool->n_sessions);
	srv_text_u64(text, "n_sequences", pool->n_sequences);
	srv_text_close(text, '}');
}

static uint32_t n_pool_rows(const struct srv_control *control)
{
	return control->n_rows < KV_POOLS_MAX ? control->n_rows : KV_POOLS_MAX;
}

static uint32_t n_list_rows(const struct srv_control *control)
{
	return control->n_rows < SRV_CONTROL_ROWS_MAX ? control->n_rows : SRV_CONTROL_ROWS_MAX;
}

void srv_view_pools(const struct srv_control *control, struct srv_text *text)
{
	srv_text_open(text, NULL, '{');
	srv_text_open(text, "pools", '[');
	for (uint32_t i = 0; i < n_pool_rows(control); i++)
		add_pool(text, &control->rows.pools[i]);
	srv_text_close(text, ']');
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

static void add_blocks(struct srv_text *text, const struct kv_block_counts *blocks)
{
	srv_text_open(text, "blocks", '{');
	srv_text_u64(text, "total", blocks->n_total);
	srv_text_u64(text, "free", blocks->n_free - blocks->n_reserved);
	srv_text_u64(text, "reserved", blocks->n_reserved);
	srv_text_u64(text, "owned", blocks->n_owned);
	srv_text_u64(text, "shared", blocks->n_shared);
	srv_text_u64(text, "draining", blocks->n_draining);
	srv_text_u64(text, "used_max", blocks->n_used_max);
	srv_text_close(text, '}');
}

static void sum_blocks(struct kv_block_counts *sum, const struct kv_block_counts *blocks)
{
	sum->n_total += blocks->n_total;
	sum->n_free += blocks->n_free;
	sum->n_owned += blocks->n_owned;
	sum->n_shared += blocks->n_shared;
	sum->n_draining += blocks->n_draining;
	sum->n_reserved += blocks->n_reserved;
	sum->n_used_max += blocks->n_used_max;
}

/* All groups of one pool added up. */
static struct kv_block_counts pool_blocks(const struct srv_pool_row *pool)
{
	struct kv_block_counts sum = { 0 };

	for (uint32_t i = 0; i < pool->n_groups && i < KV_GROUPS_MAX; i++)
		sum_blocks(&sum, &pool->blocks[i]);
	return sum;
}

static void add_pool_occupancy(struct srv_text *text, const struct srv_pool_row *pool)
{
	const struct kv_block_counts blocks = pool_blocks(pool);

	srv_text_open(text, NULL, '{');
	srv_text_string(text, "name", pool->name);
	srv_text_u64(text, "arena_bytes", pool->arena_bytes);
	srv_text_u64(text, "n_sessions", pool->n_sessions);
	srv_text_u64(text, "n_sequences", pool->n_sequences);
	add_blocks(text, &blocks);
	srv_text_open(text, "groups", '[');
	for (uint32_t i = 0; i < pool->n_groups && i < KV_GROUPS_MAX; i++) {
		srv_text_open(text, NULL, '{');
		srv_text_u64(text, "block_bytes", pool->block_bytes[i]);
		add_blocks(text, &pool->blocks[i]);
		srv_text_close(text, '}');
	}
	srv_text_close(text, ']');
	add_report(text, &pool->memory, REPORT_POOL);
	srv_text_close(text, '}');
}

void srv_view_occupancy(const struct srv_control *control, struct srv_text *text)
{
	struct kv_block_counts blocks = { 0 };
	struct kv_memory_report memory = { 0 };
	uint64_t n_sessions = 0, n_sequences = 0;

	srv_text_open(text, NULL, '{');
	srv_text_open(text, "pools", '[');
	for (uint32_t i = 0; i < n_pool_rows(control); i++) {
		const struct srv_pool_row *pool = &control->rows.pools[i];
		const struct kv_block_counts one = pool_blocks(pool);

		add_pool_occupancy(text, pool);
		sum_blocks(&blocks, &one);
		sum_reports(&memory, &pool->memory);
		n_sessions += pool->n_sessions;
		n_sequences += pool->n_sequences;
	}
	srv_text_close(text, ']');
	srv_text_open(text, "totals", '{');
	srv_text_u64(text, "n_pools", n_pool_rows(control));
	srv_text_u64(text, "n_sessions", n_sessions);
	srv_text_u64(text, "n_sequences", n_sequences);
	add_blocks(text, &blocks);
	add_report(text, &memory, REPORT_POOL);
	srv_text_close(text, '}');
	srv_text_open(text, "arena", '{');
	srv_text_u64(text, "total_bytes", control->gauges.arena_bytes);
	srv_text_u64(text, "used_bytes", control->gauges.arena_used_bytes);
	srv_text_u64(text, "free_bytes", control->gauges.arena_bytes - control->gauges.arena_used_bytes);
	srv_text_close(text, '}');
	srv_text_close(text, '}');
}

static void add_session(struct srv_text *text, const char *key, const struct srv_session_row *session)
{
	srv_text_open(text, key, '{');
	srv_text_hex_id(text, "id", session->handle);
	srv_text_string(text, "name", session->name);
	srv_text_string(text, "pool", session->pool);
	/* A Unix socket's peer is its user id; TCP peers are all one tenant until they can say who they are.
	 */
	if (session->tenant == UINT64_MAX)
		srv_text_string(text, "tenant", "tcp");
	else
		srv_text_decimal_id(text, "tenant", session->tenant);
	if (session->owner_id != 0)
		srv_text_decimal_id(text, "connection", session->owner_id);
	else
		srv_text_null(text, "connection");
	srv_text_u64(text, "n_sequences", session->n_sequences);
	srv_text_u64(text, "n_outstanding", session->n_outstanding);
	srv_text_u64(text, "lease_ms", session->lease_ms);
	srv_text_i64(text, "lease_left_ms", session->lease_left_ms);
	srv_text_u64(text, "age_ms", session->age_ms);
	srv_text_u64(text, "n_rows_in", session->n_rows_in);
	srv_text_u64(text, "n_rows_out", session->n_rows_out);
	srv_text_u64(text, "n_queries", session->n_queries);
	add_report(text, &session->memory, REPORT_SESSION);
	srv_text_close(text, '}');
}

void srv_view_sessions(const struct srv_control *control, struct srv_text *text)
{
	srv_text_open(text, NULL, '{');
	srv_text_open(text, "sessions", '[');
	for (uint32_t i = 0; i < n_list_rows(control); i++)
		add_session(text, NULL, &control->rows.sessions[i]);
	srv_text_close(text, ']');
	add_cursor(text, control);
	srv_text_close(text, '}');
}

void srv_view_session(const struct srv_control *control, struct srv_text *text)
{
	srv_text_open(text, NULL, '{');
	add_session(text, "session", &control->session);
	srv_text_open(text, "sequences", '[');
	for (uint32_t i = 0; i < n_list_rows(control); i++) {
		const struct srv_sequence_row *sequence = &control->rows.sequences[i];

		srv_text_open(text, NULL, '{');
		srv_text_decimal_id(text, "id", sequence->id);
		srv_text_u64(text, "length_min", sequence->length_min);
		srv_text_u64(text, "length_max", sequence->length_max);
		srv_text_u64(text, "n_blocks", sequence->n_blocks);
		srv_text_u64(text, "n_shared_blocks", sequence->n_shared_blocks);
		srv_text_u64(text, "idle_ms", sequence->idle_ms);
		srv_text_bool(text, "is_evictable", sequence->is_evictable);
		add_report(text, &sequence->memory, REPORT_SEQUENCE);
		srv_text_close(text, '}');
	}
	srv_text_close(text, ']');
	add_cursor(text, control);
	srv_text_close(text, '}');
}

void srv_view_connections(const struct srv_control *control, struct srv_text *text)
{
	srv_text_open(text, NULL, '{');
	srv_text_open(text, "connections", '[');
	for (uint32_t i = 0; i < n_list_rows(control); i++) {
		const struct srv_connection_row *connection = &control->rows.connections[i];
		const bool is_unix = connection->peer.transport == KV_IO_UNIX;

		srv_text_open(text, NULL, '{');
		srv_text_decimal_id(text, "id", connection->id);
		srv_text_string(text, "transport", is_unix ? "unix" : "tcp");
		srv_text_string(text, "peer", connection->peer.address);
		if (is_unix)
			srv_text_u64(text, "uid", connection->peer.uid);
		else
			srv_text_null(text, "uid");
		srv_text_string(text, "client_name", connection->client_name);
		srv_text_string(text, "state", connection->state);
		srv_text_u64(text, "age_ms", connection->age_ms);
		srv_text_u64(text, "bytes_in", connection->bytes_in);
		srv_text_u64(text, "bytes_out", connection->bytes_out);
		srv_text_u64(text, "n_frames_in", connection->frames_in);
		srv_text_u64(text, "n_inflight", connection->n_inflight);
		srv_text_u64(text, "n_sessions", connection->n_sessions);
		srv_text_close(text, '}');
	}
	srv_text_close(text, ']');
	add_cursor(text, control);
	srv_text_close(text, '}');
}

void srv_view_ready(const struct srv_control *control, struct srv_text *text)
{
	srv_text_open(text, NULL, '{');
	srv_text_string(text, "status", "ready");
	srv_text_bool(text, "is_deep", control->is_deep);
	srv_text_close(text, '}');
}

void srv_view_live(uint64_t turn_age_ms, struct srv_text *text)
{
	srv_text_open(text, NULL, '{');
	srv_text_string(text, "status", "alive");
	srv_text_u64(text, "turn_age_ms", turn_age_ms);
	srv_text_close(text, '}');
}

void srv_view_problem(unsigned http_status, const char *code, const char *detail, struct srv_text *text)
{
	srv_text_open(text, NULL, '{');
	srv_text_string(text, "type", "about:blank");
	srv_text_string(text, "title", MHD_get_reason_phrase_for(http_status));
	srv_text_u64(text, "status", http_status);
	srv_text_string(text, "detail", detail);
	srv_text_string(text, "code", code);
	srv_text_close(text, '}');
}
