/*
 * Fuzz target: 64 bytes as the header of a frame, through every check that needs no more than them, and the
 * error frame that answers a refusal.
 *
 * Input: mode, limits, 64 bytes of header, text of the answer. Bit 0 of the mode leaves the header as it is.
 */
#include "proto/check.h"
#include "tests/fuzz/fuzz.h"

#define DETAIL_BYTES_MAX 1024u

static const struct kvp_caps all_caps[] = {
	{ 0, KVP_FRAME_BYTES_MIN, 256, 1 },
	{ UINT32_MAX, KVP_FRAME_BYTES_DEFAULT, 256, 8 },
	{ KVP_FEATURE_ROTATED | KVP_FEATURE_NO_SINKS, KVP_FRAME_BYTES_MAX, 1, 1 },
	{ KVP_FEATURE_FORK, KVP_HELLO_BODY_BYTES_MAX, UINT32_MAX, UINT32_MAX },
};

/* The header's fields are known once its checksum is right. */
static bool is_read(enum kv_status status)
{
	return status != KV_BAD_MAGIC && status != KV_VERSION_UNSUPPORTED && status != KV_BAD_CRC;
}

/* A whole frame that the peer can read, about the fault and nothing else. */
static void check_answer(const struct kvp_header *request, const struct kvp_fault *fault, const char *detail)
{
	uint8_t *frame = fuzz_alloc(KVP_ERROR_FRAME_BYTES_MAX);
	struct kvp_frame_error error;
	struct kvp_header header;
	struct kvp_fault none;
	const size_t n_bytes = kvp_error_frame_encode(request, fault, detail, 7, frame);

	FUZZ_CHECK(n_bytes > KVP_HEADER_BYTES && n_bytes <= KVP_ERROR_FRAME_BYTES_MAX);
	FUZZ_CHECK(kvp_header_decode(frame, &header, &none) == KV_OK);
	FUZZ_CHECK(kvp_check_reply(&header, KVP_FRAME_BYTES_MIN, &none) == KV_OK);
	FUZZ_CHECK(header.body_bytes == n_bytes - KVP_HEADER_BYTES);
	FUZZ_CHECK(header.status == (uint32_t)fault->status && header.retry_after_ms == 7);
	FUZZ_CHECK(header.opcode == (request ? request->opcode : 0));
	FUZZ_CHECK(header.request_id == (request ? request->request_id : 0));
	FUZZ_CHECK(header.session == (request ? request->session : 0));
	if (request && request->flags & KVP_FLAG_BODY_CRC)
		FUZZ_CHECK(header.flags & KVP_FLAG_BODY_CRC &&
			header.body_crc ==
				kvp_crc32c(0, frame + KVP_HEADER_BYTES, (size_t)header.body_bytes));
	kvp_frame_error_decode(frame + KVP_HEADER_BYTES, header.op_bytes, &error);
	FUZZ_CHECK(error.status == (uint32_t)fault->status && error.scope == (uint32_t)fault->scope);
	FUZZ_CHECK(error.item == fault->item && error.offset == fault->offset);
	FUZZ_CHECK(error.expected == fault->expected && error.got == fault->got);
	FUZZ_CHECK(error.detail_bytes <= KVP_DETAIL_BYTES_MAX);
	FUZZ_CHECK(error.detail_bytes == kvp_payload_bytes(&header));
	if (detail) {
		FUZZ_CHECK(memcmp(frame + n_bytes - error.detail_bytes, detail, error.detail_bytes) == 0);
		/* Cut between two characters. */
		FUZZ_CHECK(error.detail_bytes == 0 || ((uint8_t)detail[error.detail_bytes] & 0xC0) != 0x80);
	}
	free(frame);
}

