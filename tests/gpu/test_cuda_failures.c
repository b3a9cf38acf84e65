/*
 * What went wrong elsewhere, and must not here: the rows of FAILURES that are a GPU's. Exit 77 without a
 * device. On fibers (TEST_ON_HOST) the same tests take fewer rounds. Of K4 every run takes a slice that is
 * another one.
 *
 * test_cuda_failures [SLICE [STRIDE]]: that slice; of K4 every STRIDE-th of 5250 combinations, 1: all.
 */
#include <time.h>

#include "core/attention.h"
#include "tests/gpu/cuda_cases.h"
#include "tests/lib/pairs.h"
#ifdef TEST_ON_HOST
#include "tests/gpu/host/cuda_runtime_api.h"
#include "tests/gpu/host/fibers.h"
#endif

#ifdef TEST_ON_HOST
#define N_RACES      40u
#define K4_STRIDE    331u
#define PAIRS_STRIDE 41u
#define K7_STRIDE    23u
#else
#define N_RACES      100000u
#define K4_STRIDE    13u
#define PAIRS_STRIDE 1u
#define K7_STRIDE    1u
#endif
static uint32_t slice, k4_stride = K4_STRIDE;

static const struct far_pool {
	const char *k, *v;
	uint32_t n_blocks, n_ring_blocks;
	double bound;
} far_pools[] = {
	{ "tq4", "tq4", 300000, 0, 2e-3 },  /* of 17 408 bytes */
	{ "tq3", "tq3", 330000, 0, 5e-3 },  /* 13 312 */
	{ "tq2", "tq2", 480000, 0, 5e-3 },  /* 9216 */
	{ "tq4", "tq2", 330000, 0, 3e-3 },  /* 13 312 */
	{ "f32", "f32", 70000, 0, 2e-5 },   /* twice 65 536 */
	{ "tq5", "tq5", 16, 140000, 2e-5 }, /* twice 32 768 of the ring */
};

#define FAR_TOKENS 33u

/* Tokens of both kinds of blocks at the end of the pool (far) or at its beginning. */
static struct rig_seq far_seq(const struct far_pool *far, bool is_far)
{
	struct rig_seq seq = { .n_tokens = FAR_TOKENS, .exact_lo = far->n_ring_blocks ? 17 : FAR_TOKENS };

	for (uint32_t b = 0; b < 3; b++)
		seq.table[b] = is_far ? far->n_blocks - 1 - b : b;
	for (uint32_t b = 0; b < EXACT_TOKENS / 16; b++)
		seq.ring[b] = is_far ? far->n_ring_blocks - 1 - b : b;
	return seq;
}

/* Bits of one decode of all tokens, the newest of the ring where there is one. */
static uint64_t decode_far(struct rig *rig, const struct rig_seq *seq, uint8_t *kept)
{
	const size_t n_bytes = (size_t)rig->spec->q_heads * rig->spec->v_head_dim * sizeof(float);
	uint32_t *ring;
	struct kv_decode_op *op;

	rig_begin(rig);
	rig->seed = 4711;
	op = add_decode(rig, seq, 0, 1, FAR_TOKENS, 1.0f);
	op->exact_table = NULL;
	if (seq->exact_lo < FAR_TOKENS) {
		ring = rig_take(rig, 3 * sizeof(*ring));
		for (uint32_t b = seq->exact_lo / 16; b < 3; b++)
			ring[b - seq->exact_lo / 16] = seq->ring[b];
		memcpy((uint32_t *)(uintptr_t)op->table, seq->table, sizeof(seq->table));
		op->exact_lo = seq->exact_lo;
		op->exact_table = ring;
	}
	rig_run_cuda(rig);
	ck_assert_uint_eq(rig->batch.results[op->result_idx].status, KV_OK);
	memcpy(kept, op->out, n_bytes);
	return n_bytes;
}

/*
 * K1: blocks beyond 2^32 bytes of every layout, and ring blocks there, give what the same rows give in the
 * first blocks, bit for bit, after a copy across, too; and both are the oracle's.
 */
