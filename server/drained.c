/*
 * What a start does about snapshots, and about the one of the last drain above all: it may be the only place
 * where its sessions are. It is restored before anybody can connect, and removed only once the daemon serves.
 * One that was not restored gets a name of its own, because the next drain replaces what is called "drain".
 */
#include "server/internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "server/checkpoint.h"

#define TRIES_MAX 100u /* names within one second */

/* In turns: nothing else waits for files here. -EIO where the loop broke. */
static int64_t do_file(struct srv_server *server, struct kv_io_file op)
{
	struct srv_drained *drained = &server->drained;

	drained->is_posted = true;
	drained->file.op = op;
	server->io->ops->file_post(server->io, &drained->file.op);
	while (drained->is_posted && !server->is_lost)
		srv_server_turn(server, srv_server_wait_ns(server));
	return drained->is_posted ? -EIO : drained->file.op.result;
}

static void file_done(struct srv_file *file)
{
	kv_container_of(file, struct srv_drained, file)->is_posted = false;
}

/* 0: it is there; or -errno. */
static int64_t look(struct srv_server *server, const char *path)
{
	const int64_t fd = do_file(
		server, (struct kv_io_file){ .kind = KV_IO_FILE_OPEN, .path = path, .open_flags = O_RDONLY });

	if (fd < 0)
		return fd;
	server->io->ops->file_close(server->io, (int)fd);
	return 0;
}

/* Best effort: some file systems cannot sync a directory. */
static void sync_directory(struct srv_server *server)
{
	const int64_t fd = do_file(server,
		(struct kv_io_file){ .kind = KV_IO_FILE_OPEN,
			.path = server->options->snapshot_dir,
			.open_flags = O_RDONLY | O_DIRECTORY });

	if (fd < 0)
		return;
	(void)do_file(server, (struct kv_io_file){ .kind = KV_IO_FILE_SYNC, .fd = (int)fd });
	server->io->ops->file_close(server->io, (int)fd);
}

static void path_of(struct srv_server *server, const char *name, char path[512])
{
	snprintf(path, 512, "%.300s/%.64s.tqkv", server->options->snapshot_dir, name);
}

/* A name that nothing in the directory has. */
static enum kv_status choose_name(struct srv_server *server, char name[65], struct kv_error *err)
{
	struct srv_drained *drained = &server->drained;
	const time_t now = time(NULL);
	char stamp[32];
	struct tm utc;
	int64_t result = 0;

	if (!gmtime_r(&now, &utc) || strftime(stamp, sizeof(stamp), "%Y%m%dT%H%M%SZ", &utc) == 0)
		snprintf(stamp, sizeof(stamp), "%lld", (long long)now);
	for (uint32_t i = 0; i < TRIES_MAX && result == 0; i++) {
		snprintf(name, 65, i == 0 ? "drain-unrestored-%.31s" : "drain-unrestored-%.31s-%u", stamp, i);
		path_of(server, name, drained->path_to);
		result = look(server, drained->path_to);
	}
	return result == -ENOENT ? KV_OK
				 : kv_fail(err, KV_IO_ERROR, "no free name for it: %s: %s", drained->path_to,
					   strerror(result == 0 ? EEXIST : (int)-result));
}

static enum kv_status set_aside(struct srv_server *server, const char *why, struct kv_error *err)
{
	struct srv_drained *drained = &server->drained;
	char name[65];
	enum kv_status status = choose_name(server, name, err);

	if (status == KV_OK) {
		const int64_t result = do_file(server,
			(struct kv_io_file){ .kind = KV_IO_FILE_RENAME,
				.path = drained->path,
				.path_to = drained->path_to });

		if (result < 0)
			status = kv_fail(err, KV_IO_ERROR, "rename %s to %s: %s", drained->path,
				drained->path_to, strerror((int)-result));
	}
	if (status != KV_OK) {
		kv_error_wrap(err,
			"the snapshot of the last drain was not restored and has to get another name before "
			"the next drain writes its own");
		return status;
	}
	sync_directory(server);
	srv_log(SRV_LOG_ERROR,
		"the snapshot of the last drain was not restored (%s); it is kept as %s: put right what was "
		"wrong, then run 'tqkvctl restore %s'",
		why, name, name);
	return KV_OK;
}

enum kv_status srv_server_restore(struct srv_server *server, struct kv_error *err)
{
	const struct srv_options *options = server->options;
	const bool is_asked = strcmp(options->restore, "off") != 0;
	struct srv_drained *drained = &server->drained;
	struct srv_checkpoint_view view;
	enum kv_status status;

	drained->file.done = file_done;
	if (!is_asked && !options->snapshot_on_drain)
		return KV_OK;
	status = srv_checkpoint_load(
		server->checkpoint, is_asked ? options->restore : SRV_CHECKPOINT_DRAIN_NAME, !is_asked, err);
	if (status != KV_OK)
		return status;
	while (srv_checkpoint_is_running(server->checkpoint) && !server->is_lost)
		srv_server_turn(server, srv_server_wait_ns(server));
	srv_checkpoint_status(server->checkpoint, &view);
	if (server->is_lost)
		return kv_fail(err, KV_DEVICE_LOST, "the device was lost while a snapshot was restored");
	if (view.status == KV_OK || !is_asked)
		return KV_OK;
	return kv_fail(err, view.status, "%s", view.detail);
}

enum kv_status srv_server_settle_drained(struct srv_server *server, struct kv_error *err)
{
	const struct srv_options *options = server->options;
	struct srv_drained *drained = &server->drained;
	struct srv_checkpoint_view view;
	int64_t result;

	if (!options->snapshot_on_drain)
		return KV_OK;
	path_of(server, SRV_CHECKPOINT_DRAIN_NAME, drained->path);
	if (strcmp(options->restore, SRV_CHECKPOINT_DRAIN_NAME) == 0)
		return KV_OK; /* restored, or there would be no start; the next drain replaces it */
	if (strcmp(options->restore, "off") != 0) {
		if (look(server, drained->path) == -ENOENT)
			return KV_OK;
		return set_aside(server, "another snapshot was asked for", err);
	}
	srv_checkpoint_status(server->checkpoint, &view);
	if (view.is_absent) {
		srv_log(SRV_LOG_INFO, "no snapshot of an earlier drain to restore");
		return KV_OK;
	}
	result = view.status != KV_OK ? look(server, drained->path) : 0;
	if (result == -ENOENT || result == -ENOTDIR)
		return KV_OK; /* there is nothing to lose */
	if (view.status != KV_OK)
		return set_aside(server, kv_status_name(view.status), err);
	result = do_file(server, (struct kv_io_file){ .kind = KV_IO_FILE_UNLINK, .path = drained->path });
	if (result < 0)
		srv_log(SRV_LOG_WARNING, "%s is restored, and stays: unlink: %s", drained->path,
			strerror((int)-result));
	else
		sync_directory(server);
	return KV_OK;
}
