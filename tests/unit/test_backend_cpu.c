/*
 * The CPU backend against attention computed another way. Loop index: number of worker threads, 0 = none;
 * every test holds for all of them.
 */
#include <inttypes.h>
#include <stdio.h>
#include <unistd.h>

#include "core/batch_run.h"
#include "tests/lib/batch_rig.h"

#define N_THREADS_TRIED 4

/* Two groups, GQA 3, K and V of different dims. */
static const char pool_f32[] = "{\"name\": \"p\", \"layers\": 3, \"q_heads\": 6, \"kv_heads\": 2, "
			       "\"k_head_dim\": 64, \"v_head_dim\": 32, \"k\": \"f32\", \"v\": \"f32\", "
			       "\"block_size\": 16, \"blocks\": 24, \"groups\": [[0, 2], [1]]}";
static const char pool_tq4[] =
	"{\"name\": \"p\", \"layers\": 2, \"q_heads\": 20, \"kv_heads\": 2, "
	"\"head_dim\": 64, \"k\": \"tq4\", \"v\": \"tq4\", \"block_size\": 16, \"blocks\": 24}";
static const char pool_mixed[] = "{\"name\": \"p\", \"layers\": 2, \"q_heads\": 1, \"kv_heads\": 1, "
				 "\"k_head_dim\": 128, \"v_head_dim\": 48, \"k\": \"tq4\", \"v\": \"bf16\", "
				 "\"block_size\": 32, \"blocks\": 12}";

/* Rows appended in pieces, in the same batch or earlier, are seen by decodes of every layer, group and head.
 */
START_TEST(test_backend_cpu_decode_is_attention)
{
	static const char *const pools[] = { pool_f32, pool_tq4, pool_mixed };

	for (size_t p = 0; p < 3; p++) {
		struct batch_rig rig;
		struct batch_seq a, b;
		const struct kv_decode_op *ops[16];
		uint32_t n_ops = 0;

		rig_init(&rig, (uint32_t)_i, pools[p]);
		seq_init(&rig, &a, 3, 5);
		seq_init(&rig, &b, 4, 5);
		seq_append(&rig, &a, 0, rig.spec->n_layers, 37, KV_DTYPE_F32, true);
		seq_append(&rig, &b, 0, rig.spec->n_layers, 5, KV_DTYPE_BF16, true);
		rig_run(&rig);
		rig_begin(&rig);
		/* One layer at a time, as prefill streams them. */
		for (uint32_t l = 0; l < rig.spec->n_layers; l++)
			seq_append(&rig, &a, l, 1, 31, KV_DTYPE_F16, l + 1 == rig.spec->n_layers);
		for (uint32_t l = 0; l < rig.spec->n_layers; l++) {
			ops[n_ops++] = seq_decode(&rig, &a, l, 1, a.n_tokens);
			ops[n_ops++] = seq_decode(&rig, &a, l, 1, 20); /* the length that was promised */
			ops[n_ops++] = seq_decode(&rig, &b, l, 1, b.n_tokens);
		}
		rig_run(&rig);
		ck_assert_uint_eq(rig.batch.copy_in_us + rig.batch.copy_out_us, 0);
		for (uint32_t i = 0; i < n_ops; i++)
			seq_check(&rig,
				ops[i]->table == a.table[rig.spec->layers[ops[i]->layer].group_idx] ? &a : &b,
				ops[i], 1e-5);
		seq_finish(&a);
		seq_finish(&b);
		rig_finish(&rig);
	}
}
END_TEST

