/*
 * The first and the last kernel of a batch. The first brings what the host wrote to the device, where a copy
 * by the copy engine would cost more in hand-overs between engines than in bytes. The last one takes the
 * refusals back to host memory and then says, in host memory, that the batch is over: whoever polls that word
 * sees everything that the kernels wrote before.
 */
#include "gpu/device_asm.cuh"
#include "gpu/kernels.h"
#include "gpu/launch.cuh"
#include "gpu/variants.h"

#define THREADS 256u
/* A thread asks for all its pieces before it has the first: the way over PCIe is paid once. */
#define PIECES_PER_THREAD 4u
#define BLOCKS_MAX        264u

static __device__ void copy_pieces(const struct kvg_piece_run &run)
{
	const uint64_t n_threads = (uint64_t)gridDim.x * THREADS;

	for (uint64_t first = (uint64_t)blockIdx.x * THREADS + threadIdx.x; first < run.n_pieces;
		first += PIECES_PER_THREAD * n_threads) {
		uint4 pieces[PIECES_PER_THREAD];

#pragma unroll
		for (uint32_t k = 0; k < PIECES_PER_THREAD; k++) {
			if (first + k * n_threads < run.n_pieces)
				pieces[k] = ((const uint4 *)run.from)[first + k * n_threads];
		}
#pragma unroll
		for (uint32_t k = 0; k < PIECES_PER_THREAD; k++) {
			if (first + k * n_threads < run.n_pieces)
				((uint4 *)run.to)[first + k * n_threads] = pieces[k];
		}
	}
}

static __global__ void __launch_bounds__(THREADS)
	begin_kernel(const __grid_constant__ struct kvg_begin_params params)
{
	const bool is_first = blockIdx.x == 0 && threadIdx.x == 0;

	if (is_first && params.begin_ns)
		*params.begin_ns = tiles::now_ns();
	for (uint32_t i = 0; i < KVG_PIECE_RUNS; i++)
		copy_pieces(params.runs[i]);
	/* All blocks run side by side: one of them stands for the others. */
	if (is_first && params.copied_ns)
		*params.copied_ns = tiles::now_ns();
}

cudaError_t kvg_begin_launch(const struct kvg_begin_params *params, cudaStream_t stream)
{
	uint64_t n_most = 0;

	for (uint32_t i = 0; i < KVG_PIECE_RUNS; i++)
		n_most = params->runs[i].n_pieces > n_most ? params->runs[i].n_pieces : n_most;

	const uint64_t wanted = n_most / THREADS + 1;

	return kvg_launch(begin_kernel,
		{ dim3((unsigned)(wanted < BLOCKS_MAX ? wanted : BLOCKS_MAX)), THREADS, 0, stream, false },
		params);
}

static __global__ void __launch_bounds__(THREADS)
	end_kernel(const __grid_constant__ struct kvg_end_params params)
{
	for (uint32_t i = threadIdx.x; i < params.n_flags; i += THREADS)
		params.flags_to[i] = params.flags_from[i];
	if (threadIdx.x == 0)
		*params.end_ns = tiles::now_ns();
	tiles::fence_for_host();
	__syncthreads();
	if (threadIdx.x == 0)
		tiles::tell_host(params.ticket_at, params.ticket);
}

cudaError_t kvg_end_launch(const struct kvg_end_params *params, cudaStream_t stream)
{
	return kvg_launch(end_kernel, { dim3(1), THREADS, 0, stream, false }, params);
}

cudaError_t kvg_batch_load(void)
{
	struct cudaFuncAttributes attributes;
	const cudaError_t error = cudaFuncGetAttributes(&attributes, begin_kernel);

	return error != cudaSuccess ? error : cudaFuncGetAttributes(&attributes, end_kernel);
}
