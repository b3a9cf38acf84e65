/*
 * Sequences that begin with the rows of others: FORK of one, PUBLISH and MATCH.
 */
#include <string.h>

#include "proto/client/conn.h"
#include "proto/client/reply.h"

struct prefix_call {
	struct kvp_prefix_req req;
	const struct tqkv_prefix *prefix;
};

static void fill_prefix(struct tqkv_request *request, const void *arg)
{
	const struct prefix_call *call = arg;
	uint8_t *at = tqkv_request_payload(request);

	kvp_prefix_req_encode(&call->req, tqkv_request_body(request));
	for (uint32_t i = 0; i < call->req.n_tokens; i++, at += sizeof(uint32_t))
		kvp_put_u32(at, call->prefix->tokens[i]);
	if (call->req.adapter_bytes > 0)
		memcpy(at, call->prefix->adapter, call->req.adapter_bytes);
	if (call->req.salt_bytes > 0)
		memcpy(at + call->req.adapter_bytes, call->prefix->salt, call->req.salt_bytes);
}

static enum tqkv_status check_text(const char *what, const char *text, struct tqkv_error *err)
{
	if (!text || strlen(text) <= KVP_PREFIX_TEXT_BYTES_MAX)
		return TQKV_OK;
	return tqkv_fail(err, TQKV_BAD_ARG, "%s of %zu bytes, the most is %d", what, strlen(text),
		KVP_PREFIX_TEXT_BYTES_MAX);
}

static enum tqkv_status check(
	struct tqkv_session *session, const struct tqkv_prefix *prefix, struct tqkv_error *err)
{
	enum tqkv_status status = tqkv_session_check(session, err);

	if (status == TQKV_OK && (prefix->n_tokens == 0 || !prefix->tokens))
		status = tqkv_fail(err, TQKV_BAD_ARG, "there are no tokens");
	if (status == TQKV_OK)
		status = check_text("adapter", prefix->adapter, err);
	return status == TQKV_OK ? check_text("salt", prefix->salt, err) : status;
}

static enum tqkv_status run(struct tqkv_session *session, uint16_t opcode, const struct prefix_call *call,
	uint32_t timeout_ms, struct tqkv_prefix_result *result, struct tqkv_error *err)
{
	const struct tqkv_shape shape = {
		.opcode = opcode,
		.op_bytes = KVP_BYTES(prefix_req),
		.payload_bytes =
			4 * (uint64_t)call->req.n_tokens + call->req.adapter_bytes + call->req.salt_bytes,
	};
	struct tqkv_reply reply;
	union tqkv_reply_op op;
	const enum tqkv_status status = tqkv_call(session->conn, session, &shape, fill_prefix, call,
		tqkv_conn_deadline_ns(session->conn, timeout_ms), &reply, &op, err);

	if (status == TQKV_OK)
		*result = (struct tqkv_prefix_result){ op.prefix.n_tokens, op.prefix.n_blocks,
			op.prefix.n_blocks_new };
	return status;
}

static struct prefix_call call_of(const struct tqkv_prefix *prefix, uint64_t sequence, uint32_t flags)
{
	return (struct prefix_call){
		.req = {
			.sequence = sequence,
			.n_tokens = prefix->n_tokens,
			.adapter_bytes = (uint16_t)(prefix->adapter ? strlen(prefix->adapter) : 0),
			.salt_bytes = (uint16_t)(prefix->salt ? strlen(prefix->salt) : 0),
			.flags = flags,
			.ttl_ms = prefix->ttl_ms,
		},
		.prefix = prefix,
	};
}

enum tqkv_status tqkv_publish(struct tqkv_session *session, uint64_t sequence,
	const struct tqkv_prefix *prefix, uint32_t timeout_ms, struct tqkv_prefix_result *result,
	struct tqkv_error *err)
{
	if (!session || !prefix || !result)
		return tqkv_fail_null(err, "session, prefix, result");

	const enum tqkv_status status = check(session, prefix, err);

	if (status != TQKV_OK)
		return status;

	const struct prefix_call call = call_of(prefix, sequence, 0);

	return run(session, KVP_OP_PUBLISH, &call, timeout_ms, result, err);
}

enum tqkv_status tqkv_match(struct tqkv_session *session, uint64_t sequence, const struct tqkv_prefix *prefix,
	uint32_t timeout_ms, struct tqkv_prefix_result *result, struct tqkv_error *err)
{
	if (!session || !prefix || !result)
		return tqkv_fail_null(err, "session, prefix, result");

	const uint32_t flags =
		(sequence == 0 ? KVP_PREFIX_PROBE : 0u) | (prefix->is_evictable ? KVP_PREFIX_EVICTABLE : 0u);
	enum tqkv_status status = check(session, prefix, err);

	if (status != TQKV_OK)
		return status;

	struct prefix_call call = call_of(prefix, sequence, flags);
	struct tqkv_error error;

	call.req.ttl_ms = 0;
	status = run(session, KVP_OP_MATCH, &call, timeout_ms, result, &error);
	if (status != TQKV_OK && err)
		*err = error;
	if (status != TQKV_NOT_FOUND || error.is_local)
		return status;
	*result = (struct tqkv_prefix_result){ 0 };
	return TQKV_OK;
}

enum tqkv_status tqkv_fork_sequence(struct tqkv_session *session, uint64_t child, uint64_t parent,
	uint32_t position, uint32_t timeout_ms, uint32_t *length, struct tqkv_error *err)
{
	const struct tqkv_item item = { .sequence = child, .position = position };
	struct tqkv_item_result got = { 0 };
	struct tqkv_rows_result result = { .items = &got };
	const enum tqkv_status status = tqkv_fork(session, &item, &parent, 1, timeout_ms, &result, err);

	if (status == TQKV_OK && got.status == TQKV_POSITION)
		return tqkv_fail(err, got.status,
			"sequence %llu: its length %u is above that of sequence %llu, which has %u tokens",
			(unsigned long long)child, position, (unsigned long long)parent, got.length);
	if (status == TQKV_OK && got.status != TQKV_OK)
		return tqkv_fail(err, got.status, "sequence %llu from %llu: %s", (unsigned long long)child,
			(unsigned long long)parent, tqkv_status_text(got.status));
	if (status == TQKV_OK && length)
		*length = got.length;
	return status;
}
