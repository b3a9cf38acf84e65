/*
 * Block table: which block holds tokens [i * block_size, (i + 1) * block_size) of a sequence, in one layer
 * group.
 *
 * Entries live in chunks of 64 from an arena of the pool, so tables grow without allocation and their sum is
 * bounded. Chunks are linked both ways: rows are appended, and tables are cut, at the tail. Loop thread only.
 *
 * A table may have one gap: entries whose blocks were given back because no window reaches them any more. All
 * other entries keep their index. Chunks that lie in the gap as a whole are given back, so a table takes
 * memory for the blocks that it has, not for those that it had.
 */
#ifndef CORE_BLOCK_TABLE_H
#define CORE_BLOCK_TABLE_H

#include <stdbool.h>
#include <stdint.h>

#include "core/block_pool.h"
#include "core/checked.h"
#include "core/error.h"
#include "core/pool_spec.h"

#define KV_CHUNK_ENTRIES 64u

struct kv_table_chunk {
	uint32_t next_idx, prev_idx; /* chunk arena indices, UINT32_MAX at the ends */
	uint32_t block_idx[KV_CHUNK_ENTRIES];
};

/* The arena: chunks handed out by index; free chunks are threaded through next_idx. */
struct kv_table_arena {
	struct kv_table_chunk *chunks; /* pages, resident once used */
	uint32_t n_chunks_max, n_chunks_touched, n_chunks_used;
	uint32_t free_idx;
};
KV_MUST_CHECK enum kv_status kv_table_arena_init(
	struct kv_table_arena *arena, uint32_t n_chunks, struct kv_error *err);
void kv_table_arena_finish(struct kv_table_arena *arena);

struct kv_block_table {
	uint32_t n_blocks;           /* entries, those of the gap included */
	uint32_t head_idx, tail_idx; /* chunk arena indices, meaningless when n_blocks is 0 */
	uint32_t gap_first, gap_end; /* entries [gap_first, gap_end) have no block; equal: there is no gap */
	bool is_pinned;              /* its sequence is: so are the blocks */
	/* Private to tally.c: entries before n_counted are counted by the tally with this serial. */
	uint32_t tally_serial, n_counted;
};
/* Entries before this one are counted by the tally that runs; the caller knows that one does. */
static inline uint32_t kv_block_table_n_counted(
	const struct kv_block_table *table, const struct kv_block_pool *pool)
{
	return table->tally_serial == pool->tally->serial ? table->n_counted : 0;
}
static inline bool kv_block_table_has_gap(const struct kv_block_table *table)
{
	return table->gap_end > table->gap_first;
}
/* Blocks that the table owns. */
static inline uint32_t kv_block_table_n_owned(const struct kv_block_table *table)
{
	return table->n_blocks - (table->gap_end - table->gap_first);
}
/* Chunks without an entry outside the gap. */
static inline uint32_t kv_block_table_n_gap_chunks(const struct kv_block_table *table)
{
	const uint32_t first = kv_div_up_u32(table->gap_first, KV_CHUNK_ENTRIES);
	const uint32_t end = table->gap_end / KV_CHUNK_ENTRIES;

	return end > first ? end - first : 0;
}
static inline uint32_t kv_block_table_n_chunks(const struct kv_block_table *table)
{
	return kv_div_up_u32(table->n_blocks, KV_CHUNK_ENTRIES) - kv_block_table_n_gap_chunks(table);
}
/* Chunks that appending n_blocks entries takes from the arena. */
uint32_t kv_block_table_chunks_needed(const struct kv_block_table *table, uint32_t n_blocks);
/* All or nothing: appends ids, or KV_LIMIT when the arena has too few chunks. */
KV_MUST_CHECK enum kv_status kv_block_table_append(struct kv_block_table *table, struct kv_table_arena *arena,
	struct kv_block_pool *pool, const kv_block_id ids[], uint32_t n_blocks);
/*
 * Shortens to n_blocks entries, disowning what is cut off, at most n_max blocks a call (from the end).
 * Returns how many. A gap is cut off whole: n_blocks lies outside of it.
 */
uint32_t kv_block_table_shrink(struct kv_block_table *table, struct kv_table_arena *arena,
	struct kv_block_pool *pool, uint32_t n_blocks, uint32_t n_max);
/*
 * Gives an empty table the first n_blocks entries of `from`, whose blocks have one owner more, except those
 * of [gap_first, gap_end), which lie before the last one and get none. The caller has seen to it that there
 * are chunks_shared() chunks.
 */
uint32_t kv_block_table_chunks_shared(uint32_t gap_first, uint32_t gap_end, uint32_t n_blocks);
void kv_block_table_share(struct kv_block_table *table, const struct kv_block_table *from,
	struct kv_table_arena *arena, struct kv_block_pool *pool, uint32_t gap_first, uint32_t gap_end,
	uint32_t n_blocks);
/*
 * Appends n_entries without a block to a table that has no gap; something else follows. The caller has seen
 * to it that there are chunks.
 */
void kv_block_table_append_gap(
	struct kv_block_table *table, struct kv_table_arena *arena, uint32_t n_entries);
/* Puts another block into an entry that exists; owner counts are the caller's business. */
void kv_block_table_replace(const struct kv_block_table *table, struct kv_table_arena *arena,
	struct kv_block_pool *pool, uint32_t entry_idx, kv_block_id id);
/*
 * Disowns the blocks of entries [first, end), at most n_max a call, from where the gap ends; returns how
 * many. `first` is the same for all calls while there is a gap; the last entry always stays.
 */
uint32_t kv_block_table_open_gap(struct kv_block_table *table, struct kv_table_arena *arena,
	struct kv_block_pool *pool, uint32_t first, uint32_t end, uint32_t n_max);
/* Pins all blocks of the table, and all that come, or ends that; a walk over all entries. */
void kv_block_table_pin(struct kv_block_table *table, const struct kv_table_arena *arena,
	struct kv_block_pool *pool, bool is_pinned);
/* Copies entries [first, first + n) to out; they must exist. KV_BLOCK_NONE in the gap. */
void kv_block_table_copy(const struct kv_block_table *table, const struct kv_table_arena *arena,
	uint32_t first, uint32_t n, uint32_t out[]);

#endif
