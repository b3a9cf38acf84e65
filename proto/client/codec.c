#include "proto/client/codec.h"

#include <stdlib.h>
#include <string.h>

#include "core/k_center.h"
#include "core/recipe.h"

static enum tqkv_status no_memory(struct tqkv_error *err)
{
	return tqkv_fail(err, TQKV_NO_MEMORY, "no memory for a codec");
}

/* A failure of core as one of this library. */
static enum tqkv_status pass_on(enum kv_status status, const struct kv_error *cause, struct tqkv_error *err)
{
	return tqkv_fail(err, (enum tqkv_status)status, "%s", cause->msg);
}

/* ---- making one ---- */

struct maker {
	struct tqkv_codec *codec;
	const struct tqkv_codec_params *params;
	struct tqkv_error *err;
};

static enum tqkv_status make_rotation(
	struct maker *maker, bool is_v, uint32_t layer, uint32_t seed, struct kv_rotation **out)
{
	const struct tqkv_side_text *side = &maker->codec->text.sides[is_v];
	const float *matrix = is_v ? maker->params->v_rotation : maker->params->k_rotation;
	struct kv_error cause = { .msg = "" };
	enum kv_status status;

	if (side->rotation == KV_ROTATION_FILE && !matrix)
		return tqkv_fail(maker->err, TQKV_BAD_ARG,
			"the pool's rotation is a given matrix: expected %c_rotation", is_v ? 'v' : 'k');
	/* rht is not a product with its matrix: its bits come from butterflies. */
	if (matrix && side->rotation != KV_ROTATION_RHT)
		status = kv_rotation_create_from_matrix(KV_ROTATION_FILE, side->head_dim, seed,
			matrix + (side->is_per_layer ? (size_t)layer * side->head_dim * side->head_dim : 0),
			out, &cause);
	else
		status = kv_rotation_create(side->rotation, side->head_dim, seed, out, &cause);
	return status == KV_OK ? TQKV_OK : pass_on(status, &cause, maker->err);
}

static enum tqkv_status get_rotation(
	struct maker *maker, bool is_v, uint32_t layer, const struct kv_rotation **out)
{
	struct tqkv_codec *codec = maker->codec;
	const struct tqkv_side_text *side = &codec->text.sides[is_v];
	const uint32_t seed = side->is_per_layer ? kv_rotation_layer_seed(side->seed, layer, 0) : side->seed;
	enum tqkv_status status;

	if (side->rotation == KV_ROTATION_NONE)
		return tqkv_fail(maker->err, TQKV_BAD_ARG,
			"the pool's JSON: %c_rotation: expected one for %s", is_v ? 'v' : 'k',
			side->formats[layer]->name);
	for (uint32_t i = codec->n_rotations; i-- > 0;) {
		if (codec->rotations[i]->head_dim == side->head_dim && codec->rotations[i]->seed == seed) {
			*out = codec->rotations[i];
			return TQKV_OK;
		}
	}
	status = make_rotation(maker, is_v, layer, seed, &codec->rotations[codec->n_rotations]);
	if (status == TQKV_OK)
		*out = codec->rotations[codec->n_rotations++];
	return status;
}

/* The pool's options, as far as the format takes them. */
static struct kv_format_options options_for(const struct tqkv_pool_text *text, const struct kv_format *format)
{
	const uint32_t takes = kv_format_takes(format);

	return (struct kv_format_options){
		.norm_correction = (takes & KV_OPTION_NORM_CORRECTION) && text->norm_correction,
		.group = takes & KV_OPTION_GROUP ? text->group : 0,
		.recipe_scale = takes & KV_OPTION_RECIPE ? text->recipe_scale : KV_RECIPE_SCALE_EXACT,
	};
}

