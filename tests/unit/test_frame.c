#include "proto/frame.h"

#include <stdio.h>
#include <string.h>

#include "proto/bytes.h"
#include "proto/crc32c.h"
#include "tests/lib/golden.h"
#include "tests/lib/kv_test.h"

/* Makes the header's CRC right again after a change. */
static void seal(uint8_t header[KVP_HEADER_BYTES])
{
	kvp_put_u32(header + 60, kvp_crc32c(0, header, 60));
}

/* The header of the golden APPEND_DECODE: op_bytes 64, one item of 32, body_bytes 384. */
static void good_header(uint8_t header[KVP_HEADER_BYTES])
{
	uint8_t frame[GOLDEN_FRAME_BYTES_MAX];

	golden_frame("append_decode_req", frame);
	memcpy(header, frame, KVP_HEADER_BYTES);
}

/* Each field is read from its place in the table: a header with different bytes everywhere. */
START_TEST(test_header_fields_have_their_places)
{
	const uint8_t bytes[60] = { 0x54, 0x4b, 0x56, 0x31, 1, 8, 0x21, 0x22, 0x07, 0x23, 0x24, 0x25, 0x31,
		0x32, 0x33, 0x34, 0x41, 0x42, 0x43, 0x44, 0x45, 0x46, 0x47, 0x48, 0x51, 0x52, 0x53, 0x54,
		0x55, 0x56, 0x57, 0x58, 0x61, 0x62, 0x63, 0x64, 0x65, 0x66, 0x67, 0x68, 0x10, 0x01, 0, 0,
		0x05, 0, 0x28, 0, 0x71, 0x72, 0x73, 0x74, 0x81, 0x82, 0x83, 0x84, 0x91, 0x92, 0x93, 0x94 };
	uint8_t in[KVP_HEADER_BYTES];
	uint8_t again[KVP_HEADER_BYTES];
	struct kvp_header header;
	struct kvp_fault fault;

	memcpy(in, bytes, sizeof(bytes));
	in[9] = 0; /* flags 0x25240007: unknown ones only above bit 15 */
	seal(in);
	ck_assert_int_eq(kvp_header_decode(in, &header, &fault), KV_OK);
	ck_assert_uint_eq(header.opcode, 0x2221);
	ck_assert_uint_eq(header.flags, 0x25240007);
	ck_assert_uint_eq(header.status, 0x34333231);
	ck_assert_uint_eq(header.request_id, 0x4847464544434241);
	ck_assert_uint_eq(header.session, 0x5857565554535251);
	ck_assert_uint_eq(header.body_bytes, 0x6867666564636261);
	ck_assert_uint_eq(header.op_bytes, 0x110);
	ck_assert_uint_eq(header.n_items, 5);
	ck_assert_uint_eq(header.item_bytes, 40);
	ck_assert_uint_eq(header.deadline_us, 0x74737271);
	ck_assert_uint_eq(header.retry_after_ms, 0x84838281);
	ck_assert_uint_eq(header.body_crc, 0x94939291);
	kvp_header_encode(&header, again);
	ck_assert_mem_eq(again, in, KVP_HEADER_BYTES);
}
END_TEST

