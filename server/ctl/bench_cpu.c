#include "server/ctl/bench_cpu.h"

#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "core/backend_cpu.h"
#include "core/checked.h"
#include "core/clock.h"
#include "core/fast_ceilings.h"
#include "core/format.h"
#include "core/memory.h"

#define BLOCK_SIZE    64u
#define APPEND_TOKENS 1024u /* of one update */
#define AREA_BYTES    (256u << 10)
#define BUFFER_BYTES  (64u << 20) /* of each thread: above every cache */
#define COPY_BYTES    (64u << 20)
#define PRODUCT_ROUNDS \
	100000u /* half a millisecond: on a machine that others use, too, some rounds are not disturbed */
#define CEILING_ROUNDS 50u
#define SLICE_BYTES    (4u << 20)
#define THREADS_MAX    256u

/* Of this thread, or of the process. */
static double now_s(const struct srv_bench_cpu *bench, clockid_t cpu_clock)
{
	struct timespec spent;

	if (!bench->is_cpu_time || clock_gettime(cpu_clock, &spent) != 0)
		return (double)kv_clock_now_ns(kv_clock_system()) * 1e-9;
	return (double)spent.tv_sec + (double)spent.tv_nsec * 1e-9;
}

uint32_t srv_bench_n_processors(void)
{
	const long n = sysconf(_SC_NPROCESSORS_ONLN);

	return n < 1 ? 1 : n > (long)THREADS_MAX ? THREADS_MAX : (uint32_t)n;
}

/* ---- ceilings ---- */

enum ceiling { CEILING_READ, CEILING_PRODUCTS, CEILING_PRODUCTS_F32 };

struct runner {
	pthread_t thread;
	const struct srv_bench_cpu *bench;
	const struct kv_fast_ceilings *ceilings;
	enum ceiling ceiling;
	const uint8_t *buffer;
	pthread_barrier_t *barrier;
	double rate;
};

static void *run_ceiling(void *arg)
{
	struct runner *runner = arg;

	(void)pthread_barrier_wait(runner->barrier);

	if (runner->ceiling == CEILING_READ) {
		for (uint32_t at = 0; at < BUFFER_BYTES; at += SLICE_BYTES) {
			const double start_s = now_s(runner->bench, CLOCK_THREAD_CPUTIME_ID);
			const uint64_t n_bytes = runner->ceilings->read(runner->buffer + at, SLICE_BYTES);
			const double rate =
				(double)n_bytes / (now_s(runner->bench, CLOCK_THREAD_CPUTIME_ID) - start_s);

			runner->rate = rate > runner->rate ? rate : runner->rate;
		}
		return NULL;
	}

	const double start_s = now_s(runner->bench, CLOCK_THREAD_CPUTIME_ID);
	const uint64_t n_done = runner->ceiling == CEILING_PRODUCTS
		? runner->ceilings->products(PRODUCT_ROUNDS)
		: runner->ceilings->products_f32(PRODUCT_ROUNDS);

	runner->rate = (double)n_done / (now_s(runner->bench, CLOCK_THREAD_CPUTIME_ID) - start_s);
	return NULL;
}

/* One round on all threads at once: their rates together; 0 when threads cannot be made. */
static double measure_round(const struct srv_bench_cpu *bench, const struct kv_fast_kernels *kernels,
	const uint8_t *buffer, enum ceiling ceiling)
{
	struct runner runners[THREADS_MAX];
	const uint32_t n_threads = bench->n_threads < THREADS_MAX ? bench->n_threads : THREADS_MAX;
	pthread_barrier_t barrier;
	double rate = 0;

	if (pthread_barrier_init(&barrier, NULL, n_threads) != 0)
		return 0;
	for (uint32_t i = 0; i < n_threads; i++) {
		runners[i] = (struct runner){ .bench = bench,
			.ceilings = kv_fast_ceilings_of(kernels),
			.ceiling = ceiling,
			.buffer = buffer + (uint64_t)i * BUFFER_BYTES,
			.barrier = &barrier };
		/* A missing thread would leave the others at the barrier. */
		KV_ASSERT(pthread_create(&runners[i].thread, NULL, run_ceiling, &runners[i]) == 0);
	}
	for (uint32_t i = 0; i < n_threads; i++) {
		pthread_join(runners[i].thread, NULL);
		rate += runners[i].rate;
	}
	pthread_barrier_destroy(&barrier);
	return rate;
}

