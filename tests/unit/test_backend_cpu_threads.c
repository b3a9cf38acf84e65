/*
 * The CPU backend as a machine: order, threads, memory, jobs, failures. Loop index: number of worker threads.
 */
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

#include "core/memory.h"
#include "core/system_memory.h"
#include "tests/lib/batch_rig.h"

#define N_THREADS_TRIED 5

static const char pool_small[] = "{\"name\": \"p\", \"layers\": 3, \"q_heads\": 4, \"kv_heads\": 2, "
				 "\"head_dim\": 32, \"k\": \"tq4\", \"v\": \"tq4\", \"block_size\": 16, "
				 "\"blocks\": 12}";

enum { N_IN_FLIGHT = 8 };

/* Random batches with refused items, run by `n_threads`; returns everything that they answered. */
static uint8_t *run_random_batches(uint32_t n_threads, uint64_t *n_bytes)
{
	struct batch_rig rig;
	struct batch_seq seqs[3];
	uint8_t *answers = calloc(1, 4 << 20);

	rig_init(&rig, n_threads, pool_small);
	*n_bytes = 0;
	for (uint32_t s = 0; s < 3; s++)
		seq_init(&rig, &seqs[s], s, 3);
	for (int round = 0; round < 40; round++) {
		rig_begin(&rig);
		for (uint32_t s = 0; s < 3; s++) {
			const uint64_t random = kv_test_random(&rig.seed);
			const uint32_t n = 1 + (uint32_t)(random % 40);

			if (seqs[s].n_tokens + n > 60)
				seqs[s].n_tokens = 0;

			const struct kv_update_op *op =
				seq_append(&rig, &seqs[s], 0, 3, n, KV_DTYPE_F32, true);

			if (random >> 8 & 1) /* somewhere, in any layer and row */
				kv_store_f32(NAN,
					op->k.base + (random >> 9) % (n * 2 * 32) * 4 +
						(random >> 40) % 3 * op->k.tokens_stride * 2 * 32 * 4);
			seq_decode(&rig, &seqs[s], (uint32_t)(random >> 50) % 3, 1, seqs[s].n_tokens);
		}
		rig_run(&rig);
		memcpy(answers + *n_bytes, rig.batch.results, rig.batch.n_results * sizeof(struct kv_result));
		*n_bytes += rig.batch.n_results * sizeof(struct kv_result);
		for (uint32_t i = 0; i < rig.batch.n_decodes; i++) {
			memcpy(answers + *n_bytes, rig.batch.decodes[i].out, 4 * 32 * sizeof(float));
			*n_bytes += 4 * 32 * sizeof(float);
		}
	}
	for (uint32_t s = 0; s < 3; s++)
		seq_finish(&seqs[s]);
	rig_finish(&rig);
	return answers;
}

/* The same batches give the same bits, refusals included, with any number of threads. */
START_TEST(test_backend_cpu_results_do_not_depend_on_threads)
{
	uint64_t n_expected = 0, n_bytes = 0;
	uint8_t *expected = run_random_batches(0, &n_expected);
	uint8_t *found = run_random_batches((uint32_t)_i, &n_bytes);
	uint32_t n_refused = 0;

	ck_assert_uint_eq(n_bytes, n_expected);
	ck_assert_mem_eq(found, expected, n_bytes);
	for (uint32_t r = 0; r < 6; r++)
		n_refused += ((struct kv_result *)(void *)expected)[r].status != KV_OK;
	ck_assert_uint_gt(n_refused, 0);
	free(expected);
	free(found);
}
END_TEST

