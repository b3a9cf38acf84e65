/* Pools, batches, and the launches that are kept of them. */
#include "gpu/bench/bench.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <jansson.h>

#include "core/checked.h"
#include "core/format.h"
#include "core/number.h"

#define AREA_BYTES  (160u << 20)
#define ARENA_BYTES (10ull << 30)
#define FILL_TOKENS 2048u
#define COLD_BYTES  (300u << 20) /* all layers: several times the L2 cache */

static struct kv_backend *backend;
static uint8_t *area;
static uint64_t area_used;
static uint64_t random_state = 12345;

void kvg_bench_die(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	fputs("tqkv-kernel-bench: ", stderr);
	vfprintf(stderr, format, args);
	fputc('\n', stderr);
	va_end(args);
	exit(EXIT_FAILURE);
}

static uint32_t next_random(void)
{
	random_state = random_state * 6364136223846793005u + 1442695040888963407u;
	return (uint32_t)(random_state >> 33);
}

static void *take(uint64_t n_bytes)
{
	uint8_t *ptr = area + area_used;

	area_used += kv_round_up_u64(n_bytes, 64);
	if (area_used > AREA_BYTES)
		kvg_bench_die("the area of a batch is too small");
	return ptr;
}

void kvg_bench_start(void)
{
	struct kv_error err = { .msg = "" };

	if (kvg_backend_cuda_create(0, &backend, &err) != KV_OK) {
		fprintf(stderr, "tqkv-kernel-bench: %s\n", err.msg);
		exit(77);
	}
	area = backend->ops->host_alloc(backend, AREA_BYTES);
	if (!area || backend->ops->arena_create(backend, ARENA_BYTES, &err) != KV_OK)
		kvg_bench_die("memory: %s", err.msg);
}

void kvg_bench_stop(void)
{
	backend->ops->host_free(backend, area, AREA_BYTES);
	backend->ops->destroy(backend);
}

struct cuda_backend *kvg_bench_cuda(void)
{
	return kvg_from_base(backend);
}

static uint64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static struct kvg_bench_batch run(struct kv_batch *batch)
{
	struct kv_error err = { .msg = "" };
	struct kvg_bench_batch out;

	batch->plan = area;
	for (uint32_t i = 0; i < batch->n_results; i++)
		batch->results[i] = (struct kv_result){ KV_OK, KV_LAYER_NONE, KV_ROW_NONE };

	const uint64_t begin = now_ns();

	if (backend->ops->submit(backend, batch, &err) != KV_OK)
		kvg_bench_die("submit: %s", err.msg);
	out.submit_us = (uint32_t)((now_ns() - begin) / 1000);
	while (!backend->ops->reap(backend))
		;
	out.whole_us = (uint32_t)((now_ns() - begin) / 1000);
	out.kernel_us = batch->kernel_us;
	if (batch->status != KV_OK || batch->results[0].status != KV_OK)
		kvg_bench_die("batch status %d, result %d", (int)batch->status, batch->results[0].status);
	return out;
}

/* The flight of the batch that was reaped last: nothing of it is overwritten before the next submit. */
static struct kvg_flight *last_flight(void)
{
	struct cuda_backend *cuda = kvg_bench_cuda();

	return &cuda->flights[(cuda->flight_first + KVG_FLIGHTS_MAX - 1) % KVG_FLIGHTS_MAX];
}

/* ---- pools ---- */

static uint32_t length_of(const struct kvg_bench_shape *shape, uint32_t seq)
{
	return shape->lengths ? shape->lengths[seq] : shape->n_tokens;
}

static uint32_t head_dim_of(const struct kvg_bench_shape *shape)
{
	return shape->head_dim != 0 ? shape->head_dim : 128;
}

static uint64_t n_tokens_of(const struct kvg_bench_shape *shape)
{
	uint64_t n = 0;

	for (uint32_t i = 0; i < shape->n_seqs; i++)
		n += length_of(shape, i);
	return n;
}

static uint32_t n_blocks_of(const struct kvg_bench_shape *shape)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < shape->n_seqs; i++)
		n += kv_div_up_u32(length_of(shape, i), 16);
	return n;
}

static struct kv_pool_spec *make_spec(const struct kvg_bench_shape *shape, uint32_t n_layers)
{
	struct kv_pool_spec *spec = NULL;
	struct kv_error err = { .msg = "" };
	json_t *json = json_pack("{s:s, s:i, s:i, s:i, s:i, s:s, s:s, s:i, s:i}", "name", "bench", "layers",
		(int)n_layers, "q_heads", (int)shape->q_heads, "kv_heads", (int)shape->kv_heads, "head_dim",
		(int)head_dim_of(shape), "k", shape->k, "v", shape->v, "block_size", 16, "blocks",
		(int)n_blocks_of(shape));

	if (shape->n_exact > 0) {
		json_object_set_new(json, "exact_tokens", json_integer(shape->n_exact));
		json_object_set_new(json, "exact_blocks", json_integer(shape->n_seqs * shape->n_exact / 16));
	}
	if (kv_pool_spec_create(json, &spec, &err) != KV_OK)
		kvg_bench_die("%s", err.msg);
	json_decref(json);
	return spec;
}

