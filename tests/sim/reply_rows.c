#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "proto/check.h"
#include "tests/sim/payload.h"
#include "tests/sim/reply.h"

#define CHECK(cond, what) ((cond) ? (void)0 : sim_reply_no(request, what))

/* ---- READ ---- */

static void check_side(const struct sim_request *request, bool is_v, const uint8_t *payload)
{
	const struct sim_item *item = &request->items[0];
	const enum kv_dtype dtype = is_v ? request->v_dtype : request->k_dtype;

	for (uint32_t l = 0; l < request->n_layers; l++) {
		const uint32_t layer = request->layer_first + l;
		const uint64_t n_bytes = sim_token_bytes(request->spec, layer, is_v, dtype);
		uint8_t *expected = malloc(n_bytes);

		SIM_CHECK(expected, "no memory for rows");
		for (uint32_t t = 0; t < item->n_tokens; t++, payload += n_bytes) {
			sim_token_read(request->spec, item->row_ids[(size_t)l * item->n_row_ids + t], layer,
				is_v, dtype,
				(request->read_flags & KVP_READ_EXACT) &&
					item->position + t >= item->exact_lo,
				expected);
			CHECK(memcmp(expected, payload, n_bytes) == 0, "READ gives other rows");
		}
		free(expected);
	}
}

static void check_read(
	const struct sim_request *request, const struct kvp_header *header, const uint8_t *body)
{
	const struct sim_item *item = &request->items[0];
	const uint8_t *payload = body + kvp_payload_start(header->op_bytes, 0, 0);
	struct kvp_read_reply reply;

	CHECK(item->outcome.status == KV_OK && item->n_finished == 1, "READ without having been done");
	kvp_read_reply_decode(body, header->op_bytes, &reply);
	CHECK(reply.sequence == item->sequence && reply.layer_first == request->layer_first &&
			reply.n_layers == request->n_layers && reply.position == item->position &&
			reply.n_tokens == item->n_tokens && reply.k_dtype == request->k_dtype &&
			reply.v_dtype == request->v_dtype && reply.flags == request->read_flags &&
			reply.fingerprint == request->spec->fingerprint,
		"READ says that it did something else");
	CHECK((reply.k_off == KVP_ABSENT) == (request->k_dtype == KV_DTYPE_NONE) &&
			(reply.v_off == KVP_ABSENT) == (request->v_dtype == KV_DTYPE_NONE),
		"READ's segments");
	if (request->k_dtype != KV_DTYPE_NONE)
		check_side(request, false, payload + reply.k_off);
	if (request->v_dtype != KV_DTYPE_NONE)
		check_side(request, true, payload + reply.v_off);
}

/* ---- rows ---- */

static bool is_zero(const uint8_t *bytes, uint64_t n)
{
	while (n > 0 && bytes[n - 1] == 0)
		n--;
	return n == 0;
}

/* Tokens that one row of queries sees. */
struct sight {
	const uint32_t *row_ids;
	uint32_t n;
};

/* Row `row` of an item's queries, which sees item->q_len - 1 - row tokens less than the last one. */
static struct sight sight_of(const struct sim_request *request, const struct sim_item *item, uint32_t row)
{
	const uint32_t *row_ids = item->row_ids;

	if (request->opcode != KVP_OP_DECODE_TABLE)
		return (struct sight){ row_ids, item->n_row_ids - (item->q_len - 1 - row) };
	const uint32_t q_len = item->q_len / request->n_listed, list = row / q_len;

	for (uint32_t s = 0; s < list; s++)
		row_ids += request->seen[s];
	return (struct sight){ row_ids, request->seen[list] - (q_len - 1 - row % q_len) };
}

static bool is_known(const struct sight *sight)
{
	for (uint32_t t = 0; t < sight->n; t++) {
		if (sight->row_ids[t] == UINT32_MAX)
			return false;
	}
	return true;
}

