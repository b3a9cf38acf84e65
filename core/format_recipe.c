/*
 * turboquant25 and turboquant35 (FORMATS 5.4): the high group, then the low one, each
 * [pack(indices)][pack(signs)][norm f16][residual norm f16]. A group is what tqpN is to a row, with three
 * differences: it is rotated in blocks by a matrix that is the same everywhere, its residual is that of the
 * unit row, and the norms become float16, in the row only. So the residual norm scales the signs, and the
 * norm the sum.
 */
#include <math.h>
#include <string.h>

#include "core/format_family.h"
#include "core/recipe.h"

enum { HIGH, LOW, N_GROUPS };

static enum kv_status recipe_check(const struct kv_format *format, uint32_t head_dim,
	const struct kv_format_options *options, struct kv_error *err)
{
	if (kv_recipe_n_high(format->recipe, head_dim) == 0)
		return kv_fail(err, KV_BAD_ARG, "row format %s has no high channels at head_dim %u",
			format->name, head_dim);
	if (!options->high_channels)
		return KV_OK;

	const enum kv_status status = kv_recipe_check_channels(
		format->recipe, head_dim, options->high_channels, options->n_high_channels, err);

	if (status != KV_OK)
		kv_error_wrap(err, "row format %s", format->name);
	return status;
}

/* The high channels, then all others, both ascending. */
static void order_channels(struct kv_row_codec *codec, const uint16_t *high_channels, uint32_t n_high)
{
	uint32_t h = 0, low = n_high;

	for (uint16_t channel = 0; channel < codec->head_dim; channel++) {
		const bool is_high =
			h < n_high && channel == (high_channels ? high_channels[h] : (uint16_t)h);

		codec->channels[is_high ? h++ : low++] = channel;
	}
}

/*
 * Signs of a block are scaled by the inverse length of the projection's rows there, times that of the group's
 * share: sqrt(pi/2) / sqrt(dim * block). The published factor takes the whole group for one block.
 */
static void fill_factors(enum kv_recipe_scale scale, uint32_t dim, float *factors)
{
	for (uint32_t first = 0, block = 256; block != 0; block /= 2) {
		if (!(dim & block))
			continue;

		const double exact = KV_SQRT_HALF_PI / sqrt((double)dim * block);
		const double factor = scale == KV_RECIPE_SCALE_EXACT ? exact : KV_SQRT_HALF_PI / dim;

		for (uint32_t i = first; i < first + block; i++)
			factors[i] = (float)factor;
		first += block;
	}
}

/* Rotation and projection of one group: those of another codec, or new ones. */
static enum kv_status get_rotations(struct kv_row_codec *codec, const struct kv_format_options *options,
	int group_idx, uint32_t dim, const struct kv_rotation *rotations[2], struct kv_error *err)
{
	const bool is_high = group_idx == HIGH;
	struct kv_rotation *made = NULL;
	enum kv_status status;

	if (options->like) {
		rotations[0] = options->like->segments[2 * group_idx].rotation;
		rotations[1] = options->like->segments[2 * group_idx + 1].rotation;
		return KV_OK;
	}
	status =
		kv_rotation_create(KV_ROTATION_BLOCK, dim, kv_recipe_rotation_seed(is_high, dim), &made, err);
	if (status != KV_OK)
		return status;
	kv_row_codec_own_rotation(codec, made);
	rotations[0] = made;
	status = kv_rotation_create_signs(dim, kv_recipe_projection_seed(is_high, dim), &made, err);
	if (status != KV_OK)
		return status;
	kv_row_codec_own_rotation(codec, made);
	rotations[1] = made;
	return KV_OK;
}

static const struct {
	const char *indices, *signs, *norm, *rest_norm;
} part_names[N_GROUPS] = {
	[HIGH] = { "high indices", "high signs", "high norm", "high residual norm" },
	[LOW] = { "low indices", "low signs", "low norm", "low residual norm" },
};

