#include "tests/mutation/memory_io.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/checked.h"
#include "core/error.h"

/* ---- bytes ---- */

void mem_bytes_add(struct mem_bytes *bytes, const void *data, uint64_t n_bytes)
{
	if (n_bytes == 0)
		return;
	if (bytes->n_bytes + n_bytes > bytes->n_bytes_max) {
		bytes->n_bytes_max = 2 * (bytes->n_bytes + n_bytes);
		bytes->data = realloc(bytes->data, (size_t)bytes->n_bytes_max);
		KV_ASSERT(bytes->data != NULL);
	}
	memcpy(bytes->data + bytes->n_bytes, data, (size_t)n_bytes);
	bytes->n_bytes += n_bytes;
}

void mem_bytes_drop(struct mem_bytes *bytes, uint64_t n_bytes)
{
	KV_ASSERT(n_bytes <= bytes->n_bytes);
	bytes->n_bytes -= n_bytes;
	if (bytes->n_bytes > 0)
		memmove(bytes->data, bytes->data + n_bytes, (size_t)bytes->n_bytes);
}

static void bytes_finish(struct mem_bytes *bytes)
{
	free(bytes->data);
	memset(bytes, 0, sizeof(*bytes));
}

/* ---- clock and random numbers ---- */

static uint64_t clock_now_ns(struct kv_clock *clock)
{
	return kv_container_of(clock, struct mem_clock, base)->now_ns;
}

static const struct kv_clock_ops clock_ops = { clock_now_ns };

void mem_clock_init(struct mem_clock *clock)
{
	clock->base.ops = &clock_ops;
	clock->now_ns = 1000 * KV_NS_PER_MS;
}

static uint64_t random_next(struct kv_random *random)
{
	struct mem_random *mem = kv_container_of(random, struct mem_random, base);

	mem->state = mem->state * 6364136223846793005u + 1442695040888963407u;
	return mem->state ^ mem->state >> 29;
}

static const struct kv_random_ops random_ops = { random_next };

void mem_random_init(struct mem_random *random)
{
	random->base.ops = &random_ops;
	random->state = 7870;
}

/* ---- the table: what the server posts ---- */

static struct mem_io *mem_of(struct kv_io *io)
{
	return kv_container_of(io, struct mem_io, base);
}

static enum kv_status io_listen(struct kv_io *io, const struct kv_io_address *address, char *bound,
	uint32_t bound_bytes_max, struct kv_error *err)
{
	(void)address;
	(void)err;
	snprintf(bound, bound_bytes_max, "memory");
	mem_of(io)->is_listening = true;
	return KV_OK;
}

static void io_stop_listening(struct kv_io *io)
{
	mem_of(io)->is_listening = false;
}

static void io_set_user(struct kv_io *io, struct kv_io_conn *conn, void *user)
{
	(void)io;
	KV_ASSERT(conn->phase == MEM_OPEN);
	conn->user = user;
}

static void io_recv_ahead(struct kv_io *io, struct kv_io_conn *conn)
{
	(void)io;
	KV_ASSERT(conn->phase == MEM_OPEN);
	KV_ASSERT(conn->recv == MEM_RECV_NONE);
	conn->recv = MEM_RECV_AHEAD;
}

static void io_recv_into(struct kv_io *io, struct kv_io_conn *conn, void *buf, uint32_t n_bytes)
{
	(void)io;
	KV_ASSERT(conn->phase == MEM_OPEN);
	KV_ASSERT(conn->recv == MEM_RECV_NONE);
	KV_ASSERT(n_bytes > 0);
	conn->recv = MEM_RECV_INTO;
	conn->recv_buf = buf;
	conn->recv_bytes = n_bytes;
}

static void io_ahead_return(struct kv_io *io, uint32_t ahead_idx)
{
	struct mem_io *mem = mem_of(io);

	KV_ASSERT(ahead_idx < mem->n_ahead_max);
	KV_ASSERT(mem->ahead[ahead_idx] != NULL);
	free(mem->ahead[ahead_idx]);
	mem->ahead[ahead_idx] = NULL;
	mem->n_ahead_out--;
}

static void io_send(struct kv_io *io, struct kv_io_conn *conn, const struct iovec iov[], uint32_t n_iov)
{
	(void)io;
	KV_ASSERT(conn->phase == MEM_OPEN);
	KV_ASSERT(!conn->is_sending);
	KV_ASSERT(n_iov >= 1 && n_iov <= KV_IO_IOV_MAX);
	memcpy(conn->iov, iov, n_iov * sizeof(iov[0]));
	conn->n_iov = n_iov;
	conn->is_sending = true;
}

