#include "proto/client/reply.h"

#include <stdio.h>
#include <string.h>

#include "proto/client/conn.h"
#include "proto/message.h"

/* A reply in pieces; all members follow from a header that kvp_header_decode() accepted. */
struct view {
	const struct tqkv_asked *asked;
	const struct kvp_header *header;
	const uint8_t *body;
	const uint8_t *payload; /* NULL when there is none */
	uint64_t payload_bytes;
	struct tqkv_error *err;
};

static struct view view_of(const struct tqkv_asked *asked, const struct kvp_header *header,
	const uint8_t *body, struct tqkv_error *err)
{
	struct view view = {
		.asked = asked,
		.header = header,
		.body = body,
		.payload_bytes = kvp_payload_bytes(header),
		.err = err,
	};

	if (view.payload_bytes > 0)
		view.payload =
			body + kvp_payload_start(header->op_bytes, header->n_items, header->item_bytes);
	return view;
}

static const uint8_t *item_at(const struct view *view, uint32_t item_idx)
{
	return view->body + kvp_structs_bytes(view->header->op_bytes, item_idx, view->header->item_bytes);
}

static enum tqkv_status refuse(const struct view *view, uint64_t expected, uint64_t got, const char *what)
{
	return tqkv_fail(view->err, TQKV_BAD_FRAME,
		"the reply to %s is malformed: %s (expected %llu, got %llu)",
		kvp_opcode_name(view->asked->header->opcode), what, (unsigned long long)expected,
		(unsigned long long)got);
}

/* ---- Errors ---- */

enum tqkv_status tqkv_reply_error(
	const struct kvp_header *header, const uint8_t *body, struct tqkv_error *err)
{
	const struct kv_status_row *row = kv_status_row(header->status);
	const bool is_known = row->number == header->status;
	const uint64_t payload_bytes = kvp_payload_bytes(header);
	struct kvp_frame_error error;
	size_t detail_bytes;
	int n;

	kvp_frame_error_decode(body, header->op_bytes, &error);
	detail_bytes = error.detail_bytes;
	if (detail_bytes > KVP_DETAIL_BYTES_MAX)
		detail_bytes = KVP_DETAIL_BYTES_MAX;
	if (detail_bytes > payload_bytes)
		detail_bytes = (size_t)payload_bytes;
	*err = (struct tqkv_error){
		.status = (enum tqkv_status)header->status,
		.scope = error.scope >= TQKV_SCOPE_ITEM && error.scope <= TQKV_SCOPE_DAEMON
			? (enum tqkv_scope)error.scope
			: (enum tqkv_scope)row->scope,
		.is_retryable = error.retryable != 0 || (is_known && row->is_retryable),
		.retry_after_ms = header->retry_after_ms,
		.item = header->op_bytes > KVP_AT(frame_error, item) ? error.item : KVP_NO_ITEM,
		.offset = error.offset,
		.expected = error.expected,
		.got = error.got,
	};
	n = is_known ? snprintf(err->message, sizeof(err->message), "%s", row->name)
		     : snprintf(err->message, sizeof(err->message), "status %u", header->status);
	if (detail_bytes == 0) {
		if (is_known)
			snprintf(err->message + n, sizeof(err->message) - (size_t)n, ": %s", row->text);
		return err->status;
	}

	const uint8_t *detail =
		body + kvp_payload_start(header->op_bytes, header->n_items, header->item_bytes);

	/* Our server's text begins with the status already. */
	if (detail_bytes >= (size_t)n && memcmp(detail, err->message, (size_t)n) == 0)
		n = 0;
	else
		n += snprintf(err->message + n, sizeof(err->message) - (size_t)n, ": ");
	for (size_t i = 0; i < detail_bytes && (size_t)n < sizeof(err->message) - 1; i++)
		err->message[n++] = detail[i] < 0x20 || detail[i] == 0x7F ? '?' : (char)detail[i];
	err->message[n] = '\0';
	return err->status;
}

/* HELLO answers a refusal with its own struct, which has no text. */
static enum tqkv_status hello_status(const struct view *view)
{
	const struct kvp_header *header = view->header;
	const struct kv_status_row *row = kv_status_row(header->status);

