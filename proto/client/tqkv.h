/*
 * libtqkv: client of tqkvd, the daemon that keeps K/V caches of token sequences in compressed pages.
 *
 * A connection speaks to one daemon. A session is what the client owns on one pool; its sequences are named
 * by numbers of the client's choice. Rows go in with append, attention outputs come out with decode.
 *
 * Threads: a connection, its sessions and the replies fetched from it belong to one thread at a time; the
 * library takes no lock. Different connections are independent, and the library has no global state. No
 * signal handler, no thread, no SIGPIPE. A child after fork() must not use the parent's connections.
 *
 * Deadlines: every call ends. `timeout_ms` bounds the whole call with all its repetitions; 0 means the
 * connection's timeout_ms (30 s unless set). When it passes, the call returns TQKV_DEADLINE with is_local set
 * and is_outcome_unknown when the request was on its way; the connection stays usable and the late reply is
 * thrown away. One exception: a host name (not a number) in an address is resolved by libc, which keeps its
 * own time.
 *
 * Errors: the call's status is returned and told in `err` (may be NULL). Outputs are untouched on failure
 * unless a comment says otherwise. TQKV_IO_ERROR: the connection is lost; see tqkv_reconnect().
 * A pointer that may not be NULL and is: BAD_ARG. Buffers of rows are as long as the caller says.
 *
 * Memory: inputs are copied before a call returns. Rows are little-endian; so must the machine be.
 *
 * Names follow the wire protocol (PROTOCOL.md), which says what each operation means.
 */
#ifndef TQKV_H
#define TQKV_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define TQKV_API __attribute__((visibility("default")))
#else
#define TQKV_API
#endif

/* Numbers of the wire; from 900 on they never leave the process. A newer server may send others. */
enum tqkv_status {
	TQKV_OK = 0,
	TQKV_BAD_MAGIC = 100,
	TQKV_VERSION_UNSUPPORTED = 101,
	TQKV_BAD_CRC = 102,
	TQKV_TOO_LARGE = 103,
	TQKV_BAD_FRAME = 104,
	TQKV_UNSUPPORTED = 105,
	TQKV_BAD_ARG = 106,
	TQKV_BAD_VALUE = 107,
	TQKV_FORMAT_MISMATCH = 108,
	TQKV_SLOT_OUT_OF_RANGE = 109,
	TQKV_UNAUTHENTICATED = 200,
	TQKV_FORBIDDEN = 201,
	TQKV_NOT_FOUND = 300,
	TQKV_STALE_HANDLE = 301,
	TQKV_STALE_EPOCH = 302,
	TQKV_SESSION_EXPIRED = 303,
	TQKV_EVICTED = 304,
	TQKV_NOT_OWNER = 305,
	TQKV_EXISTS = 306,
	TQKV_BAD_STATE = 307,
	TQKV_POSITION = 308,
	TQKV_LEN_LIMIT = 309,
	TQKV_WINDOW_GONE = 310,
	TQKV_POOL_FULL = 400,
	TQKV_QUOTA = 401,
	TQKV_BUSY_RETRY = 402,
	TQKV_LIMIT = 403,
	TQKV_DRAINING = 404,
	TQKV_SLOW_CONSUMER = 405,
	TQKV_INTERNAL = 500,
	TQKV_DEVICE_LOST = 501,
	TQKV_DEADLINE = 502,
	TQKV_CANCELLED = 503,
	TQKV_CORRUPT = 504,
	TQKV_NO_MEMORY = 900,
	TQKV_IO_ERROR = 901,
	TQKV_BAD_CONFIG = 902,
	TQKV_UNAVAILABLE = 903,
};

/* What a failure kills, smallest first. */
enum tqkv_scope {
	TQKV_SCOPE_NONE = 0,
	TQKV_SCOPE_ITEM = 1,
	TQKV_SCOPE_REQUEST = 2,
	TQKV_SCOPE_SESSION = 3,
	TQKV_SCOPE_CONN = 4,
	TQKV_SCOPE_DAEMON = 5,
};

struct tqkv_error {
	enum tqkv_status status;
	enum tqkv_scope scope;
	bool is_retryable;       /* trying again may help */
	bool is_local;           /* found by this library; otherwise the server said it */
	bool is_outcome_unknown; /* the request may or may not have taken effect: tqkv_tell() decides */
	uint32_t retry_after_ms; /* the server's hint; 0 = none */
	uint32_t item;           /* 0xFFFFFFFF = none */
	uint32_t offset;         /* of the bad field in the frame, from the server */
	uint64_t expected, got;  /* from the server, where it says so */
	char message[512];       /* one readable line */
};

