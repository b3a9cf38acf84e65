/* Notify: what a service manager hears, and when. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "server/notify.h"
#include "tests/lib/kv_test.h"

#define SECOND_NS 1000000000ull

static int manager_fd;
static struct srv_notify notify;

/* A manager in the abstract name space, so that no file stays behind. */
static void setup(void)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	char name[64];
	const int n = snprintf(name, sizeof(name), "@tqkv-test-notify-%d", (int)getpid());

	memcpy(address.sun_path, name, (size_t)n);
	address.sun_path[0] = '\0';
	manager_fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	ck_assert_int_ge(manager_fd, 0);
	ck_assert_int_eq(bind(manager_fd, (struct sockaddr *)(void *)&address,
				 (socklen_t)(offsetof(struct sockaddr_un, sun_path) + (size_t)n)),
		0);
	setenv("NOTIFY_SOCKET", name, 1);
	unsetenv("WATCHDOG_USEC");
	unsetenv("WATCHDOG_PID");
}

static void teardown(void)
{
	srv_notify_finish(&notify);
	close(manager_fd);
	unsetenv("NOTIFY_SOCKET");
	unsetenv("WATCHDOG_USEC");
	unsetenv("WATCHDOG_PID");
}

/* The next message, "" when there is none. */
static const char *heard(void)
{
	static char text[128];
	const ssize_t n = recv(manager_fd, text, sizeof(text) - 1, 0);

	text[n > 0 ? n : 0] = '\0';
	return text;
}

/* A message is one datagram, as it is. */
START_TEST(test_notify_send)
{
	srv_notify_init(&notify);
	srv_notify_send(&notify, "READY=1");
	srv_notify_send(&notify, "STOPPING=1");
	ck_assert_str_eq(heard(), "READY=1");
	ck_assert_str_eq(heard(), "STOPPING=1");
	ck_assert_str_eq(heard(), "");
}
END_TEST

/* Without a manager, or with a name that no socket can have, nothing happens and the loop sleeps as long as
 * it wants. */
START_TEST(test_notify_nobody)
{
	char longer[200];

	memset(longer, 'x', sizeof(longer) - 1);
	longer[sizeof(longer) - 1] = '\0';
	setenv("WATCHDOG_USEC", "1000000", 1);
	for (int i = 0; i < 3; i++) {
		if (i == 0)
			unsetenv("NOTIFY_SOCKET");
		else
			setenv("NOTIFY_SOCKET", i == 1 ? "" : longer, 1);
		srv_notify_init(&notify);
		srv_notify_send(&notify, "READY=1");
		ck_assert_int_eq(srv_notify_turn(&notify, SECOND_NS, 77), 77);
		srv_notify_finish(&notify);
	}
	ck_assert_str_eq(heard(), "");
}
END_TEST

/* Two signs of life per period, however often the loop turns, and it never sleeps past the next one. */
START_TEST(test_notify_watchdog)
{
	char pid[32];
	unsigned n_heard = 0;

	snprintf(pid, sizeof(pid), "%d", (int)getpid());
	setenv("WATCHDOG_USEC", "30000000", 1);
	setenv("WATCHDOG_PID", pid, 1);
	srv_notify_init(&notify);
	for (uint64_t now_ns = 5 * SECOND_NS; now_ns < 65 * SECOND_NS; now_ns += SECOND_NS / 4) {
		const int64_t wait_ns = srv_notify_turn(&notify, now_ns, 3600 * (int64_t)SECOND_NS);

		ck_assert_int_ge(wait_ns, 0);
		ck_assert_int_le(wait_ns, 15 * (int64_t)SECOND_NS);
		if (strcmp(heard(), "WATCHDOG=1") == 0)
			n_heard++;
	}
	ck_assert_uint_eq(n_heard, 4);
	ck_assert_int_eq(srv_notify_turn(&notify, 65 * SECOND_NS, 5), 5);
}
END_TEST

/* A watchdog for another process, or a period that is no number, is none. */
START_TEST(test_notify_watchdog_of_others)
{
	static const char *const periods[] = { "30000000", "x", "", "-1", "99999999999999999999" };
	static const char *const pids[] = { "1", NULL, NULL, NULL, NULL };

	for (size_t i = 0; i < sizeof(periods) / sizeof(periods[0]); i++) {
		setenv("WATCHDOG_USEC", periods[i], 1);
		if (pids[i])
			setenv("WATCHDOG_PID", pids[i], 1);
		else
			unsetenv("WATCHDOG_PID");
		srv_notify_init(&notify);
		ck_assert_int_eq(srv_notify_turn(&notify, SECOND_NS, 99), 99);
		srv_notify_finish(&notify);
	}
	ck_assert_str_eq(heard(), "");
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("notify");
	TCase *tcase = tcase_create("notify");

	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_add_test(tcase, test_notify_send);
	tcase_add_test(tcase, test_notify_nobody);
	tcase_add_test(tcase, test_notify_watchdog);
	tcase_add_test(tcase, test_notify_watchdog_of_others);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
