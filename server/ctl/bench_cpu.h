/*
 * What bench cpu measures: the CPU backend in this process, without a daemon. Everything in one run, because
 * machines differ from minute to minute. All times are the best of some rounds.
 */
#ifndef SERVER_CTL_BENCH_CPU_H
#define SERVER_CTL_BENCH_CPU_H

#include "core/backend.h"
#include "core/fast.h"

struct srv_bench_cpu {
	uint32_t n_sequences, n_tokens, q_heads, kv_heads, head_dim, n_threads, n_rounds;
	bool is_cpu_time; /* of all threads over their number, where others use the machine, too */
};

/* Processors that this process may run on, at least 1. */
uint32_t srv_bench_n_processors(void);

/* Rates a second. */
struct srv_bench_ceilings {
	double read_bytes, products, products_f32; /* on all threads */
	double copy_bytes;                         /* memcpy on one thread: bytes copied */
};
KV_MUST_CHECK enum kv_status srv_bench_ceilings(const struct srv_bench_cpu *bench,
	const struct kv_fast_kernels *kernels, struct srv_bench_ceilings *out, struct kv_error *err);

struct srv_bench_row {
	uint64_t n_bytes;    /* of all rows that are attended to */
	uint64_t n_products; /* of queries and keys, of weights and values */
	double decode_s;
};
/* kernels NULL: the scalar backend. `rotation` NULL: the default. */
KV_MUST_CHECK enum kv_status srv_bench_decode(const struct srv_bench_cpu *bench,
	const struct kv_fast_kernels *kernels, const char *format, struct srv_bench_row *out,
	struct kv_error *err);
/* Seconds for a row of bf16 on one thread. */
KV_MUST_CHECK enum kv_status srv_bench_encode(const struct srv_bench_cpu *bench, const char *format,
	const char *rotation, double *row_s, struct kv_error *err);

#endif
