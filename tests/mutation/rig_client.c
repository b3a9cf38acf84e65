/* The frames that scenarios send, and what must come back. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/mutation/rig.h"

#define ROW_BYTES  (RIG_HEAD_DIM * 4)
#define TOKENS_MAX 128u

void rig_hello(uint32_t conn, uint32_t uid)
{
	const struct kvp_hello_req hello = { .proto_min = 1, .proto_max = 1, .boot_id_seen = rig.boot_id };
	struct rig_frame frame = rig_plain(KVP_OP_HELLO, 0);
	struct kvp_hello_reply reply;

	CHECK(mem_connect(&rig.io, conn, uid));
	frame.op_bytes = KVP_BYTES(hello_req);
	kvp_hello_req_encode(&hello, frame.op);
	const struct rig_reply *got = rig_call(conn, &frame);

	CHECK(got->header.status == KV_OK);
	kvp_hello_reply_decode(got->body, got->header.op_bytes, &reply);
	CHECK(reply.boot_id != 0 && reply.proto == 1 && reply.n_pools >= 1);
	CHECK(rig.boot_id == 0 || rig.boot_id == reply.boot_id);
	rig.boot_id = reply.boot_id;
}

bool rig_is_closed(uint32_t conn)
{
	return rig.io.conns[conn].phase == MEM_FREE;
}

void rig_goodbye(uint32_t conn)
{
	rig.io.conns[conn].is_ended = true;
	rig_settle();
	CHECK(rig_is_closed(conn));
}

struct rig_frame rig_plain(uint16_t opcode, uint64_t session)
{
	return (struct rig_frame){ .header = { .opcode = opcode, .session = session } };
}

struct rig_frame rig_open_frame(const char *pool, const struct rig_open *open)
{
	static char names[KVP_POOL_NAME_BYTES_MAX + KVP_SESSION_NAME_BYTES_MAX];
	const size_t pool_bytes = strlen(pool), name_bytes = open->name ? strlen(open->name) : 0;
	const struct kvp_open_req request = {
		.pool_name_bytes = (uint16_t)pool_bytes,
		.session_name_bytes = (uint16_t)name_bytes,
		.lease_ms = open->lease_ms,
		.reserve_blocks = open->reserve_blocks,
		.tokens_max = open->tokens_max,
		.flags = open->flags,
		.fingerprint = open->fingerprint,
	};
	struct rig_frame frame = rig_plain(KVP_OP_OPEN, 0);

	memcpy(names, pool, pool_bytes);
	if (name_bytes > 0)
		memcpy(names + pool_bytes, open->name, name_bytes);
	frame.op_bytes = KVP_BYTES(open_req);
	kvp_open_req_encode(&request, frame.op);
	frame.payload = names;
	frame.payload_bytes = pool_bytes + name_bytes;
	return frame;
}

uint64_t rig_open_session(uint32_t conn, const struct rig_open *open)
{
	const struct rig_frame frame = rig_open_frame(RIG_POOL, open);
	const struct rig_reply *reply = rig_call(conn, &frame);
	struct kvp_open_reply opened;

	CHECK(reply->header.status == KV_OK);
	kvp_open_reply_decode(reply->body, reply->header.op_bytes, &opened);
	CHECK(opened.session != 0 && opened.boot_id == rig.boot_id && opened.n_layers == RIG_LAYERS);
	CHECK(opened.reserved_blocks == open->reserve_blocks);
	return opened.session;
}

/* ---- rows ---- */

void rig_row(uint64_t sequence, uint32_t layer, uint32_t idx, bool is_k, float row[RIG_HEAD_DIM])
{
	uint32_t state = (uint32_t)sequence * 7919 + layer * 104729 + idx * 1299709 + is_k * 15485863 + 1;

	for (uint32_t i = 0; i < RIG_HEAD_DIM; i++) {
		state = state * 1664525 + 1013904223;
		row[i] = (float)(state >> 8) / 8388608.0f - 1.0f;
	}
}

