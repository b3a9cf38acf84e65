/*
 * Which requests go into the next batch, and in which order.
 */
#include <string.h>

#include "core/plan.h"
#include "core/tenant.h"

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

/* One tenant: its requests that were not given yet, and what it was given. */
struct turn {
	uint32_t first, last; /* NONE: it has nothing waiting */
	uint32_t weight;
	uint64_t given_bytes;
};

/* All tenants of a pick. Those that wait are a heap: whose turn it is stands first. */
struct turns {
	struct turn of[KV_TENANTS_MAX]; /* by tenant_idx, as far as a candidate names it */
	uint16_t heap[KV_TENANTS_MAX];
	uint32_t n_waiting;
};

static bool is_before(const struct turns *turns, uint32_t a, uint32_t b)
{
	const struct turn *mine = &turns->of[turns->heap[a]], *other = &turns->of[turns->heap[b]];
	/* Below 2^54 bytes of all slots, times KV_TENANT_WEIGHT_MAX. */
	const uint64_t my_bytes = mine->given_bytes * other->weight;
	const uint64_t other_bytes = other->given_bytes * mine->weight;

	return my_bytes < other_bytes || (my_bytes == other_bytes && mine->first < other->first);
}

/* The entry at idx may be too far in front. */
static void sink(struct turns *turns, uint32_t idx)
{
	for (;;) {
		uint32_t least = idx;

		for (uint32_t child = 2 * idx + 1; child <= 2 * idx + 2 && child < turns->n_waiting; child++)
			least = is_before(turns, child, least) ? child : least;
		if (least == idx)
			return;

		const uint16_t moved = turns->heap[idx];

		turns->heap[idx] = turns->heap[least];
		turns->heap[least] = moved;
		idx = least;
	}
}

static void line_up(struct turns *turns, const struct kv_candidate candidates[], const uint32_t order[],
	uint32_t n, uint32_t links[])
{
	turns->n_waiting = 0;
	for (uint32_t i = 0; i < n; i++) {
		const uint32_t t = candidates[order[i]].tenant_idx;
		struct turn *turn = &turns->of[t];

		if (turn->first == NONE) {
			turn->first = order[i];
			turns->heap[turns->n_waiting++] = (uint16_t)t;
		} else {
			links[turn->last] = order[i];
		}
		turn->last = order[i];
		links[order[i]] = NONE;
	}
	for (uint32_t i = turns->n_waiting / 2; i-- > 0;)
		sink(turns, i);
}

/*
 * Orders order[0..n) so that tenants take turns: next is always the oldest request of the tenant that was
 * given the least so far, for its weight. So one that has much waiting takes from another no more than that
 * one leaves.
 */
static void share(struct turns *turns, const struct kv_candidate candidates[], uint32_t order[], uint32_t n,
	uint32_t links[])
{
	line_up(turns, candidates, order, n, links);
	for (uint32_t i = 0; i < n; i++) {
		struct turn *turn = &turns->of[turns->heap[0]];

		order[i] = turn->first;
		turn->given_bytes += candidates[order[i]].n_bytes;
		turn->first = links[order[i]];
		if (turn->first == NONE)
			turns->heap[0] = turns->heap[--turns->n_waiting];
		sink(turns, 0);
	}
}

uint32_t kv_plan_pick(const struct kv_candidate candidates[], uint32_t n, uint32_t order[], uint8_t scratch[],
	uint32_t links[])
{
	struct turns turns;
	uint32_t n_picked = 0, n_first;

	if (n > 0)
		memset(scratch, WAITING, n);
	for (uint32_t i = 0; i < n; i++) {
		KV_ASSERT(candidates[i].tenant_idx < KV_TENANTS_MAX);
		turns.of[candidates[i].tenant_idx] =
			(struct turn){ .first = NONE, .weight = candidates[i].weight };
	}
	for (uint32_t i = 0; i < n; i++) {
		if (!candidates[i].is_decode || !candidates[i].is_ready ||
			state_before(candidates, i, scratch) != PICKED)
			continue;
		scratch[i] = PICKED;
		order[n_picked++] = i;
	}
	n_first = n_picked;
	share(&turns, candidates, order, n_first, links);
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
	share(&turns, candidates, order + n_first, n_picked - n_first, links);
	return n_picked;
}
