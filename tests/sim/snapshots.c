/*
 * Snapshots and restores at random moments, files that are damaged between them, and what must come out of
 * each. What a snapshot holds is the model's business (model_saved.c).
 */
#include "tests/sim/snapshots.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/checkpoint_internal.h"

#define N_NAMES 3u

static void name_of(uint32_t idx, char name[8])
{
	snprintf(name, 8, "s%u", idx);
}

static struct sim_file *file_of(struct sim_world *world, const char *name)
{
	char path[32];

	snprintf(path, sizeof(path), "dir/%s.tqkv", name);
	return sim_files_find(sim_net_files(world->net), path);
}

/* One bit is wrong, or the end is missing. */
static void damage(struct sim_world *world, const char *name)
{
	struct sim_file *file = file_of(world, name);
	struct sim_snapshot *snapshot = sim_model_snapshot(&world->model, name);

	if (!file || !snapshot || file->n_bytes == 0)
		return;
	if (sim_chance(&world->rng, 600))
		file->bytes[sim_rng_next(&world->rng) % file->n_bytes] ^=
			(uint8_t)(1u << sim_below(&world->rng, 8));
	else
		file->n_bytes = sim_rng_next(&world->rng) % file->n_bytes;
	/* The same bit twice is no damage, but nobody would know. */
	snapshot->is_damaged = !snapshot->is_damaged;
	if (!snapshot->is_damaged)
		snapshot->is_unknown = true;
}

void sim_snapshots_act(struct sim_world *world)
{
	struct srv_checkpoint *checkpoint = world->server->checkpoint;
	const uint32_t dice = sim_below(&world->rng, 1000);
	struct kv_error err = { 0 };
	char name[8];

	name_of(sim_below(&world->rng, N_NAMES), name);
	if (world->server->is_lost)
		return;
	if (srv_checkpoint_is_running(checkpoint)) {
		SIM_CHECK(srv_checkpoint_save(checkpoint, name, 0, &err) == KV_BUSY_RETRY,
			"two snapshots at once");
		return;
	}
	if (dice < 500) {
		const enum kv_status status = srv_checkpoint_save(checkpoint, name, 0, &err);

		SIM_CHECK(status == KV_OK, "a snapshot does not begin: %s", err.msg);
	} else if (dice < 850) {
		const struct sim_snapshot *snapshot = sim_model_snapshot(&world->model, name);

		if (snapshot && snapshot->is_unknown)
			return;
		const enum kv_status status = srv_checkpoint_load(checkpoint, name, false, &err);

		SIM_CHECK(status == (world->server->is_draining ? KV_DRAINING : KV_OK),
			"restoring does not begin: %s", err.msg);
	} else {
		damage(world, name);
	}
}

static void check_saved(struct sim_world *world, const struct srv_checkpoint_view *view)
{
	const bool may_fail = sim_net_files(world->net)->options.fail_per_mille > 0;

	if (view->status == KV_OK) {
		sim_model_saved(&world->model, world->server->domain, view->name);
		world->n_saved++;
		return;
	}
	/* It has its name, and may lose it again. */
	if (strstr(view->detail, "open dir:") || strstr(view->detail, "sync dir:"))
		sim_model_forget_snapshot(&world->model, view->name);
	SIM_CHECK(view->status == KV_DEVICE_LOST || (view->status == KV_IO_ERROR && may_fail) ||
			sim_net_files(world->net)->has_failed ||
			sim_net_files(world->net)->options.disk_bytes_max > 0,
		"snapshot: %s", view->detail);
}