/* A header changed at one place, and the answer to it. */
struct header_fault {
	uint32_t at;
	uint32_t size;
	uint64_t value;
	enum kv_status status;
	uint32_t offset;
	uint64_t expected;
	uint64_t got;
};
static const struct header_fault header_faults[] = {
	{ 0, 1, 0x55, KV_BAD_MAGIC, 0, 0x31564B54, 0x31564B55 },
	{ 3, 1, 0x32, KV_BAD_MAGIC, 0, 0x31564B54, 0x32564B54 },
	{ 4, 1, 0, KV_VERSION_UNSUPPORTED, 4, 1, 0 },
	{ 4, 1, 2, KV_VERSION_UNSUPPORTED, 4, 1, 2 },
	{ 5, 1, 7, KV_VERSION_UNSUPPORTED, 5, 8, 7 },
	{ 5, 1, 9, KV_VERSION_UNSUPPORTED, 5, 8, 9 },
	{ 40, 4, 65, KV_BAD_FRAME, 40, 16, 65 },
	{ 40, 4, 72, KV_BAD_FRAME, 40, 16, 72 },
	{ 44, 2, 257, KV_BAD_FRAME, 44, 256, 257 },
	{ 44, 2, 65535, KV_BAD_FRAME, 44, 256, 65535 },
	{ 46, 2, 31, KV_BAD_FRAME, 46, 32, 31 },
	{ 46, 2, 0, KV_BAD_FRAME, 46, 32, 0 },
	{ 46, 2, 12225, KV_BAD_FRAME, 40, 12288, 12289 },
	{ 40, 4, 12272, KV_BAD_FRAME, 40, 12288, 12304 },
	{ 40, 4, 0xFFFFFFF0, KV_BAD_FRAME, 40, 12288, 0x100000010 },
	{ 32, 8, 0, KV_BAD_FRAME, 32, 96, 0 },
	{ 32, 8, 95, KV_BAD_FRAME, 32, 96, 95 },
	{ 32, 8, 97, KV_BAD_FRAME, 32, 128, 97 },
	{ 32, 8, 127, KV_BAD_FRAME, 32, 128, 127 },
	{ 8, 4, 0x8, KV_UNSUPPORTED, 8, 7, 0x8 },
	{ 8, 4, 0xFFFF8002, KV_UNSUPPORTED, 8, 7, 0xFFFF8002 },
};
#define N_HEADER_FAULTS (sizeof(header_faults) / sizeof(header_faults[0]))

static void put(uint8_t *out, uint32_t size, uint64_t value)
{
	for (uint32_t i = 0; i < size; i++)
		out[i] = (uint8_t)(value >> 8 * i);
}

/* Each rule on the header's fields refuses with its status, scope, field offset, bound and value. */
START_TEST(test_header_refusals)
{
	for (size_t i = 0; i < N_HEADER_FAULTS; i++) {
		const struct header_fault *want = &header_faults[i];
		uint8_t in[KVP_HEADER_BYTES];
		struct kvp_header header = { .request_id = 99 };
		struct kvp_fault fault = { .status = KV_OK };

		good_header(in);
		put(in + want->at, want->size, want->value);
		seal(in);
		ck_assert_msg(kvp_header_decode(in, &header, &fault) == want->status, "case %zu: %s", i,
			kv_status_name(fault.status));
		ck_assert_int_eq(fault.status, want->status);
		ck_assert_int_eq(
			fault.scope, want->status == KV_UNSUPPORTED ? KV_SCOPE_REQUEST : KV_SCOPE_CONN);
		ck_assert_uint_eq(fault.item, KVP_NO_ITEM);
		ck_assert_msg(fault.offset == want->offset, "case %zu: offset %u", i, fault.offset);
		ck_assert_msg(fault.expected == want->expected, "case %zu: expected", i);
		ck_assert_msg(fault.got == want->got, "case %zu: got", i);
		ck_assert_ptr_nonnull(fault.what);
		/* Untouched before the CRC was right, filled afterwards. */
		ck_assert_uint_eq(header.request_id,
			want->status == KV_BAD_MAGIC || want->status == KV_VERSION_UNSUPPORTED ? 99 : 2);
		ck_assert_int_eq(kvp_header_decode(in, &header, NULL), want->status);
	}
}
END_TEST

