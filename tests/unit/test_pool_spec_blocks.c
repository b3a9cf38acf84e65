/* Blocks in a pool's JSON: groups by window, their numbers of blocks, how long a sequence may get, and the
 * exact window. */
#include "core/checked.h"
#include "tests/lib/kv_spec_test.h"

#define NO_BLOCKS                                                                                      \
	"\"name\":\"p\",\"q_heads\":2,\"kv_heads\":1,\"block_size\":16,\"head_dim\":16,\"k\":\"f32\"," \
	"\"v\":\"f32\""
#define POOL   NO_BLOCKS ",\"blocks\":32,\"layers\":4"
#define PHASES ",\"window\":[40,0,40,20]"

/* Without groups, layers of one window are a group; numbers in the order of first layers. */
START_TEST(test_pool_spec_groups_by_window)
{
	static const uint32_t wanted[] = { 0, 1, 0, 2 };
	struct kv_pool_spec *spec = make(POOL PHASES);

	ck_assert_uint_eq(spec->n_groups, 3);
	ck_assert_uint_eq(spec->n_tables, 3);
	for (uint32_t l = 0; l < 4; l++)
		ck_assert_uint_eq(spec->layers[l].group_idx, wanted[l]);
	ck_assert_uint_eq(spec->group_window[0], 40);
	ck_assert_uint_eq(spec->group_window[1], 0);
	ck_assert_uint_eq(spec->group_window[2], 20);
	kv_pool_spec_destroy(spec);
	/* a group keeps what its widest window reaches, and all where one layer has none */
	spec = make(POOL PHASES ",\"groups\":[[0,3],[1,2]]");
	ck_assert_uint_eq(spec->n_groups, 2);
	ck_assert_uint_eq(spec->group_window[0], 40);
	ck_assert_uint_eq(spec->group_window[1], 0);
	kv_pool_spec_destroy(spec);
	spec = make(POOL);
	ck_assert_uint_eq(spec->n_groups, 1);
	ck_assert_uint_eq(spec->group_window[0], 0);
	kv_pool_spec_destroy(spec);
}
END_TEST

/* One number serves all groups, an array gives each its own. */
START_TEST(test_pool_spec_blocks_of_groups)
{
	struct kv_pool_spec *spec = make(POOL PHASES);

	for (uint32_t g = 0; g < 3; g++)
		ck_assert_uint_eq(spec->n_blocks[g], 32);
	kv_pool_spec_destroy(spec);
	spec = make(NO_BLOCKS ",\"layers\":4,\"blocks\":[8,100,7]" PHASES);
	ck_assert_uint_eq(spec->n_blocks[0], 8);
	ck_assert_uint_eq(spec->n_blocks[1], 100);
	ck_assert_uint_eq(spec->n_blocks[2], 7);
	kv_pool_spec_destroy(spec);
}
END_TEST

/*
 * What no window reaches: whole blocks, also for the first of 16 query rows; none before they are more than
 * those of the sink tokens.
 */
START_TEST(test_pool_spec_gone)
{
	struct kv_pool_spec *spec = make(POOL ",\"window\":40,\"sink_tokens\":17");

	ck_assert_uint_eq(spec->group_sink_blocks[0], 2);
	ck_assert_uint_eq(kv_pool_spec_gone(spec, 0, 0), 0);
	ck_assert_uint_eq(kv_pool_spec_gone(spec, 0, 55 + 32), 0);
	ck_assert_uint_eq(kv_pool_spec_gone(spec, 0, 55 + 47), 0);
	ck_assert_uint_eq(kv_pool_spec_gone(spec, 0, 55 + 48), 3);
	ck_assert_uint_eq(kv_pool_spec_gone(spec, 0, 55 + 63), 3);
	ck_assert_uint_eq(kv_pool_spec_gone(spec, 0, 55 + 64), 4);
	kv_pool_spec_destroy(spec);
	spec = make(POOL ",\"window\":4294967294");
	ck_assert_uint_eq(kv_pool_spec_gone(spec, 0, UINT32_MAX), 0);
	kv_pool_spec_destroy(spec);
	spec = make(POOL);
	ck_assert_uint_eq(kv_pool_spec_gone(spec, 0, 512), 0);
	kv_pool_spec_destroy(spec);
}
END_TEST

/* Only where every group's blocks suffice for its window may a sequence get longer than its blocks. */
START_TEST(test_pool_spec_tokens_max_of_windows)
{
	struct kv_pool_spec *spec = make(POOL ",\"window\":40");
	struct kv_error err = { .msg = "" };

	ck_assert_uint_eq(spec->tokens_max, 512); /* unless asked for */
	kv_pool_spec_destroy(spec);
	spec = make(POOL ",\"window\":40,\"tokens_max\":1000000");
	ck_assert_uint_eq(spec->tokens_max, 1000000);
	kv_pool_spec_destroy(spec);
	/* 55 tokens and both ends: 6 blocks do, 5 do not */
	spec = make(NO_BLOCKS ",\"layers\":1,\"window\":40,\"blocks\":6,\"tokens_max\":1000");
	ck_assert_uint_eq(spec->tokens_max, 1000);
	kv_pool_spec_destroy(spec);
	kv_assert_status(create(NO_BLOCKS ",\"layers\":1,\"window\":40,\"blocks\":5,\"tokens_max\":81", NULL,
				 &spec, &err),
		KV_BAD_CONFIG);
	ck_assert_str_eq(err.msg, "pool \"p\": tokens_max 81: expected an integer from 1 to 80");
	kv_assert_status(create(POOL PHASES ",\"tokens_max\":513", NULL, &spec, &err), KV_BAD_CONFIG);
	ck_assert_str_eq(err.msg, "pool \"p\": tokens_max 513: expected an integer from 1 to 512");
}
END_TEST

