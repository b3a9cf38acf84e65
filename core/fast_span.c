/*
 * Attending to a span: its tokens in steps, the keys of all KV heads first, then softmax, then the values of
 * all KV heads. The heads' rows of a token stand side by side, so memory is read once, and what the next half
 * step needs is asked for in order while this one, which is in a cache, is worked on head by head.
 */
#include <math.h>
#include <string.h>

#include "core/fast_decode.h"
#include "core/fast_internal.h"

/* Queries [query_first, + n_queries) of KV heads [head_first, + n_heads), in seats [head][n_filled]. */
struct pass {
	const struct kv_fast_task *task;
	uint32_t head_first, n_heads, query_first, n_queries;
	uint32_t n_filled; /* n_queries, filled up to what the kernels take */
	struct kv_fast_scratch *scratch;
	float softcap;
	uint64_t next_partial; /* bytes from a partial to the same one of the next span, 0 if there is none */
};

/* Where rows are, in pages or in ring blocks, and what of a pass goes with them. */
struct source {
	const struct kv_fast_side *k, *v;
	const struct kv_row_view *k_view, *v_view;
	uint32_t k_row_bytes, v_row_bytes;
	struct kv_fast_seat_rows *seats;
};

static struct source pages_of(const struct pass *pass)
{
	const struct kv_fast_task *task = pass->task;

	return (struct source){ .k = &task->layer->k,
		.v = &task->layer->v,
		.k_view = &task->input.k,
		.v_view = &task->input.v,
		.k_row_bytes = task->input.k_codec->row_bytes,
		.v_row_bytes = task->input.v_codec->row_bytes,
		.seats = &pass->scratch->paged };
}

static struct source rings_of(const struct pass *pass)
{
	const struct kv_fast_task *task = pass->task;

	return (struct source){ .k = &task->pool->exact_k,
		.v = &task->pool->exact_v,
		.k_view = &task->input.exact_k,
		.v_view = &task->input.exact_v,
		.k_row_bytes = task->input.exact_k_codec->row_bytes,
		.v_row_bytes = task->input.exact_v_codec->row_bytes,
		.seats = &pass->scratch->ring };
}

/* What is counted as logits are. */
static float base_2(float natural)
{
	return (float)((double)natural * KV_FAST_LOG2_E);
}

static float slope_of(const struct kv_fast_task *task, uint32_t q_head)
{
	const struct kv_layer_spec *spec = &task->pool->pages->spec->layers[task->op->layer];

	return spec->alibi ? base_2(spec->alibi[q_head]) : 0;
}

static void take_exact_seat(const struct pass *pass, uint32_t seat_idx, struct kv_fast_prepared *prepared,
	struct kv_fast_partial *partial)
{
	const struct kv_fast_task *task = pass->task;
	struct kv_fast_seat_rows *ring = &pass->scratch->ring;
	const bool is_query = pass->scratch->seats[seat_idx].partial != NULL;

	ring->queries[seat_idx] =
		(struct kv_fast_query){ .numbers = kv_fast_exact_numbers(prepared, task->layer),
			.units = &prepared->exact_unit,
			.sums = &prepared->exact_sum };
	ring->sums[seat_idx] = is_query ? kv_fast_exact_sums(partial, task->layer) : pass->scratch->unused;
	if (is_query)
		memset(ring->sums[seat_idx], 0, task->pool->exact_v.n_slots * sizeof(float));
}

