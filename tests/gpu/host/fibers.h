/*
 * The threads of one thread block as fibers of one thread of the machine, run in an order that is drawn anew
 * at every switch. A fiber runs until it meets the others of its warp or block. Where fibers wait for each
 * other and none can go on the program ends with a message: a barrier that not all reach.
 */
#ifndef TESTS_GPU_HOST_FIBERS_H
#define TESTS_GPU_HOST_FIBERS_H

#include <stddef.h>
#include <stdint.h>

#define FIBERS_MAX        1024u
#define FIBERS_SHARED_MAX (228u * 1024u)
#define FIBERS_WORDS_MAX  8u /* that a lane shows to its warp */

#ifdef __cplusplus
extern "C" {
#endif

struct fiber_idx {
	unsigned x, y, z;
};

struct fiber_grid {
	struct fiber_idx blocks;
	unsigned n_threads;
};

/* Of the fiber that runs. */
extern struct fiber_idx fiber_thread, fiber_block;
extern struct fiber_grid fiber_grid;
extern uint8_t fiber_shared[FIBERS_SHARED_MAX];

/* Calls of fibers_run() so far: kernels that were launched. */
extern uint64_t fibers_n_runs;

/* Runs run(user) once for every thread of every block; shared memory begins as noise. */
void fibers_run(const struct fiber_grid *grid, void (*run)(void *user), void *user);
void fibers_sync_warp(void);
void fibers_sync_block(void);
/* The first threads of the block alone. */
void fibers_sync_first(unsigned n_threads);
/* Lets others run; for loops that wait. Many looks in vain, without fibers_went_on() in between, end the
 * program. */
void fibers_yield(void);
/* What fibers look for has changed. */
void fibers_went_on(void);
/* Shows words to the warp; returns what all lanes showed, [32][FIBERS_WORDS_MAX], until the next call but
 * one. */
const uint32_t (*fibers_show(const uint32_t *words, unsigned n_words))[FIBERS_WORDS_MAX];

#ifdef __cplusplus
}
#endif

#endif
