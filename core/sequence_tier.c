/*
 * Sequences leave their blocks and come back.
 *
 * RESIDENT -> SPILLING -> SPILLED -> FETCHING -> RESIDENT, or back, or BROKEN. While something is moved,
 * whoever moves it holds the sequence as an item does, so that the object stays although its session may be
 * closed. What is spilled has no blocks: its rows are in no sum, its tables are cut like any that is too
 * long. Its lengths stay as they are, that of its exact window included, because they say what is in the
 * image.
 */
#include "core/domain_internal.h"
#include "core/tier.h"

static void hold(struct kv_sequence *sequence)
{
	KV_ASSERT(!sequence->is_held);
	sequence->is_held = true;
	sequence->n_items++;
}

static void let_go(struct kv_sequence *sequence)
{
	KV_ASSERT(sequence->is_held);
	sequence->is_held = false;
	sequence->n_items--;
	if (!sequence->is_zombie)
		kv_sequence_rest(sequence);
	if (sequence->is_zombie && sequence->n_items == 0 && kv_sequence_n_blocks(sequence) == 0)
		kv_sequence_recycle(sequence);
}

static void give_image(struct kv_sequence *sequence)
{
	sequence->pool->n_tier_pages -= sequence->image.tier ? sequence->image.n_pages : 0;
	kv_tier_give(&sequence->image);
}

/* Its rows are in an image, or are not any more. */
static void count_spilled(struct kv_sequence *sequence, bool is_spilled)
{
	struct kv_pool *pool = sequence->pool;

	if (is_spilled) {
		pool->n_spilled++;
		sequence->n_spilled_tokens = kv_least_length(sequence->committed, 0, pool->spec->n_layers);
		pool->n_spilled_tokens += sequence->n_spilled_tokens;
	} else {
		pool->n_spilled--;
		pool->n_spilled_tokens -= sequence->n_spilled_tokens;
		sequence->n_spilled_tokens = 0;
	}
}

/* Its rows begin or end to count. */
static void count_rows(struct kv_sequence *sequence, bool is_more)
{
	struct kv_pool *pool = sequence->pool;
	struct kv_session_slot *slot = kv_slot_of(sequence->session);

	for (uint32_t l = 0; l < pool->spec->n_layers; l++) {
		const uint64_t n = kv_sequence_n_held(sequence, l);

		slot->layer_tokens[l] += is_more ? n : -n;
		pool->layer_tokens[l] += is_more ? n : -n;
	}
}

uint32_t kv_sequence_n_entries(const struct kv_sequence *sequence, uint32_t group_idx)
{
	const struct kv_pool_spec *spec = sequence->pool->spec;
	uint32_t n = 0;

	for (uint32_t l = 0; l < spec->n_layers; l++) {
		const uint32_t n_entries = kv_div_up_u32(sequence->committed[l], spec->block_size);

		if (spec->layers[l].group_idx == group_idx && n_entries > n)
			n = n_entries;
	}
	return n;
}

bool kv_sequence_has_entry(const struct kv_sequence *sequence, uint32_t group_idx, uint32_t entry_idx)
{
	return entry_idx < sequence->pool->spec->group_sink_blocks[group_idx] ||
		entry_idx >= sequence->n_gone[group_idx];
}

void kv_sequence_entry_rows(
	const struct kv_sequence *sequence, uint32_t group_idx, uint32_t entry_idx, uint8_t n_rows[])
{
	const struct kv_pool_spec *spec = sequence->pool->spec;
	const uint64_t token_first = (uint64_t)entry_idx * spec->block_size;
	uint32_t at = 0;

	for (uint32_t l = 0; l < spec->n_layers; l++) {
		if (spec->layers[l].group_idx != group_idx)
			continue;
		const uint64_t n =
			sequence->committed[l] > token_first ? sequence->committed[l] - token_first : 0;

		n_rows[at++] = (uint8_t)(n < spec->block_size ? n : spec->block_size);
	}
}

