/*
 * Control requests: what the control thread asks of the loop thread, as plain structs.
 *
 * The control thread (libmicrohttpd, JSON, text) owns no session and no pool. It fills a struct srv_control,
 * posts it to the mailbox and suspends the HTTP connection; the loop answers at most SRV_CONTROL_PER_TURN
 * requests a turn, each with a bounded snapshot, and calls done(); the control thread renders the snapshot.
 * Longer lists are paged.
 */
#ifndef SERVER_CONTROL_H
#define SERVER_CONTROL_H

#include <stdbool.h>
#include <stdint.h>

#include "core/backend.h"
#include "core/domain.h"
#include "core/io.h"
#include "core/prefix.h"
#include "core/report.h"
#include "core/tally.h"
#include "server/capacity.h"
#include "server/metrics.h"
#include "server/settings.h"

#define SRV_CONTROL_PER_TURN 8u
#define SRV_CONTROL_ROWS_MAX 256u

enum srv_control_kind {
	SRV_CONTROL_INFO,
	SRV_CONTROL_POOLS,          /* rows: pool */
	SRV_CONTROL_POOL,           /* name; rows.pools[0] */
	SRV_CONTROL_POOL_CREATE,    /* spec */
	SRV_CONTROL_POOL_DELETE,    /* name */
	SRV_CONTROL_OCCUPANCY,      /* rows: pool */
	SRV_CONTROL_PLAN,           /* info, gauges */
	SRV_CONTROL_SESSIONS,       /* rows: session; cursor, tenant, sort */
	SRV_CONTROL_SESSION,        /* id; rows: sequence; cursor = sequence id */
	SRV_CONTROL_SESSION_DELETE, /* id */
	SRV_CONTROL_TENANTS,        /* rows: tenant; cursor = the last tenant's, plus 1 */
	SRV_CONTROL_TENANT,         /* tenant or is_common; rows.tenants[0] */
	SRV_CONTROL_TENANT_SET,     /* the same, and policy; rows.tenants[0] */
	SRV_CONTROL_TENANT_CLEAR,   /* the same */
	SRV_CONTROL_PREFIXES,       /* rows: pool, and n_prefixes of prefix; cursor, tenant, sort */
	SRV_CONTROL_PREFIX,         /* id; rows.prefixes[0] */
	SRV_CONTROL_PREFIX_DELETE,  /* id */
	SRV_CONTROL_SEQUENCE,       /* id, sequence_id, group_idx; rows: block; cursor = table entry */
	SRV_CONTROL_CONNECTIONS,    /* rows: connection; cursor */
	SRV_CONTROL_METRICS,        /* counters, gauges, rows: pool */
	SRV_CONTROL_READY,          /* is_deep: run a known-answer decode now */
	SRV_CONTROL_SELF_TEST,      /* runs a known-answer decode now; is_passed, ready_reason */
	SRV_CONTROL_AUDIT,          /* is_passed, error, audit */
	SRV_CONTROL_DRAIN,          /* gauges */
	SRV_CONTROL_SNAPSHOT,       /* name, id = session or 0: begins one; checkpoint */
	SRV_CONTROL_RESTORE,        /* name: begins; checkpoint */
	SRV_CONTROL_CHECKPOINT,     /* checkpoint: the one that runs, or the last */
	SRV_CONTROL_RELOADED,       /* new settings are published: answered once the loop works with them */
};

/* Order of a list of sessions or prefixes; all but the first from the greatest down. */
enum srv_session_sort {
	SRV_SORT_NONE, /* as the table has them */
	SRV_SORT_AGE,
	SRV_SORT_SEQUENCES,
	SRV_SORT_TOKENS,
	SRV_SORT_BYTES,
	SRV_SORT_ROWS_IN,
	SRV_SORT_QUERIES,
	SRV_SORT_HITS, /* of prefixes */
	SRV_N_SORTS
};
/* Where a row stands in a sorted list: greater keys first, then lower slots. */
struct srv_sort_key {
	uint64_t key;
	uint64_t slot_idx; /* of a prefix: pool << 32 | node */
};

