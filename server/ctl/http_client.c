#include "server/ctl/http_client.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

#include "core/memory.h"

#define REQUEST_HEAD_BYTES_MAX 2048u /* path, address and a token of 512 bytes */
#define RECEIVE_BYTES          16384u

/* What the steps of one request share. */
struct exchange {
	const struct srv_http_target *target;
	const char *method, *path, *json;
	uint64_t deadline_ns;
	char host[256], port[6];
	int fd;
	struct srv_tls *tls; /* NULL: plain */
};

/* Milliseconds for poll(), rounded up; 0 when the deadline has passed. */
static int left_ms(const struct exchange *exchange)
{
	const uint64_t now_ns = kv_clock_now_ns(kv_clock_system());

	if (now_ns >= exchange->deadline_ns)
		return 0;
	const uint64_t left = (exchange->deadline_ns - now_ns + KV_NS_PER_MS - 1) / KV_NS_PER_MS;

	return left > INT32_MAX ? INT32_MAX : (int)left;
}

static enum kv_status wait_for(
	const struct exchange *exchange, short events, const char *what, struct kv_error *err)
{
	for (;;) {
		struct pollfd poll_fd = { .fd = exchange->fd, .events = events };
		const int timeout_ms = left_ms(exchange);
		const int n = timeout_ms == 0 ? 0 : poll(&poll_fd, 1, timeout_ms);

		if (n > 0)
			return KV_OK;
		if (n == 0)
			return kv_fail(err, KV_UNAVAILABLE, "no %s in time", what);
		if (errno != EINTR)
			return kv_fail(err, KV_IO_ERROR, "poll: %s", strerror(errno));
	}
}

static bool is_port(const char *text)
{
	unsigned long port = 0;

	for (const char *c = text; *c; c++) {
		if (*c < '0' || *c > '9' || c - text >= 5)
			return false;
		port = port * 10 + (unsigned long)(*c - '0');
	}
	return port >= 1 && port <= 65535;
}

static const char https[] = "https://", plain[] = "http://";

const char *srv_http_scheme(const char *address)
{
	return strncasecmp(address, https, sizeof(https) - 1) == 0 ? https : plain;
}

const char *srv_http_authority(const char *address)
{
	const size_t n_chars = strlen(srv_http_scheme(address));

	return strncasecmp(address, srv_http_scheme(address), n_chars) == 0 ? address + n_chars : address;
}

/* "HOST:PORT" or "[HOST]:PORT" to its parts. */
static enum kv_status split_address(
	const char *address, char host[static 256], char port[static 6], struct kv_error *err)
{
	const char *first = srv_http_authority(address);
	const char *colon = strrchr(first, ':');
	size_t host_bytes = colon ? (size_t)(colon - first) : 0;

	if (host_bytes >= 2 && first[0] == '[' && colon[-1] == ']') {
		first++;
		host_bytes -= 2;
	}
	if (host_bytes == 0 || host_bytes >= 256 || !is_port(colon + 1))
		return kv_fail(err, KV_BAD_ARG,
			"'%.100s' is not HOST:PORT or https://HOST:PORT with a port from 1 to 65535",
			address);
	memcpy(host, first, host_bytes);
	host[host_bytes] = '\0';
	memcpy(port, colon + 1, strlen(colon + 1) + 1);
	return KV_OK;
}

bool srv_http_address_is_valid(const char *address)
{
	char host[256], port[6];

	return split_address(address, host, port, NULL) == KV_OK;
}

static enum kv_status fail_connect(int error, struct kv_error *err)
{
	return kv_fail(err, KV_UNAVAILABLE, "connect: %s%s", strerror(error),
		error == ECONNREFUSED ? "; is the daemon there? --http or TQKV_HTTP says where" : "");
}

static enum kv_status connect_one(
	struct exchange *exchange, const struct addrinfo *info, struct kv_error *err)
{
	int error = 0;
	socklen_t error_bytes = sizeof(error);

	exchange->fd =
		socket(info->ai_family, info->ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, info->ai_protocol);
	if (exchange->fd < 0)
		return kv_fail(err, KV_IO_ERROR, "socket: %s", strerror(errno));
	if (connect(exchange->fd, info->ai_addr, info->ai_addrlen) == 0)
		return KV_OK;
	if (errno != EINPROGRESS)
		return fail_connect(errno, err);

