/*
 * Published prefixes one by one, for operators: listing, looking at one, taking one out.
 *
 * A prefix is listed by its last node. Its id is the node's place and a serial number that the domain never
 * gives twice in a life of the daemon (until 2^32 blocks were published), so an id that is used late finds
 * nothing and never another prefix.
 */
#include <string.h>

#include "core/domain_internal.h"
#include "core/prefix_internal.h"

static uint64_t id_of(const struct kv_prefix_node *node, uint32_t node_idx)
{
	return node->serial << 32 | node_idx;
}

static void describe(const struct kv_pool *pool, uint32_t node_idx, struct kv_prefix_row *row)
{
	const struct kv_prefix_index *index = pool->prefixes;
	const struct kv_prefix_node *node = &index->nodes[node_idx];
	const struct kv_prefix_identity *identity = &index->identities[node->identity];

	*row = (struct kv_prefix_row){
		.id = id_of(node, node_idx),
		.tenant = identity->tenant,
		.adapter_bytes = identity->adapter_bytes,
		.has_salt = identity->salt_bytes > 0,
		.n_tokens = node->depth * index->block_size,
		.n_blocks = node->depth * index->n_groups,
		.n_hits = index->nodes[node->part_first].n_hits,
		.n_whole_hits = node->n_hits,
		.published_ns = node->published_ns,
		.expires_ns = node->expires_ns,
	};
	memcpy(row->adapter, identity->adapter, identity->adapter_bytes);
	for (uint32_t g = 0; g < index->n_groups; g++) {
		const uint32_t block = index->blocks[(uint64_t)node_idx * index->n_groups + g];
		const uint32_t n_others = pool->blocks[g].owners[block] - 1; /* the prefix itself is one */

		row->stored_bytes += node->depth * kv_block_bytes(pool->spec, g);
		if (n_others > row->n_holders)
			row->n_holders = n_others;
	}
}

bool kv_prefix_next(
	const struct kv_pool *pool, uint32_t *node_idx, uint32_t *n_looks, struct kv_prefix_row *row)
{
	const struct kv_prefix_index *index = pool->prefixes;

	for (; *node_idx<index->n_touched && * n_looks> 0; (*node_idx)++) {
		const struct kv_prefix_node *node = &index->nodes[*node_idx];

		(*n_looks)--;
		if (node->is_used && (node->is_end || node->first_child == KV_PREFIX_NONE)) {
			describe(pool, (*node_idx)++, row);
			return true;
		}
	}
	return false;
}

static struct kv_pool *pool_of(const struct kv_domain *domain, uint64_t id)
{
	const uint32_t node_idx = (uint32_t)id;

	for (uint32_t i = 0; i < domain->n_pools; i++) {
		const struct kv_prefix_index *index = domain->pools[i]->prefixes;

		if (node_idx < index->n_touched && index->nodes[node_idx].is_used &&
			id_of(&index->nodes[node_idx], node_idx) == id)
			return domain->pools[i];
	}
	return NULL;
}

enum kv_status kv_prefix_find(
	const struct kv_domain *domain, uint64_t id, struct kv_pool **pool, struct kv_prefix_row *row)
{
	struct kv_pool *found = pool_of(domain, id);

	if (!found)
		return KV_NOT_FOUND;
	describe(found, (uint32_t)id, row);
	*pool = found;
	return KV_OK;
}

enum kv_status kv_prefix_remove(struct kv_domain *domain, uint64_t *id, uint32_t n_nodes_max)
{
	struct kv_pool *pool = pool_of(domain, *id);
	const uint32_t top = (uint32_t)*id;
	uint32_t idx = top;
	bool is_above = false;

	if (!pool)
		return KV_NOT_FOUND;
	struct kv_prefix_index *index = pool->prefixes;

	/* Leaves first, so that what is left is a tree at every step; then upwards while nothing else is
	 * there. */
	for (uint32_t n = 0; n < n_nodes_max; n++) {
		while (index->nodes[idx].first_child != KV_PREFIX_NONE)
			idx = index->nodes[idx].first_child;

		const uint32_t parent = index->nodes[idx].parent;

		is_above = is_above || idx == top;
		kv_prefix_remove_leaf(pool, idx);
		index->counts.n_removed++;
		if (parent & KV_PREFIX_ROOT)
			return KV_OK;
		if (is_above &&
			(index->nodes[parent].first_child != KV_PREFIX_NONE || index->nodes[parent].is_end))
			return KV_OK;
		idx = parent;
	}
	if (is_above)
		*id = id_of(&index->nodes[idx], idx);
	return KV_BUSY_RETRY;
}
