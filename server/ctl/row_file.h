/*
 * Row files: rows of one size back to back, little-endian, without a head. Read and written as streams, so
 * that memory does not grow with the file.
 *
 * Texts of failures begin with the path and name the row and the byte offset. The output is written beside
 * its place and moved there when it is complete: a failure leaves nothing behind, and what stood there stays.
 * One thread.
 */
#ifndef SERVER_CTL_ROW_FILE_H
#define SERVER_CTL_ROW_FILE_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "core/error.h"

struct srv_row_reader {
	const char *path; /* borrowed */
	FILE *file;
	uint32_t row_bytes;
	bool is_sized;   /* a regular file: n_rows is known */
	uint64_t n_rows; /* of the file */
	uint64_t n_read;
};

/*
 * Does the file begin as safetensors do: with the length of a header that it has room for, and a brace? Bare
 * rows that look like it would begin with a number below 10^-37, a zero, and a third one of one kind.
 */
bool srv_row_file_is_safetensors(const char *path);
/* A regular file that ends within a row, or is safetensors, is refused here, others when their end is read.
 */
KV_MUST_CHECK enum kv_status srv_row_reader_open(
	struct srv_row_reader *reader, const char *path, uint32_t row_bytes, struct kv_error *err);
/* The next rows, at most n_rows_max; *n_rows is 0 at the end. */
KV_MUST_CHECK enum kv_status srv_row_reader_next(struct srv_row_reader *reader, uint8_t *rows,
	uint32_t n_rows_max, uint32_t *n_rows, struct kv_error *err);
/* Zeroed ones allowed. */
void srv_row_reader_close(struct srv_row_reader *reader);

struct srv_out_file {
	const char *path; /* borrowed, for messages */
	FILE *file;
	char *target; /* owned: where it goes; NULL for devices and pipes, which are written directly */
	char *part;   /* owned: where it is while it is written */
};

/* BAD_ARG when the place is one of the n_inputs files (entries may be NULL), also by another name. */
KV_MUST_CHECK enum kv_status srv_out_file_open(struct srv_out_file *out, const char *path,
	const char *const inputs[], uint32_t n_inputs, struct kv_error *err);
KV_MUST_CHECK enum kv_status srv_out_file_write(
	struct srv_out_file *out, const void *bytes, size_t n_bytes, struct kv_error *err);
/*
 * Ends the output: with `status` OK it gets its place, else it is removed. Returns `status`, or what went
 * wrong here. Zeroed ones allowed.
 */
KV_MUST_CHECK enum kv_status srv_out_file_close(
	struct srv_out_file *out, enum kv_status status, struct kv_error *err);

/* A whole small file, zero-terminated; kv_free() the result. TOO_LARGE above n_bytes_max. */
KV_MUST_CHECK enum kv_status srv_file_read(
	const char *path, size_t n_bytes_max, char **text, size_t *n_bytes, struct kv_error *err);

#endif
