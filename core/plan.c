/*
 * Area: op arrays and results first, each KV_PLAN_ITEMS_MAX long, then slots and tables in the order in which
 * items are added. Every part begins at a multiple of KV_PLAN_ALIGN, so that a device can read it in whole
 * words.
 *
 * Which blocks a plan holds in flight is not stored: it follows from its copies, the slots of its updates and
 * transfers and the tables of its decodes, which nobody changes before kv_plan_end().
 */
#include "core/plan.h"

#include <string.h>

#include "core/attention.h"
#include "core/checked.h"
#include "core/domain_internal.h"
#include "core/format.h"
#include "core/plan_internal.h"

/* ---- the area ---- */

uint64_t kv_plan_part_bytes(uint64_t n, uint64_t size)
{
	return kv_round_up_u64(n * size, KV_PLAN_ALIGN);
}

static uint64_t ops_bytes(void)
{
	return kv_plan_part_bytes(KV_PLAN_ITEMS_MAX, sizeof(struct kv_update_op)) +
		kv_plan_part_bytes(KV_PLAN_ITEMS_MAX, sizeof(struct kv_decode_op)) +
		kv_plan_part_bytes(KV_PLAN_ITEMS_MAX, sizeof(struct kv_transfer_op)) +
		kv_plan_part_bytes(KV_COPIES_MAX, sizeof(struct kv_copy_op)) +
		kv_plan_part_bytes(KV_PLAN_ITEMS_MAX, sizeof(struct kv_result));
}

/* Bytes of one K or V row in the dtype that takes the fewest, over all layers. */
static uint64_t least_row_bytes(const struct kv_pool_spec *spec, bool is_v)
{
	const uint32_t head_dim = is_v ? spec->v_head_dim : spec->k_head_dim;
	uint64_t least = kv_dtype_bytes(KV_DTYPE_BF16) * head_dim;

	for (uint32_t l = 0; l < spec->n_layers; l++) {
		const struct kv_row_codec *codec = is_v ? spec->layers[l].v : spec->layers[l].k;

		if (codec->row_bytes < least)
			least = codec->row_bytes;
	}
	return least;
}

/* Entries of an exact table: the ring's first and last tokens may lie in the same block. */
static uint64_t exact_table_max(const struct kv_pool_spec *spec)
{
	return spec->exact_tokens / spec->block_size + 1;
}

uint64_t kv_plan_area_bytes(const struct kv_pool_spec *spec, uint64_t row_bytes_max)
{
	const uint64_t k_bytes = least_row_bytes(spec, false), v_bytes = least_row_bytes(spec, true);
	/* A READ may want only K or only V. */
	const uint64_t token_bytes = spec->kv_heads * (k_bytes < v_bytes ? k_bytes : v_bytes);
	uint64_t n_tokens = row_bytes_max / token_bytes;

	if (n_tokens > spec->tokens_max)
		n_tokens = spec->tokens_max;

	const uint64_t n_table = kv_div_up_u32(spec->tokens_max, spec->block_size);

	const uint64_t own_bytes = kv_plan_part_bytes(n_tokens * spec->n_groups, sizeof(int64_t)) +
		kv_plan_part_bytes(n_table, sizeof(uint32_t)) +
		kv_plan_part_bytes(n_tokens, sizeof(int64_t)) +
		kv_plan_part_bytes(exact_table_max(spec), sizeof(uint32_t));
	/* Slots and tables of a client: as many as a frame holds. */
	const uint64_t n_slots = row_bytes_max / (spec->kv_heads * (k_bytes + v_bytes));
	const uint64_t slots_bytes = kv_plan_part_bytes(n_slots * spec->n_groups, sizeof(int64_t));
	const uint64_t tables_bytes = row_bytes_max + KV_PLAN_ITEMS_MAX * (uint64_t)KV_PLAN_ALIGN;
	const uint64_t client_bytes = slots_bytes > tables_bytes ? slots_bytes : tables_bytes;

	return ops_bytes() + (own_bytes > client_bytes ? own_bytes : client_bytes);
}

