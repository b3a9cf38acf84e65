/* HTTP client: replies are written by hand; each is fed whole, byte by byte, and cut at every place. */
#include "server/ctl/http_client.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "core/memory.h"
#include "tests/lib/kv_test.h"

/* Feeds a reply in two parts, each `step` bytes at a time, then ends the connection. */
static enum kv_status feed(
	struct srv_http_parser *parser, const char *text, size_t cut, size_t step, struct kv_error *err)
{
	const size_t n_bytes = strlen(text);
	size_t at = 0;

	srv_http_parser_init(parser);
	while (at < n_bytes) {
		const size_t end = at < cut ? cut : n_bytes;
		const size_t n = end - at < step ? end - at : step;
		size_t n_used = 0;
		const enum kv_status status =
			srv_http_parser_feed(parser, (const uint8_t *)text + at, n, &n_used, err);

		if (status != KV_OK)
			return status;
		ck_assert(n_used == n || parser->state == SRV_HTTP_DONE);
		at += n;
	}
	return srv_http_parser_end(parser, err);
}

/* The same code and body however the bytes are cut. */
static void check_reply(const char *text, uint32_t code, const char *body)
{
	const size_t n_bytes = strlen(text);

	for (size_t cut = 0; cut <= n_bytes; cut++)
		for (size_t step = 1; step <= n_bytes; step += step == 1 ? n_bytes - 1 : n_bytes) {
			struct srv_http_parser parser;
			struct kv_error err = { .msg = "" };

			ck_assert_msg(feed(&parser, text, cut, step, &err) == KV_OK, "%s", err.msg);
			ck_assert_int_eq(parser.state, SRV_HTTP_DONE);
			ck_assert_uint_eq(parser.code, code);
			ck_assert_uint_eq(parser.body_bytes, strlen(body));
			if (parser.body_bytes > 0)
				ck_assert_str_eq(parser.body, body);
			srv_http_parser_finish(&parser);
		}
}

