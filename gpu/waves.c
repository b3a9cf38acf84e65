/*
 * Decodes become waves: query rows of one class of layers (tiles of one width, or rows of any format), as
 * many as the workspace holds. How a row is split depends on the rest of its class in the batch, so that few
 * rows fill the device too; the same batch is always split alike.
 */
#include <string.h>

#include "core/attention.h"
#include "core/checked.h"
#include "core/format.h"
#include "gpu/backend_internal.h"

#define PIECE_TOKENS_MIN 64u /* rows layout: below this a piece is mostly start-up */
#define BLOCKS_PER_SM    8u  /* rows layout: pieces wanted for each multiprocessor */
/* Tiles: below this, one block for each multiprocessor. */
#define UNITS_PER_BLOCK_MIN 8u

struct class_of {
	struct cuda_backend *cuda;
	struct kvg_flight *flight;
	const struct kvg_decode_op *ops;       /* device */
	uint32_t tile_bits;                    /* 0: rows layout */
	uint32_t n_heads, n_chunks, n_virtual; /* as in kvg_decode_params */
	struct kvg_tiles_plan plan;            /* tiles */
	uint32_t unit_tokens, piece_tokens;
	uint32_t idle_units; /* of every (row, virtual head) with tokens */
	/* The open wave: */
	struct kvg_decode_params *wave;
	struct kvg_decode_row *rows;
	uint32_t first_units; /* of its first row; KVG_NONE once rows differ */
};

static uint32_t max_u32(uint32_t a, uint32_t b)
{
	return a > b ? a : b;
}

static struct kv_attention_range tokens_of(
	const struct class_of *class, const struct kv_decode_op *op, uint32_t row)
{
	const struct kv_layer_spec *layer = &class->flight->batch->pool->spec->layers[op->layer];

	return kv_attention_range(op->n_tokens_seen, op->q_len, row, op->window, layer->sink_tokens);
}

/* Units, or pieces of tiles: those of the first tokens, and those from the tile of tokens.lo on. */
static uint32_t work_of(const struct class_of *class, const struct kv_attention_range *tokens)
{
	const uint32_t step = class->tile_bits != 0 ? class->unit_tokens : KVG_TILE_TOKENS;
	const uint32_t n_steps =
		kv_div_up_u32(tokens->first_hi, step) + kv_div_up_u32(tokens->hi, step) - tokens->lo / step;

	if (tokens->hi <= tokens->lo)
		return 0;
	return class->tile_bits != 0 ? n_steps
				     : kv_div_up_u32(n_steps, class->piece_tokens / KVG_TILE_TOKENS);
}

static bool is_in_class(const struct class_of *class, const struct kv_decode_op *op)
{
	const struct kvg_image *image = class->flight->batch->pool->image;

	return image->tile_bits[op->layer] == class->tile_bits;
}

static bool is_refused(const struct class_of *class, const struct kv_decode_op *op)
{
	return class->flight->batch->results[op->result_idx].status != KV_OK;
}

/*
 * Idle units where lengths differ: what is shared out is then time, not tokens. Equal rows need none, and few
 * long ones would be shared out worse.
 */
static void choose_idle_units(struct class_of *class)
{
	const struct kv_batch *batch = class->flight->batch;
	uint32_t first = 0;

	class->idle_units = 0;
	for (uint32_t i = 0; i < batch->n_decodes; i++) {
		const struct kv_decode_op *op = &batch->decodes[i];

		for (uint32_t row = 0; is_in_class(class, op) && row < op->q_len; row++) {
			const struct kv_attention_range tokens = tokens_of(class, op, row);
			const uint32_t n_work = work_of(class, &tokens);

			if (first != 0 && n_work != 0 && n_work != first)
				class->idle_units = class->plan.idle_units;
			first = n_work != 0 ? n_work : first;
		}
	}
}

/* Pieces of the rows layout: the class's tokens over what the device takes side by side. */
static void choose_piece(struct class_of *class)
{
	const struct kv_batch *batch = class->flight->batch;
	uint64_t n_tokens = 0;

	for (uint32_t i = 0; i < batch->n_decodes; i++) {
		const struct kv_decode_op *op = &batch->decodes[i];

		for (uint32_t row = 0; is_in_class(class, op) && row < op->q_len; row++) {
			const struct kv_attention_range tokens = tokens_of(class, op, row);

			n_tokens += tokens.first_hi + tokens.hi - tokens.lo;
		}
	}

	const uint64_t wanted = n_tokens * class->n_virtual / ((uint64_t) class->cuda->n_sms * BLOCKS_PER_SM);

	class->piece_tokens = wanted > PIECE_TOKENS_MIN ? (uint32_t)kv_round_up_u64(wanted, KVG_TILE_TOKENS)
							: PIECE_TOKENS_MIN;
}

/* ---- waves ---- */

