#include "proto/check.h"

#include <stdio.h>

#include "tests/lib/check_frame.h"
#include "tests/lib/kv_test.h"

static const struct kvp_geometry pool_without_packed = { 6, 2, 1, 16, 16, 128, FINGERPRINT, NULL, NULL };

/* Bounds that only some servers have: items_max, frame_bytes_max, no packed rows, the pool's window, a
 * reply's size. */
START_TEST(test_check_refusals_by_caps_and_pool)
{
	const struct kvp_caps one_item = { UINT32_MAX, 65536, 1, 8 };
	const struct kvp_caps short_frames = { UINT32_MAX, 383, 256, 8 };
	uint8_t frame[GOLDEN_FRAME_BYTES_MAX];
	static struct checked out;
	struct kvp_fault fault;

	golden_frame("append_req", frame);
	ck_assert_int_eq(check_frame(frame, &one_item, &pool, &out, &fault), KV_TOO_LARGE);
	ck_assert_int_eq(fault.scope, KV_SCOPE_REQUEST);
	ck_assert_uint_eq(fault.offset, 44);
	ck_assert_uint_eq(fault.expected, 1);
	ck_assert_int_eq(check_frame(frame, &short_frames, &pool, &out, &fault), KV_TOO_LARGE);
	ck_assert_int_eq(fault.scope, KV_SCOPE_CONN);
	ck_assert_uint_eq(fault.offset, 32);

	/* decode_reply has a body of 384. */
	golden_frame("decode_req", frame);
	ck_assert_int_eq(check_frame(frame, &short_frames, &pool, &out, &fault), KV_TOO_LARGE);
	ck_assert_int_eq(fault.scope, KV_SCOPE_REQUEST);
	ck_assert_uint_eq(fault.offset, 76);
	ck_assert_uint_eq(fault.expected, 383);
	ck_assert_uint_eq(fault.got, 384);

	put(frame + 116, 4, 129);
	seal(frame);
	ck_assert_int_eq(check_frame(frame, &full_caps, &pool_without_packed, &out, &fault), KV_BAD_ARG);
	ck_assert_uint_eq(fault.offset, 116);
	ck_assert_uint_eq(fault.expected, 128);
	ck_assert_int_eq(check_frame(frame, &full_caps, &pool, &out, &fault), KV_OK);
	put(frame + 116, 4, 128);
	seal(frame);
	ck_assert_int_eq(check_frame(frame, &full_caps, &pool_without_packed, &out, &fault), KV_OK);

	for (uint32_t at = 80; at <= 81; at++) {
		golden_frame("append_req", frame);
		put(frame + at, 1, KVP_DTYPE_PACKED);
		put(frame + 120, 8, FINGERPRINT);
		seal(frame);
		ck_assert_int_eq(
			check_frame(frame, &full_caps, &pool_without_packed, &out, &fault), KV_UNSUPPORTED);
		ck_assert_uint_eq(fault.offset, at);
	}
	for (uint32_t at = 88; at <= 89; at++) {
		golden_frame("read_req", frame);
		put(frame + at, 1, KVP_DTYPE_PACKED);
		seal(frame);
		ck_assert_int_eq(
			check_frame(frame, &full_caps, &pool_without_packed, &out, &fault), KV_UNSUPPORTED);
		ck_assert_uint_eq(fault.offset, at);
	}
}
END_TEST

