/*
 * The backend interface, version 1: everything that touches row bytes.
 *
 * Implementations: the scalar CPU backend (the oracle), later the fast CPU backend and CUDA, and the
 * simulation's fake. The loop thread is the only caller; a backend's own threads call nothing of the caller
 * except kv_job.run.
 *
 * A batch holds the work of one pool that was sealed in one turn. Its order of effects is: block copies,
 * updates, decodes, exports. Batches take effect in submit order. Every pointer in a batch points into its
 * plan area or into memory from host_alloc(), and stays valid until reap() hands the batch back.
 */
#ifndef CORE_BACKEND_H
#define CORE_BACKEND_H

#include <stdbool.h>
#include <stdint.h>

#include "core/error.h"
#include "core/pool_spec.h"

#define KV_BACKEND_VERSION 1u
#define KV_ROW_NONE        UINT32_MAX
#define KV_LAYER_NONE      UINT16_MAX

struct kv_backend;
struct kv_backend_pool; /* a pool's pages and tables on the device; owned by the backend */

/*
 * Rows of one item as they lie in a request, [layers][tokens of the frame][kv_heads][row]. All layers have
 * rows of the same size unless dtype is packed and their formats differ. Layers l are counted from
 * layer_first, r(l) is the bytes of a row on layer l, tokens t are counted in the item. The rows of a token
 * begin at
 *
 *	base + kv_heads * (tokens_stride * (r(0) + .. + r(l - 1)) + t * r(l) + token_first * (r(l) - r(0)))
 *
 * which is base + (l * tokens_stride + t) * kv_heads * r where all are r; head h is h * r(l) further.
 */
struct kv_rows {
	uint8_t *base;          /* first layer, first token of the item; NULL: not wanted */
	uint64_t tokens_stride; /* tokens per layer in the frame (n_tokens_total) */
	uint32_t token_first;   /* of the item in the frame */
	uint8_t dtype;          /* enum kv_dtype: f32, f16, bf16, packed */
};

struct kv_copy_op {
	uint32_t group_idx, block_from, block_to;
};

/* Writes n_tokens rows of K and V on layers [layer_first, layer_first + n_layers). */
struct kv_update_op {
	uint32_t result_idx;
	uint32_t layer_first, n_layers, n_tokens;
	const int64_t *slots; /* [n_groups, n_tokens]: block * block_size + offset in the layer's group;
				 negative = skip */
	/*
	 * Where the rows are kept as bf16 as well, in pools with exact_tokens: ring block * block_size +
	 * offset, the same on all layers, [n_tokens]; negative = not kept. NULL: none is. No place twice, and
	 * none for a token whose slot is negative or taken by a later one.
	 */
	const int64_t *exact_slots;
	struct kv_rows k, v;
};

/* One query item: q_len rows of one sequence on one layer. */
struct kv_decode_op {
	uint32_t result_idx;
	uint32_t layer;
	uint32_t q_len;
	uint32_t n_tokens_seen; /* by the last row; row i sees n_tokens_seen - q_len + 1 + i */
	uint32_t window;        /* 0 = none; the layer's and the request's already combined */
	float scale;            /* > 0; the layer's or the request's */
	uint8_t q_dtype, out_dtype;
	uint8_t flags; /* enum kv_decode_flag */
	/*
	 * [ceil(n_tokens_seen / block_size)] block ids in the layer's group; KV_BLOCK_NONE where a block was
	 * freed because no window reaches it: such an entry is not used.
	 */
	const uint32_t *table;
	/*
	 * Tokens from exact_lo on are read from ring blocks in place of pages, in the same softmax. NULL:
	 * none. [ceil(n_tokens_seen / block_size) - exact_lo / block_size] ring block ids, one per block of
	 * tokens from that of exact_lo on; the first and the last may be the same one.
	 */
	const uint32_t *exact_table;
	uint32_t exact_lo;
	const uint8_t *q; /* [q_len, q_heads, k_head_dim] of q_dtype */
	uint8_t *out;     /* [q_len, q_heads, v_head_dim] of out_dtype */
	float *lse;       /* [q_len, q_heads], natural logarithm, or NULL */
};
enum kv_decode_flag {
	KV_DECODE_Q_ROTATED = 1,
	KV_DECODE_OUT_ROTATED = 2,
	KV_DECODE_NO_SINKS = 4,
};

/*
 * Reads rows by slot, or (is_import) writes packed rows by slot. dtype packed is the row layout of FORMATS 6
 * (contiguous slots of whole blocks give exactly the page tensor); other dtypes are decoded rows.
 */
