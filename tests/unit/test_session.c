#include "core/domain.h"

#include "core/domain_internal.h"
#include "tests/lib/kv_core_test.h"

#define MS   KV_NS_PER_MS
#define POOL "name=p,layers=2,q_heads=2,kv_heads=1,head_dim=16,k=f32,v=bf16,block_size=16,blocks=20"

static const struct kv_domain_limits limits = {
	.sessions_max = 3,
	.sequences_max = 200,
	.lease_ms = 1000,
	.lease_ms_max = 60000,
};

static struct kv_session *open_named(
	struct kv_test_domain *test, const char *name, uint64_t tenant, uint64_t owner_id, uint64_t now_ns)
{
	const struct kv_open_params params = {
		.pool = test->pool,
		.name = name,
		.name_bytes = (uint32_t)strlen(name),
		.tenant = tenant,
		.owner_id = owner_id,
	};
	struct kv_session *session = NULL;

	kv_assert_ok(kv_session_open(test->domain, &params, now_ns, &session, NULL));
	return session;
}

static enum kv_status attach(struct kv_test_domain *test, const char *name, uint64_t tenant,
	uint64_t owner_id, uint64_t now_ns, struct kv_session **session)
{
	return kv_session_attach(
		test->domain, name, (uint32_t)strlen(name), tenant, owner_id, now_ns, session);
}

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

/* ---- handles ---- */

/* A handle is generation, boot tag and slot; each wrong part has its own answer (PROTOCOL 0.8). */
START_TEST(test_session_handles_are_checked_part_by_part)
{
	struct kv_test_domain test;
	struct kv_session *found = NULL;

	kv_test_domain_init(&test, &limits, POOL, NULL, 1);

	struct kv_session *session = kv_test_open(&test);
	const uint64_t handle = session->handle;

	ck_assert_uint_ne(handle >> 16 & 0xFFFF, 0);
	ck_assert_uint_eq(handle & 0xFFFF, 0);
	kv_assert_ok(kv_session_find(test.domain, handle, &found));
	ck_assert_ptr_eq(found, session);
	found = NULL;
	kv_assert_status(kv_session_find(test.domain, 0, &found), KV_NOT_FOUND);
	kv_assert_status(kv_session_find(test.domain, handle ^ 1ull << 16, &found), KV_STALE_EPOCH);
	kv_assert_status(kv_session_find(test.domain, 1, &found), KV_STALE_EPOCH);
	kv_assert_status(kv_session_find(test.domain, handle ^ 1ull << 32, &found), KV_STALE_HANDLE);
	kv_assert_status(kv_session_find(test.domain, handle | 1, &found), KV_STALE_HANDLE);
	kv_assert_status(kv_session_find(test.domain, handle | 0xFFFF, &found), KV_STALE_HANDLE);
	kv_session_close(test.domain, session, false);
	kv_assert_status(kv_session_find(test.domain, handle, &found), KV_STALE_HANDLE);
	ck_assert_ptr_null(found);
	kv_test_domain_finish(&test);
}
END_TEST

/* An expired session says so until its slot is used again, which happens to the slot that is free longest. */
START_TEST(test_session_expired_handles_say_so_until_reused)
{
	struct kv_test_domain test;
	struct kv_session *found;
	uint64_t handles[3];

	kv_test_domain_init(&test, &limits, POOL, NULL, 1);
	for (uint32_t i = 0; i < 3; i++)
		handles[i] = kv_test_open(&test)->handle;
	for (uint32_t i = 0; i < 3; i++) {
		kv_assert_ok(kv_session_find(test.domain, handles[(i + 1) % 3], &found));
		kv_session_close(test.domain, found, true);
	}
	for (uint32_t i = 0; i < 3; i++) {
		for (uint32_t j = 0; j < 3; j++)
			kv_assert_status(kv_session_find(test.domain, handles[(j + 1) % 3], &found),
				j < i ? KV_STALE_HANDLE : KV_SESSION_EXPIRED);
		found = kv_test_open(&test);
		ck_assert_uint_eq(found->handle & 0xFFFF, handles[(i + 1) % 3] & 0xFFFF);
		ck_assert_uint_eq(
			(uint32_t)(found->handle >> 32), (uint32_t)(handles[(i + 1) % 3] >> 32) + 1);
	}
	kv_test_domain_finish(&test);
}
END_TEST

