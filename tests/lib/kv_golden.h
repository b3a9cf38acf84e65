/* Reads committed test data. Paths count from the source root: $KV_SOURCE_ROOT, or the working directory. */
#ifndef TESTS_LIB_KV_GOLDEN_H
#define TESTS_LIB_KV_GOLDEN_H

#include <check.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static inline void kv_golden_path(const char *name, char *path, size_t path_size)
{
	const char *root = getenv("KV_SOURCE_ROOT");
	const int n = snprintf(path, path_size, "%s/tests/golden/%s", root ? root : ".", name);

	ck_assert_int_gt(n, 0);
	ck_assert_uint_lt((size_t)n, path_size);
}

/* The whole file; the caller frees it. A file that cannot be read fails the test. */
static inline uint8_t *kv_golden_read(const char *name, size_t *n_bytes)
{
	char path[1024];

	kv_golden_path(name, path, sizeof(path));

	FILE *file = fopen(path, "rb");

	ck_assert_msg(file != NULL, "cannot open %s", path);
	ck_assert_int_eq(fseek(file, 0, SEEK_END), 0);
	const long size = ftell(file);

	ck_assert_int_gt(size, 0);
	rewind(file);
	uint8_t *data = malloc((size_t)size);

	ck_assert_ptr_nonnull(data);
	ck_assert_uint_eq(fread(data, 1, (size_t)size, file), (size_t)size);
	fclose(file);
	*n_bytes = (size_t)size;
	return data;
}

#endif