/* The caller has checked that it fits. */
void *kv_plan_take_part(struct kv_plan *plan, uint64_t n, uint64_t size)
{
	void *part = plan->area + plan->batch.plan_bytes_used;

	plan->batch.plan_bytes_used += kv_plan_part_bytes(n, size);
	KV_ASSERT(plan->batch.plan_bytes_used <= plan->area_bytes);
	return part;
}

/* ---- blocks in flight ---- */

/* Bit per group that has one of the layers. */
static uint32_t groups_of(const struct kv_pool_spec *spec, uint32_t layer_first, uint32_t n_layers)
{
	uint32_t groups = 0;

	for (uint32_t l = layer_first; l < layer_first + n_layers; l++)
		groups |= 1u << spec->layers[l].group_idx;
	return groups;
}

/* Tokens lie in order, so each block is one run of slots: it is visited once per op. */
static void visit_slots(const struct kv_plan *plan, const int64_t *slots, uint32_t n_tokens,
	uint32_t layer_first, uint32_t n_layers, struct kv_plan_visitor *visitor)
{
	const struct kv_pool_spec *spec = plan->pool->spec;
	const uint32_t groups = groups_of(spec, layer_first, n_layers);

	for (uint32_t g = 0; g < spec->n_groups; g++) {
		int64_t block_last = -1;

		if (!(groups & 1u << g))
			continue;
		for (uint32_t t = 0; t < n_tokens; t++) {
			const int64_t slot = slots[(uint64_t)g * n_tokens + t];
			const int64_t block = slot < 0 ? -1 : slot / spec->block_size;
			const uint32_t idx = (uint32_t)block;

			if (block >= 0 && block != block_last)
				visitor->visit(visitor, g, &idx, 1);
			block_last = block;
		}
	}
}

/* Ring blocks. */
static void visit_exact(const struct kv_plan *plan, const int64_t *exact_slots, uint32_t n_tokens,
	struct kv_plan_visitor *visitor)
{
	const struct kv_pool_spec *spec = plan->pool->spec;
	int64_t block_last = -1;

	for (uint32_t t = 0; exact_slots && t < n_tokens; t++) {
		const int64_t block = exact_slots[t] < 0 ? -1 : exact_slots[t] / spec->block_size;
		const uint32_t idx = (uint32_t)block;

		if (block >= 0 && block != block_last)
			visitor->visit(visitor, spec->n_groups, &idx, 1);
		block_last = block;
	}
}

static void visit_update(
	const struct kv_plan *plan, const struct kv_update_op *op, struct kv_plan_visitor *visitor)
{
	visit_slots(plan, op->slots, op->n_tokens, op->layer_first, op->n_layers, visitor);
	visit_exact(plan, op->exact_slots, op->n_tokens, visitor);
}

static void visit_transfer(
	const struct kv_plan *plan, const struct kv_transfer_op *op, struct kv_plan_visitor *visitor)
{
	visit_slots(plan, op->slots, op->n_tokens, op->layer_first, op->n_layers, visitor);
	visit_exact(plan, op->exact_slots, op->n_tokens, visitor);
}

static void visit_decode(
	const struct kv_plan *plan, const struct kv_decode_op *op, struct kv_plan_visitor *visitor)
{
	const struct kv_pool_spec *spec = plan->pool->spec;
	const uint32_t n_table = kv_div_up_u32(op->n_tokens_seen, spec->block_size);

	visitor->visit(visitor, spec->layers[op->layer].group_idx, op->table, n_table);
	if (op->exact_table)
		visitor->visit(
			visitor, spec->n_groups, op->exact_table, n_table - op->exact_lo / spec->block_size);
}

void kv_plan_visit_blocks(const struct kv_plan *plan, struct kv_plan_visitor *visitor)
{
	for (uint32_t i = 0; i < plan->batch.n_copies; i++) {
		const struct kv_copy_op *op = &plan->batch.copies[i];

		visitor->visit(visitor, op->group_idx, &op->block_from, 1);
		visitor->visit(visitor, op->group_idx, &op->block_to, 1);
	}
	for (uint32_t i = 0; i < plan->batch.n_updates; i++)
		visit_update(plan, &plan->batch.updates[i], visitor);
	for (uint32_t i = 0; i < plan->batch.n_decodes; i++)
		visit_decode(plan, &plan->batch.decodes[i], visitor);
	for (uint32_t i = 0; i < plan->batch.n_transfers; i++)
		visit_transfer(plan, &plan->batch.transfers[i], visitor);
}

