/*
 * A domain with one pool and one session, and items on it: what the tests of sequences share. The pool has 4
 * layers in two groups of 10 blocks of 16 tokens.
 */
#ifndef TESTS_LIB_KV_SEQUENCE_RIG_H
#define TESTS_LIB_KV_SEQUENCE_RIG_H

#include "core/backend.h"
#include "core/domain.h"
#include "core/domain_internal.h"
#include "tests/lib/kv_core_test.h"

#define RIG_POOL   "name=p,layers=4,q_heads=1,kv_heads=1,head_dim=16,k=f32,v=f32,block_size=16,blocks=10"
#define RIG_GROUPS "[[0,1],[2,3]]"

static const struct kv_domain_limits rig_limits = {
	.sessions_max = 4,
	.sequences_max = 6,
	.lease_ms = 1000,
	.lease_ms_max = 1000,
};

struct rig {
	struct kv_test_domain test;
	struct kv_pool *pool;
	struct kv_session *session;
};

static inline void rig_init(struct rig *rig, const char *pool, const char *groups)
{
	kv_test_domain_init(&rig->test, &rig_limits, pool, groups, 1);
	rig->pool = rig->test.pool;
	rig->session = kv_test_open(&rig->test);
}

static inline void rig_finish(struct rig *rig)
{
	kv_test_domain_finish(&rig->test);
}

static inline struct kv_item plan(struct rig *rig, uint8_t kind, uint64_t id, uint32_t position,
	uint32_t n_tokens, uint32_t layer_first, uint32_t n_layers, uint8_t flags)
{
	struct kv_item item = {
		.sequence_id = id,
		.position = position,
		.n_tokens = n_tokens,
		.q_len = kind == KV_ITEM_DECODE || kind == KV_ITEM_APPEND_DECODE,
		.kind = kind,
		.flags = flags,
	};

	kv_item_plan(rig->session, &item, layer_first, n_layers, 50);
	ck_assert_int_eq(item.sequence != NULL, item.status == KV_OK);
	return item;
}

/* An append on all layers that must succeed. */
static inline struct kv_item append(struct rig *rig, uint64_t id, uint32_t position, uint32_t n_tokens)
{
	const struct kv_item item =
		plan(rig, KV_ITEM_APPEND, id, position, n_tokens, 0, 4, position == 0 ? KV_ITEM_CREATE : 0);

	ck_assert_uint_eq(item.status, KV_OK);
	return item;
}

static inline void finish(
	struct kv_item *item, enum kv_status status, enum kv_status expected, uint32_t length)
{
	item->status = (uint16_t)status;
	kv_item_finish(item, 0, 4);
	ck_assert_uint_eq(item->status, expected);
	ck_assert_uint_eq(item->length, length);
	ck_assert_ptr_null(item->sequence);
}

static inline void append_now(struct rig *rig, uint64_t id, uint32_t position, uint32_t n_tokens)
{
	struct kv_item item = append(rig, id, position, n_tokens);

	finish(&item, KV_OK, KV_OK, position + n_tokens);
}

static inline void assert_refused(
	const struct kv_item *item, enum kv_status status, uint32_t length, uint32_t layer)
{
	ck_assert_uint_eq(item->status, status);
	ck_assert_uint_eq(item->length, length);
	ck_assert_uint_eq(item->layer, layer);
	ck_assert_uint_eq(item->row, KV_ROW_NONE);
	ck_assert_uint_eq(item->retry_after_ms, status == KV_POOL_FULL || status == KV_BUSY_RETRY ? 10 : 0);
}

static inline uint32_t n_free(const struct rig *rig, uint32_t g)
{
	return rig->pool->blocks[g].counts.n_free;
}

#endif
