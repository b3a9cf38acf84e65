/*
 * World: one simulated server with everything around it. Owns all parts; one at a time is `sim_world_now`,
 * which the watched calls of record.c report to.
 */
#ifndef TESTS_SIM_WORLD_H
#define TESTS_SIM_WORLD_H

#include "server/internal.h"
#include "tests/sim/fake_backend.h"
#include "tests/sim/fake_io.h"
#include "tests/sim/model.h"
#include "tests/sim/request.h"
#include "tests/sim/sim.h"

#define SIM_POOLS_MAX 2u

struct sim_pool_config {
	uint32_t n_layers, q_heads, kv_heads, k_head_dim, v_head_dim, block_size, n_blocks, tokens_max;
	const char *k, *v;
	/* Attention options; 0: none. Windows and caps are every other layer's where `alternates`. */
	uint32_t window, sink_tokens;
	double softcap;
	bool has_sinks, has_alibi, alternates;
	uint32_t exact_tokens, exact_blocks; /* 0: none */
};

struct sim_config {
	uint64_t seed;
	uint32_t n_turns, n_peers, n_tenants, pipeline_max;
	uint32_t pace_ns; /* a peer does something about so often */
	struct sim_net_options net;
	struct sim_backend_options backend;
	uint32_t n_pools;
	struct sim_pool_config pools[SIM_POOLS_MAX];
	uint64_t frame_bytes_max, inflight_bytes_max, min_rate_bytes_per_s;
	uint32_t large_slots, small_slots, reply_buffers, connections_max, sessions_max, sequences_max;
	uint32_t inflight_requests_max, lease_ms, io_timeout_ms, send_timeout_ms, hello_timeout_ms;
	uint32_t drain_timeout_ms, restored_lease_ms;
	/* behaviour of the peers, per thousand of their actions */
	uint32_t flaw_per_mille, stall_per_mille, reset_per_mille, wrong_per_mille, control_per_mille;
	uint32_t attach_per_mille, close_per_mille, nan_per_mille, cancel_per_mille, deadline_per_mille;
	uint32_t fork_per_mille, prefix_per_mille, evictable_per_mille, tables_per_mille;
	uint32_t hash_bits;                /* of prefixes */
	uint32_t long_per_mille;           /* appends of up to tokens_per_item_max, else of up to 4 */
	uint32_t quota_per_mille;          /* policies of tenants set and cleared by control requests */
	uint32_t pool_per_mille;           /* pools made and deleted by control requests */
	uint32_t session_delete_per_mille; /* sessions closed by control requests */
	uint32_t tokens_per_item_max, items_max;
	enum { SIM_END_SETTLE, SIM_END_DRAIN, SIM_END_ABANDON } end;
	bool is_lasting; /* few sequences that become long: windows move on */
	uint64_t host_tier_bytes, file_tier_bytes;
	uint32_t spill_idle_ms, spill_per_mille;
	uint32_t snapshot_per_mille; /* of actions: snapshots, restores, files that are damaged */
	bool audits_every_turn, saves_on_drain;
	uint32_t alloc_timeout_ms;  /* for so long OPEN waits for its reservation */
	uint32_t audit_interval_ms; /* of the audits that the server runs by itself */
	uint32_t audit_step_max;    /* cuts their steps further, so that small pools take many; 0: does not */
};

/* What one turn did, counted from outside. */
struct sim_turn_counts {
	uint32_t n_controls, n_batches_begun[KV_POOLS_MAX];
	uint32_t n_released; /* blocks, since the last call of kv_domain_release() */
};
/* The largest of each over the run. */
struct sim_maxima {
	uint32_t n_controls, n_rows, n_released, n_batches_begun, n_in_flight;
	uint32_t n_audited; /* sessions, table entries and blocks */
};

