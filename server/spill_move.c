/*
 * One sequence on its way. Its image is its blocks in order of groups and entries, then the exact window of
 * every layer that has one, cut into chunks: as many whole pieces as fit, each chunk beginning on a page of
 * its own. Both directions cut the same way, because only lengths decide. Out: export a chunk, put its pages
 * into the tier. In: get the pages, compare their checksums, import.
 */
#include <string.h>

#include "proto/crc32c.h"
#include "server/spill_internal.h"

/* ---- where pieces lie ---- */

static bool is_exact(const struct kv_sequence *sequence, struct srv_spill_at at)
{
	return at.group_idx == sequence->pool->spec->n_groups;
}

/* From `at` on, the first that there is. */
static struct srv_spill_at settle(const struct kv_sequence *sequence, struct srv_spill_at at)
{
	const struct kv_pool_spec *spec = sequence->pool->spec;

	while (at.group_idx < spec->n_groups) {
		if (at.entry_idx >= kv_sequence_n_entries(sequence, at.group_idx)) {
			at.group_idx++;
			at.entry_idx = 0;
		} else if (!kv_sequence_has_entry(sequence, at.group_idx, at.entry_idx)) {
			at.entry_idx = sequence->n_gone[at.group_idx];
		} else {
			return at;
		}
	}
	if (at.group_idx == spec->n_tables)
		return at;
	while (at.entry_idx < spec->n_layers && sequence->exact[at.entry_idx] == 0)
		at.entry_idx++;
	return at.entry_idx < spec->n_layers ? at : (struct srv_spill_at){ spec->n_tables, 0 };
}

uint64_t srv_spill_piece_bytes_max(const struct kv_pool_spec *spec)
{
	uint64_t most = spec->exact_tokens > 0 ? kv_plan_exact_bytes(spec, 1, spec->exact_tokens) : 0;

	for (uint32_t g = 0; g < spec->n_groups; g++) {
		const uint64_t n_bytes = kv_plan_block_bytes(spec, g, NULL);

		most = n_bytes > most ? n_bytes : most;
	}
	return most;
}

static uint64_t piece_bytes(const struct kv_sequence *sequence, struct srv_spill_at at)
{
	uint8_t n_rows[KV_LAYERS_MAX];

	if (is_exact(sequence, at))
		return kv_plan_exact_bytes(sequence->pool->spec, 1, sequence->exact[at.entry_idx]);
	kv_sequence_entry_rows(sequence, at.group_idx, at.entry_idx, n_rows);
	return kv_plan_block_bytes(sequence->pool->spec, at.group_idx, n_rows);
}

/* Pieces from `first` on that one chunk holds; returns where the next chunk begins. */
static struct srv_spill_at chunk_end(const struct srv_spill *spill, const struct kv_sequence *sequence,
	struct srv_spill_at first, uint64_t *n_bytes)
{
	struct srv_spill_at at = first;

	*n_bytes = 0;
	while (at.group_idx < sequence->pool->spec->n_tables) {
		const uint64_t n = piece_bytes(sequence, at);

		if (*n_bytes > 0 && n > spill->chunk_bytes - *n_bytes)
			break;
		*n_bytes += n;
		at.entry_idx++;
		at = settle(sequence, at);
	}
	return at;
}

static uint32_t pages_of(uint64_t n_bytes)
{
	return (uint32_t)((n_bytes + KV_TIER_PAGE_BYTES - 1) / KV_TIER_PAGE_BYTES);
}

uint32_t srv_spill_n_pages(const struct srv_spill *spill, const struct kv_sequence *sequence)
{
	struct srv_spill_at at = settle(sequence, (struct srv_spill_at){ 0, 0 });
	uint32_t n_pages = 0;

	while (at.group_idx < sequence->pool->spec->n_tables) {
		uint64_t n_bytes;

		at = chunk_end(spill, sequence, at, &n_bytes);
		n_pages += pages_of(n_bytes);
	}
	return n_pages;
}

/* ---- pages ---- */

static bool is_in_file(const struct srv_spill *spill)
{
	return spill->sequence->image.tier == &spill->tiers[1];
}

static uint8_t *chunk_page(const struct srv_spill *spill)
{
	return spill->chunk + (uint64_t)spill->n_pages_done * KV_TIER_PAGE_BYTES;
}

