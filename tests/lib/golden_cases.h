/*
 * Golden frames as values: what each file of tests/golden/frames/ says, and the frame built from it by our
 * encoders. For one unit test program at a time; everything is static.
 */
#ifndef TESTS_LIB_GOLDEN_CASES_H
#define TESTS_LIB_GOLDEN_CASES_H

#include "proto/message.h"
#include "tests/lib/golden.h"

#define HANDLE      0x005A17C39E210003ULL
#define BOOT_ID     0x1122334455667788ULL
#define FINGERPRINT 0xA1B2C3D4E5F60718ULL
#define REPLY       KVP_FLAG_RESPONSE
#define NO_MESSAGE  KVP_N_MESSAGES
/* Of the body of hello_full_req, from an implementation of the definition bit by bit. */
#define HELLO_BODY_CRC 0xAAF61194U

/* A part of a payload: `n_bytes` repeated. */
struct part {
	const char *bytes;
	size_t n_bytes;
	size_t n_times;
};

/* What a golden frame says, as values. Item bytes are 32 unless `item_bytes` says otherwise. */
struct golden_case {
	const char *name;
	struct kvp_header header;
	enum kvp_message_id op_id;
	const void *op;
	enum kvp_message_id item_id;
	const void *items;
	struct part parts[3];
};

static const struct kvp_hello_req hello_req = { .proto_min = 1, .proto_max = 1 };
static const struct kvp_hello_req hello_full_req = { 1, 3, 6, 8, 0xC, BOOT_ID };
static const struct kvp_hello_reply hello_reply = { 1, 1, 1, 2, BOOT_ID, 0, 1048576, 4194304, 64, 256, 4096,
	65536, 1, 60000 };
static const struct kvp_hello_reply hello_version_reply = {
	.proto_min = 1, .proto_max = 1, .boot_id = BOOT_ID
};
static const struct kvp_ping_req ping_echo_req = { 8 };
static const struct kvp_ping_reply ping_reply = { 1, 1, 1, 2, BOOT_ID };
static const struct kvp_cancel_req cancel_req = { 2 };
static const struct kvp_cancel_reply cancel_reply = { KVP_CANCEL_TOO_LATE };
static const struct kvp_pool_info_req pool_info_req = { .pool_name_bytes = 4, .what = KVP_POOL_INFO_JSON };
static const struct kvp_pool_info_req pool_info_rows_req = { 0, KVP_POOL_INFO_ROTATION, 1, 3, 2 };
static const struct kvp_pool_info_reply pool_info_reply = { FINGERPRINT, 15, 1 };
static const struct kvp_open_req open_req = { 4, 6, 2, 0, 30000, 8, 4, 2048, FINGERPRINT };
static const struct kvp_open_req attach_req = { .session_name_bytes = 6 };
static const struct kvp_open_reply open_reply = { HANDLE, BOOT_ID, FINGERPRINT, 30000, 8, 30, 16, 9, 3, 64,
	64, 4, 2048 };
static const struct kvp_open_reply attach_reply = { HANDLE, BOOT_ID, FINGERPRINT, 30000, 0, 30, 16, 9, 3, 64,
	128, 4, 2048 };
static const struct kvp_tell_req tell_req = { 1, 256, KVP_TELL_PER_LAYER };
static const struct kvp_tell_reply tell_reply = { 0, 0, 3, 2, KVP_TELL_PER_LAYER };
static const struct kvp_tell_item tell_items[] = {
	{ 7, 64, 65, 5, 1, KVP_STATE_RESIDENT, 0, 0 },
	{ 9, 0, 0, 0, 0, KVP_STATE_EVICTED, KVP_ITEM_EVICTABLE, 0 },
};
static const struct kvp_rows_req append_req = { 0, 2, 3, 0, KVP_DTYPE_BF16, KVP_DTYPE_F16, 0, 0, 0, 0, 192,
	KVP_ABSENT, 0, 0, 0 };
static const struct kvp_rows_item append_items[] = {
	{ 7, 0, 2, 0, KVP_ITEM_CREATE | KVP_ITEM_EVICTABLE },
	{ 8, 5, 1, 0, 0 },
};
static const struct kvp_rows_reply append_reply = { 1, 1, 0, 0, KVP_ABSENT, KVP_ABSENT, 10, 20, 30, 40, 5,
	105 };