static void keep_best(double *best, double rate)
{
	*best = rate > *best ? rate : *best;
}

static double copy_rate(const struct srv_bench_cpu *bench, const uint8_t *buffer, uint8_t *to)
{
	const double start_s = now_s(bench, CLOCK_THREAD_CPUTIME_ID);

	memcpy(to, buffer, COPY_BYTES);
	return (double)COPY_BYTES / (now_s(bench, CLOCK_THREAD_CPUTIME_ID) - start_s);
}

enum kv_status srv_bench_ceilings(const struct srv_bench_cpu *bench, const struct kv_fast_kernels *kernels,
	struct srv_bench_ceilings *out, struct kv_error *err)
{
	const uint64_t n_bytes = (uint64_t)bench->n_threads * BUFFER_BYTES;
	uint8_t *buffer = kv_pages_alloc(n_bytes), *to = kv_pages_alloc(COPY_BYTES);

	memset(out, 0, sizeof(*out));
	if (!buffer || !to) {
		kv_pages_free(buffer, n_bytes);
		kv_pages_free(to, COPY_BYTES);
		return kv_fail(err, KV_NO_MEMORY, "buffers of %llu bytes", (unsigned long long)n_bytes);
	}
	/* As the backend's arena. */
	kv_pages_prefer_large(buffer, n_bytes);
	kv_pages_prefer_large(to, COPY_BYTES);
	memset(buffer, 1, n_bytes);
	memset(to, 2, COPY_BYTES);
	for (uint32_t round = 0; round < bench->n_rounds + CEILING_ROUNDS; round++) {
		if (round % 8 == 0) {
			keep_best(&out->read_bytes, measure_round(bench, kernels, buffer, CEILING_READ));
			keep_best(&out->copy_bytes, copy_rate(bench, buffer, to));
		}
		keep_best(&out->products, measure_round(bench, kernels, buffer, CEILING_PRODUCTS));
		keep_best(&out->products_f32, measure_round(bench, kernels, buffer, CEILING_PRODUCTS_F32));
	}
	kv_pages_free(buffer, n_bytes);
	kv_pages_free(to, COPY_BYTES);
	return KV_OK;
}

/* ---- a pool and its rows ---- */

struct rig {
	const struct srv_bench_cpu *bench;
	struct kv_backend *backend;
	struct kv_pool_spec *spec;
	struct kv_backend_pool *pool;
	uint8_t *area; /* ops, tables, slots, then rows or queries and outputs */
	uint64_t area_bytes, area_used;
	struct kv_batch batch;
	uint64_t seed;
	uint32_t n_threads; /* at least 1 */
};

static void *take(struct rig *rig, uint64_t n_bytes)
{
	uint8_t *part = rig->area + rig->area_used;

	rig->area_used += kv_round_up_u64(n_bytes, 64);
	KV_ASSERT(rig->area_used <= rig->area_bytes);
	return part;
}

/* About normal. */
static float draw(struct rig *rig)
{
	rig->seed ^= rig->seed << 13;
	rig->seed ^= rig->seed >> 7;
	rig->seed ^= rig->seed << 17;
	return ((float)(rig->seed & 0xFFFF) + (float)(rig->seed >> 16 & 0xFFFF) +
		       (float)(rig->seed >> 32 & 0xFFFF) + (float)(rig->seed >> 48) - 131070.0f) /
		37837.0f;
}

static void draw_rows(struct rig *rig, enum kv_dtype dtype, uint64_t n_numbers, uint8_t *out)
{
	for (uint64_t i = 0; i < n_numbers; i++) {
		const float value = draw(rig);

		kv_rows_store(dtype, &value, 1, out + i * kv_dtype_bytes(dtype));
	}
}

static void begin(struct rig *rig)
{
	rig->area_used = 0;
	memset(&rig->batch, 0, sizeof(rig->batch));
	rig->batch.pool = rig->pool;
	rig->batch.plan = rig->area;
	rig->batch.updates = take(rig, sizeof(*rig->batch.updates));
	rig->batch.decodes = take(rig, rig->bench->n_sequences * sizeof(*rig->batch.decodes));
	rig->batch.results = take(rig, (rig->bench->n_sequences + 1) * sizeof(*rig->batch.results));
}

