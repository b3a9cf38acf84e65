/*
 * Random operations on sessions and sequences, compared with a naive model that keeps lengths in plain
 * arrays. Batches are made of plans without a backend: up to two are in flight, items of them are refused at
 * random, others are cancelled before they are sealed. The audit runs after every step.
 */
#include "core/backend.h"
#include "core/domain.h"
#include "core/domain_internal.h"
#include "core/number.h"
#include "core/tally.h"
#include "tests/lib/kv_core_test.h"

enum {
	N_LAYERS = 3,
	N_SESSIONS = 3,
	N_IDS = 9,
	N_SEQUENCES = 14, /* bound of the domain: below what the sessions could have */
	N_ENTRIES = 256,
	N_FLIGHTS = 2,
	N_MODELS = 4096, /* sequences ever made in one run */
};
#define NO_RESULT UINT32_MAX

struct model_sequence {
	uint64_t id;
	uint32_t planned[N_LAYERS], committed[N_LAYERS];
	uint32_t gone_end[N_LAYERS]; /* tokens from the sinks up to here are gone; the same within a group */
	uint32_t epoch;
	uint32_t n_items; /* planned and not finished */
	bool is_live, is_born;
};

struct model_session {
	struct kv_session *session;                  /* NULL: not open */
	struct model_sequence *sequences[N_IDS + 1]; /* by id */
	uint32_t n_queued, n_outstanding;
};

/* One planned item on its way. */
struct entry {
	struct kv_item item;
	uint32_t layer_first, n_layers;
	struct model_sequence *model;
	struct model_session *owner; /* NULL once its session is closed */
	uint32_t epoch;
	uint32_t result_idx;
};

struct flight {
	struct kv_plan plan;
	uint8_t *area;
	uint32_t n_entries;
};

struct world {
	uint64_t seed;
	bool is_long; /* sequences become long before they end: windows move */
	struct kv_test_domain test;
	uint64_t area_bytes;
	struct model_session sessions[N_SESSIONS];
	struct model_sequence models[N_MODELS];
	uint32_t n_models;
	struct entry entries[N_ENTRIES]; /* ring, in order of planning */
	uint32_t entry_first, n_entries, n_sealed;
	struct flight flights[N_FLIGHTS]; /* ring, in order of submission */
	uint32_t flight_first, n_flights;
	uint64_t now_ns;
	uint32_t n_by_status[1000]; /* of finished and refused items */
	struct kv_tally *tally;
	uint32_t n_tallies; /* that came to their end */
	bool is_leaky;
	uint32_t leak_kind;
	struct kv_block_pool *leak_blocks;
	kv_block_id leak_id;
	struct kv_finding finding; /* of a leaky world */
};

static uint32_t below(struct world *world, uint32_t n)
{
	return (uint32_t)(kv_test_random(&world->seed) >> 32) % n;
}

static uint32_t least(const uint32_t *lengths, uint32_t first, uint32_t n)
{
	uint32_t result = lengths[first];

	for (uint32_t l = first; l < first + n; l++)
		result = lengths[l] < result ? lengths[l] : result;
	return result;
}

static struct entry *entry_at(struct world *world, uint32_t i)
{
	return &world->entries[(world->entry_first + i) % N_ENTRIES];
}

/* ---- windows ---- */

static uint32_t sinks_end(const struct world *world, uint32_t layer)
{
	const struct kv_pool_spec *spec = world->test.pool->spec;
	uint32_t n = 0;

	for (uint32_t l = 0; l < N_LAYERS; l++) {
		if (spec->layers[l].group_idx == spec->layers[layer].group_idx &&
			spec->layers[l].sink_tokens > n)
			n = spec->layers[l].sink_tokens;
	}
	return (n + 15) / 16 * 16;
}