static void take_seat(const struct pass *pass, uint32_t span, uint32_t head, uint32_t n)
{
	const struct kv_fast_task *task = pass->task;
	const bool is_query = n < pass->n_queries;
	const uint32_t seat_idx = head * pass->n_filled + n;
	const uint32_t query = pass->query_first + (is_query ? n : pass->n_queries - 1);
	struct kv_fast_prepared *prepared = kv_fast_prepared_of(task, pass->head_first + head, query);
	struct kv_fast_partial *partial = kv_fast_partial_of(task, span, pass->head_first + head, query);
	struct kv_fast_scratch *scratch = pass->scratch;

	scratch->paged.queries[seat_idx] =
		(struct kv_fast_query){ .codes = (const int16_t *)(const void *)(prepared + 1),
			.numbers = (const float *)(const void *)(prepared + 1),
			.units = prepared->units,
			.sums = prepared->sums };
	scratch->seats[seat_idx] = (struct kv_fast_seat){
		.tokens = kv_fast_range_of(task->pool, task->op, kv_fast_row_of(task, query)),
		.offset = prepared->offset,
		.slope = slope_of(task, kv_fast_q_head_of(task, pass->head_first + head, query)),
		.partial = is_query ? partial : NULL,
	};
	scratch->paged.sums[seat_idx] = is_query ? (float *)(void *)(partial + 1) : scratch->unused;
	scratch->zeros[seat_idx] = is_query ? partial->zeros : scratch->unused_zeros;
	if (is_query) {
		memset(partial, 0, sizeof(*partial) + task->layer->v.n_slots * sizeof(float));
		partial->max = -INFINITY;
	}
	if (kv_fast_has_exact(task))
		take_exact_seat(pass, seat_idx, prepared, partial);
}

/* Tokens of a step: [lo, hi) of a range of the same source that ends at `end`; begin is lo, down to a
 * multiple of the block. */
struct step {
	uint32_t begin, lo, hi, end;
	const struct source *source;
};

static uint32_t n_of(const struct step *step)
{
	return (uint32_t)kv_round_up_u64(step->hi - step->begin, KV_FAST_BLOCK_TOKENS);
}

/*
 * The step's rows of KV head `head`. Places of other tokens, whose blocks may be gone and whose rows may be
 * anything, hold the row of one that is there.
 */
static void find_rows(const struct kv_row_view *view, const struct step *step, uint32_t head,
	uint32_t row_bytes, struct kv_fast_rows *rows)
{
	const uint8_t *some = kv_row_view_at(view, step->lo);

	for (uint32_t n = 0; n < n_of(step); n += KV_FAST_RUN_TOKENS) {
		const uint32_t t = step->begin + n;
		const uint8_t **run = rows->rows + n;

		if (t >= step->lo && t + KV_FAST_RUN_TOKENS <= step->hi) {
			const uint8_t *first = kv_row_view_at(view, t);

			for (uint32_t i = 0; i < KV_FAST_RUN_TOKENS; i++)
				run[i] = first + i * view->token_bytes;
			continue;
		}
		for (uint32_t i = 0; i < KV_FAST_RUN_TOKENS; i++)
			run[i] = t + i >= step->lo && t + i < step->hi ? kv_row_view_at(view, t + i) : some;
	}
	rows->n_rows = step->hi - step->begin;
	rows->offset = head * row_bytes;
	rows->row_bytes = row_bytes;
}

#define N_RUNS (KV_FAST_STEP_TOKENS / KV_FAST_RUN_TOKENS)

/*
 * What the kernels ask for while they work on keys or values of a step: the values of the same tokens or the
 * keys of the next step, all KV heads of them, every call its part. Another pass finds them where this one
 * left them. Returns how much a part is; runs that are not there are NULL.
 */
static uint64_t find_ahead(
	const struct pass *pass, const struct step *step, bool is_v, struct kv_fast_ahead *ahead)
{
	const struct source *source = step->source;
	const struct kv_row_view *view = is_v ? source->k_view : source->v_view;
	const uint32_t step_tokens = pass->task->layer->step_tokens;
	const uint32_t first = is_v ? step->begin + n_of(step) : step->begin;
	const uint32_t lo = kv_fast_max(first, step->lo),
		       end = kv_fast_min(is_v ? step->end : step->hi, first + step_tokens);
	const uint32_t n_calls = pass->n_heads * kv_div_up_u32(pass->n_filled, KV_FAST_QUERIES_MAX);
	const uint64_t part_bytes = step_tokens * view->token_bytes / n_calls;

	*ahead = (struct kv_fast_ahead){ .run_bytes = KV_FAST_RUN_TOKENS * view->token_bytes,
		.slot_bytes = KV_FAST_BLOCK_TOKENS * view->token_bytes * 256 / n_calls /
			(is_v ? source->v : source->k)->n_slots };
	for (uint32_t run = 0; run < N_RUNS && pass->query_first == 0; run++) {
		const uint32_t t = first + run * KV_FAST_RUN_TOKENS;

		if (t + KV_FAST_RUN_TOKENS > lo && t < end)
			ahead->runs[run] = kv_row_view_at(view, t);
	}
	return part_bytes;
}

