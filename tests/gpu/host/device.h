/* The words of CUDA C++ that the kernels use, for a C++ compiler: read before every .cu by -include. */
#ifndef TESTS_GPU_HOST_DEVICE_H
#define TESTS_GPU_HOST_DEVICE_H

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "tests/gpu/host/fibers.h"

#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__   static /* one block runs at a time */

#define threadIdx fiber_thread
#define blockIdx  fiber_block
#define gridDim   fiber_grid.blocks
#define blockDim  (fiber_idx{ fiber_grid.n_threads, 1, 1 })

struct dim3 {
	unsigned x, y, z;

	dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z)
	{
	}
};

struct __align__(8) uint2
{
	uint32_t x, y;
};
struct __align__(16) uint4
{
	uint32_t x, y, z, w;
};
struct __align__(8) float2
{
	float x, y;
};
struct __align__(16) float4
{
	float x, y, z, w;
};

static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w)
{
	return { x, y, z, w };
}

static inline float2 make_float2(float x, float y)
{
	return { x, y };
}

static inline float4 make_float4(float x, float y, float z, float w)
{
	return { x, y, z, w };
}

template <class T> static inline T min(T a, T b)
{
	return b < a ? b : a;
}

template <class T> static inline T max(T a, T b)
{
	return a < b ? b : a;
}

template <class To, class From> static inline To bits_as(From from)
{
	To to;

	static_assert(sizeof(to) == sizeof(from), "the same bits");
	memcpy(&to, &from, sizeof(to));
	return to;
}

static inline uint32_t __float_as_uint(float x)
{
	return bits_as<uint32_t>(x);
}

static inline float __uint_as_float(uint32_t x)
{
	return bits_as<float>(x);
}

static inline float __int_as_float(int x)
{
	return bits_as<float>(x);
}

static inline int __float2int_rn(float x)
{
	return (int)rintf(x);
}

template <class T> static inline T __ldcs(const T *from)
{
	return *from;
}

/* ---- a warp together ---- */

static inline void __syncwarp()
{
	fibers_sync_warp();
}

static inline void __syncthreads()
{
	fibers_sync_block();
}

template <class T> static inline T from_lane(T value, unsigned lane)
{
	uint32_t words[sizeof(T) / 4];
	T out;

	memcpy(words, &value, sizeof(value));
	memcpy(&out, fibers_show(words, sizeof(T) / 4)[lane % 32], sizeof(out));
	return out;
}

template <class T> static inline T __shfl_xor_sync(uint32_t, T value, unsigned mask)
{
	return from_lane(value, fiber_thread.x ^ mask);
}

template <class T> static inline T __shfl_down_sync(uint32_t, T value, unsigned n)
{
	const unsigned lane = fiber_thread.x % 32;

	return from_lane(value, lane + n < 32 ? lane + n : lane);
}

template <class T> static inline T __shfl_sync(uint32_t, T value, unsigned lane)
{
	return from_lane(value, lane);
}

static inline int __any_sync(uint32_t, bool is_true)
{
	const uint32_t word = is_true;
	const uint32_t(*all)[FIBERS_WORDS_MAX] = fibers_show(&word, 1);
	uint32_t any = 0;

	for (unsigned lane = 0; lane < 32; lane++)
		any |= all[lane][0];
	return (int)any;
}

static inline uint32_t __ballot_sync(uint32_t, bool is_true)
{
	const uint32_t word = is_true;
	const uint32_t(*all)[FIBERS_WORDS_MAX] = fibers_show(&word, 1);
	uint32_t out = 0;

	for (unsigned lane = 0; lane < 32; lane++)
		out |= all[lane][0] << lane;
	return out;
}

/* ---- nobody else runs meanwhile ---- */

template <class T> static inline T atomicMin(T *at, T value)
{
	const T before = *at;

	*at = value < before ? value : before;
	return before;
}

template <class T> static inline T atomicAnd(T *at, T value)
{
	const T before = *at;

	*at &= value;
	return before;
}

template <class T> static inline T atomicOr(T *at, T value)
{
	const T before = *at;

	*at |= value;
	return before;
}

/* ---- launches ---- */

template <class Attributes, class Kernel>
static inline cudaError_t cudaFuncGetAttributes(Attributes *, Kernel)
{
	return cudaSuccess;
}

enum { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
struct cudaFuncAttributes {
};

template <class Kernel> static inline cudaError_t cudaFuncSetAttribute(Kernel, int, int value)
{
	return (size_t)value <= FIBERS_SHARED_MAX ? cudaSuccess : cudaErrorInvalidValue;
}

template <class Params> struct host_launch {
	void (*kernel)(Params);
	const Params *params;

	static void run(void *user)
	{
		const host_launch *launch = (const host_launch *)user;

		launch->kernel(*launch->params);
	}
};

#include "tests/gpu/host/device_asm.h"

#endif
