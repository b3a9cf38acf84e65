/*
 * Domain: pools, sessions and sequences of one daemon, and the rules between them. No sockets, no clock, no
 * device: time comes in as now_ns, devices behind struct kv_backend_pool.
 *
 * Lengths. Per sequence and layer there is a planned length (what has been accepted) and a committed length
 * (what the backend has finished). Positions are checked against planned; commit moves committed, in batch
 * order. When an item is refused after it was planned, its sequence falls back to planned = committed on
 * every layer and its epoch moves on: every later item planned in the old epoch must be answered POSITION
 * (kv_item_is_stale).
 *
 * Destruction. A freed sequence, and all sequences of a closed session, become zombies: no handle or id finds
 * them, their blocks are given back at most a bounded number a turn (kv_domain_release), and the object
 * itself goes when no planned item names it.
 *
 * Bounds. No call does work in proportion to a session's or a table's size: what is more than a small
 * constant is left to kv_domain_release(). DESIGN.md lists what is kept for that.
 *
 * Everything is bounded and taken at creation. Loop thread only.
 */
#ifndef CORE_DOMAIN_H
#define CORE_DOMAIN_H

#include <stdbool.h>
#include <stdint.h>

#include "core/block_pool.h"
#include "core/block_table.h"
#include "core/clock.h"
#include "core/error.h"
#include "core/list.h"
#include "core/pool_spec.h"
#include "core/tenant.h"
#include "core/tier.h"

#define KV_SESSION_NAME_BYTES_MAX 128u
#define KV_POOLS_MAX              64u
#define KV_LENGTH_PLANNED         UINT32_MAX /* DECODE position: whatever is planned now */

#define KV_COPIES_MAX 1024u /* blocks of one pool that wait to be copied */

struct kv_backend_pool;
struct kv_copy_op;
struct kv_domain;
struct kv_prefix_index;
struct kv_tally;

struct kv_domain_limits {
	uint32_t sessions_max;  /* <= 65535 */
	uint32_t sequences_max; /* over all pools */
	uint32_t lease_ms;      /* default lease */
	uint32_t lease_ms_max;
	uint32_t restored_lease_ms; /* at least, of a restored session until it is attached */
	/*
	 * Per cent of a pool's blocks in use: above high, what may be evicted is, until low; 0: only when
	 * somebody needs it.
	 */
	uint32_t evict_high_percent, evict_low_percent;
};

/* One pool. Fields are read by everybody, written by core/domain*.c only. */
struct kv_pool {
	const struct kv_pool_spec *spec; /* owned */
	struct kv_backend_pool *backend_pool;
	struct kv_domain *domain;
	uint32_t pool_idx;
	uint64_t arena_offset, arena_bytes;
	struct kv_block_pool blocks[KV_TABLES_MAX]; /* [spec->n_tables] */
	struct kv_table_arena tables;
	struct kv_list sessions; /* kv_session.in_pool */
	struct kv_list zombies;  /* kv_sequence.in_session: sequences being taken apart */
	struct kv_list
		waiting; /* private; kv_sequence.in_session: zombies without blocks that items still name */
	struct kv_list closing; /* private; kv_session.in_pool: closed, some sequences not in zombies yet */
	struct kv_list surplus; /* private; kv_sequence.in_surplus: tables longer than the lengths need */
	/* Blocks to be copied before anything else of the next batch; sequence_share.c, taken by
	 * kv_plan_begin(). */
	struct kv_copy_op *copies; /* [KV_COPIES_MAX] */
	uint32_t n_copies;
	struct kv_prefix_index *prefixes; /* prefix.c */
	struct kv_list resting; /* kv_sequence.in_resting: may be evicted, used longest ago first; evict.c */
	uint32_t n_resting_entries[KV_TABLES_MAX];                                  /* of their tables */
	uint32_t evict_high_blocks[KV_GROUPS_MAX], evict_low_blocks[KV_GROUPS_MAX]; /* in use */
	bool is_evicting[KV_GROUPS_MAX];
	uint64_t n_evicted_sequences;                /* since start */
	uint32_t n_spilled;                          /* sequences whose rows are in an image */
	uint64_t n_spilled_tokens, n_tier_pages;     /* their tokens; pages of all images */
	uint32_t n_sessions, n_sequences, n_zombies; /* open sessions; their sequences; all other sequences */
	uint64_t n_tokens_committed;                 /* sum over sequences of the least layer length */
	/* Private to plan_tables.c: blocks of the session with the handle mapped[g], by its client's numbers.
	 */
	uint32_t *maps[KV_GROUPS_MAX]; /* [n_map_blocks] */
	uint32_t n_map_blocks[KV_GROUPS_MAX];
	uint64_t mapped[KV_GROUPS_MAX];
	uint64_t n_exact_rows;    /* committed tokens of exact windows, summed over layers and sequences */
	uint64_t plan_serial;     /* of the newest plan */
	uint64_t *layer_tokens;   /* [n_layers] committed tokens, summed over sequences: the memory report */
	uint64_t *session_tokens; /* private: [sessions_max, n_layers] the same per session slot */
	struct kv_sequence_slab *slab; /* private to sequence_slab.c */
};

