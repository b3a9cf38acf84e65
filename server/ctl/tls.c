#include "server/ctl/tls.h"

#include <arpa/inet.h>
#include <gnutls/gnutls.h>
#include <gnutls/x509.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>

#include "core/memory.h"

#define HOST_BYTES   256u
#define PLAIN_DAEMON "A daemon without a certificate is asked at HOST:PORT, without https://"

struct srv_tls {
	gnutls_certificate_credentials_t credentials;
	gnutls_session_t session;
	bool is_shaken, is_broken;
	char host[HOST_BYTES]; /* gnutls looks at it during the handshake */
};

static bool is_given(const char *path)
{
	return path && path[0];
}

static enum kv_status trust_files(
	struct srv_tls *tls, const struct srv_tls_trust *trust, struct kv_error *err)
{
	const char *key_file = is_given(trust->key_file) ? trust->key_file : trust->certificate_file;
	int n;

	if (is_given(trust->ca_file)) {
		n = gnutls_certificate_set_x509_trust_file(
			tls->credentials, trust->ca_file, GNUTLS_X509_FMT_PEM);
		if (n <= 0)
			return kv_fail(err, KV_BAD_ARG, "--http-ca-file '%.200s': %s", trust->ca_file,
				n < 0 ? gnutls_strerror(n) : "it holds no certificate");
	} else {
		/* A machine without any is told so by the handshake: the issuer is unknown. */
		(void)gnutls_certificate_set_x509_system_trust(tls->credentials);
	}
	if (!is_given(trust->certificate_file) && is_given(trust->key_file))
		return kv_fail(err, KV_BAD_ARG, "--http-key-file needs --http-certificate-file beside it");
	if (!is_given(trust->certificate_file))
		return KV_OK;
	n = gnutls_certificate_set_x509_key_file(
		tls->credentials, trust->certificate_file, key_file, GNUTLS_X509_FMT_PEM);
	if (n < 0)
		return kv_fail(err, KV_BAD_ARG,
			"--http-certificate-file '%.150s' and --http-key-file '%.150s': %s",
			trust->certificate_file, key_file, gnutls_strerror(n));
	return KV_OK;
}

static int begin_session(struct srv_tls *tls, int fd)
{
	struct in6_addr address;
	int code = gnutls_init(&tls->session, GNUTLS_CLIENT | GNUTLS_NONBLOCK | GNUTLS_NO_SIGNAL);

	if (code == GNUTLS_E_SUCCESS)
		code = gnutls_set_default_priority(tls->session);
	if (code == GNUTLS_E_SUCCESS)
		code = gnutls_credentials_set(tls->session, GNUTLS_CRD_CERTIFICATE, tls->credentials);
	/* Only names are sent ahead; an address is compared all the same. */
	if (code == GNUTLS_E_SUCCESS && inet_pton(AF_INET, tls->host, &address) != 1 &&
		inet_pton(AF_INET6, tls->host, &address) != 1)
		code = gnutls_server_name_set(tls->session, GNUTLS_NAME_DNS, tls->host, strlen(tls->host));
	if (code != GNUTLS_E_SUCCESS)
		return code;
	gnutls_session_set_verify_cert(tls->session, tls->host, 0);
	gnutls_transport_set_int(tls->session, fd);
	return code;
}

enum kv_status srv_tls_create(const struct srv_tls_trust *trust, const char *host, int fd,
	struct srv_tls **out, struct kv_error *err)
{
	struct srv_tls *tls = kv_alloc(1, sizeof(*tls));

	if (!tls || gnutls_certificate_allocate_credentials(&tls->credentials) != GNUTLS_E_SUCCESS) {
		kv_free(tls);
		return kv_fail(err, KV_NO_MEMORY, "no memory for certificates");
	}
	snprintf(tls->host, sizeof(tls->host), "%s", host);
	enum kv_status status = trust_files(tls, trust, err);

	if (status == KV_OK) {
		const int code = begin_session(tls, fd);

		if (code != GNUTLS_E_SUCCESS)
			status = kv_fail(err, KV_IO_ERROR, "TLS: %s", gnutls_strerror(code));
	}
	if (status == KV_OK)
		*out = tls;
	else
		srv_tls_destroy(tls);
	return status;
}

void srv_tls_destroy(struct srv_tls *tls)
{
	if (!tls)
		return;
	if (tls->session) {
		if (tls->is_shaken && !tls->is_broken)
			(void)gnutls_bye(tls->session, GNUTLS_SHUT_WR);
		gnutls_deinit(tls->session);
	}
	gnutls_certificate_free_credentials(tls->credentials);
	kv_free(tls);
}

