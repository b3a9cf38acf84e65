/*
 * Rules over text that came over HTTP: hosts, origins, media types, escapes, numbers, bodies. Pure functions,
 * any thread; every byte is hostile.
 */
#ifndef SERVER_HTTP_RULES_H
#define SERVER_HTTP_RULES_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/error.h"

/*
 * Host header, with or without port: the bound host, "localhost", a literal of 127.0.0.0/8 or [::1]; any IP
 * literal with is_any_literal. A name that somebody points at 127.0.0.1 (DNS rebinding) is none of these.
 */
bool srv_http_host_is_allowed(const char *host, const char *bound_host, bool is_any_literal);
/* True when a page of this origin was served under the request's own host and port. */
bool srv_http_origin_is_own(const char *origin, const char *host);
/* "application/json", any case, parameters allowed. */
bool srv_http_type_is_json(const char *content_type);
/* Undoes %XX. False: a broken escape, a zero byte, or longer than the room (n_bytes_max with the end). */
bool srv_http_unescape(const char *from, char *out, size_t n_bytes_max);
/* Decimal digits only, at most max; false leaves *out alone. */
bool srv_http_read_u64(const char *text, uint64_t max, uint64_t *out);
/* Exactly 16 hex digits. */
bool srv_http_read_hex_id(const char *text, uint64_t *out);
/* 1 to 64 of [A-Za-z0-9._:-]. */
bool srv_http_is_pool_name(const char *text);
/* The body of a request that wants one JSON object. BAD_CONFIG says line and column. json_decref() it. */
KV_MUST_CHECK enum kv_status srv_http_read_object(
	const char *body, size_t body_bytes, json_t **out, struct kv_error *err);

#endif