/*
 * CLOSING: no handle finds it any more; its slot is not used again until its sequences have become zombies.
 * STAGED: being restored, nobody finds it yet; its sequences count as zombies (core/stage.h).
 */
enum kv_session_state { KV_SESSION_FREE, KV_SESSION_OPEN, KV_SESSION_CLOSING, KV_SESSION_STAGED };

struct kv_session {
	uint64_t handle;
	enum kv_session_state state;
	struct kv_pool *pool;
	char name[KV_SESSION_NAME_BYTES_MAX + 1];
	uint64_t tenant;   /* Unix: uid; TCP: UINT64_MAX */
	uint32_t payer;    /* the tenant's entry; it stays while the session is there */
	uint64_t owner_id; /* connection that may send rows; 0 = none */
	bool has_tables;   /* its client manages block tables itself: core/plan_tables.c */
	uint16_t priority;
	uint32_t lease_ms;
	uint64_t opened_ns, lease_end_ns;
	uint32_t sequences_max, tokens_max;
	uint32_t n_sequences;
	uint32_t n_blocks_reserved[KV_GROUPS_MAX]; /* what is left of its reservation */
	uint32_t n_queued;                         /* requests accepted and not sealed: the server's count */
	uint32_t n_outstanding;         /* requests accepted and not answered: the server's count */
	uint64_t n_rows_in, n_rows_out; /* rows of finished items, one per layer and token */
	uint64_t n_queries;             /* query rows of finished items */
	struct kv_list sequences;       /* kv_sequence.in_session, oldest first */
	struct kv_list_node in_pool;
	uint64_t seal_mark; /* scheduler's scratch */
};

/* Where the rows of a sequence are; sequence_tier.c has the edges. */
enum kv_residence {
	KV_RESIDENT, /* in its blocks */
	KV_SPILLING, /* in its blocks, on their way out: it can be read, not written */
	KV_SPILLED,  /* in its image */
	KV_FETCHING, /* on their way back */
	KV_BROKEN,   /* nowhere: what came back was wrong, or did not come */
};

struct kv_sequence {
	uint64_t id;
	struct kv_pool *pool;
	struct kv_session *session; /* NULL for zombies; may be CLOSING, which counts as one */
	uint32_t epoch;
	uint32_t n_items;          /* planned items that name this object */
	uint32_t n_tokens_charged; /* to its tenant */
	bool is_evictable;
	bool is_evicted; /* its rows are gone; CREATE makes it a new one */
	bool is_unborn;  /* made by an append, and none of it has succeeded yet */
	bool is_zombie;
	uint32_t n_pins;   /* while there are any it is not evicted */
	bool is_tables;    /* the blocks of a session with client tables; its id is 0, and nothing lists it */
	uint8_t residence; /* enum kv_residence */
	bool is_held;      /* something moves it between tiers, and counts in n_items */
	struct kv_tier_image image;
	uint32_t n_spilled_tokens;    /* that the pool counts for it: its length as it went */
	struct kv_list_node in_moves; /* the mover's */
	uint64_t spill_ns;            /* used_ns when spilling began */
	uint64_t fetched_ns;          /* the mover's: when it came back last */
	uint64_t created_ns, used_ns;
	uint32_t *planned;   /* [n_layers] */
	uint32_t *committed; /* [n_layers] */
	uint32_t *exact;     /* [n_layers]: so many of the newest planned tokens are in ring blocks, too */
	struct kv_block_table tables[KV_TABLES_MAX]; /* [spec->n_tables] */
	/*
	 * Per group: blocks before this one are reached by no window any more, except the sink blocks of the
	 * group; 0: all are. Their rows are gone, their blocks are given back within turns.
	 */
	uint32_t n_gone[KV_GROUPS_MAX];
	struct kv_list_node in_session;
	/* private */
	struct kv_list_node in_surplus, in_resting;
	struct kv_sequence *tree_left, *tree_right; /* of its session, by id */
	uint64_t tree_priority;
	uint32_t slab_idx;
	/* The last plan that reads or writes ring blocks of it, and the first token whose place that is. */
	uint64_t plan_serial;
	uint32_t plan_exact_lo;
};

