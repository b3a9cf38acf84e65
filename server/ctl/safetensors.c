/*
 * Order of checks: sizes of the file and the header, JSON (duplicates refused), each entry alone (name,
 * dtype, shape, offsets inside the data, offsets against shape), and last all entries together: sorted by
 * offset they must fill the data without gap or overlap. Nothing of the data is looked at.
 */
#include "server/ctl/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/checked.h"
#include "core/memory.h"

#define LENGTH_BYTES 8u

/* Every dtype of the format, so that a file with tensors beside the rows (token ids) can be read. */
static const struct {
	const char *name;
	uint32_t value_bytes;
	enum kv_dtype dtype;
} dtypes[] = {
	{ "F32", 4, KV_DTYPE_F32 },
	{ "F16", 2, KV_DTYPE_F16 },
	{ "BF16", 2, KV_DTYPE_BF16 },
	{ "F64", 8, KV_DTYPE_NONE },
	{ "F8_E5M2", 1, KV_DTYPE_NONE },
	{ "F8_E4M3", 1, KV_DTYPE_NONE },
	{ "I64", 8, KV_DTYPE_NONE },
	{ "U64", 8, KV_DTYPE_NONE },
	{ "I32", 4, KV_DTYPE_NONE },
	{ "U32", 4, KV_DTYPE_NONE },
	{ "I16", 2, KV_DTYPE_NONE },
	{ "U16", 2, KV_DTYPE_NONE },
	{ "I8", 1, KV_DTYPE_NONE },
	{ "U8", 1, KV_DTYPE_NONE },
	{ "BOOL", 1, KV_DTYPE_NONE },
};

static uint64_t load_u64(const uint8_t *src)
{
	uint64_t value = 0;

	for (uint32_t i = 0; i < 8; i++)
		value |= (uint64_t)src[i] << (8 * i);
	return value;
}

static enum kv_status parse_dtype(
	struct srv_tensor *tensor, const json_t *json, uint32_t *value_bytes, struct kv_error *err)
{
	const char *name = json_string_value(json_object_get(json, "dtype"));

	if (!name)
		return kv_fail(err, KV_CORRUPT, "tensor '%s' has no dtype text", tensor->name);
	for (uint32_t i = 0; i < KV_LENGTH(dtypes); i++) {
		if (strcmp(dtypes[i].name, name) != 0)
			continue;
		tensor->dtype_name = dtypes[i].name;
		tensor->dtype = dtypes[i].dtype;
		*value_bytes = dtypes[i].value_bytes;
		return KV_OK;
	}
	return kv_fail(err, KV_CORRUPT, "tensor '%s' has the unknown dtype '%.16s'", tensor->name, name);
}

static enum kv_status parse_shape(struct srv_tensor *tensor, const json_t *json, struct kv_error *err)
{
	const json_t *shape = json_object_get(json, "shape");

	if (!json_is_array(shape))
		return kv_fail(err, KV_CORRUPT, "tensor '%s' has no shape array", tensor->name);
	if (json_array_size(shape) > SRV_TENSOR_DIMS_MAX)
		return kv_fail(err, KV_UNSUPPORTED, "tensor '%s' has %zu dimensions, at most %u are read",
			tensor->name, json_array_size(shape), SRV_TENSOR_DIMS_MAX);
	tensor->n_dims = (uint32_t)json_array_size(shape);
	tensor->n_values = 1;
	for (uint32_t i = 0; i < tensor->n_dims; i++) {
		const json_t *dim = json_array_get(shape, i);

		if (!json_is_integer(dim) || json_integer_value(dim) < 0)
			return kv_fail(err, KV_CORRUPT,
				"tensor '%s': shape[%u] is not a whole number of 0 or more", tensor->name, i);
		tensor->shape[i] = (uint64_t)json_integer_value(dim);
		if (!kv_mul_u64(tensor->n_values, tensor->shape[i], &tensor->n_values))
			return kv_fail(err, KV_CORRUPT,
				"tensor '%s': the product of its shape overflows 64 bits", tensor->name);
	}
	return KV_OK;
}

