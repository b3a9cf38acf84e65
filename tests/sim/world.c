#include "tests/sim/world.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/format.h"
#include "server/checkpoint.h"
#include "server/spill_internal.h"
#include "tests/sim/peer.h"
#include "tests/sim/snapshots.h"

#define SPINS_MAX 100u

/* ---- options ---- */

static const char *const pool_names[SIM_POOLS_MAX + 1] = { "p0", "p1", "extra" };

const char *sim_pool_name(uint32_t idx)
{
	return pool_names[idx];
}

/* A number per query head. */
static json_t *heads_json(const struct sim_pool_config *pool, double first, double step)
{
	json_t *json = json_array();

	for (uint32_t h = 0; h < pool->q_heads; h++)
		json_array_append_new(json, json_real(first + step * h));
	return json;
}

/* `value` on all layers, or on every other one. */
static json_t *layers_json(const struct sim_pool_config *pool, json_t *value, json_t *other)
{
	json_t *json = json_array();

	for (uint32_t l = 0; l < pool->n_layers; l++)
		json_array_append(json, pool->alternates && l % 2 == 1 ? other : value);
	json_decref(value);
	json_decref(other);
	return json;
}

static void add_attention(json_t *json, const struct sim_pool_config *pool)
{
	if (pool->window > 0)
		json_object_set_new(
			json, "window", layers_json(pool, json_integer(pool->window), json_integer(0)));
	if (pool->sink_tokens > 0)
		json_object_set_new(json, "sink_tokens", json_integer(pool->sink_tokens));
	if (pool->softcap > 0)
		json_object_set_new(
			json, "softcap", layers_json(pool, json_real(pool->softcap), json_integer(0)));
	if (pool->has_sinks)
		json_object_set_new(
			json, "sinks", layers_json(pool, heads_json(pool, -0.5, 0.75), json_null()));
	if (pool->has_alibi)
		json_object_set_new(json, "alibi", heads_json(pool, 0.25, -0.0625));
}

static json_t *pool_json(const struct sim_pool_config *pool, const char *name)
{
	json_t *json = json_pack("{s:s, s:i, s:i, s:i, s:i, s:i, s:s, s:s, s:i, s:i, s:i}", "name", name,
		"layers", (int)pool->n_layers, "q_heads", (int)pool->q_heads, "kv_heads", (int)pool->kv_heads,
		"k_head_dim", (int)pool->k_head_dim, "v_head_dim", (int)pool->v_head_dim, "k", pool->k, "v",
		pool->v, "block_size", (int)pool->block_size, "blocks", (int)pool->n_blocks, "tokens_max",
		(int)pool->tokens_max);

	SIM_CHECK(json, "a pool's JSON could not be made");
	add_attention(json, pool);
	if (pool->exact_tokens > 0) {
		json_object_set_new(json, "exact_tokens", json_integer(pool->exact_tokens));
		json_object_set_new(json, "exact_blocks", json_integer(pool->exact_blocks));
	}
	return json;
}

struct kv_pool_spec *sim_world_make_spec(const struct sim_pool_config *pool, const char *name)
{
	struct kv_pool_spec *spec = NULL;
	struct kv_error err = { 0 };
	json_t *json = pool_json(pool, name);
	const enum kv_status status = kv_pool_spec_create(json, &spec, &err);

	SIM_CHECK(status == KV_OK, "%s", err.msg);
	json_decref(json);
	return spec;
}

static void set_numbers(struct srv_options *options, const struct sim_config *config)
{
	options->frame_bytes_max = config->frame_bytes_max;
	options->inflight_bytes_max = config->inflight_bytes_max;
	options->min_rate_bytes_per_s = config->min_rate_bytes_per_s;
	options->large_slots = config->large_slots;
	options->small_slots = config->small_slots;
	options->read_ahead_buffers = config->net.n_ahead_buffers;
	options->reply_buffers = config->reply_buffers;
	options->connections_max = config->connections_max;
	options->sessions_max = config->sessions_max;
	options->sequences_max = config->sequences_max;
	options->inflight_requests_max = config->inflight_requests_max;
	options->lease_ms = config->lease_ms;
	options->restored_lease_ms = config->restored_lease_ms;
	options->io_timeout_ms = config->io_timeout_ms;
	options->send_timeout_ms = config->send_timeout_ms;
	options->hello_timeout_ms = config->hello_timeout_ms;
	options->drain_timeout_ms = config->drain_timeout_ms;
	options->self_test_interval_ms = 100;
	options->audit_interval_ms = config->audit_interval_ms;
	options->alloc_timeout_ms = config->alloc_timeout_ms;
	options->busy_poll_us = 0;
}

