/*
 * ALiBi slopes over long sequences: fast kernels count in float32, so how far a token is must not cost what
 * its neighbours differ by. Against the scalar backend, which counts in float64. Loop index: the set.
 */
#include <stdio.h>

#include "core/checked.h"
#include "core/fast.h"
#include "tests/lib/batch_rig.h"

#define N_SETS   2
#define N_ROWS   256u /* that the pool holds; tokens go round in them */
#define N_TOKENS 200003u
#define Q_HEADS  8u
#define DIM      16u
/* core/FAST.md: numbers; a logarithm has float32's own rounding beside it. */
#define BOUND     1e-5
#define BOUND_LSE 0x1p-23

#define POOL                                                                                        \
	"{\"name\":\"p\",\"layers\":1,\"q_heads\":8,\"kv_heads\":1,\"head_dim\":16,\"k\":\"bf16\"," \
	"\"v\":\"bf16\",\"block_size\":16,\"blocks\":16,\"alibi\":[-0.00001,-0.003,-0.07,-1,-7.3,"  \
	"-1e28,1.1,0.00001]%s}"

/* Outputs, then logarithms, of three rows. */
struct answers {
	float out[3][Q_HEADS][DIM], lse[3][Q_HEADS];
};

static enum kv_status answer(const struct kv_fast_kernels *kernels, const char *json, struct answers *answers)
{
	enum kv_status status;
	struct batch_rig rig;
	struct batch_seq seq;
	struct kv_decode_op *op;
	uint32_t *table;

	rig_init_with(&rig, 1, kernels, json);
	seq_init(&rig, &seq, 0, 1);
	seq_append(&rig, &seq, 0, 1, N_ROWS, KV_DTYPE_BF16, true);
	table = rig_take(&rig, (N_TOKENS / 16 + 1) * sizeof(*table));
	for (uint32_t b = 0; b <= N_TOKENS / 16; b++)
		table[b] = b % (N_ROWS / 16);
	op = seq_decode(&rig, &seq, 0, 3, N_TOKENS);
	op->table = table;
	rig_run(&rig);
	status = (enum kv_status)rig.batch.results[op->result_idx].status;
	memcpy(answers->out, op->out, sizeof(answers->out));
	memcpy(answers->lse, op->lse, sizeof(answers->lse));
	seq_finish(&seq);
	rig_finish(&rig);
	return status;
}

static void check(const struct kv_fast_kernels *kernels, const char *options)
{
	static struct answers expected, found;
	char json[512];

	snprintf(json, sizeof(json), POOL, options);
	ck_assert_int_eq(answer(NULL, json, &expected), KV_OK);
	ck_assert_int_eq(answer(kernels, json, &found), KV_OK);
	for (uint32_t r = 0; r < 3; r++) {
		for (uint32_t h = 0; h < Q_HEADS; h++) {
			double off_sq = 0, length_sq = 0;

			for (uint32_t i = 0; i < DIM; i++) {
				const double want = (double)expected.out[r][h][i];

				off_sq += ((double)found.out[r][h][i] - want) *
					((double)found.out[r][h][i] - want);
				length_sq += want * want;
			}
			ck_assert_msg(sqrt(off_sq) <= BOUND * sqrt(length_sq),
				"%s, \"%s\": row %u, head %u is off by %.2g", kernels->name, options, r, h,
				sqrt(off_sq / length_sq));
			ck_assert_msg(fabs((double)found.lse[r][h] - (double)expected.lse[r][h]) <=
					BOUND_LSE * fabs((double)expected.lse[r][h]) + BOUND,
				"%s, \"%s\": row %u, head %u: log-sum-exp %.9g instead of %.9g",
				kernels->name, options, r, h, (double)found.lse[r][h],
				(double)expected.lse[r][h]);
		}
	}
}

/*
 * Slopes of either sign, from such that all tokens count to such that one does, or float32 holds no distance:
 * alone, with a window, with first tokens that stay in front of it, with sinks on either side of the logits,
 * and capped.
 */
START_TEST(test_fast_slopes_over_many_tokens)
{
	static const char *const options[] = {
		"",
		",\"window\":150001",
		",\"window\":150001,\"sink_tokens\":37",
		",\"window\":1000,\"sink_tokens\":5,\"sinks\":[1,700,13000,200000,1500000,1e38,2,-3]",
		",\"softcap\":3,\"sinks\":[-1,500,10000,100000,1000000,-1,1,0]",
	};
	const struct kv_fast_kernels *kernels = kv_fast_kernels_at((uint32_t)_i);

	for (size_t i = 0; kernels && i < KV_LENGTH(options); i++)
		check(kernels, options[i]);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("fast slopes");
	TCase *tc = tcase_create("slopes");

	if (!kv_fast_kernels_at(0))
		return 77; /* no set of kernels on this processor */
	tcase_set_timeout(tc, 120);
	tcase_add_loop_test(tc, test_fast_slopes_over_many_tokens, 0, N_SETS);
	suite_add_tcase(suite, tc);
	return kv_test_run(suite, CK_NOFORK);
}
