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

static void add_chunk(struct kv_block_table *table, struct kv_table_arena *arena)
{
	const bool is_first = kv_block_table_n_chunks(table) == 0;
	const uint32_t chunk_idx = take_chunk(arena);
	struct kv_table_chunk *chunk = &arena->chunks[chunk_idx];

	chunk->next_idx = CHUNK_NONE;
	chunk->prev_idx = is_first ? CHUNK_NONE : table->tail_idx;
	if (is_first)
		table->head_idx = chunk_idx;
	else
		arena->chunks[table->tail_idx].next_idx = chunk_idx;
	table->tail_idx = chunk_idx;
}

/* ---- a tally counts owners along with the tables that it has walked ---- */

static void count_entry(const struct kv_block_table *table, struct kv_block_pool *pool, uint32_t entry_idx,
	uint32_t block_idx, uint32_t n)
{
	if (entry_idx >= kv_block_table_n_counted(table, pool))
		return;
	pool->tally->owners[block_idx] += n;
	pool->tally->pins[block_idx] += table->is_pinned ? n : 0;
}

/* An entry came, or went. */
static inline void entry_begins(const struct kv_block_table *table, struct kv_block_pool *pool,
	uint32_t entry_idx, uint32_t block_idx)
{
	if (pool->tally)
		count_entry(table, pool, entry_idx, block_idx, 1);
	if (table->is_pinned)
		kv_block_pool_pin(pool, (kv_block_id){ block_idx });
}

static inline void entry_ends(const struct kv_block_table *table, struct kv_block_pool *pool,
	uint32_t entry_idx, uint32_t block_idx)
{
	if (pool->tally)
		count_entry(table, pool, entry_idx, block_idx, UINT32_MAX); /* one less */
	if (table->is_pinned)
		kv_block_pool_unpin(pool, (kv_block_id){ block_idx });
}

/* ---- */

enum kv_status kv_block_table_append(struct kv_block_table *table, struct kv_table_arena *arena,
	struct kv_block_pool *pool, const kv_block_id ids[], uint32_t n_blocks)
{
	if (kv_block_table_chunks_needed(table, n_blocks) > arena->n_chunks_max - arena->n_chunks_used)
		return KV_LIMIT;
	for (uint32_t i = 0; i < n_blocks; i++) {
		const uint32_t entry_idx = table->n_blocks % KV_CHUNK_ENTRIES;

		if (entry_idx == 0)
			add_chunk(table, arena);
		arena->chunks[table->tail_idx].block_idx[entry_idx] = ids[i].idx;
		entry_begins(table, pool, table->n_blocks, ids[i].idx);
		table->n_blocks++;
	}
	return KV_OK;
}

static void drop_tail_chunk(struct kv_block_table *table, struct kv_table_arena *arena)
{
	const uint32_t chunk_idx = table->tail_idx;

	table->tail_idx = arena->chunks[chunk_idx].prev_idx;
	if (table->tail_idx != CHUNK_NONE)
		arena->chunks[table->tail_idx].next_idx = CHUNK_NONE;
	return_chunk(arena, chunk_idx);
}

/* The table ends behind the gap: it ends before it now. */
static void cut_gap(struct kv_block_table *table, struct kv_table_arena *arena)
{
	const uint32_t n_behind = table->gap_end % KV_CHUNK_ENTRIES;

	/* The chunk in which the gap ends goes unless something before the gap lies in it, too. */
	if (n_behind > 0 && table->gap_first <= table->gap_end - n_behind)
		drop_tail_chunk(table, arena);
	table->n_blocks = table->gap_first;
	table->gap_first = table->gap_end = 0;
}

uint32_t kv_block_table_shrink(struct kv_block_table *table, struct kv_table_arena *arena,
	struct kv_block_pool *pool, uint32_t n_blocks, uint32_t n_max)
{
	uint32_t n_cut = 0;

	KV_ASSERT(
		n_blocks <= table->gap_first || n_blocks > table->gap_end || !kv_block_table_has_gap(table));
	while (table->n_blocks > n_blocks) {
		if (kv_block_table_has_gap(table) && table->n_blocks == table->gap_end) {
			cut_gap(table, arena);
			continue;
		}
		if (n_cut == n_max)
			break;

		const struct kv_table_chunk *chunk = &arena->chunks[table->tail_idx];
		const uint32_t entry_idx = --table->n_blocks % KV_CHUNK_ENTRIES;

		entry_ends(table, pool, table->n_blocks, chunk->block_idx[entry_idx]);
		kv_block_pool_disown(pool, (kv_block_id){ chunk->block_idx[entry_idx] });
		n_cut++;
		if (entry_idx == 0)
			drop_tail_chunk(table, arena);
	}
	return n_cut;
}

