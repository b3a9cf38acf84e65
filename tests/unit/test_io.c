/*
 * The data path of core/io.h. Every test runs on both io implementations (loop index 0: io_uring, 1: epoll)
 * over real sockets. Where io_uring is denied its half says so and counts as nothing; the epoll half still
 * runs.
 */
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "core/memory.h"
#include "server/io_common.h"
#include "tests/lib/io_rig.h"
#include "tests/lib/kv_test.h"

/* A message comes back as it was sent, on both transports, and neither direction takes heap memory. */
START_TEST(test_io_echo)
{
	struct rig rig;

	for (int is_tcp = 0; is_tcp < 2; is_tcp++) {
		if (!rig_init(&rig, _i, 4, 16))
			return;

		const int client = rig_connect(&rig, rig_listen(&rig, is_tcp));
		struct rig_conn *conn = rig_accepted(&rig, 0);
		const uint64_t n_allocations = kv_alloc_count();
		char back[8] = "";

		for (int round = 0; round < 100; round++) {
			rig.io->ops->recv_ahead(rig.io, conn->conn);
			ck_assert_int_eq(write(client, "question", 8), 8);
			rig_until(&rig, conn->n_received == round + 1);
			ck_assert_int_eq(conn->received, 8);
			rig_send(&rig, conn, (const char *)conn->ahead, 8);
			rig_until(&rig, conn->n_sent == round + 1);
			ck_assert_int_eq(conn->sent, 0);
			rig.io->ops->ahead_return(rig.io, conn->ahead_idx);
			ck_assert_int_eq(read(client, back, 8), 8);
			ck_assert_mem_eq(back, "question", 8);
		}
		ck_assert_uint_eq(kv_alloc_count(), n_allocations);
		if (is_tcp)
			ck_assert_int_eq(strncmp(conn->peer.address, "127.0.0.1:", 10), 0);
		else
			ck_assert_uint_eq(conn->peer.uid, getuid());
		close(client);
		rig_finish(&rig);
	}
}
END_TEST

/* Accepted TCP sockets do not delay small replies. */
START_TEST(test_io_tcp_nodelay_is_set)
{
	struct rig rig;

	if (!rig_init(&rig, _i, 4, 16))
		return;

	const int client = rig_connect(&rig, rig_listen(&rig, true));
	struct rig_conn *conn = rig_accepted(&rig, 0);
	int is_set = 0;
	socklen_t bytes = sizeof(is_set);

	ck_assert_int_eq(getsockopt(conn->conn->fd, IPPROTO_TCP, TCP_NODELAY, &is_set, &bytes), 0);
	ck_assert_int_ne(is_set, 0);
	close(client);
	rig_finish(&rig);
}
END_TEST

#define BULK_BYTES (3u << 20)

struct bulk_client {
	int fd;
	uint64_t n_wrong;
};

static void *bulk_write(void *arg)
{
	struct bulk_client *client = arg;
	uint8_t chunk[5000];

	for (uint64_t at = 0; at < BULK_BYTES;) {
		const uint64_t n = BULK_BYTES - at < sizeof(chunk) ? BULK_BYTES - at : sizeof(chunk);

		for (uint64_t i = 0; i < n; i++)
			chunk[i] = rig_byte(at + i);
		for (uint64_t done = 0; done < n;) {
			const ssize_t rc = send(client->fd, chunk + done, n - done, MSG_NOSIGNAL);

			if (rc <= 0)
				return NULL;
			done += (uint64_t)rc;
		}
		at += n;
	}
	return NULL;
}

static void *bulk_read(void *arg)
{
	struct bulk_client *client = arg;
	uint8_t chunk[3000];

	client->n_wrong = 1;
	for (uint64_t at = 0; at < BULK_BYTES;) {
		const ssize_t rc = read(client->fd, chunk, sizeof(chunk));

		if (rc <= 0)
			return NULL;
		for (ssize_t i = 0; i < rc; i++)
			client->n_wrong += chunk[i] != rig_byte(at + (uint64_t)i);
		at += (uint64_t)rc;
	}
	client->n_wrong--;
	return NULL;
}