static enum tqkv_status add_codec(struct maker *maker, const struct kv_format *format, uint32_t head_dim,
	const struct kv_rotation *rotation, const struct kv_format_options *options,
	const struct kv_row_codec **out)
{
	struct tqkv_codec *codec = maker->codec;
	struct kv_error cause = { .msg = "" };
	const enum kv_status status = kv_row_codec_create_with(
		format, head_dim, rotation, options, &codec->codecs[codec->n_codecs], &cause);

	if (status != KV_OK)
		return pass_on(status, &cause, maker->err);
	*out = codec->codecs[codec->n_codecs++];
	return TQKV_OK;
}

/* The codec with the default channels. */
static enum tqkv_status get_codec(
	struct maker *maker, bool is_v, uint32_t layer, const struct kv_row_codec **out)
{
	struct tqkv_codec *codec = maker->codec;
	const struct tqkv_side_text *side = &codec->text.sides[is_v];
	const struct kv_format *format = side->formats[layer];
	const struct kv_format_options options = options_for(&codec->text, format);
	const struct kv_rotation *rotation = NULL;
	enum tqkv_status status = TQKV_OK;

	if (kv_format_is_rotated(format))
		status = get_rotation(maker, is_v, layer, &rotation);
	if (status != TQKV_OK)
		return status;
	for (uint32_t i = codec->n_codecs; i-- > 0;) {
		const struct kv_row_codec *made = codec->codecs[i];

		if (made->format == format && made->head_dim == side->head_dim &&
			made->rotation == rotation && !made->is_like) {
			*out = made;
			return TQKV_OK;
		}
	}
	return add_codec(maker, format, side->head_dim, rotation, &options, out);
}

/* Codecs of the KV heads of a recipe whose channels were given. */
static enum tqkv_status get_heads(struct maker *maker, bool is_v, uint32_t layer, const uint16_t *channels)
{
	struct tqkv_codec *codec = maker->codec;
	struct tqkv_layer_codec *rows = &codec->layers[is_v][layer];
	const struct kv_row_codec *base = rows->codec;
	const uint32_t n_high = kv_recipe_n_high(base->format->recipe, base->head_dim);
	const struct kv_row_codec **heads = calloc(codec->text.kv_heads, sizeof(*heads));
	struct kv_format_options options = options_for(&codec->text, base->format);
	enum tqkv_status status = TQKV_OK;

	if (!heads)
		return no_memory(maker->err);
	options.n_high_channels = n_high;
	options.like = base;
	for (uint32_t h = 0; status == TQKV_OK && h < codec->text.kv_heads; h++) {
		options.high_channels = channels + ((size_t)layer * codec->text.kv_heads + h) * n_high;
		/* The list ascends, so its end says whether it is the default one. */
		if (options.high_channels[n_high - 1] == n_high - 1)
			heads[h] = base;
		else
			status = add_codec(
				maker, base->format, base->head_dim, base->rotation, &options, &heads[h]);
	}
	rows->heads = heads;
	if (status == TQKV_OK)
		rows->codec = heads[0];
	return status;
}

static enum tqkv_status make_layer(struct maker *maker, bool is_v, uint32_t layer)
{
	const uint16_t *channels = is_v ? maker->params->v_high_channels : maker->params->k_high_channels;
	struct tqkv_layer_codec *rows = &maker->codec->layers[is_v][layer];
	const enum tqkv_status status = get_codec(maker, is_v, layer, &rows->codec);

	if (status != TQKV_OK || !channels || !rows->codec->format->recipe)
		return status;
	return get_heads(maker, is_v, layer, channels);
}

/* Lists are [layers][heads][n_high], so all recipes of a side must have the same n_high. */
static enum tqkv_status check_lists(struct maker *maker, bool is_v)
{
	const struct tqkv_side_text *side = &maker->codec->text.sides[is_v];
	const struct kv_format *recipe = NULL;

