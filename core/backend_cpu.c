/*
 * The interface of the CPU backend, its memory and its threads. Jobs have a thread of their own: a long one
 * must not delay batches.
 *
 * One mutex guards everything but the tasks themselves. The eventfd is written when a batch or a job is
 * finished.
 */
#include "core/backend_cpu.h"

#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "core/backend_cpu_internal.h"
#include "core/memory.h"
#include "core/row_kernels.h"
#include "core/system_memory.h"

#define PAGE_BYTES  4096u
#define JOBS_MAX    16u
#define STACK_BYTES (512u * 1024) /* the deepest call needs about 8 KiB; work memory is not on the stack */
/*
 * About 55 us at 64 channels. Handing a batch to a worker and back took 17 us more than running it in
 * submit() on two cores that were awake (APPEND_DECODE of 64 tokens: 44 us instead of 27), and a batch of
 * 7700 rows still took 1.6 times as long. But while the caller computes, it answers nobody.
 */
#define ROWS_INLINE 4096u

#if defined(__x86_64__)
#define ARCHITECTURE "x86-64"
#elif defined(__aarch64__)
#define ARCHITECTURE "aarch64"
#else
#define ARCHITECTURE "generic"
#endif

static struct kv_cpu_backend *from_base(struct kv_backend *backend)
{
	return kv_container_of(backend, struct kv_cpu_backend, base);
}

/* ---- the interface ---- */

/* So little that a worker would take longer to wake up than to do it, and nothing before it in the queue. */
static bool is_tiny(const struct kv_cpu_backend *cpu, const struct kv_batch *batch)
{
	uint64_t n_rows = 0;

	if (cpu->n_threads == 0)
		return true;
	if (cpu->active || cpu->waiting.first)
		return false;
	for (int phase = 0; phase < KV_PHASES; phase++)
		n_rows += kv_cpu_work_of(batch, (enum kv_batch_phase)phase);
	return n_rows <= cpu->inline_rows_max;
}

static enum kv_status cpu_submit(struct kv_backend *base, struct kv_batch *batch, struct kv_error *err)
{
	struct kv_cpu_backend *cpu = from_base(base);

	(void)err;
	kv_cpu_lock(cpu);
	const bool is_inline = is_tiny(cpu, batch);

	kv_batch_push(&cpu->waiting, batch);
	if (is_inline) {
		cpu->is_inline = true; /* workers keep out, so this thread ends what it begins */
		while (kv_cpu_has_task(cpu))
			kv_cpu_run_chunk(cpu, cpu->inline_scratch);
		cpu->is_inline = false;
	} else {
		pthread_cond_signal(&cpu->work);
	}
	kv_cpu_unlock(cpu);
	return KV_OK;
}

static struct kv_batch *cpu_reap(struct kv_backend *base)
{
	struct kv_cpu_backend *cpu = from_base(base);

	kv_cpu_lock(cpu);

	struct kv_batch *batch = kv_batch_pop(&cpu->finished);

	kv_cpu_unlock(cpu);
	return batch;
}

static bool cpu_job_post(struct kv_backend *base, struct kv_job *job)
{
	struct kv_cpu_backend *cpu = from_base(base);

	if (cpu->n_threads == 0) {
		job->run(job);
		kv_job_push(&cpu->jobs_finished, job);
		kv_cpu_signal(cpu);
		return true;
	}
	kv_cpu_lock(cpu);

	const bool has_room = cpu->n_jobs_waiting < JOBS_MAX;

	if (has_room) {
		cpu->n_jobs_waiting++;
		kv_job_push(&cpu->jobs_waiting, job);
		pthread_cond_signal(&cpu->job_work);
	}
	kv_cpu_unlock(cpu);
	return has_room;
}

static struct kv_job *cpu_job_reap(struct kv_backend *base)
{
	struct kv_cpu_backend *cpu = from_base(base);

	kv_cpu_lock(cpu);

	struct kv_job *job = kv_job_pop(&cpu->jobs_finished);

	kv_cpu_unlock(cpu);
	return job;
}

static int cpu_event_fd(struct kv_backend *base)
{
	return from_base(base)->event_fd;
}

static void cpu_info(struct kv_backend *base, struct kv_backend_info *out)
{
	const struct kv_cpu_backend *cpu = from_base(base);

	memset(out, 0, sizeof(*out));
	snprintf(out->device, sizeof(out->device), "CPU (%s), %u thread%s", cpu->kernels ? "fast" : "scalar",
		cpu->n_threads, cpu->n_threads == 1 ? "" : "s");
	snprintf(out->instruction_set, sizeof(out->instruction_set), "%s %s", ARCHITECTURE,
		cpu->kernels ? cpu->kernels->name : kv_row_kernels()->name);
	out->memory_bytes = cpu->arena_bytes;
	out->n_threads = cpu->n_threads;
}

