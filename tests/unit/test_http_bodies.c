/* Bodies of the control API: how large they may be, on which routes, and how many at once. */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/checked.h"
#include "tests/lib/kv_test.h"
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

static void ask(const char *method, const char *path, const char *headers, const char *body)
{
	kv_test_ask(&test, method, path, headers, body, &response);
}

/* The last answer is a problem of this kind whose detail holds `part`. */
static void assert_problem(int status, const char *code, const char *part)
{
	ck_assert_msg(response.status == status, "status %d, expected %d: %s", response.status, status,
		response.body);
	ck_assert_msg(strstr(response.body, code) != NULL && strstr(response.body, part) != NULL,
		"'%s' does not hold %s and '%s'", response.body, code, part);
}

/* More than 64 KiB: 413 from the header alone; where the length is not told, after the body was thrown away.
 */
START_TEST(test_http_body_too_large)
{
	static char chunk[8192 + 16];
	int fd = kv_test_connect(&test);
	static const char announced[] =
		"PUT /v1/log-level HTTP/1.1\r\nHost: localhost\r\n" JSON_TYPE "Content-Length: 65537\r\n\r\n";
	static const char unannounced[] = "POST /v1/pools HTTP/1.1\r\nHost: localhost\r\n" JSON_TYPE
					  "Transfer-Encoding: chunked\r\n\r\n";

	ck_assert(kv_test_send(fd, announced, sizeof(announced) - 1));
	kv_test_receive(fd, false, &response);
	assert_problem(413, "TOO_LARGE", "65536");
	ck_assert(response.is_closing);
	close(fd);
	fd = kv_test_connect(&test);
	ck_assert(kv_test_send(fd, unannounced, sizeof(unannounced) - 1));
	const size_t n_bytes = (size_t)sprintf(chunk, "2000\r\n%08192d\r\n", 0);

	for (unsigned i = 0; i < 9; i++)
		ck_assert(kv_test_send(fd, chunk, n_bytes));
	ck_assert(kv_test_send(fd, "0\r\n\r\n", 5));
	kv_test_receive(fd, false, &response);
	assert_problem(413, "TOO_LARGE", "65536");
	/* The connection is good for another request. */
	ck_assert(kv_test_send(fd, "GET /livez HTTP/1.1\r\nHost: x\r\n\r\n", 32));
	kv_test_receive(fd, false, &response);
	ck_assert_int_eq(response.status, 403);
	close(fd);
	/* A body without end loses its connection. */
	fd = kv_test_connect(&test);
	ck_assert(kv_test_send(fd, unannounced, sizeof(unannounced) - 1));
	unsigned n_chunks = 0;

	while (n_chunks < 100000 && kv_test_send(fd, chunk, n_bytes))
		n_chunks++;
	ck_assert_uint_lt(n_chunks, 100000);
	close(fd);
	ck_assert_uint_eq(atomic_load(&test.n_taken), 0);
}
END_TEST

/* Sends the headers of a POST whose body is so long, and waits for the refusal, if there is one. */
static int announce(const char *path, unsigned long n_bytes)
{
	char headers[200];
	int fd = kv_test_connect(&test);

	snprintf(headers, sizeof(headers),
		"POST %s HTTP/1.1\r\nHost: localhost\r\n" JSON_TYPE "Content-Length: %lu\r\n\r\n", path,
		n_bytes);
	ck_assert(kv_test_send(fd, headers, strlen(headers)));
	return fd;
}

/* A pool may bring its numbers along: up to 4 MiB are taken by the two routes that make one, and by no other;
 * one byte more is refused before any of them is sent. */
START_TEST(test_http_body_with_numbers)
{
	static const char *const paths[] = { "/v1/pools", "/v1/plan", "/v1/snapshot" };
	const size_t n_bytes = 4194304;
	char *body = malloc(n_bytes + 1);

	memset(body, ' ', n_bytes);
	body[n_bytes] = '\0';
	memcpy(body, SMOL, sizeof(SMOL) - 1);
	ask("POST", "/v1/pools", JSON_TYPE, body);
	ck_assert_msg(response.status == 201, "%s", response.body);
	for (size_t i = 0; i < KV_LENGTH(paths); i++) {
		const int fd = announce(paths[i], i < 2 ? n_bytes + 1 : 65537);

		kv_test_receive(fd, false, &response);
		assert_problem(413, "TOO_LARGE", i < 2 ? "4194304" : "65536");
		ck_assert(response.is_closing);
		close(fd);
	}
	free(body);
}
END_TEST

/* Four bodies of that size are received at once; the fifth is told to come again, also while nothing of the
 * four has arrived, and may come as soon as one of them has gone. */
START_TEST(test_http_bodies_at_once)
{
	int fds[4];
	int status = 0;

	for (size_t i = 0; i < KV_LENGTH(fds); i++)
		fds[i] = announce("/v1/pools", 65537);
	/* The four are counted once their headers are read, which nothing tells. */
	for (unsigned i = 0; i < 2000 && status != 503; i++) {
		const int fd = announce("/v1/plan", 65537);
		struct pollfd answer = { .fd = fd, .events = POLLIN };

		if (poll(&answer, 1, 10) == 1) {
			kv_test_receive(fd, false, &response);
			status = response.status;
		}
		close(fd);
	}
	assert_problem(503, "BUSY_RETRY", "4 bodies");
	close(fds[0]);
	static char body[65537 + 1];

	memset(body, ' ', sizeof(body) - 1);
	memcpy(body, SMOL, sizeof(SMOL) - 1);
	for (unsigned i = 0; i < 2000 && response.status != 201; i++)
		ask("POST", "/v1/pools", JSON_TYPE, body);
	ck_assert_int_eq(response.status, 201);
	for (size_t i = 1; i < KV_LENGTH(fds); i++)
		close(fds[i]);
}
END_TEST

/* Exactly 64 KiB is a body like any other. */
START_TEST(test_http_body_of_full_size)
{
	static char body[65537];

	memset(body, ' ', sizeof(body) - 1);
	memcpy(body, SMOL, sizeof(SMOL) - 1);
	ask("POST", "/v1/pools", JSON_TYPE, body);
	ck_assert_msg(response.status == 201, "%s", response.body);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("http_bodies");
	TCase *tcase = tcase_create("bodies");

	tcase_set_timeout(tcase, 60);
	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_add_test(tcase, test_http_body_too_large);
	tcase_add_test(tcase, test_http_body_with_numbers);
	tcase_add_test(tcase, test_http_bodies_at_once);
	tcase_add_test(tcase, test_http_body_of_full_size);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
