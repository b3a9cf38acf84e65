/*
 * The parts of the server, seen from inside. Only server/ files of the data path include this.
 *
 * A frame's way: conn.c collects header and structs in a read-ahead buffer; dispatch.c checks them and
 * answers control operations at once; rows.c takes a request slot for row operations and receives the payload
 * into it; scheduler.c seals planned items into batches, submits and reaps; rows.c writes the reply; conn.c
 * sends it from the same slot.
 *
 * One thread. Nothing here allocates after srv_server_create().
 */
#ifndef SERVER_INTERNAL_H
#define SERVER_INTERNAL_H

#include <stdbool.h>
#include <stdint.h>

#include "core/arena.h"
#include "core/backend.h"
#include "core/domain.h"
#include "core/list.h"
#include "core/plan.h"
#include "core/selftest.h"
#include "core/sm.h"
#include "proto/check.h"
#include "proto/frame.h"
#include "server/log.h"
#include "server/server.h"

#define SRV_SMALL_SLOT_BYTES 65536u /* in and out, each */
#define SRV_REPLY_BYTES      32768u
#define SRV_RECV_BYTES_MAX                                                              \
	262144u /* per receive and turn, so that one large payload cannot hold the loop \
		 */
#define SRV_BATCH_BYTES_MAX  4194304u /* rows in one batch, or one item */
#define SRV_PLANS_PER_LANE   2u       /* batches in flight per pool */
#define SRV_RELEASE_PER_TURN 1024u    /* blocks given back per turn */
#define SRV_EXPIRE_PER_TURN  16u
#define SRV_PREFIX_LOOKS     64u /* published blocks per turn that may be too old */
#define SRV_EVENTS_PER_TURN  256u
#define SRV_DRAIN_LAST_NS    (1000 * KV_NS_PER_MS) /* behind drain_timeout_ms, to answer what is in flight */
#define SRV_TIMER_SCAN_NS    (20 * KV_NS_PER_MS)   /* how late a peer's timeout may be noticed */
#define SRV_RETRY_AFTER_MS   10u
#define SRV_LINGER_NS        (500 * KV_NS_PER_MS) /* after a fatal error frame: time for the peer to read it */
#define SRV_DEEP_WAITING_MAX 8u
/* A batch is at most 4 MiB of rows or one item; whatever computes so long is not going to end. */
#define SRV_BATCH_STUCK_NS (30000 * KV_NS_PER_MS)
/* A device's batches are polled for so long before the loop sleeps, unless the last one took longer. */
#define SRV_POLL_NS (500 * KV_NS_PER_US)
#define SRV_FEATURES                                                                      \
	((uint64_t)(KVP_FEATURE_WINDOW | KVP_FEATURE_PACKED_INPUT | KVP_FEATURE_ROTATED | \
		KVP_FEATURE_NO_SINKS | KVP_FEATURE_FORK | KVP_FEATURE_EXACT_READ |        \
		KVP_FEATURE_CLIENT_TABLES | KVP_FEATURE_PREFIX | KVP_FEATURE_TIERS))
#define SRV_Q_LEN_MAX 16u

/* ---- request slots ---- */

enum srv_request_state { REQ_FREE, REQ_PAYLOAD, REQ_QUEUED, REQ_RUNNING, REQ_REPLY };

/* Memory and bookkeeping of one row request (or echo) and its reply. */
struct srv_request {
	struct kv_sm sm;
	struct srv_server *server;
	struct srv_slots *slots;
	struct srv_conn *conn; /* NULL once the connection is gone: finish, then forget */
	struct kvp_header header;
	struct kv_session *session; /* NULL for echoes, and once the session is closed */
	uint32_t payer; /* the tenant's entry whose requests it is one of; KV_TENANT_NOBODY: none */
	struct srv_lane *lane;
	uint8_t *in, *out;  /* body as received; header and body to be sent */
	uint64_t in_bytes;  /* received so far */
	uint64_t out_bytes; /* to be sent, header included */
	uint64_t echo_bytes;
	uint64_t charged_bytes; /* what the connection's inflight_bytes holds for it */
	struct kvp_rows_req rows;
	struct kvp_read_req read;
	struct kvp_prefix_req prefix;
	struct kvp_rows_reply_layout rows_layout;
	struct kvp_read_reply_layout read_layout;
	struct kv_frame_rows frame;
	struct kv_item *items; /* [KVP_ITEMS_MAX] */
	uint32_t n_items, n_items_sealed, n_items_done;
	bool is_cancelled, is_expired;
	uint64_t deadline_ns; /* 0 = none */
	uint64_t header_ns, queued_ns,
		sealed_ns; /* when the header was complete, when planned, when first sealed */
	uint32_t copy_in_us, kernel_us, copy_out_us; /* of its batches, each once */
	uint64_t timed_batch;                        /* the last one that is in these sums */
	uint64_t peer_key;
	struct kv_list_node link; /* free list, lane queue or conn->ready */
};

