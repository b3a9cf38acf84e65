/* Rows: what is stored comes back, what is refused leaves no trace, and blocks go where they belong. */
#include <math.h>
#include <string.h>

#include "tests/mutation/rig.h"
#include "tests/mutation/scenarios.h"

static const struct rig_open plain = { .name = NULL };

/* Rows come back bit by bit, and attention sees them, also behind TRUNCATE and in a reused sequence id. */
static void rows_come_back(void)
{
	rig_start();
	rig_hello(0, 1);
	const uint64_t session = rig_open_session(0, &plain);
	struct rig_frame frame = rig_append(session, 5, 0, 20);

	CHECK(rig_item(0, &frame) == KV_OK);
	CHECK(rig_length(0, session, 5) == 20);
	CHECK(rig_blocks().n_owned == 2);
	rig_check_rows(0, session, 5, 20);
	rig_check_decode(0, session, 5, 20);
	rig_check_decode(0, session, 5, 7);
	frame = rig_append(session, 5, 20, 30);
	CHECK(rig_item(0, &frame) == KV_OK);
	rig_check_rows(0, session, 5, 50);
	rig_check_decode(0, session, 5, 50);
	CHECK(rig_blocks().n_owned == 4);

	frame = rig_plain(KVP_OP_TRUNCATE, session);
	frame.n_items = 1;
	frame.items[0] = (struct kvp_rows_item){ .sequence = 5, .position = 17 };
	CHECK(rig_item(0, &frame) == KV_OK);
	CHECK(rig_length(0, session, 5) == 17);
	rig_settle();
	CHECK(rig_blocks().n_owned == 2);
	frame = rig_append(session, 5, 17, 4);
	CHECK(rig_item(0, &frame) == KV_OK);
	rig_check_rows(0, session, 5, 21);

	frame = rig_plain(KVP_OP_FREE, session);
	frame.n_items = 1;
	frame.items[0] = (struct kvp_rows_item){ .sequence = 5 };
	CHECK(rig_item(0, &frame) == KV_OK);
	CHECK(rig_length(0, session, 5) == UINT32_MAX);
	rig_settle();
	CHECK(rig_blocks().n_free == RIG_BLOCKS);
	CHECK(rig_item(0, &frame) == KV_NOT_FOUND);
	frame = rig_append(session, 5, 0, 1);
	CHECK(rig_item(0, &frame) == KV_OK);
	rig_check_decode(0, session, 5, 1);
	rig_stop();
}

static enum kv_status fork(uint64_t session, uint64_t child, uint64_t parent, uint32_t length)
{
	struct rig_frame frame = rig_plain(KVP_OP_FORK, session);

	frame.n_items = 1;
	frame.items[0] = (struct kvp_rows_item){ .sequence = child, .position = length };
	frame.parents[0] = parent;
	return rig_item(0, &frame);
}

/* A child has its parent's rows without a block of its own, and neither sees what the other writes. */
static void children_share_and_copy(void)
{
	rig_start();
	rig_hello(0, 1);
	const uint64_t session = rig_open_session(0, &plain);
	struct rig_frame frame = rig_append(session, 5, 0, 20);

	CHECK(rig_item(0, &frame) == KV_OK);
	CHECK(fork(session, 6, 5, 20) == KV_OK);
	CHECK(fork(session, 6, 5, 20) == KV_EXISTS);
	CHECK(fork(session, 7, 5, 21) == KV_POSITION);
	CHECK(rig_length(0, session, 6) == 20);
	CHECK(rig_blocks().n_shared == 2 && rig_blocks().n_owned == 0);
	frame = rig_append(session, 6, 20, 3);
	CHECK(rig_item(0, &frame) == KV_OK);
	CHECK(rig_blocks().n_shared == 1 && rig_blocks().n_owned == 2);
	frame = rig_append(session, 5, 20, 1);
	CHECK(rig_item(0, &frame) == KV_OK);
	rig_check_rows(0, session, 5, 21);

	/* What the child copied comes back under the parent's name. */
	frame = rig_plain(KVP_OP_FREE, session);
	frame.n_items = 1;
	frame.items[0] = (struct kvp_rows_item){ .sequence = 5 };
	CHECK(rig_item(0, &frame) == KV_OK);
	CHECK(fork(session, 5, 6, 20) == KV_OK);
	rig_check_rows(0, session, 5, 20);
	rig_stop();
}

