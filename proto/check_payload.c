/*
 * Payloads: the sizes and places of rows in APPEND, DECODE, APPEND_DECODE and READ and in their replies.
 * Needs the pool's geometry, so this is the step after the handle was looked up.
 */
#include "proto/check_internal.h"

bool kvp_layers_fit(const struct kvp_geometry *geometry, uint32_t layer_first, uint32_t n_layers)
{
	return (uint64_t)layer_first + n_layers <= geometry->n_layers;
}

bool kvp_side_bytes(const struct kvp_geometry *geometry, bool is_k, uint32_t layer_first, uint32_t n_layers,
	unsigned dtype, uint32_t n_tokens, uint64_t *n_bytes)
{
	const uint32_t *row_bytes = is_k ? geometry->k_row_bytes : geometry->v_row_bytes;
	uint64_t rows_bytes = 0; /* one row of each layer */

	if (dtype == KVP_DTYPE_PACKED) {
		for (uint32_t layer = layer_first; layer < layer_first + n_layers; layer++)
			if (!kvp_add(&rows_bytes, row_bytes[layer]))
				return false;
	} else {
		rows_bytes = kvp_dtype_bytes(dtype);
		if (!kvp_mul(&rows_bytes, is_k ? geometry->k_head_dim : geometry->v_head_dim) ||
			!kvp_mul(&rows_bytes, n_layers))
			return false;
	}
	if (!kvp_mul(&rows_bytes, geometry->kv_heads) || !kvp_mul(&rows_bytes, n_tokens))
		return false;
	*n_bytes = rows_bytes;
	return true;
}

enum kv_status kvp_check_prefix(const struct kvp_header *header, const uint8_t *body,
	struct kvp_request *request, struct kvp_fault *fault)
{
	struct kvp_prefix_req *prefix = &request->prefix;
	const bool is_publish = header->opcode == KVP_OP_PUBLISH;

	kvp_prefix_req_decode(body, header->op_bytes, prefix);
	if (prefix->flags & ~(uint32_t)(is_publish ? 0 : KVP_PREFIX_FLAGS_KNOWN))
		return kvp_refuse_op(header, fault, KV_UNSUPPORTED, KVP_AT(prefix_req, flags),
			is_publish ? 0 : KVP_PREFIX_FLAGS_KNOWN, prefix->flags,
			"a flag of the op struct is unknown");

	const bool is_probe = (prefix->flags & KVP_PREFIX_PROBE) != 0;

	if ((prefix->sequence == 0) != is_probe)
		return kvp_refuse_op(header, fault, KV_BAD_ARG, KVP_AT(prefix_req, sequence), !is_probe,
			prefix->sequence, "sequence is 0, or PROBE names one");
	if (prefix->n_tokens == 0 || prefix->n_tokens >= KVP_POSITION_PLANNED)
		return kvp_refuse_op(header, fault, KV_BAD_ARG, KVP_AT(prefix_req, n_tokens), 1,
			prefix->n_tokens, "n_tokens is 0 or does not fit into 32 bits");
	if (prefix->adapter_bytes > KVP_PREFIX_TEXT_BYTES_MAX)
		return kvp_refuse_op(header, fault, KV_BAD_ARG, KVP_AT(prefix_req, adapter_bytes),
			KVP_PREFIX_TEXT_BYTES_MAX, prefix->adapter_bytes, "adapter_bytes above its limit");
	if (prefix->salt_bytes > KVP_PREFIX_TEXT_BYTES_MAX)
		return kvp_refuse_op(header, fault, KV_BAD_ARG, KVP_AT(prefix_req, salt_bytes),
			KVP_PREFIX_TEXT_BYTES_MAX, prefix->salt_bytes, "salt_bytes above its limit");

	const uint64_t n_bytes = 4 * (uint64_t)prefix->n_tokens + prefix->adapter_bytes + prefix->salt_bytes;

	if (kvp_payload_bytes(header) < n_bytes)
		return kvp_fault_set(fault, KV_BAD_ARG, KVP_AT_BODY_BYTES, n_bytes, kvp_payload_bytes(header),
			"payload is shorter than tokens, adapter and salt");
	return KV_OK;
}