/* "POOL_FULL"; "INTERNAL" for a number that this library does not know. Never NULL. */
TQKV_API const char *tqkv_status_name(unsigned status);
/* "no free block" */
TQKV_API const char *tqkv_status_text(unsigned status);
TQKV_API bool tqkv_status_is_retryable(unsigned status);
/* "0.1.0" */
TQKV_API const char *tqkv_version(void);

/* ---- Connection ---- */

enum tqkv_option {
	TQKV_OPTION_BODY_CRC = 1 << 0,  /* checksum of bodies too; that of headers is always there */
	TQKV_OPTION_TIMINGS = 1 << 1,   /* ask for the server's timings of row operations */
	TQKV_OPTION_NO_RETRY = 1 << 2,  /* blocking calls return retryable refusals at once */
	TQKV_OPTION_RECONNECT = 1 << 3, /* blocking calls reconnect by themselves; see tqkv_reconnect() */
};

/* Zeroed means the defaults. Texts are copied. */
struct tqkv_options {
	uint32_t flags;              /* enum tqkv_option */
	uint32_t connect_timeout_ms; /* connecting and HELLO together; 0 = 5000 */
	uint32_t timeout_ms;         /* of calls that say 0; 0 = 30000 */
	uint32_t backoff_first_ms;   /* pause after the first retryable refusal; doubles; 0 = 5 */
	uint32_t backoff_max_ms;     /* 0 = 1000 */
	uint32_t requests_max;       /* requests submitted and not yet fetched; 0 = 256; at most 4096 */
	uint64_t features; /* wanted; bits of PROTOCOL.md section 7; the server info tells which are served */
	const char *token; /* NULL = none; at most 512 bytes */
	const char *client_name; /* for the server's log; NULL = none; at most 64 bytes of UTF-8 */
};

/* What HELLO told. */
struct tqkv_server_info {
	uint64_t boot_id; /* another one: the daemon restarted and its memory is gone */
	uint64_t features;
	uint64_t frame_bytes_max;
	uint64_t inflight_bytes_max;
	uint32_t inflight_requests_max;
	uint32_t items_max;
	uint32_t sessions_max;
	uint32_t sequences_max;
	uint32_t q_len_max;
	uint32_t lease_ms;
	uint16_t proto;
	uint16_t n_pools;
};

struct tqkv_conn;
struct tqkv_session;

/*
 * Connects and says HELLO. Address: "unix:/path", "tcp:host:port" or "tcp:[v6 address]:port". `options` may
 * be NULL. tqkv_disconnect() the result.
 */
TQKV_API enum tqkv_status tqkv_connect(const char *address, const struct tqkv_options *options,
	struct tqkv_conn **out, struct tqkv_error *err);
/*
 * Closes the connection and frees it with its sessions' structs. The daemon keeps a session until its lease
 * runs out; tqkv_close() ends one at once. NULL is allowed.
 */
TQKV_API void tqkv_disconnect(struct tqkv_conn *conn);
/* Lives as long as the connection; changes in tqkv_reconnect(). */
TQKV_API const struct tqkv_server_info *tqkv_server_info(const struct tqkv_conn *conn);
/* False once the connection is lost. True proves nothing about the network. */
TQKV_API bool tqkv_is_connected(const struct tqkv_conn *conn);
/* The server has announced (GOAWAY) that it is about to stop. Seen while some call waits. */
TQKV_API bool tqkv_is_draining(const struct tqkv_conn *conn);
/*
 * For a caller's poll(): readable when more may have come; first see what tqkv_poll() has already. -1 when
 * lost. Do not read from it.
 */
TQKV_API int tqkv_fd(const struct tqkv_conn *conn);

