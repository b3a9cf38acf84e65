/*
 * Rig: one server on memory io and the synchronous scalar backend, and clients that write frames by hand.
 * Every turn is followed by the audit. Whatever is not as it should be ends the process with status 1 and a
 * line that says where.
 *
 * The backend has a front that can hold finished batches back, fail submits and spoil outputs, so that a
 * scenario decides what is in flight. One thread; everything is static, one rig at a time.
 */
#ifndef TESTS_MUTATION_RIG_H
#define TESTS_MUTATION_RIG_H

#include "proto/crc32c.h"
#include "server/internal.h"
#include "tests/mutation/memory_io.h"

#define RIG_FRAME_BYTES 65536u
#define RIG_POOL        "demo" /* f32: layers 2, q_heads 2, kv_heads 1, head_dim 16, blocks of 16 tokens */
#define RIG_BLOCKS      8u
#define RIG_HEAD_DIM    16u
#define RIG_Q_HEADS     2u
#define RIG_LAYERS      2u

#define CHECK(cond) ((cond) ? (void)0 : rig_fail(#cond, __FILE__, __LINE__))
_Noreturn void rig_fail(const char *what, const char *file, int line);

struct rig {
	struct mem_clock clock;
	struct mem_random random;
	struct mem_io io;
	struct srv_mailbox mailbox;
	struct srv_server *server;
	struct srv_options options;
	uint64_t boot_id;
};
extern struct rig rig;

/* What the backend's front does with batches of pools (not of the self-test, unless `spoils`). */
struct rig_backend_faults {
	bool holds;  /* reap() gives nothing back */
	bool loses;  /* submit() says DEVICE_LOST */
	bool spoils; /* the first output of every decode is off by one, the self-test's too */
};
extern struct rig_backend_faults rig_backend;

void rig_start(void);
/* Closes what is open and checks that nothing is left behind. */
void rig_stop(void);
/* The end without these checks: of a server that ends itself. */
void rig_end(void);

/* One turn, `ms` later; then the audit. */
void rig_turn(uint64_t ms);
/* Turns until nothing moves any more, in no time. */
void rig_settle(void);

/* ---- clients: connections 0 to MEM_CONNS - 1 ---- */

struct rig_reply {
	struct kvp_header header;
	uint8_t body[RIG_FRAME_BYTES];
};

/* Connects and says HELLO. */
void rig_hello(uint32_t conn, uint32_t uid);
/* Peer closes; the server has noticed when this returns. */
void rig_goodbye(uint32_t conn);
bool rig_is_closed(uint32_t conn);

/* A frame to be written: the caller fills what it needs, rig_send() the rest. */
struct rig_frame {
	struct kvp_header header; /* opcode, session, flags, deadline_us; request_id is set by rig_send() */
	uint8_t op[64];
	uint32_t op_bytes;
	struct kvp_rows_item items[8];
	uint64_t parents[8]; /* FORK */
	uint32_t n_items;
	const void *payload;
	uint64_t payload_bytes;
	bool is_bad_crc; /* of the body */
};
/* Writes it whole and returns its request id. No turn happens. */
uint64_t rig_send(uint32_t conn, const struct rig_frame *frame);
/* Writes only the first n_bytes of it. */
void rig_send_part(uint32_t conn, const struct rig_frame *frame, uint64_t n_bytes);
/* The reply to this request, if it has come; it is used up then. */
bool rig_take(uint32_t conn, uint64_t request_id, struct rig_reply *reply);
/* Sends, turns until the reply is there (it must come without time passing), and returns it. */
const struct rig_reply *rig_call(uint32_t conn, const struct rig_frame *frame);
/* The same; returns the frame's status only. */
enum kv_status rig_ask(uint32_t conn, const struct rig_frame *frame);

struct rig_open {
	const char *name;
	uint32_t lease_ms, reserve_blocks, tokens_max, flags;
	uint64_t fingerprint; /* 0: any */
};
struct rig_frame rig_open_frame(const char *pool, const struct rig_open *open);
/* Must succeed; returns the handle. */
uint64_t rig_open_session(uint32_t conn, const struct rig_open *open);
struct rig_frame rig_plain(uint16_t opcode, uint64_t session);

/*
 * Row `idx` of K or V of a sequence at a layer: numbers that no other row has. APPEND frames hold such rows,
 * on all layers; a decode's queries are those of sequence 99.
 */
void rig_row(uint64_t sequence, uint32_t layer, uint32_t idx, bool is_k, float row[RIG_HEAD_DIM]);
struct rig_frame rig_append(uint64_t session, uint64_t sequence, uint32_t position, uint32_t n_tokens);
struct rig_frame rig_decode(uint64_t session, uint64_t sequence, uint32_t length);
struct rig_frame rig_read(uint64_t session, uint64_t sequence, uint32_t n_tokens);

/* Status of the first item of a row operation whose frame is OK. */
enum kv_status rig_item(uint32_t conn, const struct rig_frame *frame);
/* Length of a sequence by TELL; UINT32_MAX: there is none of this id. */
uint32_t rig_length(uint32_t conn, uint64_t session, uint64_t sequence);
/* READs the first n_tokens rows back and compares them. */
void rig_check_rows(uint32_t conn, uint64_t session, uint64_t sequence, uint32_t n_tokens);
/* The reply has the attention of sequence 99's queries over these rows of layer 0. */
void rig_check_output(const struct rig_reply *reply, uint64_t sequence, uint32_t length);
/* DECODEs and compares with attention over the rows as rig_row() tells them. */
void rig_check_decode(uint32_t conn, uint64_t session, uint64_t sequence, uint32_t length);

/* ---- control requests ---- */

/* What control requests from now on are about: a session's handle, a sequence, a tenant and its policy. */
extern uint64_t rig_control_id, rig_control_sequence_id, rig_control_tenant;
extern struct kv_tenant_policy rig_control_policy;
/* Through the mailbox; turns until it is answered. The answer is good until the next call. */
struct srv_control *rig_control(enum srv_control_kind kind, const char *name, const char *pool_json);
/* Counts of the pool as OCCUPANCY tells them. */
struct kv_block_counts rig_blocks(void);

#endif
