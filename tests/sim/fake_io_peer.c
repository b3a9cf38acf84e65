/*
 * The network's peer side, and its making.
 */
#include <stdlib.h>

#include "tests/sim/fake_io_internal.h"

/* ---- making ---- */

struct sim_net *sim_net_create(const struct sim_net_options *options, struct sim_clock *clock, uint64_t seed)
{
	struct sim_net *net = calloc(1, sizeof(*net));

	SIM_CHECK(net, "no memory for the network");
	net->base.ops = &sim_net_ops;
	net->options = *options;
	net->clock = clock;
	sim_rng_init(&net->rng, seed, 2);
	net->ahead = malloc((uint64_t)options->n_ahead_buffers * KV_IO_AHEAD_BYTES);
	net->ahead_free = calloc(options->n_ahead_buffers, sizeof(*net->ahead_free));
	net->is_ahead_out = calloc(options->n_ahead_buffers, sizeof(*net->is_ahead_out));
	SIM_CHECK(net->ahead && net->ahead_free && net->is_ahead_out, "no memory for the network");
	while (net->n_ahead_free < options->n_ahead_buffers) {
		net->ahead_free[net->n_ahead_free] = net->n_ahead_free;
		net->n_ahead_free++;
	}
	net->recv_countdown = net->send_countdown = -1;
	sim_files_init(&net->files, &options->files, clock, seed);
	return net;
}

void sim_net_destroy(struct sim_net *net, bool is_clean)
{
	if (!net)
		return;
	SIM_CHECK(!is_clean || net->files.n_open == 0, "%u files were never closed", net->files.n_open);
	sim_files_finish(&net->files);
	SIM_CHECK(!is_clean || net->n_open == 0, "%u connections were never closed", net->n_open);
	SIM_CHECK(!is_clean || sim_net_n_ahead_out(net) == 0, "%u read-ahead buffers never came back",
		sim_net_n_ahead_out(net));
	while (net->first) {
		struct kv_io_conn *conn = net->first;

		net->first = conn->next;
		sim_wire_finish(&conn->in);
		sim_wire_finish(&conn->out);
		free(conn);
	}
	free(net->ahead);
	free(net->ahead_free);
	free(net->is_ahead_out);
	free(net);
}

struct kv_io *sim_net_io(struct sim_net *net)
{
	return &net->base;
}

void sim_net_watch_source(struct sim_net *net, const struct sim_net_watch *source)
{
	net->source = *source;
}

/* ---- the peer's side ---- */

struct kv_io_conn *sim_net_connect(struct sim_net *net, const struct kv_io_peer *peer)
{
	if (!net->is_listening)
		return NULL;
	struct kv_io_conn *conn = calloc(1, sizeof(*conn));

	SIM_CHECK(conn, "no memory for a connection");
	conn->peer = *peer;
	conn->accept_due_ns = net->clock->now_ns + sim_below(&net->rng, 50000);
	if (net->last)
		net->last->next = conn;
	else
		net->first = conn;
	net->last = conn;
	net->n_conns++;
	return conn;
}

void sim_net_write(struct sim_net *net, struct kv_io_conn *conn, const void *bytes, uint64_t n)
{
	if (conn->is_reset || conn->phase >= CLOSING)
		return; /* into the void, as with a socket whose peer is gone */
	sim_wire_write(&conn->in, bytes, n, net->clock->now_ns, net->options.delay_ns_max, &net->rng);
}

uint64_t sim_net_read(struct sim_net *net, struct kv_io_conn *conn, void *out, uint64_t n_max)
{
	uint64_t n = sim_wire_available(&conn->out, net->clock->now_ns);

	if (conn->is_reset || conn->is_cut)
		return 0;
	if (n > n_max)
		n = n_max;
	if (n > 1 && sim_chance(&net->rng, net->options.cut_per_mille))
		n = 1 + sim_rng_next(&net->rng) % (n - 1);
	if (n > 0)
		sim_wire_take(&conn->out, out, n);
	return n;
}