/* Rows of one format in a pool, K or V. The exact window's rows are not among them. */
struct srv_format_row {
	const char *name; /* static text */
	bool is_v;
	uint32_t n_layers;
	uint64_t n_rows, stored_bytes, dense_equivalent_bytes;
};
#define SRV_POOL_FORMATS_MAX 16u

struct srv_pool_row {
	char name[KV_POOL_NAME_BYTES_MAX + 1];
	char k_format[32], v_format[32]; /* "mixed" where layers differ */
	uint32_t n_layers, q_heads, kv_heads, k_head_dim, v_head_dim, block_size, n_groups, tokens_max;
	uint32_t n_tables; /* kinds of blocks: the groups, then the ring blocks of the exact window */
	uint64_t fingerprint, arena_bytes;
	uint32_t n_sessions, n_sequences;
	struct kv_block_counts blocks[KV_TABLES_MAX];
	uint64_t block_bytes[KV_TABLES_MAX]; /* of one block, all its layers */
	struct kv_memory_report memory;
	uint64_t used_bytes; /* of all blocks that are not free */
	uint32_t n_spilled;  /* sequences whose rows are in a tier; they are among n_sequences */
	uint64_t n_spilled_tokens, tier_bytes;
	struct kv_prefix_counts prefixes;
	struct srv_format_row formats[SRV_POOL_FORMATS_MAX];
	uint32_t n_formats; /* formats beyond the room are left out */
};

struct srv_session_row {
	uint64_t handle, tenant, owner_id;
	char name[KV_SESSION_NAME_BYTES_MAX + 1];
	char pool[KV_POOL_NAME_BYTES_MAX + 1];
	uint32_t n_sequences, n_outstanding, lease_ms;
	int64_t lease_left_ms;
	uint64_t age_ms, n_rows_in, n_rows_out, n_queries;
	struct kv_memory_report memory;
};

struct srv_sequence_row {
	uint64_t id;
	uint32_t length_min, length_max, n_blocks, n_shared_blocks, n_pins;
	uint64_t idle_ms;
	bool is_evictable;
	const char *state, *tier; /* static text; tier NULL: it has no image */
	uint64_t tier_bytes;      /* pages of its image */
	struct kv_memory_report memory;
};

/* Sums over the sessions of one tenant. */
struct srv_tenant_row {
	uint64_t tenant;
	uint32_t n_sessions, n_sequences;
	uint64_t n_tokens, stored_bytes, dense_equivalent_bytes, reserved_bytes;
	uint64_t n_rows_in, n_rows_out, n_queries;
	bool is_common, has_policy; /* is_common: the policy of all that have none of their own */
	struct kv_tenant_policy policy;
	uint64_t used[KV_QUOTAS], used_max[KV_QUOTAS], n_refused[KV_QUOTAS];
};

/* A tenant in /metrics: those with the first entries of the table, so that the set of labels is bounded and
 * does not change; all others are one. */
#define SRV_METRIC_TENANTS_MAX 64u
struct srv_tenant_gauge {
	uint64_t tenant;
	uint32_t weight;
	uint64_t most[KV_QUOTAS], used[KV_QUOTAS], n_refused[KV_QUOTAS];
};

/* Entry of a block table. */
struct srv_block_row {
	uint32_t block_idx, n_owners; /* 0 owners: no window reaches it any more, its block was given back */
};

struct srv_prefix_row {
	struct kv_prefix_row prefix;
	char pool[KV_POOL_NAME_BYTES_MAX + 1];
	uint64_t age_ms, ttl_left_ms; /* ttl: where it has one */
};

struct srv_connection_row {
	uint64_t id;
	struct kv_io_peer peer;
	char client_name[65];
	uint64_t age_ms, bytes_in, bytes_out, frames_in;
	uint32_t n_inflight, n_sessions;
	const char *state; /* static text */
};

/* What an audit found, and what it looked at. */
struct srv_audit_view {
	struct kv_finding finding;
	struct kv_tally_counts counts;
};

