/* The tasks of a wave: preparing queries, attending to spans, putting spans together. */
#include "core/fast_decode.h"

#include <math.h>
#include <string.h>

#include "core/fast_internal.h"

#define TILE_TOKENS      16u /* lie in one block of every pool */
#define ASK_AHEAD_TOKENS 64u /* about half a microsecond of work */

/* One item on one KV head. */
struct task {
	struct kv_fast_pool *pool;
	const struct kv_fast_item *item;
	const struct kv_decode_op *op;
	const struct kv_fast_layer *layer;
	struct kv_attention_input input;
	uint32_t exact_lo;      /* from here on tokens are in ring blocks; UINT32_MAX: none is */
	uint32_t head, n_group; /* query heads of the KV head */
	uint32_t n_queries;     /* of the task */
	uint64_t query_first, n_item_queries;
};

static bool has_exact(const struct task *task)
{
	return task->exact_lo != UINT32_MAX;
}

static bool begin_task(struct kv_fast_pool *pool, const struct kv_batch *batch,
	const struct kv_fast_item *item, uint32_t head, struct task *task)
{
	const struct kv_pool_spec *spec = pool->pages->spec;

	*task = (struct task){
		.pool = pool, .item = item, .op = &batch->decodes[item->op_idx], .head = head
	};
	task->layer = &pool->layers[task->op->layer];
	task->exact_lo = kv_fast_exact_lo(task->op);
	task->n_group = spec->q_heads / spec->kv_heads;
	task->n_queries = item->n_rows * task->n_group;
	task->query_first = (uint64_t)head * task->n_queries;
	task->n_item_queries = (uint64_t)item->n_rows * spec->q_heads;
	return kv_batch_decode_input(pool->pages, task->op, head, &task->input);
}

/* Of query `query` of the task: its row in the op, and its place among all rows and heads. */
static uint32_t row_of(const struct task *task, uint32_t query)
{
	return task->item->row_first + query / task->n_group;
}

static uint32_t q_head_of(const struct task *task, uint32_t query)
{
	return task->head * task->n_group + query % task->n_group;
}

static uint64_t place_of(const struct task *task, uint32_t query)
{
	return (uint64_t)row_of(task, query) * task->pool->pages->spec->q_heads + q_head_of(task, query);
}

static struct kv_finding found(const struct task *task, enum kv_status status, uint32_t row)
{
	return (struct kv_finding){ .result_idx = task->op->result_idx,
		.result = { .status = (uint16_t)status, .layer = (uint16_t)task->op->layer, .row = row } };
}

/* ---- preparing ---- */

static struct kv_finding prepare(const struct task *task, bool is_served, struct kv_fast_scratch *scratch)
{
	const uint32_t k_dim = task->input.k_codec->head_dim;
	const enum kv_dtype dtype = (enum kv_dtype)task->op->q_dtype;

	if (!is_served)
		return found(task, KV_UNSUPPORTED, 0);
	for (uint32_t query = 0; query < task->n_queries; query++) {
		struct kv_fast_prepared *prepared =
			kv_fast_prepared_of(task->pool, task->item, task->layer, task->query_first + query);

		kv_rows_load_f32(dtype, task->op->q + place_of(task, query) * k_dim * kv_dtype_bytes(dtype),
			k_dim, scratch->q);
		if (!kv_rows_are_finite(scratch->q, k_dim))
			return found(task, KV_BAD_VALUE, row_of(task, query));
		prepared->offset = (float)((double)task->op->scale *
			kv_attention_prepare(&task->input, scratch->q, scratch->prepared, scratch->work));
		kv_fast_prepare(&task->layer->k, scratch->prepared, (double)task->op->scale,
			(int16_t *)(void *)(prepared + 1), (float *)(void *)(prepared + 1), prepared->units,
			prepared->sums);
		if (has_exact(task)) {
			kv_attention_prepare_exact(&task->input, scratch->q, scratch->prepared, scratch->work,
				scratch->turned, scratch->exact);
			kv_fast_prepare(&task->pool->exact_k, scratch->exact, (double)task->op->scale, NULL,
				kv_fast_exact_numbers(prepared, task->layer), &prepared->exact_unit,
				&prepared->exact_sum);
		}
	}
	return found(task, KV_OK, 0);
}

/* ---- spans ---- */

