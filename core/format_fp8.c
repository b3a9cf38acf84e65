/*
 * fp8 (FORMATS 5): [d bytes of OCP E4M3][scale f32]. The largest value of the row becomes 448, so one scale
 * serves the row and nothing saturates but by rounding. No rotation.
 */
#include <math.h>

#include "core/format_family.h"

/* 8 exponents of 8 mantissas: 0 to 7 are subnormal; a code is (8 + m) * 2^(e - 10), 0x7F and 0xFF are NaN. */
#define E4M3_ABS(e, m) \
	((e) == 15 && (m) == 7 ? NAN : (e) == 0 ? (float)(m)*0x1p-9f : (float)((8 + (m)) << (e)) * 0x1p-10f)
#define E4M3_8(sign, e)                                                                     \
	sign E4M3_ABS(e, 0), sign E4M3_ABS(e, 1), sign E4M3_ABS(e, 2), sign E4M3_ABS(e, 3), \
		sign E4M3_ABS(e, 4), sign E4M3_ABS(e, 5), sign E4M3_ABS(e, 6), sign E4M3_ABS(e, 7)
#define E4M3_128(sign)                                                                                    \
	E4M3_8(sign, 0), E4M3_8(sign, 1), E4M3_8(sign, 2), E4M3_8(sign, 3), E4M3_8(sign, 4),              \
		E4M3_8(sign, 5), E4M3_8(sign, 6), E4M3_8(sign, 7), E4M3_8(sign, 8), E4M3_8(sign, 9),      \
		E4M3_8(sign, 10), E4M3_8(sign, 11), E4M3_8(sign, 12), E4M3_8(sign, 13), E4M3_8(sign, 14), \
		E4M3_8(sign, 15)

static const float e4m3_table[256] = { E4M3_128(+), E4M3_128(-) };

static enum kv_status fp8_lay_out(
	struct kv_row_codec *codec, const struct kv_format_options *options, struct kv_error *err)
{
	(void)options;
	(void)err;
	kv_row_codec_add_segment(codec,
		&(struct kv_segment){
			.name = "e4m3",
			.n_channels = codec->head_dim,
			.code = KV_CODE_TABLE,
			.bits = 8,
			.table = e4m3_table,
			.has_scale = true,
			.scale_field = 0,
		});
	kv_row_codec_add_field(codec, "scale", KV_FIELD_SCALE, KV_DTYPE_F32, 1);
	return KV_OK;
}

static enum kv_status fp8_encode(
	const struct kv_row_codec *codec, const float *row, uint8_t *out, struct kv_row_scratch *scratch)
{
	const struct kv_segment *numbers = &codec->segments[0];
	const float scale_min = (float)1e-12;
	float largest = 0;

	for (uint32_t i = 0; i < codec->head_dim; i++)
		largest = fabsf(row[i]) > largest ? fabsf(row[i]) : largest;

	const float wanted = largest / KV_E4M3_MAX;
	const float scale = wanted > scale_min ? wanted : scale_min;

	for (uint32_t i = 0; i < codec->head_dim; i++)
		scratch->codes[i] = kv_f32_to_e4m3(row[i] / scale);
	kv_segment_pack(numbers, scratch->codes, out);
	kv_store_f32(scale, out + codec->fields[0].offset);
	return KV_OK;
}

const struct kv_format_family kv_format_family_fp8 = {
	.is_rotated = false,
	.lay_out = fp8_lay_out,
	.encode = fp8_encode,
};
