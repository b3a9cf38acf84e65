/*
 * Messages: every op struct and item of the protocol, each from one list of fields.
 *
 * A list row is F(message, wire type, name, offset). From it come the C struct (struct kvp_open_req), encode
 * and decode, the offset constants for faults (KVP_AT(open_req, lease_ms)) and the table that a test compares
 * with PROTOCOL.md. Bytes that no row names are reserved: written as zero, ignored when read.
 *
 * Decoding cannot fail: a short struct counts as if zeros followed, the tail of a longer one is ignored.
 * Whether the values make sense is the business of check.h. No heap, no state; any thread.
 */
#ifndef PROTO_MESSAGE_H
#define PROTO_MESSAGE_H

#include <stddef.h>
#include <stdint.h>

#include "proto/bytes.h"
#include "proto/frame.h"

/* M(name, list of fields, bytes on the wire), in the order of PROTOCOL.md */
#define KVP_MESSAGE_MAP(M)                                 \
	M(hello_req, KVP_HELLO_REQ_FIELDS, 32)             \
	M(hello_reply, KVP_HELLO_REPLY_FIELDS, 64)         \
	M(ping_req, KVP_PING_REQ_FIELDS, 16)               \
	M(ping_reply, KVP_PING_REPLY_FIELDS, 16)           \
	M(open_req, KVP_OPEN_REQ_FIELDS, 64)               \
	M(open_reply, KVP_OPEN_REPLY_FIELDS, 64)           \
	M(pool_info_req, KVP_POOL_INFO_REQ_FIELDS, 16)     \
	M(pool_info_reply, KVP_POOL_INFO_REPLY_FIELDS, 16) \
	M(tell_req, KVP_TELL_REQ_FIELDS, 16)               \
	M(tell_reply, KVP_TELL_REPLY_FIELDS, 32)           \
	M(tell_item, KVP_TELL_ITEM_FIELDS, 32)             \
	M(rows_req, KVP_ROWS_REQ_FIELDS, 64)               \
	M(rows_item, KVP_ROWS_ITEM_FIELDS, 32)             \
	M(rows_reply, KVP_ROWS_REPLY_FIELDS, 64)           \
	M(rows_reply_item, KVP_ROWS_REPLY_ITEM_FIELDS, 32) \
	M(fork_item, KVP_FORK_ITEM_FIELDS, 32)             \
	M(prefix_req, KVP_PREFIX_REQ_FIELDS, 32)           \
	M(prefix_reply, KVP_PREFIX_REPLY_FIELDS, 32)       \
	M(read_req, KVP_READ_REQ_FIELDS, 32)               \
	M(read_reply, KVP_READ_REPLY_FIELDS, 64)           \
	M(slots_req, KVP_SLOTS_REQ_FIELDS, 64)             \
	M(table_req, KVP_TABLE_REQ_FIELDS, 64)             \
	M(cancel_req, KVP_CANCEL_REQ_FIELDS, 16)           \
	M(cancel_reply, KVP_CANCEL_REPLY_FIELDS, 16)       \
	M(frame_error, KVP_FRAME_ERROR_FIELDS, 48)

/* HELLO. Payload: token, then name. */
#define KVP_HELLO_REQ_FIELDS(F, m)                 \
	F(m, u16, proto_min, 0)                    \
	F(m, u16, proto_max, 2)                    \
	F(m, u16, token_bytes, 4)                  \
	F(m, u16, name_bytes, 6)                   \
	F(m, u64, features, 8) /* KVP_FEATURE_* */ \
	F(m, u64, boot_id_seen, 16)

#define KVP_HELLO_REPLY_FIELDS(F, m)         \
	F(m, u16, proto, 0)                  \
	F(m, u16, proto_min, 2)              \
	F(m, u16, proto_max, 4)              \
	F(m, u16, n_pools, 6)                \
	F(m, u64, boot_id, 8)                \
	F(m, u64, features, 16)              \
	F(m, u64, frame_bytes_max, 24)       \
	F(m, u64, inflight_bytes_max, 32)    \
	F(m, u32, inflight_requests_max, 40) \
	F(m, u32, items_max, 44)             \
	F(m, u32, sessions_max, 48)          \
	F(m, u32, sequences_max, 52)         \
	F(m, u32, q_len_max, 56)             \
	F(m, u32, lease_ms, 60)

#define KVP_PING_REQ_FIELDS(F, m) F(m, u64, reply_payload_bytes, 0)

