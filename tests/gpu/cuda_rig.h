/*
 * A bench for the CUDA backend beside the scalar oracle: one pool on the device, the same pool in host
 * memory, and batches that run on both. Inputs are shared; what a batch writes is compared.
 */
#ifndef TESTS_GPU_CUDA_RIG_H
#define TESTS_GPU_CUDA_RIG_H

#include <check.h>
#include <jansson.h>
#include <math.h>
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/batch_run.h"
#include "core/checked.h"
#include "core/format.h"
#include "core/memory.h"
#include "gpu/backend_cuda.h"
#include "tests/lib/kv_test.h"

#define RIG_MEMORY_BYTES (96u << 20)
#define RIG_ARENA_BYTES  (11ull << 30) /* a pool whose offsets do not fit into 32 bits */
#define RIG_OPS_MAX      256u

/* Made once: a CUDA context takes a second. */
static struct kv_backend *rig_backend;
static uint8_t *rig_memory;

struct rig {
	struct kv_pool_spec *spec;
	struct kv_backend_pool *pool;
	struct kv_batch_pages pages; /* the oracle's */
	uint8_t *pages_memory;
	uint64_t pages_bytes;
	struct kv_batch_scratch *scratch;
	uint64_t memory_used;
	struct kv_batch batch;
	struct kv_copy_op *copies;
	uint64_t seed;
};

static inline void *rig_take(struct rig *rig, uint64_t n_bytes)
{
	uint8_t *ptr = rig_memory + rig->memory_used;

	rig->memory_used += kv_round_up_u64(n_bytes, 64);
	ck_assert_uint_le(rig->memory_used, RIG_MEMORY_BYTES);
	return ptr;
}

static inline void rig_begin(struct rig *rig)
{
	rig->memory_used = 0;
	memset(&rig->batch, 0, sizeof(rig->batch));
	rig->batch.pool = rig->pool;
	rig->batch.plan = rig_memory;
	rig->copies = rig_take(rig, RIG_OPS_MAX * sizeof(*rig->copies));
	rig->batch.copies = rig->copies;
	rig->batch.updates = rig_take(rig, RIG_OPS_MAX * sizeof(*rig->batch.updates));
	rig->batch.decodes = rig_take(rig, RIG_OPS_MAX * sizeof(*rig->batch.decodes));
	rig->batch.transfers = rig_take(rig, RIG_OPS_MAX * sizeof(*rig->batch.transfers));
	rig->batch.results = rig_take(rig, 2 * RIG_OPS_MAX * sizeof(*rig->batch.results));
}

static inline void rig_reset_results(struct rig *rig)
{
	for (uint32_t i = 0; i < 2 * RIG_OPS_MAX; i++)
		rig->batch.results[i] =
			(struct kv_result){ .status = KV_OK, .layer = KV_LAYER_NONE, .row = KV_ROW_NONE };
}

static inline bool rig_start(struct kv_error *err)
{
	if (kvg_backend_cuda_create(0, &rig_backend, err) != KV_OK)
		return false;
	rig_memory = rig_backend->ops->host_alloc(rig_backend, RIG_MEMORY_BYTES);
	if (!rig_memory || rig_backend->ops->arena_create(rig_backend, RIG_ARENA_BYTES, err) != KV_OK) {
		fprintf(stderr, "memory: %s\n", err->msg);
		exit(EXIT_FAILURE);
	}
	return true;
}

static inline void rig_stop(void)
{
	rig_backend->ops->host_free(rig_backend, rig_memory, RIG_MEMORY_BYTES);
	rig_backend->ops->destroy(rig_backend);
}

static inline void rig_init(struct rig *rig, const char *pool_json, uint64_t seed)
{
	json_t *json = json_loads(pool_json, 0, NULL);
	struct kv_error err = { .msg = "" };
	uint64_t n_bytes = 0;

	memset(rig, 0, sizeof(*rig));
	rig->seed = seed * 0x9E3779B97F4A7C15u + 1;
	ck_assert_ptr_nonnull(json);
	ck_assert_msg(kv_pool_spec_create(json, &rig->spec, &err) == KV_OK, "%s", err.msg);
	json_decref(json);
	ck_assert_msg(
		rig_backend->ops->pool_check(rig_backend, rig->spec, &n_bytes, &err) == KV_OK, "%s", err.msg);
	ck_assert_uint_le(n_bytes, RIG_ARENA_BYTES);
	ck_assert_msg(rig_backend->ops->pool_create(rig_backend, rig->spec,
			      (RIG_ARENA_BYTES - n_bytes) / 4096 * 4096, &rig->pool, &err) == KV_OK,
		"%s", err.msg);
	ck_assert(kv_batch_pages_bytes(rig->spec, &rig->pages_bytes));
	rig->pages_memory = kv_pages_alloc(rig->pages_bytes);
	ck_assert_int_eq(kv_batch_pages_init(&rig->pages, rig->spec, rig->pages_memory, NULL), KV_OK);
	rig->scratch = calloc(1, sizeof(*rig->scratch));
	rig_begin(rig);
}

