/*
 * What tenants may have: nothing is taken beyond a quota, not even for a moment, and all of it comes back.
 */
#include "core/audit.h"
#include "core/prefix.h"
#include "tests/lib/kv_sequence_rig.h"

#define BLOCK_BYTES 4096u /* of either group: 16 tokens of 2 layers, K and V of 16 f32 */

static struct kv_tenants *tenants(struct rig *rig)
{
	return kv_domain_tenants(rig->test.domain);
}

static const struct kv_tenant *tenant(struct rig *rig)
{
	return &tenants(rig)->entries[rig->session->payer];
}

static void limit(struct rig *rig, enum kv_quota quota, uint64_t most)
{
	struct kv_tenant_policy policy = kv_tenant_policy_open();

	policy.most[quota] = most;
	kv_assert_ok(kv_tenant_set(tenants(rig), rig->session->tenant, &policy, NULL));
}

static void audit(struct rig *rig)
{
	struct kv_error err;

	kv_assert_ok(kv_audit_domain(rig->test.domain, NULL, 0, &err));
}

static struct kv_item ask(struct rig *rig, uint64_t id, uint32_t position, uint32_t n_tokens)
{
	return plan(rig, KV_ITEM_APPEND, id, position, n_tokens, 0, 4, position == 0 ? KV_ITEM_CREATE : 0);
}

/* P11: bytes are whole blocks of every group; the refused append takes nothing, and a failed one gives back.
 */
START_TEST(test_tenant_bytes_are_never_exceeded)
{
	struct rig rig;
	struct kv_item a, b, c;

	rig_init(&rig, RIG_POOL, RIG_GROUPS);
	ck_assert_uint_eq(kv_block_bytes(rig.pool->spec, 0), BLOCK_BYTES);
	limit(&rig, KV_QUOTA_BYTES, 6 * BLOCK_BYTES);
	a = ask(&rig, 1, 0, 32); /* 2 blocks of 2 groups */
	ck_assert_uint_eq(a.status, KV_OK);
	ck_assert_uint_eq(tenant(&rig)->used[KV_QUOTA_BYTES], 4 * BLOCK_BYTES);
	b = ask(&rig, 2, 0, 17);
	ck_assert_uint_eq(b.status, KV_QUOTA);
	ck_assert_uint_gt(b.retry_after_ms, 0);
	ck_assert_ptr_null(kv_sequence_find(rig.session, 2));
	ck_assert_uint_eq(tenant(&rig)->n_refused[KV_QUOTA_BYTES], 1);
	c = ask(&rig, 2, 0, 16);
	ck_assert_uint_eq(c.status, KV_OK);
	audit(&rig);
	finish(&a, KV_BAD_VALUE, KV_BAD_VALUE, 0);
	finish(&c, KV_OK, KV_OK, 16);
	(void)kv_domain_release(rig.test.domain, 1000);
	ck_assert_uint_eq(tenant(&rig)->used[KV_QUOTA_BYTES], 2 * BLOCK_BYTES);
	ck_assert_uint_eq(tenant(&rig)->used_max[KV_QUOTA_BYTES], 6 * BLOCK_BYTES);
	audit(&rig);
	rig_finish(&rig);
}
END_TEST

/* Tokens are the longest planned length of each sequence: they come back by falling back, TRUNCATE and FREE.
 */
START_TEST(test_tenant_tokens_follow_planned_lengths)
{
	struct rig rig;
	struct kv_item a, b;
	uint32_t expected;

	rig_init(&rig, RIG_POOL, RIG_GROUPS);
	limit(&rig, KV_QUOTA_TOKENS, 50);
	a = ask(&rig, 1, 0, 30);
	b = ask(&rig, 1, 30, 20);
	ck_assert_uint_eq(b.status, KV_OK);
	ck_assert_uint_eq(ask(&rig, 2, 0, 1).status, KV_QUOTA);
	finish(&a, KV_OK, KV_OK, 30);
	finish(&b, KV_BAD_VALUE, KV_BAD_VALUE, 30);
	ck_assert_uint_eq(tenant(&rig)->used[KV_QUOTA_TOKENS], 30);
	kv_assert_status(kv_sequence_fork(rig.session, 9, 1, 21, 60, &expected), KV_QUOTA);
	kv_assert_ok(kv_sequence_fork(rig.session, 9, 1, 20, 60, &expected));
	ck_assert_uint_eq(tenant(&rig)->used[KV_QUOTA_TOKENS], 50);
	kv_assert_ok(kv_sequence_truncate(rig.session, 1, 10));
	kv_assert_ok(kv_sequence_free(rig.session, 9));
	ck_assert_uint_eq(tenant(&rig)->used[KV_QUOTA_TOKENS], 10);
	audit(&rig);
	rig_finish(&rig);
}
END_TEST

