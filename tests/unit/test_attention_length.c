/*
 * The error of attention over quantised V rows, by the length of the sequence.
 *
 * With weights w_t and independent errors of the rows, E ||sum w_t e_t||^2 = sum w_t^2 E ||e_t||^2 for errors
 * of mean 0. What is common to all errors does not average out: a tq row is on average (1 - D) times the row
 * (D: the total squared error of a unit row, FORMATS 3), so the part D of the rows' mean stays. Both are
 * known, so the bound at every length is a number, and an implementation whose sum loses bits as it grows is
 * above it.
 */
#include "core/attention.h"

#include <math.h>
#include <stdio.h>

#include "core/checked.h"
#include "tests/lib/kv_test.h"

#define HEAD_DIM     64u
#define N_TOKENS_MAX 131072u
#define EXACT_BOUND  1e-5 /* relative L2, of the scalar path against float64 over the decoded rows */
#define MEAN         0.25 /* of every channel of V: the output does not shrink to 0 as the length grows */

static const uint32_t lengths[] = { 128, 1024, 8192, 32768, N_TOKENS_MAX };

/* K is f32, so that the weights have no error and V's is the only one. */
struct rows {
	struct kv_row_codec *codecs[2];
	struct kv_rotation *rotation;
	uint8_t *packed[2];
	float *numbers[2]; /* [N_TOKENS_MAX, HEAD_DIM] */
	float *v_decoded;
	float q[HEAD_DIM];
};

static double normal(uint64_t *state)
{
	const double a = ((double)(kv_test_random(state) >> 11) + 1) * 0x1p-53;
	const double b = (double)(kv_test_random(state) >> 11) * 0x1p-53;

	return sqrt(-2 * log(a)) * cos(6.283185307179586 * b);
}

static struct kv_row_codec *make_codec(const char *name, struct kv_rotation **rotation)
{
	const struct kv_format *format = NULL;
	struct kv_row_codec *codec = NULL;

	ck_assert_int_eq(kv_format_parse(name, &format, NULL), KV_OK);
	if (kv_format_is_rotated(format))
		ck_assert_int_eq(
			kv_rotation_create(kv_rotation_kind_default(HEAD_DIM), HEAD_DIM, 42, rotation, NULL),
			KV_OK);
	ck_assert_int_eq(kv_row_codec_create(format, HEAD_DIM, *rotation, &codec, NULL), KV_OK);
	return codec;
}

static void *get_memory(size_t n_bytes)
{
	void *memory = malloc(n_bytes);

	ck_assert_ptr_nonnull(memory);
	return memory;
}

/* Gaussian rows. The weights of K are uneven but do not favour a few tokens: logits have deviation 1. */
static struct rows make_rows(const char *v_format, uint64_t seed)
{
	struct rows rows = { .rotation = NULL };
	struct kv_row_scratch scratch;
	uint64_t state = seed;

	printf("%s: seed %llu\n", v_format, (unsigned long long)seed);
	rows.codecs[0] = make_codec("f32", &rows.rotation);
	rows.codecs[1] = make_codec(v_format, &rows.rotation);
	for (int v = 0; v < 2; v++) {
		const size_t row_bytes = rows.codecs[v]->row_bytes;

		rows.packed[v] = get_memory(N_TOKENS_MAX * row_bytes);
		rows.numbers[v] = get_memory(N_TOKENS_MAX * HEAD_DIM * sizeof(float));
		for (uint32_t t = 0; t < N_TOKENS_MAX; t++) {
			float *row = rows.numbers[v] + (size_t)t * HEAD_DIM;

			for (uint32_t i = 0; i < HEAD_DIM; i++)
				row[i] = (float)(normal(&state) + (v ? MEAN : 0));
			ck_assert_int_eq(kv_row_codec_encode(rows.codecs[v], row,
						 rows.packed[v] + t * row_bytes, &scratch),
				KV_OK);
		}
	}
	rows.v_decoded = get_memory(N_TOKENS_MAX * HEAD_DIM * sizeof(float));
	for (uint32_t t = 0; t < N_TOKENS_MAX; t++)
		kv_row_codec_decode(rows.codecs[1], rows.packed[1] + (size_t)t * rows.codecs[1]->row_bytes,
			rows.v_decoded + (size_t)t * HEAD_DIM, &scratch);
	for (uint32_t i = 0; i < HEAD_DIM; i++)
		rows.q[i] = (float)normal(&state);
	return rows;
}

static void drop_rows(struct rows *rows)
{
	for (int v = 0; v < 2; v++) {
		kv_row_codec_destroy(rows->codecs[v]);
		free(rows->packed[v]);
		free(rows->numbers[v]);
	}
	kv_rotation_destroy(rows->rotation);
	free(rows->v_decoded);
}

static const float scale = 0.125f; /* 1 / sqrt(HEAD_DIM) */

