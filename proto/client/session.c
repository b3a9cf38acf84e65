/*
 * Sessions and the small operations: OPEN, ATTACH, CLOSE, TELL, PING, CANCEL.
 */
#include <stdlib.h>
#include <string.h>

#include "proto/client/conn.h"

enum tqkv_status tqkv_session_check(const struct tqkv_session *session, struct tqkv_error *err)
{
	if (!session)
		return tqkv_fail_null(err, "session");

	switch (session->lost) {
	case TQKV_OK:
		return TQKV_OK;
	case TQKV_STALE_EPOCH:
		return tqkv_fail(err, TQKV_STALE_EPOCH, "the daemon was restarted; session %s is gone",
			session->name[0] ? session->name : "(no name)");
	case TQKV_STALE_HANDLE:
		return tqkv_fail(err, TQKV_STALE_HANDLE,
			"a session without a name cannot be attached again after a lost connection");
	default:
		return tqkv_fail(err, session->lost, "session %s could not be attached again: %s",
			session->name, tqkv_status_text(session->lost));
	}
}

/* ---- OPEN, ATTACH ---- */

struct open_call {
	const struct tqkv_open_params *params;
	size_t pool_name_bytes, session_name_bytes;
};

static void fill_open(struct tqkv_request *request, const void *arg)
{
	const struct open_call *call = arg;
	const struct tqkv_open_params *params = call->params;
	const struct kvp_open_req open = {
		.pool_name_bytes = (uint16_t)call->pool_name_bytes,
		.session_name_bytes = (uint16_t)call->session_name_bytes,
		.priority = params->priority,
		.flags = params->flags,
		.lease_ms = params->lease_ms,
		.reserve_blocks = params->reserve_blocks,
		.sequences_max = params->sequences_max,
		.tokens_max = params->tokens_max,
		.fingerprint = params->fingerprint,
	};

	kvp_open_req_encode(&open, tqkv_request_body(request));
	if (call->pool_name_bytes)
		memcpy(tqkv_request_payload(request), params->pool, call->pool_name_bytes);
	if (call->session_name_bytes)
		memcpy(tqkv_request_payload(request) + call->pool_name_bytes, params->session_name,
			call->session_name_bytes);
}

static enum tqkv_status check_params(
	const struct tqkv_open_params *params, bool is_attach, struct open_call *call, struct tqkv_error *err)
{
	call->params = params;
	call->pool_name_bytes = params->pool ? strlen(params->pool) : 0;
	call->session_name_bytes = params->session_name ? strlen(params->session_name) : 0;
	if (call->pool_name_bytes > KVP_POOL_NAME_BYTES_MAX || (call->pool_name_bytes == 0 && !is_attach))
		return tqkv_fail(err, TQKV_BAD_ARG, "the pool's name has %zu bytes, expected 1 to %d",
			call->pool_name_bytes, KVP_POOL_NAME_BYTES_MAX);
	if (call->session_name_bytes > KVP_SESSION_NAME_BYTES_MAX ||
		(call->session_name_bytes == 0 && is_attach))
		return tqkv_fail(err, TQKV_BAD_ARG, "the session's name has %zu bytes, expected %d to %d",
			call->session_name_bytes, is_attach ? 1 : 0, KVP_SESSION_NAME_BYTES_MAX);
	return TQKV_OK;
}

/* What was answered becomes what we know of the session. */
static void take_open(struct tqkv_session *session, const struct kvp_open_reply *open)
{
	session->info = (struct tqkv_session_info){
		.handle = open->session,
		.fingerprint = open->fingerprint,
		.lease_ms = open->lease_ms,
		.reserved_blocks = open->reserved_blocks,
		.n_layers = open->n_layers,
		.block_size = open->block_size,
		.sequences_max = open->sequences_max,
		.tokens_max = open->tokens_max,
		.q_heads = open->q_heads,
		.kv_heads = open->kv_heads,
		.k_head_dim = open->k_head_dim,
		.v_head_dim = open->v_head_dim,
	};
	session->geometry = (struct kvp_geometry){
		.n_layers = open->n_layers,
		.q_heads = open->q_heads,
		.kv_heads = open->kv_heads,
		.k_head_dim = open->k_head_dim,
		.v_head_dim = open->v_head_dim,
		.fingerprint = open->fingerprint,
	};
	session->lost = TQKV_OK;
}

