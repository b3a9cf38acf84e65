/*
 * The CPU backend from inside: core/backend_cpu.c has the interface and its life, core/backend_cpu_run.c runs
 * batches on the workers. Nobody else includes it.
 */
#ifndef CORE_BACKEND_CPU_INTERNAL_H
#define CORE_BACKEND_CPU_INTERNAL_H

#include <pthread.h>

#include "core/backend_cpu.h"
#include "core/batch_queue.h"
#include "core/batch_run.h"
#include "core/checked.h"
#include "core/fast_decode.h"

struct kv_backend_pool {
	struct kv_batch_pages pages;
	struct kv_fast_pool *fast; /* NULL: all decodes are scalar */
};

struct kv_cpu_scratch {
	struct kv_batch_scratch batch;
	struct kv_fast_scratch fast;
};

/* What of a batch is being run: a phase, of fast decodes one step of a wave. */
struct kv_cpu_step {
	int phase; /* enum kv_batch_phase; -1 in front of the first */
	enum kv_fast_step fast;
};

struct kv_cpu_worker {
	struct kv_cpu_backend *backend;
	pthread_t thread;
	bool is_started;
	struct kv_cpu_scratch *scratch;
};

struct kv_cpu_backend {
	struct kv_backend base;
	uint32_t n_threads;
	const struct kv_fast_kernels *kernels; /* NULL: scalar */
	struct kv_cpu_worker *workers;         /* [n_threads] */
	struct kv_cpu_worker job_worker;
	int event_fd;
	uint8_t *arena;
	uint64_t arena_bytes;
	bool has_lock;
	pthread_mutex_t mutex; /* guards all below */
	pthread_cond_t work, job_work;
	bool is_ending;
	struct kv_batch_queue waiting, finished;
	struct kv_job_queue jobs_waiting, jobs_finished;
	uint32_t n_jobs_waiting;
	uint32_t n_idle; /* workers that sleep */
	/* The batch that is being run, NULL if none. */
	struct kv_batch *active;
	uint64_t active_start_ns;
	struct kv_cpu_step step;
	uint64_t n_tasks, next_task, chunk; /* of the step */
	uint32_t n_running;                 /* workers inside a chunk */
	bool is_inline;                     /* the active batch runs inside submit() */
	uint64_t inline_rows_max;           /* set before the first submit() */
	struct kv_cpu_scratch *inline_scratch;
};

static inline void kv_cpu_lock(struct kv_cpu_backend *cpu)
{
	KV_ASSERT(pthread_mutex_lock(&cpu->mutex) == 0);
}

static inline void kv_cpu_unlock(struct kv_cpu_backend *cpu)
{
	KV_ASSERT(pthread_mutex_unlock(&cpu->mutex) == 0);
}

/* Makes the descriptor readable. */
void kv_cpu_signal(struct kv_cpu_backend *cpu);

/* Work of one phase in rows of the scalar backend. */
uint64_t kv_cpu_work_of(const struct kv_batch *batch, enum kv_batch_phase phase);
/* With the lock held: true when there is something for a worker to take from the active batch. */
bool kv_cpu_has_task(struct kv_cpu_backend *cpu);
/*
 * With the lock held, after kv_cpu_has_task(): takes a chunk, runs it without the kv_cpu_lock, and moves the
 * batch on if it was the last of its step.
 */
void kv_cpu_run_chunk(struct kv_cpu_backend *cpu, struct kv_cpu_scratch *scratch);

/* Threads; `arg` is a struct kv_cpu_worker. */
void *kv_cpu_worker_main(void *arg);
void *kv_cpu_job_main(void *arg);

#endif
