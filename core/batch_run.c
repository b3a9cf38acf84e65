#include "core/batch_run.h"

#include <math.h>
#include <string.h>

#include "core/checked.h"
#include "core/k_center.h"

/* ---- rows ---- */

/* K or V of one layer and head: where its pages and the rows of an op lie. */
struct side {
	const struct kv_row_codec *codec;
	const float *center; /* [head_dim], taken off rows that are stored; NULL: nothing */
	uint8_t *pages;
	const struct kv_row_codec *exact_codec; /* NULL: the pool has no exact window */
	uint8_t *exact;                         /* ring blocks */
	const struct kv_rows *rows;
	uint64_t packed_bytes_before; /* one packed row of each earlier layer of the op */
	uint32_t packed_bytes_first;  /* a packed row of the op's first layer */
};

/* A slot as the planner gives it; the bound is our own promise. */
static uint64_t slot_row(const struct kv_batch_pages *pages, uint32_t layer, int64_t slot, uint32_t head)
{
	const struct kv_pool_spec *spec = pages->spec;
	const uint64_t n_slots = (uint64_t)spec->n_blocks[spec->layers[layer].group_idx] * spec->block_size;

	KV_ASSERT((uint64_t)slot < n_slots);
	return (uint64_t)slot * spec->kv_heads + head;
}

static uint8_t *page_row(const struct side *side, uint64_t row_idx)
{
	return side->pages + row_idx * side->codec->row_bytes;
}

/* The row's place in a ring block; NULL where exact_slots (NULL: none) says that it has none. */
static uint8_t *exact_row(const struct side *side, const struct kv_batch_pages *pages,
	const int64_t *exact_slots, uint32_t token, uint32_t head)
{
	const struct kv_pool_spec *spec = pages->spec;

	if (!exact_slots || exact_slots[token] < 0)
		return NULL;
	KV_ASSERT((uint64_t)exact_slots[token] < (uint64_t)spec->n_blocks[spec->n_groups] * spec->block_size);
	return side->exact +
		((uint64_t)exact_slots[token] * spec->kv_heads + head) * side->exact_codec->row_bytes;
}

static uint32_t wire_row_bytes(const struct side *side)
{
	const enum kv_dtype dtype = (enum kv_dtype)side->rows->dtype;

	return dtype == KV_DTYPE_PACKED ? side->codec->row_bytes
					: side->codec->head_dim * kv_dtype_bytes(dtype);
}

/* Row of token `token` and `head` on layer `layer_at` of the op (from 0): struct kv_rows has the formula. */
static uint8_t *wire_row(
	const struct side *side, uint32_t kv_heads, uint32_t layer_at, uint32_t token, uint32_t head)
{
	const struct kv_rows *rows = side->rows;
	const uint32_t row_bytes = wire_row_bytes(side);
	const bool is_packed = rows->dtype == KV_DTYPE_PACKED;
	const uint64_t bytes_before = is_packed ? side->packed_bytes_before : (uint64_t)layer_at * row_bytes;
	const uint64_t skipped_bytes =
		(uint64_t)rows->token_first * (is_packed ? side->packed_bytes_first : row_bytes);
	const uint64_t token_bytes = rows->tokens_stride * bytes_before +
		((uint64_t)rows->token_first + token) * row_bytes - skipped_bytes;

	return rows->base + token_bytes * kv_heads + (uint64_t)head * row_bytes;
}

/* `exact` NULL: only to the page. Packed rows are never exact. */
static enum kv_status write_row(const struct side *side, const uint8_t *from, uint8_t *to, uint8_t *exact,
	struct kv_batch_scratch *scratch)
{
	enum kv_status status;