START_TEST(test_cuda_far_pages)
{
	static uint8_t near_out[64 * 1024], far_out[64 * 1024];
	const struct far_pool *far = &far_pools[_i];
	struct rig_seq near_seq = far_seq(far, false), seq = far_seq(far, true), copied = near_seq;
	struct rig rig;
	char json[512], ring[64] = "";
	uint64_t n_bytes;

	if (far->n_ring_blocks)
		snprintf(ring, sizeof(ring), ", \"exact_tokens\": %u, \"exact_blocks\": %u", EXACT_TOKENS,
			far->n_ring_blocks);
	snprintf(json, sizeof(json),
		"{\"name\": \"p\", \"layers\": 1, \"q_heads\": 8, \"kv_heads\": 8, \"head_dim\": 128, \"k\": "
		"\"%s\", \"v\": \"%s\", \"block_size\": 16, \"blocks\": %u%s}",
		far->k, far->v, far->n_blocks, ring);
	rig_init(&rig, json, 99);
	rig_begin(&rig);
	for (uint32_t s = 0; s < 2; s++) {
		rig.seed = 99; /* the same rows */
		add_update(&rig, s ? &seq : &near_seq, 0, FAR_TOKENS, KV_DTYPE_F32, KV_DTYPE_F32);
	}
	for (uint32_t s = 0; s < 2; s++)
		add_decode(&rig, s ? &seq : &near_seq, 0, 1, FAR_TOKENS, 1.0f);
	run_and_compare_decodes(&rig, far->bound, "far pages");
	compare_rows(&rig, &near_seq, KV_DTYPE_PACKED);
	compare_rows(&rig, &seq, KV_DTYPE_PACKED);
	n_bytes = decode_far(&rig, &near_seq, near_out);
	ck_assert_uint_eq(decode_far(&rig, &seq, far_out), n_bytes);
	ck_assert_mem_eq(near_out, far_out, n_bytes);
	/* From the end to places behind the first blocks. */
	rig_begin(&rig);
	rig.batch.n_copies = 3;
	for (uint32_t b = 0; b < 3; b++) {
		copied.table[b] = 5 + b;
		rig.copies[b] = (struct kv_copy_op){ 0, seq.table[b], copied.table[b] };
	}
	rig_run_cuda(&rig);
	decode_far(&rig, &copied, far_out);
	ck_assert_mem_eq(near_out, far_out, n_bytes);
	rig_finish(&rig);
}
END_TEST

/*
 * K4: every pair of widths, head dim, number of query heads of a KV head and block size; values of 2 to 8
 * bits in turn as affine codes and as what keys have.
 */
static const uint32_t k4_dims[] = { 64, 80, 96, 112, 128, 192, 256 };
static const uint32_t k4_groups[] = { 1, 2, 3, 4, 5, 6, 7, 8, 12, 16 };
#define K4_CASES (5u * 5 * 7 * 10 * 3)

static struct pool_case k4_case(uint32_t idx)
{
	static const char *const k_formats[] = { "bf16", "fp8", "tq4", "tq3", "tq2" };
	static const char *const v_formats[][2] = { { "bf16", "bf16" }, { "v8", "fp8" }, { "v4", "tq4" },
		{ "v3", "tq3" }, { "v2", "tq2" } };
	const uint32_t k = idx % 5, v = idx / 5 % 5, dim = k4_dims[idx / 25 % 7];
	const bool may_be_tiles = k >= 2 && v >= 2;

	return (struct pool_case){ .k = k_formats[k],
		.v = v_formats[v][may_be_tiles || idx % 2],
		.k_dim = dim,
		.v_dim = dim,
		.q_heads = 2 * k4_groups[idx / 175 % 10],
		.kv_heads = 2,
		.block_size = 16u << idx / 1750,
		.bound = 5e-3 };
}

START_TEST(test_k4_every_combination_or_a_refusal)
{
	const struct pool_case c = k4_case((uint32_t)_i * k4_stride + slice % k4_stride);
	struct rig rig;
	struct rig_seq seqs[N_SEQS];
	char name[96];

	snprintf(name, sizeof(name), "%s/%s d %u heads %u/%u block %u", c.k, c.v, c.k_dim, c.q_heads,
		c.kv_heads, c.block_size);
	begin_case(&rig, &c, seqs);
	for (uint32_t s = 6; s < N_SEQS; s++)
		seqs[s].n_tokens = 0; /* what takes longest */
	fill(&rig, seqs);
	rig_begin(&rig);
	for (uint32_t s = 0; s < 6; s++)
		add_decode(&rig, &seqs[s], s % 2, 1, seqs[s].n_tokens, 1.0f);
	run_and_compare_decodes(&rig, c.bound, name);
	rig_finish(&rig);
}
END_TEST