/* All ways to say how long a body is. */
START_TEST(test_ctl_http_client_reads_bodies)
{
	check_reply("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", 200, "hello");
	check_reply("HTTP/1.1 404 Not Found\r\ncontent-length:2 \r\n\r\n{}", 404, "{}");
	check_reply("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 200, "");
	check_reply("HTTP/1.0 200 OK\r\n\r\nuntil the end", 200, "until the end");
	check_reply("HTTP/1.1 204 No Content\r\n\r\n", 204, "");
	check_reply("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
		    "4\r\nwiki\r\n6;x=y\r\npedia \r\nE\r\nin \r\n\r\nchunks.\r\n0\r\n\r\n",
		200, "wikipedia in \r\n\r\nchunks.");
	check_reply("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nTrailer: x\r\n\r\n",
		200, "a");
	check_reply(
		"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 Created\r\nContent-Length: 1\r\n\r\nx", 201, "x");
	/* Bare line feeds, as some servers write them; a status line without a reason. */
	check_reply("HTTP/1.1 200\nContent-Length: 2\n\nok", 200, "ok");
	check_reply("HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nok", 200, "ok");
}
END_TEST

/* A reply that contradicts itself, is no HTTP, or ends too early is refused with the reason. */
START_TEST(test_ctl_http_client_refuses)
{
	static const struct {
		const char *text, *says;
	} rows[] = {
		{ "", "without a reply" },
		{ "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhell", "inside the reply" },
		{ "HTTP/1.1 200 OK\r\nContent-Le", "inside the reply" },
		{ "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nwik", "inside the reply" },
		{ "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nwiki\r\n", "inside the reply" },
		{ "SSH-2.0-x\r\n", "not HTTP/1.x" },
		{ "HTTP/2 200\r\n", "not HTTP/1.x" },
		{ "HTTP/1.1 2x0 OK\r\n", "no status code" },
		{ "HTTP/1.1 099 OK\r\n", "no status code" },
		{ "HTTP/1.1 2000 OK\r\n", "no status code" },
		{ "HTTP/1.1 200 OK\r\nno colon\r\n", "header line" },
		{ "HTTP/1.1 200 OK\r\n: empty\r\n", "header line" },
		{ "HTTP/1.1 200 OK\r\nContent-Length: -1\r\n", "Content-Length" },
		{ "HTTP/1.1 200 OK\r\nContent-Length: 1 1\r\n", "Content-Length" },
		{ "HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999999\r\n", "Content-Length" },
		{ "HTTP/1.1 200 OK\r\nContent-Length: 16777217\r\n", "above 16777216" },
		{ "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n", "differ" },
		{ "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
			"is chunked" },
		{ "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n", "gzip" },
		{ "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n", "chunk size" },
		{ "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n\r\n", "chunk size" },
		{ "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1000001\r\n", "chunk size" },
		{ "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n",
			"longer than its size" },
		{ "HTTP/1.1 200 OK\r\nX: \x1b[2J\r\n", "control character" },
	};

	for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
		for (size_t step = 1; step <= 64; step += 63) {
			struct srv_http_parser parser;
			struct kv_error err = { .msg = "" };

			ck_assert_int_ne(feed(&parser, rows[i].text, 0, step, &err), KV_OK);
			ck_assert_msg(strstr(err.msg, rows[i].says) != NULL,
				"row %zu: '%s' does not say '%s'", i, err.msg, rows[i].says);
			srv_http_parser_finish(&parser);
		}
}
END_TEST

/* Lines, their number, and a body without a length are bounded. */
START_TEST(test_ctl_http_client_is_bounded)
{
	static const char start[] = "HTTP/1.1 200 OK\r\n", header[] = "A: b\r\n";
	static uint8_t block[65536];
	struct srv_http_parser parser;
	enum kv_status status;
	size_t n_used;
	uint32_t n_lines = 1, n_bytes = 0;
	uint64_t n_fed = 0;

	srv_http_parser_init(&parser);
	ck_assert_int_eq(
		srv_http_parser_feed(&parser, (const uint8_t *)start, strlen(start), &n_used, NULL), KV_OK);
	do {
		status =
			srv_http_parser_feed(&parser, (const uint8_t *)header, strlen(header), &n_used, NULL);
		n_lines += status == KV_OK;
	} while (status == KV_OK && n_lines < 10000);
	ck_assert_int_eq(status, KV_TOO_LARGE);
	ck_assert_uint_eq(n_lines, SRV_HTTP_LINES_MAX);
	srv_http_parser_finish(&parser);

	do {
		status = srv_http_parser_feed(&parser, (const uint8_t *)"x", 1, &n_used, NULL);
		n_bytes += status == KV_OK;
	} while (status == KV_OK && n_bytes < 1000000);
	ck_assert_int_eq(status, KV_TOO_LARGE);
	ck_assert_uint_eq(n_bytes, SRV_HTTP_LINE_BYTES_MAX);
	srv_http_parser_finish(&parser);

	ck_assert_int_eq(
		srv_http_parser_feed(&parser, (const uint8_t *)start, strlen(start), &n_used, NULL), KV_OK);
	ck_assert_int_eq(srv_http_parser_feed(&parser, (const uint8_t *)"\r\n", 2, &n_used, NULL), KV_OK);
	do {
		status = srv_http_parser_feed(&parser, block, sizeof(block), &n_used, NULL);
		n_fed += status == KV_OK ? n_used : 0;
	} while (status == KV_OK && n_fed < (1u << 30));
	ck_assert_int_eq(status, KV_TOO_LARGE);
	ck_assert_uint_eq(n_fed, SRV_HTTP_BODY_BYTES_MAX);
	srv_http_parser_finish(&parser);
}
END_TEST

/* A server of one connection: keeps the request it got, sends its reply, and closes. */
struct server {
	int fd;
	uint16_t port;
	const char *reply; /* NULL: never answers, until the client goes away */
	char request[2048];
	pthread_t thread;
};

static void *serve(void *arg)
{
	struct server *server = arg;
	const int fd = accept(server->fd, NULL, NULL);
	size_t used = 0;

	while (used + 1 < sizeof(server->request)) {
		const ssize_t n = recv(fd, server->request + used, sizeof(server->request) - used - 1, 0);

		if (n <= 0)
			break;
		used += (size_t)n;
		server->request[used] = '\0';
		if (server->reply &&
			(strstr(server->request, "\r\n\r\n{") || !strstr(server->request, "POST")) &&
			strstr(server->request, "\r\n\r\n"))
			break;
	}
	if (server->reply)
		send(fd, server->reply, strlen(server->reply), MSG_NOSIGNAL);
	close(fd);
	return NULL;
}

static void server_start(struct server *server, const char *reply)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr = { htonl(INADDR_LOOPBACK) } };
	socklen_t address_bytes = sizeof(address);

	*server = (struct server){ .reply = reply, .fd = socket(AF_INET, SOCK_STREAM, 0) };
	ck_assert_int_ge(server->fd, 0);
	ck_assert_int_eq(bind(server->fd, (struct sockaddr *)&address, sizeof(address)), 0);
	ck_assert_int_eq(listen(server->fd, 1), 0);
	ck_assert_int_eq(getsockname(server->fd, (struct sockaddr *)&address, &address_bytes), 0);
	server->port = ntohs(address.sin_port);
	ck_assert_int_eq(pthread_create(&server->thread, NULL, serve, server), 0);
}