struct rig_frame rig_append(uint64_t session, uint64_t sequence, uint32_t position, uint32_t n_tokens)
{
	static float rows[2][RIG_LAYERS][TOKENS_MAX][RIG_HEAD_DIM];
	struct rig_frame frame = rig_plain(KVP_OP_APPEND, session);
	const uint32_t side_bytes = RIG_LAYERS * n_tokens * ROW_BYTES; /* a multiple of 64 */
	const struct kvp_rows_req request = { 0, RIG_LAYERS, n_tokens, 0, KVP_DTYPE_F32, KVP_DTYPE_F32, 0, 0,
		0, 0, side_bytes, KVP_ABSENT, 0, 0, 0 };
	float *at = &rows[0][0][0][0];

	CHECK(n_tokens > 0 && n_tokens <= TOKENS_MAX);
	for (uint32_t v = 0; v < 2; v++) {
		for (uint32_t l = 0; l < RIG_LAYERS; l++) {
			for (uint32_t t = 0; t < n_tokens; t++, at += RIG_HEAD_DIM)
				rig_row(sequence, l, position + t, v == 0, at);
		}
	}
	frame.op_bytes = KVP_BYTES(rows_req);
	kvp_rows_req_encode(&request, frame.op);
	frame.n_items = 1;
	frame.items[0] = (struct kvp_rows_item){ sequence, position, n_tokens, 0,
		position == 0 ? KVP_ITEM_CREATE : 0 };
	frame.payload = rows;
	frame.payload_bytes = 2 * (uint64_t)side_bytes;
	return frame;
}

struct rig_frame rig_decode(uint64_t session, uint64_t sequence, uint32_t length)
{
	static float queries[RIG_Q_HEADS][RIG_HEAD_DIM];
	struct rig_frame frame = rig_plain(KVP_OP_DECODE, session);
	const struct kvp_rows_req request = { 0, 1, 0, 1, 0, 0, KVP_DTYPE_F32, KVP_DTYPE_F32, KVP_ROWS_LSE,
		KVP_ABSENT, KVP_ABSENT, 0, 0, 0, 0 };

	for (uint32_t h = 0; h < RIG_Q_HEADS; h++)
		rig_row(99, 0, h, true, queries[h]);
	frame.op_bytes = KVP_BYTES(rows_req);
	kvp_rows_req_encode(&request, frame.op);
	frame.n_items = 1;
	frame.items[0] = (struct kvp_rows_item){ sequence, length, 0, 1, 0 };
	frame.payload = queries;
	frame.payload_bytes = sizeof(queries);
	return frame;
}

struct rig_frame rig_read(uint64_t session, uint64_t sequence, uint32_t n_tokens)
{
	struct rig_frame frame = rig_plain(KVP_OP_READ, session);
	const struct kvp_read_req request = { sequence, 0, RIG_LAYERS, 0, n_tokens, KVP_DTYPE_F32,
		KVP_DTYPE_F32, 0 };

	frame.op_bytes = KVP_BYTES(read_req);
	kvp_read_req_encode(&request, frame.op);
	return frame;
}

enum kv_status rig_item(uint32_t conn, const struct rig_frame *frame)
{
	const struct rig_reply *reply = rig_call(conn, frame);
	struct kvp_rows_reply_item item;
	struct kvp_rows_reply rows;

	CHECK(reply->header.status == KV_OK && reply->header.n_items == frame->n_items);
	kvp_rows_reply_decode(reply->body, reply->header.op_bytes, &rows);
	CHECK(rows.n_ok + rows.n_failed == frame->n_items);
	kvp_rows_reply_item_decode(reply->body + reply->header.op_bytes, reply->header.item_bytes, &item);
	CHECK(item.sequence == frame->items[0].sequence);
	return (enum kv_status)item.status;
}

uint32_t rig_length(uint32_t conn, uint64_t session, uint64_t sequence)
{
	const struct kvp_tell_req request = { sequence, 1, KVP_TELL_PER_LAYER };
	struct rig_frame frame = rig_plain(KVP_OP_TELL, session);
	struct kvp_tell_item item;

	frame.op_bytes = KVP_BYTES(tell_req);
	kvp_tell_req_encode(&request, frame.op);
	const struct rig_reply *reply = rig_call(conn, &frame);

	CHECK(reply->header.status == KV_OK);
	if (reply->header.n_items == 0)
		return UINT32_MAX;
	kvp_tell_item_decode(reply->body + reply->header.op_bytes, reply->header.item_bytes, &item);
	if (item.sequence != sequence)
		return UINT32_MAX;
	const uint8_t *lengths = reply->body + kvp_payload_start(reply->header.op_bytes, 1, KVP_ITEM_BYTES);

	CHECK(item.length_min == item.length_max);
	for (uint32_t l = 0; l < RIG_LAYERS; l++)
		CHECK(kvp_get_u32(lengths + 4 * l) == item.length_min);
	return item.length_min;
}

