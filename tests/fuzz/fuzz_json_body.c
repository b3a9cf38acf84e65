/*
 * Fuzz target: what comes over HTTP. The first byte chooses: a body as POST /v1/pools reads it, up to the
 * making of the pool's specification, a text for the rules over hosts, origins, escapes and numbers, a tokens
 * file, or what POST /v1/plan is asked.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "core/pool_spec.h"
#include "server/auth.h"
#include "server/capacity.h"
#include "server/http_rules.h"
#include "server/http_text.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

#define BODY_BYTES_MAX 65536u

static void read_body(const char *bytes, size_t n_bytes)
{
	struct kv_error err = { .status = KV_OK };
	struct kv_pool_spec *spec = NULL;
	json_t *json = NULL;
	enum kv_status status = srv_http_read_object(bytes, n_bytes, &json, &err);

	if (status == KV_OK)
		status = kv_pool_spec_create(json, &spec, &err);
	if (status == KV_OK) {
		/* Its name is what the Location header will say. */
		if (!srv_http_is_pool_name(spec->name))
			abort();
	} else if (spec || err.status != status || err.msg[0] == '\0') {
		abort();
	}
	kv_pool_spec_destroy(spec);
	json_decref(json);
}

/* Whatever the bytes, the writer makes one JSON string of them. */
static void write_string(const char *value)
{
	struct srv_text text = { 0 };

	srv_text_open(&text, NULL, '[');
	srv_text_string(&text, NULL, value);
	srv_text_close(&text, ']');
	if (!text.is_failed) {
		json_t *json = json_loadb(text.bytes, text.n_bytes, 0, NULL);

		if (json_array_size(json) != 1)
			abort();
		json_decref(json);
	}
	srv_text_finish(&text);
}

static void read_text(const char *value)
{
	char out[64];
	uint64_t number = 7;

	if (srv_http_unescape(value, out, sizeof(out)) && strlen(out) > strlen(value))
		abort();
	if (!srv_http_read_u64(value, 256, &number) && number != 7)
		abort();
	if (number > 256)
		abort();
	(void)srv_http_read_hex_id(value, &number);
	(void)srv_http_type_is_json(value);
	(void)srv_http_is_pool_name(value);
	if (srv_uids_hold(value, 1000) && !strstr(value, "1000") && strcmp(value, "any") != 0)
		abort();
	/* What passes without --insecure passes with it. */
	if (srv_http_host_is_allowed(value, "127.0.0.1", false) &&
		!srv_http_host_is_allowed(value, "127.0.0.1", true))
		abort();
	if (srv_http_origin_is_own(value, "localhost:7871") && !strstr(value, ":7871"))
		abort();
	write_string(value);
}

/* A tokens file: accepted with at least one token that logs in, or refused with a message and nothing kept.
 */
static void read_tokens(const char *bytes, size_t n_bytes)
{
	static struct srv_tokens tokens;
	struct kv_error err = { .status = KV_OK };
	const enum kv_status status = srv_tokens_parse(bytes, n_bytes, "file", &tokens, &err);

	if (status != KV_OK) {
		if (tokens.n != 0 || err.msg[0] == '\0')
			abort();
		return;
	}
	for (uint32_t i = 0; i < tokens.n; i++)
		if (srv_tokens_find(&tokens, (const char *)tokens.tokens[i].bytes,
			    tokens.tokens[i].n_bytes) != &tokens.tokens[i])
			abort();
	(void)srv_tokens_find(&tokens, bytes, n_bytes);
}

/* What is to fit: read, worked out, or refused; never a number that wrapped. */
static void read_plan(const char *bytes, size_t n_bytes)
{
	struct kv_error err = { .status = KV_OK };
	struct srv_capacity_ask ask;
	struct srv_capacity capacity;
	json_t *json = NULL;

	if (srv_http_read_object(bytes, n_bytes, &json, &err) != KV_OK)
		return;
	if (srv_capacity_read(json, &ask, &err) == KV_OK &&
		srv_capacity_work_out(&ask, 1ull << 34, 1ull << 40, &capacity, &err) == KV_OK &&
		(capacity.n_tokens < capacity.n_sessions || capacity.context_bytes > capacity.asked_bytes))
		abort();
	json_decref(json);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
	if (n_bytes == 0 || n_bytes > BODY_BYTES_MAX)
		return 0;
	/* A copy of exactly this size (and a zero byte for texts), so that one byte too many is seen. */
	const size_t n_text = n_bytes - 1;
	char *bytes = malloc(n_text + 1);

	if (!bytes)
		return 0;
	memcpy(bytes, data + 1, n_text);
	bytes[n_text] = '\0';
	if (data[0] == 't')
		read_text(bytes);
	else if (data[0] == 'k')
		read_tokens(bytes, n_text);
	else if (data[0] == 'p')
		read_plan(bytes, n_text);
	else
		read_body(bytes, n_text);
	free(bytes);
	return 0;
}
