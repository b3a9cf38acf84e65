/*
 * The client's decoding of replies: golden replies as values, and every way in which a reply can contradict
 * its request.
 */
#include <stdio.h>

#include "proto/client/conn.h"
#include "proto/client/reply.h"
#include "tests/lib/golden.h"
#include "tests/lib/kv_test.h"

/* A request and a reply from the golden files, decoded as the client does. */
struct pair {
	uint8_t request[GOLDEN_FRAME_BYTES_MAX];
	uint8_t reply[GOLDEN_FRAME_BYTES_MAX];
	size_t reply_bytes;
	struct kvp_header request_header, reply_header;
	struct kvp_geometry geometry;
	struct tqkv_reply got; /* what it points to is gone */
	float lse[4];          /* the first of them */
	union tqkv_reply_op op;
	struct tqkv_error err;
	struct tqkv_reply_space space;
};

static void pair_load(struct pair *pair, const char *request, const char *reply)
{
	struct kvp_fault fault;

	memset(pair, 0, sizeof(*pair));
	pair->geometry = (struct kvp_geometry){
		.n_layers = 3, .q_heads = 2, .kv_heads = 1, .k_head_dim = 16, .v_head_dim = 16
	};
	golden_frame(request, pair->request);
	pair->reply_bytes = golden_frame(reply, pair->reply);
	ck_assert_int_eq(kvp_header_decode(pair->request, &pair->request_header, &fault), KV_OK);
	ck_assert_int_eq(kvp_header_decode(pair->reply, &pair->reply_header, &fault), KV_OK);
	ck_assert_int_eq(kvp_check_reply(&pair->reply_header, GOLDEN_FRAME_BYTES_MAX, &fault), KV_OK);
}

/* Decodes from memory of exactly the right size, so that a sanitizer sees one byte too many. */
static enum tqkv_status pair_decode(struct pair *pair)
{
	const size_t body_bytes = (size_t)pair->reply_header.body_bytes;
	uint8_t *body = malloc(body_bytes ? body_bytes : 1);
	const struct tqkv_asked asked = {
		.header = &pair->request_header,
		.body = pair->request + KVP_HEADER_BYTES,
		.geometry = &pair->geometry,
	};
	enum tqkv_status status;

	memcpy(body, pair->reply + KVP_HEADER_BYTES, body_bytes);
	memset(&pair->got, 0, sizeof(pair->got));
	memset(&pair->err, 0, sizeof(pair->err));
	status = tqkv_reply_decode(
		&asked, &pair->reply_header, body, &pair->space, &pair->got, &pair->op, &pair->err);
	if (status == TQKV_OK && pair->got.lse) {
		const size_t n_bytes = (size_t)(body + body_bytes - (const uint8_t *)pair->got.lse);

		memcpy(pair->lse, pair->got.lse, n_bytes < sizeof(pair->lse) ? n_bytes : sizeof(pair->lse));
	}
	free(body);
	return status;
}

/* Field `at` of the reply's body set to a value of n_bytes bytes: the reply must be refused as malformed. */
static void expect_refused(struct pair *pair, uint32_t at, uint64_t value, uint32_t n_bytes)
{
	uint8_t saved[8];

	memcpy(saved, pair->reply + KVP_HEADER_BYTES + at, n_bytes);
	for (uint32_t i = 0; i < n_bytes; i++)
		pair->reply[KVP_HEADER_BYTES + at + i] = (uint8_t)(value >> (8 * i));
	ck_assert_msg(pair_decode(pair) == TQKV_BAD_FRAME, "offset %u, value %llu was accepted", at,
		(unsigned long long)value);
	ck_assert(pair->err.is_local);
	ck_assert_str_ne(pair->err.message, "");
	memcpy(pair->reply + KVP_HEADER_BYTES + at, saved, n_bytes);
}

/* APPEND's golden reply: one item stored, one refused with POSITION and the length that was expected, times.
 */
