/*
 * TLS for the HTTP client: a session over a connected socket that does not block, with gnutls.
 *
 * The peer's certificate must come from an authority that is trusted and carry the name or the address that
 * was asked for; there is no way to switch that off. The socket stays the caller's. One thread.
 */
#ifndef SERVER_CTL_TLS_H
#define SERVER_CTL_TLS_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#include "core/error.h"

struct srv_tls;

/* Files with PEM; NULL or "": not given. */
struct srv_tls_trust {
	const char *ca_file;                     /* who is trusted; not given: those that the system trusts */
	const char *certificate_file, *key_file; /* shown to peers that ask for one */
};

/* BAD_ARG names the file that cannot be read. srv_tls_destroy() the result. */
KV_MUST_CHECK enum kv_status srv_tls_create(const struct srv_tls_trust *trust, const char *host, int fd,
	struct srv_tls **out, struct kv_error *err);
void srv_tls_destroy(struct srv_tls *tls); /* says goodbye if that is possible at once; NULL allowed */

/* What the socket has to be ready for before anything goes on: POLLIN or POLLOUT. */
short srv_tls_events(const struct srv_tls *tls);
/* OK: done. BUSY_RETRY: again when the socket is ready. Else what is wrong, and with whom. */
KV_MUST_CHECK enum kv_status srv_tls_handshake(struct srv_tls *tls, struct kv_error *err);
/* OK: *n_done bytes, at least one; 0 in receive is the end. BUSY_RETRY as above. */
KV_MUST_CHECK enum kv_status srv_tls_send(
	struct srv_tls *tls, const void *data, size_t n_bytes, size_t *n_done, struct kv_error *err);
KV_MUST_CHECK enum kv_status srv_tls_receive(
	struct srv_tls *tls, void *data, size_t n_bytes, size_t *n_done, struct kv_error *err);

#endif
