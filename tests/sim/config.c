/*
 * Configurations: the plain one for scripts, and one drawn from a seed.
 */
#include "tests/sim/world.h"

struct sim_config sim_config_plain(uint64_t seed)
{
	return (struct sim_config){
		.seed = seed,
		.n_peers = 4,
		.n_tenants = 1,
		.pipeline_max = 16,
		.pace_ns = 40000,
		.net = { .n_ahead_buffers = 16, .wire_bytes_max = 1 << 20, .delay_ns_max = 20000 },
		.backend = { .latency_ns_max = 100000,
			.depth_max = 8,
			.has_event_fd = true,
			.lose_after = -1 },
		.n_pools = 2,
		.pools = { { .n_layers = 2,
				   .q_heads = 4,
				   .kv_heads = 2,
				   .k_head_dim = 16,
				   .v_head_dim = 16,
				   .block_size = 16,
				   .n_blocks = 64,
				   .tokens_max = 256,
				   .k = "tq4",
				   .v = "tq4" },
			{ .n_layers = 3,
				.q_heads = 2,
				.kv_heads = 1,
				.k_head_dim = 16,
				.v_head_dim = 32,
				.block_size = 16,
				.n_blocks = 32,
				.tokens_max = 256,
				.k = "f32",
				.v = "bf16" } },
		.frame_bytes_max = 131072,
		.inflight_bytes_max = 1 << 22,
		.large_slots = 8,
		.small_slots = 32,
		.reply_buffers = 16,
		.connections_max = 64,
		.sessions_max = 16,
		.sequences_max = 64,
		.inflight_requests_max = 64,
		.lease_ms = 1000,
		.io_timeout_ms = 100,
		.send_timeout_ms = 500,
		.hello_timeout_ms = 100,
		.drain_timeout_ms = 500,
		.tokens_per_item_max = 20,
		.long_per_mille = 300,
		.items_max = 4,
		.audits_every_turn = true,
		.audit_interval_ms = 100,
	};
}

static void draw_attention(struct sim_pool_config *pool, struct sim_rng *rng)
{
	pool->window = sim_chance(rng, 300) ? sim_between(rng, 1, sim_chance(rng, 600) ? 8 : 50) : 0;
	pool->sink_tokens = pool->window > 0 && sim_chance(rng, 400) ? sim_between(rng, 1, 20) : 0;
	pool->softcap = sim_chance(rng, 200) ? 0.5 * sim_between(rng, 1, 40) : 0;
	pool->has_sinks = sim_chance(rng, 200);
	pool->has_alibi = sim_chance(rng, 200);
	pool->alternates = sim_chance(rng, 500);
}

static void draw_pools(struct sim_config *config, struct sim_rng *rng)
{
	static const char *const formats[] = { "f32", "bf16", "tq4" };

	config->n_pools = sim_between(rng, 1, SIM_POOLS_MAX);
	for (uint32_t i = 0; i < SIM_POOLS_MAX; i++) {
		struct sim_pool_config *pool = &config->pools[i];

		pool->n_layers = sim_between(rng, 1, 3);
		pool->kv_heads = sim_between(rng, 1, 2);
		pool->q_heads = pool->kv_heads * sim_between(rng, 1, 3);
		pool->k_head_dim = sim_chance(rng, 800) ? 16 : 32;
		pool->v_head_dim = sim_chance(rng, 800) ? 16 : 32;
		pool->k = formats[sim_below(rng, 3)];
		pool->v = formats[sim_below(rng, 3)];
		pool->block_size = sim_chance(rng, 800) ? 16 : 32;
		pool->n_blocks = sim_chance(rng, 500) ? sim_between(rng, 4, 16) : 200;
		pool->tokens_max = sim_between(rng, 40, 160);
		if (pool->tokens_max > pool->block_size * pool->n_blocks)
			pool->tokens_max = pool->block_size * pool->n_blocks;
		draw_attention(pool, rng);
		pool->exact_tokens = sim_chance(rng, 400) ? pool->block_size * sim_between(rng, 1, 4) : 0;
		pool->exact_blocks = sim_between(rng, 1, sim_chance(rng, 500) ? 12 : 60);
	}
}

