#include "tests/sim/script.h"

#include <stdio.h>
#include <string.h>

#include "tests/sim/client.h"

#define PATIENCE_NS (5000 * KV_NS_PER_MS)

/* ---- requests ---- */

struct sim_request *sim_script_new(struct sim_peer *peer, uint16_t opcode, uint64_t handle)
{
	struct sim_world *world = peer->world;
	struct sim_request *request = sim_world_request(world, peer, opcode);
	const struct sim_session *session = handle ? sim_model_session(&world->model, handle) : NULL;
	const bool has_q = opcode == KVP_OP_DECODE || opcode == KVP_OP_APPEND_DECODE;

	request->session = handle;
	request->spec = world->specs[0];
	if (session && session->is_open)
		request->spec = sim_world_spec(world, session->pool->spec->name);
	request->n_layers = has_q ? 1 : request->spec->n_layers;
	if (opcode != KVP_OP_DECODE)
		request->k_dtype = request->v_dtype = KV_DTYPE_BF16;
	if (has_q)
		request->q_dtype = request->out_dtype = KV_DTYPE_F32;
	if (has_q)
		request->rows_flags = KVP_ROWS_LSE;
	request->tell = (struct kvp_tell_req){ 0, KVP_ITEMS_MAX, KVP_TELL_PER_LAYER };
	request->query_counter = world->query_counter + 1;
	world->query_counter += SIM_ITEMS_MAX * SIM_Q_LEN_MAX;
	return request;
}

void sim_script_layers(struct sim_request *request, uint32_t layer_first, uint32_t n_layers)
{
	request->layer_first = layer_first;
	request->n_layers = n_layers;
}

uint32_t sim_script_item(struct sim_request *request, uint64_t sequence, uint32_t position, uint32_t n_tokens)
{
	struct sim_item *item = &request->items[request->n_items];
	const bool is_append = request->opcode == KVP_OP_APPEND || request->opcode == KVP_OP_APPEND_DECODE;

	SIM_CHECK(request->n_items < SIM_ITEMS_MAX, "too many items for the simulation");
	item->sequence = sequence;
	item->position = position;
	item->n_tokens = n_tokens;
	item->q_len = request->opcode == KVP_OP_DECODE || request->opcode == KVP_OP_APPEND_DECODE;
	item->row_counter = sim_world_rows(request->peer->world, n_tokens);
	if (is_append && position == 0)
		item->flags = KVP_ITEM_CREATE;
	return request->n_items++;
}

void sim_script_send(struct sim_request *request)
{
	sim_peer_send(request->peer, request, UINT64_MAX);
}

enum kv_status sim_script_wait(struct sim_request *request)
{
	struct sim_world *world = request->peer->world;
	const uint64_t end_ns = world->clock.now_ns + PATIENCE_NS;

	while (!request->is_replied) {
		SIM_CHECK(!request->is_lost, "the connection of request %llu ended",
			(unsigned long long)request->id);
		SIM_CHECK(world->clock.now_ns < end_ns, "request %llu (%s) is not answered",
			(unsigned long long)request->id, kvp_opcode_name(request->opcode));
		sim_world_step(world, KV_NS_PER_MS);
		sim_peer_poll(request->peer);
	}
	return (enum kv_status)request->peer->reply.status;
}

enum kv_status sim_script_call(struct sim_request *request)
{
	sim_script_send(request);
	return sim_script_wait(request);
}

static enum kv_status call_item(struct sim_request *request)
{
	const enum kv_status status = sim_script_call(request);

	return status == KV_OK ? (enum kv_status)request->items[0].outcome.status : status;
}

enum kv_status sim_script_append(
	struct sim_peer *peer, uint64_t handle, uint64_t sequence, uint32_t position, uint32_t n_tokens)
{
	struct sim_request *request = sim_script_new(peer, KVP_OP_APPEND, handle);

	sim_script_item(request, sequence, position, n_tokens);
	return call_item(request);
}

enum kv_status sim_script_decode(struct sim_peer *peer, uint64_t handle, uint64_t sequence, uint32_t position)
{
	struct sim_request *request = sim_script_new(peer, KVP_OP_DECODE, handle);

	sim_script_item(request, sequence, position, 0);
	return call_item(request);
}

enum kv_status sim_script_close(struct sim_peer *peer, uint64_t handle)
{
	return sim_script_call(sim_script_new(peer, KVP_OP_CLOSE, handle));
}

/* ---- connections and sessions ---- */

struct sim_peer *sim_script_connect(struct sim_world *world, uint32_t peer_idx)
{
	struct sim_peer *peer = &world->peers[peer_idx];
	struct sim_request *request = sim_world_request(world, peer, KVP_OP_HELLO);

	SIM_CHECK(sim_peer_connect(peer), "nobody listens");
	request->hello = (struct kvp_hello_req){ .proto_min = 1, .proto_max = 1 };
	peer->is_hello_sent = true;
	SIM_CHECK(sim_script_call(request) == KV_OK, "HELLO failed");
	return peer;
}

uint64_t sim_script_open(struct sim_peer *peer, uint32_t pool_idx, const char *name)
{
	struct sim_request *request = sim_script_new(peer, KVP_OP_OPEN, 0);

	snprintf(request->pool_name, sizeof(request->pool_name), "%s", sim_pool_name(pool_idx));
	snprintf(request->session_name, sizeof(request->session_name), "%s", name ? name : "");
	request->open.pool_name_bytes = (uint16_t)strlen(request->pool_name);
	request->open.session_name_bytes = (uint16_t)strlen(request->session_name);
	SIM_CHECK(sim_script_call(request) == KV_OK, "OPEN failed");
	return request->session;
}

/* ---- looking and waiting ---- */

void sim_script_pass(struct sim_world *world, uint64_t for_ns)
{
	const uint64_t end_ns = world->clock.now_ns + for_ns;

	while (world->clock.now_ns < end_ns)
		sim_world_step(world, end_ns - world->clock.now_ns);
	for (uint32_t i = 0; i < world->config.n_peers; i++)
		sim_peer_poll(&world->peers[i]);
}

uint32_t sim_script_length(struct sim_world *world, uint64_t handle, uint64_t sequence, uint32_t layer)
{
	struct kv_session *session = NULL;
	const enum kv_status status = kv_session_find(world->server->domain, handle, &session);
	const struct kv_sequence *found = status == KV_OK ? kv_sequence_find(session, sequence) : NULL;

	return found ? found->committed[layer] : 0;
}

const struct kv_block_counts *sim_script_blocks(const struct sim_world *world, uint32_t pool_idx)
{
	return &sim_world_pool(world, pool_idx)->blocks[0].counts;
}

void sim_script_end(struct sim_world *world)
{
	for (uint32_t i = 0; i < world->config.n_peers; i++) {
		struct sim_peer *peer = &world->peers[i];

		sim_client_wake(peer);
		if (!peer->conn)
			continue;
		peer->may_end = "the test is over";
		sim_net_shutdown(world->net, peer->conn);
	}
	sim_script_pass(world, 1000 * KV_NS_PER_MS);
	/* At once: an hour's leases are not worth an hour of turns and audits. */
	world->clock.now_ns += world->config.lease_ms * KV_NS_PER_MS;
	sim_script_pass(world, 1000 * KV_NS_PER_MS);
	sim_world_check(world);
	sim_world_check_empty(world);
	sim_world_finish(world, true);
}
