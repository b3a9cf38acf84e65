/*
 * The control API from outside: routes, refusals and headers. A fake loop thread answers the mailbox; the
 * client is a raw socket. Lifetimes (timeouts, lost clients, shutdown) are in test_http_lifetime.c.
 */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "core/checked.h"
#include "core/memory.h"
#include "tests/lib/kv_test.h"
#include "tests/lib/kv_test_http.h"

static struct kv_test_http test;
static struct kv_test_response response;

static void setup(void)
{
	kv_test_http_begin(&test, "127.0.0.1:0", false);
}

static void teardown(void)
{
	kv_test_http_end(&test);
}

static void ask(const char *method, const char *path, const char *headers, const char *body)
{
	kv_test_ask(&test, method, path, headers, body, &response);
}

static void assert_header(const char *name, const char *expected)
{
	const char *value = kv_test_header(&response, name);

	ck_assert_msg(value && strcmp(value, expected) == 0, "%s: %s, expected %s", name,
		value ? value : "(none)", expected);
}

static void assert_has(const char *text, const char *part)
{
	ck_assert_msg(strstr(text, part) != NULL, "'%s' does not hold '%s'", text, part);
}

/* The last answer is a problem of this kind whose detail holds `part`. */
static void assert_problem(int status, const char *code, const char *part)
{
	char member[64];

	ck_assert_msg(response.status == status, "status %d, expected %d: %s", response.status, status,
		response.body);
	assert_header("Content-Type", "application/problem+json");
	snprintf(member, sizeof(member), "\"status\":%d,", status);
	assert_has(response.body, member);
	snprintf(member, sizeof(member), "\"code\":\"%s\"}", code);
	assert_has(response.body, member);
	assert_has(response.body, "{\"type\":\"about:blank\",\"title\":\"");
	assert_has(response.body, part);
	json_t *json = json_loadb(response.body, response.body_bytes, JSON_REJECT_DUPLICATES, NULL);

	ck_assert_ptr_nonnull(json);
	json_decref(json);
}

/* Every GET route asks the loop for its own snapshot and answers JSON that nobody may keep. */
START_TEST(test_http_get_routes)
{
	static const struct {
		const char *path;
		enum srv_control_kind kind;
		const char *part;
	} routes[] = {
		{ "/readyz", SRV_CONTROL_READY, "{\"status\":\"ready\",\"is_deep\":false}\n" },
		{ "/v1/info", SRV_CONTROL_INFO, "\"backend\":\"cpu\"" },
		{ "/v1/pools", SRV_CONTROL_POOLS, "{\"pools\":[{\"name\":\"smol\"" },
		{ "/v1/occupancy", SRV_CONTROL_OCCUPANCY, "\"totals\":{\"n_pools\":1" },
		{ "/v1/sessions", SRV_CONTROL_SESSIONS, "\"cursor_next\":\"64\"}\n" },
		{ "/v1/sessions/00ab000000000001", SRV_CONTROL_SESSION, "{\"session\":{\"id\":" },
		{ "/v1/connections", SRV_CONTROL_CONNECTIONS, "{\"connections\":[],\"cursor_next\":null}\n" },
	};

	for (size_t i = 0; i < KV_LENGTH(routes); i++) {
		ask("GET", routes[i].path, "", NULL);
		ck_assert_int_eq(response.status, 200);
		assert_header("Content-Type", "application/json");
		assert_header("Cache-Control", "no-store");
		assert_header("X-Content-Type-Options", "nosniff");
		ck_assert(!response.is_closing);
		assert_has(response.body, routes[i].part);
		ck_assert_int_eq(kv_test_http_asked(&test).kind, routes[i].kind);
		ck_assert_ptr_null(kv_test_header(&response, "Access-Control-Allow-Origin"));
	}
	ck_assert_uint_eq(kv_test_http_asked(&test).n_rows_max, 64);
}
END_TEST

/* /metrics is Prometheus text 0.0.4 with the io's name. */
START_TEST(test_http_metrics_route)
{
	ask("GET", "/metrics", "", NULL);
	ck_assert_int_eq(response.status, 200);
	assert_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8");
	assert_has(response.body, "\ntqkv_io_backend{name=\"epoll\"} 1\n");
	assert_has(response.body, "\ntqkv_pool_tokens{device=\"cpu\",pool=\"smol\"} 0\n");
	ck_assert_int_eq(kv_test_http_asked(&test).kind, SRV_CONTROL_METRICS);
}
END_TEST

