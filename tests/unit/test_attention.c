/*
 * Scalar attention against float64 attention over the decoded rows, over paged memory in the order in which a
 * pool holds it. Bound of the scalar backend: 1e-5 relative L2.
 */
#include "core/attention.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/checked.h"
#include "tests/lib/kv_test.h"

#define KV_HEADS 3u
#define BOUND    1e-5

/* One layer of one sequence: rows of K and V of KV_HEADS heads in pages, and what they decode to. */
struct layer {
	struct kv_rotation *rotations[2];
	struct kv_row_codec *codecs[2]; /* K, V */
	uint32_t n_tokens, block_size, n_blocks;
	uint32_t *table;
	uint8_t *pages[2];
	float *decoded[2]; /* [n_tokens, KV_HEADS, head_dim] */
};

static float uniform(uint64_t *state)
{
	return (float)((double)(kv_test_random(state) >> 11) * 0x1p-52 - 1);
}

static struct kv_row_codec *make_codec(const char *name, uint32_t head_dim, struct kv_rotation **rotation)
{
	const struct kv_format *format = NULL;
	struct kv_row_codec *codec = NULL;

	ck_assert_int_eq(kv_format_parse(name, &format, NULL), KV_OK);
	if (kv_format_is_rotated(format))
		ck_assert_int_eq(
			kv_rotation_create(kv_rotation_kind_default(head_dim), head_dim, 42, rotation, NULL),
			KV_OK);
	ck_assert_int_eq(kv_row_codec_create(format, head_dim, *rotation, &codec, NULL), KV_OK);
	return codec;
}

static uint8_t *row_at(const struct layer *layer, int is_v, uint32_t t, uint32_t head)
{
	const uint64_t row_bytes = layer->codecs[is_v]->row_bytes;
	const uint64_t slot =
		(uint64_t)layer->table[t / layer->block_size] * layer->block_size + t % layer->block_size;

	return layer->pages[is_v] + (slot * KV_HEADS + head) * row_bytes;
}

static void fill_rows(struct layer *layer, int is_v, float size, uint64_t *state)
{
	const struct kv_row_codec *codec = layer->codecs[is_v];
	const uint32_t d = codec->head_dim;
	struct kv_row_scratch scratch;
	float row[KV_HEAD_DIM_MAX];

	for (uint32_t t = 0; t < layer->n_tokens; t++) {
		for (uint32_t head = 0; head < KV_HEADS; head++) {
			uint8_t *packed = row_at(layer, is_v, t, head);

			for (uint32_t i = 0; i < d; i++)
				row[i] = size * uniform(state);
			ck_assert_int_eq(kv_row_codec_encode(codec, row, packed, &scratch), KV_OK);
			kv_row_codec_decode(codec, packed,
				layer->decoded[is_v] + ((size_t)t * KV_HEADS + head) * d, &scratch);
		}
	}
}

/* Blocks lie in the pool in an order given by `order_seed`; the rows depend on `seed` alone. */
static struct layer make_layer(const char *const formats[2], const uint32_t dims[2], uint32_t n_tokens,
	uint32_t block_size, float k_size, uint64_t seed, uint64_t order_seed)
{
	struct layer layer = { .n_tokens = n_tokens, .block_size = block_size };
	uint64_t state = seed, order_state = order_seed;

	layer.n_blocks = n_tokens / block_size + 3;
	layer.table = malloc(layer.n_blocks * sizeof(*layer.table));
	ck_assert_ptr_nonnull(layer.table);
	for (uint32_t b = 0; b < layer.n_blocks; b++) {
		const uint32_t other = (uint32_t)(kv_test_random(&order_state) % (b + 1));

		layer.table[b] = layer.table[other];
		layer.table[other] = b;
	}
	for (int v = 0; v < 2; v++) {
		layer.codecs[v] = make_codec(formats[v], dims[v], &layer.rotations[v]);
		const size_t page_bytes =
			(size_t)layer.n_blocks * block_size * KV_HEADS * layer.codecs[v]->row_bytes;

		layer.pages[v] = malloc(page_bytes);
		layer.decoded[v] = malloc((n_tokens + 1) * sizeof(float) * KV_HEADS * dims[v]);
		ck_assert_ptr_nonnull(layer.pages[v]);
		ck_assert_ptr_nonnull(layer.decoded[v]);
		memset(layer.pages[v], 0xFF,
			page_bytes); /* a row that is not the sequence's decodes to NaN */
		fill_rows(&layer, v, v ? 1 : k_size, &state);
	}
	return layer;
}