void rig_check_rows(uint32_t conn, uint64_t session, uint64_t sequence, uint32_t n_tokens)
{
	const struct rig_frame frame = rig_read(session, sequence, n_tokens);
	const struct rig_reply *reply = rig_call(conn, &frame);
	const uint8_t *at = reply->body + kvp_payload_start(KVP_BYTES(read_reply), 0, KVP_ITEM_BYTES);
	float row[RIG_HEAD_DIM];

	CHECK(reply->header.status == KV_OK);
	for (uint32_t v = 0; v < 2; v++) {
		for (uint32_t l = 0; l < RIG_LAYERS; l++) {
			for (uint32_t t = 0; t < n_tokens; t++, at += ROW_BYTES) {
				rig_row(sequence, l, t, v == 0, row);
				CHECK(memcmp(at, row, ROW_BYTES) == 0);
			}
		}
	}
	CHECK(at == reply->body + reply->header.body_bytes);
}

/* Softmax attention of one query head over the first `length` rows of layer 0. */
static double attend(
	uint64_t sequence, uint32_t length, const float q[RIG_HEAD_DIM], double out[RIG_HEAD_DIM])
{
	float row[RIG_HEAD_DIM];
	double sum = 0;

	memset(out, 0, RIG_HEAD_DIM * sizeof(out[0]));
	for (uint32_t t = 0; t < length; t++) {
		double score = 0;

		rig_row(sequence, 0, t, true, row);
		for (uint32_t i = 0; i < RIG_HEAD_DIM; i++)
			score += (double)q[i] * (double)row[i];
		const double weight = exp(score / sqrt(RIG_HEAD_DIM));

		rig_row(sequence, 0, t, false, row);
		for (uint32_t i = 0; i < RIG_HEAD_DIM; i++)
			out[i] += weight * (double)row[i];
		sum += weight;
	}
	for (uint32_t i = 0; i < RIG_HEAD_DIM; i++)
		out[i] /= sum;
	return log(sum);
}

void rig_check_output(const struct rig_reply *reply, uint64_t sequence, uint32_t length)
{
	const uint8_t *payload = reply->body + kvp_payload_start(reply->header.op_bytes, 1, KVP_ITEM_BYTES);
	struct kvp_rows_reply rows;
	struct kvp_rows_reply_item item;

	CHECK(reply->header.status == KV_OK);
	kvp_rows_reply_decode(reply->body, reply->header.op_bytes, &rows);
	kvp_rows_reply_item_decode(reply->body + reply->header.op_bytes, KVP_ITEM_BYTES, &item);
	CHECK(item.status == KV_OK && item.q_len == 1 && rows.n_q_total == 1);
	for (uint32_t h = 0; h < RIG_Q_HEADS; h++) {
		double wanted[RIG_HEAD_DIM];
		float q[RIG_HEAD_DIM];

		rig_row(99, 0, h, true, q);
		const double lse = attend(sequence, length, q, wanted);
		const uint8_t *out = payload + rows.out_off + (size_t)h * ROW_BYTES;

		for (uint32_t i = 0; i < RIG_HEAD_DIM; i++)
			CHECK(fabs((double)kvp_get_f32(out + 4 * i) - wanted[i]) < 1e-5);
		CHECK(fabs((double)kvp_get_f32(payload + rows.lse_off + 4 * h) - lse) < 1e-5);
	}
}

void rig_check_decode(uint32_t conn, uint64_t session, uint64_t sequence, uint32_t length)
{
	const struct rig_frame frame = rig_decode(session, sequence, length);

	rig_check_output(rig_call(conn, &frame), sequence, length);
}
