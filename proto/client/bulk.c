#include "proto/client/bulk.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static uint32_t n_items(const struct tqkv_bulk *bulk)
{
	return bulk->call.rows->n_items;
}

static void fail_call(struct tqkv_bulk *bulk, const struct tqkv_error *error)
{
	if (bulk->error.status == TQKV_OK)
		bulk->error = *error;
}

/* ---- Replies ---- */

/* Copies outputs of one piece; `reply_q_at` counts the queries in front of it in the frame. */
static void take_outputs(struct tqkv_bulk *bulk, const struct tqkv_reply *reply,
	const struct tqkv_piece *piece, uint64_t reply_q_at)
{
	const uint64_t out_bytes = bulk->call.out_bytes;
	const uint64_t lse_bytes = bulk->call.lse_bytes;

	memcpy((uint8_t *)bulk->result->out + piece->q_at * out_bytes,
		(const uint8_t *)reply->out + reply_q_at * out_bytes, (size_t)(piece->q_len * out_bytes));
	if (lse_bytes > 0)
		memcpy((uint8_t *)(void *)bulk->result->lse + piece->q_at * lse_bytes,
			(const uint8_t *)(const void *)reply->lse + reply_q_at * lse_bytes,
			(size_t)(piece->q_len * lse_bytes));
}

static void take_ok(
	struct tqkv_bulk *bulk, const struct tqkv_piece *piece, const struct tqkv_item_result *got)
{
	struct tqkv_bulk_item *item = &bulk->items[piece->item_idx];
	struct tqkv_item_result *result = &bulk->results[piece->item_idx];

	if (item->is_refused) {
		struct tqkv_error error;

		/* It was planned on top of a piece that left no trace. */
		tqkv_fail(&error, TQKV_BAD_FRAME,
			"sequence %llu: a piece was accepted after an earlier one was refused",
			(unsigned long long)got->sequence);
		tqkv_conn_lose(bulk->call.session->conn, &error);
		fail_call(bulk, &error);
		return;
	}
	item->done += piece->n_tokens;
	item->is_created = true;
	result->length = got->length;
	result->status = TQKV_OK;
	if (!piece->is_last)
		return;
	item->is_over = true;
	result->q_len = piece->q_len;
	result->layer = got->layer;
	result->row = got->row;
}

static void take_refusal(struct tqkv_bulk *bulk, const struct tqkv_piece *piece,
	const struct tqkv_item_result *got, bool is_retryable)
{
	struct tqkv_bulk_item *item = &bulk->items[piece->item_idx];
	struct tqkv_item_result *result = &bulk->results[piece->item_idx];

	if (item->is_refused)
		return; /* later pieces of a refused item say nothing new */
	item->is_refused = true;
	item->is_over = !is_retryable;
	result->status = got->status;
	result->length = got->length;
	result->layer = got->layer;
	/* The row counts in the caller's item, not in the piece. */
	result->row = got->row == KVP_NO_ROW ? got->row : got->row + item->done;
	result->retry_after_ms = got->retry_after_ms;
	if (is_retryable && got->retry_after_ms > bulk->retry_after_ms)
		bulk->retry_after_ms = got->retry_after_ms;
}

static void add_timings(struct tqkv_timings *sum, const struct tqkv_timings *frame)
{
	sum->recv_us += frame->recv_us;
	sum->queue_us += frame->queue_us;
	sum->copy_in_us += frame->copy_in_us;
	sum->kernel_us += frame->kernel_us;
	sum->copy_out_us += frame->copy_out_us;
	sum->total_us += frame->total_us;
}

static void take_reply(struct tqkv_bulk *bulk, const struct tqkv_frame *frame, const struct tqkv_reply *reply)
{
	uint64_t q_at = 0;

	add_timings(&bulk->result->timings, &reply->timings);
	for (uint32_t piece_idx = 0; piece_idx < frame->n_pieces; piece_idx++) {
		const struct tqkv_piece *piece = &frame->pieces[piece_idx];
		const struct tqkv_item_result *got = &reply->items[piece_idx];

		if (got->status != TQKV_OK) {
			take_refusal(bulk, piece, got,
				tqkv_ends_by_itself(got->status) && tqkv_status_is_retryable(got->status));
		} else {
			take_ok(bulk, piece, got);
			if (piece->q_len > 0 && reply->out)
				take_outputs(bulk, reply, piece, q_at);
		}
		q_at += piece->q_len;
	}
}