START_TEST(test_client_reply_append)
{
	struct pair pair;

	pair_load(&pair, "append_req", "append_reply");
	ck_assert_int_eq(pair_decode(&pair), TQKV_OK);
	ck_assert_uint_eq(pair.got.n_items, 2);
	ck_assert_uint_eq(pair.got.n_ok, 1);
	ck_assert_uint_eq(pair.got.n_failed, 1);
	ck_assert_uint_eq(pair.got.items[0].sequence, 7);
	ck_assert_uint_eq(pair.got.items[0].n_tokens, 2);
	ck_assert_int_eq(pair.got.items[1].status, TQKV_POSITION);
	ck_assert_uint_eq(pair.got.items[1].length, 4);
	ck_assert_uint_eq(pair.got.timings.kernel_us, 40);
	ck_assert_uint_eq(pair.got.timings.total_us, 105);
	expect_refused(&pair, 0, 2, 4);       /* n_ok */
	expect_refused(&pair, 4, 0, 4);       /* n_failed */
	expect_refused(&pair, 8, 1, 4);       /* n_q_total */
	expect_refused(&pair, 64, 6, 8);      /* sequence of item 0 */
	expect_refused(&pair, 64 + 12, 1, 4); /* n_tokens: neither all nor 0 */
	expect_refused(&pair, 96 + 12, 1, 4); /* n_tokens of a failed item */
	expect_refused(&pair, 64 + 16, 1, 4); /* q_len of an append */
	expect_refused(&pair, 96 + 20, 7, 2); /* a status that is neither OK nor an error */
	expect_refused(&pair, 96 + 20, 0, 2); /* OK without tokens */
	pair.reply_header.n_items = 1;
	ck_assert_int_eq(pair_decode(&pair), TQKV_BAD_FRAME);
	pair.reply_header.n_items = 2;
	pair.reply_header.session ^= 1;
	ck_assert_int_eq(pair_decode(&pair), TQKV_BAD_FRAME);
	pair.reply_header.session ^= 1;
	pair.reply_header.op_bytes = 0;
	ck_assert_int_eq(pair_decode(&pair), TQKV_BAD_FRAME);
}
END_TEST

/* APPEND_DECODE's golden reply: outputs, log-sum-exps (ln 65), and offsets that leave the payload in every
 * way. */
START_TEST(test_client_reply_outputs)
{
	struct pair pair;

	pair_load(&pair, "append_decode_req", "append_decode_reply");
	ck_assert_int_eq(pair_decode(&pair), TQKV_OK);
	ck_assert_uint_eq(pair.got.n_q_total, 1);
	ck_assert_uint_eq(pair.got.out_bytes, 128);
	ck_assert_ptr_nonnull(pair.got.lse);
	ck_assert_uint_eq((size_t)((const uint8_t *)pair.got.lse - (const uint8_t *)pair.got.out), 128);
	expect_refused(&pair, 8, 2, 4);           /* n_q_total */
	expect_refused(&pair, 12, 3, 1);          /* out_dtype */
	expect_refused(&pair, 16, UINT64_MAX, 8); /* out absent */
	expect_refused(&pair, 16, 64, 8);         /* outputs end behind the payload */
	expect_refused(&pair, 16, 1, 8);          /* not a multiple of 64 */
	expect_refused(&pair, 16, 1ULL << 63, 8);
	expect_refused(&pair, 24, UINT64_MAX, 8); /* lse absent though asked for */
	expect_refused(&pair, 24, 192, 8);
	expect_refused(&pair, 64 + 16, 0, 4); /* q_len of an item that is OK */
	/* More query heads than the payload has room for. */
	pair.geometry.q_heads = 3;
	ck_assert_int_eq(pair_decode(&pair), TQKV_BAD_FRAME);
	pair.geometry.q_heads = 2;
	/* A payload cut short. */
	pair.reply_header.body_bytes -= 8;
	ck_assert_int_eq(pair_decode(&pair), TQKV_BAD_FRAME);
}
END_TEST

