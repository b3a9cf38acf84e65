/* Safetensors reader: files are written here byte by byte, as the format says. */
#include "server/ctl/safetensors.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "core/memory.h"
#include "tests/lib/kv_test.h"

struct text_file {
	uint8_t bytes[4096];
	uint64_t n_bytes;
};

/* Length, header, then data_bytes bytes 1, 2, 3, .. */
static void make_file(struct text_file *file, const char *header, uint32_t data_bytes)
{
	const size_t header_bytes = strlen(header);

	ck_assert_uint_le(8 + header_bytes + data_bytes, sizeof(file->bytes));
	memset(file->bytes, 0, 8);
	file->bytes[0] = (uint8_t)(header_bytes & 0xFF);
	file->bytes[1] = (uint8_t)(header_bytes >> 8);
	memcpy(file->bytes + 8, header, header_bytes);
	for (uint32_t i = 0; i < data_bytes; i++)
		file->bytes[8 + header_bytes + i] = (uint8_t)(i + 1);
	file->n_bytes = 8 + header_bytes + data_bytes;
}

/* A small file as other programs write it: metadata, two dtypes, padding behind the JSON, any order of
 * entries. */
START_TEST(test_safetensors_reads_a_file)
{
	struct text_file text;
	struct srv_safetensors *file;
	char shape[SRV_TENSOR_SHAPE_TEXT_BYTES];

	make_file(&text,
		"{\"v.3\":{\"dtype\":\"F32\",\"shape\":[1,2],\"data_offsets\":[12,20]},"
		"\"__metadata__\":{\"model\":\"m\"},"
		"\"k.3\":{\"dtype\":\"BF16\",\"shape\":[1,3,2],\"data_offsets\":[0,12]}}   ",
		20);
	ck_assert_int_eq(srv_safetensors_create(text.bytes, text.n_bytes, &file, NULL), KV_OK);
	ck_assert_uint_eq(file->n_tensors, 2);
	ck_assert_str_eq(file->tensors[0].name, "k.3");
	ck_assert_str_eq(file->tensors[0].dtype_name, "BF16");
	ck_assert_int_eq(file->tensors[0].dtype, KV_DTYPE_BF16);
	ck_assert_uint_eq(file->tensors[0].n_values, 6);
	ck_assert_uint_eq(file->tensors[0].data_bytes, 12);
	ck_assert_uint_eq(file->tensors[0].data[0], 1);
	srv_tensor_shape_text(&file->tensors[0], shape);
	ck_assert_str_eq(shape, "[1, 3, 2]");

	const struct srv_tensor *v = srv_safetensors_find(file, "v.3");

	ck_assert_ptr_nonnull(v);
	ck_assert_int_eq(v->dtype, KV_DTYPE_F32);
	ck_assert_uint_eq(v->data[0], 13);
	ck_assert_uint_eq(v->data[7], 20);
	ck_assert_ptr_null(srv_safetensors_find(file, "v.4"));
	ck_assert_str_eq(srv_safetensors_metadata(file, "model"), "m");
	ck_assert_ptr_null(srv_safetensors_metadata(file, "license"));
	srv_safetensors_destroy(file);
}
END_TEST

/* Scalars, empty tensors, dtypes that rows cannot have, and a file without any tensor are all legal. */
START_TEST(test_safetensors_reads_odd_tensors)
{
	struct text_file text;
	struct srv_safetensors *file;

	make_file(&text,
		"{\"scalar\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[0,8]},"
		"\"empty\":{\"dtype\":\"F16\",\"shape\":[3,0],\"data_offsets\":[8,8]},"
		"\"ids\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[8,10]}}",
		10);
	ck_assert_int_eq(srv_safetensors_create(text.bytes, text.n_bytes, &file, NULL), KV_OK);
	ck_assert_uint_eq(file->n_tensors, 3);
	ck_assert_uint_eq(file->tensors[0].n_values, 1);
	ck_assert_int_eq(file->tensors[0].dtype, KV_DTYPE_NONE);
	ck_assert_str_eq(file->tensors[1].name, "empty");
	ck_assert_uint_eq(file->tensors[1].data_bytes, 0);
	srv_safetensors_destroy(file);

	make_file(&text, "{}", 0);
	ck_assert_int_eq(srv_safetensors_create(text.bytes, text.n_bytes, &file, NULL), KV_OK);
	ck_assert_uint_eq(file->n_tensors, 0);
	ck_assert_ptr_null(srv_safetensors_metadata(file, "model"));
	srv_safetensors_destroy(file);
}
END_TEST

#define ENTRY(name, dtype, shape, offsets) \
	"\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"