struct flight_visitor {
	struct kv_plan_visitor base;
	struct kv_pool *pool;
};

static void flights_begin(
	struct kv_plan_visitor *visitor, uint32_t group_idx, const uint32_t blocks[], uint32_t n)
{
	struct kv_pool *pool = kv_container_of(visitor, struct flight_visitor, base)->pool;

	kv_block_pool_flights_begin(&pool->blocks[group_idx], blocks, n);
}

static void flights_end(
	struct kv_plan_visitor *visitor, uint32_t group_idx, const uint32_t blocks[], uint32_t n)
{
	struct kv_pool *pool = kv_container_of(visitor, struct flight_visitor, base)->pool;

	kv_block_pool_flights_end(&pool->blocks[group_idx], blocks, n);
}

void kv_plan_begin_flight(struct kv_plan *plan, const struct kv_transfer_op *op)
{
	struct flight_visitor begin = { { flights_begin }, plan->pool };

	visit_transfer(plan, op, &begin.base);
}

void kv_plan_hold(struct kv_plan *plan)
{
	struct flight_visitor begin = { { flights_begin }, plan->pool };

	for (; plan->n_decodes_held < plan->batch.n_decodes; plan->n_decodes_held++)
		visit_decode(plan, &plan->batch.decodes[plan->n_decodes_held], &begin.base);
}

void kv_plan_end(struct kv_plan *plan)
{
	struct flight_visitor end = { { flights_end }, plan->pool };

	KV_ASSERT(plan->n_decodes_held == plan->batch.n_decodes);
	kv_plan_visit_blocks(plan, &end.base);
	plan->batch.n_updates = plan->batch.n_decodes = plan->batch.n_transfers = 0;
	plan->batch.n_copies = plan->batch.n_results = 0;
	plan->batch.plan_bytes_used = ops_bytes();
	plan->row_bytes = 0;
	plan->n_items = plan->n_moves = plan->n_decodes_held = 0;
}

/*
 * What the pool's sequences wait for. Until now every copy owned its source, so that nobody could write into
 * it; from now on batches come after this one, and being in flight is enough. Its destination was in flight
 * already, so that nobody else could get it.
 */
static void take_copies(struct kv_plan *plan)
{
	struct kv_pool *pool = plan->pool;

	for (uint32_t i = 0; i < pool->n_copies; i++) {
		const struct kv_copy_op *op = &pool->copies[i];
		struct kv_block_pool *blocks = &pool->blocks[op->group_idx];

		if (blocks->owners[op->block_to] > 0) {
			kv_block_pool_flight_begin(blocks, (kv_block_id){ op->block_from });
			plan->copies[plan->batch.n_copies++] = *op;
		} else {
			/* Its sequence is gone: nobody will read it. */
			kv_block_pool_flight_end(blocks, (kv_block_id){ op->block_to });
		}
		kv_block_pool_disown(blocks, (kv_block_id){ op->block_from });
		pool->domain->n_cut += blocks->owners[op->block_from] == 0;
	}
	pool->n_copies = 0;
}

void kv_plan_begin(struct kv_plan *plan, struct kv_pool *pool, uint8_t *area, uint64_t area_bytes)
{
	KV_ASSERT(area_bytes >= ops_bytes());
	KV_ASSERT((uintptr_t)area % KV_PLAN_ALIGN == 0);
	*plan = (struct kv_plan){ .pool = pool, .area = area, .area_bytes = area_bytes };
	plan->batch.pool = pool->backend_pool;
	plan->batch.plan = area;
	plan->batch.updates = kv_plan_take_part(plan, KV_PLAN_ITEMS_MAX, sizeof(struct kv_update_op));
	plan->batch.decodes = kv_plan_take_part(plan, KV_PLAN_ITEMS_MAX, sizeof(struct kv_decode_op));
	plan->batch.transfers = kv_plan_take_part(plan, KV_PLAN_ITEMS_MAX, sizeof(struct kv_transfer_op));
	plan->copies = kv_plan_take_part(plan, KV_COPIES_MAX, sizeof(struct kv_copy_op));
	plan->batch.copies = plan->copies;
	plan->batch.results = kv_plan_take_part(plan, KV_PLAN_ITEMS_MAX, sizeof(struct kv_result));
	plan->serial = ++pool->plan_serial;
	take_copies(plan);
}

