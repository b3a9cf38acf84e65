/*
 * Backend: core/backend.h over core/batch_run, with everything a device may do to its user. Batches complete
 * in order after random times; work is done at submit or at completion, so memory must stay untouched in
 * between (checked); submit answers BUSY_RETRY; good items are refused, and what they wrote is garbage; the
 * device gets lost.
 */
#ifndef TESTS_SIM_FAKE_BACKEND_H
#define TESTS_SIM_FAKE_BACKEND_H

#include "core/backend.h"
#include "tests/sim/sim.h"

struct sim_backend_options {
	uint64_t latency_ns_max;
	uint32_t busy_per_mille;   /* submits answered BUSY_RETRY */
	uint32_t refuse_per_mille; /* items refused although their rows are fine */
	uint32_t depth_max;        /* batches that it takes before it is busy */
	bool has_event_fd;
	bool is_silent;     /* its event tells only of batches that were in flight at will_sleep() */
	int64_t lose_after; /* the submit after so many more loses the device; negative: never */
};

/* What happens to batches, for whoever keeps a log. NULL allowed. */
struct sim_backend_hooks {
	void (*submitted)(void *user, const struct kv_batch *batch);
	/* Results are final. refused[result_idx]: BAD_VALUE was invented. */
	void (*completed)(void *user, const struct kv_batch *batch, const bool refused[]);
	void *user;
};

#define SIM_BACKEND_FD 1000000

struct sim_backend;
struct sim_backend *sim_backend_create(const struct sim_backend_options *options,
	const struct sim_backend_hooks *hooks, struct sim_clock *clock, uint64_t seed);
struct kv_backend *sim_backend_base(struct sim_backend *backend);
/* For the network's wait(). */
uint64_t sim_backend_due_ns(void *backend);
void sim_backend_clear(void *backend);

/* Holds batches back until told otherwise: nothing completes. */
void sim_backend_hold(struct sim_backend *backend, bool is_held);
/* Before the end: nothing is held, and every question for a finished batch lets a millisecond pass. */
void sim_backend_hurry(struct sim_backend *backend);
/* The next items are refused: result_idx counted over all batches from now; negative: none. */
void sim_backend_refuse_after(struct sim_backend *backend, int64_t countdown);
void sim_backend_fail_submit_after(struct sim_backend *backend, int64_t countdown, enum kv_status status);
void sim_backend_fail_host_alloc_after(struct sim_backend *backend, int64_t countdown);
bool sim_backend_has_failed(const struct sim_backend *backend);
bool sim_backend_is_lost(const struct sim_backend *backend);
uint32_t sim_backend_n_in_flight(const struct sim_backend *backend);
/* CRC-32C of the pages of all blocks of group 0 that have an owner, on top of crc. */
uint32_t sim_backend_hash_blocks(const struct kv_backend_pool *pool, const uint32_t owners[], uint32_t crc);
uint32_t sim_backend_n_host_allocs(const struct sim_backend *backend);

#endif
