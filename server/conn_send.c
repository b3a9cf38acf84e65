/*
 * The sending half of a connection.
 *
 * Replies to control operations are packed into reply buffers; row replies go out from their slots. One send
 * is posted at a time. A peer that does not read makes the send wait; that stops its receiving through the
 * bounds on buffers and slots, and send_timeout_ms ends it.
 */
#include "server/internal.h"

uint8_t *srv_conn_reply_room(struct srv_conn *conn, uint32_t n_bytes)
{
	struct srv_server *server = conn->server;

	KV_ASSERT(n_bytes <= SRV_REPLY_BYTES);
	if (conn->filling && conn->filling->used + n_bytes > SRV_REPLY_BYTES) {
		srv_conn_kick_send(conn);
		if (conn->filling) { /* the one before is not read yet */
			srv_conn_wait(conn, WAIT_SEND, NULL);
			return NULL;
		}
	}
	if (!conn->filling)
		conn->filling = srv_reply_take(server);
	if (!conn->filling) {
		srv_conn_wait(conn, WAIT_REPLY, &server->waiting_reply);
		return NULL;
	}
	return conn->filling->bytes + conn->filling->used;
}

void srv_conn_reply_done(struct srv_conn *conn, uint32_t n_bytes)
{
	conn->filling->used += n_bytes;
	conn->server->counters.frames_out++;
	srv_conn_kick_send(conn);
}

static void post_send(struct srv_conn *conn, void *data, uint64_t n_bytes)
{
	struct srv_server *server = conn->server;
	const struct iovec iov = { .iov_base = data, .iov_len = (size_t)n_bytes };

	conn->is_send_posted = true;
	conn->send_ns = server->now_ns;
	conn->send_look_ns = 0;
	conn->bytes_out += n_bytes;
	server->counters.bytes_out += n_bytes;
	if (!kv_list_is_linked(&conn->in_timed))
		kv_list_push_back(&server->timed, &conn->in_timed);
	server->io->ops->send(server->io, conn->io_conn, &iov, 1);
}

void srv_conn_kick_send(struct srv_conn *conn)
{
	struct srv_server *server = conn->server;
	struct kv_list_node *node = kv_list_first(&conn->ready);

	if (conn->is_send_posted || conn->sm.state == CONN_CLOSING)
		return;
	if (conn->filling && conn->filling->used > 0) {
		conn->sending = conn->filling;
		conn->filling = NULL;
		post_send(conn, conn->sending->bytes, conn->sending->used);
	} else if (node && !conn->is_error_last) {
		conn->sending_request = kv_container_of(node, struct srv_request, link);
		kv_list_remove(node);
		server->counters.frames_out++;
		post_send(conn, conn->sending_request->out, conn->sending_request->out_bytes);
	} else if (conn->wants_goaway) {
		conn->wants_goaway = false;
		server->counters.frames_out++;
		post_send(conn, server->goaway_frame, sizeof(server->goaway_frame));
	}
}

void srv_conn_sent(struct srv_conn *conn, int64_t result)
{
	struct srv_server *server = conn->server;

	conn->is_send_posted = false;
	conn->send_ns = 0;
	srv_reply_free(server, conn->sending);
	conn->sending = NULL;
	if (conn->sending_request) {
		if (result == 0) {
			srv_histogram_add(&server->counters.request,
				srv_us_since(server->now_ns, conn->sending_request->header_ns));
		}
		srv_request_free(server, conn->sending_request);
		conn->sending_request = NULL;
		server->has_finished = true;
	}
	if (result < 0) {
		srv_conn_close(conn, NULL);
		return;
	}
	srv_conn_kick_send(conn);
	if (!conn->is_send_posted && conn->is_eof && !conn->filling &&
		(conn->n_inflight == 0 || conn->sm.state == CONN_LINGER)) {
		srv_conn_close(conn, NULL);
		return;
	}
	if (conn->wait == WAIT_SEND || conn->wait == WAIT_INFLIGHT) {
		conn->wait = WAIT_NONE;
		srv_conn_advance(conn);
	}
}
