/*
 * A connection's life: made by tqkv_connect(), lost by a failure, made again by tqkv_reconnect(), freed by
 * tqkv_disconnect(). Entries of requests outlive the socket, so that replies which came before a loss can be
 * fetched.
 */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "proto/client/conn.h"

enum {
	CONNECT_TIMEOUT_MS = 5000,
	CALL_TIMEOUT_MS = 30000,
	BACKOFF_FIRST_MS = 5,
	BACKOFF_MAX_MS = 1000,
};

int64_t tqkv_conn_deadline_ns(const struct tqkv_conn *conn, uint32_t timeout_ms)
{
	return tqkv_deadline_ns(timeout_ms ? timeout_ms : conn->options.timeout_ms);
}

enum tqkv_status tqkv_conn_lose(struct tqkv_conn *conn, const struct tqkv_error *failure)
{
	if (conn->fd < 0)
		return conn->failure.status;
	close(conn->fd);
	conn->fd = -1;
	conn->failure = *failure;
	conn->failure.is_outcome_unknown = false;
	conn->receiving = NULL;
	conn->is_receiving_oob = false;
	conn->staging_first = conn->staging_end = 0;
	conn->send_first = conn->send_last = NULL;
	for (uint64_t entry_idx = 0; entry_idx <= conn->requests_mask; entry_idx++) {
		struct tqkv_request *request = &conn->requests[entry_idx];

		if (request->id == 0)
			continue;
		request->is_queued = false;
		request->next = NULL;
		if (!request->is_done)
			tqkv_request_end(request, failure->status, request->n_sent > 0);
		else
			tqkv_request_release_if_over(request);
	}
	return failure->status;
}

bool tqkv_conn_sleep(struct tqkv_conn *conn, int64_t until_ns)
{
	while (conn->fd >= 0 && tqkv_now_ns() < until_ns)
		(void)tqkv_conn_turn(conn, until_ns);
	return conn->fd >= 0;
}

/* ---- HELLO ---- */

static void fill_hello(struct tqkv_request *request, const void *arg)
{
	const struct tqkv_conn *conn = arg;
	const size_t token_bytes = conn->token ? strlen(conn->token) : 0;
	const size_t name_bytes = conn->client_name ? strlen(conn->client_name) : 0;
	const struct kvp_hello_req hello = {
		.proto_min = KVP_PROTO_MIN,
		.proto_max = KVP_PROTO_MAX,
		.token_bytes = (uint16_t)token_bytes,
		.name_bytes = (uint16_t)name_bytes,
		.features = conn->options.features,
		.boot_id_seen = conn->server.boot_id,
	};

	kvp_hello_req_encode(&hello, tqkv_request_body(request));
	if (token_bytes)
		memcpy(tqkv_request_payload(request), conn->token, token_bytes);
	if (name_bytes)
		memcpy(tqkv_request_payload(request) + token_bytes, conn->client_name, name_bytes);
}

/* The limits bound our buffers and divide our work, so they must make sense. */
static enum tqkv_status take_hello(
	struct tqkv_conn *conn, const struct kvp_hello_reply *hello, struct tqkv_error *err)
{
	if (hello->proto < KVP_PROTO_MIN || hello->proto > KVP_PROTO_MAX)
		return tqkv_fail(
			err, TQKV_BAD_FRAME, "HELLO: the server chose protocol version %u", hello->proto);
	if (hello->frame_bytes_max < KVP_FRAME_BYTES_MIN || hello->frame_bytes_max > KVP_FRAME_BYTES_MAX)
		return tqkv_fail(err, TQKV_BAD_FRAME, "HELLO: frame_bytes_max %llu is outside %d to %d",
			(unsigned long long)hello->frame_bytes_max, KVP_FRAME_BYTES_MIN, KVP_FRAME_BYTES_MAX);
	if (hello->boot_id == 0 || hello->items_max == 0 || hello->inflight_requests_max == 0)
		return tqkv_fail(
			err, TQKV_BAD_FRAME, "HELLO: boot_id, items_max or inflight_requests_max is 0");
	conn->server = (struct tqkv_server_info){
		.boot_id = hello->boot_id,
		.features = hello->features,
		.frame_bytes_max = hello->frame_bytes_max,
		.inflight_bytes_max = hello->inflight_bytes_max,
		.inflight_requests_max = hello->inflight_requests_max,
		.items_max = hello->items_max < KVP_ITEMS_MAX ? hello->items_max : KVP_ITEMS_MAX,
		.sessions_max = hello->sessions_max,
		.sequences_max = hello->sequences_max,
		.q_len_max = hello->q_len_max,
		.lease_ms = hello->lease_ms,
		.proto = hello->proto,
		.n_pools = hello->n_pools,
	};
	conn->has_hello = true;
	return TQKV_OK;
}

