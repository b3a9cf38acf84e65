/* Captures: rows, layers and what is refused. Files are built from a list of tensors, values by hand. */
#include "server/ctl/capture.h"

#include <stdio.h>
#include <string.h>

#include "core/memory.h"
#include "tests/lib/kv_test.h"

struct tensor_spec {
	const char *name, *dtype;
	uint32_t value_bytes;
	uint32_t shape[3];
};

struct test_file {
	uint8_t bytes[8192];
	uint64_t n_bytes, data_at;
};

/* All data bytes are 0 unless a test writes some; `metadata` is a JSON object or NULL. */
static void make_file(
	struct test_file *file, const struct tensor_spec *specs, uint32_t n_specs, const char *metadata)
{
	char header[4096];
	size_t used =
		(size_t)snprintf(header, sizeof(header), "{\"__metadata__\":%s", metadata ? metadata : "{}");
	uint32_t end = 0;

	for (uint32_t i = 0; i < n_specs; i++) {
		const uint32_t *shape = specs[i].shape;
		const uint32_t n_bytes = shape[0] * shape[1] * shape[2] * specs[i].value_bytes;

		used += (size_t)snprintf(header + used, sizeof(header) - used,
			",\"%s\":{\"dtype\":\"%s\",\"shape\":[%u,%u,%u],\"data_offsets\":[%u,%u]}",
			specs[i].name, specs[i].dtype, shape[0], shape[1], shape[2], end, end + n_bytes);
		end += n_bytes;
	}
	used += (size_t)snprintf(header + used, sizeof(header) - used, "}");
	ck_assert_uint_le(8 + used + end, sizeof(file->bytes));
	memset(file, 0, sizeof(*file));
	file->bytes[0] = (uint8_t)(used & 0xFF);
	file->bytes[1] = (uint8_t)(used >> 8);
	memcpy(file->bytes + 8, header, used);
	file->data_at = 8 + used;
	file->n_bytes = 8 + used + end;
}

static enum kv_status open_capture(
	const struct test_file *file, struct srv_capture **capture, struct kv_error *err)
{
	struct srv_safetensors *safetensors;

	ck_assert_int_eq(srv_safetensors_create(file->bytes, file->n_bytes, &safetensors, err), KV_OK);
	return srv_capture_create(safetensors, capture, err);
}

#define BF16(name, tokens, heads, dim)     \
	{                                  \
		name, "BF16", 2,           \
		{                          \
			tokens, heads, dim \
		}                          \
	}

/* Layers come in ascending order of their numbers, whatever the order in the file, and numbers may have gaps.
 */
START_TEST(test_capture_orders_layers)
{
	static const struct tensor_spec specs[] = { BF16("k.10", 2, 1, 4), BF16("q.9", 2, 2, 4),
		BF16("v.2", 2, 1, 6), BF16("q.2", 2, 2, 4), BF16("k.9", 2, 1, 4), BF16("v.9", 2, 1, 6),
		BF16("k.2", 2, 1, 4), BF16("v.10", 2, 1, 6), BF16("q.10", 2, 2, 4),
		{ "tokens", "I64", 8, { 1, 1, 2 } } };
	struct test_file file;
	struct srv_capture *capture;

	make_file(&file, specs, 10,
		"{\"tokens\":\"2\",\"q_heads\":\"2\",\"kv_heads\":\"1\",\"head_dim\":\"4\",\"n_layers\":"
		"\"11\",\"x\":\"y\"}");
	ck_assert_int_eq(open_capture(&file, &capture, NULL), KV_OK);
	ck_assert_uint_eq(capture->n_layers, 3);
	ck_assert_uint_eq(capture->layers[0].number, 2);
	ck_assert_uint_eq(capture->layers[1].number, 9);
	ck_assert_uint_eq(capture->layers[2].number, 10);
	ck_assert_str_eq(capture->layers[2].rows[SRV_CAPTURE_V]->name, "v.10");
	ck_assert_uint_eq(capture->n_tokens, 2);
	ck_assert_uint_eq(capture->q_heads, 2);
	ck_assert_uint_eq(capture->kv_heads, 1);
	ck_assert_uint_eq(capture->k_head_dim, 4);
	ck_assert_uint_eq(capture->v_head_dim, 6);
	ck_assert_uint_eq(srv_capture_token_values(capture, SRV_CAPTURE_K), 4);
	ck_assert_uint_eq(srv_capture_token_values(capture, SRV_CAPTURE_V), 6);
	ck_assert_uint_eq(srv_capture_token_values(capture, SRV_CAPTURE_Q), 8);
	ck_assert(srv_capture_is_bf16(capture));
	srv_capture_destroy(capture);
}
END_TEST

