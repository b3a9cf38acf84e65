#include "proto/message.h"

#include <dirent.h>
#include <stdio.h>

#include "proto/check.h"
#include "proto/crc32c.h"
#include "tests/lib/golden_cases.h"
#include "tests/lib/kv_test.h"

static void decode(enum kvp_message_id id, const uint8_t *in, size_t n_bytes, void *msg)
{
	switch (id) {
#define DECODE_CASE(m, fields, bytes)               \
	case KVP_MESSAGE_##m:                       \
		kvp_##m##_decode(in, n_bytes, msg); \
		break;
		KVP_MESSAGE_MAP(DECODE_CASE)
#undef DECODE_CASE
	default:
		ck_abort_msg("no such message");
	}
}

static void expect_fields(const char *frame, enum kvp_message_id id, const void *got, const void *want)
{
	const struct kvp_message_row *row = kvp_message_row(id);

	for (uint32_t i = 0; i < row->n_fields; i++) {
		const struct kvp_field_row *field = &row->fields[i];

		ck_assert_msg(memcmp((const char *)got + field->struct_offset,
				      (const char *)want + field->struct_offset, field->wire_bytes) == 0,
			"%s: field %s of %s", frame, field->name, row->name);
	}
}

/* Encoding the values of each golden frame gives its bytes, all of them. */
START_TEST(test_message_encode_gives_golden_bytes)
{
	for (size_t i = 0; i < GOLDEN_N_CASES; i++) {
		uint8_t want[GOLDEN_FRAME_BYTES_MAX];
		uint8_t got[GOLDEN_FRAME_BYTES_MAX];
		const size_t n_want = golden_frame(golden_cases[i].name, want);
		const size_t n_got = golden_build(&golden_cases[i], got);

		ck_assert_msg(
			n_got == n_want, "%s: %zu bytes instead of %zu", golden_cases[i].name, n_got, n_want);
		for (size_t at = 0; at < n_want; at++)
			ck_assert_msg(got[at] == want[at], "%s: byte %zu is %02x instead of %02x",
				golden_cases[i].name, at, got[at], want[at]);
	}
}
END_TEST

/* Decoding each golden frame gives every value of its header, op struct and items; requests and replies pass.
 */
START_TEST(test_message_decode_gives_golden_values)
{
	static const struct kvp_caps caps = { UINT32_MAX, 1048576, 256, 1 };

	for (size_t i = 0; i < GOLDEN_N_CASES; i++) {
		const struct golden_case *c = &golden_cases[i];
		uint8_t frame[GOLDEN_FRAME_BYTES_MAX];
		const uint8_t *body = frame + KVP_HEADER_BYTES;
		const size_t n_bytes = golden_frame(c->name, frame);
		struct kvp_header header;
		struct kvp_fault fault = { .what = "" };
		struct kvp_request request;
		uint64_t msg[16];

		ck_assert_msg(
			kvp_header_decode(frame, &header, &fault) == KV_OK, "%s: %s", c->name, fault.what);
		ck_assert_msg(header.opcode == c->header.opcode && header.flags == c->header.flags &&
				header.status == c->header.status &&
				header.request_id == c->header.request_id &&
				header.session == c->header.session &&
				header.body_bytes == c->header.body_bytes &&
				header.op_bytes == c->header.op_bytes &&
				header.n_items == c->header.n_items &&
				header.item_bytes == c->header.item_bytes &&
				header.deadline_us == c->header.deadline_us &&
				header.retry_after_ms == c->header.retry_after_ms &&
				header.body_crc == c->header.body_crc,
			"%s: header", c->name);
		ck_assert_uint_eq(header.body_bytes, n_bytes - KVP_HEADER_BYTES);
		if (c->op) {
			decode(c->op_id, body, header.op_bytes, msg);
			expect_fields(c->name, c->op_id, msg, c->op);
		}
		for (unsigned item = 0; item < header.n_items; item++) {
			decode(c->item_id, body + header.op_bytes + (size_t)item * header.item_bytes,
				header.item_bytes, msg);
			expect_fields(c->name, c->item_id, msg,
				(const char *)c->items + item * golden_struct_bytes[c->item_id]);
		}
		ck_assert_int_eq(
			kvp_check_body_crc(&header, kvp_crc32c(0, body, header.body_bytes), &fault), KV_OK);
		ck_assert_msg((header.flags & REPLY ? kvp_check_reply(&header, 1048576, &fault)
						    : kvp_check_request(&header, body, &caps, &request,
							      &fault)) == KV_OK,
			"%s: %s", c->name, fault.what);
	}
}
END_TEST

