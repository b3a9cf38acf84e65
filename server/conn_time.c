/*
 * Time limits of peers, and the shared read-ahead buffers.
 *
 * Whoever stops in the middle of a frame's op struct and items keeps a read-ahead buffer. Two rules see to it
 * that such peers harm nobody else. A peer that has had more than its share of buffers for longer than
 * SHARE_GRACE_NS loses the connections beyond it; the share is a quarter of the buffers, a sixteenth when
 * three quarters are stalled. And while no buffer is free nobody's time runs: what a peer has sent cannot be
 * received then, which is not its fault.
 */
#include "server/internal.h"

#define SHARE_GRACE_NS (200 * KV_NS_PER_MS)
#define PEER_BUCKETS   512u /* peers that fall together are one peer here */
/* How often a send is looked at in send_timeout_ms, and after how many of them one without a rate ends. */
#define SEND_LOOKS        16u
#define SEND_TIMEOUTS_MAX 16u

/* ---- read-ahead buffers ---- */

void srv_ahead_taken(struct srv_server *server)
{
	server->n_ahead_used++;
	if (server->n_ahead_used >= server->options->read_ahead_buffers)
		server->ahead_empty_since_ns = server->now_ns;
}

void srv_ahead_returned(struct srv_server *server)
{
	if (server->n_ahead_used >= server->options->read_ahead_buffers)
		server->ahead_empty_ns += server->now_ns - server->ahead_empty_since_ns;
	server->n_ahead_used--;
}

uint64_t srv_ahead_empty_ns(const struct srv_server *server)
{
	const bool is_empty = server->n_ahead_used >= server->options->read_ahead_buffers;

	return server->ahead_empty_ns + (is_empty ? server->now_ns - server->ahead_empty_since_ns : 0);
}

/* Time since then_ns, without the time in which no buffer was free. */
static uint64_t patience_ns(const struct srv_server *server, uint64_t then_ns, uint64_t then_empty_ns)
{
	const uint64_t elapsed_ns = server->now_ns - then_ns;
	const uint64_t empty_ns = srv_ahead_empty_ns(server) - then_empty_ns;

	return elapsed_ns > empty_ns ? elapsed_ns - empty_ns : 0;
}

/* A receive into memory that the connection has already does not wait for a buffer. */
static uint64_t stalled_for_ns(const struct srv_conn *conn)
{
	if (conn->ahead || conn->sm.state == CONN_PAYLOAD)
		return conn->server->now_ns - conn->stalled_ns;
	return patience_ns(conn->server, conn->stalled_ns, conn->stalled_empty_ns);
}

static bool holds_stalled(const struct srv_conn *conn)
{
	return conn->ahead && conn->stalled_ns && conn->sm.state == CONN_STRUCTS;
}

static void close_slow(struct srv_conn *conn, const char *why)
{
	struct srv_server *server = conn->server;

	server->counters.appends_aborted_timeout++;
	server->counters.connections_closed_slow++;
	srv_reject(server, KV_SLOW_CONSUMER);
	srv_conn_close(conn, why);
}

/* Who holds more than its share for too long loses what is beyond it. */
static void keep_shares(struct srv_server *server)
{
	const uint32_t n_buffers = server->options->read_ahead_buffers;
	uint32_t counts[PEER_BUCKETS] = { 0 }, n_stalled = 0;

	if (server->n_ahead_used <= n_buffers / 4)
		return;
	kv_list_for_each (node, &server->timed) {
		const struct srv_conn *conn = kv_container_of(node, struct srv_conn, in_timed);

		if (!holds_stalled(conn))
			continue;
		counts[conn->peer_key % PEER_BUCKETS]++;
		n_stalled++;
	}
	const uint32_t part = n_stalled > n_buffers / 4 * 3 ? n_buffers / 16 : n_buffers / 4;
	const uint32_t share = part > 0 ? part : 1;

	kv_list_for_each_safe (node, &server->timed) {
		struct srv_conn *conn = kv_container_of(node, struct srv_conn, in_timed);
		uint32_t *count = &counts[conn->peer_key % PEER_BUCKETS];

		if (!holds_stalled(conn) || *count <= share ||
			server->now_ns - conn->header_ns < SHARE_GRACE_NS)
			continue;
		--*count;
		close_slow(conn, "stalled inside a frame, above its peer's share of read-ahead buffers");
	}
}

/* ---- time ---- */

/*
 * Is the peer too slow although bytes come? Op struct and items, which hold one of the shared read-ahead
 * buffers, have io_timeout_ms in all. A payload is judged by min_rate_bytes_per_s, once io_timeout_ms have
 * passed.
 */
