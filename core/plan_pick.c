/*
 * Which requests go into the next batch, and in which order.
 */
#include <string.h>

#include "core/plan.h"

#define NONE UINT32_MAX

enum { WAITING, PICKED, HELD };

/* What became of the session's request before candidate i; PICKED when there is none. */
static uint8_t state_before(const struct kv_candidate candidates[], uint32_t i, const uint8_t states[])
{
	for (uint32_t j = i; j-- > 0;) {
		if (candidates[j].session_idx == candidates[i].session_idx)
			return states[j];
	}
	return PICKED;
}

/*
 * Orders order[0..n) so that tenants take turns: next is always the oldest request of the tenant that was
 * given the least so far, for its weight. So one that has much waiting takes from another no more than that
 * one leaves.
 */
static void share(const struct kv_candidate candidates[], uint32_t order[], uint32_t n, uint32_t links[],
	uint64_t given_bytes[KV_PLAN_TENANTS_MAX])
{
	uint32_t first[KV_PLAN_TENANTS_MAX], last[KV_PLAN_TENANTS_MAX];
	uint64_t weights[KV_PLAN_TENANTS_MAX];

	for (uint32_t t = 0; t < KV_PLAN_TENANTS_MAX; t++)
		first[t] = NONE;
	for (uint32_t i = 0; i < n; i++) {
		const uint32_t t = candidates[order[i]].tenant_idx;

		if (first[t] == NONE) {
			first[t] = order[i];
			weights[t] = candidates[order[i]].weight;
		} else {
			links[last[t]] = order[i];
		}
		last[t] = order[i];
		links[order[i]] = NONE;
	}
	for (uint32_t i = 0; i < n; i++) {
		uint32_t next = NONE;

		for (uint32_t t = 0; t < KV_PLAN_TENANTS_MAX; t++) {
			if (first[t] == NONE)
				continue;
			if (next == NONE) {
				next = t;
				continue;
			}
			/* Below 2^54 bytes of all slots, times KV_TENANT_WEIGHT_MAX. */
			const uint64_t mine = given_bytes[t] * weights[next];
			const uint64_t theirs = given_bytes[next] * weights[t];

			if (mine < theirs || (mine == theirs && first[t] < first[next]))
				next = t;
		}
		order[i] = first[next];
		given_bytes[next] += candidates[order[i]].n_bytes;
		first[next] = links[order[i]];
	}
}

uint32_t kv_plan_pick(const struct kv_candidate candidates[], uint32_t n, uint32_t order[], uint8_t scratch[],
	uint32_t links[])
{
	uint64_t given_bytes[KV_PLAN_TENANTS_MAX] = { 0 };
	uint32_t n_picked = 0, n_first;

	if (n > 0)
		memset(scratch, WAITING, n);
	for (uint32_t i = 0; i < n; i++) {
		if (!candidates[i].is_decode || !candidates[i].is_ready ||
			state_before(candidates, i, scratch) != PICKED)
			continue;
		scratch[i] = PICKED;
		order[n_picked++] = i;
	}
	n_first = n_picked;
	share(candidates, order, n_first, links, given_bytes);
	for (uint32_t i = 0; i < n; i++) {
		if (scratch[i] == PICKED)
			continue;
		/* Held: itself not ready, or behind one that is held. */
		scratch[i] = HELD;
		if (!candidates[i].is_ready || state_before(candidates, i, scratch) == HELD)
			continue;
		scratch[i] = PICKED;
		order[n_picked++] = i;
	}
	share(candidates, order + n_first, n_picked - n_first, links, given_bytes);
	return n_picked;
}