/* The earlier rule wins: magic, version, header length, CRC, lengths, flags. */
START_TEST(test_header_order_of_validation)
{
	static const enum kv_status order[] = { KV_BAD_MAGIC, KV_VERSION_UNSUPPORTED, KV_VERSION_UNSUPPORTED,
		KV_BAD_CRC, KV_BAD_FRAME, KV_UNSUPPORTED, KV_OK };
	uint8_t in[KVP_HEADER_BYTES];
	uint8_t good[KVP_HEADER_BYTES];
	struct kvp_header header;
	struct kvp_fault fault;

	good_header(good);
	good_header(in);
	in[0] ^= 1;
	in[4] = 9;
	in[5] = 9;
	in[40] = 1;
	in[9] = 0x80;
	in[60] ^= 0xFF;
	for (size_t step = 0; step < sizeof(order) / sizeof(order[0]); step++) {
		ck_assert_int_eq(kvp_header_decode(in, &header, &fault), order[step]);
		switch (step) {
		case 0:
			in[0] = good[0];
			break;
		case 1:
			in[4] = good[4];
			break;
		case 2:
			ck_assert_uint_eq(fault.offset, 5);
			in[5] = good[5];
			break;
		case 3:
			ck_assert_uint_eq(fault.offset, 60);
			ck_assert_uint_eq(fault.got, kvp_get_u32(in + 60));
			seal(in);
			break;
		case 4:
			in[40] = good[40];
			seal(in);
			break;
		default:
			in[9] = good[9];
			seal(in);
		}
	}
}
END_TEST

/* No single flipped bit of a header goes unnoticed, and the output stays as it was. */
START_TEST(test_header_any_flipped_bit_is_refused)
{
	uint8_t in[KVP_HEADER_BYTES];

	good_header(in);
	for (unsigned bit = 0; bit < 8 * KVP_HEADER_BYTES; bit++) {
		struct kvp_header header = { .request_id = 99 };
		struct kvp_fault fault;

		in[bit / 8] ^= (uint8_t)(1 << bit % 8);
		ck_assert_int_ne(kvp_header_decode(in, &header, &fault), KV_OK);
		ck_assert_uint_eq(header.request_id, 99);
		ck_assert_int_eq(fault.scope, KV_SCOPE_CONN);
		in[bit / 8] ^= (uint8_t)(1 << bit % 8);
	}
}
END_TEST

/* The bounds themselves are allowed: 12 KiB of structs, 256 items, no items of any size, bodies that end just
 * right. */
START_TEST(test_header_bounds_are_inclusive)
{
	static const struct kvp_header headers[] = {
		{ .op_bytes = 0, .n_items = 0, .item_bytes = 0, .body_bytes = 0 },
		{ .op_bytes = 0, .n_items = 0, .item_bytes = 32, .body_bytes = 0 },
		{ .op_bytes = 12288, .n_items = 0, .item_bytes = 0, .body_bytes = 12288 },
		{ .op_bytes = 4096, .n_items = 256, .item_bytes = 32, .body_bytes = 12288 },
		{ .op_bytes = 0, .n_items = 256, .item_bytes = 48, .body_bytes = 12288 },
		{ .op_bytes = 16, .n_items = 0, .item_bytes = 65535, .body_bytes = 16 },
		{ .op_bytes = 16, .n_items = 1, .item_bytes = 33, .body_bytes = 49 },
		{ .op_bytes = 16, .n_items = 1, .item_bytes = 33, .body_bytes = 64 },
		{ .op_bytes = 16, .n_items = 1, .item_bytes = 33, .body_bytes = 65 },
		{ .op_bytes = 16, .n_items = 1, .item_bytes = 33, .body_bytes = UINT64_MAX },
		{ .op_bytes = 0, .n_items = 0, .item_bytes = 32, .body_bytes = 1 },
		{ .flags = 0xFFFF0007U },
	};

	for (size_t i = 0; i < sizeof(headers) / sizeof(headers[0]); i++) {
		uint8_t bytes[KVP_HEADER_BYTES];
		struct kvp_header header;

		kvp_header_encode(&headers[i], bytes);
		ck_assert_msg(kvp_header_decode(bytes, &header, NULL) == KV_OK, "case %zu", i);
	}
}
END_TEST