static inline void rig_finish(struct rig *rig)
{
	rig_backend->ops->pool_destroy(rig_backend, rig->pool);
	kv_batch_pages_finish(&rig->pages);
	kv_pages_free(rig->pages_memory, rig->pages_bytes);
	free(rig->scratch);
	kv_pool_spec_destroy(rig->spec);
}

static inline void rig_run_cuda(struct rig *rig)
{
	struct pollfd finished = { .fd = rig_backend->ops->event_fd(rig_backend), .events = POLLIN };
	struct kv_batch *reaped = NULL;
	struct kv_error err = { .msg = "" };
	uint64_t count;

	rig_reset_results(rig);
	ck_assert_msg(rig_backend->ops->submit(rig_backend, &rig->batch, &err) == KV_OK, "%s", err.msg);
	while (!(reaped = rig_backend->ops->reap(rig_backend))) {
		rig_backend->ops->will_sleep(rig_backend);
		ck_assert_int_eq(poll(&finished, 1, 20000), 1);
		(void)!read(finished.fd, &count, sizeof(count));
	}
	ck_assert_ptr_eq(reaped, &rig->batch);
	if (reaped->status != KV_OK) {
		fprintf(stderr, "device lost: nothing more can be tested\n");
		exit(EXIT_FAILURE);
	}
}

static inline void rig_run_oracle(struct rig *rig)
{
	rig_reset_results(rig);
	kv_batch_run(&rig->pages, &rig->batch, rig->scratch);
}

/* About normal: sum of four uniforms. */
static inline float rig_number(struct rig *rig)
{
	const uint64_t random = kv_test_random(&rig->seed);
	const uint32_t sum = (uint32_t)(random & 0xFFFF) + (uint32_t)(random >> 16 & 0xFFFF) +
		(uint32_t)(random >> 32 & 0xFFFF) + (uint32_t)(random >> 48);

	return ((float)sum - 131070.0f) / 37837.0f;
}

static inline uint32_t rig_below(struct rig *rig, uint32_t n)
{
	return (uint32_t)(kv_test_random(&rig->seed) % n);
}

/* A random order of 0 .. n - 1. */
static inline void rig_shuffle(struct rig *rig, uint32_t *order, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++)
		order[i] = i;
	for (uint32_t i = n; i > 1; i--) {
		const uint32_t k = rig_below(rig, i), kept = order[i - 1];

		order[i - 1] = order[k];
		order[k] = kept;
	}
}

static inline uint32_t rig_row_bytes(const struct rig *rig, bool is_v, uint32_t layer, enum kv_dtype dtype)
{
	const struct kv_layer_spec *l = &rig->spec->layers[layer];

	return dtype == KV_DTYPE_PACKED ? (is_v ? l->v : l->k)->row_bytes
					: (is_v ? l->v : l->k)->head_dim * kv_dtype_bytes(dtype);
}

/* Room for the rows of an op, from layer 0 on. */
static inline struct kv_rows rig_rows(struct rig *rig, bool is_v, uint32_t n_layers, uint32_t n_tokens,
	enum kv_dtype dtype, uint64_t *n_bytes)
{
	*n_bytes = 0;
	for (uint32_t l = 0; l < n_layers; l++)
		*n_bytes += (uint64_t)n_tokens * rig->spec->kv_heads * rig_row_bytes(rig, is_v, l, dtype);
	return (struct kv_rows){
		.base = rig_take(rig, *n_bytes), .tokens_stride = n_tokens, .dtype = (uint8_t)dtype
	};
}

/*
 * Rows that a model could make, with a zero row, a tiny one, a large one, and one heavy channel now and then.
 * Large keys would only make logits of many hundreds, whose rounding is then what the test sees.
 */
static inline void rig_draw_rows(struct rig *rig, const struct kv_rows *rows, bool is_v, uint32_t n_rows)
{
	const uint32_t dim = is_v ? rig->spec->v_head_dim : rig->spec->k_head_dim;
	const uint32_t row_bytes = dim * kv_dtype_bytes((enum kv_dtype)rows->dtype);
	float row[KV_HEAD_DIM_MAX];

	for (uint32_t r = 0; r < n_rows; r++) {
		const uint32_t kind = rig_below(rig, 64);
		const float size = kind == 0 ? 0.0f
			: kind == 1          ? 1e-20f
			: kind == 2          ? (is_v ? 300.0f : 2.0f)
					     : 1.0f;

		for (uint32_t i = 0; i < dim; i++)
			row[i] = rig_number(rig) * size;
		if (kind == 3)
			row[rig_below(rig, dim)] = 12.0f;
		kv_rows_store((enum kv_dtype)rows->dtype, row, dim, rows->base + (size_t)r * row_bytes);
	}
}

#endif