static uint64_t io_unsent_bytes(struct kv_io *io, const struct kv_io_conn *conn)
{
	uint64_t n_bytes = 0;

	(void)io;
	for (uint32_t i = 0; i < conn->n_iov; i++)
		n_bytes += conn->iov[i].iov_len;
	return n_bytes;
}

static void io_close(struct kv_io *io, struct kv_io_conn *conn)
{
	(void)io;
	KV_ASSERT(conn->phase == MEM_OPEN);
	conn->phase = MEM_CLOSING;
}

/* The mailbox's and the backend's: the server looks into both every turn. */
static enum kv_status io_watch(struct kv_io *io, int fd, void *user, struct kv_error *err)
{
	(void)io;
	(void)fd;
	(void)user;
	(void)err;
	return KV_OK;
}

/* ---- what happens ---- */

static struct kv_io_event *add_event(
	struct kv_io_event *event, enum kv_io_kind kind, struct kv_io_conn *conn, int64_t result)
{
	memset(event, 0, sizeof(*event));
	event->kind = kind;
	event->conn = conn;
	event->user = conn->user;
	event->result = result;
	event->ahead_idx = UINT32_MAX;
	return event;
}

/* A read-ahead buffer for the event; false: all are out. */
static bool take_ahead(struct mem_io *mem, struct kv_io_event *event)
{
	for (uint32_t i = 0; i < mem->n_ahead_max; i++) {
		if (mem->ahead[i])
			continue;
		mem->ahead[i] = malloc(KV_IO_AHEAD_BYTES);
		KV_ASSERT(mem->ahead[i] != NULL);
		mem->n_ahead_out++;
		event->ahead = mem->ahead[i];
		event->ahead_idx = i;
		return true;
	}
	return false;
}

static bool receive(struct mem_io *mem, struct kv_io_conn *conn, struct kv_io_event *event)
{
	uint64_t n = conn->recv == MEM_RECV_AHEAD ? KV_IO_AHEAD_BYTES : conn->recv_bytes;

	if (conn->recv == MEM_RECV_NONE)
		return false;
	if (conn->is_reset) {
		add_event(event, KV_IO_RECEIVED, conn, -ECONNRESET);
	} else if (conn->in.n_bytes > 0) {
		n = n < conn->in.n_bytes ? n : conn->in.n_bytes;
		if (conn->chunk_bytes > 0 && n > conn->chunk_bytes)
			n = conn->chunk_bytes;
		add_event(event, KV_IO_RECEIVED, conn, (int64_t)n);
		if (conn->recv == MEM_RECV_AHEAD && !take_ahead(mem, event))
			return false;
		memcpy(event->ahead ? event->ahead : conn->recv_buf, conn->in.data, (size_t)n);
		mem_bytes_drop(&conn->in, n);
	} else if (conn->is_ended) {
		add_event(event, KV_IO_RECEIVED, conn, 0);
	} else {
		return false;
	}
	conn->recv = MEM_RECV_NONE;
	return true;
}

static bool send_out(struct kv_io_conn *conn, struct kv_io_event *event)
{
	if (!conn->is_sending || !(conn->is_reading || conn->is_reset))
		return false;
	for (uint32_t i = 0; i < conn->n_iov && !conn->is_reset; i++)
		mem_bytes_add(&conn->out, conn->iov[i].iov_base, conn->iov[i].iov_len);
	conn->is_sending = false;
	add_event(event, KV_IO_SENT, conn, conn->is_reset ? -EPIPE : 0);
	return true;
}

static uint32_t close_one(struct mem_io *mem, struct kv_io_conn *conn, struct kv_io_event *events)
{
	uint32_t n = 0;

	if (conn->is_late && conn->recv != MEM_RECV_NONE) {
		if (!receive(mem, conn, events))
			add_event(events, KV_IO_RECEIVED, conn, -ECANCELED);
		conn->recv = MEM_RECV_NONE;
		n = 1;
	}
	if (conn->is_late && conn->is_sending) {
		add_event(events + n++, KV_IO_SENT, conn, -ECANCELED);
		conn->is_sending = false;
	}
	if (n > 0)
		return n;
	add_event(events, KV_IO_CLOSED, conn, 0);
	conn->recv = MEM_RECV_NONE;
	conn->is_sending = false;
	conn->phase = MEM_FREE;
	conn->user = NULL;
	return 1;
}