	for (uint32_t l = 0; l < maker->codec->text.n_layers; l++) {
		if (!side->formats[l]->recipe)
			continue;
		if (recipe && recipe != side->formats[l])
			return tqkv_fail(maker->err, TQKV_BAD_ARG,
				"%c_high_channels: the pool has both recipes, expected one of them",
				is_v ? 'v' : 'k');
		recipe = side->formats[l];
	}
	return TQKV_OK;
}

static enum tqkv_status allocate(struct maker *maker)
{
	struct tqkv_codec *codec = maker->codec;
	const size_t n_layers = codec->text.n_layers, n_heads = codec->text.kv_heads;
	const bool has_lists = maker->params->k_high_channels || maker->params->v_high_channels;

	codec->layers[0] = calloc(n_layers, sizeof(*codec->layers[0]));
	codec->layers[1] = calloc(n_layers, sizeof(*codec->layers[1]));
	codec->rotations = calloc(2 * n_layers, sizeof(*codec->rotations));
	codec->codecs = calloc(2 * n_layers * (has_lists ? 1 + n_heads : 1), sizeof(*codec->codecs));
	return codec->layers[0] && codec->layers[1] && codec->rotations && codec->codecs
		? TQKV_OK
		: no_memory(maker->err);
}

static enum tqkv_status copy_center(struct maker *maker)
{
	struct tqkv_codec *codec = maker->codec;
	const size_t n_values =
		(size_t)codec->text.n_layers * codec->text.kv_heads * codec->text.sides[false].head_dim;

	if (codec->text.k_center[0] == '\0')
		return TQKV_OK;
	if (!maker->params->k_center)
		return tqkv_fail(maker->err, TQKV_BAD_ARG, "the pool has a k_center: expected k_center");
	codec->k_center = calloc(n_values, sizeof(*codec->k_center));
	if (!codec->k_center)
		return no_memory(maker->err);
	memcpy(codec->k_center, maker->params->k_center, n_values * sizeof(*codec->k_center));
	return TQKV_OK;
}

enum tqkv_status tqkv_codec_create_from_pool_json(const char *json, const struct tqkv_codec_params *params,
	struct tqkv_codec **out, struct tqkv_error *err)
{
	if (!json || !out)
		return tqkv_fail_null(err, "json, out");

	static const struct tqkv_codec_params no_params = { 0 };
	struct tqkv_codec *codec = calloc(1, sizeof(*codec));
	struct maker maker = { codec, params ? params : &no_params, err };
	enum tqkv_status status;

	if (!codec)
		return no_memory(err);
	status = tqkv_pool_text_init(&codec->text, json, err);
	if (status == TQKV_OK)
		status = allocate(&maker);
	if (status == TQKV_OK && maker.params->k_high_channels)
		status = check_lists(&maker, false);
	if (status == TQKV_OK && maker.params->v_high_channels)
		status = check_lists(&maker, true);
	for (uint32_t i = 0; status == TQKV_OK && i < 2 * codec->text.n_layers; i++)
		status = make_layer(&maker, i % 2 != 0, i / 2);
	if (status == TQKV_OK)
		status = copy_center(&maker);
	if (status == TQKV_OK)
		status = tqkv_codec_verify(codec, err);
	if (status != TQKV_OK) {
		tqkv_codec_destroy(codec);
		return status;
	}
	*out = codec;
	return TQKV_OK;
}

void tqkv_codec_destroy(struct tqkv_codec *codec)
{
	if (!codec)
		return;
	for (uint32_t i = 0; i < codec->n_codecs; i++)
		kv_row_codec_destroy(codec->codecs[i]);
	for (uint32_t i = 0; i < codec->n_rotations; i++)
		kv_rotation_destroy(codec->rotations[i]);
	for (uint32_t i = 0; i < 2; i++) {
		for (uint32_t l = 0; codec->layers[i] && l < codec->text.n_layers; l++)
			free((void *)codec->layers[i][l].heads);
		free(codec->layers[i]);
	}
	free(codec->rotations);
	free(codec->codecs);
	free(codec->k_center);
	tqkv_pool_text_finish(&codec->text);
	free(codec);
}

