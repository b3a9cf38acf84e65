#include "proto/client/rows.h"

#include <string.h>

static bool has_kv(enum tqkv_op op)
{
	return op == TQKV_OP_APPEND || op == TQKV_OP_APPEND_DECODE;
}

static bool has_q(enum tqkv_op op)
{
	return op == TQKV_OP_DECODE || op == TQKV_OP_APPEND_DECODE;
}

static uint64_t align(uint64_t n_bytes)
{
	return (n_bytes + KVP_ALIGN_BYTES - 1) & ~(uint64_t)(KVP_ALIGN_BYTES - 1);
}

/* ---- Checks ---- */

static enum tqkv_status check_dtype(
	const char *what, unsigned dtype, bool is_wanted, bool may_be_packed, struct tqkv_error *err)
{
	const bool is_plain = kvp_dtype_bytes(dtype) > 0;

	if (is_wanted ? is_plain || (may_be_packed && dtype == KVP_DTYPE_PACKED) : dtype == KVP_DTYPE_NONE)
		return TQKV_OK;
	return tqkv_fail(err, TQKV_BAD_ARG, "%s is %u, expected %s", what, dtype,
		is_wanted ? "f32 (1), f16 (2) or bf16 (3)" : "none (0)");
}

static enum tqkv_status check_size(const char *what, const void *data, uint64_t got_bytes,
	uint64_t expected_bytes, struct tqkv_error *err)
{
	if (got_bytes == expected_bytes && (data || expected_bytes == 0))
		return TQKV_OK;
	if (got_bytes == expected_bytes)
		return tqkv_fail(err, TQKV_BAD_ARG, "%s is NULL", what);
	tqkv_fail(err, TQKV_BAD_ARG, "%s has %llu bytes, expected %llu", what, (unsigned long long)got_bytes,
		(unsigned long long)expected_bytes);
	if (err) {
		err->expected = expected_bytes;
		err->got = got_bytes;
	}
	return TQKV_BAD_ARG;
}

static enum tqkv_status check_items(struct tqkv_rows_call *call, struct tqkv_error *err)
{
	const struct tqkv_rows *rows = call->rows;

	if (rows->n_items == 0 || !rows->items)
		return tqkv_fail(err, TQKV_BAD_ARG, "there are no items");
	for (uint32_t item_idx = 0; item_idx < rows->n_items; item_idx++) {
		const struct tqkv_item *item = &rows->items[item_idx];

		if (item->sequence == 0)
			return tqkv_fail(err, TQKV_BAD_ARG, "item %u: sequence 0 names nothing", item_idx);
		if (item->flags > UINT16_MAX)
			return tqkv_fail(
				err, TQKV_BAD_ARG, "item %u: unknown flags 0x%x", item_idx, item->flags);
		if (item->n_tokens != 0 && !has_kv(call->op))
			return tqkv_fail(err, TQKV_BAD_ARG, "item %u: n_tokens %u, expected 0", item_idx,
				item->n_tokens);
		if ((item->q_len != 0) != has_q(call->op))
			return tqkv_fail(err, TQKV_BAD_ARG, "item %u: q_len %u, expected %s", item_idx,
				item->q_len, has_q(call->op) ? "at least 1" : "0");
		if (has_kv(call->op) && (uint64_t)item->position + item->n_tokens >= KVP_POSITION_PLANNED)
			return tqkv_fail(err, TQKV_BAD_ARG, "item %u: position %u + %u tokens leaves 32 bits",
				item_idx, item->position, item->n_tokens);
		call->n_tokens += item->n_tokens;
		call->n_q += item->q_len;
	}
	return TQKV_OK;
}

static enum tqkv_status check_sizes(struct tqkv_rows_call *call, struct tqkv_error *err)
{
	const struct tqkv_session_info *info = &call->session->info;
	const struct tqkv_rows *rows = call->rows;
	uint64_t n = call->n_tokens;
	uint64_t k_bytes, v_bytes, q_bytes;
	enum tqkv_status status;

