/*
 * Fast attention over packed rows: what the fast CPU backend computes with (core/FAST.md).
 *
 * A row codec is seen as parts: channels that share one scale, as codes of a table or as numbers. Tables,
 * queries and weights are rounded to 16-bit integers and multiplied pairwise into 32-bit sums, which cannot
 * overflow; numbers that are stored as they are stay float32. Where a part's channels lie in a prepared query
 * or in a weighted sum ("slots") follows from how the instruction set takes codes apart.
 *
 * core/fast_kernels.c is compiled once per instruction set; other processors have no fast path. Sets differ
 * in their bits, but one set gives the same bits for a query whatever else is computed beside it.
 *
 * Pure functions, any thread, no heap. Rows may be anything: what is read outside of them is never used, but
 * KV_FAST_SLACK_BYTES behind the last row must be readable.
 */
#ifndef CORE_FAST_H
#define CORE_FAST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/format.h"

#define KV_FAST_SLACK_BYTES  64u
#define KV_FAST_STEP_TOKENS  128u /* of one call */
#define KV_FAST_BLOCK_TOKENS 32u  /* that are worked on together */
#define KV_FAST_RUN_TOKENS   16u  /* lie in one block of every pool, one after the other */
#define KV_FAST_PARTS_MAX    8u
#define KV_FAST_RUNS_MAX     4u
#define KV_FAST_RUN_HALVES   8u
#define KV_FAST_SLOTS_MAX    3072u /* prepared_dim, padded, with the tables of 1-bit and 2-bit codes */
#define KV_FAST_CODES_STEP   32u   /* slots of codes are a multiple of it */
#define KV_FAST_BITS_STEP    64u   /* of a row that are looked up four at a time: sums stay within 16 bits */
#define KV_FAST_BITS_SUMS    32u   /* weighted sums of them that are made together */
#define KV_FAST_QUERIES_MAX  4u    /* of one call */
#define KV_FAST_ROW_WORDS    8u /* 16-bit words of a row of 4-bit codes that are scored together: 128 bits */
#define KV_FAST_SLOT_NONE    UINT16_MAX
/* Logits count powers of 2, so that their exponentials need no other base. */
#define KV_FAST_LOG2_E 1.4426950408889634
/*
 * Greatest magnitudes. A table of K meets queries, a table of V weights, whose magnitudes add up to
 * KV_FAST_SUM_MAX of the table's at most: no sum reaches 2^31.
 */
#define KV_FAST_K_TABLE_MAX        4095
#define KV_FAST_V_TABLE_MAX        2047
#define KV_FAST_WEIGHT_MAX         32767
#define KV_FAST_SUM_MAX(table_max) (INT32_MAX / (table_max))
/* Of E4M3, K and V: 448 in units of 2^-5, so what is at least 2^-2 is a whole number of units. */
#define KV_FAST_E4M3_TABLE_MAX 14336
#define KV_FAST_E4M3_UNIT      0x1p-5f
/* Of a table of V whose sums are 16 bits wide: weights of KV_FAST_BLOCK_TOKENS add up to 2^15 at most. */
#define KV_FAST_SHORT_TABLE_MAX 32767
/*
 * Weights of a step share a unit unless one of them is more than this part of their sum; then those of a
 * block do. Either way rounding costs at most KV_FAST_BLOCK_TOKENS / 2 / KV_FAST_WEIGHT_MAX of the sum.
 */
#define KV_FAST_SHARE_MAX (1.0f * KV_FAST_BLOCK_TOKENS / KV_FAST_STEP_TOKENS)

/*
 * Tables of more than 16 entries for sets that look up bytes in 16. Of 5 bits: the low bytes of all entries,
 * then the high ones. Of 6 bits the same of the lower half, of which the upper one is the negative (V) or
 * the complement: values of K are entries plus KV_FAST_MIRRORED_OFFSET. Of 7 and 8: the lower half, of which
 * the upper one is the mirror image, in 16 steps: entry i is base[step] * KV_FAST_HALVED_OF_K (V) + byte[i] *
 * factor[step]. Bytes first.
 */
#define KV_FAST_MIRRORED_BITS   6u
#define KV_FAST_MIRRORED_OFFSET 0.5f
#define KV_FAST_HALVED_BASES    128u
#define KV_FAST_HALVED_FACTORS  144u
#define KV_FAST_PIECES_BYTES    160u
/* What bases count: bytes of them reach the greatest entry. */
#define KV_FAST_HALVED_OF_K 16
#define KV_FAST_HALVED_OF_V 127
/*
 * Those of 7 and 8 bits that are smooth: x * (a[step] + b[step] * y) as parts of 2^15, x being 2 * code + 1
 * as a part of 2^bits, counted from the middle, and y its square. Of V b * y times
 * 2^KV_FAST_SMOOTH_SHIFT_OF_V. Low bytes of all steps, then high ones.
 */
