/*
 * Dispatch: one complete request frame, checked and answered or started.
 *
 * Control operations are answered here from the read-ahead, into a reply buffer that is secured before
 * anything is done, so that nothing takes effect without an answer. Operations that must see everything
 * before them on their session (TELL, TRUNCATE, FREE wait for answers, CLOSE for sealing) park the connection
 * until then; the connection reads no further meanwhile, which is what "in submission order per connection"
 * asks for anyway.
 */
#include "server/internal.h"

#include <string.h>

#include "core/rotation.h"

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
	const bool is_header_known =
		!conn->has_fault || (fault->status != KV_BAD_MAGIC && fault->status != KV_BAD_CRC);
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

/* Header and op struct of a control reply without payload, plus n_items items of 32 bytes that the caller
 * wrote. */
static uint32_t reply_header(const struct srv_conn *conn, uint8_t *room, enum kv_status status,
	uint32_t op_bytes, uint32_t n_items, uint64_t payload_bytes)
{
	const struct kvp_header header = {
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

	kvp_header_encode(&header, room);
	return (uint32_t)(KVP_HEADER_BYTES + header.body_bytes);
}

static void reply_send(struct srv_conn *conn, uint32_t n_bytes)
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

/* Always its own reply struct, also when the version or the boot id does not fit (PROTOCOL 2). */
static void do_hello(struct srv_conn *conn, enum kv_status status)
{
	struct srv_server *server = conn->server;
	const struct kvp_request *request = &server->scratch;
	uint8_t *room = srv_conn_reply_room(conn, KVP_HEADER_BYTES + KVP_BYTES(hello_reply));

	if (!room)
		return;
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
	const uint32_t n = reply_header(conn, room, status, KVP_BYTES(hello_reply), 0, 0);

	if (status == KV_VERSION_UNSUPPORTED) {
		linger(conn, "protocol version");
		srv_conn_reply_done(conn, n);
		return;
	}
	reply_send(conn, n);
}

static void do_ping(struct srv_conn *conn)
{
	struct srv_server *server = conn->server;
	struct kv_session *session = NULL;
	uint8_t *room = srv_conn_reply_room(conn, KVP_HEADER_BYTES + KVP_BYTES(ping_reply));

	if (!room)
		return;
	if (conn->header.session == 0) {
		kv_session_renew_owner(server->domain, conn->id, server->now_ns);
	} else {
		const enum kv_status status = srv_find_session(conn, &session);

		if (status != KV_OK) {
			srv_refuse_status(conn, status, KVP_AT_SESSION, NULL);
			return;
		}
		kv_session_renew(session, server->now_ns);
	}
	const struct kvp_hello_reply hello = hello_reply(server, KVP_PROTO_MAX, 0);
	const struct kvp_ping_reply reply = {
		.proto = hello.proto,
		.proto_min = hello.proto_min,
		.proto_max = hello.proto_max,
		.n_pools = hello.n_pools,
		.boot_id = hello.boot_id,
	};

	kvp_ping_reply_encode(&reply, room + KVP_HEADER_BYTES);
	reply_send(conn, reply_header(conn, room, KV_OK, KVP_BYTES(ping_reply), 0, 0));
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
	reply_send(conn, reply_header(conn, room, KV_OK, KVP_BYTES(cancel_reply), 0, 0));
}

/* ---- pools and sessions ---- */

static void do_pool_info(struct srv_conn *conn)
{
	struct srv_server *server = conn->server;
	const struct kvp_request *request = &server->scratch;
	struct kv_pool *pool = request->pool_name.n_bytes
		? kv_domain_pool_by_name(server->domain, request->pool_name.data, request->pool_name.n_bytes)
		: kv_domain_pool_at(server->domain, request->pool_info.index);
	const uint32_t payload_at =
		KVP_HEADER_BYTES + (uint32_t)kvp_payload_start(KVP_BYTES(pool_info_reply), 0, 0);
	const uint32_t payload_max = SRV_REPLY_BYTES - payload_at;

	if (!pool) {
		srv_refuse_status(conn, KV_NOT_FOUND,
			KVP_HEADER_BYTES +
				(request->pool_name.n_bytes ? 0u : (uint32_t)KVP_AT(pool_info_req, index)),
			"no such pool");
		return;
	}
	uint8_t *room = srv_conn_reply_room(conn, SRV_REPLY_BYTES);

	if (!room)
		return;
	const struct kv_pool_spec *spec = pool->spec;
	uint32_t n_bytes = 0;

	memset(room + KVP_HEADER_BYTES, 0, payload_at - KVP_HEADER_BYTES);
	if (request->pool_info.what == KVP_POOL_INFO_JSON) {
		n_bytes = spec->canonical_json_bytes;
		if (n_bytes > payload_max) {
			srv_refuse_status(
				conn, KV_TOO_LARGE, KVP_AT_OPCODE, "the pool's JSON exceeds a reply buffer");
			return;
		}
		memcpy(room + payload_at, spec->canonical_json, n_bytes);
	} else if (request->pool_info.what == KVP_POOL_INFO_ROTATION && spec->rotation) {
		const uint32_t row_bytes = spec->rotation->head_dim * 4;
		const uint32_t first = request->pool_info.row_first;
		uint32_t n_rows = kvp_pool_info_rows_fit(row_bytes,
			spec->rotation->head_dim -
				(first < spec->rotation->head_dim ? first : spec->rotation->head_dim),
			SRV_REPLY_BYTES - KVP_HEADER_BYTES);

		kv_rotation_matrix(spec->rotation, first, n_rows, (float *)(void *)(room + payload_at));
		n_bytes = n_rows * row_bytes;
	} else {
		srv_refuse_status(conn, KV_NOT_FOUND, KVP_HEADER_BYTES + KVP_AT(pool_info_req, what),
			"the pool has nothing of this kind");
		return;
	}
	const struct kvp_pool_info_reply reply = {
		.fingerprint = spec->fingerprint,
		.json_bytes = n_bytes,
		.n_pools = kv_domain_n_pools(server->domain),
	};

	kvp_pool_info_reply_encode(&reply, room + KVP_HEADER_BYTES);
	reply_send(conn, reply_header(conn, room, KV_OK, KVP_BYTES(pool_info_reply), 0, n_bytes));
}

static struct kvp_open_reply open_reply(const struct srv_server *server, const struct kv_session *session)
{
	const struct kv_pool_spec *spec = session->pool->spec;

	return (struct kvp_open_reply){
		.session = session->handle,
		.boot_id = kv_domain_boot_id(server->domain),
		.fingerprint = spec->fingerprint,
		.lease_ms = session->lease_ms,
		.reserved_blocks = session->n_blocks_reserved[0],
		.n_layers = spec->n_layers,
		.block_size = spec->block_size,
		.q_heads = (uint16_t)spec->q_heads,
		.kv_heads = (uint16_t)spec->kv_heads,
		.k_head_dim = (uint16_t)spec->k_head_dim,
		.v_head_dim = (uint16_t)spec->v_head_dim,
		.sequences_max = session->sequences_max,
		.tokens_max = session->tokens_max,
	};
}

static uint64_t tenant_of(const struct srv_conn *conn)
{
	return conn->peer.transport == KV_IO_UNIX ? conn->peer.uid : UINT64_MAX;
}

static enum kv_status open_session(struct srv_conn *conn, struct kv_session **session, struct kv_error *err)
{
	struct srv_server *server = conn->server;
	const struct kvp_request *request = &server->scratch;
	const struct kvp_open_req *open = &request->open;
	struct kv_pool *pool =
		kv_domain_pool_by_name(server->domain, request->pool_name.data, request->pool_name.n_bytes);

	if (server->is_draining)
		return kv_fail(err, KV_DRAINING, "the daemon is draining");
	if (!pool)
		return kv_fail(err, KV_NOT_FOUND, "no pool \"%.*s\"", (int)request->pool_name.n_bytes,
			request->pool_name.data);
	if (open->fingerprint != 0 && open->fingerprint != pool->spec->fingerprint)
		return kv_fail(err, KV_FORMAT_MISMATCH, "pool \"%s\" has fingerprint %016llx",
			pool->spec->name, (unsigned long long)pool->spec->fingerprint);
	const struct kv_open_params params = {
		.pool = pool,
		.name = request->session_name.data,
		.name_bytes = request->session_name.n_bytes,
		.tenant = tenant_of(conn),
		.owner_id = conn->id,
		.priority = open->priority,
		.lease_ms = open->lease_ms,
		.reserve_blocks = open->reserve_blocks,
		.sequences_max = open->sequences_max,
		.tokens_max = open->tokens_max,
	};
	const enum kv_status status = kv_session_open(server->domain, &params, server->now_ns, session, err);

	if (status == KV_OK)
		server->counters.sessions_opened++;
	return status;
}

static enum kv_status attach_session(struct srv_conn *conn, struct kv_session **session, struct kv_error *err)
{
	struct srv_server *server = conn->server;
	const struct kvp_request *request = &server->scratch;
	const uint64_t expected = request->open.fingerprint;
	uint32_t slot = 0;

	/* The fingerprint is compared before the old owner is fenced: a refused ATTACH changes nothing. */
	if (expected != 0) {
		for (struct kv_session *s; (s = kv_session_next(server->domain, &slot));) {
			if (s->tenant != tenant_of(conn) ||
				strlen(s->name) != request->session_name.n_bytes ||
				memcmp(s->name, request->session_name.data, request->session_name.n_bytes) !=
					0)
				continue;
			if (s->pool->spec->fingerprint != expected)
				return kv_fail(err, KV_FORMAT_MISMATCH,
					"the session's pool \"%s\" has fingerprint %016llx",
					s->pool->spec->name, (unsigned long long)s->pool->spec->fingerprint);
		}
	}
	const enum kv_status status = kv_session_attach(server->domain, request->session_name.data,
		request->session_name.n_bytes, tenant_of(conn), conn->id, server->now_ns, session);

	return status == KV_OK ? KV_OK : kv_fail(err, status, "%s", kv_status_row(status)->text);
}

static void do_open(struct srv_conn *conn)
{
	uint8_t *room = srv_conn_reply_room(conn, KVP_ERROR_FRAME_BYTES_MAX);
	struct kv_session *session = NULL;
	struct kv_error err = { 0 };

	if (!room)
		return;
	const enum kv_status status = conn->header.opcode == KVP_OP_OPEN
		? open_session(conn, &session, &err)
		: attach_session(conn, &session, &err);

	if (status != KV_OK) {
		srv_refuse_status(conn, status, KVP_HEADER_BYTES, err.msg[0] ? err.msg : NULL);
		return;
	}
	const struct kvp_open_reply reply = open_reply(conn->server, session);

	kvp_open_reply_encode(&reply, room + KVP_HEADER_BYTES);
	reply_send(conn, reply_header(conn, room, KV_OK, KVP_BYTES(open_reply), 0, 0));
}

/* Requests that are in batches finish without their session. */
static void forget_session(struct srv_server *server, const struct kv_session *session)
{
	for (uint32_t c = 0; c < 2; c++) {
		for (uint32_t i = 0; i < server->slots[c].n; i++) {
			struct srv_request *request = &server->slots[c].requests[i];

			if (request->sm.state != REQ_FREE && request->session == session)
				request->session = NULL;
		}
	}
}

static void do_close(struct srv_conn *conn, struct kv_session *session)
{
	struct srv_server *server = conn->server;

	if (session->n_queued > 0) {
		srv_conn_wait(conn, WAIT_SESSION, &server->waiting_session);
		return;
	}
	uint8_t *room = srv_conn_reply_room(conn, KVP_HEADER_BYTES);

	if (!room)
		return;
	forget_session(server, session);
	kv_session_close(server->domain, session, false);
	reply_send(conn, reply_header(conn, room, KV_OK, 0, 0, 0));
}

/* ---- sequences ---- */

static uint32_t count_shared(const struct kv_sequence *sequence)
{
	const struct kv_pool *pool = sequence->pool;
	const struct kv_block_table *table = &sequence->tables[0];
	uint32_t blocks[KV_CHUNK_ENTRIES], n_shared = 0;

	for (uint32_t first = 0; first < table->n_blocks; first += KV_CHUNK_ENTRIES) {
		const uint32_t n = table->n_blocks - first < KV_CHUNK_ENTRIES ? table->n_blocks - first
									      : KV_CHUNK_ENTRIES;

		kv_block_table_copy(table, &pool->tables, first, n, blocks);
		for (uint32_t i = 0; i < n; i++)
			n_shared += pool->blocks[0].owners[blocks[i]] > 1;
	}
	return n_shared;
}

static void do_tell(struct srv_conn *conn, struct kv_session *session)
{
	struct srv_server *server = conn->server;
	const struct kvp_tell_req *tell = &server->scratch.tell;
	const uint32_t n_layers = session->pool->spec->n_layers;
	struct kvp_caps caps = server->caps;
	struct kvp_tell_reply_layout layout;
	struct kv_sequence *found[KVP_ITEMS_MAX];
	struct kvp_tell_reply reply = { .n_layers = n_layers, .n_sequences_total = session->n_sequences };

	uint8_t *room = srv_conn_reply_room(conn, SRV_REPLY_BYTES);

	if (!room)
		return;
	caps.frame_bytes_max = SRV_REPLY_BYTES - KVP_HEADER_BYTES;
	kvp_tell_reply_layout(tell, KVP_ITEMS_MAX, n_layers, &caps, &layout);
	const uint32_t n = kv_sequence_list(
		session, tell->sequence_from, found, layout.n_sequences_max, &reply.next_sequence);

	kvp_tell_reply_layout(tell, n, n_layers, &caps, &layout);
	reply.lengths_off = layout.lengths.off;
	reply.flags = tell->flags;
	memset(room + KVP_HEADER_BYTES, 0, (size_t)layout.body_bytes);
	kvp_tell_reply_encode(&reply, room + KVP_HEADER_BYTES);
	uint8_t *item_at = room + KVP_HEADER_BYTES + KVP_BYTES(tell_reply);
	uint8_t *lengths_at = room + KVP_HEADER_BYTES + layout.payload_start + layout.lengths.off;

	for (uint32_t i = 0; i < n; i++, item_at += KVP_ITEM_BYTES) {
		struct kvp_tell_item item = {
			.sequence = found[i]->id,
			.n_blocks = found[i]->tables[0].n_blocks,
			.n_shared_blocks = count_shared(found[i]),
			.state = KVP_STATE_RESIDENT,
			.flags = found[i]->is_evictable ? KVP_ITEM_EVICTABLE : 0,
		};

		kv_sequence_lengths(found[i], &item.length_min, &item.length_max);
		kvp_tell_item_encode(&item, item_at);
		for (uint32_t l = 0; layout.lengths.n_bytes > 0 && l < n_layers; l++, lengths_at += 4)
			kvp_put_u32(lengths_at, found[i]->committed[l]);
	}
	reply_send(conn, reply_header(conn, room, KV_OK, KVP_BYTES(tell_reply), n, layout.lengths.n_bytes));
}

/* TRUNCATE and FREE: an answer per item, in a reply of the row operations' shape. */
static void do_items(struct srv_conn *conn, struct kv_session *session)
{
	struct srv_server *server = conn->server;
	const struct kvp_request *request = &server->scratch;
	struct kvp_rows_reply reply = { .out_off = KVP_ABSENT, .lse_off = KVP_ABSENT };
	const uint32_t n = request->n_items;
	uint8_t *room =
		srv_conn_reply_room(conn, KVP_HEADER_BYTES + KVP_BYTES(rows_reply) + n * KVP_ITEM_BYTES);

	if (!room)
		return;
	uint8_t *item_at = room + KVP_HEADER_BYTES + KVP_BYTES(rows_reply);

	for (uint32_t i = 0; i < n; i++, item_at += KVP_ITEM_BYTES) {
		const struct kvp_rows_item *item = &request->rows_items[i];
		struct kvp_rows_reply_item out = {
			.sequence = item->sequence, .layer = KVP_NO_LAYER, .row = KVP_NO_ROW
		};

		if (conn->header.opcode == KVP_OP_FREE)
			out.status = (uint16_t)kv_sequence_free(session, item->sequence);
		else
			out.status = (uint16_t)kv_sequence_truncate(session, item->sequence, item->position);
		const struct kv_sequence *sequence = kv_sequence_find(session, item->sequence);
		uint32_t length_max;

		if (sequence)
			kv_sequence_lengths(sequence, &out.length, &length_max);
		if (out.status == KV_OK) {
			reply.n_ok++;
			server->counters.items_ok++;
		} else {
			reply.n_failed++;
			srv_reject(server, out.status);
		}
		kvp_rows_reply_item_encode(&out, item_at);
	}
	kvp_rows_reply_encode(&reply, room + KVP_HEADER_BYTES);
	reply_send(conn, reply_header(conn, room, KV_OK, KVP_BYTES(rows_reply), n, 0));
}

/* ---- the switch ---- */

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
	switch (conn->header.opcode) {
	case KVP_OP_APPEND:
	case KVP_OP_DECODE:
	case KVP_OP_APPEND_DECODE:
		srv_rows_dispatch(conn, body);
		return;
	case KVP_OP_READ:
		srv_read_dispatch(conn, body);
		return;
	case KVP_OP_CLOSE:
		do_close(conn, session);
		return;
	default:
		break;
	}
	if (session->n_outstanding > 0) {
		srv_conn_wait(conn, WAIT_SESSION, &server->waiting_session);
		return;
	}
	if (conn->header.opcode == KVP_OP_TELL)
		do_tell(conn, session);
	else
		do_items(conn, session);
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
	const enum kv_status status =
		kvp_check_request(&conn->header, body, &server->caps, &server->scratch, &fault);

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
		if (server->scratch.has_echo)
			srv_echo_dispatch(conn, body);
		else
			do_ping(conn);
		return;
	case KVP_OP_CANCEL:
		do_cancel(conn);
		return;
	case KVP_OP_POOL_INFO:
		do_pool_info(conn);
		return;
	case KVP_OP_OPEN:
	case KVP_OP_ATTACH:
		do_open(conn);
		return;
	default:
		dispatch_session(conn, body);
		return;
	}
}
