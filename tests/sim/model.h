/*
 * Model: a naive daemon. Per session a list of sequences, per layer a list of row ids with a planned and a
 * committed length; nothing shared, nothing indexed, nothing bounded.
 *
 * The server's calls into its domain are watched (record.c) and repeated here in the same order. Before each
 * the model says what must come out; what an item decodes or reads is what its lists hold at that moment. So
 * every reply can be predicted exactly, whatever the timing was.
 */
#ifndef TESTS_SIM_MODEL_H
#define TESTS_SIM_MODEL_H

#include "core/capture.h"
#include "core/domain.h"
#include "core/prefix.h"
#include "tests/sim/request.h"

#define SIM_LAYERS_MAX 4u
#define SIM_BLOCK_MAX  32u
#define SIM_PATH_MAX   16u

struct sim_layer {
	uint32_t *row_ids; /* [planned] */
	uint32_t n_max, planned, committed;
	uint32_t *ring;    /* [exact_tokens]: which token is in which place; UINT32_MAX: none */
	uint32_t gone_end; /* rows before it are gone, except the group's sinks; 0: none are */
};

struct sim_sequence {
	struct sim_sequence *next;
	uint64_t id;
	uint64_t epoch; /* how often it fell back */
	uint32_t n_pending;
	uint64_t rest_seq; /* when it was used last, by sim_model.seq */
	uint32_t n_pins;
	bool is_evicted, is_unborn;
	bool is_evictable,
		is_orphan; /* orphan: freed, or its session is closed; only pending items know it */
	struct sim_layer layers[SIM_LAYERS_MAX];
};

struct sim_session {
	struct sim_session *next;
	uint64_t handle, owner_id, tenant;
	struct kv_pool *pool;
	char name[KV_SESSION_NAME_BYTES_MAX + 1];
	uint32_t lease_ms, sequences_max, tokens_max;
	uint32_t reserve_left[KV_GROUPS_MAX];
	uint32_t n_sequences, n_pending; /* pending: planned and not finished items */
	bool is_open, is_expired;
	uint64_t owner_changed_ns, life_ns; /* life: the last thing its owner did that is seen here */
	uint64_t n_rows_in, n_rows_out, n_queries;
	struct sim_sequence *sequences;
	bool has_tables;
	uint32_t *slots, n_slots; /* [n_layers, n_slots]: which row; UINT32_MAX: nobody knows */
	uint64_t tables_seq;      /* planned_seq of the request that came to its end last */
};

/* One line of a TELL. */
struct sim_tell_row {
	uint64_t sequence;
	uint32_t length_min, length_max, n_blocks, n_shared_blocks;
	uint16_t state;
	bool is_evictable, is_evicted;
	uint32_t n_exact;
	uint32_t lengths[SIM_LAYERS_MAX];
};

/* What a control operation did, in order per connection: OPEN, ATTACH, CLOSE, TELL; PUBLISH, MATCH; an item
 * of TRUNCATE, FREE, FORK, PIN or UNPIN. */
struct sim_control {
	struct sim_control *next;
	uint64_t owner_id;
	uint16_t opcode;
	enum kv_status status;
	uint64_t seq; /* when: among all planned items and control operations */
	uint64_t handle, sequence, next_sequence;
	uint32_t length, n_total, n_new;
	uint32_t n_rows;
	struct sim_tell_row *rows;
};

/* A sequence in a snapshot; its session by tenant and name. */
struct sim_saved_sequence {
	struct sim_saved_sequence *next;
	uint64_t tenant;
	char name[KV_SESSION_NAME_BYTES_MAX + 1];
	struct sim_sequence *sequence;
};
struct sim_saved_prefix;
#define SIM_SAVED_MAX 4u
struct sim_snapshot {
	char name[65];
	struct sim_saved_sequence *list;
	struct sim_saved_prefix *prefixes;
	bool is_damaged, is_unknown; /* its file; unknown: perhaps damaged, perhaps another one */
};
struct sim_saved {
	struct sim_snapshot begun; /* the one that is being written */
	uint64_t begun_seq;
	struct sim_snapshot snapshots[SIM_SAVED_MAX];
};

