/* Recipe files: the published schema by hand, what is printed is read back, and anything else is refused by
 * name. */
#include "core/recipe_file.h"

#include <stdio.h>
#include <string.h>

#include "core/checked.h"
#include "core/memory.h"
#include "core/recipe.h"
#include "tests/lib/kv_test.h"

static const struct kv_format *format_of(const char *name)
{
	const struct kv_format *format = NULL;

	ck_assert_int_eq(kv_format_parse(name, &format, NULL), KV_OK);
	return format;
}

/* 16 channels from `first` in steps of 2. */
#define LIST_0 "[0,2,4,6,8,10,12,14,16,18,20,22,24,26,28,30]"
#define LIST_9 "[9,11,13,15,17,19,21,23,25,27,29,31,33,35,37,39]"

/* Keys are numbers or module names, in any order; lists belong to their layer, side and head. */
START_TEST(test_recipe_file_by_hand)
{
	static const char text[] =
		"{\"version\":1,\"recipe\":\"turboquant25\",\"head_size\":64,\"model_name\":\"m\",\"layers\":"
		"{"
		"\"model.layers.12.self_attn.attn\":{\"key_high_precision_indices\":[" LIST_0 "," LIST_9 "],"
		"\"value_high_precision_indices\":[" LIST_9 "," LIST_0 "]},"
		"\"3\":{\"value_high_precision_indices\":[" LIST_0 "," LIST_0 "],"
		"\"key_high_precision_indices\":[" LIST_9 "," LIST_9 "],\"other\":null}}}";
	struct kv_recipe_file *file = NULL;
	struct kv_error err = { 0 };

	ck_assert_msg(kv_recipe_file_parse(text, strlen(text), &file, &err) == KV_OK, "%s", err.msg);
	ck_assert_ptr_eq(file->format, format_of("turboquant25"));
	ck_assert_uint_eq(file->head_dim, 64);
	ck_assert_uint_eq(file->n_high, 16);
	ck_assert_uint_eq(file->kv_heads, 2);
	ck_assert_uint_eq(file->n_layers, 2);
	ck_assert_uint_eq(file->layer_idxs[0], 3);
	ck_assert_uint_eq(file->layer_idxs[1], 12);
	for (uint16_t i = 0; i < 16; i++) {
		ck_assert_uint_eq(kv_recipe_file_channels(file, 12, false, 0)[i], 2 * i);
		ck_assert_uint_eq(kv_recipe_file_channels(file, 12, false, 1)[i], 2 * i + 9);
		ck_assert_uint_eq(kv_recipe_file_channels(file, 12, true, 0)[i], 2 * i + 9);
		ck_assert_uint_eq(kv_recipe_file_channels(file, 12, true, 1)[i], 2 * i);
		ck_assert_uint_eq(kv_recipe_file_channels(file, 3, true, 1)[i], 2 * i);
		ck_assert_uint_eq(kv_recipe_file_channels(file, 3, false, 0)[i], 2 * i + 9);
	}
	ck_assert_ptr_null(kv_recipe_file_channels(file, 0, false, 0));
	kv_recipe_file_destroy(file);
	kv_recipe_file_destroy(NULL);
}
END_TEST

static char *print(const struct kv_recipe_file *file, size_t *n_bytes)
{
	char *text = NULL;
	FILE *out = open_memstream(&text, n_bytes);

	ck_assert_ptr_nonnull(out);
	ck_assert(kv_recipe_file_print(file, out));
	fclose(out);
	return text;
}

