/*
 * The random client: opens, appends, decodes, reads, makes mistakes, stalls, and goes away in the middle of
 * things. It cheats in one respect: it looks into the model for lengths, so that most of what it asks is
 * right.
 */
#include <string.h>

#include "tests/sim/client.h"
#include "tests/sim/peer.h"

static uint32_t below(struct sim_peer *peer, uint32_t n)
{
	return sim_below(&peer->world->rng, n);
}

static bool chance(struct sim_peer *peer, uint32_t per_mille)
{
	return sim_chance(&peer->world->rng, per_mille);
}

/* ---- sending with accidents ---- */

/* Stops in the middle of a frame: for a while, for too long, or for ever. */
static void send_and_stall(struct sim_peer *peer, struct sim_request *request)
{
	struct sim_world *world = peer->world;
	const uint64_t n_bytes = sim_request_bytes(request);
	const uint64_t timeout_ns = world->config.io_timeout_ms * KV_NS_PER_MS;

	const uint64_t n_sent = sim_rng_next(&world->rng) % n_bytes;

	sim_peer_send(peer, request, n_sent);
	switch (below(peer, 4)) {
	case 0: /* too long; certainly noticed when nothing else keeps the server from reading */
		peer->may_end = "stalled";
		peer->must_end = n_sent > 0 && peer->n_pending == 1;
		peer->wakes_ns = world->clock.now_ns + 2 * timeout_ns + 100 * KV_NS_PER_MS;
		break;
	case 1: /* gone */
		sim_peer_reset(peer);
		break;
	case 2: /* half-closed inside the frame */
		peer->may_end = "half-closed inside a frame";
		peer->is_half_closed = true;
		sim_net_shutdown(world->net, peer->conn);
		break;
	default:
		peer->wakes_ns = world->clock.now_ns + sim_rng_next(&world->rng) % (timeout_ns / 2);
		break;
	}
}

void sim_client_send(struct sim_peer *peer, struct sim_request *request)
{
	if (chance(peer, peer->world->config.stall_per_mille) && request->flaw == SIM_FLAW_NONE)
		send_and_stall(peer, request);
	else
		sim_peer_send(peer, request, UINT64_MAX);
}

static void send_rest(struct sim_peer *peer)
{
	const uint64_t n = peer->unsent.n - peer->unsent_pos;

	sim_net_write(peer->world->net, peer->conn, peer->unsent.data + peer->unsent_pos, n);
	peer->unsent.n = peer->unsent_pos = 0;
}

/* ---- connecting ---- */

static void connect_and_greet(struct sim_peer *peer)
{
	struct sim_world *world = peer->world;
	struct sim_request *request;

	if (!sim_peer_connect(peer)) {
		peer->next_ns = UINT64_MAX;
		return;
	}
	if (world->config.connections_max < 2 * world->config.n_peers)
		peer->may_end = "too many connections"; /* until HELLO is answered */
	if (chance(peer, world->config.flaw_per_mille / 8)) {
		peer->may_end = "says nothing";
		peer->must_end = true;
		peer->wakes_ns =
			world->clock.now_ns + (2 * world->config.hello_timeout_ms + 100) * KV_NS_PER_MS;
		return;
	}
	if (chance(peer, world->config.flaw_per_mille / 8)) {
		request = sim_world_request(world, peer, KVP_OP_PING);
		request->flaw = SIM_FLAW_EARLY;
		sim_peer_send(peer, request, UINT64_MAX);
		return;
	}
	request = sim_world_request(world, peer, KVP_OP_HELLO);
	request->hello = (struct kvp_hello_req){ .proto_min = 1, .proto_max = 1, .features = UINT64_MAX };
	request->hello.name_bytes = (uint16_t)below(peer, 20);
	if (chance(peer, 100))
		request->hello.boot_id_seen = chance(peer, 500) ? peer->boot_id : sim_rng_next(&world->rng);
	if (chance(peer, world->config.flaw_per_mille / 8)) {
		request->hello.proto_min = request->hello.proto_max = 2;
		peer->may_end = "speaks another version";
	}
	peer->is_hello_sent = true;
	sim_client_send(peer, request);
}

/* ---- going away ---- */

/* Four times as fast as the slowest rate that the server puts up with. */
#define SIP_BYTES_PER_S 262144u

