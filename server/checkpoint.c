/*
 * The life of a checkpoint: from the request over its file to the answer.
 *
 * Saving: OPEN (a temporary file beside the real one), then FILL, SEALED and WRITE in turn until everything
 * is written, SYNC, RENAME, sync of the directory, RELEASE. Whatever fails on the way, the temporary file
 * goes and what bore the name before is untouched. Loading: OPEN, then READ, PARSE and SEALED in turn; when
 * the last record is there, the stage is committed.
 */
#include "server/checkpoint.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>

#include "core/memory.h"
#include "server/checkpoint_internal.h"

static struct srv_checkpoint *from_mover(struct srv_mover *mover)
{
	return kv_container_of(mover, struct srv_checkpoint, mover);
}

static void move_to(struct srv_checkpoint *checkpoint, enum srv_checkpoint_state state)
{
	kv_sm_move(&checkpoint->sm, state);
}

/* ---- file operations ---- */

void srv_checkpoint_post(
	struct srv_checkpoint *checkpoint, enum srv_checkpoint_state state, struct kv_io_file op)
{
	move_to(checkpoint, state);
	checkpoint->file.op = op;
	checkpoint->server->io->ops->file_post(checkpoint->server->io, &checkpoint->file.op);
}

static void close_file(struct srv_checkpoint *checkpoint)
{
	if (checkpoint->is_open)
		checkpoint->server->io->ops->file_close(checkpoint->server->io, checkpoint->fd);
	checkpoint->is_open = false;
}

static void post_write(struct srv_checkpoint *checkpoint)
{
	const uint64_t n_left = checkpoint->used_bytes - checkpoint->written_bytes;

	srv_checkpoint_post(checkpoint, CKPT_WRITE,
		(struct kv_io_file){ .kind = KV_IO_FILE_WRITE,
			.fd = checkpoint->fd,
			.bytes = checkpoint->chunk + checkpoint->written_bytes,
			.n_bytes = (uint32_t)n_left,
			.offset = checkpoint->offset });
}

/* What is left of the chunk moves to its front, and the rest is filled from the file. */
static void post_read(struct srv_checkpoint *checkpoint)
{
	checkpoint->used_bytes -= checkpoint->parse_at;
	memmove(checkpoint->chunk, checkpoint->chunk + checkpoint->parse_at, (size_t)checkpoint->used_bytes);
	checkpoint->parse_at = 0;
	srv_checkpoint_post(checkpoint, CKPT_READ,
		(struct kv_io_file){ .kind = KV_IO_FILE_READ,
			.fd = checkpoint->fd,
			.bytes = checkpoint->chunk + checkpoint->used_bytes,
			.n_bytes = (uint32_t)(checkpoint->chunk_bytes - checkpoint->used_bytes),
			.offset = checkpoint->offset });
}

/* ---- the end ---- */

static void report(struct srv_checkpoint *checkpoint)
{
	struct srv_checkpoint_view *view = &checkpoint->view;
	const uint64_t us =
		srv_us_since(kv_clock_now_ns(checkpoint->server->seams.clock), checkpoint->started_ns);

	view->is_running = false;
	view->status = checkpoint->status;
	view->elapsed_us = us;
	view->n_bytes = checkpoint->offset;
	if (checkpoint->status != KV_OK) {
		snprintf(view->detail, sizeof(view->detail), "%.299s", checkpoint->err.msg);
		if (view->is_absent && checkpoint->is_optional)
			return;
		srv_log(SRV_LOG_ERROR, "%s %s failed: %s: %s", view->is_restore ? "restoring" : "snapshot",
			checkpoint->name, kv_status_name(checkpoint->status), checkpoint->err.msg);
		return;
	}
	srv_log(SRV_LOG_INFO,
		"%s %s: sessions %u, sequences %u, published %u, blocks %llu, bytes %llu in %llu us, %llu "
		"MiB/s",
		view->is_restore ? "restored" : "snapshot", checkpoint->name, view->n_sessions,
		view->n_sequences, view->n_prefixes, (unsigned long long)view->n_blocks,
		(unsigned long long)view->n_bytes, (unsigned long long)us,
		(unsigned long long)(us > 0 ? view->n_bytes * 1000000 / us >> 20 : 0));
	if (view->n_skipped + view->n_sequences_skipped > 0)
		srv_log(SRV_LOG_WARNING,
			"snapshot %s leaves out: sequences that are spilled or lost, without room to bring "
			"them back, %u; sessions without a name or with tables of their client %u",
			checkpoint->name, view->n_sequences_skipped, view->n_skipped);
}

