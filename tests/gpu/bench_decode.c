/*
 * Times of the CUDA backend as the daemon runs it: whole batches, submitted and reaped, kernel time by the
 * batch's events. Every layer is a cold copy of the cache. Prints one line per shape; exit 77 without a
 * device.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <jansson.h>

#include "core/checked.h"
#include "core/format.h"
#include "core/number.h"
#include "gpu/backend_cuda.h"
#include "gpu/backend_internal.h"

#define AREA_BYTES (96u << 20)

struct shape {
	const char *k, *v;
	uint32_t q_heads, kv_heads, n_seqs, n_tokens;
};

static const struct shape shapes[] = {
	{ "tq4", "tq4", 32, 8, 64, 8192 },
	{ "tq4", "tq4", 64, 8, 16, 32768 },
	{ "tq4", "tq4", 32, 32, 16, 4096 },
	{ "tq4", "tq4", 32, 8, 1, 131072 },
	{ "tq4", "tq4", 32, 8, 1, 4096 },
	{ "tq3", "tq3", 32, 8, 64, 8192 },
	{ "tq3", "tq3", 64, 8, 16, 32768 },
	{ "tq3", "tq3", 32, 32, 16, 4096 },
	{ "tq3", "tq3", 32, 8, 1, 131072 },
	{ "tq3", "tq3", 32, 8, 1, 4096 },
	{ "tq2", "tq2", 32, 8, 64, 8192 },
	{ "tq2", "tq2", 64, 8, 16, 32768 },
	{ "tq2", "tq2", 32, 32, 16, 4096 },
	{ "tq2", "tq2", 32, 8, 1, 131072 },
	{ "tq2", "tq2", 32, 8, 1, 4096 },
	{ "bf16", "bf16", 32, 8, 16, 4096 },
	{ "fp8", "fp8", 32, 8, 16, 4096 },
	{ "tq4", "v4", 32, 8, 16, 4096 },
	{ "turboquant35", "turboquant35", 32, 8, 16, 4096 },
};

static struct kv_backend *backend;
static uint8_t *area;
static uint64_t area_used;

static void *take(uint64_t n_bytes)
{
	uint8_t *ptr = area + area_used;

	area_used += kv_round_up_u64(n_bytes, 64);
	if (area_used > AREA_BYTES)
		abort();
	return ptr;
}

static uint64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static uint32_t submit_us, whole_us;

static void run(struct kv_batch *batch)
{
	struct kv_error err = { .msg = "" };

	batch->plan = area;
	for (uint32_t i = 0; i < batch->n_results; i++)
		batch->results[i] = (struct kv_result){ KV_OK, KV_LAYER_NONE, KV_ROW_NONE };
	const uint64_t begin = now_ns();

	if (backend->ops->submit(backend, batch, &err) != KV_OK) {
		printf("submit: %s\n", err.msg);
		exit(1);
	}
	submit_us = (uint32_t)((now_ns() - begin) / 1000);
	while (!backend->ops->reap(backend))
		;
	whole_us = (uint32_t)((now_ns() - begin) / 1000);
	if (batch->status != KV_OK || batch->results[0].status != KV_OK) {
		printf("batch status %d, result %d\n", (int)batch->status, batch->results[0].status);
		exit(1);
	}
}

/* ---- kernels alone: a graph of the waves of the last batches, each of another layer, replayed ---- */

enum part { PREPARE, ATTEND, FINISH, ALL, N_PARTS };

