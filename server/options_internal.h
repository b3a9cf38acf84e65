/*
 * The option table as data, and what options.c, options_json.c and options_help.c share. Only they (and their
 * tests) include this.
 */
#ifndef SERVER_OPTIONS_INTERNAL_H
#define SERVER_OPTIONS_INTERNAL_H

#include <stddef.h>

#include "server/options.h"

enum srv_option_kind {
	SRV_OPTION_NUMBER,
	SRV_OPTION_BYTES,
	SRV_OPTION_TEXT,
	SRV_OPTION_ENUM,
	SRV_OPTION_FLAG,
};

/* One name per row of SRV_OPTION_MAP, in its order: SRV_OPTION_IDX_http, ... */
enum srv_option_idx {
#define SRV_OPTION_IDX_NUMBER(name, def, min, max, help) SRV_OPTION_IDX_##name,
#define SRV_OPTION_IDX_TEXT(name, def, help)             SRV_OPTION_IDX_##name,
#define SRV_OPTION_IDX_ENUM(name, def, values, help)     SRV_OPTION_IDX_##name,
#define SRV_OPTION_IDX_FLAG(name, help)                  SRV_OPTION_IDX_##name,
	SRV_OPTION_MAP(SRV_OPTION_IDX_NUMBER, SRV_OPTION_IDX_NUMBER, SRV_OPTION_IDX_TEXT, SRV_OPTION_IDX_ENUM,
		SRV_OPTION_IDX_FLAG)
#undef SRV_OPTION_IDX_NUMBER
#undef SRV_OPTION_IDX_TEXT
#undef SRV_OPTION_IDX_ENUM
#undef SRV_OPTION_IDX_FLAG
		SRV_N_OPTIONS
};

struct srv_option_row {
	const char *name; /* "frame_bytes_max" */
	enum srv_option_kind kind;
	size_t offset;                     /* in struct srv_options */
	const char *default_text;          /* TEXT, ENUM */
	uint64_t default_number, min, max; /* NUMBER, BYTES */
	const char *values;                /* ENUM: "a|b|c" */
	const char *help;
};
extern const struct srv_option_row srv_option_rows[SRV_N_OPTIONS];

/* Longest option name plus "TQKV_" or "--" and the end. */
#define SRV_OPTION_NAME_BYTES_MAX 48u
#define SRV_OPTION_TEXT_BYTES     256u
#define SRV_CONFIG_BYTES_MAX      1048576u

/* "frame-bytes-max"; "TQKV_FRAME_BYTES_MAX". */
void srv_option_flag_name(const struct srv_option_row *row, char out[SRV_OPTION_NAME_BYTES_MAX]);
void srv_option_env_name(const struct srv_option_row *row, char out[SRV_OPTION_NAME_BYTES_MAX]);
/* The idx-th of "a|b|c"; false behind the last. */
bool srv_option_enum_value(const char *values, uint32_t idx, const char **text, size_t *n_bytes);
/* "a size from 64 KiB to 16 MiB ...": what this option takes, for messages. */
void srv_option_expected(const struct srv_option_row *row, char *out, size_t n_bytes_max);
/* "4096", "2GiB"; false: it is no size. */
bool srv_option_read_bytes(const char *text, uint64_t *n_bytes);
/* "1 MiB", "65537": the shortest exact text. */
void srv_option_bytes_text(uint64_t n_bytes, char out[32]);

/* Set one option; BAD_CONFIG says `source` (where it was given), what was given and what was expected. */
KV_MUST_CHECK enum kv_status srv_option_set_number(struct srv_options *options,
	const struct srv_option_row *row, uint64_t number, const char *source, struct kv_error *err);
KV_MUST_CHECK enum kv_status srv_option_set_text(struct srv_options *options,
	const struct srv_option_row *row, const char *text, const char *source, struct kv_error *err);
void srv_option_set_flag(struct srv_options *options, const struct srv_option_row *row, bool is_on);
uint64_t srv_option_number(const struct srv_options *options, const struct srv_option_row *row);

/* False: not UTF-8, so that neither JSON nor a log line could show it. */
bool srv_option_is_text(const char *text);
KV_MUST_CHECK enum kv_status srv_options_check_pools(const json_t *pools, struct kv_error *err);
/* Makes every pool specification once, so that nothing but the machine is left to fail at a start. */
KV_MUST_CHECK enum kv_status srv_options_try_pools(
	const struct srv_options *options, const struct kv_files *files, struct kv_error *err);
KV_MUST_CHECK enum kv_status srv_options_add_listen(
	struct srv_options *options, const char *text, const char *source, struct kv_error *err);
/*
 * What only the whole can tell: an address beyond loopback without `insecure`, limits that contradict each
 * other, the text of `memory`. Also copies socket_mode into the listen addresses.
 */
KV_MUST_CHECK enum kv_status srv_options_check(struct srv_options *options, struct kv_error *err);

/* "HOST:PORT" of a TCP address, "unix:PATH" or "tcp:HOST:PORT" of any. */
void srv_address_host_port(const struct kv_io_address *address, char *out, size_t n_bytes_max);
void srv_address_text(const struct kv_io_address *address, char *out, size_t n_bytes_max);

/* options_help.c: stdout. */
void srv_options_print_help(void);
void srv_options_print_version(void);

#endif
