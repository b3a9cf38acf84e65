/*
 * The domain from inside: what domain*.c, session*.c, sequence*.c, report.c and audit.c share. Nobody else
 * includes it.
 */
#ifndef CORE_DOMAIN_INTERNAL_H
#define CORE_DOMAIN_INTERNAL_H

#include <stdbool.h>
#include <stdint.h>

#include "core/checked.h"
#include "core/domain.h"
#include "core/hash_index.h"

#define KV_SLOT_NONE UINT32_MAX

/* Sequences that closing a session turns into zombies at once; the rest is left to kv_domain_release(). */
#define KV_CLOSE_SEQUENCES_MAX 64u
/* How long a session that ought to expire, but has something outstanding, is left alone. */
#define KV_EXPIRY_RETRY_NS (10 * KV_NS_PER_MS)
/* Hint of retryable refusals: a few turns of the loop, after which blocks may have come back. */
#define KV_RETRY_AFTER_MS 10u

/* A session and what the domain keeps beside it. */
struct kv_session_slot {
	struct kv_session session;
	uint32_t generation;
	bool is_expired; /* closed by the end of its lease; until the slot is used again */
	bool is_named;   /* in domain->names: open with a name, or expired with one */
	uint64_t name_hash;
	uint32_t free_next;       /* slot, KV_SLOT_NONE at the end */
	uint32_t heap_idx;        /* in domain->leases */
	uint64_t lease_key_ns;    /* at most lease_end_ns, except right after KV_EXPIRY_RETRY_NS was added */
	struct kv_sequence *tree; /* by id */
	uint64_t *layer_tokens;   /* [n_layers], in pool->session_tokens */
	uint64_t n_tokens_committed, n_exact_rows;
	uint64_t n_tokens_charged; /* sum over its sequences; 0 from closing on */
	uint32_t n_chunks;         /* of its sequences' tables */
};

struct kv_domain {
	struct kv_domain_limits limits;
	struct kv_random *random;
	uint64_t boot_id;
	uint16_t boot_tag;
	struct kv_hash_key hash_key;
	uint64_t name_seed;
	uint64_t tree_state;                 /* of the generator of tree priorities; never 0 */
	struct kv_pool *pools[KV_POOLS_MAX]; /* [n_pools] in order of creation */
	uint32_t n_pools;
	struct kv_session_slot *slots;  /* [sessions_max] */
	uint64_t *open_bits;            /* bit per slot: OPEN */
	uint32_t n_slots_touched;       /* slots from here on were never used */
	uint32_t free_first, free_last; /* slots that may be used again, longest free first */
	uint32_t n_sessions, n_owned, n_closing, n_staged;
	struct kv_capture *capture;         /* NULL: no snapshot is being written */
	struct kv_stage *stage;             /* NULL: nothing is being restored */
	struct kv_tally *tally;             /* NULL: no audit runs */
	uint32_t tally_serial;              /* of the last */
	struct kv_hash_index names, owners; /* ids are slots */
	struct kv_tenants tenants;
	uint32_t *leases; /* heap of slots, least lease_key_ns first */
	uint32_t n_leases;
	uint32_t n_sequences; /* sequence objects in use over all pools, zombies included */
	uint32_t n_forked;    /* table entries that FORK copied since the last kv_domain_release() */
	uint32_t n_cut;       /* blocks given back outside kv_domain_release() since its last call */
	uint32_t release_turn;
	uint64_t prefix_serial; /* of the newest prefix node of any pool */
};

static inline struct kv_session_slot *kv_slot_of(const struct kv_session *session)
{
	return kv_container_of(session, struct kv_session_slot, session);
}
static inline uint32_t kv_slot_idx(const struct kv_domain *domain, const struct kv_session_slot *slot)
{
	return (uint32_t)(slot - domain->slots);
}
static inline uint64_t kv_owner_hash(const struct kv_domain *domain, uint64_t owner_id)
{
	return kv_hash_pair(&domain->hash_key, owner_id, 1);
}
static inline uint64_t kv_block_bytes(const struct kv_pool_spec *spec, uint32_t group_idx)
{
	return spec->token_bytes[group_idx] * spec->block_size;
}
/* False for zombies and for those that will be one. */
static inline bool kv_sequence_is_live(const struct kv_sequence *sequence)
{
	return !sequence->is_zombie && sequence->session->state == KV_SESSION_OPEN;
}

