/*
 * Row formats: how one K or V row of one KV head becomes bytes (FORMATS 5), and how attention reads them.
 *
 * A format is a name with parameters that do not depend on the head dimension. A row codec is a format
 * bound to a head dimension and a rotation: it holds the byte layout as data, a list of segments and
 * fields, and everything except encoding follows from that list: decode, score, accumulate, the check of
 * packed rows, the memory report and the printed layout. A new family adds one file with a layout function
 * and an encode function (core/format_family.h).
 *
 * The model that all families share. A segment covers some channels of the row. Its value for channel i is
 *
 *	table[code_i] (* factor[i]) * scale[group of i] (+ zero[group of i])
 *
 * in the segment's own basis, which is the channels' basis or one reached by a rotation. A segment may be
 *added to the one before it, and both may share an outer scale of their sum. The row is the sum over its
 *segments of these values, rotated back. So a query is rotated once per segment (prepare_query), scores are
 *dot products in the segment's basis, the weighted sum of V rows is kept in that basis, and only the final
 *output is rotated back (finish_output). Numbers that are stored as they are form a segment without codes.
 *Signs are codes of one bit with the table {-1, +1}; affine codes have the table {0, 1, 2, ..}; an 8-bit
 *float is a code with a table of 256 numbers.
 *
 * A codec is immutable after creation, is shared by any number of threads, and uses no heap after creation.
 * Options are copied; codebooks and rotations that a codec needs and is not given are its own. Creating one
 *may solve a codebook or compute a rotation (some 10 ms at worst): call it where computing is allowed.
 *Scratch memory is the caller's, one per thread.
 */
#ifndef CORE_FORMAT_H
#define CORE_FORMAT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "codebooks/codebook.h"
#include "core/error.h"
#include "core/number.h"
#include "core/rotation.h"

/* KV_HEAD_DIM_MIN, _MAX, _STEP are in core/rotation.h */
#define KV_SEGMENTS_MAX     4u                     /* two channel groups with indices and signs each */
#define KV_FIELDS_MAX       4u                     /* two channel groups with two norms each */
#define KV_PREPARED_DIM_MAX (2u * KV_HEAD_DIM_MAX) /* indices and signs over all channels */
#define KV_ROW_BYTES_MAX    (5u * KV_HEAD_DIM_MAX) /* v8 with groups of one channel; f32 has 4 a channel */
#define KV_ROW_LAYOUT_MAX   256u                   /* characters of a printed layout, terminator included */
#define KV_GROUP_DEFAULT    32u                    /* channels of a group of vN */

struct kv_format_family;
struct kv_recipe;
struct kv_row_codec;

struct kv_format {
	const char *name; /* static text: "tq4" */
	const struct kv_format_family *family;
	enum kv_dtype number;           /* dense family: how a number is stored */
	uint32_t bits;                  /* N of tqN, tqpN and vN: bits of a channel, the sign included */
	const struct kv_recipe *recipe; /* recipes: core/recipe.h */
};

/* How a recipe's signs are scaled on decoding; the bytes are the same (FORMATS 5.4). */
enum kv_recipe_scale {
	KV_RECIPE_SCALE_EXACT = 0, /* unbiased: a factor per block */
	KV_RECIPE_SCALE_PUBLISHED = 1,
};

/* Options that only some formats take. */
enum kv_format_option {
	KV_OPTION_NORM_CORRECTION = 1,
	KV_OPTION_GROUP = 2,
	KV_OPTION_RECIPE = 4, /* recipe_scale and high_channels */
	KV_OPTION_PROJECTION = 8,
};

/*
 * Options of a codec. A zeroed struct means the defaults, so that an initialiser that names some of them
 * stays right when options are added. Everything is copied, except what is said to be borrowed. An option
 * that does not belong to the format is BAD_ARG.
 */
