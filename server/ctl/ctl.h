/*
 * Control program: what every command of tqkvctl is made of.
 *
 * A command is a row of a table: name, operands, options as data, and a function. The table drives parsing,
 * --help and the list of commands. A command prints its result to standard output (JSON with --json) and
 * returns a status; main() prints the one sentence of a failure to standard error and turns the status into
 * an exit code: 0 done, 1 failed, 2 the command line is wrong. One thread.
 */
#ifndef SERVER_CTL_CTL_H
#define SERVER_CTL_CTL_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "core/error.h"
#include "server/ctl/tls.h"

#define SRV_ARGS_MAX     20u
#define SRV_OPERANDS_MAX 2u

/* What a command returns when its command line is wrong: exit code 2. Statuses of the daemon never are this
 * one. */
#define SRV_CTL_USAGE KV_BAD_CONFIG

enum srv_arg_kind {
	SRV_ARG_FLAG,
	SRV_ARG_NUMBER,
	SRV_ARG_BYTES, /* a number, perhaps with KiB, MiB or GiB */
	SRV_ARG_TEXT,
};

struct srv_arg {
	const char *name; /* without dashes */
	char letter;      /* short form, or 0 */
	enum srv_arg_kind kind;
	const char *placeholder;
	const char *help;
	uint64_t number, min, max; /* default and range */
	const char *text;          /* default of TEXT; NULL: none */
};
/* --k and --v of commands that make a pool of their own. */
#define SRV_ARG_FORMAT(idx, option, side) \
	[idx] = { .name = (option),       \
		.kind = SRV_ARG_TEXT,     \
		.placeholder = "FORMAT",  \
		.text = "tq4",            \
		.help = "row format of " side }
/* Geometry of commands that need no daemon; limits of core/pool_spec.h and core/format.h. */
#define SRV_ARG_KV_HEADS(idx)           \
	[idx] = { .name = "kv-heads",   \
		.kind = SRV_ARG_NUMBER, \
		.placeholder = "N",     \
		.number = 8,            \
		.min = 1,               \
		.max = KV_HEADS_MAX,    \
		.help = "KV heads of a layer" }
#define SRV_ARG_HEAD_DIM(idx)           \
	[idx] = { .name = "head-dim",   \
		.kind = SRV_ARG_NUMBER, \
		.placeholder = "D",     \
		.number = 128,          \
		.min = KV_HEAD_DIM_MIN, \
		.max = KV_HEAD_DIM_MAX, \
		.help = "numbers of a row" }

struct srv_arg_value {
	bool is_given;
	uint64_t number;
	const char *text;
};

struct srv_ctl;

struct srv_command {
	const char *name;     /* one or two words */
	const char *operands; /* "FILE", "[ID]" or NULL */
	uint32_t n_operands_min, n_operands_max;
	const char *summary; /* one line */
	const char *details; /* more lines for --help, or NULL */
	const struct srv_arg *args;
	uint32_t n_args;
	enum kv_status (*run)(struct srv_ctl *ctl, struct kv_error *err);
};

struct srv_ctl {
	const struct srv_command *command;
	const char *group; /* the first word of several commands, of which help is wanted */
	const char *addr, *http;
	const char *token_file; /* "" = none */
	struct srv_tls_trust trust;
	char token[513]; /* main.c: from the file, or from the environment; "" = none */
	uint32_t timeout_ms;
	bool is_json;
	bool is_help, is_version;                  /* print that and nothing else */
	struct srv_arg_value values[SRV_ARGS_MAX]; /* in the order of command->args */
	const char *operands[SRV_OPERANDS_MAX];
	uint32_t n_operands;
};

/* ---- token.c ---- */
/* Fills ctl->token: the first line of ctl->token_file, else the environment's TQKV_TOKEN, else nothing. */
KV_MUST_CHECK enum kv_status srv_ctl_read_token(struct srv_ctl *ctl, struct kv_error *err);

/* ---- args.c ---- */
/*
 * Options before, between and behind the words of the command. On OK ctl->command is set, or NULL when the
 * line asks only for help. USAGE: err says what is wrong with which argument. Texts point into argv and the
 * environment.
 */
KV_MUST_CHECK enum kv_status srv_ctl_parse(struct srv_ctl *ctl, const struct srv_command *const commands[],
	uint32_t n_commands, int argc, char **argv, struct kv_error *err);
