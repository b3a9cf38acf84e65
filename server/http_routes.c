/*
 * What a request means. Every route is a row of one table: how its parameters are read, what is asked of the
 * loop, and how the answer looks. Refusals are RFC 9457 problems; their code is the name of a status where
 * one is the cause, else METHOD_NOT_ALLOWED, UNSUPPORTED_MEDIA_TYPE, NOT_READY or NO_ANSWER.
 *
 * No route tells the environment, contents of files, or secrets.
 */
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "core/memory.h"
#include "server/http_internal.h"
#include "server/http_rules.h"
#include "server/http_views.h"

#define TYPE_JSON    "application/json"
#define TYPE_PROBLEM "application/problem+json"
#define TYPE_METRICS "text/plain; version=0.0.4; charset=utf-8"

enum route_param { PARAM_NONE = 0, PARAM_PAGE = 1, PARAM_DEEP = 2 };

struct srv_http_route {
	const char *method; /* GET answers HEAD, too */
	const char *path;   /* whole, or up to the last '/' where one more part follows */
	bool has_name;      /* one more part: request->name */
	unsigned params;    /* enum route_param */
	unsigned success;   /* HTTP status */
	enum srv_control_kind kind;
	/* (optional) Answers without the loop. */
	enum MHD_Result (*answer)(struct srv_http_request *request);
	/* (optional) Reads name and body into the call. */
	enum kv_status (*prepare)(
		struct srv_http_request *request, struct srv_control *control, struct kv_error *err);
	void (*view)(const struct srv_control *control, struct srv_text *text); /* NULL: no body */
};

/* ---- answers ---- */

static enum MHD_Result queue(
	struct srv_http_request *request, unsigned http_status, const char *type, char *bytes, size_t n_bytes)
{
	struct MHD_Response *response =
		MHD_create_response_from_buffer_with_free_callback(n_bytes, bytes, kv_free);

	if (!response) {
		kv_free(bytes);
		return MHD_NO;
	}
	/* Out of memory here leaves a header out; the answer is still right. */
	if (type)
		(void)MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, type);
	(void)MHD_add_response_header(response, MHD_HTTP_HEADER_CACHE_CONTROL, "no-store");
	(void)MHD_add_response_header(response, "X-Content-Type-Options", "nosniff");
	if (request->allow[0])
		(void)MHD_add_response_header(response, MHD_HTTP_HEADER_ALLOW, request->allow);
	if (request->location[0])
		(void)MHD_add_response_header(response, MHD_HTTP_HEADER_LOCATION, request->location);
	if (http_status == MHD_HTTP_SERVICE_UNAVAILABLE || http_status == MHD_HTTP_TOO_MANY_REQUESTS)
		(void)MHD_add_response_header(response, MHD_HTTP_HEADER_RETRY_AFTER, "1");
	const enum MHD_Result result = MHD_queue_response(request->connection, http_status, response);

	MHD_destroy_response(response);
	return result;
}

/* Takes the text over. */
static enum MHD_Result queue_text(
	struct srv_http_request *request, unsigned http_status, const char *type, struct srv_text *text)
{
	if (text->is_failed) {
		static const char problem[] =
			"{\"type\":\"about:blank\",\"title\":\"Internal Server Error\",\"status\":500,"
			"\"detail\":\"out of memory\",\"code\":\"NO_MEMORY\"}\n";
		char *copy = kv_strndup(problem, sizeof(problem) - 1);

		srv_text_finish(text);
		return copy ? queue(request, MHD_HTTP_INTERNAL_SERVER_ERROR, TYPE_PROBLEM, copy,
				      sizeof(problem) - 1)
			    : MHD_NO;
	}
	return queue(request, http_status, type, text->bytes, text->n_bytes);
}

enum MHD_Result srv_http_problem(
	struct srv_http_request *request, unsigned http_status, const char *code, const char *detail)
{
	struct srv_text text = { 0 };

	srv_view_problem(http_status, code, detail, &text);
	srv_text_add(&text, "\n", 1);
	return queue_text(request, http_status, TYPE_PROBLEM, &text);
}