/* `random` outlives the domain. */
KV_MUST_CHECK enum kv_status kv_domain_create(const struct kv_domain_limits *limits, struct kv_random *random,
	struct kv_domain **out, struct kv_error *err);
/*
 * NULL allowed. Everything in it goes; its backend pools were destroyed before, and no item is used
 * afterwards.
 */
void kv_domain_destroy(struct kv_domain *domain);
/* Random per start, never 0. */
uint64_t kv_domain_boot_id(const struct kv_domain *domain);

/* ---- pools (domain_pool.c) ---- */
/* Takes spec and the backend pool over on success. EXISTS, LIMIT, NO_MEMORY. */
KV_MUST_CHECK enum kv_status kv_domain_pool_add(struct kv_domain *domain, struct kv_pool_spec *spec,
	struct kv_backend_pool *backend_pool, uint64_t arena_offset, uint64_t arena_bytes,
	struct kv_pool **out, struct kv_error *err);
/*
 * BAD_STATE (with the reason) while it has sessions; BUSY_RETRY while zombies or blocks in flight are left,
 * or a snapshot is being written or restored.
 */
KV_MUST_CHECK enum kv_status kv_domain_pool_check_remove(const struct kv_pool *pool, struct kv_error *err);
/* After check_remove() said OK and the backend pool is destroyed. The spec goes too, unless it was set to
 * NULL. */
void kv_domain_pool_remove(struct kv_pool *pool);
struct kv_pool *kv_domain_pool_by_name(struct kv_domain *domain, const char *name, uint32_t name_bytes);
/* The idx-th existing pool in order of creation, or NULL. */
struct kv_pool *kv_domain_pool_at(struct kv_domain *domain, uint32_t idx);
uint32_t kv_domain_n_pools(const struct kv_domain *domain);

/* ---- sessions (session.c) ---- */
/* Blocks of one session with client tables: OPEN takes all of them at once. */
#define KV_TABLES_BLOCKS_MAX 65536u
struct kv_open_params {
	struct kv_pool *pool;
	const char *name; /* not terminated; name_bytes 0: cannot be attached */
	uint32_t name_bytes;
	uint64_t tenant, owner_id;
	bool has_tables; /* client tables: reserve_blocks of them */
	uint16_t priority;
	uint32_t lease_ms, reserve_blocks, sequences_max,
		tokens_max; /* 0 = default, or none for reserve_blocks */
};
/*
 * EXISTS (name in use by the tenant), LIMIT (sessions; reserve_blocks above the pool; with client tables:
 * above KV_TABLES_BLOCKS_MAX, sequences, table entries), BAD_ARG (client tables without blocks), POOL_FULL;
 * BUSY_RETRY
 * when all slots are taken but closed sessions are still being taken apart, or some are being restored.
 * lease_ms, sequences_max and tokens_max above the domain's or pool's bound are lowered to it. reserve_blocks
 * are set aside in every group; taking blocks uses the reservation up first, and what is given back later
 * goes to everybody. err may be NULL.
 */
KV_MUST_CHECK enum kv_status kv_session_open(struct kv_domain *domain, const struct kv_open_params *params,
	uint64_t now_ns, struct kv_session **out, struct kv_error *err);
