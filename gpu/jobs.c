/*
 * Jobs on a thread of their own, in order. The same thread watches the device while batches are in flight:
 * after an error in a kernel the driver calls no callback any more, so somebody has to ask.
 */
#include <errno.h>
#include <signal.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "core/checked.h"
#include "gpu/backend_internal.h"

#define WATCH_NS    50000000L /* how long a lost device may go unnoticed */
#define STACK_BYTES (512u * 1024)

struct cuda_backend *kvg_from_base(struct kv_backend *base)
{
	return kv_container_of(base, struct cuda_backend, base);
}

void kvg_signal(struct cuda_backend *cuda)
{
	const uint64_t one = 1;

	/* Fails only when the counter is full, and then the descriptor is readable anyway. */
	(void)!write(cuda->event_fd, &one, sizeof(one));
}

static void lock(struct cuda_backend *cuda)
{
	KV_ASSERT(pthread_mutex_lock(&cuda->mutex) == 0);
}

static void unlock(struct cuda_backend *cuda)
{
	KV_ASSERT(pthread_mutex_unlock(&cuda->mutex) == 0);
}

static void look_at_device(struct cuda_backend *cuda)
{
	const cudaError_t error = cudaStreamQuery(cuda->compute_stream);

	if (error == cudaSuccess || error == cudaErrorNotReady)
		return;
	(void)cudaGetLastError();
	if (!atomic_exchange(&cuda->is_lost, true))
		kvg_signal(cuda);
}

static void run_job(struct cuda_backend *cuda)
{
	struct kv_job *job = cuda->jobs_waiting;

	cuda->jobs_waiting = job->next;
	if (!cuda->jobs_waiting)
		cuda->jobs_waiting_end = &cuda->jobs_waiting;
	cuda->n_jobs_waiting--;
	unlock(cuda);
	job->run(job);
	lock(cuda);
	job->next = NULL;
	*cuda->jobs_finished_end = job;
	cuda->jobs_finished_end = &job->next;
	kvg_signal(cuda);
}

/* A batch that is submitted while the watch ends is seen here, or sees that nobody watches. */
static void end_watch(struct cuda_backend *cuda)
{
	atomic_store(&cuda->is_watching, false);
	if (atomic_load(&cuda->n_flights) > 0)
		atomic_store(&cuda->is_watching, true);
}

static void wait_for_work(struct cuda_backend *cuda)
{
	struct timespec until;

	if (!atomic_load(&cuda->is_watching)) {
		KV_ASSERT(pthread_cond_wait(&cuda->work, &cuda->mutex) == 0);
		return;
	}
	clock_gettime(CLOCK_MONOTONIC, &until);
	until.tv_nsec += WATCH_NS;
	if (until.tv_nsec >= 1000000000L) {
		until.tv_nsec -= 1000000000L;
		until.tv_sec++;
	}
	if (pthread_cond_timedwait(&cuda->work, &cuda->mutex, &until) != ETIMEDOUT)
		return;
	if (atomic_load(&cuda->n_flights) == 0) {
		end_watch(cuda);
		return;
	}
	unlock(cuda);
	look_at_device(cuda);
	lock(cuda);
}

static void *thread_main(void *arg)
{
	struct cuda_backend *cuda = arg;

	(void)cudaSetDevice(cuda->device);
	lock(cuda);
	for (;;) {
		if (cuda->jobs_waiting)
			run_job(cuda);
		else if (cuda->is_ending)
			break;
		else
			wait_for_work(cuda);
	}
	unlock(cuda);
	return NULL;
}

static bool init_lock(struct cuda_backend *cuda)
{
	pthread_condattr_t attributes;

	if (pthread_condattr_init(&attributes) != 0)
		return false;
	const bool is_ok = pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC) == 0 &&
		pthread_cond_init(&cuda->work, &attributes) == 0;

	pthread_condattr_destroy(&attributes);
	if (!is_ok)
		return false;
	if (pthread_mutex_init(&cuda->mutex, NULL) != 0) {
		pthread_cond_destroy(&cuda->work);
		return false;
	}
	cuda->has_lock = true;
	return true;
}

enum kv_status kvg_jobs_start(struct cuda_backend *cuda, struct kv_error *err)
{
	pthread_attr_t attributes;
	sigset_t all, before;

	cuda->jobs_waiting_end = &cuda->jobs_waiting;
	cuda->jobs_finished_end = &cuda->jobs_finished;
	if (!init_lock(cuda) || pthread_attr_init(&attributes) != 0)
		return kv_fail(err, KV_UNAVAILABLE, "CUDA backend: no lock");
	/* Signals are the loop thread's. */
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	pthread_attr_setstacksize(&attributes, STACK_BYTES);
	const int error = pthread_create(&cuda->thread, &attributes, thread_main, cuda);

	pthread_sigmask(SIG_SETMASK, &before, NULL);
	pthread_attr_destroy(&attributes);
	if (error != 0)
		return kv_fail(err, KV_UNAVAILABLE, "CUDA backend: no thread: %s", strerror(error));
	cuda->has_thread = true;
	return KV_OK;
}

void kvg_jobs_stop(struct cuda_backend *cuda)
{
	if (!cuda->has_lock)
		return;
	lock(cuda);
	cuda->is_ending = true;
	pthread_cond_signal(&cuda->work);
	unlock(cuda);
	if (cuda->has_thread)
		pthread_join(cuda->thread, NULL);
	pthread_mutex_destroy(&cuda->mutex);
	pthread_cond_destroy(&cuda->work);
}

void kvg_jobs_watch(struct cuda_backend *cuda)
{
	if (atomic_load(&cuda->is_watching))
		return; /* no call into the kernel for every batch */
	lock(cuda);
	atomic_store(&cuda->is_watching, true);
	pthread_cond_signal(&cuda->work);
	unlock(cuda);
}

bool kvg_job_post(struct kv_backend *base, struct kv_job *job)
{
	struct cuda_backend *cuda = kvg_from_base(base);

	lock(cuda);
	const bool has_room = cuda->n_jobs_waiting < KVG_JOBS_MAX;

	if (has_room) {
		job->next = NULL;
		*cuda->jobs_waiting_end = job;
		cuda->jobs_waiting_end = &job->next;
		cuda->n_jobs_waiting++;
		pthread_cond_signal(&cuda->work);
	}
	unlock(cuda);
	return has_room;
}

struct kv_job *kvg_job_reap(struct kv_backend *base)
{
	struct cuda_backend *cuda = kvg_from_base(base);

	lock(cuda);
	struct kv_job *job = cuda->jobs_finished;

	if (job) {
		cuda->jobs_finished = job->next;
		if (!cuda->jobs_finished)
			cuda->jobs_finished_end = &cuda->jobs_finished;
		job->next = NULL;
	}
	unlock(cuda);
	return job;
}