static void place_workspace(struct cuda_backend *cuda, struct kvg_decode_params *wave)
{
	uint8_t *at = cuda->workspace;

	wave->q_prepared = (float *)(void *)at;
	at += KVG_QUERIES_BYTES;
	wave->partials = (float *)(void *)at;
	at += KVG_PARTIALS_BYTES;
	wave->partials_ml = (float *)(void *)at;
	at += KVG_SUMS_BYTES;
	wave->q_scales = (float *)(void *)at;
	at += KVG_SCALES_BYTES;
	wave->q_offsets = (float *)(void *)at;
}

/*
 * The grid of the tiles kernel: a little smaller where its borders then fall on those of equal rows. Little
 * work is not spread over more blocks than multiprocessors: every block more is a partial result more.
 */
static uint32_t choose_blocks(const struct class_of *class, uint32_t n_items, uint32_t n_work)
{
	const uint32_t n_sms = class->cuda->n_sms, n_slots = n_sms * class->plan.blocks_per_sm;
	const uint32_t n_most = n_work < n_slots * UNITS_PER_BLOCK_MIN ? n_sms : n_slots;

	if (n_work <= n_most)
		return n_work;
	for (uint32_t n = n_most; class->first_units != KVG_NONE && n >= n_most - n_most / 16; n--) {
		if (n_items % n == 0 || n % n_items == 0)
			return n;
	}
	return n_most;
}

static void close_wave(struct class_of *class)
{
	struct kvg_decode_params *wave = class->wave;

	if (!wave)
		return;
	if (class->tile_bits != 0)
		wave->n_blocks = choose_blocks(class, wave->n_rows * class->n_virtual, wave->n_work);
	class->wave = NULL;
}

static bool open_wave(struct class_of *class)
{
	struct kvg_flight *flight = class->flight;
	const struct kvg_image *image = flight->batch->pool->image;

	if (flight->n_waves == KVG_WAVES_MAX)
		return false;
	class->rows = kvg_stage(flight, 0);
	class->wave = &flight->waves[flight->n_waves++];
	*class->wave = (struct kvg_decode_params){
		.tables = image->tables,
		.ops = class->ops,
		.rows = kvg_staged_address(flight, class->rows),
		.flags = (uint64_t *)kvg_staged_address(flight, flight->flags),
		.n_heads = class->n_heads,
		.n_chunks = class->n_chunks,
		.tile_bits = class->tile_bits,
		.tile_table = image->tile_tables[class->tile_bits],
		.tile_scale = image->tile_scales[class->tile_bits],
		.unit_tokens = class->unit_tokens,
		.is_dependent = 1,
		.idle_units = class->idle_units,
	};
	class->first_units = 0;
	place_workspace(class->cuda, class->wave);
	return true;
}

/* Does the wave still hold with these sizes? */
static bool fits(const struct class_of *class, const struct kvg_decode_params *wave)
{
	const uint64_t n_items = (uint64_t)wave->n_rows * class->n_virtual;
	const uint64_t n_slots = class->tile_bits != 0
		? 2 * class->cuda->n_sms * class->plan.blocks_per_sm + n_items
		: wave->n_work;
	const uint64_t n_partials = n_slots * class->n_heads;
	const uint64_t q_bytes = class->tile_bits != 0
		? n_items * class->plan.fragment_words * sizeof(float)
		: (uint64_t)wave->n_rows * wave->tables.q_heads * wave->k_dim_max * sizeof(float);

	return q_bytes <= KVG_QUERIES_BYTES &&
		n_partials * wave->v_dim_max * sizeof(float) <= KVG_PARTIALS_BYTES &&
		n_partials * 2 * sizeof(float) <= KVG_SUMS_BYTES &&
		n_items * sizeof(float) <= KVG_SCALES_BYTES &&
		(uint64_t)wave->n_rows * wave->tables.q_heads * sizeof(float) <= KVG_OFFSETS_BYTES;
}

