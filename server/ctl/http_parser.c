/*
 * The sans-I/O half of the HTTP client. Lines are collected in parser->line, which bounds them; body bytes go
 * straight to parser->body, which grows by doubling and is bounded. Every state consumes at least one byte or
 * moves to another state, so feeding ends.
 */
#include <ctype.h>
#include <string.h>
#include <strings.h>

#include "core/memory.h"
#include "server/ctl/http_client.h"

#define BODY_BYTES_FIRST 4096u

void srv_http_parser_init(struct srv_http_parser *parser)
{
	*parser = (struct srv_http_parser){ .state = SRV_HTTP_STATUS_LINE };
}

void srv_http_parser_finish(struct srv_http_parser *parser)
{
	kv_free(parser->body);
	*parser = (struct srv_http_parser){ .state = SRV_HTTP_STATUS_LINE };
}

static enum kv_status append_body(
	struct srv_http_parser *parser, const uint8_t *bytes, size_t n_bytes, struct kv_error *err)
{
	const uint64_t needed_bytes = parser->body_bytes + n_bytes + 1;

	if (n_bytes == 0)
		return KV_OK;
	if (needed_bytes - 1 > SRV_HTTP_BODY_BYTES_MAX)
		return kv_fail(err, KV_TOO_LARGE, "a reply body above %u bytes", SRV_HTTP_BODY_BYTES_MAX);
	if (needed_bytes > parser->body_capacity_bytes) {
		uint64_t capacity_bytes = BODY_BYTES_FIRST;

		while (capacity_bytes < needed_bytes)
			capacity_bytes *= 2;
		char *body = kv_alloc((size_t)capacity_bytes, 1);

		if (!body)
			return kv_fail(err, KV_NO_MEMORY, "no memory for a reply body");
		if (parser->body)
			memcpy(body, parser->body, (size_t)parser->body_bytes);
		kv_free(parser->body);
		parser->body = body;
		parser->body_capacity_bytes = capacity_bytes;
	}
	memcpy(parser->body + parser->body_bytes, bytes, n_bytes);
	parser->body_bytes += n_bytes;
	parser->body[parser->body_bytes] = '\0';
	return KV_OK;
}

static enum kv_status parse_status_line(struct srv_http_parser *parser, struct kv_error *err)
{
	const char *line = parser->line;
	const bool is_http =
		strncmp(line, "HTTP/1.", 7) == 0 && (line[7] == '0' || line[7] == '1') && line[8] == ' ';

	if (!is_http)
		return kv_fail(err, KV_CORRUPT, "the reply is not HTTP/1.x: '%.60s'", line);
	parser->code = 0;
	for (uint32_t i = 9; i < 12; i++) {
		if (!isdigit((unsigned char)line[i]))
			return kv_fail(err, KV_CORRUPT, "the reply has no status code: '%.60s'", line);
		parser->code = parser->code * 10 + (uint32_t)(line[i] - '0');
	}
	if (parser->code < 100 || (line[12] != ' ' && line[12] != '\0'))
		return kv_fail(err, KV_CORRUPT, "the reply has no status code: '%.60s'", line);
	parser->state = SRV_HTTP_HEADER;
	parser->is_chunked = false;
	parser->has_length = false;
	return KV_OK;
}

/* Digits of a base only, at most `max`. The empty text is no number. */
static bool parse_digits(const char *text, size_t n_chars, uint32_t base, uint64_t max, uint64_t *out)
{
	uint64_t value = 0;

	if (n_chars == 0)
		return false;
	for (size_t i = 0; i < n_chars; i++) {
		const int c = tolower((unsigned char)text[i]);
		const uint32_t digit = c >= '0' && c <= '9' ? (uint32_t)(c - '0')
			: c >= 'a' && c <= 'f'              ? (uint32_t)(c - 'a' + 10)
							    : 99u;

		if (digit >= base)
			return false;
		value = value * base + digit;
		if (value > max)
			return false;
	}
	*out = value;
	return true;
}

