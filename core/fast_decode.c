/* The tasks of a wave: preparing queries, attending to spans, putting spans together. */
#include "core/fast_decode.h"

#include <math.h>
#include <string.h>

#include "core/fast_internal.h"

static void begin_task(struct kv_fast_pool *pool, const struct kv_batch *batch, struct kv_fast_item *item,
	uint32_t head, struct kv_fast_task *task)
{
	const struct kv_pool_spec *spec = pool->pages->spec;

	*task = (struct kv_fast_task){
		.pool = pool, .item = item, .op = &batch->decodes[item->op_idx], .head = head
	};
	task->layer = &pool->layers[task->op->layer];
	task->exact_lo = kv_fast_exact_lo(task->op);
	task->n_group = spec->q_heads / spec->kv_heads;
	task->n_queries = item->n_rows * task->n_group;
	kv_batch_decode_input(pool->pages, task->op, head, &task->input);
}

static struct kv_finding found(const struct kv_fast_task *task, enum kv_status status, uint32_t row)
{
	return (struct kv_finding){ .result_idx = task->op->result_idx,
		.result = { .status = (uint16_t)status, .layer = (uint16_t)task->op->layer, .row = row } };
}

/* ---- preparing ---- */

static struct kv_finding prepare(const struct kv_fast_task *task, struct kv_fast_scratch *scratch)
{
	const uint32_t k_dim = task->input.k_codec->head_dim;
	const enum kv_dtype dtype = (enum kv_dtype)task->op->q_dtype;
	const double scale = (double)task->op->scale * KV_FAST_LOG2_E;

	for (uint32_t query = 0; query < task->n_queries; query++) {
		struct kv_fast_prepared *prepared = kv_fast_prepared_of(task, task->head, query);

		kv_rows_load_f32(dtype,
			task->op->q + kv_fast_place_of(task, query) * k_dim * kv_dtype_bytes(dtype), k_dim,
			scratch->q);
		if (!kv_rows_are_finite(scratch->q, k_dim)) {
			atomic_store_explicit(&task->item->is_refused, true, memory_order_relaxed);
			return found(task, KV_BAD_VALUE, kv_fast_row_of(task, query));
		}
		prepared->offset =
			(float)(scale * kv_attention_prepare(&task->input, scratch->q, scratch->prepared));
		bool is_held = kv_fast_prepare(&task->layer->k, scratch->prepared, scale,
			(int16_t *)(void *)(prepared + 1), (float *)(void *)(prepared + 1), prepared->units,
			prepared->sums);

		if (kv_fast_has_exact(task)) {
			kv_attention_prepare_exact(&task->input, scratch->q, scratch->exact);
			is_held &= kv_fast_prepare(&task->pool->exact_k, scratch->exact, scale, NULL,
				kv_fast_exact_numbers(prepared, task->layer), &prepared->exact_unit,
				&prepared->exact_sum);
		}
		if (!is_held)
			prepared->offset = NAN; /* so is every logit, and the scalar routine answers */
	}
	return found(task, KV_OK, 0);
}

/* ---- putting spans together ---- */

/* The weighted sum of ring blocks into scratch->exact. */
static void collect_exact(
	const struct kv_fast_task *task, uint32_t query, double max, struct kv_fast_scratch *scratch)
{
	const struct kv_fast_side *v = &task->pool->exact_v;

	memset(scratch->slots, 0, v->n_slots * sizeof(*scratch->slots));
	for (uint32_t s = 0; s < task->item->n_spans; s++) {
		struct kv_fast_partial *partial = kv_fast_partial_of(task, s, task->head, query);
		const float *sums = kv_fast_exact_sums(partial, task->layer);

		if (isinf(partial->max))
			continue;

		const double share = exp2((double)partial->max - max);

		task->pool->kernels->add(scratch->slots, sums, v->n_slots, share);
	}
	memset(scratch->exact, 0, sizeof(scratch->exact));
	kv_fast_collect(v, scratch->slots, NULL, scratch->exact);
}

/* What the query's slope gives the token from which spans count distances. */
static double favour_of(
	const struct kv_fast_task *task, uint32_t query, const struct kv_attention_range *tokens)
{
	const struct kv_layer_spec *spec = &task->pool->pages->spec->layers[task->op->layer];
	const float slope = spec->alibi ? spec->alibi[kv_fast_q_head_of(task, task->head, query)] : 0;

	return (double)slope * (double)(kv_fast_favoured(tokens, slope) - (int64_t)tokens->hi + 1);
}

/* Asks for all lines at once: what spans found lies far apart, and has left the first caches since. */
static void fetch(const void *from, uint64_t n_bytes)
{
	for (uint64_t at = 0; at < n_bytes; at += 64)
		__builtin_prefetch((const uint8_t *)from + at);
}

/*
 * False: a logit, a sum or the result is none that float32 can hold. It shows: a logit that is not finite
 * makes the sum of weights NaN, or 0 where there are no others.
 */
