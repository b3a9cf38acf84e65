/*
 * The control API under stress: loops that do not answer, clients that go away, shutdown in the middle, no
 * memory. Nothing hangs, leaks or is freed twice (the sanitizers look), and the next client is served.
 * Nonsense on the socket is in test_http_hostile.c.
 */
#include <stdio.h>
#include <string.h>

#include "core/checked.h"
#include "core/memory.h"
#include "tests/lib/kv_test_http.h"

#define DELETE_POOL "DELETE /v1/pools/a HTTP/1.1\r\nHost: localhost\r\n\r\n"
#define GET_INFO    "GET /v1/info HTTP/1.1\r\nHost: localhost\r\n\r\n"

static struct kv_test_http test;
static struct kv_test_response response;

static void setup(void)
{
	kv_test_http_begin(&test, "127.0.0.1:0", false);
}

static void teardown(void)
{
	kv_test_http_end(&test);
}

static void set_answer_timeout_ms(uint32_t timeout_ms)
{
	pthread_mutex_lock(&test.http->lock);
	test.http->answer_timeout_ms = timeout_ms;
	pthread_mutex_unlock(&test.http->lock);
}

/* How long a connection may take from accept, or from its last answer, to the end of the next one. */
static void set_times_ms(uint32_t total_ms, uint32_t crowded_ms)
{
	pthread_mutex_lock(&test.http->lock);
	test.http->total_ms = total_ms;
	test.http->crowded_ms = crowded_ms;
	pthread_mutex_unlock(&test.http->lock);
}

static void assert_problem(int status, const char *code, const char *part)
{
	char member[64];

	ck_assert_msg(response.status == status, "status %d, expected %d: %s", response.status, status,
		response.body);
	snprintf(member, sizeof(member), "\"code\":\"%s\"}", code);
	ck_assert_msg(strstr(response.body, member) && strstr(response.body, part), "%s", response.body);
}

/* The daemon still answers, at once. */
static void assert_serves(void)
{
	atomic_store(&test.mode, KV_TEST_LOOP_ANSWER);
	kv_test_ask(&test, "GET", "/v1/info", "", NULL, &response);
	ck_assert_int_eq(response.status, 200);
}

static void wait_until_held(unsigned n)
{
	for (unsigned i = 0; i < 2000 && atomic_load(&test.n_held) < n; i++)
		usleep(5000);
	ck_assert_uint_ge(atomic_load(&test.n_held), n);
}

static int connect_and_send(const char *request)
{
	const int fd = kv_test_connect(&test);

	ck_assert(kv_test_send(fd, request, strlen(request)));
	return fd;
}

/* close() as a reset: the peer learns of it at once. */
static void reset(int fd)
{
	const struct linger linger = { .l_onoff = 1, .l_linger = 0 };

	ck_assert_int_eq(setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, sizeof(linger)), 0);
	close(fd);
}

/* A loop that has taken the request and does not answer: 503 after the time is over, and its late answer is
 * thrown away. */
START_TEST(test_http_loop_that_holds)
{
	static const struct {
		const char *method, *path, *body, *part;
	} cases[] = {
		{ "GET", "/readyz", NULL, "the event loop does not answer\"" },
		{ "GET", "/metrics", NULL, "the event loop does not answer\"" },
		{ "POST", "/v1/pools", SMOL, "it may still carry this out" },
		{ "DELETE", "/v1/pools/smol", NULL, "it may still carry this out" },
	};

	set_answer_timeout_ms(100);
	atomic_store(&test.mode, KV_TEST_LOOP_HOLD);
	for (size_t i = 0; i < KV_LENGTH(cases); i++) {
		kv_test_ask(&test, cases[i].method, cases[i].path, JSON_TYPE, cases[i].body, &response);
		assert_problem(503, "NO_ANSWER", cases[i].part);
	}
	wait_until_held(KV_LENGTH(cases));
	set_answer_timeout_ms(SRV_HTTP_ANSWER_TIMEOUT_MS);
	assert_serves();
}
END_TEST