/* Every message of the protocol is in some golden frame, and every hex file has a case. */
START_TEST(test_message_golden_frames_are_complete)
{
	bool is_used[KVP_N_MESSAGES] = { false };
	unsigned n_files = 0;
	char path[1024];
	struct dirent *entry;

	for (size_t i = 0; i < GOLDEN_N_CASES; i++) {
		if (golden_cases[i].op)
			is_used[golden_cases[i].op_id] = true;
		if (golden_cases[i].items)
			is_used[golden_cases[i].item_id] = true;
	}
	for (int id = 0; id < KVP_N_MESSAGES; id++)
		ck_assert_msg(is_used[id], "no golden frame has %s",
			kvp_message_row((enum kvp_message_id)id)->name);

	const char *root = getenv("KV_SOURCE_ROOT");

	snprintf(path, sizeof(path), "%s/tests/golden/frames", root ? root : ".");

	DIR *dir = opendir(path);

	ck_assert_ptr_nonnull(dir);
	while ((entry = readdir(dir)) != NULL) {
		const size_t length = strlen(entry->d_name);
		bool is_listed = false;
		bool has_case = false;

		if (length < 5 || strcmp(entry->d_name + length - 4, ".hex") != 0)
			continue;
		entry->d_name[length - 4] = '\0';
		n_files++;
		for (size_t i = 0; i < GOLDEN_N_CASES; i++)
			has_case = has_case || strcmp(golden_cases[i].name, entry->d_name) == 0;
		for (size_t i = 0; i < GOLDEN_N_NAMES; i++)
			is_listed = is_listed || strcmp(golden_names[i], entry->d_name) == 0;
		ck_assert_msg(has_case && is_listed, "%s.hex is not checked", entry->d_name);
	}
	closedir(dir);
	ck_assert_uint_eq(n_files, GOLDEN_N_CASES);
	ck_assert_uint_eq(n_files, GOLDEN_N_NAMES);
}
END_TEST

/* Fields are aligned, ascending, apart from each other and inside the message, which is a multiple of 16
 * bytes. */
START_TEST(test_message_field_lists_are_sound)
{
	for (int id = 0; id < KVP_N_MESSAGES; id++) {
		const struct kvp_message_row *row = kvp_message_row((enum kvp_message_id)id);
		uint32_t end = 0;

		ck_assert_uint_eq(row->wire_bytes % 16, 0);
		for (uint32_t i = 0; i < row->n_fields; i++) {
			const struct kvp_field_row *field = &row->fields[i];

			ck_assert_msg(field->offset >= end && field->offset % field->wire_bytes == 0,
				"%s of %s overlaps or is not aligned", field->name, row->name);
			end = field->offset + field->wire_bytes;
			ck_assert_ptr_eq(kvp_message_field((enum kvp_message_id)id, field->name), field);
		}
		ck_assert_uint_le(end, row->wire_bytes);
		ck_assert_ptr_null(kvp_message_field((enum kvp_message_id)id, "nothing"));
	}
	ck_assert_uint_eq(KVP_AT(open_req, lease_ms), 8);
	ck_assert_uint_eq(KVP_BYTES(frame_error), 48);
}
END_TEST

/* Cut at any length a struct reads as if zeros followed; extended by any bytes it reads the same. */
START_TEST(test_message_short_and_long_structs)
{
	for (int id = 0; id < KVP_N_MESSAGES; id++) {
		const struct kvp_message_row *row = kvp_message_row((enum kvp_message_id)id);
		uint8_t wire[128];
		uint64_t whole[16];
		uint64_t got[16];

		memset(wire, 0xA5, sizeof(wire));
		decode((enum kvp_message_id)id, wire, row->wire_bytes, whole);
		decode((enum kvp_message_id)id, wire, sizeof(wire), got);
		expect_fields("long", (enum kvp_message_id)id, got, whole);
		for (size_t n_bytes = 0; n_bytes <= row->wire_bytes; n_bytes++) {
			uint8_t *cut =
				malloc(n_bytes + 1); /* own block: an over-read is seen by the sanitizer */
			uint8_t zero_filled[128] = { 0 };

			ck_assert_ptr_nonnull(cut);
			memcpy(cut, wire, n_bytes);
			memcpy(zero_filled, wire, n_bytes);
			decode((enum kvp_message_id)id, n_bytes ? cut : NULL, n_bytes, got);
			decode((enum kvp_message_id)id, zero_filled, row->wire_bytes, whole);
			expect_fields("short", (enum kvp_message_id)id, got, whole);
			free(cut);
		}
	}
}
END_TEST

