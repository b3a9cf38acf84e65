/*
 * The model's items: what planning must say, what is promised to decodes, what becomes of lengths.
 */
#include <stdlib.h>
#include <string.h>

#include "core/backend.h"
#include "core/checked.h"
#include "tests/sim/model.h"
#include "tests/sim/payload.h"

static bool is_append(uint8_t kind)
{
	return kind == KV_ITEM_APPEND || kind == KV_ITEM_APPEND_DECODE;
}

/*
 * Blocks that an append takes in a group: those beyond the table, which may be longer than its lengths need,
 * and one in place of each that others own, too. *n_copies: how many of those hold rows.
 */
static uint32_t blocks_needed(const struct kv_pool *pool, const struct kv_sequence *found,
	const struct sim_sequence *sequence, uint32_t g, const struct kv_item *item, uint32_t *n_copies)
{
	const uint32_t block_size = pool->spec->block_size;
	const uint32_t n_have = found ? found->tables[g].n_blocks : 0;
	const uint32_t n_want = kv_div_up_u32(item->position + item->n_tokens, block_size);
	uint32_t n = n_want > n_have ? n_want - n_have : 0, longest = 0;

	for (uint32_t l = 0; sequence && l < pool->spec->n_layers; l++) {
		if (pool->spec->layers[l].group_idx == g && sequence->layers[l].planned > longest)
			longest = sequence->layers[l].planned;
	}
	for (uint32_t i = item->position / block_size; i < n_want && i < n_have; i++) {
		uint32_t block;

		kv_block_table_copy(&found->tables[g], &pool->tables, i, 1, &block);
		if (pool->blocks[g].owners[block] < 2)
			continue;
		n++;
		*n_copies += longest > i * block_size;
	}
	return n;
}

/*
 * POOL_FULL when a group has too few; BUSY_RETRY while the sequence is still being cut to its beginning, or
 * when too many copies wait.
 */
static enum kv_status check_blocks(const struct sim_session *session, struct kv_session *real,
	const struct kv_item *item, uint32_t layer_first, uint32_t n_layers, struct sim_expected *expected)
{
	const struct sim_sequence *ours = sim_model_sequence(session, item->sequence_id);
	const struct kv_sequence *sequence = kv_sequence_find(real, item->sequence_id);
	const struct kv_pool *pool = real->pool;
	uint32_t n_copies = 0, groups = 0;

	for (uint32_t l = layer_first; l < layer_first + n_layers; l++) {
		const uint32_t g = pool->spec->layers[l].group_idx;
		const uint64_t length = (uint64_t)item->position + item->n_tokens;

		if (pool->spec->group_window[g] == 0 &&
			(length + pool->spec->block_size - 1) / pool->spec->block_size >
				pool->spec->n_blocks[g])
			return KV_LIMIT;
	}
	for (uint32_t l = layer_first; sequence && l < layer_first + n_layers; l++) {
		const struct kv_block_table *table = &sequence->tables[pool->spec->layers[l].group_idx];

		if (table->gap_end > table->gap_first && ours->layers[l].gone_end == 0)
			return KV_BUSY_RETRY;
	}
	for (uint32_t l = layer_first; l < layer_first + n_layers; l++) {
		const uint32_t g = pool->spec->layers[l].group_idx;
		const struct kv_block_counts *counts = &pool->blocks[g].counts;

		if (groups & 1u << g)
			continue;
		groups |= 1u << g;
		const uint32_t n = blocks_needed(pool, sequence, ours, g, item, &n_copies);

		if (n > session->reserve_left[g] &&
			n - session->reserve_left[g] > counts->n_free - counts->n_reserved)
			return KV_POOL_FULL;
		expected->n_blocks[g] = n;
	}
	return n_copies <= KV_COPIES_MAX - pool->n_copies ? KV_OK : KV_BUSY_RETRY;
}