static enum MHD_Result refuse(struct srv_http_request *request, enum kv_status status, const char *detail)
{
	const struct kv_status_row *row = kv_status_row(status);

	return srv_http_problem(request, row->http, row->name, detail && *detail ? detail : row->text);
}

static enum MHD_Result answer_live(struct srv_http_request *request)
{
	struct srv_http *http = request->http;
	struct srv_text text = { 0 };
	char detail[96];
	const uint64_t now_ns = kv_clock_now_ns(http->clock);
	uint64_t turn_ns = atomic_load(&http->pulse->turn_ns);

	/* Before the first turn: as if it had been at start. */
	if (turn_ns == 0)
		turn_ns = http->started_ns;
	const uint64_t age_ms = now_ns > turn_ns ? (now_ns - turn_ns) / KV_NS_PER_MS : 0;

	if (age_ms >= SRV_HTTP_PULSE_MS_MAX) {
		snprintf(detail, sizeof(detail), "the event loop has not turned for %llu ms",
			(unsigned long long)age_ms);
		return srv_http_problem(request, MHD_HTTP_SERVICE_UNAVAILABLE, "NO_ANSWER", detail);
	}
	srv_view_live(age_ms, &text);
	srv_text_add(&text, "\n", 1);
	return queue_text(request, MHD_HTTP_OK, TYPE_JSON, &text);
}

static enum MHD_Result answer_config(struct srv_http_request *request)
{
	json_t *json = srv_options_to_json(request->http->options);
	const size_t n_bytes = json ? json_dumpb(json, NULL, 0, JSON_COMPACT) : 0;
	char *bytes = n_bytes > 0 ? kv_alloc(n_bytes + 1, 1) : NULL;

	if (!bytes) {
		json_decref(json);
		return refuse(request, KV_NO_MEMORY, NULL);
	}
	const size_t n_written = json_dumpb(json, bytes, n_bytes, JSON_COMPACT);

	KV_ASSERT(n_written == n_bytes);
	bytes[n_bytes] = '\n';
	json_decref(json);
	return queue(request, MHD_HTTP_OK, TYPE_JSON, bytes, n_bytes + 1);
}

/* ---- what is asked of the loop ---- */

static enum kv_status prepare_session(
	struct srv_http_request *request, struct srv_control *control, struct kv_error *err)
{
	if (!srv_http_read_hex_id(request->name, &control->id))
		return kv_fail(err, KV_BAD_ARG, "session id '%.40s': expected 16 hex digits", request->name);
	return KV_OK;
}

/* Computes (rotations): this thread may, the loop may not. */
static enum kv_status prepare_pool_create(
	struct srv_http_request *request, struct srv_control *control, struct kv_error *err)
{
	json_t *json = NULL;
	enum kv_status status;

	if (request->body_bytes == 0)
		return kv_fail(err, KV_BAD_CONFIG, "the body is empty, expected one pool as a JSON object");
	status = srv_http_read_object(request->body, (size_t)request->body_bytes, &json, err);
	if (status != KV_OK)
		return status;
	status = kv_pool_spec_create(json, &control->spec, err);
	json_decref(json);
	if (status == KV_OK)
		snprintf(control->name, sizeof(control->name), "%s", control->spec->name);
	return status;
}

static enum kv_status prepare_pool_delete(
	struct srv_http_request *request, struct srv_control *control, struct kv_error *err)
{
	if (!srv_http_is_pool_name(request->name))
		return kv_fail(err, KV_NOT_FOUND, "'%.70s' cannot be the name of a pool", request->name);
	snprintf(control->name, sizeof(control->name), "%s", request->name);
	return KV_OK;
}