/* At most two events. */
static uint32_t step_one(struct mem_io *mem, struct kv_io_conn *conn, struct kv_io_event *events)
{
	uint32_t n = 0;

	switch (conn->phase) {
	case MEM_FREE:
		return 0;
	case MEM_WAITS:
		if (!mem->is_listening)
			return 0;
		add_event(events, KV_IO_ACCEPTED, conn, 0)->peer = conn->peer;
		conn->phase = MEM_OPEN;
		return 1;
	case MEM_OPEN:
		n += send_out(conn, events);
		n += receive(mem, conn, events + n);
		return n;
	case MEM_CLOSING:
		return close_one(mem, conn, events);
	}
	return 0;
}

/* ---- files ---- */

#define DIRECTORY_FD 1000

struct mem_file *mem_file_find(struct mem_io *io, const char *path)
{
	for (uint32_t i = 0; i < MEM_FILES; i++) {
		if (io->files[i].path[0] && strcmp(io->files[i].path, path) == 0)
			return &io->files[i];
	}
	return NULL;
}

static struct mem_file *make_file(struct mem_io *io, const char *path)
{
	for (uint32_t i = 0; i < MEM_FILES; i++) {
		struct mem_file *file = &io->files[i];

		if (file->path[0])
			continue;
		snprintf(file->path, sizeof(file->path), "%s", path);
		return file;
	}
	KV_ASSERT(false);
	return NULL;
}

struct mem_file *mem_file_put(struct mem_io *io, const char *path, const void *bytes, uint64_t n_bytes)
{
	struct mem_file *file = mem_file_find(io, path);

	if (!file)
		file = make_file(io, path);
	file->bytes.n_bytes = 0;
	mem_bytes_add(&file->bytes, bytes, n_bytes);
	return file;
}

static void remove_file(struct mem_file *file)
{
	bytes_finish(&file->bytes);
	file->path[0] = '\0';
}

static int64_t open_file(struct mem_io *mem, struct kv_io_file *op)
{
	struct mem_file *file = mem_file_find(mem, op->path);

	if (!(op->open_flags & O_DIRECTORY) && !file && !(op->open_flags & O_CREAT))
		return -ENOENT;
	mem->n_files_open++;
	if (op->open_flags & O_DIRECTORY)
		return DIRECTORY_FD;
	if (!file)
		file = make_file(mem, op->path);
	if (op->open_flags & O_TRUNC)
		file->bytes.n_bytes = 0;
	op->n_file_bytes = file->bytes.n_bytes;
	return file - mem->files;
}

static int64_t move_bytes(struct mem_io *mem, const struct kv_io_file *op)
{
	struct mem_bytes *bytes = &mem->files[op->fd].bytes;
	uint64_t n = op->n_bytes;

	if (op->kind == KV_IO_FILE_WRITE) {
		KV_ASSERT(op->offset <= bytes->n_bytes);
		bytes->n_bytes = op->offset; /* nothing is written twice but from its end on */
		mem_bytes_add(bytes, op->bytes, n);
		return (int64_t)n;
	}
	if (op->offset >= bytes->n_bytes)
		return 0;
	if (n > bytes->n_bytes - op->offset)
		n = bytes->n_bytes - op->offset;
	memcpy(op->bytes, bytes->data + op->offset, (size_t)n);
	return (int64_t)n;
}

static int64_t do_file(struct mem_io *mem, struct kv_io_file *op)
{
	struct mem_file *file = op->path ? mem_file_find(mem, op->path) : NULL;

	switch (op->kind) {
	case KV_IO_FILE_OPEN:
		return open_file(mem, op);
	case KV_IO_FILE_READ:
	case KV_IO_FILE_WRITE:
		return move_bytes(mem, op);
	case KV_IO_FILE_RENAME:
		if (!file)
			return -ENOENT;
		if (mem_file_find(mem, op->path_to))
			remove_file(mem_file_find(mem, op->path_to));
		snprintf(file->path, sizeof(file->path), "%s", op->path_to);
		return 0;
	case KV_IO_FILE_UNLINK:
		if (!file)
			return -ENOENT;
		remove_file(file);
		return 0;
	case KV_IO_FILE_SYNC:
		break;
	}
	return 0;
}

static void io_file_post(struct kv_io *io, struct kv_io_file *file)
{
	struct mem_io *mem = mem_of(io);

	KV_ASSERT(mem->n_posted < KV_IO_FILES_MAX);
	mem->posted[mem->n_posted++] = file;
}