enum kv_status kvp_check_read(const struct kvp_header *header, const uint8_t *body,
	const struct kvp_caps *caps, struct kvp_request *request, struct kvp_fault *fault)
{
	struct kvp_read_req *read = &request->read;

	kvp_read_req_decode(body, header->op_bytes, read);
	if (read->sequence == 0)
		return kvp_refuse_op(header, fault, KV_BAD_ARG, KVP_AT(read_req, sequence), 1, 0,
			"sequence 0 names nothing");
	if (read->n_layers == 0)
		return kvp_refuse_op(
			header, fault, KV_BAD_ARG, KVP_AT(read_req, n_layers), 1, 0, "n_layers is 0");
	if (read->n_tokens == 0)
		return kvp_refuse_op(
			header, fault, KV_BAD_ARG, KVP_AT(read_req, n_tokens), 1, 0, "n_tokens is 0");
	if ((uint64_t)read->position + read->n_tokens >= KVP_POSITION_PLANNED)
		return kvp_refuse_op(header, fault, KV_BAD_ARG, KVP_AT(read_req, position),
			KVP_POSITION_PLANNED - 1, (uint64_t)read->position + read->n_tokens,
			"position + n_tokens leaves 32 bits");
	if (!kvp_dtype_is_known(read->k_dtype))
		return kvp_refuse_op(header, fault, KV_UNSUPPORTED, KVP_AT(read_req, k_dtype),
			KVP_DTYPE_PACKED, read->k_dtype, "dtype is unknown");
	if (!kvp_dtype_is_known(read->v_dtype))
		return kvp_refuse_op(header, fault, KV_UNSUPPORTED, KVP_AT(read_req, v_dtype),
			KVP_DTYPE_PACKED, read->v_dtype, "dtype is unknown");
	if (read->k_dtype == KVP_DTYPE_NONE && read->v_dtype == KVP_DTYPE_NONE)
		return kvp_refuse_op(header, fault, KV_BAD_ARG, KVP_AT(read_req, k_dtype), KVP_DTYPE_F32, 0,
			"neither K nor V is wanted");
	if (read->flags & ~KVP_READ_FLAGS_KNOWN)
		return kvp_refuse_op(header, fault, KV_UNSUPPORTED, KVP_AT(read_req, flags),
			KVP_READ_FLAGS_KNOWN, read->flags, "a flag of the op struct is unknown");
	if ((read->flags & KVP_READ_EXACT) && !(caps->features & KVP_FEATURE_EXACT_READ))
		return kvp_refuse_op(header, fault, KV_UNSUPPORTED, KVP_AT(read_req, flags), 0, read->flags,
			"EXACT is not served");
	return KV_OK;
}

/* Lays the reply to a READ of n_tokens out; false when 64 bits do not hold a size. */
static bool read_layout(const struct kvp_read_req *read, const struct kvp_geometry *geometry,
	uint32_t n_tokens, struct kvp_read_reply_layout *out)
{
	struct kvp_read_reply_layout layout = { .k.off = KVP_ABSENT, .v.off = KVP_ABSENT };
	uint64_t payload_bytes = 0;

	if (read->k_dtype != KVP_DTYPE_NONE) {
		layout.k.off = 0;
		if (!kvp_side_bytes(geometry, true, read->layer_first, read->n_layers, read->k_dtype,
			    n_tokens, &layout.k.n_bytes))
			return false;
		payload_bytes = layout.k.n_bytes;
	}
	if (read->v_dtype != KVP_DTYPE_NONE) {
		if (!kvp_align(&payload_bytes) ||
			!kvp_side_bytes(geometry, false, read->layer_first, read->n_layers, read->v_dtype,
				n_tokens, &layout.v.n_bytes))
			return false;
		layout.v.off = payload_bytes;
		if (!kvp_add(&payload_bytes, layout.v.n_bytes))
			return false;
	}
	layout.payload_start = kvp_payload_start(KVP_BYTES(read_reply), 0, KVP_ITEM_BYTES);
	if (!kvp_add(&payload_bytes, layout.payload_start))
		return false;
	layout.body_bytes = payload_bytes;
	*out = layout;
	return true;
}

uint32_t kvp_read_tokens_fit(
	const struct kvp_read_req *read, const struct kvp_geometry *geometry, uint64_t frame_bytes_max)
{
	struct kvp_read_reply_layout layout;
	uint64_t lowest = 0;                     /* fits: an empty reply always does */
	uint64_t highest = KVP_POSITION_PLANNED; /* may not fit */

	/* The size grows with n_tokens, so 32 halvings find the bound without a formula for the padding. */
	while (lowest + 1 < highest) {
		const uint64_t middle = lowest + (highest - lowest) / 2;

		if (read_layout(read, geometry, (uint32_t)middle, &layout) &&
			layout.body_bytes <= frame_bytes_max)
			lowest = middle;
		else
			highest = middle;
	}
	return (uint32_t)lowest;
}

enum kv_status kvp_read_check(const struct kvp_header *header, const struct kvp_read_req *read,
	const struct kvp_geometry *geometry, uint64_t frame_bytes_max, struct kvp_read_reply_layout *layout,
	struct kvp_fault *fault)
{
	struct kvp_read_reply_layout wanted;