/* The first 16 bytes of HELLO's reply. */
#define KVP_PING_REPLY_FIELDS(F, m) \
	F(m, u16, proto, 0)         \
	F(m, u16, proto_min, 2)     \
	F(m, u16, proto_max, 4)     \
	F(m, u16, n_pools, 6)       \
	F(m, u64, boot_id, 8)

/* OPEN and ATTACH. Payload: pool name, then session name. */
#define KVP_OPEN_REQ_FIELDS(F, m)            \
	F(m, u16, pool_name_bytes, 0)        \
	F(m, u16, session_name_bytes, 2)     \
	F(m, u16, priority, 4)               \
	F(m, u16, flags, 6) /* KVP_OPEN_* */ \
	F(m, u32, lease_ms, 8)               \
	F(m, u32, reserve_blocks, 12)        \
	F(m, u32, sequences_max, 16)         \
	F(m, u32, tokens_max, 20)            \
	F(m, u64, fingerprint, 24)

#define KVP_OPEN_REPLY_FIELDS(F, m)    \
	F(m, u64, session, 0)          \
	F(m, u64, boot_id, 8)          \
	F(m, u64, fingerprint, 16)     \
	F(m, u32, lease_ms, 24)        \
	F(m, u32, reserved_blocks, 28) \
	F(m, u32, n_layers, 32)        \
	F(m, u32, block_size, 36)      \
	F(m, u16, q_heads, 40)         \
	F(m, u16, kv_heads, 42)        \
	F(m, u16, k_head_dim, 44)      \
	F(m, u16, v_head_dim, 46)      \
	F(m, u32, sequences_max, 48)   \
	F(m, u32, tokens_max, 52)

/* POOL_INFO. Payload: pool name; of the reply: canonical JSON or float32 rows. */
#define KVP_POOL_INFO_REQ_FIELDS(F, m)           \
	F(m, u16, pool_name_bytes, 0)            \
	F(m, u16, what, 2) /* KVP_POOL_INFO_* */ \
	F(m, u32, index, 4)                      \
	F(m, u32, layer, 8)                      \
	F(m, u32, row_first, 12)

#define KVP_POOL_INFO_REPLY_FIELDS(F, m) \
	F(m, u64, fingerprint, 0)        \
	F(m, u32, json_bytes, 8)         \
	F(m, u32, n_pools, 12)

#define KVP_TELL_REQ_FIELDS(F, m)     \
	F(m, u64, sequence_from, 0)   \
	F(m, u32, n_sequences_max, 8) \
	F(m, u32, flags, 12) /* KVP_TELL_* */

/* Payload: u32 lengths[n_items][n_layers] when PER_LAYER was asked for. */
#define KVP_TELL_REPLY_FIELDS(F, m)      \
	F(m, u64, next_sequence, 0)      \
	F(m, u64, lengths_off, 8)        \
	F(m, u32, n_layers, 16)          \
	F(m, u32, n_sequences_total, 20) \
	F(m, u32, flags, 24)

#define KVP_TELL_ITEM_FIELDS(F, m)                    \
	F(m, u64, sequence, 0)                        \
	F(m, u32, length_min, 8)                      \
	F(m, u32, length_max, 12)                     \
	F(m, u32, n_blocks, 16)                       \
	F(m, u32, n_shared_blocks, 20)                \
	F(m, u16, state, 24) /* KVP_STATE_* */        \
	F(m, u16, flags, 26) /* KVP_ITEM_EVICTABLE */ \
	F(m, u32, n_exact, 28)

/* APPEND, DECODE, APPEND_DECODE. */
#define KVP_ROWS_REQ_FIELDS(F, m)             \
	F(m, u32, layer_first, 0)             \
	F(m, u32, n_layers, 4)                \
	F(m, u32, n_tokens_total, 8)          \
	F(m, u32, n_q_total, 12)              \
	F(m, u8, k_dtype, 16)                 \
	F(m, u8, v_dtype, 17)                 \
	F(m, u8, q_dtype, 18)                 \
	F(m, u8, out_dtype, 19)               \
	F(m, u32, flags, 20) /* KVP_ROWS_* */ \
	F(m, u64, k_off, 24)                  \
	F(m, u64, v_off, 32)                  \
	F(m, u64, q_off, 40)                  \
	F(m, f32, scale, 48)                  \
	F(m, u32, window, 52)                 \
	F(m, u64, fingerprint, 56)

