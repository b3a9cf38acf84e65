/*
 * One pool on several backends, and what is asked of each: rows are appended, read back and decoded, with all
 * that a request may choose drawn at random; the same in every backend. Included by one program. Built with
 * TEST_CUDA the other backend is a GPU or, with TEST_ON_HOST, its kernels on this processor.
 */
#ifndef TESTS_LIB_RANDOM_BENCH_H
#define TESTS_LIB_RANDOM_BENCH_H

#include <math.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "core/attention.h"
#include "core/backend_cpu.h"
#include "core/fast.h"
#include "tests/lib/kv_core_test.h"
#include "tests/lib/random_pool.h"
#ifdef TEST_CUDA
#include "gpu/backend_cuda.h"
#endif

#ifdef TEST_CUDA
#define ARENA_BYTES  (32u << 20)
#define MEMORY_BYTES (32u << 20)
#define LONG_TOKENS  0u
#else
#define ARENA_BYTES  (64u << 20)
#define MEMORY_BYTES (192u << 20)
#define LONG_TOKENS  1536u /* some pieces of the fast kernels; 0: no such pools */
#endif
#define ROWS_FEW 3u /* query rows of most items */
#define OPS      3u /* decodes of a layer */
#define N_OTHERS 2u

struct bench {
	struct kv_backend *backend;
	uint8_t *memory;
	uint64_t used;
};
static struct bench benches[1 + N_OTHERS]; /* the scalar one first */
static uint32_t n_benches;

/*
 * How large numbers are drawn. Scores are about 1 however large keys are, because queries are as small; or,
 * `is_huge`, no float32 can hold them. Then there is an answer where a cap or a sink decides, else BAD_VALUE.
 */
struct sizes {
	double k, v, q;
	bool is_huge;
};

/* What one backend answers. */
struct answer {
	enum kv_status status; /* of the rows; the rest is there when it is OK */
	struct kv_batch batch;
	/* [layers, tokens, kv_heads, dim], as they are read from pages, and with what the ring has. */
	float *k, *v, *exact_k, *exact_v;
};

static void *take(struct bench *bench, uint64_t n_bytes)
{
	uint8_t *ptr = bench->memory + bench->used;

	bench->used += (n_bytes + 63) / 64 * 64;
	ck_assert_uint_le(bench->used, MEMORY_BYTES);
	return ptr;
}

/* Outside of any test, where check has no assertions. */
static void open_bench(struct kv_backend *backend)
{
	struct bench *bench = &benches[n_benches];

	bench->backend = backend;
	KV_ASSERT(backend->ops->arena_create(backend, ARENA_BYTES, NULL) == KV_OK);
	bench->memory = backend->ops->host_alloc(backend, MEMORY_BYTES);
	KV_ASSERT(bench->memory);
	n_benches++;
}

static bool open_benches(void)
{
	struct kv_backend *backend = NULL;
	struct kv_error err = { .msg = "" };

	KV_ASSERT(kv_backend_cpu_create(0, &backend, &err) == KV_OK);
	open_bench(backend);
#ifdef TEST_CUDA
	if (kvg_backend_cuda_create(0, &backend, &err) == KV_OK)
		open_bench(backend);
	else
		printf("%s\n", err.msg);
#else
	for (uint32_t i = 0; i < N_OTHERS && kv_fast_kernels_at(i); i++) {
		KV_ASSERT(kv_backend_cpu_create_with(0, kv_fast_kernels_at(i), &backend, &err) == KV_OK);
		open_bench(backend);
	}
#endif
	return n_benches > 1;
}

static void close_benches(void)
{
	for (uint32_t i = 0; i < n_benches; i++) {
		benches[i].backend->ops->host_free(benches[i].backend, benches[i].memory, MEMORY_BYTES);
		benches[i].backend->ops->destroy(benches[i].backend);
	}
}

/* ---- what is asked of every backend ---- */

/* A sequence has blocks 0, 1, .. from the end of the pool, and ring blocks likewise. */
static uint32_t block_of(uint32_t n_blocks, uint32_t entry)
{
	return n_blocks - 1 - entry;
}