bool kv_sequence_may_spill(const struct kv_sequence *sequence)
{
	/* Which of the rows of a client's own tables mean something, nobody here knows: they stay. */
	return !sequence->is_tables && sequence->residence == KV_RESIDENT && sequence->n_items == 0 &&
		!sequence->is_evicted && kv_sequence_is_live(sequence) &&
		kv_sequence_n_blocks(sequence) > 0 && !kv_list_is_linked(&sequence->in_surplus);
}

void kv_sequence_spill_begin(struct kv_sequence *sequence, const struct kv_tier_image *image)
{
	KV_ASSERT(kv_sequence_may_spill(sequence));
	kv_sequence_wake(sequence);
	sequence->residence = KV_SPILLING;
	sequence->image = *image;
	sequence->pool->n_tier_pages += image->n_pages;
	sequence->spill_ns = sequence->used_ns;
	hold(sequence);
}

bool kv_sequence_spill_is_wanted(const struct kv_sequence *sequence)
{
	return kv_sequence_is_live(sequence) && sequence->n_items == 1 &&
		sequence->used_ns == sequence->spill_ns;
}

void kv_sequence_spill_end(struct kv_sequence *sequence, bool is_stored)
{
	KV_ASSERT(sequence->residence == KV_SPILLING);
	if (is_stored && kv_sequence_spill_is_wanted(sequence)) {
		const uint64_t n_exact_rows = kv_sequence_n_exact_rows(sequence);

		count_rows(sequence, false);
		sequence->residence = KV_SPILLED;
		kv_sequence_count_exact(sequence, n_exact_rows);
		count_spilled(sequence, true);
		kv_sequence_fit_tables(sequence);
	} else {
		sequence->residence = KV_RESIDENT;
		give_image(sequence);
	}
	let_go(sequence);
}

/* Blocks and chunks that its tables will have; without ring blocks it would not decode to the same bits. */
static enum kv_status check_room(const struct kv_sequence *sequence, uint32_t n_blocks[KV_TABLES_MAX])
{
	struct kv_pool *pool = sequence->pool;
	const uint32_t n_groups = pool->spec->n_groups, n_ring = kv_sequence_ring_entries(sequence);
	const uint64_t ring_bytes = n_ring > 0 ? n_ring * pool->blocks[n_groups].block_bytes : 0;
	uint64_t n_chunks = kv_block_table_chunks_shared(0, 0, n_ring);

	n_blocks[n_groups] = n_ring;
	for (uint32_t g = 0; g < pool->spec->n_groups; g++) {
		const uint32_t n_entries = kv_sequence_n_entries(sequence, g), n_gone = sequence->n_gone[g];
		const uint32_t n_kept = n_gone > 0 ? pool->spec->group_sink_blocks[g] : 0;

		n_blocks[g] = n_entries - (n_gone > 0 ? n_gone - n_kept : 0);
		n_chunks += kv_block_table_chunks_shared(n_kept, n_gone, n_entries);
	}

	const enum kv_status status = kv_payer_make_room(pool, sequence->session->payer,
		kv_reservation_bytes(pool->spec, n_blocks) + ring_bytes, NULL);

	if (status != KV_OK)
		return status;
	for (uint32_t g = 0; g < pool->spec->n_tables; g++) {
		const struct kv_block_counts *counts = &pool->blocks[g].counts;

		if (n_blocks[g] > counts->n_free - counts->n_reserved &&
			!kv_pool_make_room(pool, g, n_blocks[g]))
			return KV_POOL_FULL;
	}
	/* Making room in one group never takes from another. */
	return n_chunks <= pool->tables.n_chunks_max - pool->tables.n_chunks_used ? KV_OK : KV_BUSY_RETRY;
}

