/*
 * What a family of row formats provides: a layout and an encoder. Included by core/format*.c only; users of
 * codecs need core/format.h alone.
 *
 * To add a family: write core/format_<family>.c with one `const struct kv_format_family`, declare it below,
 * and add its names to the table in format.c. The layout function calls kv_row_codec_add_segment() and
 * kv_row_codec_add_field() in the order of the bytes, so a row has no gaps and no overlap by construction.
 * An encoder decides that a row can be stored before it writes the first byte of it.
 */
#ifndef CORE_FORMAT_FAMILY_H
#define CORE_FORMAT_FAMILY_H

#include "core/format.h"

struct kv_format_family {
	bool is_rotated;  /* codecs need a rotation of the whole row */
	uint32_t options; /* enum kv_format_option: what it takes */
	/* (optional) Can this format be made at this dim, which is already a valid one? Default: yes. */
	enum kv_status (*check)(const struct kv_format *format, uint32_t head_dim,
		const struct kv_format_options *options, struct kv_error *err);
	/*
	 * Adds segments and fields, and makes what they need. format, head_dim, rotation and the copied
	 * options are set and were checked. On failure the caller destroys the codec with all that it owns by
	 * then.
	 */
	enum kv_status (*lay_out)(
		struct kv_row_codec *codec, const struct kv_format_options *options, struct kv_error *err);
	bool refuses_by_norm; /* encode() takes any values, because it needs their norm anyway */
	/* kv_row_codec_encode(); values are all finite unless refuses_by_norm. */
	enum kv_status (*encode)(const struct kv_row_codec *codec, const float *row, uint8_t *out,
		struct kv_row_scratch *scratch);
};

extern const struct kv_format_family kv_format_family_dense;  /* f32, f16, bf16 */
extern const struct kv_format_family kv_format_family_fp8;    /* fp8 */
extern const struct kv_format_family kv_format_family_tq;     /* tqN */
extern const struct kv_format_family kv_format_family_tqp;    /* tqpN */
extern const struct kv_format_family kv_format_family_vn;     /* vN */
extern const struct kv_format_family kv_format_family_recipe; /* turboquant25, turboquant35 */

/*
 * Appends a segment at the current end of the row. The caller fills what it knows (name, n_channels,
 * channels, rotation, code, number, bits, codebook or table, scales); payload size, offset, place in prepared
 * queries and the account follow here. Fields of the row may be named before they are added: fields are
 * numbered in order.
 */
void kv_row_codec_add_segment(struct kv_row_codec *codec, const struct kv_segment *segment);
/* Appends `count` numbers at the current end of the row; returns the field's index. */
uint8_t kv_row_codec_add_field(struct kv_row_codec *codec, const char *name, enum kv_field_kind kind,
	enum kv_dtype number, uint32_t count);

/*
 * The codebook of dim and bits: that of options->like, else a copy of one in options->codebooks, else the
 * embedded one, else a solved one. What is not embedded or borrowed belongs to the codec.
 */
KV_MUST_CHECK enum kv_status kv_row_codec_get_codebook(struct kv_row_codec *codec,
	const struct kv_format_options *options, uint32_t dim, uint32_t bits,
	const struct kvcb_codebook **codebook, struct kv_error *err);
/* Hands a rotation that was made for this codec over to it. */
void kv_row_codec_own_rotation(struct kv_row_codec *codec, struct kv_rotation *rotation);

/* Table of one-bit codes: bit 1 is plus (FORMATS 4). */
extern const float kv_sign_table[2];
#define KV_SQRT_HALF_PI 1.2533141373155002512 /* sqrt(pi / 2): scale of QJL signs */
#define KV_NORM_MIN     ((float)1e-12)        /* keeps the division of a zero row harmless */

/*
 * len(v) of FORMATS 0: squares in float64, added as a tree over the next power of two, rounded once to
 * float32. Infinite when the length overflows float32, not a number when a value is none: finite only where
 * all values are.
 */
float kv_row_length(const float *values, uint32_t n_values);

/*
 * values[0..n) divided by their norm max(len, 1e-12), in place of a unit row: unit[0..n). Returns the norm,
 * which is finite where kv_row_length() is.
 */
float kv_row_normalise(const float *values, uint32_t n_values, float *unit);

/*
 * The MSE stage of tqN and tqpN: normalises the row, rotates it, and finds the indices of the segment's
 * codebook. BAD_VALUE when a value is not finite or the length overflows float32. Fills scratch->codes and
 * *norm; uses unit and turned.
 */
KV_MUST_CHECK enum kv_status kv_row_quantise(
	const struct kv_segment *indices, const float *row, struct kv_row_scratch *scratch, float *norm);

/* Cells of the segment's codebook: codes[n_channels]. No value is NaN. */
void kv_segment_find_codes(const struct kv_segment *indices, const float *values, uint8_t *codes);
/* Stores the segment's n_channels codes; codes of padding and trailing bits are 0. */
void kv_segment_pack(const struct kv_segment *segment, const uint8_t *codes, uint8_t *row);
/* The same for signs: code [v >= 0], where -0 counts as 0. Uses `codes`. */
void kv_segment_pack_signs(
	const struct kv_segment *segment, const float *values, uint8_t *codes, uint8_t *row);

#endif