/* DECODE, TRUNCATE, FREE, PING, CANCEL, CLOSE, ATTACH, OPEN, POOL_INFO: golden replies give the golden
 * values. */
START_TEST(test_client_reply_golden_values)
{
	struct pair pair;

	pair_load(&pair, "decode_req", "decode_reply");
	ck_assert_int_eq(pair_decode(&pair), TQKV_OK);
	ck_assert_uint_eq(pair.got.n_items, 2);
	ck_assert_uint_eq(pair.got.out_bytes, 2 * 2 * 16 * 4);
	pair_load(&pair, "truncate_req", "truncate_reply");
	ck_assert_int_eq(pair_decode(&pair), TQKV_OK);
	ck_assert_uint_eq(pair.got.n_items, 2);
	pair_load(&pair, "free_req", "free_reply");
	ck_assert_int_eq(pair_decode(&pair), TQKV_OK);
	ck_assert_uint_eq(pair.got.items[0].sequence, 7);
	pair_load(&pair, "spill_req", "spill_reply");
	ck_assert_int_eq(pair_decode(&pair), TQKV_OK);
	ck_assert_uint_eq(pair.got.items[1].status, TQKV_POOL_FULL);
	pair_load(&pair, "prefetch_req", "prefetch_reply");
	ck_assert_int_eq(pair_decode(&pair), TQKV_OK);
	pair_load(&pair, "ping_req", "ping_reply");
	ck_assert_int_eq(pair_decode(&pair), TQKV_OK);
	ck_assert_uint_eq(pair.op.ping.boot_id, 0x1122334455667788);
	pair_load(&pair, "ping_echo_req", "ping_echo_reply");
	ck_assert_int_eq(pair_decode(&pair), TQKV_OK);
	ck_assert_uint_eq(pair.got.payload_bytes, 8);
	pair.reply_header.body_bytes--;
	ck_assert_int_eq(pair_decode(&pair), TQKV_BAD_FRAME);
	pair_load(&pair, "cancel_req", "cancel_reply");
	ck_assert_int_eq(pair_decode(&pair), TQKV_OK);
	expect_refused(&pair, 0, 3, 4); /* outcome */
	pair_load(&pair, "close_req", "close_reply");
	ck_assert_int_eq(pair_decode(&pair), TQKV_OK);
	pair_load(&pair, "attach_req", "attach_reply");
	ck_assert_int_eq(pair_decode(&pair), TQKV_OK);
	pair_load(&pair, "open_req", "open_reply");
	ck_assert_int_eq(pair_decode(&pair), TQKV_OK);
	ck_assert_uint_eq(pair.op.open.session, 0x005A17C39E210003);
	expect_refused(&pair, 0, 0, 8);  /* session */
	expect_refused(&pair, 32, 0, 4); /* n_layers */
	expect_refused(&pair, 32, 1 << 20, 4);
	expect_refused(&pair, 40, 0, 2); /* q_heads */
	expect_refused(&pair, 42, 0, 2); /* kv_heads */
	expect_refused(&pair, 44, 0, 2); /* k_head_dim */
	expect_refused(&pair, 46, 0, 2); /* v_head_dim */
	pair_load(&pair, "pool_info_req", "pool_info_reply");
	ck_assert_int_eq(pair_decode(&pair), TQKV_OK);
	ck_assert_uint_eq(pair.got.payload_bytes, pair.op.pool_info.json_bytes);
	expect_refused(&pair, 8, 4096, 4); /* json_bytes */
	pair_load(&pair, "hello_req", "hello_reply");
	ck_assert_int_eq(pair_decode(&pair), TQKV_OK);
	ck_assert_uint_eq(pair.op.hello.frame_bytes_max, 1048576);
	pair_load(&pair, "hello_req", "hello_version_reply");
	ck_assert_int_eq(pair_decode(&pair), TQKV_VERSION_UNSUPPORTED);
	ck_assert_uint_eq(pair.op.hello.proto_max, 1);
	ck_assert(!pair.err.is_local);
}
END_TEST

