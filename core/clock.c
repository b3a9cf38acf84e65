#include "core/clock.h"

#include <errno.h>
#include <sys/random.h>
#include <time.h>

#include "core/error.h"

static uint64_t system_now_ns(struct kv_clock *clock)
{
	struct timespec now;

	(void)clock;
	KV_ASSERT(clock_gettime(CLOCK_MONOTONIC, &now) == 0);

	const uint64_t now_ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;

	return now_ns ? now_ns : 1;
}

static uint64_t system_random(struct kv_random *random)
{
	uint64_t value;

	(void)random;
	/*
	 * Up to 256 bytes come whole or, while the machine has not gathered enough, interrupted by a signal.
	 */
	for (;;) {
		const ssize_t n_bytes = getrandom(&value, sizeof(value), 0);

		if (n_bytes == (ssize_t)sizeof(value))
			return value;
		KV_ASSERT(n_bytes < 0);
		KV_ASSERT(errno == EINTR);
	}
}

struct kv_clock *kv_clock_system(void)
{
	static const struct kv_clock_ops ops = { .now_ns = system_now_ns };
	static struct kv_clock clock = { .ops = &ops };

	return &clock;
}

struct kv_random *kv_random_system(void)
{
	static const struct kv_random_ops ops = { .next = system_random };
	static struct kv_random random = { .ops = &ops };

	return &random;
}
