/*
 * Stage: sessions that are being restored. Nobody finds them, nothing expires, their rows are not counted,
 * until kv_stage_commit() makes all of them appear at once; or kv_stage_destroy() makes them go as closed
 * sessions do, a bounded number of blocks a turn.
 *
 * What is said here comes from a file: every number is checked, and a refusal says CORRUPT with the reason.
 * Order: a session, then for each of its sequences the sequence, its exact window, the blocks that are not
 * there yet, and its tables; then published blocks. A block belongs to the stage until the first table names
 * it. One stage at a time per domain. Loop thread only.
 */
#ifndef CORE_STAGE_H
#define CORE_STAGE_H

#include "core/domain.h"

struct kv_stage;

KV_MUST_CHECK enum kv_status kv_stage_create(
	struct kv_domain *domain, struct kv_stage **out, struct kv_error *err);
/* NULL allowed. */
void kv_stage_destroy(struct kv_stage *stage);

struct kv_staged_session {
	struct kv_open_params open; /* owner_id 0; the name is not empty */
	uint32_t reserved_blocks[KV_GROUPS_MAX];
	uint64_t lease_left_ns;
	uint64_t n_rows_in, n_rows_out, n_queries;
};
/* CORRUPT, EXISTS (the tenant has a session of this name), LIMIT, BUSY_RETRY. */
KV_MUST_CHECK enum kv_status kv_stage_session(struct kv_stage *stage, const struct kv_staged_session *session,
	uint64_t now_ns, struct kv_error *err);

/*
 * The next block of a group: takes one. n_rows[]: [layers of the group] rows that the file holds, at most
 * block_size. Published blocks that nobody has make room. POOL_FULL, CORRUPT; BUSY_RETRY: in the next turn.
 */
KV_MUST_CHECK enum kv_status kv_stage_block(struct kv_stage *stage, struct kv_pool *pool, uint32_t group_idx,
	uint32_t number, const uint8_t n_rows[], uint32_t *block_idx, struct kv_error *err);

struct kv_staged_sequence {
	uint64_t id, idle_ns;
	bool is_evictable;
	uint32_t n_pins;
	const uint32_t *lengths;           /* [n_layers] */
	uint32_t n_entries[KV_GROUPS_MAX]; /* its tables must get exactly as many */
	uint32_t n_gone[KV_GROUPS_MAX];    /* as kv_sequence has it */
};
/* Of the last session. CORRUPT, LIMIT (of the pool or the domain), QUOTA, BUSY_RETRY. */
KV_MUST_CHECK enum kv_status kv_stage_sequence(struct kv_stage *stage,
	const struct kv_staged_sequence *sequence, uint64_t now_ns, struct kv_error *err);
/*
 * The newest n_tokens of the last sequence on these layers are in ring blocks: takes them. CORRUPT, POOL_FULL
 * (without them it would not decode to the same bits).
 */
KV_MUST_CHECK enum kv_status kv_stage_exact(struct kv_stage *stage, uint32_t layer_first, uint32_t n_layers,
	uint32_t n_tokens, const struct kv_sequence **sequence, struct kv_error *err);
#define KV_STAGE_NO_BLOCK UINT32_MAX /* an entry that no window reaches */
/* Entries [first, first + n) of a table of the last sequence, by numbers of blocks. CORRUPT, LIMIT. */
KV_MUST_CHECK enum kv_status kv_stage_table(struct kv_stage *stage, uint32_t group_idx, uint32_t first,
	const uint32_t numbers[], uint32_t n, struct kv_error *err);

/* A published block; its parent came before it. Only the first of its key says whose it is. */
#define KV_STAGE_NO_PREFIX UINT32_MAX
struct kv_staged_prefix {
	uint32_t number, parent;
	uint64_t ttl_left_ns;  /* 0: until it is evicted */
	bool is_end;           /* a PUBLISH ended here */
	const uint8_t *tokens; /* [block_size] u32, little-endian */
	uint64_t tenant;
	const char *adapter, *salt;
	uint32_t adapter_bytes, salt_bytes;
	uint32_t blocks[KV_GROUPS_MAX]; /* numbers */
};
/* CORRUPT. */
KV_MUST_CHECK enum kv_status kv_stage_prefix(struct kv_stage *stage, struct kv_pool *pool,
	const struct kv_staged_prefix *prefix, struct kv_error *err);

/*
 * Everything is there: all sessions are open from now on. Leases run from now, and last for at least the
 * domain's restored_lease_ms until somebody attaches. CORRUPT (something is missing), EXISTS, POOL_FULL
 * (reservations): nothing has changed then. *n_sessions: how many.
 */
KV_MUST_CHECK enum kv_status kv_stage_commit(
	struct kv_stage *stage, uint64_t now_ns, uint32_t *n_sessions, struct kv_error *err);
/*
 * After the end, whatever it was: publishes at most n_max blocks, in order, or gives them back. What is there
 * under the same key already stays. True when nothing is left to do.
 */
bool kv_stage_settle(struct kv_stage *stage, uint64_t now_ns, uint32_t n_max);

/* For the audit: owners[g][block] of the pool, one more for every block that no table has yet and every one
 * that is still to be published. */
void kv_stage_count(const struct kv_stage *stage, const struct kv_pool *pool, uint32_t *const owners[]);

#endif
