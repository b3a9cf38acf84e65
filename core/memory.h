/*
 * The one door to the heap, so that tests can count allocations (none on the data path after start) and let
 * the k-th one fail. Thread-safe. Nothing else in core and server calls malloc.
 */
#ifndef CORE_MEMORY_H
#define CORE_MEMORY_H

#include <stddef.h>
#include <stdint.h>

/* n * size zeroed bytes, or NULL (also on overflow). n or size 0 gives a unique pointer. Freed with
 * kv_free(). */
void *kv_alloc(size_t n, size_t size);
/* A copy of n bytes with a zero byte behind it. */
char *kv_strndup(const char *text, size_t n);
void kv_free(void *ptr);
/*
 * Zeroed pages straight from the system, resident only once touched; for tables whose bound is far above
 * their use. NULL on failure. Unmapped with kv_pages_free() and the same size.
 */
void *kv_pages_alloc(uint64_t n_bytes);
void kv_pages_free(void *ptr, uint64_t n_bytes);
/*
 * Asks for large pages where the system has them: for memory that is gone through again and again. A touched
 * byte then makes a whole large page resident. Nothing happens where it has none.
 */
void kv_pages_prefer_large(void *ptr, uint64_t n_bytes);

/* Number of successful and failed kv_alloc/kv_pages_alloc calls so far. */
uint64_t kv_alloc_count(void);
/* Fault injection: the allocation after `countdown` more fails, once. Negative: never. */
void kv_alloc_fail_after(int64_t countdown);

#endif
