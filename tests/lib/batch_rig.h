/*
 * A bench for one backend: a pool, memory for one batch at a time, and sequences that remember their rows as
 * floats, so that every answer can be compared with attention computed another way (kv_attention_exact).
 */
#ifndef TESTS_LIB_BATCH_RIG_H
#define TESTS_LIB_BATCH_RIG_H

#include <check.h>
#include <jansson.h>
#include <math.h>
#include <poll.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/attention.h"
#include "core/backend.h"
#include "core/backend_cpu.h"
#include "core/format.h"
#include "tests/lib/kv_test.h"

#define BATCH_RIG_MEMORY_BYTES (8u << 20)
#define BATCH_RIG_OPS_MAX      64u
#define BATCH_RIG_TOKENS_MAX   256u
#define BATCH_RIG_ARENA_BYTES  (4u << 20)

struct batch_rig {
	struct kv_backend *backend;
	struct kv_pool_spec *spec;
	struct kv_backend_pool *pool;
	uint8_t *memory; /* of the batch that is being put together */
	uint64_t memory_used;
	struct kv_batch batch;
	struct kv_copy_op *copies;
	uint64_t seed;
};

/* One sequence: its block tables and what its rows decode to, from pages and from ring blocks. */
struct batch_seq {
	uint32_t table[KV_GROUPS_MAX][BATCH_RIG_TOKENS_MAX / 16];
	uint32_t ring[BATCH_RIG_TOKENS_MAX / 16];
	uint32_t n_tokens;
	float *k, *v; /* [layers, tokens max, kv_heads, dim] */
	float *exact_k, *exact_v;
};

static inline void *rig_take(struct batch_rig *rig, uint64_t n_bytes)
{
	uint8_t *ptr = rig->memory + rig->memory_used;

	rig->memory_used += (n_bytes + 63) / 64 * 64;
	ck_assert_uint_le(rig->memory_used, BATCH_RIG_MEMORY_BYTES);
	return ptr;
}

/* An empty batch. */
static inline void rig_begin(struct batch_rig *rig)
{
	rig->memory_used = 0;
	memset(&rig->batch, 0, sizeof(rig->batch));
	rig->batch.pool = rig->pool;
	rig->batch.plan = rig->memory;
	rig->copies = rig_take(rig, BATCH_RIG_OPS_MAX * sizeof(*rig->copies));
	rig->batch.copies = rig->copies;
	rig->batch.updates = rig_take(rig, BATCH_RIG_OPS_MAX * sizeof(*rig->batch.updates));
	rig->batch.decodes = rig_take(rig, BATCH_RIG_OPS_MAX * sizeof(*rig->batch.decodes));
	rig->batch.transfers = rig_take(rig, BATCH_RIG_OPS_MAX * sizeof(*rig->batch.transfers));
	rig->batch.results = rig_take(rig, BATCH_RIG_OPS_MAX * sizeof(*rig->batch.results));
	for (uint32_t i = 0; i < BATCH_RIG_OPS_MAX; i++)
		rig->batch.results[i] =
			(struct kv_result){ .status = KV_OK, .layer = KV_LAYER_NONE, .row = KV_ROW_NONE };
}

/* kernels NULL: the scalar backend. */
static inline void rig_init_with(struct batch_rig *rig, uint32_t n_threads,
	const struct kv_fast_kernels *kernels, const char *pool_json)
{
	json_t *json = json_loads(pool_json, 0, NULL);
	struct kv_error err = { .msg = "" };
	uint64_t n_bytes = 0;

	memset(rig, 0, sizeof(*rig));
	rig->seed = 0x1234567;
	ck_assert_ptr_nonnull(json);
	ck_assert_msg(kv_pool_spec_create(json, &rig->spec, &err) == KV_OK, "%s", err.msg);
	json_decref(json);
	ck_assert_msg(
		kv_backend_cpu_create_with(n_threads, kernels, &rig->backend, &err) == KV_OK, "%s", err.msg);
	if (n_threads % 2 == 1) /* so that workers, too, see batches as small as those of the tests */
		kv_backend_cpu_set_inline_rows(rig->backend, 0);
	ck_assert_int_eq(rig->backend->ops->pool_check(rig->backend, rig->spec, &n_bytes, NULL), KV_OK);
	ck_assert_uint_le(n_bytes, BATCH_RIG_ARENA_BYTES);
	ck_assert_int_eq(rig->backend->ops->arena_create(rig->backend, BATCH_RIG_ARENA_BYTES, NULL), KV_OK);
	/* Not at the beginning, and at the very end. */
	ck_assert_int_eq(rig->backend->ops->pool_create(
				 rig->backend, rig->spec, BATCH_RIG_ARENA_BYTES - n_bytes, &rig->pool, NULL),
		KV_OK);
	rig->memory = rig->backend->ops->host_alloc(rig->backend, BATCH_RIG_MEMORY_BYTES);
	ck_assert_ptr_nonnull(rig->memory);
	ck_assert_uint_eq((uintptr_t)rig->memory % 4096, 0);
	rig_begin(rig);
}

