/*
 * Handlers of the control API's routes, for the table in http_routes.c. HTTP thread. Views are in
 * http_views.h. Each route_<topic>.c holds the routes of one topic.
 */
#ifndef SERVER_ROUTES_H
#define SERVER_ROUTES_H

#include "server/http_internal.h"

/* Answer without the loop. */
enum MHD_Result srv_route_live(struct srv_http_request *request);
enum MHD_Result srv_route_config(struct srv_http_request *request);
enum MHD_Result srv_route_log_level(struct srv_http_request *request);
enum MHD_Result srv_route_log_level_set(struct srv_http_request *request);
enum MHD_Result srv_route_snapshots(struct srv_http_request *request);
enum MHD_Result srv_route_snapshot_delete(struct srv_http_request *request);
enum MHD_Result srv_route_openapi(struct srv_http_request *request);

/* Read names and body into the call. */
enum kv_status srv_route_pool_create(
	struct srv_http_request *request, struct srv_control *control, struct kv_error *err);
enum kv_status srv_route_pool_name(
	struct srv_http_request *request, struct srv_control *control, struct kv_error *err);
enum kv_status srv_route_prefix(
	struct srv_http_request *request, struct srv_control *control, struct kv_error *err);
enum kv_status srv_route_tenant(
	struct srv_http_request *request, struct srv_control *control, struct kv_error *err);
enum kv_status srv_route_tenant_set(
	struct srv_http_request *request, struct srv_control *control, struct kv_error *err);
enum kv_status srv_route_session(
	struct srv_http_request *request, struct srv_control *control, struct kv_error *err);
enum kv_status srv_route_sequence(
	struct srv_http_request *request, struct srv_control *control, struct kv_error *err);
enum kv_status srv_route_plan(
	struct srv_http_request *request, struct srv_control *control, struct kv_error *err);

enum kv_status srv_route_snapshot(
	struct srv_http_request *request, struct srv_control *control, struct kv_error *err);
enum kv_status srv_route_restore(
	struct srv_http_request *request, struct srv_control *control, struct kv_error *err);
enum kv_status srv_route_reload(
	struct srv_http_request *request, struct srv_control *control, struct kv_error *err);

/* UNAVAILABLE with a reason, or just a reason: not ready. Any other status speaks for itself. */
enum MHD_Result srv_route_not_ready(struct srv_http_request *request, const struct srv_control *control);

#endif