	if (side->rows->dtype == KV_DTYPE_PACKED) {
		if (kv_row_codec_validate_packed(side->codec, from) != KV_OK)
			return KV_BAD_VALUE;
		memcpy(to, from, side->codec->row_bytes);
		return KV_OK;
	}
	kv_rows_load_f32((enum kv_dtype)side->rows->dtype, from, side->codec->head_dim, scratch->row);
	if (side->center)
		kv_k_center_subtract(side->center, scratch->row, side->codec->head_dim, scratch->row);
	status = kv_row_codec_encode(side->codec, scratch->row, to, &scratch->codec);
	if (status == KV_OK && exact)
		status = kv_row_codec_encode(side->exact_codec, scratch->row, exact, &scratch->codec);
	return status;
}

/* From a page, or (exact not NULL) from a ring block. */
static void read_row(const struct side *side, const uint8_t *from, const uint8_t *exact, uint8_t *to,
	struct kv_batch_scratch *scratch)
{
	if (side->rows->dtype == KV_DTYPE_PACKED) {
		memcpy(to, from, side->codec->row_bytes);
		return;
	}
	if (exact)
		kv_row_codec_decode(side->exact_codec, exact, scratch->row, &scratch->codec);
	else
		kv_row_codec_decode(side->codec, from, scratch->row, &scratch->codec);
	if (side->center)
		kv_k_center_add(side->center, side->codec->head_dim, scratch->row);
	kv_rows_store((enum kv_dtype)side->rows->dtype, scratch->row, side->codec->head_dim, to);
}

static struct kv_finding finding_at(uint32_t result_idx, enum kv_status status, uint32_t layer, uint32_t row)
{
	return (struct kv_finding){ .result_idx = result_idx,
		.result = { .status = (uint16_t)status, .layer = (uint16_t)layer, .row = row } };
}

/* Rows of one op on one layer and head, in either direction: what updates, imports and exports share. */
struct row_task {
	const struct kv_rows *k, *v;
	const int64_t *slots;       /* [n_groups, n_tokens] */
	const int64_t *exact_slots; /* [n_tokens], or NULL */
	uint32_t result_idx, n_tokens;
	uint32_t layer_at; /* from the op's first layer */
	uint32_t layer, head;
	bool is_read, is_ring;
};

static const float *center_of(const struct kv_pool_spec *spec, uint32_t layer, uint32_t head)
{
	const float *center = spec->layers[layer].k_center;

	return center ? center + (size_t)head * spec->k_head_dim : NULL;
}

/* Between a ring block and the request, byte for byte. */
static enum kv_status move_ring_row(const struct side *side, uint8_t *exact, uint8_t *wire, bool is_read)
{
	const uint32_t n_bytes = side->exact_codec->row_bytes;

	if (!is_read && kv_row_codec_validate_packed(side->exact_codec, wire) != KV_OK)
		return KV_BAD_VALUE;
	memcpy(is_read ? wire : exact, is_read ? exact : wire, n_bytes);
	return KV_OK;
}

static struct kv_finding move_rows(
	const struct kv_batch_pages *pages, const struct row_task *task, struct kv_batch_scratch *scratch)
{
	const struct kv_layer_spec *layer = &pages->spec->layers[task->layer];
	const struct kv_layer_pages *at = &pages->layers[task->layer];
	const uint32_t first = task->layer - task->layer_at;
	const struct side sides[2] = {
		{ .codec = kv_layer_k(layer, task->head),
			.center = center_of(pages->spec, task->layer, task->head),
			.pages = at->k,
			.exact_codec = pages->spec->exact_k,
			.exact = at->exact_k,
			.rows = task->k,
			.packed_bytes_before = at->k_bytes_before - pages->layers[first].k_bytes_before,
			.packed_bytes_first = pages->spec->layers[first].k->row_bytes },
		{ .codec = kv_layer_v(layer, task->head),
			.pages = at->v,
			.exact_codec = pages->spec->exact_v,
			.exact = at->exact_v,
			.rows = task->v,
			.packed_bytes_before = at->v_bytes_before - pages->layers[first].v_bytes_before,
			.packed_bytes_first = pages->spec->layers[first].v->row_bytes },
	};
	const int64_t *slots = task->slots + (uint64_t)layer->group_idx * task->n_tokens;

	for (uint32_t t = 0; t < task->n_tokens; t++) {
		if (slots[t] < 0 && !task->is_ring)
			continue;

		const uint64_t row_idx =
			task->is_ring ? 0 : slot_row(pages, task->layer, slots[t], task->head);

		for (uint32_t s = 0; s < KV_LENGTH(sides); s++) {
			const struct side *side = &sides[s];

			if (!side->rows->base)
				continue;

			uint8_t *wire = wire_row(side, pages->spec->kv_heads, task->layer_at, t, task->head);
			uint8_t *row = page_row(side, row_idx);
			uint8_t *exact = exact_row(side, pages, task->exact_slots, t, task->head);

			if (task->is_ring && move_ring_row(side, exact, wire, task->is_read) != KV_OK)
				return finding_at(task->result_idx, KV_BAD_VALUE, task->layer, t);
			if (task->is_ring)
				continue;
			if (task->is_read)
				read_row(side, row, exact, wire, scratch);
			else if (write_row(side, wire, row, exact, scratch) != KV_OK)
				return finding_at(task->result_idx, KV_BAD_VALUE, task->layer, t);
		}
	}
	return finding_at(task->result_idx, KV_OK, 0, 0);
}

