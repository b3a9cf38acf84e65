/* The rules over text that comes over HTTP: hosts, origins, media types, escapes, numbers, bodies. */
#include <string.h>

#include "core/checked.h"
#include "server/http_rules.h"
#include "tests/lib/kv_test.h"

/* Only the bound host, localhost and loopback literals pass; --insecure adds every literal, never a name. */
START_TEST(test_http_rules_host)
{
	static const char *const good[] = { "localhost", "LocalHost:7871", "127.0.0.1", "127.0.0.1:7871",
		"127.255.1.2:1", "[::1]", "[::1]:7871", "[0:0:0:0:0:0:0:1]:80", "bound.host:80", "BOUND.host",
		"127.0.0.1:" };
	static const char *const literal[] = { "10.0.0.1", "192.168.1.1:7871", "[fe80::1]:80", "0.0.0.0" };
	static const char *const bad[] = { "", ":80", "example.org", "example.org:80",
		"localhost.example.org", "127.0.0.1.example.org", "127.1", "127.0.0.1:x", "127.0.0.1:123456",
		"127.0.0.1:80:80", "[::1", "[::1]x", "[]", "[localhost]", "::1", "localhost ", " localhost",
		"localhost@evil", "127.0.0.1/", "\xff", "0x7f000001", "2130706433" };
	static char huge[1000];

	for (size_t i = 0; i < KV_LENGTH(good); i++) {
		ck_assert_msg(srv_http_host_is_allowed(good[i], "bound.host", false), "%s", good[i]);
		ck_assert_msg(srv_http_host_is_allowed(good[i], "bound.host", true), "%s", good[i]);
	}
	for (size_t i = 0; i < KV_LENGTH(literal); i++) {
		ck_assert_msg(!srv_http_host_is_allowed(literal[i], "bound.host", false), "%s", literal[i]);
		ck_assert_msg(srv_http_host_is_allowed(literal[i], "bound.host", true), "%s", literal[i]);
	}
	for (size_t i = 0; i < KV_LENGTH(bad); i++) {
		ck_assert_msg(!srv_http_host_is_allowed(bad[i], "bound.host", false), "%s", bad[i]);
		ck_assert_msg(!srv_http_host_is_allowed(bad[i], "bound.host", true), "%s", bad[i]);
	}
	memset(huge, 'a', sizeof(huge) - 1);
	ck_assert(!srv_http_host_is_allowed(huge, huge, true));
	ck_assert(srv_http_host_is_allowed("10.0.0.1", "10.0.0.1", false));
	ck_assert(srv_http_host_is_allowed("[fe80::1]:7", "fe80::1", false));
}
END_TEST

/* A page counts as ours only if it came from the very host and port that the request names. */
START_TEST(test_http_rules_origin)
{
	ck_assert(srv_http_origin_is_own("http://localhost:7871", "localhost:7871"));
	ck_assert(srv_http_origin_is_own("HTTPS://Localhost:7871", "localhost:7871"));
	ck_assert(!srv_http_origin_is_own("http://localhost:3000", "localhost:7871"));
	ck_assert(!srv_http_origin_is_own("http://localhost", "localhost:7871"));
	ck_assert(!srv_http_origin_is_own("http://evil.example", "localhost:7871"));
	ck_assert(!srv_http_origin_is_own("http://localhost:7871.evil.example", "localhost:7871"));
	ck_assert(!srv_http_origin_is_own("file://localhost:7871", "localhost:7871"));
	ck_assert(!srv_http_origin_is_own("null", "localhost:7871"));
	ck_assert(!srv_http_origin_is_own("", "localhost:7871"));
}
END_TEST

/* Parameters behind the media type are allowed, other types are not. */
START_TEST(test_http_rules_media_type)
{
	ck_assert(srv_http_type_is_json("application/json"));
	ck_assert(srv_http_type_is_json("Application/JSON; charset=utf-8"));
	ck_assert(srv_http_type_is_json("application/json ;x=1"));
	ck_assert(!srv_http_type_is_json("application/json5"));
	ck_assert(!srv_http_type_is_json("application/jsonp; a"));
	ck_assert(!srv_http_type_is_json("text/plain"));
	ck_assert(!srv_http_type_is_json(" application/json"));
	ck_assert(!srv_http_type_is_json(""));
}
END_TEST

