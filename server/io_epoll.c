/*
 * core/io.h on epoll, for machines that deny io_uring.
 *
 * A connection is registered once, edge-triggered for both directions, and remembers whether the last attempt
 * or edge says that it may receive or send. Posting an operation puts it on the turn list when an attempt
 * makes sense; otherwise the edge does. wait() works the list off in order, one receive and one send attempt
 * per connection and turn, so a busy connection cannot keep the others waiting, and idle connections cost no
 * system call.
 *
 * Failure modes: a short receive is not taken as "nothing left" (ancillary data can shorten one), so every
 * quiet connection costs one EAGAIN. A wait() that ran out of room in the caller's array polls first the next
 * time, so that listeners and watches are seen however busy connections are.
 */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "core/checked.h"
#include "core/memory.h"
#include "server/io_common.h"
#include "server/io_file.h"

#define POLL_EVENTS_MAX 256
/* New connections per listener and turn: the others' turn comes after that. */
#define ACCEPTS_PER_TURN 32u
#define TAG_SHIFT        32u

enum tag { TAG_CONN, TAG_LISTENER, TAG_WATCH, TAG_FILES };

struct watch {
	int fd;
	void *user;
};

struct epoll_io {
	struct kv_io base;
	int epoll_fd;
	bool has_pwait2; /* epoll_pwait2(): timeouts below a millisecond */
	bool must_poll_first;
	struct srv_io_conns conns;
	struct kv_list turn;    /* connections with an operation that is worth an attempt */
	struct kv_list waiting; /* receives without a read-ahead buffer, although something is there */
	struct kv_list closed;  /* CLOSED to be reported */
	uint8_t *ahead;         /* [n_ahead, KV_IO_AHEAD_BYTES] */
	uint32_t *ahead_free;   /* stack of free buffers */
	uint32_t n_ahead, n_ahead_free;
	struct srv_io_listener listeners[SRV_IO_LISTENERS_MAX];
	uint32_t n_listeners;
	uint64_t accept_resume_ns; /* 0: not paused */
	struct watch watches[SRV_IO_WATCHES_MAX];
	uint32_t n_watches;
	struct srv_io_file_thread files;
	struct kv_io_file *failed; /* posted while there was no thread for them: over already */
};

static struct epoll_io *from_base(struct kv_io *io)
{
	return kv_container_of(io, struct epoll_io, base);
}

static uint64_t tagged(enum tag tag, uint32_t idx)
{
	return (uint64_t)tag << TAG_SHIFT | idx;
}

static int control(struct epoll_io *io, int op, int fd, uint32_t events, uint64_t data)
{
	struct epoll_event event = { .events = events, .data.u64 = data };

	return epoll_ctl(io->epoll_fd, op, fd, &event);
}

/* ---- operations ---- */

static void enqueue(struct epoll_io *io, struct kv_io_conn *conn)
{
	if (!kv_list_is_linked(&conn->turn_node))
		kv_list_push_back(&io->turn, &conn->turn_node);
}

static void post_recv(struct epoll_io *io, struct kv_io_conn *conn, enum srv_io_recv recv)
{
	KV_ASSERT(conn->recv == SRV_IO_RECV_NONE);
	KV_ASSERT(!conn->is_closing);
	conn->recv = (uint8_t)recv;
	if (conn->may_recv)
		enqueue(io, conn);
}

static void epoll_recv_ahead(struct kv_io *base, struct kv_io_conn *conn)
{
	post_recv(from_base(base), conn, SRV_IO_RECV_AHEAD);
}

static void epoll_recv_into(struct kv_io *base, struct kv_io_conn *conn, void *buf, uint32_t n_bytes)
{
	conn->recv_buf = buf;
	conn->recv_bytes = n_bytes;
	post_recv(from_base(base), conn, SRV_IO_RECV_INTO);
}

