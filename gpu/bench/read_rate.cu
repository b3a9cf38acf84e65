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

static __global__ void __launch_bounds__(512) read_kernel(const uint4 *from, uint64_t n, uint32_t *sink)
{
	const uint64_t step = (uint64_t)gridDim.x * blockDim.x;
	uint32_t sum = 0;

	for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i + 3 * step < n; i += 4 * step) {
		const uint4 a = __ldcs(from + i), b = __ldcs(from + i + step);
		const uint4 c = __ldcs(from + i + 2 * step), d = __ldcs(from + i + 3 * step);

		sum ^= a.x ^ b.x ^ c.x ^ d.x ^ a.y ^ b.y ^ c.y ^ d.y;
		sum ^= a.z ^ b.z ^ c.z ^ d.z ^ a.w ^ b.w ^ c.w ^ d.w;
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
	/* 256 and 512 threads, 1 to 8 blocks for each multiprocessor. */
	for (int i = 0; i < 8; i++) {
		const int per_sm = 1 << i / 2, n_threads = 256 << i % 2;
		const double ms = best_ms(5, [&] {
			read_kernel<<<n_sms * per_sm, n_threads>>>(
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

	const double ms = best_ms(4, [&] { check(cudaMemcpyAsync(to, from, COPY_BYTES, cudaMemcpyHostToDevice)); });

	check(cudaFree(to));
	check(cudaFreeHost(from));
	return COPY_BYTES / ms * 1e3;
}
