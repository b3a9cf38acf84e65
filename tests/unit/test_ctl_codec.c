/*
 * The parts of the codec commands that need no process: files of rows, comparison, theory. What they do
 * together is in tests/integration/test_codec.py.
 */
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/checked.h"
#include "core/memory.h"
#include "server/ctl/codec.h"
#include "server/ctl/compare.h"
#include "server/ctl/row_file.h"
#include "tests/lib/kv_test.h"

static char folder[64];

static void make_folder(void)
{
	strcpy(folder, "/tmp/test_ctl_codec_XXXXXX");
	ck_assert_ptr_nonnull(mkdtemp(folder));
}

static void remove_folder(void)
{
	ck_assert_int_eq(rmdir(folder), 0); /* every test leaves it empty */
}

static const char *path_of(const char *name)
{
	static char paths[4][128];
	static uint32_t n;
	char *path = paths[n++ % 4];

	snprintf(path, sizeof(paths[0]), "%s/%s", folder, name);
	return path;
}

static void write_file(const char *path, const void *bytes, size_t n_bytes)
{
	FILE *file = fopen(path, "wb");

	ck_assert_ptr_nonnull(file);
	ck_assert_uint_eq(fwrite(bytes, 1, n_bytes, file), n_bytes);
	ck_assert_int_eq(fclose(file), 0);
}

/* Rows come in the asked portions, whole, in order, and then there are none. */
START_TEST(test_ctl_codec_reads_rows)
{
	uint8_t bytes[70], rows[30];
	struct srv_row_reader reader;
	uint32_t n = 0;

	for (uint32_t i = 0; i < sizeof(bytes); i++)
		bytes[i] = (uint8_t)i;
	write_file(path_of("rows"), bytes, sizeof(bytes));
	ck_assert_int_eq(srv_row_reader_open(&reader, path_of("rows"), 10, NULL), KV_OK);
	ck_assert(reader.is_sized);
	ck_assert_uint_eq(reader.n_rows, 7);
	for (uint32_t first = 0; first < 7; first += 3) {
		ck_assert_int_eq(srv_row_reader_next(&reader, rows, 3, &n, NULL), KV_OK);
		ck_assert_uint_eq(n, first < 6 ? 3 : 1);
		ck_assert_mem_eq(rows, bytes + 10 * first, 10 * n);
	}
	ck_assert_int_eq(srv_row_reader_next(&reader, rows, 3, &n, NULL), KV_OK);
	ck_assert_uint_eq(n, 0);
	srv_row_reader_close(&reader);
	unlink(path_of("rows"));
}
END_TEST

/* A file that is cut while it is read is noticed where it ends, not only when it is opened. */
START_TEST(test_ctl_codec_notices_a_shrinking_file)
{
	static uint8_t bytes[100000], rows[1000];
	struct srv_row_reader reader;
	struct kv_error err = { .msg = "" };
	enum kv_status status;
	uint32_t n = 0;

	write_file(path_of("rows"), bytes, sizeof(bytes));
	ck_assert_int_eq(srv_row_reader_open(&reader, path_of("rows"), 1000, NULL), KV_OK);
	ck_assert_int_eq(truncate(path_of("rows"), 50500), 0);
	do {
		status = srv_row_reader_next(&reader, rows, 1, &n, &err);
	} while (status == KV_OK && n > 0);
	ck_assert_int_eq(status, KV_CORRUPT);
	ck_assert_ptr_nonnull(strstr(err.msg, "row 50: 500 bytes at offset 50000"));
	srv_row_reader_close(&reader);
	unlink(path_of("rows"));
}
END_TEST

/* An output appears whole with its usual permissions, or not at all; what stood there stays until then. */
START_TEST(test_ctl_codec_output_is_whole_or_absent)
{
	struct srv_out_file out;
	struct stat info;
	char *text;
	size_t n_bytes = 0;

	write_file(path_of("out"), "old", 3);
	for (int i = 0; i < 2; i++) {
		const enum kv_status status = i == 0 ? KV_BAD_VALUE : KV_OK;

		ck_assert_int_eq(srv_out_file_open(&out, path_of("out"), NULL, 0, NULL), KV_OK);
		ck_assert_int_eq(srv_out_file_write(&out, "fresh", 5, NULL), KV_OK);
		ck_assert_int_eq(srv_out_file_close(&out, status, NULL), status);
		ck_assert_int_eq(srv_file_read(path_of("out"), 100, &text, &n_bytes, NULL), KV_OK);
		ck_assert_str_eq(text, i == 0 ? "old" : "fresh");
		kv_free(text);
	}

	const mode_t mask = umask(0);

	umask(mask);
	ck_assert_int_eq(stat(path_of("out"), &info), 0);
	ck_assert_uint_eq(info.st_mode & 0777, 0666 & ~mask);
	unlink(path_of("out"));

	struct srv_out_file zeroed = { 0 };

	ck_assert_int_eq(srv_out_file_close(&zeroed, KV_BAD_ARG, NULL), KV_BAD_ARG);
}
END_TEST