static void epoll_send(struct kv_io *base, struct kv_io_conn *conn, const struct iovec iov[], uint32_t n_iov)
{
	KV_ASSERT(!conn->is_closing);
	srv_io_send_begin(conn, iov, n_iov);
	if (conn->may_send)
		enqueue(from_base(base), conn);
}

static void epoll_ahead_return(struct kv_io *base, uint32_t ahead_idx)
{
	struct epoll_io *io = from_base(base);

	KV_ASSERT(ahead_idx < io->n_ahead);
	KV_ASSERT(io->n_ahead_free < io->n_ahead);
	io->ahead_free[io->n_ahead_free++] = ahead_idx;
}

static void arm_listener(struct epoll_io *io, uint32_t listener_idx, bool is_armed)
{
	struct srv_io_listener *listener = &io->listeners[listener_idx];

	if (listener->fd < 0 || listener->is_armed == is_armed)
		return;
	(void)control(
		io, EPOLL_CTL_MOD, listener->fd, is_armed ? EPOLLIN : 0, tagged(TAG_LISTENER, listener_idx));
	listener->is_armed = is_armed;
}

static void pause_accept(struct epoll_io *io)
{
	io->accept_resume_ns = srv_io_now_ns() + SRV_IO_ACCEPT_PAUSE_NS;
	for (uint32_t i = 0; i < io->n_listeners; i++)
		arm_listener(io, i, false);
}

static void resume_accept(struct epoll_io *io)
{
	io->accept_resume_ns = 0;
	for (uint32_t i = 0; i < io->n_listeners; i++)
		arm_listener(io, i, true);
}

static void epoll_close(struct kv_io *base, struct kv_io_conn *conn)
{
	struct epoll_io *io = from_base(base);

	KV_ASSERT(!conn->is_closing);
	conn->is_closing = true;
	kv_list_remove(&conn->turn_node);
	kv_list_remove(&conn->ahead_node);
	close(conn->fd); /* nothing is ever in flight here, and closing unregisters it */
	conn->fd = -1;
	kv_list_push_back(&io->closed, &conn->turn_node);
	if (io->accept_resume_ns != 0)
		resume_accept(io);
}

static void epoll_set_user(struct kv_io *base, struct kv_io_conn *conn, void *user)
{
	(void)base;
	conn->user = user;
}

/* ---- files ---- */

static bool start_files(struct epoll_io *io)
{
	if (io->files.event_fd >= 0)
		return true;
	if (srv_io_file_thread_start(&io->files, NULL) != KV_OK)
		return false;
	if (control(io, EPOLL_CTL_ADD, io->files.event_fd, EPOLLIN, tagged(TAG_FILES, 0)) == 0)
		return true;
	srv_io_file_thread_stop(&io->files);
	return false;
}

static void epoll_file_post(struct kv_io *base, struct kv_io_file *file)
{
	struct epoll_io *io = from_base(base);

	if (start_files(io)) {
		srv_io_file_thread_post(&io->files, file);
		return;
	}
	file->result = -ENOMEM;
	file->next = io->failed;
	io->failed = file;
}

static void epoll_file_close(struct kv_io *base, int fd)
{
	(void)base;
	close(fd);
}

static void report_failed(struct epoll_io *io, struct srv_io_out *out)
{
	while (io->failed && !srv_io_out_is_full(out)) {
		struct kv_io_file *file = io->failed;

		io->failed = file->next;
		srv_io_out_add(out, KV_IO_FILE, NULL)->file = file;
	}
}

/* Level-triggered, and the counter is read only when nothing is left: what finds no room now comes again. */
static void files_ready(struct epoll_io *io, struct srv_io_out *out)
{
	uint64_t count;

	while (!srv_io_out_is_full(out)) {
		struct kv_io_file *file = srv_io_file_thread_take(&io->files);

		if (!file) {
			(void)!read(io->files.event_fd, &count, sizeof(count));
			file = srv_io_file_thread_take(&io->files); /* finished in between */
		}
		if (!file)
			return;
		srv_io_out_add(out, KV_IO_FILE, NULL)->file = file;
	}
}

