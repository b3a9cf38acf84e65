/*
 * Decodes of a batch on the fast kernels: in waves, each of which fits into the pool's workspace and has
 * three steps, one after the other: queries are prepared, spans of tokens are attended to, spans are put
 * together.
 *
 * Tokens are divided into pieces of KV_FAST_PIECE_TOKENS at multiples of it; a span is a run of pieces, two
 * from KV_FAST_LONG_PIECES on and as many as make at most KV_FAST_SPANS_MAX spans, and is gone through in
 * steps of KV_FAST_STEP_TOKENS at multiples of it, or a quarter or half as many where rows are long, each
 * with a maximum of its own that joins the running one. So what is computed, and in which order, follows from
 * the item alone: the same bits in any company and with any number of threads. Where the exact window begins
 * within a step, the step ends there and another one begins.
 *
 * The tasks of one step may run in any order and on any threads, each with a scratch of its own.
 */
#ifndef CORE_FAST_DECODE_H
#define CORE_FAST_DECODE_H

#include "core/batch_run.h"
#include "core/fast.h"

#define KV_FAST_PIECE_TOKENS 512u
#define KV_FAST_SPANS_MAX    64u
#define KV_FAST_LONG_PIECES  32u
#define KV_FAST_SEATS_MAX    128u /* queries that go through a span together */

enum kv_fast_step { KV_FAST_PREPARE, KV_FAST_SPANS, KV_FAST_MERGE, KV_FAST_STEPS };

struct kv_fast_pool;
struct kv_fast_partial;

/* A query on its way through a span. */
struct kv_fast_seat {
	struct kv_attention_range tokens;
	float offset, slope;
	struct kv_fast_partial *partial; /* NULL: only fills a call up */
};

/* What the kernels take of all seats, of rows of one kind. */
struct kv_fast_seat_rows {
	struct kv_fast_query queries[KV_FAST_SEATS_MAX];
	float *sums[KV_FAST_SEATS_MAX];
};

/* One per thread; no initial state. */
struct kv_fast_scratch {
	float logits[KV_FAST_SEATS_MAX][KV_FAST_STEP_TOKENS];
	struct kv_fast_seat seats[KV_FAST_SEATS_MAX];
	struct kv_fast_seat_rows paged, ring; /* ring: of items with an exact window */
	float *zeros[KV_FAST_SEATS_MAX];
	float unused[KV_FAST_SLOTS_MAX]; /* sums of queries that only fill a call up */
	float unused_zeros[KV_FAST_PARTS_MAX];
	double prepared[KV_PREPARED_DIM_MAX];
	double slots[KV_FAST_SLOTS_MAX];
	double exact[KV_HEAD_DIM_MAX]; /* a query, later a weighted sum, of the exact window */
	float q[KV_HEAD_DIM_MAX], out[KV_HEAD_DIM_MAX];
};

/* `pages` outlives it. The caller owns it until kv_fast_pool_destroy(), which accepts NULL. */
KV_MUST_CHECK enum kv_status kv_fast_pool_create(const struct kv_batch_pages *pages,
	const struct kv_fast_kernels *kernels, struct kv_fast_pool **out, struct kv_error *err);
void kv_fast_pool_destroy(struct kv_fast_pool *pool);

/* Layers whose rows the kernels take; the others go through kv_batch_run_task(). */
bool kv_fast_pool_has(const struct kv_fast_pool *pool, uint32_t layer);

/* Before the first wave of a batch. One batch of a pool at a time. */
void kv_fast_begin(struct kv_fast_pool *pool);
/* The next decodes that fit; false: there are no more. The tasks of the last wave are finished. */
bool kv_fast_next_wave(struct kv_fast_pool *pool, const struct kv_batch *batch);
/* Of the wave. *chunk: how many of them are worth taking together. n_workers: at least 1. */
uint64_t kv_fast_n_tasks(
	const struct kv_fast_pool *pool, enum kv_fast_step step, uint32_t n_workers, uint64_t *chunk);
struct kv_finding kv_fast_run_task(struct kv_fast_pool *pool, const struct kv_batch *batch,
	enum kv_fast_step step, uint64_t task_idx, struct kv_fast_scratch *fast,
	struct kv_batch_scratch *scalar);

#endif
