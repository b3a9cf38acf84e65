/*
 * What a batch does to pages in host memory, as pure functions: the scalar truth behind the CPU backend and
 * the simulation's backend. No threads, no heap after init, no clock.
 *
 * A batch is run in phases, one after the other: copies, updates, decodes, transfers. The tasks of one phase
 * touch disjoint memory, so they may run in any order and on any threads, each with a scratch of its own;
 * what they find is merged by kv_batch_merge(), whose outcome does not depend on the order either.
 * kv_batch_run() does it all at once.
 *
 * The planner has promised that block ids, slots and layers lie inside the pool and that two ops of one phase
 * never write the same slot; the rows themselves may be anything.
 */
#ifndef CORE_BATCH_RUN_H
#define CORE_BATCH_RUN_H

#include <stdint.h>

#include "core/attention.h"
#include "core/backend.h"
#include "core/format.h"

/* Page tensors of one layer: [blocks, block_size, kv_heads, row_bytes] (FORMATS 6). */
struct kv_layer_pages {
	uint8_t *k, *v;
	uint8_t *exact_k, *exact_v; /* [ring blocks, block_size, kv_heads, head_dim] bf16, or NULL */
	uint64_t k_bytes_before, v_bytes_before; /* bytes of one packed row of each layer before this one */
};

struct kv_batch_pages {
	const struct kv_pool_spec *spec;
	struct kv_layer_pages *layers; /* [n_layers], owned */
};

/* Bytes of all page tensors, each at a multiple of 64. False on overflow. */
bool kv_batch_pages_bytes(const struct kv_pool_spec *spec, uint64_t *n_bytes);
/* Lays the tensors out from `base` on, which is aligned to 64 and holds kv_batch_pages_bytes(). */
KV_MUST_CHECK enum kv_status kv_batch_pages_init(
	struct kv_batch_pages *pages, const struct kv_pool_spec *spec, uint8_t *base, struct kv_error *err);
void kv_batch_pages_finish(struct kv_batch_pages *pages);

enum kv_batch_phase { KV_PHASE_COPIES, KV_PHASE_UPDATES, KV_PHASE_DECODES, KV_PHASE_TRANSFERS, KV_PHASES };

/* One per thread; no initial state. */
struct kv_batch_scratch {
	float row[KV_HEAD_DIM_MAX];
	float q[KV_ATTENTION_QUERIES_MAX * KV_HEAD_DIM_MAX];
	float out[KV_ATTENTION_QUERIES_MAX * KV_HEAD_DIM_MAX];
	float lse[KV_ATTENTION_QUERIES_MAX];
	struct kv_row_scratch codec;
	struct kv_attention_scratch attention;
};

/* What a task found; status OK: nothing. */
struct kv_finding {
	uint32_t result_idx;
	struct kv_result result;
};

/* What a decode attends to on one KV head, but for queries and tokens. */
void kv_batch_decode_input(const struct kv_batch_pages *pages, const struct kv_decode_op *op, uint32_t head,
	struct kv_attention_input *input);

/*
 * Query rows [row_first, row_first + n_rows) of a decode on one KV head. BAD_VALUE with the row: a number of
 * a query is not finite, or float32 cannot hold an output or log-sum-exp.
 */
struct kv_finding kv_batch_run_rows(const struct kv_batch_pages *pages, const struct kv_decode_op *op,
	uint32_t head, uint32_t row_first, uint32_t n_rows, struct kv_batch_scratch *scratch);

/* Number of tasks; 0 when the batch has nothing in this phase. */
uint64_t kv_batch_n_tasks(
	const struct kv_batch_pages *pages, const struct kv_batch *batch, enum kv_batch_phase phase);
/*
 * How much work that is: rows encoded, decoded or multiplied, 10 to 50 ns each on one core. For deciding how
 * many threads are worth waking.
 */
uint64_t kv_batch_n_rows(
	const struct kv_batch_pages *pages, const struct kv_batch *batch, enum kv_batch_phase phase);
/* task_idx below kv_batch_n_tasks(). */
struct kv_finding kv_batch_run_task(const struct kv_batch_pages *pages, const struct kv_batch *batch,
	enum kv_batch_phase phase, uint64_t task_idx, struct kv_batch_scratch *scratch);
/* Keeps the smallest layer, then the smallest row. Not thread-safe. */
void kv_batch_merge(const struct kv_batch *batch, const struct kv_finding *finding);
/* After the last phase: outputs of refused items become 0, their log-sum-exp -infinity (PROTOCOL 4). */
void kv_batch_end(const struct kv_batch_pages *pages, const struct kv_batch *batch);

/* The whole batch on the calling thread. */
void kv_batch_run(
	const struct kv_batch_pages *pages, const struct kv_batch *batch, struct kv_batch_scratch *scratch);

#endif