/* ---- attempts ---- */

static void try_send(struct epoll_io *io, struct kv_io_conn *conn, struct srv_io_out *out)
{
	const ssize_t rc = sendmsg(conn->fd, &conn->msg, MSG_NOSIGNAL | MSG_DONTWAIT);
	const int64_t result = SRV_IO_FAULT(SRV_IO_FAULT_SEND, rc < 0 ? -errno : rc);

	if (result == -EAGAIN)
		conn->may_send = false; /* resumed by the next edge */
	else if (result == -EINTR)
		enqueue(io, conn);
	else if (result < 0)
		srv_io_out_sent(out, conn, result);
	else if (srv_io_send_advance(conn, (uint64_t)result))
		srv_io_out_sent(out, conn, 0);
	else
		enqueue(io, conn); /* goes on in its next turn */
}

static void try_recv(struct epoll_io *io, struct kv_io_conn *conn, struct srv_io_out *out)
{
	const bool is_ahead = conn->recv == SRV_IO_RECV_AHEAD;
	uint32_t ahead_idx = SRV_IO_NONE;
	uint8_t *buf = conn->recv_buf;
	uint32_t n_bytes = conn->recv_bytes;

	if (is_ahead) {
		if (io->n_ahead_free == 0) {
			kv_list_push_back(&io->waiting, &conn->ahead_node); /* resumed by ahead_return() */
			return;
		}
		ahead_idx = io->ahead_free[--io->n_ahead_free];
		buf = io->ahead + (uint64_t)ahead_idx * KV_IO_AHEAD_BYTES;
		n_bytes = KV_IO_AHEAD_BYTES;
	}

	const ssize_t rc = recv(conn->fd, buf, n_bytes, MSG_DONTWAIT);
	const int64_t result = SRV_IO_FAULT(SRV_IO_FAULT_RECV, rc < 0 ? -errno : rc);

	if (is_ahead && result <= 0) {
		io->ahead_free[io->n_ahead_free++] = ahead_idx;
		ahead_idx = SRV_IO_NONE;
		buf = NULL;
	}
	if (result == -EAGAIN)
		conn->may_recv = false; /* resumed by the next edge */
	else if (result == -EINTR)
		enqueue(io, conn);
	else
		srv_io_out_received(out, conn, result, is_ahead ? buf : NULL, ahead_idx);
}

/* One attempt of each kind per connection on the list, as long as both of its events fit. */
static void run_turn(struct epoll_io *io, struct srv_io_out *out)
{
	/* First come, first served: whoever waited for a buffer goes before those that just became readable.
	 */
	while (io->n_ahead_free > 0 && !kv_list_is_empty(&io->waiting) && !srv_io_out_is_full(out)) {
		struct kv_io_conn *conn =
			kv_container_of(kv_list_first(&io->waiting), struct kv_io_conn, ahead_node);

		kv_list_remove(&conn->ahead_node);
		try_recv(io, conn, out);
	}

	struct kv_list_node *last = io->turn.head.prev; /* those that are put back wait for the next turn */

	while (!kv_list_is_empty(&io->turn) && out->n + 2 <= out->n_max) {
		struct kv_list_node *node = kv_list_first(&io->turn);
		struct kv_io_conn *conn = kv_container_of(node, struct kv_io_conn, turn_node);

		kv_list_remove(node);
		if (conn->is_sending && conn->may_send)
			try_send(io, conn, out);
		if (conn->recv != SRV_IO_RECV_NONE && conn->may_recv && !kv_list_is_linked(&conn->ahead_node))
			try_recv(io, conn, out);
		if (node == last)
			break;
	}
}

/* ---- readiness ---- */

