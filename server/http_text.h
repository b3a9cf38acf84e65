/*
 * A growing text, and a JSON writer on top of it: what the control thread renders its answers into.
 *
 * Failures (no memory, too long) are sticky: a writer checks is_failed once, at the end. Strings of peers may
 * hold any bytes; srv_text_string() writes valid UTF-8 JSON for all of them. One thread at a time.
 */
#ifndef SERVER_HTTP_TEXT_H
#define SERVER_HTTP_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/error.h"

/* No answer comes near it: 256 rows take about 200 KiB. */
#define SRV_TEXT_BYTES_MAX 4194304u

struct srv_text {
	char *bytes; /* zero-terminated once something was added; kv_free() it, or srv_text_finish() */
	size_t n_bytes, capacity_bytes;
	bool is_failed;
	bool needs_comma; /* JSON: a value stands before */
};

void srv_text_finish(struct srv_text *text);
void srv_text_add(struct srv_text *text, const char *bytes, size_t n_bytes);
void srv_text_printf(struct srv_text *text, const char *fmt, ...) KV_PRINTF(2, 3);

/* JSON. `key` NULL: an element of an array, or the top level. */
void srv_text_open(struct srv_text *text, const char *key, char bracket);
void srv_text_close(struct srv_text *text, char bracket);
void srv_text_u64(struct srv_text *text, const char *key, uint64_t value);
void srv_text_i64(struct srv_text *text, const char *key, int64_t value);
void srv_text_bool(struct srv_text *text, const char *key, bool value);
void srv_text_null(struct srv_text *text, const char *key);
/* Six significant digits; a number that JSON cannot say becomes 0. */
void srv_text_ratio(struct srv_text *text, const char *key, double value);
/* Bytes that are not UTF-8 become U+FFFD. NULL is written as null. */
void srv_text_string(struct srv_text *text, const char *key, const char *value);
/* Ids as strings: 16 hex digits, or decimal. */
void srv_text_hex_id(struct srv_text *text, const char *key, uint64_t id);
void srv_text_decimal_id(struct srv_text *text, const char *key, uint64_t id);

#endif
