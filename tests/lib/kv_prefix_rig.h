/*
 * Keys of tokens that branch, and PUBLISH and MATCH that are audited: what the tests of prefixes share.
 */
#ifndef TESTS_LIB_KV_PREFIX_RIG_H
#define TESTS_LIB_KV_PREFIX_RIG_H

#include "core/prefix.h"
#include "tests/lib/kv_sequence_rig.h"

#define TOKENS_MAX 160u

static uint8_t tokens[4 * TOKENS_MAX];

/* Token i is i below the branch and way * 1000 + i from there on. */
static inline struct kv_prefix_key key_of(uint32_t n_tokens, uint32_t branch, uint32_t way)
{
	for (uint32_t i = 0; i < TOKENS_MAX; i++) {
		const uint32_t token = i < branch ? i : way * 1000 + i;

		memcpy(tokens + 4 * i, &token, sizeof(token));
	}
	return (struct kv_prefix_key){ .tokens = tokens, .n_tokens = n_tokens };
}

static inline struct kv_prefix_result publish(
	struct rig *rig, uint64_t id, const struct kv_prefix_key *key, uint32_t ttl_ms, uint64_t now_ms)
{
	struct kv_prefix_result result;

	kv_assert_ok(kv_prefix_publish(rig->session, id, key, ttl_ms, now_ms * KV_NS_PER_MS, &result));
	kv_test_audit(rig->test.domain, NULL, 0);
	return result;
}

/* How many tokens are found. */
static inline uint32_t match(struct rig *rig, uint64_t id, const struct kv_prefix_key *key, uint64_t now_ms)
{
	struct kv_prefix_result result;
	const enum kv_status status =
		kv_prefix_match(rig->session, id, key, false, now_ms * KV_NS_PER_MS, &result);

	kv_test_audit(rig->test.domain, NULL, 0);
	ck_assert(status == KV_OK || status == KV_NOT_FOUND);
	ck_assert_int_eq(status == KV_OK, result.n_tokens > 0);
	return result.n_tokens;
}

#endif