static inline void rig_init(struct batch_rig *rig, uint32_t n_threads, const char *pool_json)
{
	rig_init_with(rig, n_threads, NULL, pool_json);
}

static inline void rig_finish(struct batch_rig *rig)
{
	rig->backend->ops->host_free(rig->backend, rig->memory, BATCH_RIG_MEMORY_BYTES);
	rig->backend->ops->pool_destroy(rig->backend, rig->pool);
	rig->backend->ops->destroy(rig->backend);
	kv_pool_spec_destroy(rig->spec);
}

/* Waits for the descriptor and reaps; the batch must be the expected one and whole. */
static inline void rig_reap(struct batch_rig *rig, struct kv_batch *batch)
{
	struct pollfd finished = { .fd = rig->backend->ops->event_fd(rig->backend), .events = POLLIN };
	struct kv_batch *reaped = NULL;
	uint64_t count;

	while (!(reaped = rig->backend->ops->reap(rig->backend))) {
		ck_assert_int_eq(poll(&finished, 1, 10000), 1);
		(void)!read(finished.fd, &count, sizeof(count));
	}
	ck_assert_ptr_eq(reaped, batch);
	ck_assert_int_eq(batch->status, KV_OK);
}

static inline void rig_run(struct batch_rig *rig)
{
	ck_assert_int_eq(rig->backend->ops->submit(rig->backend, &rig->batch, NULL), KV_OK);
	rig_reap(rig, &rig->batch);
}

/* About normal: sum of four uniforms. */
static inline float rig_number(struct batch_rig *rig)
{
	const uint64_t random = kv_test_random(&rig->seed);
	const uint32_t sum = (uint32_t)(random & 0xFFFF) + (uint32_t)(random >> 16 & 0xFFFF) +
		(uint32_t)(random >> 32 & 0xFFFF) + (uint32_t)(random >> 48);

	return ((float)sum - 131070.0f) / 37837.0f;
}

/* Gives the sequence the blocks block_first, block_first + step, .. modulo the pool, other ones in other
 * groups. */
static inline void seq_init(struct batch_rig *rig, struct batch_seq *seq, uint32_t block_first, uint32_t step)
{
	const struct kv_pool_spec *spec = rig->spec;
	const size_t n_rows = (size_t)spec->n_layers * BATCH_RIG_TOKENS_MAX * spec->kv_heads;

	memset(seq, 0, sizeof(*seq));
	for (uint32_t g = 0; g < spec->n_groups; g++) {
		for (uint32_t i = 0; i < BATCH_RIG_TOKENS_MAX / 16; i++)
			seq->table[g][i] = (block_first + g + i * step) % spec->n_blocks[g];
	}
	seq->k = calloc(n_rows * spec->k_head_dim, sizeof(float));
	seq->v = calloc(n_rows * spec->v_head_dim, sizeof(float));
	if (spec->exact_tokens == 0)
		return;
	for (uint32_t i = 0; i < spec->exact_tokens / spec->block_size; i++)
		seq->ring[i] = (block_first + i * step) % spec->n_blocks[spec->n_groups];
	seq->exact_k = calloc(n_rows * spec->k_head_dim, sizeof(float));
	seq->exact_v = calloc(n_rows * spec->v_head_dim, sizeof(float));
}

static inline void seq_finish(struct batch_seq *seq)
{
	free(seq->k);
	free(seq->v);
	free(seq->exact_k);
	free(seq->exact_v);
}

static inline int64_t seq_slot(
	const struct kv_pool_spec *spec, const struct batch_seq *seq, uint32_t group, uint32_t token)
{
	return (int64_t)seq->table[group][token / spec->block_size] * spec->block_size +
		token % spec->block_size;
}

