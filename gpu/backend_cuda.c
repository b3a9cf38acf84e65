/*
 * Host control of the CUDA backend. All memory is taken when the backend, its arena and its pools are made; a
 * batch only enqueues: kernels that take in what the host wrote, work, and say in host memory that the batch
 * is over (batch.cu). reap() looks there and hands batches out in order. Only when the loop is about to sleep
 * is a callback of the driver asked for, which wakes it.
 */
#include "gpu/backend_cuda.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "core/checked.h"
#include "core/memory.h"
#include "gpu/backend_internal.h"

#define PAGE_BYTES 4096u

/* The error as text, and the sticky copy cleared: the next innocent launch would report it again. */
static enum kv_status fail(struct kv_error *err, enum kv_status status, const char *what, cudaError_t error)
{
	(void)cudaGetLastError();
	return kv_fail(err, status, "%s: CUDA error %d, %s", what, (int)error, cudaGetErrorString(error));
}

/* ---- batches ---- */

static void CUDART_CB on_finished(void *user)
{
	kvg_signal(user);
}

static bool is_over(const struct kvg_flight *flight)
{
	return __atomic_load_n(&flight->report->ticket, __ATOMIC_ACQUIRE) == flight->ticket;
}

/* Much to copy: beside the kernels of the batch before. */
static cudaError_t copy_by_engine(struct cuda_backend *cuda, struct kvg_flight *flight)
{
	const struct kvg_begin_params before = { .begin_ns = &flight->report->begin_ns };
	const struct kvg_begin_params after = { .copied_ns = &flight->report->copied_ns };
	cudaError_t error = kvg_begin_launch(&before, cuda->copy_stream);

	if (error == cudaSuccess && flight->staging_used > 0)
		error = cudaMemcpyAsync(flight->staging_device, flight->staging, flight->staging_used,
			cudaMemcpyHostToDevice, cuda->copy_stream);
	if (error == cudaSuccess && flight->mirrored_bytes > 0)
		error = cudaMemcpyAsync(flight->mirror_device, flight->mirrored, flight->mirrored_bytes,
			cudaMemcpyHostToDevice, cuda->copy_stream);
	if (error == cudaSuccess)
		error = cudaEventRecord(flight->copied, cuda->copy_stream);
	if (error == cudaSuccess)
		error = cudaStreamWaitEvent(cuda->compute_stream, flight->copied, 0);
	return error == cudaSuccess ? kvg_begin_launch(&after, cuda->compute_stream) : error;
}

static cudaError_t copy_in(struct cuda_backend *cuda, struct kvg_flight *flight)
{
	/* Both begin at multiples of 16 and may be read up to the next one. */
	const struct kvg_begin_params params = {
		.runs = { { flight->staging, flight->staging_device, (flight->staging_used + 15) / 16 },
			{ flight->mirrored, flight->mirror_device, (flight->mirrored_bytes + 15) / 16 } },
		.begin_ns = &flight->report->begin_ns,
		.copied_ns = &flight->report->copied_ns,
	};

	if (flight->staging_used + flight->mirrored_bytes > KVG_KERNEL_COPY_BYTES)
		return copy_by_engine(cuda, flight);
	return kvg_begin_launch(&params, cuda->compute_stream);
}

static cudaError_t launch_wave(struct cuda_backend *cuda, const struct kvg_decode_params *wave)
{
	cudaError_t error = kvg_decode_prepare_launch(wave, cuda->compute_stream);

	if (error == cudaSuccess)
		error = wave->k_bits != 0 ? kvg_decode_tiles_launch(wave, cuda->compute_stream)
					  : kvg_decode_rows_launch(wave, cuda->compute_stream);
	if (error == cudaSuccess)
		error = kvg_decode_exact_launch(wave, cuda->compute_stream);
	return error == cudaSuccess ? kvg_decode_finish_launch(wave, cuda->compute_stream) : error;
}

static cudaError_t compute(struct cuda_backend *cuda, struct kvg_flight *flight)
{
	const struct kvg_end_params end = {
		.flags_from = kvg_staged_address(flight, flight->flags),
		.flags_to = (uint64_t *)(uintptr_t)flight->flags,
		.end_ns = &flight->report->end_ns,
		.ticket_at = &flight->report->ticket,
		.n_flags = flight->batch->n_results,
		.ticket = flight->ticket,
	};
	cudaError_t error = kvg_copy_launch(&flight->copies, cuda->compute_stream);

	if (error == cudaSuccess && flight->updates.n_ops > 0)
		error = kvg_rows_launch(&flight->updates, cuda->compute_stream);
	for (uint32_t i = 0; error == cudaSuccess && i < flight->n_waves; i++)
		error = launch_wave(cuda, &flight->waves[i]);
	if (error == cudaSuccess && flight->transfers.n_ops > 0)
		error = kvg_rows_launch(&flight->transfers, cuda->compute_stream);
	if (error == cudaSuccess)
		error = kvg_end_launch(&end, cuda->compute_stream);
	return error == cudaSuccess ? cudaEventRecord(flight->computed, cuda->compute_stream) : error;
}

