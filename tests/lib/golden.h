/*
 * Golden frames: reads tests/golden/frames/<name>.hex, and text files of the source tree.
 *
 * A hex file is pairs of hex digits; `#` starts a comment that ends with the line. Paths count from the
 * source root: $KV_SOURCE_ROOT, or the working directory. Whatever is wrong with a file fails the test.
 */
#ifndef TESTS_LIB_GOLDEN_H
#define TESTS_LIB_GOLDEN_H

#include <check.h>
#include <ctype.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
	GOLDEN_FRAME_BYTES_MAX = 4096, /* the longest golden frame has 576 */
	GOLDEN_TEXT_BYTES_MAX = 256 * 1024,
};

/* The whole text of a file below the source root, NUL-terminated; the caller frees it. */
static inline char *golden_text(const char *name)
{
	const char *root = getenv("KV_SOURCE_ROOT");
	char path[1024];
	const int length = snprintf(path, sizeof(path), "%s/%s", root ? root : ".", name);

	ck_assert_int_gt(length, 0);
	ck_assert_uint_lt((size_t)length, sizeof(path));

	FILE *file = fopen(path, "rb");
	char *text = malloc(GOLDEN_TEXT_BYTES_MAX);

	ck_assert_msg(file != NULL, "cannot open %s", path);
	ck_assert_ptr_nonnull(text);

	const size_t n_bytes = fread(text, 1, GOLDEN_TEXT_BYTES_MAX - 1, file);

	ck_assert_msg(n_bytes > 0 && feof(file), "%s is empty or too long", path);
	fclose(file);
	text[n_bytes] = '\0';
	return text;
}

/* Hex text up to `end` (or its NUL) as bytes; returns how many. */
static inline size_t golden_parse(const char *text, const char *end, uint8_t *out, size_t n_bytes_max)
{
	size_t n_bytes = 0;

	while (*text != '\0' && (!end || text < end)) {
		if (*text == '#') {
			text += strcspn(text, "\n");
			continue;
		}
		if (isspace((unsigned char)*text)) {
			text++;
			continue;
		}
		ck_assert_msg(isxdigit((unsigned char)text[0]) && isxdigit((unsigned char)text[1]),
			"not a pair of hex digits: %.8s", text);
		ck_assert_uint_lt(n_bytes, n_bytes_max);

		const char pair[3] = { text[0], text[1], '\0' };

		out[n_bytes++] = (uint8_t)strtoul(pair, NULL, 16);
		text += 2;
	}
	return n_bytes;
}

/* Reads a golden frame; returns its bytes. */
static inline size_t golden_frame(const char *name, uint8_t out[GOLDEN_FRAME_BYTES_MAX])
{
	char path[256];

	snprintf(path, sizeof(path), "tests/golden/frames/%s.hex", name);

	char *text = golden_text(path);
	const size_t n_bytes = golden_parse(text, NULL, out, GOLDEN_FRAME_BYTES_MAX);

	free(text);
	ck_assert_uint_ge(n_bytes, 64);
	return n_bytes;
}

/* Every golden frame, for tests that walk all of them. A test compares the list with the folder. */
static const char *const golden_names[] = { "append_decode_reply", "append_decode_req", "append_reply",
	"append_req", "attach_reply", "attach_req", "busy_reply", "cancel_reply", "cancel_req", "close_reply",
	"close_req", "decode_reply", "decode_req", "decode_table_reply", "decode_table_req", "error_reply",
	"fork_reply", "fork_req", "free_reply", "free_req", "goaway", "hello_full_req", "hello_reply",
	"hello_req", "hello_version_reply", "match_req", "open_reply", "open_req", "ping_echo_reply",
	"ping_echo_req", "ping_reply", "ping_req", "pool_info_reply", "pool_info_req", "pool_info_rows_req",
	"prefetch_reply", "prefetch_req", "publish_reply", "publish_req", "read_reply", "read_req",
	"spill_reply", "spill_req", "tell_reply", "tell_req", "truncate_reply", "truncate_req",
	"update_slots_reply", "update_slots_req" };
#define GOLDEN_N_NAMES (sizeof(golden_names) / sizeof(golden_names[0]))

#endif