/* ---- what it is ---- */

void tqkv_codec_info(const struct tqkv_codec *codec, struct tqkv_codec_info *info)
{
	*info = (struct tqkv_codec_info){ codec->text.n_layers, codec->text.kv_heads,
		codec->text.sides[0].head_dim, codec->text.sides[1].head_dim };
}

uint32_t tqkv_codec_row_bytes(const struct tqkv_codec *codec, uint32_t layer, bool is_v)
{
	return layer < codec->text.n_layers ? codec->layers[is_v][layer].codec->row_bytes : 0;
}

const char *tqkv_codec_format(const struct tqkv_codec *codec, uint32_t layer, bool is_v)
{
	return layer < codec->text.n_layers ? codec->text.sides[is_v].formats[layer]->name : NULL;
}

uint32_t tqkv_codec_high_channels(const char *format, uint32_t head_dim)
{
	const struct kv_format *found;

	if (kv_format_parse(format, &found, NULL) != KV_OK || !found->recipe ||
		kv_format_check(found, head_dim, NULL) != KV_OK)
		return 0;
	return kv_recipe_n_high(found->recipe, head_dim);
}

/* ---- rows ---- */

/* One call: checked sizes, and how far it has come. */
struct run {
	const struct tqkv_codec *codec;
	uint32_t layer;
	bool is_v;
	enum kv_dtype dtype;
	uint32_t head_dim, row_bytes, number_bytes;
	const float *center; /* [kv_heads, head_dim]; NULL: none */
	struct kv_row_scratch scratch;
};

static enum tqkv_status begin(struct run *run, enum tqkv_dtype dtype, uint32_t n_tokens, size_t rows_bytes,
	size_t packed_bytes, bool is_encode, struct tqkv_error *err)
{
	const struct tqkv_pool_text *text = &run->codec->text;
	uint64_t n_rows = 0, n_rows_bytes, n_packed_bytes;

	if (run->layer >= text->n_layers)
		return tqkv_fail(err, TQKV_BAD_ARG, "layer %u, the pool has %u", run->layer, text->n_layers);
	run->dtype = (enum kv_dtype)dtype;
	run->number_bytes = kv_dtype_bytes(run->dtype);
	if (run->number_bytes == 0)
		return tqkv_fail(err, TQKV_BAD_ARG, "dtype %d, expected F32, F16 or BF16", (int)dtype);
	run->head_dim = text->sides[run->is_v].head_dim;
	run->row_bytes = run->codec->layers[run->is_v][run->layer].codec->row_bytes;
	if (run->codec->k_center && !run->is_v)
		run->center = run->codec->k_center + (size_t)run->layer * text->kv_heads * run->head_dim;
	n_rows = (uint64_t)n_tokens * text->kv_heads; /* 42 bits at most, 12 more below */
	n_rows_bytes = n_rows * run->head_dim * run->number_bytes;
	n_packed_bytes = n_rows * run->row_bytes;
	if (is_encode ? rows_bytes != n_rows_bytes : rows_bytes < n_rows_bytes)
		return tqkv_fail(err, TQKV_BAD_ARG, "rows: %zu bytes, expected %llu", rows_bytes,
			(unsigned long long)n_rows_bytes);
	if (is_encode ? packed_bytes < n_packed_bytes : packed_bytes != n_packed_bytes)
		return tqkv_fail(err, TQKV_BAD_ARG, "packed rows: %zu bytes, expected %llu", packed_bytes,
			(unsigned long long)n_packed_bytes);
	return TQKV_OK;
}