enum { K_FORMAT, V_FORMAT, K_DIM, V_DIM, GROUP, BLOCK, OPTIONS, ROTATED, N_FACTORS };

static const uint32_t pair_dims[] = { 64, 16, 48, 80, 96, 112, 128, 192, 256 };
static const uint32_t pair_groups[] = { 1, 2, 3, 4, 5, 6, 7, 8, 12, 16 };
static const uint32_t pair_options[] = { EXACT, 0, SOFTCAP, SINKS, ALIBI, SINK_TOKENS, K_CENTER,
	EXACT | SOFTCAP | SINKS | ALIBI | SINK_TOKENS | K_CENTER };

/* Queries and outputs in the rows' basis: neither, either, both. */
static const uint8_t pair_rotated[] = { 0, KV_DECODE_Q_ROTATED, KV_DECODE_OUT_ROTATED,
	KV_DECODE_Q_ROTATED | KV_DECODE_OUT_ROTATED };

/* A format is not served at every dim. */
static bool may_meet(uint32_t factor, uint32_t value, uint32_t other, uint32_t other_value)
{
	const bool is_dim = (factor == K_FORMAT && other == K_DIM) || (factor == V_FORMAT && other == V_DIM);

	return !is_dim || kv_format_check(kv_format_at(value), pair_dims[other_value], NULL) == KV_OK;
}

/*
 * K4: every two of a format of K, one of V, their dims, a number of query heads, a block size, options,
 * the exact window among them, and rotated queries or outputs meet in a pool that answers as the oracle does.
 * Rows of any format are float32 sums (2e-5); tiles round as in the list of cases.
 */
START_TEST(test_k4_every_pair)
{
	const uint32_t n_values[N_FACTORS] = { kv_format_count(), kv_format_count(), KV_LENGTH(pair_dims),
		KV_LENGTH(pair_dims), KV_LENGTH(pair_groups), 3, KV_LENGTH(pair_options),
		KV_LENGTH(pair_rotated) };
	struct pairs pairs;
	uint32_t cell[N_FACTORS];

	pairs_init(&pairs, N_FACTORS, n_values, may_meet);
	while (pairs_next(&pairs, cell)) {
		const uint32_t k_dim = pair_dims[cell[K_DIM]], v_dim = pair_dims[cell[V_DIM]];
		const char *k = kv_format_at(cell[K_FORMAT])->name, *v = kv_format_at(cell[V_FORMAT])->name;
		const struct pool_case c = { .k = k,
			.v = v,
			.k_dim = k_dim,
			.v_dim = v_dim,
			.q_heads = 2 * pair_groups[cell[GROUP]],
			.kv_heads = 2,
			.block_size = 16u << cell[BLOCK],
			.bound = bound_of_pair(k, v, k_dim, v_dim),
			.options = pair_options[cell[OPTIONS]] };
		struct rig rig;
		struct rig_seq seqs[N_SEQS];
		char name[96];

		if (pairs.n_rows % PAIRS_STRIDE != slice % PAIRS_STRIDE)
			continue;
		snprintf(name, sizeof(name), "%s/%s d %u/%u heads %u/%u block %u options %u", c.k, c.v,
			c.k_dim, c.v_dim, c.q_heads, c.kv_heads, c.block_size, c.options);
		begin_case(&rig, &c, seqs);
		fill(&rig, seqs);
		rig_begin(&rig);
		for (uint32_t s = 1; s < 8; s += 2)
			add_decode(&rig, &seqs[s], s / 2 % 2, 1, seqs[s].n_tokens, 1.0f);
		add_decode(&rig, &seqs[7], 0, 3, LONGER - 5, 1.0f);
		for (uint32_t i = 1; i < rig.batch.n_decodes; i++)
			rig.batch.decodes[i].flags = pair_rotated[cell[ROTATED]];
		run_and_compare_decodes(&rig, c.bound, name);
		rig_finish(&rig);
	}
	printf("%u cells, every %u-th of them, slice %u\n", pairs.n_rows, PAIRS_STRIDE, slice);
	ck_assert_uint_eq(pairs.n_left, 0);
}
END_TEST