/* Whoever still has batches in flight gets them as lost. */
static void lose(struct cuda_backend *cuda)
{
	atomic_store(&cuda->is_lost, true);
	kvg_signal(cuda);
}

static enum kv_status cuda_submit(struct kv_backend *base, struct kv_batch *batch, struct kv_error *err)
{
	struct cuda_backend *cuda = kvg_from_base(base);

	if (atomic_load(&cuda->is_lost))
		return kv_fail(err, KV_DEVICE_LOST, "CUDA device %d was lost", cuda->device);
	if (cuda->n_flights == KVG_FLIGHTS_MAX)
		return KV_BUSY_RETRY;

	struct kvg_flight *flight = &cuda->flights[(cuda->flight_first + cuda->n_flights) % KVG_FLIGHTS_MAX];

	if (batch->n_results * sizeof(*flight->flags) + batch->n_copies * sizeof(struct kvg_copy_op) + 64 >
		KVG_STAGING_BYTES)
		return kv_fail(err, KV_DEVICE_LOST, "a batch of %u results and %u copies", batch->n_results,
			batch->n_copies);
	flight->batch = batch;
	flight->ticket = ++cuda->ticket_last;
	flight->is_wake_set = false;
	kvg_translate(cuda, flight);
	cudaError_t error = copy_in(cuda, flight);

	if (error == cudaSuccess)
		error = compute(cuda, flight);
	if (error != cudaSuccess) {
		/* Part of it may run: what the caller keeps is not touched again only because the context is
		 * lost. */
		lose(cuda);
		return fail(err, KV_DEVICE_LOST, "submitting a batch", error);
	}
	atomic_fetch_add(&cuda->n_flights, 1);
	kvg_jobs_watch(cuda);
	return KV_OK;
}

static void cuda_will_sleep(struct kv_backend *base)
{
	struct cuda_backend *cuda = kvg_from_base(base);
	cudaError_t error = cudaSuccess;

	for (uint32_t i = 0; i < cuda->n_flights && error == cudaSuccess; i++) {
		struct kvg_flight *flight = &cuda->flights[(cuda->flight_first + i) % KVG_FLIGHTS_MAX];

		if (flight->is_wake_set)
			continue;
		error = cudaStreamWaitEvent(cuda->wake_stream, flight->computed, 0);
		if (error == cudaSuccess)
			error = cudaLaunchHostFunc(cuda->wake_stream, on_finished, cuda);
		flight->is_wake_set = true;
	}
	if (error != cudaSuccess) {
		(void)cudaGetLastError();
		lose(cuda);
	}
}

static uint32_t microseconds(uint64_t from_ns, uint64_t to_ns)
{
	return to_ns > from_ns ? (uint32_t)((to_ns - from_ns + 500) / 1000) : 0;
}

/* Refusals that only the device saw. */
static void merge_flags(struct kvg_flight *flight)
{
	for (uint32_t i = 0; i < flight->batch->n_results; i++) {
		if (flight->flags[i] != UINT64_MAX)
			kvg_refuse(flight, i, KV_BAD_VALUE, (uint32_t)(flight->flags[i] >> 32),
				(uint32_t)(flight->flags[i] & UINT32_MAX));
	}
}

static struct kv_batch *cuda_reap(struct kv_backend *base)
{
	struct cuda_backend *cuda = kvg_from_base(base);
	struct kvg_flight *flight = &cuda->flights[cuda->flight_first];
	struct kv_batch *batch = flight->batch;

	if (cuda->n_flights == 0)
		return NULL;
	if (is_over(flight)) {
		merge_flags(flight);
		kv_batch_end(&batch->pool->pages, batch);
		batch->status = KV_OK;
		batch->copy_in_us = microseconds(flight->report->begin_ns, flight->report->copied_ns);
		batch->kernel_us = microseconds(flight->report->copied_ns, flight->report->end_ns);
		batch->copy_out_us = 0; /* kernels write outputs where they are wanted */
	} else if (atomic_load(&cuda->is_lost)) {
		batch->status = KV_DEVICE_LOST;
	} else {
		return NULL;
	}
	cuda->flight_first = (cuda->flight_first + 1) % KVG_FLIGHTS_MAX;
	atomic_fetch_sub(&cuda->n_flights, 1);
	flight->batch = NULL;
	return batch;
}

