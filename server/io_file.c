#include "server/io_file.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- one operation ---- */

int srv_io_file_open_flags(const struct kv_io_file *file)
{
	/* O_NONBLOCK: opening a FIFO must come back; it means nothing for regular files. */
	return file->open_flags | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
}

void srv_io_file_opened(struct kv_io_file *file)
{
	const bool wants_directory = (file->open_flags & O_DIRECTORY) != 0;
	struct stat found;

	if (file->result < 0)
		return;
	const int fd = (int)file->result;

	if (fstat(fd, &found) < 0)
		file->result = -errno;
	else if (!wants_directory && S_ISDIR(found.st_mode))
		file->result = -EISDIR;
	else if (!wants_directory && !S_ISREG(found.st_mode))
		file->result = -EINVAL;
	if (file->result < 0) {
		close(fd);
		return;
	}
	file->n_file_bytes = (uint64_t)found.st_size;
}

static int64_t call(const struct kv_io_file *file)
{
	switch (file->kind) {
	case KV_IO_FILE_OPEN:
		return open(file->path, srv_io_file_open_flags(file), SRV_IO_FILE_MODE);
	case KV_IO_FILE_READ:
		return pread(file->fd, file->bytes, file->n_bytes, (off_t)file->offset);
	case KV_IO_FILE_WRITE:
		return pwrite(file->fd, file->bytes, file->n_bytes, (off_t)file->offset);
	case KV_IO_FILE_SYNC:
		return fsync(file->fd);
	case KV_IO_FILE_RENAME:
		return rename(file->path, file->path_to);
	case KV_IO_FILE_UNLINK:
		return unlink(file->path);
	}
	errno = EINVAL;
	return -1;
}

void srv_io_file_run(struct kv_io_file *file)
{
	do {
		file->result = call(file);
		if (file->result < 0)
			file->result = -errno;
	} while (file->result == -EINTR);
	if (file->kind == KV_IO_FILE_OPEN)
		srv_io_file_opened(file);
}

/* ---- the thread ---- */

static struct kv_io_file *pop(struct kv_io_file **first, struct kv_io_file **last)
{
	struct kv_io_file *file = *first;

	if (!file)
		return NULL;
	*first = file->next;
	if (!*first)
		*last = NULL;
	file->next = NULL;
	return file;
}

static void push(struct kv_io_file **first, struct kv_io_file **last, struct kv_io_file *file)
{
	file->next = NULL;
	if (*last)
		(*last)->next = file;
	else
		*first = file;
	*last = file;
}

static void *run(void *arg)
{
	struct srv_io_file_thread *thread = arg;
	const uint64_t one = 1;

	pthread_mutex_lock(&thread->lock);
	for (;;) {
		struct kv_io_file *file = pop(&thread->first, &thread->last);

		if (!file && thread->is_ending)
			break;
		if (!file) {
			pthread_cond_wait(&thread->is_posted, &thread->lock);
			continue;
		}
		pthread_mutex_unlock(&thread->lock);
		srv_io_file_run(file);
		pthread_mutex_lock(&thread->lock);
		push(&thread->done_first, &thread->done_last, file);

		const ssize_t n = write(thread->event_fd, &one, sizeof(one));

		/* The counter cannot overflow with KV_IO_FILES_MAX operations. */
		KV_ASSERT(n == (ssize_t)sizeof(one));
	}
	pthread_mutex_unlock(&thread->lock);
	return NULL;
}

enum kv_status srv_io_file_thread_start(struct srv_io_file_thread *thread, struct kv_error *err)
{
	sigset_t all, old;

	*thread = (struct srv_io_file_thread){ .event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK) };
	if (thread->event_fd < 0)
		return kv_fail(err, KV_IO_ERROR, "thread for files: eventfd: %s", strerror(errno));
	pthread_mutex_init(&thread->lock, NULL);
	pthread_cond_init(&thread->is_posted, NULL);
	/* Signals are the main thread's. */
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	const int error = pthread_create(&thread->thread, NULL, run, thread);

	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (error == 0)
		return KV_OK;
	pthread_mutex_destroy(&thread->lock);
	pthread_cond_destroy(&thread->is_posted);
	close(thread->event_fd);
	thread->event_fd = -1;
	return kv_fail(err, KV_NO_MEMORY, "thread for files: %s", strerror(error));
}

void srv_io_file_thread_post(struct srv_io_file_thread *thread, struct kv_io_file *file)
{
	pthread_mutex_lock(&thread->lock);
	push(&thread->first, &thread->last, file);
	pthread_cond_signal(&thread->is_posted);
	pthread_mutex_unlock(&thread->lock);
}

struct kv_io_file *srv_io_file_thread_take(struct srv_io_file_thread *thread)
{
	pthread_mutex_lock(&thread->lock);
	struct kv_io_file *file = pop(&thread->done_first, &thread->done_last);

	pthread_mutex_unlock(&thread->lock);
	return file;
}

void srv_io_file_thread_stop(struct srv_io_file_thread *thread)
{
	if (thread->event_fd < 0)
		return;
	pthread_mutex_lock(&thread->lock);
	thread->is_ending = true;
	pthread_cond_signal(&thread->is_posted);
	pthread_mutex_unlock(&thread->lock);
	pthread_join(thread->thread, NULL);
	pthread_mutex_destroy(&thread->lock);
	pthread_cond_destroy(&thread->is_posted);
	close(thread->event_fd);
	thread->event_fd = -1;
}
