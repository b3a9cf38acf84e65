/* Codebook files: what the solver prints is read back, and anything that is not a codebook is refused by
 * name. */
#include "core/codebook_file.h"

#include <stdio.h>
#include <string.h>

#include "codebooks/solver.h"
#include "core/checked.h"
#include "tests/lib/kv_golden.h"
#include "tests/lib/kv_test.h"

/* The text of a codebook file; the caller frees it. */
static char *print(uint32_t head_dim, uint32_t bits)
{
	struct kvcb_solution solution;
	char *text = NULL;
	size_t n_bytes = 0;
	FILE *file = open_memstream(&text, &n_bytes);

	ck_assert_ptr_nonnull(file);
	ck_assert(kvcb_solve(head_dim, bits, &solution));
	ck_assert(kvcb_solution_print(&solution, file));
	fclose(file);
	return text;
}

/* A printed codebook is read back with the same bits, at every width. */
START_TEST(test_codebook_file_round_trip)
{
	for (uint32_t bits = 1; bits <= KVCB_BITS_MAX; bits++) {
		struct kvcb_solution solution;
		struct kvcb_codebook expected, parsed;
		struct kv_error err = { 0 };
		char *text = print(72, bits);

		memset(&expected, 0, sizeof(expected));
		memset(&parsed, 0, sizeof(parsed));
		ck_assert(kvcb_solve(72, bits, &solution));
		kvcb_solution_round(&solution, &expected);
		ck_assert_msg(
			kv_codebook_file_parse(text, strlen(text), &parsed, &err) == KV_OK, "%s", err.msg);
		ck_assert_mem_eq(&parsed, &expected, sizeof(parsed));
		free(text);
	}
}
END_TEST

/* The committed files are valid and are what is embedded. */
START_TEST(test_codebook_file_committed_ones_are_embedded)
{
	uint32_t k = 0;

	for (; kvcb_at(k); k++) {
		const struct kvcb_codebook *embedded = kvcb_at(k);
		struct kvcb_codebook parsed;
		struct kv_error err = { 0 };
		char name[128];
		size_t n_bytes;

		snprintf(name, sizeof(name), "../../codebooks/codebook_d%u_b%u.json", embedded->head_dim,
			embedded->bits);
		uint8_t *text = kv_golden_read(name, &n_bytes);

		ck_assert_msg(kv_codebook_file_parse((const char *)text, n_bytes, &parsed, &err) == KV_OK,
			"%s: %s", name, err.msg);
		ck_assert_mem_eq(parsed.centroids, embedded->centroids, sizeof(float) << embedded->bits);
		ck_assert_mem_eq(parsed.interior_boundaries, embedded->interior_boundaries,
			(sizeof(float) << embedded->bits) - sizeof(float));
		ck_assert(parsed.mse_per_coord == embedded->mse_per_coord);
		free(text);
	}
	ck_assert_uint_eq(k, 48);
}
END_TEST

