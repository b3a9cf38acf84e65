/*
 * The CUDA backend: core/backend.h on one GPU. Built without CUDA, the same functions answer UNAVAILABLE, so
 * callers need no #ifdef.
 *
 * The thread that creates the backend is its only caller. A CUDA error is a status: after one the context is
 * poisoned, every batch comes back as DEVICE_LOST, and only a new process can repair it.
 */
#ifndef GPU_BACKEND_CUDA_H
#define GPU_BACKEND_CUDA_H

#include <stdint.h>

#include "core/backend.h"

/*
 * UNAVAILABLE with the reason: no driver, no device of this index, a device that the kernels are not built
 * for. NO_MEMORY names wanted and free bytes. The caller owns the backend until its ops->destroy().
 */
KV_MUST_CHECK enum kv_status kvg_backend_cuda_create(
	uint32_t device_idx, struct kv_backend **out, struct kv_error *err);

/* Memory of the backend's device: what an arena may take. The backend must be a CUDA one. */
void kvg_backend_cuda_memory(struct kv_backend *backend, uint64_t *free_bytes, uint64_t *total_bytes);

#endif