static void check_rest(const struct kvp_header *header, const struct kvp_caps *caps, const char *detail)
{
	struct kvp_fault fault = { 0 };
	enum kv_status status = kvp_header_check_size(header, caps->frame_bytes_max, &fault);

	FUZZ_CHECK((status == KV_OK) == (header->body_bytes <= caps->frame_bytes_max));
	if (status == KV_OK)
		status = kvp_check_opcode(header, caps, &fault);
	if (status != KV_OK) {
		/* What the header alone is refused for, it is refused for at one of its own fields. */
		fuzz_check_fault(&fault, status, 0);
		check_answer(header, &fault, detail);
	} else {
		const struct kvp_opcode_row *row = kvp_opcode_row(header->opcode);

		FUZZ_CHECK(row && header->n_items <= caps->items_max && header->n_items <= KVP_ITEMS_MAX);
		FUZZ_CHECK(row->session_rule != KVP_SESSION_NEEDED || header->session != 0);
		FUZZ_CHECK(row->has_items == (header->n_items > 0));
		FUZZ_CHECK(row->payload_rule == KVP_PAYLOAD_SLOT ||
			header->body_bytes <= KVP_STRUCTS_BYTES_MAX + 64 + KVP_CONTROL_PAYLOAD_BYTES_MAX);
	}
	status = kvp_check_reply(header, caps->frame_bytes_max, &fault);
	if (status != KV_OK)
		fuzz_check_fault(&fault, status, 0);
	status = kvp_check_body_crc(header, 0x12345678, &fault);
	if (status != KV_OK)
		fuzz_check_fault(&fault, status, 0);
	FUZZ_CHECK((status == KV_OK) ==
		(!(header->flags & KVP_FLAG_BODY_CRC) || header->body_crc == 0x12345678));
}

static void check_header(const uint8_t *bytes, const struct kvp_caps *caps, const char *detail)
{
	struct kvp_header header, untouched;
	struct kvp_fault fault = { 0 };
	uint8_t again[KVP_HEADER_BYTES];

	memset(&header, 0xA5, sizeof(header));
	memset(&untouched, 0xA5, sizeof(untouched));
	const enum kv_status status = kvp_header_decode(bytes, &header, &fault);

	FUZZ_CHECK(kvp_header_decode(bytes, &untouched, NULL) == status);
	if (status != KV_OK) {
		fuzz_check_fault(&fault, status, 0);
		FUZZ_CHECK((fault.scope == KV_SCOPE_CONN) == (status != KV_UNSUPPORTED));
		check_answer(is_read(status) ? &header : NULL, &fault, detail);
	}
	if (!is_read(status)) {
		memset(&untouched, 0xA5, sizeof(untouched));
		FUZZ_CHECK(memcmp(&header, &untouched, sizeof(header)) == 0);
		return;
	}
	/* Every byte of a header is a field. */
	kvp_header_encode(&header, again);
	FUZZ_CHECK(memcmp(again, bytes, sizeof(again)) == 0);
	if (status != KV_OK)
		return;
	FUZZ_CHECK(header.n_items <= KVP_ITEMS_MAX && header.op_bytes % KVP_OP_BYTES_UNIT == 0);
	FUZZ_CHECK(header.n_items == 0 || header.item_bytes >= KVP_ITEM_BYTES);
	FUZZ_CHECK(kvp_structs_bytes(header.op_bytes, header.n_items, header.item_bytes) <=
		KVP_STRUCTS_BYTES_MAX);
	FUZZ_CHECK(kvp_payload_bytes(&header) <= header.body_bytes);
	check_rest(&header, caps, detail);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
	struct fuzz_input input = { data, n_bytes };
	const uint8_t mode = fuzz_u8(&input);
	const struct kvp_caps *caps = &all_caps[fuzz_u8(&input) % (sizeof(all_caps) / sizeof(all_caps[0]))];
	char detail[DETAIL_BYTES_MAX + 1];
	uint8_t bytes[KVP_HEADER_BYTES];

	fuzz_bytes(&input, bytes, sizeof(bytes));
	const size_t n_detail = input.n_bytes < DETAIL_BYTES_MAX ? input.n_bytes : DETAIL_BYTES_MAX;

	fuzz_bytes(&input, detail, n_detail);
	detail[n_detail] = '\0';
	if (!(mode & 1))
		fuzz_mend_header(bytes);
	uint8_t *exact = fuzz_copy(bytes, sizeof(bytes));

	check_header(exact, caps, n_detail > 0 ? detail : NULL);
	free(exact);
	return 0;
}
