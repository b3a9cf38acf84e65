/*
 * Two passes over the codecs: the first counts and numbers what is needed (codecs, rotations, words of number
 * tables, each once), the second writes. Both are the same code with and without a place to write to.
 */
#include "gpu/pool_tables.h"

#include <math.h>
#include <string.h>

#include "core/checked.h"
#include "core/format.h"
#include "core/memory.h"
#include "core/number.h"

#define PAGE_ALIGN    256u
#define CODECS_MAX    (KV_CHANNEL_LISTS_MAX + 2 * KV_LAYERS_MAX + 2)
#define ROTATIONS_MAX (8 * KV_LAYERS_MAX)
#define TABLES_SEEN   4096u

KVG_STATIC_ASSERT(KVG_DIM_MAX == KV_HEAD_DIM_MAX, "dims of both sides");
KVG_STATIC_ASSERT(KVG_ROW_BYTES_MAX == KV_ROW_BYTES_MAX, "rows of both sides");
KVG_STATIC_ASSERT(
	KVG_SEGMENTS_MAX == KV_SEGMENTS_MAX && KVG_FIELDS_MAX == KV_FIELDS_MAX, "codecs of both sides");
KVG_STATIC_ASSERT((int)KVG_F32 == (int)KV_DTYPE_F32 && (int)KVG_F16 == (int)KV_DTYPE_F16 &&
		(int)KVG_BF16 == (int)KV_DTYPE_BF16 && (int)KVG_PACKED == (int)KV_DTYPE_PACKED,
	"dtypes of both sides");

/* What was seen already, in order of its number. */
struct builder {
	const struct kv_row_codec *codecs[CODECS_MAX];
	const struct kv_rotation *rotations[ROTATIONS_MAX];
	const void *tables[TABLES_SEEN];
	uint32_t table_at[TABLES_SEEN], table_words[TABLES_SEEN];
	uint32_t n_codecs, n_rotations, n_tables, n_words;
	/* Where to write; NULL in the first pass. */
	struct kvg_codec *out_codecs;
	struct kvg_rotation *out_rotations;
	uint32_t *out_words;
	bool is_full;
	bool is_complete; /* else scales are not searched for */
};

/* ---- words ---- */

static uint32_t add_words(struct builder *b, const void *words, uint32_t n_words)
{
	const uint32_t at = b->n_words;

	if (b->out_words)
		memcpy(b->out_words + at, words, (size_t)n_words * sizeof(*b->out_words));
	b->n_words += n_words;
	return at;
}

/* A table that others may use too: added once. */
static uint32_t share_words(struct builder *b, const void *words, uint32_t n_words)
{
	if (!words)
		return KVG_NONE;
	for (uint32_t i = 0; i < b->n_tables; i++) {
		if (b->tables[i] == words && b->table_words[i] >= n_words)
			return b->table_at[i];
	}

	const uint32_t at = add_words(b, words, n_words);

	if (b->n_tables < TABLES_SEEN) {
		b->tables[b->n_tables] = words;
		b->table_words[b->n_tables] = n_words;
		b->table_at[b->n_tables++] = at;
	}
	return at;
}

static uint32_t add_channels(struct builder *b, const uint16_t *channels, uint32_t n)
{
	uint32_t wide[KV_HEAD_DIM_MAX];

	if (!channels)
		return KVG_NONE;
	for (uint32_t i = 0; i < n; i++)
		wide[i] = channels[i];
	return add_words(b, wide, n);
}

/* ---- rotations ---- */

static uint32_t add_rotation(struct builder *b, const struct kv_rotation *rotation)
{
	struct kvg_rotation out = { .dim = 0 };

	if (!rotation)
		return KVG_NONE;
	for (uint32_t i = 0; i < b->n_rotations; i++) {
		if (b->rotations[i] == rotation)
			return i;
	}
	if (b->n_rotations == ROTATIONS_MAX) {
		b->is_full = true;
		return KVG_NONE;
	}
	const uint32_t n = rotation->head_dim;

	out.dim = n;
	if (rotation->matrix) {
		out.is_dense = 1;
		out.matrix = add_words(b, rotation->matrix, n * n);
		out.matrix_transposed = b->n_words;
		for (uint32_t i = 0; i < n; i++) {
			float column[KV_HEAD_DIM_MAX];

			for (uint32_t j = 0; j < n; j++)
				column[j] = rotation->matrix[(size_t)j * n + i];
			add_words(b, column, n);
		}
	} else {
		out.signs_in = add_words(b, rotation->signs_in, n);
		out.signs_out = add_words(b, rotation->signs_out, n);
		memcpy(out.factors, rotation->factors, sizeof(out.factors));
	}
	if (b->out_rotations)
		b->out_rotations[b->n_rotations] = out;
	b->rotations[b->n_rotations] = rotation;
	return b->n_rotations++;
}