/* APPEND, DECODE, APPEND_DECODE, TRUNCATE (sequence, position), FREE (sequence). */
#define KVP_ROWS_ITEM_FIELDS(F, m) \
	F(m, u64, sequence, 0)     \
	F(m, u32, position, 8)     \
	F(m, u32, n_tokens, 12)    \
	F(m, u32, q_len, 16)       \
	F(m, u16, flags, 20) /* KVP_ITEM_* */

/* APPEND, DECODE, APPEND_DECODE, TRUNCATE, FREE, FORK. */
#define KVP_ROWS_REPLY_FIELDS(F, m) \
	F(m, u32, n_ok, 0)          \
	F(m, u32, n_failed, 4)      \
	F(m, u32, n_q_total, 8)     \
	F(m, u8, out_dtype, 12)     \
	F(m, u64, out_off, 16)      \
	F(m, u64, lse_off, 24)      \
	F(m, u32, recv_us, 32)      \
	F(m, u32, queue_us, 36)     \
	F(m, u32, copy_in_us, 40)   \
	F(m, u32, kernel_us, 44)    \
	F(m, u32, copy_out_us, 48)  \
	F(m, u32, total_us, 52)

#define KVP_ROWS_REPLY_ITEM_FIELDS(F, m) \
	F(m, u64, sequence, 0)           \
	F(m, u32, length, 8)             \
	F(m, u32, n_tokens, 12)          \
	F(m, u32, q_len, 16)             \
	F(m, u16, status, 20)            \
	F(m, u16, layer, 22)             \
	F(m, u32, row, 24)               \
	F(m, u32, retry_after_ms, 28)

#define KVP_FORK_ITEM_FIELDS(F, m)              \
	F(m, u64, sequence, 0) /* the child */  \
	F(m, u32, position, 8) /* its length */ \
	F(m, u16, flags, 20)                    \
	F(m, u64, parent, 24)

/* PUBLISH and MATCH. Payload: u32 tokens[n_tokens], then adapter, then salt. */
#define KVP_PREFIX_REQ_FIELDS(F, m)             \
	F(m, u64, sequence, 0)                  \
	F(m, u32, n_tokens, 8)                  \
	F(m, u16, adapter_bytes, 12)            \
	F(m, u16, salt_bytes, 14)               \
	F(m, u32, flags, 16) /* KVP_PREFIX_* */ \
	F(m, u32, ttl_ms, 20)

#define KVP_PREFIX_REPLY_FIELDS(F, m) \
	F(m, u64, sequence, 0)        \
	F(m, u32, n_tokens, 8)        \
	F(m, u32, n_blocks, 12)       \
	F(m, u32, n_blocks_new, 16)

#define KVP_READ_REQ_FIELDS(F, m) \
	F(m, u64, sequence, 0)    \
	F(m, u32, layer_first, 8) \
	F(m, u32, n_layers, 12)   \
	F(m, u32, position, 16)   \
	F(m, u32, n_tokens, 20)   \
	F(m, u8, k_dtype, 24)     \
	F(m, u8, v_dtype, 25)     \
	F(m, u16, flags, 26) /* KVP_READ_* */

/* The request's fields as done. Payload: K rows, then V rows. */
#define KVP_READ_REPLY_FIELDS(F, m) \
	KVP_READ_REQ_FIELDS(F, m)   \
	F(m, u64, k_off, 32)        \
	F(m, u64, v_off, 40)        \
	F(m, u64, fingerprint, 48)

/*
 * UPDATE_SLOTS and DECODE_TABLE. What rows_req has as well lies where it lies there. Payload of the former: K
 * and V rows, i64 slots[n_tokens]; of the latter: queries, i32 table[n_sequences][table_stride], u32
 * seen[n_sequences].
 */
#define KVP_SLOTS_REQ_FIELDS(F, m) \
	F(m, u32, layer_first, 0)  \
	F(m, u32, n_layers, 4)     \
	F(m, u32, n_tokens, 8)     \
	F(m, u8, k_dtype, 16)      \
	F(m, u8, v_dtype, 17)      \
	F(m, u32, flags, 20)       \
	F(m, u64, k_off, 24)       \
	F(m, u64, v_off, 32)       \
	F(m, u64, slots_off, 40)   \
	F(m, u64, fingerprint, 56)