static uint64_t arena_bytes_of(json_t *json)
{
	struct kv_pool_spec *spec = NULL;
	struct kv_error err = { .msg = "" };
	uint64_t n_bytes = 0;

	ck_assert_msg(kv_pool_spec_create(json, &spec, &err) == KV_OK, "%s", err.msg);
	ck_assert_msg(
		rig_backend->ops->pool_check(rig_backend, spec, &n_bytes, &err) == KV_OK, "%s", err.msg);
	kv_pool_spec_destroy(spec);
	return n_bytes;
}

/*
 * K4: a pool with every option of attention at once is served, and taken into account when it is made: its
 * ring blocks are in the bytes that it takes of the arena.
 */
START_TEST(test_k4_every_option_is_known_when_the_pool_is_made)
{
	const uint64_t n_ring_bytes =
		2ull * 3 * 5 * 16 * 2 * 64 * 2; /* K and V, layers, blocks, tokens, heads */
	json_t *json = json_pack("{s:s, s:i, s:i, s:i, s:i, s:s, s:s, s:i, s:i, s:i, s:f, s:f}", "name", "p",
		"layers", 3, "q_heads", 4, "kv_heads", 2, "head_dim", 64, "k", "tq4", "v", "tq4",
		"block_size", 16, "blocks", 8, "window", 40, "softcap", 30.0, "scale", 0.1);
	uint64_t n_bytes;

	json_object_set_new(json, "sink_tokens", json_integer(4));
	json_object_set_new(json, "sinks", json_pack("[f, f, f, f]", 0.0, 1.0, -1.0, 2.0));
	json_object_set_new(json, "alibi", json_pack("[f, f, f, f]", 0.5, 0.25, 0.125, 0.0625));
	n_bytes = arena_bytes_of(json);
	json_object_set_new(json, "exact_tokens", json_integer(32));
	json_object_set_new(json, "exact_blocks", json_integer(5));
	ck_assert_uint_ge(arena_bytes_of(json), n_bytes + n_ring_bytes);
	ck_assert_uint_le(arena_bytes_of(json), n_bytes + n_ring_bytes + 4 * 4096);
	json_decref(json);
}
END_TEST

/* Bits of one decode. */
static uint64_t decode_alone(struct rig *rig, const struct rig_seq *seq, uint8_t *kept)
{
	const size_t n_bytes = (size_t)rig->spec->q_heads * rig->spec->v_head_dim * sizeof(float);
	const uint64_t seed = rig->seed;
	struct kv_decode_op *op;

	rig_begin(rig);
	rig->seed = 4711;
	op = add_decode(rig, seq, 0, 1, seq->n_tokens, 1.0f);
	rig->seed = seed;
	rig_run_cuda(rig);
	memcpy(kept, op->out, n_bytes);
	return n_bytes;
}

/* Row `row` of the item as an item of its own, over a history that is as much shorter. */
static struct kv_decode_op *add_row(struct rig *rig, const struct kv_decode_op *whole, uint32_t row)
{
	const struct kv_pool_spec *spec = rig->spec;
	const uint64_t query_bytes =
		(uint64_t)spec->q_heads * spec->k_head_dim * kv_dtype_bytes((enum kv_dtype)whole->q_dtype);
	struct kv_decode_op *op = &rig->batch.decodes[rig->batch.n_decodes++];

	*op = *whole;
	op->result_idx = rig->batch.n_results++;
	op->q_len = 1;
	op->n_tokens_seen = whole->n_tokens_seen - whole->q_len + 1 + row;
	op->q = whole->q + row * query_bytes;
	op->out = rig_take(rig, (uint64_t)spec->q_heads * spec->v_head_dim * sizeof(float));
	op->lse = rig_take(rig, spec->q_heads * sizeof(float));
	if (op->exact_lo >= op->n_tokens_seen)
		op->exact_table = NULL;
	return op;
}

/*
 * K7: q_len 1 to 8 over a history are as many decodes of one row, within twice the bound of the kernel; and
 * each row sees what the oracle's row sees, within the bound.
 */
