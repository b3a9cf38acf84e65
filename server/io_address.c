#include "server/io_address.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/un.h>

_Static_assert(sizeof(((struct kv_io_address *)0)->path) == sizeof(((struct sockaddr_un *)0)->sun_path),
	"a path that parses must fit a socket address");

static enum kv_status parse_unix(const char *path, struct kv_io_address *address, struct kv_error *err)
{
	const size_t n = strlen(path);

	if (n == 0)
		return kv_fail(err, KV_BAD_CONFIG, "address \"unix:\" has no path");
	if (n >= sizeof(address->path))
		return kv_fail(err, KV_BAD_CONFIG,
			"address \"unix:%.64s...\": the path has %zu bytes, at most %zu fit", path, n,
			sizeof(address->path) - 1);
	address->transport = KV_IO_UNIX;
	memcpy(address->path, path, n + 1);
	return KV_OK;
}

/* Decimal digits only: no sign, no space, nothing behind. */
static bool parse_port(const char *text, uint16_t *port)
{
	const size_t n = strlen(text);
	uint32_t value = 0;

	if (n == 0 || n > 5)
		return false;
	for (size_t i = 0; i < n; i++) {
		if (text[i] < '0' || text[i] > '9')
			return false;
		value = value * 10 + (uint32_t)(text[i] - '0');
	}
	if (value > UINT16_MAX)
		return false;
	*port = (uint16_t)value;
	return true;
}

static bool is_host(const char *host, bool is_bracketed)
{
	struct in6_addr v6;
	struct in_addr v4;

	if (is_bracketed)
		return inet_pton(AF_INET6, host, &v6) == 1;
	return strcmp(host, "localhost") == 0 || inet_pton(AF_INET, host, &v4) == 1;
}

static enum kv_status parse_tcp(const char *text, struct kv_io_address *address, struct kv_error *err)
{
	const bool is_bracketed = text[0] == '[';
	const char *host = text + is_bracketed;
	const char *host_end = is_bracketed ? strchr(text, ']') : strrchr(text, ':');

	if (!host_end || host_end == host || (is_bracketed && host_end[1] != ':'))
		return kv_fail(err, KV_BAD_CONFIG,
			"address \"tcp:%.128s\": expected tcp:HOST:PORT (an IPv6 host in brackets)", text);

	const size_t host_bytes = (size_t)(host_end - host);

	if (host_bytes >= sizeof(address->host))
		return kv_fail(err, KV_BAD_CONFIG,
			"address \"tcp:%.64s...\": the host has %zu bytes, at most %zu fit", text, host_bytes,
			sizeof(address->host) - 1);
	memcpy(address->host, host, host_bytes);
	address->host[host_bytes] = '\0';
	if (!is_host(address->host, is_bracketed))
		return kv_fail(err, KV_BAD_CONFIG,
			"address \"tcp:%.128s\": the host is no IPv4 literal, no IPv6 literal in brackets "
			"and not "
			"\"localhost\"",
			text);
	if (!parse_port(host_end + (is_bracketed ? 2 : 1), &address->port))
		return kv_fail(err, KV_BAD_CONFIG,
			"address \"tcp:%.128s\": the port is not a number from 0 to 65535", text);
	address->transport = KV_IO_TCP;
	return KV_OK;
}

enum kv_status srv_io_address_parse(const char *text, struct kv_io_address *address, struct kv_error *err)
{
	struct kv_io_address parsed = { .socket_mode = SRV_SOCKET_MODE_DEFAULT };
	enum kv_status status;

	if (strncmp(text, "unix:", 5) == 0)
		status = parse_unix(text + 5, &parsed, err);
	else if (strncmp(text, "tcp:", 4) == 0)
		status = parse_tcp(text + 4, &parsed, err);
	else
		status = kv_fail(
			err, KV_BAD_CONFIG, "address \"%.128s\": expected unix:PATH or tcp:HOST:PORT", text);
	if (status == KV_OK)
		*address = parsed;
	return status;
}

socklen_t srv_io_address_to_sockaddr(const struct kv_io_address *address, struct sockaddr_storage *out)
{
	memset(out, 0, sizeof(*out));
	if (address->transport == KV_IO_UNIX) {
		struct sockaddr_un *un = (struct sockaddr_un *)out;

		un->sun_family = AF_UNIX;
		memcpy(un->sun_path, address->path, sizeof(un->sun_path));
		return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + strlen(address->path) + 1);
	}

	struct sockaddr_in *in = (struct sockaddr_in *)out;
	struct sockaddr_in6 *in6 = (struct sockaddr_in6 *)out;
	const char *host = strcmp(address->host, "localhost") == 0 ? "127.0.0.1" : address->host;

	if (inet_pton(AF_INET, host, &in->sin_addr) == 1) {
		in->sin_family = AF_INET;
		in->sin_port = htons(address->port);
		return sizeof(*in);
	}
	if (inet_pton(AF_INET6, host, &in6->sin6_addr) == 1) {
		in6->sin6_family = AF_INET6;
		in6->sin6_port = htons(address->port);
		return sizeof(*in6);
	}
	return 0;
}

bool srv_io_address_is_loopback(const struct kv_io_address *address)
{
	struct sockaddr_storage to;

	if (address->transport == KV_IO_UNIX)
		return true;
	if (srv_io_address_to_sockaddr(address, &to) == 0)
		return false;
	if (to.ss_family == AF_INET)
		return ntohl(((const struct sockaddr_in *)&to)->sin_addr.s_addr) >> 24 == 127;
	return IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)&to)->sin6_addr);
}

void srv_io_sockaddr_text(const struct sockaddr_storage *from, char *out, uint32_t out_bytes_max)
{
	char host[INET6_ADDRSTRLEN] = "?";

	if (from->ss_family == AF_INET) {
		const struct sockaddr_in *in = (const struct sockaddr_in *)from;

		inet_ntop(AF_INET, &in->sin_addr, host, sizeof(host));
		snprintf(out, out_bytes_max, "%s:%u", host, ntohs(in->sin_port));
	} else if (from->ss_family == AF_INET6) {
		const struct sockaddr_in6 *in6 = (const struct sockaddr_in6 *)from;

		inet_ntop(AF_INET6, &in6->sin6_addr, host, sizeof(host));
		snprintf(out, out_bytes_max, "[%s]:%u", host, ntohs(in6->sin6_port));
	} else {
		snprintf(out, out_bytes_max, "?");
	}
}