/* The open session of that name and tenant, NULL: none. Changes nothing. */
struct kv_session *kv_session_by_name(
	struct kv_domain *domain, const char *name, uint32_t name_bytes, uint64_t tenant);
/*
 * By name and tenant: the caller becomes the owner, the old one is fenced, the lease starts anew. NOT_FOUND,
 * SESSION_EXPIRED (until its slot or its name is used again).
 */
KV_MUST_CHECK enum kv_status kv_session_attach(struct kv_domain *domain, const char *name,
	uint32_t name_bytes, uint64_t tenant, uint64_t owner_id, uint64_t now_ns, struct kv_session **out);
/* By handle: NOT_FOUND (0), STALE_EPOCH, STALE_HANDLE, SESSION_EXPIRED. */
KV_MUST_CHECK enum kv_status kv_session_find(
	struct kv_domain *domain, uint64_t handle, struct kv_session **out);
void kv_session_renew(struct kv_session *session, uint64_t now_ns);
/*
 * The handle stops working at once and its sequences become zombies. The caller guarantees n_queued == 0;
 * items that are in submitted batches stay valid through their sequence pointers. is_expired: later finds say
 * SESSION_EXPIRED.
 */
void kv_session_close(struct kv_domain *domain, struct kv_session *session, bool is_expired);
/*
 * Closes at most n_max sessions whose lease has ended and that have nothing outstanding; returns how many.
 * One with something outstanding is looked at again 10 ms later.
 */
uint32_t kv_session_expire(struct kv_domain *domain, uint64_t now_ns, uint32_t n_max);
/*
 * When kv_session_expire() may have something to do: never late, may be early. UINT64_MAX: no session is
 * open.
 */
uint64_t kv_session_next_expiry_ns(const struct kv_domain *domain);
/* Iteration by slot: the first open session with slot >= *slot; moves *slot behind it; NULL at the end. */
struct kv_session *kv_session_next(struct kv_domain *domain, uint32_t *slot);
uint32_t kv_domain_n_sessions(const struct kv_domain *domain);
/* Those that somebody owns. */
uint32_t kv_domain_n_owned(const struct kv_domain *domain);
/* Quotas and what they are charged with; sessions, sequences and blocks are charged by the domain itself. */
struct kv_tenants *kv_domain_tenants(struct kv_domain *domain);
/* The connection is gone: it owns nothing any more; leases run on from now. */
void kv_session_owner_lost(struct kv_domain *domain, uint64_t owner_id, uint64_t now_ns);
/* Nobody owns the session any more, until it is attached again; its lease runs on. */
void kv_session_fence(struct kv_domain *domain, struct kv_session *session);
/* Renews all sessions of a connection (PING with session 0). */
void kv_session_renew_owner(struct kv_domain *domain, uint64_t owner_id, uint64_t now_ns);

/* ---- sequences and items (sequence.c) ---- */
enum kv_item_kind {
	KV_ITEM_APPEND,
	KV_ITEM_DECODE,
	KV_ITEM_APPEND_DECODE,
	KV_ITEM_READ,
	KV_ITEM_UPDATE_SLOTS, /* these two: kv_item_plan_tables() */
	KV_ITEM_DECODE_TABLE,
};
enum kv_item_flag {
	KV_ITEM_CREATE = 1,
	KV_ITEM_EVICTABLE = 2,
	KV_ITEM_PACKED = 4, /* K or V rows come packed */
	KV_ITEM_EXACT = 8,  /* READ: from the exact window where it has the rows */
};

/* One item of a request, from planning to its answer. */
struct kv_item {
	/* as asked */
	uint64_t sequence_id;
	uint32_t position; /* APPEND*: length before; DECODE: length seen; READ: first token */
	uint32_t n_tokens, q_len;
	uint8_t kind;    /* enum kv_item_kind */
	uint8_t flags;   /* enum kv_item_flag */
	uint32_t window; /* decode: as the frame has it; 0 = the layer's */
	/* as planned */
	struct kv_sequence *sequence; /* NULL when planning refused it */
	uint32_t epoch;
	uint32_t exact_lo;             /* tokens from here on are in ring blocks, too; UINT32_MAX: none */
	uint32_t seen;                 /* decode: tokens visible to the last row */
	uint32_t token_first, q_first; /* this item's first token and query row in the frame */
	/* as done */
	uint16_t status; /* enum kv_status */
	uint16_t layer;  /* first bad layer or KV_LAYER_NONE */
	uint32_t row;    /* first bad row or KV_ROW_NONE */
	uint32_t length; /* committed; on POSITION what was expected */
	uint32_t retry_after_ms;
};