struct sim_world {
	struct sim_config config;
	struct sim_rng rng;
	struct sim_clock clock;
	struct sim_random random;
	struct sim_net *net;
	struct sim_backend *backend;
	struct srv_options options;
	struct srv_mailbox mailbox;
	bool has_options, has_mailbox;
	struct srv_server *server;
	struct sim_model model;
	struct sim_request **requests; /* by id - 1 */
	uint64_t n_requests, n_requests_max, order;
	struct sim_peer *peers; /* [config.n_peers] */
	uint32_t row_counter, query_counter;
	uint64_t n_changes, n_changes_checked; /* calls that are watched: all, and until the last check */
	uint32_t n_spins;                      /* turns in a row that did not wait and found nothing to do */
	bool in_control;                       /* the server answers a control request */
	uint64_t n_open_waits;                 /* times that an OPEN found no room and goes on waiting */
	uint64_t drain_ns, n_snapshots_seen, n_resets;
	uint64_t n_done[KVP_OP_DECODE_TABLE + 1]; /* requests answered OK, items in part */
	uint32_t n_saved, n_restored, n_refused;  /* in random runs */
	struct sim_turn_counts counts;
	struct sim_maxima maxima;
	struct sim_asked *asked; /* [SIM_CONTROLS]; NULL: no control requests */
	uint64_t prefix_id;      /* of one that was listed; it may have gone since */
	struct kv_pool_spec
		*specs[SIM_POOLS_MAX + 1]; /* as the pools', but never freed; the last: the extra pool's */
};

/* A control request of the simulation. */
#define SIM_CONTROLS 12u
struct sim_asked {
	struct srv_control control;
	bool is_posted;
};

extern struct sim_world *sim_world_now;

/* The quiet default that scripted tests start from: two pools, no faults, no delays, generous bounds. */
struct sim_config sim_config_plain(uint64_t seed);
/* Everything drawn from the seed. */
struct sim_config sim_config_random(uint64_t seed);

/* Options and JSON of the configuration; what srv_server_create() takes besides the seams. */
void sim_world_options(struct sim_world *world);
/* Everything but the server. */
void sim_world_prepare(struct sim_world *world, const struct sim_config *config);
/* The server; on failure the world can be finished as it is. */
KV_MUST_CHECK enum kv_status sim_world_start(struct sim_world *world, struct kv_error *err);
/* Both, and nothing may fail. */
void sim_world_init(struct sim_world *world, const struct sim_config *config);
/* One turn that waits at most max_wait_ns; then every check. */
void sim_world_step(struct sim_world *world, uint64_t max_wait_ns);
/* Steps until nothing is under way, at most for_ns of simulated time. */
void sim_world_run(struct sim_world *world, uint64_t for_ns);
/* Audit, comparison with the model, nothing that waits although it could go on. */
void sim_world_check(struct sim_world *world);
/* All blocks, slots and buffers are back, no connection and no session is left. */
void sim_world_check_empty(struct sim_world *world);
/* Destroys everything; is_clean: the network checks that it got everything back. */
void sim_world_finish(struct sim_world *world, bool is_clean);

/* A request of the peer with the next id; the world owns it. */
struct sim_request *sim_world_request(struct sim_world *world, struct sim_peer *peer, uint16_t opcode);
/* NULL: no such id. */
struct sim_request *sim_world_find(const struct sim_world *world, uint64_t id);
/* Fresh row counters for n tokens. */
uint32_t sim_world_rows(struct sim_world *world, uint32_t n_tokens);
/* Pools 0 to n_pools - 1 are the configuration's; SIM_POOLS_MAX is the one that control requests make and
 * delete. */
const char *sim_pool_name(uint32_t idx);
/* As the control thread would make it; kv_pool_spec_destroy() it. */
struct kv_pool_spec *sim_world_make_spec(const struct sim_pool_config *pool, const char *name);
struct kv_pool *sim_world_pool(const struct sim_world *world, uint32_t idx);
/* The world's copy of a pool's spec, by the pool's name. */
const struct kv_pool_spec *sim_world_spec(const struct sim_world *world, const char *name);

/* control.c: posts and checks control requests. */
void sim_controls_post(struct sim_world *world, uint32_t n);
/* Posts this one; where the configuration has control requests at all. */
struct sim_asked *sim_controls_ask(struct sim_world *world, enum srv_control_kind kind, uint64_t id);
bool sim_controls_are_done(const struct sim_world *world);

/* record.c: hooks for the backend. */
struct sim_backend_hooks sim_record_hooks(struct sim_world *world);
void sim_record_reset_turn(struct sim_world *world);
/* Pieces of memory from core/memory.h that were not freed. */
int64_t sim_record_n_allocations(void);

/* quotas.c: a control request that sets or clears a policy. */
struct srv_control;
void sim_quotas_ask(struct sim_world *world, struct srv_control *control);

#endif
