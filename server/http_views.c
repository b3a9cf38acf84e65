/* Parts that several views share, and the problem. */
#include "server/http_views.h"

#include <microhttpd.h>
#include <stdio.h>

#include "core/checked.h"

void srv_view_report(
	struct srv_text *text, const struct kv_memory_report *report, enum srv_view_report_kind kind)
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
	if (kind != SRV_REPORT_SEQUENCE)
		srv_text_u64(text, "reserved_bytes", report->reserved_bytes);
	if (kind == SRV_REPORT_POOL) {
		srv_text_u64(text, "codebooks_bytes", report->codebooks_bytes);
		srv_text_u64(text, "rotation_bytes", report->rotation_bytes);
		srv_text_u64(text, "workspace_bytes", report->workspace_bytes);
		srv_text_u64(text, "shared_bytes", report->shared_bytes);
		srv_text_u64(text, "cached_bytes", report->cached_bytes);
		srv_text_u64(text, "free_bytes", report->free_bytes);
	}
	srv_text_close(text, '}');
}

void srv_view_sum_reports(struct kv_memory_report *sum, const struct kv_memory_report *report)
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
	sum->cached_bytes += report->cached_bytes;
	sum->reserved_bytes += report->reserved_bytes;
	sum->free_bytes += report->free_bytes;
	sum->compression =
		sum->stored_bytes ? (double)sum->dense_equivalent_bytes / (double)sum->stored_bytes : 0.0;
}

/* A Unix socket's peer is its user id; TCP peers are all one tenant unless their token says which. */
void srv_view_tenant_id(struct srv_text *text, const char *key, uint64_t tenant)
{
	if (tenant == UINT64_MAX)
		srv_text_string(text, key, "tcp");
	else
		srv_text_decimal_id(text, key, tenant);
}

void srv_view_cursor(struct srv_text *text, const struct srv_control *control)
{
	char key[48];

	if (control->has_cursor_key_next) {
		snprintf(key, sizeof(key), "%llu.%llu", (unsigned long long)control->cursor_key_next.key,
			(unsigned long long)control->cursor_key_next.slot_idx);
		srv_text_string(text, "cursor_next", key);
	} else if (control->cursor_next != 0) {
		srv_text_decimal_id(text, "cursor_next", control->cursor_next);
	} else {
		srv_text_null(text, "cursor_next");
	}
}

uint32_t srv_view_n_pools(const struct srv_control *control)
{
	return control->n_rows < KV_POOLS_MAX ? control->n_rows : KV_POOLS_MAX;
}

uint32_t srv_view_n_rows(const struct srv_control *control)
{
	return control->n_rows < SRV_CONTROL_ROWS_MAX ? control->n_rows : SRV_CONTROL_ROWS_MAX;
}

void srv_view_blocks(struct srv_text *text, const struct srv_block_sum *blocks)
{
	const struct kv_block_counts *counts = &blocks->counts;

	srv_text_open(text, "blocks", '{');
	srv_text_u64(text, "total", counts->n_total);
	srv_text_u64(text, "free", counts->n_free - counts->n_reserved);
	srv_text_u64(text, "reserved", counts->n_reserved);
	srv_text_u64(text, "owned", counts->n_owned);
	srv_text_u64(text, "shared", counts->n_shared);
	srv_text_u64(text, "pinned", counts->n_pinned);
	srv_text_u64(text, "draining", counts->n_draining);
	srv_text_u64(text, "exact", blocks->n_exact);
	srv_text_u64(text, "used_max", counts->n_used_max);
	srv_text_u64(text, "published", counts->n_kept);
	srv_text_u64(text, "idle", counts->n_idle);
	srv_text_close(text, '}');
}

void srv_view_blocks_of_kind(struct srv_text *text, const struct kv_block_counts *counts)
{
	const struct srv_block_sum blocks = { .counts = *counts };

	srv_view_blocks(text, &blocks);
}

void srv_view_sum_blocks(struct srv_block_sum *sum, const struct srv_block_sum *blocks)
{
	const struct kv_block_counts *counts = &blocks->counts;

	sum->counts.n_total += counts->n_total;
	sum->counts.n_free += counts->n_free;
	sum->counts.n_owned += counts->n_owned;
	sum->counts.n_shared += counts->n_shared;
	sum->counts.n_pinned += counts->n_pinned;
	sum->counts.n_draining += counts->n_draining;
	sum->counts.n_reserved += counts->n_reserved;
	sum->counts.n_used_max += counts->n_used_max;
	sum->counts.n_kept += counts->n_kept;
	sum->counts.n_idle += counts->n_idle;
	sum->n_exact += blocks->n_exact;
}

struct srv_block_sum srv_view_pool_blocks(const struct srv_pool_row *pool)
{
	struct srv_block_sum sum = { 0 };

	for (uint32_t i = 0; i < pool->n_tables && i < KV_TABLES_MAX; i++) {
		const struct kv_block_counts *counts = &pool->blocks[i];
		struct srv_block_sum one = { .counts = *counts };

		if (i >= pool->n_groups)
			one = (struct srv_block_sum){
				.counts = { .n_total = counts->n_total,
					.n_free = counts->n_free,
					.n_reserved = counts->n_reserved,
					.n_used_max = counts->n_used_max },
				.n_exact = counts->n_owned + counts->n_shared + counts->n_pinned +
					counts->n_draining,
			};
		srv_view_sum_blocks(&sum, &one);
	}
	return sum;
}

const char *const srv_block_state_names[SRV_BLOCK_STATES] = { "free", "reserved", "owned", "shared", "pinned",
	"draining", "exact" };

void srv_view_add_state_bytes(uint64_t states[SRV_BLOCK_STATES], const struct srv_pool_row *pool)
{
	for (uint32_t i = 0; i < pool->n_tables && i < KV_TABLES_MAX; i++) {
		const struct kv_block_counts *counts = &pool->blocks[i];
		const uint32_t n_blocks[] = { counts->n_free - counts->n_reserved, counts->n_reserved,
			counts->n_owned, counts->n_shared, counts->n_pinned, counts->n_draining };

		for (uint32_t s = 0; s < KV_LENGTH(n_blocks); s++)
			states[i >= pool->n_groups && s >= 2 ? SRV_BLOCK_STATES - 1 : s] +=
				n_blocks[s] * pool->block_bytes[i];
	}
}

void srv_view_state_bytes(struct srv_text *text, const uint64_t states[SRV_BLOCK_STATES])
{
	uint64_t total = 0;

	srv_text_open(text, "block_bytes", '{');
	for (uint32_t i = 0; i < SRV_BLOCK_STATES; i++) {
		srv_text_u64(text, srv_block_state_names[i], states[i]);
		total += states[i];
	}
	srv_text_u64(text, "total", total);
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
