/*
 * Encoding of tqN rows, for every set of row kernels, against the written order of FORMATS 0 as plain loops:
 * the same bytes, and the same refusals. Loop index: set.
 */
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/checked.h"
#include "core/row_kernels.h"
#include "tests/lib/kv_codec.h"

#define SEED 0xE2C0DE5u

static uint64_t state;

/* NULL: this processor has no set of this index, and the test has nothing to do. */
static const struct kv_row_kernels *begin(int set_idx)
{
	const struct kv_row_kernels *kernels = kv_row_kernels_at((uint32_t)set_idx);

	state = SEED;
	if (kernels)
		kv_row_kernels_use(kernels);
	return kernels;
}

static uint32_t any_below(uint32_t n)
{
	return (uint32_t)(kv_test_random(&state) >> 33) % n;
}

/* All magnitudes that float32 has, with zeros of both signs. */
static float any_value(void)
{
	const uint64_t random = kv_test_random(&state);

	if (random % 11 == 0)
		return random & 64 ? -0.0f : 0.0f;
	return (float)ldexp((double)(int32_t)random, (int)(random >> 40) % 150 - 130);
}

/* ---- the written order ---- */

static float plain_length(const float *values, uint32_t n)
{
	double sums[256] = { 0 };
	uint32_t p = 1;

	while (p < n)
		p *= 2;
	for (uint32_t i = 0; i < n; i++)
		sums[i] = (double)values[i] * (double)values[i];
	for (uint32_t h = p / 2; h >= 1; h /= 2) {
		for (uint32_t i = 0; i < h; i++)
			sums[i] += sums[i + h];
	}
	return (float)sqrt(sums[0]);
}

static void plain_rotate(const struct kv_rotation *rotation, const float *from, float *to)
{
	const uint32_t n = rotation->head_dim;

	for (uint32_t i = 0; rotation->matrix && i < n; i++) {
		double sum = 0;

		for (uint32_t j = 0; j < n; j++)
			sum += (double)rotation->matrix[i * n + j] * (double)from[j];
		to[i] = (float)sum;
	}
	if (rotation->matrix)
		return;
	for (uint32_t i = 0; i < n; i++)
		to[i] = rotation->signs_in[i] * from[i];
	for (uint32_t stride = 1; stride < n; stride *= 2) {
		for (uint32_t i = 0; i < n; i++) {
			const float a = to[i], b = to[i ^ stride];

			if ((i & stride) == 0) {
				to[i] = a + b;
				to[i ^ stride] = a - b;
			}
		}
	}
	for (uint32_t i = 0; i < n; i++)
		to[i] = rotation->signs_out[i] * (to[i] * (float)(1 / sqrt((double)n)));
}

/* The row's rotated unit vector; returns the norm. */
static float plain_turn(const struct kv_rotation *rotation, const float *row, float *turned)
{
	const float length = plain_length(row, rotation->head_dim);
	const float norm = length > (float)1e-12 ? length : (float)1e-12;
	float unit[256];

	for (uint32_t i = 0; i < rotation->head_dim; i++)
		unit[i] = row[i] / norm;
	plain_rotate(rotation, unit, turned);
	return norm;
}

static void plain_encode(
	const struct kvcb_codebook *codebook, const float *turned, uint32_t n, float norm, uint8_t *out)
{
	const uint32_t bits = codebook->bits;

	memset(out, 0, (n * bits + 7) / 8);
	for (uint32_t i = 0; i < n; i++) {
		uint32_t cell = 0;

		for (uint32_t b = 0; b < (1u << bits) - 1; b++)
			cell += codebook->interior_boundaries[b] < turned[i];
		for (uint32_t k = 0; k < bits; k++)
			out[(i * bits + k) / 8] |= (uint8_t)((cell >> k & 1u) << (i * bits + k) % 8);
	}
	memcpy(out + (n * bits + 7) / 8, &norm, sizeof(norm));
}

