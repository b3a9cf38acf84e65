/*
 * The CUDA backend against the scalar oracle (core/batch_run.h), on one list of cases. Stored bytes are compared
 * without tolerance; outputs by relative L2 error, with bounds that follow from the arithmetic: float32 for rows of
 * any format, float16 tables for the tq4 kernel. Exit 77 without a device. Loop index: the case.
 */
#include "tests/gpu/cuda_rig.h"

#include "core/selftest.h"

#define N_SEQS 9u

static const struct pool_case {
	const char *k, *v;
	uint32_t k_dim, v_dim, q_heads, kv_heads, block_size;
	double bound;
} cases[] = {
	{ "f32", "f32", 64, 64, 4, 2, 16, 2e-5 },
	{ "bf16", "bf16", 128, 128, 8, 2, 16, 2e-5 },
	{ "f16", "f16", 16, 16, 1, 1, 32, 2e-5 },
	{ "fp8", "fp8", 128, 128, 4, 1, 16, 2e-5 },
	{ "f32", "bf16", 64, 256, 6, 2, 64, 2e-5 },
	{ "tq1", "tq1", 128, 128, 4, 2, 16, 2e-5 },
	{ "tq2", "tq2", 128, 128, 8, 2, 16, 5e-3 },
	{ "tq2", "tq2", 128, 128, 16, 2, 32, 5e-3 },
	{ "tq3", "tq3", 128, 128, 32, 8, 16, 1e-2 },
	{ "tq3", "tq3", 128, 128, 10, 2, 64, 1e-2 },
	{ "tq2", "tq2", 64, 64, 8, 2, 16, 2e-5 },
	{ "tq3", "tq3", 64, 64, 8, 2, 16, 2e-5 },
	{ "tq4", "tq4", 128, 128, 32, 8, 16, 2e-3 },
	{ "tq4", "tq4", 128, 128, 8, 8, 32, 2e-3 },
	{ "tq4", "tq4", 128, 128, 16, 2, 64, 3e-3 },
	{ "tq4", "tq4", 128, 128, 24, 2, 16, 3e-3 },
	{ "tq4", "tq4", 128, 128, 6, 2, 16, 2e-3 },
	{ "tq4", "tq4", 64, 64, 4, 2, 16, 2e-3 },
	{ "tq4", "tq4", 64, 64, 16, 2, 32, 3e-3 },
	{ "tq4", "tq4", 64, 64, 9, 3, 64, 2e-3 },
	{ "tq4", "tq2", 128, 128, 4, 2, 16, 2e-5 },
	{ "tq4", "tq4", 32, 32, 2, 2, 16, 2e-5 },
	{ "tq4", "tq4", 256, 256, 4, 2, 16, 2e-5 },
	{ "tq4", "tq4", 80, 80, 4, 2, 16, 2e-5 },
	{ "tq4", "tq4", 96, 96, 3, 1, 32, 2e-5 },
	{ "tq4", "bf16", 128, 48, 1, 1, 32, 2e-5 },
	{ "tq5", "tq6", 64, 64, 4, 2, 16, 2e-5 },
	{ "tq7", "tq8", 112, 112, 4, 2, 16, 2e-5 },
	{ "tq8", "tq8", 256, 256, 2, 1, 64, 2e-5 },
	{ "tq3", "v4", 128, 128, 20, 2, 16, 2e-5 },
	{ "bf16", "v2", 64, 64, 4, 2, 16, 2e-5 },
	{ "bf16", "v3", 80, 80, 4, 2, 16, 2e-5 },
	{ "v8", "v8", 128, 128, 4, 2, 32, 2e-5 },
	{ "tqp2", "tqp3", 128, 128, 8, 2, 16, 2e-5 },
	{ "tqp4", "tqp5", 96, 96, 4, 2, 16, 2e-5 },
	{ "turboquant25", "turboquant25", 128, 128, 8, 2, 16, 2e-5 },
	{ "turboquant35", "turboquant35", 80, 80, 4, 2, 16, 2e-5 },
	{ "turboquant25", "turboquant35", 256, 256, 4, 1, 64, 2e-5 },
	{ "tq3", "tq3", 16, 16, 2, 1, 16, 2e-5 },
};

