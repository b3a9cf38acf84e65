/*
 * Who may ask what of the control API: every route with every role, failed logins, the second address, and
 * reloads of the tokens.
 */
#include <stdio.h>
#include <string.h>

#include "core/checked.h"
#include "core/memory.h"
#include "tests/lib/kv_test.h"
#include "tests/lib/kv_test_http.h"

#define DATA          "data-token-0123456789"
#define READ          "read-token-0123456789"
#define ADMIN         "admin-token-0123456789"
#define TOKENS        "data worker " DATA "\nread grafana " READ "\nadmin ops " ADMIN "\n"
#define BEARER(token) "Authorization: Bearer " token "\r\n"

static struct kv_test_http test;
static struct kv_test_response response;

static void setup(void)
{
	kv_test_http_begin_with(&test, "127.0.0.1:0", false, TOKENS);
}

static void teardown(void)
{
	kv_test_http_end(&test);
}

static void ask(const char *method, const char *path, const char *headers, const char *body)
{
	kv_test_ask(&test, method, path, headers, body, &response);
}

/* A path that fits the route's pattern. */
static void make_path(const struct srv_http_route *route, char *out, size_t n_bytes)
{
	size_t used = 0;

	for (const char *c = route->path; *c && used + 20 < n_bytes; c++) {
		if (*c != '{') {
			out[used++] = *c;
			continue;
		}
		used += (size_t)snprintf(out + used, n_bytes - used, "%s",
			strncmp(c, "{id}", 4) == 0 ? "00ab000000000001" : "7");
		c += strcspn(c, "}");
	}
	out[used] = '\0';
}

static int ask_route(const struct srv_http_route *route, const char *login)
{
	char path[256], headers[256];

	make_path(route, path, sizeof(path));
	snprintf(headers, sizeof(headers), "%s%s", login,
		strcmp(route->method, "GET") == 0 || strcmp(route->method, "DELETE") == 0 ? "" : JSON_TYPE);
	ask(route->method, path, headers,
		strcmp(route->method, "GET") == 0 || strcmp(route->method, "DELETE") == 0 ? NULL : "[]");
	return response.status;
}

/* Every route without a token, and with each role: exactly what its row says; the loop never sees the rest.
 */
START_TEST(test_http_access_roles)
{
	for (size_t i = 0; i < srv_http_n_routes; i++) {
		const struct srv_http_route *route = &srv_http_routes[i];
		const bool is_open = route->access == SRV_ACCESS_OPEN;
		const bool is_read = route->access == SRV_ACCESS_READ;
		const unsigned n_before = atomic_load(&test.n_taken);
		int status = ask_route(route, "");

		ck_assert_msg((status != 401) == is_open, "%s %s without a token: %d", route->method,
			route->path, status);
		if (is_open)
			continue;
		ck_assert_str_eq(kv_test_header(&response, "WWW-Authenticate"), "Bearer");
		ck_assert_int_eq(ask_route(route, BEARER(DATA)), 403);
		status = ask_route(route, BEARER(READ));
		ck_assert_msg((status != 403) == is_read, "%s %s with read: %d", route->method, route->path,
			status);
		if (!is_read)
			ck_assert_uint_eq(atomic_load(&test.n_taken), n_before);
		status = ask_route(route, BEARER(ADMIN));
		ck_assert_msg(status != 401 && status != 403, "%s %s with admin: %d", route->method,
			route->path, status);
	}
}
END_TEST

/* A mutating route needs admin, and a route that changes nothing does not: the table is the proof. */
START_TEST(test_http_access_table)
{
	for (size_t i = 0; i < srv_http_n_routes; i++) {
		const struct srv_http_route *route = &srv_http_routes[i];
		const bool is_get = strcmp(route->method, "GET") == 0;
		const bool is_plan = strcmp(route->path, "/v1/plan") == 0; /* only works numbers out */

		ck_assert_msg(is_get || is_plan || route->access == SRV_ACCESS_ADMIN, "%s %s", route->method,
			route->path);
	}
}
END_TEST

/* A body whose end another reader could see elsewhere is not read. */
START_TEST(test_http_access_two_lengths)
{
	static const char *const headers[] = { "Content-Length: 2\r\n", "Content-Length: 40\r\n",
		"Transfer-Encoding: chunked\r\n" };

	for (size_t i = 0; i < KV_LENGTH(headers); i++) {
		char all[256];

		snprintf(all, sizeof(all), "%s%s%s", BEARER(ADMIN), JSON_TYPE, headers[i]);
		ask("POST", "/v1/plan", all, "{}"); /* has a Content-Length of its own */
		ck_assert_int_eq(response.status, 400);
		ck_assert_ptr_nonnull(strstr(response.body, "Transfer-Encoding"));
	}
}
END_TEST

