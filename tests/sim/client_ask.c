/*
 * The random client's requests.
 */
#include <stdio.h>
#include <string.h>

#include "core/checked.h"
#include "tests/sim/client.h"

static uint32_t below(struct sim_peer *peer, uint32_t n)
{
	return sim_below(&peer->world->rng, n);
}

static bool chance(struct sim_peer *peer, uint32_t per_mille)
{
	return sim_chance(&peer->world->rng, per_mille);
}

static bool is_wrong(struct sim_peer *peer)
{
	return chance(peer, peer->world->config.wrong_per_mille);
}

static struct sim_request *new_request(struct sim_peer *peer, uint16_t opcode)
{
	return sim_world_request(peer->world, peer, opcode);
}

static enum kv_dtype any_dtype(struct sim_peer *peer)
{
	return (enum kv_dtype)(KV_DTYPE_F32 + below(peer, 3));
}

/* Packed rows too, where the server takes them. */
static enum kv_dtype any_row_dtype(struct sim_peer *peer)
{
	if ((SRV_FEATURES & KVP_FEATURE_PACKED_INPUT) && chance(peer, 150))
		return KV_DTYPE_PACKED;
	return any_dtype(peer);
}

/* ---- flaws ---- */

static void maybe_flaw(struct sim_peer *peer, struct sim_request *request)
{
	const bool is_rows = sim_request_is_rows(request);
	const bool has_session = request->session != 0;

	if (!chance(peer, peer->world->config.flaw_per_mille))
		return;
	const enum sim_flaw flaw =
		(enum sim_flaw)(1 + below(peer, (is_rows ? SIM_N_FLAWS : SIM_FLAW_N_LAYERS) - 1));

	if (flaw == SIM_FLAW_KEEPS || flaw == SIM_FLAW_EARLY)
		return;
	if (flaw == SIM_FLAW_BODY_CRC && request->opcode == KVP_OP_PING)
		return; /* what a PING without echo carries is thrown away unread */
	if (flaw >= SIM_FLAW_HANDLE_0 && !has_session)
		return;
	if (flaw == SIM_FLAW_HANDLE_0 && request->opcode == KVP_OP_PING)
		return; /* renews all */
	/* Below KEEPS the connection ends: rarer, so that others happen too. */
	if (flaw < SIM_FLAW_KEEPS && chance(peer, 700))
		return;
	if (flaw == SIM_FLAW_DUPLICATE && request->n_items < 2)
		return;
	request->flaw = flaw;
}

void sim_client_submit(struct sim_peer *peer, struct sim_request *request)
{
	if (chance(peer, 150))
		request->flags |= KVP_FLAG_BODY_CRC;
	maybe_flaw(peer, request);
	sim_client_send(peer, request);
}

/* ---- sessions ---- */

static void fill_names(struct sim_peer *peer, struct sim_request *request, bool is_open)
{
	const struct sim_config *config = &peer->world->config;

	if (is_open) {
		uint32_t idx = below(peer, config->n_pools);

		if (config->pool_per_mille > 0 && chance(peer, 150))
			idx = SIM_POOLS_MAX;
		snprintf(request->pool_name, sizeof(request->pool_name), "%s",
			is_wrong(peer) && idx > 0 ? "nowhere" : sim_pool_name(idx));
	}
	if (!is_open || chance(peer, 600))
		snprintf(request->session_name, sizeof(request->session_name), "s%u", below(peer, 5));
	request->open.pool_name_bytes = (uint16_t)strlen(request->pool_name);
	request->open.session_name_bytes = (uint16_t)strlen(request->session_name);
}