/* A loop that takes nothing at all: the same; what waits in the mailbox is bounded, then clients hear
 * BUSY_RETRY. */
START_TEST(test_http_loop_that_is_dead)
{
	set_answer_timeout_ms(30);
	atomic_store(&test.mode, KV_TEST_LOOP_DEAD);
	for (unsigned i = 0; i < SRV_MAILBOX_WAITING_MAX; i++) {
		const int fd = connect_and_send(GET_INFO);

		kv_test_receive(fd, false, &response);
		assert_problem(503, "NO_ANSWER", "does not answer");
		close(fd);
		if (i == 2)
			set_answer_timeout_ms(1);
	}
	for (unsigned i = 0; i < 3; i++) {
		kv_test_ask(&test, "GET", "/v1/info", "", NULL, &response);
		assert_problem(503, "BUSY_RETRY", "256 control requests wait already");
	}
	/* /livez needs no loop. */
	kv_test_ask(&test, "GET", "/livez", "", NULL, &response);
	ck_assert_int_eq(response.status, 200);
	set_answer_timeout_ms(SRV_HTTP_ANSWER_TIMEOUT_MS);
	atomic_store(&test.mode, KV_TEST_LOOP_ANSWER);
	for (unsigned i = 0; i < 1000 && !srv_mailbox_is_empty(&test.mailbox); i++)
		usleep(5000);
	assert_serves();
}
END_TEST

/* The answer comes in the moment in which the time is over, many times: one of both wins, never both. */
START_TEST(test_http_answer_races_with_timeout)
{
	unsigned n_answered = 0, n_late = 0;

	set_answer_timeout_ms(4);
	for (unsigned i = 0; i < 200; i++) {
		atomic_store(&test.mode, KV_TEST_LOOP_HOLD);
		const int fd = connect_and_send(GET_INFO);

		usleep(1000 + i % 20 * 200); /* the loop looks at the mode once a millisecond */
		atomic_store(&test.mode, KV_TEST_LOOP_ANSWER);
		kv_test_receive(fd, false, &response);
		if (response.status == 200)
			n_answered++;
		else
			n_late++;
		ck_assert(response.status == 200 || response.status == 503);
		close(fd);
	}
	printf("answered %u, late %u\n", n_answered, n_late);
	set_answer_timeout_ms(SRV_HTTP_ANSWER_TIMEOUT_MS);
	assert_serves();
}
END_TEST

/* A request that trickles in, a byte now and then, ends by its time in all; who asks in time stays. */
START_TEST(test_http_slow_requests_end)
{
	static const char start[] = "GET /v1/info HTTP/1.1\r\nHost: local";
	const int slow = kv_test_connect(&test);
	size_t n_sent = 0;
	char byte;

	set_times_ms(300, 300);
	while (n_sent + 1 < sizeof(start) && kv_test_send(slow, start + n_sent, 1)) {
		n_sent++;
		usleep(20000);
	}
	/* The rest of the line never comes; the peer sees the end, or a reset. */
	ck_assert_int_le(recv(slow, &byte, 1, 0), 0);
	close(slow);
	ck_assert_uint_eq(atomic_load(&test.http->counters.connections_slow), 1);
	set_times_ms(600000, 600000);
	assert_serves();
}
END_TEST