/* The whole frame was refused, or nothing is known of it. QUOTA of a frame is one of requests in flight, and
 * over when those are. */
static void take_error(struct tqkv_bulk *bulk, const struct tqkv_frame *frame, const struct tqkv_error *error)
{
	const bool is_retryable = error->is_retryable && !error->is_local;
	const struct tqkv_item_result got = {
		.status = error->status,
		.layer = KVP_NO_LAYER,
		.row = KVP_NO_ROW,
		.retry_after_ms = error->retry_after_ms,
	};

	for (uint32_t piece_idx = 0; piece_idx < frame->n_pieces; piece_idx++) {
		/* What another connection already did to the item stays known; only the length is not. */
		struct tqkv_item_result item = got;

		item.length = bulk->results[frame->pieces[piece_idx].item_idx].length;
		take_refusal(bulk, &frame->pieces[piece_idx], &item, is_retryable || error->is_local);
	}
	if (!is_retryable)
		fail_call(bulk, error);
}

static void finish_flight(struct tqkv_bulk *bulk)
{
	struct tqkv_flight *flight = &bulk->flights[bulk->flight_first];
	struct tqkv_request *request = flight->request;
	struct tqkv_reply reply;
	struct tqkv_error error = { 0 };
	enum tqkv_status status = tqkv_request_await(request, bulk->deadline_ns, &error);

	if (status == TQKV_OK)
		status = tqkv_request_fetch(request, &reply, NULL, &error);
	else
		tqkv_request_forget(request);
	if (status == TQKV_OK)
		take_reply(bulk, &flight->frame, &reply);
	else
		take_error(bulk, &flight->frame, &error);
	bulk->flight_first = (bulk->flight_first + 1) % TQKV_WINDOW_FRAMES;
	bulk->n_flights--;
}

/* ---- Rounds ---- */

/* Sends the next frame. False: there is none. */
static bool launch(struct tqkv_bulk *bulk)
{
	struct tqkv_flight *flight =
		&bulk->flights[(bulk->flight_first + bulk->n_flights) % TQKV_WINDOW_FRAMES];
	struct tqkv_error error = { 0 };

	if (!tqkv_bulk_plan(bulk, &flight->frame))
		return false;

	const enum tqkv_status status = tqkv_frame_begin(
		&bulk->call, &flight->frame, false, bulk->deadline_ns, &flight->request, &error);

	if (status != TQKV_OK) {
		take_error(bulk, &flight->frame, &error);
		return false;
	}
	tqkv_request_submit(flight->request, bulk->deadline_ns);
	bulk->result->n_frames++;
	bulk->n_flights++;
	return true;
}

static void run_round(struct tqkv_bulk *bulk)
{
	bool is_sending = true;

	bulk->item_first = 0;
	bulk->retry_after_ms = 0;
	while (is_sending || bulk->n_flights > 0) {
		while (is_sending && bulk->n_flights < TQKV_WINDOW_FRAMES && bulk->error.status == TQKV_OK)
			is_sending = launch(bulk);
		if (bulk->error.status != TQKV_OK)
			is_sending = false;
		if (bulk->n_flights > 0)
			finish_flight(bulk);
	}
}

/* Makes refused items ready for another round. How many there are. */
static uint32_t rewind_items(struct tqkv_bulk *bulk)
{
	uint32_t n_again = 0;

	for (uint32_t item_idx = 0; item_idx < n_items(bulk); item_idx++) {
		struct tqkv_bulk_item *item = &bulk->items[item_idx];

		if (item->is_over)
			continue;
		item->sent = item->done;
		item->is_last_sent = false;
		item->is_refused = false;
		n_again++;
	}
	return n_again;
}

/* ---- After a lost connection ---- */

/* What became of an item's rows: compares the lengths of its layers in this pass with what was sent. */
static enum tqkv_status sync_item(struct tqkv_bulk *bulk, uint32_t item_idx, struct tqkv_error *err)
{
	const uint64_t sequence = bulk->call.rows->items[item_idx].sequence;
	struct tqkv_bulk_item *item = &bulk->items[item_idx];
	struct tqkv_reply reply;
	uint32_t length_min = 0, length_max = 0;
	const enum tqkv_status status =
		tqkv_session_tell_page(bulk->call.session, sequence, 1, true, bulk->deadline_ns, &reply, err);