static void ask_open(struct sim_peer *peer)
{
	const struct sim_config *config = &peer->world->config;
	struct sim_request *request = new_request(peer, KVP_OP_OPEN);

	fill_names(peer, request, true);
	request->open.priority = (uint16_t)below(peer, 4);
	request->open.lease_ms = chance(peer, 500) ? 0 : config->lease_ms + below(peer, 50);
	if (chance(peer, 250))
		request->open.reserve_blocks = below(peer, config->pools[0].n_blocks / 2 + 2);
	if (chance(peer, config->tables_per_mille)) {
		request->open.flags = KVP_OPEN_CLIENT_TABLES;
		request->open.reserve_blocks = is_wrong(peer) ? 0 : 1 + below(peer, 4);
	}
	if (chance(peer, 200))
		request->open.sequences_max = 1 + below(peer, 4);
	if (chance(peer, 200))
		request->open.tokens_max = 8 + below(peer, 40);
	if (is_wrong(peer))
		request->open.fingerprint = 12345;
	sim_client_submit(peer, request);
}

static void ask_attach(struct sim_peer *peer)
{
	struct sim_request *request = new_request(peer, KVP_OP_ATTACH);

	fill_names(peer, request, false);
	if (is_wrong(peer))
		request->open.fingerprint = 12345;
	sim_client_submit(peer, request);
}

/* A handle that it owns; sometimes somebody else's. 0: it has none. */
static uint64_t any_session(struct sim_peer *peer)
{
	const struct sim_world *world = peer->world;

	if (is_wrong(peer)) {
		const struct sim_peer *other = &world->peers[below(peer, world->config.n_peers)];

		if (other->n_sessions > 0)
			return other->sessions[below(peer, other->n_sessions)];
	}
	return peer->n_sessions > 0 ? peer->sessions[below(peer, peer->n_sessions)] : 0;
}

/* ---- what a session holds ---- */

/* Tokens that appends of this peer, which are not planned yet, will add to the sequence on the layer. */
static uint32_t under_way(const struct sim_peer *peer, uint64_t handle, uint64_t sequence, uint32_t layer)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < peer->n_pending; i++) {
		const struct sim_request *request = peer->pending[i];

		if (request->session != handle || request->planned_seq != 0 ||
			request->flaw != SIM_FLAW_NONE || !sim_request_is_rows(request) ||
			layer < request->layer_first || layer >= request->layer_first + request->n_layers)
			continue;
		for (uint32_t k = 0; k < request->n_items; k++) {
			if (request->items[k].sequence == sequence)
				n += request->items[k].n_tokens;
		}
	}
	return n;
}

static uint32_t length_of(
	const struct sim_peer *peer, const struct sim_session *session, uint64_t id, uint32_t layer)
{
	const struct sim_sequence *sequence = sim_model_sequence(session, id);

	return (sequence ? sequence->layers[layer].planned : 0) + under_way(peer, session->handle, id, layer);
}

static void spoil_position(struct sim_peer *peer, struct sim_item *item)
{
	if (!is_wrong(peer))
		return;
	if (item->position > 0 && chance(peer, 500))
		item->position -= 1 + below(peer, item->position);
	else
		item->position += 1 + below(peer, 5);
}

/* How many query rows: at most one more than the tokens that the frame says are seen, else it is refused
 * whole. */
static uint32_t any_q_len(struct sim_peer *peer, const struct sim_item *item)
{
	const uint64_t bound = item->position == KV_LENGTH_PLANNED
		? SIM_Q_LEN_MAX
		: (uint64_t)item->position + item->n_tokens + 1;

	if (chance(peer, 700))
		return 1;
	return 1 + below(peer, bound < SIM_Q_LEN_MAX ? (uint32_t)bound : SIM_Q_LEN_MAX);
}