/* 200 requests at the same time, all suspended together, all answered. */
START_TEST(test_http_two_hundred_at_once)
{
	int fds[200];

	set_times_ms(600000, 600000);
	atomic_store(&test.mode, KV_TEST_LOOP_HOLD);
	for (size_t i = 0; i < KV_LENGTH(fds); i++)
		fds[i] = connect_and_send(
			i % 2 ? GET_INFO : "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n");
	wait_until_held(KV_LENGTH(fds));
	atomic_store(&test.mode, KV_TEST_LOOP_ANSWER);
	for (size_t i = 0; i < KV_LENGTH(fds); i++) {
		kv_test_receive(fds[i], false, &response);
		ck_assert_int_eq(response.status, 200);
		ck_assert_ptr_nonnull(strstr(response.body, i % 2 ? "\"version\"" : "tqkv_build_info"));
	}
	/* The connections stay open; each serves another one. */
	for (size_t i = 0; i < KV_LENGTH(fds); i++)
		ck_assert(kv_test_send(fds[i], GET_INFO, strlen(GET_INFO)));
	for (size_t i = 0; i < KV_LENGTH(fds); i++) {
		kv_test_receive(fds[i], false, &response);
		ck_assert_int_eq(response.status, 200);
		close(fds[i]);
	}
}
END_TEST

/*
 * Connections above the limit wait until one is closed. One that asks is answered.
 */
START_TEST(test_http_connection_limit)
{
	int fds[SRV_HTTP_CONNECTIONS_MAX + 10];

	set_times_ms(600000, 600000);
	for (size_t i = 0; i < KV_LENGTH(fds); i++) {
		fds[i] = kv_test_connect(&test);
		if (i == 0)
			ck_assert(kv_test_send(fds[0], GET_INFO, strlen(GET_INFO)));
	}
	kv_test_receive(fds[0], false, &response);
	ck_assert_int_eq(response.status, 200);
	for (size_t i = 0; i < KV_LENGTH(fds); i++)
		close(fds[i]);
	assert_serves();
}
END_TEST

/* Clients that go away while their connection is suspended, by close and by reset. */
START_TEST(test_http_clients_that_go_away)
{
	for (unsigned round = 0; round < 5; round++) {
		int fds[20];

		atomic_store(&test.mode, KV_TEST_LOOP_HOLD);
		for (size_t i = 0; i < KV_LENGTH(fds); i++)
			fds[i] = connect_and_send(i % 3 ? GET_INFO : DELETE_POOL);
		wait_until_held(KV_LENGTH(fds));
		for (size_t i = 0; i < KV_LENGTH(fds); i++) {
			if (i % 2)
				close(fds[i]);
			else
				reset(fds[i]);
		}
		assert_serves();
	}
	/* The same without waiting: the reset may overtake the request, or hit it anywhere. */
	for (unsigned round = 0; round < 100; round++) {
		atomic_store(&test.mode, round % 2 ? KV_TEST_LOOP_HOLD : KV_TEST_LOOP_ANSWER);
		reset(connect_and_send(GET_INFO));
	}
	assert_serves();
}
END_TEST

/* Clients that go away while their time runs out: neither the loop's late answer nor the request is freed
 * twice. */
START_TEST(test_http_clients_that_go_away_late)
{
	set_answer_timeout_ms(20);
	for (unsigned round = 0; round < 5; round++) {
		atomic_store(&test.mode, KV_TEST_LOOP_HOLD);
		for (unsigned i = 0; i < 10; i++)
			reset(connect_and_send(GET_INFO));
		usleep(40000);
		atomic_store(&test.mode, KV_TEST_LOOP_ANSWER);
		usleep(20000);
	}
	set_answer_timeout_ms(SRV_HTTP_ANSWER_TIMEOUT_MS);
	assert_serves();
}
END_TEST

static uint64_t now_ms(void)
{
	return kv_clock_now_ns(kv_clock_system()) / KV_NS_PER_MS;
}

/* Stopping while requests are suspended: their clients hear 503, the loop's late answers are thrown away. */
START_TEST(test_http_stop_with_suspended_requests)
{
	int fds[20];

	atomic_store(&test.mode, KV_TEST_LOOP_HOLD);
	for (size_t i = 0; i < KV_LENGTH(fds); i++)
		fds[i] = connect_and_send(GET_INFO);
	wait_until_held(KV_LENGTH(fds));
	const uint64_t start_ms = now_ms();

	srv_mailbox_close(&test.mailbox);
	srv_http_stop(test.http);
	test.http = NULL;
	ck_assert_uint_lt(now_ms() - start_ms, 900);
	for (size_t i = 0; i < KV_LENGTH(fds); i++) {
		kv_test_receive(fds[i], false, &response);
		assert_problem(503, "DRAINING", "draining");
		close(fds[i]);
	}
}
END_TEST

