/*
 * Row operations: from a checked frame to a request slot, from received payload to planned items, from
 * finished items to the reply in the same slot.
 *
 * Item errors are found when the payload is complete, because only then is it certain which appends of the
 * connection came before; a frame whose items all fail is answered without a batch. The reply is written
 * where it is sent from. Gaps between segments are zeroed: they were another request's bytes.
 */
#include "server/internal.h"

#include <math.h>
#include <string.h>

#include "core/format.h"
#include "proto/crc32c.h"
#include "server/spill.h"

/* ---- starting ---- */

struct srv_request *srv_rows_start(
	struct srv_conn *conn, const uint8_t *body, uint64_t in_bytes, uint64_t reply_body_bytes)
{
	struct srv_server *server = conn->server;
	const struct srv_options *options = server->options;
	const uint64_t out_bytes = KVP_HEADER_BYTES + reply_body_bytes;

	if (conn->n_inflight > 0 &&
		(conn->n_inflight >= options->inflight_requests_max ||
			conn->inflight_bytes + in_bytes + out_bytes > options->inflight_bytes_max)) {
		srv_conn_wait(conn, WAIT_INFLIGHT, NULL);
		return NULL;
	}
	struct srv_request *request = srv_request_take(server, conn, in_bytes, out_bytes);

	if (!request) {
		server->counters.slot_waits++;
		srv_conn_wait(conn, WAIT_SLOT, &server->slots[srv_slot_class(in_bytes, out_bytes)].waiting);
		return NULL;
	}
	if (conn->structs_bytes > 0)
		memcpy(request->in, body, conn->structs_bytes);
	request->in_bytes = conn->structs_bytes;
	conn->ahead_pos += conn->structs_bytes;
	conn->request = request;
	conn->payload_ns = server->now_ns;
	kv_sm_move(&conn->sm, CONN_PAYLOAD);
	return request;
}

static enum kv_decode_flag decode_flags(uint32_t rows_flags)
{
	return (enum kv_decode_flag)((rows_flags & KVP_ROWS_Q_ROTATED ? KV_DECODE_Q_ROTATED : 0) |
		(rows_flags & KVP_ROWS_OUT_ROTATED ? KV_DECODE_OUT_ROTATED : 0) |
		(rows_flags & KVP_ROWS_NO_SINKS ? KV_DECODE_NO_SINKS : 0));
}

struct kv_frame_rows srv_frame_rows_of(const struct kvp_rows_req *rows)
{
	return (struct kv_frame_rows){
		.layer_first = rows->layer_first,
		.n_layers = rows->n_layers,
		.n_tokens_total = rows->n_tokens_total,
		.n_q_total = rows->n_q_total,
		.k_dtype = rows->k_dtype,
		.v_dtype = rows->v_dtype,
		.q_dtype = rows->q_dtype,
		.out_dtype = rows->out_dtype,
		.decode_flags = (uint8_t)decode_flags(rows->flags),
		.scale = rows->scale,
		.window = rows->window,
	};
}

uint8_t *srv_segment_at(uint8_t *body, uint64_t payload_start, const struct kvp_segment *segment)
{
	return segment->n_bytes > 0 ? body + payload_start + segment->off : NULL;
}

static void copy_items(struct srv_request *request, const struct kvp_request *checked, uint8_t kind)
{
	uint32_t token_first = 0, q_first = 0;

	request->n_items = checked->n_items;
	for (uint32_t i = 0; i < checked->n_items; i++) {
		const struct kvp_rows_item *from = &checked->rows_items[i];

		request->items[i] = (struct kv_item){
			.sequence_id = from->sequence,
			.position = from->position,
			.n_tokens = from->n_tokens,
			.q_len = from->q_len,
			.kind = kind,
			.window = checked->rows.window,
			.flags = (uint8_t)((from->flags & KVP_ITEM_CREATE ? KV_ITEM_CREATE : 0) |
				(from->flags & KVP_ITEM_EVICTABLE ? KV_ITEM_EVICTABLE : 0) |
				(checked->rows.k_dtype == KV_DTYPE_PACKED ||
							checked->rows.v_dtype == KV_DTYPE_PACKED
						? KV_ITEM_PACKED
						: 0)),
			.token_first = token_first,
			.q_first = q_first,
			.layer = KV_LAYER_NONE,
			.row = KV_ROW_NONE,
		};
		token_first += from->n_tokens;
		q_first += from->q_len;
	}
}