/* Requests of one size class. */
struct srv_slots {
	struct srv_request *requests; /* [n] */
	struct kv_item *items;
	uint8_t *memory; /* host_alloc: n * (in + out) */
	uint64_t memory_bytes, in_bytes, out_bytes;
	uint32_t n, n_used;
	struct kv_list free;
	struct kv_list waiting; /* conns */
};

/* ---- connections ---- */

enum srv_conn_state {
	CONN_FREE,
	CONN_HEADER,   /* collecting 64 bytes */
	CONN_STRUCTS,  /* collecting op struct and items (control operations: the whole body) */
	CONN_DISPATCH, /* complete frame; waits for a slot, a reply buffer or its session */
	CONN_PAYLOAD,  /* receiving into the request slot */
	CONN_DISCARD,  /* throwing away the rest of a refused frame */
	CONN_LINGER,   /* fatal error told; waits for the peer to read it and go */
	CONN_CLOSING,  /* io->close() called; waits for CLOSED */
};

enum srv_wait { WAIT_NONE, WAIT_SLOT, WAIT_REPLY, WAIT_SEND, WAIT_SESSION, WAIT_INFLIGHT, WAIT_BLOCKS };

struct srv_reply {
	uint32_t used;
	struct srv_reply *next;
	uint8_t bytes[SRV_REPLY_BYTES];
};

struct srv_conn {
	struct kv_sm sm;
	struct srv_server *server;
	struct kv_io_conn *io_conn;
	uint64_t id; /* never reused, never 0 */
	uint64_t peer_key;
	uint64_t tenant; /* Unix: user id; TCP: UINT64_MAX; or what its token says */
	struct kv_io_peer peer;
	char client_name[KVP_CLIENT_NAME_BYTES_MAX + 1];
	bool is_hello_done, is_recv_posted, is_send_posted, wants_goaway, is_goaway_sending, is_error_last;
	bool is_eof; /* the peer sends nothing more; replies still go out */
	/* receiving */
	uint8_t *ahead; /* NULL: owns none */
	uint32_t ahead_idx, ahead_pos, ahead_len;
	uint32_t header_have;
	uint8_t header_bytes[KVP_HEADER_BYTES];
	struct kvp_header header;
	struct kvp_fault fault; /* has_fault: why the header was refused */
	bool has_fault;
	uint32_t structs_bytes; /* what CONN_STRUCTS collects */
	uint64_t discard_left;
	struct srv_request *request; /* CONN_PAYLOAD */
	enum srv_wait wait;
	/* sending */
	struct srv_reply *filling, *sending;
	struct srv_request *sending_request;
	struct kv_list ready; /* requests with a reply */
	/* bounds */
	uint32_t n_inflight, n_slots_used[2]; /* small, large */
	uint64_t inflight_bytes;
	/* time */
	uint64_t accepted_ns, header_ns;
	uint64_t stalled_ns;                          /* since when the peer owes us bytes; 0 = it does not */
	uint64_t accepted_empty_ns, stalled_empty_ns; /* srv_ahead_empty_ns() at accepted_ns, stalled_ns */
	uint64_t payload_ns;                          /* when the payload began */
	uint64_t send_ns;                             /* since when a send is posted; 0 = none is */
	/* Of the posted send: when it was looked at first and last (0: never), unsent_bytes() at both, and
	 * since when nothing of it was taken. */
	uint64_t send_first_ns, send_look_ns, send_first_bytes, send_last_bytes, send_taken_ns;
	uint64_t linger_end_ns;
	uint64_t alloc_end_ns; /* until when an OPEN waits for blocks; 0 = it does not */
	/* counts */
	uint64_t n_frames_in, bytes_in, bytes_out;
	struct kv_list_node in_timed, in_waiting,
		link; /* server->timed; slots/reply/session lists; conns or free */
};

/* ---- lanes: one per pool ---- */

/* One item in a batch, in order. */
struct srv_entry {
	struct srv_request *request;
	uint32_t item_idx;
	uint32_t result_idx; /* KV_ROW_NONE: no work, item->status is set already */
};

