#include "core/prefix.h"

#include <string.h>

#include "core/domain_internal.h"
#include "core/prefix_internal.h"

/* ---- identities ---- */

static uint32_t find_identity(const struct kv_prefix_index *index, const struct kv_prefix_hash *hash,
	uint64_t tenant, const struct kv_prefix_key *key)
{
	for (uint32_t i = kv_hash_index_first(&index->by_identity, hash->low); i != KV_HASH_NONE;
		i = kv_hash_index_next(&index->by_identity, i)) {
		const struct kv_prefix_identity *identity = &index->identities[i];

		if (kv_prefix_is_same_hash(&identity->hash, hash) && identity->tenant == tenant &&
			identity->adapter_bytes == key->adapter_bytes &&
			identity->salt_bytes == key->salt_bytes &&
			(key->adapter_bytes == 0 ||
				memcmp(identity->adapter, key->adapter, key->adapter_bytes) == 0) &&
			(key->salt_bytes == 0 || memcmp(identity->salt, key->salt, key->salt_bytes) == 0))
			return i;
	}
	return KV_PREFIX_NONE;
}

/* KV_PREFIX_NONE: all are in use. */
static uint32_t add_identity(struct kv_prefix_index *index, const struct kv_prefix_hash *hash,
	uint64_t tenant, const struct kv_prefix_key *key)
{
	uint32_t idx = index->n_identities_touched;

	if (index->n_identities == KV_PREFIX_IDENTITIES_MAX)
		return KV_PREFIX_NONE;
	if (idx < KV_PREFIX_IDENTITIES_MAX)
		index->n_identities_touched++;
	for (uint32_t i = 0; idx == KV_PREFIX_IDENTITIES_MAX; i++) {
		if (index->identities[i].first_child == KV_PREFIX_NONE)
			idx = i;
	}

	struct kv_prefix_identity *identity = &index->identities[idx];

	*identity = (struct kv_prefix_identity){
		.hash = *hash,
		.tenant = tenant,
		.first_child = KV_PREFIX_NONE,
		.adapter_bytes = key->adapter_bytes,
		.salt_bytes = key->salt_bytes,
	};
	if (key->adapter_bytes > 0)
		memcpy(identity->adapter, key->adapter, key->adapter_bytes);
	if (key->salt_bytes > 0)
		memcpy(identity->salt, key->salt, key->salt_bytes);
	kv_hash_index_insert(&index->by_identity, hash->low, idx);
	index->n_identities++;
	return idx;
}

static void drop_identity(struct kv_prefix_index *index, uint32_t idx)
{
	kv_hash_index_remove(&index->by_identity, index->identities[idx].hash.low, idx);
	index->n_identities--;
}

/* ---- nodes ---- */

static uint32_t *children_of(struct kv_prefix_index *index, uint32_t parent)
{
	return parent & KV_PREFIX_ROOT ? &index->identities[parent & ~KV_PREFIX_ROOT].first_child
				       : &index->nodes[parent].first_child;
}

static void link_child(struct kv_prefix_index *index, uint32_t idx, uint32_t parent)
{
	uint32_t *first = children_of(index, parent);

	index->nodes[idx].next_sibling = *first;
	index->nodes[idx].prev_sibling = KV_PREFIX_NONE;
	if (*first != KV_PREFIX_NONE)
		index->nodes[*first].prev_sibling = idx;
	*first = idx;
}

static void unlink_child(struct kv_prefix_index *index, uint32_t idx)
{
	const struct kv_prefix_node *node = &index->nodes[idx];

	if (node->prev_sibling != KV_PREFIX_NONE)
		index->nodes[node->prev_sibling].next_sibling = node->next_sibling;
	else
		*children_of(index, node->parent) = node->next_sibling;
	if (node->next_sibling != KV_PREFIX_NONE)
		index->nodes[node->next_sibling].prev_sibling = node->prev_sibling;
	if ((node->parent & KV_PREFIX_ROOT) && *children_of(index, node->parent) == KV_PREFIX_NONE)
		drop_identity(index, node->parent & ~KV_PREFIX_ROOT);
}

