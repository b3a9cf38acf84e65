/*
 * Connecting with a deadline. Failure modes: an address that does not parse is BAD_ARG; nobody listens or the
 * peer refuses, IO_ERROR; nothing comes back (a blackhole), DEADLINE at the set time.
 */
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "proto/client/conn.h"

#define NS_PER_MS 1000000LL

int64_t tqkv_now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (int64_t)now.tv_sec * 1000 * NS_PER_MS + now.tv_nsec;
}

int64_t tqkv_deadline_ns(uint32_t timeout_ms)
{
	return tqkv_now_ns() + (int64_t)timeout_ms * NS_PER_MS;
}

int tqkv_poll_timeout_ms(int64_t deadline_ns)
{
	const int64_t left_ns = deadline_ns - tqkv_now_ns();

	if (left_ns <= 0)
		return 0;
	/* A minute at a time is enough: callers look at the clock and come back. */
	return left_ns > 60000 * NS_PER_MS ? 60000 : (int)((left_ns + NS_PER_MS - 1) / NS_PER_MS);
}

/* Waits for a connect() under way. */
static enum tqkv_status await_connect(
	int fd, const char *address, int64_t deadline_ns, struct tqkv_error *err)
{
	struct pollfd poll_fd = { .fd = fd, .events = POLLOUT };
	int n_ready;
	int error = 0;
	socklen_t error_bytes = sizeof(error);

	do {
		n_ready = poll(&poll_fd, 1, tqkv_poll_timeout_ms(deadline_ns));
	} while ((n_ready < 0 && errno == EINTR) || (n_ready == 0 && tqkv_now_ns() < deadline_ns));
	if (n_ready == 0)
		return tqkv_fail(err, TQKV_DEADLINE, "connecting to %s: no answer in time", address);
	if (n_ready < 0 || getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &error_bytes) < 0)
		error = errno;
	if (error != 0)
		return tqkv_fail(err, TQKV_IO_ERROR, "connecting to %s: %s", address, strerror(error));
	return TQKV_OK;
}

static enum tqkv_status connect_one(const char *address, const struct sockaddr *name, socklen_t name_bytes,
	int64_t deadline_ns, int *out, struct tqkv_error *err)
{
	const int fd = socket(name->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	enum tqkv_status status = TQKV_OK;

	if (fd < 0)
		return tqkv_fail(
			err, TQKV_IO_ERROR, "connecting to %s: socket: %s", address, strerror(errno));
	while (connect(fd, name, name_bytes) < 0) {
		if (errno == EINTR)
			continue;
		if (errno == EINPROGRESS) {
			status = await_connect(fd, address, deadline_ns, err);
			break;
		}
		/* A Unix listener with a full backlog says EAGAIN, and poll() cannot wait for it. */
		if (errno == EAGAIN && tqkv_now_ns() < deadline_ns) {
			poll(NULL, 0, 1);
			continue;
		}
		if (errno == EAGAIN)
			status = tqkv_fail(err, TQKV_DEADLINE,
				"connecting to %s: the listener's backlog is full", address);
		else
			status = tqkv_fail(
				err, TQKV_IO_ERROR, "connecting to %s: %s", address, strerror(errno));
		break;
	}
	if (status != TQKV_OK) {
		close(fd);
		return status;
	}
	if (name->sa_family != AF_UNIX) {
		const int on = 1;

		/* Frames are whole when they are sent; waiting for more to send only adds latency. */
		(void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
	}
	*out = fd;
	return TQKV_OK;
}

static enum tqkv_status connect_unix(
	const char *address, int64_t deadline_ns, int *fd, struct tqkv_error *err)
{
	const char *path = address + strlen("unix:");
	struct sockaddr_un name = { .sun_family = AF_UNIX };

	if (path[0] == '\0')
		return tqkv_fail(err, TQKV_BAD_ARG, "address %s: the path is empty", address);
	if (strlen(path) >= sizeof(name.sun_path))
		return tqkv_fail(err, TQKV_BAD_ARG, "address %.200s: the path is longer than %zu bytes",
			address, sizeof(name.sun_path) - 1);
	memcpy(name.sun_path, path, strlen(path) + 1);
	return connect_one(address, (const struct sockaddr *)&name, sizeof(name), deadline_ns, fd, err);
}

/* "host:port" or "[host]:port" into two texts; false when it is neither. */
static bool split_host_port(const char *text, char host[256], char port[8])
{
	const char *colon = strrchr(text, ':');
	const char *first = text;
	const char *end = colon;

	if (!colon || colon == text || strlen(colon + 1) == 0 || strlen(colon + 1) > 5 ||
		strspn(colon + 1, "0123456789") != strlen(colon + 1))
		return false;
	if (text[0] == '[') {
		if (colon[-1] != ']')
			return false;
		first++;
		end--;
	} else if (memchr(text, ':', (size_t)(colon - text))) {
		return false; /* a bare IPv6 address: where the port starts would be a guess */
	}
	if (end <= first || (size_t)(end - first) >= 256)
		return false;
	memcpy(host, first, (size_t)(end - first));
	host[end - first] = '\0';
	snprintf(port, 8, "%s", colon + 1);
	return true;
}

static enum tqkv_status connect_tcp(const char *address, int64_t deadline_ns, int *fd, struct tqkv_error *err)
{
	const struct addrinfo hints = {
		.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV
	};
	struct addrinfo *list = NULL;
	enum tqkv_status status = TQKV_IO_ERROR;
	char host[256], port[8];

	if (!split_host_port(address + strlen("tcp:"), host, port))
		return tqkv_fail(err, TQKV_BAD_ARG,
			"address %.200s: expected tcp:host:port or tcp:[v6 address]:port", address);

	const int error = getaddrinfo(host, port, &hints, &list);

	if (error != 0)
		return tqkv_fail(err, TQKV_IO_ERROR, "connecting to %s: %s", address, gai_strerror(error));
	for (const struct addrinfo *entry = list; entry; entry = entry->ai_next) {
		status = connect_one(address, entry->ai_addr, entry->ai_addrlen, deadline_ns, fd, err);
		if (status == TQKV_OK || status == TQKV_DEADLINE)
			break;
	}
	freeaddrinfo(list);
	return status;
}

enum tqkv_status tqkv_socket_connect(
	const char *address, int64_t deadline_ns, int *fd, struct tqkv_error *err)
{
	if (strncmp(address, "unix:", strlen("unix:")) == 0)
		return connect_unix(address, deadline_ns, fd, err);
	if (strncmp(address, "tcp:", strlen("tcp:")) == 0)
		return connect_tcp(address, deadline_ns, fd, err);
	return tqkv_fail(err, TQKV_BAD_ARG, "address %.200s: expected unix:/path or tcp:host:port", address);
}
