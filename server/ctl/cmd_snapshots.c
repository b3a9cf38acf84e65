/* The files of the daemon's snapshot_dir. cmd_snapshot.c makes and restores them. */
#include <stdio.h>
#include <time.h>

#include "core/checked.h"
#include "server/ctl/ctl.h"
#include "server/ctl/table.h"

static void print_snapshots(const json_t *answer)
{
	static const char *const titles[] = { "<snapshot", "bytes", "<complete since" };
	const json_t *snapshots = json_object_get(answer, "snapshots"), *snapshot;
	char bytes[SRV_HUMAN_BYTES], when[64];
	struct srv_table table;
	size_t i;

	if (json_array_size(snapshots) == 0) {
		printf("no snapshots\n");
		return;
	}
	srv_table_init(&table, titles, KV_LENGTH(titles));
	json_array_foreach (snapshots, i, snapshot) {
		const time_t time = (time_t)srv_json_u64(snapshot, "modified_unix_s");
		struct tm utc;

		if (!gmtime_r(&time, &utc) ||
			strftime(when, sizeof(when), "%Y-%m-%d %H:%M:%S UTC", &utc) == 0)
			snprintf(when, sizeof(when), "-");
		srv_table_cell(&table, "%s", srv_json_text(snapshot, "name"));
		srv_table_cell(&table, "%s", srv_human_bytes(srv_json_u64(snapshot, "n_bytes"), bytes));
		srv_table_cell(&table, "%s", when);
	}
	srv_table_print(&table, stdout);
	srv_table_finish(&table);
	if (srv_json_u64(answer, "n_snapshots") > json_array_size(snapshots))
		printf("and %llu older ones\n",
			(unsigned long long)(srv_json_u64(answer, "n_snapshots") -
				json_array_size(snapshots)));
}

static enum kv_status run_snapshots(struct srv_ctl *ctl, struct kv_error *err)
{
	json_t *answer = NULL;
	const enum kv_status status = srv_ctl_api(ctl, "GET", "/v1/snapshots", NULL, &answer, err);

	if (status == KV_OK && ctl->is_json)
		srv_ctl_print_json(answer);
	else if (status == KV_OK)
		print_snapshots(answer);
	json_decref(answer);
	return status;
}

static enum kv_status run_delete(struct srv_ctl *ctl, struct kv_error *err)
{
	return srv_ctl_delete(ctl, "/v1/snapshots", ctl->operands[0], SRV_CTL_SNAPSHOT_CHARS, err);
}

const struct srv_command srv_cmd_snapshots = {
	.name = "snapshots",
	.summary = "the snapshots in the daemon's snapshot_dir, newest first",
	.run = run_snapshots,
};

const struct srv_command srv_cmd_snapshots_delete = {
	.name = "snapshots delete",
	.operands = "NAME",
	.n_operands_min = 1,
	.n_operands_max = 1,
	.summary = "deletes a snapshot's file",
	.run = run_delete,
};
