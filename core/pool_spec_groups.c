/*
 * Blocks of a pool: layer groups, how many blocks each has, what windows leave behind, and the exact window.
 */
#include <stdio.h>

#include "core/checked.h"
#include "core/pool_spec_internal.h"

#define GROUP_NONE UINT32_MAX
/* Of a pool in which no length is bounded by blocks: tables of a decode take 4 bytes per block of tokens. */
#define WINDOWED_TOKENS_MAX (1u << 26)
#define EXACT_TOKENS_MAX    65536u
/* Ring blocks where their number is not given: one for so many blocks of pages. */
#define BLOCKS_PER_EXACT_BLOCK 16u

/* ---- groups ---- */

/* One group's layers get `given`, its place in the JSON. */
static enum kv_status read_group(
	const struct kv_spec_reader *reader, struct kv_made_spec *made, const json_t *list, uint32_t given)
{
	const size_t n = json_array_size(list);
	char member[48];

	snprintf(member, sizeof(member), "groups[%u]", given);
	if (!json_is_array(list) || n == 0)
		return kv_spec_refuse(reader, member, list, "an array with at least one layer number");
	for (size_t i = 0; i < n; i++) {
		const json_t *value = json_array_get(list, i);
		const json_int_t layer = json_integer_value(value);
		char expected[64];

		snprintf(member, sizeof(member), "groups[%u][%zu]", given, i);
		snprintf(expected, sizeof(expected), "a layer number from 0 to %u", made->base.n_layers - 1);
		if (!json_is_integer(value) || layer < 0 || layer >= made->base.n_layers)
			return kv_spec_refuse(reader, member, value, expected);
		if (made->layers[layer].group_idx != GROUP_NONE)
			return kv_spec_refuse(reader, member, value, "every layer once");
		made->layers[layer].group_idx = given;
	}
	return KV_OK;
}

/* Groups are numbered in the order of their first layers, whatever the order in the JSON. */
static enum kv_status number_groups(const struct kv_spec_reader *reader, struct kv_made_spec *made)
{
	uint32_t number_of[KV_GROUPS_MAX];
	uint32_t n_numbered = 0;

	for (uint32_t g = 0; g < KV_GROUPS_MAX; g++)
		number_of[g] = GROUP_NONE;
	for (uint32_t l = 0; l < made->base.n_layers; l++) {
		const uint32_t given = made->layers[l].group_idx;

		if (given == GROUP_NONE)
			return kv_fail(reader->err, KV_BAD_CONFIG,
				"pool \"%s\": groups: layer %u is in none, expected every layer once",
				reader->pool, l);
		if (number_of[given] == GROUP_NONE)
			number_of[given] = n_numbered++;
		made->layers[l].group_idx = number_of[given];
	}
	return KV_OK;
}

/* Layers with the same window are a group, so that the others' blocks can go when no window reaches them. */
static enum kv_status group_by_window(const struct kv_spec_reader *reader, struct kv_made_spec *made)
{
	uint32_t windows[KV_GROUPS_MAX], n_groups = 0;

	for (uint32_t l = 0; l < made->base.n_layers; l++) {
		uint32_t g = 0;

		while (g < n_groups && windows[g] != made->layers[l].window)
			g++;
		if (g == KV_GROUPS_MAX)
			return kv_spec_refuse(reader, "window", json_object_get(reader->json, "window"),
				"at most 8 different windows, or groups that say which layers share blocks");
		if (g == n_groups)
			windows[n_groups++] = made->layers[l].window;
		made->layers[l].group_idx = g;
	}
	made->base.n_groups = n_groups;
	return KV_OK;
}

enum kv_status kv_spec_read_groups(const struct kv_spec_reader *reader, struct kv_made_spec *made)
{
	const json_t *value = json_object_get(reader->json, "groups");

