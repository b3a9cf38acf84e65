#include <stdlib.h>
#include <string.h>

#include "proto/client/conn.h"
#include "proto/crc32c.h"

bool tqkv_buffer_take(struct tqkv_conn *conn, size_t n_bytes, struct tqkv_buffer *buffer)
{
	/* Steps of 4 KiB, at least one: frames of one kind differ by a few items. */
	const size_t capacity_bytes = (n_bytes | 1) + 4095 - (((n_bytes | 1) + 4095) & 4095);

	for (uint32_t spare_idx = conn->n_spare; spare_idx-- > 0;) {
		if (conn->spare[spare_idx].capacity_bytes < n_bytes)
			continue;
		*buffer = conn->spare[spare_idx];
		conn->n_spare--;
		memmove(&conn->spare[spare_idx], &conn->spare[spare_idx + 1],
			(conn->n_spare - spare_idx) * sizeof(conn->spare[0]));
		return true;
	}
	buffer->data = malloc(capacity_bytes);
	buffer->capacity_bytes = buffer->data ? capacity_bytes : 0;
	return buffer->data != NULL;
}

void tqkv_buffer_give(struct tqkv_conn *conn, struct tqkv_buffer *buffer)
{
	if (buffer->data && conn->n_spare == TQKV_SPARE_BUFFERS_MAX) {
		free(conn->spare[0].data);
		memmove(&conn->spare[0], &conn->spare[1], --conn->n_spare * sizeof(conn->spare[0]));
	}
	if (buffer->data)
		conn->spare[conn->n_spare++] = *buffer;
	*buffer = (struct tqkv_buffer){ 0 };
}

struct tqkv_request *tqkv_request_find(struct tqkv_conn *conn, uint64_t id)
{
	struct tqkv_request *request = &conn->requests[id & conn->requests_mask];

	return id != 0 && request->id == id ? request : NULL;
}

static void release(struct tqkv_request *request)
{
	struct tqkv_conn *conn = request->conn;

	tqkv_buffer_give(conn, &request->frame);
	tqkv_buffer_give(conn, &request->reply);
	if (conn->fetched == request)
		conn->fetched = NULL;
	conn->n_requests--;
	if (request->is_forgotten)
		conn->n_forgotten--;
	*request = (struct tqkv_request){ .conn = conn };
}

void tqkv_request_release_if_over(struct tqkv_request *request)
{
	if (request->is_done && request->is_forgotten && !request->is_queued)
		release(request);
}

void tqkv_request_end(struct tqkv_request *request, enum tqkv_status local, bool is_outcome_unknown)
{
	struct tqkv_conn *conn = request->conn;

	request->is_done = true;
	request->local = local;
	request->is_outcome_unknown = is_outcome_unknown;
	request->done_order = ++conn->n_done;
	conn->n_in_flight--;
	conn->in_flight_bytes -= request->header.body_bytes;
	if (!request->is_forgotten)
		conn->n_ready++;
	tqkv_request_release_if_over(request);
}

void tqkv_request_forget(struct tqkv_request *request)
{
	if (request->is_forgotten)
		return;
	request->is_forgotten = true;
	request->conn->n_forgotten++;
	if (request->is_done)
		request->conn->n_ready--;
	tqkv_request_release_if_over(request);
}

void tqkv_request_finish_fetched(struct tqkv_conn *conn)
{
	struct tqkv_request *request = conn->fetched;

	conn->fetched = NULL;
	if (request)
		tqkv_request_forget(request);
}

static uint32_t n_unfetched(const struct tqkv_conn *conn)
{
	return conn->n_requests - conn->n_forgotten;
}

static bool has_room(const struct tqkv_conn *conn, const struct tqkv_shape *shape, uint64_t body_bytes)
{
	const uint32_t entries_max =
		conn->options.requests_max + (shape->is_pipelined ? 0 : TQKV_REQUESTS_OWN);

	if (conn->n_requests >= entries_max)
		return false;
	/* One request is always allowed: a server whose bounds are below one frame would otherwise never get
	 * any. */
	return conn->n_in_flight == 0 ||
		(conn->n_in_flight < conn->server.inflight_requests_max &&
			conn->in_flight_bytes + body_bytes <= conn->server.inflight_bytes_max);
}