/* A whole file comes back, unless there is a reason in the daemon; a damaged one never. */
static void check_restored(struct sim_world *world, const struct srv_checkpoint_view *view)
{
	const struct sim_files_options *files = &sim_net_files(world->net)->options;
	const struct sim_snapshot *snapshot = sim_model_snapshot(&world->model, view->name);
	const bool is_whole = snapshot && !snapshot->is_damaged;

	switch (view->status) {
	case KV_OK:
		SIM_CHECK(snapshot && !snapshot->is_damaged, "a damaged snapshot is restored");
		world->n_restored++;
		return;
	case KV_CORRUPT:
		SIM_CHECK(!is_whole || files->flip_per_mille > 0, "restoring: %s", view->detail);
		world->n_refused++;
		return;
	case KV_IO_ERROR:
		SIM_CHECK(files->fail_per_mille > 0 || sim_net_files(world->net)->has_failed, "restoring: %s",
			view->detail);
		return;
	case KV_NOT_FOUND: /* no such file, or a pool is gone */
	case KV_EXISTS:
	case KV_POOL_FULL:
	case KV_LIMIT:
	case KV_QUOTA:
	case KV_BUSY_RETRY:
	case KV_DEVICE_LOST:
		return;
	default:
		/* Damage may look like another version or another pool only where no checksum is wrong. */
		sim_fail("restoring: %s: %s", kv_status_name(view->status), view->detail);
	}
}

void sim_snapshots_watch(struct sim_world *world)
{
	struct srv_checkpoint_view view;

	srv_checkpoint_status(world->server->checkpoint, &view);
	if (view.n_begun == world->n_snapshots_seen || view.is_running)
		return;
	world->n_snapshots_seen = view.n_begun;
	if (world->config.snapshot_per_mille == 0) {
		if (!view.is_restore && view.status == KV_OK)
			sim_model_saved(&world->model, world->server->domain, view.name);
	} else if (view.is_restore) {
		check_restored(world, &view);
	} else {
		check_saved(world, &view);
	}
}

/* ---- another process ---- */

/* The name may be the new file's already, or still the old one's. */
static void note_renaming(struct sim_world *world)
{
	const struct srv_checkpoint *checkpoint = world->server->checkpoint;
	const uint32_t state = checkpoint->sm.state;

	if (srv_checkpoint_is_running(checkpoint) && checkpoint->is_save &&
		(state == CKPT_RENAME || state == CKPT_DIR_OPEN || state == CKPT_DIR_SYNC ||
			state == CKPT_RELEASE))
		sim_model_forget_snapshot(&world->model, checkpoint->name);
}

static void load_all(struct sim_world *world)
{
	for (uint32_t i = 0; i < N_NAMES; i++) {
		struct kv_error err = { 0 };
		char name[8];
		const struct sim_snapshot *snapshot;

		name_of(i, name);
		snapshot = sim_model_snapshot(&world->model, name);
		if (snapshot && snapshot->is_unknown)
			continue;
		SIM_CHECK(srv_checkpoint_load(world->server->checkpoint, name, false, &err) == KV_OK,
			"restoring does not begin: %s", err.msg);
		for (uint32_t n = 0; srv_checkpoint_is_running(world->server->checkpoint); n++) {
			SIM_CHECK(n < 100000, "restoring does not end");
			sim_world_step(world, KV_NS_PER_MS);
			if (world->server->is_lost)
				return;
		}
	}
}

void sim_snapshots_restart(struct sim_world *world, const struct sim_config *config)
{
	struct sim_files files;
	struct sim_saved saved;
	const uint32_t row_counter = world->row_counter;

	note_renaming(world);
	/* What was written and not synced is lost in part. */
	sim_files_crash(sim_net_files(world->net));
	files = *sim_net_files(world->net);
	for (uint32_t i = 0; i < SIM_FILES_MAX; i++)
		sim_net_files(world->net)->files[i].bytes = NULL; /* ours from here on */
	saved = world->model.saved;
	memset(&world->model.saved, 0, sizeof(world->model.saved));
	sim_world_finish(world, false);

	sim_world_init(world, config);
	world->row_counter = row_counter;
	world->model.saved = saved;
	for (uint32_t i = 0; i < SIM_FILES_MAX; i++) {
		const struct sim_file *file = &files.files[i];

		if (file->is_used && !file->is_unlinked && strstr(file->path, ".tier") == NULL)
			sim_files_put(sim_net_files(world->net), file->path, file->bytes, file->n_bytes);
		free(file->bytes);
	}
	load_all(world);
}