/* The same with a loop that had already ended and left requests in the mailbox. */
START_TEST(test_http_stop_with_requests_in_the_mailbox)
{
	int fds[20];

	atomic_store(&test.mode, KV_TEST_LOOP_DEAD);
	for (size_t i = 0; i < KV_LENGTH(fds); i++)
		fds[i] = connect_and_send(GET_INFO);
	for (unsigned i = 0; i < 2000; i++) {
		pthread_mutex_lock(&test.mailbox.lock);
		const unsigned n_waiting = test.mailbox.n_waiting;

		pthread_mutex_unlock(&test.mailbox.lock);
		if (n_waiting == KV_LENGTH(fds))
			break;
		usleep(5000);
	}
	kv_test_http_end_loop(&test);
	srv_http_stop(test.http);
	test.http = NULL;
	for (size_t i = 0; i < KV_LENGTH(fds); i++) {
		kv_test_receive(fds[i], false, &response);
		assert_problem(503, "DRAINING", "draining");
		close(fds[i]);
	}
}
END_TEST

/* After the mailbox was closed every route that needs the loop says that the daemon drains. */
START_TEST(test_http_draining)
{
	srv_mailbox_close(&test.mailbox);
	kv_test_ask(&test, "GET", "/readyz", "", NULL, &response);
	assert_problem(503, "DRAINING", "draining");
	kv_test_ask(&test, "POST", "/v1/pools", JSON_TYPE, SMOL, &response);
	assert_problem(503, "DRAINING", "draining");
	kv_test_ask(&test, "GET", "/livez", "", NULL, &response);
	ck_assert_int_eq(response.status, 200);
}
END_TEST

/* Idle and half-open connections do not hold up the end. */
START_TEST(test_http_stop_with_idle_connections)
{
	int fds[30];

	for (size_t i = 0; i < KV_LENGTH(fds); i++)
		fds[i] = connect_and_send(i % 2
				? "POST /v1/pools HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"
				: "GET /v1");
	assert_serves();
	const uint64_t start_ms = now_ms();

	srv_mailbox_close(&test.mailbox);
	srv_http_stop(test.http);
	test.http = NULL;
	ck_assert_uint_lt(now_ms() - start_ms, 900);
	for (size_t i = 0; i < KV_LENGTH(fds); i++)
		close(fds[i]);
}
END_TEST

static atomic_bool must_end_clients;

static void *ask_for_ever(void *cls)
{
	const uint16_t *port = cls;
	struct kv_test_response *own = kv_alloc(1, sizeof(*own));

	while (!atomic_load(&must_end_clients)) {
		const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
		const struct sockaddr_in address = {
			.sin_family = AF_INET,
			.sin_port = htons(*port),
			.sin_addr.s_addr = htonl(INADDR_LOOPBACK),
		};

		if (connect(fd, (const struct sockaddr *)&address, sizeof(address)) == 0 &&
			kv_test_send(fd, GET_INFO, strlen(GET_INFO)))
			kv_test_receive(fd, false, own);
		close(fd);
	}
	kv_free(own);
	return NULL;
}

/* Start and stop again and again while clients keep asking. */
START_TEST(test_http_stop_under_load)
{
	uint16_t port = test.port;
	pthread_t clients[3];
	char text[32];

	for (size_t i = 0; i < KV_LENGTH(clients); i++)
		ck_assert_int_eq(pthread_create(&clients[i], NULL, ask_for_ever, &port), 0);
	snprintf(text, sizeof(text), "127.0.0.1:%u", port);
	for (unsigned i = 0; i < 10; i++) {
		usleep(20000);
		kv_test_http_end(&test);
		kv_test_http_begin(&test, text, false); /* the same port: SO_REUSEADDR */
	}
	atomic_store(&must_end_clients, true);
	for (size_t i = 0; i < KV_LENGTH(clients); i++)
		pthread_join(clients[i], NULL);
}
END_TEST