static void attend(const struct rows *rows, uint32_t n_tokens, float *out)
{
	static struct kv_attention_scratch scratch;
	const struct kv_attention_options options = { .scale = scale };
	struct kv_row_view views[2];
	float lse;

	for (int v = 0; v < 2; v++) {
		const uint64_t row_bytes = rows->codecs[v]->row_bytes;

		views[v] = (struct kv_row_view){
			.base = rows->packed[v],
			.block_size = 16,
			.block_bytes = 16 * row_bytes,
			.token_bytes = row_bytes,
		};
	}

	const struct kv_attention_input input = {
		.k_codec = rows->codecs[0],
		.v_codec = rows->codecs[1],
		.k = views[0],
		.v = views[1],
		.q = rows->q,
		.n_queries = 1,
		.tokens.hi = n_tokens,
	};

	kv_attention_rows(&input, &options, &scratch, out, &lse);
}

/* float64 attention over these V rows; `weight_squares` is the sum of the squared weights. */
static void attend_exactly(
	const struct rows *rows, const float *v, uint32_t n_tokens, double *out, double *weight_squares)
{
	const struct kv_attention_exact_input input = {
		.q = rows->q,
		.k = rows->numbers[0],
		.v = v,
		.k_stride = HEAD_DIM,
		.v_stride = HEAD_DIM,
		.k_dim = HEAD_DIM,
		.v_dim = HEAD_DIM,
		.tokens.hi = n_tokens,
		.scale = (double)scale,
	};
	double lse, squares = 0;

	kv_attention_exact(&input, out, &lse);
	for (uint32_t t = 0; t < n_tokens; t++) {
		double product = 0;

		for (uint32_t i = 0; i < HEAD_DIM; i++)
			product += (double)rows->q[i] * (double)rows->numbers[0][(size_t)t * HEAD_DIM + i];
		squares += exp(2 * ((double)scale * product - lse));
	}
	*weight_squares = squares;
}

static double distance(const float *a, const double *b)
{
	double squares = 0;

	for (uint32_t i = 0; i < HEAD_DIM; i++)
		squares += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
	return sqrt(squares);
}

static double length_of(const double *a)
{
	double squares = 0;

	for (uint32_t i = 0; i < HEAD_DIM; i++)
		squares += a[i] * a[i];
	return sqrt(squares);
}

/*
 * `row_error` is the root of E ||e||^2 of a row and `shrink` the part of the mean that all errors have in
 * common. Twice the deviation of the sum: with 64 channels, its squared length is a chi-squared of about that
 * many degrees, which is never four times its mean.
 */
static void check_lengths(const struct rows *rows, double row_error, double shrink)
{
	double before = 0;

	for (size_t l = 0; l < KV_LENGTH(lengths); l++) {
		double exact[HEAD_DIM], exact_decoded[HEAD_DIM], weight_squares;
		float out[HEAD_DIM];

		attend(rows, lengths[l], out);
		attend_exactly(rows, rows->v_decoded, lengths[l], exact_decoded, &weight_squares);
		ck_assert_double_le(distance(out, exact_decoded), EXACT_BOUND * length_of(exact_decoded));
		attend_exactly(rows, rows->numbers[1], lengths[l], exact, &weight_squares);

		const double error = distance(out, exact);
		const double spread = row_error * sqrt(weight_squares);
		const double bound = 2 * spread + shrink * length_of(exact);

		printf("%6u tokens: error %.3e, bound %.3e\n", lengths[l], error, bound);
		ck_assert_double_le(error, bound);
		/* Nor is it suspiciously small: the bound is about what it is, and not far above it. */
		ck_assert_double_ge(error, spread / 4);
		if (l > 0)
			ck_assert_double_lt(error, before);
		before = error;
	}
}

/* tq4: the error shrinks with the length, down to the part D of the mean. D = 0.0093 at d = 64, as at 128. */
START_TEST(test_error_of_tq4_does_not_grow_with_length)
{
	const double total_error = 0.0094;
	struct rows rows = make_rows("tq4", 51);

	check_lengths(&rows, sqrt(total_error * HEAD_DIM * (1 + MEAN * MEAN)), total_error);
	drop_rows(&rows);
}
END_TEST

/*
 * v4: a group of 32 Gaussians spans 4.14 deviations on average (E of the range), E of its square is 17.6; a
 * step is a 15th of it and the error is uniform: step / sqrt(12) for a channel. It has mean 0, but for the
 * rounding of scale and zero to float16: 2^-11 of at most 3 deviations, of either sign.
 */
START_TEST(test_error_of_v4_does_not_grow_with_length)
{
	struct rows rows = make_rows("v4", 52);

	check_lengths(&rows, sqrt(HEAD_DIM * 17.6 / 15 / 15 / 12), 0x1p-11);
	drop_rows(&rows);
}
END_TEST

static Suite *suite(void)
{
	Suite *suite = suite_create("attention_length");
	TCase *tcase = tcase_create("attention_length");

	tcase_add_test(tcase, test_error_of_tq4_does_not_grow_with_length);
	tcase_add_test(tcase, test_error_of_v4_does_not_grow_with_length);
	suite_add_tcase(suite, tcase);
	return suite;
}

int main(void)
{
	return kv_test_run(suite(), CK_FORK);
}
