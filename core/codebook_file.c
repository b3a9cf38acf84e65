#include "core/codebook_file.h"

#include <jansson.h>
#include <math.h>
#include <stdbool.h>

#include "codebooks/solver.h"

#define SYMMETRY_TOLERANCE 1e-6
#define MSE_TOLERANCE      1e-6 /* of mse_total, relative: files may give fewer digits */

static enum kv_status get_number(const json_t *book, const char *name, double *value, struct kv_error *err)
{
	const json_t *member = json_object_get(book, name);

	if (!json_is_number(member))
		return kv_fail(err, KV_BAD_CONFIG, "codebook: `%s` must be a number", name);
	*value = json_number_value(member);
	return KV_OK;
}

static enum kv_status get_integer(const json_t *book, const char *name, uint32_t min, uint32_t max,
	uint32_t *value, struct kv_error *err)
{
	const json_t *member = json_object_get(book, name);

	if (!json_is_integer(member) || json_integer_value(member) < min || json_integer_value(member) > max)
		return kv_fail(err, KV_BAD_CONFIG, "codebook: `%s` must be an integer from %u to %u", name,
			min, max);
	*value = (uint32_t)json_integer_value(member);
	return KV_OK;
}

/* n numbers in [-1, 1], ascending and symmetric. */
static enum kv_status get_list(
	const json_t *book, const char *name, uint32_t n_values, double *values, struct kv_error *err)
{
	const json_t *list = json_object_get(book, name);

	if (!json_is_array(list) || json_array_size(list) != n_values)
		return kv_fail(err, KV_BAD_CONFIG, "codebook: `%s` must have %u numbers", name, n_values);
	for (uint32_t i = 0; i < n_values; i++) {
		const json_t *item = json_array_get(list, i);

		if (!json_is_number(item))
			return kv_fail(err, KV_BAD_CONFIG, "codebook: `%s[%u]` must be a number", name, i);
		values[i] = json_number_value(item);
		if (!(values[i] >= -1 && values[i] <= 1))
			return kv_fail(err, KV_BAD_CONFIG, "codebook: `%s[%u]` is not from -1 to 1", name, i);
		if (i > 0 && !(values[i] > values[i - 1]))
			return kv_fail(err, KV_BAD_CONFIG,
				"codebook: `%s[%u]` is not above the one before it", name, i);
	}
	for (uint32_t i = 0; i < n_values; i++) {
		if (!(fabs(values[i] + values[n_values - 1 - i]) <= SYMMETRY_TOLERANCE))
			return kv_fail(err, KV_BAD_CONFIG, "codebook: `%s[%u]` is not symmetric to `%s[%u]`",
				name, i, name, n_values - 1 - i);
	}
	return KV_OK;
}

static enum kv_status check_cells(const struct kvcb_solution *book, struct kv_error *err)
{
	const uint32_t n = 1u << book->bits;

	if (book->boundaries[0] != -1 || book->boundaries[n] != 1)
		return kv_fail(
			err, KV_BAD_CONFIG, "codebook: `boundaries` must begin with -1 and end with 1");
	for (uint32_t i = 0; i < n; i++) {
		if (book->centroids[i] < book->boundaries[i] || book->centroids[i] > book->boundaries[i + 1])
			return kv_fail(
				err, KV_BAD_CONFIG, "codebook: `centroids[%u]` lies outside its cell", i);
	}
	return KV_OK;
}

static enum kv_status get_book(const json_t *json, struct kvcb_solution *book, struct kv_error *err)
{
	double mse_total = 0;

	if (!json_is_object(json))
		return kv_fail(err, KV_BAD_CONFIG, "codebook: must be an object");
	enum kv_status status = get_integer(json, "d", KVCB_DIM_MIN, KVCB_DIM_MAX, &book->head_dim, err);

	if (status == KV_OK)
		status = get_integer(json, "bits", 1, KVCB_BITS_MAX, &book->bits, err);
	if (status == KV_OK)
		status = get_list(json, "centroids", 1u << book->bits, book->centroids, err);
	if (status == KV_OK)
		status = get_list(json, "boundaries", (1u << book->bits) + 1, book->boundaries, err);
	if (status == KV_OK)
		status = check_cells(book, err);
	if (status == KV_OK)
		status = get_number(json, "mse_per_coord", &book->mse_per_coord, err);
	if (status == KV_OK)
		status = get_number(json, "mse_total", &mse_total, err);
	if (status != KV_OK)
		return status;
	if (!(book->mse_per_coord > 0 && book->mse_per_coord <= 1))
		return kv_fail(err, KV_BAD_CONFIG, "codebook: `mse_per_coord` must be above 0 and at most 1");
	if (!(fabs(mse_total / (book->head_dim * book->mse_per_coord) - 1) <= MSE_TOLERANCE))
		return kv_fail(err, KV_BAD_CONFIG, "codebook: `mse_total` is not d times `mse_per_coord`");
	return KV_OK;
}

enum kv_status kv_codebook_file_parse(
	const char *text, size_t text_bytes, struct kvcb_codebook *codebook, struct kv_error *err)
{
	json_error_t error;
	struct kvcb_solution book;

	if (text_bytes > KV_CODEBOOK_FILE_BYTES_MAX)
		return kv_fail(
			err, KV_BAD_CONFIG, "codebook: longer than %u bytes", KV_CODEBOOK_FILE_BYTES_MAX);

	json_t *json = json_loadb(text, text_bytes, JSON_REJECT_DUPLICATES, &error);

	if (!json)
		return kv_fail(err, KV_BAD_CONFIG, "codebook: line %d: %s", error.line, error.text);

	const enum kv_status status = get_book(json, &book, err);

	json_decref(json);
	if (status != KV_OK)
		return status;
	kvcb_solution_round(&book, codebook);
	return KV_OK;
}