static uint32_t capacity_of(const struct kv_pool_spec *spec)
{
	uint32_t n = spec->tokens_max;

	for (uint32_t g = 0; g < spec->n_groups; g++)
		n = spec->n_blocks[g] * spec->block_size < n ? spec->n_blocks[g] * spec->block_size : n;
	return n;
}

static int64_t *make_slots(struct bench *bench, const struct kv_pool_spec *spec, uint32_t n)
{
	int64_t *slots = take(bench, (uint64_t)spec->n_groups * n * sizeof(*slots));

	for (uint32_t g = 0; g < spec->n_groups; g++) {
		for (uint32_t t = 0; t < n; t++)
			slots[g * n + t] = (int64_t)block_of(spec->n_blocks[g], t / spec->block_size) *
					spec->block_size +
				t % spec->block_size;
	}
	return slots;
}

/* The first token that the ring has; n: none, where there are too few ring blocks for one. */
static uint32_t exact_lo_of(const struct kv_pool_spec *spec, uint32_t n)
{
	if (spec->exact_tokens == 0 || spec->n_blocks[spec->n_groups] < spec->exact_tokens / spec->block_size)
		return n;
	return n > spec->exact_tokens ? n - spec->exact_tokens : 0;
}

static uint32_t ring_block_of(const struct kv_pool_spec *spec, uint32_t entry)
{
	return block_of(spec->n_blocks[spec->n_groups], entry % (spec->exact_tokens / spec->block_size));
}

static int64_t *make_exact_slots(struct bench *bench, const struct kv_pool_spec *spec, uint32_t n)
{
	const uint32_t lo = exact_lo_of(spec, n), block_size = spec->block_size;
	int64_t *slots = take(bench, n * sizeof(*slots));

	if (spec->exact_tokens == 0)
		return NULL;
	for (uint32_t t = 0; t < n; t++)
		slots[t] = t < lo
			? -1
			: (int64_t)ring_block_of(spec, t / block_size) * block_size + t % block_size;
	return slots;
}

static struct kv_rows make_rows(struct bench *bench, const struct kv_pool_spec *spec, bool is_v, uint32_t n)
{
	const uint32_t dim = is_v ? spec->v_head_dim : spec->k_head_dim;

	return (struct kv_rows){ .base = take(bench,
					 (uint64_t)spec->n_layers * n * spec->kv_heads * dim * sizeof(float)),
		.tokens_stride = n,
		.dtype = KV_DTYPE_F32 };
}

static void draw(uint64_t *seed, void *out, uint64_t n, double size)
{
	/* About normal. */
	for (uint64_t i = 0; i < n; i++)
		((float *)out)[i] =
			(float)(size * (random_unit(seed) + random_unit(seed) + random_unit(seed)));
}

/* Half of all pools have numbers of about 1. A centre, which is about that, is not to drown or be drowned. */
static struct sizes draw_sizes(uint64_t *seed, const json_t *pool)
{
	static const double of_k[] = { 1e-6, 50, 6e4, 1e18, 1e30 }, of_v[] = { 1e-6, 1, 50, 6e4, 1e30 };
	struct sizes sizes = { 1, 1, 1, false };

	if (random_one_of(seed, 2))
		return sizes;
	sizes.v = of_v[random_below(seed, KV_LENGTH(of_v))];
	if (json_object_get(pool, "k_center"))
		return sizes;
	sizes.k = of_k[random_below(seed, KV_LENGTH(of_k))];
	sizes.is_huge = random_one_of(seed, 6);
	sizes.q = sizes.is_huge ? 1e17 : 1 / sizes.k;
	sizes.k = sizes.is_huge ? 1e30 : sizes.k;
	return sizes;
}

static void begin_batch(struct bench *bench, struct kv_backend_pool *pool, struct kv_batch *batch)
{
	*batch = (struct kv_batch){ .pool = pool, .plan = bench->memory + bench->used };
	batch->updates = take(bench, sizeof(*batch->updates));
	batch->transfers = take(bench, 2 * sizeof(*batch->transfers));
	batch->decodes = take(bench, 16 * sizeof(*batch->decodes));
	batch->results = take(bench, 32 * sizeof(*batch->results));
	for (uint32_t i = 0; i < 32; i++)
		batch->results[i] =
			(struct kv_result){ .status = KV_OK, .layer = KV_LAYER_NONE, .row = KV_ROW_NONE };
}

