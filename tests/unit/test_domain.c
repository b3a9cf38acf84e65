#include "core/domain.h"

#include "core/domain_internal.h"
#include "core/hash_index.h"
#include "core/memory.h"
#include "tests/lib/kv_core_test.h"

#define POOL "name=p,layers=2,q_heads=2,kv_heads=1,head_dim=16,k=f32,v=bf16,block_size=16,blocks=20"

static const struct kv_domain_limits limits = {
	.sessions_max = 3,
	.sequences_max = 200,
	.lease_ms = 1000,
	.lease_ms_max = 60000,
};

/* A sequence of one token in the session, so that closing it has something to take apart. */
static void add_sequence(struct kv_session *session, uint64_t id)
{
	struct kv_item item = {
		.sequence_id = id,
		.n_tokens = 1,
		.kind = KV_ITEM_APPEND,
		.flags = KV_ITEM_CREATE,
	};

	kv_item_plan(session, &item, 0, 2, 1);
	kv_assert_status(item.status, KV_OK);
	kv_item_finish(&item, 0, 2);
}

/* ---- clock, random numbers, hash index ---- */

/* Ids come back under their hash until they are removed, and chains of hostile ids stay short. */
START_TEST(test_domain_hash_index_finds_what_is_in_it)
{
	enum { N = 4096 };
	struct kv_test_source source = { { &kv_test_source_ops }, 0x5EED0003 };
	struct kv_hash_index index;
	struct kv_hash_key key;
	uint32_t longest = 0;

	printf("test_domain: seed %llx\n", (unsigned long long)source.state);
	kv_assert_ok(kv_hash_index_init(&index, N, NULL));
	kv_hash_key_init(&key, &source.base);
	/* ids that differ in high bits only: a weak hash puts them into one chain */
	for (uint32_t i = 0; i < N; i++)
		kv_hash_index_insert(&index, kv_hash_pair(&key, (uint64_t)i << 52, 7), i);
	for (uint32_t i = 0; i < N; i += 2)
		kv_hash_index_remove(&index, kv_hash_pair(&key, (uint64_t)i << 52, 7), i);
	for (uint32_t i = 0; i < N; i++) {
		uint32_t n_found = 0, length = 0;
		const uint64_t hash = kv_hash_pair(&key, (uint64_t)i << 52, 7);

		for (uint32_t id = kv_hash_index_first(&index, hash); id != KV_HASH_NONE;
			id = kv_hash_index_next(&index, id)) {
			n_found += id == i;
			length++;
		}
		ck_assert_uint_eq(n_found, i % 2);
		longest = length > longest ? length : longest;
	}
	ck_assert_uint_lt(longest, 20);
	kv_hash_index_finish(&index);
}
END_TEST

/* The system's clock moves on and is never 0; its random numbers differ. */
START_TEST(test_domain_system_clock_and_random)
{
	const uint64_t first = kv_clock_now_ns(kv_clock_system());
	uint64_t bits = 0;

	ck_assert_uint_gt(first, 0);
	ck_assert_uint_ge(kv_clock_now_ns(kv_clock_system()), first);
	for (uint32_t i = 0; i < 64; i++)
		bits |= kv_random_next(kv_random_system());
	ck_assert_uint_eq(bits, UINT64_MAX);
	ck_assert_uint_ne(kv_random_next(kv_random_system()), kv_random_next(kv_random_system()));
}
END_TEST

static uint64_t zero_next(struct kv_random *random)
{
	(void)random;
	return 0;
}

/* Boot id and boot tag are never 0, even when the random source gives nothing else. */
START_TEST(test_domain_boot_id_is_never_zero)
{
	static const struct kv_random_ops ops = { .next = zero_next };
	struct kv_random zeros = { &ops };
	struct kv_domain *domain;

	kv_assert_ok(kv_domain_create(&limits, &zeros, &domain, NULL));
	ck_assert_uint_ne(kv_domain_boot_id(domain), 0);
	ck_assert_uint_ne(domain->boot_tag, 0);
	kv_domain_destroy(domain);
	kv_domain_destroy(NULL);
}
END_TEST

/* When the k-th allocation fails, making a domain or a pool says so and changes nothing, for every k. */
START_TEST(test_domain_create_survives_every_failed_allocation)
{
	struct kv_test_source source = { { &kv_test_source_ops }, 5 };
	struct kv_domain *domain = NULL;
	struct kv_pool *pool = NULL;
	uint32_t n_failed = 0;

	for (int64_t k = 0; !domain; k++) {
		kv_alloc_fail_after(k);
		const enum kv_status status = kv_domain_create(&limits, &source.base, &domain, NULL);

		kv_alloc_fail_after(-1);
		kv_assert_status(status, domain ? KV_OK : KV_NO_MEMORY);
		n_failed += !domain;
	}
	ck_assert_uint_ge(n_failed, 8);

	struct kv_pool_spec *spec = kv_test_spec(POOL, "[[0],[1]]");

	n_failed = 0;
	for (int64_t k = 0; !pool; k++) {
		struct kv_error err = { 0 };

		kv_alloc_fail_after(k);
		const enum kv_status status = kv_domain_pool_add(domain, spec, NULL, 0, 0, &pool, &err);

		kv_alloc_fail_after(-1);
		kv_assert_status(status, pool ? KV_OK : KV_NO_MEMORY);
		ck_assert_uint_eq(kv_domain_n_pools(domain), pool ? 1 : 0);
		if (!pool)
			ck_assert_ptr_nonnull(strstr(err.msg, "pool \"p\""));
		n_failed += !pool;
	}
	ck_assert_uint_ge(n_failed, 16);
	kv_domain_destroy(domain);
}
END_TEST