START_TEST(test_k7_rows_are_separate_decodes)
{
	const struct pool_case *c = &cases[(uint32_t)_i * K7_STRIDE + slice % K7_STRIDE];
	struct decode_check checks[8];
	const struct kv_decode_op *whole[8];
	struct rig rig;
	struct rig_seq seqs[N_SEQS];

	begin_case(&rig, c, seqs);
	fill(&rig, seqs);
	rig_begin(&rig);
	for (uint32_t n = 1; n <= 8; n++) {
		whole[n - 1] = add_decode(&rig, &seqs[7], n % 2, n, seqs[7].n_tokens, 1.0f);
		for (uint32_t row = 0; row < n; row++)
			add_row(&rig, whole[n - 1], row);
	}
	run_and_compare_decodes(&rig, c->bound, "rows");
	rig_run_cuda(&rig);
	for (uint32_t n = 1; n <= 8; n++) {
		for (uint32_t row = 0; row < n; row++) {
			/* Rows follow their item in the list. */
			const struct kv_decode_op *op = whole[n - 1] + 1 + row;
			const size_t at = (size_t)row * rig.spec->q_heads;

			checks[row] = (struct decode_check){ .op = op,
				.out = whole[n - 1]->out + at * rig.spec->v_head_dim * sizeof(float),
				.lse = whole[n - 1]->lse + at };
			compare_decode(&rig, &checks[row], 2 * c->bound);
		}
	}
	rig_finish(&rig);
}
END_TEST

/* K8: nothing grows with the largest batch, so a batch of one gives the same bits before and after it. */
START_TEST(test_k8_same_bits_after_larger_batches)
{
	static uint8_t before[64 * 1024], after[64 * 1024];
	struct rig rig;
	struct rig_seq seqs[N_SEQS];
	uint64_t n_bytes;

	begin_case(&rig, &cases[_i], seqs);
	fill(&rig, seqs);
	n_bytes = decode_alone(&rig, &seqs[8], before);
	for (uint32_t n = 1; n <= (LONGEST > 500 ? RIG_OPS_MAX : 16u); n *= 2) {
		rig_begin(&rig);
		for (uint32_t i = 0; i < n; i++)
			add_decode(&rig, &seqs[i % N_SEQS], i % 2, 1, seqs[i % N_SEQS].n_tokens, 1.0f);
		rig_run_cuda(&rig);
	}
	ck_assert_uint_eq(decode_alone(&rig, &seqs[8], after), n_bytes);
	ck_assert_mem_eq(before, after, n_bytes);
	rig_finish(&rig);
}
END_TEST

/* K12: two batches are on their way at once; what the second reads and copies is what the first wrote. */
START_TEST(test_k12_reads_wait_for_writes)
{
	const struct pool_case *c = &cases[_i];
	struct rig rig;
	struct rig_seq seqs[N_SEQS];
	struct kv_batch second;
	struct kv_error err = { .msg = "" };
	struct kv_transfer_op *read;
	struct kv_update_op *write;
	struct kv_rows rows[4];
	int64_t *slots;
	uint64_t n_bytes;

	begin_case(&rig, c, seqs);
	rig_begin(&rig);
	slots = rig_take(&rig, 2 * 16 * sizeof(*slots));
	for (uint32_t t = 0; t < 16; t++) {
		slots[t] = slot_of(&rig, &seqs[8], t);
		slots[16 + t] = slot_of(&rig, &seqs[8], t + 2 * rig.spec->block_size);
	}
	for (uint32_t i = 0; i < 4; i++)
		rows[i] = rig_rows(&rig, i % 2, 2, 16, KV_DTYPE_PACKED, &n_bytes);
	for (uint32_t i = 0; i < 4; i++)
		memset(rows[i].base, 0,
			2 * 16 * rig.spec->kv_heads * rig_row_bytes(&rig, i % 2, 0, KV_DTYPE_PACKED));
	n_bytes = 2 * 16 * (uint64_t)rig.spec->kv_heads * rig_row_bytes(&rig, false, 0, KV_DTYPE_PACKED);
	write = &rig.batch.updates[rig.batch.n_updates++];
	*write = (struct kv_update_op){ .result_idx = rig.batch.n_results++,
		.n_layers = 2,
		.n_tokens = 16,
		.slots = slots,
		.k = rows[0],
		.v = rows[1] };
	second = rig.batch;
	second.n_updates = 0;
	second.results = rig_take(&rig, sizeof(*second.results));
	rig.copies[0] = (struct kv_copy_op){ 0, seqs[8].table[0], seqs[8].table[2] };
	second.n_copies = second.n_results = second.n_transfers = 1;
	read = &second.transfers[0];
	*read = (struct kv_transfer_op){
		.n_layers = 2, .n_tokens = 16, .slots = slots + 16, .k = rows[2], .v = rows[3]
	};
	for (uint32_t round = 0; round < N_RACES; round++) {
		/* Codes of any value are rows of tq4; norms stay 0. */
		for (uint32_t r = 0; r < 2 * 16 * rig.spec->kv_heads; r++)
			memset(rows[0].base + (size_t)r * rig_row_bytes(&rig, false, 0, KV_DTYPE_PACKED),
				(int)(round + r) & 0xFF, 8);
		rig_reset_results(&rig);
		second.results[0] = (struct kv_result){ KV_OK, KV_LAYER_NONE, KV_ROW_NONE };
		ck_assert_int_eq(rig_backend->ops->submit(rig_backend, &rig.batch, &err), KV_OK);
		ck_assert_int_eq(rig_backend->ops->submit(rig_backend, &second, &err), KV_OK);
		for (uint32_t n = 0; n < 2;)
			n += rig_backend->ops->reap(rig_backend) != NULL;
		ck_assert_int_eq(second.results[0].status, KV_OK);
		ck_assert_msg(memcmp(rows[0].base, rows[2].base, n_bytes) == 0, "round %u: old rows", round);
	}
	rig_finish(&rig);
}
END_TEST

