/*
 * Rotations and row codecs of a pool, from formats and options that were checked. Each is made once: layers
 * whose rows look alike share a codec, K and V of one dim share a rotation (FORMATS 1). Codecs with channels
 * of their own borrow codebooks and rotations from the one with the default channels.
 */
#include <string.h>

#include "core/checked.h"
#include "core/memory.h"
#include "core/pool_spec_internal.h"
#include "core/recipe.h"

/* The pool's rotation of this dim, or the layer's own. */
static enum kv_status get_rotation(struct kv_made_spec *made, uint32_t head_dim, uint32_t layer,
	const struct kv_rotation **out, struct kv_error *err)
{
	const uint32_t seed = made->is_per_layer ? kv_rotation_layer_seed(made->seed, layer, 0) : made->seed;
	const enum kv_rotation_kind kind = made->rotation_kind == KV_ROTATION_NONE
		? kv_rotation_kind_default(head_dim)
		: made->rotation_kind;
	struct kv_rotation **slot = &made->rotations[made->n_rotations];
	enum kv_status status;

	/* The newest first: a layer's own is the last or the one before it. */
	for (uint32_t i = made->n_rotations; i-- > 0;) {
		if (made->rotations[i]->head_dim == head_dim && made->rotations[i]->seed == seed) {
			*out = made->rotations[i];
			return KV_OK;
		}
	}
	KV_ASSERT(made->n_rotations < 2 * made->base.n_layers);
	status = kind == KV_ROTATION_FILE
		? kv_rotation_create_from_matrix(kind, head_dim, seed, made->matrix, slot, err)
		: kv_rotation_create(kind, head_dim, seed, slot, err);
	if (status != KV_OK)
		return status;
	*out = *slot;
	made->n_rotations++;
	return KV_OK;
}

/* Room for one more codec. */
static enum kv_status grow(struct kv_made_spec *made, struct kv_error *err)
{
	const uint32_t n_max = made->n_codecs_max > 0 ? 2 * made->n_codecs_max : 16;
	struct kv_row_codec **grown;

	if (made->n_codecs < made->n_codecs_max)
		return KV_OK;
	grown = kv_alloc(n_max, sizeof(*grown));
	if (!grown)
		return kv_fail(err, KV_NO_MEMORY, "%u codecs", n_max);
	if (made->n_codecs > 0)
		memcpy(grown, made->codecs, made->n_codecs * sizeof(*grown));
	kv_free(made->codecs);
	made->codecs = grown;
	made->n_codecs_max = n_max;
	return KV_OK;
}

static enum kv_status add_codec(struct kv_made_spec *made, const struct kv_format *format, uint32_t head_dim,
	const struct kv_rotation *rotation, const struct kv_format_options *options,
	const struct kv_row_codec **out, struct kv_error *err)
{
	enum kv_status status = grow(made, err);

	if (status == KV_OK)
		status = kv_row_codec_create_with(
			format, head_dim, rotation, options, &made->codecs[made->n_codecs], err);
	if (status == KV_OK)
		*out = made->codecs[made->n_codecs++];
	return status;
}

/* The codec of a layer's side with the default channels: that of an earlier layer, or a new one. */
static enum kv_status get_codec(struct kv_made_spec *made, const struct kv_format *format, uint32_t head_dim,
	uint32_t layer, const struct kv_row_codec **out, struct kv_error *err)
{
	const struct kv_format_options options = kv_spec_options_for(made, format);
	const struct kv_rotation *rotation = NULL;
	enum kv_status status = KV_OK;

	if (kv_format_is_rotated(format))
		status = get_rotation(made, head_dim, layer, &rotation, err);
	if (status != KV_OK)
		return status;
	for (uint32_t i = made->n_codecs; i-- > 0;) {
		const struct kv_row_codec *codec = made->codecs[i];

		if (codec->format == format && codec->head_dim == head_dim && codec->rotation == rotation &&
			!codec->is_like) {
			*out = codec;
			return KV_OK;
		}
	}
	return add_codec(made, format, head_dim, rotation, &options, out, err);
}

/* ---- channels of recipes ---- */

static bool is_default_list(const uint16_t *channels, uint32_t n)
{
	return channels[n - 1] == n - 1; /* the list ascends */
}

