/*
 * The CUDA backend against the scalar oracle (core/batch_run.h), on one list of cases. Stored bytes are
 * compared without tolerance; outputs by relative L2 error, with bounds that follow from the arithmetic:
 * float32 for rows of any format, float16 tables for the tq4 kernel. Exit 77 without a device. Loop index:
 * the case.
 */
#include "core/attention.h"
#include "core/selftest.h"
#include "tests/gpu/cuda_cases.h"
#include "tests/gpu/cuda_slots.h"

/* Updates store the oracle's bytes, exports return them, and decoded rows have the same bits. */
START_TEST(test_cuda_rows_equal_the_oracle)
{
	struct rig rig;
	struct rig_seq seqs[N_SEQS];

	begin_case(&rig, &cases[_i], seqs);
	fill(&rig, seqs);
	for (uint32_t s = 0; s < N_SEQS; s++) {
		compare_rows(&rig, &seqs[s], KV_DTYPE_PACKED);
		compare_rows(&rig, &seqs[s], s % 2 ? KV_DTYPE_F32 : KV_DTYPE_BF16);
	}
	rig_finish(&rig);
}
END_TEST

/* K rows of one token on layer 0, as the oracle has them: [kv_heads, k_head_dim]. */
static float *read_key(struct rig *rig, const struct rig_seq *seq, uint32_t token)
{
	const size_t n_bytes = (size_t)rig->spec->kv_heads * rig->spec->k_head_dim * sizeof(float);
	float *out = malloc(n_bytes);
	struct kv_transfer_op *op;
	int64_t *slot;
	uint64_t unused;

	rig_begin(rig);
	op = &rig->batch.transfers[rig->batch.n_transfers++];
	slot = rig_take(rig, sizeof(*slot));
	*slot = slot_of(rig, seq, token);
	*op = (struct kv_transfer_op){
		.result_idx = rig->batch.n_results++, .n_layers = 1, .n_tokens = 1, .slots = slot
	};
	op->k = rig_rows(rig, false, 1, 1, KV_DTYPE_F32, &unused);
	rig_run_oracle(rig);
	memcpy(out, op->k.base, n_bytes);
	return out;
}

#ifdef TEST_ON_HOST
#define RING_ROUNDS 7u
#else
#define RING_ROUNDS 30u
#endif

/*
 * A ring through many batches: chunks of one token to more than the ring holds, refused chunks, which cost
 * the places that they took, and cuts; each followed by decodes and reads of what is still held.
 */
START_TEST(test_cuda_exact_ring_is_the_oracles)
{
	const struct pool_case *c = &cases[_i];
	struct rig rig;
	struct rig_seq seqs[N_SEQS], *seq = &seqs[8];
	uint32_t end;

	if (!(c->options & EXACT))
		return;
	begin_case(&rig, c, seqs);
	seq->n_tokens = seq->exact_lo = 0;
	for (uint32_t round = 0; round < RING_ROUNDS; round++) {
		const uint32_t room = LONGEST - seq->n_tokens,
			       wanted = round % 4 == 0 ? 1 + rig_below(&rig, 7)
			: round % 4 == 1               ? EXACT_TOKENS + 1 + rig_below(&rig, EXACT_TOKENS / 2)
						       : 1 + rig_below(&rig, EXACT_TOKENS);
		const bool is_refused = round % 5 == 3;
		struct kv_update_op *op;

		if (room < wanted || round % 6 == 5) {
			seq->n_tokens -= rig_below(&rig, seq->n_tokens); /* a cut: at least one is left */
			if (seq->exact_lo > seq->n_tokens)
				seq->exact_lo = seq->n_tokens;
		}
		end = seq->n_tokens + (wanted < LONGEST - seq->n_tokens ? wanted : LONGEST - seq->n_tokens);
		rig_begin(&rig);
		op = add_update(&rig, seq, seq->n_tokens, end, KV_DTYPE_F32, KV_DTYPE_F16);
		if (is_refused)
			memset(op->k.base, 0xFF, 4); /* NaN */
		if (end > seq->exact_lo + EXACT_TOKENS)
			seq->exact_lo = end - EXACT_TOKENS;
		if (!is_refused)
			seq->n_tokens = end;
		if (seq->exact_lo > seq->n_tokens)
			seq->exact_lo = seq->n_tokens;
		if (seq->n_tokens == 0)
			continue;
		for (uint32_t i = 0; i < 3; i++)
			add_decode(&rig, seq, i % 2, 1 + rig_below(&rig, 3), seq->n_tokens, 1.0f);
		if (is_refused) {
			rig_run_cuda(&rig);
			ck_assert_uint_eq(rig.batch.results[op->result_idx].status, KV_BAD_VALUE);
			rig_run_oracle(&rig);
			continue;
		}
		run_and_compare_decodes(&rig, c->bound, "ring");
		compare_rows(&rig, seq, KV_DTYPE_F32);
	}
	rig_finish(&rig);
}
END_TEST