/* The options that all commands have. */
const struct srv_arg *srv_ctl_globals(uint32_t *n_args);

/* ---- help.c ---- */
/* The list of commands, all or those that begin with a word; or one command's help. */
void srv_ctl_print_help(const struct srv_command *const commands[], uint32_t n_commands, const char *group);
void srv_ctl_print_command_help(
	const struct srv_command *const commands[], uint32_t n_commands, const struct srv_command *command);

/* ---- api.c: the control API ---- */
/*
 * One request. A 2xx reply's JSON goes to *json (NULL allowed; json_decref() it; an empty body gives JSON
 * null), any other code is a failure whose text is the daemon's error. `body` NULL: none.
 */
KV_MUST_CHECK enum kv_status srv_ctl_api(const struct srv_ctl *ctl, const char *method, const char *path,
	const json_t *body, json_t **json, struct kv_error *err);
/* GET of a text; kv_free() it. Zero-terminated. */
KV_MUST_CHECK enum kv_status srv_ctl_api_text(
	const struct srv_ctl *ctl, const char *path, char **text, struct kv_error *err);
/* GET of a list that comes in pages: the members of all pages' array `key`, in one array. */
KV_MUST_CHECK enum kv_status srv_ctl_api_list(
	const struct srv_ctl *ctl, const char *path, const char *key, json_t **list, struct kv_error *err);
/* 16 hex digits of a session, from those or from its name. USAGE: none is called so; BAD_ARG: several are. */
#define SRV_CTL_SESSION_CHARS 16u
KV_MUST_CHECK enum kv_status srv_ctl_session_id(const struct srv_ctl *ctl, const char *operand,
	char id[SRV_CTL_SESSION_CHARS + 1], struct kv_error *err);
/*
 * DELETE of path/name, and "{}" with --json. USAGE: the name has characters that no such name has, so that it
 * cannot be another path.
 */
#define SRV_CTL_HEX_CHARS      "0123456789abcdefABCDEF"
#define SRV_CTL_SNAPSHOT_CHARS "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ._-"
#define SRV_CTL_POOL_CHARS     SRV_CTL_SNAPSHOT_CHARS ":"
KV_MUST_CHECK enum kv_status srv_ctl_delete(const struct srv_ctl *ctl, const char *path, const char *name,
	const char *chars, struct kv_error *err);
/* Numbers of a reply: 0 when the member is missing or no number. `path` is one name or names with dots. */
uint64_t srv_json_u64(const json_t *json, const char *path);
double srv_json_real(const json_t *json, const char *path);
/* "-" when the member is missing or no text. */
const char *srv_json_text(const json_t *json, const char *path);
void srv_ctl_print_json(const json_t *json);

/* ---- interrupt.c ---- */
/* From now on SIGINT and SIGTERM only set a mark; a second one ends the process as usual. */
void srv_interrupt_catch(void);
bool srv_interrupt_seen(void);

extern const struct srv_command srv_cmd_ping, srv_cmd_info, srv_cmd_occupancy, srv_cmd_sessions,
	srv_cmd_prefixes, srv_cmd_replay, srv_cmd_bench_cpu, srv_cmd_bench_echo, srv_cmd_bench_step,
	srv_cmd_capture_inspect, srv_cmd_calibrate, srv_cmd_presets, srv_cmd_codec_info, srv_cmd_codec_encode,
	srv_cmd_codec_decode, srv_cmd_codec_rotation, srv_cmd_codec_codebook, srv_cmd_codec_compare,
	srv_cmd_ready, srv_cmd_top, srv_cmd_plan, srv_cmd_snapshot, srv_cmd_restore, srv_cmd_attention,
	srv_cmd_bench_ingest, srv_cmd_bench_kernels, srv_cmd_tenants, srv_cmd_tenants_set,
	srv_cmd_tenants_clear, srv_cmd_pools, srv_cmd_pools_create, srv_cmd_pools_delete,
	srv_cmd_sessions_close, srv_cmd_prefixes_delete, srv_cmd_connections, srv_cmd_snapshots,
	srv_cmd_snapshots_delete, srv_cmd_reload, srv_cmd_drain, srv_cmd_log_level, srv_cmd_audit,
	srv_cmd_self_test;

#endif