	if (status != TQKV_OK)
		return status;
	if (reply.n_items > 0 && reply.sequences[0].sequence == sequence) {
		length_min = length_max = reply.lengths[bulk->layer_first];
		for (uint32_t layer_idx = 1; layer_idx < bulk->n_layers; layer_idx++) {
			const uint32_t length = reply.lengths[bulk->layer_first + layer_idx];

			length_min = length < length_min ? length : length_min;
			length_max = length > length_max ? length : length_max;
		}
		/* With a token of ours it is ours; CREATE of a number that was in use must go on failing. */
		item->is_created = item->is_created || length_min > item->position;
	}
	if (length_min != length_max || length_min < item->position + item->done ||
		length_min > item->position + item->sent) {
		bulk->results[item_idx].status = TQKV_POSITION;
		bulk->results[item_idx].length = length_min;
		item->is_over = true;
		return TQKV_OK;
	}
	item->done = length_min - item->position;
	bulk->results[item_idx].length = length_min;
	if (bulk->call.op == TQKV_OP_APPEND && item->done == item->n_tokens && item->n_tokens > 0) {
		bulk->results[item_idx].status = TQKV_OK;
		item->is_over = true;
	}
	return TQKV_OK;
}

/* True: the connection is back and every open item's progress is known. */
static bool recover(struct tqkv_bulk *bulk)
{
	const bool is_append = bulk->call.op == TQKV_OP_APPEND || bulk->call.op == TQKV_OP_APPEND_DECODE;
	struct tqkv_session *session = bulk->call.session;
	enum tqkv_status status;

	if (bulk->call.op == TQKV_OP_FREE || bulk->call.op == TQKV_OP_FORK || bulk->call.op == TQKV_OP_PIN ||
		bulk->call.op == TQKV_OP_UNPIN ||
		!tqkv_conn_recover(session->conn, bulk->error.status, &bulk->n_recoveries, bulk->deadline_ns,
			&bulk->error))
		return false;
	status = tqkv_session_check(session, &bulk->error);
	for (uint32_t item_idx = 0; status == TQKV_OK && is_append && item_idx < n_items(bulk); item_idx++)
		if (!bulk->items[item_idx].is_over)
			status = sync_item(bulk, item_idx, &bulk->error);
	if (status != TQKV_OK)
		return false;
	bulk->error.status = TQKV_OK;
	return true;
}

/* ---- Passes ---- */

/* All items on one range of layers. */
static void run_pass(struct tqkv_bulk *bulk)
{
	struct tqkv_backoff backoff = { 0 };

	for (;;) {
		run_round(bulk);
		if (bulk->error.status != TQKV_OK) {
			if (!recover(bulk))
				return;
			(void)rewind_items(bulk);
			continue;
		}

		bool has_open = false;

		for (uint32_t item_idx = 0; item_idx < n_items(bulk) && !has_open; item_idx++)
			has_open = !bulk->items[item_idx].is_over;
		if (!has_open ||
			!tqkv_backoff_pause(
				&backoff, bulk->call.session->conn, bulk->retry_after_ms, bulk->deadline_ns))
			break;
		bulk->result->n_retried += rewind_items(bulk);
	}
	for (uint32_t item_idx = 0; item_idx < n_items(bulk); item_idx++)
		bulk->items[item_idx].is_over = true;
}

/* Items that are done so far start again on the next layers; the others are not there on all layers. */
static void begin_pass(struct tqkv_bulk *bulk)
{
	for (uint32_t item_idx = 0; item_idx < n_items(bulk); item_idx++) {
		struct tqkv_bulk_item *item = &bulk->items[item_idx];

		item->done = item->sent = 0;
		if (bulk->results[item_idx].status == TQKV_OK)
			item->is_over = item->is_last_sent = item->is_refused = false;
	}
}

static void run_passes(struct tqkv_bulk *bulk)
{
	const struct tqkv_rows *rows = bulk->call.rows;
	const bool has_rows = tqkv_op_has_rows(bulk->call.op);
	const uint32_t n_layers = has_rows ? tqkv_bulk_layers_fit(&bulk->call) : 0;
	const uint32_t n_step = n_layers > 0 ? n_layers : 1;
	uint32_t n_done = 0;

	do {
		bulk->layer_first = rows->layer_first + n_done;
		bulk->n_layers =
			has_rows && n_step > rows->n_layers - n_done ? rows->n_layers - n_done : n_step;
		bulk->is_last_pass = !has_rows || n_done + bulk->n_layers == rows->n_layers;
		begin_pass(bulk);
		run_pass(bulk);
		n_done += bulk->n_layers;
	} while (!bulk->is_last_pass && bulk->error.status == TQKV_OK);
}