/* Where the first block begins that some window of the layer's group reaches at these lengths. */
static uint32_t reach_begins(const struct world *world, const uint32_t *lengths, uint32_t layer)
{
	const struct kv_pool_spec *spec = world->test.pool->spec;
	uint32_t begin = UINT32_MAX;

	for (uint32_t l = 0; l < N_LAYERS; l++) {
		uint32_t length = UINT32_MAX;

		if (spec->layers[l].group_idx != spec->layers[layer].group_idx)
			continue;
		for (uint32_t i = 0; i < N_LAYERS; i++) {
			if (spec->layers[i].group_idx == spec->layers[layer].group_idx && lengths[i] < length)
				length = lengths[i];
		}
		const uint32_t back = spec->layers[l].window + 15;
		const uint32_t first =
			spec->layers[l].window == 0 || length < back ? 0 : (length - back) / 16 * 16;

		begin = first < begin ? first : begin;
	}
	return begin;
}

static bool is_reached(const struct world *world, const struct model_sequence *model, uint32_t layer,
	uint32_t first, uint32_t end)
{
	uint32_t gone_end = reach_begins(world, model->planned, layer);

	if (model->gone_end[layer] > gone_end)
		gone_end = model->gone_end[layer];
	for (uint32_t t = first; t < end; t++) {
		if (t >= sinks_end(world, layer) && t < gone_end)
			return false;
	}
	return true;
}

static void move_windows(const struct world *world, struct model_sequence *model)
{
	for (uint32_t l = 0; model->is_live && l < N_LAYERS; l++) {
		const uint32_t end = reach_begins(world, model->committed, l);

		if (end > model->gone_end[l] && end > sinks_end(world, l))
			model->gone_end[l] = end;
	}
}

static uint32_t n_held(const struct world *world, const struct model_sequence *model, uint32_t layer)
{
	uint32_t n = 0;

	for (uint32_t t = 0; t < model->committed[layer]; t++)
		n += t < sinks_end(world, layer) || t >= model->gone_end[layer];
	return n;
}

/* ---- planning ---- */

/*
 * Blocks and sequences are counted by the domain, and those counts by the audit; the rest is the model's own.
 */
static enum kv_status expect_space(struct world *world, const struct model_session *owner,
	const struct kv_item *item, uint32_t layer_first, uint32_t n_layers)
{
	const struct kv_pool *pool = world->test.pool;
	const struct kv_sequence *sequence = kv_sequence_find(owner->session, item->sequence_id);
	uint64_t length = (uint64_t)item->position + item->n_tokens;

	if (length > owner->session->tokens_max)
		return KV_LEN_LIMIT;
	/* Cut to its beginning, and blocks behind a gap are still to be given back. */
	for (uint32_t l = layer_first; sequence && l < layer_first + n_layers; l++) {
		const uint32_t g = pool->spec->layers[l].group_idx;

		if (sequence->tables[g].gap_end > sequence->tables[g].gap_first &&
			owner->sequences[item->sequence_id]->gone_end[l] == 0)
			return KV_BUSY_RETRY;
	}
	for (uint32_t l = layer_first; l < layer_first + n_layers; l++) {
		const uint32_t g = pool->spec->layers[l].group_idx;
		const struct kv_block_counts *counts = &pool->blocks[g].counts;
		const uint32_t n_own = owner->session->n_blocks_reserved[g];
		const uint32_t n_have = sequence ? sequence->tables[g].n_blocks : 0;
		const uint32_t n_want = ((uint32_t)length + 15) / 16;

		if (n_want > n_have && n_want - n_have > counts->n_free - counts->n_reserved + n_own)
			return KV_POOL_FULL;
	}
	return KV_OK;
}

static enum kv_status expect_append(struct world *world, const struct model_session *owner,
	const struct kv_item *item, uint32_t layer_first, uint32_t n_layers, uint32_t *length)
{
	const struct model_sequence *model = owner->sequences[item->sequence_id];
	uint32_t greatest = 0;

	if (!model) {
		if (!(item->flags & KV_ITEM_CREATE))
			return KV_NOT_FOUND;
		if (owner->session->n_sequences >= owner->session->sequences_max)
			return KV_LIMIT;
		if (world->test.domain->n_sequences >= N_SEQUENCES)
			return world->test.pool->n_zombies > 0 ? KV_BUSY_RETRY : KV_LIMIT;
	}
	for (uint32_t l = 0; model && l < N_LAYERS; l++)
		greatest = model->planned[l] > greatest ? model->planned[l] : greatest;
	if (greatest > 0 && (item->flags & KV_ITEM_CREATE))
		return KV_EXISTS;
	for (uint32_t l = layer_first; l < layer_first + n_layers; l++) {
		const uint32_t planned = model ? model->planned[l] : 0;

		if (planned == item->position)
			continue;
		*length = planned;
		return KV_POSITION;
	}
	return expect_space(world, owner, item, layer_first, n_layers);
}

