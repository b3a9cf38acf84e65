#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/io.h"
#include "core/memory.h"
#include "tests/lib/kv_test.h"

static char path[64];

static void write_file(const char *data, size_t n_bytes)
{
	snprintf(path, sizeof(path), "/tmp/tqkv-test-files-XXXXXX");

	const int fd = mkstemp(path);

	ck_assert_int_ge(fd, 0);
	ck_assert_int_eq(write(fd, data, n_bytes), (ssize_t)n_bytes);
	close(fd);
}

static enum kv_status read_file(
	const char *from, uint64_t n_bytes_max, char **data, uint64_t *n_bytes, struct kv_error *err)
{
	return kv_files_system()->read_all(from, n_bytes_max, data, n_bytes, err);
}

/* A file is read whole, zero bytes in it included, up to exactly the limit, with a zero byte behind it. */
START_TEST(test_io_files_whole)
{
	static char big[200000];
	char *data = NULL;
	uint64_t n_bytes = 0;

	for (size_t i = 0; i < sizeof(big); i++)
		big[i] = (char)(i * 31 % 251);
	write_file(big, sizeof(big));
	ck_assert_int_eq(read_file(path, sizeof(big), &data, &n_bytes, NULL), KV_OK);
	ck_assert_uint_eq(n_bytes, sizeof(big));
	ck_assert_mem_eq(data, big, sizeof(big));
	ck_assert_int_eq(data[n_bytes], 0);
	kv_free(data);
	unlink(path);
	write_file("", 0);
	ck_assert_int_eq(read_file(path, 0, &data, &n_bytes, NULL), KV_OK);
	ck_assert_uint_eq(n_bytes, 0);
	ck_assert_int_eq(data[0], 0);
	kv_free(data);
	unlink(path);
}
END_TEST

/* One byte above the limit, a missing file, a directory: refused by name, outputs untouched. */
START_TEST(test_io_files_refused)
{
	char *data = path;
	uint64_t n_bytes = 77;
	struct kv_error err;

	write_file("12345", 5);
	ck_assert_int_eq(read_file(path, 4, &data, &n_bytes, &err), KV_TOO_LARGE);
	ck_assert_ptr_nonnull(strstr(err.msg, path));
	ck_assert_ptr_nonnull(strstr(err.msg, "5 bytes"));
	unlink(path);
	ck_assert_int_eq(read_file(path, 4, &data, &n_bytes, &err), KV_IO_ERROR);
	ck_assert_ptr_nonnull(strstr(err.msg, path));
	ck_assert_int_eq(read_file("/tmp", 4, &data, &n_bytes, &err), KV_IO_ERROR);
	ck_assert_ptr_nonnull(strstr(err.msg, "is a directory"));
	ck_assert_ptr_eq(data, path);
	ck_assert_uint_eq(n_bytes, 77);
}
END_TEST

/* Pipes and files without a size are read to their end and are bounded too. */
START_TEST(test_io_files_without_a_size)
{
	static char zeros[150000];
	char *data = NULL;
	uint64_t n_bytes = 0;
	int ends[2];
	char name[32];

	ck_assert_int_eq(read_file("/proc/self/status", 65536, &data, &n_bytes, NULL), KV_OK);
	ck_assert_ptr_nonnull(strstr(data, "VmRSS"));
	kv_free(data);
	ck_assert_int_eq(read_file("/proc/self/status", 10, &data, &n_bytes, NULL), KV_TOO_LARGE);
	for (int n_rounds = 0; n_rounds < 2; n_rounds++) {
		ck_assert_int_eq(pipe(ends), 0);

		const pid_t child = fork();

		if (child == 0) {
			const ssize_t rc = write(ends[1], zeros, sizeof(zeros));

			_exit(rc < 0);
		}
		close(ends[1]);
		snprintf(name, sizeof(name), "/proc/self/fd/%d", ends[0]);
		if (n_rounds == 0) {
			ck_assert_int_eq(read_file(name, sizeof(zeros), &data, &n_bytes, NULL), KV_OK);
			ck_assert_uint_eq(n_bytes, sizeof(zeros));
			kv_free(data);
		} else {
			ck_assert_int_eq(
				read_file(name, sizeof(zeros) - 1, &data, &n_bytes, NULL), KV_TOO_LARGE);
		}
		close(ends[0]);
	}
}
END_TEST

/* A FIFO is waited for, whoever opens it first, but not for ever: a writer that comes late is read whole. */
START_TEST(test_io_files_fifo)
{
	struct kv_error err;
	char *data = NULL;
	uint64_t n_bytes = 0;

	write_file("", 0);
	unlink(path);
	ck_assert_int_eq(mkfifo(path, 0600), 0);

	const pid_t child = fork();

	if (child == 0) {
		const int fd = open(path, O_WRONLY); /* comes back once there is a reader */

		_exit(fd < 0 || write(fd, "late", 4) != 4);
	}
	ck_assert_int_eq(read_file(path, 100, &data, &n_bytes, &err), KV_OK);
	ck_assert_uint_eq(n_bytes, 4);
	ck_assert_str_eq(data, "late");
	kv_free(data);
	ck_assert_int_eq(read_file(path, 100, &data, &n_bytes, &err), KV_IO_ERROR);
	ck_assert_ptr_nonnull(strstr(err.msg, "nobody has written"));
	unlink(path);
}
END_TEST

/* Whichever allocation fails: NO_MEMORY, nothing leaked (the sanitizer run looks). */
START_TEST(test_io_files_out_of_memory)
{
	char *data = NULL;
	uint64_t n_bytes = 0;
	int64_t k = 0;

	for (;; k++) {
		kv_alloc_fail_after(k);

		const enum kv_status status = read_file("/proc/self/status", 1 << 20, &data, &n_bytes, NULL);

		kv_alloc_fail_after(-1);
		if (status == KV_OK)
			break;
		ck_assert_int_eq(status, KV_NO_MEMORY);
		ck_assert_ptr_null(data);
	}
	ck_assert_int_ge(k, 1);
	kv_free(data);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("io_files");
	TCase *tcase = tcase_create("all");

	tcase_add_test(tcase, test_io_files_whole);
	tcase_add_test(tcase, test_io_files_refused);
	tcase_add_test(tcase, test_io_files_without_a_size);
	tcase_add_test(tcase, test_io_files_fifo);
	tcase_add_test(tcase, test_io_files_out_of_memory);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
