/*
 * tqkv-kernel-bench: times of the CUDA kernels as the daemon launches them. Pools are filled through the
 * backend's own batches; the launches of a batch are then kept, one set for every layer, and replayed as a
 * CUDA graph. All functions end the program with one sentence when something fails: there is nothing to save.
 */
#ifndef GPU_BENCH_BENCH_H
#define GPU_BENCH_BENCH_H

#include <stdbool.h>
#include <stdint.h>

#include "gpu/backend_cuda.h"
#include "gpu/backend_internal.h"

#define KVG_BENCH_LAYERS_MAX 64u
#define KVG_BENCH_SEQS_MAX   64u

struct kvg_bench_shape {
	const char *k, *v;
	uint32_t q_heads, kv_heads, n_seqs;
	const uint32_t *lengths; /* [n_seqs], or NULL: all n_tokens */
	uint32_t n_tokens;
	uint32_t n_exact;  /* of them the newest ones are in ring blocks; a multiple of 16 */
	uint32_t head_dim; /* 0: 128 */
};

/* A filled pool, and the launches of one decode of every sequence, for each layer. */
struct kvg_bench_pool {
	struct kvg_bench_shape shape;
	struct kv_pool_spec *spec;
	struct kv_backend_pool *pool;
	struct kv_batch batch;
	uint32_t *order; /* blocks in random order */
	uint8_t *rows;   /* bf16, of KVG_BENCH_ROWS tokens */
	uint64_t layer_bytes;
	uint32_t n_layers, n_waves;
	struct kvg_decode_params waves[KVG_BENCH_LAYERS_MAX];
	uint8_t *kept; /* device memory of the waves' structs */
};

void kvg_bench_start(void);
void kvg_bench_stop(void);
struct cuda_backend *kvg_bench_cuda(void);
__attribute__((noreturn, format(printf, 1, 2))) void kvg_bench_die(const char *format, ...);

void kvg_bench_pool_create(const struct kvg_bench_shape *shape, struct kvg_bench_pool *out);
void kvg_bench_pool_destroy(struct kvg_bench_pool *pool);
/* Decodes every sequence once on every layer, and keeps the launches. */
void kvg_bench_keep_waves(struct kvg_bench_pool *pool);
/* Rows of one update of n_tokens on one layer, as launched; the batch has run once. */
struct kvg_rows_params kvg_bench_update(struct kvg_bench_pool *pool, uint32_t n_tokens);
/* Whole batches of one decode: median kernel time, and the loop thread's share, in microseconds. */
struct kvg_bench_batch {
	uint32_t kernel_us, submit_us, whole_us;
};
struct kvg_bench_batch kvg_bench_batches(struct kvg_bench_pool *pool);

/* What is launched for a layer. */
enum kvg_bench_part {
	KVG_BENCH_ALONE,   /* attention, after the end of the kernel before */
	KVG_BENCH_PREPARE, /* queries */
	KVG_BENCH_PAIR,    /* queries and attention, which begins early */
	KVG_BENCH_ALL,     /* with the merge of partial results */
};
/* Microseconds for each layer: the median of ten replays with a pause before them. */
double kvg_bench_time(const struct kvg_bench_pool *pool, enum kvg_bench_part part);
double kvg_bench_time_update(const struct kvg_rows_params *params);

/* Back to back for half a second. */
struct kvg_bench_sustained {
	double us;
	uint32_t clock_mhz, power_w; /* 0: not known */
};
struct kvg_bench_sustained kvg_bench_sustain(const struct kvg_bench_pool *pool);
/* NVML, where it can be loaded. */
void kvg_bench_device_state(uint32_t *clock_mhz, uint32_t *power_w);

/* Bytes per second that 16-byte loads read from 4 GiB: the best of 1, 2, 4, 8 blocks for each multiprocessor.
 */
double kvg_bench_read_rate(void);
/* Bytes per second from pinned memory to the device. */
double kvg_bench_copy_rate(void);

#endif