static void run_batch(struct bench *bench, struct kv_batch *batch)
{
	const struct kv_backend_ops *ops = bench->backend->ops;
	struct pollfd finished = { .fd = ops->event_fd(bench->backend), .events = POLLIN };
	uint64_t count;

	ck_assert_int_eq(ops->submit(bench->backend, batch, NULL), KV_OK);
	while (!ops->reap(bench->backend)) {
		if (ops->will_sleep)
			ops->will_sleep(bench->backend);
		ck_assert_int_eq(poll(&finished, 1, 20000), 1);
		(void)!read(finished.fd, &count, sizeof(count));
	}
	ck_assert_int_eq(batch->status, KV_OK);
}

/* Some of what float16 can hold without losing more than it says. */
static enum kv_dtype draw_dtype(uint64_t *seed, double size)
{
	static const enum kv_dtype dtypes[] = { KV_DTYPE_F32, KV_DTYPE_F32, KV_DTYPE_F16, KV_DTYPE_BF16 };

	return dtypes[size > 0.1 && size < 100 ? random_below(seed, KV_LENGTH(dtypes)) : 0];
}

/* The ring from a token on that it has; all, some or none of what it has. */
static void add_ring(struct bench *bench, const struct kv_pool_spec *spec, uint64_t *seed, uint32_t n,
	struct kv_decode_op *op)
{
	const uint32_t seen = op->n_tokens_seen, first = exact_lo_of(spec, n);
	const uint32_t n_blocks = (seen + spec->block_size - 1) / spec->block_size;
	uint32_t *ring = take(bench, (n_blocks + 1) * sizeof(*ring));

	op->exact_lo = first;
	if (first < seen && random_one_of(seed, 2))
		op->exact_lo += random_below(seed, seen - first + 1);
	if (op->exact_lo >= seen)
		return;
	op->exact_table = ring;
	for (uint32_t b = op->exact_lo / spec->block_size; b < n_blocks; b++)
		ring[b - op->exact_lo / spec->block_size] = ring_block_of(spec, b);
}

/* A request's own: q_len, a length that was promised and is shorter, window, scale, dtypes, flags. */
static void add_decode(struct bench *bench, const struct kv_pool_spec *spec, uint64_t *seed,
	const struct sizes *sizes, uint32_t layer_idx, uint32_t n, struct kv_batch *batch)
{
	const struct kv_layer_spec *layer = &spec->layers[layer_idx];
	struct kv_decode_op *op = &batch->decodes[batch->n_decodes++];
	const uint32_t seen = random_one_of(seed, 4) ? random_below(seed, n + 1) : n;
	const uint32_t rows_max = random_one_of(seed, 6) ? KV_Q_LEN_MAX : ROWS_FEW;
	const uint32_t q_len = 1 + random_below(seed, seen + 1 < rows_max ? seen + 1 : rows_max);
	const uint32_t window = random_one_of(seed, 3) ? 1 + random_below(seed, n / 2 + 50) : 0;
	const uint32_t n_blocks = (seen + spec->block_size - 1) / spec->block_size;
	const uint64_t n_queries = (uint64_t)q_len * spec->q_heads;
	uint32_t *table = take(bench, (n_blocks + 1) * sizeof(*table));
	float *q = take(bench, n_queries * spec->k_head_dim * sizeof(*q));

	for (uint32_t b = 0; b < n_blocks; b++)
		table[b] = block_of(spec->n_blocks[layer->group_idx], b);
	*op = (struct kv_decode_op){ .result_idx = batch->n_results++,
		.layer = layer_idx,
		.q_len = q_len,
		.n_tokens_seen = seen,
		.window = window && (!layer->window || window < layer->window) ? window : layer->window,
		.scale = random_one_of(seed, 4) ? layer->scale * 0.7f : layer->scale,
		.q_dtype = draw_dtype(seed, sizes->q),
		.out_dtype = draw_dtype(seed, sizes->v),
		.flags = (random_one_of(seed, 3) ? KV_DECODE_NO_SINKS : 0) |
			(random_one_of(seed, 2) ? KV_DECODE_Q_ROTATED : 0) |
			(random_one_of(seed, 2) ? KV_DECODE_OUT_ROTATED : 0),
		.table = table,
		.q = take(bench, n_queries * spec->k_head_dim * sizeof(float)),
		.out = take(bench, n_queries * spec->v_head_dim * sizeof(float)),
		.lse = take(bench, n_queries * sizeof(float)) };
	draw(seed, q, n_queries * spec->k_head_dim, sizes->q);
	kv_rows_store(
		(enum kv_dtype)op->q_dtype, q, n_queries * spec->k_head_dim, (uint8_t *)(uintptr_t)op->q);
	memset(op->out, 0xAA, n_queries * spec->v_head_dim * sizeof(float));
	memset(op->lse, 0xAA, n_queries * sizeof(float));
	if (exact_lo_of(spec, n) < n)
		add_ring(bench, spec, seed, n, op);
}

