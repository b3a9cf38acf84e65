/* POST /v1/reload: reads configuration and tokens again. Refused as a whole, or in use when this answers. */
#include "server/http_internal.h"
#include "server/http_views.h"
#include "server/routes.h"

enum kv_status srv_route_reload(
	struct srv_http_request *request, struct srv_control *control, struct kv_error *err)
{
	if (!request->http->settings)
		return kv_fail(err, KV_UNSUPPORTED, "this daemon was started without settings to read again");
	return srv_settings_reload(request->http->settings, &control->reload, err);
}

static void add_names(struct srv_text *text, const char *key, uint64_t bits)
{
	srv_text_open(text, key, '[');
	for (uint32_t i = 0; srv_reload_name(i); i++)
		if (bits >> i & 1)
			srv_text_string(text, NULL, srv_reload_name(i));
	srv_text_close(text, ']');
}

void srv_view_reload(const struct srv_control *control, struct srv_text *text)
{
	srv_text_open(text, NULL, '{');
	srv_text_u64(text, "generation", control->reload.generation);
	add_names(text, "changed", control->reload.changed);
	add_names(text, "needs_restart", control->reload.needs_restart);
	srv_text_close(text, '}');
}
