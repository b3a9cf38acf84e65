/*
 * Bytes of a connection, both ways at once.
 *
 * Sending: queued frames, up to 16 per system call. Receiving: a header from the staging buffer, then the
 * body straight into its request's buffer with the staging buffer behind it, so that a large reply is not
 * copied and a small one costs one call. Everything that does not fit the protocol loses the connection:
 * after one wrong length nothing that follows can be trusted.
 */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "proto/client/conn.h"
#include "proto/crc32c.h"

#define LENGTH(array) (sizeof(array) / sizeof((array)[0]))

static void lose(struct tqkv_conn *conn, enum tqkv_status status, const char *what)
{
	struct tqkv_error failure;

	tqkv_fail(&failure, status, "connection to %.128s lost: %s%s", conn->address, what,
		conn->is_draining ? " (it was draining)" : "");
	failure.scope = TQKV_SCOPE_CONN;
	tqkv_conn_lose(conn, &failure);
}

static void lose_fault(struct tqkv_conn *conn, const struct kvp_fault *fault)
{
	struct tqkv_error failure;

	tqkv_fail_fault(&failure, fault);
	tqkv_conn_lose(conn, &failure);
}

static void lose_frame(struct tqkv_conn *conn, uint32_t at, uint64_t expected, uint64_t got, const char *what)
{
	struct kvp_fault fault;

	(void)kvp_fault_set(&fault, KV_BAD_FRAME, at, expected, got, what);
	lose_fault(conn, &fault);
}

/* ---- Sending ---- */

static void dequeue_first(struct tqkv_conn *conn)
{
	struct tqkv_request *request = conn->send_first;

	conn->send_first = request->next;
	if (!conn->send_first)
		conn->send_last = NULL;
	request->next = NULL;
	request->is_queued = false;
	tqkv_request_release_if_over(request);
}

/* Frames whose deadline passed are dropped as long as none of their bytes is on the way. */
static void drop_late(struct tqkv_conn *conn, int64_t now_ns)
{
	while (conn->send_first && conn->send_first->n_sent == 0) {
		struct tqkv_request *request = conn->send_first;

		if (request->deadline_ns == 0 || request->deadline_ns > now_ns)
			return;
		if (!request->is_done)
			tqkv_request_end(request, TQKV_DEADLINE, false);
		dequeue_first(conn);
	}
}

/* The header's deadline counts from its arrival, so it is written when the frame leaves. */
static void write_header(struct tqkv_request *request, int64_t now_ns)
{
	if (request->deadline_ns != 0) {
		const int64_t left_us = (request->deadline_ns - now_ns + 999) / 1000;

		request->header.deadline_us = left_us < 1 ? 1
			: left_us > UINT32_MAX            ? UINT32_MAX
							  : (uint32_t)left_us;
	}
	kvp_header_encode(&request->header, request->frame.data);
}

static int gather(struct tqkv_conn *conn, int64_t now_ns, struct iovec iov[TQKV_SEND_FRAMES_MAX])
{
	int n_iov = 0;

	for (struct tqkv_request *request = conn->send_first; request && n_iov < TQKV_SEND_FRAMES_MAX;
		request = request->next) {
		if (request->n_sent == 0)
			write_header(request, now_ns);
		iov[n_iov].iov_base = request->frame.data + request->n_sent;
		iov[n_iov].iov_len = request->frame_bytes - request->n_sent;
		n_iov++;
	}
	return n_iov;
}

static void mark_sent(struct tqkv_conn *conn, size_t n_bytes)
{
	while (n_bytes > 0) {
		struct tqkv_request *request = conn->send_first;
		const size_t left_bytes = request->frame_bytes - request->n_sent;

		if (n_bytes < left_bytes) {
			request->n_sent += n_bytes;
			return;
		}
		request->n_sent = request->frame_bytes;
		n_bytes -= left_bytes;
		dequeue_first(conn);
	}
}