/* Up to KV_FAST_QUERIES_MAX queries of a task on their way through a span. */
struct pass {
	const struct task *task;
	uint32_t query_first, n_queries, n_filled; /* filled up to what the kernels take */
	struct kv_fast_query queries[KV_FAST_QUERIES_MAX], exact_queries[KV_FAST_QUERIES_MAX];
	struct kv_attention_range tokens[KV_FAST_QUERIES_MAX];
	float offsets[KV_FAST_QUERIES_MAX], slopes[KV_FAST_QUERIES_MAX];
	struct kv_fast_partial *partials[KV_FAST_QUERIES_MAX];
	float *sums[KV_FAST_QUERIES_MAX], *zeros[KV_FAST_QUERIES_MAX];
	float *exact_sums[KV_FAST_QUERIES_MAX];
	struct kv_fast_scratch *scratch;
};

/* Where the rows of a piece are, pages or ring blocks, and what of a pass goes with them. */
struct source {
	const struct kv_fast_side *k, *v;
	const struct kv_row_codec *k_codec, *v_codec;
	const struct kv_row_view *k_view, *v_view;
	const struct kv_fast_query *queries;
	float *const *sums;
};

static struct source pages_of(const struct pass *pass)
{
	const struct task *task = pass->task;

	return (struct source){ .k = &task->layer->k,
		.v = &task->layer->v,
		.k_codec = task->input.k_codec,
		.v_codec = task->input.v_codec,
		.k_view = &task->input.k,
		.v_view = &task->input.v,
		.queries = pass->queries,
		.sums = pass->sums };
}

static struct source rings_of(const struct pass *pass)
{
	const struct task *task = pass->task;

	return (struct source){ .k = &task->pool->exact_k,
		.v = &task->pool->exact_v,
		.k_codec = task->input.exact_k_codec,
		.v_codec = task->input.exact_v_codec,
		.k_view = &task->input.exact_k,
		.v_view = &task->input.exact_v,
		.queries = pass->exact_queries,
		.sums = pass->exact_sums };
}

static void begin_pass(struct pass *pass, uint32_t span)
{
	const struct task *task = pass->task;
	const struct kv_layer_spec *spec = &task->pool->pages->spec->layers[task->op->layer];
	const struct kv_fast_side *v = &task->layer->v;

	pass->n_filled = pass->n_queries == 3 ? 4 : pass->n_queries;
	for (uint32_t n = 0; n < pass->n_filled; n++) {
		const uint32_t query = pass->query_first + kv_fast_min(n, pass->n_queries - 1);
		struct kv_fast_prepared *prepared =
			kv_fast_prepared_of(task->pool, task->item, task->layer, task->query_first + query);
		struct kv_fast_partial *partial = kv_fast_partial_of(task->pool, task->item, task->layer,
			task->n_item_queries, span, task->query_first + query);

		pass->queries[n] =
			(struct kv_fast_query){ .codes = (const int16_t *)(const void *)(prepared + 1),
				.numbers = (const float *)(const void *)(prepared + 1),
				.units = prepared->units,
				.sums = prepared->sums };
		pass->exact_queries[n] =
			(struct kv_fast_query){ .numbers = kv_fast_exact_numbers(prepared, task->layer),
				.units = &prepared->exact_unit,
				.sums = &prepared->exact_sum };
		pass->tokens[n] = kv_fast_range_of(task->pool, task->op, row_of(task, query));
		pass->offsets[n] = prepared->offset;
		pass->slopes[n] = spec->alibi ? spec->alibi[q_head_of(task, query)] : 0;
		pass->partials[n] = partial;
		pass->sums[n] = (float *)(void *)(partial + 1);
		pass->zeros[n] = partial->zeros;
		pass->exact_sums[n] = kv_fast_exact_sums(partial, task->layer);
		if (n >= pass->n_queries) {
			pass->sums[n] = pass->exact_sums[n] = pass->scratch->unused;
			pass->zeros[n] = pass->scratch->unused_zeros;
			continue;
		}
		memset(partial, 0, sizeof(*partial) + v->n_slots * sizeof(float));
		if (has_exact(task))
			memset(pass->exact_sums[n], 0, task->pool->exact_v.n_slots * sizeof(float));
		partial->max = -INFINITY;
	}
}

/*
 * Rows of tokens [max(lo, first), end), end at most KV_FAST_BLOCK_TOKENS behind first, a multiple of it.
 * Places of other tokens, whose blocks may be gone and whose rows may be anything, hold the row of one that
 * is there. What lies behind a row: that of the next head, which is worked on next.
 */