/* Reads a little at a time, as fast as it has to: nobody may close it for that. */
static void read_slowly(struct sim_peer *peer)
{
	const uint64_t n_bytes_max = peer->world->config.net.wire_bytes_max / 2;

	peer->sip_bytes = 1 + below(peer, (uint32_t)(n_bytes_max < 8192 ? n_bytes_max : 8192));
	peer->sip_ns = peer->sip_bytes * 1000 * KV_NS_PER_MS / SIP_BYTES_PER_S;
	sim_say("peer %u reads %llu bytes at a time\n", peer->peer_idx, (unsigned long long)peer->sip_bytes);
}

static bool goes_away(struct sim_peer *peer)
{
	struct sim_world *world = peer->world;

	if (chance(peer, world->config.reset_per_mille)) {
		sim_peer_reset(peer);
		return true;
	}
	if (chance(peer, world->config.reset_per_mille)) {
		peer->is_half_closed = true;
		sim_net_shutdown(world->net, peer->conn);
		return true;
	}
	if (chance(peer, world->config.stall_per_mille / 4))
		read_slowly(peer);
	else if (peer->sip_bytes > 0 && chance(peer, 20))
		peer->sip_bytes = 0;
	if (chance(peer, world->config.stall_per_mille / 4)) {
		/* Does not read for a while, perhaps for longer than the server puts up with. */
		const uint64_t timeout_ns = world->config.send_timeout_ms * KV_NS_PER_MS;
		const bool is_long = chance(peer, 300);

		peer->is_deaf = true;
		sim_net_set_deaf(peer->conn, UINT64_MAX);
		if (is_long)
			peer->may_end = "does not read";
		peer->wakes_ns = world->clock.now_ns +
			(is_long ? 2 * timeout_ns + 100 * KV_NS_PER_MS
				 : sim_rng_next(&world->rng) % (timeout_ns / 2));
		return true;
	}
	return false;
}

/* Also used at the end: nothing is held back any more. */
void sim_client_wake(struct sim_peer *peer)
{
	if (!peer->conn)
		return;
	peer->is_deaf = false;
	sim_net_set_deaf(peer->conn, peer->sip_bytes > 0 ? peer->sip_due_ns : 0);
	if (peer->unsent.n > 0 && !peer->is_half_closed)
		send_rest(peer);
	peer->wakes_ns = 0;
}

static bool is_held_back(struct sim_peer *peer)
{
	const uint64_t now_ns = peer->world->clock.now_ns;

	if (peer->wakes_ns > now_ns)
		return true;
	SIM_CHECK(
		!peer->must_end, "peer %u %s, and nobody ends its connection", peer->peer_idx, peer->may_end);
	sim_client_wake(peer);
	if (peer->may_end && peer->is_hello_done && chance(peer, 50))
		sim_peer_reset(peer);
	return !peer->conn || peer->is_half_closed || (peer->may_end && peer->is_hello_sent) ||
		!peer->is_hello_sent;
}

void sim_client_act(struct sim_peer *peer)
{
	struct sim_world *world = peer->world;

	if (peer->next_ns > world->clock.now_ns)
		return;
	peer->next_ns = world->clock.now_ns + below(peer, chance(peer, 30) ? 5000000 : world->config.pace_ns);
	if (!peer->conn) {
		if (chance(peer, 300))
			connect_and_greet(peer);
		return;
	}
	if (peer->is_hello_done && peer->may_end && strcmp(peer->may_end, "too many connections") == 0)
		peer->may_end = NULL;
	if (is_held_back(peer))
		return;
	if (peer->has_goaway && chance(peer, 300)) {
		peer->is_half_closed = true;
		sim_net_shutdown(world->net, peer->conn);
		return;
	}
	if (goes_away(peer))
		return;
	/* Bursts: what arrives together is sealed together. */
	do {
		if (peer->n_pending >= world->config.pipeline_max) {
			peer->is_full = true; /* a reply wakes it */
			peer->next_ns = world->clock.now_ns + 20 * KV_NS_PER_MS;
			return;
		}
		sim_client_ask(peer);
	} while (peer->conn && !peer->is_half_closed && !peer->may_end && peer->wakes_ns == 0 &&
		chance(peer, 500));
}
