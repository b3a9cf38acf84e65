/* Answers: one body, the headers that every answer has, problems. HTTP thread. */
#include <string.h>

#include "core/memory.h"
#include "server/http_internal.h"
#include "server/http_rules.h"
#include "server/http_views.h"
#include "server/log.h"

/* Every answer is counted; a call that may change something leaves a line, whatever became of it. */
void srv_http_count(struct srv_http_request *request, unsigned http_status)
{
	struct srv_http *http = request->http;
	const struct srv_http_route *route = request->route;

	atomic_fetch_add(&http->counters.answers[http_status / 100 < 6 ? http_status / 100 : 5], 1);
	if (!route || route->access != SRV_ACCESS_ADMIN || strcmp(route->method, "GET") == 0)
		return;
	if (request->is_allowed) {
		srv_http_audit(request, http_status);
		return;
	}
	/* Whoever may not do it may not fill the log, either. */
	pthread_mutex_lock(&http->lock);
	srv_log_limited(&http->gate_refused, srv_http_monotonic_ns(), SRV_LOG_WARNING,
		"refused %s %s: status %u", route->method, route->path, http_status);
	pthread_mutex_unlock(&http->lock);
}

enum MHD_Result srv_http_queue(
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
		(void)MHD_add_response_header(
			response, MHD_HTTP_HEADER_RETRY_AFTER, request->is_shut_out ? "60" : "1");
	if (http_status == MHD_HTTP_UNAUTHORIZED)
		(void)MHD_add_response_header(response, MHD_HTTP_HEADER_WWW_AUTHENTICATE, "Bearer");
	srv_http_count(request, http_status);
	const enum MHD_Result result = MHD_queue_response(request->connection, http_status, response);

	MHD_destroy_response(response);
	return result;
}

/* Takes the text over. */
enum MHD_Result srv_http_queue_text(
	struct srv_http_request *request, unsigned http_status, const char *type, struct srv_text *text)
{
	if (text->is_failed) {
		static const char problem[] =
			"{\"type\":\"about:blank\",\"title\":\"Internal Server Error\",\"status\":500,"
			"\"detail\":\"out of memory\",\"code\":\"NO_MEMORY\"}\n";
		char *copy = kv_strndup(problem, sizeof(problem) - 1);

		srv_text_finish(text);
		return copy ? srv_http_queue(request, MHD_HTTP_INTERNAL_SERVER_ERROR, SRV_TYPE_PROBLEM, copy,
				      sizeof(problem) - 1)
			    : MHD_NO;
	}
	return srv_http_queue(request, http_status, type, text->bytes, text->n_bytes);
}

enum MHD_Result srv_http_problem(
	struct srv_http_request *request, unsigned http_status, const char *code, const char *detail)
{
	struct srv_text text = { 0 };

	srv_view_problem(http_status, code, detail, &text);
	srv_text_add(&text, "\n", 1);
	return srv_http_queue_text(request, http_status, SRV_TYPE_PROBLEM, &text);
}

enum MHD_Result srv_http_refuse(struct srv_http_request *request, enum kv_status status, const char *detail)
{
	const struct kv_status_row *row = kv_status_row(status);

	return srv_http_problem(request, row->http, row->name, detail && *detail ? detail : row->text);
}

enum kv_status srv_http_body(
	struct srv_http_request *request, const char *what, json_t **json, struct kv_error *err)
{
	if (request->body_bytes == 0)
		return kv_fail(err, KV_BAD_CONFIG, "the body is empty, expected %s as a JSON object", what);
	return srv_http_read_object(request->body, (size_t)request->body_bytes, json, err);
}
