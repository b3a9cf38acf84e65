#include "proto/check.h"

#include "proto/check_internal.h"

enum kv_status kvp_check_opcode(
	const struct kvp_header *header, const struct kvp_caps *caps, struct kvp_fault *fault)
{
	const struct kvp_opcode_row *row = kvp_opcode_row(header->opcode);
	const uint32_t items_max = caps->items_max < KVP_ITEMS_MAX ? caps->items_max : KVP_ITEMS_MAX;

	if (header->flags & KVP_FLAG_RESPONSE)
		return kvp_fault_set(fault, KV_BAD_FRAME, KVP_AT_FLAGS,
			header->flags & ~(uint32_t)KVP_FLAG_RESPONSE, header->flags,
			"a request has the RESPONSE flag");
	if (!row)
		return kvp_fault_set(
			fault, KV_UNSUPPORTED, KVP_AT_OPCODE, 0, header->opcode, "opcode is unknown");
	if (row->served_rule == KVP_SERVED_SERVER_SENT)
		return kvp_fault_set(fault, KV_UNSUPPORTED, KVP_AT_OPCODE, 0, header->opcode,
			"only the server sends this opcode");
	if (row->served_rule == KVP_SERVED_NOT_YET ||
		(row->served_rule == KVP_SERVED_FEATURE && !(caps->features & row->feature)))
		return kvp_fault_set(
			fault, KV_UNSUPPORTED, KVP_AT_OPCODE, 0, header->opcode, "opcode is not served");
	if (row->session_rule == KVP_SESSION_NEEDED && header->session == 0)
		return kvp_fault_set(
			fault, KV_BAD_ARG, KVP_AT_SESSION, 1, 0, "the operation needs a session handle");
	if (!row->has_items && header->n_items != 0)
		return kvp_fault_set(fault, KV_BAD_ARG, KVP_AT_N_ITEMS, 0, header->n_items,
			"the operation takes no items");
	if (row->has_items && header->n_items == 0)
		return kvp_fault_set(fault, KV_BAD_ARG, KVP_AT_N_ITEMS, 1, 0, "the operation needs items");
	if (header->n_items > items_max)
		return kvp_refuse_too_large(
			fault, KVP_AT_N_ITEMS, items_max, header->n_items, "n_items above items_max");

	const bool is_echo = header->opcode == KVP_OP_PING && header->op_bytes > 0;
	const bool is_control = row->payload_rule == KVP_PAYLOAD_CONTROL;

	if ((is_control || (header->opcode == KVP_OP_PING && !is_echo)) &&
		kvp_payload_bytes(header) > KVP_CONTROL_PAYLOAD_BYTES_MAX)
		return kvp_refuse_too_large(fault, KVP_AT_BODY_BYTES, KVP_CONTROL_PAYLOAD_BYTES_MAX,
			kvp_payload_bytes(header), "payload of a control operation above the limit");
	return KV_OK;
}

