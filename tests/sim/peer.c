#include "tests/sim/peer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/check.h"
#include "proto/crc32c.h"

void sim_peer_init(struct sim_peer *peer, struct sim_world *world, uint32_t peer_idx, uint32_t uid)
{
	memset(peer, 0, sizeof(*peer));
	peer->world = world;
	peer->peer_idx = peer_idx;
	/* Every fifth comes over TCP: one tenant, known by its address. */
	peer->address.transport = peer_idx % 5 == 4 ? KV_IO_TCP : KV_IO_UNIX;
	peer->address.uid = peer_idx % 5 == 4 ? UINT32_MAX : uid;
	if (peer->address.transport == KV_IO_TCP)
		snprintf(peer->address.address, sizeof(peer->address.address), "127.0.0.1:%u",
			5000 + peer_idx);
	else
		snprintf(peer->address.address, sizeof(peer->address.address), "unix:uid %u pid %u", uid,
			peer_idx + 1);
}

void sim_peer_finish(struct sim_peer *peer)
{
	sim_bytes_finish(&peer->in);
	sim_bytes_finish(&peer->unsent);
	free(peer->reply_body);
	peer->reply_body = NULL;
}

bool sim_peer_connect(struct sim_peer *peer)
{
	SIM_CHECK(!peer->conn, "peer %u is connected", peer->peer_idx);
	peer->conn = sim_net_connect(peer->world->net, &peer->address);
	if (!peer->conn)
		return false;
	peer->conn_serial++;
	peer->conn_id = peer->open_since_ns = 0;
	peer->planned_last = 0;
	peer->is_hello_sent = peer->is_hello_done = peer->is_half_closed = peer->is_deaf = false;
	peer->has_goaway = peer->wants_goaway = false;
	peer->may_end = NULL;
	peer->must_end = false;
	peer->sip_bytes = peer->sip_due_ns = 0;
	peer->wakes_ns = 0;
	peer->end = SIM_NET_OPEN;
	peer->connected_ns = peer->world->clock.now_ns;
	return true;
}

void sim_peer_send(struct sim_peer *peer, struct sim_request *request, uint64_t n_bytes_max)
{
	struct sim_world *world = peer->world;
	struct sim_bytes frame = { 0 };

	SIM_CHECK(peer->conn && peer->n_pending < SIM_PENDING_MAX, "a peer sends more than it may");
	sim_request_encode(request, world->config.frame_bytes_max, &frame);
	request->peer = peer;
	request->conn_serial = peer->conn_serial;
	request->order = ++world->order;
	request->sent_ns = world->clock.now_ns;
	peer->pending[peer->n_pending++] = request;
	if (request->flaw > SIM_FLAW_NONE && request->flaw < SIM_FLAW_KEEPS)
		peer->may_end = "sent garbage";
	if (n_bytes_max > frame.n)
		n_bytes_max = frame.n;
	sim_net_write(world->net, peer->conn, frame.data, n_bytes_max);
	peer->unsent.n = peer->unsent_pos = 0;
	if (n_bytes_max < frame.n)
		memcpy(sim_bytes_add(&peer->unsent, frame.n - n_bytes_max), frame.data + n_bytes_max,
			frame.n - n_bytes_max);
	sim_say("peer %u sends %llu: %s, session %llx, flaw %d, %llu of %llu bytes\n", peer->peer_idx,
		(unsigned long long)request->id, kvp_opcode_name(request->opcode),
		(unsigned long long)request->session, request->flaw, (unsigned long long)n_bytes_max,
		(unsigned long long)frame.n);
	sim_bytes_finish(&frame);
}

uint64_t sim_peer_conn_id(struct sim_peer *peer)
{
	const struct srv_conn *conn = peer->conn ? sim_net_user(peer->conn) : NULL;

	if (conn)
		peer->conn_id = conn->id;
	return peer->conn_id;
}

