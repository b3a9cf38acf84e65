/*
 * Times of the GPU kernels: runs tqkv-kernel-bench, which lies beside this program and is built where the
 * CUDA backend is. A program of its own, since it launches kernels itself: tqkvctl knows the daemon by its
 * protocols only.
 */
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "server/ctl/ctl.h"

#define PROGRAM "tqkv-kernel-bench"

enum { ARG_BRIEF, N_ARGS };

static const struct srv_arg args[N_ARGS] = {
	[ARG_BRIEF] = { .name = "brief",
		.kind = SRV_ARG_FLAG,
		.help = "without sustained runs and formats that have no tuned kernel" },
};

/* Beside this program, as installed, or where a build folder has it; as it is where our folder is not known.
 */
static void find_program(const char *folder, char path[PATH_MAX])
{
	char own[PATH_MAX / 2];
	const ssize_t n = readlink("/proc/self/exe", own, sizeof(own) - 1);
	char *slash;

	snprintf(path, PATH_MAX, "%s", PROGRAM);
	if (n <= 0)
		return;
	own[n] = '\0';
	slash = strrchr(own, '/');
	if (!slash)
		return;
	*slash = '\0';
	snprintf(path, PATH_MAX, "%s/%s%s", own, folder, PROGRAM);
}

static enum kv_status run_bench_kernels(struct srv_ctl *ctl, struct kv_error *err)
{
	char path[PATH_MAX], name[] = PROGRAM, json[] = "--json", brief[] = "--brief";
	char *arguments[4] = { name };
	uint32_t n = 1;

	if (ctl->is_json)
		arguments[n++] = json;
	if (ctl->values[ARG_BRIEF].is_given)
		arguments[n++] = brief;
	arguments[n] = NULL;
	fflush(stdout);
	find_program("../gpu/bench/", path);
	execv(path, arguments);
	find_program("", path);
	execv(path, arguments);
	return kv_fail(err, KV_UNAVAILABLE, "%s: %s; it is built with the CUDA backend (-Dcuda=enabled)",
		path, strerror(errno));
}

const struct srv_command srv_cmd_bench_kernels = {
	.name = "bench kernels",
	.summary = "times of the GPU kernels, as a share of what the card reads",
	.details = "No daemon is asked; the GPU should have nothing else to do. Every figure is beside the "
		   "read rate of\n"
		   "the same run. Exit code 77 without a device.",
	.args = args,
	.n_args = N_ARGS,
	.run = run_bench_kernels,
};
