/*
 * Dispatch: one complete request frame, checked and answered or started.
 *
 * Control operations are answered here from the read-ahead, into a reply buffer that is secured before
 * anything is done, so that nothing takes effect without an answer. Operations that must see everything
 * before them on their session (TELL, TRUNCATE, FREE, FORK wait for answers, CLOSE for sealing) park the
 * connection until then; the connection reads no further meanwhile, which is what "in submission order per
 * connection" asks for anyway.
 */
#include "server/internal.h"

#include <string.h>

#include "proto/crc32c.h"

/* ---- refusing ---- */

static void next_frame(struct srv_conn *conn)
{
	conn->ahead_pos += conn->structs_bytes;
	conn->discard_left = conn->header.body_bytes - conn->structs_bytes;
	if (conn->discard_left > 0) {
		kv_sm_move(&conn->sm, CONN_DISCARD);
		return;
	}
	conn->header_have = 0;
	kv_sm_move(&conn->sm, CONN_HEADER);
}

/* Tells why and stops listening to the peer. */
static void linger(struct srv_conn *conn, const char *why)
{
	struct srv_server *server = conn->server;

	server->counters.connections_closed_protocol++;
	srv_log_limited(&server->gate_protocol, server->now_ns, SRV_LOG_WARNING,
		"conn %llu from %s closed by protocol violation: %s", (unsigned long long)conn->id,
		conn->peer.address, why);
	conn->is_error_last = true;
	conn->ahead_pos = conn->ahead_len;
	conn->stalled_ns = 0;
	conn->linger_end_ns = server->now_ns + SRV_LINGER_NS;
	if (!kv_list_is_linked(&conn->in_timed))
		kv_list_push_back(&server->timed, &conn->in_timed);
	kv_sm_move(&conn->sm, CONN_LINGER);
}

bool srv_refuse(
	struct srv_conn *conn, const struct kvp_fault *fault, const char *detail, uint32_t retry_after_ms)
{
	uint8_t *room = srv_conn_reply_room(conn, KVP_ERROR_FRAME_BYTES_MAX);
	/* A header whose checksum is wrong has no request to answer. */
	const bool is_header_known = !conn->has_fault ||
		(fault->status != KV_BAD_MAGIC &&
			(fault->status != KV_BAD_CRC || fault->offset != KVP_AT_HEADER_CRC));
	char text[KVP_DETAIL_BYTES_MAX];

	if (!room)
		return false;
	srv_reject(conn->server, fault->status);
	const size_t n = kvp_error_frame_encode(
		is_header_known ? &conn->header : NULL, fault, detail, retry_after_ms, room);

	if (fault->scope >= KV_SCOPE_CONN) {
		kvp_fault_text(fault, text, sizeof(text));
		linger(conn, detail ? detail : text);
	} else if (conn->sm.state == CONN_DISPATCH) {
		next_frame(conn);
	}
	srv_conn_reply_done(conn, (uint32_t)n);
	return true;
}

bool srv_refuse_status(struct srv_conn *conn, enum kv_status status, uint32_t offset, const char *detail)
{
	const struct kv_status_row *row = kv_status_row(status);
	const struct kvp_fault fault = {
		.status = status,
		.scope = (enum kv_scope)row->scope,
		.item = KVP_NO_ITEM,
		.offset = offset,
		.what = row->text,
	};

	return srv_refuse(conn, &fault, detail, row->is_retryable ? 10 : 0);
}

enum kv_status srv_find_session(struct srv_conn *conn, struct kv_session **session)
{
	enum kv_status status = kv_session_find(conn->server->domain, conn->header.session, session);

	if (status == KV_OK && (*session)->owner_id != conn->id)
		return KV_NOT_OWNER;
	return status;
}

/* ---- replying ---- */

