#include "core/memory.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "core/checked.h"

static atomic_uint_fast64_t n_allocations;
static atomic_int_fast64_t fail_countdown = -1;

/* True once: when the countdown that a test has set runs out. */
static bool must_fail(void)
{
	atomic_fetch_add_explicit(&n_allocations, 1, memory_order_relaxed);
	if (atomic_load_explicit(&fail_countdown, memory_order_relaxed) < 0)
		return false;
	return atomic_fetch_sub_explicit(&fail_countdown, 1, memory_order_relaxed) == 0;
}

void *kv_alloc(size_t n, size_t size)
{
	if (must_fail())
		return NULL;
	if (n == 0 || size == 0)
		return calloc(1, 1);
	if (n > PTRDIFF_MAX / size)
		return NULL; /* calloc() would notice, too, but sanitizers stop there */
	return calloc(n, size);
}

char *kv_strndup(const char *text, size_t n)
{
	char *copy = kv_alloc(n + 1, 1);

	if (copy)
		memcpy(copy, text, n);
	return copy;
}

void kv_free(void *ptr)
{
	free(ptr);
}

void *kv_pages_alloc(uint64_t n_bytes)
{
	if (must_fail() || n_bytes == 0 || n_bytes > SIZE_MAX)
		return NULL;
	void *ptr = mmap(NULL, (size_t)n_bytes, PROT_READ | PROT_WRITE,
		MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	return ptr == MAP_FAILED ? NULL : ptr;
}

void kv_pages_free(void *ptr, uint64_t n_bytes)
{
	if (ptr)
		munmap(ptr, (size_t)n_bytes);
}

void kv_pages_prefer_large(void *ptr, uint64_t n_bytes)
{
	(void)madvise(ptr, (size_t)n_bytes, MADV_HUGEPAGE);
}

uint64_t kv_alloc_count(void)
{
	return atomic_load_explicit(&n_allocations, memory_order_relaxed);
}

void kv_alloc_fail_after(int64_t countdown)
{
	atomic_store_explicit(&fail_countdown, countdown, memory_order_relaxed);
}
