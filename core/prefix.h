/*
 * Published prefixes: full committed blocks that outlive their sequence and are found by token ids.
 *
 * A prefix is a path of nodes, one per block of tokens and all layer groups, below an identity (pool, tenant,
 * adapter, salt). A node owns its blocks, so they are never written, and keeps the token ids: a path is
 * walked by a hash chained over blocks and seeded per start, and a node counts only when its parent and its
 * token ids are the same, so a collision costs a miss and never a wrong share. Blocks that nobody but a node
 * owns are "idle": the block pools list them in the order of becoming so, and eviction takes them from the
 * front.
 *
 * Everything is taken with the pool and resident once used. Loop thread only.
 */
#ifndef CORE_PREFIX_H
#define CORE_PREFIX_H

#include <stdbool.h>
#include <stdint.h>

#include "core/domain.h"

#define KV_PREFIX_TEXT_BYTES_MAX 64u /* adapter, salt: each */

struct kv_prefix_index;

/* What a client says; the tenant is its session's. */
struct kv_prefix_key {
	const char *adapter, *salt; /* any bytes */
	uint32_t adapter_bytes, salt_bytes;
	const uint8_t *tokens; /* u32 per token, little-endian as on the wire */
	uint32_t n_tokens;
};
struct kv_prefix_result {
	uint32_t n_tokens;     /* of the whole blocks that are published (PUBLISH) or found (MATCH) */
	uint32_t n_blocks;     /* the same in blocks */
	uint32_t n_blocks_new; /* PUBLISH: those that were not published before */
};
struct kv_prefix_counts {
	uint32_t n_nodes;
	uint64_t n_published, n_evicted, n_expired,
		n_removed; /* nodes, since start; removed by an operator */
	uint64_t n_hits, n_misses, n_tokens_matched;
};

/*
 * Only with nothing outstanding on the session. Publishes the whole blocks among the first n_tokens of the
 * sequence; blocks that are published already under the same key live for ttl_ms from now at least (0: until
 * they are evicted). NOT_FOUND, EVICTED, POSITION (result->n_tokens is the sequence's length) when it is
 * shorter, LIMIT (identities). Ends early, with OK, at a block that is published under another key already.
 */
KV_MUST_CHECK enum kv_status kv_prefix_publish(struct kv_session *session, uint64_t sequence_id,
	const struct kv_prefix_key *key, uint32_t ttl_ms, uint64_t now_ns, struct kv_prefix_result *result);
/*
 * The longest published prefix of the tokens becomes a new sequence that shares its blocks; sequence_id 0: is
 * only told. NOT_FOUND (also for what other tenants published), EXISTS, LIMIT, BUSY_RETRY as for FORK. What
 * the session's tokens_max does not hold is left out.
 */
KV_MUST_CHECK enum kv_status kv_prefix_match(struct kv_session *session, uint64_t sequence_id,
	const struct kv_prefix_key *key, bool is_evictable, uint64_t now_ns, struct kv_prefix_result *result);
/* Removes nodes whose time is over; looks at no more than n_looks nodes of every pool. */
void kv_prefix_expire(struct kv_domain *domain, uint64_t now_ns, uint32_t n_looks);
struct kv_prefix_counts kv_prefix_counts(const struct kv_pool *pool);

/*
 * One published prefix, as an operator sees it: a path from the start to where a PUBLISH ended, or to where
 * nothing goes on (any more). Its blocks may be those of longer ones, too.
 */
struct kv_prefix_row {
	uint64_t id; /* never that of another prefix, in any pool */
	uint64_t tenant;
	char adapter[KV_PREFIX_TEXT_BYTES_MAX];
	uint32_t adapter_bytes;
	bool has_salt;               /* the salt itself is the clients' secret */
	uint32_t n_tokens, n_blocks; /* of the whole path; blocks of all groups */
	uint32_t n_holders;          /* sequences and snapshots that have its last block: nothing evicts it */
	uint64_t stored_bytes;
	/*
	 * MATCHes that found a block which its PUBLISH added (where it added none, which the one added that
	 * its last block came with), and those that found all of it, or something longer. So a match of half
	 * a prefix counts for it, one that ends in the part which it shares with an older one counts for the
	 * older one only, and one that goes on into a third counts for all of them: sums over rows may be
	 * more than the pool's n_hits.
	 */
	uint64_t n_hits, n_whole_hits;
	uint64_t published_ns, expires_ns; /* 0: until it is evicted */
};
/*
 * The first prefix from node *node_idx on; *node_idx is then behind it. Looks at no more than *n_looks nodes
 * and counts them down. False: there is none, or the looks are used up.
 */
bool kv_prefix_next(
	const struct kv_pool *pool, uint32_t *node_idx, uint32_t *n_looks, struct kv_prefix_row *row);
/* Also what is not listed, since other prefixes go on behind it. NOT_FOUND. */
KV_MUST_CHECK enum kv_status kv_prefix_find(
	const struct kv_domain *domain, uint64_t id, struct kv_pool **pool, struct kv_prefix_row *row);
/*
 * Takes a prefix out, with all that go on behind it, and with the part before it that no other prefix has.
 * Sequences keep what they share. OK when it is gone, NOT_FOUND. BUSY_RETRY after n_nodes_max nodes: *id
 * names what is left.
 */
KV_MUST_CHECK enum kv_status kv_prefix_remove(struct kv_domain *domain, uint64_t *id, uint32_t n_nodes_max);
/* For tests: only so many low bits of the hashes count, 1 to 64. Before anything is published. */
void kv_prefix_truncate_hashes(struct kv_pool *pool, uint32_t n_bits);

#endif