/* A body at the bound passes; one byte more is TOO_LARGE, closes the connection and names both sizes. */
START_TEST(test_header_size_limit)
{
	struct kvp_header header = { .body_bytes = 4096 };
	struct kvp_fault fault;

	ck_assert_int_eq(kvp_header_check_size(&header, KVP_HELLO_BODY_BYTES_MAX, &fault), KV_OK);
	header.body_bytes = 4097;
	ck_assert_int_eq(kvp_header_check_size(&header, KVP_HELLO_BODY_BYTES_MAX, &fault), KV_TOO_LARGE);
	ck_assert_int_eq(fault.scope, KV_SCOPE_CONN);
	ck_assert_uint_eq(fault.offset, 32);
	ck_assert_uint_eq(fault.expected, 4096);
	ck_assert_uint_eq(fault.got, 4097);
	header.body_bytes = UINT64_MAX;
	ck_assert_int_eq(kvp_header_check_size(&header, KVP_FRAME_BYTES_MAX, NULL), KV_TOO_LARGE);
}
END_TEST

/* payload_start rounds op struct and items up to 64; a frame without payload has no padding. */
START_TEST(test_frame_sizes)
{
	ck_assert_uint_eq(kvp_payload_start(0, 0, 0), 0);
	ck_assert_uint_eq(kvp_payload_start(16, 0, 32), 64);
	ck_assert_uint_eq(kvp_payload_start(64, 0, 32), 64);
	ck_assert_uint_eq(kvp_payload_start(64, 1, 32), 128);
	ck_assert_uint_eq(kvp_payload_start(64, 32, 32), 1088);
	ck_assert_uint_eq(kvp_payload_start(UINT32_MAX, UINT32_MAX, UINT32_MAX), 0xFFFFFFFF00000000);
	ck_assert_uint_eq(kvp_body_bytes(16, 0, 32, 0), 16);
	ck_assert_uint_eq(kvp_body_bytes(16, 0, 32, 1), 65);
	ck_assert_uint_eq(kvp_body_bytes(64, 1, 32, 0), 96);
	ck_assert_uint_eq(kvp_body_bytes(64, 1, 32, 256), 384);
	ck_assert_uint_eq(kvp_payload_bytes(&(struct kvp_header){
				  .op_bytes = 64, .n_items = 1, .item_bytes = 32, .body_bytes = 384 }),
		256);
	ck_assert_uint_eq(kvp_payload_bytes(&(struct kvp_header){
				  .op_bytes = 64, .n_items = 1, .item_bytes = 32, .body_bytes = 96 }),
		0);
	ck_assert_uint_eq(kvp_payload_bytes(&(struct kvp_header){
				  .op_bytes = 64, .n_items = 1, .item_bytes = 32, .body_bytes = 128 }),
		0);
}
END_TEST

/* dtype sizes are those of the table; NONE, PACKED and unknown numbers have none. */
START_TEST(test_frame_dtypes)
{
	ck_assert_uint_eq(kvp_dtype_bytes(1), 4);
	ck_assert_uint_eq(kvp_dtype_bytes(2), 2);
	ck_assert_uint_eq(kvp_dtype_bytes(3), 2);
	ck_assert_uint_eq(kvp_dtype_bytes(0), 0);
	ck_assert_uint_eq(kvp_dtype_bytes(16), 0);
	for (unsigned dtype = 0; dtype < 300; dtype++)
		ck_assert_int_eq(kvp_dtype_is_known(dtype), dtype <= 3 || dtype == 16);
	ck_assert_uint_eq(kvp_dtype_bytes(4), 0);
	ck_assert_uint_eq(kvp_dtype_bytes(257), 0);
}
END_TEST

/* Opcode numbers give their own row; numbers between and beyond give none. */
START_TEST(test_frame_opcodes)
{
	unsigned n_known = 0;

	for (unsigned number = 0; number < 70000; number++) {
		const struct kvp_opcode_row *row = kvp_opcode_row(number);

		if (!row) {
			ck_assert_str_eq(kvp_opcode_name(number), "UNKNOWN");
			continue;
		}
		ck_assert_uint_eq(row->number, number);
		ck_assert_str_eq(kvp_opcode_name(number), row->name);
		n_known++;
	}
	ck_assert_uint_eq(n_known, 24);
	ck_assert_ptr_null(kvp_opcode_row(80));
	ck_assert_str_eq(kvp_opcode_name(34), "APPEND_DECODE");
}
END_TEST

/* The text of a fault names status, cause, item, place and both values where they differ, and is cut to the
 * buffer. */
