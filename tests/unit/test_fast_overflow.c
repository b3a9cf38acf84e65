/*
 * Numbers that float32 cannot hold on the way to a weight, though the answer is within its range: the fast
 * kernels must notice, and answer what the scalar backend does. Loop index: the set.
 */
#include <stdio.h>

#include "core/checked.h"
#include "core/fast.h"
#include "tests/lib/batch_rig.h"

#define N_SETS  2
#define N_FIRST 16u /* tokens in pages; as many have places in the ring */
#define DIM     64u
#define Q_HEADS 4u
#define POOL                                                                                            \
	"{\"name\":\"p\",\"layers\":1,\"q_heads\":4,\"kv_heads\":1,\"head_dim\":64,\"k\":\"%s\",\"v\":" \
	"\"bf16\","                                                                                     \
	"\"block_size\":16,\"blocks\":16,\"exact_tokens\":16,\"scale\":%g%s}"

/* Factors of the keys in pages and in the ring, of the queries; the pool's scale and further options. */
struct sizes {
	float k_first, k_ring, q;
	double scale;
	const char *options;
};

struct answers {
	float out[Q_HEADS][DIM], lse[Q_HEADS];
};

static void multiply(uint8_t *numbers, size_t n, float factor)
{
	float *values = (float *)(void *)numbers;

	for (size_t i = 0; i < n; i++)
		values[i] *= factor;
}

static void answer(const struct kv_fast_kernels *kernels, const char *k_format, const struct sizes *sizes,
	uint32_t n_ring, struct answers *answers)
{
	struct batch_rig rig;
	struct batch_seq seq;
	struct kv_decode_op *op;
	char json[512];

	snprintf(json, sizeof(json), POOL, k_format, sizes->scale, sizes->options);
	rig_init_with(&rig, 1, kernels, json);
	seq_init(&rig, &seq, 0, 1);
	multiply(seq_append(&rig, &seq, 0, 1, N_FIRST, KV_DTYPE_F32, true)->k.base, N_FIRST * DIM,
		sizes->k_first);
	multiply(seq_append(&rig, &seq, 0, 1, n_ring, KV_DTYPE_F32, true)->k.base, n_ring * DIM,
		sizes->k_ring);
	op = seq_decode(&rig, &seq, 0, 1, N_FIRST + n_ring);
	seq_use_ring(&rig, &seq, op, N_FIRST);
	multiply((uint8_t *)op->q, Q_HEADS * DIM, sizes->q);
	rig_run(&rig);
	ck_assert_int_eq(rig.batch.results[op->result_idx].status, KV_OK);
	memcpy(answers->out, op->out, sizeof(answers->out));
	memcpy(answers->lse, op->lse, sizeof(answers->lse));
	seq_finish(&seq);
	rig_finish(&rig);
}

/* The bound is that of kernels which round queries to codes; a lost token is 1 of 32. */
static void check(const struct kv_fast_kernels *kernels, const char *k_format, const struct sizes *sizes,
	uint32_t n_ring)
{
	struct answers expected, found;

	answer(NULL, k_format, sizes, n_ring, &expected);
	answer(kernels, k_format, sizes, n_ring, &found);
	for (uint32_t h = 0; h < Q_HEADS; h++) {
		double off_sq = 0, length_sq = 0;

		for (uint32_t i = 0; i < DIM; i++) {
			const double want = (double)expected.out[h][i], got = (double)found.out[h][i];

			off_sq += (got - want) * (got - want);
			length_sq += want * want;
		}
		ck_assert_msg(sqrt(off_sq) <= 1e-2 * sqrt(length_sq), "%s, %s, ring %u, head %u: off by %.2g",
			kernels->name, k_format, n_ring, h, sqrt(off_sq / length_sq));
		ck_assert_msg(fabs((double)found.lse[h] - (double)expected.lse[h]) <=
				1e-2 * (1 + fabs((double)expected.lse[h])),
			"%s, %s, ring %u, head %u: log-sum-exp %.9g instead of %.9g", kernels->name, k_format,
			n_ring, h, (double)found.lse[h], (double)expected.lse[h]);
	}
}

