#include "tests/sim/request.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "proto/bytes.h"
#include "proto/crc32c.h"
#include "tests/sim/payload.h"

/* ---- bytes ---- */

uint8_t *sim_bytes_add(struct sim_bytes *bytes, uint64_t n)
{
	if (bytes->n + n > bytes->n_max) {
		bytes->n_max = 2 * (bytes->n + n) + 256;
		bytes->data = realloc(bytes->data, bytes->n_max);
		SIM_CHECK(bytes->data, "no memory for bytes");
	}
	uint8_t *at = bytes->data + bytes->n;

	memset(at, 0, n);
	bytes->n += n;
	return at;
}

void sim_bytes_finish(struct sim_bytes *bytes)
{
	free(bytes->data);
	memset(bytes, 0, sizeof(*bytes));
}

/* ---- sums ---- */

bool sim_request_is_rows(const struct sim_request *request)
{
	return request->opcode == KVP_OP_APPEND || request->opcode == KVP_OP_DECODE ||
		request->opcode == KVP_OP_APPEND_DECODE;
}

bool sim_request_is_tables(const struct sim_request *request)
{
	return request->opcode == KVP_OP_UPDATE_SLOTS || request->opcode == KVP_OP_DECODE_TABLE;
}

static bool has_items(const struct sim_request *request)
{
	return sim_request_is_rows(request) || request->opcode == KVP_OP_TRUNCATE ||
		request->opcode == KVP_OP_FREE || request->opcode == KVP_OP_FORK ||
		request->opcode == KVP_OP_PIN || request->opcode == KVP_OP_UNPIN ||
		request->opcode == KVP_OP_SPILL || request->opcode == KVP_OP_PREFETCH;
}

uint32_t sim_request_n_tokens(const struct sim_request *request)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < request->n_items; i++)
		n += request->items[i].n_tokens;
	return n;
}

uint32_t sim_request_n_q(const struct sim_request *request)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < request->n_items; i++)
		n += request->items[i].q_len;
	return n;
}

enum kv_status sim_flaw_status(enum sim_flaw flaw)
{
	static const enum kv_status statuses[SIM_N_FLAWS] = {
		[SIM_FLAW_MAGIC] = KV_BAD_MAGIC,
		[SIM_FLAW_VERSION] = KV_VERSION_UNSUPPORTED,
		[SIM_FLAW_HEADER_CRC] = KV_BAD_CRC,
		[SIM_FLAW_TOO_LARGE] = KV_TOO_LARGE,
		[SIM_FLAW_ITEM_BYTES] = KV_BAD_FRAME,
		[SIM_FLAW_RESPONSE] = KV_BAD_FRAME,
		[SIM_FLAW_BODY_CRC] = KV_BAD_CRC,
		[SIM_FLAW_EARLY] = KV_BAD_STATE,
		[SIM_FLAW_OPCODE] = KV_UNSUPPORTED,
		[SIM_FLAW_FLAG] = KV_UNSUPPORTED,
		[SIM_FLAW_HANDLE_0] = KV_BAD_ARG,
		[SIM_FLAW_HANDLE_TAG] = KV_STALE_EPOCH,
		[SIM_FLAW_HANDLE_GENERATION] = KV_STALE_HANDLE,
		[SIM_FLAW_N_LAYERS] = KV_BAD_ARG,
		[SIM_FLAW_LAYER_RANGE] = KV_BAD_ARG,
		[SIM_FLAW_OFFSET] = KV_BAD_ARG,
		[SIM_FLAW_TOTAL] = KV_BAD_ARG,
		[SIM_FLAW_DUPLICATE] = KV_BAD_ARG,
		[SIM_FLAW_FINGERPRINT] = KV_FORMAT_MISMATCH,
		[SIM_FLAW_ROWS_FLAG] = KV_UNSUPPORTED,
		[SIM_FLAW_DTYPE] = KV_UNSUPPORTED,
	};

	return statuses[flaw];
}

/* ---- layout ---- */

struct layout {
	uint32_t op_bytes, n_items;
	uint64_t payload_start, payload_bytes, k_off, v_off, q_off;
	uint64_t slots_off, table_off, seen_off; /* behind them */
};

static uint64_t align64(uint64_t n)
{
	return (n + 63) & ~(uint64_t)63;
}

/* All rows of one side of the frame. */
static uint64_t side_bytes(const struct sim_request *request, bool is_v, enum kv_dtype dtype)
{
	const uint64_t n_tokens = sim_request_n_tokens(request);
	uint64_t n_bytes = 0;

	for (uint32_t l = 0; l < request->n_layers; l++)
		n_bytes += n_tokens * sim_token_bytes(request->spec, request->layer_first + l, is_v, dtype);
	return n_bytes;
}

