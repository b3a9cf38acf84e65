/*
 * A plan from inside: what plan.c and plan_move.c share.
 */
#ifndef CORE_PLAN_INTERNAL_H
#define CORE_PLAN_INTERNAL_H

#include "core/plan.h"

/* Every part of the area begins at a multiple of this, so that a device can read it in whole words. */
#define KV_PLAN_ALIGN 64u

/* n things of the given size from the area; the caller has checked that they fit. */
void *kv_plan_take_part(struct kv_plan *plan, uint64_t n, uint64_t size);
/* A result that says OK; the caller has checked that there is one. */
uint32_t kv_plan_take_result(struct kv_plan *plan);
/* The op's blocks are in flight. */
void kv_plan_begin_flight(struct kv_plan *plan, const struct kv_transfer_op *op);

#endif