/* A node over the sequence's blocks at this place; part_first KV_PREFIX_NONE: it is the first of its part. */
static uint32_t add_node(struct kv_pool *pool, uint32_t parent, uint32_t part_first,
	const struct kv_prefix_hash *hash, const uint8_t *tokens, const uint32_t blocks[KV_GROUPS_MAX],
	uint64_t now_ns)
{
	struct kv_prefix_index *index = pool->prefixes;
	const uint32_t idx = index->n_freed > 0 ? index->free_ids[--index->n_freed] : index->n_touched++;

	const bool is_first = (parent & KV_PREFIX_ROOT) != 0;

	KV_ASSERT(idx < index->n_max);
	index->nodes[idx] = (struct kv_prefix_node){ .hash = *hash,
		.parent = parent,
		.first_child = KV_PREFIX_NONE,
		.expires_ns = 1,
		.identity = is_first ? parent & ~KV_PREFIX_ROOT : index->nodes[parent].identity,
		.depth = is_first ? 1 : index->nodes[parent].depth + 1,
		.part_first = part_first == KV_PREFIX_NONE ? idx : part_first,
		.serial = ++pool->domain->prefix_serial,
		.published_ns = now_ns,
		.is_used = true };
	memcpy(kv_prefix_tokens_of(index, idx), tokens, 4 * (size_t)index->block_size);
	for (uint32_t g = 0; g < index->n_groups; g++) {
		index->blocks[(uint64_t)idx * index->n_groups + g] = blocks[g];
		index->node_of[g][blocks[g]] = idx + 1;
		kv_block_pool_keep(&pool->blocks[g], (kv_block_id){ blocks[g] });
	}
	link_child(index, idx, parent);
	kv_hash_index_insert(&index->by_hash, hash->low, idx);
	index->counts.n_nodes++;
	index->counts.n_published++;
	return idx;
}

void kv_prefix_remove_leaf(struct kv_pool *pool, uint32_t idx)
{
	struct kv_prefix_index *index = pool->prefixes;
	struct kv_prefix_node *node = &index->nodes[idx];

	KV_ASSERT(node->is_used && node->first_child == KV_PREFIX_NONE);
	kv_hash_index_remove(&index->by_hash, node->hash.low, idx);
	unlink_child(index, idx);
	for (uint32_t g = 0; g < index->n_groups; g++) {
		const uint32_t block = index->blocks[(uint64_t)idx * index->n_groups + g];

		index->node_of[g][block] = 0;
		kv_block_pool_unkeep(&pool->blocks[g], (kv_block_id){ block });
	}
	node->is_used = false;
	index->free_ids[index->n_freed++] = idx;
	index->counts.n_nodes--;
}

/* A node and everything below it; returns how many nodes. */
static uint32_t remove_tree(struct kv_pool *pool, uint32_t top)
{
	struct kv_prefix_index *index = pool->prefixes;
	uint32_t idx = top, n = 0;

	for (;;) {
		while (index->nodes[idx].first_child != KV_PREFIX_NONE)
			idx = index->nodes[idx].first_child;

		const uint32_t parent = index->nodes[idx].parent;
		const bool is_top = idx == top;

		kv_prefix_remove_leaf(pool, idx);
		n++;
		if (is_top)
			return n;
		idx = parent;
	}
}

/* ---- PUBLISH ---- */

/* Lives until then at least, and so does everything above it. */
static void renew_path(struct kv_prefix_index *index, const uint32_t path[], uint32_t n, uint64_t expires_ns)
{
	for (uint32_t i = n; i-- > 0;) {
		uint64_t *mine = &index->nodes[path[i]].expires_ns;

		if (*mine != 0 && (expires_ns == 0 || expires_ns > *mine))
			*mine = expires_ns;
	}
}

/* False: one of the blocks is published already, or there is none (any more). */
static bool blocks_at(const struct kv_sequence *sequence, uint32_t entry_idx, uint32_t blocks[KV_GROUPS_MAX])
{
	const struct kv_pool *pool = sequence->pool;

	for (uint32_t g = 0; g < pool->spec->n_groups; g++) {
		kv_block_table_copy(&sequence->tables[g], &pool->tables, entry_idx, 1, &blocks[g]);
		if (blocks[g] == KV_BLOCK_NONE || pool->prefixes->node_of[g][blocks[g]] != 0)
			return false;
	}
	return true;
}

static enum kv_status check_publish(
	const struct kv_sequence *sequence, const struct kv_prefix_key *key, struct kv_prefix_result *result)
{
	if (!sequence)
		return KV_NOT_FOUND;
	if (sequence->is_evicted)
		return KV_EVICTED;

	const enum kv_status status = kv_sequence_check_residence(sequence, true);

	if (status != KV_OK)
		return status;
	KV_ASSERT(sequence->n_items == 0);

	const uint32_t length = kv_least_length(sequence->committed, 0, sequence->pool->spec->n_layers);

	if (key->n_tokens <= length)
		return KV_OK;
	result->n_tokens = length;
	return KV_POSITION;
}