static void server_stop(struct server *server)
{
	pthread_join(server->thread, NULL);
	close(server->fd);
}

/* The request has what the control API asks for, and the reply comes back with its code. */
START_TEST(test_ctl_http_client_talks)
{
	struct srv_http_reply reply;
	struct server server;
	char address[32], host[64];

	server_start(&server, "HTTP/1.1 201 Created\r\nContent-Length: 12\r\n\r\n{\"name\":\"a\"}");
	snprintf(address, sizeof(address), "127.0.0.1:%u", server.port);
	snprintf(host, sizeof(host), "\r\nHost: %s\r\n", address);
	ck_assert_int_eq(srv_http_request(
				 &(struct srv_http_target){
					 .address = address, .token = "the-token", .timeout_ms = 5000 },
				 "POST", "/v1/pools", "{\"a\":1}", &reply, NULL),
		KV_OK);
	server_stop(&server);
	ck_assert_uint_eq(reply.code, 201);
	ck_assert_str_eq(reply.body, "{\"name\":\"a\"}");
	srv_http_reply_finish(&reply);
	ck_assert_int_eq(strncmp(server.request, "POST /v1/pools HTTP/1.1\r\n", 25), 0);
	ck_assert_ptr_nonnull(strstr(server.request, host));
	ck_assert_ptr_nonnull(strstr(server.request, "\r\nContent-Type: application/json\r\n"));
	ck_assert_ptr_nonnull(strstr(server.request, "\r\nContent-Length: 7\r\n"));
	ck_assert_ptr_nonnull(strstr(server.request, "\r\nAuthorization: Bearer the-token\r\n"));
	ck_assert_ptr_nonnull(strstr(server.request, "\r\n\r\n{\"a\":1}"));

	/* An empty body is an empty text, not NULL. */
	server_start(&server, "HTTP/1.1 204 No Content\r\n\r\n");
	snprintf(address, sizeof(address), "127.0.0.1:%u", server.port);
	ck_assert_int_eq(srv_http_request(&(struct srv_http_target){ .address = address, .timeout_ms = 5000 },
				 "DELETE", "/v1/pools/a", NULL, &reply, NULL),
		KV_OK);
	server_stop(&server);
	ck_assert_uint_eq(reply.code, 204);
	ck_assert_str_eq(reply.body, "");
	ck_assert_ptr_null(strstr(server.request, "Authorization"));
	srv_http_reply_finish(&reply);
	ck_assert_int_eq(strncmp(server.request, "DELETE /v1/pools/a HTTP/1.1\r\n", 29), 0);
}
END_TEST

