/*
 * UPDATE_SLOTS and DECODE_TABLE: row operations of sessions whose client manages block tables itself. They
 * take the way of the others from here on, as one item; slots and tables stay in the payload until the item
 * is put into a batch.
 */
#include "server/internal.h"

#include <string.h>

#include "core/format.h"

/*
 * Takes a request with one item of the kind, whose rows are those of the whole frame; the reply has that item
 * although the request has none. NULL: refused (status is what the payload's check said), or parked.
 */
static struct srv_request *start(struct srv_conn *conn, struct kv_session *session, const uint8_t *body,
	const struct kvp_rows_req *rows, uint8_t kind, enum kv_status status, struct kvp_fault *fault)
{
	struct srv_lane *lane = &conn->server->lanes[session->pool->pool_idx];
	const struct kvp_geometry geometry = srv_geometry_of(lane, rows->layer_first);
	struct kvp_rows_reply_layout layout;
	struct kvp_header header = conn->header;

	header.n_items = 1;
	if (status == KV_OK)
		status = kvp_rows_reply_layout(
			&header, rows, &geometry, conn->server->caps.frame_bytes_max, &layout, fault);
	if (status != KV_OK) {
		srv_refuse(conn, fault, NULL, 0);
		return NULL;
	}
	struct srv_request *request = srv_rows_start(conn, body, conn->header.body_bytes, layout.body_bytes);

	if (!request)
		return NULL;
	request->session = session;
	request->lane = lane;
	request->rows = *rows;
	request->rows_layout = layout;
	request->n_items = 1;
	request->items[0] = (struct kv_item){
		.n_tokens = rows->n_tokens_total,
		.q_len = rows->n_q_total,
		.kind = kind,
		.window = rows->window,
		.layer = KV_LAYER_NONE,
		.row = KV_ROW_NONE,
	};
	request->frame = srv_frame_rows_of(rows);
	return request;
}

void srv_slots_dispatch(struct srv_conn *conn, struct kv_session *session, const uint8_t *body)
{
	const struct srv_lane *lane = &conn->server->lanes[session->pool->pool_idx];
	const struct kvp_slots_req *slots = &conn->server->scratch.slots;
	const struct kvp_rows_req rows = kvp_slots_as_rows(slots);
	const struct kvp_geometry geometry = srv_geometry_of(lane, slots->layer_first);
	struct kvp_slots_segments segments;
	struct kvp_fault fault = { 0 };
	const enum kv_status status =
		kvp_slots_check_payload(&conn->header, slots, &geometry, &segments, &fault);
	struct srv_request *request = start(conn, session, body, &rows, KV_ITEM_UPDATE_SLOTS, status, &fault);

	if (!request)
		return;
	const uint64_t in_start = kvp_payload_start(conn->header.op_bytes, 0, conn->header.item_bytes);

	request->frame.k = srv_segment_at(request->in, in_start, &segments.k);
	request->frame.v = srv_segment_at(request->in, in_start, &segments.v);
	request->frame.slots = srv_segment_at(request->in, in_start, &segments.slots);
}

void srv_table_dispatch(struct srv_conn *conn, struct kv_session *session, const uint8_t *body)
{
	const struct srv_lane *lane = &conn->server->lanes[session->pool->pool_idx];
	const struct kvp_table_req *table = &conn->server->scratch.table;
	const struct kvp_rows_req rows = kvp_table_as_rows(table);
	const struct kvp_geometry geometry = srv_geometry_of(lane, table->layer);
	struct kvp_table_segments segments;
	struct kvp_fault fault = { 0 };
	const enum kv_status status =
		kvp_table_check_payload(&conn->header, table, &geometry, &segments, &fault);
	struct srv_request *request = start(conn, session, body, &rows, KV_ITEM_DECODE_TABLE, status, &fault);

	if (!request)
		return;
	const struct kvp_rows_reply_layout *layout = &request->rows_layout;
	const uint64_t in_start = kvp_payload_start(conn->header.op_bytes, 0, conn->header.item_bytes);
	uint8_t *reply_body = request->out + KVP_HEADER_BYTES;

	request->frame.q = srv_segment_at(request->in, in_start, &segments.q);
	request->frame.table = srv_segment_at(request->in, in_start, &segments.table);
	request->frame.seen = srv_segment_at(request->in, in_start, &segments.seen);
	request->frame.n_sequences = table->n_sequences;
	request->frame.table_stride = table->table_stride;
	request->frame.out = srv_segment_at(reply_body, layout->payload_start, &layout->out);
	request->frame.lse = (float *)(void *)srv_segment_at(reply_body, layout->payload_start, &layout->lse);
}
