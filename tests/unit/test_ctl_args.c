/* The command line of tqkvctl, over a table of two commands made for the test. */
#include <stdio.h>
#include <string.h>

#include "server/ctl/ctl.h"
#include "tests/lib/kv_test.h"

static enum kv_status run_nothing(struct srv_ctl *ctl, struct kv_error *err)
{
	(void)ctl;
	(void)err;
	return KV_OK;
}

enum { ARG_COUNT, ARG_SIZE, ARG_NAME, ARG_FAST, N_ARGS };

static const struct srv_arg args[N_ARGS] = {
	[ARG_COUNT] = { .name = "count",
		.letter = 'n',
		.kind = SRV_ARG_NUMBER,
		.placeholder = "N",
		.number = 5,
		.min = 1,
		.max = 100 },
	[ARG_SIZE] = { .name = "size", .kind = SRV_ARG_BYTES, .placeholder = "BYTES", .max = 1u << 30 },
	[ARG_NAME] = { .name = "name", .kind = SRV_ARG_TEXT, .placeholder = "NAME", .text = "x" },
	[ARG_FAST] = { .name = "fast", .kind = SRV_ARG_FLAG },
};

static const struct srv_command one = { .name = "one",
	.operands = "FILE",
	.n_operands_min = 1,
	.n_operands_max = 1,
	.args = args,
	.n_args = N_ARGS,
	.run = run_nothing };
static const struct srv_command two_words = { .name = "two words", .run = run_nothing };
static const struct srv_command *const commands[] = { &one, &two_words };

/* Splits the line at spaces; '_' stands for an empty word. */
static enum kv_status parse(struct srv_ctl *ctl, const char *line, struct kv_error *err)
{
	static char copy[256];
	char *argv[16];
	int argc = 0;

	snprintf(copy, sizeof(copy), "tqkvctl %s", line);
	for (char *word = strtok(copy, " "); word && argc < 16; word = strtok(NULL, " "))
		argv[argc++] = strcmp(word, "_") == 0 ? word + 1 : word;
	return srv_ctl_parse(ctl, commands, 2, argc, argv, err);
}

/* Options stand anywhere, in every form; what is not given has its default. */
START_TEST(test_ctl_args_are_read)
{
	static const char *const lines[] = {
		"one -n 7 --size 3KiB --name a --fast f --json --addr tcp:h:1 --timeout-ms 50",
		"--json --timeout-ms=50 --addr=tcp:h:1 one f --fast --name=a --size=3072 --count=7",
		"--addr tcp:h:1 --timeout-ms 50 -n7 --fast --json --name a --size 3KiB one -- f",
	};
	struct srv_ctl ctl;

	for (size_t i = 0; i < sizeof(lines) / sizeof(lines[0]); i++) {
		struct kv_error err = { .msg = "" };

		ck_assert_msg(parse(&ctl, lines[i], &err) == KV_OK, "line %zu: %s", i, err.msg);
		ck_assert_ptr_eq(ctl.command, &one);
		ck_assert_uint_eq(ctl.values[ARG_COUNT].number, 7);
		ck_assert_uint_eq(ctl.values[ARG_SIZE].number, 3072);
		ck_assert_str_eq(ctl.values[ARG_NAME].text, "a");
		ck_assert(ctl.values[ARG_FAST].is_given);
		ck_assert_str_eq(ctl.operands[0], "f");
		ck_assert_str_eq(ctl.addr, "tcp:h:1");
		ck_assert_uint_eq(ctl.timeout_ms, 50);
		ck_assert(ctl.is_json);
	}
	ck_assert_int_eq(parse(&ctl, "one f", NULL), KV_OK);
	ck_assert_uint_eq(ctl.values[ARG_COUNT].number, 5);
	ck_assert(!ctl.values[ARG_COUNT].is_given);
	ck_assert_str_eq(ctl.values[ARG_NAME].text, "x");
	ck_assert(!ctl.values[ARG_FAST].is_given);
	ck_assert(!ctl.is_json);
	ck_assert_int_eq(parse(&ctl, "two words", NULL), KV_OK);
	ck_assert_ptr_eq(ctl.command, &two_words);
}
END_TEST

/* Behind "--" an operand may look like an option; "-" alone is an operand. */
START_TEST(test_ctl_args_operands)
{
	struct srv_ctl ctl;

	ck_assert_int_eq(parse(&ctl, "one -- --fast", NULL), KV_OK);
	ck_assert_str_eq(ctl.operands[0], "--fast");
	ck_assert(!ctl.values[ARG_FAST].is_given);
	ck_assert_int_eq(parse(&ctl, "one -", NULL), KV_OK);
	ck_assert_str_eq(ctl.operands[0], "-");
}
END_TEST

