/*
 * The memory of the prefix index, its hashes, and what the audit looks at.
 */
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "core/domain_internal.h"
#include "core/memory.h"
#include "core/prefix_internal.h"

/* ---- making ---- */

void kv_prefix_index_destroy(struct kv_prefix_index *index)
{
	if (!index)
		return;
	kv_pages_free(index->nodes, sizeof(*index->nodes) * (uint64_t)index->n_max);
	kv_pages_free(index->tokens, 4 * (uint64_t)index->block_size * index->n_max);
	kv_pages_free(index->blocks, sizeof(uint32_t) * (uint64_t)index->n_groups * index->n_max);
	kv_pages_free(index->path, sizeof(uint32_t) * (uint64_t)index->n_max);
	kv_pages_free(index->free_ids, sizeof(uint32_t) * (uint64_t)index->n_max);
	for (uint32_t g = 0; g < index->n_groups; g++)
		kv_pages_free(index->node_of[g], sizeof(uint32_t) * (uint64_t)index->n_blocks[g]);
	kv_pages_free(index->identities, sizeof(*index->identities) * (uint64_t)KV_PREFIX_IDENTITIES_MAX);
	kv_hash_index_finish(&index->by_hash);
	kv_hash_index_finish(&index->by_identity);
	kv_free(index);
}

/* False when something is missing. */
static bool take_memory(struct kv_prefix_index *index)
{
	bool is_whole = true;

	index->nodes = kv_pages_alloc(sizeof(*index->nodes) * (uint64_t)index->n_max);
	index->tokens = kv_pages_alloc(4 * (uint64_t)index->block_size * index->n_max);
	index->blocks = kv_pages_alloc(sizeof(uint32_t) * (uint64_t)index->n_groups * index->n_max);
	index->path = kv_pages_alloc(sizeof(uint32_t) * (uint64_t)index->n_max);
	index->free_ids = kv_pages_alloc(sizeof(uint32_t) * (uint64_t)index->n_max);
	index->identities = kv_pages_alloc(sizeof(*index->identities) * (uint64_t)KV_PREFIX_IDENTITIES_MAX);
	for (uint32_t g = 0; g < index->n_groups; g++) {
		index->node_of[g] = kv_pages_alloc(sizeof(uint32_t) * (uint64_t)index->n_blocks[g]);
		is_whole = is_whole && index->node_of[g];
	}
	return is_whole && index->nodes && index->tokens && index->blocks && index->path && index->free_ids &&
		index->identities;
}

enum kv_status kv_prefix_index_create(const struct kv_pool_spec *spec, struct kv_random *random,
	struct kv_prefix_index **out, struct kv_error *err)
{
	struct kv_prefix_index *index = kv_alloc(1, sizeof(*index));

	if (!index)
		return kv_fail(err, KV_NO_MEMORY, "prefix index");
	index->n_groups = spec->n_groups;
	index->block_size = spec->block_size;
	index->fingerprint = spec->fingerprint;
	index->seed = kv_random_next(random);
	index->mask = UINT64_MAX;
	index->n_max = spec->n_blocks[0];
	for (uint32_t g = 0; g < spec->n_groups; g++) {
		index->n_blocks[g] = spec->n_blocks[g];
		if (spec->n_blocks[g] < index->n_max)
			index->n_max = spec->n_blocks[g];
	}

	enum kv_status status = take_memory(index)
		? KV_OK
		: kv_fail(err, KV_NO_MEMORY, "prefix index of %u nodes", index->n_max);

	if (status == KV_OK)
		status = kv_hash_index_init(&index->by_hash, index->n_max, err);
	if (status == KV_OK)
		status = kv_hash_index_init(&index->by_identity, KV_PREFIX_IDENTITIES_MAX, err);
	if (status != KV_OK) {
		kv_prefix_index_destroy(index);
		return status;
	}
	*out = index;
	return KV_OK;
}

void kv_prefix_truncate_hashes(struct kv_pool *pool, uint32_t n_bits)
{
	pool->prefixes->mask = n_bits < 64 ? (1ull << n_bits) - 1 : UINT64_MAX;
}

struct kv_prefix_counts kv_prefix_counts(const struct kv_pool *pool)
{
	return pool->prefixes->counts;
}

/* ---- hashes ---- */

static struct kv_prefix_hash hash_of(const struct kv_prefix_index *index, const void *bytes, size_t n_bytes)
{
	const XXH128_hash_t hash = XXH3_128bits_withSeed(bytes, n_bytes, index->seed);

	return (struct kv_prefix_hash){ hash.low64 & index->mask,
		index->mask == UINT64_MAX ? hash.high64 : 0 };
}

/* Tag and length before every field, so that no two identities are the same bytes. */
static uint8_t *put_field(uint8_t *at, char tag, const void *bytes, uint32_t n_bytes)
{
	*at++ = (uint8_t)tag;
	memcpy(at, &n_bytes, sizeof(n_bytes));
	at += sizeof(n_bytes);
	if (n_bytes > 0)
		memcpy(at, bytes, n_bytes);
	return at + n_bytes;
}

