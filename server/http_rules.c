#include "server/http_rules.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <string.h>
#include <strings.h>

#include "core/checked.h"
#include "core/pool_spec.h"

#define HOST_BYTES_MAX 256

static bool is_digit(char c)
{
	return c >= '0' && c <= '9';
}

/* Splits "HOST", "HOST:PORT", "[V6]" or "[V6]:PORT"; the host without brackets. */
static bool split_host(const char *text, char host[HOST_BYTES_MAX], bool *is_bracketed)
{
	const char *begin = text, *end;

	*is_bracketed = *text == '[';
	if (*is_bracketed) {
		begin = text + 1;
		end = strchr(begin, ']');
		if (!end)
			return false;
	} else {
		end = begin + strcspn(begin, ":");
	}
	const char *rest = *is_bracketed ? end + 1 : end;
	const size_t n_bytes = (size_t)(end - begin);

	if (n_bytes == 0 || n_bytes >= HOST_BYTES_MAX)
		return false;
	if (*rest == ':') {
		const size_t n_digits = strlen(rest + 1);

		if (n_digits > 5)
			return false;
		for (size_t i = 0; i < n_digits; i++)
			if (!is_digit(rest[1 + i]))
				return false;
	} else if (*rest) {
		return false;
	}
	memcpy(host, begin, n_bytes);
	host[n_bytes] = '\0';
	return true;
}

bool srv_http_host_is_allowed(const char *text, const char *bound_host, bool is_any_literal)
{
	char host[HOST_BYTES_MAX];
	bool is_bracketed;
	struct in_addr v4;
	struct in6_addr v6;

	if (!split_host(text, host, &is_bracketed))
		return false;
	if (is_bracketed) {
		if (inet_pton(AF_INET6, host, &v6) != 1)
			return false;
		return is_any_literal || IN6_IS_ADDR_LOOPBACK(&v6) || strcasecmp(host, bound_host) == 0;
	}
	if (inet_pton(AF_INET, host, &v4) == 1 && (is_any_literal || ntohl(v4.s_addr) >> 24 == 127))
		return true;
	return strcasecmp(host, "localhost") == 0 || strcasecmp(host, bound_host) == 0;
}

bool srv_http_origin_is_own(const char *origin, const char *host)
{
	if (strncasecmp(origin, "http://", 7) == 0)
		return strcasecmp(origin + 7, host) == 0;
	if (strncasecmp(origin, "https://", 8) == 0)
		return strcasecmp(origin + 8, host) == 0;
	return false; /* "null", or another scheme */
}

bool srv_http_type_is_json(const char *content_type)
{
	static const char json[] = "application/json";

	if (strncasecmp(content_type, json, sizeof(json) - 1) != 0)
		return false;
	const char *rest = content_type + sizeof(json) - 1;

	rest += strspn(rest, " \t");
	return *rest == '\0' || *rest == ';';
}

static int hex_digit(char c)
{
	if (is_digit(c))
		return c - '0';
	if (c >= 'a' && c <= 'f')
		return c - 'a' + 10;
	if (c >= 'A' && c <= 'F')
		return c - 'A' + 10;
	return -1;
}

bool srv_http_unescape(const char *from, char *out, size_t n_bytes_max)
{
	size_t used = 0;

	for (const char *c = from; *c; c++) {
		char byte = *c;

		if (used + 1 >= n_bytes_max)
			return false;
		if (*c == '%') {
			const int high = hex_digit(c[1]);
			const int low = high < 0 ? -1 : hex_digit(c[2]);

			if (low < 0 || (high == 0 && low == 0))
				return false;
			byte = (char)(high * 16 + low);
			c += 2;
		}
		out[used++] = byte;
	}
	out[used] = '\0';
	return true;
}

bool srv_http_read_u64(const char *text, uint64_t max, uint64_t *out)
{
	uint64_t value = 0;

	if (!*text)
		return false;
	for (const char *c = text; *c; c++)
		if (!is_digit(*c) || !kv_mul_u64(value, 10, &value) ||
			!kv_add_u64(value, (uint64_t)(*c - '0'), &value))
			return false;
	if (value > max)
		return false;
	*out = value;
	return true;
}

bool srv_http_read_hex_id(const char *text, uint64_t *out)
{
	uint64_t value = 0;

	if (strlen(text) != 16)
		return false;
	for (const char *c = text; *c; c++) {
		const int digit = hex_digit(*c);

		if (digit < 0)
			return false;
		value = value << 4 | (uint64_t)digit;
	}
	*out = value;
	return true;
}

bool srv_http_is_pool_name(const char *text)
{
	static const char allowed[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:-";
	const size_t n_bytes = strlen(text);

	return n_bytes > 0 && n_bytes <= KV_POOL_NAME_BYTES_MAX && strspn(text, allowed) == n_bytes;
}

enum kv_status srv_http_read_object(const char *body, size_t body_bytes, json_t **out, struct kv_error *err)
{
	json_error_t json_error;
	json_t *json = json_loadb(body, body_bytes, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, &json_error);

	if (!json)
		return kv_fail(err, KV_BAD_CONFIG, "the body is not JSON: line %d, column %d: %s",
			json_error.line, json_error.column, json_error.text);
	if (!json_is_object(json)) {
		const char *what = json_is_array(json) ? "an array"
			: json_is_string(json)         ? "a text"
			: json_is_number(json)         ? "a number"
						       : "true, false or null";

		json_decref(json);
		return kv_fail(err, KV_BAD_CONFIG, "the body is %s, expected an object", what);
	}
	*out = json;
	return KV_OK;
}
