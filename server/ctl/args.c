/*
 * Command line. Options may stand anywhere: the words that are none give the command (one or two words) and
 * then its operands. So a word is an option's value only when the option, global or the command's, takes one;
 * the command is found first, by walking over options known to any command.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/checked.h"
#include "server/ctl/ctl.h"
#include "server/ctl/http_client.h"

enum {
	GLOBAL_ADDR,
	GLOBAL_HTTP,
	GLOBAL_CA,
	GLOBAL_CERTIFICATE,
	GLOBAL_KEY,
	GLOBAL_TOKEN,
	GLOBAL_JSON,
	GLOBAL_TIMEOUT,
	GLOBAL_HELP,
	GLOBAL_VERSION,
	N_GLOBALS
};

static const struct srv_arg globals[N_GLOBALS] = {
	[GLOBAL_ADDR] = { .name = "addr",
		.kind = SRV_ARG_TEXT,
		.placeholder = "ADDRESS",
		.text = "unix:/run/tqkv/tqkvd.sock",
		.help = "data address, unix:PATH or tcp:HOST:PORT (environment: TQKV_ADDR)" },
	[GLOBAL_HTTP] = { .name = "http",
		.kind = SRV_ARG_TEXT,
		.placeholder = "HOST:PORT",
		.text = "127.0.0.1:7871",
		.help = "control address, https://HOST:PORT where the daemon has a certificate (environment: "
			"TQKV_HTTP)" },
	[GLOBAL_CA] = { .name = "http-ca-file",
		.kind = SRV_ARG_TEXT,
		.placeholder = "FILE",
		.help = "certificates (PEM) that the daemon's one must come from; not given: those that the "
			"system trusts (environment: TQKV_HTTP_CA_FILE)" },
	[GLOBAL_CERTIFICATE] = { .name = "http-certificate-file",
		.kind = SRV_ARG_TEXT,
		.placeholder = "FILE",
		.help = "certificate (PEM) to show to a daemon that asks for one (environment: "
			"TQKV_HTTP_CERTIFICATE_FILE)" },
	[GLOBAL_KEY] = { .name = "http-key-file",
		.kind = SRV_ARG_TEXT,
		.placeholder = "FILE",
		.help = "its key (environment: TQKV_HTTP_KEY_FILE)" },
	[GLOBAL_TOKEN] = { .name = "token-file",
		.kind = SRV_ARG_TEXT,
		.placeholder = "FILE",
		.text = "",
		.help = "file whose first line is the token (or in the environment: TQKV_TOKEN)" },
	[GLOBAL_JSON] = { .name = "json", .kind = SRV_ARG_FLAG, .help = "print JSON" },
	[GLOBAL_TIMEOUT] = { .name = "timeout-ms",
		.kind = SRV_ARG_NUMBER,
		.placeholder = "MS",
		.number = 10000,
		.min = 1,
		.max = 3600000,
		.help = "give up when one answer takes longer" },
	[GLOBAL_HELP] = { .name = "help", .letter = 'h', .kind = SRV_ARG_FLAG, .help = "explain and exit" },
	[GLOBAL_VERSION] = { .name = "version", .kind = SRV_ARG_FLAG, .help = "print the version and exit" },
};

/* "help" and the words of a command. */
#define WORDS_MAX 3u

struct parser {
	struct srv_ctl *ctl;
	const struct srv_command *const *commands;
	uint32_t n_commands;
	struct srv_arg_value globals[N_GLOBALS];
	struct kv_error *err;
};

static const struct srv_arg *find_arg(const struct srv_arg *args, uint32_t n_args, const char *name,
	size_t name_bytes, bool is_long, uint32_t *idx)
{
	for (uint32_t i = 0; i < n_args; i++) {
		const bool is_name = is_long
			? strlen(args[i].name) == name_bytes && memcmp(args[i].name, name, name_bytes) == 0
			: args[i].letter != 0 && args[i].letter == name[0];

		if (!is_name)
			continue;
		*idx = i;
		return &args[i];
	}
	return NULL;
}

static bool is_option(const char *word)
{
	return word[0] == '-' && word[1] != '\0';
}