static void score_step(const struct pass *pass, const struct step *step)
{
	const struct source *source = step->source;
	struct kv_fast_rows rows;
	const uint64_t part_bytes = find_ahead(pass, step, false, &rows.ahead);

	find_rows(source->k_view, step, pass->head_first, source->k_row_bytes, &rows);
	for (uint32_t h = 0; h < pass->n_heads; h++) {
		for (uint32_t n = 0; n < pass->n_filled; n += KV_FAST_QUERIES_MAX) {
			const uint32_t seat = h * pass->n_filled + n;

			pass->task->pool->kernels->score(source->k, &rows, &source->seats->queries[seat],
				kv_fast_min(pass->n_filled - n, KV_FAST_QUERIES_MAX),
				pass->scratch->logits[seat]);
			rows.ahead.from += part_bytes;
		}
		rows.offset += rows.row_bytes;
	}
}

/* What a query does not see, and what is not there, is at -infinity. */
static void hide_unseen(const struct kv_fast_seat *seat, const struct step *step, float *logits)
{
	const struct kv_attention_range *seen = &seat->tokens;
	const uint32_t n = n_of(step);

	if (step->begin == step->lo && step->begin + n == step->hi && step->hi <= seen->hi &&
		step->lo >= seen->lo)
		return;
	for (uint32_t i = 0; i < n; i++) {
		const uint32_t t = step->begin + i;

		if (t < step->lo || t >= step->hi || t >= seen->hi || (t >= seen->first_hi && t < seen->lo))
			logits[i] = -INFINITY;
	}
}

/* Whether the query sees any token of the step. */
static bool sees_some(const struct kv_fast_seat *seat, const struct step *step)
{
	const struct kv_attention_range *seen = &seat->tokens;

	return step->lo < kv_fast_min(step->hi, seen->first_hi) ||
		kv_fast_max(step->lo, seen->lo) < kv_fast_min(step->hi, seen->hi);
}

static void scale_sums(const struct kv_fast_kernels *kernels, float *sums, uint32_t n_slots, float factor)
{
	if (factor > 0)
		kernels->scale(sums, n_slots, factor);
	else
		memset(sums, 0, n_slots * sizeof(*sums));
}

#define ASKED_BYTES 128u

/*
 * From a partial to what of the same one of the next span is asked for in this step, to be written to: the
 * next span begins with zeros there, and by then these lines are far away. Without a next span its own.
 */
static uint64_t next_part(const struct pass *pass, const struct step *step)
{
	const struct kv_fast_task *task = pass->task;
	const uint32_t n_parts =
		kv_div_up_u32((uint32_t)kv_fast_partial_bytes(task->pool, task->layer), ASKED_BYTES);

	return pass->next_partial + step->begin / task->layer->step_tokens % n_parts * ASKED_BYTES;
}

/* The running maximum of a query has become `max`. */
static void raise_max(const struct pass *pass, uint32_t seat_idx, float max)
{
	const struct kv_fast_side *v = &pass->task->layer->v;
	const struct kv_fast_kernels *kernels = pass->task->pool->kernels;
	struct kv_fast_partial *partial = pass->scratch->seats[seat_idx].partial;

	if (!isinf(partial->max)) { /* else all sums are zero */
		const float shrink = exp2f(partial->max - max);

		partial->sum *= shrink;
		for (uint32_t p = 0; p < v->n_parts; p++)
			partial->zeros[p] *= shrink;
		scale_sums(kernels, pass->scratch->paged.sums[seat_idx], v->n_slots, shrink);
		if (kv_fast_has_exact(pass->task))
			scale_sums(kernels, pass->scratch->ring.sums[seat_idx],
				pass->task->pool->exact_v.n_slots, shrink);
	}
	partial->max = max;
}

