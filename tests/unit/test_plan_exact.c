/* Which items of a pool with an exact window go into one batch. */
#include <stdlib.h>

#include "core/domain_internal.h"
#include "core/format.h"
#include "core/plan.h"
#include "tests/lib/kv_core_test.h"

/*
 * An append that would take the places of tokens that an earlier decode of the batch reads does not fit into
 * the batch; one that takes none of them does.
 */
START_TEST(test_plan_exact_keeps_what_the_batch_reads)
{
	static const struct kv_domain_limits limits = {
		.sessions_max = 2, .sequences_max = 4, .lease_ms = 1000, .lease_ms_max = 1000
	};
	static float rows[2 * 40 * 2 * 16];
	struct kv_test_domain test;
	struct kv_frame_rows frame = { .n_layers = 1,
		.n_tokens_total = 40,
		.k_dtype = KV_DTYPE_F32,
		.v_dtype = KV_DTYPE_F32,
		.q_dtype = KV_DTYPE_F32,
		.out_dtype = KV_DTYPE_F32,
		.k = (uint8_t *)rows,
		.v = (uint8_t *)rows,
		.q = (uint8_t *)rows,
		.out = (uint8_t *)rows };
	struct kv_item first = {
		.sequence_id = 7, .n_tokens = 40, .kind = KV_ITEM_APPEND, .flags = KV_ITEM_CREATE
	};
	struct kv_item decode = {
		.sequence_id = 7, .position = KV_LENGTH_PLANNED, .kind = KV_ITEM_DECODE, .q_len = 1
	};
	struct kv_item fits = { .sequence_id = 7, .position = 40, .n_tokens = 8, .kind = KV_ITEM_APPEND };
	struct kv_item waits = { .sequence_id = 7, .position = 48, .n_tokens = 1, .kind = KV_ITEM_APPEND };
	struct kv_plan plan;
	uint32_t result_idx;

	kv_test_domain_init(&test, &limits,
		"name=p,layers=2,q_heads=4,kv_heads=2,head_dim=16,k=tq4,v=tq4,block_size=16,blocks=60,"
		"exact_tokens=48,exact_blocks=30",
		NULL, 1);
	struct kv_session *session = kv_test_open(&test);
	const uint64_t area_bytes = kv_plan_area_bytes(test.pool->spec, 1 << 20);
	uint8_t *area = aligned_alloc(4096, (area_bytes + 4095) / 4096 * 4096);

	ck_assert_ptr_nonnull(area);
	kv_item_plan(session, &first, 0, 1, 1);
	kv_item_plan(session, &decode, 0, 1, 1);
	kv_item_plan(session, &fits, 0, 1, 1);
	kv_item_plan(session, &waits, 0, 1, 1);
	kv_plan_begin(&plan, test.pool, area, area_bytes);
	ck_assert(kv_plan_add(&plan, &frame, &first, &result_idx));
	ck_assert(kv_plan_add(&plan, &frame, &decode, &result_idx));
	ck_assert(kv_plan_add(&plan, &frame, &fits, &result_idx));
	ck_assert(!kv_plan_add(&plan, &frame, &waits, &result_idx)); /* token 48 goes where token 0 is */
	kv_plan_end(&plan);
	kv_item_finish(&first, 0, 1);
	kv_item_finish(&decode, 0, 1);
	kv_item_finish(&fits, 0, 1);
	kv_plan_begin(&plan, test.pool, area, area_bytes);
	ck_assert(kv_plan_add(&plan, &frame, &waits, &result_idx));
	kv_plan_end(&plan);
	kv_item_finish(&waits, 0, 1);
	kv_test_domain_finish(&test);
	free(area);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("plan_exact");
	TCase *tcase = tcase_create("plan_exact");

	tcase_add_test(tcase, test_plan_exact_keeps_what_the_batch_reads);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK_GETENV);
}
