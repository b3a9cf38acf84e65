/*
 * The one door between the C host control and the CUDA kernels: plain structs whose sizes both compilers
 * assert, and one launch function per kernel. Byte offsets are 64-bit, indices 32-bit.
 *
 * All pointers are device addresses, or addresses of pinned host memory, which the device reads and writes in
 * place (payload rows, queries, outputs). Launch functions only enqueue; they never allocate and never wait.
 * They return the error of the launch and leave no sticky error behind for a later call to report.
 */
#ifndef GPU_KERNELS_H
#define GPU_KERNELS_H

#include <cuda_runtime_api.h>
#include <stdint.h>

#ifdef __cplusplus
#define KVG_STATIC_ASSERT(cond, text) static_assert(cond, text)
extern "C" {
#else
#define KVG_STATIC_ASSERT(cond, text) _Static_assert(cond, text)
#endif

#define KVG_NONE          UINT32_MAX
#define KVG_SEGMENTS_MAX  4u
#define KVG_FIELDS_MAX    4u
#define KVG_DIM_MAX       256u
#define KVG_ROW_BYTES_MAX 1280u
#define KVG_HEADS_MAX     8u  /* query heads that share one pass over the rows */
#define KVG_TILE_TOKENS   16u /* block sizes are multiples of it */

/* Numbers as on the wire; the host asserts that they are those of core/number.h. */
enum kvg_dtype { KVG_F32 = 1, KVG_F16 = 2, KVG_BF16 = 3, KVG_PACKED = 16 };

enum kvg_family { KVG_DENSE = 0, KVG_FP8 = 1, KVG_TQ = 2, KVG_TQP = 3, KVG_VN = 4, KVG_RECIPE = 5 };

enum kvg_layout {
	KVG_LAYOUT_ROWS = 0, /* [block][kv_head][token][row_bytes], K and V apart */
	KVG_LAYOUT_TILES =
		1, /* [block][kv_head][tile]: K indices, K norms, V indices, V norms of 16 tokens */
};

/* Signs and butterflies, or a dense matrix. Table positions are counted in words of kvg_tables.words. */
struct kvg_rotation {
	uint32_t is_dense;
	uint32_t dim;
	uint32_t signs_in, signs_out;       /* butterflies: [dim] floats */
	uint32_t matrix, matrix_transposed; /* dense: [dim, dim] floats, row-major */
	float factors[9];                   /* butterflies: of a block of 2^i channels */
	uint32_t reserved;
};
KVG_STATIC_ASSERT(sizeof(struct kvg_rotation) == 64, "kvg_rotation is an ABI between two compilers");

/* core/format.h, struct kv_segment, with fields resolved to byte offsets in the row. KVG_NONE: absent. */
struct kvg_segment {
	uint32_t n_channels;
	uint32_t channels; /* words: [n_channels] channel numbers */
	uint32_t rotation; /* index of kvg_tables.rotations */
	uint32_t is_added;
	uint32_t prepared_idx;
	uint32_t is_table; /* else numbers of `number` */
	uint32_t number;
	uint32_t bits;
	uint32_t n_codes;
	uint32_t offset, payload_bytes;
	uint32_t table;      /* words: [2^bits] floats */
	uint32_t boundaries; /* words: [2^bits - 1] floats */
	uint32_t factors;    /* words: [n_channels] floats */
	uint32_t group_channels;
	uint32_t scale_offset, scale_number;
	uint32_t zero_offset, zero_number;
	uint32_t outer_offset, outer_number;
	uint32_t reserved;
};
KVG_STATIC_ASSERT(sizeof(struct kvg_segment) == 88, "kvg_segment is an ABI between two compilers");

struct kvg_field {
	uint32_t may_be_negative;
	uint32_t number;
	uint32_t count;
	uint32_t offset;
};

struct kvg_codec {
	uint32_t family; /* enum kvg_family */
	uint32_t head_dim, row_bytes, prepared_dim;
	uint32_t bits;
	uint32_t norm_correction;
	uint32_t n_segments, n_fields;
	struct kvg_segment segments[KVG_SEGMENTS_MAX];
	struct kvg_field fields[KVG_FIELDS_MAX];
};
KVG_STATIC_ASSERT(sizeof(struct kvg_codec) == 448, "kvg_codec is an ABI between two compilers");

struct kvg_layer {
	uint8_t *k, *v;                        /* pages; in KVG_LAYOUT_TILES v is unused */
	uint64_t k_block_bytes, v_block_bytes; /* of one block, all KV heads; 0 = no tensor */
	/* Ring blocks of the exact window: [block][kv_head][token] rows of bf16; NULL: the pool has none. */
	uint8_t *exact_k, *exact_v;
	uint32_t k_codec, v_codec; /* indices of kvg_tables.codecs */
	uint32_t k_heads, v_heads; /* words: [kv_heads] codec indices in place of these; or KVG_NONE */
	uint32_t k_center;         /* words: [kv_heads, k_head_dim] floats, or KVG_NONE */
	uint32_t k_bytes_before, v_bytes_before; /* one packed row of each layer before */
	uint32_t group_idx;
	uint32_t layout; /* enum kvg_layout */
	/* core/attention.h, struct kv_attention_options. In KVG_LAYOUT_TILES only sinks. */
	float softcap;                         /* 0: none */
	uint32_t sinks, alibi;                 /* words: [q_heads] floats, or KVG_NONE */
	uint32_t exact_k_codec, exact_v_codec; /* of ring blocks, or KVG_NONE */
};
KVG_STATIC_ASSERT(sizeof(struct kvg_layer) == 104, "kvg_layer is an ABI between two compilers");

/* Tables of one pool in device memory. */
struct kvg_tables {
	const struct kvg_layer *layers;
	const struct kvg_codec *codecs;
	const struct kvg_rotation *rotations;
	const uint32_t *words;
	uint32_t n_layers, n_codecs;
	uint32_t q_heads, kv_heads;
	uint32_t k_head_dim, v_head_dim;
	uint32_t block_size;
	uint32_t reserved;
};
KVG_STATIC_ASSERT(sizeof(struct kvg_tables) == 64, "kvg_tables is an ABI between two compilers");

/* ---- begin and end of a batch ---- */

#define KVG_PIECE_RUNS 2

struct kvg_piece_run {
	const void *from; /* host memory */
	void *to;
	uint64_t n_pieces; /* of 16 bytes */
};

struct kvg_begin_params {
	struct kvg_piece_run runs[KVG_PIECE_RUNS];
	uint64_t *begin_ns, *copied_ns; /* host memory: the device's clock before and after; or NULL */
};
KVG_STATIC_ASSERT(sizeof(struct kvg_begin_params) == 64, "kvg_begin_params is an ABI between two compilers");
cudaError_t kvg_begin_launch(const struct kvg_begin_params *params, cudaStream_t stream);

struct kvg_end_params {
	const uint64_t *flags_from;
	uint64_t *flags_to; /* host memory, like all below */
	uint64_t *end_ns;
	uint32_t *ticket_at;
	uint32_t n_flags;
	uint32_t ticket; /* written to ticket_at after everything else */
};
KVG_STATIC_ASSERT(sizeof(struct kvg_end_params) == 40, "kvg_end_params is an ABI between two compilers");
cudaError_t kvg_end_launch(const struct kvg_end_params *params, cudaStream_t stream);

/* ---- rows: updates and transfers ---- */

enum kvg_row_mode { KVG_ROWS_WRITE = 0, KVG_ROWS_READ = 1 };

/* Where rows lie: struct kv_rows of core/backend.h. */
struct kvg_row_op {
	uint8_t *k, *v; /* NULL: not wanted */
	uint64_t k_stride, v_stride;
	const int64_t *slots;       /* [n_groups, n_tokens], negative = skip */
	const int64_t *exact_slots; /* [n_tokens], negative = not exact; NULL: none is */
	uint64_t row_first;         /* rows of the ops before */
	uint32_t k_token_first, v_token_first;
	uint32_t k_dtype, v_dtype;
	uint32_t result_idx;
	uint32_t layer_first, n_layers, n_tokens;
	uint32_t mode;    /* enum kvg_row_mode */
	uint32_t is_ring; /* rows of ring blocks as they lie there; slots are not looked at */
};
KVG_STATIC_ASSERT(sizeof(struct kvg_row_op) == 96, "kvg_row_op is an ABI between two compilers");

struct kvg_rows_params {
	struct kvg_tables tables;
	const struct kvg_row_op *ops; /* [n_ops], rows in order (layer, side, token, head) */
	uint64_t *flags;              /* [n_results]: the smallest (layer << 32 | token) that is refused */
	uint64_t n_rows;
	uint32_t n_ops;
	uint32_t reserved;
};
KVG_STATIC_ASSERT(sizeof(struct kvg_rows_params) == 96, "kvg_rows_params is an ABI between two compilers");
cudaError_t kvg_rows_launch(const struct kvg_rows_params *params, cudaStream_t stream);

/* ---- block copies ---- */

struct kvg_copy_op {
	uint32_t group_idx, block_from, block_to, reserved;
};

struct kvg_copy_params {
	struct kvg_tables tables;
	const struct kvg_copy_op *ops; /* [n_ops], in order of effect */
	uint64_t block_bytes_max;
	uint32_t n_ops;
	uint32_t reserved;
};
KVG_STATIC_ASSERT(sizeof(struct kvg_copy_params) == 88, "kvg_copy_params is an ABI between two compilers");
cudaError_t kvg_copy_launch(const struct kvg_copy_params *params, cudaStream_t stream);

/* ---- decode ---- */

enum kvg_decode_flag { KVG_Q_ROTATED = 1, KVG_OUT_ROTATED = 2, KVG_NO_SINKS = 4 };

struct kvg_decode_op {
	const uint8_t *q; /* [q_len, q_heads, k_head_dim] */
	uint8_t *out;     /* [q_len, q_heads, v_head_dim] */
	float *lse;       /* [q_len, q_heads] or NULL */
	float scale;
	uint32_t result_idx, layer;
	uint8_t q_dtype, out_dtype, flags, reserved;
};
KVG_STATIC_ASSERT(sizeof(struct kvg_decode_op) == 40, "kvg_decode_op is an ABI between two compilers");

/*
 * One query row: attends to tokens [first_lo, first_hi), rows layout only, and [token_lo, token_hi). A
 * virtual head is a KV head and up to KVG_HEADS_MAX of its query heads. Rows without tokens have no work and
 * are answered by the finish kernel alone.
 *
 * Where a pool has an exact window, a row has two of these: for its tokens in pages, and for those in ring
 * blocks, which are counted from the first one that the table names.
 */
struct kvg_decode_row {
	uint32_t op_idx, row;
	uint32_t token_lo, token_hi;
	uint32_t work_first; /* work of the rows before */
	uint32_t n_work;     /* per virtual head: pieces (rows layout) or units (tiles) */
	uint32_t piece_tokens;
	uint32_t first_lo, first_hi; /* at most token_lo */
	uint32_t position;           /* the query's own token */
	const uint32_t *table;
	/* Tiles: what its layer says, so that a kernel on its way to the next row reads one struct. */
	const uint8_t *pages;
	uint32_t farthest; /* distance from position to the first token that is seen, wherever it lies */
	uint32_t reserved; /* a multiple of 16 bytes: kvg_stage() lays rows out one by one */
};
KVG_STATIC_ASSERT(sizeof(struct kvg_decode_row) == 64, "kvg_decode_row is an ABI between two compilers");

/* One wave: rows of one class of layers, bounded by the workspace. */
struct kvg_decode_params {
	struct kvg_tables tables;
	const struct kvg_decode_op *ops;
	const struct kvg_decode_row *rows; /* [n_rows] */
	uint64_t *flags;
	float *q_prepared;  /* [n_rows, q_heads, k_dim_max], or fragments of the tiles kernel */
	float *q_scales;    /* tiles: [n_rows, virtual heads] */
	float *q_offsets;   /* [n_rows, q_heads]: what the K centre adds to every logit of a query */
	float *partials;    /* [slots, heads, v_dim_max] */
	float *partials_ml; /* [slots, heads, 2]: maximum in log2 units, sum */
	/* The same for tokens in ring blocks, in the channels' own basis; exact_rows NULL: none. */
	const struct kvg_decode_row *exact_rows; /* [n_rows] */
	float *exact_queries;                    /* [n_rows, q_heads, k_head_dim] */
	float *exact_partials;                   /* [slots, heads, v_head_dim] */
	float *exact_partials_ml;
	uint32_t n_exact_work;
	uint32_t is_exact; /* this launch is about them: rows, q_prepared and partials are theirs */
	uint32_t n_rows;
	uint32_t n_work;               /* of all rows and virtual heads */
	uint32_t n_heads;              /* query heads of a full virtual head: min(group, KVG_HEADS_MAX) */
	uint32_t n_chunks;             /* virtual heads per KV head */
	uint32_t k_dim_max, v_dim_max; /* strides of q_prepared and partials */
	uint32_t raw_bytes_max;        /* rows layout: bytes of a row, the largest of the wave */
	uint32_t n_blocks;             /* tiles: blocks of the grid */
	/* Tiles: 2, 3 or 4 each; else 0. */
	uint32_t k_bits, v_bits;
	/* Tiles, words: 16 float16 bit patterns, one a word; or 8 signed bytes, and 8 of what rounding took
	 * off.
	 */
	uint32_t k_table, v_table;
	float k_scale, v_scale; /* what the centroids were multiplied with */
	uint32_t unit_tokens;
	uint32_t is_dependent; /* kernels of a wave begin while the one before still ends */
	uint32_t
		idle_units; /* tiles: at the end of the units of every row and virtual head, without tokens */
	uint32_t reserved;
};
KVG_STATIC_ASSERT(
	sizeof(struct kvg_decode_params) == 240, "kvg_decode_params is an ABI between two compilers");
/* Rotates the queries of the wave and brings them into the form that its kernel reads. Flags BAD_VALUE. */
cudaError_t kvg_decode_prepare_launch(const struct kvg_decode_params *params, cudaStream_t stream);
/* Attention over rows of any format. */
cudaError_t kvg_decode_rows_launch(const struct kvg_decode_params *params, cudaStream_t stream);
/* The same kernel over the exact rows of the wave; nothing where there are none. */
cudaError_t kvg_decode_exact_launch(const struct kvg_decode_params *params, cudaStream_t stream);
/* Tiles at head dims 64 and 128: tq4 exactly, tq2 and tq3 in integers, K of tq4 exactly with V of tq2 in
 * integers. */
cudaError_t kvg_decode_tiles_launch(const struct kvg_decode_params *params, cudaStream_t stream);
/* Merges the partial results of each query, rotates back, stores outputs and log-sum-exps. */
cudaError_t kvg_decode_finish_launch(const struct kvg_decode_params *params, cudaStream_t stream);

/* How the kernel over tiles wants its work; all 0 where it is not built. */
struct kvg_tiles_plan {
	uint32_t unit_tokens;
	uint32_t fragment_words; /* 32-bit words of queries per (row, virtual head) */
};
struct kvg_tiles_plan kvg_decode_tiles_plan(
	uint32_t head_dim, uint32_t k_bits, uint32_t v_bits, uint32_t n_heads);

/* Once at start: loads every kernel and sets its limits, so that no launch has to. */
cudaError_t kvg_kernels_load(void);

#ifdef __cplusplus
}
#endif

#endif
