/*
 * Tally: the audit of a running domain, a bounded piece at a time, and still exact.
 *
 * Owners. Tables are walked entry by entry. What was walked stays counted right: whatever changes an entry
 * that is counted already changes the count, too (block_table.c), so once all tables are walked the counts
 * are those of this moment, and of every later one, and each block can be compared at leisure with what the
 * block pool has recorded. The two sides share no code: the record moves with owning and disowning, the count
 * with entries.
 *
 * In flight. At a moment when the pool has no batch in flight, only destinations of copies that wait may be.
 * The server makes such a moment by not sealing one batch (wants_quiet()). Each block is looked at after it:
 * by the walk, or by the first batch that names it, whichever comes first.
 *
 * Numbers of blocks by state are counted along the walk in the same way, and who pays for blocks. Other sums
 * (tokens, rows, chunks, reservations, charges) are added up within one step (tally_sums.c); what has too
 * many parts for that is counted and left to kv_audit_domain(), which does everything at once, and so are the
 * counts of a snapshot or restore: while one runs there is no tally.
 */
#ifndef CORE_TALLY_H
#define CORE_TALLY_H

#include "core/domain.h"

struct kv_tally;

/* What is wrong, besides the text. */
struct kv_finding {
	uint64_t session; /* whose block or sequence it is, or whose the block was; 0: nobody's */
	char pool[KV_POOL_NAME_BYTES_MAX + 1];
};
/* What was looked at, and whose sums were left out, because they have more parts than a step may look at. */
struct kv_tally_counts {
	uint64_t n_sessions, n_sequences, n_entries, n_blocks;
	uint64_t n_sessions_unsummed, n_pools_unsummed, n_tenants_unsummed;
};

/* Entries, blocks, sequences and slots that one step looks at, at most. */
#define KV_TALLY_STEP_MAX 4096u

/* One at a time. NO_MEMORY, BUSY_RETRY (a snapshot or restore runs). */
KV_MUST_CHECK enum kv_status kv_tally_create(
	struct kv_domain *domain, struct kv_tally **out, struct kv_error *err);
/* NULL allowed. */
void kv_tally_destroy(struct kv_tally *tally);
/* The pool of which no batch ought to be sealed until the next step(); NULL: none. */
const struct kv_pool *kv_tally_wants_quiet(const struct kv_tally *tally);
/*
 * Goes on by at most n_max (<= KV_TALLY_STEP_MAX). is_quiet: no batch of wants_quiet() is in flight. OK;
 * INTERNAL: something is wrong, `finding` and err say what; BUSY_RETRY, NO_MEMORY: it ends without a result.
 */
KV_MUST_CHECK enum kv_status kv_tally_step(struct kv_tally *tally, uint32_t n_max, bool is_quiet,
	bool *is_done, struct kv_finding *finding, struct kv_error *err);
struct kv_tally_counts kv_tally_counts(const struct kv_tally *tally);

/* ---- for the domain ---- */
void kv_tally_pool_gone(struct kv_tally *tally, const struct kv_pool *pool);
/* A new sequence, without blocks. */
void kv_tally_born(struct kv_tally *tally, struct kv_sequence *sequence);

#endif