static void accept_some(struct epoll_io *io, struct srv_io_listener *listener, struct srv_io_out *out)
{
	for (uint32_t i = 0; i < ACCEPTS_PER_TURN && !srv_io_out_is_full(out); i++) {
		const int fd = accept4(listener->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

		if (fd < 0 && errno == EAGAIN)
			return;
		if (fd < 0 && srv_io_accept_may_retry(errno))
			continue;
		if (fd < 0) {
			pause_accept(io);
			return;
		}

		struct kv_io_conn *conn = srv_io_conns_take(&io->conns, fd, listener->transport);

		if (!conn) {
			close(fd);
			continue;
		}
		/* The first edge comes at once: a fresh socket can be written to. */
		conn->may_recv = conn->may_send = true;
		if (control(io, EPOLL_CTL_ADD, fd, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET,
			    tagged(TAG_CONN, conn->conn_idx)) < 0) {
			srv_io_conns_give(&io->conns, conn);
			close(fd);
			pause_accept(io);
			return;
		}
		srv_io_peer_fill(fd, listener->transport, &srv_io_out_add(out, KV_IO_ACCEPTED, conn)->peer);
	}
}

static void conn_ready(struct epoll_io *io, struct kv_io_conn *conn, uint32_t events)
{
	if (events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR))
		conn->may_recv = true;
	if (events & (EPOLLOUT | EPOLLHUP | EPOLLERR))
		conn->may_send = true;
	if (kv_list_is_linked(&conn->ahead_node) && !conn->is_sending)
		return; /* it knows already that something is there */
	if ((conn->recv != SRV_IO_RECV_NONE && conn->may_recv) || (conn->is_sending && conn->may_send))
		enqueue(io, conn);
}

static void watch_ready(const struct watch *watch, struct srv_io_out *out)
{
	uint64_t count;

	if (read(watch->fd, &count, sizeof(count)) == (ssize_t)sizeof(count))
		srv_io_out_add(out, KV_IO_WATCHED, NULL)->user = watch->user;
}

static void dispatch(struct epoll_io *io, const struct epoll_event *event, struct srv_io_out *out)
{
	const uint32_t idx = (uint32_t)event->data.u64;

	switch ((enum tag)(event->data.u64 >> TAG_SHIFT)) {
	case TAG_CONN:
		conn_ready(io, &io->conns.conns[idx], event->events);
		return;
	case TAG_LISTENER: /* level-triggered: what finds no room now is reported again */
		if (io->listeners[idx].fd >= 0 && io->listeners[idx].is_armed)
			accept_some(io, &io->listeners[idx], out);
		return;
	case TAG_WATCH:
		if (!srv_io_out_is_full(out))
			watch_ready(&io->watches[idx], out);
		return;
	case TAG_FILES:
		files_ready(io, out);
		return;
	}
}

static int poll_kernel(struct epoll_io *io, struct epoll_event events[], int64_t timeout_ns)
{
	if (io->has_pwait2) {
		const struct timespec timeout = { .tv_sec = timeout_ns / 1000000000,
			.tv_nsec = timeout_ns % 1000000000 };
		const int rc = epoll_pwait2(
			io->epoll_fd, events, POLL_EVENTS_MAX, timeout_ns < 0 ? NULL : &timeout, NULL);

		if (rc >= 0 || (errno != ENOSYS && errno != EPERM))
			return rc;
		io->has_pwait2 = false; /* Linux before 5.11, or a sandbox that does not know it */
	}

	int timeout_ms = -1;

	if (timeout_ns >= 0) /* rounded up: waking early would spin; a day at most, so that it fits */
		timeout_ms = timeout_ns > 86400000000000 ? 86400000 : (int)((timeout_ns + 999999) / 1000000);
	return epoll_wait(io->epoll_fd, events, POLL_EVENTS_MAX, timeout_ms);
}