static void shuffle(uint32_t *order, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++)
		order[i] = i;
	for (uint32_t i = n; i > 1; i--) {
		const uint32_t k = next_random() % i, kept = order[i - 1];

		order[i - 1] = order[k];
		order[k] = kept;
	}
}

static void draw_rows(uint8_t *rows, size_t n_values)
{
	for (size_t i = 0; i < n_values; i++) {
		float value = 0;

		for (int k = 0; k < 4; k++)
			value += (float)(next_random() >> 7) / 16777216.0f - 0.5f;
		kv_store_u16(kv_f32_to_bf16(value * 1.7f), rows + 2 * i);
	}
}

static void set_update(struct kvg_bench_pool *pool, struct kv_update_op *op, uint32_t layer,
	uint32_t n_tokens, const int64_t *slots)
{
	*op = (struct kv_update_op){ .layer_first = layer,
		.n_layers = 1,
		.n_tokens = n_tokens,
		.slots = slots,
		.k = { .base = pool->rows, .tokens_stride = n_tokens, .dtype = KV_DTYPE_BF16 },
		.v = { .base = pool->rows, .tokens_stride = n_tokens, .dtype = KV_DTYPE_BF16 } };
	pool->batch.updates = op;
	pool->batch.n_updates = pool->batch.n_results = 1;
	pool->batch.n_decodes = 0;
}

/* One set of rows, written again and again. */
static void fill(struct kvg_bench_pool *pool)
{
	const uint32_t n_blocks = n_blocks_of(&pool->shape);
	struct kv_update_op *op = take(sizeof(*op));
	int64_t *slots = take(FILL_TOKENS * sizeof(*slots));

	for (uint32_t layer = 0; layer < pool->n_layers; layer++) {
		for (uint64_t at = 0; at < (uint64_t)n_blocks * 16; at += FILL_TOKENS) {
			for (uint32_t t = 0; t < FILL_TOKENS; t++)
				slots[t] = at + t < (uint64_t)n_blocks * 16
					? (int64_t)pool->order[(at + t) / 16] * 16 + (int64_t)((at + t) % 16)
					: -1;
			set_update(pool, op, layer, FILL_TOKENS, slots);
			run(&pool->batch);
		}
	}
}

void kvg_bench_pool_create(const struct kvg_bench_shape *shape, struct kvg_bench_pool *out)
{
	struct kv_error err = { .msg = "" };
	const uint64_t n_tokens = n_tokens_of(shape);
	uint64_t arena_bytes = 0;
	uint32_t n_layers = 2;

	*out = (struct kvg_bench_pool){ .shape = *shape };
	for (;; n_layers *= 2) {
		out->spec = make_spec(shape, n_layers);
		if (out->spec->token_bytes[0] * n_tokens > COLD_BYTES || n_layers == KVG_BENCH_LAYERS_MAX)
			break;
		kv_pool_spec_destroy(out->spec);
	}
	/* Ring blocks that nobody writes are zeros: other numbers may be none, which a decode refuses. */
	if (shape->n_exact > 0 &&
		cudaMemset(kvg_bench_cuda()->arena, 0, kvg_bench_cuda()->arena_bytes) != cudaSuccess)
		kvg_bench_die("clearing the arena");
	out->n_layers = n_layers;
	out->layer_bytes = out->spec->token_bytes[0] / n_layers * n_tokens;
	if (backend->ops->pool_check(backend, out->spec, &arena_bytes, &err) != KV_OK ||
		backend->ops->pool_create(backend, out->spec, 0, &out->pool, &err) != KV_OK)
		kvg_bench_die("%s", err.msg);
	area_used = 0;
	out->batch.pool = out->pool;
	out->batch.results = take(8192 * sizeof(*out->batch.results));
	out->order = take(n_blocks_of(shape) * sizeof(*out->order));
	shuffle(out->order, n_blocks_of(shape));

	const size_t n_values = (size_t)8192 * shape->kv_heads * head_dim_of(shape);

	out->rows = take(n_values * 2);
	draw_rows(out->rows, n_values / 4);
	for (uint32_t i = 1; i < 4; i++)
		memcpy(out->rows + i * (n_values / 2), out->rows, n_values / 2);
	fill(out);
}

void kvg_bench_pool_destroy(struct kvg_bench_pool *pool)
{
	(void)cudaFree(pool->kept);
	backend->ops->pool_destroy(backend, pool->pool);
	kv_pool_spec_destroy(pool->spec);
}

/* ---- launches ---- */