/* Rows of ring blocks as they lie there, of all layers; tokens from seq->exact_lo on. */
static struct kv_transfer_op *add_ring_move(struct rig *rig, const struct rig_seq *seq, bool is_import)
{
	const uint32_t n = seq->n_tokens - seq->exact_lo;
	struct kv_transfer_op *op = &rig->batch.transfers[rig->batch.n_transfers++];
	int64_t *slots = rig_take(rig, 2 * n * sizeof(*slots));
	uint64_t n_bytes;

	for (uint32_t t = 0; t < n; t++) {
		slots[t] = -1;
		slots[n + t] = exact_slot_of(rig, seq, seq->exact_lo, seq->exact_lo + t);
	}
	*op = (struct kv_transfer_op){ .result_idx = rig->batch.n_results++,
		.n_layers = 2,
		.n_tokens = n,
		.slots = slots,
		.exact_slots = slots + n,
		.is_import = is_import,
		.is_ring = true };
	op->k = rig_rows(rig, false, 2, n, KV_DTYPE_BF16, &n_bytes);
	op->v = rig_rows(rig, true, 2, n, KV_DTYPE_BF16, &n_bytes);
	return op;
}

/* A ring that is taken out as it lies and put into another one is the same ring; what is no number is
 * refused. */
START_TEST(test_cuda_ring_moves_are_the_oracles)
{
	struct rig rig;
	struct rig_seq seqs[N_SEQS], moved;
	struct kv_transfer_op *op;
	uint64_t k_bytes, v_bytes;
	uint8_t *kept;

	if (!(cases[_i].options & EXACT))
		return;
	begin_case(&rig, &cases[_i], seqs);
	fill(&rig, seqs);
	moved = seqs[8];
	memcpy(moved.ring, seqs[0].ring, sizeof(moved.ring)); /* of a sequence without tokens */
	k_bytes = 2ull * EXACT_TOKENS * rig.spec->kv_heads * rig.spec->exact_k->row_bytes;
	v_bytes = 2ull * EXACT_TOKENS * rig.spec->kv_heads * rig.spec->exact_v->row_bytes;
	kept = malloc(k_bytes + v_bytes);
	rig_begin(&rig);
	op = add_ring_move(&rig, &seqs[8], false);
	rig_run_cuda(&rig);
	memcpy(kept, op->k.base, k_bytes);
	memcpy(kept + k_bytes, op->v.base, v_bytes);
	rig_run_oracle(&rig);
	ck_assert_mem_eq(kept, op->k.base, k_bytes);
	ck_assert_mem_eq(kept + k_bytes, op->v.base, v_bytes);
	rig_begin(&rig);
	op = add_ring_move(&rig, &moved, true);
	memcpy(op->k.base, kept, k_bytes);
	memcpy(op->v.base, kept + k_bytes, v_bytes);
	rig_run_cuda(&rig);
	ck_assert_uint_eq(rig.batch.results[0].status, KV_OK);
	rig_run_oracle(&rig);
	compare_rows(&rig, &moved, KV_DTYPE_BF16);
	rig_begin(&rig);
	for (uint32_t i = 0; i < 4; i++)
		add_decode(&rig, &moved, i % 2, 1, LONGEST, 1.0f);
	run_and_compare_decodes(&rig, cases[_i].bound, "moved ring");
	rig_begin(&rig);
	op = add_ring_move(&rig, &moved, true);
	memset(op->k.base, 0, k_bytes);
	memset(op->v.base, 0, v_bytes);
	((uint16_t *)(void *)op->v.base)[v_bytes / 2 - 1] = 0x7F80; /* infinity, in the last row */
	rig_run_cuda(&rig);
	ck_assert_uint_eq(rig.batch.results[0].status, KV_BAD_VALUE);
	ck_assert_uint_eq(rig.batch.results[0].layer, 1);
	ck_assert_uint_eq(rig.batch.results[0].row, EXACT_TOKENS - 1);
	free(kept);
	rig_finish(&rig);
}
END_TEST

