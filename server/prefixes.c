/*
 * PUBLISH and MATCH. Their token ids may fill a frame, so they are received into a request slot; when
 * everything is there, they take effect at once and are answered from the slot. Nothing is computed.
 */
#include "server/internal.h"

#include <string.h>

#include "core/prefix.h"
#include "server/spill.h"

void srv_prefix_dispatch(struct srv_conn *conn, const uint8_t *body, struct kv_session *session)
{
	struct srv_server *server = conn->server;
	struct srv_request *request;

	/* PUBLISH wants committed rows; the connection reads no further until it is done. */
	if (session->n_outstanding > 0) {
		srv_conn_wait(conn, WAIT_SESSION, &server->waiting_session);
		return;
	}
	request = srv_rows_start(
		conn, body, conn->header.body_bytes, kvp_body_bytes(KVP_BYTES(prefix_reply), 0, 0, 0));
	if (request)
		request->prefix = server->scratch.prefix;
}

static struct kv_prefix_key key_of(const struct srv_request *request)
{
	const struct kvp_prefix_req *prefix = &request->prefix;
	const uint8_t *payload = request->in + kvp_payload_start(request->header.op_bytes, 0, 0);
	const char *texts = (const char *)payload + 4 * (uint64_t)prefix->n_tokens;

	return (struct kv_prefix_key){
		.tokens = payload,
		.n_tokens = prefix->n_tokens,
		.adapter = texts,
		.adapter_bytes = prefix->adapter_bytes,
		.salt = texts + prefix->adapter_bytes,
		.salt_bytes = prefix->salt_bytes,
	};
}

void srv_prefix_received(struct srv_request *request)
{
	struct srv_server *server = request->server;
	const struct kvp_prefix_req *prefix = &request->prefix;
	const struct kv_prefix_key key = key_of(request);
	struct kv_session *session = NULL;
	struct kv_prefix_result result = { 0 };
	enum kv_status status = srv_request_find_session(request, &session);

	if (status == KV_OK)
		kv_session_renew(session, server->now_ns);
	/* Whoever took the session over meanwhile may have begun something. */
	if (status == KV_OK && session->n_outstanding > 0)
		status = KV_BUSY_RETRY;
	if (status == KV_OK && request->header.opcode == KVP_OP_PUBLISH)
		status = kv_prefix_publish(
			session, prefix->sequence, &key, prefix->ttl_ms, server->now_ns, &result);
	else if (status == KV_OK)
		status = kv_prefix_match(session, prefix->sequence, &key,
			(prefix->flags & KVP_PREFIX_EVICTABLE) != 0, server->now_ns, &result);
	if (status == KV_BUSY_RETRY && session)
		srv_spill_touch(server->spill, session, prefix->sequence);
	if (status != KV_OK) {
		srv_request_refuse(request, status, NULL, result.n_tokens);
		return;
	}
	const struct kvp_prefix_reply reply = {
		.sequence = prefix->sequence,
		.n_tokens = result.n_tokens,
		.n_blocks = result.n_blocks,
		.n_blocks_new = result.n_blocks_new,
	};

	kvp_prefix_reply_encode(&reply, request->out + KVP_HEADER_BYTES);
	srv_request_reply(request, KVP_BYTES(prefix_reply), KVP_BYTES(prefix_reply));
}