/* A published block: what it stands for, and the rows in it. */
struct sim_published {
	struct sim_published *next;
	const struct kv_pool *pool;
	uint64_t tenant, expires_ns; /* 0 = never */
	uint32_t block, parent;      /* of group 0; parent UINT32_MAX: the first */
	uint64_t seq;                /* when, by sim_model.seq */
	char texts[8];               /* adapter, 0, salt */
	uint32_t tokens[SIM_BLOCK_MAX];
	uint32_t row_ids[SIM_LAYERS_MAX][SIM_BLOCK_MAX];
};

/* One in a snapshot. */
struct sim_saved_prefix {
	struct sim_saved_prefix *next;
	char pool[KV_POOL_NAME_BYTES_MAX + 1];
	uint32_t number, parent; /* as the file has them */
	uint64_t ttl_left_ms;    /* 0: for ever */
	struct sim_published as; /* as it was */
};

struct sim_model {
	struct sim_saved saved;          /* may outlive the daemon */
	struct sim_published *published; /* whatever was, newest first; true while the pool keeps the block */
	struct sim_session *sessions;    /* all that ever were, newest first */
	struct sim_control *controls, **controls_end;
	uint32_t sessions_max, sequences_max; /* the daemon's bounds */
	uint32_t n_open;
	uint64_t seq; /* counts planned requests and control operations */
};

void sim_model_init(struct sim_model *model, uint32_t sessions_max, uint32_t sequences_max);
void sim_model_finish(struct sim_model *model);
/* NULL: no such handle was ever given out. */
struct sim_session *sim_model_session(const struct sim_model *model, uint64_t handle);
struct sim_sequence *sim_model_sequence(const struct sim_session *session, uint64_t id);
/* Least planned or committed length over n layers; greatest planned length (NULL: 0). */
uint32_t sim_sequence_least(const struct sim_sequence *sequence, uint32_t first, uint32_t n, bool is_planned);
uint32_t sim_sequence_longest(const struct sim_sequence *sequence);
void sim_sequence_free(struct sim_sequence *sequence);
/* Takes the oldest control operation of the connection off the list, or NULL; sim_control_free() it. */
struct sim_control *sim_model_take_control(struct sim_model *model, uint64_t owner_id, uint16_t opcode);
void sim_control_free(struct sim_control *control);
struct sim_control *sim_model_add_control(
	struct sim_model *model, uint64_t owner_id, uint16_t opcode, enum kv_status status, uint64_t handle);
struct sim_sequence *sim_model_add_sequence(struct sim_session *session, uint64_t id);
/* It was never created. */
void sim_model_forget(struct sim_session *session, struct sim_sequence *sequence);
/* Sequences of all pools, those that are being taken apart included. */
uint32_t sim_model_n_objects(struct kv_domain *domain);
/* May the session have one sequence more? */
enum kv_status sim_model_check_new(
	const struct sim_model *model, const struct sim_session *session, const struct kv_pool *pool);

/* ---- what the watched calls tell; `real` is the server's object, for its counts only ---- */

/* What kv_item_plan() must say. */
struct sim_expected {
	enum kv_status status;
	uint32_t layer, length;
	uint32_t n_blocks[KV_GROUPS_MAX]; /* that it takes */
};
struct sim_expected sim_model_plan(const struct sim_model *model, const struct sim_session *session,
	struct kv_session *real, const struct kv_item *item, uint32_t layer_first, uint32_t n_layers);
/* It said OK, and took n_blocks[KV_GROUPS_MAX]. */
void sim_model_planned(struct sim_session *session, const struct sim_request *request, struct sim_item *item,
	const struct kv_sequence *found, const uint32_t *n_blocks, uint64_t now_ns);