/* Queries that point at one key: its logit is 12, so that it takes nearly all of the weight. */
static void point_at(const struct rig *rig, struct kv_decode_op *op, const float *key)
{
	const uint32_t d = rig->spec->k_head_dim, group = rig->spec->q_heads / rig->spec->kv_heads;
	const size_t row_bytes = d * kv_dtype_bytes((enum kv_dtype)op->q_dtype);
	float q[KV_HEAD_DIM_MAX];

	for (uint32_t h = 0; h < rig->spec->q_heads; h++) {
		const float *row = key + (size_t)(h / group) * d;
		float square = 1e-6f;

		for (uint32_t i = 0; i < d; i++)
			square += row[i] * row[i];
		for (uint32_t i = 0; i < d; i++)
			q[i] = row[i] * 12.0f / (op->scale * square);
		kv_rows_store((enum kv_dtype)op->q_dtype, q, d, (uint8_t *)(uintptr_t)op->q + h * row_bytes);
	}
}

/* Blocks that no window reaches may be gone: their entries in the table name no block. */
static void free_blocks_before_window(const struct rig *rig, struct kv_decode_op *op, uint32_t window)
{
	const struct kv_pool_spec *spec = rig->spec;
	const struct kv_attention_range range = kv_attention_range(
		op->n_tokens_seen, op->q_len, 0, window, spec->layers[op->layer].sink_tokens);

	op->window = window;
	for (uint32_t b = kv_div_up_u32(range.first_hi, spec->block_size); b < range.lo / spec->block_size;
		b++)
		((uint32_t *)(uintptr_t)op->table)[b] = KV_BLOCK_NONE;
}

/*
 * Ragged batches, empty sequences, shorter promised lengths, several query rows, windows whose other blocks
 * are gone, sinks and none, and logits that are flat, peaked, and those of a sink: one token that takes
 * nearly all.
 */
