/*
 * What is compared block by block: a quiet moment, each block's record against its count, numbers by state,
 * the list of free blocks.
 */
#include <string.h>

#include "core/backend.h"
#include "core/prefix_internal.h"
#include "core/tally_internal.h"

static enum kv_status found_block(struct kv_tally_step *step, uint32_t g, uint32_t idx, const char *what,
	uint64_t recorded, uint64_t counted)
{
	const uint64_t session = step->tally->pool->blocks[g].taken_by[idx];

	(void)kv_fail(step->err, KV_INTERNAL,
		"audit: group %u, block %u: %s: recorded %llu, counted %llu; last taken by session %016llx",
		g, idx, what, (unsigned long long)recorded, (unsigned long long)counted,
		(unsigned long long)session);
	return kv_tally_found(step, session);
}

/* ---- a quiet moment ---- */

enum kv_status kv_tally_quiet(struct kv_tally_step *step)
{
	struct kv_tally *tally = step->tally;
	const struct kv_pool *pool = tally->pool;

	for (uint32_t g = 0; g < pool->spec->n_tables; g++)
		tally->groups[g].is_watched = true;
	for (uint32_t i = 0; i < pool->n_copies; i++) {
		const struct kv_copy_op *op = &pool->copies[i];
		const struct kv_block_pool *blocks = &pool->blocks[op->group_idx];

		if (blocks->in_flight[op->block_to] != 1)
			return found_block(step, op->group_idx, op->block_to, "in flight for a copy",
				blocks->in_flight[op->block_to], 1);
		tally->groups[op->group_idx].is_seen[op->block_to] = 1;
	}
	kv_tally_spend(step, pool->n_copies);
	tally->group_idx = tally->idx = 0;
	tally->phase = TALLY_BLOCKS;
	return KV_OK;
}

/* ---- blocks ---- */

/* Somebody looked at a block that was in flight at the quiet moment. */
static enum kv_status check_moving(struct kv_tally_step *step, uint32_t g)
{
	const uint32_t idx = step->tally->groups[g].moving_idx;

	if (idx == UINT32_MAX)
		return KV_OK;
	return found_block(
		step, g, idx, "in flight without a batch", step->tally->pool->blocks[g].in_flight[idx], 0);
}

static bool is_in_idle_list(const struct kv_block_pool *blocks, uint32_t idx)
{
	const uint32_t prev = blocks->idle_prev[idx], next = blocks->idle_next[idx];

	return (prev == UINT32_MAX ? blocks->idle_first : blocks->idle_next[prev]) == idx &&
		(next == UINT32_MAX ? blocks->idle_last : blocks->idle_prev[next]) == idx;
}

static enum kv_status check_block(struct kv_tally_step *step, uint32_t g, uint32_t idx, uint32_t n_copies)
{
	const struct kv_pool *pool = step->tally->pool;
	struct kv_block_pool *blocks = &step->tally->pool->blocks[g];
	const bool is_kept = g < pool->spec->n_groups && kv_prefix_is_kept(pool, g, idx);
	const uint32_t n_owners = step->tally->groups[g].owners[idx] + n_copies + is_kept;
	const bool is_idle = is_kept && n_owners == 1 && blocks->in_flight[idx] == 0;
	const uint32_t flags = (is_kept ? KV_BLOCK_KEPT : 0u) | (is_idle ? KV_BLOCK_IDLE : 0u);

	if (blocks->owners[idx] != n_owners)
		return found_block(step, g, idx, "owners", blocks->owners[idx], n_owners);
	if (blocks->pins[idx] != step->tally->groups[g].pins[idx])
		return found_block(step, g, idx, "pins", blocks->pins[idx], step->tally->groups[g].pins[idx]);
	if (blocks->flags[idx] != flags)
		return found_block(step, g, idx, "flags of publishing", blocks->flags[idx], flags);
	if (is_idle && !is_in_idle_list(blocks, idx))
		return found_block(step, g, idx, "in the list of idle blocks", 1, 0);
	kv_block_pool_look(blocks, idx);
	kv_block_pool_count(blocks, idx);
	return KV_OK;
}

/* Copies that wait own their sources; of these blocks. */
static void count_copies(struct kv_tally *tally, uint32_t g, uint32_t first, uint32_t n)
{
	const struct kv_pool *pool = tally->pool;

	memset(tally->copies, 0, n * sizeof(tally->copies[0]));
	for (uint32_t i = 0; i < pool->n_copies; i++) {
		const struct kv_copy_op *op = &pool->copies[i];

		if (op->group_idx == g && op->block_from >= first && op->block_from - first < n)
			tally->copies[op->block_from - first]++;
	}
}