/* PUBLISH or MATCH of n tokens that are their own places; the reply's status. */
static enum kv_status ask_prefix(
	uint16_t opcode, uint64_t session, uint64_t sequence, uint32_t n_tokens, uint32_t ttl_ms)
{
	static uint8_t tokens[4 * 64];
	struct rig_frame frame = rig_plain(opcode, session);

	for (uint32_t i = 0; i < 64; i++)
		kvp_put_u32(tokens + 4 * i, i);
	frame.op_bytes = KVP_BYTES(prefix_req);
	kvp_prefix_req_encode(
		&(struct kvp_prefix_req){ .sequence = sequence, .n_tokens = n_tokens, .ttl_ms = ttl_ms },
		frame.op);
	frame.payload = tokens;
	frame.payload_bytes = 4 * (uint64_t)n_tokens;
	return rig_ask(0, &frame);
}

static enum kv_status ask_item(uint16_t opcode, uint64_t session, uint64_t sequence)
{
	struct rig_frame frame = rig_plain(opcode, session);

	frame.n_items = 1;
	frame.items[0] = (struct kvp_rows_item){ .sequence = sequence };
	return rig_item(0, &frame);
}

/* What is published outlives its sequence, is found again, ends with its time, and goes when memory is short.
 */
static void prefixes_are_kept_and_go(void)
{
	rig_start();
	rig_hello(0, 1);
	const uint64_t session = rig_open_session(0, &plain);
	struct rig_frame frame = rig_append(session, 5, 0, 40);

	CHECK(rig_item(0, &frame) == KV_OK);
	CHECK(ask_prefix(KVP_OP_MATCH, session, 6, 40, 0) == KV_NOT_FOUND);
	CHECK(ask_prefix(KVP_OP_PUBLISH, session, 5, 40, 0) == KV_OK);
	CHECK(ask_prefix(KVP_OP_PUBLISH, session, 5, 41, 0) == KV_POSITION);
	CHECK(ask_item(KVP_OP_FREE, session, 5) == KV_OK);
	rig_settle();
	CHECK(rig_blocks().n_owned == 2 && rig_blocks().n_free == RIG_BLOCKS - 2);
	CHECK(ask_prefix(KVP_OP_MATCH, session, 5, 40, 0) == KV_OK);
	CHECK(rig_length(0, session, 5) == 32);
	rig_check_rows(0, session, 5, 32);
	CHECK(rig_blocks().n_shared == 2);
	CHECK(ask_item(KVP_OP_FREE, session, 5) == KV_OK);
	rig_settle();
	/* Two sequences that fill the pool need the blocks. */
	frame = rig_append(session, 7, 0, 96);
	CHECK(rig_item(0, &frame) == KV_OK);
	frame = rig_append(session, 9, 0, 32);
	CHECK(rig_item(0, &frame) == KV_OK);
	CHECK(ask_prefix(KVP_OP_MATCH, session, 5, 40, 0) == KV_NOT_FOUND);
	CHECK(ask_item(KVP_OP_FREE, session, 7) == KV_OK);
	CHECK(ask_item(KVP_OP_FREE, session, 9) == KV_OK);
	rig_settle();
	CHECK(rig_blocks().n_free == RIG_BLOCKS);

	frame = rig_append(session, 8, 0, 16);
	CHECK(rig_item(0, &frame) == KV_OK);
	CHECK(ask_prefix(KVP_OP_PUBLISH, session, 8, 16, 20) == KV_OK);
	CHECK(rig_blocks().n_shared == 1);
	rig_turn(30);
	rig_turn(1);
	CHECK(rig_blocks().n_shared == 0 && rig_blocks().n_owned == 1);
	rig_stop();
}

