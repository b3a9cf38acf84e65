#include <stdio.h>
#include <string.h>

#include "core/checked.h"
#include "server/control.h"
#include "server/ctl/ctl.h"
#include "server/ctl/table.h"

enum { EXIT_DONE = 0, EXIT_FAILED = 1, EXIT_USAGE = 2 };

static const struct srv_command *const commands[] = {
	&srv_cmd_ping,
	&srv_cmd_ready,
	&srv_cmd_info,
	&srv_cmd_occupancy,
	&srv_cmd_pools_create,
	&srv_cmd_pools_delete,
	&srv_cmd_pools,
	&srv_cmd_sessions_close,
	&srv_cmd_sessions,
	&srv_cmd_prefixes_delete,
	&srv_cmd_prefixes,
	&srv_cmd_connections,
	&srv_cmd_tenants_set,
	&srv_cmd_tenants_clear,
	&srv_cmd_tenants,
	&srv_cmd_snapshot,
	&srv_cmd_restore,
	&srv_cmd_snapshots_delete,
	&srv_cmd_snapshots,
	&srv_cmd_reload,
	&srv_cmd_drain,
	&srv_cmd_log_level,
	&srv_cmd_audit,
	&srv_cmd_self_test,
	&srv_cmd_top,
	&srv_cmd_plan,
	&srv_cmd_replay,
	&srv_cmd_bench_cpu,
	&srv_cmd_bench_echo,
	&srv_cmd_bench_step,
	&srv_cmd_bench_ingest,
	&srv_cmd_bench_kernels,
	&srv_cmd_capture_inspect,
	&srv_cmd_attention,
	&srv_cmd_calibrate,
	&srv_cmd_presets,
	&srv_cmd_codec_info,
	&srv_cmd_codec_encode,
	&srv_cmd_codec_decode,
	&srv_cmd_codec_rotation,
	&srv_cmd_codec_codebook,
	&srv_cmd_codec_compare,
};

static int fail(const struct srv_ctl *ctl, enum kv_status status, struct kv_error *err)
{
	if (err->msg[0] == '\0')
		kv_fail(err, status, "%s", kv_status_row((unsigned)status)->text);
	fprintf(stderr, "tqkvctl%s%s: %s\n", ctl->command ? " " : "", ctl->command ? ctl->command->name : "",
		srv_printable(err->msg));
	return status == SRV_CTL_USAGE ? EXIT_USAGE : EXIT_FAILED;
}

int main(int argc, char **argv)
{
	struct srv_ctl ctl;
	struct kv_error err = { .status = KV_OK };
	enum kv_status status = srv_ctl_parse(&ctl, commands, KV_LENGTH(commands), argc, argv, &err);

	if (status != KV_OK)
		return fail(&ctl, status, &err);
	if (ctl.is_version) {
		printf("tqkvctl %s, commit %s\n", srv_version, srv_commit);
		return EXIT_DONE;
	}
	if (ctl.is_help) {
		if (ctl.command)
			srv_ctl_print_command_help(commands, KV_LENGTH(commands), ctl.command);
		else
			srv_ctl_print_help(commands, KV_LENGTH(commands), ctl.group);
		return EXIT_DONE;
	}
	status = srv_ctl_read_token(&ctl, &err);
	if (status == KV_OK)
		status = ctl.command->run(&ctl, &err);
	if (status != KV_OK)
		return fail(&ctl, status, &err);
	if (fflush(stdout) != 0 || ferror(stdout))
		return fail(&ctl, KV_IO_ERROR,
			(kv_fail(&err, KV_IO_ERROR, "standard output cannot be written"), &err));
	return EXIT_DONE;
}