static void check_output(const struct sim_request *request, uint32_t item_idx, uint32_t row,
	const uint8_t *out, const float *lse)
{
	const struct sim_item *item = &request->items[item_idx];
	const struct sight sight = sight_of(request, item, row);
	const struct kv_pool_spec *spec = request->spec;
	const uint64_t n_bytes =
		(uint64_t)spec->q_heads * spec->v_head_dim * kv_dtype_bytes(request->out_dtype);
	const struct sim_attention attention = {
		.spec = spec,
		.layer = request->layer_first,
		.row_ids = sight.row_ids,
		.n_tokens = sight.n,
		.exact_lo = item->exact_lo,
		.query_id = sim_query_id(request, item_idx, row),
		.q_dtype = request->q_dtype,
		.out_dtype = request->out_dtype,
		.scale = request->scale,
		.window = request->window,
		.has_no_sinks = (request->rows_flags & KVP_ROWS_NO_SINKS) != 0,
		.q_is_rotated = (request->rows_flags & KVP_ROWS_Q_ROTATED) != 0,
		.out_is_rotated = (request->rows_flags & KVP_ROWS_OUT_ROTATED) != 0,
	};
	/* Slots of a client that nothing was written to. */
	if (!is_known(&sight))
		return;
	uint8_t *expected = malloc(n_bytes);
	float *expected_lse = malloc(spec->q_heads * sizeof(float));

	SIM_CHECK(expected && expected_lse, "no memory for an output");
	sim_attention_expect(&attention, expected, expected_lse);
	SIM_CHECK(memcmp(expected, out, n_bytes) == 0,
		"request %llu item %u row %u: another output over %u tokens", (unsigned long long)request->id,
		item_idx, row, attention.n_tokens);
	if (lse)
		CHECK(memcmp(expected_lse, lse, spec->q_heads * sizeof(float)) == 0, "another lse");
	free(expected);
	free(expected_lse);
}

/* Row `at` of all outputs. */
static void check_row(const struct sim_request *request, uint32_t item_idx, uint32_t row, uint64_t at,
	const struct kvp_rows_reply *reply, const uint8_t *payload)
{
	const struct kv_pool_spec *spec = request->spec;
	const uint64_t row_bytes =
		(uint64_t)spec->q_heads * spec->v_head_dim * kv_dtype_bytes(request->out_dtype);
	const bool has_lse = request->rows_flags & KVP_ROWS_LSE;
	const uint8_t *out = payload + at * row_bytes;
	float lse[64];

	SIM_CHECK(spec->q_heads <= 64, "too many heads for the simulation");
	if (has_lse)
		memcpy(lse, payload + reply->lse_off + at * spec->q_heads * sizeof(float),
			spec->q_heads * sizeof(float));
	if (request->items[item_idx].outcome.status == KV_OK) {
		check_output(request, item_idx, row, out, has_lse ? lse : NULL);
		return;
	}
	CHECK(is_zero(out, row_bytes), "the output of a failed item is not zero");
	for (uint32_t h = 0; has_lse && h < spec->q_heads; h++)
		CHECK(isinf(lse[h]) && lse[h] < 0, "the lse of a failed item is not -infinity");
}

static void check_outputs(const struct sim_request *request, const struct kvp_header *header,
	const struct kvp_rows_reply *reply, const uint8_t *body)
{
	const uint8_t *payload = body + kvp_payload_start(header->op_bytes, header->n_items, KVP_ITEM_BYTES);
	const bool has_lse = request->rows_flags & KVP_ROWS_LSE;
	uint64_t n_q = 0;

	CHECK(reply->out_off == 0 && reply->out_dtype == request->out_dtype, "the output's place");
	CHECK((reply->lse_off != KVP_ABSENT) == has_lse, "the lse's place");
	for (uint32_t i = 0; i < request->n_items; i++) {
		for (uint32_t row = 0; row < request->items[i].q_len; row++)
			check_row(request, i, row, n_q++, reply, payload);
	}
}