/* Parts of "--name=value", "--name", "-n", "-nvalue". */
struct option_word {
	bool is_long;
	const char *name;
	size_t name_bytes;
	const char *value; /* NULL: not in this word */
};

static struct option_word split_option(const char *word)
{
	struct option_word option = { .is_long = word[1] == '-' };

	option.name = word + (option.is_long ? 2 : 1);
	if (option.is_long) {
		option.name_bytes = strcspn(option.name, "=");
		if (option.name[option.name_bytes] == '=')
			option.value = option.name + option.name_bytes + 1;
	} else {
		option.name_bytes = 1;
		if (option.name[1] != '\0')
			option.value = option.name + 1;
	}
	return option;
}

/* Whether the next word belongs to this option. Names mean the same kind in every command, so any match will
 * do. */
static bool takes_next_word(const struct parser *parser, const struct option_word *option)
{
	uint32_t idx;
	const struct srv_arg *arg =
		find_arg(globals, N_GLOBALS, option->name, option->name_bytes, option->is_long, &idx);

	for (uint32_t i = 0; !arg && i < parser->n_commands; i++)
		arg = find_arg(parser->commands[i]->args, parser->commands[i]->n_args, option->name,
			option->name_bytes, option->is_long, &idx);
	return arg && arg->kind != SRV_ARG_FLAG && !option->value;
}

/* The first words that are no options; NULL where there are fewer. */
static void find_words(
	const struct parser *parser, int argc, char **argv, const char *words[static WORDS_MAX])
{
	uint32_t n_words = 0;

	memset(words, 0, WORDS_MAX * sizeof(words[0]));
	for (int i = 1; i < argc && n_words < WORDS_MAX; i++) {
		if (strcmp(argv[i], "--") == 0)
			return;
		if (!is_option(argv[i])) {
			words[n_words++] = argv[i];
			continue;
		}
		const struct option_word option = split_option(argv[i]);

		i += takes_next_word(parser, &option);
	}
}

/* Words of a command's name that the line's words match: 1, 2, or 0 for another command. */
static uint32_t match_name(const char *name, const char *const *words)
{
	const size_t first_bytes = strcspn(name, " ");

	if (!words[0] || strlen(words[0]) != first_bytes || memcmp(name, words[0], first_bytes) != 0)
		return 0;
	if (name[first_bytes] == '\0')
		return 1;
	return words[1] && strcmp(name + first_bytes + 1, words[1]) == 0 ? 2 : 0;
}

/* Whether the line asks for help with an option. */
static bool asks_help(int argc, char **argv)
{
	for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++)
		if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0)
			return true;
	return false;
}

/* Words that begin names of commands and are none: "'bench echo', 'bench step'" goes to `known`. */
static bool list_group(const struct parser *parser, const char *word, char *known, size_t known_bytes)
{
	size_t used = 0;

	for (uint32_t i = 0; i < parser->n_commands && used < known_bytes; i++) {
		const char *name = parser->commands[i]->name;
		const size_t first_bytes = strcspn(name, " ");

		if (strlen(word) == first_bytes && memcmp(name, word, first_bytes) == 0)
			used += (size_t)snprintf(
				known + used, known_bytes - used, "%s'%s'", used == 0 ? "" : ", ", name);
	}
	return used > 0;
}

static enum kv_status find_command(struct parser *parser, int argc, char **argv, uint32_t *n_name_words)
{
	const char *all_words[WORDS_MAX], **words = all_words;
	char known[160] = "";

	find_words(parser, argc, argv, all_words);
	*n_name_words = 0;
	if (words[0] && strcmp(words[0], "help") == 0) {
		parser->ctl->is_help = true;
		*n_name_words = 1;
		words++;
	}
	if (!words[0])
		return KV_OK;
	for (uint32_t i = 0; i < parser->n_commands; i++) {
		const uint32_t n_words = match_name(parser->commands[i]->name, words);

		if (n_words > 0) {
			parser->ctl->command = parser->commands[i];
			*n_name_words += n_words;
			return KV_OK;
		}
	}
	if (!list_group(parser, words[0], known, sizeof(known)))
		return kv_fail(parser->err, SRV_CTL_USAGE,
			"unknown command '%.40s'; 'tqkvctl --help' lists the commands", words[0]);
	if ((!parser->ctl->is_help && !asks_help(argc, argv)) ||
		(words + 1 < all_words + WORDS_MAX && words[1]))
		return kv_fail(parser->err, SRV_CTL_USAGE,
			"'%.40s' needs one of: %s; see 'tqkvctl %.40s --help'", words[0], known, words[0]);
	parser->ctl->group = words[0];
	*n_name_words += 1;
	return KV_OK;
}

