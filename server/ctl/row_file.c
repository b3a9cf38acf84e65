#include "server/ctl/row_file.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/memory.h"
#include "server/ctl/safetensors.h"

static enum kv_status fail_io(const char *path, int error, struct kv_error *err)
{
	return kv_fail(err, KV_IO_ERROR, "%s: %s", path, strerror(error));
}

static enum kv_status fail_partial_row(
	const struct srv_row_reader *reader, uint64_t n_rows, uint64_t n_rest_bytes, struct kv_error *err)
{
	return kv_fail(err, KV_CORRUPT,
		"%s: the file ends within row %llu: %llu bytes at offset %llu, a row has %u", reader->path,
		(unsigned long long)n_rows, (unsigned long long)n_rest_bytes,
		(unsigned long long)(n_rows * reader->row_bytes), reader->row_bytes);
}

/* True only for regular files: nothing that is read here could be put back into a pipe. */
static bool begins_as_safetensors(FILE *file, uint64_t file_bytes)
{
	uint8_t head[9];
	uint64_t header_bytes = 0;
	const bool is_read = fread(head, 1, sizeof(head), file) == sizeof(head);

	rewind(file);
	if (!is_read)
		return false;
	for (uint32_t i = 8; i-- > 0;)
		header_bytes = header_bytes << 8 | head[i];
	return head[8] == '{' && header_bytes >= 2 && header_bytes <= SRV_SAFETENSORS_HEADER_BYTES_MAX &&
		header_bytes <= file_bytes - 8;
}

bool srv_row_file_is_safetensors(const char *path)
{
	struct stat info;
	FILE *file = stat(path, &info) == 0 && S_ISREG(info.st_mode) ? fopen(path, "rb") : NULL;
	const bool is = file && begins_as_safetensors(file, (uint64_t)info.st_size);

	if (file)
		fclose(file);
	return is;
}

enum kv_status srv_row_reader_open(
	struct srv_row_reader *reader, const char *path, uint32_t row_bytes, struct kv_error *err)
{
	struct stat info;

	*reader = (struct srv_row_reader){ .path = path, .row_bytes = row_bytes };
	reader->file = fopen(path, "rb");
	if (!reader->file)
		return fail_io(path, errno, err);
	if (fstat(fileno(reader->file), &info) == 0 && S_ISREG(info.st_mode)) {
		const uint64_t n_bytes = (uint64_t)info.st_size;

		if (begins_as_safetensors(reader->file, n_bytes)) {
			srv_row_reader_close(reader);
			return kv_fail(err, KV_CORRUPT,
				"%s: this is a safetensors file, not bare rows; 'tqkvctl codec compare', "
				"'calibrate' and 'replay' take captures",
				path);
		}
		reader->is_sized = true;
		reader->n_rows = n_bytes / row_bytes;
		if (n_bytes % row_bytes != 0) {
			const enum kv_status status =
				fail_partial_row(reader, reader->n_rows, n_bytes % row_bytes, err);

			srv_row_reader_close(reader);
			return status;
		}
	}
	return KV_OK;
}

enum kv_status srv_row_reader_next(struct srv_row_reader *reader, uint8_t *rows, uint32_t n_rows_max,
	uint32_t *n_rows, struct kv_error *err)
{
	const size_t n_wanted = (size_t)n_rows_max * reader->row_bytes;

	errno = 0;

	const size_t n_bytes = fread(rows, 1, n_wanted, reader->file);

	/* A folder can be opened and not be read. */
	if (n_bytes < n_wanted && ferror(reader->file))
		return fail_io(reader->path, errno != 0 ? errno : EIO, err);
	if (n_bytes % reader->row_bytes != 0)
		return fail_partial_row(reader, reader->n_read + n_bytes / reader->row_bytes,
			n_bytes % reader->row_bytes, err);
	*n_rows = (uint32_t)(n_bytes / reader->row_bytes);
	reader->n_read += *n_rows;
	return KV_OK;
}

void srv_row_reader_close(struct srv_row_reader *reader)
{
	if (reader->file)
		fclose(reader->file);
	*reader = (struct srv_row_reader){ 0 };
}

static enum kv_status check_inputs(const char *path, const struct stat *info, const char *const inputs[],
	uint32_t n_inputs, struct kv_error *err)
{
	for (uint32_t i = 0; i < n_inputs; i++) {
		struct stat input;

		if (inputs[i] && stat(inputs[i], &input) == 0 && input.st_dev == info->st_dev &&
			input.st_ino == info->st_ino)
			return kv_fail(err, KV_BAD_ARG, "%s: the output is the input %s; nothing was written",
				path, inputs[i]);
	}
	return KV_OK;
}