static int cuda_event_fd(struct kv_backend *base)
{
	return kvg_from_base(base)->event_fd;
}

static void cuda_info(struct kv_backend *base, struct kv_backend_info *out)
{
	const struct cuda_backend *cuda = kvg_from_base(base);

	memset(out, 0, sizeof(*out));
	snprintf(out->device, sizeof(out->device), "%s, CUDA device %d", cuda->device_name, cuda->device);
	snprintf(out->instruction_set, sizeof(out->instruction_set), "sm_90a");
	out->memory_bytes = cuda->arena_bytes;
	out->n_threads = 1;
}

/* ---- memory ---- */

static enum kv_status cuda_pool_check(
	struct kv_backend *base, const struct kv_pool_spec *spec, uint64_t *arena_bytes, struct kv_error *err)
{
	struct kvg_image *image = NULL;

	(void)base;
	const enum kv_status status = kvg_image_create(spec, false, &image, err);

	if (status != KV_OK)
		return status;
	*arena_bytes = kv_round_up_u64(image->arena_bytes, PAGE_BYTES);
	kvg_image_destroy(image);
	return KV_OK;
}

static enum kv_status out_of_memory(
	struct kv_error *err, const char *what, uint64_t wanted, cudaError_t error)
{
	size_t n_free = 0, n_total = 0;

	(void)cudaGetLastError();
	(void)cudaMemGetInfo(&n_free, &n_total);
	return kv_fail(err, KV_NO_MEMORY,
		"%s of %" PRIu64 " bytes wanted, %zu bytes of device memory are free: CUDA error %d, %s",
		what, wanted, n_free, (int)error, cudaGetErrorString(error));
}

static enum kv_status cuda_arena_create(struct kv_backend *base, uint64_t n_bytes, struct kv_error *err)
{
	struct cuda_backend *cuda = kvg_from_base(base);
	void *arena = NULL;

	KV_ASSERT(!cuda->arena);
	const cudaError_t error = cudaMalloc(&arena, n_bytes);

	if (error != cudaSuccess)
		return out_of_memory(err, "arena", n_bytes, error);
	cuda->arena = arena;
	cuda->arena_bytes = n_bytes;
	return KV_OK;
}

static void cuda_pool_destroy(struct kv_backend *base, struct kv_backend_pool *pool)
{
	(void)base;
	if (!pool)
		return;
	for (uint32_t g = 0; g < KV_GROUPS_MAX; g++)
		kv_free(pool->seen[g]);
	kvg_image_destroy(pool->image);
	kv_free(pool);
}

static enum kv_status fill_pool(
	struct cuda_backend *cuda, struct kv_backend_pool *pool, uint64_t arena_offset, struct kv_error *err)
{
	const struct kv_pool_spec *spec = pool->spec;
	uint64_t end = 0;
	const enum kv_status status = kvg_image_create(spec, true, &pool->image, err);

	if (status != KV_OK)
		return status;
	if (arena_offset % PAGE_BYTES != 0 || !kv_add_u64(arena_offset, pool->image->arena_bytes, &end) ||
		end > cuda->arena_bytes)
		return kv_fail(err, KV_NO_MEMORY,
			"pool %s: %" PRIu64 " bytes at %" PRIu64 " do not lie in the arena of %" PRIu64,
			spec->name, pool->image->arena_bytes, arena_offset, cuda->arena_bytes);
	for (uint32_t g = 0; g < spec->n_groups; g++) {
		const uint64_t n_slots = (uint64_t)spec->n_blocks[g] * spec->block_size;

		pool->seen[g] = kv_alloc(n_slots / 64 + 1, sizeof(uint64_t));
		if (!pool->seen[g])
			return kv_fail(err, KV_NO_MEMORY, "pool %s", spec->name);
	}
	kvg_image_place(pool->image, cuda->arena + arena_offset);
	/* Not the data path: the pool is complete when this returns. */
	cudaError_t error = cudaMemcpyAsync(cuda->arena + arena_offset + pool->image->tables_at,
		pool->image->tables_bytes_host, pool->image->tables_bytes, cudaMemcpyHostToDevice,
		cuda->compute_stream);

	if (error == cudaSuccess)
		error = cudaStreamSynchronize(cuda->compute_stream);
	return error == cudaSuccess ? KV_OK : fail(err, KV_DEVICE_LOST, "uploading a pool's tables", error);
}

