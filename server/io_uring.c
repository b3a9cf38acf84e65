/*
 * core/io.h on io_uring.
 *
 * An operation that is posted only marks its connection; wait() turns the marks into submissions and enters
 * the kernel once, to submit and to wait. user_data is a tag and an index, and one switch over the tags
 * handles every completion. A connection counts what it has in flight and is given up only at zero, so a
 * completion always finds the connection it belongs to.
 *
 * Read-ahead: the kernel picks a buffer from one registered ring when data is there (POLL_FIRST: not before).
 * With the ring empty the receive fails with ENOBUFS; the connection is then queued, and buffers that come
 * back while somebody is queued are filled for the first in the queue by a plain recv(2) instead of going to
 * the ring, where anybody could snatch them. So the queue is served in order and nobody starves.
 *
 * Failure modes: a full submission queue is submitted early; marks that still find no place stay for the next
 * wait(). A full completion queue is kept by the kernel (NODROP), whose EBUSY only means: handle completions
 * first. An accept that fails for want of descriptors ends the multishot; it is armed again when a connection
 * closes, or after 100 ms.
 */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "core/memory.h"
#include "server/io_uring.h"

#define SQ_ENTRIES       1024u
#define CQ_ENTRIES       8192u
#define DESTROY_ROUNDS   100u /* of 10 ms: cancelled operations complete at once unless the kernel is stuck */
#define DESTROY_ROUND_NS 10000000
#define DESTROY_EVENTS   64u

/* ---- read-ahead buffers ---- */

void srv_io_uring_ahead_to_ring(struct uring_io *io, uint32_t ahead_idx)
{
	io_uring_buf_ring_add(io->ahead_ring, io->ahead + (uint64_t)ahead_idx * KV_IO_AHEAD_BYTES,
		KV_IO_AHEAD_BYTES, (unsigned short)ahead_idx, io->ahead_mask, 0);
	io_uring_buf_ring_advance(io->ahead_ring, 1);
	io->n_in_ring++;
}

void srv_io_uring_ahead_give(struct uring_io *io, uint32_t ahead_idx)
{
	if (kv_list_is_empty(&io->waiting))
		srv_io_uring_ahead_to_ring(io, ahead_idx);
	else
		io->held[io->n_held++] = ahead_idx; /* resumed by serve_waiting() */
}

static void uring_ahead_return(struct kv_io *base, uint32_t ahead_idx)
{
	struct uring_io *io = srv_io_uring_from_base(base);

	KV_ASSERT(ahead_idx < io->n_ahead);
	KV_ASSERT(io->n_in_ring + io->n_held < io->n_ahead);
	srv_io_uring_ahead_give(io, ahead_idx);
}

/* ---- operations ---- */

void srv_io_uring_mark(struct uring_io *io, struct kv_io_conn *conn)
{
	if (!kv_list_is_linked(&conn->turn_node))
		kv_list_push_back(&io->marked, &conn->turn_node);
}

static void post_recv(struct uring_io *io, struct kv_io_conn *conn, enum srv_io_recv recv)
{
	KV_ASSERT(conn->recv == SRV_IO_RECV_NONE);
	KV_ASSERT(!conn->is_closing);
	conn->recv = (uint8_t)recv;
	conn->wants_recv = true;
	srv_io_uring_mark(io, conn);
}

static void uring_recv_ahead(struct kv_io *base, struct kv_io_conn *conn)
{
	post_recv(srv_io_uring_from_base(base), conn, SRV_IO_RECV_AHEAD);
}

static void uring_recv_into(struct kv_io *base, struct kv_io_conn *conn, void *buf, uint32_t n_bytes)
{
	conn->recv_buf = buf;
	conn->recv_bytes = n_bytes;
	post_recv(srv_io_uring_from_base(base), conn, SRV_IO_RECV_INTO);
}

static void uring_send(struct kv_io *base, struct kv_io_conn *conn, const struct iovec iov[], uint32_t n_iov)
{
	KV_ASSERT(!conn->is_closing);
	srv_io_send_begin(conn, iov, n_iov);
	conn->wants_send = true;
	srv_io_uring_mark(srv_io_uring_from_base(base), conn);
}

static void uring_set_user(struct kv_io *base, struct kv_io_conn *conn, void *user)
{
	(void)base;
	conn->user = user;
}

/* Nothing is in flight any more. */
void srv_io_uring_finish_close(struct uring_io *io, struct kv_io_conn *conn)
{
	kv_list_remove(&conn->turn_node);
	conn->wants_cancel = false;
	close(conn->fd);
	conn->fd = -1;
	kv_list_push_back(&io->closed, &conn->turn_node);
	io->accept_resume_ns = 0;
}

