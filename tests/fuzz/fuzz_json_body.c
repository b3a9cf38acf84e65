/*
 * Fuzz target: what comes over HTTP. The first byte chooses: a body as POST /v1/pools reads it, up to the
 * making of the pool's specification, or a text for the rules over hosts, origins, escapes and numbers.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "core/pool_spec.h"
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
	/* What passes without --insecure passes with it. */
	if (srv_http_host_is_allowed(value, "127.0.0.1", false) &&
		!srv_http_host_is_allowed(value, "127.0.0.1", true))
		abort();
	if (srv_http_origin_is_own(value, "localhost:7871") && !strstr(value, ":7871"))
		abort();
	write_string(value);
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
	else
		read_body(bytes, n_text);
	free(bytes);
	return 0;
}
