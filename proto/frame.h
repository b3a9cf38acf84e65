/*
 * Frame: the 64-byte header in front of every message, and the numbers that all messages share.
 *
 * [header 64][op struct][items][zero padding to 64][payload]; PROTOCOL.md section 1 is the text. Everything
 * here turns bytes of the caller into structs of the caller and back: no heap, clock, I/O or state; any
 * thread. Bytes come from a peer, so every decoder answers with a status and a fault that says what is wrong
 * and where.
 */
#ifndef PROTO_FRAME_H
#define PROTO_FRAME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/status.h"

#define KVP_ABSENT           0xFFFFFFFFFFFFFFFFULL /* a *_off without a segment */
#define KVP_NO_ITEM          0xFFFFFFFFU           /* a fault that belongs to no item */
#define KVP_POSITION_PLANNED 0xFFFFFFFFU           /* DECODE's position: the sequence's planned length */
#define KVP_NO_LAYER         0xFFFFU               /* reply item: no bad layer */
#define KVP_NO_ROW           0xFFFFFFFFU           /* reply item: no bad row */

enum {
	KVP_PROTO_MIN = 1, /* what HELLO negotiates; the header's own version is KVP_HEADER_VERSION */
	KVP_PROTO_MAX = 1,
	KVP_HEADER_VERSION = 1,
	KVP_HEADER_BYTES = 64,
	KVP_ALIGN_BYTES = 64, /* of payload_start and of every segment */
	KVP_ITEM_BYTES = 32,  /* what we send; readers accept longer items and ignore their tail */
	KVP_OP_BYTES_UNIT = 16,
	KVP_ITEMS_MAX = 256,
	KVP_STRUCTS_BYTES_MAX = 12 * 1024, /* op struct and items: always inside the 16 KiB read-ahead */
	KVP_HELLO_BODY_BYTES_MAX = 4096,   /* largest body before HELLO was accepted */
	/* Largest payload of an operation that takes no request slot: names of today use 576 bytes at most.
	 */
	KVP_CONTROL_PAYLOAD_BYTES_MAX = 2048,
	KVP_FRAME_BYTES_MIN = 64 * 1024, /* range and default of frame_bytes_max, which bounds body_bytes */
	KVP_FRAME_BYTES_DEFAULT = 1024 * 1024,
	KVP_FRAME_BYTES_MAX = 16 * 1024 * 1024,
	KVP_DETAIL_BYTES_MAX = 512, /* text of a frame error */
};

/* Bits of the header's flags. 0-15 must be understood, 16-31 may be ignored. */
enum kvp_flag {
	KVP_FLAG_RESPONSE = 1 << 0,
	KVP_FLAG_BODY_CRC = 1 << 1,
	KVP_FLAG_TIMINGS = 1 << 2,
	KVP_FLAGS_KNOWN = KVP_FLAG_RESPONSE | KVP_FLAG_BODY_CRC | KVP_FLAG_TIMINGS,
	KVP_FLAGS_REQUIRED_MASK = 0xFFFF,
};

/*
 * Parts that a server may lack: bits of HELLO's features and of struct kvp_caps. Using a part that is not
 * served answers UNSUPPORTED.
 */
enum kvp_feature {
	KVP_FEATURE_WINDOW = 1 << 0,        /* a request's own window */
	KVP_FEATURE_CLIENT_TABLES = 1 << 1, /* OPEN's flag; UPDATE_SLOTS and DECODE_TABLE */
	KVP_FEATURE_PACKED_INPUT = 1 << 2,  /* packed rows in APPEND and APPEND_DECODE */
	KVP_FEATURE_EXACT_READ = 1 << 3,    /* READ's EXACT flag */
	KVP_FEATURE_FORK = 1 << 4,          /* FORK */
	KVP_FEATURE_PREFIX = 1 << 5,        /* PUBLISH, MATCH, PIN, UNPIN */
	KVP_FEATURE_TIERS = 1 << 6,         /* SPILL, PREFETCH */
	KVP_FEATURE_ROTATED = 1 << 7,       /* Q_ROTATED and OUT_ROTATED */
	KVP_FEATURE_NO_SINKS = 1 << 8,      /* NO_SINKS */
};

/* What an operation asks of its header. */
enum kvp_session_rule {
	KVP_SESSION_NONE,     /* the field is ignored */
	KVP_SESSION_OPTIONAL, /* 0 or a handle */
	KVP_SESSION_NEEDED,
};
enum kvp_payload_rule {
	KVP_PAYLOAD_CONTROL, /* at most KVP_CONTROL_PAYLOAD_BYTES_MAX, no request slot */
	KVP_PAYLOAD_SLOT,    /* up to frame_bytes_max, through a request slot */
};
enum kvp_served_rule {
	KVP_SERVED_ALWAYS,
	KVP_SERVED_FEATURE,     /* when the caller's features have the bit */
	KVP_SERVED_NOT_YET,     /* a number without byte tables in this version */
	KVP_SERVED_SERVER_SENT, /* never a request */
};