void tqkv_conn_flush(struct tqkv_conn *conn)
{
	struct iovec iov[TQKV_SEND_FRAMES_MAX];

	while (conn->fd >= 0 && conn->send_first && !conn->is_send_broken) {
		const int64_t now_ns = tqkv_now_ns();

		drop_late(conn, now_ns);

		struct msghdr msg = { .msg_iov = iov, .msg_iovlen = (size_t)gather(conn, now_ns, iov) };

		if (msg.msg_iovlen == 0)
			return;

		const ssize_t n_bytes = sendmsg(conn->fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT);

		if (n_bytes >= 0) {
			mark_sent(conn, (size_t)n_bytes);
		} else if (errno == EAGAIN || errno == EWOULDBLOCK) {
			return;
		} else if (errno != EINTR) {
			/* A server that refuses a frame answers before it closes: the reason may still be
			 * read. */
			conn->is_send_broken = true;
		}
	}
}

/* ---- Receiving ---- */

/* GOAWAY and the last words of a server that could not trust our header: request id 0. */
static void finish_oob(struct tqkv_conn *conn)
{
	struct tqkv_error failure;

	conn->is_receiving_oob = false;
	if (conn->rx_header.opcode == KVP_OP_GOAWAY) {
		conn->is_draining = true;
		return;
	}
	tqkv_reply_error(&conn->rx_header, conn->oob, &failure);
	/* To a header of another version the server answers with HELLO's struct, which has no text. */
	if (conn->rx_header.opcode == KVP_OP_HELLO)
		snprintf(failure.message, sizeof(failure.message), "the server refused the connection: %s",
			tqkv_status_text(conn->rx_header.status));
	failure.scope = TQKV_SCOPE_CONN;
	tqkv_conn_lose(conn, &failure);
}

static void finish_body(struct tqkv_conn *conn)
{
	struct tqkv_request *request = conn->receiving;
	const uint8_t *body = request ? request->reply.data : conn->oob;

	if (conn->rx_header.flags & KVP_FLAG_BODY_CRC) {
		const uint32_t crc = kvp_crc32c(0, body, (size_t)conn->rx_header.body_bytes);
		struct kvp_fault fault;

		if (kvp_check_body_crc(&conn->rx_header, crc, &fault) != KV_OK) {
			lose_fault(conn, &fault);
			return;
		}
	}
	if (!request) {
		finish_oob(conn);
		return;
	}
	conn->receiving = NULL;
	request->reply_header = conn->rx_header;
	tqkv_request_end(request, TQKV_OK, false);
}

static void begin_oob(struct tqkv_conn *conn)
{
	const struct kvp_header *header = &conn->rx_header;

	if (header->opcode != KVP_OP_GOAWAY && header->status == KV_OK) {
		lose_frame(conn, KVP_AT_REQUEST_ID, 1, 0, "a reply without request id");
		return;
	}
	if (header->body_bytes > sizeof(conn->oob)) {
		lose_frame(conn, KVP_AT_BODY_BYTES, sizeof(conn->oob), header->body_bytes,
			"body of a frame without request id");
		return;
	}
	conn->is_receiving_oob = true;
}

/* Finds the request of the header in the staging buffer and makes room for its body. */
static void begin_body(struct tqkv_conn *conn)
{
	struct kvp_header *header = &conn->rx_header;
	struct kvp_fault fault;

	if (kvp_header_decode(conn->staging + conn->staging_first, header, &fault) != KV_OK ||
		kvp_check_reply(header, conn->server.frame_bytes_max, &fault) != KV_OK) {
		lose_fault(conn, &fault);
		return;
	}
	conn->staging_first += KVP_HEADER_BYTES;
	conn->rx_body_bytes = 0;
	if (header->request_id == 0) {
		begin_oob(conn);
		return;
	}

	struct tqkv_request *request = tqkv_request_find(conn, header->request_id);

	if (!request || request->is_done || request->n_sent == 0) {
		lose_frame(conn, KVP_AT_REQUEST_ID, conn->last_id, header->request_id,
			"a reply to no request in flight");
		return;
	}
	if (header->opcode != request->header.opcode) {
		lose_frame(conn, KVP_AT_OPCODE, request->header.opcode, header->opcode,
			"the reply has another opcode than its request");
		return;
	}
	if (!tqkv_buffer_take(conn, (size_t)header->body_bytes, &request->reply)) {
		lose(conn, TQKV_NO_MEMORY, "no memory for a reply");
		return;
	}
	conn->receiving = request;
}

