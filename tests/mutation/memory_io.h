/*
 * Memory io: core/io.h without sockets, beside a clock that stands still until it is told to go on and a
 * random source with a fixed start. What a peer writes is received, what is sent can be read, nothing happens
 * by itself: the same calls give the same run. For the fuzz target of the server and for the mutation
 * scenario; one thread.
 *
 * Breaking the contract of core/io.h (two receives at a time, a buffer given back twice, ...) ends the
 * process. A read-ahead buffer is memory of its own while the server has it, so that the address sanitizer
 * sees late uses.
 */
#ifndef TESTS_MUTATION_MEMORY_IO_H
#define TESTS_MUTATION_MEMORY_IO_H

#include <stdbool.h>
#include <stdint.h>

#include "core/clock.h"
#include "core/io.h"

#define MEM_CONNS 8u
#define MEM_FILES 4u

struct mem_clock {
	struct kv_clock base;
	uint64_t now_ns;
};

struct mem_random {
	struct kv_random base;
	uint64_t state;
};

/* Bytes that grow as needed. */
struct mem_bytes {
	uint8_t *data;
	uint64_t n_bytes, n_bytes_max;
};
void mem_bytes_add(struct mem_bytes *bytes, const void *data, uint64_t n_bytes);
/* Forgets the first n_bytes. */
void mem_bytes_drop(struct mem_bytes *bytes, uint64_t n_bytes);

enum mem_phase { MEM_FREE, MEM_WAITS, MEM_OPEN, MEM_CLOSING };
enum mem_recv { MEM_RECV_NONE, MEM_RECV_AHEAD, MEM_RECV_INTO };

struct kv_io_conn {
	enum mem_phase phase;
	void *user;
	struct kv_io_peer peer;
	/* the peer's side */
	struct mem_bytes in;  /* written, not received yet */
	struct mem_bytes out; /* sent by the server, not looked at yet */
	uint32_t chunk_bytes; /* most that one receive brings; 0: no bound */
	bool is_ended;        /* nothing follows `in` */
	bool is_reset;
	bool is_reading; /* false: a send stays open */
	bool is_late;    /* after close() its open operations complete, with data where there is some */
	/* posted by the server */
	enum mem_recv recv;
	uint8_t *recv_buf;
	uint32_t recv_bytes;
	bool is_sending;
	struct iovec iov[KV_IO_IOV_MAX];
	uint32_t n_iov;
};

/* A file; there is one directory, and whatever is opened as one is it. */
struct mem_file {
	char path[512]; /* empty: there is none */
	struct mem_bytes bytes;
};

struct mem_io {
	struct kv_io base;
	struct mem_file files[MEM_FILES];
	struct kv_io_file *posted[KV_IO_FILES_MAX];
	uint32_t n_posted, n_files_open;
	struct mem_clock *clock;
	struct kv_io_conn conns[MEM_CONNS];
	uint32_t n_ahead_max, n_ahead_out;
	uint8_t **ahead; /* [n_ahead_max]; NULL: the server does not have it */
	bool is_listening;
};

void mem_clock_init(struct mem_clock *clock);
void mem_random_init(struct mem_random *random);
/* clock outlives it. */
void mem_io_init(struct mem_io *io, struct mem_clock *clock, uint32_t n_ahead_max);
/* After the server is gone; everything that was open is forgotten. */
void mem_io_finish(struct mem_io *io);

/* A peer connects; false: its place is taken. uid UINT32_MAX: over TCP. */
bool mem_connect(struct mem_io *io, uint32_t conn_idx, uint32_t uid);
/* By path, or NULL. */
struct mem_file *mem_file_find(struct mem_io *io, const char *path);
/* Makes or replaces it. */
struct mem_file *mem_file_put(struct mem_io *io, const char *path, const void *bytes, uint64_t n_bytes);
/* Anything left for wait() to report? */
bool mem_io_is_quiet(const struct mem_io *io);

#endif