/* Digits, then for BYTES a unit. False when it is none of this or above 64 bits. */
static bool parse_number(const char *text, bool has_unit, uint64_t *out)
{
	static const struct {
		const char *name;
		uint64_t factor;
	} units[] = { { "", 1 }, { "KiB", 1u << 10 }, { "MiB", 1u << 20 }, { "GiB", 1u << 30 } };
	char *end;

	if (text[0] < '0' || text[0] > '9')
		return false;
	errno = 0;
	const unsigned long long value = strtoull(text, &end, 10);

	if (errno != 0)
		return false;
	for (uint32_t i = 0; i < (has_unit ? KV_LENGTH(units) : 1u); i++)
		if (strcmp(end, units[i].name) == 0)
			return kv_mul_u64(value, units[i].factor, out);
	return false;
}

static enum kv_status set_value(
	const struct srv_arg *arg, struct srv_arg_value *value, const char *text, struct kv_error *err)
{
	value->is_given = true;
	if (arg->kind == SRV_ARG_FLAG)
		return KV_OK;
	value->text = text;
	if (arg->kind == SRV_ARG_TEXT)
		return KV_OK;

	uint64_t number;

	if (!parse_number(text, arg->kind == SRV_ARG_BYTES, &number) || number < arg->min ||
		number > arg->max)
		return kv_fail(err, SRV_CTL_USAGE, "--%s: '%.40s' is not a number of %llu to %llu%s",
			arg->name, text, (unsigned long long)arg->min, (unsigned long long)arg->max,
			arg->kind == SRV_ARG_BYTES ? " bytes, KiB, MiB or GiB, like 512MiB" : "");
	value->number = number;
	return KV_OK;
}

static enum kv_status parse_option(struct parser *parser, int argc, char **argv, int *i)
{
	const struct srv_command *command = parser->ctl->command;
	const struct option_word option = split_option(argv[*i]);
	struct srv_arg_value *value;
	const char *text = option.value;
	uint32_t idx = 0;
	const struct srv_arg *arg =
		find_arg(globals, N_GLOBALS, option.name, option.name_bytes, option.is_long, &idx);

	value = arg ? &parser->globals[idx] : NULL;
	if (!arg && command) {
		arg = find_arg(
			command->args, command->n_args, option.name, option.name_bytes, option.is_long, &idx);
		value = &parser->ctl->values[idx];
	}
	if (!arg)
		return kv_fail(parser->err, SRV_CTL_USAGE,
			"unknown option '%.60s'; 'tqkvctl %s%s--help' lists the options", argv[*i],
			command ? command->name : "", command ? " " : "");
	if (arg->kind == SRV_ARG_FLAG && text)
		return kv_fail(parser->err, SRV_CTL_USAGE, "option '%.60s' takes no value", argv[*i]);
	if (arg->kind != SRV_ARG_FLAG && !text) {
		if (*i + 1 == argc)
			return kv_fail(parser->err, SRV_CTL_USAGE, "option '%s' needs a value: %s", argv[*i],
				arg->placeholder);
		text = argv[++*i];
	}
	return set_value(arg, value, text, parser->err);
}

static enum kv_status take_operand(struct parser *parser, const char *word)
{
	struct srv_ctl *ctl = parser->ctl;

	if (ctl->n_operands == ctl->command->n_operands_max)
		return kv_fail(parser->err, SRV_CTL_USAGE,
			"'%.60s' is one argument too many; see 'tqkvctl %s --help'", word,
			ctl->command->name);
	ctl->operands[ctl->n_operands++] = word;
	return KV_OK;
}