static bool is_too_slow(const struct srv_conn *conn)
{
	const struct srv_options *options = conn->server->options;
	const uint64_t now_ns = conn->server->now_ns;
	/* From the payload's start: waiting for a request slot is not the peer's fault. */
	const uint64_t elapsed_ms = (now_ns - conn->payload_ns) / KV_NS_PER_MS;

	if (conn->sm.state == CONN_STRUCTS)
		return now_ns - conn->header_ns >= options->io_timeout_ms * KV_NS_PER_MS;
	if (conn->sm.state != CONN_PAYLOAD || options->min_rate_bytes_per_s == 0 ||
		elapsed_ms < options->io_timeout_ms)
		return false;
	return conn->request->in_bytes * 1000 < options->min_rate_bytes_per_s * elapsed_ms;
}

/*
 * Why the peer of a posted send is too slow; NULL: it is not. Time counts only while it takes nothing. Once
 * send_timeout_ms have passed in all, it has to have taken min_rate_bytes_per_s of what was on the way,
 * because a slot that is read byte by byte is as good as lost; where no rate is asked for, the send has to
 * end some time.
 */
static const char *reads_too_slowly(struct srv_conn *conn)
{
	const struct srv_options *options = conn->server->options;
	struct kv_io *io = conn->server->io;
	const uint64_t now_ns = conn->server->now_ns, timeout_ns = options->send_timeout_ms * KV_NS_PER_MS;
	const uint64_t elapsed_ns = now_ns - conn->send_ns;
	const bool is_first = conn->send_look_ns == 0;

	if (is_first)
		conn->send_taken_ns = conn->send_ns;
	else if (now_ns - conn->send_look_ns < timeout_ns / SEND_LOOKS &&
		now_ns - conn->send_taken_ns < timeout_ns)
		return NULL;
	const uint64_t n_bytes = io->ops->unsent_bytes(io, conn->io_conn);

	if (is_first) {
		conn->send_first_ns = now_ns;
		conn->send_first_bytes = n_bytes;
	} else if (n_bytes != conn->send_last_bytes) {
		conn->send_taken_ns = now_ns;
	}
	conn->send_last_bytes = n_bytes;
	conn->send_look_ns = now_ns;
	if (now_ns - conn->send_taken_ns >= timeout_ns)
		return "did not read its reply for send_timeout_ms";
	if (elapsed_ns < timeout_ns)
		return NULL;
	if (options->min_rate_bytes_per_s == 0)
		return elapsed_ns < SEND_TIMEOUTS_MAX * timeout_ns ? NULL : "read its reply far too slowly";
	const uint64_t n_taken = conn->send_first_bytes > n_bytes ? conn->send_first_bytes - n_bytes : 0;

	return n_taken * 1000 <
			options->min_rate_bytes_per_s * ((now_ns - conn->send_first_ns) / KV_NS_PER_MS)
		? "read its reply slower than min_rate_bytes_per_s"
		: NULL;
}

static void scan_one(struct srv_conn *conn)
{
	struct srv_server *server = conn->server;
	const struct srv_options *options = server->options;
	const uint64_t now_ns = server->now_ns;

	if (conn->sm.state == CONN_LINGER) {
		if (now_ns >= conn->linger_end_ns)
			srv_conn_close(conn, NULL);
		return;
	}
	const char *slow_reader = conn->send_ns ? reads_too_slowly(conn) : NULL;

	/* A HELLO that waits for one of our reply buffers was said in time. */
	if (!conn->is_hello_done && conn->wait == WAIT_NONE &&
		patience_ns(server, conn->accepted_ns, conn->accepted_empty_ns) >=
			options->hello_timeout_ms * KV_NS_PER_MS) {
		srv_conn_close(conn, "no HELLO within hello_timeout_ms");
	} else if (conn->stalled_ns &&
		(stalled_for_ns(conn) >= options->io_timeout_ms * KV_NS_PER_MS || is_too_slow(conn))) {
		close_slow(conn,
			conn->sm.state == CONN_PAYLOAD && is_too_slow(conn)
				? "payload slower than min_rate_bytes_per_s"
				: "stalled inside a frame for io_timeout_ms");
	} else if (slow_reader) {
		server->counters.connections_closed_slow++;
		srv_reject(server, KV_SLOW_CONSUMER);
		srv_conn_close(conn, slow_reader);
	} else if (conn->is_hello_done && !conn->stalled_ns && !conn->send_ns) {
		kv_list_remove(&conn->in_timed);
	}
}

void srv_conns_scan_timed(struct srv_server *server)
{
	keep_shares(server);
	kv_list_for_each_safe (node, &server->timed)
		scan_one(kv_container_of(node, struct srv_conn, in_timed));
}