/* The chunk of entries [64 * chunk_no, ..), from the nearer end: rows are appended at the tail. */
static uint32_t find_chunk(
	const struct kv_block_table *table, const struct kv_table_arena *arena, uint32_t chunk_no)
{
	const uint32_t n_chunks = kv_block_table_n_chunks(table);
	const uint32_t n_gap_chunks = kv_block_table_n_gap_chunks(table);
	uint32_t chunk_idx;

	if (n_gap_chunks > 0 && chunk_no >= table->gap_end / KV_CHUNK_ENTRIES)
		chunk_no -= n_gap_chunks;
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

/* Takes a chunk out of the middle: the last one never lies in a gap. */
static void unlink_chunk(struct kv_block_table *table, struct kv_table_arena *arena, uint32_t chunk_idx)
{
	const struct kv_table_chunk *chunk = &arena->chunks[chunk_idx];

	if (chunk->prev_idx != CHUNK_NONE)
		arena->chunks[chunk->prev_idx].next_idx = chunk->next_idx;
	else
		table->head_idx = chunk->next_idx;
	arena->chunks[chunk->next_idx].prev_idx = chunk->prev_idx;
	return_chunk(arena, chunk_idx);
}

uint32_t kv_block_table_open_gap(struct kv_block_table *table, struct kv_table_arena *arena,
	struct kv_block_pool *pool, uint32_t first, uint32_t end, uint32_t n_max)
{
	uint32_t n_freed = 0, chunk_idx;

	KV_ASSERT(end < table->n_blocks);
	if (!kv_block_table_has_gap(table))
		table->gap_first = table->gap_end = first;
	KV_ASSERT(table->gap_first == first);
	if (table->gap_end >= end || n_max == 0)
		return 0;
	chunk_idx = find_chunk(table, arena, table->gap_end / KV_CHUNK_ENTRIES);
	while (table->gap_end < end && n_freed < n_max) {
		struct kv_table_chunk *chunk = &arena->chunks[chunk_idx];
		const uint32_t next_idx = chunk->next_idx;
		uint32_t *entry = &chunk->block_idx[table->gap_end % KV_CHUNK_ENTRIES];

		entry_ends(table, pool, table->gap_end, *entry);
		kv_block_pool_disown(pool, (kv_block_id){ *entry });
		*entry = KV_BLOCK_NONE;
		n_freed++;
		if (++table->gap_end % KV_CHUNK_ENTRIES > 0)
			continue;
		if (table->gap_first <= table->gap_end - KV_CHUNK_ENTRIES)
			unlink_chunk(table, arena, chunk_idx);
		chunk_idx = next_idx;
	}
	return n_freed;
}

/* Entries that chunks hold, in their order. */
static void copy_run(const struct kv_block_table *table, const struct kv_table_arena *arena, uint32_t first,
	uint32_t n, uint32_t out[])
{
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

void kv_block_table_replace(const struct kv_block_table *table, struct kv_table_arena *arena,
	struct kv_block_pool *pool, uint32_t entry_idx, kv_block_id id)
{
	KV_ASSERT(entry_idx < table->n_blocks);

	uint32_t *entry = &arena->chunks[find_chunk(table, arena, entry_idx / KV_CHUNK_ENTRIES)]
				   .block_idx[entry_idx % KV_CHUNK_ENTRIES];

	entry_ends(table, pool, entry_idx, *entry);
	*entry = id.idx;
	entry_begins(table, pool, entry_idx, id.idx);
}

void kv_block_table_copy(const struct kv_block_table *table, const struct kv_table_arena *arena,
	uint32_t first, uint32_t n, uint32_t out[])
{
	if (n == 0)
		return;
	KV_ASSERT(first < table->n_blocks);
	KV_ASSERT(n <= table->n_blocks - first);
	while (n > 0) {
		const bool is_gap = first >= table->gap_first && first < table->gap_end;
		const uint32_t bound = is_gap                                       ? table->gap_end
			: first < table->gap_first && kv_block_table_has_gap(table) ? table->gap_first
										    : first + n;
		const uint32_t n_here = bound - first < n ? bound - first : n;

		if (is_gap)
			memset(out, 0xFF, n_here * sizeof(out[0])); /* KV_BLOCK_NONE */
		else
			copy_run(table, arena, first, n_here, out);
		first += n_here;
		out += n_here;
		n -= n_here;
	}
}

void kv_block_table_pin(struct kv_block_table *table, const struct kv_table_arena *arena,
	struct kv_block_pool *pool, bool is_pinned)
{
	uint32_t entries[KV_CHUNK_ENTRIES], n;

	KV_ASSERT(table->is_pinned != is_pinned);
	for (uint32_t first = 0; first < table->n_blocks; first += n) {
		const uint32_t n_counted = pool->tally ? kv_block_table_n_counted(table, pool) : 0;

		if (first >= table->gap_first && first < table->gap_end) {
			n = table->gap_end - first;
			continue;
		}

		const bool is_before = first < table->gap_first && kv_block_table_has_gap(table);
		const uint32_t n_left = (is_before ? table->gap_first : table->n_blocks) - first;

		n = n_left < KV_CHUNK_ENTRIES ? n_left : KV_CHUNK_ENTRIES;
		kv_block_table_copy(table, arena, first, n, entries);
		for (uint32_t i = 0; i < n; i++) {
			if (first + i < n_counted)
				pool->tally->pins[entries[i]] += is_pinned ? 1 : UINT32_MAX;
			if (is_pinned)
				kv_block_pool_pin(pool, (kv_block_id){ entries[i] });
			else
				kv_block_pool_unpin(pool, (kv_block_id){ entries[i] });
		}
	}
	table->is_pinned = is_pinned;
}

void kv_block_table_append_gap(struct kv_block_table *table, struct kv_table_arena *arena, uint32_t n_entries)
{
	const uint32_t end = table->n_blocks + n_entries;

	table->gap_first = table->gap_end = table->n_blocks;
	while (table->n_blocks < end) {
		const uint32_t entry_idx = table->n_blocks % KV_CHUNK_ENTRIES;
		const uint32_t n_left = end - table->n_blocks;
		const uint32_t n_here =
			n_left < KV_CHUNK_ENTRIES - entry_idx ? n_left : KV_CHUNK_ENTRIES - entry_idx;

		/* A chunk that lies in the gap as a whole is not there. */
		if (entry_idx == 0 && n_here < KV_CHUNK_ENTRIES)
			add_chunk(table, arena);
		if (n_here < KV_CHUNK_ENTRIES)
			memset(&arena->chunks[table->tail_idx].block_idx[entry_idx], 0xFF,
				n_here * sizeof(uint32_t)); /* KV_BLOCK_NONE */
		table->n_blocks += n_here;
		table->gap_end = table->n_blocks;
	}
}

uint32_t kv_block_table_chunks_shared(uint32_t gap_first, uint32_t gap_end, uint32_t n_blocks)
{
	const struct kv_block_table table = {
		.n_blocks = n_blocks, .gap_first = gap_first, .gap_end = gap_end
	};

	return kv_block_table_n_chunks(&table);
}

/* Appends entries [first, end) of `from`. */
static void share_run(struct kv_block_table *table, const struct kv_block_table *from,
	struct kv_table_arena *arena, struct kv_block_pool *pool, uint32_t first, uint32_t end)
{
	while (first < end) {
		const uint32_t n = end - first < KV_CHUNK_ENTRIES ? end - first : KV_CHUNK_ENTRIES;
		uint32_t entries[KV_CHUNK_ENTRIES];
		kv_block_id ids[KV_CHUNK_ENTRIES];

		kv_block_table_copy(from, arena, first, n, entries);
		for (uint32_t i = 0; i < n; i++) {
			ids[i] = (kv_block_id){ entries[i] };
			kv_block_pool_own(pool, ids[i]);
		}

		const enum kv_status status = kv_block_table_append(table, arena, pool, ids, n);

		KV_ASSERT(status == KV_OK);
		first += n;
	}
}

void kv_block_table_share(struct kv_block_table *table, const struct kv_block_table *from,
	struct kv_table_arena *arena, struct kv_block_pool *pool, uint32_t gap_first, uint32_t gap_end,
	uint32_t n_blocks)
{
	const bool has_gap = gap_end > gap_first;

	KV_ASSERT(table->n_blocks == 0);
	KV_ASSERT(n_blocks <= from->n_blocks);
	KV_ASSERT(!has_gap || n_blocks > gap_end);
	share_run(table, from, arena, pool, 0, has_gap ? gap_first : n_blocks);
	if (!has_gap)
		return;
	kv_block_table_append_gap(table, arena, gap_end - gap_first);
	share_run(table, from, arena, pool, gap_end, n_blocks);
}