static void set_defaults(struct parser *parser)
{
	struct srv_ctl *ctl = parser->ctl;
	static const char *const environment[N_GLOBALS] = {
		[GLOBAL_ADDR] = "TQKV_ADDR",
		[GLOBAL_HTTP] = "TQKV_HTTP",
		[GLOBAL_CA] = "TQKV_HTTP_CA_FILE",
		[GLOBAL_CERTIFICATE] = "TQKV_HTTP_CERTIFICATE_FILE",
		[GLOBAL_KEY] = "TQKV_HTTP_KEY_FILE",
	};

	for (uint32_t i = 0; i < N_GLOBALS; i++)
		parser->globals[i] =
			(struct srv_arg_value){ .number = globals[i].number, .text = globals[i].text };
	for (uint32_t i = 0; i < N_GLOBALS; i++) {
		const char *text = environment[i] ? getenv(environment[i]) : NULL;

		if (text && text[0] != '\0')
			parser->globals[i].text = text;
	}
	for (uint32_t i = 0; ctl->command && i < ctl->command->n_args; i++)
		ctl->values[i] = (struct srv_arg_value){ .number = ctl->command->args[i].number,
			.text = ctl->command->args[i].text };
}

enum kv_status srv_ctl_parse(struct srv_ctl *ctl, const struct srv_command *const commands[],
	uint32_t n_commands, int argc, char **argv, struct kv_error *err)
{
	struct parser parser = { .ctl = ctl, .commands = commands, .n_commands = n_commands, .err = err };
	uint32_t n_name_words;
	bool is_all_operands = false;

	*ctl = (struct srv_ctl){ 0 };
	enum kv_status status = find_command(&parser, argc, argv, &n_name_words);

	if (status != KV_OK)
		return status;
	set_defaults(&parser);
	for (int i = 1; i < argc; i++) {
		if (!is_all_operands && strcmp(argv[i], "--") == 0)
			is_all_operands = true;
		else if (!is_all_operands && is_option(argv[i]))
			status = parse_option(&parser, argc, argv, &i);
		else if (n_name_words > 0)
			n_name_words--;
		else if (ctl->command)
			status = take_operand(&parser, argv[i]);
		else
			status = kv_fail(err, SRV_CTL_USAGE,
				"no command before '%.60s'; see 'tqkvctl --help'", argv[i]);
		if (status != KV_OK)
			return status;
	}
	ctl->addr = parser.globals[GLOBAL_ADDR].text;
	ctl->http = parser.globals[GLOBAL_HTTP].text;
	if (!srv_http_address_is_valid(ctl->http))
		return kv_fail(err, SRV_CTL_USAGE,
			"--http: '%.60s' is not HOST:PORT or https://HOST:PORT with a port from 1 to 65535",
			ctl->http);
	ctl->trust = (struct srv_tls_trust){ .ca_file = parser.globals[GLOBAL_CA].text,
		.certificate_file = parser.globals[GLOBAL_CERTIFICATE].text,
		.key_file = parser.globals[GLOBAL_KEY].text };
	ctl->token_file = parser.globals[GLOBAL_TOKEN].text;
	ctl->is_json = parser.globals[GLOBAL_JSON].is_given;
	ctl->timeout_ms = (uint32_t)parser.globals[GLOBAL_TIMEOUT].number;
	ctl->is_help = ctl->is_help || parser.globals[GLOBAL_HELP].is_given;
	ctl->is_version = parser.globals[GLOBAL_VERSION].is_given;
	if (ctl->is_help || ctl->is_version)
		return KV_OK;
	if (!ctl->command)
		return kv_fail(err, SRV_CTL_USAGE, "no command given; 'tqkvctl --help' lists the commands");
	if (ctl->n_operands < ctl->command->n_operands_min)
		return kv_fail(err, SRV_CTL_USAGE, "%s is missing; see 'tqkvctl %s --help'",
			ctl->command->operands, ctl->command->name);
	return KV_OK;
}

const struct srv_arg *srv_ctl_globals(uint32_t *n_args)
{
	*n_args = N_GLOBALS;
	return globals;
}
