/* Which set of row kernels is in use. Chosen by the first caller; all callers come to the same choice. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "core/checked.h"
#include "core/row_kernels_sets.h"

static _Atomic(const struct kv_row_kernels *) in_use;

static bool always(void)
{
	return true;
}

/* The system must save the wider registers, too: the compiler's run-time looks at both. */
#if defined(KV_HAVE_AVX2_KERNELS)
static bool runs_avx2(void)
{
	return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;
}
#endif

#if defined(KV_HAVE_AVX512_KERNELS)
static bool runs_avx512(void)
{
	return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512vl") != 0 &&
		__builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("fma") != 0;
}
#endif

static const struct set {
	const struct kv_row_kernels *kernels;
	bool (*runs)(void);
} sets[] = {
	{ &kv_row_kernels_baseline, always },
#if defined(KV_HAVE_AVX2_KERNELS)
	{ &kv_row_kernels_avx2, runs_avx2 },
#endif
#if defined(KV_HAVE_AVX512_KERNELS)
	{ &kv_row_kernels_avx512, runs_avx512 },
#endif
};
_Static_assert(KV_LENGTH(sets) <= KV_ROW_KERNELS_SETS_MAX, "callers reserve room for so many");

const struct kv_row_kernels *kv_row_kernels_at(uint32_t set_idx)
{
	for (uint32_t i = 0; i < KV_LENGTH(sets); i++) {
		if (sets[i].runs() && set_idx-- == 0)
			return sets[i].kernels;
	}
	return NULL;
}

static const struct kv_row_kernels *choose(void)
{
	const char *wanted = getenv("TQKV_INSTRUCTION_SET");
	const struct kv_row_kernels *kernels, *best = NULL;

	for (uint32_t i = 0; (kernels = kv_row_kernels_at(i)); i++) {
		best = kernels;
		if (wanted && strcmp(wanted, kernels->name) == 0)
			break;
	}
	return best;
}

const struct kv_row_kernels *kv_row_kernels(void)
{
	const struct kv_row_kernels *kernels = atomic_load_explicit(&in_use, memory_order_acquire);

	if (!kernels) {
		kernels = choose();
		atomic_store_explicit(&in_use, kernels, memory_order_release);
	}
	return kernels;
}

void kv_row_kernels_use(const struct kv_row_kernels *kernels)
{
	atomic_store_explicit(&in_use, kernels ? kernels : choose(), memory_order_release);
}
