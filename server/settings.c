#include "server/settings.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/checked.h"
#include "core/memory.h"
#include "server/http_tls.h"
#include "server/log.h"
#include "server/options_internal.h"

#define IDX(name)         SRV_OPTION_IDX_##name
#define BIT_LISTEN        SRV_N_OPTIONS
#define BIT_POOLS         (SRV_N_OPTIONS + 1)
#define BIT_TENANTS       (SRV_N_OPTIONS + 2)
#define CREDENTIAL_PREFIX "credential:"
_Static_assert(SRV_N_OPTIONS + 3 <= SRV_RELOAD_NAMES_MAX, "a reload tells of options by bits");

/* What may change while the daemon runs; everything else was used up at start. */
static const enum srv_option_idx reloadable[] = { IDX(log_level), IDX(http_name), IDX(tokens_file),
	IDX(http_certificate_file), IDX(http_key_file), IDX(http_client_ca_file), IDX(unix_uids),
	IDX(inflight_requests_max), IDX(inflight_bytes_max), IDX(io_timeout_ms), IDX(send_timeout_ms),
	IDX(hello_timeout_ms), IDX(min_rate_bytes_per_s), IDX(drain_timeout_ms), IDX(busy_poll_us),
	IDX(self_test_interval_ms), IDX(audit_interval_ms) };

const char *srv_reload_name(uint32_t bit_idx)
{
	return bit_idx < SRV_N_OPTIONS   ? srv_option_rows[bit_idx].name
		: bit_idx == BIT_LISTEN  ? "listen"
		: bit_idx == BIT_POOLS   ? "pools"
		: bit_idx == BIT_TENANTS ? "tenants"
					 : NULL;
}

/* "credential:NAME" is a file that the service manager passes on (systemd.exec(5), LoadCredential). */
static enum kv_status tokens_path(const char *option, char *path, size_t n_bytes, struct kv_error *err)
{
	if (strncmp(option, CREDENTIAL_PREFIX, sizeof(CREDENTIAL_PREFIX) - 1) != 0) {
		snprintf(path, n_bytes, "%s", option);
		return KV_OK;
	}
	const char *name = option + sizeof(CREDENTIAL_PREFIX) - 1;
	const char *folder = getenv("CREDENTIALS_DIRECTORY");

	if (!folder)
		return kv_fail(err, KV_BAD_CONFIG,
			"tokens_file: %s, but the service manager passes on no credentials", option);
	if (!*name || strchr(name, '/') || strcmp(name, "..") == 0)
		return kv_fail(err, KV_BAD_CONFIG, "tokens_file: '%s' names no credential", option);
	if (snprintf(path, n_bytes, "%s/%s", folder, name) >= (int)n_bytes)
		return kv_fail(err, KV_BAD_CONFIG, "tokens_file: the path of the credential is too long");
	return KV_OK;
}

enum kv_status srv_settings_read_tokens(const struct srv_options *options, const struct kv_files *files,
	struct srv_tokens *tokens, struct kv_error *err)
{
	char path[4096];
	char *text = NULL;
	uint64_t n_bytes = 0;

	tokens->n = 0;
	if (strcmp(options->tokens_file, "off") == 0)
		return KV_OK;
	enum kv_status status = tokens_path(options->tokens_file, path, sizeof(path), err);

	if (status != KV_OK)
		return status;
	status = files->read_all(path, SRV_TOKENS_FILE_BYTES_MAX, &text, &n_bytes, err);
	if (status != KV_OK) {
		kv_error_wrap(err, "tokens_file");
		if (err)
			err->status = KV_BAD_CONFIG;
		return KV_BAD_CONFIG;
	}
	status = srv_tokens_parse(text, n_bytes, options->tokens_file, tokens, err);
	explicit_bzero(text, (size_t)n_bytes);
	kv_free(text);
	return status;
}

static void apply_log_level(const struct srv_options *options)
{
	static const enum srv_log_level levels[] = { SRV_LOG_ERROR, SRV_LOG_WARNING, SRV_LOG_INFO,
		SRV_LOG_DEBUG };

	if (options->log_level < KV_LENGTH(levels))
		srv_log_set_level(levels[options->log_level]);
}

