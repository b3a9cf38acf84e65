/*
 * Checkpoints are asked for, and what is known of them.
 */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>

#include "core/memory.h"
#include "core/prefix.h"
#include "server/checkpoint_internal.h"

/* ---- beginning ---- */

bool srv_checkpoint_is_name(const char *name)
{
	const size_t n = strlen(name);

	if (n == 0 || n > 64 || name[0] == '.')
		return false;
	return strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") == n;
}

static void at_least(uint64_t *most, uint64_t payload_bytes)
{
	const uint64_t n_bytes = srv_record_bytes(payload_bytes);

	*most = n_bytes > *most ? n_bytes : *most;
}

/* The chunk holds any single record. */
static uint64_t chunk_bytes(const struct srv_checkpoint *checkpoint)
{
	const struct srv_server *server = checkpoint->server;
	uint64_t most = checkpoint->chunk_bytes_min;

	at_least(&most, SRV_RECORD_SESSION_BYTES + KV_SESSION_NAME_BYTES_MAX);
	at_least(&most, 4 * SRV_TABLE_ENTRIES_MAX);
	for (uint32_t i = 0; i < kv_domain_n_pools(server->domain); i++) {
		const struct kv_pool_spec *spec = kv_domain_pool_at(server->domain, i)->spec;

		at_least(&most, SRV_RECORD_POOL_BYTES + KV_POOL_NAME_BYTES_MAX + spec->canonical_json_bytes);
		at_least(&most,
			srv_record_prefix_bytes(
				spec->block_size, KV_PREFIX_TEXT_BYTES_MAX, KV_PREFIX_TEXT_BYTES_MAX));
		if (srv_save_sequence_bytes(spec) > most)
			most = srv_save_sequence_bytes(spec);
		for (uint32_t g = 0; g < spec->n_groups; g++)
			at_least(&most,
				srv_record_padded(spec->n_layers) + kv_plan_block_bytes(spec, g, NULL));
	}
	return kv_round_up_u64(most, 4096);
}

static enum kv_status prepare(
	struct srv_checkpoint *checkpoint, const char *name, bool is_save, struct kv_error *err)
{
	struct srv_server *server = checkpoint->server;
	const char *dir = server->options->snapshot_dir;

	if (strcmp(dir, "off") == 0)
		return kv_fail(err, KV_BAD_STATE,
			"there is no snapshot_dir to keep snapshots in; start the daemon with "
			"--snapshot-dir");
	if (!srv_checkpoint_is_name(name))
		return kv_fail(err, KV_BAD_ARG,
			"snapshot name '%.70s': expected 1 to 64 of A-Z a-z 0-9 . _ -, not a dot first",
			name);
	if (checkpoint->sm.state != CKPT_IDLE)
		return kv_fail(err, KV_BUSY_RETRY, "%s %s is running",
			checkpoint->is_save ? "snapshot" : "restoring", checkpoint->name);
	const uint64_t n_bytes = chunk_bytes(checkpoint);
	uint8_t *chunk = server->backend->ops->host_alloc(server->backend, n_bytes);

	if (!chunk)
		return kv_fail(err, KV_NO_MEMORY, "snapshot: %llu bytes", (unsigned long long)n_bytes);
	checkpoint->chunk = chunk;
	checkpoint->chunk_bytes = n_bytes;
	checkpoint->used_bytes = checkpoint->written_bytes = checkpoint->offset = checkpoint->parse_at = 0;
	checkpoint->n_records = 0;
	checkpoint->is_save = is_save;
	checkpoint->is_complete = checkpoint->is_file_made = checkpoint->is_open = false;
	checkpoint->is_waiting = false;
	checkpoint->status = KV_OK;
	checkpoint->err.msg[0] = '\0';
	checkpoint->started_ns = server->now_ns;
	snprintf(checkpoint->name, sizeof(checkpoint->name), "%s", name);
	snprintf(checkpoint->dir, sizeof(checkpoint->dir), "%s", dir);
	snprintf(checkpoint->path, sizeof(checkpoint->path), "%.300s/%s.tqkv", dir, name);
	snprintf(checkpoint->temp_path, sizeof(checkpoint->temp_path), "%.300s/.%s.tmp", dir, name);
	return KV_OK;
}

static void begin(struct srv_checkpoint *checkpoint, const char *path, int open_flags)
{
	const uint64_t n_begun = checkpoint->view.n_begun;

	checkpoint->view = (struct srv_checkpoint_view){
		.n_begun = n_begun + 1,
		.is_running = true,
		.is_restore = !checkpoint->is_save,
	};
	memcpy(checkpoint->view.name, checkpoint->name, sizeof(checkpoint->view.name));
	srv_checkpoint_post(checkpoint, CKPT_OPEN,
		(struct kv_io_file){ .kind = KV_IO_FILE_OPEN, .path = path, .open_flags = open_flags });
}

static void return_chunk(struct srv_checkpoint *checkpoint)
{
	struct srv_server *server = checkpoint->server;

	server->backend->ops->host_free(server->backend, checkpoint->chunk, checkpoint->chunk_bytes);
	checkpoint->chunk = NULL;
}

enum kv_status srv_checkpoint_save(
	struct srv_checkpoint *checkpoint, const char *name, uint64_t session, struct kv_error *err)
{
	struct kv_session *found = NULL;
	enum kv_status status =
		session != 0 ? kv_session_find(checkpoint->server->domain, session, &found) : KV_OK;