static enum kv_status cuda_pool_create(struct kv_backend *base, const struct kv_pool_spec *spec,
	uint64_t arena_offset, struct kv_backend_pool **out, struct kv_error *err)
{
	struct kv_backend_pool *pool = kv_alloc(1, sizeof(*pool));

	if (!pool)
		return kv_fail(err, KV_NO_MEMORY, "pool %s", spec->name);
	pool->spec = pool->pages.spec = spec;
	const enum kv_status status = fill_pool(kvg_from_base(base), pool, arena_offset, err);

	if (status != KV_OK) {
		cuda_pool_destroy(base, pool);
		return status;
	}
	*out = pool;
	return KV_OK;
}

/* Pages of our own, registered: aligned as the interface says, and at the same address on the device. */
static void *cuda_host_alloc(struct kv_backend *base, uint64_t n_bytes)
{
	void *pages = kv_pages_alloc(n_bytes);

	(void)base;
	if (!pages)
		return NULL;
	if (cudaHostRegister(pages, n_bytes, cudaHostRegisterMapped | cudaHostRegisterPortable) !=
		cudaSuccess) {
		(void)cudaGetLastError();
		kv_pages_free(pages, n_bytes);
		return NULL;
	}
	return pages;
}

static void cuda_host_free(struct kv_backend *base, void *ptr, uint64_t n_bytes)
{
	(void)base;
	if (!ptr)
		return;
	if (cudaHostUnregister(ptr) != cudaSuccess)
		(void)cudaGetLastError();
	kv_pages_free(ptr, n_bytes);
}

/* ---- life ---- */

static void destroy_flight(struct cuda_backend *cuda, struct kvg_flight *flight)
{
	cuda_host_free(&cuda->base, flight->staging, KVG_STAGING_BYTES);
	(void)cudaFree(flight->staging_device);
	(void)cudaFree(flight->mirror_device);
	if (flight->copied)
		(void)cudaEventDestroy(flight->copied);
	if (flight->computed)
		(void)cudaEventDestroy(flight->computed);
}

static void cuda_destroy(struct kv_backend *base)
{
	if (!base)
		return;

	struct cuda_backend *cuda = kvg_from_base(base);

	if (cuda->compute_stream)
		(void)cudaStreamSynchronize(cuda->compute_stream);
	if (cuda->wake_stream)
		(void)cudaStreamSynchronize(cuda->wake_stream);
	kvg_jobs_stop(cuda);
	for (uint32_t i = 0; i < KVG_FLIGHTS_MAX; i++)
		destroy_flight(cuda, &cuda->flights[i]);
	if (cuda->compute_stream)
		(void)cudaStreamDestroy(cuda->compute_stream);
	if (cuda->copy_stream)
		(void)cudaStreamDestroy(cuda->copy_stream);
	if (cuda->wake_stream)
		(void)cudaStreamDestroy(cuda->wake_stream);
	cuda_host_free(base, cuda->reports, KVG_FLIGHTS_MAX * sizeof(*cuda->reports));
	(void)cudaFree(cuda->workspace);
	(void)cudaFree(cuda->arena);
	(void)cudaGetLastError();
	if (cuda->event_fd >= 0)
		close(cuda->event_fd);
	kv_free(cuda);
}

static const struct kv_backend_ops cuda_ops = {
	.name = "cuda",
	.info = cuda_info,
	.pool_check = cuda_pool_check,
	.arena_create = cuda_arena_create,
	.pool_create = cuda_pool_create,
	.pool_destroy = cuda_pool_destroy,
	.host_alloc = cuda_host_alloc,
	.host_free = cuda_host_free,
	.submit = cuda_submit,
	.reap = cuda_reap,
	.job_post = kvg_job_post,
	.job_reap = kvg_job_reap,
	.event_fd = cuda_event_fd,
	.will_sleep = cuda_will_sleep,
	.destroy = cuda_destroy,
};

static enum kv_status choose_device(struct cuda_backend *cuda, uint32_t device_idx, struct kv_error *err)
{
	struct cudaDeviceProp properties;
	int n_devices = 0; /* left as it is where there is no driver */
	cudaError_t error = cudaGetDeviceCount(&n_devices);

