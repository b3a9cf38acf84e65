/*
 * Attention options of a layer: window, first tokens that stay, sinks, softcap, ALiBi, scale; alone and
 * together, with every ratio of heads, several query rows and all dtypes, against attention in float64 that
 * works it out another way. On the scalar backend and on every set of fast kernels that this processor runs.
 * Loop index: which of these, and whether with a worker thread.
 */
#include <stdio.h>

#include "core/checked.h"
#include "core/fast.h"
#include "tests/lib/batch_rig.h"

#define N_TRIED   6 /* scalar and two sets, without threads and with one */
#define BOUND     1e-5
#define FAST      2e-3 /* core/DESIGN.md, Fast decodes */
#define TOKENS    150u
#define Q_LEN_MAX 16u

#define WINDOW   "\"window\":37,"
#define SINK_TOK "\"window\":37,\"sink_tokens\":5,"
#define SOFTCAP  "\"softcap\":1.5,"
#define SCALE    "\"scale\":0.31,"
#define ALIBI    "\"alibi\":[0.5,0.25,0.0625,0.03125,0.015625,-0.02],"
#define SINKS    "\"sinks\":[0.5,-1.25,3,0,8,-40],"

/* The options of one layer with 6 query heads. */
static const char *const options[] = {
	"",
	WINDOW,
	SINK_TOK,
	SOFTCAP,
	SCALE,
	ALIBI,
	SINKS,
	SOFTCAP ALIBI,
	SINK_TOK SINKS,
	SINK_TOK SOFTCAP ALIBI SINKS SCALE,
};

static const struct {
	const char *k, *v;
	uint32_t k_dim, v_dim, kv_heads, block_size;
} shapes[] = {
	{ "tq4", "tq4", 64, 64, 3, 16 },
	{ "tqp4", "v4", 32, 64, 1, 32 }, /* six query heads share one KV head */
	{ "bf16", "tq3", 48, 80, 6, 64 },
	{ "f32", "turboquant25", 16, 64, 2, 16 },
};

static bool is_there(int idx)
{
	return idx < 2 || kv_fast_kernels_at((uint32_t)idx / 2 - 1) != NULL;
}

static const struct kv_fast_kernels *kernels_of(int idx)
{
	return idx < 2 ? NULL : kv_fast_kernels_at((uint32_t)idx / 2 - 1);
}

static double bound_of(int idx)
{
	return idx < 2 ? BOUND : FAST;
}

static void start(struct batch_rig *rig, struct batch_seq *seq, int idx, const char *text, size_t shape)
{
	char json[512];

	snprintf(json, sizeof(json),
		"{\"name\":\"p\",\"q_heads\":6,\"layers\":1,%s\"kv_heads\":%u,\"block_size\":%u,\"blocks\":"
		"40,"
		"\"k_head_dim\":%u,\"v_head_dim\":%u,\"k\":\"%s\",\"v\":\"%s\"}",
		text, shapes[shape].kv_heads, shapes[shape].block_size, shapes[shape].k_dim,
		shapes[shape].v_dim, shapes[shape].k, shapes[shape].v);
	rig_init_with(rig, (uint32_t)idx % 2, kernels_of(idx), json);
	seq_init(rig, seq, 3, 1);
	seq_append(rig, seq, 0, 1, TOKENS, KV_DTYPE_F32, true);
	rig_run(rig);
	rig_begin(rig);
}

static void finish(struct batch_rig *rig, struct batch_seq *seq)
{
	seq_finish(seq);
	rig_finish(rig);
}