enum kv_status kv_prefix_publish(struct kv_session *session, uint64_t sequence_id,
	const struct kv_prefix_key *key, uint32_t ttl_ms, uint64_t now_ns, struct kv_prefix_result *result)
{
	struct kv_pool *pool = session->pool;
	struct kv_prefix_index *index = pool->prefixes;
	const struct kv_sequence *sequence = kv_sequence_find(session, sequence_id);
	const uint32_t n_blocks = key->n_tokens / index->block_size;
	struct kv_prefix_hash hash = kv_prefix_identity_hash(index, session->tenant, key);

	*result = (struct kv_prefix_result){ 0 };

	const enum kv_status status = check_publish(sequence, key, result);

	if (status != KV_OK || n_blocks == 0)
		return status;

	uint32_t identity = find_identity(index, &hash, session->tenant, key);

	if (identity == KV_PREFIX_NONE)
		identity = add_identity(index, &hash, session->tenant, key);
	if (identity == KV_PREFIX_NONE)
		return KV_LIMIT;
	uint32_t part_first = KV_PREFIX_NONE;

	for (uint32_t parent = KV_PREFIX_ROOT | identity; result->n_blocks < n_blocks; result->n_blocks++) {
		const uint8_t *tokens = key->tokens + 4 * (uint64_t)index->block_size * result->n_blocks;
		uint32_t blocks[KV_GROUPS_MAX];

		hash = kv_prefix_block_hash(index, &hash, tokens);
		/* One whose time is over, but that is still there, is as good as a new one. */
		uint32_t node = kv_prefix_find_child(index, parent, &hash, tokens, 0);

		if (node == KV_PREFIX_NONE) {
			if (!blocks_at(sequence, result->n_blocks, blocks))
				break;
			node = add_node(pool, parent, part_first, &hash, tokens, blocks, now_ns);
			part_first = index->nodes[node].part_first;
			result->n_blocks_new++;
		}
		index->path[result->n_blocks] = node;
		parent = node;
	}
	if (index->identities[identity].first_child == KV_PREFIX_NONE)
		drop_identity(index, identity);
	if (result->n_blocks > 0)
		index->nodes[index->path[result->n_blocks - 1]].is_end = true;
	renew_path(index, index->path, result->n_blocks, ttl_ms ? now_ns + ttl_ms * KV_NS_PER_MS : 0);
	result->n_tokens = result->n_blocks * index->block_size;
	return KV_OK;
}

uint32_t kv_prefix_put(struct kv_pool *pool, uint64_t tenant, const struct kv_prefix_key *key,
	uint32_t parent, const uint8_t *tokens, const uint32_t blocks[KV_GROUPS_MAX], uint64_t expires_ns,
	uint64_t now_ns)
{
	struct kv_prefix_index *index = pool->prefixes;
	struct kv_prefix_hash hash;
	uint32_t part_first = KV_PREFIX_NONE;

	if (parent == KV_PREFIX_NONE) {
		hash = kv_prefix_identity_hash(index, tenant, key);
		uint32_t identity = find_identity(index, &hash, tenant, key);

		if (identity == KV_PREFIX_NONE)
			identity = add_identity(index, &hash, tenant, key);
		if (identity == KV_PREFIX_NONE)
			return KV_PREFIX_NONE;
		parent = KV_PREFIX_ROOT | identity;
	} else {
		/* Which PUBLISH it came with is not known any more: a part ends where a prefix does, and
		 * where the tree forks. */
		if (index->nodes[parent].first_child == KV_PREFIX_NONE && !index->nodes[parent].is_end)
			part_first = index->nodes[parent].part_first;
		hash = index->nodes[parent].hash;
	}
	hash = kv_prefix_block_hash(index, &hash, tokens);
	uint32_t node = kv_prefix_find_child(index, parent, &hash, tokens, 0);

	if (node == KV_PREFIX_NONE)
		node = add_node(pool, parent, part_first, &hash, tokens, blocks, now_ns);
	/* Up to the first that lives as long already. */
	for (uint32_t i = node; !(i & KV_PREFIX_ROOT); i = index->nodes[i].parent) {
		uint64_t *mine = &index->nodes[i].expires_ns;

		if (*mine == 0 || (expires_ns != 0 && *mine >= expires_ns))
			break;
		*mine = expires_ns;
	}
	return node;
}

/* ---- MATCH ---- */