/*
 * Plans one item of a frame on layers [layer_first, layer_first + n_layers), which the caller has checked
 * against the spec; one layer when it decodes. Appending: the sequence exists (or KV_ITEM_CREATE is set and
 * it is created at position 0), position equals the planned length on every layer of the frame, tokens_max
 * holds, blocks are taken at once or not at all. Then planned moves. Decoding: the length seen is at most
 * planned on the layer. Reading: [position, position + n_tokens) is committed or planned on every layer.
 *
 * Of an evicted sequence everything but CREATE is EVICTED.
 *
 * Sets item->status, and on OK sequence, epoch, seen and n_items; on a refusal nothing changed (sequence is
 * NULL) and item->length says what was expected (POSITION, with item->layer the first layer that differs) or
 * is committed. Statuses: NOT_FOUND, EXISTS (CREATE of a sequence that has rows), POSITION, LEN_LIMIT,
 * POOL_FULL (retry_after_ms set), LIMIT (sequences, table entries), BUSY_RETRY (sequences, while freed ones
 * are still being taken apart; KV_COPIES_MAX shared blocks wait to be copied; a sequence that was cut to its
 * beginning, while blocks behind it are given back), WINDOW_GONE (a row that the windows of the sequence's
 * planned length do not reach), BAD_ARG (id 0; nothing to do; q_len above what is seen, except one row over
 * nothing).
 *
 * A sequence whose creating item is refused later goes with the last item that was planned on it, unless one
 * of them created it again.
 */
void kv_item_plan(struct kv_session *session, struct kv_item *item, uint32_t layer_first, uint32_t n_layers,
	uint64_t now_ns);
/* True when its sequence fell back after it was planned: no work may be submitted, the answer is POSITION. */
bool kv_item_is_stale(const struct kv_item *item);
/*
 * The item is over. Items of one sequence are finished in the order in which they were planned. item->status
 * OK: appended tokens are committed. Otherwise, if it appended, its sequence falls back; a failed decode or
 * read changes nothing. item->length becomes the least committed length over the frame's layers. A stale item
 * becomes POSITION with the planned length, except that CANCELLED, DEADLINE and DEVICE_LOST stay. Does
 * nothing for items that planning refused. Ends the item's hold on the sequence and clears item->sequence:
 * careful, the sequence may be gone below.
 */
void kv_item_finish(struct kv_item *item, uint32_t layer_first, uint32_t n_layers);

struct kv_sequence *kv_sequence_find(struct kv_session *session, uint64_t sequence_id);
/* Least and greatest committed length over the layers. */
void kv_sequence_lengths(const struct kv_sequence *sequence, uint32_t *length_min, uint32_t *length_max);
/* Newest committed tokens of which every layer has the exact rows (FORMATS 5.5). */
uint32_t kv_sequence_n_exact_least(const struct kv_sequence *sequence);
/*
 * Only with nothing outstanding on the session. Every layer becomes min(length, n). NOT_FOUND, EVICTED;
 * WINDOW_GONE when a layer's window at its new length reaches rows that are gone: nothing changes.
 */
KV_MUST_CHECK enum kv_status kv_sequence_truncate(
	struct kv_session *session, uint64_t sequence_id, uint32_t length);
/* Only with nothing outstanding on the session. The sequence becomes a zombie. NOT_FOUND. */
KV_MUST_CHECK enum kv_status kv_sequence_free(struct kv_session *session, uint64_t sequence_id);
/*
 * Pins are counted per sequence and go with it; while there are any it is not evicted, and its blocks count
 * as pinned until they are given back. NOT_FOUND; EVICTED (pin); BAD_STATE (unpin without a pin); BUSY_RETRY
 * (the first pin and the last: more table entries than a turn may, as for FORK).
 */
