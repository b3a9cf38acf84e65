/*
 * Fuzz target: whole request frames through the checks that a server makes before it takes a request slot,
 * with a pool and limits drawn from the input. What passes is measured again here, in floating point, which
 * is exact for everything that fits into a frame.
 *
 * Input: mode, limits, 8 bytes of geometry, a frame. Mode, bit 0: the header stays as it is; bit 1: the bytes
 * are no frame but an op struct or item, which every codec of messages reads.
 */
#include <math.h>

#include "proto/check.h"
#include "tests/fuzz/fuzz.h"

#define LAYERS_MAX 8u

static const struct kvp_caps all_caps[] = {
	{ 0, KVP_FRAME_BYTES_MIN, 256, 1 },
	{ UINT32_MAX, KVP_FRAME_BYTES_DEFAULT, 256, 8 },
	{ UINT32_MAX, KVP_FRAME_BYTES_MAX, 256, UINT32_MAX },
	{ KVP_FEATURE_ROTATED | KVP_FEATURE_NO_SINKS, KVP_FRAME_BYTES_MIN, 2, 1 },
};

struct target {
	struct kvp_caps caps;
	struct kvp_geometry geometry;
	uint32_t k_row_bytes[LAYERS_MAX], v_row_bytes[LAYERS_MAX];
	struct kvp_header header;
	const uint8_t *body; /* what the server would have of it at this point */
	uint64_t body_bytes;
	struct kvp_request *request;
	struct kvp_fault fault;
};

static void draw_geometry(struct target *target, struct fuzz_input *input)
{
	struct kvp_geometry *geometry = &target->geometry;
	const uint8_t flags = fuzz_u8(input);

	geometry->n_layers = 1 + fuzz_u8(input) % LAYERS_MAX;
	geometry->q_heads = 1 + fuzz_u8(input);
	geometry->kv_heads = 1 + fuzz_u8(input);
	geometry->k_head_dim = 16u * (1 + fuzz_u8(input) % 16);
	geometry->v_head_dim = 16u * (1 + fuzz_u8(input) % 16);
	geometry->window = flags & 2 ? fuzz_u8(input) : 0;
	geometry->fingerprint = 0xA1B2C3D4E5F60718u; /* that of the golden frames */
	const uint32_t row_bytes = fuzz_u8(input);

	for (uint32_t l = 0; l < LAYERS_MAX; l++) {
		target->k_row_bytes[l] = 1 + row_bytes + l;
		target->v_row_bytes[l] = flags & 4 ? 1u << 31 : 1 + row_bytes; /* products leave 64 bits */
	}
	geometry->k_row_bytes = flags & 1 ? target->k_row_bytes : NULL;
	geometry->v_row_bytes = flags & 1 ? target->v_row_bytes : NULL;
}

/* ---- op structs and items ---- */

/* Decoding reads what is there and zeros behind it; encoding and decoding again changes nothing. */
static void check_codecs(const uint8_t *bytes, size_t n_bytes)
{
#define CHECK_CODEC(m, fields, wire_bytes)                              \
	{                                                               \
		struct kvp_##m first, again;                            \
		uint8_t wire[wire_bytes];                               \
                                                                        \
		memset(&first, 0, sizeof(first));                       \
		memset(&again, 0, sizeof(again));                       \
		kvp_##m##_decode(bytes, n_bytes, &first);               \
		kvp_##m##_encode(&first, wire);                         \
		kvp_##m##_decode(wire, sizeof(wire), &again);           \
		FUZZ_CHECK(memcmp(&first, &again, sizeof(first)) == 0); \
	}
	KVP_MESSAGE_MAP(CHECK_CODEC)
#undef CHECK_CODEC
}

/* ---- what passed ---- */