/* A decode sees its window back from the end of its first row. */
static enum kv_status expect_decode(const struct world *world, const struct model_sequence *model,
	const struct kv_item *item, uint32_t layer, uint32_t seen)
{
	const uint32_t own = world->test.pool->spec->layers[layer].window;
	const uint32_t asked = item->window;
	const uint32_t window = asked && (!own || asked < own) ? asked : own;
	uint32_t first = 0;

	if (item->q_len > seen && item->q_len > 1)
		return KV_BAD_ARG;
	if (window && seen + 1 > item->q_len + window)
		first = seen + 1 - item->q_len - window;
	return is_reached(world, model, layer, first, seen) ? KV_OK : KV_WINDOW_GONE;
}

static enum kv_status expect_other(const struct world *world, const struct model_sequence *model,
	const struct kv_item *item, uint32_t layer_first, uint32_t n_layers, uint32_t *length)
{
	if (!model)
		return KV_NOT_FOUND;
	for (uint32_t l = layer_first; l < layer_first + n_layers; l++) {
		const uint32_t end = item->kind == KV_ITEM_READ ? item->position + item->n_tokens
			: item->position == KV_LENGTH_PLANNED   ? 0
								: item->position;

		if (end <= model->planned[l])
			continue;
		*length = model->planned[l];
		return KV_POSITION;
	}
	if (item->kind == KV_ITEM_DECODE)
		return expect_decode(world, model, item, layer_first,
			item->position == KV_LENGTH_PLANNED ? model->planned[layer_first] : item->position);
	for (uint32_t l = layer_first; l < layer_first + n_layers; l++) {
		if (!is_reached(world, model, l, item->position, item->position + item->n_tokens))
			return KV_WINDOW_GONE;
	}
	return KV_OK;
}

static void choose_item(struct world *world, const struct model_session *owner, struct entry *entry)
{
	struct kv_item *item = &entry->item;
	static const uint8_t kinds[] = { KV_ITEM_APPEND, KV_ITEM_APPEND, KV_ITEM_APPEND_DECODE,
		KV_ITEM_DECODE, KV_ITEM_READ };
	const uint8_t kind = kinds[below(world, KV_LENGTH(kinds))];
	const bool is_decode = kind == KV_ITEM_DECODE || kind == KV_ITEM_APPEND_DECODE;

	*entry = (struct entry){ .result_idx = NO_RESULT };
	entry->n_layers = is_decode || below(world, world->is_long ? 8 : 3) == 0 ? 1 : N_LAYERS;
	entry->layer_first = entry->n_layers == 1 ? below(world, N_LAYERS) : 0;
	*item = (struct kv_item){
		.sequence_id = 1 + below(world, world->is_long ? 3 : N_IDS),
		.kind = world->is_long && is_decode && below(world, 2) ? KV_ITEM_DECODE : kind,
		.q_len = is_decode ? 1 + (below(world, 4) ? 0 : below(world, KV_Q_LEN_MAX)) : 0,
		.window = is_decode && below(world, 4) == 0 ? 1 + below(world, 30) : 0,
	};

	const struct model_sequence *model = owner->sequences[item->sequence_id];
	const uint32_t planned = model ? model->planned[entry->layer_first] : 0;

	if (item->kind != KV_ITEM_DECODE)
		item->n_tokens = 1 + below(world, below(world, 4) && !world->is_long ? 6 : 60);
	item->position = planned;
	if (item->kind == KV_ITEM_READ)
		item->position = planned > item->n_tokens
			? below(world, 3) ? planned - item->n_tokens : below(world, planned - item->n_tokens)
			: 0;
	else if (item->kind == KV_ITEM_DECODE && below(world, 2))
		item->position = KV_LENGTH_PLANNED;
	else if (item->kind == KV_ITEM_DECODE && planned > 0 && below(world, 3) == 0)
		item->position = below(world, planned);
	else if (below(world, 12) == 0)
		item->position += below(world, 3); /* wrong, or not */
	if ((item->kind == KV_ITEM_APPEND || item->kind == KV_ITEM_APPEND_DECODE) &&
		(model ? below(world, 20) == 0 : below(world, 10) != 0))
		item->flags = KV_ITEM_CREATE;
}