/* What to do about it: the reply has no text. */
static void explain_refusal(const struct tqkv_conn *conn, enum tqkv_status status, struct tqkv_error *err)
{
	const bool has_token = conn->token && conn->token[0];
	const char *text;

	if (status == TQKV_UNAUTHENTICATED)
		text = has_token ? "the token is none of the daemon's, or there were too many failed logins"
				 : "the daemon wants a token";
	else
		text = has_token ? "the data port takes tokens of role data or admin, not of role read"
				 : "the daemon's unix_uids do not name this user";
	snprintf(err->message, sizeof(err->message), "HELLO: %s: %s", tqkv_status_text(status), text);
}

static enum tqkv_status say_hello(struct tqkv_conn *conn, int64_t deadline_ns, struct tqkv_error *err)
{
	const struct tqkv_shape shape = {
		.opcode = KVP_OP_HELLO,
		.op_bytes = KVP_BYTES(hello_req),
		.payload_bytes = (conn->token ? strlen(conn->token) : 0) +
			(conn->client_name ? strlen(conn->client_name) : 0),
	};
	struct tqkv_reply reply;
	union tqkv_reply_op op;
	const enum tqkv_status status =
		tqkv_call(conn, NULL, &shape, fill_hello, conn, deadline_ns, &reply, &op, err);

	if (status == TQKV_VERSION_UNSUPPORTED && err && !err->is_local)
		tqkv_error_wrap(err, "the server speaks versions %u to %u, this library %d to %d",
			op.hello.proto_min, op.hello.proto_max, KVP_PROTO_MIN, KVP_PROTO_MAX);
	if ((status == TQKV_UNAUTHENTICATED || status == TQKV_FORBIDDEN) && err && !err->is_local)
		explain_refusal(conn, status, err);
	if (status != TQKV_OK && status != TQKV_STALE_EPOCH)
		return status;

	const enum tqkv_status taken = take_hello(conn, &op.hello, err);

	return taken == TQKV_OK ? status : taken;
}

enum tqkv_status tqkv_conn_dial(struct tqkv_conn *conn, int64_t deadline_ns, struct tqkv_error *err)
{
	struct tqkv_error error = { 0 };
	enum tqkv_status status = tqkv_socket_connect(conn->address, deadline_ns, &conn->fd, err);

	if (status != TQKV_OK)
		return status;
	conn->is_send_broken = false;
	conn->is_draining = false;
	conn->has_hello = false;
	/* Until HELLO tells more: one small request at a time. */
	conn->server.frame_bytes_max = KVP_HELLO_BODY_BYTES_MAX;
	conn->server.inflight_bytes_max = KVP_HELLO_BODY_BYTES_MAX;
	conn->server.inflight_requests_max = 1;
	status = say_hello(conn, deadline_ns, &error);
	if (status != TQKV_OK && err)
		*err = error;
	if (status != TQKV_OK && status != TQKV_STALE_EPOCH)
		tqkv_conn_lose(conn, &error);
	return status;
}

/* ---- Create and destroy ---- */

static bool copy_text(const char *text, char **out)
{
	*out = text ? strdup(text) : NULL;
	return !text || *out;
}

static void seed_random(struct tqkv_conn *conn)
{
	if (getrandom(&conn->random_state, sizeof(conn->random_state), GRND_NONBLOCK) !=
		(ssize_t)sizeof(conn->random_state))
		conn->random_state = (uint64_t)tqkv_now_ns() ^ (uint64_t)(uintptr_t)conn;
	conn->random_state |= 1; /* xorshift never leaves 0 */
}

static void set_defaults(struct tqkv_options *options)
{
	if (options->connect_timeout_ms == 0)
		options->connect_timeout_ms = CONNECT_TIMEOUT_MS;
	if (options->timeout_ms == 0)
		options->timeout_ms = CALL_TIMEOUT_MS;
	if (options->backoff_first_ms == 0)
		options->backoff_first_ms = BACKOFF_FIRST_MS;
	if (options->backoff_max_ms == 0)
		options->backoff_max_ms = BACKOFF_MAX_MS;
	if (options->requests_max == 0)
		options->requests_max = TQKV_REQUESTS_DEFAULT;
}