struct kv_format_options {
	bool norm_correction;              /* tqN: decoded rows have the original length */
	uint32_t group;                    /* vN: channels per group, 1 to head_dim; 0: KV_GROUP_DEFAULT */
	enum kv_recipe_scale recipe_scale; /* recipes */
	/* recipes: ascending list of the channels with more bits, kv_recipe_n_high() of them; NULL: the
	 * first. */
	const uint16_t *high_channels;
	uint32_t n_high_channels;
	/*
	 * tqpN: a projection of this head_dim with rows of length about sqrt(head_dim), borrowed: it must
	 * outlive the codec. NULL: made from the rotation's seed.
	 */
	const struct kv_rotation *projection;
	/* Codebooks to use where dim and bits are those that the format needs, in place of the built-in ones.
	 */
	const struct kvcb_codebook *const *codebooks;
	uint32_t n_codebooks;
	/*
	 * A codec of the same format, head_dim, rotation and options except high_channels, whose codebooks
	 * and rotations this one borrows: it must outlive this one. Saves time and memory where every KV head
	 * has its own channels, or every layer its own codec.
	 */
	const struct kv_row_codec *like;
};

/* Known formats, in the order in which they are listed to people. */
uint32_t kv_format_count(void);
const struct kv_format *kv_format_at(uint32_t format_idx);
/* BAD_ARG with the list of known names when there is none of this name. `*format` is static. */
KV_MUST_CHECK enum kv_status kv_format_parse(
	const char *name, const struct kv_format **format, struct kv_error *err);
/* True when a codec of this format needs a rotation. */
bool kv_format_is_rotated(const struct kv_format *format);
/* The set of enum kv_format_option that this format takes. */
uint32_t kv_format_takes(const struct kv_format *format);
/*
 * OK when a codec can be made at this dim (16 to 256 in steps of 16) with these options (NULL: the defaults),
 * else BAD_ARG with the reason. Does not look at the numbers of codebooks and rotations.
 */
KV_MUST_CHECK enum kv_status kv_format_check_with(const struct kv_format *format, uint32_t head_dim,
	const struct kv_format_options *options, struct kv_error *err);
static inline KV_MUST_CHECK enum kv_status kv_format_check(
	const struct kv_format *format, uint32_t head_dim, struct kv_error *err)
{
	return kv_format_check_with(format, head_dim, NULL, err);
}
/* "exact", "published"; BAD_ARG with these names for anything else. */
KV_MUST_CHECK enum kv_status kv_recipe_scale_parse(
	const char *name, enum kv_recipe_scale *scale, struct kv_error *err);
const char *kv_recipe_scale_name(enum kv_recipe_scale scale);

/* A number of the row beside the codes: norms, scales, zeros. `count` numbers back to back. */
enum kv_field_kind {
	KV_FIELD_NORM,  /* finite, not negative */
	KV_FIELD_SCALE, /* finite, not negative */
	KV_FIELD_ZERO,  /* finite */
};

struct kv_field {
	const char *name; /* word of the printed layout */
	enum kv_field_kind kind;
	enum kv_dtype number;
	uint32_t count;
	uint32_t offset; /* bytes from the start of the row */
	uint32_t field_bytes;
};

enum kv_code_kind {
	KV_CODE_NUMBER, /* no codes: the numbers themselves, as `number` */
	KV_CODE_TABLE,  /* packed codes of `bits` bits, each an index of `table` */
};

