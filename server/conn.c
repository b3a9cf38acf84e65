/*
 * Connections: accepting, receiving, time limits, the end. conn_send.c sends.
 *
 * Receiving. An idle connection owns no buffer: it waits in recv_ahead(). What arrives is taken apart in
 * conn_step(): 64 bytes of header, then op struct and items inside the read-ahead buffer, then either the
 * next frame or a payload that goes straight into its request slot. A peer that owes us bytes of a started
 * frame is watched (`timed`).
 *
 * Failure modes: end of stream inside a frame, reset, stall, slow payload, unread replies. All end in
 * srv_conn_close(); memory goes back when the io says CLOSED, because until then the kernel may still write
 * into it.
 */
#include "server/internal.h"

#include <string.h>

#include "core/memory.h"

static const struct kv_sm_state conn_states[] = {
	[CONN_FREE] = { "free", KV_SM_BIT(CONN_HEADER) },
	[CONN_HEADER] = { "header",
		KV_SM_BIT(CONN_STRUCTS) | KV_SM_BIT(CONN_DISPATCH) | KV_SM_BIT(CONN_LINGER) |
			KV_SM_BIT(CONN_CLOSING) },
	[CONN_STRUCTS] = { "structs", KV_SM_BIT(CONN_DISPATCH) | KV_SM_BIT(CONN_CLOSING) },
	[CONN_DISPATCH] = { "dispatch",
		KV_SM_BIT(CONN_HEADER) | KV_SM_BIT(CONN_PAYLOAD) | KV_SM_BIT(CONN_DISCARD) |
			KV_SM_BIT(CONN_LINGER) | KV_SM_BIT(CONN_CLOSING) },
	[CONN_PAYLOAD] = { "payload",
		KV_SM_BIT(CONN_HEADER) | KV_SM_BIT(CONN_DISPATCH) | KV_SM_BIT(CONN_CLOSING) },
	[CONN_DISCARD] = { "discard", KV_SM_BIT(CONN_HEADER) | KV_SM_BIT(CONN_CLOSING) },
	[CONN_LINGER] = { "linger", KV_SM_BIT(CONN_CLOSING) },
	[CONN_CLOSING] = { "closing", KV_SM_BIT(CONN_FREE) },
};

enum kv_status srv_conns_init(struct srv_server *server, struct kv_error *err)
{
	const uint32_t n = server->options->connections_max;

	kv_list_init(&server->conns_free);
	kv_list_init(&server->conns_open);
	kv_list_init(&server->timed);
	kv_list_init(&server->waiting_reply);
	kv_list_init(&server->waiting_session);
	kv_list_init(&server->waiting_blocks);
	server->conns = kv_pages_alloc((uint64_t)n * sizeof(*server->conns));
	if (!server->conns)
		return kv_fail(err, KV_NO_MEMORY, "%u connections", n);
	return KV_OK;
}

void srv_conns_finish(struct srv_server *server)
{
	kv_pages_free(server->conns, (uint64_t)server->options->connections_max * sizeof(*server->conns));
}

/* Free ones first; memory of a slot that was never used stays untouched, so that the bound costs nothing. */
static struct srv_conn *conn_take(struct srv_server *server)
{
	struct kv_list_node *node = kv_list_first(&server->conns_free);

	if (node) {
		kv_list_remove(node);
		return kv_container_of(node, struct srv_conn, link);
	}
	if (server->n_conns >= server->options->connections_max)
		return NULL;
	return &server->conns[server->n_conns];
}

static uint64_t peer_key(const struct kv_io_peer *peer)
{
	if (peer->transport == KV_IO_UNIX)
		return peer->uid;
	/* FNV-1a of the address without its port: all connections of a host are one peer. */
	uint64_t key = 0xcbf29ce484222325u;
	const char *end = strrchr(peer->address, ':');

	for (const char *c = peer->address; *c && c != end; c++)
		key = (key ^ (uint8_t)*c) * 0x100000001b3u;
	return key | 1ull << 63;
}

