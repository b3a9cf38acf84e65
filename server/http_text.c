#include "server/http_text.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "core/memory.h"

void srv_text_finish(struct srv_text *text)
{
	kv_free(text->bytes);
	memset(text, 0, sizeof(*text));
}

/* Room for n_bytes and a zero byte behind them. */
static bool make_room(struct srv_text *text, size_t n_bytes)
{
	if (text->is_failed || n_bytes > SRV_TEXT_BYTES_MAX - text->n_bytes) {
		text->is_failed = true;
		return false;
	}
	if (text->n_bytes + n_bytes < text->capacity_bytes)
		return true;
	size_t capacity = text->capacity_bytes ? text->capacity_bytes : 1024;

	while (capacity <= text->n_bytes + n_bytes)
		capacity *= 2;
	char *grown = kv_alloc(capacity, 1);

	if (!grown) {
		text->is_failed = true;
		return false;
	}
	if (text->n_bytes > 0)
		memcpy(grown, text->bytes, text->n_bytes);
	kv_free(text->bytes);
	text->bytes = grown;
	text->capacity_bytes = capacity;
	return true;
}

void srv_text_add(struct srv_text *text, const char *bytes, size_t n_bytes)
{
	if (!make_room(text, n_bytes))
		return;
	memcpy(text->bytes + text->n_bytes, bytes, n_bytes);
	text->n_bytes += n_bytes;
	text->bytes[text->n_bytes] = '\0';
}

void srv_text_printf(struct srv_text *text, const char *fmt, ...)
{
	char line[1024]; /* longest: a HELP line or a metric with three labels of 64 bytes */
	va_list args;

	va_start(args, fmt);
	const int n = vsnprintf(line, sizeof(line), fmt, args);

	va_end(args);
	if (n < 0 || (size_t)n >= sizeof(line))
		text->is_failed = true;
	else
		srv_text_add(text, line, (size_t)n);
}

/* The comma and the key in front of a value. */
static void begin_value(struct srv_text *text, const char *key)
{
	if (text->needs_comma)
		srv_text_add(text, ",", 1);
	if (key)
		srv_text_printf(text, "\"%s\":", key);
	text->needs_comma = true;
}

void srv_text_open(struct srv_text *text, const char *key, char bracket)
{
	begin_value(text, key);
	srv_text_add(text, &bracket, 1);
	text->needs_comma = false;
}

void srv_text_close(struct srv_text *text, char bracket)
{
	srv_text_add(text, &bracket, 1);
	text->needs_comma = true;
}

void srv_text_u64(struct srv_text *text, const char *key, uint64_t value)
{
	begin_value(text, key);
	srv_text_printf(text, "%llu", (unsigned long long)value);
}

void srv_text_i64(struct srv_text *text, const char *key, int64_t value)
{
	begin_value(text, key);
	srv_text_printf(text, "%lld", (long long)value);
}

void srv_text_bool(struct srv_text *text, const char *key, bool value)
{
	begin_value(text, key);
	srv_text_printf(text, "%s", value ? "true" : "false");
}

void srv_text_null(struct srv_text *text, const char *key)
{
	begin_value(text, key);
	srv_text_add(text, "null", 4);
}

void srv_text_ratio(struct srv_text *text, const char *key, double value)
{
	begin_value(text, key);
	srv_text_printf(text, "%.6g", isfinite(value) ? value : 0.0);
}

/* Length of the UTF-8 character at c, 0 when it is none. A zero byte ends every check, so nothing reads
 * beyond it. */
static size_t character_bytes(const unsigned char *c)
{
	size_t n_more;
	unsigned char low = 0x80, high = 0xBF; /* allowed range of the second byte */

	if (c[0] < 0x80)
		return 1;
	if (c[0] >= 0xC2 && c[0] <= 0xDF)
		n_more = 1;
	else if (c[0] >= 0xE0 && c[0] <= 0xEF)
		n_more = 2;
	else if (c[0] >= 0xF0 && c[0] <= 0xF4)
		n_more = 3;
	else
		return 0;
	if (c[0] == 0xE0)
		low = 0xA0; /* below: overlong */
	else if (c[0] == 0xED)
		high = 0x9F; /* above: surrogates */
	else if (c[0] == 0xF0)
		low = 0x90; /* below: overlong */
	else if (c[0] == 0xF4)
		high = 0x8F; /* above: beyond U+10FFFF */
	if (c[1] < low || c[1] > high)
		return 0;
	for (size_t i = 2; i <= n_more; i++)
		if (c[i] < 0x80 || c[i] > 0xBF)
			return 0;
	return n_more + 1;
}

void srv_text_string(struct srv_text *text, const char *key, const char *value)
{
	if (!value) {
		srv_text_null(text, key);
		return;
	}
	begin_value(text, key);
	srv_text_add(text, "\"", 1);
	for (const unsigned char *c = (const unsigned char *)value; *c;) {
		const size_t n_bytes = character_bytes(c);

		if (n_bytes == 0)
			srv_text_add(text, "\xEF\xBF\xBD", 3); /* U+FFFD */
		else if (*c == '"' || *c == '\\')
			srv_text_printf(text, "\\%c", *c);
		else if (*c < 0x20 || *c == 0x7F)
			srv_text_printf(text, "\\u%04x", *c);
		else
			srv_text_add(text, (const char *)c, n_bytes);
		c += n_bytes == 0 ? 1 : n_bytes;
	}
	srv_text_add(text, "\"", 1);
}

void srv_text_hex_id(struct srv_text *text, const char *key, uint64_t id)
{
	begin_value(text, key);
	srv_text_printf(text, "\"%016llx\"", (unsigned long long)id);
}

void srv_text_decimal_id(struct srv_text *text, const char *key, uint64_t id)
{
	begin_value(text, key);
	srv_text_printf(text, "\"%llu\"", (unsigned long long)id);
}
