/*
 * Rows into the daemon from one client, as fast as they go, beside echoes whose payload is as large as a
 * frame of rows: what the socket alone brings in. Several frames are in flight; an echo is one at a time, and
 * its rate is that of its median. One sequence takes all tokens and is cut back to nothing where the context
 * ends.
 */
#include <stdio.h>
#include <string.h>

#include "core/checked.h"
#include "core/clock.h"
#include "core/memory.h"
#include "server/ctl/bench_rig.h"
#include "server/ctl/table.h"

enum { ARG_TOKENS, ARG_CONTEXT, ARG_KV_HEADS, ARG_HEAD_DIM, ARG_K, ARG_V, ARG_IN_FLIGHT, ARG_COUNT, N_ARGS };

#define IN_FLIGHT_MAX  16u
#define ECHO_OUT_BYTES 64u

static const struct srv_arg args[N_ARGS] = {
	[ARG_TOKENS] = { .name = "tokens",
		.kind = SRV_ARG_NUMBER,
		.placeholder = "N",
		.number = 192,
		.min = 1,
		.max = 65536,
		.help = "tokens of a frame" },
	[ARG_CONTEXT] = { .name = "context",
		.kind = SRV_ARG_NUMBER,
		.placeholder = "TOKENS",
		.number = 32768,
		.min = 1,
		.max = 1u << 24,
		.help = "tokens after which the sequence begins anew" },
	[ARG_KV_HEADS] = { .name = "kv-heads",
		.kind = SRV_ARG_NUMBER,
		.placeholder = "N",
		.number = 8,
		.min = 1,
		.max = 1024,
		.help = "KV heads" },
	[ARG_HEAD_DIM] = { .name = "head-dim",
		.kind = SRV_ARG_NUMBER,
		.placeholder = "N",
		.number = 128,
		.min = 1,
		.max = 256,
		.help = "channels of K and V" },
	SRV_ARG_FORMAT(ARG_K, "k", "K"),
	SRV_ARG_FORMAT(ARG_V, "v", "V"),
	[ARG_IN_FLIGHT] = { .name = "in-flight",
		.kind = SRV_ARG_NUMBER,
		.placeholder = "N",
		.number = 4,
		.min = 1,
		.max = IN_FLIGHT_MAX,
		.help = "frames on their way at a time" },
	[ARG_COUNT] = { .name = "count",
		.letter = 'n',
		.kind = SRV_ARG_NUMBER,
		.placeholder = "N",
		.number = 500,
		.min = 10,
		.max = 1000000,
		.help = "frames, and echoes" },
};

struct bench {
	struct srv_bench_rig rig;
	uint32_t n_tokens, context, n, position;
	uint64_t side_bytes; /* of K, or V, of a frame */
	uint8_t *rows;
	struct srv_percentile echoes;
	uint64_t took_ns, echo_p50_ns;
};

static uint64_t argument(const struct bench *bench, uint32_t idx)
{
	return bench->rig.ctl->values[idx].number;
}

static enum kv_status prepare(struct bench *bench, struct kv_error *err)
{
	const struct srv_ctl *ctl = bench->rig.ctl;
	json_t *json;

	bench->n_tokens = (uint32_t)argument(bench, ARG_TOKENS);
	bench->context = (uint32_t)argument(bench, ARG_CONTEXT);
	bench->n = (uint32_t)argument(bench, ARG_COUNT);
	if (bench->context < bench->n_tokens)
		return kv_fail(err, SRV_CTL_USAGE, "--context: smaller than a frame's tokens");
	bench->side_bytes =
		bench->n_tokens * argument(bench, ARG_KV_HEADS) * argument(bench, ARG_HEAD_DIM) * 2;
	json = json_pack("{s:i, s:I, s:I, s:I, s:s, s:s, s:i, s:I}", "layers", 1, "q_heads",
		(json_int_t)argument(bench, ARG_KV_HEADS), "kv_heads",
		(json_int_t)argument(bench, ARG_KV_HEADS), "head_dim",
		(json_int_t)argument(bench, ARG_HEAD_DIM), "k", ctl->values[ARG_K].text, "v",
		ctl->values[ARG_V].text, "block_size", 16, "blocks",
		(json_int_t)kv_div_up_u32(bench->context, 16) + 1);
	return srv_bench_prepare(&bench->rig, ctl, json, err);
}

/* Memory, once the daemon has said how large its frames are. */
static enum kv_status make_rows(void *user, struct kv_error *err)
{
	struct bench *bench = user;
	const uint64_t frame_bytes_max = tqkv_server_info(bench->rig.conn)->frame_bytes_max;

	if (2 * bench->side_bytes + 4096 > frame_bytes_max)
		return kv_fail(err, SRV_CTL_USAGE, "--tokens: %llu bytes of rows, a frame holds %llu",
			(unsigned long long)(2 * bench->side_bytes), (unsigned long long)frame_bytes_max);
	bench->rows = kv_alloc((size_t)(2 * bench->side_bytes), 1);
	if (!bench->rows)
		return kv_fail(err, KV_NO_MEMORY, "no memory for rows");
	srv_bench_fill_rows(KV_DTYPE_BF16, bench->rows, 2 * bench->side_bytes);
	return srv_percentile_init(&bench->echoes, bench->n, err);
}

static enum kv_status cut_back(struct bench *bench, struct kv_error *err)
{
	const struct tqkv_item item = { .sequence = 1 };
	struct tqkv_item_result found;
	struct tqkv_rows_result result = { .items = &found };
	struct tqkv_error failure;

	bench->position = 0;
	if (tqkv_truncate(bench->rig.session, &item, 1, bench->rig.ctl->timeout_ms, &result, &failure) !=
		TQKV_OK)
		return srv_client_fail(err, &failure, "truncate");
	return result.n_failed == 0 ? KV_OK : kv_fail(err, (enum kv_status)found.status, "truncate");
}

