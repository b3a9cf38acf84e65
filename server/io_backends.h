/*
 * The two implementations of core/io.h that talk to the kernel. Same events, same guarantees; which one runs
 * is a matter of what the machine admits. Made and used by the loop thread only: io_uring binds its ring to
 * the thread that makes it.
 *
 * What both add to the contract of core/io.h:
 * - After close() the only new event of a connection is CLOSED. Events that wait() had already written into
 * the caller's array before the close stay valid, and a read-ahead buffer among them is still the caller's.
 * - Connections beyond n_connections_max are accepted and closed at once: the peer reads an end of stream
 * instead of waiting in the backlog for ever.
 * - When the process runs out of descriptors, accepting pauses until a connection closes, at most 100 ms at a
 * time.
 * - All memory is taken by the create function; nothing is allocated afterwards.
 */
#ifndef SERVER_IO_BACKENDS_H
#define SERVER_IO_BACKENDS_H

#include <stdint.h>

#include "core/error.h"
#include "core/io.h"

/* Upper bounds of the two sizes, so that an index fits beside a tag and a buffer id fits 16 bits. */
#define SRV_IO_AHEAD_BUFFERS_MAX 32768u
#define SRV_IO_CONNECTIONS_MAX   (1u << 20)
#define SRV_IO_LISTENERS_MAX     16u
#define SRV_IO_WATCHES_MAX       8u

/*
 * UNAVAILABLE when the kernel or a sandbox denies io_uring, with the errno's name and the profile in deploy/
 * that admits it; also on kernels before 5.19, which lack rings of provided buffers. The caller then takes
 * epoll.
 */
KV_MUST_CHECK enum kv_status srv_io_uring_create(
	uint32_t n_ahead_buffers, uint32_t n_connections_max, struct kv_io **out, struct kv_error *err);
KV_MUST_CHECK enum kv_status srv_io_epoll_create(
	uint32_t n_ahead_buffers, uint32_t n_connections_max, struct kv_io **out, struct kv_error *err);

#endif