static double time_part(struct cuda_backend *cuda, enum part part)
{
	cudaGraph_t graph;
	cudaGraphExec_t exec;
	cudaEvent_t begin, end;
	float times[24];
	uint32_t n = 0;

	cudaStreamBeginCapture(cuda->compute_stream, cudaStreamCaptureModeGlobal);
	for (uint32_t f = 0; f < KVG_FLIGHTS_MAX; f++) {
		const struct kvg_decode_params *wave = &cuda->flights[f].waves[0];

		if (part == PREPARE || part == ALL)
			kvg_decode_prepare_launch(wave, cuda->compute_stream);
		if (part == ATTEND || part == ALL) {
			if (wave->tile_bits != 0)
				kvg_decode_tiles_launch(wave, cuda->compute_stream);
			else
				kvg_decode_rows_launch(wave, cuda->compute_stream);
		}
		if (part == FINISH || part == ALL)
			kvg_decode_finish_launch(wave, cuda->compute_stream);
	}
	cudaStreamEndCapture(cuda->compute_stream, &graph);
	cudaGraphInstantiate(&exec, graph, 0);
	cudaEventCreate(&begin);
	cudaEventCreate(&end);
	usleep(70000); /* the clock starts cool */
	for (uint32_t i = 0; i < 14; i++) {
		cudaEventRecord(begin, cuda->compute_stream);
		cudaGraphLaunch(exec, cuda->compute_stream);
		cudaEventRecord(end, cuda->compute_stream);
		cudaEventSynchronize(end);
		cudaEventElapsedTime(&times[i], begin, end);
	}
	/* The median of all but the first four. */
	for (uint32_t i = 4; i < 14; i++) {
		uint32_t n_below = 0;

		for (uint32_t k = 4; k < 14; k++)
			n_below += times[k] < times[i] || (times[k] == times[i] && k < i);
		if (n_below == 5)
			n = i;
	}
	cudaEventDestroy(begin);
	cudaEventDestroy(end);
	cudaGraphExecDestroy(exec);
	cudaGraphDestroy(graph);
	return (double)times[n] * 1000.0 / KVG_FLIGHTS_MAX;
}

static int by_value(const void *a, const void *b)
{
	return *(const uint32_t *)a < *(const uint32_t *)b ? -1 : *(const uint32_t *)a > *(const uint32_t *)b;
}

