/*
 * The dashboard: one page, its style and its script, without anything from elsewhere. It only reads, so the
 * page itself needs no token; what it asks for does.
 */
#include <string.h>

#include "server/embedded.h"
#include "server/http_internal.h"

/* Nothing but this daemon may be loaded, asked, framed or sent to. */
#define POLICY                                                                                         \
	"default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; " \
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

const struct srv_embedded_file *srv_embedded_find(const char *name)
{
	for (unsigned i = 0; i < srv_embedded_files_length; i++) {
		if (strcmp(srv_embedded_files[i].name, name) == 0)
			return &srv_embedded_files[i];
	}
	return NULL;
}

static enum MHD_Result answer_file(struct srv_http_request *request, const char *name, const char *type)
{
	const struct srv_embedded_file *file = srv_embedded_find(name);

	KV_ASSERT(file);
	struct MHD_Response *response = MHD_create_response_from_buffer(
		file->n_bytes, (void *)(uintptr_t)file->bytes, MHD_RESPMEM_PERSISTENT);

	if (!response)
		return MHD_NO;
	const char *const headers[][2] = {
		{ MHD_HTTP_HEADER_CONTENT_TYPE, type },
		{ MHD_HTTP_HEADER_CACHE_CONTROL, "no-cache" },
		{ "Content-Security-Policy", POLICY },
		{ "X-Content-Type-Options", "nosniff" },
		{ "Referrer-Policy", "no-referrer" },
	};
	enum MHD_Result result = MHD_YES;

	for (size_t i = 0; result == MHD_YES && i < KV_LENGTH(headers); i++)
		result = MHD_add_response_header(response, headers[i][0], headers[i][1]);
	/* Never without its policy. */
	if (result == MHD_YES)
		result = MHD_queue_response(request->connection, MHD_HTTP_OK, response);
	srv_http_count(request, MHD_HTTP_OK);
	MHD_destroy_response(response);
	return result;
}

enum MHD_Result srv_http_answer_page(struct srv_http_request *request)
{
	return answer_file(request, "index.html", "text/html; charset=utf-8");
}

enum MHD_Result srv_http_answer_style(struct srv_http_request *request)
{
	return answer_file(request, "dashboard.css", "text/css; charset=utf-8");
}

enum MHD_Result srv_http_answer_script(struct srv_http_request *request)
{
	return answer_file(request, "dashboard.js", "text/javascript; charset=utf-8");
}
