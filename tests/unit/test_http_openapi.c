/*
 * The description of the control API and the table of routes say the same: every route is described, every
 * description is a route, with the same parameters, role and status.
 */
#include <ctype.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "core/checked.h"
#include "server/embedded.h"
#include "server/http_internal.h"
#include "tests/lib/kv_test.h"

static json_t *document;

static void setup(void)
{
	const struct srv_embedded_file *file = srv_embedded_find("openapi.json");
	json_error_t error;

	ck_assert_ptr_nonnull(file);
	document = json_loadb((const char *)file->bytes, file->n_bytes, JSON_REJECT_DUPLICATES, &error);
	ck_assert_msg(document != NULL, "line %d: %s", error.line, error.text);
}

static void teardown(void)
{
	json_decref(document);
}

static json_t *operation_of(const struct srv_http_route *route)
{
	char method[8] = "";

	for (size_t i = 0; route->method[i] && i + 1 < sizeof(method); i++)
		method[i] = (char)tolower((unsigned char)route->method[i]);
	return json_object_get(json_object_get(json_object_get(document, "paths"), route->path), method);
}

static const char *access_name(enum srv_http_access access)
{
	return access == SRV_ACCESS_OPEN ? "open" : access == SRV_ACCESS_READ ? "read" : "admin";
}

/* Every route is described, with its role and its status. */
START_TEST(test_http_openapi_has_every_route)
{
	for (size_t i = 0; i < srv_http_n_routes; i++) {
		const struct srv_http_route *route = &srv_http_routes[i];
		const json_t *operation = operation_of(route);
		char status[8];

		ck_assert_msg(
			json_is_object(operation), "%s %s is not described", route->method, route->path);
		ck_assert_msg(strcmp(json_string_value(json_object_get(operation, "x-role")),
				      access_name(route->access)) == 0,
			"%s %s: another role", route->method, route->path);
		snprintf(status, sizeof(status), "%u", route->success);
		ck_assert_msg(json_object_get(json_object_get(operation, "responses"), status) != NULL,
			"%s %s: no status %s", route->method, route->path, status);
	}
}
END_TEST

/* Nothing is described that is no route. */
START_TEST(test_http_openapi_has_nothing_else)
{
	size_t n_operations = 0;
	const char *path;
	json_t *item;

	json_object_foreach (json_object_get(document, "paths"), path, item)
		n_operations += json_object_size(item);
	ck_assert_uint_eq(n_operations, srv_http_n_routes);
}
END_TEST

static bool takes(const json_t *operation, const char *name)
{
	char wanted[64];
	size_t idx;
	json_t *parameter;

	snprintf(wanted, sizeof(wanted), "#/components/parameters/%s", name);
	json_array_foreach (json_object_get(operation, "parameters"), idx, parameter)
		if (strcmp(json_string_value(json_object_get(parameter, "$ref")), wanted) == 0)
			return true;
	return false;
}

/* Parameters behind the '?' are those that the route reads. */
START_TEST(test_http_openapi_parameters)
{
	static const struct {
		const char *name;
		enum srv_http_param param;
	} params[] = {
		{ "limit", SRV_PARAM_PAGE },
		{ "cursor", SRV_PARAM_PAGE },
		{ "deep", SRV_PARAM_DEEP },
		{ "tenant", SRV_PARAM_TENANT },
		{ "sort", SRV_PARAM_SORT },
		{ "group", SRV_PARAM_GROUP },
	};

	for (size_t i = 0; i < srv_http_n_routes; i++) {
		const struct srv_http_route *route = &srv_http_routes[i];
		const json_t *operation = operation_of(route);

		for (size_t k = 0; k < KV_LENGTH(params); k++)
			ck_assert_msg(
				takes(operation, params[k].name) == ((route->params & params[k].param) != 0),
				"%s %s: parameter %s", route->method, route->path, params[k].name);
	}
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("http_openapi");
	TCase *tcase = tcase_create("http_openapi");

	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_add_test(tcase, test_http_openapi_has_every_route);
	tcase_add_test(tcase, test_http_openapi_has_nothing_else);
	tcase_add_test(tcase, test_http_openapi_parameters);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