/* ---- codecs ---- */

static enum kvg_family family_of(const struct kv_row_codec *codec)
{
	const char *name = codec->format->name;

	if (codec->segments[0].code == KV_CODE_NUMBER)
		return KVG_DENSE;
	if (strcmp(name, "fp8") == 0)
		return KVG_FP8;
	if (strncmp(name, "turbo", 5) == 0)
		return KVG_RECIPE;
	if (strncmp(name, "tqp", 3) == 0)
		return KVG_TQP;
	return strncmp(name, "tq", 2) == 0 ? KVG_TQ : KVG_VN;
}

static void field_of(const struct kv_row_codec *codec, bool has_field, uint32_t field_idx, uint32_t *offset,
	uint32_t *number)
{
	*offset = has_field ? codec->fields[field_idx].offset : KVG_NONE;
	*number = has_field ? (uint32_t)codec->fields[field_idx].number : 0;
}

static struct kvg_segment make_segment(
	struct builder *b, const struct kv_row_codec *codec, const struct kv_segment *segment)
{
	const uint32_t n_values = segment->code == KV_CODE_TABLE ? 1u << segment->bits : 0;
	struct kvg_segment out = {
		.n_channels = segment->n_channels,
		.channels = add_channels(b, segment->channels, segment->n_channels),
		.rotation = add_rotation(b, segment->rotation),
		.is_added = segment->is_added,
		.prepared_idx = segment->prepared_idx,
		.is_table = segment->code == KV_CODE_TABLE,
		.number = (uint32_t)segment->number,
		.bits = segment->bits,
		.n_codes = segment->n_codes,
		.offset = segment->offset,
		.payload_bytes = segment->payload_bytes,
		.table = n_values ? share_words(b, segment->table, n_values) : KVG_NONE,
		.boundaries = segment->codebook
			? share_words(b, segment->codebook->interior_boundaries, n_values - 1)
			: KVG_NONE,
		.factors = share_words(b, segment->factors, segment->n_channels),
		.group_channels = segment->group_channels,
	};

	field_of(codec, segment->has_scale, segment->scale_field, &out.scale_offset, &out.scale_number);
	field_of(codec, segment->has_zero, segment->zero_field, &out.zero_offset, &out.zero_number);
	field_of(codec, segment->has_outer, segment->outer_field, &out.outer_offset, &out.outer_number);
	return out;
}

static uint32_t add_codec(struct builder *b, const struct kv_row_codec *codec)
{
	for (uint32_t i = 0; i < b->n_codecs; i++) {
		if (b->codecs[i] == codec)
			return i;
	}
	if (b->n_codecs == CODECS_MAX) {
		b->is_full = true;
		return 0;
	}
	struct kvg_codec out = {
		.family = (uint32_t)family_of(codec),
		.head_dim = codec->head_dim,
		.row_bytes = codec->row_bytes,
		.prepared_dim = codec->prepared_dim,
		.bits = codec->format->bits,
		.norm_correction = codec->norm_correction,
		.n_segments = codec->n_segments,
		.n_fields = codec->n_fields,
	};

	for (uint32_t s = 0; s < codec->n_segments; s++)
		out.segments[s] = make_segment(b, codec, &codec->segments[s]);
	for (uint32_t f = 0; f < codec->n_fields; f++) {
		out.fields[f] = (struct kvg_field){
			.may_be_negative = codec->fields[f].kind == KV_FIELD_ZERO,
			.number = (uint32_t)codec->fields[f].number,
			.count = codec->fields[f].count,
			.offset = codec->fields[f].offset,
		};
	}
	if (b->out_codecs)
		b->out_codecs[b->n_codecs] = out;
	b->codecs[b->n_codecs] = codec;
	return b->n_codecs++;
}

