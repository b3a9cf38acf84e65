/*
 * Rows that go before their sequence does: TRUNCATE and eviction. What is cut counts from then on; blocks are
 * given back at once or in later turns.
 */
#include "core/domain_internal.h"

void kv_sequence_shorten(struct kv_sequence *sequence, uint32_t length)
{
	struct kv_pool *pool = sequence->pool;
	struct kv_session_slot *slot = kv_slot_of(sequence->session);
	const uint32_t n_layers = pool->spec->n_layers;
	const uint32_t least = kv_least_length(sequence->committed, 0, n_layers);
	const uint32_t n_lost = least > length ? least - length : 0;
	const uint64_t n_exact_rows = kv_sequence_n_exact_rows(sequence);

	for (uint32_t l = 0; l < n_layers; l++) {
		slot->layer_tokens[l] -= kv_sequence_n_held(sequence, l);
		pool->layer_tokens[l] -= kv_sequence_n_held(sequence, l);
		if (sequence->committed[l] <= length)
			continue;
		kv_sequence_cut_exact(sequence, l, sequence->committed[l] - length);
		sequence->committed[l] = sequence->planned[l] = length;
	}
	kv_sequence_count_exact(sequence, n_exact_rows);
	kv_sequence_cut_windows(sequence, length);
	for (uint32_t l = 0; l < n_layers; l++) {
		slot->layer_tokens[l] += kv_sequence_n_held(sequence, l);
		pool->layer_tokens[l] += kv_sequence_n_held(sequence, l);
	}
	slot->n_tokens_committed -= n_lost;
	pool->n_tokens_committed -= n_lost;
	kv_sequence_charge(sequence);
}

enum kv_status kv_sequence_truncate(struct kv_session *session, uint64_t sequence_id, uint32_t length)
{
	struct kv_sequence *sequence = kv_sequence_find(session, sequence_id);

	if (!sequence)
		return KV_NOT_FOUND;
	enum kv_status status = kv_sequence_check_residence(sequence, true);

	if (status != KV_OK)
		return status;
	KV_ASSERT(sequence->n_items == 0);
	if (sequence->is_evicted)
		return KV_EVICTED;
	status = kv_sequence_check_cut(sequence, length);
	if (status != KV_OK)
		return status;
	kv_sequence_wake(sequence);
	kv_sequence_shorten(sequence, length);
	kv_sequence_fit_tables(sequence);
	kv_sequence_rest(sequence);
	return KV_OK;
}

void kv_sequence_evict(struct kv_sequence *sequence)
{
	KV_ASSERT(sequence->n_items == 0);
	kv_sequence_wake(sequence);
	kv_sequence_shorten(sequence, 0);
	for (uint32_t l = 0; l < sequence->pool->spec->n_layers; l++)
		sequence->planned[l] = 0;
	sequence->is_evicted = true;
	sequence->pool->n_evicted_sequences++;
	kv_sequence_fit_tables(sequence);
}
