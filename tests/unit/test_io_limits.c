/*
 * What both io implementations do at their limits and when something is denied: time, descriptors,
 * connections, memory, the completion queue, io_uring itself. Loop index 0: io_uring (not run where it is
 * denied), 1: epoll.
 */
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

#include "core/checked.h"
#include "core/memory.h"
#include "server/io_common.h"
#include "tests/lib/io_rig.h"
#include "tests/lib/kv_test.h"

/* wait() keeps its time: nothing to do takes the whole timeout, zero does not wait. */
START_TEST(test_io_wait_timeout)
{
	struct rig rig;
	struct kv_io_event events[4];

	if (!rig_init(&rig, _i, 4, 16))
		return;
	rig_listen(&rig, false);

	const uint64_t start_ns = srv_io_now_ns();

	for (int i = 0; i < 100; i++)
		ck_assert_int_eq(rig.io->ops->wait(rig.io, 0, events, 4), 0);

	const uint64_t polled_ns = srv_io_now_ns();

	ck_assert_int_eq(rig.io->ops->wait(rig.io, 30000000, events, 4), 0);

	const uint64_t waited_ns = srv_io_now_ns();

	ck_assert_uint_lt(polled_ns - start_ns, 1000000000);
	ck_assert_uint_ge(waited_ns - polled_ns, 30000000);
	rig_finish(&rig);
}
END_TEST

/* What a send has left to bring stands still exactly while its peer reads nothing, over TCP, too. */
START_TEST(test_io_unsent_bytes)
{
	enum { N_BYTES = 16 << 20 };
	static uint8_t data[N_BYTES];
	static uint8_t taken[65536];

	for (int is_tcp = 0; is_tcp < 2; is_tcp++) {
		struct rig rig;

		if (!rig_init(&rig, _i, 4, 16))
			return;

		const int fd = rig_connect(&rig, rig_listen(&rig, is_tcp));
		struct rig_conn *conn = rig_accepted(&rig, 0);
		const struct iovec part = { .iov_base = data, .iov_len = N_BYTES };
		uint64_t last = 0, n_read = 0;

		rig.io->ops->send(rig.io, conn->conn, &part, 1);
		for (int n_still = 0; n_still < 10;) { /* until the kernel has what it takes */
			rig_turns(&rig, 1);
			const uint64_t n_bytes = rig.io->ops->unsent_bytes(rig.io, conn->conn);

			n_still = n_bytes == last ? n_still + 1 : 0;
			last = n_bytes;
		}
		ck_assert_int_eq(conn->n_sent, 0);
		while (n_read < N_BYTES / 2) {
			const ssize_t n = read(fd, taken, sizeof(taken));

			ck_assert_int_gt(n, 0);
			n_read += (uint64_t)n;
			rig_turns(&rig, 1);
		}
		const uint64_t n_left = rig.io->ops->unsent_bytes(rig.io, conn->conn);

		/* A Unix socket counts its buffers beside what is in them. */
		ck_assert_uint_lt(n_left, last);
		ck_assert_uint_gt(last - n_left, N_BYTES / 4);
		while (conn->n_sent == 0) {
			ck_assert_int_gt(read(fd, taken, sizeof(taken)), 0);
			rig_turn(&rig, 0);
		}
		ck_assert_int_eq(conn->sent, 0);
		close(fd);
		rig_finish(&rig);
	}
}
END_TEST

static void on_alarm(int number)
{
	(void)number;
}

/* A signal ends an endless wait. */
START_TEST(test_io_wait_is_interrupted)
{
	struct rig rig;
	struct kv_io_event events[4];
	const struct sigaction action = { .sa_handler = on_alarm };
	const struct itimerval soon = { .it_value = { .tv_usec = 30000 } };

	if (!rig_init(&rig, _i, 4, 16))
		return;
	rig_listen(&rig, false);
	sigaction(SIGALRM, &action, NULL);
	setitimer(ITIMER_REAL, &soon, NULL);
	ck_assert_int_eq(rig.io->ops->wait(rig.io, -1, events, 4), 0);
	rig_finish(&rig);
}
END_TEST

/* A peer beyond connections_max reads an end of stream at once; room that comes free is used again. */
START_TEST(test_io_connections_max)
{
	struct rig rig;
	int clients[4];
	char byte;

	if (!rig_init(&rig, _i, 4, 2))
		return;

	const int listener_idx = rig_listen(&rig, false);

	for (int i = 0; i < 3; i++)
		clients[i] = rig_try_connect(&rig, listener_idx);
	rig_until(&rig, rig.n_accepted == 2);
	rig_turns(&rig, 3);
	ck_assert_int_eq(read(clients[2], &byte, 1), 0);
	rig.io->ops->close(rig.io, rig_accepted(&rig, 0)->conn);
	rig_until(&rig, rig_accepted(&rig, 0)->n_closed == 1);
	clients[3] = rig_try_connect(&rig, listener_idx);
	rig_until(&rig, rig.n_accepted == 3);
	for (int i = 0; i < 4; i++)
		close(clients[i]);
	rig_finish(&rig);
}
END_TEST