/*
 * Somebody who moves blocks in or out in a lane's batches, beside the requests: snapshots, tiers. seal() adds
 * moves to the plan of a batch of `lane`; done() says that they came back, with the worst that became of
 * them.
 */
struct srv_mover {
	struct srv_lane *lane; /* wants to be in its next batch; NULL: nothing wanted. The mover clears it. */
	bool is_sealed;        /* in a batch */
	void (*seal)(struct srv_mover *mover, struct kv_plan *plan);
	void (*done)(struct srv_mover *mover, enum kv_status status, const struct kv_result *result);
};

/* A file operation of the server; done() in the turn of its event. */
struct srv_file {
	struct kv_io_file op;
	void (*done)(struct srv_file *file);
};

/* The snapshot of the last drain at a start; drained.c. */
struct srv_drained {
	struct srv_file file;
	bool is_posted;
	char path[512], path_to[512];
};

struct srv_flight {
	struct kv_plan plan;
	struct srv_entry *entries; /* [KV_PLAN_ITEMS_MAX] */
	struct srv_mover *mover;   /* whose moves it has; NULL: none */
	uint32_t n_entries;
	bool is_sealed, is_submitted, is_done;
	bool is_answered; /* its items are; it still holds its blocks */
	uint64_t sealed_ns;
	uint64_t batch_number; /* from 1 on */
};

struct srv_lane {
	struct kv_pool *pool; /* NULL: unused */
	struct kvp_geometry geometry;
	uint32_t *row_bytes;  /* [2 * n_layers]: K, then V */
	struct kv_list queue; /* srv_request.link, in order of arrival */
	uint32_t n_queued;
	struct srv_flight flights[SRV_PLANS_PER_LANE]; /* ring */
	uint32_t flight_first, n_flights;
	bool is_refused; /* the backend did not take the first batch that waits: BUSY_RETRY */
};

/* ---- the known-answer decode behind /readyz ---- */
struct srv_probe {
	struct kv_pool_spec *spec;
	struct kv_backend_pool *pool;
	struct kv_batch batch;
	uint8_t *area;
	uint64_t area_bytes;
	bool is_running, is_passed;
	uint64_t started_ns, passed_ns, next_ns;
	uint32_t duration_us;
	char reason[160]; /* why the last one failed */
	struct srv_control *deep[SRV_DEEP_WAITING_MAX];
	uint32_t n_deep;
};

/* ---- is everything accounted for? audit.c ---- */
/* Table entries, blocks and others that an audit looks at in a turn, at most. */
#define SRV_AUDIT_PER_TURN KV_TALLY_STEP_MAX
struct srv_audit_result {
	enum kv_status status; /* OK, INTERNAL: a difference; BUSY_RETRY, NO_MEMORY: none */
	struct kv_error error;
	struct kv_finding finding;
	struct kv_tally_counts counts;
	uint32_t duration_us;
};
struct srv_audit {
	struct kv_tally *tally;
	bool is_running, is_counted; /* is_counted: the tally is through, requests follow */
	uint32_t n_asked, n_begun, n_ended;
	uint32_t slot;
	uint64_t begun_ns, next_ns;
	struct srv_audit_result now, last;
	bool has_difference; /* the last that came to a result */
	struct kv_finding difference;
	struct kv_error whole_error; /* of srv_audit_whole() */
};

#define SRV_MOVERS 2u /* snapshots, tiers */

