/*
 * UPDATE_SLOTS and DECODE_TABLE: one frame each, laid out here because nothing of it is split.
 */
#include <string.h>

#include "proto/client/conn.h"

static uint64_t aligned(uint64_t n)
{
	return (n + KVP_ALIGN_BYTES - 1) / KVP_ALIGN_BYTES * KVP_ALIGN_BYTES;
}

/* Bytes between segments are whatever the buffer held: they are zeroed with the segment before them. */
static void put_segment(uint8_t *payload, uint64_t off, const void *data, uint64_t n_bytes, uint64_t next_off)
{
	memcpy(payload + off, data, (size_t)n_bytes);
	if (next_off > off + n_bytes)
		memset(payload + off + n_bytes, 0, (size_t)(next_off - off - n_bytes));
}

static enum tqkv_status call(struct tqkv_session *session, const struct tqkv_shape *shape,
	void (*fill)(struct tqkv_request *request, const void *arg), const void *arg, uint32_t timeout_ms,
	struct tqkv_reply *reply, uint32_t *bad_row, struct tqkv_error *err)
{
	const enum tqkv_status status = tqkv_call(session->conn, session, shape, fill, arg,
		tqkv_conn_deadline_ns(session->conn, timeout_ms), reply, NULL, err);

	if (bad_row)
		*bad_row = UINT32_MAX;
	if (status != TQKV_OK)
		return status;
	if (reply->n_items != 1)
		return tqkv_fail(err, TQKV_BAD_FRAME, "%u items came, 1 was asked for", reply->n_items);
	if (bad_row)
		*bad_row = reply->items[0].row;
	if (reply->items[0].status == TQKV_OK)
		return TQKV_OK;

	const enum tqkv_status refused = reply->items[0].status;

	tqkv_fail(err, refused, "refused at row %u", reply->items[0].row);
	if (err)
		err->is_local = false;
	return refused;
}

/* ---- UPDATE_SLOTS ---- */

struct slots_call {
	const struct tqkv_slots *slots;
	struct kvp_slots_req req;
};

static void fill_slots(struct tqkv_request *request, const void *arg)
{
	const struct slots_call *slots = arg;
	const struct kvp_slots_req *req = &slots->req;
	uint8_t *payload = tqkv_request_payload(request);

	kvp_slots_req_encode(req, tqkv_request_body(request));
	put_segment(payload, req->k_off, slots->slots->k, slots->slots->k_bytes, req->v_off);
	put_segment(payload, req->v_off, slots->slots->v, slots->slots->v_bytes, req->slots_off);
	for (uint32_t t = 0; t < req->n_tokens; t++)
		kvp_put_u64(payload + req->slots_off + 8 * (uint64_t)t, (uint64_t)slots->slots->slots[t]);
}

enum tqkv_status tqkv_update_slots(struct tqkv_session *session, const struct tqkv_slots *slots,
	uint32_t timeout_ms, uint32_t *bad_row, struct tqkv_error *err)
{
	if (!session || !slots)
		return tqkv_fail_null(err, "session, slots");

	const uint64_t v_off = aligned(slots->k_bytes), slots_off = v_off + aligned(slots->v_bytes);
	const bool is_packed = slots->k_dtype == TQKV_PACKED || slots->v_dtype == TQKV_PACKED;
	struct tqkv_reply reply;
	const struct slots_call arg = { .slots = slots,
		.req = { .layer_first = slots->layer_first,
			.n_layers = slots->n_layers,
			.n_tokens = slots->n_tokens,
			.k_dtype = slots->k_dtype,
			.v_dtype = slots->v_dtype,
			.v_off = v_off,
			.slots_off = slots_off,
			.fingerprint = is_packed ? tqkv_session_info(session)->fingerprint : 0 } };
	const struct tqkv_shape shape = { .opcode = KVP_OP_UPDATE_SLOTS,
		.op_bytes = KVP_BYTES(slots_req),
		.payload_bytes = slots_off + 8 * (uint64_t)slots->n_tokens };

	if (slots->n_tokens == 0 || !slots->k || !slots->v || !slots->slots)
		return tqkv_fail(err, TQKV_BAD_ARG, "no tokens, or no rows or slots for them");
	return call(session, &shape, fill_slots, &arg, timeout_ms, &reply, bad_row, err);
}

/* ---- DECODE_TABLE ---- */

struct table_call {
	const struct tqkv_table *table;
	struct kvp_table_req req;
	uint64_t q_bytes;
};

static void fill_table(struct tqkv_request *request, const void *arg)
{
	const struct table_call *table = arg;
	const struct kvp_table_req *req = &table->req;
	const uint64_t n_entries = (uint64_t)req->n_sequences * req->table_stride;
	uint8_t *payload = tqkv_request_payload(request);

	kvp_table_req_encode(req, tqkv_request_body(request));
	put_segment(payload, req->q_off, table->table->q, table->q_bytes, req->table_off);
	memset(payload + req->table_off, 0, (size_t)(req->seen_off - req->table_off));
	for (uint64_t i = 0; i < n_entries; i++)
		kvp_put_u32(payload + req->table_off + 4 * i, (uint32_t)table->table->table[i]);
	for (uint32_t s = 0; s < req->n_sequences; s++)
		kvp_put_u32(payload + req->seen_off + 4 * (uint64_t)s, table->table->seen[s]);
}

enum tqkv_status tqkv_decode_table(struct tqkv_session *session, const struct tqkv_table *table,
	uint32_t timeout_ms, uint32_t *bad_row, struct tqkv_error *err)
{
	if (!session || !table)
		return tqkv_fail_null(err, "session, table");

	const struct tqkv_session_info *info = tqkv_session_info(session);
	const uint64_t n_q = (uint64_t)table->n_sequences * table->q_len;
	const uint64_t q_bytes = n_q * info->q_heads * info->k_head_dim * kvp_dtype_bytes(table->q_dtype);
	const uint64_t table_off = aligned(q_bytes);
	const uint64_t seen_off = table_off + aligned(4 * (uint64_t)table->n_sequences * table->table_stride);
	struct tqkv_reply reply;
	enum tqkv_status status;
	const struct table_call arg = { .table = table,
		.q_bytes = q_bytes,
		.req = { .layer = table->layer,
			.n_sequences = table->n_sequences,
			.table_stride = table->table_stride,
			.n_q_total = (uint32_t)n_q,
			.q_dtype = table->q_dtype,
			.out_dtype = table->out_dtype,
			.flags = table->flags,
			.table_off = table_off,
			.seen_off = seen_off,
			.scale = table->scale,
			.window = table->window } };
	const struct tqkv_shape shape = { .opcode = KVP_OP_DECODE_TABLE,
		.op_bytes = KVP_BYTES(table_req),
		.payload_bytes = seen_off + 4 * (uint64_t)table->n_sequences };

	if (n_q == 0 || n_q > UINT32_MAX || q_bytes == 0 || !table->q || !table->table || !table->seen ||
		!table->out || ((table->flags & TQKV_LSE) && !table->lse))
		return tqkv_fail(err, TQKV_BAD_ARG, "no queries, or no table, lengths or room for outputs");
	status = call(session, &shape, fill_table, &arg, timeout_ms, &reply, bad_row, err);
	if (status != TQKV_OK)
		return status;
	memcpy(table->out, reply.out, reply.out_bytes);
	if (reply.lse)
		memcpy(table->lse, reply.lse, n_q * info->q_heads * sizeof(float));
	return TQKV_OK;
}
