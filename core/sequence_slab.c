/*
 * Sequence objects of one pool: preallocated, resident once used, recycled last in first out so that the
 * resident part stays as small as the peak.
 */
#include <string.h>

#include "core/domain_internal.h"
#include "core/memory.h"
#include "core/tally.h"

static uint64_t lengths_bytes(const struct kv_sequence_slab *slab)
{
	return 3 * sizeof(uint32_t) * (uint64_t)slab->n_max * slab->n_layers;
}

enum kv_status kv_sequence_slab_create(
	uint32_t n_max, uint32_t n_layers, struct kv_sequence_slab **out, struct kv_error *err)
{
	struct kv_sequence_slab *slab = kv_alloc(1, sizeof(*slab));

	if (!slab)
		return kv_fail(err, KV_NO_MEMORY, "sequence slab");
	slab->n_max = n_max;
	slab->n_layers = n_layers;
	slab->sequences = kv_pages_alloc(sizeof(*slab->sequences) * (uint64_t)n_max);
	slab->lengths = kv_pages_alloc(lengths_bytes(slab));
	slab->free_ids = kv_pages_alloc(sizeof(*slab->free_ids) * (uint64_t)n_max);
	if (!slab->sequences || !slab->lengths || !slab->free_ids) {
		kv_sequence_slab_destroy(slab);
		return kv_fail(err, KV_NO_MEMORY, "%u sequences of %u layers", n_max, n_layers);
	}

	const enum kv_status status = kv_hash_index_init(&slab->index, n_max, err);

	if (status != KV_OK) {
		kv_sequence_slab_destroy(slab);
		return status;
	}
	*out = slab;
	return KV_OK;
}

void kv_sequence_slab_destroy(struct kv_sequence_slab *slab)
{
	if (!slab)
		return;
	kv_hash_index_finish(&slab->index);
	kv_pages_free(slab->sequences, sizeof(*slab->sequences) * (uint64_t)slab->n_max);
	kv_pages_free(slab->lengths, lengths_bytes(slab));
	kv_pages_free(slab->free_ids, sizeof(*slab->free_ids) * (uint64_t)slab->n_max);
	kv_free(slab);
}

static uint64_t sequence_hash(const struct kv_session *session, uint64_t sequence_id)
{
	const struct kv_domain *domain = session->pool->domain;

	return kv_hash_pair(&domain->hash_key, sequence_id, kv_slot_idx(domain, kv_slot_of(session)));
}

struct kv_sequence *kv_sequence_find(struct kv_session *session, uint64_t sequence_id)
{
	struct kv_sequence_slab *slab = session->pool->slab;

	for (uint32_t i = kv_hash_index_first(&slab->index, sequence_hash(session, sequence_id));
		i != KV_HASH_NONE; i = kv_hash_index_next(&slab->index, i)) {
		if (slab->sequences[i].session == session && slab->sequences[i].id == sequence_id)
			return &slab->sequences[i];
	}
	return NULL;
}

/* xorshift64*: nobody outside sees its numbers. */
static uint64_t tree_priority(struct kv_domain *domain)
{
	uint64_t state = domain->tree_state;

	state ^= state >> 12;
	state ^= state << 25;
	state ^= state >> 27;
	domain->tree_state = state;
	return state * 0x2545F4914F6CDD1Dull;
}

struct kv_sequence *kv_sequence_add(struct kv_session *session, uint64_t sequence_id, uint64_t now_ns)
{
	struct kv_pool *pool = session->pool;
	struct kv_sequence_slab *slab = pool->slab;

	KV_ASSERT(slab->n_used < slab->n_max);

	const uint32_t idx = slab->n_freed > 0 ? slab->free_ids[--slab->n_freed] : slab->n_touched++;
	struct kv_sequence *sequence = &slab->sequences[idx];
	uint32_t *lengths = slab->lengths + (uint64_t)idx * 3 * slab->n_layers;

