/* The yardsticks of a run: what plain loads read from memory, and what the bus brings. */
#include <cuda_runtime_api.h>
#include <stdint.h>

#define READ_BYTES (4ull << 30)
#define COPY_BYTES (256u << 20)

extern "C" double kvg_bench_read_rate(void);
extern "C" double kvg_bench_copy_rate(void);
extern "C" void kvg_bench_die(const char *format, ...);

static void check(cudaError_t error)
{
	if (error != cudaSuccess)
		kvg_bench_die("yardstick: %s", cudaGetErrorString(error));
}

/* N loads in flight for each thread; blocks take turns on consecutive pieces. */
template <int N>
static __global__ void __launch_bounds__(1024) read_kernel(const uint4 *from, uint64_t n, uint32_t *sink)
{
	const uint64_t piece = (uint64_t)N * blockDim.x;
	uint32_t sum = 0;

	for (uint64_t at = blockIdx.x * piece + threadIdx.x; at + piece <= n + threadIdx.x;
		at += gridDim.x * piece) {
		uint4 v[N];

#pragma unroll
		for (int k = 0; k < N; k++)
			v[k] = __ldcs(from + at + (uint64_t)k * blockDim.x);
#pragma unroll
		for (int k = 0; k < N; k++)
			sum ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
	}
	/* Never true of what lies there; the loads have to be done to find that out. */
	if (sum == 0x12345678u)
		*sink = sum;
}

template <class Work> static double best_ms(int n, Work work)
{
	cudaEvent_t begin, end;
	float best = 1e30f;

	check(cudaEventCreate(&begin));
	check(cudaEventCreate(&end));
	for (int i = 0; i < n; i++) {
		float ms = 0;

		check(cudaEventRecord(begin));
		work();
		check(cudaEventRecord(end));
		check(cudaEventSynchronize(end));
		check(cudaEventElapsedTime(&ms, begin, end));
		best = ms < best ? ms : best;
	}
	check(cudaEventDestroy(begin));
	check(cudaEventDestroy(end));
	return best;
}

double kvg_bench_read_rate(void)
{
	uint8_t *buffer = NULL;
	int device = 0, n_sms = 0;
	double best = 0;

	check(cudaGetDevice(&device));
	check(cudaDeviceGetAttribute(&n_sms, cudaDevAttrMultiProcessorCount, device));
	check(cudaMalloc((void **)&buffer, READ_BYTES + 16));
	check(cudaMemset(buffer, 0x5A, READ_BYTES));
	/* 4 and 8 loads in flight, 256 to 1024 threads, 1 to 8 blocks for each multiprocessor. */
	for (int i = 0; i < 24; i++) {
		const int per_sm = 1 << i % 4, n_threads = 256 << i / 4 % 3;
		void (*const kernel)(const uint4 *, uint64_t, uint32_t *) =
			i < 12 ? read_kernel<4> : read_kernel<8>;
		const double ms = best_ms(5, [&] {
			kernel<<<n_sms * per_sm, n_threads>>>(
				(const uint4 *)buffer, READ_BYTES / 16, (uint32_t *)(buffer + READ_BYTES));
		});

		check(cudaGetLastError());
		best = READ_BYTES / ms * 1e3 > best ? READ_BYTES / ms * 1e3 : best;
	}
	check(cudaFree(buffer));
	return best;
}

double kvg_bench_copy_rate(void)
{
	void *from = NULL, *to = NULL;

	check(cudaMallocHost(&from, COPY_BYTES));
	check(cudaMalloc(&to, COPY_BYTES));

	const double ms =
		best_ms(4, [&] { check(cudaMemcpyAsync(to, from, COPY_BYTES, cudaMemcpyHostToDevice)); });

	check(cudaFree(to));
	check(cudaFreeHost(from));
	return COPY_BYTES / ms * 1e3;
}
