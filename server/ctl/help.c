/* What tqkvctl says of itself, from the tables of commands and options. make_man.py reads it, too. */
#include <stdio.h>
#include <string.h>

#include "server/ctl/ctl.h"

#define LINE_CHARS 108u
#define HELP_AT    28u /* where the text of an option begins */

/* Words of a text, from a column on; lines that follow begin at `indent`. Line ends of the text stay. */
static void print_wrapped(const char *text, uint32_t column, uint32_t indent)
{
	bool is_first = true;

	while (*text) {
		const size_t n_chars = strcspn(text, " \n");

		if (!is_first && column + 1 + n_chars > LINE_CHARS) {
			printf("\n%*s", (int)indent, "");
			column = indent;
		} else if (!is_first) {
			putchar(' ');
			column++;
		}
		printf("%.*s", (int)n_chars, text);
		column += (uint32_t)n_chars;
		is_first = false;
		text += n_chars;
		if (*text == '\n') {
			printf("\n%*s", (int)indent, "");
			column = indent;
			is_first = true;
		}
		text += *text != '\0';
	}
}

static void print_arg(const struct srv_arg *arg)
{
	char head[64], text[512];
	const char *space = arg->placeholder ? " " : "", *what = arg->placeholder ? arg->placeholder : "";

	if (arg->letter != 0)
		snprintf(head, sizeof(head), "-%c, --%s%s%s", arg->letter, arg->name, space, what);
	else
		snprintf(head, sizeof(head), "--%s%s%s", arg->name, space, what);
	/* A default of 0, "" or NULL has its own words in the help. */
	if (arg->kind == SRV_ARG_TEXT && arg->text && arg->text[0])
		snprintf(text, sizeof(text), "%s [%s]", arg->help, arg->text);
	else if (arg->kind != SRV_ARG_FLAG && arg->kind != SRV_ARG_TEXT && arg->number != 0)
		snprintf(text, sizeof(text), "%s [%llu]", arg->help, (unsigned long long)arg->number);
	else
		snprintf(text, sizeof(text), "%s", arg->help);
	printf("  %-24s  ", head);
	print_wrapped(text, strlen(head) > 24 ? (uint32_t)strlen(head) + 4 : HELP_AT, HELP_AT);
	putchar('\n');
}

static void print_args(const char *title, const struct srv_arg *args, uint32_t n_args)
{
	if (n_args > 0)
		printf("\n%s:\n", title);
	for (uint32_t i = 0; i < n_args; i++)
		print_arg(&args[i]);
}

static void print_globals(void)
{
	uint32_t n_args;
	const struct srv_arg *args = srv_ctl_globals(&n_args);

	print_args("options of every command", args, n_args);
}

static bool begins_with_word(const char *name, const char *word, size_t n_chars)
{
	return strncmp(name, word, n_chars) == 0 && (name[n_chars] == ' ' || name[n_chars] == '\0');
}

void srv_ctl_print_help(const struct srv_command *const commands[], uint32_t n_commands, const char *group)
{
	if (group)
		printf("usage: tqkvctl [options] %s COMMAND [options]\n\ncommands:\n", group);
	else
		printf("tqkvctl: control, load and measurements for tqkvd\n\n"
		       "usage: tqkvctl [options] COMMAND [options]\n\ncommands:\n");
	for (uint32_t i = 0; i < n_commands; i++) {
		char head[64];

		if (group && !begins_with_word(commands[i]->name, group, strlen(group)))
			continue;
		snprintf(head, sizeof(head), "%s%s%s", commands[i]->name, commands[i]->operands ? " " : "",
			commands[i]->operands ? commands[i]->operands : "");
		printf("  %-24s  %s\n", head, commands[i]->summary);
	}
	print_globals();
	printf("\n'tqkvctl COMMAND --help' explains a command. Exit codes: 0 done, 1 failed, 2 the command "
	       "line is wrong.\n");
}

void srv_ctl_print_command_help(
	const struct srv_command *const commands[], uint32_t n_commands, const struct srv_command *command)
{
	const size_t first_chars = strcspn(command->name, " ");
	bool is_alone = true;

	printf("usage: tqkvctl [options] %s%s%s%s\n\n", command->name, command->operands ? " " : "",
		command->operands ? command->operands : "", command->n_args > 0 ? " [options]" : "");
	print_wrapped(command->summary, 0, 0);
	putchar('\n');
	if (command->details) {
		putchar('\n');
		print_wrapped(command->details, 0, 0);
		putchar('\n');
	}
	for (uint32_t i = 0; i < n_commands && command->name[first_chars] == '\0'; i++) {
		if (commands[i] == command ||
			!begins_with_word(commands[i]->name, command->name, first_chars))
			continue;
		printf("%s'tqkvctl %s'", is_alone ? "\nSee also: " : ", ", commands[i]->name);
		is_alone = false;
	}
	if (!is_alone)
		putchar('\n');
	print_args("options", command->args, command->n_args);
	print_globals();
}
