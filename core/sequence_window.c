/*
 * What windows leave behind.
 *
 * A block is gone when no window of its group's layers reaches it at the least committed length of the group,
 * for a request of KV_Q_LEN_MAX rows. That is decided when rows are committed and counted from then on; the
 * block itself is given back at once or in a later turn. Planning refuses what the windows of the *planned*
 * length do not reach: what it accepts is finished before the rows that move the windows on are committed, so
 * nothing promised is lost, and the answer does not depend on how far the backend is.
 */
#include "core/domain_internal.h"

#include <string.h>

/* Least length over the layers of each group. */
static void least_lengths(
	const struct kv_sequence *sequence, const uint32_t *lengths, uint32_t least[KV_GROUPS_MAX])
{
	const struct kv_pool_spec *spec = sequence->pool->spec;

	memset(least, 0xFF, KV_GROUPS_MAX * sizeof(least[0]));
	for (uint32_t l = 0; l < spec->n_layers; l++) {
		uint32_t *n = &least[spec->layers[l].group_idx];

		if (lengths[l] < *n)
			*n = lengths[l];
	}
}

uint32_t kv_sequence_n_held(const struct kv_sequence *sequence, uint32_t layer)
{
	const struct kv_pool_spec *spec = sequence->pool->spec;
	const uint32_t g = spec->layers[layer].group_idx, n_gone = sequence->n_gone[g];

	if (sequence->residence != KV_RESIDENT && sequence->residence != KV_SPILLING)
		return 0;
	return sequence->committed[layer] -
		(n_gone > 0 ? (n_gone - spec->group_sink_blocks[g]) * spec->block_size : 0);
}

/* The rows of n_blocks of one layer are not held any more. */
static void drop_rows(struct kv_sequence *sequence, uint32_t layer, uint32_t n_blocks)
{
	struct kv_pool *pool = sequence->pool;
	const uint64_t n_tokens = (uint64_t)n_blocks * pool->spec->block_size;

	kv_slot_of(sequence->session)->layer_tokens[layer] -= n_tokens;
	pool->layer_tokens[layer] -= n_tokens;
}

void kv_sequence_move_windows(struct kv_sequence *sequence)
{
	const struct kv_pool_spec *spec = sequence->pool->spec;
	uint32_t least[KV_GROUPS_MAX];
	bool has_moved = false;

	if (!kv_pool_spec_has_windows(spec))
		return;
	least_lengths(sequence, sequence->committed, least);
	for (uint32_t g = 0; g < spec->n_groups; g++) {
		const uint32_t n_gone = kv_pool_spec_gone(spec, g, least[g]);
		const uint32_t n_before =
			sequence->n_gone[g] > 0 ? sequence->n_gone[g] : spec->group_sink_blocks[g];

		if (n_gone <= n_before)
			continue;
		for (uint32_t l = 0; l < spec->n_layers; l++) {
			if (spec->layers[l].group_idx == g)
				drop_rows(sequence, l, n_gone - n_before);
		}
		sequence->n_gone[g] = n_gone;
		has_moved = true;
	}
	if (has_moved)
		kv_sequence_fit_tables(sequence);
}

/* Tokens [first, end) need a block from `n_kept` on, and before block n_gone. */
static bool needs_gone(
	const struct kv_pool_spec *spec, uint32_t n_kept, uint32_t n_gone, uint32_t first, uint32_t end)
{
	const uint64_t kept_end = (uint64_t)n_kept * spec->block_size;
	const uint64_t gone_end = (uint64_t)n_gone * spec->block_size;

	return n_gone > n_kept && end > first && end > kept_end && first < gone_end;
}

enum kv_status kv_sequence_check_reach(
	const struct kv_sequence *sequence, uint32_t layer, uint32_t first, uint32_t end)
{
	const struct kv_pool_spec *spec = sequence->pool->spec;
	const uint32_t g = spec->layers[layer].group_idx;
	uint32_t least[KV_GROUPS_MAX], n_gone;

	if (spec->group_window[g] == 0)
		return KV_OK;
	least_lengths(sequence, sequence->planned, least);
	n_gone = kv_pool_spec_gone(spec, g, least[g]);
	if (n_gone < sequence->n_gone[g])
		n_gone = sequence->n_gone[g];
	return needs_gone(spec, spec->group_sink_blocks[g], n_gone, first, end) ? KV_WINDOW_GONE : KV_OK;
}

enum kv_status kv_sequence_check_cut(const struct kv_sequence *sequence, uint32_t length)
{
	const struct kv_pool_spec *spec = sequence->pool->spec;

	for (uint32_t l = 0; l < spec->n_layers && kv_pool_spec_has_windows(spec); l++) {
		const uint32_t g = spec->layers[l].group_idx, window = spec->layers[l].window;

		if (sequence->committed[l] > length &&
			needs_gone(spec, spec->group_sink_blocks[g], sequence->n_gone[g],
				length > window ? length - window : 0, length))
			return KV_WINDOW_GONE;
	}
	return KV_OK;
}

void kv_sequence_cut_windows(struct kv_sequence *sequence, uint32_t length)
{
	const struct kv_pool_spec *spec = sequence->pool->spec;

	for (uint32_t g = 0; g < spec->n_groups; g++) {
		/* Where blocks are gone, all layers of the group were longer than they, so all are cut. */
		if (sequence->n_gone[g] > 0 && length <= (uint64_t)sequence->n_gone[g] * spec->block_size)
			sequence->n_gone[g] = 0;
	}
}