/* Asks the kernel once, waiting at most until the deadline. False: interrupted, or broken with *error set. */
static bool poll_once(struct epoll_io *io, int64_t timeout_ns, struct srv_io_out *out, int *error)
{
	struct epoll_event events[POLL_EVENTS_MAX];

	if (io->accept_resume_ns != 0) {
		const int64_t pause_ns = srv_io_until_ns(io->accept_resume_ns, srv_io_now_ns());

		if (pause_ns == 0)
			resume_accept(io);
		else if (timeout_ns < 0 || timeout_ns > pause_ns)
			timeout_ns = pause_ns;
	}

	const int n = poll_kernel(io, events, timeout_ns);

	if (n < 0) {
		*error = errno == EINTR ? 0 : -errno;
		return false;
	}
	for (int i = 0; i < n; i++)
		dispatch(io, &events[i], out);
	return true;
}

static int epoll_io_wait(
	struct kv_io *base, int64_t timeout_ns, struct kv_io_event events[], uint32_t n_events_max)
{
	struct epoll_io *io = from_base(base);
	struct srv_io_out out = { .events = events, .n_max = n_events_max };
	const uint64_t deadline_ns = srv_io_deadline_ns(timeout_ns);
	int error = 0;

	KV_ASSERT(n_events_max >= 2);
	while (!kv_list_is_empty(&io->closed) && !srv_io_out_is_full(&out)) {
		struct kv_io_conn *conn =
			kv_container_of(kv_list_first(&io->closed), struct kv_io_conn, turn_node);

		kv_list_remove(&conn->turn_node);
		srv_io_out_add(&out, KV_IO_CLOSED, conn);
		srv_io_conns_give(
			&io->conns, conn); /* out of use from here on; the next accept may take it */
	}
	report_failed(io, &out);
	if (!io->must_poll_first)
		run_turn(io, &out);
	do {
		if (out.n + 2 > out.n_max)
			break;

		const bool has_work = out.n > 0 || !kv_list_is_empty(&io->turn);
		const int64_t left_ns =
			deadline_ns != 0 ? srv_io_until_ns(deadline_ns, srv_io_now_ns()) : timeout_ns;

		if (!poll_once(io, has_work ? 0 : left_ns, &out, &error))
			break;
		run_turn(io, &out);
	} while (out.n == 0 && timeout_ns != 0 && (deadline_ns == 0 || srv_io_now_ns() < deadline_ns));
	io->must_poll_first = out.n + 2 > out.n_max;
	return out.n > 0 ? (int)out.n : error;
}

/* ---- life ---- */

static enum kv_status epoll_listen(struct kv_io *base, const struct kv_io_address *address, char *bound,
	uint32_t bound_bytes_max, struct kv_error *err)
{
	struct epoll_io *io = from_base(base);
	struct srv_io_listener *listener = &io->listeners[io->n_listeners];

	if (io->n_listeners == SRV_IO_LISTENERS_MAX)
		return kv_fail(err, KV_LIMIT, "at most %u listeners", SRV_IO_LISTENERS_MAX);

	const enum kv_status status = srv_io_listener_open(listener, address, bound, bound_bytes_max, err);

	if (status != KV_OK)
		return status;
	if (control(io, EPOLL_CTL_ADD, listener->fd, EPOLLIN, tagged(TAG_LISTENER, io->n_listeners)) < 0) {
		const int reason = errno;

		srv_io_listener_close(listener);
		return kv_fail(err, KV_IO_ERROR, "epoll_ctl: %s", strerror(reason));
	}
	listener->is_armed = true;
	io->n_listeners++;
	return KV_OK;
}

static void epoll_stop_listening(struct kv_io *base)
{
	struct epoll_io *io = from_base(base);

	for (uint32_t i = 0; i < io->n_listeners; i++)
		srv_io_listener_close(&io->listeners[i]);
	io->accept_resume_ns = 0;
}

static enum kv_status epoll_watch(struct kv_io *base, int fd, void *user, struct kv_error *err)
{
	struct epoll_io *io = from_base(base);
	const int flags = fcntl(fd, F_GETFL);