/* Windows, several query rows, given scales, no log-sum-exp wanted. */
START_TEST(test_backend_cpu_decode_options)
{
	struct batch_rig rig;
	struct batch_seq seq;
	struct kv_decode_op *ops[6];

	rig_init(&rig, (uint32_t)_i, pool_f32);
	seq_init(&rig, &seq, 0, 1);
	seq_append(&rig, &seq, 0, 3, 50, KV_DTYPE_F32, true);
	ops[0] = seq_decode(&rig, &seq, 0, 1, 50);
	ops[0]->window = 7;
	ops[1] = seq_decode(&rig, &seq, 1, 4, 50); /* row 0 sees 47 tokens */
	ops[1]->window = 48;
	ops[2] = seq_decode(&rig, &seq, 2, 3, 2); /* row 0 sees nothing */
	ops[3] = seq_decode(&rig, &seq, 2, 1, 50);
	ops[3]->scale = 0.5f;
	ops[4] = seq_decode(&rig, &seq, 2, 2, 33);
	ops[4]->lse = NULL;
	ops[5] = seq_decode(&rig, &seq, 0, 1, 50);
	ops[5]->window = 1;
	rig_run(&rig);
	for (int i = 0; i < 6; i++)
		seq_check(&rig, &seq, ops[i], 1e-5);
	/* A window of one token gives that token's V row. */
	ck_assert_mem_eq(ops[5]->out, seq_row(&rig, &seq, true, 0, 49, 0), 32 * sizeof(float));
	seq_finish(&seq);
	rig_finish(&rig);
}
END_TEST

/* An empty sequence gives 0 and -infinity, reads no table, and leaves its neighbours alone. */
START_TEST(test_backend_cpu_empty_sequence)
{
	struct batch_rig rig;
	struct batch_seq seq;

	rig_init(&rig, (uint32_t)_i, pool_f32);
	seq_init(&rig, &seq, 0, 1);
	seq_append(&rig, &seq, 0, 3, 17, KV_DTYPE_F32, true);

	struct kv_decode_op *before = seq_decode(&rig, &seq, 0, 1, 17);
	struct kv_decode_op *empty = seq_decode(&rig, &seq, 0, 1, 0);
	struct kv_decode_op *after = seq_decode(&rig, &seq, 0, 1, 16);

	empty->table = NULL;
	rig_run(&rig);
	seq_check(&rig, &seq, before, 1e-5);
	seq_check(&rig, &seq, after, 1e-5);
	for (uint32_t i = 0; i < 6 * 32; i++)
		ck_assert_uint_eq(kv_f32_bits(((float *)(void *)empty->out)[i]), 0);
	for (uint32_t h = 0; h < 6; h++)
		ck_assert(isinf(empty->lse[h]) && empty->lse[h] < 0);
	seq_finish(&seq);
	rig_finish(&rig);
}
END_TEST

/* Queries and outputs in narrow numbers, and in the basis of the stored rows. */
START_TEST(test_backend_cpu_dtypes_and_bases)
{
	static const enum kv_dtype dtypes[] = { KV_DTYPE_F16, KV_DTYPE_BF16 };
	struct batch_rig rig;
	struct batch_seq seq;
	struct kv_decode_op *narrow[2], *plain, *turned;
	const uint32_t n_queries = 20, dim = 64;

	rig_init(&rig, (uint32_t)_i, pool_tq4);
	seq_init(&rig, &seq, 0, 1);
	seq_append(&rig, &seq, 0, 2, 40, KV_DTYPE_F32, true);
	for (int i = 0; i < 2; i++) {
		float wide[20 * 64];

		narrow[i] = seq_decode(&rig, &seq, 1, 1, 40);
		memcpy(wide, narrow[i]->q, sizeof(wide));
		narrow[i]->q_dtype = narrow[i]->out_dtype = (uint8_t)dtypes[i];
		kv_rows_store(dtypes[i], wide, n_queries * dim, (uint8_t *)(uintptr_t)narrow[i]->q);
	}
	plain = seq_decode(&rig, &seq, 1, 1, 40);
	turned = seq_decode(&rig, &seq, 1, 1, 40);
	turned->flags = KV_DECODE_Q_ROTATED | KV_DECODE_OUT_ROTATED;
	for (uint32_t h = 0; h < n_queries; h++)
		kv_rotation_forward(rig.spec->layers[0].k->rotation,
			(const float *)(const void *)plain->q + h * dim,
			(float *)(uintptr_t)turned->q + h * dim);
	rig_run(&rig);
	seq_check(&rig, &seq, narrow[0], 1e-3); /* float16 has 11 bits */
	seq_check(&rig, &seq, narrow[1], 5e-3); /* bfloat16 has 8 */
	seq_check(&rig, &seq, plain, 1e-5);
	for (uint32_t h = 0; h < n_queries; h++) {
		float *out = (float *)(void *)turned->out + h * dim;

		kv_rotation_backward(rig.spec->layers[0].k->rotation, out, out);
		for (uint32_t i = 0; i < dim; i++)
			ck_assert_float_le(fabsf(out[i] - ((float *)(void *)plain->out)[h * dim + i]), 2e-5f);
		ck_assert_float_le(fabsf(turned->lse[h] - plain->lse[h]), 2e-5f);
	}
	seq_finish(&seq);
	rig_finish(&rig);
}
END_TEST

