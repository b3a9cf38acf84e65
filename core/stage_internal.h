/*
 * The stage from inside: what stage.c and stage_prefix.c share.
 */
#ifndef CORE_STAGE_INTERNAL_H
#define CORE_STAGE_INTERNAL_H

#include "core/domain_internal.h"
#include "core/prefix_internal.h"
#include "core/stage.h"

#define KV_STAGE_ADOPTED   0x80000000u /* a table or a prefix has the block: it is not the stage's any more */
#define KV_STAGE_PUBLISHED 0x40000000u /* a prefix has it */
#define KV_STAGE_BLOCK     0x3FFFFFFFu

_Static_assert(KV_BLOCKS_MAX - 1 <= KV_STAGE_BLOCK, "a block and two bits");

/* Blocks of one group by number. */
struct kv_staged_blocks {
	uint32_t *ids;       /* [n_blocks]: block_idx, with the bits above */
	uint8_t *n_rows;     /* [n_blocks, n_layers of the group]: touched only where a block is not full */
	uint8_t *is_partial; /* [n_blocks] */
	uint32_t n_blocks, n_layers, n_numbers, n_adopted;
};

/* A block that will be published. It owns its blocks until then. */
struct kv_staged_node {
	uint32_t parent, root;
	uint32_t blocks[KV_GROUPS_MAX]; /* block_idx */
	uint64_t ttl_left_ns;
	bool is_end;
	/* where it is published: node of the index, and which one that was then */
	uint32_t node_idx;
	uint64_t serial;
};

struct kv_staged_root {
	uint64_t tenant;
	uint32_t adapter_bytes, salt_bytes;
	char adapter[KV_PREFIX_TEXT_BYTES_MAX], salt[KV_PREFIX_TEXT_BYTES_MAX];
};

/* Published blocks of one pool by number. */
struct kv_staged_nodes {
	struct kv_staged_node *nodes; /* [n_max] */
	struct kv_staged_root *roots; /* [n_max] */
	uint8_t *tokens;              /* [n_max, block_size] u32 */
	uint32_t n_max, block_size, n, n_roots, n_settled;
};

struct kv_stage {
	struct kv_domain *domain;
	struct kv_staged_blocks blocks[KV_POOLS_MAX][KV_GROUPS_MAX]; /* by pool_idx */
	struct kv_staged_nodes nodes[KV_POOLS_MAX];
	struct kv_list sessions; /* kv_session.in_pool */
	uint32_t n_sessions;
	bool is_committed;
	/* what the last records were about */
	struct kv_session *session;
	struct kv_sequence *sequence;
	uint32_t n_entries[KV_GROUPS_MAX];
	uint32_t n_gap[KV_GROUPS_MAX]; /* entries of the gap that came already */
};

/* stage_prefix.c */
bool kv_stage_nodes_init(struct kv_staged_nodes *nodes, const struct kv_pool *pool); /* false: no memory */
void kv_stage_nodes_finish(struct kv_staged_nodes *nodes);
void kv_stage_nodes_count(
	const struct kv_staged_nodes *nodes, const struct kv_pool *pool, uint32_t *const owners[]);

#endif
