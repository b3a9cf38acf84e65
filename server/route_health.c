/* /livez, /readyz, POST /v1/self-test: does the loop turn, does the backend still compute what it should? */
#include <stdio.h>

#include "server/http_internal.h"
#include "server/http_views.h"
#include "server/routes.h"

void srv_view_ready(const struct srv_control *control, struct srv_text *text)
{
	srv_text_open(text, NULL, '{');
	srv_text_string(text, "status", "ready");
	srv_text_bool(text, "is_deep", control->is_deep);
	srv_text_close(text, '}');
}

void srv_view_live(uint64_t turn_age_ms, struct srv_text *text)
{
	srv_text_open(text, NULL, '{');
	srv_text_string(text, "status", "alive");
	srv_text_u64(text, "turn_age_ms", turn_age_ms);
	srv_text_close(text, '}');
}

void srv_view_self_test(const struct srv_control *control, struct srv_text *text)
{
	srv_text_open(text, NULL, '{');
	srv_text_bool(text, "is_passed", control->is_passed);
	srv_text_string(text, "reason", control->is_passed ? NULL : control->ready_reason);
	srv_text_u64(text, "duration_us", control->duration_us);
	srv_text_close(text, '}');
}

enum MHD_Result srv_route_live(struct srv_http_request *request)
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
	return srv_http_queue_text(request, MHD_HTTP_OK, SRV_TYPE_JSON, &text);
}

enum MHD_Result srv_route_not_ready(struct srv_http_request *request, const struct srv_control *control)
{
	const struct kv_status_row *row = kv_status_row(control->status);
	const bool is_plain = control->status == KV_OK || control->status == KV_UNAVAILABLE;
	const char *detail = control->ready_reason;

	if (!*detail)
		detail = *control->error.msg ? control->error.msg : row->text;
	return srv_http_problem(
		request, MHD_HTTP_SERVICE_UNAVAILABLE, is_plain ? "NOT_READY" : row->name, detail);
}
