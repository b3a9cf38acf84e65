#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/unit/fake_server.h"

struct fake_sequence *fake_find(struct fake_server *fake, uint64_t session, uint64_t sequence, bool create)
{
	struct fake_sequence *free_one = NULL;

	for (uint32_t i = 0; i < FAKE_SEQUENCES; i++) {
		struct fake_sequence *entry = &fake->sequences[i];

		if (entry->sequence == sequence && entry->session == session)
			return entry;
		if (entry->sequence == 0 && !free_one)
			free_one = entry;
	}
	if (!create || !free_one)
		return NULL;
	free_one->session = session;
	free_one->sequence = sequence;
	return free_one;
}

void fake_free_sequence(struct fake_sequence *sequence)
{
	for (uint32_t layer = 0; layer < FAKE_LAYERS; layer++) {
		free(sequence->layers[layer].k);
		free(sequence->layers[layer].v);
	}
	memset(sequence, 0, sizeof(*sequence));
}

uint8_t *fake_reply_init(struct fake_reply *reply, const struct kvp_header *request, uint32_t op_bytes,
	uint32_t n_items, uint64_t payload_bytes)
{
	const struct kvp_header header = {
		.opcode = request->opcode,
		.flags = KVP_FLAG_RESPONSE,
		.request_id = request->request_id,
		.session = request->session,
		.body_bytes = kvp_body_bytes(op_bytes, n_items, KVP_ITEM_BYTES, payload_bytes),
		.op_bytes = op_bytes,
		.n_items = (uint16_t)n_items,
		.item_bytes = KVP_ITEM_BYTES,
	};

	reply->n_bytes = KVP_HEADER_BYTES + (size_t)header.body_bytes;
	reply->frame = calloc(1, reply->n_bytes);
	kvp_header_encode(&header, reply->frame);
	return reply->frame + KVP_HEADER_BYTES;
}

/* ---- Rows ---- */

struct rows_work {
	struct fake_server *fake;
	const struct kvp_header *header;
	const struct fake_fault *fault;
	struct kvp_rows_req req;
	const float *k, *v, *q;
	float *out, *lse;
	uint64_t token_at, q_at;
};

static const float *segment(const struct kvp_header *header, const uint8_t *body, uint64_t off)
{
	if (off == KVP_ABSENT)
		return NULL;
	return (const float *)(const void *)(body +
		kvp_payload_start(header->op_bytes, header->n_items, header->item_bytes) + off);
}

static void append(struct fake_layer *rows, const float *k, const float *v, uint32_t n)
{
	const size_t length = rows->length + (size_t)n;

	if (n == 0)
		return;
	rows->k = realloc(rows->k, length * FAKE_K_TOKEN * sizeof(float));
	rows->v = realloc(rows->v, length * FAKE_V_TOKEN * sizeof(float));
	memcpy(rows->k + (size_t)rows->length * FAKE_K_TOKEN, k, (size_t)n * FAKE_K_TOKEN * sizeof(float));
	memcpy(rows->v + (size_t)rows->length * FAKE_V_TOKEN, v, (size_t)n * FAKE_V_TOKEN * sizeof(float));
	rows->length += n;
}

static void attend(const struct rows_work *work, const struct fake_layer *rows, uint32_t seen, uint64_t q_at)
{
	for (uint32_t head = 0; head < FAKE_Q_HEADS; head++) {
		const float *q = work->q + (q_at * FAKE_Q_HEADS + head) * FAKE_K_DIM;
		float *out = work->out + (q_at * FAKE_Q_HEADS + head) * FAKE_V_DIM;

		for (uint32_t dim = 0; dim < FAKE_V_DIM; dim++) {
			out[dim] = q[0];
			for (uint32_t token = 0; token < seen; token++)
				out[dim] += rows->v[(size_t)token * FAKE_V_TOKEN +
					head / (FAKE_Q_HEADS / FAKE_KV_HEADS) * FAKE_V_DIM + dim];
		}
		if (work->lse)
			work->lse[q_at * FAKE_Q_HEADS + head] = (float)seen;
	}
}