/* What tqkv_reconnect() did. Every member is valid whatever it returned. */
struct tqkv_reconnect_report {
	uint64_t boot_id_before, boot_id; /* boot_id 0: no connection was made */
	uint32_t n_sessions;              /* of this connection */
	uint32_t n_attached;              /* of them usable again */
	uint32_t n_sequences;             /* of all attached sessions */
	uint32_t n_truncated;             /* sequences cut to their shortest layer */
};
struct tqkv_reconnect_params {
	bool keep_lengths; /* do not truncate: for clients that stream layer by layer and go on from TELL */
	/* (optional) Called for every sequence of every session that was attached again. Must not use the
	 * connection. */
	void (*on_sequence)(void *arg, struct tqkv_session *session, uint64_t sequence, uint32_t length,
		bool was_truncated);
	void *arg;
};
/*
 * Makes a new connection in place of the old one, lost or not. Requests that were not answered end with
 * IO_ERROR and is_outcome_unknown; fetched and unfetched replies stay as they are. Then, per session with a
 * name: ATTACH, TELL, and TRUNCATE of sequences whose layers differ to the shortest one, so that every
 * sequence has one length to go on from. Sessions without a name are lost (STALE_HANDLE).
 *
 * OK: all sessions are usable. After a restart of the daemon (the boot ids differ) these are sessions of a
 * snapshot that it restored; TELL says how far they go. STALE_EPOCH: the daemon was restarted, and at least
 * one session did not come back with it. A status of ATTACH: at least that session is lost. Lost sessions
 * tell so in every call (the structs remain until tqkv_close()); the connection and the others are usable.
 * IO_ERROR, DEADLINE: no connection; may be called again. `params` and `report` may be NULL.
 *
 * TQKV_OPTION_RECONNECT lets blocking calls do this by themselves, without truncating, within their deadline;
 * a restarted daemon ends them with STALE_EPOCH, because a snapshot may be older than what the caller knows:
 *   repeated: ping, echo, pool_info, pool_rows, tell, decode, read, truncate;
 *   append and append_decode: TELL decides. An item whose layers all have the length before it is sent again,
 * one whose layers all have the length after it counts as done (append_decode then decodes it); any other
 * length ends the call with POSITION; not repeated, IO_ERROR with is_outcome_unknown: open, attach, close,
 * free, fork, pin, unpin, publish, match, cancel and all pipelined requests.
 */
TQKV_API enum tqkv_status tqkv_reconnect(struct tqkv_conn *conn, const struct tqkv_reconnect_params *params,
	uint32_t timeout_ms, struct tqkv_reconnect_report *report, struct tqkv_error *err);

/* Renews the lease of one session, or of all of this connection (NULL). STALE_EPOCH when the boot id changed.
 */
TQKV_API enum tqkv_status tqkv_ping(
	struct tqkv_conn *conn, struct tqkv_session *session, uint32_t timeout_ms, struct tqkv_error *err);
/* Sends the payload through a request slot and gets reply_bytes of it back, zeros appended: for benchmarks.
 */
TQKV_API enum tqkv_status tqkv_echo(struct tqkv_conn *conn, const void *payload, size_t payload_bytes,
	void *reply, size_t reply_bytes, uint32_t timeout_ms, struct tqkv_error *err);

/* ---- Pools ---- */

struct tqkv_pool_info {
	uint64_t fingerprint;
	uint32_t json_bytes; /* without the NUL */
	uint32_t n_pools;
};
enum tqkv_pool_rows {
	TQKV_POOL_ROTATION = 1,
	TQKV_POOL_K_CENTER = 2,
	TQKV_POOL_V_ROTATION = 3,
	TQKV_POOL_K_BASIS = 4,
	TQKV_POOL_V_BASIS = 5,
};
/*
 * The pool's canonical JSON, NUL-terminated. By name, or by index when `pool` is NULL. `json` may be NULL
 * when json_bytes_max is 0. TOO_LARGE: `info` is filled and says how long the text is.
 */
TQKV_API enum tqkv_status tqkv_pool_info(struct tqkv_conn *conn, const char *pool, uint32_t index, char *json,
	size_t json_bytes_max, struct tqkv_pool_info *info, uint32_t timeout_ms, struct tqkv_error *err);
/*
 * n_rows rows of row_floats numbers of a layer: the rotation matrix (head_dim rows of head_dim) of K or V;
 * K's centre; or the basis of K or V rows, which TQKV_Q_ROTATED and TQKV_OUT_ROTATED name: for each KV head a
 * matrix B with head_dim rows of head_dim. A query q is sent as B q, an output y is B^T y in the channels'
 * own basis.
 */
TQKV_API enum tqkv_status tqkv_pool_rows(struct tqkv_conn *conn, const char *pool, enum tqkv_pool_rows what,
	uint32_t layer, uint32_t n_rows, uint32_t row_floats, float *out, uint32_t timeout_ms,
	struct tqkv_error *err);
/*
 * Names the first member in which two canonical pool JSON texts differ, "layers[3].k: expected "tq4", got
 * "bf16"". False when they are equal.
 */
TQKV_API bool tqkv_pool_json_differs(
	const char *expected, const char *got, char *text, size_t text_bytes_max);

/* ---- Sessions ---- */

enum tqkv_open_flag {
	TQKV_OPEN_CLIENT_TABLES = 1 << 0, /* see tqkv_update_slots() */
};

