/*
 * The command line. It is walked twice: first for --config, --help and --version, then, after the file and
 * the environment, for everything else, so that a flag wins wherever it stands.
 */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/batch_run.h"
#include "core/checked.h"
#include "core/memory.h"
#include "core/row_kernels.h"
#include "server/options_internal.h"

/* Beside the table: 0..SRV_N_OPTIONS-1 are its rows. 256: above every character that getopt_long returns. */
#define CODE_FIRST 256
enum {
	CODE_LISTEN = CODE_FIRST + SRV_N_OPTIONS,
	CODE_POOL,
	CODE_CONFIG,
	CODE_CHECK,
	CODE_VERSION,
	CODE_HELP,
};

static const struct option other_longs[] = {
	{ "listen", required_argument, NULL, CODE_LISTEN },
	{ "pool", required_argument, NULL, CODE_POOL },
	{ "config", required_argument, NULL, CODE_CONFIG },
	{ "check-config", no_argument, NULL, CODE_CHECK },
	{ "version", no_argument, NULL, CODE_VERSION },
	{ "help", no_argument, NULL, CODE_HELP },
	{ NULL, 0, NULL, 0 },
};

struct cli {
	int argc;
	char **argv;
	char names[SRV_N_OPTIONS][SRV_OPTION_NAME_BYTES_MAX];
	struct option longs[SRV_N_OPTIONS + KV_LENGTH(other_longs)];
};

static void cli_init(struct cli *cli, int argc, char **argv)
{
	cli->argc = argc;
	cli->argv = argv;
	for (size_t i = 0; i < SRV_N_OPTIONS; i++) {
		const bool is_flag = srv_option_rows[i].kind == SRV_OPTION_FLAG;

		srv_option_flag_name(&srv_option_rows[i], cli->names[i]);
		cli->longs[i].name = cli->names[i];
		cli->longs[i].has_arg = is_flag ? optional_argument : required_argument;
		cli->longs[i].flag = NULL;
		cli->longs[i].val = CODE_FIRST + (int)i;
	}
	memcpy(cli->longs + SRV_N_OPTIONS, other_longs, sizeof(other_longs));
}

static enum kv_status refuse_unknown(const struct cli *cli, const char *given, struct kv_error *err)
{
	const size_t n_bytes = strcspn(given, "=");

	/* An abbreviation gets the full name told: short forms would change their meaning with every new
	 * option. */
	for (const struct option *option = cli->longs; option->name && n_bytes > 2; option++)
		if (strncmp(option->name, given + 2, n_bytes - 2) == 0)
			return kv_fail(err, KV_BAD_CONFIG,
				"%.*s: there is no such option; did you mean --%s?", (int)n_bytes, given,
				option->name);
	return kv_fail(err, KV_BAD_CONFIG, "%.80s: there is no such option; --help lists all of them", given);
}

/*
 * The next option: its code, or 0 behind the last. *value is its argument or NULL. Failure: not an option,
 * unknown, abbreviated, or without its argument.
 */
static enum kv_status cli_next(struct cli *cli, int *code, const char **value, struct kv_error *err)
{
	const int at = optind > 0 ? optind : 1; /* with "+" getopt reorders nothing */
	int long_idx = -1;
	const int got = getopt_long(cli->argc, cli->argv, "+:h", cli->longs, &long_idx);

	*code = 0;
	*value = NULL;
	if (got == -1) {
		if (optind < cli->argc)
			return kv_fail(err, KV_BAD_CONFIG,
				"'%.80s': not an option; all arguments are options that "
				"begin with --",
				cli->argv[optind]);
		return KV_OK;
	}
	const char *given = cli->argv[at];

	if (got == ':')
		return kv_fail(err, KV_BAD_CONFIG, "%.80s: its value is missing", given);
	if (got == '?') {
		if (optopt >= CODE_FIRST)
			return kv_fail(err, KV_BAD_CONFIG, "%.80s: this option takes no value", given);
		return refuse_unknown(cli, given, err);
	}
	if (got == 'h') {
		*code = CODE_HELP;
		return KV_OK;
	}
	const char *name = cli->longs[long_idx].name;
	const size_t n_bytes = strcspn(given, "=");

	if (n_bytes != strlen(name) + 2 || memcmp(given + 2, name, n_bytes - 2) != 0)
		return refuse_unknown(cli, given, err);
	*code = got;
	*value = optarg;
	return KV_OK;
}

/* First walk: what must be known before anything else is read. *outcome stays RUN unless help or version was
 * asked. */
