/*
 * Hash index: finds ids of an array by a 64-bit hash, with chains threaded through a second array.
 *
 * It holds no keys: the caller walks the ids of one hash and compares. All memory is taken by init and
 * becomes resident once used. Hashes must come from kv_hash_pair() or be as hard to guess: what clients
 * choose must not be able to make long chains. Loop thread only.
 */
#ifndef CORE_HASH_INDEX_H
#define CORE_HASH_INDEX_H

#include <stdint.h>

#include "core/clock.h"
#include "core/error.h"

#define KV_HASH_NONE UINT32_MAX

struct kv_hash_index {
	uint32_t *heads; /* [1 << head_bits] id + 1, 0 = empty */
	uint32_t *nexts; /* [n_ids] id + 1, 0 = end */
	uint32_t n_ids;
	uint32_t head_bits;
};

/* Ids 0..n_ids - 1; n_ids at least 1 and at most 2^31. */
KV_MUST_CHECK enum kv_status kv_hash_index_init(
	struct kv_hash_index *index, uint32_t n_ids, struct kv_error *err);
void kv_hash_index_finish(struct kv_hash_index *index); /* half-built or zeroed allowed */
/* The id is in the index at most once. */
void kv_hash_index_insert(struct kv_hash_index *index, uint64_t hash, uint32_t id);
/* The id was inserted with the same hash. */
void kv_hash_index_remove(struct kv_hash_index *index, uint64_t hash, uint32_t id);
/* Ids that may have this hash: first one, then the one behind `id`; KV_HASH_NONE at the end. */
uint32_t kv_hash_index_first(const struct kv_hash_index *index, uint64_t hash);
uint32_t kv_hash_index_next(const struct kv_hash_index *index, uint32_t id);

/* Random numbers that no client knows. */
struct kv_hash_key {
	uint64_t words[6];
};
void kv_hash_key_init(struct kv_hash_key *key, struct kv_random *random);
/*
 * Multiply-shift with 128-bit random factors: two different pairs fall into the same of 2^b heads with
 * probability 2^-b over the choice of the key, whatever the pairs are. All 64 bits may be used, the upper
 * ones are meant.
 */
uint64_t kv_hash_pair(const struct kv_hash_key *key, uint64_t a, uint64_t b);

#endif
