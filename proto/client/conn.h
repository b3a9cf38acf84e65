/*
 * Inside of libtqkv: a connection, its requests in flight and its sessions.
 *
 * Life of a request: tqkv_request_begin() takes an entry and its frame buffer, the caller encodes op struct,
 * items and payload, tqkv_request_submit() queues the frame. tqkv_conn_turn() moves bytes both ways, so that
 * a server that stops reading until its replies are read cannot block us. An answered entry is done; fetching
 * it gives the buffers back with the next call. A caller that gives up forgets the request: the frame is
 * still sent to its end (a frame cannot be cut) and the reply is still received, into the entry, which is why
 * rows are copied and not referenced.
 *
 * Names without TQKV_API are hidden in the shared library.
 */
#ifndef PROTO_CLIENT_CONN_H
#define PROTO_CLIENT_CONN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/check.h"
#include "proto/client/reply.h"
#include "proto/client/tqkv.h"
#include "proto/frame.h"
#include "proto/message.h"

#define TQKV_MUST_CHECK KV_MUST_CHECK

enum {
	TQKV_STAGING_BYTES =
		16 * 1024, /* small replies arrive whole; of large ones only the start is copied twice */
	TQKV_SEND_FRAMES_MAX = 16, /* frames per sendmsg() */
	TQKV_REQUESTS_DEFAULT = 256,
	TQKV_REQUESTS_MAX = 4096,
	TQKV_REQUESTS_OWN =
		16, /* entries beyond requests_max, so that blocking calls work when a caller uses all */
	TQKV_SPARE_BUFFERS_MAX = 16, /* a window of 8 requests runs without the heap */
};

/* Heap memory that is kept for the next request. */
struct tqkv_buffer {
	uint8_t *data;
	size_t capacity_bytes;
};

struct tqkv_request {
	uint64_t id; /* 0: the entry is free */
	struct tqkv_conn *conn;
	struct tqkv_session *session; /* NULL when it has none */
	struct kvp_header header;
	int64_t deadline_ns;      /* 0: none at the server */
	struct tqkv_buffer frame; /* header and body */
	size_t frame_bytes;
	size_t n_sent;
	struct tqkv_request *next; /* send queue */
	bool is_queued;            /* in the send queue: `frame` is in use */
	bool is_done;              /* answered, or ended here */
	bool is_forgotten;
	uint64_t done_order; /* replies are handed out in the order they came */
	enum tqkv_status
		local; /* ended without a reply: DEADLINE (never sent), or the connection's failure */
	bool is_outcome_unknown; /* with `local` */
	struct kvp_header reply_header;
	struct tqkv_buffer reply; /* body */
};

struct tqkv_session {
	struct tqkv_conn *conn;
	struct tqkv_session *next;
	struct tqkv_session_info info;
	struct kvp_geometry geometry; /* no row bytes: packed sizes are the server's business */
	enum tqkv_status lost;        /* not OK: the daemon no longer has it */
	char name[KVP_SESSION_NAME_BYTES_MAX + 1];
};

struct tqkv_conn {
	char *address;
	char *token;                 /* NULL = none */
	char *client_name;           /* NULL = none */
	struct tqkv_options options; /* defaults filled in; texts are the three above */
	int fd;                      /* -1: lost */
	bool is_send_broken;         /* the peer closed its half; replies may still be on the way */
	bool is_draining;
	bool has_hello;
	bool is_reconnecting;      /* calls inside must not reconnect again */
	struct tqkv_error failure; /* why fd is -1 */
	struct tqkv_server_info server;
	struct tqkv_session *sessions;
	uint64_t random_state;

	struct tqkv_request *requests; /* entry of id: requests[id & requests_mask] */
	uint64_t requests_mask;
	uint64_t last_id;
	uint32_t n_requests;  /* entries in use */
	uint32_t n_in_flight; /* of them not done */
	uint32_t n_ready;     /* of them done and not forgotten */
	uint32_t n_forgotten; /* of them; they go as soon as their frames have passed */
	uint64_t in_flight_bytes;
	uint64_t n_done; /* counter for done_order */
	struct tqkv_request *send_first, *send_last;
	struct tqkv_request *fetched;                     /* given back with the next call */
	struct tqkv_buffer spare[TQKV_SPARE_BUFFERS_MAX]; /* the last one is the warmest */
	uint32_t n_spare;