/* Seconds from submit to reap. */
static double run(struct rig *rig)
{
	const double start_s = now_s(rig->bench, CLOCK_PROCESS_CPUTIME_ID);
	struct pollfd finished = { .fd = rig->backend->ops->event_fd(rig->backend), .events = POLLIN };
	uint64_t count;

	for (uint32_t i = 0; i < rig->batch.n_results; i++)
		rig->batch.results[i] = (struct kv_result){ KV_OK, KV_LAYER_NONE, KV_ROW_NONE };
	KV_ASSERT(rig->backend->ops->submit(rig->backend, &rig->batch, NULL) == KV_OK);
	while (!rig->backend->ops->reap(rig->backend)) {
		(void)poll(&finished, 1, -1);
		(void)!read(finished.fd, &count, sizeof(count));
	}
	return (now_s(rig->bench, CLOCK_PROCESS_CPUTIME_ID) - start_s) /
		(rig->bench->is_cpu_time ? rig->n_threads : 1);
}

static enum kv_status make_spec(
	struct rig *rig, const char *format, const char *rotation, struct kv_error *err)
{
	const struct srv_bench_cpu *bench = rig->bench;
	const uint32_t n_blocks = bench->n_sequences * kv_div_up_u32(bench->n_tokens, BLOCK_SIZE);
	json_t *json = json_pack("{s:s, s:i, s:i, s:i, s:i, s:s, s:s, s:i, s:i}", "name", "bench", "layers",
		1, "q_heads", (int)bench->q_heads, "kv_heads", (int)bench->kv_heads, "head_dim",
		(int)bench->head_dim, "k", format, "v", format, "block_size", (int)BLOCK_SIZE, "blocks",
		(int)n_blocks);

	if (!json || (rotation && json_object_set_new(json, "rotation", json_string(rotation)) != 0)) {
		json_decref(json);
		return kv_fail(err, KV_NO_MEMORY, "pool");
	}

	const enum kv_status status = kv_pool_spec_create(json, &rig->spec, err);

	json_decref(json);
	return status;
}

static void rig_finish(struct rig *rig)
{
	if (rig->backend) {
		rig->backend->ops->pool_destroy(rig->backend, rig->pool);
		rig->backend->ops->destroy(rig->backend);
	}
	kv_pool_spec_destroy(rig->spec);
	kv_pages_free(rig->area, rig->area_bytes);
}

static enum kv_status rig_init(struct rig *rig, const struct srv_bench_cpu *bench, uint32_t n_threads,
	const struct kv_fast_kernels *kernels, const char *format, const char *rotation, struct kv_error *err)
{
	const uint64_t n_numbers = (uint64_t)bench->kv_heads * bench->head_dim;
	uint64_t n_bytes = 0;

	*rig = (struct rig){
		.bench = bench, .seed = 0x9E3779B97F4A7C15, .n_threads = n_threads > 0 ? n_threads : 1
	};
	rig->area_bytes = AREA_BYTES + 2 * (uint64_t)APPEND_TOKENS * n_numbers * 4 +
		(uint64_t)bench->n_sequences *
			(sizeof(struct kv_decode_op) + (uint64_t)bench->n_tokens / 8 + 64 +
				(uint64_t)bench->q_heads * (bench->head_dim * 8ull + 8));
	rig->area = kv_pages_alloc(rig->area_bytes);
	if (!rig->area)
		return kv_fail(err, KV_NO_MEMORY, "%llu bytes", (unsigned long long)rig->area_bytes);

	enum kv_status status = make_spec(rig, format, rotation, err);

	if (status == KV_OK)
		status = kv_backend_cpu_create_with(n_threads, kernels, &rig->backend, err);
	if (status == KV_OK)
		status = rig->backend->ops->pool_check(rig->backend, rig->spec, &n_bytes, err);
	if (status == KV_OK)
		status = rig->backend->ops->arena_create(rig->backend, n_bytes, err);
	if (status == KV_OK)
		status = rig->backend->ops->pool_create(rig->backend, rig->spec, 0, &rig->pool, err);
	return status;
}

/* The same rows for every APPEND_TOKENS slots: an update that is run again with other slots. */
static struct kv_update_op *add_update(struct rig *rig)
{
	const struct srv_bench_cpu *bench = rig->bench;
	const uint64_t n_numbers = (uint64_t)APPEND_TOKENS * bench->kv_heads * bench->head_dim;
	struct kv_rows rows[2];

