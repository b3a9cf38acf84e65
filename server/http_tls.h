/*
 * Certificates of the control API: one immutable set, part of struct srv_settings, so that a reload replaces
 * them together with everything else or not at all.
 *
 * A connection holds the settings that it was accepted under; what is in use never goes. libmicrohttpd is
 * given no certificate: it takes one set at start and keeps it. Each session is handed its own instead,
 * before its handshake begins, so the listener stays as it is.
 */
#ifndef SERVER_HTTP_TLS_H
#define SERVER_HTTP_TLS_H

#include <gnutls/abstract.h>
#include <gnutls/gnutls.h>

#include "core/error.h"
#include "core/io.h"
#include "server/options.h"

struct srv_http_tls;

/* *out stays NULL where the options name no certificate. BAD_CONFIG: a file cannot be read, is no PEM, or
 * certificate and key are no pair. */
KV_MUST_CHECK enum kv_status srv_http_tls_create(const struct srv_options *options,
	const struct kv_files *files, struct srv_http_tls **out, struct kv_error *err);
void srv_http_tls_destroy(struct srv_http_tls *tls); /* NULL allowed; no session uses it any more */
/* Are clients asked for a certificate? NULL allowed. */
bool srv_http_tls_asks_clients(const struct srv_http_tls *tls);
/* Before the handshake. False: the session cannot be served. */
bool srv_http_tls_attach(const struct srv_http_tls *tls, gnutls_session_t session);

/* libmicrohttpd wants a certificate or somebody who has one: this has none, for sessions without a set. */
int srv_http_tls_none(gnutls_session_t session, const gnutls_datum_t *ca_names, int n_ca_names,
	const gnutls_pk_algorithm_t *algorithms, int n_algorithms, gnutls_pcert_st **certificates,
	unsigned *n_certificates, gnutls_privkey_t *key);

#endif
