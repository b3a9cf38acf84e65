/*
 * Capacity: the formulas of POST /v1/plan against figures worked out by hand, and what is refused.
 */
#include <jansson.h>

#include "server/capacity.h"
#include "tests/lib/kv_test.h"

static struct kv_error error;
static struct srv_capacity_ask ask;
static struct srv_capacity capacity;

static enum kv_status read_text(const char *text)
{
	json_t *json = json_loads(text, 0, NULL);

	ck_assert_ptr_nonnull(json);
	memset(&error, 0, sizeof(error));
	const enum kv_status status = srv_capacity_read(json, &ask, &error);

	json_decref(json);
	return status;
}

/*
 * 30 layers, 3 KV heads of 64 channels, bf16: 2 * 30 * 3 * 64 * 2 bytes a token. 1000 tokens are 63 blocks
 * of 16. 1 GiB holds 2912 such blocks, that is 46 contexts.
 */
START_TEST(test_capacity_by_hand)
{
	ck_assert_msg(
		read_text("{\"pool\": {\"layers\": 30, \"q_heads\": 9, \"kv_heads\": 3, \"head_dim\": 64, "
			  "\"k\": \"bf16\", \"v\": \"bf16\"}, \"context_tokens\": 1000, \"sessions\": 10, "
			  "\"memory_bytes\": 1073741824, \"link_bytes_per_s\": 1000000000, "
			  "\"device_bytes_per_s\": 1000000000000, \"row_dtype\": \"f32\"}") == KV_OK,
		"%s", error.msg);
	ck_assert_int_eq(srv_capacity_work_out(&ask, 7, 7, &capacity, &error), KV_OK);
	ck_assert_uint_eq(ask.token_bytes, 23040);
	ck_assert_uint_eq(ask.token_dense_bytes, 23040);
	ck_assert_uint_eq(ask.token_wire_bytes, 46080);
	ck_assert_uint_eq(capacity.block_bytes, 368640);
	ck_assert_uint_eq(capacity.context_blocks, 63);
	ck_assert_uint_eq(capacity.context_bytes, 23224320);
	ck_assert_uint_eq(capacity.n_blocks, 2912);
	ck_assert_uint_eq(capacity.n_tokens, 46592);
	ck_assert_uint_eq(capacity.n_sessions, 46);
	ck_assert_uint_eq(capacity.asked_bytes, 232243200);
	ck_assert(capacity.does_fit);
	ck_assert_uint_eq(capacity.read_bytes, 230400000);
	ck_assert_uint_eq(capacity.floor_us, 231); /* 230.4 */
	ck_assert(capacity.tokens_per_s > 43402 && capacity.tokens_per_s < 43403);
	ck_assert_uint_eq(capacity.context_us, 46080);
	ck_assert_uint_eq(capacity.all_us, 460800);
}
END_TEST

/* A preset, and defaults: one session, blocks of 16, the daemon's arena, 10 Gbit/s, an unknown device. */
START_TEST(test_capacity_defaults)
{
	ck_assert_msg(
		read_text("{\"pool\": {\"layers\": 2, \"q_heads\": 2, \"kv_heads\": 1, \"head_dim\": 64, "
			  "\"preset\": \"4bit\"}, \"context_tokens\": 16}") == KV_OK,
		"%s", error.msg);
	ck_assert_int_eq(srv_capacity_work_out(&ask, 4096, 0, &capacity, &error), KV_OK);
	ck_assert_str_eq(ask.k_format, "tq4");
	ck_assert_uint_eq(ask.block_size, 16);
	ck_assert_str_eq(ask.v_format, "v4");
	/* K: 32 bytes of indices, a norm of 4; V: 32 bytes of codes, two groups with scale and zero of 2 each
	 */
	ck_assert_uint_eq(ask.token_bytes, 2 * (36 + 40));
	ck_assert_uint_eq(capacity.memory_bytes, 4096);
	ck_assert_uint_eq(capacity.n_blocks, 1);
	ck_assert_uint_eq(capacity.n_sessions, 1);
	ck_assert_uint_eq(capacity.floor_us, 0);
	ck_assert_uint_eq(ask.link_bytes_per_s, SRV_CAPACITY_LINK_BYTES_PER_S);
}
END_TEST

/*
 * An exact window takes room beside the pages. tq4: 2 layers of 72 bytes a token, blocks of 2304; 512 bytes a
 * token as bf16, ring blocks of 8192. 100 tokens: 7 blocks and 2 ring blocks; 10 tokens: one of each.
 */