/* Adds the row to the open wave, or to a new one; false when it does not fit anywhere. */
static bool add_row(struct class_of *class, const struct kv_decode_op *op, uint32_t op_idx, uint32_t row)
{
	struct kvg_flight *flight = class->flight;
	const struct kv_layer_spec *layer = &flight->batch->pool->spec->layers[op->layer];

	const struct kv_attention_range tokens = tokens_of(class, op, row);

	for (uint32_t attempt = 0; attempt < 2; attempt++) {
		if (!class->wave && !open_wave(class))
			return false;

		struct kvg_decode_params grown = *class->wave;
		const uint32_t n_units = work_of(class, &tokens);
		const uint32_t n_work = n_units != 0 ? n_units + class->idle_units : 0;
		const uint64_t n_work_all = grown.n_work + (uint64_t)n_work * class->n_virtual;

		grown.n_rows++;
		grown.n_work = (uint32_t)n_work_all;
		grown.k_dim_max = max_u32(grown.k_dim_max, layer->k->prepared_dim);
		grown.v_dim_max = max_u32(grown.v_dim_max, layer->v->prepared_dim);
		grown.raw_bytes_max =
			max_u32(grown.raw_bytes_max, max_u32(layer->k->row_bytes, layer->v->row_bytes));
		if (n_work_all <= INT32_MAX && fits(class, &grown)) {
			struct kvg_decode_row *out = kvg_stage(flight, sizeof(*out));

			if (!out)
				return false;
			*out = (struct kvg_decode_row){ .op_idx = op_idx,
				.row = row,
				.token_lo = tokens.lo,
				.token_hi = tokens.hi,
				.first_hi = tokens.first_hi,
				.work_first = class->wave->n_work,
				.n_work = n_work,
				.piece_tokens = class->piece_tokens,
				.table = kvg_area_address(flight, op->table),
				.pages = flight->batch->pool->image->layers[op->layer].k };
			if (class->wave->n_rows == 0)
				class->first_units = n_work;
			else if (class->first_units != n_work)
				class->first_units = KVG_NONE;
			*class->wave = grown;
			return true;
		}
		if (class->wave->n_rows == 0)
			return false;
		close_wave(class);
	}
	return false;
}

static void translate_class(struct class_of *class)
{
	const struct kv_batch *batch = class->flight->batch;

	if (class->tile_bits != 0)
		choose_idle_units(class);
	else
		choose_piece(class);
	for (uint32_t i = 0; i < batch->n_decodes; i++) {
		const struct kv_decode_op *op = &batch->decodes[i];

		if (!is_in_class(class, op) || is_refused(class, op))
			continue;
		for (uint32_t row = 0; row < op->q_len; row++) {
			if (!add_row(class, op, i, row)) {
				kvg_refuse(class->flight, op->result_idx, KV_LIMIT, op->layer, row);
				break;
			}
		}
	}
	close_wave(class);
}

/* ---- ops ---- */

/* Queries and outputs can be in the rows' basis only where there is one. */
static bool has_bases(const struct kv_pool_spec *spec, const struct kv_decode_op *op)
{
	const struct kv_layer_spec *layer = &spec->layers[op->layer];

	return (!(op->flags & KV_DECODE_Q_ROTATED) || kv_row_codec_has_one_basis(layer->k)) &&
		(!(op->flags & KV_DECODE_OUT_ROTATED) || kv_row_codec_has_one_basis(layer->v));
}

static struct kvg_decode_op make_op(const struct kvg_flight *flight, const struct kv_decode_op *op)
{
	return (struct kvg_decode_op){
		.q = op->q,
		.out = op->out,
		.lse = op->lse,
		.table = kvg_area_address(flight, op->table),
		.scale = op->scale,
		.result_idx = op->result_idx,
		.layer = op->layer,
		.q_dtype = op->q_dtype,
		.out_dtype = op->out_dtype,
		.flags = (uint8_t)((op->flags & KV_DECODE_Q_ROTATED ? KVG_Q_ROTATED : 0) |
			(op->flags & KV_DECODE_OUT_ROTATED ? KVG_OUT_ROTATED : 0) |
			(op->flags & KV_DECODE_NO_SINKS ? KVG_NO_SINKS : 0)),
	};
}

void kvg_translate_decodes(struct cuda_backend *cuda, struct kvg_flight *flight)
{
	const struct kv_batch *batch = flight->batch;
	const struct kv_pool_spec *spec = batch->pool->spec;
	struct kvg_decode_op *ops = kvg_stage(flight, batch->n_decodes * sizeof(*ops));
	const uint32_t group = spec->q_heads / spec->kv_heads;

	if (batch->n_decodes == 0)
		return;
	for (uint32_t i = 0; i < batch->n_decodes; i++) {
		const struct kv_decode_op *op = &batch->decodes[i];

		if (!ops)
			kvg_refuse(flight, op->result_idx, KV_LIMIT, op->layer, 0);
		else if (!has_bases(spec, op))
			kvg_refuse(flight, op->result_idx, KV_UNSUPPORTED, op->layer, 0);
		else
			ops[i] = make_op(flight, op);
	}
	if (!ops)
		return;
	for (uint32_t bits = 0; bits <= KVG_TILE_BITS_MAX; bits++) {
		struct class_of class = { .cuda = cuda,
			.flight = flight,
			.ops = kvg_staged_address(flight, ops),
			.tile_bits = bits,
			.n_heads = group < KVG_HEADS_MAX ? group : KVG_HEADS_MAX,
			.n_chunks = kv_div_up_u32(group, KVG_HEADS_MAX) };

		class.n_virtual = spec->kv_heads * class.n_chunks;
		class.plan = kvg_decode_tiles_plan(spec->k_head_dim, bits, class.n_heads);
		class.unit_tokens = bits != 0 ? class.plan.unit_tokens : KVG_TILE_TOKENS;
		if (batch->pool->image->has_bits[bits])
			translate_class(&class);
	}
}