/* Rows load by token from every dtype: 1.5 is 3FC0 in BF16, 3E00 in F16, 3FC00000 in F32. */
START_TEST(test_capture_loads_rows)
{
	static const struct tensor_spec specs[] = { BF16("k.0", 3, 1, 2), { "v.0", "F16", 2, { 3, 1, 2 } },
		{ "q.0", "F32", 4, { 3, 1, 2 } } };
	struct test_file file;
	struct srv_capture *capture;
	float values[4];

	make_file(&file, specs, 3, NULL);
	/* K: token 1, channel 1; V: token 2, channel 0; Q: token 0, channel 1 */
	memcpy(file.bytes + file.data_at + 6, "\xC0\x3F", 2);
	memcpy(file.bytes + file.data_at + 12 + 8, "\x00\x3E", 2);
	memcpy(file.bytes + file.data_at + 24 + 4, "\x00\x00\xC0\x3F", 4);
	ck_assert_int_eq(open_capture(&file, &capture, NULL), KV_OK);
	ck_assert(!srv_capture_is_bf16(capture));
	srv_capture_load(capture, 0, SRV_CAPTURE_K, 1, 2, values);
	ck_assert_float_eq(values[0], 0.0f);
	ck_assert_float_eq(values[1], 1.5f);
	ck_assert_float_eq(values[2], 0.0f);
	srv_capture_load(capture, 0, SRV_CAPTURE_V, 2, 1, values);
	ck_assert_float_eq(values[0], 1.5f);
	srv_capture_load(capture, 0, SRV_CAPTURE_Q, 0, 1, values);
	ck_assert_float_eq(values[1], 1.5f);
	srv_capture_destroy(capture);
}
END_TEST

/* A value that is not finite is named by tensor, token, head and channel. */
START_TEST(test_capture_names_values_that_are_not_finite)
{
	static const struct tensor_spec specs[] = { BF16("k.7", 3, 2, 4), BF16("v.7", 3, 2, 4),
		BF16("q.7", 3, 2, 4) };
	struct test_file file;
	struct srv_capture *capture;
	struct kv_error err;

	make_file(&file, specs, 3, NULL);
	ck_assert_int_eq(open_capture(&file, &capture, NULL), KV_OK);
	ck_assert_int_eq(srv_capture_check_finite(capture, &err), KV_OK);
	/* V, token 2, head 1, channel 3: the last value; infinity is 7F80 */
	memcpy(file.bytes + file.data_at + 48 + 46, "\x80\x7F", 2);
	ck_assert_int_eq(srv_capture_check_finite(capture, &err), KV_BAD_VALUE);
	ck_assert_str_eq(err.msg, "tensor 'v.7': token 2, head 1, channel 3 is not finite");
	srv_capture_destroy(capture);
}
END_TEST