static const uint32_t lengths[N_SEQS] = { 0, 1, 15, 16, 17, 47, 100, 333, 800 };

struct rig_seq {
	uint32_t n_tokens;
	uint32_t table[64];
};

/* Two layers of one group; every sequence has blocks of its own, in random order. */
static void begin_case(struct rig *rig, const struct pool_case *c, struct rig_seq seqs[N_SEQS])
{
	char json[512];
	uint32_t order[256], n_blocks = 0, n = 0;

	for (uint32_t s = 0; s < N_SEQS; s++)
		n_blocks += lengths[s] / c->block_size + 1;
	snprintf(json, sizeof(json),
		"{\"name\": \"p\", \"layers\": 2, \"q_heads\": %u, \"kv_heads\": %u, \"k_head_dim\": %u, "
		"\"v_head_dim\": %u, \"k\": \"%s\", \"v\": \"%s\", \"block_size\": %u, \"blocks\": %u}",
		c->q_heads, c->kv_heads, c->k_dim, c->v_dim, c->k, c->v, c->block_size, n_blocks + 8);
	rig_init(rig, json, (uint64_t)(c - cases) + 1);
	rig_shuffle(rig, order, n_blocks + 8);
	for (uint32_t s = 0; s < N_SEQS; s++) {
		seqs[s].n_tokens = lengths[s];
		for (uint32_t i = 0; i <= lengths[s] / c->block_size; i++)
			seqs[s].table[i] = order[n++];
	}
}

static int64_t slot_of(const struct rig *rig, const struct rig_seq *seq, uint32_t token)
{
	const uint32_t block_size = rig->spec->block_size;

	return (int64_t)seq->table[token / block_size] * block_size + token % block_size;
}

/* All rows of all sequences in one batch, tokens of each in random order; runs it on both sides. */
static void fill(struct rig *rig, const struct rig_seq seqs[N_SEQS])
{
	static const enum kv_dtype dtypes[] = { KV_DTYPE_BF16, KV_DTYPE_F32, KV_DTYPE_F16 };
	uint32_t order[1024];

	rig_begin(rig);
	for (uint32_t s = 0; s < N_SEQS; s++) {
		const uint32_t n = seqs[s].n_tokens;
		struct kv_update_op *op = &rig->batch.updates[rig->batch.n_updates++];
		int64_t *slots = rig_take(rig, n * sizeof(*slots));
		uint64_t n_bytes;

		rig_shuffle(rig, order, n);
		for (uint32_t t = 0; t < n; t++)
			slots[t] = slot_of(rig, &seqs[s], order[t]);
		*op = (struct kv_update_op){
			.result_idx = rig->batch.n_results++, .n_layers = 2, .n_tokens = n, .slots = slots
		};
		op->k = rig_rows(rig, false, 2, n, dtypes[s % 3], &n_bytes);
		op->v = rig_rows(rig, true, 2, n, dtypes[(s + 1) % 3], &n_bytes);
		rig_draw_rows(rig, &op->k, false, 2 * n * rig->spec->kv_heads);
		rig_draw_rows(rig, &op->v, true, 2 * n * rig->spec->kv_heads);
	}
	rig_run_cuda(rig);
	for (uint32_t i = 0; i < rig->batch.n_results; i++)
		ck_assert_uint_eq(rig->batch.results[i].status, KV_OK);
	rig_run_oracle(rig);
}

