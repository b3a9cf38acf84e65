#include <stdio.h>

#include "core/checked.h"
#include "core/clock.h"
#include "server/ctl/client.h"
#include "server/ctl/percentile.h"
#include "server/ctl/table.h"

enum { ARG_COUNT, N_ARGS };

static const struct srv_arg args[N_ARGS] = {
	[ARG_COUNT] = { .name = "count",
		.letter = 'n',
		.kind = SRV_ARG_NUMBER,
		.placeholder = "N",
		.number = 10,
		.min = 1,
		.max = 1000000,
		.help = "round trips" },
};

static void print_text(const struct srv_ctl *ctl, const struct tqkv_server_info *info, uint64_t connect_ns,
	struct srv_percentile *round_trips)
{
	char texts[5][SRV_HUMAN_BYTES];

	printf("%s: protocol %u, boot id %016llx, %u pools, frames up to %s\n", ctl->addr, info->proto,
		(unsigned long long)info->boot_id, info->n_pools,
		srv_human_bytes(info->frame_bytes_max, texts[0]));
	printf("connect and hello %s; %u round trips: p50 %s, p90 %s, p99 %s\n",
		srv_human_ns(connect_ns, texts[1]), round_trips->n,
		srv_human_ns(srv_percentile_get(round_trips, 50), texts[2]),
		srv_human_ns(srv_percentile_get(round_trips, 90), texts[3]),
		srv_human_ns(srv_percentile_get(round_trips, 99), texts[4]));
}

static void print_json(
	const struct tqkv_server_info *info, uint64_t connect_ns, struct srv_percentile *round_trips)
{
	char boot_id[17];

	snprintf(boot_id, sizeof(boot_id), "%016llx", (unsigned long long)info->boot_id);
	json_t *json = json_pack("{s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "boot_id", boot_id,
		"protocol", (json_int_t)info->proto, "n_pools", (json_int_t)info->n_pools, "frame_bytes_max",
		(json_int_t)info->frame_bytes_max, "connect_ns", (json_int_t)connect_ns, "n",
		(json_int_t)round_trips->n, "p50_ns", (json_int_t)srv_percentile_get(round_trips, 50),
		"p90_ns", (json_int_t)srv_percentile_get(round_trips, 90), "p99_ns",
		(json_int_t)srv_percentile_get(round_trips, 99));

	srv_ctl_print_json(json);
	json_decref(json);
}

static enum kv_status measure(const struct srv_ctl *ctl, struct tqkv_conn *conn,
	struct srv_percentile *round_trips, struct kv_error *err)
{
	struct kv_clock *clock = kv_clock_system();
	struct tqkv_error failure;

	for (uint32_t i = 0; i < ctl->values[ARG_COUNT].number; i++) {
		const uint64_t start_ns = kv_clock_now_ns(clock);

		if (tqkv_ping(conn, NULL, ctl->timeout_ms, &failure) != TQKV_OK)
			return srv_client_fail(err, &failure, "ping %u of %llu", i + 1,
				(unsigned long long)ctl->values[ARG_COUNT].number);
		srv_percentile_add(round_trips, kv_clock_now_ns(clock) - start_ns);
	}
	return KV_OK;
}

static enum kv_status run_ping(struct srv_ctl *ctl, struct kv_error *err)
{
	struct srv_percentile round_trips = { 0 };
	struct tqkv_conn *conn;
	const uint64_t start_ns = kv_clock_now_ns(kv_clock_system());
	enum kv_status status = srv_client_connect(ctl, 0, &conn, err);
	const uint64_t connect_ns = kv_clock_now_ns(kv_clock_system()) - start_ns;

	if (status != KV_OK)
		return status;
	status = srv_percentile_init(&round_trips, (uint32_t)ctl->values[ARG_COUNT].number, err);
	if (status == KV_OK)
		status = measure(ctl, conn, &round_trips, err);
	if (status == KV_OK && ctl->is_json)
		print_json(tqkv_server_info(conn), connect_ns, &round_trips);
	else if (status == KV_OK)
		print_text(ctl, tqkv_server_info(conn), connect_ns, &round_trips);
	srv_percentile_finish(&round_trips);
	tqkv_disconnect(conn);
	return status;
}

const struct srv_command srv_cmd_ping = {
	.name = "ping",
	.summary = "connect, say hello, measure round trips of the data protocol",
	.args = args,
	.n_args = N_ARGS,
	.run = run_ping,
};