/* Sizes that do not fit 64 bits are refused at the segment, not wrapped into small ones. */
START_TEST(test_check_sizes_do_not_wrap)
{
	/* 2^32 - 1 layers of 2^31 heads of dimension 2^31: any size above one token is beyond 2^64. */
	const struct kvp_geometry huge = { UINT32_MAX, 1U << 31, 1U << 31, 1U << 31, 1U << 31, 0, 0, NULL,
		NULL };
	uint8_t frame[GOLDEN_FRAME_BYTES_MAX];
	static struct checked out;
	struct kvp_fault fault;

	golden_frame("append_req", frame);
	ck_assert_int_eq(check_frame(frame, &full_caps, &huge, &out, &fault), KV_BAD_ARG);
	ck_assert_uint_eq(fault.offset, 88);
	ck_assert_uint_eq(fault.got, UINT64_MAX);
	golden_frame("decode_req", frame);
	ck_assert_int_eq(check_frame(frame, &full_caps, &huge, &out, &fault), KV_BAD_ARG);
	ck_assert_uint_eq(fault.offset, 104);
	ck_assert_int_eq(
		kvp_rows_reply_layout(&out.header, &out.request.rows, &huge, 65536, &out.rows_reply, &fault),
		KV_TOO_LARGE);
	ck_assert_int_eq(fault.scope, KV_SCOPE_REQUEST);
	ck_assert_uint_eq(fault.got, UINT64_MAX);
	golden_frame("read_req", frame);
	ck_assert_int_eq(check_frame(frame, &full_caps, &huge, &out, &fault), KV_TOO_LARGE);
	ck_assert_uint_eq(fault.expected, 0);
	ck_assert(!kvp_segment_fits(1024, 0xFFFFFFFFFFFFFFC0, 128));
	ck_assert(!kvp_segment_fits(1024, 64, UINT64_MAX));
	ck_assert(!kvp_segment_fits(1024, 960, 65));
	ck_assert(!kvp_segment_fits(1024, 32, 1));
	ck_assert(kvp_segment_fits(1024, 960, 64));
	ck_assert(kvp_segment_fits(1024, 1024, 0));
}
END_TEST

/* Segments and reply places of accepted frames, packed ones with rows of different length per layer included.
 */
START_TEST(test_check_segments)
{
	uint8_t frame[GOLDEN_FRAME_BYTES_MAX];
	static struct checked out;
	struct kvp_fault fault;

	golden_frame("append_decode_req", frame);
	ck_assert_int_eq(check_frame(frame, &basic_caps, &pool, &out, &fault), KV_OK);
	ck_assert_uint_eq(out.segments.k.off, 0);
	ck_assert_uint_eq(out.segments.k.n_bytes, 64);
	ck_assert_uint_eq(out.segments.v.off, 64);
	ck_assert_uint_eq(out.segments.v.n_bytes, 64);
	ck_assert_uint_eq(out.segments.q.off, 128);
	ck_assert_uint_eq(out.segments.q.n_bytes, 128);
	/* As in append_decode_reply. */
	ck_assert_uint_eq(out.rows_reply.payload_start, 128);
	ck_assert_uint_eq(out.rows_reply.out.off, 0);
	ck_assert_uint_eq(out.rows_reply.out.n_bytes, 128);
	ck_assert_uint_eq(out.rows_reply.lse.off, 128);
	ck_assert_uint_eq(out.rows_reply.lse.n_bytes, 8);
	ck_assert_uint_eq(out.rows_reply.body_bytes, 264);

	golden_frame("append_req", frame);
	put(frame + 80, 1, KVP_DTYPE_PACKED);
	put(frame + 81, 1, KVP_DTYPE_PACKED);
	put(frame + 120, 8, FINGERPRINT);
	seal(frame);
	ck_assert_int_eq(check_frame(frame, &full_caps, &pool, &out, &fault), KV_OK);
	ck_assert_uint_eq(out.segments.k.n_bytes, 3 * (12 + 14));
	ck_assert_uint_eq(out.segments.v.n_bytes, 3 * (20 + 20));
	ck_assert_uint_eq(out.segments.q.off, ABSENT);
	ck_assert_uint_eq(out.segments.q.n_bytes, 0);
	ck_assert_uint_eq(out.rows_reply.body_bytes, 128); /* as in append_reply */
	ck_assert_uint_eq(out.rows_reply.out.off, ABSENT);
	ck_assert_uint_eq(out.rows_reply.lse.off, ABSENT);

	/* An item without tokens is an append too: with no rows at all there are no segments. */
	put(frame + 72, 4, 0);
	put(frame + 140, 4, 0);
	put(frame + 172, 4, 0);
	put(frame + 88, 8, ABSENT);
	put(frame + 96, 8, ABSENT);
	seal(frame);
	ck_assert_int_eq(check_frame(frame, &full_caps, &pool, &out, &fault), KV_OK);
	ck_assert_uint_eq(out.segments.k.off, ABSENT);
	ck_assert_uint_eq(out.segments.v.off, ABSENT);
}
END_TEST

