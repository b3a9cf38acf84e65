/*
 * Reading a request: which route, which parameters, and whether it may be asked at all; and what became of
 * the call that it posted. Refusals are RFC 9457 problems; their code is the name of a status where one is
 * the cause, else METHOD_NOT_ALLOWED, UNSUPPORTED_MEDIA_TYPE, NOT_READY or NO_ANSWER.
 */
#include <stdio.h>
#include <string.h>

#include "core/memory.h"
#include "server/http_internal.h"
#include "server/http_rules.h"
#include "server/http_views.h"
#include "server/routes.h"

/* ---- parameters ---- */

enum param_idx {
	PARAM_LIMIT,
	PARAM_CURSOR,
	PARAM_DEEP,
	PARAM_TENANT,
	PARAM_SORT,
	PARAM_PREFIX_SORT,
	PARAM_GROUP,
	N_PARAMS
};

static const struct {
	const char *name, *expected;
	enum srv_http_param param;
	uint64_t min, max;
} known_params[N_PARAMS] = {
	[PARAM_LIMIT] = { "limit", "a number from 1 to 256", SRV_PARAM_PAGE, 1, SRV_CONTROL_ROWS_MAX },
	[PARAM_CURSOR] = { "cursor", "the cursor_next of an earlier answer", SRV_PARAM_PAGE, 0, UINT64_MAX },
	[PARAM_DEEP] = { "deep", "0 or 1", SRV_PARAM_DEEP, 0, 1 },
	[PARAM_TENANT] = { "tenant", "the number of a tenant, or tcp", SRV_PARAM_TENANT, 0, UINT64_MAX },
	[PARAM_SORT] = { "sort", "age, sequences, tokens, bytes, rows_in or queries", SRV_PARAM_SORT, 0, 0 },
	[PARAM_PREFIX_SORT] = { "sort", "age, tokens, bytes or hits", SRV_PARAM_PREFIX_SORT, 0, 0 },
	[PARAM_GROUP] = { "group", "a whole number from 0 to 8", SRV_PARAM_GROUP, 0, KV_TABLES_MAX - 1 },
};
/* As the `sort` parameter says them. */
static const char *const sort_names[SRV_N_SORTS] = {
	[SRV_SORT_NONE] = "",
	[SRV_SORT_AGE] = "age",
	[SRV_SORT_SEQUENCES] = "sequences",
	[SRV_SORT_TOKENS] = "tokens",
	[SRV_SORT_BYTES] = "bytes",
	[SRV_SORT_ROWS_IN] = "rows_in",
	[SRV_SORT_QUERIES] = "queries",
	[SRV_SORT_HITS] = "hits",
};
#define SORT_BIT(name) (1u << SRV_SORT_##name)
#define SESSION_SORTS                                                                                   \
	(SORT_BIT(AGE) | SORT_BIT(SEQUENCES) | SORT_BIT(TOKENS) | SORT_BIT(BYTES) | SORT_BIT(ROWS_IN) | \
		SORT_BIT(QUERIES))
#define PREFIX_SORTS (SORT_BIT(AGE) | SORT_BIT(TOKENS) | SORT_BIT(BYTES) | SORT_BIT(HITS))
#define ANY_SORT     (SRV_PARAM_SORT | SRV_PARAM_PREFIX_SORT)

struct params {
	unsigned allowed; /* enum srv_http_param */
	bool seen[N_PARAMS];
	uint64_t values[N_PARAMS];
	struct srv_sort_key cursor_key; /* a cursor with two parts */
	bool has_cursor_key, is_sorted;
	uint64_t sort; /* enum srv_session_sort */
	struct kv_error error;
	bool is_bad;
};

static bool read_sort(const char *text, unsigned sorts, uint64_t *sort)
{
	for (uint64_t i = SRV_SORT_NONE + 1; i < SRV_N_SORTS; i++) {
		if ((sorts >> i & 1) && strcmp(text, sort_names[i]) == 0) {
			*sort = i;
			return true;
		}
	}
	return false;
}