START_TEST(test_cuda_decode_is_the_oracles)
{
	const struct pool_case *c = &cases[_i];
	struct rig rig;
	struct rig_seq seqs[N_SEQS];
	float *key;
	char name[128];

	snprintf(name, sizeof(name), "%s/%s d %u/%u heads %u/%u block %u options %u", c->k, c->v, c->k_dim,
		c->v_dim, c->q_heads, c->kv_heads, c->block_size, c->options);
	begin_case(&rig, c, seqs);
	fill(&rig, seqs);
	key = read_key(&rig, &seqs[8], 5);
	rig_begin(&rig);
	for (uint32_t s = 0; s < N_SEQS; s++)
		add_decode(&rig, &seqs[s], s % 2, 1, seqs[s].n_tokens, 1.0f);
	add_decode(&rig, &seqs[8], 0, 1, LONGEST, 0.01f);
	add_decode(&rig, &seqs[8], 1, 1, LONGEST, 2.5f);
	add_decode(&rig, &seqs[8], 1, 1, LONGEST - 7, 1.0f);
	add_decode(&rig, &seqs[8], 0, 1, LONGEST, 1.0f)->flags = KV_DECODE_NO_SINKS;
	add_decode(&rig, &seqs[7], 0, 4, LONGER, 1.0f);
	add_decode(&rig, &seqs[2], 0, 3, 2, 1.0f); /* its first row sees nothing */
	add_decode(&rig, &seqs[8], 1, KV_Q_LEN_MAX, LONGEST, 1.0f);
	point_at(&rig, add_decode(&rig, &seqs[8], 0, 1, LONGEST, 1.0f), key);
	free_blocks_before_window(&rig, add_decode(&rig, &seqs[8], 0, 1, LONGEST, 1.0f), 1);
	free_blocks_before_window(&rig, add_decode(&rig, &seqs[8], 0, 1, LONGEST, 1.0f), LONGEST / 8);
	free_blocks_before_window(&rig, add_decode(&rig, &seqs[8], 0, 2, LONGEST, 1.0f), LONGEST * 3 / 4);
	add_decode(&rig, &seqs[8], 0, 1, LONGEST, 1.0f)->window = 5000;
	run_and_compare_decodes(&rig, c->bound, name);
	/* One alone: split differently. */
	rig_begin(&rig);
	add_decode(&rig, &seqs[8], 1, 1, LONGEST, 1.0f);
	run_and_compare_decodes(&rig, c->bound, name);
	rig_begin(&rig);
	add_decode(&rig, &seqs[0], 1, 1, 0, 1.0f);
	run_and_compare_decodes(&rig, c->bound, name);
	/* Outputs of every dtype, also where nothing is seen, and at an address that is no multiple of 16. */
	rig_begin(&rig);
	for (uint32_t i = 0; i < 8; i++) {
		struct kv_decode_op *op =
			add_decode(&rig, &seqs[i], i % 2, 1 + i % 2, seqs[i].n_tokens, 1.0f);

		op->out_dtype = i % 2 ? KV_DTYPE_BF16 : KV_DTYPE_F16;
		op->out += i / 4 * 4;
		op->lse = i % 3 ? op->lse : NULL;
	}
	run_and_compare_decodes(&rig, c->bound, name);
	free(key);
	rig_finish(&rig);
}
END_TEST

/* Queries in the rows' basis, outputs in it, and both; rows of two words, and ring blocks, where there are
 * any. */
START_TEST(test_cuda_decode_flags)
{
	static const uint8_t flags[] = { KV_DECODE_Q_ROTATED, KV_DECODE_OUT_ROTATED,
		KV_DECODE_Q_ROTATED | KV_DECODE_OUT_ROTATED,
		KV_DECODE_Q_ROTATED | KV_DECODE_OUT_ROTATED | KV_DECODE_NO_SINKS };
	const struct pool_case *c = &cases[_i];
	struct rig rig;
	struct rig_seq seqs[N_SEQS];

	begin_case(&rig, c, seqs);
	fill(&rig, seqs);
	rig_begin(&rig);
	for (uint32_t i = 0; i < KV_LENGTH(flags); i++) {
		const struct rig_seq *seq = &seqs[i % 2 ? 8 : 7];

		add_decode(&rig, seq, i / 2 % 2, 1 + i % 3, seq->n_tokens, 1.0f)->flags = flags[i];
	}
	add_decode(&rig, &seqs[0], 0, 1, 0, 1.0f)->flags = flags[2];
	run_and_compare_decodes(&rig, c->bound, "rotated");
	rig_finish(&rig);
}
END_TEST

/* Packed rows imported into other slots, block copies on top of each other, updates and decodes in one batch.
 */
