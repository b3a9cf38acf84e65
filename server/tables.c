/*
 * UPDATE_SLOTS and DECODE_TABLE: row operations of sessions whose client manages block tables itself. They
 * take the way of the others from here on, as one item; slots and tables stay in the payload until the item
 * is put into a batch.
 */
#include "server/internal.h"

#include <string.h>

#include "core/format.h"

/* One item of the kind, whose rows are those of the whole frame. */
static void begin(struct srv_request *request, struct kv_session *session, struct srv_lane *lane,
	const struct kvp_rows_req *rows, uint8_t kind)
{
	request->session = session;
	request->lane = lane;
	request->rows = *rows;
	request->n_items = 1;
	request->items[0] = (struct kv_item){
		.n_tokens = rows->n_tokens_total,
		.q_len = rows->n_q_total,
		.kind = kind,
		.window = rows->window,
		.layer = KV_LAYER_NONE,
		.row = KV_ROW_NONE,
	};
	request->frame = (struct kv_frame_rows){
		.layer_first = rows->layer_first,
		.n_layers = rows->n_layers,
		.n_tokens_total = rows->n_tokens_total,
		.n_q_total = rows->n_q_total,
		.k_dtype = rows->k_dtype,
		.v_dtype = rows->v_dtype,
		.q_dtype = rows->q_dtype,
		.out_dtype = rows->out_dtype,
		.decode_flags = (uint8_t)srv_decode_flags(rows->flags),
		.scale = rows->scale,
		.window = rows->window,
	};
}

/* The reply's layout: one item, although the request has none. */
static enum kv_status lay_out(struct srv_conn *conn, const struct kvp_rows_req *rows,
	const struct kvp_geometry *geometry, struct kvp_rows_reply_layout *layout, struct kvp_fault *fault)
{
	struct kvp_header header = conn->header;

	header.n_items = 1;
	return kvp_rows_reply_layout(
		&header, rows, geometry, conn->server->caps.frame_bytes_max, layout, fault);
}

void srv_slots_dispatch(struct srv_conn *conn, struct kv_session *session, const uint8_t *body)
{
	struct srv_server *server = conn->server;
	struct srv_lane *lane = &server->lanes[session->pool->pool_idx];
	const struct kvp_slots_req *slots = &server->scratch.slots;
	const struct kvp_rows_req rows = kvp_slots_as_rows(slots);
	const struct kvp_geometry geometry = srv_geometry_of(lane, slots->layer_first);
	struct kvp_slots_segments segments;
	struct kvp_rows_reply_layout layout;
	struct kvp_fault fault = { 0 };
	enum kv_status status = kvp_slots_check_payload(&conn->header, slots, &geometry, &segments, &fault);

	if (status == KV_OK)
		status = lay_out(conn, &rows, &geometry, &layout, &fault);
	if (status != KV_OK) {
		srv_refuse(conn, &fault, NULL, 0);
		return;
	}
	struct srv_request *request = srv_rows_start(conn, body, conn->header.body_bytes, layout.body_bytes);

	if (!request)
		return;
	const uint64_t in_start = kvp_payload_start(conn->header.op_bytes, 0, conn->header.item_bytes);

	begin(request, session, lane, &rows, KV_ITEM_UPDATE_SLOTS);
	request->rows_layout = layout;
	request->frame.k = srv_segment_at(request->in, in_start, &segments.k);
	request->frame.v = srv_segment_at(request->in, in_start, &segments.v);
	request->frame.slots = srv_segment_at(request->in, in_start, &segments.slots);
}

void srv_table_dispatch(struct srv_conn *conn, struct kv_session *session, const uint8_t *body)
{
	struct srv_server *server = conn->server;
	struct srv_lane *lane = &server->lanes[session->pool->pool_idx];
	const struct kvp_table_req *table = &server->scratch.table;
	const struct kvp_rows_req rows = kvp_table_as_rows(table);
	const struct kvp_geometry geometry = srv_geometry_of(lane, table->layer);
	struct kvp_table_segments segments;
	struct kvp_rows_reply_layout layout;
	struct kvp_fault fault = { 0 };
	enum kv_status status = kvp_table_check_payload(&conn->header, table, &geometry, &segments, &fault);

	if (status == KV_OK)
		status = lay_out(conn, &rows, &geometry, &layout, &fault);
	if (status != KV_OK) {
		srv_refuse(conn, &fault, NULL, 0);
		return;
	}
	struct srv_request *request = srv_rows_start(conn, body, conn->header.body_bytes, layout.body_bytes);

	if (!request)
		return;
	const uint64_t in_start = kvp_payload_start(conn->header.op_bytes, 0, conn->header.item_bytes);
	uint8_t *reply_body = request->out + KVP_HEADER_BYTES;

	begin(request, session, lane, &rows, KV_ITEM_DECODE_TABLE);
	request->rows_layout = layout;
	request->frame.q = srv_segment_at(request->in, in_start, &segments.q);
	request->frame.table = srv_segment_at(request->in, in_start, &segments.table);
	request->frame.seen = srv_segment_at(request->in, in_start, &segments.seen);
	request->frame.n_sequences = table->n_sequences;
	request->frame.table_stride = table->table_stride;
	request->frame.out = srv_segment_at(reply_body, layout.payload_start, &layout.out);
	request->frame.lse = (float *)(void *)srv_segment_at(reply_body, layout.payload_start, &layout.lse);
}