/* An operator sees a prefix, and takes it out; sequences keep what they share. */
static void operators_take_prefixes_out(void)
{
	rig_start();
	rig_hello(0, 1);
	const uint64_t session = rig_open_session(0, &plain);
	struct rig_frame frame = rig_append(session, 5, 0, 40);

	CHECK(rig_item(0, &frame) == KV_OK);
	CHECK(ask_prefix(KVP_OP_PUBLISH, session, 5, 40, 0) == KV_OK);
	CHECK(ask_item(KVP_OP_FREE, session, 5) == KV_OK);
	rig_settle();
	CHECK(ask_prefix(KVP_OP_MATCH, session, 5, 40, 0) == KV_OK);
	const struct srv_control *control = rig_control(SRV_CONTROL_PREFIXES, NULL, NULL);

	CHECK(control->status == KV_OK && control->n_prefixes == 1 && control->n_rows == 1);
	rig_control_id = control->rows.prefixes[0].prefix.id;
	control = rig_control(SRV_CONTROL_PREFIX, NULL, NULL);
	CHECK(control->status == KV_OK && control->rows.prefixes[0].prefix.n_tokens == 32);
	CHECK(control->rows.prefixes[0].prefix.n_hits == 1);
	CHECK(rig_control(SRV_CONTROL_PREFIX_DELETE, NULL, NULL)->status == KV_OK);
	CHECK(rig_control(SRV_CONTROL_PREFIX, NULL, NULL)->status == KV_NOT_FOUND);
	CHECK(rig_control(SRV_CONTROL_PREFIX_DELETE, NULL, NULL)->status == KV_NOT_FOUND);
	CHECK(ask_prefix(KVP_OP_MATCH, session, 7, 40, 0) == KV_NOT_FOUND);
	rig_check_rows(0, session, 5, 32);
	CHECK(ask_item(KVP_OP_FREE, session, 5) == KV_OK);
	rig_settle();
	CHECK(rig_blocks().n_free == RIG_BLOCKS);
	rig_control_id = 0;
	rig_stop();
}

/* Idle sequences that may be evicted are, unless they are pinned, and say so. */
static void evictable_sequences_give_way(void)
{
	rig_start();
	rig_hello(0, 1);
	const uint64_t session = rig_open_session(0, &plain);
	struct rig_frame frame;

	for (uint64_t id = 1; id <= 2; id++) {
		frame = rig_append(session, id, 0, 16);
		frame.items[0].flags |= KVP_ITEM_EVICTABLE;
		CHECK(rig_item(0, &frame) == KV_OK);
	}
	CHECK(ask_item(KVP_OP_UNPIN, session, 1) == KV_BAD_STATE);
	CHECK(ask_item(KVP_OP_PIN, session, 1) == KV_OK);
	for (uint64_t id = 3; id <= 4; id++) {
		frame = rig_append(session, id, 0, id == 3 ? 96 : 16);
		CHECK(rig_item(0, &frame) == KV_OK);
	}
	frame = rig_append(session, 2, 16, 1);
	CHECK(rig_item(0, &frame) == KV_EVICTED);
	rig_check_rows(0, session, 1, 16);
	frame = rig_append(session, 6, 0, 1);
	CHECK(rig_item(0, &frame) == KV_POOL_FULL);
	CHECK(ask_item(KVP_OP_UNPIN, session, 1) == KV_OK);
	/* Not at its own expense. */
	frame = rig_append(session, 1, 16, 1);
	CHECK(rig_item(0, &frame) == KV_POOL_FULL);
	rig_check_rows(0, session, 1, 16);
	frame = rig_append(session, 6, 0, 1);
	CHECK(rig_item(0, &frame) == KV_OK);
	frame = rig_append(session, 1, 16, 1);
	CHECK(rig_item(0, &frame) == KV_EVICTED);
	rig_stop();
}

