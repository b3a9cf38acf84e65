/* Random operations, each on the domain and on the model. */
#include "tests/unit/sequence_world.h"

/* ---- planning ---- */

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

void world_step_plan(struct world *world)
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

	expected = world_expect_plan(world, owner, item, entry->layer_first, entry->n_layers, &length);
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
void world_step_seal(struct world *world)
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
			world_move_windows(world, model);
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

void world_step_reap(struct world *world)
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

void world_step_change(struct world *world)
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
			!world_is_reached(
				world, model, l, window && length > window ? length - window : 0, length))
			expected = KV_WINDOW_GONE;
	}
	kv_assert_status(kv_sequence_truncate(owner->session, id, length), expected);
	world->n_by_status[expected]++;
	for (uint32_t l = 0; model && expected == KV_OK && l < N_LAYERS; l++) {
		if (model->committed[l] > length)
			model->committed[l] = length;
		model->planned[l] = model->committed[l];
		if (length <= world_sinks_end(world, l))
			model->gone_end[l] = 0;
	}
}

/* Opens a session, or closes one that has nothing queued although batches of it may be in flight. */
void world_step_session(struct world *world)
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
