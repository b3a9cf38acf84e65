/*
 * The short form of a pool: name=smol,layers=30,q_heads=9,... Only the way of writing differs: what the
 * values mean is checked where the JSON is read. Lists and objects (groups, k_center, ..) have no short form.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/checked.h"
#include "core/pool_spec_internal.h"

#define PART_BYTES_MAX 320u /* longest member name and model text */

static enum kv_status refuse(const char *part, const char *expected, struct kv_error *err)
{
	return kv_fail(err, KV_BAD_CONFIG, "pool: \"%.80s\": expected %s", part, expected);
}

/* Where the numbers may come from a file, the member that names one is what was meant. */
static enum kv_status refuse_list(const char *part, const char *name, struct kv_error *err)
{
	static const struct {
		const char *name, *expected;
	} files[] = {
		{ "k_center", "no lists here: use k_center_file=PATH, or the configuration file" },
		{ "recipe", "no lists here: use recipe_file=PATH, or the configuration file" },
		{ "rotation_matrix", "no lists here: use rotation_file=PATH, or the configuration file" },
	};

	for (uint32_t i = 0; i < KV_LENGTH(files); i++) {
		if (strcmp(files[i].name, name) == 0)
			return refuse(part, files[i].expected, err);
	}
	return refuse(part, "no lists here: use the configuration file", err);
}

/* NULL when the text is no such value (or without memory: the caller cannot do more about that). */
static json_t *parse_value(const char *text, enum kv_member_kind kind)
{
	char *end;

	errno = 0;
	if (kind == KV_MEMBER_TEXT)
		return json_string(text);
	if (kind == KV_MEMBER_FLAG)
		return strcmp(text, "true") == 0     ? json_true()
			: strcmp(text, "false") == 0 ? json_false()
						     : NULL;
	if (*text == '\0' || strspn(text, "0123456789+-.eE") != strlen(text))
		return NULL; /* strtod() would take blanks, hexadecimal and "inf" as well */
	if (kind == KV_MEMBER_INTEGER) {
		const long long value = strtoll(text, &end, 10);

		return *end == '\0' && errno == 0 ? json_integer(value) : NULL;
	}

	const double value = strtod(text, &end);

	return *end == '\0' && errno == 0 ? json_real(value) : NULL;
}

/* One "member=value", which it may write to. */
static enum kv_status parse_part(char *part, json_t *json, struct kv_error *err)
{
	char *equals = strchr(part, '=');

	if (!equals)
		return refuse(part, "member=value", err);

	const struct kv_pool_member *member = kv_pool_member_find(part, (uint32_t)(equals - part));

	if (!member)
		return refuse(part, "a member of a pool before the '='", err);
	if (member->kind == KV_MEMBER_LIST)
		return refuse_list(part, member->name, err);
	if (json_object_get(json, member->name))
		return refuse(part, "every member once", err);

	json_t *value = parse_value(equals + 1, member->kind);

	if (!value)
		return refuse(part,
			member->kind == KV_MEMBER_INTEGER          ? "an integer behind the '='"
				: member->kind == KV_MEMBER_NUMBER ? "a number behind the '='"
				: member->kind == KV_MEMBER_FLAG   ? "true or false behind the '='"
								   : "UTF-8 text behind the '='",
			err);
	if (json_object_set_new(json, member->name, value) != 0)
		return kv_fail(err, KV_NO_MEMORY, "pool: %s", member->name);
	return KV_OK;
}

enum kv_status kv_pool_spec_parse_short(const char *text, json_t **out, struct kv_error *err)
{
	json_t *json = json_object();

	if (!json)
		return kv_fail(err, KV_NO_MEMORY, "pool");
	for (const char *part = text;;) {
		const size_t n_bytes = strcspn(part, ",");
		char copy[PART_BYTES_MAX + 1];
		enum kv_status status;

		if (n_bytes > PART_BYTES_MAX) {
			status = refuse(part, "at most 320 bytes between commas", err);
		} else {
			memcpy(copy, part, n_bytes);
			copy[n_bytes] = '\0';
			status = parse_part(copy, json, err);
		}
		if (status != KV_OK) {
			json_decref(json);
			return status;
		}
		if (part[n_bytes] == '\0')
			break;
		part += n_bytes + 1;
	}
	*out = json;
	return KV_OK;
}