static uint32_t least_length(const struct rows_work *work, const struct fake_sequence *sequence)
{
	uint32_t length = UINT32_MAX;

	for (uint32_t layer = 0; layer < work->req.n_layers; layer++)
		if (sequence->layers[work->req.layer_first + layer].length < length)
			length = sequence->layers[work->req.layer_first + layer].length;
	return length;
}

/* Checks one item against what is stored. */
static uint16_t check_item(struct rows_work *work, const struct kvp_rows_item *item,
	struct fake_sequence **out, uint32_t *expected)
{
	const bool is_append = work->header->opcode != KVP_OP_DECODE;
	struct fake_sequence *sequence = fake_find(work->fake, work->header->session, item->sequence, false);

	if (fake_refuses(work->fault, item->sequence))
		return work->fault->status;
	if (sequence && item->flags & KVP_ITEM_CREATE)
		return KV_EXISTS;
	if (!sequence && !(item->flags & KVP_ITEM_CREATE))
		return KV_NOT_FOUND;
	if (!sequence)
		sequence = fake_find(work->fake, work->header->session, item->sequence, true);
	if (!sequence)
		return KV_LIMIT;
	*out = sequence;
	*expected = least_length(work, sequence);
	for (uint32_t layer = 0; layer < work->req.n_layers && is_append; layer++)
		if (sequence->layers[work->req.layer_first + layer].length != item->position)
			return KV_POSITION;
	if (!is_append && item->position != KVP_POSITION_PLANNED && item->position > *expected)
		return KV_POSITION;
	return KV_OK;
}

static void do_item(struct rows_work *work, const struct kvp_rows_item *item, struct fake_sequence *sequence)
{
	const bool is_append = work->header->opcode != KVP_OP_DECODE;

	for (uint32_t layer = 0; layer < work->req.n_layers && is_append; layer++) {
		const uint64_t at = (uint64_t)layer * work->req.n_tokens_total + work->token_at;

		append(&sequence->layers[work->req.layer_first + layer],
			item->n_tokens ? work->k + at * FAKE_K_TOKEN : NULL,
			item->n_tokens ? work->v + at * FAKE_V_TOKEN : NULL, item->n_tokens);
	}
	for (uint32_t row = 0; row < item->q_len; row++) {
		const struct fake_layer *rows = &sequence->layers[work->req.layer_first];
		const uint32_t seen =
			is_append || item->position == KVP_POSITION_PLANNED ? rows->length : item->position;

		attend(work, rows, seen + row + 1 - item->q_len, work->q_at + row);
	}
}

static struct kvp_rows_reply_item work_item(struct rows_work *work, const struct kvp_rows_item *item)
{
	struct fake_sequence *sequence = NULL;
	uint32_t length = 0;
	const uint16_t status = check_item(work, item, &sequence, &length);
	struct kvp_rows_reply_item got = {
		.sequence = item->sequence,
		.length = length,
		.status = status,
		.layer = KVP_NO_LAYER,
		.row = KVP_NO_ROW,
	};

	if (status == KV_OK) {
		do_item(work, item, sequence);
		got.length = least_length(work, sequence);
		got.n_tokens = item->n_tokens;
		got.q_len = item->q_len;
	} else if (work->fault) {
		got.retry_after_ms = work->fault->retry_after_ms;
		if (status == KV_BAD_VALUE) {
			got.layer = (uint16_t)work->req.layer_first;
			got.row = item->n_tokens / 2;
		}
	}
	for (uint32_t row = 0; status != KV_OK && work->lse && row < item->q_len * FAKE_Q_HEADS; row++)
		work->lse[work->q_at * FAKE_Q_HEADS + row] = -INFINITY;
	work->token_at += item->n_tokens;
	work->q_at += item->q_len;
	return got;
}

/* TRUNCATE and FREE. */
static struct kvp_rows_reply_item small_item(struct rows_work *work, const struct kvp_rows_item *item)
{
	struct fake_sequence *sequence = fake_find(work->fake, work->header->session, item->sequence, false);
	struct kvp_rows_reply_item got = {
		.sequence = item->sequence,
		.status = sequence ? KV_OK : KV_NOT_FOUND,
		.layer = KVP_NO_LAYER,
		.row = KVP_NO_ROW,
	};

