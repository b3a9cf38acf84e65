/*
 * Decodes become waves: query rows of one class of layers (tiles of the same widths, or rows of any format),
 * as many as the workspace holds. How a row is split depends on the rest of its class in the batch, so that
 * few rows fill the device too; the same batch is always split alike.
 *
 * In a pool with an exact window a row has two parts: the tokens in pages, and those in ring blocks, which a
 * launch of their own takes, in pieces of the rows layout, whatever the class. Half of the workspace is
 * theirs.
 */
#include <string.h>

#include "core/attention.h"
#include "core/checked.h"
#include "core/format.h"
#include "gpu/backend_internal.h"

#define PIECE_TOKENS_MIN 64u /* rows layout: below this a piece is mostly start-up */
#define BLOCKS_PER_SM    8u  /* rows layout: pieces wanted for each multiprocessor */
/* Tiles: what a (row, virtual head) costs beside its units, where lengths differ. A unit of any kernel is
 * about as long. */
#define IDLE_UNITS 6u
/* Ring blocks: nothing hides what they take, so few tokens are spread as far as they go. */
#define EXACT_PIECE_TOKENS_MIN KVG_TILE_TOKENS

struct class_of {
	struct cuda_backend *cuda;
	struct kvg_flight *flight;
	const struct kvg_decode_op *ops;       /* device */
	struct kvg_tile_bits bits;             /* 0 and 0: rows layout */
	uint32_t n_heads, n_chunks, n_virtual; /* as in kvg_decode_params */
	struct kvg_tiles_plan plan;            /* tiles */
	uint32_t unit_tokens, piece_tokens;
	uint32_t idle_units; /* of every (row, virtual head) with tokens */
	bool has_exact;
	uint32_t exact_piece_tokens;
	struct kvg_decode_row *exact_rows; /* one for every row of the class that is in a wave */
	uint32_t n_exact_rows;
	/* The open wave: */
	struct kvg_decode_params *wave;
	struct kvg_decode_row *rows;
	uint32_t first_units; /* of its first row; KVG_NONE once rows differ */
};

static uint32_t max_u32(uint32_t a, uint32_t b)
{
	return a > b ? a : b;
}

/* Tokens [first_lo, first_hi) and [lo, hi) of one kind of memory; nothing when hi <= lo. */
struct span {
	uint32_t first_lo, first_hi, lo, hi;
};

/* What one query row sees. */
struct row_tokens {
	struct span pages,
		exact; /* the latter counted from the first token of the exact table's first block */
	uint32_t position, farthest, exact_base;
};

static uint32_t min_u32(uint32_t a, uint32_t b)
{
	return a < b ? a : b;
}

static struct span make_span(uint32_t first_lo, uint32_t first_hi, uint32_t lo, uint32_t hi)
{
	const bool has_first = first_lo < first_hi;

	/* A range alone is the second one. */
	if (lo >= hi)
		return has_first ? (struct span){ .lo = first_lo, .hi = first_hi } : (struct span){ 0 };
	return has_first ? (struct span){ first_lo, first_hi, lo, hi } : (struct span){ .lo = lo, .hi = hi };
}

static struct row_tokens tokens_of(const struct class_of *class, const struct kv_decode_op *op, uint32_t row)
{
	const struct kv_pool_spec *spec = class->flight->batch->pool->spec;
	const struct kv_attention_range all = kv_attention_range(
		op->n_tokens_seen, op->q_len, row, op->window, spec->layers[op->layer].sink_tokens);
	const uint32_t exact_lo = op->exact_table ? op->exact_lo : UINT32_MAX;
	const uint32_t base = op->exact_table ? exact_lo / spec->block_size * spec->block_size : 0;
	struct row_tokens out = { .position = all.hi - 1,
		.farthest = all.hi - 1 - (all.first_hi > 0 ? 0 : all.lo),
		.exact_base = base };

	out.pages = make_span(0, min_u32(all.first_hi, exact_lo), all.lo, min_u32(all.hi, exact_lo));
	if (op->exact_table && all.hi > exact_lo)
		out.exact = make_span(exact_lo - base, max_u32(all.first_hi, exact_lo) - base,
			max_u32(all.lo, exact_lo) - base, all.hi - base);
	return out;
}

static uint32_t n_tokens_of(const struct span *span)
{
	return span->first_hi - span->first_lo + span->hi - span->lo;
}