static enum kv_status parse_offsets(struct srv_tensor *tensor, const json_t *json, uint32_t value_bytes,
	uint64_t data_bytes, struct kv_error *err)
{
	const json_t *offsets = json_object_get(json, "data_offsets");
	uint64_t ends[2], shape_bytes;

	if (!json_is_array(offsets) || json_array_size(offsets) != 2)
		return kv_fail(
			err, KV_CORRUPT, "tensor '%s' has no data_offsets of two numbers", tensor->name);
	for (uint32_t i = 0; i < 2; i++) {
		const json_t *offset = json_array_get(offsets, i);

		if (!json_is_integer(offset) || json_integer_value(offset) < 0)
			return kv_fail(err, KV_CORRUPT,
				"tensor '%s': data_offsets[%u] is not a whole number of 0 or more",
				tensor->name, i);
		ends[i] = (uint64_t)json_integer_value(offset);
	}
	if (ends[0] > ends[1])
		return kv_fail(err, KV_CORRUPT, "tensor '%s' begins at offset %llu, behind its end %llu",
			tensor->name, (unsigned long long)ends[0], (unsigned long long)ends[1]);
	if (ends[1] > data_bytes)
		return kv_fail(err, KV_CORRUPT,
			"tensor '%s' ends at offset %llu, behind the %llu data bytes of the file",
			tensor->name, (unsigned long long)ends[1], (unsigned long long)data_bytes);
	if (!kv_mul_u64(tensor->n_values, value_bytes, &shape_bytes) || shape_bytes != ends[1] - ends[0]) {
		char shape[SRV_TENSOR_SHAPE_TEXT_BYTES];

		srv_tensor_shape_text(tensor, shape);
		return kv_fail(err, KV_CORRUPT,
			"tensor '%s' has %llu bytes of data, not those of %s values of %s", tensor->name,
			(unsigned long long)(ends[1] - ends[0]), shape, tensor->dtype_name);
	}
	tensor->data_offset = ends[0];
	tensor->data_bytes = ends[1] - ends[0];
	return KV_OK;
}

static enum kv_status parse_tensor(struct srv_tensor *tensor, const char *name, const json_t *json,
	const uint8_t *data, uint64_t data_bytes, struct kv_error *err)
{
	uint32_t value_bytes = 0;

	if (strlen(name) > SRV_TENSOR_NAME_BYTES_MAX)
		return kv_fail(err, KV_UNSUPPORTED,
			"tensor '%.40s..' has a name of %zu bytes, at most %u are read", name, strlen(name),
			SRV_TENSOR_NAME_BYTES_MAX);
	for (size_t i = 0; name[i] != '\0'; i++)
		if ((unsigned char)name[i] < 0x20 || name[i] == 0x7F)
			return kv_fail(err, KV_CORRUPT,
				"tensor '%.*s..': byte %zu of its name is a control character",
				(int)(i < 40 ? i : 40), name, i);
	memcpy(tensor->name, name, strlen(name) + 1);
	if (!json_is_object(json))
		return kv_fail(err, KV_CORRUPT, "tensor '%s' is not a JSON object", name);

	enum kv_status status = parse_dtype(tensor, json, &value_bytes, err);

	if (status == KV_OK)
		status = parse_shape(tensor, json, err);
	if (status == KV_OK)
		status = parse_offsets(tensor, json, value_bytes, data_bytes, err);
	if (status == KV_OK)
		tensor->data = data + tensor->data_offset;
	return status;
}

static enum kv_status check_metadata(const json_t *metadata, struct kv_error *err)
{
	const char *key;
	json_t *value;

	if (!json_is_object(metadata))
		return kv_fail(err, KV_CORRUPT, "__metadata__ is not a JSON object");
	json_object_foreach ((json_t *)metadata, key, value)
		if (!json_is_string(value))
			return kv_fail(
				err, KV_CORRUPT, "__metadata__: the value of '%.60s' is not a text", key);
	return KV_OK;
}

static int compare_by_offset(const void *a, const void *b)
{
	const struct srv_tensor *left = a, *right = b;

	if (left->data_offset != right->data_offset)
		return left->data_offset < right->data_offset ? -1 : 1;
	/* An empty tensor comes before the one that begins where it is. */
	if (left->data_bytes != right->data_bytes)
		return left->data_bytes < right->data_bytes ? -1 : 1;
	return strcmp(left->name, right->name);
}