static void layout_rows(const struct sim_request *request, struct layout *layout)
{
	const struct kv_pool_spec *spec = request->spec;
	const uint64_t n_tokens = sim_request_n_tokens(request), n_q = sim_request_n_q(request);
	uint64_t end = 0;

	layout->k_off = layout->v_off = layout->q_off = KVP_ABSENT;
	if (n_tokens > 0) {
		layout->k_off = 0;
		layout->v_off = align64(side_bytes(request, false, request->k_dtype));
		end = layout->v_off + side_bytes(request, true, request->v_dtype);
	}
	if (n_q > 0) {
		layout->q_off = align64(end);
		end = layout->q_off +
			n_q * spec->q_heads * spec->k_head_dim * kv_dtype_bytes(request->q_dtype);
	}
	layout->payload_bytes = end;
}

/* n more bytes behind what is there. */
static uint64_t add_segment(struct layout *layout, uint64_t n)
{
	const uint64_t off = align64(layout->payload_bytes);

	layout->payload_bytes = off + n;
	return off;
}

static struct layout layout_of(const struct sim_request *request)
{
	struct layout layout = { 0 };

	layout.n_items = has_items(request) ? request->n_items : 0;
	switch (request->opcode) {
	case KVP_OP_HELLO:
		layout.op_bytes = KVP_BYTES(hello_req);
		layout.payload_bytes = request->hello.name_bytes;
		break;
	case KVP_OP_PING:
		layout.op_bytes = request->has_echo ? KVP_BYTES(ping_req) : 0;
		layout.payload_bytes = request->echo_payload_bytes;
		break;
	case KVP_OP_OPEN:
	case KVP_OP_ATTACH:
		layout.op_bytes = KVP_BYTES(open_req);
		layout.payload_bytes = strlen(request->pool_name) + strlen(request->session_name);
		break;
	case KVP_OP_POOL_INFO:
		layout.op_bytes = KVP_BYTES(pool_info_req);
		layout.payload_bytes = strlen(request->pool_name);
		break;
	case KVP_OP_TELL:
		layout.op_bytes = KVP_BYTES(tell_req);
		break;
	case KVP_OP_PUBLISH:
	case KVP_OP_MATCH:
		layout.op_bytes = KVP_BYTES(prefix_req);
		layout.payload_bytes = 4 * (uint64_t)request->prefix.n_tokens +
			request->prefix.adapter_bytes + request->prefix.salt_bytes;
		break;
	case KVP_OP_CANCEL:
		layout.op_bytes = KVP_BYTES(cancel_req);
		break;
	case KVP_OP_READ:
		layout.op_bytes = KVP_BYTES(read_req);
		break;
	case KVP_OP_APPEND:
	case KVP_OP_DECODE:
	case KVP_OP_APPEND_DECODE:
		layout.op_bytes = KVP_BYTES(rows_req);
		layout_rows(request, &layout);
		break;
	case KVP_OP_UPDATE_SLOTS:
		layout.op_bytes = KVP_BYTES(slots_req);
		layout_rows(request, &layout);
		layout.slots_off = add_segment(&layout, 8 * (uint64_t)request->items[0].n_tokens);
		break;
	case KVP_OP_DECODE_TABLE:
		layout.op_bytes = KVP_BYTES(table_req);
		layout_rows(request, &layout);
		layout.table_off = add_segment(&layout, 4 * (uint64_t)request->n_listed * SIM_STRIDE);
		layout.seen_off = add_segment(&layout, 4 * (uint64_t)request->n_listed);
		break;
	default:
		break;
	}
	layout.payload_start = kvp_payload_start(layout.op_bytes, layout.n_items, KVP_ITEM_BYTES);
	return layout;
}

uint64_t sim_request_bytes(const struct sim_request *request)
{
	const struct layout layout = layout_of(request);

	return KVP_HEADER_BYTES +
		kvp_body_bytes(layout.op_bytes, layout.n_items, KVP_ITEM_BYTES, layout.payload_bytes);
}

/* ---- op structs ---- */

static uint64_t fingerprint_of(const struct sim_request *request)
{
	return request->k_dtype == KV_DTYPE_PACKED || request->v_dtype == KV_DTYPE_PACKED
		? request->spec->fingerprint
		: 0;
}