/* Fills index->path; returns how many blocks. The same work for a tenant's first miss as for all others'. */
static uint32_t walk(const struct kv_session *session, const struct kv_prefix_key *key, uint64_t now_ns)
{
	struct kv_prefix_index *index = session->pool->prefixes;
	const uint32_t n_wanted =
		(key->n_tokens < session->tokens_max ? key->n_tokens : session->tokens_max) /
		index->block_size;
	struct kv_prefix_hash hash = kv_prefix_identity_hash(index, session->tenant, key);
	const uint32_t identity = find_identity(index, &hash, session->tenant, key);
	uint32_t parent = KV_PREFIX_ROOT | (identity & ~KV_PREFIX_ROOT), n = 0;

	while (n < n_wanted) {
		const uint8_t *tokens = key->tokens + 4 * (uint64_t)index->block_size * n;

		hash = kv_prefix_block_hash(index, &hash, tokens);

		const uint32_t node = kv_prefix_find_child(index, parent, &hash, tokens, now_ns);

		if (node == KV_PREFIX_NONE)
			break;
		index->path[n++] = node;
		parent = node;
	}
	return n;
}

static void share_path(struct kv_sequence *sequence, uint32_t n)
{
	struct kv_pool *pool = sequence->pool;
	const struct kv_prefix_index *index = pool->prefixes;

	for (uint32_t g = 0; g < index->n_groups; g++) {
		for (uint32_t i = 0; i < n; i++) {
			const uint64_t at = (uint64_t)index->path[i] * index->n_groups + g;
			const kv_block_id id = { index->blocks[at] };
			const enum kv_status status = kv_block_table_append(
				&sequence->tables[g], &pool->tables, &pool->blocks[g], &id, 1);

			KV_ASSERT(status == KV_OK);
			kv_block_pool_own(&pool->blocks[g], id);
		}
	}
}

enum kv_status kv_prefix_match(struct kv_session *session, uint64_t sequence_id,
	const struct kv_prefix_key *key, bool is_evictable, uint64_t now_ns, struct kv_prefix_result *result)
{
	struct kv_pool *pool = session->pool;
	struct kv_prefix_index *index = pool->prefixes;
	enum kv_status status = KV_OK;

	*result = (struct kv_prefix_result){ 0 };
	if (sequence_id != 0 && kv_sequence_find(session, sequence_id))
		return KV_EXISTS;
	result->n_blocks = walk(session, key, now_ns);
	result->n_tokens = result->n_blocks * index->block_size;
	if (result->n_blocks == 0) {
		index->counts.n_misses++;
		return KV_NOT_FOUND;
	}
	if (sequence_id != 0) {
		status = kv_sequence_check_table(session, result->n_blocks);
		if (status == KV_OK)
			status = kv_sequence_check_tokens(session, NULL, result->n_tokens);
		if (status != KV_OK) {
			*result = (struct kv_prefix_result){ 0 };
			return status;
		}

		struct kv_sequence *sequence = kv_sequence_add(session, sequence_id, now_ns);

		share_path(sequence, result->n_blocks);
		kv_sequence_inherit(sequence, result->n_tokens, is_evictable);
		kv_sequence_move_windows(sequence);
	}
	for (uint32_t i = 0; i < result->n_blocks; i++)
		index->nodes[index->path[i]].n_hits++;
	index->counts.n_hits++;
	index->counts.n_tokens_matched += result->n_tokens;
	return KV_OK;
}

/* ---- going ---- */

uint32_t kv_prefix_evict_block(struct kv_pool *pool, uint32_t group_idx, uint32_t block)
{
	struct kv_prefix_index *index = pool->prefixes;
	const uint32_t n_nodes = remove_tree(pool, index->node_of[group_idx][block] - 1);

	index->counts.n_evicted += n_nodes;
	return n_nodes;
}

bool kv_prefix_evict(struct kv_pool *pool, uint32_t group_idx, uint32_t *n_nodes)
{
	const uint32_t block = kv_block_pool_idle_first(&pool->blocks[group_idx]);

	if (block == KV_PREFIX_NONE)
		return false;
	*n_nodes = kv_prefix_evict_block(pool, group_idx, block);
	return true;
}

void kv_prefix_expire(struct kv_domain *domain, uint64_t now_ns, uint32_t n_looks)
{
	for (uint32_t i = 0; i < domain->n_pools; i++) {
		struct kv_pool *pool = domain->pools[i];
		struct kv_prefix_index *index = pool->prefixes;

		for (uint32_t look = 0; look < n_looks && index->counts.n_nodes > 0; look++) {
			const struct kv_prefix_node *node = &index->nodes[index->cursor];

			/* What is below has less time left; a leaf at a time keeps the work small. */
			if (node->is_used && node->expires_ns != 0 && node->expires_ns <= now_ns &&
				node->first_child == KV_PREFIX_NONE) {
				kv_prefix_remove_leaf(pool, index->cursor);
				index->counts.n_expired++;
			}
			index->cursor = index->cursor + 1 < index->n_touched ? index->cursor + 1 : 0;
		}
	}
}