void sim_peer_planned(struct sim_request *request)
{
	struct sim_peer *peer = request->peer;

	SIM_CHECK(!request->is_replied, "request %llu is planned although it was answered",
		(unsigned long long)request->id);
	if (request->conn_serial != peer->conn_serial)
		return;
	SIM_CHECK(request->order > peer->planned_last,
		"request %llu is planned behind one that was sent later", (unsigned long long)request->id);
	peer->planned_last = request->order;
}

/* ---- replies ---- */

/* The pending request that a frame answers. An answer to a header that nobody could read has no id. */
static struct sim_request *take_pending(struct sim_peer *peer, const struct kvp_header *header)
{
	uint32_t i = 0;

	while (i < peer->n_pending) {
		const struct sim_request *request = peer->pending[i];
		const bool has_no_id = request->flaw == SIM_FLAW_MAGIC || request->flaw == SIM_FLAW_VERSION ||
			request->flaw == SIM_FLAW_HEADER_CRC;

		if (request->id == header->request_id || (has_no_id && header->request_id == 0))
			break;
		i++;
	}
	if (i == peer->n_pending) {
		const struct sim_request *known = sim_world_find(peer->world, header->request_id);

		sim_fail("peer %u: an answer (%s, %s) to request %llu, which %s", peer->peer_idx,
			kvp_opcode_name(header->opcode), kv_status_name(header->status),
			(unsigned long long)header->request_id,
			!known                      ? "was never sent"
				: known->is_replied ? "was answered before"
						    : "belongs to another connection");
	}
	struct sim_request *request = peer->pending[i];

	peer->n_pending--;
	memmove(&peer->pending[i], &peer->pending[i + 1], (peer->n_pending - i) * sizeof(peer->pending[0]));
	return request;
}

static void take_frame(struct sim_peer *peer, const struct kvp_header *header, const uint8_t *body)
{
	struct kvp_fault fault;

	SIM_CHECK(kvp_check_reply(header, peer->world->config.frame_bytes_max, &fault) == KV_OK,
		"peer %u: a bad reply: %s", peer->peer_idx, fault.what);
	if (header->flags & KVP_FLAG_BODY_CRC)
		SIM_CHECK(kvp_crc32c(0, body, (size_t)header->body_bytes) == header->body_crc,
			"the CRC of a reply's body is wrong");
	if (header->opcode == KVP_OP_GOAWAY) {
		SIM_CHECK(peer->world->server->is_draining && !peer->has_goaway, "GOAWAY without a reason");
		SIM_CHECK(header->status == KV_DRAINING && header->request_id == 0 && header->body_bytes == 0,
			"GOAWAY is not as it should be");
		peer->has_goaway = true;
		return;
	}
	struct sim_request *request = take_pending(peer, header);

	sim_say("peer %u gets %llu: %s, %s, %llu bytes\n", peer->peer_idx, (unsigned long long)request->id,
		kvp_opcode_name(header->opcode), kv_status_name(header->status),
		(unsigned long long)header->body_bytes);
	free(peer->reply_body);
	peer->reply = *header;
	peer->reply_body = malloc(header->body_bytes + 1);
	SIM_CHECK(peer->reply_body, "no memory for a reply");
	memcpy(peer->reply_body, body, header->body_bytes);
	request->is_replied = true;
	/* A reply with items begins with how many of them are OK; TELL's are lengths. */
	if (header->status == KV_OK && header->opcode < KV_LENGTH(peer->world->n_done) &&
		(header->n_items == 0 || header->opcode == KVP_OP_TELL || kvp_get_u32(body) > 0))
		peer->world->n_done[header->opcode]++;
	if (peer->is_full)
		peer->next_ns = peer->world->clock.now_ns;
	peer->is_full = false;
	sim_reply_check(peer, request, header, body);
}