/* ---- phases ---- */

/* All copies on one layer, in their order. */
static struct kv_finding run_copies(
	const struct kv_batch_pages *pages, const struct kv_batch *batch, uint32_t layer)
{
	const struct kv_pool_spec *spec = pages->spec;
	const struct kv_layer_spec *l = &spec->layers[layer];
	const uint64_t block_rows = (uint64_t)spec->block_size * spec->kv_heads;
	const uint64_t k_bytes = block_rows * l->k->row_bytes, v_bytes = block_rows * l->v->row_bytes;

	for (uint32_t i = 0; i < batch->n_copies; i++) {
		const struct kv_copy_op *op = &batch->copies[i];

		if (op->group_idx != l->group_idx)
			continue;
		KV_ASSERT(op->block_from < spec->n_blocks[op->group_idx]);
		KV_ASSERT(op->block_to < spec->n_blocks[op->group_idx]);
		memmove(pages->layers[layer].k + op->block_to * k_bytes,
			pages->layers[layer].k + op->block_from * k_bytes, k_bytes);
		memmove(pages->layers[layer].v + op->block_to * v_bytes,
			pages->layers[layer].v + op->block_from * v_bytes, v_bytes);
	}
	return finding_at(0, KV_OK, 0, 0);
}

static struct kv_finding run_update(const struct kv_batch_pages *pages, const struct kv_update_op *op,
	uint32_t layer_at, uint32_t head, struct kv_batch_scratch *scratch)
{
	const struct row_task task = { .k = &op->k,
		.v = &op->v,
		.slots = op->slots,
		.exact_slots = op->exact_slots,
		.result_idx = op->result_idx,
		.n_tokens = op->n_tokens,
		.layer_at = layer_at,
		.layer = op->layer_first + layer_at,
		.head = head };

	return layer_at < op->n_layers ? move_rows(pages, &task, scratch) : finding_at(0, KV_OK, 0, 0);
}

static struct kv_finding run_transfer(const struct kv_batch_pages *pages, const struct kv_transfer_op *op,
	uint32_t layer_at, uint32_t head, struct kv_batch_scratch *scratch)
{
	const struct row_task task = { .k = &op->k,
		.v = &op->v,
		.slots = op->slots,
		.exact_slots = op->exact_slots,
		.result_idx = op->result_idx,
		.n_tokens = op->n_tokens,
		.layer_at = layer_at,
		.layer = op->layer_first + layer_at,
		.head = head,
		.is_read = !op->is_import,
		.is_ring = op->is_ring };

	return layer_at < op->n_layers ? move_rows(pages, &task, scratch) : finding_at(0, KV_OK, 0, 0);
}