static void check_item(const struct sim_request *request, const struct sim_item *item,
	const struct kvp_rows_reply_item *reply)
{
	const struct kv_item *outcome = &item->outcome;
	const bool is_ok = outcome->status == KV_OK;

	CHECK(item->n_planned == 1, "answered without having been planned");
	CHECK(item->planned_on == NULL, "answered before it was over");
	CHECK(reply->sequence == item->sequence && reply->status == outcome->status &&
			reply->length == outcome->length && reply->layer == outcome->layer &&
			reply->row == outcome->row,
		"an item's answer is not its outcome");
	CHECK(reply->n_tokens == (is_ok ? item->n_tokens : 0) && reply->q_len == (is_ok ? item->q_len : 0),
		"an item's counts are neither all nor nothing");
	CHECK((reply->retry_after_ms > 0) == (kv_status_row(reply->status)->is_retryable != 0),
		"retry_after_ms where trying again does not help, or none where it does");
}

static void check_rows(
	const struct sim_request *request, const struct kvp_header *header, const uint8_t *body)
{
	struct kvp_rows_reply reply;
	uint32_t n_ok = 0;

	CHECK(header->n_items == request->n_items && header->item_bytes == KVP_ITEM_BYTES, "number of items");
	kvp_rows_reply_decode(body, header->op_bytes, &reply);
	for (uint32_t i = 0; i < request->n_items; i++) {
		struct kvp_rows_reply_item item;

		kvp_rows_reply_item_decode(
			body + header->op_bytes + i * KVP_ITEM_BYTES, header->item_bytes, &item);
		check_item(request, &request->items[i], &item);
		n_ok += item.status == KV_OK;
	}
	CHECK(reply.n_ok == n_ok && reply.n_failed == request->n_items - n_ok, "n_ok, n_failed");
	CHECK(reply.n_q_total == sim_request_n_q(request), "n_q_total");
	if (request->opcode != KVP_OP_APPEND && request->opcode != KVP_OP_UPDATE_SLOTS)
		check_outputs(request, header, &reply, body);
	else
		CHECK(reply.out_off == KVP_ABSENT && reply.lse_off == KVP_ABSENT,
			"output where there is none");
	if (!(request->flags & KVP_FLAG_TIMINGS))
		CHECK(reply.recv_us == 0 && reply.queue_us == 0 && reply.kernel_us == 0 &&
				reply.total_us == 0,
			"timings that nobody asked for");
	else if (n_ok > 0)
		CHECK(reply.kernel_us > 0 && reply.total_us >= reply.queue_us, "no timings");
}

/* An error of the whole frame: cancelled, too late, or a READ that failed. */
static void check_refused(struct sim_peer *peer, struct sim_request *request, enum kv_status status)
{
	if (request->planned_seq == 0)
		sim_reply_no(request, kv_status_name(status));
	for (uint32_t i = 0; i < request->n_items; i++)
		CHECK(request->items[i].planned_on == NULL, "answered before it was over");
	if (status == KV_CANCELLED) {
		CHECK(request->n_cancels > 0, "CANCELLED, and nobody asked for it");
		request->is_dropped = true;
		return;
	}
	if (status == KV_DEADLINE) {
		CHECK(request->deadline_us > 0, "DEADLINE without one");
		for (uint32_t i = 0; i < request->n_items; i++)
			CHECK(request->items[i].outcome.status != KV_OK, "DEADLINE, and something was done");
		return;
	}
	CHECK(request->opcode == KVP_OP_READ && status == request->items[0].outcome.status,
		kv_status_name(status));
	(void)peer;
}

void sim_reply_check_rows(struct sim_peer *peer, struct sim_request *request, const struct kvp_header *header,
	const uint8_t *body)
{
	CHECK(!request->is_dropped || header->status == KV_CANCELLED, "dropped, and answered otherwise");
	if (header->status != KV_OK)
		check_refused(peer, request, (enum kv_status)header->status);
	else if (request->opcode == KVP_OP_READ)
		check_read(request, header, body);
	else
		check_rows(request, header, body);
}
