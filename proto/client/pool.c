/*
 * POOL_INFO: canonical JSON, rotation matrix, and which member of two JSON texts differs.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/client/conn.h"

struct info_call {
	const char *pool;
	size_t pool_bytes;
	struct kvp_pool_info_req info;
};

static void fill_info(struct tqkv_request *request, const void *arg)
{
	const struct info_call *call = arg;

	kvp_pool_info_req_encode(&call->info, tqkv_request_body(request));
	if (call->pool_bytes)
		memcpy(tqkv_request_payload(request), call->pool, call->pool_bytes);
}

static enum tqkv_status call_info(struct tqkv_conn *conn, struct info_call *call, int64_t deadline_ns,
	struct tqkv_reply *reply, struct kvp_pool_info_reply *info, struct tqkv_error *err)
{
	call->pool_bytes = call->pool ? strlen(call->pool) : 0;
	if (call->pool_bytes > KVP_POOL_NAME_BYTES_MAX)
		return tqkv_fail(err, TQKV_BAD_ARG, "the pool's name has %zu bytes, expected at most %d",
			call->pool_bytes, KVP_POOL_NAME_BYTES_MAX);
	call->info.pool_name_bytes = (uint16_t)call->pool_bytes;

	const struct tqkv_shape shape = {
		.opcode = KVP_OP_POOL_INFO,
		.op_bytes = KVP_BYTES(pool_info_req),
		.payload_bytes = call->pool_bytes,
	};
	union tqkv_reply_op op;
	uint32_t n_recoveries = 0;
	enum tqkv_status status;

	do {
		status = tqkv_call(conn, NULL, &shape, fill_info, call, deadline_ns, reply, &op, err);
	} while (status != TQKV_OK && tqkv_conn_recover(conn, status, &n_recoveries, deadline_ns, err));
	if (status == TQKV_OK)
		*info = op.pool_info;
	return status;
}

enum tqkv_status tqkv_pool_info(struct tqkv_conn *conn, const char *pool, uint32_t index, char *json,
	size_t json_bytes_max, struct tqkv_pool_info *info, uint32_t timeout_ms, struct tqkv_error *err)
{
	if (!conn || !info || (json_bytes_max > 0 && !json))
		return tqkv_fail_null(err, "conn, info, json");

	struct info_call call = { .pool = pool, .info = { .what = KVP_POOL_INFO_JSON, .index = index } };
	struct tqkv_reply reply;
	struct kvp_pool_info_reply got;
	const enum tqkv_status status =
		call_info(conn, &call, tqkv_conn_deadline_ns(conn, timeout_ms), &reply, &got, err);

	if (status != TQKV_OK)
		return status;
	*info = (struct tqkv_pool_info){ got.fingerprint, got.json_bytes, got.n_pools };
	if (json_bytes_max == 0 && !json)
		return TQKV_OK;
	if (reply.payload_bytes >= json_bytes_max) {
		tqkv_fail(err, TQKV_TOO_LARGE, "the pool's JSON has %u bytes, the buffer %zu", got.json_bytes,
			json_bytes_max);
		if (err)
			err->scope = TQKV_SCOPE_REQUEST;
		return TQKV_TOO_LARGE;
	}
	if (reply.payload_bytes > 0)
		memcpy(json, reply.payload, (size_t)reply.payload_bytes);
	json[reply.payload_bytes] = '\0';
	return TQKV_OK;
}

enum tqkv_status tqkv_pool_rows(struct tqkv_conn *conn, const char *pool, enum tqkv_pool_rows what,
	uint32_t layer, uint32_t n_rows, uint32_t row_floats, float *out, uint32_t timeout_ms,
	struct tqkv_error *err)
{
	if (!conn || !out)
		return tqkv_fail_null(err, "conn, out");

	const int64_t deadline_ns = tqkv_conn_deadline_ns(conn, timeout_ms);
	const uint64_t row_bytes = (uint64_t)row_floats * sizeof(float);
	uint32_t n_done = 0;

	if (row_floats == 0)
		return tqkv_fail(err, TQKV_BAD_ARG, "rows of 0 numbers");
	while (n_done < n_rows) {
		struct info_call call = {
			.pool = pool,
			.info = { .what = (uint16_t)what, .layer = layer, .row_first = n_done },
		};
		struct tqkv_reply reply;
		struct kvp_pool_info_reply got;
		const enum tqkv_status status = call_info(conn, &call, deadline_ns, &reply, &got, err);

		if (status != TQKV_OK)
			return status;
		if (reply.payload_bytes == 0 || reply.payload_bytes % row_bytes != 0)
			return tqkv_fail(err, TQKV_BAD_ARG,
				"row %u: the server sent %llu bytes, not whole rows of %u numbers", n_done,
				(unsigned long long)reply.payload_bytes, row_floats);

		uint64_t n_got = reply.payload_bytes / row_bytes;

		if (n_got > n_rows - n_done)
			n_got = n_rows - n_done;
		memcpy((uint8_t *)out + n_done * row_bytes, reply.payload, (size_t)(n_got * row_bytes));
		n_done += (uint32_t)n_got;
	}
	return TQKV_OK;
}

enum tqkv_status tqkv_pool_compare(struct tqkv_conn *conn, const char *pool, const char *pool_json,
	int64_t deadline_ns, struct tqkv_error *err)
{
	struct info_call call = { .pool = pool, .info = { .what = KVP_POOL_INFO_JSON } };
	struct tqkv_reply reply;
	struct kvp_pool_info_reply got;
	char difference[256];
	enum tqkv_status status = call_info(conn, &call, deadline_ns, &reply, &got, err);

	if (status != TQKV_OK)
		return status;

	char *json = malloc((size_t)reply.payload_bytes + 1);

	if (!json)
		return tqkv_fail(err, TQKV_NO_MEMORY, "no memory for the pool's JSON");
	if (reply.payload_bytes > 0)
		memcpy(json, reply.payload, (size_t)reply.payload_bytes);
	json[reply.payload_bytes] = '\0';
	if (tqkv_pool_json_differs(pool_json, json, difference, sizeof(difference)))
		status = tqkv_fail(
			err, TQKV_FORMAT_MISMATCH, "pool %s is not the expected one: %s", pool, difference);
	free(json);
	return status;
}
