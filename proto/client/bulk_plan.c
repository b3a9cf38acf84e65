/*
 * Which pieces go into the next frame. Pure: looks only at the items' progress and the server's limits.
 */
#include "proto/client/bulk.h"

uint32_t tqkv_bulk_layers_fit(const struct tqkv_rows_call *call)
{
	uint32_t n_layers = call->rows->n_layers;
	const uint64_t layer_bytes = call->k_token_bytes + call->v_token_bytes;
	const uint64_t frame_bytes_max = call->session->conn->server.frame_bytes_max;

	if (call->op != TQKV_OP_APPEND || call->is_packed || call->n_tokens == 0)
		return n_layers;
	if (n_layers > frame_bytes_max / layer_bytes)
		n_layers = (uint32_t)(frame_bytes_max / layer_bytes);
	/* At most three steps: what the division left out is the structs and the padding. */
	while (n_layers > 0 && !tqkv_frame_fits(call, TQKV_OP_APPEND, n_layers, 1, 1, 0))
		n_layers--;
	return n_layers;
}

/* How many tokens of at most `n_wanted` still fit beside what the frame holds. */
static uint32_t tokens_fit(
	const struct tqkv_bulk *bulk, const struct tqkv_frame *frame, uint32_t n_wanted, uint32_t q_len)
{
	const struct tqkv_rows_call *call = &bulk->call;
	const uint64_t token_bytes = (call->k_token_bytes + call->v_token_bytes) * frame->n_layers;
	const uint64_t n_q = frame->n_q + q_len;
	const uint64_t frame_bytes_max = call->session->conn->server.frame_bytes_max;
	/* Two paddings between three segments are the part that is not exact: never more than this. */
	const uint64_t other_bytes =
		kvp_payload_start(KVP_BYTES(rows_req), frame->n_pieces + 1, KVP_ITEM_BYTES) +
		n_q * call->q_bytes + 2 * (uint64_t)KVP_ALIGN_BYTES;
	uint64_t n = 0;

	if (call->is_packed || token_bytes == 0)
		return n_wanted;
	if (frame_bytes_max > other_bytes)
		n = (frame_bytes_max - other_bytes) / token_bytes;
	n = n > frame->n_tokens ? n - frame->n_tokens : 0;
	if (n > n_wanted)
		n = n_wanted;
	while (n < n_wanted &&
		tqkv_frame_fits(
			call, frame->op, frame->n_layers, frame->n_pieces + 1, frame->n_tokens + n + 1, n_q))
		n++;
	return (uint32_t)n;
}

/* Tokens that an APPEND_DECODE must leave for the frame with the queries. */
static uint32_t n_tail(const struct tqkv_bulk_item *item)
{
	return item->q_len < item->n_tokens ? item->q_len : item->n_tokens;
}

/*
 * The operation that the item's next piece needs. An APPEND_DECODE that is too large for a frame is appended
 * first; one whose rows are known to be committed only decodes.
 */
static enum tqkv_op next_op(const struct tqkv_bulk *bulk, uint32_t item_idx)
{
	const struct tqkv_bulk_item *item = &bulk->items[item_idx];
	const uint32_t n_left = item->n_tokens - item->sent;

	if (bulk->call.op != TQKV_OP_APPEND_DECODE)
		return bulk->call.op;
	if (n_left == 0 && item->n_tokens > 0)
		return TQKV_OP_DECODE;
	if (n_left > n_tail(item) && !bulk->call.is_packed &&
		!tqkv_frame_fits(&bulk->call, TQKV_OP_APPEND_DECODE, 1, 1, n_left, item->q_len))
		return TQKV_OP_APPEND;
	return TQKV_OP_APPEND_DECODE;
}

/* Adds the item's next piece. False: it does not fit (any more). */
static bool add_piece(struct tqkv_bulk *bulk, struct tqkv_frame *frame, uint32_t item_idx)
{
	struct tqkv_bulk_item *item = &bulk->items[item_idx];
	const uint32_t n_left = item->n_tokens - item->sent;
	const bool is_lead = bulk->call.op == TQKV_OP_APPEND_DECODE && frame->op == TQKV_OP_APPEND;
	const uint32_t n_wanted = is_lead ? n_left - n_tail(item) : n_left;
	const uint32_t q_len = frame->op == TQKV_OP_APPEND ? 0 : item->q_len;
	uint32_t n_tokens = tokens_fit(bulk, frame, n_wanted, q_len);
	/* A piece without tokens still needs room for its item and its queries. */
	const bool fits = n_tokens > 0 ||
		tqkv_frame_fits(&bulk->call, frame->op, frame->n_layers, frame->n_pieces + 1, frame->n_tokens,
			frame->n_q + q_len);

	/* Only appends may be cut; and a cut in front of every token helps nobody. */
	if (!fits || (n_tokens < n_wanted && (frame->op != TQKV_OP_APPEND || n_tokens == 0))) {
		/* An empty frame takes it anyway: tqkv_frame_begin() then says TOO_LARGE and why. */
		if (frame->n_pieces > 0)
			return false;
		n_tokens = n_wanted;
	}
	item->is_last_sent = !is_lead && n_tokens == n_left;
	frame->pieces[frame->n_pieces++] = (struct tqkv_piece){
		.item_idx = item_idx,
		.position = item->position + item->sent,
		.n_tokens = n_tokens,
		.q_len = q_len,
		.flags = item->sent > 0 || item->is_created ? item->flags & ~(uint32_t)TQKV_CREATE
							    : item->flags,
		.is_last = item->is_last_sent,
		.token_at = item->token_at + item->sent,
		.q_at = item->q_at,
	};
	frame->n_tokens += n_tokens;
	frame->n_q += q_len;
	item->sent += n_tokens;
	return true;
}

bool tqkv_bulk_plan(struct tqkv_bulk *bulk, struct tqkv_frame *frame)
{
	const uint32_t n_items = bulk->call.rows->n_items;

	frame->layer_first = bulk->layer_first;
	frame->n_layers = bulk->n_layers;
	frame->n_pieces = 0;
	frame->n_tokens = 0;
	frame->n_q = 0;
	for (uint32_t item_idx = bulk->item_first; item_idx < n_items; item_idx++) {
		const struct tqkv_bulk_item *state = &bulk->items[item_idx];

		if (state->is_over || state->is_refused || state->is_last_sent) {
			if (item_idx == bulk->item_first)
				bulk->item_first++;
			continue;
		}

		const enum tqkv_op op = next_op(bulk, item_idx);

		if (frame->n_pieces == 0)
			frame->op = op;
		if (op != frame->op)
			continue;
		if (!add_piece(bulk, frame, item_idx))
			break;
	}
	return frame->n_pieces > 0;
}