static void take_frames(struct sim_peer *peer)
{
	uint64_t at = 0;

	while (peer->in.n - at >= KVP_HEADER_BYTES) {
		struct kvp_header header;
		struct kvp_fault fault;
		const enum kv_status status = kvp_header_decode(peer->in.data + at, &header, &fault);

		SIM_CHECK(status == KV_OK, "peer %u: a bad header: %s", peer->peer_idx, fault.what);
		if (peer->in.n - at < KVP_HEADER_BYTES + header.body_bytes)
			break;
		take_frame(peer, &header, peer->in.data + at + KVP_HEADER_BYTES);
		at += KVP_HEADER_BYTES + header.body_bytes;
	}
	peer->in.n -= at;
	if (at > 0)
		memmove(peer->in.data, peer->in.data + at, peer->in.n);
}

/* Why the connection may have ended although the peer did nothing wrong. */
static bool may_end(const struct sim_peer *peer)
{
	const struct sim_world *world = peer->world;

	return peer->may_end || world->server->is_draining || world->server->is_lost ||
		sim_net_has_failed(world->net);
}

static void check_end(struct sim_peer *peer)
{
	const bool is_clean = peer->end == SIM_NET_ENDED && !may_end(peer);

	SIM_CHECK(may_end(peer) || peer->is_half_closed, "peer %u: its connection ends without a reason",
		peer->peer_idx);
	SIM_CHECK(
		!is_clean || peer->in.n == 0, "peer %u: its connection ends inside a frame", peer->peer_idx);
	SIM_CHECK(!is_clean || peer->n_pending == 0,
		"peer %u: half-closed behind its last frame, and %u requests stay unanswered, first %llu",
		peer->peer_idx, peer->n_pending, (unsigned long long)peer->pending[0]->id);
}

static void read_some(struct sim_peer *peer, uint64_t n_bytes_max)
{
	uint8_t chunk[4096];
	uint64_t n;

	while (n_bytes_max > 0 &&
		(n = sim_net_read(peer->world->net, peer->conn, chunk,
			 n_bytes_max < sizeof(chunk) ? n_bytes_max : sizeof(chunk))) > 0) {
		memcpy(sim_bytes_add(&peer->in, n), chunk, n);
		n_bytes_max -= n;
	}
}

static void read_all(struct sim_peer *peer)
{
	const uint64_t now_ns = peer->world->clock.now_ns;

	if (peer->is_deaf)
		return;
	if (peer->sip_bytes == 0) {
		read_some(peer, UINT64_MAX);
	} else if (now_ns >= peer->sip_due_ns) {
		read_some(peer, peer->sip_bytes);
		peer->sip_due_ns = now_ns + peer->sip_ns;
		sim_net_set_deaf(peer->conn, peer->sip_due_ns);
	}
}

void sim_peer_poll(struct sim_peer *peer)
{
	struct sim_net *net = peer->world->net;

	if (!peer->conn)
		return;
	(void)sim_peer_conn_id(peer);
	read_all(peer);
	take_frames(peer);
	peer->end = sim_net_end(net, peer->conn);
	if (peer->end == SIM_NET_OPEN)
		return;
	check_end(peer);
	sim_say("peer %u: its connection ended (%s)\n", peer->peer_idx, peer->may_end ? peer->may_end : "-");
	sim_net_shutdown(net, peer->conn);
	sim_peer_forget(peer);
}

void sim_peer_reset(struct sim_peer *peer)
{
	if (!peer->conn)
		return;
	sim_say("peer %u resets\n", peer->peer_idx);
	peer->world->n_resets++;
	sim_net_reset(peer->world->net, peer->conn);
	sim_peer_forget(peer);
}

void sim_peer_forget(struct sim_peer *peer)
{
	for (uint32_t i = 0; i < peer->n_pending; i++)
		peer->pending[i]->is_lost = true;
	peer->n_pending = 0;
	peer->conn = NULL;
	peer->in.n = 0;
	peer->unsent.n = peer->unsent_pos = 0;
	peer->n_sessions = 0;
	peer->next_ns = 0;
	peer->is_full = false;
	peer->is_hello_done = false;
}
