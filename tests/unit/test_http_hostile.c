/*
 * Nonsense, halves and single bytes on the socket of the control API: a 4xx, a closed connection or, where
 * the request is right after all, its answer. The loop hears of none of the wrong ones, and the next client
 * is served.
 */
#include <netinet/tcp.h>
#include <stdio.h>
#include <string.h>

#include "core/checked.h"
#include "tests/lib/kv_test_http.h"

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

/* A peer that may wait for more (up to 10 s) is not waited for. */
static void receive_soon(int fd)
{
	const struct timeval timeout = { .tv_usec = 20000 };

	ck_assert_int_eq(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout)), 0);
	kv_test_receive(fd, false, &response);
}

/* Requests that end in the middle (of the line, the headers, the body) never reach the loop. */
START_TEST(test_http_half_requests)
{
	static const char whole[] =
		"POST /v1/pools HTTP/1.1\r\nHost: localhost\r\n" JSON_TYPE "Content-Length: 200\r\n\r\n" SMOL;

	for (size_t n_bytes = 1; n_bytes < sizeof(whole); n_bytes += 7) {
		const int fd = kv_test_connect(&test);

		ck_assert(kv_test_send(fd, whole, n_bytes));
		if (n_bytes % 2)
			reset(fd);
		else
			close(fd);
	}
	ck_assert_uint_eq(atomic_load(&test.n_taken), 0);
	assert_serves();
}
END_TEST

/* A request cut into single bytes is the same request. */
START_TEST(test_http_byte_by_byte)
{
	static const char whole[] =
		"POST /v1/pools HTTP/1.1\r\nHost: localhost\r\n" JSON_TYPE
		"Transfer-Encoding: chunked\r\n\r\n3\r\n{\"n\r\n5\r\name\":\r\n3\r\n7}\n\r\n0\r\n\r\n";
	const int on = 1, fd = kv_test_connect(&test);

	ck_assert_int_eq(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)), 0);
	for (size_t i = 0; i + 1 < sizeof(whole); i++)
		ck_assert(kv_test_send(fd, whole + i, 1));
	kv_test_receive(fd, false, &response);
	assert_problem(400, "BAD_CONFIG", "name");
	close(fd);
}
END_TEST

/* A client that waits for leave before it sends its body (curl does above 1 KiB) gets it. */
START_TEST(test_http_expect_continue)
{
	const int fd = connect_and_send("POST /v1/pools HTTP/1.1\r\nHost: localhost\r\n" JSON_TYPE
					"Expect: 100-continue\r\nContent-Length: 13\r\n\r\n");

	kv_test_receive(fd, true, &response);
	ck_assert_int_eq(response.status, 100);
	ck_assert(kv_test_send(fd, "{\"layers\":0}\n", 13));
	kv_test_receive(fd, false, &response);
	assert_problem(400, "BAD_CONFIG", "");
	close(fd);
}
END_TEST

/* Nonsense gets a 4xx or a closed connection, never an answer of a route and never a crash. */
START_TEST(test_http_nonsense)
{
	static char huge[100000];
	static const char *const texts[] = {
		"\r\n\r\n\r\n\r\n",
		"GET\r\n\r\n",
		"GET /v1/info\r\n\r\n",
		"GET /v1/info HTTP/9.9\r\nHost: localhost\r\n\r\n",
		"GET /v1/info HTTP/1.1\r\n\r\n",
		"GET /v1/info HTTP/1.0\r\n\r\n",
		"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
		"TKV1\x01\x08\x01\r\n\r\n",
		"POST /v1/pools HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
		"POST /v1 HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999999\r\n\r\n",
		"POST /v1/pools HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
		"GET /\x80\x81?\xff=\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
		"GET /v1/sessions?limit=1&&&&==&%&cursor HTTP/1.1\r\nHost: localhost\r\n\r\n",
		"GET http://evil.example/v1/info HTTP/1.1\r\nHost: localhost\r\n\r\n",
		"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
	};

	for (size_t i = 0; i < KV_LENGTH(texts); i++) {
		const int fd = connect_and_send(texts[i]);

		ck_assert_int_eq(shutdown(fd, SHUT_WR), 0);
		receive_soon(fd);
		ck_assert_msg(response.status == 0 ||
				(response.status >= 400 && response.status < 600 && response.status != 500),
			"%d to %s", response.status, texts[i]);
		close(fd);
	}
	/* Headers, a path and a query without end: more than the memory of a connection. */
	memset(huge, 'a', sizeof(huge) - 1);
	for (unsigned i = 0; i < 3; i++) {
		static const char *const starts[] = {
			"GET /v1/info HTTP/1.1\r\nHost: localhost\r\nX: ", "GET /", "GET /v1/sessions?cursor="
		};
		const int fd = connect_and_send(starts[i]);

		if (kv_test_send(fd, huge, sizeof(huge) - 1))
			(void)kv_test_send(fd, "\r\n\r\n", 4);
		receive_soon(fd);
		ck_assert_msg(response.status == 0 || (response.status >= 400 && response.status < 500), "%d",
			response.status);
		close(fd);
	}
	ck_assert_uint_eq(atomic_load(&test.n_taken), 0);
	assert_serves();
}
END_TEST

/* Random bytes in random pieces. */
START_TEST(test_http_random_bytes)
{
	static const char *const words[] = { "GET ", "POST ", "DELETE ", "/v1/pools", "/v1/sessions/",
		"/metrics", "?", "limit=", " HTTP/1.1\r\n", "Host: localhost\r\n", JSON_TYPE,
		"Content-Length: 3\r\n", "\r\n\r\n", "{}", "%00", "Transfer-Encoding: chunked\r\n",
		"Expect: 100-continue\r\n", "5\r\n" };
	uint64_t seed = 97531;

	printf("seed %llu\n", (unsigned long long)seed);
	for (unsigned round = 0; round < 300; round++) {
		char text[2048];
		size_t used = 0;

		for (unsigned n = (unsigned)(kv_test_random(&seed) % 20); n > 0; n--) {
			const uint64_t pick = kv_test_random(&seed);

			if (pick % 8 == 0)
				text[used++] = (char)(pick >> 32);
			else
				used += (size_t)sprintf(
					text + used, "%s", words[(pick >> 8) % KV_LENGTH(words)]);
		}
		const int fd = kv_test_connect(&test);

		(void)kv_test_send(fd, text, used);
		(void)shutdown(fd, SHUT_WR);
		receive_soon(fd);
		ck_assert_int_lt(response.status, 600);
		close(fd);
	}
	assert_serves();
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("http_hostile");
	TCase *tcase = tcase_create("hostile");

	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_set_timeout(tcase, 120);
	tcase_add_test(tcase, test_http_half_requests);
	tcase_add_test(tcase, test_http_byte_by_byte);
	tcase_add_test(tcase, test_http_expect_continue);
	tcase_add_test(tcase, test_http_nonsense);
	tcase_add_test(tcase, test_http_random_bytes);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