	if (io->n_watches == SRV_IO_WATCHES_MAX)
		return kv_fail(err, KV_LIMIT, "at most %u watched descriptors", SRV_IO_WATCHES_MAX);
	/* Reading the counter must never block the loop, whoever else reads it. */
	if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0)
		return kv_fail(err, KV_IO_ERROR, "watch descriptor %d: %s", fd, strerror(errno));
	io->watches[io->n_watches] = (struct watch){ .fd = fd, .user = user };
	if (control(io, EPOLL_CTL_ADD, fd, EPOLLIN, tagged(TAG_WATCH, io->n_watches)) < 0)
		return kv_fail(err, KV_IO_ERROR, "watch descriptor %d: %s", fd, strerror(errno));
	io->n_watches++;
	return KV_OK;
}

static void epoll_destroy(struct kv_io *base)
{
	if (!base)
		return;

	struct epoll_io *io = from_base(base);

	epoll_stop_listening(base);
	srv_io_file_thread_stop(&io->files);
	for (uint32_t i = 0; i < io->conns.n_touched; i++) {
		if (io->conns.conns[i].is_used && io->conns.conns[i].fd >= 0)
			close(io->conns.conns[i].fd);
	}
	if (io->epoll_fd >= 0)
		close(io->epoll_fd);
	srv_io_conns_finish(&io->conns);
	kv_pages_free(io->ahead, (uint64_t)io->n_ahead * KV_IO_AHEAD_BYTES);
	kv_free(io->ahead_free);
	kv_free(io);
}

static const struct kv_io_ops epoll_ops = {
	.name = "epoll",
	.listen = epoll_listen,
	.stop_listening = epoll_stop_listening,
	.set_user = epoll_set_user,
	.recv_ahead = epoll_recv_ahead,
	.recv_into = epoll_recv_into,
	.ahead_return = epoll_ahead_return,
	.send = epoll_send,
	.unsent_bytes = srv_io_unsent_bytes,
	.close = epoll_close,
	.watch = epoll_watch,
	.file_post = epoll_file_post,
	.file_close = epoll_file_close,
	.file_path = "a thread",
	.wait = epoll_io_wait,
	.destroy = epoll_destroy,
};

enum kv_status srv_io_epoll_create(
	uint32_t n_ahead_buffers, uint32_t n_connections_max, struct kv_io **out, struct kv_error *err)
{
	enum kv_status status = srv_io_check_sizes(n_ahead_buffers, n_connections_max, err);
	struct epoll_io *io = status == KV_OK ? kv_alloc(1, sizeof(*io)) : NULL;

	if (!io)
		return status != KV_OK ? status : kv_fail(err, KV_NO_MEMORY, "epoll io");
	io->base.ops = &epoll_ops;
	io->has_pwait2 = true;
	io->epoll_fd = -1;
	io->files.event_fd = -1;
	kv_list_init(&io->turn);
	kv_list_init(&io->waiting);
	kv_list_init(&io->closed);
	io->n_ahead = io->n_ahead_free = n_ahead_buffers;
	io->ahead = kv_pages_alloc((uint64_t)n_ahead_buffers * KV_IO_AHEAD_BYTES);
	io->ahead_free = kv_alloc(n_ahead_buffers, sizeof(*io->ahead_free));
	if (!io->ahead || !io->ahead_free) {
		status = kv_fail(err, KV_NO_MEMORY, "%u read-ahead buffers", n_ahead_buffers);
		goto err_destroy;
	}
	for (uint32_t i = 0; i < n_ahead_buffers; i++) /* low ones first: the others' pages stay untouched */
		io->ahead_free[i] = n_ahead_buffers - 1 - i;
	status = srv_io_conns_init(&io->conns, n_connections_max, err);
	if (status != KV_OK)
		goto err_destroy;
	io->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	if (io->epoll_fd < 0) {
		status = kv_fail(err, KV_IO_ERROR, "epoll_create1: %s", strerror(errno));
		goto err_destroy;
	}
	*out = &io->base;
	return KV_OK;

err_destroy:
	epoll_destroy(&io->base);
	return status;
}