struct kvp_geometry srv_geometry_of(const struct srv_lane *lane, uint32_t layer_idx)
{
	struct kvp_geometry geometry = lane->geometry;

	if (layer_idx < geometry.n_layers) {
		const struct kv_layer_spec *layer = &lane->pool->spec->layers[layer_idx];

		geometry.window = layer->window;
	}
	return geometry;
}

static uint8_t item_kind(uint16_t opcode)
{
	return opcode == KVP_OP_APPEND    ? KV_ITEM_APPEND
		: opcode == KVP_OP_DECODE ? KV_ITEM_DECODE
					  : KV_ITEM_APPEND_DECODE;
}

void srv_rows_dispatch(struct srv_conn *conn, const uint8_t *body)
{
	struct srv_server *server = conn->server;
	const struct kvp_request *checked = &server->scratch;
	const struct kvp_rows_req *rows = &checked->rows;
	struct kv_session *session = NULL;
	struct kvp_segments segments;
	struct kvp_rows_reply_layout layout;
	struct kvp_fault fault = { 0 };
	enum kv_status status = srv_find_session(conn, &session);

	KV_ASSERT(status == KV_OK); /* dispatch_session() looked */
	struct srv_lane *lane = &server->lanes[session->pool->pool_idx];
	const struct kvp_geometry geometry = srv_geometry_of(lane, rows->layer_first);

	if (server->stopped_ns != 0) {
		srv_refuse_status(conn, KV_DRAINING, KVP_AT_OPCODE, NULL);
		return;
	}
	status = kvp_rows_check_payload(&conn->header, rows, &geometry, &segments, &fault);
	if (status == KV_OK)
		status = kvp_rows_reply_layout(
			&conn->header, rows, &geometry, server->caps.frame_bytes_max, &layout, &fault);
	if (status == KV_OK && (!isfinite(rows->scale) || rows->scale < 0))
		status = kvp_fault_set(&fault, KV_BAD_ARG, KVP_HEADER_BYTES + KVP_AT(rows_req, scale), 0, 0,
			"scale must be finite and not negative");
	if (status != KV_OK) {
		srv_refuse(conn, &fault, NULL, 0);
		return;
	}
	struct srv_request *request = srv_rows_start(conn, body, conn->header.body_bytes, layout.body_bytes);

	if (!request)
		return;
	const uint64_t in_start =
		kvp_payload_start(conn->header.op_bytes, conn->header.n_items, conn->header.item_bytes);
	uint8_t *reply_body = request->out + KVP_HEADER_BYTES;

	request->session = session;
	request->lane = lane;
	request->rows = *rows;
	request->rows_layout = layout;
	copy_items(request, checked, item_kind(conn->header.opcode));
	request->frame = srv_frame_rows_of(rows);
	request->frame.k = srv_segment_at(request->in, in_start, &segments.k);
	request->frame.v = srv_segment_at(request->in, in_start, &segments.v);
	request->frame.q = srv_segment_at(request->in, in_start, &segments.q);
	request->frame.out = srv_segment_at(reply_body, layout.payload_start, &layout.out);
	request->frame.lse = (float *)(void *)srv_segment_at(reply_body, layout.payload_start, &layout.lse);
}