static void end(struct srv_checkpoint *checkpoint)
{
	struct srv_server *server = checkpoint->server;

	kv_capture_destroy(checkpoint->capture);
	checkpoint->capture = NULL;
	kv_stage_destroy(checkpoint->stage);
	checkpoint->stage = NULL;
	if (checkpoint->chunk)
		server->backend->ops->host_free(server->backend, checkpoint->chunk, checkpoint->chunk_bytes);
	checkpoint->chunk = NULL;
	checkpoint->mover.lane = NULL;
	move_to(checkpoint, CKPT_IDLE);
	report(checkpoint);
}

/* Everything is done or given up, except blocks that are still owned. */
static void release(struct srv_checkpoint *checkpoint)
{
	close_file(checkpoint);
	checkpoint->mover.lane = NULL;
	move_to(checkpoint, CKPT_RELEASE);
}

/* With checkpoint->err. What was there before stays. */
static void give_up(struct srv_checkpoint *checkpoint, enum kv_status status)
{
	checkpoint->status = status;
	checkpoint->mover.lane = NULL;
	close_file(checkpoint);
	if (checkpoint->is_file_made) {
		checkpoint->is_file_made = false;
		srv_checkpoint_post(checkpoint, CKPT_UNLINK,
			(struct kv_io_file){ .kind = KV_IO_FILE_UNLINK, .path = checkpoint->temp_path });
		return;
	}
	release(checkpoint);
}

static void give_up_file(
	struct srv_checkpoint *checkpoint, const char *what, const char *path, int64_t result)
{
	const enum kv_status status = result == -ENOENT && !checkpoint->is_save ? KV_NOT_FOUND : KV_IO_ERROR;

	checkpoint->view.is_absent = status == KV_NOT_FOUND;
	give_up(checkpoint,
		kv_fail(&checkpoint->err, status, "%s %s: %s", what, path, strerror((int)-result)));
}

static void commit(struct srv_checkpoint *checkpoint)
{
	uint32_t n_sessions = 0;
	const enum kv_status status =
		kv_stage_commit(checkpoint->stage, checkpoint->server->now_ns, &n_sessions, &checkpoint->err);

	if (status != KV_OK) {
		kv_error_wrap(&checkpoint->err, "snapshot %s", checkpoint->name);
		give_up(checkpoint, status);
		return;
	}
	close_file(checkpoint);
	release(checkpoint);
}

/* ---- going on ---- */

/* After srv_save_fill(), outside of a batch or without moves in it. */
static void go_on_saving(struct srv_checkpoint *checkpoint, enum srv_checkpoint_stop stop)
{
	checkpoint->is_complete = stop == CKPT_STOP_END;
	if (stop == CKPT_STOP_LANE)
		return; /* resumed when the lane seals its next batch */
	checkpoint->mover.lane = NULL;
	checkpoint->is_waiting = stop == CKPT_STOP_FETCH;
	if (checkpoint->is_waiting || stop == CKPT_STOP_TURN)
		return; /* resumed when the sequence is back; in the next turn */
	srv_save_finish_chunk(checkpoint);
	checkpoint->written_bytes = 0;
	post_write(checkpoint);
}

static void go_on_loading(struct srv_checkpoint *checkpoint, enum srv_checkpoint_stop stop)
{
	if (stop == CKPT_STOP_LANE)
		return; /* resumed when the lane seals its next batch */
	checkpoint->mover.lane = NULL;
	switch (stop) {
	case CKPT_STOP_FAILED:
		give_up(checkpoint, checkpoint->status);
		return;
	case CKPT_STOP_END:
		commit(checkpoint);
		return;
	case CKPT_STOP_CHUNK:
		post_read(checkpoint);
		return;
	case CKPT_STOP_MOVES: /* goes on in the next turn */
	case CKPT_STOP_LANE:
	case CKPT_STOP_FETCH:
	case CKPT_STOP_TURN:
		return;
	}
}