static enum kv_status walk_first(
	struct srv_options *options, struct cli *cli, enum srv_options_outcome *outcome, struct kv_error *err)
{
	int code;
	const char *value;

	optind = 0; /* starts getopt over */
	opterr = 0;
	do {
		const enum kv_status status = cli_next(cli, &code, &value, err);

		if (status != KV_OK)
			return status;
		if (code == CODE_HELP)
			srv_options_print_help();
		if (code == CODE_VERSION)
			srv_options_print_version();
		if (code == CODE_HELP || code == CODE_VERSION) {
			*outcome = SRV_OPTIONS_EXIT_OK;
			return KV_OK;
		}
		if (code == CODE_CHECK)
			options->is_check_only = true;
		if (code != CODE_CONFIG)
			continue;
		if (!value[0])
			return kv_fail(err, KV_BAD_CONFIG, "--config: '' is no file");
		if (strlen(value) >= sizeof(options->config_path))
			return kv_fail(err, KV_BAD_CONFIG,
				"--config: the path has %zu bytes, at most %zu are allowed", strlen(value),
				sizeof(options->config_path) - 1);
		strcpy(options->config_path, value);
	} while (code != 0);
	return KV_OK;
}

static enum kv_status add_pool(struct srv_options *options, const char *text, struct kv_error *err)
{
	json_t *pool = NULL;
	const enum kv_status status = kv_pool_spec_parse_short(text, &pool, err);

	if (status != KV_OK) {
		kv_error_wrap(err, "--pool");
		return status;
	}
	if (json_array_append_new(options->pools, pool) != 0)
		return kv_fail(err, KV_NO_MEMORY, "--pool: no memory");
	return srv_options_check_pools(options->pools, err);
}

static enum kv_status apply_flag(
	struct srv_options *options, int code, const char *value, struct kv_error *err)
{
	char name[SRV_OPTION_NAME_BYTES_MAX], source[SRV_OPTION_NAME_BYTES_MAX + 2];

	if (code == CODE_LISTEN)
		return srv_options_add_listen(options, value, "--listen", err);
	if (code == CODE_POOL)
		return add_pool(options, value, err);
	if (code >= CODE_LISTEN)
		return KV_OK;
	const struct srv_option_row *row = &srv_option_rows[code - CODE_FIRST];

	srv_option_flag_name(row, name);
	snprintf(source, sizeof(source), "--%s", name);
	return srv_option_set_text(options, row, value ? value : "true", source, err);
}

/* Second walk. The first --listen and the first --pool end what the file or the defaults said. */
static enum kv_status walk_second(struct srv_options *options, struct cli *cli, struct kv_error *err)
{
	bool has_listen = false, has_pool = false;
	int code;
	const char *value;

	optind = 0;
	do {
		enum kv_status status = cli_next(cli, &code, &value, err);

		if (status != KV_OK || code == 0)
			return status;
		if (code == CODE_LISTEN && !has_listen) {
			options->n_listen = 0;
			has_listen = true;
		}
		if (code == CODE_POOL && !has_pool) {
			json_array_clear(options->pools);
			options->are_pools_from_flags = true;
			has_pool = true;
		}
		status = apply_flag(options, code, value, err);
		if (status != KV_OK)
			return status;
	} while (true);
}

/* core/row_kernels.h reads it where it is needed first; here a name that means nothing is found in time. */
static enum kv_status check_instruction_set(struct kv_error *err)
{
	const char *wanted = getenv("TQKV_INSTRUCTION_SET");
	const struct kv_row_kernels *kernels;
	char known[96] = "";
	size_t used = 0;

	if (!wanted || !*wanted)
		return KV_OK;
	for (uint32_t i = 0; (kernels = kv_row_kernels_at(i)); i++) {
		if (strcmp(wanted, kernels->name) == 0)
			return KV_OK;
		used += (size_t)snprintf(
			known + used, sizeof(known) - used, "%s%s", i ? ", " : "", kernels->name);
		KV_ASSERT(used < sizeof(known));
	}
	return kv_fail(err, KV_BAD_CONFIG,
		"environment TQKV_INSTRUCTION_SET: '%.40s' is not accepted, expected one of %s", wanted,
		known);
}

/* An empty variable counts as not set: compose files pass ${NAME:-} on. Unknown TQKV_ variables are not ours.
 */
static enum kv_status read_environment(struct srv_options *options, struct kv_error *err)
{
	char name[SRV_OPTION_NAME_BYTES_MAX], source[SRV_OPTION_NAME_BYTES_MAX + 16];

