/* Sessions into files of the daemon's snapshot_dir and back; waits for the end and tells how fast it was. */
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "core/checked.h"
#include "server/ctl/ctl.h"
#include "server/ctl/table.h"

#define LOOK_NS   20000000L
#define LOOKS_MAX 180000u /* an hour */

enum { ARG_SESSION, ARG_ALL };

static const struct srv_arg snapshot_args[] = {
	[ARG_SESSION] = { .name = "session",
		.kind = SRV_ARG_TEXT,
		.placeholder = "ID",
		.help = "only this one, by its id or name, of those that 'tqkvctl sessions' lists" },
	[ARG_ALL] = { .name = "all",
		.kind = SRV_ARG_FLAG,
		.help = "all sessions that have a name (the default)" },
};

static void print_done(const json_t *view)
{
	const uint64_t us = srv_json_u64(view, "elapsed_us"), n_bytes = srv_json_u64(view, "n_bytes");
	const double seconds = (double)us / 1e6;
	char bytes[SRV_HUMAN_BYTES];

	printf("%s %s: %llu sessions, %llu sequences, %llu published, %llu blocks, %s in %.3f s, %.1f "
	       "MiB/s\n",
		srv_json_text(view, "operation"), srv_json_text(view, "name"),
		(unsigned long long)srv_json_u64(view, "n_sessions"),
		(unsigned long long)srv_json_u64(view, "n_sequences"),
		(unsigned long long)srv_json_u64(view, "n_prefixes"),
		(unsigned long long)srv_json_u64(view, "n_blocks"), srv_human_bytes(n_bytes, bytes), seconds,
		seconds > 0 ? (double)n_bytes / 1048576.0 / seconds : 0.0);
	if (srv_json_u64(view, "n_skipped_sessions") > 0)
		printf("%llu sessions without a name or with tables of their client are left out\n",
			(unsigned long long)srv_json_u64(view, "n_skipped_sessions"));
}

/* The one that was begun as the n_begun-th is over. */
static enum kv_status wait_for(
	const struct srv_ctl *ctl, uint64_t n_begun, json_t **view, struct kv_error *err)
{
	const struct timespec pause = { .tv_nsec = LOOK_NS };

	for (uint32_t i = 0; i < LOOKS_MAX; i++) {
		const enum kv_status status = srv_ctl_api(ctl, "GET", "/v1/snapshot", NULL, view, err);

		if (status != KV_OK)
			return status;
		if (srv_json_u64(*view, "n_begun") != n_begun ||
			strcmp(srv_json_text(*view, "state"), "running") != 0)
			return KV_OK;
		json_decref(*view);
		*view = NULL;
		nanosleep(&pause, NULL);
	}
	return kv_fail(err, KV_BUSY_RETRY, "it is still running after an hour");
}

static enum kv_status run_one(const struct srv_ctl *ctl, const char *path, json_t *body, struct kv_error *err)
{
	json_t *begun = NULL, *view = NULL;
	enum kv_status status = body ? srv_ctl_api(ctl, "POST", path, body, &begun, err)
				     : kv_fail(err, KV_NO_MEMORY, "no memory for the request");

	json_decref(body);
	if (status == KV_OK)
		status = wait_for(ctl, srv_json_u64(begun, "n_begun"), &view, err);
	if (status == KV_OK && srv_json_u64(view, "n_begun") != srv_json_u64(begun, "n_begun"))
		status = kv_fail(err, KV_BUSY_RETRY, "another one was begun before this one was looked at");
	const bool is_partial = status == KV_OK && strcmp(srv_json_text(view, "status"), "PARTIAL") == 0;

	if (status == KV_OK && !is_partial && strcmp(srv_json_text(view, "status"), "OK") != 0)
		status = kv_fail(err, KV_BAD_ARG, "%s: %s", srv_json_text(view, "status"),
			srv_json_text(view, "detail"));
	if (status == KV_OK && ctl->is_json)
		srv_ctl_print_json(view);
	else if (status == KV_OK)
		print_done(view);
	if (status == KV_OK && is_partial)
		status = kv_fail(err, KV_POOL_FULL,
			"PARTIAL: %llu sequences are not in it: they are spilled, and the pool has no room "
			"to "
			"bring them back",
			(unsigned long long)srv_json_u64(view, "n_skipped_sequences"));
	json_decref(begun);
	json_decref(view);
	return status;
}

static enum kv_status run_snapshot(struct srv_ctl *ctl, struct kv_error *err)
{
	const char *session = ctl->values[ARG_SESSION].text;
	char id[SRV_CTL_SESSION_CHARS + 1];

	if (session && ctl->values[ARG_ALL].is_given)
		return kv_fail(err, SRV_CTL_USAGE, "--session and --all exclude each other");
	if (session) {
		const enum kv_status status = srv_ctl_session_id(ctl, session, id, err);

		if (status != KV_OK)
			return status;
	}
	return run_one(ctl, "/v1/snapshot",
		session ? json_pack("{s:s, s:s}", "name", ctl->operands[0], "session", id)
			: json_pack("{s:s}", "name", ctl->operands[0]),
		err);
}

static enum kv_status run_restore(struct srv_ctl *ctl, struct kv_error *err)
{
	return run_one(ctl, "/v1/restore", json_pack("{s:s}", "name", ctl->operands[0]), err);
}

const struct srv_command srv_cmd_snapshot = {
	.name = "snapshot",
	.operands = "NAME",
	.n_operands_min = 1,
	.n_operands_max = 1,
	.summary = "write sessions to a file of the daemon's snapshot_dir",
	.details =
		"Clients go on meanwhile. A snapshot of that name is replaced once the new one is on disk.\n"
		"Published prefixes are in it, too, unless --session is given. The line at the end tells how "
		"fast\n"
		"it was.\n"
		"As hooks around a swap of models, with the tool that swaps: tqkvctl snapshot NAME before "
		"the old\n"
		"one stops, tqkvctl restore NAME once the new one serves. Both end with 0 only when every "
		"sequence\n"
		"of a session that has a name is on disk, or everything is back; a restore changes nothing\n"
		"otherwise. PARTIAL: the file is whole, but spilled sequences for which the pool had no room "
		"are not\n"
		"in it; free or close something and take it again.",
	.args = snapshot_args,
	.n_args = KV_LENGTH(snapshot_args),
	.run = run_snapshot,
};

const struct srv_command srv_cmd_restore = {
	.name = "restore",
	.operands = "NAME",
	.n_operands_min = 1,
	.n_operands_max = 1,
	.summary = "bring the sessions of a snapshot back",
	.details = "All of them appear at once, or none. Clients attach to them by name.",
	.run = run_restore,
};
