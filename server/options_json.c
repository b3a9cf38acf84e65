/*
 * The configuration file: one JSON object whose members are the options, plus "listen" (array of addresses)
 * "pools" (array of pool objects) and "tenants" (tenants.h). GET /v1/config returns the same schema, so that
 * its answer is a valid file.
 */
#include <stdio.h>
#include <string.h>

#include "core/domain.h"
#include "server/options_internal.h"
#include "server/tenants.h"

#define SOURCE_BYTES 256

/* What a value looks like, for messages: never more than a few words of a hostile file. */
static void describe(const json_t *value, char *out, size_t n_bytes_max)
{
	switch (json_typeof(value)) {
	case JSON_OBJECT:
		snprintf(out, n_bytes_max, "an object");
		break;
	case JSON_ARRAY:
		snprintf(out, n_bytes_max, "an array");
		break;
	case JSON_STRING:
		snprintf(out, n_bytes_max, "the text '%.40s'", json_string_value(value));
		break;
	case JSON_INTEGER:
		snprintf(out, n_bytes_max, "%lld", (long long)json_integer_value(value));
		break;
	case JSON_REAL:
		snprintf(out, n_bytes_max, "the fraction %.9g", json_real_value(value));
		break;
	case JSON_TRUE:
		snprintf(out, n_bytes_max, "true");
		break;
	case JSON_FALSE:
		snprintf(out, n_bytes_max, "false");
		break;
	case JSON_NULL:
		snprintf(out, n_bytes_max, "null");
		break;
	}
}

static enum kv_status refuse(
	const char *member, const json_t *value, const char *expected, struct kv_error *err)
{
	char given[80];

	describe(value, given, sizeof(given));
	return kv_fail(err, KV_BAD_CONFIG, "%s: %s is not accepted, expected %s", member, given, expected);
}

static enum kv_status merge_member(struct srv_options *options, const struct srv_option_row *row,
	const json_t *value, struct kv_error *err)
{
	char expected[160];
	const bool is_number = row->kind == SRV_OPTION_NUMBER || row->kind == SRV_OPTION_BYTES;

	if (row->kind == SRV_OPTION_FLAG && json_is_boolean(value)) {
		srv_option_set_flag(options, row, json_is_true(value));
		return KV_OK;
	}
	if (is_number && json_is_integer(value) && json_integer_value(value) >= 0)
		return srv_option_set_number(
			options, row, (uint64_t)json_integer_value(value), row->name, err);
	/* A size may be written as "2MiB", too. Text with a zero byte inside cannot come through the parser.
	 */
	/* JSON has no octal numbers; a mode may be a text. */
	if (json_is_string(value) && row->offset == offsetof(struct srv_options, socket_mode))
		return srv_option_set_text(options, row, json_string_value(value), row->name, err);
	if (json_is_string(value) && row->kind != SRV_OPTION_NUMBER && row->kind != SRV_OPTION_FLAG)
		return srv_option_set_text(options, row, json_string_value(value), row->name, err);
	srv_option_expected(row, expected, sizeof(expected));
	return refuse(row->name, value, expected, err);
}

static enum kv_status merge_listen(struct srv_options *options, const json_t *list, struct kv_error *err)
{
	char source[32];
	size_t idx;
	json_t *value;

	if (!json_is_array(list))
		return refuse("listen", list, "an array of addresses", err);
	options->n_listen = 0;
	json_array_foreach (list, idx, value) {
		snprintf(source, sizeof(source), "listen[%zu]", idx);
		if (!json_is_string(value))
			return refuse(source, value, "an address (unix:PATH or tcp:HOST:PORT)", err);
		const enum kv_status status =
			srv_options_add_listen(options, json_string_value(value), source, err);

		if (status != KV_OK)
			return status;
	}
	return KV_OK;
}

/* Shape and names only; what a pool's members mean is checked when the pool is made (and by --check-config).
 */
enum kv_status srv_options_check_pools(const json_t *pools, struct kv_error *err)
{
	char member[48];
	size_t idx, other_idx;
	json_t *pool, *other;

	if (!json_is_array(pools))
		return refuse("pools", pools, "an array of pool objects", err);
	if (json_array_size(pools) > KV_POOLS_MAX)
		return kv_fail(err, KV_BAD_CONFIG, "pools: %zu pools given, expected at most %u",
			json_array_size(pools), KV_POOLS_MAX);
	json_array_foreach (pools, idx, pool) {
		snprintf(member, sizeof(member), "pools[%zu]", idx);
		if (!json_is_object(pool))
			return refuse(member, pool, "an object (name, layers, q_heads, ...)", err);
		const char *name = json_string_value(json_object_get(pool, "name"));

		json_array_foreach (pools, other_idx, other) {
			const char *other_name = json_string_value(json_object_get(other, "name"));

			if (other_idx < idx && name && other_name && strcmp(name, other_name) == 0)
				return kv_fail(err, KV_BAD_CONFIG,
					"%s.name: '%.64s' is already the name of pools[%zu]", member, name,
					other_idx);
		}
	}
	return KV_OK;
}