static void draw_bounds(struct sim_config *config, struct sim_rng *rng)
{
	config->frame_bytes_max = 65536u << sim_below(rng, 3);
	config->inflight_bytes_max = sim_chance(rng, 500) ? 1 << 22 : 100000;
	config->min_rate_bytes_per_s = sim_chance(rng, 300) ? 65536 : 0;
	config->large_slots = sim_between(rng, 1, 4);
	config->small_slots = sim_chance(rng, 500) ? sim_between(rng, 1, 6) : 32;
	config->reply_buffers = sim_chance(rng, 500) ? sim_between(rng, 1, 4) : 32;
	config->connections_max = sim_chance(rng, 800) ? 64 : config->n_peers;
	config->sessions_max = sim_between(rng, 2, 12);
	config->sequences_max = sim_chance(rng, 500) ? sim_between(rng, 4, 16) : 64;
	config->inflight_requests_max = sim_chance(rng, 500) ? sim_between(rng, 1, 4) : 64;
	config->lease_ms = sim_between(rng, 100, 300);
	config->io_timeout_ms = sim_between(rng, 20, 60);
	config->send_timeout_ms = sim_between(rng, 300, 500);
	config->hello_timeout_ms = sim_between(rng, 20, 60);
	config->drain_timeout_ms = sim_between(rng, 0, 1) * 1000;
}

static void draw_behaviour(struct sim_config *config, struct sim_rng *rng)
{
	const bool is_calm = sim_chance(rng, 300);

	config->flaw_per_mille = is_calm ? 0 : sim_below(rng, 80);
	config->stall_per_mille = is_calm ? 0 : sim_below(rng, 30);
	config->reset_per_mille = is_calm ? 0 : sim_below(rng, 10);
	config->wrong_per_mille = sim_below(rng, 100);
	config->nan_per_mille = sim_chance(rng, 500) ? 0 : sim_below(rng, 100);
	config->cancel_per_mille = sim_below(rng, 60);
	config->deadline_per_mille = sim_chance(rng, 500) ? 0 : sim_below(rng, 200);
	config->attach_per_mille = sim_chance(rng, 300) ? 60 : 8;
	config->close_per_mille = 8;
	config->control_per_mille = sim_chance(rng, 300) ? 100 : 0;
	config->quota_per_mille = sim_chance(rng, 300) ? 150 : 0;
	config->pool_per_mille = sim_chance(rng, 300) ? 200 : 0;
	config->prefix_per_mille = sim_chance(rng, 500) ? 50 : 250;
	config->evictable_per_mille = sim_chance(rng, 500) ? 50 : 400;
	config->long_per_mille = sim_chance(rng, 500) ? 300 : 900;
	config->hash_bits = sim_chance(rng, 500) ? 8 : 64;
	config->fork_per_mille = sim_chance(rng, 500) ? 30 : 200;
	config->tables_per_mille = sim_chance(rng, 500) ? 50 : 400;
	config->session_delete_per_mille = sim_chance(rng, 300) ? 50 : 0;
	if (sim_chance(rng, 300)) {
		config->spill_per_mille = sim_below(rng, 60);
		config->host_tier_bytes = sim_chance(rng, 500) ? 0 : 65536u * sim_between(rng, 1, 8);
		config->file_tier_bytes = sim_chance(rng, 500) ? 0 : 65536u * sim_between(rng, 1, 8);
		config->spill_idle_ms = sim_chance(rng, 300) ? sim_between(rng, 1, 20) : 0;
		config->net.files.delay_ns_max = sim_below(rng, 300000);
		config->net.files.short_per_mille = sim_below(rng, 300);
		config->net.files.fail_per_mille = sim_chance(rng, 700) ? 0 : sim_below(rng, 60);
		config->net.files.flip_per_mille = sim_chance(rng, 700) ? 0 : sim_below(rng, 60);
	}
	config->tokens_per_item_max = sim_between(rng, 4, 40);
	config->items_max = sim_between(rng, 1, 5);
	config->end = sim_chance(rng, 600) ? SIM_END_SETTLE
		: sim_chance(rng, 600)     ? SIM_END_DRAIN
					   : SIM_END_ABANDON;
}

/* Little that ends sequences, and windows that they outgrow. */
static void make_lasting(struct sim_config *config, struct sim_rng *rng)
{
	config->is_lasting = true;
	for (uint32_t i = 0; i < SIM_POOLS_MAX; i++) {
		struct sim_pool_config *pool = &config->pools[i];

		pool->window = sim_between(rng, 1, 20);
		pool->n_blocks = sim_between(rng, 30, 100);
		pool->tokens_max = pool->block_size * pool->n_blocks;
	}
	config->attach_per_mille = 4;
	config->close_per_mille = 1;
	config->lease_ms = 5000;
	config->flaw_per_mille = config->reset_per_mille = config->stall_per_mille = 0;
	config->wrong_per_mille /= 4;
	config->nan_per_mille /= 10;
	config->backend.refuse_per_mille /= 8;
	config->tokens_per_item_max = 40;
}