struct srv_server {
	const struct srv_options *options;
	struct srv_settings *settings; /* NULL: options never change, and nobody needs a token */
	uint64_t settings_generation;
	struct srv_login_gate logins;
	struct srv_seams seams;
	struct kv_io *io;
	struct kv_backend *backend;
	struct kv_domain *domain;
	struct kv_arena *arena;
	struct kvp_caps caps;
	struct srv_counters counters;
	struct srv_slots slots[2]; /* small, large */
	struct srv_reply *replies, *replies_free;
	uint32_t n_replies_used;
	struct srv_conn *conns;
	struct kv_list conns_free, conns_open, timed, waiting_reply, waiting_session, waiting_blocks;
	uint32_t n_conns;
	uint64_t conn_id_last;
	uint32_t n_ahead_used;                         /* read-ahead buffers that connections have */
	uint64_t ahead_empty_ns, ahead_empty_since_ns; /* time with none free: in all, and since when */
	struct srv_lane lanes[KV_POOLS_MAX];           /* by kv_pool.pool_idx */
	struct srv_probe probe;
	struct srv_checkpoint *checkpoint;
	struct srv_drained drained;
	struct srv_spill *spill;
	struct srv_audit audit;
	struct srv_mover *movers[SRV_MOVERS]; /* NULL: unused */
	struct kvp_request scratch;           /* the frame being checked */
	uint8_t goaway_frame[KVP_HEADER_BYTES];
	struct kv_io_event events[SRV_EVENTS_PER_TURN];
	char listeners[SRV_LISTEN_MAX][160];
	uint32_t n_listeners;
	int backend_fd;
	uint64_t now_ns, started_ns, turns, last_event_ns, next_timer_ns;
	bool is_draining, is_lost, has_finished;  /* has_finished: a request ended this turn */
	bool has_saved;                           /* the snapshot of draining was begun */
	bool is_save_refused;                     /* or could not be */
	uint64_t drain_end_ns;                    /* of draining: until when sessions go on */
	uint64_t stopped_ns;                      /* since when draining takes no more rows; 0: it does */
	uint64_t n_expired_told, expired_told_ns; /* sessions whose lease ran out, in the log */
	uint64_t batch_ns;                        /* from sealing to reaping, of the last batch */
	uint64_t n_work;                          /* counted per turn by the simulation: released blocks */
	struct srv_control *parked,
		*parked_last; /* control requests that go on in a later turn, oldest first */
	uint32_t n_parked;
	struct srv_log_gate gate_protocol, gate_slow, gate_accept, gate_submit;
};

/* slots.c */
KV_MUST_CHECK enum kv_status srv_slots_init(struct srv_server *server, struct kv_error *err);
void srv_slots_finish(struct srv_server *server);
/* A free request for the connection with room for both, or NULL: none is free or it holds its share already.
 */
struct srv_request *srv_request_take(
	struct srv_server *server, struct srv_conn *conn, uint64_t in_bytes, uint64_t out_bytes);
void srv_request_free(struct srv_server *server, struct srv_request *request);
/* Which size class holds it: 0 small, 1 large. */
uint32_t srv_slot_class(uint64_t in_bytes, uint64_t out_bytes);
struct srv_reply *srv_reply_take(struct srv_server *server);
void srv_reply_free(struct srv_server *server, struct srv_reply *reply);

/* conn.c */
KV_MUST_CHECK enum kv_status srv_conns_init(struct srv_server *server, struct kv_error *err);
void srv_conns_finish(struct srv_server *server);
void srv_conn_event(struct srv_server *server, const struct kv_io_event *event);
/* Goes on as far as possible with what has been received. The connection may be closing below. */
void srv_conn_advance(struct srv_conn *conn);
/* conn_send.c */
void srv_conn_sent(struct srv_conn *conn, int64_t result);
/* Posts the next send if there is something to send and none is posted. */
void srv_conn_kick_send(struct srv_conn *conn);
void srv_conn_close(struct srv_conn *conn, const char *reason);
/* conn_time.c */
void srv_conns_scan_timed(struct srv_server *server);
void srv_ahead_taken(struct srv_server *server);
void srv_ahead_returned(struct srv_server *server);
/* Time in which no read-ahead buffer was free, since the start. */
uint64_t srv_ahead_empty_ns(const struct srv_server *server);
/* conn.c */
void srv_conns_retry_waiting(struct srv_server *server);
void srv_conns_goaway(struct srv_server *server);
/* Parks the connection in CONN_DISPATCH until the cause may have gone. */
void srv_conn_wait(struct srv_conn *conn, enum srv_wait wait, struct kv_list *list);
/* Room for a reply of n bytes, or NULL: the connection was parked. Call before doing what the reply tells. */
uint8_t *srv_conn_reply_room(struct srv_conn *conn, uint32_t n_bytes);
/* The reply in the room is complete. */
void srv_conn_reply_done(struct srv_conn *conn, uint32_t n_bytes);

/* dispatch.c */
/* The frame in conn->header and structs is complete: answers it, starts its payload, or parks the connection.
 */
void srv_dispatch(struct srv_conn *conn, const uint8_t *body);
/* Answers with a frame error and throws the rest away; closes after telling where the scope says so. False:
 * parked. */
bool srv_refuse(
	struct srv_conn *conn, const struct kvp_fault *fault, const char *detail, uint32_t retry_after_ms);
