#include "tests/sim/run.h"
#include "server/spill.h"

#include <string.h>

#include "tests/sim/client.h"
#include "tests/sim/snapshots.h"

#define SETTLE_NS (20000 * KV_NS_PER_MS)

/* ---- the middle ---- */

static uint64_t next_action_ns(const struct sim_world *world)
{
	uint64_t next_ns = UINT64_MAX;

	for (uint32_t i = 0; i < world->config.n_peers; i++) {
		if (world->peers[i].next_ns < next_ns)
			next_ns = world->peers[i].next_ns;
	}
	return next_ns;
}

static void act(struct sim_world *world)
{
	const uint64_t next_ns = next_action_ns(world);

	for (uint32_t i = 0; i < world->config.n_peers; i++)
		sim_client_act(&world->peers[i]);
	if (sim_chance(&world->rng, world->config.control_per_mille))
		sim_controls_post(world, 1 + sim_below(&world->rng, SIM_CONTROLS));
	if (sim_chance(&world->rng, world->config.snapshot_per_mille))
		sim_snapshots_act(world);
	sim_world_step(world, next_ns > world->clock.now_ns ? next_ns - world->clock.now_ns : 0);
}

/* ---- the ends ---- */

static void wake_all(struct sim_world *world)
{
	for (uint32_t i = 0; i < world->config.n_peers; i++) {
		world->peers[i].sip_bytes = 0;
		sim_client_wake(&world->peers[i]);
	}
}

/* Every request of a connection that still lives is answered. */
static void check_answered(const struct sim_world *world)
{
	for (uint32_t i = 0; i < world->config.n_peers; i++) {
		const struct sim_peer *peer = &world->peers[i];

		SIM_CHECK(!peer->conn || peer->n_pending == 0 || peer->may_end,
			"peer %u: request %llu was never answered", peer->peer_idx,
			(unsigned long long)peer->pending[0]->id);
	}
}

static void disconnect_all(struct sim_world *world)
{
	for (uint32_t i = 0; i < world->config.n_peers; i++) {
		struct sim_peer *peer = &world->peers[i];

		if (!peer->conn)
			continue;
		if (sim_chance(&world->rng, 500)) {
			sim_peer_reset(peer);
			continue;
		}
		if (!peer->is_half_closed)
			sim_net_shutdown(world->net, peer->conn);
		peer->is_half_closed = true;
	}
}

static bool is_connected(const struct sim_world *world)
{
	for (uint32_t i = 0; i < world->config.n_peers; i++) {
		if (world->peers[i].conn)
			return true;
	}
	return world->server->n_conns > 0;
}

/* Until connections and sessions are gone by themselves. */
static void run_out(struct sim_world *world)
{
	const uint64_t end_ns = world->clock.now_ns + SETTLE_NS;

	while (world->clock.now_ns < end_ns && !world->server->is_lost &&
		(is_connected(world) || kv_domain_n_sessions(world->server->domain) > 0 ||
			kv_domain_has_zombies(world->server->domain) ||
			srv_spill_is_busy(world->server->spill) ||
			srv_scheduler_in_flight(world->server) > 0))
		sim_world_step(world, 50 * KV_NS_PER_MS);
}

static void end_lost(struct sim_world *world, struct sim_seen *seen)
{
	wake_all(world);
	for (uint32_t i = 0; i < 10000 && !srv_server_is_done(world->server); i++)
		sim_world_step(world, 50 * KV_NS_PER_MS);
	SIM_CHECK(srv_server_is_done(world->server), "the device is lost, and the server does not end");
	SIM_CHECK(srv_server_exit_code(world->server) == 4, "exit code %d after losing the device",
		srv_server_exit_code(world->server));
	seen->n_lost++;
}

/* Everybody who was there was told, unless it went away itself. */
static void check_goaway(struct sim_world *world)
{
	world->clock.now_ns += 10 * KV_NS_PER_MS; /* what was sent arrives */
	wake_all(world);
	for (uint32_t i = 0; i < world->config.n_peers; i++) {
		struct sim_peer *peer = &world->peers[i];
		const uint64_t serial = peer->conn_serial;

		sim_peer_poll(peer);
		SIM_CHECK(
			!peer->wants_goaway || peer->has_goaway || !peer->conn || peer->conn_serial != serial,
			"peer %u was not told GOAWAY", i);
	}
}

