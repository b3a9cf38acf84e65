/*
 * The option table and everything that reads text into it: flags, environment, defaults, and the rules that
 * hold between options. The file is options_json.c.
 */
#include "server/options.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/checked.h"
#include "core/memory.h"
#include "server/auth.h"
#include "server/io_address.h"
#include "server/options_internal.h"

#define ROW_NUMBER(name, def, min, max, help) \
	{ #name, SRV_OPTION_NUMBER, offsetof(struct srv_options, name), NULL, def, min, max, NULL, help },
#define ROW_BYTES(name, def, min, max, help) \
	{ #name, SRV_OPTION_BYTES, offsetof(struct srv_options, name), NULL, def, min, max, NULL, help },
#define ROW_TEXT(name, def, help) \
	{ #name, SRV_OPTION_TEXT, offsetof(struct srv_options, name), def, 0, 0, 0, NULL, help },
#define ROW_ENUM(name, def, values, help) \
	{ #name, SRV_OPTION_ENUM, offsetof(struct srv_options, name), def, 0, 0, 0, values, help },
#define ROW_FLAG(name, help) \
	{ #name, SRV_OPTION_FLAG, offsetof(struct srv_options, name), NULL, 0, 0, 0, NULL, help },
const struct srv_option_row srv_option_rows[SRV_N_OPTIONS] = { SRV_OPTION_MAP(
	ROW_NUMBER, ROW_BYTES, ROW_TEXT, ROW_ENUM, ROW_FLAG) };

static const char *const default_listen[] = { "unix:/run/tqkv/tqkvd.sock", "tcp:127.0.0.1:7870" };

void srv_option_flag_name(const struct srv_option_row *row, char out[SRV_OPTION_NAME_BYTES_MAX])
{
	snprintf(out, SRV_OPTION_NAME_BYTES_MAX, "%s", row->name);
	for (char *c = out; *c; c++)
		if (*c == '_')
			*c = '-';
}

void srv_option_env_name(const struct srv_option_row *row, char out[SRV_OPTION_NAME_BYTES_MAX])
{
	snprintf(out, SRV_OPTION_NAME_BYTES_MAX, "TQKV_%s", row->name);
	for (char *c = out; *c; c++)
		*c = (char)toupper((unsigned char)*c);
}

bool srv_option_enum_value(const char *values, uint32_t idx, const char **text, size_t *n_bytes)
{
	for (uint32_t i = 0; i < idx; i++) {
		values = strchr(values, '|');
		if (!values)
			return false;
		values++;
	}
	*text = values;
	*n_bytes = strcspn(values, "|");
	return true;
}

void srv_option_bytes_text(uint64_t n_bytes, char out[32])
{
	static const char *const units[] = { "", " KiB", " MiB", " GiB", " TiB" };
	unsigned unit_idx = 0;

	while (n_bytes >= 1024 && n_bytes % 1024 == 0 && unit_idx < 4) {
		n_bytes /= 1024;
		unit_idx++;
	}
	snprintf(out, 32, "%llu%s", (unsigned long long)n_bytes, units[unit_idx]);
}

void srv_option_expected(const struct srv_option_row *row, char *out, size_t n_bytes_max)
{
	char min[32], max[32];

	switch (row->kind) {
	case SRV_OPTION_NUMBER:
		snprintf(out, n_bytes_max, "a whole number from %llu to %llu%s", (unsigned long long)row->min,
			(unsigned long long)row->max,
			row->offset == offsetof(struct srv_options, socket_mode) ? ", or octal: 0o660" : "");
		break;
	case SRV_OPTION_BYTES:
		srv_option_bytes_text(row->min, min);
		srv_option_bytes_text(row->max, max);
		snprintf(out, n_bytes_max,
			"a size from %s to %s, in bytes or followed by KiB, MiB, GiB or TiB", min, max);
		break;
	case SRV_OPTION_TEXT:
		snprintf(out, n_bytes_max, "a text of 1 to %u bytes of UTF-8", SRV_OPTION_TEXT_BYTES - 1);
		break;
	case SRV_OPTION_ENUM: {
		size_t used = (size_t)snprintf(out, n_bytes_max, "one of ");

		for (const char *c = row->values; *c && used + 3 < n_bytes_max; c++) {
			if (*c == '|') {
				out[used++] = ',';
				out[used++] = ' ';
			} else {
				out[used++] = *c;
			}
		}
		out[used] = '\0';
		break;
	}
	case SRV_OPTION_FLAG:
		snprintf(out, n_bytes_max, "true or false");
		break;
	}
}

bool srv_option_is_text(const char *text)
{
	json_t *string = json_string(text);

	json_decref(string);
	return string != NULL;
}

static enum kv_status refuse(
	const struct srv_option_row *row, const char *given, const char *source, struct kv_error *err)
{
	char expected[160];

	srv_option_expected(row, expected, sizeof(expected));
	return kv_fail(
		err, KV_BAD_CONFIG, "%s: '%.80s' is not accepted, expected %s", source, given, expected);
}

enum kv_status srv_option_set_number(struct srv_options *options, const struct srv_option_row *row,
	uint64_t number, const char *source, struct kv_error *err)
{
	char *field = (char *)options + row->offset;

	if (number < row->min || number > row->max) {
		char given[32];

		snprintf(given, sizeof(given), "%llu", (unsigned long long)number);
		return refuse(row, given, source, err);
	}
	if (row->kind == SRV_OPTION_BYTES) {
		memcpy(field, &number, sizeof(number));
	} else {
		const uint32_t narrow = (uint32_t)number;

		memcpy(field, &narrow, sizeof(narrow));
	}
	return KV_OK;
}

uint64_t srv_option_number(const struct srv_options *options, const struct srv_option_row *row)
{
	const char *field = (const char *)options + row->offset;

	if (row->kind == SRV_OPTION_BYTES) {
		uint64_t wide;

		memcpy(&wide, field, sizeof(wide));
		return wide;
	}
	if (row->kind == SRV_OPTION_FLAG) {
		bool is_on;

		memcpy(&is_on, field, sizeof(is_on));
		return is_on;
	}
	uint32_t narrow;

	memcpy(&narrow, field, sizeof(narrow));
	return narrow;
}

void srv_option_set_flag(struct srv_options *options, const struct srv_option_row *row, bool is_on)
{
	memcpy((char *)options + row->offset, &is_on, sizeof(is_on));
}

/*
 * Digits only: no sign, no blanks, and no leading zero, because "0440" would be read as octal by a person and
 * as decimal by us. *end is the first byte behind the digits.
 */
static bool read_number(const char *text, uint64_t *number, const char **end)
{
	uint64_t sum = 0;
	const char *c = text;

	if (*c == '0' && isdigit((unsigned char)c[1]))
		return false;
	for (; isdigit((unsigned char)*c); c++)
		if (!kv_mul_u64(sum, 10, &sum) || !kv_add_u64(sum, (uint64_t)(*c - '0'), &sum))
			return false;
	if (c == text)
		return false;
	*number = sum;
	*end = c;
	return true;
}

/* 0o660: a mode that nobody can take for a decimal number. */
static bool read_octal(const char *text, uint64_t *number)
{
	uint64_t sum = 0;
	size_t n = 0;

	if (strncmp(text, "0o", 2) != 0)
		return false;
	for (const char *c = text + 2; *c >= '0' && *c <= '7' && n < 8; c++, n++)
		sum = sum * 8 + (uint64_t)(*c - '0');
	*number = sum;
	return n > 0 && text[2 + n] == '\0';
}

bool srv_option_read_bytes(const char *text, uint64_t *n_bytes)
{
	static const struct {
		const char *suffix;
		uint64_t factor;
	} units[] = { { "", 1 }, { "KiB", 1024 }, { "MiB", 1048576 }, { "GiB", 1073741824 },
		{ "TiB", 1099511627776 } };
	uint64_t number;
	const char *end;

	if (!read_number(text, &number, &end))
		return false;
	for (size_t i = 0; i < KV_LENGTH(units); i++)
		if (strcmp(end, units[i].suffix) == 0)
			return kv_mul_u64(number, units[i].factor, n_bytes);
	return false;
}

static enum kv_status set_enum(struct srv_options *options, const struct srv_option_row *row,
	const char *text, const char *source, struct kv_error *err)
{
	const char *value;
	size_t n_bytes;

	for (uint32_t i = 0; srv_option_enum_value(row->values, i, &value, &n_bytes); i++) {
		if (strlen(text) == n_bytes && memcmp(text, value, n_bytes) == 0) {
			memcpy((char *)options + row->offset, &i, sizeof(i));
			return KV_OK;
		}
	}
	return refuse(row, text, source, err);
}

enum kv_status srv_option_set_text(struct srv_options *options, const struct srv_option_row *row,
	const char *text, const char *source, struct kv_error *err)
{
	uint64_t number;
	const char *end;

	switch (row->kind) {
	case SRV_OPTION_NUMBER:
		if (row->offset == offsetof(struct srv_options, socket_mode) && read_octal(text, &number))
			return srv_option_set_number(options, row, number, source, err);
		if (!read_number(text, &number, &end) || *end || number < row->min || number > row->max)
			return refuse(row, text, source, err);
		return srv_option_set_number(options, row, number, source, err);
	case SRV_OPTION_BYTES:
		if (!srv_option_read_bytes(text, &number) || number < row->min || number > row->max)
			return refuse(row, text, source, err);
		return srv_option_set_number(options, row, number, source, err);
	case SRV_OPTION_TEXT:
		if (text[0] == '\0' || strlen(text) >= SRV_OPTION_TEXT_BYTES || !srv_option_is_text(text))
			return refuse(row, text, source, err);
		strcpy((char *)options + row->offset, text);
		return KV_OK;
	case SRV_OPTION_ENUM:
		return set_enum(options, row, text, source, err);
	case SRV_OPTION_FLAG:
		if (strcmp(text, "true") != 0 && strcmp(text, "false") != 0)
			return refuse(row, text, source, err);
		srv_option_set_flag(options, row, text[0] == 't');
		return KV_OK;
	}
	return refuse(row, text, source, err);
}

enum kv_status srv_options_add_listen(
	struct srv_options *options, const char *text, const char *source, struct kv_error *err)
{
	struct kv_io_address address;

	if (options->n_listen == SRV_LISTEN_MAX)
		return kv_fail(err, KV_BAD_CONFIG,
			"%s: '%.80s' is one address too many, at most %u are allowed", source, text,
			SRV_LISTEN_MAX);
	if (!srv_option_is_text(text))
		return kv_fail(err, KV_BAD_CONFIG, "%s: the address is not UTF-8", source);
	memset(&address, 0, sizeof(address));
	const enum kv_status status = srv_io_address_parse(text, &address, err);

	if (status != KV_OK) {
		kv_error_wrap(err, "%s", source);
		return status;
	}
	options->listen[options->n_listen++] = address;
	return KV_OK;
}

enum kv_status srv_options_init(struct srv_options *options, struct kv_error *err)
{
	enum kv_status status = KV_OK;

	memset(options, 0, sizeof(*options));
	for (size_t i = 0; i < SRV_N_OPTIONS && status == KV_OK; i++) {
		const struct srv_option_row *row = &srv_option_rows[i];

		if (row->default_text)
			status = srv_option_set_text(options, row, row->default_text, row->name, err);
		else if (row->kind != SRV_OPTION_FLAG)
			status = srv_option_set_number(options, row, row->default_number, row->name, err);
	}
	for (size_t i = 0; i < KV_LENGTH(default_listen) && status == KV_OK; i++)
		status = srv_options_add_listen(options, default_listen[i], "listen", err);
	if (status == KV_OK) {
		options->pools = json_array();
		options->tenants = json_array();
		if (!options->pools || !options->tenants)
			status = kv_fail(err, KV_NO_MEMORY, "options: no memory");
	}
	if (status == KV_OK)
		status = srv_options_check(options, err);
	if (status != KV_OK)
		srv_options_finish(options);
	return status;
}

void srv_options_finish(struct srv_options *options)
{
	json_decref(options->pools);
	json_decref(options->tenants);
	memset(options, 0, sizeof(*options));
}

/* A size, or a share: out gets the size, or the share in percent and *is_share. */
static bool read_memory(const char *text, uint64_t *out, bool *is_share)
{
	const char *end;

	*is_share = false;
	if (!read_number(text, out, &end))
		return false;
	if (strcmp(end, "%") == 0) {
		*is_share = true;
		return *out >= 1 && *out <= 100;
	}
	return srv_option_read_bytes(text, out) && *out >= 4096;
}

enum kv_status srv_options_memory_bytes(
	const struct srv_options *options, uint64_t free_bytes, uint64_t *n_bytes, struct kv_error *err)
{
	uint64_t amount;
	bool is_share;

	if (!read_memory(options->memory, &amount, &is_share))
		return kv_fail(err, KV_BAD_CONFIG,
			"memory: '%s' is not accepted, expected a size of at least 4096 bytes (2GiB) or a "
			"share "
			"from 1%% to 100%% of what is free (80%%)",
			options->memory);
	if (is_share)
		amount = free_bytes / 100 * amount + free_bytes % 100 * amount / 100;
	amount -= amount % 4096;
	if (amount == 0)
		return kv_fail(err, KV_BAD_CONFIG,
			"memory: %s of %llu free bytes is less than one page of 4096 bytes", options->memory,
			(unsigned long long)free_bytes);
	*n_bytes = amount;
	return KV_OK;
}

static bool is_off(const char *text)
{
	return strcmp(text, "off") == 0;
}

static enum kv_status check_reach(const struct srv_options *options, const struct kv_io_address *address,
	bool is_authenticated, const char *option_name, struct kv_error *err)
{
	char text[300];

	if (options->insecure || is_authenticated || address->transport != KV_IO_TCP ||
		srv_io_address_is_loopback(address))
		return KV_OK;
	srv_address_host_port(address, text, sizeof(text));
	return kv_fail(err, KV_BAD_CONFIG,
		"%s: %s can be reached from other machines, and nothing authenticates those who connect. Use "
		"a loopback address (127.0.0.1) or a Unix socket, give a tokens_file, or say --insecure if "
		"every machine that reaches this address is trusted",
		option_name, text);
}

static enum kv_status check_http_address(
	const char *value, const char *option_name, struct kv_io_address *address, struct kv_error *err)
{
	char text[SRV_OPTION_TEXT_BYTES + 8];

	memset(address, 0, sizeof(*address));
	snprintf(text, sizeof(text), "tcp:%s", value);
	const enum kv_status status = srv_io_address_parse(text, address, err);

	if (status != KV_OK)
		kv_error_wrap(err, "%s: expected HOST:PORT or off", option_name);
	return status;
}

static enum kv_status check_http(const struct srv_options *options, struct kv_error *err)
{
	const bool has_client_ca = !is_off(options->http_client_ca_file);
	struct kv_io_address address;
	enum kv_status status = KV_OK;

	if (is_off(options->http_certificate_file) != is_off(options->http_key_file))
		return kv_fail(err, KV_BAD_CONFIG,
			"http_certificate_file and http_key_file: expected both or neither");
	if (has_client_ca && is_off(options->http_certificate_file))
		return kv_fail(err, KV_BAD_CONFIG,
			"http_client_ca_file: client certificates need http_certificate_file and "
			"http_key_file");
	if (!is_off(options->http)) {
		status = check_http_address(options->http, "http", &address, err);
		if (status == KV_OK)
			status = check_reach(options, &address,
				has_client_ca || !is_off(options->tokens_file), "http", err);
	}
	/* Reads only, and the operator named the address for exactly this: no login. */
	if (status == KV_OK && !is_off(options->metrics_listen))
		status = check_http_address(options->metrics_listen, "metrics_listen", &address, err);
	return status;
}

/* Options that would be without effect, or end the start later, when another one is not given with them. */
static enum kv_status check_pairs(const struct srv_options *options, struct kv_error *err)
{
	if (options->inflight_bytes_max < options->frame_bytes_max)
		return kv_fail(err, KV_BAD_CONFIG,
			"inflight_bytes_max: %llu is less than frame_bytes_max (%llu), so a frame of full "
			"size "
			"could never be accepted",
			(unsigned long long)options->inflight_bytes_max,
			(unsigned long long)options->frame_bytes_max);
	if (options->evict_low_percent > options->evict_high_percent)
		return kv_fail(err, KV_BAD_CONFIG,
			"evict_low_percent: %u is above evict_high_percent (%u%s), so no room would ever be "
			"made",
			options->evict_low_percent, options->evict_high_percent,
			options->evict_high_percent ? "" : ", which is off");
	if (options->snapshot_on_drain && is_off(options->snapshot_dir))
		return kv_fail(err, KV_BAD_CONFIG,
			"snapshot_on_drain: there is no snapshot_dir to keep the snapshot in");
	if (!is_off(options->restore) && is_off(options->snapshot_dir))
		return kv_fail(err, KV_BAD_CONFIG,
			"restore: there is no snapshot_dir to restore '%.80s' from", options->restore);
	return KV_OK;
}

/* The second one would be told that another process listens there. Port 0 is another port each time. */
static enum kv_status check_listen_once(const struct srv_options *options, struct kv_error *err)
{
	for (uint32_t i = 1; i < options->n_listen; i++) {
		const struct kv_io_address *one = &options->listen[i];

		for (uint32_t k = 0; k < i; k++) {
			const struct kv_io_address *other = &options->listen[k];

			if (one->transport != other->transport)
				continue;
			if (one->transport == KV_IO_UNIX && strcmp(one->path, other->path) == 0)
				return kv_fail(
					err, KV_BAD_CONFIG, "listen: unix:%s stands there twice", one->path);
			if (one->transport == KV_IO_TCP && one->port != 0 && one->port == other->port &&
				strcmp(one->host, other->host) == 0)
				return kv_fail(err, KV_BAD_CONFIG, "listen: tcp:%s:%u stands there twice",
					one->host, one->port);
		}
	}
	return KV_OK;
}

enum kv_status srv_options_check(struct srv_options *options, struct kv_error *err)
{
	uint64_t n_bytes;
	enum kv_status status = srv_options_memory_bytes(options, UINT64_MAX, &n_bytes, err);

	if (status != KV_OK)
		return status;
	if (options->n_listen == 0)
		return kv_fail(err, KV_BAD_CONFIG,
			"listen: the list is empty, expected at least one address "
			"(unix:PATH or tcp:HOST:PORT)");
	status = check_listen_once(options, err);
	for (uint32_t i = 0; i < options->n_listen && status == KV_OK; i++) {
		options->listen[i].socket_mode = options->socket_mode;
		status = check_reach(
			options, &options->listen[i], !is_off(options->tokens_file), "listen", err);
	}
	if (status == KV_OK && !srv_uids_are_valid(options->unix_uids))
		status = kv_fail(err, KV_BAD_CONFIG,
			"unix_uids: '%.80s' is not accepted, expected user ids with commas between, or any",
			options->unix_uids);
	if (status == KV_OK)
		status = check_http(options, err);
	return status == KV_OK ? check_pairs(options, err) : status;
}

void srv_options_wrap_pool(const struct srv_options *options, size_t idx, struct kv_error *err)
{
	if (options->are_pools_from_flags)
		kv_error_wrap(err, "--pool number %zu", idx + 1);
	else
		kv_error_wrap(err, "%s: pools[%zu]", options->config_path, idx);
}