struct kv_prefix_hash kv_prefix_identity_hash(
	const struct kv_prefix_index *index, uint64_t tenant, const struct kv_prefix_key *key)
{
	uint8_t bytes[4 * 5 + 2 * 8 + 2 * KV_PREFIX_TEXT_BYTES_MAX];
	uint8_t *at = put_field(bytes, 'p', &index->fingerprint, sizeof(index->fingerprint));

	at = put_field(at, 't', &tenant, sizeof(tenant));
	at = put_field(at, 'a', key->adapter, key->adapter_bytes);
	at = put_field(at, 's', key->salt, key->salt_bytes);
	return hash_of(index, bytes, (size_t)(at - bytes));
}

struct kv_prefix_hash kv_prefix_block_hash(
	const struct kv_prefix_index *index, const struct kv_prefix_hash *parent, const uint8_t *tokens)
{
	XXH3_state_t state;

	XXH3_INITSTATE(&state);
	XXH3_128bits_reset_withSeed(&state, index->seed);
	XXH3_128bits_update(&state, parent, sizeof(*parent));
	XXH3_128bits_update(&state, tokens, 4 * (size_t)index->block_size);

	const XXH128_hash_t hash = XXH3_128bits_digest(&state);

	return (struct kv_prefix_hash){ hash.low64 & index->mask,
		index->mask == UINT64_MAX ? hash.high64 : 0 };
}

uint32_t kv_prefix_find_child(const struct kv_prefix_index *index, uint32_t parent,
	const struct kv_prefix_hash *hash, const uint8_t *tokens, uint64_t now_ns)
{
	for (uint32_t i = kv_hash_index_first(&index->by_hash, hash->low); i != KV_HASH_NONE;
		i = kv_hash_index_next(&index->by_hash, i)) {
		const struct kv_prefix_node *node = &index->nodes[i];

		if (node->parent == parent && kv_prefix_is_same_hash(&node->hash, hash) &&
			memcmp(kv_prefix_tokens_of(index, i), tokens, 4 * (size_t)index->block_size) == 0)
			return node->expires_ns == 0 || node->expires_ns > now_ns ? i : KV_PREFIX_NONE;
	}
	return KV_PREFIX_NONE;
}

/* ---- for the audit ---- */

uint32_t kv_prefix_n_nodes_touched(const struct kv_pool *pool)
{
	return pool->prefixes->n_touched;
}

const uint32_t *kv_prefix_blocks_of(const struct kv_pool *pool, uint32_t node_idx)
{
	const struct kv_prefix_index *index = pool->prefixes;

	return index->nodes[node_idx].is_used ? &index->blocks[(uint64_t)node_idx * index->n_groups] : NULL;
}

bool kv_prefix_is_kept(const struct kv_pool *pool, uint32_t group_idx, uint32_t block_idx)
{
	const struct kv_prefix_index *index = pool->prefixes;
	const uint32_t node = index->node_of[group_idx][block_idx];

	return node > 0 && node <= index->n_touched && index->nodes[node - 1].is_used &&
		index->blocks[(uint64_t)(node - 1) * index->n_groups + group_idx] == block_idx;
}

const char *kv_prefix_check_node(const struct kv_pool *pool, uint32_t node_idx)
{
	const struct kv_prefix_index *index = pool->prefixes;
	const struct kv_prefix_node *node = &index->nodes[node_idx];
	const struct kv_prefix_hash *parent;

	for (uint32_t g = 0; g < index->n_groups; g++) {
		if (index->node_of[g][index->blocks[(uint64_t)node_idx * index->n_groups + g]] !=
			node_idx + 1)
			return "its block does not lead to it";
	}
	const struct kv_prefix_node *first =
		node->part_first < index->n_touched ? &index->nodes[node->part_first] : NULL;

	if (!first || !first->is_used || first->depth > node->depth || first->identity != node->identity ||
		first->n_hits < node->n_hits)
		return "the part that it came with does not begin above it";
	if (!(node->parent & KV_PREFIX_ROOT)) {
		const struct kv_prefix_node *above = &index->nodes[node->parent];

		if (!above->is_used)
			return "its parent is gone";
		if (above->expires_ns != 0 && (node->expires_ns == 0 || node->expires_ns > above->expires_ns))
			return "it lives longer than its parent";
		parent = &above->hash;
	} else {
		parent = &index->identities[node->parent & ~KV_PREFIX_ROOT].hash;
	}

	const struct kv_prefix_hash hash =
		kv_prefix_block_hash(index, parent, kv_prefix_tokens_of(index, node_idx));

	if (!kv_prefix_is_same_hash(&hash, &node->hash))
		return "its hash is not that of its tokens";
	return kv_prefix_find_child(index, node->parent, &hash, kv_prefix_tokens_of(index, node_idx), 0) ==
			node_idx
		? NULL
		: "its tokens do not find it";
}
