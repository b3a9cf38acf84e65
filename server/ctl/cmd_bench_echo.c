#include <stdio.h>

#include "core/clock.h"
#include "core/memory.h"
#include "server/ctl/client.h"
#include "server/ctl/percentile.h"
#include "server/ctl/table.h"

enum { ARG_BYTES_IN, ARG_BYTES_OUT, ARG_COUNT, N_ARGS };

/* Largest payload of any frame (PROTOCOL: frame_bytes_max is at most 16 MiB). */
#define PAYLOAD_BYTES_MAX (16u << 20)

static const struct srv_arg args[N_ARGS] = {
	[ARG_BYTES_IN] = { .name = "bytes-in",
		.kind = SRV_ARG_BYTES,
		.placeholder = "BYTES",
		.number = 4096,
		.max = PAYLOAD_BYTES_MAX,
		.help = "payload sent" },
	[ARG_BYTES_OUT] = { .name = "bytes-out",
		.kind = SRV_ARG_BYTES,
		.placeholder = "BYTES",
		.number = 4096,
		.max = PAYLOAD_BYTES_MAX,
		.help = "payload that comes back" },
	[ARG_COUNT] = { .name = "count",
		.letter = 'n',
		.kind = SRV_ARG_NUMBER,
		.placeholder = "N",
		.number = 10000,
		.min = 1,
		.max = 10000000,
		.help = "round trips" },
};

struct echo_run {
	uint64_t in_bytes, out_bytes, n;
	uint64_t took_ns;
	struct srv_percentile round_trips;
};

static enum kv_status measure(const struct srv_ctl *ctl, struct tqkv_conn *conn, struct echo_run *run,
	uint8_t *buffers, struct kv_error *err)
{
	struct kv_clock *clock = kv_clock_system();
	const uint64_t first_ns = kv_clock_now_ns(clock);
	struct tqkv_error failure;

	for (uint64_t i = 0; i < run->n && !srv_interrupt_seen(); i++) {
		const uint64_t start_ns = kv_clock_now_ns(clock);

		if (tqkv_echo(conn, buffers, (size_t)run->in_bytes, buffers + run->in_bytes,
			    (size_t)run->out_bytes, ctl->timeout_ms, &failure) != TQKV_OK)
			return srv_client_fail(err, &failure, "echo %llu of %llu", (unsigned long long)i + 1,
				(unsigned long long)run->n);
		srv_percentile_add(&run->round_trips, kv_clock_now_ns(clock) - start_ns);
	}
	run->took_ns = kv_clock_now_ns(clock) - first_ns;
	return srv_interrupt_seen() ? kv_fail(err, KV_CANCELLED, "interrupted") : KV_OK;
}

static void print_text(struct echo_run *run)
{
	char texts[5][SRV_HUMAN_BYTES];
	const double took_s = (double)run->took_ns / 1e9;

	printf("echo %s in, %s out: %llu round trips, %.0f a second, %.1f MB/s both ways\n",
		srv_human_bytes(run->in_bytes, texts[0]), srv_human_bytes(run->out_bytes, texts[1]),
		(unsigned long long)run->n, (double)run->n / took_s,
		(double)(run->in_bytes + run->out_bytes) * (double)run->n / took_s / 1e6);
	printf("p50 %s, p90 %s, p99 %s\n", srv_human_ns(srv_percentile_get(&run->round_trips, 50), texts[2]),
		srv_human_ns(srv_percentile_get(&run->round_trips, 90), texts[3]),
		srv_human_ns(srv_percentile_get(&run->round_trips, 99), texts[4]));
}

static void print_json(struct echo_run *run)
{
	json_t *json = json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "bytes_in", (json_int_t)run->in_bytes,
		"bytes_out", (json_int_t)run->out_bytes, "n", (json_int_t)run->n, "took_ns",
		(json_int_t)run->took_ns, "p50_ns", (json_int_t)srv_percentile_get(&run->round_trips, 50),
		"p90_ns", (json_int_t)srv_percentile_get(&run->round_trips, 90), "p99_ns",
		(json_int_t)srv_percentile_get(&run->round_trips, 99));

	srv_ctl_print_json(json);
	json_decref(json);
}

static enum kv_status run_bench_echo(struct srv_ctl *ctl, struct kv_error *err)
{
	struct echo_run run = {
		.in_bytes = ctl->values[ARG_BYTES_IN].number,
		.out_bytes = ctl->values[ARG_BYTES_OUT].number,
		.n = ctl->values[ARG_COUNT].number,
	};
	uint8_t *buffers = kv_alloc((size_t)(run.in_bytes + run.out_bytes), 1);
	struct tqkv_conn *conn = NULL;
	enum kv_status status =
		buffers ? KV_OK : kv_fail(err, KV_NO_MEMORY, "no memory for payloads of these sizes");

	srv_interrupt_catch();
	if (status == KV_OK)
		status = srv_percentile_init(&run.round_trips, (uint32_t)run.n, err);
	if (status == KV_OK)
		status = srv_client_connect(ctl, 0, &conn, err);
	if (status == KV_OK)
		status = measure(ctl, conn, &run, buffers, err);
	if (status == KV_OK && ctl->is_json)
		print_json(&run);
	else if (status == KV_OK)
		print_text(&run);
	tqkv_disconnect(conn);
	srv_percentile_finish(&run.round_trips);
	kv_free(buffers);
	return status;
}

const struct srv_command srv_cmd_bench_echo = {
	.name = "bench echo",
	.summary = "round trips of a payload through a request slot and back",
	.args = args,
	.n_args = N_ARGS,
	.run = run_bench_echo,
};