/* OPEN is sent again after a refusal that ends by itself (a reservation that does not fit now). */
static enum tqkv_status call_open(struct tqkv_conn *conn, uint16_t opcode, const struct open_call *call,
	int64_t deadline_ns, struct kvp_open_reply *open, struct tqkv_error *err)
{
	const struct tqkv_shape shape = {
		.opcode = opcode,
		.op_bytes = KVP_BYTES(open_req),
		.payload_bytes = call->pool_name_bytes + call->session_name_bytes,
	};
	struct tqkv_backoff backoff = { 0 };
	struct tqkv_reply reply;
	union tqkv_reply_op op;
	enum tqkv_status status;
	struct tqkv_error error;

	do {
		status = tqkv_call(conn, NULL, &shape, fill_open, call, deadline_ns, &reply, &op, &error);
	} while (status != TQKV_OK && tqkv_ends_by_itself(status) && error.is_retryable && !error.is_local &&
		tqkv_backoff_pause(&backoff, conn, error.retry_after_ms, deadline_ns));
	if (status == TQKV_OK)
		*open = op.open;
	else if (err)
		*err = error;
	return status;
}

static enum tqkv_status open_or_attach(struct tqkv_conn *conn, uint16_t opcode,
	const struct tqkv_open_params *params, uint32_t timeout_ms, struct tqkv_session **out,
	struct tqkv_error *err)
{
	if (!conn || !params || !out)
		return tqkv_fail_null(err, "conn, params, out");

	const int64_t deadline_ns = tqkv_conn_deadline_ns(conn, timeout_ms);
	struct open_call call;
	struct kvp_open_reply open;
	struct tqkv_error named;
	enum tqkv_status status = check_params(params, opcode == KVP_OP_ATTACH, &call, err);

	if (status != TQKV_OK)
		return status;
	/* Without a fingerprint the server has nothing to compare. */
	if (params->pool_json && params->pool && params->fingerprint == 0) {
		status = tqkv_pool_compare(conn, params->pool, params->pool_json, deadline_ns, err);
		if (status != TQKV_OK)
			return status;
	}

	struct tqkv_session *session = calloc(1, sizeof(*session));

	if (!session)
		return tqkv_fail(err, TQKV_NO_MEMORY, "no memory for a session");
	status = call_open(conn, opcode, &call, deadline_ns, &open, err);
	if (status == TQKV_FORMAT_MISMATCH && params->pool_json && params->pool &&
		tqkv_pool_compare(conn, params->pool, params->pool_json, deadline_ns, &named) ==
			TQKV_FORMAT_MISMATCH &&
		err)
		memcpy(err->message, named.message, sizeof(err->message));
	if (status != TQKV_OK) {
		free(session);
		return status;
	}
	session->conn = conn;
	if (params->session_name)
		memcpy(session->name, params->session_name, call.session_name_bytes);
	take_open(session, &open);
	session->next = conn->sessions;
	conn->sessions = session;
	*out = session;
	return TQKV_OK;
}

enum tqkv_status tqkv_open(struct tqkv_conn *conn, const struct tqkv_open_params *params, uint32_t timeout_ms,
	struct tqkv_session **out, struct tqkv_error *err)
{
	return open_or_attach(conn, KVP_OP_OPEN, params, timeout_ms, out, err);
}

enum tqkv_status tqkv_attach(struct tqkv_conn *conn, const struct tqkv_open_params *params,
	uint32_t timeout_ms, struct tqkv_session **out, struct tqkv_error *err)
{
	return open_or_attach(conn, KVP_OP_ATTACH, params, timeout_ms, out, err);
}

enum tqkv_status tqkv_session_reattach(
	struct tqkv_session *session, int64_t deadline_ns, struct tqkv_error *err)
{
	const struct tqkv_open_params params = {
		.session_name = session->name,
		.fingerprint = session->info.fingerprint,
	};
	struct open_call call;
	struct kvp_open_reply open;
	enum tqkv_status status = check_params(&params, true, &call, err);

	if (status == TQKV_OK)
		status = call_open(session->conn, KVP_OP_ATTACH, &call, deadline_ns, &open, err);
	if (status == TQKV_OK)
		take_open(session, &open);
	return status;
}

/* ---- CLOSE ---- */

static void unlink_session(struct tqkv_session *session)
{
	struct tqkv_conn *conn = session->conn;
	struct tqkv_session **link = &conn->sessions;

	while (*link != session)
		link = &(*link)->next;
	*link = session->next;
	for (uint64_t entry_idx = 0; entry_idx <= conn->requests_mask; entry_idx++) {
		struct tqkv_request *request = &conn->requests[entry_idx];

		if (request->id == 0 || request->session != session)
			continue;
		request->session = NULL;
		tqkv_request_forget(request);
	}
}

