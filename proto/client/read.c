/*
 * READ of any size. Rows come layer by layer and token by token in the order of the output, so every reply is
 * appended to what is there; packed rows, whose size only the server knows, need nothing more.
 */
#include <string.h>

#include "proto/client/conn.h"

static void fill_read(struct tqkv_request *request, const void *arg)
{
	kvp_read_req_encode(arg, tqkv_request_body(request));
}

static const struct tqkv_shape read_shape = { .opcode = KVP_OP_READ, .op_bytes = KVP_BYTES(read_req) };

static struct kvp_read_req read_req(const struct tqkv_read *read)
{
	return (struct kvp_read_req){
		.sequence = read->sequence,
		.layer_first = read->layer_first,
		.n_layers = read->n_layers,
		.position = read->position,
		.n_tokens = read->n_tokens,
		.k_dtype = read->k_dtype,
		.v_dtype = read->v_dtype,
		.flags = read->flags,
	};
}

static enum tqkv_status check(
	const struct tqkv_session *session, const struct tqkv_read *read, struct tqkv_error *err)
{
	const enum tqkv_status status = tqkv_session_check(session, err);

	if (status != TQKV_OK)
		return status;
	if (read->n_layers == 0 || read->layer_first >= session->info.n_layers ||
		read->n_layers > session->info.n_layers - read->layer_first)
		return tqkv_fail(err, TQKV_BAD_ARG, "layers %u + %u, the pool has %u", read->layer_first,
			read->n_layers, session->info.n_layers);
	if (read->n_tokens == 0)
		return tqkv_fail(err, TQKV_BAD_ARG, "n_tokens is 0");
	if (!kvp_dtype_is_known(read->k_dtype) || !kvp_dtype_is_known(read->v_dtype) ||
		(read->k_dtype == TQKV_NONE && read->v_dtype == TQKV_NONE))
		return tqkv_fail(err, TQKV_BAD_ARG, "dtypes %u and %u", read->k_dtype, read->v_dtype);
	return TQKV_OK;
}

/* How many tokens to ask for at once. A packed row is smaller than its numbers in float32 and some scales. */
static uint32_t tokens_fit(const struct tqkv_session *session, const struct kvp_read_req *req)
{
	const struct tqkv_session_info *info = &session->info;
	const uint64_t frame_bytes_max = session->conn->server.frame_bytes_max;
	const uint32_t head_dim = req->k_dtype ? info->k_head_dim : info->v_head_dim;
	const uint64_t packed_bytes = (uint64_t)info->kv_heads * (head_dim * sizeof(float) + 64);
	uint64_t n;

	if (req->k_dtype != TQKV_PACKED && req->v_dtype != TQKV_PACKED)
		return kvp_read_tokens_fit(req, &session->geometry, frame_bytes_max);
	n = (frame_bytes_max - KVP_BYTES(read_reply)) / packed_bytes;
	/* The server's TOO_LARGE says more than we could. */
	return n > 0 ? (uint32_t)n : 1;
}

/* Where the rows go next. */
struct cursor {
	uint8_t *at;
	uint64_t left_bytes;
	uint64_t n_bytes;
};

static enum tqkv_status append_rows(
	struct cursor *cursor, const void *rows, uint64_t n_bytes, const char *what, struct tqkv_error *err)
{
	if (n_bytes > cursor->left_bytes)
		return tqkv_fail(err, TQKV_BAD_ARG,
			"the buffer for %s is too small: %llu bytes more are needed", what,
			(unsigned long long)(n_bytes - cursor->left_bytes));
	if (n_bytes == 0)
		return TQKV_OK; /* the buffer may be absent: no arithmetic on NULL */
	memcpy(cursor->at, rows, (size_t)n_bytes);
	cursor->at += n_bytes;
	cursor->left_bytes -= n_bytes;
	cursor->n_bytes += n_bytes;
	return TQKV_OK;
}

struct transfer {
	struct tqkv_session *session;
	int64_t deadline_ns;
	struct cursor k, v;
	uint64_t fingerprint;
	uint32_t n_recoveries;
	struct tqkv_backoff backoff;
};

/* One request, repeated while the server is busy. */
static enum tqkv_status ask(struct transfer *transfer, const struct kvp_read_req *req,
	struct tqkv_reply *reply, struct tqkv_error *err)
{
	struct tqkv_conn *conn = transfer->session->conn;
	struct tqkv_error error;

	for (;;) {
		enum tqkv_status status = tqkv_session_check(transfer->session, &error);

		if (status == TQKV_OK)
			status = tqkv_call(conn, transfer->session, &read_shape, fill_read, req,
				transfer->deadline_ns, reply, NULL, &error);
		if (status == TQKV_OK)
			return status;
		if (tqkv_conn_recover(conn, status, &transfer->n_recoveries, transfer->deadline_ns, &error))
			continue;
		if (error.is_retryable && !error.is_local &&
			tqkv_backoff_pause(
				&transfer->backoff, conn, error.retry_after_ms, transfer->deadline_ns))
			continue;
		if (err)
			*err = error;
		return status;
	}
}

