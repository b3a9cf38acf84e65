/*
 * From a batch in host memory to what kernels read. Payload rows, queries and outputs stay where they are:
 * the device reads and writes them in place, once each. Slots and block tables are read many times, so the
 * part of the batch's area that holds them is copied; op structs are written anew, into the flight's staging.
 */
#include <string.h>

#include "core/checked.h"
#include "core/format.h"
#include "gpu/backend_internal.h"

void *kvg_stage(struct kvg_flight *flight, uint64_t n_bytes)
{
	const uint64_t at = flight->staging_used;

	if (n_bytes > KVG_STAGING_BYTES - at)
		return NULL;
	flight->staging_used = kv_round_up_u64(at + n_bytes, 16);
	if (flight->staging_used > KVG_STAGING_BYTES)
		flight->staging_used = KVG_STAGING_BYTES;
	return flight->staging + at;
}

const void *kvg_staged_address(const struct kvg_flight *flight, const void *host)
{
	return flight->staging_device + ((const uint8_t *)host - flight->staging);
}

const void *kvg_area_address(const struct kvg_flight *flight, const void *host)
{
	const uint64_t at = (uint64_t)((const uint8_t *)host - flight->mirrored);

	return (const uint8_t *)host >= flight->mirrored && at < flight->mirrored_bytes
		? flight->mirror_device + at
		: host;
}

void kvg_refuse(
	struct kvg_flight *flight, uint32_t result_idx, enum kv_status status, uint32_t layer, uint32_t row)
{
	const struct kv_finding finding = { .result_idx = result_idx,
		.result = { .status = (uint16_t)status, .layer = (uint16_t)layer, .row = row } };

	kv_batch_merge(flight->batch, &finding);
}

/* ---- the part of the area that is copied ---- */

struct range {
	uintptr_t begin, end;
};

static void widen(struct range *range, const void *ptr, uint64_t n_bytes)
{
	const uintptr_t begin = (uintptr_t)ptr, end = begin + n_bytes;

	if (n_bytes == 0)
		return;
	if (begin < range->begin)
		range->begin = begin;
	if (end > range->end)
		range->end = end;
}

static void widen_exact(struct range *range, const int64_t *exact_slots, uint64_t n_tokens)
{
	if (exact_slots)
		widen(range, exact_slots, n_tokens * sizeof(*exact_slots));
}

static void widen_tables(struct range *range, const struct kv_pool_spec *spec, const struct kv_decode_op *op)
{
	const uint64_t n_blocks = kv_div_up_u32(op->n_tokens_seen, spec->block_size);

	widen(range, op->table, n_blocks * sizeof(*op->table));
	if (op->exact_table && op->exact_lo < op->n_tokens_seen)
		widen(range, op->exact_table,
			(n_blocks - op->exact_lo / spec->block_size) * sizeof(*op->exact_table));
}

static void find_mirrored(struct kvg_flight *flight)
{
	const struct kv_batch *batch = flight->batch;
	const struct kv_pool_spec *spec = batch->pool->spec;
	struct range range = { UINTPTR_MAX, 0 };

	for (uint32_t i = 0; i < batch->n_updates; i++)
		widen(&range, batch->updates[i].slots,
			(uint64_t)spec->n_groups * batch->updates[i].n_tokens * sizeof(int64_t));
	for (uint32_t i = 0; i < batch->n_updates; i++)
		widen_exact(&range, batch->updates[i].exact_slots, batch->updates[i].n_tokens);
	for (uint32_t i = 0; i < batch->n_transfers; i++)
		widen(&range, batch->transfers[i].slots,
			(uint64_t)spec->n_groups * batch->transfers[i].n_tokens * sizeof(int64_t));
	for (uint32_t i = 0; i < batch->n_transfers; i++)
		widen_exact(&range, batch->transfers[i].exact_slots, batch->transfers[i].n_tokens);
	for (uint32_t i = 0; i < batch->n_decodes; i++)
		widen_tables(&range, spec, &batch->decodes[i]);
	flight->mirrored = NULL;
	flight->mirrored_bytes = 0;
	if (range.begin >= range.end)
		return;
	/* The copy keeps 16-byte alignment, and never reads beyond the range's own pages. */
	range.begin &= ~(uintptr_t)15;
	if (range.end - range.begin > KVG_MIRROR_BYTES)
		return;
	flight->mirrored = (const uint8_t *)range.begin;
	flight->mirrored_bytes = range.end - range.begin;
}