/* Addresses: flag before environment before default; an empty variable counts as none. */
START_TEST(test_ctl_args_environment)
{
	struct srv_ctl ctl;

	unsetenv("TQKV_ADDR");
	unsetenv("TQKV_HTTP");
	ck_assert_int_eq(parse(&ctl, "two words", NULL), KV_OK);
	ck_assert_str_eq(ctl.addr, "unix:/run/tqkv/tqkvd.sock");
	ck_assert_str_eq(ctl.http, "127.0.0.1:7871");
	setenv("TQKV_ADDR", "unix:/x", 1);
	setenv("TQKV_HTTP", "", 1);
	ck_assert_int_eq(parse(&ctl, "two words", NULL), KV_OK);
	ck_assert_str_eq(ctl.addr, "unix:/x");
	ck_assert_str_eq(ctl.http, "127.0.0.1:7871");
	ck_assert_int_eq(parse(&ctl, "two words --addr unix:/y", NULL), KV_OK);
	ck_assert_str_eq(ctl.addr, "unix:/y");
	setenv("TQKV_HTTP", "https://h:1", 1);
	setenv("TQKV_HTTP_CA_FILE", "ca", 1);
	ck_assert_int_eq(parse(&ctl, "two words", NULL), KV_OK);
	ck_assert_str_eq(ctl.http, "https://h:1");
	ck_assert_str_eq(ctl.trust.ca_file, "ca");
	ck_assert_ptr_null(ctl.trust.certificate_file);
	unsetenv("TQKV_HTTP_CA_FILE");
	unsetenv("TQKV_HTTP");
}
END_TEST

/* Help needs neither operands nor a command. */
START_TEST(test_ctl_args_help)
{
	struct srv_ctl ctl;

	ck_assert_int_eq(parse(&ctl, "--help", NULL), KV_OK);
	ck_assert(ctl.is_help);
	ck_assert_ptr_null(ctl.command);
	ck_assert_int_eq(parse(&ctl, "one -h", NULL), KV_OK);
	ck_assert(ctl.is_help);
	ck_assert_ptr_eq(ctl.command, &one);
	ck_assert_int_eq(parse(&ctl, "help", NULL), KV_OK);
	ck_assert(ctl.is_help && !ctl.command && !ctl.group);
	ck_assert_int_eq(parse(&ctl, "help two words", NULL), KV_OK);
	ck_assert(ctl.is_help);
	ck_assert_ptr_eq(ctl.command, &two_words);
	/* The first word of several commands: help lists those. */
	ck_assert_int_eq(parse(&ctl, "two --help", NULL), KV_OK);
	ck_assert(ctl.is_help && !ctl.command);
	ck_assert_str_eq(ctl.group, "two");
	ck_assert_int_eq(parse(&ctl, "help two", NULL), KV_OK);
	ck_assert(ctl.is_help);
	ck_assert_str_eq(ctl.group, "two");
	ck_assert_int_eq(parse(&ctl, "two", NULL), SRV_CTL_USAGE);
	ck_assert_int_eq(parse(&ctl, "two more --help", NULL), SRV_CTL_USAGE);
	ck_assert_int_eq(parse(&ctl, "help three", NULL), SRV_CTL_USAGE);
}
END_TEST

/* A wrong line is refused with the word that is wrong and where to look. */
START_TEST(test_ctl_args_refuse)
{
	static const struct {
		const char *line, *says;
	} rows[] = {
		{ "", "no command given" },
		{ "three", "unknown command 'three'; 'tqkvctl --help'" },
		{ "two", "'two' needs one of: 'two words'" },
		{ "two wordz", "'two' needs one of: 'two words'" },
		{ "one", "FILE is missing; see 'tqkvctl one --help'" },
		{ "one a b", "'b' is one argument too many" },
		{ "one a --slow", "unknown option '--slow'; 'tqkvctl one --help'" },
		{ "one a -x", "unknown option '-x'" },
		{ "two words --fast", "unknown option '--fast'" },
		{ "one a --fast=1", "option '--fast=1' takes no value" },
		{ "one a --name", "option '--name' needs a value: NAME" },
		{ "one a -n 0", "--count: '0' is not a number of 1 to 100" },
		{ "one a -n 101", "--count: '101'" },
		{ "one a -n 7x", "--count: '7x'" },
		{ "one a -n -7", "--count: '-7'" },
		{ "one a -n 1KiB", "--count: '1KiB'" },
		{ "one a --size 99999999999999999999", "--size:" },
		{ "one a --size 17179869184GiB", "--size:" },
		{ "one a --size 1kb", "--size: '1kb'" },
		{ "one a --size _", "--size: ''" },
		{ "one a --timeout-ms 0", "--timeout-ms: '0'" },
	};

	for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
		struct srv_ctl ctl;
		struct kv_error err = { .msg = "" };

		ck_assert_int_eq(parse(&ctl, rows[i].line, &err), SRV_CTL_USAGE);
		ck_assert_msg(strstr(err.msg, rows[i].says) != NULL, "'%s': '%s' does not say '%s'",
			rows[i].line, err.msg, rows[i].says);
	}
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("ctl args");
	TCase *tcase = tcase_create("all");

	tcase_add_test(tcase, test_ctl_args_are_read);
	tcase_add_test(tcase, test_ctl_args_operands);
	tcase_add_test(tcase, test_ctl_args_environment);
	tcase_add_test(tcase, test_ctl_args_help);
	tcase_add_test(tcase, test_ctl_args_refuse);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