/* ---- Results ---- */

static void clear_outputs(struct tqkv_bulk *bulk, uint32_t item_idx)
{
	const struct tqkv_bulk_item *item = &bulk->items[item_idx];
	uint8_t *out = (uint8_t *)bulk->result->out + item->q_at * bulk->call.out_bytes;

	memset(out, 0, (size_t)(item->q_len * bulk->call.out_bytes));
	if (bulk->call.lse_bytes > 0) {
		const uint64_t n_heads = bulk->call.session->info.q_heads;

		for (uint64_t i = item->q_at * n_heads; i < (item->q_at + item->q_len) * n_heads; i++)
			bulk->result->lse[i] = -INFINITY;
	}
}

static void finish_results(struct tqkv_bulk *bulk)
{
	struct tqkv_rows_result *result = bulk->result;

	for (uint32_t item_idx = 0; item_idx < n_items(bulk); item_idx++) {
		const struct tqkv_bulk_item *item = &bulk->items[item_idx];
		struct tqkv_item_result *got = &bulk->results[item_idx];

		/* Not reached, because the call failed before. */
		if (got->status == TQKV_OK && !(item->is_over && bulk->is_last_pass))
			got->status = bulk->error.status;
		got->n_tokens = bulk->is_last_pass ? item->done : 0;
		if (got->status == TQKV_OK) {
			result->n_ok++;
			continue;
		}
		result->n_failed++;
		got->q_len = 0;
		if (item->q_len > 0)
			clear_outputs(bulk, item_idx);
	}
	if (result->items)
		memcpy(result->items, bulk->results, n_items(bulk) * sizeof(*result->items));
}

/* ---- Calls ---- */

static void init_items(struct tqkv_bulk *bulk)
{
	const bool is_append = bulk->call.op == TQKV_OP_APPEND || bulk->call.op == TQKV_OP_APPEND_DECODE;
	const bool is_decode = bulk->call.op == TQKV_OP_DECODE || bulk->call.op == TQKV_OP_APPEND_DECODE;
	uint64_t token_at = 0, q_at = 0;

	for (uint32_t item_idx = 0; item_idx < n_items(bulk); item_idx++) {
		const struct tqkv_item *asked = &bulk->call.rows->items[item_idx];
		struct tqkv_bulk_item *item = &bulk->items[item_idx];

		*item = (struct tqkv_bulk_item){
			.token_at = token_at,
			.q_at = q_at,
			.position = tqkv_op_has_position(bulk->call.op) ? asked->position : 0,
			.n_tokens = is_append ? asked->n_tokens : 0,
			.q_len = is_decode ? asked->q_len : 0,
			.flags = is_append || is_decode ? asked->flags : 0,
		};
		bulk->results[item_idx] = (struct tqkv_item_result){
			.sequence = asked->sequence,
			.layer = KVP_NO_LAYER,
			.row = KVP_NO_ROW,
		};
		token_at += item->n_tokens;
		q_at += item->q_len;
	}
}

/* Two items of one sequence may land in different frames, where the server cannot see the mistake. */
static int compare_sequences(const void *left, const void *right)
{
	const uint64_t a = *(const uint64_t *)left;
	const uint64_t b = *(const uint64_t *)right;

	return (a > b) - (a < b);
}

static enum tqkv_status check_unique(const struct tqkv_rows *rows, struct tqkv_error *err)
{
	uint64_t *sequences = malloc(rows->n_items * sizeof(*sequences));
	enum tqkv_status status = TQKV_OK;

	if (!sequences)
		return tqkv_fail(err, TQKV_NO_MEMORY, "no memory for %u items", rows->n_items);
	for (uint32_t item_idx = 0; item_idx < rows->n_items; item_idx++)
		sequences[item_idx] = rows->items[item_idx].sequence;
	qsort(sequences, rows->n_items, sizeof(*sequences), compare_sequences);
	for (uint32_t item_idx = 1; item_idx < rows->n_items && status == TQKV_OK; item_idx++)
		if (sequences[item_idx] == sequences[item_idx - 1])
			status = tqkv_fail(err, TQKV_BAD_ARG, "sequence %llu appears twice",
				(unsigned long long)sequences[item_idx]);
	free(sequences);
	return status;
}

