/*
 * MT19937, the generator behind every random matrix (FORMATS 1): the same stream as the common tensor
 * libraries, so that the daemon, C clients and Python clients arrive at the same matrices. Not for secrets.
 * The caller's memory; one thread at a time.
 */
#ifndef CORE_MT19937_H
#define CORE_MT19937_H

#include <stddef.h>
#include <stdint.h>

#define KV_MT19937_WORDS 624u

struct kv_mt19937 {
	uint32_t words[KV_MT19937_WORDS];
	uint32_t word_idx; /* next word to hand out; KV_MT19937_WORDS: make new ones first */
};

/* init_genrand(seed mod 2^32) */
void kv_mt19937_init(struct kv_mt19937 *generator, uint64_t seed);
/* One 32-bit output. */
uint32_t kv_mt19937_next(struct kv_mt19937 *generator);
/* n draws, each +1 when the least significant bit of the output is 1, else -1. */
void kv_mt19937_signs(struct kv_mt19937 *generator, size_t n, float *signs);
/* A multiple of 2^-53 in [0, 1); two outputs, the first is the high word. */
double kv_mt19937_uniform(struct kv_mt19937 *generator);
/* n >= 16 normal numbers: Box-Muller over blocks of 16 uniforms, in the order of FORMATS 1. */
void kv_mt19937_normals(struct kv_mt19937 *generator, size_t n, double *normals);

#endif