/* Codec indices of all KV heads; KVG_NONE where every head is like the first. */
static uint32_t add_heads(struct builder *b, const struct kv_row_codec *const *heads, uint32_t n_heads)
{
	uint32_t indices[KV_HEADS_MAX];

	if (!heads)
		return KVG_NONE;
	for (uint32_t h = 0; h < n_heads; h++)
		indices[h] = add_codec(b, heads[h]);
	return add_words(b, indices, n_heads);
}

/* ---- tiles ---- */

static bool is_tile_format(const struct kv_row_codec *codec)
{
	return family_of(codec) == KVG_TQ && codec->n_segments == 1 &&
		codec->format->bits <= KVG_TILE_BITS_MAX;
}

/* Widths that a tiles kernel is built for, or 0 and 0. */
static struct kvg_tile_bits widths_of(const struct kv_layer_spec *layer)
{
	const struct kv_row_codec *k = layer->k, *v = layer->v;
	const struct kvg_tile_bits bits = { (uint8_t)k->format->bits, (uint8_t)v->format->bits };

	/* The other kernel's: logits that are bent, and tokens that are not in one piece. */
	if (layer->softcap > 0 || layer->alibi || layer->sink_tokens > 0 || !is_tile_format(k) ||
		!is_tile_format(v) || k->head_dim != v->head_dim ||
		kvg_decode_tiles_plan(k->head_dim, bits.k, bits.v, 1).unit_tokens == 0)
		return (struct kvg_tile_bits){ 0, 0 };
	return bits;
}

/* The codebook of the tiles of this width: that of the first layer that has one. */
static const struct kvcb_codebook *tile_codebook(const struct kv_pool_spec *spec, uint32_t bits)
{
	for (uint32_t l = 0; l < spec->n_layers; l++) {
		const struct kvg_tile_bits own = widths_of(&spec->layers[l]);

		if (own.k == bits)
			return spec->layers[l].k->segments[0].codebook;
		if (own.v == bits)
			return spec->layers[l].v->segments[0].codebook;
	}
	return NULL;
}

static bool has_tile_codebook(const struct kv_pool_spec *spec, const struct kv_row_codec *codec)
{
	const uint32_t bits = codec->format->bits;
	const float *centroids = tile_codebook(spec, bits)->centroids;

	return memcmp(codec->segments[0].table, centroids, ((size_t)1 << bits) * sizeof(*centroids)) == 0;
}

/* Widths of a layer that a tiles kernel serves: built, and with those codebooks; 0 and 0 for all others. */
static struct kvg_tile_bits tile_bits_of(const struct kv_pool_spec *spec, const struct kv_layer_spec *layer)
{
	const struct kvg_tile_bits bits = widths_of(layer);
	const bool is_served =
		bits.k != 0 && has_tile_codebook(spec, layer->k) && has_tile_codebook(spec, layer->v);

	return is_served ? bits : (struct kvg_tile_bits){ 0, 0 };
}

/* How likely each index is, roughly: coordinates are about normal with variance 1 / dim. */
static void cell_weights(const struct kvcb_codebook *codebook, double weights[16])
{
	const uint32_t n = 1u << codebook->bits;
	const double unit = sqrt(codebook->head_dim / 2.0);
	double below = 0;

	for (uint32_t i = 0; i < n; i++) {
		const double next =
			i + 1 < n ? 0.5 * erfc(-(double)codebook->interior_boundaries[i] * unit) : 1.0;

		weights[i] = next - below;
		below = next;
	}
}

/* What is left of a centroid that was scaled and rounded to float16 (4 bits), or to a whole number. */
static double rounded(double scaled, uint32_t bits)
{
	return bits == 4 ? (double)kv_f16_to_f32(kv_f32_to_f16((float)scaled)) : rint(scaled);
}

static double rounding_error(const struct kvcb_codebook *codebook, const double weights[16], double scale)
{
	double error = 0;

	for (uint32_t i = 0; i < 1u << codebook->bits; i++) {
		const double centroid = (double)codebook->centroids[i];
		const double rest =
			centroid - rounded((double)(float)(centroid * scale), codebook->bits) / scale;

		error += weights[i] * rest * rest;
	}
	return error;
}