/* session_lease.c */
void kv_lease_insert(struct kv_domain *domain, struct kv_session_slot *slot);
void kv_lease_remove(struct kv_domain *domain, struct kv_session_slot *slot);
/* As a new session has it, also where it was longer until now. */
void kv_lease_restart(struct kv_domain *domain, struct kv_session_slot *slot, uint64_t now_ns);

/* session.c: what session_stage.c needs, too */
uint64_t kv_name_hash(const struct kv_domain *domain, const char *name, uint32_t name_bytes, uint64_t tenant);
struct kv_session_slot *kv_find_name(
	struct kv_domain *domain, uint64_t hash, const char *name, uint32_t name_bytes, uint64_t tenant);
void kv_drop_name(struct kv_domain *domain, struct kv_session_slot *slot);
KV_MUST_CHECK enum kv_status kv_session_check_open(struct kv_domain *domain,
	const struct kv_open_params *params, struct kv_session_slot *namesake, struct kv_error *err);
/* A slot, and in it a session of which nobody knows. */
struct kv_session *kv_session_make(
	struct kv_domain *domain, const struct kv_open_params *params, uint64_t now_ns);
/* It is found from now on, by handle, name and owner. */
void kv_session_appear(struct kv_domain *domain, struct kv_session_slot *slot, uint64_t owner_id);

/* session_stage.c: sessions that are being restored, for stage.c */
KV_MUST_CHECK enum kv_status kv_session_stage(struct kv_domain *domain, const struct kv_open_params *params,
	uint64_t now_ns, struct kv_session **out, struct kv_error *err);
/* EXISTS: the name was taken meanwhile. */
KV_MUST_CHECK enum kv_status kv_session_check_name(
	struct kv_domain *domain, const struct kv_session *session, struct kv_error *err);
/* lease_end_ns says how much of its lease is left. */
void kv_session_commit(struct kv_domain *domain, struct kv_session *session, uint64_t now_ns);
/* As closing one. */
void kv_session_unstage(struct kv_domain *domain, struct kv_session *session);

/* session.c: the last sequence of a closing session has become a zombie. */
void kv_session_slot_free(struct kv_domain *domain, struct kv_session_slot *slot);

/* sequence_slab.c */
struct kv_sequence_slab {
	struct kv_sequence *sequences; /* [n_max] */
	uint32_t *lengths;             /* [n_max, 3, n_layers]: planned, committed, exact */
	uint32_t *free_ids;            /* stack [n_freed] */
	uint32_t n_max, n_layers, n_freed, n_touched, n_used;
	struct kv_hash_index
		index; /* by session slot and sequence id: live ones and those of closing sessions */
};
KV_MUST_CHECK enum kv_status kv_sequence_slab_create(
	uint32_t n_max, uint32_t n_layers, struct kv_sequence_slab **out, struct kv_error *err);
void kv_sequence_slab_destroy(struct kv_sequence_slab *slab);
/* A new, empty sequence of the session. The caller has checked the limits. */
struct kv_sequence *kv_sequence_add(struct kv_session *session, uint64_t sequence_id, uint64_t now_ns);
/*
 * Takes it off its session's index and list; it is a zombie now. Sums and counts are the caller's business.
 */
void kv_sequence_bury(struct kv_sequence *sequence);
/* Recycles a zombie that has no blocks and that no item names. */
void kv_sequence_recycle(struct kv_sequence *sequence);
uint32_t kv_sequence_n_blocks(const struct kv_sequence *sequence); /* that its tables own */
uint32_t kv_sequence_n_chunks(const struct kv_sequence *sequence);
/* Entries that each group's table needs for the planned lengths. */
void kv_sequence_blocks_needed(const struct kv_sequence *sequence, uint32_t n_blocks[KV_TABLES_MAX]);

/* sequence_window.c: what windows leave behind */
/* Committed rows of the layer that are not gone. */
uint32_t kv_sequence_n_held(const struct kv_sequence *sequence, uint32_t layer);
/* Takes what no window reaches from now on off the sums, and gives its blocks back. For live ones. */
void kv_sequence_move_windows(struct kv_sequence *sequence);
/* May tokens [first, end) of the layer be read, as far as planned lengths can tell? OK or WINDOW_GONE. */
KV_MUST_CHECK enum kv_status kv_sequence_check_reach(
	const struct kv_sequence *sequence, uint32_t layer, uint32_t first, uint32_t end);
/* May the sequence be cut to `length`? OK or WINDOW_GONE. */
KV_MUST_CHECK enum kv_status kv_sequence_check_cut(const struct kv_sequence *sequence, uint32_t length);
/* It was cut to `length`: gone is what was gone before, unless all that is left is before it. */
void kv_sequence_cut_windows(struct kv_sequence *sequence, uint32_t length);