/* Same, for a plain status that concerns a header field. */
bool srv_refuse_status(struct srv_conn *conn, enum kv_status status, uint32_t offset, const char *detail);
/* Finds the session of the frame and checks that this connection owns it. */
KV_MUST_CHECK enum kv_status srv_find_session(struct srv_conn *conn, struct kv_session **session);

/* Header and op struct of a control reply: n_items of 32 bytes and the payload are the caller's. Returns the
 * frame's bytes. */
uint32_t srv_reply_header(const struct srv_conn *conn, uint8_t *room, enum kv_status status,
	uint32_t op_bytes, uint32_t n_items, uint64_t payload_bytes);
/* Sends the reply that was written to the room, and goes on with the next frame. */
void srv_reply_send(struct srv_conn *conn, uint32_t n_bytes);

/* audit.c */
void srv_audit_turn(struct srv_server *server);
/* When srv_audit_turn() has something to do next; UINT64_MAX: an event tells. */
uint64_t srv_audit_next_ns(const struct srv_server *server);
/* Nothing is to be sealed: the audit waits until no batch of the lane is in flight. */
bool srv_audit_holds(const struct srv_server *server, const struct srv_lane *lane);
/* GET /v1/audit: the result of an audit that began after it was asked for. False: not yet. */
KV_MUST_CHECK bool srv_audit_answer(struct srv_server *server, struct srv_control *control);
void srv_audit_finish(struct srv_server *server);
/* Builds with KV_AUDIT_TURNS: everything at once; logs what is new. */
void srv_audit_whole(struct srv_server *server);

/* server.c: goes over to settings that a reload published */
void srv_take_settings(struct srv_server *server);
/* control.c */
/* The oldest of those that are parked, which is not any more; NULL: none. */
struct srv_control *srv_control_unpark(struct srv_server *server);
/* Answers what is parked, because the loop ends. */
void srv_control_stop(struct srv_server *server);
/* control_gauges.c */
void srv_control_info(struct srv_server *server, struct srv_info *info);
/* control_lists.c. False: goes on next turn. */
KV_MUST_CHECK bool srv_control_sessions(struct srv_server *server, struct srv_control *control);
/* control_tenants.c */
KV_MUST_CHECK bool srv_control_tenants(struct srv_server *server, struct srv_control *control);
KV_MUST_CHECK bool srv_control_tenant(struct srv_server *server, struct srv_control *control);
KV_MUST_CHECK bool srv_control_tenant_set(struct srv_server *server, struct srv_control *control);
void srv_control_tenant_gauges(struct srv_server *server, struct srv_control *control);
void srv_control_tenant_clear(struct srv_server *server, struct srv_control *control);
/* control_prefixes.c and control_lists.c */
KV_MUST_CHECK bool srv_control_prefixes(struct srv_server *server, struct srv_control *control);
KV_MUST_CHECK bool srv_control_prefix_delete(struct srv_server *server, struct srv_control *control);
void srv_control_prefix(struct srv_server *server, struct srv_control *control);
/* Of a sorted list: keeps the first n_rows_max keys in order. */
void srv_control_keep_key(struct srv_control *control, const struct srv_sort_key *key);
KV_MUST_CHECK bool srv_control_session_delete(struct srv_server *server, struct srv_control *control);
void srv_control_session(struct srv_server *server, struct srv_control *control);
void srv_control_sequence(struct srv_server *server, struct srv_control *control);
void srv_control_connections(struct srv_server *server, struct srv_control *control);

/* operations.c: answers the frame in server->scratch, or parks the connection */
void srv_op_pool_info(struct srv_conn *conn);
void srv_op_open(struct srv_conn *conn); /* and ATTACH */
void srv_op_close(struct srv_conn *conn, struct kv_session *session);
/* Blocks of one group that others own, too: looks at each. */
uint32_t srv_count_shared_blocks(const struct kv_sequence *sequence, uint32_t group_idx);
void srv_op_tell(struct srv_conn *conn, struct kv_session *session);
void srv_op_items(struct srv_conn *conn, struct kv_session *session); /* TRUNCATE, FREE, FORK, PIN, UNPIN */
/* Closes a session that has nothing queued; what is in batches finishes without it. */
void srv_session_close(struct srv_server *server, struct kv_session *session);

/* prefixes.c: PUBLISH and MATCH go through a slot, because token ids may fill a frame */
void srv_prefix_dispatch(struct srv_conn *conn, const uint8_t *body, struct kv_session *session);
void srv_prefix_received(struct srv_request *request);