void srv_checkpoint_on_seal(struct srv_mover *mover, struct kv_plan *plan)
{
	struct srv_checkpoint *checkpoint = from_mover(mover);

	mover->lane = NULL;
	checkpoint->stop =
		checkpoint->is_save ? srv_save_fill(checkpoint, plan) : srv_load_parse(checkpoint, plan);
	if (plan->n_moves > 0) {
		mover->lane = NULL;
		move_to(checkpoint, CKPT_SEALED);
	} else if (checkpoint->is_save) {
		go_on_saving(checkpoint, checkpoint->stop);
	} else {
		go_on_loading(checkpoint, checkpoint->stop);
	}
}

void srv_checkpoint_on_moved(struct srv_mover *mover, enum kv_status status, const struct kv_result *result)
{
	struct srv_checkpoint *checkpoint = from_mover(mover);

	if (status == KV_BAD_VALUE)
		status = kv_fail(&checkpoint->err, KV_CORRUPT,
			"snapshot %s: block: row %u of layer %u holds what its format cannot hold",
			checkpoint->name, result->row, result->layer);
	else if (status != KV_OK)
		kv_fail(&checkpoint->err, status, "snapshot %s: %s", checkpoint->name,
			kv_status_row(status)->text);
	if (status != KV_OK) {
		give_up(checkpoint, status);
		return;
	}
	if (checkpoint->is_save) {
		move_to(checkpoint, CKPT_FILL);
		/* What it stopped for may be another lane: what is in the chunk goes first. */
		go_on_saving(checkpoint, checkpoint->stop == CKPT_STOP_END ? CKPT_STOP_END : CKPT_STOP_CHUNK);
		return;
	}
	move_to(checkpoint, CKPT_PARSE);
	if (checkpoint->stop == CKPT_STOP_FAILED || checkpoint->stop == CKPT_STOP_CHUNK)
		go_on_loading(checkpoint, checkpoint->stop);
}

static void opened(struct srv_checkpoint *checkpoint, const struct kv_io_file *op)
{
	if (op->result < 0) {
		give_up_file(checkpoint, "open", op->path, op->result);
		return;
	}
	checkpoint->fd = (int)op->result;
	checkpoint->is_open = true;
	checkpoint->is_file_made = checkpoint->is_save;
	checkpoint->file_bytes = op->n_file_bytes;
	if (checkpoint->is_save)
		move_to(checkpoint, CKPT_FILL);
	else
		post_read(checkpoint);
}

static void written(struct srv_checkpoint *checkpoint, const struct kv_io_file *op)
{
	if (op->result <= 0) {
		give_up_file(checkpoint, "write", checkpoint->temp_path, op->result < 0 ? op->result : -EIO);
		return;
	}
	checkpoint->written_bytes += (uint64_t)op->result;
	checkpoint->offset += (uint64_t)op->result;
	if (checkpoint->written_bytes < checkpoint->used_bytes) {
		post_write(checkpoint);
		return;
	}
	checkpoint->used_bytes = checkpoint->written_bytes = 0;
	if (checkpoint->is_complete)
		srv_checkpoint_post(checkpoint, CKPT_SYNC,
			(struct kv_io_file){ .kind = KV_IO_FILE_SYNC, .fd = checkpoint->fd });
	else
		move_to(checkpoint, CKPT_FILL);
}

static void read_some(struct srv_checkpoint *checkpoint, const struct kv_io_file *op)
{
	if (op->result < 0) {
		give_up_file(checkpoint, "read", checkpoint->path, op->result);
		return;
	}
	if (op->result == 0) {
		give_up(checkpoint,
			kv_fail(&checkpoint->err, KV_CORRUPT,
				"snapshot %s: the file ends after %llu bytes, inside or before record %llu, "
				"without its trailer",
				checkpoint->name, (unsigned long long)checkpoint->offset,
				(unsigned long long)checkpoint->end.n_records));
		return;
	}
	checkpoint->used_bytes += (uint64_t)op->result;
	checkpoint->offset += (uint64_t)op->result;
	move_to(checkpoint, CKPT_PARSE);
}