/*
 * The scale whose products are best rounded. Four bits: in [16, 32), a third of the error of an arbitrary
 * one. Fewer: the largest centroid becomes a number from 70 to 127. 20 000 steps find it within a percent of
 * the best.
 */
static float best_scale(const struct kvcb_codebook *codebook)
{
	const double largest = (double)codebook->centroids[(1u << codebook->bits) - 1];
	const double from = codebook->bits == 4 ? 16.0 : 70.0 / largest,
		     to = codebook->bits == 4 ? 32.0 : 127.0 / largest;
	double best = from, best_error = INFINITY, weights[16] = { 0 };

	cell_weights(codebook, weights);
	for (uint32_t i = 0; i < 20000; i++) {
		const double scale = (double)(float)(from * pow(to / from, i / 20000.0));
		const double error = rounding_error(codebook, weights, scale);

		if (error < best_error) {
			best = scale;
			best_error = error;
		}
	}
	return (float)best;
}

/*
 * Four bits: 16 float16, one a word. Fewer: eight signed bytes, and eight of what rounding took off, 256
 * times finer.
 */
static void add_tile_table(struct builder *b, struct kvg_image *image, const struct kvcb_codebook *codebook)
{
	const uint32_t bits = codebook->bits, n = 1u << bits;
	uint32_t words[16] = { 0 };

	/* The first pass only counts. */
	if (b->is_complete && b->out_words)
		image->tile_scales[bits] = best_scale(codebook);
	for (uint32_t i = 0; i < n; i++) {
		const double scaled = (double)codebook->centroids[i] * (double)image->tile_scales[bits];
		const double whole = rint(scaled);
		const uint32_t shift = 8 * (i % 4);

		if (bits == 4) {
			words[i] = kv_f32_to_f16((float)scaled);
			continue;
		}
		words[i / 4] |= ((uint32_t)(int32_t)whole & 0xFFu) << shift;
		words[2 + i / 4] |= ((uint32_t)(int32_t)fmin(rint((scaled - whole) * 256), 127) & 0xFFu)
			<< shift;
	}
	image->tile_tables[bits] = add_words(b, words, bits == 4 ? 16 : 4);
}

/* ---- pages ---- */

static bool place(uint64_t n_blocks, uint64_t block_bytes, uint64_t *end, uint64_t *at)
{
	uint64_t n_bytes = 0, next = 0;

	if (!kv_mul_u64(n_blocks, block_bytes, &n_bytes) || !kv_add_u64(*end, n_bytes, &next) ||
		!kv_add_u64(next, PAGE_ALIGN, &next))
		return false;
	*at = *end;
	*end = kv_round_up_u64(next - PAGE_ALIGN, PAGE_ALIGN);
	return true;
}

static bool place_rings(
	struct kvg_image *image, const struct kv_pool_spec *spec, uint32_t layer, uint64_t *end)
{
	const uint64_t block_rows = (uint64_t)spec->kv_heads * spec->block_size;
	const uint64_t n_blocks = spec->n_blocks[spec->n_groups];

	return place(n_blocks, block_rows * spec->exact_k->row_bytes, end, &image->layer_at[2][layer]) &&
		place(n_blocks, block_rows * spec->exact_v->row_bytes, end, &image->layer_at[3][layer]);
}

