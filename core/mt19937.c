/* The 1998 generator of Matsumoto and Nishimura with the seeding of 2002, from its published definition. */
#include "core/mt19937.h"

#include <math.h>

#include "core/error.h"

#define SHIFT_WORDS 397u
#define UPPER_BIT   0x80000000u
#define TWIST       0x9908B0DFu

void kv_mt19937_init(struct kv_mt19937 *generator, uint64_t seed)
{
	uint32_t *words = generator->words;

	words[0] = (uint32_t)(seed & 0xFFFFFFFFu);
	for (uint32_t i = 1; i < KV_MT19937_WORDS; i++)
		words[i] = 1812433253u * (words[i - 1] ^ words[i - 1] >> 30) + i;
	generator->word_idx = KV_MT19937_WORDS;
}

static void make_words(struct kv_mt19937 *generator)
{
	uint32_t *words = generator->words;

	for (uint32_t i = 0; i < KV_MT19937_WORDS; i++) {
		const uint32_t next = words[(i + 1) % KV_MT19937_WORDS];
		const uint32_t joined = (words[i] & UPPER_BIT) | (next & ~UPPER_BIT);
		const uint32_t twist = (joined & 1u) ? TWIST : 0;

		words[i] = words[(i + SHIFT_WORDS) % KV_MT19937_WORDS] ^ joined >> 1 ^ twist;
	}
	generator->word_idx = 0;
}

uint32_t kv_mt19937_next(struct kv_mt19937 *generator)
{
	if (generator->word_idx == KV_MT19937_WORDS)
		make_words(generator);

	uint32_t y = generator->words[generator->word_idx++];

	y ^= y >> 11;
	y ^= y << 7 & 0x9D2C5680u;
	y ^= y << 15 & 0xEFC60000u;
	return y ^ y >> 18;
}

void kv_mt19937_signs(struct kv_mt19937 *generator, size_t n, float *signs)
{
	for (size_t i = 0; i < n; i++)
		signs[i] = (kv_mt19937_next(generator) & 1u) ? 1.0f : -1.0f;
}

double kv_mt19937_uniform(struct kv_mt19937 *generator)
{
	const uint64_t high = kv_mt19937_next(generator);
	const uint64_t low = kv_mt19937_next(generator);

	return (double)((high << 32 | low) & ((1ull << 53) - 1)) * 0x1p-53;
}

/* u1 is in (0, 1], so its logarithm is finite. */
static void make_normals(double block[16])
{
	const double two_pi = 0x1.921fb54442d18p+2;

	for (uint32_t j = 0; j < 8; j++) {
		const double u1 = 1 - block[j], u2 = block[j + 8];
		const double radius = sqrt(-2 * log(u1)), angle = two_pi * u2;

		block[j] = radius * cos(angle);
		block[j + 8] = radius * sin(angle);
	}
}

void kv_mt19937_normals(struct kv_mt19937 *generator, size_t n, double *normals)
{
	KV_ASSERT(n >= 16);
	for (size_t i = 0; i < n; i++)
		normals[i] = kv_mt19937_uniform(generator);
	for (size_t i = 0; i + 16 <= n; i += 16)
		make_normals(normals + i);
	if (n % 16 != 0) { /* the last block overlaps the one before it, with fresh numbers */
		for (size_t i = n - 16; i < n; i++)
			normals[i] = kv_mt19937_uniform(generator);
		make_normals(normals + n - 16);
	}
}