static void renamed(struct srv_checkpoint *checkpoint)
{
	checkpoint->is_file_made = false;
	srv_checkpoint_post(checkpoint, CKPT_DIR_OPEN,
		(struct kv_io_file){ .kind = KV_IO_FILE_OPEN,
			.path = checkpoint->dir,
			.open_flags = O_RDONLY | O_DIRECTORY });
}

void srv_checkpoint_on_file(struct srv_file *file)
{
	struct srv_checkpoint *checkpoint = kv_container_of(file, struct srv_checkpoint, file);
	const struct kv_io_file *op = &file->op;

	switch ((enum srv_checkpoint_state)checkpoint->sm.state) {
	case CKPT_OPEN:
		opened(checkpoint, op);
		return;
	case CKPT_WRITE:
		written(checkpoint, op);
		return;
	case CKPT_READ:
		read_some(checkpoint, op);
		return;
	case CKPT_SYNC:
		if (op->result < 0) {
			give_up_file(checkpoint, "sync", checkpoint->temp_path, op->result);
			return;
		}
		close_file(checkpoint);
		srv_checkpoint_post(checkpoint, CKPT_RENAME,
			(struct kv_io_file){ .kind = KV_IO_FILE_RENAME,
				.path = checkpoint->temp_path,
				.path_to = checkpoint->path });
		return;
	case CKPT_RENAME:
		if (op->result < 0)
			give_up_file(checkpoint, "rename to", checkpoint->path, op->result);
		else
			renamed(checkpoint);
		return;
	case CKPT_DIR_OPEN:
		if (op->result < 0) {
			give_up_file(checkpoint, "open", checkpoint->dir, op->result);
			return;
		}
		checkpoint->fd = (int)op->result;
		checkpoint->is_open = true;
		srv_checkpoint_post(checkpoint, CKPT_DIR_SYNC,
			(struct kv_io_file){ .kind = KV_IO_FILE_SYNC, .fd = checkpoint->fd });
		return;
	case CKPT_DIR_SYNC:
		/* Some file systems cannot sync a directory; the file itself is safe. */
		if (op->result < 0 && op->result != -EINVAL)
			give_up_file(checkpoint, "sync", checkpoint->dir, op->result);
		else
			release(checkpoint);
		return;
	case CKPT_UNLINK:
		release(checkpoint);
		return;
	case CKPT_IDLE:
	case CKPT_FILL:
	case CKPT_SEALED:
	case CKPT_PARSE:
	case CKPT_RELEASE:
		break;
	}
}

void srv_checkpoint_turn(struct srv_checkpoint *checkpoint)
{
	switch ((enum srv_checkpoint_state)checkpoint->sm.state) {
	case CKPT_FILL:
		if (checkpoint->is_waiting && !srv_save_is_ready(checkpoint))
			return;
		checkpoint->is_waiting = false;
		if (!checkpoint->mover.lane)
			go_on_saving(checkpoint, srv_save_fill(checkpoint, NULL));
		return;
	case CKPT_PARSE:
		if (!checkpoint->mover.lane)
			go_on_loading(checkpoint, srv_load_parse(checkpoint, NULL));
		return;
	case CKPT_RELEASE:
		if ((!checkpoint->capture || kv_capture_release(checkpoint->capture, SRV_CAPTURE_RELEASE)) &&
			(!checkpoint->stage ||
				kv_stage_settle(
					checkpoint->stage, checkpoint->server->now_ns, SRV_CAPTURE_RELEASE)))
			end(checkpoint);
		return;
	default:
		return; /* resumed by an event or a batch */
	}
}

bool srv_checkpoint_has_work(const struct srv_checkpoint *checkpoint)
{
	const uint32_t state = checkpoint->sm.state;

	return ((state == CKPT_FILL || state == CKPT_PARSE) && !checkpoint->mover.lane &&
		       !checkpoint->is_waiting) ||
		state == CKPT_RELEASE;
}

void srv_checkpoint_lose(struct srv_checkpoint *checkpoint)
{
	const uint32_t state = checkpoint->sm.state;

	if (state != CKPT_FILL && state != CKPT_PARSE)
		return;
	kv_fail(&checkpoint->err, KV_DEVICE_LOST, "snapshot %s: the device is lost", checkpoint->name);
	give_up(checkpoint, KV_DEVICE_LOST);
}