/* Reads all rows of one sequence on both sides and compares them without tolerance. */
static void compare_rows(struct rig *rig, const struct rig_seq *seq, enum kv_dtype dtype)
{
	const uint32_t n = seq->n_tokens;
	struct kv_transfer_op *op;
	int64_t *slots;
	uint64_t n_bytes[2];
	uint32_t order[1024];

	if (n == 0)
		return;
	rig_begin(rig);
	op = &rig->batch.transfers[rig->batch.n_transfers++];
	slots = rig_take(rig, n * sizeof(*slots));
	rig_shuffle(rig, order, n);
	for (uint32_t t = 0; t < n; t++)
		slots[t] = slot_of(rig, seq, order[t]);
	*op = (struct kv_transfer_op){
		.result_idx = rig->batch.n_results++, .n_layers = 2, .n_tokens = n, .slots = slots
	};
	op->k = rig_rows(rig, false, 2, n, dtype, &n_bytes[0]);
	op->v = rig_rows(rig, true, 2, n, dtype, &n_bytes[1]);
	for (uint32_t side = 0; side < 2; side++)
		memset(side ? op->v.base : op->k.base, 0xAA, n_bytes[side]);
	rig_run_cuda(rig);

	uint8_t *found[2];

	for (uint32_t side = 0; side < 2; side++) {
		found[side] = malloc(n_bytes[side]);
		memcpy(found[side], side ? op->v.base : op->k.base, n_bytes[side]);
	}
	rig_run_oracle(rig);
	for (uint32_t side = 0; side < 2; side++) {
		const uint8_t *wanted = side ? op->v.base : op->k.base;
		const uint32_t row_bytes = rig_row_bytes(rig, side != 0, 0, dtype);

		for (uint64_t i = 0; i < n_bytes[side]; i++) {
			if (found[side][i] == wanted[i])
				continue;
			ck_abort_msg("%s rows (%s), sequence of %u tokens: row %llu byte %llu of %u is %02x, expected %02x",
				side ? "V" : "K", kv_dtype_name(dtype), n, (unsigned long long)(i / row_bytes),
				(unsigned long long)(i % row_bytes), row_bytes, found[side][i], wanted[i]);
		}
		free(found[side]);
	}
}

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

struct decode_check {
	const struct kv_decode_op *op;
	uint8_t *out;
	float *lse;
};

static struct kv_decode_op *add_decode(
	struct rig *rig, const struct rig_seq *seq, uint32_t layer, uint32_t q_len, uint32_t n_seen, float size)
{
	static const enum kv_dtype dtypes[] = { KV_DTYPE_F32, KV_DTYPE_BF16, KV_DTYPE_F16 };
	const struct kv_pool_spec *spec = rig->spec;
	const size_t n_queries = (size_t)q_len * spec->q_heads;
	const enum kv_dtype q_dtype = dtypes[rig_below(rig, 3)];
	struct kv_decode_op *op = &rig->batch.decodes[rig->batch.n_decodes++];
	float *q = malloc(n_queries * spec->k_head_dim * sizeof(*q));
	uint8_t *stored = rig_take(rig, n_queries * spec->k_head_dim * sizeof(float));
	uint32_t *table = rig_take(rig, sizeof(seq->table));

	memcpy(table, seq->table, sizeof(seq->table));
	for (size_t i = 0; i < n_queries * spec->k_head_dim; i++)
		q[i] = rig_number(rig) * size;
	kv_rows_store(q_dtype, q, n_queries * spec->k_head_dim, stored);
	free(q);
	*op = (struct kv_decode_op){ .result_idx = rig->batch.n_results++,
		.layer = layer,
		.q_len = q_len,
		.n_tokens_seen = n_seen,
		.scale = spec->layers[layer].scale,
		.q_dtype = (uint8_t)q_dtype,
		.out_dtype = KV_DTYPE_F32,
		.table = table,
		.q = stored,
		.out = rig_take(rig, n_queries * spec->v_head_dim * sizeof(float)),
		.lse = rig_take(rig, n_queries * sizeof(float)) };
	memset(op->out, 0xAA, n_queries * spec->v_head_dim * sizeof(float));
	memset(op->lse, 0xAA, n_queries * sizeof(float));
	return op;
}

