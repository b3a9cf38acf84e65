/* See fibers.h. A fiber is entered by ucontext once, and left and entered by setjmp and longjmp, which make
 * no call. */
#undef _FORTIFY_SOURCE
#include "tests/gpu/host/fibers.h"

#include <setjmp.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define STACK_BYTES (64u * 1024u)
#define LOOKS_MAX   1000u /* in vain: nobody will come */

struct barrier {
	unsigned waiting[FIBERS_MAX];
	unsigned n_waiting;
};

struct fiber {
	jmp_buf at;
	bool has_begun;
	unsigned n_shown; /* calls of fibers_show() */
};

struct fiber_idx fiber_thread, fiber_block;
struct fiber_grid fiber_grid;
uint64_t fibers_n_runs;
uint8_t fiber_shared[FIBERS_SHARED_MAX] __attribute__((aligned(1024)));

static struct fiber fibers[FIBERS_MAX];
static uint8_t *stacks;
/* Fibers that look whether what they wait for is there run after all others. */
static unsigned ready[FIBERS_MAX], n_ready, looking[FIBERS_MAX], n_looking, n_left;
static unsigned n_looks; /* by all of them in turn, since somebody has gone on */
static struct barrier warps[FIBERS_MAX / 32], block, first_threads;
static uint32_t shown[FIBERS_MAX / 32][2][32][FIBERS_WORDS_MAX];
static jmp_buf scheduler;
static void (*block_run)(void *);
static void *block_user;
static uint64_t random_state = 1;

static void set_ready(unsigned idx)
{
	ready[n_ready++] = idx;
}

static void fiber_main(void)
{
	block_run(block_user);
	n_left--;
	fibers_went_on();
	_longjmp(scheduler, 1);
}

/* First entry: on a stack of its own. */
static void begin(unsigned idx)
{
	ucontext_t context;

	fibers[idx].has_begun = true;
	getcontext(&context);
	context.uc_stack.ss_sp = stacks + (size_t)idx * STACK_BYTES;
	context.uc_stack.ss_size = STACK_BYTES;
	context.uc_link = NULL;
	makecontext(&context, fiber_main, 0);
	setcontext(&context);
}

/* Leaves the running fiber; somebody has to make it ready again. */
static void leave(void)
{
	if (_setjmp(fibers[fiber_thread.x].at) == 0)
		_longjmp(scheduler, 1);
}

static void run_block(void)
{
	n_left = fiber_grid.n_threads;
	n_ready = n_looking = n_looks = 0;
	for (unsigned i = 0; i < fiber_grid.n_threads; i++) {
		fibers[i].has_begun = false;
		fibers[i].n_shown = 0;
		set_ready(i);
	}
	memset(fiber_shared, 0xA5, sizeof(fiber_shared));
	(void)_setjmp(scheduler);
	if (n_left == 0)
		return;
	if (n_ready == 0 && ++n_looks < LOOKS_MAX) {
		memcpy(ready, looking, n_looking * sizeof(*ready));
		n_ready = n_looking;
		n_looking = 0;
	}
	if (n_ready == 0) {
		fprintf(stderr, "block %u: %u threads wait for threads that do not come\n", fiber_block.x,
			n_left);
		abort();
	}
	random_state = random_state * 6364136223846793005u + 1442695040888963407u;

	const unsigned at = (unsigned)((random_state >> 33) % n_ready), idx = ready[at];

	ready[at] = ready[--n_ready];
	fiber_thread.x = idx;
	if (fibers[idx].has_begun)
		_longjmp(fibers[idx].at, 1);
	begin(idx);
}

void fibers_run(const struct fiber_grid *grid, void (*run)(void *user), void *user)
{
	if (!stacks)
		stacks = malloc((size_t)FIBERS_MAX * STACK_BYTES);
	if (!stacks || grid->n_threads > FIBERS_MAX)
		abort();
	fibers_n_runs++;
	fiber_grid = *grid;
	block_run = run;
	block_user = user;
	for (fiber_block.y = 0; fiber_block.y < grid->blocks.y; fiber_block.y++) {
		for (fiber_block.x = 0; fiber_block.x < grid->blocks.x; fiber_block.x++)
			run_block();
	}
}

static void meet(struct barrier *barrier, unsigned n_all)
{
	if (barrier->n_waiting + 1 < n_all) {
		barrier->waiting[barrier->n_waiting++] = fiber_thread.x;
		leave();
		return;
	}
	for (unsigned i = 0; i < barrier->n_waiting; i++)
		set_ready(barrier->waiting[i]);
	barrier->n_waiting = 0;
}

void fibers_sync_warp(void)
{
	meet(&warps[fiber_thread.x / 32], 32);
}

void fibers_sync_block(void)
{
	meet(&block, fiber_grid.n_threads);
	fibers_went_on();
}

void fibers_sync_first(unsigned n_threads)
{
	meet(&first_threads, n_threads);
	fibers_went_on();
}

void fibers_went_on(void)
{
	n_looks = 0;
}

void fibers_yield(void)
{
	looking[n_looking++] = fiber_thread.x;
	leave();
}

const uint32_t (*fibers_show(const uint32_t *words, unsigned n_words))[FIBERS_WORDS_MAX]
{
	/* Two places in turn: nobody is more than one call ahead of the slowest. */
	uint32_t(*place)[FIBERS_WORDS_MAX] = shown[fiber_thread.x / 32][fibers[fiber_thread.x].n_shown++ % 2];

	memcpy(place[fiber_thread.x % 32], words, n_words * sizeof(*words));
	fibers_sync_warp();
	return (const uint32_t(*)[FIBERS_WORDS_MAX])place;
}