/* Long sequences that live long enough to be published and matched, in pools that become full. */
static void draw_prefixes(struct sim_config *config, struct sim_rng *rng)
{
	for (uint32_t i = 0; i < SIM_POOLS_MAX; i++) {
		config->pools[i].n_layers = 1;
		config->pools[i].n_blocks = sim_between(rng, 8, 40);
		config->pools[i].tokens_max = 16 * sim_between(rng, 4, 8);
	}
	config->prefix_per_mille = 400;
	config->long_per_mille = 1000;
	config->tokens_per_item_max = 60;
	config->hash_bits = sim_between(rng, 0, 2) * 4;
	config->lease_ms = 2000;
	config->wrong_per_mille = config->flaw_per_mille = config->stall_per_mille = 2;
	config->reset_per_mille = config->nan_per_mille = 0;
	config->close_per_mille = 2;
	config->frame_bytes_max = 262144;
	config->sequences_max = 64;
}

/* With numbers of its own: what else a seed says stays the same. */
static void draw_snapshots(struct sim_config *config)
{
	struct sim_files_options *files = &config->net.files;
	struct sim_rng rng;

	sim_rng_init(&rng, config->seed, 11);
	if (!sim_chance(&rng, 250))
		return;
	config->snapshot_per_mille = sim_chance(&rng, 500) ? 100 : 10;
	if (sim_chance(&rng, 500))
		config->lease_ms = 5000;
	config->restored_lease_ms = config->seed % 2 == 1 ? 3 * config->lease_ms : 0;
	if (config->spill_per_mille > 0)
		return;
	files->delay_ns_max = sim_chance(&rng, 300) ? 0 : sim_below(&rng, 300000);
	files->short_per_mille = sim_chance(&rng, 500) ? 0 : sim_below(&rng, 300);
	files->fail_per_mille = sim_chance(&rng, 700) ? 0 : sim_below(&rng, 60);
	files->flip_per_mille = sim_chance(&rng, 800) ? 0 : sim_below(&rng, 60);
}

/* The disk of tiers and snapshots, again with numbers of its own: a page of the probe, or some of a snapshot.
 */
static void draw_disk(struct sim_config *config)
{
	struct sim_rng rng;

	sim_rng_init(&rng, config->seed, 12);
	if ((config->snapshot_per_mille > 0 || config->file_tier_bytes > 0) && sim_chance(&rng, 300))
		config->net.files.disk_bytes_max = 8192ull * sim_between(&rng, 1, 40);
}

struct sim_config sim_config_random(uint64_t seed)
{
	struct sim_config config = { .seed = seed, .audits_every_turn = true };
	struct sim_rng rng;

	sim_rng_init(&rng, seed, 9);
	config.n_peers = sim_between(&rng, 1, 6);
	config.n_tenants = sim_between(&rng, 1, 3);
	config.pipeline_max = sim_between(&rng, 1, 10);
	config.pace_ns = sim_chance(&rng, 600) ? 40000 : sim_chance(&rng, 500) ? 400000 : 4000000;
	config.net = (struct sim_net_options){
		.n_ahead_buffers = config.n_peers + sim_below(&rng, 4),
		.wire_bytes_max = sim_chance(&rng, 500) ? 2048 : 1 << 18,
		.delay_ns_max = sim_chance(&rng, 500) ? 0 : sim_below(&rng, 300000),
		.cut_per_mille = sim_chance(&rng, 300) ? 0 : sim_below(&rng, 800),
		.skip_per_mille = sim_chance(&rng, 500) ? 0 : sim_below(&rng, 300),
		.late_per_mille = sim_chance(&rng, 500) ? 0 : 600,
	};
	config.backend = (struct sim_backend_options){
		.latency_ns_max = sim_chance(&rng, 300) ? 0
			: sim_chance(&rng, 150)         ? 40000000
							: sim_below(&rng, 2000000),
		.busy_per_mille = sim_chance(&rng, 500) ? 0 : sim_below(&rng, 300),
		.refuse_per_mille = sim_chance(&rng, 300) ? 0 : sim_below(&rng, 120),
		.depth_max = sim_between(&rng, 1, 6),
		.has_event_fd = sim_chance(&rng, 700),
		.is_silent = config.seed % 4 == 0,
		.lose_after = sim_chance(&rng, 100) ? (int64_t)sim_below(&rng, 100) : -1,
	};
	draw_pools(&config, &rng);
	draw_bounds(&config, &rng);
	draw_behaviour(&config, &rng);
	config.alloc_timeout_ms =
		sim_chance(&rng, 500) ? 0 : sim_between(&rng, 1, sim_chance(&rng, 500) ? 10 : 80);
	config.audit_interval_ms = sim_chance(&rng, 200) ? 0 : sim_between(&rng, 1, 20);
	config.audit_step_max = sim_chance(&rng, 200) ? 0 : sim_between(&rng, 1, 60);
	if (sim_chance(&rng, 200))
		make_lasting(&config, &rng);
	else if (sim_chance(&rng, 250))
		draw_prefixes(&config, &rng);
	draw_snapshots(&config);
	draw_disk(&config);
	return config;
}