/* Finishes logits and moves the running maximum; false when the query sees none of these tokens. */
static bool finish_logits(const struct pass *pass, const struct step *step, uint32_t seat_idx)
{
	const struct kv_fast_seat *seat = &pass->scratch->seats[seat_idx];
	const struct kv_fast_kernels *kernels = pass->task->pool->kernels;
	struct kv_fast_partial *partial = seat->partial;
	float *logits = pass->scratch->logits[seat_idx], max = -INFINITY;
	const uint32_t n = n_of(step);

	if (partial) {
		if (seat->offset != 0 || pass->softcap > 0 || seat->slope != 0)
			kernels->bend(logits, n, seat->offset, pass->softcap, seat->slope,
				(float)((int64_t)step->begin - kv_fast_favoured(&seat->tokens, seat->slope)));
		hide_unseen(seat, step, logits);
		max = kernels->max(logits, n);
	}
	if (!kv_f32_is_finite(max)) {
		/*
		 * No logit of a token that it sees is one that float32 can hold. Beside tokens that it does
		 * not see the greatest of NaN and -infinity may be either.
		 */
		if (partial && sees_some(seat, step))
			partial->sum = NAN;
		memset(logits, 0, n * sizeof(*logits));
		return false;
	}
	if (max > partial->max)
		raise_max(pass, seat_idx, max);
	return true;
}

#define TOUCHED_ROWS      4u
#define TOUCHED_BYTES_MAX 128u /* longer rows would not stay there */

/*
 * Exponentials need no rows, so values of the first KV head are brought into the first-level cache along
 * them: scales of all its rows are what comes next. Four rows for each query.
 */
static void touch_values(const struct pass *pass, const struct step *step, uint32_t seat_idx)
{
	const struct kv_row_view *view = step->source->v_view;
	const uint32_t row_bytes = step->source->v_row_bytes;
	const uint32_t t = step->begin + seat_idx * TOUCHED_ROWS;

	if (row_bytes > TOUCHED_BYTES_MAX || t < step->lo || t + TOUCHED_ROWS > step->hi)
		return;

	const uint8_t *row = kv_row_view_at(view, t) + pass->head_first * row_bytes;

	for (uint32_t i = 0; i < TOUCHED_ROWS; i++, row += view->token_bytes) {
		__builtin_prefetch(row);
		__builtin_prefetch(row + row_bytes - 1);
	}
}

/* Turns logits of all queries into weights against their maxima; false when none sees these tokens. */
static bool weigh_step(const struct pass *pass, const struct step *step)
{
	const struct kv_fast_kernels *kernels = pass->task->pool->kernels;
	const uint64_t next = next_part(pass, step);
	const uint32_t n_seats = pass->n_heads * pass->n_filled;
	bool is_seen[KV_FAST_SEATS_MAX], has_any = false;

	/* All maxima first, as exponentials of a query would wait for its own. */
	for (uint32_t seat = 0; seat < n_seats; seat++)
		has_any |= is_seen[seat] = finish_logits(pass, step, seat);
	for (uint32_t seat = 0; seat < n_seats; seat++) {
		struct kv_fast_partial *partial = pass->scratch->seats[seat].partial;

		touch_values(pass, step, seat);
		if (!is_seen[seat])
			continue;
		for (uint32_t at = 0; at < ASKED_BYTES; at += 64)
			__builtin_prefetch((const uint8_t *)partial + next + at, 1);
		partial->sum += kernels->exp2_sum(pass->scratch->logits[seat], n_of(step), partial->max);
	}
	return has_any;
}

static void accumulate_step(const struct pass *pass, const struct step *step)
{
	const struct source *source = step->source;
	struct kv_fast_rows rows;
	const uint64_t part_bytes = find_ahead(pass, step, true, &rows.ahead);

	find_rows(source->v_view, step, pass->head_first, source->v_row_bytes, &rows);
	for (uint32_t h = 0; h < pass->n_heads; h++) {
		for (uint32_t n = 0; n < pass->n_filled; n += KV_FAST_QUERIES_MAX) {
			const uint32_t seat = h * pass->n_filled + n;

			pass->task->pool->kernels->accumulate(source->v, &rows, pass->scratch->logits[seat],
				kv_fast_min(pass->n_filled - n, KV_FAST_QUERIES_MAX),
				source->seats->sums + seat, pass->scratch->zeros + seat);
			rows.ahead.from += part_bytes;
		}
		rows.offset += rows.row_bytes;
	}
}