/* Every option, alone and together, over formats of every kind: output and log-sum-exp are the exact ones. */
START_TEST(test_attention_options_are_exact)
{
	if (!is_there(_i))
		return;
	for (size_t o = 0; o < KV_LENGTH(options); o++) {
		for (size_t s = 0; s < KV_LENGTH(shapes); s++) {
			struct kv_decode_op *ops[8];
			struct batch_rig rig;
			struct batch_seq seq;

			start(&rig, &seq, _i, options[o], s);
			ops[0] = seq_decode(&rig, &seq, 0, 1, TOKENS);
			ops[1] = seq_decode(&rig, &seq, 0, 1, 1);
			ops[2] = seq_decode(&rig, &seq, 0, Q_LEN_MAX, TOKENS);
			ops[3] = seq_decode(&rig, &seq, 0, 3, 44); /* the window begins to move inside it */
			ops[4] = seq_decode(&rig, &seq, 0, 2, TOKENS);
			ops[4]->window = 3; /* narrower than any layer's */
			ops[5] = seq_decode(&rig, &seq, 0, 1, TOKENS);
			ops[5]->scale = 0.7f;
			ops[6] = seq_decode(&rig, &seq, 0, 1, 100);
			ops[6]->flags = KV_DECODE_NO_SINKS;
			ops[7] = seq_decode(&rig, &seq, 0, 1, 100);
			ops[7]->lse = NULL;
			rig_run(&rig);
			for (size_t i = 0; i < KV_LENGTH(ops); i++)
				seq_check(&rig, &seq, ops[i], bound_of(_i));
			finish(&rig, &seq);
		}
	}
}
END_TEST

/* Nothing to attend to: zeros, and -infinity or the sink's logit, which is the logarithm of what is left. */
START_TEST(test_attention_options_over_nothing)
{
	if (!is_there(_i))
		return;
	for (int has_sinks = 0; has_sinks < 2; has_sinks++) {
		const float logits[] = { 0.5f, -1.25f, 3, 0, 8, -40 };
		struct batch_rig rig;
		struct batch_seq seq;

		start(&rig, &seq, _i, has_sinks ? SINKS SINK_TOK ALIBI : "", 0);
		struct kv_decode_op *ops[2] = { seq_decode(&rig, &seq, 0, 1, 0),
			seq_decode(&rig, &seq, 0, 1, 0) };

		ops[1]->flags = KV_DECODE_NO_SINKS;
		rig_run(&rig);
		for (int i = 0; i < 2; i++) {
			for (uint32_t n = 0; n < 6 * rig.spec->v_head_dim; n++)
				ck_assert(((float *)(void *)ops[i]->out)[n] == 0);
			for (uint32_t h = 0; h < 6; h++) {
				if (has_sinks && i == 0)
					ck_assert_float_eq(ops[i]->lse[h], logits[h]);
				else
					ck_assert(isinf(ops[i]->lse[h]) && ops[i]->lse[h] < 0);
			}
		}
		finish(&rig, &seq);
	}
}
END_TEST

/* A sink that is large takes all the weight, one that is small takes none. */
START_TEST(test_attention_options_sinks_take_weight)
{
	if (!is_there(_i))
		return;
	struct batch_rig rig;
	struct batch_seq seq;

	start(&rig, &seq, _i, "\"sinks\":[200,200,200,-200,-200,-200],", 0);
	const struct kv_decode_op *with = seq_decode(&rig, &seq, 0, 1, TOKENS);
	struct kv_decode_op *without = seq_decode(&rig, &seq, 0, 1, TOKENS);
	const uint32_t v_dim = rig.spec->v_head_dim;

	without->q = with->q;
	without->flags = KV_DECODE_NO_SINKS;
	rig_run(&rig);
	for (uint32_t h = 0; h < 6; h++) {
		const float *a = (const float *)(const void *)with->out + (size_t)h * v_dim;
		const float *b = (const float *)(const void *)without->out + (size_t)h * v_dim;

		for (uint32_t i = 0; i < v_dim; i++)
			ck_assert(h < 3 ? fabsf(a[i]) < 1e-30f : a[i] == b[i]);
		if (h < 3)
			ck_assert_float_eq(with->lse[h], 200);
	}
	finish(&rig, &seq);
}
END_TEST

/* K7: q_len rows in one item are, bit for bit, as many decodes of one row over shorter and shorter history.
 */