static void fail(struct srv_spill *spill)
{
	spill->has_failed = true;
}

static void post_page(struct srv_spill *spill)
{
	spill->state = SPILL_PAGE;
	spill->file.op = (struct kv_io_file){
		.kind = spill->is_out ? KV_IO_FILE_WRITE : KV_IO_FILE_READ,
		.fd = spill->fd,
		.bytes = chunk_page(spill) + spill->page_bytes_done,
		.n_bytes = KV_TIER_PAGE_BYTES - spill->page_bytes_done,
		.offset = (uint64_t)spill->page_idx * KV_TIER_PAGE_BYTES + spill->page_bytes_done,
	};
	spill->server->io->ops->file_post(spill->server->io, &spill->file.op);
}

/* One page is there, in the tier or in the chunk. */
static void count_page(struct srv_spill *spill)
{
	struct kv_tier *tier = spill->sequence->image.tier;
	const uint32_t crc = kvp_crc32c(0, chunk_page(spill), KV_TIER_PAGE_BYTES);

	if (spill->is_out)
		tier->crc[spill->page_idx] = crc;
	else if (tier->crc[spill->page_idx] != crc)
		fail(spill);
	spill->page_idx = tier->next[spill->page_idx];
	spill->n_pages_done++;
	spill->page_bytes_done = 0;
}

static void copy_page(struct srv_spill *spill)
{
	uint8_t *page = spill->host + (uint64_t)spill->page_idx * KV_TIER_PAGE_BYTES;

	if (spill->is_out)
		memcpy(page, chunk_page(spill), KV_TIER_PAGE_BYTES);
	else
		memcpy(chunk_page(spill), page, KV_TIER_PAGE_BYTES);
	count_page(spill);
}

/* True once all pages of the chunk are through; false: a file operation is posted. */
static bool move_pages(struct srv_spill *spill)
{
	while (spill->n_pages_done < pages_of(spill->used_bytes) && !spill->has_failed) {
		if (is_in_file(spill)) {
			post_page(spill);
			return false;
		}
		copy_page(spill);
	}
	return true;
}

/* ---- a job ---- */

static void end_job(struct srv_spill *spill)
{
	struct srv_counters *counters = &spill->server->counters;
	struct kv_sequence *sequence = spill->sequence;
	const bool is_whole = !spill->has_failed;

	spill->state = SPILL_IDLE;
	spill->mover.lane = NULL;
	spill->sequence = NULL;
	kv_list_remove(&sequence->in_moves);
	if (spill->is_out) {
		if (!is_whole)
			counters->spills_rejected_io++;
		else if (!kv_sequence_spill_is_wanted(sequence))
			counters->spills_rejected_used++;
		else
			counters->spills++;
		kv_sequence_spill_end(sequence, is_whole);
	} else {
		counters->fetches += is_whole;
		counters->fetches_failed += !is_whole;
		if (!is_whole)
			srv_log(SRV_LOG_ERROR,
				"sequence %llu of pool %s is lost: what came back from its tier is damaged",
				(unsigned long long)sequence->id, sequence->pool->spec->name);
		sequence->fetched_ns = spill->server->now_ns;
		kv_sequence_fetch_end(sequence, is_whole);
	}
}

/* Nobody wants it any more, or it cannot go on. */
static bool is_over(const struct srv_spill *spill)
{
	if (spill->has_failed)
		return true;
	if (spill->is_out)
		return !kv_sequence_spill_is_wanted(spill->sequence);
	return spill->sequence->is_zombie || spill->sequence->session->state != KV_SESSION_OPEN;
}