static const struct srv_http_route routes[] = {
	{ .method = "GET", .path = "/", .answer = srv_http_answer_page },
	{ .method = "GET", .path = "/dashboard.css", .answer = srv_http_answer_style },
	{ .method = "GET", .path = "/dashboard.js", .answer = srv_http_answer_script },
	{ .method = "GET", .path = "/livez", .answer = answer_live },
	{ "GET", "/readyz", false, PARAM_DEEP, 200, SRV_CONTROL_READY, NULL, NULL, srv_view_ready },
	/* The view of /metrics needs the options as well: srv_http_finish() calls it. */
	{ "GET", "/metrics", false, PARAM_NONE, 200, SRV_CONTROL_METRICS, NULL, NULL, NULL },
	{ "GET", "/v1/info", false, PARAM_NONE, 200, SRV_CONTROL_INFO, NULL, NULL, srv_view_info },
	{ "GET", "/v1/pools", false, PARAM_NONE, 200, SRV_CONTROL_POOLS, NULL, NULL, srv_view_pools },
	{ "POST", "/v1/pools", false, PARAM_NONE, 201, SRV_CONTROL_POOL_CREATE, NULL, prepare_pool_create,
		srv_view_pool_created },
	{ "DELETE", "/v1/pools/", true, PARAM_NONE, 204, SRV_CONTROL_POOL_DELETE, NULL, prepare_pool_delete,
		NULL },
	{ "GET", "/v1/occupancy", false, PARAM_NONE, 200, SRV_CONTROL_OCCUPANCY, NULL, NULL,
		srv_view_occupancy },
	{ "GET", "/v1/sessions", false, PARAM_PAGE, 200, SRV_CONTROL_SESSIONS, NULL, NULL,
		srv_view_sessions },
	{ "GET", "/v1/sessions/", true, PARAM_PAGE, 200, SRV_CONTROL_SESSION, NULL, prepare_session,
		srv_view_session },
	{ "GET", "/v1/connections", false, PARAM_PAGE, 200, SRV_CONTROL_CONNECTIONS, NULL, NULL,
		srv_view_connections },
	{ .method = "GET", .path = "/v1/config", .answer = answer_config },
};

/* ---- reading a request ---- */

struct params {
	unsigned allowed, seen; /* enum route_param; seen: one bit for each of the three names */
	uint64_t limit, cursor, deep;
	struct kv_error error;
	bool is_bad;
};

static enum MHD_Result read_param(void *cls, enum MHD_ValueKind kind, const char *key, const char *value)
{
	static const struct {
		const char *name, *expected;
		unsigned param, seen_bit;
		uint64_t min, max;
		size_t offset;
	} known[] = {
		{ "limit", "a number from 1 to 256", PARAM_PAGE, 1, 1, SRV_CONTROL_ROWS_MAX,
			offsetof(struct params, limit) },
		{ "cursor", "the cursor_next of an earlier answer", PARAM_PAGE, 2, 0, UINT64_MAX,
			offsetof(struct params, cursor) },
		{ "deep", "0 or 1", PARAM_DEEP, 4, 0, 1, offsetof(struct params, deep) },
	};
	struct params *params = cls;
	char text[32];
	uint64_t number;

	(void)kind;
	params->is_bad = true;
	for (size_t i = 0; i < KV_LENGTH(known); i++) {
		if (strcmp(key, known[i].name) != 0 || !(params->allowed & known[i].param))
			continue;
		if (params->seen & known[i].seen_bit) {
			(void)kv_fail(&params->error, KV_BAD_ARG, "parameter %s is given twice", key);
			return MHD_NO;
		}
		params->seen |= known[i].seen_bit;
		if (!value || !srv_http_unescape(value, text, sizeof(text)) ||
			!srv_http_read_u64(text, known[i].max, &number) || number < known[i].min) {
			(void)kv_fail(&params->error, KV_BAD_ARG,
				"parameter %s: '%.40s' is not accepted, expected %s", key, value ? value : "",
				known[i].expected);
			return MHD_NO;
		}
		memcpy((char *)params + known[i].offset, &number, sizeof(number));
		params->is_bad = false;
		return MHD_YES;
	}
	(void)kv_fail(&params->error, KV_BAD_ARG, "this path has no parameter '%.40s'", key);
	return MHD_NO;
}

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
static const char *header(struct srv_http_request *request, const char *name, unsigned *n)
{
	struct once once = { .name = name };

	MHD_get_connection_values(request->connection, MHD_HEADER_KIND, count_header, &once);
	*n = once.n;
	return once.value;
}