static void add_item(struct sim_peer *peer, struct sim_request *request, const struct sim_session *session,
	uint64_t sequence)
{
	const struct sim_config *config = &peer->world->config;
	struct sim_item *item = &request->items[request->n_items++];
	const uint32_t length = length_of(peer, session, sequence, request->layer_first);

	item->sequence = sequence;
	if (request->opcode == KVP_OP_DECODE) {
		item->position = chance(peer, 300) ? KV_LENGTH_PLANNED : below(peer, length + 1);
		if (item->position != KV_LENGTH_PLANNED)
			spoil_position(peer, item);
		item->q_len = any_q_len(peer, item);
		return;
	}
	item->position = length;
	item->n_tokens = 1 +
		below(peer,
			chance(peer, config->is_lasting ? 700 : config->long_per_mille)
				? config->tokens_per_item_max
				: 4);
	spoil_position(peer, item);
	if (request->opcode == KVP_OP_APPEND_DECODE)
		item->q_len = any_q_len(peer, item);
	if (item->position == 0 && !is_wrong(peer))
		item->flags |= KVP_ITEM_CREATE;
	if (chance(peer, config->evictable_per_mille))
		item->flags |= KVP_ITEM_EVICTABLE;
	item->row_counter = sim_world_rows(peer->world, item->n_tokens);
	if (chance(peer, config->nan_per_mille)) {
		item->bad_layer = request->layer_first + below(peer, request->n_layers);
		item->bad_row = below(peer, item->n_tokens);
		item->is_bad_v = chance(peer, 500);
	}
}

/* Mostly one that is there. */
static uint64_t any_sequence(struct sim_peer *peer, const struct sim_session *session, uint32_t new_per_mille)
{
	const struct sim_sequence *sequence = session->sequences;

	if (session->n_sequences == 0 || session->has_tables ||
		chance(peer, peer->world->config.is_lasting ? new_per_mille / 10 : new_per_mille))
		return 1 + below(peer, peer->world->config.is_lasting ? 2 : 6);
	for (uint32_t i = below(peer, session->n_sequences); i > 0; i--)
		sequence = sequence->next;
	return sequence->id;
}

/* ---- rows ---- */

void sim_client_choose_layers(struct sim_peer *peer, struct sim_request *request)
{
	const uint32_t n_layers = request->spec->n_layers;

	const bool is_append = request->opcode == KVP_OP_APPEND || request->opcode == KVP_OP_UPDATE_SLOTS;

	if (is_append && chance(peer, 600 + peer->world->config.long_per_mille / 4)) {
		request->n_layers = n_layers;
	} else if (is_append || request->opcode == KVP_OP_READ) {
		request->layer_first = below(peer, n_layers);
		request->n_layers = 1 + below(peer, n_layers - request->layer_first);
	} else {
		request->layer_first = below(peer, n_layers);
		request->n_layers = 1;
	}
}

void sim_client_choose_dtypes(struct sim_peer *peer, struct sim_request *request)
{
	static const uint32_t flags[] = { KVP_ROWS_LSE, KVP_ROWS_Q_ROTATED, KVP_ROWS_OUT_ROTATED,
		KVP_ROWS_NO_SINKS };

	if (request->opcode != KVP_OP_DECODE && request->opcode != KVP_OP_DECODE_TABLE) {
		request->k_dtype = any_row_dtype(peer);
		request->v_dtype = any_row_dtype(peer);
	}
	if (request->opcode == KVP_OP_APPEND || request->opcode == KVP_OP_UPDATE_SLOTS)
		return;
	request->q_dtype = any_dtype(peer);
	request->out_dtype = any_dtype(peer);
	for (uint32_t i = 0; i < KV_LENGTH(flags); i++) {
		if (chance(peer, i == 0 ? 500 : 150))
			request->rows_flags |= flags[i];
	}
	if (chance(peer, 200))
		request->scale = 0.125f * (float)(1 + below(peer, 16));
	if (chance(peer, 200)) {
		const uint32_t window = request->spec->layers[request->layer_first].window;

		request->window = 1 + below(peer, window > 0 ? window : 40);
	}
}

