/*
 * What the daemon was told and can be told again: GET /v1/config (the options in use, in the schema of the
 * configuration file, without secrets), /v1/log-level.
 */
#include <string.h>

#include "core/checked.h"
#include "core/memory.h"
#include "server/http_internal.h"
#include "server/http_rules.h"
#include "server/log.h"
#include "server/routes.h"

enum MHD_Result srv_route_config(struct srv_http_request *request)
{
	json_t *json = srv_options_to_json(request->options);
	const size_t n_bytes = json ? json_dumpb(json, NULL, 0, JSON_COMPACT) : 0;
	char *bytes = n_bytes > 0 ? kv_alloc(n_bytes + 1, 1) : NULL;

	if (!bytes) {
		json_decref(json);
		return srv_http_refuse(request, KV_NO_MEMORY, NULL);
	}
	const size_t n_written = json_dumpb(json, bytes, n_bytes, JSON_COMPACT);

	KV_ASSERT(n_written == n_bytes);
	bytes[n_bytes] = '\n';
	json_decref(json);
	return srv_http_queue(request, MHD_HTTP_OK, SRV_TYPE_JSON, bytes, n_bytes + 1);
}

/* ---- log level ---- */

static const struct {
	const char *name;
	enum srv_log_level level;
} levels[] = {
	{ "error", SRV_LOG_ERROR },
	{ "warning", SRV_LOG_WARNING },
	{ "info", SRV_LOG_INFO },
	{ "debug", SRV_LOG_DEBUG },
};

enum MHD_Result srv_route_log_level(struct srv_http_request *request)
{
	const enum srv_log_level level = srv_log_level_now();
	struct srv_text text = { 0 };

	srv_text_open(&text, NULL, '{');
	for (size_t i = 0; i < KV_LENGTH(levels); i++)
		if (levels[i].level == level)
			srv_text_string(&text, "level", levels[i].name);
	srv_text_close(&text, '}');
	srv_text_add(&text, "\n", 1);
	return srv_http_queue_text(request, MHD_HTTP_OK, SRV_TYPE_JSON, &text);
}

static enum kv_status read_level(const json_t *json, enum srv_log_level *level, struct kv_error *err)
{
	/* The configuration file calls it log_level. */
	const char *member = json_object_get(json, "log_level") ? "log_level" : "level";
	const char *name = json_string_value(json_object_get(json, member));

	if (json_object_size(json) != 1 || !name)
		return kv_fail(err, KV_BAD_CONFIG, "expected one member, \"level\" or \"log_level\", a text");
	for (size_t i = 0; i < KV_LENGTH(levels); i++) {
		if (strcmp(name, levels[i].name) == 0) {
			*level = levels[i].level;
			return KV_OK;
		}
	}
	return kv_fail(err, KV_BAD_CONFIG,
		"%s: '%.40s' is not accepted, expected error, warning, info or debug", member, name);
}

/* Until the next reload or start, which say it again. */
enum MHD_Result srv_route_log_level_set(struct srv_http_request *request)
{
	struct kv_error error = { 0 };
	enum srv_log_level level = SRV_LOG_INFO;
	json_t *json = NULL;
	enum kv_status status = srv_http_body(request, "the level", &json, &error);

	if (status == KV_OK)
		status = read_level(json, &level, &error);
	json_decref(json);
	if (status != KV_OK)
		return srv_http_refuse(request, status, error.msg);
	srv_log_set_level(level);
	return srv_route_log_level(request);
}
