/*
 * Listening sockets of both io implementations.
 *
 * A Unix socket comes with a lock file PATH.lock, held with flock() as long as the listener lives, so that
 * two daemons cannot take the path from each other, and a socket file that a killed daemon left behind is
 * replaced. What is at the path and is no socket is never removed. Loop thread only; umask is set for a
 * moment, so nobody else may create files then.
 */
#ifndef SERVER_IO_LISTENER_H
#define SERVER_IO_LISTENER_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "core/error.h"
#include "core/io.h"

struct srv_io_listener {
	int fd; /* listening; -1 when closed */
	int lock_fd;
	enum kv_io_transport transport;
	char path[108]; /* unix */
	dev_t socket_dev;
	ino_t socket_ino;
	bool is_armed; /* the implementation's: events or an accept are wanted of it */
};

/* IO_ERROR says what is in the way. bound: "unix:PATH" or "tcp:HOST:PORT" with the real port. */
KV_MUST_CHECK enum kv_status srv_io_listener_open(struct srv_io_listener *listener,
	const struct kv_io_address *address, char *bound, uint32_t bound_bytes_max, struct kv_error *err);
/* Refuses new connections from here on, removes the socket and the lock file. Closed ones are left alone. */
void srv_io_listener_close(struct srv_io_listener *listener);
/* Who is at the other end of an accepted socket. */
void srv_io_peer_fill(int fd, enum kv_io_transport transport, struct kv_io_peer *peer);

#endif