/* Escapes are undone once; a zero byte, half an escape and a text that does not fit are refused. */
START_TEST(test_http_rules_unescape)
{
	char out[5];

	ck_assert(srv_http_unescape("a%2Fb%41", out, sizeof(out)));
	ck_assert_str_eq(out, "a/bA");
	ck_assert(srv_http_unescape("%2525", out, sizeof(out)));
	ck_assert_str_eq(out, "%25");
	ck_assert(srv_http_unescape("", out, sizeof(out)));
	ck_assert_str_eq(out, "");
	ck_assert(!srv_http_unescape("abcde", out, sizeof(out)));
	ck_assert(!srv_http_unescape("a%00b", out, sizeof(out)));
	ck_assert(!srv_http_unescape("%", out, sizeof(out)));
	ck_assert(!srv_http_unescape("%4", out, sizeof(out)));
	ck_assert(!srv_http_unescape("%4g", out, sizeof(out)));
	ck_assert(!srv_http_unescape("%-1", out, sizeof(out)));
}
END_TEST

/* Numbers are digits and nothing else, and what does not fit is refused instead of wrapped. */
START_TEST(test_http_rules_numbers)
{
	uint64_t n = 7;

	ck_assert(srv_http_read_u64("18446744073709551615", UINT64_MAX, &n));
	ck_assert_uint_eq(n, UINT64_MAX);
	ck_assert(srv_http_read_u64("256", 256, &n));
	ck_assert_uint_eq(n, 256);
	ck_assert(!srv_http_read_u64("257", 256, &n));
	ck_assert(!srv_http_read_u64("18446744073709551616", UINT64_MAX, &n));
	ck_assert(!srv_http_read_u64("184467440737095516150", UINT64_MAX, &n));
	ck_assert(!srv_http_read_u64("", 256, &n));
	ck_assert(!srv_http_read_u64("-1", 256, &n));
	ck_assert(!srv_http_read_u64("+1", 256, &n));
	ck_assert(!srv_http_read_u64(" 1", 256, &n));
	ck_assert(!srv_http_read_u64("0x1", 256, &n));
	ck_assert_uint_eq(n, 256);
	ck_assert(srv_http_read_hex_id("005a17C39e210003", &n));
	ck_assert_uint_eq(n, 0x005A17C39E210003);
	ck_assert(!srv_http_read_hex_id("5a17c39e210003", &n));
	ck_assert(!srv_http_read_hex_id("0x5a17c39e210003", &n));
	ck_assert(!srv_http_read_hex_id("005a17c39e210003 ", &n));
	ck_assert(!srv_http_read_hex_id("", &n));
	ck_assert_uint_eq(n, 0x005A17C39E210003);
}
END_TEST

/* Pool names are the protocol's. */
START_TEST(test_http_rules_pool_name)
{
	static char name[66];

	memset(name, 'a', 64);
	ck_assert(srv_http_is_pool_name(name));
	ck_assert(srv_http_is_pool_name("Smol-1._:"));
	name[64] = 'a';
	ck_assert(!srv_http_is_pool_name(name));
	ck_assert(!srv_http_is_pool_name(""));
	ck_assert(!srv_http_is_pool_name("a/b"));
	ck_assert(!srv_http_is_pool_name("a b"));
	ck_assert(!srv_http_is_pool_name("\xc3\xa4"));
}
END_TEST

/* A body is one JSON object; what is wrong is told with line and column. */
START_TEST(test_http_rules_body)
{
	static const struct {
		const char *body, *part;
	} bad[] = {
		{ "{\"a\":1,\n\"a\":2}", "line 2, column " },
		{ "{\"a\":", "line 1, column 5" },
		{ "[1]", "expected an object" },
		{ "7", "the body is a number, expected an object" },
		{ "\"x\"", "the body is a text, expected an object" },
		{ "hello", "the body is not JSON: line 1, column 5" },
		{ "{\"a\":\"\xff\"}", "line 1, column " },
		{ "{} x", "line 1, column 4" },
	};
	struct kv_error error;
	json_t *json = NULL;

	for (size_t i = 0; i < KV_LENGTH(bad); i++) {
		ck_assert_int_eq(
			srv_http_read_object(bad[i].body, strlen(bad[i].body), &json, &error), KV_BAD_CONFIG);
		ck_assert_msg(strstr(error.msg, bad[i].part) != NULL, "%s: %s", bad[i].body, error.msg);
		ck_assert_ptr_null(json);
	}
	ck_assert_int_eq(srv_http_read_object("{\"a\":1}", 7, &json, &error), KV_OK);
	ck_assert_uint_eq(json_object_size(json), 1);
	json_decref(json);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("http_rules");
	TCase *tcase = tcase_create("http_rules");

	tcase_add_test(tcase, test_http_rules_host);
	tcase_add_test(tcase, test_http_rules_origin);
	tcase_add_test(tcase, test_http_rules_media_type);
	tcase_add_test(tcase, test_http_rules_unescape);
	tcase_add_test(tcase, test_http_rules_numbers);
	tcase_add_test(tcase, test_http_rules_pool_name);
	tcase_add_test(tcase, test_http_rules_body);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