static enum kv_status parse_length(struct srv_http_parser *parser, const char *value, struct kv_error *err)
{
	uint64_t length;

	if (!parse_digits(value, strlen(value), 10, UINT64_MAX / 16, &length))
		return kv_fail(err, KV_CORRUPT, "the reply has the Content-Length '%.40s'", value);
	if (parser->has_length && length != parser->n_left)
		return kv_fail(err, KV_CORRUPT, "the reply has two Content-Lengths that differ");
	if (length > SRV_HTTP_BODY_BYTES_MAX)
		return kv_fail(err, KV_TOO_LARGE, "a reply body of %llu bytes, above %u",
			(unsigned long long)length, SRV_HTTP_BODY_BYTES_MAX);
	parser->has_length = true;
	parser->n_left = length;
	return KV_OK;
}

static enum kv_status parse_header_line(struct srv_http_parser *parser, struct kv_error *err)
{
	char *colon = strchr(parser->line, ':');

	if (!colon || colon == parser->line)
		return kv_fail(err, KV_CORRUPT, "the reply has the header line '%.60s'", parser->line);
	*colon = '\0';
	char *value = colon + 1 + strspn(colon + 1, " \t");

	for (size_t n = strlen(value); n > 0 && (value[n - 1] == ' ' || value[n - 1] == '\t'); n--)
		value[n - 1] = '\0';
	if (strcasecmp(parser->line, "Content-Length") == 0)
		return parse_length(parser, value, err);
	if (strcasecmp(parser->line, "Transfer-Encoding") == 0) {
		if (strcasecmp(value, "chunked") != 0 || parser->is_chunked)
			return kv_fail(
				err, KV_UNSUPPORTED, "the reply has the Transfer-Encoding '%.40s'", value);
		parser->is_chunked = true;
	}
	return KV_OK;
}

/* The empty line behind the headers: how the body is delimited. */
static enum kv_status end_headers(struct srv_http_parser *parser, struct kv_error *err)
{
	if (parser->is_chunked && parser->has_length)
		return kv_fail(err, KV_CORRUPT, "the reply has a Content-Length and is chunked");
	if (parser->code < 200) {
		parser->state = SRV_HTTP_STATUS_LINE;
		parser->has_length = false;
		return KV_OK;
	}
	if (parser->code == 204 || parser->code == 304)
		parser->state = SRV_HTTP_DONE;
	else if (parser->is_chunked)
		parser->state = SRV_HTTP_CHUNK_SIZE;
	else if (parser->has_length)
		parser->state = parser->n_left == 0 ? SRV_HTTP_DONE : SRV_HTTP_BODY_LENGTH;
	else
		parser->state = SRV_HTTP_BODY_CLOSE;
	return KV_OK;
}

/* "1a2b" or "1a2b;extension". */
static enum kv_status parse_chunk_size(struct srv_http_parser *parser, struct kv_error *err)
{
	const size_t n_chars = strcspn(parser->line, "; \t");

	if (!parse_digits(parser->line, n_chars, 16, SRV_HTTP_BODY_BYTES_MAX, &parser->n_left))
		return kv_fail(err, KV_CORRUPT, "the reply has the chunk size '%.40s'", parser->line);
	parser->state = parser->n_left == 0 ? SRV_HTTP_TRAILER : SRV_HTTP_CHUNK_DATA;
	return KV_OK;
}

static enum kv_status take_line(struct srv_http_parser *parser, struct kv_error *err)
{
	const bool is_empty = parser->line[0] == '\0';