/* Outputs of the device beside those of the oracle, query by query. */
static double compare_decode(const struct rig *rig, const struct decode_check *check, double bound)
{
	const struct kv_pool_spec *spec = rig->spec;
	const struct kv_decode_op *op = check->op;
	const float *found = (const float *)(const void *)check->out, *wanted = (const float *)(const void *)op->out;
	double worst = 0;

	for (uint32_t query = 0; query < op->q_len * spec->q_heads; query++) {
		double error = 0, norm = 0;

		for (uint32_t i = 0; i < spec->v_head_dim; i++) {
			const double a = (double)found[query * spec->v_head_dim + i];
			const double b = (double)wanted[query * spec->v_head_dim + i];

			error += (a - b) * (a - b);
			norm += b * b;
		}

		const double relative = norm > 0 ? sqrt(error / norm) : sqrt(error);

		if (!(relative <= bound))
			ck_abort_msg("layer %u, %u tokens, window %u, q_len %u, query %u: relative error %g above %g, first "
				     "numbers %g, expected %g",
				op->layer, op->n_tokens_seen, op->window, op->q_len, query, relative, bound,
				(double)found[query * spec->v_head_dim], (double)wanted[query * spec->v_head_dim]);
		worst = relative > worst ? relative : worst;
		if (isinf(op->lse[query]))
			ck_assert(isinf(check->lse[query]) && check->lse[query] < 0);
		else if (!(fabs((double)check->lse[query] - (double)op->lse[query]) <=
				 bound * (1 + fabs((double)op->lse[query]))))
			ck_abort_msg("layer %u, %u tokens, query %u: log-sum-exp %g, expected %g", op->layer,
				op->n_tokens_seen, query, (double)check->lse[query], (double)op->lse[query]);
	}
	return worst;
}

static void run_and_compare_decodes(struct rig *rig, double bound, const char *name)
{
	struct decode_check checks[RIG_OPS_MAX];
	double worst = 0;

	rig_run_cuda(rig);
	for (uint32_t i = 0; i < rig->batch.n_decodes; i++) {
		const struct kv_decode_op *op = &rig->batch.decodes[i];
		const size_t n_queries = (size_t)op->q_len * rig->spec->q_heads;

		ck_assert_msg(rig->batch.results[op->result_idx].status == KV_OK, "decode %u: status %u", i,
			rig->batch.results[op->result_idx].status);
		checks[i] = (struct decode_check){ .op = op,
			.out = malloc(n_queries * rig->spec->v_head_dim * sizeof(float)),
			.lse = malloc(n_queries * sizeof(float)) };
		memcpy(checks[i].out, op->out, n_queries * rig->spec->v_head_dim * sizeof(float));
		memcpy(checks[i].lse, op->lse, n_queries * sizeof(float));
	}
	rig_run_oracle(rig);
	for (uint32_t i = 0; i < rig->batch.n_decodes; i++) {
		const double error = compare_decode(rig, &checks[i], bound);

		worst = error > worst ? error : worst;
		free(checks[i].out);
		free(checks[i].lse);
	}
	printf("%s: worst relative error %.2e of %.0e, kernels %u us\n", name, worst, bound, rig->batch.kernel_us);
}