/* ---- opening ---- */

/*
 * Limits: number of sessions, reservation above the pool or above what is free; nothing changes on a refusal.
 */
START_TEST(test_session_open_is_bounded)
{
	struct kv_test_domain test;
	struct kv_session *session = NULL;
	struct kv_error err = { 0 };

	kv_test_domain_init(&test, &limits, POOL, "[[0],[1]]", 1);

	struct kv_open_params params = { .pool = test.pool, .reserve_blocks = 21 };

	kv_assert_status(kv_session_open(test.domain, &params, 1, &session, &err), KV_LIMIT);
	ck_assert_str_eq(err.msg, "reserve_blocks 21 is above the pool's 20 blocks");
	params.reserve_blocks = 12;
	kv_assert_ok(kv_session_open(test.domain, &params, 1, &session, &err));
	ck_assert_uint_eq(session->n_blocks_reserved[0], 12);
	ck_assert_uint_eq(session->n_blocks_reserved[1], 12);
	/* room in one group only: the part that was reserved is given back */
	kv_assert_ok(kv_block_pool_reserve(&test.pool->blocks[1], 2));
	params.reserve_blocks = 7;
	kv_assert_status(kv_session_open(test.domain, &params, 1, &session, &err), KV_POOL_FULL);
	kv_block_pool_unreserve(&test.pool->blocks[1], 2);
	ck_assert_uint_eq(test.pool->blocks[0].counts.n_reserved, 12);
	params.reserve_blocks = 0;
	kv_test_open(&test);
	kv_assert_ok(kv_session_open(test.domain, &params, 1, &session, &err));
	kv_assert_status(kv_session_open(test.domain, &params, 1, &session, &err), KV_LIMIT);
	ck_assert_str_eq(err.msg, "3 sessions are open, which is the limit");
	ck_assert_uint_eq(kv_domain_n_sessions(test.domain), 3);
	kv_test_audit(test.domain, NULL, 0);
	kv_session_close(test.domain, session, false);
	kv_assert_ok(kv_session_open(test.domain, &params, 1, &session, &err));
	kv_test_domain_finish(&test);
}
END_TEST

/* Zero means the default; values above a bound are lowered to it. */
START_TEST(test_session_open_fills_in_defaults)
{
	struct kv_test_domain test;
	struct kv_session *session;

	kv_test_domain_init(&test, &limits, POOL, NULL, 1);

	struct kv_open_params params = { .pool = test.pool, .priority = 2, .tenant = 77, .owner_id = 5 };

	kv_assert_ok(kv_session_open(test.domain, &params, 9, &session, NULL));
	ck_assert_uint_eq(session->lease_ms, 1000);
	ck_assert_uint_eq(session->sequences_max, 200);
	ck_assert_uint_eq(session->tokens_max, 320);
	ck_assert_uint_eq(session->priority, 2);
	ck_assert_uint_eq(session->tenant, 77);
	ck_assert_uint_eq(session->owner_id, 5);
	ck_assert_uint_eq(session->opened_ns, 9);
	ck_assert_uint_eq(session->lease_end_ns, 9 + 1000 * MS);
	ck_assert_str_eq(session->name, "");
	params.lease_ms = UINT32_MAX;
	params.sequences_max = 4;
	params.tokens_max = 321;
	kv_assert_ok(kv_session_open(test.domain, &params, 9, &session, NULL));
	ck_assert_uint_eq(session->lease_ms, 60000);
	ck_assert_uint_eq(session->sequences_max, 4);
	ck_assert_uint_eq(session->tokens_max, 320);
	kv_test_domain_finish(&test);
}
END_TEST

