/*
 * Settings: what a reload replaces as a whole, options, tokens and certificates. One set is immutable once it
 * is published; threads hold it by a reference, so the old one lives as long as somebody still works with it.
 *
 * A reload reads command line, environment and all files again, exactly as the start did. It is whole or no
 * trace: where anything is wrong, the old settings stay, the failure is counted and said. Options that take
 * memory, threads or sockets at start keep their value; their names are told as needing a restart.
 */
#ifndef SERVER_SETTINGS_H
#define SERVER_SETTINGS_H

#include <pthread.h>
#include <stdatomic.h>

#include "server/auth.h"
#include "server/options.h"

struct srv_http_tls; /* http_tls.h */

struct srv_settings {
	struct srv_options options;
	struct srv_tokens tokens; /* n 0: no tokens file, nobody is asked for one */
	struct srv_http_tls *tls; /* NULL: the control API is plain HTTP */
	atomic_uint n_refs;
};

struct srv_settings_box {
	pthread_mutex_t lock, reload_lock;
	struct srv_settings *current;    /* under lock */
	atomic_uint_fast64_t generation; /* of current; 1 after init */
	atomic_uint_fast64_t n_reloads, n_failures;
	int argc;
	char **argv;
	const struct kv_files *files;
	bool is_used;
};

/* What a reload found. Bit i: option i of the table; then listen, pools, tenants. */
struct srv_reload {
	uint64_t generation, changed, needs_restart;
};
#define SRV_RELOAD_NAMES_MAX 64u
/* Name of bit i, NULL behind the last. */
const char *srv_reload_name(uint32_t bit_idx);

/*
 * The first settings: options as parsed (taken over on success), tokens read here. argv and files must
 * outlive the box. Sets the log level.
 */
KV_MUST_CHECK enum kv_status srv_settings_init(struct srv_settings_box *box, struct srv_options *options,
	int argc, char **argv, const struct kv_files *files, struct kv_error *err);
/* Zeroed allowed. Nobody holds a reference any more, or gives it back later. */
void srv_settings_finish(struct srv_settings_box *box);
struct srv_settings *srv_settings_get(struct srv_settings_box *box);
void srv_settings_put(struct srv_settings *settings); /* NULL allowed */
/* Any thread; one at a time. */
KV_MUST_CHECK enum kv_status srv_settings_reload(
	struct srv_settings_box *box, struct srv_reload *reload, struct kv_error *err);
/* The whole of the tokens file that the options name; n 0 for "off". */
KV_MUST_CHECK enum kv_status srv_settings_read_tokens(const struct srv_options *options,
	const struct kv_files *files, struct srv_tokens *tokens, struct kv_error *err);

#endif