START_TEST(test_cuda_import_copy_and_order)
{
	const struct pool_case *c = &cases[_i];
	struct rig rig;
	struct rig_seq seqs[N_SEQS], moved;
	struct kv_transfer_op *op;
	uint64_t n_bytes;
	int64_t *slots;

	/* What is copied is full blocks. */
	if (LONGEST < 5 * c->block_size)
		return;
	begin_case(&rig, c, seqs);
	fill(&rig, seqs);
	moved = seqs[7];
	moved.table[0] = seqs[8].table[1];
	moved.table[1] = seqs[8].table[0];
	/* Export 17 tokens, import them elsewhere. */
	rig_begin(&rig);
	slots = rig_take(&rig, 2 * 17 * sizeof(*slots));
	for (uint32_t t = 0; t < 17; t++) {
		slots[t] = slot_of(&rig, &seqs[7], t);
		slots[17 + t] = slot_of(&rig, &moved, (t * 5) % 17);
	}
	op = &rig.batch.transfers[rig.batch.n_transfers++];
	*op = (struct kv_transfer_op){
		.result_idx = rig.batch.n_results++, .n_layers = 2, .n_tokens = 17, .slots = slots
	};
	op->k = rig_rows(&rig, false, 2, 17, KV_DTYPE_PACKED, &n_bytes);
	op->v = rig_rows(&rig, true, 2, 17, KV_DTYPE_PACKED, &n_bytes);
	rig_run_cuda(&rig);
	op->slots = slots + 17;
	op->is_import = true;
	rig_run_cuda(&rig);
	ck_assert_uint_eq(rig.batch.results[0].status, KV_OK);
	rig_run_oracle(&rig);
	compare_rows(&rig, &seqs[8], KV_DTYPE_PACKED);
	/* Copies that build on each other. */
	rig_begin(&rig);
	rig.copies[0] = (struct kv_copy_op){ 0, seqs[7].table[0], seqs[8].table[2] };
	rig.copies[1] = (struct kv_copy_op){ 0, seqs[8].table[2], seqs[8].table[3] };
	rig.copies[2] = (struct kv_copy_op){ 0, seqs[8].table[4], seqs[8].table[2] };
	rig.batch.n_copies = 3;
	add_decode(&rig, &seqs[8], 0, 1, LONGEST, 1.0f);
	run_and_compare_decodes(&rig, c->bound, "copies");
	compare_rows(&rig, &seqs[8], KV_DTYPE_PACKED);
	rig_finish(&rig);
}
END_TEST

/* A bad row or query is refused with its first layer and row, as the oracle does; others are not touched by
 * it. */
START_TEST(test_cuda_refusals_equal_the_oracles)
{
	/* 3.4e38 is a number, and infinite as bf16. */
	static const float bad[] = { NAN, INFINITY, -INFINITY, 3e38f, 3.4e38f, 65520.0f, 1e30f };
	struct rig rig;
	struct rig_seq seqs[N_SEQS];

	begin_case(&rig, &cases[_i], seqs);
	fill(&rig, seqs);
	for (uint32_t b = 0; b < sizeof(bad) / sizeof(bad[0]); b++) {
		struct kv_result found[8];

		rig_begin(&rig);
		for (uint32_t s = 5; s < 8; s++) {
			const uint32_t n = seqs[s].n_tokens;
			const struct kv_update_op *op =
				add_update(&rig, &seqs[s], 0, n, KV_DTYPE_F32, KV_DTYPE_F32);

			for (uint32_t i = 0; s != 6 && i < 5; i++) {
				const struct kv_rows *rows = i % 2 ? &op->v : &op->k;
				const uint32_t dim = i % 2 ? rig.spec->v_head_dim : rig.spec->k_head_dim;
				const size_t n_values = (size_t)2 * n * rig.spec->kv_heads * dim;

				memcpy(rows->base + 4 * (size_t)rig_below(&rig, (uint32_t)n_values), &bad[b],
					4);
			}
		}
		struct kv_decode_op *op = add_decode(&rig, &seqs[4], 1, 3, 17, 1.0f);

		memset((uint8_t *)(uintptr_t)op->q +
				(size_t)rig.spec->q_heads * rig.spec->k_head_dim *
					kv_dtype_bytes(op->q_dtype),
			0xFF, 4); /* NaN in every dtype, in row 1 */
		rig_run_cuda(&rig);
		memcpy(found, rig.batch.results, sizeof(found));
		ck_assert(isinf(op->lse[0]) && ((float *)(void *)op->out)[0] == 0);
		rig_run_oracle(&rig);
		for (uint32_t i = 0; i < rig.batch.n_results; i++) {
			const struct kv_result *wanted = &rig.batch.results[i];

			ck_assert_msg(found[i].status == wanted->status && found[i].layer == wanted->layer &&
					found[i].row == wanted->row,
				"value %g, result %u: status %u layer %u row %u, expected %u, %u, %u",
				(double)bad[b], i, found[i].status, found[i].layer, found[i].row,
				wanted->status, wanted->layer, wanted->row);
		}
	}
	rig_finish(&rig);
}
END_TEST