static const struct kvp_rows_reply_item append_reply_items[] = {
	{ 7, 2, 2, 0, KV_OK, KVP_NO_LAYER, KVP_NO_ROW, 0 },
	{ 8, 4, 0, 0, KV_POSITION, KVP_NO_LAYER, KVP_NO_ROW, 0 },
};
static const struct kvp_rows_req decode_req = { 1, 1, 0, 2, 0, 0, KVP_DTYPE_BF16, KVP_DTYPE_F32, 0,
	KVP_ABSENT, KVP_ABSENT, 0, 0.125F, 0, 0 };
static const struct kvp_rows_item decode_items[] = {
	{ 7, KVP_POSITION_PLANNED, 0, 1, 0 },
	{ 9, 3, 0, 1, 0 },
};
static const struct kvp_rows_reply decode_reply = { 1, 1, 2, KVP_DTYPE_F32, 0, KVP_ABSENT, 0, 0, 0, 0, 0, 0 };
static const struct kvp_rows_reply_item decode_reply_items[] = {
	{ 7, 65, 0, 1, KV_OK, KVP_NO_LAYER, KVP_NO_ROW, 0 },
	{ 9, 0, 0, 0, KV_NOT_FOUND, KVP_NO_LAYER, KVP_NO_ROW, 0 },
};
static const struct kvp_rows_req append_decode_req = { 5, 1, 1, 1, 1, 1, 1, 1, KVP_ROWS_LSE, 0, 64, 128, 0, 0,
	0 };
static const struct kvp_rows_item append_decode_items[] = { { 7, 64, 1, 1, 0 } };
static const struct kvp_rows_reply append_decode_reply = { 1, 0, 1, KVP_DTYPE_F32, 0, 128, 0, 0, 0, 0, 0, 0 };
static const struct kvp_rows_reply_item append_decode_reply_items[] = {
	{ 7, 65, 1, 1, KV_OK, KVP_NO_LAYER, KVP_NO_ROW, 0 },
};
static const struct kvp_read_req read_req = { 7, 0, 2, 1, 3, KVP_DTYPE_BF16, KVP_DTYPE_NONE, 0 };
static const struct kvp_read_reply read_reply = { 7, 0, 2, 1, 3, KVP_DTYPE_BF16, KVP_DTYPE_NONE, 0, 0,
	KVP_ABSENT, FINGERPRINT };
static const struct kvp_slots_req update_slots_req = { 1, 1, 2, KVP_DTYPE_F32, KVP_DTYPE_F32, 0, 0, 128, 256,
	0 };
static const struct kvp_rows_reply update_slots_reply = {
	.n_ok = 1, .out_off = KVP_ABSENT, .lse_off = KVP_ABSENT
};
static const struct kvp_rows_reply_item update_slots_reply_items[] = {
	{ 0, 0, 2, 0, KV_OK, KVP_NO_LAYER, KVP_NO_ROW, 0 },
};
static const struct kvp_table_req decode_table_req = { 1, 2, 2, 2, KVP_DTYPE_BF16, KVP_DTYPE_F32,
	KVP_ROWS_LSE, 128, 192, 0, 0, 0, 0 };
static const char decode_table_entries[64] = { 3, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, -1, -1, -1, -1 };
static const struct kvp_rows_reply decode_table_reply = { 1, 0, 2, KVP_DTYPE_F32, 0, 256, 0, 0, 0, 0, 0, 0 };
static const struct kvp_rows_reply_item decode_table_reply_items[] = {
	{ 0, 0, 0, 2, KV_OK, KVP_NO_LAYER, KVP_NO_ROW, 0 },
};
static const struct kvp_rows_item truncate_items[] = { { .sequence = 7, .position = 32 }, { .sequence = 8 } };
static const struct kvp_rows_reply truncate_reply = {
	.n_ok = 2, .out_off = KVP_ABSENT, .lse_off = KVP_ABSENT
};
static const struct kvp_rows_reply_item truncate_reply_items[] = {
	{ 7, 32, 0, 0, KV_OK, KVP_NO_LAYER, KVP_NO_ROW, 0 },
	{ 8, 0, 0, 0, KV_OK, KVP_NO_LAYER, KVP_NO_ROW, 0 },
};
static const struct kvp_rows_item free_items[] = { { .sequence = 7 } };
static const struct kvp_rows_reply free_reply = { .n_ok = 1, .out_off = KVP_ABSENT, .lse_off = KVP_ABSENT };
static const struct kvp_rows_reply_item free_reply_items[] = { { 7, 0, 0, 0, KV_OK, KVP_NO_LAYER, KVP_NO_ROW,
	0 } };