static void find_rows(const struct kv_row_view *view, const struct kv_row_codec *codec, uint32_t first,
	uint32_t lo, uint32_t end, bool is_last_head, struct kv_fast_rows *rows)
{
	const uint8_t *some = kv_row_view_at(view, kv_fast_max(lo, first));

	for (uint32_t n = 0; n < KV_FAST_BLOCK_TOKENS; n += TILE_TOKENS) {
		const uint32_t t = first + n;
		const bool is_there = t < end && t + TILE_TOKENS > lo;
		const uint8_t *row = is_there ? kv_row_view_at(view, t) : some;

		for (uint32_t i = 0; i < TILE_TOKENS; i++)
			rows->rows[n + i] =
				is_there && t + i >= lo && t + i < end ? row + i * view->token_bytes : some;
	}
	rows->n_rows = end - first;
	rows->ahead_bytes = is_last_head ? 0 : codec->row_bytes;
	rows->ahead_end_bytes = is_last_head ? 0 : 2 * codec->row_bytes + 63;
}

/*
 * The first head finds nothing of its rows near: asks for those of the block at `first`, as far as they are
 * in the piece.
 */
static void ask_for_rows(const struct pass *pass, const struct kv_row_view *view,
	const struct kv_row_codec *codec, uint32_t first, uint32_t end)
{
	const uint32_t stop = kv_fast_min(end, first + KV_FAST_BLOCK_TOKENS);

	if (pass->task->head > 0 || pass->query_first > 0)
		return;
	for (uint32_t t = first; t < stop; t += TILE_TOKENS) {
		const uint8_t *row = kv_row_view_at(view, t);

		for (uint32_t i = 0; i < TILE_TOKENS && t + i < stop; i++) {
			for (uint32_t o = 0; o < codec->row_bytes + 63; o += 64)
				__builtin_prefetch(row + i * view->token_bytes + o);
		}
	}
}

/* Logits of tokens [begin, end) of a piece into scratch, those that a query does not see at -infinity. */
static void score_piece(
	struct pass *pass, const struct source *source, uint32_t begin, uint32_t lo, uint32_t end)
{
	const struct task *task = pass->task;
	const struct kv_layer_spec *spec = &task->pool->pages->spec->layers[task->op->layer];
	const bool is_last_head = task->head + 1 == task->pool->pages->spec->kv_heads;
	const struct kv_fast_kernels *kernels = task->pool->kernels;
	const uint32_t n = (uint32_t)kv_round_up_u64(end - begin, KV_FAST_BLOCK_TOKENS);
	struct kv_fast_rows rows;

	for (uint32_t first = begin; first < end; first += KV_FAST_BLOCK_TOKENS) {
		ask_for_rows(pass, source->k_view, source->k_codec, first + ASK_AHEAD_TOKENS, end);
		/* Its values are needed when all keys of the piece are done. */
		ask_for_rows(pass, source->v_view, source->v_codec, kv_fast_max(first, lo), end);
		find_rows(source->k_view, source->k_codec, first, lo,
			kv_fast_min(end, first + KV_FAST_BLOCK_TOKENS), is_last_head || pass->query_first > 0,
			&rows);
		kernels->score(source->k, &rows, source->queries, pass->n_filled,
			pass->scratch->logits[0] + (first - begin), KV_FAST_PIECE_TOKENS);
	}
	for (uint32_t q = 0; q < pass->n_filled; q++) {
		const struct kv_attention_range *seen = &pass->tokens[q];
		float *logits = pass->scratch->logits[q];

		if (pass->offsets[q] != 0 || spec->softcap > 0 || pass->slopes[q] != 0)
			kernels->bend(logits, n, pass->offsets[q], spec->softcap, pass->slopes[q],
				(float)((int64_t)begin - (int64_t)seen->hi + 1));
		for (uint32_t t = begin; t < begin + n; t++) {
			if (t < lo || t >= end || t >= seen->hi || (t >= seen->first_hi && t < seen->lo))
				logits[t - begin] = -INFINITY;
			else if (t >= seen->lo && seen->hi - t > 64 && t + 64 <= end)
				t += 63; /* all of these are seen */
		}
	}
}

static void scale_sums(const struct kv_fast_kernels *kernels, float *sums, uint32_t n_slots, float factor)
{
	if (factor > 0)
		kernels->scale(sums, n_slots, factor);
	else
		memset(sums, 0, n_slots * sizeof(*sums));
}