	if (header->status == KV_OK)
		return TQKV_OK;
	tqkv_fail(view->err, (enum tqkv_status)header->status, "HELLO: %s",
		row->number == header->status ? row->text : "refused with a status that is unknown here");
	view->err->is_local = false;
	view->err->retry_after_ms = header->retry_after_ms;
	return (enum tqkv_status)header->status;
}

/* ---- Row operations ---- */

static bool is_tables(const struct view *view)
{
	return view->asked->header->opcode == KVP_OP_UPDATE_SLOTS ||
		view->asked->header->opcode == KVP_OP_DECODE_TABLE;
}

/* The item that was asked for; operations on client tables have none, and are one. */
static struct kvp_rows_item asked_item(const struct view *view, uint32_t item_idx)
{
	const struct tqkv_asked *asked = view->asked;
	struct kvp_rows_item item = { 0 };
	struct kvp_slots_req slots;
	struct kvp_table_req table;

	if (asked->header->opcode == KVP_OP_UPDATE_SLOTS) {
		kvp_slots_req_decode(asked->body, asked->header->op_bytes, &slots);
		item.n_tokens = slots.n_tokens;
	} else if (asked->header->opcode == KVP_OP_DECODE_TABLE) {
		kvp_table_req_decode(asked->body, asked->header->op_bytes, &table);
		item.q_len = table.n_q_total;
	} else {
		kvp_rows_item_decode(asked->body +
				kvp_structs_bytes(
					asked->header->op_bytes, item_idx, asked->header->item_bytes),
			asked->header->item_bytes, &item);
	}
	return item;
}

static enum tqkv_status decode_item(const struct view *view, uint32_t item_idx, struct tqkv_item_result *item)
{
	const struct kvp_rows_item asked = asked_item(view, item_idx);
	struct kvp_rows_reply_item got;
	const bool has_rows = view->asked->header->op_bytes > 0;

	kvp_rows_reply_item_decode(item_at(view, item_idx), view->header->item_bytes, &got);
	if (got.sequence != asked.sequence)
		return refuse(view, asked.sequence, got.sequence, "sequence of an item");
	if (got.status != KV_OK && got.status < KV_BAD_MAGIC)
		return refuse(view, KV_BAD_MAGIC, got.status, "status of an item");
	if (has_rows && got.n_tokens != (got.status == KV_OK ? asked.n_tokens : 0))
		return refuse(view, asked.n_tokens, got.n_tokens, "n_tokens of an item");
	if (has_rows && got.q_len != (got.status == KV_OK ? asked.q_len : 0))
		return refuse(view, asked.q_len, got.q_len, "q_len of an item");
	*item = (struct tqkv_item_result){
		.sequence = got.sequence,
		.status = (enum tqkv_status)got.status,
		.length = got.length,
		.n_tokens = has_rows ? got.n_tokens : 0,
		.q_len = has_rows ? got.q_len : 0,
		.layer = got.layer,
		.row = got.row,
		.retry_after_ms = got.retry_after_ms,
	};
	return TQKV_OK;
}

static enum tqkv_status decode_outputs(
	const struct view *view, const struct kvp_rows_reply *rows, struct tqkv_reply *reply)
{
	const struct kvp_geometry *geometry = view->asked->geometry;
	struct kvp_rows_req asked; /* the op structs of client tables have these fields in the same places */

	kvp_rows_req_decode(view->asked->body, view->asked->header->op_bytes, &asked);
	if (rows->n_q_total != asked.n_q_total)
		return refuse(view, asked.n_q_total, rows->n_q_total, "n_q_total");
	if (asked.n_q_total == 0)
		return TQKV_OK;
	if (rows->out_dtype != asked.out_dtype)
		return refuse(view, asked.out_dtype, rows->out_dtype, "out_dtype");

	/* 32 bits times 16 bits times 16 bits would not fit; n_q_total is bounded by our own frame. */
	const uint64_t n_heads = (uint64_t)asked.n_q_total * geometry->q_heads;
	const uint64_t out_bytes = n_heads * geometry->v_head_dim * kvp_dtype_bytes(asked.out_dtype);

	if (!kvp_segment_fits(view->payload_bytes, rows->out_off, out_bytes))
		return refuse(view, out_bytes, rows->out_off, "outputs outside the payload");
	if (asked.flags & KVP_ROWS_LSE) {
		if (!kvp_segment_fits(view->payload_bytes, rows->lse_off, n_heads * sizeof(float)))
			return refuse(view, n_heads * sizeof(float), rows->lse_off,
				"log-sum-exps outside the payload");
		reply->lse = (const float *)(const void *)(view->payload + rows->lse_off);
	}
	reply->n_q_total = asked.n_q_total;
	reply->out = view->payload + rows->out_off;
	reply->out_bytes = out_bytes;
	return TQKV_OK;
}