/*
 * Fills request->name and returns the route, or NULL: *is_path says whether another method would have found
 * one (request->allow lists them).
 */
static const struct srv_http_route *find_route(
	struct srv_http_request *request, const char *url, const char *method, bool *is_path)
{
	const char *wanted = strcmp(method, "HEAD") == 0 ? "GET" : method;
	const struct srv_http_route *found = NULL;
	size_t used = 0;

	*is_path = false;
	for (size_t i = 0; i < KV_LENGTH(routes); i++) {
		const struct srv_http_route *route = &routes[i];
		const size_t n_bytes = strlen(route->path);

		if (strncmp(url, route->path, n_bytes) != 0)
			continue;
		const char *rest = url + n_bytes;

		if (route->has_name ? !*rest || strchr(rest, '/') : *rest != '\0')
			continue;
		if (route->has_name && !srv_http_unescape(rest, request->name, sizeof(request->name)))
			continue;
		*is_path = true;
		if (strcmp(route->method, wanted) == 0)
			found = route;
		used += (size_t)snprintf(request->allow + used, sizeof(request->allow) - used, "%s%s%s",
			used ? ", " : "", route->method, strcmp(route->method, "GET") == 0 ? ", HEAD" : "");
	}
	if (found)
		request->allow[0] = '\0';
	return found;
}

/* Host, Origin and media type (ARCHITECTURE, rule 10). True: *result is what was answered. */
static bool is_refused_by_headers(
	struct srv_http_request *request, const struct srv_http_route *route, enum MHD_Result *result)
{
	const struct srv_http *http = request->http;
	unsigned n_hosts, n_origins, n_types;
	const char *host = header(request, MHD_HTTP_HEADER_HOST, &n_hosts);
	const char *origin = header(request, MHD_HTTP_HEADER_ORIGIN, &n_origins);
	const char *type = header(request, MHD_HTTP_HEADER_CONTENT_TYPE, &n_types);
	char detail[160];

	if (n_hosts > 1 || n_origins > 1 || n_types > 1) {
		*result = refuse(request, KV_BAD_ARG, "Host, Origin and Content-Type may stand once each");
		return true;
	}
	if (!host ||
		(!srv_http_host_is_allowed(host, http->host, http->options->insecure) &&
			!srv_http_host_is_allowed(host, http->options->http_name, false))) {
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
	if (strcmp(route->method, "POST") == 0 && (!type || !srv_http_type_is_json(type))) {
		*result = srv_http_problem(request, MHD_HTTP_UNSUPPORTED_MEDIA_TYPE, "UNSUPPORTED_MEDIA_TYPE",
			"expected Content-Type: application/json");
		return true;
	}
	return false;
}

static enum MHD_Result ask_loop(
	struct srv_http_request *request, const struct srv_http_route *route, const struct params *params)
{
	struct srv_http_call *call = kv_alloc(1, sizeof(*call));
	struct kv_error error = { 0 };

	if (!call)
		return refuse(request, KV_NO_MEMORY, NULL);
	call->control.kind = route->kind;
	call->control.n_rows_max = (uint32_t)params->limit;
	call->control.cursor = params->cursor;
	call->control.is_deep = params->deep != 0;
	const enum kv_status status =
		route->prepare ? route->prepare(request, &call->control, &error) : KV_OK;

	if (status != KV_OK) {
		srv_http_call_free(call);
		return refuse(request, status, error.msg);
	}
	request->route = route;
	srv_http_post(request, call);
	return MHD_YES;
}

enum MHD_Result srv_http_dispatch(struct srv_http_request *request, const char *url, const char *method)
{
	struct params params = { .limit = SRV_HTTP_LIMIT_DEFAULT };
	enum MHD_Result result;
	bool is_path;
	const struct srv_http_route *route = find_route(request, url, method, &is_path);
	char detail[160];

