/*
 * Request slots and reply buffers: all memory that a request can occupy, taken at start.
 *
 * Two size classes of slots, each slot with an in and an out area from the backend's host memory. A
 * connection holds at most a quarter of a class and a peer (user id or address) at most half, so that one
 * client cannot starve the others. Who gets none is parked and asked again when one becomes free.
 */
#include "server/internal.h"

#include "core/memory.h"

/* Reading payload, waiting for its turn, in a batch, reply on its way. */
static const struct kv_sm_state request_states[] = {
	[REQ_FREE] = { "free", KV_SM_BIT(REQ_PAYLOAD) },
	[REQ_PAYLOAD] = { "payload", KV_SM_BIT(REQ_QUEUED) | KV_SM_BIT(REQ_REPLY) | KV_SM_BIT(REQ_FREE) },
	[REQ_QUEUED] = { "queued", KV_SM_BIT(REQ_RUNNING) | KV_SM_BIT(REQ_REPLY) },
	[REQ_RUNNING] = { "running", KV_SM_BIT(REQ_REPLY) },
	[REQ_REPLY] = { "reply", KV_SM_BIT(REQ_FREE) },
};

static enum kv_status slots_init(struct srv_server *server, struct srv_slots *slots, uint32_t n,
	uint64_t in_bytes, uint64_t out_bytes, struct kv_error *err)
{
	kv_list_init(&slots->free);
	kv_list_init(&slots->waiting);
	slots->in_bytes = in_bytes;
	slots->out_bytes = out_bytes;
	slots->memory_bytes = n * (in_bytes + out_bytes);
	slots->requests = kv_alloc(n, sizeof(*slots->requests));
	slots->items = kv_pages_alloc((uint64_t)n * KVP_ITEMS_MAX * sizeof(*slots->items));
	slots->memory = server->backend->ops->host_alloc(server->backend, slots->memory_bytes);
	slots->n = n;
	if (!slots->requests || !slots->items || !slots->memory)
		return kv_fail(err, KV_NO_MEMORY, "%u request slots of %llu bytes", n,
			(unsigned long long)(in_bytes + out_bytes));
	for (uint32_t i = 0; i < n; i++) {
		struct srv_request *request = &slots->requests[i];

		request->server = server;
		request->slots = slots;
		request->in = slots->memory + i * (in_bytes + out_bytes);
		request->out = request->in + in_bytes;
		request->items = slots->items + (uint64_t)i * KVP_ITEMS_MAX;
		kv_sm_init(&request->sm, request_states, REQ_FREE);
		kv_list_push_back(&slots->free, &request->link);
	}
	return KV_OK;
}

static void slots_finish(struct srv_server *server, struct srv_slots *slots)
{
	if (slots->memory)
		server->backend->ops->host_free(server->backend, slots->memory, slots->memory_bytes);
	kv_pages_free(slots->items, (uint64_t)slots->n * KVP_ITEMS_MAX * sizeof(*slots->items));
	kv_free(slots->requests);
}

enum kv_status srv_slots_init(struct srv_server *server, struct kv_error *err)
{
	const struct srv_options *options = server->options;
	/* The largest out area also holds the reply's header; rounded so that every area starts on a page. */
	const uint64_t large_in = kv_round_up_u64(options->frame_bytes_max, 4096);
	const uint64_t large_out = kv_round_up_u64(options->frame_bytes_max + KVP_HEADER_BYTES, 4096);
	enum kv_status status = slots_init(server, &server->slots[0], options->small_slots,
		SRV_SMALL_SLOT_BYTES, SRV_SMALL_SLOT_BYTES, err);

	if (status != KV_OK)
		return status;
	status = slots_init(server, &server->slots[1], options->large_slots, large_in, large_out, err);
	if (status != KV_OK)
		return status;
	server->replies = kv_pages_alloc((uint64_t)options->reply_buffers * sizeof(*server->replies));
	if (!server->replies)
		return kv_fail(err, KV_NO_MEMORY, "%u reply buffers", options->reply_buffers);
	for (uint32_t i = options->reply_buffers; i > 0; i--) {
		server->replies[i - 1].next = server->replies_free;
		server->replies_free = &server->replies[i - 1];
	}
	return KV_OK;
}

