#include "tests/sim/fake_files.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/crc32c.h"

#define FD_FIRST     1000
#define FD_DIRECTORY 999

void sim_files_init(struct sim_files *files, const struct sim_files_options *options, struct sim_clock *clock,
	uint64_t seed)
{
	memset(files, 0, sizeof(*files));
	files->options = *options;
	files->clock = clock;
	files->fail_countdown = -1;
	sim_rng_init(&files->rng, seed, 20);
}

void sim_files_finish(struct sim_files *files)
{
	for (uint32_t i = 0; i < SIM_FILES_MAX; i++)
		free(files->files[i].bytes);
	memset(files, 0, sizeof(*files));
}

struct sim_file *sim_files_find(struct sim_files *files, const char *path)
{
	for (uint32_t i = 0; i < SIM_FILES_MAX; i++) {
		struct sim_file *file = &files->files[i];

		if (file->is_used && !file->is_unlinked && strcmp(file->path, path) == 0)
			return file;
	}
	return NULL;
}

static void drop_unused(struct sim_file *file)
{
	if (!file->is_unlinked || file->n_open > 0)
		return;
	free(file->bytes);
	memset(file, 0, sizeof(*file));
}

static struct sim_file *make(struct sim_files *files, const char *path)
{
	for (uint32_t i = 0; i < SIM_FILES_MAX; i++) {
		struct sim_file *file = &files->files[i];

		if (file->is_used)
			continue;
		memset(file, 0, sizeof(*file));
		snprintf(file->path, sizeof(file->path), "%s", path);
		file->is_used = true;
		return file;
	}
	sim_fail("more than %u files", SIM_FILES_MAX);
}

static void grow(struct sim_file *file, uint64_t n_bytes)
{
	if (n_bytes > file->n_bytes_max) {
		file->n_bytes_max = 2 * n_bytes;
		file->bytes = realloc(file->bytes, file->n_bytes_max);
		SIM_CHECK(file->bytes, "no memory for a file");
	}
	if (n_bytes > file->n_bytes) {
		memset(file->bytes + file->n_bytes, 0, n_bytes - file->n_bytes);
		file->n_bytes = n_bytes;
	}
}

void sim_files_put(struct sim_files *files, const char *path, const uint8_t *bytes, uint64_t n_bytes)
{
	struct sim_file *file = sim_files_find(files, path);

	if (!file)
		file = make(files, path);
	file->n_bytes = 0;
	grow(file, n_bytes);
	file->n_bytes_synced = n_bytes;
	if (n_bytes > 0)
		memcpy(file->bytes, bytes, n_bytes);
}

void sim_files_crash(struct sim_files *files)
{
	for (uint32_t i = 0; i < SIM_FILES_MAX; i++) {
		struct sim_file *file = &files->files[i];

		if (file->is_used && file->n_bytes > file->n_bytes_synced)
			file->n_bytes = file->n_bytes_synced +
				sim_rng_next(&files->rng) % (file->n_bytes - file->n_bytes_synced + 1);
	}
}

/* ---- posting ---- */

static uint32_t crc_of(const struct kv_io_file *op)
{
	uint32_t crc = kvp_crc32c(0, &op->kind, sizeof(op->kind));

	crc = kvp_crc32c(crc, &op->offset, sizeof(op->offset));
	if (op->path)
		crc = kvp_crc32c(crc, op->path, strlen(op->path));
	if (op->kind == KV_IO_FILE_WRITE)
		crc = kvp_crc32c(crc, op->bytes, op->n_bytes);
	return crc;
}

void sim_files_post(struct sim_files *files, struct kv_io_file *op)
{
	SIM_CHECK(files->n_posted < KV_IO_FILES_MAX, "more than %u file operations", KV_IO_FILES_MAX);
	for (uint32_t i = 0; i < files->n_posted; i++)
		SIM_CHECK(files->posted[i].file != op, "a file operation is posted twice");
	files->posted[files->n_posted].file = op;
	files->posted[files->n_posted].crc = crc_of(op);
	files->posted[files->n_posted].due_ns =
		files->clock->now_ns + sim_below(&files->rng, (uint32_t)files->options.delay_ns_max + 1);
	files->n_posted++;
}

void sim_files_close(struct sim_files *files, int fd)
{
	SIM_CHECK(files->n_open > 0, "a file is closed that is not open");
	files->n_open--;
	if (fd == FD_DIRECTORY)
		return;
	SIM_CHECK(fd >= FD_FIRST && fd < FD_FIRST + (int)SIM_FILES_MAX, "close of descriptor %d", fd);
	struct sim_file *file = &files->files[fd - FD_FIRST];

	SIM_CHECK(file->is_used && file->n_open > 0, "a file is closed twice");
	file->n_open--;
	drop_unused(file);
}

/* ---- doing ---- */

static int64_t do_open(struct sim_files *files, struct kv_io_file *op)
{
	struct sim_file *file = sim_files_find(files, op->path);

	if (op->open_flags & O_DIRECTORY) {
		files->n_open++;
		return FD_DIRECTORY;
	}
	if (!file && !(op->open_flags & O_CREAT))
		return -ENOENT;
	if (file && (op->open_flags & O_EXCL))
		return -EEXIST;
	if (!file)
		file = make(files, op->path);
	if (op->open_flags & O_TRUNC)
		file->n_bytes = file->n_bytes_synced = 0;
	file->n_open++;
	files->n_open++;
	op->n_file_bytes = file->n_bytes;
	return FD_FIRST + (int)(file - files->files);
}