static enum tqkv_status check_options(const struct tqkv_options *options, struct tqkv_error *err)
{
	const uint32_t known =
		TQKV_OPTION_BODY_CRC | TQKV_OPTION_TIMINGS | TQKV_OPTION_NO_RETRY | TQKV_OPTION_RECONNECT;

	if (options->flags & ~known)
		return tqkv_fail(err, TQKV_BAD_ARG, "options: unknown flags 0x%x", options->flags & ~known);
	if (options->requests_max > TQKV_REQUESTS_MAX)
		return tqkv_fail(err, TQKV_BAD_ARG, "options: requests_max %u is above %d",
			options->requests_max, TQKV_REQUESTS_MAX);
	if (options->token && strlen(options->token) > KVP_TOKEN_BYTES_MAX)
		return tqkv_fail(
			err, TQKV_BAD_ARG, "options: the token is longer than %d bytes", KVP_TOKEN_BYTES_MAX);
	if (options->client_name && strlen(options->client_name) > KVP_CLIENT_NAME_BYTES_MAX)
		return tqkv_fail(err, TQKV_BAD_ARG, "options: client_name is longer than %d bytes",
			KVP_CLIENT_NAME_BYTES_MAX);
	return TQKV_OK;
}

/* A power of two, larger than the number of entries that can be in use. */
static bool create_entries(struct tqkv_conn *conn)
{
	uint64_t n_entries = 1;

	while (n_entries <= conn->options.requests_max + TQKV_REQUESTS_OWN)
		n_entries *= 2;
	conn->requests = calloc(n_entries, sizeof(*conn->requests));
	if (!conn->requests)
		return false;
	conn->requests_mask = n_entries - 1;
	for (uint64_t entry_idx = 0; entry_idx < n_entries; entry_idx++)
		conn->requests[entry_idx].conn = conn;
	return true;
}

enum tqkv_status tqkv_connect(const char *address, const struct tqkv_options *options, struct tqkv_conn **out,
	struct tqkv_error *err)
{
	static const struct tqkv_options no_options;

	if (!address)
		return tqkv_fail(err, TQKV_BAD_ARG, "the address is NULL");
	if (!out)
		return tqkv_fail_null(err, "out");
	if (!options)
		options = &no_options;

	enum tqkv_status status = check_options(options, err);

	if (status != TQKV_OK)
		return status;

	struct tqkv_conn *conn = calloc(1, sizeof(*conn));

	if (!conn)
		return tqkv_fail(err, TQKV_NO_MEMORY, "no memory for a connection");
	conn->fd = -1;
	conn->options = *options;
	set_defaults(&conn->options);
	seed_random(conn);
	if (!copy_text(address, &conn->address) || !copy_text(options->token, &conn->token) ||
		!copy_text(options->client_name, &conn->client_name) || !create_entries(conn))
		status = tqkv_fail(err, TQKV_NO_MEMORY, "no memory for a connection");
	else
		status = tqkv_conn_dial(conn, tqkv_deadline_ns(conn->options.connect_timeout_ms), err);
	conn->options.token = conn->token;
	conn->options.client_name = conn->client_name;
	if (status != TQKV_OK) {
		tqkv_disconnect(conn);
		return status;
	}
	*out = conn;
	return TQKV_OK;
}

void tqkv_disconnect(struct tqkv_conn *conn)
{
	if (!conn)
		return;
	while (conn->sessions) {
		struct tqkv_session *session = conn->sessions;

		conn->sessions = session->next;
		free(session);
	}
	if (conn->fd >= 0)
		close(conn->fd);
	for (uint64_t entry_idx = 0; conn->requests && entry_idx <= conn->requests_mask; entry_idx++) {
		free(conn->requests[entry_idx].frame.data);
		free(conn->requests[entry_idx].reply.data);
	}
	for (uint32_t spare_idx = 0; spare_idx < conn->n_spare; spare_idx++)
		free(conn->spare[spare_idx].data);
	free(conn->requests);
	free(conn->address);
	free(conn->token);
	free(conn->client_name);
	free(conn);
}

const struct tqkv_server_info *tqkv_server_info(const struct tqkv_conn *conn)
{
	return conn ? &conn->server : NULL;
}

bool tqkv_is_connected(const struct tqkv_conn *conn)
{
	return conn && conn->fd >= 0;
}

bool tqkv_is_draining(const struct tqkv_conn *conn)
{
	return conn && conn->is_draining;
}

int tqkv_fd(const struct tqkv_conn *conn)
{
	return conn ? conn->fd : -1;
}