static void check_refusal(const struct target *target, enum kv_status status)
{
	const struct kvp_header *header = &target->header;
	const struct kvp_fault *fault = &target->fault;

	fuzz_check_fault(fault, status, header->body_bytes);
	if (fault->item == KVP_NO_ITEM)
		return;
	const uint64_t first =
		KVP_HEADER_BYTES + kvp_structs_bytes(header->op_bytes, fault->item, header->item_bytes);

	FUZZ_CHECK(fault->item < header->n_items);
	FUZZ_CHECK(fault->offset >= first && fault->offset < first + header->item_bytes);
}

static void check_text(const struct target *target, const struct kvp_text *text, bool is_name)
{
	const uint8_t *at = (const uint8_t *)text->data;

	if (text->n_bytes == 0)
		return;
	FUZZ_CHECK(at >= target->body && at + text->n_bytes <= target->body + target->body_bytes);
	FUZZ_CHECK(!is_name || kvp_name_is_valid(text->data, text->n_bytes));
	for (uint32_t i = 0; i < text->n_bytes; i++)
		FUZZ_CHECK(at[i] >= 0x20 && at[i] != 0x7F);
}

static void check_sequences(const struct target *target)
{
	const struct kvp_request *request = target->request;
	const bool is_fork = request->opcode == KVP_OP_FORK;

	FUZZ_CHECK(request->n_items == target->header.n_items && request->n_items >= 1);
	for (uint32_t i = 0; i < request->n_items; i++) {
		const uint64_t id =
			is_fork ? request->fork_items[i].sequence : request->rows_items[i].sequence;

		FUZZ_CHECK(id != 0);
		for (uint32_t k = 0; k < i; k++)
			FUZZ_CHECK(id !=
				(is_fork ? request->fork_items[k].sequence
					 : request->rows_items[k].sequence));
	}
}

/* A place of exactly wanted bytes, or none where nothing is wanted. */
static void check_segment(const struct kvp_segment *segment, double wanted, uint64_t payload_bytes)
{
	FUZZ_CHECK((double)segment->n_bytes == wanted);
	FUZZ_CHECK((segment->off == KVP_ABSENT) == (segment->n_bytes == 0));
	if (segment->n_bytes == 0)
		return;
	FUZZ_CHECK(segment->off % KVP_ALIGN_BYTES == 0);
	FUZZ_CHECK(segment->n_bytes <= payload_bytes && segment->off <= payload_bytes - segment->n_bytes);
}

static bool is_apart(const struct kvp_segment *a, const struct kvp_segment *b)
{
	return a->n_bytes == 0 || b->n_bytes == 0 || a->off >= b->off + b->n_bytes ||
		b->off >= a->off + a->n_bytes;
}

/* Bytes of K (or V) rows of n_tokens on a range of layers. */
static double rows_bytes(const struct kvp_geometry *geometry, bool is_k, unsigned dtype, uint32_t layer_first,
	uint32_t n_layers, uint32_t n_tokens)
{
	const uint32_t *packed = is_k ? geometry->k_row_bytes : geometry->v_row_bytes;
	double sum = 0;

	for (uint32_t l = layer_first; l < layer_first + n_layers; l++) {
		if (dtype == KVP_DTYPE_PACKED)
			sum += packed[l];
		else
			sum += (double)kvp_dtype_bytes(dtype) *
				(is_k ? geometry->k_head_dim : geometry->v_head_dim);
	}
	return sum * geometry->kv_heads * n_tokens;
}

static void check_rows_reply(struct target *target, const struct kvp_rows_req *rows)
{
	const struct kvp_geometry *geometry = &target->geometry;
	const double n_outputs = (double)rows->n_q_total * geometry->q_heads;
	struct kvp_rows_reply_layout layout;
	const enum kv_status status = kvp_rows_reply_layout(
		&target->header, rows, geometry, target->caps.frame_bytes_max, &layout, &target->fault);

	if (status != KV_OK) {
		FUZZ_CHECK(status == KV_TOO_LARGE && target->fault.scope == KV_SCOPE_REQUEST);
		check_refusal(target, status);
		return;
	}
	const uint64_t payload_bytes =
		layout.body_bytes > layout.payload_start ? layout.body_bytes - layout.payload_start : 0;

	FUZZ_CHECK(layout.body_bytes <= target->caps.frame_bytes_max);
	FUZZ_CHECK(layout.body_bytes >=
		kvp_structs_bytes(KVP_BYTES(rows_reply), target->header.n_items, KVP_ITEM_BYTES));
	check_segment(&layout.out, n_outputs * geometry->v_head_dim * kvp_dtype_bytes(rows->out_dtype),
		payload_bytes);
	check_segment(&layout.lse, rows->flags & KVP_ROWS_LSE ? n_outputs * 4 : 0, payload_bytes);
	FUZZ_CHECK(is_apart(&layout.out, &layout.lse));
}

