#include "proto/check.h"

#include "tests/lib/check_frame.h"
#include "tests/lib/kv_test.h"

/* A golden frame changed at up to four places (frame offset, size, value), and the answer to it. */
struct patch {
	uint32_t at, size;
	uint64_t value;
};
struct refusal {
	const char *frame;
	struct patch patches[4];
	const struct kvp_caps *caps;
	enum kv_status status;
	uint32_t item, offset;
	uint64_t expected, got;
};

#define BASIC  &basic_caps
#define FULL   &full_caps
#define NOITEM KVP_NO_ITEM

static const struct refusal header_refusals[] = {
	/* Direction, opcode, session, items, payload of control operations. */
	{ "append_req", { { 8, 4, 5 } }, BASIC, KV_BAD_FRAME, NOITEM, 8, 4, 5 },
	{ "close_req", { { 6, 2, 0 } }, FULL, KV_UNSUPPORTED, NOITEM, 6, 0, 0 },
	{ "close_req", { { 6, 2, 80 } }, FULL, KV_UNSUPPORTED, NOITEM, 6, 0, 80 },
	{ "close_req", { { 6, 2, 3 } }, FULL, KV_UNSUPPORTED, NOITEM, 6, 0, 3 },
	{ "close_req", { { 6, 2, 48 } }, BASIC, KV_UNSUPPORTED, NOITEM, 6, 0, 48 },
	{ "close_req", { { 6, 2, 54 } }, FULL, KV_UNSUPPORTED, NOITEM, 6, 0, 54 },
	{ "update_slots_req", { { 0 } }, BASIC, KV_UNSUPPORTED, NOITEM, 6, 0, 64 },
	{ "decode_table_req", { { 0 } }, BASIC, KV_UNSUPPORTED, NOITEM, 6, 0, 65 },
	{ "fork_req", { { 0 } }, BASIC, KV_UNSUPPORTED, NOITEM, 6, 0, 38 },
	{ "close_req", { { 24, 8, 0 } }, BASIC, KV_BAD_ARG, NOITEM, 24, 1, 0 },
	{ "decode_req", { { 24, 8, 0 } }, BASIC, KV_BAD_ARG, NOITEM, 24, 1, 0 },
	{ "close_req", { { 32, 8, 32 }, { 44, 2, 1 } }, BASIC, KV_BAD_ARG, NOITEM, 44, 0, 1 },
	{ "truncate_req", { { 44, 2, 0 } }, BASIC, KV_BAD_ARG, NOITEM, 44, 1, 0 },
	{ "append_req", { { 44, 2, 0 } }, BASIC, KV_BAD_ARG, NOITEM, 44, 1, 0 },
	{ "open_req", { { 32, 8, 64 + 2049 } }, BASIC, KV_TOO_LARGE, NOITEM, 32, 2048, 2049 },
	{ "ping_req", { { 32, 8, 2049 } }, BASIC, KV_TOO_LARGE, NOITEM, 32, 2048, 2049 },
	/* HELLO */
	{ "hello_req", { { 64, 2, 2 } }, BASIC, KV_BAD_ARG, NOITEM, 64, 1, 2 },
	{ "hello_req", { { 64, 4, 0 } }, BASIC, KV_VERSION_UNSUPPORTED, NOITEM, 66, 1, 0 },
	{ "hello_req", { { 64, 2, 2 }, { 66, 2, 9 } }, BASIC, KV_VERSION_UNSUPPORTED, NOITEM, 64, 1, 2 },
	{ "hello_req", { { 32, 8, 0 }, { 40, 4, 0 } }, BASIC, KV_VERSION_UNSUPPORTED, NOITEM, 40, 1, 0 },
	{ "hello_full_req", { { 68, 2, 513 } }, BASIC, KV_BAD_ARG, NOITEM, 68, 512, 513 },
	{ "hello_full_req", { { 70, 2, 65 } }, BASIC, KV_BAD_ARG, NOITEM, 70, 64, 65 },
	{ "hello_full_req", { { 70, 2, 9 } }, BASIC, KV_BAD_ARG, NOITEM, 32, 15, 14 },
	{ "hello_full_req", { { 136, 1, 0x0A } }, BASIC, KV_BAD_ARG, NOITEM, 136, 0, 0x0A },
	{ "hello_full_req", { { 141, 1, 0xC3 } }, BASIC, KV_BAD_ARG, NOITEM, 141, 0, 0xC3 },
	/* PING */
	{ "ping_echo_req", { { 64, 8, 65473 } }, BASIC, KV_TOO_LARGE, NOITEM, 64, 65472, 65473 },
	{ "ping_echo_req", { { 64, 8, UINT64_MAX } }, BASIC, KV_TOO_LARGE, NOITEM, 64, 65472, UINT64_MAX },
	/* POOL_INFO */
	{ "pool_info_req", { { 64, 2, 65 } }, BASIC, KV_BAD_ARG, NOITEM, 64, 64, 65 },
	{ "pool_info_req", { { 64, 2, 5 } }, BASIC, KV_BAD_ARG, NOITEM, 32, 5, 4 },
	{ "pool_info_req", { { 66, 2, 6 } }, BASIC, KV_UNSUPPORTED, NOITEM, 66, 5, 6 },
	{ "pool_info_req", { { 130, 1, '/' } }, BASIC, KV_BAD_ARG, NOITEM, 130, 0, '/' },
	/* OPEN, ATTACH */
	{ "open_req", { { 64, 2, 65 } }, BASIC, KV_BAD_ARG, NOITEM, 64, 64, 65 },
	{ "open_req", { { 64, 2, 0 } }, BASIC, KV_BAD_ARG, NOITEM, 64, 1, 0 },
	{ "open_req", { { 66, 2, 129 } }, BASIC, KV_BAD_ARG, NOITEM, 66, 128, 129 },
	{ "open_req", { { 68, 2, 4 } }, BASIC, KV_BAD_ARG, NOITEM, 68, 3, 4 },
	{ "open_req", { { 70, 2, 2 } }, FULL, KV_UNSUPPORTED, NOITEM, 70, 1, 2 },
	{ "open_req", { { 70, 2, 1 } }, BASIC, KV_UNSUPPORTED, NOITEM, 70, 0, 1 },
	{ "open_req", { { 66, 2, 7 } }, BASIC, KV_BAD_ARG, NOITEM, 32, 11, 10 },
	{ "open_req", { { 128, 1, 0 } }, BASIC, KV_BAD_ARG, NOITEM, 128, 0, 0 },
	{ "open_req", { { 137, 1, 0xFF } }, BASIC, KV_BAD_ARG, NOITEM, 137, 0, 0xFF },
	{ "attach_req", { { 66, 2, 0 } }, BASIC, KV_BAD_ARG, NOITEM, 66, 1, 0 },
	{ "attach_req", { { 64, 2, 65 } }, BASIC, KV_BAD_ARG, NOITEM, 64, 64, 65 },
	/* TELL */
	{ "tell_req", { { 72, 4, 257 } }, BASIC, KV_BAD_ARG, NOITEM, 72, 256, 257 },
	{ "tell_req", { { 76, 4, 3 } }, BASIC, KV_UNSUPPORTED, NOITEM, 76, 1, 3 },
	/* READ */
	{ "update_slots_req", { { 68, 4, 0 } }, FULL, KV_BAD_ARG, NOITEM, 68, 1, 0 },
	{ "update_slots_req", { { 72, 4, 0 } }, FULL, KV_BAD_ARG, NOITEM, 72, 1, 0 },
	{ "update_slots_req", { { 80, 1, 9 } }, FULL, KV_UNSUPPORTED, NOITEM, 80, 16, 9 },
	{ "update_slots_req", { { 81, 1, 0 } }, FULL, KV_BAD_ARG, NOITEM, 81, 1, 0 },
	{ "update_slots_req", { { 84, 4, 1 } }, FULL, KV_UNSUPPORTED, NOITEM, 84, 0, 1 },
	{ "update_slots_req", { { 88, 8, UINT64_MAX } }, FULL, KV_BAD_ARG, NOITEM, 88, 0, UINT64_MAX },
	{ "update_slots_req", { { 104, 8, 32 } }, FULL, KV_BAD_ARG, NOITEM, 104, 64, 32 },
	{ "update_slots_req", { { 80, 1, 16 } }, FULL, KV_BAD_ARG, NOITEM, 120, 1, 0 },
	{ "decode_table_req", { { 68, 4, 0 } }, FULL, KV_BAD_ARG, NOITEM, 68, 256, 0 },
	{ "decode_table_req", { { 68, 4, 257 } }, FULL, KV_BAD_ARG, NOITEM, 68, 256, 257 },
	{ "decode_table_req", { { 72, 4, 0 } }, FULL, KV_BAD_ARG, NOITEM, 72, 1, 0 },
	{ "decode_table_req", { { 76, 4, 3 } }, FULL, KV_BAD_ARG, NOITEM, 76, 2, 3 },
	{ "decode_table_req", { { 76, 4, 0 } }, FULL, KV_BAD_ARG, NOITEM, 76, 2, 0 },
	{ "decode_table_req", { { 82, 1, 16 } }, FULL, KV_BAD_ARG, NOITEM, 82, 1, 16 },
	{ "decode_table_req", { { 83, 1, 5 } }, FULL, KV_UNSUPPORTED, NOITEM, 83, 16, 5 },
	{ "decode_table_req", { { 84, 4, 16 } }, FULL, KV_UNSUPPORTED, NOITEM, 84, 15, 16 },
	{ "decode_table_req", { { 88, 8, 1 } }, FULL, KV_BAD_ARG, NOITEM, 88, 64, 1 },
	{ "decode_table_req", { { 112, 4, 0xBF800000 } }, FULL, KV_BAD_ARG, NOITEM, 112, 0, 0xBF800000 },
	{ "read_req", { { 64, 8, 0 } }, BASIC, KV_BAD_ARG, NOITEM, 64, 1, 0 },
	{ "read_req", { { 76, 4, 0 } }, BASIC, KV_BAD_ARG, NOITEM, 76, 1, 0 },
	{ "read_req", { { 84, 4, 0 } }, BASIC, KV_BAD_ARG, NOITEM, 84, 1, 0 },
	{ "read_req", { { 80, 4, 0xFFFFFFFC } }, BASIC, KV_BAD_ARG, NOITEM, 80, 0xFFFFFFFE, 0xFFFFFFFF },
	{ "read_req", { { 88, 1, 4 } }, BASIC, KV_UNSUPPORTED, NOITEM, 88, 16, 4 },
	{ "read_req", { { 89, 1, 17 } }, BASIC, KV_UNSUPPORTED, NOITEM, 89, 16, 17 },
	{ "read_req", { { 88, 1, 0 } }, BASIC, KV_BAD_ARG, NOITEM, 88, 1, 0 },
	{ "read_req", { { 90, 2, 2 } }, FULL, KV_UNSUPPORTED, NOITEM, 90, 1, 2 },
	{ "read_req", { { 90, 2, 1 } }, BASIC, KV_UNSUPPORTED, NOITEM, 90, 0, 1 },
	{ "read_req", { { 32, 8, 16 }, { 40, 4, 16 } }, BASIC, KV_BAD_ARG, NOITEM, 40, 1, 0 },
	{ "read_req", { { 72, 4, 5 } }, BASIC, KV_BAD_ARG, NOITEM, 72, 6, 7 },
	{ "read_req", { { 72, 4, UINT32_MAX } }, BASIC, KV_BAD_ARG, NOITEM, 72, 6, 0x100000001 },
	/* 65472 payload bytes hold 1023 tokens of 2 layers x 16 x 2 bytes. */
	{ "read_req", { { 84, 4, 1024 } }, BASIC, KV_TOO_LARGE, NOITEM, 84, 1023, 1024 },
	/* TRUNCATE, FREE, FORK */
	{ "publish_req", { { 64, 8, 0 } }, FULL, KV_BAD_ARG, NOITEM, 64, 1, 0 },
	{ "publish_req", { { 72, 4, 0 } }, FULL, KV_BAD_ARG, NOITEM, 72, 1, 0 },
	{ "publish_req", { { 72, 4, UINT32_MAX } }, FULL, KV_BAD_ARG, NOITEM, 72, 1, UINT32_MAX },
	{ "publish_req", { { 72, 4, 3 } }, FULL, KV_BAD_ARG, NOITEM, 32, 18, 14 },
	{ "publish_req", { { 76, 2, 65 } }, FULL, KV_BAD_ARG, NOITEM, 76, 64, 65 },
	{ "publish_req", { { 78, 2, 65 } }, FULL, KV_BAD_ARG, NOITEM, 78, 64, 65 },
	{ "publish_req", { { 78, 2, 2 } }, FULL, KV_BAD_ARG, NOITEM, 32, 15, 14 },
	{ "publish_req", { { 80, 4, 1 } }, FULL, KV_UNSUPPORTED, NOITEM, 80, 0, 1 },
	{ "match_req", { { 80, 4, 4 } }, FULL, KV_UNSUPPORTED, NOITEM, 80, 3, 4 },
	{ "match_req", { { 80, 4, 1 } }, FULL, KV_BAD_ARG, NOITEM, 64, 0, 12 },
	{ "match_req", { { 64, 8, 0 } }, FULL, KV_BAD_ARG, NOITEM, 64, 1, 0 },
	{ "truncate_req", { { 64, 8, 0 } }, BASIC, KV_BAD_ARG, 0, 64, 1, 0 },
	{ "truncate_req", { { 96, 8, 7 } }, BASIC, KV_BAD_ARG, 1, 96, 0, 7 },
	{ "truncate_req", { { 116, 2, 1 } }, BASIC, KV_UNSUPPORTED, 1, 116, 0, 1 },
	{ "free_req", { { 64, 8, 0 } }, BASIC, KV_BAD_ARG, 0, 64, 1, 0 },
	{ "free_req", { { 84, 2, 2 } }, BASIC, KV_UNSUPPORTED, 0, 84, 0, 2 },
	{ "spill_req", { { 0 } }, BASIC, KV_UNSUPPORTED, NOITEM, 6, 0, 52 },
	{ "spill_req", { { 64, 8, 0 } }, FULL, KV_BAD_ARG, 0, 64, 1, 0 },
	{ "prefetch_req", { { 84, 2, 1 } }, FULL, KV_UNSUPPORTED, 0, 84, 0, 1 },
	{ "fork_req", { { 64, 8, 0 } }, FULL, KV_BAD_ARG, 0, 64, 1, 0 },
	{ "fork_req", { { 88, 8, 0 } }, FULL, KV_BAD_ARG, 0, 88, 1, 0 },
	{ "fork_req", { { 88, 8, 11 } }, FULL, KV_BAD_ARG, 0, 88, 1, 11 },
};

