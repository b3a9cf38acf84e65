#include "core/block_table.h"

#include <string.h>

#include "core/checked.h"
#include "core/memory.h"

#define CHUNK_NONE UINT32_MAX

enum kv_status kv_table_arena_init(struct kv_table_arena *arena, uint32_t n_chunks, struct kv_error *err)
{
	*arena = (struct kv_table_arena){ .n_chunks_max = n_chunks, .free_idx = CHUNK_NONE };
	arena->chunks = kv_pages_alloc(sizeof(*arena->chunks) * (uint64_t)n_chunks);
	if (!arena->chunks)
		return kv_fail(err, KV_NO_MEMORY, "block tables of %u chunks", n_chunks);
	return KV_OK;
}

void kv_table_arena_finish(struct kv_table_arena *arena)
{
	kv_pages_free(arena->chunks, sizeof(*arena->chunks) * (uint64_t)arena->n_chunks_max);
	*arena = (struct kv_table_arena){ 0 };
}

/* The caller has checked that there is one. */
static uint32_t take_chunk(struct kv_table_arena *arena)
{
	uint32_t chunk_idx = arena->free_idx;

	KV_ASSERT(arena->n_chunks_used < arena->n_chunks_max);
	if (chunk_idx != CHUNK_NONE)
		arena->free_idx = arena->chunks[chunk_idx].next_idx;
	else
		chunk_idx = arena->n_chunks_touched++;
	arena->n_chunks_used++;
	return chunk_idx;
}

static void return_chunk(struct kv_table_arena *arena, uint32_t chunk_idx)
{
	arena->chunks[chunk_idx].next_idx = arena->free_idx;
	arena->free_idx = chunk_idx;
	arena->n_chunks_used--;
}

uint32_t kv_block_table_chunks_needed(const struct kv_block_table *table, uint32_t n_blocks)
{
	const uint64_t n_after = (uint64_t)table->n_blocks + n_blocks;
	const uint64_t n_chunks_after = (n_after + KV_CHUNK_ENTRIES - 1) / KV_CHUNK_ENTRIES;

	return (uint32_t)(n_chunks_after - kv_block_table_n_chunks(table));
}

enum kv_status kv_block_table_append(struct kv_block_table *table, struct kv_table_arena *arena,
	const kv_block_id ids[], uint32_t n_blocks)
{
	if (kv_block_table_chunks_needed(table, n_blocks) > arena->n_chunks_max - arena->n_chunks_used)
		return KV_LIMIT;
	for (uint32_t i = 0; i < n_blocks; i++) {
		const uint32_t entry_idx = table->n_blocks % KV_CHUNK_ENTRIES;

		if (entry_idx == 0) {
			const uint32_t chunk_idx = take_chunk(arena);
			struct kv_table_chunk *chunk = &arena->chunks[chunk_idx];

			chunk->next_idx = CHUNK_NONE;
			chunk->prev_idx = table->n_blocks > 0 ? table->tail_idx : CHUNK_NONE;
			if (table->n_blocks > 0)
				arena->chunks[table->tail_idx].next_idx = chunk_idx;
			else
				table->head_idx = chunk_idx;
			table->tail_idx = chunk_idx;
		}
		arena->chunks[table->tail_idx].block_idx[entry_idx] = ids[i].idx;
		table->n_blocks++;
	}
	return KV_OK;
}

uint32_t kv_block_table_shrink(struct kv_block_table *table, struct kv_table_arena *arena,
	struct kv_block_pool *pool, uint32_t n_blocks, uint32_t n_max)
{
	uint32_t n_cut = 0;

