/* Dense formats: the numbers of the row as they are, or rounded to a narrower type. No rotation. */
#include <math.h>

#include "core/format_family.h"

static enum kv_status dense_lay_out(
	struct kv_row_codec *codec, const struct kv_format_options *options, struct kv_error *err)
{
	(void)options;
	(void)err;
	kv_row_codec_add_segment(codec,
		&(struct kv_segment){
			.name = "numbers",
			.n_channels = codec->head_dim,
			.code = KV_CODE_NUMBER,
			.number = codec->format->number,
		});
	return KV_OK;
}

/* A finite value that would round to infinity is refused, so every stored number is finite. */
static bool rounds_to_infinity(enum kv_dtype number, const float *row, uint32_t n_values)
{
	uint32_t n_bad = 0;

	if (number == KV_DTYPE_BF16) {
		for (uint32_t i = 0; i < n_values; i++)
			n_bad += (kv_f32_to_bf16(row[i]) & 0x7FFFu) == 0x7F80u;
	} else if (number == KV_DTYPE_F16) {
		for (uint32_t i = 0; i < n_values; i++)
			n_bad += fabsf(row[i]) >= KV_F16_OVERFLOW;
	}
	return n_bad != 0;
}

static enum kv_status dense_encode(
	const struct kv_row_codec *codec, const float *row, uint8_t *out, struct kv_row_scratch *scratch)
{
	(void)scratch;
	if (rounds_to_infinity(codec->format->number, row, codec->head_dim))
		return KV_BAD_VALUE;
	kv_rows_store(codec->format->number, row, codec->head_dim, out);
	return KV_OK;
}

const struct kv_format_family kv_format_family_dense = {
	.is_rotated = false,
	.lay_out = dense_lay_out,
	.encode = dense_encode,
};
