/*
 * Safetensors: the reader of captures.
 *
 * A file is an 8-byte little-endian header length, a JSON object of tensors, and the data. The whole file is
 * in memory (read, not mapped: a file that shrinks under a mapping would kill the process). Everything that
 * the header says is checked against the file's size before a tensor is handed out: names, dtypes, shapes
 * with overflow checks, offsets inside the data, no overlap, no gap. Errors name the tensor and what is wrong
 * with it.
 *
 * Immutable after creation; any thread may read. Tensors and metadata live as long as the object.
 */
#ifndef SERVER_CTL_SAFETENSORS_H
#define SERVER_CTL_SAFETENSORS_H

#include <jansson.h>
#include <stdint.h>

#include "core/error.h"
#include "core/number.h"

#define SRV_TENSOR_DIMS_MAX       8u
#define SRV_TENSOR_NAME_BYTES_MAX 128u
/* A capture of the largest pool has three tensors per layer, 3072 in all. */
#define SRV_TENSORS_MAX 16384u
/* 16 MiB hold 16384 entries of 1 KiB. */
#define SRV_SAFETENSORS_HEADER_BYTES_MAX (16u << 20)
#define SRV_SAFETENSORS_FILE_BYTES_MAX   (1ull << 40)

struct srv_tensor {
	char name[SRV_TENSOR_NAME_BYTES_MAX + 1];
	const char *dtype_name; /* static text: "BF16" */
	enum kv_dtype dtype;    /* NONE: a known dtype that rows cannot have (integers, float64, ..) */
	uint32_t n_dims;
	uint64_t shape[SRV_TENSOR_DIMS_MAX];
	uint64_t n_values;
	const uint8_t *data; /* little-endian, not aligned */
	uint64_t data_bytes;
	uint64_t data_offset; /* from the end of the header */
};

struct srv_safetensors {
	uint32_t n_tensors;
	struct srv_tensor *tensors; /* in the order of their data */
	json_t *metadata;           /* object of strings; NULL when the file has none */
	uint64_t file_bytes;
	uint8_t *owned; /* the file's bytes when srv_safetensors_open() read them */
};

/* `bytes` are borrowed and must outlive the object. CORRUPT, UNSUPPORTED (above a bound) or NO_MEMORY. */
KV_MUST_CHECK enum kv_status srv_safetensors_create(
	const uint8_t *bytes, uint64_t n_bytes, struct srv_safetensors **out, struct kv_error *err);
/* Reads the file; the text of a failure begins with its path. */
KV_MUST_CHECK enum kv_status srv_safetensors_open(
	const char *path, struct srv_safetensors **out, struct kv_error *err);
/* NULL allowed. */
void srv_safetensors_destroy(struct srv_safetensors *file);

/* NULL when there is none of this name. */
const struct srv_tensor *srv_safetensors_find(const struct srv_safetensors *file, const char *name);
/* A metadata value, or NULL. */
const char *srv_safetensors_metadata(const struct srv_safetensors *file, const char *key);

#define SRV_TENSOR_SHAPE_TEXT_BYTES 192u
/* "[256, 3, 64]" */
void srv_tensor_shape_text(const struct srv_tensor *tensor, char text[static SRV_TENSOR_SHAPE_TEXT_BYTES]);

#endif
