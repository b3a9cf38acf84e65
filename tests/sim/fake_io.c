
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "proto/crc32c.h"
#include "tests/sim/fake_io_internal.h"

#define LISTENERS_MAX 8u

static struct sim_net *net_of(struct kv_io *io)
{
	return kv_container_of(io, struct sim_net, base);
}

static void check_usable(const struct kv_io_conn *conn, const char *what)
{
	SIM_CHECK(conn->phase == OPEN, "%s on a connection that is %s", what,
		conn->phase == WAITS             ? "not accepted"
			: conn->phase == CLOSING ? "closing"
						 : "closed");
}

/* ---- the table: what the server posts ---- */

static enum kv_status net_listen(struct kv_io *io, const struct kv_io_address *address, char *bound,
	uint32_t bound_bytes_max, struct kv_error *err)
{
	struct sim_net *net = net_of(io);

	if (net->n_listeners == LISTENERS_MAX)
		return kv_fail(err, KV_IO_ERROR, "too many listeners");
	snprintf(bound, bound_bytes_max, "%s:sim-%u", address->transport == KV_IO_UNIX ? "unix" : "tcp",
		net->n_listeners++);
	net->is_listening = true;
	return KV_OK;
}

static void net_stop_listening(struct kv_io *io)
{
	net_of(io)->is_listening = false;
}

static void net_set_user(struct kv_io *io, struct kv_io_conn *conn, void *user)
{
	(void)io;
	check_usable(conn, "set_user()");
	conn->user = user;
}

static void net_recv_ahead(struct kv_io *io, struct kv_io_conn *conn)
{
	(void)io;
	check_usable(conn, "recv_ahead()");
	SIM_CHECK(conn->recv == RECV_NONE, "recv_ahead() while a receive is open");
	conn->recv = RECV_AHEAD;
}

static void net_recv_into(struct kv_io *io, struct kv_io_conn *conn, void *buf, uint32_t n_bytes)
{
	(void)io;
	check_usable(conn, "recv_into()");
	SIM_CHECK(conn->recv == RECV_NONE, "recv_into() while a receive is open");
	SIM_CHECK(n_bytes > 0, "recv_into() of no bytes");
	conn->recv = RECV_INTO;
	conn->recv_buf = buf;
	conn->recv_bytes = n_bytes;
}

static void net_ahead_return(struct kv_io *io, uint32_t ahead_idx)
{
	struct sim_net *net = net_of(io);

	SIM_CHECK(ahead_idx < net->options.n_ahead_buffers, "ahead_return(%u) of %u", ahead_idx,
		net->options.n_ahead_buffers);
	SIM_CHECK(net->is_ahead_out[ahead_idx], "ahead_return(%u) of a buffer that is not out", ahead_idx);
	net->is_ahead_out[ahead_idx] = false;
	net->ahead_free[net->n_ahead_free++] = ahead_idx;
	/* Whoever still reads it shall notice. */
	memset(net->ahead + (uint64_t)ahead_idx * KV_IO_AHEAD_BYTES, 0xDD, 256);
}

static uint32_t send_crc(const struct kv_io_conn *conn)
{
	uint32_t crc = 0;

	for (uint32_t i = 0; i < conn->n_iov; i++)
		crc = kvp_crc32c(crc, conn->iov[i].iov_base, conn->iov[i].iov_len);
	return crc;
}

static void net_send(struct kv_io *io, struct kv_io_conn *conn, const struct iovec iov[], uint32_t n_iov)
{
	(void)io;
	check_usable(conn, "send()");
	SIM_CHECK(!conn->is_sending, "send() while a send is open");
	SIM_CHECK(n_iov >= 1 && n_iov <= KV_IO_IOV_MAX, "send() of %u parts", n_iov);
	memcpy(conn->iov, iov, n_iov * sizeof(iov[0]));
	conn->n_iov = n_iov;
	conn->iov_idx = 0;
	conn->iov_pos = 0;
	conn->is_sending = true;
	conn->send_crc = send_crc(conn);
}

