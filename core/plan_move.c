/*
 * Whole blocks in and out of a pool: what snapshots and tiers add to a plan.
 *
 * A move is one transfer per run of neighbouring layers that have equally many rows, because such a run lies
 * without gaps in the block's bytes: K of all layers, then V of all layers.
 */
#include "core/checked.h"
#include "core/format.h"
#include "core/plan.h"
#include "core/plan_internal.h"

#define TRANSFERS_MAX 256u

_Static_assert(TRANSFERS_MAX < KV_PLAN_ITEMS_MAX, "reads have room, too");

uint64_t kv_plan_block_bytes(const struct kv_pool_spec *spec, uint32_t group_idx, const uint8_t n_rows[])
{
	uint64_t n_bytes = 0;
	uint32_t at = 0;

	for (uint32_t l = 0; l < spec->n_layers; l++) {
		const struct kv_layer_spec *layer = &spec->layers[l];

		if (layer->group_idx != group_idx)
			continue;
		n_bytes += (uint64_t)(n_rows ? n_rows[at] : spec->block_size) * spec->kv_heads *
			(layer->k->row_bytes + layer->v->row_bytes);
		at++;
	}
	return n_bytes;
}

static uint64_t slots_bytes(const struct kv_pool_spec *spec)
{
	return kv_round_up_u64((uint64_t)spec->block_size * spec->n_groups * sizeof(int64_t), KV_PLAN_ALIGN);
}

/* Transfers of moves in one plan: any single block, at least. */
static uint32_t transfers_max(const struct kv_pool_spec *spec)
{
	return spec->n_layers > TRANSFERS_MAX ? spec->n_layers : TRANSFERS_MAX;
}

/* Slots of one run of layers of an exact window. */
static uint64_t ring_bytes(const struct kv_pool_spec *spec)
{
	return kv_plan_part_bytes(spec->exact_tokens, sizeof(int64_t)) +
		kv_plan_part_bytes((uint64_t)spec->exact_tokens * spec->n_groups, sizeof(int64_t));
}

uint64_t kv_plan_moves_bytes(const struct kv_pool_spec *spec)
{
	return transfers_max(spec) * slots_bytes(spec) + spec->n_layers * ring_bytes(spec);
}

/* Layers [first, end) in runs of the same number of rows; returns the end of the run that begins at first. */
static uint32_t run_end(const struct kv_pool_spec *spec, uint32_t group_idx, uint32_t first,
	const uint8_t n_rows[], uint32_t at)
{
	uint32_t end = first + 1;

	while (end < spec->n_layers && spec->layers[end].group_idx == group_idx &&
		n_rows[at + end - first] == n_rows[at])
		end++;
	return end;
}

static uint32_t count_runs(const struct kv_pool_spec *spec, uint32_t group_idx, const uint8_t n_rows[])
{
	uint32_t n = 0, at = 0;

	for (uint32_t l = 0; l < spec->n_layers;) {
		if (spec->layers[l].group_idx != group_idx) {
			l++;
			continue;
		}
		const uint32_t end = run_end(spec, group_idx, l, n_rows, at);

		n += n_rows[at] > 0;
		at += end - l;
		l = end;
	}
	return n;
}

/* K or V bytes of layers [first, end) with n rows each. */
static uint64_t side_bytes(
	const struct kv_pool_spec *spec, uint32_t first, uint32_t end, uint32_t n_rows, bool is_v)
{
	uint64_t n_bytes = 0;

	for (uint32_t l = first; l < end; l++)
		n_bytes += (uint64_t)n_rows * spec->kv_heads *
			(is_v ? spec->layers[l].v->row_bytes : spec->layers[l].k->row_bytes);
	return n_bytes;
}

static uint64_t k_bytes(const struct kv_pool_spec *spec, uint32_t group_idx, const uint8_t n_rows[])
{
	uint64_t n_bytes = 0;
	uint32_t at = 0;

	for (uint32_t l = 0; l < spec->n_layers; l++) {
		if (spec->layers[l].group_idx == group_idx)
			n_bytes += side_bytes(spec, l, l + 1, n_rows[at++], false);
	}
	return n_bytes;
}

static void add_run(struct kv_plan *plan, uint32_t first, uint32_t end, uint32_t n_rows, uint32_t block_idx,
	bool is_import, uint8_t *k, uint8_t *v)
{
	const struct kv_pool_spec *spec = plan->pool->spec;
	const uint32_t group_idx = spec->layers[first].group_idx;
	int64_t *slots = kv_plan_take_part(plan, (uint64_t)n_rows * spec->n_groups, sizeof(slots[0]));

	for (uint32_t g = 0; g < spec->n_groups; g++) {
		for (uint32_t t = 0; t < n_rows; t++)
			slots[(uint64_t)g * n_rows + t] =
				g == group_idx ? (int64_t)block_idx * spec->block_size + t : 0;
	}
	plan->batch.transfers[plan->batch.n_transfers++] = (struct kv_transfer_op){
		.result_idx = plan->move_result_idx,
		.layer_first = first,
		.n_layers = end - first,
		.n_tokens = n_rows,
		.slots = slots,
		.k = { .base = k, .tokens_stride = n_rows, .dtype = KV_DTYPE_PACKED },
		.v = { .base = v, .tokens_stride = n_rows, .dtype = KV_DTYPE_PACKED },
		.is_import = is_import,
	};
	kv_plan_begin_flight(plan, &plan->batch.transfers[plan->batch.n_transfers - 1]);
}

