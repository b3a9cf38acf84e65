/*
 * Which set of row kernels is in use, and that it makes no difference to stored bytes and answers. Loop
 * index: set.
 */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "core/attention.h"
#include "core/backend_cpu.h"
#include "core/row_kernels.h"
#include "tests/lib/kv_codec.h"

#define SEED 0x51DE5EEDu

/* The slowest comes first and is always there, the last is in use unless another one is asked for. */
START_TEST(test_row_kernels_sets_are_chosen)
{
	uint32_t n_sets = 0;

	ck_assert_str_eq(kv_row_kernels_at(0)->name, "baseline");
	while (kv_row_kernels_at(n_sets))
		printf("set %s\n", kv_row_kernels_at(n_sets++)->name);
	ck_assert_uint_le(n_sets, KV_ROW_KERNELS_SETS_MAX);
	unsetenv("TQKV_INSTRUCTION_SET");
	kv_row_kernels_use(NULL);
	ck_assert_ptr_eq(kv_row_kernels(), kv_row_kernels_at(n_sets - 1));
	for (uint32_t i = 0; i < n_sets; i++) {
		for (uint32_t k = 0; k < i; k++)
			ck_assert_str_ne(kv_row_kernels_at(i)->name, kv_row_kernels_at(k)->name);
		setenv("TQKV_INSTRUCTION_SET", kv_row_kernels_at(i)->name, 1);
		kv_row_kernels_use(NULL);
		ck_assert_ptr_eq(kv_row_kernels(), kv_row_kernels_at(i));
	}
	setenv("TQKV_INSTRUCTION_SET", "no such set", 1);
	kv_row_kernels_use(NULL);
	ck_assert_ptr_eq(kv_row_kernels(), kv_row_kernels_at(n_sets - 1));
	unsetenv("TQKV_INSTRUCTION_SET");
}
END_TEST

/* The backend says which set it computes with. */
START_TEST(test_row_kernels_info_names_the_set)
{
	const struct kv_row_kernels *kernels = kv_row_kernels_at((uint32_t)_i);
	struct kv_backend *backend = NULL;
	struct kv_backend_info info;
	const char *word;

	if (!kernels)
		return; /* this processor has no set of this index */
	kv_row_kernels_use(kernels);
	ck_assert_int_eq(kv_backend_cpu_create(0, &backend, NULL), KV_OK);
	backend->ops->info(backend, &info);
	backend->ops->destroy(backend);
	word = strrchr(info.instruction_set, ' ');
	ck_assert_ptr_nonnull(word);
	ck_assert_str_eq(word + 1, kernels->name);
	kv_row_kernels_use(NULL);
}
END_TEST

static void *look(void *arg)
{
	(void)arg;
	return (void *)(uintptr_t)kv_row_kernels();
}

/* Threads that ask at the same time come to the same set. */
START_TEST(test_row_kernels_any_thread_may_ask)
{
	pthread_t threads[4];
	void *found;

	for (uint32_t i = 0; i < 4; i++)
		ck_assert_int_eq(pthread_create(&threads[i], NULL, look, NULL), 0);
	for (uint32_t i = 0; i < 4; i++) {
		ck_assert_int_eq(pthread_join(threads[i], &found), 0);
		ck_assert_ptr_eq(found, kv_row_kernels());
	}
}
END_TEST

#define TOKENS  83u /* a piece, and a part of one */
#define QUERIES 7u

/* Everything that a codec and attention over its rows give: bytes, decoded rows, outputs, log-sum-exp. */
struct answers {
	uint8_t rows[TOKENS][KV_ROW_BYTES_MAX];
	float decoded[TOKENS][KV_HEAD_DIM_MAX];
	float out[QUERIES * KV_HEAD_DIM_MAX], lse[QUERIES];
};

static struct answers *answers_of(const char *format, uint32_t head_dim)
{
	static struct kv_attention_scratch scratch;
	struct answers *answers = calloc(1, sizeof(*answers));
	struct kv_test_codec made = kv_test_codec_make(format, head_dim, NULL);
	const struct kv_attention_options options = { .scale = 0.25f };
	struct kv_row_scratch row_scratch;
	float row[KV_HEAD_DIM_MAX], q[QUERIES * KV_HEAD_DIM_MAX];
	uint64_t state = SEED;

	ck_assert_ptr_nonnull(answers);
	for (uint32_t t = 0; t < TOKENS; t++) {
		kv_test_normal(&state, head_dim, t % 9 == 4 ? 1e-3 : 1, row);
		if (t == 11)
			memset(row, 0, sizeof(row));
		ck_assert_int_eq(kv_row_codec_encode(made.codec, row, answers->rows[t], &row_scratch), KV_OK);
		kv_row_codec_decode(made.codec, answers->rows[t], answers->decoded[t], &row_scratch);
	}
	kv_test_normal(&state, QUERIES * head_dim, 1, q);

	const struct kv_row_view view = { .base = answers->rows[0],
		.block_size = 16,
		.block_bytes = 16 * (uint64_t)KV_ROW_BYTES_MAX,
		.token_bytes = KV_ROW_BYTES_MAX };
	const struct kv_attention_input input = { .k_codec = made.codec,
		.v_codec = made.codec,
		.k = view,
		.v = view,
		.q = q,
		.n_queries = QUERIES,
		.tokens.lo = 3,
		.tokens.hi = TOKENS };

	kv_attention_rows(&input, &options, &scratch, answers->out, answers->lse);
	kv_test_codec_drop(&made);
	return answers;
}

/* Stored bytes, decoded rows and attention are the same to the bit, in every format and with every set. */
START_TEST(test_row_kernels_sets_agree)
{
	static const uint32_t dims[] = { 16, 64, 80, 128, 256 };
	const struct kv_row_kernels *kernels = kv_row_kernels_at((uint32_t)_i);

	for (uint32_t f = 0; kernels && f < kv_format_count(); f++) {
		for (uint32_t d = 0; d < sizeof(dims) / sizeof(*dims); d++) {
			const struct kv_format *format = kv_format_at(f);

			if (kv_format_check(format, dims[d], NULL) != KV_OK)
				continue;
			kv_row_kernels_use(kv_row_kernels_at(0));

			struct answers *expected = answers_of(format->name, dims[d]);

			kv_row_kernels_use(kernels);

			struct answers *found = answers_of(format->name, dims[d]);

			ck_assert_msg(memcmp(found, expected, sizeof(*found)) == 0, "%s, head_dim %u, set %s",
				format->name, dims[d], kernels->name);
			free(expected);
			free(found);
		}
	}
	kv_row_kernels_use(NULL);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("row_kernels_sets");
	TCase *tcase = tcase_create("row_kernels_sets");
	const int n = (int)KV_ROW_KERNELS_SETS_MAX;

	printf("seed %#x\n", SEED);
	tcase_set_timeout(tcase, 120);
	tcase_add_test(tcase, test_row_kernels_any_thread_may_ask); /* before anybody else */
	tcase_add_test(tcase, test_row_kernels_sets_are_chosen);
	tcase_add_loop_test(tcase, test_row_kernels_info_names_the_set, 0, n);
	tcase_add_loop_test(tcase, test_row_kernels_sets_agree, 0, n);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK_GETENV);
}
