/*
 * Listener addresses as text: "unix:PATH" and "tcp:HOST:PORT". Names are not resolved: a host is an IPv4
 * literal, an IPv6 literal in brackets, or "localhost" (127.0.0.1), so that starting never depends on a
 * resolver and what is bound is what was written. Pure functions, any thread.
 */
#ifndef SERVER_IO_ADDRESS_H
#define SERVER_IO_ADDRESS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>

#include "core/error.h"
#include "core/io.h"

#define SRV_SOCKET_MODE_DEFAULT 0660u

/* BAD_CONFIG names the text and what was expected. socket_mode becomes the default. */
KV_MUST_CHECK enum kv_status srv_io_address_parse(
	const char *text, struct kv_io_address *address, struct kv_error *err);
/* True when only this machine can reach it: a Unix socket, 127.0.0.0/8, ::1. */
bool srv_io_address_is_loopback(const struct kv_io_address *address);
/* The socket address of a parsed one; returns its length, 0 when the address was not made by the parser. */
socklen_t srv_io_address_to_sockaddr(const struct kv_io_address *address, struct sockaddr_storage *out);
/* "127.0.0.1:4711", "[::1]:4711"; other families give "?". */
void srv_io_sockaddr_text(const struct sockaddr_storage *from, char *out, uint32_t out_bytes_max);

#endif