static bool merge_query(
	const struct kv_fast_task *task, uint32_t query, const float *sink, struct kv_fast_scratch *scratch)
{
	const struct kv_attention_range range =
		kv_fast_range_of(task->pool, task->op, kv_fast_row_of(task, query));
	const struct kv_fast_side *v = &task->layer->v;
	const uint32_t v_dim = task->input.v_codec->head_dim;
	const enum kv_dtype dtype = (enum kv_dtype)task->op->out_dtype;
	const uint64_t place = kv_fast_place_of(task, query);
	double max = -INFINITY, sum = 0, zeros[KV_FAST_PARTS_MAX] = { 0 };

	for (uint32_t s = 0; s < task->item->n_spans; s++) {
		const struct kv_fast_partial *partial = kv_fast_partial_of(task, s, task->head, query);

		fetch(partial, sizeof(*partial) + v->n_slots * sizeof(float));
		max = fmax(max, (double)partial->max);
	}
	memset(scratch->slots, 0, v->n_slots * sizeof(*scratch->slots));
	for (uint32_t s = 0; s < task->item->n_spans; s++) {
		const struct kv_fast_partial *partial = kv_fast_partial_of(task, s, task->head, query);
		const float *sums = (const float *)(const void *)(partial + 1);

		if (isinf(partial->max) && !isnan(partial->sum))
			continue;

		const double share = exp2((double)partial->max - max);

		sum += share * (double)partial->sum;
		task->pool->kernels->add(scratch->slots, sums, v->n_slots, share);
		for (uint32_t p = 0; p < v->n_parts; p++)
			zeros[p] += share * (double)partial->zeros[p];
	}
	if (isnan(sum) || (sum <= 0 && range.lo < range.hi))
		return false;
	memset(scratch->prepared, 0, sizeof(scratch->prepared));
	kv_fast_collect(v, scratch->slots, zeros, scratch->prepared);
	if (sum > 0) {
		if (kv_fast_has_exact(task))
			collect_exact(task, query, max, scratch);

		max = max / KV_FAST_LOG2_E + favour_of(task, query, &range); /* a sink has no distance */

		const double factor = kv_attention_close(sink, &max, &sum);

		kv_attention_finish(&task->input, scratch->prepared, factor, scratch->out);
		if (kv_fast_has_exact(task))
			kv_attention_finish_exact(&task->input, scratch->exact, factor, scratch->out);
	} else {
		memset(scratch->out, 0, v_dim * sizeof(*scratch->out));
	}
	kv_rows_store(dtype, scratch->out, v_dim, task->op->out + place * v_dim * kv_dtype_bytes(dtype));

	const float lse = sum > 0 ? (float)(max + log(sum)) : sink ? *sink : -INFINITY;

	if (task->op->lse)
		task->op->lse[place] = lse;
	return kv_rows_are_finite(scratch->out, v_dim) && (sum <= 0 || kv_f32_is_finite(lse));
}

/* Where float32 does not do, the scalar routine answers, or says that there is no answer. */
static struct kv_finding merge(
	const struct kv_fast_task *task, struct kv_fast_scratch *scratch, struct kv_batch_scratch *scalar)
{
	const struct kv_layer_spec *spec = &task->pool->pages->spec->layers[task->op->layer];
	const bool has_sinks = spec->sinks && !(task->op->flags & KV_DECODE_NO_SINKS);

	for (uint32_t query = 0; query < task->n_queries; query++) {
		const float *sink =
			has_sinks ? &spec->sinks[kv_fast_q_head_of(task, task->head, query)] : NULL;

		if (!merge_query(task, query, sink, scratch))
			return kv_batch_run_rows(task->pool->pages, task->op, task->head,
				task->item->row_first, task->item->n_rows, scalar);
	}
	return found(task, KV_OK, 0);
}

/* ---- running ---- */

static struct kv_fast_item *item_of_span(struct kv_fast_pool *pool, uint64_t task_idx)
{
	uint32_t lo = 0, hi = pool->n_items;

	while (hi - lo > 1) {
		const uint32_t middle = lo + (hi - lo) / 2;

		if (pool->items[middle].task_first <= task_idx)
			lo = middle;
		else
			hi = middle;
	}
	return &pool->items[lo];
}

/* An item that the kernels do not serve is done while the others attend to their spans. */
static struct kv_finding run_scalar(struct kv_fast_pool *pool, const struct kv_batch *batch,
	const struct kv_fast_item *item, uint32_t head, struct kv_batch_scratch *scratch)
{
	return kv_batch_run_task(pool->pages, batch, KV_PHASE_DECODES,
		(uint64_t)item->op_idx * pool->pages->spec->kv_heads + head, scratch);
}

struct kv_finding kv_fast_run_task(struct kv_fast_pool *pool, const struct kv_batch *batch,
	enum kv_fast_step step, uint64_t task_idx, struct kv_fast_scratch *fast,
	struct kv_batch_scratch *scalar)
{
	const uint32_t kv_heads = pool->pages->spec->kv_heads;
	struct kv_fast_item *item =
		step == KV_FAST_SPANS ? item_of_span(pool, task_idx) : &pool->items[task_idx / kv_heads];
	/* Of spans: all heads of one, or one head of an item that is not served. */
	const uint32_t at =
		(uint32_t)(step == KV_FAST_SPANS ? task_idx - item->task_first : task_idx % kv_heads);
	struct kv_fast_task task;

	if (item->is_scalar && step == KV_FAST_SPANS)
		return run_scalar(pool, batch, item, at, scalar);

	begin_task(pool, batch, item, step == KV_FAST_SPANS ? 0 : at, &task);
	if (item->is_scalar)
		return found(&task, KV_OK, 0);
	if (step == KV_FAST_PREPARE)
		return prepare(&task, fast);
	if (atomic_load_explicit(&item->is_refused, memory_order_relaxed))
		return found(&task, KV_OK, 0);
	if (step == KV_FAST_MERGE)
		return merge(&task, fast, scalar);
	kv_fast_attend(&task, at, fast);
	return found(&task, KV_OK, 0);
}