struct kv_segment {
	const char *name; /* word of the printed layout */
	/* Channels of the row: channels[0..n_channels), or 0..n_channels when NULL. */
	uint32_t n_channels;
	const uint16_t *channels;
	/* Basis: query side rotation of the n_channels numbers; NULL is the channels' own basis. */
	const struct kv_rotation *rotation;
	bool is_added;         /* an earlier segment covers these channels too: decode adds to it */
	uint32_t prepared_idx; /* where the segment starts in a prepared query and in an accumulator */
	/* Payload. Codes beyond n_channels are padding; padding and all bits beyond it are 0. */
	enum kv_code_kind code;
	uint32_t n_codes;     /* KV_CODE_TABLE: codes stored; 0 in a layout function: n_channels */
	enum kv_dtype number; /* KV_CODE_NUMBER */
	uint32_t bits;
	uint32_t offset; /* bytes from the start of the row */
	uint32_t payload_bytes;
	const float *table;                   /* KV_CODE_TABLE: 2^bits values */
	const struct kvcb_codebook *codebook; /* its boundaries, for encoding; NULL when not one */
	const float *factors;                 /* [n_channels]: constant per block of the basis; NULL: all 1 */
	/*
	 * Scale and zero: indices into fields[]. Element g of a field serves channels
	 * [g * group_channels, (g + 1) * group_channels). A rotated segment is one group without a zero.
	 */
	bool has_scale;
	uint8_t scale_field;
	bool has_zero;
	uint8_t zero_field;
	uint32_t group_channels; /* 0 in a layout function: all channels are one group */
	/* One number that scales the sum of all segments of these channels; they stand side by side and share
	 * it. */
	bool has_outer;
	uint8_t outer_field;
};

/* Bytes of one row by what they are (FORMATS 7); they add up to row_bytes. */
struct kv_row_account {
	uint32_t payload_bytes; /* packed codes */
	uint32_t norms_bytes;
	uint32_t scales_bytes;
	uint32_t zeros_bytes;
	uint32_t exact_bytes; /* numbers stored as they are */
};

struct kv_row_codec {
	const struct kv_format *format;
	const struct kv_rotation *rotation; /* NULL when the format is not rotated */
	uint32_t head_dim;
	uint32_t row_bytes;
	uint32_t prepared_dim; /* numbers of a prepared query and of an accumulator */
	struct kv_row_account account;
	/* For the memory report. What is borrowed from another codec or from the caller is not counted. */
	uint32_t codebook_bytes; /* tables and boundaries */
	uint64_t rotation_bytes; /* rotations and projections of its own */
	uint32_t n_segments;
	uint32_t n_fields;
	struct kv_segment segments[KV_SEGMENTS_MAX];
	struct kv_field fields[KV_FIELDS_MAX];
	/* Options, and what the segments point to. */
	bool norm_correction;
	enum kv_recipe_scale recipe_scale;
	bool is_like;                       /* codebooks and rotations are another codec's */
	uint16_t channels[KV_HEAD_DIM_MAX]; /* recipes: the high channels, then the others, both ascending */
	float factors[KV_HEAD_DIM_MAX];
	struct kvcb_codebook *own_codebooks[KV_SEGMENTS_MAX]; /* NULL: embedded, borrowed or none */
	struct kv_rotation *own_rotations[KV_SEGMENTS_MAX];
};

/* Work memory of encode and decode: no initial state, not shared by threads. */
struct kv_row_scratch {
	float unit[KV_HEAD_DIM_MAX];
	float turned[KV_HEAD_DIM_MAX];
	float rest[KV_HEAD_DIM_MAX];
	uint8_t codes[KV_HEAD_DIM_MAX];
};

/*
 * `rotation` must be of this head_dim when kv_format_is_rotated(), is borrowed then and must outlive the
 * codec; it is ignored (NULL allowed) otherwise. `options` NULL: the defaults. The caller owns the codec
 * until kv_row_codec_destroy(), which accepts NULL.
 */
KV_MUST_CHECK enum kv_status kv_row_codec_create_with(const struct kv_format *format, uint32_t head_dim,
	const struct kv_rotation *rotation, const struct kv_format_options *options,
	struct kv_row_codec **codec, struct kv_error *err);
static inline KV_MUST_CHECK enum kv_status kv_row_codec_create(const struct kv_format *format,
	uint32_t head_dim, const struct kv_rotation *rotation, struct kv_row_codec **codec,
	struct kv_error *err)
{
	return kv_row_codec_create_with(format, head_dim, rotation, NULL, codec, err);
}
void kv_row_codec_destroy(struct kv_row_codec *codec);

/*
 * Row of head_dim floats to row_bytes bytes. BAD_VALUE when the row cannot be stored (FORMATS 3, last
 * paragraph): the caller names the row; `out` is untouched then.
 */
