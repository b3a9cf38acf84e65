/*
 * UPDATE_SLOTS and DECODE_TABLE. Their op structs have what rows_req has in the same places, so the checks of
 * row operations tell the right offsets.
 */
#include "proto/check_internal.h"

#define LIES_AS(m, field, rows_field) ((int)KVP_AT(m, field) == (int)KVP_AT(rows_req, rows_field))

_Static_assert(LIES_AS(slots_req, k_off, k_off) && LIES_AS(slots_req, v_off, v_off) &&
		LIES_AS(slots_req, fingerprint, fingerprint),
	"the fields of slots_req lie where rows_req has them");
_Static_assert(LIES_AS(table_req, layer, layer_first) && LIES_AS(table_req, n_q_total, n_q_total) &&
		LIES_AS(table_req, flags, flags) && LIES_AS(table_req, q_off, q_off) &&
		LIES_AS(table_req, scale, scale) && LIES_AS(table_req, window, window),
	"the fields of table_req lie where rows_req has them");

struct kvp_rows_req kvp_slots_as_rows(const struct kvp_slots_req *slots)
{
	return (struct kvp_rows_req){
		.layer_first = slots->layer_first,
		.n_layers = slots->n_layers,
		.n_tokens_total = slots->n_tokens,
		.k_dtype = slots->k_dtype,
		.v_dtype = slots->v_dtype,
		.k_off = slots->k_off,
		.v_off = slots->v_off,
		.q_off = KVP_ABSENT,
		.fingerprint = slots->fingerprint,
	};
}

struct kvp_rows_req kvp_table_as_rows(const struct kvp_table_req *table)
{
	return (struct kvp_rows_req){
		.layer_first = table->layer,
		.n_layers = 1,
		.n_q_total = table->n_q_total,
		.q_dtype = table->q_dtype,
		.out_dtype = table->out_dtype,
		.flags = table->flags,
		.k_off = KVP_ABSENT,
		.v_off = KVP_ABSENT,
		.q_off = table->q_off,
		.scale = table->scale,
		.window = table->window,
		.fingerprint = table->fingerprint,
	};
}

static enum kv_status check_row_dtype(const struct kvp_header *header, const struct kvp_caps *caps,
	unsigned dtype, uint32_t at, struct kvp_fault *fault)
{
	if (!kvp_dtype_is_known(dtype))
		return kvp_refuse_op(
			header, fault, KV_UNSUPPORTED, at, KVP_DTYPE_PACKED, dtype, "dtype is unknown");
	if (dtype == KVP_DTYPE_NONE)
		return kvp_refuse_op(
			header, fault, KV_BAD_ARG, at, KVP_DTYPE_F32, dtype, "rows need dtypes of K and V");
	if (dtype == KVP_DTYPE_PACKED && !(caps->features & KVP_FEATURE_PACKED_INPUT))
		return kvp_refuse_op(header, fault, KV_UNSUPPORTED, at, KVP_DTYPE_BF16, dtype,
			"packed rows are not taken");
	return KV_OK;
}

static enum kv_status check_plain_dtype(
	const struct kvp_header *header, unsigned dtype, uint32_t at, struct kvp_fault *fault)
{
	if (!kvp_dtype_is_known(dtype))
		return kvp_refuse_op(
			header, fault, KV_UNSUPPORTED, at, KVP_DTYPE_PACKED, dtype, "dtype is unknown");
	if (kvp_dtype_bytes(dtype) == 0)
		return kvp_refuse_op(header, fault, KV_BAD_ARG, at, KVP_DTYPE_F32, dtype,
			"a decode needs f32, f16 or bf16 here");
	return KV_OK;
}

enum kv_status kvp_check_slots(const struct kvp_header *header, const uint8_t *body,
	const struct kvp_caps *caps, struct kvp_request *request, struct kvp_fault *fault)
{
	struct kvp_slots_req *slots = &request->slots;
	enum kv_status status;

	kvp_slots_req_decode(body, header->op_bytes, slots);
	if (slots->n_layers == 0)
		return kvp_refuse_op(
			header, fault, KV_BAD_ARG, KVP_AT(slots_req, n_layers), 1, 0, "n_layers is 0");
	if (slots->n_tokens == 0)
		return kvp_refuse_op(
			header, fault, KV_BAD_ARG, KVP_AT(slots_req, n_tokens), 1, 0, "n_tokens is 0");
	if (slots->flags != 0)
		return kvp_refuse_op(header, fault, KV_UNSUPPORTED, KVP_AT(slots_req, flags), 0, slots->flags,
			"a flag of the op struct is unknown");
	status = check_row_dtype(header, caps, slots->k_dtype, KVP_AT(slots_req, k_dtype), fault);
	if (status == KV_OK)
		status = check_row_dtype(header, caps, slots->v_dtype, KVP_AT(slots_req, v_dtype), fault);
	if (status == KV_OK)
		status = kvp_check_presence(header, slots->k_off, true, KVP_AT(slots_req, k_off), fault);
	if (status == KV_OK)
		status = kvp_check_presence(header, slots->v_off, true, KVP_AT(slots_req, v_off), fault);
	if (status == KV_OK)
		status = kvp_check_presence(
			header, slots->slots_off, true, KVP_AT(slots_req, slots_off), fault);
	if (status != KV_OK)
		return status;
	if ((slots->k_dtype == KVP_DTYPE_PACKED || slots->v_dtype == KVP_DTYPE_PACKED) &&
		slots->fingerprint == 0)
		return kvp_refuse_op(header, fault, KV_BAD_ARG, KVP_AT(slots_req, fingerprint), 1, 0,
			"packed rows need the pool's fingerprint");
	return KV_OK;
}