static enum kv_status fetch(struct bench *bench, uint32_t *n_in_flight, struct kv_error *err)
{
	struct tqkv_error failure;
	struct tqkv_reply reply;

	if (tqkv_wait(bench->rig.conn, TQKV_ANY, bench->rig.ctl->timeout_ms, &reply, &failure) != TQKV_OK)
		return srv_client_fail(err, &failure, "append");
	--*n_in_flight;
	return reply.n_failed == 0 ? KV_OK
				   : kv_fail(err, (enum kv_status)reply.items[0].status, "append: %s",
					     tqkv_status_text((unsigned)reply.items[0].status));
}

static enum kv_status send_frame(struct bench *bench, bool is_first, struct kv_error *err)
{
	struct tqkv_item item = { .sequence = 1,
		.position = bench->position,
		.n_tokens = bench->n_tokens,
		.flags = is_first ? TQKV_CREATE : 0 };
	const struct tqkv_rows rows = { .items = &item,
		.n_items = 1,
		.n_layers = 1,
		.k_dtype = TQKV_BF16,
		.v_dtype = TQKV_BF16,
		.k = bench->rows,
		.v = bench->rows + bench->side_bytes,
		.k_bytes = bench->side_bytes,
		.v_bytes = bench->side_bytes };
	struct tqkv_error failure;
	uint64_t request_id;

	bench->position += bench->n_tokens;
	return tqkv_submit_append(bench->rig.session, &rows, bench->rig.ctl->timeout_ms, &request_id,
		       &failure) == TQKV_OK
		? KV_OK
		: srv_client_fail(err, &failure, "append, position %u", item.position);
}

static enum kv_status run_frames(struct bench *bench, struct kv_error *err)
{
	const uint64_t start_ns = kv_clock_now_ns(kv_clock_system());
	enum kv_status status = KV_OK;
	uint32_t n_in_flight = 0;

	for (uint32_t i = 0; status == KV_OK && i < bench->n; i++) {
		const bool is_full = bench->position + bench->n_tokens > bench->context;

		if (srv_interrupt_seen())
			return kv_fail(err, KV_CANCELLED, "interrupted");
		while (status == KV_OK && n_in_flight > 0 &&
			(is_full || n_in_flight == argument(bench, ARG_IN_FLIGHT)))
			status = fetch(bench, &n_in_flight, err);
		if (status == KV_OK && is_full)
			status = cut_back(bench, err);
		if (status == KV_OK)
			status = send_frame(bench, i == 0, err);
		n_in_flight++;
	}
	while (status == KV_OK && n_in_flight > 0)
		status = fetch(bench, &n_in_flight, err);
	bench->took_ns = kv_clock_now_ns(kv_clock_system()) - start_ns;
	return status;
}

static enum kv_status measure(void *user, struct kv_error *err)
{
	struct bench *bench = user;
	uint8_t reply[ECHO_OUT_BYTES];
	const enum kv_status status = srv_bench_echo(&bench->rig, bench->rows, 2 * bench->side_bytes, reply,
		sizeof(reply), bench->n, &bench->echoes, err);

	if (status != KV_OK)
		return status;
	bench->echo_p50_ns = srv_percentile_get(&bench->echoes, 50);
	return run_frames(bench, err);
}

static void print(const struct bench *bench)
{
	const double frame_bytes = 2.0 * (double)bench->side_bytes;
	const double ingest = frame_bytes * bench->n / (double)bench->took_ns * 1e9;
	const double echo = frame_bytes / (double)bench->echo_p50_ns * 1e9;
	json_t *json = json_pack("{s:f, s:i, s:f, s:f, s:f, s:I}", "frame_bytes", frame_bytes, "n",
		(int)bench->n, "ingest_bytes_per_s", ingest, "echo_bytes_per_s", echo, "ratio", ingest / echo,
		"echo_p50_ns", (json_int_t)bench->echo_p50_ns);

	if (bench->rig.ctl->is_json)
		srv_ctl_print_json(json);
	else
		printf("ingest: %u frames of %u tokens, %.0f bytes of bf16 rows: %.2f GB/s; an echo of as "
		       "many bytes in: %.2f "
		       "GB/s, ratio %.2f\n",
			bench->n, bench->n_tokens, frame_bytes, ingest / 1e9, echo / 1e9, ingest / echo);
	json_decref(json);
}

static enum kv_status run_bench_ingest(struct srv_ctl *ctl, struct kv_error *err)
{
	struct bench *bench = kv_alloc(1, sizeof(*bench));
	enum kv_status status;

	if (!bench)
		return kv_fail(err, KV_NO_MEMORY, "no memory for a measurement");
	bench->rig.ctl = ctl;
	srv_interrupt_catch();
	status = prepare(bench, err);
	if (status == KV_OK)
		status = srv_bench_run(&bench->rig, 0, make_rows, measure, bench, err);
	if (status == KV_OK)
		print(bench);
	srv_percentile_finish(&bench->echoes);
	srv_temp_pool_finish(&bench->rig.pool);
	kv_free(bench->rows);
	kv_free(bench);
	return status;
}

const struct srv_command srv_cmd_bench_ingest = {
	.name = "bench ingest",
	.summary = "rows into the daemon from one client, beside an echo of as many bytes",
	.details = "Makes a pool of one layer, appends bf16 rows to one sequence with several frames in "
		   "flight, and\n"
		   "measures echoes whose payload is as large as a frame of rows. Deletes the pool.",
	.args = args,
	.n_args = N_ARGS,
	.run = run_bench_ingest,
};
