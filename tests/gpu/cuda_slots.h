/*
 * Which rows a call writes, and in which company: slots once, twice, not at all, one by one and together.
 * Loop index: the case. Included by one program.
 */
#ifndef TESTS_GPU_CUDA_SLOTS_H
#define TESTS_GPU_CUDA_SLOTS_H

#include "tests/gpu/cuda_cases.h"

/* Of equal slots in one op the last token stays, negative ones are skipped, one token at a time works. */
START_TEST(test_cuda_duplicate_and_skipped_slots)
{
	struct rig rig;
	struct rig_seq seqs[N_SEQS];

	begin_case(&rig, &cases[_i], seqs);
	fill(&rig, seqs);
	for (uint32_t round = 0; round < 3; round++) {
		const uint32_t n = round == 2 ? 1 : 40;
		struct kv_update_op *op;
		int64_t *slots;
		uint64_t n_bytes;

		rig_begin(&rig);
		op = &rig.batch.updates[rig.batch.n_updates++];
		slots = rig_take(&rig, n * sizeof(*slots));
		for (uint32_t t = 0; t < n; t++)
			slots[t] =
				t % 7 == 3 ? -1 - (int64_t)t : slot_of(&rig, &seqs[6], rig_below(&rig, 20));
		*op = (struct kv_update_op){
			.result_idx = rig.batch.n_results++, .n_layers = 2, .n_tokens = n, .slots = slots
		};
		op->k = rig_rows(&rig, false, 2, n, KV_DTYPE_F32, &n_bytes);
		op->v = rig_rows(&rig, true, 2, n, KV_DTYPE_BF16, &n_bytes);
		rig_draw_rows(&rig, &op->k, false, 2 * n * rig.spec->kv_heads);
		rig_draw_rows(&rig, &op->v, true, 2 * n * rig.spec->kv_heads);
		rig_run_cuda(&rig);
		ck_assert_uint_eq(rig.batch.results[0].status, KV_OK);
		rig_run_oracle(&rig);
		compare_rows(&rig, &seqs[6], KV_DTYPE_PACKED);
	}
	rig_finish(&rig);
}
END_TEST

#define N_MOVED 21u

/* A transfer of tokens order[0 .. n) of a sequence, of both layers, as they are stored. */
static inline struct kv_transfer_op *add_move(
	struct rig *rig, const struct rig_seq *seq, const uint32_t *order, uint32_t n, bool is_import)
{
	struct kv_transfer_op *op = &rig->batch.transfers[rig->batch.n_transfers++];
	int64_t *slots = rig_take(rig, n * sizeof(*slots));
	uint64_t n_bytes;

	for (uint32_t t = 0; t < n; t++)
		slots[t] = slot_of(rig, seq, order[t]);
	*op = (struct kv_transfer_op){ .result_idx = rig->batch.n_results++,
		.n_layers = 2,
		.n_tokens = n,
		.slots = slots,
		.is_import = is_import };
	op->k = rig_rows(rig, false, 2, n, KV_DTYPE_PACKED, &n_bytes);
	op->v = rig_rows(rig, true, 2, n, KV_DTYPE_PACKED, &n_bytes);
	return op;
}

/* A token's rows of K or V on a layer, within those of an op. */
static inline uint8_t *row_at(const struct rig *rig, const struct kv_transfer_op *op, bool is_v,
	uint32_t layer, uint32_t t, uint64_t *n_bytes)
{
	uint8_t *base = is_v ? op->v.base : op->k.base;

	*n_bytes = (uint64_t)rig->spec->kv_heads * rig_row_bytes(rig, is_v, layer, KV_DTYPE_PACKED);
	if (layer == 1)
		base += (uint64_t)op->n_tokens * rig->spec->kv_heads *
			rig_row_bytes(rig, is_v, 0, KV_DTYPE_PACKED);
	return base + t * *n_bytes;
}

static inline void run_both(struct rig *rig)
{
	rig_run_cuda(rig);
	for (uint32_t i = 0; i < rig->batch.n_results; i++)
		ck_assert_uint_eq(rig->batch.results[i].status, KV_OK);
	rig_run_oracle(rig);
}

/*
 * Rows leave in random order, together and one by one, and come back both ways into slots of other sequences,
 * and so do new rows of half of them: what is stored is the oracle's, and the same both ways.
 */
START_TEST(test_cuda_slots_one_by_one_and_together)
{
	struct rig rig;
	struct rig_seq seqs[N_SEQS], *to[2] = { &seqs[8], &seqs[7] };
	uint32_t order[N_MOVED];
	uint64_t n_bytes;

	begin_case(&rig, &cases[_i], seqs);
	fill(&rig, seqs);
	rig_begin(&rig);
	rig_shuffle(&rig, order, N_MOVED);

	struct kv_transfer_op *together = add_move(&rig, &seqs[6], order, N_MOVED, false);

	for (uint32_t t = 0; t < N_MOVED; t++)
		add_move(&rig, &seqs[6], &order[t], 1, false);
	rig_run_cuda(&rig);
	for (uint32_t i = 0; i < 4 * N_MOVED; i++) {
		const uint32_t t = i / 4;
		const uint8_t *alone = row_at(&rig, &together[1 + t], i & 1, i / 2 % 2, 0, &n_bytes);

		ck_assert_mem_eq(alone, row_at(&rig, together, i & 1, i / 2 % 2, t, &n_bytes), n_bytes);
	}
	/* In one op; and in as many batches as there are rows, in another order. */
	rig.batch.n_transfers = rig.batch.n_results = 1;
	together->is_import = true;
	for (uint32_t t = 0; t < N_MOVED; t++)
		((int64_t *)(uintptr_t)together->slots)[t] = slot_of(&rig, to[0], order[t]);
	run_both(&rig);
	for (uint32_t n = 0; n < N_MOVED; n++) {
		const uint32_t t = n * 8 % N_MOVED;
		struct kv_transfer_op *op = &together[1 + t];

		rig.batch.transfers = op;
		op->result_idx = 0;
		op->is_import = true;
		((int64_t *)(uintptr_t)op->slots)[0] = slot_of(&rig, to[1], order[t]);
		run_both(&rig);
	}
	for (uint32_t way = 0; way < 2; way++) {
		to[way]->n_tokens = to[way]->exact_lo = N_MOVED; /* no ring has what came */
		compare_rows(&rig, to[way], KV_DTYPE_PACKED);
	}
	rig_finish(&rig);
}
END_TEST

#endif