void srv_read_dispatch(struct srv_conn *conn, const uint8_t *body)
{
	struct srv_server *server = conn->server;
	const struct kvp_read_req *read = &server->scratch.read;
	struct kv_session *session = NULL;
	struct kvp_read_reply_layout layout;
	struct kvp_fault fault = { 0 };
	enum kv_status status = srv_find_session(conn, &session);
	char detail[96];

	KV_ASSERT(status == KV_OK);
	struct srv_lane *lane = &server->lanes[session->pool->pool_idx];

	status = kvp_read_check(
		&conn->header, read, &lane->geometry, server->caps.frame_bytes_max, &layout, &fault);
	if (status != KV_OK) {
		snprintf(detail, sizeof(detail), "%u tokens fit into one reply",
			kvp_read_tokens_fit(read, &lane->geometry, server->caps.frame_bytes_max));
		srv_refuse(conn, &fault, status == KV_TOO_LARGE ? detail : NULL, 0);
		return;
	}
	struct srv_request *request = srv_rows_start(conn, body, conn->header.body_bytes, layout.body_bytes);

	if (!request)
		return;
	uint8_t *reply_body = request->out + KVP_HEADER_BYTES;

	request->session = session;
	request->lane = lane;
	request->read = *read;
	request->read_layout = layout;
	request->n_items = 1;
	request->items[0] = (struct kv_item){
		.sequence_id = read->sequence,
		.position = read->position,
		.n_tokens = read->n_tokens,
		.kind = KV_ITEM_READ,
		.flags = read->flags & KVP_READ_EXACT ? KV_ITEM_EXACT : 0,
		.layer = KV_LAYER_NONE,
		.row = KV_ROW_NONE,
	};
	request->frame = (struct kv_frame_rows){
		.layer_first = read->layer_first,
		.n_layers = read->n_layers,
		.n_tokens_total = read->n_tokens,
		.k_dtype = read->k_dtype,
		.v_dtype = read->v_dtype,
		.k = srv_segment_at(reply_body, layout.payload_start, &layout.k),
		.v = srv_segment_at(reply_body, layout.payload_start, &layout.v),
	};
}

void srv_echo_dispatch(struct srv_conn *conn, const uint8_t *body)
{
	struct srv_server *server = conn->server;
	struct kvp_fault fault = { 0 };
	uint64_t body_bytes;
	const enum kv_status status =
		kvp_ping_reply_size(&server->scratch.ping, server->caps.frame_bytes_max, &body_bytes, &fault);

	if (status != KV_OK) {
		srv_refuse(conn, &fault, NULL, 0);
		return;
	}
	struct srv_request *request = srv_rows_start(conn, body, conn->header.body_bytes, body_bytes);

	if (request)
		request->echo_bytes = server->scratch.ping.reply_payload_bytes;
}

/* ---- received ---- */

static void plan_items(struct srv_server *server, struct srv_request *request)
{
	for (uint32_t i = 0; i < request->n_items; i++) {
		struct kv_item *item = &request->items[i];

		if (item->kind == KV_ITEM_UPDATE_SLOTS || item->kind == KV_ITEM_DECODE_TABLE)
			kv_item_plan_tables(request->session, item, &request->frame, server->now_ns);
		else
			kv_item_plan(request->session, item, request->frame.layer_first,
				request->frame.n_layers, server->now_ns);
		if (item->status == KV_BUSY_RETRY)
			srv_spill_touch(server->spill, request->session, item->sequence_id);
		if (item->status != KV_OK)
			request->n_items_done++;
	}
}

enum kv_status srv_request_find_session(struct srv_request *request, struct kv_session **session)
{
	const enum kv_status status =
		kv_session_find(request->conn->server->domain, request->header.session, session);

	if (status != KV_OK)
		return status;
	return (*session)->owner_id == request->conn->id ? KV_OK : KV_NOT_OWNER;
}

void srv_request_refuse(
	struct srv_request *request, enum kv_status status, const char *detail, uint64_t expected)
{
	const struct kv_status_row *row = kv_status_row(status);
	const struct kvp_fault fault = { .status = status,
		.scope = (enum kv_scope)row->scope,
		.item = KVP_NO_ITEM,
		.offset = KVP_AT_OPCODE,
		.expected = expected,
		.what = row->text };
	struct srv_conn *conn = request->conn;

	srv_reject(conn->server, status);
	request->out_bytes = kvp_error_frame_encode(
		&request->header, &fault, detail, row->is_retryable ? 10 : 0, request->out);
	kv_sm_move(&request->sm, REQ_REPLY);
	kv_list_push_back(&conn->ready, &request->link);
	srv_conn_kick_send(conn);
}

