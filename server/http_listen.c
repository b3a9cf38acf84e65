/*
 * Listening for HTTP: sockets, the library's threads. One thread per address: the control API, and metrics
 * apart from it where they are asked for. Certificates are handed to each session (http_tls.h).
 *
 * Client certificates are demanded and checked in the handshake: who has none, or one of another authority,
 * or one that is over, gets a TLS alert and never reaches a route.
 */
#include <errno.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "core/memory.h"
#include "server/http_internal.h"
#include "server/http_tls.h"
#include "server/io_address.h"
#include "server/log.h"

#define LISTEN_BACKLOG 128
/* TLS 1.3 only: every client of this API is younger than it. */
#define TLS_PRIORITIES "NORMAL:-VERS-ALL:+VERS-TLS1.3"

/* Escapes stay as they are: http_routes.c undoes them where it knows what may stand there, and refuses zero
 * bytes. */
static size_t keep_escapes(void *cls, struct MHD_Connection *connection, char *text)
{
	(void)cls;
	(void)connection;
	return strlen(text);
}

/* What libmicrohttpd has to say (a peer that sent nonsense, mostly) is worth a line when somebody looks for
 * it. */
static void log_library(void *cls, const char *fmt, va_list args)
{
	char line[256];

	(void)cls;
	vsnprintf(line, sizeof(line), fmt, args);
	line[strcspn(line, "\n")] = '\0';
	srv_log(SRV_LOG_DEBUG, "http: %s", line);
}

static bool may_be_reached(const struct srv_http *http)
{
	const struct srv_options *options = http->options;

	return options->insecure || strcmp(options->http_client_ca_file, "off") != 0 ||
		strcmp(options->tokens_file, "off") != 0;
}

static enum kv_status bind_listener(const char *option_name, const char *wanted,
	struct srv_http_listener *listener, int *fd, struct kv_error *err)
{
	struct sockaddr_storage name;
	struct kv_io_address address;
	char text[SRV_HTTP_OPTION_BYTES + 8];
	const int on = 1;

	memset(&address, 0, sizeof(address));
	snprintf(text, sizeof(text), "tcp:%s", wanted);
	const enum kv_status status = srv_io_address_parse(text, &address, err);

	if (status != KV_OK)
		return status;
	/* The options were checked for this; whoever changed them since is stopped here. */
	if (!listener->is_metrics && !srv_io_address_is_loopback(&address) && !may_be_reached(listener->http))
		return kv_fail(err, KV_BAD_CONFIG,
			"http %s is not a loopback address: expected a tokens_file, client certificates or "
			"--insecure",
			wanted);
	const socklen_t name_bytes = srv_io_address_to_sockaddr(&address, &name);