/* Units or tiles of `step` tokens: those of the first tokens, and those from that of span->lo on. */
static uint32_t steps_of(const struct span *span, uint32_t step)
{
	return kv_div_up_u32(span->first_hi, step) - span->first_lo / step + kv_div_up_u32(span->hi, step) -
		span->lo / step;
}

static uint32_t pieces_of(const struct span *span, uint32_t piece_tokens)
{
	return kv_div_up_u32(steps_of(span, KVG_TILE_TOKENS), piece_tokens / KVG_TILE_TOKENS);
}

/* Units, or pieces of tiles. */
static uint32_t work_of(const struct class_of *class, const struct span *span)
{
	return class->bits.k != 0 ? steps_of(span, class->unit_tokens) : pieces_of(span, class->piece_tokens);
}

static bool is_in_class(const struct class_of *class, const struct kv_decode_op *op)
{
	const struct kvg_image *image = class->flight->batch->pool->image;

	const struct kvg_tile_bits own = image->tile_bits[op->layer];

	return own.k == class->bits.k && own.v == class->bits.v;
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
			const struct row_tokens tokens = tokens_of(class, op, row);
			const uint32_t n_work = work_of(class, &tokens.pages);

			if (first != 0 && n_work != 0 && n_work != first)
				class->idle_units = IDLE_UNITS;
			first = n_work != 0 ? n_work : first;
		}
	}
}

/* The class's tokens over what the device takes side by side. */
static uint32_t piece_of(const struct class_of *class, uint64_t n_tokens, uint32_t n_least)
{
	const uint64_t wanted = n_tokens * class->n_virtual / ((uint64_t) class->cuda->n_sms * BLOCKS_PER_SM);

	return wanted > n_least ? (uint32_t)kv_round_up_u64(wanted, KVG_TILE_TOKENS) : n_least;
}

/* Pieces of the rows layout. */
static void choose_pieces(struct class_of *class)
{
	const struct kv_batch *batch = class->flight->batch;
	uint64_t n_tokens = 0, n_exact = 0;

	for (uint32_t i = 0; i < batch->n_decodes; i++) {
		const struct kv_decode_op *op = &batch->decodes[i];

		for (uint32_t row = 0; is_in_class(class, op) && row < op->q_len; row++) {
			const struct row_tokens tokens = tokens_of(class, op, row);

			n_tokens += n_tokens_of(&tokens.pages);
			n_exact += n_tokens_of(&tokens.exact);
		}
	}
	class->piece_tokens = piece_of(class, n_tokens, PIECE_TOKENS_MIN);
	class->exact_piece_tokens = piece_of(class, n_exact, EXACT_PIECE_TOKENS_MIN);
}

/* ---- waves ---- */

static void place_workspace(const struct class_of *class, struct kvg_decode_params *wave)
{
	uint8_t *at = class->cuda->workspace;

	if (class->has_exact) {
		wave->exact_rows = kvg_staged_address(class->flight, class->exact_rows + class->n_exact_rows);
		wave->exact_queries = (float *)(void *)(at + KVG_QUERIES_BYTES / 2);
		wave->exact_partials = (float *)(void *)(at + KVG_QUERIES_BYTES + KVG_PARTIALS_BYTES / 2);
		wave->exact_partials_ml =
			(float *)(void *)(at + KVG_QUERIES_BYTES + KVG_PARTIALS_BYTES + KVG_SUMS_BYTES / 2);
	}

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

/* The grid of the tiles kernel, a block for each multiprocessor: a little smaller where its borders then fall
 * on those of equal rows. */
static uint32_t choose_blocks(const struct class_of *class, uint32_t n_items, uint32_t n_work)
{
	const uint32_t n_most = class->cuda->n_sms;

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
	if (class->bits.k != 0)
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
		.k_bits = class->bits.k,
		.v_bits = class->bits.v,
		.k_table = image->tile_tables[class->bits.k],
		.v_table = image->tile_tables[class->bits.v],
		.k_scale = image->tile_scales[class->bits.k],
		.v_scale = image->tile_scales[class->bits.v],
		.unit_tokens = class->unit_tokens,
		.is_dependent = 1,
		.idle_units = class->idle_units,
	};
	class->first_units = 0;
	place_workspace(class, class->wave);
	return true;
}