#define KVP_TABLE_REQ_FIELDS(F, m)            \
	F(m, u32, layer, 0)                   \
	F(m, u32, n_sequences, 4)             \
	F(m, u32, table_stride, 8)            \
	F(m, u32, n_q_total, 12)              \
	F(m, u8, q_dtype, 18)                 \
	F(m, u8, out_dtype, 19)               \
	F(m, u32, flags, 20) /* KVP_ROWS_* */ \
	F(m, u64, table_off, 24)              \
	F(m, u64, seen_off, 32)               \
	F(m, u64, q_off, 40)                  \
	F(m, f32, scale, 48)                  \
	F(m, u32, window, 52)                 \
	F(m, u64, fingerprint, 56)

#define KVP_CANCEL_REQ_FIELDS(F, m) F(m, u64, request_id, 0)

#define KVP_CANCEL_REPLY_FIELDS(F, m) F(m, u32, outcome, 0) /* KVP_CANCEL_* */

/* Any reply with status >= 100 except HELLO's. Payload: UTF-8 detail. */
#define KVP_FRAME_ERROR_FIELDS(F, m) \
	F(m, u32, status, 0)         \
	F(m, u32, scope, 4)          \
	F(m, u32, item, 8)           \
	F(m, u32, offset, 12)        \
	F(m, u64, expected, 16)      \
	F(m, u64, got, 24)           \
	F(m, u16, detail_bytes, 32)  \
	F(m, u16, retryable, 34)

/* Values of fields. */
enum kvp_open_flag {
	KVP_OPEN_CLIENT_TABLES = 1 << 0,
	KVP_OPEN_FLAGS_KNOWN = KVP_OPEN_CLIENT_TABLES,
};
enum kvp_pool_info_what {
	KVP_POOL_INFO_JSON = 0,
	KVP_POOL_INFO_ROTATION = 1,
	KVP_POOL_INFO_K_CENTER = 2,
	KVP_POOL_INFO_V_ROTATION = 3, /* V's, which is K's unless their dims differ */
	KVP_POOL_INFO_K_BASIS = 4,    /* what Q_ROTATED and OUT_ROTATED mean */
	KVP_POOL_INFO_V_BASIS = 5,
};
enum kvp_tell_flag {
	KVP_TELL_PER_LAYER = 1 << 0,
	KVP_TELL_FLAGS_KNOWN = KVP_TELL_PER_LAYER,
};
enum kvp_state {
	KVP_STATE_RESIDENT = 0,
	KVP_STATE_SPILLED = 1,
	KVP_STATE_EVICTED = 2,
};
enum kvp_rows_flag {
	KVP_ROWS_LSE = 1 << 0,
	KVP_ROWS_Q_ROTATED = 1 << 1,
	KVP_ROWS_OUT_ROTATED = 1 << 2,
	KVP_ROWS_NO_SINKS = 1 << 3,
	KVP_ROWS_FLAGS_KNOWN = KVP_ROWS_LSE | KVP_ROWS_Q_ROTATED | KVP_ROWS_OUT_ROTATED | KVP_ROWS_NO_SINKS,
};
enum kvp_item_flag {
	KVP_ITEM_CREATE = 1 << 0,
	KVP_ITEM_EVICTABLE = 1 << 1,
	KVP_ITEM_FLAGS_KNOWN = KVP_ITEM_CREATE | KVP_ITEM_EVICTABLE,
};
enum kvp_read_flag {
	KVP_READ_EXACT = 1 << 0,
	KVP_READ_FLAGS_KNOWN = KVP_READ_EXACT,
};
enum kvp_prefix_flag {
	KVP_PREFIX_PROBE = 1 << 0,     /* MATCH: tell only */
	KVP_PREFIX_EVICTABLE = 1 << 1, /* MATCH: so is the new sequence */
	KVP_PREFIX_FLAGS_KNOWN = KVP_PREFIX_PROBE | KVP_PREFIX_EVICTABLE,
};
enum kvp_cancel_outcome {
	KVP_CANCEL_DROPPED = 0,
	KVP_CANCEL_TOO_LATE = 1,
	KVP_CANCEL_UNKNOWN = 2,
};
enum kvp_open_bounds {
	KVP_TOKEN_BYTES_MAX = 512,
	KVP_CLIENT_NAME_BYTES_MAX = 64,
	KVP_POOL_NAME_BYTES_MAX = 64,
	KVP_SESSION_NAME_BYTES_MAX = 128,
	KVP_PRIORITY_MAX = 3,
	KVP_PREFIX_TEXT_BYTES_MAX = 64,
};