/* The two sizes that the protocol text tells: 32 sequences, 32 and 8 heads, d = 128, bf16, log-sum-exp. */
START_TEST(test_check_sizes_of_the_protocol_text)
{
	const struct kvp_geometry model = { 32, 32, 8, 128, 128, 0, 0, NULL, NULL };
	const struct kvp_header header = { .opcode = KVP_OP_APPEND_DECODE,
		.op_bytes = 64,
		.n_items = 32,
		.item_bytes = 32,
		.body_bytes = 394368 - 64 };
	const struct kvp_rows_req rows = { 0, 1, 32, 32, 3, 3, 3, 3, KVP_ROWS_LSE, 0, 65536, 131072, 0, 0,
		0 };
	struct kvp_segments segments;
	struct kvp_rows_reply_layout layout;

	ck_assert_int_eq(kvp_rows_check_payload(&header, &rows, &model, &segments, NULL), KV_OK);
	ck_assert_uint_eq(64 + kvp_payload_start(64, 32, 32) + segments.q.off + segments.q.n_bytes, 394368);
	ck_assert_int_eq(kvp_rows_reply_layout(&header, &rows, &model, 1048576, &layout, NULL), KV_OK);
	ck_assert_uint_eq(64 + layout.body_bytes, 267392);
	ck_assert_int_eq(kvp_rows_reply_layout(&header, &rows, &model, 267392 - 64, &layout, NULL), KV_OK);
	ck_assert_int_eq(
		kvp_rows_reply_layout(&header, &rows, &model, 267392 - 65, &layout, NULL), KV_TOO_LARGE);
}
END_TEST

/* The largest READ that fits is found exactly: one token more is refused, and the refusal says the number. */
START_TEST(test_check_read_fits_exactly)
{
	const struct kvp_header header = { .opcode = KVP_OP_READ, .op_bytes = 32 };
	static const uint8_t dtypes[][2] = { { 1, 1 }, { 3, 0 }, { 0, 2 }, { 16, 16 }, { 16, 0 }, { 1, 16 } };

	for (uint64_t frame_bytes_max = 60; frame_bytes_max < 4000; frame_bytes_max += 37)
		for (size_t i = 0; i < sizeof(dtypes) / sizeof(dtypes[0]); i++) {
			struct kvp_read_req read = { .sequence = 7,
				.n_layers = 2,
				.n_tokens = 1,
				.k_dtype = dtypes[i][0],
				.v_dtype = dtypes[i][1] };
			struct kvp_read_reply_layout layout;
			struct kvp_fault fault;
			uint32_t n_fit = 0;

			while (kvp_read_check(&header, &read, &pool, frame_bytes_max, &layout, &fault) ==
				KV_OK) {
				ck_assert_uint_le(layout.body_bytes, frame_bytes_max);
				n_fit = read.n_tokens++;
			}
			ck_assert_uint_eq(fault.expected, n_fit);
			ck_assert_uint_eq(fault.got, n_fit + 1);
			ck_assert_uint_eq(kvp_read_tokens_fit(&read, &pool, frame_bytes_max), n_fit);
		}
}
END_TEST

/* READ's reply: K, then V at the next multiple of 64; a side that is not wanted is absent. */
START_TEST(test_check_read_layout)
{
	const struct kvp_header header = { .opcode = KVP_OP_READ, .op_bytes = 32 };
	struct kvp_read_req read = { 7, 0, 2, 0, 3, KVP_DTYPE_PACKED, KVP_DTYPE_F16, 0 };
	struct kvp_read_reply_layout layout;

	ck_assert_int_eq(kvp_read_check(&header, &read, &pool, 65536, &layout, NULL), KV_OK);
	ck_assert_uint_eq(layout.payload_start, 64);
	ck_assert_uint_eq(layout.k.off, 0);
	ck_assert_uint_eq(layout.k.n_bytes, 78);
	ck_assert_uint_eq(layout.v.off, 128);
	ck_assert_uint_eq(layout.v.n_bytes, 192);
	ck_assert_uint_eq(layout.body_bytes, 64 + 128 + 192);
	read.k_dtype = KVP_DTYPE_NONE;
	ck_assert_int_eq(kvp_read_check(&header, &read, &pool, 65536, &layout, NULL), KV_OK);
	ck_assert_uint_eq(layout.k.off, ABSENT);
	ck_assert_uint_eq(layout.v.off, 0);
	ck_assert_uint_eq(layout.body_bytes, 64 + 192);
}
END_TEST