static void append_new(struct kv_sequence *sequence, uint32_t g, uint32_t n_blocks)
{
	struct kv_pool *pool = sequence->pool;

	while (n_blocks > 0) {
		kv_block_id ids[KV_CHUNK_ENTRIES];
		const uint32_t n = n_blocks < KV_CHUNK_ENTRIES ? n_blocks : KV_CHUNK_ENTRIES;
		enum kv_status status = kv_block_pool_take(&pool->blocks[g], n, 0, ids);

		KV_ASSERT(status == KV_OK); /* there is room */
		kv_block_pool_mark(
			&pool->blocks[g], ids, n, sequence->session->handle, sequence->session->payer);
		status = kv_block_table_append(&sequence->tables[g], &pool->tables, &pool->blocks[g], ids, n);
		KV_ASSERT(status == KV_OK);
		n_blocks -= n;
	}
}

enum kv_status kv_sequence_fetch_begin(struct kv_sequence *sequence)
{
	const struct kv_pool_spec *spec = sequence->pool->spec;
	uint32_t n_blocks[KV_TABLES_MAX] = { 0 };

	KV_ASSERT(sequence->residence == KV_SPILLED);
	/* Still being cut, or somebody works on it. */
	if (kv_sequence_n_blocks(sequence) > 0 || sequence->is_held)
		return KV_BUSY_RETRY;
	const enum kv_status status = check_room(sequence, n_blocks);

	if (status != KV_OK)
		return status;
	for (uint32_t g = 0; g < spec->n_groups; g++) {
		const uint32_t n_gone = sequence->n_gone[g];
		const uint32_t n_kept = n_gone > 0 ? spec->group_sink_blocks[g] : 0;

		append_new(sequence, g, n_kept);
		if (n_gone > 0)
			kv_block_table_append_gap(
				&sequence->tables[g], &sequence->pool->tables, n_gone - n_kept);
		append_new(sequence, g, n_blocks[g] - n_kept);
	}
	append_new(sequence, spec->n_groups, n_blocks[spec->n_groups]);
	kv_slot_of(sequence->session)->n_chunks += kv_sequence_n_chunks(sequence);
	sequence->residence = KV_FETCHING;
	hold(sequence);
	return KV_OK;
}

void kv_sequence_fetch_end(struct kv_sequence *sequence, bool is_whole)
{
	KV_ASSERT(sequence->residence == KV_FETCHING);
	count_spilled(sequence, false);
	give_image(sequence);
	sequence->residence = is_whole ? KV_RESIDENT : KV_BROKEN;
	for (uint32_t l = 0; !is_whole && l < sequence->pool->spec->n_layers; l++)
		sequence->exact[l] = 0;
	if (kv_sequence_is_live(sequence)) {
		if (is_whole) {
			count_rows(sequence, true);
			kv_sequence_count_exact(sequence, 0);
		} else {
			kv_sequence_fit_tables(sequence);
		}
	}
	let_go(sequence);
}

void kv_sequence_forget_image(struct kv_sequence *sequence)
{
	if (sequence->residence == KV_SPILLED || sequence->residence == KV_FETCHING)
		count_spilled(sequence, false);
	give_image(sequence);
	sequence->residence = KV_RESIDENT;
}

enum kv_status kv_sequence_check_residence(const struct kv_sequence *sequence, bool is_write)
{
	if (sequence->residence == KV_BROKEN)
		return KV_CORRUPT;
	if (sequence->residence == KV_RESIDENT || (sequence->residence == KV_SPILLING && !is_write))
		return KV_OK;
	return KV_BUSY_RETRY;
}

uint32_t kv_sequence_n_touched(const struct kv_pool *pool)
{
	return pool->slab->n_touched;
}

void kv_sequence_count_pages(const struct kv_pool *pool, const struct kv_tier tiers[2], uint64_t n_pages[2])
{
	for (uint32_t i = 0; i < pool->slab->n_touched; i++) {
		const struct kv_sequence *sequence = &pool->slab->sequences[i];

		for (uint32_t t = 0; sequence->pool && t < 2; t++)
			n_pages[t] += sequence->image.tier == &tiers[t] ? sequence->image.n_pages : 0;
	}
}