	call->k_token_bytes = (uint64_t)info->kv_heads * info->k_head_dim * kvp_dtype_bytes(rows->k_dtype);
	call->v_token_bytes = (uint64_t)info->kv_heads * info->v_head_dim * kvp_dtype_bytes(rows->v_dtype);
	call->q_bytes = (uint64_t)info->q_heads * info->k_head_dim * kvp_dtype_bytes(rows->q_dtype);
	call->out_bytes = (uint64_t)info->q_heads * info->v_head_dim * kvp_dtype_bytes(rows->out_dtype);
	call->lse_bytes = rows->flags & TQKV_LSE ? (uint64_t)info->q_heads * sizeof(float) : 0;
	call->is_packed = rows->k_dtype == TQKV_PACKED || rows->v_dtype == TQKV_PACKED;
	if (__builtin_mul_overflow(n, (uint64_t)rows->n_layers, &n) ||
		__builtin_mul_overflow(n, call->k_token_bytes, &k_bytes) ||
		__builtin_mul_overflow(n, call->v_token_bytes, &v_bytes) ||
		__builtin_mul_overflow(call->n_q, call->q_bytes, &q_bytes))
		return tqkv_fail(err, TQKV_BAD_ARG, "the rows' size leaves 64 bits");
	status = check_size(
		"k", rows->k, rows->k_bytes, rows->k_dtype == TQKV_PACKED ? rows->k_bytes : k_bytes, err);
	if (status == TQKV_OK)
		status = check_size("v", rows->v, rows->v_bytes,
			rows->v_dtype == TQKV_PACKED ? rows->v_bytes : v_bytes, err);
	if (status == TQKV_OK)
		status = check_size("q", rows->q, rows->q_bytes, q_bytes, err);
	return status;
}

enum tqkv_status tqkv_rows_check(struct tqkv_session *session, enum tqkv_op op, const struct tqkv_rows *rows,
	struct tqkv_rows_call *call, struct tqkv_error *err)
{
	if (!session || !rows)
		return tqkv_fail_null(err, "session, rows");

	enum tqkv_status status = tqkv_session_check(session, err);

	*call = (struct tqkv_rows_call){ .session = session, .rows = rows, .op = op };
	if (status != TQKV_OK)
		return status;
	if (rows->n_layers == 0 || rows->layer_first >= session->info.n_layers ||
		rows->n_layers > session->info.n_layers - rows->layer_first)
		return tqkv_fail(err, TQKV_BAD_ARG, "layers %u + %u, the pool has %u", rows->layer_first,
			rows->n_layers, session->info.n_layers);
	if (has_q(op) && rows->n_layers != 1)
		return tqkv_fail(err, TQKV_BAD_ARG, "n_layers %u, expected 1 with queries", rows->n_layers);
	status = check_dtype("k_dtype", rows->k_dtype, has_kv(op), true, err);
	if (status == TQKV_OK)
		status = check_dtype("v_dtype", rows->v_dtype, has_kv(op), true, err);
	if (status == TQKV_OK)
		status = check_dtype("q_dtype", rows->q_dtype, has_q(op), false, err);
	if (status == TQKV_OK)
		status = check_dtype("out_dtype", rows->out_dtype, has_q(op), false, err);
	if (status == TQKV_OK)
		status = check_items(call, err);
	if (status == TQKV_OK)
		status = check_sizes(call, err);
	return status;
}

enum tqkv_status tqkv_items_check(struct tqkv_session *session, enum tqkv_op op,
	const struct tqkv_item *items, const uint64_t *parents, uint32_t n_items, struct tqkv_rows *rows,
	struct tqkv_rows_call *call, struct tqkv_error *err)
{
	const enum tqkv_status status = tqkv_session_check(session, err);

	*rows = (struct tqkv_rows){ .items = items, .n_items = n_items };
	*call = (struct tqkv_rows_call){ .session = session, .rows = rows, .parents = parents, .op = op };
	if (status != TQKV_OK)
		return status;
	if (n_items == 0 || !items)
		return tqkv_fail(err, TQKV_BAD_ARG, "there are no items");
	for (uint32_t item_idx = 0; item_idx < n_items; item_idx++)
		if (items[item_idx].sequence == 0)
			return tqkv_fail(err, TQKV_BAD_ARG, "item %u: sequence 0 names nothing", item_idx);
	for (uint32_t item_idx = 0; parents && item_idx < n_items; item_idx++) {
		const uint64_t sequence = items[item_idx].sequence;

		if (parents[item_idx] == 0 || parents[item_idx] == sequence)
			return tqkv_fail(err, TQKV_BAD_ARG, "item %u: sequence %llu has the parent %llu",
				item_idx, (unsigned long long)sequence,
				(unsigned long long)parents[item_idx]);
	}
	return TQKV_OK;
}

/* ---- Frames ---- */

/* Bytes of the segments, in the order of the payload. Packed rows only travel in one whole frame. */
struct segments {
	uint64_t k_bytes, v_bytes, q_bytes;
	uint64_t v_off, q_off;
	uint64_t payload_bytes;
};