	struct tqkv_request *receiving; /* whose body is coming; NULL: a header is next, or `oob` */
	struct kvp_header rx_header;
	uint64_t rx_body_bytes; /* of the current body so far */
	bool is_receiving_oob;  /* the body belongs to a frame without request: GOAWAY, or a last error */
	uint8_t oob[1024];
	uint8_t staging[TQKV_STAGING_BYTES];
	size_t staging_first, staging_end;

	struct tqkv_reply_space space; /* of the fetched reply */
};

/* ---- error.c ---- */
#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
enum tqkv_status
tqkv_fail(struct tqkv_error *err, enum tqkv_status status, const char *fmt, ...);
/* BAD_ARG: of these pointers one is NULL that may not be. */
enum tqkv_status tqkv_fail_null(struct tqkv_error *err, const char *names);
/* "context: " in front of the message. */
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
void tqkv_error_wrap(struct tqkv_error *err, const char *fmt, ...);
enum tqkv_status tqkv_fail_fault(struct tqkv_error *err, const struct kvp_fault *fault);

/* ---- socket.c ---- */
int64_t tqkv_now_ns(void);
/* now + timeout_ms */
int64_t tqkv_deadline_ns(uint32_t timeout_ms);
/* For poll(): rounded up, 0 when past. */
int tqkv_poll_timeout_ms(int64_t deadline_ns);
/* Non-blocking socket, connected. */
TQKV_MUST_CHECK enum tqkv_status tqkv_socket_connect(
	const char *address, int64_t deadline_ns, int *fd, struct tqkv_error *err);

/* ---- conn.c ---- */
/* Deadline of a call. */
int64_t tqkv_conn_deadline_ns(const struct tqkv_conn *conn, uint32_t timeout_ms);
/* Connects and says HELLO. STALE_EPOCH: connected, but to another start of the daemon. */
TQKV_MUST_CHECK enum tqkv_status tqkv_conn_dial(
	struct tqkv_conn *conn, int64_t deadline_ns, struct tqkv_error *err);
/* Closes the socket; every request in flight ends with `failure`. Returns its status. */
enum tqkv_status tqkv_conn_lose(struct tqkv_conn *conn, const struct tqkv_error *failure);
/* Waits without looking for anything: pauses between repetitions. False when the connection was lost. */
bool tqkv_conn_sleep(struct tqkv_conn *conn, int64_t until_ns);

/* ---- io.c ---- */
/*
 * Sends and receives what is possible, waiting until deadline_ns for the first chance. OK: something
 * happened. DEADLINE: nothing in time. Other: the connection was lost, all requests are done.
 */
enum tqkv_status tqkv_conn_turn(struct tqkv_conn *conn, int64_t deadline_ns);
/* Sends what the socket takes now. */
void tqkv_conn_flush(struct tqkv_conn *conn);

/* ---- request.c ---- */
/* Sizes of a frame to come. */
struct tqkv_shape {
	uint16_t opcode;
	uint32_t op_bytes;
	uint32_t n_items;
	uint64_t payload_bytes;
	bool is_pipelined; /* counts against the caller's requests_max */
};
/*
 * Takes an entry, waiting until `room_deadline_ns` for room among the requests in flight. The body's structs
 * and the padding behind them are zero; the payload is not.
 */
TQKV_MUST_CHECK enum tqkv_status tqkv_request_begin(struct tqkv_conn *conn, struct tqkv_session *session,
	const struct tqkv_shape *shape, int64_t room_deadline_ns, struct tqkv_request **out,
	struct tqkv_error *err);
uint8_t *tqkv_request_body(const struct tqkv_request *request);
uint8_t *tqkv_request_payload(const struct tqkv_request *request);
/* Queues and sends. deadline_ns 0: none told to the server. */
void tqkv_request_submit(struct tqkv_request *request, int64_t deadline_ns);
/* Waits until the request is done. DEADLINE: it is not, and still the caller's. */
TQKV_MUST_CHECK enum tqkv_status tqkv_request_await(
	struct tqkv_request *request, int64_t deadline_ns, struct tqkv_error *err);
/*
 * Decodes the reply of a request that is done; the entry is given back with the next begin or fetch. A reply
 * that contradicts its request loses the connection.
 */