/* ---- duplicates ---- */

static bool ascends(const int64_t *slots, uint32_t n)
{
	for (uint32_t t = 1; t < n; t++) {
		if (slots[t] <= slots[t - 1])
			return false;
	}
	return true;
}

/* Writes -1 where a later token has the same slot (into `out`, if given); returns how many there are. */
static uint32_t drop_duplicates(uint64_t *seen, const int64_t *slots, uint32_t n, int64_t *out)
{
	uint32_t n_dropped = 0;

	for (uint32_t t = n; t-- > 0;) {
		if (slots[t] < 0)
			continue;

		const uint64_t bit = 1ull << (slots[t] & 63);
		uint64_t *word = &seen[slots[t] >> 6];

		if (*word & bit) {
			n_dropped++;
			if (out)
				out[t] = -1;
		}
		*word |= bit;
	}
	for (uint32_t t = 0; t < n; t++) {
		if (slots[t] >= 0)
			seen[slots[t] >> 6] = 0;
	}
	return n_dropped;
}

/* The op's slots as the kernel may take them, in any order: of equal ones only the last is left. NULL: no
 * room. */
static const int64_t *resolve_slots(struct kvg_flight *flight, const int64_t *slots, uint32_t n_tokens)
{
	struct kv_backend_pool *pool = flight->batch->pool;
	const uint32_t n_groups = pool->spec->n_groups;
	const uint64_t n_bytes = (uint64_t)n_groups * n_tokens * sizeof(*slots);
	int64_t *own = NULL;

	for (uint32_t g = 0; g < n_groups; g++) {
		const int64_t *part = slots + (uint64_t)g * n_tokens;

		if (ascends(part, n_tokens) || drop_duplicates(pool->seen[g], part, n_tokens, NULL) == 0)
			continue;
		if (!own) {
			own = kvg_stage(flight, n_bytes);
			if (!own)
				return NULL;
			memcpy(own, slots, n_bytes);
		}
		drop_duplicates(pool->seen[g], part, n_tokens, own + (uint64_t)g * n_tokens);
	}
	return own ? kvg_staged_address(flight, own) : kvg_area_address(flight, slots);
}

/* ---- ops ---- */

struct row_source {
	uint32_t result_idx, layer_first, n_layers, n_tokens;
	const int64_t *slots, *exact_slots;
	const struct kv_rows *k, *v;
	bool is_read, is_ring;
};

/* Appends the op unless it has nothing to do or was refused. */
static void add_row_op(struct kvg_flight *flight, struct kvg_rows_params *params, struct kvg_row_op *ops,
	const struct row_source *source)
{
	const int64_t *slots;

	if (source->n_tokens == 0 || source->n_layers == 0)
		return;
	slots = source->is_read || source->is_ring ? kvg_area_address(flight, source->slots)
						   : resolve_slots(flight, source->slots, source->n_tokens);
	if (!slots) {
		kvg_refuse(flight, source->result_idx, KV_LIMIT, source->layer_first, 0);
		return;
	}
	ops[params->n_ops++] = (struct kvg_row_op){
		.k = source->k->base,
		.v = source->v->base,
		.k_stride = source->k->tokens_stride,
		.v_stride = source->v->tokens_stride,
		.slots = slots,
		.exact_slots = source->exact_slots ? kvg_area_address(flight, source->exact_slots) : NULL,
		.row_first = params->n_rows,
		.k_token_first = source->k->token_first,
		.v_token_first = source->v->token_first,
		.k_dtype = source->k->dtype,
		.v_dtype = source->v->dtype,
		.result_idx = source->result_idx,
		.layer_first = source->layer_first,
		.n_layers = source->n_layers,
		.n_tokens = source->n_tokens,
		.mode = source->is_read ? KVG_ROWS_READ : KVG_ROWS_WRITE,
		.is_ring = source->is_ring,
	};
	params->n_rows += 2ull * source->n_layers * source->n_tokens * params->tables.kv_heads;
}