	const enum kv_status status = wait_for(exchange, POLLOUT, "connection", err);

	if (status != KV_OK)
		return status;
	if (getsockopt(exchange->fd, SOL_SOCKET, SO_ERROR, &error, &error_bytes) < 0)
		error = errno;
	if (error != 0)
		return fail_connect(error, err);
	return KV_OK;
}

static void close_socket(struct exchange *exchange)
{
	if (exchange->fd >= 0)
		close(exchange->fd);
	exchange->fd = -1;
}

/* Tries the addresses of the host in turn; the failure of the last one is told. */
static enum kv_status connect_any(struct exchange *exchange, struct kv_error *err)
{
	const struct addrinfo hints = { .ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV };
	struct addrinfo *list;
	enum kv_status status = split_address(exchange->target->address, exchange->host, exchange->port, err);

	if (status != KV_OK)
		return status;
	const int code = getaddrinfo(exchange->host, exchange->port, &hints, &list);

	if (code != 0)
		return kv_fail(err, KV_UNAVAILABLE, "host '%s': %s", exchange->host, gai_strerror(code));
	status = kv_fail(err, KV_UNAVAILABLE, "host '%s' has no address", exchange->host);
	for (const struct addrinfo *info = list; info && status != KV_OK; info = info->ai_next) {
		close_socket(exchange);
		status = connect_one(exchange, info, err);
	}
	freeaddrinfo(list);
	return status;
}

static enum kv_status begin_tls(struct exchange *exchange, struct kv_error *err)
{
	if (srv_http_scheme(exchange->target->address) != https)
		return KV_OK;
	enum kv_status status =
		srv_tls_create(&exchange->target->trust, exchange->host, exchange->fd, &exchange->tls, err);

	while (status == KV_OK) {
		status = srv_tls_handshake(exchange->tls, err);
		if (status != KV_BUSY_RETRY)
			break;
		status = wait_for(exchange, srv_tls_events(exchange->tls), "TLS handshake", err);
	}
	return status;
}

/* Sends some bytes. BUSY_RETRY: when the socket is ready. */
static enum kv_status send_some(const struct exchange *exchange, const char *data, size_t n_bytes,
	size_t *n_sent, struct kv_error *err)
{
	if (exchange->tls)
		return srv_tls_send(exchange->tls, data, n_bytes, n_sent, err);
	const ssize_t n = send(exchange->fd, data, n_bytes, MSG_NOSIGNAL);

	if (n < 0 && (errno == EINTR || errno == EAGAIN))
		return KV_BUSY_RETRY;
	if (n < 0)
		return kv_fail(err, KV_IO_ERROR, "send: %s", strerror(errno));
	*n_sent = (size_t)n;
	return KV_OK;
}

/* Receives some bytes; 0 is the end. BUSY_RETRY as above. */
static enum kv_status receive_some(const struct exchange *exchange, uint8_t *buffer, size_t n_bytes,
	size_t *n_received, struct kv_error *err)
{
	if (exchange->tls)
		return srv_tls_receive(exchange->tls, buffer, n_bytes, n_received, err);
	const ssize_t n = recv(exchange->fd, buffer, n_bytes, 0);

	if (n < 0 && (errno == EINTR || errno == EAGAIN))
		return KV_BUSY_RETRY;
	if (n < 0)
		return kv_fail(err, KV_IO_ERROR, "receive: %s", strerror(errno));
	*n_received = (size_t)n;
	return KV_OK;
}

static enum kv_status send_all(
	const struct exchange *exchange, const char *data, size_t n_bytes, struct kv_error *err)
{
	while (n_bytes > 0) {
		size_t n_sent = 0;
		enum kv_status status = send_some(exchange, data, n_bytes, &n_sent, err);

		if (status == KV_BUSY_RETRY)
			status = wait_for(exchange, exchange->tls ? srv_tls_events(exchange->tls) : POLLOUT,
				"room to send", err);
		if (status != KV_OK)
			return status;
		data += n_sent;
		n_bytes -= n_sent;
	}
	return KV_OK;
}

static enum kv_status send_request(const struct exchange *exchange, struct kv_error *err)
{
	const size_t json_bytes = exchange->json ? strlen(exchange->json) : 0;
	char head[REQUEST_HEAD_BYTES_MAX], content[96] = "";