static bool place_layers(struct kvg_image *image, const struct kv_pool_spec *spec, uint64_t *end)
{
	const uint64_t block_rows = (uint64_t)spec->kv_heads * spec->block_size;

	for (uint32_t l = 0; l < spec->n_layers; l++) {
		const struct kv_layer_spec *layer = &spec->layers[l];
		const uint64_t n_blocks = spec->n_blocks[layer->group_idx];
		const struct kvg_tile_bits tile_bits = tile_bits_of(spec, layer);
		uint64_t k_bytes = block_rows * layer->k->row_bytes,
			 v_bytes = block_rows * layer->v->row_bytes;

		image->tile_bits[l] = tile_bits;
		image->has_bits[tile_bits.k][tile_bits.v] = true;
		if (tile_bits.k != 0) {
			k_bytes += v_bytes;
			v_bytes = 0;
		}
		image->layers[l].layout = tile_bits.k != 0 ? KVG_LAYOUT_TILES : KVG_LAYOUT_ROWS;
		image->layers[l].k_block_bytes = k_bytes;
		image->layers[l].v_block_bytes = v_bytes;
		image->layers[l].group_idx = layer->group_idx;
		if (k_bytes > image->block_bytes_max)
			image->block_bytes_max = k_bytes;
		if (v_bytes > image->block_bytes_max)
			image->block_bytes_max = v_bytes;
		if (!place(n_blocks, k_bytes, end, &image->layer_at[0][l]) ||
			!place(n_blocks, v_bytes, end, &image->layer_at[1][l]))
			return false;
		if (spec->exact_tokens > 0 && !place_rings(image, spec, l, end))
			return false;
	}
	return true;
}

/* ---- the image ---- */

/* One pass: numbers everything in the same order, and writes it where there is something to write to. */
static void walk(struct builder *b, struct kvg_image *image, const struct kv_pool_spec *spec)
{
	const bool has_exact = spec->exact_tokens > 0;
	const uint32_t exact_k = has_exact ? add_codec(b, spec->exact_k) : KVG_NONE;
	const uint32_t exact_v = has_exact ? add_codec(b, spec->exact_v) : KVG_NONE;

	for (uint32_t l = 0; l < spec->n_layers; l++) {
		const struct kv_layer_spec *layer = &spec->layers[l];
		const uint32_t k = add_codec(b, layer->k), v = add_codec(b, layer->v);
		const uint32_t k_heads = add_heads(b, layer->k_heads, spec->kv_heads);
		const uint32_t v_heads = add_heads(b, layer->v_heads, spec->kv_heads);
		const uint32_t k_center = share_words(b, layer->k_center, spec->kv_heads * spec->k_head_dim);
		const uint32_t sinks = share_words(b, layer->sinks, spec->q_heads);
		const uint32_t alibi = share_words(b, layer->alibi, spec->q_heads);

		if (image->layers) {
			struct kvg_layer *out = &image->layers[l];

			out->k_codec = k;
			out->v_codec = v;
			out->exact_k_codec = exact_k;
			out->exact_v_codec = exact_v;
			out->k_heads = k_heads;
			out->v_heads = v_heads;
			out->k_center = k_center;
			out->softcap = layer->softcap;
			out->sinks = sinks;
			out->alibi = alibi;
			out->k_bytes_before = l == 0 ? 0 : out[-1].k_bytes_before + layer[-1].k->row_bytes;
			out->v_bytes_before = l == 0 ? 0 : out[-1].v_bytes_before + layer[-1].v->row_bytes;
		}
	}
	for (uint32_t bits = 1; bits <= KVG_TILE_BITS_MAX; bits++) {
		const struct kvcb_codebook *codebook = tile_codebook(spec, bits);

		if (codebook)
			add_tile_table(b, image, codebook);
	}
}

static bool make_places(struct kvg_image *image, uint32_t n_layers)
{
	for (uint32_t i = 0; i < KV_LENGTH(image->layer_at); i++) {
		image->layer_at[i] = kv_alloc(n_layers, sizeof(*image->layer_at[i]));
		if (!image->layer_at[i])
			return false;
	}
	return true;
}