static void take_step(const struct pass *pass, const struct step *step)
{
	score_step(pass, step);
	if (weigh_step(pass, step))
		accumulate_step(pass, step);
}

/* Tokens [lo, hi), within one step, of a range that ends at `end`. */
static void take_tokens(const struct pass *pass, uint32_t lo, uint32_t hi, uint32_t end)
{
	const uint32_t exact_lo = pass->task->exact_lo;
	const struct source pages = pages_of(pass);

	if (lo < exact_lo) {
		const struct step step = { .begin = lo / KV_FAST_BLOCK_TOKENS * KV_FAST_BLOCK_TOKENS,
			.lo = lo,
			.hi = kv_fast_min(hi, exact_lo),
			.end = kv_fast_min(end, exact_lo),
			.source = &pages };

		take_step(pass, &step);
	}
	if (hi > exact_lo) {
		const struct source rings = rings_of(pass);
		const uint32_t first = kv_fast_max(lo, exact_lo);
		const struct step step = { .begin = first / KV_FAST_BLOCK_TOKENS * KV_FAST_BLOCK_TOKENS,
			.lo = first,
			.hi = hi,
			.end = end,
			.source = &rings };

		take_step(pass, &step);
	}
}

/* Piece `piece` of the item: of its first tokens, or of its window. */
static void take_piece(const struct pass *pass, uint32_t piece)
{
	const struct kv_fast_item *item = pass->task->item;
	const uint32_t step_tokens = pass->task->layer->step_tokens;
	const bool is_first = piece < item->n_pieces[0];
	const uint32_t lo = is_first ? 0 : item->tokens.lo,
		       hi = is_first ? item->tokens.first_hi : item->tokens.hi;
	const uint64_t at = is_first ? piece : lo / KV_FAST_PIECE_TOKENS + (piece - item->n_pieces[0]);

	for (uint64_t begin = at * KV_FAST_PIECE_TOKENS;
		begin < hi && begin < (at + 1) * KV_FAST_PIECE_TOKENS; begin += step_tokens) {
		const uint64_t stop = begin + step_tokens;

		if (stop > lo)
			take_tokens(
				pass, kv_fast_max(lo, (uint32_t)begin), stop < hi ? (uint32_t)stop : hi, hi);
	}
}

void kv_fast_attend(const struct kv_fast_task *task, uint32_t span, struct kv_fast_scratch *scratch)
{
	const struct kv_fast_item *item = task->item;
	const struct kv_layer_spec *layer = &task->pool->pages->spec->layers[task->op->layer];
	const uint32_t kv_heads = task->pool->pages->spec->kv_heads;
	const uint32_t first = span * item->span_pieces;
	const uint32_t end = kv_fast_min(item->n_pieces[0] + item->n_pieces[1], first + item->span_pieces);
	const uint32_t n_heads = kv_fast_min(kv_heads, KV_FAST_SEATS_MAX / KV_FAST_QUERIES_MAX);
	const uint32_t n_queries = KV_FAST_SEATS_MAX / n_heads / KV_FAST_QUERIES_MAX * KV_FAST_QUERIES_MAX;

	for (uint32_t head = 0; head < kv_heads; head += n_heads) {
		for (uint32_t query = 0; query < task->n_queries; query += n_queries) {
			struct pass pass = { .task = task,
				.head_first = head,
				.n_heads = kv_fast_min(kv_heads - head, n_heads),
				.query_first = query,
				.n_queries = kv_fast_min(task->n_queries - query, n_queries),
				.softcap = base_2(layer->softcap),
				.scratch = scratch };

			if (span + 1 < item->n_spans)
				pass.next_partial = (uint64_t)kv_heads * task->n_queries *
					kv_fast_partial_bytes(task->pool, task->layer);
			/* The kernels take 1, 2 or 4. */
			pass.n_filled = pass.n_queries + (pass.n_queries % 4 == 3);
			for (uint32_t h = 0; h < pass.n_heads; h++) {
				for (uint32_t n = 0; n < pass.n_filled; n++)
					take_seat(&pass, span, h, n);
			}
			for (uint32_t piece = first; piece < end; piece++)
				take_piece(&pass, piece);
		}
	}
}
