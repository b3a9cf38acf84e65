/*
 * What the tests of the domain share: a random source with a seed, pools from the short form, checks of
 * statuses.
 */
#ifndef TESTS_LIB_KV_CORE_TEST_H
#define TESTS_LIB_KV_CORE_TEST_H

#include <jansson.h>
#include <string.h>

#include "core/audit.h"
#include "core/clock.h"
#include "core/domain.h"
#include "core/pool_spec.h"
#include "tests/lib/kv_test.h"

struct kv_test_source {
	struct kv_random base;
	uint64_t state;
};

static inline uint64_t kv_test_source_next(struct kv_random *random)
{
	return kv_test_random(&kv_container_of(random, struct kv_test_source, base)->state);
}

static const struct kv_random_ops kv_test_source_ops = { .next = kv_test_source_next };

#define kv_assert_ok(expr)                                                                            \
	do {                                                                                          \
		const enum kv_status kv_assert_status_ = (expr);                                      \
		ck_assert_msg(kv_assert_status_ == KV_OK, "%s: status %d", #expr, kv_assert_status_); \
	} while (0)
#define kv_assert_status(expr, wanted) ck_assert_int_eq((int)(expr), (int)(wanted))

/* Short form plus, where not NULL, groups as JSON text. */
static inline struct kv_pool_spec *kv_test_spec(const char *text, const char *groups)
{
	struct kv_pool_spec *spec = NULL;
	struct kv_error err = { 0 };
	json_t *json = NULL;

	ck_assert_msg(kv_pool_spec_parse_short(text, &json, &err) == KV_OK, "%s", err.msg);
	if (groups)
		ck_assert_int_eq(json_object_set_new(json, "groups", json_loads(groups, 0, NULL)), 0);
	ck_assert_msg(kv_pool_spec_create(json, &spec, &err) == KV_OK, "%s", err.msg);
	json_decref(json);
	return spec;
}

/* A domain with one pool. */
struct kv_test_domain {
	struct kv_test_source source;
	struct kv_domain *domain;
	struct kv_pool *pool;
};

static inline void kv_test_domain_init(struct kv_test_domain *test, const struct kv_domain_limits *limits,
	const char *pool, const char *groups, uint64_t seed)
{
	struct kv_error err = { 0 };

	test->source = (struct kv_test_source){ { &kv_test_source_ops }, seed };
	kv_assert_ok(kv_domain_create(limits, &test->source.base, &test->domain, &err));
	kv_assert_ok(
		kv_domain_pool_add(test->domain, kv_test_spec(pool, groups), NULL, 0, 0, &test->pool, &err));
}

static inline void kv_test_audit(struct kv_domain *domain, struct kv_plan *const plans[], uint32_t n_plans)
{
	struct kv_error err = { 0 };

	ck_assert_msg(kv_audit_domain(domain, plans, n_plans, &err) == KV_OK, "%s", err.msg);
}

static inline void kv_test_domain_finish(struct kv_test_domain *test)
{
	kv_test_audit(test->domain, NULL, 0);
	kv_domain_destroy(test->domain);
}

/* A session without name, owner and reservation. */
static inline struct kv_session *kv_test_open(struct kv_test_domain *test)
{
	const struct kv_open_params params = { .pool = test->pool };
	struct kv_session *session = NULL;

	kv_assert_ok(kv_session_open(test->domain, &params, 1, &session, NULL));
	return session;
}

/* Gives everything back that waits. */
static inline void kv_test_release_all(struct kv_domain *domain)
{
	for (uint32_t i = 0; i < 100000 && kv_domain_has_zombies(domain); i++)
		kv_domain_release(domain, 1024);
	ck_assert(!kv_domain_has_zombies(domain));
}

#endif