static void uring_close(struct kv_io *base, struct kv_io_conn *conn)
{
	struct uring_io *io = srv_io_uring_from_base(base);

	KV_ASSERT(!conn->is_closing);
	conn->is_closing = true;
	conn->wants_recv = conn->wants_send = false;
	kv_list_remove(&conn->ahead_node);
	if (conn->n_in_flight == 0) {
		srv_io_uring_finish_close(io, conn);
		return;
	}
	conn->wants_cancel = true;
	srv_io_uring_mark(io, conn);
}

/* ---- life ---- */

static enum kv_status uring_listen(struct kv_io *base, const struct kv_io_address *address, char *bound,
	uint32_t bound_bytes_max, struct kv_error *err)
{
	struct uring_io *io = srv_io_uring_from_base(base);

	if (io->n_listeners == SRV_IO_LISTENERS_MAX)
		return kv_fail(err, KV_LIMIT, "at most %u listeners", SRV_IO_LISTENERS_MAX);

	const enum kv_status status =
		srv_io_listener_open(&io->listeners[io->n_listeners], address, bound, bound_bytes_max, err);

	if (status == KV_OK)
		io->n_listeners++;
	return status;
}

static void uring_stop_listening(struct kv_io *base)
{
	struct uring_io *io = srv_io_uring_from_base(base);

	for (uint32_t i = 0; i < io->n_listeners; i++) {
		if (io->listeners[i].is_armed && io->listeners[i].fd >= 0)
			srv_io_uring_cancel(io, TAG_ACCEPT, i);
		srv_io_listener_close(&io->listeners[i]);
	}
	io->accept_resume_ns = 0;
}

static enum kv_status uring_watch(struct kv_io *base, int fd, void *user, struct kv_error *err)
{
	struct uring_io *io = srv_io_uring_from_base(base);

	if (io->n_watches == SRV_IO_WATCHES_MAX)
		return kv_fail(err, KV_LIMIT, "at most %u watched descriptors", SRV_IO_WATCHES_MAX);
	if (fcntl(fd, F_GETFL) < 0)
		return kv_fail(err, KV_IO_ERROR, "watch descriptor %d: %s", fd, strerror(errno));
	io->watches[io->n_watches++] = (struct uring_watch){ .fd = fd, .user = user };
	return KV_OK;
}

static void uring_file_close(struct kv_io *base, int fd)
{
	(void)base;
	close(fd);
}

/* The kernel must be done with the callers' memory before destroy() returns. */
static void end_all(struct uring_io *io)
{
	struct kv_io_event events[DESTROY_EVENTS];

	io->is_ending = true;
	uring_stop_listening(&io->base);
	for (uint32_t i = 0; i < io->n_watches; i++) {
		if (io->watches[i].is_armed)
			srv_io_uring_cancel(io, TAG_WATCH_POLL, i);
	}
	for (uint32_t i = 0; i < io->conns.n_touched; i++) {
		if (io->conns.conns[i].is_used && !io->conns.conns[i].is_closing)
			uring_close(&io->base, &io->conns.conns[i]);
	}
	for (uint32_t i = 0; i < DESTROY_ROUNDS && (io->n_in_flight > 0 || io->conns.n_used > 0); i++)
		(void)srv_io_uring_wait(&io->base, DESTROY_ROUND_NS, events, DESTROY_EVENTS);
}

static void uring_destroy(struct kv_io *base)
{
	if (!base)
		return;

	struct uring_io *io = srv_io_uring_from_base(base);

	if (io->has_ring) {
		end_all(io);
		io_uring_queue_exit(&io->ring);
	}
	srv_io_conns_finish(&io->conns);
	kv_pages_free(io->ahead_ring, io->ahead_ring_bytes);
	kv_pages_free(io->ahead, (uint64_t)io->n_ahead * KV_IO_AHEAD_BYTES);
	kv_free(io->held);
	kv_free(io);
}

static const struct kv_io_ops uring_ops = {
	.name = "io_uring",
	.listen = uring_listen,
	.stop_listening = uring_stop_listening,
	.set_user = uring_set_user,
	.recv_ahead = uring_recv_ahead,
	.recv_into = uring_recv_into,
	.ahead_return = uring_ahead_return,
	.send = uring_send,
	.unsent_bytes = srv_io_unsent_bytes,
	.close = uring_close,
	.watch = uring_watch,
	.file_post = srv_io_uring_file_post,
	.file_close = uring_file_close,
	.file_path = "io_uring",
	.wait = srv_io_uring_wait,
	.destroy = uring_destroy,
};