/* The golden replies of operations on client tables, and counts or outputs that are not those asked for. */
START_TEST(test_client_reply_tables)
{
	struct pair pair;

	pair_load(&pair, "update_slots_req", "update_slots_reply");
	ck_assert_int_eq(pair_decode(&pair), TQKV_OK);
	ck_assert_uint_eq(pair.got.n_items, 1);
	ck_assert_uint_eq(pair.got.items[0].n_tokens, 2);
	ck_assert_ptr_null(pair.got.out);
	expect_refused(&pair, 64, 7, 8);      /* sequence */
	expect_refused(&pair, 64 + 12, 1, 4); /* n_tokens */
	expect_refused(&pair, 0, 2, 4);       /* n_ok */
	expect_refused(&pair, 8, 1, 4);       /* n_q_total */
	pair_load(&pair, "decode_table_req", "decode_table_reply");
	pair.geometry.q_heads = 2;
	ck_assert_int_eq(pair_decode(&pair), TQKV_OK);
	ck_assert_uint_eq(pair.got.items[0].q_len, 2);
	ck_assert_uint_eq(pair.got.out_bytes, 256);
	ck_assert_float_eq(pair.lse[3], 1);
	expect_refused(&pair, 16, 64, 8);     /* out_off */
	expect_refused(&pair, 24, 320, 8);    /* lse_off */
	expect_refused(&pair, 64 + 16, 1, 4); /* q_len */
}
END_TEST

/* READ's golden reply, and rows that leave the payload or are not those that were asked for. */
START_TEST(test_client_reply_read)
{
	struct pair pair;

	pair_load(&pair, "read_req", "read_reply");
	ck_assert_int_eq(pair_decode(&pair), TQKV_OK);
	ck_assert_uint_eq(pair.got.n_tokens, 3);
	ck_assert_uint_eq(pair.got.k_bytes, 2 * 3 * 16 * 2);
	ck_assert_ptr_null(pair.got.v);
	ck_assert_uint_eq(pair.got.fingerprint, 0xA1B2C3D4E5F60718);
	expect_refused(&pair, 0, 8, 8);           /* sequence */
	expect_refused(&pair, 8, 1, 4);           /* layer_first */
	expect_refused(&pair, 12, 1, 4);          /* n_layers */
	expect_refused(&pair, 16, 0, 4);          /* position */
	expect_refused(&pair, 20, 4, 4);          /* n_tokens above what was asked for */
	expect_refused(&pair, 24, 1, 1);          /* k_dtype */
	expect_refused(&pair, 25, 3, 1);          /* v_dtype */
	expect_refused(&pair, 32, UINT64_MAX, 8); /* k_off absent */
	expect_refused(&pair, 32, 64, 8);
	expect_refused(&pair, 32, 32, 8);
	pair.geometry.kv_heads = 2;
	ck_assert_int_eq(pair_decode(&pair), TQKV_BAD_FRAME);
	/* The largest numbers must not overflow into something small. */
	pair.geometry.kv_heads = 65535;
	pair.geometry.k_head_dim = 65535;
	ck_assert_int_eq(pair_decode(&pair), TQKV_BAD_FRAME);
}
END_TEST

/* TELL's golden reply, and pages that would make paging wrong or endless. */
START_TEST(test_client_reply_tell)
{
	struct pair pair;

	pair_load(&pair, "tell_req", "tell_reply");
	ck_assert_int_eq(pair_decode(&pair), TQKV_OK);
	ck_assert_uint_eq(pair.got.n_items, 2);
	ck_assert_uint_eq(pair.got.next_sequence, 0);
	ck_assert_uint_eq(pair.got.sequences[0].length_max, 65);
	ck_assert_uint_eq(pair.got.sequences[1].state, TQKV_STATE_EVICTED);
	ck_assert_uint_eq(pair.got.sequences[1].flags, TQKV_EVICTABLE);
	expect_refused(&pair, 0, 9, 8);          /* next_sequence: not behind the last one */
	expect_refused(&pair, 8, UINT64_MAX, 8); /* lengths absent though asked for */
	expect_refused(&pair, 8, 64, 8);         /* lengths behind the payload */
	expect_refused(&pair, 16, 4, 4);         /* n_layers */
	expect_refused(&pair, 32, 0, 8);         /* sequence 0 */
	expect_refused(&pair, 32, 9, 8);         /* the same one twice */
	expect_refused(&pair, 32, 10, 8);        /* not ascending */
	expect_refused(&pair, 40, 66, 4);        /* length_min above length_max */
	/* More sequences than were asked for. */
	kvp_put_u32(pair.request + KVP_HEADER_BYTES + 8, 1);
	ck_assert_int_eq(pair_decode(&pair), TQKV_BAD_FRAME);
}
END_TEST

