/* The network from inside: shared by fake_io.c (the server's side) and fake_io_peer.c (the peer's). */
#ifndef TESTS_SIM_FAKE_IO_INTERNAL_H
#define TESTS_SIM_FAKE_IO_INTERNAL_H

#include "core/checked.h"
#include "tests/sim/fake_io.h"
#include "tests/sim/wire.h"

enum sim_net_phase { WAITS, OPEN, CLOSING, CLOSED };
enum sim_net_recv { RECV_NONE, RECV_AHEAD, RECV_INTO };

struct kv_io_conn {
	struct kv_io_conn *next;
	struct kv_io_peer peer;
	enum sim_net_phase phase;
	void *user;
	uint64_t accept_due_ns, close_due_ns;
	struct sim_wire in, out; /* to the server, to the peer */
	enum sim_net_recv recv;
	uint8_t *recv_buf;
	uint32_t recv_bytes;
	bool is_sending;
	struct iovec iov[KV_IO_IOV_MAX];
	uint32_t n_iov, iov_idx;
	uint64_t iov_pos;
	uint32_t send_crc;
	bool is_late;           /* closing: open operations complete before CLOSED */
	bool is_reset;          /* by the peer */
	uint64_t deaf_until_ns; /* the peer does not read: nobody wakes for what lies there */
	bool is_cut;            /* by the server's close(): the peer finds a reset instead of an end */
};

struct sim_net {
	struct kv_io base;
	struct sim_net_options options;
	struct sim_files files;
	struct sim_clock *clock;
	struct sim_rng rng;
	struct kv_io_conn *first, *last;
	uint32_t n_open, n_conns;
	uint8_t *ahead;
	uint32_t *ahead_free; /* stack */
	bool *is_ahead_out;
	uint32_t n_ahead_free;
	uint32_t n_listeners;
	bool is_listening;
	struct sim_net_watch source;
	void *watch_user;
	bool is_watched;
	int64_t recv_countdown, send_countdown;
	bool has_failed;
};

extern const struct kv_io_ops sim_net_ops;
/* Puts what fits of the open send on the way; true when all of it is. */
bool sim_net_push_send(struct sim_net *net, struct kv_io_conn *conn);
/* What is under way in both directions is lost. */
void sim_net_cut(struct kv_io_conn *conn);

#endif