/*
 * Exports give the bytes of the row layout and the rows that they decode to; an import of those bytes
 * elsewhere, in the batch's last phase, answers the same.
 */
START_TEST(test_backend_cpu_export_and_import)
{
	struct batch_rig rig;
	struct batch_seq a, b;
	static uint8_t k_packed[1 << 16], v_packed[1 << 16];
	const uint32_t row_bytes = 36, n_rows = 2 * 19 * 2; /* layers, tokens, heads */

	rig_init(&rig, (uint32_t)_i, pool_tq4);
	ck_assert_uint_eq(rig_codec(&rig, false, 0)->row_bytes, row_bytes);
	seq_init(&rig, &a, 0, 1);
	seq_init(&rig, &b, 13, 2);
	seq_append(&rig, &a, 0, 2, 30, KV_DTYPE_F32, true);

	const struct kv_transfer_op *packed = seq_transfer(&rig, &a, 11, 19, KV_DTYPE_PACKED, false);
	const struct kv_transfer_op *wide = seq_transfer(&rig, &a, 11, 19, KV_DTYPE_F32, false);

	rig_run(&rig);
	for (uint32_t r = 0; r < n_rows; r++) {
		const uint32_t layer = r / (19 * 2), token = 11 + r / 2 % 19, head = r % 2;

		for (int is_v = 0; is_v < 2; is_v++) {
			const float *model = seq_row(&rig, &a, is_v, layer, token, head);
			struct kv_row_scratch scratch;
			float decoded[64];

			ck_assert_mem_eq((is_v ? wide->v.base : wide->k.base) + r * 256, model, 256);
			kv_row_codec_decode(rig_codec(&rig, is_v, layer),
				(is_v ? packed->v.base : packed->k.base) + r * row_bytes, decoded, &scratch);
			ck_assert_mem_eq(decoded, model, 256);
			memcpy(seq_row(&rig, &b, is_v, layer, token - 11, head), model, 256);
		}
	}
	memcpy(k_packed, packed->k.base, n_rows * row_bytes);
	memcpy(v_packed, packed->v.base, n_rows * row_bytes);

	rig_begin(&rig);

	const struct kv_transfer_op *import = seq_transfer(&rig, &b, 0, 19, KV_DTYPE_PACKED, true);

	memcpy(import->k.base, k_packed, n_rows * row_bytes);
	memcpy(import->v.base, v_packed, n_rows * row_bytes);
	rig_run(&rig);
	rig_begin(&rig);

	const struct kv_decode_op *decode = seq_decode(&rig, &b, 1, 1, 19);

	packed = seq_transfer(&rig, &b, 0, 19, KV_DTYPE_PACKED, false);
	rig_run(&rig);
	seq_check(&rig, &b, decode, 1e-5);
	ck_assert_mem_eq(packed->k.base, k_packed, n_rows * row_bytes);
	ck_assert_mem_eq(packed->v.base, v_packed, n_rows * row_bytes);
	seq_finish(&a);
	seq_finish(&b);
	rig_finish(&rig);
}
END_TEST

