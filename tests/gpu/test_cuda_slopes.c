/*
 * ALiBi slopes over 8000 tokens: the kernel over rows has float32, so how far a token is must not cost
 * what its neighbours differ by. Against the scalar oracle, which has float64. Exit 77 without a device.
 */
#include "tests/gpu/cuda_cases.h"

#define BLOCK_SIZE 16u
#define N_ROWS     256u /* that the pool holds; tokens go round in them */
#define N_TOKENS   8003u
/* gpu/KERNELS.md: rows of any format; a logarithm has float32's own rounding beside it. */
#define BOUND     2e-5
#define BOUND_LSE 0x1p-23

#define POOL                                                                                                \
	"{\"name\":\"p\",\"layers\":1,\"q_heads\":10,\"kv_heads\":1,\"head_dim\":32,\"block_size\":16,"     \
	"\"blocks\":16,\"alibi\":[-0.00001,-0.003,-0.07,-0.4,-1,-1e28,-7.3,1e28,1.1,0.00001],\"k\":\"%s\"," \
	"\"v\":\"%s\"%s}"

/* A decode of many tokens, whose blocks are those of the pool again and again. */
static struct kv_decode_op *add_long_decode(
	struct rig *rig, struct rig_seq *seq, uint32_t n_seen, uint32_t q_len, uint32_t window)
{
	struct kv_decode_op *op = add_decode(rig, seq, 0, q_len, n_seen, 1.0f);
	const uint32_t n_blocks = kv_div_up_u32(n_seen, BLOCK_SIZE);
	uint32_t *table = rig_take(rig, n_blocks * sizeof(*table));

	for (uint32_t b = 0; b < n_blocks; b++)
		table[b] = seq->table[b % (N_ROWS / BLOCK_SIZE)];
	op->table = table;
	op->window = window;
	return op;
}

/* The newest n_exact tokens that it sees come out of the ring; nobody may read the pages behind it. */
static void use_ring(struct rig *rig, const struct rig_seq *seq, struct kv_decode_op *op, uint32_t n_exact)
{
	const uint32_t n_blocks = kv_div_up_u32(op->n_tokens_seen, BLOCK_SIZE);
	uint32_t *table = rig_take(rig, (EXACT_TOKENS / BLOCK_SIZE + 1) * sizeof(*table));

	op->exact_lo = op->n_tokens_seen - n_exact;
	op->exact_table = table;
	for (uint32_t b = op->exact_lo / BLOCK_SIZE; b < n_blocks; b++)
		table[b - op->exact_lo / BLOCK_SIZE] = seq->ring[b % (EXACT_TOKENS / BLOCK_SIZE)];
	for (uint32_t b = kv_div_up_u32(op->exact_lo, BLOCK_SIZE); b < n_blocks; b++)
		((uint32_t *)(uintptr_t)op->table)[b] = KV_BLOCK_NONE;
}

static void run_and_compare(struct rig *rig, const char *json)
{
	const uint32_t n_decodes = rig->batch.n_decodes, q_heads = rig->spec->q_heads;
	struct decode_check checks[RIG_OPS_MAX];
	double worst = 0;

	rig_run_cuda(rig);
	for (uint32_t i = 0; i < n_decodes; i++) {
		const struct kv_decode_op *op = &rig->batch.decodes[i];
		const size_t n = (size_t)op->q_len * q_heads;

		ck_assert_uint_eq(rig->batch.results[op->result_idx].status, KV_OK);
		checks[i] = (struct decode_check){ op, malloc(n * rig->spec->v_head_dim * sizeof(float)),
			malloc(n * sizeof(float)) };
		memcpy(checks[i].out, op->out, n * rig->spec->v_head_dim * sizeof(float));
		memcpy(checks[i].lse, op->lse, n * sizeof(float));
	}
	rig_run_oracle(rig);
	for (uint32_t i = 0; i < n_decodes; i++) {
		const struct kv_decode_op *op = checks[i].op;

		worst = fmax(worst, compare_decode(rig, &checks[i], BOUND));
		for (uint32_t q = 0; q < op->q_len * q_heads; q++) {
			const double found = (double)checks[i].lse[q], wanted = (double)op->lse[q];

			ck_assert_msg((isinf(wanted) && found < 0 && isinf(found)) ||
					fabs(found - wanted) <= BOUND_LSE * fabs(wanted) + BOUND,
				"%s: %u tokens, window %u, query %u: log-sum-exp %.9g, expected %.9g", json,
				op->n_tokens_seen, op->window, q, found, wanted);
		}
		free(checks[i].out);
		free(checks[i].lse);
	}
	printf("%s: worst relative error %.2e\n", json, worst);
}