static inline int64_t *seq_slots(
	struct batch_rig *rig, const struct batch_seq *seq, uint32_t token_first, uint32_t n_tokens)
{
	int64_t *slots = rig_take(rig, (uint64_t)rig->spec->n_groups * n_tokens * sizeof(*slots));

	for (uint32_t g = 0; g < rig->spec->n_groups; g++) {
		for (uint32_t t = 0; t < n_tokens; t++)
			slots[g * n_tokens + t] = seq_slot(rig->spec, seq, g, token_first + t);
	}
	return slots;
}

/* Places of n tokens in the ring: the newest exact_tokens have one. NULL where the pool has no ring. */
static inline int64_t *seq_exact_slots(
	struct batch_rig *rig, const struct batch_seq *seq, uint32_t token_first, uint32_t n_tokens)
{
	const struct kv_pool_spec *spec = rig->spec;
	const uint32_t n_ring = spec->exact_tokens;
	int64_t *slots;

	if (n_ring == 0)
		return NULL;
	slots = rig_take(rig, n_tokens * sizeof(*slots));
	for (uint32_t i = 0; i < n_tokens; i++) {
		const uint32_t t = token_first + i, place = t % n_ring;

		slots[i] = i + n_ring < n_tokens
			? -1
			: (int64_t)seq->ring[place / spec->block_size] * spec->block_size +
				place % spec->block_size;
	}
	return slots;
}

/* Where the model keeps rows, those of pages or those of ring blocks. */
static inline size_t seq_row_idx(const struct batch_rig *rig, uint32_t layer, uint32_t token, uint32_t head)
{
	return ((size_t)layer * BATCH_RIG_TOKENS_MAX + token) * rig->spec->kv_heads + head;
}

static inline float *seq_row(const struct batch_rig *rig, const struct batch_seq *seq, bool is_v,
	uint32_t layer, uint32_t token, uint32_t head)
{
	const size_t row = seq_row_idx(rig, layer, token, head);

	return is_v ? seq->v + row * rig->spec->v_head_dim : seq->k + row * rig->spec->k_head_dim;
}

static inline float *seq_exact_row(const struct batch_rig *rig, const struct batch_seq *seq, bool is_v,
	uint32_t layer, uint32_t token, uint32_t head)
{
	const size_t row = seq_row_idx(rig, layer, token, head);

	return is_v ? seq->exact_v + row * rig->spec->v_head_dim : seq->exact_k + row * rig->spec->k_head_dim;
}

static inline const struct kv_row_codec *rig_codec(const struct batch_rig *rig, bool is_v, uint32_t layer)
{
	return is_v ? rig->spec->layers[layer].v : rig->spec->layers[layer].k;
}

/* What a codec stores of a row, and how it is read again; `center` NULL: none. */
static inline void seq_store(
	const struct kv_row_codec *codec, const float *row, const float *center, float *decoded)
{
	const uint32_t dim = codec->head_dim;
	struct kv_row_scratch scratch;
	float rest[KV_HEAD_DIM_MAX];
	uint8_t packed[KV_ROW_BYTES_MAX];

	for (uint32_t i = 0; i < dim; i++)
		rest[i] = center ? row[i] - center[i] : row[i];
	ck_assert_int_eq(kv_row_codec_encode(codec, rest, packed, &scratch), KV_OK);
	kv_row_codec_decode(codec, packed, decoded, &scratch);
	for (uint32_t i = 0; center && i < dim; i++)
		decoded[i] += center[i];
}

