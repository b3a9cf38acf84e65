/*
 * Pipelining: one frame per call, replies fetched later and in any order.
 */
#include <stdlib.h>
#include <string.h>

#include "proto/client/rows.h"

static int64_t server_deadline_ns(uint32_t timeout_ms)
{
	return timeout_ms ? tqkv_deadline_ns(timeout_ms) : 0;
}

enum tqkv_status tqkv_submit(struct tqkv_session *session, const struct tqkv_shape *shape,
	void (*fill)(struct tqkv_request *request, const void *arg), const void *arg, uint32_t timeout_ms,
	uint64_t *request_id, struct tqkv_error *err)
{
	if (!session || !request_id)
		return tqkv_fail_null(err, "session, request_id");

	struct tqkv_request *request;
	enum tqkv_status status = tqkv_session_check(session, err);

	if (status == TQKV_OK)
		status = tqkv_request_begin(session->conn, session, shape,
			tqkv_conn_deadline_ns(session->conn, timeout_ms), &request, err);
	if (status != TQKV_OK)
		return status;
	fill(request, arg);
	*request_id = request->id;
	tqkv_request_submit(request, server_deadline_ns(timeout_ms));
	return TQKV_OK;
}

/* All items whole in one frame. */
static enum tqkv_status submit_call(
	const struct tqkv_rows_call *call, uint32_t timeout_ms, uint64_t *request_id, struct tqkv_error *err)
{
	if (!request_id)
		return tqkv_fail_null(err, "request_id");

	const struct tqkv_rows *rows = call->rows;
	const bool has_rows = tqkv_op_has_rows(call->op);
	const int64_t deadline_ns = tqkv_conn_deadline_ns(call->session->conn, timeout_ms);
	struct tqkv_frame frame = {
		.op = call->op,
		.layer_first = rows->layer_first,
		.n_layers = rows->n_layers,
		.n_pieces = rows->n_items,
		.n_tokens = call->n_tokens,
		.n_q = call->n_q,
	};
	uint64_t token_at = 0, q_at = 0;
	struct tqkv_request *request;
	enum tqkv_status status;

	for (uint32_t item_idx = 0; item_idx < rows->n_items && item_idx < KVP_ITEMS_MAX; item_idx++) {
		const struct tqkv_item *item = &rows->items[item_idx];

		frame.pieces[item_idx] = (struct tqkv_piece){
			.item_idx = item_idx,
			.position = tqkv_op_has_position(call->op) ? item->position : 0,
			.n_tokens = has_rows ? item->n_tokens : 0,
			.q_len = has_rows ? item->q_len : 0,
			.flags = has_rows ? item->flags : 0,
			.is_last = true,
			.token_at = token_at,
			.q_at = q_at,
		};
		token_at += frame.pieces[item_idx].n_tokens;
		q_at += frame.pieces[item_idx].q_len;
	}
	/* More than KVP_ITEMS_MAX items: TOO_LARGE. */
	status = tqkv_frame_begin(call, &frame, true, deadline_ns, &request, err);
	if (status != TQKV_OK)
		return status;
	*request_id = request->id;
	tqkv_request_submit(request, server_deadline_ns(timeout_ms));
	return TQKV_OK;
}

enum tqkv_status tqkv_submit_rows(struct tqkv_session *session, enum tqkv_op op, const struct tqkv_rows *rows,
	uint32_t timeout_ms, uint64_t *request_id, struct tqkv_error *err)
{
	struct tqkv_rows_call call;
	enum tqkv_status status;

	if (op != TQKV_OP_APPEND && op != TQKV_OP_DECODE && op != TQKV_OP_APPEND_DECODE)
		return tqkv_fail(err, TQKV_BAD_ARG, "operation %d has no rows", op);
	status = tqkv_rows_check(session, op, rows, &call, err);
	return status == TQKV_OK ? submit_call(&call, timeout_ms, request_id, err) : status;
}

enum tqkv_status tqkv_submit_append(struct tqkv_session *session, const struct tqkv_rows *rows,
	uint32_t timeout_ms, uint64_t *request_id, struct tqkv_error *err)
{
	return tqkv_submit_rows(session, TQKV_OP_APPEND, rows, timeout_ms, request_id, err);
}

enum tqkv_status tqkv_submit_decode(struct tqkv_session *session, const struct tqkv_rows *rows,
	uint32_t timeout_ms, uint64_t *request_id, struct tqkv_error *err)
{
	return tqkv_submit_rows(session, TQKV_OP_DECODE, rows, timeout_ms, request_id, err);
}

