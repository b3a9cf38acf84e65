/*
 * vN (FORMATS 5.3): [pack(codes, N)][scale f16 x groups][zero f16 x groups]. Groups of channels are spread
 * evenly from their minimum to their maximum. No rotation. The codes are made with the scale and zero as they
 * are, before these are rounded to float16.
 */
#include <math.h>
#include <string.h>

#include "core/checked.h"
#include "core/format_family.h"

#define AFFINE_8(n) n, n + 1, n + 2, n + 3, n + 4, n + 5, n + 6, n + 7
#define AFFINE_64(n)                                                                        \
	AFFINE_8(n), AFFINE_8(n + 8), AFFINE_8(n + 16), AFFINE_8(n + 24), AFFINE_8(n + 32), \
		AFFINE_8(n + 40), AFFINE_8(n + 48), AFFINE_8(n + 56)
static const float affine_table[256] = { AFFINE_64(0), AFFINE_64(64), AFFINE_64(128), AFFINE_64(192) };

static uint32_t group_channels(const struct kv_format_options *options)
{
	return options->group != 0 ? options->group : KV_GROUP_DEFAULT;
}

static enum kv_status vn_check(const struct kv_format *format, uint32_t head_dim,
	const struct kv_format_options *options, struct kv_error *err)
{
	if (group_channels(options) > head_dim)
		return kv_fail(err, KV_BAD_ARG, "row format %s: a group of %u is larger than head_dim %u",
			format->name, group_channels(options), head_dim);
	return KV_OK;
}

static enum kv_status vn_lay_out(
	struct kv_row_codec *codec, const struct kv_format_options *options, struct kv_error *err)
{
	const uint32_t group = group_channels(options);
	const uint32_t n_groups = kv_div_up_u32(codec->head_dim, group);

	(void)err;
	kv_row_codec_add_segment(codec,
		&(struct kv_segment){
			.name = "codes",
			.n_channels = codec->head_dim,
			.code = KV_CODE_TABLE,
			.bits = codec->format->bits,
			.n_codes = group * n_groups,
			.table = affine_table,
			.has_scale = true,
			.scale_field = 0,
			.has_zero = true,
			.zero_field = 1,
			.group_channels = group,
		});
	kv_row_codec_add_field(codec, "scale", KV_FIELD_SCALE, KV_DTYPE_F16, n_groups);
	kv_row_codec_add_field(codec, "zero", KV_FIELD_ZERO, KV_DTYPE_F16, n_groups);
	return KV_OK;
}

/* Codes, scale and zero of one group; false when the group cannot be stored. */
static bool encode_group(
	const float *values, uint32_t n_values, uint32_t bits, uint8_t *codes, float *scale, float *zero)
{
	const float scale_min = (float)1e-12, code_max = (float)((1u << bits) - 1);
	float low = values[0], high = values[0];

	for (uint32_t i = 1; i < n_values; i++) {
		low = values[i] < low ? values[i] : low;
		high = values[i] > high ? values[i] : high;
	}
	low += 0.0f; /* a minimum of -0 becomes +0 */

	const float span = high - low;

	if (!kv_f32_is_finite(span))
		return false;
	*scale = span / code_max > scale_min ? span / code_max : scale_min;
	*zero = low;
	if (*scale >= KV_F16_OVERFLOW || fabsf(low) >= KV_F16_OVERFLOW)
		return false;
	for (uint32_t i = 0; i < n_values; i++) {
		const float code = rintf((values[i] - low) / *scale); /* half to even; never negative */

		codes[i] = (uint8_t)(code < code_max ? code : code_max);
	}
	return true;
}

static enum kv_status vn_encode(
	const struct kv_row_codec *codec, const float *row, uint8_t *out, struct kv_row_scratch *scratch)
{
	const struct kv_segment *codes = &codec->segments[0];
	const uint32_t n_groups = codec->fields[0].count;
	float *scales = scratch->unit, *zeros = scratch->turned;

	for (uint32_t g = 0; g < n_groups; g++) {
		const uint32_t first = g * codes->group_channels, left = codec->head_dim - first;
		const uint32_t n = left < codes->group_channels ? left : codes->group_channels;

		if (!encode_group(row + first, n, codes->bits, scratch->codes + first, &scales[g], &zeros[g]))
			return KV_BAD_VALUE;
	}
	kv_segment_pack(codes, scratch->codes, out);
	kv_rows_store(KV_DTYPE_F16, scales, n_groups, out + codec->fields[0].offset);
	kv_rows_store(KV_DTYPE_F16, zeros, n_groups, out + codec->fields[1].offset);
	return KV_OK;
}

const struct kv_format_family kv_format_family_vn = {
	.is_rotated = false,
	.options = KV_OPTION_GROUP,
	.check = vn_check,
	.lay_out = vn_lay_out,
	.encode = vn_encode,
};
