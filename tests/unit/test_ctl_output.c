/* What tqkvctl prints: tables, units, the progress line. Expected texts are written by hand. */
#include <stdio.h>
#include <string.h>

#include "server/ctl/progress.h"
#include "server/ctl/table.h"
#include "tests/lib/kv_test.h"

/* A clock that a test sets. */
struct hand_clock {
	struct kv_clock base;
	uint64_t now_ns;
};

static uint64_t hand_clock_now(struct kv_clock *clock)
{
	return ((struct hand_clock *)(void *)clock)->now_ns;
}

static const struct kv_clock_ops hand_clock_ops = { .now_ns = hand_clock_now };

/* What a function wrote into a file. */
static const char *text_of(FILE *file)
{
	static char text[8192];

	fflush(file);
	rewind(file);
	text[fread(text, 1, sizeof(text) - 1, file)] = '\0';
	fclose(file);
	return text;
}

/* Columns are as wide as their widest cell; left ones start, right ones end at the same place; characters
 * count. */
START_TEST(test_ctl_output_table_is_aligned)
{
	static const char *const titles[] = { "<name", "n", "<note" };
	struct srv_table table;
	FILE *file = tmpfile();

	ck_assert_ptr_nonnull(file);
	srv_table_init(&table, titles, 3);
	srv_table_cell(&table, "a");
	srv_table_cell(&table, "%u", 12345);
	srv_table_cell(&table, "x");
	srv_table_cell(&table, "\xc3\xa9\xc3\xa9-long"); /* two characters of two bytes */
	srv_table_cell(&table, "%u", 7);
	srv_table_cell(&table, "%s", "");
	srv_table_print(&table, file);
	srv_table_finish(&table);
	ck_assert_str_eq(text_of(file),
		"name         n  note\n"
		"a        12345  x\n"
		"\xc3\xa9\xc3\xa9-long      7  \n");
}
END_TEST

/* Control characters of a cell do not reach the terminal, and a long cell is cut. */
START_TEST(test_ctl_output_table_is_harmless)
{
	static const char *const titles[] = { "<t" };
	struct srv_table table;
	char long_text[400];
	FILE *file = tmpfile();

	ck_assert_ptr_nonnull(file);
	memset(long_text, 'y', sizeof(long_text) - 1);
	long_text[sizeof(long_text) - 1] = '\0';
	srv_table_init(&table, titles, 1);
	srv_table_cell(&table, "%s", "a\x1b[2J\n\x7f");
	srv_table_cell(&table, "%s", long_text);
	srv_table_print(&table, file);
	srv_table_finish(&table);

	const char *text = text_of(file);

	ck_assert_int_eq(strncmp(text, "t\na?[2J??\n", 10), 0);
	ck_assert_uint_eq(strlen(text), 10 + SRV_TABLE_CELL_BYTES - 1 + 1);
}
END_TEST

/* Three significant digits in the largest unit that fits. */
START_TEST(test_ctl_output_units)
{
	static const struct {
		uint64_t value;
		const char *bytes, *ns;
	} rows[] = {
		{ 0, "0 B", "0 ns" },
		{ 999, "999 B", "999 ns" },
		{ 1000, "1000 B", "1.00 us" },
		{ 1024, "1.00 KiB", "1.02 us" },
		{ 12345, "12.1 KiB", "12.3 us" },
		{ 1234567, "1.18 MiB", "1.23 ms" },
		{ 123456789, "118 MiB", "123 ms" },
		{ 12345678901, "11.5 GiB", "12.3 s" },
	};
	char text[SRV_HUMAN_BYTES];

	for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
		ck_assert_str_eq(srv_human_bytes(rows[i].value, text), rows[i].bytes);
		ck_assert_str_eq(srv_human_ns(rows[i].value, text), rows[i].ns);
	}
	ck_assert_str_eq(srv_human_ms(90000, text), "1.50 min");
	ck_assert_str_eq(srv_human_ms(864000000, text), "10.0 d");
}
END_TEST

/* Half of 200 tokens in 2 seconds: half a bar, 50 a second, 2 seconds left. Nothing done yet: no guess. */
START_TEST(test_ctl_output_progress_line)
{
	struct hand_clock clock = { .base.ops = &hand_clock_ops, .now_ns = 1000 };
	struct srv_progress progress;
	char line[SRV_PROGRESS_LINE_BYTES];

	srv_progress_init(&progress, stderr, &clock.base, "decode", "tokens", 200);
	srv_progress_line(&progress, clock.now_ns, line);
	ck_assert_str_eq(line, "decode   [........................]   0%  0 tokens/s  --:-- left");
	srv_progress_set(&progress, 100);
	srv_progress_line(&progress, clock.now_ns + 2000000000, line);
	ck_assert_str_eq(line, "decode   [############............]  50%  50 tokens/s  00:00:02 left");
	/* More than all is all. */
	srv_progress_set(&progress, 500);
	srv_progress_line(&progress, clock.now_ns + 4000000000, line);
	ck_assert_str_eq(line, "decode   [########################] 100%  50 tokens/s  00:00:00 left");
	srv_progress_finish(&progress);
}
END_TEST

/* Into a file or a pipe: not one byte. */
START_TEST(test_ctl_output_progress_is_silent_when_piped)
{
	struct hand_clock clock = { .base.ops = &hand_clock_ops, .now_ns = 1000 };
	struct srv_progress progress;
	FILE *file = tmpfile();

	ck_assert_ptr_nonnull(file);
	setenv("TERM", "xterm", 1);
	srv_progress_init(&progress, file, &clock.base, "decode", "tokens", 200);
	for (uint64_t i = 1; i <= 200; i++) {
		clock.now_ns += 1000000000;
		srv_progress_set(&progress, i);
	}
	srv_progress_finish(&progress);
	ck_assert_str_eq(text_of(file), "");
}
END_TEST

/* A user id has the name of this machine's user, what is none stays as it is. */
START_TEST(test_ctl_output_tenants)
{
	static const char *const same[] = { "tcp", "_default", "4294967295", "4294967296",
		"99999999999999999999", "-1", " 0", "0x0", "" };
	char text[SRV_TABLE_CELL_BYTES];

	ck_assert_str_eq(srv_human_tenant("0", text), "0 (root)");
	for (size_t i = 0; i < sizeof(same) / sizeof(same[0]); i++)
		ck_assert_str_eq(srv_human_tenant(same[i], text), same[i]);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("ctl output");
	TCase *tcase = tcase_create("all");

	tcase_add_test(tcase, test_ctl_output_table_is_aligned);
	tcase_add_test(tcase, test_ctl_output_table_is_harmless);
	tcase_add_test(tcase, test_ctl_output_units);
	tcase_add_test(tcase, test_ctl_output_tenants);
	tcase_add_test(tcase, test_ctl_output_progress_line);
	tcase_add_test(tcase, test_ctl_output_progress_is_silent_when_piped);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
