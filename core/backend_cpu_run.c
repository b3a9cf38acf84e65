/*
 * Batches wait in a queue and are run one at a time, in order; the workers share the tasks of the current
 * step. Whoever finishes the last task of a step opens the next one, so there is no coordinating thread and
 * no barrier to sleep at.
 */
#include <unistd.h>

#include "core/backend_cpu_internal.h"
#include "core/clock.h"

/* Of kv_batch_n_rows(): about 110 us of work at 64 channels. Waking a thread costs 10 to 50 us. */
#define ROWS_PER_HELPER 8192u
#define CHUNKS_EACH     4u   /* pieces of a phase per worker: few locks, and still even when tasks differ */
#define CHUNK_MAX       256u /* tasks; how long the others may have to wait for the last chunk */
/* A fast row costs about a quarter of a scalar one. */
#define FAST_SPEED 4u

void kv_cpu_signal(struct kv_cpu_backend *cpu)
{
	const uint64_t one = 1;

	/* Fails only when the counter is full, and then the descriptor is readable anyway. */
	(void)!write(cpu->event_fd, &one, sizeof(one));
}

/* ---- all with the lock held ---- */

/* Work in rows of the scalar backend. */
uint64_t kv_cpu_work_of(const struct kv_batch *batch, enum kv_batch_phase phase)
{
	const uint64_t n_rows = kv_batch_n_rows(&batch->pool->pages, batch, phase);

	return phase == KV_PHASE_DECODES && batch->pool->fast ? n_rows / FAST_SPEED : n_rows;
}

static bool is_fast(const struct kv_cpu_backend *cpu)
{
	return cpu->step.phase == KV_PHASE_DECODES && cpu->active->pool->fast;
}

/* One helper per so much work, none for less: see ROWS_PER_HELPER. This worker takes part itself. */
static void wake_helpers(struct kv_cpu_backend *cpu)
{
	const uint64_t n_chunks = (cpu->n_tasks + cpu->chunk - 1) / cpu->chunk;
	uint64_t n_helpers =
		kv_cpu_work_of(cpu->active, (enum kv_batch_phase)cpu->step.phase) / ROWS_PER_HELPER;

	if (cpu->is_inline)
		return;
	if (n_helpers > n_chunks - 1)
		n_helpers = n_chunks - 1;
	if (n_helpers > cpu->n_idle)
		n_helpers = cpu->n_idle;
	for (uint64_t i = 0; i < n_helpers; i++)
		pthread_cond_signal(&cpu->work);
}

/* To the next step, whether it has tasks or not; false behind the last one. */
static bool move_on(struct kv_cpu_backend *cpu)
{
	struct kv_fast_pool *fast = cpu->active->pool->fast;

	if (is_fast(cpu)) {
		if (cpu->step.fast + 1 < KV_FAST_STEPS) {
			cpu->step.fast++;
			return true;
		}
		cpu->step.fast = KV_FAST_PREPARE;
		if (kv_fast_next_wave(fast, cpu->active))
			return true;
	}
	cpu->step.phase++;
	cpu->step.fast = KV_FAST_PREPARE;
	if (is_fast(cpu)) {
		kv_fast_begin(fast);
		if (!kv_fast_next_wave(fast, cpu->active))
			cpu->step.phase++;
	}
	return cpu->step.phase < KV_PHASES;
}

static uint32_t n_workers_of(const struct kv_cpu_backend *cpu)
{
	return cpu->n_threads > 0 ? cpu->n_threads : 1;
}

/* A chunk, and fewer near the end of a step: the others wait for the last one that somebody takes. */
static uint64_t n_to_take(const struct kv_cpu_backend *cpu)
{
	const uint64_t n_left = cpu->n_tasks - cpu->next_task;
	const uint64_t share = (n_left + n_workers_of(cpu) - 1) / n_workers_of(cpu);

	return share < cpu->chunk ? share : cpu->chunk;
}

/* Opens steps until one has tasks; false when the batch is through. */
static bool open_step(struct kv_cpu_backend *cpu)
{
	const uint32_t n_workers = n_workers_of(cpu);

	while (move_on(cpu)) {
		cpu->next_task = 0;
		if (is_fast(cpu)) {
			cpu->n_tasks = kv_fast_n_tasks(
				cpu->active->pool->fast, cpu->step.fast, n_workers, &cpu->chunk);
		} else {
			cpu->n_tasks = kv_batch_n_tasks(
				&cpu->active->pool->pages, cpu->active, (enum kv_batch_phase)cpu->step.phase);
			cpu->chunk = cpu->n_tasks / ((uint64_t)n_workers * CHUNKS_EACH);
			if (cpu->chunk > CHUNK_MAX)
				cpu->chunk = CHUNK_MAX;
			if (cpu->chunk == 0)
				cpu->chunk = 1;
		}
		if (cpu->n_tasks == 0)
			continue;
		wake_helpers(cpu);
		return true;
	}
	return false;
}