/* The header of a control reply whose body the caller has written behind it. */
uint32_t srv_reply_header(const struct srv_conn *conn, uint8_t *room, enum kv_status status,
	uint32_t op_bytes, uint32_t n_items, uint64_t payload_bytes)
{
	struct kvp_header header = {
		.opcode = conn->header.opcode,
		.flags = KVP_FLAG_RESPONSE,
		.status = status,
		.request_id = conn->header.request_id,
		.session = conn->header.session,
		.body_bytes = kvp_body_bytes(op_bytes, n_items, KVP_ITEM_BYTES, payload_bytes),
		.op_bytes = op_bytes,
		.n_items = (uint16_t)n_items,
		.item_bytes = n_items ? KVP_ITEM_BYTES : 0,
	};

	if (conn->header.flags & KVP_FLAG_BODY_CRC) {
		header.flags |= KVP_FLAG_BODY_CRC;
		header.body_crc = kvp_crc32c(0, room + KVP_HEADER_BYTES, (size_t)header.body_bytes);
	}
	kvp_header_encode(&header, room);
	return (uint32_t)(KVP_HEADER_BYTES + header.body_bytes);
}

void srv_reply_send(struct srv_conn *conn, uint32_t n_bytes)
{
	next_frame(conn);
	srv_conn_reply_done(conn, n_bytes);
}

static struct kvp_hello_reply hello_reply(const struct srv_server *server, uint16_t proto, uint64_t features)
{
	return (struct kvp_hello_reply){
		.proto = proto,
		.proto_min = KVP_PROTO_MIN,
		.proto_max = KVP_PROTO_MAX,
		.n_pools = (uint16_t)kv_domain_n_pools(server->domain),
		.boot_id = kv_domain_boot_id(server->domain),
		.features = server->caps.features & features,
		.frame_bytes_max = server->caps.frame_bytes_max,
		.inflight_bytes_max = server->options->inflight_bytes_max,
		.inflight_requests_max = server->options->inflight_requests_max,
		.items_max = server->caps.items_max,
		.sessions_max = server->options->sessions_max,
		.sequences_max = server->options->sequences_max,
		.q_len_max = server->caps.q_len_max,
		.lease_ms = server->options->lease_ms,
	};
}

/*
 * May this peer use the data port? A Unix peer is known by its user id; a TCP peer needs a token where there
 * are any. A token that is given must be right, whoever gives it.
 */
static enum kv_status log_in(struct srv_conn *conn)
{
	struct srv_server *server = conn->server;
	const struct srv_tokens *tokens = server->settings ? &server->settings->tokens : NULL;
	const struct kvp_text *given = &server->scratch.token;

	if (conn->peer.transport == KV_IO_UNIX && !srv_uids_hold(server->options->unix_uids, conn->peer.uid))
		return KV_FORBIDDEN;
	if (!tokens || tokens->n == 0)
		return KV_OK;
	if (given->n_bytes == 0)
		return conn->peer.transport == KV_IO_UNIX ? KV_OK : KV_UNAUTHENTICATED;
	if (srv_login_is_limited(&server->logins, conn->peer_key, server->now_ns)) {
		server->counters.logins_limited++;
		return KV_UNAUTHENTICATED;
	}
	const struct srv_token *token = srv_tokens_find(tokens, given->data, given->n_bytes);

	if (!token) {
		server->counters.logins_failed++;
		srv_login_failed(&server->logins, conn->peer_key, server->now_ns);
		return KV_UNAUTHENTICATED;
	}
	if (token->role == SRV_ROLE_READ)
		return KV_FORBIDDEN;
	if (token->has_tenant)
		conn->tenant = token->tenant;
	return KV_OK;
}

/* Always its own reply struct, also when the version or the boot id does not fit (PROTOCOL 2). */
static void do_hello(struct srv_conn *conn, enum kv_status status)
{
	struct srv_server *server = conn->server;
	const struct kvp_request *request = &server->scratch;
	uint8_t *room = srv_conn_reply_room(conn, KVP_HEADER_BYTES + KVP_BYTES(hello_reply));

	if (!room)
		return;
	if (status == KV_OK)
		status = log_in(conn);
	const struct kvp_hello_reply reply = hello_reply(
		server, status == KV_OK ? request->proto : 0, status == KV_OK ? request->hello.features : 0);

	if (status == KV_OK) {
		const uint64_t seen = request->hello.boot_id_seen;

		if (seen != 0 && seen != reply.boot_id)
			status = KV_STALE_EPOCH; /* told; the connection goes on */
		memcpy(conn->client_name, request->client_name.data ? request->client_name.data : "",
			request->client_name.n_bytes);
		conn->client_name[request->client_name.n_bytes] = '\0';
		conn->is_hello_done = true;
	}
	if (status != KV_OK)
		srv_reject(server, status);
	kvp_hello_reply_encode(&reply, room + KVP_HEADER_BYTES);
	const uint32_t n = srv_reply_header(conn, room, status, KVP_BYTES(hello_reply), 0, 0);

	if (status == KV_VERSION_UNSUPPORTED || status == KV_UNAUTHENTICATED || status == KV_FORBIDDEN) {
		linger(conn, kv_status_row(status)->text);
		srv_conn_reply_done(conn, n);
		return;
	}
	srv_reply_send(conn, n);
}