static void io_file_close(struct kv_io *io, int fd)
{
	struct mem_io *mem = mem_of(io);

	KV_ASSERT(mem->n_files_open > 0 && (fd == DIRECTORY_FD || fd < (int)MEM_FILES));
	mem->n_files_open--;
}

static uint32_t step_files(struct mem_io *mem, struct kv_io_event *events, uint32_t n_max)
{
	uint32_t n = 0;

	for (; n < mem->n_posted && n < n_max; n++) {
		mem->posted[n]->result = do_file(mem, mem->posted[n]);
		memset(&events[n], 0, sizeof(events[n]));
		events[n].kind = KV_IO_FILE;
		events[n].file = mem->posted[n];
	}
	mem->n_posted -= n;
	memmove(mem->posted, mem->posted + n, mem->n_posted * sizeof(mem->posted[0]));
	return n;
}

static int io_wait(struct kv_io *io, int64_t timeout_ns, struct kv_io_event events[], uint32_t n_events_max)
{
	struct mem_io *mem = mem_of(io);
	uint32_t n = step_files(mem, events, n_events_max);

	(void)timeout_ns; /* time does not pass here */
	for (uint32_t i = 0; i < MEM_CONNS && n + 2 <= n_events_max; i++)
		n += step_one(mem, &mem->conns[i], events + n);
	return (int)n;
}

static void io_destroy(struct kv_io *io)
{
	(void)io; /* mem_io_finish() */
}

static const struct kv_io_ops io_ops = {
	.name = "memory",
	.listen = io_listen,
	.stop_listening = io_stop_listening,
	.set_user = io_set_user,
	.recv_ahead = io_recv_ahead,
	.recv_into = io_recv_into,
	.ahead_return = io_ahead_return,
	.send = io_send,
	.unsent_bytes = io_unsent_bytes,
	.close = io_close,
	.watch = io_watch,
	.file_post = io_file_post,
	.file_close = io_file_close,
	.file_path = "memory",
	.wait = io_wait,
	.destroy = io_destroy,
};

void mem_io_init(struct mem_io *io, struct mem_clock *clock, uint32_t n_ahead_max)
{
	memset(io, 0, sizeof(*io));
	io->base.ops = &io_ops;
	io->clock = clock;
	io->n_ahead_max = n_ahead_max;
	io->ahead = calloc(n_ahead_max, sizeof(*io->ahead));
	KV_ASSERT(io->ahead != NULL);
}

void mem_io_finish(struct mem_io *io)
{
	for (uint32_t i = 0; i < io->n_ahead_max; i++)
		free(io->ahead[i]);
	free(io->ahead);
	for (uint32_t i = 0; i < MEM_CONNS; i++) {
		bytes_finish(&io->conns[i].in);
		bytes_finish(&io->conns[i].out);
	}
	for (uint32_t i = 0; i < MEM_FILES; i++)
		remove_file(&io->files[i]);
}

bool mem_connect(struct mem_io *io, uint32_t conn_idx, uint32_t uid)
{
	struct kv_io_conn *conn = &io->conns[conn_idx];

	if (conn->phase != MEM_FREE)
		return false;
	bytes_finish(&conn->in);
	bytes_finish(&conn->out);
	memset(conn, 0, sizeof(*conn));
	conn->phase = MEM_WAITS;
	conn->is_reading = true;
	conn->peer.uid = uid;
	conn->peer.transport = uid == UINT32_MAX ? KV_IO_TCP : KV_IO_UNIX;
	snprintf(conn->peer.address, sizeof(conn->peer.address),
		uid == UINT32_MAX ? "127.0.0.1:4%03u" : "unix:uid 1 pid %u", conn_idx);
	return true;
}

bool mem_io_is_quiet(const struct mem_io *io)
{
	if (io->n_posted > 0)
		return false;
	for (uint32_t i = 0; i < MEM_CONNS; i++) {
		const struct kv_io_conn *conn = &io->conns[i];

		if (conn->phase == MEM_WAITS || conn->phase == MEM_CLOSING)
			return false;
		if (conn->phase == MEM_OPEN &&
			((conn->is_sending && conn->is_reading) ||
				(conn->recv != MEM_RECV_NONE &&
					(conn->in.n_bytes > 0 || conn->is_ended || conn->is_reset))))
			return false;
	}
	return true;
}