static void check_rows(struct target *target)
{
	const struct kvp_rows_req *rows = &target->request->rows;
	const struct kvp_geometry *geometry = &target->geometry;
	const uint64_t payload_bytes = kvp_payload_bytes(&target->header);
	struct kvp_segments segments;
	uint64_t n_tokens = 0, n_q = 0;

	check_sequences(target);
	for (uint32_t i = 0; i < target->request->n_items; i++) {
		n_tokens += target->request->rows_items[i].n_tokens;
		n_q += target->request->rows_items[i].q_len;
		FUZZ_CHECK(target->request->rows_items[i].q_len <= target->caps.q_len_max);
	}
	FUZZ_CHECK(rows->n_tokens_total == n_tokens && rows->n_q_total == n_q);
	FUZZ_CHECK(isfinite(rows->scale) && rows->scale >= 0);
	const enum kv_status status =
		kvp_rows_check_payload(&target->header, rows, geometry, &segments, &target->fault);

	if (status != KV_OK) {
		check_refusal(target, status);
		return;
	}
	FUZZ_CHECK((uint64_t)rows->layer_first + rows->n_layers <= geometry->n_layers);
	check_segment(&segments.k,
		rows_bytes(geometry, true, rows->k_dtype, rows->layer_first, rows->n_layers,
			rows->n_tokens_total),
		payload_bytes);
	check_segment(&segments.v,
		rows_bytes(geometry, false, rows->v_dtype, rows->layer_first, rows->n_layers,
			rows->n_tokens_total),
		payload_bytes);
	check_segment(&segments.q,
		(double)rows->n_q_total * geometry->q_heads * geometry->k_head_dim *
			kvp_dtype_bytes(rows->q_dtype),
		payload_bytes);
	FUZZ_CHECK(is_apart(&segments.k, &segments.v) && is_apart(&segments.k, &segments.q) &&
		is_apart(&segments.v, &segments.q));
	check_rows_reply(target, rows);
}

static void check_slots(struct target *target)
{
	const struct kvp_slots_req *slots = &target->request->slots;
	const struct kvp_geometry *geometry = &target->geometry;
	const uint64_t payload_bytes = kvp_payload_bytes(&target->header);
	struct kvp_slots_segments segments;
	const enum kv_status status =
		kvp_slots_check_payload(&target->header, slots, geometry, &segments, &target->fault);

	if (status != KV_OK) {
		check_refusal(target, status);
		return;
	}
	FUZZ_CHECK((uint64_t)slots->layer_first + slots->n_layers <= geometry->n_layers);
	check_segment(&segments.k,
		rows_bytes(
			geometry, true, slots->k_dtype, slots->layer_first, slots->n_layers, slots->n_tokens),
		payload_bytes);
	check_segment(&segments.v,
		rows_bytes(geometry, false, slots->v_dtype, slots->layer_first, slots->n_layers,
			slots->n_tokens),
		payload_bytes);
	check_segment(&segments.slots, 8.0 * slots->n_tokens, payload_bytes);
	FUZZ_CHECK(is_apart(&segments.k, &segments.v) && is_apart(&segments.k, &segments.slots) &&
		is_apart(&segments.v, &segments.slots));
}