static enum tqkv_status decode_rows(
	const struct view *view, struct tqkv_reply_space *space, struct tqkv_reply *reply)
{
	const uint32_t n_items = is_tables(view) ? 1 : view->asked->header->n_items;
	struct kvp_rows_reply rows;
	uint32_t n_ok = 0;

	kvp_rows_reply_decode(view->body, view->header->op_bytes, &rows);
	if (view->header->n_items != n_items)
		return refuse(view, n_items, view->header->n_items, "n_items");
	for (uint32_t item_idx = 0; item_idx < n_items; item_idx++) {
		const enum tqkv_status status = decode_item(view, item_idx, &space->items[item_idx]);

		if (status != TQKV_OK)
			return status;
		n_ok += space->items[item_idx].status == TQKV_OK;
	}
	if (rows.n_ok != n_ok || rows.n_failed != n_items - n_ok)
		return refuse(view, n_ok, rows.n_ok, "n_ok does not count the items");
	if (view->asked->header->op_bytes > 0) {
		const enum tqkv_status status = decode_outputs(view, &rows, reply);

		if (status != TQKV_OK)
			return status;
	}
	reply->n_items = n_items;
	reply->items = space->items;
	reply->n_ok = rows.n_ok;
	reply->n_failed = rows.n_failed;
	reply->timings = (struct tqkv_timings){ rows.recv_us, rows.queue_us, rows.copy_in_us, rows.kernel_us,
		rows.copy_out_us, rows.total_us };
	return TQKV_OK;
}

/* ---- READ ---- */

/* Bytes of a side as far as they are known; packed rows have the size that the payload leaves. */
static bool side_is_inside(const struct view *view, unsigned dtype, uint64_t n_rows, uint32_t head_dim,
	uint64_t off, uint64_t next_off, uint64_t *n_bytes)
{
	uint64_t end = next_off < view->payload_bytes ? next_off : view->payload_bytes;

	if (off > view->payload_bytes || end < off)
		return false;
	*n_bytes = end - off;
	if (dtype != KVP_DTYPE_PACKED &&
		(__builtin_mul_overflow(n_rows, (uint64_t)head_dim * kvp_dtype_bytes(dtype), n_bytes)))
		return false;
	return *n_bytes > 0 && kvp_segment_fits(view->payload_bytes, off, *n_bytes);
}

static enum tqkv_status decode_read(const struct view *view, struct tqkv_reply *reply)
{
	const struct kvp_geometry *geometry = view->asked->geometry;
	struct kvp_read_req asked;
	struct kvp_read_reply got;

	kvp_read_req_decode(view->asked->body, view->asked->header->op_bytes, &asked);
	kvp_read_reply_decode(view->body, view->header->op_bytes, &got);
	if (got.sequence != asked.sequence || got.layer_first != asked.layer_first ||
		got.n_layers != asked.n_layers || got.position != asked.position)
		return refuse(view, asked.sequence, got.sequence, "sequence, layers or position");
	if (got.n_tokens > asked.n_tokens)
		return refuse(view, asked.n_tokens, got.n_tokens, "n_tokens");
	if (got.k_dtype != asked.k_dtype || got.v_dtype != asked.v_dtype)
		return refuse(view, asked.k_dtype, got.k_dtype, "dtypes");