/* Zeroed means the defaults, except the pool's name. */
struct tqkv_open_params {
	const char *pool;         /* ATTACH: may be NULL */
	const char *session_name; /* NULL: cannot be attached again. [A-Za-z0-9._:-], at most 128 bytes */
	const char *pool_json; /* (optional) canonical JSON the pool must have; a mismatch names the member */
	uint64_t fingerprint;  /* 0 = any */
	uint32_t lease_ms;     /* 0 = the server's */
	uint32_t reserve_blocks; /* 0 = on demand */
	uint32_t sequences_max;  /* 0 = the server's */
	uint32_t tokens_max;     /* per sequence; 0 = the pool's */
	uint16_t priority;       /* 0 (low) to 3 */
	uint16_t flags;          /* enum tqkv_open_flag */
};
struct tqkv_session_info {
	uint64_t handle; /* changes in tqkv_reconnect() */
	uint64_t fingerprint;
	uint32_t lease_ms; /* ping, or send something, at least three times as often */
	uint32_t reserved_blocks;
	uint32_t n_layers;
	uint32_t block_size;
	uint32_t sequences_max;
	uint32_t tokens_max;
	uint16_t q_heads, kv_heads, k_head_dim, v_head_dim;
};

/* FORMAT_MISMATCH: with pool_json given, the message names the member that differs. POOL_FULL and BUSY_RETRY
 * are tried again until the deadline, QUOTA is not. */
TQKV_API enum tqkv_status tqkv_open(struct tqkv_conn *conn, const struct tqkv_open_params *params,
	uint32_t timeout_ms, struct tqkv_session **out, struct tqkv_error *err);
/* Takes over a session by name; the connection that had it gets NOT_OWNER from then on. */
TQKV_API enum tqkv_status tqkv_attach(struct tqkv_conn *conn, const struct tqkv_open_params *params,
	uint32_t timeout_ms, struct tqkv_session **out, struct tqkv_error *err);
/* Ends the session and frees its sequences. The struct is gone whatever this returns. NULL is allowed. */
TQKV_API enum tqkv_status tqkv_close(
	struct tqkv_session *session, uint32_t timeout_ms, struct tqkv_error *err);
TQKV_API const struct tqkv_session_info *tqkv_session_info(const struct tqkv_session *session);
TQKV_API struct tqkv_conn *tqkv_session_conn(const struct tqkv_session *session);
/* NULL when it has none. */
TQKV_API const char *tqkv_session_name(const struct tqkv_session *session);

enum tqkv_sequence_state {
	TQKV_STATE_RESIDENT = 0,
	TQKV_STATE_SPILLED = 1,
	TQKV_STATE_EVICTED = 2,
};
struct tqkv_sequence {
	uint64_t sequence;
	uint32_t length_min, length_max; /* over the layers */
	uint32_t n_blocks, n_shared_blocks;
	uint16_t state;   /* enum tqkv_sequence_state */
	uint16_t flags;   /* TQKV_EVICTABLE */
	uint32_t n_exact; /* newest tokens of which every layer has the exact rows */
};
/*
 * The session's sequences from number sequence_from on, in ascending order, at most n_max; *next_sequence 0
 * says that there are no more. `lengths` may be NULL; else [n_max][n_layers]. Waits for everything sent
 * before it.
 */
TQKV_API enum tqkv_status tqkv_tell(struct tqkv_session *session, uint64_t sequence_from, uint32_t n_max,
	struct tqkv_sequence *sequences, uint32_t *lengths, uint32_t *n_out, uint64_t *next_sequence,
	uint32_t timeout_ms, struct tqkv_error *err);

/* ---- Rows ---- */

enum tqkv_dtype {
	TQKV_NONE = 0,
	TQKV_F32 = 1,
	TQKV_F16 = 2,
	TQKV_BF16 = 3,
	TQKV_PACKED = 16, /* the layer's row format */
};
enum tqkv_item_flag {
	TQKV_CREATE = 1 << 0, /* position 0, number unused */
	TQKV_EVICTABLE = 1 << 1,
};
enum tqkv_rows_flag {
	TQKV_LSE = 1 << 0,
	TQKV_Q_ROTATED = 1 << 1,
	TQKV_OUT_ROTATED = 1 << 2,
	TQKV_NO_SINKS = 1 << 3,
};
#define TQKV_POSITION_PLANNED 0xFFFFFFFFU /* DECODE, FORK: all tokens appended so far */