static void conn_accept(struct srv_server *server, const struct kv_io_event *event)
{
	struct srv_conn *conn = server->is_draining ? NULL : conn_take(server);

	if (!conn) {
		server->counters.connections_refused++;
		srv_log_limited(&server->gate_accept, server->now_ns, SRV_LOG_WARNING,
			"connection from %s refused: %s", event->peer.address,
			server->is_draining ? "draining" : "connections_max reached");
		server->io->ops->set_user(server->io, event->conn, NULL);
		server->io->ops->close(server->io, event->conn);
		return;
	}
	memset(conn, 0, sizeof(*conn));
	server->n_conns++;
	kv_sm_init(&conn->sm, conn_states, CONN_HEADER);
	conn->server = server;
	conn->io_conn = event->conn;
	conn->id = ++server->conn_id_last;
	conn->peer = event->peer;
	conn->peer_key = peer_key(&event->peer);
	conn->tenant = event->peer.transport == KV_IO_UNIX ? event->peer.uid : UINT64_MAX;
	conn->accepted_ns = server->now_ns;
	conn->accepted_empty_ns = srv_ahead_empty_ns(server);
	kv_list_init(&conn->ready);
	kv_list_push_back(&server->conns_open, &conn->link);
	kv_list_push_back(&server->timed, &conn->in_timed); /* until HELLO */
	server->counters.connections_accepted++;
	server->io->ops->set_user(server->io, event->conn, conn);
	srv_log(SRV_LOG_DEBUG, "conn %llu from %s", (unsigned long long)conn->id, conn->peer.address);
	srv_conn_advance(conn);
}

/* ---- receiving ---- */

static void ahead_drop(struct srv_conn *conn)
{
	if (!conn->ahead)
		return;
	conn->ahead = NULL;
	conn->ahead_pos = conn->ahead_len = 0;
	srv_ahead_returned(conn->server);
	conn->server->io->ops->ahead_return(conn->server->io, conn->ahead_idx);
}

static uint32_t ahead_left(const struct srv_conn *conn)
{
	return conn->ahead_len - conn->ahead_pos;
}

/* The peer owes us bytes from now on (or not any more). */
static void set_stalled(struct srv_conn *conn, bool is_stalled)
{
	conn->stalled_ns = is_stalled ? conn->server->now_ns : 0;
	conn->stalled_empty_ns = srv_ahead_empty_ns(conn->server);
	if (is_stalled && !kv_list_is_linked(&conn->in_timed))
		kv_list_push_back(&conn->server->timed, &conn->in_timed);
}

static void post_recv_ahead(struct srv_conn *conn)
{
	ahead_drop(conn);
	conn->is_recv_posted = true;
	conn->server->io->ops->recv_ahead(conn->server->io, conn->io_conn);
}

static void post_recv_into(struct srv_conn *conn, void *buf, uint64_t n_bytes)
{
	conn->is_recv_posted = true;
	conn->server->io->ops->recv_into(conn->server->io, conn->io_conn, buf,
		n_bytes < SRV_RECV_BYTES_MAX ? (uint32_t)n_bytes : SRV_RECV_BYTES_MAX);
}

