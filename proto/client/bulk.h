/*
 * Bulk: one blocking row operation of any size, as frames.
 *
 * Rounds: in a round every unfinished item is cut into pieces that fit frames, a few frames are in flight at
 * once, and replies are taken in the order of sending. A piece that is refused stops its item for this round:
 * later pieces of it, already on the way, were planned on top of it and are refused too (POSITION), which
 * means nothing. After the round the items that were refused with a retryable status are tried again from
 * where they stand.
 *
 * Within a layer range an item is: waiting (sent == done), on the way (sent > done), refused, or over.
 */
#ifndef PROTO_CLIENT_BULK_H
#define PROTO_CLIENT_BULK_H

#include "proto/client/rows.h"

enum {
	TQKV_WINDOW_FRAMES = 4, /* enough to keep a server busy while we encode the next one */
};

struct tqkv_bulk_item {
	uint64_t token_at, q_at;                   /* where its rows start in the caller's */
	uint32_t position, n_tokens, q_len, flags; /* as asked for; what the operation does not have is 0 */
	uint32_t done, sent;                       /* tokens: acknowledged, and with those on the way */
	bool is_last_sent;                         /* the piece that ends the item is on the way */
	bool is_refused;                           /* in this round */
	bool is_over;                              /* nothing more to do */
	bool is_created;                           /* the sequence exists, so no CREATE */
};

struct tqkv_flight {
	struct tqkv_request *request;
	struct tqkv_frame frame;
};

struct tqkv_bulk {
	struct tqkv_rows_call call;
	struct tqkv_rows_result *result;
	struct tqkv_item_result *results; /* [n_items] */
	struct tqkv_bulk_item *items;     /* [n_items] */
	int64_t deadline_ns;
	uint32_t layer_first, n_layers; /* of this pass */
	bool is_last_pass;
	uint32_t item_first; /* items before it need nothing in this round */
	uint32_t retry_after_ms;
	uint32_t n_recoveries;
	struct tqkv_error error; /* why the call fails; status OK: it does not */
	uint32_t flight_first, n_flights;
	struct tqkv_flight flights[TQKV_WINDOW_FRAMES];
};

/* bulk.c: TRUNCATE, FREE, FORK (with parents), SPILL, PREFETCH. */
enum tqkv_status tqkv_run_items(struct tqkv_session *session, enum tqkv_op op, const struct tqkv_item *items,
	const uint64_t *parents, uint32_t count, uint32_t timeout_ms, struct tqkv_rows_result *result,
	struct tqkv_error *err);
/* bulk_plan.c: the next frame of this round, and marks its pieces as sent. False: nothing is left to send. */
bool tqkv_bulk_plan(struct tqkv_bulk *bulk, struct tqkv_frame *frame);
/* bulk_plan.c: how many layers a frame may have so that a token fits; 0: not even one layer. */
uint32_t tqkv_bulk_layers_fit(const struct tqkv_rows_call *call);

#endif