/* ---- adding an item ---- */

uint32_t kv_plan_take_result(struct kv_plan *plan)
{
	plan->batch.results[plan->batch.n_results] = (struct kv_result){
		.status = KV_OK,
		.layer = KV_LAYER_NONE,
		.row = KV_ROW_NONE,
	};
	return plan->batch.n_results++;
}

static uint64_t row_bytes(uint8_t dtype, const struct kv_row_codec *codec)
{
	if (dtype == KV_DTYPE_PACKED)
		return codec->row_bytes;
	return (uint64_t)kv_dtype_bytes((enum kv_dtype)dtype) * codec->head_dim;
}

/*
 * Slots of tokens [item->position, + n_tokens) in every group that the frame's layers touch. The others get
 * `unused`: nobody reads them, and their tables may not reach so far.
 */
static int64_t *add_slots(
	struct kv_plan *plan, const struct kv_frame_rows *frame, const struct kv_item *item, int64_t unused)
{
	const struct kv_pool *pool = plan->pool;
	const uint32_t block_size = pool->spec->block_size;
	const uint32_t groups = groups_of(pool->spec, frame->layer_first, frame->n_layers);
	int64_t *slots =
		kv_plan_take_part(plan, (uint64_t)item->n_tokens * pool->spec->n_groups, sizeof(slots[0]));

	for (uint32_t g = 0; g < pool->spec->n_groups; g++) {
		int64_t *group_slots = slots + (uint64_t)g * item->n_tokens;
		uint32_t entries[KV_CHUNK_ENTRIES];
		uint32_t entry_first = 0, entry_end = 0; /* table entries in entries[] */

		for (uint32_t t = 0; t < item->n_tokens; t++) {
			const uint32_t position = item->position + t, entry = position / block_size;

			if (!(groups & 1u << g)) {
				group_slots[t] = unused;
				continue;
			}
			if (entry >= entry_end) {
				const uint32_t n_left =
					(item->position + item->n_tokens - 1) / block_size - entry + 1;
				const uint32_t n = n_left < KV_CHUNK_ENTRIES ? n_left : KV_CHUNK_ENTRIES;

				kv_block_table_copy(
					&item->sequence->tables[g], &pool->tables, entry, n, entries);
				entry_first = entry;
				entry_end = entry + n;
			}
			group_slots[t] =
				(int64_t)entries[entry - entry_first] * block_size + position % block_size;
		}
	}
	return slots;
}

/* The item's rows in the frame's tensor; no base when they are not wanted. */
static struct kv_rows rows_of(uint8_t *tensor, uint8_t dtype, const struct kv_row_codec *codec,
	const struct kv_plan *plan, const struct kv_frame_rows *frame, const struct kv_item *item)
{
	const uint64_t offset =
		(uint64_t)item->token_first * plan->pool->spec->kv_heads * row_bytes(dtype, codec);

	return (struct kv_rows){
		.base = tensor && dtype != KV_DTYPE_NONE ? tensor + offset : NULL,
		.tokens_stride = frame->n_tokens_total,
		.token_first = item->token_first,
		.dtype = dtype,
	};
}

static void add_update(struct kv_plan *plan, const struct kv_frame_rows *frame, const struct kv_item *item,
	uint32_t result_idx)
{
	const struct kv_layer_spec *layer = &plan->pool->spec->layers[frame->layer_first];
	struct kv_update_op *op = &plan->batch.updates[plan->batch.n_updates++];

	*op = (struct kv_update_op){
		.result_idx = result_idx,
		.layer_first = frame->layer_first,
		.n_layers = frame->n_layers,
		.n_tokens = item->n_tokens,
		.slots = add_slots(plan, frame, item, -1),
		.exact_slots = kv_plan_add_exact_slots(plan, item),
		.k = rows_of(frame->k, frame->k_dtype, layer->k, plan, frame, item),
		.v = rows_of(frame->v, frame->v_dtype, layer->v, plan, frame, item),
	};
}

