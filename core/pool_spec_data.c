/*
 * What a pool's JSON has as many numbers, or as a file that holds them: k_center, the matrix of a rotation,
 * channels of recipes, codebooks. Shapes are checked before memory is taken, so a short text cannot ask for
 * much of it.
 */
#include <stdio.h>
#include <string.h>

#include "core/codebook_file.h"
#include "core/io.h"
#include "core/k_center.h"
#include "core/memory.h"
#include "core/pool_spec_internal.h"

/* ---- files ---- */

/* The whole file that `path`, the value of `member`, names; kv_free() it. */
static enum kv_status read_file(const struct kv_spec_reader *reader, const char *member, const json_t *path,
	uint64_t n_bytes_max, char **data, uint64_t *n_bytes)
{
	struct kv_error cause = { .msg = "" };

	if (!json_is_string(path) || json_string_length(path) == 0)
		return kv_spec_refuse(reader, member, path, "the path of a file");
	if (!reader->files)
		return kv_spec_refuse(reader, member, path,
			"no file here: files are named in the daemon's configuration only");

	const enum kv_status status =
		reader->files->read_all(json_string_value(path), n_bytes_max, data, n_bytes, &cause);

	return status == KV_OK ? KV_OK : kv_spec_pass_on(reader, member, status, &cause);
}

/* The JSON in a file; json_decref() it. */
static enum kv_status read_json_file(const struct kv_spec_reader *reader, const char *member,
	const json_t *path, uint64_t n_bytes_max, json_t **json)
{
	char *data = NULL;
	uint64_t n_bytes = 0;
	json_error_t error;
	enum kv_status status = read_file(reader, member, path, n_bytes_max, &data, &n_bytes);

	if (status != KV_OK)
		return status;
	*json = json_loadb(data, (size_t)n_bytes, JSON_REJECT_DUPLICATES, &error);
	kv_free(data);
	if (!*json) {
		struct kv_error cause = { .msg = "" };

		status = kv_fail(&cause, KV_BAD_CONFIG, "line %d: %s", error.line, error.text);
		return kv_spec_pass_on(reader, member, status, &cause);
	}
	return KV_OK;
}

/* ---- arrays of numbers ---- */

/* An array of exactly n elements. */
static enum kv_status check_size(const struct kv_spec_reader *reader, const char *member, const json_t *value,
	uint32_t n, const char *of)
{
	char expected[64];

	if (json_is_array(value) && json_array_size(value) == n)
		return KV_OK;
	snprintf(expected, sizeof(expected), "an array of %u %s", n, of);
	if (json_is_array(value))
		return kv_fail(reader->err, KV_BAD_CONFIG, "pool \"%s\": %s has %zu elements: expected %s",
			reader->pool, member, json_array_size(value), expected);
	return kv_spec_refuse(reader, member, value, expected);
}

/* Numbers of an array whose size was checked. */
static enum kv_status read_numbers(
	const struct kv_spec_reader *reader, const char *member, const json_t *value, uint32_t n, float *out)
{
	for (uint32_t i = 0; i < n; i++) {
		const json_t *number = json_array_get(value, i);
		char element[KV_MEMBER_BYTES_MAX + 16];

		out[i] = (float)json_number_value(number);
		if (json_is_number(number) && kv_f32_is_finite(out[i]))
			continue;
		snprintf(element, sizeof(element), "%s[%u]", member, i);
		return kv_spec_refuse(reader, element, number, "a number that float32 can hold");
	}
	return KV_OK;
}

/* ---- k_center ---- */

/* Shape of the array [layers][kv_heads][k_head_dim]. */
static enum kv_status check_center(const struct kv_spec_reader *reader, const char *name, const json_t *value,
	const struct kv_pool_spec *spec)
{
	char member[KV_MEMBER_BYTES_MAX];
	enum kv_status status = check_size(reader, name, value, spec->n_layers, "layers");

	for (uint32_t l = 0; l < spec->n_layers && status == KV_OK; l++) {
		const json_t *layer = json_array_get(value, l);

		snprintf(member, sizeof(member), "%s[%u]", name, l);
		status = check_size(reader, member, layer, spec->kv_heads, "KV heads");
		for (uint32_t h = 0; h < spec->kv_heads && status == KV_OK; h++) {
			snprintf(member, sizeof(member), "%s[%u][%u]", name, l, h);
			status = check_size(
				reader, member, json_array_get(layer, h), spec->k_head_dim, "numbers");
		}
	}
	return status;
}