/* X(name, number, session rule, has items, payload rule, served rule, feature bit) */
#define KVP_OPCODE_MAP(X)                                                        \
	X(HELLO, 1, NONE, 0, CONTROL, ALWAYS, 0)                                 \
	X(PING, 2, OPTIONAL, 0, SLOT, ALWAYS, 0)                                 \
	X(GOAWAY, 3, NONE, 0, CONTROL, SERVER_SENT, 0)                           \
	X(CANCEL, 4, NONE, 0, CONTROL, ALWAYS, 0)                                \
	X(POOL_INFO, 16, NONE, 0, CONTROL, ALWAYS, 0)                            \
	X(OPEN, 17, NONE, 0, CONTROL, ALWAYS, 0)                                 \
	X(ATTACH, 18, NONE, 0, CONTROL, ALWAYS, 0)                               \
	X(CLOSE, 19, NEEDED, 0, CONTROL, ALWAYS, 0)                              \
	X(TELL, 20, NEEDED, 0, CONTROL, ALWAYS, 0)                               \
	X(APPEND, 32, NEEDED, 1, SLOT, ALWAYS, 0)                                \
	X(DECODE, 33, NEEDED, 1, SLOT, ALWAYS, 0)                                \
	X(APPEND_DECODE, 34, NEEDED, 1, SLOT, ALWAYS, 0)                         \
	X(READ, 35, NEEDED, 0, CONTROL, ALWAYS, 0)                               \
	X(TRUNCATE, 36, NEEDED, 1, CONTROL, ALWAYS, 0)                           \
	X(FREE, 37, NEEDED, 1, CONTROL, ALWAYS, 0)                               \
	X(FORK, 38, NEEDED, 1, CONTROL, FEATURE, KVP_FEATURE_FORK)               \
	X(PUBLISH, 48, NEEDED, 0, SLOT, FEATURE, KVP_FEATURE_PREFIX)             \
	X(MATCH, 49, NEEDED, 0, SLOT, FEATURE, KVP_FEATURE_PREFIX)               \
	X(PIN, 50, NEEDED, 1, CONTROL, FEATURE, KVP_FEATURE_PREFIX)              \
	X(UNPIN, 51, NEEDED, 1, CONTROL, FEATURE, KVP_FEATURE_PREFIX)            \
	X(SPILL, 52, NEEDED, 1, CONTROL, FEATURE, KVP_FEATURE_TIERS)             \
	X(PREFETCH, 53, NEEDED, 1, CONTROL, FEATURE, KVP_FEATURE_TIERS)          \
	X(UPDATE_SLOTS, 64, NEEDED, 0, SLOT, FEATURE, KVP_FEATURE_CLIENT_TABLES) \
	X(DECODE_TABLE, 65, NEEDED, 0, SLOT, FEATURE, KVP_FEATURE_CLIENT_TABLES)

enum kvp_opcode {
#define KVP_OPCODE_ENUM(name, number, session, has_items, payload, served, feature) KVP_OP_##name = (number),
	KVP_OPCODE_MAP(KVP_OPCODE_ENUM)
#undef KVP_OPCODE_ENUM
};

struct kvp_opcode_row {
	const char *name; /* "APPEND" */
	uint16_t number;
	uint8_t session_rule; /* enum kvp_session_rule */
	uint8_t payload_rule; /* enum kvp_payload_rule */
	uint8_t served_rule;  /* enum kvp_served_rule */
	bool has_items;       /* 1 to items_max of them; else none */
	uint32_t feature;
};
/* NULL for a number without a row. */
const struct kvp_opcode_row *kvp_opcode_row(unsigned number);
/* Never NULL: "UNKNOWN" for a number without a row. */
const char *kvp_opcode_name(unsigned number);

/* X(name, number, bytes per element; 0 = it has none of its own) */
#define KVP_DTYPE_MAP(X) \
	X(NONE, 0, 0)    \
	X(F32, 1, 4)     \
	X(F16, 2, 2)     \
	X(BF16, 3, 2)    \
	X(PACKED, 16, 0)

enum kvp_dtype {
#define KVP_DTYPE_ENUM(name, number, bytes) KVP_DTYPE_##name = (number),
	KVP_DTYPE_MAP(KVP_DTYPE_ENUM)
#undef KVP_DTYPE_ENUM
};

/* Bytes of one element; 0 for NONE, PACKED (rows have the format's row_bytes) and unknown numbers. */
uint32_t kvp_dtype_bytes(unsigned dtype);
bool kvp_dtype_is_known(unsigned dtype);

/*
 * Why bytes were refused. `offset` is that of the bad field, from the start of the frame's header; a field
 * that a short op struct does not reach is told as offset 40 (op_bytes). Filled on failure only; NULL is
 * allowed everywhere.
 */