/* The codec of one KV head. */
static enum kv_status get_head_codec(struct kv_made_spec *made, const struct kv_row_codec *base,
	uint32_t layer, bool is_v, uint32_t head, const struct kv_row_codec **out, struct kv_error *err)
{
	const uint16_t *channels = kv_recipe_file_channels(made->recipe, layer, is_v, head);
	struct kv_format_options options = kv_spec_options_for(made, base->format);

	*out = base;
	if (!channels || is_default_list(channels, made->recipe->n_high))
		return KV_OK;
	if (made->n_lists++ == KV_CHANNEL_LISTS_MAX)
		return kv_fail(err, KV_UNSUPPORTED, "more than %u lists of channels", KV_CHANNEL_LISTS_MAX);
	options.high_channels = channels;
	options.n_high_channels = made->recipe->n_high;
	options.like = base;
	return add_codec(made, base->format, base->head_dim, NULL, &options, out, err);
}

/* *heads: owned by the layer; NULL where all heads have the default channels. */
static enum kv_status get_head_codecs(struct kv_made_spec *made, const struct kv_row_codec *base,
	uint32_t layer, bool is_v, const struct kv_row_codec *const **heads, struct kv_error *err)
{
	const struct kv_row_codec **made_heads;
	bool is_needed = false;

	if (!made->recipe || !base->format->recipe || !kv_recipe_file_channels(made->recipe, layer, is_v, 0))
		return KV_OK;
	made_heads = kv_alloc(made->base.kv_heads, sizeof(*made_heads));
	if (!made_heads)
		return kv_fail(err, KV_NO_MEMORY, "codecs of %u KV heads", made->base.kv_heads);
	for (uint32_t h = 0; h < made->base.kv_heads; h++) {
		const enum kv_status status = get_head_codec(made, base, layer, is_v, h, &made_heads[h], err);

		if (status != KV_OK) {
			kv_free(made_heads);
			return status;
		}
		is_needed = is_needed || made_heads[h] != base;
	}
	if (is_needed)
		*heads = made_heads;
	else
		kv_free(made_heads);
	return KV_OK;
}

static enum kv_status make_layer(struct kv_made_spec *made, uint32_t l, struct kv_error *err)
{
	struct kv_layer_spec *layer = &made->layers[l];
	enum kv_status status = get_codec(made, made->k_formats[l], made->base.k_head_dim, l, &layer->k, err);

	if (status == KV_OK)
		status = get_codec(made, made->v_formats[l], made->base.v_head_dim, l, &layer->v, err);
	if (status == KV_OK)
		status = get_head_codecs(made, layer->k, l, false, &layer->k_heads, err);
	if (status == KV_OK)
		status = get_head_codecs(made, layer->v, l, true, &layer->v_heads, err);
	if (status != KV_OK)
		return status;
	if (layer->k_heads)
		layer->k = layer->k_heads[0];
	if (layer->v_heads)
		layer->v = layer->v_heads[0];
	made->base.has_head_codecs = made->base.has_head_codecs || layer->k_heads || layer->v_heads;
	return KV_OK;
}

/* ---- how much there is to compute ---- */

/* head_dim^3 for every qr matrix of one layer: its rotations, and projections that have no quick form. */
static uint64_t layer_qr_work(const struct kv_made_spec *made, uint32_t layer)
{
	const struct kv_format *formats[2] = { made->k_formats[layer], made->v_formats[layer] };
	const uint64_t dims[2] = { made->base.k_head_dim, made->base.v_head_dim };
	uint64_t work = 0;

	for (int i = 0; i < 2; i++) {
		const bool is_odd = kv_rotation_kind_default((uint32_t)dims[i]) == KV_ROTATION_QR;
		const bool is_qr = made->rotation_kind == KV_ROTATION_NONE
			? is_odd
			: made->rotation_kind == KV_ROTATION_QR;
		const bool is_same_dim = i == 1 && dims[0] == dims[1];

		if (is_qr && kv_format_is_rotated(formats[i]) &&
			!(is_same_dim && kv_format_is_rotated(formats[0])))
			work += dims[i] * dims[i] * dims[i];
		if (is_odd && (kv_format_takes(formats[i]) & KV_OPTION_PROJECTION) &&
			!(is_same_dim && formats[0] == formats[1]))
			work += dims[i] * dims[i] * dims[i];
	}
	return work;
}