/* HEAD answers as GET does, without the body. */
START_TEST(test_http_head)
{
	static const char *const paths[] = { "/livez", "/readyz", "/metrics", "/v1/info", "/v1/config" };
	char length[256];

	for (size_t i = 0; i < KV_LENGTH(paths); i++) {
		ask("GET", paths[i], "", NULL);
		ck_assert_int_eq(response.status, 200);
		snprintf(length, sizeof(length), "%s", kv_test_header(&response, "Content-Length"));
		ask("HEAD", paths[i], "", NULL);
		ck_assert_int_eq(response.status, 200);
		if (i > 0) /* /livez holds a time */
			assert_header("Content-Length", length);
		ck_assert_uint_eq(response.body_bytes, 0);
	}
	ask("HEAD", "/nothing", "", NULL);
	ck_assert_int_eq(response.status, 404);
}
END_TEST

/* One connection serves many requests, refused ones included, and requests that come in one packet. */
START_TEST(test_http_keeps_connections_open)
{
	static const char requests[] =
		"GET /v1/info HTTP/1.1\r\nHost: localhost\r\n\r\n"
		"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n"
		"POST /v1/pools HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\n{}\n"
		"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n";
	static const int expected[] = { 200, 404, 415, 200 };
	const int fd = kv_test_connect(&test);

	ck_assert(kv_test_send(fd, requests, sizeof(requests) - 1));
	for (size_t i = 0; i < KV_LENGTH(expected); i++) {
		kv_test_receive(fd, false, &response);
		ck_assert_int_eq(response.status, expected[i]);
		ck_assert(!response.is_closing);
	}
	close(fd);
}
END_TEST

/* A path that is none is told, whatever bytes it has. */
START_TEST(test_http_not_found)
{
	static const char *const paths[] = { "/v1", "/v1/", "/livez/", "/v1/pools/", "/v1/pools/a/b",
		"/v1/sessions/", "/v1/sessions/00ab000000000001/x", "/LIVEZ", "//livez", "/v1/../livez",
		"/%6civez", "/v1/pools/%00", "/v1/pools/a%zz", "/\xff\xfe", "/v1/environment",
		"/v1/occupancy2", "/metrics%00" };

	for (size_t i = 0; i < KV_LENGTH(paths); i++) {
		ask("GET", paths[i], "", NULL);
		assert_problem(404, "NOT_FOUND", "there is nothing at '");
		assert_has(response.body, "; /v1/openapi.json lists what there is\"");
		ck_assert_ptr_null(kv_test_header(&response, "Allow"));
	}
	ck_assert_uint_eq(atomic_load(&test.n_taken), 0);
}
END_TEST

/* A method that a path does not know is refused with those that it knows; OPTIONS gives no cross-origin
 * leave. */
START_TEST(test_http_method_not_allowed)
{
	static const struct {
		const char *method, *path, *allow;
	} cases[] = {
		{ "POST", "/livez", "GET, HEAD" },
		{ "DELETE", "/v1/pools", "GET, HEAD, POST" },
		{ "PUT", "/v1/pools", "GET, HEAD, POST" },
		{ "POST", "/v1/pools/smol", "GET, HEAD, DELETE" },
		{ "PUT", "/v1/sessions/00ab000000000001", "GET, HEAD, DELETE" },
		{ "OPTIONS", "/v1/pools", "GET, HEAD, POST" },
		{ "TRACE", "/metrics", "GET, HEAD" },
		{ "get", "/metrics", "GET, HEAD" },
		{ "BREW", "/v1/config", "GET, HEAD" },
	};

	for (size_t i = 0; i < KV_LENGTH(cases); i++) {
		ask(cases[i].method, cases[i].path, "Origin: http://evil.example\r\n", NULL);
		assert_problem(405, "METHOD_NOT_ALLOWED", "is not possible here");
		assert_header("Allow", cases[i].allow);
		ck_assert_ptr_null(kv_test_header(&response, "Access-Control-Allow-Origin"));
	}
	ck_assert_uint_eq(atomic_load(&test.n_taken), 0);
}
END_TEST