#ifdef TEST_ON_HOST
/* Alternating shapes, sleeping before some of them. */
static void run_some(struct rig *rig, const struct rig_seq seqs[N_SEQS], uint32_t n_batches)
{
	for (uint32_t i = 0; i < n_batches; i++) {
		rig_begin(rig);
		for (uint32_t s = 1; s < 1 + i % N_SEQS; s++)
			add_update(rig, &seqs[s], 0, seqs[s].n_tokens, KV_DTYPE_F32, KV_DTYPE_BF16);
		for (uint32_t s = 0; s < i * 7 % 20; s++)
			add_decode(rig, &seqs[s % N_SEQS], s % 2, 1, seqs[s % N_SEQS].n_tokens, 1.0f);
		rig->batch.n_copies = i % 3;
		for (uint32_t c = 0; c < i % 3; c++)
			rig->copies[c] = (struct kv_copy_op){ 0, seqs[8].table[c], seqs[0].table[c] };
		if (i % 2)
			rig_backend->ops->will_sleep(rig_backend);
		rig_run_cuda(rig);
	}
}

/*
 * What a batch may not need: memory of either side, pinned pages, streams, events, a wait for the device. And
 * its kernels are as many as its kinds of work, however many sequences and layers there are: begin, updates,
 * the three of a wave, end.
 */
START_TEST(test_cuda_steady_state)
{
	struct rig rig;
	struct rig_seq seqs[N_SEQS];
	uint64_t n_setups, n_allocs, n_runs, n_kernels[2];

	begin_case(&rig, &cases[17], seqs);
	fill(&rig, seqs);
	run_some(&rig, seqs, 3);
	n_setups = fake_device_n_setups;
	n_allocs = kv_alloc_count();
	ck_assert_uint_gt(n_setups, 0);
	run_some(&rig, seqs, 40);
	ck_assert_uint_eq(fake_device_n_setups, n_setups);
	ck_assert_uint_eq(kv_alloc_count(), n_allocs);
	for (uint32_t many = 0; many < 2; many++) {
		rig_begin(&rig);
		for (uint32_t s = many ? 1 : 8; s < N_SEQS; s++) {
			add_update(&rig, &seqs[s], 0, seqs[s].n_tokens, KV_DTYPE_F32, KV_DTYPE_BF16);
			add_decode(&rig, &seqs[s], s % 2, 1, seqs[s].n_tokens, 1.0f);
		}
		n_runs = fibers_n_runs;
		rig_run_cuda(&rig);
		n_kernels[many] = fibers_n_runs - n_runs;
	}
	ck_assert_uint_eq(n_kernels[0], 6);
	ck_assert_uint_eq(n_kernels[1], n_kernels[0]);
	rig_finish(&rig);
}
END_TEST
#endif