/*
 * Tokens in pages have logits of 0, those of the ring +-infinity and NaN in float32, and the cap makes all of
 * them nearly equal: each must count, whether it has neighbours in its block that are not there or not.
 */
START_TEST(test_fast_logits_that_overflow)
{
	const struct kv_fast_kernels *kernels = kv_fast_kernels_at((uint32_t)_i);
	const struct sizes sizes = { 0, 1, 7e37f, 1, ",\"softcap\":0.001" };

	for (uint32_t n_ring = 1; kernels && n_ring <= 16; n_ring++)
		check(kernels, "bf16", &sizes, n_ring);
}
END_TEST

/* A scaled query that is none of float32, with keys that make up for it; a cap must not hide it. */
START_TEST(test_fast_queries_beyond_float32)
{
	static const char *const formats[] = { "tq4", "tqp3", "v4", "fp8", "bf16" };
	static const struct sizes sizes[] = {
		{ 1e-33f, 1e-33f, 1e25f, 1e10, "" }, /* within the range of queries that are scaled, far up */
		{ 1e37f, 1e37f, 1, 1e-37, "" },
		{ 1e37f, 1e37f, 1e-6f, 1e-32, "" },
		{ 1e37f, 1e37f, 1, 1e-38, ",\"softcap\":1" },
		{ 1, 1, 1e30f, 1e10, ",\"softcap\":1e38" },
	};
	const struct kv_fast_kernels *kernels = kv_fast_kernels_at((uint32_t)_i);

	for (size_t f = 0; kernels && f < KV_LENGTH(formats); f++) {
		for (size_t s = 0; s < KV_LENGTH(sizes); s++)
			check(kernels, formats[f], &sizes[s], 5);
	}
}
END_TEST

/* Logits beyond any range in two heads: the first row is told, whichever head is looked at first. */
START_TEST(test_fast_first_row_of_several_heads)
{
	const char *pool = "{\"name\":\"p\",\"layers\":1,\"q_heads\":2,\"kv_heads\":2,\"head_dim\":64,"
			   "\"k\":\"bf16\",\"v\":\"bf16\",\"block_size\":16,\"blocks\":16}";
	const struct kv_fast_kernels *kernels = kv_fast_kernels_at((uint32_t)_i);

	for (uint32_t first = 0; kernels && first < 2; first++) {
		struct batch_rig rig;
		struct batch_seq seq;
		struct kv_decode_op *op;

		rig_init_with(&rig, 1, kernels, pool);
		seq_init(&rig, &seq, 0, 1);
		multiply(seq_append(&rig, &seq, 0, 1, N_FIRST, KV_DTYPE_F32, true)->k.base,
			(size_t)2 * N_FIRST * DIM, 1e30f);
		op = seq_decode(&rig, &seq, 0, 4, N_FIRST);
		for (uint32_t row = 0; row < 4; row++) {
			for (uint32_t h = 0; h < 2; h++)
				multiply((uint8_t *)op->q + (2 * row + h) * DIM * sizeof(float), DIM,
					row > (h == first ? 0 : 1) ? 1e30f : 1e-30f);
		}
		rig_run(&rig);
		ck_assert_int_eq(rig.batch.results[op->result_idx].status, KV_BAD_VALUE);
		ck_assert_uint_eq(rig.batch.results[op->result_idx].row, 1);
		seq_finish(&seq);
		rig_finish(&rig);
	}
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("fast overflow");
	TCase *tc = tcase_create("overflow");

	if (!kv_fast_kernels_at(0))
		return 77; /* no set of kernels on this processor */
	tcase_set_timeout(tc, 60);
	tcase_add_loop_test(tc, test_fast_logits_that_overflow, 0, N_SETS);
	tcase_add_loop_test(tc, test_fast_queries_beyond_float32, 0, N_SETS);
	tcase_add_loop_test(tc, test_fast_first_row_of_several_heads, 0, N_SETS);
	suite_add_tcase(suite, tc);
	return kv_test_run(suite, CK_NOFORK);
}