	if (fake_refuses(work->fault, item->sequence)) {
		got.status = work->fault->status;
		got.retry_after_ms = work->fault->retry_after_ms;
	} else if (sequence && work->header->opcode == KVP_OP_FREE) {
		fake_free_sequence(sequence);
	} else if (sequence) {
		for (uint32_t layer = 0; layer < FAKE_LAYERS; layer++)
			if (sequence->layers[layer].length > item->position)
				sequence->layers[layer].length = item->position;
		got.length = item->position;
	}
	return got;
}

void fake_rows(struct fake_server *fake, const struct kvp_header *header, const uint8_t *body,
	const struct fake_fault *fault, struct fake_reply *reply)
{
	struct rows_work work = { .fake = fake, .header = header, .fault = fault };
	const bool is_small = header->op_bytes == 0;
	struct kvp_rows_reply op = { .out_off = KVP_ABSENT, .lse_off = KVP_ABSENT, .total_us = 7 };
	uint64_t out_bytes, lse_bytes;

	kvp_rows_req_decode(body, header->op_bytes, &work.req);
	out_bytes = (uint64_t)work.req.n_q_total * FAKE_OUT * sizeof(float);
	lse_bytes = work.req.flags & KVP_ROWS_LSE
		? (uint64_t)work.req.n_q_total * FAKE_Q_HEADS * sizeof(float)
		: 0;

	uint8_t *out =
		fake_reply_init(reply, header, KVP_BYTES(rows_reply), header->n_items, out_bytes + lse_bytes);
	uint8_t *payload = out + kvp_payload_start(KVP_BYTES(rows_reply), header->n_items, KVP_ITEM_BYTES);

	work.k = segment(header, body, work.req.k_off);
	work.v = segment(header, body, work.req.v_off);
	work.q = segment(header, body, work.req.q_off);
	if (out_bytes > 0) {
		op.out_off = 0;
		op.out_dtype = work.req.out_dtype;
		work.out = (float *)(void *)payload;
	}
	if (lse_bytes > 0) {
		op.lse_off = out_bytes;
		work.lse = (float *)(void *)(payload + out_bytes);
	}
	for (uint32_t item_idx = 0; item_idx < header->n_items; item_idx++) {
		struct kvp_rows_item item;
		struct kvp_rows_reply_item got;

		kvp_rows_item_decode(body + kvp_structs_bytes(header->op_bytes, item_idx, header->item_bytes),
			header->item_bytes, &item);
		got = is_small ? small_item(&work, &item) : work_item(&work, &item);
		op.n_ok += got.status == KV_OK;
		op.n_failed += got.status != KV_OK;
		kvp_rows_reply_item_encode(
			&got, out + kvp_structs_bytes(KVP_BYTES(rows_reply), item_idx, KVP_ITEM_BYTES));
	}
	op.n_q_total = work.req.n_q_total;
	fake->n_items += header->n_items;
	kvp_rows_reply_encode(&op, out);
}

/* ---- READ, TELL ---- */

/* "Packed" rows of the fake: half the bytes of float32, the row's first half. */
static uint64_t side_bytes(unsigned dtype, uint32_t n_floats)
{
	return dtype == KVP_DTYPE_NONE ? 0 : (uint64_t)n_floats * (dtype == KVP_DTYPE_PACKED ? 2 : 4);
}

void fake_read(struct fake_server *fake, const struct kvp_header *header, const uint8_t *body,
	struct fake_reply *reply)
{
	struct kvp_read_req req;

	kvp_read_req_decode(body, header->op_bytes, &req);