static void apply_plan(struct world *world, struct model_session *owner, struct entry *entry)
{
	struct kv_item *item = &entry->item;
	struct model_sequence **model = &owner->sequences[item->sequence_id];
	const bool is_append = item->kind == KV_ITEM_APPEND || item->kind == KV_ITEM_APPEND_DECODE;

	if (!*model) {
		ck_assert_uint_lt(world->n_models, N_MODELS);
		*model = &world->models[world->n_models++];
		**model = (struct model_sequence){ .id = item->sequence_id, .is_live = true };
	}
	for (uint32_t l = entry->layer_first; is_append && l < entry->layer_first + entry->n_layers; l++)
		(*model)->planned[l] = item->position + item->n_tokens;
	entry->model = *model;
	(*model)->n_items++;
	entry->owner = owner;
	entry->epoch = (*model)->epoch;
	owner->n_queued++;
	owner->n_outstanding++;
	owner->session->n_queued++;
	owner->session->n_outstanding++;
	world->n_entries++;
}

static void step_plan(struct world *world)
{
	struct model_session *owner = &world->sessions[below(world, N_SESSIONS)];
	struct entry *entry = entry_at(world, world->n_entries);
	struct kv_item *item = &entry->item;
	enum kv_status expected;

	if (!owner->session || world->n_entries == N_ENTRIES)
		return;
	choose_item(world, owner, entry);

	const struct model_sequence *model = owner->sequences[item->sequence_id];
	uint32_t length = model ? least(model->committed, entry->layer_first, entry->n_layers) : 0;

	if (item->kind == KV_ITEM_APPEND || item->kind == KV_ITEM_APPEND_DECODE)
		expected = expect_append(world, owner, item, entry->layer_first, entry->n_layers, &length);
	else
		expected = expect_other(world, model, item, entry->layer_first, entry->n_layers, &length);
	if (expected == KV_OK && item->kind == KV_ITEM_APPEND_DECODE) {
		static const struct model_sequence empty;

		expected = expect_decode(world, model ? model : &empty, item, entry->layer_first,
			item->position + item->n_tokens);
	}
	kv_item_plan(owner->session, item, entry->layer_first, entry->n_layers, ++world->now_ns);
	ck_assert_uint_eq(item->status, expected);
	ck_assert_uint_eq(item->length, length);
	if (expected == KV_OK)
		apply_plan(world, owner, entry);
	else
		world->n_by_status[expected]++;
}

/* ---- batches ---- */

/* Seals everything that waits into one batch, as far as the area goes. */
static void step_seal(struct world *world)
{
	static uint8_t tensor[1]; /* an address; nobody reads rows here */
	static const struct kv_frame_rows rows = {
		.k_dtype = KV_DTYPE_F32,
		.v_dtype = KV_DTYPE_F32,
		.q = tensor,
		.out = tensor,
	};
	struct flight *flight = &world->flights[(world->flight_first + world->n_flights) % N_FLIGHTS];

	if (world->n_flights == N_FLIGHTS)
		return;
	kv_plan_begin(&flight->plan, world->test.pool, flight->area, world->area_bytes);
	flight->n_entries = 0;
	while (world->n_sealed < world->n_entries) {
		struct entry *entry = entry_at(world, world->n_sealed);
		struct kv_frame_rows frame = rows;

		frame.layer_first = entry->layer_first;
		frame.n_layers = entry->n_layers;
		frame.window = entry->item.window;
		ck_assert_int_eq(kv_item_is_stale(&entry->item), entry->epoch != entry->model->epoch);
		if (!kv_item_is_stale(&entry->item)) {
			if (below(world, world->is_long ? 100 : 16) == 0)
				entry->item.status = KV_CANCELLED;
			else if (!kv_plan_add(&flight->plan, &frame, &entry->item, &entry->result_idx))
				break;
		}
		entry->owner->n_queued--;
		entry->owner->session->n_queued--;
		flight->n_entries++;
		world->n_sealed++;
	}
	if (flight->n_entries > 0)
		world->n_flights++;
}