/* Batches that are in flight together take effect, and come back, in the order of submission. */
START_TEST(test_backend_cpu_batches_stay_in_order)
{
	struct batch_rig rigs[N_IN_FLIGHT];
	struct batch_seq seq;
	float *row;

	rig_init(&rigs[0], (uint32_t)_i, pool_small);
	seq_init(&rigs[0], &seq, 0, 1);
	for (int i = 1; i < N_IN_FLIGHT; i++) { /* one backend and pool, a batch memory each */
		rigs[i] = rigs[0];
		rigs[i].memory = rigs[0].backend->ops->host_alloc(rigs[0].backend, BATCH_RIG_MEMORY_BYTES);
		rigs[i].seed += (uint64_t)i * 77;
		rig_begin(&rigs[i]);
	}
	for (int round = 0; round < 25; round++) {
		for (int i = 0; i < N_IN_FLIGHT; i++) { /* all write token 0; each reads what it wrote */
			rig_begin(&rigs[i]);
			seq.n_tokens = 0;
			seq_append(&rigs[i], &seq, 0, 3, 1, KV_DTYPE_F32, true);
			row = rig_take(&rigs[i], 32 * sizeof(float));
			memcpy(row, seq_row(&rigs[i], &seq, true, 2, 0, 1), 32 * sizeof(float));
			rigs[i].batch.user = row;
			seq_decode(&rigs[i], &seq, 2, 1, 1);
			ck_assert_int_eq(
				rigs[i].backend->ops->submit(rigs[i].backend, &rigs[i].batch, NULL), KV_OK);
		}
		for (int i = 0; i < N_IN_FLIGHT; i++) {
			rig_reap(&rigs[i], &rigs[i].batch);

			const float *out = (const float *)(const void *)rigs[i].batch.decodes[0].out + 3 * 32;

			row = rigs[i].batch.user;
			for (uint32_t d = 0; d < 32; d++)
				ck_assert_float_le(fabsf(out[d] - row[d]), 1e-5f);
		}
	}
	for (int i = 1; i < N_IN_FLIGHT; i++)
		rigs[0].backend->ops->host_free(rigs[0].backend, rigs[i].memory, BATCH_RIG_MEMORY_BYTES);
	seq_finish(&seq);
	rig_finish(&rigs[0]);
}
END_TEST

/* A batch without ops comes back like any other; nothing is reaped that was not submitted. */
START_TEST(test_backend_cpu_empty_batch)
{
	struct batch_rig rig;

	rig_init(&rig, (uint32_t)_i, pool_small);
	ck_assert_ptr_null(rig.backend->ops->reap(rig.backend));
	rig_run(&rig);
	ck_assert_ptr_null(rig.backend->ops->reap(rig.backend));
	rig_finish(&rig);
}
END_TEST

/* From submit to reap no heap is used. */
START_TEST(test_backend_cpu_no_heap_in_flight)
{
	struct batch_rig rig;
	struct batch_seq seq;

	rig_init(&rig, (uint32_t)_i, pool_small);
	seq_init(&rig, &seq, 0, 1);

	const uint64_t n_allocations = kv_alloc_count();

	for (int i = 0; i < 10; i++) {
		rig_begin(&rig);
		seq_append(&rig, &seq, 0, 3, 3, KV_DTYPE_F32, true);
		seq_decode(&rig, &seq, 0, 1, seq.n_tokens);
		seq_transfer(&rig, &seq, 0, 3, KV_DTYPE_PACKED, false);
		rig_run(&rig);
	}
	ck_assert_uint_eq(kv_alloc_count(), n_allocations);
	seq_finish(&seq);
	rig_finish(&rig);
}
END_TEST

/* destroy() waits for what is in flight and leaves the memory of it alone afterwards. */
START_TEST(test_backend_cpu_destroy_waits)
{
	struct batch_rig rig;
	struct batch_seq seq;

	rig_init(&rig, (uint32_t)_i, pool_small);
	seq_init(&rig, &seq, 0, 1);
	seq_append(&rig, &seq, 0, 3, 60, KV_DTYPE_F32, true);

	const struct kv_decode_op *decode = seq_decode(&rig, &seq, 1, 1, 60);

	ck_assert_int_eq(rig.backend->ops->submit(rig.backend, &rig.batch, NULL), KV_OK);

	const struct kv_backend_ops *ops = rig.backend->ops;

	ops->destroy(rig.backend); /* host memory is still there */
	seq_check(&rig, &seq, decode, 1e-5);
	ops->pool_destroy(NULL, rig.pool);
	seq_finish(&seq);
	kv_pool_spec_destroy(rig.spec);
}
END_TEST