static void reply_echo(struct srv_request *request)
{
	struct srv_conn *conn = request->conn;
	const uint64_t in_start = kvp_payload_start(request->header.op_bytes, 0, 0);
	const uint64_t have =
		request->header.body_bytes > in_start ? request->header.body_bytes - in_start : 0;
	const uint64_t n = request->echo_bytes < have ? request->echo_bytes : have;
	const uint64_t out_start = kvp_payload_start(KVP_BYTES(ping_reply), 0, 0);
	struct kvp_header header = {
		.opcode = KVP_OP_PING,
		.flags = KVP_FLAG_RESPONSE | (request->header.flags & KVP_FLAG_BODY_CRC),
		.request_id = request->header.request_id,
		.session = request->header.session,
		.body_bytes = kvp_body_bytes(KVP_BYTES(ping_reply), 0, 0, request->echo_bytes),
		.op_bytes = KVP_BYTES(ping_reply),
	};
	const struct kvp_ping_reply reply = {
		.proto = KVP_PROTO_MAX,
		.proto_min = KVP_PROTO_MIN,
		.proto_max = KVP_PROTO_MAX,
		.n_pools = (uint16_t)kv_domain_n_pools(conn->server->domain),
		.boot_id = kv_domain_boot_id(conn->server->domain),
	};
	uint8_t *body = request->out + KVP_HEADER_BYTES;

	memset(body, 0, (size_t)(header.body_bytes < out_start ? header.body_bytes : out_start));
	kvp_ping_reply_encode(&reply, body);
	if (request->echo_bytes > 0) {
		memcpy(body + out_start, request->in + in_start, (size_t)n);
		memset(body + out_start + n, 0, (size_t)(request->echo_bytes - n));
	}
	if (header.flags & KVP_FLAG_BODY_CRC)
		header.body_crc = kvp_crc32c(0, body, (size_t)header.body_bytes);
	kvp_header_encode(&header, request->out);
	request->out_bytes = KVP_HEADER_BYTES + header.body_bytes;
	kv_sm_move(&request->sm, REQ_REPLY);
	kv_list_push_back(&conn->ready, &request->link);
	srv_conn_kick_send(conn);
}

bool srv_request_is_intact(const struct srv_request *request, struct kvp_fault *fault)
{
	if (!(request->header.flags & KVP_FLAG_BODY_CRC))
		return true;
	const uint32_t crc = kvp_crc32c(0, request->in, (size_t)request->header.body_bytes);

	return kvp_check_body_crc(&request->header, crc, fault) == KV_OK;
}

void srv_request_received(struct srv_request *request)
{
	struct srv_conn *conn = request->conn;
	struct srv_server *server = conn->server;
	struct kv_session *session = NULL;
	struct kv_error err = { 0 };
	enum kv_status status = KV_OK;

	if (request->header.opcode == KVP_OP_PING) {
		reply_echo(request);
		return;
	}
	if (request->header.opcode == KVP_OP_PUBLISH || request->header.opcode == KVP_OP_MATCH) {
		srv_prefix_received(request);
		return;
	}
	status = srv_request_find_session(request, &session);
	if (status != KV_OK) {
		srv_request_refuse(request, status, NULL, 0);
		return;
	}
	status = kv_tenant_check(
		kv_domain_tenants(server->domain), session->payer, KV_QUOTA_REQUESTS, 1, &err);
	if (status != KV_OK) {
		srv_request_refuse(request, status, err.msg, 0);
		return;
	}
	request->queued_ns = server->now_ns;
	plan_items(server, request);
	request->session->n_outstanding++;
	request->payer = session->payer;
	kv_tenant_charge(kv_domain_tenants(server->domain), request->payer, KV_QUOTA_REQUESTS, 1);
	if (request->n_items_done == request->n_items) {
		srv_request_finish(request);
		return;
	}
	request->session->n_queued++;
	srv_lane_enqueue(request->lane, request);
}

/* ---- finished ---- */

static void zero_output(const struct srv_request *request, const struct kv_item *item)
{
	const struct kv_pool_spec *spec = request->lane->pool->spec;
	const uint64_t row_bytes = (uint64_t)spec->q_heads * spec->v_head_dim *
		kv_dtype_bytes((enum kv_dtype)request->frame.out_dtype);

	if (request->frame.out)
		memset(request->frame.out + item->q_first * row_bytes, 0, (size_t)(item->q_len * row_bytes));
	for (uint64_t i = 0; request->frame.lse && i < (uint64_t)item->q_len * spec->q_heads; i++)
		request->frame.lse[(uint64_t)item->q_first * spec->q_heads + i] = -INFINITY;
}