/* What cannot be bound is told with the address; nothing is left behind. */
START_TEST(test_http_start_refuses)
{
	static const struct {
		const char *http, *part;
		enum kv_status status;
	} cases[] = {
		{ "0.0.0.0:0", "--insecure", KV_BAD_CONFIG },
		{ "localhost", "expected tcp:HOST:PORT", KV_BAD_CONFIG },
		{ "203.0.113.1:0", "cannot listen on 203.0.113.1:0",
			KV_IO_ERROR }, /* a documentation address */
		{ "in use", "cannot listen on 127.0.0.1:", KV_IO_ERROR },
	};
	struct srv_options options = test.options;
	const struct srv_http_seams seams = {
		.mailbox = &test.mailbox, .pulse = &test.pulse, .clock = kv_clock_system()
	};
	struct srv_http *http = NULL;
	char bound[64];
	struct kv_error error;

	for (size_t i = 0; i < KV_LENGTH(cases); i++) {
		strcpy(options.http, cases[i].http);
		if (strcmp(cases[i].http, "in use") == 0)
			strcpy(options.http, test.bound);
		options.insecure = cases[i].status == KV_IO_ERROR;
		ck_assert_int_eq(srv_http_start(&options, &seams, &http, bound, sizeof(bound), &error),
			cases[i].status);
		ck_assert_msg(strstr(error.msg, cases[i].part) != NULL, "%s", error.msg);
		ck_assert_ptr_null(http);
	}
	srv_http_stop(NULL);
	assert_serves();
}
END_TEST

/* Whichever allocation fails, the client gets a whole answer or none, and the next one is served. */
START_TEST(test_http_without_memory)
{
	static const char *const paths[] = { "/v1/info", "/v1/config", "/metrics", "/nothing",
		"/v1/sessions" };

	for (size_t i = 0; i < KV_LENGTH(paths); i++) {
		unsigned n_failed = 0;

		for (int64_t k = 0; k < 12; k++) {
			kv_alloc_fail_after(k);
			kv_test_ask(&test, "GET", paths[i], "", NULL, &response);
			kv_alloc_fail_after(-1);
			if (response.status == 500)
				assert_problem(500, "NO_MEMORY", "out of memory");
			n_failed += response.status == 500 || response.status == 0;
		}
		ck_assert_uint_ge(n_failed, 1);
		assert_serves();
	}
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("http_lifetime");
	TCase *tcase = tcase_create("lifetime");

	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_set_timeout(tcase, 120);
	tcase_add_test(tcase, test_http_loop_that_holds);
	tcase_add_test(tcase, test_http_loop_that_is_dead);
	tcase_add_test(tcase, test_http_answer_races_with_timeout);
	tcase_add_test(tcase, test_http_slow_requests_end);
	tcase_add_test(tcase, test_http_two_hundred_at_once);
	tcase_add_test(tcase, test_http_connection_limit);
	tcase_add_test(tcase, test_http_clients_that_go_away);
	tcase_add_test(tcase, test_http_clients_that_go_away_late);
	tcase_add_test(tcase, test_http_stop_with_suspended_requests);
	tcase_add_test(tcase, test_http_stop_with_requests_in_the_mailbox);
	tcase_add_test(tcase, test_http_draining);
	tcase_add_test(tcase, test_http_stop_with_idle_connections);
	tcase_add_test(tcase, test_http_stop_under_load);
	tcase_add_test(tcase, test_http_start_refuses);
	tcase_add_test(tcase, test_http_without_memory);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