/* A spilled sequence has no blocks, comes back when it is asked for, and is the same. */
static void sequences_leave_and_come_back(void)
{
	rig_start();
	rig_hello(0, 1);
	const uint64_t session = rig_open_session(0, &plain);
	struct rig_frame frame = rig_append(session, 5, 0, 20);

	CHECK(rig_item(0, &frame) == KV_OK);
	for (uint32_t round = 0; round < 2; round++) {
		CHECK(ask_item(KVP_OP_SPILL, session, 5) == KV_OK);
		rig_settle();
		CHECK(rig_blocks().n_free == RIG_BLOCKS);
		CHECK(rig_length(0, session, 5) == 20);
		frame = rig_append(session, 5, 20, 1);
		CHECK(round == 1 || rig_item(0, &frame) == KV_BUSY_RETRY);
		CHECK(ask_item(KVP_OP_PREFETCH, session, 5) == KV_OK);
		rig_settle();
		CHECK(rig_blocks().n_owned == 2);
		rig_check_rows(0, session, 5, 20);
	}
	frame = rig_append(session, 5, 20, 1);
	CHECK(rig_item(0, &frame) == KV_OK);
	CHECK(ask_item(KVP_OP_SPILL, session, 9) == KV_NOT_FOUND);
	/* All pages were given back: the tier has room for exactly one sequence. */
	frame = rig_append(session, 6, 0, 20);
	CHECK(rig_item(0, &frame) == KV_OK);
	CHECK(ask_item(KVP_OP_SPILL, session, 5) == KV_OK);
	CHECK(ask_item(KVP_OP_SPILL, session, 6) == KV_POOL_FULL);
	rig_settle();
	frame = rig_plain(KVP_OP_FREE, session);
	frame.n_items = 1;
	frame.items[0] = (struct kvp_rows_item){ .sequence = 5 };
	CHECK(rig_item(0, &frame) == KV_OK);
	rig_settle();
	CHECK(ask_item(KVP_OP_SPILL, session, 6) == KV_OK);
	rig_stop();
}

/* An item that is refused changes nothing, and says what would have been right. */
static void refused_items_leave_no_trace(void)
{
	static float not_a_number[2 * RIG_LAYERS * RIG_HEAD_DIM];

	rig_start();
	rig_hello(0, 1);
	const struct rig_open open = { .tokens_max = 50 };
	const uint64_t session = rig_open_session(0, &open);
	struct rig_frame frame = rig_append(session, 1, 0, 16);

	CHECK(rig_item(0, &frame) == KV_OK);
	frame = rig_append(session, 1, 12, 1);
	CHECK(rig_item(0, &frame) == KV_POSITION);
	frame = rig_append(session, 1, 0, 1); /* CREATE */
	CHECK(rig_item(0, &frame) == KV_EXISTS);
	frame = rig_append(session, 2, 3, 1);
	CHECK(rig_item(0, &frame) == KV_NOT_FOUND);
	frame = rig_append(session, 1, 16, 40);
	CHECK(rig_item(0, &frame) == KV_LEN_LIMIT);
	frame = rig_decode(session, 1, 17);
	CHECK(rig_item(0, &frame) == KV_POSITION);
	frame = rig_read(session, 1, 17);
	CHECK(rig_ask(0, &frame) == KV_POSITION);

	for (uint32_t i = 0; i < KV_LENGTH(not_a_number); i++)
		not_a_number[i] = i == KV_LENGTH(not_a_number) - 1 ? NAN : 1;
	frame = rig_append(session, 1, 16, 1);
	frame.payload = not_a_number;
	CHECK(rig_item(0, &frame) == KV_BAD_VALUE);
	CHECK(rig_length(0, session, 1) == 16);
	rig_settle();
	CHECK(rig_blocks().n_owned == 1);
	rig_check_rows(0, session, 1, 16);
	rig_check_decode(0, session, 1, 16);
	CHECK(srv_server_counters(rig.server)->rejected[SRV_REJECTED_BAD_VALUE] == 1);
	rig_stop();
}

