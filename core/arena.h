/*
 * Arena: which part of the backend's memory belongs to which pool.
 *
 * Offsets only; the memory itself is the backend's. Carving takes the first free region that is large enough,
 * so that the high end stays whole; returning joins neighbours. All offsets and sizes are multiples of
 * KV_ARENA_ALIGN. The number of regions is bounded. Allocates only in create. Loop thread only.
 */
#ifndef CORE_ARENA_H
#define CORE_ARENA_H

#include <stdint.h>

#include "core/error.h"

#define KV_ARENA_ALIGN       4096u
#define KV_ARENA_REGIONS_MAX 80u /* carved at a time: KV_POOLS_MAX pools and some for the server itself */

struct kv_arena;

/* n_bytes is rounded down to KV_ARENA_ALIGN. */
KV_MUST_CHECK enum kv_status kv_arena_create(uint64_t n_bytes, struct kv_arena **out, struct kv_error *err);
void kv_arena_destroy(struct kv_arena *arena); /* NULL allowed */
/*
 * n_bytes (at least one, rounded up) from *offset on. NO_MEMORY says how much was wanted, is free, and is
 * free in one piece; LIMIT when KV_ARENA_REGIONS_MAX regions are carved.
 */
KV_MUST_CHECK enum kv_status kv_arena_carve(
	struct kv_arena *arena, uint64_t n_bytes, uint64_t *offset, struct kv_error *err);
/* Gives back what kv_arena_carve() gave at this offset. */
void kv_arena_return(struct kv_arena *arena, uint64_t offset);
uint64_t kv_arena_bytes(const struct kv_arena *arena);
uint64_t kv_arena_free_bytes(const struct kv_arena *arena);
/* The largest single piece. */
uint64_t kv_arena_largest_free_bytes(const struct kv_arena *arena);
uint32_t kv_arena_n_carved(const struct kv_arena *arena);

#endif
