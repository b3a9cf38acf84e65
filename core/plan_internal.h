/*
 * A plan from inside: what plan.c, plan_exact.c, plan_move.c and plan_tables.c share.
 */
#ifndef CORE_PLAN_INTERNAL_H
#define CORE_PLAN_INTERNAL_H

#include "core/plan.h"

/* Every part of the area begins at a multiple of this, so that a device can read it in whole words. */
#define KV_PLAN_ALIGN 64u

/* What n things of the given size take. */
uint64_t kv_plan_part_bytes(uint64_t n, uint64_t size);
/* n things of the given size from the area; the caller has checked that they fit. */
void *kv_plan_take_part(struct kv_plan *plan, uint64_t n, uint64_t size);
/* A result that says OK; the caller has checked that there is one. */
uint32_t kv_plan_take_result(struct kv_plan *plan);
/* plan_exact.c: ring slots of the item's tokens, and the ring's blocks for what it sees; NULL: there are
 * none. */
const int64_t *kv_plan_add_exact_slots(struct kv_plan *plan, const struct kv_item *item);
const uint32_t *kv_plan_add_exact_table(struct kv_plan *plan, const struct kv_item *item);
/* True when the append would take places of tokens that this batch still reads, or writes at the same time.
 */
bool kv_plan_overwrites_exact(const struct kv_plan *plan, const struct kv_item *item);
/* The item is in the batch. */
void kv_plan_note_exact(const struct kv_plan *plan, const struct kv_item *item);
/* plan_tables.c: an item of a session with client tables; as kv_plan_add(). */
bool kv_plan_add_tables(struct kv_plan *plan, const struct kv_frame_rows *frame, const struct kv_item *item,
	uint32_t *result_idx);
/* What follows from the frame: everything but result, length, table and exact window. */
struct kv_decode_op kv_plan_decode_op(
	const struct kv_plan *plan, const struct kv_frame_rows *frame, uint32_t q_first, uint32_t q_len);
/* The op's blocks are in flight. */
void kv_plan_begin_flight(struct kv_plan *plan, const struct kv_transfer_op *op);

#endif