	/* A request without a body says so. */
	if (strcmp(exchange->method, "GET") != 0)
		snprintf(content, sizeof(content), "%sContent-Length: %zu\r\n",
			exchange->json ? "Content-Type: application/json\r\n" : "", json_bytes);
	const char *token = exchange->target->token;
	const bool has_token = token && token[0];
	const int n = snprintf(head, sizeof(head),
		"%s %s HTTP/1.1\r\nHost: %s\r\nAccept: application/json\r\nConnection: close\r\n%s%s%s%s\r\n",
		exchange->method, exchange->path, srv_http_authority(exchange->target->address),
		has_token ? "Authorization: Bearer " : "", has_token ? token : "", has_token ? "\r\n" : "",
		content);

	if (n < 0 || (size_t)n >= sizeof(head))
		return kv_fail(err, KV_BAD_ARG, "the path is too long");

	const enum kv_status status = send_all(exchange, head, (size_t)n, err);

	return status == KV_OK && exchange->json ? send_all(exchange, exchange->json, json_bytes, err)
						 : status;
}

/* The connection has ended. */
static enum kv_status end_reply(
	const struct exchange *exchange, struct srv_http_parser *parser, struct kv_error *err)
{
	if (!exchange->tls && parser->n_lines == 0 && parser->line_bytes == 0)
		return kv_fail(err, KV_CORRUPT,
			"the connection ended without a reply; a daemon with a certificate is asked at "
			"https://HOST:PORT");
	return srv_http_parser_end(parser, err);
}

static enum kv_status receive_reply(
	const struct exchange *exchange, struct srv_http_parser *parser, struct kv_error *err)
{
	uint8_t buffer[RECEIVE_BYTES];

	while (parser->state != SRV_HTTP_DONE) {
		size_t n_used, n = 0;
		enum kv_status status = receive_some(exchange, buffer, sizeof(buffer), &n, err);

		if (status == KV_BUSY_RETRY)
			status = wait_for(exchange, exchange->tls ? srv_tls_events(exchange->tls) : POLLIN,
				"reply", err);
		else if (status == KV_OK && n > 0)
			status = srv_http_parser_feed(parser, buffer, n, &n_used, err);
		else if (status == KV_OK)
			status = end_reply(exchange, parser, err);
		if (status != KV_OK)
			return status;
	}
	return KV_OK;
}

static enum kv_status take_reply(
	struct srv_http_parser *parser, struct srv_http_reply *reply, struct kv_error *err)
{
	char *body = parser->body ? parser->body : kv_alloc(1, 1);

	if (!body)
		return kv_fail(err, KV_NO_MEMORY, "no memory for a reply");
	reply->code = parser->code;
	reply->body = body;
	reply->body_bytes = parser->body_bytes;
	parser->body = NULL;
	return KV_OK;
}

enum kv_status srv_http_request(const struct srv_http_target *target, const char *method, const char *path,
	const char *json, struct srv_http_reply *reply, struct kv_error *err)
{
	struct exchange exchange = {
		.target = target,
		.method = method,
		.path = path,
		.json = json,
		.deadline_ns = kv_clock_now_ns(kv_clock_system()) + target->timeout_ms * KV_NS_PER_MS,
		.fd = -1,
	};
	struct srv_http_parser parser;
	enum kv_status status;

	srv_http_parser_init(&parser);
	status = connect_any(&exchange, err);
	if (status == KV_OK)
		status = begin_tls(&exchange, err);
	if (status == KV_OK)
		status = send_request(&exchange, err);
	if (status == KV_OK)
		status = receive_reply(&exchange, &parser, err);
	if (status == KV_OK)
		status = take_reply(&parser, reply, err);
	if (status != KV_OK)
		kv_error_wrap(err, "%s %s%.128s%.128s", method, srv_http_scheme(target->address),
			srv_http_authority(target->address), path);
	srv_tls_destroy(exchange.tls);
	close_socket(&exchange);
	srv_http_parser_finish(&parser);
	return status;
}

void srv_http_reply_finish(struct srv_http_reply *reply)
{
	kv_free(reply->body);
	*reply = (struct srv_http_reply){ 0 };
}