/* Turns logits into weights against the running maxima; false when no query sees any of these tokens. */
static bool weigh_piece(struct pass *pass, uint32_t n)
{
	const struct kv_fast_side *v = &pass->task->layer->v;
	const struct kv_fast_kernels *kernels = pass->task->pool->kernels;
	bool has_any = false;

	for (uint32_t q = 0; q < pass->n_filled; q++) {
		struct kv_fast_partial *partial = pass->partials[q];
		float *logits = pass->scratch->logits[q];
		const float max = q < pass->n_queries ? kernels->max(logits, n) : -INFINITY;

		if (isinf(max)) { /* below: a logit is finite */
			memset(logits, 0, n * sizeof(*logits));
			continue;
		}
		has_any = true;
		if (max > partial->max) {
			const float shrink = isinf(partial->max) ? 0 : expf(partial->max - max);

			partial->sum *= shrink;
			for (uint32_t p = 0; p < v->n_parts; p++)
				partial->zeros[p] *= shrink;
			scale_sums(kernels, pass->sums[q], v->n_slots, shrink);
			if (has_exact(pass->task))
				scale_sums(kernels, pass->exact_sums[q], pass->task->pool->exact_v.n_slots,
					shrink);
			partial->max = max;
		}
		partial->sum += kernels->exp_sum(logits, n, partial->max);
	}
	return has_any;
}

static void take_piece(struct pass *pass, const struct source *source, uint32_t lo, uint32_t hi)
{
	const struct task *task = pass->task;
	const bool is_last_head = task->head + 1 == task->pool->pages->spec->kv_heads;
	const uint32_t begin = lo / KV_FAST_BLOCK_TOKENS * KV_FAST_BLOCK_TOKENS;
	struct kv_fast_rows rows;

	score_piece(pass, source, begin, lo, hi);
	if (!weigh_piece(pass, (uint32_t)kv_round_up_u64(hi - begin, KV_FAST_BLOCK_TOKENS)))
		return;
	for (uint32_t first = begin; first < hi; first += KV_FAST_BLOCK_TOKENS) {
		find_rows(source->v_view, source->v_codec, first, lo,
			kv_fast_min(hi, first + KV_FAST_BLOCK_TOKENS), is_last_head || pass->query_first > 0,
			&rows);
		task->pool->kernels->accumulate(source->v, &rows, pass->scratch->logits[0] + (first - begin),
			KV_FAST_PIECE_TOKENS, pass->n_filled, source->sums, pass->zeros);
	}
}

/* Piece `piece` of the item: of its first tokens, or of its window. */
static void take_piece_at(struct pass *pass, uint32_t piece)
{
	const struct kv_fast_item *item = pass->task->item;
	const bool is_first = piece < item->n_pieces[0];
	const uint32_t lo = is_first ? 0 : item->tokens.lo,
		       hi = is_first ? item->tokens.first_hi : item->tokens.hi;
	const uint64_t at = is_first ? piece : lo / KV_FAST_PIECE_TOKENS + (piece - item->n_pieces[0]);
	const uint64_t piece_begin = at * KV_FAST_PIECE_TOKENS,
		       piece_end = piece_begin + KV_FAST_PIECE_TOKENS;
	const uint32_t begin = kv_fast_max(lo, (uint32_t)piece_begin),
		       end = piece_end < hi ? (uint32_t)piece_end : hi, exact_lo = pass->task->exact_lo;
	const struct source pages = pages_of(pass), rings = rings_of(pass);

	if (begin < exact_lo)
		take_piece(pass, &pages, begin, kv_fast_min(end, exact_lo));
	if (end > exact_lo)
		take_piece(pass, &rings, kv_fast_max(begin, exact_lo), end);
}

static void attend(const struct task *task, uint32_t span, struct kv_fast_scratch *scratch)
{
	const struct kv_fast_item *item = task->item;
	const uint32_t n_pieces = item->n_pieces[0] + item->n_pieces[1];
	const uint32_t first = span * item->span_pieces,
		       end = kv_fast_min(n_pieces, first + item->span_pieces);

	for (uint32_t query = 0; query < task->n_queries; query += KV_FAST_QUERIES_MAX) {
		struct pass pass = { .task = task,
			.query_first = query,
			.n_queries = kv_fast_min(task->n_queries - query, KV_FAST_QUERIES_MAX),
			.scratch = scratch };

		begin_pass(&pass, span);
		for (uint32_t piece = first; piece < end; piece++)
			take_piece_at(&pass, piece);
	}
}

/* ---- putting spans together ---- */

