#include "proto/message.h"

#include <string.h>

#include "proto/crc32c.h"

/* The longest struct on the wire; a short one is copied into that many zeros before it is read. */
#define WIRE_BYTES_MAX 64

/* Straight-line code per message: one store or load per field of its list. */
#define ENCODE_FIELD(m, type, name, off) kvp_put_##type(out + (off), msg->name);
#define DECODE_FIELD(m, type, name, off) msg->name = kvp_get_##type(in + (off));
#define DEFINE_CODEC(m, fields, bytes)                                                \
	_Static_assert((bytes) <= WIRE_BYTES_MAX, "raise WIRE_BYTES_MAX");            \
	void kvp_##m##_encode(const struct kvp_##m *msg, uint8_t out[bytes])          \
	{                                                                             \
		memset(out, 0, bytes);                                                \
		fields(ENCODE_FIELD, m)                                               \
	}                                                                             \
	void kvp_##m##_decode(const uint8_t *in, size_t n_bytes, struct kvp_##m *msg) \
	{                                                                             \
		uint8_t padded[WIRE_BYTES_MAX];                                       \
                                                                                      \
		if (n_bytes < (bytes)) {                                              \
			memset(padded, 0, sizeof(padded));                            \
			if (n_bytes > 0)                                              \
				memcpy(padded, in, n_bytes);                          \
			in = padded;                                                  \
		}                                                                     \
		fields(DECODE_FIELD, m)                                               \
	}
KVP_MESSAGE_MAP(DEFINE_CODEC)

/* The same lists as data. */
#define FIELD_ROW(m, type, name, off) \
	{ #name, KVP_WIRE_##type, sizeof(KVP_CTYPE_##type), off, offsetof(struct kvp_##m, name) },
#define DEFINE_FIELDS(m, fields, bytes) \
	static const struct kvp_field_row m##_fields[] = { fields(FIELD_ROW, m) };
KVP_MESSAGE_MAP(DEFINE_FIELDS)

static const struct kvp_message_row message_rows[] = {
#define MESSAGE_ROW(m, fields, bytes) { #m, bytes, sizeof(m##_fields) / sizeof(m##_fields[0]), m##_fields },
	KVP_MESSAGE_MAP(MESSAGE_ROW)
#undef MESSAGE_ROW
};

const struct kvp_message_row *kvp_message_row(enum kvp_message_id id)
{
	return &message_rows[id];
}

const struct kvp_field_row *kvp_message_field(enum kvp_message_id id, const char *name)
{
	const struct kvp_message_row *row = kvp_message_row(id);

	for (uint32_t field_idx = 0; field_idx < row->n_fields; field_idx++)
		if (strcmp(row->fields[field_idx].name, name) == 0)
			return &row->fields[field_idx];
	return NULL;
}

const char *kvp_wire_type_name(unsigned type)
{
	switch (type) {
	case KVP_WIRE_u8:
		return "u8";
	case KVP_WIRE_u16:
		return "u16";
	case KVP_WIRE_u32:
		return "u32";
	case KVP_WIRE_u64:
		return "u64";
	case KVP_WIRE_f32:
		return "f32";
	default:
		return "?";
	}
}

/* Length of a text of at most n_bytes_max, not ending inside a UTF-8 character. */
static size_t detail_length(const char *text, size_t n_bytes_max)
{
	size_t n_bytes = 0;

	while (n_bytes < n_bytes_max && text[n_bytes] != '\0')
		n_bytes++;
	if (text[n_bytes] == '\0')
		return n_bytes;
	/* Cut: text[n_bytes] is the first byte left out; go back while it continues a character. */
	while (n_bytes > 0 && ((uint8_t)text[n_bytes] & 0xC0) == 0x80)
		n_bytes--;
	return n_bytes;
}

size_t kvp_error_frame_encode(const struct kvp_header *request, const struct kvp_fault *fault,
	const char *detail, uint32_t retry_after_ms, uint8_t out[KVP_ERROR_FRAME_BYTES_MAX])
{
	char own_text[KVP_DETAIL_BYTES_MAX + 1];
	uint8_t *body = out + KVP_HEADER_BYTES;

	if (!detail) {
		kvp_fault_text(fault, own_text, sizeof(own_text));
		detail = own_text;
	}

	const size_t detail_bytes = detail_length(detail, KVP_DETAIL_BYTES_MAX);
	const struct kvp_frame_error error = {
		.status = fault->status,
		.scope = fault->scope,
		.item = fault->item,
		.offset = fault->offset,
		.expected = fault->expected,
		.got = fault->got,
		.detail_bytes = (uint16_t)detail_bytes,
		.retryable = kv_status_row(fault->status)->is_retryable,
	};
	struct kvp_header header = {
		.flags = KVP_FLAG_RESPONSE,
		.status = fault->status,
		.body_bytes = kvp_body_bytes(KVP_BYTES(frame_error), 0, KVP_ITEM_BYTES, detail_bytes),
		.op_bytes = KVP_BYTES(frame_error),
		.item_bytes = KVP_ITEM_BYTES,
		.retry_after_ms = retry_after_ms,
	};

	memset(body, 0, kvp_payload_start(KVP_BYTES(frame_error), 0, KVP_ITEM_BYTES));
	kvp_frame_error_encode(&error, body);
	memcpy(body + kvp_payload_start(KVP_BYTES(frame_error), 0, KVP_ITEM_BYTES), detail, detail_bytes);
	if (request) {
		header.opcode = request->opcode;
		header.request_id = request->request_id;
		header.session = request->session;
		if (request->flags & KVP_FLAG_BODY_CRC) {
			header.flags |= KVP_FLAG_BODY_CRC;
			header.body_crc = kvp_crc32c(0, body, header.body_bytes);
		}
	}
	kvp_header_encode(&header, out);
	return KVP_HEADER_BYTES + (size_t)header.body_bytes;
}