	*sequence = (struct kv_sequence){
		.id = sequence_id,
		.pool = pool,
		.session = session,
		.created_ns = now_ns,
		.used_ns = now_ns,
		.planned = lengths,
		.committed = lengths + slab->n_layers,
		.exact = lengths + 2 * slab->n_layers,
		.tree_priority = tree_priority(pool->domain),
		.slab_idx = idx,
	};
	memset(lengths, 0, 3 * slab->n_layers * sizeof(lengths[0]));
	slab->n_used++;
	kv_hash_index_insert(&slab->index, sequence_hash(session, sequence_id), idx);
	kv_sequence_tree_insert(&kv_slot_of(session)->tree, sequence);
	kv_list_push_back(&session->sequences, &sequence->in_session);
	session->n_sequences++;
	pool->n_sequences++;
	pool->domain->n_sequences++;
	if (pool->domain->tally)
		kv_tally_born(pool->domain->tally, sequence);
	return sequence;
}

void kv_sequence_bury(struct kv_sequence *sequence)
{
	struct kv_session *session = sequence->session;
	struct kv_pool *pool = sequence->pool;

	kv_hash_index_remove(&pool->slab->index, sequence_hash(session, sequence->id), sequence->slab_idx);
	kv_list_remove(&sequence->in_session);
	kv_list_remove(&sequence->in_surplus);
	kv_sequence_wake(sequence);
	sequence->tree_left = sequence->tree_right = NULL;
	sequence->session = NULL;
	sequence->is_zombie = true;
	session->n_sequences--;
	if (kv_sequence_n_blocks(sequence) == 0 && sequence->n_items == 0)
		kv_sequence_recycle(sequence);
	else
		kv_list_push_back(&pool->zombies, &sequence->in_session);
}

void kv_sequence_recycle(struct kv_sequence *sequence)
{
	struct kv_pool *pool = sequence->pool;
	struct kv_sequence_slab *slab = pool->slab;

	KV_ASSERT(sequence->is_zombie);
	KV_ASSERT(sequence->n_items == 0);
	kv_list_remove(&sequence->in_session);
	kv_sequence_forget_image(sequence);
	slab->free_ids[slab->n_freed++] = sequence->slab_idx;
	slab->n_used--;
	pool->n_zombies--;
	pool->domain->n_sequences--;
	sequence->pool = NULL; /* not in use: what the audit looks at */
}

uint32_t kv_sequence_n_blocks(const struct kv_sequence *sequence)
{
	uint32_t n_blocks = 0;

	for (uint32_t g = 0; g < sequence->pool->spec->n_tables; g++)
		n_blocks += kv_block_table_n_owned(&sequence->tables[g]);
	return n_blocks;
}

uint32_t kv_sequence_n_chunks(const struct kv_sequence *sequence)
{
	uint32_t n_chunks = 0;

	for (uint32_t g = 0; g < sequence->pool->spec->n_tables; g++)
		n_chunks += kv_block_table_n_chunks(&sequence->tables[g]);
	return n_chunks;
}

void kv_sequence_blocks_needed(const struct kv_sequence *sequence, uint32_t n_blocks[KV_TABLES_MAX])
{
	const struct kv_pool_spec *spec = sequence->pool->spec;

	memset(n_blocks, 0, KV_TABLES_MAX * sizeof(n_blocks[0]));
	if (sequence->residence == KV_SPILLED || sequence->residence == KV_BROKEN)
		return;
	for (uint32_t l = 0; l < spec->n_layers; l++) {
		const uint32_t n_needed = kv_div_up_u32(sequence->planned[l], spec->block_size);
		uint32_t *n = &n_blocks[spec->layers[l].group_idx];

		if (n_needed > *n)
			*n = n_needed;
	}
	for (uint32_t g = 0; sequence->is_tables && g < spec->n_groups; g++)
		n_blocks[g] = sequence->tables[g].n_blocks;
	if (spec->exact_tokens > 0) {
		uint32_t longest = 0;

		for (uint32_t l = 0; l < spec->n_layers; l++)
			longest = sequence->planned[l] > longest ? sequence->planned[l] : longest;
		n_blocks[spec->n_groups] = kv_exact_entries(spec, longest);
	}
}