/* Frames that must not pass, with the status that names why. The connection goes on. */
static void malformed_frames_are_refused(void)
{
	static uint8_t large[RIG_FRAME_BYTES];

	rig_start();
	rig_hello(0, 1);
	const uint64_t session = rig_open_session(0, &plain);
	struct rig_frame frame = rig_append(session, 0, 0, 1);

	CHECK(rig_ask(0, &frame) == KV_BAD_ARG); /* sequence 0 */
	frame = rig_append(session, 1, 0, 2);
	frame.payload_bytes -= 64;
	CHECK(rig_ask(0, &frame) == KV_BAD_ARG); /* rows leave the payload */
	frame = rig_append(session, 1, 0, 2);
	frame.op[4] = 3; /* n_layers */
	CHECK(rig_ask(0, &frame) == KV_BAD_ARG);
	frame = rig_append(session, 1, 0, 1);
	frame.op[24] = 64; /* k_off: where V rows are */
	CHECK(rig_ask(0, &frame) == KV_BAD_ARG);
	frame = rig_plain(KVP_OP_FORK, session);
	frame.n_items = 1;
	frame.items[0] = (struct kvp_rows_item){ .sequence = 3 };
	CHECK(rig_ask(0, &frame) == KV_BAD_ARG); /* no parent */
	frame = rig_plain(77, session);
	frame.payload = large;
	frame.payload_bytes = 20000;
	CHECK(rig_ask(0, &frame) == KV_UNSUPPORTED); /* and its body is skipped */
	frame = rig_plain(KVP_OP_TELL, 0);
	CHECK(rig_ask(0, &frame) == KV_BAD_ARG); /* no handle */
	frame = rig_read(session, 1, 60000);
	CHECK(rig_ask(0, &frame) == KV_TOO_LARGE);
	frame = rig_plain(KVP_OP_PING, 0);
	frame.op_bytes = KVP_BYTES(ping_req);
	kvp_ping_req_encode(&(struct kvp_ping_req){ RIG_FRAME_BYTES }, frame.op);
	CHECK(rig_ask(0, &frame) == KV_TOO_LARGE);
	/* Nothing of all that was stored, and the echo works. */
	CHECK(rig_length(0, session, 1) == UINT32_MAX);
	kvp_ping_req_encode(&(struct kvp_ping_req){ 9 }, frame.op);
	frame.payload = "hello";
	frame.payload_bytes = 5;
	const struct rig_reply *reply = rig_call(0, &frame);

	CHECK(reply->header.status == KV_OK && memcmp(reply->body + 64, "hello\0\0\0", 9) == 0);
	/* Larger than any frame: told from the header alone, and closed. */
	kvp_header_encode(&(struct kvp_header){ .opcode = KVP_OP_APPEND,
				  .request_id = 1,
				  .session = session,
				  .body_bytes = RIG_FRAME_BYTES + 1 },
		large);
	mem_bytes_add(&rig.io.conns[0].in, large, KVP_HEADER_BYTES);
	rig_settle();
	rig_turn(600);
	rig_settle();
	CHECK(rig_is_closed(0));
	CHECK(srv_server_counters(rig.server)->rejected[SRV_REJECTED_TOO_LARGE] == 3);
	rig_stop();
}

/* A wrong checksum of the body closes the connection; a right one comes back with the reply. */
static void checksums_of_bodies_count(void)
{
	rig_start();
	rig_hello(0, 1);
	const struct rig_open open = { .name = "sum" };
	const uint64_t session = rig_open_session(0, &open);
	struct rig_frame frame = rig_append(session, 1, 0, 3);

	frame.header.flags = KVP_FLAG_BODY_CRC;
	const struct rig_reply *reply = rig_call(0, &frame);

	CHECK(reply->header.status == KV_OK && reply->header.flags & KVP_FLAG_BODY_CRC);
	CHECK(reply->header.body_crc == kvp_crc32c(0, reply->body, (size_t)reply->header.body_bytes));
	frame = rig_append(session, 1, 3, 1);
	frame.header.flags = KVP_FLAG_BODY_CRC;
	frame.is_bad_crc = true;
	CHECK(rig_ask(0, &frame) == KV_BAD_CRC);
	rig_turn(600);
	rig_settle();
	CHECK(rig_is_closed(0));
	rig_hello(1, 1);
	const uint64_t again = rig_open_session(1, &plain);

	CHECK(again != session);
	rig_stop();
}

