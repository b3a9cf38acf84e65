/*
 * The model's windows: which tokens of a layer are gone, token by token.
 */
#include "tests/sim/model.h"

static bool is_same_group(const struct kv_pool_spec *spec, uint32_t a, uint32_t b)
{
	return spec->layers[a].group_idx == spec->layers[b].group_idx;
}

/* Tokens at the beginning that stay, in whole blocks. */
static uint32_t sinks_end(const struct kv_pool_spec *spec, uint32_t layer)
{
	uint32_t n = 0;

	for (uint32_t l = 0; l < spec->n_layers; l++) {
		if (is_same_group(spec, l, layer) && spec->layers[l].sink_tokens > n)
			n = spec->layers[l].sink_tokens;
	}
	return (n + spec->block_size - 1) / spec->block_size * spec->block_size;
}

/* Where the first block begins that a request may still reach when the group's layers are that long. */
static uint32_t reach_begins(
	const struct kv_pool_spec *spec, const struct sim_sequence *sequence, uint32_t layer, bool is_planned)
{
	uint32_t least = UINT32_MAX, begin = UINT32_MAX;

	for (uint32_t l = 0; l < spec->n_layers; l++) {
		const uint32_t length =
			is_planned ? sequence->layers[l].planned : sequence->layers[l].committed;

		if (is_same_group(spec, l, layer) && length < least)
			least = length;
	}
	for (uint32_t l = 0; l < spec->n_layers; l++) {
		const uint32_t back = spec->layers[l].window + KV_Q_LEN_MAX - 1;
		uint32_t first = 0;

		if (!is_same_group(spec, l, layer))
			continue;
		if (spec->layers[l].window > 0 && least > back)
			first = (least - back) / spec->block_size * spec->block_size;
		begin = first < begin ? first : begin;
	}
	return begin;
}

bool sim_model_reaches(const struct kv_pool_spec *spec, const struct sim_sequence *sequence, uint32_t layer,
	uint32_t first, uint32_t end)
{
	uint32_t gone_end = reach_begins(spec, sequence, layer, true);

	if (sequence->layers[layer].gone_end > gone_end)
		gone_end = sequence->layers[layer].gone_end;
	for (uint32_t t = first; t < end; t++) {
		if (t >= sinks_end(spec, layer) && t < gone_end)
			return false;
	}
	return true;
}

void sim_model_move_windows(const struct kv_pool_spec *spec, struct sim_sequence *sequence)
{
	for (uint32_t l = 0; l < spec->n_layers; l++) {
		const uint32_t end = reach_begins(spec, sequence, l, false);

		if (end > sequence->layers[l].gone_end && end > sinks_end(spec, l))
			sequence->layers[l].gone_end = end;
	}
}

enum kv_status sim_model_check_cut(
	const struct kv_pool_spec *spec, const struct sim_sequence *sequence, uint32_t length)
{
	for (uint32_t l = 0; l < spec->n_layers; l++) {
		const uint32_t window = spec->layers[l].window;
		const uint32_t first = window > 0 && length > window ? length - window : 0;

		if (sequence->layers[l].committed > length &&
			!sim_model_reaches(spec, sequence, l, first, length))
			return KV_WINDOW_GONE;
	}
	return KV_OK;
}

void sim_model_cut_windows(const struct kv_pool_spec *spec, struct sim_sequence *sequence, uint32_t length)
{
	for (uint32_t l = 0; l < spec->n_layers; l++) {
		if (length <= sinks_end(spec, l))
			sequence->layers[l].gone_end = 0;
	}
}

uint32_t sim_model_n_blocks(
	const struct kv_pool_spec *spec, const struct sim_sequence *sequence, uint32_t group)
{
	uint32_t longest = 0, n_gone = 0;

	for (uint32_t l = 0; l < spec->n_layers; l++) {
		const struct sim_layer *layer = &sequence->layers[l];

		if (spec->layers[l].group_idx != group)
			continue;
		longest = layer->planned > longest ? layer->planned : longest;
		n_gone = layer->gone_end > 0 ? (layer->gone_end - sinks_end(spec, l)) / spec->block_size : 0;
	}
	return (longest + spec->block_size - 1) / spec->block_size - n_gone;
}
