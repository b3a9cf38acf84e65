/*
 * Fast decodes from inside: memory of a pool and of its wave. Only core/fast_wave.c, which fills waves, and
 * core/fast_decode.c and core/fast_span.c, which work on them, include it.
 */
#ifndef CORE_FAST_INTERNAL_H
#define CORE_FAST_INTERNAL_H

#include <stdatomic.h>

#include "core/checked.h"
#include "core/fast_decode.h"

#define KV_FAST_ITEMS_MAX 1024u /* of one wave */

struct kv_fast_layer {
	struct kv_fast_side k, v;
	bool is_fast;
	uint32_t step_tokens; /* as many as a third of a second-level cache holds, 32, 64 or 128 */
};

struct kv_fast_item {
	uint32_t op_idx, row_first, n_rows;
	bool is_scalar;
	/* A query that is no number was found, in an earlier wave or while queries are prepared: nobody
	 * attends to it. What is found later keeps no head from looking at its rows, so that the first one is
	 * told. */
	atomic_bool is_refused;
	struct kv_attention_range tokens; /* of all its rows together */
	uint32_t n_pieces[2];             /* of [0, first_hi) and of [lo, hi) */
	uint32_t n_spans, span_pieces;
	uint64_t task_first, n_tasks;      /* of the step of spans */
	uint64_t prepared_at, partials_at; /* bytes in the workspace */
};

struct kv_fast_pool {
	const struct kv_batch_pages *pages;
	const struct kv_fast_kernels *kernels;
	struct kv_fast_layer *layers;
	bool has_exact; /* the pool has an exact window, with rows like these */
	struct kv_fast_side exact_k, exact_v;
	uint8_t *workspace;
	uint64_t workspace_bytes;
	/* the wave */
	struct kv_fast_item items[KV_FAST_ITEMS_MAX];
	uint32_t n_items;
	uint32_t op_next, row_next; /* the first row that is in no wave yet */
	uint64_t n_span_tasks;
};

/* ---- memory of an item ---- */

/* One prepared query; its slots follow, then those for rows of the exact window. */
struct kv_fast_prepared {
	float units[KV_FAST_PARTS_MAX], sums[KV_FAST_PARTS_MAX];
	float offset; /* scale * <q, k_center>, as logits count */
	float exact_unit, exact_sum;
	float padding[13];
};
_Static_assert(sizeof(struct kv_fast_prepared) % 64 == 0, "slots are aligned");

/*
 * What one span found for one query: softmax over its tokens, and the weighted sum; its slots follow, then
 * those of rows of the exact window.
 */
struct kv_fast_partial {
	float max, sum;
	float zeros[KV_FAST_PARTS_MAX];
	float padding[6];
};
_Static_assert(sizeof(struct kv_fast_partial) % 64 == 0, "slots are aligned");

static inline uint64_t kv_fast_prepared_exact_at(const struct kv_fast_layer *layer)
{
	const uint64_t slot_bytes = layer->k.has_numbers ? sizeof(float) : sizeof(int16_t);

	return sizeof(struct kv_fast_prepared) + kv_round_up_u64(layer->k.n_slots * slot_bytes, 64);
}

static inline uint64_t kv_fast_prepared_bytes(
	const struct kv_fast_pool *pool, const struct kv_fast_layer *layer)
{
	/* No slots where the pool has no exact window. */
	return kv_fast_prepared_exact_at(layer) + kv_round_up_u64(pool->exact_k.n_slots * sizeof(float), 64);
}

static inline uint64_t kv_fast_partial_exact_at(const struct kv_fast_layer *layer)
{
	return sizeof(struct kv_fast_partial) + kv_round_up_u64(layer->v.n_slots * sizeof(float), 64);
}

static inline uint64_t kv_fast_partial_bytes(
	const struct kv_fast_pool *pool, const struct kv_fast_layer *layer)
{
	return kv_fast_partial_exact_at(layer) + kv_round_up_u64(pool->exact_v.n_slots * sizeof(float), 64);
}