enum tqkv_status tqkv_submit_append_decode(struct tqkv_session *session, const struct tqkv_rows *rows,
	uint32_t timeout_ms, uint64_t *request_id, struct tqkv_error *err)
{
	return tqkv_submit_rows(session, TQKV_OP_APPEND_DECODE, rows, timeout_ms, request_id, err);
}

enum tqkv_status tqkv_submit_items(struct tqkv_session *session, enum tqkv_op op,
	const struct tqkv_item *items, uint32_t n_items, uint32_t timeout_ms, uint64_t *request_id,
	struct tqkv_error *err)
{
	struct tqkv_rows_call call;
	struct tqkv_rows rows;
	enum tqkv_status status;

	if (op != TQKV_OP_TRUNCATE && op != TQKV_OP_FREE && op != TQKV_OP_SPILL && op != TQKV_OP_PREFETCH)
		return tqkv_fail(
			err, TQKV_BAD_ARG, "operation %d is not TRUNCATE, FREE, SPILL or PREFETCH", op);
	status = tqkv_items_check(session, op, items, NULL, n_items, &rows, &call, err);
	return status == TQKV_OK ? submit_call(&call, timeout_ms, request_id, err) : status;
}

enum tqkv_status tqkv_submit_fork(struct tqkv_session *session, const struct tqkv_item *items,
	const uint64_t *parents, uint32_t n_items, uint32_t timeout_ms, uint64_t *request_id,
	struct tqkv_error *err)
{
	struct tqkv_rows_call call;
	struct tqkv_rows rows;
	enum tqkv_status status;

	if (!parents)
		return tqkv_fail(err, TQKV_BAD_ARG, "there are no parents");
	status = tqkv_items_check(session, TQKV_OP_FORK, items, parents, n_items, &rows, &call, err);
	return status == TQKV_OK ? submit_call(&call, timeout_ms, request_id, err) : status;
}

/* ---- Fetching ---- */

/* The oldest reply that nobody fetched; NULL: none. */
static struct tqkv_request *find_ready(struct tqkv_conn *conn)
{
	struct tqkv_request *oldest = NULL;

	if (conn->n_ready == 0)
		return NULL;
	for (uint64_t entry_idx = 0; entry_idx <= conn->requests_mask; entry_idx++) {
		struct tqkv_request *request = &conn->requests[entry_idx];

		if (request->id != 0 && request->is_done && !request->is_forgotten &&
			(!oldest || request->done_order < oldest->done_order))
			oldest = request;
	}
	return oldest;
}

static enum tqkv_status await_any(
	struct tqkv_conn *conn, int64_t deadline_ns, struct tqkv_request **out, struct tqkv_error *err)
{
	if (conn->n_requests == conn->n_forgotten)
		return tqkv_fail(err, TQKV_NOT_FOUND, "no request is outstanding");
	while (conn->n_ready == 0)
		if (tqkv_conn_turn(conn, deadline_ns) == TQKV_DEADLINE && conn->n_ready == 0)
			return tqkv_fail(err, TQKV_DEADLINE, "no reply in time");
	*out = find_ready(conn);
	return TQKV_OK;
}

enum tqkv_status tqkv_wait(struct tqkv_conn *conn, uint64_t request_id, uint32_t timeout_ms,
	struct tqkv_reply *reply, struct tqkv_error *err)
{
	if (!conn || !reply)
		return tqkv_fail_null(err, "conn, reply");

	const int64_t deadline_ns = tqkv_conn_deadline_ns(conn, timeout_ms);
	struct tqkv_request *request = NULL;
	enum tqkv_status status;

	tqkv_request_finish_fetched(conn);
	reply->request_id = 0;
	if (request_id == TQKV_ANY) {
		status = await_any(conn, deadline_ns, &request, err);
	} else {
		request = tqkv_request_find(conn, request_id);
		if (!request || request->is_forgotten)
			return tqkv_fail(err, TQKV_NOT_FOUND, "request %llu is not outstanding",
				(unsigned long long)request_id);
		status = tqkv_request_await(request, deadline_ns, err);
	}
	return status == TQKV_OK ? tqkv_request_fetch(request, reply, NULL, err) : status;
}

uint32_t tqkv_poll(struct tqkv_conn *conn)
{
	if (!conn)
		return 0;

	tqkv_request_finish_fetched(conn);
	if (conn->fd >= 0)
		(void)tqkv_conn_turn(conn, 0);
	return conn->n_ready;
}

void tqkv_forget(struct tqkv_conn *conn, uint64_t request_id)
{
	struct tqkv_request *request;

	if (!conn)
		return;
	tqkv_request_finish_fetched(conn);
	request = tqkv_request_find(conn, request_id);
	if (request)
		tqkv_request_forget(request);
}