/* What a batch in flight names is not handed out, whatever happens to its owner (FAILURES L1). */
static void blocks_in_flight_drain(void)
{
	struct rig_reply reply;

	rig_start();
	rig_hello(0, 1);
	rig_hello(1, 1);
	const uint64_t old = rig_open_session(0, &plain);
	struct rig_frame frame = rig_append(old, 1, 0, 64);
	const struct rig_frame close = rig_plain(KVP_OP_CLOSE, old);

	rig_backend.holds = true;
	const uint64_t append_id = rig_send(0, &frame);

	rig_settle();
	CHECK(rig_ask(0, &close) == KV_OK);
	rig_settle();
	CHECK(rig_blocks().n_draining == 4 && rig_blocks().n_free == RIG_BLOCKS - 4);
	const uint64_t fresh = rig_open_session(1, &plain);

	/* Five blocks are more than what is left; four are all that is left. */
	frame = rig_append(fresh, 2, 0, 80);
	CHECK(rig_item(1, &frame) == KV_POOL_FULL);
	frame = rig_append(fresh, 2, 0, 64);
	const uint64_t fresh_id = rig_send(1, &frame);

	rig_settle();
	CHECK(rig_blocks().n_owned == 4 && rig_blocks().n_draining == 4 && rig_blocks().n_free == 0);
	rig_backend.holds = false;
	rig_settle();
	CHECK(rig_take(0, append_id, &reply) && reply.header.status == KV_OK);
	CHECK(rig_take(1, fresh_id, &reply) && reply.header.status == KV_OK);
	CHECK(rig_blocks().n_draining == 0 && rig_blocks().n_free == RIG_BLOCKS - 4);
	rig_check_rows(1, fresh, 2, 64);
	rig_check_decode(1, fresh, 2, 64);
	rig_stop();
}

/* An item planned on top of one that fails is answered POSITION and writes nothing (epochs). */
static void items_on_top_of_a_failure_are_stale(void)
{
	static float bad_rows[2 * RIG_LAYERS * 20 * RIG_HEAD_DIM];
	struct rig_reply reply;
	struct kvp_rows_reply_item item;

	rig_start();
	rig_hello(0, 1);
	const uint64_t session = rig_open_session(0, &plain);
	struct rig_frame frame = rig_append(session, 1, 0, 20);
	const struct rig_frame other = rig_append(session, 2, 0, 1);

	rig_backend.holds = true;
	bad_rows[0] = INFINITY;
	frame.payload = bad_rows;
	rig_send(0, &frame);
	rig_settle();
	rig_send(0, &other);
	rig_settle();
	/* Both batches of the lane are out: this one waits, planned but not sealed. */
	frame = rig_append(session, 1, 20, 20);
	const uint64_t stale_id = rig_send(0, &frame);

	rig_settle();
	const uint64_t batches = srv_server_counters(rig.server)->batches;

	rig_backend.holds = false;
	rig_settle();
	CHECK(rig_take(0, stale_id, &reply) && reply.header.status == KV_OK);
	kvp_rows_reply_item_decode(reply.body + reply.header.op_bytes, KVP_ITEM_BYTES, &item);
	CHECK(item.status == KV_POSITION && item.length == 0);
	CHECK(srv_server_counters(rig.server)->batches == batches); /* no work for it */
	CHECK(rig_length(0, session, 1) == UINT32_MAX);             /* it was never created */
	CHECK(rig_length(0, session, 2) == 1);
	CHECK(rig_blocks().n_owned == 1);
	rig_stop();
}

