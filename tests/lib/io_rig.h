/*
 * A bench for one io implementation: keeps what happened to each accepted connection, in the order of
 * accepting. One test, one thread; the clients are plain descriptors of the test itself.
 */
#ifndef TESTS_LIB_IO_RIG_H
#define TESTS_LIB_IO_RIG_H

#include <check.h>
#include <dirent.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "core/io.h"
#include "server/io_address.h"
#include "server/io_backends.h"

#define RIG_CONNS_MAX  9100
#define RIG_EVENTS_MAX 64u

struct rig_conn {
	struct kv_io_conn *conn;
	struct kv_io_peer peer;
	int n_received, n_sent, n_closed;
	int64_t received, sent;
	uint8_t *ahead;
	uint32_t ahead_idx;
};

struct rig {
	struct kv_io *io;
	char dir[64];
	struct kv_io_address bound[SRV_IO_LISTENERS_MAX];
	int n_bound;
	struct rig_conn *conns; /* [RIG_CONNS_MAX] */
	int n_accepted;
	uint32_t n_events_max;
};

static inline enum kv_status rig_create_io(
	int impl, uint32_t n_ahead, uint32_t n_conns, struct kv_io **out, struct kv_error *err)
{
	return impl == 0 ? srv_io_uring_create(n_ahead, n_conns, out, err)
			 : srv_io_epoll_create(n_ahead, n_conns, out, err);
}

/* False only for io_uring where it is denied, with a line that says so. */
static inline bool rig_is_available(int impl)
{
	struct kv_io *io = NULL;
	struct kv_error err;

	if (rig_create_io(impl, 4, 4, &io, &err) == KV_OK) {
		io->ops->destroy(io);
		return true;
	}
	printf("not run on io_uring: %s\n", err.msg);
	ck_assert_int_eq(impl, 0);
	ck_assert_int_eq(err.status, KV_UNAVAILABLE);
	return false;
}

static inline bool rig_init(struct rig *rig, int impl, uint32_t n_ahead, uint32_t n_conns)
{
	memset(rig, 0, sizeof(*rig));
	if (!rig_is_available(impl))
		return false;
	ck_assert_int_eq(rig_create_io(impl, n_ahead, n_conns, &rig->io, NULL), KV_OK);
	ck_assert_str_eq(rig->io->ops->name, impl == 0 ? "io_uring" : "epoll");
	rig->n_events_max = RIG_EVENTS_MAX;
	rig->conns = calloc(RIG_CONNS_MAX, sizeof(*rig->conns));
	snprintf(rig->dir, sizeof(rig->dir), "/tmp/tqkv-test-io-XXXXXX");
	ck_assert_ptr_nonnull(mkdtemp(rig->dir));
	return true;
}

static inline void rig_finish(struct rig *rig)
{
	rig->io->ops->destroy(rig->io);
	free(rig->conns);
	ck_assert_int_eq(rmdir(rig->dir), 0); /* nothing may be left in it */
}

static inline int rig_listen(struct rig *rig, bool is_tcp)
{
	char text[128], bound[128];
	struct kv_io_address address;

	snprintf(text, sizeof(text), "unix:%s/socket", rig->dir);
	ck_assert_int_eq(srv_io_address_parse(is_tcp ? "tcp:127.0.0.1:0" : text, &address, NULL), KV_OK);
	ck_assert_int_eq(rig->io->ops->listen(rig->io, &address, bound, sizeof(bound), NULL), KV_OK);
	/* What is reported as bound can be parsed again and connected to. */
	ck_assert_int_eq(srv_io_address_parse(bound, &rig->bound[rig->n_bound], NULL), KV_OK);
	if (is_tcp)
		ck_assert_uint_ne(rig->bound[rig->n_bound].port, 0);
	return rig->n_bound++;
}

