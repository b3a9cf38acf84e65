/*
 * Clock and random numbers behind tables, so that the whole server can run in a seeded simulation.
 * Any thread may call a clock; a random source belongs to the loop thread.
 */
#ifndef CORE_CLOCK_H
#define CORE_CLOCK_H

#include <stdint.h>

struct kv_clock;
struct kv_clock_ops {
	/* Monotonic time in nanoseconds; never goes back; never 0. */
	uint64_t (*now_ns)(struct kv_clock *clock);
};
struct kv_clock {
	const struct kv_clock_ops *ops;
};

static inline uint64_t kv_clock_now_ns(struct kv_clock *clock)
{
	return clock->ops->now_ns(clock);
}

struct kv_random;
struct kv_random_ops {
	/* 64 uniform bits. Used for boot id, boot tag and generations: the system's source outside tests. */
	uint64_t (*next)(struct kv_random *random);
};
struct kv_random {
	const struct kv_random_ops *ops;
};

static inline uint64_t kv_random_next(struct kv_random *random)
{
	return random->ops->next(random);
}

/* The machine's own: CLOCK_MONOTONIC and getrandom(2). Shared, never destroyed. */
struct kv_clock *kv_clock_system(void);
struct kv_random *kv_random_system(void);

#define KV_NS_PER_MS 1000000ull
#define KV_NS_PER_US 1000ull

#endif
