/*
 * May this be asked? Hosts, origins and media types (ARCHITECTURE, rule 10), then who asks: a token in
 * "Authorization: Bearer", or a client certificate, which the handshake has checked.
 *
 * Without tokens and client certificates everything is allowed: the options let the daemon listen like that
 * on loopback only, or where the operator said --insecure. With client certificates and no tokens, a
 * certificate is enough for everything. With tokens, the token says which role it is.
 */
#include <arpa/inet.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "server/http_internal.h"
#include "server/http_rules.h"
#include "server/http_tls.h"
#include "server/io_address.h"
#include "server/log.h"

/* A header that may stand only once. */
struct once {
	const char *name, *value;
	unsigned n;
};

static enum MHD_Result count_header(void *cls, enum MHD_ValueKind kind, const char *key, const char *value)
{
	struct once *once = cls;

	(void)kind;
	if (strcasecmp(key, once->name) == 0) {
		once->value = value;
		once->n++;
	}
	return MHD_YES;
}

/* The value or NULL; *n says how often it stands there. */
static const char *header(const struct srv_http_request *request, const char *name, unsigned *n)
{
	struct once once = { .name = name };

	MHD_get_connection_values(request->connection, MHD_HEADER_KIND, count_header, &once);
	*n = once.n;
	return once.value;
}

bool srv_http_has_two_ends(const struct srv_http_request *request)
{
	unsigned n_lengths, n_codings;

	(void)header(request, MHD_HTTP_HEADER_CONTENT_LENGTH, &n_lengths);
	(void)header(request, MHD_HTTP_HEADER_TRANSFER_ENCODING, &n_codings);
	return n_lengths + n_codings > 1;
}

static bool is_host_allowed(const struct srv_http_request *request, const char *host)
{
	const struct srv_http_listener *listener = request->listener;
	const struct srv_options *options = request->options;

	/* Metrics that others may reach anyway: they know the machine by whatever name. */
	if (listener->is_metrics && !listener->is_loopback)
		return true;
	return srv_http_host_is_allowed(host, listener->host, options->insecure) ||
		srv_http_host_is_allowed(host, options->http_name, false);
}

/* True: *result is what was answered. */
static bool is_refused_by_headers(
	struct srv_http_request *request, const struct srv_http_route *route, enum MHD_Result *result)
{
	unsigned n_hosts, n_origins, n_types, n_logins;
	const char *host = header(request, MHD_HTTP_HEADER_HOST, &n_hosts);
	const char *origin = header(request, MHD_HTTP_HEADER_ORIGIN, &n_origins);
	const char *type = header(request, MHD_HTTP_HEADER_CONTENT_TYPE, &n_types);
	char detail[160];

	(void)header(request, MHD_HTTP_HEADER_AUTHORIZATION, &n_logins);
	if (n_hosts > 1 || n_origins > 1 || n_types > 1 || n_logins > 1) {
		*result = srv_http_refuse(request, KV_BAD_ARG,
			"Host, Origin, Content-Type and Authorization may stand once each");
		return true;
	}
	if (!host || !is_host_allowed(request, host)) {
		snprintf(detail, sizeof(detail),
			"Host '%.80s' is neither the bound address nor a loopback address nor http_name",
			host ? host : "");
		*result = srv_http_problem(request, MHD_HTTP_FORBIDDEN, "FORBIDDEN", detail);
		return true;
	}
	if (!route || strcmp(route->method, "GET") == 0)
		return false;
	if (origin && !srv_http_origin_is_own(origin, host)) {
		snprintf(detail, sizeof(detail),
			"Origin '%.80s' is foreign: other pages may not change anything here", origin);
		*result = srv_http_problem(request, MHD_HTTP_FORBIDDEN, "FORBIDDEN", detail);
		return true;
	}
	/* Forms always say their type, also where nothing is in them. */
	if (strcmp(route->method, "DELETE") != 0 &&
		(type ? !srv_http_type_is_json(type) : request->body_bytes > 0)) {
		*result = srv_http_problem(request, MHD_HTTP_UNSUPPORTED_MEDIA_TYPE, "UNSUPPORTED_MEDIA_TYPE",
			"expected Content-Type: application/json");
		return true;
	}
	return false;
}

static void peer_text(struct srv_http_request *request, char *out, uint32_t n_bytes)
{
	const union MHD_ConnectionInfo *info =
		MHD_get_connection_info(request->connection, MHD_CONNECTION_INFO_CLIENT_ADDRESS);
	struct sockaddr_storage name = { 0 };

	if (info && info->client_addr && info->client_addr->sa_family == AF_INET6)
		memcpy(&name, info->client_addr, sizeof(struct sockaddr_in6));
	else if (info && info->client_addr)
		memcpy(&name, info->client_addr, sizeof(struct sockaddr_in));
	srv_io_sockaddr_text(&name, out, n_bytes);
}

/* FNV-1a of the address without its port. */
static uint64_t peer_key(struct srv_http_request *request)
{
	char text[80];
	uint64_t key = 0xcbf29ce484222325u;

	peer_text(request, text, sizeof(text));
	const char *end = strrchr(text, ':');

	for (const char *c = text; *c && c != end; c++)
		key = (key ^ (uint8_t)*c) * 0x100000001b3u;
	return key;
}

