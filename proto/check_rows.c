#include <math.h>

#include "proto/check_internal.h"

/* Open addressing over the ids of one frame: twice as many places as items, so at most half full. */
#define ID_PLACES (2 * KVP_ITEMS_MAX)
#define ID_EMPTY  0xFFFF

struct id_set {
	uint16_t item[ID_PLACES]; /* index of the item that holds the place */
};

/* The place of item_idx's sequence: returns the index of an earlier item with the same id, or item_idx. */
static uint32_t id_set_add(struct id_set *set, const struct kvp_request *request, bool is_fork,
	uint32_t item_idx, uint64_t sequence)
{
	/* 2^64 / golden ratio: spreads consecutive ids over the top bits. */
	uint32_t place = (uint32_t)((sequence * 0x9E3779B97F4A7C15ULL) >> 55) % ID_PLACES;

	while (set->item[place] != ID_EMPTY) {
		const uint32_t other = set->item[place];
		const uint64_t id =
			is_fork ? request->fork_items[other].sequence : request->rows_items[other].sequence;

		if (id == sequence)
			return other;
		place = (place + 1) % ID_PLACES;
	}
	set->item[place] = (uint16_t)item_idx;
	return item_idx;
}

static bool is_append(const struct kvp_header *header)
{
	return header->opcode != KVP_OP_DECODE;
}

static bool is_decode(const struct kvp_header *header)
{
	return header->opcode != KVP_OP_APPEND;
}

static enum kv_status check_kv_dtype(const struct kvp_header *header, const struct kvp_caps *caps,
	unsigned dtype, uint32_t at, struct kvp_fault *fault)
{
	if (!kvp_dtype_is_known(dtype))
		return kvp_refuse_op(
			header, fault, KV_UNSUPPORTED, at, KVP_DTYPE_PACKED, dtype, "dtype is unknown");
	if (!is_append(header) && dtype != KVP_DTYPE_NONE)
		return kvp_refuse_op(header, fault, KV_BAD_ARG, at, KVP_DTYPE_NONE, dtype,
			"DECODE carries no K or V rows");
	if (is_append(header) && dtype == KVP_DTYPE_NONE)
		return kvp_refuse_op(header, fault, KV_BAD_ARG, at, KVP_DTYPE_F32, dtype,
			"an append needs dtypes of K and V");
	if (dtype == KVP_DTYPE_PACKED && !(caps->features & KVP_FEATURE_PACKED_INPUT))
		return kvp_refuse_op(header, fault, KV_UNSUPPORTED, at, KVP_DTYPE_BF16, dtype,
			"packed rows are not taken");
	return KV_OK;
}

/* Queries and outputs are plain numbers. */
static enum kv_status check_q_dtype(
	const struct kvp_header *header, unsigned dtype, uint32_t at, struct kvp_fault *fault)
{
	if (!kvp_dtype_is_known(dtype))
		return kvp_refuse_op(
			header, fault, KV_UNSUPPORTED, at, KVP_DTYPE_PACKED, dtype, "dtype is unknown");
	if (!is_decode(header) && dtype != KVP_DTYPE_NONE)
		return kvp_refuse_op(header, fault, KV_BAD_ARG, at, KVP_DTYPE_NONE, dtype,
			"APPEND has no queries and no outputs");
	if (is_decode(header) && kvp_dtype_bytes(dtype) == 0)
		return kvp_refuse_op(header, fault, KV_BAD_ARG, at, KVP_DTYPE_F32, dtype,
			"a decode needs f32, f16 or bf16 here");
	return KV_OK;
}

enum kv_status kvp_check_decode_flags(
	const struct kvp_header *header, const struct kvp_caps *caps, uint32_t flags, struct kvp_fault *fault)
{
	const uint32_t at = KVP_AT(rows_req, flags);
	const uint32_t rotated = KVP_ROWS_Q_ROTATED | KVP_ROWS_OUT_ROTATED;

	if (flags & ~(uint32_t)KVP_ROWS_FLAGS_KNOWN)
		return kvp_refuse_op(header, fault, KV_UNSUPPORTED, at, KVP_ROWS_FLAGS_KNOWN, flags,
			"a flag of the op struct is unknown");
	if ((flags & rotated) && !(caps->features & KVP_FEATURE_ROTATED))
		return kvp_refuse_op(header, fault, KV_UNSUPPORTED, at, 0, flags,
			"rotated queries and outputs are not served");
	if ((flags & KVP_ROWS_NO_SINKS) && !(caps->features & KVP_FEATURE_NO_SINKS))
		return kvp_refuse_op(header, fault, KV_UNSUPPORTED, at, 0, flags, "NO_SINKS is not served");
	return KV_OK;
}

