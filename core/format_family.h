/*
 * What a family of row formats provides: a layout and an encoder. Included by core/format*.c only; users of
 * codecs need core/format.h alone.
 *
 * To add a family: write core/format_<family>.c with one `const struct kv_format_family`, declare it below,
 * and add its names to the table in format.c. The layout function calls kv_row_codec_add_segment() and
 * kv_row_codec_add_field() in the order of the bytes, so a row has no gaps and no overlap by construction.
 */
#ifndef CORE_FORMAT_FAMILY_H
#define CORE_FORMAT_FAMILY_H

#include "core/format.h"

struct kv_format_family {
	bool is_rotated; /* codecs need a rotation of the whole row */
	/* (optional) Can this format be made at this dim, which is already a valid one? Default: yes. */
	enum kv_status (*check)(const struct kv_format *format, uint32_t head_dim, struct kv_error *err);
	/* Adds segments and fields. format, head_dim and rotation are set and were checked. */
	void (*lay_out)(struct kv_row_codec *codec);
	/* kv_row_codec_encode(), for a row whose values are all finite. */
	enum kv_status (*encode)(const struct kv_row_codec *codec, const float *row, uint8_t *out,
		struct kv_row_scratch *scratch);
};

extern const struct kv_format_family kv_format_family_dense; /* f32, bf16 */
extern const struct kv_format_family kv_format_family_tq;    /* tqN */

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
 * len(v) of FORMATS 0: squares in float64, added as a tree over the next power of two, rounded once to
 * float32. `wide` holds that power of two. Infinite when the length overflows float32.
 */
float kv_row_length(const float *values, uint32_t n_values, double *wide);

#endif