/* 64 bytes are there: is it a frame, and how much of it has to be in the read-ahead? */
static void header_complete(struct srv_conn *conn)
{
	struct srv_server *server = conn->server;
	enum kv_status status;

	memset(&conn->header, 0, sizeof(conn->header));
	memset(&conn->fault, 0, sizeof(conn->fault));
	status = kvp_header_decode(conn->header_bytes, &conn->header, &conn->fault);
	if (status == KV_OK)
		status = kvp_header_check_size(&conn->header,
			conn->is_hello_done ? server->caps.frame_bytes_max : KVP_HELLO_BODY_BYTES_MAX,
			&conn->fault);
	if (status == KV_OK)
		status = kvp_check_opcode(&conn->header, &server->caps, &conn->fault);
	conn->header_ns = server->now_ns;
	conn->has_fault = status != KV_OK;
	conn->structs_bytes = 0;
	if (status == KV_OK) {
		const struct kvp_opcode_row *row = kvp_opcode_row(conn->header.opcode);
		const uint64_t n_bytes = row->payload_rule == KVP_PAYLOAD_CONTROL
			? conn->header.body_bytes
			: kvp_structs_bytes(
				  conn->header.op_bytes, conn->header.n_items, conn->header.item_bytes);

		KV_ASSERT(n_bytes <= KV_IO_AHEAD_BYTES); /* 12 KiB of structs and 2 KiB of names at most */
		conn->structs_bytes = (uint32_t)n_bytes;
	}
	kv_sm_move(&conn->sm, CONN_STRUCTS);
}

static bool step_header(struct srv_conn *conn)
{
	if (conn->server->is_lost)
		return false;
	if (conn->ahead_pos == conn->ahead_len) {
		set_stalled(conn, conn->header_have > 0);
		post_recv_ahead(conn);
		return false;
	}
	uint32_t n = KVP_HEADER_BYTES - conn->header_have;

	if (n > ahead_left(conn))
		n = ahead_left(conn);
	memcpy(conn->header_bytes + conn->header_have, conn->ahead + conn->ahead_pos, n);
	conn->header_have += n;
	conn->ahead_pos += n;
	if (conn->header_have == KVP_HEADER_BYTES)
		header_complete(conn);
	return true;
}

static bool step_structs(struct srv_conn *conn)
{
	if (ahead_left(conn) >= conn->structs_bytes) {
		set_stalled(conn, false);
		conn->n_frames_in++;
		conn->server->counters.frames_in++;
		kv_sm_move(&conn->sm, CONN_DISPATCH);
		return true;
	}
	set_stalled(conn, true);
	if (ahead_left(conn) == 0) {
		post_recv_ahead(conn);
		return false;
	}
	/* They must lie in one piece: to the front, and read on behind. */
	memmove(conn->ahead, conn->ahead + conn->ahead_pos, ahead_left(conn));
	conn->ahead_len = ahead_left(conn);
	conn->ahead_pos = 0;
	post_recv_into(conn, conn->ahead + conn->ahead_len, KV_IO_AHEAD_BYTES - conn->ahead_len);
	return false;
}

static bool step_payload(struct srv_conn *conn)
{
	struct srv_request *request = conn->request;
	uint64_t left = request->header.body_bytes - request->in_bytes;
	const uint64_t n = left < ahead_left(conn) ? left : ahead_left(conn);

	if (n > 0) {
		memcpy(request->in + request->in_bytes, conn->ahead + conn->ahead_pos, (size_t)n);
		request->in_bytes += n;
		conn->ahead_pos += (uint32_t)n;
		left -= n;
	}
	if (left > 0) {
		set_stalled(conn, true);
		ahead_drop(conn);
		post_recv_into(conn, request->in + request->in_bytes, left);
		return false;
	}
	set_stalled(conn, false);
	conn->request = NULL;
	if (!srv_request_is_intact(request, &conn->fault)) {
		/* Refused like a bad header: from CONN_DISPATCH, which can wait for a reply buffer. */
		srv_request_free(conn->server, request);
		conn->server->has_finished = true;
		conn->has_fault = true;
		conn->structs_bytes = 0;
		kv_sm_move(&conn->sm, CONN_DISPATCH);
		return true;
	}
	conn->header_have = 0;
	kv_sm_move(&conn->sm, CONN_HEADER);
	srv_request_received(request);
	return true;
}

static bool step_discard(struct srv_conn *conn)
{
	uint64_t n = conn->discard_left < ahead_left(conn) ? conn->discard_left : ahead_left(conn);

	conn->ahead_pos += (uint32_t)n;
	conn->discard_left -= n;
	if (conn->discard_left > 0) {
		set_stalled(conn, true);
		post_recv_ahead(conn);
		return false;
	}
	set_stalled(conn, false);
	conn->header_have = 0;
	kv_sm_move(&conn->sm, CONN_HEADER);
	return true;
}