static uint64_t net_unsent_bytes(struct kv_io *io, const struct kv_io_conn *conn)
{
	uint64_t n_bytes = sim_wire_n_inside(&conn->out);

	(void)io;
	SIM_CHECK(conn->phase == OPEN && conn->is_sending, "unsent_bytes() without an open send");
	for (uint32_t i = conn->iov_idx; i < conn->n_iov; i++)
		n_bytes += conn->iov[i].iov_len;
	return n_bytes - conn->iov_pos;
}

static void net_close(struct kv_io *io, struct kv_io_conn *conn)
{
	struct sim_net *net = net_of(io);
	const uint64_t now_ns = net->clock->now_ns;

	check_usable(conn, "close()");
	conn->phase = CLOSING;
	conn->close_due_ns = now_ns + sim_below(&net->rng, 200000);
	conn->is_late = sim_chance(&net->rng, net->options.late_per_mille);
	if (conn->is_reset)
		return;
	/* As with TCP: closing with unread bytes resets, and what is under way may be lost. */
	conn->is_cut = sim_wire_n_inside(&conn->in) > 0 && sim_chance(&net->rng, 500);
	sim_wire_end(&conn->out, now_ns, net->options.delay_ns_max, &net->rng);
}

static enum kv_status net_watch(struct kv_io *io, int fd, void *user, struct kv_error *err)
{
	struct sim_net *net = net_of(io);

	if (net->source.due_ns && fd == net->source.fd) {
		net->watch_user = user;
		net->is_watched = true;
	}
	(void)err;
	return KV_OK; /* the mailbox's: the server looks into it every turn */
}

static void net_file_post(struct kv_io *io, struct kv_io_file *file)
{
	sim_files_post(&net_of(io)->files, file);
}

static void net_file_close(struct kv_io *io, int fd)
{
	sim_files_close(&net_of(io)->files, fd);
}

/* ---- moving ---- */

bool sim_net_push_send(struct sim_net *net, struct kv_io_conn *conn)
{
	while (conn->iov_idx < conn->n_iov) {
		const struct iovec *part = &conn->iov[conn->iov_idx];
		const uint64_t room = net->options.wire_bytes_max - sim_wire_n_inside(&conn->out);
		uint64_t n = part->iov_len - conn->iov_pos;

		if (n > room)
			n = room;
		if (n == 0 && part->iov_len > conn->iov_pos)
			return false;
		sim_wire_write(&conn->out, (const uint8_t *)part->iov_base + conn->iov_pos, n,
			net->clock->now_ns, net->options.delay_ns_max, &net->rng);
		conn->iov_pos += n;
		if (conn->iov_pos == part->iov_len) {
			conn->iov_idx++;
			conn->iov_pos = 0;
		}
	}
	return true;
}

static struct kv_io_event *add_event(
	struct kv_io_event *event, enum kv_io_kind kind, struct kv_io_conn *conn, int64_t result)
{
	memset(event, 0, sizeof(*event));
	event->kind = kind;
	event->result = result;
	event->conn = conn;
	event->user = conn ? conn->user : NULL;
	event->ahead_idx = UINT32_MAX;
	return event;
}

static bool counts_down(struct sim_net *net, int64_t *countdown)
{
	if (*countdown < 0 || (*countdown)-- > 0)
		return false;
	net->has_failed = true;
	return true;
}

void sim_net_cut(struct kv_io_conn *conn)
{
	conn->is_reset = true;
	sim_wire_finish(&conn->in);
	sim_wire_finish(&conn->out);
}