static void add_transfer(struct kv_plan *plan, const struct kv_frame_rows *frame, const struct kv_item *item,
	uint32_t result_idx)
{
	const struct kv_layer_spec *layer = &plan->pool->spec->layers[frame->layer_first];
	struct kv_transfer_op *op = &plan->batch.transfers[plan->batch.n_transfers++];

	*op = (struct kv_transfer_op){
		.result_idx = result_idx,
		.layer_first = frame->layer_first,
		.n_layers = frame->n_layers,
		.n_tokens = item->n_tokens,
		.slots = add_slots(plan, frame, item, 0),
		.exact_slots = kv_plan_add_exact_slots(plan, item),
		.k = rows_of(frame->k, frame->k_dtype, layer->k, plan, frame, item),
		.v = rows_of(frame->v, frame->v_dtype, layer->v, plan, frame, item),
	};
}

/* 0 means none; a request may only narrow what the layer has. */
static uint32_t narrower_window(uint32_t a, uint32_t b)
{
	if (a == 0 || b == 0)
		return a + b;
	return a < b ? a : b;
}

/*
 * Block table of a decode: entries of tokens that some row sees, KV_BLOCK_NONE elsewhere. The first row sees
 * the earliest tokens.
 */
static const uint32_t *add_table(
	struct kv_plan *plan, const struct kv_item *item, const struct kv_layer_spec *layer, uint32_t window)
{
	const struct kv_pool *pool = plan->pool;
	const uint32_t block_size = pool->spec->block_size;
	const uint32_t n_table = kv_div_up_u32(item->seen, block_size);
	const struct kv_attention_range range =
		kv_attention_range(item->seen, item->q_len, 0, window, layer->sink_tokens);
	const uint32_t first = range.lo / block_size, n_sinks = kv_div_up_u32(range.first_hi, block_size);
	const struct kv_block_table *from = &item->sequence->tables[layer->group_idx];
	uint32_t *table = kv_plan_take_part(plan, n_table, sizeof(table[0]));

	for (uint32_t i = 0; i < first; i++)
		table[i] = KV_BLOCK_NONE;
	kv_block_table_copy(from, &pool->tables, 0, n_sinks < first ? n_sinks : first, table);
	kv_block_table_copy(from, &pool->tables, first, n_table - first, table + first);
	return table;
}

struct kv_decode_op kv_plan_decode_op(
	const struct kv_plan *plan, const struct kv_frame_rows *frame, uint32_t q_first, uint32_t q_len)
{
	const struct kv_pool_spec *spec = plan->pool->spec;
	const struct kv_layer_spec *layer = &spec->layers[frame->layer_first];
	const uint64_t q_row_bytes =
		(uint64_t)kv_dtype_bytes((enum kv_dtype)frame->q_dtype) * spec->q_heads * spec->k_head_dim;
	const uint64_t out_row_bytes =
		(uint64_t)kv_dtype_bytes((enum kv_dtype)frame->out_dtype) * spec->q_heads * spec->v_head_dim;

	return (struct kv_decode_op){
		.layer = frame->layer_first,
		.q_len = q_len,
		.window = narrower_window(layer->window, frame->window),
		.scale = frame->scale > 0 ? frame->scale : layer->scale,
		.q_dtype = frame->q_dtype,
		.out_dtype = frame->out_dtype,
		.flags = frame->decode_flags,
		.q = frame->q + q_first * q_row_bytes,
		.out = frame->out + q_first * out_row_bytes,
		.lse = frame->lse ? frame->lse + (uint64_t)q_first * spec->q_heads : NULL,
	};
}

static void add_decode(struct kv_plan *plan, const struct kv_frame_rows *frame, const struct kv_item *item,
	uint32_t result_idx)
{
	struct kv_decode_op *op = &plan->batch.decodes[plan->batch.n_decodes++];

	*op = kv_plan_decode_op(plan, frame, item->q_first, item->q_len);
	op->result_idx = result_idx;
	op->n_tokens_seen = item->seen;
	op->table = add_table(plan, item, &plan->pool->spec->layers[frame->layer_first], op->window);
	op->exact_table = kv_plan_add_exact_table(plan, item);
	op->exact_lo = item->exact_lo;
}

