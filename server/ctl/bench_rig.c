#include "server/ctl/bench_rig.h"

#include <stdio.h>

#include "core/clock.h"

enum kv_status srv_bench_prepare(
	struct srv_bench_rig *rig, const struct srv_ctl *ctl, json_t *pool_json, struct kv_error *err)
{
	rig->ctl = ctl;
	if (!pool_json)
		return kv_fail(err, KV_NO_MEMORY, "no memory for a pool's description");
	const enum kv_status status = srv_temp_pool_init(&rig->pool, ctl, pool_json, "bench", err);

	json_decref(pool_json);
	/* Without a daemon yet: the pool's description comes from the command line alone. */
	return status == KV_OK ? KV_OK : SRV_CTL_USAGE;
}

static enum kv_status open_and_measure(struct srv_bench_rig *rig,
	enum kv_status (*measure)(void *user, struct kv_error *err), void *user, struct kv_error *err)
{
	const struct tqkv_open_params params = {
		.pool = rig->pool.name,
		.pool_json = rig->pool.spec->canonical_json,
		.fingerprint = rig->pool.spec->fingerprint,
	};
	struct tqkv_error failure;

	if (tqkv_open(rig->conn, &params, rig->ctl->timeout_ms, &rig->session, &failure) != TQKV_OK)
		return srv_client_fail(err, &failure, "open a session on pool '%s'", rig->pool.name);
	enum kv_status status = measure(user, err);

	if (tqkv_close(rig->session, rig->ctl->timeout_ms, &failure) != TQKV_OK && status == KV_OK)
		status = srv_client_fail(err, &failure, "close the session");
	rig->session = NULL;
	return status;
}

enum kv_status srv_bench_run(struct srv_bench_rig *rig, unsigned client_options,
	enum kv_status (*prepare)(void *user, struct kv_error *err),
	enum kv_status (*measure)(void *user, struct kv_error *err), void *user, struct kv_error *err)
{
	struct kv_error delete_err;
	enum kv_status status = srv_client_connect(rig->ctl, client_options, &rig->conn, err);

	if (status == KV_OK)
		status = prepare(user, err);
	if (status == KV_OK)
		status = srv_temp_pool_create(&rig->pool, err);
	if (status == KV_OK)
		status = open_and_measure(rig, measure, user, err);
	tqkv_disconnect(rig->conn);
	if (srv_temp_pool_delete(&rig->pool, &delete_err) == KV_OK)
		return status;
	if (status != KV_OK) {
		fprintf(stderr, "tqkvctl bench: %s\n", delete_err.msg);
		return status;
	}
	*err = delete_err;
	return delete_err.status;
}

void srv_bench_fill_rows(enum kv_dtype dtype, uint8_t *rows, uint64_t n_bytes)
{
	const uint32_t value_bytes = kv_dtype_bytes(dtype);
	uint64_t state = 0x9E3779B97F4A7C15u;

	for (uint64_t i = 0; i < n_bytes / value_bytes; i++) {
		float value = 0;

		for (uint32_t j = 0; j < 4; j++) {
			state ^= state << 13;
			state ^= state >> 7;
			state ^= state << 17;
			value += (float)(int32_t)(state >> 40) / 8388608.0f - 1.0f;
		}
		kv_rows_store(dtype, &value, 1, rows + i * value_bytes);
	}
}

enum kv_status srv_bench_echo(const struct srv_bench_rig *rig, const uint8_t *sent, uint64_t in_bytes,
	uint8_t *reply, uint64_t out_bytes, uint32_t n, struct srv_percentile *samples, struct kv_error *err)
{
	struct kv_clock *clock = kv_clock_system();
	struct tqkv_error failure;

	for (uint32_t i = 0; i < n; i++) {
		const uint64_t start_ns = kv_clock_now_ns(clock);

		if (srv_interrupt_seen())
			return kv_fail(err, KV_CANCELLED, "interrupted");
		if (tqkv_echo(rig->conn, sent, (size_t)in_bytes, reply, (size_t)out_bytes,
			    rig->ctl->timeout_ms, &failure) != TQKV_OK)
			return srv_client_fail(err, &failure, "echo");
		srv_percentile_add(samples, kv_clock_now_ns(clock) - start_ns);
	}
	return KV_OK;
}
