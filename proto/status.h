/*
 * Status: the one table of what can be answered.
 *
 * A row says the name, the number on the wire, what the failure kills (the caller tears down exactly that),
 * whether trying again may help, the HTTP code of the control API, and the text that people read. Wire, HTTP
 * and log take their words from here, so they cannot drift; a test compares the rows with PROTOCOL.md.
 *
 * Numbers from 900 on never leave the process: they say why something could not be made at start.
 * Includes nothing, so that every folder may include it.
 */
#ifndef PROTO_STATUS_H
#define PROTO_STATUS_H

/* What a failure kills, smallest first. The numbers are those of the frame-error struct. */
enum kv_scope {
	KV_SCOPE_NONE = 0,
	KV_SCOPE_ITEM = 1,
	KV_SCOPE_REQUEST = 2,
	KV_SCOPE_SESSION = 3,
	KV_SCOPE_CONN = 4,
	KV_SCOPE_DAEMON = 5,
};

/* X(name, wire number, scope, retryable, HTTP code, text) */
#define KV_STATUS_MAP(X)                                                                 \
	X(OK, 0, NONE, 0, 200, "ok")                                                     \
	X(BAD_MAGIC, 100, CONN, 0, 500, "not a tqkv frame")                              \
	X(VERSION_UNSUPPORTED, 101, CONN, 0, 500, "protocol version not supported")      \
	X(BAD_CRC, 102, CONN, 0, 500, "checksum does not match")                         \
	X(TOO_LARGE, 103, CONN, 0, 413, "larger than the limit")                         \
	X(BAD_FRAME, 104, CONN, 0, 500, "malformed frame")                               \
	X(UNSUPPORTED, 105, REQUEST, 0, 422, "not supported")                            \
	X(BAD_ARG, 106, REQUEST, 0, 400, "bad argument")                                 \
	X(BAD_VALUE, 107, ITEM, 0, 400, "a row holds a value that cannot be stored")     \
	X(FORMAT_MISMATCH, 108, REQUEST, 0, 422, "pool fingerprint differs")             \
	X(SLOT_OUT_OF_RANGE, 109, REQUEST, 0, 500, "slot outside the pool")              \
	X(UNAUTHENTICATED, 200, CONN, 0, 401, "not authenticated")                       \
	X(FORBIDDEN, 201, REQUEST, 0, 403, "not allowed")                                \
	X(NOT_FOUND, 300, ITEM, 0, 404, "not found")                                     \
	X(STALE_HANDLE, 301, SESSION, 0, 404, "handle of a closed session")              \
	X(STALE_EPOCH, 302, SESSION, 0, 410, "handle of an earlier start of the daemon") \
	X(SESSION_EXPIRED, 303, SESSION, 0, 410, "the session's lease ran out")          \
	X(EVICTED, 304, ITEM, 0, 410, "the sequence was evicted")                        \
	X(NOT_OWNER, 305, REQUEST, 0, 500, "another connection owns the session")        \
	X(EXISTS, 306, ITEM, 0, 409, "already exists")                                   \
	X(BAD_STATE, 307, REQUEST, 0, 409, "not possible in this state")                 \
	X(POSITION, 308, ITEM, 0, 500, "position is not the sequence's length")          \
	X(LEN_LIMIT, 309, ITEM, 0, 500, "sequence would exceed tokens_max")              \
	X(WINDOW_GONE, 310, ITEM, 0, 500, "the window reaches freed blocks")             \
	X(POOL_FULL, 400, ITEM, 1, 503, "no free block")                                 \
	X(QUOTA, 401, ITEM, 1, 429, "quota exceeded")                                    \
	X(BUSY_RETRY, 402, REQUEST, 1, 503, "busy")                                      \
	X(LIMIT, 403, REQUEST, 0, 429, "limit reached")                                  \
	X(DRAINING, 404, REQUEST, 0, 503, "the daemon is draining")                      \
	X(SLOW_CONSUMER, 405, CONN, 0, 500, "the peer is too slow")                      \
	X(INTERNAL, 500, REQUEST, 0, 500, "internal error")                              \
	X(DEVICE_LOST, 501, DAEMON, 0, 500, "device lost")                               \
	X(DEADLINE, 502, REQUEST, 1, 500, "deadline passed")                             \
	X(CANCELLED, 503, REQUEST, 0, 500, "cancelled")                                  \
	X(CORRUPT, 504, REQUEST, 0, 500, "data is corrupt")                              \
	X(NO_MEMORY, 900, DAEMON, 0, 507, "out of memory")                               \
	X(IO_ERROR, 901, DAEMON, 0, 500, "input or output failed")                       \
	X(BAD_CONFIG, 902, DAEMON, 0, 400, "configuration refused")                      \
	X(UNAVAILABLE, 903, DAEMON, 0, 500, "not available on this machine")

enum kv_status {
#define KV_STATUS_ENUM(name, number, scope, retryable, http, text) KV_##name = (number),
	KV_STATUS_MAP(KV_STATUS_ENUM)
#undef KV_STATUS_ENUM
};

#if defined(__GNUC__)
#define KV_MUST_CHECK __attribute__((warn_unused_result))
#else
#define KV_MUST_CHECK
#endif

/* One row of the table; unknown numbers give the row of INTERNAL. Never NULL. */
struct kv_status_row {
	const char *name; /* "POOL_FULL" */
	const char *text; /* "no free block" */
	unsigned short number;
	unsigned short http;
	unsigned char scope; /* enum kv_scope */
	unsigned char is_retryable;
};
const struct kv_status_row *kv_status_row(unsigned number);
static inline const char *kv_status_name(unsigned number)
{
	return kv_status_row(number)->name;
}

#endif