/* Ring blocks are a pool of their own behind the groups': as many as asked for, else a 16th, at least a ring.
 */
START_TEST(test_pool_spec_exact_tokens)
{
	struct kv_pool_spec *spec = make(POOL PHASES ",\"exact_tokens\":64");

	ck_assert_uint_eq(spec->exact_tokens, 64);
	ck_assert_uint_eq(spec->n_groups, 3);
	ck_assert_uint_eq(spec->n_tables, 4);
	ck_assert_uint_eq(spec->n_blocks[3], 4);
	ck_assert_ptr_nonnull(spec->exact_k);
	ck_assert_ptr_nonnull(spec->exact_v);
	kv_pool_spec_destroy(spec);
	spec = make(POOL ",\"exact_tokens\":16");
	ck_assert_uint_eq(spec->n_tables, 2);
	ck_assert_uint_eq(spec->n_blocks[1], 2);
	kv_pool_spec_destroy(spec);
	spec = make(POOL ",\"exact_tokens\":16,\"exact_blocks\":7");
	ck_assert_uint_eq(spec->n_blocks[1], 7);
	kv_pool_spec_destroy(spec);
	spec = make(POOL ",\"exact_tokens\":0");
	ck_assert_uint_eq(spec->n_tables, 1);
	ck_assert_uint_eq(spec->exact_tokens, 0);
	ck_assert_ptr_null(spec->exact_k);
	kv_pool_spec_destroy(spec);
}
END_TEST

static const struct {
	const char *text, *msg; /* behind `pool "p": ` */
} refusals[] = {
	{ POOL ",\"exact_tokens\":24", "exact_tokens 24: expected a multiple of block_size 16" },
	{ POOL ",\"exact_tokens\":-16", "exact_tokens -16: expected an integer from 0 to 65536" },
	{ POOL ",\"exact_tokens\":65552", "exact_tokens 65552: expected an integer from 0 to 65536" },
	{ POOL ",\"exact_tokens\":\"16\"", "exact_tokens \"16\": expected an integer from 0 to 65536" },
	{ POOL ",\"exact_blocks\":4", "exact_blocks 4: expected exact_tokens above 0 beside it" },
	{ POOL ",\"exact_tokens\":0,\"exact_blocks\":4",
		"exact_blocks 4: expected exact_tokens above 0 beside it" },
	{ POOL ",\"exact_tokens\":16,\"exact_blocks\":0",
		"exact_blocks 0: expected an integer from 1 to 1073741824" },
	{ NO_BLOCKS ",\"layers\":4,\"blocks\":[8,8]" PHASES,
		"blocks is an array: expected an integer, or one for each of 3 groups" },
	{ NO_BLOCKS ",\"layers\":4,\"blocks\":[]",
		"blocks is an array: expected an integer, or one for each "
		"of 1 groups" },
	{ NO_BLOCKS ",\"layers\":4,\"blocks\":[8,0,8]" PHASES,
		"blocks[1] 0: expected an integer from 1 to 1073741824" },
	{ NO_BLOCKS ",\"layers\":4,\"blocks\":[8,8,true]" PHASES,
		"blocks[2] is true: expected an integer from 1 to 1073741824" },
	{ NO_BLOCKS ",\"layers\":9,\"blocks\":8,\"window\":[1,2,3,4,5,6,7,8,9]",
		"window is an array: expected at most 8 different windows, or groups that say which layers "
		"share "
		"blocks" },
};

START_TEST(test_pool_spec_blocks_refusals)
{
	for (size_t i = 0; i < KV_LENGTH(refusals); i++) {
		struct kv_pool_spec *spec = NULL;
		struct kv_error err = { .msg = "" };

		kv_assert_status(create(refusals[i].text, NULL, &spec, &err), KV_BAD_CONFIG);
		ck_assert_ptr_null(spec);
		ck_assert_msg(strncmp(err.msg, "pool \"p\": ", 10) == 0, "%s", err.msg);
		ck_assert_str_eq(err.msg + 10, refusals[i].msg);
	}
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("pool spec blocks");
	TCase *tc = tcase_create("blocks");

	tcase_add_test(tc, test_pool_spec_groups_by_window);
	tcase_add_test(tc, test_pool_spec_blocks_of_groups);
	tcase_add_test(tc, test_pool_spec_gone);
	tcase_add_test(tc, test_pool_spec_tokens_max_of_windows);
	tcase_add_test(tc, test_pool_spec_exact_tokens);
	tcase_add_test(tc, test_pool_spec_blocks_refusals);
	suite_add_tcase(suite, tc);
	return kv_test_run(suite, CK_NOFORK);
}