enum tqkv_status tqkv_close(struct tqkv_session *session, uint32_t timeout_ms, struct tqkv_error *err)
{
	const struct tqkv_shape shape = { .opcode = KVP_OP_CLOSE };
	struct tqkv_reply reply;
	enum tqkv_status status;

	if (!session)
		return TQKV_OK;
	status = tqkv_session_check(session, err);
	if (status == TQKV_OK)
		status = tqkv_call(session->conn, session, &shape, NULL, NULL,
			tqkv_conn_deadline_ns(session->conn, timeout_ms), &reply, NULL, err);
	unlink_session(session);
	free(session);
	return status;
}

const struct tqkv_session_info *tqkv_session_info(const struct tqkv_session *session)
{
	return session ? &session->info : NULL;
}

struct tqkv_conn *tqkv_session_conn(const struct tqkv_session *session)
{
	return session ? session->conn : NULL;
}

const char *tqkv_session_name(const struct tqkv_session *session)
{
	return session && session->name[0] ? session->name : NULL;
}

/* ---- TELL ---- */

static void fill_tell(struct tqkv_request *request, const void *arg)
{
	kvp_tell_req_encode(arg, tqkv_request_body(request));
}

static struct kvp_tell_req tell_req(
	const struct tqkv_session *session, uint64_t sequence_from, uint32_t n_max, bool per_layer)
{
	const uint32_t items_max = session->conn->server.items_max;

	return (struct kvp_tell_req){
		.sequence_from = sequence_from,
		.n_sequences_max = n_max < items_max ? n_max : items_max,
		.flags = per_layer ? KVP_TELL_PER_LAYER : 0,
	};
}

static const struct tqkv_shape tell_shape = { .opcode = KVP_OP_TELL, .op_bytes = KVP_BYTES(tell_req) };

enum tqkv_status tqkv_session_tell_page(struct tqkv_session *session, uint64_t sequence_from, uint32_t n_max,
	bool per_layer, int64_t deadline_ns, struct tqkv_reply *reply, struct tqkv_error *err)
{
	const struct kvp_tell_req tell = tell_req(session, sequence_from, n_max, per_layer);

	return tqkv_call(
		session->conn, session, &tell_shape, fill_tell, &tell, deadline_ns, reply, NULL, err);
}

enum tqkv_status tqkv_tell(struct tqkv_session *session, uint64_t sequence_from, uint32_t n_max,
	struct tqkv_sequence *sequences, uint32_t *lengths, uint32_t *n_out, uint64_t *next_sequence,
	uint32_t timeout_ms, struct tqkv_error *err)
{
	if (!session || (n_max > 0 && !sequences) || !n_out || !next_sequence)
		return tqkv_fail_null(err, "session, sequences, n_out, next_sequence");

	const int64_t deadline_ns = tqkv_conn_deadline_ns(session->conn, timeout_ms);
	const uint32_t n_layers = session->info.n_layers;
	uint64_t from = sequence_from;
	uint32_t n_recoveries = 0;
	uint32_t n = 0;
	enum tqkv_status status = tqkv_session_check(session, err);

	while (status == TQKV_OK && n < n_max) {
		struct tqkv_reply reply;

		status = tqkv_session_tell_page(
			session, from, n_max - n, lengths != NULL, deadline_ns, &reply, err);
		if (status != TQKV_OK) {
			if (!tqkv_conn_recover(session->conn, status, &n_recoveries, deadline_ns, err))
				break;
			status = tqkv_session_check(session, err);
			continue;
		}
		memcpy(sequences + n, reply.sequences, reply.n_items * sizeof(*sequences));
		if (lengths && reply.n_items > 0)
			memcpy(lengths + (size_t)n * n_layers, reply.lengths,
				(size_t)reply.n_items * n_layers * sizeof(*lengths));
		n += reply.n_items;
		from = reply.next_sequence;
		if (from == 0)
			break;
	}
	if (status == TQKV_OK) {
		*n_out = n;
		*next_sequence = from;
	}
	return status;
}

