/*
 * Client: libtqkv as commands use it, and a pool that exists only for one command.
 *
 * The temporary pool is made and deleted over the control API. Its owner deletes it whatever happened: after
 * a failure and after SIGINT too. One thread.
 */
#ifndef SERVER_CTL_CLIENT_H
#define SERVER_CTL_CLIENT_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "core/error.h"
#include "core/pool_spec.h"
#include "proto/client/tqkv.h"
#include "server/ctl/ctl.h"

/* To ctl->addr, with its timeout. `flags`: enum tqkv_option. */
KV_MUST_CHECK enum kv_status srv_client_connect(
	const struct srv_ctl *ctl, uint32_t flags, struct tqkv_conn **conn, struct kv_error *err);
/* Turns a failure of libtqkv into ours; `fmt` says what was tried. Returns its status, never OK. */
enum kv_status srv_client_fail(struct kv_error *err, const struct tqkv_error *failure, const char *fmt, ...)
	KV_PRINTF(3, 4);

struct srv_temp_pool {
	const struct srv_ctl *ctl;
	char name[KV_POOL_NAME_BYTES_MAX + 1];
	json_t *json;              /* as it was asked for */
	struct kv_pool_spec *spec; /* made here from the same JSON: the codecs to compare with */
	bool is_made;              /* exists in the daemon */
};

/*
 * Takes a reference of `json`, the pool's members without its name, and gives it a unique name with this
 * prefix. Makes the local specification only, so that a wrong combination is found before anything is asked
 * of the daemon.
 */
KV_MUST_CHECK enum kv_status srv_temp_pool_init(struct srv_temp_pool *pool, const struct srv_ctl *ctl,
	json_t *json, const char *prefix, struct kv_error *err);
KV_MUST_CHECK enum kv_status srv_temp_pool_create(struct srv_temp_pool *pool, struct kv_error *err);
/*
 * Deletes the pool from the daemon when it was made. The sessions must be closed; their blocks come back a
 * bounded number a turn, so a busy pool is asked again until the timeout. Can be called again after a
 * failure.
 */
KV_MUST_CHECK enum kv_status srv_temp_pool_delete(struct srv_temp_pool *pool, struct kv_error *err);
/* Frees what is here; does not delete. */
void srv_temp_pool_finish(struct srv_temp_pool *pool);
/* The pool's row of /v1/occupancy. json_decref() it. */
KV_MUST_CHECK enum kv_status srv_temp_pool_row(
	const struct srv_temp_pool *pool, json_t **row, struct kv_error *err);

#endif