/* The daemon's counters; the session's own are kept by kv_item_finish(). */
static void count_item(
	struct srv_server *server, const struct srv_request *request, const struct kv_item *item)
{
	const uint64_t n_rows = (uint64_t)item->n_tokens * request->frame.n_layers;

	if (item->status != KV_OK) {
		srv_reject(server, item->status);
		return;
	}
	server->counters.items_ok++;
	server->counters.queries += item->q_len;
	if (item->kind == KV_ITEM_READ)
		server->counters.rows_out += n_rows;
	else
		server->counters.rows_in += n_rows;
}

static void finish_header(struct srv_request *request, uint32_t op_bytes, uint64_t body_bytes)
{
	const struct kvp_header *asked = &request->header;
	const bool with_crc = (asked->flags & KVP_FLAG_BODY_CRC) != 0;
	const uint32_t n_items = asked->opcode == KVP_OP_READ ? 0 : request->n_items;
	const struct kvp_header header = {
		.opcode = asked->opcode,
		.flags = KVP_FLAG_RESPONSE | (asked->flags & (KVP_FLAG_BODY_CRC | KVP_FLAG_TIMINGS)),
		.request_id = asked->request_id,
		.session = asked->session,
		.body_bytes = body_bytes,
		.op_bytes = op_bytes,
		.n_items = (uint16_t)n_items,
		.item_bytes = n_items ? KVP_ITEM_BYTES : 0,
		.body_crc = with_crc ? kvp_crc32c(0, request->out + KVP_HEADER_BYTES, (size_t)body_bytes) : 0,
	};

	kvp_header_encode(&header, request->out);
	request->out_bytes = KVP_HEADER_BYTES + body_bytes;
}

void srv_request_reply(struct srv_request *request, uint32_t op_bytes, uint64_t body_bytes)
{
	struct srv_conn *conn = request->conn;

	finish_header(request, op_bytes, body_bytes);
	kv_sm_move(&request->sm, REQ_REPLY);
	kv_list_push_back(&conn->ready, &request->link);
	srv_conn_kick_send(conn);
}

static void zero_gap(uint8_t *body, uint64_t from, uint64_t to)
{
	if (to > from)
		memset(body + from, 0, (size_t)(to - from));
}

static void set_timings(
	struct srv_server *server, const struct srv_request *request, struct kvp_rows_reply *reply)
{
	reply->recv_us = (uint32_t)srv_us_since(request->queued_ns, request->header_ns);
	reply->queue_us =
		request->sealed_ns ? (uint32_t)srv_us_since(request->sealed_ns, request->queued_ns) : 0;
	reply->copy_in_us = request->copy_in_us;
	reply->kernel_us = request->kernel_us;
	reply->copy_out_us = request->copy_out_us;
	/* A batch may have been computed since this turn began. */
	reply->total_us = (uint32_t)srv_us_since(kv_clock_now_ns(server->seams.clock), request->header_ns);
}

static void write_rows_reply(struct srv_server *server, struct srv_request *request)
{
	const struct kvp_rows_reply_layout *layout = &request->rows_layout;
	struct kvp_rows_reply reply = {
		.n_q_total = request->rows.n_q_total,
		.out_dtype = layout->out.n_bytes ? request->rows.out_dtype : 0,
		.out_off = layout->out.off,
		.lse_off = layout->lse.off,
	};
	uint8_t *body = request->out + KVP_HEADER_BYTES;
	uint8_t *item_at = body + KVP_BYTES(rows_reply);

	for (uint32_t i = 0; i < request->n_items; i++, item_at += KVP_ITEM_BYTES) {
		const struct kv_item *item = &request->items[i];
		const bool is_ok = item->status == KV_OK;
		const struct kvp_rows_reply_item out = {
			.sequence = item->sequence_id,
			.length = item->length,
			.n_tokens = is_ok ? item->n_tokens : 0,
			.q_len = is_ok ? item->q_len : 0,
			.status = item->status,
			.layer = item->layer,
			.row = item->row,
			.retry_after_ms = item->retry_after_ms,
		};

		reply.n_ok += is_ok;
		reply.n_failed += !is_ok;
		if (!is_ok)
			zero_output(request, item);
		kvp_rows_reply_item_encode(&out, item_at);
	}
	if (request->header.flags & KVP_FLAG_TIMINGS)
		set_timings(server, request, &reply);
	kvp_rows_reply_encode(&reply, body);
	uint64_t end = KVP_BYTES(rows_reply) + (uint64_t)request->n_items * KVP_ITEM_BYTES;

	if (layout->out.n_bytes > 0) {
		zero_gap(body, end, layout->payload_start + layout->out.off);
		end = layout->payload_start + layout->out.off + layout->out.n_bytes;
	}
	if (layout->lse.n_bytes > 0) {
		zero_gap(body, end, layout->payload_start + layout->lse.off);
		end = layout->payload_start + layout->lse.off + layout->lse.n_bytes;
	}
	zero_gap(body, end, layout->body_bytes);
	finish_header(request, KVP_BYTES(rows_reply), layout->body_bytes);
}