static inline void rig_event(struct rig *rig, const struct kv_io_event *event)
{
	struct rig_conn *conn = event->user;

	if (event->kind == KV_IO_ACCEPTED) {
		ck_assert_ptr_null(event->user);
		ck_assert_int_lt(rig->n_accepted, RIG_CONNS_MAX);
		conn = &rig->conns[rig->n_accepted++];
		conn->conn = event->conn;
		conn->peer = event->peer;
		rig->io->ops->set_user(rig->io, event->conn, conn);
		return;
	}
	ck_assert_int_ne(event->kind, KV_IO_WATCHED);
	ck_assert_ptr_eq(event->conn, conn->conn);
	ck_assert_int_eq(conn->n_closed, 0);
	if (event->kind == KV_IO_RECEIVED) {
		conn->n_received++;
		conn->received = event->result;
		conn->ahead = event->ahead;
		conn->ahead_idx = event->ahead_idx;
	} else if (event->kind == KV_IO_SENT) {
		conn->n_sent++;
		conn->sent = event->result;
	} else {
		conn->n_closed++;
	}
}

static inline void rig_turn(struct rig *rig, int64_t timeout_ns)
{
	struct kv_io_event events[RIG_EVENTS_MAX];
	const int n = rig->io->ops->wait(rig->io, timeout_ns, events, rig->n_events_max);

	ck_assert_int_ge(n, 0);
	ck_assert_int_le(n, (int)rig->n_events_max);
	for (int i = 0; i < n; i++)
		rig_event(rig, &events[i]);
}

/* A few short turns: long enough for what is under way on loopback to arrive. */
static inline void rig_turns(struct rig *rig, int n_turns)
{
	for (int i = 0; i < n_turns; i++)
		rig_turn(rig, 2000000);
}

#define rig_until(rig, condition)                                                               \
	do {                                                                                    \
		for (int n_turns_left = 5000; n_turns_left > 0 && !(condition); n_turns_left--) \
			rig_turn((rig), 2000000);                                               \
		ck_assert(condition);                                                           \
	} while (0)

/* Connected descriptor, or -errno. */
static inline int rig_try_connect(struct rig *rig, int listener_idx)
{
	struct sockaddr_storage to;
	const socklen_t to_bytes = srv_io_address_to_sockaddr(&rig->bound[listener_idx], &to);
	const int fd = socket(to.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);

	ck_assert_int_ge(fd, 0);
	if (connect(fd, (struct sockaddr *)&to, to_bytes) == 0)
		return fd;

	/* A Unix socket whose file is gone is as refused as a port without a listener. */
	const int reason = errno == ENOENT ? ECONNREFUSED : errno;

	close(fd);
	return -reason;
}

/* Connects and waits until the io has accepted. */
static inline int rig_connect(struct rig *rig, int listener_idx)
{
	const int n_before = rig->n_accepted;
	const int fd = rig_try_connect(rig, listener_idx);

	ck_assert_int_ge(fd, 0);
	rig_until(rig, rig->n_accepted == n_before + 1);
	return fd;
}

static inline struct rig_conn *rig_accepted(struct rig *rig, int conn_idx)
{
	ck_assert_int_lt(conn_idx, rig->n_accepted);
	return &rig->conns[conn_idx];
}

/* All accepted connections are closed: the next one gets index 0. */
static inline void rig_forget(struct rig *rig)
{
	memset(rig->conns, 0, (size_t)rig->n_accepted * sizeof(*rig->conns));
	rig->n_accepted = 0;
}

static inline void rig_send(struct rig *rig, struct rig_conn *conn, const char *data, size_t n_bytes)
{
	const struct iovec part = { (void *)(uintptr_t)data, n_bytes };

	rig->io->ops->send(rig->io, conn->conn, &part, 1);
}

/* What is sent at position i of a stream. */
static inline uint8_t rig_byte(uint64_t i)
{
	return (uint8_t)(i * 2654435761u >> 7);
}

static inline int rig_count_fds(void)
{
	DIR *dir = opendir("/proc/self/fd");
	int n = 0;

	ck_assert_ptr_nonnull(dir);
	while (readdir(dir))
		n++;
	closedir(dir);
	return n;
}

#endif