static void begin_rows(
	struct kvg_flight *flight, struct kvg_rows_params *params, const struct kvg_row_op *ops)
{
	*params = (struct kvg_rows_params){
		.tables = flight->batch->pool->image->tables,
		.ops = kvg_staged_address(flight, ops),
		.flags = (uint64_t *)kvg_staged_address(flight, flight->flags),
	};
}

static void translate_updates(struct kvg_flight *flight)
{
	const struct kv_batch *batch = flight->batch;
	struct kvg_row_op *ops = kvg_stage(flight, batch->n_updates * sizeof(*ops));

	begin_rows(flight, &flight->updates, ops);
	for (uint32_t i = 0; i < batch->n_updates; i++) {
		const struct kv_update_op *op = &batch->updates[i];
		const struct row_source source = { .result_idx = op->result_idx,
			.layer_first = op->layer_first,
			.n_layers = op->n_layers,
			.n_tokens = op->n_tokens,
			.slots = op->slots,
			.exact_slots = op->exact_slots,
			.k = &op->k,
			.v = &op->v };

		if (ops)
			add_row_op(flight, &flight->updates, ops, &source);
		else
			kvg_refuse(flight, op->result_idx, KV_LIMIT, op->layer_first, 0);
	}
}

static void translate_transfers(struct kvg_flight *flight)
{
	const struct kv_batch *batch = flight->batch;
	struct kvg_row_op *ops = kvg_stage(flight, batch->n_transfers * sizeof(*ops));

	begin_rows(flight, &flight->transfers, ops);
	for (uint32_t i = 0; i < batch->n_transfers; i++) {
		const struct kv_transfer_op *op = &batch->transfers[i];
		const struct row_source source = { .result_idx = op->result_idx,
			.layer_first = op->layer_first,
			.n_layers = op->n_layers,
			.n_tokens = op->n_tokens,
			.slots = op->slots,
			.exact_slots = op->exact_slots,
			.k = &op->k,
			.v = &op->v,
			.is_read = !op->is_import,
			.is_ring = op->is_ring };

		if (ops)
			add_row_op(flight, &flight->transfers, ops, &source);
		else
			kvg_refuse(flight, op->result_idx, KV_LIMIT, op->layer_first, 0);
	}
}

static void translate_copies(struct kvg_flight *flight)
{
	const struct kv_batch *batch = flight->batch;
	const struct kvg_image *image = batch->pool->image;
	struct kvg_copy_op *ops = kvg_stage(flight, batch->n_copies * sizeof(*ops));

	/* Nothing else was staged before: they always fit, unlike results, which a copy has none of. */
	KV_ASSERT(ops != NULL);
	for (uint32_t i = 0; i < batch->n_copies; i++)
		ops[i] = (struct kvg_copy_op){ .group_idx = batch->copies[i].group_idx,
			.block_from = batch->copies[i].block_from,
			.block_to = batch->copies[i].block_to };
	flight->copies = (struct kvg_copy_params){
		.tables = image->tables,
		.ops = kvg_staged_address(flight, ops),
		.block_bytes_max = image->block_bytes_max,
		.n_ops = batch->n_copies,
	};
}

void kvg_translate(struct cuda_backend *cuda, struct kvg_flight *flight)
{
	uint64_t *flags;

	flight->staging_used = 0;
	flight->n_waves = 0;
	find_mirrored(flight);
	translate_copies(flight);
	flags = kvg_stage(flight, flight->batch->n_results * sizeof(*flags));
	KV_ASSERT(flags != NULL);
	memset(flags, 0xFF, flight->batch->n_results * sizeof(*flags));
	flight->flags = flags;
	translate_updates(flight);
	kvg_translate_decodes(cuda, flight);
	translate_transfers(flight);
}
