/* GET /v1/occupancy: what takes the memory, by state and by kind. */
#include "server/http_views.h"

/*
 * What sequences see against what lies there: shared blocks count once for every sequence in the first, and
 * once in the second, which also holds the unused rest of each sequence's last block.
 */
static void add_use(struct srv_text *text, const struct kv_memory_report *memory, uint64_t used_bytes)
{
	srv_text_u64(text, "logical_bytes", memory->stored_bytes);
	srv_text_u64(text, "used_bytes", used_bytes);
	srv_text_ratio(text, "effective_compression",
		used_bytes > 0 ? (double)memory->dense_equivalent_bytes / (double)used_bytes : 0.0);
}

static void add_formats(struct srv_text *text, const struct srv_pool_row *pool)
{
	srv_text_open(text, "formats", '[');
	for (uint32_t i = 0; i < pool->n_formats; i++) {
		const struct srv_format_row *format = &pool->formats[i];

		srv_text_open(text, NULL, '{');
		srv_text_string(text, "format", format->name);
		srv_text_string(text, "rows_of", format->is_v ? "v" : "k");
		srv_text_u64(text, "n_layers", format->n_layers);
		srv_text_u64(text, "n_rows", format->n_rows);
		srv_text_u64(text, "stored_bytes", format->stored_bytes);
		srv_text_u64(text, "dense_equivalent_bytes", format->dense_equivalent_bytes);
		srv_text_close(text, '}');
	}
	srv_text_close(text, ']');
}

/* They count as sequences and tokens of the pool and have nothing in its blocks. */
static void add_spilled(struct srv_text *text, uint64_t n_sequences, uint64_t n_tokens, uint64_t tier_bytes)
{
	srv_text_open(text, "spilled", '{');
	srv_text_u64(text, "n_sequences", n_sequences);
	srv_text_u64(text, "n_tokens", n_tokens);
	srv_text_u64(text, "tier_bytes", tier_bytes);
	srv_text_close(text, '}');
}

static void add_pool_occupancy(struct srv_text *text, const struct srv_pool_row *pool)
{
	const struct srv_block_sum blocks = srv_view_pool_blocks(pool);
	uint64_t state_bytes[SRV_BLOCK_STATES] = { 0 };

	srv_text_open(text, NULL, '{');
	srv_text_string(text, "name", pool->name);
	srv_text_u64(text, "arena_bytes", pool->arena_bytes);
	srv_text_u64(text, "n_sessions", pool->n_sessions);
	srv_text_u64(text, "n_sequences", pool->n_sequences);
	srv_view_blocks(text, &blocks);
	srv_view_add_state_bytes(state_bytes, pool);
	srv_view_state_bytes(text, state_bytes);
	srv_text_open(text, "groups", '[');
	for (uint32_t i = 0; i < pool->n_groups && i < KV_GROUPS_MAX; i++) {
		srv_text_open(text, NULL, '{');
		srv_text_u64(text, "block_bytes", pool->block_bytes[i]);
		srv_view_blocks_of_kind(text, &pool->blocks[i]);
		srv_text_close(text, '}');
	}
	srv_text_close(text, ']');
	if (pool->n_tables > pool->n_groups) {
		srv_text_open(text, "exact_window", '{'); /* its ring blocks */
		srv_text_u64(text, "block_bytes", pool->block_bytes[pool->n_groups]);
		srv_view_blocks_of_kind(text, &pool->blocks[pool->n_groups]);
		srv_text_close(text, '}');
	}
	add_formats(text, pool);
	add_use(text, &pool->memory, pool->used_bytes);
	add_spilled(text, pool->n_spilled, pool->n_spilled_tokens, pool->tier_bytes);
	srv_view_report(text, &pool->memory, SRV_REPORT_POOL);
	srv_text_close(text, '}');
}

static void add_tiers(struct srv_text *text, const struct srv_gauges *gauges)
{
	srv_text_open(text, "tiers", '{');
	srv_text_u64(text, "n_spilled_sequences", gauges->n_spilled);
	srv_text_u64(text, "host_total_bytes", gauges->host_tier_bytes);
	srv_text_u64(text, "host_used_bytes", gauges->host_tier_used_bytes);
	srv_text_u64(text, "file_total_bytes", gauges->file_tier_bytes);
	srv_text_u64(text, "file_used_bytes", gauges->file_tier_used_bytes);
	srv_text_close(text, '}');
}

void srv_view_occupancy(const struct srv_control *control, struct srv_text *text)
{
	struct srv_block_sum blocks = { 0 };
	uint64_t state_bytes[SRV_BLOCK_STATES] = { 0 };
	struct kv_memory_report memory = { 0 };
	uint64_t n_sessions = 0, n_sequences = 0, used_bytes = 0;
	uint64_t n_spilled = 0, n_spilled_tokens = 0, tier_bytes = 0;

	srv_text_open(text, NULL, '{');
	srv_text_open(text, "pools", '[');
	for (uint32_t i = 0; i < srv_view_n_pools(control); i++) {
		const struct srv_pool_row *pool = &control->rows.pools[i];
		const struct srv_block_sum one = srv_view_pool_blocks(pool);

		add_pool_occupancy(text, pool);
		srv_view_sum_blocks(&blocks, &one);
		srv_view_add_state_bytes(state_bytes, pool);
		srv_view_sum_reports(&memory, &pool->memory);
		n_sessions += pool->n_sessions;
		n_sequences += pool->n_sequences;
		used_bytes += pool->used_bytes;
		n_spilled += pool->n_spilled;
		n_spilled_tokens += pool->n_spilled_tokens;
		tier_bytes += pool->tier_bytes;
	}
	srv_text_close(text, ']');
	srv_text_open(text, "totals", '{');
	srv_text_u64(text, "n_pools", srv_view_n_pools(control));
	srv_text_u64(text, "n_sessions", n_sessions);
	srv_text_u64(text, "n_sequences", n_sequences);
	srv_view_blocks(text, &blocks);
	srv_view_state_bytes(text, state_bytes);
	add_use(text, &memory, used_bytes);
	add_spilled(text, n_spilled, n_spilled_tokens, tier_bytes);
	srv_view_report(text, &memory, SRV_REPORT_POOL);
	srv_text_close(text, '}');
	srv_text_open(text, "device", '{');
	srv_text_string(text, "backend", control->info.backend);
	srv_text_string(text, "name", control->info.device.device);
	srv_text_u64(text, "used_bytes", used_bytes);
	srv_text_close(text, '}');
	srv_text_open(text, "arena", '{');
	srv_text_u64(text, "total_bytes", control->gauges.arena_bytes);
	srv_text_u64(text, "used_bytes", control->gauges.arena_used_bytes);
	srv_text_u64(text, "free_bytes", control->gauges.arena_bytes - control->gauges.arena_used_bytes);
	srv_text_close(text, '}');
	add_tiers(text, &control->gauges);
	srv_text_close(text, '}');
}
