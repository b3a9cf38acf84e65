/*
 * Private to the io_uring implementation: io_uring.c makes it, posts operations and ends it; io_uring_turn.c
 * submits, handles completions and fills the caller's array.
 */
#ifndef SERVER_IO_URING_H
#define SERVER_IO_URING_H

#include <liburing.h>

#include "core/checked.h"
#include "server/io_common.h"

#define SRV_IO_URING_TAG_SHIFT   32u
#define SRV_IO_URING_AHEAD_GROUP 0 /* id of the one ring of buffers */

/* NOBODY and WATCH_POLL are not counted as in flight: their completions say nothing that matters. */
enum uring_tag {
	TAG_RECV,
	TAG_SEND,
	TAG_CANCEL,
	TAG_ACCEPT,
	TAG_WATCH,
	TAG_WATCH_POLL,
	TAG_FILE,
	TAG_NOBODY
};

struct uring_watch {
	int fd; /* -1: it broke and is not armed again */
	void *user;
	uint64_t count; /* where the kernel reads the eventfd to */
	bool is_armed;
};

struct uring_io {
	struct kv_io base;
	struct io_uring ring;
	bool has_ring;
	bool is_multishot_accept;
	bool is_ending;
	struct srv_io_conns conns;
	struct kv_list marked;  /* connections with something to submit */
	struct kv_list waiting; /* receives without a read-ahead buffer, although something is there */
	struct kv_list closed;  /* CLOSED to be reported */
	uint8_t *ahead;         /* [n_ahead, KV_IO_AHEAD_BYTES] */
	struct io_uring_buf_ring *ahead_ring;
	uint64_t ahead_ring_bytes;
	int ahead_mask;
	uint32_t *held; /* stack of buffers that came back while somebody is queued */
	uint32_t n_ahead, n_held;
	uint32_t n_in_ring; /* minus those in completions that are not handled yet */
	struct srv_io_listener listeners[SRV_IO_LISTENERS_MAX];
	uint32_t n_listeners;
	uint64_t accept_resume_ns; /* 0: not paused */
	struct uring_watch watches[SRV_IO_WATCHES_MAX];
	uint32_t n_watches;
	struct kv_io_file *files_first, *files_last; /* posted, not submitted */
	struct kv_io_file *files[KV_IO_FILES_MAX];   /* submitted; NULL: a free place */
	uint32_t n_in_flight;                        /* of everything; a multishot counts until it ends */
};

static inline struct uring_io *srv_io_uring_from_base(struct kv_io *io)
{
	return kv_container_of(io, struct uring_io, base);
}

/* Puts the connection on the list that the next wait() submits. */
void srv_io_uring_mark(struct uring_io *io, struct kv_io_conn *conn);
/* Nothing of the connection is in flight any more: closes the descriptor and reports CLOSED. */
void srv_io_uring_finish_close(struct uring_io *io, struct kv_io_conn *conn);
/* A buffer that nobody uses any more: to the ring, or to be filled for the first that waits. */
void srv_io_uring_ahead_give(struct uring_io *io, uint32_t ahead_idx);
void srv_io_uring_ahead_to_ring(struct uring_io *io, uint32_t ahead_idx);
/* Cancels what was submitted with this tag and index; silently nothing when there is no room to say so. */
void srv_io_uring_cancel(struct uring_io *io, enum uring_tag tag, uint32_t idx);
/* Submits posted file operations; false: some found no place and stay posted. */
bool srv_io_uring_submit_files(struct uring_io *io);
/* True when n entries are free, if need be after submitting. */
bool srv_io_uring_has_sqes(struct uring_io *io, unsigned n);
static inline uint64_t srv_io_uring_tagged(enum uring_tag tag, uint32_t idx)
{
	return (uint64_t)tag << SRV_IO_URING_TAG_SHIFT | idx;
}
/* io_uring_file.c */
void srv_io_uring_file_post(struct kv_io *base, struct kv_io_file *file);
void srv_io_uring_file_done(struct uring_io *io, uint32_t idx, int32_t res, struct srv_io_out *out);
/* kv_io_ops.wait */
int srv_io_uring_wait(
	struct kv_io *base, int64_t timeout_ns, struct kv_io_event events[], uint32_t n_events_max);

#endif