/* rows.c */
/* The session may have been closed or fenced while the payload came in. */
KV_MUST_CHECK enum kv_status srv_request_find_session(
	struct srv_request *request, struct kv_session **session);
/* Writes a frame error into the slot and hands it to the connection. */
void srv_request_refuse(
	struct srv_request *request, enum kv_status status, const char *detail, uint64_t expected);
/* The reply's body is complete: header and checksum, and off it goes. */
void srv_request_reply(struct srv_request *request, uint32_t op_bytes, uint64_t body_bytes);
void srv_rows_dispatch(struct srv_conn *conn, const uint8_t *body);
void srv_read_dispatch(struct srv_conn *conn, const uint8_t *body);
void srv_echo_dispatch(struct srv_conn *conn, const uint8_t *body);
/* Takes a slot and copies the structs into it, or parks the connection (NULL). */
struct srv_request *srv_rows_start(
	struct srv_conn *conn, const uint8_t *body, uint64_t in_bytes, uint64_t reply_body_bytes);
/* NULL when the segment has no bytes. */
uint8_t *srv_segment_at(uint8_t *body, uint64_t payload_start, const struct kvp_segment *segment);
/* The pool's geometry, with what the layer adds. */
struct kvp_geometry srv_geometry_of(const struct srv_lane *lane, uint32_t layer_idx);
/* Without segments and outputs. */
struct kv_frame_rows srv_frame_rows_of(const struct kvp_rows_req *rows);

/* tables.c */
void srv_slots_dispatch(struct srv_conn *conn, struct kv_session *session, const uint8_t *body);
void srv_table_dispatch(struct srv_conn *conn, struct kv_session *session, const uint8_t *body);

/* All of the payload is there: is its checksum right, if it has one? */
bool srv_request_is_intact(const struct srv_request *request, struct kvp_fault *fault);
/* All of the payload is there, and intact. */
void srv_request_received(struct srv_request *request);
/* Every item is over: writes the reply and hands it to the connection. */
void srv_request_finish(struct srv_request *request);

/* scheduler.c */
KV_MUST_CHECK enum kv_status srv_lane_open(
	struct srv_server *server, struct kv_pool *pool, struct kv_error *err);
void srv_lane_close(struct srv_server *server, struct srv_lane *lane);
/* No batch of it is in flight. */
bool srv_lane_is_quiet(const struct srv_lane *lane);
bool srv_lane_is_idle(const struct srv_lane *lane);
void srv_lane_enqueue(struct srv_lane *lane, struct srv_request *request);
/* Finishes what the backend is done with. */
void srv_scheduler_reap(struct srv_server *server);
/* Gives up the blocks of batches whose items are answered. */
void srv_scheduler_end_plans(struct srv_server *server);
/* Seals and submits one batch per lane. */
void srv_scheduler_seal(struct srv_server *server);
bool srv_scheduler_has_work(const struct srv_server *server);
uint32_t srv_scheduler_in_flight(const struct srv_server *server);
/* Age of the oldest batch that is sealed and not done, 0 when there is none. */
uint64_t srv_scheduler_oldest_ns(const struct srv_server *server);
/* True while a sealed batch waits for a backend that said BUSY_RETRY. */
bool srv_scheduler_is_refused(const struct srv_server *server);
/* All batches fail: everything queued or running is answered DEVICE_LOST. */
void srv_scheduler_lose(struct srv_server *server);

/* pools.c */
KV_MUST_CHECK enum kv_status srv_pool_create(
	struct srv_server *server, struct kv_pool_spec *spec, struct kv_pool **out, struct kv_error *err);
KV_MUST_CHECK enum kv_status srv_pool_remove(
	struct srv_server *server, struct kv_pool *pool, struct kv_error *err);

/* probe.c */
KV_MUST_CHECK enum kv_status srv_probe_init(struct srv_server *server, struct kv_error *err);
void srv_probe_finish(struct srv_server *server);
void srv_probe_turn(struct srv_server *server);
/* The batch came back from reap(). */
void srv_probe_reaped(struct srv_server *server);
bool srv_probe_is_ready(struct srv_server *server, char *reason, uint32_t reason_bytes);

static inline void srv_reject(struct srv_server *server, enum kv_status status)
{
	srv_counters_reject(&server->counters, status);
}
static inline uint64_t srv_us_since(uint64_t now_ns, uint64_t then_ns)
{
	return now_ns > then_ns ? (now_ns - then_ns) / KV_NS_PER_US : 0;
}

#endif