static void ask_rows(struct sim_peer *peer, uint16_t opcode, const struct sim_session *session)
{
	const struct sim_config *config = &peer->world->config;
	struct sim_request *request = new_request(peer, opcode);
	const uint32_t n_items = 1 + below(peer, config->items_max);
	uint64_t sequence = any_sequence(peer, session, opcode == KVP_OP_DECODE ? 50 : 300);

	request->session = session->handle;
	request->spec = sim_world_spec(peer->world, session->pool->spec->name);
	sim_client_choose_layers(peer, request);
	sim_client_choose_dtypes(peer, request);
	if (chance(peer, 150))
		request->flags |= KVP_FLAG_TIMINGS;
	if (chance(peer, config->deadline_per_mille))
		request->deadline_us = 1 + below(peer, 2000);
	for (uint32_t i = 0; i < n_items && i < SIM_ITEMS_MAX; i++) {
		add_item(peer, request, session, sequence);
		do
			sequence++;
		while (chance(peer, 600) && opcode == KVP_OP_DECODE &&
			!sim_model_sequence(session, sequence));
		if (sim_request_bytes(request) > config->frame_bytes_max)
			break;
	}
	while (sim_request_bytes(request) > config->frame_bytes_max + KVP_HEADER_BYTES) {
		struct sim_item *last = &request->items[request->n_items - 1];

		if (last->n_tokens > 1) {
			last->n_tokens = 1;
			last->q_len = last->q_len > 1 ? 1 : last->q_len;
			last->bad_row = last->bad_layer = KV_ROW_NONE;
		} else {
			request->n_items--;
		}
	}
	request->query_counter = peer->world->query_counter + 1;
	peer->world->query_counter += SIM_ITEMS_MAX * SIM_Q_LEN_MAX;
	sim_client_submit(peer, request);
}

static void ask_read(struct sim_peer *peer, const struct sim_session *session)
{
	struct sim_request *request = new_request(peer, KVP_OP_READ);
	struct sim_item *item = &request->items[0];

	request->session = session->handle;
	request->spec = sim_world_spec(peer->world, session->pool->spec->name);
	request->n_items = 1;
	sim_client_choose_layers(peer, request);
	request->k_dtype = chance(peer, 300) ? KV_DTYPE_PACKED : (enum kv_dtype)below(peer, 4);
	request->v_dtype = chance(peer, 300) ? KV_DTYPE_PACKED : any_dtype(peer);
	request->read_flags = chance(peer, 400) ? KVP_READ_EXACT : 0;
	item->sequence = any_sequence(peer, session, 50);
	const uint32_t length = length_of(peer, session, item->sequence, request->layer_first);

	item->position = below(peer, length + 1);
	item->n_tokens = 1 + below(peer, length - item->position + 1);
	if (item->n_tokens > 32)
		item->n_tokens = 32;
	spoil_position(peer, item);
	sim_client_submit(peer, request);
}

static bool is_pinned(const struct sim_session *session, uint64_t id)
{
	const struct sim_sequence *sequence = sim_model_sequence(session, id);

	return sequence && sequence->n_pins > 0;
}

static void ask_items(struct sim_peer *peer, uint16_t opcode, const struct sim_session *session)
{
	struct sim_request *request = new_request(peer, opcode);
	uint64_t sequence = any_sequence(peer, session, 100);

	/* Few are pinned: without a second look hardly one would ever be unpinned. */
	for (uint32_t i = 0; opcode == KVP_OP_UNPIN && i < 8 && !is_pinned(session, sequence); i++)
		sequence = any_sequence(peer, session, 100);
	request->session = session->handle;
	request->n_items = 1 + below(peer, 2);
	for (uint32_t i = 0; i < request->n_items; i++) {
		request->items[i].sequence = sequence;
		const uint32_t length = length_of(peer, session, sequence, 0);

		if (opcode == KVP_OP_TRUNCATE)
			request->items[i].position = peer->world->config.is_lasting && chance(peer, 700)
				? length - below(peer, length / 8 + 1)
				: below(peer, length + 3);
		sequence += 1 + below(peer, 3);
	}
	sim_client_submit(peer, request);
}