static bool is_empty(const struct model_sequence *model)
{
	for (uint32_t l = 0; l < N_LAYERS; l++) {
		if (model->planned[l] > 0)
			return false;
	}
	return true;
}

static void finish_entry(struct world *world, struct entry *entry)
{
	struct model_sequence *model = entry->model;
	struct kv_item *item = &entry->item;
	const bool is_append = item->kind == KV_ITEM_APPEND || item->kind == KV_ITEM_APPEND_DECODE;
	enum kv_status expected = (enum kv_status)item->status;
	uint32_t length;

	if (entry->epoch != model->epoch) {
		if (expected != KV_CANCELLED)
			expected = KV_POSITION;
		length = least(model->planned, entry->layer_first, entry->n_layers);
	} else {
		for (uint32_t l = entry->layer_first;
			is_append && expected == KV_OK && l < entry->layer_first + entry->n_layers; l++)
			model->committed[l] = item->position + item->n_tokens;
		model->is_born = model->is_born || (is_append && expected == KV_OK);
		if (is_append && expected == KV_OK)
			move_windows(world, model);
		if (is_append && expected != KV_OK) {
			memcpy(model->planned, model->committed, sizeof(model->planned));
			model->epoch++;
		}
		length = least(model->committed, entry->layer_first, entry->n_layers);
	}
	kv_item_finish(item, entry->layer_first, entry->n_layers);
	ck_assert_uint_eq(item->status, expected);
	ck_assert_uint_eq(item->length, length);
	world->n_by_status[expected]++;
	model->n_items--;
	/* What was never created is not there. */
	if (entry->owner && model->is_live && !model->is_born && model->n_items == 0 && is_empty(model)) {
		model->is_live = false;
		entry->owner->sequences[item->sequence_id] = NULL;
	}
	if (entry->owner) {
		entry->owner->n_outstanding--;
		entry->owner->session->n_outstanding--;
	}
}

static void step_reap(struct world *world)
{
	struct flight *flight = &world->flights[world->flight_first];
	const bool ends_first = below(world, 2);

	if (world->n_flights == 0)
		return;
	if (ends_first)
		kv_plan_end(&flight->plan);
	for (uint32_t i = 0; i < flight->n_entries; i++) {
		struct entry *entry = entry_at(world, 0);

		if (entry->result_idx != NO_RESULT && below(world, world->is_long ? 60 : 12) == 0)
			entry->item.status = KV_BAD_VALUE;
		finish_entry(world, entry);
		world->entry_first = (world->entry_first + 1) % N_ENTRIES;
		world->n_entries--;
		world->n_sealed--;
	}
	if (!ends_first)
		kv_plan_end(&flight->plan);
	world->flight_first = (world->flight_first + 1) % N_FLIGHTS;
	world->n_flights--;
}

/* ---- the rest ---- */

static void step_change(struct world *world)
{
	struct model_session *owner = &world->sessions[below(world, N_SESSIONS)];
	const uint64_t id = 1 + below(world, N_IDS);
	struct model_sequence *model = owner->sequences[id];
	enum kv_status expected = model ? KV_OK : KV_NOT_FOUND;

	if (!owner->session || owner->n_outstanding > 0)
		return;
	if (below(world, world->is_long ? 20 : 3) == 0) {
		kv_assert_status(kv_sequence_free(owner->session, id), expected);
		if (model)
			model->is_live = false;
		owner->sequences[id] = NULL;
		return;
	}

	const uint32_t length = below(world, 5) == 0 ? below(world, world->is_long ? 400 : 50)
		: model ? model->committed[0] - below(world, model->committed[0] / 4 + 1)
			: 5;

	for (uint32_t l = 0; model && l < N_LAYERS; l++) {
		const uint32_t window = world->test.pool->spec->layers[l].window;

		if (model->committed[l] > length &&
			!is_reached(world, model, l, window && length > window ? length - window : 0, length))
			expected = KV_WINDOW_GONE;
	}
	kv_assert_status(kv_sequence_truncate(owner->session, id, length), expected);
	world->n_by_status[expected]++;
	for (uint32_t l = 0; model && expected == KV_OK && l < N_LAYERS; l++) {
		if (model->committed[l] > length)
			model->committed[l] = length;
		model->planned[l] = model->committed[l];
		if (length <= sinks_end(world, l))
			model->gone_end[l] = 0;
	}
}

