/*
 * Rotations. Float32 in the written order of FORMATS 2: stored bytes depend on every rounding.
 * Multiplications by a sign or by a factor of 1 are exact, so they may be multiplications.
 */
#include "core/rotation.h"

#include <math.h>
#include <string.h>

#include "core/checked.h"
#include "core/memory.h"
#include "core/mt19937.h"
#include "core/number.h"
#include "core/rotation_qr.h"
#include "core/row_kernels.h"

static const char *const kind_names[] = {
	[KV_ROTATION_NONE] = "none",
	[KV_ROTATION_RHT] = "rht",
	[KV_ROTATION_QR] = "qr",
	[KV_ROTATION_FILE] = "file",
	[KV_ROTATION_BLOCK] = "block",
	[KV_ROTATION_PROJECTION] = "projection",
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
	else if (strcmp(name, "file") == 0)
		*kind = KV_ROTATION_FILE;
	else
		return kv_fail(err, KV_BAD_ARG, "unknown rotation \"%.32s\" (known: rht, qr, file)", name);
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
	if ((unsigned)kind >= KV_LENGTH(kind_names) || kind == KV_ROTATION_NONE)
		return kv_fail(err, KV_BAD_ARG, "no rotation of kind %d", (int)kind);
	if (kind == KV_ROTATION_RHT && !is_power_of_two(head_dim))
		return kv_fail(err, KV_BAD_ARG,
			"rotation rht needs a power of two, and head_dim %u is none; qr serves it", head_dim);
	return KV_OK;
}

uint32_t kv_rotation_layer_seed(uint64_t seed_base, uint32_t layer_idx, uint32_t head_idx)
{
	const uint64_t seed = seed_base + 1000003u * (uint64_t)layer_idx + 97003u * (uint64_t)head_idx;

	return (uint32_t)(seed & 0xFFFFFFFFu);
}

/* ---- creation ---- */

static bool kind_is_matrix(enum kv_rotation_kind kind)
{
	return kind == KV_ROTATION_QR || kind == KV_ROTATION_FILE || kind == KV_ROTATION_PROJECTION;
}

static bool kind_is_given(enum kv_rotation_kind kind)
{
	return kind == KV_ROTATION_FILE || kind == KV_ROTATION_PROJECTION;
}

/* A rotation without its numbers; those of a matrix are allocated. */
static enum kv_status create_empty(enum kv_rotation_kind kind, uint32_t head_dim, uint64_t seed,
	struct kv_rotation **rotation, struct kv_error *err)
{
	const enum kv_status status = kv_rotation_check(kind, head_dim, err);

	if (status != KV_OK)
		return status;

	struct kv_rotation *made = kv_alloc(1, sizeof(*made));

	if (made) {
		made->kind = kind;
		made->head_dim = head_dim;
		made->seed = (uint32_t)(seed & 0xFFFFFFFFu);
		if (kind_is_matrix(kind)) {
			made->matrix = kv_alloc((size_t)head_dim * head_dim, sizeof(float));
			made->transposed = kv_alloc((size_t)head_dim * head_dim, sizeof(float));
		}
	}
	if (!made || (kind_is_matrix(kind) && (!made->matrix || !made->transposed))) {
		kv_rotation_destroy(made);
		return kv_fail(err, KV_NO_MEMORY, "rotation %s of head_dim %u", kv_rotation_kind_name(kind),
			head_dim);
	}
	*rotation = made;
	return KV_OK;
}

static void fill_transposed(struct kv_rotation *rotation)
{
	const size_t n = rotation->head_dim;

	for (size_t i = 0; i < n; i++) {
		for (size_t j = 0; j < n; j++)
			rotation->transposed[j * n + i] = rotation->matrix[i * n + j];
	}
}