static enum tqkv_status await_room(struct tqkv_conn *conn, const struct tqkv_shape *shape,
	uint64_t body_bytes, int64_t deadline_ns, struct tqkv_error *err)
{
	while (conn->fd >= 0 && !has_room(conn, shape, body_bytes)) {
		if (shape->is_pipelined && n_unfetched(conn) >= conn->options.requests_max)
			return tqkv_fail(err, TQKV_LIMIT,
				"%u requests have not been fetched with tqkv_wait()", n_unfetched(conn));
		if (tqkv_conn_turn(conn, deadline_ns) == TQKV_DEADLINE && !has_room(conn, shape, body_bytes))
			return tqkv_fail(err, TQKV_DEADLINE,
				"no room among the requests in flight before the deadline");
	}
	if (conn->fd < 0) {
		if (err)
			*err = conn->failure;
		return conn->failure.status;
	}
	return TQKV_OK;
}

/* The next number whose entry is free: at least one is, because the table is larger than n_requests can get.
 */
static struct tqkv_request *free_entry(struct tqkv_conn *conn)
{
	do {
		conn->last_id++;
	} while (conn->last_id == 0 || conn->requests[conn->last_id & conn->requests_mask].id != 0);
	return &conn->requests[conn->last_id & conn->requests_mask];
}

enum tqkv_status tqkv_request_begin(struct tqkv_conn *conn, struct tqkv_session *session,
	const struct tqkv_shape *shape, int64_t room_deadline_ns, struct tqkv_request **out,
	struct tqkv_error *err)
{
	const uint64_t body_bytes =
		kvp_body_bytes(shape->op_bytes, shape->n_items, KVP_ITEM_BYTES, shape->payload_bytes);
	struct tqkv_buffer frame;

	tqkv_request_finish_fetched(conn);
	if (body_bytes > conn->server.frame_bytes_max ||
		shape->payload_bytes > conn->server.frame_bytes_max) {
		tqkv_fail(err, TQKV_TOO_LARGE, "the frame's body of %llu bytes is above frame_bytes_max %llu",
			(unsigned long long)body_bytes, (unsigned long long)conn->server.frame_bytes_max);
		if (err)
			err->scope = TQKV_SCOPE_REQUEST;
		return TQKV_TOO_LARGE;
	}

	const enum tqkv_status status = await_room(conn, shape, body_bytes, room_deadline_ns, err);

	if (status != TQKV_OK)
		return status;
	if (!tqkv_buffer_take(conn, KVP_HEADER_BYTES + (size_t)body_bytes, &frame))
		return tqkv_fail(err, TQKV_NO_MEMORY, "no memory for a frame of %llu bytes",
			(unsigned long long)body_bytes);

	struct tqkv_request *request = free_entry(conn);

	*request = (struct tqkv_request){
		.id = conn->last_id,
		.conn = conn,
		.session = session,
		.frame = frame,
		.frame_bytes = KVP_HEADER_BYTES + (size_t)body_bytes,
		.header = {
			.opcode = shape->opcode,
			.request_id = conn->last_id,
			.session = session ? session->info.handle : 0,
			.body_bytes = body_bytes,
			.op_bytes = shape->op_bytes,
			.n_items = (uint16_t)shape->n_items,
			.item_bytes = KVP_ITEM_BYTES,
		},
	};
	conn->n_requests++;
	memset(tqkv_request_body(request), 0,
		shape->payload_bytes ? kvp_payload_start(shape->op_bytes, shape->n_items, KVP_ITEM_BYTES)
				     : (size_t)body_bytes);
	*out = request;
	return TQKV_OK;
}

uint8_t *tqkv_request_body(const struct tqkv_request *request)
{
	return request->frame.data + KVP_HEADER_BYTES;
}

uint8_t *tqkv_request_payload(const struct tqkv_request *request)
{
	return tqkv_request_body(request) +
		kvp_payload_start(request->header.op_bytes, request->header.n_items, KVP_ITEM_BYTES);
}