	for (size_t i = 0; i < SRV_N_OPTIONS; i++) {
		srv_option_env_name(&srv_option_rows[i], name);
		const char *value = getenv(name);

		if (!value || !*value)
			continue;
		snprintf(source, sizeof(source), "environment %s", name);
		const enum kv_status status =
			srv_option_set_text(options, &srv_option_rows[i], value, source, err);

		if (status != KV_OK)
			return status;
	}
	return KV_OK;
}

static enum kv_status read_file(
	struct srv_options *options, const struct kv_files *files, struct kv_error *err)
{
	char *text = NULL;
	uint64_t n_bytes = 0;

	if (!options->config_path[0])
		return KV_OK;
	enum kv_status status =
		files->read_all(options->config_path, SRV_CONFIG_BYTES_MAX, &text, &n_bytes, err);

	if (status != KV_OK) {
		kv_error_wrap(err, "--config");
		return status;
	}
	status = srv_options_merge_json(options, text, n_bytes, options->config_path, err);
	kv_free(text);
	return status;
}

/* Pools that cannot all lie in `memory`, whatever backend serves. A share of what is free is the machine's.
 */
static enum kv_status take_pages(const struct srv_options *options, const struct kv_pool_spec *spec,
	uint64_t *left_bytes, struct kv_error *err)
{
	uint64_t n_bytes = 0;

	if (strchr(options->memory, '%'))
		return KV_OK;
	if (!kv_batch_pages_bytes(spec, &n_bytes) || n_bytes > *left_bytes)
		return kv_fail(err, KV_BAD_CONFIG,
			"pool \"%s\" takes %llu bytes, of memory (%s) %llu are left for it", spec->name,
			(unsigned long long)n_bytes, options->memory, (unsigned long long)*left_bytes);
	*left_bytes -= n_bytes;
	return KV_OK;
}

void srv_options_tell_environment(const struct srv_options *options, struct kv_error *err)
{
	const size_t n_bytes = strcspn(err->msg, ":");
	char name[SRV_OPTION_NAME_BYTES_MAX];

	for (size_t i = 0; i < SRV_N_OPTIONS; i++) {
		const struct srv_option_row *row = &srv_option_rows[i];

		if (row->kind != SRV_OPTION_TEXT || strlen(row->name) != n_bytes ||
			memcmp(row->name, err->msg, n_bytes) != 0)
			continue;
		srv_option_env_name(row, name);
		const char *value = getenv(name);

		if (value && strcmp(value, (const char *)options + row->offset) == 0)
			kv_error_wrap(err, "environment %s", name);
		return;
	}
}

enum kv_status srv_options_try_pools(
	const struct srv_options *options, const struct kv_files *files, struct kv_error *err)
{
	size_t idx;
	json_t *pool;
	uint64_t left_bytes = 0;
	const enum kv_status known = srv_options_memory_bytes(options, UINT64_MAX, &left_bytes, err);

	if (known != KV_OK)
		return known;
	json_array_foreach (options->pools, idx, pool) {
		struct kv_pool_spec *spec = NULL;
		enum kv_status status = kv_pool_spec_create_with(pool, files, &spec, err);

		if (status == KV_OK) {
			status = take_pages(options, spec, &left_bytes, err);
			kv_pool_spec_destroy(spec);
		}
		if (status != KV_OK) {
			srv_options_wrap_pool(options, idx, err);
			return status;
		}
	}
	return KV_OK;
}

enum srv_options_outcome srv_options_parse(struct srv_options *options, int argc, char **argv,
	const struct kv_files *files, struct kv_error *err)
{
	struct cli cli;
	enum srv_options_outcome outcome = SRV_OPTIONS_RUN;
	enum kv_status status = srv_options_init(options, err);

	if (status != KV_OK)
		return SRV_OPTIONS_USAGE;
	cli_init(&cli, argc, argv);
	status = walk_first(options, &cli, &outcome, err);
	if (status == KV_OK && outcome == SRV_OPTIONS_EXIT_OK) {
		srv_options_finish(options);
		return outcome;
	}
	if (status == KV_OK)
		status = read_file(options, files, err);
	if (status == KV_OK)
		status = read_environment(options, err);
	if (status == KV_OK)
		status = check_instruction_set(err);
	if (status == KV_OK)
		status = walk_second(options, &cli, err);
	if (status == KV_OK) {
		status = srv_options_check(options, err);
		if (status != KV_OK)
			srv_options_tell_environment(options, err);
	}
	if (status == KV_OK && options->is_check_only)
		status = srv_options_try_pools(options, files, err);
	if (status != KV_OK) {
		srv_options_finish(options);
		return SRV_OPTIONS_USAGE;
	}
	return SRV_OPTIONS_RUN;
}
