/*
 * Files of the system behind core/io.h: whole, bounded reads for configurations and captures. Any thread.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/checked.h"
#include "core/io.h"
#include "core/memory.h"

/* First guess for pipes and files in /proc, which have no size. */
#define GUESS_BYTES 65536u

/*
 * How long somebody who writes into a pipe may be silent. Without a bound a FIFO in place of a file would
 * hold whoever reads it again for a reload for ever, and with it the control API.
 */
#define SILENCE_MS 3000

struct reader {
	const char *path;
	int fd;
	uint64_t n_bytes_max;
	char *data; /* [capacity + 1] */
	uint64_t capacity, n_bytes;
};

static enum kv_status reader_grow(struct reader *reader, uint64_t capacity, struct kv_error *err)
{
	char *grown = kv_alloc(capacity + 1, 1);

	if (!grown)
		return kv_fail(err, KV_NO_MEMORY, "%s: no memory for %llu bytes", reader->path,
			(unsigned long long)capacity);
	if (reader->data)
		memcpy(grown, reader->data, reader->n_bytes);
	kv_free(reader->data);
	reader->data = grown;
	reader->capacity = capacity;
	return KV_OK;
}

static uint64_t least(uint64_t a, uint64_t b)
{
	return a < b ? a : b;
}

/* Until there is something to read, or the end is there. */
static enum kv_status reader_wait(struct reader *reader, struct kv_error *err)
{
	struct pollfd event = { .fd = reader->fd, .events = POLLIN };
	const int n = poll(&event, 1, SILENCE_MS);

	if (n < 0 && errno != EINTR)
		return kv_fail(err, KV_IO_ERROR, "%s: %s", reader->path, strerror(errno));
	if (n == 0)
		return kv_fail(err, KV_IO_ERROR, "%s: is a pipe into which nobody has written for %d s",
			reader->path, SILENCE_MS / 1000);
	return KV_OK;
}

/* Reads to the end; one byte more than n_bytes_max is tried, to tell "fits" from "too long". */
static enum kv_status reader_run(struct reader *reader, struct kv_error *err)
{
	enum kv_status status;
	struct stat found;

	if (fstat(reader->fd, &found) < 0)
		return kv_fail(err, KV_IO_ERROR, "%s: %s", reader->path, strerror(errno));
	if (S_ISDIR(found.st_mode))
		return kv_fail(err, KV_IO_ERROR, "%s: is a directory", reader->path);
	if (S_ISREG(found.st_mode) && found.st_size > 0 && (uint64_t)found.st_size > reader->n_bytes_max)
		return kv_fail(err, KV_TOO_LARGE, "%s: has %llu bytes, at most %llu are read", reader->path,
			(unsigned long long)found.st_size, (unsigned long long)reader->n_bytes_max);
	/* One byte more than the size: the end is then seen without growing. */
	status = reader_grow(reader, found.st_size > 0 ? (uint64_t)found.st_size + 1 : GUESS_BYTES, err);
	/* A FIFO that nobody has opened for writing yet looks as if it were at its end. */
	if (status == KV_OK && S_ISFIFO(found.st_mode))
		status = reader_wait(reader, err);
	while (status == KV_OK) {
		if (reader->n_bytes == reader->capacity) {
			status = reader_grow(
				reader, least(2 * reader->capacity, reader->n_bytes_max) + 1, err);
			continue;
		}

		const ssize_t n = read(reader->fd, reader->data + reader->n_bytes,
			(size_t)(reader->capacity - reader->n_bytes));

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && errno == EAGAIN) {
			status = reader_wait(reader, err);
			continue;
		}
		if (n < 0)
			return kv_fail(err, KV_IO_ERROR, "%s: %s", reader->path, strerror(errno));
		if (n == 0)
			break;
		reader->n_bytes += (uint64_t)n;
		if (reader->n_bytes > reader->n_bytes_max)
			return kv_fail(err, KV_TOO_LARGE, "%s: has more than %llu bytes", reader->path,
				(unsigned long long)reader->n_bytes_max);
	}
	return status;
}

static enum kv_status files_read_all(
	const char *path, uint64_t n_bytes_max, char **data, uint64_t *n_bytes, struct kv_error *err)
{
	struct reader reader = {
		.path = path, .fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK), .n_bytes_max = n_bytes_max
	};

	if (reader.fd < 0)
		return kv_fail(err, KV_IO_ERROR, "%s: %s", path, strerror(errno));

	const enum kv_status status = reader_run(&reader, err);

	close(reader.fd);
	if (status != KV_OK) {
		kv_free(reader.data);
		return status;
	}
	reader.data[reader.n_bytes] = '\0';
	*data = reader.data;
	*n_bytes = reader.n_bytes;
	return KV_OK;
}

const struct kv_files *kv_files_system(void)
{
	static const struct kv_files files = { .read_all = files_read_all };

	return &files;
}
