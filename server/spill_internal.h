/*
 * Spill from inside: spill.c has jobs, tiers and policy, spill_move.c moves one sequence.
 */
#ifndef SERVER_SPILL_INTERNAL_H
#define SERVER_SPILL_INTERNAL_H

#include "core/tier.h"
#include "server/internal.h"
#include "server/spill.h"

#define SRV_SPILL_CHUNK_BYTES 1048576u
#define SRV_SPILL_SCAN_NS     (50 * KV_NS_PER_MS)
#define SRV_SPILL_SCAN_MAX    64u /* sequences looked at in one scan */
/* Who asked for it was told BUSY_RETRY, and clients pause for up to a second before they ask again. */
#define SRV_SPILL_STAY_NS (2000 * KV_NS_PER_MS)

enum srv_spill_state {
	SPILL_IDLE,
	SPILL_MOVE,  /* blocks go out or in with batches of the lane */
	SPILL_PAGE,  /* a file operation on a page */
	SPILL_PROBE, /* start: the file is made, written, read and unlinked */
};

/*
 * A piece of the sequence, in the order of its image: a block of a group, or behind all groups the exact
 * window of one layer, which is entry_idx then.
 */
struct srv_spill_at {
	uint32_t group_idx, entry_idx;
};

struct srv_spill {
	struct srv_server *server;
	struct srv_mover mover;
	struct srv_file file;
	enum srv_spill_state state;
	struct kv_tier tiers[2]; /* host, file */
	uint8_t *host;           /* [n_pages, KV_TIER_PAGE_BYTES] host_alloc */
	uint64_t host_bytes;
	int fd; /* -1: there is no file tier (any more) */
	char path[320];
	uint32_t probe_step;
	uint64_t probe_ns;
	struct kv_list jobs; /* kv_sequence.in_moves, the first is being moved */
	/* the job */
	struct kv_sequence *sequence; /* held */
	bool is_out, has_failed;
	uint8_t *chunk; /* [chunk_bytes] host_alloc */
	uint64_t chunk_bytes;
	struct srv_spill_at first, end,
		at; /* pieces of the chunk: where it begins and ends, the next to move */
	uint64_t used_bytes, moved_bytes; /* of the chunk */
	uint32_t page_idx, n_pages_done;  /* the next page of the image; of the chunk's */
	uint32_t page_bytes_done;         /* of a file operation that did less */
	/* policy */
	uint64_t next_scan_ns, scan_session;
	uint32_t scan_slot;
	uint64_t scan_sequence;
};

static inline bool srv_spill_is_end(const struct srv_spill *spill, struct srv_spill_at at)
{
	return at.group_idx == spill->sequence->pool->spec->n_tables;
}

/* spill_move.c */
/* The largest piece of a pool. */
uint64_t srv_spill_piece_bytes_max(const struct kv_pool_spec *spec);
/* Pages that an image of the sequence takes. */
uint32_t srv_spill_n_pages(const struct srv_spill *spill, const struct kv_sequence *sequence);
/* The first job, if none is being moved. */
void srv_spill_begin_job(struct srv_spill *spill);
void srv_spill_on_seal(struct srv_mover *mover, struct kv_plan *plan);
void srv_spill_on_moved(struct srv_mover *mover, enum kv_status status, const struct kv_result *result);
void srv_spill_page_done(struct srv_spill *spill);

#endif
