#include "tests/sim/sim.h"

#include "core/checked.h"

static uint64_t clock_now_ns(struct kv_clock *clock)
{
	return kv_container_of(clock, struct sim_clock, base)->now_ns;
}

static const struct kv_clock_ops clock_ops = { clock_now_ns };

void sim_clock_init(struct sim_clock *clock)
{
	clock->base.ops = &clock_ops;
	clock->now_ns = 1000 * KV_NS_PER_MS; /* not 0, and not so small that "ago" would underflow */
}