static void assert_encoded(const struct kv_row_codec *codec, const float *row, const char *what)
{
	const struct kvcb_codebook *codebook = codec->segments[0].codebook;
	uint8_t expected[KV_ROW_BYTES_MAX], found[KV_ROW_BYTES_MAX];
	struct kv_row_scratch scratch;
	float turned[256];
	const float norm = plain_turn(codec->rotation, row, turned);

	plain_encode(codebook, turned, codec->head_dim, norm, expected);
	ck_assert_int_eq(kv_row_codec_encode(codec, row, found, &scratch), KV_OK);
	ck_assert_msg(memcmp(found, expected, codec->row_bytes) == 0, "%s: %s of %u, rotation %s, set %s",
		what, codec->format->name, codec->head_dim, kv_rotation_kind_name(codec->rotation->kind),
		kv_row_kernels()->name);
}

/* ---- whole rows ---- */

static void draw_row(uint32_t kind, uint32_t n, float *row)
{
	memset(row, 0, n * sizeof(*row));
	if (kind == 0) /* zero, of either sign */
		row[any_below(n)] = -0.0f;
	else if (kind == 1) /* one channel: coordinates of the same magnitude, or a column of the matrix */
		row[any_below(n)] = any_value();
	else if (kind == 2) /* shorter than the shortest norm */
		kv_test_normal(&state, n, 1e-14, row);
	else if (kind == 3) /* the length is just within float32 */
		kv_test_normal(&state, n, 1e37, row);
	else
		kv_test_normal(&state, n, ldexp(1, (int)any_below(40) - 20), row);
	for (uint32_t i = 0; kind == 4 && i < n; i++)
		row[i] = any_value() * 0x1p-20f;
	for (uint32_t i = 0; kind == 5 && i < n; i++) /* as they come as bf16 */
		row[i] = kv_bf16_to_f32(kv_f32_to_bf16(row[i]));
}

/* Every width and dim, each rotation that it can have, and rows of all kinds. */
START_TEST(test_encode_is_the_written_order)
{
	static const enum kv_rotation_kind kinds[] = { KV_ROTATION_RHT, KV_ROTATION_QR };
	const struct kv_row_kernels *kernels = begin(_i);

	for (uint32_t dim = 16; kernels && dim <= 256; dim += 16) {
		for (uint32_t bits = 1; bits <= 8; bits++) {
			char name[8];

			snprintf(name, sizeof(name), "tq%u", bits);
			/* a codebook of other dims has to be solved: three of its widths will do */
			if (!kvcb_find(dim, bits) && bits != 1 && bits != 4 && bits != 5)
				continue;
			for (uint32_t k = 0; k < KV_LENGTH(kinds); k++) {
				if (kv_rotation_check(kinds[k], dim, NULL) != KV_OK)
					continue;

				struct kv_test_codec made =
					kv_test_codec_make_rotated(name, dim, kinds[k], NULL);

				for (uint32_t r = 0; r < 33; r++) {
					float row[256];

					draw_row(r % 9, dim, row);
					assert_encoded(made.codec, row, "row");
				}
				kv_test_codec_drop(&made);
			}
		}
	}
	kv_row_kernels_use(NULL);
}
END_TEST

static int ascending(const void *a, const void *b)
{
	const float x = *(const float *)a, y = *(const float *)b;

	return x < y ? -1 : x > y;
}

/*
 * Boundaries that are coordinates of the row, to the bit, or the next number on either side: the hardest
 * comparisons there are, in every cell.
 */
START_TEST(test_encode_on_boundaries)
{
	static const uint32_t dims[] = { 16, 64, 80, 128, 256 };
	const struct kv_row_kernels *kernels = begin(_i);

	for (uint32_t round = 0; kernels && round < 160; round++) {
		const uint32_t dim = dims[round % KV_LENGTH(dims)], bits = 1 + round % 8;
		const uint32_t n_boundaries = (1u << bits) - 1;
		struct kvcb_codebook codebook = { .head_dim = dim, .bits = bits };
		const struct kvcb_codebook *codebooks[] = { &codebook };
		const struct kv_format_options options = { .codebooks = codebooks, .n_codebooks = 1 };
		struct kv_test_codec made;
		float row[256], turned[256];
		char name[8];

		snprintf(name, sizeof(name), "tq%u", bits);
		made = kv_test_codec_make(name, dim, NULL);
		kv_test_normal(&state, dim, 1, row);
		(void)plain_turn(made.rotation, row, turned);
		kv_test_codec_drop(&made);
		for (uint32_t b = 0; b < n_boundaries; b++) {
			const float y = turned[any_below(dim)];

			codebook.interior_boundaries[b] =
				round % 3 == 0 ? y : nextafterf(y, round % 3 == 1 ? -2 : 2);
		}
		qsort(codebook.interior_boundaries, n_boundaries, sizeof(float), ascending);
		for (uint32_t c = 0; c <= n_boundaries; c++)
			codebook.centroids[c] = (float)c;
		made = kv_test_codec_make(name, dim, &options);
		assert_encoded(made.codec, row, "on boundaries");
		kv_test_codec_drop(&made);
	}
	kv_row_kernels_use(NULL);
}
END_TEST