/* Sorted by offset, the tensors fill the data from the first byte to the last. */
static enum kv_status check_cover(
	const struct srv_safetensors *file, uint64_t data_bytes, struct kv_error *err)
{
	uint64_t end = 0;

	for (uint32_t i = 0; i < file->n_tensors; i++) {
		const struct srv_tensor *tensor = &file->tensors[i];

		if (tensor->data_offset != end)
			return kv_fail(err, KV_CORRUPT, "tensor '%s' begins at offset %llu, %s at %llu",
				tensor->name, (unsigned long long)tensor->data_offset,
				tensor->data_offset < end ? "inside the one that ends"
							  : "behind a gap that begins",
				(unsigned long long)end);
		end += tensor->data_bytes;
	}
	if (end != data_bytes)
		return kv_fail(err, KV_CORRUPT,
			"the tensors end at offset %llu, but there are %llu data bytes",
			(unsigned long long)end, (unsigned long long)data_bytes);
	return KV_OK;
}

static enum kv_status parse_entries(struct srv_safetensors *file, json_t *header, const uint8_t *data,
	uint64_t data_bytes, struct kv_error *err)
{
	const size_t n_entries = json_object_size(header);
	const char *name;
	json_t *entry;

	if (n_entries > SRV_TENSORS_MAX)
		return kv_fail(
			err, KV_UNSUPPORTED, "%zu tensors, at most %u are read", n_entries, SRV_TENSORS_MAX);
	file->tensors = kv_alloc(n_entries, sizeof(*file->tensors));
	if (!file->tensors)
		return kv_fail(err, KV_NO_MEMORY, "no memory for %zu tensors", n_entries);
	json_object_foreach (header, name, entry) {
		enum kv_status status;

		if (strcmp(name, "__metadata__") == 0) {
			status = check_metadata(entry, err);
			if (status == KV_OK)
				file->metadata = json_incref(entry);
		} else {
			status = parse_tensor(
				&file->tensors[file->n_tensors], name, entry, data, data_bytes, err);
			file->n_tensors++;
		}
		if (status != KV_OK)
			return status;
	}
	qsort(file->tensors, file->n_tensors, sizeof(*file->tensors), compare_by_offset);
	return check_cover(file, data_bytes, err);
}

enum kv_status srv_safetensors_create(
	const uint8_t *bytes, uint64_t n_bytes, struct srv_safetensors **out, struct kv_error *err)
{
	json_error_t json_error;

	if (n_bytes < LENGTH_BYTES)
		return kv_fail(err, KV_CORRUPT,
			"not a safetensors file: %llu bytes, shorter than the header's length",
			(unsigned long long)n_bytes);

	const uint64_t header_bytes = load_u64(bytes);

	if (header_bytes > n_bytes - LENGTH_BYTES)
		return kv_fail(err, KV_CORRUPT,
			"not a safetensors file: it announces a header of %llu bytes, %llu follow",
			(unsigned long long)header_bytes, (unsigned long long)(n_bytes - LENGTH_BYTES));
	if (header_bytes > SRV_SAFETENSORS_HEADER_BYTES_MAX)
		return kv_fail(err, KV_UNSUPPORTED, "a header of %llu bytes, at most %u are read",
			(unsigned long long)header_bytes, SRV_SAFETENSORS_HEADER_BYTES_MAX);

	json_t *header = json_loadb((const char *)bytes + LENGTH_BYTES, (size_t)header_bytes,
		JSON_REJECT_DUPLICATES, &json_error);

	if (!header)
		return kv_fail(err, KV_CORRUPT, "header: line %d column %d: %s", json_error.line,
			json_error.column, json_error.text);

	struct srv_safetensors *file = kv_alloc(1, sizeof(*file));
	enum kv_status status;

	if (!file) {
		status = kv_fail(err, KV_NO_MEMORY, "no memory for a safetensors header");
	} else if (!json_is_object(header)) {
		status = kv_fail(err, KV_CORRUPT, "header: not a JSON object");
	} else {
		file->file_bytes = n_bytes;
		status = parse_entries(file, header, bytes + LENGTH_BYTES + header_bytes,
			n_bytes - LENGTH_BYTES - header_bytes, err);
	}
	json_decref(header);
	if (status != KV_OK) {
		srv_safetensors_destroy(file);
		return status;
	}
	*out = file;
	return KV_OK;
}

