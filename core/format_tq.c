/*
 * tqN (FORMATS 5.1): [pack(indices, N)][norm f32]. The row is divided by its length, rotated, and every
 * coordinate gets the index of its codebook cell.
 */
#include "core/format_family.h"
#include "core/pack.h"

static enum kv_status tq_check(const struct kv_format *format, uint32_t head_dim, struct kv_error *err)
{
	const enum kv_status status = kv_rotation_check(kv_rotation_kind_default(head_dim), head_dim, err);

	if (status != KV_OK) {
		kv_error_wrap(err, "row format %s", format->name);
		return status;
	}
	if (!kvcb_find(head_dim, format->bits))
		return kv_fail(err, KV_UNSUPPORTED, "row format %s: no codebook for head_dim %u",
			format->name, head_dim);
	return KV_OK;
}

static void tq_lay_out(struct kv_row_codec *codec)
{
	const struct kvcb_codebook *codebook = kvcb_find(codec->head_dim, codec->format->bits);

	kv_row_codec_add_segment(codec,
		&(struct kv_segment){
			.name = "indices",
			.n_channels = codec->head_dim,
			.rotation = codec->rotation,
			.code = KV_CODE_TABLE,
			.bits = codec->format->bits,
			.table = codebook->centroids,
			.codebook = codebook,
			.n_scales = 1,
			.scale_fields = { 0 },
		});
	kv_row_codec_add_field(codec, "norm", KV_FIELD_NORM, KV_DTYPE_F32, 1);
}

static enum kv_status tq_encode(
	const struct kv_row_codec *codec, const float *row, uint8_t *out, struct kv_row_scratch *scratch)
{
	const struct kv_segment *indices = &codec->segments[0];
	const uint32_t n = codec->head_dim;
	const float norm_min = (float)1e-12; /* keeps the division of a zero row harmless */
	const float length = kv_row_length(row, n, scratch->wide);

	if (!kv_f32_is_finite(length))
		return KV_BAD_VALUE;

	const float norm = length > norm_min ? length : norm_min;

	for (uint32_t i = 0; i < n; i++)
		scratch->unit[i] = row[i] / norm;
	kv_rotation_forward(codec->rotation, scratch->unit, scratch->turned);
	kvcb_indices(indices->codebook, scratch->turned, n, scratch->codes);

	const enum kv_status status = kv_pack(scratch->codes, n, indices->bits, out + indices->offset);

	KV_ASSERT(status == KV_OK); /* an index is below 2^bits by construction */
	kv_store_f32(norm, out + codec->fields[0].offset);
	return KV_OK;
}

const struct kv_format_family kv_format_family_tq = {
	.is_rotated = true,
	.check = tq_check,
	.lay_out = tq_lay_out,
	.encode = tq_encode,
};