/* Reads one table of PROTOCOL.md: `line` is that of its heading. Rows must follow each other without a gap.
 */
static void expect_table(const char *line, const struct kvp_message_row *row)
{
	unsigned n_bytes = 0;
	uint32_t end = 0;
	uint32_t n_fields = 0;
	char heading[64];

	ck_assert_int_eq(sscanf(line, "### `%63[a-z_]` (%u bytes)", heading, &n_bytes), 2);
	ck_assert_uint_eq(n_bytes, row->wire_bytes);
	line = strstr(line, "\n| --- |");
	ck_assert_ptr_nonnull(line);
	for (line = strchr(line + 1, '\n') + 1; line[0] == '|'; line = strchr(line, '\n') + 1) {
		unsigned off, count = 1;
		char type[16], name[64];

		ck_assert_msg(
			sscanf(line, "| %u | %15[a-z0-9[]%*[] ] | `%63[a-z_]` |", &off, type, name) == 3 ||
				sscanf(line, "| %u | %15[a-z0-9] | `%63[a-z_]` |", &off, type, name) == 3,
			"%s: cannot read %.60s", row->name, line);
		ck_assert_msg(off == end, "%s: %s at %u leaves a gap or overlaps", row->name, name, off);
		if (strchr(type, '['))
			ck_assert_int_eq(sscanf(strchr(type, '['), "[%u", &count), 1);
		end = off +
			count *
				(unsigned)(strncmp(type, "u16", 3) == 0        ? 2
						: strncmp(type, "u64", 3) == 0 ? 8
						: strncmp(type, "u8", 2) == 0  ? 1
									       : 4);
		if (strcmp(name, "reserved") == 0)
			continue;
		ck_assert_msg(n_fields < row->n_fields, "%s: %s is not in the code", row->name, name);

		const struct kvp_field_row *field = &row->fields[n_fields++];

		ck_assert_msg(strcmp(name, field->name) == 0 && off == field->offset && count == 1 &&
				strcmp(type, kvp_wire_type_name(field->type)) == 0,
			"%s: the text has %s %s at %u, the code %s at %u", row->name, type, name, off,
			field->name, field->offset);
	}
	ck_assert_msg(n_fields == row->n_fields, "%s: a field is missing in the text", row->name);
	ck_assert_msg(end == row->wire_bytes, "%s: the table ends at %u", row->name, end);
}

/* The byte tables of PROTOCOL.md are the lists of the code: same offsets, types and names, no byte left out.
 */
START_TEST(test_message_tables_of_the_protocol_text)
{
	char *text = golden_text("proto/PROTOCOL.md");

	for (int id = 0; id < KVP_N_MESSAGES; id++) {
		const struct kvp_message_row *row = kvp_message_row((enum kvp_message_id)id);
		char heading[64];

		snprintf(heading, sizeof(heading), "\n### `%s` (", row->name);

		const char *line = strstr(text, heading);

		ck_assert_msg(line != NULL, "no table of %s", row->name);
		expect_table(line + 1, row);
	}
	free(text);
}
END_TEST

/* The header's table in PROTOCOL.md has the offsets that the code uses. */
START_TEST(test_message_header_table_of_the_protocol_text)
{
	static const char *const rows[] = { "| 0 | u8[4] | `magic` |", "| 4 | u8 | `version` |",
		"| 5 | u8 | `header_length` |", "| 6 | u16 | `opcode` |", "| 8 | u32 | `flags` |",
		"| 12 | u32 | `status` |", "| 16 | u64 | `request_id` |", "| 24 | u64 | `session` |",
		"| 32 | u64 | `body_bytes` |", "| 40 | u32 | `op_bytes` |", "| 44 | u16 | `n_items` |",
		"| 46 | u16 | `item_bytes` |", "| 48 | u32 | `deadline_us` |",
		"| 52 | u32 | `retry_after_ms` |", "| 56 | u32 | `body_crc` |",
		"| 60 | u32 | `header_crc` |" };
	static const unsigned offsets[] = { KVP_AT_MAGIC, KVP_AT_VERSION, KVP_AT_HEADER_LENGTH, KVP_AT_OPCODE,
		KVP_AT_FLAGS, KVP_AT_STATUS, KVP_AT_REQUEST_ID, KVP_AT_SESSION, KVP_AT_BODY_BYTES,
		KVP_AT_OP_BYTES, KVP_AT_N_ITEMS, KVP_AT_ITEM_BYTES, KVP_AT_DEADLINE, KVP_AT_RETRY_AFTER,
		KVP_AT_BODY_CRC, KVP_AT_HEADER_CRC };
	char *text = golden_text("proto/PROTOCOL.md");
	const char *line = strstr(text, "### `header` (64 bytes)");

	ck_assert_ptr_nonnull(line);
	line = strchr(strstr(line, "\n| --- |") + 1, '\n') + 1;
	for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++, line = strchr(line, '\n') + 1) {
		ck_assert_msg(strncmp(line, rows[i], strlen(rows[i])) == 0, "expected %s", rows[i]);
		ck_assert_uint_eq(strtoul(rows[i] + 2, NULL, 10), offsets[i]);
	}
	ck_assert_int_ne(line[0], '|');
	free(text);
}
END_TEST