static void drop_layer(struct layer *layer)
{
	for (int v = 0; v < 2; v++) {
		kv_row_codec_destroy(layer->codecs[v]);
		kv_rotation_destroy(layer->rotations[v]);
		free(layer->pages[v]);
		free(layer->decoded[v]);
	}
	free(layer->table);
}

static struct kv_row_view view_of(const struct layer *layer, int is_v, uint32_t head)
{
	const uint64_t row_bytes = layer->codecs[is_v]->row_bytes;

	return (struct kv_row_view){
		.base = layer->pages[is_v],
		.block_table = layer->table,
		.block_size = layer->block_size,
		.block_bytes = layer->block_size * KV_HEADS * row_bytes,
		.token_bytes = KV_HEADS * row_bytes,
		.head_offset_bytes = head * row_bytes,
	};
}

static struct kv_attention_input input_of(
	const struct layer *layer, uint32_t head, const float *q, uint32_t token_lo, uint32_t token_hi)
{
	return (struct kv_attention_input){
		.k_codec = layer->codecs[0],
		.v_codec = layer->codecs[1],
		.k = view_of(layer, 0, head),
		.v = view_of(layer, 1, head),
		.q = q,
		.n_queries = 1,
		.tokens.lo = token_lo,
		.tokens.hi = token_hi,
	};
}

static void exact_of(const struct layer *layer, uint32_t head, const float *q, uint32_t token_lo,
	uint32_t token_hi, float scale, double *out, double *lse)
{
	const uint32_t k_dim = layer->codecs[0]->head_dim, v_dim = layer->codecs[1]->head_dim;
	const struct kv_attention_exact_input input = {
		.q = q,
		.k = layer->decoded[0] + head * k_dim,
		.v = layer->decoded[1] + head * v_dim,
		.k_stride = KV_HEADS * k_dim,
		.v_stride = KV_HEADS * v_dim,
		.k_dim = k_dim,
		.v_dim = v_dim,
		.tokens.lo = token_lo,
		.tokens.hi = token_hi,
		.scale = (double)scale,
	};

	kv_attention_exact(&input, out, lse);
}

/* Relative L2 distance of `out` from exact attention over the decoded rows; compares the lse too. */
static double error_of(
	const struct layer *layer, uint32_t head, const float *q, uint32_t lo, uint32_t hi, float scale)
{
	const struct kv_attention_input input = input_of(layer, head, q, lo, hi);
	const struct kv_attention_options options = { .scale = scale };
	struct kv_attention_scratch scratch;
	float out[KV_HEAD_DIM_MAX], lse;
	double exact[KV_HEAD_DIM_MAX], exact_lse, error = 0, size = 0;

	kv_attention_rows(&input, &options, &scratch, out, &lse);
	exact_of(layer, head, q, lo, hi, scale, exact, &exact_lse);
	/* decoded rows are float32: a logit of <q, k> = 0 is off by their rounding, 40 sqrt(d) 2^-24 at worst
	 */
	ck_assert_double_eq_tol((double)lse, exact_lse, 1e-5 + 1e-6 * fabs(exact_lse));
	for (uint32_t i = 0; i < layer->codecs[1]->head_dim; i++) {
		error += ((double)out[i] - exact[i]) * ((double)out[i] - exact[i]);
		size += exact[i] * exact[i];
	}
	return sqrt(error / size);
}

