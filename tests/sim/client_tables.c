/*
 * The random client's requests to sessions whose tables it manages.
 */
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

/* The last of those that name the slot, so that its row is stored. */
static bool is_stored(const struct sim_request *request, uint32_t token)
{
	for (uint32_t t = token + 1; t < request->items[0].n_tokens; t++) {
		if (request->slots[t] == request->slots[token])
			return false;
	}
	return request->slots[token] >= 0;
}

/* A run of slots, with some left out, some named twice, and rarely one that is not there. */
static void choose_slots(
	struct sim_peer *peer, struct sim_request *request, const struct sim_session *session)
{
	const struct sim_config *config = &peer->world->config;
	struct sim_item *item = &request->items[0];
	const uint32_t first = below(peer, session->n_slots);

	item->n_tokens = 1 + below(peer, chance(peer, 500) ? SIM_SLOTS_MAX : 4);
	for (uint32_t t = 0; t < item->n_tokens; t++) {
		request->slots[t] = (first + t) % session->n_slots;
		if (chance(peer, 30))
			request->slots[t] = chance(peer, 500) ? -1 : INT64_MIN;
		else if (chance(peer, 30))
			request->slots[t] = below(peer, session->n_slots);
	}
	if (is_wrong(peer))
		request->slots[below(peer, item->n_tokens)] =
			chance(peer, 500) ? session->n_slots : INT64_MAX;
	while (sim_request_bytes(request) > config->frame_bytes_max)
		item->n_tokens = item->n_tokens / 2;
	item->row_counter = sim_world_rows(peer->world, item->n_tokens);
	const uint32_t bad = below(peer, item->n_tokens);

	if (chance(peer, config->nan_per_mille) && is_stored(request, bad)) {
		item->bad_layer = request->layer_first + below(peer, request->n_layers);
		item->bad_row = bad;
		item->is_bad_v = chance(peer, 500);
	}
}

/* Blocks in any order, and no more tokens than are known now; sometimes more. */
static void choose_table(struct sim_peer *peer, struct sim_request *request,
	const struct sim_session *session, uint32_t list, uint32_t q_len)
{
	const uint32_t block_size = request->spec->block_size, n_blocks = session->n_slots / block_size;
	uint32_t *table = request->table + list * SIM_STRIDE;
	uint32_t seen = 0;

	for (uint32_t i = 0; i < SIM_STRIDE; i++)
		table[i] = below(peer, n_blocks);
	while (seen < SIM_STRIDE * block_size &&
		sim_model_slot(session, request->layer_first,
			table[seen / block_size] * block_size + seen % block_size) != UINT32_MAX)
		seen++;
	if (seen == 0 || chance(peer, 50))
		seen = 1 + below(peer, SIM_STRIDE * block_size);
	else if (chance(peer, 500))
		seen = 1 + below(peer, seen);
	if (seen > session->tokens_max)
		seen = session->tokens_max;
	if (seen < q_len)
		seen = q_len;
	for (uint32_t i = (seen + block_size - 1) / block_size; i < SIM_STRIDE; i++)
		table[i] = UINT32_MAX - below(peer, 3);
	if (is_wrong(peer))
		table[below(peer, SIM_STRIDE)] = n_blocks;
	if (is_wrong(peer))
		seen = chance(peer, 500) ? 0 : SIM_STRIDE * block_size;
	request->seen[list] = seen;
}

static void choose_tables(
	struct sim_peer *peer, struct sim_request *request, const struct sim_session *session)
{
	const struct sim_config *config = &peer->world->config;
	const uint32_t q_len = chance(peer, 700) ? 1 : 1 + below(peer, 8);

	request->n_listed = 1 + below(peer, SIM_LISTED_MAX);
	request->items[0].q_len = q_len * request->n_listed;
	while (request->n_listed > 1 && sim_request_bytes(request) > config->frame_bytes_max)
		request->items[0].q_len = q_len * --request->n_listed;
	for (uint32_t s = 0; s < request->n_listed; s++)
		choose_table(peer, request, session, s, q_len);
	request->query_counter = peer->world->query_counter + 1;
	peer->world->query_counter += SIM_ITEMS_MAX * SIM_Q_LEN_MAX;
}

void sim_client_ask_tables(struct sim_peer *peer, const struct sim_session *session)
{
	const bool is_update = chance(peer, 500);
	struct sim_request *request =
		sim_world_request(peer->world, peer, is_update ? KVP_OP_UPDATE_SLOTS : KVP_OP_DECODE_TABLE);

	request->session = session->handle;
	request->spec = sim_world_spec(peer->world, session->pool->spec->name);
	request->n_items = 1;
	sim_client_choose_layers(peer, request);
	sim_client_choose_dtypes(peer, request);
	if (chance(peer, 150))
		request->flags |= KVP_FLAG_TIMINGS;
	if (chance(peer, peer->world->config.deadline_per_mille))
		request->deadline_us = 1 + below(peer, 2000);
	if (is_update)
		choose_slots(peer, request, session);
	else
		choose_tables(peer, request, session);
	sim_client_submit(peer, request);
}