static enum tqkv_status check_outputs(
	const struct tqkv_rows_call *call, const struct tqkv_rows_result *result, struct tqkv_error *err)
{
	const uint64_t out_bytes = call->n_q * call->out_bytes;
	const uint64_t lse_bytes = call->n_q * call->lse_bytes;

	if (out_bytes > 0 && (!result->out || result->out_bytes_max < out_bytes))
		return tqkv_fail(err, TQKV_BAD_ARG, "out has %llu bytes, expected %llu",
			result->out ? (unsigned long long)result->out_bytes_max : 0,
			(unsigned long long)out_bytes);
	if (lse_bytes > 0 && (!result->lse || result->lse_bytes_max < lse_bytes))
		return tqkv_fail(err, TQKV_BAD_ARG, "lse has %llu bytes, expected %llu",
			result->lse ? (unsigned long long)result->lse_bytes_max : 0,
			(unsigned long long)lse_bytes);
	return TQKV_OK;
}

static enum tqkv_status run(const struct tqkv_rows_call *call, uint32_t timeout_ms,
	struct tqkv_rows_result *result, struct tqkv_error *err)
{
	const int64_t deadline_ns = tqkv_conn_deadline_ns(call->session->conn, timeout_ms);
	const uint32_t n = call->rows->n_items;
	struct tqkv_rows_result unused = { 0 };
	enum tqkv_status status;

	if (!result)
		result = &unused;
	status = check_outputs(call, result, err);
	/* In one frame the server sees it. */
	if (status == TQKV_OK &&
		!tqkv_frame_fits(call, call->op, call->rows->n_layers, n, call->n_tokens, call->n_q))
		status = check_unique(call->rows, err);
	if (status != TQKV_OK)
		return status;

	struct tqkv_bulk *bulk = malloc(sizeof(*bulk));
	struct tqkv_bulk_item *items = malloc(n * sizeof(*items));
	struct tqkv_item_result *results = malloc(n * sizeof(*results));

	if (!bulk || !items || !results) {
		status = tqkv_fail(err, TQKV_NO_MEMORY, "no memory for %u items", n);
	} else {
		/* The frames, most of it, need no first value. */
		memset(bulk, 0, offsetof(struct tqkv_bulk, flights));
		bulk->call = *call;
		bulk->result = result;
		bulk->results = results;
		bulk->items = items;
		bulk->deadline_ns = deadline_ns;
		result->n_ok = result->n_failed = result->n_frames = result->n_retried = 0;
		memset(&result->timings, 0, sizeof(result->timings));
		init_items(bulk);
		run_passes(bulk);
		finish_results(bulk);
		status = bulk->error.status;
		if (status != TQKV_OK && err)
			*err = bulk->error;
	}
	free(bulk);
	free(items);
	free(results);
	return status;
}

static enum tqkv_status run_rows(struct tqkv_session *session, enum tqkv_op op, const struct tqkv_rows *rows,
	uint32_t timeout_ms, struct tqkv_rows_result *result, struct tqkv_error *err)
{
	struct tqkv_rows_call call;
	const enum tqkv_status status = tqkv_rows_check(session, op, rows, &call, err);

	return status == TQKV_OK ? run(&call, timeout_ms, result, err) : status;
}

enum tqkv_status tqkv_run_items(struct tqkv_session *session, enum tqkv_op op, const struct tqkv_item *items,
	const uint64_t *parents, uint32_t count, uint32_t timeout_ms, struct tqkv_rows_result *result,
	struct tqkv_error *err)
{
	struct tqkv_rows_call call;
	struct tqkv_rows rows;
	const enum tqkv_status status =
		tqkv_items_check(session, op, items, parents, count, &rows, &call, err);

	return status == TQKV_OK ? run(&call, timeout_ms, result, err) : status;
}

enum tqkv_status tqkv_append(struct tqkv_session *session, const struct tqkv_rows *rows, uint32_t timeout_ms,
	struct tqkv_rows_result *result, struct tqkv_error *err)
{
	return run_rows(session, TQKV_OP_APPEND, rows, timeout_ms, result, err);
}

enum tqkv_status tqkv_decode(struct tqkv_session *session, const struct tqkv_rows *rows, uint32_t timeout_ms,
	struct tqkv_rows_result *result, struct tqkv_error *err)
{
	return run_rows(session, TQKV_OP_DECODE, rows, timeout_ms, result, err);
}

enum tqkv_status tqkv_append_decode(struct tqkv_session *session, const struct tqkv_rows *rows,
	uint32_t timeout_ms, struct tqkv_rows_result *result, struct tqkv_error *err)
{
	return run_rows(session, TQKV_OP_APPEND_DECODE, rows, timeout_ms, result, err);
}