	/* Chunk lines are bounded by the body's bound; the others are counted. */
	if (parser->state == SRV_HTTP_STATUS_LINE || parser->state == SRV_HTTP_HEADER ||
		parser->state == SRV_HTTP_TRAILER) {
		if (parser->n_lines == SRV_HTTP_LINES_MAX)
			return kv_fail(err, KV_TOO_LARGE, "the reply has more than %u header lines",
				SRV_HTTP_LINES_MAX);
		parser->n_lines++;
	}
	switch (parser->state) {
	case SRV_HTTP_STATUS_LINE:
		return parse_status_line(parser, err);
	case SRV_HTTP_HEADER:
		return is_empty ? end_headers(parser, err) : parse_header_line(parser, err);
	case SRV_HTTP_CHUNK_SIZE:
		return parse_chunk_size(parser, err);
	case SRV_HTTP_CHUNK_END:
		if (!is_empty)
			return kv_fail(err, KV_CORRUPT, "the reply has a chunk that is longer than its size");
		parser->state = SRV_HTTP_CHUNK_SIZE;
		return KV_OK;
	case SRV_HTTP_TRAILER:
		if (is_empty)
			parser->state = SRV_HTTP_DONE;
		return KV_OK;
	case SRV_HTTP_BODY_LENGTH:
	case SRV_HTTP_BODY_CLOSE:
	case SRV_HTTP_CHUNK_DATA:
	case SRV_HTTP_DONE:
		break;
	}
	return KV_OK;
}

/* One character of a line. The line ends with LF; a CR before it is dropped, other control characters are
 * refused. */
static enum kv_status feed_line(struct srv_http_parser *parser, uint8_t c, struct kv_error *err)
{
	if (c == '\n') {
		if (parser->line_bytes > 0 && parser->line[parser->line_bytes - 1] == '\r')
			parser->line_bytes--;
		parser->line[parser->line_bytes] = '\0';
		parser->line_bytes = 0;
		return take_line(parser, err);
	}
	if ((c < 0x20 && c != '\t' && c != '\r') || c == 0x7F)
		return kv_fail(err, KV_CORRUPT, "the reply has the control character %u in its header", c);
	if (parser->line_bytes == SRV_HTTP_LINE_BYTES_MAX)
		return kv_fail(err, KV_TOO_LARGE, "the reply has a header line above %u bytes",
			SRV_HTTP_LINE_BYTES_MAX);
	parser->line[parser->line_bytes++] = (char)c;
	return KV_OK;
}

enum kv_status srv_http_parser_feed(struct srv_http_parser *parser, const uint8_t *bytes, size_t n_bytes,
	size_t *n_used, struct kv_error *err)
{
	size_t used = 0;

	while (used < n_bytes && parser->state != SRV_HTTP_DONE) {
		const bool is_counted =
			parser->state == SRV_HTTP_BODY_LENGTH || parser->state == SRV_HTTP_CHUNK_DATA;
		const bool is_body = is_counted || parser->state == SRV_HTTP_BODY_CLOSE;
		size_t take = n_bytes - used;
		enum kv_status status;

		if (is_counted && take > parser->n_left)
			take = (size_t)parser->n_left;
		if (!is_body)
			take = 1;
		status = is_body ? append_body(parser, bytes + used, take, err)
				 : feed_line(parser, bytes[used], err);
		if (status != KV_OK)
			return status;
		used += take;
		if (is_counted) {
			parser->n_left -= take;
			if (parser->n_left == 0)
				parser->state = parser->is_chunked ? SRV_HTTP_CHUNK_END : SRV_HTTP_DONE;
		}
	}
	*n_used = used;
	return KV_OK;
}

enum kv_status srv_http_parser_end(struct srv_http_parser *parser, struct kv_error *err)
{
	if (parser->state == SRV_HTTP_BODY_CLOSE)
		parser->state = SRV_HTTP_DONE;
	if (parser->state == SRV_HTTP_DONE)
		return KV_OK;
	if (parser->state == SRV_HTTP_STATUS_LINE && parser->line_bytes == 0 && parser->n_lines == 0)
		return kv_fail(err, KV_CORRUPT, "the connection ended without a reply");
	return kv_fail(err, KV_CORRUPT, "the connection ended inside the reply");
}