struct kv_transfer_op {
	uint32_t result_idx;
	uint32_t layer_first, n_layers, n_tokens;
	const int64_t *slots; /* [n_groups, n_tokens], none negative */
	/* READ of the exact window: these rows are read from ring blocks in place of slots. As in updates. */
	const int64_t *exact_slots;
	struct kv_rows k, v;
	bool is_import;
	/*
	 * Rows of ring blocks as they lie there, in or out: bf16, with what k_center takes off taken off.
	 * exact_slots has no negative one then, all slots are negative, k and v are bf16.
	 */
	bool is_ring;
};

/* What became of an item; written by the backend before reap(). */
struct kv_result {
	uint16_t status; /* enum kv_status: OK, BAD_VALUE, ... */
	uint16_t layer;  /* first bad layer of the pool, else KV_LAYER_NONE */
	uint32_t row;    /* first bad row (token) in the item, else KV_ROW_NONE */
};

struct kv_batch {
	struct kv_backend_pool *pool;
	const struct kv_copy_op *copies;
	struct kv_update_op *updates;
	struct kv_decode_op *decodes;
	struct kv_transfer_op *transfers;
	struct kv_result *results; /* [n_results], preset to OK by the caller */
	uint32_t n_copies, n_updates, n_decodes, n_transfers, n_results;
	uint8_t *plan; /* the area, from host_alloc(), that all arrays above and their tables lie in */
	uint64_t plan_bytes_used;
	enum kv_status status;                       /* of the whole batch after reap(): OK or DEVICE_LOST */
	uint32_t copy_in_us, kernel_us, copy_out_us; /* after reap() */
	void *user;                                  /* the caller's */
	struct kv_batch *next;                       /* the backend's while submitted */
};

/* Work that computes and is no batch: rotation matrices, codebooks, encoder tables. */
struct kv_job {
	void (*run)(struct kv_job *job); /* on a worker thread */
	void *user;
	struct kv_job *next; /* the backend's while posted */
};

struct kv_backend_info {
	char device[96]; /* "CPU, 2 threads" */
	char instruction_set[32];
	uint64_t memory_bytes; /* of the arena */
	uint32_t n_threads;
};

struct kv_backend_ops {
	const char *name; /* "cpu", "cuda", "sim" */
	void (*info)(struct kv_backend *backend, struct kv_backend_info *out);
	/* Can this pool be served? Bytes it takes from the arena, or UNSUPPORTED with the reason. Pure. */
	enum kv_status (*pool_check)(struct kv_backend *backend, const struct kv_pool_spec *spec,
		uint64_t *arena_bytes, struct kv_error *err);
	/* Once, at start. NO_MEMORY names wanted and free bytes. */
	enum kv_status (*arena_create)(struct kv_backend *backend, uint64_t n_bytes, struct kv_error *err);
	/* The pool's region of the arena. `spec` outlives the pool. Contents of pages are undefined at first.
	 */
	enum kv_status (*pool_create)(struct kv_backend *backend, const struct kv_pool_spec *spec,
		uint64_t arena_offset, struct kv_backend_pool **out, struct kv_error *err);
	/* No batch of the pool may be in flight. NULL allowed. */
	void (*pool_destroy)(struct kv_backend *backend, struct kv_backend_pool *pool);
	/* Memory that submit() can read and write (pinned on CUDA), aligned to 4096. NULL on failure. */
	void *(*host_alloc)(struct kv_backend *backend, uint64_t n_bytes);
	void (*host_free)(struct kv_backend *backend, void *ptr, uint64_t n_bytes);
	/*
	 * Takes ownership of batch until reap() returns it. On failure ownership stays with the caller:
	 * BUSY_RETRY (try again later) or DEVICE_LOST. May finish the batch at once when that is quicker than
	 * handing it over: call reap() after submit().
	 */
	enum kv_status (*submit)(struct kv_backend *backend, struct kv_batch *batch, struct kv_error *err);
	/* The oldest submitted batch if it is finished, else NULL. Never out of order. */
	struct kv_batch *(*reap)(struct kv_backend *backend);
	/* Jobs run beside batches, at most one at a time; false when 16 are waiting. */
	bool (*job_post)(struct kv_backend *backend, struct kv_job *job);
	struct kv_job *(*job_reap)(struct kv_backend *backend);
	/* Becomes readable when reap() or job_reap() has something that was not finished inside submit(); -1:
	 * never. */
	int (*event_fd)(struct kv_backend *backend);
	/*
	 * The caller is about to wait for event_fd. Where this is not NULL, batches finish without the
	 * processor's help, and event_fd tells only of those that were in flight at such a call: being woken
	 * costs more than polling reap() for a short while, so who polls should not pay for it.
	 */
	void (*will_sleep)(struct kv_backend *backend);
	/* Waits for what is in flight. NULL allowed. */
	void (*destroy)(struct kv_backend *backend);
};
struct kv_backend {
	const struct kv_backend_ops *ops;
};

#endif
