#include "server/http_tls.h"

#include <string.h>

#include "core/memory.h"

#define PEM_BYTES_MAX 1048576u

struct srv_http_tls {
	gnutls_certificate_credentials_t credentials;
	bool asks_clients;
};

static bool is_named(const char *path)
{
	return strcmp(path, "off") != 0;
}

static enum kv_status read_pem(const char *option_name, const char *path, const struct kv_files *files,
	gnutls_datum_t *out, struct kv_error *err)
{
	uint64_t n_bytes = 0;
	char *text = NULL;
	const enum kv_status status = files->read_all(path, PEM_BYTES_MAX, &text, &n_bytes, err);

	if (status == KV_OK) {
		*out = (gnutls_datum_t){ .data = (unsigned char *)text, .size = (unsigned)n_bytes };
		return KV_OK;
	}
	kv_error_wrap(err, "%s", option_name);
	if (err)
		err->status = KV_BAD_CONFIG;
	return KV_BAD_CONFIG;
}

static void free_pem(gnutls_datum_t *pem)
{
	if (pem->data)
		explicit_bzero(pem->data, pem->size);
	kv_free(pem->data);
}

static enum kv_status read_pair(struct srv_http_tls *tls, const struct srv_options *options,
	const struct kv_files *files, struct kv_error *err)
{
	gnutls_datum_t certificate = { 0 }, key = { 0 };
	enum kv_status status =
		read_pem("http_certificate_file", options->http_certificate_file, files, &certificate, err);

	if (status == KV_OK)
		status = read_pem("http_key_file", options->http_key_file, files, &key, err);
	if (status == KV_OK) {
		const int error = gnutls_certificate_set_x509_key_mem2(
			tls->credentials, &certificate, &key, GNUTLS_X509_FMT_PEM, NULL, 0);

		if (error < 0)
			status = kv_fail(err, KV_BAD_CONFIG,
				"http_certificate_file and http_key_file: %s; expected a pair, both PEM",
				gnutls_strerror(error));
	}
	free_pem(&certificate);
	free_pem(&key);
	return status;
}

static enum kv_status read_client_ca(struct srv_http_tls *tls, const struct srv_options *options,
	const struct kv_files *files, struct kv_error *err)
{
	gnutls_datum_t authorities = { 0 };
	enum kv_status status =
		read_pem("http_client_ca_file", options->http_client_ca_file, files, &authorities, err);

	if (status != KV_OK)
		return status;
	const int n =
		gnutls_certificate_set_x509_trust_mem(tls->credentials, &authorities, GNUTLS_X509_FMT_PEM);

	free_pem(&authorities);
	if (n <= 0)
		return kv_fail(err, KV_BAD_CONFIG, "http_client_ca_file: %s",
			n < 0 ? gnutls_strerror(n) : "it holds no certificate");
	tls->asks_clients = true;
	return KV_OK;
}

enum kv_status srv_http_tls_create(const struct srv_options *options, const struct kv_files *files,
	struct srv_http_tls **out, struct kv_error *err)
{
	if (!is_named(options->http_certificate_file))
		return KV_OK;
	struct srv_http_tls *tls = kv_alloc(1, sizeof(*tls));

	if (!tls || gnutls_certificate_allocate_credentials(&tls->credentials) != GNUTLS_E_SUCCESS) {
		kv_free(tls);
		return kv_fail(err, KV_NO_MEMORY, "certificates: no memory");
	}
	enum kv_status status = read_pair(tls, options, files, err);

	if (status == KV_OK && is_named(options->http_client_ca_file))
		status = read_client_ca(tls, options, files, err);
	if (status != KV_OK) {
		srv_http_tls_destroy(tls);
		return status;
	}
	*out = tls;
	return KV_OK;
}

void srv_http_tls_destroy(struct srv_http_tls *tls)
{
	if (!tls)
		return;
	gnutls_certificate_free_credentials(tls->credentials);
	kv_free(tls);
}

bool srv_http_tls_asks_clients(const struct srv_http_tls *tls)
{
	return tls && tls->asks_clients;
}

bool srv_http_tls_attach(const struct srv_http_tls *tls, gnutls_session_t session)
{
	if (gnutls_credentials_set(session, GNUTLS_CRD_CERTIFICATE, tls->credentials) != GNUTLS_E_SUCCESS)
		return false;
	if (tls->asks_clients) {
		gnutls_certificate_server_set_request(session, GNUTLS_CERT_REQUIRE);
		gnutls_session_set_verify_cert(session, NULL, 0);
	}
	return true;
}

int srv_http_tls_none(gnutls_session_t session, const gnutls_datum_t *ca_names, int n_ca_names,
	const gnutls_pk_algorithm_t *algorithms, int n_algorithms, gnutls_pcert_st **certificates,
	unsigned *n_certificates, gnutls_privkey_t *key)
{
	(void)session;
	(void)ca_names;
	(void)n_ca_names;
	(void)algorithms;
	(void)n_algorithms;
	(void)certificates;
	(void)n_certificates;
	(void)key;
	return -1;
}