static enum kv_status check_flags(const struct kvp_header *header, const struct kvp_caps *caps,
	const struct kvp_rows_req *rows, struct kvp_fault *fault)
{
	if (!is_decode(header) && rows->flags != 0 && !(rows->flags & ~(uint32_t)KVP_ROWS_FLAGS_KNOWN))
		return kvp_refuse_op(header, fault, KV_BAD_ARG, KVP_AT(rows_req, flags), 0, rows->flags,
			"APPEND takes none of the decode flags");
	return kvp_check_decode_flags(header, caps, rows->flags, fault);
}

enum kv_status kvp_check_scale(const struct kvp_header *header, float scale, struct kvp_fault *fault)
{
	uint8_t bits[4];

	if (isfinite(scale) && scale >= 0)
		return KV_OK;
	kvp_put_f32(bits, scale);
	return kvp_refuse_op(header, fault, KV_BAD_ARG, KVP_AT(rows_req, scale), 0, kvp_get_u32(bits),
		"scale is negative or not finite (bits of the float)");
}

enum kv_status kvp_check_presence(
	const struct kvp_header *header, uint64_t off, bool has_rows, uint32_t at, struct kvp_fault *fault)
{
	if (!has_rows && off != KVP_ABSENT)
		return kvp_refuse_op(header, fault, KV_BAD_ARG, at, KVP_ABSENT, off,
			"an offset where the frame has no rows");
	if (has_rows && off == KVP_ABSENT)
		return kvp_refuse_op(header, fault, KV_BAD_ARG, at, 0, off, "the offset of rows is absent");
	if (has_rows && off % KVP_ALIGN_BYTES != 0)
		return kvp_refuse_op(header, fault, KV_BAD_ARG, at, KVP_ALIGN_BYTES, off,
			"an offset is not a multiple of 64");
	return KV_OK;
}

static enum kv_status check_dtypes(const struct kvp_header *header, const struct kvp_caps *caps,
	const struct kvp_rows_req *rows, struct kvp_fault *fault)
{
	enum kv_status status = check_kv_dtype(header, caps, rows->k_dtype, KVP_AT(rows_req, k_dtype), fault);

	if (status == KV_OK)
		status = check_kv_dtype(header, caps, rows->v_dtype, KVP_AT(rows_req, v_dtype), fault);
	if (status == KV_OK)
		status = check_q_dtype(header, rows->q_dtype, KVP_AT(rows_req, q_dtype), fault);
	if (status == KV_OK)
		status = check_q_dtype(header, rows->out_dtype, KVP_AT(rows_req, out_dtype), fault);
	return status;
}