static enum kv_status merge_pools(struct srv_options *options, json_t *pools, struct kv_error *err)
{
	const enum kv_status status = srv_options_check_pools(pools, err);

	if (status == KV_OK)
		options->pools = pools;
	return status;
}

static enum kv_status merge_tenants(struct srv_options *options, json_t *tenants, struct kv_error *err)
{
	const enum kv_status status = srv_tenants_check(tenants, err);

	if (status == KV_OK)
		options->tenants = tenants;
	return status;
}

static enum kv_status merge_object(struct srv_options *options, json_t *root, struct kv_error *err)
{
	enum kv_status status = KV_OK;
	const char *name;
	json_t *value;

	json_object_foreach (root, name, value) {
		const struct srv_option_row *row = NULL;

		for (size_t i = 0; i < SRV_N_OPTIONS && !row; i++)
			if (strcmp(srv_option_rows[i].name, name) == 0)
				row = &srv_option_rows[i];
		if (row)
			status = merge_member(options, row, value, err);
		else if (strcmp(name, "listen") == 0)
			status = merge_listen(options, value, err);
		else if (strcmp(name, "pools") == 0)
			status = merge_pools(options, value, err);
		else if (strcmp(name, "tenants") == 0)
			status = merge_tenants(options, value, err);
		else
			status = kv_fail(err, KV_BAD_CONFIG,
				"%.64s: there is no such option; --help lists all of them", name);
		if (status != KV_OK)
			return status;
	}
	return KV_OK;
}

enum kv_status srv_options_merge_json(struct srv_options *options, const char *text, uint64_t n_bytes,
	const char *source, struct kv_error *err)
{
	json_error_t json_error;
	json_t *root = json_loadb(text, (size_t)n_bytes, JSON_REJECT_DUPLICATES, &json_error);

	if (!root)
		return kv_fail(err, KV_BAD_CONFIG, "%.200s:%d:%d: %s", source, json_error.line,
			json_error.column, json_error.text);
	/* A copy, so that a refused text changes nothing. It borrows the lists until all of it is accepted.
	 */
	struct srv_options next = *options;
	enum kv_status status = KV_OK;

	if (!json_is_object(root))
		status = refuse("top level", root, "an object", err);
	else
		status = merge_object(&next, root, err);
	if (status == KV_OK) {
		if (next.pools != options->pools) {
			json_incref(next.pools);
			json_decref(options->pools);
		}
		if (next.tenants != options->tenants) {
			json_incref(next.tenants);
			json_decref(options->tenants);
		}
		*options = next;
	} else {
		kv_error_wrap(err, "%.200s", source);
	}
	json_decref(root);
	return status;
}

void srv_address_host_port(const struct kv_io_address *address, char *out, size_t n_bytes_max)
{
	const bool needs_brackets = strchr(address->host, ':') && address->host[0] != '[';

	snprintf(out, n_bytes_max, needs_brackets ? "[%s]:%u" : "%s:%u", address->host, address->port);
}

void srv_address_text(const struct kv_io_address *address, char *out, size_t n_bytes_max)
{
	char host_port[300];

	if (address->transport == KV_IO_UNIX) {
		snprintf(out, n_bytes_max, "unix:%s", address->path);
		return;
	}
	srv_address_host_port(address, host_port, sizeof(host_port));
	snprintf(out, n_bytes_max, "tcp:%s", host_port);
}

static json_t *row_to_json(const struct srv_options *options, const struct srv_option_row *row)
{
	const char *value;
	size_t n_bytes;

	switch (row->kind) {
	case SRV_OPTION_NUMBER:
	case SRV_OPTION_BYTES:
		return json_integer((json_int_t)srv_option_number(options, row));
	case SRV_OPTION_TEXT:
		return json_string((const char *)options + row->offset);
	case SRV_OPTION_ENUM:
		if (!srv_option_enum_value(
			    row->values, (uint32_t)srv_option_number(options, row), &value, &n_bytes))
			return NULL;
		return json_stringn(value, n_bytes);
	case SRV_OPTION_FLAG:
		return json_boolean(srv_option_number(options, row) != 0);
	}
	return NULL;
}

json_t *srv_options_to_json(const struct srv_options *options)
{
	char text[320];
	json_t *root = json_object();
	json_t *listen = json_array();
	int failed = !root || !listen;

	for (size_t i = 0; i < SRV_N_OPTIONS && !failed; i++)
		failed = json_object_set_new(
			root, srv_option_rows[i].name, row_to_json(options, &srv_option_rows[i]));
	for (uint32_t i = 0; i < options->n_listen && !failed; i++) {
		srv_address_text(&options->listen[i], text, sizeof(text));
		failed = json_array_append_new(listen, json_string(text));
	}
	if (!failed)
		failed = json_object_set(root, "listen", listen);
	/* A deep copy: the answer shares no reference counts with what other threads read. */
	if (!failed)
		failed = json_object_set_new(root, "pools", json_deep_copy(options->pools));
	if (!failed)
		failed = json_object_set_new(root, "tenants", json_deep_copy(options->tenants));
	json_decref(listen);
	if (failed) {
		json_decref(root);
		return NULL;
	}
	return root;
}
