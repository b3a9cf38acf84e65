#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>

#include "tests/lib/io_rig.h"
#include "tests/lib/kv_test.h"

enum { IMPLEMENTATIONS = 2 };

static int count_descriptors(void)
{
	DIR *dir = opendir("/proc/self/fd");
	int n = 0;

	ck_assert_ptr_nonnull(dir);
	while (readdir(dir))
		n++;
	closedir(dir);
	return n;
}

/* Posts one operation and waits for its event. */
static int64_t run(struct kv_io *io, struct kv_io_file *file)
{
	struct kv_io_event events[8];

	io->ops->file_post(io, file);
	for (int i = 0; i < 1000; i++) {
		const int n = io->ops->wait(io, 100000000, events, 8);

		ck_assert_int_ge(n, 0);
		for (int e = 0; e < n; e++) {
			if (events[e].kind == KV_IO_FILE) {
				ck_assert_ptr_eq(events[e].file, file);
				return file->result;
			}
		}
	}
	ck_abort_msg("a file operation does not end");
	return -1;
}

static int open_file(struct kv_io *io, const char *path, int flags, uint64_t *n_bytes)
{
	struct kv_io_file file = { .kind = KV_IO_FILE_OPEN, .path = path, .open_flags = flags };
	const int64_t result = run(io, &file);

	if (n_bytes)
		*n_bytes = file.n_file_bytes;
	return (int)result;
}

static int64_t move(
	struct kv_io *io, enum kv_io_file_kind kind, int fd, uint8_t *bytes, uint32_t n, uint64_t offset)
{
	struct kv_io_file file = { .kind = kind, .fd = fd, .bytes = bytes, .n_bytes = n, .offset = offset };

	return run(io, &file);
}

/* What is written, synced and renamed is read again from there, at any offset, and ends where it ends. */
START_TEST(test_io_file_ops_round_trip)
{
	static uint8_t out[100000], in[100000];
	struct rig rig;
	char from[128], to[128];
	uint64_t n_bytes = 0;

	if (!rig_init(&rig, _i, 4, 4))
		return;
	for (size_t i = 0; i < sizeof(out); i++)
		out[i] = (uint8_t)(i * 37 % 253);
	snprintf(from, sizeof(from), "%s/a", rig.dir);
	snprintf(to, sizeof(to), "%s/b", rig.dir);
	int fd = open_file(rig.io, from, O_CREAT | O_TRUNC | O_WRONLY, NULL);

	ck_assert_int_ge(fd, 0);
	ck_assert_int_eq(move(rig.io, KV_IO_FILE_WRITE, fd, out, sizeof(out), 0), sizeof(out));
	ck_assert_int_eq(run(rig.io, &(struct kv_io_file){ .kind = KV_IO_FILE_SYNC, .fd = fd }), 0);
	rig.io->ops->file_close(rig.io, fd);
	ck_assert_int_eq(
		run(rig.io, &(struct kv_io_file){ .kind = KV_IO_FILE_RENAME, .path = from, .path_to = to }),
		0);
	fd = open_file(rig.io, to, O_RDONLY, &n_bytes);
	ck_assert_int_ge(fd, 0);
	ck_assert_uint_eq(n_bytes, sizeof(out));
	ck_assert_int_eq(move(rig.io, KV_IO_FILE_READ, fd, in, 1000, 500), 1000);
	ck_assert_mem_eq(in, out + 500, 1000);
	ck_assert_int_eq(move(rig.io, KV_IO_FILE_READ, fd, in, 10, sizeof(out)), 0);
	rig.io->ops->file_close(rig.io, fd);
	fd = open_file(rig.io, rig.dir, O_RDONLY | O_DIRECTORY, NULL);
	ck_assert_int_ge(fd, 0);
	ck_assert_int_eq(run(rig.io, &(struct kv_io_file){ .kind = KV_IO_FILE_SYNC, .fd = fd }), 0);
	rig.io->ops->file_close(rig.io, fd);
	ck_assert_int_eq(run(rig.io, &(struct kv_io_file){ .kind = KV_IO_FILE_UNLINK, .path = to }), 0);
	ck_assert_int_eq(open_file(rig.io, to, O_RDONLY, NULL), -ENOENT);
	rig_finish(&rig);
}
END_TEST

