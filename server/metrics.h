/*
 * Metrics: counters and log2 histograms of the loop thread, copied as a whole for every scrape.
 * Written by the loop thread only; the control thread sees copies.
 */
#ifndef SERVER_METRICS_H
#define SERVER_METRICS_H

#include <stdint.h>

#include "core/block_pool.h"
#include "core/report.h"
#include "proto/status.h"

/* Bucket i counts values in [2^(i-1), 2^i) microseconds; the last one everything above. */
#define SRV_HISTOGRAM_BUCKETS 24u
struct srv_histogram {
	uint64_t n, sum_us;
	uint64_t buckets[SRV_HISTOGRAM_BUCKETS];
};
void srv_histogram_add(struct srv_histogram *histogram, uint64_t value_us);

/* X(name, help): tqkv_<name>_total */
#define SRV_COUNTER_MAP(X)                                                               \
	X(connections_accepted, "connections accepted")                                  \
	X(connections_refused, "connections refused: table full or draining")            \
	X(connections_closed_slow, "connections closed because the peer was too slow")   \
	X(connections_closed_protocol, "connections closed by a protocol violation")     \
	X(frames_in, "complete request frames")                                          \
	X(frames_out, "reply frames")                                                    \
	X(bytes_in, "bytes received")                                                    \
	X(bytes_out, "bytes sent")                                                       \
	X(rows_in, "rows appended and committed, one per layer and token")               \
	X(rows_out, "rows read back, one per layer and token")                           \
	X(queries, "decode query rows answered")                                         \
	X(items_ok, "items that succeeded")                                              \
	X(batches, "batches submitted to the backend")                                   \
	X(batch_items, "items in submitted batches")                                     \
	X(sessions_opened, "sessions opened")                                            \
	X(sessions_expired, "sessions whose lease ran out")                              \
	X(appends_aborted_timeout, "frames given up because the peer stalled")           \
	X(appends_aborted_closed, "frames given up because the peer closed inside them") \
	X(slot_waits, "frames that waited for a request slot")                           \
	X(logins_failed, "HELLOs whose token is not known")                              \
	X(logins_limited, "HELLOs refused after too many failed logins of their peer")   \
	X(spills, "sequences that went to a tier")                                       \
	X(spills_rejected_full, "spills refused because no tier had room")               \
	X(spills_rejected_quota, "spills refused for a tenant's quota of tier bytes")    \
	X(spills_rejected_used, "spills given up because the sequence was used or went") \
	X(spills_rejected_io, "spills given up because a tier or the backend failed")    \
	X(fetches, "sequences that came back from a tier")                               \
	X(fetches_failed, "sequences whose rows were lost in a tier, or not wanted")     \
	X(control_requests, "control requests answered by the loop")                     \
	X(self_tests, "known-answer decodes")                                            \
	X(audits, "audits of tables and blocks that came to a result")                   \
	X(audits_failed, "audits that found a difference")                               \
	X(self_tests_failed, "known-answer decodes that were wrong or did not come back")

/* Rejections by status: refused items plus refused frames, one slot per row of the status table. */
enum {
#define SRV_STATUS_ROW(name, number, scope, retryable, http, text) SRV_REJECTED_##name,
	KV_STATUS_MAP(SRV_STATUS_ROW)
#undef SRV_STATUS_ROW
		SRV_N_STATUSES
};

struct srv_counters {
#define SRV_COUNTER_FIELD(name, help) uint64_t name;
	SRV_COUNTER_MAP(SRV_COUNTER_FIELD)
#undef SRV_COUNTER_FIELD
	uint64_t rejected[SRV_N_STATUSES];
	struct srv_histogram queue, copy_in, kernel, copy_out, request; /* microseconds */
};
/* Counts one refused item or frame. */
void srv_counters_reject(struct srv_counters *counters, unsigned status);

/* Everything one scrape needs besides the counters. */
struct srv_gauges {
	uint64_t uptime_ms, turns;
	uint32_t n_connections, n_sessions, n_sequences, n_pools;
	uint32_t n_large_slots, n_large_slots_used, n_small_slots, n_small_slots_used;
	uint32_t n_queued, n_batches_in_flight;
	uint32_t n_reply_buffers, n_reply_buffers_used;
	uint64_t arena_bytes, arena_used_bytes, slots_bytes, tables_bytes, resident_bytes;
	uint64_t host_tier_bytes, host_tier_used_bytes, file_tier_bytes, file_tier_used_bytes;
	uint32_t n_spilled;
	uint64_t self_test_age_ms, batch_oldest_ms;
	uint64_t config_generation, n_reloads, n_reload_failures;
	uint8_t is_ready, is_draining;
	uint8_t has_difference; /* the last audit found one: */
	uint64_t difference_session;
	char difference_pool[KV_POOL_NAME_BYTES_MAX + 1];
};

#endif