bool kv_plan_has_room(const struct kv_plan *plan, uint32_t group_idx, const uint8_t n_rows[])
{
	const struct kv_pool_spec *spec = plan->pool->spec;

	return plan->batch.n_transfers + count_runs(spec, group_idx, n_rows) <= transfers_max(spec);
}

bool kv_plan_add_move(struct kv_plan *plan, uint32_t group_idx, uint32_t block_idx, const uint8_t n_rows[],
	bool is_import, uint8_t *rows)
{
	const struct kv_pool_spec *spec = plan->pool->spec;
	uint8_t *k = rows, *v = rows + k_bytes(spec, group_idx, n_rows);
	uint32_t at = 0;

	KV_ASSERT(plan->n_items == 0);
	if (!kv_plan_has_room(plan, group_idx, n_rows))
		return false;
	if (plan->n_moves++ == 0)
		plan->move_result_idx = kv_plan_take_result(plan);
	for (uint32_t l = 0; l < spec->n_layers;) {
		if (spec->layers[l].group_idx != group_idx) {
			l++;
			continue;
		}
		const uint32_t end = run_end(spec, group_idx, l, n_rows, at), n = n_rows[at];

		if (n > 0)
			add_run(plan, l, end, n, block_idx, is_import, k, v);
		k += side_bytes(spec, l, end, n, false);
		v += side_bytes(spec, l, end, n, true);
		at += end - l;
		l = end;
	}
	return true;
}

/* ---- exact windows ---- */

uint64_t kv_plan_exact_bytes(const struct kv_pool_spec *spec, uint32_t n_layers, uint32_t n_tokens)
{
	return (uint64_t)n_layers * n_tokens * spec->kv_heads *
		(spec->exact_k->row_bytes + spec->exact_v->row_bytes);
}

bool kv_plan_has_room_exact(const struct kv_plan *plan, uint32_t n_runs)
{
	return plan->batch.n_transfers + n_runs <= transfers_max(plan->pool->spec);
}

void kv_plan_add_exact_move(struct kv_plan *plan, const struct kv_sequence *sequence, uint32_t layer_first,
	uint32_t n_layers, uint32_t token_first, uint32_t n_tokens, bool is_import, uint8_t *rows)
{
	const struct kv_pool *pool = plan->pool;
	const struct kv_pool_spec *spec = pool->spec;
	const uint32_t n_ring = spec->exact_tokens / spec->block_size;
	int64_t *slots = kv_plan_take_part(plan, (uint64_t)n_tokens * spec->n_groups, sizeof(slots[0]));
	int64_t *exact_slots = kv_plan_take_part(plan, n_tokens, sizeof(exact_slots[0]));
	const uint64_t k_bytes = (uint64_t)n_layers * n_tokens * spec->kv_heads * spec->exact_k->row_bytes;

	KV_ASSERT(plan->n_items == 0 && kv_plan_has_room_exact(plan, 1));
	if (plan->n_moves++ == 0)
		plan->move_result_idx = kv_plan_take_result(plan);
	for (uint32_t i = 0; i < n_tokens * spec->n_groups; i++)
		slots[i] = -1;
	for (uint32_t i = 0; i < n_tokens; i++) {
		const uint32_t t = token_first + i;
		uint32_t block;

		kv_block_table_copy(&sequence->tables[spec->n_groups], &pool->tables,
			t / spec->block_size % n_ring, 1, &block);
		exact_slots[i] = (int64_t)block * spec->block_size + t % spec->block_size;
	}
	plan->batch.transfers[plan->batch.n_transfers++] = (struct kv_transfer_op){
		.result_idx = plan->move_result_idx,
		.layer_first = layer_first,
		.n_layers = n_layers,
		.n_tokens = n_tokens,
		.slots = slots,
		.exact_slots = exact_slots,
		.k = { .base = rows, .tokens_stride = n_tokens, .dtype = KV_DTYPE_BF16 },
		.v = { .base = rows + k_bytes, .tokens_stride = n_tokens, .dtype = KV_DTYPE_BF16 },
		.is_import = is_import,
		.is_ring = true,
	};
	kv_plan_begin_flight(plan, &plan->batch.transfers[plan->batch.n_transfers - 1]);
}