	while (table->n_blocks > n_blocks && n_cut < n_max) {
		const uint32_t chunk_idx = table->tail_idx;
		struct kv_table_chunk *chunk = &arena->chunks[chunk_idx];
		const uint32_t entry_idx = --table->n_blocks % KV_CHUNK_ENTRIES;

		kv_block_pool_disown(pool, (kv_block_id){ chunk->block_idx[entry_idx] });
		n_cut++;
		if (entry_idx == 0) {
			table->tail_idx = chunk->prev_idx;
			if (table->n_blocks > 0)
				arena->chunks[table->tail_idx].next_idx = CHUNK_NONE;
			return_chunk(arena, chunk_idx);
		}
	}
	return n_cut;
}

enum kv_status kv_block_table_share(struct kv_block_table *table, const struct kv_block_table *from,
	struct kv_table_arena *arena, struct kv_block_pool *pool, uint32_t n_blocks)
{
	KV_ASSERT(table->n_blocks == 0);
	KV_ASSERT(n_blocks <= from->n_blocks);
	if (kv_block_table_chunks_needed(table, n_blocks) > arena->n_chunks_max - arena->n_chunks_used)
		return KV_LIMIT;
	for (uint32_t chunk_idx = from->head_idx; table->n_blocks < n_blocks;
		chunk_idx = arena->chunks[chunk_idx].next_idx) {
		const uint32_t n_left = n_blocks - table->n_blocks;
		const uint32_t n = n_left < KV_CHUNK_ENTRIES ? n_left : KV_CHUNK_ENTRIES;
		kv_block_id ids[KV_CHUNK_ENTRIES];

		for (uint32_t i = 0; i < n; i++) {
			ids[i] = (kv_block_id){ arena->chunks[chunk_idx].block_idx[i] };
			kv_block_pool_own(pool, ids[i]);
		}

		const enum kv_status status = kv_block_table_append(table, arena, ids, n);

		KV_ASSERT(status == KV_OK);
	}
	return KV_OK;
}

/* The chunk_no-th chunk of the table, from the nearer end: rows are appended at the tail. */
static uint32_t find_chunk(
	const struct kv_block_table *table, const struct kv_table_arena *arena, uint32_t chunk_no)
{
	const uint32_t n_chunks = kv_block_table_n_chunks(table);
	uint32_t chunk_idx;

	if (chunk_no < n_chunks / 2) {
		chunk_idx = table->head_idx;
		for (uint32_t i = 0; i < chunk_no; i++)
			chunk_idx = arena->chunks[chunk_idx].next_idx;
	} else {
		chunk_idx = table->tail_idx;
		for (uint32_t i = n_chunks - 1; i > chunk_no; i--)
			chunk_idx = arena->chunks[chunk_idx].prev_idx;
	}
	return chunk_idx;
}

void kv_block_table_copy(const struct kv_block_table *table, const struct kv_table_arena *arena,
	uint32_t first, uint32_t n, uint32_t out[])
{
	if (n == 0)
		return;
	KV_ASSERT(first < table->n_blocks);
	KV_ASSERT(n <= table->n_blocks - first);

	uint32_t chunk_idx = find_chunk(table, arena, first / KV_CHUNK_ENTRIES);
	uint32_t entry_idx = first % KV_CHUNK_ENTRIES;

	for (;;) {
		const struct kv_table_chunk *chunk = &arena->chunks[chunk_idx];
		const uint32_t n_left = KV_CHUNK_ENTRIES - entry_idx;
		const uint32_t n_here = n < n_left ? n : n_left;

		memcpy(out, &chunk->block_idx[entry_idx], n_here * sizeof(out[0]));
		n -= n_here;
		if (n == 0)
			return;
		out += n_here;
		entry_idx = 0;
		chunk_idx = chunk->next_idx;
	}
}

void kv_block_table_replace(
	const struct kv_block_table *table, struct kv_table_arena *arena, uint32_t entry_idx, kv_block_id id)
{
	KV_ASSERT(entry_idx < table->n_blocks);
	arena->chunks[find_chunk(table, arena, entry_idx / KV_CHUNK_ENTRIES)]
		.block_idx[entry_idx % KV_CHUNK_ENTRIES] = id.idx;
}