/* What every PING does, the echo too: renews the session's lease, or those of all sessions of the connection.
 * False: refused. */
static bool renew(struct srv_conn *conn)
{
	struct srv_server *server = conn->server;
	struct kv_session *session = NULL;

	if (conn->header.session == 0) {
		kv_session_renew_owner(server->domain, conn->id, server->now_ns);
		return true;
	}
	const enum kv_status status = srv_find_session(conn, &session);

	if (status != KV_OK) {
		srv_refuse_status(conn, status, KVP_AT_SESSION, NULL);
		return false;
	}
	kv_session_renew(session, server->now_ns);
	return true;
}

static void do_ping(struct srv_conn *conn)
{
	struct srv_server *server = conn->server;
	uint8_t *room = srv_conn_reply_room(conn, KVP_HEADER_BYTES + KVP_BYTES(ping_reply));

	if (!room || !renew(conn))
		return;
	const struct kvp_hello_reply hello = hello_reply(server, KVP_PROTO_MAX, 0);
	const struct kvp_ping_reply reply = {
		.proto = hello.proto,
		.proto_min = hello.proto_min,
		.proto_max = hello.proto_max,
		.n_pools = hello.n_pools,
		.boot_id = hello.boot_id,
	};

	kvp_ping_reply_encode(&reply, room + KVP_HEADER_BYTES);
	srv_reply_send(conn, srv_reply_header(conn, room, KV_OK, KVP_BYTES(ping_reply), 0, 0));
}

static uint32_t cancel_outcome(struct srv_conn *conn, uint64_t request_id)
{
	struct srv_server *server = conn->server;

	for (uint32_t c = 0; c < 2; c++) {
		for (uint32_t i = 0; i < server->slots[c].n; i++) {
			struct srv_request *request = &server->slots[c].requests[i];

			if (request->conn != conn || request->header.request_id != request_id)
				continue;
			if (request->sm.state != REQ_QUEUED || request->n_items_sealed > 0)
				return KVP_CANCEL_TOO_LATE;
			request->is_cancelled = true;
			return KVP_CANCEL_DROPPED;
		}
	}
	return KVP_CANCEL_UNKNOWN;
}

static void do_cancel(struct srv_conn *conn)
{
	uint8_t *room = srv_conn_reply_room(conn, KVP_HEADER_BYTES + KVP_BYTES(cancel_reply));

	if (!room)
		return;
	const struct kvp_cancel_reply reply = {
		.outcome = cancel_outcome(conn, conn->server->scratch.cancel.request_id),
	};

	kvp_cancel_reply_encode(&reply, room + KVP_HEADER_BYTES);
	srv_reply_send(conn, srv_reply_header(conn, room, KV_OK, KVP_BYTES(cancel_reply), 0, 0));
}

/* ---- the switch ---- */

/* A session has either sequences or client tables. */
static bool fits_session(const struct kv_session *session, uint16_t opcode)
{
	const bool is_clients = opcode == KVP_OP_UPDATE_SLOTS || opcode == KVP_OP_DECODE_TABLE;

	return is_clients == session->has_tables || opcode == KVP_OP_CLOSE || opcode == KVP_OP_TELL;
}

