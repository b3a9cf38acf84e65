/*
 * Checks: is a request complete, in range and free of contradictions?
 *
 * Rule 6 of PROTOCOL.md in steps, so that a refused frame never takes a request slot:
 *     kvp_header_decode, kvp_header_check_size        frame.h
 *     kvp_check_opcode                                known, served, a handle where one is needed, items,
 * payload (the server: role, handle -> pool geometry) kvp_check_request                               op
 * struct, items and names, without knowing sessions kvp_rows_check_payload, kvp_rows_reply_layout   segments
 * against the pool's geometry, size of the reply kvp_read_check, kvp_tell_reply_layout, ... (the server:
 * positions, quota) Every refusal fills the fault with the frame offset of the bad field. Two rules decide
 * the status: a number or bit that this version does not know, or that the caller's caps lack, is
 * UNSUPPORTED; a known one that contradicts the rest or leaves its range is BAD_ARG. All arithmetic is 64 bit
 * and checked. No heap, no state; any thread.
 */
#ifndef PROTO_CHECK_H
#define PROTO_CHECK_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/frame.h"
#include "proto/message.h"

/* What the caller serves and told in HELLO. */
struct kvp_caps {
	uint64_t features;        /* KVP_FEATURE_* */
	uint64_t frame_bytes_max; /* bound of body_bytes, replies included */
	uint32_t items_max;       /* at most KVP_ITEMS_MAX */
	uint32_t q_len_max;
};

/* Bytes inside the caller's frame; not NUL-terminated. */
struct kvp_text {
	const char *data;
	uint32_t n_bytes;
};

/*
 * A request's op struct, names and items, decoded. 8 KiB: one per reader, not per request. Which members
 * count follows from the opcode. Its content is unspecified after a refusal.
 */
struct kvp_request {
	uint16_t opcode;
	uint32_t n_items;
	union {
		struct kvp_hello_req hello;
		struct kvp_ping_req ping; /* has_echo tells whether it was there */
		struct kvp_open_req open; /* OPEN, ATTACH */
		struct kvp_pool_info_req pool_info;
		struct kvp_tell_req tell;
		struct kvp_rows_req rows; /* APPEND, DECODE, APPEND_DECODE */
		struct kvp_read_req read;
		struct kvp_slots_req slots;   /* UPDATE_SLOTS */
		struct kvp_table_req table;   /* DECODE_TABLE */
		struct kvp_prefix_req prefix; /* PUBLISH, MATCH */
		struct kvp_cancel_req cancel;
	};
	bool has_echo;                /* PING with an op struct: its payload goes through a request slot */
	uint16_t proto;               /* HELLO: the version chosen */
	struct kvp_text token;        /* HELLO */
	struct kvp_text client_name;  /* HELLO; printable UTF-8 */
	struct kvp_text pool_name;    /* OPEN, ATTACH, POOL_INFO */
	struct kvp_text session_name; /* OPEN, ATTACH */
	union {
		struct kvp_rows_item rows_items[KVP_ITEMS_MAX]; /* row operations, TRUNCATE, FREE */
		struct kvp_fork_item fork_items[KVP_ITEMS_MAX];
	};
};

/* Direction, opcode, session handle present, n_items and item_bytes fit the opcode, control payloads are
 * small. */
KV_MUST_CHECK enum kv_status kvp_check_opcode(
	const struct kvp_header *header, const struct kvp_caps *caps, struct kvp_fault *fault);

/*
 * Op struct, items and names; includes kvp_check_opcode(). `body` holds kvp_structs_bytes() bytes; for
 * operations of KVP_PAYLOAD_CONTROL it holds all body_bytes, because names are in the payload. Texts in
 * `request` point into `body`.
 */
KV_MUST_CHECK enum kv_status kvp_check_request(const struct kvp_header *header, const uint8_t *body,
	const struct kvp_caps *caps, struct kvp_request *request, struct kvp_fault *fault);

/* BAD_CRC (connection) when BODY_CRC is set and `body_crc`, computed by the caller over the body, differs. */
KV_MUST_CHECK enum kv_status kvp_check_body_crc(
	const struct kvp_header *header, uint32_t body_crc, struct kvp_fault *fault);

/* For clients: RESPONSE is set, body_bytes within the bound. BAD_FRAME or TOO_LARGE, both close the
 * connection. */
KV_MUST_CHECK enum kv_status kvp_check_reply(
	const struct kvp_header *header, uint64_t body_bytes_max, struct kvp_fault *fault);

/* Part of a payload. Absent: off KVP_ABSENT, n_bytes 0. */
struct kvp_segment {
	uint64_t off; /* from payload_start; a multiple of 64 */
	uint64_t n_bytes;
};
struct kvp_segments {
	struct kvp_segment k, v, q;
};
/* A multiple of 64 and wholly inside the payload. */
bool kvp_segment_fits(uint64_t payload_bytes, uint64_t off, uint64_t n_bytes);

