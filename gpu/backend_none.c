/* Where there is no nvcc. */
#include "gpu/backend_cuda.h"

enum kv_status kvg_backend_cuda_create(uint32_t device_idx, struct kv_backend **out, struct kv_error *err)
{
	(void)out;
	return kv_fail(err, KV_UNAVAILABLE, "CUDA device %u: built without CUDA", device_idx);
}

void kvg_backend_cuda_memory(struct kv_backend *backend, uint64_t *free_bytes, uint64_t *total_bytes)
{
	(void)backend;
	*free_bytes = *total_bytes = 0;
}
