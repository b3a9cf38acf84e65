/*
 * Planning a batch: pure functions from planned items to the ops of backend.h.
 *
 * A plan wraps one batch and its area. Items are added in order until the area or a limit is full; slots,
 * block tables and results are written into the area, and the blocks that the batch names are counted as in
 * flight, so that closing or freeing meanwhile can only make them "draining". kv_plan_end() takes the counts
 * back after reap(). Loop thread only.
 */
#ifndef CORE_PLAN_H
#define CORE_PLAN_H

#include <stdbool.h>
#include <stdint.h>

#include "core/backend.h"
#include "core/domain.h"

/* Items in one batch: bounds the op arrays in the area. */
#define KV_PLAN_ITEMS_MAX 1024u

struct kv_plan {
	struct kv_batch batch;
	struct kv_pool *pool;
	struct kv_copy_op *copies; /* batch.copies */
	uint8_t *area;
	uint64_t area_bytes;
	uint64_t row_bytes; /* K, V and Q payload of the added items */
	uint32_t n_items, n_moves;
	uint32_t move_result_idx; /* where n_moves > 0 */
	uint64_t serial;          /* of the pool's plans */
	/* The caller counts the blocks of decodes with kv_plan_hold(), once they are on their way. */
	bool holds_later;
	uint32_t n_decodes_held; /* decodes whose blocks are counted */
};

/* The frame around the items: where its tensors lie (all in host_alloc memory). */
struct kv_frame_rows {
	uint32_t layer_first, n_layers;
	uint32_t n_tokens_total, n_q_total;
	uint8_t k_dtype, v_dtype, q_dtype, out_dtype; /* enum kv_dtype; 0 = absent */
	uint8_t decode_flags;                         /* enum kv_decode_flag */
	float scale;                                  /* 0 = the layer's */
	uint32_t window;                              /* 0 = the layer's */
	uint8_t *k, *v, *q;                           /* READ: k and v are where rows go */
	uint8_t *out;                                 /* [n_q_total, q_heads, v_head_dim] */
	float *lse;                                   /* [n_q_total, q_heads] or NULL */
	/* Client tables, little-endian as they came: the session's own numbers. */
	const uint8_t *slots; /* UPDATE_SLOTS: int64 [n_tokens_total] */
	const uint8_t *table; /* DECODE_TABLE: int32 [n_sequences, table_stride] */
	const uint8_t *seen;  /* DECODE_TABLE: uint32 [n_sequences] */
	uint32_t n_sequences, table_stride;
};

/* Area size that any single item of the pool fits into. */
uint64_t kv_plan_area_bytes(const struct kv_pool_spec *spec, uint64_t row_bytes_max);

/* To be added to it where plans have moves, too: any single block, and a bounded number of them. */
uint64_t kv_plan_moves_bytes(const struct kv_pool_spec *spec);

/*
 * Starts a plan for one pool in the given area: with the copies that its sequences wait for, and no items.
 * Whoever begins a plan submits it, even without items.
 */
void kv_plan_begin(struct kv_plan *plan, struct kv_pool *pool, uint8_t *area, uint64_t area_bytes);
/*
 * Adds one planned item; its result gets index *result_idx. False: it does not fit any more, or would write
 * ring blocks of the exact window in the places of tokens that an earlier item of the batch reads or writes
 * (never for the first item of a plan whose area is at least kv_plan_area_bytes()); nothing changed then.
 * Items that must not do work (stale, cancelled) are not added by the caller.
 */
bool kv_plan_add(struct kv_plan *plan, const struct kv_frame_rows *frame, const struct kv_item *item,
	uint32_t *result_idx);
/*
 * Adds the move of one block's rows of all layers of its group, n_rows[] of them per layer of the group from
 * its start: out to `rows`, or in from there. `rows` is host_alloc memory: K of all these layers in ascending
 * order, then V, packed and without gaps (kv_plan_block_bytes()). The block has an owner. Moves come before
 * the first item, share one result, and any one fits into an empty plan. False: it does not fit any more;
 * nothing changed then.
 */
