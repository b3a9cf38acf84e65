#include <math.h>
#include <stdlib.h>

#include "server/ctl/explain.h"
#include "tests/lib/kv_core_test.h"

enum { N_TOKENS = 90, Q_HEADS = 4, KV_HEADS = 2, DIM = 64 };

struct rig {
	struct kv_pool_spec *spec;
	struct srv_explain *explain;
	float k[N_TOKENS * KV_HEADS * DIM], v[N_TOKENS * KV_HEADS * DIM], q[Q_HEADS * DIM];
};

static void rig_init(struct rig *rig, const char *formats, uint64_t seed)
{
	char text[256];

	for (uint32_t i = 0; i < N_TOKENS * KV_HEADS * DIM; i++) {
		rig->k[i] = (float)(int64_t)(kv_test_random(&seed) >> 32) / 1e9f - 2.147f;
		rig->v[i] = (float)(int64_t)(kv_test_random(&seed) >> 32) / 1e9f - 2.147f;
	}
	for (uint32_t i = 0; i < Q_HEADS * DIM; i++)
		rig->q[i] = (float)(int64_t)(kv_test_random(&seed) >> 32) / 1e9f - 2.147f;
	snprintf(text, sizeof(text),
		"name=e,layers=1,q_heads=4,kv_heads=2,head_dim=64,block_size=16,blocks=8,%s", formats);
	rig->spec = kv_test_spec(text, NULL);
	kv_assert_ok(srv_explain_create(rig->spec, N_TOKENS, rig->k, rig->v, rig->q, &rig->explain, NULL));
}

static void rig_finish(struct rig *rig)
{
	srv_explain_destroy(rig->explain);
	kv_pool_spec_destroy(rig->spec);
}

/* Whichever side loses is the cause, and the only one; with neither nothing is. */
START_TEST(test_explain_finds_the_side)
{
	static const struct {
		const char *formats, *cause;
	} rows[] = {
		{ "k=f32,v=f32", "nothing" }, { "k=f32,v=tq2", "values" }, { "k=tq1,v=f32", "keys" },
		{ "k=tq1,v=f32,exact_tokens=128,exact_blocks=8", "keys" }, /* bf16 keys */
	};
	static struct rig rig;

	for (uint32_t i = 0; i < KV_LENGTH(rows); i++) {
		rig_init(&rig, rows[i].formats, 0x5EED3000 + i);
		for (uint32_t h = 0; h < Q_HEADS; h++) {
			struct srv_explain_head head;

			srv_explain_head(rig.explain, h, &head);
			ck_assert_str_eq(srv_explain_cause(&head, 1e-4), rows[i].cause);
			ck_assert_double_le(head.kernel, 1e-6);
			ck_assert_double_le(fabs(head.total - head.both), 1e-6);
			ck_assert_double_ge(head.control, 0.05);
			if (i != 3) { /* the exact window rounds both sides */
				const double one = head.values > head.keys ? head.values : head.keys;

				ck_assert_double_le(fabs(head.both - one), 1e-6);
				ck_assert_double_le(head.values > head.keys ? head.keys : head.values, 1e-12);
			} else {
				ck_assert_double_le(head.total, 0.02);
			}
		}
		rig_finish(&rig);
	}
}
END_TEST

/* Tokens come in order of weight, weights of all of them add up to 1, and windows leave the others out. */
START_TEST(test_explain_lists_tokens)
{
	static struct rig rig;
	struct srv_explain_token tokens[N_TOKENS + 1];

	for (uint32_t window = 0; window <= 20; window += 20) {
		double sum = 0, coded_sum = 0, error_sum = 0;
		char formats[64];
		uint32_t n;

		snprintf(formats, sizeof(formats), "k=tq4,v=tq4,window=%u", window);
		rig_init(&rig, formats, 0x5EED3100);
		n = srv_explain_tokens(rig.explain, 3, tokens, N_TOKENS + 1);
		ck_assert_uint_eq(n, window ? window : N_TOKENS);
		for (uint32_t i = 0; i < n; i++) {
			sum += tokens[i].weight;
			coded_sum += tokens[i].coded_weight;
			ck_assert(i == 0 || tokens[i].weight <= tokens[i - 1].weight);
			ck_assert_uint_ge(tokens[i].token, window ? N_TOKENS - window : 0);
			error_sum += tokens[i].k_error;
			ck_assert(!tokens[i].is_exact);
		}
		ck_assert_double_le(fabs(sum - 1), 1e-12);
		ck_assert_double_le(fabs(coded_sum - 1), 1e-12);
		/* tq4 at 64 channels: the square root of 0.0093, for most rows. */
		ck_assert_double_le(error_sum / n, 0.12);
		ck_assert_double_ge(error_sum / n, 0.08);
		/* A shorter list is the beginning of the whole one. */
		struct srv_explain_token first[5];

		ck_assert_uint_eq(srv_explain_tokens(rig.explain, 3, first, 5), 5);
		for (uint32_t i = 0; i < 5; i++)
			ck_assert_uint_eq(first[i].token, tokens[i].token);
		rig_finish(&rig);
	}
}
END_TEST

/* A row that the format cannot store is refused by its token. */
START_TEST(test_explain_refuses_rows)
{
	static struct rig rig;
	struct kv_error err = { 0 };

	rig_init(&rig, "k=tq4,v=tq4", 0x5EED3200);
	srv_explain_destroy(rig.explain);
	rig.explain = NULL;
	rig.v[(17 * KV_HEADS + 1) * DIM + 3] = NAN;
	kv_assert_status(srv_explain_create(rig.spec, N_TOKENS, rig.k, rig.v, rig.q, &rig.explain, &err),
		KV_BAD_VALUE);
	ck_assert_str_eq(err.msg, "v row of token 17, KV head 1 cannot be stored as tq4");
	rig_finish(&rig);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("explain");
	TCase *tcase = tcase_create("explain");

	tcase_add_test(tcase, test_explain_finds_the_side);
	tcase_add_test(tcase, test_explain_lists_tokens);
	tcase_add_test(tcase, test_explain_refuses_rows);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK_GETENV);
}