enum tqkv_status tqkv_request_fetch(struct tqkv_request *request, struct tqkv_reply *reply,
	union tqkv_reply_op *op, struct tqkv_error *err);
void tqkv_request_forget(struct tqkv_request *request);
void tqkv_request_finish_fetched(struct tqkv_conn *conn);
/* Called by io.c when nothing more is to be done with the entry. */
void tqkv_request_end(struct tqkv_request *request, enum tqkv_status local, bool is_outcome_unknown);
void tqkv_request_release_if_over(struct tqkv_request *request);
struct tqkv_request *tqkv_request_find(struct tqkv_conn *conn, uint64_t id);
/* begin, submit, await, fetch; forgets the request at the deadline. `fill` encodes into the body. */
TQKV_MUST_CHECK enum tqkv_status tqkv_call(struct tqkv_conn *conn, struct tqkv_session *session,
	const struct tqkv_shape *shape, void (*fill)(struct tqkv_request *request, const void *arg),
	const void *arg, int64_t deadline_ns, struct tqkv_reply *reply, union tqkv_reply_op *op,
	struct tqkv_error *err);
/* True when the buffer holds at least n_bytes. */
bool tqkv_buffer_take(struct tqkv_conn *conn, size_t n_bytes, struct tqkv_buffer *buffer);
void tqkv_buffer_give(struct tqkv_conn *conn, struct tqkv_buffer *buffer);

/* ---- retry.c ---- */
/* Whether waiting helps against a refusal. A quota is used up until somebody of the tenant gives something
 * back, and that may be the caller. */
bool tqkv_ends_by_itself(enum tqkv_status status);
struct tqkv_backoff {
	uint32_t n_attempts;
};
/*
 * Pauses before the next repetition: at least retry_after_ms, plus a random part of a bound that doubles with
 * every attempt. False: the deadline would pass or the connection was lost.
 */
bool tqkv_backoff_pause(
	struct tqkv_backoff *backoff, struct tqkv_conn *conn, uint32_t retry_after_ms, int64_t deadline_ns);
/* How long it would pause; for tests. */
uint32_t tqkv_backoff_pause_ms(
	uint32_t n_attempts, uint32_t retry_after_ms, const struct tqkv_options *options, uint64_t random);
uint64_t tqkv_random(struct tqkv_conn *conn);

/* ---- session.c ---- */
/* Not OK: the session is lost, or its connection. */
TQKV_MUST_CHECK enum tqkv_status tqkv_session_check(
	const struct tqkv_session *session, struct tqkv_error *err);
/* ATTACH by name into the same struct. */
TQKV_MUST_CHECK enum tqkv_status tqkv_session_reattach(
	struct tqkv_session *session, int64_t deadline_ns, struct tqkv_error *err);
/* One page of TELL. */
TQKV_MUST_CHECK enum tqkv_status tqkv_session_tell_page(struct tqkv_session *session, uint64_t sequence_from,
	uint32_t n_max, bool per_layer, int64_t deadline_ns, struct tqkv_reply *reply,
	struct tqkv_error *err);

/* ---- pool.c ---- */
/* Does the pool's JSON equal pool_json? FORMAT_MISMATCH names the member. */
TQKV_MUST_CHECK enum tqkv_status tqkv_pool_compare(struct tqkv_conn *conn, const char *pool,
	const char *pool_json, int64_t deadline_ns, struct tqkv_error *err);

/* ---- reconnect.c ---- */
/*
 * After IO_ERROR in a blocking call: reconnects if the options say so. True: repeat the call. Counts in
 * *n_recoveries, which starts at 0: a call that lost the connection three times is not sent a fourth time, it
 * may be the reason.
 */
bool tqkv_conn_recover(struct tqkv_conn *conn, enum tqkv_status status, uint32_t *n_recoveries,
	int64_t deadline_ns, struct tqkv_error *err);

/* ---- pipeline.c ---- */
/* One frame without waiting for its reply. */
enum tqkv_status tqkv_submit(struct tqkv_session *session, const struct tqkv_shape *shape,
	void (*fill)(struct tqkv_request *request, const void *arg), const void *arg, uint32_t timeout_ms,
	uint64_t *request_id, struct tqkv_error *err);

#endif