struct probe_job {
	struct kv_job job;
	pthread_t thread;
	sigset_t blocked;
	volatile int n_runs;
	pthread_mutex_t *gate; /* NULL: none */
};

static void probe_run(struct kv_job *job)
{
	struct probe_job *probe = job->user;

	if (probe->gate) {
		pthread_mutex_lock(probe->gate);
		pthread_mutex_unlock(probe->gate);
	}
	probe->thread = pthread_self();
	pthread_sigmask(SIG_SETMASK, NULL, &probe->blocked);
	probe->n_runs++;
}

static struct kv_job *reap_job(struct kv_backend *backend)
{
	struct pollfd finished = { .fd = backend->ops->event_fd(backend), .events = POLLIN };
	struct kv_job *job;
	uint64_t count;

	while (!(job = backend->ops->job_reap(backend))) {
		ck_assert_int_eq(poll(&finished, 1, 10000), 1);
		(void)!read(finished.fd, &count, sizeof(count));
	}
	return job;
}

/* Jobs run once each, in order, away from the caller's thread and its signals, and at most 16 wait. */
START_TEST(test_backend_cpu_jobs)
{
	struct kv_backend *backend = NULL;
	struct probe_job probes[20] = { 0 };
	pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
	int n_posted = 0;

	ck_assert_int_eq(kv_backend_cpu_create((uint32_t)_i, &backend, NULL), KV_OK);
	if (_i > 0)
		pthread_mutex_lock(&gate);
	for (int i = 0; i < 20; i++) {
		probes[i].job = (struct kv_job){ .run = probe_run, .user = &probes[i] };
		probes[i].gate = &gate;
		if (!backend->ops->job_post(backend, &probes[i].job))
			break;
		n_posted++;
	}
	if (_i == 0)
		ck_assert_int_eq(n_posted, 20);
	else
		ck_assert(n_posted == 16 || n_posted == 17); /* one may be running */
	if (_i > 0)
		pthread_mutex_unlock(&gate);
	for (int i = 0; i < n_posted; i++) {
		ck_assert_ptr_eq(reap_job(backend), &probes[i].job);
		ck_assert_int_eq(probes[i].n_runs, 1);
		if (_i > 0) {
			ck_assert(!pthread_equal(probes[i].thread, pthread_self()));
			ck_assert_int_eq(sigismember(&probes[i].blocked, SIGTERM), 1);
		}
	}
	ck_assert_ptr_null(backend->ops->job_reap(backend));
	backend->ops->destroy(backend);
}
END_TEST

/* A job that takes long does not hold up batches. */
START_TEST(test_backend_cpu_jobs_do_not_delay_batches)
{
	struct batch_rig rig;
	pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
	struct probe_job probe = { .gate = &gate };

	if (_i == 0)
		return; /* without threads everything happens in the call */
	rig_init(&rig, (uint32_t)_i, pool_small);
	probe.job = (struct kv_job){ .run = probe_run, .user = &probe };
	pthread_mutex_lock(&gate);
	ck_assert(rig.backend->ops->job_post(rig.backend, &probe.job));
	rig_run(&rig);
	ck_assert_ptr_null(rig.backend->ops->job_reap(rig.backend));
	pthread_mutex_unlock(&gate);
	ck_assert_ptr_eq(reap_job(rig.backend), &probe.job);
	rig_finish(&rig);
}
END_TEST