/* The same file is the same by any name; another one with the same bytes is not. */
START_TEST(test_ctl_codec_output_is_no_input)
{
	const char *inputs[2] = { NULL, NULL };
	struct srv_out_file out;
	char input[128];

	snprintf(input, sizeof(input), "%s", path_of("in"));
	inputs[1] = input;
	write_file(input, "rows", 4);
	write_file(path_of("other"), "rows", 4);
	ck_assert_int_eq(link(input, path_of("link")), 0);
	ck_assert_int_eq(srv_out_file_open(&out, path_of("link"), inputs, 2, NULL), KV_BAD_ARG);
	ck_assert_int_eq(srv_out_file_open(&out, input, inputs, 2, NULL), KV_BAD_ARG);
	ck_assert_int_eq(srv_out_file_open(&out, path_of("other"), inputs, 2, NULL), KV_OK);
	ck_assert_int_eq(srv_out_file_close(&out, KV_CANCELLED, NULL), KV_CANCELLED);
	unlink(input);
	unlink(path_of("link"));
	unlink(path_of("other"));
}
END_TEST

/* Small files are read up to the bound and not beyond. */
START_TEST(test_ctl_codec_small_files_have_a_bound)
{
	char *text = NULL;
	size_t n_bytes = 0;

	write_file(path_of("file"), "12345678", 8);
	ck_assert_int_eq(srv_file_read(path_of("file"), 8, &text, &n_bytes, NULL), KV_OK);
	ck_assert_uint_eq(n_bytes, 8);
	ck_assert_str_eq(text, "12345678");
	kv_free(text);
	ck_assert_int_eq(srv_file_read(path_of("file"), 7, &text, &n_bytes, NULL), KV_TOO_LARGE);
	ck_assert_int_eq(srv_file_read(path_of("none"), 7, &text, &n_bytes, NULL), KV_IO_ERROR);
	unlink(path_of("file"));
}
END_TEST

/* Two rows, one query, by hand: scores 2 and 0, coded 1 and 1. */
START_TEST(test_ctl_codec_compare_by_hand)
{
	struct srv_compare compare;
	struct srv_compare_result result;
	const double p = 1 / (1 + exp(-1.0)); /* scale 1/sqrt(4): logits 1 and 0 */

	ck_assert_int_eq(srv_compare_init(&compare, 4, 2, 1, NULL), KV_OK);
	compare.rows[0] = 2;
	compare.rows[4 + 1] = 1;
	compare.queries[0] = 1;
	compare.coded[0] = 1;
	compare.coded[4] = 1;
	srv_compare_prepare(&compare, true);
	ck_assert_double_eq_tol(compare.sigma, 0.5, 1e-12);
	ck_assert_double_eq_tol(compare.zero_weights, p - 0.5, 1e-12);
	srv_compare_measure(&compare, &result);
	ck_assert_double_eq_tol(result.error, (1 + 2) / 5.0, 1e-12);
	ck_assert_double_eq_tol(result.cosine, (1 + 0) / 2.0, 1e-12);
	ck_assert_double_eq_tol(result.slope, 2 * 1 / 4.0, 1e-12);
	/* Without the mean: rows (1, -.5) and (-1, .5), errors (-1, 0) and (1, -1) less (0, -.5). */
	ck_assert_double_eq_tol(result.part_error, (2 + 0.5) / 2.5, 1e-12);
	ck_assert_double_eq_tol(result.part_slope, 0, 1e-12);
	ck_assert_double_eq_tol(result.weights_error, p - 0.5, 1e-12);
	ck_assert(!result.passes);
	srv_compare_finish(&compare);
}
END_TEST

