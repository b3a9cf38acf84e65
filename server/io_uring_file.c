/*
 * Files on io_uring: the kernel's own threads wait for the disk, completions come with all others.
 */
#include <errno.h>
#include <fcntl.h>

#include "server/io_file.h"
#include "server/io_uring.h"

void srv_io_uring_file_post(struct kv_io *base, struct kv_io_file *file)
{
	struct uring_io *io = srv_io_uring_from_base(base);

	file->next = NULL;
	if (io->files_last)
		io->files_last->next = file;
	else
		io->files_first = file;
	io->files_last = file;
}

static void prepare(struct io_uring_sqe *sqe, const struct kv_io_file *file)
{
	switch (file->kind) {
	case KV_IO_FILE_OPEN:
		io_uring_prep_openat(
			sqe, AT_FDCWD, file->path, srv_io_file_open_flags(file), SRV_IO_FILE_MODE);
		return;
	case KV_IO_FILE_READ:
		io_uring_prep_read(sqe, file->fd, file->bytes, file->n_bytes, file->offset);
		return;
	case KV_IO_FILE_WRITE:
		io_uring_prep_write(sqe, file->fd, file->bytes, file->n_bytes, file->offset);
		return;
	case KV_IO_FILE_SYNC:
		io_uring_prep_fsync(sqe, file->fd, 0);
		return;
	case KV_IO_FILE_RENAME:
		io_uring_prep_renameat(sqe, AT_FDCWD, file->path, AT_FDCWD, file->path_to, 0);
		return;
	case KV_IO_FILE_UNLINK:
		io_uring_prep_unlinkat(sqe, AT_FDCWD, file->path, 0);
		return;
	}
}

bool srv_io_uring_submit_files(struct uring_io *io)
{
	for (uint32_t i = 0; i < KV_IO_FILES_MAX && io->files_first; i++) {
		struct kv_io_file *file = io->files_first;

		if (io->files[i])
			continue;
		if (!srv_io_uring_has_sqes(io, 1))
			return false;

		struct io_uring_sqe *sqe = io_uring_get_sqe(&io->ring);

		prepare(sqe, file);
		/* Never on the loop thread, also when the page cache or the directory is at hand: it may not
		 * be. */
		io_uring_sqe_set_flags(sqe, IOSQE_ASYNC);
		io_uring_sqe_set_data64(sqe, srv_io_uring_tagged(TAG_FILE, i));
		io->files[i] = file;
		io->n_in_flight++;
		io->files_first = file->next;
		if (!io->files_first)
			io->files_last = NULL;
	}
	return true;
}

void srv_io_uring_file_done(struct uring_io *io, uint32_t idx, int32_t res, struct srv_io_out *out)
{
	struct kv_io_file *file = io->files[idx];

	io->files[idx] = NULL;
	io->n_in_flight--;
	if (res == -EINTR || res == -EAGAIN) {
		srv_io_uring_file_post(&io->base, file);
		return;
	}
	file->result = res;
	if (file->kind == KV_IO_FILE_OPEN)
		srv_io_file_opened(file);
	srv_io_out_add(out, KV_IO_FILE, NULL)->file = file;
}