/* "KEY.SLOT", as the page before said. */
static bool read_cursor_key(char *text, struct srv_sort_key *key)
{
	char *dot = strchr(text, '.');

	if (!dot)
		return false;
	*dot = '\0';
	if (!srv_http_read_u64(text, UINT64_MAX, &key->key) ||
		!srv_http_read_u64(dot + 1, UINT64_MAX, &key->slot_idx))
		return false;
	return true;
}

/* Of all but cursors. */
#define VALUE_BYTES_MAX 32u

static bool read_value(struct params *params, enum param_idx idx, const char *value)
{
	char text[48]; /* the longest: a cursor of twice 20 digits with a dot between */

	const size_t n_bytes_max = idx == PARAM_CURSOR ? sizeof(text) : VALUE_BYTES_MAX;

	if (!value || !srv_http_unescape(value, text, n_bytes_max))
		return false;
	if (idx == PARAM_SORT || idx == PARAM_PREFIX_SORT) {
		params->is_sorted = true;
		return read_sort(text, idx == PARAM_SORT ? SESSION_SORTS : PREFIX_SORTS, &params->sort);
	}
	if (idx == PARAM_TENANT && strcmp(text, "tcp") == 0) {
		params->values[idx] = UINT64_MAX;
		return true;
	}
	if (idx == PARAM_CURSOR && (params->allowed & ANY_SORT) && strchr(text, '.')) {
		params->has_cursor_key = read_cursor_key(text, &params->cursor_key);
		return params->has_cursor_key;
	}
	return srv_http_read_u64(text, known_params[idx].max, &params->values[idx]) &&
		params->values[idx] >= known_params[idx].min;
}

static enum MHD_Result read_param(void *cls, enum MHD_ValueKind kind, const char *key, const char *value)
{
	struct params *params = cls;

	(void)kind;
	params->is_bad = true;
	for (enum param_idx i = 0; i < N_PARAMS; i++) {
		if (strcmp(key, known_params[i].name) != 0 || !(params->allowed & known_params[i].param))
			continue;
		if (params->seen[i]) {
			(void)kv_fail(&params->error, KV_BAD_ARG, "parameter %s is given twice", key);
			return MHD_NO;
		}
		params->seen[i] = true;
		if (!read_value(params, i, value)) {
			(void)kv_fail(&params->error, KV_BAD_ARG,
				"parameter %s: '%.40s' is not accepted, expected %s", key, value ? value : "",
				known_params[i].expected);
			return MHD_NO;
		}
		params->is_bad = false;
		return MHD_YES;
	}
	(void)kv_fail(&params->error, KV_BAD_ARG, "this path has no parameter '%.40s'", key);
	return MHD_NO;
}

/* What only the whole can tell: a list's cursor belongs to its order. */
static void check_params(struct params *params)
{
	const bool is_first = !params->has_cursor_key && params->values[PARAM_CURSOR] == 0;

	if (params->is_bad || is_first || params->is_sorted == params->has_cursor_key)
		return;
	params->is_bad = true;
	(void)kv_fail(&params->error, KV_BAD_ARG, "parameter cursor: it comes from a list in another order");
}

/* ---- route ---- */

/* Does the path fit the pattern? Fills request->names. */
static bool path_fits(struct srv_http_request *request, const char *pattern, const char *path)
{
	char part[3 * SRV_HTTP_NAME_BYTES];
	uint32_t n_names = 0;

	while (*pattern) {
		if (*pattern != '{') {
			if (*pattern++ != *path++)
				return false;
			continue;
		}
		const size_t n_bytes = strcspn(path, "/");

		if (n_bytes == 0 || n_bytes >= sizeof(part))
			return false;
		KV_ASSERT(n_names < SRV_HTTP_NAMES_MAX);
		memcpy(part, path, n_bytes);
		part[n_bytes] = '\0';
		if (!srv_http_unescape(part, request->names[n_names++], SRV_HTTP_NAME_BYTES))
			return false;
		path += n_bytes;
		pattern += strcspn(pattern, "}") + 1;
	}
	return *path == '\0';
}