bool kv_plan_add_move(struct kv_plan *plan, uint32_t group_idx, uint32_t block_idx, const uint8_t n_rows[],
	bool is_import, uint8_t *rows);
/* Would kv_plan_add_move() say true? */
bool kv_plan_has_room(const struct kv_plan *plan, uint32_t group_idx, const uint8_t n_rows[]);
/*
 * The same for rows of a sequence's exact window on layers that have equally many: tokens [token_first, +
 * n_tokens), all in ring blocks of it; `rows` is bf16, K of all layers, then V. The caller has asked for room
 * for so many of them; any sequence's fit into an empty plan.
 */
void kv_plan_add_exact_move(struct kv_plan *plan, const struct kv_sequence *sequence, uint32_t layer_first,
	uint32_t n_layers, uint32_t token_first, uint32_t n_tokens, bool is_import, uint8_t *rows);
bool kv_plan_has_room_exact(const struct kv_plan *plan, uint32_t n_runs);
uint64_t kv_plan_exact_bytes(const struct kv_pool_spec *spec, uint32_t n_layers, uint32_t n_tokens);
/* Bytes of the rows of one block, with n_rows[] per layer of the group; NULL: all of them. */
uint64_t kv_plan_block_bytes(const struct kv_pool_spec *spec, uint32_t group_idx, const uint8_t n_rows[]);
/*
 * kv_item_plan() for UPDATE_SLOTS (item->n_tokens) and DECODE_TABLE (item->q_len: n_sequences times the rows
 * of each). OK; BAD_STATE (the session has no client tables); SLOT_OUT_OF_RANGE, where item->row is the
 * token, or the entry counted over the whole table; LEN_LIMIT and BAD_ARG (longer than its row of the table;
 * fewer tokens than query rows), where item->row is the sequence. Rows of an UPDATE_SLOTS that the backend
 * refuses leave the slots that it names undefined.
 */
void kv_item_plan_tables(
	struct kv_session *session, struct kv_item *item, const struct kv_frame_rows *frame, uint64_t now_ns);

/*
 * After reap() (or instead of submit()): the blocks are not in flight any more. The plan is empty afterwards.
 */
void kv_plan_end(struct kv_plan *plan);

/*
 * Counts the blocks of decodes as in flight that are not counted yet: thousands of them, which a device need
 * not wait for. In the turn in which the plan was filled, before anything else may give blocks up.
 */
void kv_plan_hold(struct kv_plan *plan);

/*
 * Calls visit() for every block that the plan counts as in flight, as often as it counts it; many at a time,
 * among them entries that are KV_BLOCK_NONE. For the audit.
 */
struct kv_plan_visitor {
	void (*visit)(
		struct kv_plan_visitor *visitor, uint32_t group_idx, const uint32_t blocks[], uint32_t n);
};
void kv_plan_visit_blocks(const struct kv_plan *plan, struct kv_plan_visitor *visitor);

/* Which of the waiting requests go into the next batch, and in which order. */
struct kv_candidate {
	uint32_t session_idx; /* same number, same session */
	uint32_t tenant_idx;  /* below KV_TENANTS_MAX; the same for a session's requests */
	uint32_t weight;      /* of the tenant, at least 1 */
	uint64_t n_bytes;     /* what it takes: of the request and its reply */
	bool is_decode;       /* DECODE or APPEND_DECODE */
	bool is_ready;        /* false: skip it and everything of its session behind it */
};
/*
 * Decodes first where no earlier request of their session waits, then the rest; the order within a session
 * never changes. In both parts tenants take turns by bytes, as their weights say, and a tenant's requests
 * come in order of arrival. Writes indices into `order`, returns their number (at most n). `scratch` is [n]
 * bytes, `links` [n]. O(n * n) only within one session's share, O(n * log n) over any number of tenants; n is
 * at most the number of request slots.
 */
uint32_t kv_plan_pick(const struct kv_candidate candidates[], uint32_t n, uint32_t order[], uint8_t scratch[],
	uint32_t links[]);

#endif