/* Draws rows of the wire's dtype into `rows` and what they decode to into the model. */
static inline void seq_draw(struct batch_rig *rig, struct batch_seq *seq, bool is_v, enum kv_dtype dtype,
	const struct kv_update_op *op, struct kv_rows *rows)
{
	const struct kv_pool_spec *spec = rig->spec;
	const uint32_t dim = is_v ? spec->v_head_dim : spec->k_head_dim;
	const uint32_t row_bytes = dim * kv_dtype_bytes(dtype);
	float row[KV_HEAD_DIM_MAX];

	rows->dtype = (uint8_t)dtype;
	rows->tokens_stride = op->n_tokens + 3; /* other items of the frame lie between the layers */
	rows->base = rig_take(rig, op->n_layers * rows->tokens_stride * spec->kv_heads * row_bytes);
	for (uint32_t l = 0; l < op->n_layers; l++) {
		const uint32_t layer = op->layer_first + l;
		const float *centers = is_v ? NULL : spec->layers[layer].k_center;

		for (uint32_t t = 0; t < op->n_tokens; t++) {
			for (uint32_t h = 0; h < spec->kv_heads; h++) {
				uint8_t *wire = rows->base +
					((l * rows->tokens_stride + t) * spec->kv_heads + h) * row_bytes;
				const float *center = centers ? centers + (size_t)h * dim : NULL;

				for (uint32_t i = 0; i < dim; i++)
					row[i] = rig_number(rig);
				kv_rows_store(dtype, row, dim, wire);
				kv_rows_load_f32(dtype, wire, dim, row);
				seq_store(rig_codec(rig, is_v, layer), row, center,
					seq_row(rig, seq, is_v, layer, seq->n_tokens + t, h));
				if (spec->exact_tokens > 0)
					seq_store(is_v ? spec->exact_v : spec->exact_k, row, center,
						seq_exact_row(rig, seq, is_v, layer, seq->n_tokens + t, h));
			}
		}
	}
}

/* Appends random rows on the layers; the sequence's length moves when `is_last`. */
static inline struct kv_update_op *seq_append(struct batch_rig *rig, struct batch_seq *seq,
	uint32_t layer_first, uint32_t n_layers, uint32_t n_tokens, enum kv_dtype dtype, bool is_last)
{
	struct kv_update_op *op = &rig->batch.updates[rig->batch.n_updates++];

	*op = (struct kv_update_op){ .result_idx = rig->batch.n_results++,
		.layer_first = layer_first,
		.n_layers = n_layers,
		.n_tokens = n_tokens,
		.slots = seq_slots(rig, seq, seq->n_tokens, n_tokens),
		.exact_slots = seq_exact_slots(rig, seq, seq->n_tokens, n_tokens) };
	seq_draw(rig, seq, false, dtype, op, &op->k);
	seq_draw(rig, seq, true, dtype, op, &op->v);
	if (is_last)
		seq->n_tokens += n_tokens;
	return op;
}

/* A query of random numbers; the caller changes what it wants different before the batch runs. */
static inline struct kv_decode_op *seq_decode(struct batch_rig *rig, const struct batch_seq *seq,
	uint32_t layer, uint32_t q_len, uint32_t n_tokens_seen)
{
	const struct kv_pool_spec *spec = rig->spec;
	const size_t n_queries = (size_t)q_len * spec->q_heads;
	float *q = rig_take(rig, n_queries * spec->k_head_dim * sizeof(float));
	struct kv_decode_op *op = &rig->batch.decodes[rig->batch.n_decodes++];

	for (size_t i = 0; i < n_queries * spec->k_head_dim; i++)
		q[i] = rig_number(rig);
	*op = (struct kv_decode_op){ .result_idx = rig->batch.n_results++,
		.layer = layer,
		.q_len = q_len,
		.n_tokens_seen = n_tokens_seen,
		.window = spec->layers[layer].window,
		.scale = spec->layers[layer].scale,
		.q_dtype = KV_DTYPE_F32,
		.out_dtype = KV_DTYPE_F32,
		.table = seq->table[spec->layers[layer].group_idx],
		.q = (uint8_t *)q,
		.out = rig_take(rig, n_queries * spec->v_head_dim * sizeof(float)),
		.lse = rig_take(rig, n_queries * sizeof(float)) };
	memset(op->out, 0xAA, n_queries * spec->v_head_dim * sizeof(float));
	memset(op->lse, 0xAA, n_queries * sizeof(float));
	return op;
}

/* Tokens from exact_lo on come from the ring. */
static inline void seq_use_ring(
	struct batch_rig *rig, const struct batch_seq *seq, struct kv_decode_op *op, uint32_t exact_lo)
{
	const uint32_t block_size = rig->spec->block_size, n_ring = rig->spec->exact_tokens / block_size;
	uint32_t *table = rig_take(rig, (n_ring + 1) * sizeof(*table));

	for (uint32_t b = exact_lo / block_size; b * block_size < op->n_tokens_seen; b++)
		table[b - exact_lo / block_size] = seq->ring[b % n_ring];
	op->exact_table = table;
	op->exact_lo = exact_lo;
}