/* Walks a table of "| number | name | ..." below a heading and compares number and name with `expected`. */
static void expect_numbers(const char *heading, const char *const names[], const unsigned numbers[], size_t n)
{
	char *text = golden_text("proto/PROTOCOL.md");
	const char *line = strstr(text, heading);

	ck_assert_msg(line != NULL, "no heading %s", heading);
	line = strchr(strstr(line, "\n| --- |") + 1, '\n') + 1;
	for (size_t i = 0; i < n; i++, line = strchr(line, '\n') + 1) {
		char expected[96];

		snprintf(expected, sizeof(expected), "| %u | %s |", numbers[i], names[i]);
		ck_assert_msg(strncmp(line, expected, strlen(expected)) == 0, "expected %s, found %.40s",
			expected, line);
	}
	ck_assert_msg(line[0] != '|', "a row too many: %.40s", line);
	free(text);
}

/* The opcodes, dtypes and features of PROTOCOL.md are those of the code, with the dtypes' sizes. */
START_TEST(test_message_numbers_of_the_protocol_text)
{
#define NAME_3(name, a, b)                    #name,
#define NUMBER_3(name, number, b)             number,
#define NAME_7(name, a, b, c, d, e, f)        #name,
#define NUMBER_7(name, number, b, c, d, e, f) number,
	static const char *const opcode_names[] = { KVP_OPCODE_MAP(NAME_7) };
	static const unsigned opcode_numbers[] = { KVP_OPCODE_MAP(NUMBER_7) };
	static const char *const dtype_names[] = { "NONE | 0", "F32 | 4", "F16 | 2", "BF16 | 2",
		"PACKED | 0" };
	static const unsigned dtype_numbers[] = { KVP_DTYPE_MAP(NUMBER_3) };
	static const char *const features[] = { "WINDOW", "CLIENT_TABLES", "PACKED_INPUT", "EXACT_READ",
		"FORK", "PREFIX", "TIERS", "ROTATED", "NO_SINKS" };
	static const unsigned bits[] = { 0, 1, 2, 3, 4, 5, 6, 7, 8 };
	static const unsigned feature_values[] = { KVP_FEATURE_WINDOW, KVP_FEATURE_CLIENT_TABLES,
		KVP_FEATURE_PACKED_INPUT, KVP_FEATURE_EXACT_READ, KVP_FEATURE_FORK, KVP_FEATURE_PREFIX,
		KVP_FEATURE_TIERS, KVP_FEATURE_ROTATED, KVP_FEATURE_NO_SINKS };

	expect_numbers("\n### Opcodes", opcode_names, opcode_numbers,
		sizeof(opcode_names) / sizeof(opcode_names[0]));
	expect_numbers(
		"\n### dtypes", dtype_names, dtype_numbers, sizeof(dtype_names) / sizeof(dtype_names[0]));
	ck_assert_uint_eq(
		sizeof(dtype_numbers), sizeof(dtype_names) / sizeof(dtype_names[0]) * sizeof(unsigned));
	expect_numbers("\n## 7 ", features, bits, 9);
	for (unsigned i = 0; i < 9; i++)
		ck_assert_uint_eq(feature_values[i], 1U << i);
}
END_TEST

/* Each hex block of PROTOCOL.md is the start of the golden frame it names, and of what we encode; zeros
 * follow. */