/* Opens a session, or closes one that has nothing queued although batches of it may be in flight. */
static void step_session(struct world *world)
{
	struct model_session *owner = &world->sessions[below(world, N_SESSIONS)];

	if (!owner->session) {
		const struct kv_open_params params = {
			.pool = world->test.pool,
			.reserve_blocks = below(world, 3) ? 0 : below(world, 9),
			.sequences_max = below(world, 2) ? 0 : 4,
			.tokens_max = below(world, world->is_long ? 6 : 2) ? 0 : 45,
		};
		const enum kv_status status =
			kv_session_open(world->test.domain, &params, 1, &owner->session, NULL);

		ck_assert(status == KV_OK || (status == KV_POOL_FULL && params.reserve_blocks > 0));
		return;
	}
	if (owner->n_queued > 0 || below(world, world->is_long ? 40 : 4))
		return;
	for (uint32_t i = 0; i < world->n_sealed; i++) {
		if (entry_at(world, i)->owner == owner)
			entry_at(world, i)->owner = NULL;
	}
	for (uint32_t id = 1; id <= N_IDS; id++) {
		if (owner->sequences[id])
			owner->sequences[id]->is_live = false;
	}
	kv_session_close(world->test.domain, owner->session, false);
	*owner = (struct model_session){ 0 };
}

/* Lengths, listing and sums as the model has them. */
static void compare(struct world *world)
{
	struct kv_pool *pool = world->test.pool;
	uint64_t layer_tokens[N_LAYERS] = { 0 }, n_tokens = 0, next;

	for (uint32_t s = 0; s < N_SESSIONS; s++) {
		struct model_session *owner = &world->sessions[s];
		struct kv_sequence *list[N_IDS + 1];
		uint32_t n = 0, n_listed;

		if (!owner->session)
			continue;
		n_listed = kv_sequence_list(owner->session, 0, list, N_IDS + 1, &next);
		ck_assert_uint_eq(next, 0);
		for (uint32_t id = 1; id <= N_IDS; id++) {
			const struct model_sequence *model = owner->sequences[id];

			if (!model)
				continue;
			ck_assert_uint_lt(n, n_listed);
			ck_assert_uint_eq(list[n]->id, id);
			ck_assert_uint_eq(list[n]->epoch, model->epoch);
			ck_assert_mem_eq(list[n]->planned, model->planned, sizeof(model->planned));
			ck_assert_mem_eq(list[n]->committed, model->committed, sizeof(model->committed));
			n_tokens += least(model->committed, 0, N_LAYERS);
			for (uint32_t l = 0; l < N_LAYERS; l++)
				layer_tokens[l] += n_held(world, model, l);
			n++;
		}
		ck_assert_uint_eq(n, n_listed);
	}
	ck_assert_uint_eq(pool->n_tokens_committed, n_tokens);
	ck_assert_mem_eq(pool->layer_tokens, layer_tokens, sizeof(layer_tokens));
}

static void audit(struct world *world)
{
	struct kv_plan *plans[N_FLIGHTS];

	for (uint32_t i = 0; i < world->n_flights; i++)
		plans[i] = &world->flights[(world->flight_first + i) % N_FLIGHTS].plan;
	kv_test_audit(world->test.domain, plans, world->n_flights);
}