/* The same for what is in ring blocks, which has the other half of each. */
static bool exact_fits(const struct class_of *class, const struct kvg_decode_params *wave)
{
	const struct kvg_tables *tables = &wave->tables;
	const uint64_t n_partials = (uint64_t)wave->n_exact_work * class->n_heads;
	const uint64_t q_bytes =
		(uint64_t)wave->n_rows * tables->q_heads * tables->k_head_dim * sizeof(float);

	return q_bytes <= KVG_QUERIES_BYTES / 2 &&
		n_partials * tables->v_head_dim * sizeof(float) <= KVG_PARTIALS_BYTES / 2 &&
		n_partials * 2 * sizeof(float) <= KVG_SUMS_BYTES / 2;
}

/* Does the wave still hold with these sizes? */
static bool fits(const struct class_of *class, const struct kvg_decode_params *wave)
{
	const uint64_t n_items = (uint64_t)wave->n_rows * class->n_virtual;
	const uint64_t n_slots = class->bits.k != 0 ? 2 * class->cuda->n_sms + n_items : wave->n_work;
	const uint64_t n_partials = n_slots * class->n_heads;
	const uint32_t share = class->has_exact ? 2 : 1;
	const uint64_t q_bytes = class->bits.k != 0
		? n_items * class->plan.fragment_words * sizeof(float)
		: (uint64_t)wave->n_rows * wave->tables.q_heads * wave->k_dim_max * sizeof(float);

	return (!class->has_exact || exact_fits(class, wave)) && q_bytes <= KVG_QUERIES_BYTES / share &&
		n_partials * wave->v_dim_max * sizeof(float) <= KVG_PARTIALS_BYTES / share &&
		n_partials * 2 * sizeof(float) <= KVG_SUMS_BYTES / share &&
		n_items * sizeof(float) <= KVG_SCALES_BYTES &&
		(uint64_t)wave->n_rows * wave->tables.q_heads * sizeof(float) <= KVG_OFFSETS_BYTES;
}

static struct kvg_decode_row make_row(const struct kvg_flight *flight, const struct kv_decode_op *op,
	uint32_t op_idx, uint32_t row, const struct span *span)
{
	return (struct kvg_decode_row){ .op_idx = op_idx,
		.row = row,
		.token_lo = span->lo,
		.token_hi = span->hi,
		.first_lo = span->first_lo,
		.first_hi = span->first_hi,
		.table = kvg_area_address(flight, op->table),
		.pages = flight->batch->pool->image->layers[op->layer].k };
}

/* The row of the wave, which is `grown` by it; false when there is no room to write it down. */
static bool put_row(struct class_of *class, const struct kv_decode_op *op, uint32_t op_idx, uint32_t row,
	const struct row_tokens *tokens, const struct kvg_decode_params *grown)
{
	struct kvg_flight *flight = class->flight;
	struct kvg_decode_params *wave = class->wave;
	const uint32_t n_work = (grown->n_work - wave->n_work) / class->n_virtual;
	struct kvg_decode_row *out = kvg_stage(flight, sizeof(*out));

	if (!out)
		return false;
	*out = make_row(flight, op, op_idx, row, &tokens->pages);
	out->work_first = wave->n_work;
	out->n_work = n_work;
	out->piece_tokens = class->piece_tokens;
	out->position = tokens->position;
	out->farthest = tokens->farthest;
	if (class->has_exact) {
		struct kvg_decode_row *exact = &class->exact_rows[class->n_exact_rows++];

		*exact = make_row(flight, op, op_idx, row, &tokens->exact);
		exact->work_first = wave->n_exact_work;
		exact->n_work = (grown->n_exact_work - wave->n_exact_work) / class->n_virtual;
		exact->piece_tokens = class->exact_piece_tokens;
		exact->position = tokens->position - tokens->exact_base;
		exact->farthest = tokens->farthest;
		exact->table = op->exact_table ? kvg_area_address(flight, op->exact_table) : NULL;
	}
	if (wave->n_rows == 0)
		class->first_units = n_work;
	else if (class->first_units != n_work)
		class->first_units = KVG_NONE;
	*wave = *grown;
	return true;
}