/* Ragged batches, empty sequences, shorter promised lengths, several query rows, windows, flat and peaked logits. */
START_TEST(test_cuda_decode_is_the_oracles)
{
	const struct pool_case *c = &cases[_i];
	struct rig rig;
	struct rig_seq seqs[N_SEQS];
	char name[128];

	snprintf(name, sizeof(name), "%s/%s d %u/%u heads %u/%u block %u", c->k, c->v, c->k_dim, c->v_dim, c->q_heads,
		c->kv_heads, c->block_size);
	begin_case(&rig, c, seqs);
	fill(&rig, seqs);
	rig_begin(&rig);
	for (uint32_t s = 0; s < N_SEQS; s++)
		add_decode(&rig, &seqs[s], s % 2, 1, seqs[s].n_tokens, 1.0f);
	add_decode(&rig, &seqs[8], 0, 1, 800, 0.01f);
	add_decode(&rig, &seqs[8], 1, 1, 800, 2.5f);
	add_decode(&rig, &seqs[8], 1, 1, 123, 1.0f);
	add_decode(&rig, &seqs[7], 0, 4, 333, 1.0f);
	add_decode(&rig, &seqs[2], 0, 3, 2, 1.0f); /* its first row sees nothing */
	add_decode(&rig, &seqs[8], 0, 1, 800, 1.0f)->window = 1;
	add_decode(&rig, &seqs[8], 0, 1, 800, 1.0f)->window = 100;
	add_decode(&rig, &seqs[8], 0, 2, 800, 1.0f)->window = 600;
	add_decode(&rig, &seqs[8], 0, 1, 800, 1.0f)->window = 5000;
	run_and_compare_decodes(&rig, c->bound, name);
	/* One alone: split differently. */
	rig_begin(&rig);
	add_decode(&rig, &seqs[8], 1, 1, 800, 1.0f);
	run_and_compare_decodes(&rig, c->bound, name);
	rig_begin(&rig);
	add_decode(&rig, &seqs[0], 1, 1, 0, 1.0f);
	run_and_compare_decodes(&rig, c->bound, name);
	rig_finish(&rig);
}
END_TEST

/* Rotated queries in, rotated outputs out; refused where a format has no single basis. */
START_TEST(test_cuda_decode_flags)
{
	const struct pool_case *c = &cases[_i];
	struct rig rig;
	struct rig_seq seqs[N_SEQS];
	struct kv_decode_op *op;

	begin_case(&rig, c, seqs);
	fill(&rig, seqs);
	rig_begin(&rig);
	op = add_decode(&rig, &seqs[7], 0, 1, 333, 1.0f);
	op->flags = KV_DECODE_Q_ROTATED | KV_DECODE_OUT_ROTATED;
	if (kv_row_codec_has_one_basis(rig.spec->layers[0].k) && kv_row_codec_has_one_basis(rig.spec->layers[0].v)) {
		run_and_compare_decodes(&rig, c->bound, "rotated");
	} else {
		rig_run_cuda(&rig);
		ck_assert_uint_eq(rig.batch.results[op->result_idx].status, KV_UNSUPPORTED);
		ck_assert(isinf(op->lse[0]));
	}
	rig_finish(&rig);
}
END_TEST

/* Packed rows imported into other slots, block copies on top of each other, updates and decodes in one batch. */
START_TEST(test_cuda_import_copy_and_order)
{
	const struct pool_case *c = &cases[_i];
	struct rig rig;
	struct rig_seq seqs[N_SEQS], moved;
	struct kv_transfer_op *op;
	uint64_t n_bytes;
	int64_t *slots;

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
	add_decode(&rig, &seqs[8], 0, 1, 800, 1.0f);
	run_and_compare_decodes(&rig, c->bound, "copies");
	compare_rows(&rig, &seqs[8], KV_DTYPE_PACKED);
	rig_finish(&rig);
}
END_TEST

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
			slots[t] = t % 7 == 3 ? -1 - (int64_t)t : slot_of(&rig, &seqs[6], rig_below(&rig, 20));
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