/* Throws away what still comes, so that the peer can read why it is being closed. */
static bool step_linger(struct srv_conn *conn)
{
	if (!conn->is_eof)
		post_recv_ahead(conn);
	else if (!conn->is_send_posted)
		srv_conn_close(conn, NULL);
	return false; /* a posted send resumes it: conn_sent() */
}

/* False: waits for an event, which calls srv_conn_advance() again. */
static bool conn_step(struct srv_conn *conn)
{
	switch ((enum srv_conn_state)conn->sm.state) {
	case CONN_HEADER:
		return step_header(conn);
	case CONN_STRUCTS:
		return step_structs(conn);
	case CONN_DISPATCH:
		srv_dispatch(conn, conn->ahead ? conn->ahead + conn->ahead_pos : NULL);
		return conn->sm.state != CONN_DISPATCH;
	case CONN_PAYLOAD:
		return step_payload(conn);
	case CONN_DISCARD:
		return step_discard(conn);
	case CONN_LINGER:
		return step_linger(conn);
	case CONN_FREE:
	case CONN_CLOSING:
		break;
	}
	return false;
}

void srv_conn_advance(struct srv_conn *conn)
{
	while (!conn->is_recv_posted && conn->wait == WAIT_NONE && conn_step(conn))
		continue;
}

static void conn_received(struct srv_conn *conn, const struct kv_io_event *event)
{
	struct srv_server *server = conn->server;

	conn->is_recv_posted = false;
	if (event->ahead)
		srv_ahead_taken(server);
	if (conn->sm.state == CONN_CLOSING) {
		/* It goes back at CLOSED. A receive into the buffer that we own already brings none. */
		if (event->ahead) {
			conn->ahead = event->ahead;
			conn->ahead_idx = event->ahead_idx;
		}
		return;
	}
	if (event->result <= 0) {
		const bool is_inside = conn->header_have > 0 || conn->sm.state == CONN_PAYLOAD;

		conn->is_eof = true;
		if (conn->sm.state == CONN_LINGER && event->result == 0) {
			srv_conn_advance(conn);
			return;
		}
		if (is_inside && conn->sm.state != CONN_LINGER)
			server->counters.appends_aborted_closed++;
		/* Whoever half-closes after its last frame still gets its replies. */
		if (event->result == 0 && !is_inside && conn->sm.state == CONN_HEADER &&
			(conn->n_inflight > 0 || conn->filling || conn->is_send_posted))
			return;
		srv_conn_close(conn, NULL);
		return;
	}
	conn->bytes_in += (uint64_t)event->result;
	server->counters.bytes_in += (uint64_t)event->result;
	if (event->ahead) {
		conn->ahead = event->ahead;
		conn->ahead_idx = event->ahead_idx;
		conn->ahead_pos = 0;
		conn->ahead_len = (uint32_t)event->result;
	} else if (conn->sm.state == CONN_PAYLOAD) {
		conn->request->in_bytes += (uint64_t)event->result;
	} else {
		conn->ahead_len += (uint32_t)event->result;
	}
	srv_conn_advance(conn);
}

/* ---- waiting ---- */

void srv_conn_wait(struct srv_conn *conn, enum srv_wait wait, struct kv_list *list)
{
	conn->wait = wait;
	if (list && !kv_list_is_linked(&conn->in_waiting))
		kv_list_push_back(list, &conn->in_waiting);
}

