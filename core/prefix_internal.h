/*
 * The prefix index from inside: its parts, which prefix*.c share, and what the domain calls.
 */
#ifndef CORE_PREFIX_INTERNAL_H
#define CORE_PREFIX_INTERNAL_H

#include "core/hash_index.h"
#include "core/prefix.h"

#define KV_PREFIX_NONE           UINT32_MAX
#define KV_PREFIX_ROOT           0x80000000u /* a parent with this bit is an identity */
#define KV_PREFIX_IDENTITIES_MAX 4096u

struct kv_prefix_hash {
	uint64_t low, high;
};

struct kv_prefix_node {
	struct kv_prefix_hash hash;
	uint64_t expires_ns; /* 0 = never; never before a child's */
	uint64_t serial;     /* which of all that were published, in any pool; in its id */
	uint32_t parent;     /* node, or KV_PREFIX_ROOT | identity */
	uint32_t first_child, next_sibling, prev_sibling;
	uint32_t identity;
	uint32_t depth;  /* blocks from the start to its end */
	uint64_t n_hits; /* of the path that ends here, or goes on */
	/* The first node of those that came with the same PUBLISH and lie above this one, or itself: what
	 * reached it found something of this prefix. It is above, so it stays as long as this one. */
	uint32_t part_first;
	uint64_t published_ns;
	bool is_used;
	bool is_end; /* a PUBLISH ended here: it is listed, whatever is below it */
};

struct kv_prefix_identity {
	struct kv_prefix_hash hash;
	uint64_t tenant;
	uint32_t first_child; /* KV_PREFIX_NONE: unused */
	uint32_t adapter_bytes, salt_bytes;
	char adapter[KV_PREFIX_TEXT_BYTES_MAX], salt[KV_PREFIX_TEXT_BYTES_MAX];
};

struct kv_prefix_index {
	uint32_t n_max, n_groups, block_size;
	uint64_t seed, mask;
	uint64_t fingerprint;
	struct kv_prefix_node *nodes;     /* [n_max] */
	uint8_t *tokens;                  /* [n_max, block_size] u32 each, as on the wire */
	uint32_t *blocks;                 /* [n_max, n_groups] */
	uint32_t *path;                   /* [n_max] scratch of one walk */
	uint32_t *free_ids;               /* stack [n_freed] */
	uint32_t *node_of[KV_GROUPS_MAX]; /* [n_blocks] node + 1; 0 = block is not published */
	uint32_t n_blocks[KV_GROUPS_MAX];
	uint32_t n_freed, n_touched;
	uint32_t cursor; /* of kv_prefix_expire() */
	struct kv_hash_index by_hash;
	struct kv_prefix_identity *identities; /* [KV_PREFIX_IDENTITIES_MAX] */
	struct kv_hash_index by_identity;
	uint32_t n_identities_touched, n_identities;
	struct kv_prefix_counts counts;
};

struct kv_prefix_hash kv_prefix_identity_hash(
	const struct kv_prefix_index *index, uint64_t tenant, const struct kv_prefix_key *key);
/* Of a block's tokens behind what the parent's hash stands for. */
struct kv_prefix_hash kv_prefix_block_hash(
	const struct kv_prefix_index *index, const struct kv_prefix_hash *parent, const uint8_t *tokens);
static inline bool kv_prefix_is_same_hash(const struct kv_prefix_hash *a, const struct kv_prefix_hash *b)
{
	return a->low == b->low && a->high == b->high;
}
static inline uint8_t *kv_prefix_tokens_of(const struct kv_prefix_index *index, uint32_t node_idx)
{
	return index->tokens + 4 * (uint64_t)index->block_size * node_idx;
}
/* The child with these tokens whose time is not over at now_ns, or KV_PREFIX_NONE. */
uint32_t kv_prefix_find_child(const struct kv_prefix_index *index, uint32_t parent,
	const struct kv_prefix_hash *hash, const uint8_t *tokens, uint64_t now_ns);

/* prefix.c: takes out one that has no child. */
void kv_prefix_remove_leaf(struct kv_pool *pool, uint32_t idx);

KV_MUST_CHECK enum kv_status kv_prefix_index_create(const struct kv_pool_spec *spec, struct kv_random *random,
	struct kv_prefix_index **out, struct kv_error *err);
void kv_prefix_index_destroy(struct kv_prefix_index *index); /* NULL allowed */

/*
 * Takes the node out whose block in the group has been idle the longest, with everything below it, which is
 * idle, too, or about to be. False: no block of the group is idle.
 */
/* An idle block's node and all below; returns how many nodes. */
uint32_t kv_prefix_evict_block(struct kv_pool *pool, uint32_t group_idx, uint32_t block);
bool kv_prefix_evict(struct kv_pool *pool, uint32_t group_idx, uint32_t *n_nodes);

/*
 * A block becomes published behind `parent`, or (KV_PREFIX_NONE) as the first one of the tenant's key; who
 * calls this owns it. One with the same tokens that is there already lives on instead, at least as long.
 * Returns the node, or KV_PREFIX_NONE when there is no room for the key.
 */
uint32_t kv_prefix_put(struct kv_pool *pool, uint64_t tenant, const struct kv_prefix_key *key,
	uint32_t parent, const uint8_t *tokens, const uint32_t blocks[KV_GROUPS_MAX], uint64_t expires_ns,
	uint64_t now_ns);

/* For the audit. NULL: the node is not in use; else [n_groups]. */
uint32_t kv_prefix_n_nodes_touched(const struct kv_pool *pool);
const uint32_t *kv_prefix_blocks_of(const struct kv_pool *pool, uint32_t node_idx);
/* Does the index say that one of its nodes has the block? */
bool kv_prefix_is_kept(const struct kv_pool *pool, uint32_t group_idx, uint32_t block_idx);
/* NULL, or what is wrong with a node that is in use. */
const char *kv_prefix_check_node(const struct kv_pool *pool, uint32_t node_idx);

#endif