/* Writes received bytes into the event; the receive is over. */
static bool take_received(struct sim_net *net, struct kv_io_conn *conn, struct kv_io_event *event)
{
	const uint64_t n_there = sim_wire_available(&conn->in, net->clock->now_ns);
	uint64_t n = conn->recv == RECV_AHEAD ? KV_IO_AHEAD_BYTES : conn->recv_bytes;

	if (n > n_there)
		n = n_there;
	if (n > 1 && sim_chance(&net->rng, net->options.cut_per_mille))
		n = 1 + sim_rng_next(&net->rng) % (n - 1);
	add_event(event, KV_IO_RECEIVED, conn, (int64_t)n);
	if (conn->recv == RECV_AHEAD) {
		if (net->n_ahead_free == 0)
			return false; /* waits for one to come back */
		event->ahead_idx = net->ahead_free[--net->n_ahead_free];
		net->is_ahead_out[event->ahead_idx] = true;
		event->ahead = net->ahead + (uint64_t)event->ahead_idx * KV_IO_AHEAD_BYTES;
	}
	sim_wire_take(&conn->in, event->ahead ? event->ahead : conn->recv_buf, n);
	conn->recv = RECV_NONE;
	return true;
}

static bool try_receive(struct sim_net *net, struct kv_io_conn *conn, struct kv_io_event *event)
{
	const uint64_t now_ns = net->clock->now_ns;

	if (conn->recv == RECV_NONE)
		return false;
	if (!conn->is_reset && sim_wire_available(&conn->in, now_ns) > 0) {
		if (conn->recv == RECV_AHEAD && net->n_ahead_free == 0)
			return false;
		if (!counts_down(net, &net->recv_countdown))
			return take_received(net, conn, event);
		sim_net_cut(conn);
	}
	if (conn->is_reset)
		add_event(event, KV_IO_RECEIVED, conn, -ECONNRESET);
	else if (sim_wire_is_over(&conn->in, now_ns))
		add_event(event, KV_IO_RECEIVED, conn, 0);
	else
		return false;
	conn->recv = RECV_NONE;
	return true;
}

static void end_send(struct kv_io_conn *conn)
{
	SIM_CHECK(send_crc(conn) == conn->send_crc, "the memory of a send changed before its event");
	conn->is_sending = false;
}

static bool try_send(struct sim_net *net, struct kv_io_conn *conn, struct kv_io_event *event)
{
	if (!conn->is_sending)
		return false;
	if (!conn->is_reset && !sim_net_push_send(net, conn))
		return false;
	if (!conn->is_reset && counts_down(net, &net->send_countdown))
		sim_net_cut(conn);
	add_event(event, KV_IO_SENT, conn, conn->is_reset ? -EPIPE : 0);
	end_send(conn);
	return true;
}

static uint32_t collect_open(struct sim_net *net, struct kv_io_conn *conn, struct kv_io_event *events)
{
	const bool is_send_first = sim_chance(&net->rng, 500);
	uint32_t n = 0;

	if (is_send_first)
		n += try_send(net, conn, events + n);
	n += try_receive(net, conn, events + n);
	if (!is_send_first)
		n += try_send(net, conn, events + n);
	return n;
}

/* Open operations of a closed connection complete as they like, with or without success. */
static uint32_t collect_late(struct sim_net *net, struct kv_io_conn *conn, struct kv_io_event *events)
{
	uint32_t n = 0;

	if (conn->recv != RECV_NONE) {
		if (!try_receive(net, conn, events))
			add_event(events, KV_IO_RECEIVED, conn, -ECANCELED);
		conn->recv = RECV_NONE;
		n = 1;
	}
	if (conn->is_sending) {
		add_event(events + n++, KV_IO_SENT, conn, -ECANCELED);
		end_send(conn);
	}
	return n;
}

