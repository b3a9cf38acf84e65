#include "core/hash_index.h"

#include "core/checked.h"
#include "core/memory.h"

/* The widest product that the hash needs; an extension that gcc and clang share on 64-bit machines. */
__extension__ typedef unsigned __int128 wide_uint;

enum kv_status kv_hash_index_init(struct kv_hash_index *index, uint32_t n_ids, struct kv_error *err)
{
	KV_ASSERT(n_ids >= 1);
	KV_ASSERT(n_ids <= 1u << 31);
	*index = (struct kv_hash_index){ .n_ids = n_ids, .head_bits = 1 };
	while (1u << index->head_bits < n_ids)
		index->head_bits++;
	index->heads = kv_pages_alloc(sizeof(uint32_t) << index->head_bits);
	index->nexts = kv_pages_alloc(sizeof(uint32_t) * (uint64_t)n_ids);
	if (!index->heads || !index->nexts) {
		kv_hash_index_finish(index);
		return kv_fail(err, KV_NO_MEMORY, "hash index of %u ids", n_ids);
	}
	return KV_OK;
}

void kv_hash_index_finish(struct kv_hash_index *index)
{
	kv_pages_free(index->heads, sizeof(uint32_t) << index->head_bits);
	kv_pages_free(index->nexts, sizeof(uint32_t) * (uint64_t)index->n_ids);
	*index = (struct kv_hash_index){ 0 };
}

static uint32_t *head_of(const struct kv_hash_index *index, uint64_t hash)
{
	return &index->heads[hash >> (64 - index->head_bits)];
}

void kv_hash_index_insert(struct kv_hash_index *index, uint64_t hash, uint32_t id)
{
	uint32_t *head = head_of(index, hash);

	KV_ASSERT(id < index->n_ids);
	index->nexts[id] = *head;
	*head = id + 1;
}

void kv_hash_index_remove(struct kv_hash_index *index, uint64_t hash, uint32_t id)
{
	uint32_t *link = head_of(index, hash);

	KV_ASSERT(id < index->n_ids);
	while (*link != id + 1) {
		KV_ASSERT(*link != 0);
		link = &index->nexts[*link - 1];
	}
	*link = index->nexts[id];
	index->nexts[id] = 0;
}

uint32_t kv_hash_index_first(const struct kv_hash_index *index, uint64_t hash)
{
	return *head_of(index, hash) - 1; /* 0 becomes KV_HASH_NONE */
}

uint32_t kv_hash_index_next(const struct kv_hash_index *index, uint32_t id)
{
	return index->nexts[id] - 1;
}

void kv_hash_key_init(struct kv_hash_key *key, struct kv_random *random)
{
	for (uint32_t i = 0; i < KV_LENGTH(key->words); i++)
		key->words[i] = kv_random_next(random);
}

uint64_t kv_hash_pair(const struct kv_hash_key *key, uint64_t a, uint64_t b)
{
	const uint64_t *words = key->words;
	const wide_uint factor_a = (wide_uint)words[0] << 64 | words[1];
	const wide_uint factor_b = (wide_uint)words[2] << 64 | words[3];
	const wide_uint sum = factor_a * a + factor_b * b + ((wide_uint)words[4] << 64 | words[5]);

	return (uint64_t)(sum >> 64);
}
