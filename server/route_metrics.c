/*
 * Prometheus text, format 0.0.4. Every series exists from the first scrape: families without labels always,
 * families with a fixed set of labels (reasons, sizes, io names) with all of them, families of pools from the
 * pool's first scrape on, families of tenants from the first thing charged to one. Samples of a family stand
 * together, as the format wants it.
 *
 * Base units: seconds and bytes. Times are kept in integers and printed by integer arithmetic.
 */
#include <string.h>

#include "core/checked.h"
#include "server/http_internal.h"
#include "server/http_views.h"
#include "server/options_internal.h"

/* What one scrape renders. */
struct scrape {
	struct srv_text *text;
	const struct srv_control *control;
	const char *device; /* label */
};

static void family(struct srv_text *text, const char *name, const char *type, const char *help)
{
	srv_text_printf(text, "# HELP tqkv_%s %s\n# TYPE tqkv_%s %s\n", name, help, name, type);
}

/* Label values: backslash, quote and newline are escaped; what else a text holds is bytes. */
static void label(struct srv_text *text, const char *name, const char *value)
{
	srv_text_printf(text, "%s=\"", name);
	for (const char *c = value; *c; c++) {
		if (*c == '\\' || *c == '"')
			srv_text_printf(text, "\\%c", *c);
		else if (*c == '\n')
			srv_text_add(text, "\\n", 2);
		else
			srv_text_add(text, c, 1);
	}
	srv_text_add(text, "\"", 1);
}

static void single(
	struct srv_text *text, const char *name, const char *type, const char *help, uint64_t value)
{
	family(text, name, type, help);
	srv_text_printf(text, "tqkv_%s %llu\n", name, (unsigned long long)value);
}

/* UINT64_MAX: has not happened yet. */
static void single_ms(struct srv_text *text, const char *name, const char *help, uint64_t value_ms)
{
	family(text, name, "gauge", help);
	if (value_ms == UINT64_MAX) {
		srv_text_printf(text, "tqkv_%s +Inf\n", name);
		return;
	}
	srv_text_printf(text, "tqkv_%s %llu.%03u\n", name, (unsigned long long)(value_ms / 1000),
		(unsigned)(value_ms % 1000));
}

/* One sample with one label. */
static void sample(struct srv_text *text, const char *name, const char *label_name, const char *label_value,
	uint64_t value)
{
	srv_text_printf(text, "tqkv_%s{", name);
	label(text, label_name, label_value);
	srv_text_printf(text, "} %llu\n", (unsigned long long)value);
}

/*
 * Bucket i holds whole microseconds below 2^i, times are cut to whole microseconds, so "le" 2^i microseconds
 * holds all of them. The last bucket has no upper bound.
 */
static void histogram(
	struct srv_text *text, const char *name, const char *help, const struct srv_histogram *histogram)
{
	uint64_t sum = 0;

	family(text, name, "histogram", help);
	for (uint32_t i = 0; i < SRV_HISTOGRAM_BUCKETS; i++) {
		sum += histogram->buckets[i];
		if (i + 1 < SRV_HISTOGRAM_BUCKETS)
			srv_text_printf(text, "tqkv_%s_bucket{le=\"%u.%06u\"} %llu\n", name,
				(1u << i) / 1000000u, (1u << i) % 1000000u, (unsigned long long)sum);
		else
			srv_text_printf(
				text, "tqkv_%s_bucket{le=\"+Inf\"} %llu\n", name, (unsigned long long)sum);
	}
	srv_text_printf(text, "tqkv_%s_sum %llu.%06u\ntqkv_%s_count %llu\n", name,
		(unsigned long long)(histogram->sum_us / 1000000), (unsigned)(histogram->sum_us % 1000000),
		name, (unsigned long long)histogram->n);
}