static struct kv_row_view view_of(const struct kv_pool_spec *spec, const struct kv_row_codec *codec,
	const uint8_t *pages, const uint32_t *table, uint32_t head)
{
	const uint64_t token_bytes = (uint64_t)spec->kv_heads * codec->row_bytes;

	return (struct kv_row_view){ .base = pages,
		.block_table = table,
		.block_size = spec->block_size,
		.block_bytes = spec->block_size * token_bytes,
		.token_bytes = token_bytes,
		.head_offset_bytes = (uint64_t)head * codec->row_bytes };
}

/* What float32 can hold; a log-sum-exp of -infinity says that there was nothing to attend to. */
static bool are_answers(
	const struct kv_attention_input *input, uint32_t n, const struct kv_batch_scratch *scratch)
{
	const bool has_tokens = input->tokens.lo < input->tokens.hi;

	for (uint32_t i = 0; i < n; i++) {
		if (!kv_f32_is_finite(scratch->lse[i]) && (has_tokens || scratch->lse[i] > 0))
			return false;
	}
	return kv_rows_are_finite(scratch->out, (size_t)n * input->v_codec->head_dim);
}

/*
 * Query heads [first, first + n) of query row `row`, all of one KV head; false when a number of the query is
 * not finite, or one of the answer would not be.
 */
static bool run_queries(const struct kv_pool_spec *spec, const struct kv_decode_op *op,
	struct kv_attention_input *input, uint32_t row, uint32_t first, uint32_t n,
	struct kv_batch_scratch *scratch)
{
	const uint64_t query_idx = (uint64_t)row * spec->q_heads + first;
	const uint32_t k_dim = spec->k_head_dim, v_dim = spec->v_head_dim;
	const enum kv_dtype q_dtype = (enum kv_dtype)op->q_dtype, out_dtype = (enum kv_dtype)op->out_dtype;
	const struct kv_layer_spec *layer = &spec->layers[op->layer];
	const bool has_sinks = layer->sinks && !(op->flags & KV_DECODE_NO_SINKS);
	const struct kv_attention_options options = { .scale = op->scale,
		.softcap = layer->softcap,
		.slopes = layer->alibi ? layer->alibi + first : NULL,
		.sinks = has_sinks ? layer->sinks + first : NULL };

	kv_rows_load_f32(
		q_dtype, op->q + query_idx * k_dim * kv_dtype_bytes(q_dtype), (size_t)n * k_dim, scratch->q);
	if (!kv_rows_are_finite(scratch->q, (size_t)n * k_dim))
		return false;
	input->q = scratch->q;
	input->n_queries = n;
	kv_attention_rows(input, &options, &scratch->attention, scratch->out, scratch->lse);
	if (!are_answers(input, n, scratch))
		return false;
	kv_rows_store(out_dtype, scratch->out, (size_t)n * v_dim,
		op->out + query_idx * v_dim * kv_dtype_bytes(out_dtype));
	if (op->lse)
		memcpy(op->lse + query_idx, scratch->lse, n * sizeof(*op->lse));
	return true;
}

void kv_batch_decode_input(const struct kv_batch_pages *pages, const struct kv_decode_op *op, uint32_t head,
	struct kv_attention_input *input)
{
	const struct kv_pool_spec *spec = pages->spec;
	const struct kv_layer_spec *layer = &spec->layers[op->layer];

	*input = (struct kv_attention_input){ .k_codec = kv_layer_k(layer, head),
		.v_codec = kv_layer_v(layer, head),
		.k = view_of(spec, layer->k, pages->layers[op->layer].k, op->table, head),
		.v = view_of(spec, layer->v, pages->layers[op->layer].v, op->table, head),
		.q_is_rotated = (op->flags & KV_DECODE_Q_ROTATED) != 0,
		.out_is_rotated = (op->flags & KV_DECODE_OUT_ROTATED) != 0,
		.k_center = center_of(spec, op->layer, head) };
	if (op->exact_table) {
		const struct kv_layer_pages *at = &pages->layers[op->layer];

		input->exact_k_codec = spec->exact_k;
		input->exact_v_codec = spec->exact_v;
		input->exact_k = view_of(spec, spec->exact_k, at->exact_k, op->exact_table, head);
		input->exact_v = view_of(spec, spec->exact_v, at->exact_v, op->exact_table, head);
		input->exact_k.entry_first = input->exact_v.entry_first = op->exact_lo / spec->block_size;
		input->exact_lo = op->exact_lo;
	}
}

