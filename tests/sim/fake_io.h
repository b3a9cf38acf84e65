/*
 * Network: core/io.h in memory. Server side: the table. Peer side: the functions here.
 *
 * It asserts the contract of io.h on its user: one receive and one send at a time, memory of a send untouched
 * until its event, nothing after close(), every read-ahead buffer returned, no use of a connection after
 * CLOSED. It makes use of what the contract leaves open: short receives, events in any order between
 * connections, completions of a closed connection before its CLOSED, memory written until CLOSED.
 */
#ifndef TESTS_SIM_FAKE_IO_H
#define TESTS_SIM_FAKE_IO_H

#include "core/io.h"
#include "tests/sim/fake_files.h"
#include "tests/sim/sim.h"

struct sim_net_options {
	struct sim_files_options files;
	uint32_t n_ahead_buffers;
	uint64_t wire_bytes_max; /* what a send can put on the way before the peer reads */
	uint64_t delay_ns_max;
	uint32_t cut_per_mille;  /* receives that get less than there is */
	uint32_t skip_per_mille; /* connections that are passed over in a turn */
	uint32_t late_per_mille; /* closed connections whose open operations complete before CLOSED */
};

/* What the peer finds behind the last byte. */
enum sim_net_end { SIM_NET_OPEN, SIM_NET_ENDED, SIM_NET_RESET };

struct sim_net;
struct sim_net *sim_net_create(const struct sim_net_options *options, struct sim_clock *clock, uint64_t seed);
/* Checks that the server gave everything back when is_clean; otherwise only frees. */
void sim_net_destroy(struct sim_net *net, bool is_clean);
struct kv_io *sim_net_io(struct sim_net *net);
struct sim_files *sim_net_files(struct sim_net *net);
/* One watched descriptor is the backend's: due_ns() says when it becomes readable, clear() that it was read.
 */
struct sim_net_watch {
	uint64_t (*due_ns)(void *user);
	void (*clear)(void *user);
	void *user;
	int fd;
};
void sim_net_watch_source(struct sim_net *net, const struct sim_net_watch *source);

/* NULL: nobody listens (any more). */
struct kv_io_conn *sim_net_connect(struct sim_net *net, const struct kv_io_peer *peer);
void sim_net_write(struct sim_net *net, struct kv_io_conn *conn, const void *bytes, uint64_t n);
uint64_t sim_net_read(struct sim_net *net, struct kv_io_conn *conn, void *out, uint64_t n_max);
enum sim_net_end sim_net_end(struct sim_net *net, const struct kv_io_conn *conn);
/* Until then the peer does not read, so what lies there for it wakes nobody. */
void sim_net_set_deaf(struct kv_io_conn *conn, uint64_t until_ns);
/* Nothing more comes from the peer; it still reads. */
void sim_net_shutdown(struct sim_net *net, struct kv_io_conn *conn);
/* The peer is gone; what is under way in both directions is lost. */
void sim_net_reset(struct sim_net *net, struct kv_io_conn *conn);
/* Bytes that the peer wrote and the server has not taken yet. */
uint64_t sim_net_unread(const struct kv_io_conn *conn);
/* What the server set for the connection; NULL before it accepted and once it is CLOSED. */
void *sim_net_user(const struct kv_io_conn *conn);

/* When the network has something for the server or a peer; UINT64_MAX: nothing is under way. */
uint64_t sim_net_next_ns(struct sim_net *net);
/* Connections for which CLOSED is still to come, and read-ahead buffers that are out. */
uint32_t sim_net_n_open(const struct sim_net *net);
uint32_t sim_net_n_ahead_out(const struct sim_net *net);
/* Fault injection: the completion after `countdown` more fails with -ECONNRESET, once; negative: never. */
void sim_net_fail_recv_after(struct sim_net *net, int64_t countdown);
void sim_net_fail_send_after(struct sim_net *net, int64_t countdown);
/* True once the fault has happened. */
bool sim_net_has_failed(const struct sim_net *net);

#endif