static enum kv_status ring_denied(int reason, struct kv_error *err)
{
	const char *name = reason == ENOSYS ? "ENOSYS"
		: reason == EPERM           ? "EPERM"
		: reason == ENOMEM          ? "ENOMEM"
					    : "errno";

	return kv_fail(err, KV_UNAVAILABLE,
		"io_uring_setup: %s (%d, %s); where a container denies it, deploy/seccomp-io_uring.json is "
		"the profile "
		"that admits it",
		name, reason, strerror(reason));
}

/* Best flags first: kernels refuse the ones that they do not know with EINVAL. */
static enum kv_status make_ring(struct uring_io *io, struct kv_error *err)
{
	static const unsigned flags[] = {
		IORING_SETUP_COOP_TASKRUN | IORING_SETUP_TASKRUN_FLAG | IORING_SETUP_SINGLE_ISSUER |
			IORING_SETUP_DEFER_TASKRUN,
		IORING_SETUP_COOP_TASKRUN | IORING_SETUP_TASKRUN_FLAG,
		0,
	};
	int rc = -EINVAL;

	for (uint32_t i = 0; i < KV_LENGTH(flags) && rc == -EINVAL; i++) {
		struct io_uring_params params = { .flags = flags[i] | IORING_SETUP_CQSIZE,
			.cq_entries = CQ_ENTRIES };

		rc = io_uring_queue_init_params(SQ_ENTRIES, &io->ring, &params);
	}
	if (rc < 0)
		return ring_denied(-rc, err);
	io->has_ring = true;
	(void)io_uring_register_ring_fd(&io->ring); /* saves a lookup per call where it is known */
	return KV_OK;
}

static enum kv_status make_ahead(struct uring_io *io, uint32_t n_ahead, struct kv_error *err)
{
	struct io_uring_buf_reg reg = { .bgid = SRV_IO_URING_AHEAD_GROUP, .ring_entries = 1 };

	while (reg.ring_entries < n_ahead)
		reg.ring_entries *= 2;
	io->n_ahead = n_ahead;
	io->ahead = kv_pages_alloc((uint64_t)n_ahead * KV_IO_AHEAD_BYTES);
	io->held = kv_alloc(n_ahead, sizeof(*io->held));
	io->ahead_ring_bytes = reg.ring_entries * sizeof(struct io_uring_buf);
	io->ahead_ring = kv_pages_alloc(io->ahead_ring_bytes);
	if (!io->ahead || !io->held || !io->ahead_ring)
		return kv_fail(err, KV_NO_MEMORY, "%u read-ahead buffers", n_ahead);
	reg.ring_addr = (uint64_t)(uintptr_t)io->ahead_ring;

	const int rc = io_uring_register_buf_ring(&io->ring, &reg, 0);

	if (rc < 0)
		return kv_fail(err, KV_UNAVAILABLE,
			"io_uring: no rings of provided buffers (Linux before 5.19): %s", strerror(-rc));
	io_uring_buf_ring_init(io->ahead_ring);
	io->ahead_mask = io_uring_buf_ring_mask(reg.ring_entries);
	for (uint32_t i = 0; i < n_ahead; i++)
		srv_io_uring_ahead_to_ring(io, i);
	return KV_OK;
}

enum kv_status srv_io_uring_create(
	uint32_t n_ahead_buffers, uint32_t n_connections_max, struct kv_io **out, struct kv_error *err)
{
	enum kv_status status = srv_io_check_sizes(n_ahead_buffers, n_connections_max, err);
	struct uring_io *io = status == KV_OK ? kv_alloc(1, sizeof(*io)) : NULL;

	if (status != KV_OK)
		return status;
	if (!io)
		return kv_fail(err, KV_NO_MEMORY, "io_uring io");
	io->base.ops = &uring_ops;
	io->is_multishot_accept = true;
	kv_list_init(&io->marked);
	kv_list_init(&io->waiting);
	kv_list_init(&io->closed);
	status = make_ring(io, err);
	if (status == KV_OK)
		status = make_ahead(io, n_ahead_buffers, err);
	if (status == KV_OK)
		status = srv_io_conns_init(&io->conns, n_connections_max, err);
	if (status != KV_OK) {
		uring_destroy(&io->base);
		return status;
	}
	*out = &io->base;
	return KV_OK;
}
