/*
 * Capture: which blocks a running snapshot still has to write, and what it has to say about them.
 *
 * A snapshot takes in one sequence after the other, each at one moment: its committed lengths and its blocks.
 * From then on the capture owns these blocks, so nobody writes into them (whoever would gets a copy), until a
 * batch that exports them is sealed. Blocks that several tables have stay owned until the end: only then is
 * it certain that the next sequence that has such a block means the same rows, and the file holds them once.
 * Blocks that are not full come first, because those are the ones that their sequence writes into next.
 *
 * Blocks get numbers per pool and group in the order in which they are sealed. One at a time per domain. Loop
 * thread only.
 */
#ifndef CORE_CAPTURE_H
#define CORE_CAPTURE_H

#include "core/domain.h"

struct kv_capture;

/* A number that is none: no window reaches what the table had there. */
#define KV_CAPTURE_NO_BLOCK UINT32_MAX

/* The sequence that was taken in last. Valid until the next one. */
struct kv_captured_sequence {
	uint64_t id, idle_ns;
	struct kv_pool *pool;
	bool is_evictable;
	uint32_t n_pins;
	const uint32_t *lengths;                /* [n_layers] */
	const uint32_t *n_exact;                /* [n_layers]: newest of them that are in ring blocks, too */
	uint32_t n_entries[KV_GROUPS_MAX];      /* table entries that hold committed rows */
	uint32_t n_gone[KV_GROUPS_MAX];         /* as kv_sequence has it: these have no number */
	const uint32_t *numbers[KV_GROUPS_MAX]; /* [n_entries]: complete once kv_capture_peek() says so */
};

/* A published block of the path that was taken in last. */
struct kv_captured_prefix {
	uint32_t number;       /* of the pool */
	uint32_t parent;       /* number, or KV_CAPTURE_NO_BLOCK: the first of its key */
	uint64_t ttl_left_ns;  /* 0: until it is evicted */
	bool is_end;           /* a PUBLISH ended here */
	const uint8_t *tokens; /* [block_size] u32, little-endian */
	/* Only where it is the first of its key. */
	uint64_t tenant;
	const char *adapter, *salt;
	uint32_t adapter_bytes, salt_bytes;
	uint32_t blocks[KV_GROUPS_MAX]; /* numbers: complete once kv_capture_peek() says so */
};

struct kv_captured_block {
	uint32_t group_idx, block_idx, number;
	uint32_t token_first; /* of its sequence */
};

KV_MUST_CHECK enum kv_status kv_capture_create(
	struct kv_domain *domain, struct kv_capture **out, struct kv_error *err);
/* Gives back at most n_max blocks; true when the capture holds none any more. */
bool kv_capture_release(struct kv_capture *capture, uint32_t n_max);
/* NULL allowed. Gives back everything that is left. */
void kv_capture_destroy(struct kv_capture *capture);

/* Nothing of the one before is left to be sealed. */
void kv_capture_take(struct kv_capture *capture, const struct kv_sequence *sequence, uint64_t now_ns);
/*
 * Published blocks, behind all sequences: the next one of the pool that is not taken in yet, with those
 * before it, as a sequence of whole blocks (id 0). What was published since the capture began is left out.
 * False: there is none, or (*n_looks is 0 then) n_looks nodes were looked at.
 */
bool kv_capture_take_prefix(
	struct kv_capture *capture, struct kv_pool *pool, uint64_t now_ns, uint32_t *n_looks);
uint32_t kv_capture_n_prefixes(const struct kv_capture *capture); /* of the path */
void kv_capture_prefix(const struct kv_capture *capture, uint32_t idx, struct kv_captured_prefix *prefix);
const struct kv_captured_sequence *kv_capture_sequence(const struct kv_capture *capture);
/* The next block of the sequence that has to be written; false: none is left. */
bool kv_capture_peek(struct kv_capture *capture, struct kv_captured_block *block);
/* Its export is in a batch that is about to be sealed. */
void kv_capture_sealed(struct kv_capture *capture);
/* Rows that the sequence has in this block on the layer. */
uint32_t kv_capture_n_rows(
	const struct kv_capture *capture, const struct kv_captured_block *block, uint32_t layer_idx);

/* For the audit: owners[g][block] of the pool, one more for every block that is owned here. */
void kv_capture_count(const struct kv_capture *capture, const struct kv_pool *pool, uint32_t *const owners[]);

#endif