/* What is missing, misnamed, misshapen or contradicts the metadata is refused by name. */
START_TEST(test_capture_refuses_and_says_why)
{
	static const struct {
		struct tensor_spec specs[3];
		const char *metadata, *says;
	} rows[] = {
		{ { BF16("a", 1, 1, 1), BF16("b", 1, 1, 1), BF16("c", 1, 1, 1) }, NULL, "not a capture" },
		{ { BF16("k.0", 2, 1, 4), BF16("v.0", 2, 1, 4), BF16("q.1", 2, 1, 4) }, NULL,
			"layer 0 has no tensor 'q.0'" },
		{ { BF16("k.0", 2, 1, 4), BF16("v.0", 2, 1, 4), BF16("q.00", 2, 1, 4) }, NULL,
			"'00' is not a layer number" },
		{ { BF16("k.0", 2, 1, 4), BF16("v.0", 2, 1, 4), BF16("q.", 2, 1, 4) }, NULL,
			"'' is not a layer number" },
		{ { BF16("k.0", 2, 1, 4), BF16("v.0", 2, 1, 4), BF16("q.1e1", 2, 1, 4) }, NULL,
			"is not a layer number" },
		{ { BF16("k.0", 2, 1, 4), BF16("v.0", 2, 1, 4), BF16("q.100000", 2, 1, 4) }, NULL,
			"is not a layer number" },
		{ { BF16("k.0", 2, 1, 4), { "v.0", "I64", 8, { 2, 1, 4 } }, BF16("q.0", 2, 1, 4) }, NULL,
			"tensor 'v.0' is I64" },
		{ { BF16("k.0", 2, 1, 4), BF16("v.0", 3, 1, 4), BF16("q.0", 2, 1, 4) }, NULL,
			"tensor 'v.0' has the shape [3, 1, 4]; the capture's first tensors ask for [2, 1, "
			"4]" },
		{ { BF16("k.0", 2, 1, 4), BF16("v.0", 2, 2, 4), BF16("q.0", 2, 1, 4) }, NULL,
			"tensor 'v.0' has the shape" },
		{ { BF16("k.0", 2, 1, 4), BF16("v.0", 2, 1, 4), BF16("q.0", 2, 1, 5) }, NULL,
			"tensor 'q.0' has the shape" },
		{ { BF16("k.0", 2, 2, 4), BF16("v.0", 2, 2, 4), BF16("q.0", 2, 3, 4) }, NULL,
			"3 query heads" },
		{ { BF16("k.0", 0, 1, 4), BF16("v.0", 0, 1, 4), BF16("q.0", 0, 1, 4) }, NULL,
			"tensor 'k.0' has 0 tokens" },
		{ { BF16("k.0", 1, 1, 512), BF16("v.0", 1, 1, 4), BF16("q.0", 1, 1, 512) }, NULL,
			"512 channels" },
		{ { BF16("k.0", 2, 1, 4), BF16("v.0", 2, 1, 4), BF16("q.0", 2, 1, 4) }, "{\"tokens\":\"3\"}",
			"metadata says tokens '3', the tensors have 2" },
		{ { BF16("k.0", 2, 1, 4), BF16("v.0", 2, 1, 4), BF16("q.0", 2, 1, 4) },
			"{\"head_dim\":\"four\"}", "metadata says head_dim 'four'" },
		{ { BF16("k.5", 2, 1, 4), BF16("v.5", 2, 1, 4), BF16("q.5", 2, 1, 4) },
			"{\"n_layers\":\"5\"}", "metadata says n_layers '5', but there is a layer 5" },
	};

	for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
		struct test_file file;
		struct srv_capture *capture = NULL;
		struct kv_error err = { .msg = "" };

		make_file(&file, rows[i].specs, 3, rows[i].metadata);
		ck_assert_int_ne(open_capture(&file, &capture, &err), KV_OK);
		ck_assert_ptr_null(capture);
		ck_assert_msg(strstr(err.msg, rows[i].says) != NULL, "row %zu: '%s' does not say '%s'", i,
			err.msg, rows[i].says);
	}
}
END_TEST

/* When an allocation fails the reader says so and leaks nothing, the file included. */
START_TEST(test_capture_survives_failed_allocations)
{
	static const struct tensor_spec specs[] = { BF16("k.0", 1, 1, 2), BF16("v.0", 1, 1, 2),
		BF16("q.0", 1, 1, 2) };
	struct test_file file;
	struct srv_capture *capture = NULL;
	uint32_t n_failed = 0;

	make_file(&file, specs, 3, NULL);
	for (int64_t k = 0; k < 2; k++) {
		struct srv_safetensors *safetensors;

		ck_assert_int_eq(srv_safetensors_create(file.bytes, file.n_bytes, &safetensors, NULL), KV_OK);
		kv_alloc_fail_after(k);
		n_failed += srv_capture_create(safetensors, &capture, NULL) == KV_NO_MEMORY;
		kv_alloc_fail_after(-1);
	}
	ck_assert_uint_eq(n_failed, 2);
	ck_assert_ptr_null(capture);
	ck_assert_int_eq(open_capture(&file, &capture, NULL), KV_OK);
	srv_capture_destroy(capture);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("capture");
	TCase *tcase = tcase_create("all");

	tcase_add_test(tcase, test_capture_orders_layers);
	tcase_add_test(tcase, test_capture_loads_rows);
	tcase_add_test(tcase, test_capture_names_values_that_are_not_finite);
	tcase_add_test(tcase, test_capture_refuses_and_says_why);
	tcase_add_test(tcase, test_capture_survives_failed_allocations);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
