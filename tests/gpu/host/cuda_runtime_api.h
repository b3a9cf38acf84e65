/*
 * The part of the CUDA runtime that gpu/ uses, for a machine without a GPU: memory is host memory, a stream
 * does what it is told at once, a kernel's threads are fibers (fibers.h). Shadows the real header in the
 * programs of this folder.
 *
 * TQKV_FAKE_CUDA_FAIL=N in the environment: the device faults after N batches, as a real one does.
 */
#ifndef TESTS_GPU_HOST_CUDA_RUNTIME_API_H
#define TESTS_GPU_HOST_CUDA_RUNTIME_API_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

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
enum { cudaEventDisableTiming = 2 };

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
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t run, void *user);

/*
 * How often something was asked for that a batch must not need: memory, streams, events, a wait for the
 * device.
 */
extern uint64_t fake_device_n_setups;

/* For device_asm.h: the last kernel of a batch says that it is over, unless the device is lost. */
bool fake_device_ends_batch(void);
uint64_t fake_device_now_ns(void);

#ifdef __cplusplus
}
#endif

#endif