	if (!kvp_layers_fit(geometry, read->layer_first, read->n_layers))
		return kvp_refuse_op(header, fault, KV_BAD_ARG, KVP_AT(read_req, layer_first),
			geometry->n_layers, (uint64_t)read->layer_first + read->n_layers,
			"layer_first + n_layers leaves the pool");
	if (read->k_dtype == KVP_DTYPE_PACKED && !geometry->k_row_bytes)
		return kvp_refuse_op(header, fault, KV_UNSUPPORTED, KVP_AT(read_req, k_dtype), KVP_DTYPE_BF16,
			read->k_dtype, "packed rows are not given out");
	if (read->v_dtype == KVP_DTYPE_PACKED && !geometry->v_row_bytes)
		return kvp_refuse_op(header, fault, KV_UNSUPPORTED, KVP_AT(read_req, v_dtype), KVP_DTYPE_BF16,
			read->v_dtype, "packed rows are not given out");
	if (!read_layout(read, geometry, read->n_tokens, &wanted) || wanted.body_bytes > frame_bytes_max) {
		kvp_refuse_op(header, fault, KV_TOO_LARGE, KVP_AT(read_req, n_tokens),
			kvp_read_tokens_fit(read, geometry, frame_bytes_max), read->n_tokens,
			"the reply would exceed frame_bytes_max; `expected` tokens fit");
		if (fault)
			fault->scope = KV_SCOPE_REQUEST;
		return KV_TOO_LARGE;
	}
	*layout = wanted;
	return KV_OK;
}

enum kv_status kvp_place_segment(const struct kvp_header *header, uint64_t off, bool size_is_known,
	uint64_t n_bytes, uint32_t at, struct kvp_segment *segment, struct kvp_fault *fault)
{
	const uint64_t payload_bytes = kvp_payload_bytes(header);

	if (!size_is_known)
		return kvp_refuse_op(header, fault, KV_BAD_ARG, at, payload_bytes, UINT64_MAX,
			"the size of the rows leaves 64 bits");
	if (n_bytes == 0) {
		*segment = (struct kvp_segment){ KVP_ABSENT, 0 };
		return KV_OK;
	}
	if (!kvp_segment_fits(payload_bytes, off, n_bytes))
		return kvp_refuse_op(header, fault, KV_BAD_ARG, at,
			n_bytes <= payload_bytes ? payload_bytes - n_bytes : 0, off,
			"rows leave the payload; `expected` is the largest offset for their size");
	*segment = (struct kvp_segment){ off, n_bytes };
	return KV_OK;
}

bool kvp_segments_overlap(const struct kvp_segment *a, const struct kvp_segment *b)
{
	return a->n_bytes > 0 && b->n_bytes > 0 && a->off < b->off + b->n_bytes &&
		b->off < a->off + a->n_bytes;
}

static bool q_bytes(const struct kvp_geometry *geometry, uint32_t head_dim, uint32_t element_bytes,
	uint32_t n_q, uint64_t *n_bytes)
{
	uint64_t product = n_q;

	if (!kvp_mul(&product, geometry->q_heads) || !kvp_mul(&product, head_dim) ||
		!kvp_mul(&product, element_bytes))
		return false;
	*n_bytes = product;
	return true;
}

static enum kv_status check_pool(const struct kvp_header *header, const struct kvp_rows_req *rows,
	const struct kvp_geometry *geometry, struct kvp_fault *fault)
{
	if (!kvp_layers_fit(geometry, rows->layer_first, rows->n_layers))
		return kvp_refuse_op(header, fault, KV_BAD_ARG, KVP_AT(rows_req, layer_first),
			geometry->n_layers, (uint64_t)rows->layer_first + rows->n_layers,
			"layer_first + n_layers leaves the pool");
	if (rows->k_dtype == KVP_DTYPE_PACKED && !geometry->k_row_bytes)
		return kvp_refuse_op(header, fault, KV_UNSUPPORTED, KVP_AT(rows_req, k_dtype), KVP_DTYPE_BF16,
			rows->k_dtype, "packed rows are not taken");
	if (rows->v_dtype == KVP_DTYPE_PACKED && !geometry->v_row_bytes)
		return kvp_refuse_op(header, fault, KV_UNSUPPORTED, KVP_AT(rows_req, v_dtype), KVP_DTYPE_BF16,
			rows->v_dtype, "packed rows are not taken");
	if (geometry->window != 0 && rows->window > geometry->window)
		return kvp_refuse_op(header, fault, KV_BAD_ARG, KVP_AT(rows_req, window), geometry->window,
			rows->window, "a request may only narrow the pool's window");
	if (rows->fingerprint != 0 && rows->fingerprint != geometry->fingerprint)
		return kvp_refuse_op(header, fault, KV_FORMAT_MISMATCH, KVP_AT(rows_req, fingerprint),
			geometry->fingerprint, rows->fingerprint, "fingerprint is not the pool's");
	return KV_OK;
}