static bool is_limited(struct srv_http_request *request, uint64_t key)
{
	struct srv_http *http = request->http;

	pthread_mutex_lock(&http->lock);
	const bool is_limited = srv_login_is_limited(&http->logins, key, srv_http_monotonic_ns());

	pthread_mutex_unlock(&http->lock);
	return is_limited;
}

static void count_failure(struct srv_http_request *request, uint64_t key)
{
	struct srv_http *http = request->http;

	atomic_fetch_add(&http->counters.logins_failed, 1);
	pthread_mutex_lock(&http->lock);
	srv_login_failed(&http->logins, key, srv_http_monotonic_ns());
	pthread_mutex_unlock(&http->lock);
}

static bool is_role_enough(enum srv_role role, enum srv_http_access access)
{
	return role == SRV_ROLE_ADMIN || (role == SRV_ROLE_READ && access == SRV_ACCESS_READ);
}

/* True: *result is what was answered. Sets request->who. */
static bool is_refused_by_login(
	struct srv_http_request *request, enum srv_http_access access, enum MHD_Result *result)
{
	static const char scheme[] = "Bearer ";
	const struct srv_tokens *tokens = request->settings ? &request->settings->tokens : NULL;
	unsigned n;
	const char *value = header(request, MHD_HTTP_HEADER_AUTHORIZATION, &n);

	if (!tokens || tokens->n == 0 || access == SRV_ACCESS_OPEN || request->listener->is_metrics)
		return false;
	if (!value || strncasecmp(value, scheme, sizeof(scheme) - 1) != 0) {
		*result = srv_http_problem(request, MHD_HTTP_UNAUTHORIZED, "UNAUTHENTICATED",
			"expected Authorization: Bearer and a token");
		return true;
	}
	const uint64_t key = peer_key(request);

	if (is_limited(request, key)) {
		atomic_fetch_add(&request->http->counters.logins_limited, 1);
		request->is_shut_out = true;
		*result = srv_http_problem(request, MHD_HTTP_TOO_MANY_REQUESTS, "LIMIT",
			"too many failed logins from this address; try again in a minute");
		return true;
	}
	value += sizeof(scheme) - 1;
	value += strspn(value, " ");
	const struct srv_token *token = srv_tokens_find(tokens, value, strlen(value));

	if (!token) {
		count_failure(request, key);
		*result = srv_http_problem(
			request, MHD_HTTP_UNAUTHORIZED, "UNAUTHENTICATED", "the token is not known");
		return true;
	}
	request->who = token->name;
	if (is_role_enough(token->role, access))
		return false;
	*result = srv_http_problem(request, MHD_HTTP_FORBIDDEN, "FORBIDDEN",
		access == SRV_ACCESS_ADMIN ? "this needs a token of the role admin"
					   : "this needs a token of the role read or admin");
	return true;
}

bool srv_http_is_refused(
	struct srv_http_request *request, const struct srv_http_route *route, enum MHD_Result *result)
{
	if (is_refused_by_headers(request, route, result))
		return true;
	/* What is not there is told only to who may know what is there. */
	return is_refused_by_login(request, route ? route->access : SRV_ACCESS_READ, result);
}

bool srv_http_is_refused_as_large(
	struct srv_http_request *request, const struct srv_http_route *route, enum MHD_Result *result)
{
	if (is_refused_by_headers(request, route, result))
		return true;
	return is_refused_by_login(request, SRV_ACCESS_ADMIN, result);
}

/* As it stands in an address: what is no letter, digit or one of "-._~" cannot look like another word. */
static void escape_name(const char *name, char *out, size_t n_bytes)
{
	size_t used = 0;

	out[0] = '\0';
	for (const unsigned char *c = (const unsigned char *)name; *c && used + 4 <= n_bytes; c++) {
		const bool is_plain = (*c >= '0' && *c <= '9') ||
			((*c | 0x20) >= 'a' && (*c | 0x20) <= 'z') || strchr("-._~", *c);

		used += (size_t)snprintf(out + used, n_bytes - used, is_plain ? "%c" : "%%%02X", *c);
	}
}

/* The route's path with its names filled in. */
static void fill_path(struct srv_http_request *request, char *out, size_t n_bytes)
{
	char name[3 * SRV_HTTP_NAME_BYTES + 1];
	uint32_t n_names = 0;
	size_t used = 0;

	for (const char *c = request->route->path; *c && used + 1 < n_bytes;) {
		if (*c != '{') {
			out[used++] = *c++;
			continue;
		}
		escape_name(request->names[n_names++], name, sizeof(name));
		const int n = snprintf(out + used, n_bytes - used, "%s", name);

		used = used + (size_t)n < n_bytes ? used + (size_t)n : n_bytes - 1;
		c += strcspn(c, "}") + 1;
	}
	out[used] = '\0';
}

void srv_http_audit(struct srv_http_request *request, unsigned http_status)
{
	char peer[80], path[SRV_HTTP_NAMES_MAX * 3 * SRV_HTTP_NAME_BYTES + 64];
	const char *who = request->who                                                   ? request->who
		: request->settings && srv_http_tls_asks_clients(request->settings->tls) ? "a certificate"
											 : NULL;

	peer_text(request, peer, sizeof(peer));
	fill_path(request, path, sizeof(path));
	/* No letter of the path is a blank, so nothing in it looks like the words behind it. */
	srv_log_audit("audit: change over HTTP, %s %s %s%s from %s status %u", request->route->method, path,
		who ? "by " : "without login", who ? who : "", peer, http_status);
}