/* Names belong to the tenant: two tenants may use the same one, one tenant may not use it twice. */
START_TEST(test_session_names_belong_to_the_tenant)
{
	struct kv_test_domain test;
	struct kv_session *found = NULL, *a, *b;
	struct kv_error err = { 0 };

	kv_test_domain_init(&test, &limits, POOL, NULL, 1);
	a = open_named(&test, "chat", 1, 10, 1);
	b = open_named(&test, "chat", 2, 20, 1);

	const struct kv_open_params params = {
		.pool = test.pool,
		.name = "chat",
		.name_bytes = 4,
		.tenant = 1,
	};

	kv_assert_status(kv_session_open(test.domain, &params, 1, &found, &err), KV_EXISTS);
	ck_assert_str_eq(err.msg, "session \"chat\" is open already");
	ck_assert_ptr_eq(kv_session_by_name(test.domain, "chat", 4, 1), a);
	ck_assert_ptr_eq(kv_session_by_name(test.domain, "chat", 4, 2), b);
	ck_assert_ptr_null(kv_session_by_name(test.domain, "chat", 3, 1));
	ck_assert_ptr_null(kv_session_by_name(test.domain, "", 0, 1));
	ck_assert_uint_eq(a->owner_id, 10); /* looking changes nothing */
	kv_assert_ok(attach(&test, "chat", 1, 11, 500 * MS, &found));
	ck_assert_ptr_eq(found, a);
	ck_assert_uint_eq(a->owner_id, 11);
	ck_assert_uint_eq(a->lease_end_ns, 1500 * MS);
	ck_assert_uint_eq(b->owner_id, 20);
	kv_assert_status(attach(&test, "chat", 3, 11, 1, &found), KV_NOT_FOUND);
	kv_assert_status(attach(&test, "cha", 1, 11, 1, &found), KV_NOT_FOUND);
	kv_assert_status(attach(&test, "", 1, 11, 1, &found), KV_NOT_FOUND);
	kv_session_close(test.domain, a, false);
	kv_assert_status(attach(&test, "chat", 1, 11, 1, &found), KV_NOT_FOUND);
	open_named(&test, "chat", 1, 10, 1);
	kv_test_domain_finish(&test);
}
END_TEST

/* The name of an expired session says so until its slot or the name is used again. */
START_TEST(test_session_expired_names_say_so_until_reused)
{
	struct kv_test_domain test;
	struct kv_session *found;

	kv_test_domain_init(&test, &limits, POOL, NULL, 1);
	kv_session_close(test.domain, open_named(&test, "a", 1, 0, 1), true);
	kv_session_close(test.domain, open_named(&test, "b", 1, 0, 1), true);
	kv_assert_status(attach(&test, "a", 1, 9, 1, &found), KV_SESSION_EXPIRED);
	ck_assert_ptr_null(kv_session_by_name(test.domain, "a", 1, 1));
	open_named(&test, "a", 1, 0, 1); /* the third slot, and the name of the first */
	kv_assert_ok(attach(&test, "a", 1, 9, 1, &found));
	kv_session_close(test.domain, found, false);
	kv_assert_status(attach(&test, "a", 1, 9, 1, &found), KV_NOT_FOUND);
	kv_test_open(&test); /* the first slot */
	kv_assert_status(attach(&test, "b", 1, 9, 1, &found), KV_SESSION_EXPIRED);
	kv_test_open(&test); /* the second */
	kv_assert_status(attach(&test, "b", 1, 9, 1, &found), KV_NOT_FOUND);
	kv_test_domain_finish(&test);
}
END_TEST

/* ---- leases and owners ---- */