void sim_world_options(struct sim_world *world)
{
	struct srv_options *options = &world->options;
	struct kv_error err = { 0 };
	const enum kv_status status = srv_options_init(options, &err);

	SIM_CHECK(status == KV_OK, "%s", err.msg);
	world->has_options = true;
	set_numbers(options, &world->config);
	json_decref(options->pools);
	options->pools = json_array();
	for (uint32_t i = 0; i < world->config.n_pools; i++)
		json_array_append_new(options->pools, pool_json(&world->config.pools[i], pool_names[i]));
	snprintf(options->snapshot_dir, sizeof(options->snapshot_dir), "dir");
	options->snapshot_on_drain = world->config.saves_on_drain;
	options->host_tier_bytes = world->config.host_tier_bytes;
	if (world->config.file_tier_bytes > 0)
		snprintf(options->file_tier_dir, sizeof(options->file_tier_dir), "dir");
	options->file_tier_bytes = world->config.file_tier_bytes;
	options->spill_idle_ms = world->config.spill_idle_ms;
	options->spill_above_percent = 0;
	options->n_listen = 1;
	options->listen[0] = (struct kv_io_address){ .transport = KV_IO_UNIX, .path = "sim" };
}

const struct kv_pool_spec *sim_world_spec(const struct sim_world *world, const char *name)
{
	for (uint32_t i = 0; i <= SIM_POOLS_MAX; i++) {
		if (strcmp(pool_names[i], name) == 0)
			return world->specs[i];
	}
	sim_fail("a pool that there is not: %s", name);
}

struct kv_pool *sim_world_pool(const struct sim_world *world, uint32_t idx)
{
	return kv_domain_pool_by_name(
		world->server->domain, pool_names[idx], (uint32_t)strlen(pool_names[idx]));
}

/* ---- making ---- */

/* Room for the pools, the extra pool and the self-test's. */
static uint64_t arena_bytes(const struct sim_world *world)
{
	uint64_t n_bytes = 1 << 20, sum = n_bytes;

	for (uint32_t i = 0; i <= SIM_POOLS_MAX; i++) {
		if (world->specs[i] && kv_pool_spec_page_bytes(world->specs[i], &n_bytes))
			sum += n_bytes + (1 << 16);
	}
	return sum;
}

static void make_parts(struct sim_world *world)
{
	const struct sim_config *config = &world->config;
	const struct sim_backend_hooks hooks = sim_record_hooks(world);
	struct sim_net_watch source = { sim_backend_due_ns, sim_backend_clear, NULL, SIM_BACKEND_FD };

	sim_rng_init(&world->rng, config->seed, 0);
	sim_clock_init(&world->clock);
	sim_random_init(&world->random, config->seed);
	sim_model_init(&world->model, config->sessions_max, config->sequences_max);
	for (uint32_t i = 0; i < config->n_pools; i++)
		world->specs[i] = sim_world_make_spec(&config->pools[i], pool_names[i]);
	world->specs[SIM_POOLS_MAX] = sim_world_make_spec(&config->pools[0], pool_names[SIM_POOLS_MAX]);
	sim_world_options(world);
	world->net = sim_net_create(&config->net, &world->clock, config->seed);
	world->backend = sim_backend_create(&config->backend, &hooks, &world->clock, config->seed);
	source.user = world->backend;
	if (config->backend.has_event_fd)
		sim_net_watch_source(world->net, &source);
	if (config->control_per_mille > 0) {
		const enum kv_status status = srv_mailbox_init(&world->mailbox, NULL);

		SIM_CHECK(status == KV_OK, "no mailbox");
		world->has_mailbox = true;
		world->asked = calloc(SIM_CONTROLS, sizeof(*world->asked));
		SIM_CHECK(world->asked, "no memory for control requests");
	}
}