/* TELL is clipped by the request, by items_max and by the frame; PING and POOL_INFO by the frame. */
START_TEST(test_check_control_reply_sizes)
{
	const struct kvp_caps caps = { 0, 65536, 200, 1 };
	struct kvp_tell_req tell = { 0, 256, KVP_TELL_PER_LAYER };
	struct kvp_tell_reply_layout layout;
	struct kvp_ping_req ping = { 0 };
	uint64_t body_bytes;

	kvp_tell_reply_layout(&tell, 2, 3, &caps, &layout); /* as in tell_reply */
	ck_assert_uint_eq(layout.n_sequences_max, 200);
	ck_assert_uint_eq(layout.lengths.off, 0);
	ck_assert_uint_eq(layout.lengths.n_bytes, 24);
	ck_assert_uint_eq(layout.payload_start, 128);
	ck_assert_uint_eq(layout.body_bytes, 152);
	/* 80 layers: 352 bytes a sequence, so 186 of them leave 65536 - 32 - 186 * 352 = 32. */
	kvp_tell_reply_layout(&tell, 1000, 80, &caps, &layout);
	ck_assert_uint_eq(layout.n_sequences_max, 186);
	ck_assert_uint_eq(layout.body_bytes, 6016 + 186 * 320);
	tell.n_sequences_max = 5;
	tell.flags = 0;
	kvp_tell_reply_layout(&tell, 1000, 80, &caps, &layout);
	ck_assert_uint_eq(layout.n_sequences_max, 5);
	ck_assert_uint_eq(layout.lengths.off, ABSENT);
	ck_assert_uint_eq(layout.body_bytes, 32 + 5 * 32);
	tell.flags = KVP_TELL_PER_LAYER;
	kvp_tell_reply_layout(&tell, 1, UINT32_MAX, &caps, &layout);
	ck_assert_uint_eq(layout.n_sequences_max, 0);
	ck_assert_uint_eq(layout.body_bytes, 32);

	ck_assert_int_eq(kvp_ping_reply_size(&ping, 65536, &body_bytes, NULL), KV_OK);
	ck_assert_uint_eq(body_bytes, 16);
	ping.reply_payload_bytes = 65472;
	ck_assert_int_eq(kvp_ping_reply_size(&ping, 65536, &body_bytes, NULL), KV_OK);
	ck_assert_uint_eq(body_bytes, 65536);

	ck_assert_uint_eq(kvp_pool_info_rows_fit(256, 64, 65536), 64);
	ck_assert_uint_eq(kvp_pool_info_rows_fit(1024, 100, 65536), 63);
	ck_assert_uint_eq(kvp_pool_info_rows_fit(65473, 100, 65536), 0);
	ck_assert_uint_eq(kvp_pool_info_rows_fit(0, 100, 65536), 0);
}
END_TEST

/* Names and versions come out of accepted frames: texts point into the frame, the version is the common one.
 */