/* The snapshot or restore that runs, or what became of the last one. */
struct srv_checkpoint_view {
	uint64_t n_begun; /* since start; 0: there was none */
	bool is_running, is_restore;
	bool is_absent; /* there is no such file */
	char name[65];
	enum kv_status status;                       /* once it is over */
	char detail[300];                            /* why it failed */
	uint32_t n_sessions, n_sequences, n_skipped; /* skipped: cannot be saved */
	uint32_t n_sequences_skipped;                /* in a tier without room to come back; or lost */
	uint32_t n_prefixes;                         /* published blocks */
	uint64_t n_blocks, n_bytes, elapsed_us;
};

struct srv_info {
	char version[64], commit[48];
	uint64_t boot_id;
	const char *backend, *io;                 /* static */
	char backend_reason[160], io_reason[160]; /* why each was chosen */
	struct kv_backend_info device;
	uint64_t frame_bytes_max;
	char listeners[8][160];
	uint32_t n_listeners;
	uint64_t pid, uptime_ms;
};

struct srv_control {
	enum srv_control_kind kind;
	/* asked */
	char name[KV_SESSION_NAME_BYTES_MAX + 1];
	uint64_t id, cursor, sequence_id, tenant;
	uint32_t n_rows_max; /* 1..SRV_CONTROL_ROWS_MAX */
	uint32_t group_idx;
	enum srv_session_sort sort;
	struct srv_sort_key cursor_key; /* sorted: behind this one, where has_cursor_key */
	bool is_deep, has_tenant, has_cursor_key, is_common;
	struct kv_tenant_policy policy; /* TENANT_SET */
	struct srv_capacity_ask plan;
	struct srv_reload reload;
	struct kv_pool_spec *spec; /* POOL_CREATE: the loop takes it over on OK and sets it to NULL */
	/* answered */
	enum kv_status status;
	struct kv_error error;
	uint32_t n_rows, n_prefixes;
	uint64_t cursor_next;           /* 0 = end */
	struct kv_tenant_policy common; /* TENANTS */
	union {
		struct {
			struct srv_pool_row pools[KV_POOLS_MAX];
			struct srv_prefix_row prefixes[SRV_CONTROL_ROWS_MAX];
		};
		struct srv_session_row sessions[SRV_CONTROL_ROWS_MAX];
		struct srv_sequence_row sequences[SRV_CONTROL_ROWS_MAX];
		struct srv_connection_row connections[SRV_CONTROL_ROWS_MAX];
		struct srv_block_row blocks[SRV_CONTROL_ROWS_MAX];
		struct srv_tenant_row tenants[SRV_CONTROL_ROWS_MAX];
	} rows;
	struct srv_sort_key cursor_key_next; /* sorted: where has_cursor_key_next */
	bool has_cursor_key_next, is_passed;
	uint32_t duration_us;
	/* METRICS; behind n_tenant_gauges of them all others as one, of which used and n_refused are told. */
	struct srv_tenant_gauge tenant_gauges[SRV_METRIC_TENANTS_MAX + 1];
	uint32_t n_tenant_gauges;         /* without all others */
	struct srv_sequence_row sequence; /* SEQUENCE: the sequence itself */
	struct srv_info info;
	struct srv_counters counters;
	struct srv_gauges gauges;
	struct srv_session_row session; /* SESSION: the session itself */
	char ready_reason[160];         /* READY: why not */
	struct srv_checkpoint_view checkpoint;
	struct srv_audit_view audit;
	/* Called by the loop thread when answered; the struct belongs to the control thread again. */
	void (*done)(struct srv_control *control);
	void *user;
	struct srv_control *next; /* the mailbox's, then the loop's while it goes on next turn */
	/* The loop's while it goes on next turn. */
	bool is_begun, is_set; /* is_set: TENANT_SET has set, and looks for what to answer */
	uint64_t scan_slot;
	uint32_t n_keys;
	struct srv_sort_key keys[SRV_CONTROL_ROWS_MAX];
};

/* Version and commit of this build, for --version, start-up lines and /v1/info. */
extern const char srv_version[], srv_commit[];

#endif