	if (!value)
		return group_by_window(reader, made);
	if (!json_is_array(value) || json_array_size(value) < 1 || json_array_size(value) > KV_GROUPS_MAX)
		return kv_spec_refuse(reader, "groups", value, "an array of 1 to 8 arrays of layer numbers");
	made->base.n_groups = (uint32_t)json_array_size(value);
	for (uint32_t l = 0; l < made->base.n_layers; l++)
		made->layers[l].group_idx = GROUP_NONE;
	for (uint32_t g = 0; g < made->base.n_groups; g++) {
		const enum kv_status status = read_group(reader, made, json_array_get(value, g), g);

		if (status != KV_OK)
			return status;
	}
	return number_groups(reader, made);
}

/* ---- windows ---- */

uint32_t kv_pool_spec_gone(const struct kv_pool_spec *spec, uint32_t group_idx, uint32_t length)
{
	/* The first of KV_Q_LEN_MAX rows ends that much earlier. */
	const uint64_t reach = (uint64_t)spec->group_window[group_idx] + KV_Q_LEN_MAX - 1;

	if (spec->group_window[group_idx] == 0 || length <= reach)
		return 0;

	const uint32_t n_blocks = (uint32_t)((length - reach) / spec->block_size);

	return n_blocks > spec->group_sink_blocks[group_idx] ? n_blocks : 0;
}

/* What the widest window of a group reaches; nothing where one layer has none. */
static void find_reach(struct kv_made_spec *made)
{
	struct kv_pool_spec *spec = &made->base;

	for (uint32_t g = 0; g < spec->n_groups; g++) {
		uint32_t widest = 0, sink_tokens = 0;
		bool has_all = false;

		for (uint32_t l = 0; l < spec->n_layers; l++) {
			const struct kv_layer_spec *layer = &made->layers[l];

			if (layer->group_idx != g)
				continue;
			has_all = has_all || layer->window == 0;
			widest = layer->window > widest ? layer->window : widest;
			sink_tokens = layer->sink_tokens > sink_tokens ? layer->sink_tokens : sink_tokens;
		}
		spec->group_window[g] = has_all ? 0 : widest;
		spec->group_sink_blocks[g] = has_all ? 0 : kv_div_up_u32(sink_tokens, spec->block_size);
	}
}

/* Tokens that a sequence may have as far as the group's blocks go. */
static uint64_t group_tokens_max(const struct kv_pool_spec *spec, uint32_t g)
{
	/* Both ends of the window lie in the middle of a block, and a token comes before another one goes. */
	const uint64_t n_enough = spec->group_sink_blocks[g] +
		((uint64_t)spec->group_window[g] + KV_Q_LEN_MAX - 1) / spec->block_size + 3;

	if (spec->group_window[g] != 0 && spec->n_blocks[g] >= n_enough)
		return WINDOWED_TOKENS_MAX;
	return (uint64_t)spec->n_blocks[g] * spec->block_size;
}

/* ---- numbers of blocks ---- */

static enum kv_status read_n_blocks(const struct kv_spec_reader *reader, struct kv_pool_spec *spec)
{
	const json_t *value = json_object_get(reader->json, "blocks");
	char member[32], expected[64];

	if (!json_is_array(value)) {
		const enum kv_status status =
			kv_spec_read_u32(reader, "blocks", 1, KV_BLOCKS_MAX, &spec->n_blocks[0]);

		for (uint32_t g = 1; g < spec->n_groups; g++)
			spec->n_blocks[g] = spec->n_blocks[0];
		return status;
	}
	snprintf(expected, sizeof(expected), "an integer, or one for each of %u groups", spec->n_groups);
	if (json_array_size(value) != spec->n_groups)
		return kv_spec_refuse(reader, "blocks", value, expected);
	snprintf(expected, sizeof(expected), "an integer from 1 to %u", KV_BLOCKS_MAX);
	for (uint32_t g = 0; g < spec->n_groups; g++) {
		const json_t *element = json_array_get(value, g);
		const json_int_t n = json_integer_value(element); /* 0 for anything else */

		snprintf(member, sizeof(member), "blocks[%u]", g);
		if (n < 1 || n > KV_BLOCKS_MAX)
			return kv_spec_refuse(reader, member, element, expected);
		spec->n_blocks[g] = (uint32_t)n;
	}
	return KV_OK;
}