/* W12: more than the device has is refused with wanted and free bytes. */
START_TEST(test_cuda_arena_too_large)
{
	struct kv_backend *backend = NULL;
	struct kv_error err = { .msg = "" };

	ck_assert_msg(kvg_backend_cuda_create(0, &backend, &err) == KV_OK, "%s", err.msg);
	ck_assert_int_eq(backend->ops->arena_create(backend, 1ull << 50, &err), KV_NO_MEMORY);
	ck_assert_ptr_nonnull(strstr(err.msg, "1125899906842624 bytes wanted"));
	ck_assert_ptr_nonnull(strstr(err.msg, "bytes of device memory are free"));
	/* The error did not stick. */
	ck_assert_int_eq(backend->ops->arena_create(backend, 1 << 20, &err), KV_OK);
	backend->ops->destroy(backend);
	ck_assert_int_eq(kvg_backend_cuda_create(99, &backend, &err), KV_UNAVAILABLE);
}
END_TEST

/*
 * M5: a kernel that faults poisons the context: its batch and all later ones come back as DEVICE_LOST, the
 * descriptor wakes the loop although the driver calls nobody any more, and destroying does not hang. The last
 * test: nothing works afterwards.
 */
START_TEST(test_cuda_lost_device)
{
	struct rig rig;
	struct rig_seq seqs[N_SEQS];
	struct pollfd finished = { .fd = rig_backend->ops->event_fd(rig_backend), .events = POLLIN };
	struct kv_batch *reaped = NULL;
	struct kv_error err = { .msg = "" };
	uint64_t count;

	begin_case(&rig, &cases[0], seqs);
	rig_begin(&rig);
#ifdef TEST_ON_HOST
	setenv("TQKV_FAKE_CUDA_FAIL", "0", 1);
	add_decode(&rig, &seqs[0], 0, 1, 0, 1.0f);
#else
	add_decode(&rig, &seqs[0], 0, 1, 0, 1.0f)->out = (uint8_t *)(uintptr_t)4096;
#endif
	rig_reset_results(&rig);
	ck_assert_int_eq(rig_backend->ops->submit(rig_backend, &rig.batch, &err), KV_OK);
	while (!(reaped = rig_backend->ops->reap(rig_backend))) {
		rig_backend->ops->will_sleep(rig_backend);
		ck_assert_int_eq(poll(&finished, 1, 5000), 1);
		(void)!read(finished.fd, &count, sizeof(count));
	}
	ck_assert_int_eq(reaped->status, KV_DEVICE_LOST);
	ck_assert_int_eq(rig_backend->ops->submit(rig_backend, &rig.batch, &err), KV_DEVICE_LOST);
	ck_assert_ptr_null(rig_backend->ops->reap(rig_backend));
}
END_TEST

int main(int argc, char **argv)
{
	struct kv_error err = { .msg = "" };
	Suite *suite = suite_create("cuda_failures");
	TCase *tcase = tcase_create("cuda_failures"), *lost = tcase_create("lost device");

	if (!rig_start(&err)) {
		printf("%s\n", err.msg);
		return 77;
	}
	setvbuf(stdout, NULL, _IOLBF, 0);
	slice = argc > 1 ? (uint32_t)atoi(argv[1]) : (uint32_t)time(NULL) % 1000;
	k4_stride = argc > 2 && atoi(argv[2]) > 0 ? (uint32_t)atoi(argv[2]) : K4_STRIDE;
	tcase_set_timeout(tcase, 0);
	tcase_add_loop_test(tcase, test_cuda_far_pages, 0, (int)KV_LENGTH(far_pools));
	tcase_add_loop_test(tcase, test_k4_every_combination_or_a_refusal, 0, (int)(K4_CASES / k4_stride));
	tcase_add_test(tcase, test_k4_every_pair);
	tcase_add_test(tcase, test_k4_every_option_is_known_when_the_pool_is_made);
	tcase_add_loop_test(tcase, test_k7_rows_are_separate_decodes, 0, (int)(KV_LENGTH(cases) / K7_STRIDE));
	tcase_add_loop_test(tcase, test_k8_same_bits_after_larger_batches, 15, 18);
	tcase_add_loop_test(tcase, test_k12_reads_wait_for_writes, 17, 18);
#ifdef TEST_ON_HOST
	tcase_add_test(tcase, test_cuda_steady_state);
#endif
	tcase_add_test(tcase, test_cuda_arena_too_large);
	tcase_add_test(lost, test_cuda_lost_device);
	suite_add_tcase(suite, tcase);
	suite_add_tcase(suite, lost);

	const int rc = kv_test_run(suite, CK_NOFORK);

	rig_stop();
	return rc;
}