KV_MUST_CHECK enum kv_status kv_row_codec_encode(
	const struct kv_row_codec *codec, const float *row, uint8_t *out, struct kv_row_scratch *scratch);
/* Bytes to floats in the channels' own basis. Any bytes are safe, only valid rows mean something. */
void kv_row_codec_decode(
	const struct kv_row_codec *codec, const uint8_t *row, float *out, struct kv_row_scratch *scratch);
/* Packed rows from outside: BAD_VALUE when trailing bits, a field or a number break FORMATS 4. */
KV_MUST_CHECK enum kv_status kv_row_codec_validate_packed(
	const struct kv_row_codec *codec, const uint8_t *row);

/*
 * What attention needs, all in the segments' own bases, prepared_dim numbers each: a query, a row, and a
 * weighted sum of rows. A row is expanded once for all queries that attend to it.
 */
void kv_row_codec_prepare_query(const struct kv_row_codec *codec, const float *q, double *q_prepared);
void kv_row_codec_expand(const struct kv_row_codec *codec, const uint8_t *row, double *expanded);
/* <q, decoded row>, without softmax scale. Fixed summation order: core/row_kernels.h. */
double kv_row_codec_score(const struct kv_row_codec *codec, const double *q_prepared, const double *expanded);
/* acc += weight * row */
void kv_row_codec_accumulate(
	const struct kv_row_codec *codec, double weight, const double *expanded, double *acc);
/*
 * The same for all rows of a list and all queries that share them: products[query * products_stride + row],
 * and acc += weights[query * weights_stride + row] * row in the order of the list. Prepared queries and
 * accumulators lie one after the other.
 */
#define KV_ROW_WORK_NUMBERS 2048u /* 16 KiB: expanded rows stay in the first-level cache */
struct kv_row_list {
	const struct kv_row_codec *codec;
	const uint8_t *const *rows; /* [n_rows] */
	uint32_t n_rows;
	double *work; /* [KV_ROW_WORK_NUMBERS], no initial state, not shared by threads */
};
void kv_row_list_score(const struct kv_row_list *list, const double *q_prepared, uint32_t n_queries,
	double *products, uint32_t products_stride);
void kv_row_list_accumulate(const struct kv_row_list *list, const double *weights, uint32_t weights_stride,
	uint32_t n_queries, double *acc);
/* Rotates acc back and multiplies by `factor` (1 / softmax denominator): head_dim floats. Uses acc up. */
void kv_row_codec_finish_output(const struct kv_row_codec *codec, double *acc, double factor, float *out);

/*
 * The basis of the rows, y = B x, in which clients may send queries and take outputs. The numbers are those
 * of the segments that are not added to others, one after the other: the channels of each, rotated where it
 * is. tqN and tqpN: the rotation. Recipes: the high group's channels, rotated, then the low group's. No
 * rotation: the channels as they are. B is orthogonal. x and y do not overlap; head_dim numbers.
 */
void kv_row_codec_to_basis(const struct kv_row_codec *codec, const double *x, double *y);
void kv_row_codec_from_basis(const struct kv_row_codec *codec, const double *y, double *x);
/* A row of B, head_dim numbers, for clients that change the basis themselves. row_idx below head_dim. */
void kv_row_codec_basis_row(const struct kv_row_codec *codec, uint32_t row_idx, float *row);
/* kv_row_codec_prepare_query() of a query that is in that basis, and an output that stays in it. */
void kv_row_codec_prepare_rotated(const struct kv_row_codec *codec, const float *q, double *q_prepared);
void kv_row_codec_finish_rotated(const struct kv_row_codec *codec, double *acc, double factor, float *out);

/* "[indices 4 bit x 128][norm f32]" */
void kv_row_codec_layout(const struct kv_row_codec *codec, char layout[static KV_ROW_LAYOUT_MAX]);

/* What bf16 would take for one row (FORMATS 7, dense_equivalent). */
static inline uint32_t kv_row_dense_bytes(uint32_t head_dim)
{
	return 2 * head_dim;
}

#endif