/* kv_item_finish() is over; was_status: what the server had found before. */
void sim_model_finished(struct sim_model *model, struct sim_request *request, struct sim_item *item,
	enum kv_status was_status, const struct kv_result *was_result, uint64_t now_ns);

struct sim_expected sim_model_open(const struct sim_model *model, const struct kv_open_params *params);
void sim_model_opened(struct sim_model *model, const struct kv_open_params *params, enum kv_status status,
	const struct kv_session *real, uint64_t now_ns);
void sim_model_attached(struct sim_model *model, const char *name, uint32_t name_bytes, uint64_t tenant,
	uint64_t owner_id, enum kv_status status, const struct kv_session *real, uint64_t now_ns);
void sim_model_closed(struct sim_model *model, uint64_t handle, bool is_expired, uint64_t now_ns);
/* A control request takes a session from its owner, and closes it once nothing of it is queued. */
void sim_model_fenced(struct sim_model *model, uint64_t handle, uint64_t now_ns);
void sim_model_deleted(struct sim_model *model, uint64_t handle);
void sim_model_owner_lost(struct sim_model *model, uint64_t owner_id, uint64_t now_ns);
void sim_model_truncated(struct sim_model *model, uint64_t handle, uint64_t sequence_id, uint32_t length,
	enum kv_status residence, enum kv_status status);
void sim_model_freed(struct sim_model *model, uint64_t handle, uint64_t sequence_id, enum kv_status status);
/* What kv_sequence_fork() must say, and that it said so. */
struct sim_expected sim_model_fork(const struct sim_model *model, const struct sim_session *session,
	const struct kv_pool *pool, uint64_t child_id, uint64_t parent_id, uint32_t length,
	enum kv_status residence);
void sim_model_forked(struct sim_model *model, uint64_t handle, uint64_t child_id, uint64_t parent_id,
	const struct sim_expected *expected, uint64_t now_ns);
/*
 * The server evicts the sequence for the sake of `planned` (NULL: of a session), which is not at rest: it
 * may, and none that may was used longer ago.
 */
/* group_idx UINT32_MAX: for its tenant's quota; the tenant's oldest goes, and its idle prefixes before. */
void sim_model_evicted(struct sim_model *model, const struct kv_sequence *real,
	const struct sim_sequence *planned, uint32_t group_idx);
/* Sequences of the pool that are pinned; has_rows: in blocks of the pool, at least one on some layer. */
uint32_t sim_model_n_pinned(const struct sim_model *model, const struct kv_pool *pool, bool has_rows);
void sim_model_pinned(
	struct sim_model *model, uint64_t handle, uint64_t sequence_id, bool is_pin, enum kv_status status);

/* PUBLISH and MATCH: what must come out, and that it did. */
struct sim_prefix_expected {
	enum kv_status status;
	uint32_t n_tokens, n_blocks, n_blocks_new;
	const struct sim_published *path[SIM_PATH_MAX]; /* MATCH */
};
struct sim_prefix_expected sim_model_publish(struct sim_model *model, struct kv_session *real,
	uint64_t sequence_id, const struct kv_prefix_key *key, uint32_t ttl_ms, uint64_t now_ns);
struct sim_prefix_expected sim_model_match(const struct sim_model *model, struct kv_session *real,
	uint64_t sequence_id, const struct kv_prefix_key *key, uint64_t now_ns);
void sim_model_matched(struct sim_model *model, uint64_t handle, uint64_t sequence_id,
	const struct sim_prefix_expected *expected, bool is_evictable);
void sim_model_told(
	struct sim_model *model, uint64_t handle, struct kv_session *real, uint64_t from, uint32_t n_max);

/* ---- model_exact.c ---- */
/* Tokens [first, end) of the layer are planned; the ring has n_places that they can take. */
void sim_model_put_exact(const struct kv_pool_spec *spec, struct sim_layer *layer, uint32_t first,
	uint32_t end, uint32_t n_places, bool is_packed);
