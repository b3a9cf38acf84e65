#include "server/ctl/client.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "core/clock.h"

/* A pool whose blocks are being given back is free within a few turns of the loop. */
#define DELETE_PAUSE_MS 5u

enum kv_status srv_client_fail(struct kv_error *err, const struct tqkv_error *failure, const char *fmt, ...)
{
	char what[160];
	va_list args;

	va_start(args, fmt);
	vsnprintf(what, sizeof(what), fmt, args);
	va_end(args);
	return kv_fail(err, (enum kv_status)failure->status, "%s: %s: %s", what,
		tqkv_status_name((unsigned)failure->status), failure->message);
}

enum kv_status srv_client_connect(
	const struct srv_ctl *ctl, uint32_t flags, struct tqkv_conn **conn, struct kv_error *err)
{
	const struct tqkv_options options = {
		.flags = flags,
		.connect_timeout_ms = ctl->timeout_ms,
		.timeout_ms = ctl->timeout_ms,
		.client_name = "tqkvctl",
		.token = ctl->token[0] ? ctl->token : NULL,
	};
	struct tqkv_error failure;

	if (tqkv_connect(ctl->addr, &options, conn, &failure) != TQKV_OK)
		return srv_client_fail(err, &failure, "connect to %.120s", ctl->addr);
	return KV_OK;
}

enum kv_status srv_temp_pool_init(struct srv_temp_pool *pool, const struct srv_ctl *ctl, json_t *json,
	const char *prefix, struct kv_error *err)
{
	const unsigned tag = (unsigned)(kv_random_next(kv_random_system()) & 0xFFFFFFFFu);

	*pool = (struct srv_temp_pool){ .ctl = ctl, .json = json_incref(json) };
	snprintf(pool->name, sizeof(pool->name), "%s-%ld-%08x", prefix, (long)getpid(), tag);
	if (json_object_set_new(json, "name", json_string(pool->name)) < 0)
		return kv_fail(err, KV_NO_MEMORY, "no memory for a pool's description");
	return kv_pool_spec_create(json, &pool->spec, err);
}

enum kv_status srv_temp_pool_create(struct srv_temp_pool *pool, struct kv_error *err)
{
	const enum kv_status status = srv_ctl_api(pool->ctl, "POST", "/v1/pools", pool->json, NULL, err);

	/* An answer that did not come in time may mean a pool that was made all the same. */
	pool->is_made = status == KV_OK || status == KV_UNAVAILABLE || status == KV_IO_ERROR;
	return status;
}

enum kv_status srv_temp_pool_delete(struct srv_temp_pool *pool, struct kv_error *err)
{
	struct kv_clock *clock = kv_clock_system();
	const struct timespec pause = { .tv_nsec = (long)(DELETE_PAUSE_MS * KV_NS_PER_MS) };
	char path[KV_POOL_NAME_BYTES_MAX + 16];
	enum kv_status status;

	if (!pool->is_made)
		return KV_OK; /* and perhaps never initialised */
	const uint64_t end_ns = kv_clock_now_ns(clock) + pool->ctl->timeout_ms * KV_NS_PER_MS;

	snprintf(path, sizeof(path), "/v1/pools/%s", pool->name);
	for (;;) {
		status = srv_ctl_api(pool->ctl, "DELETE", path, NULL, NULL, err);
		if (status != KV_BUSY_RETRY || kv_clock_now_ns(clock) >= end_ns)
			break;
		nanosleep(&pause, NULL);
	}
	if (status == KV_OK || status == KV_NOT_FOUND) {
		pool->is_made = false;
		return KV_OK;
	}
	kv_error_wrap(err, "pool '%s' is left behind", pool->name);
	return status;
}

void srv_temp_pool_finish(struct srv_temp_pool *pool)
{
	kv_pool_spec_destroy(pool->spec);
	json_decref(pool->json);
	*pool = (struct srv_temp_pool){ 0 };
}

enum kv_status srv_temp_pool_row(const struct srv_temp_pool *pool, json_t **row, struct kv_error *err)
{
	json_t *all, *entry;
	size_t i;
	const enum kv_status status = srv_ctl_api(pool->ctl, "GET", "/v1/occupancy", NULL, &all, err);

	if (status != KV_OK)
		return status;
	*row = NULL;
	json_array_foreach (json_object_get(all, "pools"), i, entry)
		if (strcmp(srv_json_text(entry, "name"), pool->name) == 0)
			*row = json_incref(entry);
	json_decref(all);
	if (!*row)
		return kv_fail(err, KV_NOT_FOUND, "/v1/occupancy does not list the pool '%s'", pool->name);
	return KV_OK;
}
