/*
 * One turn of io_uring: marks become submissions, one call enters the kernel, completions become events.
 */
#include <errno.h>
#include <poll.h>
#include <unistd.h>

#include "server/io_uring.h"

#define CQES_PER_ROUND 64u

static uint8_t *ahead_at(const struct uring_io *io, uint32_t ahead_idx)
{
	return io->ahead + (uint64_t)ahead_idx * KV_IO_AHEAD_BYTES;
}

/* ---- submission ---- */

/* False: completions must be handled first. */
bool srv_io_uring_has_sqes(struct uring_io *io, unsigned n)
{
	if (io_uring_sq_space_left(&io->ring) >= n)
		return true;
	(void)io_uring_submit(&io->ring); /* EBUSY and EAGAIN show as no space */
	return io_uring_sq_space_left(&io->ring) >= n;
}

static bool submit_conn(struct uring_io *io, struct kv_io_conn *conn)
{
	const unsigned n = (unsigned)conn->wants_cancel + conn->wants_recv + conn->wants_send;

	if (!srv_io_uring_has_sqes(io, n))
		return false;
	if (conn->wants_recv) {
		struct io_uring_sqe *sqe = io_uring_get_sqe(&io->ring);

		if (conn->recv == SRV_IO_RECV_AHEAD) {
			io_uring_prep_recv(sqe, conn->fd, NULL, KV_IO_AHEAD_BYTES, 0);
			sqe->ioprio |= IORING_RECVSEND_POLL_FIRST;
			sqe->flags |= IOSQE_BUFFER_SELECT;
			sqe->buf_group = SRV_IO_URING_AHEAD_GROUP;
		} else {
			io_uring_prep_recv(sqe, conn->fd, conn->recv_buf, conn->recv_bytes, 0);
		}
		io_uring_sqe_set_data64(sqe, srv_io_uring_tagged(TAG_RECV, conn->conn_idx));
	}
	if (conn->wants_send) {
		struct io_uring_sqe *sqe = io_uring_get_sqe(&io->ring);

		/* Not MSG_WAITALL: srv_io_unsent_bytes() has to see how far a long one is. */
		io_uring_prep_sendmsg(sqe, conn->fd, &conn->msg, MSG_NOSIGNAL);
		io_uring_sqe_set_data64(sqe, srv_io_uring_tagged(TAG_SEND, conn->conn_idx));
	}
	if (conn->wants_cancel) {
		struct io_uring_sqe *sqe = io_uring_get_sqe(&io->ring);

		io_uring_prep_cancel_fd(sqe, conn->fd, IORING_ASYNC_CANCEL_ALL);
		io_uring_sqe_set_data64(sqe, srv_io_uring_tagged(TAG_CANCEL, conn->conn_idx));
	}
	conn->wants_cancel = conn->wants_recv = conn->wants_send = false;
	conn->n_in_flight = (uint8_t)(conn->n_in_flight + n);
	io->n_in_flight += n;
	return true;
}

static bool arm_listener(struct uring_io *io, uint32_t listener_idx)
{
	struct srv_io_listener *listener = &io->listeners[listener_idx];

	if (!srv_io_uring_has_sqes(io, 1))
		return false;

	struct io_uring_sqe *sqe = io_uring_get_sqe(&io->ring);

	if (io->is_multishot_accept)
		io_uring_prep_multishot_accept(sqe, listener->fd, NULL, NULL, SOCK_CLOEXEC);
	else
		io_uring_prep_accept(sqe, listener->fd, NULL, NULL, SOCK_CLOEXEC);
	io_uring_sqe_set_data64(sqe, srv_io_uring_tagged(TAG_ACCEPT, listener_idx));
	listener->is_armed = true;
	io->n_in_flight++;
	return true;
}

/* Poll, then read: also right for a descriptor that does not block, which a lone read would fail on. */
static bool arm_watch(struct uring_io *io, uint32_t watch_idx)
{
	struct uring_watch *watch = &io->watches[watch_idx];

	if (!srv_io_uring_has_sqes(io, 2)) /* a chain must be submitted in one piece */
		return false;

	struct io_uring_sqe *sqe = io_uring_get_sqe(&io->ring);

	io_uring_prep_poll_add(sqe, watch->fd, POLLIN);
	sqe->flags |= IOSQE_IO_LINK | IOSQE_CQE_SKIP_SUCCESS;
	io_uring_sqe_set_data64(sqe, srv_io_uring_tagged(TAG_WATCH_POLL, watch_idx));
	sqe = io_uring_get_sqe(&io->ring);
	io_uring_prep_read(sqe, watch->fd, &watch->count, sizeof(watch->count), 0);
	io_uring_sqe_set_data64(sqe, srv_io_uring_tagged(TAG_WATCH, watch_idx));
	watch->is_armed = true;
	io->n_in_flight++;
	return true;
}