static const struct {
	const char *formats[2];
	uint32_t dims[2];
	uint32_t block_size;
} shapes[] = {
	{ { "f32", "f32" }, { 16, 16 }, 16 },
	{ { "bf16", "bf16" }, { 80, 48 }, 32 },
	{ { "tq4", "tq4" }, { 64, 64 }, 16 },
	{ { "tq4", "bf16" }, { 128, 256 }, 64 },
	{ { "f32", "tq4" }, { 112, 128 }, 32 },
	{ { "tq4", "tq4" }, { 256, 16 }, 16 },
	{ { "tqp3", "fp8" }, { 64, 80 }, 16 },
	{ { "tqp4", "tq2" }, { 80, 96 }, 32 },
	{ { "turboquant25", "v3" }, { 128, 96 }, 16 },
	{ { "v8", "turboquant35" }, { 48, 112 }, 64 },
	{ { "f16", "tqp5" }, { 32, 128 }, 16 },
};

/* Any formats, dims, heads and lengths about block and piece edges stay within the bound, flat and peaked. */
START_TEST(test_attention_is_within_its_bound)
{
	static const uint32_t lengths[] = { 1, 2, 15, 16, 17, 63, 64, 65, 127, 200 };
	static const float k_sizes[] = { 1e-3f, 1, 40 };

	printf("seeds 100 and up\n");
	for (size_t s = 0; s < KV_LENGTH(shapes); s++) {
		for (size_t k = 0; k < KV_LENGTH(k_sizes); k++) {
			uint64_t state = 100 + 10 * s + k;
			struct layer layer = make_layer(shapes[s].formats, shapes[s].dims, 200,
				shapes[s].block_size, k_sizes[k], state, 3);
			const float scale = 1 / sqrtf((float)shapes[s].dims[0]);

			for (size_t l = 0; l < KV_LENGTH(lengths); l++) {
				float q[KV_HEAD_DIM_MAX];

				for (uint32_t i = 0; i < shapes[s].dims[0]; i++)
					q[i] = 2 * uniform(&state);
				ck_assert_double_le(
					error_of(&layer, (uint32_t)l % KV_HEADS, q, 0, lengths[l], scale),
					BOUND);
				ck_assert_double_le(
					error_of(&layer, 1, q, lengths[l] / 2, lengths[l], scale), BOUND);
			}
			drop_layer(&layer);
		}
	}
}
END_TEST

/* Keys as large as 6e4 and logits far beyond exp()'s range neither overflow nor lose the bound. */
START_TEST(test_attention_takes_huge_logits)
{
	static const char *const formats[2] = { "f32", "tq4" };
	static const uint32_t dims[2] = { 64, 64 };
	struct layer layer = make_layer(formats, dims, 100, 16, 6e4f, 21, 4);
	uint64_t state = 22;
	float q[64];

	printf("seeds 21, 22\n");
	for (uint32_t i = 0; i < 64; i++)
		q[i] = 50 * uniform(&state);
	ck_assert_double_le(error_of(&layer, 0, q, 0, 100, 0.125f), BOUND);
	ck_assert_double_le(error_of(&layer, 2, q, 0, 100, -0.125f), BOUND);
	drop_layer(&layer);
}
END_TEST

/* The error does not grow with the length of the sequence. */
START_TEST(test_attention_long_sequence)
{
	static const char *const formats[2] = { "tq4", "tq4" };
	static const uint32_t dims[2] = { 16, 16 };
	struct layer layer = make_layer(formats, dims, 20000, 64, 1, 31, 5);
	uint64_t state = 32;
	float q[16];

	printf("seeds 31, 32\n");
	for (uint32_t i = 0; i < 16; i++)
		q[i] = uniform(&state);
	ck_assert_double_le(error_of(&layer, 0, q, 0, 20000, 0.25f), BOUND);
	drop_layer(&layer);
}
END_TEST