/* Goes on until a batch or a file operation is needed. */
static void step(struct srv_spill *spill)
{
	for (;;) {
		if (is_over(spill) || srv_spill_is_end(spill, spill->first)) {
			if (!srv_spill_is_end(spill, spill->first) && !spill->is_out)
				fail(spill);
			end_job(spill);
			return;
		}
		const bool is_moved = spill->at.group_idx == spill->end.group_idx &&
			spill->at.entry_idx == spill->end.entry_idx;

		/* In: pages first. Out: blocks first. */
		if ((spill->is_out ? is_moved : true) && !move_pages(spill))
			return; /* resumed by the file operation */
		if (spill->has_failed)
			continue;
		if (!is_moved) {
			spill->state = SPILL_MOVE;
			spill->mover.lane = &spill->server->lanes[spill->sequence->pool->pool_idx];
			return; /* resumed when the lane seals its next batch */
		}
		spill->first = spill->at = spill->end;
		spill->end = chunk_end(spill, spill->sequence, spill->first, &spill->used_bytes);
		spill->moved_bytes = 0;
		spill->n_pages_done = spill->page_bytes_done = 0;
	}
}

void srv_spill_begin_job(struct srv_spill *spill)
{
	struct kv_list_node *node = kv_list_first(&spill->jobs);

	if (spill->state != SPILL_IDLE || !node)
		return;
	spill->sequence = kv_container_of(node, struct kv_sequence, in_moves);
	spill->is_out = spill->sequence->residence == KV_SPILLING;
	spill->has_failed = false;
	spill->page_idx = spill->sequence->image.first;
	spill->first = spill->at = settle(spill->sequence, (struct srv_spill_at){ 0, 0 });
	spill->end = chunk_end(spill, spill->sequence, spill->first, &spill->used_bytes);
	spill->moved_bytes = 0;
	spill->n_pages_done = spill->page_bytes_done = 0;
	step(spill);
}

void srv_spill_page_done(struct srv_spill *spill)
{
	const int64_t result = spill->file.op.result;

	if (result <= 0) {
		fail(spill);
	} else {
		spill->page_bytes_done += (uint32_t)result;
		if (spill->page_bytes_done < KV_TIER_PAGE_BYTES) {
			post_page(spill);
			return;
		}
		count_page(spill);
	}
	step(spill);
}

/* ---- batches ---- */

static bool add_block(const struct srv_spill *spill, struct kv_plan *plan)
{
	const struct kv_sequence *sequence = spill->sequence;
	const struct kv_pool *pool = sequence->pool;
	const uint32_t g = spill->at.group_idx;
	uint8_t n_rows[KV_LAYERS_MAX];
	uint32_t block_idx;

	kv_sequence_entry_rows(sequence, g, spill->at.entry_idx, n_rows);
	kv_block_table_copy(&sequence->tables[g], &pool->tables, spill->at.entry_idx, 1, &block_idx);
	return kv_plan_add_move(
		plan, g, block_idx, n_rows, !spill->is_out, spill->chunk + spill->moved_bytes);
}

/* As it lies there: nobody writes to the sequence while it moves. */
static bool add_exact(const struct srv_spill *spill, struct kv_plan *plan)
{
	const struct kv_sequence *sequence = spill->sequence;
	const uint32_t l = spill->at.entry_idx, n_tokens = sequence->exact[l];

	if (!kv_plan_has_room_exact(plan, 1))
		return false;
	kv_plan_add_exact_move(plan, sequence, l, 1, sequence->committed[l] - n_tokens, n_tokens,
		!spill->is_out, spill->chunk + spill->moved_bytes);
	return true;
}

static bool add_piece(struct srv_spill *spill, struct kv_plan *plan)
{
	const struct kv_sequence *sequence = spill->sequence;

	if (!(is_exact(sequence, spill->at) ? add_exact(spill, plan) : add_block(spill, plan)))
		return false;
	spill->moved_bytes += piece_bytes(sequence, spill->at);
	spill->at.entry_idx++;
	spill->at = settle(sequence, spill->at);
	return true;
}

void srv_spill_on_seal(struct srv_mover *mover, struct kv_plan *plan)
{
	struct srv_spill *spill = kv_container_of(mover, struct srv_spill, mover);

	mover->lane = NULL;
	if (is_over(spill)) {
		step(spill);
		return;
	}
	while ((spill->at.group_idx != spill->end.group_idx || spill->at.entry_idx != spill->end.entry_idx) &&
		add_piece(spill, plan))
		;
}

void srv_spill_on_moved(struct srv_mover *mover, enum kv_status status, const struct kv_result *result)
{
	struct srv_spill *spill = kv_container_of(mover, struct srv_spill, mover);

	(void)result;
	if (status != KV_OK)
		fail(spill);
	step(spill);
}
