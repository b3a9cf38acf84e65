/* GET /v1/prefixes: what is published, per pool, and how often it was found. */
#include "server/http_views.h"

void srv_view_prefixes(const struct srv_control *control, struct srv_text *text)
{
	srv_text_open(text, NULL, '{');
	srv_text_open(text, "pools", '[');
	for (uint32_t i = 0; i < srv_view_n_pools(control); i++) {
		const struct srv_pool_row *pool = &control->rows.pools[i];
		const struct kv_prefix_counts *prefixes = &pool->prefixes;
		const struct kv_block_counts blocks = srv_view_pool_blocks(pool);

		srv_text_open(text, NULL, '{');
		srv_text_string(text, "name", pool->name);
		srv_text_u64(text, "n_nodes", prefixes->n_nodes);
		srv_text_u64(text, "n_blocks", blocks.n_kept);
		srv_text_u64(text, "n_idle_blocks", blocks.n_idle);
		srv_text_u64(text, "cached_bytes", pool->memory.cached_bytes);
		srv_text_u64(text, "n_published", prefixes->n_published);
		srv_text_u64(text, "n_evicted", prefixes->n_evicted);
		srv_text_u64(text, "n_expired", prefixes->n_expired);
		srv_text_u64(text, "n_hits", prefixes->n_hits);
		srv_text_u64(text, "n_misses", prefixes->n_misses);
		srv_text_u64(text, "n_tokens_matched", prefixes->n_tokens_matched);
		srv_text_close(text, '}');
	}
	srv_text_close(text, ']');
	srv_text_close(text, '}');
}