/* Each query row sees its window back from its end; the first one sees the earliest tokens. */
static enum kv_status check_decode(const struct kv_pool_spec *spec, const struct sim_sequence *sequence,
	const struct kv_item *item, uint32_t layer, uint32_t seen)
{
	const uint32_t own = spec->layers[layer].window;
	const uint32_t window = item->window > 0 && (own == 0 || item->window < own) ? item->window : own;
	uint32_t first = 0;

	if (item->q_len > seen && item->q_len > 1)
		return KV_BAD_ARG;
	if (window > 0 && seen + 1 > item->q_len + window)
		first = seen + 1 - item->q_len - window;
	return !sequence || sim_model_reaches(spec, sequence, layer, first, seen) ? KV_OK : KV_WINDOW_GONE;
}

static struct sim_expected plan_append(const struct sim_model *model, const struct sim_session *session,
	struct kv_session *real, const struct kv_item *item, uint32_t layer_first, uint32_t n_layers)
{
	const struct sim_sequence *sequence = sim_model_sequence(session, item->sequence_id);
	struct sim_expected expected = { KV_OK, KV_LAYER_NONE,
		sequence ? sim_sequence_least(sequence, layer_first, n_layers, false) : 0, { 0 } };

	if (!sequence)
		expected.status = item->flags & KV_ITEM_CREATE
			? sim_model_check_new(model, session, real->pool)
			: KV_NOT_FOUND;
	else if (sequence->is_evicted && !(item->flags & KV_ITEM_CREATE))
		expected.status = KV_EVICTED;
	else if ((item->flags & KV_ITEM_CREATE) && sim_sequence_longest(sequence) > 0)
		expected.status = KV_EXISTS;
	for (uint32_t l = layer_first; l < layer_first + n_layers && expected.status == KV_OK; l++) {
		const uint32_t planned = sequence ? sequence->layers[l].planned : 0;

		if (item->position != planned)
			expected = (struct sim_expected){ KV_POSITION, l, planned, { 0 } };
	}
	if (expected.status != KV_OK)
		return expected;
	const uint64_t length = (uint64_t)item->position + item->n_tokens;

	if (length > session->tokens_max) {
		expected.status = KV_LEN_LIMIT;
		return expected;
	}
	expected.status = check_blocks(session, real, item, layer_first, n_layers, &expected);
	if (expected.status == KV_OK && item->kind == KV_ITEM_APPEND_DECODE)
		expected.status =
			check_decode(real->pool->spec, sequence, item, layer_first, (uint32_t)length);
	return expected;
}

struct sim_expected sim_model_plan(const struct sim_model *model, const struct sim_session *session,
	struct kv_session *real, const struct kv_item *item, uint32_t layer_first, uint32_t n_layers)
{
	const struct sim_sequence *sequence = sim_model_sequence(session, item->sequence_id);
	const bool is_all = item->kind == KV_ITEM_DECODE && item->position == KV_LENGTH_PLANNED;
	const uint64_t end = (uint64_t)item->position + item->n_tokens;

	const enum kv_status residence = sim_model_residence(real, item->sequence_id, is_append(item->kind));

	if (sequence && residence != KV_OK)
		return (struct sim_expected){ residence, KV_LAYER_NONE,
			sim_sequence_least(sequence, layer_first, n_layers, false), { 0 } };
	if (is_append(item->kind))
		return plan_append(model, session, real, item, layer_first, n_layers);
	if (!sequence)
		return (struct sim_expected){ KV_NOT_FOUND, KV_LAYER_NONE, 0, { 0 } };
	if (sequence->is_evicted)
		return (struct sim_expected){ KV_EVICTED, KV_LAYER_NONE, 0, { 0 } };
	const struct kv_pool_spec *spec = real->pool->spec;
	const uint32_t length = sim_sequence_least(sequence, layer_first, n_layers, false);

	for (uint32_t l = layer_first; l < layer_first + n_layers && !is_all; l++) {
		if (end > sequence->layers[l].planned)
			return (struct sim_expected){ KV_POSITION, l, sequence->layers[l].planned, { 0 } };
	}
	if (item->kind == KV_ITEM_DECODE)
		return (struct sim_expected){ check_decode(spec, sequence, item, layer_first,
						      is_all ? sequence->layers[layer_first].planned
							     : item->position),
			KV_LAYER_NONE, length, { 0 } };
	for (uint32_t l = layer_first; l < layer_first + n_layers; l++) {
		if (!sim_model_reaches(spec, sequence, l, item->position, (uint32_t)end))
			return (struct sim_expected){ KV_WINDOW_GONE, l, length, { 0 } };
	}
	return (struct sim_expected){ KV_OK, KV_LAYER_NONE, length, { 0 } };
}