static enum kv_status check_work(const struct kv_spec_reader *reader, const struct kv_made_spec *made)
{
	uint64_t work = 0;

	for (uint32_t l = 0; made->is_per_layer && l < made->base.n_layers; l++)
		work += layer_qr_work(made, l);
	if (work > KV_QR_WORK_MAX)
		return kv_fail(reader->err, KV_UNSUPPORTED,
			"pool \"%s\": per_layer true: expected at most as much as 256 qr matrices of 256 "
			"channels, "
			"not %.0f times that; rht takes no time",
			reader->pool, (double)work / (double)KV_QR_WORK_MAX + 0.5);
	return KV_OK;
}

/* ---- what came of it ---- */

/* The codebooks that a codec looks values up in; those of one that borrows are counted where they are. */
static uint64_t codebook_bytes(const struct kv_made_spec *made, uint32_t codec_idx)
{
	const struct kv_row_codec *codec = made->codecs[codec_idx];
	uint64_t n_bytes = 0;

	for (uint32_t s = 0; s < codec->n_segments && !codec->is_like; s++) {
		const struct kvcb_codebook *codebook = codec->segments[s].codebook;
		bool is_seen = !codebook;

		/* Two codecs of one pool that share a built-in codebook count it once. */
		for (uint32_t i = 0; i < codec_idx && !is_seen; i++) {
			for (uint32_t k = 0; k < made->codecs[i]->n_segments; k++)
				is_seen = is_seen || made->codecs[i]->segments[k].codebook == codebook;
		}
		if (!is_seen)
			n_bytes += sizeof(float) * ((2u << codebook->bits) - 1);
	}
	return n_bytes;
}

static void sum_up(struct kv_made_spec *made)
{
	struct kv_pool_spec *spec = &made->base;

	if (made->k_center)
		spec->rotation_bytes +=
			sizeof(float) * spec->n_layers * spec->kv_heads * (uint64_t)spec->k_head_dim;
	for (uint32_t i = 0; i < made->n_rotations; i++)
		spec->rotation_bytes += kv_rotation_memory_bytes(made->rotations[i]);
	for (uint32_t i = 0; i < made->n_codecs; i++) {
		spec->rotation_bytes += made->codecs[i]->rotation_bytes;
		spec->codebook_bytes += codebook_bytes(made, i);
	}
}

/* A codebook that nobody looks into was made for another dim or another number of bits. */
static enum kv_status check_codebooks(const struct kv_spec_reader *reader, const struct kv_made_spec *made)
{
	for (uint32_t c = 0; c < made->options.n_codebooks; c++) {
		const struct kvcb_codebook *codebook = &made->codebooks[c];
		bool is_used = false;

		for (uint32_t i = 0; i < made->n_codecs && !is_used; i++) {
			for (uint32_t s = 0; s < made->codecs[i]->n_segments; s++) {
				const struct kvcb_codebook *used = made->codecs[i]->segments[s].codebook;

				is_used = is_used ||
					(used && used->head_dim == codebook->head_dim &&
						used->bits == codebook->bits);
			}
		}
		if (!is_used)
			return kv_fail(reader->err, KV_BAD_CONFIG,
				"pool \"%s\": codebook_files[%u]: d %u, bits %u: expected those of a format "
				"of "
				"the pool",
				reader->pool, c, codebook->head_dim, codebook->bits);
	}
	return KV_OK;
}

enum kv_status kv_spec_make_codecs(const struct kv_spec_reader *reader, struct kv_made_spec *made)
{
	struct kv_error cause = { .msg = "" };
	enum kv_status status = check_work(reader, made);

	if (status != KV_OK)
		return status;
	made->rotations = kv_alloc(2 * (size_t)made->base.n_layers, sizeof(*made->rotations));
	if (!made->rotations)
		return kv_spec_no_memory(reader, "rotations");
	for (uint32_t l = 0; l < made->base.n_layers && status == KV_OK; l++)
		status = make_layer(made, l, &cause);
	if (status != KV_OK)
		return kv_spec_pass_on(reader,
			made->rotation_kind == KV_ROTATION_FILE && status == KV_BAD_VALUE ? "rotation matrix"
											  : "row codecs",
			status, &cause);
	status = check_codebooks(reader, made);
	if (status == KV_OK)
		sum_up(made);
	return status;
}
