/*
 * Peer: one client of the simulation. Sends frames, takes the replies apart and holds them against the model.
 */
#ifndef TESTS_SIM_PEER_H
#define TESTS_SIM_PEER_H

#include "tests/sim/request.h"
#include "tests/sim/world.h"

#define SIM_PENDING_MAX 512u
#define SIM_OWNED_MAX   16u

struct sim_peer {
	struct sim_world *world;
	uint32_t peer_idx;
	struct kv_io_peer address;
	struct kv_io_conn *conn; /* NULL: not connected */
	uint64_t conn_serial, conn_id, connected_ns;
	uint64_t open_since_ns; /* an OPEN waits for blocks since then; 0: none does */
	struct sim_bytes in;    /* received and not taken apart yet */
	struct sim_request *pending[SIM_PENDING_MAX];
	uint32_t n_pending;
	uint64_t planned_last; /* order of the last request that was planned */
	bool is_hello_sent, is_hello_done, is_half_closed, is_deaf; /* deaf: does not read */
	uint64_t sip_bytes,
		sip_ns;      /* reads at most so much at a time, and then nothing for so long; 0: all */
	uint64_t sip_due_ns; /* when it reads again */
	const char *may_end; /* why the server may end the connection; NULL: it may not */
	bool must_end;       /* it has to, before wakes_ns */
	uint64_t boot_id;
	bool wants_goaway, has_goaway; /* wants: it was there when draining began */
	enum sim_net_end end;          /* of the last connection */
	/* what the random client does */
	uint64_t sessions[SIM_OWNED_MAX]; /* handles that it thinks it owns */
	uint32_t n_sessions;
	uint64_t next_ns, wakes_ns;
	bool is_full;            /* as many requests pending as it may have */
	struct sim_bytes unsent; /* the rest of a frame that is being stalled */
	uint64_t unsent_pos;
	/* the last reply, for scripts */
	struct kvp_header reply;
	uint8_t *reply_body;
};

void sim_peer_init(struct sim_peer *peer, struct sim_world *world, uint32_t peer_idx, uint32_t uid);
void sim_peer_finish(struct sim_peer *peer);
/* False: nobody listens. */
bool sim_peer_connect(struct sim_peer *peer);
/* Registers the request as pending and puts its first n_bytes_max bytes on the way. */
void sim_peer_send(struct sim_peer *peer, struct sim_request *request, uint64_t n_bytes_max);
/* Reads and checks what has arrived; notices the end of the connection. */
void sim_peer_poll(struct sim_peer *peer);
void sim_peer_reset(struct sim_peer *peer);
/* What is pending is lost; the peer can connect again. */
void sim_peer_forget(struct sim_peer *peer);
/* The server's id of the connection; 0: not accepted yet. */
uint64_t sim_peer_conn_id(struct sim_peer *peer);
/* record.c: the request is planned now. */
void sim_peer_planned(struct sim_request *request);

/* reply.c: holds a reply against what was asked; ends the process when they do not fit. */
void sim_reply_check(struct sim_peer *peer, struct sim_request *request, const struct kvp_header *header,
	const uint8_t *body);

/* client.c: the random client's next actions. */
void sim_client_act(struct sim_peer *peer);

#endif