	if (status != KV_OK)
		return kv_fail(err, status, "session %016llx: %s", (unsigned long long)session,
			kv_status_row(status)->text);
	if (found && found->name[0] == '\0')
		return kv_fail(err, KV_BAD_ARG,
			"session %016llx has no name: nobody could attach to it again",
			(unsigned long long)session);
	if (found && found->has_tables)
		return kv_fail(err, KV_UNSUPPORTED,
			"session %016llx has block tables of its client: they are not saved",
			(unsigned long long)session);
	status = prepare(checkpoint, name, true, err);
	if (status != KV_OK)
		return status;
	checkpoint->session_only = session;
	status = srv_save_begin(checkpoint, err);
	if (status != KV_OK) {
		return_chunk(checkpoint);
		return status;
	}
	begin(checkpoint, checkpoint->temp_path, O_WRONLY | O_CREAT | O_TRUNC);
	return KV_OK;
}

enum kv_status srv_checkpoint_load(
	struct srv_checkpoint *checkpoint, const char *name, bool is_optional, struct kv_error *err)
{
	enum kv_status status;

	if (checkpoint->server->is_draining)
		return kv_fail(err, KV_DRAINING, "the daemon is draining");
	status = prepare(checkpoint, name, false, err);
	if (status != KV_OK)
		return status;
	checkpoint->is_optional = is_optional;
	status = srv_load_begin(checkpoint, err);
	if (status != KV_OK) {
		return_chunk(checkpoint);
		return status;
	}
	begin(checkpoint, checkpoint->path, O_RDONLY);
	return KV_OK;
}

bool srv_checkpoint_is_running(const struct srv_checkpoint *checkpoint)
{
	return checkpoint->sm.state != CKPT_IDLE;
}

void srv_checkpoint_status(const struct srv_checkpoint *checkpoint, struct srv_checkpoint_view *out)
{
	*out = checkpoint->view;
	if (!out->is_running)
		return;
	out->n_bytes = checkpoint->offset;
	out->elapsed_us = srv_us_since(checkpoint->server->now_ns, checkpoint->started_ns);
}

/* ---- life ---- */

#define TO(state) KV_SM_BIT(CKPT_##state)

static const struct kv_sm_state checkpoint_states[] = {
	[CKPT_IDLE] = { "idle", TO(OPEN) },
	[CKPT_OPEN] = { "open", TO(FILL) | TO(READ) | TO(RELEASE) },
	[CKPT_FILL] = { "fill", TO(SEALED) | TO(WRITE) | TO(UNLINK) | TO(RELEASE) },
	[CKPT_SEALED] = { "sealed", TO(FILL) | TO(PARSE) | TO(UNLINK) | TO(RELEASE) },
	[CKPT_WRITE] = { "write", TO(WRITE) | TO(FILL) | TO(SYNC) | TO(UNLINK) },
	[CKPT_SYNC] = { "sync", TO(RENAME) | TO(UNLINK) },
	[CKPT_RENAME] = { "rename", TO(DIR_OPEN) | TO(UNLINK) },
	[CKPT_DIR_OPEN] = { "open directory", TO(DIR_SYNC) | TO(RELEASE) },
	[CKPT_DIR_SYNC] = { "sync directory", TO(RELEASE) },
	[CKPT_READ] = { "read", TO(PARSE) | TO(RELEASE) },
	[CKPT_PARSE] = { "parse", TO(READ) | TO(SEALED) | TO(RELEASE) },
	[CKPT_UNLINK] = { "unlink", TO(RELEASE) },
	[CKPT_RELEASE] = { "release", TO(IDLE) },
};

enum kv_status srv_checkpoint_create(
	struct srv_server *server, struct srv_checkpoint **out, struct kv_error *err)
{
	struct srv_checkpoint *checkpoint = kv_alloc(1, sizeof(*checkpoint));

	if (!checkpoint)
		return kv_fail(err, KV_NO_MEMORY, "snapshots");
	checkpoint->server = server;
	checkpoint->records = kv_pages_alloc(SRV_RECORDS_PER_CHUNK * sizeof(*checkpoint->records));
	checkpoint->record_at = kv_pages_alloc(SRV_RECORDS_PER_CHUNK * sizeof(*checkpoint->record_at));
	if (!checkpoint->records || !checkpoint->record_at) {
		srv_checkpoint_destroy(checkpoint);
		return kv_fail(err, KV_NO_MEMORY, "snapshots");
	}
	kv_sm_init(&checkpoint->sm, checkpoint_states, CKPT_IDLE);
	checkpoint->chunk_bytes_min = SRV_CHUNK_BYTES_MIN;
	checkpoint->file.done = srv_checkpoint_on_file;
	checkpoint->mover.seal = srv_checkpoint_on_seal;
	checkpoint->mover.done = srv_checkpoint_on_moved;
	server->movers[0] = &checkpoint->mover;
	*out = checkpoint;
	return KV_OK;
}

void srv_checkpoint_destroy(struct srv_checkpoint *checkpoint)
{
	if (!checkpoint)
		return;
	kv_capture_destroy(checkpoint->capture);
	kv_stage_destroy(checkpoint->stage);
	if (checkpoint->chunk)
		return_chunk(checkpoint);
	kv_pages_free(checkpoint->records, SRV_RECORDS_PER_CHUNK * sizeof(*checkpoint->records));
	kv_pages_free(checkpoint->record_at, SRV_RECORDS_PER_CHUNK * sizeof(*checkpoint->record_at));
	kv_free(checkpoint);
}