/* Fails when the file ends before n_bytes; what it grew meanwhile is not read. */
static enum kv_status read_exactly(int fd, uint8_t *bytes, uint64_t n_bytes, struct kv_error *err)
{
	uint64_t n_read = 0;

	while (n_read < n_bytes) {
		const uint64_t n_left = n_bytes - n_read;
		const ssize_t n =
			read(fd, bytes + n_read, n_left < (1u << 30) ? (size_t)n_left : (size_t)(1u << 30));

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return kv_fail(err, KV_IO_ERROR, "read: %s", strerror(errno));
		if (n == 0)
			return kv_fail(err, KV_IO_ERROR, "the file became shorter while it was read");
		n_read += (uint64_t)n;
	}
	return KV_OK;
}

static enum kv_status read_file(int fd, uint8_t **bytes, uint64_t *n_bytes, struct kv_error *err)
{
	struct stat info;

	if (fstat(fd, &info) < 0)
		return kv_fail(err, KV_IO_ERROR, "stat: %s", strerror(errno));
	if (!S_ISREG(info.st_mode))
		return kv_fail(err, KV_IO_ERROR, "not a regular file");
	if ((uint64_t)info.st_size > SRV_SAFETENSORS_FILE_BYTES_MAX)
		return kv_fail(err, KV_UNSUPPORTED, "a file of %lld bytes, at most %llu are read",
			(long long)info.st_size, SRV_SAFETENSORS_FILE_BYTES_MAX);
	if (info.st_size == 0)
		return kv_fail(err, KV_CORRUPT, "the file is empty");

	const uint64_t size_bytes = (uint64_t)info.st_size;
	uint8_t *data = kv_pages_alloc(size_bytes);

	if (!data)
		return kv_fail(err, KV_NO_MEMORY, "no memory for a file of %llu bytes",
			(unsigned long long)size_bytes);

	const enum kv_status status = read_exactly(fd, data, size_bytes, err);

	if (status != KV_OK) {
		kv_pages_free(data, size_bytes);
		return status;
	}
	*bytes = data;
	*n_bytes = size_bytes;
	return KV_OK;
}

enum kv_status srv_safetensors_open(const char *path, struct srv_safetensors **out, struct kv_error *err)
{
	uint8_t *bytes = NULL;
	uint64_t n_bytes = 0;
	/* Not blocking: opening a named pipe must answer, too. */
	const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);

	if (fd < 0)
		return kv_fail(err, KV_IO_ERROR, "%s: %s", path, strerror(errno));

	enum kv_status status = read_file(fd, &bytes, &n_bytes, err);

	close(fd);
	if (status == KV_OK) {
		status = srv_safetensors_create(bytes, n_bytes, out, err);
		if (status == KV_OK)
			(*out)->owned = bytes;
		else
			kv_pages_free(bytes, n_bytes);
	}
	if (status != KV_OK)
		kv_error_wrap(err, "%s", path);
	return status;
}

void srv_safetensors_destroy(struct srv_safetensors *file)
{
	if (!file)
		return;
	json_decref(file->metadata);
	kv_free(file->tensors);
	kv_pages_free(file->owned, file->file_bytes);
	kv_free(file);
}

const struct srv_tensor *srv_safetensors_find(const struct srv_safetensors *file, const char *name)
{
	for (uint32_t i = 0; i < file->n_tensors; i++)
		if (strcmp(file->tensors[i].name, name) == 0)
			return &file->tensors[i];
	return NULL;
}

const char *srv_safetensors_metadata(const struct srv_safetensors *file, const char *key)
{
	return json_string_value(json_object_get(file->metadata, key));
}

void srv_tensor_shape_text(const struct srv_tensor *tensor, char text[static SRV_TENSOR_SHAPE_TEXT_BYTES])
{
	/* 8 dims of 20 digits, 7 separators of 2 characters, brackets and the final zero: 177 bytes. */
	int used = snprintf(text, SRV_TENSOR_SHAPE_TEXT_BYTES, "[");

	for (uint32_t i = 0; i < tensor->n_dims; i++)
		used += snprintf(text + used, SRV_TENSOR_SHAPE_TEXT_BYTES - (size_t)used, "%s%llu",
			i == 0 ? "" : ", ", (unsigned long long)tensor->shape[i]);
	snprintf(text + used, SRV_TENSOR_SHAPE_TEXT_BYTES - (size_t)used, "]");
}
