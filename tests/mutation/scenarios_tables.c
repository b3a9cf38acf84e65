/* Clients' tables, windows and the exact window: whose rows are where, which are gone, and which are exact.
 */
#include <string.h>

#include "tests/mutation/rig.h"
#include "tests/mutation/scenarios.h"

#define ROW_BYTES (RIG_HEAD_DIM * 4)
#define N_TOKENS  20u

/* ---- clients' tables ---- */

/* Rows of the sequence into blocks 2 and 0 of the client; `slot` in place of the last one's. */
static struct rig_frame update(uint64_t session, uint64_t sequence, int64_t slot)
{
	static uint8_t payload[2 * RIG_LAYERS * N_TOKENS * ROW_BYTES + 8 * N_TOKENS];
	const uint32_t side_bytes = RIG_LAYERS * N_TOKENS * ROW_BYTES;
	struct rig_frame frame = rig_append(session, sequence, 0, N_TOKENS);
	const struct kvp_slots_req request = { 0, RIG_LAYERS, N_TOKENS, KVP_DTYPE_F32, KVP_DTYPE_F32, 0, 0,
		side_bytes, 2 * (uint64_t)side_bytes, 0 };

	memcpy(payload, frame.payload, 2 * (size_t)side_bytes);
	for (uint32_t t = 0; t < N_TOKENS; t++)
		kvp_put_u64(payload + 2 * (size_t)side_bytes + 8 * (size_t)t, (t < 16 ? 32 : 0) + t % 16);
	if (slot >= 0)
		kvp_put_u64(payload + sizeof(payload) - 8, (uint64_t)slot);
	frame.header.opcode = KVP_OP_UPDATE_SLOTS;
	frame.n_items = 0;
	frame.op_bytes = KVP_BYTES(slots_req);
	kvp_slots_req_encode(&request, frame.op);
	frame.payload = payload;
	frame.payload_bytes = sizeof(payload);
	return frame;
}

static struct rig_frame decode(uint64_t session, uint32_t first, uint32_t second)
{
	static uint8_t payload[RIG_Q_HEADS * ROW_BYTES + 64 + 4];
	const uint32_t q_bytes = RIG_Q_HEADS * ROW_BYTES;
	struct rig_frame frame = rig_decode(session, 0, 0);
	const struct kvp_table_req request = { 0, 1, 2, 1, KVP_DTYPE_F32, KVP_DTYPE_F32, KVP_ROWS_LSE,
		q_bytes, q_bytes + 64, 0, 0, 0, 0 };

	memcpy(payload, frame.payload, q_bytes);
	kvp_put_u32(payload + q_bytes, first);
	kvp_put_u32(payload + q_bytes + 4, second);
	kvp_put_u32(payload + q_bytes + 64, N_TOKENS);
	frame.header.opcode = KVP_OP_DECODE_TABLE;
	frame.n_items = 0;
	frame.op_bytes = KVP_BYTES(table_req);
	kvp_table_req_encode(&request, frame.op);
	frame.payload = payload;
	frame.payload_bytes = sizeof(payload);
	return frame;
}

static struct kvp_rows_reply_item item_of(const struct rig_reply *reply)
{
	struct kvp_rows_reply_item item;

	CHECK(reply->header.status == KV_OK && reply->header.n_items == 1);
	kvp_rows_reply_item_decode(reply->body + reply->header.op_bytes, KVP_ITEM_BYTES, &item);
	return item;
}

static struct kvp_rows_reply_item ask(const struct rig_frame *frame)
{
	return item_of(rig_call(0, frame));
}

/* A client says which block holds what; what is not its own is refused. */
static void clients_manage_their_tables(void)
{
	const struct rig_open open = { .reserve_blocks = 3, .flags = KVP_OPEN_CLIENT_TABLES };
	struct rig_reply reply;
	uint64_t ids[4];

	rig_start();
	rig_hello(0, 1);
	const uint64_t session = rig_open_session(0, &open);

	CHECK(rig_blocks().n_free == RIG_BLOCKS - 3);
	struct rig_frame frame = update(session, 5, -1);

	CHECK(ask(&frame).status == KV_OK);
	frame = decode(session, 2, 0);
	rig_check_output(rig_call(0, &frame), 5, N_TOKENS);
	frame = decode(session, 2, 3);
	struct kvp_rows_reply_item item = ask(&frame);

	CHECK(item.status == KV_SLOT_OUT_OF_RANGE && item.row == 1);
	frame = update(session, 6, 48);
	item = ask(&frame);
	CHECK(item.status == KV_SLOT_OUT_OF_RANGE && item.row == N_TOKENS - 1);
	frame = decode(session, 2, 0);
	rig_check_output(rig_call(0, &frame), 5, N_TOKENS);
	/* All at once: they take effect in order. */
	for (uint32_t i = 0; i < 4; i++) {
		frame = i % 2 ? decode(session, 2, 0) : update(session, 6 + i, -1);
		ids[i] = rig_send(0, &frame);
	}
	rig_settle();
	for (uint32_t i = 0; i < 4; i++) {
		CHECK(rig_take(0, ids[i], &reply));
		if (i % 2)
			rig_check_output(&reply, 5 + i, N_TOKENS);
		else
			CHECK(item_of(&reply).status == KV_OK);
	}
	rig_stop();
}

static void overlapping_segments_are_refused(void)
{
	const struct rig_open open = { .reserve_blocks = 3, .flags = KVP_OPEN_CLIENT_TABLES };

	rig_start();
	rig_hello(0, 1);
	const uint64_t session = rig_open_session(0, &open);
	struct rig_frame frame = update(session, 5, -1);

	kvp_put_u64(frame.op + KVP_AT(slots_req, slots_off), 0);
	CHECK(rig_ask(0, &frame) == KV_BAD_ARG);
	frame = decode(session, 2, 0);
	kvp_put_u64(frame.op + KVP_AT(table_req, table_off), 0);
	CHECK(rig_ask(0, &frame) == KV_BAD_ARG);
	frame = rig_append(session, 5, 0, 1);
	CHECK(rig_ask(0, &frame) == KV_BAD_STATE);
	rig_stop();
}

