/* Log: one event is one line with a level in front, whatever bytes it is made of, and repeat offenders are
 * counted. */
#include <regex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "server/log.h"
#include "tests/lib/kv_test.h"

static FILE *file;
static int saved_stderr;

/* JOURNAL_STREAM as the service manager sets it, of stderr's file; `wrong` is added to the inode. */
static void name_journal(int wrong)
{
	struct stat found;
	char text[64];

	ck_assert_int_eq(fstat(STDERR_FILENO, &found), 0);
	snprintf(text, sizeof(text), "%llu:%llu", (unsigned long long)found.st_dev,
		(unsigned long long)found.st_ino + (unsigned)wrong);
	setenv("JOURNAL_STREAM", text, 1);
}

static void setup(void)
{
	file = tmpfile();
	ck_assert_ptr_nonnull(file);
	saved_stderr = dup(STDERR_FILENO);
	dup2(fileno(file), STDERR_FILENO);
	name_journal(0);
}

static void teardown(void)
{
	dup2(saved_stderr, STDERR_FILENO);
	close(saved_stderr);
	fclose(file);
	srv_log_set_level(SRV_LOG_INFO);
}

/* What was written since the last call. */
static const char *written(void)
{
	static char text[8192];

	rewind(file);
	text[fread(text, 1, sizeof(text) - 1, file)] = '\0';
	rewind(file);
	ck_assert_int_eq(ftruncate(fileno(file), 0), 0);
	return text;
}

/* To journald the level is a number in angle brackets, as it reads it. */
START_TEST(test_log_line)
{
	srv_log(SRV_LOG_WARNING, "conn %d closed by %s", 17, "peer");
	ck_assert_str_eq(written(), "<4>conn 17 closed by peer\n");
}
END_TEST

static void expect_match(const char *text, const char *pattern)
{
	regex_t regex;

	ck_assert_int_eq(regcomp(&regex, pattern, REG_EXTENDED | REG_NOSUB), 0);
	ck_assert_msg(regexec(&regex, text, 0, NULL, 0) == 0, "'%s' is no '%s'", text, pattern);
	regfree(&regex);
}

/* Where nobody reads levels as numbers and adds the time, both are words: without journald, and where stderr
 * is not the stream that it gave us, as with `2>file` in a service. */
START_TEST(test_log_without_journal)
{
#define TIME_PATTERN "^[0-9]{4}-[01][0-9]-[0-3][0-9]T[0-2][0-9]:[0-5][0-9]:[0-6][0-9]\\.[0-9]{3}Z "
	static const char *const names[] = { "error", "warning", NULL, "info", "debug" };

	name_journal(1);
	srv_log_set_level(SRV_LOG_DEBUG);
	for (int level = SRV_LOG_ERROR; level <= (int)SRV_LOG_DEBUG; level++) {
		const char *name = names[level - (int)SRV_LOG_ERROR];
		char pattern[160];

		if (!name)
			continue;
		snprintf(pattern, sizeof(pattern), TIME_PATTERN "%s line %d\n$", name, level);
		srv_log((enum srv_log_level)level, "line %d", level);
		expect_match(written(), pattern);
	}
	unsetenv("JOURNAL_STREAM");
	srv_log_audit("who");
	expect_match(written(), TIME_PATTERN "notice who\n$");
	setenv("JOURNAL_STREAM", "", 1);
	srv_log(SRV_LOG_INFO, "what");
	expect_match(written(), TIME_PATTERN "info what\n$");
#undef TIME_PATTERN
}
END_TEST

/* Less severe than the level: no line. */
START_TEST(test_log_level)
{
	srv_log(SRV_LOG_DEBUG, "not seen");
	ck_assert_str_eq(written(), "");
	srv_log_set_level(SRV_LOG_ERROR);
	srv_log(SRV_LOG_WARNING, "not seen");
	srv_log(SRV_LOG_ERROR, "seen");
	ck_assert_str_eq(written(), "<3>seen\n");
	srv_log_set_level(SRV_LOG_DEBUG);
	srv_log(SRV_LOG_DEBUG, "seen");
	ck_assert_str_eq(written(), "<7>seen\n");
}
END_TEST

/* Whatever bytes a peer chose, they cannot start a line of their own, speak to a terminal or break a text
 * that is read as UTF-8; and what was written can be told from what only looks like it. */
START_TEST(test_log_escapes)
{
	srv_log(SRV_LOG_INFO, "name %s", "a\n<0>b\x1b[2J\x7f");
	ck_assert_str_eq(written(), "<6>name a\\x0a<0>b\\x1b[2J\\x7f\n");
	srv_log(SRV_LOG_INFO, "%s", "\xc3\xa4 \xff \\xff");
	ck_assert_str_eq(written(), "<6>\\xc3\\xa4 \\xff \\\\xff\n");
	for (unsigned byte = 1; byte < 256; byte++) {
		char text[2] = { (char)byte }, expected[16];

		srv_log(SRV_LOG_INFO, "%s", text);
		if (byte >= 0x20 && byte < 0x7F && byte != '\\')
			snprintf(expected, sizeof(expected), "<6>%s\n", text);
		else if (byte == '\\')
			snprintf(expected, sizeof(expected), "<6>\\\\\n");
		else
			snprintf(expected, sizeof(expected), "<6>\\x%02x\n", byte);
		ck_assert_str_eq(written(), expected);
	}
}
END_TEST

/* A text without end is cut and is still one line. */
START_TEST(test_log_long_line)
{
	static char text[5000];

	memset(text, 'x', sizeof(text) - 1);
	srv_log(SRV_LOG_INFO, "%s", text);
	const char *line = written();

	ck_assert_uint_eq(strlen(line), 1024);
	ck_assert_ptr_eq(strchr(line, '\n'), line + 1023);
	memset(text, '\xff', sizeof(text) - 1);
	srv_log(SRV_LOG_INFO, "%s", text);
	line = written();
	ck_assert_uint_eq(strlen(line), 3 + 255 * 4 + 1); /* no half of an escape */
	ck_assert_str_eq(line + 3 + 254 * 4, "\\xff\n");
}
END_TEST

/* Within a second one line per gate; the next one says how many were left out. */
START_TEST(test_log_limited)
{
	struct srv_log_gate gate = { 0 };
	const uint64_t start_ns = 5;

	srv_log_limited(&gate, start_ns, SRV_LOG_INFO, "first");
	ck_assert_str_eq(written(), "<6>first\n");
	srv_log_limited(&gate, start_ns + 1, SRV_LOG_INFO, "second");
	srv_log_limited(&gate, start_ns + 999999999, SRV_LOG_INFO, "third");
	ck_assert_str_eq(written(), "");
	srv_log_limited(&gate, start_ns + 1000000000, SRV_LOG_INFO, "fourth");
	ck_assert_str_eq(written(), "<6>fourth, left_out 2\n");
	srv_log_limited(&gate, start_ns + 3000000000, SRV_LOG_INFO, "fifth");
	ck_assert_str_eq(written(), "<6>fifth\n");
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("log");
	TCase *tcase = tcase_create("log");

	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_add_test(tcase, test_log_line);
	tcase_add_test(tcase, test_log_without_journal);
	tcase_add_test(tcase, test_log_level);
	tcase_add_test(tcase, test_log_escapes);
	tcase_add_test(tcase, test_log_long_line);
	tcase_add_test(tcase, test_log_limited);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