/* One generator: the signs before the butterflies, then, for rht alone, those behind them. */
static void fill_signs(struct kv_rotation *rotation, bool is_normalised)
{
	struct kv_mt19937 generator;

	rotation->is_normalised = is_normalised;
	for (uint32_t i = 0; i < KV_LENGTH(rotation->factors); i++)
		rotation->factors[i] = is_normalised ? (float)(1.0 / sqrt((double)(1u << i))) : 1.0f;
	kv_mt19937_init(&generator, rotation->seed);
	kv_mt19937_signs(&generator, rotation->head_dim, rotation->signs_in);
	if (rotation->kind == KV_ROTATION_RHT) {
		kv_mt19937_signs(&generator, rotation->head_dim, rotation->signs_out);
	} else {
		for (uint32_t i = 0; i < rotation->head_dim; i++)
			rotation->signs_out[i] = 1;
	}
}

enum kv_status kv_rotation_create(enum kv_rotation_kind kind, uint32_t head_dim, uint64_t seed,
	struct kv_rotation **rotation, struct kv_error *err)
{
	struct kv_rotation *made = NULL;

	if (kind_is_given(kind))
		return kv_fail(err, KV_BAD_ARG, "rotation %s needs its matrix", kv_rotation_kind_name(kind));

	const enum kv_status status = create_empty(kind, head_dim, seed, &made, err);

	if (status != KV_OK)
		return status;
	if (kind != KV_ROTATION_QR) {
		fill_signs(made, true);
	} else if (kv_rotation_qr_fill(head_dim, made->seed, made->matrix) != KV_OK) {
		kv_rotation_destroy(made);
		return kv_fail(err, KV_NO_MEMORY, "work memory of rotation qr at head_dim %u", head_dim);
	} else {
		fill_transposed(made);
	}
	*rotation = made;
	return KV_OK;
}

/* Rows must have length 1 and be at right angles to each other. */
static enum kv_status check_orthogonal(const float *matrix, uint32_t n, struct kv_error *err)
{
	for (uint32_t i = 0; i < n; i++) {
		for (uint32_t k = 0; k <= i; k++) {
			double product = 0;

			for (uint32_t j = 0; j < n; j++)
				product +=
					(double)matrix[(size_t)i * n + j] * (double)matrix[(size_t)k * n + j];
			if (fabs(product - (i == k)) > KV_ROTATION_ORTHOGONAL_TOLERANCE)
				return kv_fail(err, KV_BAD_VALUE,
					"matrix is not orthogonal: rows %u and %u have the product %.9g", k,
					i, product);
		}
	}
	return KV_OK;
}

enum kv_status kv_rotation_create_from_matrix(enum kv_rotation_kind kind, uint32_t head_dim, uint64_t seed,
	const float *matrix, struct kv_rotation **rotation, struct kv_error *err)
{
	struct kv_rotation *made = NULL;

	KV_ASSERT(kind_is_given(kind));
	enum kv_status status = kv_rotation_check(kind, head_dim, err);

	if (status != KV_OK)
		return status;
	for (uint32_t i = 0; i < head_dim; i++) {
		if (!kv_rows_are_finite(matrix + (size_t)i * head_dim, head_dim))
			return kv_fail(
				err, KV_BAD_VALUE, "row %u of the matrix has a number that is not finite", i);
	}
	if (kind == KV_ROTATION_FILE) {
		status = check_orthogonal(matrix, head_dim, err);
		if (status != KV_OK)
			return status;
	}
	status = create_empty(kind, head_dim, seed, &made, err);
	if (status != KV_OK)
		return status;
	memcpy(made->matrix, matrix, sizeof(float) * head_dim * head_dim);
	fill_transposed(made);
	*rotation = made;
	return KV_OK;
}

enum kv_status kv_rotation_create_signs(
	uint32_t head_dim, uint64_t seed, struct kv_rotation **rotation, struct kv_error *err)
{
	struct kv_rotation *made = NULL;
	const enum kv_status status = create_empty(KV_ROTATION_BLOCK, head_dim, seed, &made, err);

	if (status != KV_OK)
		return status;
	fill_signs(made, false);
	*rotation = made;
	return KV_OK;
}

enum kv_status kv_rotation_create_projection(
	uint32_t head_dim, uint64_t seed, struct kv_rotation **rotation, struct kv_error *err)
{
	return is_power_of_two(head_dim) ? kv_rotation_create_signs(head_dim, seed, rotation, err)
					 : kv_rotation_create(KV_ROTATION_QR, head_dim, seed, rotation, err);
}