/*
 * Fills request->names and returns the route, or NULL: *is_path says whether another method would have found
 * one (request->allow lists them).
 */
static const struct srv_http_route *find_route(
	struct srv_http_request *request, const char *url, const char *method, bool *is_path)
{
	const char *wanted = strcmp(method, "HEAD") == 0 ? "GET" : method;
	const struct srv_http_route *found = NULL;
	size_t used = 0;

	*is_path = false;
	for (size_t i = 0; i < srv_http_n_routes; i++) {
		const struct srv_http_route *route = &srv_http_routes[i];

		if (!path_fits(request, route->path, url))
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

static enum MHD_Result ask_loop(
	struct srv_http_request *request, const struct srv_http_route *route, const struct params *params)
{
	struct srv_http_call *call = kv_alloc(1, sizeof(*call));
	struct kv_error error = { 0 };

	if (!call)
		return srv_http_refuse(request, KV_NO_MEMORY, NULL);
	struct srv_control *control = &call->control;

	control->kind = route->kind;
	control->n_rows_max = (uint32_t)params->values[PARAM_LIMIT];
	control->cursor = params->values[PARAM_CURSOR];
	control->cursor_key = params->cursor_key;
	control->has_cursor_key = params->has_cursor_key;
	control->sort = (enum srv_session_sort)params->sort;
	control->tenant = params->values[PARAM_TENANT];
	control->has_tenant = params->seen[PARAM_TENANT];
	control->group_idx = (uint32_t)params->values[PARAM_GROUP];
	control->is_deep = params->values[PARAM_DEEP] != 0;
	const enum kv_status status = route->prepare ? route->prepare(request, control, &error) : KV_OK;

	if (status != KV_OK) {
		srv_http_call_free(call);
		return srv_http_refuse(request, status, error.msg);
	}
	srv_http_post(request, call);
	return MHD_YES;
}

/* What the second address serves: nothing that names a client or changes anything. */
static bool is_for_metrics(const struct srv_http_route *route)
{
	return route->kind == SRV_CONTROL_METRICS || route->kind == SRV_CONTROL_READY ||
		route->answer == srv_route_live;
}

static enum MHD_Result refuse_size(struct srv_http_request *request, uint32_t n_bytes_max)
{
	char detail[160];

	snprintf(detail, sizeof(detail), "the body is larger than %u bytes%s", n_bytes_max,
		n_bytes_max > SRV_HTTP_BODY_BYTES_MAX
			? "; k_center_file and the like name a file where the daemon is started"
			: "");
	return srv_http_problem(request, MHD_HTTP_CONTENT_TOO_LARGE, "TOO_LARGE", detail);
}

/* Everything here is looked at before the first byte of the body is received. Whatever is answered closes the
 * connection, so nothing of the body is read. */
enum MHD_Result srv_http_expect_body(
	struct srv_http_request *request, const char *url, const char *method, uint64_t length_bytes)
{
	struct srv_http *http = request->http;
	enum MHD_Result result;
	bool is_path;
	const struct srv_http_route *route =
		request->listener->is_metrics ? NULL : find_route(request, url, method, &is_path);
	const bool is_large = route && route->has_pool_body;
	const uint32_t n_bytes_max = is_large ? SRV_HTTP_POOL_BODY_BYTES_MAX : SRV_HTTP_BODY_BYTES_MAX;

	request->allow[0] = '\0';
	if (length_bytes > n_bytes_max)
		return refuse_size(request, n_bytes_max);
	request->route = route;
	if (srv_http_is_refused_as_large(request, route, &result))
		return result;
	pthread_mutex_lock(&http->lock);
	const bool is_room = http->n_large_bodies < SRV_HTTP_LARGE_BODIES_MAX;

	http->n_large_bodies += is_room;
	pthread_mutex_unlock(&http->lock);
	if (!is_room)
		return srv_http_refuse(
			request, KV_BUSY_RETRY, "4 bodies of more than 65536 bytes are received already");
	request->body_bytes_max = (uint32_t)length_bytes;
	return MHD_YES;
}

enum MHD_Result srv_http_dispatch(struct srv_http_request *request, const char *url, const char *method)
{
	struct params params = { .values = { [PARAM_LIMIT] = SRV_HTTP_LIMIT_DEFAULT } };
	enum MHD_Result result;
	bool is_path;
	const struct srv_http_route *route = find_route(request, url, method, &is_path);
	char detail[160];

	if (route && request->listener->is_metrics && !is_for_metrics(route)) {
		route = NULL;
		is_path = false;
	}
	request->route = route;
	if (srv_http_is_refused(request, route, &result))
		return result;
	request->is_allowed = true;
	if (!is_path) {
		request->allow[0] = '\0';
		snprintf(detail, sizeof(detail), "there is nothing at '%.80s'; %s", url,
			request->listener->is_metrics ? "here are /metrics, /livez and /readyz"
						      : "/v1/openapi.json lists what there is");
		return srv_http_refuse(request, KV_NOT_FOUND, detail);
	}
	if (!route) {
		snprintf(detail, sizeof(detail), "%.16s is not possible here, expected %s", method,
			request->allow);
		return srv_http_problem(request, MHD_HTTP_METHOD_NOT_ALLOWED, "METHOD_NOT_ALLOWED", detail);
	}
	if (request->body_bytes > request->body_bytes_max)
		return refuse_size(request, request->body_bytes_max);
	params.allowed = route->params;
	MHD_get_connection_values(request->connection, MHD_GET_ARGUMENT_KIND, read_param, &params);
	check_params(&params);
	if (params.is_bad)
		return srv_http_refuse(request, KV_BAD_ARG, params.error.msg);
	if (route->answer)
		return route->answer(request);
	return ask_loop(request, route, &params);
}

/* ---- the call came back ---- */

static enum MHD_Result finish_late(struct srv_http_request *request, enum srv_http_wait wait)
{
	const char *detail = "the event loop does not answer";

	if (wait == SRV_HTTP_STOPPED)
		return srv_http_refuse(request, KV_DRAINING, NULL);
	if (wait == SRV_HTTP_REFUSED)
		return srv_http_refuse(request, KV_BUSY_RETRY, "256 control requests wait already");
	if (strcmp(request->route->method, "GET") != 0)
		detail = "the event loop does not answer; it may still carry this out, so look before you "
			 "try again";
	return srv_http_problem(request, MHD_HTTP_SERVICE_UNAVAILABLE, "NO_ANSWER", detail);
}

static enum MHD_Result render(struct srv_http_request *request, const struct srv_control *control)
{
	const struct srv_http_route *route = request->route;
	struct srv_text text = { 0 };

	if (route->kind == SRV_CONTROL_READY && (control->status != KV_OK || control->ready_reason[0]))
		return srv_route_not_ready(request, control);
	if (control->status != KV_OK)
		return srv_http_refuse(request, control->status, control->error.msg);
	if (route->kind == SRV_CONTROL_METRICS) {
		srv_view_metrics(control, request->options, &text);
		srv_view_http_metrics(&request->http->counters, &text);
		return srv_http_queue_text(request, route->success, SRV_TYPE_METRICS, &text);
	}
	if (!route->view)
		return srv_http_queue(request, route->success, NULL, NULL, 0);
	if (route->kind == SRV_CONTROL_POOL_CREATE)
		snprintf(request->location, sizeof(request->location), "/v1/pools/%.*s",
			(int)KV_POOL_NAME_BYTES_MAX, control->name);
	route->view(control, &text);
	srv_text_add(&text, "\n", 1);
	return srv_http_queue_text(request, route->success, SRV_TYPE_JSON, &text);
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
