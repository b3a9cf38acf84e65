/*
 * HTTP client of the control API: one request, one reply, one connection.
 *
 * The parser does no I/O: bytes go in as they arrive, cut anywhere, and a status and a body come out, or an
 * error that says what is wrong with the reply. Understood: HTTP/1.0 and 1.1, Content-Length, chunked, or a
 * body that ends with the connection; interim 1xx replies are skipped. Refused: both lengths at once, two
 * lengths that differ, other transfer codings, anything beyond the bounds below. One thread.
 */
#ifndef SERVER_CTL_HTTP_CLIENT_H
#define SERVER_CTL_HTTP_CLIENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/clock.h"
#include "core/error.h"
#include "server/ctl/tls.h"

#define SRV_HTTP_LINE_BYTES_MAX 4096u /* status line, header line, chunk size line */
#define SRV_HTTP_LINES_MAX      256u  /* header and trailer lines, interim replies included */
/* The largest page of the API is a /metrics of many pools, far below 1 MiB. */
#define SRV_HTTP_BODY_BYTES_MAX (16u << 20)

enum srv_http_state {
	SRV_HTTP_STATUS_LINE,
	SRV_HTTP_HEADER,
	SRV_HTTP_BODY_LENGTH, /* n_left bytes to come */
	SRV_HTTP_BODY_CLOSE,  /* until the connection ends */
	SRV_HTTP_CHUNK_SIZE,
	SRV_HTTP_CHUNK_DATA, /* n_left bytes to come */
	SRV_HTTP_CHUNK_END,  /* the empty line behind a chunk */
	SRV_HTTP_TRAILER,
	SRV_HTTP_DONE,
};

struct srv_http_parser {
	enum srv_http_state state;
	bool is_chunked, has_length;
	uint32_t code;
	uint32_t n_lines;
	uint32_t line_bytes;
	uint64_t n_left;
	char *body; /* zero byte behind it; NULL while empty */
	uint64_t body_bytes, body_capacity_bytes;
	char line[SRV_HTTP_LINE_BYTES_MAX + 1];
};

void srv_http_parser_init(struct srv_http_parser *parser);
void srv_http_parser_finish(struct srv_http_parser *parser);
/* Takes bytes until the reply is complete; *n_used says how many it took. CORRUPT, TOO_LARGE or NO_MEMORY. */
KV_MUST_CHECK enum kv_status srv_http_parser_feed(struct srv_http_parser *parser, const uint8_t *bytes,
	size_t n_bytes, size_t *n_used, struct kv_error *err);
/* The connection ended: OK when the reply is complete, which state DONE says afterwards. */
KV_MUST_CHECK enum kv_status srv_http_parser_end(struct srv_http_parser *parser, struct kv_error *err);

struct srv_http_reply {
	uint32_t code;
	char *body; /* zero byte behind it; never NULL after OK */
	uint64_t body_bytes;
};
void srv_http_reply_finish(struct srv_http_reply *reply);

/* Who is asked, and how. */
struct srv_http_target {
	const char *address; /* "HOST:PORT", "[HOST]:PORT", with "http://" or "https://" in front if wanted */
	const char *token;   /* NULL or "": none */
	struct srv_tls_trust trust; /* for https:// */
	uint32_t timeout_ms;        /* for the whole of a request */
};

/* A port from 1 to 65535 behind a host, with a scheme or without. */
bool srv_http_address_is_valid(const char *address);
/* "http://" or "https://", and what stands behind it. */
const char *srv_http_scheme(const char *address);
const char *srv_http_authority(const char *address);
/*
 * Sends one request and waits at most timeout_ms for the whole reply. `json` NULL: no body.
 * The text of a failure begins with method and address. Any code is OK here: callers look at reply->code.
 */
KV_MUST_CHECK enum kv_status srv_http_request(const struct srv_http_target *target, const char *method,
	const char *path, const char *json, struct srv_http_reply *reply, struct kv_error *err);

#endif