/* CANCEL and deadlines drop what has not begun; the request still gets its one reply. */
static void cancelled_and_late_requests_are_dropped(void)
{
	struct rig_reply reply;

	rig_start();
	rig_hello(0, 1);
	const uint64_t session = rig_open_session(0, &plain);
	struct rig_frame frame;

	rig_backend.holds = true;
	for (uint32_t i = 0; i < SRV_PLANS_PER_LANE; i++) {
		frame = rig_append(session, 1 + i, 0, 1);
		rig_send(0, &frame);
		rig_settle();
	}
	frame = rig_append(session, 8, 0, 1);
	const uint64_t cancelled_id = rig_send(0, &frame);

	frame = rig_append(session, 9, 0, 1);
	frame.header.deadline_us = 50000;
	const uint64_t late_id = rig_send(0, &frame);
	struct rig_frame cancel = rig_plain(KVP_OP_CANCEL, 0);

	rig_settle();
	cancel.op_bytes = KVP_BYTES(cancel_req);
	kvp_cancel_req_encode(&(struct kvp_cancel_req){ cancelled_id }, cancel.op);
	const struct rig_reply *answer = rig_call(0, &cancel);

	CHECK(answer->header.status == KV_OK && kvp_get_u32(answer->body) == KVP_CANCEL_DROPPED);
	rig_turn(60);
	rig_backend.holds = false;
	rig_settle();
	CHECK(rig_take(0, cancelled_id, &reply) && reply.header.status == KV_CANCELLED);
	CHECK(rig_take(0, late_id, &reply) && reply.header.status == KV_DEADLINE);
	CHECK(rig_length(0, session, 1) == 1 && rig_length(0, session, 2) == 1);
	/* Neither of the two has rows. A sequence that a dropped item created is allowed to stay. */
	CHECK(rig_length(0, session, 8) + 1 <= 1 && rig_length(0, session, 9) + 1 <= 1);
	rig_stop();
}

/* TELL sees what was accepted before it, and waits for that. */
static void tell_waits_for_what_came_before(void)
{
	struct rig_reply reply;
	struct kvp_tell_item item;

	rig_start();
	rig_hello(0, 1);
	const uint64_t session = rig_open_session(0, &plain);
	struct rig_frame frame = rig_append(session, 1, 0, 5);
	struct rig_frame tell = rig_plain(KVP_OP_TELL, session);

	rig_backend.holds = true;
	rig_send(0, &frame);
	tell.op_bytes = KVP_BYTES(tell_req);
	kvp_tell_req_encode(&(struct kvp_tell_req){ 1, 8, 0 }, tell.op);
	const uint64_t tell_id = rig_send(0, &tell);

	rig_settle();
	CHECK(!rig_take(0, tell_id, &reply));
	rig_backend.holds = false;
	rig_settle();
	CHECK(rig_take(0, tell_id, &reply) && reply.header.n_items == 1);
	kvp_tell_item_decode(reply.body + reply.header.op_bytes, KVP_ITEM_BYTES, &item);
	CHECK(item.length_min == 5 && item.n_blocks == 1);
	rig_stop();
}

/* A device that is gone fails everything at once, and the server says so at the end. */
static void a_lost_device_fails_everything(void)
{
	struct rig_reply reply;
	struct kvp_rows_reply_item item;
	uint64_t ids[3];

	rig_start();
	rig_hello(0, 1);
	const uint64_t session = rig_open_session(0, &plain);

	rig_backend.holds = true;
	for (uint32_t i = 0; i < KV_LENGTH(ids); i++) {
		const struct rig_frame frame = rig_append(session, 1 + i, 0, 1);

		rig_backend.loses = i > 0;
		ids[i] = rig_send(0, &frame);
		if (i == 0)
			rig_settle();
	}
	for (uint32_t i = 0; i < 8; i++)
		rig_turn(1);
	CHECK(rig.server->is_lost);
	rig_backend.holds = false;
	for (uint32_t i = 0; i < 8; i++)
		rig_turn(1);
	CHECK(rig_take(0, ids[0], &reply) && reply.header.status == KV_OK);
	CHECK(rig_take(0, ids[1], &reply) && reply.header.status == KV_OK);
	kvp_rows_reply_item_decode(reply.body + reply.header.op_bytes, KVP_ITEM_BYTES, &item);
	CHECK(item.status == KV_DEVICE_LOST);
	CHECK(srv_server_exit_code(rig.server) == 4);
	rig_turn(2000);
	CHECK(srv_server_is_done(rig.server));
	rig_end();
}

void scenario_rows(void)
{
	rows_come_back();
	children_share_and_copy();
	prefixes_are_kept_and_go();
	operators_take_prefixes_out();
	evictable_sequences_give_way();
	sequences_leave_and_come_back();
	refused_items_leave_no_trace();
	malformed_frames_are_refused();
	checksums_of_bodies_count();
	blocks_in_flight_drain();
	items_on_top_of_a_failure_are_stale();
	cancelled_and_late_requests_are_dropped();
	tell_waits_for_what_came_before();
	a_lost_device_fails_everything();
}