/* Every format that a spec can name has a codec, and the codec is all that this backend needs. */
static enum kv_status cpu_pool_check(
	struct kv_backend *base, const struct kv_pool_spec *spec, uint64_t *arena_bytes, struct kv_error *err)
{
	uint64_t n_bytes = 0;

	(void)base;
	if (!kv_batch_pages_bytes(spec, &n_bytes) || n_bytes > UINT64_MAX - PAGE_BYTES)
		return kv_fail(
			err, KV_UNSUPPORTED, "pool %s: its pages have more than 2^64 bytes", spec->name);
	*arena_bytes = kv_round_up_u64(n_bytes, PAGE_BYTES);
	return KV_OK;
}

static enum kv_status cpu_arena_create(struct kv_backend *base, uint64_t n_bytes, struct kv_error *err)
{
	struct kv_cpu_backend *cpu = from_base(base);
	uint64_t available = 0;

	KV_ASSERT(!cpu->arena);
	/* The system would promise more than it has and kill the process when pages are touched. */
	if (kv_system_memory_available(&available) && n_bytes > available)
		return kv_fail(err, KV_NO_MEMORY,
			"arena of %" PRIu64 " bytes wanted, %" PRIu64 " bytes of memory are free", n_bytes,
			available);
	/* Kernels may read, not use, what lies behind the last row. */
	cpu->arena = kv_pages_alloc(n_bytes + KV_FAST_SLACK_BYTES);
	if (!cpu->arena)
		return kv_fail(err, KV_NO_MEMORY,
			"arena of %" PRIu64 " bytes wanted, %" PRIu64
			" bytes of memory are free, the system refused: %s",
			n_bytes, available, strerror(errno));
	/* Decodes walk through all of it: with small pages a third of their time goes into finding pages. */
	kv_pages_prefer_large(cpu->arena, n_bytes);
	cpu->arena_bytes = n_bytes;
	return KV_OK;
}

static void cpu_pool_destroy(struct kv_backend *base, struct kv_backend_pool *pool)
{
	(void)base;
	if (!pool)
		return;
	kv_fast_pool_destroy(pool->fast);
	kv_batch_pages_finish(&pool->pages);
	kv_free(pool);
}

static enum kv_status cpu_pool_create(struct kv_backend *base, const struct kv_pool_spec *spec,
	uint64_t arena_offset, struct kv_backend_pool **out, struct kv_error *err)
{
	struct kv_cpu_backend *cpu = from_base(base);
	uint64_t n_bytes = 0, end = 0;
	enum kv_status status = cpu_pool_check(base, spec, &n_bytes, err);

	if (status != KV_OK)
		return status;
	if (arena_offset % PAGE_BYTES != 0 || !kv_add_u64(arena_offset, n_bytes, &end) ||
		end > cpu->arena_bytes)
		return kv_fail(err, KV_NO_MEMORY,
			"pool %s: %" PRIu64 " bytes at %" PRIu64 " do not lie in the arena of %" PRIu64,
			spec->name, n_bytes, arena_offset, cpu->arena_bytes);

	struct kv_backend_pool *pool = kv_alloc(1, sizeof(*pool));

	if (!pool)
		return kv_fail(err, KV_NO_MEMORY, "pool %s", spec->name);
	status = kv_batch_pages_init(&pool->pages, spec, cpu->arena + arena_offset, err);
	if (status == KV_OK && cpu->kernels)
		status = kv_fast_pool_create(&pool->pages, cpu->kernels, &pool->fast, err);
	if (status != KV_OK) {
		cpu_pool_destroy(base, pool);
		return status;
	}
	*out = pool;
	return KV_OK;
}

static void *cpu_host_alloc(struct kv_backend *base, uint64_t n_bytes)
{
	(void)base;
	return kv_pages_alloc(n_bytes);
}

static void cpu_host_free(struct kv_backend *base, void *ptr, uint64_t n_bytes)
{
	(void)base;
	kv_pages_free(ptr, n_bytes);
}

/* ---- life ---- */

static void end_threads(struct kv_cpu_backend *cpu)
{
	kv_cpu_lock(cpu);
	cpu->is_ending = true;
	pthread_cond_broadcast(&cpu->work);
	pthread_cond_broadcast(&cpu->job_work);
	kv_cpu_unlock(cpu);
	for (uint32_t i = 0; cpu->workers && i < cpu->n_threads; i++) {
		if (cpu->workers[i].is_started)
			pthread_join(cpu->workers[i].thread, NULL);
	}
	if (cpu->job_worker.is_started)
		pthread_join(cpu->job_worker.thread, NULL);
	pthread_mutex_destroy(&cpu->mutex);
	pthread_cond_destroy(&cpu->work);
	pthread_cond_destroy(&cpu->job_work);
}