static void forget(struct srv_out_file *out)
{
	free(out->target); /* realpath() or strdup() */
	kv_free(out->part);
	*out = (struct srv_out_file){ 0 };
}

static enum kv_status open_part(struct srv_out_file *out, struct kv_error *err)
{
	const size_t n_bytes = out->target ? strlen(out->target) + 32 : 0;
	int fd;

	out->part = out->target ? kv_alloc(n_bytes, 1) : NULL;
	if (!out->part)
		return kv_fail(err, KV_NO_MEMORY, "%s: no memory for a path", out->path);
	snprintf(out->part, n_bytes, "%s.part-%ld", out->target, (long)getpid());
	fd = open(out->part, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
	if (fd >= 0)
		out->file = fdopen(fd, "wb");
	if (!out->file) {
		const int error = errno;

		if (fd >= 0) {
			close(fd);
			unlink(out->part);
		}
		return fail_io(out->path, error, err);
	}
	return KV_OK;
}

enum kv_status srv_out_file_open(struct srv_out_file *out, const char *path, const char *const inputs[],
	uint32_t n_inputs, struct kv_error *err)
{
	const struct stat none = { 0 };
	struct stat info = none;
	const bool exists = stat(path, &info) == 0;
	enum kv_status status = KV_OK;

	*out = (struct srv_out_file){ .path = path };
	if (exists)
		status = check_inputs(path, &info, inputs, n_inputs, err);
	if (status != KV_OK)
		return status;
	if (exists && S_ISDIR(info.st_mode))
		return fail_io(path, EISDIR, err);
	if (exists && !S_ISREG(info.st_mode)) {
		out->file = fopen(path, "wb");
		return out->file ? KV_OK : fail_io(path, errno, err);
	}
	/* The file behind a link is replaced, not the link. */
	out->target = exists ? realpath(path, NULL) : strdup(path);
	status = open_part(out, err);
	if (status != KV_OK)
		forget(out);
	return status;
}

enum kv_status srv_out_file_write(
	struct srv_out_file *out, const void *bytes, size_t n_bytes, struct kv_error *err)
{
	errno = 0;
	if (fwrite(bytes, 1, n_bytes, out->file) != n_bytes)
		return fail_io(out->path, errno != 0 ? errno : EIO, err);
	return KV_OK;
}

enum kv_status srv_out_file_close(struct srv_out_file *out, enum kv_status status, struct kv_error *err)
{
	if (!out->file) {
		forget(out);
		return status;
	}
	errno = 0;
	/* The last bytes leave here; a full disk may show only now. */
	if (fclose(out->file) != 0 && status == KV_OK)
		status = fail_io(out->path, errno != 0 ? errno : EIO, err);
	if (out->part && status == KV_OK && rename(out->part, out->target) != 0)
		status = fail_io(out->path, errno, err);
	if (out->part && status != KV_OK)
		unlink(out->part);
	forget(out);
	return status;
}

enum kv_status srv_file_read(
	const char *path, size_t n_bytes_max, char **text, size_t *n_bytes, struct kv_error *err)
{
	FILE *file = fopen(path, "rb");
	struct stat info;
	enum kv_status status = KV_OK;

	if (!file)
		return fail_io(path, errno, err);

	/* One byte more than allowed shows that there are too many. */
	size_t n_room = n_bytes_max + 1;

	if (fstat(fileno(file), &info) == 0 && S_ISREG(info.st_mode) && (uint64_t)info.st_size < n_room)
		n_room = (size_t)info.st_size + 1;

	char *bytes = kv_alloc(n_room + 1, 1);

	errno = 0;

	const size_t n_got = bytes ? fread(bytes, 1, n_room, file) : 0;

	if (!bytes)
		status = kv_fail(err, KV_NO_MEMORY, "%s: no memory for %zu bytes", path, n_room);
	else if (ferror(file))
		status = fail_io(path, errno != 0 ? errno : EIO, err);
	else if (n_got > n_bytes_max || (n_got == n_room && n_room <= n_bytes_max))
		status = kv_fail(err, KV_TOO_LARGE, "%s: the file has more than %zu bytes", path,
			n_got > n_bytes_max ? n_bytes_max : n_room - 1);
	fclose(file);
	if (status != KV_OK) {
		kv_free(bytes);
		return status;
	}
	bytes[n_got] = '\0';
	*text = bytes;
	*n_bytes = n_got;
	return KV_OK;
}