START_TEST(test_message_hex_of_the_protocol_text)
{
	char *text = golden_text("proto/PROTOCOL.md");
	unsigned n_blocks = 0;

	for (const char *block = strstr(text, "```hex "); block;
		block = strstr(block, "```hex "), n_blocks++) {
		uint8_t shown[GOLDEN_FRAME_BYTES_MAX], golden[GOLDEN_FRAME_BYTES_MAX],
			built[GOLDEN_FRAME_BYTES_MAX];
		char name[64];
		size_t i = 0;

		ck_assert_int_eq(sscanf(block, "```hex %63s", name), 1);
		while (i < GOLDEN_N_CASES && strcmp(golden_cases[i].name, name) != 0)
			i++;
		ck_assert_msg(i < GOLDEN_N_CASES, "no golden frame %s", name);

		const char *end = strstr(block + 3, "```");
		const size_t n_shown = golden_parse(strchr(block, '\n'), end, shown, sizeof(shown));
		const size_t n_golden = golden_frame(name, golden);

		ck_assert_uint_eq(golden_build(&golden_cases[i], built), n_golden);
		ck_assert_uint_ge(n_shown, 64);
		ck_assert_uint_le(n_shown, n_golden);
		ck_assert_mem_eq(shown, golden, n_shown);
		ck_assert_mem_eq(shown, built, n_shown);
		for (size_t at = n_shown; at < n_golden; at++)
			ck_assert_uint_eq(golden[at], 0);
		block = end + 3;
	}
	ck_assert_uint_eq(n_blocks, 6);
	free(text);
}
END_TEST

/* A refusal becomes the golden error frame; a text of one's own, an empty one and a too long one have right
 * lengths. */
START_TEST(test_message_error_frames)
{
	const struct kvp_header request = { .opcode = 32, .request_id = 18, .session = HANDLE };
	const struct kvp_header busy = { .opcode = 33, .request_id = 19, .session = HANDLE };
	const struct kvp_header with_crc = { .opcode = 33, .flags = KVP_FLAG_BODY_CRC };
	uint8_t want[GOLDEN_FRAME_BYTES_MAX];
	uint8_t got[KVP_ERROR_FRAME_BYTES_MAX];
	char long_text[600];
	struct kvp_header header;
	struct kvp_frame_error error;
	struct kvp_fault fault;

	kvp_fault_set(&fault, KV_BAD_ARG, 168, 0, 5, "CREATE starts at position 0");
	fault.item = 1;
	ck_assert_uint_eq(
		golden_frame("error_reply", want), kvp_error_frame_encode(&request, &fault, NULL, 0, got));
	ck_assert_mem_eq(got, want, 204);
	kvp_fault_set(&fault, KV_BUSY_RETRY, 0, 0, 0, NULL);
	ck_assert_uint_eq(
		golden_frame("busy_reply", want), kvp_error_frame_encode(&busy, &fault, "", 25, got));
	ck_assert_mem_eq(got, want, 112);

	/* "a" and then characters of two bytes: byte 511 begins one that does not fit into 512. */
	long_text[0] = 'a';
	for (size_t i = 1; i < sizeof(long_text) - 1; i += 2)
		memcpy(long_text + i, "\xc3\xa4", 2);
	long_text[599] = '\0';
	ck_assert_uint_eq(kvp_error_frame_encode(NULL, &fault, long_text, 0, got), 64 + 64 + 511);
	ck_assert_int_eq(kvp_header_decode(got, &header, NULL), KV_OK);
	ck_assert_uint_eq(header.opcode, 0);
	ck_assert_uint_eq(header.request_id, 0);
	kvp_frame_error_decode(got + 64, header.op_bytes, &error);
	ck_assert_uint_eq(error.detail_bytes, 511);

	const size_t n_bytes = kvp_error_frame_encode(&with_crc, &fault, "x", 0, got);

	ck_assert_int_eq(kvp_header_decode(got, &header, NULL), KV_OK);
	ck_assert_uint_eq(header.flags, KVP_FLAG_RESPONSE | KVP_FLAG_BODY_CRC);
	ck_assert_uint_eq(header.body_crc, kvp_crc32c(0, got + 64, n_bytes - 64));
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("message");
	TCase *tcase = tcase_create("message");

	tcase_add_test(tcase, test_message_encode_gives_golden_bytes);
	tcase_add_test(tcase, test_message_decode_gives_golden_values);
	tcase_add_test(tcase, test_message_golden_frames_are_complete);
	tcase_add_test(tcase, test_message_field_lists_are_sound);
	tcase_add_test(tcase, test_message_short_and_long_structs);
	tcase_add_test(tcase, test_message_tables_of_the_protocol_text);
	tcase_add_test(tcase, test_message_header_table_of_the_protocol_text);
	tcase_add_test(tcase, test_message_numbers_of_the_protocol_text);
	tcase_add_test(tcase, test_message_hex_of_the_protocol_text);
	tcase_add_test(tcase, test_message_error_frames);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