/*
 * Megabytes pass both ways byte for byte although socket buffers hold a few kilobytes: receives complete with
 * what is there, sends complete only when all of their three parts are with the kernel.
 */
START_TEST(test_io_large_transfers_through_tiny_socket_buffers)
{
	static uint8_t data[BULK_BYTES];
	struct rig rig;

	if (!rig_init(&rig, _i, 4, 16))
		return;

	struct bulk_client client = { .fd = rig_connect(&rig, rig_listen(&rig, false)) };
	struct rig_conn *conn = rig_accepted(&rig, 0);
	const int tiny = 4096;
	pthread_t thread;

	setsockopt(client.fd, SOL_SOCKET, SO_SNDBUF, &tiny, sizeof(tiny));
	setsockopt(client.fd, SOL_SOCKET, SO_RCVBUF, &tiny, sizeof(tiny));
	setsockopt(conn->conn->fd, SOL_SOCKET, SO_SNDBUF, &tiny, sizeof(tiny));
	ck_assert_int_eq(pthread_create(&thread, NULL, bulk_write, &client), 0);
	for (uint64_t at = 0; at < BULK_BYTES; at += (uint64_t)conn->received) {
		const uint64_t left = BULK_BYTES - at;
		const int n_before = conn->n_received;

		rig.io->ops->recv_into(
			rig.io, conn->conn, data + at, left < 262144 ? (uint32_t)left : 262144);
		rig_until(&rig, conn->n_received == n_before + 1);
		ck_assert_int_gt(conn->received, 0);
		ck_assert_int_le(conn->received, 262144);
		ck_assert_ptr_null(conn->ahead);
	}
	pthread_join(thread, NULL);
	ck_assert_int_eq(pthread_create(&thread, NULL, bulk_read, &client), 0);

	const struct iovec parts[3] = { { data, 1 }, { data + 1, 1000000 },
		{ data + 1000001, BULK_BYTES - 1000001 } };

	rig.io->ops->send(rig.io, conn->conn, parts, 3);
	rig_until(&rig, conn->n_sent == 1);
	ck_assert_int_eq(conn->sent, 0);
	pthread_join(thread, NULL);
	ck_assert_uint_eq(client.n_wrong, 0);
	close(client.fd);
	rig_finish(&rig);
}
END_TEST

/* close() while both directions are open ends in one CLOSED and nothing else, and the memory is left alone
 * after it. */
START_TEST(test_io_close_with_open_operations)
{
	static uint8_t data[BULK_BYTES];
	struct rig rig;

	for (int kind = 0; kind < 3; kind++) { /* receive into, receive ahead, nothing submitted yet */
		if (!rig_init(&rig, _i, 4, 16))
			return;

		const int client = rig_connect(&rig, rig_listen(&rig, false));
		struct rig_conn *conn = rig_accepted(&rig, 0);
		uint8_t target[64] = { 0 };
		char late[64];

		memset(late, 'x', sizeof(late));
		if (kind == 1)
			rig.io->ops->recv_ahead(rig.io, conn->conn);
		else
			rig.io->ops->recv_into(rig.io, conn->conn, target, sizeof(target));
		rig_send(&rig, conn, (const char *)data, BULK_BYTES); /* more than the peer will ever read */
		if (kind != 2)
			rig_turns(&rig, 3);
		ck_assert_int_eq(conn->n_sent, 0);
		rig.io->ops->close(rig.io, conn->conn);
		rig_until(&rig, conn->n_closed == 1);
		(void)send(client, late, sizeof(late), MSG_NOSIGNAL);
		rig_turns(&rig, 5);
		ck_assert_int_eq(conn->n_closed, 1);
		ck_assert_int_eq(conn->n_sent, 0);
		ck_assert_int_eq(conn->n_received, 0);
		for (size_t i = 0; i < sizeof(target); i++)
			ck_assert_uint_eq(target[i], 0);
		close(client);
		rig_finish(&rig);
	}
}
END_TEST

