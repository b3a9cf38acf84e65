/*
 * tqpN (FORMATS 5.2): [pack(indices, N - 1)][pack(signs, 1)][norm f32][residual norm f32]. The indices are
 * those of tqN with one bit less; the signs are those of a random projection of what they leave over. Scores
 * with the signs are unbiased: <q, x> is about <q, x^> + len(r) * sqrt(pi/2) / d * <S q, z>.
 */
#include <math.h>

#include "core/format_family.h"

static enum kv_status tqp_check(const struct kv_format *format, uint32_t head_dim,
	const struct kv_format_options *options, struct kv_error *err)
{
	if (options->projection && options->projection->head_dim != head_dim)
		return kv_fail(err, KV_BAD_ARG, "row format %s: the projection is for head_dim %u, not %u",
			format->name, options->projection->head_dim, head_dim);
	return KV_OK;
}

static enum kv_status get_projection(struct kv_row_codec *codec, const struct kv_format_options *options,
	const struct kv_rotation **projection, struct kv_error *err)
{
	struct kv_rotation *made = NULL;

	if (options->projection || options->like) {
		*projection = options->projection ? options->projection : options->like->segments[1].rotation;
		return KV_OK;
	}

	const enum kv_status status = kv_rotation_create_projection(
		codec->head_dim, (uint64_t)codec->rotation->seed + KV_PROJECTION_SEED_OFFSET, &made, err);

	if (status != KV_OK)
		return status;
	kv_row_codec_own_rotation(codec, made);
	*projection = made;
	return KV_OK;
}

/* sqrt(pi/2) / d for rows of length sqrt(d); those of a qr matrix have length 1. */
static float sign_factor(const struct kv_rotation *projection)
{
	const double d = projection->head_dim;

	return (float)(KV_SQRT_HALF_PI / (projection->kind == KV_ROTATION_QR ? sqrt(d) : d));
}

static enum kv_status tqp_lay_out(
	struct kv_row_codec *codec, const struct kv_format_options *options, struct kv_error *err)
{
	const uint32_t d = codec->head_dim, bits = codec->format->bits - 1;
	const struct kvcb_codebook *codebook = NULL;
	const struct kv_rotation *projection = NULL;
	enum kv_status status = kv_row_codec_get_codebook(codec, options, d, bits, &codebook, err);

	if (status == KV_OK)
		status = get_projection(codec, options, &projection, err);
	if (status != KV_OK)
		return status;
	for (uint32_t i = 0; i < d; i++)
		codec->factors[i] = sign_factor(projection);
	kv_row_codec_add_segment(codec,
		&(struct kv_segment){
			.name = "indices",
			.n_channels = d,
			.rotation = codec->rotation,
			.code = KV_CODE_TABLE,
			.bits = bits,
			.table = codebook->centroids,
			.codebook = codebook,
			.has_scale = true,
			.scale_field = 0,
		});
	kv_row_codec_add_segment(codec,
		&(struct kv_segment){
			.name = "signs",
			.n_channels = d,
			.rotation = projection,
			.is_added = true,
			.code = KV_CODE_TABLE,
			.bits = 1,
			.table = kv_sign_table,
			.factors = codec->factors,
			.has_scale = true,
			.scale_field = 1,
		});
	kv_row_codec_add_field(codec, "norm", KV_FIELD_NORM, KV_DTYPE_F32, 1);
	kv_row_codec_add_field(codec, "residual norm", KV_FIELD_NORM, KV_DTYPE_F32, 1);
	return KV_OK;
}

static enum kv_status tqp_encode(
	const struct kv_row_codec *codec, const float *row, uint8_t *out, struct kv_row_scratch *scratch)
{
	const struct kv_segment *indices = &codec->segments[0], *signs = &codec->segments[1];
	const uint32_t d = codec->head_dim;
	float *decoded = scratch->turned, *rest = scratch->rest;
	float norm;

	if (kv_row_quantise(indices, row, scratch, &norm) != KV_OK)
		return KV_BAD_VALUE;
	for (uint32_t i = 0; i < d; i++)
		decoded[i] = indices->table[scratch->codes[i]];
	kv_rotation_backward(indices->rotation, decoded, decoded);
	for (uint32_t i = 0; i < d; i++) {
		decoded[i] = decoded[i] * norm;
		rest[i] = row[i] - decoded[i];
	}

	const float rest_norm = kv_row_length(rest, d);

	if (!kv_f32_is_finite(rest_norm))
		return KV_BAD_VALUE;
	kv_segment_pack(indices, scratch->codes, out);
	kv_rotation_forward(signs->rotation, rest, rest);
	kv_segment_pack_signs(signs, rest, scratch->codes, out);
	kv_store_f32(norm, out + codec->fields[0].offset);
	kv_store_f32(rest_norm, out + codec->fields[1].offset);
	return KV_OK;
}

const struct kv_format_family kv_format_family_tqp = {
	.is_rotated = true,
	.options = KV_OPTION_PROJECTION,
	.check = tqp_check,
	.lay_out = tqp_lay_out,
	.refuses_by_norm = true,
	.encode = tqp_encode,
};
