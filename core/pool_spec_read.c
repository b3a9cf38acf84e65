/*
 * Members of a pool's JSON, and how they are refused. Every refusal names the pool, the member, the value and
 * what was expected:
 *
 *	pool "smol": head_dim 20: expected a multiple of 16 from 16 to 256
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "core/pool_spec_internal.h"

static char printable(char c)
{
	return (unsigned char)c < 0x20 || c == 0x7F ? '?' : c;
}

void kv_spec_quote(const char *text, char out[static KV_QUOTE_BYTES_MAX])
{
	size_t n = 0;

	for (; n < 64 && text[n] != '\0'; n++)
		out[n] = printable(text[n]);
	memcpy(out + n, text[n] == '\0' ? "" : "..", text[n] == '\0' ? 1 : 3);
}

void kv_spec_describe(const json_t *value, char out[static KV_FOUND_BYTES_MAX])
{
	char text[KV_QUOTE_BYTES_MAX];

	if (!value)
		snprintf(out, KV_FOUND_BYTES_MAX, " is missing");
	else if (json_is_integer(value))
		snprintf(out, KV_FOUND_BYTES_MAX, " %" JSON_INTEGER_FORMAT, json_integer_value(value));
	else if (json_is_real(value))
		snprintf(out, KV_FOUND_BYTES_MAX, " %g", json_real_value(value));
	else if (json_is_string(value)) {
		kv_spec_quote(json_string_value(value), text);
		snprintf(out, KV_FOUND_BYTES_MAX, " \"%s\"", text);
	} else {
		snprintf(out, KV_FOUND_BYTES_MAX, " is %s",
			json_is_array(value)            ? "an array"
				: json_is_object(value) ? "an object"
				: json_is_true(value)   ? "true"
				: json_is_false(value)  ? "false"
							: "null");
	}
}

enum kv_status kv_spec_refuse(
	const struct kv_spec_reader *reader, const char *member, const json_t *value, const char *expected)
{
	char found[KV_FOUND_BYTES_MAX];

	kv_spec_describe(value, found);
	return kv_fail(reader->err, KV_BAD_CONFIG, "pool \"%s\": %s%s: expected %s", reader->pool, member,
		found, expected);
}

enum kv_status kv_spec_pass_on(const struct kv_spec_reader *reader, const char *what, enum kv_status status,
	const struct kv_error *cause)
{
	char msg[sizeof(cause->msg)];
	size_t n = 0;

	for (; cause->msg[n] != '\0'; n++)
		msg[n] = printable(cause->msg[n]); /* it repeats what came from outside */
	msg[n] = '\0';
	return kv_fail(reader->err,
		status == KV_UNSUPPORTED || status == KV_NO_MEMORY ? status : KV_BAD_CONFIG,
		"pool \"%s\": %s: %s", reader->pool, what, msg);
}

enum kv_status kv_spec_no_memory(const struct kv_spec_reader *reader, const char *what)
{
	return kv_fail(reader->err, KV_NO_MEMORY, "pool \"%s\": %s", reader->pool, what);
}

enum kv_status kv_spec_read_u32(
	const struct kv_spec_reader *reader, const char *member, uint32_t min, uint32_t max, uint32_t *out)
{
	const json_t *value = json_object_get(reader->json, member);
	char expected[80];

	if (json_is_integer(value) && json_integer_value(value) >= min && json_integer_value(value) <= max) {
		*out = (uint32_t)json_integer_value(value);
		return KV_OK;
	}
	snprintf(expected, sizeof(expected), "an integer from %" PRIu32 " to %" PRIu32, min, max);
	return kv_spec_refuse(reader, member, value, expected);
}

enum kv_status kv_spec_read_flag(const struct kv_spec_reader *reader, const char *member, bool *out)
{
	const json_t *value = json_object_get(reader->json, member);

	if (!value)
		return KV_OK;
	if (!json_is_boolean(value))
		return kv_spec_refuse(reader, member, value, "true or false");
	*out = json_is_true(value);
	return KV_OK;
}

enum kv_status kv_spec_read_text(
	const struct kv_spec_reader *reader, const char *member, const char *expected, const char **out)
{
	const json_t *value = json_object_get(reader->json, member);

	if (value && !json_is_string(value))
		return kv_spec_refuse(reader, member, value, expected);
	*out = value ? json_string_value(value) : NULL;
	return KV_OK;
}

enum kv_status kv_spec_read_either(const struct kv_spec_reader *reader, const char *member, const char *other)
{
	if (!kv_spec_has(reader, member) || !kv_spec_has(reader, other))
		return KV_OK;
	return kv_fail(reader->err, KV_BAD_CONFIG, "pool \"%s\": %s: expected either %s or %s", reader->pool,
		member, member, other);
}