/* struct kvp_<message> */
#define KVP_CTYPE_u8                          uint8_t
#define KVP_CTYPE_u16                         uint16_t
#define KVP_CTYPE_u32                         uint32_t
#define KVP_CTYPE_u64                         uint64_t
#define KVP_CTYPE_f32                         float
#define KVP_DECLARE_FIELD(m, type, name, off) KVP_CTYPE_##type name;
#define KVP_DECLARE_STRUCT(m, fields, bytes) \
	struct kvp_##m {                     \
		fields(KVP_DECLARE_FIELD, m) \
	};
KVP_MESSAGE_MAP(KVP_DECLARE_STRUCT)
#undef KVP_DECLARE_STRUCT
#undef KVP_DECLARE_FIELD

/* KVP_BYTES(open_req): size on the wire. KVP_AT(open_req, lease_ms): offset in the struct. Constants. */
#define KVP_BYTES(m)                            kvp_bytes_##m
#define KVP_AT(m, field)                        kvp_at_##m##_##field
#define KVP_DECLARE_AT(m, type, name, off)      kvp_at_##m##_##name = (off),
#define KVP_DECLARE_CONSTANTS(m, fields, bytes) enum { kvp_bytes_##m = (bytes), fields(KVP_DECLARE_AT, m) };
KVP_MESSAGE_MAP(KVP_DECLARE_CONSTANTS)
#undef KVP_DECLARE_CONSTANTS
#undef KVP_DECLARE_AT

/*
 * void kvp_<message>_encode(const struct kvp_<message> *msg, uint8_t out[KVP_BYTES(<message>)]);
 *     Writes all bytes, reserved ones as zero.
 * void kvp_<message>_decode(const uint8_t *in, size_t n_bytes, struct kvp_<message> *msg);
 *     Reads at most n_bytes; fields beyond are 0. `in` may be NULL when n_bytes is 0.
 */
#define KVP_DECLARE_CODEC(m, fields, bytes)                                   \
	void kvp_##m##_encode(const struct kvp_##m *msg, uint8_t out[bytes]); \
	void kvp_##m##_decode(const uint8_t *in, size_t n_bytes, struct kvp_##m *msg);
KVP_MESSAGE_MAP(KVP_DECLARE_CODEC)
#undef KVP_DECLARE_CODEC

/* The lists as data. */
enum kvp_message_id {
#define KVP_MESSAGE_ENUM(m, fields, bytes) KVP_MESSAGE_##m,
	KVP_MESSAGE_MAP(KVP_MESSAGE_ENUM)
#undef KVP_MESSAGE_ENUM
		KVP_N_MESSAGES
};
enum kvp_wire_type {
	KVP_WIRE_u8,
	KVP_WIRE_u16,
	KVP_WIRE_u32,
	KVP_WIRE_u64,
	KVP_WIRE_f32,
};
struct kvp_field_row {
	const char *name;
	uint8_t type; /* enum kvp_wire_type */
	uint8_t wire_bytes;
	uint16_t offset;        /* in the message */
	uint16_t struct_offset; /* in struct kvp_<message> */
};
struct kvp_message_row {
	const char *name; /* "open_req" */
	uint32_t wire_bytes;
	uint32_t n_fields;
	const struct kvp_field_row *fields;
};
/* id below KVP_N_MESSAGES. */
const struct kvp_message_row *kvp_message_row(enum kvp_message_id id);
/* "u32" */
const char *kvp_wire_type_name(unsigned type);
/* NULL when the message has no such field. */
const struct kvp_field_row *kvp_message_field(enum kvp_message_id id, const char *name);

/*
 * A whole error frame: header, frame_error, detail text. The answer to `request`, or, when `request` is NULL
 * because its header could not be trusted, a frame with opcode 0 and request id 0. Not for HELLO, which
 * always answers with its own struct. `detail` is NULL for the fault's own text; longer text is cut at
 * KVP_DETAIL_BYTES_MAX. Writes at most KVP_ERROR_FRAME_BYTES_MAX bytes and returns how many.
 */
enum {
	KVP_ERROR_FRAME_BYTES_MAX = KVP_HEADER_BYTES + 64 + KVP_DETAIL_BYTES_MAX,
};
size_t kvp_error_frame_encode(const struct kvp_header *request, const struct kvp_fault *fault,
	const char *detail, uint32_t retry_after_ms, uint8_t out[KVP_ERROR_FRAME_BYTES_MAX]);

#endif
