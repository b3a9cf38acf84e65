/*
 * Files of the two io implementations: what one operation is in system calls, and the thread that does them
 * where io_uring is not there.
 */
#ifndef SERVER_IO_FILE_H
#define SERVER_IO_FILE_H

#include <pthread.h>
#include <stdbool.h>

#include "core/io.h"

/* The mode of new files: they hold what clients sent. */
#define SRV_IO_FILE_MODE 0600

/* open_flags as they are given to the system: close-on-exec, no symbolic link, never blocking. */
int srv_io_file_open_flags(const struct kv_io_file *file);
/* After an OPEN that the system has done: size and kind; closes what is no file. */
void srv_io_file_opened(struct kv_io_file *file);
/* The whole operation, here and now. */
void srv_io_file_run(struct kv_io_file *file);

/*
 * Thread: takes operations in order, one at a time. Posting and taking are the loop thread's. event_fd
 * becomes readable when take() has something.
 */
struct srv_io_file_thread {
	pthread_t thread;
	pthread_mutex_t lock;
	pthread_cond_t is_posted;
	struct kv_io_file *first, *last, *done_first, *done_last;
	int event_fd; /* -1: not started */
	bool is_ending;
};

KV_MUST_CHECK enum kv_status srv_io_file_thread_start(
	struct srv_io_file_thread *thread, struct kv_error *err);
void srv_io_file_thread_post(struct srv_io_file_thread *thread, struct kv_io_file *file);
/* The oldest operation that is over, or NULL. */
struct kv_io_file *srv_io_file_thread_take(struct srv_io_file_thread *thread);
/* Finishes what is posted. Not started: nothing. */
void srv_io_file_thread_stop(struct srv_io_file_thread *thread);

#endif