static void end_drain(struct sim_world *world, struct sim_seen *seen)
{
	world->drain_ns = world->clock.now_ns;
	for (uint32_t i = 0; i < world->config.n_peers; i++) {
		struct sim_peer *peer = &world->peers[i];

		peer->wants_goaway =
			peer->conn && peer->is_hello_done && !peer->is_half_closed && !peer->may_end;
	}
	const uint64_t end_ns = world->drain_ns + (world->config.drain_timeout_ms + 2000) * KV_NS_PER_MS;

	srv_server_drain(world->server);
	while (!srv_server_is_done(world->server) && !world->server->is_lost) {
		SIM_CHECK(world->clock.now_ns < end_ns, "draining does not end");
		act(world);
	}
	if (world->server->is_lost) {
		end_lost(world, seen);
		return;
	}
	SIM_CHECK(srv_server_exit_code(world->server) == 0, "exit code %d after draining",
		srv_server_exit_code(world->server));
	if (world->clock.now_ns < world->drain_ns + world->config.drain_timeout_ms * KV_NS_PER_MS)
		check_goaway(world);
	seen->n_drained++;
}

/* True: it ended with everything given back. */
static bool end_settle(struct sim_world *world, struct sim_seen *seen)
{
	wake_all(world);
	sim_world_run(world, SETTLE_NS);
	if (world->server->is_lost) {
		end_lost(world, seen);
		return false;
	}
	check_answered(world);
	disconnect_all(world);
	run_out(world);
	if (world->server->is_lost) {
		end_lost(world, seen);
		return false;
	}
	sim_world_check_empty(world);
	end_drain(world, seen);
	return !world->server->is_lost;
}

/* ---- all of it ---- */

static void look_back(const struct sim_world *world, struct sim_seen *seen)
{
	const struct srv_counters *counters = srv_server_counters(world->server);
	const struct sim_maxima *maxima = &world->maxima;

	seen->n_turns += sim_where.turn;
	seen->n_requests += world->n_requests;
	seen->n_resets += world->n_resets;
	for (uint32_t i = 0; i < KV_LENGTH(seen->n_done); i++)
		seen->n_done[i] += world->n_done[i];
	for (uint64_t i = 0; i < world->n_requests; i++) {
		const struct sim_request *request = world->requests[i];

		for (uint32_t k = 0; k < request->n_items; k++) {
			if (request->items[k].n_planned > 0)
				seen->n_statuses[request->items[k].outcome.status % 1000]++;
		}
	}
	for (uint32_t i = 0; i < kv_domain_n_pools(world->server->domain); i++) {
		const struct kv_pool *pool = kv_domain_pool_at(world->server->domain, i);
		const struct kv_prefix_counts prefixes = kv_prefix_counts(pool);

		seen->n_published += prefixes.n_published;
		seen->n_hits += prefixes.n_hits;
		seen->n_nodes_evicted += prefixes.n_evicted;
		seen->n_nodes_expired += prefixes.n_expired;
		seen->n_evicted += pool->n_evicted_sequences;
	}
	seen->n_saved += world->n_saved;
	seen->n_restored += world->n_restored;
	seen->n_refused += world->n_refused;
	seen->n_full += sim_net_files(world->net)->n_full;
	seen->n_audits += counters->audits;
	seen->n_open_waits += world->n_open_waits;
	seen->n_expired += counters->sessions_expired;
	seen->n_closed_slow += counters->connections_closed_slow;
	seen->n_slot_waits += counters->slot_waits;
#define KEEP_LARGER(field)                      \
	if (maxima->field > seen->maxima.field) \
	seen->maxima.field = maxima->field
	KEEP_LARGER(n_controls);
	KEEP_LARGER(n_rows);
	KEEP_LARGER(n_audited);
	KEEP_LARGER(n_released);
	KEEP_LARGER(n_batches_begun);
	KEEP_LARGER(n_in_flight);
#undef KEEP_LARGER
}

/* Killed in the middle of things; the next process goes on with what the snapshots have. */
static void go_on_elsewhere(struct sim_world *world, const struct sim_config *config, struct sim_seen *seen)
{
	struct sim_config next = *config;

	look_back(world, seen);
	next.seed = config->seed ^ 0x517CC1B727220A95u;
	sim_snapshots_restart(world, &next);
	const uint64_t end = sim_where.turn + config->n_turns / 2;

	while (sim_where.turn < end && !world->server->is_lost)
		act(world);
}

void sim_run(const struct sim_config *config, struct sim_seen *seen)
{
	struct sim_world world;
	bool is_clean = false;

	sim_world_init(&world, config);
	while (sim_where.turn < config->n_turns && !world.server->is_lost)
		act(&world);
	if (config->end == SIM_END_ABANDON && config->snapshot_per_mille > 0 && !world.server->is_lost)
		go_on_elsewhere(&world, config, seen);
	if (world.server->is_lost)
		end_lost(&world, seen);
	else if (config->end == SIM_END_DRAIN)
		end_drain(&world, seen);
	else if (config->end == SIM_END_SETTLE)
		is_clean = end_settle(&world, seen);
	look_back(&world, seen);
	sim_world_finish(&world, is_clean);
}