static void cpu_destroy(struct kv_backend *base)
{
	if (!base)
		return;

	struct kv_cpu_backend *cpu = from_base(base);

	if (cpu->has_lock)
		end_threads(cpu);
	for (uint32_t i = 0; cpu->workers && i < cpu->n_threads; i++)
		kv_free(cpu->workers[i].scratch);
	kv_free(cpu->inline_scratch);
	kv_free(cpu->workers);
	if (cpu->arena)
		kv_pages_free(cpu->arena, cpu->arena_bytes + KV_FAST_SLACK_BYTES);
	if (cpu->event_fd >= 0)
		close(cpu->event_fd);
	kv_free(cpu);
}

static const struct kv_backend_ops cpu_ops = {
	.name = "cpu",
	.info = cpu_info,
	.pool_check = cpu_pool_check,
	.arena_create = cpu_arena_create,
	.pool_create = cpu_pool_create,
	.pool_destroy = cpu_pool_destroy,
	.host_alloc = cpu_host_alloc,
	.host_free = cpu_host_free,
	.submit = cpu_submit,
	.reap = cpu_reap,
	.job_post = cpu_job_post,
	.job_reap = cpu_job_reap,
	.event_fd = cpu_event_fd,
	.destroy = cpu_destroy,
};

static enum kv_status start_thread(
	struct kv_cpu_worker *worker, void *(*thread_main)(void *), const char *name, struct kv_error *err)
{
	pthread_attr_t attr;
	sigset_t all, before;
	int rc = pthread_attr_init(&attr);

	if (rc != 0)
		return kv_fail(err, KV_UNAVAILABLE, "thread attributes: %s", strerror(rc));
	(void)pthread_attr_setstacksize(&attr, STACK_BYTES);
	/* Signals belong to the thread that made the backend. */
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	rc = pthread_create(&worker->thread, &attr, thread_main, worker);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	pthread_attr_destroy(&attr);
	if (rc != 0)
		return kv_fail(err, KV_UNAVAILABLE, "thread %s: %s", name, strerror(rc));
	worker->is_started = true;
	(void)pthread_setname_np(worker->thread, name);
	return KV_OK;
}

static enum kv_status make_workers(struct kv_cpu_backend *cpu, struct kv_error *err)
{
	const uint32_t n_workers = cpu->n_threads;
	char name[32];

	cpu->inline_scratch = kv_alloc(1, sizeof(*cpu->inline_scratch));
	cpu->workers = kv_alloc(n_workers, sizeof(*cpu->workers));
	if (!cpu->workers || !cpu->inline_scratch)
		return kv_fail(err, KV_NO_MEMORY, "%u workers", n_workers);
	for (uint32_t i = 0; i < n_workers; i++) {
		cpu->workers[i].backend = cpu;
		cpu->workers[i].scratch = kv_alloc(1, sizeof(*cpu->workers[i].scratch));
		if (!cpu->workers[i].scratch)
			return kv_fail(err, KV_NO_MEMORY, "work memory of %u workers", n_workers);
	}
	for (uint32_t i = 0; i < cpu->n_threads; i++) {
		snprintf(name, sizeof(name), "tqkv-cpu-%u", i);

		const enum kv_status status = start_thread(&cpu->workers[i], kv_cpu_worker_main, name, err);

		if (status != KV_OK)
			return status;
	}
	cpu->job_worker.backend = cpu;
	return cpu->n_threads > 0 ? start_thread(&cpu->job_worker, kv_cpu_job_main, "tqkv-cpu-job", err)
				  : KV_OK;
}

enum kv_status kv_backend_cpu_create_with(uint32_t n_threads, const struct kv_fast_kernels *kernels,
	struct kv_backend **out, struct kv_error *err)
{
	if (n_threads > KV_BACKEND_CPU_THREADS_MAX)
		return kv_fail(
			err, KV_BAD_ARG, "%u threads, at most %u", n_threads, KV_BACKEND_CPU_THREADS_MAX);

	struct kv_cpu_backend *cpu = kv_alloc(1, sizeof(*cpu));

	if (!cpu)
		return kv_fail(err, KV_NO_MEMORY, "CPU backend");
	cpu->base.ops = &cpu_ops;
	cpu->n_threads = n_threads;
	cpu->kernels = kernels;
	cpu->inline_rows_max = ROWS_INLINE;
	cpu->event_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);

	enum kv_status status = KV_OK;

	if (cpu->event_fd < 0)
		status = kv_fail(err, KV_UNAVAILABLE, "eventfd: %s", strerror(errno));
	if (status == KV_OK) {
		/* With default attributes these cannot fail on Linux. */
		KV_ASSERT(pthread_mutex_init(&cpu->mutex, NULL) == 0);
		KV_ASSERT(pthread_cond_init(&cpu->work, NULL) == 0);
		KV_ASSERT(pthread_cond_init(&cpu->job_work, NULL) == 0);
		cpu->has_lock = true;
		status = make_workers(cpu, err);
	}
	if (status != KV_OK) {
		cpu_destroy(&cpu->base);
		return status;
	}
	*out = &cpu->base;
	return KV_OK;
}

void kv_backend_cpu_set_inline_rows(struct kv_backend *backend, uint64_t n_rows)
{
	from_base(backend)->inline_rows_max = n_rows;
}
