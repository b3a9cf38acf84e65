/*
 * Published blocks that are being restored: kept apart until the sessions are there, then published some a
 * turn, because they may be many and nothing depends on when they appear.
 *
 * One whose parent went meanwhile, evicted or expired, goes with it.
 */
#include <string.h>

#include "core/memory.h"
#include "core/stage_internal.h"

/* ---- memory ---- */

static uint64_t tokens_bytes(const struct kv_staged_nodes *nodes)
{
	return 4 * (uint64_t)nodes->block_size * nodes->n_max;
}

bool kv_stage_nodes_init(struct kv_staged_nodes *nodes, const struct kv_pool *pool)
{
	nodes->n_max = pool->prefixes->n_max;
	nodes->block_size = pool->spec->block_size;
	nodes->nodes = kv_pages_alloc(sizeof(*nodes->nodes) * (uint64_t)nodes->n_max);
	nodes->roots = kv_pages_alloc(sizeof(*nodes->roots) * (uint64_t)nodes->n_max);
	nodes->tokens = kv_pages_alloc(tokens_bytes(nodes));
	return nodes->nodes && nodes->roots && nodes->tokens;
}

void kv_stage_nodes_finish(struct kv_staged_nodes *nodes)
{
	kv_pages_free(nodes->nodes, sizeof(*nodes->nodes) * (uint64_t)nodes->n_max);
	kv_pages_free(nodes->roots, sizeof(*nodes->roots) * (uint64_t)nodes->n_max);
	kv_pages_free(nodes->tokens, tokens_bytes(nodes));
}

/* ---- taking ---- */

static enum kv_status check_place(
	const struct kv_staged_nodes *nodes, const struct kv_staged_prefix *staged, struct kv_error *err)
{
	const bool is_root = staged->parent == KV_STAGE_NO_PREFIX;

	if (staged->number != nodes->n || nodes->n == nodes->n_max)
		return kv_fail(err, KV_CORRUPT, "prefix %u comes where %u of %u is next", staged->number,
			nodes->n, nodes->n_max);
	if (!is_root && staged->parent >= nodes->n)
		return kv_fail(err, KV_CORRUPT, "prefix %u is behind %u, which is not there", staged->number,
			staged->parent);
	if (staged->adapter_bytes > KV_PREFIX_TEXT_BYTES_MAX || staged->salt_bytes > KV_PREFIX_TEXT_BYTES_MAX)
		return kv_fail(err, KV_CORRUPT, "texts of %u and %u bytes", staged->adapter_bytes,
			staged->salt_bytes);
	if (staged->ttl_left_ns > UINT32_MAX * KV_NS_PER_MS)
		return kv_fail(err, KV_CORRUPT, "prefix %u lives for %llu ns", staged->number,
			(unsigned long long)staged->ttl_left_ns);
	if (!is_root && (staged->adapter_bytes > 0 || staged->salt_bytes > 0 || staged->tenant != 0))
		return kv_fail(err, KV_CORRUPT, "prefix %u is not the first of its key, and has one",
			staged->number);
	return KV_OK;
}

static enum kv_status check_blocks(const struct kv_stage *stage, const struct kv_pool *pool,
	const struct kv_staged_prefix *staged, struct kv_error *err)
{
	for (uint32_t g = 0; g < pool->spec->n_groups; g++) {
		const struct kv_staged_blocks *blocks = &stage->blocks[pool->pool_idx][g];
		const uint32_t number = staged->blocks[g];

		if (number >= blocks->n_numbers || blocks->is_partial[number] ||
			(blocks->ids[number] & KV_STAGE_PUBLISHED))
			return kv_fail(err, KV_CORRUPT, "prefix %u names block %u of group %u, which %s",
				staged->number, number, g,
				number >= blocks->n_numbers          ? "is not there"
					: blocks->is_partial[number] ? "has too few rows"
								     : "another one has");
	}
	return KV_OK;
}

/* Blocks that no sequence has are its tenant's to pay. */
static enum kv_status check_payer(const struct kv_stage *stage, const struct kv_pool *pool,
	const struct kv_staged_prefix *staged, uint32_t *payer, struct kv_error *err)
{
	const struct kv_staged_nodes *nodes = &stage->nodes[pool->pool_idx];
	const uint64_t tenant = staged->parent == KV_STAGE_NO_PREFIX
		? staged->tenant
		: nodes->roots[nodes->nodes[staged->parent].root].tenant;
	uint64_t n_bytes = 0;

	for (uint32_t g = 0; g < pool->spec->n_groups; g++) {
		if (!(stage->blocks[pool->pool_idx][g].ids[staged->blocks[g]] & KV_STAGE_ADOPTED))
			n_bytes += pool->blocks[g].block_bytes;
	}
	*payer = kv_tenant_make(&stage->domain->tenants, tenant);
	if (*payer == KV_TENANT_NOBODY)
		return kv_fail(err, KV_LIMIT, "prefix %u: there are too many tenants", staged->number);
	return kv_tenant_check(&stage->domain->tenants, *payer, KV_QUOTA_BYTES, n_bytes, err);
}

/* The stage's hold on the block becomes the prefix's. */
static uint32_t adopt(
	struct kv_pool *pool, struct kv_staged_blocks *blocks, uint32_t g, uint32_t number, uint32_t payer)
{
	const kv_block_id id = { blocks->ids[number] & KV_STAGE_BLOCK };