#define KV_FAST_SMOOTH_A          0u
#define KV_FAST_SMOOTH_B          32u
#define KV_FAST_SMOOTH_SHIFT_OF_V 3
/* As large as products with b allow, and those with x. */
#define KV_FAST_SMOOTH_MAX_OF_K 6143
#define KV_FAST_SMOOTH_MAX_OF_V 32500
/* Where K of 8 bits has no step that is narrower than a sixteenth of it, or wider. */
#define KV_FAST_SMOOTH_LEAST 19661

enum kv_fast_field_kind { KV_FAST_FIELD_NONE = 0, KV_FAST_FIELD_F32, KV_FAST_FIELD_F16 };
struct kv_fast_field {
	enum kv_fast_field_kind kind;
	uint32_t offset;   /* bytes from the start of the row */
	uint8_t run, lane; /* F16: which of the side's runs of them, and where in it */
};

enum kv_fast_kind {
	KV_FAST_CODES,   /* of `bits` bits, looked up in `table` */
	KV_FAST_BITS,    /* codes of 1 bit: plus table_scale where it is set, else minus; of K also codes of 2
			    bits, looked up in `table` when queries are prepared */
	KV_FAST_NUMBERS, /* f32, f16, bf16, or (NONE, of V whose sums were short) E4M3 without its factor of
			    2^8 */
};

struct kv_fast_part {
	enum kv_fast_kind kind;
	uint32_t offset; /* bytes from the start of the row to the first code or number */
	uint32_t n;      /* channels */
	uint32_t bits;
	enum kv_dtype number;
	bool is_value;         /* a code is its own value */
	bool is_e4m3;          /* a code is E4M3: `table` has what it means, which a set may work out, too */
	bool is_shifted;       /* in the order in which shifts take codes, or bf16, out of words */
	bool is_smooth;        /* `pieces` are those of a smooth codebook */
	bool has_short_sums;   /* of V: products are rounded and summed up in 16 bits */
	const int16_t *table;  /* [256], entries repeated every 2^bits; value = entry * table_scale */
	const uint8_t *pieces; /* [KV_FAST_PIECES_BYTES] of codebooks of more than 4 bits, else NULL */
	float table_scale;
	float entry_offset; /* of pieces: value = entry * table_scale + entry_offset */
	int32_t sum_max;    /* of the magnitudes of numbers that meet `table` */
	float center;       /* has_short_sums: what the table counts whole numbers from, else 0 */
	struct kv_fast_field scale, zero, outer;
	/* In a prepared query (K), in a weighted sum (V). Of bits of K: a table of sixteen for each four
	 * bits.
	 */
	uint32_t slot, n_slots;
	bool has_split_tables; /* of these: sixteen low bytes, then the high ones */
};

/* K or V of one layer, for one instruction set. */
struct kv_fast_side {
	uint32_t n_parts, n_slots;
	/* Fields of float16, as up to 8 that lie side by side: they are read together. */
	uint32_t n_runs, run_offsets[KV_FAST_RUNS_MAX], n_of_run[KV_FAST_RUNS_MAX];
	bool has_numbers; /* all parts are numbers: prepared queries are float32, not 16-bit integers */
	struct kv_fast_part parts[KV_FAST_PARTS_MAX];
	int16_t tables[KV_SEGMENTS_MAX][256];
	uint8_t pieces[KV_SEGMENTS_MAX][KV_FAST_PIECES_BYTES];
	uint16_t prepared_of[KV_FAST_SLOTS_MAX]; /* slot -> index of prepared queries and accumulators, or
						    NONE */
	float factor_of[KV_FAST_SLOTS_MAX];      /* constant of the slot's channel (recipes), else 1 */
};

/* One query, prepared: <q, row> = sum over parts of scale * outer * unit * <slots, entries> + zero * outer *
 * sum. */
struct kv_fast_query {
	const int16_t *codes; /* [n_slots], 16-bit parts */
	const float *numbers; /* [n_slots], numbers */
	const float *units;   /* [n_parts] */
	const float *sums;    /* [n_parts]: of its channels */
};

/* Memory that will be read soon: kernels ask for it on their way, a line now and then. */
struct kv_fast_ahead {
	const uint8_t *runs[KV_FAST_STEP_TOKENS / KV_FAST_RUN_TOKENS]; /* one after the other; NULL: none */
	uint64_t run_bytes;
	uint64_t from;       /* where the share of this call begins */
	uint64_t slot_bytes; /* times 256, of it for a block of rows and a slot of the side whose kernel asks
			      */
};

/*
 * Rows of up to KV_FAST_STEP_TOKENS tokens; places beyond n_rows, up to a multiple of KV_FAST_BLOCK_TOKENS,
 * hold a row, too, whose results nobody uses.
 */
