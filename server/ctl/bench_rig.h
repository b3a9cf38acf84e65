/*
 * What `bench step` and `bench ingest` share: a pool that lives as long as the measurement, a session on it,
 * rows to send, and echoes of as many bytes.
 *
 * Nothing is left in the daemon however it ends. One thread.
 */
#ifndef SERVER_CTL_BENCH_RIG_H
#define SERVER_CTL_BENCH_RIG_H

#include "core/number.h"
#include "server/ctl/client.h"
#include "server/ctl/percentile.h"

struct srv_bench_rig {
	const struct srv_ctl *ctl;
	struct srv_temp_pool pool;
	struct tqkv_conn *conn;
	struct tqkv_session *session; /* while measure() runs */
};

/* Describes the pool; no daemon is asked. Takes pool_json over, NULL included. srv_temp_pool_finish() it. */
KV_MUST_CHECK enum kv_status srv_bench_prepare(
	struct srv_bench_rig *rig, const struct srv_ctl *ctl, json_t *pool_json, struct kv_error *err);
/*
 * Connects, lets prepare() look at the daemon and take memory, makes the pool, opens a session, measures, and
 * takes everything down again. The measurement's failure is told first, that of taking down after it.
 */
KV_MUST_CHECK enum kv_status srv_bench_run(struct srv_bench_rig *rig, unsigned client_options,
	enum kv_status (*prepare)(void *user, struct kv_error *err),
	enum kv_status (*measure)(void *user, struct kv_error *err), void *user, struct kv_error *err);
/* Numbers of a bell-like shape, the same in every run. */
void srv_bench_fill_rows(enum kv_dtype dtype, uint8_t *rows, uint64_t n_bytes);
/* n echoes, one at a time; their times are added to the samples. */
KV_MUST_CHECK enum kv_status srv_bench_echo(const struct srv_bench_rig *rig, const uint8_t *sent,
	uint64_t in_bytes, uint8_t *reply, uint64_t out_bytes, uint32_t n, struct srv_percentile *samples,
	struct kv_error *err);

#endif
