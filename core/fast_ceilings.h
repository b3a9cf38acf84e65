/* What an instruction set can do at best on one thread; each function returns how much it did. */
#ifndef CORE_FAST_CEILINGS_H
#define CORE_FAST_CEILINGS_H

#include <stdint.h>

struct kv_fast_kernels;

struct kv_fast_ceilings {
	uint64_t (*products)(uint64_t n_rounds);     /* of 16-bit integers, summed up: how many */
	uint64_t (*products_f32)(uint64_t n_rounds); /* of float32 */
	uint64_t (*read)(const uint8_t *from, uint64_t n_bytes);
};

/* Of the set that these kernels are of. */
const struct kv_fast_ceilings *kv_fast_ceilings_of(const struct kv_fast_kernels *kernels);

#endif