/* sequence_exact.c: the exact window */
/* Committed tokens of the layer that it has in ring blocks; rows of all layers. */
uint64_t kv_sequence_n_exact(const struct kv_sequence *sequence, uint32_t layer);
uint64_t kv_sequence_n_exact_rows(const struct kv_sequence *sequence);
/* Corrects the sums of a live sequence, which had so many rows. */
void kv_sequence_count_exact(struct kv_sequence *sequence, uint64_t n_rows_before);
/* Entries of the ring's table that the tokens of its exact window lie in; 0 without. */
uint32_t kv_sequence_ring_entries(const struct kv_sequence *sequence);
/* Entries of the ring's table that a length needs. */
uint32_t kv_exact_entries(const struct kv_pool_spec *spec, uint32_t length);
/* An append is planned, item->seen is set and planned lengths are not yet: sets item->exact_lo. */
void kv_sequence_plan_exact(
	struct kv_sequence *sequence, struct kv_item *item, uint32_t layer_first, uint32_t n_layers);
/* The same for a decode or READ, which changes nothing. */
void kv_sequence_see_exact(
	const struct kv_sequence *sequence, struct kv_item *item, uint32_t layer_first, uint32_t n_layers);
/*
 * For stage.c: the newest n_tokens on these layers, which are equally long, are in ring blocks; the pool's
 * sums do not have them yet. False: there are not enough ring blocks.
 */
bool kv_sequence_restore_exact(
	struct kv_sequence *sequence, uint32_t layer_first, uint32_t n_layers, uint32_t n_tokens);
/* The layer's planned length was lowered by n_tokens. */
void kv_sequence_cut_exact(struct kv_sequence *sequence, uint32_t layer, uint32_t n_tokens);

/* tenant_charge.c: what sessions and sequences cost their tenant */
/* Bytes of n blocks of every group but the exact window's. */
uint64_t kv_reservation_bytes(const struct kv_pool_spec *spec, const uint32_t n_blocks[]);
/*
 * What the tenant itself has published and nobody uses, and what it may lose by eviction, goes until n_bytes
 * more may be charged, as far as this turn's bound allows. False: they may not.
 */
bool kv_payer_evict(struct kv_pool *pool, uint32_t payer, uint64_t n_bytes);
/* The same; OK, or QUOTA. */
KV_MUST_CHECK static inline enum kv_status kv_payer_make_room(
	struct kv_pool *pool, uint32_t payer, uint64_t n_bytes, struct kv_error *err)
{
	(void)kv_payer_evict(pool, payer, n_bytes);
	return kv_tenant_check(&pool->domain->tenants, payer, KV_QUOTA_BYTES, n_bytes, err);
}
/* A session opens or is to be restored: SESSIONS and the reservation. QUOTA, LIMIT (tenants). */
KV_MUST_CHECK enum kv_status kv_payer_check_open(
	struct kv_pool *pool, uint64_t tenant, uint32_t reserve_blocks, struct kv_error *err);
/* n blocks less of its reservation are charged. */
void kv_session_refund_reserved(struct kv_session *session, uint32_t group_idx, uint32_t n_blocks);
/* May a sequence, which may be NULL, grow to this length? OK or QUOTA. */
KV_MUST_CHECK enum kv_status kv_sequence_check_tokens(
	const struct kv_session *session, const struct kv_sequence *sequence, uint32_t length);
/* Its planned lengths changed. */
void kv_sequence_charge(struct kv_sequence *sequence);
/* Everything that the session is charged with, but its blocks. */
void kv_session_refund(struct kv_session *session);

/* sequence_tier.c */
void kv_sequence_forget_image(struct kv_sequence *sequence);
/* May rows be read, or written? OK, BUSY_RETRY, CORRUPT. */
KV_MUST_CHECK enum kv_status kv_sequence_check_residence(const struct kv_sequence *sequence, bool is_write);

/* sequence_tree.c: a treap per session, so that listing in order of ids costs what it lists. */
void kv_sequence_tree_insert(struct kv_sequence **root, struct kv_sequence *sequence);
void kv_sequence_tree_remove(struct kv_sequence **root, struct kv_sequence *sequence);
/* The sequence with the least id that is at least `id`, or NULL. */
struct kv_sequence *kv_sequence_tree_at_least(struct kv_sequence *root, uint64_t id);