static enum tqkv_status fail_row(
	const struct run *run, uint32_t token, uint32_t head, const char *what, struct tqkv_error *err)
{
	tqkv_fail(err, TQKV_BAD_VALUE, "token %u, KV head %u: %s %s", token, head, what,
		run->codec->text.sides[run->is_v].formats[run->layer]->name);
	if (err) {
		err->scope = TQKV_SCOPE_REQUEST;
		err->item = token;
	}
	return TQKV_BAD_VALUE;
}

static enum kv_status encode_row(struct run *run, uint32_t head, const uint8_t *row, uint8_t *packed)
{
	float values[KV_HEAD_DIM_MAX];

	kv_rows_load_f32(run->dtype, row, run->head_dim, values);
	if (run->center)
		kv_k_center_subtract(
			run->center + (size_t)head * run->head_dim, values, run->head_dim, values);
	return kv_row_codec_encode(
		tqkv_head_codec(run->codec, run->layer, run->is_v, head), values, packed, &run->scratch);
}

static enum kv_status decode_row(struct run *run, uint32_t head, const uint8_t *packed, uint8_t *row)
{
	const struct kv_row_codec *codec = tqkv_head_codec(run->codec, run->layer, run->is_v, head);
	const enum kv_status status = kv_row_codec_validate_packed(codec, packed);
	float values[KV_HEAD_DIM_MAX];

	if (status != KV_OK)
		return status;
	kv_row_codec_decode(codec, packed, values, &run->scratch);
	if (run->center)
		kv_k_center_add(run->center + (size_t)head * run->head_dim, run->head_dim, values);
	kv_rows_store(run->dtype, values, run->head_dim, row);
	return KV_OK;
}

enum tqkv_status tqkv_codec_encode(const struct tqkv_codec *codec, uint32_t layer, bool is_v,
	enum tqkv_dtype dtype, const void *rows, size_t rows_bytes, uint32_t n_tokens, void *packed,
	size_t packed_bytes_max, struct tqkv_error *err)
{
	if (!codec || (n_tokens > 0 && (!rows || !packed)))
		return tqkv_fail_null(err, "codec, rows, packed");

	struct run run = { .codec = codec, .layer = layer, .is_v = is_v };
	const enum tqkv_status status = begin(&run, dtype, n_tokens, rows_bytes, packed_bytes_max, true, err);
	const uint8_t *row = rows;
	uint8_t *out = packed;

	for (uint32_t t = 0; status == TQKV_OK && t < n_tokens; t++) {
		for (uint32_t h = 0; h < codec->text.kv_heads; h++) {
			uint8_t *to = out + (size_t)h * run.row_bytes;

			if (encode_row(&run, h, row, to) != KV_OK)
				return fail_row(&run, t, h, "the row cannot be stored as", err);
			row += (size_t)run.head_dim * run.number_bytes;
		}
		out += (size_t)codec->text.kv_heads * run.row_bytes;
	}
	return status;
}

enum tqkv_status tqkv_codec_decode(const struct tqkv_codec *codec, uint32_t layer, bool is_v,
	enum tqkv_dtype dtype, const void *packed, size_t packed_bytes, uint32_t n_tokens, void *rows,
	size_t rows_bytes_max, struct tqkv_error *err)
{
	if (!codec || (n_tokens > 0 && (!rows || !packed)))
		return tqkv_fail_null(err, "codec, rows, packed");

	struct run run = { .codec = codec, .layer = layer, .is_v = is_v };
	const enum tqkv_status status =
		begin(&run, dtype, n_tokens, rows_bytes_max, packed_bytes, false, err);
	const uint8_t *from = packed;
	uint8_t *row = rows;

	for (uint32_t t = 0; status == TQKV_OK && t < n_tokens; t++) {
		for (uint32_t h = 0; h < codec->text.kv_heads; h++) {
			if (decode_row(&run, h, from, row) != KV_OK)
				return fail_row(&run, t, h, "the bytes are no row of", err);
			from += run.row_bytes;
			row += (size_t)run.head_dim * run.number_bytes;
		}
	}
	return status;
}
