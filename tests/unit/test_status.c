#include "proto/status.h"

#include <stdbool.h>
#include <string.h>

#include "tests/lib/golden.h"
#include "tests/lib/kv_test.h"

struct status_case {
	unsigned number;
	const char *name;
	const char *text;
	int scope;
	int is_retryable;
	unsigned http;
};
static const struct status_case cases[] = {
#define STATUS_CASE(name, number, scope, retryable, http, text) \
	{ number, #name, text, KV_SCOPE_##scope, retryable, http },
	KV_STATUS_MAP(STATUS_CASE)
#undef STATUS_CASE
};
#define N_CASES (sizeof(cases) / sizeof(cases[0]))

static const char *const scope_names[] = { "none", "item", "request", "session", "connection", "daemon" };

/* Every number gives the row of its own name, text, scope, retryable flag and HTTP code. */
START_TEST(test_status_row_of_every_number)
{
	for (size_t i = 0; i < N_CASES; i++) {
		const struct kv_status_row *row = kv_status_row(cases[i].number);

		ck_assert_uint_eq(row->number, cases[i].number);
		ck_assert_str_eq(row->name, cases[i].name);
		ck_assert_str_eq(row->text, cases[i].text);
		ck_assert_int_eq(row->scope, cases[i].scope);
		ck_assert_int_eq(row->is_retryable, cases[i].is_retryable);
		ck_assert_uint_eq(row->http, cases[i].http);
		ck_assert_str_eq(kv_status_name(cases[i].number), cases[i].name);
	}
}
END_TEST

/* A number without a row gives INTERNAL's row, never NULL. */
START_TEST(test_status_unknown_number_is_internal)
{
	static const unsigned unknown[] = { 1, 99, 110, 199, 499, 505, 899, 904, 65536, 4294967295U };

	for (size_t i = 0; i < sizeof(unknown) / sizeof(unknown[0]); i++)
		ck_assert_str_eq(kv_status_row(unknown[i])->name, "INTERNAL");
}
END_TEST

/* No number and no name occurs twice. */
START_TEST(test_status_rows_are_unique)
{
	for (size_t i = 0; i < N_CASES; i++)
		for (size_t j = i + 1; j < N_CASES; j++) {
			ck_assert_uint_ne(cases[i].number, cases[j].number);
			ck_assert_str_ne(cases[i].name, cases[j].name);
		}
}
END_TEST

/* The protocol's rules on single statuses hold: who may be retried, what closes the connection. */
START_TEST(test_status_rules)
{
	for (size_t i = 0; i < N_CASES; i++) {
		const unsigned number = cases[i].number;
		const bool is_retryable = number == 400 || number == 401 || number == 402 || number == 502;
		const bool closes = (number >= 100 && number <= 104) || number == 200 || number == 405;

		ck_assert_msg(cases[i].is_retryable == is_retryable, "retryable of %s", cases[i].name);
		ck_assert_msg((cases[i].scope == KV_SCOPE_CONN) == closes, "scope of %s", cases[i].name);
	}
}
END_TEST

/* PROTOCOL.md has exactly the rows of KV_STATUS_MAP below 900, in order, word for word. */
START_TEST(test_status_table_of_the_protocol_text)
{
	char *text = golden_text("proto/PROTOCOL.md");
	const char *line = strstr(text, "### Statuses");

	ck_assert_ptr_nonnull(line);
	line = strstr(line, "\n| --- |");
	ck_assert_ptr_nonnull(line);
	for (size_t i = 0; i < N_CASES; i++) {
		char expected[256];

		if (cases[i].number >= 900)
			continue;
		line = strchr(line + 1, '\n') + 1;
		snprintf(expected, sizeof(expected), "| %u | %s | %s | %s | %u | %s |\n", cases[i].number,
			cases[i].name, scope_names[cases[i].scope], cases[i].is_retryable ? "yes" : "no",
			cases[i].http, cases[i].text);
		ck_assert_msg(strncmp(line, expected, strlen(expected)) == 0, "expected %sfound %.80s",
			expected, line);
	}
	line = strchr(line, '\n') + 1;
	ck_assert_msg(line[0] != '|', "a row too many: %.60s", line);
	free(text);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("status");
	TCase *tcase = tcase_create("status");

	tcase_add_test(tcase, test_status_row_of_every_number);
	tcase_add_test(tcase, test_status_unknown_number_is_internal);
	tcase_add_test(tcase, test_status_rows_are_unique);
	tcase_add_test(tcase, test_status_rules);
	tcase_add_test(tcase, test_status_table_of_the_protocol_text);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