static void check_table(struct target *target)
{
	const struct kvp_table_req *table = &target->request->table;
	const struct kvp_geometry *geometry = &target->geometry;
	const uint64_t payload_bytes = kvp_payload_bytes(&target->header);
	struct kvp_table_segments segments;

	FUZZ_CHECK(table->n_sequences > 0 && table->n_sequences <= target->caps.items_max);
	FUZZ_CHECK(table->n_q_total % table->n_sequences == 0 &&
		table->n_q_total / table->n_sequences <= target->caps.q_len_max);
	FUZZ_CHECK(isfinite(table->scale) && table->scale >= 0);
	const enum kv_status status =
		kvp_table_check_payload(&target->header, table, geometry, &segments, &target->fault);

	if (status != KV_OK) {
		check_refusal(target, status);
		return;
	}
	FUZZ_CHECK(table->layer < geometry->n_layers);
	check_segment(&segments.q,
		(double)table->n_q_total * geometry->q_heads * geometry->k_head_dim *
			kvp_dtype_bytes(table->q_dtype),
		payload_bytes);
	check_segment(&segments.table, 4.0 * table->n_sequences * table->table_stride, payload_bytes);
	check_segment(&segments.seen, 4.0 * table->n_sequences, payload_bytes);
	FUZZ_CHECK(is_apart(&segments.q, &segments.table) && is_apart(&segments.q, &segments.seen) &&
		is_apart(&segments.table, &segments.seen));
}

/* The bound is exact: what fits is accepted, one token more is not. */
static void check_read_bound(struct target *target, uint32_t n_fit)
{
	struct kvp_read_req read = target->request->read;
	struct kvp_read_reply_layout layout;
	const uint64_t frame_bytes_max = target->caps.frame_bytes_max;

	if (n_fit > 0) {
		read.n_tokens = n_fit;
		FUZZ_CHECK(kvp_read_check(&target->header, &read, &target->geometry, frame_bytes_max, &layout,
				   NULL) == KV_OK);
	}
	read.n_tokens = n_fit + 1;
	FUZZ_CHECK(kvp_read_check(&target->header, &read, &target->geometry, frame_bytes_max, &layout,
			   NULL) == KV_TOO_LARGE);
}

static void check_read(struct target *target)
{
	const struct kvp_read_req *read = &target->request->read;
	const struct kvp_geometry *geometry = &target->geometry;
	struct kvp_read_reply_layout layout;
	const enum kv_status status = kvp_read_check(
		&target->header, read, geometry, target->caps.frame_bytes_max, &layout, &target->fault);

	if (status != KV_OK) {
		check_refusal(target, status);
		if (status == KV_TOO_LARGE) {
			FUZZ_CHECK(target->fault.scope == KV_SCOPE_REQUEST);
			FUZZ_CHECK(target->fault.expected < read->n_tokens);
			check_read_bound(target, (uint32_t)target->fault.expected);
		}
		return;
	}
	const uint64_t payload_bytes = layout.body_bytes - layout.payload_start;

	FUZZ_CHECK(layout.body_bytes <= target->caps.frame_bytes_max);
	check_segment(&layout.k,
		rows_bytes(geometry, true, read->k_dtype, read->layer_first, read->n_layers, read->n_tokens),
		payload_bytes);
	check_segment(&layout.v,
		rows_bytes(geometry, false, read->v_dtype, read->layer_first, read->n_layers, read->n_tokens),
		payload_bytes);
	FUZZ_CHECK(is_apart(&layout.k, &layout.v));
}

static void check_tell(const struct target *target)
{
	const struct kvp_tell_req *tell = &target->request->tell;
	struct kvp_tell_reply_layout layout;

	for (uint32_t n = 0; n <= KVP_ITEMS_MAX; n = 3 * n + 1) {
		kvp_tell_reply_layout(tell, n, target->geometry.n_layers, &target->caps, &layout);
		FUZZ_CHECK(layout.n_sequences_max <= tell->n_sequences_max);
		FUZZ_CHECK(layout.body_bytes <= target->caps.frame_bytes_max);
		FUZZ_CHECK(layout.lengths.n_bytes == 0 ||
			layout.payload_start + layout.lengths.off + layout.lengths.n_bytes <=
				layout.body_bytes);
	}
}