KV_MUST_CHECK enum kv_status kv_sequence_pin(struct kv_session *session, uint64_t sequence_id);
KV_MUST_CHECK enum kv_status kv_sequence_unpin(struct kv_session *session, uint64_t sequence_id);
/*
 * Only with nothing outstanding on the session. The child, a new id, gets the first `length` tokens of the
 * parent on every layer (KV_LENGTH_PLANNED: all that every layer has) and whether it is evictable. It shares
 * the parent's blocks; whoever writes into a shared block first gets a copy of it. NOT_FOUND (parent),
 * EVICTED, EXISTS (child), POSITION (*expected is the parent's length), WINDOW_GONE (as TRUNCATE to that
 * length), LIMIT (sequences, table entries), BUSY_RETRY (sequences, as for CREATE; more table entries to be
 * copied than a turn may), BAD_ARG (ids).
 */
KV_MUST_CHECK enum kv_status kv_sequence_fork(struct kv_session *session, uint64_t child_id,
	uint64_t parent_id, uint32_t length, uint64_t now_ns, uint32_t *expected);
/*
 * The up to n_max sequences with the smallest ids >= from, ascending; returns how many. *next = following id
 * or 0.
 */
uint32_t kv_sequence_list(
	struct kv_session *session, uint64_t from, struct kv_sequence *out[], uint32_t n_max, uint64_t *next);

/* ---- tiers (sequence_tier.c); the mover works on what it holds until it calls *_end() ---- */
/* Table entries that hold committed rows; which of them have a block; how many rows each layer has there. */
uint32_t kv_sequence_n_entries(const struct kv_sequence *sequence, uint32_t group_idx);
bool kv_sequence_has_entry(const struct kv_sequence *sequence, uint32_t group_idx, uint32_t entry_idx);
void kv_sequence_entry_rows(
	const struct kv_sequence *sequence, uint32_t group_idx, uint32_t entry_idx, uint8_t n_rows[]);
/* Resident, idle, with blocks, nothing of it waits to be cut. */
bool kv_sequence_may_spill(const struct kv_sequence *sequence);
/* Takes the image over. */
void kv_sequence_spill_begin(struct kv_sequence *sequence, const struct kv_tier_image *image);
/* False: its session is closed, or it was used meanwhile: it stays where it is. */
bool kv_sequence_spill_is_wanted(const struct kv_sequence *sequence);
/* Careful: the sequence may be gone below. */
void kv_sequence_spill_end(struct kv_sequence *sequence, bool is_stored);
/*
 * Takes blocks for all its rows at once, ring blocks for its exact window included. POOL_FULL, QUOTA,
 * BUSY_RETRY (its old blocks are still being given back).
 */
KV_MUST_CHECK enum kv_status kv_sequence_fetch_begin(struct kv_sequence *sequence);
/* Careful: the sequence may be gone below. */
void kv_sequence_fetch_end(struct kv_sequence *sequence, bool is_whole);

/* For the audit: pages of the images of all sequences of the pool, per tier. */
void kv_sequence_count_pages(const struct kv_pool *pool, const struct kv_tier tiers[2], uint64_t n_pages[2]);

/* Objects that this looks at, at most. */
uint32_t kv_sequence_n_touched(const struct kv_pool *pool);

/* The one with the smallest id >= from, or NULL. */
struct kv_sequence *kv_sequence_next(struct kv_session *session, uint64_t from);

/*
 * Takes zombies apart, cuts tables that are longer than their lengths need, keeps room as the limits say:
 * gives back at most n_blocks_max blocks over all pools, pools taking turns; returns how many. Blocks that
 * TRUNCATE and refused items gave back at once since the last call (at most KV_CUT_BLOCKS_MAX) come off this
 * bound, so a turn's sum has it too.
 */
#define KV_CUT_BLOCKS_MAX 512u
uint32_t kv_domain_release(struct kv_domain *domain, uint32_t n_blocks_max);
/* True when kv_domain_release() has something left to do. */
bool kv_domain_has_zombies(const struct kv_domain *domain);

#endif