struct kv_finding kv_batch_run_rows(const struct kv_batch_pages *pages, const struct kv_decode_op *op,
	uint32_t head, uint32_t row_first, uint32_t n_rows, struct kv_batch_scratch *scratch)
{
	const struct kv_pool_spec *spec = pages->spec;
	const struct kv_layer_spec *layer = &spec->layers[op->layer];
	const uint32_t n_heads = spec->q_heads / spec->kv_heads;
	struct kv_attention_input input;

	kv_batch_decode_input(pages, op, head, &input);
	for (uint32_t row = row_first; row < row_first + n_rows; row++) {
		input.tokens =
			kv_attention_range(op->n_tokens_seen, op->q_len, row, op->window, layer->sink_tokens);
		for (uint32_t i = 0; i < n_heads; i += KV_ATTENTION_QUERIES_MAX) {
			const uint32_t left = n_heads - i;
			const uint32_t n = left < KV_ATTENTION_QUERIES_MAX ? left : KV_ATTENTION_QUERIES_MAX;

			if (!run_queries(spec, op, &input, row, head * n_heads + i, n, scratch))
				return finding_at(op->result_idx, KV_BAD_VALUE, op->layer, row);
		}
	}
	return finding_at(op->result_idx, KV_OK, 0, 0);
}

/* ---- tasks ---- */

static uint32_t update_layers_max(const struct kv_batch *batch)
{
	uint32_t max = 0;

	for (uint32_t i = 0; i < batch->n_updates; i++)
		max = batch->updates[i].n_layers > max ? batch->updates[i].n_layers : max;
	return max;
}

static uint32_t transfer_layers_max(const struct kv_batch *batch)
{
	uint32_t max = 0;

	for (uint32_t i = 0; i < batch->n_transfers; i++)
		max = batch->transfers[i].n_layers > max ? batch->transfers[i].n_layers : max;
	return max;
}

/*
 * Tasks of updates and transfers are numbered (layer, op, head), as if every op had as many layers as the one
 * with the most; the rest of them find nothing to do.
 */
uint64_t kv_batch_n_tasks(
	const struct kv_batch_pages *pages, const struct kv_batch *batch, enum kv_batch_phase phase)
{
	const uint64_t n_heads = pages->spec->kv_heads;

	switch (phase) {
	case KV_PHASE_COPIES:
		return batch->n_copies > 0 ? pages->spec->n_layers : 0;
	case KV_PHASE_UPDATES:
		return n_heads * batch->n_updates * update_layers_max(batch);
	case KV_PHASE_DECODES:
		return n_heads * batch->n_decodes;
	case KV_PHASE_TRANSFERS:
		return n_heads * batch->n_transfers * transfer_layers_max(batch);
	case KV_PHASES:
		break;
	}
	return 0;
}

static uint64_t decode_rows(const struct kv_pool_spec *spec, const struct kv_decode_op *op)
{
	const struct kv_attention_range range =
		kv_attention_range(op->n_tokens_seen, 1, 0, op->window, spec->layers[op->layer].sink_tokens);
	const uint32_t n_seen = range.hi - range.lo + range.first_hi;

	/* Every K and V row is expanded once and multiplied once per query head; two products count as one.
	 */
	return (uint64_t)n_seen * op->q_len * (2 * spec->kv_heads + spec->q_heads);
}