/* Paths that do not exist are not told to strangers. */
START_TEST(test_http_access_unknown_paths)
{
	ask("GET", "/v1/nothing", "", NULL);
	ck_assert_int_eq(response.status, 401);
	ask("PUT", "/v1/info", "", NULL);
	ck_assert_int_eq(response.status, 401);
	ask("GET", "/v1/nothing", BEARER(READ), NULL);
	ck_assert_int_eq(response.status, 404);
}
END_TEST

/* Other schemes, parts of tokens, two headers: none logs in. */
START_TEST(test_http_access_refuses_logins)
{
	static const struct {
		const char *headers;
		int status;
	} cases[] = {
		{ "Authorization: Basic " READ "\r\n", 401 },
		{ "Authorization: Bearer\r\n", 401 },
		{ "Authorization: Bearer read-token-012345678\r\n", 401 },
		{ "Authorization: " READ "\r\n", 401 },
		{ BEARER(READ) BEARER(READ), 400 },
		{ "authorization: bearer   " READ "\r\n", 200 },
	};

	for (size_t i = 0; i < KV_LENGTH(cases); i++) {
		ask("GET", "/v1/info", cases[i].headers, NULL);
		ck_assert_msg(
			response.status == cases[i].status, "%s: %d", cases[i].headers, response.status);
	}
}
END_TEST

/* After ten failures nobody at this address gets in for a while, not even with the right token; health stays.
 */
START_TEST(test_http_access_limits_failures)
{
	for (int i = 0; i < 10; i++) {
		ask("GET", "/v1/info", BEARER("wrong-token-0123456789"), NULL);
		ck_assert_int_eq(response.status, 401);
	}
	ask("GET", "/v1/info", BEARER(ADMIN), NULL);
	ck_assert_int_eq(response.status, 429);
	ck_assert_str_eq(kv_test_header(&response, "Retry-After"), "60");
	ck_assert_str_eq(kv_test_header(&response, "Content-Type"), "application/problem+json");
	ck_assert_ptr_nonnull(strstr(response.body, "\"status\":429"));
	ck_assert_ptr_nonnull(strstr(response.body, "\"code\":\"LIMIT\""));
	ask("GET", "/livez", "", NULL);
	ck_assert_int_eq(response.status, 200);
	ck_assert_uint_eq(atomic_load(&test.http->counters.logins_failed), 10);
	ck_assert_uint_eq(atomic_load(&test.http->counters.logins_limited), 1);
}
END_TEST

/* Rotating: a reload brings the new tokens and ends the old ones; a bad file changes nothing and is counted.
 */
START_TEST(test_http_access_rotation)
{
	kv_test_tokens_text = "admin ops new-" ADMIN "\n";
	ask("POST", "/v1/reload", BEARER(ADMIN) JSON_TYPE, "{}");
	ck_assert_msg(response.status == 200, "%s", response.body);
	ck_assert_ptr_nonnull(strstr(response.body, "\"generation\":2"));
	ask("GET", "/v1/info", BEARER(READ), NULL);
	ck_assert_int_eq(response.status, 401);
	ask("GET", "/v1/info", BEARER("new-" ADMIN), NULL);
	ck_assert_int_eq(response.status, 200);
	kv_test_tokens_text = "admin ops short\n";
	ask("POST", "/v1/reload", BEARER("new-" ADMIN) JSON_TYPE, "{}");
	ck_assert_int_eq(response.status, 400);
	ck_assert_ptr_nonnull(strstr(response.body, "line 1"));
	ask("GET", "/v1/info", BEARER("new-" ADMIN), NULL);
	ck_assert_int_eq(response.status, 200);
	ck_assert_uint_eq(atomic_load(&test.settings.n_failures), 1);
	ck_assert_uint_eq(atomic_load(&test.settings.n_reloads), 1);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("http_access");
	TCase *tcase = tcase_create("http_access");

	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_add_test(tcase, test_http_access_roles);
	tcase_add_test(tcase, test_http_access_table);
	tcase_add_test(tcase, test_http_access_two_lengths);
	tcase_add_test(tcase, test_http_access_unknown_paths);
	tcase_add_test(tcase, test_http_access_refuses_logins);
	tcase_add_test(tcase, test_http_access_limits_failures);
	tcase_add_test(tcase, test_http_access_rotation);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