void srv_io_uring_cancel(struct uring_io *io, enum uring_tag tag, uint32_t idx)
{
	if (!srv_io_uring_has_sqes(io, 1))
		return;

	struct io_uring_sqe *sqe = io_uring_get_sqe(&io->ring);

	io_uring_prep_cancel64(sqe, srv_io_uring_tagged(tag, idx), 0);
	io_uring_sqe_set_data64(sqe, srv_io_uring_tagged(TAG_NOBODY, 0));
}

/* False: something did not find a place and stays marked. */
static bool submit_marked(struct uring_io *io)
{
	for (uint32_t i = 0; i < io->n_listeners && io->accept_resume_ns == 0; i++) {
		if (io->listeners[i].fd >= 0 && !io->listeners[i].is_armed && !arm_listener(io, i))
			return false;
	}
	for (uint32_t i = 0; i < io->n_watches && !io->is_ending; i++) {
		if (io->watches[i].fd >= 0 && !io->watches[i].is_armed && !arm_watch(io, i))
			return false;
	}
	while (!kv_list_is_empty(&io->marked)) {
		struct kv_io_conn *conn =
			kv_container_of(kv_list_first(&io->marked), struct kv_io_conn, turn_node);

		if (!submit_conn(io, conn))
			return false;
		kv_list_remove(&conn->turn_node);
	}
	return srv_io_uring_submit_files(io);
}

/* ---- completions ---- */

/* True when the connection was closing: the completion then only counts. */
static bool take_completion(struct uring_io *io, struct kv_io_conn *conn)
{
	KV_ASSERT(conn->n_in_flight > 0);
	conn->n_in_flight--;
	io->n_in_flight--;
	if (!conn->is_closing)
		return false;
	if (conn->n_in_flight == 0)
		srv_io_uring_finish_close(io, conn);
	return true;
}

static void recv_done(
	struct uring_io *io, struct kv_io_conn *conn, const struct io_uring_cqe *cqe, struct srv_io_out *out)
{
	const bool is_ahead = conn->recv == SRV_IO_RECV_AHEAD;
	uint32_t ahead_idx = SRV_IO_NONE;

	if (cqe->flags & IORING_CQE_F_BUFFER) {
		ahead_idx = cqe->flags >> IORING_CQE_BUFFER_SHIFT;
		io->n_in_ring--;
	}

	const bool is_over = take_completion(io, conn);
	const int64_t result = SRV_IO_FAULT(SRV_IO_FAULT_RECV, cqe->res);

	if (ahead_idx != SRV_IO_NONE && (is_over || result <= 0)) {
		srv_io_uring_ahead_give(io, ahead_idx);
		ahead_idx = SRV_IO_NONE;
	}
	if (is_over)
		return;
	if (is_ahead && result == -ENOBUFS && io->n_in_ring == 0) {
		kv_list_push_back(&io->waiting, &conn->ahead_node); /* resumed by serve_waiting() */
	} else if (result == -EINTR || result == -EAGAIN || (is_ahead && result == -ENOBUFS)) {
		conn->wants_recv = true;
		srv_io_uring_mark(io, conn);
	} else {
		srv_io_out_received(out, conn, result,
			ahead_idx != SRV_IO_NONE ? ahead_at(io, ahead_idx) : NULL, ahead_idx);
	}
}

static void send_done(struct uring_io *io, struct kv_io_conn *conn, int32_t res, struct srv_io_out *out)
{
	const int64_t result = SRV_IO_FAULT(SRV_IO_FAULT_SEND, res);

	if (take_completion(io, conn))
		return;
	if (result == -EINTR || result == -EAGAIN ||
		(result >= 0 && !srv_io_send_advance(conn, (uint64_t)result))) {
		conn->wants_send = true;
		srv_io_uring_mark(io, conn);
	} else {
		srv_io_out_sent(out, conn, result < 0 ? result : 0);
	}
}