/* ---- pools ---- */

/* Pools are found by name and by order of creation; indices stay below the bound and are used again. */
START_TEST(test_domain_pools_are_found)
{
	struct kv_test_domain test;
	struct kv_pool *second, *third;
	struct kv_error err = { 0 };
	struct kv_pool_spec *same = kv_test_spec(POOL, NULL);

	kv_test_domain_init(&test, &limits, POOL, NULL, 1);
	kv_assert_status(kv_domain_pool_add(test.domain, same, NULL, 0, 0, &second, &err), KV_EXISTS);
	ck_assert_str_eq(err.msg, "pool \"p\" exists already");
	kv_pool_spec_destroy(same);
	kv_assert_ok(kv_domain_pool_add(test.domain,
		kv_test_spec("name=pp,layers=1,q_heads=1,kv_heads=1,head_dim=16,k=f32,v=f32,block_size=16,"
			     "blocks=1",
			NULL),
		NULL, 4096, 8192, &second, NULL));
	ck_assert_ptr_eq(kv_domain_pool_by_name(test.domain, "pp", 2), second);
	ck_assert_ptr_eq(kv_domain_pool_by_name(test.domain, "pp", 1), test.pool);
	ck_assert_ptr_null(kv_domain_pool_by_name(test.domain, "ppp", 3));
	ck_assert_ptr_eq(kv_domain_pool_at(test.domain, 0), test.pool);
	ck_assert_ptr_eq(kv_domain_pool_at(test.domain, 1), second);
	ck_assert_ptr_null(kv_domain_pool_at(test.domain, 2));
	ck_assert_uint_eq(second->pool_idx, 1);
	ck_assert_uint_eq(second->arena_offset, 4096);
	ck_assert_uint_eq(second->arena_bytes, 8192);
	kv_assert_ok(kv_domain_pool_check_remove(test.pool, NULL));
	kv_domain_pool_remove(test.pool);
	ck_assert_ptr_eq(kv_domain_pool_at(test.domain, 0), second);
	kv_assert_ok(kv_domain_pool_add(test.domain, kv_test_spec(POOL, NULL), NULL, 0, 0, &third, NULL));
	ck_assert_uint_eq(third->pool_idx, 0);
	ck_assert_ptr_eq(kv_domain_pool_at(test.domain, 1), third);
	kv_test_domain_finish(&test);
}
END_TEST

/* A pool can be removed once its sessions are closed and nothing of them is left. */
START_TEST(test_domain_pool_removal_waits_for_what_is_left)
{
	struct kv_test_domain test;
	struct kv_error err = { 0 };

	kv_test_domain_init(&test, &limits, POOL, NULL, 1);

	struct kv_session *session = kv_test_open(&test);

	add_sequence(session, 1);
	kv_assert_status(kv_domain_pool_check_remove(test.pool, &err), KV_BAD_STATE);
	ck_assert_str_eq(err.msg, "pool \"p\" has 1 open sessions");
	kv_session_close(test.domain, session, false);
	kv_assert_status(kv_domain_pool_check_remove(test.pool, &err), KV_BUSY_RETRY);
	ck_assert_uint_eq(kv_domain_release(test.domain, 1024), 1);
	kv_assert_ok(kv_domain_pool_check_remove(test.pool, &err));

	/* a sequence without blocks that an item still names */
	struct kv_item item = { .sequence_id = 1, .q_len = 1, .kind = KV_ITEM_DECODE };

	session = kv_test_open(&test);
	add_sequence(session, 1);
	kv_assert_ok(kv_sequence_truncate(session, 1, 0));
	kv_item_plan(session, &item, 0, 1, 1);
	kv_assert_status(item.status, KV_OK);
	kv_session_close(test.domain, session, false);
	kv_test_release_all(test.domain);
	kv_assert_status(kv_domain_pool_check_remove(test.pool, &err), KV_BUSY_RETRY);
	kv_item_finish(&item, 0, 1);
	kv_assert_ok(kv_domain_pool_check_remove(test.pool, &err));
	kv_domain_pool_remove(test.pool);
	ck_assert_uint_eq(kv_domain_n_pools(test.domain), 0);
	kv_test_domain_finish(&test);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("domain");
	TCase *tcase = tcase_create("domain");

	tcase_add_test(tcase, test_domain_hash_index_finds_what_is_in_it);
	tcase_add_test(tcase, test_domain_system_clock_and_random);
	tcase_add_test(tcase, test_domain_boot_id_is_never_zero);
	tcase_add_test(tcase, test_domain_create_survives_every_failed_allocation);
	tcase_add_test(tcase, test_domain_pools_are_found);
	tcase_add_test(tcase, test_domain_pool_removal_waits_for_what_is_left);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK_GETENV);
}