enum kv_status kvp_rows_check_payload(const struct kvp_header *header, const struct kvp_rows_req *rows,
	const struct kvp_geometry *geometry, struct kvp_segments *segments, struct kvp_fault *fault)
{
	struct kvp_segments placed;
	uint64_t k = 0, v = 0, q = 0;
	enum kv_status status = check_pool(header, rows, geometry, fault);

	if (status != KV_OK)
		return status;

	const bool k_is_known = kvp_side_bytes(
		geometry, true, rows->layer_first, rows->n_layers, rows->k_dtype, rows->n_tokens_total, &k);
	const bool v_is_known = kvp_side_bytes(
		geometry, false, rows->layer_first, rows->n_layers, rows->v_dtype, rows->n_tokens_total, &v);
	const bool q_is_known =
		q_bytes(geometry, geometry->k_head_dim, kvp_dtype_bytes(rows->q_dtype), rows->n_q_total, &q);

	status = kvp_place_segment(
		header, rows->k_off, k_is_known, k, KVP_AT(rows_req, k_off), &placed.k, fault);
	if (status == KV_OK)
		status = kvp_place_segment(
			header, rows->v_off, v_is_known, v, KVP_AT(rows_req, v_off), &placed.v, fault);
	if (status == KV_OK)
		status = kvp_place_segment(
			header, rows->q_off, q_is_known, q, KVP_AT(rows_req, q_off), &placed.q, fault);
	if (status != KV_OK)
		return status;
	if (kvp_segments_overlap(&placed.k, &placed.v))
		return kvp_refuse_op(header, fault, KV_BAD_ARG, KVP_AT(rows_req, v_off),
			placed.k.off + placed.k.n_bytes, placed.v.off, "V rows overlap K rows");
	if (kvp_segments_overlap(&placed.k, &placed.q) || kvp_segments_overlap(&placed.v, &placed.q))
		return kvp_refuse_op(header, fault, KV_BAD_ARG, KVP_AT(rows_req, q_off),
			kvp_segments_overlap(&placed.k, &placed.q) ? placed.k.off + placed.k.n_bytes
								   : placed.v.off + placed.v.n_bytes,
			placed.q.off, "queries overlap K or V rows");
	*segments = placed;
	return KV_OK;
}

enum kv_status kvp_rows_reply_layout(const struct kvp_header *header, const struct kvp_rows_req *rows,
	const struct kvp_geometry *geometry, uint64_t frame_bytes_max, struct kvp_rows_reply_layout *layout,
	struct kvp_fault *fault)
{
	struct kvp_rows_reply_layout wanted = { .out.off = KVP_ABSENT, .lse.off = KVP_ABSENT };
	uint64_t payload_bytes = 0;
	bool is_known = true;

	wanted.payload_start = kvp_payload_start(KVP_BYTES(rows_reply), header->n_items, KVP_ITEM_BYTES);
	if (rows->n_q_total > 0) {
		wanted.out.off = 0;
		is_known = q_bytes(geometry, geometry->v_head_dim, kvp_dtype_bytes(rows->out_dtype),
			rows->n_q_total, &wanted.out.n_bytes);
		payload_bytes = wanted.out.n_bytes;
	}
	if (is_known && rows->n_q_total > 0 && (rows->flags & KVP_ROWS_LSE)) {
		is_known = kvp_align(&payload_bytes) &&
			q_bytes(geometry, 1, sizeof(float), rows->n_q_total, &wanted.lse.n_bytes);
		wanted.lse.off = payload_bytes;
		is_known = is_known && kvp_add(&payload_bytes, wanted.lse.n_bytes);
	}
	wanted.body_bytes = payload_bytes;
	if (payload_bytes == 0)
		wanted.body_bytes = kvp_structs_bytes(KVP_BYTES(rows_reply), header->n_items, KVP_ITEM_BYTES);
	else
		is_known = is_known && kvp_add(&wanted.body_bytes, wanted.payload_start);
	if (!is_known || wanted.body_bytes > frame_bytes_max) {
		kvp_refuse_op(header, fault, KV_TOO_LARGE, KVP_AT(rows_req, n_q_total), frame_bytes_max,
			is_known ? wanted.body_bytes : UINT64_MAX, "the reply would exceed frame_bytes_max");
		if (fault)
			fault->scope = KV_SCOPE_REQUEST;
		return KV_TOO_LARGE;
	}
	*layout = wanted;
	return KV_OK;
}
