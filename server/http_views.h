/*
 * Views: a snapshot of the loop as JSON or as Prometheus text. Pure functions of the answered struct
 * srv_control.
 *
 * Keys carry their unit (_bytes, _ms) or count something (n_); bytes and counts are integers. Ids are
 * strings, since JavaScript keeps only 53 bits of a number: handles, fingerprints and boot ids 16 hex digits,
 * sequence ids, tenants and connection ids decimal. Block states are disjoint: free + reserved + owned +
 * shared + draining = total (in struct kv_block_counts the reserved ones are part of the free ones).
 */
#ifndef SERVER_HTTP_VIEWS_H
#define SERVER_HTTP_VIEWS_H

#include "server/control.h"
#include "server/http_text.h"
#include "server/options.h"

/* route_info.c, route_pools.c, route_occupancy.c, route_plan.c */
void srv_view_info(const struct srv_control *control, struct srv_text *text);
void srv_view_pools(const struct srv_control *control, struct srv_text *text);
/* One pool, rows.pools[0], with its memory. */
void srv_view_pool(const struct srv_control *control, struct srv_text *text);
/* POST /v1/pools: the pool that was made, rows.pools[0]; just its name where the loop gave no row. */
void srv_view_pool_created(const struct srv_control *control, struct srv_text *text);
void srv_view_occupancy(const struct srv_control *control, struct srv_text *text);
void srv_view_plan(const struct srv_control *control, struct srv_text *text);
/* route_sessions.c, route_tenants.c, route_prefixes.c, route_connections.c */
void srv_view_sessions(const struct srv_control *control, struct srv_text *text);
void srv_view_session(const struct srv_control *control, struct srv_text *text);
void srv_view_sequence(const struct srv_control *control, struct srv_text *text);
void srv_view_tenants(const struct srv_control *control, struct srv_text *text);
void srv_view_tenant(const struct srv_control *control, struct srv_text *text);
void srv_view_prefixes(const struct srv_control *control, struct srv_text *text);
void srv_view_prefix(const struct srv_control *control, struct srv_text *text);
void srv_view_connections(const struct srv_control *control, struct srv_text *text);
/* route_health.c, route_admin.c */
void srv_view_ready(const struct srv_control *control, struct srv_text *text);
void srv_view_live(uint64_t turn_age_ms, struct srv_text *text);
void srv_view_self_test(const struct srv_control *control, struct srv_text *text);
void srv_view_audit(const struct srv_control *control, struct srv_text *text);
void srv_view_checkpoint(const struct srv_control *control, struct srv_text *text);
void srv_view_reload(const struct srv_control *control, struct srv_text *text);
void srv_view_drain(const struct srv_control *control, struct srv_text *text);
/* RFC 9457. `code`: the name of a status (proto/status.h), or the control API's own word. */
void srv_view_problem(unsigned http_status, const char *code, const char *detail, struct srv_text *text);

/* Prometheus text 0.0.4 (route_metrics.c). */
void srv_view_metrics(
	const struct srv_control *control, const struct srv_options *options, struct srv_text *text);

/* The families that HTTP counts itself; behind those of srv_view_metrics(). */
struct srv_http_counters;
void srv_view_http_metrics(struct srv_http_counters *counters, struct srv_text *text);

/* ---- parts that several views share (http_views.c) ---- */

/* Which members of the memory report mean something for what is shown. */
enum srv_view_report_kind { SRV_REPORT_SEQUENCE, SRV_REPORT_SESSION, SRV_REPORT_POOL };
void srv_view_report(
	struct srv_text *text, const struct kv_memory_report *report, enum srv_view_report_kind kind);
void srv_view_sum_reports(struct kv_memory_report *sum, const struct kv_memory_report *report);
/* Blocks of several kinds. Ring blocks that are in use are in the state "exact", whoever has them. */
struct srv_block_sum {
	struct kv_block_counts counts;
	uint32_t n_exact;
};
void srv_view_blocks(struct srv_text *text, const struct srv_block_sum *blocks);
/* The same of one kind of blocks: in the states that they have among themselves. */
void srv_view_blocks_of_kind(struct srv_text *text, const struct kv_block_counts *counts);
/* Over all groups, and the ring blocks of the exact window. */
struct srv_block_sum srv_view_pool_blocks(const struct srv_pool_row *pool);
void srv_view_sum_blocks(struct srv_block_sum *sum, const struct srv_block_sum *blocks);
/* Bytes of all blocks of a pool by state; they add up to those of all of them. */
#define SRV_BLOCK_STATES 7u
extern const char *const srv_block_state_names[SRV_BLOCK_STATES];
void srv_view_add_state_bytes(uint64_t states[SRV_BLOCK_STATES], const struct srv_pool_row *pool);
void srv_view_state_bytes(struct srv_text *text, const uint64_t states[SRV_BLOCK_STATES]);
/* Decimal digits; "tcp" for peers that have no number of their own. */
void srv_view_tenant_id(struct srv_text *text, const char *key, uint64_t tenant);
void srv_view_cursor(struct srv_text *text, const struct srv_control *control);
uint32_t srv_view_n_pools(const struct srv_control *control);
uint32_t srv_view_n_rows(const struct srv_control *control);

#endif