/* limit, cursor and deep reach the loop as numbers. */
START_TEST(test_http_parameters)
{
	ask("GET", "/v1/sessions?limit=256&cursor=18446744073709551000", "", NULL);
	ck_assert_int_eq(response.status, 200);
	ck_assert_uint_eq(kv_test_http_asked(&test).n_rows_max, 256);
	ck_assert_uint_eq(kv_test_http_asked(&test).cursor, 18446744073709551000u);
	ask("GET", "/v1/connections?cursor=5&limit=%31", "", NULL);
	ck_assert_int_eq(response.status, 200);
	ck_assert_uint_eq(kv_test_http_asked(&test).n_rows_max, 1);
	ask("GET", "/v1/sessions/00AB00000000000f?cursor=9", "", NULL);
	ck_assert_int_eq(response.status, 200);
	ck_assert_uint_eq(kv_test_http_asked(&test).id, 0x00AB00000000000F);
	ck_assert_uint_eq(kv_test_http_asked(&test).cursor, 9);
	ask("GET", "/readyz?deep=1", "", NULL);
	ck_assert_int_eq(response.status, 200);
	ck_assert(kv_test_http_asked(&test).is_deep);
	ask("GET", "/readyz?deep=0", "", NULL);
	ck_assert(!kv_test_http_asked(&test).is_deep);
}
END_TEST

/* A parameter that is unknown, doubled or out of range is refused before the loop hears of it. */
START_TEST(test_http_refuses_parameters)
{
	static const struct {
		const char *path, *part;
	} cases[] = {
		{ "/v1/sessions?limit=0", "limit: '0' is not accepted, expected a number from 1 to 256" },
		{ "/v1/sessions?limit=257", "from 1 to 256" },
		{ "/v1/sessions?limit=-1", "from 1 to 256" },
		{ "/v1/sessions?limit=", "from 1 to 256" },
		{ "/v1/sessions?limit", "from 1 to 256" },
		{ "/v1/sessions?limit=1e1", "from 1 to 256" },
		{ "/v1/sessions?limit=+1", "from 1 to 256" },
		{ "/v1/sessions?limit=1%00", "from 1 to 256" },
		{ "/v1/sessions?limit=00000000000000000000000000000000001", "from 1 to 256" },
		{ "/v1/sessions?limit=1&limit=2", "limit is given twice" },
		{ "/v1/sessions?cursor=18446744073709551616", "the cursor_next of an earlier answer" },
		{ "/v1/sessions?cursor=99999999999999999999999999999",
			"the cursor_next of an earlier answer" },
		{ "/v1/sessions?cursor=\xff", "the cursor_next of an earlier answer" },
		{ "/v1/sessions?cursor=0x10", "the cursor_next of an earlier answer" },
		{ "/v1/sessions?offset=1", "this path has no parameter 'offset'" },
		{ "/v1/sessions?Limit=1", "this path has no parameter 'Limit'" },
		{ "/v1/pools?limit=1", "this path has no parameter 'limit'" },
		{ "/livez?x", "this path has no parameter 'x'" },
		{ "/readyz?deep=2", "expected 0 or 1" },
		{ "/readyz?deep=true", "expected 0 or 1" },
		{ "/readyz?depth=1", "this path has no parameter 'depth'" },
		{ "/v1/sessions/xyz", "session id 'xyz': expected 16 hex digits" },
		{ "/v1/sessions/0x00ab0000000001", "expected 16 hex digits" },
		{ "/v1/sessions/00ab0000000000011", "expected 16 hex digits" },
	};

	for (size_t i = 0; i < KV_LENGTH(cases); i++) {
		ask("GET", cases[i].path, "", NULL);
		assert_problem(400, "BAD_ARG", cases[i].part);
	}
	ck_assert_uint_eq(atomic_load(&test.n_taken), 0);
}
END_TEST

/* Only the bound address and loopback may stand in Host, so a name that points here (DNS rebinding) gets
 * nothing. */