/* Packed rows from outside are checked as the oracle checks them. */
START_TEST(test_cuda_import_refuses_what_the_oracle_refuses)
{
	struct rig rig;
	struct rig_seq seqs[N_SEQS];
	uint32_t n_refused = 0;

	begin_case(&rig, &cases[_i], seqs);
	fill(&rig, seqs);
	for (uint32_t round = 0; round < 24; round++) {
		struct kv_transfer_op *op;
		struct kv_result found[16];
		uint64_t k_bytes, v_bytes;
		int64_t *slots;

		rig_begin(&rig);
		for (uint32_t i = 0; i < 16; i++) {
			op = &rig.batch.transfers[rig.batch.n_transfers++];
			slots = rig_take(&rig, sizeof(*slots));
			slots[0] = slot_of(&rig, &seqs[6], i);
			*op = (struct kv_transfer_op){ .result_idx = rig.batch.n_results++,
				.n_layers = 2,
				.n_tokens = 1,
				.slots = slots,
				.is_import = true };
			op->k = rig_rows(&rig, false, 2, 1, KV_DTYPE_PACKED, &k_bytes);
			op->v = rig_rows(&rig, true, 2, 1, KV_DTYPE_PACKED, &v_bytes);
			/* Zeros are a valid row of every format; then one byte of it is anything. */
			memset(op->k.base, 0, k_bytes);
			memset(op->v.base, 0, v_bytes);
			if (i % 2)
				op->k.base[round % 2 ? k_bytes - 1 - rig_below(&rig, 4)
						     : rig_below(&rig, (uint32_t)k_bytes)] =
					round % 3 ? 0xFF : (uint8_t)rig_below(&rig, 256);
			else
				op->v.base[round % 2 ? v_bytes - 1 - rig_below(&rig, 4)
						     : rig_below(&rig, (uint32_t)v_bytes)] =
					round % 3 ? 0x7F : (uint8_t)rig_below(&rig, 256);
		}
		rig_run_cuda(&rig);
		memcpy(found, rig.batch.results, sizeof(found));
		rig_run_oracle(&rig);
		for (uint32_t i = 0; i < 16; i++) {
			n_refused += found[i].status != KV_OK;
			ck_assert_uint_eq(found[i].status, rig.batch.results[i].status);
			ck_assert_uint_eq(found[i].layer, rig.batch.results[i].layer);
		}
	}
	(void)n_refused;
	rig_finish(&rig);
}
END_TEST

/* The committed known answer. */
START_TEST(test_cuda_selftest)
{
	struct kv_pool_spec *spec = NULL;
	struct kv_backend_pool *pool = NULL;
	struct kv_batch batch, *reaped = NULL;
	struct kv_error err = { .msg = "" };
	uint8_t *area = rig_backend->ops->host_alloc(rig_backend, kv_selftest_area_bytes());

	ck_assert_ptr_nonnull(area);
	ck_assert_uint_eq((uintptr_t)area % 4096, 0);
	ck_assert_msg(kv_selftest_spec_create(&spec, &err) == KV_OK, "%s", err.msg);
	ck_assert_msg(
		rig_backend->ops->pool_create(rig_backend, spec, 0, &pool, &err) == KV_OK, "%s", err.msg);
	for (uint32_t round = 0; round < 3; round++) {
		kv_selftest_fill(spec, pool, area, &batch);
		ck_assert_msg(rig_backend->ops->submit(rig_backend, &batch, &err) == KV_OK, "%s", err.msg);
		while (!(reaped = rig_backend->ops->reap(rig_backend)))
			usleep(20);
		ck_assert_int_eq(reaped->status, KV_OK);
		ck_assert_msg(kv_selftest_check(&batch, &err) == KV_OK, "%s", err.msg);
		printf("self-test: copy in %u us, kernels %u us\n", batch.copy_in_us, batch.kernel_us);
	}
	rig_backend->ops->pool_destroy(rig_backend, pool);
	kv_pool_spec_destroy(spec);
	rig_backend->ops->host_free(rig_backend, area, kv_selftest_area_bytes());
}
END_TEST

static void run_job(struct kv_job *job)
{
	*(uint32_t *)job->user += 1;
}

