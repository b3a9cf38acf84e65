/* Codecs for tests: one call makes the rotation and the codec, with defaults for what is not named. */
#ifndef TESTS_LIB_KV_CODEC_H
#define TESTS_LIB_KV_CODEC_H

#include <check.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#include "core/format.h"
#include "tests/lib/kv_test.h"

struct kv_test_codec {
	struct kv_rotation *rotation;
	struct kv_row_codec *codec;
};

/* kind NONE: the default of the dim. Seed 42. */
static inline struct kv_test_codec kv_test_codec_make_rotated(const char *name, uint32_t head_dim,
	enum kv_rotation_kind kind, const struct kv_format_options *options)
{
	const struct kv_format *format = NULL;
	struct kv_test_codec made = { NULL, NULL };
	struct kv_error err = { 0 };

	if (kind == KV_ROTATION_NONE)
		kind = kv_rotation_kind_default(head_dim);
	ck_assert_msg(kv_format_parse(name, &format, &err) == KV_OK, "%s", err.msg);
	if (kv_format_is_rotated(format))
		ck_assert_msg(
			kv_rotation_create(kind, head_dim, 42, &made.rotation, &err) == KV_OK, "%s", err.msg);
	ck_assert_msg(kv_row_codec_create_with(format, head_dim, made.rotation, options, &made.codec, &err) ==
			KV_OK,
		"%s", err.msg);
	return made;
}

static inline struct kv_test_codec kv_test_codec_make(
	const char *name, uint32_t head_dim, const struct kv_format_options *options)
{
	return kv_test_codec_make_rotated(name, head_dim, KV_ROTATION_NONE, options);
}

static inline void kv_test_codec_drop(struct kv_test_codec *made)
{
	kv_row_codec_destroy(made->codec);
	kv_rotation_destroy(made->rotation);
}

/* Normal numbers by Box and Muller; n is even. */
static inline void kv_test_normal(uint64_t *state, uint32_t n, double scale, float *row)
{
	for (uint32_t i = 0; i < n; i += 2) {
		const double u = (double)(kv_test_random(state) >> 11) * 0x1p-53;
		const double angle = (double)(kv_test_random(state) >> 11) * (0x1p-53 * 6.283185307179586);
		const double radius = scale * sqrt(-2 * log1p(-u));

		row[i] = (float)(radius * cos(angle));
		row[i + 1] = (float)(radius * sin(angle));
	}
}

static inline double kv_test_product(uint32_t n, const float *a, const float *b)
{
	double sum = 0;

	for (uint32_t i = 0; i < n; i++)
		sum += (double)a[i] * (double)b[i];
	return sum;
}

/* ||a - b||^2 */
static inline double kv_test_sq_distance(uint32_t n, const float *a, const float *b)
{
	double sum = 0;

	for (uint32_t i = 0; i < n; i++)
		sum += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
	return sum;
}

/* FNV-1a, 64 bits, as in the golden files. */
static inline uint64_t kv_test_fnv(uint64_t state, const void *data, size_t n_bytes)
{
	const uint8_t *bytes = data;

	for (size_t i = 0; i < n_bytes; i++)
		state = (state ^ bytes[i]) * 0x100000001B3ull;
	return state;
}
#define KV_TEST_FNV_START 0xCBF29CE484222325ull

#endif