/* The rows that the op sees on its layer, [tokens max, kv_heads, dim]; the caller's to free. */
static inline float *seq_seen_rows(
	const struct batch_rig *rig, const struct batch_seq *seq, const struct kv_decode_op *op, bool is_v)
{
	const uint32_t dim = is_v ? rig->spec->v_head_dim : rig->spec->k_head_dim;
	const size_t token_floats = (size_t)rig->spec->kv_heads * dim;
	const uint32_t exact_lo = op->exact_table ? op->exact_lo : op->n_tokens_seen;
	float *rows = malloc(BATCH_RIG_TOKENS_MAX * token_floats * sizeof(*rows));

	memcpy(rows, seq_row(rig, seq, is_v, op->layer, 0, 0), exact_lo * token_floats * sizeof(*rows));
	if (exact_lo < op->n_tokens_seen)
		memcpy(rows + exact_lo * token_floats, seq_exact_row(rig, seq, is_v, op->layer, exact_lo, 0),
			(op->n_tokens_seen - exact_lo) * token_floats * sizeof(*rows));
	return rows;
}

/* Attention of one query row and head, in float64 over the rows that the op sees. */
static inline void seq_exact(const struct batch_rig *rig, const float *k, const float *v,
	const struct kv_decode_op *op, uint32_t row, uint32_t q_head, const float *q, double *out,
	double *lse)
{
	const struct kv_pool_spec *spec = rig->spec;
	const uint32_t head = q_head / (spec->q_heads / spec->kv_heads);
	const struct kv_layer_spec *layer = &spec->layers[op->layer];
	const uint32_t n_seen =
		op->n_tokens_seen + 1 + row > op->q_len ? op->n_tokens_seen + 1 + row - op->q_len : 0;
	const uint32_t lo = op->window != 0 && n_seen > op->window ? n_seen - op->window : 0;
	const double sink = layer->sinks ? (double)layer->sinks[q_head] : 0;
	const struct kv_attention_exact_input input = { .q = q,
		.k = k + (size_t)head * spec->k_head_dim,
		.v = v + (size_t)head * spec->v_head_dim,
		.k_stride = (uint64_t)spec->kv_heads * spec->k_head_dim,
		.v_stride = (uint64_t)spec->kv_heads * spec->v_head_dim,
		.k_dim = spec->k_head_dim,
		.v_dim = spec->v_head_dim,
		.tokens = { .first_hi = lo < layer->sink_tokens ? lo : layer->sink_tokens,
			.lo = lo,
			.hi = n_seen },
		.scale = (double)op->scale,
		.softcap = (double)layer->softcap,
		.slope = layer->alibi ? (double)layer->alibi[q_head] : 0,
		.sink = layer->sinks && !(op->flags & KV_DECODE_NO_SINKS) ? &sink : NULL };

	kv_attention_exact(&input, out, lse);
}

/* Numbers in the basis of the codec's rows, in place, to the channels' own. */
static inline void turn_back(const struct kv_row_codec *codec, float *numbers)
{
	double y[KV_HEAD_DIM_MAX], x[KV_HEAD_DIM_MAX];

	for (uint32_t i = 0; i < codec->head_dim; i++)
		y[i] = (double)numbers[i];
	kv_row_codec_from_basis(codec, y, x);
	for (uint32_t i = 0; i < codec->head_dim; i++)
		numbers[i] = (float)x[i];
}

/* What logits of the query spread by, at most: a rounded key moves its logit by a part of that. */
static inline double spread_of(const struct batch_rig *rig, const float *k, const struct kv_decode_op *op,
	uint32_t head, const float *q)
{
	const uint32_t dim = rig->spec->k_head_dim;
	double longest = 0, q_norm = 0;

	for (uint32_t i = 0; i < dim; i++)
		q_norm += (double)q[i] * (double)q[i];
	for (uint32_t t = 0; t < op->n_tokens_seen; t++) {
		const float *row = k + ((size_t)t * rig->spec->kv_heads + head) * dim;
		double norm = 0;

		for (uint32_t i = 0; i < dim; i++)
			norm += (double)row[i] * (double)row[i];
		longest = fmax(longest, norm);
	}
	return (double)op->scale * sqrt(q_norm * longest / dim);
}

