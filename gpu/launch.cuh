/*
 * How every kernel is launched: one struct of parameters by value. A dependent launch may begin while the
 * kernel before it still runs (device_asm.cuh, wait_for_previous()); never used after a kernel that does not
 * allow it.
 */
#ifndef GPU_LAUNCH_CUH
#define GPU_LAUNCH_CUH

#include <cuda_runtime_api.h>
#include <stddef.h>

struct kvg_grid {
	dim3 blocks;
	unsigned n_threads;
	size_t shared_bytes;
	cudaStream_t stream;
	bool is_dependent;
};

template <class Params>
static cudaError_t kvg_launch(void (*kernel)(Params), const struct kvg_grid &grid, const Params *params)
{
#ifdef __CUDACC__
	cudaLaunchAttribute attribute;
	cudaLaunchConfig_t config = {};
	void *arguments[] = { (void *)params };

	attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
	attribute.val.programmaticStreamSerializationAllowed = 1;
	config.gridDim = grid.blocks;
	config.blockDim = dim3(grid.n_threads);
	config.dynamicSmemBytes = grid.shared_bytes;
	config.stream = grid.stream;
	config.attrs = &attribute;
	config.numAttrs = grid.is_dependent ? 1 : 0;

	const cudaError_t error = cudaLaunchKernelExC(&config, (const void *)kernel, arguments);

	/* Not left behind for a later call to report. */
	(void)cudaGetLastError();
	return error;
#else
	const struct fiber_grid fibers = { { grid.blocks.x, grid.blocks.y, grid.blocks.z }, grid.n_threads };
	struct host_launch<Params> launch = {
		kernel, params
	};

	fibers_run(&fibers, launch.run, &launch);
	return cudaSuccess;
#endif
}

#endif