/* A server that accepts and says nothing costs the timeout, not for ever; nobody listening is told at once.
 */
START_TEST(test_ctl_http_client_gives_up)
{
	struct srv_http_reply reply;
	struct kv_error err;
	struct server server;
	char address[32];

	server_start(&server, NULL);
	snprintf(address, sizeof(address), "127.0.0.1:%u", server.port);
	ck_assert_int_eq(srv_http_request(&(struct srv_http_target){ .address = address, .timeout_ms = 50 },
				 "GET", "/livez", NULL, &reply, &err),
		KV_UNAVAILABLE);
	server_stop(&server);
	ck_assert_ptr_nonnull(strstr(err.msg, "no reply in time"));
	ck_assert_ptr_nonnull(strstr(err.msg, address));

	ck_assert_int_eq(srv_http_request(&(struct srv_http_target){ .address = address, .timeout_ms = 5000 },
				 "GET", "/livez", NULL, &reply, &err),
		KV_UNAVAILABLE);
	ck_assert_ptr_nonnull(strstr(err.msg, "refused"));
}
END_TEST

/* A scheme is no part of the Host header; an answer that is no TLS, and a connection that ends at once, say
 * what to try. */
START_TEST(test_ctl_http_client_knows_schemes)
{
	struct srv_http_reply reply;
	struct kv_error err;
	struct server server;
	char address[64], host[64];
	const struct srv_http_target target = { .address = address, .timeout_ms = 5000 };

	server_start(&server, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
	snprintf(address, sizeof(address), "http://127.0.0.1:%u", server.port);
	snprintf(host, sizeof(host), "\r\nHost: 127.0.0.1:%u\r\n", server.port);
	ck_assert_int_eq(srv_http_request(&target, "GET", "/livez", NULL, &reply, &err), KV_OK);
	server_stop(&server);
	srv_http_reply_finish(&reply);
	ck_assert_ptr_nonnull(strstr(server.request, host));

	server_start(&server, "");
	snprintf(address, sizeof(address), "127.0.0.1:%u", server.port);
	ck_assert_int_eq(srv_http_request(&target, "GET", "/livez", NULL, &reply, &err), KV_CORRUPT);
	server_stop(&server);
	ck_assert_ptr_nonnull(strstr(err.msg, "at https://HOST:PORT"));
}
END_TEST

/* Addresses that are none are refused before anything is resolved. */
START_TEST(test_ctl_http_client_checks_addresses)
{
	static const char *const bad[] = { "", "localhost", ":80", "127.0.0.1:", "127.0.0.1:http",
		"127.0.0.1:123456", "[::1]", "a:-1", "https://", "https://a", "ftp://a:1/", "http://a:1/x" };
	struct srv_http_reply reply;
	struct kv_error err;

	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		ck_assert_int_eq(
			srv_http_request(&(struct srv_http_target){ .address = bad[i], .timeout_ms = 50 },
				"GET", "/", NULL, &reply, &err),
			KV_BAD_ARG);
		ck_assert_ptr_nonnull(strstr(err.msg, "is not HOST:PORT"));
	}
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("ctl http client");
	TCase *tcase = tcase_create("all");

	tcase_add_test(tcase, test_ctl_http_client_reads_bodies);
	tcase_add_test(tcase, test_ctl_http_client_refuses);
	tcase_add_test(tcase, test_ctl_http_client_is_bounded);
	tcase_add_test(tcase, test_ctl_http_client_talks);
	tcase_add_test(tcase, test_ctl_http_client_gives_up);
	tcase_add_test(tcase, test_ctl_http_client_knows_schemes);
	tcase_add_test(tcase, test_ctl_http_client_checks_addresses);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