static enum kv_status lay_out_group(struct kv_row_codec *codec, const struct kv_format_options *options,
	int group_idx, uint32_t first, uint32_t dim, struct kv_error *err)
{
	const struct kv_recipe *recipe = codec->format->recipe;
	const uint32_t bits = group_idx == HIGH ? recipe->bits_high : recipe->bits_low;
	const uint8_t norm_field = (uint8_t)(2 * group_idx), rest_norm_field = (uint8_t)(2 * group_idx + 1);
	const struct kvcb_codebook *codebook = NULL;
	const struct kv_rotation *rotations[2];
	enum kv_status status = kv_row_codec_get_codebook(codec, options, dim, bits, &codebook, err);

	if (status == KV_OK)
		status = get_rotations(codec, options, group_idx, dim, rotations, err);
	if (status != KV_OK)
		return status;
	fill_factors(options->recipe_scale, dim, codec->factors + first);
	struct kv_segment segment = {
		.name = part_names[group_idx].indices,
		.n_channels = dim,
		.channels = codec->channels + first,
		.rotation = rotations[0],
		.code = KV_CODE_TABLE,
		.bits = bits,
		.table = codebook->centroids,
		.codebook = codebook,
		.has_outer = true,
		.outer_field = norm_field,
	};

	kv_row_codec_add_segment(codec, &segment);
	segment.name = part_names[group_idx].signs;
	segment.rotation = rotations[1];
	segment.is_added = true;
	segment.bits = 1;
	segment.table = kv_sign_table;
	segment.codebook = NULL;
	segment.factors = codec->factors + first;
	segment.has_scale = true;
	segment.scale_field = rest_norm_field;
	kv_row_codec_add_segment(codec, &segment);
	kv_row_codec_add_field(codec, part_names[group_idx].norm, KV_FIELD_NORM, KV_DTYPE_F16, 1);
	kv_row_codec_add_field(codec, part_names[group_idx].rest_norm, KV_FIELD_NORM, KV_DTYPE_F16, 1);
	return KV_OK;
}

static enum kv_status recipe_lay_out(
	struct kv_row_codec *codec, const struct kv_format_options *options, struct kv_error *err)
{
	const uint32_t n_high = kv_recipe_n_high(codec->format->recipe, codec->head_dim);

	order_channels(codec, options->high_channels, n_high);

	const enum kv_status status = lay_out_group(codec, options, HIGH, 0, n_high, err);

	if (status != KV_OK)
		return status;
	return lay_out_group(codec, options, LOW, n_high, codec->head_dim - n_high, err);
}

/* unit: the group's unit row. */
static void encode_group(const struct kv_row_codec *codec, int group_idx, const float *unit, float norm,
	uint8_t *out, struct kv_row_scratch *scratch)
{
	const struct kv_segment *indices = &codec->segments[2 * group_idx], *signs = indices + 1;
	const uint32_t n = indices->n_channels;
	float *decoded = scratch->turned, *rest = scratch->rest;

	kv_rotation_forward(indices->rotation, unit, scratch->turned);
	kv_segment_find_codes(indices, scratch->turned, scratch->codes);
	kv_segment_pack(indices, scratch->codes, out);
	for (uint32_t i = 0; i < n; i++)
		decoded[i] = indices->table[scratch->codes[i]];
	kv_rotation_backward(indices->rotation, decoded, decoded);
	for (uint32_t i = 0; i < n; i++)
		rest[i] = unit[i] - decoded[i];

	const float rest_norm = kv_row_length(rest, n);

	kv_rotation_forward(signs->rotation, rest, rest);
	kv_segment_pack_signs(signs, rest, scratch->codes, out);
	kv_rows_store(KV_DTYPE_F16, &norm, 1, out + codec->fields[2 * group_idx].offset);
	kv_rows_store(KV_DTYPE_F16, &rest_norm, 1, out + codec->fields[2 * group_idx + 1].offset);
}

static enum kv_status recipe_encode(
	const struct kv_row_codec *codec, const float *row, uint8_t *out, struct kv_row_scratch *scratch)
{
	float norms[N_GROUPS];

	for (uint32_t i = 0; i < codec->head_dim; i++)
		scratch->rest[i] = row[codec->channels[i]];
	for (int g = 0; g < N_GROUPS; g++) {
		const struct kv_segment *indices = &codec->segments[2 * g];
		const uint32_t first = (uint32_t)(indices->channels - codec->channels);

		norms[g] =
			kv_row_normalise(scratch->rest + first, indices->n_channels, scratch->unit + first);
		if (!(norms[g] < KV_F16_OVERFLOW))
			return KV_BAD_VALUE;
	}
	for (int g = 0; g < N_GROUPS; g++) {
		const uint32_t first = (uint32_t)(codec->segments[2 * g].channels - codec->channels);

		encode_group(codec, g, scratch->unit + first, norms[g], out, scratch);
	}
	return KV_OK;
}

const struct kv_format_family kv_format_family_recipe = {
	.is_rotated = false,
	.options = KV_OPTION_RECIPE,
	.check = recipe_check,
	.lay_out = recipe_lay_out,
	.refuses_by_norm = true,
	.encode = recipe_encode,
};