static enum tqkv_status transfer_range(
	struct transfer *transfer, const struct kvp_read_req *range, uint32_t n_fit, struct tqkv_error *err)
{
	struct kvp_read_req req = *range;
	uint32_t n_done = 0;

	while (n_done < range->n_tokens) {
		struct tqkv_reply reply;
		enum tqkv_status status;

		req.position = range->position + n_done;
		req.n_tokens = range->n_tokens - n_done < n_fit ? range->n_tokens - n_done : n_fit;
		status = ask(transfer, &req, &reply, err);
		if (status != TQKV_OK)
			return status;
		if (reply.n_tokens == 0 || (reply.n_tokens != req.n_tokens && req.n_layers > 1))
			return tqkv_fail(err, TQKV_BAD_FRAME, "READ at %u: %u tokens came, %u were asked for",
				req.position, reply.n_tokens, req.n_tokens);
		status = append_rows(&transfer->k, reply.k, reply.k_bytes, "k", err);
		if (status == TQKV_OK)
			status = append_rows(&transfer->v, reply.v, reply.v_bytes, "v", err);
		if (status != TQKV_OK)
			return status;
		transfer->fingerprint = reply.fingerprint;
		n_done += reply.n_tokens;
	}
	return TQKV_OK;
}

/* All layers at once if they fit, else one after another: the order of the output stays the same. */
static enum tqkv_status transfer_all(struct transfer *transfer, const struct tqkv_read *read, uint8_t k_dtype,
	uint8_t v_dtype, struct tqkv_error *err)
{
	struct kvp_read_req req = read_req(read);
	enum tqkv_status status = TQKV_OK;
	uint32_t n_fit;

	req.k_dtype = k_dtype;
	req.v_dtype = v_dtype;
	n_fit = tokens_fit(transfer->session, &req);
	if (k_dtype != TQKV_PACKED && v_dtype != TQKV_PACKED && n_fit >= read->n_tokens)
		return transfer_range(transfer, &req, read->n_tokens, err);
	req.n_layers = 1;
	n_fit = tokens_fit(transfer->session, &req);
	for (uint32_t layer_idx = 0; layer_idx < read->n_layers && status == TQKV_OK; layer_idx++) {
		req.layer_first = read->layer_first + layer_idx;
		status = transfer_range(transfer, &req, n_fit > 0 ? n_fit : 1, err);
	}
	return status;
}

enum tqkv_status tqkv_read(
	struct tqkv_session *session, struct tqkv_read *read, uint32_t timeout_ms, struct tqkv_error *err)
{
	if (!session || !read)
		return tqkv_fail_null(err, "session, read");

	struct transfer transfer = {
		.session = session,
		.deadline_ns = tqkv_conn_deadline_ns(session->conn, timeout_ms),
		.k = { .at = read->k, .left_bytes = read->k ? read->k_bytes_max : 0 },
		.v = { .at = read->v, .left_bytes = read->v ? read->v_bytes_max : 0 },
	};
	const bool is_packed = read->k_dtype == TQKV_PACKED || read->v_dtype == TQKV_PACKED;
	enum tqkv_status status = check(session, read, err);

	if (status != TQKV_OK)
		return status;
	/* One side at a time, a packed reply's size is that of its rows; with both there is padding in
	 * between. */
	if (is_packed && read->k_dtype != TQKV_NONE && read->v_dtype != TQKV_NONE) {
		status = transfer_all(&transfer, read, read->k_dtype, TQKV_NONE, err);
		if (status == TQKV_OK)
			status = transfer_all(&transfer, read, TQKV_NONE, read->v_dtype, err);
	} else {
		status = transfer_all(&transfer, read, read->k_dtype, read->v_dtype, err);
	}
	if (status == TQKV_OK) {
		read->k_bytes = transfer.k.n_bytes;
		read->v_bytes = transfer.v.n_bytes;
		read->fingerprint = transfer.fingerprint;
	}
	return status;
}

enum tqkv_status tqkv_submit_read(struct tqkv_session *session, const struct tqkv_read *read,
	uint32_t timeout_ms, uint64_t *request_id, struct tqkv_error *err)
{
	if (!session || !read)
		return tqkv_fail_null(err, "session, read");

	const bool is_packed = read->k_dtype == TQKV_PACKED || read->v_dtype == TQKV_PACKED;
	struct tqkv_shape shape = read_shape;
	enum tqkv_status status = check(session, read, err);

	if (status != TQKV_OK)
		return status;
	if (is_packed && read->k_dtype != TQKV_NONE && read->v_dtype != TQKV_NONE)
		return tqkv_fail(err, TQKV_BAD_ARG, "packed rows are read one side, K or V, per request");

	const struct kvp_read_req req = read_req(read);

	shape.is_pipelined = true;
	return tqkv_submit(session, &shape, fill_read, &req, timeout_ms, request_id, err);
}
