/* The control API as commands use it: JSON in, JSON out, failures as one sentence. */
#include <stdio.h>
#include <string.h>

#include "core/memory.h"
#include "server/ctl/ctl.h"
#include "server/ctl/http_client.h"

/* A list of 256 rows a page: 4096 pages are above every bound of the daemon. */
#define LIST_PAGES_MAX  4096u
#define LIST_PAGE_ROWS  256u
#define PATH_BYTES      256u
#define JSON_PATH_STEPS 4u
#define JSON_NAME_BYTES 64u

/* The member at "a.b.c", NULL when there is none. */
static const json_t *find(const json_t *json, const char *path)
{
	char name[JSON_NAME_BYTES];

	for (uint32_t i = 0; i < JSON_PATH_STEPS && json; i++) {
		const size_t n = strcspn(path, ".");

		KV_ASSERT(n < sizeof(name));
		memcpy(name, path, n);
		name[n] = '\0';
		json = json_object_get(json, name);
		if (path[n] == '\0')
			return json;
		path += n + 1;
	}
	return NULL;
}

uint64_t srv_json_u64(const json_t *json, const char *path)
{
	const json_t *member = find(json, path);

	return json_is_integer(member) && json_integer_value(member) > 0
		? (uint64_t)json_integer_value(member)
		: 0;
}

double srv_json_real(const json_t *json, const char *path)
{
	return json_number_value(find(json, path));
}

const char *srv_json_text(const json_t *json, const char *path)
{
	const char *text = json_string_value(find(json, path));

	return text ? text : "-";
}

void srv_ctl_print_json(const json_t *json)
{
	/* 9 digits tell float32 values apart. */
	json_dumpf(json, stdout, JSON_INDENT(2) | JSON_ENCODE_ANY | JSON_REAL_PRECISION(9));
	putchar('\n');
}

static struct srv_http_target target_of(const struct srv_ctl *ctl)
{
	return (struct srv_http_target){
		.address = ctl->http, .token = ctl->token, .trust = ctl->trust, .timeout_ms = ctl->timeout_ms
	};
}

/* What the daemon's error reply says (RFC 9457, with `code`), or the start of any other body. */
static enum kv_status fail_reply(const struct srv_ctl *ctl, const char *method, const char *path,
	const struct srv_http_reply *reply, const json_t *json, struct kv_error *err)
{
	const json_t *detail = find(json, "detail");
	const enum kv_status status = reply->code == 404 ? KV_NOT_FOUND
		: reply->code == 503                     ? KV_BUSY_RETRY
							 : KV_BAD_ARG;

	if (json_is_string(detail))
		return kv_fail(err, status, "%s %s%.128s%.128s: %.40s: %s%s", method,
			srv_http_scheme(ctl->http), srv_http_authority(ctl->http), path,
			srv_json_text(json, "code"), json_string_value(detail),
			reply->code == 401 && ctl->token[0] == '\0'
				? "; --token-file or TQKV_TOKEN has one for tqkvctl"
				: "");
	return kv_fail(err, status, "%s %s%.128s%.128s: HTTP %u: %.200s", method, srv_http_scheme(ctl->http),
		srv_http_authority(ctl->http), path, reply->code, reply->body);
}

enum kv_status srv_ctl_api(const struct srv_ctl *ctl, const char *method, const char *path,
	const json_t *body, json_t **json, struct kv_error *err)
{
	struct srv_http_reply reply;
	const struct srv_http_target target = target_of(ctl);
	json_error_t json_error;
	char *text = body ? json_dumps(body, JSON_COMPACT) : NULL;

	if (body && !text)
		return kv_fail(err, KV_NO_MEMORY, "no memory for a request");
	enum kv_status status = srv_http_request(&target, method, path, text, &reply, err);

	free(text);
	if (status != KV_OK)
		return status;

	json_t *parsed = reply.body_bytes == 0
		? json_null()
		: json_loadb(reply.body, (size_t)reply.body_bytes, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY,
			  &json_error);

	if (reply.code < 200 || reply.code > 299) {
		status = fail_reply(ctl, method, path, &reply, parsed, err);
	} else if (!parsed) {
		status = kv_fail(err, KV_CORRUPT,
			"%s %s%.128s%.128s: the reply is not JSON: line %d column %d: %s", method,
			srv_http_scheme(ctl->http), srv_http_authority(ctl->http), path, json_error.line,
			json_error.column, json_error.text);
	} else if (json) {
		*json = parsed;
		parsed = NULL;
	}
	json_decref(parsed);
	srv_http_reply_finish(&reply);
	return status;
}

