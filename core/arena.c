/*
 * The regions, carved and free, lie in one array in order of offset and cover the arena without gaps. No two
 * free ones are neighbours, so n carved ones leave at most n + 1 free ones.
 */
#include "core/arena.h"

#include <stdbool.h>
#include <string.h>

#include "core/checked.h"
#include "core/memory.h"

struct region {
	uint64_t offset, n_bytes;
	bool is_carved;
};

struct kv_arena {
	uint64_t n_bytes;
	uint32_t n_regions, n_carved;
	struct region regions[2 * KV_ARENA_REGIONS_MAX + 1];
};

enum kv_status kv_arena_create(uint64_t n_bytes, struct kv_arena **out, struct kv_error *err)
{
	struct kv_arena *arena = kv_alloc(1, sizeof(*arena));

	if (!arena)
		return kv_fail(err, KV_NO_MEMORY, "arena");
	arena->n_bytes = n_bytes - n_bytes % KV_ARENA_ALIGN;
	if (arena->n_bytes > 0)
		arena->regions[arena->n_regions++] = (struct region){ .n_bytes = arena->n_bytes };
	*out = arena;
	return KV_OK;
}

void kv_arena_destroy(struct kv_arena *arena)
{
	kv_free(arena);
}

/* Makes room for one region at idx. */
static void insert_region(struct kv_arena *arena, uint32_t idx, const struct region *region)
{
	KV_ASSERT(arena->n_regions < KV_LENGTH(arena->regions));
	memmove(&arena->regions[idx + 1], &arena->regions[idx],
		(arena->n_regions - idx) * sizeof(arena->regions[0]));
	arena->regions[idx] = *region;
	arena->n_regions++;
}

static void remove_region(struct kv_arena *arena, uint32_t idx)
{
	arena->n_regions--;
	memmove(&arena->regions[idx], &arena->regions[idx + 1],
		(arena->n_regions - idx) * sizeof(arena->regions[0]));
}

enum kv_status kv_arena_carve(
	struct kv_arena *arena, uint64_t n_bytes, uint64_t *offset, struct kv_error *err)
{
	const uint64_t largest_bytes = kv_arena_largest_free_bytes(arena);

	if (n_bytes > largest_bytes || largest_bytes == 0)
		return kv_fail(err, KV_NO_MEMORY,
			"arena: %llu bytes wanted, %llu of %llu free, %llu in one piece",
			(unsigned long long)n_bytes, (unsigned long long)kv_arena_free_bytes(arena),
			(unsigned long long)arena->n_bytes, (unsigned long long)largest_bytes);
	if (arena->n_carved == KV_ARENA_REGIONS_MAX)
		return kv_fail(err, KV_LIMIT, "arena: %u regions are in use", arena->n_carved);

	/* Cannot overflow: n_bytes fits into a region whose size is a multiple of the unit. */
	const uint64_t carved_bytes = kv_round_up_u64(n_bytes ? n_bytes : 1, KV_ARENA_ALIGN);

	uint32_t idx = 0;

	/* Ends: the largest free region is large enough. */
	while (arena->regions[idx].is_carved || arena->regions[idx].n_bytes < carved_bytes)
		idx++;

	struct region *region = &arena->regions[idx];
	const struct region rest = {
		.offset = region->offset + carved_bytes,
		.n_bytes = region->n_bytes - carved_bytes,
	};

	region->is_carved = true;
	region->n_bytes = carved_bytes;
	arena->n_carved++;
	*offset = region->offset;
	if (rest.n_bytes > 0)
		insert_region(arena, idx + 1, &rest);
	return KV_OK;
}

void kv_arena_return(struct kv_arena *arena, uint64_t offset)
{
	uint32_t idx = 0;

	while (idx < arena->n_regions && arena->regions[idx].offset != offset)
		idx++;
	KV_ASSERT(idx < arena->n_regions);
	KV_ASSERT(arena->regions[idx].is_carved);
	arena->regions[idx].is_carved = false;
	arena->n_carved--;
	if (idx + 1 < arena->n_regions && !arena->regions[idx + 1].is_carved) {
		arena->regions[idx].n_bytes += arena->regions[idx + 1].n_bytes;
		remove_region(arena, idx + 1);
	}
	if (idx > 0 && !arena->regions[idx - 1].is_carved) {
		arena->regions[idx - 1].n_bytes += arena->regions[idx].n_bytes;
		remove_region(arena, idx);
	}
}

uint64_t kv_arena_bytes(const struct kv_arena *arena)
{
	return arena->n_bytes;
}

uint64_t kv_arena_free_bytes(const struct kv_arena *arena)
{
	uint64_t n_bytes = 0;

	for (uint32_t i = 0; i < arena->n_regions; i++) {
		if (!arena->regions[i].is_carved)
			n_bytes += arena->regions[i].n_bytes;
	}
	return n_bytes;
}

uint64_t kv_arena_largest_free_bytes(const struct kv_arena *arena)
{
	uint64_t n_bytes = 0;

	for (uint32_t i = 0; i < arena->n_regions; i++) {
		if (!arena->regions[i].is_carved && arena->regions[i].n_bytes > n_bytes)
			n_bytes = arena->regions[i].n_bytes;
	}
	return n_bytes;
}

uint32_t kv_arena_n_carved(const struct kv_arena *arena)
{
	return arena->n_carved;
}