/* Frame errors: all fields and the text arrive; lengths that lie and control characters do no harm. */
START_TEST(test_client_reply_errors)
{
	struct pair pair;

	pair_load(&pair, "append_req", "error_reply");
	ck_assert_int_eq(pair_decode(&pair), TQKV_BAD_ARG);
	ck_assert_int_eq(pair.err.scope, TQKV_SCOPE_REQUEST);
	ck_assert(!pair.err.is_local && !pair.err.is_retryable);
	ck_assert_uint_eq(pair.err.item, 1);
	ck_assert_uint_eq(pair.err.offset, 168);
	ck_assert_uint_eq(pair.err.expected, 0);
	ck_assert_uint_eq(pair.err.got, 5);
	ck_assert_str_eq(pair.err.message,
		"BAD_ARG: CREATE starts at position 0 (item 1, offset 168, expected 0, got 5)");
	kvp_put_u16(pair.reply + KVP_HEADER_BYTES + 32, 0xFFFF);
	pair.reply[KVP_HEADER_BYTES + 64] = '\n';
	ck_assert_int_eq(pair_decode(&pair), TQKV_BAD_ARG);
	ck_assert_ptr_nonnull(strstr(pair.err.message, "BAD_ARG: ?AD_ARG"));
	/* A struct that is cut to nothing: the table of statuses knows the rest. */
	pair.reply_header.op_bytes = 0;
	pair.reply_header.body_bytes = 0;
	ck_assert_int_eq(pair_decode(&pair), TQKV_BAD_ARG);
	ck_assert_uint_eq(pair.err.item, 0xFFFFFFFF);
	ck_assert_str_eq(pair.err.message, "BAD_ARG: bad argument");

	pair_load(&pair, "decode_req", "busy_reply");
	ck_assert_int_eq(pair_decode(&pair), TQKV_BUSY_RETRY);
	ck_assert(pair.err.is_retryable);
	ck_assert_uint_eq(pair.err.retry_after_ms, 25);
	/* A status of a newer server keeps its number. */
	pair.reply_header.status = 777;
	ck_assert_int_eq((int)pair_decode(&pair), 777);
	ck_assert_str_eq(pair.err.message, "status 777");
	pair.reply_header.status = 99;
	ck_assert_int_eq(pair_decode(&pair), TQKV_BAD_FRAME);
	ck_assert(pair.err.is_local);
}
END_TEST