struct tqkv_item {
	uint64_t sequence; /* never 0 */
	uint32_t position; /* append: its length before; decode: the length seen; truncate: the new length;
			      fork: the child's length */
	uint32_t n_tokens; /* 0 in decode */
	uint32_t q_len;    /* 0 in append */
	uint32_t flags;    /* enum tqkv_item_flag */
};
/*
 * A number of sequences on a range of layers. Tokens are in item order in every layer:
 *   k [n_layers][tokens][kv_heads][k_head_dim], v [n_layers][tokens][kv_heads][v_head_dim],
 *   q [queries][q_heads][k_head_dim] (n_layers is 1 then).
 * Sizes are checked, so a wrong shape is an error and not a wild read.
 */
struct tqkv_rows {
	const struct tqkv_item *items;
	uint32_t n_items;
	uint32_t layer_first, n_layers;
	const void *k, *v, *q; /* NULL when the operation has none */
	uint64_t k_bytes, v_bytes, q_bytes;
	uint8_t k_dtype, v_dtype, q_dtype, out_dtype; /* enum tqkv_dtype; NONE where there are no rows */
	uint32_t flags;                               /* enum tqkv_rows_flag */
	float scale;                                  /* 0 = the pool's */
	uint32_t window;                              /* 0 = the pool's */
};
struct tqkv_item_result {
	uint64_t sequence;
	enum tqkv_status status;
	uint32_t length;   /* committed, least over the layers; on POSITION: what was expected */
	uint32_t n_tokens; /* committed by this call; less than asked only on failure */
	uint32_t q_len;
	uint32_t layer; /* first bad one, else 0xFFFF */
	uint32_t row;   /* first bad row of the item, else 0xFFFFFFFF */
	uint32_t retry_after_ms;
};
struct tqkv_timings { /* 0 unless TQKV_OPTION_TIMINGS; sums over the frames of a call */
	uint32_t recv_us, queue_us, copy_in_us, kernel_us, copy_out_us, total_us;
};
/* Set the first five members before the call; it fills what they point at, and the rest. */
struct tqkv_rows_result {
	struct tqkv_item_result *items; /* [n_items]; NULL = not wanted */
	void *out;                      /* [queries][q_heads][v_head_dim] of out_dtype; failed items: zeros */
	float *lse; /* [queries][q_heads], natural logarithm; failed items: -inf; NULL without LSE */
	uint64_t out_bytes_max, lse_bytes_max;
	uint32_t n_ok, n_failed;
	uint32_t n_frames;  /* sent, with repetitions */
	uint32_t n_retried; /* items that were sent again after a retryable refusal */
	struct tqkv_timings timings;
};

/*
 * Blocking row operations. Any number of items and tokens: what does not fit into a frame is split by
 * sequence and position (by layer only if one token of all layers does not fit) and sent pipelined. Items
 * that are refused with a retryable status are sent again, alone, with exponential back-off and full jitter,
 * not before the server's retry_after_ms, until the deadline would pass. QUOTA of an item is not: it is over
 * when somebody gives something back, which may be the caller, who waits.
 *
 * OK means that all frames were answered; look at n_failed. `result` is filled as far as things went also
 * when a call fails: an item's n_tokens tells how many of its tokens are known to be committed (on all layers
 * asked for). A split item is no longer committed whole or not at all; position + n_tokens is where to go on.
 */
TQKV_API enum tqkv_status tqkv_append(struct tqkv_session *session, const struct tqkv_rows *rows,
	uint32_t timeout_ms, struct tqkv_rows_result *result, struct tqkv_error *err);
TQKV_API enum tqkv_status tqkv_decode(struct tqkv_session *session, const struct tqkv_rows *rows,
	uint32_t timeout_ms, struct tqkv_rows_result *result, struct tqkv_error *err);
TQKV_API enum tqkv_status tqkv_append_decode(struct tqkv_session *session, const struct tqkv_rows *rows,
	uint32_t timeout_ms, struct tqkv_rows_result *result, struct tqkv_error *err);
/*
 * Attention over parts of one context, put together: outs[n_parts] are [n_rows][dim] of dtype (f32, f16,
 * bf16) and lses[n_parts] are [n_rows], of the same queries over each part, a row being one query head of one
 * query. Gives what attention over the whole gives: out of the same dtype, and lse unless NULL. Both may be
 * those of a part. A part that saw no token (lse -infinity) counts for nothing; no part: zeros and -infinity.
 *
 * At most one part may have been asked with sinks. With ALiBi every part counted distances from its own end:
 * take slope * (distance between the ends) off the log-sum-exp of an earlier part before. BAD_ARG; BAD_VALUE
 * when a log-sum-exp is NaN or +infinity, with out and lse untouched.
 */
