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

uint64_t kv_plan_moves_bytes(const struct kv_pool_spec *spec)
{
	return transfers_max(spec) * slots_bytes(spec);
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