/* A session expires when its lease has ended, not before, and not while something is outstanding. */
START_TEST(test_session_leases_end)
{
	struct kv_test_domain test;
	struct kv_session *found;

	kv_test_domain_init(&test, &limits, POOL, NULL, 1);
	ck_assert_uint_eq(kv_session_next_expiry_ns(test.domain), UINT64_MAX);

	struct kv_session *a = open_named(&test, "a", 1, 0, 1 * MS);
	struct kv_session *b = open_named(&test, "b", 1, 0, 2 * MS);
	const uint64_t handle_b = b->handle;

	ck_assert_uint_eq(kv_session_next_expiry_ns(test.domain), 1001 * MS);
	ck_assert_uint_eq(kv_session_expire(test.domain, 1001 * MS - 1, 16), 0);
	kv_session_renew(a, 900 * MS);
	ck_assert_uint_le(kv_session_next_expiry_ns(test.domain), 1002 * MS);
	ck_assert_uint_eq(kv_session_expire(test.domain, 1001 * MS, 16), 0);
	ck_assert_uint_eq(kv_session_next_expiry_ns(test.domain), 1002 * MS);
	b->n_outstanding = 1;
	ck_assert_uint_eq(kv_session_expire(test.domain, 1002 * MS, 16), 0);
	ck_assert_uint_eq(kv_session_next_expiry_ns(test.domain), 1012 * MS);
	b->n_outstanding = 0;
	ck_assert_uint_eq(kv_session_expire(test.domain, 1012 * MS, 16), 1);
	kv_assert_status(kv_session_find(test.domain, handle_b, &found), KV_SESSION_EXPIRED);
	kv_assert_status(attach(&test, "b", 1, 9, 1, &found), KV_SESSION_EXPIRED);
	kv_assert_ok(kv_session_find(test.domain, a->handle, &found));
	ck_assert_uint_eq(kv_session_expire(test.domain, 1900 * MS - 1, 16), 0);
	ck_assert_uint_eq(kv_session_expire(test.domain, 1900 * MS, 16), 1);
	ck_assert_uint_eq(kv_domain_n_sessions(test.domain), 0);
	kv_test_domain_finish(&test);
}
END_TEST

/*
 * Many sessions with random leases, renewals and closings: none expires early, each within one call when due.
 */
START_TEST(test_session_lease_heap_is_exact)
{
	enum { N = 300 };
	const struct kv_domain_limits many = {
		.sessions_max = N, .sequences_max = 10, .lease_ms = 1000, .lease_ms_max = 100000
	};
	struct kv_test_domain test;
	uint64_t seed = 0x5EED0004, now_ns = 1, ends[N] = { 0 };
	struct kv_session *sessions[N] = { NULL };

	printf("test_session: seed %llx\n", (unsigned long long)seed);
	kv_test_domain_init(&test, &many, POOL, NULL, 1);
	for (uint32_t step = 0; step < 5000; step++) {
		const uint32_t i = (uint32_t)(kv_test_random(&seed) % N);
		uint32_t n_due = 0, n_open = 0;

		now_ns += kv_test_random(&seed) % (3 * MS);
		if (!sessions[i]) {
			const struct kv_open_params params = {
				.pool = test.pool,
				.lease_ms = 1 + (uint32_t)(kv_test_random(&seed) % 500),
			};

			kv_assert_ok(kv_session_open(test.domain, &params, now_ns, &sessions[i], NULL));
			ends[i] = now_ns + params.lease_ms * MS;
		} else if (kv_test_random(&seed) % 4) {
			kv_session_renew(sessions[i], now_ns);
			ends[i] = now_ns + sessions[i]->lease_ms * MS;
		} else {
			kv_session_close(test.domain, sessions[i], false);
			sessions[i] = NULL;
		}
		for (uint32_t j = 0; j < N; j++) {
			if (sessions[j])
				ck_assert_uint_ge(ends[j], kv_session_next_expiry_ns(test.domain));
			if (sessions[j] && ends[j] <= now_ns) {
				n_due++;
				sessions[j] = NULL;
			}
			n_open += sessions[j] != NULL;
		}
		ck_assert_uint_eq(kv_session_expire(test.domain, now_ns, N), n_due);
		ck_assert_uint_eq(kv_domain_n_sessions(test.domain), n_open);
		if (step % 100 == 0)
			kv_test_audit(test.domain, NULL, 0);
	}
	kv_test_domain_finish(&test);
}
END_TEST

/* One call closes at most n_max sessions; what is due stays due. */
START_TEST(test_session_expiry_is_bounded)
{
	struct kv_test_domain test;

	kv_test_domain_init(&test, &limits, POOL, NULL, 1);
	for (uint32_t i = 0; i < 3; i++)
		kv_test_open(&test);
	ck_assert_uint_eq(kv_session_expire(test.domain, 9999 * MS, 2), 2);
	ck_assert_uint_le(kv_session_next_expiry_ns(test.domain), 9999 * MS);
	ck_assert_uint_eq(kv_session_expire(test.domain, 9999 * MS, 2), 1);
	kv_test_domain_finish(&test);
}
END_TEST