	begin(rig);
	for (int side = 0; side < 2; side++) {
		rows[side] = (struct kv_rows){ .base = take(rig, n_numbers * 2),
			.tokens_stride = APPEND_TOKENS,
			.dtype = KV_DTYPE_BF16 };
		draw_rows(rig, KV_DTYPE_BF16, n_numbers, rows[side].base);
	}
	rig->batch.n_updates = rig->batch.n_results = 1;
	rig->batch.updates[0] = (struct kv_update_op){ .n_layers = 1,
		.n_tokens = APPEND_TOKENS,
		.slots = take(rig, APPEND_TOKENS * sizeof(int64_t)),
		.k = rows[0],
		.v = rows[1] };
	return &rig->batch.updates[0];
}

static void set_slots(struct kv_update_op *op, uint64_t first, uint64_t n_slots)
{
	int64_t *slots = (int64_t *)op->slots;

	for (uint32_t t = 0; t < APPEND_TOKENS; t++)
		slots[t] = first + t < n_slots ? (int64_t)(first + t) : -1;
}

/* Blocks of the sequences lie in turn, so that a sequence's blocks do not stand side by side. */
static void add_decodes(struct rig *rig)
{
	const struct srv_bench_cpu *bench = rig->bench;
	const uint32_t n_table = kv_div_up_u32(bench->n_tokens, BLOCK_SIZE);
	const uint64_t q_numbers = (uint64_t)bench->q_heads * bench->head_dim;

	begin(rig);
	for (uint32_t s = 0; s < bench->n_sequences; s++) {
		uint32_t *table = take(rig, n_table * sizeof(*table));
		uint8_t *q = take(rig, q_numbers * 4);

		for (uint32_t b = 0; b < n_table; b++)
			table[b] = b * bench->n_sequences + s;
		draw_rows(rig, KV_DTYPE_F32, q_numbers, q);
		rig->batch.decodes[rig->batch.n_decodes++] =
			(struct kv_decode_op){ .result_idx = rig->batch.n_results++,
				.q_len = 1,
				.n_tokens_seen = bench->n_tokens,
				.scale = rig->spec->layers[0].scale,
				.q_dtype = KV_DTYPE_F32,
				.out_dtype = KV_DTYPE_F32,
				.table = table,
				.q = q,
				.out = take(rig, q_numbers * 4),
				.lse = take(rig, bench->q_heads * sizeof(float)) };
	}
}

enum kv_status srv_bench_decode(const struct srv_bench_cpu *bench, const struct kv_fast_kernels *kernels,
	const char *format, struct srv_bench_row *out, struct kv_error *err)
{
	struct rig rig;
	enum kv_status status = rig_init(&rig, bench, bench->n_threads, kernels, format, NULL, err);

	if (status == KV_OK) {
		const uint64_t n_slots = (uint64_t)rig.spec->n_blocks[0] * BLOCK_SIZE;
		const uint64_t n_rows = (uint64_t)bench->n_sequences * bench->n_tokens;
		struct kv_update_op *update = add_update(&rig);

		for (uint64_t first = 0; first < n_slots; first += APPEND_TOKENS) {
			set_slots(update, first, n_slots);
			(void)run(&rig);
		}
		add_decodes(&rig);
		*out = (struct srv_bench_row){ .n_bytes = n_rows * rig.spec->token_bytes[0],
			.n_products = 2 * n_rows * bench->q_heads * bench->head_dim,
			.decode_s = run(&rig) };
		for (uint32_t round = 0; round < bench->n_rounds; round++) {
			const double took_s = run(&rig);

			out->decode_s = took_s < out->decode_s ? took_s : out->decode_s;
		}
	}
	rig_finish(&rig);
	return status;
}

enum kv_status srv_bench_encode(const struct srv_bench_cpu *bench, const char *format, const char *rotation,
	double *row_s, struct kv_error *err)
{
	struct srv_bench_cpu small = *bench;
	struct rig rig;

	small.n_sequences = 1;
	small.n_tokens = APPEND_TOKENS;

	/* No threads: submit() does the work. */
	const enum kv_status status = rig_init(&rig, &small, 0, NULL, format, rotation, err);

	if (status == KV_OK) {
		struct kv_update_op *update = add_update(&rig);
		const double n_rows = 2.0 * APPEND_TOKENS * bench->kv_heads;

		set_slots(update, 0, APPEND_TOKENS);
		*row_s = run(&rig) / n_rows;
		for (uint32_t round = 0; round < bench->n_rounds; round++) {
			const double took_s = run(&rig) / n_rows;

			*row_s = took_s < *row_s ? took_s : *row_s;
		}
	}
	rig_finish(&rig);
	return status;
}
