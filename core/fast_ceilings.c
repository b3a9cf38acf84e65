/*
 * What an instruction set can do at best, for reports beside what the kernels reach: products in registers,
 * and reading memory. Compiled like core/fast_kernels.c.
 */
#include "core/fast_ceilings.h"
#include "core/fast_set.h"

#define CHAINS \
	10u /* independent, more than latency times throughput of any processor so far, and in registers */

/* Read anew every time, so that the compiler takes no two chains for the same. */
static volatile int32_t opaque;

static uint64_t products(uint64_t n_rounds)
{
	i_vector sums[CHAINS], total;
	int32_t lane;

	for (uint32_t i = 0; i < CHAINS; i++)
		sums[i] = repeat_pair(opaque);
	i_vector a = repeat_pair(opaque + 3);
	const i_vector b = repeat_pair(opaque + 5);

	for (uint64_t round = 0; round < n_rounds; round++) {
		UNROLL_64
		for (uint32_t i = 0; i < 2 * CHAINS; i++) {
			sums[i % CHAINS] = multiply_add(sums[i % CHAINS], a, b);
			/* As if it were another one, else the product would be the one before. */
			__asm__("" : "+x"(a));
		}
	}
	total = sums[0];
	for (uint32_t i = 1; i < CHAINS; i++)
		total = (i_vector)((i32_lanes)total + (i32_lanes)sums[i]);
	memcpy(&lane, &total, sizeof(lane));
	/* Never true for both; keeps the sums alive. */
	return lane == INT32_MIN + 1 ? 0 : n_rounds * 2 * CHAINS * WORDS;
}

static uint64_t products_f32(uint64_t n_rounds)
{
	f_vector sums[CHAINS], total;
	float lane;

	for (uint32_t i = 0; i < CHAINS; i++)
		sums[i] = (f_vector)repeat_f32((float)opaque);
	for (uint64_t round = 0; round < n_rounds; round++) {
		const f_vector a = (f_vector)repeat_f32((float)(round & 255)),
			       b = (f_vector)repeat_f32(0x1p-10f);

		UNROLL
		for (uint32_t i = 0; i < CHAINS; i++)
			sums[i] = fma_f32(a, b, sums[i]);
		UNROLL
		for (uint32_t i = 0; i < CHAINS; i++)
			sums[i] = fma_f32(b, a, sums[i]);
	}
	total = sums[0];
	for (uint32_t i = 1; i < CHAINS; i++)
		total = (f_vector)((f32_lanes)total + (f32_lanes)sums[i]);
	memcpy(&lane, &total, sizeof(lane));
	return lane < 0 ? 0 : n_rounds * 2 * CHAINS * LANES;
}

static uint64_t read_bytes(const uint8_t *from, uint64_t n_bytes)
{
	i32_lanes sums[4] = { 0 };
	const uint64_t step = sizeof(sums);
	int32_t lane;

	for (uint64_t at = 0; at + step <= n_bytes; at += step) {
		UNROLL
		for (uint32_t i = 0; i < 4; i++) {
			i32_lanes words;

			memcpy(&words, from + at + i * sizeof(words), sizeof(words));
			sums[i] ^= words;
		}
	}
	sums[0] ^= sums[1] ^ sums[2] ^ sums[3];
	memcpy(&lane, &sums[0], sizeof(lane));
	return lane == INT32_MIN + 1 ? 1 : n_bytes;
}

extern const struct kv_fast_ceilings OF_SET(kv_fast_ceilings);
const struct kv_fast_ceilings OF_SET(kv_fast_ceilings) = {
	.products = products,
	.products_f32 = products_f32,
	.read = read_bytes,
};
