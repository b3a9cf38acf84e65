/*
 * The part of the CUDA runtime that gpu/ uses, for a machine without a GPU: memory is host memory, a stream
 * does what it is told at once, a kernel's threads are fibers (fibers.h). Shadows the real header in the
 * programs of this folder.
 *
 * TQKV_FAKE_CUDA_FAIL=N in the environment: the device faults after N batches, as a real one does.
 */
#ifndef TESTS_GPU_HOST_CUDA_RUNTIME_API_H
#define TESTS_GPU_HOST_CUDA_RUNTIME_API_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum cudaError {
	cudaSuccess = 0,
	cudaErrorInvalidValue = 1,
	cudaErrorMemoryAllocation = 2,
	cudaErrorInvalidDevice = 101,
	cudaErrorNotReady = 600,
	cudaErrorIllegalAddress = 700,
} cudaError_t;

typedef struct fake_stream *cudaStream_t;
typedef struct fake_event *cudaEvent_t;
typedef void (*cudaHostFn_t)(void *user);
#define CUDART_CB

enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2, cudaMemcpyDeviceToDevice = 3 };
enum { cudaStreamNonBlocking = 1, cudaHostRegisterPortable = 1, cudaHostRegisterMapped = 2 };

struct cudaDeviceProp {
	char name[256];
	int multiProcessorCount;
	int canUseHostPointerForRegisteredMem;
};

cudaError_t cudaGetLastError(void);
const char *cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetDeviceCount(int *count);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *out, int device);
cudaError_t cudaMalloc(void **out, size_t n_bytes);
cudaError_t cudaFree(void *ptr);
cudaError_t cudaMemGetInfo(size_t *n_free, size_t *n_total);
cudaError_t cudaHostRegister(void *ptr, size_t n_bytes, unsigned flags);
cudaError_t cudaHostUnregister(void *ptr);
cudaError_t cudaMemcpyAsync(
	void *to, const void *from, size_t n_bytes, enum cudaMemcpyKind kind, cudaStream_t stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags);
cudaError_t cudaEventCreate(cudaEvent_t *out);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t begin, cudaEvent_t end);
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t run, void *user);

#ifdef __cplusplus
}
#endif

#endif
