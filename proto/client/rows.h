/*
 * Row operations: what a caller asked for, checked, and frames made from pieces of it.
 *
 * A piece is a run of tokens of one item, with or without the item's queries. A frame that holds all items
 * whole is the usual case; bulk.c cuts what does not fit. No I/O here, no state; the caller's thread.
 */
#ifndef PROTO_CLIENT_ROWS_H
#define PROTO_CLIENT_ROWS_H

#include "proto/client/conn.h"

/* A checked call. Token sizes are per layer; 0 for packed rows, whose size only the server knows. */
struct tqkv_rows_call {
	struct tqkv_session *session;
	const struct tqkv_rows *rows;
	const uint64_t *parents; /* of the items of FORK, else NULL */
	enum tqkv_op op;
	uint64_t n_tokens, n_q; /* sums over the items */
	uint64_t k_token_bytes, v_token_bytes;
	uint64_t q_bytes;   /* of one query: all heads */
	uint64_t out_bytes; /* of one query's output */
	uint64_t lse_bytes; /* of one query's; 0 when not asked for */
	bool is_packed;
};

struct tqkv_piece {
	uint32_t item_idx;
	uint32_t position;
	uint32_t n_tokens;
	uint32_t q_len;
	uint32_t flags;
	bool is_last;      /* the item is done when this piece is */
	uint64_t token_at; /* index of the first token in the caller's rows */
	uint64_t q_at;
};
struct tqkv_frame {
	enum tqkv_op op;
	uint32_t layer_first, n_layers;
	uint32_t n_pieces;
	uint64_t n_tokens, n_q;
	struct tqkv_piece pieces[KVP_ITEMS_MAX];
};

/* BAD_ARG names what is wrong and tells sizes as expected and got. */
TQKV_MUST_CHECK enum tqkv_status tqkv_rows_check(struct tqkv_session *session, enum tqkv_op op,
	const struct tqkv_rows *rows, struct tqkv_rows_call *call, struct tqkv_error *err);
/* TRUNCATE, FREE and FORK; `rows` is filled and must outlive the call. */
TQKV_MUST_CHECK enum tqkv_status tqkv_items_check(struct tqkv_session *session, enum tqkv_op op,
	const struct tqkv_item *items, const uint64_t *parents, uint32_t n_items, struct tqkv_rows *rows,
	struct tqkv_rows_call *call, struct tqkv_error *err);

static inline bool tqkv_op_has_rows(enum tqkv_op op)
{
	return op == TQKV_OP_APPEND || op == TQKV_OP_DECODE || op == TQKV_OP_APPEND_DECODE;
}

/* Do a request and its reply of these numbers fit the server's frame_bytes_max? */
bool tqkv_frame_fits(const struct tqkv_rows_call *call, enum tqkv_op op, uint32_t n_layers, uint32_t n_pieces,
	uint64_t n_tokens, uint64_t n_q);
/* Takes an entry and encodes the frame; the caller submits it. */
TQKV_MUST_CHECK enum tqkv_status tqkv_frame_begin(const struct tqkv_rows_call *call,
	const struct tqkv_frame *frame, bool is_pipelined, int64_t deadline_ns, struct tqkv_request **out,
	struct tqkv_error *err);

/* Whether the items of the operation say a position. */
static inline bool tqkv_op_has_position(int op)
{
	return op != TQKV_OP_FREE && op != TQKV_OP_SPILL && op != TQKV_OP_PREFETCH;
}

#endif