/* A reservation is paid when the session opens; its blocks cost nothing more, and closing ends all of it. */
START_TEST(test_tenant_reservations_and_sessions)
{
	struct rig rig;
	struct kv_session *session;
	struct kv_error err;

	rig_init(&rig, RIG_POOL, RIG_GROUPS);
	struct kv_open_params params = {
		.pool = rig.pool, .tenant = rig.session->tenant, .reserve_blocks = 4
	};

	limit(&rig, KV_QUOTA_BYTES, 8 * BLOCK_BYTES - 1);
	kv_assert_status(kv_session_open(rig.test.domain, &params, 1, &session, &err), KV_QUOTA);
	ck_assert_ptr_nonnull(strstr(err.msg, "quota of bytes is 32767, 0 are used, 32768 more wanted"));
	limit(&rig, KV_QUOTA_BYTES, 8 * BLOCK_BYTES);
	kv_assert_ok(kv_session_open(rig.test.domain, &params, 1, &session, &err));
	rig.session = session;
	struct kv_item a = ask(&rig, 1, 0, 64);

	ck_assert_uint_eq(a.status, KV_OK);
	ck_assert_uint_eq(tenant(&rig)->used[KV_QUOTA_BYTES], 8 * BLOCK_BYTES);
	ck_assert_uint_eq(ask(&rig, 2, 0, 1).status, KV_QUOTA);
	finish(&a, KV_OK, KV_OK, 64);
	limit(&rig, KV_QUOTA_SESSIONS, 2);
	params.reserve_blocks = 0;
	kv_assert_status(kv_session_open(rig.test.domain, &params, 1, &session, &err), KV_QUOTA);
	audit(&rig);
	const uint32_t payer = rig.session->payer;

	kv_session_close(rig.test.domain, rig.session, false);
	ck_assert_uint_eq(tenants(&rig)->entries[payer].used[KV_QUOTA_SESSIONS], 1);
	ck_assert_uint_eq(tenants(&rig)->entries[payer].used[KV_QUOTA_TOKENS], 0);
	(void)kv_domain_release(rig.test.domain, 1000);
	ck_assert_uint_eq(tenants(&rig)->entries[payer].used[KV_QUOTA_BYTES], 0);
	audit(&rig);
	rig_finish(&rig);
}
END_TEST

/* A fork costs tokens and no bytes until it is written; the block it is given then is paid for. */
START_TEST(test_tenant_shared_blocks_are_paid_once)
{
	struct rig rig;
	struct kv_item a, b;
	uint32_t expected;

	rig_init(&rig, RIG_POOL, RIG_GROUPS);
	limit(&rig, KV_QUOTA_BYTES, 6 * BLOCK_BYTES);
	a = append(&rig, 1, 0, 20);
	finish(&a, KV_OK, KV_OK, 20);
	kv_assert_ok(kv_sequence_fork(rig.session, 2, 1, 20, 60, &expected));
	ck_assert_uint_eq(tenant(&rig)->used[KV_QUOTA_BYTES], 4 * BLOCK_BYTES);
	b = ask(&rig, 2, 20, 1);
	ck_assert_uint_eq(b.status, KV_OK);
	ck_assert_uint_eq(tenant(&rig)->used[KV_QUOTA_BYTES], 6 * BLOCK_BYTES);
	audit(&rig);
	rig_finish(&rig);
}
END_TEST

/* The common policy holds for whoever has none; clearing one's own brings it back. */
START_TEST(test_tenant_common_policy)
{
	struct rig rig;
	struct kv_error err;

	rig_init(&rig, RIG_POOL, RIG_GROUPS);
	tenants(&rig)->common.most[KV_QUOTA_TOKENS] = 5;
	ck_assert_uint_eq(ask(&rig, 1, 0, 6).status, KV_QUOTA);
	limit(&rig, KV_QUOTA_TOKENS, 6);
	struct kv_item a = ask(&rig, 1, 0, 6);

	ck_assert_uint_eq(a.status, KV_OK);
	finish(&a, KV_OK, KV_OK, 6);
	kv_assert_ok(kv_tenant_clear(tenants(&rig), rig.session->tenant, &err));
	kv_assert_status(kv_tenant_clear(tenants(&rig), rig.session->tenant, &err), KV_NOT_FOUND);
	/* Lowered below what is used: nothing is taken away, nothing more is admitted. */
	ck_assert_uint_eq(ask(&rig, 1, 6, 1).status, KV_QUOTA);
	ck_assert_uint_eq(tenant(&rig)->used[KV_QUOTA_TOKENS], 6);
	rig_finish(&rig);
}
END_TEST

/* The table is bounded; entries of tenants that have nothing and no policy are used again. */
START_TEST(test_tenant_table_is_bounded)
{
	const struct kv_tenant_policy policy = kv_tenant_policy_open();
	struct kv_tenants table;
	struct kv_error err;

	kv_assert_ok(kv_tenants_init(&table, NULL));
	for (uint64_t id = 0; id < 10000; id++)
		ck_assert_uint_ne(kv_tenant_make(&table, id), KV_TENANT_NOBODY);
	for (uint64_t id = 0; id < KV_TENANTS_MAX - 1; id++)
		kv_assert_ok(kv_tenant_set(&table, id, &policy, &err));
	kv_assert_status(kv_tenant_set(&table, 99999, &policy, &err), KV_LIMIT);
	ck_assert_uint_eq(kv_tenant_make(&table, 99999), KV_TENANT_NOBODY);
	kv_assert_ok(kv_tenant_clear(&table, 17, &err));
	kv_assert_ok(kv_tenant_set(&table, 99999, &policy, &err));
	kv_tenants_finish(&table);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("tenant");
	TCase *tcase = tcase_create("tenant");

	tcase_add_test(tcase, test_tenant_bytes_are_never_exceeded);
	tcase_add_test(tcase, test_tenant_tokens_follow_planned_lengths);
	tcase_add_test(tcase, test_tenant_reservations_and_sessions);
	tcase_add_test(tcase, test_tenant_shared_blocks_are_paid_once);
	tcase_add_test(tcase, test_tenant_common_policy);
	tcase_add_test(tcase, test_tenant_table_is_bounded);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK_GETENV);
}