	if (blocks->ids[number] & KV_STAGE_ADOPTED) {
		kv_block_pool_own(&pool->blocks[g], id);
	} else {
		kv_block_pool_mark(&pool->blocks[g], &id, 1, 0, payer);
		blocks->n_adopted++;
	}
	blocks->ids[number] |= KV_STAGE_ADOPTED | KV_STAGE_PUBLISHED;
	return id.idx;
}

enum kv_status kv_stage_prefix(struct kv_stage *stage, struct kv_pool *pool,
	const struct kv_staged_prefix *staged, struct kv_error *err)
{
	struct kv_staged_nodes *nodes = &stage->nodes[pool->pool_idx];
	uint32_t payer = KV_TENANT_NOBODY;
	enum kv_status status = check_place(nodes, staged, err);

	if (status == KV_OK)
		status = check_blocks(stage, pool, staged, err);
	if (status == KV_OK)
		status = check_payer(stage, pool, staged, &payer, err);
	if (status != KV_OK)
		return status;
	struct kv_staged_node *node = &nodes->nodes[nodes->n];

	*node = (struct kv_staged_node){
		.parent = staged->parent, .ttl_left_ns = staged->ttl_left_ns, .is_end = staged->is_end
	};
	if (staged->parent == KV_STAGE_NO_PREFIX) {
		struct kv_staged_root *root = &nodes->roots[nodes->n_roots];

		*root = (struct kv_staged_root){ .tenant = staged->tenant,
			.adapter_bytes = staged->adapter_bytes,
			.salt_bytes = staged->salt_bytes };
		memcpy(root->adapter, staged->adapter, staged->adapter_bytes);
		memcpy(root->salt, staged->salt, staged->salt_bytes);
		node->root = nodes->n_roots++;
	} else {
		node->root = nodes->nodes[staged->parent].root;
	}
	memcpy(nodes->tokens + 4 * (uint64_t)pool->spec->block_size * nodes->n, staged->tokens,
		4 * (size_t)pool->spec->block_size);
	for (uint32_t g = 0; g < pool->spec->n_groups; g++)
		node->blocks[g] = adopt(pool, &stage->blocks[pool->pool_idx][g], g, staged->blocks[g], payer);
	nodes->n++;
	return KV_OK;
}

/* ---- publishing ---- */

/* Where its parent is published; false: nowhere any more. */
static bool find_parent(const struct kv_pool *pool, const struct kv_staged_nodes *nodes,
	const struct kv_staged_node *node, uint32_t *parent)
{
	const struct kv_prefix_index *index = pool->prefixes;

	*parent = KV_PREFIX_NONE;
	if (node->parent == KV_STAGE_NO_PREFIX)
		return true;
	const struct kv_staged_node *above = &nodes->nodes[node->parent];

	*parent = above->node_idx;
	return above->node_idx != KV_PREFIX_NONE && index->nodes[above->node_idx].is_used &&
		index->nodes[above->node_idx].serial == above->serial;
}

static void publish(struct kv_pool *pool, struct kv_staged_nodes *nodes, uint32_t n, uint64_t now_ns)
{
	struct kv_staged_node *node = &nodes->nodes[n];
	const struct kv_staged_root *root = &nodes->roots[node->root];
	const struct kv_prefix_key key = { .adapter = root->adapter,
		.salt = root->salt,
		.adapter_bytes = root->adapter_bytes,
		.salt_bytes = root->salt_bytes };
	const uint64_t expires_ns = node->ttl_left_ns == 0 ? 0 : now_ns + node->ttl_left_ns;
	uint32_t parent;

	node->node_idx = KV_PREFIX_NONE;
	if (!find_parent(pool, nodes, node, &parent))
		return;
	node->node_idx = kv_prefix_put(pool, root->tenant, &key, parent,
		nodes->tokens + 4 * (uint64_t)pool->spec->block_size * n, node->blocks, expires_ns, now_ns);
	if (node->node_idx == KV_PREFIX_NONE)
		return;
	struct kv_prefix_node *published = &pool->prefixes->nodes[node->node_idx];

	node->serial = published->serial;
	published->is_end = published->is_end || node->is_end;
}

bool kv_stage_settle(struct kv_stage *stage, uint64_t now_ns, uint32_t n_max)
{
	uint32_t n_left = n_max;

	for (uint32_t i = 0; i < stage->domain->n_pools; i++) {
		struct kv_pool *pool = stage->domain->pools[i];
		struct kv_staged_nodes *nodes = &stage->nodes[pool->pool_idx];

		for (; nodes->n_settled < nodes->n && n_left > 0; nodes->n_settled++, n_left--) {
			const uint32_t n = nodes->n_settled;

			if (stage->is_committed)
				publish(pool, nodes, n, now_ns);
			for (uint32_t g = 0; g < pool->spec->n_groups; g++)
				kv_block_pool_disown(
					&pool->blocks[g], (kv_block_id){ nodes->nodes[n].blocks[g] });
		}
		if (nodes->n_settled < nodes->n)
			return false;
	}
	return true;
}

void kv_stage_nodes_count(
	const struct kv_staged_nodes *nodes, const struct kv_pool *pool, uint32_t *const owners[])
{
	for (uint32_t n = nodes->n_settled; n < nodes->n; n++) {
		for (uint32_t g = 0; g < pool->spec->n_groups; g++)
			owners[g][nodes->nodes[n].blocks[g]]++;
	}
}