	*fd = socket(name.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	if (*fd < 0)
		return kv_fail(err, KV_IO_ERROR, "%s %s: socket: %s", option_name, wanted, strerror(errno));
	setsockopt(*fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
	if (name.ss_family == AF_INET6)
		setsockopt(*fd, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof(on));
	if (bind(*fd, (struct sockaddr *)&name, name_bytes) != 0 || listen(*fd, LISTEN_BACKLOG) != 0)
		return kv_fail(err, KV_IO_ERROR, "%s: cannot listen on %s: %s", option_name, wanted,
			strerror(errno));
	listener->is_loopback = srv_io_address_is_loopback(&address);
	snprintf(listener->host, sizeof(listener->host), "%s", address.host);
	return KV_OK;
}

static enum kv_status tell_bound(int fd, char *bound, uint32_t bound_bytes_max, struct kv_error *err)
{
	struct sockaddr_storage name;
	socklen_t name_bytes = sizeof(name);

	if (getsockname(fd, (struct sockaddr *)&name, &name_bytes) != 0)
		return kv_fail(err, KV_IO_ERROR, "http: getsockname: %s", strerror(errno));
	srv_io_sockaddr_text(&name, bound, bound_bytes_max);
	return KV_OK;
}

/* The library's thread; it takes none of the process's signals. */
static enum kv_status start_daemon(struct srv_http_listener *listener, int fd, struct kv_error *err)
{
	struct srv_http *http = listener->http;
	const bool has_tls =
		strcmp(http->options->http_certificate_file, "off") != 0 && !listener->is_metrics;
	/*
	 * With epoll the library turns without a pause while a peer is silent in the middle of its handshake:
	 * one such peer would keep a core busy.
	 */
	const unsigned flags = MHD_USE_INTERNAL_POLLING_THREAD | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ITC |
		MHD_USE_ERROR_LOG | (has_tls ? MHD_USE_TLS | MHD_USE_POLL : MHD_USE_EPOLL);
	struct MHD_OptionItem tls[3] = { { MHD_OPTION_END, 0, NULL }, { MHD_OPTION_END, 0, NULL },
		{ MHD_OPTION_END, 0, NULL } };
	sigset_t all, before;

	if (has_tls) {
		tls[0] = (struct MHD_OptionItem){ MHD_OPTION_HTTPS_PRIORITIES, 0,
			(void *)(uintptr_t)TLS_PRIORITIES };
		tls[1] = (struct MHD_OptionItem){ MHD_OPTION_HTTPS_CERT_CALLBACK, 0,
			(void *)(uintptr_t)srv_http_tls_none };
	}
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	listener->daemon = MHD_start_daemon(flags, 0, NULL, NULL, srv_http_on_request, listener,
		MHD_OPTION_EXTERNAL_LOGGER, log_library, NULL, MHD_OPTION_LISTEN_SOCKET, fd,
		MHD_OPTION_NOTIFY_COMPLETED, srv_http_on_completed, listener, MHD_OPTION_NOTIFY_CONNECTION,
		srv_http_on_connection, listener, MHD_OPTION_UNESCAPE_CALLBACK, keep_escapes, NULL,
		MHD_OPTION_CONNECTION_LIMIT, SRV_HTTP_CONNECTIONS_MAX, MHD_OPTION_CONNECTION_TIMEOUT,
		SRV_HTTP_IDLE_S, MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)SRV_HTTP_MEMORY_BYTES,
		MHD_OPTION_ARRAY, tls, MHD_OPTION_END);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (listener->daemon)
		return KV_OK;
	return kv_fail(err, KV_IO_ERROR, "http: libmicrohttpd %s could not start%s", MHD_get_version(),
		has_tls ? " with TLS" : "");
}

static enum kv_status start_listener(struct srv_http_listener *listener, const char *option_name,
	const char *wanted, char *bound, uint32_t bound_bytes_max, struct kv_error *err)
{
	int fd = -1;
	enum kv_status status = bind_listener(option_name, wanted, listener, &fd, err);

	if (status == KV_OK)
		status = tell_bound(fd, bound, bound_bytes_max, err);
	if (status == KV_OK)
		status = start_daemon(listener, fd, err);
	if (status != KV_OK && fd >= 0)
		close(fd);
	return status;
}

enum kv_status srv_http_listen(
	struct srv_http *http, char *bound, uint32_t bound_bytes_max, struct kv_error *err)
{
	const struct srv_options *options = http->options;
	char metrics_bound[300] = "";
	enum kv_status status = KV_OK;

	bound[0] = '\0';
	if (strcmp(options->http, "off") != 0) {
		status = start_listener(
			&http->listeners[0], "http", options->http, bound, bound_bytes_max, err);
	}
	if (status != KV_OK || strcmp(options->metrics_listen, "off") == 0)
		return status;
	http->listeners[1].is_metrics = true;
	status = start_listener(&http->listeners[1], "metrics_listen", options->metrics_listen, metrics_bound,
		sizeof(metrics_bound), err);
	if (status == KV_OK)
		srv_log(SRV_LOG_INFO, "metrics on http://%s", metrics_bound);
	return status;
}