/* A row with one bad number anywhere, or too long a one, is refused by every format, and nothing is written.
 */
START_TEST(test_encode_refuses_what_is_not_finite)
{
	static const float bad[] = { NAN, -NAN, INFINITY, -INFINITY };
	const struct kv_row_kernels *kernels = begin(_i);

	for (uint32_t f = 0; kernels && f < kv_format_count(); f++) {
		for (uint32_t dim = 48; dim <= 128; dim += 80) {
			struct kv_test_codec made = kv_test_codec_make(kv_format_at(f)->name, dim, NULL);
			uint8_t out[KV_ROW_BYTES_MAX], before[KV_ROW_BYTES_MAX];
			struct kv_row_scratch scratch;
			float row[256];

			memset(out, 0xA5, sizeof(out));
			memset(before, 0xA5, sizeof(before));
			for (uint32_t i = 0; i < dim; i++) {
				kv_test_normal(&state, dim, 1, row);
				row[i] = bad[(i + f) % KV_LENGTH(bad)];
				ck_assert_int_eq(
					kv_row_codec_encode(made.codec, row, out, &scratch), KV_BAD_VALUE);
				ck_assert_mem_eq(out, before, sizeof(out));
			}
			for (uint32_t i = 0; made.codec->rotation && i < dim; i++)
				row[i] = i % 2 ? 3e38f : -3e38f;
			if (made.codec->rotation) {
				ck_assert_int_eq(
					kv_row_codec_encode(made.codec, row, out, &scratch), KV_BAD_VALUE);
				ck_assert_mem_eq(out, before, sizeof(out));
			}
			kv_test_codec_drop(&made);
		}
	}
	kv_row_kernels_use(NULL);
}
END_TEST

/* ---- kernels alone ---- */

/* A copy in memory of exactly its length, so that a sanitizer sees a step too far. */
static float *copy_of(const float *values, uint32_t n)
{
	float *copy = malloc((n > 0 ? n : 1) * sizeof(*copy));

	ck_assert_ptr_nonnull(copy);
	memcpy(copy, values, n * sizeof(*copy));
	return copy;
}

static bool is_same(float a, float b)
{
	return memcmp(&a, &b, sizeof(a)) == 0 || (isnan(a) && isnan(b));
}

/* Lengths of any number of values, those of bad ones and too long ones included; quotients in place. */
START_TEST(test_encode_length_and_divide)
{
	const struct kv_row_kernels *kernels = begin(_i);

	for (uint32_t n = 1; kernels && n <= 256; n++) {
		float values[256];

		for (uint32_t i = 0; i < n; i++)
			values[i] = any_value();
		if (n % 13 == 0)
			values[any_below(n)] = n % 2 ? NAN : FLT_MAX;
		if (n % 17 == 0)
			values[any_below(n)] = -INFINITY;

		float *exact = copy_of(values, n);
		const float length = plain_length(values, n), found = kernels->length(exact, n);

		ck_assert_msg(is_same(found, length), "%u values: %a instead of %a", n, (double)found,
			(double)length);
		kernels->divide(exact, n, length, exact);
		for (uint32_t i = 0; i < n; i++)
			ck_assert(is_same(exact[i], values[i] / length));
		free(exact);
	}
	kv_row_kernels_use(NULL);
}
END_TEST

