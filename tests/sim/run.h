/* One seeded run from start to end. */
#ifndef TESTS_SIM_RUN_H
#define TESTS_SIM_RUN_H

#include "tests/sim/world.h"

/* What a run saw, so that a test can tell whether it saw enough. */
struct sim_seen {
	uint64_t n_turns, n_requests, n_statuses[1000];
	uint64_t n_done[KVP_OP_DECODE_TABLE + 1],
		n_resets; /* answered OK, by operation; clients that vanished */
	struct sim_maxima maxima;
	uint64_t n_published, n_hits, n_nodes_evicted, n_nodes_expired, n_evicted; /* prefixes; sequences */
	uint64_t n_saved, n_restored, n_refused;                                   /* snapshots */
	uint64_t n_full;                                                           /* writes to a full disk */
	uint64_t n_audits, n_open_waits, n_lost, n_drained, n_expired, n_closed_slow, n_slot_waits;
};

void sim_run(const struct sim_config *config, struct sim_seen *seen);

#endif