/* The audit of a running domain, a few entries between operations: it never sees anything wrong. */
static void tally(struct world *world)
{
	struct kv_error err = { 0 };
	bool is_done = false;

	if (!world->tally)
		kv_assert_ok(kv_tally_create(world->test.domain, &world->tally, NULL));

	const enum kv_status status = kv_tally_step(
		world->tally, 1 + below(world, 12), world->n_flights == 0, &is_done, &world->finding, &err);

	ck_assert_msg(status == (world->finding.pool[0] ? KV_INTERNAL : KV_OK), "%s", err.msg);
	ck_assert_msg(world->is_leaky || status == KV_OK, "%s", err.msg);
	if (!is_done && status == KV_OK)
		return;
	world->n_tallies++;
	kv_tally_destroy(world->tally);
	world->tally = NULL;
}

static void step(struct world *world)
{
	const uint32_t kind = below(world, 100);
	const uint32_t n_max = 1 + below(world, 12);

	/* As if others had cut much already: what this step cuts has to wait. */
	if (below(world, 8) == 0)
		world->test.domain->n_cut = KV_CUT_BLOCKS_MAX;

	if (kind < 50)
		step_plan(world);
	else if (kind < 62)
		step_seal(world);
	else if (kind < 75)
		step_reap(world);
	else if (kind < 82)
		step_change(world);
	else if (kind < 88)
		step_session(world);
	else
		ck_assert_uint_le(kv_domain_release(world->test.domain, n_max), n_max);
	tally(world);
	if (world->is_leaky)
		return;
	audit(world);
	compare(world);
}

/* Everything comes to its end, and nothing is left behind. */
static void wind_up(struct world *world)
{
	struct kv_pool *pool = world->test.pool;

	while (world->n_entries > 0) {
		step_seal(world);
		step_reap(world);
		audit(world);
	}
	for (uint32_t s = 0; s < N_SESSIONS; s++) {
		if (world->sessions[s].session)
			kv_session_close(world->test.domain, world->sessions[s].session, true);
	}
	kv_test_release_all(world->test.domain);
	kv_assert_ok(kv_domain_pool_check_remove(pool, NULL));
	for (uint32_t g = 0; g < pool->spec->n_groups; g++) {
		ck_assert_uint_eq(pool->blocks[g].counts.n_free, pool->spec->n_blocks[g]);
		ck_assert_uint_eq(pool->blocks[g].counts.n_reserved, 0);
	}
	ck_assert_uint_eq(pool->tables.n_chunks_used, 0);
	ck_assert_uint_eq(world->test.domain->n_sequences, 0);
}

static void begin(struct world *world, uint64_t seed, const char *options, const char *groups)
{
	char pool[256];

	static const struct kv_domain_limits limits = {
		.sessions_max = N_SESSIONS,
		.sequences_max = N_SEQUENCES,
		.lease_ms = 1000,
		.lease_ms_max = 1000,
	};
	const uint32_t n_by_status_size = sizeof(world->n_by_status);
	uint32_t n_by_status[KV_LENGTH(world->n_by_status)];

	memcpy(n_by_status, world->n_by_status, n_by_status_size);
	memset(world, 0, sizeof(*world));
	memcpy(world->n_by_status, n_by_status, n_by_status_size);
	world->seed = seed;
	world->is_long = strchr(options, ',') != NULL;
	snprintf(pool, sizeof(pool),
		"name=p,layers=3,q_heads=1,kv_heads=1,head_dim=16,k=f32,v=f32,block_size=16,blocks=%s",
		options);
	kv_test_domain_init(&world->test, &limits, pool, groups, seed);
	world->area_bytes = kv_plan_area_bytes(world->test.pool->spec, 65536);
	for (uint32_t i = 0; i < N_FLIGHTS; i++)
		ck_assert_int_eq(
			posix_memalign((void **)&world->flights[i].area, 4096, world->area_bytes), 0);
}

static void end(struct world *world)
{
	for (uint32_t i = 0; i < N_FLIGHTS; i++)
		free(world->flights[i].area);
	kv_tally_destroy(world->tally);
	kv_test_domain_finish(&world->test);
}

static void run(struct world *world, uint64_t seed, uint32_t n_steps, const char *options, const char *groups)
{
	begin(world, seed, options, groups);
	for (uint32_t i = 0; i < n_steps; i++)
		step(world);
	ck_assert_uint_ge(world->n_tallies, 10);
	wind_up(world);
	end(world);
}