static void check_pool(const char *k, const char *v, const char *options)
{
	struct rig_seq seq = { .n_tokens = N_ROWS, .exact_lo = UINT32_MAX };
	uint32_t order[N_ROWS / BLOCK_SIZE];
	char json[640];
	struct rig rig;

	snprintf(json, sizeof(json), POOL, k, v, options);
	rig_init(&rig, json, 1);
	rig_shuffle(&rig, order, N_ROWS / BLOCK_SIZE);
	memcpy(seq.table, order, sizeof(order));
	for (uint32_t b = 0; b < EXACT_TOKENS / BLOCK_SIZE; b++)
		seq.ring[b] = EXACT_TOKENS / BLOCK_SIZE - 1 - b;
	add_update(&rig, &seq, 0, N_ROWS, KV_DTYPE_F32, KV_DTYPE_BF16);
	rig_run_cuda(&rig);
	ck_assert_uint_eq(rig.batch.results[0].status, KV_OK);
	rig_run_oracle(&rig);
	rig_begin(&rig);
	add_long_decode(&rig, &seq, N_TOKENS, 2, rig.spec->layers[0].window);
	add_long_decode(&rig, &seq, 2, 3, 0); /* its first row sees nothing */
	add_long_decode(&rig, &seq, N_TOKENS - 50, 1, 30);
	for (uint32_t i = 0; rig.spec->exact_tokens > 0 && i < 4; i++) {
		/* The ring has none, some or all of what the window leaves. */
		static const uint32_t windows[] = { 0, 1001, 50, 20 };

		use_ring(&rig, &seq, add_long_decode(&rig, &seq, N_TOKENS - i, 1 + i % 2, windows[i]), 41);
	}
	run_and_compare(&rig, json);
	rig_finish(&rig);
}

/*
 * Slopes of either sign, from such that all tokens count to such that one does: alone, with a window, with
 * first tokens that stay in front of it, with sinks on either side of the logits, capped, and with a ring.
 */
START_TEST(test_cuda_slopes_over_many_tokens)
{
	static const char *const options[] = {
		"",
		",\"window\":5001",
		",\"window\":5001,\"sink_tokens\":37",
		",\"window\":1000,\"sink_tokens\":5,\"sinks\":[1,25,561,3201,8003,1e38,58422,2,-3,3]",
		",\"softcap\":3,\"sinks\":[-1,24,500,2400,8004,-1,1e33,-1e38,1,0]",
	};
	char with_ring[256];

	for (size_t i = 0; i < KV_LENGTH(options); i++) {
		check_pool("bf16", "bf16", options[i]);
		snprintf(with_ring, sizeof(with_ring), "%s,\"exact_tokens\":%u,\"exact_blocks\":%u",
			options[i], EXACT_TOKENS, EXACT_TOKENS / BLOCK_SIZE);
		check_pool("tq4", "v4", with_ring);
	}
}
END_TEST

int main(void)
{
	struct kv_error err = { .msg = "" };
	Suite *suite = suite_create("cuda_slopes");
	TCase *tcase = tcase_create("cuda_slopes");

	if (!rig_start(&err)) {
		printf("%s\n", err.msg);
		return 77;
	}
	setvbuf(stdout, NULL, _IOLBF, 0);
	tcase_set_timeout(tcase, 0);
	tcase_add_test(tcase, test_cuda_slopes_over_many_tokens);
	suite_add_tcase(suite, tcase);

	const int rc = kv_test_run(suite, CK_NOFORK);

	rig_stop();
	return rc;
}