void kv_rotation_destroy(struct kv_rotation *rotation)
{
	if (!rotation)
		return;
	kv_free(rotation->matrix);
	kv_free(rotation->transposed);
	kv_free(rotation);
}

/* ---- butterflies ---- */

/* to = signs_after * (factor * H (signs_before * from)): each block is transformed alone. */
static void hadamard_f32(const struct kv_rotation *rotation, const float *signs_before,
	const float *signs_after, const float *from, float *to)
{
	const struct kv_row_kernels *kernels = kv_row_kernels();

	for (uint32_t first = 0, power = 9; power-- > 0;) {
		const uint32_t block = rotation->head_dim & 1u << power;

		if (block != 0)
			kernels->hadamard_f32(block, signs_before + first, signs_after + first,
				rotation->factors[power], from + first, to + first);
		first += block;
	}
}

/* The same matrix, its float32 factors included, with sums in float64. */
static void hadamard_f64(const struct kv_rotation *rotation, const float *signs_before,
	const float *signs_after, const double *from, double *to)
{
	const struct kv_row_kernels *kernels = kv_row_kernels();

	for (uint32_t first = 0, power = 9; power-- > 0;) {
		const uint32_t block = rotation->head_dim & 1u << power;

		if (block != 0)
			kernels->hadamard_f64(block, signs_before + first, signs_after + first,
				(double)rotation->factors[power], from + first, to + first);
		first += block;
	}
}

/* ---- use ---- */

void kv_rotation_forward(const struct kv_rotation *rotation, const float *x, float *y)
{
	if (rotation->matrix)
		kv_row_kernels()->multiply_f32(rotation->head_dim, rotation->transposed, x, y);
	else
		hadamard_f32(rotation, rotation->signs_in, rotation->signs_out, x, y);
}

void kv_rotation_backward(const struct kv_rotation *rotation, const float *y, float *x)
{
	if (rotation->matrix)
		kv_row_kernels()->multiply_f32(rotation->head_dim, rotation->matrix, y, x);
	else
		hadamard_f32(rotation, rotation->signs_out, rotation->signs_in, y, x);
}

void kv_rotation_forward_f64(const struct kv_rotation *rotation, const double *x, double *y)
{
	if (rotation->matrix)
		kv_row_kernels()->multiply_f64(rotation->head_dim, rotation->transposed, x, y);
	else
		hadamard_f64(rotation, rotation->signs_in, rotation->signs_out, x, y);
}

void kv_rotation_backward_f64(const struct kv_rotation *rotation, const double *y, double *x)
{
	if (rotation->matrix)
		kv_row_kernels()->multiply_f64(rotation->head_dim, rotation->matrix, y, x);
	else
		hadamard_f64(rotation, rotation->signs_out, rotation->signs_in, y, x);
}

/* Row i: the unit vector i, taken backward. Exact for butterflies: one factor, no sum of two numbers. */
void kv_rotation_matrix(const struct kv_rotation *rotation, uint32_t row_first, uint32_t n_rows, float *rows)
{
	const uint32_t n = rotation->head_dim;

	KV_ASSERT(row_first <= n);
	KV_ASSERT(n_rows <= n - row_first);
	for (uint32_t r = 0; r < n_rows; r++) {
		float *row = rows + (size_t)r * n;

		if (rotation->matrix) {
			memcpy(row, rotation->matrix + (size_t)(row_first + r) * n, n * sizeof(*row));
			continue;
		}
		memset(row, 0, n * sizeof(*row));
		row[row_first + r] = 1;
		kv_rotation_backward(rotation, row, row);
	}
}

uint64_t kv_rotation_memory_bytes(const struct kv_rotation *rotation)
{
	const uint64_t n_entries = (uint64_t)rotation->head_dim * rotation->head_dim;

	return sizeof(*rotation) + (rotation->matrix ? 2 * n_entries * sizeof(float) : 0);
}