/* The newest tokens of sequence i from ring blocks of its own; what these hold is no matter of the time. */
static void use_ring(const struct kvg_bench_shape *shape, struct kv_decode_op *op, uint32_t seq)
{
	const uint32_t n_ring = shape->n_exact / 16;
	uint32_t *table = take((n_ring + 1) * sizeof(*table));

	op->exact_lo = op->n_tokens_seen - shape->n_exact;
	for (uint32_t b = op->exact_lo / 16; b * 16 < op->n_tokens_seen; b++)
		table[b - op->exact_lo / 16] = seq * n_ring + b % n_ring;
	op->exact_table = table;
}

static struct kv_decode_op *make_decodes(struct kvg_bench_pool *pool)
{
	const struct kvg_bench_shape *shape = &pool->shape;
	struct kv_decode_op *ops = take(shape->n_seqs * sizeof(*ops));
	uint32_t block = 0;

	for (uint32_t i = 0; i < shape->n_seqs; i++) {
		ops[i] = (struct kv_decode_op){ .result_idx = i,
			.q_len = 1,
			.n_tokens_seen = length_of(shape, i),
			.scale = 0.0884f,
			.q_dtype = KV_DTYPE_BF16,
			.out_dtype = KV_DTYPE_BF16,
			.table = pool->order + block,
			.q = pool->rows + (size_t)i * shape->q_heads * head_dim_of(shape) * 2,
			.out = take(shape->q_heads * head_dim_of(shape) * 2),
			.lse = take(shape->q_heads * 4) };
		block += kv_div_up_u32(length_of(shape, i), 16);
		if (shape->n_exact > 0)
			use_ring(shape, &ops[i], i);
	}
	pool->batch.n_updates = 0;
	pool->batch.decodes = ops;
	pool->batch.n_decodes = pool->batch.n_results = shape->n_seqs;
	return ops;
}

static void set_layer(struct kvg_bench_pool *pool, struct kv_decode_op *ops, uint32_t layer)
{
	for (uint32_t i = 0; i < pool->shape.n_seqs; i++)
		ops[i].layer = layer;
}

/* Copies what a flight staged, and lets the wave's pointers into it follow. */
static struct kvg_decode_params keep(const struct kvg_flight *flight, uint8_t *to)
{
	struct kvg_decode_params wave = flight->waves[0];
	const uint8_t *from = flight->staging_device;

	if (flight->n_waves != 1)
		kvg_bench_die("a batch of %u waves", flight->n_waves);
	if (cudaMemcpy(to, from, flight->staging_used, cudaMemcpyDeviceToDevice) != cudaSuccess)
		kvg_bench_die("copying a wave");
	wave.ops = (const void *)(to + ((const uint8_t *)wave.ops - from));
	wave.rows = (const void *)(to + ((const uint8_t *)wave.rows - from));
	if (wave.exact_rows)
		wave.exact_rows = (const void *)(to + ((const uint8_t *)wave.exact_rows - from));
	wave.flags = (void *)(to + ((const uint8_t *)wave.flags - from));
	return wave;
}

void kvg_bench_keep_waves(struct kvg_bench_pool *pool)
{
	const uint64_t kept = area_used;
	struct kv_decode_op *ops = make_decodes(pool);
	const uint32_t n = pool->n_layers < 8 ? 8 : pool->n_layers;
	uint64_t stride = 0;

	(void)cudaFree(pool->kept);
	pool->kept = NULL;
	for (uint32_t i = 0; i < n; i++) {
		set_layer(pool, ops, i % pool->n_layers);
		run(&pool->batch);
		if (!pool->kept) {
			stride = kv_round_up_u64(last_flight()->staging_used, 256);
			if (cudaMalloc((void **)&pool->kept, n * stride) != cudaSuccess)
				kvg_bench_die("memory of the waves");
		}
		pool->waves[i] = keep(last_flight(), pool->kept + i * stride);
	}
	pool->n_waves = n;
	area_used = kept;
}

struct kvg_rows_params kvg_bench_update(struct kvg_bench_pool *pool, uint32_t n_tokens)
{
	struct kv_update_op *op = take(sizeof(*op));
	int64_t *slots = take(n_tokens * sizeof(*slots));

	for (uint32_t t = 0; t < n_tokens; t++)
		slots[t] = (int64_t)pool->order[t / 16] * 16 + t % 16;
	set_update(pool, op, 0, n_tokens, slots);
	run(&pool->batch);
	return last_flight()->updates;
}

static int by_kernel(const void *a, const void *b)
{
	const uint32_t x = ((const struct kvg_bench_batch *)a)->kernel_us,
		       y = ((const struct kvg_bench_batch *)b)->kernel_us;

	return x < y ? -1 : x > y;
}

struct kvg_bench_batch kvg_bench_batches(struct kvg_bench_pool *pool)
{
	enum { N = 31 };
	const uint64_t kept = area_used;
	struct kv_decode_op *ops = make_decodes(pool);
	struct kvg_bench_batch batches[N];

	for (uint32_t i = 0; i < N; i++) {
		set_layer(pool, ops, i % pool->n_layers);
		batches[i] = run(&pool->batch);
	}
	qsort(batches, N, sizeof(batches[0]), by_kernel);
	area_used = kept;
	return batches[N / 2];
}