/* Whole blocks in order export to exactly the page tensor: [blocks, block_size, kv_heads, row_bytes]. */
START_TEST(test_backend_cpu_contiguous_export_is_the_page_tensor)
{
	struct batch_rig rig;
	struct batch_seq seq;

	rig_init(&rig, (uint32_t)_i, pool_tq4);
	seq_init(&rig, &seq, 2, 1);
	seq_append(&rig, &seq, 0, 2, 32, KV_DTYPE_F32, true);

	const struct kv_transfer_op *first = seq_transfer(&rig, &seq, 0, 16, KV_DTYPE_PACKED, false);
	const struct kv_transfer_op *both = seq_transfer(&rig, &seq, 0, 32, KV_DTYPE_PACKED, false);

	rig_run(&rig);
	ck_assert_mem_eq(first->k.base, both->k.base, 16 * 2 * 36);
	for (uint32_t t = 0; t < 16; t++) {
		for (uint32_t h = 0; h < 2; h++) {
			struct kv_row_scratch scratch;
			float decoded[64];

			kv_row_codec_decode(rig_codec(&rig, false, 0), first->k.base + (t * 2 + h) * 36,
				decoded, &scratch);
			ck_assert_mem_eq(decoded, seq_row(&rig, &seq, false, 0, t, h), 256);
		}
	}
	seq_finish(&seq);
	rig_finish(&rig);
}
END_TEST

/* K or V alone can be wanted, and is then all that is written. */
START_TEST(test_backend_cpu_one_side_only)
{
	struct batch_rig rig;
	struct batch_seq seq;

	rig_init(&rig, (uint32_t)_i, pool_f32);
	seq_init(&rig, &seq, 0, 1);
	seq_append(&rig, &seq, 0, 3, 8, KV_DTYPE_F32, true);
	rig_run(&rig);
	rig_begin(&rig);

	struct kv_transfer_op *only_v = seq_transfer(&rig, &seq, 0, 8, KV_DTYPE_F32, false);

	only_v->k.base = NULL;
	rig_run(&rig);
	ck_assert_int_eq(rig.batch.results[0].status, KV_OK);
	ck_assert_mem_eq(only_v->v.base, seq_row(&rig, &seq, true, 0, 0, 0), 32 * sizeof(float));
	seq_finish(&seq);
	rig_finish(&rig);
}
END_TEST

/* Copies come first and in their order: a chain moves on by one block each, and updates of the batch land on
 * top. */
START_TEST(test_backend_cpu_copies_come_first)
{
	struct batch_rig rig;
	struct batch_seq source, copy;

	rig_init(&rig, (uint32_t)_i, pool_f32);
	seq_init(&rig, &source, 0, 1);
	seq_init(&rig, &copy, 8, 1);
	seq_append(&rig, &source, 0, 3, 16, KV_DTYPE_F32, true);
	rig_run(&rig);
	rig_begin(&rig);
	for (uint32_t g = 0; g < 2; g++) { /* block 5 gets the rows, then the copy gets block 5 */
		rig.copies[rig.batch.n_copies++] = (struct kv_copy_op){ g, source.table[g][0], 5 };
		rig.copies[rig.batch.n_copies++] = (struct kv_copy_op){ g, 5, copy.table[g][0] };
	}
	/* The same block ids name other blocks in another group. */
	rig.copies[rig.batch.n_copies++] = (struct kv_copy_op){ 1, 20, copy.table[0][0] };
	rig.copies[rig.batch.n_copies++] = (struct kv_copy_op){ 0, 20, copy.table[1][0] };
	memcpy(copy.k, source.k, 3 * BATCH_RIG_TOKENS_MAX * 2 * 64 * sizeof(float));
	memcpy(copy.v, source.v, 3 * BATCH_RIG_TOKENS_MAX * 2 * 32 * sizeof(float));
	copy.n_tokens = 10;
	seq_append(&rig, &copy, 0, 3, 9, KV_DTYPE_F32, true);

	for (uint32_t l = 0; l < 3; l++) {
		seq_decode(&rig, &source, l, 1, 16);
		seq_decode(&rig, &copy, l, 1, 19);
	}
	rig_run(&rig);
	for (uint32_t i = 0; i < 6; i++)
		seq_check(&rig, i % 2 ? &copy : &source, &rig.batch.decodes[i], 1e-5);
	seq_finish(&source);
	seq_finish(&copy);
	rig_finish(&rig);
}
END_TEST

