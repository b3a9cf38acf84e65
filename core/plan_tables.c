/*
 * Sessions whose client manages block tables itself (PROTOCOL rule 12, FORMATS 6).
 *
 * Such a session owns a fixed number of blocks in every group, from OPEN to its end. They are the table of a
 * sequence with id 0, which no request can name, so blocks in flight and closing work as everywhere else. The
 * client's block b is entry b of that table in every group: what it sends is a number below its own count,
 * and cannot reach anybody else's pages. Slots and tables are checked as a whole before the item is planned;
 * entries are never wrapped.
 *
 * A table is a list of chunks, so it is copied to an array of the pool before entries are looked up in any
 * order; the array stays valid while the same session is looked up, because its table never changes.
 */
#include <string.h>

#include "core/domain_internal.h"
#include "core/plan_internal.h"

static uint32_t get_u32(const uint8_t *in)
{
	return (uint32_t)in[0] | (uint32_t)in[1] << 8 | (uint32_t)in[2] << 16 | (uint32_t)in[3] << 24;
}

static int64_t get_i64(const uint8_t *in)
{
	return (int64_t)((uint64_t)get_u32(in) | (uint64_t)get_u32(in + 4) << 32);
}

/* ---- planning ---- */

static enum kv_status refuse_row(struct kv_item *item, enum kv_status status, uint64_t row)
{
	item->row = (uint32_t)row;
	return status;
}

/* Negative slots are skipped; one beyond the session's blocks refuses everything and is named. */
static enum kv_status check_slots(
	const struct kv_sequence *sequence, struct kv_item *item, const struct kv_frame_rows *frame)
{
	const int64_t n_slots =
		(int64_t)sequence->tables[0].n_blocks * (int64_t)sequence->pool->spec->block_size;

	for (uint32_t t = 0; t < item->n_tokens; t++) {
		if (get_i64(frame->slots + 8 * (size_t)t) >= n_slots)
			return refuse_row(item, KV_SLOT_OUT_OF_RANGE, t);
	}
	return KV_OK;
}

/* Every entry up to the length seen lies within the session's blocks. */
static enum kv_status check_table(
	const struct kv_sequence *sequence, struct kv_item *item, const struct kv_frame_rows *frame)
{
	const uint32_t n_own = sequence->tables[0].n_blocks, block_size = sequence->pool->spec->block_size;
	const uint32_t q_len = item->q_len / frame->n_sequences;

	for (uint32_t s = 0; s < frame->n_sequences; s++) {
		const uint32_t seen = get_u32(frame->seen + 4 * (size_t)s);
		const uint64_t first = (uint64_t)s * frame->table_stride;

		if (seen > sequence->session->tokens_max)
			return refuse_row(item, KV_LEN_LIMIT, s);
		if (kv_div_up_u32(seen, block_size) > frame->table_stride || (q_len > seen && q_len > 1))
			return refuse_row(item, KV_BAD_ARG, s);
		for (uint32_t i = 0; i < kv_div_up_u32(seen, block_size); i++) {
			if (get_u32(frame->table + 4 * (first + i)) >= n_own)
				return refuse_row(item, KV_SLOT_OUT_OF_RANGE, first + i);
		}
	}
	return KV_OK;
}

void kv_item_plan_tables(
	struct kv_session *session, struct kv_item *item, const struct kv_frame_rows *frame, uint64_t now_ns)
{
	struct kv_sequence *sequence = session->has_tables ? kv_sequence_find(session, 0) : NULL;
	enum kv_status status = KV_BAD_STATE;

	KV_ASSERT(session->state == KV_SESSION_OPEN);
	item->sequence = NULL;
	item->epoch = item->seen = item->length = item->retry_after_ms = 0;
	item->exact_lo = UINT32_MAX;
	item->layer = KV_LAYER_NONE;
	item->row = KV_ROW_NONE;
	if (sequence)
		status = item->kind == KV_ITEM_UPDATE_SLOTS ? check_slots(sequence, item, frame)
							    : check_table(sequence, item, frame);
	item->status = (uint16_t)status;
	if (status != KV_OK)
		return;
	sequence->used_ns = now_ns;
	sequence->n_items++;
	item->sequence = sequence;
	item->epoch = sequence->epoch;
}

/* ---- adding to a plan ---- */

/* The session's blocks of the group, by the client's number. */
static const uint32_t *blocks_of(struct kv_pool *pool, const struct kv_sequence *sequence, uint32_t g)
{
	const struct kv_block_table *table = &sequence->tables[g];

	/* Handles are never used twice. */
	if (pool->mapped[g] != sequence->session->handle) {
		kv_block_table_copy(table, &pool->tables, 0, table->n_blocks, pool->maps[g]);
		pool->mapped[g] = sequence->session->handle;
	}
	return pool->maps[g];
}

