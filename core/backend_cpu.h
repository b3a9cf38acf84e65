/*
 * The CPU backend: core/backend.h on worker threads. Scalar it is the oracle of every other backend; with
 * fast kernels it decodes within their bounds (core/FAST.md) what they take, and stores the same bytes. Its
 * results do not depend on the number of threads.
 */
#ifndef CORE_BACKEND_CPU_H
#define CORE_BACKEND_CPU_H

#include <stddef.h>
#include <stdint.h>

#include "core/backend.h"

#define KV_BACKEND_CPU_THREADS_MAX 1024u

struct kv_fast_kernels;

/*
 * kernels NULL: scalar. n_threads 0: no threads at all, submit() and job_post() do the work before they
 * return; for tests and simulation. UNAVAILABLE when threads cannot be made. The caller owns the backend
 * until its ops->destroy().
 */
KV_MUST_CHECK enum kv_status kv_backend_cpu_create_with(uint32_t n_threads,
	const struct kv_fast_kernels *kernels, struct kv_backend **out, struct kv_error *err);
static inline KV_MUST_CHECK enum kv_status kv_backend_cpu_create(
	uint32_t n_threads, struct kv_backend **out, struct kv_error *err)
{
	return kv_backend_cpu_create_with(n_threads, NULL, out, err);
}

/*
 * Batches of at most n_rows of kv_batch_n_rows() are run inside submit() when no other is in flight; 0:
 * workers run them all. Before the first submit(). For tests and measurements.
 */
void kv_backend_cpu_set_inline_rows(struct kv_backend *backend, uint64_t n_rows);

#endif