START_TEST(test_capacity_exact_window)
{
#define WINDOWED                                                                                         \
	"{\"pool\": {\"layers\": 2, \"q_heads\": 2, \"kv_heads\": 1, \"head_dim\": 64, \"k\": \"tq4\", " \
	"\"v\": \"tq4\", \"exact_tokens\": 32}, \"memory_bytes\": 100000, \"sessions\": 2, "             \
	"\"context_tokens\": "
	ck_assert_msg(read_text(WINDOWED "100}") == KV_OK, "%s", error.msg);
	ck_assert_int_eq(srv_capacity_work_out(&ask, 0, 0, &capacity, &error), KV_OK);
	ck_assert_uint_eq(ask.token_bytes, 144);
	ck_assert_uint_eq(ask.ring_token_bytes, 512);
	ck_assert_uint_eq(capacity.ring_bytes, 16384);
	ck_assert_uint_eq(capacity.context_bytes, 7 * 2304 + 2 * 8192);
	ck_assert_uint_eq(capacity.n_sessions, 3);
	ck_assert_uint_eq(capacity.n_blocks, 29); /* (100000 - 2 * 16384) / 2304 */
	ck_assert_uint_eq(capacity.n_tokens, 464);
	ck_assert_uint_eq(capacity.asked_bytes, 65024);
	ck_assert(capacity.does_fit);
	ck_assert_int_eq(read_text(WINDOWED "10}"), KV_OK);
	ck_assert_int_eq(srv_capacity_work_out(&ask, 0, 0, &capacity, &error), KV_OK);
	ck_assert_uint_eq(capacity.context_bytes, 2304 + 8192);
	ask.n_sessions = 13; /* the rings alone are more than there is */
	ck_assert_int_eq(srv_capacity_work_out(&ask, 0, 0, &capacity, &error), KV_OK);
	ck_assert_uint_eq(capacity.n_blocks, 0);
	ck_assert_uint_eq(capacity.n_sessions, 9);
	ck_assert(!capacity.does_fit);
	ask.ring_token_bytes = UINT64_MAX / 2;
	ck_assert_int_eq(srv_capacity_work_out(&ask, 0, 0, &capacity, &error), KV_BAD_ARG);
}
END_TEST

/* What is wrong is named; numbers beyond 64 bits are refused, not wrapped. */
START_TEST(test_capacity_refuses)
{
#define POOL(more)                                                                                       \
	"{\"pool\": {\"layers\": 2, \"q_heads\": 2, \"kv_heads\": 1, \"head_dim\": 64, \"k\": \"tq4\", " \
	"\"v\": \"tq4\"}" more
	static const struct {
		const char *text, *part;
	} cases[] = {
		{ "{}", "context_tokens is missing" },
		{ "{\"context_tokens\": 5}", "pool: expected an object" },
		{ POOL(", \"context_tokens\": 0}"), "context_tokens: expected a whole number from 1" },
		{ POOL(", \"context_tokens\": \"5\"}"), "context_tokens" },
		{ POOL(", \"context_tokens\": 5, \"sessions\": -1}"), "sessions" },
		{ POOL(", \"context_tokens\": 5, \"colour\": 1}"), "colour: there is no such member" },
		{ POOL(", \"context_tokens\": 5, \"row_dtype\": \"fp8\"}"), "row_dtype" },
		{ POOL(", \"context_tokens\": 5, \"link_bytes_per_s\": 0}"), "link_bytes_per_s" },
		{ "{\"pool\": {\"layers\": 2, \"q_heads\": 2, \"kv_heads\": 1, \"head_dim\": 64, \"k\": "
		  "\"f99\", "
		  "\"v\": \"tq4\"}, \"context_tokens\": 5}",
			"f99" },
	};

	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		ck_assert_int_eq(read_text(cases[i].text), KV_BAD_CONFIG);
		ck_assert_msg(strstr(error.msg, cases[i].part) != NULL, "%s", error.msg);
	}
	ck_assert_int_eq(read_text(POOL(", \"context_tokens\": 4294967295, \"sessions\": 1000000}")), KV_OK);
	ask.token_bytes = UINT64_MAX / 1000;
	ck_assert_int_eq(srv_capacity_work_out(&ask, 1, 1, &capacity, &error), KV_BAD_ARG);
}
END_TEST

/* A device is known by its name; the machine's own memory is measured once. */
START_TEST(test_capacity_device_rate)
{
	ck_assert_uint_eq(srv_capacity_device_rate("cuda", "NVIDIA H200"), 4630000000000ull);
	ck_assert_uint_eq(srv_capacity_device_rate("cuda", "something else"), 0);
	const uint64_t rate = srv_capacity_device_rate("cpu", "CPU");

	ck_assert_uint_gt(rate, 1000000);
	ck_assert_uint_eq(srv_capacity_memory_rate(), rate);
	ck_assert_uint_eq(srv_capacity_device_rate("cpu-scalar", "CPU"), rate);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("capacity");
	TCase *tcase = tcase_create("capacity");

	tcase_add_test(tcase, test_capacity_by_hand);
	tcase_add_test(tcase, test_capacity_defaults);
	tcase_add_test(tcase, test_capacity_exact_window);
	tcase_add_test(tcase, test_capacity_refuses);
	tcase_add_test(tcase, test_capacity_device_rate);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