static enum kv_status take_center(
	const struct kv_spec_reader *reader, const char *name, const json_t *value, struct kv_made_spec *made)
{
	const struct kv_pool_spec *spec = &made->base;
	char member[KV_MEMBER_BYTES_MAX];
	enum kv_status status = check_center(reader, name, value, spec);

	if (status != KV_OK)
		return status;
	made->k_center =
		kv_alloc((size_t)spec->n_layers * spec->kv_heads * spec->k_head_dim, sizeof(*made->k_center));
	if (!made->k_center)
		return kv_spec_no_memory(reader, name);
	for (uint32_t l = 0; l < spec->n_layers && status == KV_OK; l++) {
		float *center = made->k_center + (size_t)l * spec->kv_heads * spec->k_head_dim;

		made->layers[l].k_center = center;
		for (uint32_t h = 0; h < spec->kv_heads && status == KV_OK; h++) {
			snprintf(member, sizeof(member), "%s[%u][%u]", name, l, h);
			status = read_numbers(reader, member, json_array_get(json_array_get(value, l), h),
				spec->k_head_dim, center + (size_t)h * spec->k_head_dim);
		}
	}
	return status;
}

static enum kv_status take_center_file(
	const struct kv_spec_reader *reader, const json_t *path, struct kv_made_spec *made)
{
	json_t *json = NULL;
	enum kv_status status = read_json_file(reader, "k_center_file", path, KV_K_CENTER_BYTES_MAX, &json);

	if (status != KV_OK)
		return status;

	const json_t *version = json_object_get(json, "version");

	if (!json_is_integer(version) || json_integer_value(version) != 1)
		status = kv_spec_refuse(reader, "k_center_file: version", version, "1");
	else
		status = take_center(
			reader, "k_center_file: k_center", json_object_get(json, "k_center"), made);
	json_decref(json);
	return status;
}

enum kv_status kv_spec_read_k_center(const struct kv_spec_reader *reader, struct kv_made_spec *made)
{
	const json_t *value = json_object_get(reader->json, "k_center");
	const json_t *path = json_object_get(reader->json, "k_center_file");
	enum kv_status status = kv_spec_read_either(reader, "k_center", "k_center_file");

	if (status == KV_OK && value)
		status = take_center(reader, "k_center", value, made);
	if (status == KV_OK && path)
		status = take_center_file(reader, path, made);
	made->base.has_k_center = made->k_center != NULL;
	return status;
}

/* ---- the matrix of a rotation ---- */

static enum kv_status take_matrix_file(
	const struct kv_spec_reader *reader, const json_t *path, uint32_t head_dim, float *matrix)
{
	const uint64_t n_numbers = (uint64_t)head_dim * head_dim;
	char *data = NULL, expected[80];
	uint64_t n_bytes = 0;
	enum kv_status status = read_file(reader, "rotation_file", path, 4 * n_numbers + 1, &data, &n_bytes);

	if (status != KV_OK)
		return status;
	if (n_bytes == 4 * n_numbers) {
		memcpy(matrix, data, (size_t)n_bytes);
	} else {
		snprintf(expected, sizeof(expected), "a file of %llu bytes, %u x %u float32",
			(unsigned long long)(4 * n_numbers), head_dim, head_dim);
		status = kv_spec_refuse(reader, "rotation_file", path, expected);
	}
	kv_free(data);
	return status;
}

enum kv_status kv_spec_read_matrix(
	const struct kv_spec_reader *reader, uint32_t head_dim, struct kv_made_spec *made)
{
	const json_t *value = json_object_get(reader->json, "rotation_matrix");
	const json_t *path = json_object_get(reader->json, "rotation_file");
	char member[KV_MEMBER_BYTES_MAX];
	enum kv_status status = kv_spec_read_either(reader, "rotation_matrix", "rotation_file");

	if (status == KV_OK && !value && !path)
		status = kv_spec_refuse(reader, "rotation_matrix", NULL,
			"rotation_matrix or rotation_file with rotation file");
	if (status == KV_OK && value)
		status = check_size(reader, "rotation_matrix", value, head_dim, "rows");
	for (uint32_t i = 0; value && i < head_dim && status == KV_OK; i++) {
		snprintf(member, sizeof(member), "rotation_matrix[%u]", i);
		status = check_size(reader, member, json_array_get(value, i), head_dim, "numbers");
	}
	if (status != KV_OK)
		return status;
	made->matrix = kv_alloc((size_t)head_dim * head_dim, sizeof(*made->matrix));
	if (!made->matrix)
		return kv_spec_no_memory(reader, "rotation_matrix");
	if (path)
		return take_matrix_file(reader, path, head_dim, made->matrix);
	for (uint32_t i = 0; i < head_dim && status == KV_OK; i++) {
		snprintf(member, sizeof(member), "rotation_matrix[%u]", i);
		status = read_numbers(reader, member, json_array_get(value, i), head_dim,
			made->matrix + (size_t)i * head_dim);
	}
	return status;
}

