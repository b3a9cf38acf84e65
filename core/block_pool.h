/*
 * Block pool: owner and in-flight counts of the blocks of one layer group.
 *
 * A block has an owner count (block-table entries, copies that wait for a batch) and an in-flight count
 * (submitted batches that name it, copies that wait and will write it). It is free when both are 0; owner 0
 * with in-flight above 0 is the state "draining": such a block is never handed out, so a writer that is still
 * running can only hurt rows that nobody owns. All ids exist from init to finish; nothing allocates after
 * init; what it holds per block becomes resident once the block is used. Never touches page memory. Loop
 * thread only.
 *
 * A block that a pinned sequence has is pinned, whatever other owners it has: each block counts in one state.
 */
#ifndef CORE_BLOCK_POOL_H
#define CORE_BLOCK_POOL_H

#include <stdbool.h>
#include <stdint.h>

#include "core/error.h"
#include "core/tenant.h"

typedef struct {
	uint32_t idx;
} kv_block_id; /* not an int: cannot be mixed with a token or slot index */

struct kv_block_counts {
	/* free + owned + shared + pinned + draining = total; reserved is the part of free that reservations
	 * hold; shared: more than one owner, pinned: whatever the number of owners is. */
	uint32_t n_total, n_free, n_owned, n_shared, n_pinned, n_draining, n_reserved;
	uint32_t n_used_max; /* high-water mark of total - free */
	/* published blocks; with other owners, too; without any, and not in flight */
	uint32_t n_kept, n_kept_shared, n_idle;
	uint64_t n_extra_owners; /* sum over shared blocks of the owners beyond the first */
};

/* What a tally (tally.h) counts beside, while it runs. */
struct kv_block_tally {
	uint32_t serial;  /* never 0 */
	uint32_t *owners; /* [n_blocks] table entries, of tables as far as they were walked */
	uint32_t *pins;   /* [n_blocks] the same of pinned tables */
	/* From a moment on at which no batch was in flight: [n_blocks] it was looked at since. */
	bool is_watched;
	uint8_t *is_seen;
	uint32_t moving_idx; /* the first that was in flight then, and nobody's; UINT32_MAX: none */
	uint32_t n_counted;  /* blocks before it are in `counts` */
	struct kv_block_counts counts;
	uint32_t *n_paid; /* [KV_TENANTS_MAX] of them, by payer */
};

struct kv_block_pool {
	uint32_t n_blocks;
	uint32_t *owners;    /* [n_blocks] */
	uint32_t *in_flight; /* [n_blocks] */
	uint32_t *pins;      /* [n_blocks] owners that are tables of pinned sequences */
	uint32_t *free_ids;  /* stack [n_freed]: blocks that were used and are free again */
	uint32_t n_freed;
	uint32_t n_touched; /* blocks from here on were never used: free, and not on the stack */
	uint64_t *taken_by; /* [n_blocks] who took it last: what an audit can tell of a block that got lost */
	uint8_t *flags;     /* [n_blocks] enum kv_block_flag */
	/* Who pays for the block while it has owners: [n_blocks] entries of tenants, which may be NULL. */
	uint16_t *payers;
	uint32_t *n_paid; /* [KV_TENANTS_MAX]: blocks by payer */
	struct kv_tenants *tenants;
	uint64_t block_bytes;
	uint32_t *idle_next,
		*idle_prev; /* [n_blocks] idle blocks in order of becoming so; UINT32_MAX = end */
	uint32_t idle_first, idle_last;
	struct kv_block_counts counts;
	struct kv_block_tally *tally; /* NULL: none runs */
};
enum kv_block_flag { KV_BLOCK_KEPT = 1, KV_BLOCK_IDLE = 2 };

KV_MUST_CHECK enum kv_status kv_block_pool_init(
	struct kv_block_pool *pool, uint32_t n_blocks, struct kv_error *err);
void kv_block_pool_finish(struct kv_block_pool *pool); /* half-built or zeroed allowed */

/*
 * All or nothing: hands out n_blocks ids with owner count 1, or returns KV_POOL_FULL and touches nothing.
 * n_from_reservation of them are taken from (and end) the caller's reservation; the rest must be free and not
 * reserved by others.
 */
KV_MUST_CHECK enum kv_status kv_block_pool_take(
	struct kv_block_pool *pool, uint32_t n_blocks, uint32_t n_from_reservation, kv_block_id ids[]);
/*
 * Blocks that were just taken: by which session, for the audit, and who pays for them until they have no
 * owner any more. The caller has asked for room in the tenant's quota.
 */
void kv_block_pool_mark(
	struct kv_block_pool *pool, const kv_block_id ids[], uint32_t n, uint64_t session, uint32_t payer);
/* The pool goes with blocks in it: nobody pays for them any more. */
void kv_block_pool_refund(struct kv_block_pool *pool);
/* One owner less; the block becomes free or draining when it was the last. */
void kv_block_pool_disown(struct kv_block_pool *pool, kv_block_id id);
void kv_block_pool_own(struct kv_block_pool *pool, kv_block_id id);
/*
 * A published prefix becomes, or ends to be, one of the owners; at most one does. A kept block is idle while
 * the prefix is its only owner and no batch names it.
 */
void kv_block_pool_keep(struct kv_block_pool *pool, kv_block_id id);
void kv_block_pool_unkeep(struct kv_block_pool *pool, kv_block_id id);
/* The block that has been idle the longest, or UINT32_MAX. */
static inline uint32_t kv_block_pool_idle_first(const struct kv_block_pool *pool)
{
	return pool->idle_first;
}
/* An owner of the block is, or is no longer, a table of a pinned sequence; it is one in between. */
void kv_block_pool_pin(struct kv_block_pool *pool, kv_block_id id);
void kv_block_pool_unpin(struct kv_block_pool *pool, kv_block_id id);
/* A submitted batch names the block (begin) or is reaped (end). */
void kv_block_pool_flight_begin(struct kv_block_pool *pool, kv_block_id id);
void kv_block_pool_flight_end(struct kv_block_pool *pool, kv_block_id id);
/* For a tally: the block's state as it is now is part of the tally's counts from here on. */
void kv_block_pool_count(struct kv_block_pool *pool, uint32_t idx);
/* For a tally: its in-flight count is looked at, unless it was since the quiet moment. */
void kv_block_pool_look(struct kv_block_pool *pool, uint32_t idx);
/* The same for each entry of a table that is not KV_BLOCK_NONE. A decode names thousands of blocks. */
void kv_block_pool_flights_begin(struct kv_block_pool *pool, const uint32_t table[], uint32_t n);
void kv_block_pool_flights_end(struct kv_block_pool *pool, const uint32_t table[], uint32_t n);
/* Sets n_blocks free blocks aside, or KV_POOL_FULL; given back by unreserve or used up by take. */
KV_MUST_CHECK enum kv_status kv_block_pool_reserve(struct kv_block_pool *pool, uint32_t n_blocks);
void kv_block_pool_unreserve(struct kv_block_pool *pool, uint32_t n_blocks);

#endif