/* The codec of a command line, for one format. */
static void make(struct srv_codec *codec, const char *format, const char *scale, bool norm_correction)
{
	static const struct srv_arg args[] = { SRV_CODEC_ARGS };
	struct srv_ctl ctl = { 0 };
	struct kv_error err = { .msg = "" };

	for (uint32_t i = 0; i < KV_LENGTH(args); i++)
		ctl.values[i].number = args[i].number;
	ctl.values[SRV_CODEC_FORMAT].text = format;
	ctl.values[SRV_CODEC_HEAD_DIM] = (struct srv_arg_value){ .is_given = true, .number = 128 };
	ctl.values[SRV_CODEC_RECIPE_SCALE].text = scale;
	ctl.values[SRV_CODEC_NORM_CORRECTION].is_given = norm_correction;
	ck_assert_msg(srv_codec_init(codec, &ctl, NULL, false, &err) == KV_OK, "%s", err.msg);
}

/* Expected errors are those that FORMATS states: 3, 5.1, 5.2, 5.4. */
START_TEST(test_ctl_codec_theory)
{
	static const struct {
		const char *format, *scale;
		bool norm_correction;
		double expected, tolerance;
	} rows[] = {
		{ "tq1", NULL, false, 0.3608886, 1e-6 },
		{ "tq4", NULL, false, 0.009314788, 1e-8 },
		{ "tq8", NULL, false, 4.024116e-5, 1e-10 },
		{ "tq1", NULL, true, 1.11 * 0.3608886, 0.005 },
		{ "tqp3", NULL, false, 0.1160001 * (M_PI / 2 - 1), 1e-6 },
		{ "turboquant25", "exact", false, 0.168, 0.003 },
		{ "turboquant25", "published", false, 0.122, 0.003 },
		{ "v4", NULL, false, 0, 0 },
		{ "fp8", NULL, false, 0, 0 },
	};

	for (uint32_t i = 0; i < KV_LENGTH(rows); i++) {
		struct srv_codec codec;

		make(&codec, rows[i].format, rows[i].scale, rows[i].norm_correction);
		ck_assert_double_le(
			fabs(srv_codec_theory(codec.codec) - rows[i].expected), rows[i].tolerance);
		srv_codec_finish(&codec);
	}
}
END_TEST

/* Bad rows are told by what and where, in offsets of the file. */
START_TEST(test_ctl_codec_explains_bad_rows)
{
	static float row[128];
	static uint8_t packed[KV_ROW_BYTES_MAX];
	struct srv_codec codec;
	char text[SRV_ROW_FAULT_BYTES];

	make(&codec, "f16", NULL, false);
	row[3] = -70000;
	srv_codec_explain_row(codec.codec, row, 512, text);
	ck_assert_str_eq(text, "f16 cannot hold its values; the largest is -70000 in channel 3 (offset 524)");
	packed[2 * 5 + 1] = 0x7C; /* infinity */
	srv_codec_explain_packed(codec.codec, packed, 1000, text);
	ck_assert_str_eq(text, "channel 5 (offset 1010) is inf");
	srv_codec_finish(&codec);

	memset(packed, 0, sizeof(packed));
	make(&codec, "turboquant25", NULL, false);
	packed[43] = 0xBC; /* the last residual norm is -1 */
	srv_codec_explain_packed(codec.codec, packed, 44, text);
	ck_assert_str_eq(text, "low residual norm (offset 86) is -1");
	srv_codec_finish(&codec);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("ctl_codec");
	TCase *files = tcase_create("files"), *numbers = tcase_create("numbers");

	tcase_add_checked_fixture(files, make_folder, remove_folder);
	tcase_add_test(files, test_ctl_codec_reads_rows);
	tcase_add_test(files, test_ctl_codec_notices_a_shrinking_file);
	tcase_add_test(files, test_ctl_codec_output_is_whole_or_absent);
	tcase_add_test(files, test_ctl_codec_output_is_no_input);
	tcase_add_test(files, test_ctl_codec_small_files_have_a_bound);
	suite_add_tcase(suite, files);
	tcase_add_test(numbers, test_ctl_codec_compare_by_hand);
	tcase_add_test(numbers, test_ctl_codec_theory);
	tcase_add_test(numbers, test_ctl_codec_explains_bad_rows);
	suite_add_tcase(suite, numbers);
	return kv_test_run(suite, CK_NOFORK);
}