static inline float *kv_fast_exact_numbers(
	struct kv_fast_prepared *prepared, const struct kv_fast_layer *layer)
{
	return (float *)(void *)((uint8_t *)prepared + kv_fast_prepared_exact_at(layer));
}

static inline float *kv_fast_exact_sums(struct kv_fast_partial *partial, const struct kv_fast_layer *layer)
{
	return (float *)(void *)((uint8_t *)partial + kv_fast_partial_exact_at(layer));
}

/* ---- one item on its way ---- */

struct kv_fast_task {
	struct kv_fast_pool *pool;
	struct kv_fast_item *item;
	const struct kv_decode_op *op;
	const struct kv_fast_layer *layer;
	struct kv_attention_input input; /* of KV head `head` */
	uint32_t exact_lo;               /* from here on tokens are in ring blocks; UINT32_MAX: none is */
	uint32_t head;
	uint32_t n_group;   /* query heads of a KV head */
	uint32_t n_queries; /* of a KV head, all rows of the item: (row, query head of the KV head) */
};

static inline bool kv_fast_has_exact(const struct kv_fast_task *task)
{
	return task->exact_lo != UINT32_MAX;
}

/* Query `query` of a KV head: its row in the op, its head, and its place among all rows and heads. */
static inline uint32_t kv_fast_row_of(const struct kv_fast_task *task, uint32_t query)
{
	return task->item->row_first + query / task->n_group;
}

static inline uint32_t kv_fast_q_head_of(const struct kv_fast_task *task, uint32_t head, uint32_t query)
{
	return head * task->n_group + query % task->n_group;
}

static inline uint64_t kv_fast_place_of(const struct kv_fast_task *task, uint32_t query)
{
	return (uint64_t)kv_fast_row_of(task, query) * task->pool->pages->spec->q_heads +
		kv_fast_q_head_of(task, task->head, query);
}

static inline struct kv_fast_prepared *kv_fast_prepared_of(
	const struct kv_fast_task *task, uint32_t head, uint32_t query)
{
	const uint64_t at = (uint64_t)head * task->n_queries + query;

	return (struct kv_fast_prepared *)(void *)(task->pool->workspace + task->item->prepared_at +
		at * kv_fast_prepared_bytes(task->pool, task->layer));
}

static inline struct kv_fast_partial *kv_fast_partial_of(
	const struct kv_fast_task *task, uint32_t span, uint32_t head, uint32_t query)
{
	const uint64_t kv_heads = task->pool->pages->spec->kv_heads;
	const uint64_t at = (span * kv_heads + head) * task->n_queries + query;

	return (struct kv_fast_partial *)(void *)(task->pool->workspace + task->item->partials_at +
		at * kv_fast_partial_bytes(task->pool, task->layer));
}

static inline uint32_t kv_fast_min(uint32_t a, uint32_t b)
{
	return a < b ? a : b;
}

static inline uint32_t kv_fast_max(uint32_t a, uint32_t b)
{
	return a > b ? a : b;
}

/* The op's first token that is read from ring blocks; UINT32_MAX: none is. */
static inline uint32_t kv_fast_exact_lo(const struct kv_decode_op *op)
{
	return op->exact_table && op->exact_lo < op->n_tokens_seen ? op->exact_lo : UINT32_MAX;
}

static inline struct kv_attention_range kv_fast_range_of(
	const struct kv_fast_pool *pool, const struct kv_decode_op *op, uint32_t row)
{
	return kv_attention_range(op->n_tokens_seen, op->q_len, row, op->window,
		pool->pages->spec->layers[op->layer].sink_tokens);
}

/*
 * The token that a slope favours among those that are seen. In spans distances are counted from it, so the
 * logits that matter are near those without a slope, whatever float32 makes of the others.
 */
static inline int64_t kv_fast_favoured(const struct kv_attention_range *tokens, float slope)
{
	if (slope < 0)
		return tokens->first_hi > 0 ? 0 : tokens->lo;
	return (int64_t)tokens->hi - 1;
}

/* core/fast_span.c: all KV heads of one span, each query's result into its partial. task->head is 0. */
void kv_fast_attend(const struct kv_fast_task *task, uint32_t span, struct kv_fast_scratch *scratch);

#endif