static void ask_fork(struct sim_peer *peer, const struct sim_session *session)
{
	struct sim_request *request = new_request(peer, KVP_OP_FORK);
	uint64_t child = 1 + below(peer, 8);

	request->session = session->handle;
	request->n_items = 1 + below(peer, 3);
	for (uint32_t i = 0; i < request->n_items; i++) {
		struct sim_item *item = &request->items[i];

		item->sequence = child;
		item->parent = any_sequence(peer, session, 50);
		if (item->parent == child) /* refused as a frame */
			item->parent = child + 1;
		item->position = chance(peer, 500)
			? KV_LENGTH_PLANNED
			: below(peer, length_of(peer, session, item->parent, 0) + 2);
		child += 1 + below(peer, 2);
	}
	sim_client_submit(peer, request);
}

/* Few beginnings, so that prefixes meet: numbers up to a branch, then those of one of three ways. */
static void choose_tokens(struct sim_peer *peer, struct sim_request *request, uint32_t n_tokens)
{
	const uint32_t branch = below(peer, 3) * 20, way = 1 + below(peer, 2);

	request->prefix.n_tokens = n_tokens < 1 ? 1 : n_tokens > SIM_TOKENS_MAX ? SIM_TOKENS_MAX : n_tokens;
	for (uint32_t i = 0; i < request->prefix.n_tokens; i++)
		request->tokens[i] = i < branch ? i : way << 16 | i;
	if (chance(peer, 100))
		request->prefix_texts[request->prefix.adapter_bytes++] = 'a';
	if (chance(peer, 100)) {
		request->prefix_texts[request->prefix.adapter_bytes] = 's';
		request->prefix.salt_bytes = 1;
	}
}

/* 1 where there is none. */
static uint64_t longest_sequence(const struct sim_session *session)
{
	uint64_t longest = 1;
	uint32_t length = 0;

	for (const struct sim_sequence *sequence = session->sequences; sequence && sequence->id > 0;
		sequence = sequence->next) {
		const uint32_t this = sim_sequence_least(sequence, 0, session->pool->spec->n_layers, true);

		if (this > length) {
			length = this;
			longest = sequence->id;
		}
	}
	return longest;
}

static void ask_prefix(struct sim_peer *peer, const struct sim_session *session)
{
	const bool is_publish = chance(peer, 500);
	struct sim_request *request = new_request(peer, is_publish ? KVP_OP_PUBLISH : KVP_OP_MATCH);

	request->session = session->handle;
	if (is_publish) {
		request->prefix.sequence =
			chance(peer, 700) ? longest_sequence(session) : any_sequence(peer, session, 50);
		const uint32_t length = length_of(peer, session, request->prefix.sequence, 0);

		choose_tokens(peer, request, chance(peer, 800) ? length : below(peer, length + 3));
		request->prefix.ttl_ms = chance(peer, 300) ? 1 + below(peer, 50) : 0;
	} else {
		choose_tokens(peer, request, 16 + below(peer, 100));
		if (chance(peer, 150))
			request->prefix.flags = KVP_PREFIX_PROBE;
		else
			request->prefix.sequence = 1 + below(peer, 12);
		if (chance(peer, 200))
			request->prefix.flags |= KVP_PREFIX_EVICTABLE;
	}
	sim_client_submit(peer, request);
}

/* ---- the others ---- */

static void ask_tell(struct sim_peer *peer, uint64_t handle)
{
	struct sim_request *request = new_request(peer, KVP_OP_TELL);

	request->session = handle;
	request->tell.sequence_from = below(peer, 4);
	request->tell.n_sequences_max = below(peer, 3) ? KVP_ITEMS_MAX : below(peer, 4);
	request->tell.flags = chance(peer, 700) ? KVP_TELL_PER_LAYER : 0;
	sim_client_submit(peer, request);
}

static void ask_cancel(struct sim_peer *peer)
{
	struct sim_request *request = new_request(peer, KVP_OP_CANCEL);
	struct sim_request *target = peer->n_pending > 0 ? peer->pending[below(peer, peer->n_pending)] : NULL;

	request->cancel_id = target ? target->id : 1ull << 40;
	sim_client_submit(peer, request);
	if (target && request->flaw == SIM_FLAW_NONE)
		target->n_cancels++;
}