enum tqkv_status tqkv_submit_tell(struct tqkv_session *session, uint64_t sequence_from, uint32_t n_max,
	bool per_layer, uint32_t timeout_ms, uint64_t *request_id, struct tqkv_error *err)
{
	if (!session)
		return tqkv_fail_null(err, "session");

	const struct kvp_tell_req tell = tell_req(session, sequence_from, n_max, per_layer);
	struct tqkv_shape shape = tell_shape;

	shape.is_pipelined = true;
	return tqkv_submit(session, &shape, fill_tell, &tell, timeout_ms, request_id, err);
}

/* ---- PING, CANCEL ---- */

enum tqkv_status tqkv_ping(
	struct tqkv_conn *conn, struct tqkv_session *session, uint32_t timeout_ms, struct tqkv_error *err)
{
	if (!conn)
		return tqkv_fail_null(err, "conn");

	const struct tqkv_shape shape = { .opcode = KVP_OP_PING };
	const int64_t deadline_ns = tqkv_conn_deadline_ns(conn, timeout_ms);
	struct tqkv_reply reply;
	union tqkv_reply_op op;
	uint32_t n_recoveries = 0;
	enum tqkv_status status;

	do {
		status = session ? tqkv_session_check(session, err) : TQKV_OK;
		if (status != TQKV_OK)
			return status;
		status = tqkv_call(conn, session, &shape, NULL, NULL, deadline_ns, &reply, &op, err);
	} while (status != TQKV_OK && tqkv_conn_recover(conn, status, &n_recoveries, deadline_ns, err));
	if (status == TQKV_OK && op.ping.boot_id != conn->server.boot_id)
		return tqkv_fail(err, TQKV_STALE_EPOCH, "the boot id changed: the daemon's memory is gone");
	return status;
}

struct echo_call {
	const void *payload;
	size_t payload_bytes;
	size_t reply_bytes;
};

static void fill_echo(struct tqkv_request *request, const void *arg)
{
	const struct echo_call *call = arg;
	const struct kvp_ping_req ping = { .reply_payload_bytes = call->reply_bytes };

	kvp_ping_req_encode(&ping, tqkv_request_body(request));
	if (call->payload_bytes)
		memcpy(tqkv_request_payload(request), call->payload, call->payload_bytes);
}

enum tqkv_status tqkv_echo(struct tqkv_conn *conn, const void *payload, size_t payload_bytes,
	void *reply_payload, size_t reply_bytes, uint32_t timeout_ms, struct tqkv_error *err)
{
	if (!conn || (payload_bytes > 0 && !payload) || (reply_bytes > 0 && !reply_payload))
		return tqkv_fail_null(err, "conn, payload, reply");

	const struct echo_call call = { payload, payload_bytes, reply_bytes };
	const struct tqkv_shape shape = {
		.opcode = KVP_OP_PING,
		.op_bytes = KVP_BYTES(ping_req),
		.payload_bytes = payload_bytes,
	};
	const int64_t deadline_ns = tqkv_conn_deadline_ns(conn, timeout_ms);
	struct tqkv_reply reply;
	uint32_t n_recoveries = 0;
	enum tqkv_status status;

	do {
		status = tqkv_call(conn, NULL, &shape, fill_echo, &call, deadline_ns, &reply, NULL, err);
	} while (status != TQKV_OK && tqkv_conn_recover(conn, status, &n_recoveries, deadline_ns, err));
	if (status == TQKV_OK && reply_bytes > 0)
		memcpy(reply_payload, reply.payload, reply_bytes);
	return status;
}

static void fill_cancel(struct tqkv_request *request, const void *arg)
{
	const struct kvp_cancel_req cancel = { .request_id = *(const uint64_t *)arg };

	kvp_cancel_req_encode(&cancel, tqkv_request_body(request));
}

enum tqkv_status tqkv_cancel(struct tqkv_conn *conn, uint64_t request_id, uint32_t timeout_ms,
	enum tqkv_cancel_outcome *outcome, struct tqkv_error *err)
{
	if (!conn || !outcome)
		return tqkv_fail_null(err, "conn, outcome");

	const struct tqkv_shape shape = { .opcode = KVP_OP_CANCEL, .op_bytes = KVP_BYTES(cancel_req) };
	struct tqkv_reply reply;
	union tqkv_reply_op op;
	const enum tqkv_status status = tqkv_call(conn, NULL, &shape, fill_cancel, &request_id,
		tqkv_conn_deadline_ns(conn, timeout_ms), &reply, &op, err);

	if (status == TQKV_OK)
		*outcome = (enum tqkv_cancel_outcome)op.cancel.outcome;
	return status;
}
