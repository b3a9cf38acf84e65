/*
 * Sockets behind a table, completion style: post an operation, get one event when it is over.
 *
 * Implementations: server/io_uring.c, server/io_epoll.c (same events, same order of guarantees) and the
 * simulation's in-memory network. Everything here is called from the loop thread only.
 *
 * Per connection at most one receive and one send are open at a time. Memory handed to recv_into() and send()
 * stays untouched by the caller until the event (or CLOSED) arrives. After close() exactly one CLOSED
 * follows, once nothing of the connection is in flight any more; no other event of it comes after that.
 * Events that wait() had written into the caller's array before the close stay valid, and a read-ahead buffer
 * among them is the caller's.
 *
 * Read-ahead: an idle connection owns no memory. recv_ahead() completes into a buffer of KV_IO_AHEAD_BYTES
 * that is taken from one shared ring at the moment data arrives; the caller gives it back with
 * ahead_return(). While the ring is empty such receives simply wait.
 *
 * Files: an operation is posted and answered by one FILE event, in any order; no call of the loop thread ever
 * waits for a disk. io_uring does them itself, epoll on a thread of its own that starts with the first one.
 */
#ifndef CORE_IO_H
#define CORE_IO_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/uio.h>

#include "core/error.h"

/* 16 KiB: holds the largest header, op struct and items (12 KiB), see PROTOCOL 1. */
#define KV_IO_AHEAD_BYTES 16384u
#define KV_IO_IOV_MAX     3u
#define KV_IO_FILES_MAX   16u

struct kv_io_conn; /* one accepted connection; owned by the io */

enum kv_io_kind {
	KV_IO_ACCEPTED, /* conn, peer; nothing is posted on it yet, user is NULL */
	KV_IO_RECEIVED, /* result > 0 bytes, 0 = end of stream, < 0 = -errno */
	KV_IO_SENT,     /* result = 0: everything was sent; < 0 = -errno */
	KV_IO_CLOSED,   /* conn is invalid from here on */
	KV_IO_WATCHED,  /* a watched descriptor became readable; its eventfd counter has been read */
	KV_IO_FILE,     /* file: the operation is over, its result says how */
};

enum kv_io_transport { KV_IO_UNIX, KV_IO_TCP };

struct kv_io_peer {
	enum kv_io_transport transport;
	uint32_t uid;     /* Unix socket: the peer's user id; TCP: UINT32_MAX */
	char address[64]; /* "unix:uid 1000 pid 77" or "127.0.0.1:4711", for logs */
};

enum kv_io_file_kind {
	KV_IO_FILE_OPEN,   /* path, open_flags: result is a descriptor, n_file_bytes its size */
	KV_IO_FILE_READ,   /* fd, bytes, n_bytes, offset: result is 1..n_bytes, 0 at the end */
	KV_IO_FILE_WRITE,  /* the same; result is 1..n_bytes */
	KV_IO_FILE_SYNC,   /* fd: everything written is on the disk */
	KV_IO_FILE_RENAME, /* path becomes path_to, which is replaced */
	KV_IO_FILE_UNLINK, /* path */
};
/*
 * One operation on a file. The caller's from posting to its event: neither it nor its paths and bytes may
 * change or go away meanwhile. OPEN takes regular files, or a directory when open_flags has O_DIRECTORY;
 * anything else (a FIFO, a device) is -EINVAL and never blocks. Files are made with mode 0600.
 */
struct kv_io_file {
	enum kv_io_file_kind kind;
	int fd, open_flags;
	const char *path, *path_to;
	uint8_t *bytes;
	uint32_t n_bytes;
	uint64_t offset;
	int64_t result; /* negative: -errno */
	uint64_t n_file_bytes;
	void *user;
	struct kv_io_file *next; /* the io's while posted */
};

struct kv_io_event {
	enum kv_io_kind kind;
	int64_t result;
	struct kv_io_conn *conn;
	void *user;              /* what set_user() or watch() was given */
	uint8_t *ahead;          /* RECEIVED after recv_ahead() with result > 0: the buffer, else NULL */
	uint32_t ahead_idx;      /* to be handed to ahead_return() */
	struct kv_io_peer peer;  /* ACCEPTED */
	struct kv_io_file *file; /* FILE */
};

/* Where to listen: unix:PATH or tcp:HOST:PORT (port 0 picks a free one; IPv6 hosts in brackets). */
struct kv_io_address {
	enum kv_io_transport transport;
	char path[108]; /* unix */
	char host[256]; /* tcp */
	uint16_t port;
	uint32_t socket_mode; /* unix: mode of the socket file, 0660 by default */
};

struct kv_io;
struct kv_io_ops {
	const char *name; /* "io_uring", "epoll", "sim" */
	/* Accepts from then on. bound: text of what was bound, with the real port. IO_ERROR with the reason
	 * otherwise. */
	enum kv_status (*listen)(struct kv_io *io, const struct kv_io_address *address, char *bound,
		uint32_t bound_bytes_max, struct kv_error *err);
	/* Closes all listeners (and removes socket files); established connections go on. */
	void (*stop_listening)(struct kv_io *io);
	void (*set_user)(struct kv_io *io, struct kv_io_conn *conn, void *user);
	void (*recv_ahead)(struct kv_io *io, struct kv_io_conn *conn);
	/* Completes with 1..n_bytes bytes as soon as some are there. */
	void (*recv_into)(struct kv_io *io, struct kv_io_conn *conn, void *buf, uint32_t n_bytes);
	void (*ahead_return)(struct kv_io *io, uint32_t ahead_idx);
	/* iov (at most KV_IO_IOV_MAX parts) is copied; completes when all of it is with the kernel. */
	void (*send)(struct kv_io *io, struct kv_io_conn *conn, const struct iovec iov[], uint32_t n_iov);
	/*
	 * While a send is open: bytes of it that the kernel did not get yet, and those that wait in the
	 * kernel for the peer, as far as it tells. It stands still exactly while the peer takes nothing.
	 */
	uint64_t (*unsent_bytes)(struct kv_io *io, const struct kv_io_conn *conn);
	void (*close)(struct kv_io *io, struct kv_io_conn *conn);
	/* Reports an eventfd whenever it becomes readable, until destroy. */
	enum kv_status (*watch)(struct kv_io *io, int fd, void *user, struct kv_error *err);
	/* Ends with one FILE event, also when it fails at once. At most KV_IO_FILES_MAX at a time. */
	void (*file_post)(struct kv_io *io, struct kv_io_file *file);
	/* Nothing is posted on it. */
	void (*file_close)(struct kv_io *io, int fd);
	/* Who does the work: "io_uring", "a thread". */
	const char *file_path;
	/*
	 * Waits at most timeout_ns (0: do not wait, negative: for ever) and writes up to n_events_max (at
	 * least 2) events. May come back early with nothing. Returns their number; 0 on timeout or an
	 * interrupting signal; negative errno when the io itself broke.
	 */
	int (*wait)(struct kv_io *io, int64_t timeout_ns, struct kv_io_event events[], uint32_t n_events_max);
	/* NULL allowed. Closes everything that is still open. */
	void (*destroy)(struct kv_io *io);
};
struct kv_io {
	const struct kv_io_ops *ops;
};

/* Files behind a table. read_all(): the whole file of at most n_bytes_max bytes, zero byte behind it;
 * kv_free() it. */
struct kv_files {
	enum kv_status (*read_all)(
		const char *path, uint64_t n_bytes_max, char **data, uint64_t *n_bytes, struct kv_error *err);
};
const struct kv_files *kv_files_system(void);

#endif