/*
 * A batch of lengths 0, 1, page - 1, page, page + 1: length 0 gives exactly 0 and -inf and reads nothing, and
 * no item writes beside its own output and log-sum-exp.
 */
START_TEST(test_attention_empty_sequence_in_a_batch)
{
	static const char *const formats[2] = { "tq4", "bf16" };
	static const uint32_t dims[2] = { 64, 48 };
	static const uint32_t lengths[] = { 0, 1, 15, 0, 16, 17, 0 };
	struct layer layer = make_layer(formats, dims, 17, 16, 1, 41, 6);
	const struct kv_attention_options options = { .scale = 0.125f };
	struct kv_attention_scratch scratch;
	float q[64], out[7 + 2][48], lse[7 + 2];
	uint64_t state = 42;

	printf("seeds 41, 42\n");
	for (uint32_t i = 0; i < 64; i++)
		q[i] = uniform(&state);
	for (size_t n = 0; n < 9; n++) {
		for (uint32_t i = 0; i < 48; i++)
			out[n][i] = 777;
		lse[n] = 777;
	}
	memset(&scratch, 0xFF, sizeof(scratch)); /* NaN: what an earlier call left does not matter */
	for (size_t n = 0; n < 7; n++) {
		struct kv_attention_input input = input_of(&layer, 1, q, 0, lengths[n]);

		if (lengths[n] == 0) {
			input.k.base = input.v.base = NULL;
			input.k.block_table = input.v.block_table = NULL;
		}
		kv_attention_rows(&input, &options, &scratch, out[n + 1], &lse[n + 1]);
	}
	for (size_t n = 0; n < 7; n++) {
		double exact[48], exact_lse;

		exact_of(&layer, 1, q, 0, lengths[n], options.scale, exact, &exact_lse);
		if (lengths[n] == 0) {
			ck_assert(isinf(exact_lse) && exact_lse < 0);
			ck_assert(isinf(lse[n + 1]) && lse[n + 1] < 0);
		} else {
			ck_assert_double_eq_tol((double)lse[n + 1], exact_lse, 1e-6);
		}
		for (uint32_t i = 0; i < 48; i++) {
			if (lengths[n] == 0)
				ck_assert_uint_eq(kv_f32_bits(out[n + 1][i]), 0);
			else
				ck_assert_double_eq_tol((double)out[n + 1][i], exact[i], 1e-5);
		}
	}
	for (uint32_t i = 0; i < 48; i++) {
		ck_assert(out[0][i] == 777);
		ck_assert(out[8][i] == 777);
	}
	ck_assert(lse[0] == 777);
	ck_assert(lse[8] == 777);
	drop_layer(&layer);
}
END_TEST

/* Any number of queries share a call, and each gets the bits that it gets alone. */
START_TEST(test_attention_of_many_queries)
{
	static const char *const formats[2] = { "tq4", "bf16" };
	static const uint32_t dims[2] = { 64, 48 };
	static const uint32_t n_queries[] = { 2, 3, 8, 9, 17 };
	struct layer layer = make_layer(formats, dims, 90, 16, 1, 81, 9);
	const struct kv_attention_options options = { .scale = 0.125f };
	static struct kv_attention_scratch scratch;
	float q[17][64], alone[17][48], out[18][48], lse_alone[17], lse[18];
	uint64_t state = 82;

	printf("seeds 81, 82\n");
	for (uint32_t n = 0; n < 17; n++) {
		for (uint32_t i = 0; i < 64; i++)
			q[n][i] = 3 * uniform(&state);
		const struct kv_attention_input input = input_of(&layer, 1, q[n], 3, 90);

		kv_attention_rows(&input, &options, &scratch, alone[n], &lse_alone[n]);
	}
	for (size_t k = 0; k < KV_LENGTH(n_queries); k++) {
		const uint32_t n = n_queries[k];
		struct kv_attention_input input = input_of(&layer, 1, q[0], 3, 90);

		input.n_queries = n;
		out[n][0] = lse[n] = 777;
		kv_attention_rows(&input, &options, &scratch, out[0], lse);
		ck_assert_mem_eq(out, alone, n * sizeof(out[0]));
		ck_assert_mem_eq(lse, lse_alone, n * sizeof(lse[0]));
		ck_assert(out[n][0] == 777);
		ck_assert(lse[n] == 777);
		memset(out, 0, sizeof(out));
		kv_attention_rows(&input, &options, &scratch, out[0], NULL);
		ck_assert_mem_eq(out, alone, n * sizeof(out[0]));
		input.tokens.hi = 3;
		kv_attention_rows(&input, &options, &scratch, out[0], lse);
		for (uint32_t i = 0; i < n; i++) {
			ck_assert(out[i][47] == 0);
			ck_assert(isinf(lse[i]));
		}
	}
	drop_layer(&layer);
}
END_TEST

