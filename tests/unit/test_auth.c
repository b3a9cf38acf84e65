/*
 * Tokens: what a tokens file may hold, that exactly the whole token logs in, and how often one may fail.
 */
#include <stdio.h>
#include <string.h>

#include "server/auth.h"
#include "tests/lib/kv_test.h"

#define GOOD                                              \
	"# who may do what\n\n"                           \
	"data  worker   0123456789abcdef    tenant=7\r\n" \
	"\tread grafana  fedcba9876543210\n"              \
	"admin ops       0123456789abcdefX"

static struct srv_tokens tokens;
static struct kv_error error;

static enum kv_status parse(const char *text)
{
	memset(&error, 0, sizeof(error));
	return srv_tokens_parse(text, strlen(text), "file", &tokens, &error);
}

static const struct srv_token *find(const char *text)
{
	return srv_tokens_find(&tokens, text, strlen(text));
}

/* Roles, names and tenants as written; the last line needs no end. */
START_TEST(test_auth_parse)
{
	ck_assert_msg(parse(GOOD) == KV_OK, "%s", error.msg);
	ck_assert_uint_eq(tokens.n, 3);
	ck_assert_str_eq(find("0123456789abcdef")->name, "worker");
	ck_assert_int_eq(find("0123456789abcdef")->role, SRV_ROLE_DATA);
	ck_assert(find("0123456789abcdef")->has_tenant);
	ck_assert_uint_eq(find("0123456789abcdef")->tenant, 7);
	ck_assert_int_eq(find("fedcba9876543210")->role, SRV_ROLE_READ);
	ck_assert(!find("fedcba9876543210")->has_tenant);
	ck_assert_int_eq(find("0123456789abcdefX")->role, SRV_ROLE_ADMIN);
}
END_TEST

/* Neither a part of a token, nor more than it, nor the padding behind it is the token. */
START_TEST(test_auth_only_the_whole_token)
{
	static const char *const others[] = { "", "0", "0123456789abcde", "0123456789abcdeF",
		"0123456789abcdefXX", "0123456789abcdef ", "grafana" };
	char padded[SRV_TOKEN_BYTES_MAX + 1] = "0123456789abcdef";

	ck_assert_int_eq(parse(GOOD), KV_OK);
	for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++)
		ck_assert_msg(!find(others[i]), "'%s' logs in", others[i]);
	for (size_t n = 17; n <= sizeof(padded); n++)
		ck_assert_ptr_null(srv_tokens_find(&tokens, padded, n));
}
END_TEST

/* A line that is wrong is named by its number; what stands in it is not repeated, and nothing is kept. */
START_TEST(test_auth_refuses)
{
	static const struct {
		const char *text, *part;
	} cases[] = {
		{ "", "holds no token" },
		{ "# only\n#words\n", "holds no token" },
		{ "\n\ndata worker\n", "line 3: expected role, name and token" },
		{ "root ops s3cretsecretsecret\n", "line 1: the role is none of" },
		{ "data worker s3cret\n", "fewer than 16 bytes" },
		{ "data worker s3cretsecretsecret quota=7\n", "only tenant=NUMBER" },
		{ "data worker s3cretsecretsecret tenant=\n", "only tenant=NUMBER" },
		{ "data worker s3cretsecretsecret tenant=18446744073709551615\n", "only tenant=NUMBER" },
		{ "read worker s3cretsecretsecret tenant=7\n", "only a data token" },
		{ "data worker s3cretsecretsecret tenant=7 more\n", "expected role" },
		{ "data worker s3cret\x01secretsecret\n", "printable" },
		{ "data worker s3cretsecretsecret\ndata worker s3cretsecretsecre2\n", "line 2: the name" },
		{ "data worker s3cretsecretsecret\ndata other s3cretsecretsecret\n", "line 2: the token" },
	};

	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		ck_assert_int_eq(parse(cases[i].text), KV_BAD_CONFIG);
		ck_assert_msg(strstr(error.msg, cases[i].part) != NULL, "%s", error.msg);
		ck_assert_msg(!strstr(error.msg, "s3cret"), "%s", error.msg);
		ck_assert_uint_eq(tokens.n, 0);
	}
}
END_TEST

