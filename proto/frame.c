#include "proto/frame.h"

#include <inttypes.h>
#include <stdio.h>

#include "proto/bytes.h"
#include "proto/crc32c.h"

#define LENGTH(array) (sizeof(array) / sizeof((array)[0]))

static const uint8_t magic[4] = { 'T', 'K', 'V', '1' };

static const struct kvp_opcode_row opcode_rows[] = {
#define OPCODE_ROW(name, number, session, has_items, payload, served, feature)                         \
	{ #name, number, KVP_SESSION_##session, KVP_PAYLOAD_##payload, KVP_SERVED_##served, has_items, \
		feature },
	KVP_OPCODE_MAP(OPCODE_ROW)
#undef OPCODE_ROW
};

const struct kvp_opcode_row *kvp_opcode_row(unsigned number)
{
	for (size_t row_idx = 0; row_idx < LENGTH(opcode_rows); row_idx++)
		if (opcode_rows[row_idx].number == number)
			return &opcode_rows[row_idx];
	return NULL;
}

const char *kvp_opcode_name(unsigned number)
{
	const struct kvp_opcode_row *row = kvp_opcode_row(number);

	return row ? row->name : "UNKNOWN";
}

uint32_t kvp_dtype_bytes(unsigned dtype)
{
	switch (dtype) {
#define DTYPE_CASE(name, number, bytes) \
	case number:                    \
		return bytes;
		KVP_DTYPE_MAP(DTYPE_CASE)
#undef DTYPE_CASE
	default:
		return 0;
	}
}

bool kvp_dtype_is_known(unsigned dtype)
{
#define DTYPE_IS(name, number, bytes) || dtype == (number)
	return false KVP_DTYPE_MAP(DTYPE_IS);
#undef DTYPE_IS
}

enum kv_status kvp_fault_set(struct kvp_fault *fault, enum kv_status status, uint32_t offset,
	uint64_t expected, uint64_t got, const char *what)
{
	if (fault)
		*fault = (struct kvp_fault){
			.status = status,
			.scope = (enum kv_scope)kv_status_row(status)->scope,
			.item = KVP_NO_ITEM,
			.offset = offset,
			.expected = expected,
			.got = got,
			.what = what,
		};
	return status;
}

size_t kvp_fault_text(const struct kvp_fault *fault, char *buf, size_t n)
{
	char item[24] = "", place[96] = "";
	int length;

	if (n == 0)
		return 0;
	if (fault->item != KVP_NO_ITEM)
		snprintf(item, sizeof(item), "item %" PRIu32, fault->item);
	/* Where there is nothing to compare, a place in the frame helps nobody. */
	if (fault->expected != fault->got)
		snprintf(place, sizeof(place), "%soffset %" PRIu32 ", expected %" PRIu64 ", got %" PRIu64,
			item[0] ? ", " : "", fault->offset, fault->expected, fault->got);
	length = snprintf(buf, n, item[0] || place[0] ? "%s: %s (%s%s)" : "%s: %s%s%s",
		kv_status_name(fault->status), fault->what ? fault->what : kv_status_row(fault->status)->text,
		item, place);
	if (length < 0) {
		buf[0] = '\0';
		return 0;
	}
	return (size_t)length < n ? (size_t)length : n - 1;
}

void kvp_header_encode(const struct kvp_header *header, uint8_t out[KVP_HEADER_BYTES])
{
	memcpy(out + KVP_AT_MAGIC, magic, sizeof(magic));
	kvp_put_u8(out + KVP_AT_VERSION, KVP_HEADER_VERSION);
	kvp_put_u8(out + KVP_AT_HEADER_LENGTH, KVP_HEADER_BYTES / 8);
	kvp_put_u16(out + KVP_AT_OPCODE, header->opcode);
	kvp_put_u32(out + KVP_AT_FLAGS, header->flags);
	kvp_put_u32(out + KVP_AT_STATUS, header->status);
	kvp_put_u64(out + KVP_AT_REQUEST_ID, header->request_id);
	kvp_put_u64(out + KVP_AT_SESSION, header->session);
	kvp_put_u64(out + KVP_AT_BODY_BYTES, header->body_bytes);
	kvp_put_u32(out + KVP_AT_OP_BYTES, header->op_bytes);
	kvp_put_u16(out + KVP_AT_N_ITEMS, header->n_items);
	kvp_put_u16(out + KVP_AT_ITEM_BYTES, header->item_bytes);
	kvp_put_u32(out + KVP_AT_DEADLINE, header->deadline_us);
	kvp_put_u32(out + KVP_AT_RETRY_AFTER, header->retry_after_ms);
	kvp_put_u32(out + KVP_AT_BODY_CRC, header->body_crc);
	kvp_put_u32(out + KVP_AT_HEADER_CRC, kvp_crc32c(0, out, KVP_AT_HEADER_CRC));
}

