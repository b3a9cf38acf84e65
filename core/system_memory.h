/*
 * How much memory this process may still take: what the kernel calls available, or less where a control group
 * of the process (a container) sets a limit. For sizing the arena at start; the answer is old as soon as it
 * is given. Any thread; no heap.
 */
#ifndef CORE_SYSTEM_MEMORY_H
#define CORE_SYSTEM_MEMORY_H

#include <stdbool.h>
#include <stdint.h>

/* False when the system does not say. */
bool kv_system_memory_available(uint64_t *n_bytes);
/* The same with /proc and /sys below `root` ("" is the system's own), for tests. */
bool kv_system_memory_available_below(const char *root, uint64_t *n_bytes);

#endif