START_TEST(test_attention_options_rows_are_separate_decodes)
{
	if (!is_there(_i))
		return;
	for (size_t o = 0; o < KV_LENGTH(options); o++) {
		for (uint32_t q_len = 1; q_len <= Q_LEN_MAX; q_len += q_len < 8 ? 1 : 4) {
			const uint32_t n_seen = o % 2 == 0 ? TOKENS : 41;
			struct batch_rig rig;
			struct batch_seq seq;

			start(&rig, &seq, _i, options[o], o % KV_LENGTH(shapes));
			const size_t q_bytes = 6 * sizeof(float) * rig.spec->k_head_dim;
			const size_t out_bytes = 6 * sizeof(float) * rig.spec->v_head_dim;
			const struct kv_decode_op *whole = seq_decode(&rig, &seq, 0, q_len, n_seen);
			struct kv_decode_op *rows[Q_LEN_MAX];

			for (uint32_t i = 0; i < q_len; i++) {
				rows[i] = seq_decode(&rig, &seq, 0, 1, n_seen - q_len + 1 + i);
				rows[i]->q = whole->q + i * q_bytes;
			}
			rig_run(&rig);
			for (uint32_t i = 0; i < q_len; i++) {
				ck_assert_mem_eq(whole->out + i * out_bytes, rows[i]->out, out_bytes);
				ck_assert_mem_eq(whole->lse + (size_t)i * 6, rows[i]->lse, 6 * sizeof(float));
			}
			seq_check(&rig, &seq, whole, bound_of(_i));
			finish(&rig, &seq);
		}
	}
}
END_TEST

/* Queries and outputs in each dtype, with all options: as exact as the output's dtype can hold. */
START_TEST(test_attention_options_dtypes)
{
	if (!is_there(_i))
		return;
	static const enum kv_dtype dtypes[] = { KV_DTYPE_F32, KV_DTYPE_F16, KV_DTYPE_BF16 };
	static const double bounds[] = { BOUND, 0x1p-11 * 1.1,
		0x1p-8 * 1.1 }; /* half a unit in the last place */

	for (int d = 0; d < 9; d++) {
		const enum kv_dtype q_dtype = dtypes[d / 3], out_dtype = dtypes[d % 3];
		struct batch_rig rig;
		struct batch_seq seq;

		start(&rig, &seq, _i, options[KV_LENGTH(options) - 1], (size_t)d % KV_LENGTH(shapes));
		struct kv_decode_op *op = seq_decode(&rig, &seq, 0, 5, TOKENS);
		const size_t n = (size_t)5 * 6 * rig.spec->k_head_dim;
		uint8_t *q = rig_take(&rig, n * sizeof(float));

		kv_rows_store(q_dtype, (const float *)(const void *)op->q, n, q);
		op->q = q;
		op->q_dtype = (uint8_t)q_dtype;
		op->out_dtype = (uint8_t)out_dtype;
		rig_run(&rig);
		seq_check(&rig, &seq, op, _i < 2 ? bounds[d % 3] : bounds[d % 3] + FAST);
		finish(&rig, &seq);
	}
}
END_TEST

/* Every number of query heads for one KV head from 1 to 16, for one KV head and for two. */
START_TEST(test_attention_options_head_ratios)
{
	if (!is_there(_i))
		return;
	for (uint32_t r = 0; r < 2 * 16; r++) {
		const uint32_t kv_heads = 1 + r / 16, q_heads = (1 + r % 16) * kv_heads;
		char json[1024], numbers[256];
		struct batch_rig rig;
		struct batch_seq seq;
		size_t n = 0;

		for (uint32_t h = 0; h < q_heads; h++)
			n += (size_t)snprintf(
				numbers + n, sizeof(numbers) - n, "%s%.3f", h > 0 ? "," : "", 0.3 / (1 + h));
		snprintf(json, sizeof(json),
			"{\"name\":\"p\",\"q_heads\":%u,\"layers\":1,\"kv_heads\":%u,\"block_size\":16,"
			"\"blocks\":20,"
			"\"head_dim\":32,\"k\":\"tq4\",\"v\":\"tq2\",\"window\":33,\"alibi\":[%s],\"sinks\":["
			"[%s]]}",
			q_heads, kv_heads, numbers, numbers);
		rig_init_with(&rig, (uint32_t)_i % 2, kernels_of(_i), json);
		seq_init(&rig, &seq, 1, 1);
		seq_append(&rig, &seq, 0, 1, 70, KV_DTYPE_BF16, true);
		const struct kv_decode_op *op = seq_decode(&rig, &seq, 0, 2, 70);

		rig_run(&rig);
		seq_check(&rig, &seq, op, bound_of(_i));
		finish(&rig, &seq);
	}
}
END_TEST