enum sim_net_end sim_net_end(struct sim_net *net, const struct kv_io_conn *conn)
{
	if (conn->is_reset || conn->is_cut)
		return SIM_NET_RESET;
	return sim_wire_is_over(&conn->out, net->clock->now_ns) ? SIM_NET_ENDED : SIM_NET_OPEN;
}

void sim_net_set_deaf(struct kv_io_conn *conn, uint64_t until_ns)
{
	conn->deaf_until_ns = until_ns;
}

void sim_net_shutdown(struct sim_net *net, struct kv_io_conn *conn)
{
	if (!conn->is_reset)
		sim_wire_end(&conn->in, net->clock->now_ns, net->options.delay_ns_max, &net->rng);
}

void sim_net_reset(struct sim_net *net, struct kv_io_conn *conn)
{
	(void)net;
	sim_net_cut(conn);
}

uint64_t sim_net_unread(const struct kv_io_conn *conn)
{
	return sim_wire_n_inside(&conn->in);
}

void *sim_net_user(const struct kv_io_conn *conn)
{
	return conn->user;
}

/* When something happens to the connection without the server or the peer doing anything. */
static uint64_t conn_next_ns(struct sim_net *net, struct kv_io_conn *conn)
{
	const uint64_t now_ns = net->clock->now_ns;
	const uint64_t in_ns = sim_wire_next_ns(&conn->in, now_ns);
	const bool is_sent =
		conn->phase == OPEN && conn->is_sending && (conn->is_reset || sim_net_push_send(net, conn));
	uint64_t due_ns = sim_wire_next_ns(&conn->out, now_ns); /* the peer would read it */

	/* Also what was just now put on the wire. */
	if (!conn->is_reset && !conn->is_cut && sim_wire_available(&conn->out, now_ns) > 0) {
		if (conn->deaf_until_ns <= now_ns)
			return now_ns;
		if (conn->deaf_until_ns < due_ns)
			due_ns = conn->deaf_until_ns;
	}
	if (conn->phase == WAITS)
		return net->is_listening ? conn->accept_due_ns : UINT64_MAX;
	if (conn->phase == CLOSED)
		return due_ns;
	if (conn->phase == CLOSING)
		return conn->is_late && (conn->recv != RECV_NONE || conn->is_sending) ? now_ns
										      : conn->close_due_ns;
	if (conn->recv != RECV_NONE) {
		const bool is_there = conn->is_reset || sim_wire_available(&conn->in, now_ns) > 0 ||
			sim_wire_is_over(&conn->in, now_ns);

		if (is_there && (conn->recv == RECV_INTO || net->n_ahead_free > 0 || conn->is_reset))
			return now_ns;
		if (in_ns < due_ns)
			due_ns = in_ns;
	}
	return is_sent ? now_ns : due_ns;
}

uint64_t sim_net_next_ns(struct sim_net *net)
{
	uint64_t due_ns = net->is_watched ? net->source.due_ns(net->source.user) : UINT64_MAX;

	for (struct kv_io_conn *conn = net->first; conn; conn = conn->next) {
		const uint64_t ns = conn_next_ns(net, conn);

		if (ns < due_ns)
			due_ns = ns;
	}
	const uint64_t files_ns = sim_files_next_ns(&net->files);

	return files_ns < due_ns ? files_ns : due_ns;
}

struct sim_files *sim_net_files(struct sim_net *net)
{
	return &net->files;
}

uint32_t sim_net_n_open(const struct sim_net *net)
{
	return net->n_open;
}

uint32_t sim_net_n_ahead_out(const struct sim_net *net)
{
	return net->options.n_ahead_buffers - net->n_ahead_free;
}

void sim_net_fail_recv_after(struct sim_net *net, int64_t countdown)
{
	net->recv_countdown = countdown;
}

void sim_net_fail_send_after(struct sim_net *net, int64_t countdown)
{
	net->send_countdown = countdown;
}

bool sim_net_has_failed(const struct sim_net *net)
{
	return net->has_failed;
}