/* ---- channels of recipes ---- */

enum kv_status kv_spec_read_recipe(const struct kv_spec_reader *reader, struct kv_made_spec *made)
{
	const json_t *value = json_object_get(reader->json, "recipe");
	const json_t *path = json_object_get(reader->json, "recipe_file");
	struct kv_error cause = { .msg = "" };
	char *text = NULL;
	uint64_t n_bytes = 0;
	enum kv_status status = kv_spec_read_either(reader, "recipe", "recipe_file");

	if (status != KV_OK || (!value && !path))
		return status;
	if (path) {
		status = read_file(reader, "recipe_file", path, KV_RECIPE_FILE_BYTES_MAX, &text, &n_bytes);
	} else if (!json_is_object(value)) {
		status = kv_spec_refuse(
			reader, "recipe", value, "an object in the schema of turboquant_kv.json");
	} else {
		size_t n_dumped = 0;

		text = kv_spec_dump(value, &n_dumped);
		n_bytes = n_dumped;
		if (!text)
			status = kv_spec_no_memory(reader, "recipe");
	}
	if (status != KV_OK)
		return status;
	status = kv_recipe_file_parse(text, (size_t)n_bytes, &made->recipe, &cause);
	kv_free(text);
	return status == KV_OK ? KV_OK
			       : kv_spec_pass_on(reader, path ? "recipe_file" : "recipe", status, &cause);
}

/* ---- codebooks ---- */

static enum kv_status read_codebook(
	const struct kv_spec_reader *reader, const json_t *path, uint32_t idx, struct kv_made_spec *made)
{
	struct kvcb_codebook *codebook = &made->codebooks[idx];
	struct kv_error cause = { .msg = "" };
	char member[KV_MEMBER_BYTES_MAX], *text = NULL;
	uint64_t n_bytes = 0;

	snprintf(member, sizeof(member), "codebook_files[%u]", idx);

	enum kv_status status = read_file(reader, member, path, KV_CODEBOOK_FILE_BYTES_MAX, &text, &n_bytes);

	if (status != KV_OK)
		return status;
	status = kv_codebook_file_parse(text, (size_t)n_bytes, codebook, &cause);
	kv_free(text);
	if (status != KV_OK)
		return kv_spec_pass_on(reader, member, status, &cause);
	for (uint32_t i = 0; i < idx; i++) {
		if (made->codebooks[i].head_dim == codebook->head_dim &&
			made->codebooks[i].bits == codebook->bits)
			return kv_spec_refuse(
				reader, member, path, "one codebook of a dim and a number of bits");
	}
	made->codebook_refs[idx] = codebook;
	return KV_OK;
}

enum kv_status kv_spec_read_codebooks(const struct kv_spec_reader *reader, struct kv_made_spec *made)
{
	const json_t *list = json_object_get(reader->json, "codebook_files");
	const size_t n = json_array_size(list);
	enum kv_status status = KV_OK;

	if (!list)
		return KV_OK;
	if (!json_is_array(list) || n < 1 || n > KV_CODEBOOKS_MAX)
		return kv_spec_refuse(reader, "codebook_files", list, "an array of 1 to 64 paths");
	made->codebooks = kv_alloc(n, sizeof(*made->codebooks));
	if (!made->codebooks)
		return kv_spec_no_memory(reader, "codebook_files");
	for (uint32_t i = 0; i < n && status == KV_OK; i++)
		status = read_codebook(reader, json_array_get(list, i), i, made);
	made->options.codebooks = made->codebook_refs;
	made->options.n_codebooks = (uint32_t)n;
	return status;
}