static uint32_t collect_closing(struct sim_net *net, struct kv_io_conn *conn, struct kv_io_event *events)
{
	if (conn->is_late && (conn->recv != RECV_NONE || conn->is_sending))
		return collect_late(net, conn, events);
	if (conn->close_due_ns > net->clock->now_ns)
		return 0;
	if (conn->recv == RECV_INTO && !conn->is_reset) {
		/* The kernel may write into it until now. */
		uint64_t n_there = sim_wire_available(&conn->in, net->clock->now_ns);

		if (n_there > conn->recv_bytes)
			n_there = conn->recv_bytes;
		sim_wire_take(&conn->in, conn->recv_buf, n_there);
	}
	conn->recv = RECV_NONE;
	if (conn->is_sending)
		end_send(conn);
	add_event(events, KV_IO_CLOSED, conn, 0);
	conn->phase = CLOSED;
	conn->user = NULL;
	net->n_open--;
	return 1;
}

static uint32_t collect_one(struct sim_net *net, struct kv_io_conn *conn, struct kv_io_event *events)
{
	switch (conn->phase) {
	case WAITS:
		if (conn->accept_due_ns > net->clock->now_ns || !net->is_listening)
			return 0;
		add_event(events, KV_IO_ACCEPTED, conn, 0)->peer = conn->peer;
		conn->phase = OPEN;
		net->n_open++;
		return 1;
	case OPEN:
		return collect_open(net, conn, events);
	case CLOSING:
		return collect_closing(net, conn, events);
	case CLOSED:
		break;
	}
	return 0;
}

static uint32_t collect(struct sim_net *net, struct kv_io_event *events, uint32_t n_events_max)
{
	const uint32_t n_first = sim_below(&net->rng, net->n_conns);
	struct kv_io_conn *conn = net->first;
	uint32_t n = 0;

	if (net->is_watched && net->source.due_ns(net->source.user) <= net->clock->now_ns) {
		net->source.clear(net->source.user);
		add_event(events + n++, KV_IO_WATCHED, NULL, 0)->user = net->watch_user;
	}
	n += sim_files_collect(&net->files, events + n, n_events_max - n);
	for (uint32_t i = 0; i < n_first; i++)
		conn = conn->next;
	for (uint32_t i = 0; i < net->n_conns && n + 2 <= n_events_max; i++) {
		if (!sim_chance(&net->rng, net->options.skip_per_mille))
			n += collect_one(net, conn, events + n);
		conn = conn->next ? conn->next : net->first;
	}
	return n;
}

static int net_wait(struct kv_io *io, int64_t timeout_ns, struct kv_io_event events[], uint32_t n_events_max)
{
	struct sim_net *net = net_of(io);
	struct sim_clock *clock = net->clock;

	clock->now_ns += 1 + sim_below(&net->rng, 2000); /* a turn takes time */
	uint32_t n = collect(net, events, n_events_max);

	if (n == 0 && timeout_ns != 0) {
		uint64_t due_ns = sim_net_next_ns(net);

		SIM_CHECK(timeout_ns > 0 || due_ns != UINT64_MAX, "waits for ever with nothing under way");
		if (timeout_ns > 0 && due_ns > clock->now_ns + (uint64_t)timeout_ns)
			due_ns = clock->now_ns + (uint64_t)timeout_ns;
		if (due_ns > clock->now_ns)
			clock->now_ns = due_ns;
		n = collect(net, events, n_events_max);
	}
	return (int)n;
}

static void net_destroy(struct kv_io *io)
{
	(void)io; /* sim_net_destroy() */
}

const struct kv_io_ops sim_net_ops = {
	.name = "sim",
	.listen = net_listen,
	.stop_listening = net_stop_listening,
	.set_user = net_set_user,
	.recv_ahead = net_recv_ahead,
	.recv_into = net_recv_into,
	.ahead_return = net_ahead_return,
	.send = net_send,
	.unsent_bytes = net_unsent_bytes,
	.close = net_close,
	.watch = net_watch,
	.file_post = net_file_post,
	.file_close = net_file_close,
	.file_path = "memory",
	.wait = net_wait,
	.destroy = net_destroy,
};