static void retry_list(struct kv_list *list)
{
	struct kv_list pass;
	struct kv_list_node *node;

	/* Who still finds nothing is appended to `list` again: one pass, in order of arrival. */
	kv_list_init(&pass);
	while ((node = kv_list_first(list))) {
		kv_list_remove(node);
		kv_list_push_back(&pass, node);
	}
	while ((node = kv_list_first(&pass))) {
		struct srv_conn *conn = kv_container_of(node, struct srv_conn, in_waiting);

		kv_list_remove(node);
		conn->wait = WAIT_NONE;
		srv_conn_advance(conn);
	}
}

void srv_conns_retry_waiting(struct srv_server *server)
{
	if (server->has_finished) {
		server->has_finished = false;
		for (uint32_t i = 0; i < 2; i++) {
			if (!kv_list_is_empty(&server->slots[i].free))
				retry_list(&server->slots[i].waiting);
		}
		retry_list(&server->waiting_session);
	}
	retry_list(&server->waiting_blocks);
	if (server->replies_free)
		retry_list(&server->waiting_reply);
}

void srv_conns_goaway(struct srv_server *server)
{
	kv_list_for_each_safe (node, &server->conns_open) {
		struct srv_conn *conn = kv_container_of(node, struct srv_conn, link);

		conn->wants_goaway = conn->is_hello_done;
		srv_conn_kick_send(conn);
	}
}

/* ---- the end ---- */

void srv_conn_close(struct srv_conn *conn, const char *reason)
{
	struct srv_server *server = conn->server;

	if (conn->sm.state == CONN_CLOSING)
		return; /* said once is enough */
	if (reason)
		srv_log_limited(&server->gate_slow, server->now_ns, SRV_LOG_WARNING,
			"conn %llu from %s closed: %s", (unsigned long long)conn->id, conn->peer.address,
			reason);
	kv_sm_move(&conn->sm, CONN_CLOSING);
	kv_list_remove(&conn->in_waiting);
	kv_list_remove(&conn->in_timed);
	server->io->ops->close(server->io, conn->io_conn);
}

/* Nothing of the connection is in flight any more: give everything back. Requests in batches go on without
 * it. */
static void conn_closed(struct srv_conn *conn)
{
	struct srv_server *server = conn->server;
	struct kv_list_node *node;

	if (conn->sm.state != CONN_CLOSING)
		kv_sm_move(&conn->sm, CONN_CLOSING); /* the io gave up by itself */
	kv_list_remove(&conn->in_waiting);
	kv_list_remove(&conn->in_timed);
	if (conn->ahead)
		ahead_drop(conn);
	if (conn->request)
		srv_request_free(server, conn->request);
	if (conn->sending_request)
		srv_request_free(server, conn->sending_request);
	while ((node = kv_list_first(&conn->ready)))
		srv_request_free(server, kv_container_of(node, struct srv_request, link));
	srv_reply_free(server, conn->filling);
	srv_reply_free(server, conn->sending);
	for (uint32_t c = 0; c < 2; c++) {
		for (uint32_t i = 0; i < server->slots[c].n && conn->n_inflight > 0; i++) {
			struct srv_request *request = &server->slots[c].requests[i];

			if (request->conn == conn) {
				request->conn = NULL;
				conn->n_inflight--;
			}
		}
	}
	KV_ASSERT(conn->n_inflight == 0);
	kv_session_owner_lost(server->domain, conn->id, server->now_ns);
	server->has_finished = true;
	kv_list_remove(&conn->link);
	kv_sm_move(&conn->sm, CONN_FREE);
	server->n_conns--;
	kv_list_push_front(&server->conns_free, &conn->link);
}

void srv_conn_event(struct srv_server *server, const struct kv_io_event *event)
{
	struct srv_conn *conn = event->user;

	if (event->kind == KV_IO_ACCEPTED) {
		conn_accept(server, event);
		return;
	}
	if (!conn)
		return; /* refused at accept */
	if (event->kind == KV_IO_RECEIVED)
		conn_received(conn, event);
	else if (event->kind == KV_IO_SENT)
		srv_conn_sent(conn, event->result);
	else if (event->kind == KV_IO_CLOSED)
		conn_closed(conn);
}