struct kv_fast_rows {
	const uint8_t *rows[KV_FAST_STEP_TOKENS];
	uint32_t n_rows;
	uint32_t offset;    /* of the row behind each of these pointers */
	uint32_t row_bytes; /* what the next call takes begins behind the row; 0: somewhere */
	struct kv_fast_ahead ahead;
};

struct kv_fast_kernels {
	const char *name;      /* "avx2", "avx512" */
	uint32_t words;        /* 16-bit numbers of a register */
	bool has_split_tables; /* of bits of K, and pieces of codebooks */
	/*
	 * Whether n codes of so many bits are taken in shifted order, and which of them stands in a slot; n
	 * or more: none.
	 */
	bool (*takes_shifted)(bool is_v, uint32_t bits, uint32_t n);
	uint32_t (*code_of_slot)(bool is_v, uint32_t bits, uint32_t n, uint32_t slot);
	/* The same for short sums; NULL: this set has none. */
	uint32_t (*code_of_short_slot)(uint32_t bits, uint32_t n, uint32_t slot);
	/* products[query * KV_FAST_STEP_TOKENS + token] for all places that hold rows; n_queries 1, 2 or 4.
	 */
	void (*score)(const struct kv_fast_side *side, const struct kv_fast_rows *rows,
		const struct kv_fast_query *queries, uint32_t n_queries, float *products);
	/*
	 * sums[query][slot] += sum over tokens of weights[query * KV_FAST_STEP_TOKENS + token] * row; weights
	 * are at least 0, and 0 beyond n_rows. n_queries 1, 2 or 4. zeros[query][part] += the same sum of the
	 * zeros.
	 */
	void (*accumulate)(const struct kv_fast_side *side, const struct kv_fast_rows *rows,
		const float *weights, uint32_t n_queries, float *const *sums, float *const *zeros);
	/* max of n values (a multiple of KV_FAST_BLOCK_TOKENS), -infinity among them. */
	float (*max)(const float *values, uint32_t n);
	/* values[i] = 2^(values[i] - max), 0 for -infinity; returns the sum. n a multiple of
	 * KV_FAST_BLOCK_TOKENS. */
	float (*exp2_sum)(float *values, uint32_t n, float max);
	/* values[i] += offset, then capped (cap > 0), then sloped: + slope * (first + i). */
	void (*bend)(float *values, uint32_t n, float offset, float cap, float slope, float first);
	/* values[i] *= factor */
	void (*scale)(float *values, uint32_t n, float factor);
	/* sums[i] += factor * values[i] */
	void (*add)(double *sums, const float *values, uint32_t n, double factor);
};

/* The best set that this build has and this processor runs; NULL: none. TQKV_INSTRUCTION_SET may name a
 * lesser one. */
const struct kv_fast_kernels *kv_fast_kernels(void);
/* Those there are, the slowest first; NULL from the first index that has none. For tests and measurements. */
const struct kv_fast_kernels *kv_fast_kernels_at(uint32_t set_idx);

/*
 * The step of y: where a codebook of 8 bits bends most, a sixteenth of y has too many entries. With y alone
 * as the other factor the first step would be the least exact one.
 */
static inline int32_t kv_fast_smooth_step(uint32_t bits, bool is_v, int32_t y)
{
	const int32_t factor = is_v || y > KV_FAST_SMOOTH_LEAST ? y : KV_FAST_SMOOTH_LEAST;

	return (bits == 8 ? (y * factor + (1 << 14)) >> 15 : y) >> 11;
}

/*
 * core/fast_smooth.c: pieces of the smooth codebook whose centroids are `table` (7 or 8 bits, ascending), and
 * what their entries count. False: it is not smooth, and nothing is written.
 */
bool kv_fast_smooth_init(
	const float *table, uint32_t bits, bool is_v, float *unit, uint8_t pieces[KV_FAST_PIECES_BYTES]);

/* False: rows of this codec are for the scalar routine (groups of vN that are no multiple of 32 channels). */
bool kv_fast_side_init(struct kv_fast_side *side, const struct kv_row_codec *codec, bool is_v,
	const struct kv_fast_kernels *kernels);

/*
 * A query as kv_row_codec_prepare_query() gives it (prepared_dim float64), times `scale`, into slots: codes
 * or numbers [n_slots], units and sums [n_parts]. False: the product is too large or too small for float32,
 * and what was made of it means nothing.
 */
KV_MUST_CHECK bool kv_fast_prepare(const struct kv_fast_side *side, const double *q_prepared, double scale,
	int16_t *codes, float *numbers, float *units, float *sums);
/* Adds a weighted sum, slots and the sum of each part's zeros, to an accumulator of prepared_dim float64. */
void kv_fast_collect(const struct kv_fast_side *side, const double *sums, const double *zeros, double *acc);

#endif