TQKV_API enum tqkv_status tqkv_merge(uint32_t n_parts, const void *const *outs, const float *const *lses,
	uint64_t n_rows, uint32_t dim, enum tqkv_dtype dtype, void *out, float *lse, struct tqkv_error *err);
/* Of each item only sequence and position (the new length) count. `result->items` as above. */
TQKV_API enum tqkv_status tqkv_truncate(struct tqkv_session *session, const struct tqkv_item *items,
	uint32_t n_items, uint32_t timeout_ms, struct tqkv_rows_result *result, struct tqkv_error *err);
/* Of each item only the sequence counts. */
TQKV_API enum tqkv_status tqkv_free_sequences(struct tqkv_session *session, const struct tqkv_item *items,
	uint32_t n_items, uint32_t timeout_ms, struct tqkv_rows_result *result, struct tqkv_error *err);
/* One sequence; the item's status is the call's. */
TQKV_API enum tqkv_status tqkv_free_sequence(
	struct tqkv_session *session, uint64_t sequence, uint32_t timeout_ms, struct tqkv_error *err);

/*
 * Lets sequences leave the pool for a slower tier, or brings them back before they are needed; of each item
 * only the sequence counts. Returns when the moves have begun. Whoever needs a sequence that is out waits for
 * it as for a busy server.
 */
TQKV_API enum tqkv_status tqkv_spill(struct tqkv_session *session, const struct tqkv_item *items,
	uint32_t n_items, uint32_t timeout_ms, struct tqkv_rows_result *result, struct tqkv_error *err);
TQKV_API enum tqkv_status tqkv_prefetch(struct tqkv_session *session, const struct tqkv_item *items,
	uint32_t n_items, uint32_t timeout_ms, struct tqkv_rows_result *result, struct tqkv_error *err);

/*
 * Of each item only sequence (the child, a new id) and position (its length) count; parents[n_items] are the
 * sequences that they come from. A child has the first `position` tokens of its parent on every layer, and
 * shares their memory until one of the two writes there.
 */
TQKV_API enum tqkv_status tqkv_fork(struct tqkv_session *session, const struct tqkv_item *items,
	const uint64_t *parents, uint32_t n_items, uint32_t timeout_ms, struct tqkv_rows_result *result,
	struct tqkv_error *err);
/* One child; the item's status is the call's. *length (NULL allowed): the child's. */
TQKV_API enum tqkv_status tqkv_fork_sequence(struct tqkv_session *session, uint64_t child, uint64_t parent,
	uint32_t position, uint32_t timeout_ms, uint32_t *length, struct tqkv_error *err);

/* Of each item only the sequence counts. Pins are counted; a pinned sequence is not evicted. BAD_STATE: it
 * has none. */
TQKV_API enum tqkv_status tqkv_pin(struct tqkv_session *session, const struct tqkv_item *items,
	uint32_t n_items, uint32_t timeout_ms, struct tqkv_rows_result *result, struct tqkv_error *err);
TQKV_API enum tqkv_status tqkv_unpin(struct tqkv_session *session, const struct tqkv_item *items,
	uint32_t n_items, uint32_t timeout_ms, struct tqkv_rows_result *result, struct tqkv_error *err);

/* ---- Published prefixes ---- */

/* Whose rows: the ids of all tokens from the first one on, and what else they depend on. */
struct tqkv_prefix {
	const uint32_t *tokens;
	uint32_t n_tokens;
	const char *adapter, *salt; /* at most 64 bytes each; NULL = none */
	uint32_t ttl_ms;            /* PUBLISH: after so long without use they go; 0 = when memory is short */
	bool is_evictable;          /* MATCH: the new sequence may be evicted */
};
struct tqkv_prefix_result {
	uint32_t n_tokens, n_blocks; /* published or found: whole blocks */
	uint32_t n_blocks_new;       /* PUBLISH: not published before */
};
/* Offers the whole blocks among the sequence's first n_tokens tokens to other sequences of the tenant. */
TQKV_API enum tqkv_status tqkv_publish(struct tqkv_session *session, uint64_t sequence,
	const struct tqkv_prefix *prefix, uint32_t timeout_ms, struct tqkv_prefix_result *result,
	struct tqkv_error *err);
/*
 * A new sequence that begins with the longest published prefix of the tokens, without its rows being sent;
 * with sequence 0 it is only told. OK with n_tokens 0: there is none, and no sequence was made.
 */
TQKV_API enum tqkv_status tqkv_match(struct tqkv_session *session, uint64_t sequence,
	const struct tqkv_prefix *prefix, uint32_t timeout_ms, struct tqkv_prefix_result *result,
	struct tqkv_error *err);