/* append_req: op struct at 64, items at 128 and 160, payload 384. decode_req: the same, payload 128.
 * append_decode_req: op struct at 64, item at 128, payload 256: K 0, V 64, Q 128. */
static const struct refusal rows_refusals[] = {
	{ "append_req", { { 68, 4, 0 } }, BASIC, KV_BAD_ARG, NOITEM, 68, 1, 0 },
	{ "decode_req", { { 68, 4, 2 } }, BASIC, KV_BAD_ARG, NOITEM, 68, 1, 2 },
	{ "append_decode_req", { { 68, 4, 2 } }, BASIC, KV_BAD_ARG, NOITEM, 68, 1, 2 },
	/* dtypes */
	{ "append_req", { { 80, 1, 4 } }, FULL, KV_UNSUPPORTED, NOITEM, 80, 16, 4 },
	{ "append_req", { { 81, 1, 255 } }, FULL, KV_UNSUPPORTED, NOITEM, 81, 16, 255 },
	{ "append_req", { { 80, 1, 0 } }, FULL, KV_BAD_ARG, NOITEM, 80, 1, 0 },
	{ "append_req", { { 81, 1, 0 } }, FULL, KV_BAD_ARG, NOITEM, 81, 1, 0 },
	{ "append_req", { { 80, 1, 16 } }, BASIC, KV_UNSUPPORTED, NOITEM, 80, 3, 16 },
	{ "append_req", { { 81, 1, 16 } }, BASIC, KV_UNSUPPORTED, NOITEM, 81, 3, 16 },
	{ "append_req", { { 82, 1, 1 } }, FULL, KV_BAD_ARG, NOITEM, 82, 0, 1 },
	{ "append_req", { { 83, 1, 3 } }, FULL, KV_BAD_ARG, NOITEM, 83, 0, 3 },
	{ "decode_req", { { 80, 1, 1 } }, FULL, KV_BAD_ARG, NOITEM, 80, 0, 1 },
	{ "decode_req", { { 81, 1, 16 } }, FULL, KV_BAD_ARG, NOITEM, 81, 0, 16 },
	{ "decode_req", { { 82, 1, 0 } }, FULL, KV_BAD_ARG, NOITEM, 82, 1, 0 },
	{ "decode_req", { { 82, 1, 16 } }, FULL, KV_BAD_ARG, NOITEM, 82, 1, 16 },
	{ "decode_req", { { 83, 1, 0 } }, FULL, KV_BAD_ARG, NOITEM, 83, 1, 0 },
	{ "decode_req", { { 83, 1, 5 } }, FULL, KV_UNSUPPORTED, NOITEM, 83, 16, 5 },
	/* flags */
	{ "decode_req", { { 84, 4, 16 } }, FULL, KV_UNSUPPORTED, NOITEM, 84, 15, 16 },
	{ "append_req", { { 84, 4, 1 } }, FULL, KV_BAD_ARG, NOITEM, 84, 0, 1 },
	{ "decode_req", { { 84, 4, 2 } }, BASIC, KV_UNSUPPORTED, NOITEM, 84, 0, 2 },
	{ "decode_req", { { 84, 4, 4 } }, BASIC, KV_UNSUPPORTED, NOITEM, 84, 0, 4 },
	{ "decode_req", { { 84, 4, 8 } }, BASIC, KV_UNSUPPORTED, NOITEM, 84, 0, 8 },
	/* offsets: present exactly when needed, multiples of 64 */
	{ "append_req", { { 88, 8, ABSENT } }, FULL, KV_BAD_ARG, NOITEM, 88, 0, ABSENT },
	{ "append_req", { { 96, 8, ABSENT } }, FULL, KV_BAD_ARG, NOITEM, 96, 0, ABSENT },
	{ "append_req", { { 104, 8, 0 } }, FULL, KV_BAD_ARG, NOITEM, 104, ABSENT, 0 },
	{ "append_req", { { 96, 8, 193 } }, FULL, KV_BAD_ARG, NOITEM, 96, 64, 193 },
	{ "decode_req", { { 88, 8, 0 } }, FULL, KV_BAD_ARG, NOITEM, 88, ABSENT, 0 },
	{ "decode_req", { { 96, 8, 0 } }, FULL, KV_BAD_ARG, NOITEM, 96, ABSENT, 0 },
	{ "decode_req", { { 104, 8, ABSENT } }, FULL, KV_BAD_ARG, NOITEM, 104, 0, ABSENT },
	/* scale (minus one, infinity, not a number), window, fingerprint */
	{ "decode_req", { { 112, 4, 0xBF800000 } }, FULL, KV_BAD_ARG, NOITEM, 112, 0, 0xBF800000 },
	{ "decode_req", { { 112, 4, 0x7F800000 } }, FULL, KV_BAD_ARG, NOITEM, 112, 0, 0x7F800000 },
	{ "decode_req", { { 112, 4, 0x7FC00001 } }, FULL, KV_BAD_ARG, NOITEM, 112, 0, 0x7FC00001 },
	{ "decode_req", { { 116, 4, 64 } }, BASIC, KV_UNSUPPORTED, NOITEM, 116, 0, 64 },
	{ "append_req", { { 80, 1, 16 } }, FULL, KV_BAD_ARG, NOITEM, 120, 1, 0 },
	{ "append_req", { { 81, 1, 16 } }, FULL, KV_BAD_ARG, NOITEM, 120, 1, 0 },
	{ "append_req", { { 120, 8, 5 } }, FULL, KV_FORMAT_MISMATCH, NOITEM, 120, FINGERPRINT, 5 },
	/* items */
	{ "append_req", { { 160, 8, 0 } }, FULL, KV_BAD_ARG, 1, 160, 1, 0 },
	{ "append_req", { { 160, 8, 7 } }, FULL, KV_BAD_ARG, 1, 160, 0, 7 },
	{ "append_req", { { 180, 2, 4 } }, FULL, KV_UNSUPPORTED, 1, 180, 3, 4 },
	{ "append_req", { { 180, 2, 1 } }, FULL, KV_BAD_ARG, 1, 168, 0, 5 },
	{ "append_req", { { 144, 4, 1 } }, FULL, KV_BAD_ARG, 0, 144, 0, 1 },
	{ "append_req", { { 168, 4, 0xFFFFFFFE } }, FULL, KV_BAD_ARG, 1, 168, 0xFFFFFFFE, 0xFFFFFFFF },
	{ "append_req", { { 168, 4, 0xFFFFFFFF } }, FULL, KV_BAD_ARG, 1, 168, 0xFFFFFFFE, 0x100000000 },
	{ "decode_req", { { 180, 2, 1 } }, FULL, KV_BAD_ARG, 1, 180, 0, 1 },
	{ "decode_req", { { 172, 4, 1 } }, FULL, KV_BAD_ARG, 1, 172, 0, 1 },
	{ "decode_req", { { 176, 4, 0 } }, FULL, KV_BAD_ARG, 1, 176, 1, 0 },
	{ "decode_req", { { 176, 4, 2 } }, BASIC, KV_BAD_ARG, 1, 176, 1, 2 },
	{ "decode_req", { { 176, 4, 9 } }, FULL, KV_BAD_ARG, 1, 176, 8, 9 },
	{ "decode_req", { { 176, 4, 5 } }, FULL, KV_BAD_ARG, 1, 176, 4, 5 },
	{ "append_decode_req", { { 136, 4, 2 }, { 144, 4, 5 } }, FULL, KV_BAD_ARG, 0, 144, 4, 5 },
	{ "append_decode_req", { { 144, 4, 0 } }, FULL, KV_BAD_ARG, 0, 144, 1, 0 },
	/* sums */
	{ "append_req", { { 72, 4, 2 } }, FULL, KV_BAD_ARG, NOITEM, 72, 3, 2 },
	{ "append_req", { { 140, 4, 0xFFFFFFFE } }, FULL, KV_BAD_ARG, NOITEM, 72, 0xFFFFFFFF, 3 },
	{ "decode_req", { { 76, 4, 3 } }, FULL, KV_BAD_ARG, NOITEM, 76, 2, 3 },
	{ "append_decode_req", { { 72, 4, 2 } }, FULL, KV_BAD_ARG, NOITEM, 72, 1, 2 },
	/* geometry: layers, segments inside the payload, no overlap */
	{ "append_req", { { 64, 4, 5 } }, FULL, KV_BAD_ARG, NOITEM, 64, 6, 7 },
	{ "append_req", { { 64, 4, UINT32_MAX } }, FULL, KV_BAD_ARG, NOITEM, 64, 6, 0x100000001 },
	{ "append_req", { { 88, 8, 256 } }, FULL, KV_BAD_ARG, NOITEM, 88, 192, 256 },
	{ "append_req", { { 96, 8, 0xFFFFFFFFFFFFFFC0 } }, FULL, KV_BAD_ARG, NOITEM, 96, 192,
		0xFFFFFFFFFFFFFFC0 },
	{ "append_req", { { 80, 1, 1 }, { 32, 8, 511 } }, FULL, KV_BAD_ARG, NOITEM, 88, 0, 0 },
	{ "append_req", { { 32, 8, 511 } }, FULL, KV_BAD_ARG, NOITEM, 96, 191, 192 },
	{ "append_req", { { 96, 8, 128 } }, FULL, KV_BAD_ARG, NOITEM, 96, 192, 128 },
	{ "append_req", { { 88, 8, 64 } }, FULL, KV_BAD_ARG, NOITEM, 96, 256, 192 },
	{ "append_decode_req", { { 104, 8, 0 } }, FULL, KV_BAD_ARG, NOITEM, 104, 64, 0 },
	{ "append_decode_req", { { 104, 8, 64 } }, FULL, KV_BAD_ARG, NOITEM, 104, 128, 64 },
	{ "decode_req", { { 32, 8, 128 } }, FULL, KV_BAD_ARG, NOITEM, 104, 0, 0 },
};