	if (is_refused_by_headers(request, route, &result))
		return result;
	if (!is_path) {
		request->allow[0] = '\0';
		snprintf(detail, sizeof(detail), "there is nothing at '%.80s'", url);
		return refuse(request, KV_NOT_FOUND, detail);
	}
	if (!route) {
		snprintf(detail, sizeof(detail), "%.16s is not possible here, expected %s", method,
			request->allow);
		return srv_http_problem(request, MHD_HTTP_METHOD_NOT_ALLOWED, "METHOD_NOT_ALLOWED", detail);
	}
	if (request->body_bytes > SRV_HTTP_BODY_BYTES_MAX)
		return srv_http_problem(request, MHD_HTTP_CONTENT_TOO_LARGE, "TOO_LARGE",
			"the body is larger than 65536 bytes");
	params.allowed = route->params;
	MHD_get_connection_values(request->connection, MHD_GET_ARGUMENT_KIND, read_param, &params);
	if (params.is_bad)
		return refuse(request, KV_BAD_ARG, params.error.msg);
	if (route->answer)
		return route->answer(request);
	return ask_loop(request, route, &params);
}

/* ---- the call came back ---- */

static enum MHD_Result finish_late(struct srv_http_request *request, enum srv_http_wait wait)
{
	const char *detail = "the event loop does not answer";

	if (wait == SRV_HTTP_STOPPED)
		return refuse(request, KV_DRAINING, NULL);
	if (wait == SRV_HTTP_REFUSED)
		return refuse(request, KV_BUSY_RETRY, "256 control requests wait already");
	if (strcmp(request->route->method, "GET") != 0)
		detail = "the event loop does not answer; it may still carry this out, so look before you "
			 "try again";
	return srv_http_problem(request, MHD_HTTP_SERVICE_UNAVAILABLE, "NO_ANSWER", detail);
}

/* UNAVAILABLE with a reason, or just a reason: not ready. Any other status speaks for itself. */
static enum MHD_Result finish_not_ready(struct srv_http_request *request, const struct srv_control *control)
{
	const struct kv_status_row *row = kv_status_row(control->status);
	const bool is_plain = control->status == KV_OK || control->status == KV_UNAVAILABLE;
	const char *detail = control->ready_reason;

	if (!*detail)
		detail = *control->error.msg ? control->error.msg : row->text;
	return srv_http_problem(
		request, MHD_HTTP_SERVICE_UNAVAILABLE, is_plain ? "NOT_READY" : row->name, detail);
}

static enum MHD_Result render(struct srv_http_request *request, const struct srv_control *control)
{
	const struct srv_http_route *route = request->route;
	struct srv_text text = { 0 };

	if (route->kind == SRV_CONTROL_READY && (control->status != KV_OK || control->ready_reason[0]))
		return finish_not_ready(request, control);
	if (control->status != KV_OK)
		return refuse(request, control->status, control->error.msg);
	if (route->kind == SRV_CONTROL_METRICS) {
		srv_view_metrics(control, request->http->options, &text);
		return queue_text(request, route->success, TYPE_METRICS, &text);
	}
	if (!route->view)
		return queue(request, route->success, NULL, NULL, 0);
	if (route->kind == SRV_CONTROL_POOL_CREATE)
		snprintf(request->location, sizeof(request->location), "/v1/pools/%.*s",
			(int)KV_POOL_NAME_BYTES_MAX, control->name);
	route->view(control, &text);
	srv_text_add(&text, "\n", 1);
	return queue_text(request, route->success, TYPE_JSON, &text);
}

enum MHD_Result srv_http_finish(struct srv_http_request *request)
{
	pthread_mutex_lock(&request->http->lock);
	const enum srv_http_wait wait = request->wait;

	pthread_mutex_unlock(&request->http->lock);
	if (wait != SRV_HTTP_ANSWERED)
		return finish_late(request, wait);
	return render(request, &request->call->control);
}