START_TEST(test_check_names)
{
	uint8_t frame[GOLDEN_FRAME_BYTES_MAX];
	static struct checked out;
	struct kvp_fault fault;

	golden_frame("hello_full_req", frame);
	ck_assert_int_eq(check_frame(frame, &basic_caps, &pool, &out, &fault), KV_OK);
	ck_assert_uint_eq(out.request.proto, 1);
	ck_assert_uint_eq(out.request.token.n_bytes, 6);
	ck_assert_ptr_eq(out.request.token.data, (const char *)frame + 128);
	ck_assert_mem_eq(out.request.client_name.data, "worker-1", 8);
	memcpy(frame + 134, "\xc3\xa9\xe2\x82\xac\xf0\x9f", 7); /* an euro sign, then half a character */
	ck_assert_int_eq(check_frame(frame, &basic_caps, &pool, &out, &fault), KV_BAD_ARG);
	ck_assert_uint_eq(fault.offset, 139);
	memcpy(frame + 134, "\xc3\xa9\xe2\x82\xac:-)", 8);
	ck_assert_int_eq(check_frame(frame, &basic_caps, &pool, &out, &fault), KV_OK);
	/* Overlong, surrogate, beyond Unicode, C1 control: not text. */
	static const char *const bad[] = { "\xc0\xafxxxxxx", "\xe0\x80\xafxxxxx", "\xed\xa0\x80xxxxx",
		"\xf4\x90\x80\x80xxxx", "\xf8\x90\x80\x80xxxx", "\xc2\x85xxxxxx", "\x80xxxxxxx",
		"\x7fxxxxxxx", "\xc3xxxxxxx" };
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		memcpy(frame + 134, bad[i], 8);
		ck_assert_int_eq(check_frame(frame, &basic_caps, &pool, &out, &fault), KV_BAD_ARG);
		ck_assert_uint_eq(fault.offset, 134);
	}
	/* A character that begins inside the frame and would end behind it. */
	memcpy(frame + 134, "xxxxxxx\xc3\xa9", 9);
	ck_assert_int_eq(check_frame(frame, &basic_caps, &pool, &out, &fault), KV_BAD_ARG);
	ck_assert_uint_eq(fault.offset, 141);
	golden_frame("attach_req", frame);
	ck_assert_int_eq(check_frame(frame, &basic_caps, &pool, &out, &fault), KV_OK);
	ck_assert_uint_eq(out.request.pool_name.n_bytes, 0);
	ck_assert_uint_eq(out.request.session_name.n_bytes, 6);
	ck_assert_mem_eq(out.request.session_name.data, "chat.7", 6);
	golden_frame("ping_echo_req", frame);
	ck_assert_int_eq(check_frame(frame, &basic_caps, &pool, &out, &fault), KV_OK);
	ck_assert(out.request.has_echo);
	golden_frame("ping_req", frame);
	ck_assert_int_eq(check_frame(frame, &basic_caps, &pool, &out, &fault), KV_OK);
	ck_assert(!out.request.has_echo);
	for (int c = 0; c < 256; c++) {
		const char byte = (char)c;

		ck_assert_int_eq(kvp_name_is_valid(&byte, 1),
			c != 0 &&
				strchr("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:-",
					c) != NULL);
	}
}
END_TEST

/* 256 items pass whatever their ids are; the same id twice is found wherever the two are. */
START_TEST(test_check_sequence_once_per_frame)
{
	static uint8_t frame[64 + 256 * 32];
	static struct checked out;
	struct kvp_fault fault;
	uint64_t seed = 0x5EED0004;
	const struct kvp_header header = {
		.opcode = KVP_OP_FREE, .session = 1, .n_items = 256, .item_bytes = 32, .body_bytes = 256 * 32
	};

	printf("test_check seed %llu\n", (unsigned long long)seed);
	kvp_header_encode(&header, frame);
	for (unsigned round = 0; round < 200; round++) {
		/* Strides that differ in few bits only, as well as random ids. */
		const bool is_random = round >= 56;
		const uint64_t stride = is_random ? kv_test_random(&seed) | 1 : 1ULL << round;
		const unsigned first = (unsigned)(kv_test_random(&seed) % 255);
		const unsigned second = first + 1 + (unsigned)(kv_test_random(&seed) % (255 - first));

		for (unsigned i = 0; i < 256; i++)
			put(frame + 64 + i * 32, 8, (i + 1) * stride);
		ck_assert_int_eq(check_frame(frame, &basic_caps, &pool, &out, &fault), KV_OK);
		memcpy(frame + 64 + second * 32, frame + 64 + first * 32, 8);
		ck_assert_int_eq(check_frame(frame, &basic_caps, &pool, &out, &fault), KV_BAD_ARG);
		ck_assert_uint_eq(fault.item, second);
		ck_assert_uint_eq(fault.expected, first);
		ck_assert_uint_eq(fault.offset, 64 + second * 32);
	}
}
END_TEST

/* A wrong body CRC closes the connection, but only where the flag says that there is one; replies need
 * RESPONSE. */