static void add_build(const struct scrape *scrape)
{
	static const char *const io_names[] = { "io_uring", "epoll" };
	struct srv_text *text = scrape->text;
	const char *io = scrape->control->info.io ? scrape->control->info.io : "unknown";
	bool is_known = false;

	family(text, "build_info", "gauge", "what runs: always 1");
	srv_text_add(text, "tqkv_build_info{", 16);
	label(text, "version", srv_version);
	srv_text_add(text, ",", 1);
	label(text, "commit", srv_commit);
	srv_text_add(text, ",", 1);
	label(text, "backend", scrape->device);
	srv_text_add(text, "} 1\n", 4);
	family(text, "io_backend", "gauge", "1 for the event loop in use");
	for (size_t i = 0; i < KV_LENGTH(io_names); i++) {
		const bool is_used = strcmp(io, io_names[i]) == 0;

		sample(text, "io_backend", "name", io_names[i], is_used);
		is_known = is_known || is_used;
	}
	if (!is_known)
		sample(text, "io_backend", "name", io, 1);
}

static void add_counters(const struct scrape *scrape)
{
	const struct srv_counters *counters = &scrape->control->counters;
	struct srv_text *text = scrape->text;
	static const char *const reasons[] = {
#define REASON(name, number, scope, retryable, http, text) #name,
		KV_STATUS_MAP(REASON)
#undef REASON
	};

/* Two counters of the same thing are one family with a reason. */
#define COUNTER(name, help)                              \
	if (strncmp(#name, "appends_aborted_", 16) != 0) \
		single(text, #name "_total", "counter", help, counters->name);
	SRV_COUNTER_MAP(COUNTER)
#undef COUNTER
	family(text, "appends_aborted_total", "counter",
		"frames given up: the peer stalled inside them, or closed");
	sample(text, "appends_aborted_total", "reason", "timeout", counters->appends_aborted_timeout);
	sample(text, "appends_aborted_total", "reason", "closed", counters->appends_aborted_closed);
	family(text, "rejected_total", "counter", "refused items plus refused frames, by status");
	for (size_t i = 0; i < SRV_N_STATUSES; i++)
		if (i != SRV_REJECTED_OK)
			sample(text, "rejected_total", "reason", reasons[i], counters->rejected[i]);
	histogram(
		text, "queue_seconds", "from planned to sealed into a batch, per request", &counters->queue);
	histogram(text, "copy_in_seconds", "copy to the device, per batch", &counters->copy_in);
	histogram(text, "kernel_seconds", "computing, per batch", &counters->kernel);
	histogram(text, "copy_out_seconds", "copy from the device, per batch", &counters->copy_out);
	histogram(text, "request_seconds", "from complete header to reply sent, per request",
		&counters->request);
}

static void add_gauges(const struct scrape *scrape)
{
	const struct srv_gauges *gauges = &scrape->control->gauges;
	struct srv_text *text = scrape->text;

	single_ms(text, "uptime_seconds", "time since start", gauges->uptime_ms);
	single(text, "loop_turns_total", "counter", "turns of the event loop", gauges->turns);
	single(text, "ready", "gauge", "1 while /readyz answers 200", gauges->is_ready);
	single(text, "draining", "gauge", "1 after the daemon was told to stop", gauges->is_draining);
	single_ms(text, "self_test_age_seconds",
		"age of the last known-answer decode that was right, +Inf before the first",
		gauges->self_test_age_ms);
	family(text, "audit_difference", "gauge",
		"1: the last audit found one, with its pool and the session whose it is, or was");
	srv_text_printf(text, "tqkv_audit_difference{");
	label(text, "pool", gauges->difference_pool);
	if (gauges->difference_session != 0)
		srv_text_printf(text, ",session=\"%016llx\"} %u\n",
			(unsigned long long)gauges->difference_session, gauges->has_difference);
	else
		srv_text_printf(text, ",session=\"\"} %u\n", gauges->has_difference);
	single(text, "config_reloads_total", "counter", "reloads of the configuration that took effect",
		gauges->n_reloads);
	single(text, "config_reload_failures_total", "counter",
		"reloads that were refused; the configuration from before is in use",
		gauges->n_reload_failures);
	single(text, "connections", "gauge", "open connections", gauges->n_connections);
	single(text, "sessions", "gauge", "open sessions", gauges->n_sessions);
	single(text, "sequences", "gauge", "sequences over all pools", gauges->n_sequences);
	single(text, "pools", "gauge", "pools", gauges->n_pools);
	single_ms(text, "batch_oldest_seconds", "age of the oldest batch that is not done, 0 without one",
		gauges->batch_oldest_ms);
	single(text, "requests_queued", "gauge", "row requests that wait for a batch", gauges->n_queued);
	single(text, "batches_in_flight", "gauge", "batches that the backend works on",
		gauges->n_batches_in_flight);
	family(text, "request_slots", "gauge", "request slots, by size");
	sample(text, "request_slots", "size", "large", gauges->n_large_slots);
	sample(text, "request_slots", "size", "small", gauges->n_small_slots);
	family(text, "request_slots_used", "gauge", "request slots in use, by size");
	sample(text, "request_slots_used", "size", "large", gauges->n_large_slots_used);
	sample(text, "request_slots_used", "size", "small", gauges->n_small_slots_used);
	single(text, "reply_buffers", "gauge", "buffers for replies to control operations",
		gauges->n_reply_buffers);
	single(text, "reply_buffers_used", "gauge", "such buffers in use", gauges->n_reply_buffers_used);
	single(text, "arena_bytes", "gauge", "memory from which pools are carved", gauges->arena_bytes);
	single(text, "arena_used_bytes", "gauge", "part of the arena that pools have",
		gauges->arena_used_bytes);
	single(text, "slots_bytes", "gauge", "memory of the request slots", gauges->slots_bytes);
	family(text, "tier_bytes", "gauge", "pages outside of the pools, by tier");
	sample(text, "tier_bytes", "tier", "host", gauges->host_tier_bytes);
	sample(text, "tier_bytes", "tier", "file", gauges->file_tier_bytes);
	family(text, "tier_used_bytes", "gauge", "such pages in use, by tier");
	sample(text, "tier_used_bytes", "tier", "host", gauges->host_tier_used_bytes);
	sample(text, "tier_used_bytes", "tier", "file", gauges->file_tier_used_bytes);
	single(text, "spilled_sequences", "gauge", "sequences whose rows are in a tier", gauges->n_spilled);
	single(text, "tables_bytes", "gauge", "memory of the block tables", gauges->tables_bytes);
	single(text, "resident_bytes", "gauge", "resident memory of the process", gauges->resident_bytes);
}

static void add_limits(const struct scrape *scrape, const struct srv_options *options)
{
	family(scrape->text, "limit", "gauge", "value of a numeric option, in the unit of its name");
	for (size_t i = 0; i < SRV_N_OPTIONS; i++) {
		const struct srv_option_row *row = &srv_option_rows[i];

		if (row->kind == SRV_OPTION_NUMBER || row->kind == SRV_OPTION_BYTES)
			sample(scrape->text, "limit", "option", row->name, srv_option_number(options, row));
	}
}

static void pool_labels(const struct scrape *scrape, const char *name, const struct srv_pool_row *pool)
{
	srv_text_printf(scrape->text, "tqkv_%s{", name);
	label(scrape->text, "device", scrape->device);
	srv_text_add(scrape->text, ",", 1);
	label(scrape->text, "pool", pool->name);
}

/* One sample of a pool with an optional third label. */
static void pool_sample(const struct scrape *scrape, const char *name, const struct srv_pool_row *pool,
	const char *label_name, const char *label_value, uint64_t value)
{
	pool_labels(scrape, name, pool);
	if (label_name) {
		srv_text_add(scrape->text, ",", 1);
		label(scrape->text, label_name, label_value);
	}
	srv_text_printf(scrape->text, "} %llu\n", (unsigned long long)value);
}

static void block_sample(const struct scrape *scrape, const char *name, const struct srv_pool_row *pool,
	uint32_t group_idx, const char *state, uint64_t value)
{
	pool_labels(scrape, name, pool);
	/* Ring blocks are of no group. */
	if (group_idx < pool->n_groups)
		srv_text_printf(scrape->text, ",group=\"%u\"", group_idx);
	else
		srv_text_printf(scrape->text, ",group=\"exact\"");
	if (state)
		srv_text_printf(scrape->text, ",state=\"%s\"", state);
	srv_text_printf(scrape->text, "} %llu\n", (unsigned long long)value);
}

#define for_each_pool(scrape, pool)                                           \
	for (const struct srv_pool_row *pool = (scrape)->control->rows.pools; \
		pool < (scrape)->control->rows.pools + (scrape)->control->n_rows; pool++)

static void add_blocks(const struct scrape *scrape)
{
	family(scrape->text, "blocks", "gauge",
		"blocks by state; the states of a group add up to its blocks_configured");
	for_each_pool(scrape, pool)
	{
		for (uint32_t i = 0; i < pool->n_tables; i++) {
			const struct kv_block_counts *blocks = &pool->blocks[i];

			block_sample(scrape, "blocks", pool, i, "free", blocks->n_free - blocks->n_reserved);
			block_sample(scrape, "blocks", pool, i, "reserved", blocks->n_reserved);
			block_sample(scrape, "blocks", pool, i, "owned", blocks->n_owned);
			block_sample(scrape, "blocks", pool, i, "shared", blocks->n_shared);
			block_sample(scrape, "blocks", pool, i, "pinned", blocks->n_pinned);
			block_sample(scrape, "blocks", pool, i, "draining", blocks->n_draining);
		}
	}
	family(scrape->text, "blocks_configured", "gauge", "blocks that there are, whatever their state");
	for_each_pool(scrape, pool) for (uint32_t i = 0; i < pool->n_tables; i++)
		block_sample(scrape, "blocks_configured", pool, i, NULL, pool->blocks[i].n_total);
	family(scrape->text, "pool_blocks_bytes", "gauge",
		"bytes of all blocks of a pool by state, exact: ring blocks of the exact window in use");
	for_each_pool(scrape, pool)
	{
		uint64_t states[SRV_BLOCK_STATES] = { 0 };

		srv_view_add_state_bytes(states, pool);
		for (uint32_t i = 0; i < SRV_BLOCK_STATES; i++)
			pool_sample(scrape, "pool_blocks_bytes", pool, "state", srv_block_state_names[i],
				states[i]);
	}
	family(scrape->text, "blocks_used_max", "gauge", "most blocks that were in use at a time");
	for_each_pool(scrape, pool) for (uint32_t i = 0; i < pool->n_tables; i++)
		block_sample(scrape, "blocks_used_max", pool, i, NULL, pool->blocks[i].n_used_max);
	family(scrape->text, "blocks_published", "gauge", "blocks of published prefixes");
	for_each_pool(scrape, pool) for (uint32_t i = 0; i < pool->n_groups; i++)
		block_sample(scrape, "blocks_published", pool, i, NULL, pool->blocks[i].n_kept);
	family(scrape->text, "blocks_idle", "gauge",
		"published blocks that no sequence has: given up when others need them");
	for_each_pool(scrape, pool) for (uint32_t i = 0; i < pool->n_groups; i++)
		block_sample(scrape, "blocks_idle", pool, i, NULL, pool->blocks[i].n_idle);
	family(scrape->text, "block_bytes", "gauge", "bytes of one block over all layers of its group");
	for_each_pool(scrape, pool) for (uint32_t i = 0; i < pool->n_tables; i++)
		block_sample(scrape, "block_bytes", pool, i, NULL, pool->block_bytes[i]);
}

static void add_pool_memory(const struct scrape *scrape)
{
	family(scrape->text, "pool_memory_bytes", "gauge", "bytes of a pool by what they hold");
	for_each_pool(scrape, pool)
	{
		const struct kv_memory_report *memory = &pool->memory;

		pool_sample(scrape, "pool_memory_bytes", pool, "kind", "payload", memory->payload_bytes);
		pool_sample(scrape, "pool_memory_bytes", pool, "kind", "norms", memory->norms_bytes);
		pool_sample(scrape, "pool_memory_bytes", pool, "kind", "scales", memory->scales_bytes);
		pool_sample(scrape, "pool_memory_bytes", pool, "kind", "zeros", memory->zeros_bytes);
		pool_sample(scrape, "pool_memory_bytes", pool, "kind", "exact", memory->exact_bytes);
		pool_sample(scrape, "pool_memory_bytes", pool, "kind", "tables", memory->tables_bytes);
		pool_sample(scrape, "pool_memory_bytes", pool, "kind", "codebooks", memory->codebooks_bytes);
		pool_sample(scrape, "pool_memory_bytes", pool, "kind", "rotation", memory->rotation_bytes);
		pool_sample(scrape, "pool_memory_bytes", pool, "kind", "workspace", memory->workspace_bytes);
		pool_sample(scrape, "pool_memory_bytes", pool, "kind", "cached", memory->cached_bytes);
		pool_sample(scrape, "pool_memory_bytes", pool, "kind", "reserved", memory->reserved_bytes);
		pool_sample(scrape, "pool_memory_bytes", pool, "kind", "free", memory->free_bytes);
	}
}

static void add_prefixes(const struct scrape *scrape)
{
	family(scrape->text, "prefix_nodes", "gauge", "blocks of tokens that are published");
	for_each_pool(scrape, pool)
		pool_sample(scrape, "prefix_nodes", pool, NULL, NULL, pool->prefixes.n_nodes);
	family(scrape->text, "prefix_nodes_total", "counter",
		"blocks of tokens published, and why they went");
	for_each_pool(scrape, pool)
	{
		pool_sample(
			scrape, "prefix_nodes_total", pool, "event", "published", pool->prefixes.n_published);
		pool_sample(scrape, "prefix_nodes_total", pool, "event", "evicted", pool->prefixes.n_evicted);
		pool_sample(scrape, "prefix_nodes_total", pool, "event", "expired", pool->prefixes.n_expired);
		pool_sample(scrape, "prefix_nodes_total", pool, "event", "removed", pool->prefixes.n_removed);
	}
	family(scrape->text, "prefix_matches_total", "counter", "MATCH by outcome");
	for_each_pool(scrape, pool)
	{
		pool_sample(scrape, "prefix_matches_total", pool, "outcome", "hit", pool->prefixes.n_hits);
		pool_sample(scrape, "prefix_matches_total", pool, "outcome", "miss", pool->prefixes.n_misses);
	}
	family(scrape->text, "prefix_tokens_matched_total", "counter", "tokens that MATCH found");
	for_each_pool(scrape, pool) pool_sample(
		scrape, "prefix_tokens_matched_total", pool, NULL, NULL, pool->prefixes.n_tokens_matched);
}

static void add_pools(const struct scrape *scrape)
{
	static const struct {
		const char *name, *help;
		size_t offset;
		bool is_wide;
	} columns[] = {
		{ "pool_arena_bytes", "bytes that the pool takes from the arena",
			offsetof(struct srv_pool_row, arena_bytes), true },
		{ "pool_tokens", "committed tokens, the least over the layers of each sequence",
			offsetof(struct srv_pool_row, memory.n_tokens), true },
		{ "pool_stored_bytes", "bytes of committed rows as stored",
			offsetof(struct srv_pool_row, memory.stored_bytes), true },
		{ "pool_shared_bytes",
			"bytes of blocks that sharing saves: one block for every owner beyond the first",
			offsetof(struct srv_pool_row, memory.shared_bytes), true },
		{ "pool_dense_equivalent_bytes", "bytes of the same rows as bf16",
			offsetof(struct srv_pool_row, memory.dense_equivalent_bytes), true },
		{ "pool_sessions", "open sessions of the pool", offsetof(struct srv_pool_row, n_sessions),
			false },
		{ "pool_sequences", "sequences of the pool", offsetof(struct srv_pool_row, n_sequences),
			false },
	};

	add_blocks(scrape);
	add_pool_memory(scrape);
	add_prefixes(scrape);
	for (size_t i = 0; i < KV_LENGTH(columns); i++) {
		family(scrape->text, columns[i].name, "gauge", columns[i].help);
		for_each_pool(scrape, pool)
		{
			uint64_t value = 0;
			uint32_t narrow;

			if (columns[i].is_wide) {
				memcpy(&value, (const char *)pool + columns[i].offset, sizeof(value));
			} else {
				memcpy(&narrow, (const char *)pool + columns[i].offset, sizeof(narrow));
				value = narrow;
			}
			pool_sample(scrape, columns[i].name, pool, NULL, NULL, value);
		}
	}
	family(scrape->text, "pool_compression_ratio", "gauge",
		"dense_equivalent / stored; 0 while nothing is stored");
	for_each_pool(scrape, pool)
	{
		pool_labels(scrape, "pool_compression_ratio", pool);
		srv_text_printf(scrape->text, "} %.6g\n", pool->memory.compression);
	}
}

static void tenant_sample(const struct scrape *scrape, const char *name, const struct srv_tenant_gauge *gauge,
	enum kv_quota quota, uint64_t value)
{
	const bool is_other = gauge == &scrape->control->tenant_gauges[scrape->control->n_tenant_gauges];

	srv_text_printf(scrape->text, "tqkv_%s{tenant=\"", name);
	if (is_other)
		srv_text_printf(scrape->text, "other");
	else if (gauge->tenant == UINT64_MAX)
		srv_text_printf(scrape->text, "tcp");
	else
		srv_text_printf(scrape->text, "%llu", (unsigned long long)gauge->tenant);
	srv_text_printf(scrape->text, "\"");
	if (quota < KV_QUOTAS)
		srv_text_printf(scrape->text, ",quota=\"%s\"", kv_quota_name(quota));
	if (value == KV_QUOTA_NONE)
		srv_text_printf(scrape->text, "} +Inf\n");
	else
		srv_text_printf(scrape->text, "} %llu\n", (unsigned long long)value);
}

#define for_each_quota(q) for (enum kv_quota q = KV_QUOTA_BYTES; q < KV_QUOTAS; q++)

static void add_tenants(const struct scrape *scrape)
{
	const struct srv_tenant_gauge *gauges = scrape->control->tenant_gauges;
	const uint32_t n = scrape->control->n_tenant_gauges;

	family(scrape->text, "tenant_used", "gauge",
		"what is charged to a tenant, by quota; all without a series of their own are other");
	for (uint32_t i = 0; i <= n; i++)
		for_each_quota(q) tenant_sample(scrape, "tenant_used", &gauges[i], q, gauges[i].used[q]);
	family(scrape->text, "tenant_quota", "gauge", "what a tenant may have, +Inf without a limit");
	for (uint32_t i = 0; i < n; i++)
		for_each_quota(q) tenant_sample(scrape, "tenant_quota", &gauges[i], q, gauges[i].most[q]);
	family(scrape->text, "tenant_refused_total", "counter", "refusals for a tenant's quota, by quota");
	for (uint32_t i = 0; i <= n; i++)
		for_each_quota(q)
			tenant_sample(scrape, "tenant_refused_total", &gauges[i], q, gauges[i].n_refused[q]);
	family(scrape->text, "tenant_weight", "gauge", "weight of a tenant's turns in a batch");
	for (uint32_t i = 0; i < n; i++)
		tenant_sample(scrape, "tenant_weight", &gauges[i], KV_QUOTAS, gauges[i].weight);
}

void srv_view_metrics(
	const struct srv_control *control, const struct srv_options *options, struct srv_text *text)
{
	const struct scrape scrape = {
		.text = text,
		.control = control,
		.device = control->info.backend ? control->info.backend : "unknown",
	};

	add_build(&scrape);
	add_counters(&scrape);
	add_gauges(&scrape);
	add_limits(&scrape, options);
	add_pools(&scrape);
	add_tenants(&scrape);
}

void srv_view_http_metrics(struct srv_http_counters *counters, struct srv_text *text)
{
	static const char *const classes[] = { "2xx", "3xx", "4xx", "5xx" };

	single(text, "http_connections_total", "counter", "connections to the control API",
		atomic_load(&counters->connections));
	single(text, "http_connections_closed_slow_total", "counter",
		"connections to the control API closed because a request did not come to its end",
		atomic_load(&counters->connections_slow));
	single(text, "http_requests_total", "counter", "requests to the control API that were begun",
		atomic_load(&counters->requests));
	family(text, "http_answers_total", "counter", "answers of the control API, by class of status");
	for (size_t i = 0; i < KV_LENGTH(classes); i++)
		sample(text, "http_answers_total", "class", classes[i],
			atomic_load(&counters->answers[i + 2]));
	family(text, "http_logins_refused_total", "counter",
		"logins that failed, or were limited after failures");
	sample(text, "http_logins_refused_total", "reason", "token", atomic_load(&counters->logins_failed));
	sample(text, "http_logins_refused_total", "reason", "limit", atomic_load(&counters->logins_limited));
}
