/*
 * A small server for the client's tests: speaks frames over a Unix socket in a thread, one connection after
 * another, keeps rows as float32 in memory, and misbehaves on demand.
 *
 * It is no model of the real scheduler: one request at a time, blocking, replies in order unless told
 * otherwise. Attention is replaced by a sum: the output of query head h is the sum of V rows of its KV head
 * over the tokens seen, plus q's first number; the log-sum-exp is the number of tokens. That shows every
 * misplaced byte.
 *
 * All members below `lock` are protected by it: tests change them with fake_lock() and fake_unlock().
 */
#ifndef TESTS_UNIT_FAKE_SERVER_H
#define TESTS_UNIT_FAKE_SERVER_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/frame.h"
#include "proto/message.h"

enum {
	FAKE_LAYERS = 4,
	FAKE_Q_HEADS = 4,
	FAKE_KV_HEADS = 2,
	FAKE_K_DIM = 16,
	FAKE_V_DIM = 32,
	FAKE_SEQUENCES = 64,
	FAKE_SESSIONS = 4,
	FAKE_FAULTS = 8,
	FAKE_K_TOKEN = FAKE_KV_HEADS * FAKE_K_DIM, /* floats of one token on one layer */
	FAKE_V_TOKEN = FAKE_KV_HEADS * FAKE_V_DIM,
	FAKE_OUT = FAKE_Q_HEADS * FAKE_V_DIM,
	FAKE_Q = FAKE_Q_HEADS * FAKE_K_DIM,
};

struct fake_layer {
	uint32_t length;
	float *k, *v; /* [length][...] */
};
struct fake_sequence {
	uint64_t session, sequence; /* sequence 0: free */
	struct fake_layer layers[FAKE_LAYERS];
};
struct fake_session {
	uint64_t handle;
	char name[129];
};

/* What to do with requests that match. */
enum fake_action {
	FAKE_NOTHING,
	FAKE_REFUSE_FRAME, /* frame error with `status` */
	FAKE_REFUSE_ITEM,  /* items of `sequence` to `sequence_last` get `status` */
	FAKE_SILENT,       /* take effect, but never answer */
	FAKE_DROP_BEFORE,  /* close the connection, no effect */
	FAKE_DROP_AFTER,   /* take effect, close without an answer: the lost acknowledgement */
	FAKE_HALF_REPLY,   /* send half of the answer, then nothing */
	FAKE_FLIP_BYTE, /* change byte `at` of the answer (counted from the header); the header's CRC is made
			   right */
	FAKE_FLIP_RAW,  /* the same, CRC not made right */
	FAKE_HOLD,      /* keep the answer until `n_held` are there, then send them in reverse order */
};
struct fake_fault {
	enum fake_action action;
	uint16_t opcode;                  /* 0 = any but HELLO */
	uint32_t n_times;                 /* how often it still happens; counts down */
	uint32_t n_skip;                  /* how many matching requests pass first; counts down */
	uint64_t sequence, sequence_last; /* sequence_last 0: just the one */
	uint16_t status;
	uint32_t retry_after_ms;
	uint32_t at;
	uint8_t mask;
};

struct fake_server {
	char dir[64], path[96], address[112];
	int listen_fd;
	pthread_t thread;
	pthread_mutex_t lock;
	bool is_stopping;
	int fd; /* the connection being served; -1: none */

	struct kvp_hello_reply limits;
	uint64_t pool_fingerprint;
	const char *pool_json;
	bool sends_goaway; /* before the next reply */
	uint32_t boot_tag;
	struct fake_fault faults[FAKE_FAULTS];
	struct fake_sequence sequences[FAKE_SEQUENCES];
	struct fake_session sessions[FAKE_SESSIONS];
	uint32_t n_sessions;

	/* What was seen. */
	uint32_t n_connections;
	uint32_t n_requests[128]; /* by opcode */
	uint32_t n_items;         /* of row operations, all frames */
	uint64_t body_bytes_largest;
	uint32_t deadline_us; /* of the last request */
	uint32_t flags;
	uint64_t boot_id_seen;
	int64_t request_ms[64]; /* when row requests came */
	uint32_t n_request_ms;
	uint8_t *last_frame[128]; /* by opcode: header and body */
	size_t last_frame_bytes[128];

	uint8_t *held[64];
	size_t held_bytes[64];
	uint32_t n_held, n_hold;
};

/* Listens on a socket in a fresh directory and starts the thread. Fails the test when it cannot. */
void fake_start(struct fake_server *fake);
/* Ends the thread and frees everything. The client's end should be closed. */
void fake_stop(struct fake_server *fake);
void fake_lock(struct fake_server *fake);
void fake_unlock(struct fake_server *fake);
/* Adds a fault. */
void fake_fault(struct fake_server *fake, struct fake_fault fault);
/* A restart: new boot id, nothing left of what was stored. The connection is closed. */
void fake_restart(struct fake_server *fake);
/* The same, but it restored its sessions, under other handles. */
void fake_restart_restored(struct fake_server *fake);
/* Closes the connection from the server's side. */
void fake_hang_up(struct fake_server *fake);
/* Length of a sequence on a layer; 0 when it does not exist. */
uint32_t fake_length(struct fake_server *fake, uint64_t sequence, uint32_t layer);
uint32_t fake_n_requests(struct fake_server *fake, uint16_t opcode);

static inline bool fake_refuses(const struct fake_fault *fault, uint64_t sequence)
{
	return fault && fault->action == FAKE_REFUSE_ITEM && sequence >= fault->sequence &&
		sequence <= (fault->sequence_last ? fault->sequence_last : fault->sequence);
}

/* fake_store.c: row operations on what is stored; the lock is held. */
struct fake_reply {
	uint8_t *frame; /* header and body; malloc */
	size_t n_bytes;
};
struct fake_sequence *fake_find(struct fake_server *fake, uint64_t session, uint64_t sequence, bool create);
void fake_free_sequence(struct fake_sequence *sequence);
void fake_rows(struct fake_server *fake, const struct kvp_header *header, const uint8_t *body,
	const struct fake_fault *fault, struct fake_reply *reply);
void fake_read(struct fake_server *fake, const struct kvp_header *header, const uint8_t *body,
	struct fake_reply *reply);
void fake_tell(struct fake_server *fake, const struct kvp_header *header, const uint8_t *body,
	struct fake_reply *reply);
/* A reply frame with room; the header is filled except flags that depend on the request. */
uint8_t *fake_reply_init(struct fake_reply *reply, const struct kvp_header *request, uint32_t op_bytes,
	uint32_t n_items, uint64_t payload_bytes);

#endif