/* Something that the books say and nobody has. False: not now. */
static bool leak(struct world *world, uint32_t kind, uint64_t session)
{
	struct kv_pool *pool = world->test.pool;
	struct kv_block_pool *blocks = &pool->blocks[below(world, pool->spec->n_groups)];
	kv_block_id id = { below(world, blocks->n_blocks) };

	if (kind == 0) {
		if (kv_block_pool_take(blocks, 1, 0, &id) != KV_OK)
			return false;
	} else if (blocks->owners[id.idx] == 0) {
		return false;
	} else if (kind == 1) {
		kv_block_pool_own(blocks, id);
	} else {
		kv_block_pool_flight_begin(blocks, id);
	}
	kv_block_pool_mark(blocks, &id, 1, session, blocks->payers[id.idx]);
	world->is_leaky = true;
	world->leak_kind = kind;
	world->leak_blocks = blocks;
	world->leak_id = id;
	return true;
}

static void mend(struct world *world)
{
	if (world->leak_kind < 2)
		kv_block_pool_disown(world->leak_blocks, world->leak_id);
	else
		kv_block_pool_flight_end(world->leak_blocks, world->leak_id);
}

/*
 * Any order of operations leaves domain and model in agreement, and the audit finds nothing after any step.
 */
START_TEST(test_sequence_model_agrees)
{
	static const char *const groups[] = { NULL, "[[0,2],[1]]", "[[0],[1],[2]]" };
	static const char *const options[] = { "24", "12,window=20,tokens_max=4000",
		"16,window=3,sink_tokens=20,tokens_max=2000", "24,window=90" };
	static const enum kv_status met[] = { KV_OK, KV_NOT_FOUND, KV_EXISTS, KV_POSITION, KV_LEN_LIMIT,
		KV_POOL_FULL, KV_LIMIT, KV_BUSY_RETRY, KV_BAD_VALUE, KV_CANCELLED, KV_WINDOW_GONE };
	static struct world world;

	for (uint32_t i = 0; i < 24; i++) {
		const uint64_t seed = 0x5EED1000 + i;

		printf("test_sequence_model: seed %llx\n", (unsigned long long)seed);
		run(&world, seed, 2000, options[i % KV_LENGTH(options)],
			groups[i / KV_LENGTH(options) % KV_LENGTH(groups)]);
	}
	for (uint32_t i = 0; i < KV_LENGTH(met); i++)
		ck_assert_msg(world.n_by_status[met[i]] >= 20, "status %d met only %u times: too easy a test",
			met[i], world.n_by_status[met[i]]);
}
END_TEST

/*
 * FAILURES M2: a block that gets lost while operations go on is found by the first audit that begins after
 * it, at the latest, and told with the session that took it.
 */
START_TEST(test_a_leak_is_found_while_operations_go_on)
{
	static struct world world;

	for (uint32_t i = 0; i < 60; i++) {
		const uint64_t seed = 0x1EAC0000 + i, session = 0x5E551017 + i;

		begin(&world, seed, i % 2 ? "24" : "24,window=20", i % 4 < 2 ? NULL : "[[0,2],[1]]");
		for (uint32_t k = below(&world, 400); k > 0; k--)
			step(&world);
		for (uint32_t kind = i; !leak(&world, kind % 3, session); kind++)
			step(&world);

		const uint32_t n_tallies = world.n_tallies;

		for (uint32_t k = 0; k < 3000 && !world.finding.pool[0]; k++)
			step(&world);
		ck_assert_msg(world.finding.session == session, "seed %llx: session %llx",
			(unsigned long long)seed, (unsigned long long)world.finding.session);
		ck_assert_uint_le(world.n_tallies, n_tallies + 2);
		mend(&world);
		wind_up(&world);
		end(&world);
	}
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("sequence_model");
	TCase *tcase = tcase_create("sequence_model");

	tcase_add_test(tcase, test_sequence_model_agrees);
	tcase_set_timeout(tcase, 120);
	tcase_add_test(tcase, test_a_leak_is_found_while_operations_go_on);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK_GETENV);
}