/* ---- windows ---- */

static const char windowed[] = "{\"name\":\"windowed\",\"layers\":2,\"q_heads\":2,\"kv_heads\":1,"
			       "\"head_dim\":16,\"k\":\"f32\",\"v\":\"f32\",\"block_size\":16,"
			       "\"blocks\":6,\"window\":16,\"tokens_max\":1000}";
static const char exact[] = "{\"name\":\"exact\",\"layers\":2,\"q_heads\":2,\"kv_heads\":1,"
			    "\"head_dim\":16,\"k\":\"tq2\",\"v\":\"tq2\",\"block_size\":16,"
			    "\"blocks\":6,\"exact_tokens\":16}";

static uint64_t open_on(const char *name, const char *json)
{
	const struct rig_open open = { .name = NULL };

	CHECK(rig_control(SRV_CONTROL_POOL_CREATE, NULL, json)->status == KV_OK);
	const struct rig_frame frame = rig_open_frame(name, &open);
	const struct rig_reply *reply = rig_call(0, &frame);

	CHECK(reply->header.status == KV_OK);
	return kvp_get_u64(reply->body);
}

static enum kv_status truncate(uint64_t session, uint32_t length)
{
	struct rig_frame frame = rig_plain(KVP_OP_TRUNCATE, session);

	frame.n_items = 1;
	frame.items[0] = (struct kvp_rows_item){ .sequence = 5, .position = length };
	return rig_item(0, &frame);
}

static void append_until(uint64_t session, uint32_t first, uint32_t end)
{
	for (uint32_t n = first; n < end; n += 10) {
		const struct rig_frame frame = rig_append(session, 5, n, 10);

		CHECK(rig_item(0, &frame) == KV_OK);
		rig_settle();
	}
}

/* A sequence of many more tokens than the pool has room for; what is gone is not read by mistake. */
static void windows_leave_blocks_behind(void)
{
	rig_start();
	rig_hello(0, 1);
	const uint64_t session = open_on("windowed", windowed);
	struct rig_frame frame;

	append_until(session, 0, 300);
	CHECK(rig_length(0, session, 5) == 300);
	frame = rig_decode(session, 5, 300);
	CHECK(rig_item(0, &frame) == KV_OK);
	frame = rig_decode(session, 5, 200);
	CHECK(rig_item(0, &frame) == KV_WINDOW_GONE);
	frame = rig_read(session, 5, 20);
	CHECK(rig_ask(0, &frame) == KV_WINDOW_GONE);
	CHECK(truncate(session, 200) == KV_WINDOW_GONE);
	CHECK(truncate(session, 297) == KV_OK);
	append_until(session, 297, 400);
	CHECK(truncate(session, 0) == KV_OK);
	rig_settle();
	append_until(session, 0, 30);
	CHECK(rig_length(0, session, 5) == 30);
	rig_stop();
}

static uint32_t n_exact(uint64_t session)
{
	const struct kvp_tell_req request = { 5, 1, 0 };
	struct rig_frame frame = rig_plain(KVP_OP_TELL, session);
	struct kvp_tell_item item;

	frame.op_bytes = KVP_BYTES(tell_req);
	kvp_tell_req_encode(&request, frame.op);
	const struct rig_reply *reply = rig_call(0, &frame);

	CHECK(reply->header.status == KV_OK && reply->header.n_items == 1);
	kvp_tell_item_decode(reply->body + reply->header.op_bytes, KVP_ITEM_BYTES, &item);
	return item.n_exact;
}

/* All tokens are exact, but for what bf16 rounds off. */
static void check_exact(uint64_t session, uint32_t n_tokens)
{
	const struct kvp_read_req request = { 5, 0, RIG_LAYERS, 0, n_tokens, KVP_DTYPE_F32, KVP_DTYPE_F32,
		KVP_READ_EXACT };
	struct rig_frame frame = rig_plain(KVP_OP_READ, session);

	frame.op_bytes = KVP_BYTES(read_req);
	kvp_read_req_encode(&request, frame.op);
	const struct rig_reply *reply = rig_call(0, &frame);

	CHECK(reply->header.status == KV_OK);
	const uint8_t *at = reply->body + kvp_payload_start(KVP_BYTES(read_reply), 0, KVP_ITEM_BYTES);
	float row[RIG_HEAD_DIM];

	for (uint32_t t = 0; t < n_tokens; t++) {
		rig_row(5, 0, t, true, row);
		for (uint32_t i = 0; i < RIG_HEAD_DIM; i++, at += 4) {
			const float error = kvp_get_f32(at) - row[i];

			CHECK(error < 0.005f && error > -0.005f);
		}
	}
}

static void recent_tokens_are_exact(void)
{
	rig_start();
	rig_hello(0, 1);
	const uint64_t session = open_on("exact", exact);

	append_until(session, 0, 10);
	CHECK(n_exact(session) == 10);
	check_exact(session, 10);
	append_until(session, 10, 40);
	CHECK(n_exact(session) == 16);
	CHECK(truncate(session, 30) == KV_OK);
	CHECK(n_exact(session) == 6);
	append_until(session, 30, 40);
	CHECK(n_exact(session) == 16);
	rig_stop();
}

void scenario_tables(void)
{
	clients_manage_their_tables();
	overlapping_segments_are_refused();
	windows_leave_blocks_behind();
	recent_tokens_are_exact();
}
