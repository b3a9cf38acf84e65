/* See cuda_runtime_api.h. */
#include <cuda_runtime_api.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define DEVICE_BYTES (64ull << 30)
#define HEADER_BYTES 4096u /* of an allocation: its size */
#define N_SMS        5

struct fake_stream {
	int unused;
};

struct fake_event {
	int unused;
};

uint64_t fake_device_n_setups;
static atomic_uint n_batches;
static atomic_bool is_lost;

static cudaError_t state(void)
{
	return atomic_load(&is_lost) ? cudaErrorIllegalAddress : cudaSuccess;
}

cudaError_t cudaGetLastError(void)
{
	return cudaSuccess;
}

const char *cudaGetErrorString(cudaError_t error)
{
	return error == cudaErrorMemoryAllocation  ? "out of memory"
		: error == cudaErrorIllegalAddress ? "an illegal memory access was encountered"
						   : "an error of the fake device";
}

cudaError_t cudaGetDeviceCount(int *count)
{
	*count = 1;
	return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
	return device == 0 ? cudaSuccess : cudaErrorInvalidDevice;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *out, int device)
{
	memset(out, 0, sizeof(*out));
	snprintf(out->name, sizeof(out->name), "fake device");
	out->multiProcessorCount = N_SMS;
	out->canUseHostPointerForRegisteredMem = 1;
	return cudaSetDevice(device);
}

cudaError_t cudaMalloc(void **out, size_t n_bytes)
{
	fake_device_n_setups++;
	if (n_bytes > DEVICE_BYTES)
		return cudaErrorMemoryAllocation;

	/* Pages that nobody touches cost nothing. */
	size_t *memory = mmap(NULL, n_bytes + HEADER_BYTES, PROT_READ | PROT_WRITE,
		MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	if (memory == MAP_FAILED)
		return cudaErrorMemoryAllocation;
	memory[0] = n_bytes + HEADER_BYTES;
	*out = (char *)memory + HEADER_BYTES;
	return cudaSuccess;
}

cudaError_t cudaFree(void *ptr)
{
	fake_device_n_setups++;
	if (ptr) {
		size_t *memory = (size_t *)(void *)((char *)ptr - HEADER_BYTES);

		munmap(memory, memory[0]);
	}
	return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *n_free, size_t *n_total)
{
	fake_device_n_setups++;
	*n_free = *n_total = DEVICE_BYTES;
	return cudaSuccess;
}

cudaError_t cudaHostRegister(void *ptr, size_t n_bytes, unsigned flags)
{
	fake_device_n_setups++;
	(void)ptr, (void)n_bytes, (void)flags;
	return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *ptr)
{
	fake_device_n_setups++;
	(void)ptr;
	return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(
	void *to, const void *from, size_t n_bytes, enum cudaMemcpyKind kind, cudaStream_t stream)
{
	(void)kind, (void)stream;
	if (!atomic_load(&is_lost))
		memcpy(to, from, n_bytes);
	return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags)
{
	fake_device_n_setups++;
	(void)flags;
	*out = calloc(1, sizeof(**out));
	return *out ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
	fake_device_n_setups++;
	free(stream);
	return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
	fake_device_n_setups++;
	(void)stream;
	return state();
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
	(void)stream;
	return state();
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags)
{
	(void)stream, (void)event, (void)flags;
	return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags)
{
	fake_device_n_setups++;
	(void)flags;
	*out = calloc(1, sizeof(**out));
	return *out ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
	fake_device_n_setups++;
	free(event);
	return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
	(void)event, (void)stream;
	return cudaSuccess;
}

/* A lost device calls nobody any more, and who asks hears of it. */
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t run, void *user)
{
	(void)stream;
	if (!atomic_load(&is_lost))
		run(user);
	return cudaSuccess;
}

bool fake_device_ends_batch(void)
{
	const char *limit = getenv("TQKV_FAKE_CUDA_FAIL");

	if (limit && atomic_fetch_add(&n_batches, 1) >= (unsigned)atoi(limit))
		atomic_store(&is_lost, true);
	return !atomic_load(&is_lost);
}

uint64_t fake_device_now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}