uint64_t kv_batch_n_rows(
	const struct kv_batch_pages *pages, const struct kv_batch *batch, enum kv_batch_phase phase)
{
	const uint64_t token_rows = 2 * (uint64_t)pages->spec->kv_heads;
	uint64_t n_rows = 0;

	switch (phase) {
	case KV_PHASE_COPIES: /* a row that is only copied costs about a sixteenth */
		return token_rows * batch->n_copies * pages->spec->block_size * pages->spec->n_layers / 16;
	case KV_PHASE_UPDATES:
		for (uint32_t i = 0; i < batch->n_updates; i++)
			n_rows += token_rows * batch->updates[i].n_tokens * batch->updates[i].n_layers;
		break;
	case KV_PHASE_DECODES:
		for (uint32_t i = 0; i < batch->n_decodes; i++)
			n_rows += decode_rows(pages->spec, &batch->decodes[i]);
		break;
	case KV_PHASE_TRANSFERS:
		for (uint32_t i = 0; i < batch->n_transfers; i++)
			n_rows += token_rows * batch->transfers[i].n_tokens * batch->transfers[i].n_layers;
		break;
	case KV_PHASES:
		break;
	}
	return n_rows;
}

struct kv_finding kv_batch_run_task(const struct kv_batch_pages *pages, const struct kv_batch *batch,
	enum kv_batch_phase phase, uint64_t task_idx, struct kv_batch_scratch *scratch)
{
	const uint32_t n_heads = pages->spec->kv_heads;
	const uint32_t head = (uint32_t)(task_idx % n_heads);
	const uint64_t rest = task_idx / n_heads;

	switch (phase) {
	case KV_PHASE_COPIES:
		return run_copies(pages, batch, (uint32_t)task_idx);
	case KV_PHASE_UPDATES:
		return run_update(pages, &batch->updates[rest % batch->n_updates],
			(uint32_t)(rest / batch->n_updates), head, scratch);
	case KV_PHASE_DECODES:
		return kv_batch_run_rows(
			pages, &batch->decodes[rest], head, 0, batch->decodes[rest].q_len, scratch);
	case KV_PHASE_TRANSFERS:
		return run_transfer(pages, &batch->transfers[rest % batch->n_transfers],
			(uint32_t)(rest / batch->n_transfers), head, scratch);
	case KV_PHASES:
		break;
	}
	return finding_at(0, KV_OK, 0, 0);
}

void kv_batch_merge(const struct kv_batch *batch, const struct kv_finding *finding)
{
	if (finding->result.status == KV_OK)
		return;
	KV_ASSERT(finding->result_idx < batch->n_results);

	struct kv_result *result = &batch->results[finding->result_idx];

	if (result->status == KV_OK || finding->result.layer < result->layer ||
		(finding->result.layer == result->layer && finding->result.row < result->row))
		*result = finding->result;
}

void kv_batch_end(const struct kv_batch_pages *pages, const struct kv_batch *batch)
{
	for (uint32_t i = 0; i < batch->n_decodes; i++) {
		const struct kv_decode_op *op = &batch->decodes[i];
		const size_t n_queries = (size_t)op->q_len * pages->spec->q_heads;

		if (batch->results[op->result_idx].status == KV_OK)
			continue;
		memset(op->out, 0,
			n_queries * pages->spec->v_head_dim * kv_dtype_bytes((enum kv_dtype)op->out_dtype));
		for (size_t q = 0; op->lse && q < n_queries; q++)
			op->lse[q] = -INFINITY;
	}
}

void kv_batch_run(
	const struct kv_batch_pages *pages, const struct kv_batch *batch, struct kv_batch_scratch *scratch)
{
	for (int phase = 0; phase < KV_PHASES; phase++) {
		const uint64_t n_tasks = kv_batch_n_tasks(pages, batch, (enum kv_batch_phase)phase);

		for (uint64_t i = 0; i < n_tasks; i++) {
			const struct kv_finding finding =
				kv_batch_run_task(pages, batch, (enum kv_batch_phase)phase, i, scratch);

			kv_batch_merge(batch, &finding);
		}
	}
	kv_batch_end(pages, batch);
}