	const struct fake_sequence *sequence = fake_find(fake, header->session, req.sequence, false);
	const uint64_t k_token = side_bytes(req.k_dtype, FAKE_K_TOKEN);
	const uint64_t v_token = side_bytes(req.v_dtype, FAKE_V_TOKEN);
	const uint64_t n = (uint64_t)req.n_layers * req.n_tokens;
	const uint64_t v_off = (n * k_token + 63) & ~63ULL;
	struct kvp_read_reply op = {
		.sequence = req.sequence,
		.layer_first = req.layer_first,
		.n_layers = req.n_layers,
		.position = req.position,
		.n_tokens = req.n_tokens,
		.k_dtype = req.k_dtype,
		.v_dtype = req.v_dtype,
		.k_off = k_token ? 0 : KVP_ABSENT,
		.v_off = v_token ? v_off : KVP_ABSENT,
		.fingerprint = fake->pool_fingerprint,
	};
	uint8_t *out = fake_reply_init(
		reply, header, KVP_BYTES(read_reply), 0, v_token ? v_off + n * v_token : n * k_token);
	uint8_t *k = out + KVP_BYTES(read_reply);
	uint8_t *v = k + v_off;

	kvp_read_reply_encode(&op, out);
	for (uint32_t layer = 0; layer < req.n_layers; layer++) {
		const struct fake_layer *rows = &sequence->layers[req.layer_first + layer];

		for (uint32_t token = 0; token < req.n_tokens; token++) {
			if (k_token)
				memcpy(k, rows->k + (size_t)(req.position + token) * FAKE_K_TOKEN, k_token);
			if (v_token)
				memcpy(v, rows->v + (size_t)(req.position + token) * FAKE_V_TOKEN, v_token);
			k += k_token;
			v += v_token;
		}
	}
}

static int compare_sequences(const void *left, const void *right)
{
	const struct fake_sequence *a = *(const struct fake_sequence *const *)left;
	const struct fake_sequence *b = *(const struct fake_sequence *const *)right;

	return (a->sequence > b->sequence) - (a->sequence < b->sequence);
}

void fake_tell(struct fake_server *fake, const struct kvp_header *header, const uint8_t *body,
	struct fake_reply *reply)
{
	const struct fake_sequence *found[FAKE_SEQUENCES];
	struct kvp_tell_req req;
	uint32_t n_found = 0;

	kvp_tell_req_decode(body, header->op_bytes, &req);
	for (uint32_t i = 0; i < FAKE_SEQUENCES; i++)
		if (fake->sequences[i].sequence >= req.sequence_from && fake->sequences[i].sequence != 0 &&
			fake->sequences[i].session == header->session)
			found[n_found++] = &fake->sequences[i];
	qsort(found, n_found, sizeof(found[0]), compare_sequences);

	const uint32_t n = n_found < req.n_sequences_max ? n_found : req.n_sequences_max;
	const uint64_t lengths_bytes = req.flags & KVP_TELL_PER_LAYER ? (uint64_t)n * FAKE_LAYERS * 4 : 0;
	const struct kvp_tell_reply op = {
		.next_sequence = n < n_found ? found[n]->sequence : 0,
		.lengths_off = lengths_bytes ? 0 : KVP_ABSENT,
		.n_layers = FAKE_LAYERS,
		.n_sequences_total = n_found,
	};
	uint8_t *out = fake_reply_init(reply, header, KVP_BYTES(tell_reply), n, lengths_bytes);
	uint8_t *lengths = out + kvp_payload_start(KVP_BYTES(tell_reply), n, KVP_ITEM_BYTES);

	kvp_tell_reply_encode(&op, out);
	for (uint32_t i = 0; i < n; i++) {
		struct kvp_tell_item item = { .sequence = found[i]->sequence, .length_min = UINT32_MAX };

		for (uint32_t layer = 0; layer < FAKE_LAYERS; layer++) {
			const uint32_t length = found[i]->layers[layer].length;

			item.length_min = length < item.length_min ? length : item.length_min;
			item.length_max = length > item.length_max ? length : item.length_max;
			if (lengths_bytes)
				kvp_put_u32(lengths + ((size_t)i * FAKE_LAYERS + layer) * 4, length);
		}
		kvp_tell_item_encode(
			&item, out + kvp_structs_bytes(KVP_BYTES(tell_reply), i, KVP_ITEM_BYTES));
	}
}