static const struct kvp_fork_item fork_items[] = { { 11, 32, 0, 7 } };
static const struct kvp_rows_reply fork_reply = {
	.n_failed = 1, .out_off = KVP_ABSENT, .lse_off = KVP_ABSENT
};
static const struct kvp_rows_reply_item fork_reply_items[] = {
	{ 11, 0, 0, 0, KV_POOL_FULL, KVP_NO_LAYER, KVP_NO_ROW, 20 },
};
static const struct kvp_prefix_req publish_req = { 7, 2, 5, 1, 0, 60000 };
static const struct kvp_prefix_reply publish_reply = { 7, 64, 4, 1 };
static const struct kvp_prefix_req match_req = { 12, 2, 0, 0, KVP_PREFIX_EVICTABLE, 0 };
static const struct kvp_rows_item spill_items[] = { { .sequence = 7 }, { .sequence = 11 } };
static const struct kvp_rows_reply spill_reply = {
	.n_ok = 1, .n_failed = 1, .out_off = KVP_ABSENT, .lse_off = KVP_ABSENT
};
static const struct kvp_rows_reply_item spill_reply_items[] = {
	{ 7, 65, 0, 0, KV_OK, KVP_NO_LAYER, KVP_NO_ROW, 0 },
	{ 11, 1024, 0, 0, KV_POOL_FULL, KVP_NO_LAYER, KVP_NO_ROW, 10 },
};
static const struct kvp_rows_item prefetch_items[] = { { .sequence = 7 } };
static const struct kvp_rows_reply prefetch_reply = {
	.n_ok = 1, .out_off = KVP_ABSENT, .lse_off = KVP_ABSENT
};
static const struct kvp_rows_reply_item prefetch_reply_items[] = {
	{ 7, 65, 0, 0, KV_OK, KVP_NO_LAYER, KVP_NO_ROW, 0 },
};
static const struct kvp_frame_error error_reply = { KV_BAD_ARG, KV_SCOPE_REQUEST, 1, 168, 0, 5, 76, 0 };
static const struct kvp_frame_error busy_reply = { KV_BUSY_RETRY, KV_SCOPE_REQUEST, KVP_NO_ITEM, 0, 0, 0, 0,
	1 };

/* opcode, flags, status, request_id, session, body_bytes, op_bytes, n_items, item_bytes, deadline, retry, crc
 */
#define NO_OP           NO_MESSAGE, NULL
#define NO_ITEMS        NO_MESSAGE, NULL
#define OP(m, value)    KVP_MESSAGE_##m, &(value)
#define ITEMS(m, value) KVP_MESSAGE_##m, (value)
#define TEXT(text)                                \
	{                                         \
		{                                 \
			text, sizeof(text) - 1, 1 \
		}                                 \
	}