static struct segments segments_of(const struct tqkv_rows_call *call, enum tqkv_op op, uint32_t n_layers,
	uint64_t n_tokens, uint64_t n_q)
{
	struct segments segments = { 0 };

	if (has_kv(op)) {
		const bool is_k_packed = call->rows->k_dtype == TQKV_PACKED;
		const bool is_v_packed = call->rows->v_dtype == TQKV_PACKED;

		segments.k_bytes =
			is_k_packed ? call->rows->k_bytes : n_layers * n_tokens * call->k_token_bytes;
		segments.v_bytes =
			is_v_packed ? call->rows->v_bytes : n_layers * n_tokens * call->v_token_bytes;
	}
	if (has_q(op))
		segments.q_bytes = n_q * call->q_bytes;
	segments.v_off = align(segments.k_bytes);
	segments.q_off = segments.v_off + align(segments.v_bytes);
	segments.payload_bytes = segments.q_bytes ? segments.q_off + segments.q_bytes
		: segments.v_bytes                ? segments.v_off + segments.v_bytes
						  : segments.k_bytes;
	return segments;
}

static uint32_t op_bytes(enum tqkv_op op)
{
	return has_kv(op) || has_q(op) ? KVP_BYTES(rows_req) : 0;
}

bool tqkv_frame_fits(const struct tqkv_rows_call *call, enum tqkv_op op, uint32_t n_layers, uint32_t n_pieces,
	uint64_t n_tokens, uint64_t n_q)
{
	const struct tqkv_server_info *server = &call->session->conn->server;
	const struct segments segments = segments_of(call, op, n_layers, n_tokens, n_q);
	uint64_t reply_bytes = 0;

	if (n_pieces > server->items_max || segments.k_bytes > server->frame_bytes_max ||
		segments.v_bytes > server->frame_bytes_max || segments.q_bytes > server->frame_bytes_max)
		return false;
	if (has_q(op))
		reply_bytes = align(n_q * call->out_bytes) + n_q * call->lse_bytes;
	return kvp_body_bytes(op_bytes(op), n_pieces, KVP_ITEM_BYTES, segments.payload_bytes) <=
		server->frame_bytes_max &&
		kvp_body_bytes(KVP_BYTES(rows_reply), n_pieces, KVP_ITEM_BYTES, reply_bytes) <=
		server->frame_bytes_max;
}

/* [layers][tokens] of the pieces out of the caller's [all layers][all tokens]. */
static void gather(uint8_t *out, const void *rows, uint64_t token_bytes, const struct tqkv_rows_call *call,
	const struct tqkv_frame *frame)
{
	for (uint32_t layer_idx = 0; layer_idx < frame->n_layers; layer_idx++) {
		const uint64_t layer_at =
			(uint64_t)(frame->layer_first - call->rows->layer_first) + layer_idx;
		const uint8_t *layer = (const uint8_t *)rows + layer_at * call->n_tokens * token_bytes;

		for (uint32_t piece_idx = 0; piece_idx < frame->n_pieces; piece_idx++) {
			const struct tqkv_piece *piece = &frame->pieces[piece_idx];
			const size_t n_bytes = (size_t)(piece->n_tokens * token_bytes);

			if (n_bytes > 0)
				memcpy(out, layer + piece->token_at * token_bytes, n_bytes);
			out += n_bytes;
		}
	}
}

static void gather_q(uint8_t *out, const struct tqkv_rows_call *call, const struct tqkv_frame *frame)
{
	for (uint32_t piece_idx = 0; piece_idx < frame->n_pieces; piece_idx++) {
		const struct tqkv_piece *piece = &frame->pieces[piece_idx];
		const size_t n_bytes = (size_t)(piece->q_len * call->q_bytes);

		memcpy(out, (const uint8_t *)call->rows->q + piece->q_at * call->q_bytes, n_bytes);
		out += n_bytes;
	}
}

/* A frame that holds everything is copied as it is, packed rows included. */
static void put_side(uint8_t *out, uint64_t n_bytes, const void *rows, uint64_t all_bytes,
	uint64_t token_bytes, const struct tqkv_rows_call *call, const struct tqkv_frame *frame)
{
	if (n_bytes == 0)
		return;
	if (n_bytes == all_bytes)
		memcpy(out, rows, (size_t)n_bytes);
	else
		gather(out, rows, token_bytes, call, frame);
}

