/*
 * Published prefixes for control requests: a list, one of them, and taking one out. As with sessions a list
 * looks at so many nodes a turn and goes on next turn.
 */
#include <stdio.h>
#include <string.h>

#include "server/internal.h"

#define SCAN_PER_TURN 1024u
/* Blocks given back at once, as elsewhere in a turn. */
#define REMOVE_PER_TURN 1024u

static void fill(const struct srv_server *server, const struct kv_pool *pool,
	const struct kv_prefix_row *prefix, struct srv_prefix_row *row)
{
	memset(row, 0, sizeof(*row));
	row->prefix = *prefix;
	snprintf(row->pool, sizeof(row->pool), "%s", pool->spec->name);
	row->age_ms = (server->now_ns - prefix->published_ns) / KV_NS_PER_MS;
	if (prefix->expires_ns > server->now_ns)
		row->ttl_left_ms = (prefix->expires_ns - server->now_ns) / KV_NS_PER_MS;
}

/* Does not depend on the time of asking, so that pages of one list fit together. */
static uint64_t sort_key(const struct kv_prefix_row *prefix, enum srv_session_sort sort)
{
	switch (sort) {
	case SRV_SORT_AGE:
		return UINT64_MAX - prefix->published_ns;
	case SRV_SORT_TOKENS:
		return prefix->n_tokens;
	case SRV_SORT_BYTES:
		return prefix->stored_bytes;
	case SRV_SORT_HITS:
		return prefix->n_hits;
	default:
		return 0;
	}
}

static void fill_sorted(struct srv_server *server, struct srv_control *control)
{
	for (uint32_t i = 0; i < control->n_keys; i++) {
		const uint64_t slot = control->keys[i].slot_idx;
		const struct kv_pool *pool = kv_domain_pool_at(server->domain, (uint32_t)(slot >> 32));
		uint32_t node_idx = (uint32_t)slot, n_looks = 1;
		struct kv_prefix_row prefix;

		/* It may have gone since it was looked at. */
		if (pool && kv_prefix_next(pool, &node_idx, &n_looks, &prefix))
			fill(server, pool, &prefix, &control->rows.prefixes[control->n_prefixes++]);
	}
	if (control->n_keys > 0)
		control->cursor_key_next = control->keys[control->n_keys - 1];
}

/* A row that belongs to the list. False: the page is full, and this one begins the next. */
static bool take(struct srv_server *server, struct srv_control *control, const struct kv_pool *pool,
	const struct kv_prefix_row *prefix, uint64_t slot_idx)
{
	if (control->sort != SRV_SORT_NONE) {
		const struct srv_sort_key key = {
			.key = sort_key(prefix, control->sort),
			.slot_idx = slot_idx,
		};

		srv_control_keep_key(control, &key);
		return true;
	}
	if (control->n_prefixes == control->n_rows_max) {
		control->cursor_next = slot_idx;
		return false;
	}
	fill(server, pool, prefix, &control->rows.prefixes[control->n_prefixes++]);
	return true;
}

bool srv_control_prefixes(struct srv_server *server, struct srv_control *control)
{
	const bool is_sorted = control->sort != SRV_SORT_NONE;
	uint64_t slot = control->scan_slot == 0 && !is_sorted ? control->cursor : control->scan_slot;
	uint32_t pool_idx = (uint32_t)(slot >> 32), node_idx = (uint32_t)slot, n_looks = SCAN_PER_TURN;
	struct kv_prefix_row prefix;

	for (struct kv_pool *pool; (pool = kv_domain_pool_at(server->domain, pool_idx)); pool_idx++) {
		while (kv_prefix_next(pool, &node_idx, &n_looks, &prefix)) {
			if (control->has_tenant && prefix.tenant != control->tenant)
				continue;
			slot = (uint64_t)pool_idx << 32 | (node_idx - 1);
			if (!take(server, control, pool, &prefix, slot))
				return true;
		}
		if (n_looks == 0) {
			control->scan_slot = (uint64_t)pool_idx << 32 | node_idx;
			return false;
		}
		node_idx = 0;
	}
	if (is_sorted)
		fill_sorted(server, control);
	return true;
}

static void refuse(struct srv_control *control)
{
	control->status = kv_fail(&control->error, KV_NOT_FOUND, "no such prefix");
}

void srv_control_prefix(struct srv_server *server, struct srv_control *control)
{
	struct kv_prefix_row prefix;
	struct kv_pool *pool;

	if (kv_prefix_find(server->domain, control->id, &pool, &prefix) != KV_OK) {
		refuse(control);
		return;
	}
	fill(server, pool, &prefix, &control->rows.prefixes[0]);
	control->n_prefixes = 1;
}

bool srv_control_prefix_delete(struct srv_server *server, struct srv_control *control)
{
	const enum kv_status status = kv_prefix_remove(server->domain, &control->id, REMOVE_PER_TURN);

	/* The rest may have expired between two turns: what was asked for holds. */
	if (status == KV_NOT_FOUND && !control->is_passed)
		refuse(control);
	control->is_passed = true;
	return status != KV_BUSY_RETRY;
}