/* sequence.c: may the session have one sequence more? OK, LIMIT or BUSY_RETRY. */
KV_MUST_CHECK enum kv_status kv_sequence_check_new(const struct kv_session *session);
/* Least of lengths[first..end). */
uint32_t kv_least_length(const uint32_t *lengths, uint32_t first, uint32_t end);

/* May the session have one sequence more with so many table entries in every group? As check_new, or LIMIT.
 */
KV_MUST_CHECK enum kv_status kv_sequence_check_table(const struct kv_session *session, uint32_t n_entries);
/* sequence_cut.c: lowers the committed lengths to `length` and takes what is cut off the sums. */
void kv_sequence_shorten(struct kv_sequence *sequence, uint32_t length);

/* evict.c */
/* Blocks that are given back to make room, between two calls of kv_domain_release(), cuts included. */
#define KV_EVICT_BLOCKS_MAX 960u
/* It was used: at the end of the queue of those that may be evicted, if it may be. Before its table changes,
 * and when it is used, it is woken. */
void kv_sequence_rest(struct kv_sequence *sequence);
void kv_sequence_wake(struct kv_sequence *sequence);
/* Adds its blocks to the pool's sum of blocks at rest, or takes them off. */
void kv_sequence_count_resting(const struct kv_sequence *sequence, bool is_added);
/* Its rows go; its lengths are 0. */
void kv_sequence_evict(struct kv_sequence *sequence);
/*
 * Evicts until n_blocks of the group are free and not reserved. False: there is not so much, or not within
 * this turn's bound.
 */
bool kv_pool_make_room(struct kv_pool *pool, uint32_t group_idx, uint32_t n_blocks);
/* For one block, and at the cost of published ones that nobody has only. POOL_FULL; BUSY_RETRY: next turn. */
KV_MUST_CHECK enum kv_status kv_pool_make_room_idle(struct kv_pool *pool, uint32_t group_idx);
/* Evicts down to the low mark once the high one was passed, within this turn's bound. */
void kv_pool_keep_room(struct kv_pool *pool);

/* sequence_room.c: blocks that an append takes */
/* What an append takes; filled by the check, used by the part that cannot fail. */
struct kv_need {
	uint32_t n_blocks[KV_GROUPS_MAX];   /* new entries */
	uint32_t n_shared[KV_GROUPS_MAX];   /* entries whose block is replaced */
	uint32_t n_reserved[KV_GROUPS_MAX]; /* of both from the session's reservation */
	uint32_t entry_first, entry_end;    /* that the append writes */
	uint32_t n_copies;
	uint64_t n_chunks;
};
/*
 * Everything that writing tokens [position, length) of layers [layer_first, layer_end) takes; sequence may be
 * NULL. May evict others. KV_OK, KV_LIMIT, KV_QUOTA, KV_POOL_FULL or KV_BUSY_RETRY.
 */
KV_MUST_CHECK enum kv_status kv_sequence_check_blocks(struct kv_session *session,
	const struct kv_sequence *sequence, uint32_t layer_first, uint32_t layer_end, uint32_t position,
	uint32_t length, struct kv_need *need);
/* After that said OK. */
void kv_sequence_take_blocks(
	struct kv_session *session, struct kv_sequence *sequence, const struct kv_need *need);

/* sequence_share.c: blocks with several owners */
/* Table entries that FORK copies between two calls of kv_domain_release(), the last child's not counted. */
#define KV_FORK_ENTRIES_MAX 262144u
/*
 * Of the entries [first, end) of the group that the table has: how many hold a block that others own, too, so
 * that nobody may write into it, and how many of those hold rows of this sequence that have to be copied.
 */
struct kv_shared_count {
	uint32_t n_shared, n_copies;
};
struct kv_shared_count kv_sequence_count_shared(
	const struct kv_sequence *sequence, uint32_t group_idx, uint32_t first, uint32_t end);
/*
 * Puts new blocks in their places, n_from_reservation of them from the caller's reservation. The caller has
 * counted them and knows that there are as many free blocks, and room for the copies.
 */
void kv_sequence_unshare(struct kv_sequence *sequence, uint32_t group_idx, uint32_t first, uint32_t end,
	uint32_t n_from_reservation);

/* The first `length` tokens of a new sequence's table hold committed rows: lengths and sums. */
void kv_sequence_inherit(struct kv_sequence *sequence, uint32_t length, bool is_evictable);

/* sequence_release.c */
/* Cuts a live sequence's tables to what its lengths need, as far as the bound of this turn allows. */
void kv_sequence_fit_tables(struct kv_sequence *sequence);

#endif