static const struct golden_case golden_cases[] = {
	{ "hello_req", { 1, 0, 0, 1, 0, 32, 32, 0, 32, 0, 0, 0 }, OP(hello_req, hello_req), NO_ITEMS,
		{ { 0 } } },
	{ "hello_full_req", { 1, KVP_FLAG_BODY_CRC, 0, 10, 0, 78, 32, 0, 32, 0, 0, HELLO_BODY_CRC },
		OP(hello_req, hello_full_req), NO_ITEMS, TEXT("s3cr3tworker-1") },
	{ "hello_reply", { 1, REPLY, 0, 1, 0, 64, 64, 0, 32, 0, 0, 0 }, OP(hello_reply, hello_reply),
		NO_ITEMS, { { 0 } } },
	{ "hello_version_reply", { 1, REPLY, 101, 1, 0, 64, 64, 0, 32, 0, 0, 0 },
		OP(hello_reply, hello_version_reply), NO_ITEMS, { { 0 } } },
	{ "ping_req", { 2, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0 }, NO_OP, NO_ITEMS, { { 0 } } },
	{ "ping_reply", { 2, REPLY, 0, 2, 0, 16, 16, 0, 32, 0, 0, 0 }, OP(ping_reply, ping_reply), NO_ITEMS,
		{ { 0 } } },
	{ "ping_echo_req", { 2, 0, 0, 3, HANDLE, 69, 16, 0, 32, 0, 0, 0 }, OP(ping_req, ping_echo_req),
		NO_ITEMS, TEXT("hello") },
	{ "ping_echo_reply", { 2, REPLY, 0, 3, HANDLE, 72, 16, 0, 32, 0, 0, 0 }, OP(ping_reply, ping_reply),
		NO_ITEMS, TEXT("hello\0\0\0") },
	{ "goaway", { 3, REPLY, 404, 0, 0, 0, 0, 0, 32, 0, 0, 0 }, NO_OP, NO_ITEMS, { { 0 } } },
	{ "cancel_req", { 4, 0, 0, 4, 0, 16, 16, 0, 32, 0, 0, 0 }, OP(cancel_req, cancel_req), NO_ITEMS,
		{ { 0 } } },
	{ "cancel_reply", { 4, REPLY, 0, 4, 0, 16, 16, 0, 32, 0, 0, 0 }, OP(cancel_reply, cancel_reply),
		NO_ITEMS, { { 0 } } },
	{ "pool_info_req", { 16, 0, 0, 5, 0, 68, 16, 0, 32, 0, 0, 0 }, OP(pool_info_req, pool_info_req),
		NO_ITEMS, TEXT("smol") },
	{ "pool_info_reply", { 16, REPLY, 0, 5, 0, 79, 16, 0, 32, 0, 0, 0 },
		OP(pool_info_reply, pool_info_reply), NO_ITEMS, TEXT("{\"name\":\"smol\"}") },
	{ "pool_info_rows_req", { 16, 0, 0, 6, 0, 16, 16, 0, 32, 0, 0, 0 },
		OP(pool_info_req, pool_info_rows_req), NO_ITEMS, { { 0 } } },
	{ "open_req", { 17, 0, 0, 7, 0, 74, 64, 0, 32, 0, 0, 0 }, OP(open_req, open_req), NO_ITEMS,
		TEXT("smolchat.7") },
	{ "open_reply", { 17, REPLY, 0, 7, 0, 64, 64, 0, 32, 0, 0, 0 }, OP(open_reply, open_reply), NO_ITEMS,
		{ { 0 } } },
	{ "attach_req", { 18, 0, 0, 8, 0, 70, 64, 0, 32, 0, 0, 0 }, OP(open_req, attach_req), NO_ITEMS,
		TEXT("chat.7") },
	{ "attach_reply", { 18, REPLY, 0, 8, 0, 64, 64, 0, 32, 0, 0, 0 }, OP(open_reply, attach_reply),
		NO_ITEMS, { { 0 } } },
	{ "close_req", { 19, 0, 0, 9, HANDLE, 0, 0, 0, 32, 0, 0, 0 }, NO_OP, NO_ITEMS, { { 0 } } },
	{ "close_reply", { 19, REPLY, 0, 9, HANDLE, 0, 0, 0, 32, 0, 0, 0 }, NO_OP, NO_ITEMS, { { 0 } } },
	{ "tell_req", { 20, 0, 0, 11, HANDLE, 16, 16, 0, 32, 0, 0, 0 }, OP(tell_req, tell_req), NO_ITEMS,
		{ { 0 } } },
	{ "tell_reply", { 20, REPLY, 0, 11, HANDLE, 152, 32, 2, 32, 0, 0, 0 }, OP(tell_reply, tell_reply),
		ITEMS(tell_item, tell_items),
		{ { "\x41\0\0\0\x40\0\0\0\x40\0\0\0", 12, 1 }, { "\0", 1, 12 } } },
	{ "append_req", { 32, KVP_FLAG_TIMINGS, 0, 12, HANDLE, 512, 64, 2, 32, 0, 0, 0 },
		OP(rows_req, append_req), ITEMS(rows_item, append_items),
		{ { "\x80\x3f", 2, 96 }, { "\x00\x3c", 2, 96 } } },
	{ "append_reply", { 32, REPLY | KVP_FLAG_TIMINGS, 0, 12, HANDLE, 128, 64, 2, 32, 0, 0, 0 },
		OP(rows_reply, append_reply), ITEMS(rows_reply_item, append_reply_items), { { 0 } } },
	{ "decode_req", { 33, 0, 0, 13, HANDLE, 256, 64, 2, 32, 5000, 0, 0 }, OP(rows_req, decode_req),
		ITEMS(rows_item, decode_items), { { "\x00\x3f", 2, 64 } } },
	{ "decode_reply", { 33, REPLY, 0, 13, HANDLE, 384, 64, 2, 32, 0, 0, 0 }, OP(rows_reply, decode_reply),
		ITEMS(rows_reply_item, decode_reply_items), { { "\0\0\x80\x3f", 4, 32 }, { "\0", 1, 128 } } },
	{ "append_decode_req", { 34, 0, 0, 2, HANDLE, 384, 64, 1, 32, 0, 0, 0 },
		OP(rows_req, append_decode_req), ITEMS(rows_item, append_decode_items),
		{ { "\0", 1, 256 } } },
	{ "append_decode_reply", { 34, REPLY, 0, 2, HANDLE, 264, 64, 1, 32, 0, 0, 0 },
		OP(rows_reply, append_decode_reply), ITEMS(rows_reply_item, append_decode_reply_items),
		{ { "\0", 1, 128 }, { "\x95\x94\x85\x40", 4, 2 } } },
	{ "update_slots_req", { 64, 0, 0, 20, HANDLE, 336, 64, 0, 32, 0, 0, 0 },
		OP(slots_req, update_slots_req), NO_ITEMS,
		{ { "\0\0\0\x3f", 4, 32 }, { "\0\0\x80\x3e", 4, 32 },
			{ "\5\0\0\0\0\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff", 16, 1 } } },
	{ "update_slots_reply", { 64, REPLY, 0, 20, HANDLE, 96, 64, 1, 32, 0, 0, 0 },
		OP(rows_reply, update_slots_reply), ITEMS(rows_reply_item, update_slots_reply_items),
		{ { 0 } } },
	{ "decode_table_req", { 65, 0, 0, 21, HANDLE, 264, 64, 0, 32, 0, 0, 0 },
		OP(table_req, decode_table_req), NO_ITEMS,
		{ { "\0\x3f", 2, 64 }, { decode_table_entries, 64, 1 }, { "\x11\0\0\0\4\0\0\0", 8, 1 } } },
	{ "decode_table_reply", { 65, REPLY, 0, 21, HANDLE, 400, 64, 1, 32, 0, 0, 0 },
		OP(rows_reply, decode_table_reply), ITEMS(rows_reply_item, decode_table_reply_items),
		{ { "\0\0\0\x3f", 4, 64 }, { "\0\0\x80\x3f", 4, 4 } } },
	{ "read_req", { 35, 0, 0, 14, HANDLE, 32, 32, 0, 32, 0, 0, 0 }, OP(read_req, read_req), NO_ITEMS,
		{ { 0 } } },
	{ "read_reply", { 35, REPLY, 0, 14, HANDLE, 256, 64, 0, 32, 0, 0, 0 }, OP(read_reply, read_reply),
		NO_ITEMS, { { "\x80\x3f", 2, 96 } } },
	{ "truncate_req", { 36, 0, 0, 15, HANDLE, 64, 0, 2, 32, 0, 0, 0 }, NO_OP,
		ITEMS(rows_item, truncate_items), { { 0 } } },
	{ "truncate_reply", { 36, REPLY, 0, 15, HANDLE, 128, 64, 2, 32, 0, 0, 0 },
		OP(rows_reply, truncate_reply), ITEMS(rows_reply_item, truncate_reply_items), { { 0 } } },
	{ "free_req", { 37, 0, 0, 16, HANDLE, 48, 0, 1, 48, 0, 0, 0 }, NO_OP, ITEMS(rows_item, free_items),
		{ { 0 } } },
	{ "free_reply", { 37, REPLY, 0, 16, HANDLE, 96, 64, 1, 32, 0, 0, 0 }, OP(rows_reply, free_reply),
		ITEMS(rows_reply_item, free_reply_items), { { 0 } } },
	{ "fork_req", { 38, 0, 0, 17, HANDLE, 32, 0, 1, 32, 0, 0, 0 }, NO_OP, ITEMS(fork_item, fork_items),
		{ { 0 } } },
	{ "fork_reply", { 38, REPLY, 0, 17, HANDLE, 96, 64, 1, 32, 0, 0, 0 }, OP(rows_reply, fork_reply),
		ITEMS(rows_reply_item, fork_reply_items), { { 0 } } },
	{ "publish_req", { 48, 0, 0, 20, HANDLE, 78, 32, 0, 32, 0, 0, 0 }, OP(prefix_req, publish_req),
		NO_ITEMS, { { "\1\0\0\0\2\0\0\0lora7s", 14, 1 } } },
	{ "publish_reply", { 48, REPLY, 0, 20, HANDLE, 32, 32, 0, 32, 0, 0, 0 },
		OP(prefix_reply, publish_reply), NO_ITEMS, { { 0 } } },
	{ "match_req", { 49, 0, 0, 21, HANDLE, 72, 32, 0, 32, 0, 0, 0 }, OP(prefix_req, match_req), NO_ITEMS,
		{ { "\1\0\0\0\2\0\0\0", 8, 1 } } },
	{ "spill_req", { 52, 0, 0, 18, HANDLE, 64, 0, 2, 32, 0, 0, 0 }, NO_OP, ITEMS(rows_item, spill_items),
		{ { 0 } } },
	{ "spill_reply", { 52, REPLY, 0, 18, HANDLE, 128, 64, 2, 32, 0, 0, 0 }, OP(rows_reply, spill_reply),
		ITEMS(rows_reply_item, spill_reply_items), { { 0 } } },
	{ "prefetch_req", { 53, 0, 0, 19, HANDLE, 32, 0, 1, 32, 0, 0, 0 }, NO_OP,
		ITEMS(rows_item, prefetch_items), { { 0 } } },
	{ "prefetch_reply", { 53, REPLY, 0, 19, HANDLE, 96, 64, 1, 32, 0, 0, 0 },
		OP(rows_reply, prefetch_reply), ITEMS(rows_reply_item, prefetch_reply_items), { { 0 } } },
	{ "error_reply", { 32, REPLY, 106, 18, HANDLE, 140, 48, 0, 32, 0, 0, 0 },
		OP(frame_error, error_reply), NO_ITEMS,
		TEXT("BAD_ARG: CREATE starts at position 0 (item 1, offset 168, expected 0, got 5)") },
	{ "busy_reply", { 33, REPLY, 402, 19, HANDLE, 48, 48, 0, 32, 0, 25, 0 }, OP(frame_error, busy_reply),
		NO_ITEMS, { { 0 } } },
};
#define GOLDEN_N_CASES (sizeof(golden_cases) / sizeof(golden_cases[0]))