bool kvp_name_is_valid(const char *data, size_t n_bytes)
{
	for (size_t i = 0; i < n_bytes; i++) {
		const char c = data[i];

		if (!((c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') ||
			    c == '.' || c == '_' || c == ':' || c == '-'))
			return false;
	}
	return true;
}

/*
 * Length in bytes of the character at data[0], 0 when it is not UTF-8 or a control character. Names end up in
 * log lines, so C0, DEL and C1 are refused too.
 */
static size_t utf8_character(const uint8_t *data, size_t n_bytes)
{
	static const uint32_t smallest[5] = { 0, 0, 0x80, 0x800, 0x10000 };
	const uint8_t lead = data[0];

	if (lead < 0x80)
		return lead >= 0x20 && lead != 0x7F ? 1 : 0;

	size_t length = 2;

	if (lead < 0xC2 || lead > 0xF4)
		return 0;
	if (lead >= 0xE0)
		length = lead >= 0xF0 ? 4 : 3;
	if (length > n_bytes)
		return 0;

	uint32_t code = lead & (0x7FU >> length);

	for (size_t i = 1; i < length; i++) {
		if ((data[i] & 0xC0) != 0x80)
			return 0;
		code = code << 6 | (data[i] & 0x3FU);
	}
	if (code < smallest[length] || code > 0x10FFFF || (code >= 0xD800 && code <= 0xDFFF) ||
		(code >= 0x80 && code <= 0x9F))
		return 0;
	return length;
}

/* Cuts two texts that lie back to back at the start of the payload. Later bytes of the payload are ignored.
 */
static enum kv_status cut_texts(const struct kvp_header *header, const uint8_t *body, uint32_t first_bytes,
	uint32_t second_bytes, struct kvp_text *first, struct kvp_text *second, struct kvp_fault *fault)
{
	const char *payload =
		(const char *)body + kvp_payload_start(header->op_bytes, header->n_items, header->item_bytes);

	if (kvp_payload_bytes(header) < (uint64_t)first_bytes + second_bytes)
		return kvp_fault_set(fault, KV_BAD_ARG, KVP_AT_BODY_BYTES,
			(uint64_t)first_bytes + second_bytes, kvp_payload_bytes(header),
			"payload is shorter than its names");
	/* An empty text may lie behind the end of a frame without payload, so it points at the body's start.
	 */
	*first = (struct kvp_text){ first_bytes ? payload : (const char *)body, first_bytes };
	*second =
		(struct kvp_text){ second_bytes ? payload + first_bytes : (const char *)body, second_bytes };
	return KV_OK;
}

static enum kv_status check_name(const uint8_t *body, const struct kvp_text *name, struct kvp_fault *fault)
{
	for (uint32_t i = 0; i < name->n_bytes; i++)
		if (!kvp_name_is_valid(name->data + i, 1))
			return kvp_fault_set(fault, KV_BAD_ARG,
				(uint32_t)(KVP_HEADER_BYTES + ((const uint8_t *)name->data - body) + i), 0,
				(uint8_t)name->data[i], "a name has a character outside [A-Za-z0-9._:-]");
	return KV_OK;
}

static enum kv_status check_hello(const struct kvp_header *header, const uint8_t *body,
	struct kvp_request *request, struct kvp_fault *fault)
{
	struct kvp_hello_req *hello = &request->hello;

	kvp_hello_req_decode(body, header->op_bytes, hello);
	if (hello->proto_min > hello->proto_max)
		return kvp_refuse_op(header, fault, KV_BAD_ARG, KVP_AT(hello_req, proto_min),
			hello->proto_max, hello->proto_min, "proto_min above proto_max");
	if (hello->proto_max < KVP_PROTO_MIN)
		return kvp_refuse_op(header, fault, KV_VERSION_UNSUPPORTED, KVP_AT(hello_req, proto_max),
			KVP_PROTO_MIN, hello->proto_max, "the client's versions are older than the server's");
	if (hello->proto_min > KVP_PROTO_MAX)
		return kvp_refuse_op(header, fault, KV_VERSION_UNSUPPORTED, KVP_AT(hello_req, proto_min),
			KVP_PROTO_MAX, hello->proto_min, "the client's versions are newer than the server's");
	request->proto = hello->proto_max < KVP_PROTO_MAX ? hello->proto_max : KVP_PROTO_MAX;
	if (hello->token_bytes > KVP_TOKEN_BYTES_MAX)
		return kvp_refuse_op(header, fault, KV_BAD_ARG, KVP_AT(hello_req, token_bytes),
			KVP_TOKEN_BYTES_MAX, hello->token_bytes, "token_bytes above its limit");
	if (hello->name_bytes > KVP_CLIENT_NAME_BYTES_MAX)
		return kvp_refuse_op(header, fault, KV_BAD_ARG, KVP_AT(hello_req, name_bytes),
			KVP_CLIENT_NAME_BYTES_MAX, hello->name_bytes, "name_bytes above its limit");

	const enum kv_status status = cut_texts(header, body, hello->token_bytes, hello->name_bytes,
		&request->token, &request->client_name, fault);

	if (status != KV_OK)
		return status;

	const uint8_t *name = (const uint8_t *)request->client_name.data;
	size_t length;

	for (size_t i = 0; i < request->client_name.n_bytes; i += length) {
		length = utf8_character(name + i, request->client_name.n_bytes - i);
		if (length == 0)
			return kvp_fault_set(fault, KV_BAD_ARG,
				(uint32_t)(KVP_HEADER_BYTES + (name + i - body)), 0, name[i],
				"the client's name is not printable UTF-8");
	}
	return KV_OK;
}

static enum kv_status check_open(const struct kvp_header *header, const uint8_t *body,
	const struct kvp_caps *caps, struct kvp_request *request, struct kvp_fault *fault)
{
	struct kvp_open_req *open = &request->open;
	const bool is_attach = header->opcode == KVP_OP_ATTACH;

	kvp_open_req_decode(body, header->op_bytes, open);
	if (open->pool_name_bytes > KVP_POOL_NAME_BYTES_MAX)
		return kvp_refuse_op(header, fault, KV_BAD_ARG, KVP_AT(open_req, pool_name_bytes),
			KVP_POOL_NAME_BYTES_MAX, open->pool_name_bytes, "pool_name_bytes above its limit");
	if (open->pool_name_bytes == 0 && !is_attach)
		return kvp_refuse_op(header, fault, KV_BAD_ARG, KVP_AT(open_req, pool_name_bytes), 1, 0,
			"OPEN needs a pool name");
	if (open->session_name_bytes > KVP_SESSION_NAME_BYTES_MAX)
		return kvp_refuse_op(header, fault, KV_BAD_ARG, KVP_AT(open_req, session_name_bytes),
			KVP_SESSION_NAME_BYTES_MAX, open->session_name_bytes,
			"session_name_bytes above its limit");
	if (open->session_name_bytes == 0 && is_attach)
		return kvp_refuse_op(header, fault, KV_BAD_ARG, KVP_AT(open_req, session_name_bytes), 1, 0,
			"ATTACH needs a session name");
	if (open->priority > KVP_PRIORITY_MAX && !is_attach)
		return kvp_refuse_op(header, fault, KV_BAD_ARG, KVP_AT(open_req, priority), KVP_PRIORITY_MAX,
			open->priority, "priority above 3");
	if (open->flags & ~KVP_OPEN_FLAGS_KNOWN)
		return kvp_refuse_op(header, fault, KV_UNSUPPORTED, KVP_AT(open_req, flags),
			KVP_OPEN_FLAGS_KNOWN, open->flags, "a flag of the op struct is unknown");
	if ((open->flags & KVP_OPEN_CLIENT_TABLES) && !(caps->features & KVP_FEATURE_CLIENT_TABLES))
		return kvp_refuse_op(header, fault, KV_UNSUPPORTED, KVP_AT(open_req, flags), 0, open->flags,
			"CLIENT_TABLES is not served");

	enum kv_status status = cut_texts(header, body, open->pool_name_bytes, open->session_name_bytes,
		&request->pool_name, &request->session_name, fault);

	if (status == KV_OK)
		status = check_name(body, &request->pool_name, fault);
	if (status == KV_OK)
		status = check_name(body, &request->session_name, fault);
	return status;
}

static enum kv_status check_pool_info(const struct kvp_header *header, const uint8_t *body,
	struct kvp_request *request, struct kvp_fault *fault)
{
	struct kvp_pool_info_req *info = &request->pool_info;
	struct kvp_text none;

	kvp_pool_info_req_decode(body, header->op_bytes, info);
	if (info->pool_name_bytes > KVP_POOL_NAME_BYTES_MAX)
		return kvp_refuse_op(header, fault, KV_BAD_ARG, KVP_AT(pool_info_req, pool_name_bytes),
			KVP_POOL_NAME_BYTES_MAX, info->pool_name_bytes, "pool_name_bytes above its limit");
	if (info->what > KVP_POOL_INFO_V_BASIS)
		return kvp_refuse_op(header, fault, KV_UNSUPPORTED, KVP_AT(pool_info_req, what),
			KVP_POOL_INFO_V_BASIS, info->what, "what is unknown");

	const enum kv_status status =
		cut_texts(header, body, info->pool_name_bytes, 0, &request->pool_name, &none, fault);

	return status == KV_OK ? check_name(body, &request->pool_name, fault) : status;
}

static enum kv_status check_tell(const struct kvp_header *header, const uint8_t *body,
	const struct kvp_caps *caps, struct kvp_request *request, struct kvp_fault *fault)
{
	struct kvp_tell_req *tell = &request->tell;

	kvp_tell_req_decode(body, header->op_bytes, tell);
	if (tell->n_sequences_max > caps->items_max)
		return kvp_refuse_op(header, fault, KV_BAD_ARG, KVP_AT(tell_req, n_sequences_max),
			caps->items_max, tell->n_sequences_max, "n_sequences_max above items_max");
	if (tell->flags & ~(uint32_t)KVP_TELL_FLAGS_KNOWN)
		return kvp_refuse_op(header, fault, KV_UNSUPPORTED, KVP_AT(tell_req, flags),
			KVP_TELL_FLAGS_KNOWN, tell->flags, "a flag of the op struct is unknown");
	return KV_OK;
}

static enum kv_status check_ping(const struct kvp_header *header, const uint8_t *body,
	const struct kvp_caps *caps, struct kvp_request *request, struct kvp_fault *fault)
{
	uint64_t body_bytes;

	kvp_ping_req_decode(body, header->op_bytes, &request->ping);
	request->has_echo = header->op_bytes > 0;
	return kvp_ping_reply_size(&request->ping, caps->frame_bytes_max, &body_bytes, fault);
}

enum kv_status kvp_check_request(const struct kvp_header *header, const uint8_t *body,
	const struct kvp_caps *caps, struct kvp_request *request, struct kvp_fault *fault)
{
	const enum kv_status status = kvp_check_opcode(header, caps, fault);

	if (status != KV_OK)
		return status;
	request->opcode = header->opcode;
	request->n_items = header->n_items;
	request->has_echo = false;
	switch (header->opcode) {
	case KVP_OP_HELLO:
		return check_hello(header, body, request, fault);
	case KVP_OP_PING:
		return check_ping(header, body, caps, request, fault);
	case KVP_OP_CANCEL:
		kvp_cancel_req_decode(body, header->op_bytes, &request->cancel);
		return KV_OK;
	case KVP_OP_POOL_INFO:
		return check_pool_info(header, body, request, fault);
	case KVP_OP_OPEN:
	case KVP_OP_ATTACH:
		return check_open(header, body, caps, request, fault);
	case KVP_OP_CLOSE:
		return KV_OK;
	case KVP_OP_TELL:
		return check_tell(header, body, caps, request, fault);
	case KVP_OP_APPEND:
	case KVP_OP_DECODE:
	case KVP_OP_APPEND_DECODE:
		return kvp_check_rows(header, body, caps, request, fault);
	case KVP_OP_READ:
		return kvp_check_read(header, body, caps, request, fault);
	case KVP_OP_UPDATE_SLOTS:
		return kvp_check_slots(header, body, caps, request, fault);
	case KVP_OP_DECODE_TABLE:
		return kvp_check_table(header, body, caps, request, fault);
	case KVP_OP_PUBLISH:
	case KVP_OP_MATCH:
		return kvp_check_prefix(header, body, request, fault);
	case KVP_OP_TRUNCATE:
	case KVP_OP_FREE:
	case KVP_OP_FORK:
	case KVP_OP_PIN:
	case KVP_OP_UNPIN:
	case KVP_OP_SPILL:
	case KVP_OP_PREFETCH:
		return kvp_check_sequence_items(header, body, request, fault);
	default:
		return kvp_fault_set(
			fault, KV_UNSUPPORTED, KVP_AT_OPCODE, 0, header->opcode, "opcode is not served");
	}
}

enum kv_status kvp_check_body_crc(const struct kvp_header *header, uint32_t body_crc, struct kvp_fault *fault)
{
	if ((header->flags & KVP_FLAG_BODY_CRC) && header->body_crc != body_crc)
		return kvp_fault_set(fault, KV_BAD_CRC, KVP_AT_BODY_CRC, body_crc, header->body_crc,
			"CRC-32C of the body");
	return KV_OK;
}

enum kv_status kvp_check_reply(
	const struct kvp_header *header, uint64_t body_bytes_max, struct kvp_fault *fault)
{
	if (!(header->flags & KVP_FLAG_RESPONSE))
		return kvp_fault_set(fault, KV_BAD_FRAME, KVP_AT_FLAGS, header->flags | KVP_FLAG_RESPONSE,
			header->flags, "a reply lacks the RESPONSE flag");
	return kvp_header_check_size(header, body_bytes_max, fault);
}

bool kvp_segment_fits(uint64_t payload_bytes, uint64_t off, uint64_t n_bytes)
{
	return off % KVP_ALIGN_BYTES == 0 && off <= payload_bytes && n_bytes <= payload_bytes - off;
}

void kvp_tell_reply_layout(const struct kvp_tell_req *tell, uint32_t n_sequences, uint32_t n_layers,
	const struct kvp_caps *caps, struct kvp_tell_reply_layout *layout)
{
	const uint64_t per_sequence_bytes =
		tell->flags & KVP_TELL_PER_LAYER ? (uint64_t)n_layers * sizeof(uint32_t) : 0;
	uint32_t n_max = caps->items_max < KVP_ITEMS_MAX ? caps->items_max : KVP_ITEMS_MAX;

	if (n_max > tell->n_sequences_max)
		n_max = tell->n_sequences_max;
	/* At most 256 steps; a pool of 80 layers at the smallest frame bound needs about 75. */
	while (n_max > 0 &&
		kvp_body_bytes(KVP_BYTES(tell_reply), n_max, KVP_ITEM_BYTES, n_max * per_sequence_bytes) >
			caps->frame_bytes_max)
		n_max--;
	layout->n_sequences_max = n_max;
	if (n_sequences > n_max)
		n_sequences = n_max;
	layout->lengths.n_bytes = n_sequences * per_sequence_bytes;
	layout->lengths.off = layout->lengths.n_bytes > 0 ? 0 : KVP_ABSENT;
	layout->payload_start = kvp_payload_start(KVP_BYTES(tell_reply), n_sequences, KVP_ITEM_BYTES);
	layout->body_bytes =
		kvp_body_bytes(KVP_BYTES(tell_reply), n_sequences, KVP_ITEM_BYTES, layout->lengths.n_bytes);
}

enum kv_status kvp_ping_reply_size(const struct kvp_ping_req *ping, uint64_t frame_bytes_max,
	uint64_t *body_bytes, struct kvp_fault *fault)
{
	const uint64_t start = kvp_payload_start(KVP_BYTES(ping_reply), 0, KVP_ITEM_BYTES);

	if (ping->reply_payload_bytes > 0 &&
		(frame_bytes_max < start || ping->reply_payload_bytes > frame_bytes_max - start))
		return kvp_refuse_too_large(fault, KVP_HEADER_BYTES + KVP_AT(ping_req, reply_payload_bytes),
			frame_bytes_max < start ? 0 : frame_bytes_max - start, ping->reply_payload_bytes,
			"the reply would exceed frame_bytes_max");
	*body_bytes = kvp_body_bytes(KVP_BYTES(ping_reply), 0, KVP_ITEM_BYTES, ping->reply_payload_bytes);
	return KV_OK;
}

uint32_t kvp_pool_info_rows_fit(uint32_t row_bytes, uint32_t n_rows, uint64_t frame_bytes_max)
{
	const uint64_t start = kvp_payload_start(KVP_BYTES(pool_info_reply), 0, KVP_ITEM_BYTES);

	if (row_bytes == 0 || frame_bytes_max <= start)
		return 0;

	const uint64_t n_fit = (frame_bytes_max - start) / row_bytes;

	return n_fit < n_rows ? (uint32_t)n_fit : n_rows;
}