struct kvp_fault {
	enum kv_status status;
	enum kv_scope scope; /* what the caller tears down; TOO_LARGE has two */
	uint32_t item;       /* KVP_NO_ITEM: none */
	uint32_t offset;
	uint64_t expected; /* a value or the bound that was broken; `what` says which */
	uint64_t got;
	const char *what; /* static text */
};

/* Fills a fault with the status' usual scope and no item, and returns `status`. */
enum kv_status kvp_fault_set(struct kvp_fault *fault, enum kv_status status, uint32_t offset,
	uint64_t expected, uint64_t got, const char *what);
/* One readable line, NUL-terminated, cut at n bytes; returns its length without the NUL (0 when n is 0). */
size_t kvp_fault_text(const struct kvp_fault *fault, char *buf, size_t n);

/*
 * The header's fields in wire order. Magic, version, header length and the header's CRC are written by encode
 * and checked by decode, so they have no field.
 */
struct kvp_header {
	uint16_t opcode;         /* 6 */
	uint32_t flags;          /* 8 */
	uint32_t status;         /* 12; a number of status.h, perhaps one that is newer than this build */
	uint64_t request_id;     /* 16 */
	uint64_t session;        /* 24 */
	uint64_t body_bytes;     /* 32 */
	uint32_t op_bytes;       /* 40 */
	uint16_t n_items;        /* 44 */
	uint16_t item_bytes;     /* 46 */
	uint32_t deadline_us;    /* 48 */
	uint32_t retry_after_ms; /* 52 */
	uint32_t body_crc;       /* 56 */
};

/* Offsets of the header's fields, for faults. */
enum kvp_header_at {
	KVP_AT_MAGIC = 0,
	KVP_AT_VERSION = 4,
	KVP_AT_HEADER_LENGTH = 5,
	KVP_AT_OPCODE = 6,
	KVP_AT_FLAGS = 8,
	KVP_AT_STATUS = 12,
	KVP_AT_REQUEST_ID = 16,
	KVP_AT_SESSION = 24,
	KVP_AT_BODY_BYTES = 32,
	KVP_AT_OP_BYTES = 40,
	KVP_AT_N_ITEMS = 44,
	KVP_AT_ITEM_BYTES = 46,
	KVP_AT_DEADLINE = 48,
	KVP_AT_RETRY_AFTER = 52,
	KVP_AT_BODY_CRC = 56,
	KVP_AT_HEADER_CRC = 60,
};

void kvp_header_encode(const struct kvp_header *header, uint8_t out[KVP_HEADER_BYTES]);

/*
 * Checks in this order: magic, version, header length, CRC, the lengths, unknown required flags. `*out` is
 * filled as soon as the CRC is right, also when a later check fails, because the answer needs the request id
 * and the reader needs body_bytes; before that (BAD_MAGIC, VERSION_UNSUPPORTED, BAD_CRC) it is untouched.
 * UNSUPPORTED has the scope of the request: skip body_bytes and go on. Everything else closes the connection.
 */
KV_MUST_CHECK enum kv_status kvp_header_decode(
	const uint8_t in[KVP_HEADER_BYTES], struct kvp_header *out, struct kvp_fault *fault);

/* TOO_LARGE (connection) above the bound: frame_bytes_max, or KVP_HELLO_BODY_BYTES_MAX before HELLO. */
KV_MUST_CHECK enum kv_status kvp_header_check_size(
	const struct kvp_header *header, uint64_t body_bytes_max, struct kvp_fault *fault);

/* Bytes of op struct and items, from the end of the header. */
static inline uint64_t kvp_structs_bytes(uint32_t op_bytes, uint32_t n_items, uint32_t item_bytes)
{
	return (uint64_t)op_bytes + (uint64_t)n_items * item_bytes;
}

/* Where the payload starts, from the end of the header. */
static inline uint64_t kvp_payload_start(uint32_t op_bytes, uint32_t n_items, uint32_t item_bytes)
{
	return (kvp_structs_bytes(op_bytes, n_items, item_bytes) + KVP_ALIGN_BYTES - 1) &
		~(uint64_t)(KVP_ALIGN_BYTES - 1);
}

/* Bytes of the payload of a header that kvp_header_decode() accepted. */
static inline uint64_t kvp_payload_bytes(const struct kvp_header *header)
{
	const uint64_t start = kvp_payload_start(header->op_bytes, header->n_items, header->item_bytes);

	return header->body_bytes > start ? header->body_bytes - start : 0;
}

/* body_bytes of a frame with this much payload; without payload the frame ends after the items. */
static inline uint64_t kvp_body_bytes(
	uint32_t op_bytes, uint32_t n_items, uint32_t item_bytes, uint64_t payload_bytes)
{
	if (payload_bytes == 0)
		return kvp_structs_bytes(op_bytes, n_items, item_bytes);
	return kvp_payload_start(op_bytes, n_items, item_bytes) + payload_bytes;
}

#endif
