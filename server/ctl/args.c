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
		.help = "control address (environment: TQKV_HTTP)" },
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

/* The first two words that are no options; NULL where there are fewer. */
static void find_words(const struct parser *parser, int argc, char **argv, const char *words[static 2])
{
	uint32_t n_words = 0;

	words[0] = words[1] = NULL;
	for (int i = 1; i < argc && n_words < 2; i++) {
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
static uint32_t match_name(const char *name, const char *const words[static 2])
{
	const size_t first_bytes = strcspn(name, " ");

	if (!words[0] || strlen(words[0]) != first_bytes || memcmp(name, words[0], first_bytes) != 0)
		return 0;
	if (name[first_bytes] == '\0')
		return 1;
	return words[1] && strcmp(name + first_bytes + 1, words[1]) == 0 ? 2 : 0;
}

static enum kv_status find_command(struct parser *parser, int argc, char **argv, uint32_t *n_name_words)
{
	const char *words[2];
	char known[160] = "";

	find_words(parser, argc, argv, words);
	*n_name_words = 0;
	if (!words[0])
		return KV_OK;
	for (uint32_t i = 0; i < parser->n_commands; i++) {
		const char *name = parser->commands[i]->name;
		const size_t first_bytes = strcspn(name, " ");

		*n_name_words = match_name(name, words);
		if (*n_name_words > 0) {
			parser->ctl->command = parser->commands[i];
			return KV_OK;
		}
		if (strlen(words[0]) == first_bytes && memcmp(name, words[0], first_bytes) == 0) {
			const size_t used = strlen(known);

			snprintf(known + used, sizeof(known) - used, "%s'%s'", used == 0 ? "" : ", ", name);
		}
	}
	if (known[0] != '\0')
		return kv_fail(parser->err, SRV_CTL_USAGE, "'%.40s' needs one of: %s; see 'tqkvctl --help'",
			words[0], known);
	return kv_fail(parser->err, SRV_CTL_USAGE,
		"unknown command '%.40s'; 'tqkvctl --help' lists the commands", words[0]);
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
		return kv_fail(err, SRV_CTL_USAGE, "--%s: '%.40s' is not a number of %llu to %llu", arg->name,
			text, (unsigned long long)arg->min, (unsigned long long)arg->max);
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
	const char *addr = getenv("TQKV_ADDR"), *http = getenv("TQKV_HTTP");

	for (uint32_t i = 0; i < N_GLOBALS; i++)
		parser->globals[i] =
			(struct srv_arg_value){ .number = globals[i].number, .text = globals[i].text };
	if (addr && addr[0] != '\0')
		parser->globals[GLOBAL_ADDR].text = addr;
	if (http && http[0] != '\0')
		parser->globals[GLOBAL_HTTP].text = http;
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
			"--http: '%.60s' is not HOST:PORT with a port from 1 to 65535", ctl->http);
	ctl->token_file = parser.globals[GLOBAL_TOKEN].text;
	ctl->is_json = parser.globals[GLOBAL_JSON].is_given;
	ctl->timeout_ms = (uint32_t)parser.globals[GLOBAL_TIMEOUT].number;
	ctl->is_help = parser.globals[GLOBAL_HELP].is_given;
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

static void print_arg(const struct srv_arg *arg)
{
	char head[64];

	if (arg->letter != 0)
		snprintf(head, sizeof(head), "-%c, --%s%s%s", arg->letter, arg->name,
			arg->placeholder ? " " : "", arg->placeholder ? arg->placeholder : "");
	else
		snprintf(head, sizeof(head), "--%s%s%s", arg->name, arg->placeholder ? " " : "",
			arg->placeholder ? arg->placeholder : "");
	printf("  %-24s  %s", head, arg->help);
	/* A default of 0 or NULL has its own words in the help. */
	if (arg->kind == SRV_ARG_TEXT && arg->text)
		printf(" [%s]", arg->text);
	else if (arg->kind != SRV_ARG_FLAG && arg->kind != SRV_ARG_TEXT && arg->number != 0)
		printf(" [%llu]", (unsigned long long)arg->number);
	putchar('\n');
}

static void print_args(const char *title, const struct srv_arg *args, uint32_t n_args)
{
	if (n_args > 0)
		printf("\n%s:\n", title);
	for (uint32_t i = 0; i < n_args; i++)
		print_arg(&args[i]);
}

void srv_ctl_print_help(const struct srv_command *const commands[], uint32_t n_commands)
{
	printf("tqkvctl: control, load and measurements for tqkvd\n\n"
	       "usage: tqkvctl [options] COMMAND [options]\n\ncommands:\n");
	for (uint32_t i = 0; i < n_commands; i++) {
		char head[64];

		snprintf(head, sizeof(head), "%s%s%s", commands[i]->name, commands[i]->operands ? " " : "",
			commands[i]->operands ? commands[i]->operands : "");
		printf("  %-24s  %s\n", head, commands[i]->summary);
	}
	print_args("options of every command", globals, N_GLOBALS);
	printf("\n'tqkvctl COMMAND --help' explains a command. Exit codes: 0 done, 1 failed, 2 the command "
	       "line is "
	       "wrong.\n");
}

void srv_ctl_print_command_help(const struct srv_command *command)
{
	printf("usage: tqkvctl [options] %s%s%s%s\n\n%s\n", command->name, command->operands ? " " : "",
		command->operands ? command->operands : "", command->n_args > 0 ? " [options]" : "",
		command->summary);
	if (command->details)
		printf("\n%s\n", command->details);
	print_args("options", command->args, command->n_args);
	print_args("options of every command", globals, N_GLOBALS);
}
