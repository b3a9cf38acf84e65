#include "tests/sim/sim.h"

#include "core/checked.h"

void sim_rng_init(struct sim_rng *rng, uint64_t seed, uint64_t stream)
{
	/* splitmix64 of both, so that neighbouring seeds do not start alike; xorshift must not start at 0. */
	uint64_t z = seed * 0x9E3779B97F4A7C15ull + stream * 0xD1B54A32D192ED03ull + 0x632BE59BD9B4E019ull;

	z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
	z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
	z ^= z >> 31;
	rng->state = z ? z : 1;
}

uint64_t sim_rng_next(struct sim_rng *rng)
{
	rng->state ^= rng->state >> 12;
	rng->state ^= rng->state << 25;
	rng->state ^= rng->state >> 27;
	return rng->state * 0x2545F4914F6CDD1Dull;
}

uint32_t sim_below(struct sim_rng *rng, uint32_t n)
{
	return (uint32_t)(((sim_rng_next(rng) >> 32) * n) >> 32);
}

uint32_t sim_between(struct sim_rng *rng, uint32_t lo, uint32_t hi)
{
	return lo + sim_below(rng, hi - lo + 1);
}

bool sim_chance(struct sim_rng *rng, uint32_t per_mille)
{
	return sim_below(rng, 1000) < per_mille;
}

static uint64_t random_next(struct kv_random *random)
{
	return sim_rng_next(&kv_container_of(random, struct sim_random, base)->rng);
}

static const struct kv_random_ops random_ops = { random_next };

void sim_random_init(struct sim_random *random, uint64_t seed)
{
	random->base.ops = &random_ops;
	sim_rng_init(&random->rng, seed, 1);
}