/* Jobs run in order on the backend's thread and come back; batches do not wait for them. */
START_TEST(test_cuda_jobs)
{
	uint32_t n_run = 0;
	struct kv_job jobs[8];

	for (uint32_t i = 0; i < 8; i++) {
		jobs[i] = (struct kv_job){ .run = run_job, .user = &n_run };
		ck_assert(rig_backend->ops->job_post(rig_backend, &jobs[i]));
	}
	for (uint32_t i = 0; i < 8; i++) {
		struct kv_job *job = NULL;

		while (!(job = rig_backend->ops->job_reap(rig_backend)))
			usleep(100);
		ck_assert_ptr_eq(job, &jobs[i]);
	}
	ck_assert_uint_eq(n_run, 8);
}
END_TEST

#ifdef TEST_ON_HOST
/* Cases that between them run every kernel: rows, both kinds of tiles, each number of heads, head dim and
 * option. */
static const int host_cases[] = { 6, 9, 10, 11, 14, 16, 17, 20, 36, 50, 51, 52, 53, 54, 57, 61, 64, 69, 71,
	73, 75, 76, 78 };
#endif

static void add_attention_tests(TCase *tcase, int first, int end)
{
	tcase_add_loop_test(tcase, test_cuda_decode_is_the_oracles, first, end);
	tcase_add_loop_test(tcase, test_cuda_import_copy_and_order, first, end);
	tcase_add_loop_test(tcase, test_cuda_exact_ring_is_the_oracles, first, end);
	tcase_add_loop_test(tcase, test_cuda_ring_moves_are_the_oracles, first, end);
}

static void add_row_tests(TCase *tcase, int first, int end)
{
	tcase_add_loop_test(tcase, test_cuda_rows_equal_the_oracle, first, end);
	tcase_add_loop_test(tcase, test_cuda_decode_flags, first, end);
	tcase_add_loop_test(tcase, test_cuda_duplicate_and_skipped_slots, first, end);
	tcase_add_loop_test(tcase, test_cuda_slots_one_by_one_and_together, first, end);
	tcase_add_loop_test(tcase, test_cuda_refusals_equal_the_oracles, first, end);
	tcase_add_loop_test(tcase, test_cuda_import_refuses_what_the_oracle_refuses, first, end);
}

/* test_cuda_backend [FIRST [END]]: cases [FIRST, END) only, for tools that slow a program down. */
int main(int argc, char **argv)
{
	struct kv_error err = { .msg = "" };
	Suite *suite = suite_create("cuda_backend");
	TCase *tcase = tcase_create("cuda_backend");
	const int n_cases = sizeof(cases) / sizeof(cases[0]);
	const int first = argc > 1 ? atoi(argv[1]) : 0;
	const int end = argc > 2 && atoi(argv[2]) < n_cases ? atoi(argv[2]) : n_cases;

	if (!rig_start(&err)) {
		printf("%s\n", err.msg);
		return 77;
	}
	setvbuf(stdout, NULL, _IOLBF, 0);
	tcase_set_timeout(tcase, 0);
	tcase_add_test(tcase, test_cuda_jobs);
	tcase_add_test(tcase, test_cuda_selftest);
#ifdef TEST_ON_HOST
	for (size_t i = 0; argc == 1 && i < sizeof(host_cases) / sizeof(host_cases[0]); i++)
		add_attention_tests(tcase, host_cases[i], host_cases[i] + 1);
	if (argc > 1)
		add_attention_tests(tcase, first, end);
	add_row_tests(tcase, argc > 1 ? first : 17, argc > 1 ? end : 18);
	for (int i = 0; argc == 1 && i < 4; i++) {
		static const int more[] = { 64, 9, 71, 78 };

		add_row_tests(tcase, more[i], more[i] + 1);
	}
	/* Bases of parts, of KV heads, and rings beside them. */
	if (argc == 1)
		tcase_add_loop_test(tcase, test_cuda_decode_flags, 66, 68);
#else
	add_attention_tests(tcase, first, end);
	add_row_tests(tcase, first, end);
#endif
	suite_add_tcase(suite, tcase);

	const int rc = kv_test_run(suite, CK_NOFORK);

	rig_stop();
	return rc;
}
