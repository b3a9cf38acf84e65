/*
 * A checkpoint from inside: checkpoint.c has its life and its file, checkpoint_save.c what goes out,
 * checkpoint_load.c what comes in.
 */
#ifndef SERVER_CHECKPOINT_INTERNAL_H
#define SERVER_CHECKPOINT_INTERNAL_H

#include "core/capture.h"
#include "core/stage.h"
#include "server/checkpoint.h"
#include "server/checkpoint_format.h"
#include "server/internal.h"

#define SRV_CHUNK_BYTES_MIN   1048576u
#define SRV_RECORDS_PER_CHUNK 4096u /* also a bound of the work in one turn */
#define SRV_CAPTURE_RELEASE   256u  /* blocks a turn, out of the bound of a turn */

enum srv_checkpoint_state {
	CKPT_IDLE,
	CKPT_OPEN,   /* file operation */
	CKPT_FILL,   /* saving: records are put into the chunk; or waits for a lane to do so */
	CKPT_SEALED, /* blocks are on their way from or to the pool */
	CKPT_WRITE,  /* file operation */
	CKPT_SYNC,   /* file operation */
	CKPT_RENAME, /* file operation */
	CKPT_DIR_OPEN,
	CKPT_DIR_SYNC,
	CKPT_READ,    /* file operation */
	CKPT_PARSE,   /* loading: records are taken from the chunk; or waits for a lane to do so */
	CKPT_UNLINK,  /* file operation: what is half written */
	CKPT_RELEASE, /* blocks that are still owned are given back */
};

/* What fill and parse stopped for. */
enum srv_checkpoint_stop {
	CKPT_STOP_LANE,  /* goes on in a batch of checkpoint->mover.lane */
	CKPT_STOP_FETCH, /* saving: the next sequence is on its way back from a tier */
	CKPT_STOP_CHUNK, /* the chunk is full (saving), or has no whole record any more (loading) */
	CKPT_STOP_TURN,  /* saving: enough for this turn */
	CKPT_STOP_MOVES, /* enough for this batch or turn; what is in it has to come back first */
	CKPT_STOP_END,   /* everything is in the chunk (saving), or staged (loading) */
	CKPT_STOP_FAILED,
};

/* Where saving goes on. */
enum srv_checkpoint_phase {
	SAVE_FILE,
	SAVE_POOLS,
	SAVE_SESSION,
	SAVE_SEQUENCE, /* the next one is taken in, with its lengths and its exact window */
	SAVE_BLOCKS,
	SAVE_TABLES,
	SAVE_PATH, /* the next published path is taken in; its blocks follow */
	SAVE_PREFIXES,
	SAVE_END,
};

struct srv_checkpoint {
	struct srv_server *server;
	struct srv_mover mover;
	struct kv_sm sm;
	enum srv_checkpoint_stop stop; /* of what is sealed */
	bool is_save, is_optional, is_file_made, is_open;
	bool is_complete; /* saving: the trailer is in the chunk */
	struct srv_file file;
	int fd;
	char path[512], temp_path[512], dir[512];
	char name[65];
	uint64_t file_bytes, offset; /* loading: size of the file; bytes written or read */
	/* the chunk */
	uint8_t *chunk;           /* [chunk_bytes] host_alloc */
	uint64_t chunk_bytes_min; /* tests lower it */
	uint64_t chunk_bytes, used_bytes, written_bytes;
	struct srv_record *records; /* [SRV_RECORDS_PER_CHUNK] saving: of the records in the chunk */
	uint64_t *record_at;        /* [SRV_RECORDS_PER_CHUNK] */
	uint32_t n_records;
	/* saving */
	struct kv_capture *capture;
	enum srv_checkpoint_phase phase;
	uint32_t pool_idx, session_slot, group_idx, entry_idx, path_idx;
	uint64_t session_only, session, sequence_from, started_ns;
	bool is_waiting;                 /* for that */
	uint8_t file_pool[KV_POOLS_MAX]; /* number in the file, by pool_idx */
	/* loading */
	struct kv_stage *stage;
	uint64_t parse_at;
	uint32_t n_pools_announced, n_pools;
	struct kv_pool *pools[KV_POOLS_MAX]; /* by number in the file; NULL: this daemon has none */
	char pool_names[KV_POOLS_MAX][KV_POOL_NAME_BYTES_MAX + 1];
	struct kv_pool *session_pool;
	uint32_t lengths[KV_LAYERS_MAX];
	uint32_t entries[SRV_TABLE_ENTRIES_MAX];
	struct srv_record_end end; /* counted so far */
	/* the last or the running one */
	struct srv_checkpoint_view view;
	struct kv_error err;
	enum kv_status status;
};

/* checkpoint.c */
/* Posts the operation; its end is the end of the state. */
void srv_checkpoint_post(
	struct srv_checkpoint *checkpoint, enum srv_checkpoint_state state, struct kv_io_file op);
void srv_checkpoint_on_file(struct srv_file *file);
void srv_checkpoint_on_seal(struct srv_mover *mover, struct kv_plan *plan);
void srv_checkpoint_on_moved(struct srv_mover *mover, enum kv_status status, const struct kv_result *result);

/* checkpoint_save.c */
KV_MUST_CHECK enum kv_status srv_save_begin(struct srv_checkpoint *checkpoint, struct kv_error *err);
/* plan NULL: only what needs no batch. */
enum srv_checkpoint_stop srv_save_fill(struct srv_checkpoint *checkpoint, struct kv_plan *plan);
/* After CKPT_STOP_FETCH: may it go on? */
bool srv_save_is_ready(struct srv_checkpoint *checkpoint);
/* Of the records that are put into a chunk at once when a sequence is taken in. */
uint64_t srv_save_sequence_bytes(const struct kv_pool_spec *spec);
/* The rows are there: checksums and headers of everything in the chunk. */
void srv_save_finish_chunk(struct srv_checkpoint *checkpoint);

/* checkpoint_load.c */
KV_MUST_CHECK enum kv_status srv_load_begin(struct srv_checkpoint *checkpoint, struct kv_error *err);
enum srv_checkpoint_stop srv_load_parse(struct srv_checkpoint *checkpoint, struct kv_plan *plan);

#endif