/* A negative slot skips its token; of two tokens with one slot the last one stays. */
START_TEST(test_backend_cpu_skipped_and_duplicate_slots)
{
	struct batch_rig rig;
	struct batch_seq seq;

	rig_init(&rig, (uint32_t)_i, pool_f32);
	seq_init(&rig, &seq, 0, 1);
	seq_append(&rig, &seq, 0, 3, 6, KV_DTYPE_F32, true);
	rig_run(&rig);
	rig_begin(&rig);

	struct batch_seq other;

	seq_init(&rig, &other, 0, 1); /* same blocks: rewrites slots 0, 1, .. of the first */

	const struct kv_update_op *op = seq_append(&rig, &other, 0, 3, 4, KV_DTYPE_F32, true);
	int64_t *slots = (int64_t *)(uintptr_t)op->slots;

	for (uint32_t g = 0; g < 2; g++) {
		slots[g * 4 + 0] = seq_slot(rig.spec, &seq, g, 2);
		slots[g * 4 + 1] = -1;
		slots[g * 4 + 2] = seq_slot(rig.spec, &seq, g, 2);
		slots[g * 4 + 3] = -7;
	}
	for (uint32_t l = 0; l < 3; l++) {
		for (uint32_t h = 0; h < 2; h++) {
			memcpy(seq_row(&rig, &seq, false, l, 2, h), seq_row(&rig, &other, false, l, 2, h),
				256);
			memcpy(seq_row(&rig, &seq, true, l, 2, h), seq_row(&rig, &other, true, l, 2, h), 128);
		}
	}
	for (uint32_t l = 0; l < 3; l++)
		seq_decode(&rig, &seq, l, 1, 6);
	rig_run(&rig);
	for (uint32_t l = 0; l < 3; l++)
		seq_check(&rig, &seq, &rig.batch.decodes[l], 1e-5);
	seq_finish(&seq);
	seq_finish(&other);
	rig_finish(&rig);
}
END_TEST

static void poison(const struct batch_rig *rig, const struct kv_update_op *op, bool is_v, uint32_t layer_at,
	uint32_t token, uint32_t head, float value)
{
	const struct kv_rows *rows = is_v ? &op->v : &op->k;
	const uint32_t dim = is_v ? rig->spec->v_head_dim : rig->spec->k_head_dim;
	const uint64_t row = (layer_at * rows->tokens_stride + token) * rig->spec->kv_heads + head;

	kv_store_f32(value, rows->base + (row * dim + 5) * sizeof(float));
}

/*
 * Rows that are not finite refuse their item and name the first layer, then the first row, whatever finds
 * them first; the other items of the batch are as if nothing had happened.
 */
START_TEST(test_backend_cpu_bad_rows_refuse_their_item)
{
	for (int round = 0; round < 8; round++) {
		struct batch_rig rig;
		struct batch_seq good, bad, last;

		rig_init(&rig, (uint32_t)_i, pool_f32);
		seq_init(&rig, &good, 0, 3);
		seq_init(&rig, &bad, 1, 3);
		seq_init(&rig, &last, 2, 3);
		seq_append(&rig, &good, 0, 3, 100, KV_DTYPE_F32, true);

		const struct kv_update_op *op = seq_append(&rig, &bad, 0, 3, 100, KV_DTYPE_F32, true);

		seq_append(&rig, &last, 0, 3, 100, KV_DTYPE_F32, true);
		poison(&rig, op, false, 2, 0, 0, NAN);
		poison(&rig, op, false, 1, 9, 0, INFINITY);
		poison(&rig, op, true, 1, 8, 1, -INFINITY);
		poison(&rig, op, false, 1, 92, 1, NAN);

		const struct kv_decode_op *of_bad = seq_decode(&rig, &bad, 0, 1, 100);

		rig.batch.decodes[0].result_idx = op->result_idx; /* one item that appends and decodes */
		seq_decode(&rig, &good, 2, 1, 100);
		seq_decode(&rig, &last, 1, 1, 100);
		rig_run(&rig);
		ck_assert_int_eq(rig.batch.results[op->result_idx].status, KV_BAD_VALUE);
		ck_assert_uint_eq(rig.batch.results[op->result_idx].layer, 1);
		ck_assert_uint_eq(rig.batch.results[op->result_idx].row, 8);
		ck_assert_int_eq(rig.batch.results[0].status, KV_OK);
		ck_assert_uint_eq(rig.batch.results[0].layer, KV_LAYER_NONE);
		seq_check(&rig, &good, &rig.batch.decodes[1], 1e-5);
		seq_check(&rig, &last, &rig.batch.decodes[2], 1e-5);
		/* Its output is zero bytes and -infinity. */
		for (uint32_t i = 0; i < 6 * 32 * 4; i++)
			ck_assert_uint_eq(of_bad->out[i], 0);
		for (uint32_t h = 0; h < 6; h++)
			ck_assert(isinf(of_bad->lse[h]) && of_bad->lse[h] < 0);
		seq_finish(&good);
		seq_finish(&bad);
		seq_finish(&last);
		rig_finish(&rig);
	}
}
END_TEST