/* Options by layer: each layer has its own, and null or 0 means none. */
START_TEST(test_attention_options_by_layer)
{
	if (!is_there(_i))
		return;
	struct kv_decode_op *ops[3];
	struct batch_rig rig;
	struct batch_seq seq;

	rig_init_with(&rig, (uint32_t)_i % 2, kernels_of(_i),
		"{\"name\":\"p\",\"q_heads\":2,\"layers\":3,\"kv_heads\":1,\"block_size\":16,\"blocks\":20,"
		"\"head_dim\":32,\"k\":\"tq4\",\"v\":\"tq4\",\"window\":[20,0,64],\"sink_tokens\":[4,0,1],"
		"\"scale\":[0.1,0.2,0.3],\"softcap\":[0,2,1],\"sinks\":[null,[1,2],[3,4]],"
		"\"alibi\":[[0.1,0.2],null,[0.01,0.02]]}");
	seq_init(&rig, &seq, 0, 1);
	seq_append(&rig, &seq, 0, 3, 90, KV_DTYPE_F32, true);
	for (uint32_t l = 0; l < 3; l++)
		ops[l] = seq_decode(&rig, &seq, l, 3, 90);
	rig_run(&rig);
	for (uint32_t l = 0; l < 3; l++)
		seq_check(&rig, &seq, ops[l], bound_of(_i));
	ck_assert_uint_eq(ops[0]->window, 20);
	finish(&rig, &seq);
}
END_TEST

/* The tokens that a row sees, by counting: those within the window of its end, and the first ones. */
START_TEST(test_attention_range_is_what_counting_gives)
{
	for (uint32_t n_seen = 0; n_seen < 24; n_seen++) {
		for (uint32_t window = 0; window < 10; window++) {
			for (uint32_t first = 0; first < 12; first++) {
				const uint32_t q_len = 1 + n_seen % 5, row = n_seen % q_len;
				const struct kv_attention_range range =
					kv_attention_range(n_seen, q_len, row, window, first);
				const int64_t end = (int64_t)n_seen - q_len + 1 + row;

				ck_assert_uint_eq(range.hi, end > 0 ? end : 0);
				ck_assert_uint_le(range.first_hi, range.lo);
				for (uint32_t t = 0; t < 30; t++) {
					const bool is_seen = t < end &&
						(window == 0 || (int64_t)t >= end - window || t < first);

					ck_assert_int_eq(is_seen,
						t < range.first_hi || (t >= range.lo && t < range.hi));
				}
			}
		}
	}
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("attention options");
	TCase *tc = tcase_create("options");

	tcase_set_timeout(tc, 60);
	tcase_add_loop_test(tc, test_attention_options_are_exact, 0, N_TRIED);
	tcase_add_loop_test(tc, test_attention_options_over_nothing, 0, N_TRIED);
	tcase_add_loop_test(tc, test_attention_options_sinks_take_weight, 0, N_TRIED);
	tcase_add_loop_test(tc, test_attention_options_rows_are_separate_decodes, 0, N_TRIED);
	tcase_add_loop_test(tc, test_attention_options_dtypes, 0, N_TRIED);
	tcase_add_loop_test(tc, test_attention_options_head_ratios, 0, N_TRIED);
	tcase_add_loop_test(tc, test_attention_options_by_layer, 0, N_TRIED);
	tcase_add_test(tc, test_attention_range_is_what_counting_gives);
	suite_add_tcase(suite, tc);
	return kv_test_run(suite, CK_NOFORK);
}