/* A connection that is gone owns nothing any more; its sessions' leases run on from that moment. */
START_TEST(test_session_owner_lost_fences_its_sessions)
{
	struct kv_test_domain test;

	kv_test_domain_init(&test, &limits, POOL, NULL, 1);

	struct kv_session *a = open_named(&test, "a", 1, 50, 1);
	struct kv_session *b = open_named(&test, "b", 1, 51, 1);
	struct kv_session *c = open_named(&test, "c", 1, 50, 1);

	kv_session_renew_owner(test.domain, 50, 10 * MS);
	ck_assert_uint_eq(a->lease_end_ns, 1010 * MS);
	ck_assert_uint_eq(b->lease_end_ns, 1000 * MS + 1);
	ck_assert_uint_eq(c->lease_end_ns, 1010 * MS);
	kv_session_owner_lost(test.domain, 50, 20 * MS);
	ck_assert_uint_eq(a->owner_id, 0);
	ck_assert_uint_eq(b->owner_id, 51);
	ck_assert_uint_eq(c->owner_id, 0);
	ck_assert_uint_eq(c->lease_end_ns, 1020 * MS);
	kv_session_owner_lost(test.domain, 50, 30 * MS);
	kv_session_owner_lost(test.domain, 0, 30 * MS);
	/* others, some of them in the same chain of the index */
	for (uint64_t owner_id = 52; owner_id < 152; owner_id++) {
		kv_session_renew_owner(test.domain, owner_id, 40 * MS);
		kv_session_owner_lost(test.domain, owner_id, 40 * MS);
	}
	ck_assert_uint_eq(b->owner_id, 51);
	ck_assert_uint_eq(b->lease_end_ns, 1000 * MS + 1);
	ck_assert_uint_eq(a->lease_end_ns, 1020 * MS);
	kv_test_domain_finish(&test);
}
END_TEST

/* ---- walking and closing ---- */

/* Walking goes through the open sessions by slot and can be continued where it stopped. */
START_TEST(test_session_walk_goes_by_slot)
{
	enum { N = 200 };
	const struct kv_domain_limits many = {
		.sessions_max = N, .sequences_max = 10, .lease_ms = 1000, .lease_ms_max = 1000
	};
	struct kv_test_domain test;
	struct kv_session *sessions[N];
	uint32_t slot = 0, n = 0;

	kv_test_domain_init(&test, &many, POOL, NULL, 1);
	ck_assert_ptr_null(kv_session_next(test.domain, &slot));
	for (uint32_t i = 0; i < N; i++)
		sessions[i] = kv_test_open(&test);
	for (uint32_t i = 0; i < N; i++) {
		if (i % 7 != 3)
			kv_session_close(test.domain, sessions[i], false);
	}
	slot = 0;
	for (struct kv_session *session; (session = kv_session_next(test.domain, &slot)) != NULL; n++) {
		ck_assert_ptr_eq(session, sessions[3 + 7 * n]);
		ck_assert_uint_eq(slot, 3 + 7 * n + 1);
	}
	ck_assert_uint_eq(n, 29);
	ck_assert_ptr_null(kv_session_next(test.domain, &slot));
	slot = UINT32_MAX;
	ck_assert_ptr_null(kv_session_next(test.domain, &slot));
	kv_test_domain_finish(&test);
}
END_TEST

/*
 * A large session is taken apart in bounded steps; until then its slot is busy, its handle and rows are gone.
 */
