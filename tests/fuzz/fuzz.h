/*
 * What fuzz targets share: a check that ends the process with its text, inputs cut into parts, copies of
 * exactly the given size (so that the address sanitizer sees one byte too many), and what every refusal owes
 * its reader.
 */
#ifndef TESTS_FUZZ_FUZZ_H
#define TESTS_FUZZ_FUZZ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/bytes.h"
#include "proto/crc32c.h"
#include "proto/frame.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

#define FUZZ_CHECK(cond) ((cond) ? (void)0 : fuzz_fail(#cond, __FILE__, __LINE__))

_Noreturn static inline void fuzz_fail(const char *cond, const char *file, int line)
{
	fprintf(stderr, "%s:%d: does not hold: %s\n", file, line, cond);
	abort();
}

/* What is left of the input. */
struct fuzz_input {
	const uint8_t *data;
	size_t n_bytes;
};

static inline uint8_t fuzz_u8(struct fuzz_input *input)
{
	if (input->n_bytes == 0)
		return 0;
	input->n_bytes--;
	return *input->data++;
}

static inline uint16_t fuzz_u16(struct fuzz_input *input)
{
	const uint16_t low = fuzz_u8(input);

	return (uint16_t)(low | fuzz_u8(input) << 8);
}

/* The next bytes, zeros behind the end. */
static inline void fuzz_bytes(struct fuzz_input *input, void *out, size_t n_bytes)
{
	const size_t n = n_bytes < input->n_bytes ? n_bytes : input->n_bytes;

	memset(out, 0, n_bytes);
	if (n > 0)
		memcpy(out, input->data, n);
	input->data += n;
	input->n_bytes -= n;
}

/* Exactly n_bytes; free() it. */
static inline void *fuzz_alloc(size_t n_bytes)
{
	void *memory = malloc(n_bytes > 0 ? n_bytes : 1);

	if (!memory)
		abort();
	return memory;
}

static inline void *fuzz_copy(const void *bytes, size_t n_bytes)
{
	void *copy = fuzz_alloc(n_bytes);

	if (n_bytes > 0)
		memcpy(copy, bytes, n_bytes);
	return copy;
}

/* Magic, version, length and checksum as a header has them; nothing is worth much behind a wrong one. */
static inline void fuzz_mend_header(uint8_t *header)
{
	memcpy(header, "TKV1\1\10", 6);
	kvp_put_u32(header + KVP_AT_HEADER_CRC, kvp_crc32c(0, header, KVP_AT_HEADER_CRC));
}

/* A refusal says what is wrong, in words, and where: in the header, or in the n_bytes behind it. */
static inline void fuzz_check_fault(const struct kvp_fault *fault, enum kv_status status, uint64_t body_bytes)
{
	char text[KVP_DETAIL_BYTES_MAX + 1];

	FUZZ_CHECK(fault->status == status && status != KV_OK);
	FUZZ_CHECK(kv_status_row(status)->number == (unsigned)status);
	FUZZ_CHECK(fault->scope >= KV_SCOPE_REQUEST && fault->scope <= KV_SCOPE_CONN);
	FUZZ_CHECK(fault->offset < KVP_HEADER_BYTES + body_bytes);
	FUZZ_CHECK(fault->what && fault->what[0] != '\0');
	for (size_t n = 1; n <= sizeof(text); n += n < 4 ? 1 : 127) {
		memset(text, 'x', sizeof(text));
		const size_t length = kvp_fault_text(fault, text, n);

		FUZZ_CHECK(length < n && strlen(text) == length);
	}
	FUZZ_CHECK(strstr(text, kv_status_name(status)) == text);
}

#endif