static enum kv_status check_op(const struct kvp_header *header, const struct kvp_caps *caps,
	const struct kvp_rows_req *rows, struct kvp_fault *fault)
{
	if (rows->n_layers == 0)
		return kvp_refuse_op(
			header, fault, KV_BAD_ARG, KVP_AT(rows_req, n_layers), 1, 0, "n_layers is 0");
	if (is_decode(header) && rows->n_layers != 1)
		return kvp_refuse_op(header, fault, KV_BAD_ARG, KVP_AT(rows_req, n_layers), 1, rows->n_layers,
			"a frame with queries has exactly one layer");

	enum kv_status status = check_dtypes(header, caps, rows, fault);

	if (status == KV_OK)
		status = check_flags(header, caps, rows, fault);
	if (status == KV_OK)
		status = kvp_check_presence(header, rows->k_off,
			is_append(header) && rows->n_tokens_total > 0, KVP_AT(rows_req, k_off), fault);
	if (status == KV_OK)
		status = kvp_check_presence(header, rows->v_off,
			is_append(header) && rows->n_tokens_total > 0, KVP_AT(rows_req, v_off), fault);
	if (status == KV_OK)
		status = kvp_check_presence(header, rows->q_off, is_decode(header) && rows->n_q_total > 0,
			KVP_AT(rows_req, q_off), fault);
	if (status != KV_OK)
		return status;
	status = kvp_check_scale(header, rows->scale, fault);
	if (status != KV_OK)
		return status;
	if (rows->window != 0 && !(caps->features & KVP_FEATURE_WINDOW))
		return kvp_refuse_op(header, fault, KV_UNSUPPORTED, KVP_AT(rows_req, window), 0, rows->window,
			"a window of the request is not served");
	if ((rows->k_dtype == KVP_DTYPE_PACKED || rows->v_dtype == KVP_DTYPE_PACKED) &&
		rows->fingerprint == 0)
		return kvp_refuse_op(header, fault, KV_BAD_ARG, KVP_AT(rows_req, fingerprint), 1, 0,
			"packed rows need the pool's fingerprint");
	return KV_OK;
}

static enum kv_status check_item_ranges(const struct kvp_header *header, const struct kvp_caps *caps,
	const struct kvp_rows_item *item, uint32_t item_idx, struct kvp_fault *fault)
{
	const uint32_t at_q_len = KVP_AT(rows_item, q_len);
	const uint64_t end = (uint64_t)item->position + item->n_tokens; /* DECODE: n_tokens is 0 */

	if (!is_append(header) && item->n_tokens != 0)
		return kvp_refuse_item(header, fault, KV_BAD_ARG, item_idx, KVP_AT(rows_item, n_tokens), 0,
			item->n_tokens, "DECODE appends no tokens");
	if (!is_decode(header) && item->q_len != 0)
		return kvp_refuse_item(header, fault, KV_BAD_ARG, item_idx, at_q_len, 0, item->q_len,
			"APPEND has no queries");
	if (is_decode(header) && item->q_len == 0)
		return kvp_refuse_item(header, fault, KV_BAD_ARG, item_idx, at_q_len, 1, 0, "q_len is 0");
	if (item->q_len > caps->q_len_max && is_decode(header))
		return kvp_refuse_item(header, fault, KV_BAD_ARG, item_idx, at_q_len, caps->q_len_max,
			item->q_len, "q_len above q_len_max");
	if (is_append(header) && end >= KVP_POSITION_PLANNED)
		return kvp_refuse_item(header, fault, KV_BAD_ARG, item_idx, KVP_AT(rows_item, position),
			KVP_POSITION_PLANNED - 1, end, "position + n_tokens leaves 32 bits");
	/* Row 0 sees seen - q_len + 1 tokens. A planned length is not known here: whoever knows it checks
	 * again. */
	if (is_decode(header) && (is_append(header) || item->position != KVP_POSITION_PLANNED) &&
		item->q_len > end + 1)
		return kvp_refuse_item(header, fault, KV_BAD_ARG, item_idx, at_q_len, end + 1, item->q_len,
			"q_len above the tokens that are seen");
	return KV_OK;
}

static enum kv_status check_item(const struct kvp_header *header, const struct kvp_caps *caps,
	const struct kvp_rows_item *item, uint32_t item_idx, struct kvp_fault *fault)
{
	if (item->sequence == 0)
		return kvp_refuse_item(header, fault, KV_BAD_ARG, item_idx, KVP_AT(rows_item, sequence), 1, 0,
			"sequence 0 names nothing");
	if (item->flags & ~KVP_ITEM_FLAGS_KNOWN)
		return kvp_refuse_item(header, fault, KV_UNSUPPORTED, item_idx, KVP_AT(rows_item, flags),
			KVP_ITEM_FLAGS_KNOWN, item->flags, "a flag of the item is unknown");
	if ((item->flags & KVP_ITEM_CREATE) && !is_append(header))
		return kvp_refuse_item(header, fault, KV_BAD_ARG, item_idx, KVP_AT(rows_item, flags),
			item->flags & ~KVP_ITEM_CREATE, item->flags, "DECODE creates no sequence");
	if ((item->flags & KVP_ITEM_CREATE) && item->position != 0)
		return kvp_refuse_item(header, fault, KV_BAD_ARG, item_idx, KVP_AT(rows_item, position), 0,
			item->position, "CREATE starts at position 0");
	return check_item_ranges(header, caps, item, item_idx, fault);
}