/* Findings merge to the smallest layer, then row, in whatever order they come; OK changes nothing. */
START_TEST(test_backend_cpu_merge_does_not_depend_on_order)
{
	static const struct kv_result found[] = { { KV_BAD_VALUE, 2, 0 }, { KV_BAD_VALUE, 1, 9 },
		{ KV_BAD_VALUE, 1, 8 }, { KV_OK, 0, 0 } };
	static const uint8_t orders[][4] = { { 0, 1, 2, 3 }, { 3, 2, 1, 0 }, { 1, 0, 3, 2 }, { 2, 3, 0, 1 },
		{ 2, 0, 1, 3 }, { 0, 3, 2, 1 } };

	for (size_t o = 0; o < sizeof(orders) / sizeof(orders[0]); o++) {
		struct kv_result results[2] = { { KV_OK, KV_LAYER_NONE, KV_ROW_NONE },
			{ KV_OK, KV_LAYER_NONE, KV_ROW_NONE } };
		const struct kv_batch batch = { .results = results, .n_results = 2 };

		for (int i = 0; i < 4; i++) {
			const struct kv_finding finding = { .result_idx = 1, .result = found[orders[o][i]] };

			kv_batch_merge(&batch, &finding);
		}
		ck_assert_int_eq(results[0].status, KV_OK);
		ck_assert_uint_eq(results[0].layer, KV_LAYER_NONE);
		ck_assert_int_eq(results[1].status, KV_BAD_VALUE);
		ck_assert_uint_eq(results[1].layer, 1);
		ck_assert_uint_eq(results[1].row, 8);
	}
}
END_TEST

/* A query that is not finite refuses its item with its row, and all of the item's output is zero. */
START_TEST(test_backend_cpu_bad_query)
{
	struct batch_rig rig;
	struct batch_seq seq;

	rig_init(&rig, (uint32_t)_i, pool_f32);
	seq_init(&rig, &seq, 0, 1);
	seq_append(&rig, &seq, 0, 3, 20, KV_DTYPE_F32, true);

	struct kv_decode_op *bad = seq_decode(&rig, &seq, 2, 3, 20);
	const struct kv_decode_op *good = seq_decode(&rig, &seq, 2, 3, 20);
	float *q = (float *)(uintptr_t)bad->q;

	q[(1 * 6 + 5) * 64 + 63] = NAN; /* row 1, the last head */
	q[(2 * 6 + 0) * 64 + 0] = INFINITY;
	rig_run(&rig);
	ck_assert_int_eq(rig.batch.results[bad->result_idx].status, KV_BAD_VALUE);
	ck_assert_uint_eq(rig.batch.results[bad->result_idx].layer, 2);
	ck_assert_uint_eq(rig.batch.results[bad->result_idx].row, 1);
	for (uint32_t i = 0; i < 3 * 6 * 32 * 4; i++)
		ck_assert_uint_eq(bad->out[i], 0);
	seq_check(&rig, &seq, good, 1e-5);
	seq_finish(&seq);
	rig_finish(&rig);
}
END_TEST

/* Packed rows are hostile: a negative or infinite norm refuses the import, or the append, by layer and row.
 */