/* Adds the row to the open wave, or to a new one; false when it does not fit anywhere. */
static bool add_row(struct class_of *class, const struct kv_decode_op *op, uint32_t op_idx, uint32_t row)
{
	const struct kv_layer_spec *layer = &class->flight->batch->pool->spec->layers[op->layer];
	const struct row_tokens tokens = tokens_of(class, op, row);
	const uint32_t n_units = work_of(class, &tokens.pages);
	const uint32_t n_work = n_units != 0 ? n_units + class->idle_units : 0;
	const uint64_t n_exact_work =
		(uint64_t)pieces_of(&tokens.exact, class->exact_piece_tokens) * class->n_virtual;

	for (uint32_t attempt = 0; attempt < 2; attempt++) {
		if (!class->wave && !open_wave(class))
			return false;

		struct kvg_decode_params grown = *class->wave;
		const uint64_t n_work_all = grown.n_work + (uint64_t)n_work * class->n_virtual;

		grown.n_rows++;
		grown.n_work = (uint32_t)n_work_all;
		grown.n_exact_work = (uint32_t)(grown.n_exact_work + n_exact_work);
		grown.k_dim_max = max_u32(grown.k_dim_max, layer->k->prepared_dim);
		grown.v_dim_max = max_u32(grown.v_dim_max, layer->v->prepared_dim);
		grown.raw_bytes_max =
			max_u32(grown.raw_bytes_max, max_u32(layer->k->row_bytes, layer->v->row_bytes));
		if (n_work_all <= INT32_MAX && n_exact_work <= INT32_MAX && fits(class, &grown))
			return put_row(class, op, op_idx, row, &tokens, &grown);
		if (class->wave->n_rows == 0)
			return false;
		close_wave(class);
	}
	return false;
}

/* Room for the exact rows of the class. */
static bool begin_exact(struct class_of *class)
{
	const struct kv_batch *batch = class->flight->batch;
	uint64_t n_rows = 0;

	class->has_exact = batch->pool->spec->exact_tokens > 0;
	for (uint32_t i = 0; class->has_exact && i < batch->n_decodes; i++)
		n_rows += is_in_class(class, &batch->decodes[i]) ? batch->decodes[i].q_len : 0;
	if (n_rows == 0)
		return true;
	class->exact_rows = kvg_stage(class->flight, n_rows * sizeof(*class->exact_rows));
	return class->exact_rows != NULL;
}

static void translate_class(struct class_of *class)
{
	const struct kv_batch *batch = class->flight->batch;
	const bool has_room = begin_exact(class);

	if (class->bits.k == 0 || class->has_exact)
		choose_pieces(class);
	if (class->bits.k != 0)
		choose_idle_units(class);
	for (uint32_t i = 0; i < batch->n_decodes; i++) {
		const struct kv_decode_op *op = &batch->decodes[i];

		if (!is_in_class(class, op) || is_refused(class, op))
			continue;
		for (uint32_t row = 0; row < op->q_len; row++) {
			if (!has_room || !add_row(class, op, i, row)) {
				kvg_refuse(class->flight, op->result_idx, KV_LIMIT, op->layer, row);
				break;
			}
		}
	}
	close_wave(class);
}

/* ---- ops ---- */

static struct kvg_decode_op make_op(const struct kv_decode_op *op)
{
	return (struct kvg_decode_op){
		.q = op->q,
		.out = op->out,
		.lse = op->lse,
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
		else
			ops[i] = make_op(op);
	}
	if (!ops)
		return;
	for (uint32_t i = 0; i < KVG_TILE_WIDTHS * KVG_TILE_WIDTHS; i++) {
		const struct kvg_tile_bits bits = { (uint8_t)(i / KVG_TILE_WIDTHS),
			(uint8_t)(i % KVG_TILE_WIDTHS) };
		struct class_of class = { .cuda = cuda,
			.flight = flight,
			.ops = kvg_staged_address(flight, ops),
			.bits = bits,
			.exact_piece_tokens = EXACT_PIECE_TOKENS_MIN,
			.n_heads = group < KVG_HEADS_MAX ? group : KVG_HEADS_MAX,
			.n_chunks = kv_div_up_u32(group, KVG_HEADS_MAX) };

		class.n_virtual = spec->kv_heads * class.n_chunks;
		class.plan = kvg_decode_tiles_plan(spec->k_head_dim, bits.k, bits.v, class.n_heads);
		class.unit_tokens = bits.k != 0 ? class.plan.unit_tokens : KVG_TILE_TOKENS;
		if (batch->pool->image->has_bits[bits.k][bits.v])
			translate_class(&class);
	}
}