static void header_read(const uint8_t in[KVP_HEADER_BYTES], struct kvp_header *out)
{
	out->opcode = kvp_get_u16(in + KVP_AT_OPCODE);
	out->flags = kvp_get_u32(in + KVP_AT_FLAGS);
	out->status = kvp_get_u32(in + KVP_AT_STATUS);
	out->request_id = kvp_get_u64(in + KVP_AT_REQUEST_ID);
	out->session = kvp_get_u64(in + KVP_AT_SESSION);
	out->body_bytes = kvp_get_u64(in + KVP_AT_BODY_BYTES);
	out->op_bytes = kvp_get_u32(in + KVP_AT_OP_BYTES);
	out->n_items = kvp_get_u16(in + KVP_AT_N_ITEMS);
	out->item_bytes = kvp_get_u16(in + KVP_AT_ITEM_BYTES);
	out->deadline_us = kvp_get_u32(in + KVP_AT_DEADLINE);
	out->retry_after_ms = kvp_get_u32(in + KVP_AT_RETRY_AFTER);
	out->body_crc = kvp_get_u32(in + KVP_AT_BODY_CRC);
}

/* The rules that make payload_start and the end of the frame certain. */
static enum kv_status header_check_lengths(const struct kvp_header *header, struct kvp_fault *fault)
{
	if (header->op_bytes % KVP_OP_BYTES_UNIT != 0)
		return kvp_fault_set(fault, KV_BAD_FRAME, KVP_AT_OP_BYTES, KVP_OP_BYTES_UNIT,
			header->op_bytes, "op_bytes is not a multiple of 16");
	if (header->n_items > KVP_ITEMS_MAX)
		return kvp_fault_set(fault, KV_BAD_FRAME, KVP_AT_N_ITEMS, KVP_ITEMS_MAX, header->n_items,
			"n_items above 256");
	if (header->item_bytes < KVP_ITEM_BYTES && (header->n_items > 0 || header->item_bytes != 0))
		return kvp_fault_set(fault, KV_BAD_FRAME, KVP_AT_ITEM_BYTES, KVP_ITEM_BYTES,
			header->item_bytes, "item_bytes below 32");

	const uint64_t structs_bytes =
		kvp_structs_bytes(header->op_bytes, header->n_items, header->item_bytes);
	const uint64_t start = kvp_payload_start(header->op_bytes, header->n_items, header->item_bytes);

	if (structs_bytes > KVP_STRUCTS_BYTES_MAX)
		return kvp_fault_set(fault, KV_BAD_FRAME, KVP_AT_OP_BYTES, KVP_STRUCTS_BYTES_MAX,
			structs_bytes, "op struct and items above 12 KiB");
	if (header->body_bytes < structs_bytes)
		return kvp_fault_set(fault, KV_BAD_FRAME, KVP_AT_BODY_BYTES, structs_bytes,
			header->body_bytes, "body_bytes below op struct and items");
	if (header->body_bytes > structs_bytes && header->body_bytes < start)
		return kvp_fault_set(fault, KV_BAD_FRAME, KVP_AT_BODY_BYTES, start, header->body_bytes,
			"body_bytes ends inside the padding before the payload");
	return KV_OK;
}

enum kv_status kvp_header_decode(
	const uint8_t in[KVP_HEADER_BYTES], struct kvp_header *out, struct kvp_fault *fault)
{
	if (memcmp(in + KVP_AT_MAGIC, magic, sizeof(magic)) != 0)
		return kvp_fault_set(fault, KV_BAD_MAGIC, KVP_AT_MAGIC, kvp_get_u32(magic),
			kvp_get_u32(in + KVP_AT_MAGIC), "the frame does not begin with TKV1");
	if (in[KVP_AT_VERSION] != KVP_HEADER_VERSION)
		return kvp_fault_set(fault, KV_VERSION_UNSUPPORTED, KVP_AT_VERSION, KVP_HEADER_VERSION,
			in[KVP_AT_VERSION], "header version");
	if (in[KVP_AT_HEADER_LENGTH] != KVP_HEADER_BYTES / 8)
		return kvp_fault_set(fault, KV_VERSION_UNSUPPORTED, KVP_AT_HEADER_LENGTH,
			KVP_HEADER_BYTES / 8, in[KVP_AT_HEADER_LENGTH], "header length / 8");

	const uint32_t crc = kvp_crc32c(0, in, KVP_AT_HEADER_CRC);

	if (kvp_get_u32(in + KVP_AT_HEADER_CRC) != crc)
		return kvp_fault_set(fault, KV_BAD_CRC, KVP_AT_HEADER_CRC, crc,
			kvp_get_u32(in + KVP_AT_HEADER_CRC), "CRC-32C of the header");
	header_read(in, out);

	const enum kv_status status = header_check_lengths(out, fault);

	if (status != KV_OK)
		return status;
	if (out->flags & KVP_FLAGS_REQUIRED_MASK & ~(uint32_t)KVP_FLAGS_KNOWN)
		return kvp_fault_set(fault, KV_UNSUPPORTED, KVP_AT_FLAGS, KVP_FLAGS_KNOWN, out->flags,
			"a required flag of the header is unknown");
	return KV_OK;
}

enum kv_status kvp_header_check_size(
	const struct kvp_header *header, uint64_t body_bytes_max, struct kvp_fault *fault)
{
	if (header->body_bytes > body_bytes_max)
		return kvp_fault_set(fault, KV_TOO_LARGE, KVP_AT_BODY_BYTES, body_bytes_max,
			header->body_bytes, "body_bytes above the limit");
	return KV_OK;
}
