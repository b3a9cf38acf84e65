/*
 * Simulation: the whole server without sockets, threads or real time.
 *
 * Everything that could differ between two runs comes from one seed: the fake clock moves only while the
 * server waits, the fake network cuts and delays bytes, the fake backend takes random time, refuses and gets
 * lost. So a failing run is repeated with its seed alone.
 *
 * One thread, one world at a time (`sim_where` says which). A broken promise ends the process through
 * sim_fail(), which prints the seed.
 */
#ifndef TESTS_SIM_SIM_H
#define TESTS_SIM_SIM_H

#include <stdbool.h>
#include <stdint.h>

#include "core/clock.h"

/* What sim_fail() prints in front. */
struct sim_where {
	uint64_t seed, turn;
	const char *repeat; /* a command line without the seed, or NULL */
};
extern struct sim_where sim_where;

_Noreturn void sim_fail(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
#define SIM_CHECK(cond, ...) ((cond) ? (void)0 : sim_fail(__VA_ARGS__))
/* Prints when --verbose was given. */
void sim_say(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
extern bool sim_is_verbose;

/* xorshift64*, one stream per user so that one part's draws do not move another's. */
struct sim_rng {
	uint64_t state;
};
void sim_rng_init(struct sim_rng *rng, uint64_t seed, uint64_t stream);
uint64_t sim_rng_next(struct sim_rng *rng);
/* Uniform in [0, n); 0 for n = 0. */
uint32_t sim_below(struct sim_rng *rng, uint32_t n);
/* Uniform in [lo, hi]. */
uint32_t sim_between(struct sim_rng *rng, uint32_t lo, uint32_t hi);
bool sim_chance(struct sim_rng *rng, uint32_t per_mille);

/* Time that moves only where the simulation moves it. */
struct sim_clock {
	struct kv_clock base;
	uint64_t now_ns;
};
void sim_clock_init(struct sim_clock *clock);

/* The server's random source: boot id, boot tag, generations. */
struct sim_random {
	struct kv_random base;
	struct sim_rng rng;
};
void sim_random_init(struct sim_random *random, uint64_t seed);

#endif