	const uint64_t n_rows = (uint64_t)got.n_layers * got.n_tokens * geometry->kv_heads;
	const bool has_k = asked.k_dtype != KVP_DTYPE_NONE && n_rows > 0;
	const bool has_v = asked.v_dtype != KVP_DTYPE_NONE && n_rows > 0;

	if (has_k &&
		!side_is_inside(view, asked.k_dtype, n_rows, geometry->k_head_dim, got.k_off,
			has_v && got.v_off > got.k_off ? got.v_off : KVP_ABSENT, &reply->k_bytes))
		return refuse(view, view->payload_bytes, got.k_off, "K rows outside the payload");
	if (has_v &&
		!side_is_inside(view, asked.v_dtype, n_rows, geometry->v_head_dim, got.v_off,
			has_k && got.k_off > got.v_off ? got.k_off : KVP_ABSENT, &reply->v_bytes))
		return refuse(view, view->payload_bytes, got.v_off, "V rows outside the payload");
	reply->k = has_k ? view->payload + got.k_off : NULL;
	reply->v = has_v ? view->payload + got.v_off : NULL;
	reply->n_tokens = got.n_tokens;
	reply->fingerprint = got.fingerprint;
	return TQKV_OK;
}

/* ---- TELL ---- */

static enum tqkv_status decode_tell(
	const struct view *view, struct tqkv_reply_space *space, struct tqkv_reply *reply)
{
	const uint32_t n_items = view->header->n_items;
	struct kvp_tell_req asked;
	struct kvp_tell_reply tell;
	uint64_t sequence_last = 0;

	kvp_tell_req_decode(view->asked->body, view->asked->header->op_bytes, &asked);
	kvp_tell_reply_decode(view->body, view->header->op_bytes, &tell);
	if (n_items > asked.n_sequences_max)
		return refuse(view, asked.n_sequences_max, n_items, "more sequences than asked for");
	if (tell.n_layers != view->asked->geometry->n_layers)
		return refuse(view, view->asked->geometry->n_layers, tell.n_layers, "n_layers");
	for (uint32_t item_idx = 0; item_idx < n_items; item_idx++) {
		struct kvp_tell_item item;

		kvp_tell_item_decode(item_at(view, item_idx), view->header->item_bytes, &item);
		if (item.sequence <= sequence_last || item.sequence < asked.sequence_from)
			return refuse(view, sequence_last + 1, item.sequence,
				"sequences are not in ascending order");
		if (item.length_min > item.length_max)
			return refuse(view, item.length_max, item.length_min, "length_min above length_max");
		sequence_last = item.sequence;
		space->sequences[item_idx] =
			(struct tqkv_sequence){ item.sequence, item.length_min, item.length_max,
				item.n_blocks, item.n_shared_blocks, item.state, item.flags, item.n_exact };
	}
	/* Otherwise paging would never end. */
	if (tell.next_sequence != 0 && (n_items == 0 || tell.next_sequence <= sequence_last))
		return refuse(view, sequence_last + 1, tell.next_sequence, "next_sequence");
	if (asked.flags & KVP_TELL_PER_LAYER && n_items > 0) {
		const uint64_t n_bytes = (uint64_t)n_items * tell.n_layers * sizeof(uint32_t);

		if (!kvp_segment_fits(view->payload_bytes, tell.lengths_off, n_bytes))
			return refuse(view, n_bytes, tell.lengths_off, "lengths outside the payload");
		reply->lengths = (const uint32_t *)(const void *)(view->payload + tell.lengths_off);
	}
	reply->n_items = n_items;
	reply->sequences = space->sequences;
	reply->next_sequence = tell.next_sequence;
	return TQKV_OK;
}

/* ---- Control ---- */

static enum tqkv_status decode_open(const struct view *view, union tqkv_reply_op *op)
{
	struct kvp_open_reply open;

	kvp_open_reply_decode(view->body, view->header->op_bytes, &open);
	if (open.session == 0)
		return refuse(view, 1, 0, "session handle is 0");
	if (open.n_layers == 0 || open.q_heads == 0 || open.kv_heads == 0 || open.k_head_dim == 0 ||
		open.v_head_dim == 0)
		return refuse(view, 1, 0, "a number of the geometry is 0");
	/* Sizes are products of these; the bounds keep every product far inside 64 bits. */
	if (open.n_layers > 65536)
		return refuse(view, 65536, open.n_layers, "n_layers");
	op->open = open;
	return TQKV_OK;
}