static uint64_t used_bytes(const struct sim_files *files)
{
	uint64_t sum = 0;

	for (uint32_t i = 0; i < SIM_FILES_MAX; i++)
		sum += files->files[i].n_bytes;
	return sum;
}

static int64_t do_bytes(struct sim_files *files, struct kv_io_file *op)
{
	SIM_CHECK(op->fd >= FD_FIRST && op->fd < FD_FIRST + (int)SIM_FILES_MAX, "descriptor %d", op->fd);
	struct sim_file *file = &files->files[op->fd - FD_FIRST];
	uint64_t n = op->n_bytes;

	SIM_CHECK(file->n_open > 0, "an operation on a closed file");
	SIM_CHECK(n > 0, "an operation of no bytes");
	if (n > 1 && sim_chance(&files->rng, files->options.short_per_mille))
		n = 1 + sim_rng_next(&files->rng) % (n - 1);
	if (op->kind == KV_IO_FILE_WRITE) {
		const uint64_t end = op->offset + n;
		const uint64_t n_more = end > file->n_bytes ? end - file->n_bytes : 0;

		if (files->options.disk_bytes_max > 0 &&
			used_bytes(files) + n_more > files->options.disk_bytes_max) {
			files->n_full++;
			return -ENOSPC;
		}
		grow(file, end);
		memcpy(file->bytes + op->offset, op->bytes, n);
		return (int64_t)n;
	}
	if (op->offset >= file->n_bytes)
		return 0;
	if (n > file->n_bytes - op->offset)
		n = file->n_bytes - op->offset;
	memcpy(op->bytes, file->bytes + op->offset, n);
	if (sim_chance(&files->rng, files->options.flip_per_mille))
		op->bytes[sim_rng_next(&files->rng) % n] ^= (uint8_t)(1u << sim_below(&files->rng, 8));
	return (int64_t)n;
}

static int64_t do_rename(struct sim_files *files, const struct kv_io_file *op)
{
	struct sim_file *file = sim_files_find(files, op->path), *old = sim_files_find(files, op->path_to);

	if (!file)
		return -ENOENT;
	if (old) {
		old->is_unlinked = true;
		drop_unused(old);
	}
	snprintf(file->path, sizeof(file->path), "%s", op->path_to);
	return 0;
}

static int64_t do_unlink(struct sim_files *files, const struct kv_io_file *op)
{
	struct sim_file *file = sim_files_find(files, op->path);

	if (!file)
		return -ENOENT;
	file->is_unlinked = true;
	drop_unused(file);
	return 0;
}

static bool must_fail(struct sim_files *files, const struct kv_io_file *op)
{
	/* Giving up what is half done works: nobody could do anything about it. */
	if (op->kind == KV_IO_FILE_UNLINK)
		return false;
	if (files->fail_countdown >= 0 && files->fail_countdown-- == 0) {
		files->has_failed = true;
		return true;
	}
	return sim_chance(&files->rng, files->options.fail_per_mille);
}

static void do_one(struct sim_files *files, struct kv_io_file *op)
{
	if (must_fail(files, op)) {
		op->result = files->has_failed && files->fail_errno ? -files->fail_errno : -EIO;
		return;
	}
	switch (op->kind) {
	case KV_IO_FILE_OPEN:
		op->result = do_open(files, op);
		return;
	case KV_IO_FILE_READ:
	case KV_IO_FILE_WRITE:
		op->result = do_bytes(files, op);
		return;
	case KV_IO_FILE_SYNC:
		if (op->fd != FD_DIRECTORY)
			files->files[op->fd - FD_FIRST].n_bytes_synced =
				files->files[op->fd - FD_FIRST].n_bytes;
		op->result = 0;
		return;
	case KV_IO_FILE_RENAME:
		op->result = do_rename(files, op);
		return;
	case KV_IO_FILE_UNLINK:
		op->result = do_unlink(files, op);
		return;
	}
}

uint32_t sim_files_collect(struct sim_files *files, struct kv_io_event events[], uint32_t n_max)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < files->n_posted && n < n_max;) {
		struct kv_io_file *op = files->posted[i].file;

		if (files->posted[i].due_ns > files->clock->now_ns) {
			i++;
			continue;
		}
		SIM_CHECK(crc_of(op) == files->posted[i].crc, "a posted file operation has changed");
		files->posted[i] = files->posted[--files->n_posted];
		do_one(files, op);
		memset(&events[n], 0, sizeof(events[n]));
		events[n].kind = KV_IO_FILE;
		events[n++].file = op;
	}
	return n;
}

uint64_t sim_files_next_ns(const struct sim_files *files)
{
	uint64_t due_ns = UINT64_MAX;

	for (uint32_t i = 0; i < files->n_posted; i++) {
		if (files->posted[i].due_ns < due_ns)
			due_ns = files->posted[i].due_ns;
	}
	return due_ns;
}