static void accept_done(
	struct uring_io *io, uint32_t listener_idx, const struct io_uring_cqe *cqe, struct srv_io_out *out)
{
	struct srv_io_listener *listener = &io->listeners[listener_idx];

	if (!(cqe->flags & IORING_CQE_F_MORE)) {
		listener->is_armed = false;
		io->n_in_flight--;
	}
	if (cqe->res >= 0) {
		struct kv_io_conn *conn = listener->fd < 0
			? NULL
			: srv_io_conns_take(&io->conns, cqe->res, listener->transport);

		if (conn)
			srv_io_peer_fill(conn->fd, listener->transport,
				&srv_io_out_add(out, KV_IO_ACCEPTED, conn)->peer);
		else
			close(cqe->res); /* one too many, or accepted while listening ended */
		return;
	}
	if (listener->fd < 0 || srv_io_accept_may_retry(-cqe->res))
		return;
	if (cqe->res == -EINVAL && io->is_multishot_accept) {
		io->is_multishot_accept = false; /* an older kernel: one accept at a time */
		return;
	}
	io->accept_resume_ns = srv_io_now_ns() + SRV_IO_ACCEPT_PAUSE_NS;
}

static void watch_done(struct uring_io *io, uint32_t watch_idx, int32_t res, struct srv_io_out *out)
{
	struct uring_watch *watch = &io->watches[watch_idx];

	if (!watch->is_armed)
		return;
	io->n_in_flight--;
	watch->is_armed = false;
	if (res == (int32_t)sizeof(watch->count))
		srv_io_out_add(out, KV_IO_WATCHED, NULL)->user = watch->user;
	else if (res != -EAGAIN && res != -EINTR)
		watch->fd = -1; /* not an eventfd any more: arming it again would spin */
}

/* At most one event. */
static void handle(struct uring_io *io, const struct io_uring_cqe *cqe, struct srv_io_out *out)
{
	const uint32_t idx = (uint32_t)cqe->user_data;

	switch ((enum uring_tag)(cqe->user_data >> SRV_IO_URING_TAG_SHIFT)) {
	case TAG_RECV:
		recv_done(io, &io->conns.conns[idx], cqe, out);
		return;
	case TAG_SEND:
		send_done(io, &io->conns.conns[idx], cqe->res, out);
		return;
	case TAG_CANCEL:
		(void)take_completion(io, &io->conns.conns[idx]);
		return;
	case TAG_ACCEPT:
		accept_done(io, idx, cqe, out);
		return;
	case TAG_WATCH_POLL: /* only when the poll failed; most kernels then keep quiet about the read behind
				it */
	case TAG_WATCH:
		watch_done(io, idx, cqe->res, out);
		return;
	case TAG_FILE:
		srv_io_uring_file_done(io, idx, cqe->res, out);
		return;
	case TAG_NOBODY:
		return;
	}
}

static uint32_t handle_completions(struct uring_io *io, struct srv_io_out *out)
{
	struct io_uring_cqe *cqes[CQES_PER_ROUND];
	uint32_t n_handled = 0;

	for (;;) {
		const uint32_t n_room = out->n_max - out->n;
		const uint32_t n = n_room == 0 ? 0
					       : io_uring_peek_batch_cqe(&io->ring, cqes,
							 n_room < CQES_PER_ROUND ? n_room : CQES_PER_ROUND);

		for (uint32_t i = 0; i < n; i++)
			handle(io, cqes[i], out);
		if (n == 0)
			return n_handled;
		io_uring_cq_advance(&io->ring, n);
		n_handled += n;
	}
}

/* Fills buffers that came back for the connections that wait for one, in their order. */
static void serve_waiting(struct uring_io *io, struct srv_io_out *out)
{
	while (io->n_held > 0 && !kv_list_is_empty(&io->waiting) && !srv_io_out_is_full(out)) {
		struct kv_io_conn *conn =
			kv_container_of(kv_list_first(&io->waiting), struct kv_io_conn, ahead_node);
		const uint32_t ahead_idx = io->held[io->n_held - 1];
		const ssize_t rc = recv(conn->fd, ahead_at(io, ahead_idx), KV_IO_AHEAD_BYTES, MSG_DONTWAIT);
		const int64_t result = SRV_IO_FAULT(SRV_IO_FAULT_RECV, rc < 0 ? -errno : rc);

		kv_list_remove(&conn->ahead_node);
		if (result > 0) {
			io->n_held--;
			srv_io_out_received(out, conn, result, ahead_at(io, ahead_idx), ahead_idx);
		} else if (result == -EAGAIN || result == -EINTR) {
			conn->wants_recv = true;
			srv_io_uring_mark(io, conn);
		} else {
			srv_io_out_received(out, conn, result, NULL, SRV_IO_NONE);
		}
	}
	while (io->n_held > 0 && kv_list_is_empty(&io->waiting))
		srv_io_uring_ahead_to_ring(io, io->held[--io->n_held]);
}

