/* Which set of fast kernels is in use: the best that this processor runs, unless the environment names a
 * lesser one. */
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <stdlib.h>
#include <string.h>

#include "core/fast.h"
#include "core/fast_ceilings.h"

#if defined(KV_HAVE_AVX2_FAST)
extern const struct kv_fast_kernels kv_fast_kernels_avx2;
extern const struct kv_fast_ceilings kv_fast_ceilings_avx2;

static bool runs_avx2(void)
{
	unsigned eax, ebx, ecx, edx;

	/* Not all compilers know "f16c" by name: bit 29 of leaf 1. */
	return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0 &&
		__get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & 1u << 29) != 0;
}
#endif

#if defined(KV_HAVE_AVX512_FAST)
extern const struct kv_fast_kernels kv_fast_kernels_avx512;
extern const struct kv_fast_ceilings kv_fast_ceilings_avx512;

static bool runs_avx512(void)
{
	return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512vl") != 0 &&
		__builtin_cpu_supports("avx512bw") != 0 && __builtin_cpu_supports("avx512dq") != 0 &&
		__builtin_cpu_supports("avx512vnni") != 0 && __builtin_cpu_supports("avx512vbmi") != 0;
}
#endif

const struct kv_fast_kernels *kv_fast_kernels_at(uint32_t set_idx)
{
#if defined(KV_HAVE_AVX2_FAST)
	if (runs_avx2() && set_idx-- == 0)
		return &kv_fast_kernels_avx2;
#endif
#if defined(KV_HAVE_AVX512_FAST)
	if (runs_avx512() && set_idx-- == 0)
		return &kv_fast_kernels_avx512;
#endif
	(void)set_idx;
	return NULL;
}

const struct kv_fast_kernels *kv_fast_kernels(void)
{
	const char *wanted = getenv("TQKV_INSTRUCTION_SET");
	const struct kv_fast_kernels *kernels, *best = NULL;

	if (wanted && strcmp(wanted, "baseline") == 0)
		return NULL;
	for (uint32_t i = 0; (kernels = kv_fast_kernels_at(i)); i++) {
		best = kernels;
		if (wanted && strcmp(wanted, kernels->name) == 0)
			break;
	}
	return best;
}

const struct kv_fast_ceilings *kv_fast_ceilings_of(const struct kv_fast_kernels *kernels)
{
#if defined(KV_HAVE_AVX2_FAST)
	if (kernels == &kv_fast_kernels_avx2)
		return &kv_fast_ceilings_avx2;
#endif
#if defined(KV_HAVE_AVX512_FAST)
	if (kernels == &kv_fast_kernels_avx512)
		return &kv_fast_ceilings_avx512;
#endif
	(void)kernels;
	return NULL;
}