static enum tqkv_status decode_pool_info(
	const struct view *view, struct tqkv_reply *reply, union tqkv_reply_op *op)
{
	struct kvp_pool_info_reply info;

	kvp_pool_info_reply_decode(view->body, view->header->op_bytes, &info);
	if (info.json_bytes > view->payload_bytes)
		return refuse(view, view->payload_bytes, info.json_bytes, "json_bytes");
	reply->payload = info.json_bytes ? view->payload : NULL;
	reply->payload_bytes = info.json_bytes;
	reply->fingerprint = info.fingerprint;
	op->pool_info = info;
	return TQKV_OK;
}

static enum tqkv_status decode_prefix(const struct view *view, union tqkv_reply_op *op)
{
	struct kvp_prefix_req asked;

	kvp_prefix_req_decode(view->asked->body, view->asked->header->op_bytes, &asked);
	kvp_prefix_reply_decode(view->body, view->header->op_bytes, &op->prefix);
	if (op->prefix.sequence != asked.sequence)
		return refuse(view, asked.sequence, op->prefix.sequence, "sequence");
	if (op->prefix.n_tokens > asked.n_tokens)
		return refuse(view, asked.n_tokens, op->prefix.n_tokens, "n_tokens");
	return TQKV_OK;
}

static enum tqkv_status decode_ping(
	const struct view *view, struct tqkv_reply *reply, union tqkv_reply_op *op)
{
	struct kvp_ping_req asked;

	kvp_ping_req_decode(view->asked->body, view->asked->header->op_bytes, &asked);
	if (view->payload_bytes != asked.reply_payload_bytes)
		return refuse(view, asked.reply_payload_bytes, view->payload_bytes, "bytes of the echo");
	kvp_ping_reply_decode(view->body, view->header->op_bytes, &op->ping);
	reply->payload = view->payload;
	reply->payload_bytes = view->payload_bytes;
	return TQKV_OK;
}

enum tqkv_status tqkv_reply_decode(const struct tqkv_asked *asked, const struct kvp_header *header,
	const uint8_t *body, struct tqkv_reply_space *space, struct tqkv_reply *reply,
	union tqkv_reply_op *op, struct tqkv_error *err)
{
	union tqkv_reply_op unused;
	const struct view view = view_of(asked, header, body, err);

	if (!op)
		op = &unused;
	if (header->status != KV_OK && header->status < KV_BAD_MAGIC)
		return refuse(&view, KV_BAD_MAGIC, header->status, "status");
	if (header->opcode == KVP_OP_HELLO) {
		kvp_hello_reply_decode(body, header->op_bytes, &op->hello);
		return hello_status(&view);
	}
	if (header->status != KV_OK)
		return tqkv_reply_error(header, body, err);
	if (asked->header->session != 0 && header->session != asked->header->session)
		return refuse(&view, asked->header->session, header->session, "session handle");
	switch (asked->header->opcode) {
	case KVP_OP_PING:
		return decode_ping(&view, reply, op);
	case KVP_OP_CANCEL:
		kvp_cancel_reply_decode(body, header->op_bytes, &op->cancel);
		return op->cancel.outcome <= KVP_CANCEL_UNKNOWN
			? TQKV_OK
			: refuse(&view, KVP_CANCEL_UNKNOWN, op->cancel.outcome, "outcome");
	case KVP_OP_PUBLISH:
	case KVP_OP_MATCH:
		return decode_prefix(&view, op);
	case KVP_OP_POOL_INFO:
		return decode_pool_info(&view, reply, op);
	case KVP_OP_OPEN:
	case KVP_OP_ATTACH:
		return decode_open(&view, op);
	case KVP_OP_CLOSE:
		return TQKV_OK;
	case KVP_OP_TELL:
		return decode_tell(&view, space, reply);
	case KVP_OP_READ:
		return decode_read(&view, reply);
	default: /* the row operations, TRUNCATE, FREE, FORK */
		return decode_rows(&view, space, reply);
	}
}