/* Every kind of lie is refused, and the text says which tensor and what is wrong with it. */
START_TEST(test_safetensors_refuses_and_says_why)
{
	static const struct {
		const char *header;
		uint32_t data_bytes;
		const char *says;
	} rows[] = {
		{ "[]", 0, "not a JSON object" },
		{ "{", 0, "line 1 column 1" },
		{ "{}x", 0, "end of file expected" },
		{ "{" ENTRY("a", "F32", "[1]", "[0,4]") "," ENTRY("a", "F32", "[1]", "[4,8]") "}", 8,
			"duplicate object key" },
		{ "{\"a\":3}", 0, "tensor 'a' is not a JSON object" },
		{ "{\"a\":{\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "tensor 'a' has no dtype" },
		{ "{" ENTRY("a", "F31", "[1]", "[0,4]") "}", 4, "tensor 'a' has the unknown dtype 'F31'" },
		{ "{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4, "tensor 'a' has no shape" },
		{ "{" ENTRY("a", "F32", "[-1]", "[0,4]") "}", 4,
			"tensor 'a': shape[0] is not a whole number" },
		{ "{" ENTRY("a", "F32", "[1,1.0]", "[0,4]") "}", 4,
			"tensor 'a': shape[1] is not a whole number" },
		{ "{" ENTRY("a", "F32", "[1,1,1,1,1,1,1,1,1]", "[0,4]") "}", 4, "has 9 dimensions" },
		{ "{" ENTRY("a", "F32", "[4294967296,4294967296]", "[0,4]") "}", 4, "overflows" },
		{ "{" ENTRY("a", "F32", "[4611686018427387904]", "[0,4]") "}", 4,
			"tensor 'a' has 4 bytes of data, not those of [4611686018427387904] values of F32" },
		{ "{" ENTRY("a", "F32", "[1]", "[0]") "}", 4,
			"tensor 'a' has no data_offsets of two numbers" },
		{ "{" ENTRY("a", "F32", "[1]", "[0,-4]") "}", 4, "data_offsets[1] is not a whole number" },
		{ "{" ENTRY("a", "F32", "[1]", "[4,0]") "}", 4,
			"tensor 'a' begins at offset 4, behind its end 0" },
		{ "{" ENTRY("a", "F32", "[2]", "[0,8]") "}", 7,
			"tensor 'a' ends at offset 8, behind the 7 data bytes" },
		{ "{" ENTRY("a", "F32", "[1]", "[0,5]") "}", 5, "tensor 'a' has 5 bytes of data" },
		{ "{" ENTRY("a", "F32", "[1]", "[0,4]") "," ENTRY("b", "F32", "[1]", "[2,6]") "}", 6,
			"tensor 'b' begins at offset 2, inside the one that ends at 4" },
		{ "{" ENTRY("a", "F32", "[1]", "[0,4]") "," ENTRY("b", "F32", "[1]", "[6,10]") "}", 10,
			"tensor 'b' begins at offset 6, behind a gap that begins at 4" },
		{ "{" ENTRY("a", "F32", "[1]", "[0,4]") "}", 5,
			"end at offset 4, but there are 5 data bytes" },
		{ "{\"__metadata__\":7}", 0, "__metadata__ is not a JSON object" },
		{ "{\"__metadata__\":{\"n\":7}}", 0, "__metadata__: the value of 'n' is not a text" },
		{ "{" ENTRY("a\\u001b[2J", "F32", "[1]", "[0,4]") "}", 4, "control character" },
		{ "{" ENTRY("a\\u0000b", "F32", "[1]", "[0,4]") "}", 4, "line 1" },
	};

	for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
		struct text_file text;
		struct srv_safetensors *file = NULL;
		struct kv_error err = { .status = KV_OK };

		make_file(&text, rows[i].header, rows[i].data_bytes);
		ck_assert_int_ne(srv_safetensors_create(text.bytes, text.n_bytes, &file, &err), KV_OK);
		ck_assert_ptr_null(file);
		ck_assert_msg(strstr(err.msg, rows[i].says) != NULL, "row %zu: '%s' does not say '%s'", i,
			err.msg, rows[i].says);
	}
}
END_TEST

/* A header length beyond the file, or beyond what is read, is found before anything is allocated for it. */
START_TEST(test_safetensors_refuses_header_lengths)
{
	static const uint64_t lengths[] = { 3, 1u << 20, UINT64_MAX, UINT64_MAX - 7, 1ull << 63 };
	struct srv_safetensors *file = NULL;
	uint8_t bytes[10] = { 0 };

	bytes[8] = '{';
	bytes[9] = '}';
	for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
		for (uint32_t b = 0; b < 8; b++)
			bytes[b] = (uint8_t)(lengths[i] >> (8 * b));
		ck_assert_int_eq(srv_safetensors_create(bytes, sizeof(bytes), &file, NULL), KV_CORRUPT);
	}
	for (uint64_t n = 0; n < 8; n++)
		ck_assert_int_eq(srv_safetensors_create(bytes, n, &file, NULL), KV_CORRUPT);
	bytes[0] = 2;
	memset(bytes + 1, 0, 7);
	ck_assert_int_eq(srv_safetensors_create(bytes, sizeof(bytes), &file, NULL), KV_OK);
	srv_safetensors_destroy(file);

	const uint64_t large = SRV_SAFETENSORS_HEADER_BYTES_MAX + 1ull;
	uint8_t *many = kv_alloc((size_t)large + 8, 1);

	ck_assert_ptr_nonnull(many);
	for (uint32_t b = 0; b < 8; b++)
		many[b] = (uint8_t)(large >> (8 * b));
	ck_assert_int_eq(srv_safetensors_create(many, large + 8, &file, NULL), KV_UNSUPPORTED);
	kv_free(many);
}
END_TEST