short srv_tls_events(const struct srv_tls *tls)
{
	return gnutls_record_get_direction(tls->session) == 1 ? POLLOUT : POLLIN;
}

static enum kv_status fail_certificate(const struct srv_tls *tls, struct kv_error *err)
{
	gnutls_datum_t why = { 0 };
	const unsigned bits = gnutls_session_get_verify_cert_status(tls->session);
	const bool is_named = gnutls_certificate_verification_status_print(bits, GNUTLS_CRT_X509, &why, 0) ==
		GNUTLS_E_SUCCESS;
	size_t n_chars = is_named ? strlen((const char *)why.data) : 0;

	while (n_chars > 0 && why.data[n_chars - 1] == ' ')
		n_chars--;
	kv_fail(err, KV_FORBIDDEN, "'%.100s': %.*s --http-ca-file or TQKV_HTTP_CA_FILE says who is trusted",
		tls->host, (int)n_chars,
		is_named ? (const char *)why.data : "the certificate is not trusted.");
	gnutls_free(why.data);
	return KV_FORBIDDEN;
}

/* What came instead of success, in words. */
static enum kv_status fail_tls(struct srv_tls *tls, int code, struct kv_error *err)
{
	if (code == GNUTLS_E_AGAIN || code == GNUTLS_E_INTERRUPTED)
		return KV_BUSY_RETRY;
	tls->is_broken = true;
	switch (code) {
	case GNUTLS_E_CERTIFICATE_VERIFICATION_ERROR:
		return fail_certificate(tls, err);
	case GNUTLS_E_FATAL_ALERT_RECEIVED: {
		const gnutls_alert_description_t alert = gnutls_alert_get(tls->session);
		const char *name = gnutls_alert_get_name(alert);

		return kv_fail(err, KV_FORBIDDEN, "the daemon refuses the connection: %s%s",
			name ? name : "a TLS alert",
			alert == GNUTLS_A_CERTIFICATE_REQUIRED || alert == GNUTLS_A_BAD_CERTIFICATE
				? "; it asks for a certificate: --http-certificate-file, --http-key-file"
				: "");
	}
	case GNUTLS_E_UNEXPECTED_PACKET:
	case GNUTLS_E_UNEXPECTED_PACKET_LENGTH:
	case GNUTLS_E_UNSUPPORTED_VERSION_PACKET:
	case GNUTLS_E_RECORD_OVERFLOW:
		return kv_fail(err, KV_IO_ERROR, "The answer is not TLS. " PLAIN_DAEMON);
	/*
	 * How a daemon that wants a certificate and got none ends: often without a word. One without TLS may,
	 * too: its refusal is lost where it ends the connection before it has read all of the first record.
	 */
	case GNUTLS_E_PREMATURE_TERMINATION:
	case GNUTLS_E_PULL_ERROR:
	case GNUTLS_E_PUSH_ERROR:
		return kv_fail(err, KV_IO_ERROR,
			"TLS: %s %sA daemon that asks for a certificate gets it from "
			"--http-certificate-file, "
			"--http-key-file",
			gnutls_strerror(code), tls->is_shaken ? "" : PLAIN_DAEMON ". ");
	default:
		return kv_fail(err, KV_IO_ERROR, "TLS: %s", gnutls_strerror(code));
	}
}

enum kv_status srv_tls_handshake(struct srv_tls *tls, struct kv_error *err)
{
	int code;

	do
		code = gnutls_handshake(tls->session);
	while (code < 0 && code != GNUTLS_E_AGAIN && !gnutls_error_is_fatal(code));
	if (code < 0)
		return fail_tls(tls, code, err);
	tls->is_shaken = true;
	return KV_OK;
}

enum kv_status srv_tls_send(
	struct srv_tls *tls, const void *data, size_t n_bytes, size_t *n_done, struct kv_error *err)
{
	const ssize_t n = gnutls_record_send(tls->session, data, n_bytes);

	if (n < 0)
		return fail_tls(tls, (int)n, err);
	*n_done = (size_t)n;
	return KV_OK;
}

enum kv_status srv_tls_receive(
	struct srv_tls *tls, void *data, size_t n_bytes, size_t *n_done, struct kv_error *err)
{
	ssize_t n;

	do
		n = gnutls_record_recv(tls->session, data, n_bytes);
	while (n < 0 && n != GNUTLS_E_AGAIN && !gnutls_error_is_fatal((int)n));
	if (n < 0)
		return fail_tls(tls, (int)n, err);
	*n_done = (size_t)n;
	return KV_OK;
}
