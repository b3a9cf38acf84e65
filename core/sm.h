/*
 * State machine: the legal edges as data. A move along an undeclared edge is a bug of ours and stops the
 * process.
 */
#ifndef CORE_SM_H
#define CORE_SM_H

#include <stdint.h>

#include "core/error.h"

#define KV_SM_BIT(state) (1u << (state))

struct kv_sm_state {
	const char *name;
	uint32_t next; /* KV_SM_BIT of every state that may follow */
};

struct kv_sm {
	const struct kv_sm_state *states;
	uint32_t state;
};

static inline void kv_sm_init(struct kv_sm *sm, const struct kv_sm_state *states, uint32_t state)
{
	sm->states = states;
	sm->state = state;
}

static inline void kv_sm_move(struct kv_sm *sm, uint32_t state)
{
	KV_ASSERT((sm->states[sm->state].next & KV_SM_BIT(state)) != 0);
	sm->state = state;
}

static inline const char *kv_sm_name(const struct kv_sm *sm)
{
	return sm->states[sm->state].name;
}

#endif