/* Takes options over; on failure they are the caller's still. */
static enum kv_status make(struct srv_options *options, const struct kv_files *files,
	struct srv_settings **out, struct kv_error *err)
{
	struct srv_settings *settings = kv_alloc(1, sizeof(*settings));

	if (!settings)
		return kv_fail(err, KV_NO_MEMORY, "settings: no memory");
	enum kv_status status = srv_settings_read_tokens(options, files, &settings->tokens, err);

	if (status == KV_OK)
		status = srv_http_tls_create(options, files, &settings->tls, err);
	if (status != KV_OK) {
		srv_tokens_wipe(&settings->tokens);
		kv_free(settings);
		return status;
	}
	settings->options = *options;
	atomic_store(&settings->n_refs, 1);
	*out = settings;
	return KV_OK;
}

enum kv_status srv_settings_init(struct srv_settings_box *box, struct srv_options *options, int argc,
	char **argv, const struct kv_files *files, struct kv_error *err)
{
	struct srv_settings *settings = NULL;

	memset(box, 0, sizeof(*box));
	const enum kv_status status = make(options, files, &settings, err);

	if (status != KV_OK)
		return status;
	memset(options, 0, sizeof(*options));
	pthread_mutex_init(&box->lock, NULL);
	pthread_mutex_init(&box->reload_lock, NULL);
	box->current = settings;
	atomic_store(&box->generation, 1);
	box->argc = argc;
	box->argv = argv;
	box->files = files;
	box->is_used = true;
	apply_log_level(&settings->options);
	return KV_OK;
}

void srv_settings_finish(struct srv_settings_box *box)
{
	if (!box->is_used)
		return;
	srv_settings_put(box->current);
	pthread_mutex_destroy(&box->lock);
	pthread_mutex_destroy(&box->reload_lock);
	memset(box, 0, sizeof(*box));
}

struct srv_settings *srv_settings_get(struct srv_settings_box *box)
{
	pthread_mutex_lock(&box->lock);
	struct srv_settings *settings = box->current;

	atomic_fetch_add(&settings->n_refs, 1);
	pthread_mutex_unlock(&box->lock);
	return settings;
}

void srv_settings_put(struct srv_settings *settings)
{
	if (!settings || atomic_fetch_sub(&settings->n_refs, 1) > 1)
		return;
	srv_options_finish(&settings->options);
	srv_tokens_wipe(&settings->tokens);
	srv_http_tls_destroy(settings->tls);
	kv_free(settings);
}

/* ---- reloading ---- */

static size_t field_bytes(const struct srv_option_row *row)
{
	switch (row->kind) {
	case SRV_OPTION_BYTES:
		return sizeof(uint64_t);
	case SRV_OPTION_TEXT:
		return SRV_OPTION_TEXT_BYTES;
	case SRV_OPTION_FLAG:
		return sizeof(bool);
	case SRV_OPTION_NUMBER:
	case SRV_OPTION_ENUM:
		break;
	}
	return sizeof(uint32_t);
}

static bool is_same(const struct srv_option_row *row, const char *a, const char *b)
{
	return row->kind == SRV_OPTION_TEXT ? strcmp(a, b) == 0 : memcmp(a, b, field_bytes(row)) == 0;
}

static bool is_certificate(uint32_t option_idx)
{
	return option_idx == IDX(http_certificate_file) || option_idx == IDX(http_key_file) ||
		option_idx == IDX(http_client_ca_file);
}

/* Files may be others, and hold something else; whether there is TLS, and who is asked for a certificate, is
 * decided at start. */
static bool is_reloadable(uint32_t option_idx, const char *was, const char *is)
{
	if (is_certificate(option_idx) && (strcmp(was, "off") == 0 || strcmp(is, "off") == 0))
		return false;
	for (size_t i = 0; i < KV_LENGTH(reloadable); i++)
		if (reloadable[i] == option_idx)
			return true;
	return false;
}

