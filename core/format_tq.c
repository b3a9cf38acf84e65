/*
 * tqN (FORMATS 5.1): [pack(indices, N)][norm f32]. The row is divided by its length, rotated, and every
 * coordinate gets the index of its codebook cell. With norm_correction the stored norm is divided by the
 * length of the centroids, so that the decoded row is as long as the original.
 */
#include "core/format_family.h"

static enum kv_status tq_lay_out(
	struct kv_row_codec *codec, const struct kv_format_options *options, struct kv_error *err)
{
	const struct kvcb_codebook *codebook = NULL;
	const enum kv_status status = kv_row_codec_get_codebook(
		codec, options, codec->head_dim, codec->format->bits, &codebook, err);

	if (status != KV_OK)
		return status;
	kv_row_codec_add_segment(codec,
		&(struct kv_segment){
			.name = "indices",
			.n_channels = codec->head_dim,
			.rotation = codec->rotation,
			.code = KV_CODE_TABLE,
			.bits = codec->format->bits,
			.table = codebook->centroids,
			.codebook = codebook,
			.has_scale = true,
			.scale_field = 0,
		});
	kv_row_codec_add_field(codec, "norm", KV_FIELD_NORM, KV_DTYPE_F32, 1);
	return KV_OK;
}

/* What to store so that norm * len(centroids) is the original length. */
static float corrected_norm(const struct kv_segment *indices, float norm, struct kv_row_scratch *scratch)
{
	for (uint32_t i = 0; i < indices->n_channels; i++)
		scratch->turned[i] = indices->table[scratch->codes[i]];

	const float length = kv_row_length(scratch->turned, indices->n_channels);

	return norm / (length > KV_NORM_MIN ? length : KV_NORM_MIN);
}

static enum kv_status tq_encode(
	const struct kv_row_codec *codec, const float *row, uint8_t *out, struct kv_row_scratch *scratch)
{
	const struct kv_segment *indices = &codec->segments[0];
	float norm;

	if (kv_row_quantise(indices, row, scratch, &norm) != KV_OK)
		return KV_BAD_VALUE;
	if (codec->norm_correction) {
		norm = corrected_norm(indices, norm, scratch);
		if (!kv_f32_is_finite(norm)) /* centroids are shorter than 1 */
			return KV_BAD_VALUE;
	}
	kv_segment_pack(indices, scratch->codes, out);
	kv_store_f32(norm, out + codec->fields[0].offset);
	return KV_OK;
}

const struct kv_format_family kv_format_family_tq = {
	.is_rotated = true,
	.options = KV_OPTION_NORM_CORRECTION,
	.lay_out = tq_lay_out,
	.refuses_by_norm = true,
	.encode = tq_encode,
};