/* A reset by the peer is an error of the receive and of later sends, never a signal or a lost connection. */
START_TEST(test_io_peer_reset)
{
	struct rig rig;

	if (!rig_init(&rig, _i, 4, 16))
		return;

	const int client = rig_connect(&rig, rig_listen(&rig, true));
	struct rig_conn *conn = rig_accepted(&rig, 0);
	const struct linger reset = { .l_onoff = 1, .l_linger = 0 };

	rig.io->ops->recv_ahead(rig.io, conn->conn);
	rig_turns(&rig, 2);
	setsockopt(client, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
	close(client);
	rig_until(&rig, conn->n_received == 1);
	ck_assert_int_eq(conn->received, -ECONNRESET);
	ck_assert_ptr_null(conn->ahead);
	rig_send(&rig, conn, "answer", 6);
	rig_until(&rig, conn->n_sent == 1);
	ck_assert_int_eq(conn->sent, -EPIPE);
	ck_assert_int_eq(conn->n_closed, 0);
	rig.io->ops->close(rig.io, conn->conn);
	rig_until(&rig, conn->n_closed == 1);
	rig_finish(&rig);
}
END_TEST

/* After the peer's half-close the receive reports the end, again and again, and replies still arrive. */
START_TEST(test_io_half_close)
{
	struct rig rig;

	for (int is_tcp = 0; is_tcp < 2; is_tcp++) {
		if (!rig_init(&rig, _i, 4, 16))
			return;

		const int client = rig_connect(&rig, rig_listen(&rig, is_tcp));
		struct rig_conn *conn = rig_accepted(&rig, 0);
		char back[8];

		ck_assert_int_eq(write(client, "last", 4), 4);
		shutdown(client, SHUT_WR);
		rig.io->ops->recv_ahead(rig.io, conn->conn);
		rig_until(&rig, conn->n_received == 1);
		ck_assert_int_eq(conn->received, 4);
		rig.io->ops->ahead_return(rig.io, conn->ahead_idx);
		for (int i = 0; i < 6; i++) { /* more often than there are buffers: an end costs none */
			rig.io->ops->recv_ahead(rig.io, conn->conn);
			rig_until(&rig, conn->n_received == 2 + i);
			ck_assert_int_eq(conn->received, 0);
			ck_assert_ptr_null(conn->ahead);
		}
		rig_send(&rig, conn, "reply", 5);
		rig_until(&rig, conn->n_sent == 1);
		ck_assert_int_eq(read(client, back, 8), 5);
		close(client);
		rig_finish(&rig);
	}
}
END_TEST

/*
 * With three times more connections than read-ahead buffers every message arrives, each buffer is used by one
 * connection at a time, and an idle connection holds none.
 */
START_TEST(test_io_ahead_ring_exhaustion)
{
	enum { N_BUFFERS = 4, N_CONNS = 12, N_IDLE = 8 };
	struct rig rig;
	int clients[N_CONNS + N_IDLE];
	int listener_idx;
	uint32_t held[N_BUFFERS];
	int n_held = 0, n_seen = 0;
	bool is_seen[N_CONNS] = { false };

	if (!rig_init(&rig, _i, N_BUFFERS, 64))
		return;
	listener_idx = rig_listen(&rig, false);
	for (int i = 0; i < N_CONNS + N_IDLE; i++) {
		clients[i] = rig_connect(&rig, listener_idx);
		rig.io->ops->recv_ahead(rig.io, rig_accepted(&rig, i)->conn);
	}
	rig_turns(&rig, 2);
	for (int i = 0; i < N_CONNS; i++)
		ck_assert_int_eq(write(clients[i], &i, sizeof(i)), sizeof(i));
	while (n_seen < N_CONNS) {
		int n_new = 0;

		rig_turns(&rig, 4);
		for (int i = 0; i < N_CONNS; i++) {
			struct rig_conn *conn = rig_accepted(&rig, i);

			if (conn->n_received == 0 || is_seen[i])
				continue;
			is_seen[i] = true;
			n_new++;
			n_seen++;
			ck_assert_int_eq(conn->received, sizeof(int));
			ck_assert_mem_eq(conn->ahead, &i, sizeof(i));
			for (int k = 0; k < n_held; k++)
				ck_assert_uint_ne(held[k], conn->ahead_idx);
			ck_assert_int_lt(n_held, N_BUFFERS);
			held[n_held++] = conn->ahead_idx;
		}
		ck_assert_int_gt(n_new, 0);
		/* All buffers are out until one comes back. */
		ck_assert_int_eq(n_held, N_BUFFERS);
		rig.io->ops->ahead_return(rig.io, held[0]);
		held[0] = held[--n_held];
	}
	for (int i = 0; i < N_CONNS + N_IDLE; i++)
		close(clients[i]);
	rig_finish(&rig);
}
END_TEST

/* A connection that is closed, or whose peer leaves, while it waits for a buffer takes none from the others.
 */
START_TEST(test_io_ahead_waiters_may_leave)
{
	struct rig rig;
	int clients[5];

	if (!rig_init(&rig, _i, 1, 16))
		return;

	const int listener_idx = rig_listen(&rig, false);

	for (int i = 0; i < 5; i++) {
		clients[i] = rig_connect(&rig, listener_idx);
		rig.io->ops->recv_ahead(rig.io, rig_accepted(&rig, i)->conn);
	}
	for (int i = 0; i < 3; i++) {
		ck_assert_int_eq(write(clients[i], "m", 1), 1);
		rig_turns(&rig, 3);
	}
	close(clients[3]); /* waits with an end of stream */
	rig_turns(&rig, 3);
	ck_assert_int_eq(write(clients[4], "m", 1), 1);
	rig_turns(&rig, 3);
	ck_assert_int_eq(rig_accepted(&rig, 0)->n_received, 1);
	ck_assert_int_eq(rig_accepted(&rig, 1)->n_received, 0);
	rig.io->ops->close(rig.io, rig_accepted(&rig, 1)->conn);
	rig.io->ops->ahead_return(rig.io, rig_accepted(&rig, 0)->ahead_idx);
	rig_until(&rig, rig_accepted(&rig, 2)->n_received == 1);
	rig.io->ops->ahead_return(rig.io, rig_accepted(&rig, 2)->ahead_idx);
	rig_until(&rig, rig_accepted(&rig, 3)->n_received == 1 && rig_accepted(&rig, 4)->n_received == 1);
	ck_assert_int_eq(rig_accepted(&rig, 3)->received, 0);
	ck_assert_int_eq(rig_accepted(&rig, 4)->received, 1);
	ck_assert_int_eq(rig_accepted(&rig, 1)->n_received, 0);
	ck_assert_int_eq(rig_accepted(&rig, 1)->n_closed, 1);
	/* The one buffer still goes round. */
	rig.io->ops->ahead_return(rig.io, rig_accepted(&rig, 4)->ahead_idx);
	rig.io->ops->recv_ahead(rig.io, rig_accepted(&rig, 0)->conn);
	ck_assert_int_eq(write(clients[0], "m", 1), 1);
	rig_until(&rig, rig_accepted(&rig, 0)->n_received == 2);
	rig_finish(&rig);
	for (int i = 0; i < 5; i++)
		close(clients[i]);
}
END_TEST

/* A receive that was over but not yet reported when its connection was closed gives its buffer back. */
START_TEST(test_io_close_returns_unreported_buffers)
{
	struct rig rig;

	if (!rig_init(&rig, _i, 4, 16))
		return;

	const int listener_idx = rig_listen(&rig, false);

	for (int round = 0; round < 3; round++) {
		int clients[3];

		for (int i = 0; i < 3; i++) {
			clients[i] = rig_connect(&rig, listener_idx);
			rig.io->ops->recv_ahead(rig.io, rig_accepted(&rig, i)->conn);
		}
		rig_turns(&rig, 2);
		for (int i = 0; i < 3; i++)
			ck_assert_int_eq(write(clients[i], "m", 1), 1);
		rig.n_events_max = 2;
		rig_turn(&rig, 0); /* does not wait: the kernel then completes all that it can */
		rig.n_events_max = RIG_EVENTS_MAX;
		for (int i = 0; i < 3; i++) {
			if (rig_accepted(&rig, i)->n_received > 0)
				rig.io->ops->ahead_return(rig.io, rig_accepted(&rig, i)->ahead_idx);
			rig.io->ops->close(rig.io, rig_accepted(&rig, i)->conn);
		}
		for (int i = 0; i < 3; i++) {
			rig_until(&rig, rig_accepted(&rig, i)->n_closed == 1);
			close(clients[i]);
		}
		rig_forget(&rig);
	}

	/* All four buffers are still there: four messages arrive while none is returned. */
	int clients[4];

	for (int i = 0; i < 4; i++) {
		clients[i] = rig_connect(&rig, listener_idx);
		rig.io->ops->recv_ahead(rig.io, rig_accepted(&rig, i)->conn);
		ck_assert_int_eq(write(clients[i], "m", 1), 1);
		rig_until(&rig, rig_accepted(&rig, i)->n_received == 1);
	}
	for (int i = 0; i < 4; i++)
		close(clients[i]);
	rig_finish(&rig);
}
END_TEST

/* Two thousand connections come and go without leaving a descriptor behind. */
START_TEST(test_io_descriptors_stay_flat)
{
	struct rig rig;

	if (!rig_init(&rig, _i, 8, 64))
		return;

	const int listener_idx = rig_listen(&rig, false);
	const int n_before = rig_count_fds();

	for (int round = 0; round < 50; round++) {
		int clients[40];

		for (int i = 0; i < 40; i++) {
			clients[i] = rig_connect(&rig, listener_idx);
			rig.io->ops->recv_ahead(rig.io, rig_accepted(&rig, i)->conn);
		}
		rig_turns(&rig, 1);
		for (int i = 0; i < 40; i++) {
			if (i % 2) /* half are left by the peer first, half by us */
				close(clients[i]);
		}
		rig_turns(&rig, 1);
		for (int i = 0; i < 40; i++)
			rig.io->ops->close(rig.io, rig_accepted(&rig, i)->conn);
		for (int i = 0; i < 40; i++)
			rig_until(&rig, rig_accepted(&rig, i)->n_closed == 1);
		for (int i = 0; i < 40; i += 2)
			close(clients[i]);
		rig_forget(&rig);
	}
	ck_assert_int_eq(rig_count_fds(), n_before);
	rig_finish(&rig);
}
END_TEST

static void *signal_later(void *arg)
{
	const uint64_t one = 1;

	usleep(20000);
	ck_assert_int_eq(write(*(int *)arg, &one, sizeof(one)), sizeof(one));
	return NULL;
}

/* A watched eventfd wakes a waiting loop, its counter is read, and it goes on being watched; blocking or not.
 */
START_TEST(test_io_watch)
{
	struct rig rig;

	for (int flags = 0; flags <= EFD_NONBLOCK; flags += EFD_NONBLOCK) {
		if (!rig_init(&rig, _i, 4, 16))
			return;

		int fd = eventfd(0, flags | EFD_CLOEXEC);
		struct kv_io_event events[4];
		pthread_t thread;

		ck_assert_int_eq(rig.io->ops->watch(rig.io, fd, &fd, NULL), KV_OK);
		for (int round = 0; round < 3; round++) {
			ck_assert_int_eq(rig.io->ops->wait(rig.io, 0, events, 4), 0);
			ck_assert_int_eq(pthread_create(&thread, NULL, signal_later, &fd), 0);
			ck_assert_int_eq(rig.io->ops->wait(rig.io, 5000000000, events, 4), 1);
			ck_assert_int_eq(events[0].kind, KV_IO_WATCHED);
			ck_assert_ptr_eq(events[0].user, &fd);
			pthread_join(thread, NULL);

			struct pollfd is_readable = { .fd = fd, .events = POLLIN };

			ck_assert_int_eq(poll(&is_readable, 1, 0), 0);
		}
		rig_finish(&rig);
		close(fd);
	}
}
END_TEST

/* After stop_listening() new peers are refused, files are gone, and what is connected goes on. */
START_TEST(test_io_stop_listening)
{
	struct rig rig;

	for (int is_tcp = 0; is_tcp < 2; is_tcp++) {
		if (!rig_init(&rig, _i, 4, 16))
			return;

		const int listener_idx = rig_listen(&rig, is_tcp);
		const int client = rig_connect(&rig, listener_idx);
		struct rig_conn *conn = rig_accepted(&rig, 0);
		char path[128];

		rig.io->ops->stop_listening(rig.io);
		ck_assert_int_eq(rig_try_connect(&rig, listener_idx), -ECONNREFUSED);
		snprintf(path, sizeof(path), "%s/socket.lock", rig.dir);
		ck_assert_int_eq(access(path, F_OK), -1);
		rig.io->ops->recv_ahead(rig.io, conn->conn);
		ck_assert_int_eq(write(client, "m", 1), 1);
		rig_until(&rig, conn->n_received == 1);
		ck_assert_int_eq(rig.n_accepted, 1);
		close(client);
		rig_finish(&rig);
	}
}
END_TEST

/* A connection that floods does not keep another one's message or a new peer waiting for more than a few
 * turns. */
START_TEST(test_io_is_fair)
{
	static uint8_t sink[1024];
	struct rig rig;

	if (!rig_init(&rig, _i, 4, 16))
		return;

	const int listener_idx = rig_listen(&rig, true);
	struct bulk_client flood = { .fd = rig_connect(&rig, listener_idx) };
	struct rig_conn *flooder = rig_accepted(&rig, 0);
	const int small = rig_connect(&rig, listener_idx);
	struct rig_conn *quiet = rig_accepted(&rig, 1);
	int late = -1;
	pthread_t thread;

	ck_assert_int_eq(pthread_create(&thread, NULL, bulk_write, &flood), 0);
	rig.io->ops->recv_ahead(rig.io, quiet->conn);
	for (int turn = 0; turn < 60; turn++) {
		const int n_before = flooder->n_received;

		rig.n_events_max = 2; /* as little room as there may be */
		rig.io->ops->recv_into(rig.io, flooder->conn, sink, sizeof(sink));
		rig_until(&rig, flooder->n_received == n_before + 1);
		if (turn == 20) {
			ck_assert_int_eq(write(small, "m", 1), 1);
			late = rig_try_connect(&rig, listener_idx);
		}
	}
	ck_assert_int_eq(quiet->n_received, 1);
	ck_assert_int_eq(rig.n_accepted, 3);
	rig.io->ops->close(rig.io, flooder->conn);
	rig_until(&rig, flooder->n_closed == 1);
	pthread_join(thread, NULL);
	close(flood.fd);
	close(small);
	close(late);
	rig_finish(&rig);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("io");
	TCase *tcase = tcase_create("both");

	tcase_set_timeout(tcase, 60);
	tcase_add_loop_test(tcase, test_io_echo, 0, 2);
	tcase_add_loop_test(tcase, test_io_tcp_nodelay_is_set, 0, 2);
	tcase_add_loop_test(tcase, test_io_large_transfers_through_tiny_socket_buffers, 0, 2);
	tcase_add_loop_test(tcase, test_io_close_with_open_operations, 0, 2);
	tcase_add_loop_test(tcase, test_io_peer_reset, 0, 2);
	tcase_add_loop_test(tcase, test_io_half_close, 0, 2);
	tcase_add_loop_test(tcase, test_io_ahead_ring_exhaustion, 0, 2);
	tcase_add_loop_test(tcase, test_io_ahead_waiters_may_leave, 0, 2);
	tcase_add_loop_test(tcase, test_io_close_returns_unreported_buffers, 0, 2);
	tcase_add_loop_test(tcase, test_io_descriptors_stay_flat, 0, 2);
	tcase_add_loop_test(tcase, test_io_watch, 0, 2);
	tcase_add_loop_test(tcase, test_io_stop_listening, 0, 2);
	tcase_add_loop_test(tcase, test_io_is_fair, 0, 2);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
