/*
 * What the check_*.c files share: faults at fields of op structs and items, and checked sums of sizes.
 * Not for other users. No state; any thread.
 */
#ifndef PROTO_CHECK_INTERNAL_H
#define PROTO_CHECK_INTERNAL_H

#include "proto/check.h"

/* A fault at offset `at` of the op struct. A field that the frame's short struct lacks is told as op_bytes.
 */
static inline enum kv_status kvp_refuse_op(const struct kvp_header *header, struct kvp_fault *fault,
	enum kv_status status, uint32_t at, uint64_t expected, uint64_t got, const char *what)
{
	const uint32_t offset = at < header->op_bytes ? KVP_HEADER_BYTES + at : (uint32_t)KVP_AT_OP_BYTES;

	return kvp_fault_set(fault, status, offset, expected, got, what);
}

/* A fault at offset `at` of an item. The whole request is refused, so that is its scope. */
static inline enum kv_status kvp_refuse_item(const struct kvp_header *header, struct kvp_fault *fault,
	enum kv_status status, uint32_t item, uint32_t at, uint64_t expected, uint64_t got, const char *what)
{
	const uint64_t offset =
		KVP_HEADER_BYTES + kvp_structs_bytes(header->op_bytes, item, header->item_bytes) + at;

	kvp_fault_set(fault, status, (uint32_t)offset, expected, got, what);
	if (fault)
		fault->item = item;
	return status;
}

/* TOO_LARGE that only kills the request: the frame itself is sound. */
static inline enum kv_status kvp_refuse_too_large(
	struct kvp_fault *fault, uint32_t offset, uint64_t expected, uint64_t got, const char *what)
{
	kvp_fault_set(fault, KV_TOO_LARGE, offset, expected, got, what);
	if (fault)
		fault->scope = KV_SCOPE_REQUEST;
	return KV_TOO_LARGE;
}

/* *product *= factor; false on overflow. */
static inline bool kvp_mul(uint64_t *product, uint64_t factor)
{
	return !__builtin_mul_overflow(*product, factor, product);
}

/* *sum += n; false on overflow. */
static inline bool kvp_add(uint64_t *sum, uint64_t n)
{
	return !__builtin_add_overflow(*sum, n, sum);
}

/* Rounds *n up to KVP_ALIGN_BYTES; false on overflow. */
static inline bool kvp_align(uint64_t *n)
{
	if (!kvp_add(n, KVP_ALIGN_BYTES - 1))
		return false;
	*n &= ~(uint64_t)(KVP_ALIGN_BYTES - 1);
	return true;
}

/* Dtypes that rows may have on the wire: none of ours is left out, NONE and unknown numbers are. */
static inline bool kvp_is_row_dtype(unsigned dtype)
{
	return dtype != KVP_DTYPE_NONE && kvp_dtype_is_known(dtype);
}

/* check_rows.c: APPEND, DECODE, APPEND_DECODE, TRUNCATE, FREE, FORK, PIN, UNPIN. */
enum kv_status kvp_check_rows(const struct kvp_header *header, const uint8_t *body,
	const struct kvp_caps *caps, struct kvp_request *request, struct kvp_fault *fault);
enum kv_status kvp_check_sequence_items(const struct kvp_header *header, const uint8_t *body,
	struct kvp_request *request, struct kvp_fault *fault);

/* check_tables.c: UPDATE_SLOTS, DECODE_TABLE. */
enum kv_status kvp_check_slots(const struct kvp_header *header, const uint8_t *body,
	const struct kvp_caps *caps, struct kvp_request *request, struct kvp_fault *fault);
enum kv_status kvp_check_table(const struct kvp_header *header, const uint8_t *body,
	const struct kvp_caps *caps, struct kvp_request *request, struct kvp_fault *fault);

/* check_rows.c: a segment has an offset, a multiple of 64, exactly when it has rows. */
enum kv_status kvp_check_presence(
	const struct kvp_header *header, uint64_t off, bool has_rows, uint32_t at, struct kvp_fault *fault);
/* check_rows.c: flags that decodes take, and the scale. */
enum kv_status kvp_check_decode_flags(const struct kvp_header *header, const struct kvp_caps *caps,
	uint32_t flags, struct kvp_fault *fault);
enum kv_status kvp_check_scale(const struct kvp_header *header, float scale, struct kvp_fault *fault);
/* check_payload.c: one input segment: its size from the geometry, its place inside the payload. */
enum kv_status kvp_place_segment(const struct kvp_header *header, uint64_t off, bool size_is_known,
	uint64_t n_bytes, uint32_t at, struct kvp_segment *segment, struct kvp_fault *fault);
bool kvp_segments_overlap(const struct kvp_segment *a, const struct kvp_segment *b);

/* check_payload.c: READ. */
enum kv_status kvp_check_read(const struct kvp_header *header, const uint8_t *body,
	const struct kvp_caps *caps, struct kvp_request *request, struct kvp_fault *fault);

/* check_payload.c: PUBLISH, MATCH. */
enum kv_status kvp_check_prefix(const struct kvp_header *header, const uint8_t *body,
	struct kvp_request *request, struct kvp_fault *fault);

/*
 * check_payload.c: bytes of n_tokens K (or V) rows on a range of layers. The range and the dtype were
 * checked. False when 64 bits do not hold the number.
 */
bool kvp_side_bytes(const struct kvp_geometry *geometry, bool is_k, uint32_t layer_first, uint32_t n_layers,
	unsigned dtype, uint32_t n_tokens, uint64_t *n_bytes);
/* check_payload.c: layer_first + n_layers within the pool. */
bool kvp_layers_fit(const struct kvp_geometry *geometry, uint32_t layer_first, uint32_t n_layers);

#endif