static void make_peers(struct sim_world *world)
{
	const struct sim_config *config = &world->config;

	world->peers = calloc(config->n_peers + 1, sizeof(*world->peers));
	SIM_CHECK(world->peers, "no memory for peers");
	for (uint32_t i = 0; i < config->n_peers; i++)
		sim_peer_init(&world->peers[i], world, i, 1000 + i % config->n_tenants);
}

void sim_world_prepare(struct sim_world *world, const struct sim_config *config)
{
	memset(world, 0, sizeof(*world));
	world->config = *config;
	sim_where.seed = config->seed;
	sim_where.turn = 0;
	sim_world_now = world;
	/* Refusals and losses are what is wanted here. */
	srv_log_set_level(sim_is_verbose ? SRV_LOG_WARNING : (enum srv_log_level)0);
	make_parts(world);
	make_peers(world);
}

enum kv_status sim_world_start(struct sim_world *world, struct kv_error *err)
{
	const struct srv_seams seams = {
		.io = sim_net_io(world->net),
		.clock = &world->clock.base,
		.random = &world->random.base,
		.backend = sim_backend_base(world->backend),
		.mailbox = world->has_mailbox ? &world->mailbox : NULL,
		.arena_bytes = arena_bytes(world),
	};
	const enum kv_status status = srv_server_create(&world->options, &seams, &world->server, err);

	return status == KV_OK ? srv_server_listen(world->server, err) : status;
}

void sim_world_init(struct sim_world *world, const struct sim_config *config)
{
	struct kv_error err = { 0 };

	sim_world_prepare(world, config);
	const enum kv_status status = sim_world_start(world, &err);

	SIM_CHECK(status == KV_OK, "the server does not start: %s", err.msg);
	for (uint32_t i = 0; i < kv_domain_n_pools(world->server->domain); i++)
		kv_prefix_truncate_hashes(kv_domain_pool_at(world->server->domain, i),
			config->hash_bits ? config->hash_bits : 64);
}

static void free_request(struct sim_request *request)
{
	for (uint32_t i = 0; i < request->n_items; i++) {
		struct sim_sequence *sequence = request->items[i].planned_on;

		/* Never finished: of an orphan, the last item has the last pointer. */
		if (sequence && sequence->is_orphan && --sequence->n_pending == 0)
			sim_sequence_free(sequence);
		free(request->items[i].row_ids);
	}
	free(request);
}

void sim_world_finish(struct sim_world *world, bool is_clean)
{
	if (world->server && world->has_mailbox)
		srv_server_answer_waiting(world->server);
	sim_backend_hurry(world->backend);
	if (world->server && world->server->spill && world->server->spill->fd >= 0) {
		sim_files_close(sim_net_files(world->net), world->server->spill->fd);
		world->server->spill->fd = -1;
	}
	if (world->server)
		srv_server_destroy(world->server);
	else
		sim_backend_base(world->backend)->ops->destroy(sim_backend_base(world->backend));
	world->server = NULL;
	sim_world_now = NULL;
	sim_net_destroy(world->net, is_clean);
	for (uint32_t i = 0; world->peers && i < world->config.n_peers; i++)
		sim_peer_finish(&world->peers[i]);
	free(world->peers);
	for (uint64_t i = 0; i < world->n_requests; i++)
		free_request(world->requests[i]);
	free(world->requests);
	sim_model_finish(&world->model);
	if (world->has_mailbox)
		srv_mailbox_finish(&world->mailbox);
	for (uint32_t i = 0; world->asked && i < SIM_CONTROLS; i++)
		kv_pool_spec_destroy(world->asked[i].control.spec);
	free(world->asked);
	for (uint32_t i = 0; i <= SIM_POOLS_MAX; i++)
		kv_pool_spec_destroy(world->specs[i]);
	if (world->has_options)
		srv_options_finish(&world->options);
	memset(world, 0, sizeof(*world));
}

/* ---- requests ---- */

struct sim_request *sim_world_request(struct sim_world *world, struct sim_peer *peer, uint16_t opcode)
{
	struct sim_request *request = calloc(1, sizeof(*request));