	if (error != cudaSuccess)
		return fail(err, KV_UNAVAILABLE, "no CUDA device", error);
	if (device_idx >= (uint32_t)n_devices)
		return kv_fail(err, KV_UNAVAILABLE, "no CUDA device %u: there are %d", device_idx, n_devices);
	cuda->device = (int)device_idx;
	error = cudaSetDevice(cuda->device);
	if (error == cudaSuccess)
		error = cudaGetDeviceProperties(&properties, cuda->device);
	if (error != cudaSuccess)
		return fail(err, KV_UNAVAILABLE, "CUDA device", error);
	snprintf(cuda->device_name, sizeof(cuda->device_name), "%.79s", properties.name);
	cuda->n_sms = (uint32_t)properties.multiProcessorCount;
	if (!properties.canUseHostPointerForRegisteredMem)
		return kv_fail(err, KV_UNAVAILABLE,
			"CUDA device %u: no access to host memory at its own address", device_idx);
	error = kvg_kernels_load();
	if (error != cudaSuccess)
		return fail(err, KV_UNAVAILABLE, cuda->device_name, error);
	return KV_OK;
}

static enum kv_status make_flight(struct cuda_backend *cuda, struct kvg_flight *flight, struct kv_error *err)
{
	cudaError_t error = cudaMalloc((void **)&flight->staging_device, KVG_STAGING_BYTES);

	flight->cuda = cuda;
	if (error == cudaSuccess)
		error = cudaMalloc((void **)&flight->mirror_device, KVG_MIRROR_BYTES);
	if (error != cudaSuccess)
		return out_of_memory(err, "batch memory", KVG_STAGING_BYTES + KVG_MIRROR_BYTES, error);
	flight->staging = cuda_host_alloc(&cuda->base, KVG_STAGING_BYTES);
	if (!flight->staging)
		return kv_fail(err, KV_NO_MEMORY, "pinned memory of %u bytes", KVG_STAGING_BYTES);
	error = cudaEventCreateWithFlags(&flight->copied, cudaEventDisableTiming);
	if (error == cudaSuccess)
		error = cudaEventCreateWithFlags(&flight->computed, cudaEventDisableTiming);
	return error == cudaSuccess ? KV_OK : fail(err, KV_UNAVAILABLE, "CUDA event", error);
}

static enum kv_status fill(struct cuda_backend *cuda, uint32_t device_idx, struct kv_error *err)
{
	enum kv_status status = choose_device(cuda, device_idx, err);

	if (status != KV_OK)
		return status;
	cudaError_t error = cudaStreamCreateWithFlags(&cuda->copy_stream, cudaStreamNonBlocking);

	if (error == cudaSuccess)
		error = cudaStreamCreateWithFlags(&cuda->compute_stream, cudaStreamNonBlocking);
	if (error == cudaSuccess)
		error = cudaStreamCreateWithFlags(&cuda->wake_stream, cudaStreamNonBlocking);
	if (error != cudaSuccess)
		return fail(err, KV_UNAVAILABLE, "CUDA stream", error);
	error = cudaMalloc((void **)&cuda->workspace, KVG_WORKSPACE_BYTES);
	if (error != cudaSuccess)
		return out_of_memory(err, "workspace", KVG_WORKSPACE_BYTES, error);
	cuda->reports = cuda_host_alloc(&cuda->base, KVG_FLIGHTS_MAX * sizeof(*cuda->reports));
	if (!cuda->reports)
		return kv_fail(err, KV_NO_MEMORY, "pinned memory for reports");
	memset(cuda->reports, 0, KVG_FLIGHTS_MAX * sizeof(*cuda->reports));
	for (uint32_t i = 0; i < KVG_FLIGHTS_MAX; i++) {
		cuda->flights[i].report = &cuda->reports[i];
		status = make_flight(cuda, &cuda->flights[i], err);
		if (status != KV_OK)
			return status;
	}
	cuda->event_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	if (cuda->event_fd < 0)
		return kv_fail(err, KV_UNAVAILABLE, "CUDA backend: no eventfd");
	return kvg_jobs_start(cuda, err);
}

enum kv_status kvg_backend_cuda_create(uint32_t device_idx, struct kv_backend **out, struct kv_error *err)
{
	struct cuda_backend *cuda = kv_alloc(1, sizeof(*cuda));

	if (!cuda)
		return kv_fail(err, KV_NO_MEMORY, "CUDA backend");
	cuda->base.ops = &cuda_ops;
	cuda->event_fd = -1;
	const enum kv_status status = fill(cuda, device_idx, err);

	if (status != KV_OK) {
		cuda_destroy(&cuda->base);
		return status;
	}
	*out = &cuda->base;
	return KV_OK;
}

void kvg_backend_cuda_memory(struct kv_backend *backend, uint64_t *free_bytes, uint64_t *total_bytes)
{
	size_t n_free = 0, n_total = 0;

	KV_ASSERT(backend->ops == &cuda_ops);
	if (cudaMemGetInfo(&n_free, &n_total) != cudaSuccess)
		(void)cudaGetLastError();
	*free_bytes = n_free;
	*total_bytes = n_total;
}