START_TEST(test_session_close_is_bounded)
{
	const struct kv_domain_limits one = {
		.sessions_max = 1, .sequences_max = 200, .lease_ms = 1000, .lease_ms_max = 1000
	};
	struct kv_test_domain test;
	struct kv_session *found;
	struct kv_error err = { 0 };

	kv_test_domain_init(&test, &one,
		"name=p,layers=2,q_heads=2,kv_heads=1,head_dim=16,k=f32,v=bf16,block_size=16,blocks=200",
		NULL, 1);

	struct kv_session *session = kv_test_open(&test);
	const struct kv_open_params params = { .pool = test.pool };
	const uint64_t handle = session->handle;
	uint32_t n_given = 0, n_calls = 0;

	for (uint64_t id = 1; id <= 150; id++)
		add_sequence(session, id);
	kv_session_close(test.domain, session, false);
	kv_assert_status(kv_session_find(test.domain, handle, &found), KV_STALE_HANDLE);
	ck_assert_uint_eq(test.pool->n_tokens_committed, 0);
	ck_assert_uint_eq(test.pool->layer_tokens[1], 0);
	ck_assert_uint_eq(test.pool->n_sequences, 0);
	ck_assert_uint_eq(test.pool->n_zombies, 150);
	ck_assert_uint_eq(test.pool->blocks[0].counts.n_owned, 150);
	kv_assert_status(kv_session_open(test.domain, &params, 1, &found, &err), KV_BUSY_RETRY);
	ck_assert_str_eq(err.msg, "1 closed sessions are still being taken apart");
	kv_test_audit(test.domain, NULL, 0);
	while (kv_domain_has_zombies(test.domain)) {
		const uint32_t n = kv_domain_release(test.domain, 10);

		ck_assert_uint_le(n, 10);
		n_given += n;
		n_calls++;
		kv_test_audit(test.domain, NULL, 0);
	}
	ck_assert_uint_eq(n_given, 150);
	/* 150 blocks, and 86 objects that close() did not look at: 10 a call */
	ck_assert_uint_eq(n_calls, 24);
	ck_assert_uint_eq(kv_domain_release(test.domain, 10), 0);
	kv_assert_ok(kv_session_open(test.domain, &params, 1, &found, &err));
	kv_test_domain_finish(&test);
}
END_TEST

/* Releasing takes pools by turns, so that one pool's closed sessions do not hold back another's. */
START_TEST(test_session_release_is_fair_to_pools)
{
	struct kv_test_domain test;
	struct kv_pool *other;

	kv_test_domain_init(&test, &limits, POOL, NULL, 1);
	kv_assert_ok(kv_domain_pool_add(test.domain,
		kv_test_spec("name=q,layers=2,q_heads=2,kv_heads=1,head_dim=16,k=f32,v=bf16,block_size=16,"
			     "blocks=20",
			NULL),
		NULL, 0, 0, &other, NULL));

	struct kv_session *sessions[2] = { kv_test_open(&test), NULL };
	const struct kv_open_params params = { .pool = other };

	kv_assert_ok(kv_session_open(test.domain, &params, 1, &sessions[1], NULL));
	for (uint64_t id = 1; id <= 8; id++) {
		add_sequence(sessions[0], id);
		add_sequence(sessions[1], id);
	}
	kv_session_close(test.domain, sessions[0], false);
	kv_session_close(test.domain, sessions[1], false);
	for (uint32_t i = 0; i < 4; i++)
		ck_assert_uint_eq(kv_domain_release(test.domain, 2), 2);
	ck_assert_uint_eq(test.pool->blocks[0].counts.n_owned, 4);
	ck_assert_uint_eq(other->blocks[0].counts.n_owned, 4);
	kv_test_domain_finish(&test);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("session");
	TCase *tcase = tcase_create("session");

	tcase_add_test(tcase, test_session_handles_are_checked_part_by_part);
	tcase_add_test(tcase, test_session_expired_handles_say_so_until_reused);
	tcase_add_test(tcase, test_session_open_is_bounded);
	tcase_add_test(tcase, test_session_open_fills_in_defaults);
	tcase_add_test(tcase, test_session_names_belong_to_the_tenant);
	tcase_add_test(tcase, test_session_expired_names_say_so_until_reused);
	tcase_add_test(tcase, test_session_leases_end);
	tcase_add_test(tcase, test_session_lease_heap_is_exact);
	tcase_add_test(tcase, test_session_expiry_is_bounded);
	tcase_add_test(tcase, test_session_owner_lost_fences_its_sessions);
	tcase_add_test(tcase, test_session_walk_goes_by_slot);
	tcase_add_test(tcase, test_session_close_is_bounded);
	tcase_add_test(tcase, test_session_release_is_fair_to_pools);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK_GETENV);
}