void tqkv_request_submit(struct tqkv_request *request, int64_t deadline_ns)
{
	struct tqkv_conn *conn = request->conn;

	request->deadline_ns = deadline_ns;
	if (conn->options.flags & TQKV_OPTION_TIMINGS && conn->has_hello)
		request->header.flags |= KVP_FLAG_TIMINGS;
	if (conn->options.flags & TQKV_OPTION_BODY_CRC) {
		request->header.flags |= KVP_FLAG_BODY_CRC;
		request->header.body_crc =
			kvp_crc32c(0, tqkv_request_body(request), (size_t)request->header.body_bytes);
	}
	conn->n_in_flight++;
	conn->in_flight_bytes += request->header.body_bytes;
	request->is_queued = true;
	if (conn->send_last)
		conn->send_last->next = request;
	else
		conn->send_first = request;
	conn->send_last = request;
	tqkv_conn_flush(conn);
}

enum tqkv_status tqkv_request_await(struct tqkv_request *request, int64_t deadline_ns, struct tqkv_error *err)
{
	while (!request->is_done) {
		if (tqkv_conn_turn(request->conn, deadline_ns) == TQKV_DEADLINE && !request->is_done) {
			tqkv_fail(err, TQKV_DEADLINE, "no reply to %s in time",
				kvp_opcode_name(request->header.opcode));
			if (err)
				err->is_outcome_unknown = request->n_sent > 0;
			return TQKV_DEADLINE;
		}
	}
	return TQKV_OK;
}

/* Why a request ended without a reply. */
static enum tqkv_status fail_local(const struct tqkv_request *request, struct tqkv_error *err)
{
	if (request->local == TQKV_DEADLINE)
		tqkv_fail(err, TQKV_DEADLINE, "the deadline passed before %s could be sent",
			kvp_opcode_name(request->header.opcode));
	else if (err)
		*err = request->conn->failure;
	if (err) {
		/* After a reconnect `failure` may tell of a later loss; the status is this request's own. */
		err->status = request->local;
		err->is_outcome_unknown = request->is_outcome_unknown;
	}
	return request->local;
}

enum tqkv_status tqkv_request_fetch(struct tqkv_request *request, struct tqkv_reply *reply,
	union tqkv_reply_op *op, struct tqkv_error *err)
{
	struct tqkv_conn *conn = request->conn;
	const struct tqkv_asked asked = {
		.header = &request->header,
		.body = tqkv_request_body(request),
		.geometry = request->session ? &request->session->geometry : NULL,
	};
	struct tqkv_error error;
	enum tqkv_status status;

	tqkv_request_finish_fetched(conn);
	conn->fetched = request;
	memset(reply, 0, sizeof(*reply));
	if (request->local != TQKV_OK) {
		status = fail_local(request, err);
	} else {
		status = tqkv_reply_decode(
			&asked, &request->reply_header, request->reply.data, &conn->space, reply, op, &error);
		if (status != TQKV_OK && err)
			*err = error;
		if (status != TQKV_OK && error.is_local) {
			if (err)
				err->is_outcome_unknown = true;
			tqkv_conn_lose(conn, &error);
		}
	}
	reply->request_id = request->id;
	reply->op = request->header.opcode;
	return status;
}

enum tqkv_status tqkv_call(struct tqkv_conn *conn, struct tqkv_session *session,
	const struct tqkv_shape *shape, void (*fill)(struct tqkv_request *request, const void *arg),
	const void *arg, int64_t deadline_ns, struct tqkv_reply *reply, union tqkv_reply_op *op,
	struct tqkv_error *err)
{
	struct tqkv_request *request;
	enum tqkv_status status = tqkv_request_begin(conn, session, shape, deadline_ns, &request, err);

	if (status != TQKV_OK)
		return status;
	if (fill)
		fill(request, arg);
	/* HELLO has the server's own five seconds. */
	tqkv_request_submit(request, conn->has_hello ? deadline_ns : 0);
	status = tqkv_request_await(request, deadline_ns, err);
	if (status != TQKV_OK) {
		tqkv_request_forget(request);
		return status;
	}
	return tqkv_request_fetch(request, reply, op, err);
}