/* K, V and Q payload of the item. */
static uint64_t item_row_bytes(
	const struct kv_plan *plan, const struct kv_frame_rows *frame, const struct kv_item *item)
{
	const struct kv_pool_spec *spec = plan->pool->spec;
	uint64_t n_bytes = 0;

	if (item->n_tokens > 0) {
		for (uint32_t l = frame->layer_first; l < frame->layer_first + frame->n_layers; l++)
			n_bytes += (uint64_t)item->n_tokens * spec->kv_heads *
				(row_bytes(frame->k_dtype, spec->layers[l].k) +
					row_bytes(frame->v_dtype, spec->layers[l].v));
	}
	if (item->q_len > 0)
		n_bytes += (uint64_t)item->q_len * spec->q_heads * spec->k_head_dim *
			kv_dtype_bytes((enum kv_dtype)frame->q_dtype);
	return n_bytes;
}

/* Of a sequence's own tables. */
static bool add_item(struct kv_plan *plan, const struct kv_frame_rows *frame, const struct kv_item *item,
	uint32_t *result_idx)
{
	const struct kv_pool_spec *spec = plan->pool->spec;
	const bool has_slots = item->kind != KV_ITEM_DECODE;
	const bool has_table = item->kind == KV_ITEM_DECODE || item->kind == KV_ITEM_APPEND_DECODE;
	uint64_t n_bytes = 0;

	if (has_slots)
		n_bytes += kv_plan_part_bytes((uint64_t)item->n_tokens * spec->n_groups, sizeof(int64_t));
	if (has_table)
		n_bytes += kv_plan_part_bytes(kv_div_up_u32(item->seen, spec->block_size), sizeof(uint32_t));
	if (item->exact_lo < item->seen && has_slots)
		n_bytes += kv_plan_part_bytes(item->n_tokens, sizeof(int64_t));
	if (item->exact_lo < item->seen && has_table)
		n_bytes += kv_plan_part_bytes(exact_table_max(spec), sizeof(uint32_t));
	if (n_bytes > plan->area_bytes - plan->batch.plan_bytes_used ||
		plan->batch.n_results == KV_PLAN_ITEMS_MAX || kv_plan_overwrites_exact(plan, item) ||
		(item->kind == KV_ITEM_READ && plan->batch.n_transfers == KV_PLAN_ITEMS_MAX) ||
		(has_table && plan->batch.n_decodes == KV_PLAN_ITEMS_MAX))
		return false;
	kv_plan_note_exact(plan, item);
	*result_idx = kv_plan_take_result(plan);
	if (item->kind == KV_ITEM_READ)
		add_transfer(plan, frame, item, *result_idx);
	else if (has_slots)
		add_update(plan, frame, item, *result_idx);
	if (has_table)
		add_decode(plan, frame, item, *result_idx);
	return true;
}

bool kv_plan_add(struct kv_plan *plan, const struct kv_frame_rows *frame, const struct kv_item *item,
	uint32_t *result_idx)
{
	const struct kv_batch before = plan->batch;
	const bool is_clients = item->kind == KV_ITEM_UPDATE_SLOTS || item->kind == KV_ITEM_DECODE_TABLE;
	struct flight_visitor begin = { { flights_begin }, plan->pool };

	KV_ASSERT(item->sequence != NULL);
	if (!(is_clients ? kv_plan_add_tables(plan, frame, item, result_idx)
			 : add_item(plan, frame, item, result_idx)))
		return false;
	for (uint32_t i = before.n_updates; i < plan->batch.n_updates; i++)
		visit_update(plan, &plan->batch.updates[i], &begin.base);
	for (uint32_t i = before.n_transfers; i < plan->batch.n_transfers; i++)
		visit_transfer(plan, &plan->batch.transfers[i], &begin.base);
	if (!plan->holds_later)
		kv_plan_hold(plan);
	plan->row_bytes += item_row_bytes(plan, frame, item);
	plan->n_items++;
	return true;
}