static void put_rows_op(const struct sim_request *request, const struct layout *layout, uint8_t *out)
{
	struct kvp_rows_req rows = {
		.layer_first = request->layer_first,
		.n_layers = request->n_layers,
		.n_tokens_total = sim_request_n_tokens(request),
		.n_q_total = sim_request_n_q(request),
		.k_dtype = (uint8_t)request->k_dtype,
		.v_dtype = (uint8_t)request->v_dtype,
		.q_dtype = (uint8_t)request->q_dtype,
		.out_dtype = (uint8_t)request->out_dtype,
		.flags = request->rows_flags,
		.k_off = layout->k_off,
		.v_off = layout->v_off,
		.q_off = layout->q_off,
		.scale = request->scale,
		.window = request->window,
		.fingerprint = fingerprint_of(request),
	};

	if (request->flaw == SIM_FLAW_N_LAYERS)
		rows.n_layers = 0;
	else if (request->flaw == SIM_FLAW_LAYER_RANGE)
		rows.layer_first = request->spec->n_layers;
	else if (request->flaw == SIM_FLAW_TOTAL)
		rows.n_q_total += 1;
	else if (request->flaw == SIM_FLAW_FINGERPRINT)
		rows.fingerprint = ~request->spec->fingerprint;
	else if (request->flaw == SIM_FLAW_ROWS_FLAG)
		rows.flags |= 1u << 20;
	else if (request->flaw == SIM_FLAW_DTYPE && rows.k_dtype)
		rows.k_dtype = 9;
	else if (request->flaw == SIM_FLAW_DTYPE)
		rows.q_dtype = 9;
	if (request->flaw == SIM_FLAW_OFFSET && rows.k_off != KVP_ABSENT)
		rows.k_off = 32;
	else if (request->flaw == SIM_FLAW_OFFSET)
		rows.q_off = 32;
	kvp_rows_req_encode(&rows, out);
}

static void put_tables_op(const struct sim_request *request, const struct layout *layout, uint8_t *out)
{
	if (request->opcode == KVP_OP_UPDATE_SLOTS)
		kvp_slots_req_encode(&(struct kvp_slots_req){ .layer_first = request->layer_first,
					     .n_layers = request->n_layers,
					     .n_tokens = request->items[0].n_tokens,
					     .k_dtype = (uint8_t)request->k_dtype,
					     .v_dtype = (uint8_t)request->v_dtype,
					     .k_off = layout->k_off,
					     .v_off = layout->v_off,
					     .slots_off = layout->slots_off,
					     .fingerprint = fingerprint_of(request) },
			out);
	else
		kvp_table_req_encode(&(struct kvp_table_req){ .layer = request->layer_first,
					     .n_sequences = request->n_listed,
					     .table_stride = SIM_STRIDE,
					     .n_q_total = request->items[0].q_len,
					     .q_dtype = (uint8_t)request->q_dtype,
					     .out_dtype = (uint8_t)request->out_dtype,
					     .flags = request->rows_flags,
					     .table_off = layout->table_off,
					     .seen_off = layout->seen_off,
					     .q_off = layout->q_off,
					     .scale = request->scale,
					     .window = request->window },
			out);
}

static void put_op(const struct sim_request *request, const struct layout *layout, uint8_t *out)
{
	switch (request->opcode) {
	case KVP_OP_HELLO:
		kvp_hello_req_encode(&request->hello, out);
		break;
	case KVP_OP_PING:
		if (request->has_echo)
			kvp_ping_req_encode(
				&(struct kvp_ping_req){ .reply_payload_bytes = request->echo_bytes }, out);
		break;
	case KVP_OP_OPEN:
	case KVP_OP_ATTACH:
		kvp_open_req_encode(&request->open, out);
		break;
	case KVP_OP_POOL_INFO:
		kvp_pool_info_req_encode(&request->pool_info, out);
		break;
	case KVP_OP_TELL:
		kvp_tell_req_encode(&request->tell, out);
		break;
	case KVP_OP_PUBLISH:
	case KVP_OP_MATCH:
		kvp_prefix_req_encode(&request->prefix, out);
		break;
	case KVP_OP_CANCEL:
		kvp_cancel_req_encode(&(struct kvp_cancel_req){ .request_id = request->cancel_id }, out);
		break;
	case KVP_OP_READ:
		kvp_read_req_encode(&(struct kvp_read_req){ .sequence = request->items[0].sequence,
					    .layer_first = request->layer_first,
					    .n_layers = request->n_layers,
					    .position = request->items[0].position,
					    .n_tokens = request->items[0].n_tokens,
					    .k_dtype = (uint8_t)request->k_dtype,
					    .v_dtype = (uint8_t)request->v_dtype,
					    .flags = request->read_flags },
			out);
		break;
	case KVP_OP_UPDATE_SLOTS:
	case KVP_OP_DECODE_TABLE:
		put_tables_op(request, layout, out);
		break;
	default:
		if (sim_request_is_rows(request))
			put_rows_op(request, layout, out);
		break;
	}
}