/* Each member is looked at, the error names it, and the codebook is untouched. */
START_TEST(test_codebook_file_refusals)
{
	static const char head[] = "{\"d\":64,\"bits\":1,\"mse_per_coord\":0.01,\"mse_total\":0.64,";
	static const struct {
		const char *text, *message;
	} rows[] = {
		{ "", "line" },
		{ "{", "line 1" },
		{ "[]", "object" },
		{ "{}", "`d`" },
		{ "{\"d\":64,\"d\":64}", "duplicate" },
		{ "{\"d\":2,\"bits\":1}", "`d`" },
		{ "{\"d\":64.0,\"bits\":1}", "`d`" },
		{ "{\"d\":5000000000,\"bits\":1}", "`d`" },
		{ "{\"d\":64,\"bits\":0}", "`bits`" },
		{ "{\"d\":64,\"bits\":9}", "`bits`" },
		{ "{\"d\":64,\"bits\":-1}", "`bits`" },
		{ "{\"d\":64,\"bits\":1}", "`centroids`" },
		{ "H\"centroids\":[0.1]", "`centroids` must have 2" },
		{ "H\"centroids\":[-0.1,0.1,0.2]", "`centroids` must have 2" },
		{ "H\"centroids\":[-0.1,\"0.1\"]", "`centroids[1]`" },
		{ "H\"centroids\":[-1.5,1.5]", "`centroids[0]` is not from" },
		{ "H\"centroids\":[0.1,-0.1]", "`centroids[1]` is not above" },
		{ "H\"centroids\":[0.1,0.1]", "`centroids[1]` is not above" },
		{ "H\"centroids\":[-0.1,0.10001]", "`centroids[0]` is not symmetric" },
		{ "H\"centroids\":[-0.1,0.1]", "`boundaries`" },
		{ "H\"centroids\":[-0.1,0.1],\"boundaries\":[-1,0]", "`boundaries` must have 3" },
		{ "H\"centroids\":[-0.1,0.1],\"boundaries\":[-1,0.001,1]", "`boundaries[1]` is not symm" },
		{ "H\"centroids\":[-0.1,0.1],\"boundaries\":[-0.9,0,0.9]", "begin with -1" },
		{ "H\"centroids\":[-0.1,0.1],\"boundaries\":[-1,0,1],\"x\":1e999", "line" },
		{ "{\"d\":64,\"bits\":2,\"centroids\":[-0.4,-0.2,0.2,0.4],\"boundaries\":[-1,-0.5,0,0.5,1]}",
			"`centroids[0]` lies outside" },
		{ "{\"d\":64,\"bits\":1,\"centroids\":[-0.1,0.1],\"boundaries\":[-1,0,1]}",
			"`mse_per_coord`" },
		{ "{\"d\":64,\"bits\":1,\"centroids\":[-0.1,0.1],\"boundaries\":[-1,0,1],\"mse_per_coord\":"
		  "0}",
			"`mse_total`" },
		{ "{\"d\":64,\"bits\":1,\"centroids\":[-0.1,0.1],\"boundaries\":[-1,0,1],\"mse_per_coord\":0,"
		  "\"mse_total\":0}",
			"`mse_per_coord` must be above 0" },
		{ "{\"d\":64,\"bits\":1,\"centroids\":[-0.1,0.1],\"boundaries\":[-1,0,1],"
		  "\"mse_per_coord\":0.01,\"mse_total\":0.65}",
			"`mse_total` is not d times" },
	};
	struct kvcb_codebook codebook, before;

	memset(&codebook, 0xEE, sizeof(codebook));
	memset(&before, 0xEE, sizeof(before));
	for (size_t i = 0; i < KV_LENGTH(rows); i++) {
		const bool has_head = rows[i].text[0] == 'H';
		struct kv_error err = { 0 };
		char text[512];

		snprintf(text, sizeof(text), "%s%s%s", has_head ? head : "", rows[i].text + has_head,
			has_head ? "}" : "");
		ck_assert_int_eq(kv_codebook_file_parse(text, strlen(text), &codebook, &err), KV_BAD_CONFIG);
		ck_assert_msg(strstr(err.msg, rows[i].message) != NULL, "case %zu: %s", i, err.msg);
	}
	ck_assert_mem_eq(&codebook, &before, sizeof(before));
}
END_TEST

/* The shortest valid file, with members that are not known; a middle off by less than 1e-6 is symmetric
 * enough. */
START_TEST(test_codebook_file_by_hand)
{
	static const char text[] =
		"{\"note\":[1],\"d\":64,\"bits\":1,\"centroids\":[-0.1,0.1],\"boundaries\":"
		"[-1,4e-7,1],\"mse_per_coord\":0.01,\"mse_total\":0.64}";
	struct kvcb_codebook codebook;

	ck_assert_int_eq(kv_codebook_file_parse(text, strlen(text), &codebook, NULL), KV_OK);
	ck_assert_uint_eq(codebook.head_dim, 64);
	ck_assert_uint_eq(codebook.bits, 1);
	ck_assert(codebook.centroids[0] == -0.1f);
	ck_assert(codebook.centroids[1] == 0.1f);
	ck_assert(codebook.interior_boundaries[0] == 4e-7f);
}
END_TEST

/* A text beyond the limit is not even parsed; no cut of a valid text is accepted. */
START_TEST(test_codebook_file_lengths)
{
	char *text = print(16, 3), *large = calloc(KV_CODEBOOK_FILE_BYTES_MAX + 1, 1);
	const size_t n_bytes = strlen(text);
	struct kvcb_codebook codebook;
	struct kv_error err = { 0 };

	ck_assert_ptr_nonnull(large);
	memset(large, ' ', KV_CODEBOOK_FILE_BYTES_MAX + 1);
	memcpy(large, text, n_bytes);
	ck_assert_int_eq(kv_codebook_file_parse(large, KV_CODEBOOK_FILE_BYTES_MAX, &codebook, NULL), KV_OK);
	ck_assert_int_eq(kv_codebook_file_parse(large, KV_CODEBOOK_FILE_BYTES_MAX + 1, &codebook, &err),
		KV_BAD_CONFIG);
	ck_assert_ptr_nonnull(strstr(err.msg, "65536"));
	for (size_t n = 0; n + 1 < n_bytes; n++) /* the last byte is the end of the line */
		ck_assert_int_eq(kv_codebook_file_parse(text, n, &codebook, NULL), KV_BAD_CONFIG);
	free(text);
	free(large);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("codebook_file");
	TCase *tcase = tcase_create("all");

	tcase_add_test(tcase, test_codebook_file_round_trip);
	tcase_add_test(tcase, test_codebook_file_committed_ones_are_embedded);
	tcase_add_test(tcase, test_codebook_file_refusals);
	tcase_add_test(tcase, test_codebook_file_by_hand);
	tcase_add_test(tcase, test_codebook_file_lengths);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
