/*
 * Codebooks as the fast kernels compute them, on every set that this processor runs. Loop index: the set.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "core/checked.h"
#include "core/fast_decode.h"
#include "tests/lib/batch_rig.h"

#define N_SETS 2
#define N      KV_FAST_STEP_TOKENS
enum { DIM = 128 };

static float number_of(uint64_t *seed)
{
	return (float)(kv_test_random(seed) >> 40) / 0x1p23f - 1;
}

/*
 * Rows and their negatives add up to nothing: an entry is not rounded to one side, which would grow with the
 * tokens.
 */
START_TEST(test_fast_codes_have_no_side)
{
	static const char *const formats[] = { "tq2", "tq3", "tq4", "tq5", "tq6", "tq7", "tq8" };
	const struct kv_fast_kernels *kernels = kv_fast_kernels_at((uint32_t)_i);
	static struct kv_fast_side side;
	static struct kv_row_scratch scratch;
	static uint8_t bytes[N * 160 + KV_FAST_SLACK_BYTES];
	_Alignas(64) static float weights[N], sums[KV_FAST_SLOTS_MAX];
	struct kv_fast_rows rows = { .n_rows = N };
	uint64_t seed = 0x5eed6;

	for (uint32_t t = 0; t < N; t++)
		weights[t] = 1;
	for (int c = 0; kernels && c < (int)KV_LENGTH(formats); c++) {
		float parts[KV_FAST_PARTS_MAX] = { 0 }, *const to = sums, *const zeros = parts;
		struct batch_rig rig;
		char json[256];
		double sum = 0;

		snprintf(json, sizeof(json),
			"{\"name\":\"p\",\"layers\":1,\"q_heads\":1,\"kv_heads\":1,\"block_size\":16,"
			"\"blocks\":16,\"head_dim\":128,\"k\":\"f32\",\"v\":\"%s\"}",
			formats[c]);
		rig_init_with(&rig, 0, kernels, json);
		const struct kv_row_codec *codec = rig.spec->layers[0].v;

		ck_assert(kv_fast_side_init(&side, codec, true, kernels));
		rows.row_bytes = codec->row_bytes;
		for (uint32_t t = 0; t < N; t++) {
			uint8_t *row = bytes + (size_t)t * codec->row_bytes;
			static float values[DIM];
			double square = 0;

			for (uint32_t i = 0; i < DIM; i++) {
				values[i] = t % 2 ? -values[i] : number_of(&seed);
				square += (double)(values[i] * values[i]);
			}
			for (uint32_t i = 0; i < DIM && t % 2 == 0; i++)
				values[i] /= (float)sqrt(square);
			ck_assert_int_eq(kv_row_codec_encode(codec, values, row, &scratch), KV_OK);
			rows.rows[t] = row;
		}
		memset(sums, 0, sizeof(sums));
		kernels->accumulate(&side, &rows, weights, 1, &to, &zeros);
		for (uint32_t s = 0; s < side.n_slots; s++)
			sum += (double)sums[s];
		/* In units of a block's sums: half a unit would be one that all entries lack. */
		ck_assert_double_le(fabs(sum) * 32735 / (DIM * N), 0.01);
		rig_finish(&rig);
	}
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("fast codes");
	TCase *tc = tcase_create("codebooks");

	if (!kv_fast_kernels_at(0))
		return 77; /* no set of kernels on this processor */
	tcase_add_loop_test(tc, test_fast_codes_have_no_side, 0, N_SETS);
	suite_add_tcase(suite, tc);
	return kv_test_run(suite, CK_NOFORK);
}