static enum kv_status read_tokens_max(const struct kv_spec_reader *reader, struct kv_pool_spec *spec)
{
	uint64_t bound = KV_TOKENS_MAX, n_default = KV_TOKENS_MAX;

	for (uint32_t g = 0; g < spec->n_groups; g++) {
		const uint64_t n_group = group_tokens_max(spec, g);
		const uint64_t n_slots = (uint64_t)spec->n_blocks[g] * spec->block_size;

		bound = n_group < bound ? n_group : bound;
		n_default = n_slots < n_default ? n_slots : n_default;
	}
	spec->tokens_max = (uint32_t)(n_default < bound ? n_default : bound);
	if (!kv_spec_has(reader, "tokens_max"))
		return KV_OK;
	return kv_spec_read_u32(reader, "tokens_max", 1, (uint32_t)bound, &spec->tokens_max);
}

static enum kv_status read_exact(const struct kv_spec_reader *reader, struct kv_pool_spec *spec)
{
	const uint32_t n_pages = spec->n_blocks[0] / BLOCKS_PER_EXACT_BLOCK;
	uint32_t n_tokens = 0, n_ring;
	enum kv_status status = KV_OK;
	char expected[64];

	spec->n_tables = spec->n_groups;
	if (kv_spec_has(reader, "exact_tokens"))
		status = kv_spec_read_u32(reader, "exact_tokens", 0, EXACT_TOKENS_MAX, &n_tokens);
	if (status != KV_OK)
		return status;
	if (n_tokens % spec->block_size != 0) {
		snprintf(expected, sizeof(expected), "a multiple of block_size %u", spec->block_size);
		return kv_spec_refuse(
			reader, "exact_tokens", json_object_get(reader->json, "exact_tokens"), expected);
	}
	n_ring = n_tokens / spec->block_size;
	if (n_ring == 0 && kv_spec_has(reader, "exact_blocks"))
		return kv_spec_refuse(reader, "exact_blocks", json_object_get(reader->json, "exact_blocks"),
			"exact_tokens above 0 beside it");
	if (n_ring == 0)
		return KV_OK;
	spec->exact_tokens = n_tokens;
	spec->n_tables = spec->n_groups + 1;
	spec->n_blocks[spec->n_groups] = n_pages > n_ring ? n_pages : n_ring;
	if (!kv_spec_has(reader, "exact_blocks"))
		return KV_OK;
	return kv_spec_read_u32(reader, "exact_blocks", 1, KV_BLOCKS_MAX, &spec->n_blocks[spec->n_groups]);
}

enum kv_status kv_spec_read_blocks(const struct kv_spec_reader *reader, struct kv_made_spec *made)
{
	struct kv_pool_spec *spec = &made->base;
	const json_t *block_size = json_object_get(reader->json, "block_size");
	const json_int_t size = json_integer_value(block_size); /* 0 for anything else */
	enum kv_status status;

	if (size != 16 && size != 32 && size != 64)
		return kv_spec_refuse(reader, "block_size", block_size, "16, 32 or 64");
	spec->block_size = (uint32_t)size;
	find_reach(made);
	status = read_n_blocks(reader, spec);
	if (status == KV_OK)
		status = read_tokens_max(reader, spec);
	return status == KV_OK ? read_exact(reader, spec) : status;
}

/* ---- the exact window ---- */

enum kv_status kv_spec_make_exact(const struct kv_spec_reader *reader, struct kv_made_spec *made)
{
	struct kv_pool_spec *spec = &made->base;
	const struct kv_format *format = NULL;
	struct kv_row_codec *k = NULL, *v = NULL;
	enum kv_status status;

	if (spec->exact_tokens == 0)
		return KV_OK;
	status = kv_format_parse("bf16", &format, reader->err);
	if (status == KV_OK)
		status = kv_row_codec_create(format, spec->k_head_dim, NULL, &k, reader->err);
	if (status == KV_OK)
		status = kv_row_codec_create(format, spec->v_head_dim, NULL, &v, reader->err);
	spec->exact_k = k;
	spec->exact_v = v;
	return status;
}