/* A file that is made, filled and printed is read back as it was. */
START_TEST(test_recipe_file_round_trip)
{
	struct kv_recipe_file *made = NULL, *parsed = NULL;
	struct kv_error err = { 0 };
	uint64_t state = 90;
	size_t n_bytes;

	printf("seed 90\n");
	ck_assert_int_eq(kv_recipe_file_create(format_of("turboquant35"), 80, 3, 5, &made, &err), KV_OK);
	for (uint32_t l = 0; l < 5; l++) {
		ck_assert_uint_eq(kv_recipe_file_channels(made, l, true, 2)[31], 31);
		for (uint32_t i = 0; i < 6; i++) {
			double sums[80];

			for (uint32_t c = 0; c < 80; c++)
				sums[c] = (double)(kv_test_random(&state) >> 40);
			kv_recipe_pick_channels(sums, 80, 32, kv_recipe_file_channels(made, l, i % 2, i / 2));
		}
	}
	char *text = print(made, &n_bytes);

	ck_assert_msg(kv_recipe_file_parse(text, n_bytes, &parsed, &err) == KV_OK, "%s", err.msg);
	ck_assert_uint_eq(parsed->n_layers, 5);
	ck_assert_uint_eq(parsed->kv_heads, 3);
	ck_assert_mem_eq(parsed->layer_idxs, made->layer_idxs, 5 * sizeof(uint32_t));
	ck_assert_mem_eq(parsed->channels, made->channels, 5 * 2 * 3 * 32 * sizeof(uint16_t));
	free(text);
	kv_recipe_file_destroy(made);
	kv_recipe_file_destroy(parsed);
}
END_TEST

/* What is printed is the published schema to the byte. */
START_TEST(test_recipe_file_prints_the_schema)
{
	static const char expected[] =
		"{\"version\":1,\"recipe\":\"turboquant25\",\"head_size\":64,\"layers\":{\"0\":{"
		"\"key_high_precision_indices\":[" LIST_9 "],\"value_high_precision_indices\":["
		"[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15]]}}}\n";
	struct kv_recipe_file *file = NULL;
	size_t n_bytes;

	ck_assert_int_eq(kv_recipe_file_create(format_of("turboquant25"), 64, 1, 1, &file, NULL), KV_OK);
	for (uint16_t i = 0; i < 16; i++)
		kv_recipe_file_channels(file, 0, false, 0)[i] = (uint16_t)(9 + 2 * i);
	char *text = print(file, &n_bytes);

	ck_assert_str_eq(text, expected);
	free(text);
	kv_recipe_file_destroy(file);
}
END_TEST

#define KEYS   "\"key_high_precision_indices\":"
#define VALUES "\"value_high_precision_indices\":"