/* Puts back what needs a restart, and says what differs. */
static enum kv_status keep_old(const struct srv_options *old, struct srv_options *fresh,
	struct srv_reload *reload, struct kv_error *err)
{
	for (uint32_t i = 0; i < SRV_N_OPTIONS; i++) {
		const struct srv_option_row *row = &srv_option_rows[i];
		const char *was = (const char *)old + row->offset;
		char *is = (char *)fresh + row->offset;

		if (is_same(row, was, is))
			continue;
		if (is_reloadable(i, was, is)) {
			reload->changed |= 1ull << i;
			continue;
		}
		reload->needs_restart |= 1ull << i;
		memcpy(is, was, field_bytes(row));
	}
	if (old->n_listen != fresh->n_listen ||
		memcmp(old->listen, fresh->listen, old->n_listen * sizeof(old->listen[0])) != 0)
		reload->needs_restart |= 1ull << BIT_LISTEN;
	memcpy(fresh->listen, old->listen, sizeof(fresh->listen));
	fresh->n_listen = old->n_listen;
	if (!json_equal(old->pools, fresh->pools)) {
		reload->needs_restart |= 1ull << BIT_POOLS;
		json_t *pools = json_deep_copy(old->pools);

		if (!pools)
			return kv_fail(err, KV_NO_MEMORY, "settings: no memory");
		json_decref(fresh->pools);
		fresh->pools = pools;
	}
	if (!json_equal(old->tenants, fresh->tenants))
		reload->changed |= 1ull << BIT_TENANTS;
	fresh->are_pools_from_flags = old->are_pools_from_flags;
	return KV_OK;
}

static enum kv_status read_again(struct srv_settings_box *box, const struct srv_options *old,
	struct srv_settings **out, struct srv_reload *reload, struct kv_error *err)
{
	struct srv_options fresh;
	enum kv_status status;

	if (srv_options_parse(&fresh, box->argc, box->argv, box->files, err) != SRV_OPTIONS_RUN)
		return err->status != KV_OK ? err->status : kv_fail(err, KV_BAD_CONFIG, "nothing to run");
	/* They wait for a restart, which must not fail then. */
	status = json_equal(old->pools, fresh.pools) ? KV_OK : srv_options_try_pools(&fresh, box->files, err);
	if (status == KV_OK)
		status = keep_old(old, &fresh, reload, err);
	/* Old and new together must fit, too. */
	if (status == KV_OK)
		status = srv_options_check(&fresh, err);
	if (status == KV_OK && strcmp(old->tokens_file, "off") != 0 && strcmp(fresh.tokens_file, "off") == 0)
		status = kv_fail(err, KV_BAD_CONFIG,
			"tokens_file: a reload does not end authentication; restart the daemon for that");
	if (status == KV_OK)
		status = make(&fresh, box->files, out, err);
	if (status != KV_OK)
		srv_options_finish(&fresh);
	return status;
}

enum kv_status srv_settings_reload(
	struct srv_settings_box *box, struct srv_reload *reload, struct kv_error *err)
{
	struct srv_settings *fresh = NULL, *old;
	struct srv_reload found = { 0 };

	pthread_mutex_lock(&box->reload_lock);
	old = srv_settings_get(box);

	const enum kv_status status = read_again(box, &old->options, &fresh, &found, err);

	srv_settings_put(old);
	if (status == KV_OK) {
		pthread_mutex_lock(&box->lock);
		old = box->current;
		box->current = fresh;
		found.generation = atomic_fetch_add(&box->generation, 1) + 1;
		pthread_mutex_unlock(&box->lock);
		srv_settings_put(old);
		apply_log_level(&fresh->options);
		atomic_fetch_add(&box->n_reloads, 1);
		*reload = found;
		srv_log(SRV_LOG_INFO, "configuration reloaded");
		for (uint32_t i = 0; srv_reload_name(i); i++)
			if (found.needs_restart >> i & 1)
				srv_log(SRV_LOG_WARNING, "reload: %s differs and needs a restart",
					srv_reload_name(i));
	} else {
		atomic_fetch_add(&box->n_failures, 1);
		srv_log(SRV_LOG_ERROR, "reload refused, the old configuration stays: %s", err->msg);
	}
	pthread_mutex_unlock(&box->reload_lock);
	return status;
}
