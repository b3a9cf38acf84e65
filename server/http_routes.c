/*
 * Every route of the control API, one row each: who may ask, with which parameters, what is asked of the
 * loop, and how the answer looks. server/openapi.json describes the same routes; a test compares both.
 *
 * No route tells the environment, contents of files, or secrets.
 */
#include "server/http_internal.h"
#include "server/http_views.h"
#include "server/routes.h"

#define ROUTE(method, path, access, params, success, kind, prepare, view)                            \
	{                                                                                            \
		method, path, SRV_ACCESS_##access, params, success, SRV_CONTROL_##kind, false, NULL, \
			prepare, view                                                                \
	}
/* The body holds a pool. */
#define TAKES_POOL(method, path, access, success, kind, prepare, view)                                       \
	{                                                                                                    \
		method, path, SRV_ACCESS_##access, 0, success, SRV_CONTROL_##kind, true, NULL, prepare, view \
	}
/* Answered by the control thread alone. */
#define LOCAL(method, path, access, success, answer)                                        \
	{                                                                                   \
		method, path, SRV_ACCESS_##access, 0, success, 0, false, answer, NULL, NULL \
	}

const struct srv_http_route srv_http_routes[] = {
	/* health */
	LOCAL("GET", "/livez", OPEN, 200, srv_route_live),
	ROUTE("GET", "/readyz", OPEN, SRV_PARAM_DEEP, 200, READY, NULL, srv_view_ready),
	ROUTE("POST", "/v1/self-test", ADMIN, 0, 200, SELF_TEST, NULL, srv_view_self_test),
	/* The view of /metrics needs the options as well: srv_http_finish() calls it. */
	ROUTE("GET", "/metrics", READ, 0, 200, METRICS, NULL, NULL),
	/* what runs */
	LOCAL("GET", "/", OPEN, 200, srv_http_answer_page),
	LOCAL("GET", "/dashboard.css", OPEN, 200, srv_http_answer_style),
	LOCAL("GET", "/dashboard.js", OPEN, 200, srv_http_answer_script),
	LOCAL("GET", "/v1/openapi.json", OPEN, 200, srv_route_openapi),
	ROUTE("GET", "/v1/info", READ, 0, 200, INFO, NULL, srv_view_info),
	LOCAL("GET", "/v1/config", READ, 200, srv_route_config),
	LOCAL("GET", "/v1/log-level", READ, 200, srv_route_log_level),
	LOCAL("PUT", "/v1/log-level", ADMIN, 200, srv_route_log_level_set),
	/* what occupies the memory */
	ROUTE("GET", "/v1/occupancy", READ, 0, 200, OCCUPANCY, NULL, srv_view_occupancy),
	ROUTE("GET", "/v1/pools", READ, 0, 200, POOLS, NULL, srv_view_pools),
	TAKES_POOL(
		"POST", "/v1/pools", ADMIN, 201, POOL_CREATE, srv_route_pool_create, srv_view_pool_created),
	ROUTE("GET", "/v1/pools/{name}", READ, 0, 200, POOL, srv_route_pool_name, srv_view_pool),
	ROUTE("DELETE", "/v1/pools/{name}", ADMIN, 0, 204, POOL_DELETE, srv_route_pool_name, NULL),
	TAKES_POOL("POST", "/v1/plan", READ, 200, PLAN, srv_route_plan, srv_view_plan),
	/* who */
	ROUTE("GET", "/v1/sessions", READ, SRV_PARAM_PAGE | SRV_PARAM_TENANT | SRV_PARAM_SORT, 200, SESSIONS,
		NULL, srv_view_sessions),
	ROUTE("GET", "/v1/sessions/{id}", READ, SRV_PARAM_PAGE, 200, SESSION, srv_route_session,
		srv_view_session),
	ROUTE("DELETE", "/v1/sessions/{id}", ADMIN, 0, 204, SESSION_DELETE, srv_route_session, NULL),
	ROUTE("GET", "/v1/sessions/{id}/sequences/{sequence}", READ, SRV_PARAM_PAGE | SRV_PARAM_GROUP, 200,
		SEQUENCE, srv_route_sequence, srv_view_sequence),
	ROUTE("GET", "/v1/tenants", READ, SRV_PARAM_PAGE, 200, TENANTS, NULL, srv_view_tenants),
	ROUTE("GET", "/v1/tenants/{tenant}", READ, 0, 200, TENANT, srv_route_tenant, srv_view_tenant),
	ROUTE("PUT", "/v1/tenants/{tenant}", ADMIN, 0, 200, TENANT_SET, srv_route_tenant_set,
		srv_view_tenant),
	ROUTE("DELETE", "/v1/tenants/{tenant}", ADMIN, 0, 204, TENANT_CLEAR, srv_route_tenant, NULL),
	ROUTE("GET", "/v1/prefixes", READ, SRV_PARAM_PAGE | SRV_PARAM_TENANT | SRV_PARAM_PREFIX_SORT, 200,
		PREFIXES, NULL, srv_view_prefixes),
	ROUTE("GET", "/v1/prefixes/{id}", READ, 0, 200, PREFIX, srv_route_prefix, srv_view_prefix),
	ROUTE("DELETE", "/v1/prefixes/{id}", ADMIN, 0, 204, PREFIX_DELETE, srv_route_prefix, NULL),
	ROUTE("GET", "/v1/connections", READ, SRV_PARAM_PAGE, 200, CONNECTIONS, NULL, srv_view_connections),
	/* what an operator does */
	ROUTE("GET", "/v1/audit", ADMIN, 0, 200, AUDIT, NULL, srv_view_audit),
	ROUTE("GET", "/v1/snapshot", READ, 0, 200, CHECKPOINT, NULL, srv_view_checkpoint),
	ROUTE("POST", "/v1/snapshot", ADMIN, 0, 202, SNAPSHOT, srv_route_snapshot, srv_view_checkpoint),
	LOCAL("GET", "/v1/snapshots", READ, 200, srv_route_snapshots),
	LOCAL("DELETE", "/v1/snapshots/{name}", ADMIN, 204, srv_route_snapshot_delete),
	ROUTE("POST", "/v1/restore", ADMIN, 0, 202, RESTORE, srv_route_restore, srv_view_checkpoint),
	ROUTE("POST", "/v1/reload", ADMIN, 0, 200, RELOADED, srv_route_reload, srv_view_reload),
	ROUTE("POST", "/v1/drain", ADMIN, 0, 202, DRAIN, NULL, srv_view_drain),
};
const size_t srv_http_n_routes = KV_LENGTH(srv_http_routes);