void srv_slots_finish(struct srv_server *server)
{
	slots_finish(server, &server->slots[0]);
	slots_finish(server, &server->slots[1]);
	kv_pages_free(server->replies, (uint64_t)server->options->reply_buffers * sizeof(*server->replies));
}

uint32_t srv_slot_class(uint64_t in_bytes, uint64_t out_bytes)
{
	return in_bytes > SRV_SMALL_SLOT_BYTES || out_bytes > SRV_SMALL_SLOT_BYTES;
}

static uint32_t at_least_one(uint32_t n)
{
	return n > 0 ? n : 1;
}

/* How many slots of the class requests of this peer occupy. */
static uint32_t slots_of_peer(const struct srv_slots *slots, uint64_t peer_key)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < slots->n; i++)
		n += slots->requests[i].sm.state != REQ_FREE && slots->requests[i].peer_key == peer_key;
	return n;
}

struct srv_request *srv_request_take(
	struct srv_server *server, struct srv_conn *conn, uint64_t in_bytes, uint64_t out_bytes)
{
	const uint32_t class_idx = srv_slot_class(in_bytes, out_bytes);
	struct srv_slots *slots = &server->slots[class_idx];

	KV_ASSERT(in_bytes <= slots->in_bytes && out_bytes <= slots->out_bytes);
	if (kv_list_is_empty(&slots->free) || conn->n_slots_used[class_idx] >= at_least_one(slots->n / 4))
		return NULL;
	if (slots_of_peer(slots, conn->peer_key) >= at_least_one(slots->n / 2))
		return NULL;
	struct srv_request *request = kv_container_of(kv_list_first(&slots->free), struct srv_request, link);

	kv_list_remove(&request->link);
	slots->n_used++;
	conn->n_slots_used[class_idx]++;
	conn->n_inflight++;
	conn->inflight_bytes += in_bytes + out_bytes;
	request->charged_bytes = in_bytes + out_bytes;
	request->conn = conn;
	request->peer_key = conn->peer_key;
	request->header = conn->header;
	request->header_ns = conn->header_ns;
	request->deadline_ns =
		conn->header.deadline_us ? conn->header_ns + conn->header.deadline_us * KV_NS_PER_US : 0;
	request->session = NULL;
	request->lane = NULL;
	request->in_bytes = 0;
	request->out_bytes = out_bytes;
	request->n_items = request->n_items_sealed = request->n_items_done = 0;
	request->is_cancelled = request->is_expired = false;
	request->queued_ns = request->sealed_ns = 0;
	request->copy_in_us = request->kernel_us = request->copy_out_us = 0;
	request->timed_batch = 0;
	kv_sm_move(&request->sm, REQ_PAYLOAD);
	return request;
}

void srv_request_free(struct srv_server *server, struct srv_request *request)
{
	struct srv_slots *slots = request->slots;
	struct srv_conn *conn = request->conn;

	if (conn) {
		conn->n_slots_used[slots == &server->slots[1]]--;
		conn->n_inflight--;
		conn->inflight_bytes -= request->charged_bytes;
	}
	request->conn = NULL;
	kv_list_remove(&request->link);
	kv_sm_move(&request->sm, REQ_FREE);
	kv_list_push_front(&slots->free, &request->link); /* the warmest memory first */
	slots->n_used--;
}

struct srv_reply *srv_reply_take(struct srv_server *server)
{
	struct srv_reply *reply = server->replies_free;

	if (!reply)
		return NULL;
	server->replies_free = reply->next;
	reply->next = NULL;
	reply->used = 0;
	server->n_replies_used++;
	return reply;
}

void srv_reply_free(struct srv_server *server, struct srv_reply *reply)
{
	if (!reply)
		return;
	reply->next = server->replies_free;
	server->replies_free = reply;
	server->n_replies_used--;
}