/* Without a free descriptor accepting pauses without spinning, and goes on when there is one again. */
START_TEST(test_io_accept_pauses_without_descriptors)
{
	enum { N_FDS = 64 }; /* more than the bench needs */
	struct rig rig;
	struct rlimit limit;
	struct rusage before, after;
	int fillers[N_FDS], n_fillers = 0;

	/* First of all: io_uring remembers the limit from when the accept was posted. */
	getrlimit(RLIMIT_NOFILE, &limit);
	limit.rlim_cur = N_FDS;
	ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
	if (!rig_init(&rig, _i, 4, 16))
		return;

	const int listener_idx = rig_listen(&rig, false);
	const int first = rig_connect(&rig, listener_idx);
	const int second = rig_try_connect(&rig, listener_idx);

	while ((fillers[n_fillers] = dup(first)) >= 0)
		n_fillers++;
	rig_turns(&rig, 2);
	ck_assert_int_eq(rig.n_accepted, 1);
	getrusage(RUSAGE_SELF, &before);

	struct kv_io_event events[4];
	const uint64_t end_ns = srv_io_now_ns() + 250000000;
	int n_turns = 0;

	for (; srv_io_now_ns() < end_ns; n_turns++)
		ck_assert_int_eq(rig.io->ops->wait(rig.io, 250000000, events, 4), 0);
	getrusage(RUSAGE_SELF, &after);
	ck_assert_int_lt(n_turns, 20);

	const int64_t cpu_us = (after.ru_utime.tv_sec - before.ru_utime.tv_sec) * 1000000 +
		after.ru_utime.tv_usec - before.ru_utime.tv_usec +
		(after.ru_stime.tv_sec - before.ru_stime.tv_sec) * 1000000 + after.ru_stime.tv_usec -
		before.ru_stime.tv_usec;

	ck_assert_int_lt(cpu_us, 100000);
	close(fillers[--n_fillers]);
	rig_until(&rig, rig.n_accepted == 2);
	while (n_fillers > 0)
		close(fillers[--n_fillers]);
	close(first);
	close(second);
	rig_finish(&rig);
}
END_TEST

/*
 * Nine thousand connections that all become ready between two turns, more than the completion queue holds:
 * every one is reported once.
 */
START_TEST(test_io_nine_thousand_ready_at_once)
{
	enum { N = 9000 };
	struct rig rig;
	struct rlimit limit;
	static int clients[N];

	getrlimit(RLIMIT_NOFILE, &limit);
	limit.rlim_cur = limit.rlim_max;
	(void)setrlimit(RLIMIT_NOFILE, &limit);
	if (limit.rlim_cur < 2 * N + 100) {
		printf("not run: %u descriptors needed, %llu allowed\n", 2 * N + 100,
			(unsigned long long)limit.rlim_cur);
		return;
	}
	if (!rig_init(&rig, _i, 16384, N))
		return;

	const int listener_idx = rig_listen(&rig, false);

	for (int i = 0; i < N; i++) {
		clients[i] = rig_connect(&rig, listener_idx);
		rig.io->ops->recv_ahead(rig.io, rig_accepted(&rig, i)->conn);
	}
	rig_turns(&rig, 2);
	for (int i = 0; i < N; i++)
		ck_assert_int_eq(write(clients[i], "m", 1), 1);
	for (int i = 0; i < N; i++)
		rig_until(&rig, rig_accepted(&rig, i)->n_received == 1);
	rig_turns(&rig, 2);
	for (int i = 0; i < N; i++) {
		ck_assert_int_eq(rig_accepted(&rig, i)->n_received, 1);
		ck_assert_int_eq(rig_accepted(&rig, i)->received, 1);
		close(clients[i]);
	}
	rig_finish(&rig);
}
END_TEST