START_TEST(test_http_host)
{
	static const char *const good[] = { "127.0.0.1", "127.0.0.1:7871", "LOCALHOST:1", "[::1]:7871",
		"127.9.9.9" };
	static const char *const bad[] = { "evil.example", "evil.example:7871", "10.0.0.1", "0.0.0.0",
		"[::2]", "" };
	char line[128];

	for (size_t i = 0; i < KV_LENGTH(good); i++) {
		snprintf(line, sizeof(line), "Host: %s\r\n", good[i]);
		ask("GET", "/v1/info", line, NULL);
		ck_assert_int_eq(response.status, 200);
	}
	const unsigned n_taken = atomic_load(&test.n_taken);

	for (size_t i = 0; i < KV_LENGTH(bad); i++) {
		snprintf(line, sizeof(line), "Host: %s\r\n", bad[i]);
		ask("GET", "/v1/info", line, NULL);
		assert_problem(403, "FORBIDDEN",
			"is neither the bound address nor a loopback address nor http_name");
		ask("GET", "/nothing", line, NULL);
		assert_problem(403, "FORBIDDEN", "Host '");
	}
	ask("GET", "/v1/info", "Host: localhost\r\nHost: localhost\r\n", NULL);
	ck_assert_int_eq(response.status, 400);
	ck_assert_uint_eq(atomic_load(&test.n_taken), n_taken);
}
END_TEST

/* With --insecure any literal address may stand in Host, names still not. */
START_TEST(test_http_host_insecure)
{
	kv_test_http_end(&test);
	kv_test_http_begin(&test, "0.0.0.0:0", true);
	ask("GET", "/v1/info", "Host: 10.1.2.3:7871\r\n", NULL);
	ck_assert_int_eq(response.status, 200);
	ask("GET", "/v1/info", "Host: evil.example\r\n", NULL);
	assert_problem(403, "FORBIDDEN", "evil.example");
}
END_TEST

/* Pages of other origins change nothing; programs (no Origin) and our own page do. */
START_TEST(test_http_origin)
{
	static const char *const foreign[] = { "http://evil.example", "null", "http://localhost:3000", "" };
	char line[128];

	for (size_t i = 0; i < KV_LENGTH(foreign); i++) {
		snprintf(line, sizeof(line), JSON_TYPE "Origin: %s\r\n", foreign[i]);
		ask("POST", "/v1/pools", line, SMOL);
		assert_problem(403, "FORBIDDEN", "is foreign");
		ask("DELETE", "/v1/pools/smol", line, NULL);
		assert_problem(403, "FORBIDDEN", "is foreign");
	}
	ck_assert_uint_eq(atomic_load(&test.n_taken), 0);
	ask("DELETE", "/v1/pools/smol", "Host: localhost:7871\r\nOrigin: http://localhost:7871\r\n", NULL);
	ck_assert_int_eq(response.status, 204);
	ask("GET", "/v1/info", "Origin: http://evil.example\r\n", NULL);
	ck_assert_int_eq(response.status, 200);
	ck_assert_ptr_null(kv_test_header(&response, "Access-Control-Allow-Origin"));
}
END_TEST

/* A pool is made from one JSON object; the answer names where it is. */
START_TEST(test_http_pool_create)
{
	ask("POST", "/v1/pools", JSON_TYPE, SMOL);
	ck_assert_msg(response.status == 201, "%d: %s", response.status, response.body);
	assert_header("Location", "/v1/pools/smol");
	assert_header("Content-Type", "application/json");
	ck_assert_str_eq(response.body, "{\"name\":\"smol\"}\n");
	ck_assert_int_eq(kv_test_http_asked(&test).kind, SRV_CONTROL_POOL_CREATE);
	ck_assert(kv_test_http_asked(&test).has_spec);
	ck_assert_str_eq(kv_test_http_asked(&test).name, "smol");
	kv_test_http_set_answer(&test, KV_EXISTS, "pool 'smol' exists");
	ask("POST", "/v1/pools", "Content-Type: Application/JSON; charset=utf-8\r\n", SMOL);
	assert_problem(409, "EXISTS", "\"detail\":\"pool 'smol' exists\"");
	ck_assert_ptr_null(kv_test_header(&response, "Location"));
}
END_TEST

/* A body that is no pool is refused with its place before the loop hears of it. */
START_TEST(test_http_pool_create_refuses_bodies)
{
	static const struct {
		const char *body, *part;
	} cases[] = {
		{ "", "the body is empty" },
		{ "{\"name\":\"smol\",\n \"layers\":}", "line 2, column 11" },
		{ "{\"name\":\"a\",\"name\":\"b\"}", "duplicate" },
		{ "[]", "expected an object" },
		{ "{\"name\":\"\xff\"}", "line 1, column " },
		{ "{\"name\":\"smol\",\"layers\":0}", "layers" },
		{ "{} trailing", "line 1, column " },
	};

	for (size_t i = 0; i < KV_LENGTH(cases); i++) {
		ask("POST", "/v1/pools", JSON_TYPE, cases[i].body);
		assert_problem(400, "BAD_CONFIG", cases[i].part);
	}
	ck_assert_uint_eq(atomic_load(&test.n_taken), 0);
}
END_TEST

