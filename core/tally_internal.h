/*
 * Tally from inside: tally.c has phases, slots, tables and prefixes, tally_blocks.c what is compared block by
 * block, from the quiet moment on.
 */
#ifndef CORE_TALLY_INTERNAL_H
#define CORE_TALLY_INTERNAL_H

#include "core/audit_internal.h"
#include "core/domain_internal.h"
#include "core/tally.h"

enum kv_tally_phase {
	TALLY_SLOTS,
	TALLY_POOL,
	TALLY_TABLES,
	TALLY_QUIET,
	TALLY_BLOCKS,
	TALLY_FREE_IDS,
	TALLY_NODES,
	TALLY_SUMS,
	TALLY_TENANTS,
	TALLY_OVER
};

struct kv_tally {
	struct kv_domain *domain;
	enum kv_tally_phase phase;
	uint32_t serial;
	uint64_t pools_done; /* bit per pool_idx */
	struct kv_pool *pool;
	struct kv_block_tally groups[KV_TABLES_MAX];
	/* where it goes on; sequence_idx UINT32_MAX: all tables are walked */
	uint32_t slot_idx, sequence_idx, group_idx, idx;
	struct kv_tally_counts counts;
	uint16_t copies[KV_TALLY_STEP_MAX]; /* that wait, by source: of the blocks of one step */
};

/* One step. */
struct kv_tally_step {
	struct kv_tally *tally;
	uint32_t n_max, n_left;
	struct kv_finding *finding;
	struct kv_error *err;
};

static inline void kv_tally_spend(struct kv_tally_step *step, uint32_t n)
{
	step->n_left -= n < step->n_left ? n : step->n_left;
}

/* Says whose it is (0: nobody's) and where; err has the text already. */
enum kv_status kv_tally_found(struct kv_tally_step *step, uint64_t session);

/* ---- tally_blocks.c: phases ---- */
KV_MUST_CHECK enum kv_status kv_tally_quiet(struct kv_tally_step *step);
KV_MUST_CHECK enum kv_status kv_tally_blocks(struct kv_tally_step *step);
KV_MUST_CHECK enum kv_status kv_tally_free_ids(struct kv_tally_step *step);

#endif