START_TEST(test_fault_text)
{
	struct kvp_fault fault;
	char text[256];
	char small[8];

	kvp_fault_set(&fault, KV_TOO_LARGE, 32, 1048576, 1179648, "body_bytes above the limit");
	ck_assert_uint_eq(kvp_fault_text(&fault, text, sizeof(text)), strlen(text));
	ck_assert_str_eq(
		text, "TOO_LARGE: body_bytes above the limit (offset 32, expected 1048576, got 1179648)");
	fault.item = 4294967294U;
	kvp_fault_text(&fault, text, sizeof(text));
	ck_assert_ptr_nonnull(strstr(text, "(item 4294967294, offset 32,"));
	ck_assert_uint_eq(kvp_fault_text(&fault, small, sizeof(small)), 7);
	ck_assert_str_eq(small, "TOO_LAR");
	small[0] = 'x';
	ck_assert_uint_eq(kvp_fault_text(&fault, small, 0), 0);
	ck_assert_int_eq(small[0], 'x');
	kvp_fault_set(&fault, KV_NOT_FOUND, 24, 0, 0, NULL);
	kvp_fault_text(&fault, text, sizeof(text));
	ck_assert_ptr_nonnull(strstr(text, "NOT_FOUND: not found"));
	ck_assert_ptr_null(strstr(text, "offset"));
	fault.item = 3;
	kvp_fault_text(&fault, text, sizeof(text));
	ck_assert_ptr_nonnull(strstr(text, " (item 3)"));
	ck_assert_int_eq(kvp_fault_set(NULL, KV_BUSY_RETRY, 0, 0, 0, ""), KV_BUSY_RETRY);
}
END_TEST

/* Random bytes with a right CRC: every refusal points into the header, every acceptance keeps the length
 * rules. */
START_TEST(test_header_random)
{
	uint64_t seed = 0x5EED0003;
	unsigned n_accepted = 0;
	unsigned n_refused = 0;
	uint8_t good[KVP_HEADER_BYTES];

	good_header(good);
	printf("test_frame seed %llu\n", (unsigned long long)seed);
	for (unsigned round = 0; round < 200000; round++) {
		uint8_t in[KVP_HEADER_BYTES];
		struct kvp_header header;
		struct kvp_fault fault;

		memcpy(in, good, sizeof(in));
		for (unsigned change = 0; change < 1 + round % 5; change++)
			in[6 + kv_test_random(&seed) % 54] = (uint8_t)(kv_test_random(&seed) >> 24);
		seal(in);
		if (kvp_header_decode(in, &header, &fault) != KV_OK) {
			ck_assert_uint_lt(fault.offset, KVP_HEADER_BYTES);
			ck_assert_int_ne(fault.status, KV_OK);
			n_refused++;
			continue;
		}
		n_accepted++;

		const uint64_t structs = header.op_bytes + (uint64_t)header.n_items * header.item_bytes;

		ck_assert_uint_le(structs, 12288);
		ck_assert_uint_le(structs, header.body_bytes);
		ck_assert_uint_le(kvp_payload_bytes(&header), header.body_bytes - structs);
		ck_assert_uint_eq(header.flags & 0xFFF8, 0);
	}
	/* Both sides of the branch above were really walked. */
	ck_assert_uint_gt(n_accepted, 1000);
	ck_assert_uint_gt(n_refused, 1000);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("frame");
	TCase *tcase = tcase_create("frame");

	tcase_add_test(tcase, test_header_fields_have_their_places);
	tcase_add_test(tcase, test_header_refusals);
	tcase_add_test(tcase, test_header_order_of_validation);
	tcase_add_test(tcase, test_header_any_flipped_bit_is_refused);
	tcase_add_test(tcase, test_header_bounds_are_inclusive);
	tcase_add_test(tcase, test_header_size_limit);
	tcase_add_test(tcase, test_frame_sizes);
	tcase_add_test(tcase, test_frame_dtypes);
	tcase_add_test(tcase, test_frame_opcodes);
	tcase_add_test(tcase, test_fault_text);
	tcase_add_test(tcase, test_header_random);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