enum kv_status srv_ctl_api_text(
	const struct srv_ctl *ctl, const char *path, char **text, struct kv_error *err)
{
	struct srv_http_reply reply;
	const struct srv_http_target target = target_of(ctl);
	enum kv_status status = srv_http_request(&target, "GET", path, NULL, &reply, err);

	if (status != KV_OK)
		return status;
	if (reply.code < 200 || reply.code > 299) {
		json_t *parsed =
			json_loadb(reply.body, (size_t)reply.body_bytes, JSON_REJECT_DUPLICATES, NULL);

		status = fail_reply(ctl, "GET", path, &reply, parsed, err);
		json_decref(parsed);
	} else {
		*text = reply.body;
		reply.body = NULL;
	}
	srv_http_reply_finish(&reply);
	return status;
}

/* Moves the rows of one page behind those of the pages before it. */
static enum kv_status take_page(json_t *list, const json_t *page, const char *key, struct kv_error *err)
{
	const json_t *rows = json_object_get(page, key);

	if (!json_is_array(rows))
		return kv_fail(err, KV_CORRUPT, "the reply has no array '%s'", key);
	if (json_array_extend(list, (json_t *)rows) < 0)
		return kv_fail(err, KV_NO_MEMORY, "no memory for the list '%s'", key);
	return KV_OK;
}

enum kv_status srv_ctl_api_list(
	const struct srv_ctl *ctl, const char *path, const char *key, json_t **list, struct kv_error *err)
{
	json_t *all = json_array();
	char page_path[PATH_BYTES], cursor[32] = "0";
	enum kv_status status = all ? KV_OK : kv_fail(err, KV_NO_MEMORY, "no memory for the list '%s'", key);

	for (uint32_t i = 0; status == KV_OK; i++) {
		json_t *page = NULL;

		if (i == LIST_PAGES_MAX) {
			status = kv_fail(
				err, KV_CORRUPT, "%s: a list of more than %u pages", path, LIST_PAGES_MAX);
			break;
		}
		snprintf(page_path, sizeof(page_path), "%s?limit=%u&cursor=%s", path, LIST_PAGE_ROWS, cursor);
		status = srv_ctl_api(ctl, "GET", page_path, NULL, &page, err);
		if (status == KV_OK)
			status = take_page(all, page, key, err);
		const char *next = json_string_value(json_object_get(page, "cursor_next"));
		const bool is_end = !next || strcmp(next, "0") == 0;

		if (!is_end && strspn(next, "0123456789") == strlen(next) && strlen(next) < sizeof(cursor))
			memcpy(cursor, next, strlen(next) + 1);
		else if (status == KV_OK && !is_end)
			status = kv_fail(err, KV_CORRUPT, "%s: the cursor '%.40s'", path, next);
		json_decref(page);
		if (is_end)
			break;
	}
	if (status == KV_OK)
		*list = all;
	else
		json_decref(all);
	return status;
}

enum kv_status srv_ctl_delete(const struct srv_ctl *ctl, const char *path, const char *name,
	const char *chars, struct kv_error *err)
{
	char full[PATH_BYTES];
	const size_t n_chars = strspn(name, chars);

	if (n_chars == 0 || n_chars > 64 || name[n_chars] || name[0] == '.')
		return kv_fail(err, SRV_CTL_USAGE, "'%.80s' is no %s", name,
			strcmp(chars, SRV_CTL_HEX_CHARS) == 0 ? "id of 16 hex digits"
							      : "name: 1 to 64 letters, digits and . _ -");
	snprintf(full, sizeof(full), "%s/%s", path, name);
	const enum kv_status status = srv_ctl_api(ctl, "DELETE", full, NULL, NULL, err);

	if (status == KV_OK && ctl->is_json)
		printf("{}\n");
	return status;
}