	if (world->n_requests == world->n_requests_max) {
		world->n_requests_max = 2 * world->n_requests_max + 64;
		world->requests = realloc(world->requests, world->n_requests_max * sizeof(*world->requests));
	}
	SIM_CHECK(request && world->requests, "no memory for a request");
	world->requests[world->n_requests++] = request;
	request->id = world->n_requests;
	request->peer = peer;
	request->opcode = opcode;
	for (uint32_t i = 0; i < SIM_ITEMS_MAX; i++)
		request->items[i].bad_row = request->items[i].bad_layer = KV_ROW_NONE;
	return request;
}

struct sim_request *sim_world_find(const struct sim_world *world, uint64_t id)
{
	return id >= 1 && id <= world->n_requests ? world->requests[id - 1] : NULL;
}

uint32_t sim_world_rows(struct sim_world *world, uint32_t n_tokens)
{
	const uint32_t first = world->row_counter + 1;

	world->row_counter += n_tokens;
	return first;
}

/* ---- turning ---- */

/* A batch that the backend was too busy for is tried again every turn. */
static bool has_unsubmitted(const struct srv_server *server)
{
	for (uint32_t i = 0; i < KV_POOLS_MAX; i++) {
		const struct srv_lane *lane = &server->lanes[i];

		for (uint32_t f = 0; lane->pool && f < lane->n_flights; f++) {
			if (!lane->flights[(lane->flight_first + f) % SRV_PLANS_PER_LANE].is_submitted)
				return true;
		}
	}
	return false;
}

/* Not waiting is right for a turn or two; going on like that burns a processor. */
static void check_spin(struct sim_world *world, bool has_waited, uint64_t n_changes)
{
	if (has_waited || world->n_changes != n_changes || has_unsubmitted(world->server) ||
		world->server->last_event_ns == world->server->now_ns)
		world->n_spins = 0;
	else
		SIM_CHECK(world->n_spins++ < SPINS_MAX,
			"the server spins: %u turns without an event or a wait", world->n_spins);
}

void sim_world_step(struct sim_world *world, uint64_t max_wait_ns)
{
	const uint64_t n_changes = world->n_changes;
	int64_t wait_ns;

	for (uint32_t i = 0; i < world->config.n_peers; i++)
		sim_peer_poll(&world->peers[i]);
	wait_ns = srv_server_wait_ns(world->server);
	SIM_CHECK(wait_ns >= 0, "the server wants to wait for ever");
	const bool has_waited = wait_ns > 0;

	if ((uint64_t)wait_ns > max_wait_ns)
		wait_ns = (int64_t)max_wait_ns;
	sim_where.turn++;
	sim_record_reset_turn(world);
	srv_server_turn(world->server, wait_ns);
	sim_snapshots_watch(world);
	check_spin(world, has_waited, n_changes);
	/* A turn in which nothing happened needs no audit of its own. */
	if ((world->config.audits_every_turn && world->n_changes != world->n_changes_checked) ||
		sim_where.turn % 64 == 0)
		sim_world_check(world);
}

/* Something that somebody still waits for. */
static bool is_busy(struct sim_world *world)
{
	for (uint32_t i = 0; i < world->config.n_peers; i++) {
		if (world->peers[i].conn && !world->peers[i].is_deaf && world->peers[i].n_pending > 0)
			return true;
	}
	return world->server->slots[0].n_used + world->server->slots[1].n_used > 0 ||
		srv_scheduler_in_flight(world->server) > 0 || kv_domain_has_zombies(world->server->domain) ||
		!sim_controls_are_done(world) || srv_spill_is_busy(world->server->spill) ||
		srv_checkpoint_is_running(world->server->checkpoint);
}

void sim_world_run(struct sim_world *world, uint64_t for_ns)
{
	const uint64_t end_ns = world->clock.now_ns + for_ns;

	do {
		const uint64_t now_ns = world->clock.now_ns;

		sim_world_step(world, now_ns < end_ns ? end_ns - now_ns : 0);
	} while (world->clock.now_ns < end_ns && is_busy(world) && !world->server->is_lost);
	for (uint32_t i = 0; i < world->config.n_peers; i++)
		sim_peer_poll(&world->peers[i]);
}