/* READ of all rows, of ring blocks where they have them. */
static void add_read(struct bench *bench, const struct kv_pool_spec *spec, const struct kv_update_op *written,
	bool is_exact, struct kv_batch *batch)
{
	const uint32_t n = written->n_tokens;

	batch->transfers[batch->n_transfers++] = (struct kv_transfer_op){ .result_idx = batch->n_results++,
		.n_layers = spec->n_layers,
		.n_tokens = n,
		.slots = written->slots,
		.exact_slots = is_exact && exact_lo_of(spec, n) < n ? written->exact_slots : NULL,
		.k = make_rows(bench, spec, false, n),
		.v = make_rows(bench, spec, true, n) };
}

/* Appends n tokens on all layers, reads them back and decodes on every layer; the same in every backend. */
static void ask(struct bench *bench, const struct kv_pool_spec *spec, uint64_t seed,
	const struct sizes *sizes, uint32_t n, struct answer *answer)
{
	const struct kv_backend_ops *ops = bench->backend->ops;
	struct kv_backend_pool *pool = NULL;
	struct kv_batch batch;

	bench->used = 0;
	ck_assert_int_eq(ops->pool_create(bench->backend, spec, 0, &pool, NULL), KV_OK);
	begin_batch(bench, pool, &batch);
	batch.n_results = batch.n_updates = 1;
	*batch.updates = (struct kv_update_op){ .n_layers = spec->n_layers,
		.n_tokens = n,
		.slots = make_slots(bench, spec, n),
		.exact_slots = make_exact_slots(bench, spec, n),
		.k = make_rows(bench, spec, false, n),
		.v = make_rows(bench, spec, true, n) };
	draw(&seed, batch.updates->k.base, (uint64_t)spec->n_layers * n * spec->kv_heads * spec->k_head_dim,
		sizes->k);
	draw(&seed, batch.updates->v.base, (uint64_t)spec->n_layers * n * spec->kv_heads * spec->v_head_dim,
		sizes->v);
	run_batch(bench, &batch);
	answer->status = (enum kv_status)batch.results[0].status;
	if (answer->status != KV_OK) {
		ops->pool_destroy(bench->backend, pool);
		return;
	}

	begin_batch(bench, pool, &answer->batch);
	add_read(bench, spec, batch.updates, false, &answer->batch);
	add_read(bench, spec, batch.updates, true, &answer->batch);
	for (uint32_t l = 0; l < spec->n_layers; l++) {
		for (uint32_t i = 0; i < OPS; i++)
			add_decode(bench, spec, &seed, sizes, l, n, &answer->batch);
	}
	run_batch(bench, &answer->batch);
	answer->k = (float *)(void *)answer->batch.transfers[0].k.base;
	answer->v = (float *)(void *)answer->batch.transfers[0].v.base;
	answer->exact_k = (float *)(void *)answer->batch.transfers[1].k.base;
	answer->exact_v = (float *)(void *)answer->batch.transfers[1].v.base;
	ops->pool_destroy(bench->backend, pool);
}

#endif
