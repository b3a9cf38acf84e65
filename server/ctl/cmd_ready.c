/* ready: exit code 0 while the daemon would serve. What health checks of containers call. */
#include <stdio.h>

#include "server/ctl/ctl.h"

enum { ARG_DEEP, N_ARGS };

static const struct srv_arg args[N_ARGS] = {
	[ARG_DEEP] = { .name = "deep",
		.kind = SRV_ARG_FLAG,
		.help = "run a decode with a known answer now, instead of asking for the last one's age" },
};

static enum kv_status run_ready(struct srv_ctl *ctl, struct kv_error *err)
{
	json_t *json = NULL;
	const char *path = ctl->values[ARG_DEEP].is_given ? "/readyz?deep=1" : "/readyz";
	const enum kv_status status = srv_ctl_api(ctl, "GET", path, NULL, &json, err);

	if (status != KV_OK)
		return status;
	if (ctl->is_json)
		srv_ctl_print_json(json);
	else
		printf("ready\n");
	json_decref(json);
	return KV_OK;
}

const struct srv_command srv_cmd_ready = {
	.name = "ready",
	.summary = "exit code 0 when the daemon is ready to serve, 1 when it is not",
	.args = args,
	.n_args = N_ARGS,
	.run = run_ready,
};