/* At most 64 tokens, of at most 512 bytes; a zero byte is no part of one. */
START_TEST(test_auth_bounds)
{
	static char text[8192];
	size_t used = 0;

	for (int i = 0; i < 64; i++)
		used += (size_t)snprintf(
			text + used, sizeof(text) - used, "data n%d token-token-token-%d\n", i, i);
	ck_assert_msg(parse(text) == KV_OK, "%s", error.msg);
	snprintf(text + used, sizeof(text) - used, "data more token-token-token-more\n");
	ck_assert_int_eq(parse(text), KV_BAD_CONFIG);
	used = (size_t)snprintf(text, sizeof(text), "data long ");
	memset(text + used, 'x', 513);
	text[used + 512] = '\0';
	ck_assert_msg(parse(text) == KV_OK, "%s", error.msg);
	text[used + 512] = 'x';
	text[used + 513] = '\0';
	ck_assert_int_eq(parse(text), KV_BAD_CONFIG);
	ck_assert_int_eq(srv_tokens_parse("data a 0123456789abcdef\0ghi\n", 28, "file", &tokens, &error),
		KV_BAD_CONFIG);
}
END_TEST

/* "any", or exactly the numbers that stand there. */
START_TEST(test_auth_uids)
{
	static const char *const wrong[] = { "", ",", "1,", ",1", "1,,2", "-1", "all", "1 2", "4294967295",
		"99999999999999999999" };

	for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++)
		ck_assert_msg(!srv_uids_are_valid(wrong[i]), "'%s'", wrong[i]);
	ck_assert(srv_uids_are_valid("any") && srv_uids_hold("any", 4711));
	ck_assert(srv_uids_are_valid("0,1000,4294967294"));
	ck_assert(srv_uids_hold("0,1000,4294967294", 0));
	ck_assert(srv_uids_hold("0,1000,4294967294", 1000));
	ck_assert(srv_uids_hold("0,1000,4294967294", 4294967294u));
	ck_assert(!srv_uids_hold("0,1000,4294967294", 100));
	ck_assert(!srv_uids_hold("1000", 0));
}
END_TEST

/* The tenth failure within a minute shuts the door for that peer alone, until the minute is over. */
START_TEST(test_auth_gate)
{
	static struct srv_login_gate gate;
	const uint64_t start_ns = 1000;

	memset(&gate, 0, sizeof(gate));
	for (unsigned i = 0; i < SRV_LOGINS_FAILED_MAX; i++) {
		ck_assert(!srv_login_is_limited(&gate, 7, start_ns + i));
		srv_login_failed(&gate, 7, start_ns + i);
	}
	ck_assert(srv_login_is_limited(&gate, 7, start_ns + 100));
	ck_assert(!srv_login_is_limited(&gate, 8, start_ns + 100));
	ck_assert(srv_login_is_limited(&gate, 7, start_ns + SRV_LOGIN_WINDOW_NS - 1));
	ck_assert(!srv_login_is_limited(&gate, 7, start_ns + SRV_LOGIN_WINDOW_NS));
	srv_login_failed(&gate, 7, start_ns + SRV_LOGIN_WINDOW_NS);
	ck_assert(!srv_login_is_limited(&gate, 7, start_ns + SRV_LOGIN_WINDOW_NS + 1));
}
END_TEST

/* More peers than are remembered: the oldest make room, and a fresh offender is still stopped. */
START_TEST(test_auth_gate_is_bounded)
{
	static struct srv_login_gate gate;

	memset(&gate, 0, sizeof(gate));
	for (uint64_t peer = 1; peer <= 3 * SRV_LOGIN_PEERS; peer++)
		srv_login_failed(&gate, peer, peer);
	for (unsigned i = 0; i < SRV_LOGINS_FAILED_MAX; i++)
		srv_login_failed(&gate, 99999, 10000);
	ck_assert(srv_login_is_limited(&gate, 99999, 10001));
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("auth");
	TCase *tcase = tcase_create("auth");

	tcase_add_test(tcase, test_auth_parse);
	tcase_add_test(tcase, test_auth_only_the_whole_token);
	tcase_add_test(tcase, test_auth_refuses);
	tcase_add_test(tcase, test_auth_bounds);
	tcase_add_test(tcase, test_auth_uids);
	tcase_add_test(tcase, test_auth_gate);
	tcase_add_test(tcase, test_auth_gate_is_bounded);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