/*
 * Sessions opened with TQKV_OPEN_CLIENT_TABLES: the caller manages blocks 0 to reserve_blocks - 1 itself, and
 * these are the only row operations. One frame each, nothing is split (TOO_LARGE). The item's status is the
 * call's; *bad_row (NULL allowed) is what it names, else 0xFFFFFFFF.
 *
 * Stores token i in slots[i] = block * block_size + offset on all layers of the range. A negative slot skips
 * its token; one beyond the blocks refuses everything (SLOT_OUT_OF_RANGE, bad_row is the token); of two
 * tokens with the same slot the later one stays. Shapes and sizes as in struct tqkv_rows; K and V are not
 * split.
 */
struct tqkv_slots {
	uint32_t layer_first, n_layers, n_tokens;
	uint8_t k_dtype, v_dtype; /* f32, f16, bf16; PACKED: the stored bytes */
	const void *k, *v;
	uint64_t k_bytes, v_bytes;
	const int64_t *slots; /* [n_tokens] */
};
TQKV_API enum tqkv_status tqkv_update_slots(struct tqkv_session *session, const struct tqkv_slots *slots,
	uint32_t timeout_ms, uint32_t *bad_row, struct tqkv_error *err);
/*
 * Token t of sequence s lies in block table[s * table_stride + t / block_size]; seen[s] tokens of it are seen
 * by the last of q_len query rows, one less by each row before. An entry that is not one of the blocks
 * refuses everything (bad_row is its place in the table).
 */
struct tqkv_table {
	uint32_t layer, n_sequences, q_len, table_stride;
	uint8_t q_dtype, out_dtype;
	uint32_t flags;       /* enum tqkv_rows_flag */
	const void *q;        /* [n_sequences][q_len][q_heads][k_head_dim] */
	const int32_t *table; /* [n_sequences][table_stride] */
	const uint32_t *seen; /* [n_sequences] */
	float scale;          /* 0 = the pool's */
	uint32_t window;      /* 0 = the pool's */
	void *out;            /* [n_sequences][q_len][q_heads][v_head_dim] of out_dtype */
	float *lse;           /* [n_sequences][q_len][q_heads] with LSE, else NULL */
};
TQKV_API enum tqkv_status tqkv_decode_table(struct tqkv_session *session, const struct tqkv_table *table,
	uint32_t timeout_ms, uint32_t *bad_row, struct tqkv_error *err);

enum tqkv_read_flag {
	TQKV_READ_EXACT = 1 << 0,
};
struct tqkv_read {
	uint64_t sequence;
	uint32_t layer_first, n_layers;
	uint32_t position, n_tokens;
	uint8_t k_dtype, v_dtype; /* NONE = not wanted; PACKED = the stored bytes */
	uint16_t flags;           /* enum tqkv_read_flag */
	void *k, *v;              /* [n_layers][n_tokens][kv_heads][row], layers back to back */
	uint64_t k_bytes_max, v_bytes_max;
	uint64_t k_bytes, v_bytes; /* out: bytes written */
	uint64_t fingerprint;      /* out */
};
/* Any size; asks in as many ranges as the frame bound needs. On failure the buffers hold garbage. */
TQKV_API enum tqkv_status tqkv_read(
	struct tqkv_session *session, struct tqkv_read *read, uint32_t timeout_ms, struct tqkv_error *err);

/* ---- Pipelining ---- */

enum tqkv_op {
	TQKV_OP_PING = 2,
	TQKV_OP_TELL = 20,
	TQKV_OP_APPEND = 32,
	TQKV_OP_DECODE = 33,
	TQKV_OP_APPEND_DECODE = 34,
	TQKV_OP_READ = 35,
	TQKV_OP_TRUNCATE = 36,
	TQKV_OP_FREE = 37,
	TQKV_OP_FORK = 38,
	TQKV_OP_PIN = 50,
	TQKV_OP_UNPIN = 51,
	TQKV_OP_SPILL = 52,
	TQKV_OP_PREFETCH = 53,
};
/*
 * One frame each, sent without waiting for its reply. Nothing is split (TOO_LARGE) or repeated. timeout_ms 0:
 * no deadline at the server. While the server's limits of HELLO on requests or bytes in flight are reached,
 * the call reads replies (kept for tqkv_wait()) and waits for room, at most timeout_ms. LIMIT: requests_max
 * replies wait to be fetched. The session must live until the reply is fetched or forgotten.
 */