static void add_update(struct kv_plan *plan, const struct kv_frame_rows *frame, const struct kv_item *item,
	uint32_t result_idx)
{
	struct kv_pool *pool = plan->pool;
	const struct kv_pool_spec *spec = pool->spec;
	const uint32_t n = item->n_tokens;
	int64_t *slots = kv_plan_take_part(plan, (uint64_t)n * spec->n_groups, sizeof(slots[0]));

	for (uint32_t g = 0; g < spec->n_groups; g++) {
		const uint32_t *blocks = blocks_of(pool, item->sequence, g);

		for (uint32_t t = 0; t < n; t++) {
			const int64_t slot = get_i64(frame->slots + 8 * (size_t)t);

			slots[(uint64_t)g * n + t] = slot < 0
				? -1
				: (int64_t)blocks[slot / spec->block_size] * spec->block_size +
					slot % spec->block_size;
		}
	}
	plan->batch.updates[plan->batch.n_updates++] = (struct kv_update_op){
		.result_idx = result_idx,
		.layer_first = frame->layer_first,
		.n_layers = frame->n_layers,
		.n_tokens = n,
		.slots = slots,
		.k = { .base = frame->k, .tokens_stride = n, .dtype = frame->k_dtype },
		.v = { .base = frame->v, .tokens_stride = n, .dtype = frame->v_dtype },
	};
}

static void add_decodes(struct kv_plan *plan, const struct kv_frame_rows *frame, const struct kv_item *item,
	uint32_t result_idx)
{
	struct kv_pool *pool = plan->pool;
	const struct kv_pool_spec *spec = pool->spec;
	const struct kv_layer_spec *layer = &spec->layers[frame->layer_first];
	const uint32_t *blocks = blocks_of(pool, item->sequence, layer->group_idx);
	const uint32_t q_len = item->q_len / frame->n_sequences;

	for (uint32_t s = 0; s < frame->n_sequences; s++) {
		const uint32_t seen = get_u32(frame->seen + 4 * (size_t)s);
		const uint32_t n = kv_div_up_u32(seen, spec->block_size);
		uint32_t *table = kv_plan_take_part(plan, n, sizeof(table[0]));
		struct kv_decode_op *op = &plan->batch.decodes[plan->batch.n_decodes++];

		for (uint32_t i = 0; i < n; i++)
			table[i] = blocks[get_u32(frame->table + 4 * ((size_t)s * frame->table_stride + i))];
		*op = kv_plan_decode_op(plan, frame, s * q_len, q_len);
		op->result_idx = result_idx;
		op->n_tokens_seen = seen;
		op->table = table;
	}
}

static uint64_t bytes_of(
	const struct kv_plan *plan, const struct kv_frame_rows *frame, const struct kv_item *item)
{
	const struct kv_pool_spec *spec = plan->pool->spec;
	uint64_t n_bytes = 0;

	if (item->kind == KV_ITEM_UPDATE_SLOTS)
		return kv_plan_part_bytes((uint64_t)item->n_tokens * spec->n_groups, sizeof(int64_t));
	for (uint32_t s = 0; s < frame->n_sequences; s++)
		n_bytes += kv_plan_part_bytes(
			kv_div_up_u32(get_u32(frame->seen + 4 * (size_t)s), spec->block_size),
			sizeof(uint32_t));
	return n_bytes;
}

bool kv_plan_add_tables(struct kv_plan *plan, const struct kv_frame_rows *frame, const struct kv_item *item,
	uint32_t *result_idx)
{
	const bool is_update = item->kind == KV_ITEM_UPDATE_SLOTS;

	if (bytes_of(plan, frame, item) > plan->area_bytes - plan->batch.plan_bytes_used ||
		plan->batch.n_results == KV_PLAN_ITEMS_MAX ||
		(!is_update && frame->n_sequences > KV_PLAN_ITEMS_MAX - plan->batch.n_decodes))
		return false;
	/* The updates of a batch may run at the same time, and come before its decodes. */
	if (is_update && item->sequence->plan_serial == plan->serial)
		return false;
	item->sequence->plan_serial = plan->serial;
	*result_idx = kv_plan_take_result(plan);
	if (is_update)
		add_update(plan, frame, item, *result_idx);
	else
		add_decodes(plan, frame, item, *result_idx);
	return true;
}