/* No prefix of a good file is a good file. */
START_TEST(test_safetensors_refuses_every_prefix)
{
	struct text_file text;
	struct srv_safetensors *file = NULL;

	make_file(&text, "{" ENTRY("a", "F16", "[2]", "[0,4]") "," ENTRY("b", "F32", "[1]", "[4,8]") "}", 8);
	for (uint64_t n = 0; n < text.n_bytes; n++)
		ck_assert_int_ne(srv_safetensors_create(text.bytes, n, &file, NULL), KV_OK);
	ck_assert_int_eq(srv_safetensors_create(text.bytes, text.n_bytes, &file, NULL), KV_OK);
	srv_safetensors_destroy(file);
}
END_TEST

/* When the k-th allocation fails, the reader says so and leaks nothing. */
START_TEST(test_safetensors_survives_failed_allocations)
{
	struct text_file text;
	struct srv_safetensors *file = NULL;
	uint32_t n_failed = 0;

	make_file(&text, "{" ENTRY("a", "F16", "[2]", "[0,4]") "}", 4);
	for (int64_t k = 0; file == NULL; k++) {
		kv_alloc_fail_after(k);
		const enum kv_status status = srv_safetensors_create(text.bytes, text.n_bytes, &file, NULL);

		kv_alloc_fail_after(-1);
		ck_assert(status == KV_OK || status == KV_NO_MEMORY);
		n_failed += status != KV_OK;
	}
	ck_assert_uint_eq(n_failed, 2);
	srv_safetensors_destroy(file);
}
END_TEST

/* From a file: the same, and everything that is no readable file is an error that begins with the path. */
START_TEST(test_safetensors_opens_files)
{
	char path[] = "/tmp/tqkv-safetensors-XXXXXX";
	const int fd = mkstemp(path);
	struct srv_safetensors *file = NULL;
	struct kv_error err;
	struct text_file text;

	ck_assert_int_ge(fd, 0);
	ck_assert_int_eq(srv_safetensors_open(path, &file, &err), KV_CORRUPT);
	ck_assert_ptr_nonnull(strstr(err.msg, "empty"));
	ck_assert_int_eq(strncmp(err.msg, path, strlen(path)), 0);
	make_file(&text, "{" ENTRY("a", "F16", "[2]", "[0,4]") "}", 4);
	ck_assert_int_eq(write(fd, text.bytes, (size_t)text.n_bytes), (ssize_t)text.n_bytes);
	ck_assert_int_eq(srv_safetensors_open(path, &file, NULL), KV_OK);
	ck_assert_uint_eq(file->tensors[0].data[3], 4);
	ck_assert_uint_eq(file->file_bytes, text.n_bytes);
	srv_safetensors_destroy(file);
	close(fd);
	unlink(path);
	ck_assert_int_eq(srv_safetensors_open(path, &file, &err), KV_IO_ERROR);
	ck_assert_int_eq(strncmp(err.msg, path, strlen(path)), 0);
	ck_assert_int_eq(srv_safetensors_open("/tmp", &file, &err), KV_IO_ERROR);
	ck_assert_ptr_nonnull(strstr(err.msg, "not a regular file"));
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("safetensors");
	TCase *tcase = tcase_create("all");

	tcase_add_test(tcase, test_safetensors_reads_a_file);
	tcase_add_test(tcase, test_safetensors_reads_odd_tensors);
	tcase_add_test(tcase, test_safetensors_refuses_and_says_why);
	tcase_add_test(tcase, test_safetensors_refuses_header_lengths);
	tcase_add_test(tcase, test_safetensors_refuses_every_prefix);
	tcase_add_test(tcase, test_safetensors_survives_failed_allocations);
	tcase_add_test(tcase, test_safetensors_opens_files);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