TQKV_API enum tqkv_status tqkv_submit_rows(struct tqkv_session *session, enum tqkv_op op,
	const struct tqkv_rows *rows, uint32_t timeout_ms, uint64_t *request_id, struct tqkv_error *err);
TQKV_API enum tqkv_status tqkv_submit_append(struct tqkv_session *session, const struct tqkv_rows *rows,
	uint32_t timeout_ms, uint64_t *request_id, struct tqkv_error *err);
TQKV_API enum tqkv_status tqkv_submit_decode(struct tqkv_session *session, const struct tqkv_rows *rows,
	uint32_t timeout_ms, uint64_t *request_id, struct tqkv_error *err);
TQKV_API enum tqkv_status tqkv_submit_append_decode(struct tqkv_session *session,
	const struct tqkv_rows *rows, uint32_t timeout_ms, uint64_t *request_id, struct tqkv_error *err);
/* TRUNCATE or FREE */
TQKV_API enum tqkv_status tqkv_submit_items(struct tqkv_session *session, enum tqkv_op op,
	const struct tqkv_item *items, uint32_t n_items, uint32_t timeout_ms, uint64_t *request_id,
	struct tqkv_error *err);
TQKV_API enum tqkv_status tqkv_submit_fork(struct tqkv_session *session, const struct tqkv_item *items,
	const uint64_t *parents, uint32_t n_items, uint32_t timeout_ms, uint64_t *request_id,
	struct tqkv_error *err);
/* The buffers of `read` are not used: the reply has its own. */
TQKV_API enum tqkv_status tqkv_submit_read(struct tqkv_session *session, const struct tqkv_read *read,
	uint32_t timeout_ms, uint64_t *request_id, struct tqkv_error *err);
/* One page of at most min(n_max, items_max) sequences. */
TQKV_API enum tqkv_status tqkv_submit_tell(struct tqkv_session *session, uint64_t sequence_from,
	uint32_t n_max, bool per_layer, uint32_t timeout_ms, uint64_t *request_id, struct tqkv_error *err);

/* What a reply holds depends on the operation; the rest is zero. Pointers are into the library's memory. */
struct tqkv_reply {
	uint64_t request_id; /* 0: no reply was fetched */
	uint16_t op;         /* enum tqkv_op */
	uint32_t n_items;
	const struct tqkv_item_result *items; /* row operations, TRUNCATE, FREE, FORK */
	uint32_t n_ok, n_failed;
	uint32_t n_q_total;
	const void *out;
	uint64_t out_bytes;
	const float *lse; /* NULL unless asked for */
	struct tqkv_timings timings;
	const void *k, *v; /* READ */
	uint64_t k_bytes, v_bytes;
	uint32_t n_tokens;
	uint64_t fingerprint;
	const struct tqkv_sequence *sequences; /* TELL, n_items of them */
	const uint32_t *lengths;               /* TELL per layer: [n_items][n_layers] */
	uint64_t next_sequence;
	const void *payload; /* PING with echo, POOL_INFO */
	uint64_t payload_bytes;
};
#define TQKV_ANY 0 /* tqkv_wait(): whichever reply came first */

/*
 * Waits for one reply and fetches it. `reply` is valid until the next call with this connection. Replies come
 * in any order. A request that failed as a whole returns its status with reply->request_id set. DEADLINE with
 * request_id 0: none came in time; wait again, or tqkv_forget(). NOT_FOUND: no such request is outstanding.
 */
TQKV_API enum tqkv_status tqkv_wait(struct tqkv_conn *conn, uint64_t request_id, uint32_t timeout_ms,
	struct tqkv_reply *reply, struct tqkv_error *err);
/* Sends and receives what is possible now, without waiting. The number of replies that can be fetched. */
TQKV_API uint32_t tqkv_poll(struct tqkv_conn *conn);
/* Nobody will fetch this reply: it is thrown away when it comes. An unknown number is ignored. */
TQKV_API void tqkv_forget(struct tqkv_conn *conn, uint64_t request_id);

enum tqkv_cancel_outcome {
	TQKV_CANCEL_DROPPED = 0,
	TQKV_CANCEL_TOO_LATE = 1,
	TQKV_CANCEL_UNKNOWN = 2,
};
/* Asks the server to drop a request. It is still answered (CANCELLED if dropped), so fetch or forget it. */
TQKV_API enum tqkv_status tqkv_cancel(struct tqkv_conn *conn, uint64_t request_id, uint32_t timeout_ms,
	enum tqkv_cancel_outcome *outcome, struct tqkv_error *err);

#ifdef __cplusplus
}
#endif

#endif