static bool is_in_body(const struct tqkv_conn *conn)
{
	return conn->receiving || conn->is_receiving_oob;
}

static uint8_t *body_rest(struct tqkv_conn *conn, size_t *n_bytes)
{
	uint8_t *body = conn->receiving ? conn->receiving->reply.data : conn->oob;

	*n_bytes = (size_t)(conn->rx_header.body_bytes - conn->rx_body_bytes);
	return body + conn->rx_body_bytes;
}

/* Consumes the staging buffer as far as whole headers and bodies go. */
static void parse(struct tqkv_conn *conn)
{
	while (conn->fd >= 0) {
		if (!is_in_body(conn)) {
			if (conn->staging_end - conn->staging_first < KVP_HEADER_BYTES)
				return;
			begin_body(conn);
			continue;
		}

		size_t n_bytes;
		uint8_t *rest = body_rest(conn, &n_bytes);

		if (n_bytes > conn->staging_end - conn->staging_first)
			n_bytes = conn->staging_end - conn->staging_first;
		if (n_bytes > 0)
			memcpy(rest, conn->staging + conn->staging_first, n_bytes);
		conn->staging_first += n_bytes;
		conn->rx_body_bytes += n_bytes;
		if (conn->rx_body_bytes < conn->rx_header.body_bytes)
			return;
		finish_body(conn);
	}
}

/* One readv(). False: nothing more for now, or the connection was lost. */
static bool receive_once(struct tqkv_conn *conn)
{
	struct iovec iov[2];
	int n_iov = 0;
	size_t body_bytes = 0;

	/* Inside a body the staging buffer is empty; otherwise it holds the start of a header at most. */
	if (conn->staging_first > 0) {
		memmove(conn->staging, conn->staging + conn->staging_first,
			conn->staging_end - conn->staging_first);
		conn->staging_end -= conn->staging_first;
		conn->staging_first = 0;
	}
	if (is_in_body(conn)) {
		iov[n_iov].iov_base = body_rest(conn, &body_bytes);
		iov[n_iov++].iov_len = body_bytes;
	}
	iov[n_iov].iov_base = conn->staging + conn->staging_end;
	iov[n_iov++].iov_len = sizeof(conn->staging) - conn->staging_end;

	const ssize_t n_read = readv(conn->fd, iov, n_iov);

	if (n_read < 0) {
		if (errno == EINTR)
			return true;
		if (errno != EAGAIN && errno != EWOULDBLOCK)
			lose(conn, TQKV_IO_ERROR, strerror(errno));
		return false;
	}
	if (n_read == 0) {
		lose(conn, TQKV_IO_ERROR, "the server closed the connection");
		return false;
	}

	const size_t n_body = (size_t)n_read < body_bytes ? (size_t)n_read : body_bytes;

	conn->rx_body_bytes += n_body;
	conn->staging_end += (size_t)n_read - n_body;
	parse(conn);
	return conn->fd >= 0 && is_in_body(conn);
}

enum tqkv_status tqkv_conn_turn(struct tqkv_conn *conn, int64_t deadline_ns)
{
	const uint64_t n_done = conn->n_done;

	tqkv_conn_flush(conn);
	if (conn->fd < 0)
		return conn->failure.status;
	if (conn->n_done != n_done)
		return TQKV_OK;

	struct pollfd poll_fd = { .fd = conn->fd, .events = POLLIN };

	if (conn->send_first && !conn->is_send_broken)
		poll_fd.events |= POLLOUT;

	const int n_ready = poll(&poll_fd, 1, tqkv_poll_timeout_ms(deadline_ns));

	if (n_ready == 0 || (n_ready < 0 && errno == EINTR))
		return tqkv_now_ns() >= deadline_ns ? TQKV_DEADLINE : TQKV_OK;
	if (n_ready < 0) {
		lose(conn, TQKV_IO_ERROR, "poll failed");
	} else if (poll_fd.revents & ~POLLOUT) {
		while (receive_once(conn))
			;
	}
	return conn->fd < 0 ? conn->failure.status : TQKV_OK;
}