/* All bfloat16 there are, at any address and in any number. */
START_TEST(test_encode_widen)
{
	const struct kv_row_kernels *kernels = begin(_i);
	uint8_t bytes[2 * 257 + 1];
	float found[257];

	for (uint32_t first = 0; kernels && first < 65536; first += 256) {
		const uint32_t n = 200 + any_below(57), shift = any_below(2);

		for (uint32_t i = 0; i < n; i++)
			kv_store_u16((uint16_t)(first + i), bytes + shift + 2 * (size_t)i);
		found[n] = 77;
		kernels->widen_bf16(bytes + shift, n, found);
		for (uint32_t i = 0; i < n; i++)
			ck_assert_uint_eq(kv_f32_bits(found[i]), (first + i) << 16 & 0xFFFFFFFFu);
		ck_assert(found[n] == 77);
	}
	kv_row_kernels_use(NULL);
}
END_TEST

/* Any number of boundaries and of values, many of them on a boundary, some boundaries the same. */
START_TEST(test_encode_count_below)
{
	const struct kv_row_kernels *kernels = begin(_i);

	for (uint32_t n_boundaries = 1; kernels && n_boundaries <= 255; n_boundaries++) {
		const uint32_t n = any_below(257);
		float boundaries[256], values[256];
		uint8_t cells[257];

		for (uint32_t b = 0; b < n_boundaries; b++)
			boundaries[b] = (float)any_below(400) / 64 - 3;
		qsort(boundaries, n_boundaries, sizeof(float), ascending);
		for (uint32_t i = 0; i < n; i++)
			values[i] = (float)any_below(500) / 64 - 4;
		cells[n] = 77;

		float *exact = copy_of(boundaries, n_boundaries), *y = copy_of(values, n);

		kernels->count_below(exact, n_boundaries, y, n, cells);
		for (uint32_t i = 0; i < n; i++) {
			uint32_t n_below = 0;

			for (uint32_t b = 0; b < n_boundaries; b++)
				n_below += boundaries[b] < values[i];
			ck_assert_uint_eq(cells[i], n_below);
		}
		ck_assert_uint_eq(cells[n], 77);
		free(exact);
		free(y);
	}
	kv_row_kernels_use(NULL);
}
END_TEST

/* Sums over increasing index, in both precisions, in place and not. */
START_TEST(test_encode_multiply)
{
	const struct kv_row_kernels *kernels = begin(_i);

	for (uint32_t n = 16; kernels && n <= 256; n += 16) {
		float *rows = calloc((size_t)n * n, sizeof(*rows)), narrow[256];
		double wide[256], expected[256], expected_narrow[256];

		ck_assert_ptr_nonnull(rows);
		for (uint32_t i = 0; i < n * n; i++)
			rows[i] = any_value();
		for (uint32_t j = 0; j < n; j++) {
			narrow[j] = any_value();
			wide[j] = (double)any_value() * 1.000000001;
		}
		for (uint32_t i = 0; i < n; i++) {
			expected[i] = expected_narrow[i] = 0;
			for (uint32_t j = 0; j < n; j++) {
				expected[i] += (double)rows[j * n + i] * wide[j];
				expected_narrow[i] += (double)rows[j * n + i] * (double)narrow[j];
			}
		}
		kernels->multiply_f32(n, rows, narrow, narrow);
		kernels->multiply_f64(n, rows, wide, wide);
		for (uint32_t i = 0; i < n; i++) {
			ck_assert(is_same(narrow[i], (float)expected_narrow[i]));
			ck_assert(memcmp(&wide[i], &expected[i], sizeof(*wide)) == 0);
		}
		free(rows);
	}
	kv_row_kernels_use(NULL);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("encode");
	TCase *tcase = tcase_create("encode");
	const int n = (int)KV_ROW_KERNELS_SETS_MAX;

	printf("seed %#x\n", SEED);
	tcase_set_timeout(tcase, 120);
	tcase_add_loop_test(tcase, test_encode_is_the_written_order, 0, n);
	tcase_add_loop_test(tcase, test_encode_on_boundaries, 0, n);
	tcase_add_loop_test(tcase, test_encode_refuses_what_is_not_finite, 0, n);
	tcase_add_loop_test(tcase, test_encode_length_and_divide, 0, n);
	tcase_add_loop_test(tcase, test_encode_widen, 0, n);
	tcase_add_loop_test(tcase, test_encode_count_below, 0, n);
	tcase_add_loop_test(tcase, test_encode_multiply, 0, n);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK_GETENV);
}