/* A directory, a FIFO that nobody writes to, a symbolic link: refused at once, and no descriptor is left. */
START_TEST(test_io_file_ops_refuses_what_is_no_file)
{
	struct rig rig;
	char path[128];

	if (!rig_init(&rig, _i, 4, 4))
		return;
	(void)open_file(rig.io, "/nowhere/at/all", O_RDONLY, NULL); /* whatever is made once is there now */
	const int n_before = count_descriptors();

	ck_assert_int_eq(open_file(rig.io, rig.dir, O_RDONLY, NULL), -EISDIR);
	snprintf(path, sizeof(path), "%s/fifo", rig.dir);
	ck_assert_int_eq(mkfifo(path, 0600), 0);
	ck_assert_int_eq(open_file(rig.io, path, O_RDONLY, NULL), -EINVAL);
	unlink(path);
	snprintf(path, sizeof(path), "%s/link", rig.dir);
	ck_assert_int_eq(symlink("/etc/hostname", path), 0);
	ck_assert_int_eq(open_file(rig.io, path, O_RDONLY, NULL), -ELOOP);
	unlink(path);
	ck_assert_int_eq(count_descriptors(), n_before);
	rig_finish(&rig);
}
END_TEST

/* Many at a time: each is answered exactly once, and destroying the io ends what is still posted. */
START_TEST(test_io_file_ops_many)
{
	static uint8_t bytes[KV_IO_FILES_MAX][4096];
	struct kv_io_file files[KV_IO_FILES_MAX];
	struct kv_io_event events[4]; /* fewer than there are */
	struct rig rig;
	char path[128];
	uint32_t n_done = 0;

	if (!rig_init(&rig, _i, 4, 4))
		return;
	snprintf(path, sizeof(path), "%s/many", rig.dir);
	const int fd = open_file(rig.io, path, O_CREAT | O_TRUNC | O_RDWR, NULL);

	ck_assert_int_ge(fd, 0);
	for (uint32_t i = 0; i < KV_IO_FILES_MAX; i++) {
		memset(bytes[i], (int)i, sizeof(bytes[i]));
		files[i] = (struct kv_io_file){ .kind = KV_IO_FILE_WRITE,
			.fd = fd,
			.bytes = bytes[i],
			.n_bytes = sizeof(bytes[i]),
			.offset = i * sizeof(bytes[i]),
			.result = -1000 };
		rig.io->ops->file_post(rig.io, &files[i]);
	}
	for (int turn = 0; turn < 1000 && n_done < KV_IO_FILES_MAX; turn++) {
		const int n = rig.io->ops->wait(rig.io, 100000000, events, 4);

		ck_assert_int_le(n, 4);
		for (int e = 0; e < n; e++) {
			ck_assert_int_eq(events[e].kind, KV_IO_FILE);
			ck_assert_int_eq(events[e].file->result, 4096);
			events[e].file->result = -2000;
			n_done++;
		}
	}
	ck_assert_uint_eq(n_done, KV_IO_FILES_MAX);
	rig.io->ops->file_post(rig.io, &files[3]);
	unlink(path);
	rig_finish(&rig);
	close(fd);
}
END_TEST

int main(void)
{
	TCase *tcase = tcase_create("io_file_ops");
	Suite *suite = suite_create("io_file_ops");

	tcase_add_loop_test(tcase, test_io_file_ops_round_trip, 0, IMPLEMENTATIONS);
	tcase_add_loop_test(tcase, test_io_file_ops_refuses_what_is_no_file, 0, IMPLEMENTATIONS);
	tcase_add_loop_test(tcase, test_io_file_ops_many, 0, IMPLEMENTATIONS);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