static void write_read_reply(struct srv_request *request)
{
	const struct kvp_read_reply_layout *layout = &request->read_layout;
	const struct kvp_read_req *read = &request->read;
	const struct kvp_read_reply reply = {
		.sequence = read->sequence,
		.layer_first = read->layer_first,
		.n_layers = read->n_layers,
		.position = read->position,
		.n_tokens = read->n_tokens,
		.k_dtype = read->k_dtype,
		.v_dtype = read->v_dtype,
		.flags = read->flags,
		.k_off = layout->k.off,
		.v_off = layout->v.off,
		.fingerprint = request->lane->pool->spec->fingerprint,
	};
	uint8_t *body = request->out + KVP_HEADER_BYTES;
	uint64_t end = KVP_BYTES(read_reply);

	kvp_read_reply_encode(&reply, body);
	if (layout->k.n_bytes > 0) {
		zero_gap(body, end, layout->payload_start + layout->k.off);
		end = layout->payload_start + layout->k.off + layout->k.n_bytes;
	}
	if (layout->v.n_bytes > 0) {
		zero_gap(body, end, layout->payload_start + layout->v.off);
		end = layout->payload_start + layout->v.off + layout->v.n_bytes;
	}
	zero_gap(body, end, layout->body_bytes);
	finish_header(request, KVP_BYTES(read_reply), layout->body_bytes);
}

/* What the frame as a whole is answered with: a READ is one item, and what was dropped tells of no items. */
static enum kv_status frame_status(const struct srv_request *request)
{
	if (request->is_cancelled)
		return KV_CANCELLED;
	if (request->is_expired)
		return KV_DEADLINE;
	return request->header.opcode == KVP_OP_READ ? (enum kv_status)request->items[0].status : KV_OK;
}

void srv_request_finish(struct srv_request *request)
{
	struct srv_server *server = request->server;
	struct srv_conn *conn = request->conn;
	const enum kv_status status = frame_status(request);

	server->has_finished = true;
	/* A refused frame is counted once, where it is answered, and its items are not. */
	for (uint32_t i = 0; i < request->n_items && status == KV_OK; i++)
		count_item(server, request, &request->items[i]);
	kv_tenant_refund(kv_domain_tenants(server->domain), request->payer, KV_QUOTA_REQUESTS, 1);
	request->payer = KV_TENANT_NOBODY;
	if (request->session) {
		request->session->n_outstanding--;
		kv_session_renew(request->session, server->now_ns);
		request->session = NULL;
	}
	if (!conn) {
		if (status != KV_OK)
			srv_reject(server, status);
		kv_sm_move(&request->sm, REQ_REPLY);
		srv_request_free(server, request);
		return;
	}
	if (status != KV_OK) {
		srv_request_refuse(request, status, NULL,
			request->header.opcode == KVP_OP_READ ? request->items[0].length : 0);
		return;
	}
	if (request->header.opcode == KVP_OP_READ)
		write_read_reply(request);
	else
		write_rows_reply(server, request);
	kv_sm_move(&request->sm, REQ_REPLY);
	kv_list_push_back(&conn->ready, &request->link);
	srv_conn_kick_send(conn);
}
