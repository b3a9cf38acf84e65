/*
 * Rotations. Float32 in the written order of FORMATS 2: stored bytes depend on every rounding.
 * Multiplications by a sign are exact, so they may be multiplications.
 */
#include "core/rotation.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "core/checked.h"
#include "core/memory.h"
#include "core/mt19937.h"

static const char *const kind_names[] = {
	[KV_ROTATION_NONE] = "none",
	[KV_ROTATION_RHT] = "rht",
	[KV_ROTATION_QR] = "qr",
};

const char *kv_rotation_kind_name(enum kv_rotation_kind kind)
{
	return (unsigned)kind < KV_LENGTH(kind_names) ? kind_names[kind] : "unknown";
}

enum kv_status kv_rotation_kind_parse(const char *name, enum kv_rotation_kind *kind, struct kv_error *err)
{
	if (strcmp(name, "rht") == 0)
		*kind = KV_ROTATION_RHT;
	else if (strcmp(name, "qr") == 0)
		*kind = KV_ROTATION_QR;
	else
		return kv_fail(err, KV_BAD_ARG, "unknown rotation \"%.32s\" (known: rht, qr)", name);
	return KV_OK;
}

static bool is_power_of_two(uint32_t n)
{
	return n != 0 && (n & (n - 1)) == 0;
}

enum kv_rotation_kind kv_rotation_kind_default(uint32_t head_dim)
{
	return is_power_of_two(head_dim) ? KV_ROTATION_RHT : KV_ROTATION_QR;
}

enum kv_status kv_rotation_check(enum kv_rotation_kind kind, uint32_t head_dim, struct kv_error *err)
{
	if (head_dim < KV_HEAD_DIM_MIN || head_dim > KV_HEAD_DIM_MAX || head_dim % KV_HEAD_DIM_STEP != 0)
		return kv_fail(err, KV_BAD_ARG, "head_dim %u is not a multiple of %u from %u to %u", head_dim,
			KV_HEAD_DIM_STEP, KV_HEAD_DIM_MIN, KV_HEAD_DIM_MAX);
	switch (kind) {
	case KV_ROTATION_RHT:
		if (!is_power_of_two(head_dim))
			return kv_fail(err, KV_BAD_ARG,
				"rotation rht needs a power of two, and head_dim %u is none", head_dim);
		return KV_OK;
	case KV_ROTATION_QR:
		return kv_fail(err, KV_UNSUPPORTED,
			"rotation qr, which head_dim %u needs or the pool asks for, is not built in; "
			"rht serves 16, 32, 64, 128, 256",
			head_dim);
	case KV_ROTATION_NONE:
		break;
	}
	return kv_fail(err, KV_BAD_ARG, "no rotation of kind %d", (int)kind);
}

uint32_t kv_rotation_layer_seed(uint64_t seed_base, uint32_t layer_idx, uint32_t head_idx)
{
	const uint64_t seed = seed_base + 1000003u * (uint64_t)layer_idx + 97003u * (uint64_t)head_idx;

	return (uint32_t)(seed & 0xFFFFFFFFu);
}

enum kv_status kv_rotation_create(enum kv_rotation_kind kind, uint32_t head_dim, uint64_t seed,
	struct kv_rotation **rotation, struct kv_error *err)
{
	const enum kv_status status = kv_rotation_check(kind, head_dim, err);

	if (status != KV_OK)
		return status;

	struct kv_rotation *made = kv_alloc(1, sizeof(*made));
	struct kv_mt19937 generator;

	if (!made)
		return kv_fail(err, KV_NO_MEMORY, "rotation of head_dim %u", head_dim);
	made->kind = kind;
	made->head_dim = head_dim;
	made->seed = (uint32_t)(seed & 0xFFFFFFFFu);
	made->factor = (float)(1.0 / sqrt((double)head_dim));
	kv_mt19937_init(&generator, seed);
	kv_mt19937_signs(&generator, head_dim, made->signs_in);
	kv_mt19937_signs(&generator, head_dim, made->signs_out);
	*rotation = made;
	return KV_OK;
}

void kv_rotation_destroy(struct kv_rotation *rotation)
{
	kv_free(rotation);
}

/* to = signs_after * (factor * H (signs_before * from)), butterflies of ascending stride. */
static void hadamard_f32(const struct kv_rotation *rotation, const float *signs_before,
	const float *signs_after, const float *from, float *to)
{
	const uint32_t n = rotation->head_dim;

	for (uint32_t i = 0; i < n; i++)
		to[i] = signs_before[i] * from[i];
	for (uint32_t stride = 1; stride < n; stride *= 2) {
		for (uint32_t block = 0; block < n; block += 2 * stride) {
			for (uint32_t i = block; i < block + stride; i++) {
				const float a = to[i], b = to[i + stride];

				to[i] = a + b;
				to[i + stride] = a - b;
			}
		}
	}
	for (uint32_t i = 0; i < n; i++)
		to[i] = signs_after[i] * (to[i] * rotation->factor);
}

/* The same matrix, its float32 factor included, with sums in float64. */
static void hadamard_f64(const struct kv_rotation *rotation, const float *signs_before,
	const float *signs_after, const double *from, double *to)
{
	const uint32_t n = rotation->head_dim;

	for (uint32_t i = 0; i < n; i++)
		to[i] = (double)signs_before[i] * from[i];
	for (uint32_t stride = 1; stride < n; stride *= 2) {
		for (uint32_t block = 0; block < n; block += 2 * stride) {
			for (uint32_t i = block; i < block + stride; i++) {
				const double a = to[i], b = to[i + stride];

				to[i] = a + b;
				to[i + stride] = a - b;
			}
		}
	}
	for (uint32_t i = 0; i < n; i++)
		to[i] = (double)signs_after[i] * (to[i] * (double)rotation->factor);
}

void kv_rotation_forward(const struct kv_rotation *rotation, const float *x, float *y)
{
	hadamard_f32(rotation, rotation->signs_in, rotation->signs_out, x, y);
}

void kv_rotation_backward(const struct kv_rotation *rotation, const float *y, float *x)
{
	hadamard_f32(rotation, rotation->signs_out, rotation->signs_in, y, x);
}

void kv_rotation_forward_f64(const struct kv_rotation *rotation, const double *x, double *y)
{
	hadamard_f64(rotation, rotation->signs_in, rotation->signs_out, x, y);
}

void kv_rotation_backward_f64(const struct kv_rotation *rotation, const double *y, double *x)
{
	hadamard_f64(rotation, rotation->signs_out, rotation->signs_in, y, x);
}

/* Sylvester: entry (i, j) of H is -1 when i and j share an odd number of one bits. */
void kv_rotation_matrix(const struct kv_rotation *rotation, uint32_t row_first, uint32_t n_rows, float *rows)
{
	const uint32_t n = rotation->head_dim;

	KV_ASSERT(row_first <= n);
	KV_ASSERT(n_rows <= n - row_first);
	for (uint32_t r = 0; r < n_rows; r++) {
		const uint32_t i = row_first + r;

		for (uint32_t j = 0; j < n; j++) {
			const float h = __builtin_parity(i & j) ? -1.0f : 1.0f;

			rows[(size_t)r * n + j] =
				rotation->signs_out[i] * h * rotation->signs_in[j] * rotation->factor;
		}
	}
}

uint64_t kv_rotation_memory_bytes(const struct kv_rotation *rotation)
{
	return sizeof(*rotation);
}