static void put_items(const struct sim_request *request, const struct layout *layout, uint8_t *out)
{
	for (uint32_t i = 0; i < layout->n_items; i++, out += KVP_ITEM_BYTES) {
		const struct sim_item *item = &request->items[i];
		const bool is_same = request->flaw == SIM_FLAW_DUPLICATE && i > 0;

		if (request->opcode == KVP_OP_FORK) {
			kvp_fork_item_encode(
				&(struct kvp_fork_item){
					.sequence = is_same ? request->items[0].sequence : item->sequence,
					.position = item->position,
					.parent = item->parent },
				out);
			continue;
		}

		kvp_rows_item_encode(&(struct kvp_rows_item){ .sequence = is_same ? request->items[0].sequence
										  : item->sequence,
					     .position = item->position,
					     .n_tokens = item->n_tokens,
					     .q_len = item->q_len,
					     .flags = item->flags },
			out);
	}
}

/* ---- payload ---- */

/* One row as it is sent; a bad one has a number that is not finite, packed ones at their end. */
static uint8_t *put_row(const struct sim_request *request, uint32_t row_id, uint32_t layer, bool is_v,
	uint32_t head, bool is_bad, uint8_t *out)
{
	const struct kv_pool_spec *spec = request->spec;
	const enum kv_dtype dtype = is_v ? request->v_dtype : request->k_dtype;
	const uint32_t dim = is_v ? spec->v_head_dim : spec->k_head_dim;
	const uint64_t n_bytes = sim_token_bytes(spec, layer, is_v, dtype) / spec->kv_heads;
	float row[KV_HEAD_DIM_MAX];

	if (dtype == KV_DTYPE_PACKED) {
		sim_row_packed(spec, row_id, layer, is_v, head, out);
		if (is_bad)
			memset(out + n_bytes - 4, 0xFF, 4); /* a norm, or numbers: NaN */
		return out + n_bytes;
	}
	sim_row_values(row_id, layer, is_v, head, dim, row);
	if (is_bad)
		row[dim - 1] = NAN;
	kv_rows_store(dtype, row, dim, out);
	return out + n_bytes;
}

static void put_side(const struct sim_request *request, bool is_v, uint8_t *out)
{
	const uint32_t kv_heads = request->spec->kv_heads;

	for (uint32_t l = 0; l < request->n_layers; l++) {
		for (uint32_t i = 0; i < request->n_items; i++) {
			const struct sim_item *item = &request->items[i];

			for (uint32_t n = 0; n < item->n_tokens * kv_heads; n++) {
				const uint32_t t = n / kv_heads, layer = request->layer_first + l;
				const uint32_t row_id =
					sim_row_id(item->row_counter + t, request->k_dtype, request->v_dtype);

				const bool is_bad = item->bad_row == t && item->bad_layer == layer &&
					item->is_bad_v == is_v;

				out = put_row(request, row_id, layer, is_v, n % kv_heads, is_bad, out);
			}
		}
	}
}

static void put_queries(const struct sim_request *request, uint8_t *out)
{
	const struct kv_pool_spec *spec = request->spec;
	const size_t n = (size_t)spec->q_heads * spec->k_head_dim;
	float *values = malloc(n * sizeof(*values));

	SIM_CHECK(values, "no memory for queries");
	for (uint32_t i = 0; i < request->n_items; i++) {
		for (uint32_t row = 0; row < request->items[i].q_len; row++) {
			sim_query_values(spec, sim_query_id(request, i, row), request->q_dtype, values);
			kv_rows_store(request->q_dtype, values, n, out);
			out += n * kv_dtype_bytes(request->q_dtype);
		}
	}
	free(values);
}