static void put_rows(struct sim_sequence *sequence, const struct sim_request *request,
	const struct sim_item *item, uint32_t l, uint32_t n_places)
{
	struct sim_layer *layer = &sequence->layers[l];
	const uint32_t length = item->position + item->n_tokens;

	if (length > layer->n_max) {
		layer->n_max = 2 * length + 16;
		layer->row_ids = realloc(layer->row_ids, layer->n_max * sizeof(layer->row_ids[0]));
		SIM_CHECK(layer->row_ids, "no memory for the model");
	}
	for (uint32_t t = 0; t < item->n_tokens; t++)
		layer->row_ids[item->position + t] =
			sim_row_id(item->row_counter + t, request->k_dtype, request->v_dtype);
	layer->planned = length;
	sim_model_put_exact(request->spec, layer, item->position, length, n_places,
		request->k_dtype == KV_DTYPE_PACKED || request->v_dtype == KV_DTYPE_PACKED);
}

/* What a decode or READ of the item must see: the rows as they are planned now. */
static void snapshot(
	const struct sim_sequence *sequence, const struct sim_request *request, struct sim_item *item)
{
	const bool is_read = request->opcode == KVP_OP_READ;
	const uint32_t first = is_read ? item->position : 0;
	const uint32_t planned = sequence->layers[request->layer_first].planned;

	if (is_read)
		item->n_row_ids = item->n_tokens;
	else if (request->opcode == KVP_OP_DECODE && item->position != KV_LENGTH_PLANNED)
		item->n_row_ids = item->position;
	else
		item->n_row_ids = planned;
	item->row_ids = malloc((size_t)request->n_layers * item->n_row_ids * sizeof(uint32_t) + 1);
	SIM_CHECK(item->row_ids, "no memory for the model");
	for (uint32_t l = 0; l < request->n_layers && item->n_row_ids > 0; l++)
		memcpy(item->row_ids + (size_t)l * item->n_row_ids,
			sequence->layers[request->layer_first + l].row_ids + first,
			item->n_row_ids * sizeof(uint32_t));
	item->exact_lo = 0;
	for (uint32_t l = 0; l < request->n_layers; l++) {
		const struct sim_layer *layer = &sequence->layers[request->layer_first + l];
		const uint32_t lo = sim_model_exact_lo(request->spec, layer, UINT32_MAX);

		item->exact_lo = lo > item->exact_lo ? lo : item->exact_lo;
	}
}

void sim_model_planned(struct sim_session *session, const struct sim_request *request, struct sim_item *item,
	const struct kv_sequence *found, const uint32_t *n_blocks, uint64_t now_ns)
{
	struct sim_sequence *sequence = sim_model_sequence(session, item->sequence);
	/* Ring blocks are counted by the domain, and those counts by the audit. */
	const uint32_t n_places = found && request->spec->exact_tokens > 0
		? found->tables[request->spec->n_groups].n_blocks * request->spec->block_size
		: 0;

	if (item->n_tokens > 0 && request->opcode != KVP_OP_READ) {
		for (uint32_t g = 0; g < KV_GROUPS_MAX; g++)
			session->reserve_left[g] -= n_blocks[g] < session->reserve_left[g]
				? n_blocks[g]
				: session->reserve_left[g];
		if (!sequence) {
			sequence = sim_model_add_sequence(session, item->sequence);
			sequence->is_unborn = true;
		}
		sequence->is_unborn = sequence->is_unborn || sequence->is_evicted;
		for (uint32_t l = 0; l < request->n_layers; l++)
			put_rows(sequence, request, item, request->layer_first + l, n_places);
		if (item->flags & KVP_ITEM_EVICTABLE)
			sequence->is_evictable = true;
		sequence->is_evicted = false;
	}
	if (request->opcode != KVP_OP_APPEND)
		snapshot(sequence, request, item);
	item->planned_on = sequence;
	item->epoch = sequence->epoch;
	sequence->n_pending++;
	session->n_pending++;
	session->life_ns = now_ns;
}