/* Tokens from `length` on are no more. */
void sim_model_cut_exact(const struct kv_pool_spec *spec, struct sim_layer *layer, uint32_t length);
/* The first of the layer's tokens behind which all are exact, of those before `end`. */
uint32_t sim_model_exact_lo(const struct kv_pool_spec *spec, const struct sim_layer *layer, uint32_t end);

/* ---- model_tables.c ---- */
void sim_model_open_tables(struct sim_session *session, uint32_t n_blocks);
/* Which row is in the slot now; UINT32_MAX: nobody knows. */
uint32_t sim_model_slot(const struct sim_session *session, uint32_t layer, uint32_t slot);
/* What kv_item_plan_tables() must say; it said OK; the backend is done. */
struct kv_result sim_model_plan_tables(const struct sim_session *session, const struct sim_request *request);
void sim_model_tables_planned(struct sim_session *session, struct sim_item *item, uint64_t now_ns);
void sim_model_tables_completed(struct sim_session *session, struct sim_request *request);

/* ---- model_window.c ---- */
/* Can tokens [first, end) of the layer be read, as planned lengths have it? */
bool sim_model_reaches(const struct kv_pool_spec *spec, const struct sim_sequence *sequence, uint32_t layer,
	uint32_t first, uint32_t end);
/* After a commit. */
void sim_model_move_windows(const struct kv_pool_spec *spec, struct sim_sequence *sequence);
/* May it be cut, or forked, at `length`? Then, after it was. */
enum kv_status sim_model_check_cut(
	const struct kv_pool_spec *spec, const struct sim_sequence *sequence, uint32_t length);
void sim_model_cut_windows(const struct kv_pool_spec *spec, struct sim_sequence *sequence, uint32_t length);
/* Blocks that the sequence has in the group. */
uint32_t sim_model_n_blocks(
	const struct kv_pool_spec *spec, const struct sim_sequence *sequence, uint32_t group);

/* SPILL and PREFETCH change nothing that a client could tell, except when. */
void sim_model_moved(struct sim_model *model, uint64_t handle, uint64_t sequence_id, uint16_t opcode,
	enum kv_status status);
/* A move is over: it rests again, and its exact window is gone where nothing came back. */
void sim_model_moved_end(struct sim_model *model, uint64_t handle, uint64_t sequence_id, bool is_broken);
/* What everything else says of a sequence that is not in the pool; OK: it is. */
enum kv_status sim_model_residence(struct kv_session *real, uint64_t sequence_id, bool is_write);

/* model_saved.c: snapshots */
void sim_saved_finish(struct sim_saved *saved);
void sim_model_capture_begun(struct sim_model *model);
void sim_model_captured(struct sim_model *model, const struct kv_sequence *real);
/* A published block is taken in; all that lived when the one that was begun is written were. */
void sim_model_captured_prefix(struct sim_model *model, const struct kv_pool *pool,
	const struct kv_captured_prefix *prefix, uint64_t now_ns);
void sim_model_check_captured(const struct sim_model *model, struct kv_domain *domain);
/* One of a snapshot is published again, behind the block `parent` (UINT32_MAX: none); returns the block under
 * its key then, `block` unless another one is there. */
uint32_t sim_model_put_prefix(struct sim_model *model, const char *name, const struct kv_pool *pool,
	const struct sim_published *told, uint64_t now_ns);
void sim_saved_prefixes_free(struct sim_saved_prefix *list);
/* The one that was begun is written. */
void sim_model_saved(struct sim_model *model, struct kv_domain *domain, const char *name);
/* Nobody can say which one it is now. */
void sim_model_forget_snapshot(struct sim_model *model, const char *name);
/* By name, or NULL. */
struct sim_snapshot *sim_model_snapshot(struct sim_model *model, const char *name);
/* Everything in it is there now. */
void sim_model_check_restored(struct sim_model *model, const char *name);
/* A session of a snapshot appears. */
void sim_model_restored(struct sim_model *model, const char *name, const struct kv_session *real);

/* Compares every open session with the server's own numbers. */
void sim_model_compare(const struct sim_model *model, struct kv_domain *domain);

#endif