/* What a payload's sizes depend on: the session's pool. */
struct kvp_geometry {
	uint32_t n_layers;
	uint32_t q_heads;
	uint32_t kv_heads;
	uint32_t k_head_dim;
	uint32_t v_head_dim;
	uint32_t window;      /* tokens, of the layer that is decoded; 0 = it has none */
	uint64_t fingerprint; /* the pool's */
	const uint32_t
		*k_row_bytes; /* [n_layers] bytes of a packed row per KV head; NULL: packed is UNSUPPORTED */
	const uint32_t *v_row_bytes;
};

/*
 * APPEND, DECODE, APPEND_DECODE after kvp_check_request(): layer range, window, fingerprint, and where the
 * segments lie. A segment is present exactly when it has bytes. `segments` is untouched on failure.
 */
KV_MUST_CHECK enum kv_status kvp_rows_check_payload(const struct kvp_header *header,
	const struct kvp_rows_req *rows, const struct kvp_geometry *geometry, struct kvp_segments *segments,
	struct kvp_fault *fault);

/* UPDATE_SLOTS after kvp_check_request(), in the same way. */
struct kvp_slots_segments {
	struct kvp_segment k, v, slots;
};
KV_MUST_CHECK enum kv_status kvp_slots_check_payload(const struct kvp_header *header,
	const struct kvp_slots_req *slots, const struct kvp_geometry *geometry,
	struct kvp_slots_segments *segments, struct kvp_fault *fault);
/* DECODE_TABLE. */
struct kvp_table_segments {
	struct kvp_segment q, table, seen;
};
KV_MUST_CHECK enum kv_status kvp_table_check_payload(const struct kvp_header *header,
	const struct kvp_table_req *table, const struct kvp_geometry *geometry,
	struct kvp_table_segments *segments, struct kvp_fault *fault);
/*
 * The same requests as row operations, for what they have in common: kvp_rows_reply_layout() among others.
 * Their replies have one item although they have none.
 */
struct kvp_rows_req kvp_slots_as_rows(const struct kvp_slots_req *slots);
struct kvp_rows_req kvp_table_as_rows(const struct kvp_table_req *table);

/* Reply to a row operation, with room for all outputs. */
struct kvp_rows_reply_layout {
	struct kvp_segment out;
	struct kvp_segment lse;
	uint64_t payload_start; /* from the end of the reply's header */
	uint64_t body_bytes;
};
/* TOO_LARGE (request) when the body would exceed frame_bytes_max. `layout` is untouched on failure. */
KV_MUST_CHECK enum kv_status kvp_rows_reply_layout(const struct kvp_header *header,
	const struct kvp_rows_req *rows, const struct kvp_geometry *geometry, uint64_t frame_bytes_max,
	struct kvp_rows_reply_layout *layout, struct kvp_fault *fault);

struct kvp_read_reply_layout {
	struct kvp_segment k;
	struct kvp_segment v;
	uint64_t payload_start;
	uint64_t body_bytes;
};
/*
 * READ after kvp_check_request(): layer range, packed served, and the reply's segments. TOO_LARGE (request)
 * when the body would exceed frame_bytes_max; the fault's `expected` is then how many tokens would fit.
 */
KV_MUST_CHECK enum kv_status kvp_read_check(const struct kvp_header *header, const struct kvp_read_req *read,
	const struct kvp_geometry *geometry, uint64_t frame_bytes_max, struct kvp_read_reply_layout *layout,
	struct kvp_fault *fault);
/* How many tokens of such a READ fit into one reply; request->n_tokens is not looked at. */
uint32_t kvp_read_tokens_fit(
	const struct kvp_read_req *read, const struct kvp_geometry *geometry, uint64_t frame_bytes_max);

struct kvp_tell_reply_layout {
	uint32_t n_sequences_max; /* how many one reply holds: the request's, the items' and the frame's bound
				   */
	struct kvp_segment lengths; /* for `n_sequences` */
	uint64_t payload_start;
	uint64_t body_bytes;
};
/* Clips `n_sequences` to what fits (n_sequences_max) and lays the reply out for that many. Never refuses. */
void kvp_tell_reply_layout(const struct kvp_tell_req *tell, uint32_t n_sequences, uint32_t n_layers,
	const struct kvp_caps *caps, struct kvp_tell_reply_layout *layout);

/* PING with an echo: TOO_LARGE (request) when the reply would exceed frame_bytes_max. */
KV_MUST_CHECK enum kv_status kvp_ping_reply_size(const struct kvp_ping_req *ping, uint64_t frame_bytes_max,
	uint64_t *body_bytes, struct kvp_fault *fault);

/* How many float32 rows of row_bytes a POOL_INFO reply holds; 0 when not even one does. */
uint32_t kvp_pool_info_rows_fit(uint32_t row_bytes, uint32_t n_rows, uint64_t frame_bytes_max);

/* [A-Za-z0-9._:-] only; true for the empty text. */
bool kvp_name_is_valid(const char *data, size_t n_bytes);

#endif