/* Operations that name a session they own. */
static void dispatch_session(struct srv_conn *conn, const uint8_t *body)
{
	struct srv_server *server = conn->server;
	struct kv_session *session = NULL;
	const enum kv_status status = srv_find_session(conn, &session);

	if (status != KV_OK) {
		srv_refuse_status(conn, status, KVP_AT_SESSION, NULL);
		return;
	}
	kv_session_renew(session, server->now_ns);
	if (!fits_session(session, conn->header.opcode)) {
		srv_refuse_status(conn, KV_BAD_STATE, KVP_AT_OPCODE,
			session->has_tables
				? "the session has client tables: UPDATE_SLOTS and DECODE_TABLE only"
				: "the session has no client tables");
		return;
	}
	switch (conn->header.opcode) {
	case KVP_OP_APPEND:
	case KVP_OP_DECODE:
	case KVP_OP_APPEND_DECODE:
		srv_rows_dispatch(conn, body);
		return;
	case KVP_OP_READ:
		srv_read_dispatch(conn, body);
		return;
	case KVP_OP_PUBLISH:
	case KVP_OP_MATCH:
		srv_prefix_dispatch(conn, body, session);
		return;
	case KVP_OP_UPDATE_SLOTS:
	case KVP_OP_DECODE_TABLE:
		if (server->stopped_ns != 0)
			srv_refuse_status(conn, KV_DRAINING, KVP_AT_OPCODE, NULL);
		else if (conn->header.opcode == KVP_OP_UPDATE_SLOTS)
			srv_slots_dispatch(conn, session, body);
		else
			srv_table_dispatch(conn, session, body);
		return;
	case KVP_OP_CLOSE:
		srv_op_close(conn, session);
		return;
	default:
		break;
	}
	if (session->n_outstanding > 0) {
		srv_conn_wait(conn, WAIT_SESSION, &server->waiting_session);
		return;
	}
	if (conn->header.opcode == KVP_OP_TELL)
		srv_op_tell(conn, session);
	else
		srv_op_items(conn, session);
}

/* A body that is here as a whole is checked before it is believed; that of a slot when it is complete. */
static enum kv_status check_body(const struct srv_conn *conn, const uint8_t *body, struct kvp_fault *fault)
{
	const struct kvp_header *header = &conn->header;

	if (!(header->flags & KVP_FLAG_BODY_CRC) || conn->structs_bytes != header->body_bytes)
		return KV_OK;
	return kvp_check_body_crc(header, kvp_crc32c(0, body, conn->structs_bytes), fault);
}

void srv_dispatch(struct srv_conn *conn, const uint8_t *body)
{
	struct srv_server *server = conn->server;
	struct kvp_fault fault = { 0 };

	if (conn->has_fault && conn->fault.status == KV_VERSION_UNSUPPORTED) {
		/* Whatever its header looks like, the peer learns our range from HELLO's reply. */
		conn->header = (struct kvp_header){ .opcode = KVP_OP_HELLO };
		do_hello(conn, KV_VERSION_UNSUPPORTED);
		return;
	}
	if (conn->has_fault) {
		srv_refuse(conn, &conn->fault, NULL, 0);
		return;
	}
	if (!conn->is_hello_done && conn->header.opcode != KVP_OP_HELLO) {
		fault = (struct kvp_fault){ .status = KV_BAD_STATE,
			.scope = KV_SCOPE_CONN,
			.item = KVP_NO_ITEM,
			.offset = KVP_AT_OPCODE,
			.expected = KVP_OP_HELLO,
			.got = conn->header.opcode,
			.what = "the first frame must be HELLO" };
		srv_refuse(conn, &fault, NULL, 0);
		return;
	}
	enum kv_status status = check_body(conn, body, &fault);

	if (status == KV_OK)
		status = kvp_check_request(&conn->header, body, &server->caps, &server->scratch, &fault);
	if (status == KV_VERSION_UNSUPPORTED && conn->header.opcode == KVP_OP_HELLO) {
		do_hello(conn, status);
		return;
	}
	if (status != KV_OK) {
		srv_refuse(conn, &fault, NULL, 0);
		return;
	}
	switch (conn->header.opcode) {
	case KVP_OP_HELLO:
		if (conn->is_hello_done)
			srv_refuse_status(conn, KV_BAD_STATE, KVP_AT_OPCODE, "HELLO was said already");
		else
			do_hello(conn, KV_OK);
		return;
	case KVP_OP_PING:
		if (!server->scratch.has_echo)
			do_ping(conn);
		else if (renew(conn))
			srv_echo_dispatch(conn, body);
		return;
	case KVP_OP_CANCEL:
		do_cancel(conn);
		return;
	case KVP_OP_POOL_INFO:
		srv_op_pool_info(conn);
		return;
	case KVP_OP_OPEN:
	case KVP_OP_ATTACH:
		srv_op_open(conn);
		return;
	default:
		dispatch_session(conn, body);
		return;
	}
}