/* The typed codecs by number. */
static void golden_encode(enum kvp_message_id id, const void *msg, uint8_t *out)
{
	switch (id) {
#define ENCODE_CASE(m, fields, bytes)       \
	case KVP_MESSAGE_##m:               \
		kvp_##m##_encode(msg, out); \
		break;
		KVP_MESSAGE_MAP(ENCODE_CASE)
#undef ENCODE_CASE
	default:
		ck_abort_msg("no such message");
	}
}

static const size_t golden_struct_bytes[] = {
#define STRUCT_BYTES(m, fields, bytes) sizeof(struct kvp_##m),
	KVP_MESSAGE_MAP(STRUCT_BYTES)
#undef STRUCT_BYTES
};

/* Builds the whole frame from the values of a case. */
static size_t golden_build(const struct golden_case *c, uint8_t out[GOLDEN_FRAME_BYTES_MAX])
{
	uint8_t *body = out + KVP_HEADER_BYTES;
	uint8_t *end = body;

	memset(out, 0, GOLDEN_FRAME_BYTES_MAX);
	kvp_header_encode(&c->header, out);
	if (c->op)
		golden_encode(c->op_id, c->op, body);
	for (unsigned i = 0; i < c->header.n_items; i++)
		golden_encode(c->item_id, (const char *)c->items + i * golden_struct_bytes[c->item_id],
			body + c->header.op_bytes + (size_t)i * c->header.item_bytes);
	end += kvp_structs_bytes(c->header.op_bytes, c->header.n_items, c->header.item_bytes);
	if (c->parts[0].n_bytes > 0)
		end = body + kvp_payload_start(c->header.op_bytes, c->header.n_items, c->header.item_bytes);
	for (size_t i = 0; i < 3; i++)
		for (size_t n = 0; n < c->parts[i].n_times; n++, end += c->parts[i].n_bytes)
			memcpy(end, c->parts[i].bytes, c->parts[i].n_bytes);
	return (size_t)(end - out);
}

#endif