/* The first differing member of two canonical JSON texts, by path; equal texts do not differ. */
START_TEST(test_client_pool_json)
{
	static const struct {
		const char *expected, *got, *text;
	} cases[] = {
		{ "{\"a\":1,\"b\":2}", "{\"a\":1,\"b\":3}", "b: expected 2, got 3" },
		{ "{\"a\":12}", "{\"a\":1}", "a: expected 12, got 1" },
		{ "{\"a\":\"tq4\"}", "{\"a\":\"tq3\"}", "a: expected \"tq4\", got \"tq3\"" },
		{ "{\"a\":{\"b\":[1,2,{\"c\":true}]}}", "{\"a\":{\"b\":[1,2,{\"c\":false}]}}",
			"a.b[2].c: expected true, got false" },
		{ "{\"a\":[1,2]}", "{\"a\":[1,2,3]}", "a[1]: expected 2]}, got 2,3]}" },
		{ "{\"a\":1,\"c\":2}", "{\"a\":1,\"b\":9}",
			"a member of the pool: expected \"c\", got \"b\"" },
		{ "{\"o\":{\"a\":1}}", "{\"o\":{\"b\":1}}", "a member of o: expected \"a\", got \"b\"" },
		{ "{\"s\":\"x,y:{\",\"t\":1}", "{\"s\":\"x,y:{\",\"t\":2}", "t: expected 1, got 2" },
		{ "{\"s\":\"a\\\"b\",\"t\":1}", "{\"s\":\"a\\\"b\",\"t\":2}", "t: expected 1, got 2" },
		{ "[]", "{}", "the pool: expected [], got {}" },
		{ "", "{}", "the pool: expected , got {}" },
	};
	char text[256];

	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		ck_assert(tqkv_pool_json_differs(cases[i].expected, cases[i].got, text, sizeof(text)));
		ck_assert_str_eq(text, cases[i].text);
		ck_assert(!tqkv_pool_json_differs(cases[i].got, cases[i].got, text, sizeof(text)));
	}
}
END_TEST

/* Any two texts, however broken: an answer within the buffer. */
START_TEST(test_client_pool_json_survives_anything)
{
	static const char alphabet[] = "{}[]\",:\\ab1";
	uint64_t state = 0x5EED5EED5EED5EED;

	printf("seed %llx\n", (unsigned long long)state);
	for (int round = 0; round < 20000; round++) {
		char expected[40] = "", got[40] = "", text[33];
		const size_t n_common = kv_test_random(&state) % 20;

		for (size_t i = 0; i < 38; i++) {
			expected[i] = alphabet[kv_test_random(&state) % (sizeof(alphabet) - 1)];
			got[i] = i < n_common ? expected[i]
					      : alphabet[kv_test_random(&state) % (sizeof(alphabet) - 1)];
		}
		expected[kv_test_random(&state) % 39] = '\0';
		got[kv_test_random(&state) % 39] = '\0';
		memset(text, 'x', sizeof(text));
		if (tqkv_pool_json_differs(expected, got, text, sizeof(text) - 1))
			ck_assert_uint_lt(strlen(text), sizeof(text) - 1);
		else
			ck_assert_str_eq(expected, got);
		ck_assert_int_eq(text[sizeof(text) - 1], 'x');
	}
}
END_TEST

/* Names and texts of statuses, also of numbers that are not known. */
START_TEST(test_client_status_names)
{
	ck_assert_str_eq(tqkv_status_name(TQKV_POOL_FULL), "POOL_FULL");
	ck_assert_str_eq(tqkv_status_text(TQKV_POOL_FULL), "no free block");
	ck_assert(tqkv_status_is_retryable(TQKV_POOL_FULL));
	ck_assert(!tqkv_status_is_retryable(TQKV_POSITION));
	ck_assert_str_eq(tqkv_status_name(12345), "INTERNAL");
	ck_assert_str_ne(tqkv_version(), "");
}
END_TEST

static Suite *suite(void)
{
	Suite *suite = suite_create("client_reply");
	TCase *tcase = tcase_create("client_reply");

	tcase_add_test(tcase, test_client_reply_append);
	tcase_add_test(tcase, test_client_reply_outputs);
	tcase_add_test(tcase, test_client_reply_golden_values);
	tcase_add_test(tcase, test_client_reply_tables);
	tcase_add_test(tcase, test_client_reply_read);
	tcase_add_test(tcase, test_client_reply_tell);
	tcase_add_test(tcase, test_client_reply_errors);
	tcase_add_test(tcase, test_client_pool_json);
	tcase_add_test(tcase, test_client_pool_json_survives_anything);
	tcase_add_test(tcase, test_client_status_names);
	suite_add_tcase(suite, tcase);
	return suite;
}

int main(void)
{
	return kv_test_run(suite(), CK_FORK);
}