static void bench(const struct shape *s)
{
	struct kv_pool_spec *spec = NULL;
	struct kv_backend_pool *pool = NULL;
	struct kv_error err = { .msg = "" };
	struct kv_batch batch;
	struct kv_result results[128];
	const uint32_t blocks_each = s->n_tokens / 16, n_blocks = s->n_seqs * blocks_each;
	/* Two copies at least, and more than twice the 50 MB of the L2 cache in all. */
	uint32_t n_layers = 2;
	char json[512];
	uint64_t arena = 0, bytes_each;
	uint32_t times[64], n_times = 0;

	for (;; n_layers *= 2) {
		snprintf(json, sizeof(json),
			"{\"name\": \"b\", \"layers\": %u, \"q_heads\": %u, \"kv_heads\": %u, \"head_dim\": "
			"128, \"k\": \"%s\", "
			"\"v\": \"%s\", \"block_size\": 16, \"blocks\": %u}",
			n_layers, s->q_heads, s->kv_heads, s->k, s->v, n_blocks);
		json_t *value = json_loads(json, 0, NULL);

		kv_pool_spec_destroy(spec);
		spec = NULL;
		if (kv_pool_spec_create(value, &spec, &err) != KV_OK) {
			printf("%s\n", err.msg);
			exit(1);
		}
		json_decref(value);
		if (spec->token_bytes[0] * s->n_tokens * s->n_seqs > (300u << 20) || n_layers == 64)
			break;
	}
	bytes_each = spec->token_bytes[0] / n_layers * s->n_tokens * s->n_seqs;
	if (backend->ops->pool_check(backend, spec, &arena, &err) != KV_OK ||
		backend->ops->pool_create(backend, spec, 0, &pool, &err) != KV_OK) {
		printf("%s\n", err.msg);
		exit(1);
	}
	area_used = 0;
	memset(&batch, 0, sizeof(batch));
	batch.pool = pool;
	batch.results = results;

	uint32_t *order = take(n_blocks * sizeof(*order));
	uint64_t state = 12345;

	for (uint32_t i = 0; i < n_blocks; i++)
		order[i] = i;
	for (uint32_t i = n_blocks; i > 1; i--) {
		state = state * 6364136223846793005u + 1442695040888963407u;
		const uint32_t k = (uint32_t)((state >> 33) % i), kept = order[i - 1];

		order[i - 1] = order[k];
		order[k] = kept;
	}

	/* One set of rows, written again and again: 2048 tokens of all KV heads. */
	const uint32_t n = 2048;
	const size_t n_values = (size_t)n * s->kv_heads * 128;
	uint8_t *rows = take(n_values * 2);
	int64_t *slots = take(n * sizeof(*slots));
	struct kv_update_op *update = take(sizeof(*update));
	uint32_t update_us = 0, n_updates = 0;

	for (size_t i = 0; i < n_values; i++) {
		float value = 0;

		for (int k = 0; k < 4; k++) {
			state = state * 6364136223846793005u + 1442695040888963407u;
			value += (float)(state >> 40) / 16777216.0f - 0.5f;
		}
		kv_store_u16(kv_f32_to_bf16(value * 1.7f), rows + 2 * i);
	}
	batch.updates = update;
	batch.n_updates = batch.n_results = 1;
	for (uint32_t layer = 0; layer < n_layers; layer++) {
		for (uint64_t at = 0; at < (uint64_t)n_blocks * 16; at += n) {
			for (uint32_t t = 0; t < n; t++)
				slots[t] = (int64_t)order[(at + t) / 16] * 16 + (int64_t)((at + t) % 16);
			*update = (struct kv_update_op){ .layer_first = layer,
				.n_layers = 1,
				.n_tokens = n,
				.slots = slots,
				.k = { .base = rows, .tokens_stride = n, .dtype = KV_DTYPE_BF16 },
				.v = { .base = rows, .tokens_stride = n, .dtype = KV_DTYPE_BF16 } };
			run(&batch);
			if (layer > 0) {
				update_us += batch.kernel_us;
				n_updates++;
			}
		}
	}
	batch.n_updates = 0;

	struct kv_decode_op *decodes = take(s->n_seqs * sizeof(*decodes));

	for (uint32_t i = 0; i < s->n_seqs; i++) {
		decodes[i] = (struct kv_decode_op){ .result_idx = i,
			.q_len = 1,
			.n_tokens_seen = s->n_tokens,
			.scale = 0.0884f,
			.q_dtype = KV_DTYPE_BF16,
			.out_dtype = KV_DTYPE_BF16,
			.table = order + (size_t)i * blocks_each,
			.q = rows + (size_t)i * s->q_heads * 256,
			.out = take(s->q_heads * 256),
			.lse = take(s->q_heads * 4) };
	}
	batch.decodes = decodes;
	batch.n_decodes = batch.n_results = s->n_seqs;
	for (uint32_t i = 0; i < 40; i++) {
		for (uint32_t d = 0; d < s->n_seqs; d++)
			decodes[d].layer = i % n_layers;
		run(&batch);
		if (i >= 8)
			times[n_times++] = batch.kernel_us;
	}
	qsort(times, n_times, sizeof(times[0]), by_value);
	struct cuda_backend *cuda = kvg_from_base(backend);
	double part_us[N_PARTS];

	for (uint32_t part = 0; part < N_PARTS; part++)
		part_us[part] = time_part(cuda, (enum part)part);
	printf("%-12s %-12s %2u/%-2u %3u x %-6u %6.1f MB: attention %6.1f us %5.0f GB/s; prepare %5.1f, "
	       "finish %5.1f, all "
	       "%6.1f; batch: kernels %4u, copy in %3u, submit %3u, whole %4u us; update of 2048 tokens %u "
	       "us\n",
		s->k, s->v, s->q_heads, s->kv_heads, s->n_seqs, s->n_tokens, (double)bytes_each / 1e6,
		part_us[ATTEND], (double)bytes_each / part_us[ATTEND] / 1e3, part_us[PREPARE],
		part_us[FINISH], part_us[ALL], times[n_times / 2], batch.copy_in_us, submit_us, whole_us,
		n_updates ? update_us / n_updates : 0);
	fflush(stdout);
	backend->ops->pool_destroy(backend, pool);
	kv_pool_spec_destroy(spec);
}

int main(void)
{
	struct kv_error err = { .msg = "" };

	if (kvg_backend_cuda_create(0, &backend, &err) != KV_OK) {
		printf("%s\n", err.msg);
		return 77;
	}
	area = backend->ops->host_alloc(backend, AREA_BYTES);
	if (!area || backend->ops->arena_create(backend, 8ull << 30, &err) != KV_OK) {
		printf("memory: %s\n", err.msg);
		return 1;
	}
	for (uint32_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++)
		bench(&shapes[i]);
	backend->ops->host_free(backend, area, AREA_BYTES);
	backend->ops->destroy(backend);
	return 0;
}