static void put_items(uint8_t *out, const struct tqkv_rows_call *call, const struct tqkv_frame *frame)
{
	for (uint32_t piece_idx = 0; piece_idx < frame->n_pieces; piece_idx++, out += KVP_ITEM_BYTES) {
		const struct tqkv_piece *piece = &frame->pieces[piece_idx];
		const struct tqkv_item *asked = &call->rows->items[piece->item_idx];

		if (call->parents) {
			kvp_fork_item_encode(&(struct kvp_fork_item){ .sequence = asked->sequence,
						     .position = piece->position,
						     .parent = call->parents[piece->item_idx] },
				out);
			continue;
		}

		const struct kvp_rows_item item = {
			.sequence = asked->sequence,
			.position = piece->position,
			.n_tokens = piece->n_tokens,
			.q_len = piece->q_len,
			.flags = (uint16_t)piece->flags,
		};

		kvp_rows_item_encode(&item, out);
	}
}

static void put_op(uint8_t *out, const struct tqkv_rows_call *call, const struct tqkv_frame *frame,
	const struct segments *segments)
{
	const struct tqkv_rows *rows = call->rows;
	const bool is_append = has_kv(frame->op);
	const bool is_decode = has_q(frame->op);
	const struct kvp_rows_req req = {
		.layer_first = frame->layer_first,
		.n_layers = frame->n_layers,
		.n_tokens_total = (uint32_t)frame->n_tokens,
		.n_q_total = (uint32_t)frame->n_q,
		.k_dtype = is_append ? rows->k_dtype : TQKV_NONE,
		.v_dtype = is_append ? rows->v_dtype : TQKV_NONE,
		.q_dtype = is_decode ? rows->q_dtype : TQKV_NONE,
		.out_dtype = is_decode ? rows->out_dtype : TQKV_NONE,
		.flags = is_decode ? rows->flags : 0,
		.k_off = segments->k_bytes ? 0 : KVP_ABSENT,
		.v_off = segments->v_bytes ? segments->v_off : KVP_ABSENT,
		.q_off = segments->q_bytes ? segments->q_off : KVP_ABSENT,
		.scale = rows->scale,
		.window = rows->window,
		.fingerprint = call->is_packed && is_append ? call->session->info.fingerprint : 0,
	};

	kvp_rows_req_encode(&req, out);
}

enum tqkv_status tqkv_frame_begin(const struct tqkv_rows_call *call, const struct tqkv_frame *frame,
	bool is_pipelined, int64_t deadline_ns, struct tqkv_request **out, struct tqkv_error *err)
{
	const struct tqkv_rows *rows = call->rows;
	const struct segments segments =
		segments_of(call, frame->op, frame->n_layers, frame->n_tokens, frame->n_q);
	const struct tqkv_shape shape = {
		.opcode = (uint16_t)frame->op,
		.op_bytes = op_bytes(frame->op),
		.n_items = frame->n_pieces,
		.payload_bytes = segments.payload_bytes,
		.is_pipelined = is_pipelined,
	};
	struct tqkv_request *request;
	enum tqkv_status status = TQKV_TOO_LARGE;

	if (!tqkv_frame_fits(
		    call, frame->op, frame->n_layers, frame->n_pieces, frame->n_tokens, frame->n_q)) {
		tqkv_fail(err, TQKV_TOO_LARGE,
			"%u items, %llu tokens on %u layers: above items_max %u or frame_bytes_max "
			"%llu",
			frame->n_pieces, (unsigned long long)frame->n_tokens, frame->n_layers,
			call->session->conn->server.items_max,
			(unsigned long long)call->session->conn->server.frame_bytes_max);
		if (err)
			err->scope = TQKV_SCOPE_REQUEST;
		return status;
	}
	status = tqkv_request_begin(call->session->conn, call->session, &shape, deadline_ns, &request, err);
	if (status != TQKV_OK)
		return status;

	uint8_t *body = tqkv_request_body(request);
	uint8_t *payload = tqkv_request_payload(request);

	put_items(body + shape.op_bytes, call, frame);
	if (shape.op_bytes > 0)
		put_op(body, call, frame, &segments);
	if (segments.payload_bytes > 0) {
		/* Padding between the segments: at most 63 bytes each, written before the rows. */
		if (segments.v_off > segments.k_bytes && segments.payload_bytes >= segments.v_off)
			memset(payload + segments.k_bytes, 0, (size_t)(segments.v_off - segments.k_bytes));
		if (segments.q_bytes > 0)
			memset(payload + segments.v_off + segments.v_bytes, 0,
				(size_t)(segments.q_off - segments.v_off - segments.v_bytes));
		put_side(payload, segments.k_bytes, rows->k, rows->k_bytes, call->k_token_bytes, call, frame);
		put_side(payload + segments.v_off, segments.v_bytes, rows->v, rows->v_bytes,
			call->v_token_bytes, call, frame);
		if (segments.q_bytes > 0)
			gather_q(payload + segments.q_off, call, frame);
	}
	*out = request;
	return TQKV_OK;
}