/* Where blocks lie in the pool changes nothing: the output has the same bits. */
START_TEST(test_attention_does_not_depend_on_block_order)
{
	static const char *const formats[2] = { "tq4", "tq4" };
	static const uint32_t dims[2] = { 64, 64 };
	const struct kv_attention_options options = { .scale = 0.125f };
	float q[64], out[2][64], lse[2];
	uint64_t state = 51;

	printf("seeds 51, 52\n");
	for (uint32_t i = 0; i < 64; i++)
		q[i] = 3 * uniform(&state);
	for (uint32_t n = 0; n < 2; n++) {
		struct layer layer = make_layer(formats, dims, 150, 16, 1, 52, n ? 1234 : 5);
		const struct kv_attention_input input = input_of(&layer, 2, q, 0, 150);
		struct kv_attention_scratch scratch;

		kv_attention_rows(&input, &options, &scratch, out[n], &lse[n]);
		drop_layer(&layer);
	}
	ck_assert_mem_eq(out[0], out[1], sizeof(out[0]));
	ck_assert_mem_eq(&lse[0], &lse[1], sizeof(lse[0]));
}
END_TEST

/* Without a block table, rows lie one behind the other. */
START_TEST(test_attention_over_contiguous_rows)
{
	struct kv_rotation *no_rotation = NULL;
	struct kv_row_codec *codec = make_codec("f32", 16, &no_rotation);
	const struct kv_attention_options options = { .scale = 1 };
	float rows[40][16] = { { 0 } }, q[16] = { 0 }, out[16], lse;
	struct kv_attention_scratch scratch;

	for (uint32_t t = 0; t < 40; t++)
		rows[t][0] = (float)t;
	const struct kv_row_view view = {
		.base = (const uint8_t *)rows, .block_size = 16, .block_bytes = 16 * 64, .token_bytes = 64
	};
	const struct kv_attention_input input = { .k_codec = codec,
		.v_codec = codec,
		.k = view,
		.v = view,
		.q = q,
		.n_queries = 1,
		.tokens.lo = 10,
		.tokens.hi = 40 };

	kv_attention_rows(&input, &options, &scratch, out, &lse);
	ck_assert_float_eq_tol(out[0], 24.5f, 1e-5f); /* the mean of 10 to 39 */
	ck_assert_float_eq_tol(lse, logf(30), 1e-6f);
	kv_row_codec_destroy(codec);
}
END_TEST

static void to_basis(const struct kv_row_codec *codec, const float *numbers, float *turned)
{
	double x[KV_HEAD_DIM_MAX], y[KV_HEAD_DIM_MAX];

	for (uint32_t i = 0; i < codec->head_dim; i++)
		x[i] = (double)numbers[i];
	kv_row_codec_to_basis(codec, x, y);
	for (uint32_t i = 0; i < codec->head_dim; i++)
		turned[i] = (float)y[i];
}