/* A body that is not declared to be JSON is not read: a form on another page cannot send one that is. */
START_TEST(test_http_media_type)
{
	static const char *const types[] = { "", "Content-Type: text/plain\r\n",
		"Content-Type: application/x-www-form-urlencoded\r\n",
		"Content-Type: application/jsonx\r\n" };

	for (size_t i = 0; i < KV_LENGTH(types); i++) {
		ask("POST", "/v1/pools", types[i], SMOL);
		assert_problem(415, "UNSUPPORTED_MEDIA_TYPE", "application/json");
	}
	ask("POST", "/v1/pools", JSON_TYPE "Content-Type: text/plain\r\n", SMOL);
	assert_problem(400, "BAD_ARG", "once each");
	ck_assert_uint_eq(atomic_load(&test.n_taken), 0);
}
END_TEST

/* Nothing to misread: a POST without a body needs no type. A form says its type even when it is empty. */
START_TEST(test_http_no_body_no_media_type)
{
	ask("POST", "/v1/self-test", "", NULL);
	ck_assert_int_eq(response.status, 200);
	ask("POST", "/v1/self-test", "Content-Length: 0\r\n", NULL);
	ck_assert_int_eq(response.status, 200);
	ask("POST", "/v1/pools", "", NULL);
	assert_problem(400, "BAD_CONFIG", "the body is empty");
	ask("POST", "/v1/self-test", "Content-Type: application/x-www-form-urlencoded\r\n", NULL);
	assert_problem(415, "UNSUPPORTED_MEDIA_TYPE", "application/json");
	ask("POST", "/v1/self-test", "Origin: http://elsewhere.example\r\n", NULL);
	assert_problem(403, "FORBIDDEN", "foreign");
}
END_TEST

/* Deleting answers without a body; what the loop refuses is told. */
START_TEST(test_http_pool_delete)
{
	ask("DELETE", "/v1/pools/a.b:c_d-%65", "", NULL);
	ck_assert_int_eq(response.status, 204);
	ck_assert_uint_eq(response.body_bytes, 0);
	ck_assert_int_eq(kv_test_http_asked(&test).kind, SRV_CONTROL_POOL_DELETE);
	ck_assert_str_eq(kv_test_http_asked(&test).name, "a.b:c_d-e");
	const unsigned n_taken = atomic_load(&test.n_taken);

	ask("DELETE", "/v1/pools/a%20b", "", NULL);
	assert_problem(404, "NOT_FOUND", "'a b' cannot be the name of a pool");
	ask("DELETE", "/v1/pools/%2e%2e%2f", "", NULL);
	assert_problem(404, "NOT_FOUND", "cannot be the name");
	ask("DELETE", "/v1/pools/smol%00x", "", NULL);
	assert_problem(404, "NOT_FOUND", "there is nothing at");
	ck_assert_uint_eq(atomic_load(&test.n_taken), n_taken);
	kv_test_http_set_answer(&test, KV_BAD_STATE, "pool 'smol' has 2 sessions");
	ask("DELETE", "/v1/pools/smol", "", NULL);
	assert_problem(409, "BAD_STATE", "pool 'smol' has 2 sessions");
}
END_TEST