START_TEST(test_check_body_crc_and_replies)
{
	struct kvp_header header = { .flags = KVP_FLAG_BODY_CRC, .body_crc = 5, .body_bytes = 100 };
	struct kvp_fault fault;

	ck_assert_int_eq(kvp_check_body_crc(&header, 5, &fault), KV_OK);
	ck_assert_int_eq(kvp_check_body_crc(&header, 6, &fault), KV_BAD_CRC);
	ck_assert_uint_eq(fault.offset, 56);
	ck_assert_uint_eq(fault.expected, 6);
	ck_assert_uint_eq(fault.got, 5);
	ck_assert_int_eq(fault.scope, KV_SCOPE_CONN);
	header.flags = 0;
	ck_assert_int_eq(kvp_check_body_crc(&header, 6, &fault), KV_OK);
	ck_assert_int_eq(kvp_check_reply(&header, 100, &fault), KV_BAD_FRAME);
	ck_assert_uint_eq(fault.offset, 8);
	header.flags = KVP_FLAG_RESPONSE;
	ck_assert_int_eq(kvp_check_reply(&header, 100, &fault), KV_OK);
	ck_assert_int_eq(kvp_check_reply(&header, 99, &fault), KV_TOO_LARGE);
}
END_TEST

/* Golden frames with random bytes changed, in blocks of exactly their size: nothing is read beyond, every
 * refusal points into the frame, and what is accepted keeps the promises of check.h. */
START_TEST(test_check_mutated_frames)
{
	static uint8_t golden[GOLDEN_N_NAMES][GOLDEN_FRAME_BYTES_MAX];
	static struct checked out;
	uint64_t seed = 0x5EED0005;
	unsigned n_accepted = 0, n_refused = 0;

	printf("test_check seed %llu\n", (unsigned long long)seed);
	for (size_t i = 0; i < GOLDEN_N_NAMES; i++)
		golden_frame(golden_names[i], golden[i]);
	for (unsigned round = 0; round < 150000; round++) {
		uint8_t frame[GOLDEN_FRAME_BYTES_MAX];
		const struct kvp_caps *caps = round % 2 ? &full_caps : &basic_caps;
		struct kvp_fault fault = { .offset = UINT32_MAX };

		memcpy(frame, golden[kv_test_random(&seed) % GOLDEN_N_NAMES], sizeof(frame));
		if (round % 3)
			frame[8] &= (uint8_t)~KVP_FLAG_RESPONSE; /* replies as requests too */
		for (uint64_t n = kv_test_random(&seed) % 6; n > 0; n--)
			frame[kv_test_random(&seed) % (n % 2 ? 64 : 200)] =
				(uint8_t)(kv_test_random(&seed) >> (n % 3 ? 62 : 24));
		seal(frame);

		const uint64_t body_bytes = kvp_get_u64(frame + 32);
		const size_t n_bytes = 64 + (body_bytes <= 65536 ? (size_t)body_bytes : 0);
		uint8_t *exact = malloc(n_bytes);

		ck_assert_ptr_nonnull(exact);
		memset(exact, 0, n_bytes);
		memcpy(exact, frame, n_bytes < sizeof(frame) ? n_bytes : sizeof(frame));
		if (check_frame(exact, caps, &pool, &out, &fault) != KV_OK) {
			ck_assert_uint_lt(fault.offset, n_bytes);
			ck_assert(fault.item == KVP_NO_ITEM || fault.item < out.header.n_items);
			n_refused++;
		} else {
			ck_assert_uint_le(out.request.n_items, 256);
			ck_assert(kvp_opcode_row(out.request.opcode) != NULL);
			n_accepted++;
		}
		free(exact);
	}
	ck_assert_uint_gt(n_accepted, 5000);
	ck_assert_uint_gt(n_refused, 5000);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("check");
	TCase *tcase = tcase_create("check");

	tcase_set_timeout(tcase, 60);
	tcase_add_test(tcase, test_check_refusals_by_caps_and_pool);
	tcase_add_test(tcase, test_check_sizes_do_not_wrap);
	tcase_add_test(tcase, test_check_segments);
	tcase_add_test(tcase, test_check_sizes_of_the_protocol_text);
	tcase_add_test(tcase, test_check_read_fits_exactly);
	tcase_add_test(tcase, test_check_read_layout);
	tcase_add_test(tcase, test_check_control_reply_sizes);
	tcase_add_test(tcase, test_check_names);
	tcase_add_test(tcase, test_check_sequence_once_per_frame);
	tcase_add_test(tcase, test_check_body_crc_and_replies);
	tcase_add_test(tcase, test_check_mutated_frames);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