/* The weighted sum of ring blocks into scratch->exact. */
static void collect_exact(
	const struct task *task, uint32_t query, double max, struct kv_fast_scratch *scratch)
{
	const struct kv_fast_side *v = &task->pool->exact_v;

	memset(scratch->slots, 0, v->n_slots * sizeof(*scratch->slots));
	for (uint32_t s = 0; s < task->item->n_spans; s++) {
		struct kv_fast_partial *partial = kv_fast_partial_of(task->pool, task->item, task->layer,
			task->n_item_queries, s, task->query_first + query);
		const float *sums = kv_fast_exact_sums(partial, task->layer);

		if (isinf(partial->max))
			continue;

		const double share = exp((double)partial->max - max);

		for (uint32_t n = 0; n < v->n_slots; n++)
			scratch->slots[n] += share * (double)sums[n];
	}
	memset(scratch->exact, 0, sizeof(scratch->exact));
	kv_fast_collect(v, scratch->slots, NULL, scratch->exact);
}

static void merge_query(
	const struct task *task, uint32_t query, const float *sink, struct kv_fast_scratch *scratch)
{
	const struct kv_fast_side *v = &task->layer->v;
	const uint32_t v_dim = task->input.v_codec->head_dim;
	const enum kv_dtype dtype = (enum kv_dtype)task->op->out_dtype;
	const uint64_t place = place_of(task, query);
	double max = -INFINITY, sum = 0, zeros[KV_FAST_PARTS_MAX] = { 0 };

	for (uint32_t s = 0; s < task->item->n_spans; s++)
		max = fmax(max,
			(double)kv_fast_partial_of(task->pool, task->item, task->layer, task->n_item_queries,
				s, task->query_first + query)
				->max);
	memset(scratch->slots, 0, v->n_slots * sizeof(*scratch->slots));
	for (uint32_t s = 0; s < task->item->n_spans; s++) {
		const struct kv_fast_partial *partial = kv_fast_partial_of(task->pool, task->item,
			task->layer, task->n_item_queries, s, task->query_first + query);
		const float *sums = (const float *)(const void *)(partial + 1);

		if (isinf(partial->max))
			continue;

		const double share = exp((double)partial->max - max);

		sum += share * (double)partial->sum;
		for (uint32_t n = 0; n < v->n_slots; n++)
			scratch->slots[n] += share * (double)sums[n];
		for (uint32_t p = 0; p < v->n_parts; p++)
			zeros[p] += share * (double)partial->zeros[p];
	}
	memset(scratch->prepared, 0, sizeof(scratch->prepared));
	kv_fast_collect(v, scratch->slots, zeros, scratch->prepared);
	if (sum > 0) {
		if (has_exact(task))
			collect_exact(task, query, max, scratch);

		const double factor = kv_attention_close(sink, &max, &sum);

		kv_attention_finish(&task->input, scratch->prepared, factor, scratch->out);
		if (has_exact(task))
			kv_attention_finish_exact(&task->input, scratch->exact, factor, scratch->work,
				scratch->turned, scratch->out);
	} else {
		memset(scratch->out, 0, v_dim * sizeof(*scratch->out));
	}
	kv_rows_store(dtype, scratch->out, v_dim, task->op->out + place * v_dim * kv_dtype_bytes(dtype));
	if (task->op->lse)
		task->op->lse[place] = sum > 0 ? (float)(max + log(sum)) : sink ? *sink : -INFINITY;
}

static void merge(const struct task *task, struct kv_fast_scratch *scratch)
{
	const struct kv_layer_spec *spec = &task->pool->pages->spec->layers[task->op->layer];
	const bool has_sinks = spec->sinks && !(task->op->flags & KV_DECODE_NO_SINKS);

	for (uint32_t query = 0; query < task->n_queries; query++)
		merge_query(task, query, has_sinks ? &spec->sinks[q_head_of(task, query)] : NULL, scratch);
}

/* ---- running ---- */

static const struct kv_fast_item *item_of_span(const struct kv_fast_pool *pool, uint64_t task_idx)
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
	const struct kv_fast_item *item =
		step == KV_FAST_SPANS ? item_of_span(pool, task_idx) : &pool->items[task_idx / kv_heads];
	const uint64_t at = step == KV_FAST_SPANS ? task_idx - item->task_first : task_idx;
	struct task task;

	if (item->is_scalar && step == KV_FAST_SPANS)
		return run_scalar(pool, batch, item, (uint32_t)(at % kv_heads), scalar);

	const bool is_served = begin_task(pool, batch, item, (uint32_t)(at % kv_heads), &task);

	if (item->is_scalar)
		return found(&task, KV_OK, 0);
	if (step == KV_FAST_PREPARE)
		return prepare(&task, is_served, fast);
	if (is_served && batch->results[task.op->result_idx].status == KV_OK) {
		if (step == KV_FAST_SPANS)
			attend(&task, (uint32_t)(at / kv_heads), fast);
		else
			merge(&task, fast);
	}
	return found(&task, KV_OK, 0);
}