#ifdef KV_TEST_HOOKS
/* A receive or send that the kernel fails is reported once, costs no buffer, and the connection can go on. */
START_TEST(test_io_injected_faults)
{
	struct rig rig;
	char back[4];

	if (!rig_init(&rig, _i, 1, 16))
		return;

	const int client = rig_connect(&rig, rig_listen(&rig, false));
	struct rig_conn *conn = rig_accepted(&rig, 0);

	for (int round = 0; round < 4; round++) {
		srv_io_fault_after(SRV_IO_FAULT_RECV, 0, EIO);
		rig.io->ops->recv_ahead(rig.io, conn->conn);
		ck_assert_int_eq(write(client, "lost", 4), 4);
		rig_until(&rig, conn->n_received == 2 * round + 1);
		ck_assert_int_eq(conn->received, -EIO);
		ck_assert_ptr_null(conn->ahead);
		rig.io->ops->recv_ahead(rig.io, conn->conn);
		ck_assert_int_eq(write(client, "kept", 4), 4);
		rig_until(&rig, conn->n_received == 2 * round + 2);
		ck_assert_mem_eq(conn->ahead, "kept", 4);
		rig.io->ops->ahead_return(rig.io, conn->ahead_idx);
	}
	srv_io_fault_after(SRV_IO_FAULT_SEND, 0, EIO);
	rig_send(&rig, conn, "lost", 4);
	rig_until(&rig, conn->n_sent == 1);
	ck_assert_int_eq(conn->sent, -EIO);
	rig_send(&rig, conn, "kept", 4);
	rig_until(&rig, conn->n_sent == 2);
	ck_assert_int_eq(conn->sent, 0);
	ck_assert_int_eq(read(client, back, 4), 4);
	close(client);
	rig_finish(&rig);
}
END_TEST
#endif

/* Whichever allocation fails, creating fails with NO_MEMORY and leaves no descriptor behind. */
START_TEST(test_io_create_fails_whole)
{
	const int n_before = rig_count_fds();
	struct kv_io *io = NULL;
	struct kv_error err;

	if (!rig_is_available(_i))
		return;
	for (int64_t k = 0;; k++) {
		kv_alloc_fail_after(k);

		const enum kv_status status = rig_create_io(_i, 8, 8, &io, &err);

		kv_alloc_fail_after(-1);
		if (status == KV_OK) {
			ck_assert_int_ge(k, 3);
			break;
		}
		ck_assert_int_eq(status, KV_NO_MEMORY);
		ck_assert_ptr_null(io);
	}

	const struct kv_io_ops *ops = io->ops;

	ops->destroy(io);
	ops->destroy(NULL);
	ck_assert_int_eq(rig_create_io(_i, 0, 8, &io, &err), KV_BAD_ARG);
	ck_assert_int_eq(rig_create_io(_i, 8, 0, &io, &err), KV_BAD_ARG);
	ck_assert_int_eq(rig_count_fds(), n_before);
}
END_TEST

static void deny_io_uring(uint32_t errno_value)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | errno_value),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	const struct sock_fprog program = { .len = KV_LENGTH(code), .filter = code };

	ck_assert_int_eq(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
	ck_assert_int_eq(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program), 0);
}

/* A sandbox that denies io_uring gives UNAVAILABLE with the errno's name and the profile that admits it. */
START_TEST(test_io_uring_denied_says_how_to_admit_it)
{
	static const struct {
		uint32_t value;
		const char *name;
	} reasons[] = { { ENOSYS, "ENOSYS" }, { EPERM, "EPERM" }, { ENOMEM, "ENOMEM" } };
	struct kv_io *io = NULL;
	struct kv_error err;

	deny_io_uring(reasons[_i].value);
	ck_assert_int_eq(srv_io_uring_create(8, 8, &io, &err), KV_UNAVAILABLE);
	ck_assert_ptr_null(io);
	ck_assert_ptr_nonnull(strstr(err.msg, reasons[_i].name));
	ck_assert_ptr_nonnull(strstr(err.msg, "deploy/seccomp-io_uring.json"));
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("io_limits");
	TCase *tcase = tcase_create("both");

	tcase_set_timeout(tcase, 60);
	tcase_add_loop_test(tcase, test_io_wait_timeout, 0, 2);
	tcase_add_loop_test(tcase, test_io_unsent_bytes, 0, 2);
	tcase_add_loop_test(tcase, test_io_wait_is_interrupted, 0, 2);
	tcase_add_loop_test(tcase, test_io_connections_max, 0, 2);
	tcase_add_loop_test(tcase, test_io_accept_pauses_without_descriptors, 0, 2);
	tcase_add_loop_test(tcase, test_io_nine_thousand_ready_at_once, 0, 2);
#ifdef KV_TEST_HOOKS
	tcase_add_loop_test(tcase, test_io_injected_faults, 0, 2);
#endif
	tcase_add_loop_test(tcase, test_io_create_fails_whole, 0, 2);
	tcase_add_loop_test(tcase, test_io_uring_denied_says_how_to_admit_it, 0, 3);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