START_TEST(test_backend_cpu_bad_packed_rows)
{
	struct batch_rig rig;
	struct batch_seq seq;
	const uint32_t row_bytes = 36, norm_at = 32;

	rig_init(&rig, (uint32_t)_i, pool_tq4);
	seq_init(&rig, &seq, 0, 1);

	const struct kv_transfer_op *import = seq_transfer(&rig, &seq, 0, 10, KV_DTYPE_PACKED, true);
	const struct kv_transfer_op *fine = seq_transfer(&rig, &seq, 10, 10, KV_DTYPE_PACKED, true);
	struct kv_update_op *append = &rig.batch.updates[rig.batch.n_updates++];

	/* All zero bytes are valid rows. */
	kv_store_f32(-1.0f, import->v.base + ((1 * 10 + 4) * 2 + 1) * row_bytes + norm_at);
	kv_store_f32(INFINITY, import->k.base + ((1 * 10 + 3) * 2 + 0) * row_bytes + norm_at);
	*append = (struct kv_update_op){
		.result_idx = rig.batch.n_results++,
		.layer_first = 1,
		.n_layers = 1,
		.n_tokens = 2,
		.slots = seq_slots(&rig, &seq, 30, 2),
		.k = { .base = rig_take(&rig, 4 * row_bytes), .tokens_stride = 2, .dtype = KV_DTYPE_PACKED },
		.v = { .base = rig_take(&rig, 4 * row_bytes), .tokens_stride = 2, .dtype = KV_DTYPE_PACKED }
	};
	kv_store_f32(NAN, append->v.base + 2 * row_bytes + norm_at);
	rig_run(&rig);
	ck_assert_int_eq(rig.batch.results[import->result_idx].status, KV_BAD_VALUE);
	ck_assert_uint_eq(rig.batch.results[import->result_idx].layer, 1);
	ck_assert_uint_eq(rig.batch.results[import->result_idx].row, 3);
	ck_assert_int_eq(rig.batch.results[fine->result_idx].status, KV_OK);
	ck_assert_int_eq(rig.batch.results[append->result_idx].status, KV_BAD_VALUE);
	ck_assert_uint_eq(rig.batch.results[append->result_idx].layer, 1);
	ck_assert_uint_eq(rig.batch.results[append->result_idx].row, 1);
	seq_finish(&seq);
	rig_finish(&rig);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("backend_cpu");
	TCase *tcase = tcase_create("batches");

	tcase_set_timeout(tcase, 60);
	tcase_add_loop_test(tcase, test_backend_cpu_decode_is_attention, 0, N_THREADS_TRIED);
	tcase_add_loop_test(tcase, test_backend_cpu_decode_options, 0, N_THREADS_TRIED);
	tcase_add_loop_test(tcase, test_backend_cpu_empty_sequence, 0, N_THREADS_TRIED);
	tcase_add_loop_test(tcase, test_backend_cpu_dtypes_and_bases, 0, N_THREADS_TRIED);
	tcase_add_loop_test(tcase, test_backend_cpu_export_and_import, 0, N_THREADS_TRIED);
	tcase_add_loop_test(tcase, test_backend_cpu_contiguous_export_is_the_page_tensor, 0, N_THREADS_TRIED);
	tcase_add_loop_test(tcase, test_backend_cpu_one_side_only, 0, N_THREADS_TRIED);
	tcase_add_loop_test(tcase, test_backend_cpu_copies_come_first, 0, N_THREADS_TRIED);
	tcase_add_loop_test(tcase, test_backend_cpu_skipped_and_duplicate_slots, 0, N_THREADS_TRIED);
	tcase_add_loop_test(tcase, test_backend_cpu_bad_rows_refuse_their_item, 0, N_THREADS_TRIED);
	tcase_add_test(tcase, test_backend_cpu_merge_does_not_depend_on_order);
	tcase_add_loop_test(tcase, test_backend_cpu_bad_query, 0, N_THREADS_TRIED);
	tcase_add_loop_test(tcase, test_backend_cpu_bad_packed_rows, 0, N_THREADS_TRIED);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