static void expect_refusals(const struct refusal *refusals, size_t n_refusals)
{
	for (size_t i = 0; i < n_refusals; i++) {
		const struct refusal *want = &refusals[i];
		uint8_t frame[GOLDEN_FRAME_BYTES_MAX] = { 0 };
		static struct checked out;
		struct kvp_fault fault = { .what = "accepted" };
		enum kv_scope scope = (enum kv_scope)kv_status_row(want->status)->scope;
		char text[256];

		golden_frame(want->frame, frame);
		/* The unchanged frame passes with everything served, so the change alone is what is refused.
		 */
		ck_assert_msg(check_frame(frame, &full_caps, &pool, &out, &fault) == KV_OK, "%s: %s",
			want->frame, fault.what);
		for (size_t n = 0; n < 4; n++)
			put(frame + want->patches[n].at, want->patches[n].size, want->patches[n].value);
		seal(frame);

		const enum kv_status status = check_frame(frame, want->caps, &pool, &out, &fault);

		kvp_fault_text(&fault, text, sizeof(text));
		ck_assert_msg(status == want->status && fault.status == status,
			"%s, case %zu: %s instead of %s (%s)", want->frame, i, kv_status_name(status),
			kv_status_name(want->status), text);
		if (want->status == KV_TOO_LARGE)
			scope = KV_SCOPE_REQUEST; /* these frames are sound */
		ck_assert_msg(fault.scope == scope, "%s, case %zu: scope", want->frame, i);
		ck_assert_msg(fault.item == want->item, "%s, case %zu: item %u (%s)", want->frame, i,
			fault.item, text);
		ck_assert_msg(
			fault.offset == want->offset, "%s, case %zu: offset (%s)", want->frame, i, text);
		ck_assert_msg(fault.expected == want->expected && fault.got == want->got,
			"%s, case %zu: values (%s)", want->frame, i, text);
		ck_assert_int_eq(check_frame(frame, want->caps, &pool, &out, NULL), want->status);
	}
}

/* Every rule on headers, control operations and READ refuses with its status, scope, item, offset and values.
 */
START_TEST(test_check_refusals)
{
	expect_refusals(header_refusals, sizeof(header_refusals) / sizeof(header_refusals[0]));
}
END_TEST

/* Every rule on row operations refuses with its status, scope, item, offset and values. */
START_TEST(test_check_rows_refusals)
{
	expect_refusals(rows_refusals, sizeof(rows_refusals) / sizeof(rows_refusals[0]));
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("check_refusals");
	TCase *tcase = tcase_create("check_refusals");

	tcase_add_test(tcase, test_check_refusals);
	tcase_add_test(tcase, test_check_rows_refusals);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