/* ---- finishing ---- */

static void commit(struct sim_sequence *sequence, const struct sim_request *request,
	const struct sim_item *item, const struct kv_pool_spec *spec)
{
	sequence->is_unborn = false;
	for (uint32_t l = request->layer_first; l < request->layer_first + request->n_layers; l++) {
		struct sim_layer *layer = &sequence->layers[l];

		SIM_CHECK(layer->committed == item->position,
			"request %llu commits at %u, its sequence %llu has %u rows on layer %u",
			(unsigned long long)request->id, item->position, (unsigned long long)item->sequence,
			layer->committed, l);
		layer->committed += item->n_tokens;
	}
	if (!sequence->is_orphan)
		sim_model_move_windows(spec, sequence);
}

static void fall_back(const struct kv_pool_spec *spec, struct sim_sequence *sequence)
{
	for (uint32_t l = 0; l < SIM_LAYERS_MAX; l++) {
		sequence->layers[l].planned = sequence->layers[l].committed;
		sim_model_cut_exact(spec, &sequence->layers[l], sequence->layers[l].planned);
	}
	sequence->epoch++;
}

static void count(struct sim_session *session, const struct sim_request *request, const struct sim_item *item)
{
	const uint64_t n_rows = (uint64_t)item->n_tokens * request->n_layers;

	session->n_queries += item->q_len;
	if (request->opcode == KVP_OP_READ)
		session->n_rows_out += n_rows;
	else
		session->n_rows_in += n_rows;
}

void sim_model_finished(struct sim_model *model, struct sim_request *request, struct sim_item *item,
	enum kv_status was_status, const struct kv_result *was_result, uint64_t now_ns)
{
	struct sim_sequence *sequence = item->planned_on;
	struct sim_session *session = sim_model_session(model, request->session);
	const bool is_stale = item->epoch != sequence->epoch;
	const bool is_decided =
		was_status == KV_CANCELLED || was_status == KV_DEADLINE || was_status == KV_DEVICE_LOST;
	struct kv_result expected = *was_result;
	uint32_t length;

	if (is_stale) {
		expected = (struct kv_result){ is_decided ? (uint16_t)was_status : KV_POSITION, KV_LAYER_NONE,
			KV_ROW_NONE };
		length = sim_sequence_least(sequence, request->layer_first, request->n_layers, true);
	} else {
		SIM_CHECK(was_status != KV_OK || item->n_completed == 1,
			"request %llu is OK without having been worked on", (unsigned long long)request->id);
		const bool is_append = sim_request_is_rows(request) && item->n_tokens > 0;

		if (was_status == KV_OK && is_append)
			commit(sequence, request, item, session->pool->spec);
		else if (was_status != KV_OK && is_append)
			fall_back(session->pool->spec, sequence);
		if (was_status == KV_OK && !sequence->is_orphan)
			count(session, request, item);
		length = sim_sequence_least(sequence, request->layer_first, request->n_layers, false);
	}
	SIM_CHECK(item->outcome.status == expected.status && item->outcome.length == length &&
			item->outcome.layer == expected.layer && item->outcome.row == expected.row,
		"request %llu ends with %s, length %u, layer %u, row %u; expected %s, %u, %u, %u",
		(unsigned long long)request->id, kv_status_name(item->outcome.status), item->outcome.length,
		item->outcome.layer, item->outcome.row, kv_status_name(expected.status), length,
		expected.layer, expected.row);
	item->planned_on = NULL;
	sequence->n_pending--;
	sequence->rest_seq = ++model->seq;
	session->n_pending--;
	session->life_ns = now_ns;
	if (sequence->is_orphan && sequence->n_pending == 0)
		sim_sequence_free(sequence);
	else if (sequence->is_unborn && sequence->n_pending == 0 && sim_sequence_longest(sequence) == 0)
		sim_model_forget(session, sequence);
}
