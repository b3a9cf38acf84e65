/* GET /v1/openapi.json: the control API's own description, OpenAPI 3.1. */
#include "core/memory.h"
#include "server/embedded.h"
#include "server/routes.h"

enum MHD_Result srv_route_openapi(struct srv_http_request *request)
{
	const struct srv_embedded_file *file = srv_embedded_find("openapi.json");

	KV_ASSERT(file);
	char *copy = kv_strndup((const char *)file->bytes, file->n_bytes);

	if (!copy)
		return srv_http_refuse(request, KV_NO_MEMORY, NULL);
	return srv_http_queue(request, MHD_HTTP_OK, SRV_TYPE_JSON, copy, file->n_bytes);
}