static void finish_batch(struct kv_cpu_backend *cpu)
{
	struct kv_batch *batch = cpu->active;

	kv_batch_end(&batch->pool->pages, batch);
	batch->status = KV_OK;
	batch->copy_in_us = batch->copy_out_us = 0; /* everything lies where it is used */
	batch->kernel_us =
		(uint32_t)((kv_clock_now_ns(kv_clock_system()) - cpu->active_start_ns) / KV_NS_PER_US);
	cpu->active = NULL;
	kv_batch_push(&cpu->finished, batch);
	if (!cpu->is_inline)
		kv_cpu_signal(cpu);
}

/* True when there is something for a worker to take from the active batch. */
bool kv_cpu_has_task(struct kv_cpu_backend *cpu)
{
	while (!cpu->active) {
		cpu->active = kv_batch_pop(&cpu->waiting);
		if (!cpu->active)
			return false;
		cpu->active_start_ns = kv_clock_now_ns(kv_clock_system());
		cpu->step = (struct kv_cpu_step){ .phase = -1 };
		if (!open_step(cpu))
			finish_batch(cpu);
	}
	return cpu->next_task < cpu->n_tasks;
}

static struct kv_finding run_task(struct kv_batch *batch, const struct kv_cpu_step *step, bool is_fast_step,
	uint64_t task_idx, struct kv_cpu_scratch *scratch)
{
	return is_fast_step ? kv_fast_run_task(batch->pool->fast, batch, step->fast, task_idx, &scratch->fast,
				      &scratch->batch)
			    : kv_batch_run_task(&batch->pool->pages, batch, (enum kv_batch_phase)step->phase,
				      task_idx, &scratch->batch);
}

/* Takes a chunk, runs it without the kv_cpu_lock, and moves the batch on if it was the last of its step. */
void kv_cpu_run_chunk(struct kv_cpu_backend *cpu, struct kv_cpu_scratch *scratch)
{
	struct kv_batch *batch = cpu->active;
	const struct kv_cpu_step step = cpu->step;
	const bool is_fast_step = is_fast(cpu);
	const uint64_t first = cpu->next_task;
	const uint64_t end = first + n_to_take(cpu);

	cpu->next_task = end;
	cpu->n_running++;
	kv_cpu_unlock(cpu);
	for (uint64_t i = first; i < end; i++) {
		const struct kv_finding finding = run_task(batch, &step, is_fast_step, i, scratch);

		if (finding.result.status == KV_OK)
			continue;
		kv_cpu_lock(cpu);
		kv_batch_merge(batch, &finding);
		kv_cpu_unlock(cpu);
	}
	kv_cpu_lock(cpu);
	cpu->n_running--;
	if (cpu->next_task == cpu->n_tasks && cpu->n_running == 0 && !open_step(cpu))
		finish_batch(cpu);
}

void *kv_cpu_worker_main(void *arg)
{
	struct kv_cpu_worker *worker = arg;
	struct kv_cpu_backend *cpu = worker->backend;

	kv_cpu_lock(cpu);
	for (;;) {
		if (!cpu->is_inline && kv_cpu_has_task(cpu)) {
			kv_cpu_run_chunk(cpu, worker->scratch);
			continue;
		}
		/* What is in flight is finished first; a batch that others still run needs no help. */
		if (cpu->is_ending && !cpu->waiting.first)
			break;
		cpu->n_idle++;
		KV_ASSERT(pthread_cond_wait(&cpu->work, &cpu->mutex) == 0);
		cpu->n_idle--;
	}
	kv_cpu_unlock(cpu);
	return NULL;
}

void *kv_cpu_job_main(void *arg)
{
	struct kv_cpu_worker *worker = arg;
	struct kv_cpu_backend *cpu = worker->backend;

	kv_cpu_lock(cpu);
	for (;;) {
		struct kv_job *job = kv_job_pop(&cpu->jobs_waiting);

		if (job) {
			cpu->n_jobs_waiting--;
			kv_cpu_unlock(cpu);
			job->run(job);
			kv_cpu_lock(cpu);
			kv_job_push(&cpu->jobs_finished, job);
			kv_cpu_signal(cpu);
			continue;
		}
		if (cpu->is_ending)
			break;
		KV_ASSERT(pthread_cond_wait(&cpu->job_work, &cpu->mutex) == 0);
	}
	kv_cpu_unlock(cpu);
	return NULL;
}