/* Each member is looked at, the error names it and the place, and the output is untouched. */
START_TEST(test_recipe_file_refusals)
{
	static const char head[] = "{\"version\":1,\"recipe\":\"turboquant25\",\"head_size\":64,\"layers\":";
	static const struct {
		const char *text, *message; /* text after H: the layers */
	} rows[] = {
		{ "", "line" },
		{ "{\"version\":1", "line 1" },
		{ "[]", "`version`" },
		{ "{\"version\":2}", "`version`" },
		{ "{\"version\":\"1\"}", "`version`" },
		{ "{\"version\":1}", "`recipe`" },
		{ "{\"version\":1,\"recipe\":\"tq4\"}", "`recipe`" },
		{ "{\"version\":1,\"recipe\":5}", "`recipe`" },
		{ "{\"version\":1,\"recipe\":\"turboquant25\"}", "`head_size`" },
		{ "{\"version\":1,\"recipe\":\"turboquant25\",\"head_size\":32}", "no high channels" },
		{ "{\"version\":1,\"recipe\":\"turboquant25\",\"head_size\":100}", "multiple of 16" },
		{ "{\"version\":1,\"recipe\":\"turboquant25\",\"head_size\":-64}", "`head_size`" },
		{ "{\"version\":1,\"recipe\":\"turboquant25\",\"head_size\":4294967360}", "`head_size`" },
		{ "{\"version\":1,\"recipe\":\"turboquant25\",\"head_size\":64}", "`layers`" },
		{ "H[]", "`layers`" },
		{ "H{}", "`layers`" },
		{ "H{\"a\":{}}", "\"a\" has no number" },
		{ "H{\"1024\":{}}", "not below 1024" },
		{ "H{\"99999999999999999999\":{}}", "not below 1024" },
		{ "H{\"2\":{},\"l.2\":{}}", "both layer 2" },
		{ "H{\"2\":{},\"2\":{}}", "duplicate" },
		{ "H{\"2\":7}", "1 to 1024 lists" },
		{ "H{\"2\":{" KEYS "[]}}", "1 to 1024 lists" },
		{ "H{\"2\":{" KEYS "[" LIST_0 "]}}", "layer \"2\": `value_high_precision_indices`" },
		{ "H{\"2\":{" KEYS "[" LIST_0 "]," VALUES "[" LIST_0 "," LIST_0 "]}}", "each of 1 KV heads" },
		{ "H{\"2\":{" KEYS "[" LIST_0 "]," VALUES "[" LIST_0 "]},\"3\":{" KEYS "[" LIST_0 "," LIST_0
		  "]," VALUES "[" LIST_0 "]}}",
			"layer \"3\": `key_high_precision_indices`" },
		{ "H{\"2\":{" KEYS "[5]," VALUES "[" LIST_0 "]}}", "must be a list of 16" },
		{ "H{\"2\":{" KEYS "[[1,2]]," VALUES "[" LIST_0 "]}}", "must be a list of 16" },
		{ "H{\"2\":{" KEYS "[" LIST_0 "]," VALUES "[[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,64]]}}",
			"value_high_precision_indices[0]`: channel 15" },
		{ "H{\"2\":{" KEYS "[" LIST_0 "]," VALUES "[[-1,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15]]}}",
			"channel 0" },
		{ "H{\"2\":{" KEYS "[" LIST_0 "]," VALUES "[[0,1,2,3,4,5,6,7,8,9,10,11,12,14,13,15]]}}",
			"do not ascend" },
		{ "H{\"2\":{" KEYS "[" LIST_0 "]," VALUES "[[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,14]]}}",
			"do not ascend" },
		{ "H{\"2\":{" KEYS "[" LIST_0 "]," VALUES "[[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,1.5]]}}",
			"channel 15" },
	};

	for (size_t i = 0; i < KV_LENGTH(rows); i++) {
		const bool has_head = rows[i].text[0] == 'H';
		struct kv_recipe_file *file = NULL;
		struct kv_error err = { 0 };
		char text[1024];

		snprintf(text, sizeof(text), "%s%s%s", has_head ? head : "", rows[i].text + has_head,
			has_head ? "}" : "");
		ck_assert_int_eq(kv_recipe_file_parse(text, strlen(text), &file, &err), KV_BAD_CONFIG);
		ck_assert_int_eq(err.status, KV_BAD_CONFIG);
		ck_assert_msg(strstr(err.msg, rows[i].message) != NULL, "case %zu: %s", i, err.msg);
		ck_assert_int_eq(kv_recipe_file_parse(text, strlen(text), &file, NULL), KV_BAD_CONFIG);
		ck_assert_ptr_null(file);
	}
}
END_TEST

/* Whichever allocation fails, there is an error, and the output is untouched. */
START_TEST(test_recipe_file_without_memory)
{
	for (int64_t n = 0; n < 3; n++) {
		struct kv_recipe_file *file = NULL;
		struct kv_error err = { 0 };

		kv_alloc_fail_after(n);
		ck_assert_int_eq(kv_recipe_file_create(format_of("turboquant25"), 64, 2, 2, &file, &err),
			KV_NO_MEMORY);
		kv_alloc_fail_after(-1);
		ck_assert_ptr_null(file);
	}
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("recipe_file");
	TCase *tcase = tcase_create("all");

	tcase_add_test(tcase, test_recipe_file_by_hand);
	tcase_add_test(tcase, test_recipe_file_round_trip);
	tcase_add_test(tcase, test_recipe_file_prints_the_schema);
	tcase_add_test(tcase, test_recipe_file_refusals);
	tcase_add_test(tcase, test_recipe_file_without_memory);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