static enum kv_status check_counts(struct kv_tally_step *step, uint32_t g)
{
	const struct kv_block_pool *blocks = &step->tally->pool->blocks[g];
	const struct kv_block_counts *recorded = &blocks->counts, *counted = &step->tally->groups[g].counts;
	const struct {
		const char *what;
		uint64_t n_recorded, n_counted;
	} rows[] = {
		{ "free blocks", recorded->n_free, counted->n_free },
		{ "owned blocks", recorded->n_owned, counted->n_owned },
		{ "shared blocks", recorded->n_shared, counted->n_shared },
		{ "pinned blocks", recorded->n_pinned, counted->n_pinned },
		{ "owners beyond the first", recorded->n_extra_owners, counted->n_extra_owners },
		{ "draining blocks", recorded->n_draining, counted->n_draining },
		{ "kept blocks", recorded->n_kept, counted->n_kept },
		{ "kept blocks with other owners", recorded->n_kept_shared, counted->n_kept_shared },
		{ "idle blocks", recorded->n_idle, counted->n_idle },
		{ "blocks in the free list", (uint64_t)blocks->n_freed + blocks->n_blocks - blocks->n_touched,
			counted->n_free },
		{ "reserved blocks that are not free",
			recorded->n_reserved > recorded->n_free ? recorded->n_reserved - recorded->n_free : 0,
			0 },
	};

	for (uint32_t i = 0; i < KV_LENGTH(rows); i++) {
		if (kv_audit_equal(step->err, rows[i].what, rows[i].n_recorded, rows[i].n_counted) != KV_OK) {
			kv_error_wrap(step->err, "group %u", g);
			return kv_tally_found(step, 0);
		}
	}
	return kv_audit_paid(blocks, step->tally->groups[g].n_paid, g, step->err) == KV_OK
		? KV_OK
		: kv_tally_found(step, 0);
}

enum kv_status kv_tally_blocks(struct kv_tally_step *step)
{
	struct kv_tally *tally = step->tally;
	const struct kv_pool *pool = tally->pool;
	enum kv_status status = KV_OK;

	while (tally->group_idx < pool->spec->n_tables && step->n_left > 0 && status == KV_OK) {
		const uint32_t g = tally->group_idx, first = tally->idx;
		const uint32_t n_more = pool->blocks[g].n_blocks - first;
		const uint32_t n = n_more < step->n_left ? n_more : step->n_left;

		count_copies(tally, g, first, n);
		for (uint32_t i = 0; i < n && status == KV_OK; i++)
			status = check_block(step, g, first + i, tally->copies[i]);
		kv_tally_spend(step, n);
		tally->counts.n_blocks += n;
		tally->idx += n;
		if (status == KV_OK)
			status = check_moving(step, g);
		if (status == KV_OK && n == n_more) {
			status = check_counts(step, g);
			tally->group_idx++;
			tally->idx = 0;
		}
	}
	if (tally->group_idx == pool->spec->n_tables) {
		tally->group_idx = tally->idx = 0;
		tally->phase = TALLY_FREE_IDS;
	}
	return status;
}

/* ---- the list of free blocks ---- */

enum kv_status kv_tally_free_ids(struct kv_tally_step *step)
{
	struct kv_tally *tally = step->tally;

	for (; tally->group_idx < tally->pool->spec->n_tables; tally->group_idx++, tally->idx = 0) {
		const uint32_t g = tally->group_idx;
		const struct kv_block_pool *blocks = &tally->pool->blocks[g];

		for (; tally->idx < blocks->n_freed; tally->idx++) {
			const uint32_t idx = blocks->free_ids[tally->idx];

			if (step->n_left == 0)
				return KV_OK;
			kv_tally_spend(step, 1);
			if (idx >= blocks->n_touched) {
				(void)kv_fail(step->err, KV_INTERNAL,
					"audit: group %u: block %u in the free list was never used", g, idx);
				return kv_tally_found(step, 0);
			}
			if (blocks->owners[idx] > 0 || blocks->in_flight[idx] > 0)
				return found_block(step, g, idx, "in the free list but used",
					blocks->owners[idx], blocks->in_flight[idx]);
		}
	}
	tally->idx = 0;
	tally->phase = TALLY_NODES;
	return KV_OK;
}