/* Every status of the loop becomes the HTTP code of its row in the status table, with its name as code. */
START_TEST(test_http_statuses)
{
#define STATUS(name, number, scope, retryable, http, text)                      \
	if ((number) != 0) {                                                    \
		kv_test_http_set_answer(&test, KV_##name, "");                  \
		ask("GET", "/v1/occupancy", "", NULL);                          \
		assert_problem(http, #name, "\"detail\":\"" text "\"");         \
		ck_assert((kv_test_header(&response, "Retry-After") != NULL) == \
			((http) == 503 || (http) == 429));                      \
	}
	KV_STATUS_MAP(STATUS)
#undef STATUS
}
END_TEST

/* /livez looks at the loop's last turn and never asks it. */
START_TEST(test_http_live)
{
	ask("GET", "/livez", "", NULL);
	ck_assert_int_eq(response.status, 200);
	assert_has(response.body, "{\"status\":\"alive\",\"turn_age_ms\":");
	ck_assert_uint_eq(atomic_load(&test.n_taken), 0);
	/* The loop ends, and its last turn grows old. */
	kv_test_http_end_loop(&test);
	const uint64_t now_ns = kv_clock_now_ns(kv_clock_system());

	atomic_store(&test.pulse.turn_ns, 0);
	ask("GET", "/livez", "", NULL);
	ck_assert_int_eq(response.status, 200);
	atomic_store(
		&test.pulse.turn_ns, now_ns + 1000000000); /* a turn between the two looks at the clock */
	ask("GET", "/livez", "", NULL);
	ck_assert_int_eq(response.status, 200);
	/* A clock that began less than 6 s ago has no such past. */
	if (now_ns > 7000000000) {
		atomic_store(&test.pulse.turn_ns, now_ns - 6000000000);
		ask("GET", "/livez", "", NULL);
		assert_problem(503, "NO_ANSWER", "the event loop has not turned for 60");
		atomic_store(&test.pulse.turn_ns, now_ns - 2000000000);
		ask("GET", "/livez", "", NULL);
		ck_assert_int_eq(response.status, 200);
	}
}
END_TEST

/* /readyz says why it is not ready. */
START_TEST(test_http_ready)
{
	kv_test_http_set_answer(&test, KV_OK, "the known-answer decode was wrong at layer 3");
	ask("GET", "/readyz", "", NULL);
	assert_problem(503, "NOT_READY", "\"detail\":\"the known-answer decode was wrong at layer 3\"");
	assert_header("Retry-After", "1");
	kv_test_http_set_answer(&test, KV_UNAVAILABLE, "no self-test yet");
	ask("GET", "/readyz", "", NULL);
	assert_problem(503, "NOT_READY", "\"detail\":\"no self-test yet\"");
	kv_test_http_set_answer(&test, KV_DEVICE_LOST, "cuda device 0 is gone");
	ask("GET", "/readyz?deep=1", "", NULL);
	assert_problem(503, "DEVICE_LOST", "cuda device 0 is gone");
	kv_test_http_set_answer(&test, KV_OK, "");
	ask("GET", "/readyz", "", NULL);
	ck_assert_int_eq(response.status, 200);
}
END_TEST

/* The configuration is shown as a file would hold it, and nothing of the environment with it. */
START_TEST(test_http_config)
{
	json_error_t error;

	setenv("TQKV_TOKEN", "hunter2", 1);
	setenv("SECRET_KEY", "hunter2", 1);
	ask("GET", "/v1/config", "", NULL);
	ck_assert_int_eq(response.status, 200);
	assert_header("Content-Type", "application/json");
	ck_assert_ptr_null(strstr(response.body, "hunter2"));
	json_t *json = json_loads(response.body, JSON_REJECT_DUPLICATES, &error);
	json_t *expected = srv_options_to_json(&test.options);

	ck_assert_ptr_nonnull(json);
	ck_assert(json_equal(json, expected));
	json_decref(json);
	json_decref(expected);
	ck_assert_uint_eq(atomic_load(&test.n_taken), 0);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("http");
	TCase *tcase = tcase_create("http");

	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_set_timeout(tcase, 60);
	tcase_add_test(tcase, test_http_get_routes);
	tcase_add_test(tcase, test_http_metrics_route);
	tcase_add_test(tcase, test_http_head);
	tcase_add_test(tcase, test_http_keeps_connections_open);
	tcase_add_test(tcase, test_http_not_found);
	tcase_add_test(tcase, test_http_method_not_allowed);
	tcase_add_test(tcase, test_http_parameters);
	tcase_add_test(tcase, test_http_refuses_parameters);
	tcase_add_test(tcase, test_http_host);
	tcase_add_test(tcase, test_http_host_insecure);
	tcase_add_test(tcase, test_http_origin);
	tcase_add_test(tcase, test_http_pool_create);
	tcase_add_test(tcase, test_http_pool_create_refuses_bodies);
	tcase_add_test(tcase, test_http_media_type);
	tcase_add_test(tcase, test_http_no_body_no_media_type);
	tcase_add_test(tcase, test_http_pool_delete);
	tcase_add_test(tcase, test_http_statuses);
	tcase_add_test(tcase, test_http_live);
	tcase_add_test(tcase, test_http_ready);
	tcase_add_test(tcase, test_http_config);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