static void check_accepted(struct target *target)
{
	switch (target->header.opcode) {
	case KVP_OP_HELLO:
		check_text(target, &target->request->client_name, false);
		FUZZ_CHECK(target->request->token.n_bytes <= KVP_TOKEN_BYTES_MAX);
		FUZZ_CHECK(target->request->client_name.n_bytes <= KVP_CLIENT_NAME_BYTES_MAX);
		FUZZ_CHECK(target->request->proto == KVP_PROTO_MAX);
		break;
	case KVP_OP_POOL_INFO:
		check_text(target, &target->request->pool_name, true);
		break;
	case KVP_OP_OPEN:
	case KVP_OP_ATTACH:
		check_text(target, &target->request->pool_name, true);
		check_text(target, &target->request->session_name, true);
		break;
	case KVP_OP_TELL:
		check_tell(target);
		break;
	case KVP_OP_APPEND:
	case KVP_OP_DECODE:
	case KVP_OP_APPEND_DECODE:
		check_rows(target);
		break;
	case KVP_OP_READ:
		check_read(target);
		break;
	case KVP_OP_UPDATE_SLOTS:
		check_slots(target);
		break;
	case KVP_OP_DECODE_TABLE:
		check_table(target);
		break;
	case KVP_OP_TRUNCATE:
	case KVP_OP_FREE:
	case KVP_OP_FORK:
	case KVP_OP_SPILL:
	case KVP_OP_PREFETCH:
		check_sequences(target);
		break;
	default:
		break;
	}
}

static void check_frame(struct target *target, uint8_t *frame, size_t n_bytes, bool is_mended)
{
	if (is_mended) {
		kvp_put_u64(frame + KVP_AT_BODY_BYTES, n_bytes - KVP_HEADER_BYTES);
		fuzz_mend_header(frame);
	}
	if (kvp_header_decode(frame, &target->header, &target->fault) != KV_OK ||
		kvp_header_check_size(&target->header, target->caps.frame_bytes_max, &target->fault) != KV_OK)
		return; /* fuzz_frame's */
	const struct kvp_opcode_row *row = kvp_opcode_row(target->header.opcode);

	target->body_bytes = row && row->payload_rule == KVP_PAYLOAD_CONTROL
		? target->header.body_bytes
		: kvp_structs_bytes(
			  target->header.op_bytes, target->header.n_items, target->header.item_bytes);
	if (target->body_bytes > n_bytes - KVP_HEADER_BYTES)
		return; /* not all of it is there yet */
	uint8_t *body = fuzz_copy(frame + KVP_HEADER_BYTES, (size_t)target->body_bytes);

	target->body = body;
	target->request = fuzz_alloc(sizeof(*target->request));
	memset(target->request, 0xA5, sizeof(*target->request));
	const enum kv_status status =
		kvp_check_request(&target->header, body, &target->caps, target->request, &target->fault);

	if (status != KV_OK)
		check_refusal(target, status);
	else
		check_accepted(target);
	free(target->request);
	free(body);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
	struct fuzz_input input = { data, n_bytes };
	struct target target = { .body = NULL };
	const uint8_t mode = fuzz_u8(&input);

	target.caps = all_caps[fuzz_u8(&input) % (sizeof(all_caps) / sizeof(all_caps[0]))];
	draw_geometry(&target, &input);
	if (!(mode & 2) && input.n_bytes < KVP_HEADER_BYTES)
		return 0;
	uint8_t *bytes = fuzz_copy(input.data, input.n_bytes);

	if (mode & 2)
		check_codecs(bytes, input.n_bytes);
	else
		check_frame(&target, bytes, input.n_bytes, !(mode & 1));
	free(bytes);
	return 0;
}