/* A caller that takes q to the rows' basis, and the output back itself, gets the same attention; of any
 * format. */
START_TEST(test_attention_with_rotated_q_and_output)
{
	static const char *const formats[][2] = { { "tq4", "tq4" }, { "tqp3", "turboquant35" },
		{ "turboquant25", "tqp2" }, { "bf16", "v4" } };
	static const uint32_t dims[2] = { 128, 80 };
	const struct kv_attention_options options = { .scale = 0.1f };
	static struct kv_attention_scratch scratch;
	uint64_t state = 62;

	printf("seeds 61, 62\n");
	for (size_t f = 0; f < KV_LENGTH(formats); f++) {
		struct layer layer = make_layer(formats[f], dims, 90, 32, 1, 61, 7);
		float q[128], q_turned[128], out[80], wanted[80], turned[80], lse, lse_turned;
		struct kv_attention_input input = input_of(&layer, 0, q, 0, 90);

		for (uint32_t i = 0; i < 128; i++)
			q[i] = uniform(&state);
		kv_attention_rows(&input, &options, &scratch, out, &lse);
		to_basis(layer.codecs[0], q, q_turned);
		input.q = q_turned;
		input.q_is_rotated = true;
		input.out_is_rotated = true;
		kv_attention_rows(&input, &options, &scratch, turned, &lse_turned);
		to_basis(layer.codecs[1], out, wanted);
		for (uint32_t i = 0; i < 80; i++)
			ck_assert_float_eq_tol(turned[i], wanted[i], 1e-6f);
		ck_assert_float_eq_tol(lse, lse_turned, 1e-5f);
		drop_layer(&layer);
	}
}
END_TEST

/*
 * Rows from which a centre was subtracted: adding scale * <q, centre> to every logit gives the attention, and
 * the log-sum-exp, over the rows as they were. Queries may be rotated already.
 */
START_TEST(test_attention_with_a_k_center)
{
	static const char *const formats[][2] = { { "tq4", "bf16" }, { "tqp3", "v4" }, { "f32", "f32" } };
	static const uint32_t dims[2] = { 64, 48 };
	uint64_t state = 91;

	printf("seeds 91, 92\n");
	for (size_t f = 0; f < KV_LENGTH(formats); f++) {
		struct layer layer = make_layer(formats[f], dims, 150, 16, 1, 92, 10);
		const struct kv_attention_options options = { .scale = 0.125f };
		struct kv_attention_scratch scratch;
		struct kv_attention_input input;
		float q[64], q_rotated[64], center[64], out[48], plain[48], lse, plain_lse;
		double exact[48], exact_lse;

		for (uint32_t i = 0; i < 64; i++) {
			q[i] = uniform(&state);
			center[i] = 20 * uniform(&state);
		}
		input = input_of(&layer, 1, q, 0, 150);
		kv_attention_rows(&input, &options, &scratch, plain, &plain_lse);
		input.k_center = center;
		kv_attention_rows(&input, &options, &scratch, out, &lse);
		for (uint32_t t = 0; t < 150; t++) { /* what the rows were */
			for (uint32_t i = 0; i < 64; i++)
				layer.decoded[0][(t * KV_HEADS + 1) * 64 + i] += center[i];
		}
		exact_of(&layer, 1, q, 0, 150, options.scale, exact, &exact_lse);
		ck_assert_double_eq_tol((double)lse, exact_lse, 1e-5);
		ck_assert_float_gt(fabsf(lse - plain_lse), 0.01f);
		for (uint32_t i = 0; i < 48; i++) {
			ck_assert_double_eq_tol((double)out[i], exact[i], 1e-5);
			ck_assert_float_eq_tol(out[i], plain[i], 1e-5f);
		}
		to_basis(layer.codecs[0], q, q_rotated);
		input.q = q_rotated;
		input.q_is_rotated = true;
		kv_attention_rows(&input, &options, &scratch, out, &lse);
		ck_assert_double_eq_tol((double)lse, exact_lse, 1e-4);
		drop_layer(&layer);
	}
}
END_TEST