static void put_payload(const struct sim_request *request, const struct layout *layout, uint8_t *out)
{
	switch (request->opcode) {
	case KVP_OP_HELLO:
		memset(out, 's', request->hello.name_bytes);
		break;
	case KVP_OP_PING:
		for (uint64_t i = 0; i < request->echo_payload_bytes; i++)
			out[i] = (uint8_t)(request->id + i * 7);
		break;
	case KVP_OP_PUBLISH:
	case KVP_OP_MATCH:
		memcpy(out, request->tokens, 4 * (size_t)request->prefix.n_tokens);
		memcpy(out + 4 * (size_t)request->prefix.n_tokens, request->prefix_texts,
			request->prefix.adapter_bytes + request->prefix.salt_bytes);
		break;
	case KVP_OP_OPEN:
	case KVP_OP_ATTACH:
	case KVP_OP_POOL_INFO:
		memcpy(out, request->pool_name, strlen(request->pool_name));
		memcpy(out + strlen(request->pool_name), request->session_name,
			strlen(request->session_name));
		break;
	case KVP_OP_UPDATE_SLOTS:
		put_side(request, false, out + layout->k_off);
		put_side(request, true, out + layout->v_off);
		for (uint32_t t = 0; t < request->items[0].n_tokens; t++)
			kvp_put_u64(out + layout->slots_off + 8 * (size_t)t, (uint64_t)request->slots[t]);
		break;
	case KVP_OP_DECODE_TABLE:
		put_queries(request, out + layout->q_off);
		for (uint32_t i = 0; i < request->n_listed * SIM_STRIDE; i++)
			kvp_put_u32(out + layout->table_off + 4 * (size_t)i, request->table[i]);
		for (uint32_t s = 0; s < request->n_listed; s++)
			kvp_put_u32(out + layout->seen_off + 4 * (size_t)s, request->seen[s]);
		break;
	default:
		if (layout->k_off != KVP_ABSENT && sim_request_is_rows(request)) {
			put_side(request, false, out + layout->k_off);
			put_side(request, true, out + layout->v_off);
		}
		if (layout->q_off != KVP_ABSENT && sim_request_is_rows(request))
			put_queries(request, out + layout->q_off);
		break;
	}
}

/* ---- the frame ---- */

static void spoil_header(
	const struct sim_request *request, struct kvp_header *header, uint64_t frame_bytes_max)
{
	switch (request->flaw) {
	case SIM_FLAW_TOO_LARGE:
		header->body_bytes = frame_bytes_max + 64;
		break;
	case SIM_FLAW_ITEM_BYTES:
		header->n_items = 1;
		header->item_bytes = 16;
		break;
	case SIM_FLAW_RESPONSE:
		header->flags |= KVP_FLAG_RESPONSE;
		break;
	case SIM_FLAW_BODY_CRC:
		header->flags |= KVP_FLAG_BODY_CRC;
		header->body_crc ^= 1;
		break;
	case SIM_FLAW_OPCODE:
		header->opcode = 99;
		break;
	case SIM_FLAW_FLAG:
		header->flags |= 1u << 9;
		break;
	case SIM_FLAW_HANDLE_0:
		header->session = 0;
		break;
	case SIM_FLAW_HANDLE_TAG:
		header->session ^= 1ull << 20;
		break;
	case SIM_FLAW_HANDLE_GENERATION:
		header->session ^= 1ull << 63;
		break;
	default:
		break;
	}
}

void sim_request_encode(const struct sim_request *request, uint64_t frame_bytes_max, struct sim_bytes *out)
{
	const struct layout layout = layout_of(request);
	struct kvp_header header = {
		.opcode = request->opcode,
		.flags = request->flags,
		.request_id = request->id,
		.session = request->session,
		.body_bytes =
			kvp_body_bytes(layout.op_bytes, layout.n_items, KVP_ITEM_BYTES, layout.payload_bytes),
		.op_bytes = layout.op_bytes,
		.n_items = (uint16_t)layout.n_items,
		.item_bytes = layout.n_items ? KVP_ITEM_BYTES : 0,
		.deadline_us = request->deadline_us,
	};
	uint8_t *at = sim_bytes_add(out, KVP_HEADER_BYTES + header.body_bytes);
	uint8_t *body = at + KVP_HEADER_BYTES;

	put_op(request, &layout, body);
	put_items(request, &layout, body + layout.op_bytes);
	if (layout.payload_bytes > 0)
		put_payload(request, &layout, body + layout.payload_start);
	if (header.flags & KVP_FLAG_BODY_CRC || request->flaw == SIM_FLAW_BODY_CRC)
		header.body_crc = kvp_crc32c(0, body, (size_t)header.body_bytes);
	spoil_header(request, &header, frame_bytes_max);
	kvp_header_encode(&header, at);
	if (request->flaw == SIM_FLAW_MAGIC)
		at[KVP_AT_MAGIC] ^= 0x20;
	else if (request->flaw == SIM_FLAW_VERSION)
		at[KVP_AT_VERSION] = 7;
	else if (request->flaw == SIM_FLAW_HEADER_CRC)
		at[KVP_AT_HEADER_CRC] ^= 1;
}