/* An arena beyond the machine names what was wanted and what is free; a pool outside the arena is refused. */
START_TEST(test_backend_cpu_memory_is_refused_by_number)
{
	struct batch_rig rig;
	struct kv_backend *backend = NULL;
	struct kv_backend_pool *pool = NULL;
	struct kv_error err;
	uint64_t n_bytes = 0;

	ck_assert_int_eq(kv_backend_cpu_create((uint32_t)_i, &backend, NULL), KV_OK);
	ck_assert_int_eq(backend->ops->arena_create(backend, 1ull << 50, &err), KV_NO_MEMORY);
	ck_assert_ptr_nonnull(strstr(err.msg, "1125899906842624 bytes wanted"));
	ck_assert_ptr_nonnull(strstr(err.msg, "bytes of memory are free"));
	ck_assert_int_eq(
		backend->ops->arena_create(backend, 1 << 20, &err), KV_OK); /* the refusal left it usable */
	backend->ops->destroy(backend);

	rig_init(&rig, (uint32_t)_i, pool_small);
	ck_assert_int_eq(rig.backend->ops->pool_check(rig.backend, rig.spec, &n_bytes, NULL), KV_OK);
	/* layers * (K and V) * blocks * block_size * kv_heads * row_bytes, rounded up */
	ck_assert_uint_eq(n_bytes, (3 * 2 * 12 * 16 * 2 * 20 + 4095) / 4096 * 4096);
	ck_assert_int_eq(rig.backend->ops->pool_create(
				 rig.backend, rig.spec, BATCH_RIG_ARENA_BYTES - n_bytes + 4096, &pool, &err),
		KV_NO_MEMORY);
	ck_assert_int_eq(rig.backend->ops->pool_create(rig.backend, rig.spec, UINT64_MAX - 4095, &pool, &err),
		KV_NO_MEMORY);
	ck_assert_ptr_null(pool);
	rig.backend->ops->pool_destroy(rig.backend, NULL);
	rig_finish(&rig);
}
END_TEST

/* Whichever allocation fails, creating fails with NO_MEMORY and leaves no thread or descriptor behind. */
START_TEST(test_backend_cpu_create_fails_whole)
{
	struct kv_backend *backend = NULL;

	for (int64_t k = 0;; k++) {
		kv_alloc_fail_after(k);

		const enum kv_status status = kv_backend_cpu_create((uint32_t)_i, &backend, NULL);

		kv_alloc_fail_after(-1);
		if (status == KV_OK) {
			ck_assert_int_ge(k, 3 + (_i > 0 ? _i - 1 : 0));
			break;
		}
		ck_assert_int_eq(status, KV_NO_MEMORY);
		ck_assert_ptr_null(backend);
	}

	const struct kv_backend_ops *ops = backend->ops;
	struct kv_backend_info info;

	ops->info(backend, &info);
	ck_assert_uint_eq(info.n_threads, (uint32_t)_i);
	ck_assert_int_eq(strncmp(info.device, "CPU (scalar), ", 14), 0);
	ops->destroy(backend);
	ops->destroy(NULL);
	ck_assert_int_eq(kv_backend_cpu_create(KV_BACKEND_CPU_THREADS_MAX + 1, &backend, NULL), KV_BAD_ARG);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("backend_cpu_threads");
	TCase *tcase = tcase_create("machine");

	tcase_set_timeout(tcase, 60);
	tcase_add_loop_test(tcase, test_backend_cpu_results_do_not_depend_on_threads, 0, N_THREADS_TRIED);
	tcase_add_loop_test(tcase, test_backend_cpu_batches_stay_in_order, 0, N_THREADS_TRIED);
	tcase_add_loop_test(tcase, test_backend_cpu_empty_batch, 0, N_THREADS_TRIED);
	tcase_add_loop_test(tcase, test_backend_cpu_no_heap_in_flight, 0, N_THREADS_TRIED);
	tcase_add_loop_test(tcase, test_backend_cpu_destroy_waits, 0, N_THREADS_TRIED);
	tcase_add_loop_test(tcase, test_backend_cpu_jobs, 0, N_THREADS_TRIED);
	tcase_add_loop_test(tcase, test_backend_cpu_jobs_do_not_delay_batches, 0, N_THREADS_TRIED);
	tcase_add_loop_test(tcase, test_backend_cpu_memory_is_refused_by_number, 0, N_THREADS_TRIED);
	tcase_add_loop_test(tcase, test_backend_cpu_create_fails_whole, 0, N_THREADS_TRIED);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