/* Two parts of a sequence merge to the whole by their log-sum-exp. */
START_TEST(test_attention_parts_merge_by_lse)
{
	static const char *const formats[2] = { "tq4", "tq4" };
	static const uint32_t dims[2] = { 64, 64 };
	struct layer layer = make_layer(formats, dims, 130, 16, 5, 71, 8);
	const struct kv_attention_options options = { .scale = 0.125f };
	struct kv_attention_scratch scratch;
	float q[64], out[3][64], lse[3];
	uint64_t state = 72;

	printf("seeds 71, 72\n");
	for (uint32_t i = 0; i < 64; i++)
		q[i] = uniform(&state);
	static const uint32_t ranges[3][2] = { { 0, 50 }, { 50, 130 }, { 0, 130 } };

	for (uint32_t n = 0; n < 3; n++) {
		const struct kv_attention_input input = input_of(&layer, 1, q, ranges[n][0], ranges[n][1]);

		kv_attention_rows(&input, &options, &scratch, out[n], &lse[n]);
	}
	const double share = 1 / (1 + exp((double)lse[1] - (double)lse[0]));

	for (uint32_t i = 0; i < 64; i++)
		ck_assert_double_eq_tol(
			share * (double)out[0][i] + (1 - share) * (double)out[1][i], (double)out[2][i], 2e-6);
	drop_layer(&layer);
}
END_TEST

/* Exact attention by hand: logits ln 3 and 0 weigh 3/4 and 1/4; without keys all weigh the same. */
START_TEST(test_attention_exact_by_hand)
{
	const float q[2] = { 2, 1 }, k[4] = { 0.5f * 1.09861229f, 0, 0, 0 };
	const float v[4] = { 4, 8, 0, -8 };
	struct kv_attention_exact_input input = { .q = q,
		.k = k,
		.v = v,
		.k_stride = 2,
		.v_stride = 2,
		.k_dim = 2,
		.v_dim = 2,
		.tokens.hi = 2,
		.scale = 1 };
	double out[2], lse;

	kv_attention_exact(&input, out, &lse);
	ck_assert_double_eq_tol(out[0], 3, 1e-6);
	ck_assert_double_eq_tol(out[1], 4, 1e-6);
	ck_assert_double_eq_tol(lse, log(4), 1e-6);
	input.k = NULL;
	kv_attention_exact(&input, out, &lse);
	ck_assert_double_eq_tol(out[0], 2, 1e-12);
	ck_assert_double_eq_tol(out[1], 0, 1e-12);
	ck_assert_double_eq_tol(lse, log(2), 1e-12);
	input.tokens.lo = 1;
	kv_attention_exact(&input, out, &lse);
	ck_assert_double_eq_tol(out[1], -8, 1e-12);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("attention");
	TCase *tcase = tcase_create("all");

	tcase_set_timeout(tcase, 60);
	tcase_add_test(tcase, test_attention_is_within_its_bound);
	tcase_add_test(tcase, test_attention_takes_huge_logits);
	tcase_add_test(tcase, test_attention_long_sequence);
	tcase_add_test(tcase, test_attention_empty_sequence_in_a_batch);
	tcase_add_test(tcase, test_attention_of_many_queries);
	tcase_add_test(tcase, test_attention_does_not_depend_on_block_order);
	tcase_add_test(tcase, test_attention_over_contiguous_rows);
	tcase_add_test(tcase, test_attention_with_rotated_q_and_output);
	tcase_add_test(tcase, test_attention_with_a_k_center);
	tcase_add_test(tcase, test_attention_parts_merge_by_lse);
	tcase_add_test(tcase, test_attention_exact_by_hand);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