static enum kv_status check_table_counts(const struct kvp_header *header, const struct kvp_caps *caps,
	const struct kvp_table_req *table, struct kvp_fault *fault)
{
	const uint32_t at_n_q = KVP_AT(table_req, n_q_total);

	if (table->n_sequences == 0 || table->n_sequences > caps->items_max)
		return kvp_refuse_op(header, fault, KV_BAD_ARG, KVP_AT(table_req, n_sequences),
			caps->items_max, table->n_sequences, "n_sequences is not from 1 to items_max");
	if (table->table_stride == 0)
		return kvp_refuse_op(header, fault, KV_BAD_ARG, KVP_AT(table_req, table_stride), 1, 0,
			"table_stride is 0");
	if (table->n_q_total == 0 || table->n_q_total % table->n_sequences != 0)
		return kvp_refuse_op(header, fault, KV_BAD_ARG, at_n_q, table->n_sequences, table->n_q_total,
			"n_q_total is no multiple of n_sequences");
	if (table->n_q_total / table->n_sequences > caps->q_len_max)
		return kvp_refuse_op(header, fault, KV_BAD_ARG, at_n_q,
			(uint64_t)caps->q_len_max * table->n_sequences, table->n_q_total,
			"q_len above q_len_max");
	return KV_OK;
}

enum kv_status kvp_check_table(const struct kvp_header *header, const uint8_t *body,
	const struct kvp_caps *caps, struct kvp_request *request, struct kvp_fault *fault)
{
	struct kvp_table_req *table = &request->table;
	enum kv_status status;

	kvp_table_req_decode(body, header->op_bytes, table);
	status = check_table_counts(header, caps, table, fault);
	if (status == KV_OK)
		status = check_plain_dtype(header, table->q_dtype, KVP_AT(table_req, q_dtype), fault);
	if (status == KV_OK)
		status = check_plain_dtype(header, table->out_dtype, KVP_AT(table_req, out_dtype), fault);
	if (status == KV_OK)
		status = kvp_check_decode_flags(header, caps, table->flags, fault);
	if (status == KV_OK)
		status = kvp_check_presence(
			header, table->table_off, true, KVP_AT(table_req, table_off), fault);
	if (status == KV_OK)
		status =
			kvp_check_presence(header, table->seen_off, true, KVP_AT(table_req, seen_off), fault);
	if (status == KV_OK)
		status = kvp_check_presence(header, table->q_off, true, KVP_AT(table_req, q_off), fault);
	if (status == KV_OK)
		status = kvp_check_scale(header, table->scale, fault);
	if (status == KV_OK && table->window != 0 && !(caps->features & KVP_FEATURE_WINDOW))
		return kvp_refuse_op(header, fault, KV_UNSUPPORTED, KVP_AT(table_req, window), 0,
			table->window, "a window of the request is not served");
	return status;
}

enum kv_status kvp_slots_check_payload(const struct kvp_header *header, const struct kvp_slots_req *slots,
	const struct kvp_geometry *geometry, struct kvp_slots_segments *segments, struct kvp_fault *fault)
{
	const struct kvp_rows_req rows = kvp_slots_as_rows(slots);
	struct kvp_segments placed;
	struct kvp_segment own;
	enum kv_status status = kvp_rows_check_payload(header, &rows, geometry, &placed, fault);

	if (status == KV_OK)
		status = kvp_place_segment(header, slots->slots_off, true, 8 * (uint64_t)slots->n_tokens,
			KVP_AT(slots_req, slots_off), &own, fault);
	if (status != KV_OK)
		return status;
	if (kvp_segments_overlap(&placed.k, &own) || kvp_segments_overlap(&placed.v, &own))
		return kvp_refuse_op(header, fault, KV_BAD_ARG, KVP_AT(slots_req, slots_off), 0, own.off,
			"slots overlap K or V rows");
	*segments = (struct kvp_slots_segments){ placed.k, placed.v, own };
	return KV_OK;
}

enum kv_status kvp_table_check_payload(const struct kvp_header *header, const struct kvp_table_req *table,
	const struct kvp_geometry *geometry, struct kvp_table_segments *segments, struct kvp_fault *fault)
{
	const struct kvp_rows_req rows = kvp_table_as_rows(table);
	const uint64_t table_bytes = 4 * (uint64_t)table->n_sequences * table->table_stride;
	struct kvp_segments placed;
	struct kvp_table_segments own;
	enum kv_status status = kvp_rows_check_payload(header, &rows, geometry, &placed, fault);

	own.q = placed.q;
	if (status == KV_OK)
		status = kvp_place_segment(header, table->table_off, true, table_bytes,
			KVP_AT(table_req, table_off), &own.table, fault);
	if (status == KV_OK)
		status = kvp_place_segment(header, table->seen_off, true, 4 * (uint64_t)table->n_sequences,
			KVP_AT(table_req, seen_off), &own.seen, fault);
	if (status != KV_OK)
		return status;
	if (kvp_segments_overlap(&own.table, &own.q))
		return kvp_refuse_op(header, fault, KV_BAD_ARG, KVP_AT(table_req, table_off), 0,
			own.table.off, "the table overlaps the queries");
	if (kvp_segments_overlap(&own.seen, &own.q) || kvp_segments_overlap(&own.seen, &own.table))
		return kvp_refuse_op(header, fault, KV_BAD_ARG, KVP_AT(table_req, seen_off), 0, own.seen.off,
			"lengths overlap the table or the queries");
	*segments = own;
	return KV_OK;
}