enum kv_status kvp_check_rows(const struct kvp_header *header, const uint8_t *body,
	const struct kvp_caps *caps, struct kvp_request *request, struct kvp_fault *fault)
{
	const struct kvp_rows_req *rows = &request->rows;
	const uint8_t *in = body + header->op_bytes;
	uint64_t n_tokens = 0;
	uint64_t n_q = 0;
	struct id_set seen;

	kvp_rows_req_decode(body, header->op_bytes, &request->rows);

	enum kv_status status = check_op(header, caps, rows, fault);

	if (status != KV_OK)
		return status;
	memset(&seen, 0xFF, sizeof(seen));
	for (uint32_t item_idx = 0; item_idx < header->n_items; item_idx++, in += header->item_bytes) {
		struct kvp_rows_item *item = &request->rows_items[item_idx];

		kvp_rows_item_decode(in, header->item_bytes, item);
		status = check_item(header, caps, item, item_idx, fault);
		if (status != KV_OK)
			return status;

		const uint32_t first = id_set_add(&seen, request, false, item_idx, item->sequence);

		if (first != item_idx)
			return kvp_refuse_item(header, fault, KV_BAD_ARG, item_idx,
				KVP_AT(rows_item, sequence), first, item->sequence,
				"the item that `expected` tells has the same sequence");
		n_tokens += item->n_tokens;
		n_q += item->q_len;
	}
	if (rows->n_tokens_total != n_tokens)
		return kvp_refuse_op(header, fault, KV_BAD_ARG, KVP_AT(rows_req, n_tokens_total), n_tokens,
			rows->n_tokens_total, "n_tokens_total is not the sum of the items");
	if (rows->n_q_total != n_q)
		return kvp_refuse_op(header, fault, KV_BAD_ARG, KVP_AT(rows_req, n_q_total), n_q,
			rows->n_q_total, "n_q_total is not the sum of the items");
	return KV_OK;
}

enum kv_status kvp_check_sequence_items(const struct kvp_header *header, const uint8_t *body,
	struct kvp_request *request, struct kvp_fault *fault)
{
	const bool is_fork = header->opcode == KVP_OP_FORK;
	const uint8_t *in = body + header->op_bytes;
	struct id_set seen;

	memset(&seen, 0xFF, sizeof(seen));
	for (uint32_t item_idx = 0; item_idx < header->n_items; item_idx++, in += header->item_bytes) {
		struct kvp_fork_item fork;

		/* A fork item is a rows item with a parent, so the checks below read either. */
		kvp_fork_item_decode(in, header->item_bytes, &fork);
		if (is_fork)
			request->fork_items[item_idx] = fork;
		else
			kvp_rows_item_decode(in, header->item_bytes, &request->rows_items[item_idx]);
		if (fork.sequence == 0)
			return kvp_refuse_item(header, fault, KV_BAD_ARG, item_idx,
				KVP_AT(rows_item, sequence), 1, 0, "sequence 0 names nothing");
		if (fork.flags != 0)
			return kvp_refuse_item(header, fault, KV_UNSUPPORTED, item_idx,
				KVP_AT(rows_item, flags), 0, fork.flags, "the operation knows no item flags");

		const uint32_t first = id_set_add(&seen, request, is_fork, item_idx, fork.sequence);

		if (first != item_idx)
			return kvp_refuse_item(header, fault, KV_BAD_ARG, item_idx,
				KVP_AT(rows_item, sequence), first, fork.sequence,
				"the item that `expected` tells has the same sequence");
		if (is_fork && (fork.parent == 0 || fork.parent == fork.sequence))
			return kvp_refuse_item(header, fault, KV_BAD_ARG, item_idx, KVP_AT(fork_item, parent),
				1, fork.parent, "parent is 0 or the child itself");
	}
	return KV_OK;
}