static enum kv_status build(struct kvg_image *image, struct builder *b, const struct kv_pool_spec *spec,
	bool is_complete, struct kv_error *err)
{
	uint64_t end = 0;

	walk(b, image, spec);
	if (b->is_full)
		return kv_fail(
			err, KV_UNSUPPORTED, "pool %s has more than %u row codecs", spec->name, CODECS_MAX);
	const uint64_t layers_bytes = kv_round_up_u64(spec->n_layers * sizeof(struct kvg_layer), PAGE_ALIGN);
	const uint64_t codecs_bytes = kv_round_up_u64(b->n_codecs * sizeof(struct kvg_codec), PAGE_ALIGN);
	const uint64_t rotations_bytes =
		kv_round_up_u64(b->n_rotations * sizeof(struct kvg_rotation), PAGE_ALIGN);
	const uint64_t words_bytes = (uint64_t)b->n_words * sizeof(uint32_t);
	const uint32_t n_codecs = b->n_codecs;

	image->tables_bytes = layers_bytes + codecs_bytes + rotations_bytes + words_bytes;
	image->tables_bytes_host = kv_alloc(1, image->tables_bytes);
	image->tile_bits = kv_alloc(spec->n_layers, sizeof(*image->tile_bits));
	if (!image->tables_bytes_host || !image->tile_bits || !make_places(image, spec->n_layers))
		return kv_fail(err, KV_NO_MEMORY, "device tables of pool %s", spec->name);
	image->layers = (struct kvg_layer *)(void *)image->tables_bytes_host;
	image->codecs = (struct kvg_codec *)(void *)(image->tables_bytes_host + layers_bytes);
	memset(b, 0, sizeof(*b));
	b->is_complete = is_complete;
	b->out_codecs = image->codecs;
	b->out_rotations =
		(struct kvg_rotation *)(void *)(image->tables_bytes_host + layers_bytes + codecs_bytes);
	b->out_words = (uint32_t *)(void *)(image->tables_bytes_host + layers_bytes + codecs_bytes +
		rotations_bytes);
	image->words_host = b->out_words;
	walk(b, image, spec);
	if (!place_layers(image, spec, &end) || end > UINT64_MAX - image->tables_bytes - PAGE_ALIGN)
		return kv_fail(
			err, KV_UNSUPPORTED, "pool %s: its pages have more than 2^64 bytes", spec->name);
	image->tables_at = end;
	image->arena_bytes = end + image->tables_bytes;
	image->tables = (struct kvg_tables){
		.n_layers = spec->n_layers,
		.n_codecs = n_codecs,
		.q_heads = spec->q_heads,
		.kv_heads = spec->kv_heads,
		.k_head_dim = spec->k_head_dim,
		.v_head_dim = spec->v_head_dim,
		.block_size = spec->block_size,
	};
	return KV_OK;
}

enum kv_status kvg_image_create(
	const struct kv_pool_spec *spec, bool is_complete, struct kvg_image **out, struct kv_error *err)
{
	struct kvg_image *image = kv_alloc(1, sizeof(*image));
	struct builder *b = kv_alloc(1, sizeof(*b));
	enum kv_status status = KV_NO_MEMORY;

	if (image && b)
		status = build(image, b, spec, is_complete, err);
	else
		kv_fail(err, KV_NO_MEMORY, "device tables of pool %s", spec->name);
	kv_free(b);
	if (status != KV_OK) {
		kvg_image_destroy(image);
		return status;
	}
	*out = image;
	return KV_OK;
}

void kvg_image_place(struct kvg_image *image, uint8_t *device_base)
{
	const uint8_t *tables = device_base + image->tables_at;
	const uint64_t layers_bytes =
		kv_round_up_u64(image->tables.n_layers * sizeof(struct kvg_layer), PAGE_ALIGN);
	const uint64_t codecs_bytes =
		kv_round_up_u64(image->tables.n_codecs * sizeof(struct kvg_codec), PAGE_ALIGN);
	const uint64_t words_at = (uint64_t)((const uint8_t *)image->words_host - image->tables_bytes_host);

	for (uint32_t l = 0; l < image->tables.n_layers; l++) {
		image->layers[l].k = device_base + image->layer_at[0][l];
		image->layers[l].v = device_base + image->layer_at[1][l];
		if (image->layers[l].exact_k_codec != KVG_NONE) {
			image->layers[l].exact_k = device_base + image->layer_at[2][l];
			image->layers[l].exact_v = device_base + image->layer_at[3][l];
		}
	}
	image->tables.layers = (const void *)tables;
	image->tables.codecs = (const void *)(tables + layers_bytes);
	image->tables.rotations = (const void *)(tables + layers_bytes + codecs_bytes);
	image->tables.words = (const void *)(tables + words_at);
}

void kvg_image_destroy(struct kvg_image *image)
{
	if (!image)
		return;
	kv_free(image->tables_bytes_host);
	for (uint32_t i = 0; i < KV_LENGTH(image->layer_at); i++)
		kv_free(image->layer_at[i]);
	kv_free(image->tile_bits);
	kv_free(image);
}
