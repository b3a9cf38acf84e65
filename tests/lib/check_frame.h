/*
 * The path of a frame through all checks, as a server takes it, with the capabilities and the pool that the
 * golden frames fit. For one unit test program at a time; everything is static.
 */
#ifndef TESTS_LIB_CHECK_FRAME_H
#define TESTS_LIB_CHECK_FRAME_H

#include "proto/bytes.h"
#include "proto/check.h"
#include "proto/crc32c.h"
#include "tests/lib/golden.h"

#define ABSENT      KVP_ABSENT
#define FINGERPRINT 0xA1B2C3D4E5F60718ULL

/* A first version of the server, one with everything, and the pool that the golden frames fit. */
static const struct kvp_caps basic_caps = { 0, 65536, 256, 1 };
static const struct kvp_caps full_caps = { UINT32_MAX, 65536, 256, 8 };
static const uint32_t k_row_bytes[6] = { 12, 14, 12, 12, 12, 12 };
static const uint32_t v_row_bytes[6] = { 20, 20, 20, 20, 20, 22 };
static const struct kvp_geometry pool = { 6, 2, 1, 16, 16, 0, FINGERPRINT, k_row_bytes, v_row_bytes };

struct checked {
	struct kvp_header header;
	struct kvp_request request;
	struct kvp_segments segments;
	struct kvp_rows_reply_layout rows_reply;
	struct kvp_read_reply_layout read_reply;
};

/* Everything that a server does with a frame before positions and quota. */
static inline enum kv_status check_frame(const uint8_t *frame, const struct kvp_caps *caps,
	const struct kvp_geometry *geometry, struct checked *out, struct kvp_fault *fault)
{
	const uint8_t *body = frame + KVP_HEADER_BYTES;
	enum kv_status status = kvp_header_decode(frame, &out->header, fault);

	if (status == KV_OK)
		status = kvp_header_check_size(&out->header, caps->frame_bytes_max, fault);
	if (status == KV_OK)
		status = kvp_check_request(&out->header, body, caps, &out->request, fault);
	if (status != KV_OK)
		return status;
	switch (out->header.opcode) {
	case KVP_OP_APPEND:
	case KVP_OP_DECODE:
	case KVP_OP_APPEND_DECODE:
		status = kvp_rows_check_payload(
			&out->header, &out->request.rows, geometry, &out->segments, fault);
		if (status == KV_OK)
			status = kvp_rows_reply_layout(&out->header, &out->request.rows, geometry,
				caps->frame_bytes_max, &out->rows_reply, fault);
		return status;
	case KVP_OP_READ:
		return kvp_read_check(&out->header, &out->request.read, geometry, caps->frame_bytes_max,
			&out->read_reply, fault);
	default:
		return KV_OK;
	}
}

/* Little-endian, of any size up to 8. */
static inline void put(uint8_t *out, uint32_t size, uint64_t value)
{
	for (uint32_t i = 0; i < size; i++)
		out[i] = (uint8_t)(value >> 8 * i);
}

/* Makes the header's CRC right again after a change. */
static inline void seal(uint8_t *frame)
{
	kvp_put_u32(frame + 60, kvp_crc32c(0, frame, 60));
}

#endif