static void ask_ping(struct sim_peer *peer, uint64_t handle)
{
	const uint64_t most = peer->world->config.frame_bytes_max - 64;
	struct sim_request *request = new_request(peer, KVP_OP_PING);

	if (chance(peer, 400)) {
		request->has_echo = true;
		request->echo_payload_bytes =
			chance(peer, 100) ? below(peer, (uint32_t)most) : below(peer, 600);
		request->echo_bytes = chance(peer, 100) ? below(peer, (uint32_t)most) : below(peer, 600);
	} else if (chance(peer, 500)) {
		request->session = handle;
	}
	sim_client_submit(peer, request);
}

static void ask_close(struct sim_peer *peer, uint64_t handle)
{
	struct sim_request *request = new_request(peer, KVP_OP_CLOSE);

	request->session = handle;
	sim_client_submit(peer, request);
}

static void ask_pool_info(struct sim_peer *peer)
{
	struct sim_request *request = new_request(peer, KVP_OP_POOL_INFO);

	request->pool_info.what = (uint16_t)below(peer, KVP_POOL_INFO_V_BASIS + 1);
	snprintf(request->pool_name, sizeof(request->pool_name), "%s",
		is_wrong(peer) ? "nowhere" : sim_pool_name(0));
	request->pool_info.pool_name_bytes = (uint16_t)strlen(request->pool_name);
	sim_client_submit(peer, request);
}

void sim_client_ask(struct sim_peer *peer)
{
	struct sim_world *world = peer->world;
	const uint64_t handle = any_session(peer);
	const struct sim_session *session = handle ? sim_model_session(&world->model, handle) : NULL;
	const uint32_t dice = below(peer, 1000);
	const uint32_t n_attach = world->config.attach_per_mille, n_close = world->config.close_per_mille;

	if (dice < n_attach) {
		ask_attach(peer);
	} else if (dice < n_attach + 20 || !handle || (peer->n_sessions < 2 && chance(peer, 100))) {
		ask_open(peer);
	} else if (dice < n_attach + n_close + 20) {
		ask_close(peer, handle);
	} else if (dice < 160) {
		ask_ping(peer, handle);
	} else if (dice < 160 + world->config.cancel_per_mille) {
		ask_cancel(peer);
	} else if (dice < 300) {
		ask_tell(peer, handle);
	} else if (dice < 310) {
		ask_pool_info(peer);
	} else if (!session || !session->is_open) {
		ask_tell(peer, handle); /* finds out */
	} else if (session->has_tables && !is_wrong(peer)) {
		sim_client_ask_tables(peer, session);
	} else if (chance(peer, world->config.fork_per_mille)) {
		ask_fork(peer, session);
	} else if (chance(peer, world->config.prefix_per_mille)) {
		ask_prefix(peer, session);
	} else if (chance(peer, 25)) {
		ask_items(peer, chance(peer, 500) ? KVP_OP_PIN : KVP_OP_UNPIN, session);
	} else if (chance(peer, world->config.spill_per_mille)) {
		ask_items(peer, below(peer, 4) ? KVP_OP_SPILL : KVP_OP_PREFETCH, session);
	} else if (dice < 350) {
		ask_items(peer, KVP_OP_TRUNCATE, session);
	} else if (dice < (world->config.is_lasting ? 352u : 380u)) {
		ask_items(peer, KVP_OP_FREE, session);
	} else if (dice < 480) {
		ask_read(peer, session);
	} else if (dice < 640) {
		ask_rows(peer, KVP_OP_DECODE, session);
	} else if (dice < 800) {
		ask_rows(peer, KVP_OP_APPEND_DECODE, session);
	} else {
		ask_rows(peer, KVP_OP_APPEND, session);
	}
}
