/* POST /v1/plan: what fits, and how fast it can be at best. The formulas are in capacity.h. */
#include "server/capacity.h"
#include "server/http_internal.h"
#include "server/http_views.h"
#include "server/routes.h"

enum kv_status srv_route_plan(
	struct srv_http_request *request, struct srv_control *control, struct kv_error *err)
{
	struct srv_capacity unused;
	json_t *json = NULL;
	enum kv_status status = srv_http_body(request, "what is to fit", &json, err);

	if (status == KV_OK)
		status = srv_capacity_read(json, &control->plan, err);
	json_decref(json);
	/* Numbers that are too large are refused here, so that the view has nothing left to fail. */
	if (status == KV_OK)
		status = srv_capacity_work_out(&control->plan, 0, 0, &unused, err);
	return status;
}

static void add_decode(struct srv_text *text, const struct srv_capacity *capacity)
{
	srv_text_open(text, "decode", '{');
	srv_text_u64(text, "read_bytes", capacity->read_bytes);
	if (capacity->device_bytes_per_s > 0) {
		srv_text_u64(text, "device_bytes_per_s", capacity->device_bytes_per_s);
		srv_text_u64(text, "floor_us", capacity->floor_us);
		srv_text_ratio(text, "tokens_per_s", capacity->tokens_per_s);
	} else {
		srv_text_null(text, "device_bytes_per_s");
		srv_text_null(text, "floor_us");
		srv_text_null(text, "tokens_per_s");
	}
	srv_text_close(text, '}');
}

void srv_view_plan(const struct srv_control *control, struct srv_text *text)
{
	const struct srv_capacity_ask *ask = &control->plan;
	const char *backend = control->info.backend ? control->info.backend : "";
	const uint64_t rate = ask->device_bytes_per_s
		? ask->device_bytes_per_s
		: srv_capacity_device_rate(backend, control->info.device.device);
	struct srv_capacity capacity = { 0 };
	const enum kv_status status =
		srv_capacity_work_out(ask, control->gauges.arena_bytes, rate, &capacity, NULL);

	KV_ASSERT(status == KV_OK); /* srv_route_plan() looked */
	srv_text_open(text, NULL, '{');
	srv_text_string(text, "k", ask->k_format);
	srv_text_string(text, "v", ask->v_format);
	srv_text_u64(text, "token_bytes", ask->token_bytes);
	srv_text_u64(text, "token_dense_bytes", ask->token_dense_bytes);
	srv_text_ratio(text, "compression", (double)ask->token_dense_bytes / (double)ask->token_bytes);
	srv_text_u64(text, "block_size", ask->block_size);
	srv_text_u64(text, "block_bytes", capacity.block_bytes);
	srv_text_u64(text, "context_tokens", ask->context_tokens);
	srv_text_u64(text, "context_blocks", capacity.context_blocks);
	srv_text_u64(text, "context_bytes", capacity.context_bytes);
	srv_text_open(text, "fits", '{');
	srv_text_u64(text, "memory_bytes", capacity.memory_bytes);
	srv_text_u64(text, "n_blocks", capacity.n_blocks);
	srv_text_u64(text, "n_tokens", capacity.n_tokens);
	srv_text_u64(text, "n_sessions", capacity.n_sessions);
	srv_text_close(text, '}');
	srv_text_open(text, "asked", '{');
	srv_text_u64(text, "n_sessions", ask->n_sessions);
	srv_text_u64(text, "bytes", capacity.asked_bytes);
	srv_text_bool(text, "does_fit", capacity.does_fit);
	srv_text_close(text, '}');
	add_decode(text, &capacity);
	srv_text_open(text, "ingest", '{');
	srv_text_u64(text, "token_bytes", ask->token_wire_bytes);
	srv_text_u64(text, "link_bytes_per_s", ask->link_bytes_per_s);
	srv_text_u64(text, "context_us", capacity.context_us);
	srv_text_u64(text, "all_us", capacity.all_us);
	srv_text_close(text, '}');
	srv_text_close(text, '}');
}