/* A bad row or query is refused with its first layer and row, as the oracle does; others are not touched by it. */
START_TEST(test_cuda_refusals_equal_the_oracles)
{
	static const float bad[] = { NAN, INFINITY, -INFINITY, 3e38f, 65520.0f, 1e30f };
	struct rig rig;
	struct rig_seq seqs[N_SEQS];

	begin_case(&rig, &cases[_i], seqs);
	fill(&rig, seqs);
	for (uint32_t b = 0; b < sizeof(bad) / sizeof(bad[0]); b++) {
		struct kv_result found[8];
		uint64_t n_bytes;

		rig_begin(&rig);
		for (uint32_t s = 5; s < 8; s++) {
			const uint32_t n = seqs[s].n_tokens;
			struct kv_update_op *op = &rig.batch.updates[rig.batch.n_updates++];
			int64_t *slots = rig_take(&rig, n * sizeof(*slots));

			for (uint32_t t = 0; t < n; t++)
				slots[t] = slot_of(&rig, &seqs[s], t);
			*op = (struct kv_update_op){
				.result_idx = rig.batch.n_results++, .n_layers = 2, .n_tokens = n, .slots = slots
			};
			op->k = rig_rows(&rig, false, 2, n, KV_DTYPE_F32, &n_bytes);
			op->v = rig_rows(&rig, true, 2, n, KV_DTYPE_F32, &n_bytes);
			rig_draw_rows(&rig, &op->k, false, 2 * n * rig.spec->kv_heads);
			rig_draw_rows(&rig, &op->v, true, 2 * n * rig.spec->kv_heads);
			for (uint32_t i = 0; s != 6 && i < 5; i++) {
				const struct kv_rows *rows = i % 2 ? &op->v : &op->k;
				const uint32_t dim = i % 2 ? rig.spec->v_head_dim : rig.spec->k_head_dim;
				const size_t n_values = (size_t)2 * n * rig.spec->kv_heads * dim;

				memcpy(rows->base + 4 * (size_t)rig_below(&rig, (uint32_t)n_values), &bad[b], 4);
			}
		}
		struct kv_decode_op *op = add_decode(&rig, &seqs[4], 1, 3, 17, 1.0f);

		memset((uint8_t *)(uintptr_t)op->q +
				(size_t)rig.spec->q_heads * rig.spec->k_head_dim * kv_dtype_bytes(op->q_dtype),
			0xFF, 4); /* NaN in every dtype, in row 1 */
		rig_run_cuda(&rig);
		memcpy(found, rig.batch.results, sizeof(found));
		ck_assert(isinf(op->lse[0]) && ((float *)(void *)op->out)[0] == 0);
		rig_run_oracle(&rig);
		for (uint32_t i = 0; i < rig.batch.n_results; i++) {
			const struct kv_result *wanted = &rig.batch.results[i];

			ck_assert_msg(found[i].status == wanted->status && found[i].layer == wanted->layer &&
					found[i].row == wanted->row,
				"value %g, result %u: status %u layer %u row %u, expected %u, %u, %u", (double)bad[b], i,
				found[i].status, found[i].layer, found[i].row, wanted->status, wanted->layer, wanted->row);
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
				op->k.base[round % 2 ? k_bytes - 1 - rig_below(&rig, 4) : rig_below(&rig, (uint32_t)k_bytes)] =
					round % 3 ? 0xFF : (uint8_t)rig_below(&rig, 256);
			else
				op->v.base[round % 2 ? v_bytes - 1 - rig_below(&rig, 4) : rig_below(&rig, (uint32_t)v_bytes)] =
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
	ck_assert_msg(rig_backend->ops->pool_create(rig_backend, spec, 0, &pool, &err) == KV_OK, "%s", err.msg);
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
	tcase_add_loop_test(tcase, test_cuda_rows_equal_the_oracle, first, end);
	tcase_add_loop_test(tcase, test_cuda_decode_is_the_oracles, first, end);
	tcase_add_loop_test(tcase, test_cuda_decode_flags, first, end);
	tcase_add_loop_test(tcase, test_cuda_import_copy_and_order, first, end);
	tcase_add_loop_test(tcase, test_cuda_duplicate_and_skipped_slots, first, end);
	tcase_add_loop_test(tcase, test_cuda_refusals_equal_the_oracles, first, end);
	tcase_add_loop_test(tcase, test_cuda_import_refuses_what_the_oracle_refuses, first, end);
	suite_add_tcase(suite, tcase);

	const int rc = kv_test_run(suite, CK_NOFORK);

	rig_stop();
	return rc;
}