static void report_closed(struct uring_io *io, struct srv_io_out *out)
{
	while (!kv_list_is_empty(&io->closed) && !srv_io_out_is_full(out)) {
		struct kv_io_conn *conn =
			kv_container_of(kv_list_first(&io->closed), struct kv_io_conn, turn_node);

		kv_list_remove(&conn->turn_node);
		srv_io_out_add(out, KV_IO_CLOSED, conn);
		srv_io_conns_give(
			&io->conns, conn); /* out of use from here on; the next accept may take it */
	}
}

/* ---- the turn ---- */

/* Submits and waits for one completion. 0, or what the kernel refused for good. */
static int enter(struct uring_io *io, int64_t timeout_ns)
{
	struct io_uring_cqe *unused;
	int rc = 0;

	if (timeout_ns == 0) {
		/* Busy polling: no system call when there is nothing to submit and nothing that needs the
		 * kernel. */
		const unsigned flags = __atomic_load_n(io->ring.sq.kflags, __ATOMIC_ACQUIRE);

		if (io_uring_sq_ready(&io->ring) > 0 ||
			(flags & (IORING_SQ_TASKRUN | IORING_SQ_CQ_OVERFLOW)) != 0)
			rc = io_uring_submit_and_get_events(&io->ring);
	} else if (timeout_ns < 0) {
		rc = io_uring_submit_and_wait(&io->ring, 1);
	} else {
		struct __kernel_timespec timeout = { .tv_sec = timeout_ns / 1000000000,
			.tv_nsec = timeout_ns % 1000000000 };

		rc = io_uring_submit_and_wait_timeout(&io->ring, &unused, 1, &timeout, NULL);
	}
	/* EBUSY: completions first. EAGAIN: no memory for a request just now; what is not submitted stays
	 * queued. */
	return rc >= 0 || rc == -ETIME || rc == -EINTR || rc == -EBUSY || rc == -EAGAIN ? 0 : rc;
}

static int64_t cut_by_pause(struct uring_io *io, int64_t timeout_ns)
{
	if (io->accept_resume_ns == 0)
		return timeout_ns;

	const int64_t pause_ns = srv_io_until_ns(io->accept_resume_ns, srv_io_now_ns());

	if (pause_ns == 0)
		io->accept_resume_ns = 0;
	return timeout_ns < 0 || timeout_ns > pause_ns ? pause_ns : timeout_ns;
}

int srv_io_uring_wait(
	struct kv_io *base, int64_t timeout_ns, struct kv_io_event events[], uint32_t n_events_max)
{
	struct uring_io *io = srv_io_uring_from_base(base);
	struct srv_io_out out = { .events = events, .n_max = n_events_max };
	const uint64_t deadline_ns = srv_io_deadline_ns(timeout_ns);
	int64_t left_ns = timeout_ns;

	KV_ASSERT(n_events_max > 0);
	for (;;) {
		report_closed(io, &out);
		serve_waiting(io, &out);

		const int64_t wait_ns = cut_by_pause(io, left_ns);
		const bool is_submitted = submit_marked(io);
		const int error = enter(io, out.n > 0 || !is_submitted ? 0 : wait_ns);
		const uint32_t n_handled = handle_completions(io, &out);

		report_closed(io, &out);
		serve_waiting(io, &out);
		if (out.n > 0)
			return (int)out.n;
		if (error != 0 || timeout_ns == 0)
			return error;
		if (n_handled == 0 && is_submitted)
			return 0; /* timeout or signal */
		if (deadline_ns != 0 && (left_ns = srv_io_until_ns(deadline_ns, srv_io_now_ns())) == 0)
			return 0;
	}
}