/*
 * Compares every output row with the exact one, in the channels' own basis: relative L2 error at most
 * `bound`. Log-sum-exp may be that of a single token, which nothing averages: it is off by `bound` times the
 * spread.
 */
static inline void seq_check(
	const struct batch_rig *rig, const struct batch_seq *seq, const struct kv_decode_op *op, double bound)
{
	const struct kv_pool_spec *spec = rig->spec;
	const uint32_t v_dim = spec->v_head_dim, k_dim = spec->k_head_dim;
	const uint32_t n_group = spec->q_heads / spec->kv_heads;
	float q[KV_HEAD_DIM_MAX], out[KV_HEAD_DIM_MAX];
	double exact[KV_HEAD_DIM_MAX], lse = 0;
	float *k = seq_seen_rows(rig, seq, op, false), *v = seq_seen_rows(rig, seq, op, true);

	ck_assert_int_eq(rig->batch.results[op->result_idx].status, KV_OK);
	for (uint32_t row = 0; row < op->q_len; row++) {
		for (uint32_t h = 0; h < spec->q_heads; h++) {
			const size_t query = (size_t)row * spec->q_heads + h;
			double error = 0, norm = 0;

			kv_rows_load_f32((enum kv_dtype)op->q_dtype,
				op->q + query * k_dim * kv_dtype_bytes((enum kv_dtype)op->q_dtype), k_dim, q);
			kv_rows_load_f32((enum kv_dtype)op->out_dtype,
				op->out + query * v_dim * kv_dtype_bytes((enum kv_dtype)op->out_dtype), v_dim,
				out);
			if (op->flags & KV_DECODE_Q_ROTATED)
				turn_back(kv_layer_k(&spec->layers[op->layer], h / n_group), q);
			if (op->flags & KV_DECODE_OUT_ROTATED)
				turn_back(kv_layer_v(&spec->layers[op->layer], h / n_group), out);
			seq_exact(rig, k, v, op, row, h, q, exact, &lse);
			for (uint32_t i = 0; i < v_dim; i++) {
				error += ((double)out[i] - exact[i]) * ((double)out[i] - exact[i]);
				norm += exact[i] * exact[i];
			}
			/* An assertion that holds is a system call: too many for every output. */
			if (!(sqrt(error) <= bound * sqrt(norm)))
				ck_abort_msg("row %u, query head %u: relative error %g above %g", row, h,
					sqrt(error / norm), bound);
			if (!op->lse)
				continue;

			const double most =
				bound * (fabs(lse) + fmax(1, spread_of(rig, k, op, h / n_group, q)));

			if (!(isinf(lse) ? isinf(op->lse[query]) && op->lse[query] < 0
					 : fabs((double)op->lse[query] - lse) <= most))
				ck_abort_msg("row %u, query head %u: log-sum-exp %g, expected %g", row, h,
					(double)op->lse[query], lse);
		}
	}
	free(k);
	free(v);
}

static inline struct kv_transfer_op *seq_transfer(struct batch_rig *rig, const struct batch_seq *seq,
	uint32_t token_first, uint32_t n_tokens, enum kv_dtype dtype, bool is_import)
{
	const struct kv_pool_spec *spec = rig->spec;
	const uint64_t n_rows = (uint64_t)spec->n_layers * n_tokens * spec->kv_heads;
	struct kv_transfer_op *op = &rig->batch.transfers[rig->batch.n_transfers++];
	const uint32_t number_bytes = kv_dtype_bytes(dtype);
	const uint32_t k_bytes =
		number_bytes ? number_bytes * spec->k_head_dim : rig_codec(rig, false, 0)->row_bytes;
	const uint32_t v_bytes =
		number_bytes ? number_bytes * spec->v_head_dim : rig_codec(rig, true, 0)->row_bytes;

	*op = (struct kv_transfer_op){ .result_idx = rig->batch.n_results++,
		.n_layers = spec->n_layers,
		.n_tokens = n_tokens,
		.slots = seq_slots(rig, seq, token_first, n_tokens),
		.k = { .base = rig_take(rig, n_rows * k_bytes),
			.tokens_stride = n_tokens,
			.dtype = (uint8_t)dtype },
		.v = { .base = rig_take(rig, n_rows * v_bytes),
			.tokens_stride = n_tokens,
			.dtype = (uint8_t)dtype },
		.is_import = is_import };
	return op;
}

#endif
